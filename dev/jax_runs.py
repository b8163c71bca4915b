"""Runs JAX's test files, each in processes of its own, in-process or against a Fairway server."""

import dataclasses
import importlib.metadata
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import jax_journal
from jax_journal import (
    DETAIL_CHARACTERS_MAX,
    JOURNAL_VARIABLE,
    MESSAGE_CHARACTERS_MAX,
    TEST_TIMEOUT,
    FileResult,
    Journal,
    Outcome,
)
from rich.console import Console

DEVICES = 8
SERVER_READY_S_MAX = 60.0
SERVER_EXIT_S_MAX = 30.0
COLLECTION_S_MAX = 600.0  # importing and collecting the largest file on a loaded machine
EXIT_S_MAX = 60.0  # from the last test to the end of its process
PYTEST_NO_TESTS_COLLECTED = 5  # pytest.ExitCode, which the harness itself need not import


class HarnessError(Exception):
    """The harness itself failed; the message says what failed and what to try."""


# The Fairway server -------------------------------------------------------------------------------


class Server:
    """`fairway up` as a child process, restarted after a crash."""

    def __init__(self, log: IO[bytes], islands: str) -> None:
        self._log = log
        self._islands = islands
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.start_count = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"

    @property
    def target(self) -> str:
        """Return the address in the form of JAX_BACKEND_TARGET."""
        return f"grpc://{self.address}"

    def is_alive(self) -> bool:
        """Tell whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def ensure(self) -> None:
        """Start the server unless it runs, and wait until its port accepts."""
        with self._lock:
            if self.is_alive():
                return
            self._kill_group()
            command = [sys.executable, "-m", "fairway", "up"]
            command += ["--islands", self._islands, "--listen", self.address]
            self._process = subprocess.Popen(
                command,
                env=inherited_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.start_count += 1
            self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + SERVER_READY_S_MAX
        host, _, port = self.address.rpartition(":")
        while time.monotonic() < deadline and self.is_alive():
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        found = "still closed" if self.is_alive() else "the process ended"
        raise HarnessError(
            f"fairway up did not come up: expected {self.address} to accept within "
            f"{SERVER_READY_S_MAX:g} s, got: {found}; read {self._log.name}"
        )

    def stop(self) -> None:
        """End the server by SIGINT, as a user would, or else by SIGKILL."""
        if self._process is not None and self.is_alive():
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(SERVER_EXIT_S_MAX)
            except subprocess.TimeoutExpired:
                Console(stderr=True).print("fairway up ignored SIGINT and is killed", style="red")
        self._kill_group()

    def _kill_group(self) -> None:
        """Kill what remains of the server: its hosts are in the same process group."""
        if self._process is not None:
            kill_group(self._process)


@contextmanager
def running_server(log_path: Path, islands: str = f"1x1x{DEVICES}") -> Iterator[Server]:
    """Run a server for the time of the block."""
    with log_path.open("wb") as log:
        server = Server(log, islands)
        try:
            server.ensure()
            yield server
        finally:
            server.stop()


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process that leads its own group, and all others of the group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def inherited_environment() -> dict[str, str]:
    """Return the environment without settings of JAX and XLA: each pass sets its own."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))
    }


# Running one file ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pass:
    """One mode of running the files: in-process, or as a client of Fairway."""

    name: str
    source: Path
    directory: Path
    settings: dict[str, str]
    pattern: str | None
    test_timeout_s: float
    file_timeout_s: float
    target: str | None = None
    server: Server | None = None
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)

    def environment(self, journal: Path) -> dict[str, str]:
        """Build the environment of a test process."""
        pass_settings = {k: v for k, v in self.settings.items() if k.isupper()}
        environment = inherited_environment() | pass_settings
        if self.target is not None:
            environment["JAX_BACKEND_TARGET"] = self.target
        here = str(Path(__file__).resolve().parent)  # for pytest to find this module
        paths = [here, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment["PYTHONPYCACHEPREFIX"] = str(self.directory / "pycache")  # not in the checkout
        environment[JOURNAL_VARIABLE] = str(journal)
        return environment

    def command(self, file: str) -> list[str]:
        """Build the command of a test process."""
        # -P: the checkout's own `jax` and `jaxlib` folders must not hide the installed ones.
        # --capture=no leaves the last output of a crashing process in the log, and gives the tests
        # a sys.stdout with a file descriptor, which some of them ask for.
        command = [sys.executable, "-P", "-m", "pytest", "-p", jax_journal.__name__, "-q"]
        command += ["-p", "no:cacheprovider", "--capture=no", f"--rootdir={self.source}"]
        if self.pattern is not None:
            command += ["-k", self.pattern]
        return [*command, test_file(file)]


def test_file(file: str) -> str:
    """Return the path of a test file inside the checkout."""
    return f"tests/{file}_test.py"


def pass_settings(platforms: str, in_process: bool) -> dict[str, str]:
    """Return the settings that determine outcomes: versions, and (upper case) variables."""
    settings = {
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "JAX_PLATFORMS": platforms,
        "JAX_NUM_GENERATED_CASES": "1",
        "JAX_SKIP_SLOW_TESTS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONHASHSEED": "0",
    }
    if in_process:
        settings["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
        # A test file that asks JAX for fewer devices overrides the flag alone.
        settings["JAX_NUM_CPU_DEVICES"] = str(DEVICES)
    return settings


def run_file(one_pass: Pass, file: str) -> FileResult:
    """Run one file to its end, in as many processes as necessary."""
    journal_path = one_pass.directory / f"{file}.journal.jsonl"
    log_path = one_pass.directory / f"{file}.log"
    journal_path.unlink(missing_ok=True)
    log_path.unlink(missing_ok=True)
    journal = Journal(journal_path)
    started = time.monotonic()
    deadline = started + one_pass.file_timeout_s
    error: str | None = None
    process_count = 0
    while error is None and (journal.collected is None or journal.unfinished()):
        if time.monotonic() > deadline:
            break
        done_before = len(journal.outcomes)
        process_count += 1
        end = run_process(one_pass, file, journal, log_path, deadline)
        if journal.running is not None:
            journal.finish(journal.running, end.outcome())
        if not journal.collected and not end.nothing_selected:
            error = f"nothing collected: {end.text}"
        elif journal.unfinished() and len(journal.outcomes) == done_before:
            error = f"no test got anywhere: {end.text}"
    not_run = Outcome("not-run", message=error or "the time of the file was up")
    collected = journal.collected or []
    return FileResult(
        file=file,
        settings=one_pass.settings,
        pattern=one_pass.pattern,
        device_count=journal.device_count,
        seconds=round(time.monotonic() - started, 1),
        process_count=process_count,
        error=error,
        tests={test: journal.outcomes.get(test, not_run) for test in collected},
    )


@dataclasses.dataclass(frozen=True)
class End:
    """How a test process ended: by itself (`killed_for` is None), or killed by the harness.

    `log` is the last part of its output.
    """

    killed_for: str | None
    return_code: int
    seconds_silent: float
    log: str

    @property
    def nothing_selected(self) -> bool:
        """Tell whether pytest collected the file and had no test left to run."""
        return self.return_code == PYTEST_NO_TESTS_COLLECTED  # and no error on the way

    @property
    def text(self) -> str:
        """Describe in one line how the process ended."""
        if self.killed_for is not None:
            return f"{self.killed_for}, {self.seconds_silent:.0f} s after the last sign of life"
        how = f"with status {self.return_code}"
        if self.return_code < 0:
            how = f"by {signal.Signals(-self.return_code).name}"
        return f"the process ended {how}: {self.last_words()}"

    def last_words(self) -> str:
        """Return the line of the log that best explains why the process died."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        telling = r"F\d{4} \d\d:|Check failed|LLVM ERROR|terminate called|^E   |Fatal Python error"
        found = [line for line in lines if re.search(telling, line)]
        return next(iter(found or lines[-1:]), "no output")[:MESSAGE_CHARACTERS_MAX]

    def outcome(self) -> Outcome:
        """Return the outcome of the test that was running when the process ended."""
        kind = "timeout" if self.killed_for == TEST_TIMEOUT else "crashed"
        return Outcome(kind, round(self.seconds_silent, 3), self.text, self.log)


def run_process(
    one_pass: Pass, file: str, journal: Journal, log_path: Path, deadline: float
) -> End:
    """Run one pytest process with a watchdog: it is killed if it is silent for too long."""
    if one_pass.server is not None:
        one_pass.server.ensure()
    with log_path.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            one_pass.command(file),
            cwd=one_pass.source,
            env=one_pass.environment(journal.path),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    killed_for: str | None = None
    events, last_event = journal.event_count, time.monotonic()
    try:
        while process.poll() is None and killed_for is None:
            time.sleep(0.1)
            journal.read()
            if journal.event_count != events:
                events, last_event = journal.event_count, time.monotonic()
            killed_for = reason_to_kill(one_pass, journal, time.monotonic() - last_event, deadline)
        if killed_for is not None:
            abort(process)
    finally:
        kill_group(process)
    journal.read()
    if one_pass.stop.is_set():
        raise KeyboardInterrupt
    written = log_path.read_bytes()[log_start:][-DETAIL_CHARACTERS_MAX:].decode(errors="replace")
    return End(killed_for, process.returncode, time.monotonic() - last_event, written)


def reason_to_kill(
    one_pass: Pass, journal: Journal, seconds_silent: float, deadline: float
) -> str | None:
    """Return why a test process must be killed, or None."""
    if one_pass.stop.is_set():
        return "interrupted"
    if one_pass.server is not None and not one_pass.server.is_alive():
        return "the server died (see server.log)"
    if journal.running is not None and seconds_silent > one_pass.test_timeout_s:
        return TEST_TIMEOUT
    if journal.running is None and seconds_silent > (
        EXIT_S_MAX if journal.ended else COLLECTION_S_MAX
    ):
        return "hang outside of any test"
    return "file timeout" if time.monotonic() > deadline else None


def abort(process: "subprocess.Popen[bytes]") -> None:
    """Abort a process so that it dumps the stacks of its threads to the log (faulthandler)."""
    process.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):  # then kill_group does it
        process.wait(10.0)


def run_files(
    one_pass: Pass, files: list[str], jobs: int, finished: Callable[[FileResult], None]
) -> dict[str, FileResult]:
    """Run files, `jobs` of them concurrently; call `finished` with each result."""

    def run(file: str) -> FileResult:
        result = run_file(one_pass, file)
        (one_pass.directory / f"{file}.json").write_text(result.to_json())
        finished(result)
        return result

    if jobs == 1:
        return {file: run(file) for file in files}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            return dict(zip(files, pool.map(run, files), strict=True))
        except BaseException:
            one_pass.stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def cached_baseline(one_pass: Pass, file: str) -> FileResult | None:
    """Return an earlier result of this pass that is still valid, or None."""
    path = one_pass.directory / f"{file}.json"
    if not path.exists():
        return None
    result = FileResult.from_json(path.read_text())
    same = result.settings == one_pass.settings and result.error is None
    # A run of the whole file is also valid for any selection of its tests.
    return result if same and result.pattern in (None, one_pass.pattern) else None
