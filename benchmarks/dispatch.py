"""Measures dispatch throughput of small computations, compared with plain JAX and Ray actors.

The computation is an all-reduce of one scalar per device followed by an addition, each feeding the
next; op by op, and 128 of them inside one program. On one device it is the addition alone.

Source: PATHWAYS §5.1. Differs from the paper: 1. On CPUs; XLA's collectives there take most of the
time, so rates are far from those of accelerators. 2. JAX is multi-controller where an island has
several hosts, and in one process otherwise. 3. Ray has no fused form: it would run a loop of our
own inside the actors and no part of Ray.

Goals: fused with a collective, 0.98 of JAX; op by op over 2x2, 0.95 of multi-controller JAX; op by
op on one device, 15,000/s and 0.75 of a server that computes nothing; op by op, 20 times Ray, which
JAX itself does not reach either where XLA's collectives take most of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common import (
    Goal,
    Spread,
    Worker,
    environment_without,
    interleave,
    medians,
    null_server,
    provenance,
    ratios,
    run_main,
    write_json,
)
from dispatch_client import FUSED
from rich.console import Console
from rich.table import Table

from fairway.cluster.supervisor import Run, client_environment
from fairway.settings import Settings

JAX_WINDOW = 16
"""Unfinished launches of plain JAX; Fairway's hosts have the same bound."""
SETTINGS_OF_JAX = ("JAX_PLATFORMS", "JAX_BACKEND_TARGET", "XLA_FLAGS", "PYTHONWARNINGS")


@dataclasses.dataclass(frozen=True)
class Work:
    """One kind of work.

    Attributes:
        computations: computations per launch.
        first: launches of the first estimate of a system's speed, and the minimum of a round.
    """

    computations: int
    first: int


WORKS = {"op": Work(1, 32), "fused": Work(FUSED, 2), "chained": Work(FUSED, 2)}


@dataclasses.dataclass(frozen=True)
class Island:
    """One island: its hosts and the devices of each."""

    hosts: int
    devices: int

    def __str__(self) -> str:
        return f"{self.hosts}x{self.devices}"

    @property
    def size(self) -> int:
        """Devices of the island."""
        return self.hosts * self.devices


ISLANDS = tuple(Island(*sizes) for sizes in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2)))
QUICK = ("1x1", "2x2")


def works(*names: str) -> dict[str, Work]:
    """Selects kinds of work by name."""
    return {name: WORKS[name] for name in names}


class System:
    """The processes of one system, each of which runs every chain.

    Args:
        workers: one per process.
        works: kinds of work that it can run.
    """

    def __init__(self, workers: Sequence[Worker], works: Mapping[str, Work]) -> None:
        self._workers = workers
        self.works = works

    def everyone(self, **request: Any) -> list[Any]:
        """Sends a request to all processes, and waits for their answers."""
        for worker in self._workers:
            worker.tell(**request)
        return [worker.answer() for worker in self._workers]

    def seconds(self, work: str, count: int) -> float:
        """Runs a chain of launches; returns the slowest process's time."""
        return float(max(self.everyone(do="round", work=work, count=count)))

    def count_for(self, work: str, target_s: float) -> int:
        """Returns launches that take about ``target_s``; also warms up."""
        count = fewest = self.works[work].first
        while (took := self.seconds(work, count)) < target_s / 4:
            count = int(count * min(4.0, max(1.5, target_s / took)))
        return max(fewest, int(count * target_s / took))

    def rate(self, work: str, count: int) -> float:
        """Measures computations per second of one chain."""
        return count * self.works[work].computations / self.seconds(work, count)


class RaySystem(System):
    """Ray actors; they support one kind of work.

    Args:
        ray: the process that drives them.
        values: ``objects`` of Ray, or ``kept`` by the actors.
    """

    def __init__(self, ray: Worker, values: str) -> None:
        super().__init__([ray], works("op"))
        self._values = values

    def seconds(self, work: str, count: int) -> float:
        """Runs a chain of calls."""
        assert work == "op"
        return float(self.everyone(do="round", values=self._values, count=count)[0])


def client(
    environment: Mapping[str, str], *arguments: str, script: str = "dispatch_client.py"
) -> Worker:
    """Returns a process of stock JAX."""
    command = [sys.executable, script, *arguments]
    given = environment_without(*SETTINGS_OF_JAX)
    return Worker(command, {**given, "TF_CPP_MIN_LOG_LEVEL": "2", **environment})


def free_port() -> int:
    """Returns a port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plain_jax(stack: contextlib.ExitStack, island: Island) -> System:
    """Starts JAX on the same devices: one process, or one per host (multi-controller)."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={island.devices}",
    }
    arguments = ["--window", str(JAX_WINDOW)]
    if island.hosts > 1:
        arguments += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes"]
        arguments += [str(island.hosts), "--rank"]
        ranks = [[str(rank)] for rank in range(island.hosts)]
    else:
        ranks = [[]]
    workers = [
        stack.enter_context(client(environment, *arguments, *rank)) for rank in ranks
    ]  # fmt: skip
    return System(workers, works("op", "fused"))


def fairway(stack: contextlib.ExitStack, island: Island, chained: bool = False) -> System:
    """Starts a run with one island, and a client, optionally with chained programs."""
    run = stack.enter_context(Run(Settings.parse(f"1x{island}")))
    worker = stack.enter_context(client(run.environment, *(["--chained"] if chained else [])))
    return System([worker], works("op", "fused", *(["chained"] if chained else [])))


def null(stack: contextlib.ExitStack) -> System:
    """Starts a server that computes nothing (protocol overhead), and a client."""
    target = stack.enter_context(null_server())
    return System([stack.enter_context(client(client_environment(target)))], works("op"))


@dataclasses.dataclass
class Bench:
    """State that all measurements share.

    Attributes:
        starts: restarts of all processes of an island.
        rounds: rounds of each start.
        round_s: approximate time of each system in a round.
        order: random source of the order of systems.
        ray: the process that drives Ray, if there is Ray.
    """

    starts: int
    rounds: int
    round_s: float
    order: random.Random
    ray: Worker | None

    def measure(self, island: Island) -> dict[str, dict[str, Spread]]:
        """Measures rates of all systems, by work and system: the median of each start."""
        starts = [self._start(island) for _ in range(self.starts)]
        return {work: medians([start[work] for start in starts]) for work in ("op", "fused")}

    def _start(self, island: Island) -> dict[str, dict[str, Spread]]:
        with contextlib.ExitStack() as stack:
            systems = {"jax": plain_jax(stack, island), "fairway": fairway(stack, island)}
            if island.size == 1:
                systems["null"] = null(stack)
            for system in systems.values():
                system.everyone(do="compile")
            systems["jax"].everyone(do="check")
            systems["fairway"].everyone(do="check")
            if self.ray is not None:
                systems |= self._gather(stack, self.ray, island)
            return {work: self._rounds(systems, work) for work in ("op", "fused")}

    def _rounds(self, systems: Mapping[str, System], work: str) -> dict[str, Spread]:
        able = {name: system for name, system in systems.items() if work in system.works}
        counts = {name: system.count_for(work, self.round_s) for name, system in able.items()}
        turns = {
            name: functools.partial(system.rate, work, counts[name])
            for name, system in able.items()
        }
        return interleave(turns, self.rounds, self.order)

    def _gather(
        self, stack: contextlib.ExitStack, ray: Worker, island: Island
    ) -> dict[str, System]:
        ray.ask(do="gather", actors=island.size)
        stack.callback(ray.ask, do="dismiss")
        return {"ray": RaySystem(ray, "objects"), "ray, kept": RaySystem(ray, "kept")}


@dataclasses.dataclass(frozen=True)
class Row:
    """Rates of one kind of work on one island, and its goals."""

    island: Island
    work: str
    rates: Mapping[str, Spread]

    def ratio(self, peer: str) -> Spread | None:
        """Returns Fairway's rate over that of a peer."""
        theirs = self.rates.get(peer)
        return ratios(self.rates["fairway"], theirs) if theirs else None

    def goals(self) -> Iterator[tuple[Goal, float]]:
        """Yields each goal for this row, and the value reached."""
        for goal, reached in self._possible():
            if reached is not None:
                yield goal, reached.median

    def _possible(self) -> Iterator[tuple[Goal, Spread | None]]:
        if self.work == "fused":
            if self.island.size > 1:
                yield Goal(0.98, "of JAX"), self.ratio("jax")
            return
        if self.island == Island(2, 2):
            yield Goal(0.95, "of JAX"), self.ratio("jax")
        if self.island.size == 1:
            yield Goal(15_000, "per s"), self.rates["fairway"]
            yield Goal(0.75, "of null"), self.ratio("null")
        yield Goal(20, "x Ray"), self.ratio("ray")

    def as_json(self) -> dict[str, Any]:
        """Returns all data as JSON."""
        peers = [peer for peer in self.rates if peer != "fairway"]
        found = {peer: ratio for peer in peers if (ratio := self.ratio(peer))}
        return {
            "hosts": self.island.hosts,
            "devices_per_host": self.island.devices,
            "work": self.work,
            "computations_per_s": {name: rate.as_json() for name, rate in self.rates.items()},
            "fairway_over": {peer: ratio.as_json() for peer, ratio in found.items()},
            "goals": [
                {"what": goal.what, "least": goal.least, "reached": reached}
                for goal, reached in self.goals()
            ],
        }

    def cells(self) -> list[str]:
        """Returns the row of the table."""
        jax, ray, null = self.ratio("jax"), self.ratio("ray"), self.ratio("null")
        others = []
        if null:
            others.append(f"{null.show()} of null")
        if ray:
            limit = ratios(self.rates["jax"], self.rates["ray"]).median
            others.append(f"{ray.show('.1f')} x Ray (JAX: {limit:.1f} x)")
        if kept := self.ratio("ray, kept"):
            others.append(f"{kept.show('.1f')} x Ray with values kept")
        return [
            str(self.island),
            "op by op" if self.work == "op" else f"{FUSED} fused",
            self.rates["fairway"].show(",.0f"),
            self.rates["jax"].show(",.0f"),
            jax.show() if jax else "",
            "\n".join(others),
            "\n".join(goal.verdict(reached) for goal, reached in self.goals()),
        ]


def show(rows: Sequence[Row]) -> None:
    """Prints the table."""
    table = Table(title="Computations per second: median, lowest and highest of the starts")
    columns = ("hosts x devices", "work", "Fairway", "JAX", "of JAX", "of others", "goals")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row.cells(), end_section=row.work == "fused")
    Console(width=150 if not sys.stdout.isatty() else None).print(table)


@contextlib.contextmanager
def ray_driver(python: str) -> Iterator[Worker | None]:
    """Starts the process that drives Ray; None, with a message, if Ray is not installed."""
    probe = subprocess.run([python, "-c", "import ray"], capture_output=True, check=False)
    if probe.returncode != 0:
        print(
            f"Ray is not measured: {python} has no Ray; install it with `uv pip install ray`, "
            "or name a Python that has it with --ray-python"
        )
        yield None
        return
    environment = environment_without(*SETTINGS_OF_JAX)
    with Worker([python, "dispatch_ray.py"], environment) as driver:
        yield driver


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [str(island) for island in ISLANDS]
    parser.add_argument("--only", help=f"islands to measure, of {','.join(names)}")
    parser.add_argument("--quick", action="store_true", help="few islands and short rounds")
    parser.add_argument("--starts", type=int, help="how often all of an island is started anew")
    parser.add_argument("--rounds", type=int, help="rounds of each start")
    parser.add_argument("--seed", type=int, default=0, help="decides the order in each round")
    parser.add_argument("--ray-python", default=sys.executable, help="a Python that has Ray")
    given = parser.parse_args()
    chosen = given.only.split(",") if given.only else QUICK if given.quick else names
    if unknown := set(chosen) - set(names):
        parser.error(f"there is no island {', '.join(sorted(unknown))}; there are {names}")
    given.islands = [island for island in ISLANDS if str(island) in chosen]
    given.starts = given.starts or (1 if given.quick else 10)
    given.rounds = given.rounds or 3
    given.round_s = 0.15 if given.quick else 0.3
    return given


def main() -> None:
    """Measures, prints and writes ``out/dispatch.json``."""
    given = arguments()
    about = provenance(given.seed, "jax", "jaxlib", "numpy")
    rows = []
    with ray_driver(given.ray_python) as ray:
        order = random.Random(given.seed)
        bench = Bench(given.starts, given.rounds, given.round_s, order, ray)
        for island in given.islands:
            for work, rates in bench.measure(island).items():
                rows.append(Row(island, work, rates))
                print(*rows[-1].cells()[:5], sep="  ", flush=True)
    show(rows)
    write_json("dispatch.json", {**about, "rows": [row.as_json() for row in rows]})


if __name__ == "__main__":
    run_main(main)
