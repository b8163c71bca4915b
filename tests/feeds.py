"""Input functions for tests; hosts import this module."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import run as imported
from typing import Any

import ml_dtypes
import numpy as np

import fairway

__all__ = ["imported"]


def whole(number: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """The whole leaf of batch ``number``; each element encodes its own position."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return ((np.arange(np.prod(shape)) + 7 * number) % 100).reshape(shape).astype(kind)


def leaves(
    shard: fairway.Shard, *, shapes: dict[str, list[int]], dtype: str = "float32"
) -> Iterator[dict[str, Any]]:
    """Batches of several leaves, each sliced to the shard."""
    for number in itertools.count():
        yield {
            path: whole(number, tuple(shape), dtype)[shard.slices[path]]
            for path, shape in shapes.items()
        }


def rows(
    shard: fairway.Shard,
    *,
    batch: int,
    first: int = 0,
    stop: int | None = None,
    uneven: int = 0,
    delay_s: float = 0.0,
) -> Iterator[np.ndarray[Any, Any]]:
    """``batch`` rows of two numbers: the index of the batch, and that of the row."""
    last = None if stop is None else stop + uneven * shard.index
    numbers = itertools.count(first) if last is None else range(first, last)
    buffer = np.zeros((batch // shard.count, 2), np.int32)  # reused for each batch
    for number in numbers:
        time.sleep(delay_s)
        buffer[:, 0] = number
        buffer[:, 1] = np.arange(batch)[shard.rows]
        yield buffer


def failing(
    shard: fairway.Shard, *, batch: int, fail_at: int, fail_on: int | None = None
) -> Iterator[np.ndarray[Any, Any]]:
    """The same rows, until a batch that fails, for one shard or for all."""
    for number, part in enumerate(rows(shard, batch=batch)):
        if number == fail_at and fail_on in (None, shard.index):
            raise ValueError(f"row {number} is broken")
        yield part


def marked(shard: fairway.Shard, *, folder: str) -> Iterator[np.ndarray[Any, Any]]:
    """Records its thread in a file, and there that it was closed."""
    mark = Path(folder) / f"{os.getpid()}-{threading.get_native_id()}"
    mark.write_text("open")
    try:
        while True:
            yield np.zeros((shard.rows.stop - shard.rows.start,), np.float32)
    finally:
        mark.write_text("closed")


def slow_and_wide(shard: fairway.Shard, *, extent: int) -> Iterator[np.ndarray[Any, Any]]:
    """Large batches."""
    part = np.ones((shard.rows.stop - shard.rows.start, extent), np.float32)
    return itertools.repeat(part)


def grained(shard: fairway.Shard, *, batch: int, seed: int) -> Any:
    """A shuffled range as a grain dataset; each host has its part of every batch."""
    import grain  # takes seconds of processor time, which the other functions do not need

    examples = grain.MapDataset.range(64).shuffle(seed=seed).repeat(2)
    part = batch // shard.count

    def mine(given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return given[shard.index * part :][:part].astype(np.int32)

    return examples.batch(batch).map(mine).to_iter_dataset()


def wrong(shard: fairway.Shard, *, kind: str) -> Iterator[Any]:
    """Batches that do not match what was requested."""
    right = np.zeros((shard.rows.stop - shard.rows.start,), np.float32)
    yield right
    yield {"shape": right[:, None], "type": right.astype(int), "tree": {"x": right}}[kind]


not_a_function = 3
