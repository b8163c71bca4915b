"""Cholesky's factorisation over chips, with blocks of rows assigned cyclically.

Source: the multi-TSP system §5.5, Figure 19. Differs from the paper: it gives no latency of the
step from one column to the next, which bounds the speed-up by more chips; :data:`COLUMN_CYCLES` is
assumed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairway.studies.workloads.chip import matmul_cycles
from fairway.studies.workloads.program import ChipProgram, Tensor

__all__ = ["COLUMN_CYCLES", "assembled", "place_cholesky"]

COLUMN_CYCLES = 340
"""Assumed: cycles through matrix and vector unit until the next column can begin; with 32 blocks of
320 rows that makes 8 chips 1.5 times as fast as one, as in Figure 19."""

Factor = dict[tuple[int, int], Tensor]


def place_cholesky(
    program: ChipProgram,
    matrix: NDArray[Any] | int,
    chips: int,
    block: int = 320,
    column_cycles: int = COLUMN_CYCLES,
    dtype: Any = np.float32,
) -> Factor:
    """Adds the factorisation of a symmetric, positive definite matrix to a program.

    Args:
        program: the program to extend.
        matrix: [n x n], float32, n a multiple of ``block``; or n, to plan without data.
        chips: blocks of rows are assigned to chips 0 to ``chips - 1`` cyclically.
        block: rows and columns of a block.
        column_cycles: latency from one column of a diagonal block to the next.
        dtype: of stored and sent blocks.

    Returns:
        The blocks of the lower factor, by row and column.
    """
    size = matrix if isinstance(matrix, int) else matrix.shape[0]
    count = size // block
    shape = (block, block)
    multiply = matmul_cycles(block, block, block)

    def held(row: int, column: int) -> Tensor:
        if isinstance(matrix, int):
            return program.empty(row % chips, shape, dtype)
        rows, columns = (slice(one * block, (one + 1) * block) for one in (row, column))
        return program.put(row % chips, np.ascontiguousarray(matrix[rows, columns], dtype))

    left = {(row, column): held(row, column) for row in range(count) for column in range(row + 1)}
    factor: Factor = {}
    for step in range(count):
        corner = program.compute(
            step % chips,
            np.linalg.cholesky,
            [left[step, step]],
            shape,
            block * column_cycles,
            dtype,
        )
        factor[step, step] = corner
        corners = _everywhere(program, corner, chips, range(step + 1, count))
        for row in range(step + 1, count):
            factor[row, step] = program.compute(
                row % chips,
                _solve,
                [left[row, step], corners[row % chips]],
                shape,
                2 * multiply,
                dtype,
            )
        for column in range(step + 1, count):
            across = _everywhere(program, factor[column, step], chips, range(column, count))
            for row in range(column, count):
                left[row, column] = program.compute(
                    row % chips,
                    _update,
                    [left[row, column], factor[row, step], across[row % chips]],
                    shape,
                    multiply,
                    dtype,
                )
    return factor


def assembled(factor: Factor, run: Any, block: int) -> NDArray[Any]:
    """Assembles the lower factor as one matrix."""
    count = 1 + max(row for row, _ in factor)
    whole = np.zeros((count * block, count * block), np.float32)
    for (row, column), tensor in factor.items():
        rows, columns = (slice(one * block, (one + 1) * block) for one in (row, column))
        whole[rows, columns] = run[tensor]
    return whole


def _everywhere(program: ChipProgram, tensor: Tensor, chips: int, rows: range) -> dict[int, Tensor]:
    """Broadcasts a tensor to each chip that has one of these rows."""
    return {chip: program.send(tensor, chip) for chip in dict.fromkeys(row % chips for row in rows)}


def _solve(block: NDArray[Any], corner: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = np.linalg.solve(corner, block.T).T
    return found


def _update(block: NDArray[Any], one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = block - one @ other.T
    return found
