"""Compares a captured step with its simulation on the machine that it ran on.

The machine is fitted on every other measured step: the time of each function on each gang (the devices
that compute together), the latency and rate of each channel between gangs, and the launch cost of a
gang. The steps are then simulated from these figures and the program's dependencies alone, and compared
with the steps in between, which no figure was fitted on.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from fairway import _native
from fairway.analysis.topologies import read_topology
from fairway.errors import ReportError
from fairway.placement.search import carry_out_graph
from fairway.report.measured import STEPS_MIN, communications
from fairway.report.steps import Span, StepReport, digest

__all__ = ["Comparison", "Compared", "Machine", "compare", "fit", "simulate"]

WARM_UP = 0.25
"""Part of a report that is left out at first: hosts still compile, and wait for one another."""

Unit = tuple[int, ...]
"""What works on one node at a time: a gang, (gang,); or a channel, (source, target)."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a simulation is based on.

    Attributes:
        node_ns: time of each node.
        launch_ns: of each gang, from the end of a computation to the begin of the next one.
        wake_ns: of each channel, from the end of a message to the begin of what it was for.
    """

    node_ns: dict[int, int]
    launch_ns: dict[int, int]
    wake_ns: dict[Unit, int]


@dataclasses.dataclass(frozen=True)
class Compared:
    """Measured and predicted mean time of one thing."""

    name: str
    measured_ns: float
    predicted_ns: float

    @property
    def error(self) -> float:
        """The prediction's relative error: 0.05 for 5 % too long."""
        if self.measured_ns == 0:
            return 0.0 if self.predicted_ns == 0 else float("inf")
        return self.predicted_ns / self.measured_ns - 1


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A measured and a simulated report of the same steps.

    Attributes:
        graph: the step graph.
        machine: what was fitted.
        measured: the report of the machine.
        predicted: the simulated report, as many steps.
        compared: the steps that are compared, which the machine was not fitted on.
    """

    graph: _native.StepGraph
    machine: Machine
    measured: StepReport
    predicted: StepReport
    compared: range

    @property
    def step(self) -> Compared:
        """Mean time of a step."""
        return Compared("step", *(statistics.fmean(periods) for periods in self._periods()))

    @property
    def steps(self) -> list[Compared]:
        """Time of each step that is compared."""
        pairs = zip(*self._periods(), strict=True)
        return [
            Compared(f"step {number}", *pair)
            for number, pair in zip(self.compared, pairs, strict=True)
        ]

    @property
    def nodes(self) -> list[Compared]:
        """Mean time of each node that was observed."""
        return [
            Compared(f"#{number} {_place(unit)} {self.graph.nodes[number].name}", *times)
            for number, unit, times in self._times()
        ]

    @property
    def channels(self) -> list[Compared]:
        """Time of each channel in a step: of all its messages together."""
        found: dict[Unit, list[tuple[float, float]]] = defaultdict(list)
        for _, unit, times in self._times():
            if len(unit) > 1:
                found[unit].append(times)
        return [
            Compared(_place(unit), *(sum(times) for times in zip(*all_times, strict=True)))
            for unit, all_times in sorted(found.items())
        ]

    def _times(self) -> Iterator[tuple[int, Unit, tuple[float, float]]]:
        """Yields the mean measured and predicted time of each node that was observed."""
        work = _Work(self.graph)
        reports = [self.measured.steps, self.predicted.steps]
        ready = [work.readiness(steps) for steps in reports]
        for number, unit in enumerate(work.units):
            times: list[list[int]] = [[], []]
            for step in self.compared:
                for steps, there, found in zip(reports, ready, times, strict=True):
                    if span := steps[step].get(number):
                        found.append(work.took(number, span, there[step][number]))
            if all(times) and work.lead[number] == number:
                measured, predicted = map(statistics.fmean, times)
                yield number, unit, (measured, predicted)

    def _periods(self) -> list[list[int]]:
        periods = [report.periods_ns for report in (self.measured, self.predicted)]
        return [[found[step - 1] for step in self.compared] for found in periods]


def _place(unit: Unit) -> str:
    return f"gang {unit[0]}" if len(unit) == 1 else "-".join(map(str, unit))


def compare(program: str, measured: StepReport) -> Comparison:
    """Simulates a captured program on the machine that it ran on.

    Args:
        program: its text.
        measured: its measured report.

    Raises:
        ReportError: the report is of another program, or has too few steps.
    """
    graph = _native.StepGraph.of_program(program)
    _check(graph, program, measured)
    count = len(measured.steps)
    warm = max(1, round(WARM_UP * count))
    machine = fit(graph, measured, range(warm, count, 2))
    predicted = simulate(graph, machine, count)
    report = StepReport(graph.name, "simulated", measured.program, predicted)
    return Comparison(graph, machine, measured, report, range(warm + 1, count, 2))


def _check(graph: _native.StepGraph, program: str, measured: StepReport) -> None:
    if measured.program != digest(program):
        raise ReportError(
            f"the report is of program {measured.program}, and this is {digest(program)}; capture "
            "the script again"
        )
    count = len(measured.steps)
    if count < STEPS_MIN:
        raise ReportError(f"the report has {count} steps; expected at least {STEPS_MIN}")
    for number, step in enumerate(measured.steps):
        for index in step:
            if index >= len(graph):
                raise ReportError(
                    f"step {number} has a node #{index}; the program has {len(graph)} nodes"
                )


def fit(graph: _native.StepGraph, measured: StepReport, steps: Iterable[int]) -> Machine:
    """Fits a machine on some steps of a measured report."""
    work = _Work(graph)
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
                if last.node is None or work.nodes[last.node].kind == "compute":
                    launches[gang].append(waited)
                else:
                    wakes[work.units[last.node]].append(waited)
    return Machine(
        {number: round(statistics.fmean(found)) for number, found in times.items()},
        {gang: round(statistics.fmean(found)) for gang, found in launches.items()},
        {unit: round(statistics.fmean(found)) for unit, found in wakes.items()},
    )


@dataclasses.dataclass(frozen=True)
class _Ready:
    """When all that a node needs was there, and what came last: a node, or what came before it."""

    at_ns: int
    node: int | None


class _Work:
    """The nodes of a step, and what works on each."""

    def __init__(self, graph: _native.StepGraph) -> None:
        self.nodes = graph.nodes
        self.units: list[Unit] = [tuple(node.devices) for node in self.nodes]
        self.sizes = [node.size for node in self.nodes]
        self.lead = list(range(len(self.nodes)))
        """The first node of the exchange that a node is a part of; else the node itself."""
        for first, *others in communications(self.nodes):
            members = {device for index in (first, *others) for device in self.units[index]}
            for index in (first, *others) if others else ():
                self.lead[index] = first
                self.units[index] = tuple(sorted(members))
            self.sizes[first] += sum(self.sizes[index] for index in others)

    def readiness(self, steps: Sequence[dict[int, Span]]) -> list[list[_Ready]]:
        """Returns for each node of each step when all that it needs was there."""
        free: dict[Unit, tuple[int, int]] = {}
        ends: list[list[int]] = []
        ready: list[list[_Ready]] = []
        for step in steps:
            ends.append([0] * len(self.nodes))
            ready.append([_Ready(0, None)] * len(self.nodes))
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
                ready[-1][number] = _Ready(at, last)
                # What was not observed took no time, as far as is known.
                end = step[number].end_ns if number in step else at
                ends[-1][number] = end
                free[unit] = max(free.get(unit, (0, number)), (end, number))
        return ready

    def took(self, number: int, span: Span, ready: _Ready) -> int:
        """Returns the time of a node; that of a message begins when its source is there.

        On CPUs it may wait for a core to be sent, which is a part of its latency.
        """
        unit = self.units[number]
        if self.nodes[number].kind == "compute" or len(unit) > 2:
            return span.length_ns
        return max(0, span.end_ns - ready.at_ns)


def simulate(graph: _native.StepGraph, machine: Machine, count: int) -> list[dict[int, Span]]:
    """Simulates ``count`` consecutive steps on a machine."""
    work = _Work(graph)
    units = {unit: number for number, unit in enumerate(dict.fromkeys(work.units))}
    # What only takes time, such as waking a thread, has a unit of its own.
    run = _native.StepGraph(len(units) + len(work.nodes), graph.name)
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
            done = last[unit] = run.compute(units[unit], time, sorted(after), name=node.name)
            if node.kind == "compute":
                launch = machine.launch_ns.get(node.devices[0], 0)
                last[unit] = run.compute(units[unit], launch, [done])
                made[-1].append(done)
            else:
                wake = machine.wake_ns.get(unit, 0)
                made[-1].append(run.compute(len(units) + number, wake, [done]))
            numbers[-1].append(done)
    interconnect = read_topology(f"elect-flat:{max(2, run.devices)}").interconnect
    times = carry_out_graph(run, interconnect).times_s
    return [
        {
            node: Span(*(round(1e9 * time) for time in times[index]))
            for node, index in enumerate(ours)
        }
        for ours in numbers
    ]
