"""Operations with sizes that no rank knows alone, run concurrently with all others.

Each consists of several collectives, of which the later ones depend on results of the first. They
use a team of their own, so that the caller need not wait for earlier operations, and collectives
that are requested meanwhile keep their order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fairway.communication.steps import ChannelCost
from fairway.communication.team import Collective, Team, Vector
from fairway.errors import TeamError
from fairway.torch import threads
from fairway.torch.planning import Planning
from fairway.torch.works import Operation

__all__ = ["Carry", "Exchanges", "all_to_all", "gather_vectors"]

WAITING_MAX = 1 << 16
"""Operations that may wait in the queue; further callers are blocked (back-pressure)."""

Carry = Callable[[tuple[Any, ...], Vector], Vector]
"""Runs a collective, given by its kind and its arguments besides the number of ranks."""


_Asked = tuple[Callable[[Team, Carry], None], Operation, str]
"""What to run, the operation that it completes, and its name."""


class Exchanges:
    """Runs such operations, one after another.

    Args:
        join: meets all other ranks.
        costs: cost of each channel.
        timeout_s: how long a caller is blocked while the queue is full.
    """

    def __init__(
        self, join: Callable[[], Team], costs: Sequence[ChannelCost], timeout_s: float
    ) -> None:
        self._join = join
        self._costs = costs
        self._timeout_s = timeout_s
        self._team: Team | None = None
        self._changed = threading.Condition()
        self._waiting: deque[_Asked] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def put(self, act: Callable[[Team, Carry], None], operation: Operation, name: str) -> None:
        """Enqueues an operation, which ends when ``act`` returns.

        Args:
            act: called with the team and a function that runs collectives.
            operation: completed with it.
            name: the requested operation, which must be the same on all ranks.
        """
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: len(self._waiting) < WAITING_MAX, self._timeout_s
            )
            if has_room and not self._is_closed:
                self._waiting.append((act, operation, name))
                self._changed.notify_all()
                if self._thread is None:
                    self._thread = threads.start(self._serve, "fairway-exchange")
                return
        kind = "Late" if not has_room else "Closed"
        operation.end(TeamError(kind, f"{WAITING_MAX} others wait to be carried out"))

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                act, operation, name = self._waiting.popleft()
                self._changed.notify_all()
            operation.end_by(lambda: self._carry(act, name))  # noqa: B023 - called at once
            del act, operation

    def _carry(self, act: Callable[[Team, Carry], None], name: str) -> None:
        if self._team is None:
            team = self._join()
            self._planning = Planning(team, self._costs)
            self._team = team
            if self._is_closed:
                team.close()
        team = self._team

        def carry(kind: tuple[Any, ...], vector: Vector) -> Vector:
            _, part = self._planning.part(kind, vector.dtype, name)
            return team.call(part, vector)

        act(team, carry)

    def close(self, *, waits: bool) -> None:
        """Accepts no more; with ``waits`` drains the queue (up to the timeout); leaves the team."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if waits and self._thread is not None:
            self._thread.join(self._timeout_s)
        if self._team is not None:
            self._team.close()


def all_to_all(
    team: Team, carry: Carry, inputs: Sequence[Vector], sizes: Sequence[int], dtype: Any
) -> list[Vector]:
    """Exchanges a block with every other rank, of any sizes.

    Args:
        team: the ranks that communicate.
        carry: runs a collective.
        inputs: this rank's blocks, one for each rank.
        sizes: elements that this rank expects from each rank.
        dtype: type of the elements.

    Raises:
        TeamError: on all ranks, if a rank expects another size than is sent to it.
    """
    ranks, rank = team.ranks, team.rank
    table = np.zeros((ranks, 2, ranks), np.int64)
    table[rank] = [one.size for one in inputs], sizes
    carry(("all_gather", table.size), table.reshape(-1))
    sent, expected = table[:, 0], table[:, 1].T
    for source, target in np.argwhere(sent != expected):
        raise TeamError(
            "Diverged",
            f"rank {source} of the group sends {sent[source, target]} elements to rank {target}, "
            f"which expects {expected[source, target]}",
        )
    if (sent == sent[0, 0]).all():
        return _even_blocks(team, carry, inputs, dtype)
    return blocks(team, carry, inputs, sent, dtype)


def _even_blocks(team: Team, carry: Carry, inputs: Sequence[Vector], dtype: Any) -> list[Vector]:
    """Exchanges a block with every other rank, all of one size."""
    total = sum(one.size for one in inputs)
    kind = ("all_to_all", total)
    vector = team.vector(Collective.all_to_all(team.ranks, total), dtype)
    np.concatenate(inputs, out=vector[:total])
    return np.split(carry(kind, vector), team.ranks)


def blocks(
    team: Team, carry: Carry, inputs: Sequence[Vector], sizes: Any, dtype: Any
) -> list[Vector]:
    """Exchanges a block with every other rank, of sizes that all ranks know."""
    rank = team.rank
    flat = np.empty(int(sizes[rank].sum() + sizes[:, rank].sum()), dtype)
    if inputs:
        np.concatenate(inputs, out=flat[: int(sizes[rank].sum())])
    result = carry(("all_to_all_of", tuple(int(one) for one in sizes.reshape(-1))), flat)
    return np.split(result, np.cumsum(sizes[:, rank])[:-1])


def gather_vectors(team: Team, carry: Carry, own: Vector) -> list[Vector]:
    """Gathers the vectors of all ranks, which may differ in length."""
    ranks = team.ranks
    lengths = np.zeros(ranks, np.int64)
    lengths[team.rank] = own.size
    carry(("all_gather", ranks), lengths)
    sizes = np.tile(lengths[:, None], (1, ranks))
    return blocks(team, carry, [own] * ranks, sizes, own.dtype)
