"""Data parallelism: trains one model on several islands, each with its part of every batch.

The model is cut into parts (buckets), and the all-reduce of a part's gradients is issued as soon as
its backward pass has produced them, so that it overlaps the backward pass of the parts before it.
Only the all-reduce of the first part is exposed communication.

Source: PATHWAYS §5.3 (Figure 12). Differs from the paper: islands do not exchange whole gradients;
those of a part are one vector, whose sum is one collective, bitwise identical on all islands.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fairway.errors import ConfigError
from fairway.exchanges import all_reduce
from fairway.parallel.parts import Part, Stage, cut
from fairway.parallel.pipeline import State
from fairway.tracing import Wrapped, program

__all__ = ["AHEAD", "Apply", "DataParallel", "Replicas"]

AHEAD = 2
"""Parts that are prefetched (gathered) in the backward pass while another one computes."""

Apply = Callable[[Any, Any], Any]
"""Computes the output of a part of a model from its parameters and its input."""


class DataParallel(abc.ABC):
    """A model that several islands train, its loss and its optimizer.

    Subclasses define what an island holds of it.

    Args:
        functions: parts of the model in order, each of which computes its output from its
            parameters and its input, whose first axis is the batch; as the stages of a split.
        islands: devices of each island, the same number on all; an island's part of a batch is
            sharded over them.
        loss: mean loss of the last part's output and targets, a scalar.
        optimizer: an optax optimizer.

    Raises:
        ConfigError: there is no part or no island, or islands differ in size.
    """

    def __init__(
        self,
        functions: Sequence[Apply],
        islands: Sequence[Sequence[jax.Device]],
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
    ) -> None:
        if not functions or not islands:
            raise ConfigError(
                f"training needs parts and islands; got {len(functions)} and {len(islands)}"
            )
        sizes = sorted({len(devices) for devices in islands})
        if len(sizes) > 1:
            raise ConfigError(f"training is on islands of {sizes} devices; expected one size")
        self._functions = list(functions)
        self._islands = [list(devices) for devices in islands]
        self._loss = loss
        self._optimizer = optimizer
        self._groups: list[list[Part]] = []
        self._step: Wrapped = program(self._trace)

    @abc.abstractmethod
    def _place(self, parameters: Sequence[Any]) -> list[list[tuple[Any, Any]]]:
        """Makes the parts; returns what each island holds of each, and its optimizer state."""

    @abc.abstractmethod
    def _whole(self, states: list[State], number: int) -> list[Any]:
        """Returns a part's parameters as each island computes with them."""

    @abc.abstractmethod
    def _backward(self, part: Part) -> Callable[..., tuple[Any, Any]]:
        """Returns a part's backward pass."""

    @abc.abstractmethod
    def _add_up(self, gradients: list[Any], parts: list[Part]) -> list[Any]:
        """Reduces a part's gradients; returns the sums that each island applies."""

    @abc.abstractmethod
    def _update(self, part: Part) -> Callable[..., tuple[Any, Any]]:
        """Returns the function that applies gradients to what an island holds."""

    def init(self, parameters: Sequence[Any]) -> list[State]:
        """Places the parameters of all parts and initializes the optimizer state.

        Raises:
            ConfigError: there are not as many parameters as parts.
        """
        count = len(self._functions)
        if len(parameters) != count:
            raise ConfigError(f"there are {count} parts and parameters for {len(parameters)}")
        placed = self._place(parameters)
        self._step = program(self._trace)
        return [State([held for held, _ in own], [state for _, state in own]) for own in placed]

    def step(self, states: list[State], inputs: Any, targets: Any) -> tuple[list[State], jax.Array]:
        """Runs one training step; donates the old states.

        Args:
            states: from :meth:`init` or the preceding step, one for each island.
            inputs: arrays whose first axis is the batch.
            targets: what the loss compares the model's output with; the same batch.

        Returns:
            The new states, and the mean loss on the first island's devices.

        Raises:
            ConfigError: the batch cannot be cut into as many parts as there are islands.
        """
        count = len(self._islands)
        taken = cut(inputs, count, "parts"), cut(targets, count, "parts")
        result: tuple[list[State], jax.Array] = self._step(states, *taken)
        return result

    def _parts(self, functions: Sequence[Apply], devices: Sequence[jax.Device]) -> list[Part]:
        """Makes the parts of the model on one island."""
        last = len(functions) - 1
        return [
            Part(
                Stage(function, devices),
                number == 0,
                self._loss if number == last else None,
                self._optimizer,
                len(self._islands),
                False,
            )
            for number, function in enumerate(functions)
        ]

    def _trace(
        self, states: list[State], inputs: list[Any], targets: list[Any]
    ) -> tuple[list[State], Any]:
        columns = list(zip(*self._groups, strict=True))  # each part on all islands
        last = len(columns) - 1
        values = [part.take(own) for part, own in zip(columns[0], inputs, strict=True)]
        back: dict[int, list[tuple[Any, Any]]] = {}
        whole = self._whole(states, 0)
        for number, parts in enumerate(columns):
            # Prefetch: the next part's parameters are in transfer while this one computes.
            following = self._whole(states, number + 1) if number < last else whole
            back[number] = []
            for island, part in enumerate(parts):
                extra = [part.take(targets[island])] if number == last else []
                given = (values[island], *extra)
                values[island], kept = part.forward(whole[island], *given)
                back[number].append((kept, given))
            whole = following
        gradients: list[Any] = [None] * len(values)
        summed: dict[int, list[Any]] = {}
        # The last part is still whole from the forward pass.
        wholes = {last: whole}
        others = iter(range(last - 1, -1, -1))
        for number in range(last, -1, -1):
            # Issued before the reductions of this part, which are not needed as soon.
            for other in itertools.islice(others, AHEAD + 1 - len(wholes)):
                wholes[other] = self._whole(states, other)
            whole = wholes.pop(number)
            made = []
            for island, (part, (kept, given)) in enumerate(
                zip(columns[number], back.pop(number), strict=True)
            ):
                arguments = (whole[island], *given)
                one, gradients[island] = self._backward(part)(kept, arguments, gradients[island])
                made.append(one)
            summed[number] = self._add_up(made, list(columns[number]))
        # Updates wait for other islands, so they come last, when all else is issued.
        new = [State([None] * len(columns), [None] * len(columns)) for _ in values]
        for number in range(last, -1, -1):
            for part, old, state, total in zip(
                columns[number], states, new, summed[number], strict=True
            ):
                held = old.parameters[number], old.optimizer[number]
                state.parameters[number], state.optimizer[number] = self._update(part)(*held, total)
        first = columns[-1][0]
        total = values[0]
        for other in values[1:]:
            total = first.add(total, first.bring(other))
        return new, first.mean(total)


class Replicas(DataParallel):
    """A model of which each island holds a replica; see :class:`DataParallel`."""

    def _place(self, parameters: Sequence[Any]) -> list[list[tuple[Any, Any]]]:
        self._groups = [self._parts(self._functions, devices) for devices in self._islands]
        return [
            [part.place(own) for part, own in zip(parts, parameters, strict=True)]
            for parts in self._groups
        ]

    def _whole(self, states: list[State], number: int) -> list[Any]:
        return [state.parameters[number] for state in states]

    def _backward(self, part: Part) -> Callable[..., tuple[Any, Any]]:
        return part.backward_flat

    def _add_up(self, gradients: list[Any], parts: list[Part]) -> list[Any]:
        # Each device's shard is reduced; the devices of an island gather the result.
        return all_reduce(gradients, [part.parted for part in parts])

    def _update(self, part: Part) -> Callable[..., tuple[Any, Any]]:
        return part.update_flat
