"""Writes the operations of an island's part of a program, and marks what crosses between islands.

Values are an island's parts of arrays. What crosses is a marked custom call, of one operand, whose
leading dimension counts the islands of a group; `pieces` makes an exchange of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from fairway.host.elements import dtype_of
from fairway.host.partition.axes import Dimension, IslandAxis, Islands, IslandSharding
from fairway.host.partition.operations import CROSSING, ISLAND, maker_of, per_value
from fairway.host.programs import ELEMENT_TYPES

__all__ = ["Emitter", "Reshard", "byte_size", "led", "plan_reshard"]

Value = Any
Digits = list[tuple[int, int | None]]
"""A dimension in mixed radix, the major digit first: sizes, and for digits that come from a leading
dimension, or go to one, their places there."""


@dataclasses.dataclass(frozen=True)
class Reshard:
    """Steps from one cut to another, in this order.

    Attributes:
        moved: axes that one all-to-all takes from one dimension to another.
        gathered: axes that are gathered.
        sliced: axes that each island takes its part of, without communication.
    """

    moved: tuple[IslandAxis, ...]
    gathered: tuple[IslandAxis, ...]
    sliced: tuple[IslandAxis, ...]


def plan_reshard(source: IslandSharding, target: IslandSharding, islands: Islands) -> Reshard:
    """Returns the steps from one cut of an array to another."""
    before, after = _places(source), _places(target)
    kept = {axis for axis in before if after.get(axis) == before[axis]}
    gone = [axis for axis in islands.axes if axis in before and axis not in kept]
    come = [axis for axis in islands.axes if axis in after and axis not in kept]
    both = [axis for axis in gone if axis in come]
    is_apart = both and all(before[axis][0] != after[axis][0] for axis in both)
    moved = tuple(both) if is_apart and gone == both and come == both else ()
    if moved:
        return Reshard(moved, (), ())
    return Reshard((), tuple(gone), tuple(come))


def _places(cut: IslandSharding) -> dict[IslandAxis, tuple[int, int]]:
    """Returns dimension and number of parts before of each island axis."""
    return {
        axis: (index, before)
        for index, placed in enumerate(cut.islands())
        for axis, before in placed
    }


class Emitter:
    """Writes operations at the current insertion point.

    Attributes:
        arguments: for arguments of the program, how they are sharded inside the island.

    Args:
        islands: the islands.
        mesh: name of a mesh of all devices, if there is one.
    """

    def __init__(self, islands: Islands, mesh: str | None) -> None:
        self.islands = islands
        self.arguments: dict[Value, str | None] = {}
        self._mesh = mesh
        self.crossings = 0
        """Number of crossings that were written."""
        self.crossed_bytes = 0
        """Bytes of their operands."""

    def operation(
        self,
        name: str,
        results: Sequence[Any],
        operands: Sequence[Value],
        inner: str | None = None,
        **attributes: Any,
    ) -> Any:
        """Writes an operation.

        Args:
            name: its name.
            results: types of its results.
            operands: its operands.
            inner: how its result is sharded inside the island.
            attributes: its attributes.
        """
        given = {key.replace("__", "."): value for key, value in attributes.items()}
        if inner is not None:
            given["sdy.sharding"] = per_value([inner])
        return ir.Operation.create(
            name, results=list(results), operands=list(operands), attributes=given
        )

    def inner(self, cut: IslandSharding, shape: Sequence[int]) -> str | None:
        """Returns how an island's part is sharded inside the island; None if there is no mesh."""
        return cut.inner(shape, self._mesh)

    def pinned(self, value: Value, cut: IslandSharding) -> Value:
        """Returns a value that XLA is to shard inside the island as a cut says."""
        inner = self.inner(cut, list(ir.RankedTensorType(value.type).shape))
        if inner is None:
            barrier = "stablehlo.optimization_barrier"
            return self.operation(barrier, [value.type], [value]).result
        constraint = "sdy.sharding_constraint"
        attribute = ir.Attribute.parse(inner)
        return self.operation(constraint, [value.type], [value], sharding=attribute).result

    def is_pinned(self, value: Value, cut: IslandSharding) -> bool:
        """Returns whether it is known that a value is sharded as a cut says."""
        inner = self.inner(cut, list(ir.RankedTensorType(value.type).shape))
        if inner is None or value in self.arguments:
            return self.arguments.get(value) == inner
        maker = maker_of(value)
        if maker is None:
            return False
        for name in ("sharding", "sdy.sharding", "out_shardings"):
            if name in maker.attributes:
                return maker.attributes[name] in (ir.Attribute.parse(inner), per_value([inner]))
        return False

    def reshard(
        self, value: Value, source: IslandSharding, target: IslandSharding, shape: Sequence[int]
    ) -> Value:
        """Returns a value of another cut.

        Args:
            value: the island's part.
            source: its cut.
            target: the wanted cut.
            shape: shape of the whole array.
        """
        if source.islands() == target.islands():
            return value
        steps = plan_reshard(source, target, self.islands)
        if steps.moved:
            return self._all_to_all(value, source, target, (shape, steps.moved))
        if steps.gathered:
            value = self._gather(value, source, (shape, steps.gathered))
        if steps.sliced:
            value = self._slice(value, target, (shape, steps.sliced))
        return value

    def reduce(
        self, value: Value, cut: IslandSharding, axes: Sequence[IslandAxis], reduction: str
    ) -> Value:
        """Returns the reduction of all islands' values along axes."""
        return self.cross("reduce", value, cut, self.islands.groups(axes), reduction)

    def reduce_scatter(
        self, value: Value, target: IslandSharding, shape: Sequence[int], axes: Sequence[IslandAxis]
    ) -> Value:
        """Returns each island's part of a sum of whole arrays over islands."""
        parts = self._split(value, target, axes)
        own = self.cross("scatter", parts, led(target), self.islands.groups(axes), "add")
        return self.reshaped(own, target.local(shape), target)

    def cross(
        self,
        kind: str,
        value: Value,
        cut: IslandSharding,
        groups: list[list[int]],
        reduction: str = "",
    ) -> Value:
        """Writes a crossing.

        Args:
            kind: ``gather`` adds a leading dimension, ``all_to_all`` exchanges along it, and
                ``scatter`` leaves 1 of it; ``reduce`` and ``permute`` keep the shape.
            value: the operand.
            cut: how it is cut.
            groups: devices that communicate; pairs of source and target for ``permute``.
            reduction: how ``reduce`` and ``scatter`` reduce.
        """
        if not self.is_pinned(value, cut):
            value = self.pinned(value, cut)
        source = ir.RankedTensorType(value.type)
        shape = list(source.shape)
        if kind == "gather":
            shape, cut = [len(groups[0]), *shape], led(cut)
        elif kind == "scatter":
            shape[0] = 1
        numbers: Any = ir.DenseI64ArrayAttr
        width = max(map(len, groups), default=2)
        padded = [[*group, *[-1] * (width - len(group))] for group in groups]
        integer = ir.IntegerType.get_signless(64)
        self.crossings += 1
        self.crossed_bytes += byte_size(source)
        return self.operation(
            "stablehlo.custom_call",
            [ir.RankedTensorType.get(shape, source.element_type)],
            [value],
            self.inner(cut, shape),
            call_target_name=ir.StringAttr.get(CROSSING),
            fairway__kind=ir.StringAttr.get(kind),
            fairway__groups=numbers.get([device for group in padded for device in group]),
            fairway__width=ir.IntegerAttr.get(integer, width),
            fairway__reduction=ir.StringAttr.get(reduction),
        ).result

    def folded(self, value: Value, dimension: int, cut: IslandSharding) -> Value:
        """Returns a value whose leading dimension has become the major part of another.

        Args:
            value: the value.
            dimension: that dimension, not counting the leading one.
            cut: cut of the result.
        """
        shape = list(ir.RankedTensorType(value.type).shape)
        count, rest = shape[0], shape[1:]
        order = [*range(1, dimension + 1), 0, *range(dimension + 1, len(shape))]
        rest[dimension] *= count
        return self.reshaped(self._transposed(value, order), rest, cut)

    def unfolded(self, value: Value, dimension: int, count: int, cut: IslandSharding) -> Value:
        """Returns a value of which ``count`` parts of a dimension have become a leading one."""
        shape = list(ir.RankedTensorType(value.type).shape)
        parts = [*shape[:dimension], count, shape[dimension] // count, *shape[dimension + 1 :]]
        order = [dimension, *(i for i in range(len(parts)) if i != dimension)]
        split = self._transposed(self.reshaped(value, parts), order)
        return self.reshaped(split, [parts[i] for i in order], led(cut))

    def ordinal(self, axes: Sequence[IslandAxis]) -> Value:
        """Returns the place of this island among those along axes, the first being major."""
        scalar = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
        name = ir.StringAttr.get(ISLAND)
        island = self.operation("stablehlo.custom_call", [scalar], [], call_target_name=name).result
        if list(axes) == self.islands.axes:
            return island
        total = self.constant(np.int32(0))
        for axis in axes:
            along = self._binary("divide", island, self.constant(np.int32(axis.stride)))
            along = self._binary("remainder", along, self.constant(np.int32(axis.size)))
            total = self._binary("multiply", total, self.constant(np.int32(axis.size)))
            total = self._binary("add", total, along)
        return total

    def constant(self, value: Any) -> Value:
        """Returns a constant."""
        array = np.asarray(value)
        elements: Any = ir.DenseElementsAttr
        attribute = elements.get(array)
        return self.operation("stablehlo.constant", [attribute.type], [], value=attribute).result

    def reshaped(
        self, value: Value, shape: Sequence[int], cut: IslandSharding | None = None
    ) -> Value:
        """Returns a value of another shape and as many elements."""
        kind = ir.RankedTensorType(value.type)
        if list(kind.shape) == list(shape):
            return value
        inner = None if cut is None else cut.inner(shape)
        made = ir.RankedTensorType.get(list(shape), kind.element_type)
        return self.operation("stablehlo.reshape", [made], [value], inner).result

    def zeros(self, kind: Any) -> Value:
        """Returns zeros of a type."""
        kind = ir.RankedTensorType(kind)
        element = kind.element_type
        if isinstance(element, ir.ComplexType):
            half = self.zeros(ir.RankedTensorType.get(kind.shape, element.element_type))
            return self.operation("stablehlo.complex", [kind], [half, half]).result
        zero = (
            ir.FloatAttr.get(element, 0.0)
            if isinstance(element, ir.FloatType)
            else ir.IntegerAttr.get(element, 0)
        )
        elements: Any = ir.DenseElementsAttr
        value = elements.get_splat(kind, zero)
        return self.operation("stablehlo.constant", [kind], [], value=value).result

    def is_at(self, axes: Sequence[IslandAxis], place: int) -> Value:
        """Returns whether this island is at a place among those along axes."""
        bit = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))
        direction: Any = ir.Attribute.parse("#stablehlo<comparison_direction EQ>")
        operands = [self.ordinal(axes), self.constant(np.int32(place))]
        compare = "stablehlo.compare"
        return self.operation(compare, [bit], operands, comparison_direction=direction).result

    def _binary(self, name: str, one: Value, other: Value) -> Value:
        return self.operation(f"stablehlo.{name}", [one.type], [one, other]).result

    def _gather(
        self, value: Value, cut: IslandSharding, of: tuple[Sequence[int], Sequence[IslandAxis]]
    ) -> Value:
        shape, axes = of
        stacked = self.cross("gather", value, cut, self.islands.groups(axes))
        target = cut.without(axes)
        return self._join(stacked, cut, axes, (target, target.local(shape)))

    def _slice(
        self,
        value: Value,
        target: IslandSharding,
        of: tuple[Sequence[int], Sequence[IslandAxis]],
    ) -> Value:
        shape, axes = of
        parts = self._split(value, target, axes)
        kind = ir.RankedTensorType(parts.type)
        own = [1, *kind.shape[1:]]
        zero = self.constant(np.int32(0))
        sizes: Any = ir.DenseI64ArrayAttr
        taken = self.operation(
            "stablehlo.dynamic_slice",
            [ir.RankedTensorType.get(own, kind.element_type)],
            [parts, self.ordinal(axes), *[zero] * (len(own) - 1)],
            slice_sizes=sizes.get(own),
        ).result
        return self.reshaped(taken, target.local(shape), target)

    def _all_to_all(
        self,
        value: Value,
        source: IslandSharding,
        target: IslandSharding,
        of: tuple[Sequence[int], Sequence[IslandAxis]],
    ) -> Value:
        shape, axes = of
        parts = self._split(value, target, axes)
        # Every dimension is now cut as by the source or by the target, by both where axes moved.
        exchanged = self.cross("all_to_all", parts, led(target), self.islands.groups(axes))
        return self._join(exchanged, source, axes, (target, target.local(shape)))

    def _split(self, value: Value, target: IslandSharding, axes: Sequence[IslandAxis]) -> Value:
        """Returns the parts of a value along axes of a cut, in a new leading dimension."""
        kind = ir.RankedTensorType(value.type)
        digits = [
            _digits(dimension, axes, extent)
            for dimension, extent in zip(target.dims, kind.shape, strict=True)
        ]
        expanded = [size for dimension in digits for size, _ in dimension]
        order = _leading(digits)
        value = self._transposed(self.reshaped(value, expanded), order)
        rest = [math.prod(s for s, key in dimension if key is None) for dimension in digits]
        count = math.prod(axis.size for axis in axes)
        return self.reshaped(value, [count, *rest], led(target))

    def _join(
        self,
        value: Value,
        cut: IslandSharding,
        axes: Sequence[IslandAxis],
        made: tuple[IslandSharding, Sequence[int]],
    ) -> Value:
        """Returns a value without its leading dimension, whose parts are along axes of a cut."""
        target, shape = made
        digits = [
            _digits(dimension, axes, extent)
            for dimension, extent in zip(cut.dims, shape, strict=True)
        ]
        order = _leading(digits)
        flat = [size for dimension in digits for size, _ in dimension]
        value = self.reshaped(value, [flat[index] for index in order])
        back = [order.index(index) for index in range(len(order))]
        return self.reshaped(self._transposed(value, back), shape, target)

    def _transposed(self, value: Value, order: list[int]) -> Value:
        if order == sorted(order):
            return value
        kind = ir.RankedTensorType(value.type)
        made = ir.RankedTensorType.get([kind.shape[i] for i in order], kind.element_type)
        numbers: Any = ir.DenseI64ArrayAttr
        return self.operation(
            "stablehlo.transpose", [made], [value], permutation=numbers.get(order)
        ).result


def led(cut: IslandSharding) -> IslandSharding:
    """Returns the cut of arrays with one more dimension, in front."""
    return IslandSharding(((), *cut.dims), cut.mesh)


def _digits(dimension: Dimension, axes: Sequence[IslandAxis], extent: int) -> Digits:
    """Returns the digits of a dimension of which some are of island axes.

    Args:
        dimension: its axes.
        axes: island axes; others are not there, for a part has one coordinate of them.
        extent: its extent, digits of ``axes`` included.
    """
    chosen = [i for i, token in enumerate(dimension) if token.island in axes]
    if not chosen:
        return [(extent, None)]
    digits: Digits = []
    for token in dimension[: chosen[-1] + 1]:
        if token.island in axes:
            assert token.island is not None
            digits.append((token.size, list(axes).index(token.island)))
        elif not token.island:
            digits.append((token.size, None))
    return [*digits, (extent // math.prod(size for size, _ in digits), None)]


def _leading(digits: list[Digits]) -> list[int]:
    """Returns the order of all digits in which those with a place lead."""
    flat = [key for dimension in digits for _, key in dimension]
    placed = sorted((key, index) for index, key in enumerate(flat) if key is not None)
    return [*(index for _, index in placed), *(i for i, key in enumerate(flat) if key is None)]


def byte_size(kind: Any) -> int:
    """Returns the bytes of an array of a type."""
    elements: int = math.prod(kind.shape)
    return elements * dtype_of(ELEMENT_TYPES[str(kind.element_type)]).itemsize
