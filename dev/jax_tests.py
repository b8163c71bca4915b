"""JAX's own test files against Fairway, compared with the same files run in-process.

    python dev/jax_tests.py --source <checkout of the installed version of jax>

Every file runs in a process of its own, once on eight CPU devices of that process (the baseline,
cached under --out) and once as a client of a Fairway server. A test counts when it passes
in-process; it must then pass here too, or be listed in `jax_tests_set_aside.toml` under the
limitation of the stock client that prevents it, and fail with an error of that limitation. Exit
status 0 means that at least 99 % of the counted tests pass.

This module is also the pytest plugin that writes a journal of each test's outcome, so that a test
process that crashes or hangs costs one test: the rest of the file continues in a new process.
"""

import argparse
import dataclasses
import fnmatch
import importlib.metadata
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    import pytest

FILES = (
    *("array", "device", "multi_device", "multibackend", "errors", "pickle", "layout"),
    *("memories", "transfer_guard", "aot", "jax_jit", "garbage_collection_guard"),
    *("debugging_primitives", "mutable_array", "linalg_sharding", "pmap", "shard_map", "pjit"),
    *("lax_control_flow", "api"),
)
DEVICES = 8
REQUIRED_RATE = 0.99
JOURNAL_VARIABLE = "FAIRWAY_JAX_TESTS_JOURNAL"
SET_ASIDE_LIST = Path(__file__).with_name("jax_tests_set_aside.toml")
SERVER_READY_S_MAX = 60.0
SERVER_EXIT_S_MAX = 30.0
COLLECTION_S_MAX = 600.0  # importing and collecting the largest file on a loaded machine
EXIT_S_MAX = 60.0  # from the last test to the end of its process
MESSAGE_CHARACTERS_MAX = 400
DETAIL_CHARACTERS_MAX = 8_000
LOG_WIDTH = 120
TEST_TIMEOUT = "test timeout"
PYTEST_NO_TESTS_COLLECTED = 5  # pytest.ExitCode, which the harness itself need not import


class HarnessError(Exception):
    """The harness itself failed; the message says what failed and what to try."""


# Outcomes of a test and of a file ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one test.

    `kind` is passed, failed, skipped, xfailed (as pytest means them), crashed (the test process
    died), timeout (it was killed), not-run (the file's deadline had passed) or missing (not
    collected). `message` is the first line of the error or the reason of the skip, `detail` the
    whole text.
    """

    kind: str
    seconds: float = 0.0
    message: str = ""
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class FileResult:
    """All outcomes of one test file in one pass, by node id in the order of collection.

    `settings` determine the outcomes: a cached baseline is valid only for equal settings. `error`
    is set if the file as a whole could not be run.
    """

    file: str
    settings: dict[str, str]
    pattern: str | None
    device_count: int | None
    seconds: float
    process_count: int
    error: str | None
    tests: dict[str, Outcome]

    def count(self, kind: str) -> int:
        """Count the tests with an outcome of this kind."""
        return sum(outcome.kind == kind for outcome in self.tests.values())

    def to_json(self) -> str:
        """Print the result so that `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "FileResult":
        """Read what `to_json` printed."""
        fields = json.loads(text)
        tests = {test: Outcome(**outcome) for test, outcome in fields.pop("tests").items()}
        return cls(tests=tests, **fields)


# The pytest plugin: runs inside the test process --------------------------------------------------


class Recorder:
    """Appends one JSON line to the journal for each event of a test.

    Tests that already have an outcome in the journal are deselected, so a second process with the
    same journal continues where the first one ended.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._reports: list[pytest.TestReport] = []

    def _write(self, event: str, **fields: object) -> None:
        with self._journal.open("a") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    def pytest_collection_modifyitems(
        self, config: "pytest.Config", items: "list[pytest.Item]"
    ) -> None:
        """Deselect the tests that have an outcome in the journal."""
        finished = set(Journal(self._journal).read().outcomes)
        done = [item for item in items if item.nodeid in finished]
        items[:] = [item for item in items if item.nodeid not in finished]
        if done:
            config.hook.pytest_deselected(items=done)

    def pytest_collection_finish(self, session: "pytest.Session") -> None:
        """Record the collected tests."""
        self._write("collected", tests=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a test begins: if the process dies now, this test was running."""
        self._reports = []
        self._write("start", test=nodeid)

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        """Keep the report of a setup, call, teardown or subtest."""
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Record the outcome of the test."""
        outcome = summarize(self._reports)
        self._write("finish", test=nodeid, outcome=dataclasses.asdict(outcome))

    def pytest_sessionfinish(self) -> None:
        """Record the end, with the number of devices the tests had."""
        # Queried only now: earlier, it would start JAX's backends before the tests do.
        jax = sys.modules.get("jax")
        self._write("end", device_count=jax.device_count() if jax is not None else None)


def summarize(reports: "list[pytest.TestReport]") -> Outcome:
    """Make one outcome of the reports of a test's setup, call, teardown and subtests."""
    seconds = round(sum(report.duration for report in reports), 3)
    for report in reports:
        if report.failed:
            return Outcome(
                "failed", seconds, first_line(report), report.longreprtext[-DETAIL_CHARACTERS_MAX:]
            )
    for report in reports:
        # A skipped subtest does not make its test skipped.
        if report.skipped and not type(report).__name__.startswith("Sub"):
            kind = "xfailed" if hasattr(report, "wasxfail") else "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            return Outcome(kind, seconds, reason.removeprefix("Skipped: "))
    return Outcome("passed", seconds)


def first_line(report: "pytest.TestReport") -> str:
    """Return the first line of the error behind a failed report."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return next((line.strip() for line in text.splitlines() if line.strip()), "no text")[
        :MESSAGE_CHARACTERS_MAX
    ]


def pytest_configure(config: "pytest.Config") -> None:
    """Register the recorder: pytest loads this module with `-p jax_tests`."""
    config.pluginmanager.register(Recorder(Path(os.environ[JOURNAL_VARIABLE])))


# The journal, seen from the harness ---------------------------------------------------------------


class Journal:
    """Follows the journal of one file: the running test, and the outcomes of finished ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self.collected: list[str] | None = None
        self.outcomes: dict[str, Outcome] = {}
        self.running: str | None = None
        self.device_count: int | None = None
        self.ended = False
        self.event_count = 0

    def read(self) -> "Journal":
        """Read the complete lines written since the last call."""
        if not self.path.exists():
            return self
        with self.path.open("rb") as file:
            file.seek(self._offset)
            lines, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(lines) + len(newline)
        for line in lines.splitlines():
            self._take(json.loads(line))
        return self

    def _take(self, record: dict[str, Any]) -> None:
        self.event_count += 1
        match record["event"]:
            case "collected":
                # A later process of the same file collects only the remaining tests.
                self.collected = self.collected or record["tests"]
                self.ended = False
            case "start":
                self.running = record["test"]
            case "finish":
                self.running = None
                self.outcomes[record["test"]] = Outcome(**record["outcome"])
            case "end":
                self.ended = True
                self.device_count = record["device_count"]

    def finish(self, test: str, outcome: Outcome) -> None:
        """Write the outcome of a test whose process can no longer do so."""
        record = {"event": "finish", "test": test, "outcome": dataclasses.asdict(outcome)}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.read()

    def unfinished(self) -> list[str]:
        """List the collected tests that have no outcome yet."""
        return [test for test in self.collected or [] if test not in self.outcomes]


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
        command = [sys.executable, "-P", "-m", "pytest", "-p", Path(__file__).stem, "-q"]
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


# The tests set aside ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SetAside:
    """An entry of the list: tests that a limitation of the stock client prevents.

    `test` is a node id, or a glob over node ids in the sense of `fnmatch`. `errors` are texts, one
    of which must occur in the test's report: with any other error it is not set aside.
    """

    test: str
    limit: str
    reason: str
    errors: tuple[str, ...]

    def covers(self, test: str) -> bool:
        """Tell whether the entry matches this test."""
        return fnmatch.fnmatchcase(test, self.test)

    def explains(self, outcome: Outcome) -> bool:
        """Tell whether the test failed with an error of this limitation."""
        text = outcome.message + "\n" + outcome.detail
        return any(error in text for error in self.errors)


def read_set_aside(path: Path) -> list[SetAside]:
    """Read and check the list. An entry's own `errors` override those of its limit."""
    document = tomllib.loads(path.read_text())
    limits: dict[str, dict[str, Any]] = document.get("limits", {})
    entries = []
    for entry in document.get("set_aside", []):
        limit = limits.get(entry["limit"])
        if limit is None:
            raise HarnessError(
                f"{path.name}: {entry['test']} names the limit {entry['limit']!r}; expected one "
                f"of {', '.join(sorted(limits))}; try declaring it under [limits]"
            )
        errors = tuple(entry.get("errors", limit["errors"]))
        if not errors or not entry["reason"].strip():
            raise HarnessError(f"{path.name}: {entry['test']} has no reason or no errors")
        entries.append(SetAside(entry["test"], entry["limit"], entry["reason"], errors))
    return entries


# Comparing ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Unexpected:
    """A test that passes in-process, does not pass here, and is not (validly) set aside."""

    test: str
    kind: str
    message: str
    note: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Results of one file, in-process and through Fairway."""

    file: str
    baseline: FileResult
    fairway: FileResult
    passed: list[str]
    set_aside: dict[str, str]
    unexpected: list[Unexpected]
    stale: list[str]

    @property
    def counted(self) -> int:
        """Count the tests that must pass: those that pass in-process and are not set aside."""
        return len(self.passed) + len(self.unexpected)


def compare(baseline: FileResult, fairway: FileResult, entries: list[SetAside]) -> Comparison:
    """Sort every test that passes in-process into passed, set aside or unexpected."""
    passed: list[str] = []
    set_aside: dict[str, str] = {}
    unexpected: list[Unexpected] = []
    stale: list[str] = []
    missing = Outcome("missing", message="passes in-process but is not even collected here")
    for test, in_process in baseline.tests.items():
        outcome = fairway.tests.get(test, missing)
        if in_process.kind != "passed" or (fairway.pattern and outcome is missing):
            continue
        entry = next((entry for entry in entries if entry.covers(test)), None)
        if outcome.kind == "passed":
            passed.append(test)
            if entry is not None:
                stale.append(f"{test} passes, but {entry.test!r} sets it aside ({entry.limit})")
        elif entry is not None and entry.explains(outcome):
            set_aside[test] = entry.limit
        else:
            note = f"set aside for {entry.limit}, whose error this is not" if entry else ""
            unexpected.append(Unexpected(test, outcome.kind, outcome.message, note))
    if fairway.pattern is None:
        stale += [
            f"{entry.test!r} ({entry.limit}) matches no test that passes in-process"
            for entry in entries
            if entry.test.startswith(test_file(fairway.file))
            and not any(
                entry.covers(test) for test, o in baseline.tests.items() if o.kind == "passed"
            )
        ]
    return Comparison(fairway.file, baseline, fairway, passed, set_aside, unexpected, stale)


def file_errors(results: list[FileResult]) -> list[str]:
    """List errors that invalidate the result of a whole file."""
    errors = []
    for r in results:
        where = f"{r.file} with JAX_PLATFORMS={r.settings['JAX_PLATFORMS']}"
        if r.error is not None:
            errors.append(f"{where}: {r.error}")
        elif r.device_count not in (None, DEVICES):
            errors.append(f"{where}: expected {DEVICES} devices, got {r.device_count}")
    return errors


# Reporting ----------------------------------------------------------------------------------------


def baseline_table(results: list[FileResult]) -> Table:
    """Lay out the in-process outcomes, one row per file."""
    table = Table(title=f"JAX's own tests in-process, {DEVICES} CPU devices")
    table.add_column("file", no_wrap=True)
    for column in ("tests", "passed", "failed", "skipped", "crashed", "timeout", "s"):
        table.add_column(column, justify="right")
    for r in results:
        counts = Counter(outcome.kind for outcome in r.tests.values())
        row = [len(r.tests), counts["passed"], counts["failed"]]
        row += [counts["skipped"] + counts["xfailed"], counts["crashed"]]
        row += [counts["timeout"] + counts["not-run"], round(r.seconds)]
        table.add_row(r.file, *map(str, row))
    return table


def comparison_table(comparisons: list[Comparison]) -> Table:
    """Lay out the comparison, one row per file."""
    table = Table(title=f"JAX's own tests through Fairway, {DEVICES} devices", show_footer=True)
    passes = sum(c.baseline.count("passed") for c in comparisons)
    passed = sum(len(c.passed) for c in comparisons)
    counted = sum(c.counted for c in comparisons)
    table.add_column("file", footer="all", no_wrap=True)
    for title, footer in (
        ("pass in-process", str(passes)),
        ("set aside", str(sum(len(c.set_aside) for c in comparisons))),
        ("counted", str(counted)),
        ("pass here", str(passed)),
        ("rate", percent(passed, counted)),
        ("in-process s", f"{sum(c.baseline.seconds for c in comparisons):.0f}"),
        ("here s", f"{sum(c.fairway.seconds for c in comparisons):.0f}"),
    ):
        table.add_column(title, footer=footer, justify="right")
    for c in comparisons:
        row = [c.baseline.count("passed"), len(c.set_aside), c.counted, len(c.passed)]
        rate = percent(len(c.passed), c.counted)
        seconds = (f"{c.baseline.seconds:.0f}", f"{c.fairway.seconds:.0f}")
        table.add_row(c.file, *map(str, row), rate, *seconds)
    return table


def percent(part: int, whole: int) -> str:
    """Format a share with two decimals."""
    return f"{100 * part / whole:.2f} %" if whole else "-"


def report(console: Console, comparisons: list[Comparison], errors: list[str]) -> bool:
    """Print the comparison; return whether it meets the required rate."""
    console.print(comparison_table(comparisons))
    for comparison in comparisons:
        for u in comparison.unexpected:
            note = f" [yellow]({escape(u.note)})[/]" if u.note else ""
            console.print(f"[red]{u.kind}[/] {escape(u.test)}{note}\n    {escape(u.message)}")
    for line in (line for comparison in comparisons for line in comparison.stale):
        console.print(f"[yellow]stale[/] {escape(line)}")
    for limit, tests in limit_counts(comparisons).items():
        console.print(f"set aside for {limit}: {tests}")
    for error in errors:
        console.print(f"[red]file not run properly[/] {escape(error)}")
    counted = sum(c.counted for c in comparisons)
    rate = sum(len(c.passed) for c in comparisons) / counted if counted else 0.0
    good = rate >= REQUIRED_RATE and not errors
    console.print(
        f"{'good' if good else 'NOT good'}: {100 * rate:.2f} % of {counted} counted tests pass; "
        f"expected at least {100 * REQUIRED_RATE:g} % and no file left out"
    )
    return good


def limit_counts(comparisons: list[Comparison]) -> dict[str, int]:
    """Count the tests set aside for each limit, the most frequent first."""
    return dict(Counter(limit for c in comparisons for limit in c.set_aside.values()).most_common())


def summary(comparisons: list[Comparison], errors: list[str], good: bool) -> dict[str, Any]:
    """Convert the comparison to plain data, for `summary.json`."""
    return {
        "good": good,
        "required_rate": REQUIRED_RATE,
        "device_count": DEVICES,
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "settings": comparisons[0].fairway.settings if comparisons else {},
        "errors": errors,
        "files": [
            {
                "file": c.file,
                "pass_in_process": c.baseline.count("passed"),
                "counted": c.counted,
                "pass_here": len(c.passed),
                "set_aside": c.set_aside,
                "unexpected": [dataclasses.asdict(u) for u in c.unexpected],
                "stale": c.stale,
                "in_process_s": c.baseline.seconds,
                "here_s": c.fairway.seconds,
            }
            for c in comparisons
        ],
    }


# The command --------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description="Run JAX's own test files against Fairway.")
    add = parser.add_argument
    add("--source", type=Path, required=True, help="checkout of the installed version of jax")
    add("--other-version", action="store_true", help="of whatever version the checkout is")
    add("--files", default=",".join(FILES), help="comma-separated, without _test.py; default all")
    add("--target", help="grpc://host:port of a running server; default: start one")
    add("--baseline-only", action="store_true", help="only run what has no cached baseline")
    add("--fresh-baseline", action="store_true", help="run the baseline again though it is cached")
    add("--out", type=Path, default=Path("out/jax-tests"), help="results, journals and logs")
    add("--jobs", type=int, default=1, help="files run at a time")
    add("--timeout", type=float, default=7200.0, help="seconds for one file")
    add("--test-timeout", type=float, default=120.0, help="seconds for one test")
    add("--tests", metavar="PATTERN", help="only the tests that pytest -k PATTERN selects")
    add("--platforms", default="proxy", help="JAX_PLATFORMS of the Fairway pass")
    options = parser.parse_args(arguments)
    options.files = [
        name.removesuffix(".py").removesuffix("_test") for name in options.files.split(",")
    ]
    unknown = sorted(set(options.files) - set(FILES))
    if unknown:
        parser.error(f"unknown files: {', '.join(unknown)}; expected some of {', '.join(FILES)}")
    options.source, options.out = options.source.resolve(), options.out.resolve()
    return options


def check_source(source: Path) -> None:
    """Check that the tests are those of the installed JAX."""
    version_file = source / "jax" / "version.py"
    found = (
        re.search(r'_version = "(.*?)"', version_file.read_text())
        if (version_file.exists())
        else None
    )
    installed = importlib.metadata.version("jax")
    if found is None or found[1] != installed:
        raise HarnessError(
            f"--source {source} does not fit: expected a checkout of jax {installed}, got "
            f"{found[1] if found else 'no jax/version.py'}; try `git checkout jax-v{installed}`"
        )


def make_pass(options: argparse.Namespace, name: str, settings: dict[str, str]) -> Pass:
    """Build a pass from the command line and create its folder."""
    directory = options.out / name
    directory.mkdir(parents=True, exist_ok=True)
    return Pass(
        name=name,
        source=options.source,
        directory=directory,
        settings=settings,
        pattern=options.tests,
        test_timeout_s=options.test_timeout,
        file_timeout_s=options.timeout,
    )


def progress_line(one_pass: Pass, console: Console) -> Callable[[FileResult], None]:
    """Return a function that prints one line about a finished file."""

    def finished(result: FileResult) -> None:
        counts = Counter(outcome.kind for outcome in result.tests.values())
        text = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        error = f" [red]{escape(result.error)}[/]" if result.error else ""
        console.print(f"{one_pass.name} {result.file}: {text} in {result.seconds:.0f} s{error}")

    return finished


def run_baseline(options: argparse.Namespace, console: Console) -> dict[str, FileResult]:
    """Run the in-process pass, or take results from the cache where they are valid."""
    one_pass = make_pass(options, "baseline", pass_settings("cpu", in_process=True))
    cached: dict[str, FileResult] = {}
    if not options.fresh_baseline:
        found = {file: cached_baseline(one_pass, file) for file in options.files}
        cached = {file: result for file, result in found.items() if result is not None}
    todo = [file for file in options.files if file not in cached]
    fresh = run_files(one_pass, todo, options.jobs, progress_line(one_pass, console))
    return {file: (cached | fresh)[file] for file in options.files}


def run_fairway(options: argparse.Namespace, console: Console) -> dict[str, FileResult]:
    """Run the pass through Fairway, never from a cache."""
    settings = pass_settings(options.platforms, in_process=False)
    one_pass = make_pass(options, "fairway", settings)
    finished = progress_line(one_pass, console)
    if options.target is not None:
        one_pass = dataclasses.replace(one_pass, target=options.target)
        return run_files(one_pass, options.files, options.jobs, finished)
    with running_server(one_pass.directory / "server.log") as server:
        one_pass = dataclasses.replace(one_pass, target=server.target, server=server)
        results = run_files(one_pass, options.files, options.jobs, finished)
        if server.start_count > 1:
            console.print(f"[red]the server died {server.start_count - 1} times[/]")
        return results


def main() -> int:
    """Run both passes, compare them, and return the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = parse_arguments()
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else LOG_WIDTH)
    try:
        if not options.other_version:
            check_source(options.source)
        entries = read_set_aside(SET_ASIDE_LIST)
        baseline = run_baseline(options, console)
        if options.baseline_only:
            console.print(baseline_table(list(baseline.values())))
            return 1 if file_errors(list(baseline.values())) else 0
        fairway = run_fairway(options, console)
    except HarnessError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 2
    except KeyboardInterrupt:
        console.print("[red]interrupted[/]: files that had ended are kept as baseline")
        return 130
    comparisons = [compare(baseline[file], fairway[file], entries) for file in options.files]
    errors = file_errors([*baseline.values(), *fairway.values()])
    good = report(console, comparisons, errors)
    path = options.out / "summary.json"
    path.write_text(json.dumps(summary(comparisons, errors, good), indent=1) + "\n")
    console.print(f"details: {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
