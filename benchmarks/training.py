"""Compares the example's training through Fairway with plain JAX: equal losses, and throughput.

`examples/train_lm.py` runs in one process on eight CPU devices, and as a client of two islands of
four, with the same seed; its losses are compared step by step, its rate of tokens round by round.
Both run the same XLA programs on the same cores, so any loss of throughput is Fairway's overhead.

Goal: losses equal to 1e-5, relative, at every step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    ROOT,
    SETTINGS_OF_JAX,
    Spread,
    environment_without,
    interleave,
    provenance,
    ratios,
    write_json,
)
from rich.console import Console
from rich.table import Table

EXCHANGES = ("device_put", "psum")
ISLANDS = "2x1x4"
LARGEST_DIFFERENCE = 1e-5


@dataclasses.dataclass
class Trained:
    """Results of one system's runs.

    Attributes:
        command: prefix of the script.
        environment: additional variables of the run.
        losses: those of the last run, by step.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    losses: list[float] = dataclasses.field(default_factory=list)

    def run(self, exchange: str, steps: int) -> float:
        """Trains once; returns tokens per second."""
        with tempfile.TemporaryDirectory() as out:
            arguments = ["--steps", str(steps), "--exchange", exchange, "--out", out]
            subprocess.run(
                [*self.command, str(ROOT / "examples/train_lm.py"), *arguments],
                env={**environment_without(*SETTINGS_OF_JAX), **self.environment},
                stdout=subprocess.DEVNULL,
                check=True,
            )
            report = json.loads((Path(out) / "train_lm.json").read_text())
        self.losses = report["losses"]
        return float(report["tokens_per_second"])


@dataclasses.dataclass(frozen=True)
class Row:
    """Results for one exchange of gradients."""

    exchange: str
    rates: Mapping[str, Spread]
    differences: Sequence[float]

    @property
    def worst(self) -> float:
        """Largest relative difference between the losses of a step."""
        return max(self.differences)

    def as_json(self) -> dict[str, Any]:
        """Returns all data as JSON."""
        return {
            "exchange": self.exchange,
            "tokens_per_s": {name: rate.as_json() for name, rate in self.rates.items()},
            "fairway_over_jax": ratios(self.rates["fairway"], self.rates["jax"]).as_json(),
            "steps": len(self.differences),
            "largest_relative_difference": self.worst,
        }


def measure(exchange: str, steps: int, rounds: int, order: random.Random) -> Row:
    """Trains with both systems in turn."""
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    systems = {
        "jax": Trained([sys.executable], devices),
        "fairway": Trained([sys.executable, "-m", "fairway", "run", "--islands", ISLANDS], {}),
    }
    turns = {
        name: (lambda system=system: system.run(exchange, steps))
        for name, system in systems.items()
    }
    rates = interleave(turns, rounds, order)
    plain, ours = systems["jax"].losses, systems["fairway"].losses
    differences = [abs(b - a) / abs(a) for a, b in zip(plain, ours, strict=True)]
    return Row(exchange, rates, differences)


def show(rows: Sequence[Row]) -> None:
    """Prints the table."""
    table = Table(title="Tokens per second: median, lowest and highest of the rounds")
    columns = (
        "exchange",
        "Fairway",
        "plain JAX",
        "of JAX",
        "largest difference of a loss",
        "≤ 1e-5",
    )
    for name in columns:
        table.add_column(name)
    for row in rows:
        ours, theirs = row.rates["fairway"], row.rates["jax"]
        table.add_row(
            row.exchange,
            ours.show(",.0f"),
            theirs.show(",.0f"),
            ratios(ours, theirs).show(),
            f"{row.worst:.1e} in {len(row.differences)} steps",
            "[green]pass[/]" if row.worst <= LARGEST_DIFFERENCE else "[red]miss[/]",
        )
    Console(width=150 if not sys.stdout.isatty() else None).print(table)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20 steps")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each system")
    parser.add_argument("--exchange", choices=EXCHANGES, help="only this way")
    parser.add_argument("--seed", type=int, default=0, help="decides the order in each round")
    given = parser.parse_args()
    given.steps = 20 if given.quick else given.steps
    return given


def main() -> None:
    """Measures, prints and writes ``out/training.json``; fails if losses differ."""
    given = arguments()
    about = provenance(given.seed, "jax", "jaxlib", "flax", "optax")
    order = random.Random(given.seed)
    chosen = [given.exchange] if given.exchange else EXCHANGES
    rows = [measure(exchange, given.steps, given.rounds, order) for exchange in chosen]
    show(rows)
    write_json("training.json", {**about, "rows": [row.as_json() for row in rows]})
    if any(row.worst > LARGEST_DIFFERENCE for row in rows):
        raise SystemExit(os.EX_DATAERR)


if __name__ == "__main__":
    main()
