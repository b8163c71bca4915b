"""Runs the collectives of one team, begun and ended in the order in which they are requested."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from fairway.communication.steps import ChannelCost
from fairway.communication.team import Team, Vector
from fairway.errors import TeamError
from fairway.torch import threads
from fairway.torch.planning import Planning
from fairway.torch.works import Operation

__all__ = ["CollectiveRequest", "Collector"]

RUNNING_MAX = 48
"""Collectives that the team has in flight at most; more wait in this queue."""
WAITING_MAX = 1 << 16
"""Collectives that may wait in the queue; further callers are blocked (back-pressure)."""

log = logging.getLogger("fairway.torch")


@dataclasses.dataclass(frozen=True)
class CollectiveRequest:
    """A requested collective, and the consumer of its result.

    Attributes:
        kind: name of the collective, and its arguments besides the number of ranks.
        name: the requested operation, which must be the same on all ranks.
        vector: input and output.
        reduction: the reduction operator.
        then: receives the vector of the result.
        operation: completed with the collective.
    """

    kind: tuple[Any, ...]
    name: str
    vector: Vector
    reduction: str
    then: Callable[[Vector], None]
    operation: Operation


class Collector:
    """Runs collectives.

    Args:
        team: the ranks that communicate.
        costs: cost of each of its channels.
        timeout_s: how long a caller is blocked while the queue is full.
    """

    def __init__(self, team: Team, costs: Sequence[ChannelCost], timeout_s: float) -> None:
        self._team = team
        self._timeout_s = timeout_s
        self.planning = Planning(team, costs)
        self._changed = threading.Condition()
        self._running: deque[tuple[CollectiveRequest, Any]] = deque()
        self._waiting: deque[CollectiveRequest] = deque()
        self._is_busy = False
        self._is_closed = False
        self._thread = threads.start(self._collect, "fairway-collect")

    def run(self, asked: CollectiveRequest, *, waits: bool) -> None:
        """Runs a collective on a vector.

        Args:
            asked: the collective.
            waits: whether the caller waits for it.
        """
        with self._changed:
            is_idle = not self._is_busy and not self._running and not self._waiting
            if not waits or not is_idle:
                self._put(asked)
                return
        asked.operation.end_by(lambda: self._call(asked))

    def _call(self, asked: CollectiveRequest) -> None:
        _, part = self.planning.part(asked.kind, asked.vector.dtype, asked.name)
        asked.then(self._team.call(part, asked.vector, asked.reduction))
        self._warn()

    def _put(self, asked: CollectiveRequest) -> None:
        has_room = self._changed.wait_for(
            lambda: len(self._waiting) < WAITING_MAX or self._is_closed, self._timeout_s
        )
        if self._is_closed:
            asked.operation.end(TeamError("Closed", "it is closed"))
        elif not has_room:
            asked.operation.end(TeamError("Late", f"{WAITING_MAX} others wait to be carried out"))
        else:
            self._waiting.append(asked)
            self._submit()
            self._changed.notify_all()

    def _submit(self) -> None:
        """Submits queued collectives while fewer than ``RUNNING_MAX`` are in flight."""
        while self._waiting and len(self._running) < RUNNING_MAX:
            asked = self._waiting.popleft()
            try:
                collective, part = self.planning.part(asked.kind, asked.vector.dtype, asked.name)
                step = self._team.begin(part)
                ticket = self._team.submit((step, 0), collective, asked.vector, asked.reduction)
            except Exception as error:
                asked.operation.end(error)
            else:
                self._running.append((asked, ticket))

    def _collect(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._submit()
                self._changed.wait_for(lambda: self._running or self._is_closed)
                if not self._running:
                    return
                self._is_busy = True
                asked, ticket = self._running.popleft()
                self._changed.notify_all()
            asked.operation.end_by(lambda: asked.then(self._team.wait(ticket)))  # noqa: B023
            self._warn()
            del asked, ticket

    def _warn(self) -> None:
        for text in self._team.take_notices():
            log.warning("%s", text)

    def close(self, *, waits: bool) -> None:
        """Accepts no more; with ``waits`` drains the queue; then leaves the team."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if waits and threading.current_thread() is not self._thread:
            self._thread.join()
        self._team.close()
