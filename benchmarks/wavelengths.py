"""Compares wavelength assignment on a ring with the linear program that bounds it.

Reports the max-min fair share: what the least satisfied demand gets of its request, over many
decisions, as a fraction of what a linear program (HiGHS) with divisible wavelengths allows; and the
time of a decision. Up to 64 devices, also that of an integer program for one interval, and of
SiP-ML's circulation (A.1), which maximizes total throughput without fairness, with randomized
rounding and repair, over many intervals.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import Goal, provenance, run_main, write_json
from rich.console import Console
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_matrix, lil_matrix

from fairway import _native

Demand = tuple[int, int, float]
PART = Goal(0.9, "of what the linear program allows, for the demand that gets least")
MICROSECONDS = {64: 100, 1024: 1000}
ROUNDINGS = 1000
"""Intervals for which a circulation is rounded."""


def random_demands(devices: int, part: float, seed: int) -> list[Demand]:
    """Draws a demand of 0.01 to 1 for a fraction ``part`` of all pairs."""
    drawn = random.Random(seed)
    pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b]
    return [(a, b, drawn.randint(1, 100) / 100) for a, b in pairs if drawn.random() < part]


def groups(devices: int, size: int) -> list[Demand]:
    """Returns uneven demands between all members of each group."""
    every = range(devices)
    return [
        (a, b, 1 - 0.05 * ((7 * a + 3 * b) % 10))
        for a in every for b in every if a != b and a // size == b // size
    ]  # fmt: skip


def neighbours(devices: int) -> list[Demand]:
    """Returns demands from each device to the next."""
    return [(a, (a + 1) % devices, 1.0) for a in range(devices)]


def _ways(devices: int, demand: Demand) -> tuple[list[int], list[int]]:
    """Returns the segments of both directions; those downwards are numbered after all upwards."""
    source, target, _ = demand
    up = (target - source) % devices
    return (
        [(source + step) % devices for step in range(up)],
        [devices + (source - 1 - step) % devices for step in range(devices - up)],
    )


def _problem(devices: int, count: int, demands: Sequence[Demand]) -> tuple[Any, Any, Any]:
    """Returns objective, constraint matrix and upper bounds of the max-min linear program.

    Rows are the load of segments, then the shortfall of demands; columns are each demand's
    assignment up and down in turn, then the common satisfied fraction.
    """
    rows: list[int] = []
    columns: list[int] = []
    for number, demand in enumerate(demands):
        for way, segments in enumerate(_ways(devices, demand)):
            rows += segments
            columns += [2 * number + way] * len(segments)
    values = [1.0] * len(rows)
    last = 2 * len(demands)
    for number, (_, _, size) in enumerate(demands):
        rows += [2 * devices + number] * 3
        columns += [2 * number, 2 * number + 1, last]
        values += [-1.0, -1.0, size]
    shape = (2 * devices + len(demands), last + 1)
    limits = np.r_[np.full(2 * devices, count), np.zeros(len(demands))]
    goal = np.r_[np.zeros(last), -1]
    return goal, coo_matrix((values, (rows, columns)), shape=shape).tocsr(), limits


def bound(devices: int, count: int, demands: Sequence[Demand]) -> float:
    """Returns the satisfied fraction of the linear program, over both directions."""
    goal, matrix, limits = _problem(devices, count, demands)
    found = linprog(goal, A_ub=matrix, b_ub=limits, bounds=(0, None), method="highs")
    return float(-found.fun)


def whole(devices: int, count: int, demands: Sequence[Demand], limit_s: float) -> float:
    """Returns that of the integer program for one interval, or the best found in ``limit_s``."""
    goal, matrix, limits = _problem(devices, count, demands)
    found = milp(
        goal,
        integrality=np.r_[np.ones(2 * len(demands)), 0],
        bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(matrix, -np.inf, limits),
        options={"time_limit": limit_s},
    )
    return 0.0 if found.x is None else float(-found.fun)


def circulation(devices: int, count: int, demands: Sequence[Demand], seed: int) -> float:
    """Returns the least satisfied fraction of SiP-ML's circulation, over shortest paths.

    A wavelength goes around the ring and serves one demand after another; where it serves none, it
    goes to the next device. The total satisfied fraction of demands is maximized.
    """
    drawn = np.random.default_rng(seed)
    got = np.zeros(len(demands))
    ways = [_ways(devices, demand) for demand in demands]
    for direction in (0, 1):
        shorter = [int(len(down) < len(up)) == direction for up, down in ways]
        served = [number for number, is_so in enumerate(shorter) if is_so]
        step = 1 - 2 * direction
        arcs = [(demands[number][0], demands[number][1]) for number in served]
        arcs += [(device, (device + step) % devices) for device in range(devices)]
        flow = lil_matrix((devices, len(arcs)))
        for column, (source, target) in enumerate(arcs):
            flow[source, column] += 1
            flow[target, column] -= 1
        crosses = [int(0 in {s % devices for s in ways[n][direction]}) for n in served]
        # Each device's step crosses one segment; only the first segment is constrained.
        crosses += [int((d if step == 1 else d - 1) % devices == 0) for d in range(devices)]
        worth = [-1 / demands[number][2] for number in served] + [0.0] * devices
        found = linprog(
            worth,
            A_ub=np.array([crosses]),
            b_ub=[1],
            A_eq=flow.tocsr(),
            b_eq=np.zeros(devices),
            bounds=(0, 1),
            method="highs",
        )
        parts = count * found.x[: len(served)]
        segments = np.zeros((len(served), devices), bool)
        for row, number in enumerate(served):
            segments[row, [segment % devices for segment in ways[number][direction]]] = True
        for _ in range(ROUNDINGS):
            given = np.floor(parts + drawn.random(len(parts)))
            for segment in range(devices):
                on = np.flatnonzero(segments[:, segment])
                over = given[on].sum() - count
                while over > 0:
                    row = drawn.choice(on[given[on] > 0])
                    given[row] -= 1
                    over -= 1
            got[served] += given / ROUNDINGS
    return float(min(one / demand[2] for one, demand in zip(got, demands, strict=True)))


def main() -> None:
    """Decides, bounds, and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=20, help="seconds of an integer program")
    given = parser.parse_args()
    cases = {
        "8, all": (8, 40, groups(8, 8)),
        "16, random": (16, 40, random_demands(16, 0.4, given.seed)),
        "16, random, 320": (16, 320, random_demands(16, 0.4, given.seed)),
        "32, random": (32, 40, random_demands(32, 0.37, given.seed)),
        "32, random, 320": (32, 320, random_demands(32, 0.37, given.seed)),
        "64, random, 320": (64, 320, random_demands(64, 0.1, given.seed)),
        "64, groups of 8": (64, 40, groups(64, 8)),
        "64, groups of 8, 320": (64, 320, groups(64, 8)),
        "1024, neighbours": (1024, 40, neighbours(1024)),
        "1024, neighbours, 320": (1024, 320, neighbours(1024)),
        "1024, groups of 8, 320": (1024, 320, groups(1024, 8)),
    }
    table = Table(
        "devices, demands, wavelengths", "bound", "got", "part", "median decision", "bound's",
        "integer program", "circulation",
    )  # fmt: skip
    rows = []
    for name, (devices, wavelengths, demands) in cases.items():
        count = wavelengths // 2
        begin = time.perf_counter()
        most = bound(devices, count, demands)
        solved = time.perf_counter() - begin
        reach = devices - 1 if devices <= 64 else 16  # as far as in the linear program
        got, times = _native.decide_wavelengths(devices, count, reach, demands, given.decisions)
        least = min(one / demand[2] for one, demand in zip(got, demands, strict=True))
        took = statistics.median(times)
        row = {"case": name, "bound": most, "got": least, "part": least / most,
               "decision_s": took, "bound_s": solved}  # fmt: skip
        others = ["-", "-"]
        if devices <= 64:
            begin = time.perf_counter()
            row["whole"] = whole(devices, count, demands, given.limit) / most
            row["whole_s"] = time.perf_counter() - begin
            begin = time.perf_counter()
            row["circulation"] = circulation(devices, count, demands, given.seed) / most
            row["circulation_s"] = time.perf_counter() - begin
            others = [
                f"{row[what]:.3f} in {row[f'{what}_s']:.1f} s" for what in ("whole", "circulation")
            ]
        rows.append(row)
        table.add_row(
            f"{name}, {len(demands)}", f"{most:.2f}", f"{least:.2f}", f"{least / most:.3f}",
            f"{1e6 * took:.1f} us", f"{1e3 * solved:.1f} ms", *others,
        )  # fmt: skip
    Console().print(table)
    write_json("wavelengths.json", {**provenance(given.seed, "scipy"), "rows": rows})


if __name__ == "__main__":
    run_main(main)
