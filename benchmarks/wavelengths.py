"""Decisions about wavelengths of a ring, beside the linear program that none can beat.

What the demand that gets least of what it wants gets, over many decisions, as a part of what a
linear program (HiGHS) allows where wavelengths can be divided; and how long a decision takes. The
same as an integer program takes 0.8 s for 8 devices and more than 20 s for 64 (HiGHS).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np
from common import Goal, provenance, run_main, write_json
from rich.console import Console
from rich.table import Table
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from fairway import _native

Demand = tuple[int, int, float]
PART = Goal(0.9, "of what the linear program allows, for the demand that gets least")
MICROSECONDS = {64: 100, 1024: 1000}


def random_demands(devices: int, part: float, seed: int) -> list[Demand]:
    """From so many of all pairs, 1 to 100 hundredths of the greatest each."""
    drawn = random.Random(seed)
    pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b]
    return [(a, b, drawn.randint(1, 100) / 100) for a, b in pairs if drawn.random() < part]


def groups(devices: int, size: int) -> list[Demand]:
    """All with all of their group, unevenly."""
    every = range(devices)
    return [
        (a, b, 1 - 0.05 * ((7 * a + 3 * b) % 10))
        for a in every for b in every if a != b and a // size == b // size
    ]  # fmt: skip


def neighbours(devices: int) -> list[Demand]:
    """Each to the next."""
    return [(a, (a + 1) % devices, 1.0) for a in range(devices)]


def bound(devices: int, count: int, demands: Sequence[Demand]) -> float:
    """What everybody can get of what it wants, both ways around, in parts of wavelengths."""
    segments: list[int] = []
    columns: list[int] = []
    for number, (source, target, _) in enumerate(demands):
        up = (target - source) % devices
        segments += [(source + step) % devices for step in range(up)]
        columns += [2 * number] * up
        down = devices - up
        segments += [devices + (source - 1 - step) % devices for step in range(down)]
        columns += [2 * number + 1] * down
    last = 2 * len(demands)
    rows = [*segments]
    values = [1.0] * len(segments)
    for number, (_, _, size) in enumerate(demands):
        rows += [2 * devices + number] * 3
        columns += [2 * number, 2 * number + 1, last]
        values += [-1.0, -1.0, size]
    shape = (2 * devices + len(demands), last + 1)
    matrix = coo_matrix((values, (rows, columns)), shape=shape).tocsr()
    limits = np.r_[np.full(2 * devices, count), np.zeros(len(demands))]
    goal = np.zeros(last + 1)
    goal[last] = -1
    found = linprog(goal, A_ub=matrix, b_ub=limits, bounds=(0, None), method="highs")
    return float(-found.fun)


def main() -> None:
    """Decides, bounds, and says how near it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
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
        "devices, demands, wavelengths", "bound", "got", "part", "median decision", "bound's"
    )
    rows = []
    for name, (devices, wavelengths, demands) in cases.items():
        count = wavelengths // 2
        begin = time.perf_counter()
        most = bound(devices, count, demands)
        solved = time.perf_counter() - begin
        reach = devices // 2 if devices <= 64 else 16
        got, times = _native.decide_wavelengths(devices, count, reach, demands, given.decisions)
        least = min(one / demand[2] for one, demand in zip(got, demands, strict=True))
        took = statistics.median(times)
        rows.append({"case": name, "bound": most, "got": least, "part": least / most,
                     "decision_s": took, "bound_s": solved})  # fmt: skip
        table.add_row(
            f"{name}, {len(demands)}", f"{most:.2f}", f"{least:.2f}", f"{least / most:.3f}",
            f"{1e6 * took:.1f} us", f"{1e3 * solved:.1f} ms",
        )  # fmt: skip
    Console().print(table)
    write_json("wavelengths.json", {**provenance(given.seed, "scipy"), "rows": rows})


if __name__ == "__main__":
    run_main(main)
