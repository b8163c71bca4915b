"""Measured and predicted timelines of a planned step, as reports that can be compared.

The step graph of both has a node for each computation, on device 0, and for each motif, on device 1
for channel 0 and so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from fairway import _native
from fairway.communication.steps import Report, Step
from fairway.report.steps import Span, StepReport

__all__ = ["Timelines", "timelines"]

Key = tuple[str, int | None, int | None]
"""Task, motif and channel; the latter two None of a computation."""


@dataclasses.dataclass(frozen=True)
class Timelines:
    """One plan, as it was predicted and as ranks executed it.

    Attributes:
        graph: what the nodes of both reports are.
        predicted: of steps as the plan was simulated.
        measured: of as many steps of all ranks: from when the last rank has begun until the last
            one has ended.
    """

    graph: _native.StepGraph
    predicted: StepReport
    measured: StepReport


def timelines(name: str, step: Step, plan: _native.StepPlan, ranks: Sequence[Report]) -> Timelines:
    """Returns both timelines of a plan.

    Args:
        name: of the step graph.
        step: what was planned.
        plan: its plan.
        ranks: the report of each rank.
    """
    count = len(ranks[0].ends_ns)
    names = [task.name for task in step.tasks]
    simulated = [
        (number, (names[task], motif, channel), (start, end))
        for number, task, motif, channel, start, end in plan.spans(count)
    ]
    keys = sorted({key for _, key, _ in simulated}, key=lambda key: (key[2] is not None, key))
    graph = _native.StepGraph(1 + max((key[2] or 0) + 1 for key in keys), name)
    for task, motif, channel in keys:
        label = task if motif is None else f"{task}/{motif}"
        graph.compute(0 if channel is None else 1 + channel, 0, name=label)
    numbers = {key: number for number, key in enumerate(keys)}

    def report(source: str, spans: Iterable[tuple[int, Key, tuple[int, int]]]) -> StepReport:
        found: list[dict[int, Span]] = [{} for _ in range(count)]
        for number, key, (start, end) in spans:
            node, span = numbers[key], Span(start, end)
            found[number][node] = found[number].get(node, span).joined(span)
        return StepReport.observed(graph, source, found)

    observed: list[tuple[int, Key, tuple[int, int]]] = []
    for rank in ranks:
        observed += [(number, (task, None, None), (s, e)) for number, task, s, e in rank.computed]
        observed += [
            (number, (task, motif, channel), (start, end))
            for number, task, motif, channel, _, start, end in rank.carried
        ]
    return Timelines(graph, report("simulated", simulated), report("measured", observed))
