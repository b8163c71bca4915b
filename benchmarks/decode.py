"""Measures loops that read each result before the next launch: generation of tokens.

A small transformer with a cache of keys and values generates one token a launch, on one device, and
the client reads each token, as a server that streams its answers does. The position is a part of
the state on the device. A step takes a set time (``paced.py``), as on an accelerator. The peer is
plain JAX in one process, on the same work. And how long one small array takes to read that has been
computed.

Source: PATHWAYS names no figure; users of Pathways on Cloud report 0.44 to 0.60 of in-process JAX
for such loops. Goal: 0.9 at 10 ms a token.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Mapping
from typing import Any

import paced
from common import Goal, Spread, Worker, interleave, provenance, ratios, run_main, write_json
from dispatch import client
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

STEPS_MS = (5.0, 10.0, 20.0)
GOALS = {10.0: Goal(0.9, "of JAX")}
READS = 300


def measure(
    workers: Mapping[str, Worker], step_ms: float, given: argparse.Namespace
) -> dict[str, Spread]:
    """Returns the tokens per second of each system, of the same tokens."""
    first = {name: worker.ask(do="compile", step_ms=step_ms) for name, worker in workers.items()}
    if len({tuple(tokens) for tokens in first.values()}) > 1:
        raise RuntimeError(f"the systems generate different tokens: {first}")
    ask = {
        name: functools.partial(worker.ask, do="rate", step_ms=step_ms, tokens=given.tokens)
        for name, worker in workers.items()
    }
    return interleave(ask, given.rounds, random.Random(given.seed))


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each step time")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of a sequence")
    parser.add_argument("--seed", type=int, default=0, help="decides the order in each round")
    return parser.parse_args()


def main() -> None:
    """Measures, prints, and writes ``out/decode.json``."""
    given = arguments()
    about = provenance(given.seed, "jax", "jaxlib", "numpy")
    rows: list[dict[str, Any]] = []
    table = Table(title="Tokens per second: median, lowest and highest of the rounds")
    for name in ("step", "Fairway", "plain JAX", "ratio", "goal"):
        table.add_column(name)
    with (
        Run(Settings.parse("1x1x1", **paced.ALLOWED)) as run,
        client(run.environment, script="decode_client.py") as ours,
        client({"JAX_PLATFORMS": "cpu"}, script="decode_client.py") as plain,
    ):
        workers = {"fairway": ours, "jax": plain}
        for step_ms in track(STEPS_MS, transient=True, disable=not sys.stdout.isatty()):
            rates = measure(workers, step_ms, given)
            ratio = ratios(rates["fairway"], rates["jax"])
            goal = GOALS.get(step_ms)
            cells = [f"{step_ms:g} ms", *(rate.show(".1f") for rate in rates.values())]
            table.add_row(*cells, ratio.show(), goal.verdict(ratio.median) if goal else "")
            named = {name: rate.as_json() for name, rate in rates.items()}
            rows.append({"step_ms": step_ms, "tokens_per_s": named, "ratio": ratio.as_json()})
        reads = sorted(ours.ask(do="reads", count=READS))
    console = Console(width=120 if not sys.stdout.isatty() else None)
    console.print(table)
    half, most = reads[len(reads) // 2], reads[len(reads) * 9 // 10]
    console.print(
        f"device_get of a computed scalar: {half:.3f} ms (median of {READS}), 90 % within "
        f"{most:.3f} ms, longest {reads[-1]:.3f} ms"
    )
    write_json("decode.json", {**about, "rows": rows, "reads_ms": reads})


if __name__ == "__main__":
    run_main(main)
