"""Regions that a program writes for single devices: ``shard_map``.

Inside such a region every value is one device's. Collectives among devices of one island stay; those
between islands are taken out, and the region is divided into segments before and after them. Between
segments, a value is an array of all devices' values, stacked along a new first dimension.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from fairway.host.partition.axes import Cut, Islands, MeshView
from fairway.host.partition.loops import trip_count
from fairway.host.partition.rules import REDUCTIONS
from fairway.host.screening import RefusedError

if TYPE_CHECKING:
    from fairway.host.partition.localize import Localizer

__all__ = ["COLLECTIVES", "Groups", "Manual", "local_collective"]

Value = Any
Groups = list[list[int]]

COLLECTIVES = {
    "stablehlo.all_reduce": "replica_groups",
    "stablehlo.all_gather": "replica_groups",
    "stablehlo.all_to_all": "replica_groups",
    "stablehlo.reduce_scatter": "replica_groups",
    "stablehlo.collective_broadcast": "replica_groups",
    "stablehlo.collective_permute": "source_target_pairs",
}
"""Collectives, and the attribute that says which devices communicate."""


def groups_of(operation: Any) -> Groups:
    """Returns the devices that communicate in a collective; pairs, for a permutation."""
    table = np.array(ir.DenseIntElementsAttr(operation.attributes[COLLECTIVES[operation.name]]))
    return [[int(device) for device in row if device >= 0] for row in table]


def local_collective(operation: Any, islands: Islands) -> Any:
    """Returns the devices that communicate in a collective inside islands, as islands number them.

    Raises:
        RefusedError: they are not the same on all islands.
    """
    found: list[set[tuple[int, ...]]] = [set() for _ in range(islands.count)]
    ordered: list[list[int]] = []
    for group in groups_of(operation):
        island = islands.of[group[0]]
        members = islands.members[island]
        own = [members.index(device) for device in group]
        found[island].add(tuple(own))
        if island == 0:
            ordered.append(own)
    if any(one != found[0] for one in found):
        raise RefusedError(
            f"UNIMPLEMENTED: {operation.name} at {operation.location} joins other devices on each "
            "island"
        )
    table = np.array(ordered, np.int64).reshape(len(ordered), -1)
    elements: Any = ir.DenseIntElementsAttr
    return elements.get(table)


@dataclasses.dataclass
class _State:
    """What the segments have made.

    Attributes:
        stacked: values between segments, of all devices.
        entries: arguments of the region, as they are outside of it, and how they are cut.
    """

    stacked: dict[Value, Value]
    entries: dict[Value, tuple[Value, Cut]]


class Manual:
    """One such region.

    Args:
        localizer: writes operations.
        operation: the region.
        meshes: meshes of the program by name.
    """

    def __init__(
        self, localizer: Localizer, operation: Any, meshes: dict[str, MeshView]
    ) -> None:
        self._localizer = localizer
        self._emitter = localizer.emitter
        self._operation = operation
        self._block = operation.regions[0].blocks[0]
        given, made = (
            [sdy.TensorShardingAttr(one) for one in _shardings(operation, name)]
            for name in ("in_shardings", "out_shardings")
        )
        names = [ir.FlatSymbolRefAttr(one.mesh_or_ref).value for one in (*given, *made)]
        self._mesh = meshes[names[0]] if names else None
        axes = sdy.ManualAxesAttr(operation.attributes["manual_axes"])
        digits = self._mesh.digits if self._mesh else {}
        self._tokens = [
            token for axis in axes for token in digits.get(str(axis), ())
        ]
        self._inner = [token for token in self._tokens if token.axis]
        self._given = [localizer.cut_of(s, v) for s, v in zip(given, operation.operands, strict=True)]
        self._made = [localizer.cut_of(s, v) for s, v in zip(made, operation.results, strict=True)]

    def lower(self) -> None:
        """Writes the region."""
        localizer = self._localizer
        operands = [
            localizer.taken(v, cut)
            for v, cut in zip(self._operation.operands, self._given, strict=True)
        ]
        block = self._block
        entries = dict(zip(block.arguments, zip(operands, self._given, strict=True), strict=True))
        returned = block.operations[len(block.operations) - 1]
        inline(block, localizer)
        operations = [one.operation for one in block.operations][:-1]
        if not self._inner:
            for argument, (value, cut) in entries.items():
                localizer.define(argument, value, self._automatic(cut))
            for operation in operations:
                localizer.operation(operation)
            made = [localizer.taken(v, self._automatic(cut)) for v, cut in zip(returned.operands, self._made, strict=True)]
        else:
            state = _State({}, entries)
            self._segments(operations, state, list(returned.operands))
            made = self._segment([], state, list(returned.operands), self._made)
        for result, value, cut in zip(self._operation.results, made, self._made, strict=True):
            localizer.define(result, value, cut)

    def _automatic(self, cut: Cut) -> Cut:
        """Returns the cut of a value inside the region: by axes that are not the region's."""
        own = set(self._tokens)
        return Cut(
            tuple(tuple(token for token in dim if token not in own) for dim in cut.dims), cut.mesh
        )

    # Segments

    def _segments(
        self, operations: Sequence[Any], state: _State, wanted: Sequence[Value]
    ) -> None:
        """Writes operations as segments, with what crosses between them.

        Args:
            operations: operations of the region.
            state: what has been made, to which is added what later segments read.
            wanted: values that are read after these operations.
        """
        levels: dict[Value, int] = {}
        segments: dict[int, list[Any]] = {}
        crossing: dict[int, list[Any]] = {}
        for operation in operations:
            reads = list(_reads(operation))
            level = max((levels.get(value, 0) for value in reads), default=0)
            crosses = self._crosses(operation)
            (crossing if crosses else segments).setdefault(level, []).append(operation)
            for result in operation.results:
                levels[result] = level + 1 if crosses else level
        last = max([*segments, *crossing], default=-1)
        for level in range(last + 1):
            own = segments.get(level, [])
            later = [one for after in range(level + 1, last + 1) for one in segments.get(after, ())]
            later += [one for at in range(level, last + 1) for one in crossing.get(at, ())]
            read = {value for one in later for value in _reads(one)} | set(wanted)
            made = [v for one in own for v in one.results if v in read]
            entered = [
                value
                for one in crossing.get(level, ())
                for value in one.operands
                if value in state.entries and value not in state.stacked
            ]
            made += dict.fromkeys(entered)
            if made:
                values = self._segment(own, state, made, None)
                state.stacked.update(zip(made, values, strict=True))
            for operation in crossing.get(level, ()):
                self._cross(operation, state)

    def _crosses(self, operation: Any) -> bool:
        """Returns whether an operation communicates between islands, also in its regions."""
        return self._localizer.crosses(operation)

    def _stack_cut(self, rank: int) -> Cut:
        """Returns the cut of stacked values of a rank."""
        assert self._mesh is not None
        return Cut((tuple(self._inner), *((),) * rank), self._mesh.name)

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
        reads = [v for one in operations for v in _reads(one)] + list(made)
        inputs = [v for v in dict.fromkeys(reads) if v not in local]
        outer, given, kinds = [], [], []
        for value in inputs:
            one, cut = self._outside(value, state)
            outer.append(one)
            given.append(_closed(cut, one))
            kinds.append(self._inside(one, cut))
        if any(_needs_island(one) for one in operations):
            island = self._emitter.ordinal(self._localizer.islands.axes)
            outer.append(island)
            assert self._mesh is not None
            given.append(f"<@{self._mesh.name}, []>")
            kinds.append(island.type)
        results = [self._result(v, None if cuts is None else cuts[i]) for i, v in enumerate(made)]
        written = ir.Operation.create(
            "sdy.manual_computation",
            results=[kind for kind, _ in results],
            operands=outer,
            attributes={
                "in_shardings": _per_value(given),
                "out_shardings": _per_value([_closed(cut, kind) for kind, cut in results]),
                "manual_axes": self._axes(),
            },
            regions=1,
        )
        block = written.regions[0].blocks.append(
            *kinds, arg_locs=[ir.Location.unknown()] * len(kinds)
        )
        with ir.InsertionPoint(block), self._localizer.inside(block, len(inputs)):
            for value, own in zip(inputs, block.arguments, strict=False):
                shape = list(ir.RankedTensorType(value.type).shape)
                whole = Cut.whole(len(shape))
                self._localizer.define(value, self._emitter.reshaped(own, shape), whole)
            for operation in operations:
                self._localizer.operation(operation)
            values = []
            for value in made:
                own = self._localizer.taken(value, Cut.whole(len(value.type.shape)))
                shape = list(ir.RankedTensorType(own.type).shape)
                stacked = [1, *shape] if cuts is None else shape
                values.append(self._emitter.reshaped(own, stacked))
            ir.Operation.create("sdy.return", operands=values)
        return list(written.results)

    def _outside(self, value: Value, state: _State) -> tuple[Value, Cut]:
        """Returns a value that a segment reads, as it is outside of the region, and its cut."""
        if value in state.stacked:
            rank = len(ir.RankedTensorType(value.type).shape)
            return state.stacked[value], self._stack_cut(rank)
        if value in state.entries:
            return state.entries[value]
        part = self._localizer.part(value)
        return part.value, part.cut

    def _inside(self, value: Value, cut: Cut) -> Any:
        """Returns the type of a value inside of the region."""
        own = set(self._inner)
        kind = ir.RankedTensorType(value.type)
        shape = [
            extent // math.prod(token.size for token in dim if token in own)
            for extent, dim in zip(kind.shape, cut.dims, strict=True)
        ]
        return ir.RankedTensorType.get(shape, kind.element_type)

    def _result(self, value: Value, cut: Cut | None) -> tuple[Any, Cut]:
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
            state.stacked[result] = cross(self._localizer, operation, (value, cut), 1)
            return
        if operation.name != "stablehlo.while":
            raise RefusedError(
                f"UNIMPLEMENTED: {operation.name} at {operation.location} communicates between "
                "islands in one of its regions, in a shard_map; communicate outside of it"
            )
        self._loop(operation, state)

    def _loop(self, operation: Any, state: _State) -> None:
        """Writes a loop that is launched again and again, of stacked values."""
        count = trip_count(operation, self._localizer.functions)
        if count is None:
            raise RefusedError(
                f"UNIMPLEMENTED: the loop at {operation.location}, in a shard_map, communicates "
                "between islands and does not say how often it runs; use scan or fori_loop"
            )
        missing = [v for v in dict.fromkeys(operation.operands) if v not in state.stacked]
        if missing:
            state.stacked.update(zip(missing, self._segment([], state, missing, None), strict=True))
        operands = [state.stacked[value] for value in operation.operands]
        cuts = [
            self._stack_cut(len(ir.RankedTensorType(value.type).shape))
            for value in operation.operands
        ]
        body = operation.regions[1].blocks[0]

        def write(block: Any) -> list[Value]:
            inner = _State(
                dict(zip(body.arguments, block.arguments, strict=True)), state.entries
            )
            returned = body.operations[len(body.operations) - 1]
            operations = [one.operation for one in body.operations][:-1]
            self._segments(operations, inner, list(returned.operands))
            missing = [v for v in dict.fromkeys(returned.operands) if v not in inner.stacked]
            if missing:
                made = self._segment([], inner, missing, None)
                inner.stacked.update(zip(missing, made, strict=True))
            return [inner.stacked[value] for value in returned.operands]

        results = self._localizer.launched((operands, cuts), count, write)
        state.stacked.update(zip(operation.results, results, strict=True))


def inline(block: Any, localizer: Localizer) -> None:
    """Replaces calls of functions that cross, in a block and in its regions, by their operations."""
    for one in list(block.operations):
        operation = one.operation
        if not localizer.crosses(operation):
            continue
        if operation.name == "func.call":
            _inline_call(operation, localizer)
            return inline(block, localizer)
        for region in operation.regions:
            for inner in region.blocks:
                inline(inner, localizer)
    return None


def _inline_call(call: Any, localizer: Localizer) -> None:
    name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
    body = localizer.functions[name].regions[0].blocks[0]
    known = dict(zip(body.arguments, call.operands, strict=True))
    operations = [one.operation for one in body.operations]
    for operation in operations[:-1]:
        written = operation.clone(ip=ir.InsertionPoint(call))
        written = getattr(written, "operation", written)
        rename(written, known)
        known.update(zip(operation.results, written.results, strict=True))
    for result, value in zip(call.results, operations[-1].operands, strict=True):
        result.replace_all_uses_with(known[value])
    call.erase()


def rename(operation: Any, known: dict[Value, Value]) -> None:
    """Replaces the values that an operation, or one in its regions, reads."""
    for index, operand in enumerate(operation.operands):
        if operand in known:
            operation.operands[index] = known[operand]
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                rename(inner.operation, known)


def cross(localizer: Localizer, operation: Any, at: tuple[Value, Cut], offset: int) -> Value:
    """Writes a collective between islands on a value outside of its region.

    Args:
        localizer: writes operations.
        operation: the collective.
        at: its operand there, and how that is cut.
        offset: number of dimensions that the operand there has in front.
    """
    emitter, (value, cut) = localizer.emitter, at
    groups, shape = groups_of(operation), list(ir.RankedTensorType(value.type).shape)
    if operation.name == "stablehlo.collective_permute":
        return emitter.cross_groups("permute", value, cut, groups)
    count = len(groups[0])
    if operation.name == "stablehlo.all_reduce":
        return emitter.cross_groups("reduce", value, cut, groups, _reduction(operation))
    if any(len(group) != count for group in groups):
        raise RefusedError(f"UNIMPLEMENTED: {operation.name} joins groups of unequal size")

    def dimension(name: str) -> int:
        return int(ir.IntegerAttr(operation.attributes[name]).value) + offset

    match operation.name:
        case "stablehlo.all_gather":
            whole = emitter.cross_groups("gather", value, cut, groups)
            return emitter.folded(whole, dimension("all_gather_dim"), cut)
        case "stablehlo.all_to_all":
            parts = emitter.unfolded(value, dimension("split_dimension"), count, cut)
            led = Cut(((), *cut.dims), cut.mesh)
            parts = emitter.cross_groups("all_to_all", parts, led, groups)
            return emitter.folded(parts, dimension("concat_dimension"), cut)
        case "stablehlo.reduce_scatter":
            split = dimension("scatter_dimension")
            parts = emitter.unfolded(value, split, count, cut)
            led = Cut(((), *cut.dims), cut.mesh)
            own = emitter.cross_groups("scatter", parts, led, groups, _reduction(operation))
            shape[split] //= count
            return emitter.reshaped(own, shape, cut)
    raise RefusedError(f"UNIMPLEMENTED: {operation.name} between islands")


def _reduction(operation: Any) -> str:
    body = [one.operation.name for one in operation.regions[0].blocks[0].operations]
    found = [REDUCTIONS[name] for name in body if name in REDUCTIONS]
    if len(found) != 1:
        raise RefusedError(f"UNIMPLEMENTED: {operation.name} reduces by {body[0]} between islands")
    return found[0]


def _reads(operation: Any) -> list[Value]:
    """Returns the values that an operation reads, also in its regions, from outside of it."""
    from fairway.host.partition.pieces import operands_of

    return list(dict.fromkeys(operands_of(operation)))


def _needs_island(operation: Any) -> bool:
    if operation.name in ("stablehlo.partition_id", "func.call"):
        return True
    return any(
        _needs_island(inner.operation)
        for region in operation.regions
        for block in region.blocks
        for inner in block.operations
    )


def _shardings(operation: Any, name: str) -> list[Any]:
    return list(sdy.TensorShardingPerValueAttr(operation.attributes[name]).shardings)


def _closed(cut: Cut, value: Any) -> str:
    """Returns a sharding inside an island, as one of several values."""
    kind = ir.RankedTensorType(getattr(value, "type", value))
    text = cut.inner(list(kind.shape))
    return text[13:] if text else ""


def _per_value(shardings: Sequence[str]) -> Any:
    return ir.Attribute.parse(f"#sdy.sharding_per_value<[{', '.join(shardings)}]>")


