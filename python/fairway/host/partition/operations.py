"""Operations of MLIR: calls that mark what crosses, and what operations read.

Marked calls are custom calls that never reach XLA: `pieces` replaces them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

__all__ = [
    "CROSSING",
    "ISLAND",
    "LOOP",
    "SHARDING",
    "blocks_of",
    "captured_by",
    "operands_of",
    "place_of",
    "rename",
    "shape_of",
    "target_of",
    "target_of_value",
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


def target_of(operation: Any) -> str:
    """Returns the target of a custom call; empty for other operations."""
    if operation.name != "stablehlo.custom_call":
        return ""
    return str(ir.StringAttr(operation.attributes["call_target_name"]).value)


def target_of_value(value: Value) -> str:
    """Returns the target of the custom call that makes a value; empty if none does."""
    owner = getattr(value.owner, "operation", value.owner)
    return "" if isinstance(owner, ir.Block) else target_of(owner)


def blocks_of(operation: Any) -> Iterator[Any]:
    """Returns the blocks of an operation's regions."""
    for region in operation.regions:
        yield from region.blocks


def operands_of(operation: Any) -> Iterator[Value]:
    """Returns the values that an operation reads, also in its regions, from outside of it."""
    yield from operation.operands
    inside: set[Value] = set()
    for block in blocks_of(operation):
        inside.update(block.arguments)
        for inner in block.operations:
            for operand in operands_of(inner.operation):
                if operand not in inside:
                    yield operand
            inside.update(inner.operation.results)


def captured_by(block: Any) -> list[Value]:
    """Returns the values that the operations of a block read from outside of it."""
    inside: set[Value] = set(block.arguments)
    found: dict[Value, None] = {}
    for operation in block.operations:
        found |= {value: None for value in operands_of(operation.operation) if value not in inside}
        inside.update(operation.operation.results)
    return list(found)


def rename(operation: Any, known: dict[Value, Value]) -> None:
    """Replaces the values that an operation, or one in its regions, reads."""
    for index, operand in enumerate(operation.operands):
        if operand in known:
            operation.operands[index] = known[operand]
    for block in blocks_of(operation):
        for inner in block.operations:
            rename(inner.operation, known)
