"""Step graphs of heterogeneous devices: what each device computes, and the transfers between them.

Read from the output of ``fairway capture``, or from others' files (:mod:`fairway.formats`). A plan
chooses a number of segments and a channel for each kind of communication, and one priority order of
all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fairway import _native
from fairway.communication.graph_plans import GraphPlan, PlannedKind, kinds_of
from fairway.communication.steps import ChannelCost
from fairway.errors import GraphError

__all__ = ["of_program", "plan"]


def plan(
    graph: _native.StepGraph,
    costs: Sequence[ChannelCost],
    *,
    steps: int = 2,
    evaluations: int = 400,
    seed: int = 0,
) -> GraphPlan:
    """Plans ``steps`` repetitions of a step.

    Raises:
        GraphError: the graph or the channels are invalid.
    """
    given = [cost.terms for cost in costs]
    try:
        found = _native.plan_devices(graph, given, steps, (evaluations, seed))
    except (ValueError, TypeError) as error:
        raise GraphError(f"the graph cannot be planned: {error}") from None
    kinds = [
        PlannedKind(nodes, segments, channel)
        for nodes, (segments, channel) in zip(kinds_of(graph), found.strategies, strict=True)
    ]
    return GraphPlan(
        step=graph.name,
        steps=steps,
        channels=tuple(costs),
        kinds=tuple(kinds),
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
