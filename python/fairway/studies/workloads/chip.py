"""Compute times of a chip: tiles of its matrix unit, lanes of its vector unit.

Source: the multi-TSP system §5.2: a chip multiplies [1 x K] by [K x 320] in a cycle, where K is 160
for 16-bit and 320 for 8-bit numbers, twice or four times at once.
"""

from __future__ import annotations

import math

__all__ = [
    "CLOCK_HZ",
    "PEAK_FLOPS",
    "TICKS_PER_CYCLE",
    "VECTOR_BYTES",
    "matmul_cycles",
    "matmul_utilisation",
    "vector_cycles",
]

CLOCK_HZ = 900e6
TICKS_PER_CYCLE = 1000
"""Plans count time in thousandths of a cycle."""
VECTOR_BYTES = 320
"""Unit of memory addresses and of link transfers."""
LANES = 320
"""Numbers that the vector unit processes per cycle, and columns of a tile."""
TILE_ROWS = {"float16": 160, "int8": 320}
AT_ONCE = {"float16": 2, "int8": 4}
PEAK_FLOPS = 2 * AT_ONCE["float16"] * TILE_ROWS["float16"] * LANES * CLOCK_HZ
"""Peak: 184.3 TFLOP/s in 16 bits."""


def matmul_cycles(rows: int, inner: int, columns: int, dtype: str = "float16") -> int:
    """Returns cycles of [rows x inner] times [inner x columns]; partial tiles count as full."""
    tiles = math.ceil(inner / TILE_ROWS[dtype]) * math.ceil(columns / LANES)
    return math.ceil(rows * tiles / AT_ONCE[dtype])


def matmul_utilisation(rows: int, inner: int, columns: int, dtype: str = "float16") -> float:
    """Returns the fraction of the matrix unit's work that is useful."""
    useful = rows * inner * columns / (TILE_ROWS[dtype] * LANES * AT_ONCE[dtype])
    return useful / matmul_cycles(rows, inner, columns, dtype)


def vector_cycles(count: int, steps: int = 1) -> int:
    """Returns cycles of ``steps`` consecutive elementwise operations on ``count`` numbers."""
    return steps * math.ceil(count / LANES)
