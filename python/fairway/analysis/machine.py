"""The machine that a captured program ran on: fitted on measured steps, and simulated."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fairway import _native
from fairway.analysis.topologies import read_topology
from fairway.placement.search import simulate_graph
from fairway.report.measured import communications
from fairway.report.steps import Span, StepReport

__all__ = ["FittedMachine", "StepUnits", "Unit", "fit", "simulate"]

KINDS = {"compute": "gang", "transfer": "channel"}
"""Kind of the unit that works on a node; that of collectives is ``exchange``."""


class Unit(NamedTuple):
    """What works on one node at a time.

    Attributes:
        kind: ``gang``, devices that compute together; ``channel``, from one gang to another; or
            ``exchange``, of all gangs that take part.
        gangs: by number.
    """

    kind: str
    gangs: tuple[int, ...]

    def __str__(self) -> str:
        names = [f"gang {gang}" for gang in self.gangs]
        joined = (" to " if self.kind == "channel" else ", ").join(names)
        return f"exchange of {joined}" if self.kind == "exchange" else joined


@dataclasses.dataclass(frozen=True)
class FittedMachine:
    """What a simulation is based on.

    Attributes:
        node_ns: time of each node.
        launch_ns: of each gang, from the end of a computation to the begin of the next one.
        wake_ns: of each channel, from the end of a message to the begin of what it was for.
    """

    node_ns: dict[int, int]
    launch_ns: dict[int, int]
    wake_ns: dict[Unit, int]


def fit(
    graph: _native.StepGraph, measured: StepReport, steps: Iterable[int], longest_ns: float
) -> FittedMachine:
    """Fits a machine on some steps of a measured report.

    Args:
        graph: the step graph.
        measured: its measured report.
        steps: those to fit on.
        longest_ns: a longer wait is a pause of the script, and no launch.
    """
    work = StepUnits(graph)
    ready = work.readiness(measured.steps)
    times: dict[int, list[int]] = defaultdict(list)
    launches: dict[int, list[int]] = defaultdict(list)
    wakes: dict[Unit, list[int]] = defaultdict(list)
    for step in steps:
        for number, span in measured.steps[step].items():
            node, last = work.nodes[number], ready[step][number]
            times[number].append(work.took(number, span, last))
            if node.kind == "compute":
                gang = node.devices[0]
                waited = max(0, span.begin_ns - last.at_ns)
                if waited > longest_ns:
                    continue
                if last.node is None or work.nodes[last.node].kind == "compute":
                    launches[gang].append(waited)
                else:
                    wakes[work.units[last.node]].append(waited)
    return FittedMachine(
        {number: round(statistics.fmean(found)) for number, found in times.items()},
        {gang: round(statistics.fmean(found)) for gang, found in launches.items()},
        {unit: round(statistics.fmean(found)) for unit, found in wakes.items()},
    )


@dataclasses.dataclass(frozen=True)
class Readiness:
    """When all that a node needs was there, and what came last: a node, or what came before it."""

    at_ns: int
    node: int | None


class StepUnits:
    """The nodes of a step, and what works on each."""

    def __init__(self, graph: _native.StepGraph) -> None:
        self.nodes = graph.nodes
        self.units = [
            Unit(KINDS.get(node.kind, "exchange"), tuple(node.devices)) for node in self.nodes
        ]
        self.lead = list(range(len(self.nodes)))
        """The first node of the exchange that a node is a part of; else the node itself."""
        for first, *others in communications(self.nodes):
            gangs = {gang for index in (first, *others) for gang in self.units[index].gangs}
            for index in (first, *others) if others else ():
                self.lead[index] = first
                self.units[index] = Unit("exchange", tuple(sorted(gangs)))

    def readiness(self, steps: Sequence[dict[int, Span]]) -> list[list[Readiness]]:
        """Returns for each node of each step when all that it needs was there."""
        free: dict[Unit, tuple[int, int]] = {}
        ends: list[list[int]] = []
        ready: list[list[Readiness]] = []
        for step in steps:
            ends.append([0] * len(self.nodes))
            ready.append([Readiness(0, None)] * len(self.nodes))
            for number, node in enumerate(self.nodes):
                unit = self.units[number]
                if (lead := self.lead[number]) != number:
                    ready[-1][number], ends[-1][number] = ready[-1][lead], ends[-1][lead]
                    continue
                before = [(ends[-1][after], after) for after in node.after]
                before += [
                    (ends[-1 - back][after], after)
                    for after, back in node.carried
                    if back < len(ends)
                ]
                if unit in free:
                    before.append(free[unit])
                at, last = max(before, default=(0, None))
                ready[-1][number] = Readiness(at, last)
                # What was not observed took no time, as far as is known.
                end = step[number].end_ns if number in step else at
                ends[-1][number] = end
                free[unit] = max(free.get(unit, (0, number)), (end, number))
        return ready

    def took(self, number: int, span: Span, ready: Readiness) -> int:
        """Returns the time of a node; that of a message begins when its source is there.

        On CPUs it may wait for a core to be sent, which is a part of its latency.
        """
        if self.units[number].kind == "channel":
            return max(0, span.end_ns - ready.at_ns)
        return span.length_ns


def simulate(graph: _native.StepGraph, machine: FittedMachine, count: int) -> list[dict[int, Span]]:
    """Simulates ``count`` consecutive steps on a machine."""
    work = StepUnits(graph)
    places = {unit: number for number, unit in enumerate(dict.fromkeys(work.units))}
    # What only takes time, such as waking a thread, has a unit of its own.
    run = _native.StepGraph(len(places) + len(work.nodes), graph.name)
    last: dict[Unit, int] = {}
    made: list[list[int]] = []
    """For each step and node what its readers depend on."""
    numbers: list[list[int]] = []
    for _ in range(count):
        made.append([])
        numbers.append([])
        for number, node in enumerate(work.nodes):
            unit = work.units[number]
            if (lead := work.lead[number]) != number:
                numbers[-1].append(numbers[-1][lead])
                made[-1].append(made[-1][lead])
                continue
            after = {made[-1][other] for other in node.after}
            after |= {made[-1 - back][other] for other, back in node.carried if back < len(made)}
            if unit in last:
                after.add(last[unit])
            time = machine.node_ns.get(number, 0)
            done = last[unit] = run.compute(places[unit], time, sorted(after), name=node.name)
            if node.kind == "compute":
                launch = machine.launch_ns.get(node.devices[0], 0)
                last[unit] = run.compute(places[unit], launch, [done])
                made[-1].append(done)
            else:
                wake = machine.wake_ns.get(unit, 0)
                made[-1].append(run.compute(len(places) + number, wake, [done]))
            numbers[-1].append(done)
    interconnect = read_topology(f"elect-flat:{max(2, run.devices)}").interconnect
    times = simulate_graph(run, interconnect).times_s
    return [
        {
            node: Span(*(round(1e9 * time) for time in times[index]))
            for node, index in enumerate(ours)
        }
        for ours in numbers
    ]
