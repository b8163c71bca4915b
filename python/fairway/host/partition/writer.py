"""What an island has of a program's values, while its part of the program is written."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from fairway.host.partition.axes import Islands, IslandSharding, MeshView, whole_mesh
from fairway.host.partition.collectives import COLLECTIVES, groups_of
from fairway.host.partition.emitter import Emitter
from fairway.host.partition.operations import SHARDING, blocks_of, per_value, place_of, shape_of

__all__ = ["IslandValue", "Writer"]

CONTROL = ("stablehlo.while", "stablehlo.case", "stablehlo.if")

Value = Any


@dataclasses.dataclass(frozen=True)
class IslandValue:
    """An island's part of a value, and its cut."""

    value: Value
    cut: IslandSharding


class Writer(abc.ABC):
    """Writes an island's part of a program.

    Attributes:
        emitter: writes operations of the island.
        meshes: the program's meshes by name.
        loops: blocks of loops whose bodies cross, by number.
        warnings: operations that could not be divided, with the bytes that cross for them.
        islands: the islands of the program's devices.
        functions: functions of the program, by name.
        known: the island's part of each value of the program.
        resharded: parts of other cuts, with the blocks that they were written into.
        alone: depth of nested operations that every island computes alone.
        by_device: depth of regions for single devices.
        number: the number of the island, inside of a region for single devices that needs it.

    Args:
        module: the program, whose shardings are propagated and whose operations have rules.
        islands: the islands of its devices.
        meshes: its meshes by name.
    """

    def __init__(self, module: Any, islands: Islands, meshes: dict[str, MeshView]) -> None:
        self.emitter = Emitter(islands, whole_mesh(meshes))
        self.loops: list[Any] = []
        self.warnings: dict[str, float] = {}
        self.islands = islands
        self.meshes = meshes
        self.functions = {
            ir.StringAttr(operation.attributes["sym_name"]).value: operation.operation
            for operation in module.body.operations
            if operation.operation.name == "func.func"
        }
        self.known: dict[Value, IslandValue] = {}
        self.resharded: dict[tuple[Value, Any], tuple[Any, Value]] = {}
        self.number: Value | None = None
        self.alone = 0
        self.by_device = 0
        self._cuts: dict[Any, IslandSharding] = {}

    def warn(self, operation: Any, what: str, size: int) -> None:
        """Notes that an operation could not be divided.

        Args:
            operation: the operation.
            what: what is done instead.
            size: bytes that cross islands for it.
        """
        text = f"{operation.name.partition('.')[2]} at {place_of(operation)} {what}"
        self.warnings[text] = self.warnings.get(text, 0.0) + size

    @abc.abstractmethod
    def operation(self, operation: Any) -> None:
        """Writes one operation of the program."""

    def cut_of(self, sharding: Any, value: Value) -> IslandSharding:
        """Returns the cut that a sharding gives a value, where islands can divide it evenly."""
        shape = shape_of(value)
        if sharding is None:
            return IslandSharding.whole(len(shape))
        key = (sharding, tuple(shape), bool(self.alone))
        if key not in self._cuts:
            self._cuts[key] = self._cut_of(sharding, shape)
        return self._cuts[key]

    def _cut_of(self, sharding: Any, shape: list[int]) -> IslandSharding:
        sharding = sdy.TensorShardingAttr(sharding)
        mesh = sharding.mesh_or_ref
        if not isinstance(mesh, ir.FlatSymbolRefAttr):
            return IslandSharding.whole(len(shape))
        view = self.meshes.get(ir.FlatSymbolRefAttr(mesh).value)
        cut = view.cut(sharding).even(shape) if view else IslandSharding.whole(len(shape))
        return cut.without(self.islands.axes) if self.alone else cut

    def wanted(self, operation: Any) -> list[IslandSharding]:
        """Returns the cut that propagation has found for each result."""
        if "sdy.sharding" not in operation.attributes or not len(operation.results):
            return [IslandSharding.whole(len(shape_of(result))) for result in operation.results]
        attribute = operation.attributes["sdy.sharding"]
        if sdy.TensorShardingPerValueAttr.isinstance(attribute):
            shardings = list(sdy.TensorShardingPerValueAttr(attribute).shardings)
        else:
            shardings = [attribute]
        return [self.cut_of(s, r) for s, r in zip(shardings, operation.results, strict=True)]

    def local(self, value: Value, cut: IslandSharding) -> Any:
        """Returns the type of an island's part of a value."""
        if not isinstance(value.type, ir.RankedTensorType):
            return value.type
        kind = ir.RankedTensorType(value.type)
        return ir.RankedTensorType.get(cut.local(kind.shape), kind.element_type)

    def taken(self, value: Value, cut: IslandSharding) -> Value:
        """Returns a value with a cut, resharded if it has another."""
        part = self.part(value)
        if part.cut.islands() == cut.islands():
            return part.value
        cut = cut.with_inner(part.cut)
        key = (value, cut.islands())
        block, found = self.resharded.get(key, (None, None))
        if found is None or block != ir.InsertionPoint.current.block:
            found = self.emitter.reshard(part.value, part.cut, cut, shape_of(value))
            self.resharded[key] = (ir.InsertionPoint.current.block, found)
        return found

    def part(self, value: Value) -> IslandValue:
        """Returns the island's part of a value of the program."""
        return self.known[value]

    def define(self, value: Value, own: Value, cut: IslandSharding) -> None:
        """Sets the island's part of a value of the program."""
        self.known[value] = IslandValue(own, cut)

    def define_all(
        self, results: Sequence[Value], values: Sequence[Value], cuts: Sequence[IslandSharding]
    ) -> None:
        """Sets the island's parts of several values."""
        for result, value, cut in zip(results, values, cuts, strict=True):
            self.define(result, value, cut)

    def only_inner(self, cut: IslandSharding) -> IslandSharding:
        """Returns a cut without the islands: each has the whole."""
        return cut.without(self.islands.axes)

    def annotate(
        self, written: Any, results: Sequence[Value], cuts: Sequence[IslandSharding]
    ) -> None:
        """Gives results their shardings inside the island."""
        for name in ("sdy.sharding", "sdy.sharding_rule"):
            if name in written.attributes:
                del written.attributes[name]
        # XLA drops what a loop only passes on, but not its sharding.
        name = SHARDING if len(written.regions) and written.name in CONTROL else "sdy.sharding"
        mesh = next((cut.mesh for cut in cuts if cut.mesh), None)
        inner = [
            cut.inner(cut.local(shape_of(result)), mesh)
            for result, cut in zip(results, cuts, strict=True)
        ]
        if known := [one for one in inner if one]:
            written.attributes[name] = per_value(known)

    def operations(self, block: Any) -> None:
        """Writes all operations of a block but its terminator."""
        operations = list(block.operations)
        for operation in operations[:-1]:
            self.operation(operation.operation)

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
            blocks = list(blocks_of(operation))
        return any(self.crosses(inner.operation) for block in blocks for inner in block.operations)

    @contextlib.contextmanager
    def inside(self, block: Any, place: int) -> Iterator[None]:
        """Writes what single devices compute.

        Args:
            block: their block.
            place: its argument that is the number of the island, if it has as many.
        """
        before = self.number
        self.number = block.arguments[place] if place < len(block.arguments) else None
        self.by_device += 1
        try:
            with self.everywhere():
                yield
        finally:
            self.by_device -= 1
            self.number = before

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Writes what every island computes alone."""
        self.alone += 1
        try:
            yield
        finally:
            self.alone -= 1

    def restore(self, crossings: int, resharded: dict[Any, Any], loops: int) -> None:
        """Forgets what was written since these were noted."""
        self.emitter.crossings = crossings
        self.resharded = resharded
        del self.loops[loops:]
