"""Training steps from Chakra execution traces: one file per rank, of which one is read.

A file is a sequence of length-delimited Protocol Buffers messages: global metadata, then nodes.
Accelerator compute takes the time in the trace; host operations, memory copies and point-to-point
transfers take no time here, and only pass on their dependencies. A collective without dependencies
waits for the preceding step, and a collective that nothing depends on must end before the first
computation of the next step, as gradients do.

Source: github.com/mlcommons/chakra, schema/protobuf/et_def.proto.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fairway.communication.steps import After, Step, Task
from fairway.communication.team import Collective
from fairway.errors import StepError

__all__ = ["TraceNode", "ordered", "read", "read_nodes", "write_nodes"]

BYTES_MAX = 1 << 30
TASKS_MAX = 400
"""Most tasks of a step, after consecutive computations are fused."""
COMPUTES, SENDS, RECEIVES, COLLECTIVE = 4, 5, 6, 7
"""Node types of the schema."""
KINDS = {
    0: "all_reduce",
    2: "all_gather",
    6: "all_to_all",
    7: "reduce_scatter",
    8: "reduce_scatter",
}
ROOTED = {1: "reduce", 5: "broadcast"}
"""Collective types of the schema, and those with a root, which is rank 0 where a trace names
none."""
BARRIER = 9
ELEMENT_BYTES = 4
"""Sizes in traces are in bytes; they are counted as elements of float32."""
NUMBERS = {3: "<d", 5: "<f", 19: "<I", 21: "<Q", 23: "<i", 25: "<q"}
"""Attributes of fixed width, and their ``struct`` formats."""


@dataclasses.dataclass(frozen=True)
class TraceNode:
    """An operation of a rank.

    Attributes:
        number: its identifier in the trace.
        name: human-readable label.
        kind: its type, as numbered by the schema.
        after: numbers of the nodes on which it depends.
        start_us: when it began.
        duration_us: how long it took.
        attributes: values by name.
    """

    number: int
    name: str
    kind: int
    after: tuple[int, ...]
    start_us: int
    duration_us: int
    attributes: dict[str, Any]

    @property
    def computes(self) -> bool:
        """Whether an accelerator executes it."""
        return self.kind == COMPUTES and not self.attributes.get("is_cpu_op", False)

    @property
    def communicates(self) -> bool:
        """Whether it is a collective that transfers data (not a barrier)."""
        return self.kind == COLLECTIVE and self.attributes.get("comm_type") != BARRIER


def read(path: str | os.PathLike[str], ranks: int) -> Step:
    """Reads the step of one rank, which stands for all ranks (SPMD).

    Args:
        path: the trace of that rank.
        ranks: number of ranks; traces do not record it.

    Raises:
        StepError: the file holds no trace, or a step that cannot be planned.
        OSError: the file cannot be read.
    """
    nodes = read_nodes(path)
    try:
        return Step(tuple(_tasks(ordered(nodes), ranks)))
    except (StepError, ValueError, OverflowError) as error:
        raise StepError(f"{path} is no trace of Chakra that can be planned: {error}") from None


def read_nodes(path: str | os.PathLike[str]) -> list[TraceNode]:
    """Reads the nodes of a rank's trace.

    Raises:
        StepError: the file holds no trace; says at which byte or node.
        OSError: the file cannot be read.
    """
    if os.path.getsize(path) > BYTES_MAX:
        raise StepError(f"{path} has more than {BYTES_MAX >> 20} MiB")
    data = Path(path).read_bytes()
    try:
        return _nodes(data)
    except (StepError, struct.error, IndexError, ValueError, OverflowError) as error:
        raise StepError(f"{path} is no trace of Chakra: {error}") from None


def write_nodes(path: str | os.PathLike[str], nodes: Sequence[TraceNode]) -> None:
    """Writes nodes as the trace of a rank.

    Raises:
        OSError: the file cannot be written.
    """
    version = _field(1, b"0.0.4")
    with Path(path).open("wb") as file:
        for message in (version, *map(_message, nodes)):
            file.write(_number(len(message)) + message)


# Wire format


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decodes a varint; returns its value and the offset behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise StepError(f"a number at byte {at} does not end")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and value of each field of a message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, wire = key >> 3, key & 7
        if wire == 0:
            number, at = _varint(data, at)
            yield field, number
            continue
        lengths = {1: 8, 5: 4}
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in lengths:
            length = lengths[wire]
        else:
            raise StepError(f"field {field} at byte {at} is of an unknown kind")
        if length > len(data) - at:
            raise StepError(f"field {field} at byte {at} is cut off")
        yield field, data[at : at + length]
        at += length


def _nodes(data: bytes) -> list[TraceNode]:
    at, nodes = 0, []
    is_first = True
    while at < len(data):
        length, at = _varint(data, at)
        if length > len(data) - at:
            raise StepError(f"the message at byte {at} is cut off")
        if not is_first:
            nodes.append(_node(data[at : at + length]))
        is_first = False
        at += length
    if is_first:
        raise StepError("it is empty")
    return nodes


def _node(data: bytes) -> TraceNode:
    numbers = {1: 0, 3: 0, 6: 0, 7: 0}
    name = ""
    after: list[int] = []
    attributes: dict[str, Any] = {}
    for field, value in _fields(data):
        if field in numbers and isinstance(value, int):
            numbers[field] = value
        elif field == 2 and isinstance(value, bytes):
            name = value.decode(errors="replace")
        elif field in (4, 5):
            after += [value] if isinstance(value, int) else _packed(value)
        elif field == 10 and isinstance(value, bytes):
            key, found = _attribute(value)
            attributes[key] = found
    return TraceNode(numbers[1], name, numbers[3], tuple(after), numbers[6], numbers[7], attributes)


def _packed(data: bytes) -> list[int]:
    at, values = 0, []
    while at < len(data):
        value, at = _varint(data, at)
        values.append(value)
    return values


def _attribute(data: bytes) -> tuple[str, Any]:
    """Returns an attribute's name, and its value if that is a number or a string."""
    name = ""
    found: Any = None
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            name = value.decode(errors="replace")
        elif field in (15, 17) and isinstance(value, int):
            found = (value >> 1) ^ -(value & 1)
        elif isinstance(value, int):
            found = value
        elif field in NUMBERS:
            (found,) = struct.unpack(NUMBERS[field], bytes(value))
        elif field == 29:
            found = value.decode(errors="replace")
    return name, found


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    return _number(number << 3 | 2) + _number(len(value)) + value


def _message(node: TraceNode) -> bytes:
    fields: list[tuple[int, int | bytes]] = [
        (1, node.number),
        (2, node.name.encode()),
        (3, node.kind),
        (5, b"".join(map(_number, node.after))),
        (6, node.start_us),
        (7, node.duration_us),
    ]
    for name, value in node.attributes.items():
        # Strings, booleans and non-negative integers have fields of their own.
        field = 29 if isinstance(value, str) else 27 if isinstance(value, bool) else 9
        held = value.encode() if isinstance(value, str) else int(value)
        fields.append((10, _field(1, name.encode()) + _field(field, held)))
    return b"".join(_field(number, value) for number, value in fields)


# Conversion to tasks


def ordered(nodes: Sequence[TraceNode]) -> list[TraceNode]:
    """Returns the nodes in topological order, ties broken by start time."""
    known = {node.number: node for node in nodes}
    if len(known) != len(nodes):
        raise StepError("two nodes have one number")
    waits = {node.number: len(set(node.after)) for node in nodes}
    next_ = collections.defaultdict(list)
    for node in nodes:
        for after in set(node.after):
            if after not in known:
                raise StepError(f"node {node.number} ({node.name}) waits for {after}, which is not")
            next_[after].append(node.number)
    ready = [(node.start_us, node.number) for node in nodes if not waits[node.number]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, number = heapq.heappop(ready)
        ordered.append(known[number])
        for other in next_[number]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, (known[other].start_us, other))
    if len(ordered) < len(nodes):
        stuck = next(node for node in nodes if waits[node.number])
        raise StepError(f"node {stuck.number} ({stuck.name}) waits for itself, by others")
    return ordered


def _tasks(nodes: Sequence[TraceNode], ranks: int) -> list[Task]:
    """Makes tasks of compute and collective nodes; fuses consecutive computations."""
    # For each node: the compute and collective nodes on which its dependents transitively depend.
    stands_for: dict[int, set[int]] = {}
    waited: dict[int, set[int]] = {}
    for node in nodes:
        after: set[int] = set().union(*(stands_for[number] for number in node.after))
        waited[node.number] = after
        is_task = node.computes or node.communicates
        stands_for[node.number] = {node.number} if is_task else after
    kept = [node for node in nodes if node.computes or node.communicates]
    collectives = {node.number for node in kept if node.communicates}
    if not collectives:
        raise StepError("it communicates nothing")
    asked = set().union(*(waited[number] for number in collectives))
    tasks: list[Task] = []
    task_of: dict[int, str] = {}
    last = ""
    for node in kept:
        before = {task_of[number] for number in waited[node.number]}
        name = f"{node.name or 'node'} {node.number}"
        if node.communicates:
            task_of[node.number] = name
            collective = _collective(node, name, ranks)
            waits = tuple(After(one) for one in sorted(before))
            tasks.append(Task(name, waits, collective=collective))
            continue
        if tasks and tasks[-1].name == last and before <= {last}:
            seconds = (tasks[-1].compute_s or 0.0) + node.duration_us / 1e6
            tasks[-1] = dataclasses.replace(tasks[-1], compute_s=seconds)
        else:
            waits = tuple(After(one) for one in sorted(before - {last}))
            tasks.append(Task(name, waits, node.duration_us / 1e6))
            last = name
        task_of[node.number] = last
        if node.number in asked:
            # Later computations must not delay the collective that depends on this one.
            last = ""
    if len(tasks) > TASKS_MAX:
        raise StepError(f"it has {len(tasks)} tasks; expected at most {TASKS_MAX}")
    return _closed(tasks)


def _closed(tasks: list[Task]) -> list[Task]:
    """Returns the tasks with dependencies from one step to the next."""
    waited = {after.task for task in tasks for after in task.after}
    loose = [t.name for t in tasks if t.collective is not None and t.name not in waited]
    computing = [task.name for task in tasks if task.collective is None]
    closed = []
    for task in tasks:
        after = task.after
        if computing and task.name == computing[0]:
            after = (*after, *(After(name, 1) for name in loose))
        elif computing and not after and task.collective is not None:
            after = (After(computing[-1], 1),)
        closed.append(dataclasses.replace(task, after=after))
    return closed


def _collective(node: TraceNode, name: str, ranks: int) -> Collective:
    size, kind = node.attributes.get("comm_size"), node.attributes.get("comm_type")
    if not isinstance(size, int) or size < 0:
        raise StepError(f"{name} has no comm_size")
    elements = -(-size // ELEMENT_BYTES)
    if kind in KINDS:
        made: Collective = getattr(Collective, KINDS[kind])(ranks, elements)
        return made
    if kind in ROOTED:
        root = node.attributes.get("root") or node.attributes.get("comm_root") or 0
        rooted: Collective = getattr(Collective, ROOTED[kind])(ranks, elements, root)
        return rooted
    names = ", ".join([*dict.fromkeys(KINDS.values()), *ROOTED.values()])
    raise StepError(f"{name} is of type {kind}; there are {names}")
