"""The example that learns by reinforcement, over islands and under plain JAX."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Islands, Start, client_environment

ROOT = Path(__file__).resolve().parent.parent
STEPS = 40


def reinforce(
    islands: Islands | None, folder: Path, *options: str
) -> tuple[list[float], list[int]]:
    """Runs the example to its end; returns each step's reward and version of the weights."""
    environment = client_environment(islands)
    if islands is None:
        flags = f"{environment['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    small = ("--steps", str(STEPS), "--warmup", "15", "--prompts", "32", "--group", "8")
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples/grpo.py"), *small, *options, "--out", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    versions = [int(version) for version in re.findall(r"version (\d+)", result.stdout)]
    return json.loads((folder / "grpo.json").read_text())["rewards"], versions


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--sync",)], ids=["one step behind", "sync"])
def test_reinforcement_over_islands_earns_what_plain_jax_does(
    start: Start, tmp_path: Path, options: tuple[str, ...]
) -> None:
    wanted, _ = reinforce(None, tmp_path, *options)
    found, versions = reinforce(start("2x1x2"), tmp_path, *options)
    assert found == pytest.approx(wanted, abs=5e-5), "equal to the printed digits"
    behind = 0 if options else 1
    assert versions == [max(0, step - behind) for step in range(STEPS)]
    assert np.mean(found[-8:]) > np.mean(found[:8]) + 0.1, "it learns"
