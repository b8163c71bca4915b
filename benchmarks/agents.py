"""Measures what agents of hosts on other machines cost their controller, from 10 to 1,000 of them.

Agents have no devices, and run no hosts: each is a TLS connection by a real socket, says hello,
keeps its lease and reads what the controller sends. All are in one process, and the controller is
alone in another, so that its time and memory are its own. Both share the cores of one machine: the
agents' half of each TLS handshake is made on them, too, so the time to join is an upper bound.

Figures:
- join: from the first connection of agents that come at once until all are admitted; those that are
  evicted try again after a second;
- join, CPU: the controller's CPU time for it, of each agent;
- memory: growth of the controller's resident memory by each agent that has joined;
- heartbeats: the controller's CPU time of each agent and second, less that without agents;
- launch: from the request for an island of as many hosts until the last agent has read of it;
- waiting: the controller's CPU time of each host and second until these hosts are up, heartbeats
  included.

Goal: a cost of each agent at the largest number is at most twice that at the smallest.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from common import Goal, Spread, Worker, environment_without, provenance, run_main, write_json
from rich.console import Console
from rich.table import Table

FIGURES = {
    "join_s": ("join", "s", 1.0, True),
    "join_cpu_s": ("join, CPU", "ms per agent", 1e3, False),
    "memory_bytes": ("memory", "KiB per agent", 1 / 1024, False),
    "heartbeat_cpu": ("heartbeats, CPU", "µs per agent and s", 1e6, False),
    "launch_s": ("launch", "s", 1.0, True),
    "launch_cpu_s": ("launch, CPU", "ms per agent", 1e3, False),
    "waiting_cpu": ("waiting, CPU", "µs per host and s", 1e6, False),
    "evicted": ("tries that failed", "of an agent", 1.0, False),
}
"""Heading, unit, factor, and whether the figure is of all agents rather than of each."""
SETTLE_S = 0.5
"""Time in which what the last step has left over is done."""


def measure(count: int, at_once: int, listen_s: float) -> dict[str, float]:
    """Measures a new controller with this many agents.

    Args:
        count: number of agents.
        at_once: most that connect at a time.
        listen_s: time for which heartbeats are measured.

    Raises:
        WorkerError: not all agents could join, or were asked to start a host.
    """
    environment = environment_without("JAX_PLATFORMS", "JAX_BACKEND_TARGET")
    command = [sys.executable, "agents_worker.py"]
    with (
        Worker([*command, "controller"], environment) as controller,
        Worker([*command, "agents"], environment) as agents,
    ):
        agents.ask(do="know", **controller.ask(do="where"))
        idle = _cpu_of(controller, listen_s) / listen_s
        before = controller.ask(do="costs")
        joined = agents.ask(do="join", count=count, at_once=at_once)
        time.sleep(SETTLE_S)
        after = controller.ask(do="costs")
        beating = _cpu_of(controller, listen_s) / listen_s
        came = controller.ask(do="costs")
        launched_s = controller.ask(do="launch", hosts=count)
        started_s = agents.ask(do="started", count=count)
        launched = controller.ask(do="costs")
        waiting = _cpu_of(controller, listen_s) / listen_s
        lost = agents.ask(do="lost")
        if lost:
            raise SystemExit(f"{lost} of {count} agents have lost the controller")
        ended_s = controller.ask(do="end")
    return {
        "join_s": joined["join_s"],
        "join_cpu_s": (after["cpu_s"] - before["cpu_s"]) / count,
        "evicted": (joined["tries"] - count) / count,
        "memory_bytes": (after["memory_bytes"] - before["memory_bytes"]) / count,
        "heartbeat_cpu": max(0.0, beating - idle) / count,
        "launch_s": started_s[-1] - launched_s,
        "launch_median_s": started_s[len(started_s) // 2] - launched_s,
        "launch_cpu_s": (launched["cpu_s"] - came["cpu_s"]) / count,
        "waiting_cpu": waiting / count,
        "descriptors": (after["descriptors"] - before["descriptors"]) / count,
        "threads": after["threads"],
        "idle_cpu": idle,
        "end_s": ended_s,
    }


def _cpu_of(controller: Worker, listen_s: float) -> float:
    """Returns the controller's CPU time in a period, in seconds."""
    before = controller.ask(do="costs")
    time.sleep(listen_s)
    return float(controller.ask(do="costs")["cpu_s"] - before["cpu_s"])


def show(found: dict[int, dict[str, Spread]]) -> Table:
    """Returns a table of each figure for each number of agents."""
    table = Table(title="Median, lowest and highest of the rounds")
    table.add_column("figure")
    for count in found:
        table.add_column(f"{count:,} agents")
    table.add_column("ratio of the last to the first, per agent")
    first, last = min(found), max(found)
    goal = Goal(0.5, "first to last, per agent")
    for name, (heading, unit, factor, is_of_all) in FIGURES.items():
        shown = [
            Spread(tuple(value * factor for value in spreads[name].values)).show(".3g")
            for spreads in found.values()
        ]
        per_agent = [
            found[count][name].median / (count if is_of_all else 1) for count in (first, last)
        ]
        if min(per_agent) > 0:
            ratio = f"{per_agent[1] / per_agent[0]:.2f} "
            ratio += goal.verdict(per_agent[0] / per_agent[1])
        else:
            ratio = "-"
        table.add_row(f"{heading} ({unit})", *shown, ratio)
    return table


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", default="10,100,300,1000", help="numbers of agents")
    parser.add_argument(
        "--at-once", type=int, default=1000, help="most agents that connect at a time"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--listen", type=float, default=8.0, help="seconds of heartbeats")
    given = parser.parse_args()
    counts = [int(count) for count in given.agents.split(",")]
    rounds: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for _ in range(given.rounds):
        for count in counts:
            rounds[count].append(measure(count, given.at_once, given.listen))
    found = {
        count: {name: Spread(tuple(one[name] for one in of)) for name in of[0]}
        for count, of in rounds.items()
    }
    Console(width=150).print(show(found))
    report: dict[str, Any] = {"provenance": provenance(1, "jaxlib")}
    for count, spreads in found.items():
        report[str(count)] = {name: spread.as_json() for name, spread in spreads.items()}
    write_json("agents.json", report)


if __name__ == "__main__":
    run_main(main)
