"""Measures training of a language model in pipeline stages, and over islands joined by a network.

A decoder-only transformer learns characters of Python's standard library. Three measurements:

1. Stages: GPipe and 1F1B with one stage on each host of one island. Each row is compared with two
   stages, and with the ratio that bubbles alone allow, M / (M + S - 1) for M microbatches.
2. Pipelines over islands: the same four stages on hosts of one island, of two islands and of four.
3. Replicas: the same batch on two devices of one island, and on two islands that exchange gradients
   part by part (overlapped); and the same as one jit over both devices.

Islands joined by a network are in separate network namespaces, on links that ``tc tbf`` limits to a
rate; traffic is counted by the kernel. Hosts of one island share memory. Devices compute, and take
as long as if each had its part of ``--gflops`` (``paced.py``): the same in every round, whatever
the load, as long as the machine's cores are faster than that.

Source: PATHWAYS §5.3, Table 2, Figures 10 and 12. Differs from the paper: 1. Devices are CPUs of a
set speed; only transformer blocks take their time, 6 floating-point operations for each parameter
and token. 2. The model is small; each row states the utilisation of its busiest link. 3. Within one
island replicas are tried with XLA's all-reduce and with Fairway's exchange in parts, and the faster
one counts.

Goals: of two stages, 0.98 of what bubbles allow; of one island, 0.97 in stages, 0.972 in replicas.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import paced
import wires
from common import (
    Goal,
    Spread,
    Worker,
    WorkerError,
    interleave,
    provenance,
    ratios,
    run_main,
    write_json,
)
from dispatch import client
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fairway.cluster.supervisor import Run
from fairway.parallel import bubble
from fairway.settings import IslandSettings, Settings

STAGES = (2, 4, 8)
SCHEDULES = ("gpipe", "1f1b")
MEASUREMENTS = ("stages", "islands", "replicas")
PARTS = 8
"""Parts of a replica's gradients (buckets)."""
REPLICA_MICROBATCHES = 4
"""Microbatches of a batch of replicas, which is processed at once."""
STEPS = {"stages": 1, "islands": 2, "replicas": 6}
"""Steps of a round."""
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
PATIENCE_S = 60.0
"""Timeout, long enough for hosts that wait for a core."""
LARGEST_DIFFERENCE = 1e-4
"""Tolerance of the losses of the first steps, relative: all strategies compute the same
training."""
CHECKED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Model:
    """The model and its batch: ``microbatches`` of ``rows`` sequences."""

    blocks: int
    width: int
    sequence: int
    rows: int
    microbatches: int
    seed: int

    def wide(self) -> Model:
        """Returns as many parameters in a quarter of the blocks, where balance matters less."""
        return dataclasses.replace(self, blocks=self.blocks // 4, width=2 * self.width)

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.microbatches * self.rows * self.sequence


class System:
    """Running islands, and the client that trains on them.

    Args:
        islands: number of islands, hosts of each, and devices of each host.
        rate_bps: of the links between islands; None for islands that share memory.
    """

    def __init__(self, stack: contextlib.ExitStack, islands: str, rate_bps: int | None) -> None:
        settings = Settings.parse(
            islands, xla_flags=ONE_THREAD, timeout_s=PATIENCE_S, **paced.ALLOWED
        )
        self.places: list[wires.Place] = []
        if rate_bps is not None:
            count = len(settings.islands)
            self.places = stack.enter_context(wires.joined(count, [rate_bps]))
            wired = [
                IslandSettings(island.hosts, island.devices, place.prefix, place.addresses[0])
                for island, place in zip(settings.islands, self.places, strict=True)
            ]
            settings = settings.replace(islands=tuple(wired), data_plane="both")
        run = stack.enter_context(Run(settings))
        self.client: Worker = stack.enter_context(
            client(run.environment, script="pipelines_client.py")
        )
        self.tokens = 0
        """Tokens of a batch."""
        self.sent_bytes: dict[str, list[int]] = {}
        """Bytes that the busiest link sent in a step, by strategy and round."""

    def rate(self, name: str, steps: int) -> float:
        """Measures tokens per second; records what the busiest link sent."""
        before = [place.sent_bytes() for place in self.places]
        took = float(self.client.ask(do="round", name=name, steps=steps))
        sent = [place.sent_bytes() - b for place, b in zip(self.places, before, strict=True)]
        self.sent_bytes.setdefault(name, []).append(max(sent, default=0) // steps)
        return self.tokens * steps / took


@dataclasses.dataclass(frozen=True)
class Row:
    """A strategy compared with a reference.

    Attributes:
        work: strategy of training.
        layout: islands x hosts x devices.
        tokens_per_s: measured rate, by round.
        reference: rate of the reference, and its name.
        ideal: ratio if bubbles were the only overhead.
        goal: required ratio.
        link: bytes per step on the busiest link, and its utilisation.
    """

    work: str
    layout: str
    tokens_per_s: Spread
    reference: tuple[Spread, str] | None = None
    ideal: float | None = None
    goal: Goal | None = None
    link: tuple[int, float] | None = None

    @property
    def ratio(self) -> Spread | None:
        """Ratio to the reference, round by round."""
        return ratios(self.tokens_per_s, self.reference[0]) if self.reference else None

    def as_json(self) -> dict[str, Any]:
        """Returns all data as JSON."""
        ratio = self.ratio
        return {
            "work": self.work,
            "layout": self.layout,
            "tokens_per_s": self.tokens_per_s.as_json(),
            "reference": self.reference[1] if self.reference else None,
            "ratio": ratio.as_json() if ratio else None,
            "ratio_of_bubbles_alone": self.ideal,
            "goal": self.goal.least if self.goal else None,
            "link_bytes_per_step": self.link[0] if self.link else None,
            "link_busy": self.link[1] if self.link else None,
        }

    def cells(self) -> list[str]:
        """Returns the row of the table."""
        ratio = self.ratio
        return [
            self.work,
            self.layout,
            self.tokens_per_s.show(",.0f"),
            f"{ratio.show('.3f')} of {self.reference[1]}" if ratio and self.reference else "",
            f"{self.ideal:.3f}" if self.ideal is not None else "",
            f"{self.link[0] / 1e6:.1f} MB, {self.link[1]:.0%}" if self.link else "",
            self.goal.verdict(ratio.median) if self.goal and ratio else "",
        ]


@dataclasses.dataclass
class Bench:
    """State that all measurements share.

    Attributes:
        model: the model to train.
        rounds: rounds of each measurement.
        gflops: aggregate compute rate of a system's devices.
        rate_bps: of links between islands.
        schedules: of pipelines.
        order: random source of the order of systems.
        say: shows the current stage.
        notes: other results, by measurement.
    """

    model: Model
    rounds: int
    gflops: float
    rate_bps: int
    schedules: Sequence[str]
    order: random.Random
    say: Callable[[str], None]
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def stages(self) -> Iterator[Row]:
        """Measures pipelines with an increasing number of stages."""
        with contextlib.ExitStack() as stack:
            systems = {f"1x{count}x1": System(stack, f"1x{count}x1", None) for count in STAGES}
            self._split(systems, dict(zip(systems, STAGES, strict=True)), "stages", self.model)
            turns = self._pipelines(systems)
            rates = self._measure("stages", systems, turns)
        for schedule in self.schedules:
            parts = [1 - bubble(schedule, count, self.model.microbatches) for count in STAGES]
            first = rates[f"1x{STAGES[0]}x1", schedule]
            yield Row(f"{schedule}, {STAGES[0]} stages", f"1x{STAGES[0]}x1", first)
            for count, part in list(zip(STAGES, parts, strict=True))[1:]:
                layout, ideal = f"1x{count}x1", part / parts[0]
                yield Row(
                    f"{schedule}, {count} stages",
                    layout,
                    rates[layout, schedule],
                    (first, f"{STAGES[0]} stages"),
                    ideal,
                    Goal(round(0.98 * ideal, 3), "of 2 stages"),
                )

    def islands(self) -> Iterator[Row]:
        """Measures the same pipeline over one island and over several."""
        layouts = {"1x4x1": None, "2x2x1": self.rate_bps, "4x1x1": self.rate_bps}
        with contextlib.ExitStack() as stack:
            systems = {layout: System(stack, layout, rate) for layout, rate in layouts.items()}
            self._split(systems, dict.fromkeys(systems, 4), "islands", self.model.wide())
            rates = self._measure("islands", systems, self._pipelines(systems))
        for schedule in self.schedules:
            one = rates["1x4x1", schedule]
            yield Row(f"{schedule}, 4 stages", "1x4x1", one)
            for layout in list(layouts)[1:]:
                rate = rates[layout, schedule]
                yield Row(
                    f"{schedule}, 4 stages",
                    layout,
                    rate,
                    (one, "one island"),
                    goal=Goal(0.97, "of one island"),
                    link=self._link(systems[layout], schedule, rate),
                )

    def replicas(self) -> Iterator[Row]:
        """Measures the same batch on two devices of one island, and on two islands."""
        with contextlib.ExitStack() as stack:
            systems = {
                "1x2x1": System(stack, "1x2x1", None),
                "2x1x1": System(stack, "2x1x1", self.rate_bps),
            }
            model = dataclasses.replace(self.model, microbatches=REPLICA_MICROBATCHES)
            self._split(systems, dict.fromkeys(systems, PARTS), "replicas", model)
            layouts = {
                "all-reduce": ("1x2x1", 1),
                "shared memory": ("1x2x1", 2),
                "links": ("2x1x1", 2),
            }
            for name, (layout, islands) in layouts.items():
                systems[layout].client.ask(do="replicas", name=name, islands=islands)
            turns = [(layout, name) for name, (layout, _) in layouts.items()]
            compiled = {}
            for layout, system in systems.items():
                compiled[layout] = system.client.ask(do="one_jit", name="one jit")["compile_s"]
                turns.append((layout, "one jit"))
            self.notes["replicas"]["one_jit_compile_s"] = compiled
            rates = self._measure("replicas", systems, turns)
        near = [rates["1x2x1", "all-reduce"], rates["1x2x1", "shared memory"]]
        best = Spread(tuple(max(pair) for pair in zip(*(n.values for n in near), strict=True)))
        yield Row("replicas, XLA's all-reduce", "1x2x1", near[0])
        yield Row("replicas, exchange in parts", "1x2x1", near[1])
        yield Row(
            "replicas, exchange in parts",
            "2x1x1",
            rates["2x1x1", "links"],
            (best, "one island"),
            goal=Goal(0.972, "of one island"),
            link=self._link(systems["2x1x1"], "links", rates["2x1x1", "links"]),
        )

        one, both = rates["1x2x1", "one jit"], rates["2x1x1", "one jit"]
        yield Row("replicas, one jit", "1x2x1", one)
        yield Row(
            "replicas, one jit",
            "2x1x1",
            both,
            (one, "one island"),
            goal=Goal(0.972, "of one island"),
            link=self._link(systems["2x1x1"], "one jit", both),
        )

    def _split(
        self, systems: Mapping[str, System], parts: Mapping[str, int], name: str, model: Model
    ) -> None:
        """Makes the model in every system and splits it."""
        self.say(f"{name}: cutting the model")
        found = {}
        for layout, system in systems.items():
            system.tokens = model.tokens
            system.client.ask(do="model", **dataclasses.asdict(model))
            found[layout] = system.client.ask(
                do="split",
                parts=parts[layout],
                gflops=self.gflops,
                islands=int(layout.split("x")[0]),
            )
        self.notes[name] = {"model": dataclasses.asdict(model), "splits": found}

    def _pipelines(self, systems: Mapping[str, System]) -> list[tuple[str, str]]:
        for system in systems.values():
            for schedule in self.schedules:
                system.client.ask(do="pipeline", schedule=schedule)
        return [(layout, schedule) for layout in systems for schedule in self.schedules]

    def _measure(
        self, name: str, systems: Mapping[str, System], turns: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], Spread]:
        """Measures tokens per second of all strategies, after checking that losses agree."""
        self.say(f"{name}: compiling and checking")
        for layout, way in turns:  # concurrently; each client in order
            systems[layout].client.tell(do="losses", name=way, steps=CHECKED_STEPS)
        losses = {(layout, way): systems[layout].client.answer() for layout, way in turns}
        first, *others = losses.values()
        worst = max(
            abs(loss - wanted) / abs(wanted)
            for other in others
            for loss, wanted in zip(other, first, strict=True)
        )
        if worst > LARGEST_DIFFERENCE:
            raise WorkerError(f"{name}: losses of layouts differ by {worst:.1e}: {losses}")
        self.notes[name] |= {"losses": first, "largest_relative_difference": worst}
        work: dict[str, Callable[[], float]] = {
            "/".join(turn): functools.partial(systems[turn[0]].rate, turn[1], STEPS[name])
            for turn in turns
        }
        self.say(f"{name}: {self.rounds} rounds")
        for warm in work.values():
            warm()
        rates = interleave(work, self.rounds, self.order)
        return {turn: rates["/".join(turn)] for turn in turns}

    def _link(self, system: System, name: str, rate: Spread) -> tuple[int, float]:
        sent = max(system.sent_bytes[name])
        step_s = system.tokens / rate.median
        return sent, sent * 8 / self.rate_bps / step_s


def show(rows: Sequence[Row]) -> None:
    """Prints the table."""
    table = Table(title="Tokens per second: median, lowest and highest of the rounds")
    columns = ("work", "islands x hosts x devices", "tokens/s", "ratio", "bubbles alone")
    for name in (*columns, "busiest link, a step", "goal"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row.cells())
    Console(width=150 if not sys.stdout.isatty() else None).print(table)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"measurements, of {','.join(MEASUREMENTS)}")
    parser.add_argument("--schedules", help=f"of pipelines, of {','.join(SCHEDULES)}")
    parser.add_argument("--quick", action="store_true", help="a small model, two rounds")
    parser.add_argument("--rounds", type=int, help="rounds of each measurement")
    parser.add_argument("--gflops", type=float, default=20.0, help="of all devices together")
    parser.add_argument("--mbit", type=int, default=1000, help="rate of links, in Mbit/s")
    parser.add_argument("--blocks", type=int, default=16, help="transformer blocks")
    parser.add_argument("--width", type=int, default=128, help="of an activation")
    parser.add_argument("--sequence", type=int, default=64, help="characters of a sequence")
    parser.add_argument("--rows", type=int, help="sequences of a microbatch")
    parser.add_argument("--microbatches", type=int, default=16, help="of a batch")
    parser.add_argument("--seed", type=int, default=0, help="of model, text and order of rounds")
    given = parser.parse_args()
    given.measurements = given.only.split(",") if given.only else list(MEASUREMENTS)
    if unknown := set(given.measurements) - set(MEASUREMENTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {MEASUREMENTS}")
    given.schedules = given.schedules.split(",") if given.schedules else list(SCHEDULES)
    if unknown := set(given.schedules) - set(SCHEDULES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {SCHEDULES}")
    given.rounds = given.rounds or (2 if given.quick else 5)
    given.rows = given.rows or (1 if given.quick else 4)
    if {"islands", "replicas"} & set(given.measurements) and not wires.can_join():
        parser.error("namespaces need root, ip and tc; try --only stages")
    return given


def main() -> None:
    """Measures, prints and writes ``out/pipelines.json``."""
    given = arguments()
    about = provenance(given.seed, "jax", "jaxlib", "flax", "optax", "numpy")
    model = Model(
        given.blocks, given.width, given.sequence, given.rows, given.microbatches, given.seed
    )
    rows: list[Row] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(given.measurements))

        def say(what: str) -> None:
            progress.update(task, description=what)
            if not progress.console.is_terminal:
                progress.console.print(what)

        bench = Bench(
            model,
            given.rounds,
            given.gflops,
            given.mbit * 1_000_000,
            given.schedules,
            random.Random(given.seed),
            say,
        )
        for name in given.measurements:
            for row in getattr(bench, name)():
                rows.append(row)
                progress.console.print(*row.cells(), sep="  ")
            progress.advance(task)
    show(rows)
    found = {
        "model": dataclasses.asdict(model),
        "gflops": given.gflops,
        "link_bps": bench.rate_bps,
        "notes": bench.notes,
        "rows": [row.as_json() for row in rows],
    }
    write_json("pipelines.json", {**about, **found})


if __name__ == "__main__":
    run_main(main)
