"""Writes an island's part of a program, operation by operation.

All calls are inlined, so the result is one block in which some operations are crossings. Loops
without crossings stay loops; one whose body crosses becomes a block of its own that is run as often
as the loop's count says, or, if that is not known, is computed by every island alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from fairway.host.partition.axes import Cut, Islands, MeshView
from fairway.host.partition.emitter import Emitter
from fairway.host.partition.loops import trip_count
from fairway.host.partition.manual import (
    COLLECTIVES,
    Manual,
    cross,
    groups_of,
    local_collective,
)
from fairway.host.partition.rules import Factors, choose, read_rule, reduction_of
from fairway.host.screening import RefusedError

__all__ = ["LOOP", "SHARDING", "Localizer", "Part"]

LOOP = "fairway.loop"
"""Target of a call that stands for a loop whose body crosses."""
SHARDING = "fairway.sharding"
"""Shardings of the results of an operation with regions, which XLA is not given."""
CONTROL = ("stablehlo.while", "stablehlo.case", "stablehlo.if")
ITERATIONS_MAX = 512
"""Most iterations of a loop whose body crosses; longer ones are computed by every island alone."""

Value = Any


@dataclasses.dataclass(frozen=True)
class Part:
    """An island's part of a value, and its cut."""

    value: Value
    cut: Cut


class Localizer:
    """Writes an island's part of a program.

    Attributes:
        loops: blocks of loops whose bodies cross, by number.
        warnings: what could not be divided.
        islands: the islands of the program's devices.
        functions: functions of the program, by name.

    Args:
        module: the program, whose shardings are propagated and whose operations have rules.
        islands: the islands of its devices.
        meshes: its meshes by name.
    """

    def __init__(self, module: Any, islands: Islands, meshes: dict[str, MeshView]) -> None:
        whole = [view.name for view in meshes.values() if view.is_whole]
        self.emitter = Emitter(islands, whole[0] if whole else None)
        self.loops: list[Any] = []
        self.warnings: list[str] = []
        self.islands = islands
        self._meshes = meshes
        self.functions = {
            ir.StringAttr(operation.attributes["sym_name"]).value: operation.operation
            for operation in module.body.operations
            if operation.operation.name == "func.func"
        }
        self._known: dict[Value, Part] = {}
        self._resharded: dict[tuple[Value, Any], tuple[Any, Value]] = {}
        self._ordinal: Value | None = None
        self._alone = 0
        """Depth of nested operations that every island computes alone."""

    def main(self, block: Any) -> tuple[list[Cut], list[Cut]]:
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
            own = block.add_argument(self._local(argument, cut), ir.Location.unknown())
            self._known[argument] = Part(own, cut)
            self.emitter.arguments[own] = self.emitter.inner(cut, list(own.type.shape))
        returned = source.operations[len(source.operations) - 1]
        made = [
            self.cut_of(attribute, operand)
            for attribute, operand in zip(
                _shardings(main, "res_attrs", len(returned.operands)), returned.operands, strict=True
            )
        ]
        with ir.InsertionPoint(block):
            self._operations(source)
            values = [self.taken(v, cut) for v, cut in zip(returned.operands, made, strict=True)]
            known = dict(zip(block.arguments, given, strict=True))
            for index, (value, cut) in enumerate(zip(values, made, strict=True)):
                is_known = self.emitter.is_pinned(value, cut) and _target(value.owner) != LOOP
                if known.setdefault(value, cut) != cut or not is_known:
                    values[index] = self.emitter.pinned(value, cut)
            self.emitter.operation("func.return", [], values)
        return given, made

    # Values

    def cut_of(self, sharding: Any, value: Value) -> Cut:
        """Returns the cut that a sharding gives a value, where islands can divide it evenly."""
        shape = _shape(value)
        if sharding is None:
            return Cut.whole(len(shape))
        sharding = sdy.TensorShardingAttr(sharding)
        mesh = sharding.mesh_or_ref
        if not isinstance(mesh, ir.FlatSymbolRefAttr):
            return Cut.whole(len(shape))
        view = self._meshes.get(ir.FlatSymbolRefAttr(mesh).value)
        cut = view.cut(sharding).even(shape) if view else Cut.whole(len(shape))
        return cut.without(self.islands.axes) if self._alone else cut

    def _wanted(self, operation: Any) -> list[Cut]:
        """Returns the cut that propagation has found for each result."""
        if "sdy.sharding" not in operation.attributes:
            return [Cut.whole(len(_shape(result))) for result in operation.results]
        attribute = operation.attributes["sdy.sharding"]
        if sdy.TensorShardingPerValueAttr.isinstance(attribute):
            shardings = list(sdy.TensorShardingPerValueAttr(attribute).shardings)
        else:
            shardings = [attribute]
        return [self.cut_of(s, r) for s, r in zip(shardings, operation.results, strict=True)]

    def _local(self, value: Value, cut: Cut) -> Any:
        """Returns the type of an island's part of a value."""
        if not isinstance(value.type, ir.RankedTensorType):
            return value.type
        kind = ir.RankedTensorType(value.type)
        return ir.RankedTensorType.get(cut.local(kind.shape), kind.element_type)

    def taken(self, value: Value, cut: Cut) -> Value:
        """Returns a value with a cut, resharded if it has another."""
        part = self.part(value)
        if part.cut.islands() == cut.islands():
            return part.value
        cut = cut.with_inner(part.cut)
        key = (value, cut.islands())
        block, found = self._resharded.get(key, (None, None))
        if found is None or block != ir.InsertionPoint.current.block:
            found = self.emitter.reshard(part.value, part.cut, cut, _shape(value))
            self._resharded[key] = (ir.InsertionPoint.current.block, found)
        return found

    def part(self, value: Value) -> Part:
        """Returns the island's part of a value of the program."""
        return self._known[value]

    def define(self, value: Value, own: Value, cut: Cut) -> None:
        """Sets the island's part of a value of the program."""
        self._known[value] = Part(own, cut)

    def _define(self, results: Sequence[Value], values: Sequence[Value], cuts: Sequence[Cut]) -> None:
        for result, value, cut in zip(results, values, cuts, strict=True):
            self._known[result] = Part(value, cut)

    # Operations

    def _operations(self, block: Any) -> None:
        """Writes all operations of a block but its terminator."""
        operations = list(block.operations)
        for operation in operations[:-1]:
            self.operation(operation.operation)

    def operation(self, operation: Any) -> None:
        """Writes one operation of the program."""
        special = SPECIAL.get(operation.name)
        if special is not None:
            special(self, operation)
            return
        factors = read_rule(operation)
        if factors is None:
            self._undivided(operation)
        else:
            self._divided(operation, factors)

    def _undivided(self, operation: Any) -> None:
        """Writes an operation that every island computes whole."""
        cuts = [Cut.whole(len(_shape(operand))) for operand in operation.operands]
        made = [self._only_inner(cut) for cut in self._wanted(operation)]
        self._write(operation, cuts, made)

    def _only_inner(self, cut: Cut) -> Cut:
        return cut.without(self.islands.axes)

    def _divided(self, operation: Any, factors: Factors) -> None:
        """Writes an operation of which every island computes a part."""
        given = [self.part(operand).cut for operand in operation.operands]
        wanted = self._wanted(operation)
        strategy = choose(operation, factors, given, wanted)
        for value, cut in zip(
            (*operation.operands, *operation.results),
            (*strategy.operands, *strategy.results),
            strict=True,
        ):
            if cut.even(_shape(value)).islands() != cut.islands():
                self._undivided(operation)
                return
        cuts = [cut.with_inner(one) for cut, one in zip(strategy.results, wanted, strict=True)]
        made = self._write(operation, strategy.operands, cuts)
        if not strategy.partial:
            return
        reduction = reduction_of(operation)
        assert reduction is not None
        for result, value, cut, want in zip(operation.results, made, cuts, wanted, strict=True):
            self._known[result] = self._reduced(result, (value, cut), want, (strategy.partial, reduction))

    def _reduced(
        self, result: Value, own: tuple[Value, Cut], want: Cut, over: tuple[Any, str]
    ) -> Part:
        """Reduces the summands of islands, and scatters the sum where that is wanted."""
        (value, cut), (axes, reduction) = own, over
        scattered = want.axes() - cut.axes()
        same = want.without(scattered).islands() == cut.islands()
        if reduction == "add" and same and scattered == set(axes):
            return Part(self.emitter.reduce_scatter(value, want, _shape(result), axes), want)
        return Part(self.emitter.reduce(value, cut, axes, reduction), cut)

    def _write(self, operation: Any, cuts: Sequence[Cut], made: Sequence[Cut]) -> list[Value]:
        """Writes an operation on parts of its operands; returns its results."""
        operands = [self.taken(v, cut) for v, cut in zip(operation.operands, cuts, strict=True)]
        if operation.name == "stablehlo.scatter" and cuts:
            operands = self._masked(operation, operands, cuts)
        written = self._copied(operation, operands)
        for result, source, cut in zip(written.results, operation.results, made, strict=True):
            result.set_type(self._local(source, cut))
        self._annotate(written, operation.results, made)
        fix = FIXES.get(operation.name)
        if fix is not None:
            fix(written)
        values = list(written.results)
        self._define(operation.results, values, made)
        return values

    def _annotate(self, written: Any, results: Sequence[Value], cuts: Sequence[Cut]) -> None:
        """Gives results their shardings inside the island."""
        for name in ("sdy.sharding", "sdy.sharding_rule"):
            if name in written.attributes:
                del written.attributes[name]
        # XLA drops what a loop only passes on, but not its sharding.
        name = SHARDING if len(written.regions) and written.name in CONTROL else "sdy.sharding"
        inner = [
            cut.inner(cut.local(_shape(result)))
            for result, cut in zip(results, cuts, strict=True)
        ]
        if any(inner):
            mesh = next(cut.mesh for cut in cuts if cut.mesh)
            listed = [
                one[13:] if one else f"<@{mesh}, [{', '.join('{}' for _ in cut.dims)}]>"
                for one, cut in zip(inner, cuts, strict=True)
            ]
            text = f"#sdy.sharding_per_value<[{', '.join(listed)}]>"
            written.attributes[name] = ir.Attribute.parse(text)

    def _copied(self, operation: Any, operands: Sequence[Value]) -> Any:
        """Copies an operation with other operands; its regions may use constants around it."""
        written = operation.clone(ip=ir.InsertionPoint.current)
        written = getattr(written, "operation", written)
        for index, operand in enumerate(operands):
            written.operands[index] = operand
        for region in written.regions:
            for block in region.blocks:
                self._capture(block)
        return written

    def _capture(self, block: Any) -> None:
        for operation in block.operations:
            inner = operation.operation
            for index, operand in enumerate(inner.operands):
                if operand in self._known:
                    whole = Cut.whole(len(_shape(operand)))
                    with ir.InsertionPoint.at_block_begin(block):
                        inner.operands[index] = self.taken(operand, whole)
            for region in inner.regions:
                for nested in region.blocks:
                    self._capture(nested)

    def _masked(
        self, operation: Any, operands: list[Value], cuts: Sequence[Cut]
    ) -> list[Value]:
        """Gives a scatter whose updates are divided its operand on one island only, else zeros."""
        count = (len(operands) - 1) // 2
        over = {axis for cut in cuts[count:] for axis in cut.axes()}
        over -= {axis for cut in cuts[:count] for axis in cut.axes()}
        if not over:
            return operands
        axes = [axis for axis in self.islands.axes if axis in over]
        masked = []
        for value in operands[:count]:
            kind = ir.RankedTensorType(value.type)
            zero = self._zeros(kind)
            bit = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))
            direction: Any = ir.Attribute.parse("#stablehlo<comparison_direction EQ>")
            first = self.emitter.operation(
                "stablehlo.compare",
                [bit],
                [self.emitter.ordinal(axes), self.emitter.constant(np.int32(0))],
                comparison_direction=direction,
            ).result
            masked.append(
                self.emitter.operation("stablehlo.select", [kind], [first, value, zero]).result
            )
        return [*masked, *operands[count:]]

    def _zeros(self, kind: Any) -> Value:
        element = kind.element_type
        zero = (
            ir.FloatAttr.get(element, 0.0)
            if isinstance(element, ir.FloatType)
            else ir.IntegerAttr.get(element, 0)
        )
        elements: Any = ir.DenseElementsAttr
        value = elements.get_splat(kind, zero)
        return self.emitter.operation("stablehlo.constant", [kind], [], value=value).result

    # Operations of their own kind

    def _constant(self, operation: Any) -> None:
        """Writes a constant: one that is the same everywhere in the wanted cut, others whole."""
        [wanted] = self._wanted(operation)
        elements: Any = ir.DenseElementsAttr
        attribute = operation.attributes["value"]
        known = elements(attribute) if isinstance(attribute, elements) else None
        [result] = operation.results
        if known is not None and known.is_splat and wanted.axes():
            kind = self._local(result, wanted)
            value = elements.get_splat(kind, known.get_splat_value())
        else:
            kind, value, wanted = result.type, attribute, self._only_inner(wanted)
        inner = wanted.inner(kind.shape)
        made = self.emitter.operation("stablehlo.constant", [kind], [], inner, value=value).result
        self._define([result], [made], [wanted])

    def _iota(self, operation: Any) -> None:
        """Writes an iota whole; XLA keeps what an island's part of it reads."""
        made = [self._only_inner(cut) for cut in self._wanted(operation)]
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
            self._known[argument] = self.part(operand)
        before = dict(self._resharded)
        self._resharded = {}  # a function that is called twice has other values each time
        self._operations(block)
        self._resharded = before
        returned = block.operations[len(block.operations) - 1]
        for result, value in zip(operation.results, returned.operands, strict=True):
            self._known[result] = self.part(value)

    def _constraint(self, operation: Any) -> None:
        """Reshards a value as the program says."""
        [operand], [result] = operation.operands, operation.results
        cut = self.cut_of(operation.attributes["sharding"], operand)
        self._known[result] = Part(self.emitter.pinned(self.taken(operand, cut), cut), cut)

    def _manual(self, operation: Any) -> None:
        Manual(self, operation, self._meshes).lower()

    def crosses(self, operation: Any) -> bool:
        """Returns whether an operation has a collective between islands, also in its regions."""
        if operation.name in COLLECTIVES:
            return any(
                self.islands.of[device] != self.islands.of[group[0]]
                for group in groups_of(operation)
                for device in group
            )
        if operation.name == "func.call":
            name = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
            blocks = [self.functions[name].regions[0].blocks[0]]
        else:
            blocks = [block for region in operation.regions for block in region.blocks]
        return any(self.crosses(inner.operation) for block in blocks for inner in block.operations)

    @contextlib.contextmanager
    def inside(self, block: Any, place: int) -> Iterator[None]:
        """Writes what single devices compute.

        Args:
            block: their block.
            place: its argument that is the number of the island, if it has as many.
        """
        before = self._ordinal
        self._ordinal = block.arguments[place] if place < len(block.arguments) else None
        self._alone += 1
        try:
            yield
        finally:
            self._alone -= 1
            self._ordinal = before

    def _collective(self, operation: Any) -> None:
        """Writes a collective of a region for single devices."""
        if self.crosses(operation):
            [operand], [result] = operation.operands, operation.results
            part = self.part(operand)
            value = cross(self, operation, (part.value, part.cut), 0)
            self._known[result] = Part(value, part.cut)
            return
        table = local_collective(operation, self.islands)
        [operand], [result] = operation.operands, operation.results
        part = self.part(operand)
        written = self._copied(operation, [part.value])
        written.attributes[COLLECTIVES[operation.name]] = table
        self._annotate(written, operation.results, [Cut.whole(len(_shape(result)))])
        self._known[result] = Part(written.results[0], Cut.whole(len(_shape(result))))

    def _partition_id(self, operation: Any) -> None:
        """Writes the number of a device in the whole program."""
        [result] = operation.results
        write = self.emitter.operation
        members = np.array(self.islands.members, np.int32)
        table = self.emitter.constant(members.reshape(-1))
        size = self.emitter.constant(np.int32(self.islands.size))
        number = self._ordinal
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
        self._known[result] = Part(found, Cut.whole(0))

    def _same(self, operation: Any) -> None:
        for operand, result in zip(operation.operands, operation.results, strict=False):
            self._known[result] = self.part(operand)

    def _drop(self, operation: Any) -> None:
        """Writes nothing: the operation has no results."""

    def _while(self, operation: Any) -> None:
        cuts = self._wanted(operation)
        operands = [self.taken(v, cut) for v, cut in zip(operation.operands, cuts, strict=True)]
        attempt = self._attempt()
        written = self._loop(operation, operands, cuts)
        if not attempt.crosses:
            return
        count = None if self._alone else trip_count(operation, self.functions)
        attempt.undo(written)
        if count is not None and count <= ITERATIONS_MAX:
            self._launched(operation, (operands, cuts), count)
        else:
            self._by_every_island(operation, self._while)

    def _loop(self, operation: Any, operands: list[Value], cuts: list[Cut]) -> Any:
        """Writes a loop, whose regions may turn out to cross."""
        kinds = [self._local(result, cut) for result, cut in zip(operation.results, cuts, strict=True)]
        written = ir.Operation.create(
            "stablehlo.while", results=kinds, operands=operands, regions=2
        )
        for region, source in zip(written.regions, operation.regions, strict=True):
            self._region(region, source, (kinds, cuts))
        self._annotate(written, operation.results, cuts)
        self._define(operation.results, list(written.results), cuts)
        return written

    def _region(self, region: Any, source: Any, carried: tuple[list[Any], list[Cut]]) -> None:
        """Writes a region whose arguments and, in a body, results have given types and cuts."""
        kinds, cuts = carried
        block = source.blocks[0]
        made = region.blocks.append(*kinds, arg_locs=[ir.Location.unknown()] * len(kinds))
        self._body(block, made, cuts)

    def _body(self, source: Any, made: Any, cuts: list[Cut]) -> None:
        for argument, own, cut in zip(source.arguments, made.arguments, cuts, strict=True):
            self._known[argument] = Part(own, cut)
        with ir.InsertionPoint(made):
            self._operations(source)
            returned = source.operations[len(source.operations) - 1]
            wholes = [Cut.whole(len(_shape(operand))) for operand in returned.operands]
            kept = cuts if len(returned.operands) == len(cuts) and cuts else wholes
            if _is_condition(returned):
                kept = wholes
            values = [self.taken(v, cut) for v, cut in zip(returned.operands, kept, strict=True)]
            self.emitter.operation("stablehlo.return", [], values)

    def _launched(
        self, operation: Any, carried: tuple[list[Value], list[Cut]], count: int
    ) -> None:
        """Writes a loop whose body is launched again and again."""
        body = operation.regions[1].blocks[0]

        def write(block: Any) -> list[Value]:
            for argument, own, cut in zip(body.arguments, block.arguments, carried[1], strict=True):
                self._known[argument] = Part(own, cut)
            self._operations(body)
            returned = body.operations[len(body.operations) - 1]
            return [
                self.taken(v, cut) for v, cut in zip(returned.operands, carried[1], strict=True)
            ]

        results = self.launched(carried, count, write)
        self._define(operation.results, results, carried[1])

    def launched(
        self,
        carried: tuple[list[Value], list[Cut]],
        count: int,
        write: Callable[[Any], list[Value]],
    ) -> list[Value]:
        """Writes a loop whose body is launched again and again; returns its results.

        Args:
            carried: initial values, and their cuts.
            count: how often it runs.
            write: writes the body into a block and returns what it carries on.
        """
        operands, cuts = carried
        operands = [self.emitter.pinned(v, cut) for v, cut in zip(operands, cuts, strict=True)]
        kinds = [value.type for value in operands]
        holder = ir.Module.create()
        with ir.InsertionPoint(holder.body):
            function = ir.Operation.create("func.func", regions=1, attributes=_function(kinds))
        body = function.regions[0].blocks.append(
            *kinds, arg_locs=[ir.Location.unknown()] * len(kinds)
        )
        number = len(self.loops)
        self.loops.append(holder)
        with ir.InsertionPoint(body):
            made = [self.emitter.pinned(v, cut) for v, cut in zip(write(body), cuts, strict=True)]
            self.emitter.operation("func.return", [], made)
        integer = ir.IntegerType.get_signless(64)
        self.emitter.crossings += 1
        written = self.emitter.operation(
            "stablehlo.custom_call",
            kinds,
            operands,
            call_target_name=ir.StringAttr.get(LOOP),
            fairway__loop=ir.IntegerAttr.get(integer, number),
            fairway__count=ir.IntegerAttr.get(integer, count),
        )
        inner = [
            self.emitter.inner(cut, list(kind.shape)) for kind, cut in zip(kinds, cuts, strict=True)
        ]
        if all(inner) and inner:
            text = ", ".join(str(one)[13:] for one in inner)
            written.attributes["sdy.sharding"] = ir.Attribute.parse(
                f"#sdy.sharding_per_value<[{text}]>"
            )
        return list(written.results)

    def _case(self, operation: Any) -> None:
        cuts = self._wanted(operation)
        index = self.taken(operation.operands[0], Cut.whole(0))
        attempt = self._attempt()
        kinds = [self._local(result, cut) for result, cut in zip(operation.results, cuts, strict=True)]
        written = ir.Operation.create(
            operation.name, results=kinds, operands=[index], regions=len(operation.regions)
        )
        for region, source in zip(written.regions, operation.regions, strict=True):
            block = region.blocks.append()
            self._branch(source.blocks[0], block, cuts)
        self._annotate(written, operation.results, cuts)
        self._define(operation.results, list(written.results), cuts)
        if attempt.crosses:
            attempt.undo(written)
            self._by_every_island(operation, self._case)

    def _branch(self, source: Any, block: Any, cuts: list[Cut]) -> None:
        with ir.InsertionPoint(block):
            self._operations(source)
            returned = source.operations[len(source.operations) - 1]
            values = [self.taken(v, cut) for v, cut in zip(returned.operands, cuts, strict=True)]
            self.emitter.operation("stablehlo.return", [], values)

    def _by_every_island(self, operation: Any, write: Callable[[Any], None]) -> None:
        """Writes an operation with regions that every island computes whole."""
        if self._alone:
            raise RefusedError(
                f"UNIMPLEMENTED: {operation.name} at {operation.location} communicates between "
                "islands although all of its values are on every island"
            )
        outer = dict(self._known)
        for value in _captured(operation):
            whole = self._only_inner(self.part(value).cut)
            self._known[value] = Part(self.taken(value, whole), whole)
        with self._everywhere():
            write(operation)
        made = {result: self._known[result] for result in operation.results}
        self._known = outer | made
        self.warnings.append(
            f"{operation.name} at {operation.location} is computed by every island: what it "
            "communicates in its regions cannot be cut out of it"
        )

    def _attempt(self) -> _Attempt:
        return _Attempt(self, self.emitter.crossings, dict(self._resharded), len(self.loops))

    def restore(self, crossings: int, resharded: dict[Any, Any], loops: int) -> None:
        """Forgets what was written since these were noted."""
        self.emitter.crossings = crossings
        self._resharded = resharded
        del self.loops[loops:]

    @contextlib.contextmanager
    def _everywhere(self) -> Iterator[None]:
        self._alone += 1
        try:
            yield
        finally:
            self._alone -= 1


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """An operation with regions that is written to see whether they cross."""

    localizer: Localizer
    crossings: int
    resharded: dict[Any, Any]
    loops: int

    @property
    def crosses(self) -> bool:
        """Whether anything crosses since the attempt began."""
        return self.localizer.emitter.crossings != self.crossings

    def undo(self, written: Any) -> None:
        """Erases the operation."""
        written.erase()
        self.localizer.restore(self.crossings, self.resharded, self.loops)


def _target(owner: Any) -> str:
    """Returns the target of the custom call that makes a value; empty if it is made otherwise."""
    attributes = {} if isinstance(owner, ir.Block) else getattr(owner, "operation", owner).attributes
    if "call_target_name" not in attributes:
        return ""
    return str(ir.StringAttr(attributes["call_target_name"]).value)


def _is_condition(returned: Any) -> bool:
    """Returns whether a terminator returns a loop's condition."""
    parent = returned.operation.parent
    region = parent.regions[0].blocks[0].operations if parent.name == "stablehlo.while" else []
    return bool(region) and region[len(region) - 1].operation == returned.operation


def _captured(operation: Any) -> list[Value]:
    """Returns the values that an operation reads, also in its regions, from outside of it."""
    inside: set[Value] = set()
    found: dict[Value, None] = {}

    def visit(one: Any) -> None:
        for operand in one.operands:
            if operand not in inside:
                found[operand] = None
        inside.update(one.results)
        for region in one.regions:
            for block in region.blocks:
                inside.update(block.arguments)
                for inner in block.operations:
                    visit(inner.operation)

    visit(operation)
    return list(found)


def _function(kinds: Sequence[Any]) -> dict[str, Any]:
    kind = ir.FunctionType.get(list(kinds), list(kinds))
    return {
        "sym_name": ir.StringAttr.get("body"),
        "function_type": ir.TypeAttr.get(kind),
    }


def _shape(value: Value) -> list[int]:
    if not isinstance(value.type, ir.RankedTensorType):
        return []
    return list(ir.RankedTensorType(value.type).shape)


def _shardings(function: Any, name: str, count: int) -> list[Any]:
    """Returns the sharding of each argument or result of a function; None where it has none."""
    if name not in function.attributes:
        return [None] * count
    given = [ir.DictAttr(one) for one in ir.ArrayAttr(function.attributes[name])]
    return [one["sdy.sharding"] if "sdy.sharding" in one else None for one in given]


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
    "sdy.manual_computation": Localizer._manual,
    "stablehlo.partition_id": Localizer._partition_id,
    **dict.fromkeys(COLLECTIVES, Localizer._collective),
    "sdy.propagation_barrier": Localizer._same,
    "sdy.sharding_group": Localizer._drop,
    "stablehlo.while": Localizer._while,
    "stablehlo.case": Localizer._case,
    "stablehlo.if": Localizer._case,
}
