"""How a scheduled plan is executed on simulated chips."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

__all__ = ["ExecutionOptions"]


@dataclasses.dataclass(frozen=True)
class ExecutionOptions:
    """How a plan is executed on simulated chips.

    Attributes:
        compute: called with a task and the bytes that it reads; returns addresses in vectors, each
            with the bytes to be written there.
        reads: by task of a computation, address in vectors and length in bytes of what it reads.
        sums: type of reductions: ``float32``, ``float16`` or ``int32``.
        noise: errors on links: seed, probability per vector, wrong bits.
        threads: number of threads; 0 is one per core.
        progress: called with the fraction that is done.
    """

    compute: Callable[[int, list[bytes]], list[tuple[int, bytes]]] | None = None
    reads: Mapping[int, Sequence[tuple[int, int]]] | None = None
    sums: str = "float32"
    noise: tuple[int, float, int] | None = None
    threads: int = 0
    progress: Callable[[float], object] | None = None
