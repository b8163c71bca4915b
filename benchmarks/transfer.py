"""Measures transfer rates of arrays: between islands, and between a client and an island.

Between islands: `jax.device_put` of an array from a device of one island to a device of another,
until it is ready, over the data plane of one machine (shared memory) and that between machines
(TCP). Compared with two processes that copy the same bytes through shared memory that stays mapped,
and two that send them over two TCP streams.

Between client and island: `jax.device_put` of a numpy array and `numpy.asarray` of an array.
Compared with the same client and a server that drops what it is sent and sends zeros: the protocol
transfers bytes only as 1 MiB messages over gRPC, so that is the limit. And, where gRPC for Python
is installed, a bare stream of such messages.

Over links: islands of two hosts each, every host in a network namespace of its own with a link to
each of two networks, which ``tc tbf`` limits to ``--mbit``. From a device of one host to one of
another island: over one link, and, where channels are configured, over those of the neighbouring
host, over two channels, and over both (multi-path striping). Needs root.

Goals: 64 MiB between islands at 0.9 of the better raw transport; over N links, 0.9 of N times one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import wires
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
from rich.console import Console
from rich.table import Table

from fairway.cluster.supervisor import Run, client_environment
from fairway.settings import ChannelSettings, IslandSettings, Settings

MIB = 1 << 20
ROUNDS = {1 * MIB: 3, 64 * MIB: 3, 512 * MIB: 1}
"""Rounds of each start, by size."""
GOAL_BYTES = 64 * MIB
FAIRWAY = {"fairway": "unix", "fairway over TCP": "tcp"}
"""Data plane of each run."""
RAW = {"shared memory": "memory", "two TCP streams": "streams"}
ACROSS_PEERS = {"fairway": tuple(RAW), "fairway over TCP": ("two TCP streams",)}
"""Raw transports to compare each data plane with: the better one counts."""
LIMIT = "same client, null server"
ISLANDS = "2x1x1"
PARTS = ("across", "between", "links")
ONE_LINK = "one link"
LINKED = {
    ONE_LINK: (2, 0, 1),
    "host beside": (2, 1, 2),
    "two channels": (1, 2, 2),
    "both": (2, 2, 4),
}
"""Hosts of each island, channels in the settings, and links that can be used."""
SETTINGS_OF_JAX = ("JAX_PLATFORMS", "JAX_BACKEND_TARGET", "XLA_FLAGS", "PYTHONWARNINGS")


@dataclasses.dataclass(frozen=True)
class Row:
    """Rates of one kind of transfer at one size."""

    move: str
    size: int
    rates: Mapping[str, Spread]
    peers: Mapping[str, tuple[str, ...]]
    goals: Mapping[str, Goal] = dataclasses.field(default_factory=dict)

    def ratio(self, system: str) -> Spread | None:
        """Returns the rate of a system over that of its best peer, round by round."""
        if system not in self.peers:
            return None
        rounds = zip(*(self.rates[peer].values for peer in self.peers[system]), strict=True)
        return ratios(self.rates[system], Spread(tuple(map(max, rounds))))

    def as_json(self) -> dict[str, Any]:
        """Returns all data as JSON."""
        return {
            "move": self.move,
            "bytes": self.size,
            "bytes_per_s": {name: rate.as_json() for name, rate in self.rates.items()},
            "over_best_peer": {
                name: ratio.as_json() for name in self.peers if (ratio := self.ratio(name))
            },
            "goals": {
                name: {"what": goal.what, "least": goal.least, "reached": ratio.median}
                for name, goal in self.goals.items()
                if (ratio := self.ratio(name))
            },
        }

    def cells(self) -> list[list[str]]:
        """Returns the rows of the table, one per system."""
        rows = []
        for name, rate in self.rates.items():
            ratio = self.ratio(name)
            goal = self.goals.get(name)
            verdict = goal.verdict(ratio.median) if goal and ratio else ""
            in_mib = Spread(tuple(value / MIB for value in rate.values))
            took_ms = self.size / rate.median * 1e3
            cells = [name, in_mib.show(",.0f"), f"{took_ms:.2f}", ratio.show() if ratio else ""]
            rows.append([*cells, verdict])
        return [
            [f"{self.move} {self.size // MIB} MiB" if index == 0 else "", *row]
            for index, row in enumerate(rows)
        ]


@dataclasses.dataclass
class Bench:
    """State that all measurements share.

    Attributes:
        rounds: rounds of each, if not those in ``ROUNDS``.
        round_s: approximate time of each system in a round.
        order: random source of the order of systems.
    """

    rounds: int | None
    round_s: float
    order: random.Random

    def measure(self, workers: Mapping[str, Worker], do: str, size: int) -> dict[str, Spread]:
        """Measures bytes per second of each worker."""
        turns = {}
        for name, worker in workers.items():
            worker.ask(do=do, count=2)
            took = worker.ask(do=do, count=2) / 2
            count = max(1, round(self.round_s / took))
            turns[name] = functools.partial(_rate, worker, do, size, count)
        return interleave(turns, self.rounds or ROUNDS[size], self.order)


def _rate(worker: Worker, do: str, size: int, count: int) -> float:
    return count * size / float(worker.ask(do=do, count=count))


def islands(stack: contextlib.ExitStack) -> dict[str, Worker]:
    """Starts islands with either data plane, and a client of each."""
    given = environment_without(*SETTINGS_OF_JAX)
    runs = {name: Run(Settings.parse(ISLANDS, data_plane=plane)) for name, plane in FAIRWAY.items()}
    workers = {}
    for name, run in runs.items():
        stack.enter_context(run)
        environment = {**given, "TF_CPP_MIN_LOG_LEVEL": "2", **run.environment}
        client = Worker([sys.executable, "transfer_client.py"], environment)
        workers[name] = stack.enter_context(client)
    return workers


def limit(stack: contextlib.ExitStack) -> dict[str, Worker]:
    """Starts the same client with a server that discards the bytes."""
    target = stack.enter_context(null_server())
    environment = {**environment_without(*SETTINGS_OF_JAX), **client_environment(target)}
    worker = Worker([sys.executable, "transfer_client.py"], environment)
    return {LIMIT: stack.enter_context(worker)}


def raw(stack: contextlib.ExitStack) -> dict[str, Worker]:
    """Starts the raw transports."""
    given = environment_without()
    return {
        name: stack.enter_context(Worker([sys.executable, "transfer_raw.py", means], given))
        for name, means in RAW.items()
    }


def bare_grpc(stack: contextlib.ExitStack, python: str) -> dict[str, Worker]:
    """Starts a bare gRPC stream; none, with a message, if gRPC is not installed."""
    probe = subprocess.run([python, "-c", "import grpc"], capture_output=True, check=False)
    if probe.returncode != 0:
        print(
            f"a bare gRPC stream is not measured: {python} has no gRPC; install it with "
            "`uv pip install grpcio`, or name a Python that has it with --grpc-python"
        )
        return {}
    command = [python, "transfer_grpc.py", "--python", python]
    return {"bare gRPC": stack.enter_context(Worker(command, environment_without()))}


def across(bench: Bench, workers: Mapping[str, Worker], size: int) -> Row:
    """Measures transfers between islands."""
    for worker in workers.values():
        worker.ask(do="prepare", size=size)
    goals = {"fairway": Goal(0.9, "of raw")} if size == GOAL_BYTES else {}
    rates = bench.measure(workers, "across", size)
    return Row("island to island", size, rates, ACROSS_PEERS, goals)


def between(bench: Bench, workers: Mapping[str, Worker]) -> list[Row]:
    """Measures transfers between a client and an island."""
    for worker in workers.values():
        worker.ask(do="prepare_host", size=GOAL_BYTES)
    workers["fairway"].ask(do="check_host")
    peers = {"fairway": (LIMIT,)}
    moves = {"up": "client to island", "down": "island to client"}
    return [
        Row(move, GOAL_BYTES, bench.measure(workers, do, GOAL_BYTES), peers)
        for do, move in moves.items()
    ]


def linked(stack: contextlib.ExitStack, mbit: int) -> dict[str, Worker]:
    """Starts two islands in namespaces for each configuration of hosts and channels."""
    places = stack.enter_context(wires.joined(2, [mbit * 1_000_000] * 2, hosts=2))
    given = environment_without(*SETTINGS_OF_JAX)
    workers = {}
    for name, (hosts, channels, _) in LINKED.items():
        islands = tuple(
            IslandSettings(
                hosts,
                1,
                place.prefix,
                place.addresses[0],
                tuple(
                    ChannelSettings(address, f"{mbit}Mbit/s")
                    for address in place.addresses[:channels]
                ),
            )
            for place in places
        )
        # Hosts of one island share memory; without channels, other islands are reached at their
        # addresses.
        run = stack.enter_context(Run(Settings(islands, data_plane="unix" if channels else "both")))
        environment = {**given, "TF_CPP_MIN_LOG_LEVEL": "2", **run.environment}
        client = Worker([sys.executable, "transfer_client.py"], environment)
        workers[name] = stack.enter_context(client)
    return workers


def over_links(bench: Bench, workers: Mapping[str, Worker]) -> Row:
    """Measures transfers over rate-limited links."""
    for worker in workers.values():
        worker.ask(do="prepare", size=GOAL_BYTES)
    peers = {name: (ONE_LINK,) for name in LINKED if name != ONE_LINK}
    goals = {name: Goal(0.9 * links, "of one link") for name, (_, _, links) in LINKED.items()}
    rates = bench.measure(workers, "across", GOAL_BYTES)
    return Row("over links", GOAL_BYTES, rates, peers, {name: goals[name] for name in peers})


def show(rows: Sequence[Row]) -> None:
    """Prints the table."""
    table = Table(title="Median, lowest and highest of the starts")
    for name in ("move", "way", "MiB/s", "ms each", "of its best peer", "goal"):
        table.add_column(name)
    for row in rows:
        for cells in row.cells():
            table.add_row(*cells)
        table.add_section()
    Console(width=150 if not sys.stdout.isatty() else None).print(table)
    print(
        "The limit between client and island is the protocol's: 1 MiB messages over gRPC, which "
        f"the client copies and frames; it is measured as {LIMIT!r}."
    )


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="64 MiB alone, in short rounds")
    parser.add_argument("--only", choices=PARTS, help="one of the parts")
    parser.add_argument("--mbit", type=int, default=500, help="rate of links, in Mbit/s")
    parser.add_argument("--starts", type=int, help="how often everything is started anew")
    parser.add_argument("--rounds", type=int, help="rounds of each start")
    parser.add_argument("--seed", type=int, default=0, help="decides the order in each round")
    parser.add_argument("--grpc-python", default=sys.executable, help="a Python that has grpcio")
    given = parser.parse_args()
    given.starts = given.starts or (1 if given.quick else 10)
    given.rounds = given.rounds or (3 if given.quick else None)
    return given


def measure(given: argparse.Namespace) -> list[Row]:
    """Runs all starts; returns medians over them."""
    starts = [started(given) for _ in range(given.starts)]
    return [
        dataclasses.replace(of[0], rates=medians([row.rates for row in of]))
        for of in zip(*starts, strict=True)
    ]


def started(given: argparse.Namespace) -> list[Row]:
    """Starts all processes and measures the parts that were selected."""
    bench = Bench(given.rounds, 0.1 if given.quick else 0.25, random.Random(given.seed))
    rows: list[Row] = []
    parts = (given.only,) if given.only else PARTS
    if "links" in parts and wires.can_join():
        with contextlib.ExitStack() as stack:
            rows.append(over_links(bench, linked(stack, given.mbit)))
    elif "links" in parts:
        print("links are not measured: namespaces need root, ip and tc")
    if set(parts) == {"links"}:
        return rows
    with contextlib.ExitStack() as stack:
        clients = islands(stack)
        if "across" in parts:
            sizes = (GOAL_BYTES,) if given.quick else tuple(ROUNDS)
            workers = {**clients, **raw(stack)}
            rows += [across(bench, workers, size) for size in sizes]
        if "between" in parts:
            workers = {"fairway": clients["fairway"], **limit(stack)}
            rows += between(bench, {**workers, **bare_grpc(stack, given.grpc_python)})
    return rows


def main() -> None:
    """Measures, prints and writes ``out/transfer.json``."""
    given = arguments()
    about = provenance(given.seed, "jax", "jaxlib", "numpy")
    rows = measure(given)
    show(rows)
    write_json("transfer.json", {**about, "rows": [row.as_json() for row in rows]})


if __name__ == "__main__":
    run_main(main)
