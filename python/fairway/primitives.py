"""JAX primitives of communication between groups of devices, which programs contain as nodes.

Arguments and results are ordered by groups, as the controller has them. A dispatch takes all rows,
then all choices, and returns rows, origins and counts of each group; a collect takes all rows, then
all origins.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from fairway.errors import ProgramError

__all__ = [
    "PRIMITIVES",
    "collect_p",
    "collective_p",
    "description",
    "dispatch_p",
    "groups",
    "shardings",
]

_struct: Any = jax.core.ShapedArray

dispatch_p: Any = core.Primitive("fairway_dispatch")
collect_p: Any = core.Primitive("fairway_collect")
collective_p: Any = core.Primitive("fairway_collective")
PRIMITIVES = (dispatch_p, collect_p, collective_p)
"""Operations between groups of devices."""


def _dispatched(*args: Any, exchange: Any, turn: int, each: bool) -> list[Any]:
    groups = len(exchange.sources)
    rows, choices = args[:groups], args[groups:]
    capacity = exchange.credit(choices) * exchange._count(exchange.sources)
    made = []
    for sharding in exchange.targets:
        devices = len(sharding.device_set)
        tail = rows[0].shape[2 if each else 1 :]
        made.append(_struct((devices * capacity, *tail), rows[0].dtype))
        made.append(_struct((devices * capacity,), np.dtype(np.int32)))
        made.append(_struct((devices * exchange.bins,), np.dtype(np.int32)))
    return made


def _collected(*args: Any, exchange: Any, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    return [_struct((*shape, *args[0].shape[1:]), args[0].dtype) for shape in shapes]


def _carried(*args: Any, shardings: tuple[Any, ...], kind: str) -> list[Any]:
    made = {"gather": (len(args), *args[0].shape), "scatter": args[0].shape[1:]}
    shape = made.get(kind, args[0].shape)
    return [_struct(shape, args[0].dtype) for _ in args]


def _refuse(context: Any, *_: Any, **__: Any) -> Any:
    raise ProgramError(
        "an exchange is between devices that one jitted function cannot have; call it outside of "
        "jax.jit, inside of fairway.program"
    )


dispatch_p.def_abstract_eval(_dispatched)
collect_p.def_abstract_eval(_collected)
collective_p.def_abstract_eval(_carried)
for _primitive in PRIMITIVES:
    _primitive.multiple_results = True
    mlir.register_lowering(_primitive, _refuse)


def description(equation: Any) -> str:
    """Returns the text by which hosts identify an exchange."""
    if equation.primitive is collect_p:
        return "collect"
    if equation.primitive is collective_p:
        return str(equation.params["kind"])
    exchange, turn = equation.params["exchange"], equation.params["turn"]
    choices = [atom.aval for atom in equation.invars[len(exchange.sources) :]]
    return f"dispatch bins {exchange.bins} credit {exchange.credit(choices)} round {turn}"


def groups(equation: Any) -> int:
    """Returns the number of groups of an exchange's arguments."""
    if equation.primitive is collective_p:
        return len(equation.invars)
    return len(equation.invars) // 2


def shardings(equation: Any) -> tuple[list[Any], list[Any]]:
    """Returns the shardings of an exchange's arguments and of its results."""
    if equation.primitive is collective_p:
        parts = list(equation.params["shardings"])
        stacks = [_stacked(sharding) for sharding in parts]
        given = stacks if equation.params["kind"] == "scatter" else parts
        return given, stacks if equation.params["kind"] == "gather" else parts
    exchange = equation.params["exchange"]
    if equation.primitive is collect_p:
        return [*exchange.targets, *exchange.targets], list(exchange.sources)
    made = [sharding for sharding in exchange.targets for _ in range(3)]
    return [*exchange.sources, *exchange.sources], made


def _stacked(sharding: Any) -> Any:
    """Returns the same sharding for arrays with one more, unsharded axis in front."""
    if isinstance(sharding, NamedSharding):
        partition: Any = PartitionSpec
        spec = partition(None, *sharding.spec)
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding
