"""Online replanning: a plan that turns out wrong is replaced while steps continue.

Rank 0 monitors how long its channels idle although a motif is ready, because the plan orders
another first. Where that exceeds a fraction of the step, it logs a warning, plans again in the
background with measured compute times and channel costs, and proposes that plan to all ranks.

Source: SYNDICATE §4.4 (waits above 5 % of an iteration).
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from fairway.communication.steps import ChannelCost, Seen, Span, Step, plan
from fairway.communication.team import Script
from fairway.errors import TeamError

__all__ = ["Proposal", "ReplanSettings", "Replanner"]

_LOG = logging.getLogger(__name__)

IN_A_ROW_NS = 500_000
"""Longest gap behind the preceding motif of its channel for motifs that ran back to back."""
CHANGE_MAX = 2.0
"""Largest factor by which a channel's cost changes in one measurement."""
WORTH = 0.015
"""Gain that the first plan must predict to be adopted, as a fraction of the step."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A plan that is predicted to be better.

    Attributes:
        script: the order that ranks are to execute.
        seen_s: measured time of a step under the current plan.
        predicted_s: predicted time of a step under this one.
    """

    script: Script
    seen_s: float
    predicted_s: float


@dataclasses.dataclass(frozen=True)
class ReplanSettings:
    """When to plan again, and how.

    Attributes:
        allowed: fraction of a step for which channels may idle although a motif is ready.
        every: steps per measurement.
        system: name of the system whose plan is proposed.
        evaluations: plans that each search chain evaluates; see
            :func:`fairway.communication.steps.plan`.
    """

    allowed: float = 0.05
    every: int = 4
    system: str = "joint+striping"
    evaluations: int = 5000


DEFAULTS = ReplanSettings()


class Replanner:
    """Monitors the steps of one team; runs on rank 0.

    Args:
        propose: makes all ranks adopt a plan; returns the first step that uses it.
        step: the tasks of a step.
        costs: channel costs that the current plan assumes.
        script: the current plan, if any.
        settings: when to plan again, and how.

    Attributes:
        costs: latest estimate of channel costs.
        every: steps per measurement.
        changes: first step of each plan that was adopted.
    """

    def __init__(
        self,
        propose: Callable[[Proposal], int],
        step: Step,
        costs: Sequence[ChannelCost],
        script: Script | None,
        settings: ReplanSettings = DEFAULTS,
    ) -> None:
        self.every = settings.every
        self.changes: list[int] = []
        self._propose = propose
        self._step = step
        self.costs = list(costs)
        self._script = script
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._holds_from = 0

    def look(self, first: int, seen: Seen) -> None:
        """Checks steps from ``first`` on; plans again if channels idled for more than allowed."""
        if first < self._holds_from or (self._thread is not None and self._thread.is_alive()):
            return
        if seen.waited <= self._settings.allowed:
            return
        _LOG.warning(
            "channels keep waiting what is ready for %.0f %% of a step of %.1f ms; planning again",
            seen.waited * 100,
            seen.step_ns / 1e6,
        )
        self._start(seen, 0.0)

    def plan(self, seen: Seen) -> None:
        """Plans for the first time from measurements; adopts a plan that gains :data:`WORTH`."""
        self._start(seen, WORTH)

    def _start(self, seen: Seen, worth: float) -> None:
        self._thread = threading.Thread(target=self._replan, args=(seen, worth), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for planning and proposing to end."""
        if self._thread is not None:
            self._thread.join()

    def _replan(self, seen: Seen, worth: float) -> None:
        costs = self._measured(seen.spans)
        step = self._step.profiled(seen.busy_s)
        planned = plan(step, costs, evaluations=self._settings.evaluations, chains=2)
        script = planned[self._settings.system].script
        predicted_ms, seen_ms = planned[self._settings.system].period_ns / 1e6, seen.step_ns / 1e6
        if predicted_ms > seen_ms * (1 - worth):
            return
        if self._script is not None and script.text == self._script.text:
            return
        try:
            self._holds_from = self._propose(
                Proposal(script, seen.step_ns / 1e9, predicted_ms / 1e3)
            )
        except TeamError as error:
            _LOG.warning("the new plan is not kept to: %s", error)
            return
        self._script, self.costs = script, costs
        self.changes.append(self._holds_from)
        _LOG.warning(
            "all ranks keep to a new plan; a step took %.1f ms, and is to take %.1f ms",
            seen_ms,
            predicted_ms,
        )

    def _measured(self, spans: Sequence[Span]) -> list[ChannelCost]:
        """Scales channel costs by the weighted median of measured to planned times of motifs.

        The first motif after a pause is left out: its time depends more on the pause than the
        channel.
        """
        if self._script is None:
            return self.costs
        operations = json.loads(self._script.text)["operations"]
        ratios = collections.defaultdict(list)
        ended = dict.fromkeys(range(len(self.costs)), -IN_A_ROW_NS)
        for _, operation, motif, channel, _, start, end in sorted(spans, key=lambda span: span[5]):
            planned = operations[operation]["motifs"][motif]["time"]
            if planned > 0 and start - ended[channel] < IN_A_ROW_NS:
                ratios[channel].append(((end - start) / planned, planned))
            ended[channel] = end
        costs = list(self.costs)
        for channel, found in ratios.items():
            ratio = min(max(_weighted_median(found), 1 / CHANGE_MAX), CHANGE_MAX)
            cost = costs[channel]
            rate, latency = cost.rate_bps / ratio, round(cost.latency_ns * ratio)
            costs[channel] = dataclasses.replace(cost, rate_bps=rate, latency_ns=latency)
        return costs


def _weighted_median(found: Iterable[tuple[float, float]]) -> float:
    """Returns the weighted median.

    >>> _weighted_median([(5.0, 1), (1.0, 1), (2.0, 8)])
    2.0
    """
    ordered = sorted(found)
    left = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]
