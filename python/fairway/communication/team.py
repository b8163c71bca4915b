"""Teams: ranks in processes of their own that communicate as a plan says.

Every rank listens, learns where the others listen, and joins. Then all begin the same steps, each
of which has the collectives of one script; what a rank submits is carried out in the order of the
script on every rank, whenever each of them came to it.
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
from fairway.errors import TeamError

__all__ = ["Channel", "Collective", "Listener", "Script", "Team", "Ticket"]

Vector = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Channel:
    """One way by which a rank is reached.

    Attributes:
        address: where it listens, ``tcp:HOST:PORT`` or ``unix:PATH``; port 0 is any free one.
        rate_bps: what it carries, if that is known.
    """

    address: str
    rate_bps: float | None = None


@dataclasses.dataclass(frozen=True)
class Ticket:
    """A collective that was submitted.

    Attributes:
        vector: what it works on; at its end the result is in it.
        result: where, as first element and the one behind the last.
    """

    vector: Vector
    result: tuple[int, int]
    _ticket: _native.Ticket


class Team:
    """One rank's end of a team; see :meth:`Listener.join`."""

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
        """Leaves; others that still wait for this rank get an error."""
        self._enforcer.close()
        if self._plane is not None:
            self._plane.close()

    def vector(self, collective: Collective, dtype: Any) -> Vector:
        """Memory for what this rank works on; what is in it is undefined."""
        kind = np.dtype(dtype)
        length = collective.work(self.rank)
        memory = self._enforcer.memory(max(1, length * kind.itemsize))
        return np.frombuffer(memoryview(memory), kind, length)

    def prepare(self, script: Script) -> _native.ScriptPart:
        """Gets ready for steps of a script.

        Raises:
            TeamError: it is of other ranks, or of more channels than there are.
        """
        with _translated():
            return self._enforcer.prepare(script)

    def begin(self, part: _native.ScriptPart, following: int = 0) -> int:
        """Begins a step; returns its number.

        Args:
            part: of what script.
            following: how many more steps of it will surely be begun after this one; the same on
                all ranks. What the script fetches ahead is fetched only for those.
        """
        with _translated():
            return self._enforcer.begin(part, following)

    def follow(self, part: _native.ScriptPart) -> None:
        """Keeps to a script from the next step on; all ranks do so at the same step.

        Raises:
            TeamError: another one is being agreed on.
        """
        with _translated():
            self._enforcer.follow(part)

    def begin_planned(self, following: int = 0) -> tuple[int, int]:
        """Begins a step of the script that is followed.

        Args:
            following: how many more steps will surely be begun after this one, at most 4; the same
                on all ranks.

        Returns:
            The step's number, and that of its plan: 0, and one more for each that was proposed.

        Raises:
            TeamError: it is not decided in time which plan holds.
        """
        with _translated():
            return self._enforcer.begin_planned(following)

    def propose(self, script: Script) -> int:
        """Proposes a script of the same collectives to all ranks, while steps go on.

        Returns:
            The step from which all ranks keep to it.

        Raises:
            TeamError: this is not rank 0, or some rank cannot keep to it, is lost or does not
                answer in time; then none keeps to it.
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
            at: number of the step, and of the operation in it.
            collective: what is asked for.
            vector: what it works on, as its docs lay out; not to be touched until it has ended.
            reduction: ``sum``, ``product``, ``max``, ``min``, ``and``, ``or`` or ``xor``.
            poison: why this rank's part means nothing, if it does; all ranks then get this error.

        Raises:
            TeamError: the step has no such operation, or another one.
        """
        with _translated():
            elements = (_name(vector.dtype), reduction)
            ticket = self._enforcer.submit(at, collective, elements, _buffer(vector), poison)
        return Ticket(vector, collective.result(self.rank), ticket)

    def wait(self, ticket: Ticket) -> Vector:
        """Waits for a collective to end; returns its result, a part of its vector.

        Raises:
            TeamError: a rank had nothing to give, is gone, stuck, or does something else.
        """
        with _translated():
            self._enforcer.wait(ticket._ticket)
        return ticket.vector[slice(*ticket.result)]

    def run(
        self, collective: Collective, vector: Vector, reduction: str = "sum", channel: int = 0
    ) -> Vector:
        """Carries one collective out as a step of its own; returns its result."""
        return self.call(self.prepare(Script.series(collective, channel)), vector, reduction)

    def call(self, part: _native.ScriptPart, vector: Vector, reduction: str = "sum") -> Vector:
        """Carries the one collective of a script out as a step of its own; returns its result.

        This takes less than beginning a step, submitting and waiting.

        Args:
            part: of a script with one collective, from :meth:`prepare`.
            vector: what it works on; quickest if it comes from :meth:`vector`.
            reduction: as for :meth:`submit`.

        Raises:
            TeamError: as for submitting and waiting.
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
        """What was carried out since the last call.

        Each is step, operation, motif, channel, since when it was ready, from when and until when
        it was carried out; times in nanoseconds as :meth:`now_ns` counts them.
        """
        return self._enforcer.take_spans()

    def take_notices(self) -> list[str]:
        """What people should know and nothing failed by, since the last call.

        Such as a channel that leads to a rank no more, and by which one its traffic goes instead.
        """
        return self._enforcer.take_notices()

    def now_ns(self) -> int:
        """Nanoseconds since this rank has joined."""
        return self._enforcer.now_ns()


class Listener:
    """A rank that can be reached, and has not joined its team.

    Args:
        rank: of this process.
        channels: its ways; as many on every rank, which meet each other one by one.
        token: what all ranks know and nobody else.

    Raises:
        TeamError: nobody can listen there.
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
        """Where it is reached, by each channel."""
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
        """Joins the others.

        Args:
            addresses: of all ranks, in their order.
            timeout_s: how long a rank may keep others waiting, now and later.
            members: those that are in this team, in its order; none is all. They are its ranks 0, 1
                and so on.
            name: what tells it from other teams of the same ranks.
            meeting_s: how long to wait for the others now, if that is not ``timeout_s``.
            names: what errors call the ranks of the team, if not by their numbers.

        Raises:
            TeamError: somebody does not come in time.
        """
        for other, ways in enumerate(addresses):
            if other != self._rank:
                self._plane.add_peer(other, ",".join(ways))
        hosts = list(range(len(addresses)) if members is None else members)
        numbered = [(number + 1, rate) for number, rate in enumerate(self._rates)]
        with _translated():
            enforcer = _native.Enforcer(
                self._plane,
                name,
                hosts.index(self._rank),
                hosts,
                numbered,
                timeout_s,
                meeting_s,
                None if names is None else list(names),
            )
        return Team(enforcer, self._plane if members is None else None)

    def close(self) -> None:
        """Is not reached any more."""
        self._plane.close()


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name


def _buffer(vector: Vector) -> Vector:
    """The same, as something that has a buffer: types that numpy does not come with have none."""
    return vector if vector.dtype.isbuiltin == 1 else vector.view(np.uint8)


def _own(address: str) -> str:
    """Where the data plane itself listens, beside its channels."""
    scheme, _, place = address.partition(":")
    if scheme == "unix":
        return f"unix:{place}.own"
    return f"tcp:{place.rpartition(':')[0]}:0"


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Makes native errors ours."""
    try:
        yield
    except _native.TeamError as error:
        raise TeamError(*error.args) from None
