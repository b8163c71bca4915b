"""Collectives that a program writes for single devices: inside islands, and between them."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir

from fairway.host.partition.axes import Islands, IslandSharding
from fairway.host.partition.emitter import Emitter, led
from fairway.host.partition.rules import REDUCTIONS
from fairway.host.screening import RefusedError

__all__ = ["COLLECTIVES", "Groups", "cross", "groups_of", "local_collective"]

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


def cross(emitter: Emitter, operation: Any, at: tuple[Value, IslandSharding], offset: int) -> Value:
    """Writes a collective between islands on a value outside of its region.

    Args:
        emitter: writes operations.
        operation: the collective.
        at: its operand there, and how that is cut.
        offset: number of dimensions that the operand there has in front.
    """
    value, cut = at
    groups, shape = groups_of(operation), list(ir.RankedTensorType(value.type).shape)
    if operation.name == "stablehlo.collective_permute":
        return emitter.cross("permute", value, cut, groups)
    count = len(groups[0])
    if operation.name == "stablehlo.all_reduce":
        return emitter.cross("reduce", value, cut, groups, _reduction(operation))
    if any(len(group) != count for group in groups):
        raise RefusedError(f"UNIMPLEMENTED: {operation.name} joins groups of unequal size")

    def dimension(name: str) -> int:
        return int(ir.IntegerAttr(operation.attributes[name]).value) + offset

    match operation.name:
        case "stablehlo.all_gather":
            whole = emitter.cross("gather", value, cut, groups)
            return emitter.folded(whole, dimension("all_gather_dim"), cut)
        case "stablehlo.all_to_all":
            parts = emitter.unfolded(value, dimension("split_dimension"), count, cut)
            parts = emitter.cross("all_to_all", parts, led(cut), groups)
            return emitter.folded(parts, dimension("concat_dimension"), cut)
        case "stablehlo.reduce_scatter":
            split = dimension("scatter_dimension")
            parts = emitter.unfolded(value, split, count, cut)
            own = emitter.cross("scatter", parts, led(cut), groups, _reduction(operation))
            shape[split] //= count
            return emitter.reshaped(own, shape, cut)
    raise RefusedError(f"UNIMPLEMENTED: {operation.name} between islands")


def _reduction(operation: Any) -> str:
    body = [one.operation.name for one in operation.regions[0].blocks[0].operations]
    found = [REDUCTIONS[name] for name in body if name in REDUCTIONS]
    if len(found) != 1:
        raise RefusedError(f"UNIMPLEMENTED: {operation.name} reduces by {body[0]} between islands")
    return found[0]
