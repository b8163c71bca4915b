"""Models as sequences of blocks, each of which takes the output of the one before."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from fairway.errors import ConfigError

__all__ = [
    "AXIS",
    "Apply",
    "Block",
    "bring",
    "form",
    "in_row",
    "inputs_of",
    "mapped",
    "read_blocks",
    "time_s",
]

AXIS = "data"
"""Mesh axis of a stage's devices, over which batches are sharded."""

CALLS = 4
"""Calls per repeat, so that dispatch of the next overlaps the execution of one."""

Apply = Callable[[Any, Any], Any]
"""Computes a block's output from its parameters and its input."""


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of a sequence.

    Attributes:
        name: human-readable label.
        apply: computes the output.
        parameters: trainable parameters.
        kind: blocks of equal kind compute the same function.
    """

    name: str
    apply: Apply
    parameters: Any
    kind: Hashable


def in_row(blocks: Sequence[Block]) -> Block:
    """Composes several blocks into one, whose parameters are a list of theirs."""
    applies = [block.apply for block in blocks]

    def apply(parameters: Sequence[Any], value: Any) -> Any:
        for one, own in zip(applies, parameters, strict=True):
            value = one(own, value)
        return value

    names = ", ".join(block.name for block in blocks)
    own = [block.parameters for block in blocks]
    return Block(names, apply, own, tuple(block.kind for block in blocks))


def mapped(function: Apply, devices: Sequence[jax.Device]) -> Apply:
    """Returns a function whose ``jax.shard_map`` calls map over these devices by default."""
    mesh = jax.sharding.AbstractMesh((len(devices),), (AXIS,))

    def call(parameters: Any, value: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return function(parameters, value)

    return call


def time_s(call: Callable[[], Any], repeats: int) -> float:
    """Returns seconds of one call: the median of several repeats, after compilation and warm-up."""

    def repeat_s() -> float:
        began = time.perf_counter()
        # Devices execute calls in order: when the last is done, all are.
        made = [call() for _ in range(CALLS)][-1]
        for leaf in jax.tree.leaves(made):
            leaf.block_until_ready()
        return (time.perf_counter() - began) / CALLS

    repeat_s()
    return statistics.median(repeat_s() for _ in range(repeats))


def read_blocks(model: Any, variables: Sequence[Any] | None) -> tuple[list[Block], Any]:
    """Returns the blocks of a model, and a function that puts trained parameters back."""
    try:
        from flax import linen, nnx
    except ImportError as error:
        raise ConfigError("splitting a model needs flax; try `pip install flax`") from error
    modules = list(model.layers) if isinstance(model, nnx.Sequential) else model
    if not isinstance(modules, (list, tuple, nnx.List)):
        raise ConfigError(
            f"cannot tell the blocks of a {type(model).__name__}; expected an nnx.Sequential or a "
            "list of modules"
        )
    if any(isinstance(module, linen.Module) for module in modules):
        return _read_linen(modules, variables, linen)
    if variables is not None:
        raise ConfigError("variables are given, but no module is of linen")
    blocks = [_nnx_block(nnx, number, module) for number, module in enumerate(modules)]
    _refuse_shared(nnx, modules, blocks)

    def put_back(parameters: list[Any]) -> Any:
        for module, own in zip(modules, parameters, strict=True):
            if isinstance(module, nnx.Module):
                nnx.update(module, own)
        return model

    return blocks, put_back


def _read_linen(
    modules: Sequence[Any], variables: Sequence[Any] | None, linen: Any
) -> tuple[list[Block], Any]:
    if variables is None or len(variables) != len(modules):
        count = "none" if variables is None else len(variables)
        raise ConfigError(
            f"there are {len(modules)} linen modules and variables of {count}; expected what "
            "`init` of each returned"
        )
    blocks = []
    for number, (module, own) in enumerate(zip(modules, variables, strict=True)):
        name = _name(number, module)
        if not isinstance(module, linen.Module):
            raise ConfigError(f"{name} is no linen module, and others are")
        _refuse_state(name, [collection for collection in own if collection != "params"])

        def apply(parameters: Any, value: Any, module: Any = module) -> Any:
            return module.apply({"params": parameters}, value)

        blocks.append(Block(name, apply, own.get("params", {}), _hashable(module)))
    return blocks, lambda parameters: [{"params": own} for own in parameters]


def _nnx_block(nnx: Any, number: int, module: Any) -> Block:
    name = _name(number, module)
    if not isinstance(module, nnx.Module):
        if not callable(module):
            raise ConfigError(f"{name} is neither a module nor a function")
        return Block(name, lambda _, value: module(value), {}, _hashable(module))
    form, parameters, others = nnx.split(module, nnx.Param, ...)
    _refuse_state(
        name,
        [
            f"{'.'.join(map(str, path))} ({type(v).__name__})"
            for path, v in nnx.to_flat_state(others)
        ],
    )

    def apply(parameters: Any, value: Any) -> Any:
        return nnx.merge(form, parameters)(value)

    return Block(name, apply, parameters, _hashable(form))


def _refuse_state(name: str, state: list[str]) -> None:
    if state:
        raise ConfigError(
            f"{name} has state that is not trained: {', '.join(state)}; a stage is a function of "
            "parameters and input alone, so batch statistics and random numbers (dropout) are not "
            "supported; leave them out of the model"
        )


def _refuse_shared(nnx: Any, modules: Sequence[Any], blocks: list[Block]) -> None:
    owners: dict[int, str] = {}
    for module, block in zip(modules, blocks, strict=True):
        variables = {id(one) for _, one in nnx.iter_graph(module) if isinstance(one, nnx.Variable)}
        for variable in variables:
            if variable in owners:
                raise ConfigError(
                    f"{owners[variable]} and {block.name} share a parameter, which would be "
                    "trained twice where they are on two stages; give each its own"
                )
        owners |= dict.fromkeys(variables, block.name)


def _name(number: int, module: Any) -> str:
    return f"block {number} ({getattr(module, '__name__', type(module).__name__)})"


def _hashable(kind: Any) -> Hashable:
    """Returns a key for a kind of block; a kind that is not hashable equals only itself."""
    try:
        hash(kind)
    except TypeError:
        return id(kind)
    found: Hashable = kind
    return found


def form(tree: Any) -> Any:
    """Returns the structure, shapes and types of arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def bring(array: Any) -> Any:
    """Copies an array to this process's default device."""
    return jax.numpy.asarray(np.asarray(array))


def inputs_of(blocks: list[Block], example: Any, devices: Sequence[jax.Device]) -> list[Any]:
    """Returns shapes and types of each block's input, on these devices."""
    value = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, example))
    inputs = []
    for block in blocks:
        inputs.append(value)
        try:
            value = jax.eval_shape(mapped(block.apply, devices), block.parameters, value)
        except Exception as error:
            leaves = jax.tree.leaves(value)
            kinds = ", ".join(f"{one.dtype}[{','.join(map(str, one.shape))}]" for one in leaves)
            raise ConfigError(f"{block.name} cannot be applied to {kinds}: {error}") from error
    return inputs
