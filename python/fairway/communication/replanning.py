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
import statistics
import threading
from collections.abc import Sequence

from fairway.communication.steps import ChannelCost, Seen, Span, Step, plan
from fairway.communication.team import Script, Team
from fairway.errors import TeamError

__all__ = ["Replanner"]

_LOG = logging.getLogger(__name__)


class Replanner:
    """Watches the steps of one team; made on rank 0.

    Args:
        team: of which this is rank 0.
        step: what is done.
        costs: what channels were planned to take.
        script: the plan that is kept to.
        allowed: the part of a step that channels may keep waiting what is ready.
        every: steps that are looked at together.
        system: whose plan is proposed, and
        evaluations: how many a chain looks at; see :func:`fairway.communication.steps.plan`.
    """

    def __init__(
        self,
        team: Team,
        step: Step,
        costs: Sequence[ChannelCost],
        script: Script,
        *,
        allowed: float = 0.05,
        every: int = 4,
        system: str = "joint+striping",
        evaluations: int = 5000,
    ) -> None:
        self.every = every
        self.changes: list[int] = []
        self._team = team
        self._step = step
        self._costs = list(costs)
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
        self._thread = threading.Thread(target=self._replan, args=(seen,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for what is being planned and proposed."""
        if self._thread is not None:
            self._thread.join()

    def _replan(self, seen: Seen) -> None:
        costs = self._measured(seen.spans)
        step = self._step.profiled(seen.busy_s)
        planned = plan(step, costs, evaluations=self._evaluations, chains=2)
        script = planned[self._system].script
        if script.text == self._script.text:
            return
        try:
            self._holds_from = self._team.propose(script)
        except TeamError as error:
            _LOG.warning("the new plan is not kept to: %s", error)
            return
        self._script, self._costs = script, costs
        self.changes.append(self._holds_from)
        _LOG.warning("all ranks keep to a new plan from step %d on", self._holds_from)

    def _measured(self, spans: Sequence[Span]) -> list[ChannelCost]:
        """What channels take by what motifs took; the slowest of them waited for other ranks."""
        operations = json.loads(self._script.text)["operations"]
        ratios = collections.defaultdict(list)
        for _, operation, motif, channel, _, start, end in spans:
            planned = operations[operation]["motifs"][motif]["time"]
            if planned > 0:
                ratios[channel].append((end - start) / planned)
        costs = list(self._costs)
        for channel, found in ratios.items():
            ratio = statistics.quantiles([*found, *found], n=4)[0]
            cost = costs[channel]
            rate, latency = cost.rate_bps / ratio, round(cost.latency_ns * ratio)
            costs[channel] = dataclasses.replace(cost, rate_bps=rate, latency_ns=latency)
        return costs
