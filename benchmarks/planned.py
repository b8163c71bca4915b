"""Compares training over islands on two slow networks with and without planned collectives.

A decoder-only transformer (see ``pipelines_client.py``) is trained by replicas, and with its
parameters sharded over islands (``fairway.parallel.Sharded``). Hosts are in network namespaces,
joined by networks of 200 and 100 Mbit/s; islands have one host and one device each. Devices
compute, and take as long as if each had its part of ``--gflops`` (``paced.py``). ``fairway run
--plan auto`` and the same without a plan take turns; the losses must be the same. Needs root.

Goals: with a plan, replicas at least 0.99 of without, and 1.05 where parameters are sharded.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import paced
import wires
from common import Goal, Worker, interleave, provenance, ratios, run_main, write_json
from dispatch import client
from rich.console import Console
from rich.table import Table

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

MBIT = (200, 100)
PLANS = ("off", "auto")
WAYS = ("replicas", "sharded")
SETTLING_STEPS = 40
"""Steps after which a plan has been made and adopted."""
LARGEST_DIFFERENCE = 1e-5
"""Allowed relative difference of losses: sums are in another order."""


def start(
    stack: contextlib.ExitStack, set_up: Settings, given: argparse.Namespace
) -> tuple[Run, Worker]:
    """Starts islands with or without plans, and a client that has both strategies ready."""
    run = stack.enter_context(Run(set_up))
    worker: Worker = stack.enter_context(client(run.environment, script="pipelines_client.py"))
    worker.ask(
        do="model", blocks=given.blocks, width=128, sequence=32, rows=4, microbatches=4, seed=0
    )
    worker.ask(do="split", parts=given.blocks, gflops=given.gflops, islands=given.islands)
    for way in WAYS:
        worker.ask(do=way, name=way, islands=given.islands)
    return run, worker


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=4, help="of the transformer, and parts")
    parser.add_argument("--gflops", type=float, default=30.0, help="of all devices together")
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured")
    parser.add_argument("--seed", type=int, default=1, help="of the order in each round")
    given = parser.parse_args()
    if not wires.can_join():
        raise SystemExit("network namespaces need root")
    table = Table(title="Steps a second: median, lowest and highest of the rounds")
    for name in ("training", "as they come", "by a plan", "ratio", "predicted", "goal"):
        table.add_column(name)
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        rates_bps = [rate * 1_000_000 for rate in MBIT]
        places = stack.enter_context(wires.joined(given.islands, rates_bps))
        islands = wires.islands(places, MBIT)
        started = {
            plan: start(stack, Settings(islands, plan=plan, **paced.ALLOWED), given)
            for plan in PLANS
        }
        for way in WAYS:
            losses = {
                plan: worker.ask(do="losses", name=way, steps=SETTLING_STEPS)
                for plan, (_, worker) in started.items()
            }
            for one, other in zip(*losses.values(), strict=True):
                assert math.isclose(one, other, rel_tol=LARGEST_DIFFERENCE), losses

            def rate(way: str, worker: Worker) -> float:
                return int(given.steps) / float(worker.ask(do="round", name=way, steps=given.steps))

            systems: dict[str, Callable[[], float]] = {
                plan: functools.partial(rate, way, worker) for plan, (_, worker) in started.items()
            }
            rates = interleave(systems, given.rounds, random.Random(given.seed))
            ratio = ratios(rates["auto"], rates["off"])
            plans = started["auto"][0].overview()["plans"]
            predicted = plans[-1]["predicted_s"]
            table.add_row(
                way,
                *(rates[plan].show() for plan in PLANS),
                ratio.show("1.3f"),
                "-" if predicted is None else f"{predicted[0] / predicted[1]:.3f}",
                Goal({"replicas": 0.99, "sharded": 1.05}[way], "").verdict(ratio.median),
            )
            found[way] = {plan: rate.as_json() for plan, rate in rates.items()} | {"plans": plans}
    Console(width=140).print(table)
    write_json("planned.json", {"provenance": provenance(given.seed, "jax", "jaxlib"), **found})


if __name__ == "__main__":
    run_main(main)
