"""What a client and its hosts agree on about inputs: which host makes which shard, and how.

Nothing here needs JAX, so that an input function may be imported without it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Self

__all__ = ["TARGET", "Description", "Shard"]

TARGET = "fairway_input"
"""Target of the custom call that yields the next batch of an input."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of every batch that one host makes.

    Hosts that make the same part get the same shard; what they make must be equal.

    Attributes:
        index: number of the part along the first axis of the batch, less than ``count``.
        count: parts of equal size along that axis. Both are of the leaf with the most parts.
        rows: the part along that axis.
        slices: the part of each leaf along each of its axes, by the leaf's path: ``"tokens"`` in
            ``{"tokens": ...}``, ``"0/x"`` in ``[{"x": ...}]``, ``""`` of a lone array. It is the
            smallest contiguous part that holds all that the host's devices need.
    """

    index: int
    count: int
    rows: slice
    slices: dict[str, tuple[slice, ...]]


@dataclasses.dataclass(frozen=True)
class Description:
    """Describes how hosts make the batches of an input.

    Attributes:
        number: random ID of the input, to distinguish it from those of other clients.
        function: ``package.module:name`` of the function that returns an iterable.
        config: its keyword arguments.
        paths: paths of the leaves of a batch, in their order.
        prefetch: batches that hosts make ahead.
    """

    number: int
    function: str
    config: dict[str, Any]
    paths: list[str]
    prefetch: int

    def text(self) -> str:
        """Serializes it, to be embedded in a program.

        Raises:
            TypeError: a value of the configuration cannot be expressed in JSON.
            ValueError: a number of the configuration is infinite or NaN.
        """
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def read(cls, text: str) -> Self:
        """Parses a description that :meth:`text` wrote.

        Raises:
            ValueError: the text is malformed.
        """
        try:
            made = cls(**json.loads(text))
            whole = [made.number, made.prefetch]
            texts = [made.function, *made.paths]
            right = all(type(number) is int and number > 0 for number in whole)
            right = right and all(isinstance(one, str) for one in texts)
            if right and made.number < 1 << 63 and isinstance(made.config, dict):
                return made
        except TypeError as error:
            raise ValueError(f"not the description of an input: {error}") from error
        raise ValueError("not the description of an input")
