"""Fully sharded data parallelism: each of several islands holds a shard of every parameter.

The model is cut into parts. The parameters of a part are all-gathered shortly before use, while the
part before it computes (prefetch), in the forward pass and again in the backward pass; the
reduce-scatter of its gradients overlaps the backward pass of the part before it, but is issued
behind the parameters that are needed next. So an island holds its shard of parameters and optimizer
states, and at most three whole parts.

Source: FSDP (Zhao et al., PyTorch FSDP, VLDB 2023) and ZeRO-3; its communication is a workload of
SYNDICATE's (Table 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from fairway.exchanges import all_gather, reduce_scatter
from fairway.parallel.parts import Part
from fairway.parallel.pipeline import State
from fairway.parallel.replicas import Apply, DataParallel

__all__ = ["Sharded"]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A part's parameters as one vector, of which each island has an equal piece.

    Attributes:
        restore: makes parameters of the vector.
        length: number of elements before the zero padding.
    """

    restore: Callable[[Any], Any]
    length: int

    @classmethod
    def of(cls, parameters: Any, islands: int, devices: int) -> tuple[_Layout, list[Any]]:
        """Returns the layout of parameters over islands of ``devices`` devices, and the pieces."""
        flat, restore = ravel_pytree(jax.device_get(parameters))
        piece = -(-flat.size // (islands * devices)) * devices
        padded = np.pad(np.asarray(flat), (0, islands * piece - flat.size))
        return cls(restore, flat.size), np.split(padded, islands)

    def whole(self, pieces: Any) -> Any:
        """Restores the parameters from [islands, piece] elements."""
        return self.restore(pieces.reshape(-1)[: self.length])

    def taking_pieces(self, function: Apply) -> Apply:
        """Wraps a part of the model so that it takes pieces as parameters."""
        return lambda pieces, value: function(self.whole(pieces), value)


class Sharded(DataParallel):
    """A model that is sharded over several islands; see :class:`DataParallel`.

    An island's piece of the parameters is sharded over its devices. The optimizer must be
    elementwise, as Adam is, and not use matrices or a global norm.
    """

    _layouts: Sequence[_Layout] = ()

    def parameters(self, states: Sequence[State]) -> list[Any]:
        """Returns the whole parameters of all parts, in this process's memory."""
        pieces = zip(*(state.parameters for state in states), strict=True)
        return [
            layout.whole(np.stack([np.asarray(one) for one in own]))
            for layout, own in zip(self._layouts, pieces, strict=True)
        ]

    def _place(self, parameters: Sequence[Any]) -> list[list[tuple[Any, Any]]]:
        laid = [_Layout.of(own, len(self._islands), len(self._islands[0])) for own in parameters]
        self._layouts = [layout for layout, _ in laid]
        functions = [
            layout.taking_pieces(function)
            for layout, function in zip(self._layouts, self._functions, strict=True)
        ]
        self._groups = [self._parts(functions, devices) for devices in self._islands]
        return [
            [
                part.place_piece(pieces[island])
                for part, (_, pieces) in zip(parts, laid, strict=True)
            ]
            for island, parts in enumerate(self._groups)
        ]

    def _whole(self, states: list[State], number: int) -> list[Any]:
        held = [state.parameters[number] for state in states]
        return all_gather(held, [parts[number].parted for parts in self._groups])

    def _backward(self, part: Part) -> Callable[..., tuple[Any, Any]]:
        return part.backward

    def _add_up(self, gradients: list[Any], parts: list[Part]) -> list[Any]:
        return reduce_scatter(gradients, [part.parted for part in parts])

    def _update(self, part: Part) -> Callable[..., tuple[Any, Any]]:
        return part.update
