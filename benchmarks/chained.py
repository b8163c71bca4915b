"""Measures programs of many small nodes: chains on one mesh, pipelines over hosts.

A chain is 128 computations, each a node of its own, as one ``fairway.program``: an all-reduce of
one scalar per device followed by an addition, on one device the addition alone. Its peer is
multi-controller JAX that launches the same computations one by one. Fairway op by op, and the 128
in one ``jit``, are measured for context.

A pipeline has one stage on each host, a small computation that sends 4 KiB to the next. It is also
one program, run by a server that dispatches all stages at once (parallel dispatch), and by one that
dispatches a stage after the one before it was issued to its devices (sequential dispatch). Runs are
apart, all with the same input, or in turn, each with the output of the one before.

Source: PATHWAYS §5.1 (Chained), §5.2 (Figure 7). Differs from the paper: on CPUs of one machine,
where all hosts and the controller share the cores.

Goal: chained, 1.3 of multi-controller JAX op by op.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    Goal,
    Spread,
    interleave,
    provenance,
    ratios,
    run_main,
    write_json,
)
from dispatch import Island, System, Work, client, fairway, plain_jax
from dispatch_client import FUSED
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

CHAINS = (Island(1, 1), Island(2, 1), Island(2, 2))
PIPELINES = ("1x4x1", "4x1x1", "1x8x1", "8x1x1")
"""Islands x hosts x devices; a stage on each device."""
QUICK = ("2x2", "1x4x1")
CHAINED, PLAIN = "chained", "JAX op by op"
SIDES = {
    CHAINED: ("fairway", "chained"),
    PLAIN: ("jax", "op"),
    "op by op": ("fairway", "op"),
    "in one jit": ("fairway", "fused"),
}
"""Systems and their work, by name, for chains."""
DISPATCHES = ("parallel", "sequential")
PIPELINE_WORKS = ("apart", "in turn")
FIRST_RUNS = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """Rates of one kind of work on one layout; the first is compared with the second.

    Attributes:
        work: kind of work.
        layout: islands or hosts and their devices.
        rates: computations per second; the ratio is of the first to the second.
        goal: required ratio.
    """

    work: str
    layout: str
    rates: Mapping[str, Spread]
    goal: Goal | None = None

    @property
    def ratio(self) -> Spread:
        """Returns the first rate over the second, round by round."""
        ours, theirs, *_ = self.rates.values()
        return ratios(ours, theirs)

    def as_json(self) -> dict[str, Any]:
        """Returns all data as JSON."""
        first, second, *_ = self.rates
        return {
            "work": self.work,
            "layout": self.layout,
            "computations_per_s": {name: rate.as_json() for name, rate in self.rates.items()},
            f"{first} over {second}": self.ratio.as_json(),
            "goal": self.goal.least if self.goal else None,
        }

    def cells(self) -> list[str]:
        """Returns the row of the table."""
        rates = [f"{rate.show(',.0f')}  {name}" for name, rate in self.rates.items()]
        verdict = self.goal.verdict(self.ratio.median) if self.goal else ""
        return [self.work, self.layout, "\n".join(rates), self.ratio.show(), verdict]


@dataclasses.dataclass
class Bench:
    """State that all measurements share.

    Attributes:
        rounds: rounds of each layout.
        round_s: approximate time of each system in a round.
        order: random source of the order of systems.
    """

    rounds: int
    round_s: float
    order: random.Random

    def chains(self, island: Island) -> Iterator[Row]:
        """Measures chains on one island."""
        with contextlib.ExitStack() as stack:
            systems = {
                "jax": plain_jax(stack, island),
                "fairway": fairway(stack, island, chained=True),
            }
            prepare(systems)
            sides = {name: (systems[system], work) for name, (system, work) in SIDES.items()}
            rates = self._measure(sides)
        yield Row(f"chain of {FUSED}", str(island), rates, Goal(1.3, "of JAX"))

    def pipelines(self, islands: str) -> Iterator[Row]:
        """Measures pipelines over these islands, with one device for each stage."""
        with contextlib.ExitStack() as stack:
            systems = {name: pipeline(stack, islands, name) for name in DISPATCHES}
            prepare(systems)
            for work in PIPELINE_WORKS:
                sides = {name: (system, work) for name, system in systems.items()}
                yield Row(f"pipeline, {work}", islands, self._measure(sides))

    def _measure(self, sides: Mapping[str, tuple[System, str]]) -> dict[str, Spread]:
        turns: dict[str, Callable[[], float]] = {}
        for name, (system, work) in sides.items():
            count = system.count_for(work, self.round_s)
            turns[name] = functools.partial(system.rate, work, count)
        return interleave(turns, self.rounds, self.order)


def prepare(systems: Mapping[str, System]) -> None:
    """Compiles all programs and checks their results."""
    for do in ("compile", "check"):
        for system in systems.values():
            system.everyone(do=do)


def pipeline(stack: contextlib.ExitStack, islands: str, dispatch: str) -> System:
    """Starts a server with this kind of dispatch, and a client that runs pipelines."""
    run = stack.enter_context(Run(Settings.parse(islands, dispatch=dispatch)))
    worker = stack.enter_context(client(run.environment, script="pipeline_client.py"))
    return System([worker], dict.fromkeys(PIPELINE_WORKS, Work(stages(islands), FIRST_RUNS)))


def stages(islands: str) -> int:
    """Returns the number of devices of these islands."""
    return sum(island.hosts * island.devices for island in Settings.parse(islands).islands)


def show(rows: Sequence[Row]) -> None:
    """Prints the table."""
    table = Table(title="Computations per second: median, lowest and highest of the rounds")
    for name in ("work", "layout", "computations/s", "first over second", "goal"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row.cells(), end_section=True)
    Console(width=120 if not sys.stdout.isatty() else None).print(table)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws medians as bars, with whiskers from the lowest to the highest round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works = list(dict.fromkeys(row.work for row in rows))
    figure, panels = pyplot.subplots(
        1, len(works), figsize=(4.5 * len(works), 4), layout="constrained", squeeze=False
    )
    for axes, work in zip(panels[0], works, strict=True):
        shown = [row for row in rows if row.work == work]
        names = list(shown[0].rates)
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            rates = [row.rates[name] for row in shown]
            heights = [rate.median for rate in rates]
            low = [rate.median - min(rate.values) for rate in rates]
            high = [max(rate.values) - rate.median for rate in rates]
            at = [index + (place - (len(names) - 1) / 2) * width for index in range(len(shown))]
            axes.bar(at, heights, width, yerr=[low, high], capsize=2, label=name)
        axes.set_xticks(range(len(shown)), [row.layout for row in shown])
        axes.set(title=work, ylabel="computations per second", yscale="log")
        axes.legend(fontsize="small")
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*map(str, CHAINS), *PIPELINES]
    parser.add_argument("--only", help=f"layouts to measure, of {','.join(names)}")
    parser.add_argument("--quick", action="store_true", help="few layouts and short rounds")
    parser.add_argument("--rounds", type=int, help="rounds of each layout")
    parser.add_argument("--seed", type=int, default=0, help="decides the order in each round")
    given = parser.parse_args()
    given.layouts = given.only.split(",") if given.only else QUICK if given.quick else names
    if unknown := set(given.layouts) - set(names):
        parser.error(f"there is no layout {', '.join(sorted(unknown))}; there are {names}")
    given.rounds = given.rounds or (3 if given.quick else 7)
    given.round_s = 0.15 if given.quick else 0.3
    return given


def main() -> None:
    """Measures, prints, draws ``out/chained.png`` and writes ``out/chained.json``."""
    given = arguments()
    about = provenance(given.seed, "jax", "jaxlib", "numpy")
    bench = Bench(given.rounds, given.round_s, random.Random(given.seed))
    measurements = [
        *((str(island), bench.chains(island)) for island in CHAINS),
        *((islands, bench.pipelines(islands)) for islands in PIPELINES),
    ]
    chosen = [(layout, measured) for layout, measured in measurements if layout in given.layouts]
    rows = []
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for layout, measured in chosen:
            progress.update(task, description=layout)
            for row in measured:
                rows.append(row)
                progress.console.print(row.work, row.layout, row.ratio.show(), sep="  ")
            progress.advance(task)
    show(rows)
    path = write_json("chained.json", {**about, "rows": [row.as_json() for row in rows]})
    plot(rows, path.with_suffix(".png"))
    print(f"and {path.stem}.png")


if __name__ == "__main__":
    run_main(main)
