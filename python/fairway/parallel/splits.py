"""A flax model as the stages of a pipeline, balanced by the time that its blocks take.

A model is a row of blocks: the first takes the batch, each other what the one before makes. Blocks
are measured on the devices, and each stage is a few neighbours, cut so that the slowest stage is as
fast as it can be.

Differs from PATHWAYS §5.3, where every stage has the same number of layers: blocks need not be
alike, so embedding and head are blocks too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fairway.errors import ConfigError
from fairway.parallel.parts import Stage

__all__ = ["Split", "borders", "split"]

REPEATS = 5
CALLS = 4
"""Calls of each repeat: the devices work on one while the next is on its way to them."""

Apply = Callable[[Any, Any], Any]
"""A block's output from its parameters and its input."""

_partition: Any = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Split:
    """A model in stages.

    Attributes:
        stages: as :class:`fairway.parallel.Pipeline` takes them.
        parameters: of each stage a list, with those of each of its blocks; for ``Pipeline.init``.
        borders: stage ``s`` has the blocks from ``borders[s]`` to ``borders[s + 1] - 1``.
        costs: what each block takes forward and backward: seconds, unless they were given.
    """

    stages: list[Stage]
    parameters: list[list[Any]]
    borders: list[int]
    costs: list[float]
    _put_back: Callable[[list[Any]], Any] = dataclasses.field(repr=False)

    @property
    def stage_costs(self) -> list[float]:
        """What each stage takes, in the unit of :attr:`costs`."""
        return [sum(self.costs[slice(*pair)]) for pair in itertools.pairwise(self.borders)]

    def merge(self, parameters: Sequence[Sequence[Any]]) -> Any:
        """Puts trained parameters back into the model, on this process's default device.

        Args:
            parameters: of each stage, as ``State.parameters`` has them.

        Returns:
            The nnx model that was split, which now has them; of linen modules, the variables of
            each.

        Raises:
            ConfigError: they are not of this model.
        """
        given = [list(stage) for stage in parameters]
        if _form(given) != _form(self.parameters):
            raise ConfigError(
                "these are not parameters of the model that was split; give `parameters` of the "
                "state that its pipeline returned"
            )
        blocks = itertools.chain.from_iterable(given)
        return self._put_back([jax.tree.map(_bring, block) for block in blocks])


def split(
    model: Any,
    devices: Sequence[Sequence[jax.Device]],
    example: Any,
    *,
    variables: Sequence[Any] | None = None,
    costs: Sequence[float] | None = None,
    rounds: int = 1,
) -> Split:
    """Splits a model into stages whose slowest is as fast as it can be.

    Blocks that are alike are measured once, forward and backward, on the devices of the first
    worker.

    Args:
        model: an ``nnx.Sequential``, or a list of nnx modules and functions, or of linen modules.
        devices: of each worker; what :class:`fairway.parallel.Stage` wants.
        example: input of one microbatch; only its shape and type matter.
        variables: of each linen module, as its ``init`` returned them.
        costs: what each block takes, in any unit, if it shall not be measured.
        rounds: stages of each worker, as :class:`fairway.parallel.Pipeline` has them.

    Raises:
        ConfigError: the model is no row of blocks, there are fewer of them than stages, a block
            does not take what the one before makes, shares parameters with another, or has state
            that is not trained: batch statistics, random numbers.

    Example:
        >>> parts = split(model, [[d] for d in jax.devices()], tokens)
        >>> pipeline = Pipeline(parts.stages, loss, optimizer, microbatches=8)
        >>> state = pipeline.init(parts.parameters)
    """
    blocks, put_back = _read(model, variables)
    workers = len(devices)
    inputs = _inputs(blocks, example)
    if costs is None and workers:
        costs = _measure(blocks, inputs, devices[0])
    found = [float(cost) for cost in costs or ()]
    if len(found) != len(blocks):
        raise ConfigError(f"there are {len(blocks)} blocks and costs for {len(found)}")
    cuts = borders(found, workers * rounds)
    parts = [blocks[slice(*pair)] for pair in itertools.pairwise(cuts)]
    return Split(
        [
            Stage(functools.partial(_run, [b.apply for b in part]), devices[number % workers])
            for number, part in enumerate(parts)
        ],
        [[block.parameters for block in part] for part in parts],
        cuts,
        found,
        put_back,
    )


def borders(costs: Sequence[float], stages: int) -> list[int]:
    """Cuts a row into stages of neighbours, so that the largest stage costs as little as it can.

    Of several such cuts it is always the same. Takes O(``stages`` · ``len(costs)`` ²).

    Args:
        costs: of each block.
        stages: how many, each of at least one block.

    Returns:
        The first block of each stage, and ``len(costs)``.

    Raises:
        ConfigError: there are fewer blocks than stages, or a cost is no number of at least 0.

    >>> borders([3, 1, 1, 1, 2], 2)
    [0, 2, 5]
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise ConfigError(f"{blocks} blocks cannot make {stages} stages; each takes one at least")
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ConfigError(f"costs are {list(costs)}; expected numbers of at least 0")
    upto = [0.0, *itertools.accumulate(costs)]
    # Of the first n blocks in so many stages: the largest stage, and where the last one begins.
    best = [(0.0, 0), *[(math.inf, 0)] * blocks]
    rows = []
    for _ in range(stages):
        best = [
            min(
                ((max(best[cut][0], upto[end] - upto[cut]), cut) for cut in range(end)),
                default=(math.inf, 0),
            )
            for end in range(blocks + 1)
        ]
        rows.append(best)
    cuts = [blocks]
    for row in reversed(rows):
        cuts.append(row[cuts[-1]][1])
    return cuts[::-1]


@dataclasses.dataclass(frozen=True)
class _Block:
    """One of the row.

    Attributes:
        name: for people.
        apply: what it computes.
        parameters: what is trained.
        kind: blocks of one kind compute the same.
    """

    name: str
    apply: Apply
    parameters: Any
    kind: Hashable


def _run(applies: list[Apply], parameters: Sequence[Any], value: Any) -> Any:
    for apply, own in zip(applies, parameters, strict=True):
        value = apply(own, value)
    return value


# Reading models


def _read(model: Any, variables: Sequence[Any] | None) -> tuple[list[_Block], Any]:
    """The blocks of a model, and how parameters are put back."""
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
) -> tuple[list[_Block], Any]:
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

        blocks.append(_Block(name, apply, own.get("params", {}), _hashable(module)))
    return blocks, lambda parameters: [{"params": own} for own in parameters]


def _nnx_block(nnx: Any, number: int, module: Any) -> _Block:
    name = _name(number, module)
    if not isinstance(module, nnx.Module):
        if not callable(module):
            raise ConfigError(f"{name} is neither a module nor a function")
        return _Block(name, lambda _, value: module(value), {}, _hashable(module))
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

    return _Block(name, apply, parameters, _hashable(form))


def _refuse_state(name: str, state: list[str]) -> None:
    if state:
        raise ConfigError(
            f"{name} has state that is not trained: {', '.join(state)}; a stage is a function of "
            "parameters and input alone, so batch statistics and random numbers (dropout) are not "
            "supported; leave them out of the model"
        )


def _refuse_shared(nnx: Any, modules: Sequence[Any], blocks: list[_Block]) -> None:
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
    """What stands for a kind of block: a kind that cannot be looked up is only itself."""
    try:
        hash(kind)
    except TypeError:
        return id(kind)
    found: Hashable = kind
    return found


def _form(tree: Any) -> Any:
    """Structure, shapes and types of arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _bring(array: Any) -> Any:
    return jax.numpy.asarray(np.asarray(array))


# Measuring blocks


def _inputs(blocks: list[_Block], example: Any) -> list[Any]:
    """Shapes and types of what each block takes."""
    value = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, example))
    inputs = []
    for block in blocks:
        inputs.append(value)
        try:
            value = jax.eval_shape(block.apply, block.parameters, value)
        except Exception as error:
            leaves = jax.tree.leaves(value)
            kinds = ", ".join(f"{one.dtype}[{','.join(map(str, one.shape))}]" for one in leaves)
            raise ConfigError(f"{block.name} cannot be applied to {kinds}: {error}") from error
    return inputs


def _measure(blocks: list[_Block], inputs: list[Any], devices: Sequence[jax.Device]) -> list[float]:
    """Seconds of each block on these devices, forward and backward."""
    known: dict[Hashable, float] = {}
    costs = []
    for block, given in zip(blocks, inputs, strict=True):
        structure, kinds = _form((block.parameters, given))
        key = (block.kind, structure, tuple(kinds))
        if key not in known:
            known[key] = _time_s(block, given, devices)
        costs.append(known[key])
    return costs


def _time_s(block: _Block, given: Any, devices: Sequence[jax.Device]) -> float:
    """Seconds of one block: the median of several repeats, once it is compiled and warm."""
    mesh = Mesh(np.array(devices), ("data",))
    whole, cut = NamedSharding(mesh, _partition()), NamedSharding(mesh, _partition("data"))

    def zeros(form: Any) -> Any:
        place = cut if form.ndim else whole
        return jax.device_put(np.zeros(form.shape, form.dtype), place)

    @jax.jit
    def both(parameters: Any, value: Any, gradient: Any) -> Any:
        made, back = jax.vjp(block.apply, parameters, value)
        gradients = jax.tree.leaves(back(gradient))
        return made, [one for one in gradients if one.dtype != jax.dtypes.float0]

    arguments = (
        jax.device_put(block.parameters, whole),
        jax.tree.map(zeros, given),
        jax.tree.map(zeros, jax.eval_shape(block.apply, block.parameters, given)),
    )

    def repeat_s() -> float:
        began = time.perf_counter()
        made: list[Any] = [both(*arguments) for _ in range(CALLS)]
        for leaf in jax.tree.leaves(made):
            leaf.block_until_ready()
        return (time.perf_counter() - began) / CALLS

    repeat_s()
    return statistics.median(repeat_s() for _ in range(REPEATS))
