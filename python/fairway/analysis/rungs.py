"""The rungs of one step: program, step graph, placement, plan, schedule, and predicted report.

Each rung is text; all but the plan and the report parse to what was printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fairway import _native, capture
from fairway.analysis.topologies import read_topology
from fairway.communication import graphs
from fairway.communication.steps import ChannelCost
from fairway.errors import PlacementError
from fairway.placement.reading import read_graph
from fairway.placement.search import Carried, carry_out_graph

__all__ = ["Options", "Rung", "Rungs", "climb"]

LONGEST = 10
"""Nodes that a report lists: those that take the longest."""
STEPS = 8
"""Repetitions of a step in a plan: enough for the steady state of a loop to dominate."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a step is placed, planned and scheduled with.

    Attributes:
        topology: see :mod:`fairway.analysis.topologies`; None is a switch that is never congested,
            for as many devices as the step has.
        costs: of the channels that plans use.
        evaluations: placements of devices that are evaluated; 1 keeps them in order.
        scale: factor of compute times: 0.5 for devices that are twice as fast.
        seed: of the searches.
    """

    topology: _native.Topology | None = None
    costs: Sequence[ChannelCost] = (ChannelCost(100e9, 5000),)
    evaluations: int = 2000
    scale: float = 1.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Rung:
    """One noun of the flow.

    Attributes:
        name: ``program``, ``step``, ``placement``, ``plan``, ``schedule`` or ``report``.
        suffix: of the file that :meth:`Rungs.write` makes of it.
        text: the noun, printed.
    """

    name: str
    suffix: str
    text: str


@dataclasses.dataclass(frozen=True)
class Rungs:
    """All rungs of a step.

    Attributes:
        rungs: in the order of the flow.
        graph: the step graph, on its own devices.
        placement: where they are; None for a graph that stands for several parts.
        planned: the plan of :data:`STEPS` repetitions.
        schedule: of every vector, on a topology of links.
        report: of one step, simulated as flows on the topology.
    """

    rungs: list[Rung]
    graph: _native.StepGraph
    placement: _native.Placement | None
    planned: graphs.Planned
    schedule: _native.StepSchedule | None
    report: Carried

    @property
    def seconds(self) -> float:
        """Predicted time of the step: by the schedule if there is one, else by the report."""
        return self.report.seconds if self.schedule is None else self.schedule.seconds

    def write(self, folder: Path) -> list[Path]:
        """Writes each rung as a file of its own; returns their paths.

        Raises:
            OSError: the folder cannot be written.
        """
        folder.mkdir(exist_ok=True)
        paths = []
        for rung in self.rungs:
            paths.append(folder / f"{rung.name}{rung.suffix}")
            paths[-1].write_text(rung.text)
        return paths


def climb(path: Path, options: Options) -> Rungs:
    """Lowers, places, plans, schedules and simulates a step.

    Args:
        path: a captured program (.fw), a step graph (.step), a task graph of FlexFlow (.fbuf), or
            a folder of Chakra's traces.
        options: the topology, channels and search limits.

    Raises:
        CaptureError, GraphError: the file holds no step; says where.
        PlacementError: the topology has too few devices, or a transfer cannot be scheduled.
    """
    rungs: list[Rung] = []
    if path.suffix == ".fw":
        text = capture.read(path)
        rungs.append(Rung("program", ".fw", text))
        graph = graphs.of_program(text)
    else:
        graph = read_graph(path)
    if options.scale != 1.0:
        graph = graph.scaled(options.scale)
    rungs.append(Rung("step", ".step", str(graph)))
    topology = options.topology
    if topology is None:
        topology = read_topology(f"elect-flat:{graph.devices * graph.parts}")
    placement, placed, report = _place(graph, topology, options)
    if placement is not None:
        rungs.append(Rung("placement", ".txt", str(placement)))
    planned = graphs.plan(graph, options.costs, steps=STEPS, seed=options.seed)
    rungs.append(Rung("plan", ".txt", _plan_text(graph, planned, options.costs)))
    schedule = None
    if topology.is_routed:
        schedule = _scheduled(placed, topology)
        rungs.append(Rung("schedule", ".txt", str(schedule)))
    rungs.append(Rung("report", ".txt", _report_text(placed, report, schedule, topology)))
    return Rungs(rungs, graph, placement, planned, schedule, report)


def _place(
    graph: _native.StepGraph, topology: _native.Topology, options: Options
) -> tuple[_native.Placement | None, _native.StepGraph, Carried]:
    """Places a step by communication alone, unless it is faster in order; simulates it."""
    interconnect = topology.interconnect
    if graph.parts != 1:
        return None, graph, carry_out_graph(graph, interconnect)
    in_order = _native.Placement(graph.name, str(topology), range(graph.devices))
    try:
        found = _native.place_step(graph, topology, options.evaluations, options.seed)
        placements = [in_order] if found == in_order else [in_order, found]
        placed = [(placement, placement.apply(graph, topology)) for placement in placements]
    except ValueError as error:
        raise PlacementError(f"cannot place {graph.name} on {topology}: {error}") from None
    candidates = [(*one, carry_out_graph(one[1], interconnect)) for one in placed]
    return min(candidates, key=lambda candidate: candidate[2].seconds)


def _scheduled(graph: _native.StepGraph, topology: _native.Topology) -> _native.StepSchedule:
    try:
        return _native.schedule_step(graph, topology)
    except ValueError as error:
        raise PlacementError(f"cannot schedule {graph.name} on {topology}: {error}") from None


def _plan_text(
    graph: _native.StepGraph, planned: graphs.Planned, costs: Sequence[ChannelCost]
) -> str:
    lines = [f"plan of {STEPS} steps on {len(costs)} channels"]
    lines += [
        f"channel {number}: {cost.rate_bps:.6g} bit/s, latency {cost.latency_ns} ns"
        for number, cost in enumerate(costs)
    ]
    sizes = [node.size for node in graph.nodes]
    kinds: list[list[int]] = [[] for _ in planned.strategies]
    for number, kind in enumerate(graph.communication_kinds()):
        if kind is not None:
            kinds[kind].append(number)
    for nodes, (pieces, channel) in zip(kinds, planned.strategies, strict=True):
        by = "all channels in turn" if channel is None else f"channel {channel}"
        named = ", ".join(f"#{number}" for number in nodes[:LONGEST])
        more = f" and {len(nodes) - LONGEST} more" if len(nodes) > LONGEST else ""
        lines.append(f"{named}{more}: {sizes[nodes[0]]} bytes, {pieces} pieces by {by}")
    for name, time_s in (
        ("first in, first out, strictly", planned.strict_s),
        ("first in, first out, overtaking blocked heads", planned.fifo_s),
        ("critical path first", planned.ordered_s),
        ("planned", planned.planned_s),
    ):
        lines.append(f"{name}: {1e3 * time_s / STEPS:.6f} ms a step")
    lines.append(f"{planned.evaluations} plans evaluated ({planned.reason})")
    return "\n".join(lines) + "\n"


def _report_text(
    graph: _native.StepGraph,
    report: Carried,
    schedule: _native.StepSchedule | None,
    topology: _native.Topology,
) -> str:
    busiest = max(report.busy_s, default=0.0)
    lines = [f"report of one step on {topology}, simulated"]
    if schedule is not None:
        lines.append(f"makespan, every vector scheduled: {1e3 * schedule.seconds:.6f} ms")
    lines += [
        f"makespan{', as flows' if schedule else ''}: {1e3 * report.seconds:.6f} ms",
        f"busiest device computes: {1e3 * busiest:.6f} ms",
        f"exposed communication: {1e3 * (report.seconds - busiest):.6f} ms",
        f"bytes transferred: {report.moved_bytes}",
    ]
    spans = sorted(
        ((end - begin, number) for number, (begin, end) in enumerate(report.times_s)),
        key=lambda span: (-span[0], span[1]),
    )
    nodes = graph.nodes
    for took_s, number in spans[:LONGEST]:
        node, begin_s = nodes[number], report.times_s[number][0]
        name = f" @{node.name}" if node.name else ""
        span = f"from {1e3 * begin_s:.6f} ms for {1e3 * took_s:.6f} ms"
        line = f"#{number}{name}: {node.kind}, {span}"
        algorithm = None if schedule is None else schedule.algorithms[number]
        lines.append(line if algorithm is None else f"{line}, scheduled as {algorithm}")
    return "\n".join(lines) + "\n"
