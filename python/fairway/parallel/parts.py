"""One part of a model: its forward and backward pass and its optimizer, on its own devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fairway.errors import ConfigError
from fairway.parallel.blocks import AXIS, mapped

__all__ = ["Back", "Part", "Stage", "cut"]

_partition: Any = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Stage:
    """A pipeline stage.

    Attributes:
        function: computes its output from its parameters and its input, whose first axis is the
            batch. It may use ``jax.shard_map`` over the axis ``"data"`` of the devices on which it
            runs.
        devices: where it runs; the batch is sharded over them, parameters are replicated.
    """

    function: Callable[[Any, Any], Any]
    devices: Sequence[jax.Device]


def cut(batch: Any, count: int, what: str) -> list[Any]:
    """Cuts arrays along their first axis into equal parts.

    Args:
        batch: a tree of arrays.
        count: number of parts.
        what: name of the parts in errors.

    Raises:
        ConfigError: the arrays differ in size, or ``count`` does not divide it.
    """
    sizes = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or next(iter(sizes)) % count:
        raise ConfigError(f"a batch of {sorted(sizes)} cannot be cut into {count} {what}")
    size = next(iter(sizes)) // count
    return [
        jax.tree.map(lambda leaf, begin=turn * size: leaf[begin : begin + size], batch)
        for turn in range(count)
    ]


@dataclasses.dataclass(frozen=True)
class Back:
    """Residuals that the backward pass needs of the forward one, without its arguments.

    A jitted function that returns its arguments copies them: every weight, once a microbatch.

    Attributes:
        kept: residuals that are not arguments.
        places: for each residual, its index among the arguments, or None.
        tree: structure of the residuals: the function from an output's gradient to the arguments'.
    """

    kept: list[Any]
    places: tuple[int | None, ...]
    tree: Any

    @classmethod
    def of(cls, back: Callable[..., Any], arguments: Any) -> Back:
        """Removes the arguments from the function that :func:`jax.vjp` returned."""
        leaves, tree = jax.tree.flatten(back)
        known = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(arguments))}
        places = tuple(known.get(id(leaf)) for leaf in leaves)
        kept = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
        return cls(kept, places, tree)

    def restore(self, arguments: Any) -> Callable[..., Any]:
        """Restores the function that :func:`jax.vjp` returned."""
        leaves, kept = jax.tree.leaves(arguments), iter(self.kept)
        given = [next(kept) if place is None else leaves[place] for place in self.places]
        back: Callable[..., Any] = jax.tree.unflatten(self.tree, given)
        return back


jax.tree_util.register_dataclass(Back, ["kept"], ["places", "tree"])


class Part:
    """The jitted functions of one stage.

    Args:
        stage: what it computes, and where.
        first: whether it is the first stage, which needs no gradient of its input.
        loss: of its output and targets, if it is the last.
        optimizer: an optax optimizer.
        parts: number of parts of a batch over which its gradients and losses are summed.
        apart: whether gradients of weights are computed separately.

    Flat functions have all weights' gradients as one vector, to be communicated as one: sharded
    over the devices, padded with zeros.

    Attributes:
        whole: sharding of arrays replicated on its devices.
        parted: sharding of arrays cut over them along the first axis.
        apart: whether gradients of weights are computed separately.
    """

    def __init__(
        self,
        stage: Stage,
        first: bool,
        loss: Callable[[Any, Any], Any] | None,
        optimizer: Any,
        parts: int,
        apart: bool,
    ) -> None:
        mesh = Mesh(np.array(stage.devices), (AXIS,))
        self.whole = NamedSharding(mesh, _partition())
        self.parted = NamedSharding(mesh, _partition(AXIS))
        self.apart = apart
        function = mapped(stage.function, stage.devices)
        self._optimizer = optimizer

        def forward(parameters: Any, taken: Any, *target: Any) -> Any:
            def compute(parameters: Any, taken: Any) -> Any:
                made = function(parameters, taken)
                return made if loss is None else loss(made, *target)

            if first:
                made, back = jax.vjp(lambda p: compute(p, taken), parameters)
            else:
                made, back = jax.vjp(compute, parameters, taken)
            return made, Back.of(back, (parameters, taken, *target))

        def backward(back: Back, arguments: Any, gradient: Any) -> Any:
            gradient = jax.numpy.ones(()) if gradient is None else gradient
            gradients = back.restore(arguments)(gradient)
            return (*gradients, None) if first else gradients

        def update(parameters: Any, state: Any, gradients: Any) -> Any:
            gradients = jax.tree.map(lambda gradient: gradient / parts, gradients)
            changes, state = optimizer.update(gradients, state, parameters)
            return jax.tree.map(lambda p, change: p + change, parameters, changes), state

        def backward_flat(*given: Any) -> Any:
            gradients, before = backward(*given)
            flat, _ = ravel_pytree(gradients)
            return jax.numpy.pad(flat, (0, -flat.size % len(stage.devices))), before

        def update_flat(parameters: Any, state: Any, flat: Any) -> Any:
            length = sum(leaf.size for leaf in jax.tree.leaves(parameters))
            return update(parameters, state, ravel_pytree(parameters)[1](flat[:length]))

        def add(one: Any, other: Any) -> Any:
            return jax.tree.map(jax.numpy.add, one, other)

        self.forward = jax.jit(forward)
        self.backward = jax.jit(backward)
        self.backward_input = jax.jit(lambda *given: backward(*given)[1])
        self.backward_weights = jax.jit(lambda *given: backward(*given)[0])
        self.backward_flat = jax.jit(backward_flat, out_shardings=(self.parted, None))
        self.update = jax.jit(update, donate_argnums=(0, 1))
        self.update_flat = jax.jit(update_flat, donate_argnums=(0, 1))
        self.add = jax.jit(add, donate_argnums=0)
        self.mean = jax.jit(lambda total: total / parts)

    def place(self, parameters: Any) -> tuple[Any, Any]:
        """Copies its initial parameters to its devices; returns them and their optimizer state."""
        # A step donates them, and `device_put` would alias arrays that are already on one of the
        # devices.
        own = jax.tree.map(lambda leaf: jax.numpy.array(leaf, copy=True), parameters)
        placed = jax.device_put(own, self.whole)
        return placed, jax.device_put(self._optimizer.init(placed), self.whole)

    def place_piece(self, piece: Any) -> tuple[Any, Any]:
        """Shards a piece of its parameters (a vector) and its optimizer state over its devices."""
        placed = jax.device_put(piece, self.parted)

        def place(leaf: Any) -> Any:
            return jax.device_put(
                leaf, self.parted if np.shape(leaf) == piece.shape else self.whole
            )

        return placed, jax.tree.map(place, self._optimizer.init(placed))

    def bring(self, arrays: Any) -> Any:
        """Replicates arrays on its devices."""
        return jax.tree.map(lambda array: jax.device_put(array, self.whole), arrays)

    def take(self, arrays: Any) -> Any:
        """Transfers arrays to this stage's devices, sharded along the batch where they have one."""
        return jax.tree.map(
            lambda array: jax.device_put(array, self.parted if array.ndim else self.whole), arrays
        )
