"""One part of a model: its forward and backward pass and its optimizer, on devices of its own."""

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
    """A part of a model.

    Attributes:
        function: its output from its parameters and its input, whose first axis is the batch. It
            may use ``jax.shard_map`` over the axis ``"data"`` of whatever devices it runs on.
        devices: where it runs; the batch is cut over them, parameters are on each.
    """

    function: Callable[[Any, Any], Any]
    devices: Sequence[jax.Device]


def cut(batch: Any, count: int, what: str) -> list[Any]:
    """Cuts arrays along their first axis into equal parts.

    Args:
        batch: a tree of arrays.
        count: how many parts.
        what: what they are called.

    Raises:
        ConfigError: they cannot be cut so.
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
    """What a backward pass needs of the forward one, besides its arguments.

    A function that returns its arguments copies them: every weight, once a microbatch.

    Attributes:
        kept: what is no argument.
        places: of each array that is needed, its place among the arguments, if it is one.
        tree: what the arrays make: the function from an output's gradient to the arguments'.
    """

    kept: list[Any]
    places: tuple[int | None, ...]
    tree: Any

    @classmethod
    def of(cls, back: Callable[..., Any], arguments: Any) -> Back:
        """Takes the arguments out of what :func:`jax.vjp` returned."""
        leaves, tree = jax.tree.flatten(back)
        known = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(arguments))}
        places = tuple(known.get(id(leaf)) for leaf in leaves)
        kept = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
        return cls(kept, places, tree)

    def restore(self, arguments: Any) -> Callable[..., Any]:
        """What :func:`jax.vjp` returned."""
        leaves, kept = jax.tree.leaves(arguments), iter(self.kept)
        given = [next(kept) if place is None else leaves[place] for place in self.places]
        back: Callable[..., Any] = jax.tree.unflatten(self.tree, given)
        return back


jax.tree_util.register_dataclass(Back, ["kept"], ["places", "tree"])


class Part:
    """The jitted functions of one stage.

    Args:
        stage: what it computes, and where.
        first: is it the first, which nobody wants the gradient of the batch from?
        loss: of its output and targets, if it is the last.
        optimizer: as optax makes them.
        parts: how many parts of a batch its gradients and losses are summed over.
        apart: are the gradients of weights computed on their own?

    What is called flat has all weights' gradients as one vector, to be moved in one piece: cut over
    the devices, with zeros behind.

    Attributes:
        whole: the sharding of what is on each of its devices.
        parted: that of what is cut over them along the first axis.
        apart: are the gradients of weights computed on their own?
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
        """Its first parameters on its devices, and the optimizer's state for them."""
        # A step uses them up, and `device_put` would share what already lies on one of the devices.
        own = jax.tree.map(lambda leaf: jax.numpy.array(leaf, copy=True), parameters)
        placed = jax.device_put(own, self.whole)
        return placed, jax.device_put(self._optimizer.init(placed), self.whole)

    def place_piece(self, piece: Any) -> tuple[Any, Any]:
        """A piece of its parameters, one vector, over its devices; the optimizer's state for it."""
        placed = jax.device_put(piece, self.parted)

        def place(leaf: Any) -> Any:
            return jax.device_put(
                leaf, self.parted if np.shape(leaf) == piece.shape else self.whole
            )

        return placed, jax.tree.map(place, self._optimizer.init(placed))

    def bring(self, arrays: Any) -> Any:
        """Arrays whole on each of its devices."""
        return jax.tree.map(lambda array: jax.device_put(array, self.whole), arrays)

    def take(self, arrays: Any) -> Any:
        """Arrays on this stage's devices, cut along the batch where they have one."""
        return jax.tree.map(
            lambda array: jax.device_put(array, self.parted if array.ndim else self.whole), arrays
        )
