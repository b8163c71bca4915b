"""The rungs of one captured step: its program, step graph, plan, and predicted report.

Each rung is text; programs and step graphs parse to what was printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fairway import _native, capture
from fairway.communication import graphs
from fairway.communication.steps import ChannelCost
from fairway.placement.fabrics import read_interconnect
from fairway.placement.reading import read_graph
from fairway.placement.search import Carried, carry_out_graph

__all__ = ["Rung", "Rungs", "climb"]

LONGEST = 10
"""Nodes that a report lists: those that take the longest."""
STEPS = 8
"""Repetitions of a step in a plan: enough for the steady state of a loop to dominate."""


@dataclasses.dataclass(frozen=True)
class Rung:
    """One noun of the flow.

    Attributes:
        name: ``program``, ``step``, ``plan`` or ``report``.
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
        graph: the step graph.
        planned: the plan of :data:`STEPS` repetitions.
        report: of one step, simulated on the fabric.
    """

    rungs: list[Rung]
    graph: _native.StepGraph
    planned: graphs.Planned
    report: Carried

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


def climb(path: Path, fabric: str | None, costs: Sequence[ChannelCost], *, seed: int = 0) -> Rungs:
    """Lowers, plans and simulates a step.

    Args:
        path: a captured program (.fw), a step graph (.step), a task graph of FlexFlow (.fbuf), or
            a folder of Chakra's traces.
        fabric: an interconnect by name, such as ``elect-cluster:64``; none is a switch that is
            never in the way, for as many devices as the step has.
        costs: of the channels that plans use.
        seed: of the search.

    Raises:
        CaptureError, GraphError: the file holds no step; says where.
        PlacementError: there is no such fabric, or it has too few devices.
    """
    rungs: list[Rung] = []
    if path.suffix == ".fw":
        text = capture.read(path)
        rungs.append(Rung("program", ".fw", text))
        graph = graphs.of_program(text)
    else:
        graph = read_graph(path)
    rungs.append(Rung("step", ".step", str(graph)))
    planned = graphs.plan(graph, costs, steps=STEPS, seed=seed)
    rungs.append(Rung("plan", ".txt", _plan_text(graph, planned, costs)))
    name = fabric or f"elect-flat:{graph.devices}"
    report = carry_out_graph(graph, read_interconnect(name))
    rungs.append(Rung("report", ".txt", _report_text(graph, report, name)))
    return Rungs(rungs, graph, planned, report)


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


def _report_text(graph: _native.StepGraph, report: Carried, fabric: str) -> str:
    busiest = max(report.busy_s, default=0.0)
    lines = [
        f"report of one step on {fabric}, simulated",
        f"makespan: {1e3 * report.seconds:.6f} ms",
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
        lines.append(
            f"#{number}{name}: {node.kind}, from {1e3 * begin_s:.6f} ms for {1e3 * took_s:.6f} ms"
        )
    return "\n".join(lines) + "\n"
