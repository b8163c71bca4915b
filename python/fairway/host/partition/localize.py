"""Writes an island's part of a program, operation by operation.

All calls are inlined, so the result is one block in which some operations are crossings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from fairway.host.partition.axes import IslandSharding
from fairway.host.partition.callbacks import write_client_call
from fairway.host.partition.collectives import COLLECTIVES, cross, local_collective
from fairway.host.partition.control import write_case, write_while
from fairway.host.partition.manual import Manual
from fairway.host.partition.operations import (
    LOOP,
    blocks_of,
    cloned,
    maker_of,
    shape_of,
    target_of,
    terminator_of,
)
from fairway.host.partition.rules import Factors, choose, read_rule, reduction_of
from fairway.host.partition.writer import IslandValue, Writer
from fairway.host.screening import RefusedError, is_client_call

__all__ = ["Localizer"]

RESHARDS = [
    f"sdy.{name}"
    for name in (
        *("all_gather", "all_slice", "all_to_all", "all_reduce", "reduce_scatter"),
        *("collective_permute", "replicated_to_unreduced", "sharded_to_unreduced"),
    )
]
"""Operations of Shardy that change how an array is sharded."""

Value = Any


class Localizer(Writer):
    """Writes an island's part of a program, by the kinds of its operations."""

    def main(self, block: Any) -> tuple[list[IslandSharding], list[IslandSharding]]:
        """Writes the entry function into a block, whose arguments it adds.

        Returns:
            The cuts of its arguments and of its results.
        """
        main = self.functions["main"]
        source = main.regions[0].blocks[0]
        given = [
            self.cut_of(attribute, argument)
            for attribute, argument in zip(
                _shardings(main, "arg_attrs", len(source.arguments)), source.arguments, strict=True
            )
        ]
        for argument, cut in zip(source.arguments, given, strict=True):
            own = block.add_argument(self.local(argument, cut), ir.Location.unknown())
            self.known[argument] = IslandValue(own, cut)
            self.emitter.arguments[own] = self.emitter.inner(cut, list(own.type.shape))
        returned = terminator_of(source)
        made = [
            self.cut_of(attribute, operand)
            for attribute, operand in zip(
                _shardings(main, "res_attrs", len(returned.operands)),
                returned.operands,
                strict=True,
            )
        ]
        with ir.InsertionPoint(block):
            self.operations(source)
            values = [self.taken(v, cut) for v, cut in zip(returned.operands, made, strict=True)]
            # Results have memory of their own, as XLA's do: none is an argument or another result.
            taken = set(block.arguments)
            for index, (value, cut) in enumerate(zip(values, made, strict=True)):
                maker = maker_of(value)
                is_of_loop = maker is not None and target_of(maker) == LOOP
                if value in taken or is_of_loop or not self.emitter.is_pinned(value, cut):
                    values[index] = self.emitter.pinned(value, cut)
                taken.add(value)
            self.emitter.operation("func.return", [], values)
        return given, made

    def operation(self, operation: Any) -> None:
        """Writes one operation of the program."""
        special = SPECIAL.get(operation.name)
        if special is not None:
            special(self, operation)
        else:
            self._general(operation)

    def _general(self, operation: Any) -> None:
        """Writes an operation by its rule."""
        given = [self.part(operand).cut for operand in operation.operands]
        wanted = self.wanted(operation)
        if all(cut.is_whole for cut in (*given, *wanted)):
            self._write(operation, given, wanted)
            return
        factors = read_rule(operation)
        if factors is None:
            self._undivided(operation, wanted)
        else:
            self._divided(operation, factors, (given, wanted))

    def _undivided(self, operation: Any, wanted: list[IslandSharding]) -> None:
        """Writes an operation that every island computes whole."""
        cuts = [IslandSharding.whole(len(shape_of(operand))) for operand in operation.operands]
        made = [self.only_inner(cut) for cut in wanted]
        before = self.emitter.crossed_bytes
        self._write(operation, cuts, made)
        if size := self.emitter.crossed_bytes - before:
            self.warn(operation, "cannot be divided over islands: each gathers its operands", size)

    def _divided(
        self,
        operation: Any,
        factors: Factors,
        cuts: tuple[list[IslandSharding], list[IslandSharding]],
    ) -> None:
        """Writes an operation of which every island computes a part.

        Args:
            operation: the operation.
            factors: its factors.
            cuts: of its operands as they are, and of its results as propagation wants them.
        """
        given, wanted = cuts
        strategy = choose(operation, factors, given, wanted)
        for value, cut in zip(
            (*operation.operands, *operation.results),
            (*strategy.operands, *strategy.results),
            strict=True,
        ):
            if cut.even(shape_of(value)).islands() != cut.islands():
                self._undivided(operation, wanted)
                return
        own = [cut.with_inner(one) for cut, one in zip(strategy.results, wanted, strict=True)]
        before = self.emitter.crossed_bytes
        made = self._write(operation, strategy.operands, own)
        size = self.emitter.crossed_bytes - before
        if size and strategy.is_blocked:
            self.warn(operation, "cannot be divided over islands along all dimensions", size)
        if not strategy.partial:
            return
        reduction = reduction_of(operation)
        assert reduction is not None
        for result, value, cut, want in zip(operation.results, made, own, wanted, strict=True):
            self.known[result] = self._reduced(
                result, (value, cut), want, (strategy.partial, reduction)
            )

    def _reduced(
        self,
        result: Value,
        own: tuple[Value, IslandSharding],
        want: IslandSharding,
        over: tuple[Any, str],
    ) -> IslandValue:
        """Reduces the summands of islands, and scatters the sum where that is wanted."""
        (value, cut), (axes, reduction) = own, over
        scattered = want.axes() - cut.axes()
        same = want.without(scattered).islands() == cut.islands()
        if reduction == "add" and same and scattered == set(axes):
            return IslandValue(
                self.emitter.reduce_scatter(value, want, shape_of(result), axes), want
            )
        return IslandValue(self.emitter.reduce(value, cut, axes, reduction), cut)

    def _write(
        self, operation: Any, cuts: Sequence[IslandSharding], made: Sequence[IslandSharding]
    ) -> list[Value]:
        """Writes an operation on parts of its operands; returns its results."""
        operands = [self.taken(v, cut) for v, cut in zip(operation.operands, cuts, strict=True)]
        if operation.name == "stablehlo.scatter" and cuts:
            operands = self._masked(operation, operands, cuts)
        written = self._copied(operation, operands)
        for result, source, cut in zip(written.results, operation.results, made, strict=True):
            result.set_type(self.local(source, cut))
        self.annotate(written, operation.results, made)
        fix = FIXES.get(operation.name)
        if fix is not None:
            fix(written)
        values = list(written.results)
        self.define_all(operation.results, values, made)
        return values

    def _copied(self, operation: Any, operands: Sequence[Value]) -> Any:
        """Copies an operation with other operands; its regions may use constants around it."""
        written = cloned(operation, ir.InsertionPoint.current)
        for index, operand in enumerate(operands):
            written.operands[index] = operand
        for block in blocks_of(written):
            self._capture(block)
        return written

    def _capture(self, block: Any) -> None:
        for operation in block.operations:
            inner = operation.operation
            for index, operand in enumerate(inner.operands):
                if operand in self.known:
                    whole = IslandSharding.whole(len(shape_of(operand)))
                    with ir.InsertionPoint.at_block_begin(block):
                        inner.operands[index] = self.taken(operand, whole)
            for nested in blocks_of(inner):
                self._capture(nested)

    def _masked(
        self, operation: Any, operands: list[Value], cuts: Sequence[IslandSharding]
    ) -> list[Value]:
        """Gives a scatter whose updates are divided its operand on one island only, else zeros."""
        count = (len(operands) - 1) // 2
        over = {axis for cut in cuts[count:] for axis in cut.axes()}
        over -= {axis for cut in cuts[:count] for axis in cut.axes()}
        if not over:
            return operands
        axes = [axis for axis in self.islands.axes if axis in over]
        first = self.emitter.is_at(axes, 0)
        masked = []
        for value in operands[:count]:
            kind = ir.RankedTensorType(value.type)
            zero = self.emitter.zeros(kind)
            masked.append(
                self.emitter.operation("stablehlo.select", [kind], [first, value, zero]).result
            )
        return [*masked, *operands[count:]]

    # Operations of their own kind

    def _constant(self, operation: Any) -> None:
        """Writes a constant: one that is the same everywhere in the wanted cut, others whole."""
        [wanted] = self.wanted(operation)
        elements: Any = ir.DenseElementsAttr
        attribute = operation.attributes["value"]
        known = elements(attribute) if isinstance(attribute, elements) else None
        [result] = operation.results
        if known is not None and known.is_splat and wanted.axes():
            kind = self.local(result, wanted)
            value = elements.get_splat(kind, known.get_splat_value())
        else:
            kind, value, wanted = result.type, attribute, self.only_inner(wanted)
        inner = wanted.inner(kind.shape)
        made = self.emitter.operation("stablehlo.constant", [kind], [], inner, value=value).result
        self.define_all([result], [made], [wanted])

    def _iota(self, operation: Any) -> None:
        """Writes an iota whole; XLA keeps what an island's part of it reads."""
        made = [self.only_inner(cut) for cut in self.wanted(operation)]
        self._write(operation, [], made)

    def _call(self, operation: Any) -> None:
        name = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
        self._inline(self.functions[name], operation)

    def _composite(self, operation: Any) -> None:
        name = ir.FlatSymbolRefAttr(operation.attributes["decomposition"]).value
        self._inline(self.functions[name], operation)

    def _inline(self, function: Any, operation: Any) -> None:
        block = function.regions[0].blocks[0]
        for argument, operand in zip(block.arguments, operation.operands, strict=True):
            self.known[argument] = self.part(operand)
        before = self.resharded
        self.resharded = {}  # a function that is called twice has other values each time
        self.operations(block)
        self.resharded = before
        returned = terminator_of(block)
        for result, value in zip(operation.results, returned.operands, strict=True):
            self.known[result] = self.part(value)

    def _constraint(self, operation: Any) -> None:
        """Reshards a value as the program says."""
        [operand], [result] = operation.operands, operation.results
        cut = self.cut_of(operation.attributes["sharding"], operand)
        self.known[result] = IslandValue(self.emitter.pinned(self.taken(operand, cut), cut), cut)

    def _resharded(self, operation: Any) -> None:
        """Reshards a value by what Shardy calls a collective, of which it is the same array.

        That also holds for sums that are not reduced yet: operations here reduce theirs at once.
        """
        [operand], [result] = operation.operands, operation.results
        cut = self.cut_of(operation.attributes["out_sharding"], operand)
        self.known[result] = IslandValue(self.emitter.pinned(self.taken(operand, cut), cut), cut)

    def _manual(self, operation: Any) -> None:
        Manual(self, operation).lower()

    def _custom_call(self, operation: Any) -> None:
        if is_client_call(operation) and not self.by_device:
            write_client_call(self, operation)
        else:
            self._general(operation)

    def _collective(self, operation: Any) -> None:
        """Writes a collective of a region for single devices."""
        [operand], [result] = operation.operands, operation.results
        part = self.part(operand)
        if self.crosses(operation):
            value = cross(self.emitter, operation, (part.value, part.cut), 0)
            self.define(result, value, part.cut)
            return
        written = self._copied(operation, [part.value])
        written.attributes[COLLECTIVES[operation.name]] = local_collective(operation, self.islands)
        whole = IslandSharding.whole(len(shape_of(result)))
        self.annotate(written, operation.results, [whole])
        self.define(result, written.results[0], whole)

    def _partition_id(self, operation: Any) -> None:
        """Writes the number of a device in the whole program."""
        [result] = operation.results
        write = self.emitter.operation
        members = np.array(self.islands.members, np.int32)
        table = self.emitter.constant(members.reshape(-1))
        size = self.emitter.constant(np.int32(self.islands.size))
        number = self.number
        if number is None:
            number = self.emitter.ordinal(self.islands.axes)
        kind = number.type
        number = write("stablehlo.multiply", [kind], [number, size]).result
        own = write("stablehlo.partition_id", [result.type], []).result
        own = write("stablehlo.convert", [kind], [own]).result
        number = write("stablehlo.add", [kind], [number, own]).result
        one = ir.RankedTensorType.get([1], ir.RankedTensorType(kind).element_type)
        sizes: Any = ir.DenseI64ArrayAttr
        found = write(
            "stablehlo.dynamic_slice", [one], [table, number], slice_sizes=sizes.get([1])
        ).result
        found = self.emitter.reshaped(found, [])
        found = write("stablehlo.convert", [result.type], [found]).result
        self.known[result] = IslandValue(found, IslandSharding.whole(0))

    def _same(self, operation: Any) -> None:
        for operand, result in zip(operation.operands, operation.results, strict=False):
            self.known[result] = self.part(operand)

    def _drop(self, operation: Any) -> None:
        """Writes nothing: the operation has no results."""


def _shardings(function: Any, name: str, count: int) -> list[Any]:
    """Returns the sharding of each argument or result of a function; None where it has none."""
    if name not in function.attributes:
        return [None] * count
    given = [ir.DictAttr(one) for one in ir.ArrayAttr(function.attributes[name])]
    found = [one["sdy.sharding"] if "sdy.sharding" in one else None for one in given]  # noqa: SIM401
    if any("unreduced=" in str(one) for one in found):
        raise RefusedError(
            "UNIMPLEMENTED: an argument or result of a program over several islands is unreduced "
            "over axes of its mesh; reduce it inside of the program (jax.sharding.reshard)"
        )
    return found


def _fix_slice(written: Any) -> None:
    """Ends a slice where the island's part ends."""
    numbers: Any = ir.DenseI64ArrayAttr
    shape = ir.RankedTensorType(written.results[0].type).shape
    starts = list(numbers(written.attributes["start_indices"]))
    strides = list(numbers(written.attributes["strides"]))
    ends = list(numbers(written.attributes["limit_indices"]))
    whole = ir.RankedTensorType(written.operands[0].type).shape
    ends = [
        extent if start == 0 and stride == 1 and extent == have else end
        for start, stride, extent, have, end in zip(
            starts, strides, shape, whole, ends, strict=True
        )
    ]
    written.attributes["limit_indices"] = numbers.get(ends)


def _fix_dynamic_slice(written: Any) -> None:
    numbers: Any = ir.DenseI64ArrayAttr
    shape = ir.RankedTensorType(written.results[0].type).shape
    written.attributes["slice_sizes"] = numbers.get(list(shape))


def _fix_gather(written: Any) -> None:
    """Makes slices along divided dimensions as long as the island's part."""
    numbers: Any = ir.DenseI64ArrayAttr
    sizes = list(numbers(written.attributes["slice_sizes"]))
    operand = ir.RankedTensorType(written.operands[0].type).shape
    sizes = [min(size, extent) for size, extent in zip(sizes, operand, strict=True)]
    written.attributes["slice_sizes"] = numbers.get(sizes)


FIXES: dict[str, Callable[[Any], None]] = {
    "stablehlo.slice": _fix_slice,
    "stablehlo.dynamic_slice": _fix_dynamic_slice,
    "stablehlo.gather": _fix_gather,
}
"""Corrections of attributes that contain extents."""

SPECIAL: dict[str, Callable[[Localizer, Any], None]] = {
    "sdy.constant": Localizer._constant,
    "stablehlo.constant": Localizer._constant,
    "stablehlo.iota": Localizer._iota,
    "func.call": Localizer._call,
    "stablehlo.composite": Localizer._composite,
    "sdy.sharding_constraint": Localizer._constraint,
    "sdy.reshard": Localizer._constraint,
    **dict.fromkeys(RESHARDS, Localizer._resharded),
    "sdy.manual_computation": Localizer._manual,
    "stablehlo.partition_id": Localizer._partition_id,
    "stablehlo.custom_call": Localizer._custom_call,
    **dict.fromkeys(COLLECTIVES, Localizer._collective),
    "sdy.propagation_barrier": Localizer._same,
    "sdy.sharding_group": Localizer._drop,
    "stablehlo.while": write_while,
    "stablehlo.case": write_case,
    "stablehlo.if": write_case,
}
