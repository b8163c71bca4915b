"""Teams: communicators of ranks in separate processes that execute collectives in a planned order.

Every rank listens, learns the addresses of its peers, and joins (rendezvous). All ranks then begin
the same steps, each of which has the collectives of one script; submitted collectives are executed
in the order of the script on every rank, whatever the order of submission.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fairway import _native
from fairway._native import Collective, Script
from fairway.communication.membership import TeamMembership
from fairway.errors import TeamError

__all__ = ["Channel", "Collective", "Listener", "Script", "Team", "Ticket"]

Vector = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Channel:
    """A network path to a rank.

    Attributes:
        address: where the rank listens, ``tcp:HOST:PORT`` or ``unix:PATH``; port 0 is any free
            port.
        rate_bps: bandwidth of the path, if known.
    """

    address: str
    rate_bps: float | None = None


@dataclasses.dataclass(frozen=True)
class Ticket:
    """Handle of a submitted collective.

    Attributes:
        vector: its buffer, which holds the result once it has ended.
        result: start and end (exclusive) of the result in ``vector``, in elements.
    """

    vector: Vector
    result: tuple[int, int]
    _ticket: _native.Ticket


class Team:
    """One rank's endpoint of a team; see :meth:`Listener.join`."""

    def __init__(self, enforcer: _native.Enforcer, plane: _native.DataPlane | None = None) -> None:
        self._enforcer = enforcer
        self._plane = plane
        self.rank = enforcer.rank
        self.ranks = enforcer.ranks

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the team; peers that still wait for this rank get an error."""
        self._enforcer.close()
        if self._plane is not None:
            self._plane.close()

    def vector(self, collective: Collective, dtype: Any) -> Vector:
        """Allocates the buffer on which this rank works; its contents are undefined."""
        kind = np.dtype(dtype)
        length = collective.work(self.rank)
        memory = self._enforcer.memory(max(1, length * kind.itemsize))
        return np.frombuffer(memoryview(memory), kind, length)

    def prepare(self, script: Script) -> _native.ScriptPart:
        """Prepares this rank's part of a script.

        Raises:
            TeamError: the script is for other ranks, or needs more channels than the team has.
        """
        with _translated():
            return self._enforcer.prepare(script)

    def begin(self, part: _native.ScriptPart, following: int = 0) -> int:
        """Begins a step; returns its number.

        Args:
            part: prepared part of the step's script.
            following: how many more steps of it are sure to begin after this one; the same on all
                ranks. The script prefetches only for those.
        """
        with _translated():
            return self._enforcer.begin(part, following)

    def follow(self, part: _native.ScriptPart) -> None:
        """Executes a script from the next step on; all ranks must call this before the same step.

        Raises:
            TeamError: another script is being agreed on.
        """
        with _translated():
            self._enforcer.follow(part)

    def begin_planned(self, following: int = 0) -> tuple[int, int]:
        """Begins a step of the current script; see :meth:`follow` and :meth:`propose`.

        Args:
            following: how many more steps are sure to begin after this one, at most 4; the same on
                all ranks.

        Returns:
            The step's number, and the generation of its plan: 0, plus 1 for each that was proposed.

        Raises:
            TeamError: the ranks do not agree on a plan in time.
        """
        with _translated():
            return self._enforcer.begin_planned(following)

    def propose(self, script: Script) -> int:
        """Proposes a script of the same collectives to all ranks, while steps continue.

        Returns:
            The step from which all ranks execute it.

        Raises:
            TeamError: this is not rank 0, or a rank rejects the script, is lost or misses the
                deadline; then no rank changes over.
        """
        with _translated():
            return self._enforcer.propose(script)

    def submit(
        self,
        at: tuple[int, int],
        collective: Collective,
        vector: Vector,
        reduction: str = "sum",
        poison: str | None = None,
    ) -> Ticket:
        """Submits a collective.

        Args:
            at: step number, and operation number in the step.
            collective: the operation of that number.
            vector: its buffer, laid out as ``collective`` documents; must not be accessed until it
                has ended.
            reduction: ``sum``, ``product``, ``max``, ``min``, ``and``, ``or`` or ``xor``.
            poison: the error that made this rank's input invalid, if any; all ranks then raise it.

        Raises:
            TeamError: the step has no such operation, or a different one.
        """
        with _translated():
            elements = (_name(vector.dtype), reduction)
            ticket = self._enforcer.submit(at, collective, elements, _buffer(vector), poison)
        return Ticket(vector, collective.result(self.rank), ticket)

    def wait(self, ticket: Ticket) -> Vector:
        """Waits for a collective; returns its result, a view of its buffer.

        Raises:
            TeamError: a rank poisoned it, is lost, stalled, or executes something else.
        """
        with _translated():
            self._enforcer.wait(ticket._ticket)
        return ticket.vector[slice(*ticket.result)]

    def run(
        self, collective: Collective, vector: Vector, reduction: str = "sum", channel: int = 0
    ) -> Vector:
        """Executes one collective as a step of its own; returns its result."""
        return self.call(self.prepare(Script.series(collective, channel)), vector, reduction)

    def call(self, part: _native.ScriptPart, vector: Vector, reduction: str = "sum") -> Vector:
        """Executes the single collective of a script as a step of its own; returns its result.

        Faster than beginning a step, submitting and waiting.

        Args:
            part: of a script with one collective, from :meth:`prepare`.
            vector: its buffer; fastest if allocated by :meth:`vector`.
            reduction: as for :meth:`submit`.

        Raises:
            TeamError: as for :meth:`submit` and :meth:`wait`.
        """
        try:
            if vector.dtype.isbuiltin == 1:
                result = self._enforcer.call(part, vector, reduction)
            else:
                result = self._enforcer.call(part, _buffer(vector), reduction, _name(vector.dtype))
        except _native.TeamError as error:
            raise TeamError(*error.args) from None
        return vector if result is None else vector[slice(*result)]

    def take_spans(self) -> list[tuple[int, int, int, int, int, int, int]]:
        """Returns the motifs executed since the last call.

        Each is step, operation, motif, channel, and the times at which it was ready, began and
        ended, in nanoseconds on the clock of :meth:`now_ns`.
        """
        return self._enforcer.take_spans()

    def take_notices(self) -> list[str]:
        """Returns warnings since the last call, about events that did not cause a failure.

        For example a channel to a rank that was lost, and the channel to which its traffic failed
        over.
        """
        return self._enforcer.take_notices()

    def now_ns(self) -> int:
        """Returns nanoseconds since this rank joined."""
        return self._enforcer.now_ns()


class Listener:
    """A rank that accepts connections, and has not joined its team.

    Args:
        rank: rank of this process.
        channels: its network paths; the same number on every rank, since channel N connects to
            channel N of each peer.
        token: shared secret of all ranks.

    Raises:
        TeamError: an address cannot be listened on.
    """

    def __init__(self, rank: int, channels: Sequence[Channel], token: str) -> None:
        self._rank = rank
        self._rates = [channel.rate_bps for channel in channels]
        addresses = [channel.address for channel in channels]
        try:
            self._plane = _native.DataPlane(rank, _own(addresses[0]), addresses, token)
        except (OSError, ValueError) as error:
            where = ", ".join(addresses)
            raise TeamError("Join", f"rank {rank} cannot listen at {where}: {error}") from None

    @property
    def addresses(self) -> list[str]:
        """The address of each channel."""
        return self._plane.channels

    def join(
        self,
        addresses: Sequence[Sequence[str]],
        timeout_s: float = 60.0,
        members: Sequence[int] | None = None,
        name: int = 0,
        meeting_s: float | None = None,
        names: Sequence[int] | None = None,
    ) -> Team:
        """Connects to all peers and forms a team.

        All ranks must listen before any joins: one whose machine refuses connections is lost.

        Args:
            addresses: those of all ranks, in order of rank.
            timeout_s: deadline for a rank that keeps its peers waiting, now and later.
            members: ranks of this team, in its order; by default all. They become its ranks 0, 1
                and so on.
            name: identifier that distinguishes it from other teams of the same ranks.
            meeting_s: deadline for connecting, if it is not ``timeout_s``.
            names: the numbers by which errors call the ranks of the team, if not their own.

        Raises:
            TeamError: a rank does not listen, or does not connect in time.
        """
        for other, reached_at in enumerate(addresses):
            if other != self._rank:
                self._plane.add_peer(other, ",".join(reached_at))
        hosts = list(range(len(addresses)) if members is None else members)
        numbered = [(number + 1, rate) for number, rate in enumerate(self._rates)]
        with _translated():
            membership = TeamMembership(
                name, hosts.index(self._rank), hosts, numbered, timeout_s, meeting_s, names
            )
            enforcer = _native.Enforcer(self._plane, membership)
        return Team(enforcer, self._plane if members is None else None)

    def close(self) -> None:
        """Stops listening."""
        self._plane.close()


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name


def _buffer(vector: Vector) -> Vector:
    """Returns a view with the buffer protocol, which numpy's extension types do not support."""
    return vector if vector.dtype.isbuiltin == 1 else vector.view(np.uint8)


def _own(address: str) -> str:
    """Returns the address on which the data plane itself listens, beside its channels."""
    scheme, _, place = address.partition(":")
    if scheme == "unix":
        return f"unix:{place}.own"
    return f"tcp:{place.rpartition(':')[0]}:0"


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Translates native errors into :class:`TeamError`."""
    try:
        yield
    except _native.TeamError as error:
        raise TeamError(*error.args) from None
