"""Compares predictions of ``fairway.place`` for a language model on two islands with measurements.

Islands are hosts with four devices each, in network namespaces joined by a network of a given rate;
blocks take a set time for each row. Needs root.

Goals: the strategy that is predicted to be best is the best, or within 3 % of it; strategies are
ranked as they are measured (Kendall's tau 0.8).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys

import wires
from common import SETTINGS_OF_JAX, Worker, environment_without, provenance, run_main, write_json
from paced import ALLOWED
from rich.console import Console
from rich.table import Table

from fairway.cluster.supervisor import Run
from fairway.settings import IslandSettings, Settings

DEVICES = 4
MODEL = {"blocks": 6, "width": 128, "sequence": 16, "rows": 64, "row_s": 4e-3, "seed": 1}


def tau(predicted: list[float], measured: list[float]) -> float:
    """Returns Kendall's tau: concordant less discordant pairs, as a fraction of all."""
    pairs = list(itertools.combinations(zip(predicted, measured, strict=True), 2))
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in pairs]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / len(signs)


def main() -> None:
    """Predicts, measures and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 1000], help="of the network")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of each round")
    given = parser.parse_args()
    if not wires.can_join():
        raise SystemExit("network namespaces need root")
    found = {}
    for mbit in given.mbit:
        # A millisecond's worth: activations are small, and must not pass within the burst.
        burst_bytes = max(16 << 10, mbit * 1_000_000 // 8 // 1_000)
        with wires.joined(2, [mbit * 1_000_000], burst_bytes=burst_bytes) as places:
            islands = tuple(
                IslandSettings(1, DEVICES, place.prefix, place.addresses[0]) for place in places
            )
            with Run(Settings(islands, data_plane="both", **ALLOWED)) as run:
                environment = {**environment_without(*SETTINGS_OF_JAX), **run.environment}
                command = [sys.executable, "placed_client.py"]
                with Worker(command, environment) as worker:
                    found[mbit] = compare(worker, mbit, given.rounds, given.steps)
    write_json("placed.json", {"provenance": provenance(1, "jax", "jaxlib"), "found": found})


def compare(worker: Worker, mbit: int, rounds: int, steps: int) -> list[dict[str, object]]:
    """Measures all strategies on a network of this rate."""
    strategies = worker.ask(do="place", **MODEL)
    rows = []
    for number, strategy in enumerate(strategies):
        loss = worker.ask(do="start", strategy=number)
        took = [worker.ask(do="run", steps=steps) for _ in range(rounds)]
        rows.append({**strategy, "loss": loss, "measured_s": took})
        print(
            f"{strategy['name']}: predicted {strategy['step_s']:.3f} s, measured {took}", flush=True
        )
    measured = [statistics.median(row["measured_s"]) for row in rows]
    predicted = [row["step_s"] for row in rows]
    table = Table(
        "strategy", "predicted", "measured", "error", title=f"{mbit} Mbit/s, seconds of a step"
    )
    for row, middle in zip(rows, measured, strict=True):
        spread = f"{middle:.3f} [{min(row['measured_s']):.3f}..{max(row['measured_s']):.3f}]"
        error = f"{100 * (row['step_s'] / middle - 1):+.1f} %"
        table.add_row(row["name"], f"{row['step_s']:.3f}", spread, error)
    console = Console(width=100)
    console.print(table)
    best = measured[0] / min(measured)
    console.print(
        f"the strategy that is predicted to be best takes {best:.3f} of the best that was measured "
        f"(goal 1.03); Kendall's tau is {tau(predicted, measured):.2f} (goal 0.8)"
    )
    return rows


if __name__ == "__main__":
    run_main(main)
