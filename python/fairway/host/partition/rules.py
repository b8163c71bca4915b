"""Which dimensions of an operation's operands and results go together, and at what cost.

Shardy's sharding rules name factors: dimensions, or parts of them, that operands and results share.
An island can compute its part of an operation along a factor alone if the factor passes through, or
if it is reduced and the islands' results are then reduced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from fairway.host import shard_maps
from fairway.host.partition.axes import Dimension, IslandAxis, IslandSharding, Token
from fairway.host.partition.emitter import byte_size

__all__ = ["Factors", "Strategy", "choose", "read_rule", "reduction_of"]

Factor = int
Mapping = tuple[tuple[Factor, ...], ...]
"""For each dimension of a value, its factors, the major one first."""

REDUCTIONS = {name: name.partition(".")[2] for name in shard_maps.REDUCTIONS}
"""Reductions by the operation that combines two elements."""
POSITIONAL = {"stablehlo.rng_bit_generator", "stablehlo.rng"}
"""Operations whose elements depend on where they are in the whole array."""
ELEMENTWISE = ("chlo.",)
"""Families whose operations of equal shapes are elementwise where Shardy has no rule for them."""


@dataclasses.dataclass(frozen=True)
class Factors:
    """An operation's factors.

    Attributes:
        sizes: size of each.
        operands: dimensions of each operand.
        results: dimensions of each result.
        passing: factors along which islands compute alone.
        reduced: factors along which islands' results have to be reduced.
    """

    sizes: tuple[int, ...]
    operands: tuple[Mapping, ...]
    results: tuple[Mapping, ...]
    passing: frozenset[Factor]
    reduced: frozenset[Factor]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How islands divide an operation.

    Attributes:
        operands: wanted cut of each operand.
        results: cut of each result, or of its summand.
        partial: axes along which the results are summands.
        is_blocked: whether operands come divided along dimensions that cannot be.
    """

    operands: list[IslandSharding]
    results: list[IslandSharding]
    partial: tuple[IslandAxis, ...]
    is_blocked: bool


def reduction_of(operation: Any) -> str | None:
    """Returns how an operation reduces; None if it is not known."""
    name = operation.name
    if name in ("stablehlo.dot_general", "stablehlo.convolution"):
        return "add"
    if name in ("stablehlo.reduce", "stablehlo.scatter"):
        body = [inner.operation.name for inner in operation.regions[0].blocks[0].operations]
        if len(operation.results) == 1 and len(body) == 2:
            found = REDUCTIONS.get(body[0])
            return found if name == "stablehlo.reduce" or found == "add" else None
    return None


def read_rule(operation: Any) -> Factors | None:
    """Returns an operation's factors; None if no dimension of it can be divided."""
    if operation.name in POSITIONAL:
        return None
    if "sdy.sharding_rule" not in operation.attributes:
        return _elementwise(operation)
    rule = sdy.OpShardingRuleAttr(operation.attributes["sdy.sharding_rule"])
    sizes = tuple(int(size) for size in rule.factor_sizes)
    operands = tuple(_mapping(one) for one in rule.operand_mappings)
    results = tuple(_mapping(one) for one in rule.result_mappings)
    reduced = set(map(int, rule.reduction_factors))
    blocked = set(map(int, rule.need_replication_factors)) | set(map(int, rule.permutation_factors))
    passing = set(range(len(sizes))) - reduced - blocked
    if reduction_of(operation) is None:
        reduced = set()
    if operation.name == "stablehlo.scatter":
        passing -= _scattered(operation, operands)
    if operation.name == "stablehlo.dynamic_update_slice":
        passing -= _updated(operation, operands)
    if operation.name == "stablehlo.convolution":
        groups = ("feature_group_count", "batch_group_count")
        if any(ir.IntegerAttr(operation.attributes[name]).value != 1 for name in groups):
            passing &= _grouped(operands, results, passing)
    return Factors(sizes, operands, results, frozenset(passing), frozenset(reduced))


def _scattered(operation: Any, operands: tuple[Mapping, ...]) -> set[Factor]:
    """Returns the factors of the dimensions that a scatter's indices are about."""
    text = str(operation.attributes["scatter_dimension_numbers"])
    listed = text.partition("scatter_dims_to_operand_dims = [")[2].partition("]")[0]
    return {factor for dim in listed.split(",") if dim for factor in operands[0][int(dim)]}


def _updated(operation: Any, operands: tuple[Mapping, ...]) -> set[Factor]:
    """Returns the factors of the dimensions of which a slice is updated."""
    shapes = [list(operation.operands[index].type.shape) for index in (0, 1)]
    return {
        factor
        for whole, part, factors in zip(*shapes, operands[0], strict=True)
        if whole != part
        for factor in factors
    }


def _grouped(operands: Any, results: Any, passing: set[Factor]) -> set[Factor]:
    """Returns the factors of a grouped convolution that do not belong to its groups."""
    shared = [f for f in passing if all(_has(m, f) for m in (*operands, *results))]
    return passing - set(shared)


def _has(mapping: Mapping, factor: Factor) -> bool:
    return any(factor in dimension for dimension in mapping)


def _mapping(attribute: Any) -> Mapping:
    mapping = sdy.TensorMappingAttr(attribute)
    dims = [sdy.DimMappingAttr(one) for one in mapping.dim_mappings]
    return tuple(tuple(int(factor) for factor in one.factor_indices) for one in dims)


def _elementwise(operation: Any) -> Factors | None:
    if not operation.name.startswith(ELEMENTWISE):
        return None
    shapes = [tuple(v.type.shape) for v in (*operation.operands, *operation.results)]
    if len(set(shapes)) != 1:
        return None
    mapping = tuple((index,) for index in range(len(shapes[0])))
    counts = (len(operation.operands), len(operation.results))
    everything = frozenset(range(len(shapes[0])))
    return Factors(
        shapes[0], (mapping,) * counts[0], (mapping,) * counts[1], everything, frozenset()
    )


Placed = dict[Factor, Dimension]
"""The axes of each factor, the major one first."""


def factored(cut: IslandSharding, mapping: Mapping, sizes: Sequence[int]) -> Placed | None:
    """Returns the axes of each factor of a value; None if an axis is in no single factor."""
    placed: Placed = {}
    for dimension, factors in zip(cut.dims, mapping, strict=True):
        if not any(token.island for token in dimension):
            continue
        if not factors:
            return None
        last = max(i for i, token in enumerate(dimension) if token.island)
        if not _fill(placed, list(dimension[: last + 1]), factors, sizes):
            return None
    return placed


def _fill(
    placed: Placed, tokens: list[Token], factors: tuple[Factor, ...], sizes: Sequence[int]
) -> bool:
    """Distributes the axes of a dimension over its factors."""
    for factor in factors:
        room, found = sizes[factor], []
        while tokens and room > 1:
            token = tokens[0]
            if room % token.size == 0:
                found.append(tokens.pop(0))
                room //= token.size
            elif token.island is None and token.size % room == 0:
                found.append(Token(room))
                tokens[0] = Token(token.size // room)
                room = 1
            else:
                return False
        if found:
            placed[factor] = tuple(found)
        if not tokens:
            return True
    return not tokens


def composed(
    placed: Placed, mapping: Mapping, sizes: Sequence[int], mesh: str | None
) -> IslandSharding:
    """Returns the cut of a value, given the axes of factors."""
    dims = []
    for factors in mapping:
        tokens: list[Token] = []
        for index, factor in enumerate(factors):
            tokens += placed.get(factor, ())
            rest = sizes[factor] // math.prod(token.size for token in placed.get(factor, ()))
            is_followed = any(
                token.island for later in factors[index + 1 :] for token in placed.get(later, ())
            )
            if rest > 1 and is_followed:
                tokens.append(Token(rest))
        dims.append(tuple(tokens))
    return IslandSharding(tuple(dims), mesh)


@dataclasses.dataclass(frozen=True)
class _Site:
    """A value of an operation: its shape in bytes, cut, factors and axes of factors."""

    size: int
    cut: IslandSharding
    mapping: Mapping
    placed: Placed


def _sites(
    values: Sequence[Any],
    cuts: Sequence[IslandSharding],
    mappings: Sequence[Mapping],
    sizes: Sequence[int],
) -> list[_Site]:
    sites = []
    for value, cut, mapping in zip(values, cuts, mappings, strict=True):
        size = byte_size(value.type)
        sites.append(_Site(size, cut, mapping, factored(cut, mapping, sizes) or {}))
    return sites


def choose(
    operation: Any,
    factors: Factors,
    cuts: Sequence[IslandSharding],
    wanted: Sequence[IslandSharding],
) -> Strategy:
    """Chooses how islands divide an operation: for each island axis the factor of least traffic.

    Args:
        operation: the operation.
        factors: its factors.
        cuts: cuts of its operands.
        wanted: preferred cuts of its results, such as propagation has found.
    """
    given = _sites(operation.operands, cuts, factors.operands, factors.sizes)
    made = _sites(operation.results, wanted, factors.results, factors.sizes)
    axes = {axis for site in (*given, *made) for axis in site.cut.axes()}
    chosen: dict[Factor, dict[IslandAxis, Dimension]] = {}
    for axis in sorted(axes, reverse=True):
        best: tuple[float, int, Dimension] = (_cost(None, axis, given, made, factors), -1, ())
        for site in (*given, *made):
            for factor, tokens in site.placed.items():
                allowed = factors.passing | factors.reduced
                if factor in allowed and any(token.island == axis for token in tokens):
                    cost = _cost((factor, tokens), axis, given, made, factors)
                    if cost < best[0]:
                        best = (cost, factor, tokens)
        if best[1] >= 0:
            chosen.setdefault(best[1], {})[axis] = best[2]
    placed = {factor: _merged(found) for factor, found in chosen.items()}
    meshes = [site.cut.mesh for site in (*made, *given) if site.cut.mesh]
    mesh = meshes[0] if meshes else None

    def cut(site: _Site) -> IslandSharding:
        return composed(placed, site.mapping, factors.sizes, mesh)

    partial = [axis for factor in factors.reduced for axis in chosen.get(factor, ())]
    is_blocked = any(
        token.island
        for site in given
        for factor, tokens in site.placed.items()
        if factor not in factors.passing | factors.reduced
        for token in tokens
    )
    return Strategy(
        [cut(site) for site in given],
        [cut(site) for site in made],
        tuple(sorted(partial, reverse=True)),
        is_blocked,
    )


def _merged(found: dict[IslandAxis, Dimension]) -> Dimension:
    """Returns the axes of a factor: those of one proposal that are chosen."""
    longest = max(found.values(), key=lambda tokens: sum(token.island in found for token in tokens))
    last = max(i for i, token in enumerate(longest) if token.island in found)
    return tuple(
        Token(token.size) if token.island not in found and token.island else token
        for token in longest[: last + 1]
    )


def _cost(
    proposed: tuple[Factor, Dimension] | None,
    axis: IslandAxis,
    given: Sequence[_Site],
    made: Sequence[_Site],
    factors: Factors,
) -> float:
    """Returns the bytes to communicate, roughly, if an axis divides a factor; or none."""
    cost = 0.0
    for site in given:
        has = axis in site.cut.axes()
        if proposed is None or not _has(site.mapping, proposed[0]):
            cost += site.size if has else 0
        elif not has:
            cost += 0
        elif site.placed.get(proposed[0]) != proposed[1]:
            cost += site.size / axis.size + 1
    for site in made:
        wants = axis in site.cut.axes()
        if proposed is None:
            cost += site.size * 1e-3  # all islands compute all of it
        elif proposed[0] in factors.reduced:
            cost += site.size * (1 if wants else 2) / axis.size
        elif not wants:
            cost += site.size * 1e-4
        elif site.placed.get(proposed[0]) != proposed[1]:
            cost += site.size / axis.size
    return cost
