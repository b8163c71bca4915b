"""Values that cross between islands as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fairway.host.elements import dtype_of
from fairway.host.partition import Crossing
from fairway.host.teams import Elements

__all__ = ["Bundle", "Values"]

Values = dict[int, Elements]
"""The part of one value on each local device position."""
ALIGNMENT = 64
"""Alignment in bytes of memory that devices take without a copy."""


class Bundle:
    """Values that cross as one: rows of their elements, one after another.

    Attributes:
        elements: number of elements of each device.
        results: shape of each device's shard of each result.

    Args:
        crossing: the crossing.
        count: number of devices that communicate in a group.
    """

    def __init__(self, crossing: Crossing, count: int) -> None:
        parts = crossing.kind in ("all_to_all", "scatter")
        self._rows = count if parts else 1
        self._contents = crossing.contents
        sizes = [int(np.prod(shape, dtype=np.int64)) // self._rows for shape in crossing.shapes]
        step = max(1, ALIGNMENT // dtype_of(crossing.dtype).itemsize)
        is_one = len(sizes) == 1
        widths = [size if is_one else -(-size // step) * step for size in sizes]
        ends = [int(end) for end in np.cumsum([0, *widths])]
        self._places = [*zip(ends, sizes, strict=False)]
        self._width = ends[-1]
        self.elements = self._rows * self._width
        rows = {"gather": count, "scatter": 1}.get(crossing.kind, self._rows)
        self._rows_after = rows
        self.results: list[tuple[int, ...]] = []
        for shape in crossing.shapes:
            if crossing.kind == "gather":
                self.results.append((count, *shape))
            else:
                self.results.append((1, *shape[1:]) if crossing.kind == "scatter" else (*shape,))

    def joined(self, values: Sequence[Values]) -> Values:
        """Returns one value of each device, of the elements of all."""
        if len(values) == 1:
            return {at: held.reshape(self._rows, -1) for at, held in values[0].items()}
        joined: Values = {}
        copies: dict[int, Elements] = {}
        for at in values[0]:
            held = [value[at] for value in values]
            key = self._contents[at]
            if key not in copies:
                copies[key] = np.zeros((self._rows, self._width), held[0].dtype)
                for one, (start, size) in zip(held, self._places, strict=True):
                    copies[key][:, start : start + size] = one.reshape(self._rows, -1)
            joined[at] = copies[key]
        return joined

    def parted(self, value: Values) -> list[Values]:
        """Returns the result of each value."""
        results: list[Values] = [{} for _ in self._places]
        for at, held in value.items():
            rows = held.reshape(self._rows_after, -1)
            for result, shape, (start, size) in zip(
                results, self.results, self._places, strict=True
            ):
                result[at] = rows[:, start : start + size].reshape(shape)
        return results
