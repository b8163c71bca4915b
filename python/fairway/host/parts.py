"""Computes which part of each batch of an input a host makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from fairway.host.elements import dtype_of
from fairway.host.messages import OutputSpec, Tiles
from fairway.host.programs import shard_shape
from fairway.shards import Shard

__all__ = ["BatchPart", "part_of", "shard_of"]


@dataclasses.dataclass(frozen=True)
class BatchPart:
    """This host's part of one leaf.

    Attributes:
        path: path of the leaf.
        dtype: its element type.
        extent: extent of the whole leaf along its first axis; 1 if it has none.
        box: region of the part in the leaf.
        regions: region of each device's shard, within the part.
        shard: shape of each shard.
        memory: memory kind of the result.
    """

    path: str
    dtype: np.dtype[Any]
    extent: int
    box: tuple[slice, ...]
    regions: list[tuple[slice, ...]]
    shard: tuple[int, ...]
    memory: str | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(axis.stop - axis.start for axis in self.box)

    @property
    def count(self) -> int:
        """Number of such parts along the first axis."""
        return self.extent // max(self.shape[0], 1) if self.shape else 1


def part_of(
    path: str,
    output: OutputSpec,
    positions: Sequence[int],
) -> BatchPart:
    """Returns a host's part of a leaf: the smallest box that contains its devices' shards.

    Along the first axis it is extended to be one of several equal parts.

    Args:
        path: path of the leaf.
        output: the result.
        positions: positions of the host's devices in the sharding.
    """
    shape, cut = tuple(output.dims), output.cut.partition
    shard = shard_shape(shape, cut)
    if cut is None:
        cut = Tiles([1] * len(shape), [0] * (max(positions) + 1))
    tiles = [
        np.unravel_index(cut.tile_of[position], cut.counts) if shape else ()
        for position in positions
    ]
    starts = [[int(i) * size for i, size in zip(tile, shard, strict=True)] for tile in tiles]
    lows = [min(axis) for axis in zip(*starts, strict=True)]
    highs = [max(axis) + size for axis, size in zip(zip(*starts, strict=True), shard, strict=True)]
    if shape and shape[0]:
        lows[0], highs[0] = _aligned(lows[0], highs[0], shape[0])
    box = tuple(slice(low, high) for low, high in zip(lows, highs, strict=True))
    regions = [
        tuple(
            slice(at - low, at - low + size)
            for at, low, size in zip(start, lows, shard, strict=True)
        )
        for start in starts
    ]
    extent = shape[0] if shape else 1
    dtype = dtype_of(output.dtype)
    return BatchPart(path, dtype, extent, box, regions, shard, output.memory)


def _aligned(low: int, high: int, extent: int) -> tuple[int, int]:
    """Returns the smallest of several equal parts of ``extent`` that has ``low`` to ``high``."""
    for size in range(high - low, extent):
        if extent % size == 0 and low // size == (high - 1) // size:
            return low // size * size, low // size * size + size
    return 0, extent


def shard_of(parts: Sequence[BatchPart]) -> Shard:
    """Returns the shard that the input function must make."""
    most = max(parts, key=lambda part: part.count)
    rows = most.box[0] if most.box else slice(0, 1)
    index = rows.start // max(rows.stop - rows.start, 1)
    return Shard(index, most.count, rows, {part.path: part.box for part in parts})
