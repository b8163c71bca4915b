"""Reads task graphs of FlexFlow: FlatBuffers, as TopoOpt writes them."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fairway import _native
from fairway.errors import GraphError

__all__ = ["read_flexflow"]

FORWARD, BACKWARD, TRANSFER, ALL_REDUCE = 0, 1, 5, 6
"""Task types of FlexFlow."""
MILLISECONDS_MAX = 1e9


def read_flexflow(path: str | os.PathLike[str]) -> _native.StepGraph:
    """Reads FlexFlow's task graph.

    An operator's gradients are all-reduced before its forward pass of the next step.

    Raises:
        GraphError: the file holds no such graph.
    """
    data = Path(path).read_bytes()
    try:
        return _Reader(data).graph()
    except GraphError as error:
        raise GraphError(
            f"{path} is no task graph of FlexFlow: {error}; expected the FlatBuffers that its "
            "simulator writes"
        ) from None


def _unpack(form: str, data: bytes, at: int, count: int = 1) -> tuple[Any, ...]:
    """Decodes ``count`` numbers at byte ``at``.

    Raises:
        GraphError: the data ends before them; says at which byte.
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
        """Returns a scalar field; 0 if it is absent."""
        at = self._field(slot)
        found: float = 0 if at is None else _unpack(form, self._data, at)[0]
        return found

    def integer(self, slot: int, form: str) -> int:
        """Returns a scalar field as an integer."""
        return int(self.scalar(slot, form))

    def _vector(self, slot: int) -> tuple[int, int]:
        at = self._field(slot)
        if at is None:
            return 0, 0
        at += _unpack("I", self._data, at)[0]
        return at + 4, _unpack("I", self._data, at)[0]

    def integers(self, slot: int) -> tuple[int, ...]:
        """Returns a vector of unsigned 64-bit integers."""
        start, count = self._vector(slot)
        return _unpack("Q", self._data, start, count)

    def tables(self, slot: int) -> Iterator[_Table]:
        """Yields a vector of tables."""
        start, count = self._vector(slot)
        for place, offset in enumerate(_unpack("I", self._data, start, count)):
            yield _Table(self._data, start + 4 * place + offset)


class _Reader:
    """Makes a step graph of FlexFlow's tables."""

    def __init__(self, data: bytes) -> None:
        root = _Table(data, _unpack("I", data, 0)[0])
        self._count = root.integer(6, "I")
        self._tasks = list(root.tables(20))
        # A compute device has a number; a link encodes both of its ends as source * count + target.
        self._devices = {
            device.integer(6, "Q"): (device.integer(8, "i"), device.integer(10, "I"))
            for device in root.tables(22)
        }
        self._last = 0
        """The highest device number in use."""
        self._types = [task.integer(4, "b") for task in self._tasks]
        self._numbers = {task.integer(6, "Q"): n for n, task in enumerate(self._tasks)}

    def graph(self) -> _native.StepGraph:
        """Returns the graph, its vertices in topological order."""
        if not self._count or not self._tasks:
            raise GraphError("it has no nodes or no tasks")
        before, later = self._dependencies()
        order = _sorted(before)
        places = {number: place for place, number in enumerate(order)}
        added: list[Callable[[_native.StepGraph], object]] = []
        for number in order:
            after = [(places[other], 0) for other in before[number]]
            after += [(places[other], 1) for other in later[number]]
            added.append(self._node(number, after))
        graph = _native.StepGraph(max(self._count, self._last + 1), "flexflow")
        for add in added:
            try:
                add(graph)
            except ValueError as error:
                raise GraphError(f"node {len(graph)}: {error}") from None
        try:
            graph.verify()
        except ValueError as error:
            raise GraphError(str(error)) from None
        return graph

    def _dependencies(self) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the dependencies of each task in its own step, and in the preceding one."""
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

    def _node(
        self, number: int, after: list[tuple[int, int]]
    ) -> Callable[[_native.StepGraph], object]:
        """Returns a function that adds a task to a graph."""
        task = self._tasks[number]
        kind = self._types[number]
        where = f"task {number} at byte {task.at}"
        if kind == ALL_REDUCE:
            members = self._checked(where, [int(member) for member in task.integers(14)])
            size = task.integer(12, "Q")
            return lambda graph: graph.collective("all_reduce", members, size, after)
        named = task.integer(8, "Q")
        if named not in self._devices:
            raise GraphError(f"{where} is of device {named}, which is not there")
        device, ends = self._devices[named]
        if kind == TRANSFER:
            source, target = self._checked(where, [ends // self._count, ends % self._count])
            size = task.integer(12, "Q")
            return lambda graph: graph.transfer(source, target, size, after)
        if kind not in (FORWARD, BACKWARD):
            raise GraphError(f"{where} is of type {kind}")
        took = task.scalar(10, "f")
        if not 0 <= took < MILLISECONDS_MAX:
            raise GraphError(f"{where} takes {took} ms")
        computing = self._checked(where, [device])
        name = "forward" if kind == FORWARD else "backward"
        return lambda graph: graph.compute(computing, round(took * 1e6), after, name=name)

    def _checked(self, where: str, devices: list[int]) -> list[int]:
        for device in devices:
            if not 0 <= device <= self._count:
                raise GraphError(f"{where} is of device {device}; there are {self._count}")
            self._last = max(self._last, device)
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
