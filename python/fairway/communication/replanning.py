"""Plans that turn out wrong are made again while steps go on.

Rank 0 watches how long its channels keep what is ready waiting for what is to go first. Where that
is more than a part of the step, it says so, plans again in the background with what computations
and channels were seen to take, and proposes that plan to all ranks.

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

__all__ = ["Proposal", "Replanner"]

_LOG = logging.getLogger(__name__)

IN_A_ROW_NS = 500_000
"""So soon a motif begins behind another one on its channel, if it waits for nothing else."""
CHANGE_MAX = 2.0
"""How far what channels take may be from what it was, each time that it is looked at."""
WORTH = 0.015
"""What a plan must promise to be better than another one, as a part of the step."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A plan that seems better.

    Attributes:
        script: what ranks are to keep to.
        seen_s: what a step takes by the plan before, and
        told_s: by this one.
    """

    script: Script
    seen_s: float
    told_s: float


class Replanner:
    """Watches the steps of one team; made on rank 0.

    Args:
        propose: lets all ranks keep to a plan; returns the first step that they do so in.
        step: what is done.
        costs: what channels were planned to take.
        script: the plan that is kept to, if there is one.
        allowed: the part of a step that channels may keep waiting what is ready.
        every: steps that are looked at together.
        system: whose plan is proposed, and
        evaluations: how many a chain looks at; see :func:`fairway.communication.steps.plan`.

    Attributes:
        costs: what channels were last found to take.
    """

    def __init__(
        self,
        propose: Callable[[Proposal], int],
        step: Step,
        costs: Sequence[ChannelCost],
        script: Script | None,
        *,
        allowed: float = 0.05,
        every: int = 4,
        system: str = "joint+striping",
        evaluations: int = 5000,
    ) -> None:
        self.every = every
        self.changes: list[int] = []
        self._propose = propose
        self._step = step
        self.costs = list(costs)
        self._script = script
        self._allowed = allowed
        self._system = system
        self._evaluations = evaluations
        self._thread: threading.Thread | None = None
        self._holds_from = 0

    def look(self, first: int, seen: Seen) -> None:
        """Looks at steps, of which ``first`` is the first; plans again if that seems worth it."""
        if first < self._holds_from or (self._thread is not None and self._thread.is_alive()):
            return
        if seen.waited <= self._allowed:
            return
        _LOG.warning(
            "channels keep waiting what is ready for %.0f %% of a step of %.1f ms; planning again",
            seen.waited * 100,
            seen.step_ns / 1e6,
        )
        self._start(seen, 0.0)

    def plan(self, seen: Seen) -> None:
        """Plans for the first time by what was seen, unless that promises next to nothing."""
        self._start(seen, WORTH)

    def _start(self, seen: Seen, worth: float) -> None:
        self._thread = threading.Thread(target=self._replan, args=(seen, worth), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for what is being planned and proposed."""
        if self._thread is not None:
            self._thread.join()

    def _replan(self, seen: Seen, worth: float) -> None:
        costs = self._measured(seen.spans)
        step = self._step.profiled(seen.busy_s)
        planned = plan(step, costs, evaluations=self._evaluations, chains=2)
        script = planned[self._system].script
        told_ms, seen_ms = planned[self._system].period_ns / 1e6, seen.step_ns / 1e6
        if told_ms > seen_ms * (1 - worth):
            return
        if self._script is not None and script.text == self._script.text:
            return
        try:
            self._holds_from = self._propose(Proposal(script, seen.step_ns / 1e9, told_ms / 1e3))
        except TeamError as error:
            _LOG.warning("the new plan is not kept to: %s", error)
            return
        self._script, self.costs = script, costs
        self.changes.append(self._holds_from)
        _LOG.warning(
            "all ranks keep to a new plan; a step took %.1f ms, and is to take %.1f ms",
            seen_ms,
            told_ms,
        )

    def _measured(self, spans: Sequence[Span]) -> list[ChannelCost]:
        """What channels take by what motifs took: by the median of the time that was planned.

        What comes first after a pause tells more of the pause than of the channel.
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
    """The value that half of the weight lies below.

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
