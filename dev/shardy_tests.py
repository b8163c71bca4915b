"""Shardy's own MPMD tests as a client of Fairway, with each lowered program executed as well.

    python dev/shardy_tests.py --source <checkout of shardy> --client <python with jax and chex>

Shardy's tests only check the text of the programs they lower. Here each of those programs is also
compiled and run on the islands, on values drawn from --seed, and its results are compared with
those of plain JAX for the same function and values in the client's own process. Exit status 0 means
that every test passes and every executable program has equal results.

This module is also the pytest plugin for this; it runs in the client's process, which has a
different Python: Shardy's tests need 3.12.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import jax_journal
import jax_runs
import jax_tests
from jax_journal import FileResult
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "shardy.integrations.python.jax.mpmd"
FOLDER = PACKAGE.replace(".", "/")
COMMIT = "71b0d1b17c60"
"""The newest commit of Shardy whose tests all pass with jax 0.10.2."""

PROGRAMS_VARIABLE = "FAIRWAY_SHARDY_TESTS_PROGRAMS"
SEED_VARIABLE = "FAIRWAY_SHARDY_TESTS_SEED"
KINDS = ("equal", "not executable", "failed")
RUNS = 2
"""Runs of each program: the second takes JAX's fast path."""

TOLERANCE = 1e-5
"""Largest difference, relative to the largest element: sums may be taken in another order."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of one program that a test lowered.

    `kind` is one of `KINDS`; `message` says why, unless it is "equal".
    """

    test: str
    program: str
    kind: str
    message: str = ""


# The pytest plugin: runs inside the client's process ----------------------------------------------


class NotExecutableError(Exception):
    """A program that cannot be executed; the message says why."""


class Programs:
    """Runs the programs of each test after the test, and records the results.

    Args:
        journal: receives one JSON line for each program.
        seed: seed of the inputs.
    """

    def __init__(self, journal: Path, seed: int) -> None:
        self._journal = journal
        self._seed = seed
        self._lowered: list[tuple[Any, Any]] = []

    def pytest_collection_finish(self) -> None:
        """Record each lowered program from here on."""
        traced = importlib.import_module(f"{PACKAGE}.jit").MpmdGspmdTraced
        lower = traced.lower

        def lower_and_note(traced: Any, *args: Any, **options: Any) -> Any:
            lowered = lower(traced, *args, **options)
            self._lowered.append((traced.func, lowered))
            return lowered

        traced.lower = lower_and_note

    def pytest_runtest_teardown(self, item: "pytest.Item") -> None:
        """Run the lowered programs; not earlier, so that the test itself is not affected."""
        programs, self._lowered = self._lowered, []
        for function, lowered in programs:
            kind, message = "equal", ""
            try:
                check(function, lowered, self._seed)
            except NotExecutableError as reason:
                kind, message = "not executable", str(reason)
            except Exception as error:
                kind, message = "failed", f"{type(error).__name__}: {error}"
            verdict = Verdict(item.nodeid, lowered.name, kind, message)
            with self._journal.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(verdict)) + "\n")


def refuse(lowered: Any) -> None:
    """Check that a program can run on these islands.

    Raises:
        NotExecutableError: it cannot; says why.
    """
    for name, mesh in lowered.topology.items():
        islands = {device.island for device in mesh.devices.flat}
        if len(islands) > 1:
            raise NotExecutableError(f"mesh {name} spans {len(islands)} islands")
    cuts: dict[str, list[str]] = {}
    for operation in operations(lowered.compiler_ir("ifrt")):
        if operation.name == "ifrt.Call":
            types = [re.sub(r", \[[\d, ]+\]", "", str(value.type)) for value in operation.results]
            callee = str(operation.attributes["callee"])
            if cuts.setdefault(callee, types) != types:
                raise NotExecutableError(
                    f"the program says that {callee} shards its results in two ways; Shardy takes "
                    "fragments for the same that differ in nothing else"
                )


def operations(module: Any) -> Iterator[Any]:
    """List the operations of a program, in order."""
    for function in module.body.operations:
        if function.operation.name == "func.func":
            yield from (operation.operation for operation in function.regions[0].blocks[0])


def check(function: Any, lowered: Any, seed: int) -> None:
    """Run a program and compare it with plain JAX.

    Raises:
        NotExecutableError: it cannot be executed.
        AssertionError: a result has a wrong value, type or sharding, or the deleted arguments are
            not exactly the donated ones.
        Exception: any error of the program.
    """
    import jax

    refuse(lowered)
    compiled = lowered.compile()
    inputs = jax.tree.leaves(lowered.args_info)
    shardings = lowered.function_named_shardings
    placements = jax.tree.leaves(shardings.output_specs)
    for run in range(RUNS):
        values = jax.tree.unflatten(lowered.input_tree, draw(inputs, seed + run))
        expected = jax.tree.leaves(plain(function, values))
        given = jax.device_put(values, shardings.input_specs)
        results = jax.tree.leaves(compiled(*given))
        gone = [array.is_deleted() for array in jax.tree.leaves(given)]
        assert gone == [info.donated for info in inputs], f"arguments that are gone: {gone}"
        for number, (got, want, at) in enumerate(zip(results, expected, placements, strict=True)):
            assert got.sharding.is_equivalent_to(at, got.ndim), (
                f"result {number} is placed otherwise: expected {at}, got {got.sharding}"
            )
            compare(number, got, want)


def draw(inputs: list[Any], seed: int) -> list[Any]:
    """Draw values of these shapes and types, small enough for products of many."""
    import numpy as np

    random = np.random.default_rng(seed)

    def one(info: Any) -> Any:
        if np.issubdtype(info.dtype, np.integer):
            return random.integers(0, 100, info.shape).astype(info.dtype)
        if info.dtype == np.bool_:
            return random.integers(0, 2, info.shape).astype(info.dtype)
        return random.uniform(-0.5, 0.5, info.shape).astype(info.dtype)

    return [one(info) for info in inputs]


def plain(function: Any, values: Any) -> Any:
    """Compute the function with plain JAX on one CPU device of this process."""
    import jax

    def fresh(*args: Any) -> Any:  # not `function` itself: JAX caches its trace for the islands
        return function(*args)

    # Shardings place values on devices that this process lacks; they do not change the values.
    unchanged = mock.patch.object(jax.lax, "with_sharding_constraint", lambda value, *_: value)
    with unchanged, jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(fresh)(*values)


def compare(number: int, got: Any, want: Any) -> None:
    """Fail unless two results are equal up to rounding."""
    import numpy as np

    found, sought = np.asarray(got), np.asarray(want)
    assert (found.shape, found.dtype) == (sought.shape, sought.dtype), (
        f"result {number} is another array: expected {sought.dtype}{list(sought.shape)}, "
        f"got {found.dtype}{list(found.shape)}"
    )
    exact = not np.issubdtype(sought.dtype, np.inexact)
    scale = 0.0 if exact else TOLERANCE * float(np.max(np.abs(sought), initial=0.0))
    np.testing.assert_allclose(found, sought, rtol=0.0, atol=scale, err_msg=f"result {number}")


def mend_unions() -> None:
    """Make `isinstance(x, Union[...])` check each class, as since Python 3.12.9 and 3.13.2.

    Before, it checked only the class of `x`, so that a tracer, which claims to be an array by its
    `__class__`, was none. Shardy's `enumerated_for` does such a check.
    """
    if unions_need_mending(sys.version_info[:3]):
        union: Any = type(typing.Union[int, str])  # noqa: UP007
        union.__instancecheck__ = lambda self, x: any(isinstance(x, a) for a in self.__args__)


def unions_need_mending(version: tuple[int, ...]) -> bool:
    """Tell whether a Python of this version needs `mend_unions`."""
    return version < (3, 12, 9) or (3, 13) <= version < (3, 13, 2)


def pytest_configure(config: "pytest.Config") -> None:
    """Register Fairway with JAX, and the plugins (`-p shardy_tests`)."""
    from fairway import plugin  # importing `fairway` adds names to jaxlib

    plugin.initialize()  # the client has this repository on its path, not as an installed package
    mend_unions()
    jax_journal.pytest_configure(config)
    journal = Path(os.environ[PROGRAMS_VARIABLE])
    config.pluginmanager.register(Programs(journal, int(os.environ[SEED_VARIABLE])))


# The harness --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pass(jax_runs.Pass):
    """The run of Shardy's files as a client of Fairway.

    `client` is the Python that runs them, `seed` the seed of the programs' inputs.
    """

    client: Path = Path(sys.executable)
    seed: int = 0

    @property
    def programs(self) -> Path:
        """Return the journal of the programs."""
        return self.directory / "programs.jsonl"

    def environment(self, journal: Path) -> dict[str, str]:
        """Build the environment of a test process."""
        paths = [Path(__file__).parent, ROOT / "python", self.source]
        return super().environment(journal) | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            PROGRAMS_VARIABLE: str(self.programs),
            SEED_VARIABLE: str(self.seed),
        }

    def command(self, file: str) -> list[str]:
        """Build the command of a test process."""
        command = [str(self.client), "-P", "-m", "pytest", "-p", Path(__file__).stem, "-q"]
        command += ["-p", "no:cacheprovider", "--capture=no", f"--rootdir={self.source}"]
        return [*command, f"{FOLDER}/{file}_test.py"]


def read_verdicts(path: Path) -> list[Verdict]:
    """Read the journal of the programs."""
    return [Verdict(**json.loads(line)) for line in path.read_text().splitlines()]


def results_table(results: list[FileResult], verdicts: list[Verdict], islands: str) -> Table:
    """Lay out the outcomes of tests and programs, one row per file."""
    table = Table(title=f"Shardy's MPMD tests through Fairway, islands {islands}", show_footer=True)
    rows = []
    for result in results:
        kinds = Counter(verdict.kind for verdict in verdicts if verdict.test in result.tests)
        passed = result.count("passed")
        row = [len(result.tests), passed, len(result.tests) - passed, kinds.total()]
        rows.append([*row, *(kinds[kind] for kind in KINDS)])
    table.add_column("file", footer="all")
    titles = ("tests", "passed", "not passed", "programs", *KINDS)
    for title, column in zip(titles, zip(*rows, strict=True), strict=True):
        table.add_column(title, footer=str(sum(column)), justify="right")
    for result, row in zip(results, rows, strict=True):
        table.add_row(result.file, *map(str, row))
    return table


def report(console: Console, results: list[FileResult], verdicts: list[Verdict]) -> bool:
    """Print failures; return whether there are none but programs that cannot be executed."""
    bad = 0
    for result in results:
        for test, outcome in result.tests.items():
            if outcome.kind != "passed":
                bad += 1
                console.print(f"[red]{outcome.kind}[/] {escape(test)}")
                console.print(f"    {escape(outcome.message)}")
        if result.error:
            bad += 1
            console.print(f"[red]file not run properly[/] {result.file}: {escape(result.error)}")
    for verdict in verdicts:
        if verdict.kind != "equal":
            bad += verdict.kind == "failed"
            color = "red" if verdict.kind == "failed" else "yellow"
            console.print(f"[{color}]{verdict.kind}[/] {escape(verdict.program)} of {verdict.test}")
            console.print(f"    {escape(verdict.message)}")
    return bad == 0 and any(verdict.kind == "equal" for verdict in verdicts)


def describe_client(client: Path) -> str:
    """Return the versions with which the tests run.

    Raises:
        HarnessError: the client has no jaxlib, or another version than the hosts.
    """
    code = "import platform, jaxlib; print(platform.python_version(), jaxlib.__version__)"
    try:
        said = subprocess.run([client, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise jax_runs.HarnessError(f"--client {client} has no jaxlib: {error}") from error
    python, jaxlib = said.stdout.split()
    if jaxlib != (ours := importlib.metadata.version("jaxlib")):
        raise jax_runs.HarnessError(
            f"--client {client} does not fit: expected jaxlib {ours}, as here, got {jaxlib}; "
            "IFRT IR has no versions, so client and hosts need the same"
        )
    numbers = tuple(int(number) for number in re.findall(r"\d+", python)[:3])
    mended = ", its isinstance of a union mended" if unions_need_mending(numbers) else ""
    return f"client: Python {python}{mended}; jaxlib {jaxlib}"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Run Shardy's MPMD tests against Fairway.")
    add = parser.add_argument
    add("--source", type=Path, required=True, help=f"checkout of shardy, at {COMMIT}")
    add("--client", type=Path, required=True, help="Python 3.12 or later with jax and chex")
    add("--out", type=Path, default=Path("out/shardy-tests"), help="results, journals and logs")
    add("--islands", default="2x1x4", help="as for `fairway up`, with eight devices in all")
    add("--seed", type=int, default=0, help="where the inputs of the programs come from")
    options = parser.parse_args(arguments)
    options.source, options.out = options.source.resolve(), options.out.resolve()
    options.client = options.client.absolute()  # a virtual environment's Python is a symbolic link
    return options


@contextlib.contextmanager
def running(options: argparse.Namespace) -> Iterator[Pass]:
    """Run a server for the time of the block."""
    options.out.mkdir(parents=True, exist_ok=True)
    with jax_runs.running_server(options.out / "server.log", options.islands) as server:
        yield Pass(
            name="shardy",
            source=options.source,
            directory=options.out,
            settings=jax_runs.pass_settings("proxy,cpu", in_process=False),
            pattern=None,
            test_timeout_s=120.0,
            file_timeout_s=1200.0,
            target=server.target,
            server=server,
            client=options.client,
            seed=options.seed,
        )


def main() -> int:
    """Run all files and return the exit status."""
    options = parse_arguments()
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else jax_tests.LOG_WIDTH)
    files = [path.stem.removesuffix("_test") for path in options.source.glob(f"{FOLDER}/*_test.py")]
    try:
        if not files:
            raise jax_runs.HarnessError(f"no tests in {options.source / FOLDER}; try {COMMIT}")
        console.print(describe_client(options.client))
        with running(options) as one_pass, Progress(console=console) as progress:
            one_pass.programs.write_text("")
            task = progress.add_task("Shardy's tests", total=len(files))
            results = jax_runs.run_files(
                one_pass, sorted(files), jobs=1, finished=lambda _: progress.advance(task)
            )
    except jax_runs.HarnessError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 2
    verdicts = read_verdicts(one_pass.programs)
    console.print(results_table(list(results.values()), verdicts, options.islands))
    good = report(console, list(results.values()), verdicts)
    console.print(f"{'good' if good else 'NOT good'}; seed {options.seed}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
