"""Compares planning and simulation of networks with established tools.

1. An all-gather of 64 MiB on the 264-chip Dragonfly, planned: planning time and duration of the
   collective, compared with TACOS.
2. A ring all-reduce of 64 MiB over 1,024 endpoints, 4 chunks in sequence, simulated message by
   message, compared with ASTRA-sim's analytical network.
3. 422,400 one-vector messages on a Dragonfly of 33 groups of 8 routers, uniform traffic, minimal
   routes, compared with BookSim.

Peers are built separately from this repository; each option is the command that runs one, and
without it ours is measured alone. Ours is timed without starting Python, TACOS by its own clock,
the others as whole processes. Memory is of whole processes, and at least that of this one.

Goals: planned in 0.2 s and 0.97 of the bound; the ring in 0.5 s and 100 MB; 20 times BookSim.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from typing import Any

from common import Goal, Spread, interleave, provenance, ratios, run_main, write_json
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

CHIPS, TENSOR = 264, 64 << 20
MESSAGES = 1600
"""Messages per chip: 400 of each of BookSim's 4 terminals at a router."""

GATHER = f"""
import json, time
from fairway import _native
fabric = _native.Topology.parse("dragonfly:{CHIPS}").fabric
begin = time.perf_counter()
plan = fabric.collective("all-gather", {TENSOR})
print("seconds", time.perf_counter() - begin, "simulated_us", plan.end_ticks / 9e5)
"""
RING = """
import time
from fairway import _native
fabric = _native.Topology.parse("ring:1024,rate=429.4967296Gbit/s,latency=500ns").fabric
begin = time.perf_counter()
end, count = fabric.ring_all_reduce(16, 4, (1e9, 1024, 1024, 0, 1 << 20))
print("seconds", time.perf_counter() - begin, "simulated_us", end / 1e6, "messages", count)
"""
UNIFORM = f"""
import time
from fairway import _native
fabric = _native.Topology.parse("dragonfly:{CHIPS}").fabric
begin = time.perf_counter()
end, taken = fabric.uniform_messages({MESSAGES}, 1, 0, "minimal", 1)
print("seconds", time.perf_counter() - begin, "simulated_us", end / 9e5, "messages", len(taken))
"""


@dataclasses.dataclass(frozen=True)
class Work:
    """A workload of ours and a peer.

    Attributes:
        name: of the workload.
        ours: a Python program that executes it and prints its time and result.
        peer: the peer's name.
        expression: regular expression of the peer's result.
        scale: factor of the result to microseconds.
        planning: regular expression of the peer's own planning time, if it prints one.
        goal: required ratio of the peer's time to ours.
    """

    name: str
    ours: str
    peer: str
    expression: str
    scale: float
    planning: str | None
    goal: Goal


WORKS = (
    Work("all-gather, planned", GATHER, "tacos", r"collective_us=([\d.]+)", 1.0,
         r"plan_s=([\d.]+)", Goal(1.0, "of TACOS's planning")),
    Work("ring all-reduce, simulated", RING, "astra", r"finished, (\d+)", 1e-3, None,
         Goal(1.0, "of ASTRA-sim's rate")),
    Work("uniform messages, simulated", UNIFORM, "booksim", r"Time taken is (\d+)", 1.0, None,
         Goal(20.0, "of BookSim's rate")),
)  # fmt: skip


@dataclasses.dataclass
class System:
    """One side of a comparison: its command and the output of its runs.

    Attributes:
        command: starts a run.
        expression: regular expression of the result.
        scale: factor of the result to microseconds; BookSim's are cycles.
        seconds: regular expression of the time, if it is printed; else the whole process counts.
        found: result of each run.
        kilobytes: peak memory over all runs.
    """

    command: list[str]
    expression: str
    scale: float
    seconds: str | None
    found: list[float] = dataclasses.field(default_factory=list)
    kilobytes: int = 0

    def run(self) -> float:
        """Runs it once; returns the time in seconds.

        Raises:
            RuntimeError: the output has no result.
        """
        with tempfile.TemporaryFile("w+") as output:
            begin = time.perf_counter()
            process = subprocess.Popen(self.command, stdout=output, stderr=subprocess.STDOUT)
            _, _, used = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - begin
            output.seek(0)
            text = output.read()
        results = [float(one) * self.scale for one in re.findall(self.expression, text)]
        if not results:
            shown = f"{shlex.join(self.command)} says nothing like {self.expression}"
            raise RuntimeError(f"{shown}: {text[-500:]}")
        said = [float(one) for one in re.findall(self.seconds, text)] if self.seconds else []
        # A tool that plans several times counts by its best plan and the time of one.
        self.found.append(min(results) if said else max(results))
        self.kilobytes = max(self.kilobytes, used.ru_maxrss)
        return min(said) if said else seconds

    def cells(self, seconds: Spread) -> list[str]:
        """Returns time, memory and result for the table."""
        return [seconds.show(".3f"), f"{self.kilobytes / 1024:.0f}", f"{min(self.found):,.1f}"]


def systems(work: Work, peer: str | None) -> dict[str, System]:
    """Returns our side, and the peer's if its command is given."""
    ours = [sys.executable, "-c", work.ours]
    found = {"fairway": System(ours, r"simulated_us ([\d.]+)", 1.0, r"seconds ([\d.e-]+)")}
    if peer:
        command = shlex.split(peer)
        found["peer"] = System(command, work.expression, work.scale, work.planning)
    return found


def main() -> None:
    """Measures, prints and writes ``out/networks.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tacos", help="command that plans; prints collective_us= and plan_s=")
    parser.add_argument("--astra", help="command that simulates; prints 'finished, CYCLES'")
    parser.add_argument("--booksim", help="command that simulates; prints 'Time taken is CYCLES'")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="decides the order in each round")
    given = parser.parse_args()
    about = provenance(given.seed, "numpy")
    console = Console(width=120 if not sys.stdout.isatty() else None)
    peers = {"tacos": given.tacos, "astra": given.astra, "booksim": given.booksim}
    order = random.Random(given.seed)
    table = Table(title="Median, lowest, highest")
    for name in ("work", "Fairway, s", "MB", "us", "peer, s", "MB", "says", "times as fast"):
        table.add_column(name)
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(WORKS))
        for work in WORKS:
            known = systems(work, peers[work.peer])
            runs = {name: system.run for name, system in known.items()}
            spreads = interleave(runs, given.rounds, order)
            progress.advance(task)
            cells = [work.name]
            row: dict[str, Any] = {"work": work.name}
            for name, system in known.items():
                cells += system.cells(spreads[name])
                row[name] = {"seconds": spreads[name].as_json(), "found": system.found,
                             "kilobytes": system.kilobytes}  # fmt: skip
            if "peer" in known:
                faster = ratios(spreads["peer"], spreads["fairway"])
                cells.append(f"{faster.show('.1f')} {work.goal.verdict(faster.median)}")
                row["ratio"] = faster.as_json()
            rows.append(row)
            table.add_row(*cells)
    console.print(table)
    write_json("networks.json", {**about, "rows": rows})


if __name__ == "__main__":
    run_main(main)
