"""Training one model on several islands, each of which holds a part of every parameter.

The model is cut into parts. The parameters of a part are gathered from all islands shortly before
they are used, while the part before it computes, in the forward pass and once more in the backward
pass; its gradients leave for where they are applied while that of the part before it goes on. So
an island holds its share of parameters and optimizer states, and two parts in whole.

Source: what ML engineers call FSDP (Zhao et al., PyTorch FSDP, VLDB 2023) and ZeRO-3; its
communication is a workload of SYNDICATE's (Table 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from fairway.errors import ConfigError
from fairway.exchanges import all_gather, reduce_scatter
from fairway.parallel.parts import Part, Stage, cut
from fairway.parallel.pipeline import State
from fairway.tracing import Wrapped, program

__all__ = ["Sharded"]

Apply = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A part's parameters as one vector, of which each island has an equal piece.

    Attributes:
        restore: what makes parameters of the vector.
        length: its elements.
        piece: elements of each island's piece; behind the last element there are zeros.
    """

    restore: Callable[[Any], Any]
    length: int
    piece: int

    @classmethod
    def of(cls, parameters: Any, islands: int, devices: int) -> tuple[_Layout, list[Any]]:
        """The layout of these parameters over islands of so many devices, and the pieces."""
        flat, restore = ravel_pytree(jax.device_get(parameters))
        piece = -(-flat.size // (islands * devices)) * devices
        padded = np.pad(np.asarray(flat), (0, islands * piece - flat.size))
        return cls(restore, flat.size, piece), np.split(padded, islands)

    def whole(self, pieces: Any) -> Any:
        """The parameters, of [islands, piece] elements."""
        return self.restore(pieces.reshape(-1)[: self.length])


class Sharded:
    """A model that several islands share, its loss and its optimizer.

    Args:
        functions: the parts of the model in order, each its output from its parameters and its
            input, whose first axis is the batch; as the stages of a split have them.
        islands: devices of each island, as many on all; its part of a batch and its piece of the
            parameters are cut over them.
        loss: mean loss of the last part's output and targets, a scalar.
        optimizer: as optax makes them; it must treat each element on its own, as Adam does, and
            not as a matrix or by the norm of all.

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
        sizes = sorted({len(devices) for devices in islands})
        if not functions or len(sizes) != 1:
            raise ConfigError(
                f"parameters cannot be sharded: there are {len(functions)} parts and islands of "
                f"{sizes} devices; expected at least one part, and islands of one size"
            )
        self._functions = list(functions)
        self._islands = [list(devices) for devices in islands]
        self._loss = loss
        self._optimizer = optimizer
        self._layouts: list[_Layout] = []
        self._groups: list[list[Part]] = []
        self._step: Wrapped = program(self._trace)

    def init(self, parameters: Sequence[Any]) -> list[State]:
        """Places each island's pieces of the parameters and makes the optimizer's state for them.

        Raises:
            ConfigError: there are not as many parameters as parts.
        """
        if len(parameters) != len(self._functions):
            count = len(self._functions)
            raise ConfigError(f"there are {count} parts and parameters for {len(parameters)}")
        laid = [_Layout.of(own, len(self._islands), len(self._islands[0])) for own in parameters]
        self._layouts = [layout for layout, _ in laid]
        self._groups = [self._parts(devices) for devices in self._islands]
        self._step = program(self._trace)
        states = []
        for island, parts in enumerate(self._groups):
            placed = [
                part.place_piece(pieces[island])
                for part, (_, pieces) in zip(parts, laid, strict=True)
            ]
            states.append(State([one for one, _ in placed], [one for _, one in placed]))
        return states

    def _parts(self, devices: Sequence[jax.Device]) -> list[Part]:
        def taking_pieces(function: Apply, layout: _Layout) -> Apply:
            return lambda pieces, value: function(layout.whole(pieces), value)

        last = len(self._functions) - 1
        return [
            Part(
                Stage(taking_pieces(function, layout), devices),
                number == 0,
                self._loss if number == last else None,
                self._optimizer,
                len(self._islands),
                False,
            )
            for number, (function, layout) in enumerate(
                zip(self._functions, self._layouts, strict=True)
            )
        ]

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
        count = len(self._islands)
        taken = cut(inputs, count, "parts"), cut(targets, count, "parts")
        result: tuple[list[State], jax.Array] = self._step(states, *taken)
        return result

    def parameters(self, states: Sequence[State]) -> list[Any]:
        """The parameters of all parts in whole, in this process's memory."""
        pieces = zip(*(state.parameters for state in states), strict=True)
        return [
            layout.whole(np.stack([np.asarray(one) for one in own]))
            for layout, own in zip(self._layouts, pieces, strict=True)
        ]

    def _gather(self, states: list[State], number: int) -> list[Any]:
        """A part's parameters on all islands."""
        held = [state.parameters[number] for state in states]
        return all_gather(held, self._places(number))

    def _places(self, number: int) -> list[Any]:
        return [parts[number].parted for parts in self._groups]

    def _trace(
        self, states: list[State], inputs: list[Any], targets: list[Any]
    ) -> tuple[list[State], Any]:
        islands, last = range(len(self._groups)), len(self._layouts) - 1
        values = [parts[0].take(own) for parts, own in zip(self._groups, inputs, strict=True)]
        back: dict[tuple[int, int], Any] = {}
        whole = self._gather(states, 0)
        for number in range(last + 1):
            # What comes next is on its way while this computes.
            following = self._gather(states, number + 1) if number < last else whole
            for island in islands:
                part = self._groups[island][number]
                extra = [part.take(targets[island])] if number == last else []
                given = (values[island], *extra)
                values[island], kept = part.forward(whole[island], *given)
                back[island, number] = kept, given
            whole = following
        gradients: list[Any] = [None] * len(islands)
        summed: dict[int, list[Any]] = {}
        for number in range(last, -1, -1):
            following = self._gather(states, number - 1) if number else whole
            made = []
            for island in islands:
                kept, given = back.pop((island, number))
                part = self._groups[island][number]
                one, gradients[island] = part.backward(
                    kept, (whole[island], *given), gradients[island]
                )
                made.append(one)
            summed[number] = reduce_scatter(made, self._places(number))
            whole = following
        # What is summed waits for other islands, so it comes when nothing else is left to do.
        new = [State([None] * (last + 1), [None] * (last + 1)) for _ in islands]
        for number in range(last, -1, -1):
            for island in islands:
                state = states[island]
                new[island].parameters[number], new[island].optimizer[number] = self._groups[
                    island
                ][number].update(
                    state.parameters[number], state.optimizer[number], summed[number][island]
                )
        first = self._groups[0][-1]
        total = values[0]
        for other in values[1:]:
            total = first.add(total, first.bring(other))
        return new, first.mean(total)
