"""How a rank joins a process group and leaves it."""

from __future__ import annotations

import atexit
import datetime
import os
import threading
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Backend

from fairway.communication.team import Team
from fairway.errors import TeamError
from fairway.torch.collecting import Collector
from fairway.torch.errors import BackendError
from fairway.torch.exchanging import Exchanges
from fairway.torch.meeting import meet
from fairway.torch.messages import Messages
from fairway.torch.works import Callbacks

__all__ = ["GroupMember"]

UNLIMITED_S = 1e6
"""Timeout of a team for messages, which are bounded by the timeout of each operation instead."""
EXCHANGES = 1 << 62
"""Name of the team for exchanges; teams for messages have smaller numbers."""


class GroupMember(Backend):  # type: ignore[misc]
    """A rank that joins a process group, and leaves it.

    Args:
        store: key-value store for the rendezvous of ranks.
        rank: rank of this process in the group.
        size: number of ranks.
        timeout: deadline after which a rank that keeps others waiting fails the operation.
        name: name of the group.
        members: global ranks of the group; empty for all.

    Raises:
        BackendError: the channels are invalid, or some rank cannot be reached.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        name: str = "",
        members: Sequence[int] = (),
    ) -> None:
        super().__init__(rank, size)
        self._options = Backend.Options("fairway", timeout=timeout)
        self._timeout_s = timeout.total_seconds()
        self._members = list(members) or list(range(size))
        self._where = f"in group {name!r} on rank {self._members[rank]}"
        self._store: Any = store
        self._meeting = meet(store, rank, self._members, self._timeout_s)
        try:
            team = self._join()
        except BaseException as error:
            self._meeting.close()
            if isinstance(error, TeamError):
                text = f"{self._where[3:]} cannot be joined: {error}"
                raise BackendError(error.kind, text, error.rank) from None
            raise
        self._team = team
        costs = self._meeting.costs
        self._collector = Collector(team, costs, self._timeout_s)
        self._exchanges = Exchanges(lambda: self._join(name=EXCHANGES), costs, self._timeout_s)
        self._callbacks = Callbacks()
        self._messages = Messages(
            rank, self._members, self._join_pair, costs, self._timeout_s, self._callbacks
        )
        self._sequence = 0
        self._barriers = 0
        self._leaving = threading.Lock()
        self._has_left = False
        self._process = os.getpid()
        # Ranks that wait for this one notice its exit at once. PyTorch keeps the C++ half of a
        # backend and drops the Python half, which has to live until then.
        atexit.register(self.abort)

    def _join(self, name: int = 0) -> Team:
        listener, addresses = self._meeting.listener, self._meeting.addresses
        return listener.join(addresses, self._timeout_s, name=name, names=self._members)

    def _join_pair(self, source: int, target: int) -> Team:
        """Meets the other rank of a pair; a receiver waits as long as messages are requested."""
        pair, name = (source, target), 1 + source * self.size() + target
        meeting_s = self._timeout_s if source == self.rank() else UNLIMITED_S
        return self._meeting.listener.join(
            self._meeting.addresses,
            UNLIMITED_S,
            pair,
            name,
            meeting_s,
            [self._members[one] for one in pair],
        )

    # Queries of PyTorch

    @property
    def options(self) -> Any:
        """The options of the backend."""
        return self._options

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """Returns the name of the backend."""
        return "fairway"

    # A property that is not defined here would be looked up in C++, which calls Python again.
    supports_splitting = property(lambda _: False)
    supports_coalescing = property(lambda _: False)
    supports_shrinking = property(lambda _: False)
    supports_reconfigure = property(lambda _: False)
    supports_window = property(lambda _: False)
    _supports_time_estimate = property(lambda _: False)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Sets the timeout of later messages; collectives keep that of the group's start."""
        self._options._timeout = timeout
        self._messages.limit_s = timeout.total_seconds()

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def shutdown(self) -> None:
        """Waits for operations in progress, and leaves the group."""
        self._leave(waits=True)

    def abort(self) -> None:
        """Leaves the group at once."""
        self._leave(waits=False)

    def _leave(self, *, waits: bool) -> None:
        if os.getpid() != self._process:
            # A forked child has none of these threads, and its parent is still using the group.
            return
        with self._leaving:
            if self._has_left:
                return
            self._has_left = True
        self._messages.close(waits=waits)
        self._exchanges.close(waits=waits)
        self._collector.close(waits=waits)
        self._callbacks.close()
        self._meeting.close()
        # A group that restarts creates its store anew, perhaps at the same port.
        self._store = None
        atexit.unregister(self.abort)
