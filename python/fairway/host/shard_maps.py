"""Programs that are one ``shard_map``: body, meshes, groups, and attributes of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from fairway.host.elements import dtype_of
from fairway.host.messages import Tiles
from fairway.host.programs import ELEMENT_TYPES
from fairway.host.teams import Elements

__all__ = [
    "REDUCTIONS",
    "NotOnlyCollectivesError",
    "content_classes",
    "find_body",
    "find_meshes",
    "integer_attribute",
    "operand_elements",
    "read_groups",
    "read_rows",
    "reduction_of",
    "splat_value",
]

Mesh = dict[str, int]
"""Sizes of a mesh's axes by name, major first."""
Reduction = tuple[Callable[[Elements, Elements], Elements], str | None]
"""Local reduction, and the name of the team's reduction if it supports it."""
REDUCTIONS: dict[str, Reduction] = {
    "stablehlo.add": (np.add, "sum"),
    "stablehlo.maximum": (np.maximum, "max"),
    "stablehlo.minimum": (np.minimum, "min"),
    "stablehlo.multiply": (np.multiply, "product"),
    "stablehlo.and": (np.bitwise_and, None),
    "stablehlo.or": (np.bitwise_or, None),
}
"""Reductions by the operation that combines two elements."""
MANUAL = ["sdy.manual_computation", "func.return"]
"""Operations of a program that is one shard_map."""
MANUAL_BEFORE_0_10 = ["stablehlo.custom_call", "func.call", "stablehlo.custom_call", "func.return"]
"""The same from clients up to jaxlib 0.9, which put the body into a function of its own."""


class NotOnlyCollectivesError(Exception):
    """A program contains more than collectives."""


def find_meshes(module: Any) -> dict[str, Mesh]:
    """Returns the meshes that a program names.

    Raises:
        NotOnlyCollectivesError: a mesh permutes the devices.
    """
    named = {
        ir.StringAttr(operation.attributes["sym_name"]).value: operation.attributes["mesh"]
        for operation in module.body.operations
        if operation.operation.name == "sdy.mesh"
    }
    spelled = _frontend_attribute(module.operation, "xla.sdy.meshes")
    named.update({one.name: one.attr for one in ir.DictAttr(spelled)} if spelled else {})
    meshes = {}
    for name, mesh in named.items():
        mesh = sdy.MeshAttr(mesh)
        if list(mesh.device_ids):
            raise NotOnlyCollectivesError("its mesh permutes the devices")
        axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
        meshes[name] = {axis.name: axis.size for axis in axes}
    return meshes


def _frontend_attribute(operation: Any, name: str) -> Any:
    """Returns an attribute that clients up to jaxlib 0.9 write as text, or None."""
    if "mhlo.frontend_attributes" not in operation.attributes:
        return None
    given = ir.DictAttr(operation.attributes["mhlo.frontend_attributes"])
    if name not in given:
        return None
    return ir.Attribute.parse(ir.StringAttr(given[name]).value, operation.context)


def _mesh(given: Any, meshes: dict[str, Mesh]) -> Mesh:
    """Returns the mesh that an attribute names or defines."""
    if isinstance(given, ir.FlatSymbolRefAttr):
        return meshes[given.value]
    if stablehlo.MeshAttr.isinstance(given):
        mesh = stablehlo.MeshAttr(given)
        if mesh.device_ids is None:
            axes = [stablehlo.MeshAxisAttr(axis) for axis in mesh.axes]
            return {axis.name: axis.size for axis in axes}
    raise NotOnlyCollectivesError(f"it uses the mesh {given}")


def _axis_name(axis: Any) -> str:
    if axis.sub_axis_info is not None:
        raise NotOnlyCollectivesError(f"it uses a part of a mesh axis, {axis}")
    return str(axis.name)


def read_groups(operation: Any, meshes: dict[str, Mesh], count: int) -> tuple[tuple[int, ...], ...]:
    """Returns groups of positions, given explicitly or as axes of a mesh (jax 0.11.2)."""
    given = operation.attributes["replica_groups"]
    if not stablehlo.ReplicaGroupMeshAxesAttr.isinstance(given):
        return read_rows(given)
    given = stablehlo.ReplicaGroupMeshAxesAttr(given)
    mesh = _mesh(given.mesh, meshes)
    axes = [_axis_name(stablehlo.AxisRefAttr(axis)) for axis in given.axes]
    return _groups_along(mesh, axes, count)


def _groups_along(mesh: Mesh, axes: list[str], count: int) -> tuple[tuple[int, ...], ...]:
    """Returns groups of positions that differ only along ``axes``, the first being the major one.

    >>> _groups_along({"island": 2, "x": 3}, ["island"], 6)
    ((0, 3), (1, 4), (2, 5))
    """
    names = list(mesh)
    along = [names.index(name) for name in axes]
    apart = [axis for axis in range(len(names)) if axis not in along]
    positions = _positions(mesh, count).transpose(*apart, *along)
    width = int(np.prod([mesh[name] for name in axes], dtype=np.int64))
    return tuple(tuple(int(position) for position in row) for row in positions.reshape(-1, width))


def _positions(mesh: Mesh, count: int) -> Elements:
    """Returns the device positions in the shape of a mesh."""
    sizes = tuple(mesh.values())
    if int(np.prod(sizes, dtype=np.int64)) != count:
        raise NotOnlyCollectivesError("its mesh does not cover its devices")
    return np.arange(count).reshape(sizes)


def find_body(
    module: Any, meshes: dict[str, Mesh], count: int
) -> tuple[Any, list[Tiles | None], list[Any]]:
    """Returns the body of the one shard_map, the partitions of its parameters, and its results.

    Raises:
        NotOnlyCollectivesError: the program is more than one shard_map.
    """
    functions = {
        ir.StringAttr(operation.attributes["sym_name"]).value: operation.regions[0].blocks[0]
        for operation in module.body.operations
        if operation.operation.name == "func.func"
    }
    main = functions["main"]
    operations = list(main.operations)
    names = [operation.operation.name for operation in operations]
    if names == MANUAL:
        first = last = operations[0]
        body = first.regions[0].blocks[0]
        shardings = first.attributes["in_shardings"], first.attributes["out_shardings"]
    elif names == MANUAL_BEFORE_0_10:
        first, call, last, _ = operations
        body = functions[ir.FlatSymbolRefAttr(call.attributes["callee"]).value]
        shardings = (
            _frontend_attribute(first, "xla.sdy.in_shardings"),
            _frontend_attribute(last, "xla.sdy.out_shardings"),
        )
        known = all(sharding is not None for sharding in shardings)
        if not known or list(call.operands) != list(first.results):
            raise NotOnlyCollectivesError("it contains stablehlo.custom_call outside a shard_map")
    else:
        other = next((name for name in names if name not in MANUAL), "nothing")
        raise NotOnlyCollectivesError(f"it contains {other} outside a shard_map")
    if list(first.operands) != list(main.arguments) or list(operations[-1].operands) != list(
        last.results
    ):
        raise NotOnlyCollectivesError("it reorders arguments or results around its shard_map")
    given, made = (_partitions(sharding, meshes, count) for sharding in shardings)
    outputs = []
    for result, cut in zip(last.results, made, strict=True):
        if not isinstance(result.type, ir.RankedTensorType):
            raise NotOnlyCollectivesError("it orders effects by a token")
        tensor = ir.RankedTensorType(result.type)
        outputs.append((ELEMENT_TYPES[str(tensor.element_type)], tuple(tensor.shape), cut))
    return body, given, outputs


def _partitions(attribute: Any, meshes: dict[str, Mesh], count: int) -> list[Tiles | None]:
    """Returns the partition of each value, from the mesh axes that its dimensions name."""
    given = sdy.TensorShardingPerValueAttr(attribute).shardings
    return [_partition(sdy.TensorShardingAttr(one), meshes, count) for one in given]


def _partition(sharding: Any, meshes: dict[str, Mesh], count: int) -> Tiles | None:
    mesh = _mesh(sharding.mesh_or_ref, meshes)
    coordinates = dict(zip(mesh, np.indices(_positions(mesh, count).shape), strict=True))
    counts = []
    tile = np.zeros(count, np.int64)
    for dimension in map(sdy.DimensionShardingAttr, sharding.dimension_shardings):
        tiles = 1
        for name in [_axis_name(sdy.AxisRefAttr(axis)) for axis in dimension.axes]:
            tile = tile * mesh[name] + coordinates[name].reshape(-1)
            tiles *= mesh[name]
        counts.append(tiles)
    if all(tiles == 1 for tiles in counts):
        return None
    return Tiles(counts, [int(position) for position in tile])


def content_classes(cut: Tiles | None, count: int) -> list[Any]:
    """Returns equal entries for positions that hold the same elements."""
    return [0] * count if cut is None else list(cut.tile_of)


def operand_elements(operation: Any) -> tuple[np.dtype[Any], int]:
    """Returns type and number of the elements that each position has of an operation's operand."""
    tensor = ir.RankedTensorType(operation.operands[0].type)
    kind = dtype_of(ELEMENT_TYPES[str(tensor.element_type)])
    return kind, int(np.prod(tensor.shape, dtype=np.int64))


def read_rows(attribute: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the rows of a table of device positions, without padding."""
    table = np.array(ir.DenseIntElementsAttr(attribute))
    return tuple(tuple(int(position) for position in row if position >= 0) for row in table)


def integer_attribute(operation: Any, name: str) -> int:
    """Returns an integer among an operation's attributes."""
    return int(ir.IntegerAttr(operation.attributes[name]).value)


def splat_value(operation: Any) -> Any:
    """Returns the number that all elements of a constant have.

    Raises:
        NotOnlyCollectivesError: they differ.
    """
    value = ir.DenseElementsAttr(operation.attributes["value"])
    if not value.is_splat:
        raise NotOnlyCollectivesError("it contains a constant array")
    number = value.get_splat_value()
    kind = ir.FloatAttr if isinstance(number.type, ir.FloatType) else ir.IntegerAttr
    return kind(number).value


def reduction_of(operation: Any) -> Reduction:
    """Returns how an operation reduces.

    Raises:
        NotOnlyCollectivesError: it reduces by none of :data:`REDUCTIONS`.
    """
    body = [inner.operation.name for inner in operation.regions[0].blocks[0].operations]
    if len(operation.operands) == 1 and len(body) == 2 and body[0] in REDUCTIONS:
        return REDUCTIONS[body[0]]
    raise NotOnlyCollectivesError(f"it reduces by {body[0]}")
