"""Where the functions of a program run, and the shardings of their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fairway.errors import ProgramError

_partition: Any = PartitionSpec
_WHOLE = _partition()


def is_placed(leaf: Any) -> bool:
    """Returns whether a value is an array that was put on devices explicitly."""
    return isinstance(leaf, jax.Array) and leaf.committed


def named_sharding(sharding: Any) -> Any:
    """Returns a sharding that a jitted function names; None if it is unspecified."""
    return sharding if isinstance(sharding, jax.sharding.Sharding) else None


def replicated(home: Any) -> Any:
    """Returns the sharding that replicates an array on these devices, in their default memory."""
    if isinstance(home, NamedSharding):
        return NamedSharding(home.mesh, _WHOLE)
    return SingleDeviceSharding(*devices_of(home)) if len(devices_of(home)) == 1 else home


def named_inputs(equation: Any) -> Iterator[Any]:
    """Yields the sharding that a function names for each argument; None where it is unspecified."""
    named = equation.params.get("in_shardings", ())
    inner = equation.params["jaxpr"].jaxpr if equation.primitive.name == "jit" else None
    for index, atom in enumerate(equation.invars):
        if isinstance(atom, core.Literal):
            continue
        sharding = named_sharding(named[index]) if index < len(named) else None
        if sharding is None and inner is not None:
            sharding = _mapped(inner, index)
        yield sharding


def _mapped(jaxpr: Any, index: int) -> Any:
    """Returns the sharding of an argument that a function passes unchanged to a ``shard_map``."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map" and isinstance(equation.params["mesh"], Mesh):
            for atom, spec in zip(equation.invars, equation.params["in_specs"], strict=True):
                if atom is jaxpr.invars[index]:
                    return NamedSharding(equation.params["mesh"], spec)
    return None


def named_home(equation: Any, named: list[Any]) -> Any:
    """Returns a sharding over the devices that a function names: in its shardings or its body."""
    if named:
        return named[0]
    return next(meshes(equation), None)


def meshes(equation: Any) -> Iterator[Any]:
    """Yields shardings over the meshes that appear in an operation."""
    if isinstance(mesh := equation.params.get("mesh"), Mesh):
        yield NamedSharding(mesh, _WHOLE)
    if isinstance(sharding := equation.params.get("sharding"), NamedSharding) and isinstance(
        sharding.mesh, Mesh
    ):
        yield sharding
    for inner in equation.params.values():
        jaxpr = getattr(inner, "jaxpr", inner)
        for nested in getattr(jaxpr, "eqns", ()):
            yield from meshes(nested)


def devices_of(sharding: Any) -> tuple[Any, ...]:
    """Returns the devices of a sharding, in its order."""
    return tuple(sharding._device_assignment)


def is_same(one: Any, other: Any, rank: int) -> bool:
    """Returns whether two shardings put each part of an array of ``rank`` axes in one place."""
    return bool(
        devices_of(one) == devices_of(other)
        and one.memory_kind == other.memory_kind
        and one.is_equivalent_to(other, rank)
    )


def check_sharding(sharding: Any) -> None:
    """Checks that a program can have an array of this sharding.

    Raises:
        ProgramError: it is of another kind.
    """
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        raise ProgramError(
            f"an array of the program is sharded by {sharding}; expected a NamedSharding; give the "
            "function that makes it out_shardings"
        )
