"""Training one model on several islands at once, each with its part of every batch.

The model is cut into parts, and an island's gradients of a part leave for the others as soon as its
backward pass has made them, while that of the parts before it goes on. Only those of the first part
have nothing to hide behind.

Source: PATHWAYS §5.3 (Figure 12). Differs from the paper: islands do not exchange whole gradients;
those of a part are one vector, whose sum is one collective, the same everywhere to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from fairway.errors import ConfigError
from fairway.exchanges import all_reduce
from fairway.parallel.parts import Part, Stage, cut
from fairway.parallel.pipeline import State
from fairway.tracing import Wrapped, program

__all__ = ["Replicas"]

Apply = Callable[[Any, Any], Any]


class Replicas:
    """A model that several islands hold, its loss and its optimizer.

    Args:
        functions: the parts of the model in order, each its output from its parameters and its
            input, whose first axis is the batch; as the stages of a split have them.
        islands: devices of each replica; an island's part of a batch is cut over them.
        loss: mean loss of the last part's output and targets, a scalar.
        optimizer: as optax makes them.

    Raises:
        ConfigError: there is no part or no island.
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
                f"replicas need parts and islands; got {len(functions)} and {len(islands)}"
            )
        last = len(functions) - 1
        self._replicas = [
            [
                Part(
                    Stage(function, devices),
                    number == 0,
                    loss if number == last else None,
                    optimizer,
                    len(islands),
                    False,
                )
                for number, function in enumerate(functions)
            ]
            for devices in islands
        ]
        self._step: Wrapped = program(self._trace)

    def init(self, parameters: Sequence[Any]) -> list[State]:
        """Places the parameters of all parts on each island and makes the optimizer's state.

        Raises:
            ConfigError: there are not as many parameters as parts.
        """
        parts = len(self._replicas[0])
        if len(parameters) != parts:
            raise ConfigError(f"there are {parts} parts and parameters for {len(parameters)}")
        states = []
        for replica in self._replicas:
            placed = [part.place(own) for part, own in zip(replica, parameters, strict=True)]
            states.append(State([one for one, _ in placed], [one for _, one in placed]))
        return states

    def step(self, states: list[State], inputs: Any, targets: Any) -> tuple[list[State], jax.Array]:
        """One step of training; the old states are used up.

        Args:
            states: of :meth:`init` or of the step before, one for each island.
            inputs: arrays whose first axis is the batch.
            targets: what the loss compares the model's output with; the same batch.

        Returns:
            The new states, and the mean loss on the first island's devices.

        Raises:
            ConfigError: the batch cannot be cut into as many parts as there are islands.
        """
        count = len(self._replicas)
        taken = cut(inputs, count, "parts"), cut(targets, count, "parts")
        result: tuple[list[State], jax.Array] = self._step(states, *taken)
        return result

    def _trace(
        self, states: list[State], inputs: list[Any], targets: list[Any]
    ) -> tuple[list[State], Any]:
        replicas, parts = self._replicas, range(len(self._replicas[0]))
        back: dict[tuple[int, int], Any] = {}
        gradients: list[Any] = [None] * len(replicas)
        losses = []
        for island, replica in enumerate(replicas):
            value = replica[0].take(inputs[island])
            for number in parts:
                part = replica[number]
                extra = [part.take(targets[island])] if number == parts[-1] else []
                arguments = (states[island].parameters[number], value, *extra)
                value, kept = part.forward(*arguments)
                back[island, number] = kept, arguments
            losses.append(value)
        summed: dict[int, list[Any]] = {}
        for number in reversed(parts):
            made = []
            for island, replica in enumerate(replicas):
                part = replica[number]
                one, gradients[island] = part.backward_flat(
                    *back.pop((island, number)), gradients[island]
                )
                made.append(one)
            summed[number] = all_reduce(made, [replica[number].whole for replica in replicas])
        # What is summed waits for other islands, so it comes when nothing else is left to do.
        new = [State([None] * len(parts), [None] * len(parts)) for _ in replicas]
        for number in reversed(parts):
            for island, replica in enumerate(replicas):
                part, state = replica[number], states[island]
                total = summed[number][island]
                new[island].parameters[number], new[island].optimizer[number] = part.update_flat(
                    state.parameters[number], state.optimizer[number], total
                )
        first = replicas[0][-1]
        total = losses[0]
        for other in losses[1:]:
            total = first.add(total, first.bring(other))
        return new, first.mean(total)
