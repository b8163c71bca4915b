"""Infers the shardings of a function's results, by Shardy's propagation without compiling it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import passmanager
from jaxlib.mlir.dialects import sdy

__all__ = ["propagate"]

PIPELINE = "builtin.module(sdy-propagation-pipeline)"
_partition: Any = PartitionSpec


def propagate(module: Any, meshes: Iterable[Mesh]) -> list[NamedSharding] | None:
    """Infers the shardings of a function's results, and writes them into the function.

    Args:
        module: StableHLO whose arguments have shardings; its results may.
        meshes: meshes that the function may be sharded over.

    Returns:
        The sharding of each result; None if they cannot be inferred without compiling: the function
        has operations that Shardy supports only after the compiler has rewritten them, a mesh is
        not among ``meshes``, or only a part of an axis is used.
    """
    ir = mlir.ir
    if not _is_understood(module):
        return None
    with module.context:
        copy = ir.Module.parse(module.operation.get_asm(binary=True))
        passmanager.PassManager.parse(PIPELINE).run(copy.operation)
        found = [attributes.get("sdy.sharding") for attributes in _results(copy)]
        known = {
            ir.StringAttr(operation.attributes["sym_name"]).value: _mesh(operation, meshes)
            for operation in module.body.operations
            if operation.operation.name == "sdy.mesh"
        }
        named = [_named(one, known, meshes) for one in found]
        made = [one for one in named if one is not None]
        if len(made) < len(named):
            return None
        attributes = [
            ir.DictAttr.get({**given, "sdy.sharding": one or _whole(kind, known)})
            for given, one, kind in zip(_results(module), found, _kinds(module), strict=True)
        ]
        _main(module).attributes["res_attrs"] = ir.ArrayAttr.get(attributes)
        return made


def _is_understood(module: Any) -> bool:
    ir = mlir.ir
    understood = True
    axes = {
        axis.name
        for operation in module.body.operations
        if operation.operation.name == "sdy.mesh"
        for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(operation.attributes["mesh"]).axes)
    }

    def visit(operation: Any) -> Any:
        nonlocal understood
        name = operation.name
        if name == "sdy.manual_computation":
            manual: Any = sdy.ManualAxesAttr(operation.attributes["manual_axes"])
            if axes <= set(manual):
                return ir.WalkResult.SKIP  # all axes are manual: nothing is left to propagate
        understood &= not name.startswith("chlo.") and name != "stablehlo.custom_call"
        return ir.WalkResult.ADVANCE if understood else ir.WalkResult.INTERRUPT

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return understood


def _main(module: Any) -> Any:
    return next(
        operation
        for operation in module.body.operations
        if operation.operation.name == "func.func"
        and mlir.ir.StringAttr(operation.attributes["sym_name"]).value == "main"
    )


def _kinds(module: Any) -> list[Any]:
    """Returns the types of a function's results."""
    kinds = mlir.ir.TypeAttr(_main(module).attributes["function_type"]).value
    return list(mlir.ir.FunctionType(kinds).results)


def _whole(kind: Any, meshes: Iterable[str]) -> Any:
    """Returns the sharding of a replicated result."""
    rank = len(mlir.ir.RankedTensorType(kind).shape)
    closed = [sdy.DimensionShardingAttr.get([], is_closed=True) for _ in range(rank)]
    return sdy.TensorShardingAttr.get(next(iter(meshes)), closed)


def _results(module: Any) -> list[dict[str, Any]]:
    """Returns the attributes of each result of a function."""
    ir: Any = mlir.ir
    main = _main(module)
    if "res_attrs" not in main.attributes:
        return [{} for _ in _kinds(module)]
    given = [ir.DictAttr(one) for one in ir.ArrayAttr(main.attributes["res_attrs"])]
    return [{named.name: named.attr for named in one} for one in given]


def _mesh(operation: Any, meshes: Iterable[Mesh]) -> Mesh | None:
    """Returns the mesh that an operation defines; None if it is not in ``meshes``."""
    given = sdy.MeshAttr(operation.attributes["mesh"])
    axes = [(axis.name, axis.size) for axis in map(sdy.MeshAxisAttr, given.axes)]
    if len(given.device_ids):
        return None
    return next((mesh for mesh in meshes if list(mesh.shape.items()) == axes), None)


def _named(
    attribute: Any, known: dict[str, Mesh | None], meshes: Iterable[Mesh]
) -> NamedSharding | None:
    if attribute is None:  # replicated
        mesh = next(iter(meshes), None)
        return None if mesh is None else NamedSharding(mesh, _partition())
    sharding = sdy.TensorShardingAttr(attribute)
    mesh = known.get(mlir.ir.FlatSymbolRefAttr(sharding.mesh_or_ref).value)
    cuts = []
    for dimension in map(sdy.DimensionShardingAttr, sharding.dimension_shardings):
        axes = [sdy.AxisRefAttr(axis) for axis in dimension.axes]
        if mesh is None or any(axis.sub_axis_info is not None for axis in axes):
            return None
        names = tuple(axis.name for axis in axes)
        cuts.append(names if len(names) > 1 else names[0] if names else None)
    return None if mesh is None else NamedSharding(mesh, _partition(*cuts))
