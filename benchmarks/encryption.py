"""Compares encrypted streams between hosts with plain ones.

Two islands of one host and one device each, in network namespaces joined by a link of unlimited
rate; without root, on the loopback interface. Both hosts share the cores of one machine, so that
encrypting and decrypting take time from each other, and from the kernel's copies.

Goal: encrypted 0.5 of plain.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator

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

WORKS = {"moves": "arrays sent both ways, and added", "psum": "psum over both islands"}
TIMES = 3
RATE_MBIT = 100_000
"""Said of the link, which has none."""


@contextlib.contextmanager
def machines() -> Iterator[Settings]:
    """Yields settings of two islands, on two machines if they can be made."""
    if not wires.can_join():
        yield Settings.parse("2x1x1", data_plane="tcp")
        return
    with wires.joined(2, (None,)) as places:
        yield Settings(wires.islands(places, (RATE_MBIT,)))


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured")
    parser.add_argument("--mebibytes", type=int, default=64, help="of an array on an island")
    parser.add_argument("--seed", type=int, default=1, help="of the order in each round")
    given = parser.parse_args()
    table = Table(title="Works a second: median, lowest and highest of the rounds")
    for name in ("work", "plain", "encrypted", "ratio", "goal"):
        table.add_column(name)
    found = {}
    order = random.Random(given.seed)
    with contextlib.ExitStack() as stack:
        settings = stack.enter_context(machines())
        workers = {}
        for name, encryption in (("plain", "off"), ("encrypted", "on")):
            run = stack.enter_context(Run(settings.replace(encryption=encryption)))
            environment = {**environment_without(*SETTINGS_OF_JAX), **run.environment}
            command = [sys.executable, "across_client.py"]
            workers[name] = stack.enter_context(Worker(command, environment))
            workers[name].ask(do="prepare", elements=given.mebibytes << 18)
        for work, shown in WORKS.items():
            turns: dict[str, Callable[[], float]] = {
                name: functools.partial(worker.ask, do="run", way=work, times=TIMES)
                for name, worker in workers.items()
            }
            rates = interleave(turns, given.rounds, order)
            ratio, goal = ratios(rates["encrypted"], rates["plain"]), Goal(0.5, "of plain")
            columns = [rates[name].show() for name in workers]
            table.add_row(shown, *columns, ratio.show(), goal.verdict(ratio.median))
            found[work] = {name: rate.as_json() for name, rate in rates.items()}
    Console(width=140).print(table)
    write_json("encryption.json", {"provenance": provenance(given.seed, "jax", "jaxlib"), **found})


if __name__ == "__main__":
    run_main(main)
