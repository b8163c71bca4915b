"""Outcomes of JAX's tests: the pytest plugin that writes them to a journal, and its reader.

A test process that crashes or hangs costs one test: the rest of its file continues in another.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

JOURNAL_VARIABLE = "FAIRWAY_JAX_TESTS_JOURNAL"
MESSAGE_CHARACTERS_MAX = 400
DETAIL_CHARACTERS_MAX = 8_000
TEST_TIMEOUT = "test timeout"


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
    """Register the recorder: pytest loads this module with `-p jax_journal`."""
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
