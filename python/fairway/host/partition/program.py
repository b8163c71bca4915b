"""Puts a program together: its pieces as the controller reads them, and their code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from fairway.host.backend import Backend
from fairway.host.elements import dtype_of
from fairway.host.ifrt_ir import quoted
from fairway.host.partition.axes import Islands, IslandSharding, MeshView, Token, whole_mesh
from fairway.host.partition.operations import (
    ISLAND,
    SHARDING,
    blocks_of,
    cloned,
    maker_of,
    rename,
    shape_of,
    target_of,
    terminator_of,
)
from fairway.host.partition.pieces import (
    Computation,
    CrossingBundle,
    Loop,
    Piece,
    Value,
    cut,
)
from fairway.host.programs import ELEMENT_TYPES
from fairway.host.screening import is_client_call
from fairway.plugin.calls import ATTRIBUTE

__all__ = ["Assembler", "Crossing", "FunctionPart", "Partitioned"]


class Crossing(msgspec.Struct, frozen=True):
    """A collective between islands, of the shards of one or several values.

    Attributes:
        kind: ``reduce``; ``gather``, which stacks; ``all_to_all`` or ``scatter`` along the first
            dimension; or ``permute``, whose groups are pairs of source and target.
        reduction: how ``reduce`` and ``scatter`` reduce.
        groups: devices that communicate.
        contents: equal numbers for devices of equal shards.
        dtype: element type.
        shapes: for each value, the shape of each device's shard.
    """

    kind: str
    reduction: str
    groups: list[list[int]]
    contents: list[int]
    dtype: str
    shapes: list[list[int]]

    def island_bytes(self, members: Sequence[int]) -> float:
        """Returns the bytes of the different shards of an island with these devices."""
        differing = len({self.contents[device] for device in members})
        elements = sum(math.prod(shape) for shape in self.shapes)
        return float(differing * elements * dtype_of(self.dtype).itemsize)


class FunctionPart(msgspec.Struct, frozen=True):
    """One function of a partitioned program.

    Attributes:
        is_exchange: whether it is a :class:`Crossing` as MessagePack, not StableHLO.
        uses_island: whether its first parameter is the number of the island.
        code: its code.
    """

    is_exchange: bool
    uses_island: bool
    code: bytes


class Partitioned(msgspec.Struct, frozen=True):
    """A program over several islands, in pieces.

    Attributes:
        text: the program, as the controller reads it.
        functions: code of its functions, in order.
        members: for each island, the program's devices in the order of its computations.
        costs: bytes that cross islands in a run, and for operations that could not be divided.
    """

    text: str
    functions: list[FunctionPart]
    members: list[list[int]]
    costs: list[tuple[str, float]]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the shards of a value lie on devices.

    Attributes:
        element: element type.
        shape: shape of the whole.
        cut: how it is cut.
    """

    element: str
    shape: tuple[int, ...]
    cut: IslandSharding


class Assembler:
    """Assembles a program.

    Args:
        name: its name.
        islands: the islands of its devices.
        meshes: its meshes by name.
        bodies: entry blocks of loops whose bodies cross.
    """

    def __init__(
        self, name: str, islands: Islands, meshes: dict[str, MeshView], bodies: Sequence[Any]
    ) -> None:
        self._name = name
        self._islands = islands
        self._meshes = meshes
        self._bodies = bodies
        self._cut_bodies: dict[int, list[Piece]] = {}
        self._functions: dict[Any, str] = {}
        self.parts: list[FunctionPart] = []
        self._lines: list[str] = []
        self._values = 0
        self._arguments: dict[Value, IslandSharding] = {}
        self._results: dict[Value, IslandSharding] = {}
        self._bytes: dict[str, float] = {}
        self.client_functions: list[int] = []
        """The client's numbers of the functions that the program calls, by their index in it."""
        self.crossed_bytes = 0.0
        """Bytes of which an island gives or takes a part in a run."""

    def assemble(
        self, block: Any, given: list[IslandSharding], made: list[IslandSharding], donated: set[int]
    ) -> str:
        """Returns the text of the program.

        Args:
            block: the island's part of its entry function.
            given: cuts of its arguments.
            made: cuts of its results.
            donated: arguments that it donates.
        """
        numbers: dict[Value, int] = {}
        inputs = []
        for index, (argument, one) in enumerate(zip(block.arguments, given, strict=True)):
            self._arguments[argument] = one
            numbers[argument] = index
            text = self._type(self._whole(argument, one))
            inputs.append(f"input %{index}: {text}{' donated' if index in donated else ''}")
        self._values = len(inputs)
        returned = terminator_of(block)
        for value, one in zip(returned.operands, made, strict=True):
            self._results.setdefault(value, one)
        self._pieces(cut(block), numbers)
        functions = [f"function {quoted(name)}" for name in self._functions.values()]
        results = ", ".join(f"%{numbers[value]}" for value in returned.operands)
        lines = [f"program {quoted(self._name)}", *functions, *inputs, *self._lines]
        return "\n".join([*lines, f"return ({results})"]) + "\n"

    def _pieces(self, pieces: Sequence[Piece], numbers: dict[Value, int]) -> None:
        for piece in pieces:
            if isinstance(piece, Loop):
                self._loop(piece, numbers)
                continue
            name = self._function(piece)
            self.crossed_bytes += self._bytes.get(name, 0.0)
            made = []
            for result in piece.results:
                numbers[result] = self._values
                self._values += 1
                made.append(f"%{numbers[result]}: {self._type(self._layout(result))}")
            given = ", ".join(f"%{numbers[operand]}" for operand in piece.operands)
            self._lines.append(f"node {', '.join(made)} = call {quoted(name)} ({given})")

    def _loop(self, loop: Loop, numbers: dict[Value, int]) -> None:
        """Writes the nodes of all iterations of a loop."""
        function = self._bodies[loop.number].body.operations[0].operation
        block = function.regions[0].blocks[0]
        if loop.number not in self._cut_bodies:
            self._cut_bodies[loop.number] = cut(block)
        returned = terminator_of(block)
        carried = [numbers[operand] for operand in loop.operation.operands]
        for value, result in zip(block.arguments, loop.operation.results, strict=True):
            self._arguments.setdefault(value, self._layout(result).cut)
        for _ in range(loop.count):
            inner = dict(zip(block.arguments, carried, strict=True))
            self._pieces(self._cut_bodies[loop.number], inner)
            carried = [inner[value] for value in returned.operands]
        numbers.update(zip(loop.operation.results, carried, strict=True))

    # Values

    def _whole(self, value: Value, one: IslandSharding) -> _Layout:
        """Returns the layout of a value that clients see: of the whole array."""
        kind = ir.RankedTensorType(value.type)
        shape = tuple(
            extent * math.prod(token.size for token in dimension if token.island)
            for extent, dimension in zip(kind.shape, one.dims, strict=True)
        )
        return _Layout(ELEMENT_TYPES[str(kind.element_type)], shape, one)

    def _layout(self, value: Value) -> _Layout:
        """Returns the layout of a value; of an island's part, if clients do not see it."""
        if value in self._results:
            return self._whole(value, self._results[value])
        kind = ir.RankedTensorType(value.type)
        return _Layout(ELEMENT_TYPES[str(kind.element_type)], tuple(kind.shape), self._inner(value))

    def _inner(self, value: Value) -> IslandSharding:
        """Returns how a value is cut inside an island."""
        shape = list(ir.RankedTensorType(value.type).shape)
        found = self._arguments.get(value, self._results.get(value))
        if found is None:
            found = self._annotated(value)
        dims = []
        for extent, dimension in zip(shape, found.dims, strict=True):
            tokens = tuple(token for token in dimension if token.axis)
            is_even = extent % math.prod(token.size for token in tokens) == 0
            dims.append(tokens if is_even else ())
        return IslandSharding(tuple(dims), found.mesh)

    def _annotated(self, value: Value) -> IslandSharding:
        rank = len(ir.RankedTensorType(value.type).shape)
        maker = maker_of(value)
        attributes = {} if maker is None else maker.attributes
        names = ("sharding", "out_shardings", "sdy.sharding", SHARDING)
        sharding = next((attributes[name] for name in names if name in attributes), None)
        if sharding is None:
            return IslandSharding.whole(rank)
        if sdy.TensorShardingPerValueAttr.isinstance(sharding):
            given = sdy.TensorShardingPerValueAttr(sharding).shardings
            sharding = given[list(maker.results).index(value)]
        sharding = sdy.TensorShardingAttr(sharding)
        name = ir.FlatSymbolRefAttr(sharding.mesh_or_ref).value
        return self._meshes[name].inner_cut(sharding)

    def _type(self, layout: _Layout) -> str:
        """Returns a value's type in the syntax of the program's text."""
        shape = ",".join(map(str, layout.shape))
        words = [f"{layout.element}[{shape}]"]
        counts = [math.prod(token.size for token in dimension) for dimension in layout.cut.dims]
        if any(count > 1 for count in counts):
            tiles = ",".join(map(str, self._tiles(layout.cut)))
            words.append(f"tiled {'x'.join(map(str, counts))} by [{tiles}]")
        devices = ",".join(map(str, range(len(self._islands.of))))
        return " ".join([*words, f"on [{devices}]"])

    def _tiles(self, one: IslandSharding) -> list[int]:
        """Returns the tile of each device."""
        tiles = [0] * len(self._islands.of)
        for island, members in enumerate(self._islands.members):
            for place, device in enumerate(members):
                tile = 0
                for token in (token for dimension in one.dims for token in dimension):
                    tile = tile * token.size + self._coordinate(one, token, (island, place))
                tiles[device] = tile
        return tiles

    def _coordinate(self, one: IslandSharding, token: Token, at: tuple[int, int]) -> int:
        island, place = at
        if token.island:
            return self._islands.coordinate(token.island, island)
        if token.axis is None or one.mesh is None:
            return 0
        return self._meshes[one.mesh].coordinate(token, place)

    # Functions

    def _function(self, piece: Computation | CrossingBundle) -> str:
        """Returns the name of a piece's function, which is made when it is first needed."""
        if piece not in self._functions:
            name = f"{self._name}.{len(self._functions)}"
            self._functions[piece] = name
            if isinstance(piece, CrossingBundle):
                crossing = self._crossing(piece)
                self._bytes[name] = crossing.island_bytes(self._islands.members[0])
                code = msgspec.msgpack.encode(crossing)
                self.parts.append(FunctionPart(True, False, code))
            else:
                self.parts.append(self._computation(piece, name))
        return self._functions[piece]

    def _crossing(self, exchange: CrossingBundle) -> Crossing:
        attributes = exchange.operations[0].attributes
        shapes: list[list[int]] = []
        contents = [0] * len(self._islands.of)
        for operand in exchange.operands:
            inner = self._inner(operand)
            kind = ir.RankedTensorType(operand.type)
            shapes.append(
                [
                    extent // math.prod(token.size for token in dimension)
                    for extent, dimension in zip(kind.shape, inner.dims, strict=True)
                ]
            )
            pairs = [*zip(contents, self._tiles(inner), self._islands.of, strict=True)]
            seen = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
            contents = [seen[pair] for pair in pairs]
        return Crossing(
            ir.StringAttr(attributes["fairway.kind"]).value,
            ir.StringAttr(attributes["fairway.reduction"]).value,
            self._communicating(attributes),
            contents,
            ELEMENT_TYPES[str(kind.element_type)],
            shapes,
        )

    @staticmethod
    def _communicating(attributes: Any) -> list[list[int]]:
        """Returns the devices that communicate in a crossing."""
        numbers: Any = ir.DenseI64ArrayAttr
        flat = list(numbers(attributes["fairway.groups"]))
        width = ir.IntegerAttr(attributes["fairway.width"]).value
        rows = [flat[first : first + width] for first in range(0, len(flat), width)]
        return [[device for device in row if device >= 0] for row in rows]

    def _computation(self, piece: Computation, name: str) -> FunctionPart:
        """Returns the code of a computation."""
        context = ir.Context.current
        with ir.Location.unknown():
            module = ir.Module.create()
            module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
            integers = ir.IntegerType.get_signless(32)
            attributes = module.operation.attributes
            attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(integers, self._islands.size)
            attributes["mhlo.num_replicas"] = ir.IntegerAttr.get(integers, 1)
            if self.client_functions and any(map(_calls_client, piece.operations)):
                numbers: Any = ir.DenseI64ArrayAttr
                attributes[ATTRIBUTE] = numbers.get(self.client_functions)
            with ir.InsertionPoint(module.body):
                for view in self._meshes.values():
                    given = {
                        "sym_name": ir.StringAttr.get(view.name),
                        "mesh": ir.Attribute.parse(view.inner()),
                    }
                    ir.Operation.create("sdy.mesh", attributes=given)
                self._entry(piece)
            code = Backend.artifact(module, context)
        return FunctionPart(False, piece.uses_island, code)

    def _entry(self, piece: Computation) -> None:
        """Writes the entry function of a computation."""
        scalar = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
        kinds = [value.type for value in piece.operands]
        shardings = [self._sharding(value) for value in piece.operands]
        if piece.uses_island:
            kinds, shardings = [scalar, *kinds], [ir.DictAttr.get({}), *shardings]
        made = [value.type for value in piece.results]
        function = ir.Operation.create(
            "func.func",
            attributes={
                "sym_name": ir.StringAttr.get("main"),
                "sym_visibility": ir.StringAttr.get("public"),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get(kinds, made)),
                "arg_attrs": ir.ArrayAttr.get(shardings),
                "res_attrs": ir.ArrayAttr.get([self._sharding(v) for v in piece.results]),
            },
            regions=1,
        )
        block = function.regions[0].blocks.append(
            *kinds, arg_locs=[ir.Location.unknown()] * len(kinds)
        )
        arguments = list(block.arguments)
        island = arguments.pop(0) if piece.uses_island else None
        known = dict(zip(piece.operands, arguments, strict=True))
        with ir.InsertionPoint(block):
            for operation in piece.operations:
                if target_of(operation) == ISLAND:
                    known[operation.results[0]] = island
                    continue
                written = cloned(operation, ir.InsertionPoint.current)
                _strip(written, island)
                rename(written, known)
                known.update(zip(operation.results, written.results, strict=True))
            values = [known[value] for value in piece.results]
            ir.Operation.create("func.return", operands=values)

    def _sharding(self, value: Value) -> Any:
        inner = self._inner(value)
        text = inner.inner(shape_of(value), whole_mesh(self._meshes))
        if text is None:
            return ir.DictAttr.get({})
        return ir.DictAttr.get({"sdy.sharding": ir.Attribute.parse(text)})


def _calls_client(operation: Any) -> bool:
    """Returns whether an operation, or one in its regions, calls a function of the client."""
    return is_client_call(operation) or any(
        _calls_client(inner.operation)
        for block in blocks_of(operation)
        for inner in block.operations
    )


def _strip(operation: Any, island: Value) -> None:
    """Removes what XLA need not see, also from operations in regions.

    Args:
        operation: the operation.
        island: the number of the island, if the computation takes it.
    """
    if SHARDING in operation.attributes:
        del operation.attributes[SHARDING]
    for block in blocks_of(operation):
        for inner in list(block.operations):
            if target_of(inner.operation) == ISLAND:
                inner.operation.results[0].replace_all_uses_with(island)
                inner.operation.erase()
            else:
                _strip(inner.operation, island)
