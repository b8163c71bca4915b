"""PyTorch's own tests of process groups against Fairway's backend, compared with gloo.

    python dev/torch_tests.py [--out out/torch-tests] [--only PATTERN] [--fresh]

The tests are `torch/testing/_internal/distributed/distributed_test.py` of the installed wheel. Many
of them run for gloo alone, by its name: here the name of the backend under test compares equal to
it as well. Checks of profiler events apply only to PyTorch's own backends. A test counts when it
passes with gloo on this machine; it must then pass here too, or be listed in
`torch_tests_set_aside.toml` with the reason. Exit status 0 means that at least 99 % of the counted
tests pass, and every failure is one that is set aside.

Each pass runs in a process of its own whose ranks are forked, and writes a line for each test; a
pass that crashes continues after the test at which it crashed.
"""

import argparse
import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
import time
import tomllib
import types
import unittest
from pathlib import Path
from typing import Any

RANKS = 8
REQUIRED_RATE = 0.99
TEST_TIMEOUT_S = 120
TEXT_MAX = 4000
SET_ASIDE_LIST = Path(__file__).with_name("torch_tests_set_aside.toml")
BACKENDS = ("gloo", "fairway")


# One pass, in a process of its own ----------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Sets the variables that the test module reads on import; its files are put in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), OMP_NUM_THREADS="1")
    os.environ.setdefault("TEMP_DIR", str(folder.resolve()))
    os.environ["INIT_METHOD"] = f"file://{os.environ['TEMP_DIR']}/shared_init_file"


class LikeGloo(str):
    """The name of a backend that compares equal to gloo, so that tests treat it the same."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str(self) == other or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")

    def __str__(self) -> str:
        return "".join(self)


def module_of_tests(backend: str) -> Any:
    """Loads PyTorch's tests for a backend."""
    name = "torch.testing._internal.distributed.distributed_test"
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"{name} is not there; expected a wheel of PyTorch with its tests")
    text = Path(spec.origin).read_text()
    line = 'BACKEND = os.environ["BACKEND"]\n'
    if line not in text:
        sys.exit(f"{spec.origin} does not say {line.strip()!r}; it is of another version")
    module = types.ModuleType(name)
    module.__file__ = spec.origin
    given = "BACKEND = GIVEN\n" if backend != "gloo" else line
    module.__dict__["GIVEN"] = LikeGloo(backend)
    sys.modules[name] = module
    exec(compile(text.replace(line, given), spec.origin, "exec"), module.__dict__)
    return module


def suite(backend: str) -> unittest.TestSuite:
    """Returns all tests, whose ranks are forked from this process."""
    from torch.testing._internal import common_distributed

    common_distributed.DistTestCases.backend_feature["plugin"] = {"fairway"}
    tests = module_of_tests(backend)
    common_distributed.TIMEOUT_DEFAULT = TEST_TIMEOUT_S

    class TestBackend(
        tests.TestDistBackend,  # type: ignore[misc, name-defined]
        tests.DistributedTest._DistTestBase,  # type: ignore[misc, name-defined]
    ):
        def setUp(self) -> None:
            super().setUp()
            self._fork_processes()

        def _fork_processes(self) -> None:
            import torch

            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return unittest.defaultTestLoader.loadTestsFromTestCase(TestBackend)


class Recorder(unittest.TestResult):
    """Appends a line to the journal when a test begins and when it ends."""

    def __init__(self, journal: Path) -> None:
        super().__init__()
        self._journal = journal
        self._outcome = ("passed", "")
        self._began = 0.0

    def _write(self, **fields: Any) -> None:
        with self._journal.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        """Records the start of a test."""
        super().startTest(test)
        self._outcome, self._began = ("passed", ""), time.monotonic()
        self._write(test=name_of(test), outcome="started")

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        """Records the outcome of a test."""
        super().stopTest(test)
        outcome, text = self._outcome
        seconds = round(time.monotonic() - self._began, 2)
        self._write(test=name_of(test), outcome=outcome, text=text[-TEXT_MAX:], seconds=seconds)

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        """Records an error."""
        self._outcome = ("failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        """Records a failure."""
        self.addError(test, err)

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        """Records a skipped test."""
        self._outcome = ("skipped", reason)


def name_of(test: unittest.TestCase) -> str:
    """Returns the name of a test's method."""
    return test.id().rpartition(".")[2]


def run_pass(backend: str, journal: Path, pattern: str) -> None:
    """Runs the tests that have no outcome in the journal."""
    prepare(journal.parent / "files")
    tests = suite(backend)
    done = set(read(journal))
    chosen = [
        test
        for test in tests
        if isinstance(test, unittest.TestCase)
        and name_of(test) not in done
        and fnmatch.fnmatch(name_of(test), pattern)
    ]
    unittest.TestSuite(chosen).run(Recorder(journal))


# Both passes --------------------------------------------------------------------------------------


def read(journal: Path) -> dict[str, dict[str, Any]]:
    """Returns the last line of each test; a test that only started crashed its process."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return {line["test"]: line for line in map(json.loads, lines)}


def outcomes(backend: str, out: Path, pattern: str) -> dict[str, dict[str, Any]]:
    """Runs a pass to its end, in as many processes as necessary; returns the outcomes."""
    journal = out / f"{backend}.jsonl"
    log = out / f"{backend}.log"
    command = [sys.executable, __file__, "--pass", backend, "--journal", str(journal)]
    with log.open("ab") as output:
        while True:
            before = len(read(journal))
            status = subprocess.run(
                [*command, "--only", pattern], stdout=output, stderr=output, check=False
            ).returncode
            if status == 0:
                return read(journal)
            if len(read(journal)) == before:
                sys.exit(f"the tests do not run with {backend} (status {status}); read {log}")


def main() -> int:
    """Runs both passes, compares them, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("out/torch-tests"))
    parser.add_argument("--only", default="test_*", help="pattern of the tests' names")
    parser.add_argument("--fresh", action="store_true", help="run the pass with gloo again, too")
    parser.add_argument("--pass", dest="backend", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend:
        run_pass(options.backend, options.journal, options.only)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for backend in BACKENDS:
        if backend == "fairway" or options.fresh:
            (options.out / f"{backend}.jsonl").unlink(missing_ok=True)
    gloo = outcomes("gloo", options.out, options.only)
    names = fnmatch.filter(gloo, options.only)
    counted = sorted(name for name in names if gloo[name]["outcome"] == "passed")
    fairway = outcomes("fairway", options.out, options.only)
    reasons = tomllib.loads(SET_ASIDE_LIST.read_text()).get("set_aside", {})
    failed = [name for name in counted if fairway[name]["outcome"] != "passed"]
    for name in failed:
        found = fairway[name]
        lines = found.get("text", "").strip().splitlines() or ["the test process died"]
        print(f"{name}: {found['outcome']}: {reasons.get(name) or lines[-1][:200]}")
    passed = len(counted) - len(failed)
    rate = passed / len(counted) if counted else 0.0
    print(f"of {len(counted)} that gloo passes {passed} pass ({rate:.1%}), {len(failed)} do not")
    unknown = [name for name in failed if name not in reasons]
    stale = [name for name in reasons if name in counted and name not in failed]
    for name in stale:
        print(f"{name} passes, and is set aside; take it from {SET_ASIDE_LIST.name}")
    return 0 if rate >= REQUIRED_RATE and not unknown else 1


if __name__ == "__main__":
    sys.exit(main())
