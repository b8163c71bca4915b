"""Inputs of scripts that the command line runs, and the example that trains with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import fairway, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array([d for d in jax.devices() if d.island == 0]), ("x",))
like = jax.ShapeDtypeStruct((4,), np.int32, sharding=NamedSharding(mesh, P("x")))
print(np.asarray(fairway.inputs("beside:ones", like=like, value=3)()).tolist())
"""
BESIDE = """
import itertools, numpy as np
def ones(shard, value):
    return itertools.repeat(np.full(4 // shard.count, value, np.int32))
"""


def fairway(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fairway", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_modules_beside_a_script_are_found(own_runtime: Path) -> None:
    (own_runtime / "code").mkdir()
    (own_runtime / "code" / "script.py").write_text(SCRIPT)
    (own_runtime / "code" / "beside.py").write_text(BESIDE)
    script = own_runtime / "code" / "script.py"
    result = fairway("run", "--islands", "1x2x1", script, folder=own_runtime)
    assert (result.returncode, result.stdout) == (0, "[3, 3, 3, 3]\n"), result.stderr
    config = own_runtime / "closed.toml"
    config.write_text('islands = "1x1x1"\ninput_modules = ["other"]\n')
    result = fairway("run", "--config", config, script, folder=own_runtime)
    assert result.returncode != 0
    assert "PERMISSION_DENIED" in result.stderr
    assert "the setting input_modules allows ['other']" in result.stderr


@pytest.mark.timeout(450)
def test_the_example_trains_alike(own_runtime: Path) -> None:
    """Batches made on hosts give the losses of batches made in the client, bit for bit."""
    losses = []
    for made in ("client", "host"):
        out = own_runtime / made
        small = ("--steps", "4", "--batch", "8", "--sequence", "16", "--width", "32")
        options = ("--layers", "1", *small, "--input", made, "--out", out)
        script = ROOT / "examples" / "train_lm.py"
        result = fairway("run", "--islands", "2x2x1", script, *options, folder=own_runtime)
        assert result.returncode == 0, result.stderr + result.stdout
        losses.append(json.loads((out / "train_lm.json").read_text())["losses"])
    assert len(losses[0]) == 4
    assert np.isfinite(losses[0]).all()
    assert losses[0] == losses[1]
