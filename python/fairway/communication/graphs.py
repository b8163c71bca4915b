"""Steps of devices that differ, as graphs of what each computes and what goes between which.

Read from FlexFlow's task graphs (FlatBuffers, as TopoOpt writes them) or from what
``fairway capture`` writes; planned by giving every kind of communication pieces and a channel, and
all of it one order.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairway import _native
from fairway.communication.steps import ChannelCost
from fairway.errors import GraphError

__all__ = ["Graph", "Planned", "of_program", "plan", "read_flexflow"]

Job = tuple[int, int] | tuple[int, int, int] | tuple[list[int], int]
"""Device and nanoseconds; source, target and bytes; or members of an all-reduce and their bytes."""
FORWARD, BACKWARD, TRANSFER, ALL_REDUCE = 0, 1, 5, 6
"""Types of FlexFlow's tasks."""
MILLISECONDS_MAX = 1e9


@dataclasses.dataclass(frozen=True)
class Graph:
    """A step.

    Attributes:
        devices: how many there are.
        nodes: what is done, and what each waits for: numbers of nodes, and how many steps before.
    """

    devices: int
    nodes: list[tuple[Job, list[tuple[int, int]]]]


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a plan makes of several steps.

    Attributes:
        strict_s: what they take in the order in which they come to it, each communication as is
            best alone; what is first in line keeps others waiting while it waits itself.
        fifo_s: the same, but what comes soon after it may go meanwhile.
        ordered_s: likewise in the order of the critical path.
        planned_s: as planned.
        evaluations: plans that were looked at.
        reason: why no more were.
        manners: of each kind of communication, pieces and channel; none is all in turn.
    """

    strict_s: float
    fifo_s: float
    ordered_s: float
    planned_s: float
    evaluations: int
    reason: str
    manners: list[tuple[int, int | None]]


def plan(
    graph: Graph,
    costs: Sequence[ChannelCost],
    *,
    steps: int = 2,
    evaluations: int = 400,
    seed: int = 0,
) -> Planned:
    """Plans so many steps as one.

    Raises:
        GraphError: the graph or the channels make no sense.
    """
    given = [cost.terms for cost in costs]
    try:
        found = _native.plan_graph(graph.nodes, given, steps, (evaluations, seed))
    except (ValueError, TypeError) as error:
        raise GraphError(f"the graph cannot be planned: {error}") from None
    ends, evaluations, reason, manners = found
    strict_s, fifo_s, ordered_s, planned_s = (end / 1e9 for end in ends)
    return Planned(strict_s, fifo_s, ordered_s, planned_s, evaluations, reason, manners)


def read_flexflow(path: str | os.PathLike[str]) -> Graph:
    """Reads a task graph.

    The gradients of an operator are added up before it computes forward in the next step.

    Raises:
        GraphError: it is none.
    """
    data = Path(path).read_bytes()
    try:
        return _Reader(data).graph()
    except GraphError as error:
        raise GraphError(
            f"{path} is no task graph of FlexFlow: {error}; expected the FlatBuffers that its "
            "simulator writes"
        ) from None


def of_program(text: str) -> Graph:
    """The graph of a captured program; see :mod:`fairway.capture`.

    Devices that ever compute together are one here; what goes between others is moved. A step
    begins on each when the one before has ended there.

    Raises:
        GraphError: it is no program.
    """
    try:
        work = _native.program_work(text)
    except ValueError as error:
        raise GraphError(f"it holds no program: {error}") from None
    gangs = [computed[1] for computed, _, _, _ in work if computed is not None]
    ends = [devices for _, moved, _, _ in work for _, *both in moved for devices in both]
    ends += [devices for _, _, summed, _ in work if summed for devices in summed[1]]
    own = _joined([*gangs, *([device] for devices in ends for device in devices)])
    nodes: list[tuple[Job, list[tuple[int, int]]]] = []
    made: list[list[int]] = []
    last: dict[int, int] = {}
    # Of each node, where it begins.
    begins: list[int] = []
    for computed, moved, summed, after in work:
        before = sorted({node for one in after for node in made[one]})
        waits = [(node, 0) for node in before]
        first = len(nodes)
        if computed is not None:
            device = own[computed[1][0]]
            last[device] = first
            nodes.append(((device, computed[0]), waits))
            begins.append(device)
        for size, source, target in moved:
            pairs = [(a, b) for a in _places(own, source) for b in _places(own, target)]
            for one, other in pairs:
                if one != other:
                    nodes.append(((one, other, size // len(pairs)), waits))
                    begins.append(one)
        if summed is not None:
            size, groups = summed
            members = sorted({place for devices in groups for place in _places(own, devices)})
            if len(members) > 1:
                nodes.append(((members, size), waits))
                begins.append(members[0])
        # What moves nothing passes on what it waits for.
        made.append(list(range(first, len(nodes))) or before)
    for number, (job, waits) in enumerate(nodes):
        if not waits and begins[number] in last:
            nodes[number] = (job, [(last[begins[number]], 1)])
    return Graph(max(own.values(), default=-1) + 1, nodes)


def _places(own: Mapping[int, int], devices: Sequence[int]) -> list[int]:
    return sorted({own[device] for device in devices})


def _joined(groups: Sequence[Sequence[int]]) -> dict[int, int]:
    """Of each device the number of those that it is ever together with."""
    found: dict[int, int] = {}
    for group in groups:
        known = {found[device] for device in group if device in found}
        number = min(known, default=len(found))
        for device in [*group, *(one for one, at in found.items() if at in known)]:
            found[device] = number
    numbers = {number: place for place, number in enumerate(sorted(set(found.values())))}
    return {device: numbers[number] for device, number in found.items()}


def _unpack(form: str, data: bytes, at: int, count: int = 1) -> tuple[Any, ...]:
    """So many numbers that must be there.

    Raises:
        GraphError: they are not; says at which byte.
    """
    size = count * struct.calcsize(f"<{form}")
    if not 0 <= at <= len(data) - size:
        raise GraphError(
            f"{size} bytes should be at byte {at}, but there are {len(data)} bytes in all"
        )
    return struct.unpack_from(f"<{count}{form}", data, at)


class _Table:
    """One table of a FlatBuffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at
        self._slots = at - _unpack("i", data, at)[0]
        self._slots_size = _unpack("H", data, self._slots)[0]

    def _field(self, slot: int) -> int | None:
        if slot >= self._slots_size:
            return None
        offset = _unpack("H", self._data, self._slots + slot)[0]
        return self.at + offset if offset else None

    def scalar(self, slot: int, form: str) -> float:
        """A number; 0 if it is left out."""
        at = self._field(slot)
        found: float = 0 if at is None else _unpack(form, self._data, at)[0]
        return found

    def integer(self, slot: int, form: str) -> int:
        """The same, of whole numbers."""
        return int(self.scalar(slot, form))

    def _vector(self, slot: int) -> tuple[int, int]:
        at = self._field(slot)
        if at is None:
            return 0, 0
        at += _unpack("I", self._data, at)[0]
        return at + 4, _unpack("I", self._data, at)[0]

    def integers(self, slot: int) -> tuple[int, ...]:
        """A list of 64-bit numbers."""
        start, count = self._vector(slot)
        return _unpack("Q", self._data, start, count)

    def tables(self, slot: int) -> Iterator[_Table]:
        """A list of tables."""
        start, count = self._vector(slot)
        for place, offset in enumerate(_unpack("I", self._data, start, count)):
            yield _Table(self._data, start + 4 * place + offset)


class _Reader:
    """Makes a graph of FlexFlow's tables."""

    def __init__(self, data: bytes) -> None:
        root = _Table(data, _unpack("I", data, 0)[0])
        self._count = root.integer(6, "I")
        self._tasks = list(root.tables(20))
        # A device that computes has a number; one that transfers has those of both ends in one.
        self._devices = {
            device.integer(6, "Q"): (device.integer(8, "i"), device.integer(10, "I"))
            for device in root.tables(22)
        }
        self._types = [task.integer(4, "b") for task in self._tasks]
        self._numbers = {task.integer(6, "Q"): n for n, task in enumerate(self._tasks)}

    def graph(self) -> Graph:
        """All of it, in an order in which nothing waits for what comes later."""
        if not self._count or not self._tasks:
            raise GraphError("it has no nodes or no tasks")
        before, later = self._dependencies()
        order = _sorted(before)
        places = {number: place for place, number in enumerate(order)}
        nodes: list[tuple[Job, list[tuple[int, int]]]] = []
        for number in order:
            after = [(places[other], 0) for other in before[number]]
            after += [(places[other], 1) for other in later[number]]
            nodes.append((self._job(number), after))
        return Graph(self._count, nodes)

    def _dependencies(self) -> tuple[list[list[int]], list[list[int]]]:
        """What each task waits for in its own step, and in the one before."""
        before: list[list[int]] = [[] for _ in self._tasks]
        later: list[list[int]] = [[] for _ in self._tasks]
        forward: dict[int, int] = {}
        for number, task in enumerate(self._tasks):
            if self._types[number] == ALL_REDUCE:
                continue
            for name in task.integers(14):
                other = self._numbers.get(name)
                if other is None:
                    raise GraphError(
                        f"task {number} at byte {task.at} names task {name}, not there"
                    )
                before[other].append(number)
                if self._types[number] == FORWARD and self._types[other] == BACKWARD:
                    forward[other] = number
        for number, kind in enumerate(self._types):
            if kind == ALL_REDUCE:
                for other in filter(forward.__contains__, before[number]):
                    later[forward[other]].append(number)
        return before, later

    def _job(self, number: int) -> Job:
        task = self._tasks[number]
        kind = self._types[number]
        where = f"task {number} at byte {task.at}"
        if kind == ALL_REDUCE:
            members = [int(member) for member in task.integers(14)]
            return self._checked(where, members), task.integer(12, "Q")
        named = task.integer(8, "Q")
        if named not in self._devices:
            raise GraphError(f"{where} is of device {named}, which is not there")
        device, ends = self._devices[named]
        if kind == TRANSFER:
            source, target = self._checked(where, [ends // self._count, ends % self._count])
            return source, target, task.integer(12, "Q")
        if kind in (FORWARD, BACKWARD):
            took = task.scalar(10, "f")
            if not 0 <= took < MILLISECONDS_MAX:
                raise GraphError(f"{where} takes {took} ms")
            return self._checked(where, [device])[0], round(took * 1e6)
        raise GraphError(f"{where} is of type {kind}")

    def _checked(self, where: str, devices: list[int]) -> list[int]:
        # One device more than there are is that of all hosts.
        for device in devices:
            if not 0 <= device <= self._count:
                raise GraphError(f"{where} is of device {device}; there are {self._count}")
        return devices


def _sorted(before: Sequence[Sequence[int]]) -> list[int]:
    after: list[list[int]] = [[] for _ in before]
    waits = [len(numbers) for numbers in before]
    for number, others in enumerate(before):
        for other in others:
            after[other].append(number)
    order = [number for number, count in enumerate(waits) if count == 0]
    for number in itertools.chain(order):
        for other in after[number]:
            waits[other] -= 1
            if waits[other] == 0:
                order.append(other)
    if len(order) != len(before):
        stuck = next(number for number, count in enumerate(waits) if count)
        raise GraphError(f"task {stuck} waits for itself, by others")
    return order
