"""Measures collectives between processes of one machine, compared with gloo and Open MPI.

All-reduce (float32, sums, in place) and all-to-all between 2, 4 and 8 ranks, one process each, from
1 KiB to 256 MiB; the size of an all-to-all is all that one rank sends, including its own block.
Each system keeps its processes while a number of ranks is measured, and those of the two idle
systems sleep. Memory is allocated for each measurement, by ours as teams do it, by the others as
numpy does. Results of every size are checked before, every element.

Gloo is that of torch, with one thread for sums. Open MPI uses its shared-memory transport and its
own defaults, except whether ranks yield while they wait (``mpi_yield_when_idle``). Both were tried:
two ranks on two cores are faster without; with more ranks than cores they always yield, since
``--oversubscribe`` enforces it. (Four ranks that do not yield take 11 ms for what takes 20 us.)

In each round every collective of every size is executed by all systems, one after another, in a new
random order, as often as needed to fill a fifth of a second, and at least three times. The time of
the slowest rank counts.

Goals: the better of the two peers takes 1.2 times our time, as the geometric mean over everything,
and nowhere less than 0.9 times.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import random
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from common import (
    ROOT,
    Goal,
    Spread,
    WorkerError,
    interleave,
    provenance,
    ratios,
    run_main,
    write_json,
)
from loopback_worker import ALL_REDUCE, ALL_TO_ALL
from rich.console import Console
from rich.table import Table

from fairway.cli.consoles import Work, working

OURS, PEERS = "fairway", ("gloo", "openmpi")
SYSTEMS = (OURS, *PEERS)
PEERS_BIN = ROOT / ".cache/loopback-peers/bin"
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SIZES = ("1K", "4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M", "256M")
ELEMENT_BYTES = 4
YIELDS = {2: False, 4: True, 8: True}
"""Whether ranks of Open MPI yield while they wait, by number of ranks; on two cores."""
ROUND_S = 0.2
"""Approximate time of a system for one collective of one size in a round."""
LEAST = 3
"""Minimum repetitions."""
WARM = 2
PATIENCE_S = 60.0
"""Timeout of gloo and ours for a rank."""
START_S = 120.0
ANSWER_S = 240.0
"""Deadline of all ranks for one measurement; Open MPI does not detect a stalled rank."""
END_S = 10.0
GOALS = (Goal(1.2, "geometric mean"), Goal(0.9, "everywhere"))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One configuration to measure.

    Attributes:
        collective: ``all-reduce`` or ``all-to-all``.
        ranks: number of ranks.
        size: bytes of one rank's vector.
    """

    collective: str
    ranks: int
    size: int

    @property
    def request(self) -> dict[str, Any]:
        """The request for a rank."""
        return {"collective": self.collective, "elements": self.size // ELEMENT_BYTES}


@dataclasses.dataclass(frozen=True)
class Row:
    """Times of a collective in each system, round by round."""

    cell: Cell
    counts: dict[str, int]
    seconds: dict[str, Spread]

    @property
    def ratio(self) -> Spread:
        """Returns time of the better peer over ours, round by round."""
        rounds = zip(*(self.seconds[peer].values for peer in PEERS), strict=True)
        return ratios(Spread(tuple(map(min, rounds))), self.seconds[OURS])

    def as_json(self) -> dict[str, Any]:
        """Returns all data as JSON."""
        return {
            **dataclasses.asdict(self.cell),
            "seconds": {name: spread.as_json() for name, spread in self.seconds.items()},
            "counts": self.counts,
            "better_peer_over_ours": self.ratio.as_json(),
        }

    def cells(self) -> list[str]:
        """Returns a row of the table."""
        times = [
            Spread(tuple(value * 1e6 for value in self.seconds[name].values)).show(",.1f")
            for name in SYSTEMS
        ]
        colour = "green" if self.ratio.median >= GOALS[1].least else "red"
        size = named(self.cell.size)
        return [str(self.cell.ranks), size, *times, f"[{colour}]{self.ratio.show()}[/]"]


def named(size: int) -> str:
    """Formats a size with a binary unit."""
    for unit, scale in reversed(UNITS.items()):
        if size % scale == 0:
            return f"{size // scale}{unit}"
    return str(size)


class Ranks:
    """The rank processes of one system, which live as long as the context.

    Args:
        name: name of the system.
        ranks: number of ranks.
        yields: whether ranks of Open MPI yield while they wait.
    """

    def __init__(self, name: str, ranks: int, yields: bool) -> None:
        self.versions: dict[str, str] = {}
        self._name = name
        self._ranks = ranks
        self._yields = yields
        self._sockets: dict[int, socket.socket] = {}
        self._handles: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._words = stack.enter_context(tempfile.TemporaryFile())
            temporary = tempfile.TemporaryDirectory(prefix="fairway-", dir="/tmp")
            self._folder = stack.enter_context(temporary)
            stack.push(self._end)
            self._start()
            self._meet()
            known = self.ask(do="listen")
            self.versions = self.ask(do="join", known=known)[0]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def ask(self, **request: Any) -> list[Any]:
        """Sends a request to all ranks; returns their answers.

        Raises:
            WorkerError: a rank has ended, or does not answer in time.
        """
        line = json.dumps(request).encode() + b"\n"
        for rank, told in self._sockets.items():
            try:
                told.sendall(line)
            except OSError:
                raise self._failure(f"rank {rank} has ended; told {request}") from None
        answers = dict.fromkeys(range(self._ranks), b"")
        deadline_s = time.monotonic() + ANSWER_S
        with selectors.DefaultSelector() as waiting:
            for rank, told in self._sockets.items():
                waiting.register(told, selectors.EVENT_READ, rank)
            while late := sorted(key.data for key in waiting.get_map().values()):
                ready = waiting.select(deadline_s - time.monotonic())
                if not ready:
                    raise self._failure(f"no answer from ranks {late}; told {request}")
                for key, _ in ready:
                    got = _received(self._sockets[key.data])
                    if not got:
                        raise self._failure(f"rank {key.data} has ended; told {request}")
                    answers[key.data] += got
                    if got.endswith(b"\n"):
                        waiting.unregister(key.fileobj)
        return [json.loads(answer) for answer in answers.values()]

    def check(self, cell: Cell) -> None:
        """Executes a collective, and checks every element of the result."""
        self.ask(do="check", **cell.request)

    def time(self, cell: Cell, count: int) -> float:
        """Returns the mean time of a collective on the slowest rank, in seconds."""
        return float(max(self.ask(do="time", **cell.request, warm=WARM, count=count)))

    def count(self, cell: Cell) -> int:
        """Returns the repetitions of a collective that fill a round."""
        count = LEAST
        while (took_s := count * self.time(cell, count)) < ROUND_S / 4:
            count *= 4
        return max(LEAST, round(count * ROUND_S / took_s))

    def _commands(self) -> list[list[str]]:
        python = str(PEERS_BIN / "python") if self._name in PEERS else sys.executable
        worker = [python, "loopback_worker.py", self._name, self._folder, str(PATIENCE_S)]
        count = str(self._ranks)
        if self._name == "openmpi":
            command = [str(PEERS_BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe"]
            command += ["-n", count, "--mca", "mpi_yield_when_idle", str(int(self._yields))]
            return [[*command, *worker]]
        return [[*worker, "--rank", str(rank), "--ranks", count] for rank in range(self._ranks)]

    def _start(self) -> None:
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(f"{self._folder}/told")
        self._door.listen(self._ranks)
        for command in self._commands():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                cwd=Path(__file__).parent,
                start_new_session=True,  # only this process handles Ctrl-C, and ends them
            )
            self._processes.append(process)

    def _meet(self) -> None:
        """Waits until all ranks have connected and identified themselves."""
        found: dict[int, socket.socket] = {}
        deadline_s = time.monotonic() + START_S
        self._door.settimeout(0.2)
        while len(found) < self._ranks:
            if any(process.poll() is not None for process in self._processes):
                raise self._failure("does not start")
            if time.monotonic() > deadline_s:
                raise self._failure(f"only ranks {sorted(found)} have started")
            with contextlib.suppress(TimeoutError):
                told = self._door.accept()[0]
                told.settimeout(START_S)
                who = json.loads(_received(told) or b"null")
                if who is None:
                    raise self._failure("a rank has ended as it started")
                self._handles.append(os.pidfd_open(who["process"]))
                found[who["rank"]] = told
        self._sockets = dict(sorted(found.items()))

    def _end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends all processes: idle ones end by themselves, stalled ones are killed."""
        for told in (self._door, *self._sockets.values()):
            told.close()
        patience_s = END_S if kind is None else 0.0
        for number in (signal.SIGTERM, signal.SIGKILL):
            if _ended(self._processes, patience_s):
                break
            for process in self._processes:
                process.send_signal(number)
            patience_s = END_S
        # Processes that mpirun started are no children to wait for.
        for handle in self._handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)

    def _failure(self, what: str) -> WorkerError:
        time.sleep(0.5)  # the last output arrives a little later
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").splitlines()[-20:]
        return WorkerError("\n".join([f"{self._name} with {self._ranks} ranks: {what}", *words]))


def _received(told: socket.socket) -> bytes:
    """Reads what is available; returns nothing if the peer is gone."""
    with contextlib.suppress(ConnectionResetError):
        return told.recv(1 << 16)
    return b""


def _ended(processes: Sequence[subprocess.Popen[bytes]], patience_s: float) -> bool:
    """Returns whether all processes end in time."""
    deadline_s = time.monotonic() + patience_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


class Bench:
    """Measures systems in turn.

    Args:
        rounds: number of rounds.
        order: random source of the order of systems.
        progress: updated after every turn.
    """

    def __init__(self, rounds: int, order: random.Random, progress: Work) -> None:
        self._rounds = rounds
        self._order = order
        self._progress = progress

    def measure(self, systems: Mapping[str, Ranks], cells: Sequence[Cell]) -> list[Row]:
        """Checks and measures collectives for one number of ranks."""
        turns = len(systems) * len(cells) * (1 + self._rounds)
        done = 0
        self._progress.update(0, turns, f"{cells[0].ranks} ranks")
        counts: dict[Cell, dict[str, int]] = {cell: {} for cell in cells}
        for cell, (name, ranks) in itertools.product(cells, systems.items()):
            ranks.check(cell)
            counts[cell][name] = ranks.count(cell)
            done += 1
            self._progress.update(done)
        found: dict[Cell, dict[str, list[float]]] = {}
        for _, cell in itertools.product(range(self._rounds), cells):

            def turn(name: str, cell: Cell = cell) -> float:
                nonlocal done
                done += 1
                self._progress.update(done)
                return systems[name].time(cell, counts[cell][name])

            once = {name: functools.partial(turn, name) for name in systems}
            for name, spread in interleave(once, 1, self._order).items():
                found.setdefault(cell, {}).setdefault(name, []).extend(spread.values)
        return [
            Row(cell, counts[cell], {name: Spread(tuple(one)) for name, one in took.items()})
            for cell, took in found.items()
        ]


def mean(rows: Sequence[Row]) -> Spread:
    """Returns the geometric mean of all ratios, round by round."""
    rounds = zip(*(row.ratio.values for row in rows), strict=True)
    return Spread(tuple(map(statistics.geometric_mean, rounds)))


def show(rows: Sequence[Row]) -> None:
    """Prints a table for each collective, and the goals."""
    console = Console(width=150 if not sys.stdout.isatty() else None)
    for collective in dict.fromkeys(row.cell.collective for row in rows):
        table = Table(title=f"{collective}, microseconds: median, lowest and highest round")
        for name in ("ranks", "bytes", *SYSTEMS, "better peer / ours"):
            table.add_column(name, justify="right")
        mine = [row for row in rows if row.cell.collective == collective]
        for ranks in dict.fromkeys(row.cell.ranks for row in mine):
            some = [row for row in mine if row.cell.ranks == ranks]
            for row in some:
                table.add_row(*row.cells())
            table.add_row(str(ranks), "all", "", "", "", mean(some).show(), end_section=True)
        console.print(table)
    reached = (mean(rows).median, least(rows).ratio.median)
    worst = least(rows).cell
    console.print(
        f"better peer's time over ours: {mean(rows).show()}", GOALS[0].verdict(reached[0])
    )
    console.print(
        f"least: {least(rows).ratio.show()} ({worst.collective}, {worst.ranks} ranks, "
        f"{named(worst.size)})",
        GOALS[1].verdict(reached[1]),
    )


def least(rows: Sequence[Row]) -> Row:
    """Returns the row with our smallest advantage."""
    return min(rows, key=lambda row: row.ratio.median)


def size_of(text: str) -> int:
    """Parses bytes from a number with an optional ``K``, ``M`` or ``G``."""
    scale = UNITS.get(text[-1:].upper())
    return int(text[:-1]) * scale if scale else int(text)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [size_of(size) for size in SIZES]
    both = (ALL_REDUCE, ALL_TO_ALL)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(YIELDS), help="of each team")
    parser.add_argument(
        "--sizes", type=size_of, nargs="+", default=sizes, help="bytes of a rank, such as 4K"
    )
    parser.add_argument("--collectives", nargs="+", choices=both, default=list(both))
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each measurement")
    parser.add_argument("--seed", type=int, default=0, help="decides the order of turns")
    parser.add_argument(
        "--mpi-yields", type=int, choices=(0, 1), help="instead of what is best for Open MPI"
    )
    given = parser.parse_args()
    for ranks, size in itertools.product(given.ranks, given.sizes):
        if size <= 0 or size % (ranks * ELEMENT_BYTES):
            parser.error(f"{size} bytes are no equal blocks of whole elements for {ranks} ranks")
    if not PEERS_BIN.exists():
        parser.error("there are no peers; try `make .cache/loopback-peers/.built`")
    return given


def main() -> None:
    """Measures, prints and writes ``out/loopback.json``."""
    given = arguments()
    about = provenance(given.seed, "numpy")
    rows: list[Row] = []
    with working("starting ranks") as progress:
        bench = Bench(given.rounds, random.Random(given.seed), progress)
        for ranks in given.ranks:
            cells = [
                Cell(*one) for one in itertools.product(given.collectives, [ranks], given.sizes)
            ]
            yields = YIELDS.get(ranks, True) if given.mpi_yields is None else given.mpi_yields == 1
            with contextlib.ExitStack() as stack:
                systems = {
                    name: stack.enter_context(Ranks(name, ranks, yields)) for name in SYSTEMS
                }
                about["versions"] |= {peer: systems[peer].versions for peer in PEERS}
                about[f"{ranks} ranks of openmpi yield"] = yields
                rows += bench.measure(systems, cells)
    show(rows)
    report = {
        **about,
        "rows": [row.as_json() for row in rows],
        "geometric_mean": mean(rows).as_json(),
        "least": least(rows).as_json(),
        "goals": {goal.what: goal.least for goal in GOALS},
    }
    write_json("loopback.json", report)


if __name__ == "__main__":
    run_main(main)
