"""Regions that a program writes for single devices: ``shard_map``.

Inside such a region every value is one device's. Collectives among devices of one island stay;
those between islands are taken out, and the region is divided into segments before and after them.
Between segments, a value is an array of all devices' values, stacked along a new first dimension.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from fairway.host.partition.axes import IslandSharding
from fairway.host.partition.collectives import COLLECTIVES, cross
from fairway.host.partition.control import launched
from fairway.host.partition.emitter import Emitter
from fairway.host.partition.loops import trip_count
from fairway.host.partition.operations import (
    blocks_of,
    by_level,
    captured_by,
    cloned,
    operands_of,
    per_value,
    rename,
    terminator_of,
)
from fairway.host.partition.writer import Writer
from fairway.host.screening import RefusedError

__all__ = ["Manual"]

Value = Any


@dataclasses.dataclass
class _State:
    """What the segments have made.

    Attributes:
        stacked: values between segments, of all devices.
        entries: arguments of the region, as they are outside of it, and how they are cut.
    """

    stacked: dict[Value, Value]
    entries: dict[Value, tuple[Value, IslandSharding]]


class Manual:
    """One such region.

    Args:
        writer: writes operations.
        operation: the region.
    """

    def __init__(self, writer: Writer, operation: Any) -> None:
        self._writer = writer
        self._emitter = writer.emitter
        self._operation = operation
        self._block = operation.regions[0].blocks[0]
        given, made = (
            [sdy.TensorShardingAttr(one) for one in _shardings(operation, name)]
            for name in ("in_shardings", "out_shardings")
        )
        names = [ir.FlatSymbolRefAttr(one.mesh_or_ref).value for one in (*given, *made)]
        self._mesh = writer.meshes[names[0]] if names else None
        axes = sdy.ManualAxesAttr(operation.attributes["manual_axes"])
        digits = self._mesh.digits if self._mesh else {}
        self._tokens = [token for axis in axes for token in digits.get(str(axis), ())]
        self._inner = [token for token in self._tokens if token.axis]
        self._given = [
            self._own(writer.cut_of(s, v)) for s, v in zip(given, operation.operands, strict=True)
        ]
        self._made = [
            self._own(writer.cut_of(s, v)) for s, v in zip(made, operation.results, strict=True)
        ]

    def lower(self) -> None:
        """Writes the region."""
        writer = self._writer
        operands = [
            writer.taken(v, cut)
            for v, cut in zip(self._operation.operands, self._given, strict=True)
        ]
        block = self._block
        entries = dict(zip(block.arguments, zip(operands, self._given, strict=True), strict=True))
        returned = terminator_of(block)
        inline(block, writer)
        operations = [one.operation for one in block.operations][:-1]
        if not self._inner:
            for argument, (value, cut) in entries.items():
                writer.define(argument, value, self._automatic(cut))
            for operation in operations:
                writer.operation(operation)
            made = [
                writer.taken(v, self._automatic(cut))
                for v, cut in zip(returned.operands, self._made, strict=True)
            ]
        else:
            state = _State({}, entries)
            if any(map(self._crosses, operations)):
                self._segments(operations, state, list(returned.operands))
                operations = []
            made = self._segment(operations, state, list(returned.operands), self._made)
        for result, value, cut in zip(self._operation.results, made, self._made, strict=True):
            writer.define(result, value, cut)

    def _own(self, cut: IslandSharding) -> IslandSharding:
        """Returns a cut without islands along axes that are not the region's."""
        others = cut.axes() - {token.island for token in self._tokens if token.island}
        return cut.without(others)

    def _automatic(self, cut: IslandSharding) -> IslandSharding:
        """Returns the cut of a value inside the region: by axes that are not the region's."""
        own = set(self._tokens)
        return IslandSharding(
            tuple(tuple(token for token in dim if token not in own) for dim in cut.dims), cut.mesh
        )

    # Segments

    def _segments(self, operations: Sequence[Any], state: _State, wanted: Sequence[Value]) -> None:
        """Writes operations as segments, with what crosses between them.

        Args:
            operations: operations of the region.
            state: what has been made, to which is added what later segments read.
            wanted: values that are read after these operations.
        """
        levels = list(by_level(operations, operands_of, self._crosses))
        for level, (own, crossing) in enumerate(levels):
            later = [one for after in levels[level + 1 :] for part in after for one in part]
            read = {v for one in (*crossing, *later) for v in operands_of(one)} | set(wanted)
            made = [v for one in own for v in one.results if v in read]
            entered = [
                value
                for one in crossing
                for value in one.operands
                if value in state.entries and value not in state.stacked
            ]
            made += dict.fromkeys(entered)
            if made:
                values = self._segment(own, state, made, None)
                state.stacked.update(zip(made, values, strict=True))
            for operation in crossing:
                self._cross(operation, state)

    def _crosses(self, operation: Any) -> bool:
        """Returns whether an operation communicates between islands, also in its regions."""
        return self._writer.crosses(operation)

    def _stack_cut(self, rank: int) -> IslandSharding:
        """Returns the cut of stacked values of a rank."""
        assert self._mesh is not None
        return IslandSharding((tuple(self._inner), *((),) * rank), self._mesh.name)

    def _segment(
        self, operations: Sequence[Any], state: _State, made: Sequence[Value], cuts: Any
    ) -> list[Value]:
        """Writes one region without crossings.

        Args:
            operations: its operations.
            state: what has been made before.
            made: the values that it returns.
            cuts: how these are cut outside of the region; None to stack them.
        """
        local = {value for one in operations for value in one.results}
        reads = [v for one in operations for v in operands_of(one)] + list(made)
        inputs = [v for v in dict.fromkeys(reads) if v not in local]
        outer, given, kinds = [], [], []
        for value in inputs:
            one, cut = self._outside(value, state)
            outer.append(one)
            given.append(_closed(self._emitter, cut, one))
            kinds.append(self._inside(one, cut))
        if any(_needs_island(one) for one in operations):
            island = self._writer.number
            if island is None:
                island = self._emitter.ordinal(self._writer.islands.axes)
            outer.append(island)
            assert self._mesh is not None
            given.append(f"#sdy.sharding<@{self._mesh.name}, []>")
            kinds.append(island.type)
        results = [self._result(v, None if cuts is None else cuts[i]) for i, v in enumerate(made)]
        written = ir.Operation.create(
            "sdy.manual_computation",
            results=[kind for kind, _ in results],
            operands=outer,
            attributes={
                "in_shardings": per_value(given),
                "out_shardings": per_value(
                    [_closed(self._emitter, cut, kind) for kind, cut in results]
                ),
                "manual_axes": self._axes(),
            },
            regions=1,
        )
        block = written.regions[0].blocks.append(
            *kinds, arg_locs=[ir.Location.unknown()] * len(kinds)
        )
        with ir.InsertionPoint(block), self._writer.inside(block, len(inputs)):
            for value, own in zip(inputs, block.arguments, strict=False):
                shape = list(ir.RankedTensorType(value.type).shape)
                whole = IslandSharding.whole(len(shape))
                self._writer.define(value, self._emitter.reshaped(own, shape), whole)
            for operation in operations:
                self._writer.operation(operation)
            values = []
            for value in made:
                own = self._writer.taken(value, IslandSharding.whole(len(value.type.shape)))
                shape = list(ir.RankedTensorType(own.type).shape)
                stacked = [1, *shape] if cuts is None else shape
                values.append(self._emitter.reshaped(own, stacked))
            ir.Operation.create("sdy.return", operands=values)
        return list(written.results)

    def _stacked(self, values: Sequence[Value], state: _State) -> list[Value]:
        """Returns values as they are between segments."""
        missing = [value for value in dict.fromkeys(values) if value not in state.stacked]
        if missing:
            state.stacked.update(zip(missing, self._segment([], state, missing, None), strict=True))
        return [state.stacked[value] for value in values]

    def _outside(self, value: Value, state: _State) -> tuple[Value, IslandSharding]:
        """Returns a value that a segment reads, as it is outside of the region, and its cut."""
        if value in state.stacked:
            rank = len(ir.RankedTensorType(value.type).shape)
            return state.stacked[value], self._stack_cut(rank)
        if value in state.entries:
            return state.entries[value]
        part = self._writer.part(value)
        return part.value, part.cut

    def _inside(self, value: Value, cut: IslandSharding) -> Any:
        """Returns the type of a value inside of the region."""
        own = set(self._inner)
        kind = ir.RankedTensorType(value.type)
        shape = [
            extent // math.prod(token.size for token in dim if token in own)
            for extent, dim in zip(kind.shape, cut.dims, strict=True)
        ]
        return ir.RankedTensorType.get(shape, kind.element_type)

    def _result(self, value: Value, cut: IslandSharding | None) -> tuple[Any, IslandSharding]:
        """Returns the type outside of the region of a value in it, and its cut."""
        kind = ir.RankedTensorType(value.type)
        shape = list(kind.shape)
        if cut is None:
            cut = self._stack_cut(len(shape))
            shape = [1, *shape]
        own = set(self._inner)
        shape = [
            extent * math.prod(token.size for token in dim if token in own)
            for extent, dim in zip(shape, cut.dims, strict=True)
        ]
        return ir.RankedTensorType.get(shape, kind.element_type), cut

    def _axes(self) -> Any:
        names = ", ".join(str(token.axis) for token in self._inner)
        return ir.Attribute.parse(f"#sdy<manual_axes{{{names}}}>")

    # Crossings

    def _cross(self, operation: Any, state: _State) -> None:
        """Writes an operation that crosses, on stacked values."""
        if operation.name in COLLECTIVES:
            [operand], [result] = operation.operands, operation.results
            rank = len(ir.RankedTensorType(operand.type).shape)
            value, cut = state.stacked[operand], self._stack_cut(rank)
            state.stacked[result] = cross(self._emitter, operation, (value, cut), 1)
            return
        if operation.name != "stablehlo.while":
            raise RefusedError(
                f"UNIMPLEMENTED: {operation.name} at {operation.location} communicates between "
                "islands in one of its regions, in a shard_map; communicate outside of it"
            )
        self._loop(operation, state)

    def _loop(self, operation: Any, state: _State) -> None:
        """Writes a loop that is launched again and again, of stacked values."""
        count = trip_count(operation, self._writer.functions)
        if count is None:
            raise RefusedError(
                f"UNIMPLEMENTED: the loop at {operation.location}, in a shard_map, communicates "
                "between islands and does not say how often it runs; use scan or fori_loop"
            )
        body = operation.regions[1].blocks[0]
        captured = captured_by(body)
        given = [*operation.operands, *captured]
        operands = self._stacked(given, state)
        cuts = [self._stack_cut(len(ir.RankedTensorType(value.type).shape)) for value in given]

        def write(block: Any) -> list[Value]:
            names = [*body.arguments, *captured]
            inner = _State(dict(zip(names, block.arguments, strict=True)), {})
            returned = terminator_of(body)
            operations = [one.operation for one in body.operations][:-1]
            self._segments(operations, inner, list(returned.operands))
            made = self._stacked(list(returned.operands), inner)
            return [*made, *list(block.arguments)[len(made) :]]

        results = launched(self._writer, (operands, cuts), count, write)
        results = results[: len(operation.results)]
        state.stacked.update(zip(operation.results, results, strict=True))


def inline(block: Any, writer: Writer) -> None:
    """Replaces calls of functions that cross, in a block and its regions, by their operations."""
    for one in list(block.operations):
        operation = one.operation
        if not writer.crosses(operation):
            continue
        if operation.name == "func.call":
            _inline_call(operation, writer)
            return inline(block, writer)
        for inner in blocks_of(operation):
            inline(inner, writer)
    return None


def _inline_call(call: Any, writer: Writer) -> None:
    name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
    body = writer.functions[name].regions[0].blocks[0]
    known = dict(zip(body.arguments, call.operands, strict=True))
    operations = [one.operation for one in body.operations]
    for operation in operations[:-1]:
        written = cloned(operation, ir.InsertionPoint(call))
        rename(written, known)
        known.update(zip(operation.results, written.results, strict=True))
    for result, value in zip(call.results, operations[-1].operands, strict=True):
        result.replace_all_uses_with(known[value])
    call.erase()


def _needs_island(operation: Any) -> bool:
    if operation.name in ("stablehlo.partition_id", "func.call"):
        return True
    return any(
        _needs_island(inner.operation)
        for block in blocks_of(operation)
        for inner in block.operations
    )


def _shardings(operation: Any, name: str) -> list[Any]:
    return list(sdy.TensorShardingPerValueAttr(operation.attributes[name]).shardings)


def _closed(emitter: Emitter, cut: IslandSharding, value: Any) -> str:
    """Returns how a value, or one of a type, is sharded inside an island."""
    kind = ir.RankedTensorType(getattr(value, "type", value))
    return str(emitter.inner(cut, list(kind.shape)))
