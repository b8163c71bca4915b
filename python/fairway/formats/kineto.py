"""PyTorch steps, recorded by its profiler, as operator graphs for placement.

An execution trace lists operators and the tensors that each reads and writes; a Kineto profile has
their times. Nested operators are part of their caller. An operator depends on the last writer of
each tensor that it reads; tensors that are read before any write are resident (parameters).
Operators are sharded along samples, as traces do not show any other dimension.

Source: pytorch/torch/csrc/profiler/standalone/execution_trace_observer.cpp, schema 1.1.1.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairway.errors import GraphError
from fairway.placement.graphs import Edge, Op, OpGraph

__all__ = ["of_pytorch"]

BYTES_MAX = 1 << 30
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Profile categories of accelerator work."""
TENSOR_FIELDS = 6
"""Fields that describe a tensor: its id, its storage, an offset, elements, bytes of each, and its
device."""


@dataclasses.dataclass(frozen=True)
class _Operator:
    number: int
    name: str
    below: tuple[int, ...]
    reads: Mapping[int, int]
    writes: Mapping[int, int]


def of_pytorch(
    trace: str | os.PathLike[str], profile: str | os.PathLike[str], batch: int = 1
) -> OpGraph:
    """Returns the operator graph of a step.

    Args:
        trace: file written by an ``ExecutionTraceObserver``.
        profile: profiler export of the same run; times are those of kernels if it has any, else
            those of operators.
        batch: samples of the step; times of other batches scale in proportion.

    Raises:
        GraphError: a file has another format, or the two are not of one run.
        OSError: a file cannot be read.
    """
    nodes = _list(_load(trace), "nodes", trace)
    operators = list(_operators(nodes, trace))
    times, are_of_kernels = _times(_list(_load(profile), "traceEvents", profile), profile)
    if not any(number in times for one in operators for number in one.below):
        raise GraphError(f"{profile} times no operator of {trace}; expected the same run")
    return OpGraph([batch], _ops(operators, times, are_of_kernels))


def check_trace(path: str | os.PathLike[str]) -> None:
    """Checks that a file is an execution trace.

    Raises:
        GraphError: it has another format.
        OSError: it cannot be read.
    """
    _list(_load(path), "nodes", path)


def _load(path: str | os.PathLike[str]) -> Any:
    if os.path.getsize(path) > BYTES_MAX:
        raise GraphError(f"{path} has more than {BYTES_MAX >> 20} MiB")
    data = Path(path).read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise GraphError(f"{path} is no JSON from byte {error.pos} on: {error.msg}") from None
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise GraphError(f"{path} is no JSON: {error}") from None


def _list(found: Any, key: str, path: object) -> list[dict[str, Any]]:
    rows = found.get(key) if isinstance(found, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise GraphError(f"{path} has no list {key!r} of objects")
    return rows


def _operators(nodes: list[dict[str, Any]], path: object) -> Iterator[_Operator]:
    """Yields top-level operators, in the order of their start."""
    known: dict[int, dict[str, Any]] = {}
    below: dict[int, list[int]] = collections.defaultdict(list)
    for node in nodes:
        number, parent = node.get("id"), node.get("ctrl_deps")
        if not isinstance(number, int) or number in known:
            raise GraphError(f"{path} has a node with id {number!r}; expected one for each")
        known[number] = node
        if isinstance(parent, int) and parent != number:
            below[parent].append(number)
    try:
        schemas: dict[int, Any] = {}
        for number in sorted(known):
            schemas[number] = _attribute(known[number], "op_schema")
        for number, node in sorted(known.items()):
            if schemas[number] and not _is_called(number, known, schemas):
                yield _operator(node, schemas[number], _all_below(number, below, known))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise GraphError(
            f"node {number} of {path} is no node of an execution trace "
            f"({type(error).__name__}: {error})"
        ) from None


def _attribute(node: Mapping[str, Any], name: str) -> Any:
    return next((one.get("value") for one in node["attrs"] if one.get("name") == name), None)


def _is_called(number: int, known: Mapping[int, Any], schemas: Mapping[int, Any]) -> bool:
    seen = {number}
    parent = known[number]["ctrl_deps"]
    while parent in known and parent not in seen:
        if schemas[parent]:
            return True
        seen.add(parent)
        parent = known[parent]["ctrl_deps"]
    return False


def _all_below(
    number: int, below: Mapping[int, list[int]], known: Mapping[int, Any]
) -> tuple[int, ...]:
    """Returns the profile's numbers of an operator and all operators that it calls."""
    found, open_ = [], [number]
    while open_:
        one = open_.pop()
        found.append(int(_attribute(known[one], "rf_id") or 0))
        open_ += below.get(one, [])
        if len(found) > len(known):
            raise ValueError("nodes call each other")
    return tuple(found)


def _operator(node: Mapping[str, Any], schema: str, below: tuple[int, ...]) -> _Operator:
    inputs, outputs = node["inputs"]["values"], node["outputs"]["values"]
    reads, given = _tensors(inputs), _tensors(outputs)
    if "!" in schema:
        # An in-place operator writes its first argument, whether or not it returns it.
        writes = {**_tensors(inputs[:1]), **given}
    else:
        writes = {storage: size for storage, size in given.items() if storage not in reads}
    return _Operator(node["id"], str(node["name"]), below, reads, writes)


def _tensors(values: Any) -> dict[int, int]:
    """Returns the bytes used of each storage that these values refer to."""
    found: dict[int, int] = {}
    if not isinstance(values, list):
        return found
    is_tensor = len(values) == TENSOR_FIELDS and isinstance(values[-1], str)
    if is_tensor and all(isinstance(one, int) for one in values[:-1]):
        found[values[1]] = max(0, values[3] * values[4])
        return found
    for value in values:
        for storage, size in _tensors(value).items():
            found[storage] = max(found.get(storage, 0), size)
    return found


def _times(events: list[dict[str, Any]], path: object) -> tuple[dict[int, int], bool]:
    """Returns nanoseconds by operator number, and whether they are kernel times."""
    own: dict[int, int] = {}
    numbers: dict[Any, int] = {}
    kernels: dict[int, int] = collections.Counter()
    on_device: list[tuple[Any, int]] = []
    for event in events:
        given = event.get("args")
        if event.get("ph") != "X" or not isinstance(given, dict):
            continue
        took = event.get("dur")
        if not isinstance(took, int | float) or not 0 <= took < 1e12:
            raise GraphError(f"{path} has an event {event.get('name')!r} that takes {took!r} us")
        if event.get("cat") == "cpu_op" and isinstance(given.get("Record function id"), int):
            number = given["Record function id"]
            own[number] = round(1e3 * took)
            numbers[given.get("External id")] = number
        elif event.get("cat") in KERNELS:
            on_device.append((given.get("External id"), round(1e3 * took)))
    for outer, took_ns in on_device:
        if outer in numbers:
            kernels[numbers[outer]] += took_ns
    return (dict(kernels), True) if kernels else (own, False)


def _ops(operators: list[_Operator], times: Mapping[int, int], are_of_kernels: bool) -> list[Op]:
    # By storage: its last writer with the bytes written, and its first reader if none wrote it
    # before.
    writers: dict[int, tuple[int, int]] = {}
    readers: dict[int, int] = {}
    gradients: dict[int, int] = collections.Counter()
    counted: set[int] = set()
    ops: list[Op] = []
    for number, one in enumerate(operators):
        after: dict[int, int] = collections.Counter()
        resident, owners = 0, list[int]()
        for storage, size in one.reads.items():
            if storage in writers:
                source, written = writers[storage]
                after[source] += min(size, written)
            elif storage in readers:
                first = readers[storage]
                owner = ops[first].beside
                owners.append(first if owner is None else owner)
            else:
                readers[storage] = number
                resident += size
        # An operator that updates a parameter reads its gradient, which copies all-reduce before.
        updates = [storage for storage in one.writes if storage in readers]
        for storage in one.reads if updates else ():
            if storage in writers and storage not in counted:
                counted.add(storage)
                gradients[writers[storage][0]] += writers[storage][1]
        writers |= {s: (number, size) for s, size in one.writes.items() if s not in readers}
        took = one.below if are_of_kernels else one.below[:1]
        ops.append(
            Op(
                f"{one.name} {one.number}",
                [sum(times.get(each, 0) for each in took)],
                [Edge(source, [size]) for source, size in after.items()],
                resident=resident,
                beside=owners[0] if owners else None,
                split="samples",
            )
        )
    return [dataclasses.replace(op, gradients=gradients[number]) for number, op in enumerate(ops)]
