"""Common parts of the benchmarks: workers, interleaved rounds, ratios with their spread, reports.

A benchmark measures Fairway and its peers on the same work in the same run. Each system lives in
worker processes that stay up, so that start-up is not measured; rounds of the systems alternate, so
that other load of the machine affects all of them; and ratios are taken within a round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

__all__ = [
    "ROOT",
    "Goal",
    "Spread",
    "Worker",
    "WorkerError",
    "environment_without",
    "interleave",
    "medians",
    "null_server",
    "provenance",
    "ratios",
    "run_main",
    "serve",
    "serve_methods",
    "write_json",
]

ROOT = Path(__file__).resolve().parent.parent
WORKER_TIMEOUT_S = 10.0
"""Deadline for a worker to end before it is killed."""


class WorkerError(RuntimeError):
    """A worker ended, or could not execute a request."""


class Worker:
    """A process that executes one round of work per request.

    A request is one line of JSON on its standard input, the answer one on its standard output;
    :func:`serve` is the other side.

    Args:
        command: what to start.
        environment: the whole environment of the process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._command = command
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=dict(environment),
            cwd=Path(__file__).parent,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def tell(self, **request: Any) -> None:
        """Sends a request; :meth:`answer` waits for its answer."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure(f"cannot be told {request}") from None

    def answer(self) -> Any:
        """Waits for the answer to the oldest open request.

        Raises:
            WorkerError: the worker has ended; the message shows its last output.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure("ended without an answer")
        return json.loads(line)

    def ask(self, **request: Any) -> Any:
        """Sends a request and waits for its answer."""
        self.tell(**request)
        return self.answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(WORKER_TIMEOUT_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._words.close()

    def _failure(self, what: str) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WORKER_TIMEOUT_S)  # its last output follows its last answer
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").splitlines()[-15:]
        return WorkerError("\n".join([f"worker {' '.join(self._command)} {what}", *words]))


def serve(answer: Callable[..., Any]) -> None:
    """Answers requests in a worker until its input ends.

    All other output of this process is redirected to its standard error.

    Args:
        answer: called with each request's values; returns the answer.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)


def serve_methods(runner: object) -> None:
    """Serves requests by the method of ``runner`` that each names as ``do``."""
    serve(lambda do, **values: getattr(runner, do)(**values))


SETTINGS_OF_JAX = ("JAX_PLATFORMS", "JAX_BACKEND_TARGET", "XLA_FLAGS")
"""Environment variables that say where and how JAX computes."""


def environment_without(*names: str) -> dict[str, str]:
    """Returns this process's environment without variables that would change what is measured."""
    return {name: value for name, value in os.environ.items() if name not in names}


@contextlib.contextmanager
def null_server() -> Iterator[str]:
    """Runs a server that computes nothing while the context lasts; yields its address for clients.

    Builds it if necessary.

    Raises:
        CalledProcessError: the build failed.
    """
    command = ["cargo", "build", "--release", "--package", "fairway-ifrt"]
    command += ["--example", "null_server", "--message-format", "json-render-diagnostics"]
    built = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    made = [message["executable"] for message in messages if message.get("executable")]
    pipe = subprocess.PIPE
    with subprocess.Popen([made[-1]], stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        yield f"grpc://{server.stdout.readline().strip()}"
        server.communicate()  # it ends when its input does


@dataclasses.dataclass(frozen=True)
class Spread:
    """Values of several rounds, with their spread."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)

    def show(self, form: str = ".2f") -> str:
        """Formats the median, and in brackets the lowest and highest value."""
        low, high = min(self.values), max(self.values)
        return f"{self.median:{form}} [{low:{form}}..{high:{form}}]"

    def as_json(self) -> dict[str, Any]:
        """Returns median, extremes and all values in the order of the rounds."""
        return {
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "rounds": list(self.values),
        }


def interleave(
    systems: Mapping[str, Callable[[], float]], rounds: int, order: random.Random
) -> dict[str, Spread]:
    """Measures all systems once per round, in a new random order each round.

    Args:
        systems: measures a system once and returns its rate.
        rounds: number of rounds.
        order: random source of the order.
    """
    found: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        names = list(systems)
        order.shuffle(names)
        for name in names:
            found[name].append(systems[name]())
    return {name: Spread(tuple(values)) for name, values in found.items()}


def medians(starts: Sequence[Mapping[str, Spread]]) -> dict[str, Spread]:
    """Returns each system's medians, one per start of all systems.

    Processes keep what they were assigned at start: cores, pages, ports. Rounds of one start
    therefore agree with each other better than with those of the next.
    """
    return {name: Spread(tuple(found[name].median for found in starts)) for name in starts[0]}


def ratios(ours: Spread, theirs: Spread) -> Spread:
    """Returns our rate over theirs, round by round."""
    pairs = zip(ours.values, theirs.values, strict=True)
    return Spread(tuple(mine / other for mine, other in pairs))


@dataclasses.dataclass(frozen=True)
class Goal:
    """A value that a measured one should reach.

    Attributes:
        least: the value.
        what: description of the measured value.
    """

    least: float
    what: str

    def verdict(self, reached: float) -> str:
        """Returns pass or miss, and the goal, coloured for the terminal."""
        word = "[green]pass[/]" if reached >= self.least else "[red]miss[/]"
        return f"{word} ({self.what} ≥ {self.least:g})"


def provenance(seed: int, *packages: str) -> dict[str, Any]:
    """Describes where and with what a measurement was made.

    Args:
        seed: seed of random choices.
        packages: Python packages whose versions matter.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "native": _digest(ROOT / "python/fairway/_native.abi3.so"),
        "seed": seed,
        "command": " ".join(["python", *sys.argv]),
        "machine": _machine(),
        "load": os.getloadavg(),
        "versions": {"python": platform.python_version(), **_versions(packages)},
    }


def _machine() -> dict[str, Any]:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages * page_bytes,
        "system": f"{platform.system()} {platform.release()}",
    }


def _versions(packages: Sequence[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _commit() -> str | None:
    """Returns the commit that is checked out, if this is a repository."""
    top = ROOT / ".git"
    try:
        if top.is_file():
            top = ROOT / top.read_text().partition("gitdir: ")[2].strip()
        head = (top / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        shared = top / "commondir"
        base = top / shared.read_text().strip() if shared.exists() else top
        if (base / name).exists():
            return (base / name).read_text().strip()
        packed = (base / "packed-refs").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)


def _digest(path: Path) -> str | None:
    """Returns a digest that distinguishes builds of one commit."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else None


def write_json(name: str, found: Mapping[str, Any]) -> Path:
    """Writes a report to ``out/``, prints and returns the path."""
    path = ROOT / "out" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written to {path.relative_to(ROOT)}")
    return path


def run_main(main: Callable[[], None]) -> None:
    """Runs a benchmark; a worker's failure ends it with that worker's last output."""
    try:
        main()
    except WorkerError as error:
        raise SystemExit(str(error)) from error
