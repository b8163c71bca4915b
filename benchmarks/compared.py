"""Compares captured steps with their simulation on the machine that they ran on.

Each example is captured over two islands, and ``fairway compare`` simulates its step on a machine
that is fitted on every other measured step. Writes a picture of each.

Goal: the mean step is predicted within 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import provenance, run_main, write_json
from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PROGRAMS = {
    "data parallel": ["train_lm.py"],
    "pipeline": ["pipeline_lm.py"],
    "sharded": ["sharded_lm.py"],
    "experts": ["moe_lm.py"],
    "convolutions": ["train_cnn.py"],
}


def main() -> None:
    """Captures and compares every program in turn, several times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="captures of each program")
    parser.add_argument("--steps", type=int, default=60, help="of each capture")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for pictures")
    given = parser.parse_args()
    given.out.mkdir(exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PROGRAMS}
    for number in range(given.rounds):
        for name in PROGRAMS:
            picture = given.out / f"compared-{name.replace(' ', '-')}.png"
            figures = compare(name, given.steps, picture)
            found[name].append(figures)
            print(f"round {number + 1}, {name}: {error(figures['step']):+.1%}", flush=True)
    table = Table("program", "step, ms", "error of the mean step", "of single steps", "of nodes")
    for name, rounds in found.items():
        errors = [error(figures["step"]) for figures in rounds]
        single = [statistics.median(abs(error(s)) for s in one["steps"]) for one in rounds]
        table.add_row(
            name,
            f"{statistics.median(one['step']['measured_s'] for one in rounds) * 1e3:.0f}",
            ", ".join(f"{one:+.1%}" for one in errors),
            f"{statistics.median(single):.1%}",
            f"{statistics.median(map(apart, rounds)):.1%}",
        )
    Console().print(table)
    write_json("compared.json", {"provenance": provenance(1, "jax", "jaxlib"), "found": found})


def compare(name: str, steps: int, picture: Path) -> dict[str, Any]:
    """Captures a program and compares it; returns the figures."""
    with tempfile.TemporaryDirectory() as folder:
        step, command = str(Path(folder) / "step.fw"), [sys.executable, "-m", "fairway"]
        script = [str(EXAMPLES / PROGRAMS[name][0]), *PROGRAMS[name][1:], "--steps", str(steps)]
        capture = ["capture", "--islands", "2x1x1", "-o", step, *script, "--out", folder]
        subprocess.run([*command, *capture], env=os.environ, stdout=subprocess.DEVNULL, check=True)
        shown = subprocess.run(
            [*command, "compare", step, "--json", "--plot", str(picture)],
            stdout=subprocess.PIPE,
            check=True,
        )
    figures: dict[str, Any] = json.loads(shown.stdout)
    return figures


def error(row: Mapping[str, Any]) -> float:
    """Returns the relative error of a prediction."""
    return float(row["predicted_s"] / row["measured_s"] - 1)


def apart(figures: Mapping[str, Any]) -> float:
    """Returns how far nodes are apart, as a part of their time."""
    nodes = figures["nodes"]
    whole = sum(node["measured_s"] for node in nodes)
    return float(sum(abs(node["predicted_s"] - node["measured_s"]) for node in nodes) / whole)


if __name__ == "__main__":
    run_main(main)
