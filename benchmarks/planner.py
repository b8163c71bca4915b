"""Measures the rate of plan evaluations, and the planning time of large graphs.

The rate counts all evaluations of all systems' searches, over the total planning time, including
the final polish of orders. Graphs are TopoOpt's, where the folder with data exists.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

from common import ROOT, Goal, Spread, provenance, run_main, write_json
from rich.console import Console

from fairway.communication import graphs, steps
from fairway.communication.steps import ChannelCost
from fairway.formats.flexflow import read_flexflow
from fairway.studies.workloads import dlrm

COSTS = [ChannelCost(2e8, 50_000, incast=0.01), ChannelCost(1e8, 50_000, incast=0.01)]
FAST = [ChannelCost(100e9, 5_000)]
GRAPH = Path("topoopt") / "100dlrm_128.fbuf"
RATE = Goal(50_000, "plans looked at a second")
SECONDS = 60
MEBIBYTES = 2048
WITHIN = Goal(1, "of what is allowed over what it takes")
LESS = Goal(0.2, "less time than fifo with greedy plans")


def rate(workload: str, evaluations: int, seed: int) -> float:
    """Returns evaluations per second."""
    step = dlrm.WORKLOADS[workload].step(8)
    began = time.perf_counter()
    found = steps.plan(step, COSTS, evaluations=evaluations, seed=seed)
    return sum(one.evaluations for one in found.values()) / (time.perf_counter() - began)


def main() -> None:
    """Measures, prints and writes ``out/planner.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each workload")
    parser.add_argument("--evaluations", type=int, default=100_000, help="of each chain")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    given = parser.parse_args()
    console = Console()
    report = provenance(0, "numpy")
    for workload in dlrm.WORKLOADS:
        found = Spread(
            tuple(rate(workload, given.evaluations, seed) for seed in range(given.rounds))
        )
        console.print(f"{workload}: {found.show(',.0f')} {RATE.verdict(found.median)}")
        report[workload] = found.as_json()
    path = given.data / GRAPH
    if path.exists():
        began = time.perf_counter()
        graph = read_flexflow(path)
        planned = graphs.plan(graph, FAST)
        took = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        less = 1 - planned.planned_s / planned.strict_s
        console.print(f"{len(graph.nodes):,} tasks: {took:.1f} s {WITHIN.verdict(SECONDS / took)}")
        console.print(f"memory: {peak:.0f} MiB {WITHIN.verdict(MEBIBYTES / peak)}")
        console.print(
            f"planned {planned.planned_s:.3f} s, fifo {planned.strict_s:.3f} s, if others go "
            f"meanwhile {planned.fifo_s:.3f} s: {less:.1%} less {LESS.verdict(less)}"
        )
        report["graph"] = {"seconds": took, "mebibytes": peak, "less": less}
    write_json("planner.json", report)


if __name__ == "__main__":
    run_main(main)
