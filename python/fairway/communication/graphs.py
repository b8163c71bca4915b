"""Step graphs of heterogeneous devices: what each device computes, and the transfers between them.

Read from the output of ``fairway capture``, or from others' files (:mod:`fairway.formats`). A plan
chooses a number of segments and a channel for each kind of communication, and one priority order of
all of it. Whatever executes a step (the simulator, the schedule of a network) executes the planned
step: its communication in pieces, each of which waits for those before it on a channel.
"""

from __future__ import annotations

from collections.abc import Sequence

from fairway import _native
from fairway.communication.graph_plans import GraphPlan, PlannedKind, kinds_of
from fairway.communication.steps import ChannelCost
from fairway.errors import GraphError

__all__ = ["STEPS", "of_program", "plan"]

STEPS = 8
"""Repetitions of a step in a plan: enough for the steady state of a loop to dominate."""


def plan(
    graph: _native.StepGraph,
    channels: Sequence[ChannelCost] | _native.Topology,
    *,
    steps: int = STEPS,
    evaluations: int = 400,
    seed: int = 0,
) -> GraphPlan:
    """Plans ``steps`` repetitions of a step.

    Args:
        graph: the step, on the devices of the topology if there is one.
        channels: those of each device, or a topology, of which each device has one channel.
        steps: repetitions of the step.
        evaluations: plans that are evaluated at most.
        seed: of the search.

    Raises:
        GraphError: the graph or the channels are invalid.
    """
    topology = channels if isinstance(channels, _native.Topology) else None
    costs = () if isinstance(channels, _native.Topology) else tuple(channels)
    try:
        given = topology or [cost.terms for cost in costs]
        found = _native.plan_devices(graph, given, steps, (evaluations, seed))
    except (ValueError, TypeError, OverflowError) as error:
        raise GraphError(f"the graph cannot be planned: {error}") from None
    kinds = [
        PlannedKind(nodes, *strategy)
        for nodes, strategy in zip(kinds_of(graph), found.strategies, strict=True)
    ]
    return GraphPlan(
        step=graph.name,
        steps=steps,
        network=None if topology is None else str(topology),
        channels=costs,
        kinds=tuple(kinds),
        order=tuple(found.order),
        strict_ns=found.strict_ns,
        fifo_ns=found.fifo_ns,
        ordered_ns=found.ordered_ns,
        planned_ns=found.planned_ns,
        evaluations=found.evaluations,
        reason=found.reason,
    )


def of_program(text: str) -> _native.StepGraph:
    """Returns the step graph of a captured program; see :mod:`fairway.capture`.

    Devices that ever compute together become one vertex here; data between others is transferred.
    The next step depends on whatever it reads of this one.

    Raises:
        GraphError: the text is no program.
    """
    try:
        return _native.StepGraph.of_program(text)
    except ValueError as error:
        raise GraphError(f"it holds no program: {error}") from None
