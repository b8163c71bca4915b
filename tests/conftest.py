"""Fixtures: real islands, client processes and network namespaces; no mocks."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, Self

import hypothesis
import pytest
import wires

from fairway.cluster import admin
from fairway.cluster.logs import LogRecord
from fairway.cluster.supervisor import Run
from fairway.errors import NotRunningError
from fairway.settings import Settings

PREAMBLE = """
import json, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def say(word, **values):
    print(word, json.dumps(values), flush=True)

def fails(do):
    try:
        do()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""

"""
"""Prelude of each client program."""


def pytest_configure() -> None:
    """Prepares the environment that processes under test inherit.

    Restores the default handlers of ignored signals, so that these processes get them. XLA compiles
    without its expensive optimizations, on hosts and in clients alike, as in JAX's own tests, and
    by the emitters for CPUs that compile twice as fast: most of what the tests compute would be
    LLVM's work on programs that run for a millisecond.
    """
    # How long an example takes says more about what else the machine does than about the example.
    hypothesis.settings.register_profile("shared-machine", deadline=None)
    hypothesis.settings.load_profile("shared-machine")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, own)


class Islands(Protocol):
    """Running islands, in this process or in another."""

    @property
    def environment(self) -> dict[str, str]: ...

    def overview(self) -> dict[str, Any]: ...


def client_environment(islands: Islands | None) -> dict[str, str]:
    """The environment of a client program."""
    return {
        **os.environ,
        **(islands.environment if islands else {}),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONUNBUFFERED": "1",
    }


def client(
    islands: Islands | None,
    code: str,
    timeout_s: float = 180.0,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a JAX snippet as a client process to its end; stdout and stderr are merged.

    Raises:
        AssertionError: it does not end in time.
    """
    try:
        return subprocess.run(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
            env={**client_environment(islands), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if error.stdout else ""
        raise AssertionError(
            f"the client did not end within {timeout_s} s; it said:\n{output}"
        ) from None


def said(output: str, word: str) -> dict[str, Any]:
    """Returns the value that a client printed under this word."""
    for line in output.splitlines():
        if line.startswith(word + " "):
            return dict(json.loads(line.removeprefix(word)))
    raise AssertionError(f"the client did not say {word!r}; it said:\n{output}")


class Background:
    """A client program that runs in the background of the test."""

    def __init__(self, islands: Islands, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
            env=client_environment(islands),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        self.seen: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def hear(self, word: str, timeout_s: float = 180.0) -> dict[str, Any]:
        """Returns the next value that the client prints under this word; skips other lines."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = ""
            if line is None or line == "":
                state = "ended" if line is None else f"was silent for {timeout_s} s"
                raise AssertionError(
                    f"the client {state} before it said {word!r}; it said:\n" + self.text()
                )
            self.seen.append(line)
            if line.startswith(word + " "):
                return dict(json.loads(line.removeprefix(word)))

    def tell(self, line: str) -> None:
        """Writes a line to the client's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def text(self) -> str:
        """The output that was read so far."""
        return "".join(self.seen[-40:])

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                continue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


CELLS = """
import traceback

for line in sys.stdin:
    try:
        exec(json.loads(line), dict(globals()))
    except Exception:
        say("done", error=traceback.format_exc())
    else:
        say("done", error="")
"""
"""Runs each cell of code that the client receives, with fresh names."""


class Notebook(Background):
    """A client that many tests share, like a user's notebook.

    Args:
        islands: the islands that it uses.
        setup: code that runs before the first cell.
    """

    def __init__(self, islands: Islands, setup: str = "") -> None:
        super().__init__(islands, textwrap.dedent(setup) + CELLS)

    def run(self, code: str, timeout_s: float = 180.0) -> None:
        """Runs code; an exception in it fails the test."""
        self.tell(json.dumps(textwrap.dedent(code)))
        error = self.hear("done", timeout_s)["error"]
        assert not error, error


class Up:
    """``python -m fairway up`` as a process in a session of its own.

    Args:
        arguments: arguments of ``up``.
        runtime: directory of its sockets.
        wait: wait until it is up.
        limits: options of ``prlimit``, for the controller and for each host.
    """

    def __init__(
        self, *arguments: str, runtime: Path, wait: bool = True, limits: tuple[str, ...] = ()
    ) -> None:
        self._runtime = runtime
        command = [sys.executable, "-m", "fairway", "up", *arguments]
        if limits:
            command = ["prlimit", *limits, *command]
        self.errors = runtime / f"up-{time.monotonic_ns()}.log"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.environment: dict[str, str] = {}
        if wait:
            self._read_environment()

    def _read_environment(self) -> None:
        assert self.process.stdout is not None
        while "JAX_BACKEND_TARGET" not in self.environment:
            line = self.process.stdout.readline()
            if not line:
                self.close()
                raise AssertionError(f"`fairway up` ended:\n{self.errors.read_text()}")
            name, _, value = line.strip().removeprefix("export ").partition("=")
            self.environment[name] = value

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.environment["JAX_BACKEND_TARGET"].rpartition(":")[2])

    @property
    def directories(self) -> list[Path]:
        """Directories of runs: one while it is up."""
        return sorted(self._runtime.glob("fairway-*/run-*"))

    @property
    def directory(self) -> Path:
        """That of its run; connections to other clusters have directories of their own."""
        return next(self._runtime.glob(f"fairway-*/run-{self.process.pid}-*"))

    def overview(self) -> dict[str, Any]:
        return admin.overview(self.directory)

    def logs(self) -> list[LogRecord]:
        """What controller and hosts have printed, as far as it is kept, while it is up."""
        found: list[LogRecord] = []
        with contextlib.suppress(NotRunningError, StopIteration):
            while more := admin.read_logs(
                self.directory, admin.ReadLogs(found[-1].number if found else 0)
            ):
                found += more
        return found

    def panics(self) -> list[str]:
        """Lines in the logs of controller and hosts that report a broken invariant (panic)."""
        lines = self.errors.read_text(errors="replace").splitlines()
        lines += [record.text for record in self.logs()]
        marks = ("panicked", "Check failed", "Traceback", "Segmentation", "Fatal", "not spilled: I")
        return [line for line in lines if any(mark in line for mark in marks)]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def connect_unix(path: Path, timeout_s: float = 10.0) -> socket.socket:
    """Connects to a Unix socket; retries while its backlog is full."""
    deadline = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            if not isinstance(error, BlockingIOError) or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return connection


def hosts_of(islands: Islands) -> list[dict[str, Any]]:
    """All hosts by number, as in the overview."""
    return [host for island in islands.overview()["islands"] for host in island["hosts"]]


def is_alive(process: int) -> bool:
    """Checks whether a process exists and is not a zombie."""
    try:
        return stat_of(process)[0] not in "ZX"
    except OSError:
        return False


def children(process: int) -> list[int]:
    """Child processes of this one, in order of their ids."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended since it was listed
            if int(stat_of(int(entry.name))[1]) == process:
                found.append(int(entry.name))
    return sorted(found)


def rss_bytes(process: int) -> int:
    """Resident memory (RSS) of a process, in bytes."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_s(process: int) -> float:
    """User and system time of a process, in seconds."""
    return sum(map(int, stat_of(process)[11:13])) / os.sysconf("SC_CLK_TCK")


def stat_of(process: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` that follow the command, whose name may hold spaces.

    Raises:
        OSError: there is no such process.
    """
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def until(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Waits until a condition holds, and returns the time that it took in seconds.

    Raises:
        AssertionError: it does not hold in time.
    """
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - start


Measured = Callable[[str, float], None]
Start = Callable[..., Run]
Begin = Callable[[Islands, str], Background]


FAST = {
    *("test_capture", "test_chakra", "test_fabrics", "test_graphs", "test_jobs", "test_msccl"),
    *("test_place", "test_placement", "test_plan", "test_routes", "test_settings", "test_simulate"),
    *("test_pipeline", "test_split", "test_team", "test_traces"),
}
"""Modules most of whose tests start no islands; `make test-fast` runs those."""

ISLANDS = {"up", "start", "background", "own_runtime"}
"""Fixtures of tests that start islands, or share some."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests as ``fast`` that start no islands and are not marked as long."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        is_long = any(item.get_closest_marker(mark) for mark in ("slow", "alone", "long"))
        if item.module.__name__ in FAST and not fixtures & ISLANDS and not is_long:
            item.add_marker("fast")


def ip(*words: str) -> str:
    """Returns the output of ip(8)."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def received_bytes(*link: str) -> int:
    """Bytes that a link has received."""
    *namespace, name = link
    lines = ip(*namespace, "-s", "link", "show", name).splitlines()
    head = next(number for number, line in enumerate(lines) if "RX:" in line)
    return int(lines[head + 1].split()[0])


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    """Addresses of two network namespaces on a bridge to which this process is connected too.

    By name; ``ip link set NAMEe0 down`` partitions one.
    """
    if not wires.can_join():
        pytest.skip("namespaces need root, ip and tc")
    with contextlib.ExitStack() as stack:
        try:
            joined = stack.enter_context(wires.joined(2, (None,)))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no namespaces can be made here: {error}")
        yield {place.name.format(rank=0): place.addresses[0].format(rank=0) for place in joined}


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measured:
    """Records a measured value in the report (``-rP`` shows it)."""

    def note(name: str, value: float) -> None:
        record_property(name, value)
        print(f"measured {name} = {value:.3f}")

    return note


@pytest.fixture(scope="session", autouse=True)
def runtime() -> Iterator[Path]:
    """A runtime directory for sockets, isolated from other runs."""
    directory = Path(tempfile.mkdtemp(prefix="fw-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(directory))
        patch.setenv("XDG_STATE_HOME", str(directory / "state"))
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def own_runtime(runtime: Path) -> Iterator[Path]:
    """Like ``runtime``, for one test alone."""
    directory = Path(tempfile.mkdtemp(prefix="own-", dir=runtime))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


SHOW_ARGUMENTS = """
import json, os, sys
print(json.dumps(sys.argv[1:]))
print(json.dumps({name: os.environ.get(name) for name in ("JAX_PLATFORMS", "JAX_BACKEND_TARGET")}))
sys.exit(7)
"""
"""Prints its arguments and the platforms of JAX, and ends with status 7."""


@pytest.fixture
def no_runs(own_runtime: Path) -> Iterator[Path]:
    """A runtime directory without islands; none may be left after the test."""
    yield own_runtime
    assert not list(own_runtime.glob("fairway-*/run-*"))


@pytest.fixture(scope="module")
def running(runtime: Path) -> Iterator[tuple[Path, Up]]:
    """A running island, and the runtime directory where commands find it."""
    directory = Path(tempfile.mkdtemp(prefix="cli-", dir=runtime))
    with Up("--islands", "1x1x2", runtime=directory) as up:
        yield directory, up


@pytest.fixture
def show_script(tmp_path: Path) -> Path:
    """A script that prints its arguments and ends with status 7."""
    script = tmp_path / "show.py"
    script.write_text(SHOW_ARGUMENTS)
    return script


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts islands in this process; they are stopped after the test."""
    runs: list[Run] = []

    def bring_up(islands: str = "2x1x4", **settings: Any) -> Run:
        run = Run(Settings.parse(islands, **settings))
        runs.append(run)
        run.start()
        return run

    yield bring_up
    for run in runs:
        run.close()


@pytest.fixture
def background() -> Iterator[Begin]:
    """Starts client programs that are ended after the test."""
    clients: list[Background] = []

    def begin(islands: Islands, code: str) -> Background:
        clients.append(Background(islands, code))
        return clients[-1]

    yield begin
    for one in clients:
        one.close()


@pytest.fixture(scope="session")
def up(runtime: Path) -> Iterator[Up]:
    """Two islands of four devices, shared by all tests that leave them intact."""
    directory = Path(tempfile.mkdtemp(prefix="up-", dir=runtime))
    with Up("--islands", "2x1x4", runtime=directory) as running:
        yield running


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """Unblocks what a command that ran in this process has blocked until its end."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture(autouse=True)
def _shared_islands_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that loses a host of the shared islands, rather than those after it."""
    yield
    if "up" in request.fixturenames:
        lost = [host["lost"] for host in hosts_of(request.getfixturevalue("up")) if host["lost"]]
        assert not lost, lost


def survive_a_loss(settings: Settings, loop: str) -> None:
    """Kills a host of the second of three islands; clients see the loss and use its replacement.

    Args:
        settings: of islands of one host each.
        loop: code that prints ``up``, loops ``while True``, and prints ``end`` with the error.
    """
    with Run(settings) as up:
        with Background(up, loop) as background:
            background.hear("up")
            os.kill(hosts_of(up)[1]["process"], signal.SIGKILL)
            error = background.hear("end", timeout_s=30)["error"]
            assert "DATA_LOSS" in error, error
        up.add_island(settings.islands[1])
        # Sooner than hosts give up joining a team of which one has left.
        again = client(up, loop.replace("while True", "for _ in range(12)"), 50)
        assert said(again.stdout, "end") == {"error": ""}
