"""Point-to-point messages, beside collectives.

Each pair of ranks that communicates has a team of its own, over which messages are sent in order:
first a header, then the bytes. The receiver matches them by tag. A message that arrives before it
is requested is kept, up to a limit, so that messages may be received in another order than they
were sent in.
"""

from __future__ import annotations

import dataclasses
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fairway.communication.steps import ChannelCost, Solo
from fairway.communication.team import Team, Vector
from fairway.errors import TeamError
from fairway.torch import threads
from fairway.torch.errors import Subject
from fairway.torch.tensors import name_of
from fairway.torch.works import Callbacks, Operation

__all__ = ["Messages"]

KEPT_BYTES = 256 << 20
"""Limit on unrequested bytes that are kept of one rank; a single larger message is kept, too."""
WAITING_MAX = 1 << 16
"""Messages to one rank that may wait in the queue; further senders are blocked (back-pressure)."""

BYTE = np.dtype(np.uint8)
HEAD = struct.Struct("<qq16s")
"""Header of a message: its tag, its size in bytes, and the name of its elements' type."""

Join = Callable[[int, int], Team]


@dataclasses.dataclass(eq=False)
class _Sent:
    vector: Vector
    dtype: bytes
    tag: int
    operation: Operation


@dataclasses.dataclass(eq=False)
class _Found:
    """A message that has arrived."""

    vector: Vector
    dtype: bytes


@dataclasses.dataclass(eq=False)
class _Wanted:
    """A requested message; from any rank if no source is given."""

    source: int | None
    tag: int
    vector: Vector
    dtype: bytes
    then: Callable[[Vector], None]
    operation: Operation


class _Message(Operation):
    """One message; if it times out, later messages of the pair cannot keep their order."""

    def __init__(
        self,
        subject: Subject,
        result: Sequence[Any],
        callbacks: Callbacks,
        limit_s: float,
        give_up: Callable[[Operation, str], str],
    ) -> None:
        super().__init__(subject, result, callbacks, limit_s)
        self._give_up = give_up

    def expire(self, seconds: float) -> Exception:
        reason = self._give_up(self, f"a message was not over after {seconds:.1f} s")
        error = self.subject.late(seconds, reason)
        self.end(error)
        return error


def _type_of(tensors: Sequence[Tensor]) -> bytes:
    """Returns the name of the type of a message's elements, as it is sent."""
    (tensor,) = tensors
    return name_of(tensor.dtype).encode()[:16].ljust(16, b"\0")


def _name(dtype: bytes) -> str:
    return dtype.rstrip(b"\0").decode(errors="replace")


class _Carrier:
    """One direction between two ranks, whose team meets on first use."""

    def __init__(self, join: Callable[[], Team], costs: Sequence[ChannelCost]) -> None:
        self._join = join
        self._costs = costs
        self._team: Team | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def meet(self) -> None:
        team = self._join()
        with self._lock:
            self._team = team
            self._part = Solo(team, self._costs).part
            if self._is_closed:
                team.close()

    def carry(self, vector: Vector) -> Vector:
        """Transfers all bytes from the source rank to the target rank."""
        if self._team is None:
            self.meet()
        assert self._team is not None
        if vector.size:
            _, part = self._part(("broadcast", vector.nbytes, 0), BYTE)
            self._team.call(part, vector.view(BYTE))
        return vector

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._team is not None:
                self._team.close()


class _Outgoing:
    """All messages to one rank."""

    def __init__(self, carrier: _Carrier, limit_s: float) -> None:
        self._carrier = carrier
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._waiting: deque[_Sent] = deque()
        self._failure: Exception | None = None
        self._is_closed = False
        self._thread = threads.start(self._serve, "fairway-send")

    def put(self, sent: _Sent) -> None:
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: len(self._waiting) < WAITING_MAX, self._limit_s
            )
            failure = self._failure
            if not has_room:
                failure = TeamError("Late", f"{WAITING_MAX} messages wait to leave")
            if failure is None:
                self._waiting.append(sent)
                self._changed.notify_all()
        if failure is not None:
            sent.operation.end(failure)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                sent = self._waiting.popleft()
                self._changed.notify_all()
            try:
                head = HEAD.pack(sent.tag, sent.vector.nbytes, sent.dtype)
                self._carrier.carry(np.frombuffer(bytearray(head), BYTE))
                self._carrier.carry(sent.vector)
            except Exception as error:
                self.fail(error)
                sent.operation.end(error)
                return
            sent.operation.end()
            del sent

    def fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            waiting = list(self._waiting)
            self._waiting.clear()
            self._is_closed = True
            self._changed.notify_all()
        for sent in waiting:
            sent.operation.end(error)
        self._carrier.close()

    def close(self, *, waits: bool) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if waits:
            # A rank that never receives what was sent does not keep this one from leaving.
            self._thread.join(self._limit_s)
        self._carrier.close()


class _Incoming:
    """All messages from one rank."""

    def __init__(self, source: int, carrier: _Carrier, desk: Messages) -> None:
        self.source = source
        self._carrier = carrier
        self._desk = desk
        self.kept: deque[tuple[int, _Found]] = deque()
        self.failure: Exception | None = None
        self._thread = threads.start(self._serve, "fairway-receive")

    def _serve(self) -> None:
        desk = self._desk
        try:
            while desk.is_wanted(self.source):
                head = self._carrier.carry(np.empty(HEAD.size, BYTE))
                tag, size, dtype = HEAD.unpack(head.tobytes())
                wanted = desk.match(self, tag, size)
                if wanted is not None and (wanted.vector.nbytes, wanted.dtype) == (size, dtype):
                    found = _Found(self._carrier.carry(wanted.vector), dtype)
                    desk.settle(wanted, self.source, found)
                    continue
                found = _Found(self._carrier.carry(np.empty(size, BYTE)), dtype)
                if wanted is None:
                    desk.keep(self, tag, found)
                else:
                    desk.settle(wanted, self.source, found)
        except Exception as error:
            desk.lose(self, error)

    def close(self) -> None:
        self._carrier.close()


class Messages:
    """Messages of one rank of a process group.

    Args:
        rank: this rank.
        members: global rank of each rank, for errors.
        join: meets another rank; the first of the two sends.
        costs: cost of each channel.
        limit_s: timeout of a message.
        callbacks: runs callbacks of the operations' futures.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        join: Join,
        costs: Sequence[ChannelCost],
        limit_s: float,
        callbacks: Callbacks,
    ) -> None:
        self._rank = rank
        self._members = members
        self._join = join
        self._costs = costs
        self.limit_s = limit_s
        self._callbacks = callbacks
        self._changed = threading.Condition()
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._wanted: list[_Wanted] = []
        self._is_closed = False

    def send(
        self, subject: Subject, result: Sequence[Tensor], vector: Vector, to: int, tag: int
    ) -> Operation:
        """Sends the bytes of a vector, which must not be modified until the operation ends."""
        operation = _Message(
            subject, result, self._callbacks, self.limit_s, lambda _, why: self._stop(to, why)
        )
        with self._changed:
            if to not in self._outgoing:
                self._outgoing[to] = _Outgoing(self._carrier(self._rank, to), self.limit_s)
            outgoing = self._outgoing[to]
        outgoing.put(_Sent(vector, _type_of(result), tag, operation))
        return operation

    def receive(
        self,
        subject: Subject,
        result: Sequence[Tensor],
        vector: Vector,
        then: Callable[[Vector], None],
        source: int | None,
        tag: int,
    ) -> Operation:
        """Receives as many bytes as a vector has, from one rank or any."""
        operation = _Message(subject, result, self._callbacks, self.limit_s, self._forget)
        wanted = _Wanted(source, tag, vector, _type_of(result), then, operation)
        sources = [source] if source is not None else self._others()
        with self._changed:
            for one in sources:
                if one not in self._incoming:
                    carrier = self._carrier(one, self._rank)
                    self._incoming[one] = _Incoming(one, carrier, self)
            kept = self._take_kept(sources, tag)
            failure = None if kept else self._failure(wanted)
            if kept is None and failure is None:
                self._wanted.append(wanted)
                self._changed.notify_all()
        if failure is not None:
            operation.end(failure)
        elif kept is not None:
            self.settle(wanted, *kept)
        return operation

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._members)) if rank != self._rank]

    def _carrier(self, source: int, target: int) -> _Carrier:
        return _Carrier(lambda: self._join(source, target), self._costs)

    def _take_kept(self, sources: Sequence[int], tag: int) -> tuple[int, _Found] | None:
        for source in sources:
            kept = self._incoming[source].kept
            for place, (known, found) in enumerate(kept):
                if known == tag:
                    del kept[place]
                    self._changed.notify_all()
                    return source, found
        return None

    def _failure(self, wanted: _Wanted) -> Exception | None:
        """Returns why a message cannot arrive: no rank is left to send it; else None."""
        if self._is_closed:
            return TeamError("Closed", "it is closed")
        sources = [wanted.source] if wanted.source is not None else self._others()
        failures = [self._incoming[one].failure for one in sources]
        return failures[0] if failures and all(failures) else None

    # Called by the receiving threads

    def is_wanted(self, source: int) -> bool:
        """Waits until a message of a rank is requested; returns False once closed."""

        def can_come() -> bool:
            return any(one.source in (None, source) for one in self._wanted)

        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or can_come())
            return not self._is_closed

    def match(self, incoming: _Incoming, tag: int, size: int) -> _Wanted | None:
        """Removes and returns the first request for a message; None if it can be kept."""

        def found() -> _Wanted | None:
            for one in self._wanted:
                if one.tag == tag and one.source in (None, incoming.source):
                    return one
            return None

        def has_room() -> bool:
            kept = sum(found.vector.nbytes for _, found in incoming.kept)
            return not kept or kept + size <= KEPT_BYTES

        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or found() or has_room())
            wanted = found()
            if wanted is not None:
                self._wanted.remove(wanted)
            return wanted

    def keep(self, incoming: _Incoming, tag: int, found: _Found) -> None:
        """Keeps a message that was not requested when it arrived; settles a request made since."""
        with self._changed:
            for one in self._wanted:
                if one.tag == tag and one.source in (None, incoming.source):
                    self._wanted.remove(one)
                    break
            else:
                incoming.kept.append((tag, found))
                return
        self.settle(one, incoming.source, found)

    def settle(self, wanted: _Wanted, source: int, found: _Found) -> None:
        """Completes a request with its message."""

        def take() -> None:
            expected, nbytes = wanted.vector.nbytes, found.vector.nbytes
            if (nbytes, found.dtype) != (expected, wanted.dtype):
                raise TeamError(
                    "Diverged",
                    f"rank {self._members[source]} sent {nbytes} bytes of {_name(found.dtype)}; "
                    f"expected {expected} bytes of {_name(wanted.dtype)}",
                    self._members[source],
                )
            wanted.operation.source = source
            if found.vector is not wanted.vector:
                wanted.vector.view(np.uint8)[:] = found.vector
            wanted.then(wanted.vector)

        wanted.operation.end_by(take)

    def lose(self, incoming: _Incoming, error: Exception) -> None:
        """Fails the requests that only a lost rank could have satisfied."""
        incoming.close()
        with self._changed:
            incoming.failure = error
            lost = [(one, why) for one in self._wanted if (why := self._failure(one)) is not None]
            for one, _ in lost:
                self._wanted.remove(one)
        for one, why in lost:
            one.operation.end(why)

    # Timeouts

    def _stop(self, to: int, why: str) -> str:
        """Fails all messages to a rank after one timed out: they must keep their order."""
        self._outgoing[to].fail(TeamError("Late", why))
        return "; the other rank has not asked for it"

    def _forget(self, operation: Operation, why: str) -> str:
        """Withdraws the request for a message that did not arrive in time."""
        with self._changed:
            kept = [one for one in self._wanted if one.operation is not operation]
            is_waiting = len(kept) < len(self._wanted)
            self._wanted[:] = kept
        return "; nothing was sent" if is_waiting else ""

    def close(self, *, waits: bool) -> None:
        """Accepts no more and fails open requests; with ``waits`` sends queued messages first."""
        with self._changed:
            self._is_closed = True
            wanted = list(self._wanted)
            self._wanted.clear()
            self._changed.notify_all()
        for outgoing in self._outgoing.values():
            outgoing.close(waits=waits)
        for incoming in self._incoming.values():
            incoming.close()
        for one in wanted:
            one.operation.end(TeamError("Closed", "it is closed"))
