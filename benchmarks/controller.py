"""Measures the controller's CPU time by number of hosts: the costs of the simulator.

One client of stock JAX runs one computation after another over all devices of an island whose hosts
answer at once and compute nothing. The server's CPU time per launch is decomposed into the cost of
each client request, each command to a host and each report of a host. Hosts claim short
computations in some rounds, so that they are seldom asked for reports, and long ones in others.

The two requests of a launch are the execution and the deletion of the array that it replaces; each
becomes one command to each host. ``client`` is the time of the client's thread for both, ``launch``
that of a real host's thread for both, with an addition of one scalar.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import Spread, Worker, environment_without, provenance, write_json
from dispatch import SETTINGS_OF_JAX
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fairway.cluster.supervisor import Run, client_environment
from fairway.settings import Settings

HOSTS = (1, 16, 64, 256)
RUN_TIMES_NS = (5_000, 1_000_000)
"""Launch times that hosts claim: reports are seldom, or come for each launch."""
ROUND_S = 1.0
REQUESTS_PER_LAUNCH = 2


def worker(role: str, environment: dict[str, str]) -> Worker:
    """Starts one of the processes."""
    given = environment_without(*SETTINGS_OF_JAX)
    settings = {**given, "TF_CPP_MIN_LOG_LEVEL": "2", **environment}
    return Worker([sys.executable, "controller_worker.py", role], settings)


@dataclasses.dataclass(frozen=True)
class Point:
    """Measurements of one round, per launch.

    Attributes:
        hosts: of the island.
        run_ns: launch time that hosts claim.
        rate: launches per second.
        user_us: the server's user CPU time.
        system_us: the server's system CPU time: sockets and wake-ups.
        commands: to all hosts.
        reports: of all hosts.
        client_us: time of the client's thread that launches.
    """

    hosts: int
    run_ns: int
    rate: float
    user_us: float
    system_us: float
    commands: float
    reports: float
    client_us: float

    @property
    def server_us(self) -> float:
        """The server's CPU time."""
        return self.user_us + self.system_us


class Island:
    """The server with fake hosts, and one client.

    Args:
        stack: ends them.
        hosts: number of hosts.
    """

    def __init__(self, stack: contextlib.ExitStack, hosts: int) -> None:
        self._hosts = hosts
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        self._server = stack.enter_context(worker("server", {}))
        target = self._server.ask(do="start", hosts=hosts, directory=directory)
        self._fakes = stack.enter_context(worker("hosts", {}))
        self._fakes.ask(do="start", hosts=hosts, directory=directory)
        while not self._server.ask(do="is_up"):
            pass
        self._client = stack.enter_context(worker("client", client_environment(target)))
        self._fakes.ask(do="run_time", launch_ns=RUN_TIMES_NS[0])
        assert self._client.ask(do="start") == hosts

    def round(self, run_ns: int, seconds: float) -> Point:
        """Measures the client for about ``seconds``."""
        self._fakes.ask(do="run_time", launch_ns=run_ns)
        count = 256
        while (took := self._client.ask(do="run", count=count)["wall_s"]) < seconds / 4:
            count *= 2
        count = int(count * seconds / took)
        before, used = self._fakes.ask(do="counts"), self._server.ask(do="used")
        client = self._client.ask(do="run", count=count)
        after, spent = self._fakes.ask(do="counts"), self._server.ask(do="used")
        made = {name: (after[name] - before[name]) / count for name in after}
        user, system = (1e6 * (end - begin) / count for begin, end in zip(used, spent, strict=True))
        return Point(
            hosts=self._hosts,
            run_ns=run_ns,
            rate=count / client["wall_s"],
            user_us=user,
            system_us=system,
            commands=made["launch"] + made["free"],
            reports=made["report"],
            client_us=1e6 * client["thread_s"] / count,
        )


def fit(points: Sequence[Point]) -> dict[str, float]:
    """Fits nanoseconds of a request, a command and a report to the points (least squares).

    Relative errors are weighted equally, so that large islands do not dominate small ones.
    """
    rows = [[REQUESTS_PER_LAUNCH, point.commands, point.reports] for point in points]
    costs_us = np.array([point.server_us for point in points])
    weighted = np.array(rows) / costs_us[:, None]
    found, *_ = np.linalg.lstsq(weighted, np.ones(len(points)), rcond=None)
    off = weighted @ found - 1
    names = ("request", "command", "report")
    return {**dict(zip(names, 1e3 * found, strict=True)), "off": float(abs(off).max())}


def host_launch(rounds: int, seconds: float) -> Spread:
    """Measures microseconds of a real host's thread for a launch and the deletion of an array."""
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(Run(Settings.parse("1x1x1")))
        client = stack.enter_context(worker("client", run.environment))
        client.ask(do="start")
        process = run.overview()["islands"][0]["hosts"][0]["process"]

        def used_ns() -> int:
            return int(Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()[0])

        values = []
        for _ in range(rounds):
            count = int(seconds * 10_000)
            before = used_ns()
            client.ask(do="run", count=count)
            values.append((used_ns() - before) / 1e3 / count)
        return Spread(tuple(values))


def show(points: Sequence[Point], console: Console) -> None:
    """Prints the table."""
    table = Table(title="By launch: microseconds, medians of the rounds")
    columns = ("hosts", "a launch takes", "launches/s", "server", "of it system", "commands")
    for name in (*columns, "reports", "client"):
        table.add_column(name, justify="right")
    for hosts, run_ns in sorted({(point.hosts, point.run_ns) for point in points}):
        chosen = [point for point in points if (point.hosts, point.run_ns) == (hosts, run_ns)]

        def middle(name: str, form: str = ".1f", chosen: Sequence[Point] = chosen) -> str:
            return f"{statistics.median(getattr(point, name) for point in chosen):{form}}"

        server = Spread(tuple(point.server_us for point in chosen)).show(".1f")
        table.add_row(
            str(hosts),
            f"{run_ns / 1e3:g} us",
            middle("rate", ",.0f"),
            server,
            middle("system_us"),
            middle("commands"),
            middle("reports", ".2f"),
            middle("client_us"),
        )
    console.print(table)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few hosts and short rounds")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each kind")
    parser.add_argument("--seed", type=int, default=0, help="decides the order in each round")
    return parser.parse_args()


def main() -> None:
    """Measures, prints and writes ``out/controller.json``."""
    given = arguments()
    about = provenance(given.seed, "jax", "jaxlib", "numpy")
    console = Console(width=120 if not sys.stdout.isatty() else None)
    seconds = 0.3 if given.quick else ROUND_S
    order = random.Random(given.seed)
    points: list[Point] = []
    with Progress(console=console, transient=True) as progress:
        chosen = HOSTS[:2] if given.quick else HOSTS
        task = progress.add_task("hosts", total=len(chosen))
        for hosts in chosen:
            with contextlib.ExitStack() as stack:
                island = Island(stack, hosts)
                kinds = [run_ns for run_ns in RUN_TIMES_NS for _ in range(given.rounds)]
                order.shuffle(kinds)
                points += [island.round(run_ns, seconds) for run_ns in kinds]
            progress.advance(task)
        launch = host_launch(given.rounds, seconds)
    show(points, console)
    costs = fit(points)
    client = Spread(tuple(point.client_us for point in points))
    print(f"ns: request {costs['request']:,.0f}, command {costs['command']:,.0f}, ", end="")
    print(f"report {costs['report']:,.0f}; the worst point is {100 * costs['off']:.0f} % off")
    print(f"us: client {client.show('.1f')}, a real host's launch {launch.show('.1f')}")
    found = {
        "costs_ns": costs,
        "client_us": client.as_json(),
        "host_launch_us": launch.as_json(),
        "points": [dataclasses.asdict(point) for point in points],
    }
    write_json("controller.json", {**about, **found})


if __name__ == "__main__":
    main()
