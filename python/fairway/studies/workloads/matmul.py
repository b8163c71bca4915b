"""A matrix product over many chips, by columns and by rows.

Source: the multi-TSP system §5.2. The second matrix is split into groups of columns; each group's
rows, with the first matrix's columns, are split over the chips of a group, whose partial products
are reduced.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairway.studies.workloads.chip import matmul_cycles
from fairway.studies.workloads.program import ChipProgram, Tensor

__all__ = ["place_product"]

CHIPS_PER_NODE = 8


def place_product(
    program: ChipProgram,
    left: NDArray[Any] | tuple[int, int],
    right: NDArray[Any] | tuple[int, int],
    column_splits: int,
    row_splits: int,
) -> list[list[Tensor]]:
    """Adds a product to a program: ``column_splits * row_splits`` chips from 0 on.

    Partial products are reduced within nodes first, each chip of a node reducing some blocks of
    rows; then between nodes (hierarchical reduction).

    Args:
        program: the program to extend; accumulates 16-bit numbers.
        left: [m x k], float16, or its shape to plan without data.
        right: [k x n], likewise.
        column_splits: groups of columns.
        row_splits: chips of a group.

    Returns:
        For each group of columns the product's blocks of rows, which are on the chips of a node.
    """
    (rows, inner), columns = _shape(left), _shape(right)[1]
    inner_bounds = _bounds(inner, row_splits)
    products = []
    places = _places(column_splits, row_splits)
    for chips, width in zip(places, _bounds(columns, column_splits), strict=True):
        placed = list(zip(chips, inner_bounds, strict=True))
        nodes = [
            [(chip, bounds) for chip, bounds in placed if chip // CHIPS_PER_NODE == node]
            for node in dict.fromkeys(chip // CHIPS_PER_NODE for chip in chips)
        ]
        nodes.sort(key=len, reverse=True)
        if len(nodes[0]) < CHIPS_PER_NODE:
            # No whole node belongs to the group; its chips reduce for one another wherever they
            # are.
            nodes = [placed]
        blocks = _bounds(rows, len(nodes[0]))
        found = [_node(program, node, left, right, blocks, width) for node in nodes]
        products.append(
            [
                program.add_all([others[block] for others in found[1:]], home)
                for block, home in enumerate(found[0])
            ]
        )
    return products


def _node(
    program: ChipProgram,
    chips: list[tuple[int, tuple[int, int]]],
    left: NDArray[Any] | tuple[int, int],
    right: NDArray[Any] | tuple[int, int],
    blocks: list[tuple[int, int]],
    columns: tuple[int, int],
) -> list[Tensor]:
    """Multiplies on the chips of a node; returns blocks of rows, each reduced on one chip."""
    partial: list[dict[int, Tensor]] = []
    for place, (chip, inner) in enumerate(chips):
        # Chips compute blocks in rotated order, each first the block that it reduces itself.
        order = [(place + turn) % len(blocks) for turn in range(len(blocks))]
        partial.append(
            {
                block: _partial(program, chip, left, right, blocks[block], inner, columns)
                for block in order
            }
        )
    return [
        program.add_all(
            [part[block] for place, part in enumerate(partial) if place != block % len(chips)],
            partial[block % len(chips)][block],
        )
        for block in range(len(blocks))
    ]


def _places(groups: int, size: int) -> list[list[int]]:
    """Returns the chips of each group: whole nodes, then remainders, of one node where they fit."""
    free = [
        list(range(node * CHIPS_PER_NODE, (node + 1) * CHIPS_PER_NODE))
        for node in range(math.ceil(groups * size / CHIPS_PER_NODE))
    ]
    places: list[list[int]] = [[] for _ in range(groups)]
    for group in places:
        for _ in range(size // CHIPS_PER_NODE):
            group += next(node for node in free if len(node) == CHIPS_PER_NODE)
            free.remove(group[-CHIPS_PER_NODE:])
    for group in places:
        missing = size - len(group)
        fits = [node for node in free if len(node) >= missing]
        while missing:
            node = min(fits, key=len) if fits else max(free, key=len)
            taken = missing if fits else 1
            group += node[:taken]
            del node[:taken]
            missing -= taken
    return places


def _partial(
    program: ChipProgram,
    chip: int,
    left: NDArray[Any] | tuple[int, int],
    right: NDArray[Any] | tuple[int, int],
    rows: tuple[int, int],
    inner: tuple[int, int],
    columns: tuple[int, int],
) -> Tensor:
    """Adds one chip's partial product of a block of rows."""
    count, depth, width = (end - begin for begin, end in (rows, inner, columns))

    def multiply() -> NDArray[Any]:
        assert isinstance(left, np.ndarray)
        assert isinstance(right, np.ndarray)
        one = left[slice(*rows), slice(*inner)].astype(np.float32)
        return one @ right[slice(*inner), slice(*columns)].astype(np.float32)

    cycles = matmul_cycles(count, depth, width)
    return program.compute(chip, multiply, [], (count, width), cycles, np.float16)


def _shape(matrix: NDArray[Any] | tuple[int, int]) -> tuple[int, int]:
    return matrix.shape if isinstance(matrix, np.ndarray) else matrix


def _bounds(count: int, parts: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise(math.ceil(count * part / parts) for part in range(parts + 1)))
