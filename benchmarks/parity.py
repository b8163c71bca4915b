"""Measures how small computations may be for a single controller to match multi-controller JAX.

Rates of computations of growing size, each fed by the last: a client of Fairway, compared with JAX
with a process on each host. Fairway's overhead is hidden from the smallest size at which it keeps
0.98 of JAX's rate for all larger ones.

Source: PATHWAYS §5.1, Figure 6. Differs from the paper: 1. CPU devices of one machine, whose cores
client and controller need too. 2. Two hosts with two devices; the simulation has more (``fairway
reproduce pathways``). 3. Computations are those of ``tenancy.py``, launched one by one and also
with whole programs.

Goal: 1 ms at two hosts.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from typing import Any

from common import ROOT, Goal, provenance, run_main, write_json
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tenancy import CHAIN, FORMS, ISLANDS, Bench, Throughput

SIZES_MS = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)
"""Device time of one computation, without its collective."""
PARITY = 0.98
GOAL_MS = 1.0
WAYS = {f"1{form}": "whole programs" if chain == CHAIN else "op by op"
        for form, chain in FORMS.items()}  # fmt: skip
"""Display names of the dispatch modes, by those of the measurement."""


def parity_ms(found: Sequence[Throughput], way: str) -> float | None:
    """Returns the smallest size from which a dispatch mode keeps parity; None if it never does."""
    smallest = None
    for row in sorted(found, key=lambda row: -row.size_ms):
        if row.ratio(way).median < PARITY:
            break
        smallest = row.size_ms
    return smallest


def show(found: Sequence[Throughput], console: Console) -> None:
    """Prints the table, and the parity of each dispatch mode."""
    table = Table(title="Rate of JAX's, by device time of one computation: median, lowest, highest")
    for name in ("computation", "JAX, a second", *WAYS.values()):
        table.add_column(name)
    for row in found:
        ratios = (row.ratio(way).show() for way in WAYS)
        table.add_row(f"{row.size_ms:g} ms", row.rates["jax"].show(",.0f"), *ratios)
    console.print(table)
    for way, name in WAYS.items():
        smallest = parity_ms(found, way)
        verdict = Goal(1.0, f"of {GOAL_MS:g} ms").verdict(GOAL_MS / smallest if smallest else 0.0)
        text = f"{smallest:g} ms" if smallest else f"none up to {max(SIZES_MS):g} ms"
        console.print(f"{name}: smallest that reaches {PARITY} of JAX: {text}  {verdict}")


def draw(found: Sequence[Throughput]) -> None:
    """Draws the ratios over the sizes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for way, name in WAYS.items():
        ratios = [row.ratio(way) for row in found]
        middle = [ratio.median for ratio in ratios]
        low = [ratio.median - min(ratio.values) for ratio in ratios]
        high = [max(ratio.values) - ratio.median for ratio in ratios]
        sizes = [row.size_ms for row in found]
        axes.errorbar(sizes, middle, (low, high), marker="o", capsize=3, label=name)
    axes.axhline(PARITY, color="grey", lw=0.8, ls="--")
    axes.axvline(GOAL_MS, color="grey", lw=0.8, ls=":")
    axes.set_xscale("log")
    axes.set_xlabel("device time of one computation, ms")
    axes.set_ylabel("rate of multi-controller JAX's")
    axes.set_title("Fairway and multi-controller JAX on 2 hosts (measured)", fontsize=9)
    axes.legend(fontsize=8)
    canvas.savefig(ROOT / "out/parity.png", dpi=140)
    pyplot.close(canvas)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [str(island) for island in ISLANDS]
    parser.add_argument("--island", choices=names, default=names[-1], help="hosts x devices")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each size")
    parser.add_argument("--seed", type=int, default=0, help="decides the order in each round")
    given = parser.parse_args()
    given.island = next(island for island in ISLANDS if str(island) == given.island)
    return given


def main() -> None:
    """Measures, prints and writes ``out/parity.json`` and ``out/parity.png``."""
    given = arguments()
    about = provenance(given.seed, "jax", "jaxlib", "numpy")
    console = Console(width=120 if not sys.stdout.isatty() else None)
    with Progress(console=console, transient=True) as progress:
        order = random.Random(given.seed)
        bench = Bench(given.island, given.rounds, 1.0, 0.0, order, progress)
        found = bench.throughput((1,), SIZES_MS)
    show(found, console)
    draw(found)
    smallest: dict[str, Any] = {name: parity_ms(found, way) for way, name in WAYS.items()}
    rows = [row.as_json() for row in found]
    write_json("parity.json", {**about, "island": str(given.island), "rows": rows,
                               "parity_ms": smallest, "goal_ms": GOAL_MS})  # fmt: skip


if __name__ == "__main__":
    run_main(main)
