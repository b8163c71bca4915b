"""Cuts an island's part of a program at its crossings: into computations, exchanges and loops.

A computation runs on every island as one gang; it depends on the exchanges before it, and is as
large as that allows. Small constant operations are repeated where they are used.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir

from fairway.host.partition.emitter import byte_size
from fairway.host.partition.operations import (
    CROSSING,
    ISLAND,
    LOOP,
    blocks_of,
    by_level,
    operands_of,
    target_of,
)

__all__ = ["Computation", "CrossingBundle", "Loop", "Value", "cut"]

Value = Any
REPEATED = {"stablehlo.constant", "stablehlo.iota"}
"""Operations without operands that are repeated where they are used."""
BUNDLE_BYTES = 4 << 20
"""Bytes of an island's part that are enough for an exchange: more wait for nothing else."""
SMALL = 1 << 16
"""Most elements of a result that is computed again, from constants, instead of passed on."""


@dataclasses.dataclass(eq=False)
class Computation:
    """Operations that one XLA program computes.

    Attributes:
        operations: in order.
        operands: the values that it takes.
        results: the values that it returns.
        uses_island: whether it needs the number of the island.
    """

    operations: list[Any]
    operands: list[Value] = dataclasses.field(default_factory=list)
    results: list[Value] = dataclasses.field(default_factory=list)
    uses_island: bool = False


@dataclasses.dataclass(eq=False)
class CrossingBundle:
    """Crossings of one kind between the same devices, which are carried out as one."""

    operations: list[Any]

    @property
    def operands(self) -> list[Value]:
        """The values that cross."""
        return [operation.operands[0] for operation in self.operations]

    @property
    def results(self) -> list[Value]:
        """What becomes of them."""
        return [operation.results[0] for operation in self.operations]


@dataclasses.dataclass(eq=False)
class Loop:
    """A loop whose body crosses, and how often it runs."""

    operation: Any
    number: int
    count: int

    @property
    def operands(self) -> list[Value]:
        """The values that it begins with."""
        return list(self.operation.operands)

    @property
    def results(self) -> list[Value]:
        """The values that it ends with."""
        return list(self.operation.results)


Piece = Computation | CrossingBundle | Loop


def cut(block: Any) -> list[Piece]:
    """Returns the pieces of a block, each after those that it depends on."""
    operations = [operation.operation for operation in block.operations]
    returned = operations.pop()
    cutter = _Cutter(operations)
    pieces = list(cutter.pieces())
    cutter.connect(pieces, list(returned.operands))
    return pieces


class _Cutter:
    """Divides the operations of a block."""

    def __init__(self, operations: list[Any]) -> None:
        self._place = {operation: index for index, operation in enumerate(operations)}
        self._reads = {
            operation: list(dict.fromkeys(operands_of(operation))) for operation in operations
        }
        self._maker = {result: one for one in operations for result in one.results}
        self._repeated: set[Any] = set()
        for operation in operations:  # one by one: an operation is repeated if its operands are
            if self._is_repeated(operation):
                self._repeated.add(operation)

    def _is_repeated(self, operation: Any) -> bool:
        if operation.name in REPEATED or target_of(operation) == ISLAND:
            return True
        if target_of(operation) or len(operation.regions) or len(operation.results) != 1:
            return False
        elements = math.prod(ir.RankedTensorType(operation.results[0].type).shape)
        is_small = elements <= SMALL or operation.name == "stablehlo.broadcast_in_dim"
        return is_small and all(
            self._maker.get(value) in self._repeated for value in self._reads[operation]
        )

    def pieces(self) -> Iterator[Piece]:
        """Returns computations, level by level, and the exchanges between."""
        operations = [one for one in self._place if one not in self._repeated]
        levels = by_level(
            operations, self._reads.__getitem__, lambda one: target_of(one) in (CROSSING, LOOP)
        )
        for computations, crossing in levels:
            yield from self._level(computations, crossing)

    def _level(self, operations: list[Any], crossing: list[Any]) -> Iterator[Piece]:
        """Returns the pieces of a level: what crosses early is computed first.

        Args:
            operations: operations that depend on no crossing of the level.
            crossing: its crossings.
        """
        exchanges: list[CrossingBundle | Loop] = [
            _loop(one) for one in crossing if target_of(one) == LOOP
        ]
        exchanges += self._bundles([one for one in crossing if target_of(one) != LOOP])
        left = dict.fromkeys(operations)
        for index, exchange in enumerate(exchanges):
            is_last = all(isinstance(one, Loop) for one in exchanges[index:])
            needed = list(left) if is_last else self._ancestors(exchange.operands, left)
            own = sorted(needed, key=self._place.__getitem__)
            for operation in own:
                del left[operation]
            if own:
                yield Computation(own)
            yield exchange
        if left:
            yield Computation(list(left))

    def _ancestors(self, values: Iterable[Value], left: Container[Any]) -> list[Any]:
        """Returns the operations among ``left`` that values depend on."""
        found: dict[Any, None] = {}
        pending = [self._maker.get(value) for value in values]
        while pending:
            operation = pending.pop()
            if operation is None or operation in found or operation not in left:
                continue
            found[operation] = None
            pending += [self._maker.get(value) for value in self._reads[operation]]
        return list(found)

    def _bundles(self, crossing: Sequence[Any]) -> list[CrossingBundle | Loop]:
        """Returns crossings in bundles, in the order in which their operands are made."""

        def made(operation: Any) -> int:
            return self._place.get(self._maker.get(operation.operands[0]), -1)

        bundles: list[CrossingBundle | Loop] = []
        open_bundles: dict[Any, tuple[CrossingBundle, int]] = {}
        for operation in sorted(crossing, key=made):
            key = _likeness(operation)
            bundle, size = open_bundles.get(key, (None, 0))
            if bundle is None:
                bundle = CrossingBundle([])
                bundles.append(bundle)
            bundle.operations.append(operation)
            size += byte_size(ir.RankedTensorType(operation.operands[0].type))
            open_bundles[key] = bundle, size
            if size >= BUNDLE_BYTES:
                del open_bundles[key]
        return bundles

    def connect(self, pieces: list[Piece], returned: list[Value]) -> None:
        """Finds what each computation takes and returns; adds one for constants that leave."""
        wanted: set[Value] = set(returned)
        for piece in pieces:
            if isinstance(piece, Computation):
                self._complete(piece)
            wanted.update(piece.operands)
        constants = [value for value in wanted if self._maker.get(value) in self._repeated]
        if constants:
            first = Computation([self._maker[value] for value in constants])
            self._complete(first)
            pieces.insert(0, first)
        for piece in pieces:
            if isinstance(piece, Computation):
                piece.results = [
                    result
                    for operation in piece.operations
                    for result in operation.results
                    if result in wanted and (piece is pieces[0] or result not in constants)
                ]

    def _complete(self, piece: Computation) -> None:
        """Adds the repeated operations that a computation needs, and finds its operands."""
        own = set(piece.operations)
        ordered: dict[Any, None] = {}
        operands: dict[Value, None] = {}

        def add(operation: Any) -> None:
            if operation in ordered:
                return
            for value in self._reads[operation]:
                maker = self._maker.get(value)
                if maker in own:
                    continue
                if maker in self._repeated:
                    add(maker)
                else:
                    operands[value] = None
            ordered[operation] = None

        for operation in piece.operations:
            if operation in self._repeated:
                for value in self._reads[operation]:
                    add(self._maker[value])
            add(operation)
        piece.operations = list(ordered)
        piece.operands = list(operands)
        piece.uses_island = any(_needs_island(one) for one in piece.operations)


def _needs_island(operation: Any) -> bool:
    """Returns whether an operation, or one in its regions, asks for the number of the island."""
    return target_of(operation) == ISLAND or any(
        _needs_island(inner.operation)
        for block in blocks_of(operation)
        for inner in block.operations
    )


def _likeness(operation: Any) -> Any:
    """Returns a key that is equal for crossings that can be carried out as one."""
    attributes = operation.attributes
    names = ("kind", "groups", "width", "reduction")
    found = tuple(attributes[f"fairway.{name}"] for name in names)
    kind = ir.RankedTensorType(operation.operands[0].type)
    # Operands that are sharded alike inside an island have shards that differ between the same
    # devices; one that is not sharded at all is sent once for all of them.
    sharding = str(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else ""
    return found, str(kind.element_type), frozenset(re.findall(r'"[^"]*"', sharding))


def _loop(operation: Any) -> Loop:
    number = ir.IntegerAttr(operation.attributes["fairway.loop"]).value
    count = ir.IntegerAttr(operation.attributes["fairway.count"]).value
    return Loop(operation, int(number), int(count))
