"""Measures several clients on one island: aggregate throughput, and each client's device time.

Clients are processes of stock JAX. A computation takes a set time on the island's first device
(``paced.py``), then the mean over all devices, which is the next one's input. Clients launch them
one by one, or 64 with each call, as a ``fairway.program``; hosts launch them one by one in either
case, as JAX does.

Source: PATHWAYS §5.2, Figures 8 and 9. Differs from the paper: 1. CPU devices of one machine, which
sleep while they are busy. 2. One island of 4 devices. 3. Shares are computed from the hosts'
records of each run; meanwhile clients run at lower priority than hosts (``nice``), as if they were
other machines.

Goals: all clients together reach the rate of one client of JAX without Fairway (multi-controller
where the island has several hosts); each client's share of the device time in every second is
within 2 percentage points of its entitlement, whatever another client enqueues (proportional-share
scheduling, performance isolation).
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paced
from common import (
    ROOT,
    Goal,
    Spread,
    Worker,
    environment_without,
    interleave,
    provenance,
    ratios,
    run_main,
    write_json,
)
from dispatch import JAX_WINDOW, SETTINGS_OF_JAX, Island, free_port
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

ISLANDS = (Island(1, 4), Island(2, 2))
CLIENTS = (1, 2, 4, 8, 16)
SIZES_MS = (0.0, 0.33, 1.0)
"""Device time of one computation, without its collective."""
WEIGHTS = {"1:1:1:1": (1, 1, 1, 1), "1:2:4:8": (1, 2, 4, 8)}
SHARE_MS = 1.0
"""Device time of one computation where shares are measured."""
CHAIN = 64
"""Launches of a whole program."""
FORMS = {"": CHAIN, ", op by op": 1}
"""Dispatch modes of clients, and launches per call in each."""
AHEAD = {CHAIN: 1024, 1: 512}
"""Launches that a client keeps queued, by launches per call: about two seconds of the heaviest
client's device time, and one second, since clients are slower one by one."""
TENANT_WINDOW = 256
"""Unfinished launches of each Fairway client while rates are measured."""
WINDOW_S, WINDOW_STEP_S = 1.0, 0.02
SETTLE_S = 1.0
"""Warm-up that does not count: clients do not begin at once."""
MOST_POINTS_OFF = 2.0
SHOWN_MS = 120
NICE = 19
"""Of clients whose shares are measured: a client that spins must not slow the devices
themselves."""

Span = tuple[float, float]


def tenant(environment: Mapping[str, str], *arguments: str) -> Worker:
    """Returns a process of stock JAX."""
    given = environment_without(*SETTINGS_OF_JAX)
    settings = {**given, "TF_CPP_MIN_LOG_LEVEL": "2", **environment}
    return Worker([sys.executable, "tenancy_client.py", *arguments], settings)


def everyone(workers: Sequence[Worker], **request: Any) -> list[Any]:
    """Sends a request to all workers, and waits for their answers."""
    for worker in workers:
        worker.tell(**request)
    return [worker.answer() for worker in workers]


def plain_jax(stack: contextlib.ExitStack, island: Island) -> list[Worker]:
    """Starts JAX on the same devices: one process, or one per host (multi-controller)."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={island.devices}",
    }
    arguments = ["--window", str(JAX_WINDOW)]
    ranks: list[list[str]] = [[]]
    if island.hosts > 1:
        arguments += ["--coordinator", f"127.0.0.1:{free_port()}"]
        arguments += ["--processes", str(island.hosts)]
        ranks = [["--rank", str(rank)] for rank in range(island.hosts)]
    return [stack.enter_context(tenant(environment, *arguments, *rank)) for rank in ranks]


def count_for(workers: Sequence[Worker], target_s: float, **work: int) -> int:
    """Returns launches of one client that take about ``target_s``; also warms up."""
    chains = 1
    while True:
        took: float = max(everyone(workers, do="round", count=CHAIN * chains, **work))
        if took >= target_s / 4:
            return CHAIN * max(1, round(chains * target_s / took))
        chains = int(chains * min(4.0, max(2.0, target_s / took)))


def settings_of(island: Island, **more: Any) -> Settings:
    """Returns settings of one island whose hosts can load the computations."""
    return Settings.parse(f"1x{island}", **paced.ALLOWED, **more)


def micros_of(milliseconds: float) -> int:
    """Converts milliseconds to microseconds."""
    return round(1e3 * milliseconds)


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Aggregate rates of all clients for computations of one size.

    Attributes:
        size_ms: device time of one computation.
        rates: computations per second, by system.
    """

    size_ms: float
    rates: Mapping[str, Spread]

    def ratio(self, system: str) -> Spread:
        """Returns the rate of a system over that of JAX."""
        return ratios(self.rates[system], self.rates["jax"])

    def as_json(self) -> dict[str, Any]:
        """Returns all data as JSON."""
        return {
            "computation_ms": self.size_ms,
            "computations_per_s": {name: rate.as_json() for name, rate in self.rates.items()},
            "of_jax": {name: self.ratio(name).as_json() for name in self.rates if name != "jax"},
        }


@dataclasses.dataclass(frozen=True)
class Shares:
    """Device time of clients while all of them were backlogged.

    Attributes:
        name: weights or requests of the clients.
        entitled: each client's fair share.
        spans: start and end of each client's computations, in seconds.
        between: interval in which all of them had work queued.
        more: other measurements.
    """

    name: str
    entitled: Sequence[float]
    spans: Sequence[Sequence[Span]]
    between: Span
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def within(self, begin: float, end: float) -> list[float]:
        """Returns each client's share of the device time of a window."""
        had = [_overlap(spans, begin, end) for spans in self.spans]
        return [time / (sum(had) or 1.0) for time in had]

    @functools.cached_property
    def windows(self) -> list[list[float]]:
        """Each client's share in every sliding window of a second."""
        begin, end = self.between
        count = int((end - begin - WINDOW_S) / WINDOW_STEP_S)
        starts = [begin + number * WINDOW_STEP_S for number in range(count)]
        return [self.within(start, start + WINDOW_S) for start in starts]

    @property
    def points_off(self) -> float:
        """Largest deviation from a client's fair share in any window, in percentage points."""
        pairs = (
            pair for window in self.windows for pair in zip(window, self.entitled, strict=True)
        )
        return max(100 * abs(had - wanted) for had, wanted in pairs)

    @property
    def busy(self) -> float:
        """Device utilisation, as a fraction."""
        begin, end = self.between
        return sum(_overlap(spans, begin, end) for spans in self.spans) / (end - begin)

    @property
    def longest_pause_s(self) -> float:
        """Longest time for which the device was idle."""
        begin, end = self.between
        spans = sorted(span for spans in self.spans for span in spans if begin < span[0] < end)
        return max((b[0] - a[1] for a, b in itertools.pairwise(spans)), default=end - begin)

    def as_json(self) -> dict[str, Any]:
        """Returns all data but the spans as JSON."""
        return {
            "clients": self.name,
            "entitled": list(self.entitled),
            "had": self.within(*self.between),
            "seconds": self.between[1] - self.between[0],
            "windows": len(self.windows),
            "points_off_max": self.points_off,
            "device_busy": self.busy,
            "longest_pause_s": self.longest_pause_s,
            "computation_ms_median": [
                1e3 * statistics.median(end - start for start, end in spans) for spans in self.spans
            ],
            **self.more,
        }


def _overlap(spans: Sequence[Span], begin: float, end: float) -> float:
    """Returns the time of a window that is covered by sorted, disjoint spans."""
    first = bisect.bisect_right(spans, (begin, begin))
    total = 0.0
    for start, stop in spans[max(0, first - 1) :]:
        if start >= end:
            break
        total += max(0.0, min(stop, end) - max(start, begin))
    return total


def recorded(path: Path, names: Sequence[str]) -> list[list[Span]]:
    """Returns when the programs of these names ran on a host's first device, in seconds."""
    found: dict[str, list[Span]] = {name: [] for name in names}
    for line in path.read_text().split("\n")[:-1]:
        record = json.loads(line)
        # In a whole program, functions have number suffixes.
        ran = (
            re.fullmatch(r"(?:jit_)?([a-z]+_\d+)(?:_\d+)?", record[5])
            if record[0] == "run"
            else None
        )
        if ran and ran[1] in found:
            found[ran[1]].append((record[1] / 1e9, record[2] / 1e9))
    return list(found.values())


@dataclasses.dataclass
class Bench:
    """State that all measurements share.

    Attributes:
        island: where to measure.
        rounds: rounds of each size.
        round_s: approximate time of each system in a round.
        share_s: how long clients share the devices.
        order: random source of the order of systems.
        progress: progress display.
    """

    island: Island
    rounds: int
    round_s: float
    share_s: float
    order: random.Random
    progress: Progress

    def throughput(self, clients: Sequence[int], sizes: Sequence[float]) -> list[Throughput]:
        """Measures rates of these numbers of concurrent clients, and of one JAX client."""
        with contextlib.ExitStack() as stack:
            jax = plain_jax(stack, self.island)
            run = stack.enter_context(Run(settings_of(self.island)))
            bound = ("--window", str(TENANT_WINDOW), "--every", str(CHAIN // 4))
            tenants = [
                stack.enter_context(tenant(run.environment, *bound)) for _ in range(max(clients))
            ]
            everyone(tenants, do="load")
            task = self.progress.add_task("throughput", total=len(sizes))
            found = []
            for size in sizes:
                micros = micros_of(size)
                everyone(jax, do="compile", micros=micros)
                everyone(tenants, do="compile", micros=micros, chain=CHAIN)
                found.append(Throughput(size, self._rates(jax, tenants, clients, micros)))
                self.progress.advance(task)
            return found

    def _rates(
        self, jax: list[Worker], tenants: list[Worker], clients: Sequence[int], micros: int
    ) -> dict[str, Spread]:
        def rate(workers: list[Worker], count: int, computing: int, chain: int) -> float:
            work = {"micros": micros, "count": count, "chain": chain}
            took = max(everyone(workers, do="round", **work))
            return float(count * computing / took)

        alone = count_for(jax, self.round_s, micros=micros)
        turns = {"jax": functools.partial(rate, jax, alone, 1, 1)}
        for form, chain in FORMS.items():
            for number in clients:
                chosen = tenants[:number]
                count = count_for(chosen, self.round_s, micros=micros, chain=chain)
                turns[f"{number}{form}"] = functools.partial(rate, chosen, count, number, chain)
        return interleave(turns, self.rounds, self.order)

    def shares(
        self,
        name: str,
        weights: Sequence[int],
        requests: Sequence[Mapping[str, Any]],
    ) -> Shares:
        """Runs clients of these weights concurrently, with one request each."""
        task = self.progress.add_task(name, total=None)
        names = [f"client_{number}" for number in range(len(weights))]
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings = settings_of(self.island, timeline=directory / "timeline.json")
            run = stack.enter_context(Run(settings))
            tenants = [
                stack.enter_context(
                    tenant(
                        {**run.environment, "FAIRWAY_WEIGHT": str(weight)},
                        *("--name", name, "--nice", str(NICE)),
                    )
                )
                for name, weight in zip(names, weights, strict=True)
            ]
            micros = micros_of(SHARE_MS)
            everyone(tenants, do="load")
            everyone(tenants, do="compile", micros=micros, chain=CHAIN)
            for worker, request in zip(tenants, requests, strict=True):
                worker.tell(micros=micros, seconds=self.share_s, **request)
            answers = [worker.answer() for worker in tenants]
            time.sleep(1.0)  # hosts flush their records twice a second
            spans = recorded(run.directory / "trace-0.jsonl", names)
        begin = max(answer["began_ns"] for answer in answers) / 1e9 + SETTLE_S
        end = min(answer["ended_ns"] for answer in answers) / 1e9
        self.progress.update(task, total=1, completed=1)
        entitled = [weight / sum(weights) for weight in weights]
        took = [seconds for answer in answers for seconds in answer.get("took_s", ())]
        more: dict[str, Any] = {}
        if took:
            more["read_s"] = {"median": statistics.median(took), "max": max(took)}
            more["read_s"]["count"] = len(took)
        more |= {key: [answer.get(key) for answer in answers] for key in ("issued", "cpu_s")}
        return Shares(name, entitled, spans, (begin, end), more)


def draw(found: Sequence[Shares], path: Path) -> None:
    """Draws a few tens of milliseconds of the timelines, one colour per client."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    colours = ("tab:blue", "tab:orange", "tab:green", "tab:red")
    canvas, axes = pyplot.subplots(figsize=(9, 1.1 + 0.6 * len(found)), layout="constrained")
    for place, shares in enumerate(found):
        middle = sum(shares.between) / 2
        for colour, spans in zip(colours, shares.spans, strict=False):
            shown = [
                (1e3 * (start - middle), 1e3 * (end - start))
                for start, end in spans
                if 0 <= start - middle < SHOWN_MS / 1e3
            ]
            height = (place - 0.3, 0.6)
            axes.broken_barh(shown, height, facecolors=colour, edgecolor="white", lw=0.3)
    axes.set_yticks(range(len(found)), [shares.name for shares in found])
    axes.set_xlabel("ms; one colour for each client")
    axes.set_title("What ran on the devices, by weights of four clients (measured)", fontsize=9)
    axes.invert_yaxis()
    path.parent.mkdir(exist_ok=True)
    canvas.savefig(path, dpi=140)
    pyplot.close(canvas)


def show_throughput(found: Sequence[Throughput], console: Console) -> None:
    """Prints the table of rates."""
    table = Table(title="Computations per second of all clients: median, lowest and highest")
    for name in ("computation", "clients", "Fairway", "JAX", "of JAX", "goal"):
        table.add_column(name)
    for row in found:
        for name in (name for name in row.rates if name != "jax"):
            ratio = row.ratio(name)
            table.add_row(
                f"{row.size_ms:g} ms" if row.size_ms else "tiny",
                name,
                row.rates[name].show(",.0f"),
                row.rates["jax"].show(",.0f"),
                ratio.show(),
                Goal(1.0, "of JAX").verdict(ratio.median) if row.size_ms else "",
            )
    console.print(table)


def show_shares(found: Sequence[Shares], console: Console) -> None:
    """Prints the table of device times."""
    table = Table(title="Device time of each client, in % of all")
    for name in ("clients", "entitled", "had", "most points off in 1 s", "device busy", "goal"):
        table.add_column(name, overflow="fold")
    for row in found:
        reached = row.points_off <= MOST_POINTS_OFF
        had = row.within(*row.between)
        table.add_row(
            row.name,
            " ".join(f"{100 * part:.1f}" for part in row.entitled),
            " ".join(f"{100 * part:.1f}" for part in had),
            f"{row.points_off:.2f} of {len(row.windows)} windows",
            f"{100 * row.busy:.0f} %",
            f"{'[green]pass[/]' if reached else '[red]miss[/]'} (points ≤ {MOST_POINTS_OFF:g})",
        )
    console.print(table)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [str(island) for island in ISLANDS]
    parser.add_argument("--island", choices=names, default=names[0], help="hosts x devices")
    parser.add_argument("--only", choices=("throughput", "shares"), help="one half of it")
    parser.add_argument("--quick", action="store_true", help="fewer clients and shorter rounds")
    parser.add_argument("--rounds", type=int, help="rounds of each size")
    parser.add_argument("--seed", type=int, default=0, help="decides the order in each round")
    given = parser.parse_args()
    given.rounds = given.rounds or (3 if given.quick else 5)
    given.clients = (1, 2, 4) if given.quick else CLIENTS
    given.island = next(island for island in ISLANDS if str(island) == given.island)
    return given


def measure_shares(bench: Bench) -> list[Shares]:
    """Measures both weightings, and a client beside one with unbounded enqueueing."""
    found = []
    for form, chain in FORMS.items():
        queue = {"do": "enqueue", "ahead": AHEAD[chain], "chain": chain}
        greedy = {**queue, "ahead": 0}
        reads = {**queue, "reads": True}
        for name, weights in WEIGHTS.items():
            found.append(bench.shares(name + form, weights, [queue] * len(weights)))
        found.append(bench.shares("greedy : reads" + form, (1, 1), [greedy, reads]))
    return found


def measure_reads(bench: Bench) -> dict[str, Any]:
    """Measures the latency of a launch with the read of its result, alone and under contention.

    A client with one launch at a time demands less than its share, so there is no goal.
    """
    ask, greedy = {"do": "ask"}, {"do": "enqueue", "ahead": 0}
    found = {
        "alone": bench.shares("reads alone", (1,), [ask]),
        "beside one that is greedy": bench.shares("greedy : reads", (1, 1), [greedy, ask]),
    }
    return {name: shares.as_json() for name, shares in found.items()}


def main() -> None:
    """Measures, prints and writes ``out/tenancy.json`` and ``out/tenancy.png``."""
    given = arguments()
    about = provenance(given.seed, "jax", "jaxlib", "numpy")
    console = Console(width=140 if not sys.stdout.isatty() else None)
    report: dict[str, Any] = {**about, "island": str(given.island)}
    with Progress(console=console, transient=True) as progress:
        round_s, share_s = (0.5, 4.0) if given.quick else (1.0, 10.0)
        order = random.Random(given.seed)
        bench = Bench(given.island, given.rounds, round_s, share_s, order, progress)
        if given.only != "shares":
            rates = bench.throughput(given.clients, SIZES_MS)
            report["throughput"] = [row.as_json() for row in rates]
            show_throughput(rates, console)
        if given.only != "throughput":
            shares = measure_shares(bench)
            report["shares"] = [row.as_json() for row in shares]
            show_shares(shares, console)
            reads = report["reads"] = measure_reads(bench)
            for name, row in reads.items():
                middle, most = row["read_s"]["median"], row["read_s"]["max"]
                line = f"a launch of {SHARE_MS:g} ms and its read, {name}: "
                line += f"{1e3 * middle:.1f} ms, at most {1e3 * most:.1f}; "
                console.print(line + f"{100 * row['had'][-1]:.0f} % of the device time")
            draw([row for row in shares if len(row.entitled) > 2], ROOT / "out/tenancy.png")
    write_json("tenancy.json", report)


if __name__ == "__main__":
    run_main(main)
