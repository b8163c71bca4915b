"""Splits a flax model into pipeline stages, balanced by the time of its blocks.

A model is a sequence of blocks: the first takes the batch, each other the output of the one before.
Blocks are measured on the devices, and each stage is a contiguous range, cut so that the slowest
stage is as fast as possible.

Differs from PATHWAYS §5.3, where every stage has the same number of layers: blocks need not be
alike, so embedding and head are blocks too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fairway.errors import ConfigError
from fairway.parallel.blocks import (
    AXIS,
    Block,
    bring,
    form,
    in_row,
    inputs_of,
    mapped,
    read_blocks,
    time_s,
)
from fairway.parallel.parts import Stage

__all__ = ["Split", "borders", "split"]

REPEATS = 5

_partition: Any = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Split:
    """A model in stages.

    Attributes:
        stages: as :class:`fairway.parallel.Pipeline` takes them.
        parameters: of each stage a list, with those of each of its blocks; for ``Pipeline.init``.
        borders: stage ``s`` has the blocks from ``borders[s]`` to ``borders[s + 1] - 1``.
        costs: forward and backward time of each block: seconds, unless they were given.
    """

    stages: list[Stage]
    parameters: list[list[Any]]
    borders: list[int]
    costs: list[float]
    _put_back: Callable[[list[Any]], Any] = dataclasses.field(repr=False)

    @property
    def stage_costs(self) -> list[float]:
        """Cost of each stage, in the unit of :attr:`costs`."""
        return [sum(self.costs[slice(*pair)]) for pair in itertools.pairwise(self.borders)]

    def merge(self, parameters: Sequence[Sequence[Any]]) -> Any:
        """Puts trained parameters back into the model, on this process's default device.

        Args:
            parameters: of each stage, as in ``State.parameters``.

        Returns:
            The nnx model that was split, updated; for linen modules, the variables of each.

        Raises:
            ConfigError: they are not of this model.
        """
        given = [list(stage) for stage in parameters]
        if form(given) != form(self.parameters):
            raise ConfigError(
                "these are not parameters of the model that was split; give `parameters` of the "
                "state that its pipeline returned"
            )
        blocks = itertools.chain.from_iterable(given)
        return self._put_back([jax.tree.map(bring, block) for block in blocks])


def split(
    model: Any,
    devices: Sequence[Sequence[jax.Device]],
    example: Any,
    *,
    variables: Sequence[Any] | None = None,
    costs: Sequence[float] | None = None,
    rounds: int = 1,
) -> Split:
    """Splits a model into stages so that the slowest stage is as fast as possible.

    Blocks that are alike are measured once, forward and backward, on the devices of the first
    worker.

    Args:
        model: an ``nnx.Sequential``, or a list of nnx modules and functions, or of linen modules.
        devices: of each worker; see :class:`fairway.parallel.Stage`.
        example: input of one microbatch; only its shape and type matter.
        variables: of each linen module, as its ``init`` returned them.
        costs: cost of each block in any unit; by default it is measured.
        rounds: stages of each worker, as in :class:`fairway.parallel.Pipeline`.

    Raises:
        ConfigError: the model is no sequence of blocks, there are fewer of them than stages, or a
            block does not take the output of the one before, shares parameters with another, or has
            state that is not trained: batch statistics, random numbers.

    Example:
        >>> parts = split(model, [[d] for d in jax.devices()], tokens)
        >>> pipeline = Pipeline(parts.stages, loss, optimizer, microbatches=8)
        >>> state = pipeline.init(parts.parameters)
    """
    blocks, put_back = read_blocks(model, variables)
    workers = len(devices)
    inputs = inputs_of(blocks, example, devices[0] if workers else ())
    if costs is None and workers:
        costs = _measure(blocks, inputs, devices[0])
    found = [float(cost) for cost in costs or ()]
    if len(found) != len(blocks):
        raise ConfigError(f"there are {len(blocks)} blocks and costs for {len(found)}")
    cuts = borders(found, workers * rounds)
    parts = [in_row(blocks[slice(*pair)]) for pair in itertools.pairwise(cuts)]
    return Split(
        [Stage(part.apply, devices[number % workers]) for number, part in enumerate(parts)],
        [part.parameters for part in parts],
        cuts,
        found,
        put_back,
    )


def borders(costs: Sequence[float], stages: int) -> list[int]:
    """Cuts a sequence into contiguous stages that minimize the cost of the largest stage.

    Deterministic among equal cuts. Dynamic programming in O(``stages`` · ``len(costs)`` ²).

    Args:
        costs: of each block.
        stages: number of stages, each of at least one block.

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
    # For each prefix of the blocks: the largest stage's cost, and where the last stage begins.
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


# Measuring blocks


def _measure(blocks: list[Block], inputs: list[Any], devices: Sequence[jax.Device]) -> list[float]:
    """Seconds of each block on these devices, forward and backward."""
    known: dict[Hashable, float] = {}
    costs = []
    for block, given in zip(blocks, inputs, strict=True):
        structure, kinds = form((block.parameters, given))
        key = (block.kind, structure, tuple(kinds))
        if key not in known:
            known[key] = _block_s(block, given, devices)
        costs.append(known[key])
    return costs


def _block_s(block: Block, given: Any, devices: Sequence[jax.Device]) -> float:
    """Seconds of one block, forward and backward."""
    mesh = Mesh(np.array(devices), (AXIS,))
    whole, cut = NamedSharding(mesh, _partition()), NamedSharding(mesh, _partition(AXIS))

    apply = mapped(block.apply, devices)

    def zeros(form: Any) -> Any:
        place = cut if form.ndim else whole
        return jax.device_put(np.zeros(form.shape, form.dtype), place)

    @jax.jit
    def both(parameters: Any, value: Any, gradient: Any) -> Any:
        made, back = jax.vjp(apply, parameters, value)
        gradients = jax.tree.leaves(back(gradient))
        return made, [one for one in gradients if one.dtype != jax.dtypes.float0]

    arguments = (
        jax.device_put(block.parameters, whole),
        jax.tree.map(zeros, given),
        jax.tree.map(zeros, jax.eval_shape(apply, block.parameters, given)),
    )

    return time_s(lambda: both(*arguments), REPEATS)
