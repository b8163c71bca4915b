"""The teams of a host, created when their hosts first communicate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fairway import _native
from fairway.communication.membership import TeamMembership
from fairway.communication.steps import NETWORK, ChannelCost, Solo, memory_cost
from fairway.communication.team import Team, Vector
from fairway.errors import TeamError
from fairway.host.moves import MESSAGE_TIMEOUT_S
from fairway.host.objects import Failed

__all__ = ["Carry", "Cut", "Elements", "Piece", "TeamChannel", "Teams", "Turn", "failed"]

Elements = np.ndarray[Any, Any]
Cut = tuple[int, int, int]
"""One of the equal parts of an array: axis, index, number of parts."""
TeamChannel = tuple[int, float | None]
"""A channel of the data plane, 0 for none, and its rate in bits per second if known."""
Keyed = dict[Any, Elements]

JOIN_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a host contributes: a value, given by its key, or one part of it."""

    source: Any
    cut: Cut | None = None


@dataclasses.dataclass(frozen=True)
class Carry:
    """A collective of several hosts, as one of them sees it.

    Attributes:
        hosts: in the order of ranks.
        kind: name of the collective, and its arguments besides the number of ranks.
        dtype: type of the elements; bytes if they are only copied.
        reduction: the reduction operator; ignored without a reduction.
        size: elements of a piece.
        given: the pieces that this host contributes.
        taken: keys of the pieces that it receives, in the order of the result.
        start: offset of its own pieces, in pieces.
    """

    hosts: tuple[int, ...]
    kind: tuple[Any, ...]
    dtype: np.dtype[Any]
    reduction: str
    size: int
    given: tuple[Piece, ...]
    taken: tuple[Any, ...]
    start: int = 0

    def text(self, devices: Sequence[int]) -> str:
        """Returns the collective as the controller reads it.

        Args:
            devices: a device of each host, as an index into those of the program.
        """
        name, given = self.kind
        if name == "all_to_all_of":
            name, given = "all_to_all", f"({', '.join(map(str, given))})"
        ranks = ",".join(map(str, devices))
        return f"{name} {given} of {self.dtype.itemsize}bytes on [{ranks}]"

    @property
    def sent_bytes(self) -> int:
        """Estimate of the bytes that this host sends, with the algorithm that sends least."""
        ranks, (name, *_) = len(self.hosts), self.kind
        given = len(self.given) * self.size * self.dtype.itemsize
        if name == "all_to_all_of":
            return given
        if name == "all_gather":
            return given * (ranks - 1)
        return given * (ranks - 1) // ranks * (2 if name == "all_reduce" else 1)

    def pack(self, vector: Vector, held: Mapping[Any, Elements]) -> None:
        """Copies the pieces into the vector of the collective."""
        at = self.start * self.size
        for piece in self.given:
            elements = held[piece.source]
            if piece.cut is not None:
                axis, part, parts = piece.cut
                elements = np.split(elements, parts, axis)[part]
            flat = np.ascontiguousarray(elements).reshape(-1)
            vector[at : at + self.size] = flat.view(self.dtype)
            at += self.size

    def unpack(self, result: Vector, dtype: np.dtype[Any]) -> Keyed:
        """Returns the received pieces, flat, by their keys."""
        parts = [result[n * self.size : (n + 1) * self.size] for n in range(len(self.taken))]
        return {key: part.view(dtype) for key, part in zip(self.taken, parts, strict=True)}


class Teams:
    """The teams of a host.

    Args:
        plane: its end of the data plane.
        host: its number over all islands.
        channels: channels between hosts, the same on all.
        is_near: whether channels without a rate are shared memory.
    """

    def __init__(
        self, plane: _native.DataPlane, host: int, channels: Sequence[TeamChannel], is_near: bool
    ) -> None:
        self._plane = plane
        self._host = host
        self._channels = [(channel, rate) for channel, rate in channels]
        self._is_near = is_near
        self._members: dict[tuple[int, ...], _Member] = {}
        self._processes: dict[int, int] = {}
        """The process of each host, by the first tag of its messages."""

    def know(self, host: int, process: int) -> None:
        """Takes note of the process that a host is now.

        Teams with an earlier process of it are created again: their connections would lead to this
        one, which knows nothing of them and would not answer.
        """
        self._processes[host] = process

    def processes(self, hosts: Sequence[int]) -> list[int | None]:
        """Returns the process that each of these hosts is now."""
        return [self._processes.get(host) for host in hosts]

    def carry(self, carry: Carry, name: int, held: Mapping[Any, Elements]) -> Vector:
        """Runs a collective; returns its result.

        A broken team is created again, once, if other hosts had noticed the failure before this
        one.

        Args:
            carry: the collective.
            name: name of the team, if it does not exist yet; the same on all of its hosts.
            held: this host's values.

        Raises:
            Failed: a host had no values, is lost or stuck.
        """
        met_before = carry.hosts in self._members
        try:
            try:
                return self._member(carry.hosts, name).carry(carry, held)
            except TeamError as error:
                self._drop(carry, error)
                if not met_before or error.kind not in ("Lost", "Reported"):
                    raise
                return self._member(carry.hosts, name).carry(carry, held)
        except TeamError as error:
            self._drop(carry, error)
            raise failed(carry, error) from None

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Elements:
        """Returns an uninitialized array in pooled memory, which is reused once it is released."""
        length = int(np.prod(shape, dtype=np.int64))
        memory = self._plane.memory(max(1, length * dtype.itemsize))
        return np.frombuffer(memoryview(memory), dtype, length).reshape(shape)

    def poison(self, carry: Carry, name: int, reason: str) -> None:
        """Poisons a collective: the other hosts get ``reason`` as an error."""
        try:
            self._member(carry.hosts, name).poison(carry, reason)
        except TeamError as error:
            self._drop(carry, error)

    def costs(self, hosts: int) -> list[ChannelCost]:
        """Returns the assumed cost of each channel for this many hosts, until it is measured."""
        usual = memory_cost(hosts) if self._is_near else NETWORK
        rates = (rate for _, rate in self._channels)
        return [dataclasses.replace(NETWORK, rate_bps=r) if r else usual for r in rates]

    def meet(self, hosts: tuple[int, ...], name: int) -> Team:
        """Creates a team.

        Args:
            hosts: in the order of ranks, including this host.
            name: the same on all hosts, and different from that of any earlier team of theirs.

        Raises:
            TeamError: a host does not join in time.
        """
        rank = hosts.index(self._host)
        membership = TeamMembership(
            name, rank, hosts, self._channels, MESSAGE_TIMEOUT_S, JOIN_TIMEOUT_S
        )
        try:
            enforcer = _native.Enforcer(self._plane, membership)
        except _native.TeamError as error:
            raise TeamError(*error.args) from None
        return Team(enforcer)

    def _member(self, hosts: tuple[int, ...], name: int) -> _Member:
        processes = self.processes(hosts)
        if hosts in self._members and self._members[hosts].processes != processes:
            self._members.pop(hosts).team.close()
        if hosts not in self._members:
            team = self.meet(hosts, name)
            self._members[hosts] = _Member(team, self.costs(len(hosts)), processes)
        return self._members[hosts]

    def _drop(self, carry: Carry, error: TeamError) -> None:
        """Leaves a broken team; its other hosts notice that."""
        if error.kind != "Poisoned" and carry.hosts in self._members:
            self._members.pop(carry.hosts).team.close()


class _Member:
    """One team of these processes, with cached plans of its collectives."""

    def __init__(
        self, team: Team, costs: Sequence[ChannelCost], processes: Sequence[int | None]
    ) -> None:
        self.team = team
        self.processes = processes
        self._solo = Solo(team, costs)

    def carry(self, carry: Carry, held: Mapping[Any, Elements]) -> Vector:
        collective, part = self._solo.part(carry.kind, carry.dtype)
        vector = self.team.vector(collective, carry.dtype)
        carry.pack(vector, held)
        return self.team.call(part, vector, carry.reduction)

    def poison(self, carry: Carry, reason: str) -> None:
        collective, part = self._solo.part(carry.kind, carry.dtype)
        vector = self.team.vector(collective, carry.dtype)
        step = self.team.begin(part)
        ticket = self.team.submit((step, 0), collective, vector, carry.reduction, reason)
        self.team.wait(ticket)


class Turn:
    """One run of a program: runs the collectives of its teams, one after another.

    Args:
        teams: teams of this host.
        carries: all its collectives, in order.
        first_name: first of consecutive names, one per collective, the same on all hosts.
    """

    def __init__(self, teams: Teams, carries: Sequence[Carry], first_name: int) -> None:
        self._teams = teams
        self._carries = carries
        self._first_name = first_name
        self._done = 0

    def _carry(self, carry: Carry, number: int, held: Mapping[Any, Elements]) -> Vector:
        return self._teams.carry(carry, self._first_name + number, held)

    def _poison(self, carry: Carry, number: int, reason: str) -> None:
        self._teams.poison(carry, self._first_name + number, reason)

    def carry(self, carries: Sequence[Carry], held: Mapping[Any, Elements]) -> Keyed:
        """Runs the next collectives; returns the received pieces, flat, by their keys."""
        arrived: Keyed = {}
        dtype = next(iter(held.values())).dtype
        for carry in carries:
            result: Vector = np.empty(0, carry.dtype)
            if carry.size:
                try:
                    result = self._carry(carry, self._done, held)
                except Failed:
                    self._done += 1  # the other hosts know
                    raise
            self._done += 1
            arrived |= carry.unpack(result, dtype)
        return arrived

    def joined(self, parts: Sequence[Elements], axis: int) -> Elements:
        """Concatenates arrays in memory that devices can use without a copy."""
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        return np.concatenate(parts, axis, out=self._teams.empty(shape, parts[0].dtype))

    def abandon(self, reason: str) -> None:
        """Poisons the remaining collectives for the other hosts."""
        for number, carry in enumerate(self._carries[self._done :], self._done):
            if carry.size:
                self._poison(carry, number, reason)


def failed(carry: Carry, error: TeamError) -> Failed:
    """Returns the error of a result whose team has failed."""
    if error.kind == "Poisoned":
        return Failed(str(error))
    among = ", ".join(map(str, carry.hosts))
    # The loss of a host is the most frequent cause, and other causes look the same from here.
    return Failed(f"DATA_LOSS: hosts {among} do not communicate: {error}")
