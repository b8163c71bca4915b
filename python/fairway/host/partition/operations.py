"""Operations of MLIR: calls that mark what crosses, and what operations read.

Marked calls are custom calls that never reach XLA: `pieces` replaces them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir

from fairway.host.screening import target_of

__all__ = [
    "CROSSING",
    "ISLAND",
    "LOOP",
    "SHARDING",
    "blocks_of",
    "by_level",
    "captured_by",
    "cloned",
    "maker_of",
    "operands_of",
    "per_value",
    "place_of",
    "rename",
    "shape_of",
    "target_of",
    "terminator_of",
]

Value = Any

CROSSING = "fairway.crossing"
"""Target of a call that stands for a collective between islands."""
ISLAND = "fairway.island"
"""Target of a call that returns the number of the island, `int32[]`."""
LOOP = "fairway.loop"
"""Target of a call that stands for a loop whose body crosses."""
SHARDING = "fairway.sharding"
"""Shardings of the results of an operation with regions, which XLA is not given."""


PLACE = re.compile(r'"([^"]+)":(\d+):\d+')


def place_of(operation: Any) -> str:
    """Returns file and line of the source that an operation comes from, as far as it is known."""
    found = PLACE.search(str(operation.location))
    return f"{found[1]}:{found[2]}" if found else "an unknown line"


def shape_of(value: Value) -> list[int]:
    """Returns the shape of a value; that of a token is empty."""
    if not isinstance(value.type, ir.RankedTensorType):
        return []
    return list(ir.RankedTensorType(value.type).shape)


def maker_of(value: Value) -> Any:
    """Returns the operation that makes a value; None for an argument of a block."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else getattr(owner, "operation", owner)


def terminator_of(block: Any) -> Any:
    """Returns the last operation of a block, which returns its results."""
    return block.operations[len(block.operations) - 1].operation


def cloned(operation: Any, at: Any) -> Any:
    """Returns a copy of an operation at an insertion point."""
    written = operation.clone(ip=at)
    return getattr(written, "operation", written)


def per_value(shardings: Sequence[str]) -> Any:
    """Returns the attribute of several values' shardings, each as Shardy writes it alone."""
    listed = ", ".join(sharding.removeprefix("#sdy.sharding") for sharding in shardings)
    return ir.Attribute.parse(f"#sdy.sharding_per_value<[{listed}]>")


def blocks_of(operation: Any) -> Iterator[Any]:
    """Returns the blocks of an operation's regions."""
    for region in operation.regions:
        yield from region.blocks


def operands_of(operation: Any) -> Iterator[Value]:
    """Returns the values that an operation reads, also in its regions, from outside of it."""
    yield from operation.operands
    for block in blocks_of(operation):
        yield from captured_by(block)


def captured_by(block: Any) -> list[Value]:
    """Returns the values that the operations of a block read from outside of it."""
    inside: set[Value] = set(block.arguments)
    found: dict[Value, None] = {}
    for operation in block.operations:
        found |= {value: None for value in operands_of(operation.operation) if value not in inside}
        inside.update(operation.operation.results)
    return list(found)


def by_level(
    operations: Iterable[Any],
    reads: Callable[[Any], Iterable[Value]],
    crosses: Callable[[Any], bool],
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yields operations by the number of crossings before them: others, and those that cross.

    Args:
        operations: in an order in which each follows those that it reads.
        reads: the values that an operation reads.
        crosses: whether it crosses.
    """
    levels: dict[Value, int] = {}
    found: list[tuple[list[Any], list[Any]]] = []
    for operation in operations:
        level = max((levels.get(value, 0) for value in reads(operation)), default=0)
        is_crossing = crosses(operation)
        while len(found) <= level:
            found.append(([], []))
        found[level][is_crossing].append(operation)
        for result in operation.results:
            levels[result] = level + is_crossing
    yield from found


def rename(operation: Any, known: dict[Value, Value]) -> None:
    """Replaces the values that an operation, or one in its regions, reads."""
    for index, operand in enumerate(operation.operands):
        if operand in known:
            operation.operands[index] = known[operand]
    for block in blocks_of(operation):
        for inner in block.operations:
            rename(inner.operation, known)
