"""Steps with the plan of their communication, on a topology."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fairway import _native
from fairway.communication import graphs
from fairway.communication.graph_plans import GraphPlan
from fairway.communication.steps import ChannelCost
from fairway.placement.search import SimulatedStep, simulate_graph

__all__ = ["PlannedGraph", "plan_graph"]

PIECES_MAX = 1 << 16
"""Most pieces of communication of a plan that is simulated."""


@dataclasses.dataclass(frozen=True)
class PlannedGraph:
    """A placed step, planned.

    Attributes:
        plan: of its communication.
        step: the step in the plan's pieces and order.
        simulated: one step as planned, as flows on the topology.
        unplanned: one step as it is, likewise: its communication whole, as it becomes ready.
        schedule: of every vector of one step as planned, on a topology of links.
        unplanned_schedule: of the step as it is, likewise.
        unscheduled: why there is no schedule on a topology of links; empty otherwise.
    """

    plan: GraphPlan
    step: _native.PlannedStep
    simulated: SimulatedStep
    unplanned: SimulatedStep
    schedule: _native.StepSchedule | None = None
    unplanned_schedule: _native.StepSchedule | None = None
    unscheduled: str = ""

    @property
    def is_unplanned(self) -> bool:
        """Is the step left as it is, since no plan that was found is faster?"""
        return not self.plan.order and all(kind.segments == 1 for kind in self.plan.kinds)

    @property
    def seconds(self) -> float:
        """Predicted time of one step: by the schedule if there is one, else as flows."""
        return self.simulated.seconds if self.schedule is None else self.schedule.seconds

    def as_json(self) -> dict[str, Any]:
        """Returns times of one step, and the plan's text."""
        return {
            "unplanned_s": self.unplanned.seconds,
            "planned_s": self.simulated.seconds,
            "unplanned_scheduled_s": _seconds(self.unplanned_schedule),
            "scheduled_s": _seconds(self.schedule),
            "plan": str(self.plan),
        }

    @property
    def times_s(self) -> list[tuple[float, float]]:
        """When each node of the step, in all its pieces, begins and ends as flows, in seconds."""
        found: dict[int, tuple[float, float]] = {}
        for node, (begin, end) in zip(self.step.origins, self.simulated.times_s, strict=True):
            known = found.get(node, (begin, end))
            found[node] = (min(begin, known[0]), max(end, known[1]))
        return [found[node] for node in sorted(found)]


def plan_graph(
    graph: _native.StepGraph,
    topology: _native.Topology,
    costs: Sequence[ChannelCost] | None = None,
    *,
    steps: int = graphs.STEPS,
    seed: int = 0,
) -> PlannedGraph:
    """Plans a step's communication on a topology, unless the step is faster as it is.

    Args:
        graph: on the topology's devices.
        topology: on which steps are simulated, and scheduled if it is one of links.
        costs: of the channels that are planned for; None plans for the topology.
        steps: repetitions of the step in the plan.
        seed: of the search.

    Raises:
        GraphError: the step cannot be planned.
        PlacementError: the step has more devices than the topology.
    """
    channels = topology if costs is None else costs
    found = graphs.plan(graph, channels, steps=steps, seed=seed)
    whole = graphs.plan(graph, channels, steps=steps, evaluations=1)
    whole = dataclasses.replace(
        whole,
        order=(),
        planned_ns=whole.fifo_ns,
        evaluations=found.evaluations,
        reason=found.reason,
    )
    as_it_is = _flow(whole, graph, topology)
    planned = [
        _flow(plan, graph, topology)
        for plan in (found, found.unordered())
        if plan.pieces <= PIECES_MAX
    ]
    best = min([as_it_is, *planned], key=lambda one: one.seconds)
    best = dataclasses.replace(best, unplanned=as_it_is.simulated)
    return _scheduled(as_it_is, best, topology) if topology.is_routed else best


def _flow(plan: GraphPlan, graph: _native.StepGraph, topology: _native.Topology) -> PlannedGraph:
    step = plan.apply(graph)
    simulated = simulate_graph(step.graph, topology.interconnect)
    return PlannedGraph(plan, step, simulated, simulated)


def _scheduled(
    as_it_is: PlannedGraph, best: PlannedGraph, topology: _native.Topology
) -> PlannedGraph:
    """Schedules a step as it is and as planned; returns the faster one."""
    try:
        unplanned = _native.schedule_step(as_it_is.step, topology)
    except ValueError as error:
        return dataclasses.replace(best, unscheduled=str(error))
    as_it_is = dataclasses.replace(as_it_is, schedule=unplanned, unplanned_schedule=unplanned)
    if best.is_unplanned:
        return as_it_is
    try:
        schedule = _native.schedule_step(best.step, topology)
    except ValueError:  # in pieces, it is of more transfers than can be scheduled
        return as_it_is
    best = dataclasses.replace(best, schedule=schedule, unplanned_schedule=unplanned)
    return min(as_it_is, best, key=lambda one: one.seconds)


def _seconds(schedule: _native.StepSchedule | None) -> float | None:
    return None if schedule is None else schedule.seconds
