"""Exact optimum of placements, by an integer program (HiGHS): a reference for heuristics."""

from __future__ import annotations

import random

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from fairway.placement.graphs import Edge, Op, OpGraph

SOLVE_ERROR = 4
"""Status of scipy.optimize.milp for a failure other than a time limit."""


def random_graph(count: int, seed: int, *, moved: float = 1.0) -> OpGraph:
    """Makes operations of 1 to 20 us that depend on up to three earlier ones.

    Args:
        count: number of operations.
        seed: the same seed makes the same graph.
        moved: scale of transfer times between devices, relative to those of operations.
    """
    drawn = random.Random(seed)
    ops = []
    for number in range(count):
        before = drawn.sample(range(number), k=min(number, drawn.choice((0, 1, 1, 2, 3))))
        edges = [Edge(other, [int(1000 * moved * drawn.randint(1, 20))]) for other in before]
        ops.append(Op(f"op {number}", [1000 * drawn.randint(1, 20)], edges, shards_max=1))
    return OpGraph([1], ops)


def exact_ns(graph: OpGraph, devices: int, bytes_per_ns: float, limit_s: float) -> float | None:
    """Returns the minimum makespan on ``devices`` devices; None if that takes too long."""
    times = [op.times_ns[0] for op in graph.ops]
    count, longest = len(times), float(sum(times))
    needs = _needs(graph)
    edges = [
        (e.source, j, e.sizes[0] / bytes_per_ns) for j, op in enumerate(graph.ops) for e in op.after
    ]
    free = [(i, k) for i in range(count) for k in range(i + 1, count) if i not in needs[k]]
    # Variables: starts, the makespan, devices, whether an edge crosses devices, order of pairs.
    at_device = count + 1
    at_edge = at_device + count * devices
    at_order = at_edge + len(edges)
    total = at_order + len(free)
    rows: list[tuple[dict[int, float], float, float]] = []
    for op in range(count):
        rows.append(({count: 1, op: -1}, times[op], np.inf))
        rows.append(({at_device + op * devices + d: 1 for d in range(devices)}, 1, 1))
    for number, (i, j, moved) in enumerate(edges):
        rows.append(({j: 1, i: -1, at_edge + number: -moved}, times[i], np.inf))
        for d in range(devices):
            here, there = at_device + i * devices + d, at_device + j * devices + d
            rows.append(({at_edge + number: 1, here: -1, there: 1}, 0, np.inf))
    for number, (i, k) in enumerate(free):
        order = at_order + number
        for d in range(devices):
            here, there = at_device + i * devices + d, at_device + k * devices + d
            both = {here: -longest, there: -longest}
            # On one device, the first of a pair ends before the other begins.
            first = {k: 1.0, i: -1.0, order: -longest, **both}
            rows.append((first, times[i] - 3 * longest, np.inf))
            second = {i: 1.0, k: -1.0, order: longest, **both}
            rows.append((second, times[k] - 2 * longest, np.inf))
    matrix = lil_matrix((len(rows), total))
    for row, (terms, _, _) in enumerate(rows):
        for column, value in terms.items():
            matrix[row, column] = value
    cost = np.zeros(total)
    cost[count] = 1
    whole = np.zeros(total)
    whole[at_device:] = 1
    upper = np.ones(total)
    upper[:at_device] = longest
    # Breaks the symmetry of devices: the first operation is on the first of them.
    upper[at_device + 1 : at_device + devices] = 0
    limits = LinearConstraint(
        matrix.tocsr(), [low for _, low, _ in rows], [high for _, _, high in rows]
    )
    # HiGHS fails on a few of these with presolve.
    for presolve in (True, False):
        options = {"time_limit": limit_s, "presolve": presolve}
        bounds = Bounds(0, upper)
        found = milp(cost, integrality=whole, bounds=bounds, constraints=limits, options=options)
        if found.status != SOLVE_ERROR:
            break
    return float(found.fun) if found.status == 0 else None


def _needs(graph: OpGraph) -> list[set[int]]:
    """Returns the transitive dependencies of each operation."""
    needs: list[set[int]] = []
    for op in graph.ops:
        before = {edge.source for edge in op.after}
        needs.append(before.union(*(needs[other] for other in before)))
    return needs
