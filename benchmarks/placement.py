"""Compares placements with baselines: the exact optimum, heuristics, and SiP-ML's own simulator.

1. Random graphs of up to 12 operations on 4 devices, compared with an integer program (HiGHS).
2. FlexFlow's task graphs as TopoOpt published them, compared with their original placement and
   SiP-ML's rule without relocation, simulated on four fabrics.
3. Models on fabrics of 1,024 devices, compared with data parallelism alone, model parallelism
   alone, and Megatron's rule of thumb: as many shards as a server has devices, stages until the
   model fits, and copies of that.
4. A chain of 50 layers in 128 copies of 8 devices each, for which SiP-ML's simulator needs 35 s and
   9.2 GB (measured on two cores): time and memory of a separate process.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import Goal, provenance, run_main, write_json
from exact import exact_ns, random_graph
from rich.console import Console
from rich.table import Table

from fairway.analysis.topologies import read_topology
from fairway.errors import CapacityError
from fairway.formats.flexflow import read_flexflow
from fairway.placement.graphs import Edge, Op, OpGraph, of_flexflow
from fairway.placement.models import MODELS, SAMPLES, V100
from fairway.placement.search import (
    Replication,
    SearchBounds,
    evaluate_strategy,
    search_strategies,
    simulate_graph,
)

EXACT = Goal(1.05, "of the exact optimum, or less")
FABRICS = ("elect-flat", "elect-cluster", "sip-ring", "sip-ocs")
EVERYTHING = 1 << 50
"""Unlimited memory: task graphs do not record it."""
WHOLE = 10**9
"""A quantum in ns that leaves operations in one piece."""
BATCHES = {"resnet50": 8192, "transformer": 4096, "megatron": 1024}
GPUS = 1024
PER_SERVER = 8
EXACT_SECONDS = 120.0
LAYERS, LAYER_NS, WEIGHTS = 50, 30_000, 100_000_000
"""Parameters of SiP-ML's own example, to compare with its simulator."""


def exact(console: Console, count: int) -> list[dict[str, Any]]:
    """Compares placements of random graphs with the optimum."""
    joined = read_topology("elect-flat:4,rate=8Gbit/s,latency=0ns").interconnect
    rows = []
    for seed in range(count):
        graph = random_graph(5 + seed % 8, seed)
        best = exact_ns(graph, 4, 1.0, EXACT_SECONDS)
        bounds = SearchBounds(EVERYTHING, WHOLE, evaluations=20_000)
        found = evaluate_strategy(graph, joined, Replication(), bounds)
        ratio = found.estimate_s * 1e9 / best if best else None
        bound = found.bound_s * 1e9 / best if best else None
        rows.append({"seed": seed, "operations": len(graph.ops), "ratio": ratio, "bound": bound})
    known = [row["ratio"] for row in rows if row["ratio"] is not None]
    console.print(
        f"{len(known)} of {count} random graphs solved exactly: placements take "
        f"{sum(known) / len(known):.4f} of the optimum on average, {max(known):.4f} at most "
        f"(goal: {EXACT.least} at most)"
    )
    return rows


def of_others(console: Console, folder: Path) -> list[dict[str, Any]]:
    """Compares placements of FlexFlow's graphs with SiP-ML's rule and with the original ones."""
    rows = []
    table = Table(
        "graph of FlexFlow", "fabric", "as placed", "SiP-ML's rule", "ours", "no less than",
        "simulated in s", title="ms a step",
    )  # fmt: skip
    for path in sorted(folder.glob("*.fbuf")):
        graph = read_flexflow(path)
        free = of_flexflow(graph)
        for name in FABRICS:
            # Some task graphs name one device more than there are, that of all hosts.
            joined = read_topology(f"{name}:{graph.devices // 2 * 2}").interconnect
            all_devices = read_topology(f"{name}:{graph.devices}").interconnect
            begin = time.perf_counter()
            given = simulate_graph(graph, all_devices)
            simulated_s = time.perf_counter() - begin
            bounds = SearchBounds(EVERYTHING, WHOLE, evaluations=200)
            rule = evaluate_strategy(free, joined, Replication(rule="range"), bounds)
            ours = evaluate_strategy(free, joined, Replication(), bounds)
            times = [1e3 * each for each in (given.seconds, rule.seconds, ours.seconds)]
            rows.append({"graph": path.stem, "fabric": name, "as_placed_ms": times[0],
                         "rule_ms": times[1], "ours_ms": times[2],
                         "simulated_s": simulated_s})  # fmt: skip
            shown = (*times, 1e3 * ours.bound_s, simulated_s)
            table.add_row(path.stem.removeprefix("100"), name, *(f"{each:.2f}" for each in shown))
    console.print(table)
    return rows


def beside_rules(console: Console) -> list[dict[str, Any]]:
    """Compares models with heuristics, in ms per step."""
    rows = []
    names = ("copies alone", "one copy", "Megatron's rule", "ours")
    table = Table("model", "fabric", *names, title="ms a step")
    for model, batch in BATCHES.items():
        graph = MODELS[model]().graph(V100, SAMPLES)
        for name in FABRICS:
            joined = read_topology(f"{name}:{GPUS}").interconnect
            bounds = SearchBounds(V100.memory_bytes, evaluations=30, spread_max=64)
            strategies = search_strategies(graph, joined, [(batch, 1)], bounds)
            times = [
                _step(graph, joined, batch, GPUS, 1),
                _step(graph, joined, batch, 1, GPUS),
                _megatron(graph, joined, batch),
                strategies[0].step_s,
            ]
            rows.append({"model": model, "fabric": name, **dict(zip(names, times, strict=True))})
            shown = ("does not fit" if math.isinf(time) else f"{1e3 * time:.2f}" for time in times)
            table.add_row(model, name, *shown)
    console.print(table)
    return rows


def _step(graph: OpGraph, joined: Any, batch: int, copies: int, width: int) -> float:
    try:
        strategy = Replication(batch, copies, width, rule="stages")
        found = evaluate_strategy(graph, joined, strategy, SearchBounds(V100.memory_bytes))
    except CapacityError:
        return math.inf
    return found.seconds


def _megatron(graph: OpGraph, joined: Any, batch: int) -> float:
    devices = PER_SERVER
    while devices <= GPUS:
        step = _step(graph, joined, batch, GPUS // devices, PER_SERVER)
        if math.isfinite(step):
            return step
        devices *= 2
    return math.inf


def chain() -> OpGraph:
    """Makes 200 operations: 50 layers, each of two forward and two backward."""
    weights, passed = WEIGHTS // LAYERS, [1_000_000]
    ops: list[Op] = []
    for number in range(2 * LAYERS):
        after = [Edge(number - 1, passed)] if ops else []
        resident = 8 * weights if number % 2 else 0
        ops.append(Op(f"forward {number}", [LAYER_NS], after, resident=resident))
    for number in reversed(range(2 * LAYERS)):
        gradients = weights if number % 2 else 0
        after = [Edge(len(ops) - 1, passed)]
        name = f"backward {number}"
        ops.append(Op(name, [2 * LAYER_NS], after, gradients=gradients, beside=number))
    return OpGraph([1], ops)


def run_chain() -> None:
    """Times the chain on every fabric; runs in a separate process."""
    graph = chain()
    found = {}
    for name in FABRICS:
        rate = "wavelengths=40" if name == "sip-ring" else "rate=1024Gbit/s"
        begin = time.perf_counter()
        joined = read_topology(f"{name}:{GPUS},{rate}").interconnect
        bounds = SearchBounds(32 << 30, quantum_ns=1000, evaluations=0)
        carried = evaluate_strategy(graph, joined, Replication(128, 128, rule="range"), bounds)
        found[name] = (time.perf_counter() - begin, carried.seconds)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"seconds": found, "bytes": most}))


def beside_rostam(console: Console) -> dict[str, Any]:
    """Measures time and memory of the chain."""
    done = subprocess.run(
        [sys.executable, __file__, "--chain"], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    slowest = max(took for took, _ in found["seconds"].values())
    console.print(
        f"a chain of {4 * LAYERS} operations in 128 copies of 8 devices: "
        f"{1e3 * slowest:.1f} ms at most of four fabrics, {found['bytes'] >> 20} MiB with Python "
        "(SiP-ML's simulator: 35 s, 9.2 GB)"
    )
    return found


def main() -> None:
    """Places, simulates, and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with FlexFlow's task graphs")
    parser.add_argument("--graphs", type=int, default=50, help="random graphs")
    parser.add_argument("--chain", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.chain:
        run_chain()
        return
    console = Console()
    found = {"rostam": beside_rostam(console), "exact": exact(console, given.graphs)}
    found["rules"] = beside_rules(console)
    if given.data is not None:
        found["others"] = of_others(console, given.data)
    write_json("placement.json", {**provenance(0, "scipy"), **found})


if __name__ == "__main__":
    run_main(main)
