"""Collectives on arrays: planned, executed on simulated chips, and returned as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairway import _native
from fairway.errors import RouteError
from fairway.execution import ExecutionOptions
from fairway.studies.workloads.chip import VECTOR_BYTES

__all__ = ["all_reduce", "bus_bandwidth", "memory_bytes", "simulate_collective", "try_out"]

DEFAULTS = ExecutionOptions()
Shards = list[dict[int, bytes]]
"""For each chip, the data of each shard that it has."""


def simulate_collective(
    plan: _native.Plan, shards: Shards, options: ExecutionOptions = DEFAULTS
) -> tuple[Shards, dict[str, Any]]:
    """Executes a collective; returns each chip's data of all shards, and statistics.

    Args:
        plan: of a collective.
        shards: initial data of chips; each as long as the plan's shards.
        options: how it is executed.

    Raises:
        RouteError: the plan is no collective, or of other chips or sizes.
    """
    shard, _, inputs, results = _layout(plan)
    places = [plan.places(chip) for chip in range(plan.chips)]
    length = shard * VECTOR_BYTES
    if len(shards) != len(places) or any(len(one) != length for s in shards for one in s.values()):
        raise RouteError(f"the plan is of {len(places)} chips and shards of {length} bytes")
    size = memory_bytes(plan)
    memories = []
    for here, has in zip(places, shards, strict=True):
        memory = bytearray(size)
        for start in inputs:
            for of, data in has.items():
                at = (start + here[of]) * VECTOR_BYTES
                memory[at : at + length] = data
        memories.append(bytes(memory))
    outcome = plan.simulate(memories, options)
    found: Shards = []
    for here, memory in zip(places, outcome.pop("memories"), strict=True):
        ends = {}
        for of, place in enumerate(here):
            parts = [
                memory[(start + place) * VECTOR_BYTES : (start + place) * VECTOR_BYTES + length]
                for start in results
            ]
            total = parts[0]
            for part in parts[1:]:
                added = np.frombuffer(total, options.sums) + np.frombuffer(part, options.sums)
                total = added.tobytes()
            ends[of] = total
        found.append(ends)
    return found, outcome


def memory_bytes(plan: _native.Plan) -> int:
    """Returns the bytes that a collective uses of each chip's memory.

    Raises:
        RouteError: the plan is of no collective.
    """
    shard, count, inputs, results = _layout(plan)
    return (max((*inputs, *results)) + shard * count) * VECTOR_BYTES


def _layout(plan: _native.Plan) -> tuple[int, int, list[int], list[int]]:
    layout = plan.layout()
    if layout is None:
        raise RouteError("the plan is of no collective")
    return layout


def all_reduce(
    plan: _native.Plan,
    arrays: Sequence[NDArray[Any]],
    options: ExecutionOptions = DEFAULTS,
) -> tuple[list[NDArray[Any]], dict[str, Any]]:
    """Sums arrays, one of each chip; returns every chip's result, and statistics.

    Args:
        plan: of an ``all-reduce`` of at least as many bytes as an array has.
        arrays: float32, float16 or int32, all of one shape.
        options: how it is executed; ``sums`` follows from the arrays.

    Raises:
        RouteError: the plan is no collective, or too small.
    """
    shard, count, *_ = _layout(plan)
    length, first = shard * VECTOR_BYTES, arrays[0]
    if first.nbytes > count * length:
        raise RouteError(f"the plan is of {count * length} bytes; arrays have {first.nbytes}")
    padded = [array.tobytes().ljust(count * length, b"\0") for array in arrays]
    cut = [{of: one[of * length : (of + 1) * length] for of in range(count)} for one in padded]
    options = dataclasses.replace(options, sums=str(first.dtype))
    found, outcome = simulate_collective(plan, cut, options)
    whole = [np.frombuffer(b"".join(one.values()), first.dtype) for one in found]
    return [one[: first.size].reshape(first.shape) for one in whole], outcome


def try_out(
    kind: str, plan: _native.Plan, seed: int = 0, options: ExecutionOptions = DEFAULTS
) -> dict[str, Any]:
    """Executes a collective on random numbers and checks the result of every chip.

    Returns:
        Statistics; ``right`` states whether all results are correct.

    Raises:
        RouteError: the plan is of no collective.
    """
    (shard, count, *_), chips = _layout(plan), plan.chips
    random = np.random.default_rng(seed)
    numbers = random.integers(-1000, 1000, (chips, count, shard * VECTOR_BYTES // 4), np.int32)

    def has(chip: int, of: int) -> bool:
        if kind in ("all-gather", "broadcast"):
            return chip == (0 if kind == "broadcast" else of)
        return True

    shards: Shards = [
        {of: numbers[chip, of].tobytes() for of in range(count) if has(chip, of)}
        for chip in range(chips)
    ]
    options = dataclasses.replace(options, sums="int32")
    found, outcome = simulate_collective(plan, shards, options)
    sums = numbers.sum(0, dtype=np.int32)

    def expected(chip: int, of: int) -> Any:
        match kind:
            case "all-gather":
                return numbers[of, of]
            case "broadcast":
                return numbers[0, of]
            case "all-to-all":
                return numbers[of, chip] if of != chip else None
            case "reduce-scatter":
                return sums[of] if of == chip else None
            case _:
                return sums[of]

    pairs = ((chip, of, expected(chip, of)) for chip in range(chips) for of in range(count))
    outcome["right"] = all(
        found[chip][of] == wanted.tobytes() for chip, of, wanted in pairs if wanted is not None
    )
    return outcome


def bus_bandwidth(size_bytes: int, chips: int, seconds: float) -> float:
    """Returns the bus bandwidth of an all-reduce in bytes per second, as nccl-tests define it."""
    return 2 * (chips - 1) / chips * size_bytes / seconds
