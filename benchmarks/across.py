"""Compares sums over islands on two slow networks: `psum`, and arrays transferred to all and added.

Hosts are in network namespaces, joined by networks of 200 and 100 Mbit/s; islands have one host and
one device each. `psum` uses the first network alone or both. Needs root.

Goals: both networks 1.4 of the first alone, which has two thirds of the rate; `psum` no slower than
transfers, and on four islands 1.8 times faster, since it transfers half the bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import sys
from collections.abc import Callable

import wires
from common import (
    SETTINGS_OF_JAX,
    Goal,
    Worker,
    environment_without,
    interleave,
    provenance,
    ratios,
    run_main,
    write_json,
)
from rich.console import Console
from rich.table import Table

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

MBIT = (200, 100)
ELEMENTS = 1 << 20
TIMES = 5
BOTH, ONE, MOVES = "psum, both networks", "psum, the first", "moves, the first"
SYSTEMS = {BOTH: (2, "psum"), ONE: (1, "psum"), MOVES: (1, "moves")}
"""Number of networks of each system, and its strategy."""


def main() -> None:
    """Measures on two and four islands and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured")
    parser.add_argument("--seed", type=int, default=1, help="of the order in each round")
    given = parser.parse_args()
    if not wires.can_join():
        raise SystemExit("network namespaces need root")
    table = Table(title="Sums of 4 MiB a second: median, lowest and highest of the rounds")
    for name in ("islands", *SYSTEMS, "both / one", "psum / moves", "goals"):
        table.add_column(name)
    found = {}
    for islands in (2, 4):
        with contextlib.ExitStack() as stack:
            places = stack.enter_context(wires.joined(islands, [rate * 1_000_000 for rate in MBIT]))
            systems: dict[str, Callable[[], float]] = {}
            for name, (networks, way) in SYSTEMS.items():
                known = Settings(wires.islands(places, MBIT[:networks]))
                run = stack.enter_context(Run(known))
                environment = {**environment_without(*SETTINGS_OF_JAX), **run.environment}
                worker = stack.enter_context(
                    Worker([sys.executable, "across_client.py"], environment)
                )
                worker.ask(do="prepare", elements=ELEMENTS)
                systems[name] = functools.partial(worker.ask, do="run", way=way, times=TIMES)
            rates = interleave(systems, given.rounds, random.Random(given.seed))
        both, fewer = ratios(rates[BOTH], rates[ONE]), ratios(rates[ONE], rates[MOVES])
        goals = Goal(1.4, "both"), Goal({2: 0.95, 4: 1.8}[islands], "psum")
        verdicts = [
            goal.verdict(ratio.median) for goal, ratio in zip(goals, (both, fewer), strict=True)
        ]
        shown = [rates[name].show() for name in SYSTEMS]
        table.add_row(str(islands), *shown, both.show(), fewer.show(), "\n".join(verdicts))
        found[str(islands)] = {name: rate.as_json() for name, rate in rates.items()}
    Console(width=140).print(table)
    write_json("across.json", {"provenance": provenance(given.seed, "jax", "jaxlib"), **found})


if __name__ == "__main__":
    run_main(main)
