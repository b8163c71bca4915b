"""Ranks strategies by predicted time, whatever their cost model is.

Strategies are evaluated one by one: by simulation of placed shards
(:mod:`fairway.placement.search`), by closed forms (:mod:`fairway.placement.cuts`), or from measured
blocks (:mod:`fairway.parallel.placing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from fairway.errors import CapacityError, PlacementError

__all__ = ["RankedStrategy", "rank"]


class RankedStrategy(Protocol):
    """A strategy that was evaluated."""

    @property
    def step_s(self) -> float:
        """Predicted time of a step, in seconds."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that the fullest device holds."""


Candidate = TypeVar("Candidate")
Found = TypeVar("Found", bound=RankedStrategy)


def rank(
    candidates: Iterable[Candidate],
    evaluate: Callable[[Candidate], Found],
    memory_bytes: int | None = None,
) -> list[Found]:
    """Evaluates strategies; returns those that fit in memory, the fastest first.

    Args:
        candidates: strategies, at least one.
        evaluate: predicts a strategy; raises a :class:`PlacementError` if it cannot be.
        memory_bytes: capacity of a device; None if ``evaluate`` refuses what does not fit.

    Raises:
        CapacityError: none fits; says what is needed, or why the last one was refused.
    """
    found: list[Found] = []
    least: int | None = None
    refused: PlacementError | None = None
    for candidate in candidates:
        try:
            one = evaluate(candidate)
        except PlacementError as error:
            refused = error
            continue
        if memory_bytes is None or one.memory_bytes <= memory_bytes:
            found.append(one)
        else:
            least = one.memory_bytes if least is None else min(least, one.memory_bytes)
    if not found:
        needed = f"a device needs {least} bytes at least; it has {memory_bytes}"
        raise CapacityError(str(refused) if least is None else needed)
    return sorted(found, key=lambda one: one.step_s)
