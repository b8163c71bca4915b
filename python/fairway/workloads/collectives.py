"""Collectives on arrays: planned, carried out on simulated chips, and given back as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairway import _native
from fairway.errors import RouteError

__all__ = ["COLLECTIVES", "all_reduce", "bus_bandwidth"]

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")
VECTOR_BYTES = 320


def all_reduce(
    plan: _native.Plan,
    arrays: Sequence[NDArray[Any]],
    *,
    noise: tuple[int, float, int] | None = None,
    threads: int = 0,
    progress: Callable[[float], object] | None = None,
) -> tuple[list[NDArray[Any]], dict[str, Any]]:
    """The sum of arrays, one of each chip, as each chip has it then; and what happened.

    Args:
        plan: of an ``all-reduce`` of as many bytes as an array has.
        arrays: float32 or int32, all of one shape.
        noise: errors on links: seed, probability, wrong bits.
        threads: how many; as many as there are cores with 0.
        progress: is told which part is over.

    Raises:
        RouteError: the plan is of something else.
    """
    layout = plan.layout()
    if layout is None:
        raise RouteError("the plan is of no collective")
    shard, shards, inputs, results, places = layout
    dtype, shape = arrays[0].dtype, arrays[0].shape
    length = shard * VECTOR_BYTES
    if arrays[0].nbytes > shards * length or len(arrays) != len(places):
        raise RouteError(
            f"the plan is of {shards * length} bytes on {len(places)} chips; got {len(arrays)} "
            f"arrays of {arrays[0].nbytes}"
        )
    vectors = max((*inputs, *results)) + shard * shards
    memories = []
    for chip, array in enumerate(arrays):
        padded = array.tobytes().ljust(shards * length, b"\0")
        memory = bytearray(vectors * VECTOR_BYTES)
        for start in inputs:
            for of, place in enumerate(places[chip]):
                at = (start + place) * VECTOR_BYTES
                memory[at : at + length] = padded[of * length : (of + 1) * length]
        memories.append(bytes(memory))
    outcome = plan.carry_out(
        memories, sums=str(dtype), noise=noise, threads=threads, progress=progress
    )
    found = []
    for chip, memory in enumerate(outcome.pop("memories")):
        total = np.zeros(shards * length // dtype.itemsize, dtype)
        for start in results:
            parts = [
                memory[(start + place) * VECTOR_BYTES : (start + place) * VECTOR_BYTES + length]
                for place in places[chip]
            ]
            total += np.frombuffer(b"".join(parts), dtype)
        found.append(total[: arrays[0].size].reshape(shape))
    return found, outcome


def bus_bandwidth(size_bytes: int, chips: int, seconds: float) -> float:
    """What links move each way for an all-reduce, in bytes a second, as nccl-tests count it."""
    return 2 * (chips - 1) / chips * size_bytes / seconds
