"""Compares clients of another machine, by TLS, with clients on the controller's machine.

The other machine is a network namespace, on a link of unlimited rate; without root it is this
machine, and the gateway is on its loopback interface. Client, both ends of TLS, controller and host
share the cores of one machine, so that encryption takes time from all of them.

Goals: small operations 0.7 of the loopback client's rate, transfers of 64 MiB 0.8.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

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

WORKS = {
    "operations": ("small operations", 1.0, "/s", 0.7),
    "round_trips": ("round trips", 1.0, "/s", 0.7),
    "up": ("to the device", 1e6, " MB/s", 0.8),
    "down": ("from the device", 1e6, " MB/s", 0.8),
}
"""Name of each work, the unit of its rate, and the goal."""


@contextlib.contextmanager
def machine() -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the command prefix of the other machine, and the address of this one there."""
    if not wires.can_join():
        yield (), "127.0.0.1"
        return
    with wires.joined(1, (None,)) as [place]:
        address = place.addresses[0].format(rank=0)
        prefix = tuple(word.format(rank=0) for word in place.prefix)
        yield prefix, f"{address.rpartition('.')[0]}.254"


@contextlib.contextmanager
def connected(prefix: tuple[str, ...], run: Run) -> Iterator[dict[str, str]]:
    """Yields what clients on the other machine need, as long as ``fairway connect`` runs there."""
    assert run.gateway is not None
    token = run.gateway.create_token("client", None)
    command = [*prefix, sys.executable, "-m", "fairway", "connect", *run.gateway.addresses]
    with tempfile.TemporaryDirectory(prefix="fw-") as runtime:
        environment = {**os.environ, "FAIRWAY_TOKEN": token, "XDG_RUNTIME_DIR": runtime}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as connection:
            assert connection.stdout is not None
            lines = connection.stdout.readline() + connection.stdout.readline()
            yield dict(re.findall(r"export (\w+)=(\S+)", lines))
            connection.terminate()


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured")
    parser.add_argument("--mebibytes", type=int, default=64, help="of a transfer")
    parser.add_argument("--seed", type=int, default=1, help="of the order in each round")
    given = parser.parse_args()
    table = Table(title="Median, lowest and highest of the rounds")
    for name in ("work", "on the controller's machine", "by TLS", "ratio", "goal"):
        table.add_column(name)
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        prefix, address = stack.enter_context(machine())
        run = stack.enter_context(Run(Settings.parse("1x1x1", gateway=f"{address}:0")))
        plain = environment_without(*SETTINGS_OF_JAX)
        client = [sys.executable, "remote_client.py"]
        near = stack.enter_context(Worker(client, {**plain, **run.environment}))
        there = stack.enter_context(connected(prefix, run))
        far = stack.enter_context(Worker([*prefix, *client], {**plain, **there}))
        sides = {"near": near, "far": far}
        for worker in sides.values():
            worker.ask(do="prepare", mebibytes=given.mebibytes)
        order = random.Random(given.seed)
        for work, (name, unit, shown, least) in WORKS.items():
            turns: dict[str, Callable[[], float]] = {
                side: partial(worker.ask, do=work) for side, worker in sides.items()
            }
            rates = interleave(turns, given.rounds, order)
            ratio, goal = ratios(rates["far"], rates["near"]), Goal(least, "of loopback")
            columns = [f"{rates[side].median / unit:,.0f}{shown}" for side in ("near", "far")]
            table.add_row(name, *columns, ratio.show(), goal.verdict(ratio.median))
            found[work] = {side: rate.as_json() for side, rate in rates.items()}
    Console(width=140).print(table)
    write_json("remote.json", {"provenance": provenance(given.seed, "jax", "jaxlib"), **found})


if __name__ == "__main__":
    run_main(main)
