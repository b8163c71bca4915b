"""The rungs of one step: program, step graph, placement, plan, schedule, and predicted report.

Each rung is a value that prints, and parses to what was printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fairway import _native, capture
from fairway.analysis.planned import PlannedGraph, plan_graph
from fairway.analysis.topologies import read_topology
from fairway.communication import graphs
from fairway.communication.steps import ChannelCost
from fairway.errors import PlacementError
from fairway.placement.reading import read_graph
from fairway.placement.search import simulate_graph
from fairway.report.steps import REPORT, Span, StepReport, digest

__all__ = ["Options", "Rung", "Rungs", "climb"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a step is placed, planned and scheduled with.

    Attributes:
        topology: see :mod:`fairway.analysis.topologies`; None is a switch that is never congested,
            for as many devices as the step has.
        costs: of the channels that plans use; None plans for the topology.
        evaluations: placements of devices that are evaluated; 1 keeps them in order.
        scale: factor of compute times: 0.5 for devices that are twice as fast.
        seed: of the searches.
    """

    topology: _native.Topology | None = None
    costs: Sequence[ChannelCost] | None = None
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
        placement: where they are.
        planned: the placed step with the plan of ``graphs.STEPS`` repetitions.
        report: of one step as planned, simulated as flows on the topology. Its figures are
            ``makespan_ns``; ``unplanned_makespan_ns``, of the step as it is; ``compute_ns`` of the
            busiest device; ``exposed_communication_ns``, what a step takes longer than that;
            ``transferred_bytes``; and on a topology of links ``scheduled_makespan_ns``.
    """

    rungs: list[Rung]
    graph: _native.StepGraph
    placement: _native.Placement
    planned: PlannedGraph
    report: StepReport

    @property
    def seconds(self) -> float:
        """Predicted time of the step: by the schedule if there is one, else by the report."""
        return self.planned.seconds

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
    placement, placed = _place(graph, topology, options)
    rungs.append(Rung("placement", ".txt", str(placement)))
    planned = plan_graph(placed, topology, options.costs, seed=options.seed)
    rungs.append(Rung("plan", ".txt", str(planned.plan)))
    if planned.schedule is not None:
        rungs.append(Rung("schedule", ".txt", str(planned.schedule)))
    report = _report(graph, planned)
    rungs.append(Rung("report", REPORT, str(report)))
    return Rungs(rungs, graph, placement, planned, report)


def _place(
    graph: _native.StepGraph, topology: _native.Topology, options: Options
) -> tuple[_native.Placement, _native.StepGraph]:
    """Places a step by communication alone, unless it is faster in order."""
    in_order = _native.Placement(graph.name, str(topology), range(graph.devices))
    try:
        found = _native.place_step(graph, topology, options.evaluations, options.seed)
        placements = [in_order] if found == in_order else [in_order, found]
        placed = [(placement, placement.apply(graph, topology)) for placement in placements]
    except ValueError as error:
        raise PlacementError(f"cannot place {graph.name} on {topology}: {error}") from None
    return min(placed, key=lambda one: simulate_graph(one[1], topology.interconnect).seconds)


def _report(graph: _native.StepGraph, planned: PlannedGraph) -> StepReport:
    simulated, schedule = planned.simulated, planned.schedule
    makespan_ns = round(1e9 * simulated.seconds)
    compute_ns = round(1e9 * max(simulated.busy_s, default=0.0))
    figures = {
        "makespan_ns": makespan_ns,
        "unplanned_makespan_ns": round(1e9 * planned.unplanned.seconds),
        "compute_ns": compute_ns,
        "exposed_communication_ns": max(0, makespan_ns - compute_ns),
        "transferred_bytes": simulated.moved_bytes,
    }
    if schedule is not None:
        figures["scheduled_makespan_ns"] = round(1e9 * schedule.seconds)
    spans = {
        node: Span(round(1e9 * begin_s), round(1e9 * end_s))
        for node, (begin_s, end_s) in enumerate(planned.times_s)
    }
    return StepReport(graph.name, "simulated", digest(graph), [spans], figures)
