"""JAX's own test files against Fairway, compared with the same files run in-process.

    python dev/jax_tests.py --source <checkout of the installed version of jax>

Every file runs in a process of its own, once on eight CPU devices of that process (the baseline,
cached under --out) and once as a client of a Fairway server. A test counts when it passes
in-process; it must then pass here too, or be listed in `jax_tests_set_aside.toml` under the
limitation of the stock client that prevents it, and fail with an error of that limitation. Exit
status 0 means that at least 99 % of the counted tests pass; over several islands
(`--islands 2x1x4`) 98 %.
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
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_journal import FileResult, Outcome
from jax_runs import (
    DEVICES,
    HarnessError,
    Pass,
    cached_baseline,
    pass_settings,
    run_files,
    running_server,
    test_file,
)
from rich.console import Console
from rich.markup import escape
from rich.table import Table

FILES = (
    *("array", "device", "multi_device", "multibackend", "errors", "pickle", "layout"),
    *("memories", "transfer_guard", "aot", "jax_jit", "garbage_collection_guard"),
    *("debugging_primitives", "mutable_array", "linalg_sharding", "pmap", "shard_map", "pjit"),
    *("lax_control_flow", "api", "python_callback", "buffer_callback", "debugger", "checkify"),
    "colocated_python",
)
REQUIRED_RATE = 0.99
REQUIRED_RATE_OVER_ISLANDS = 0.98
SET_ASIDE_LIST = Path(__file__).with_name("jax_tests_set_aside.toml")
LOG_WIDTH = 120


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


def required_rate(islands: str) -> float:
    """Return the share of tests that must pass on these islands."""
    return REQUIRED_RATE if islands.startswith("1x") else REQUIRED_RATE_OVER_ISLANDS


def report(
    console: Console, comparisons: list[Comparison], errors: list[str], required: float
) -> bool:
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
    good = rate >= required and not errors
    console.print(
        f"{'good' if good else 'NOT good'}: {100 * rate:.2f} % of {counted} counted tests pass; "
        f"expected at least {100 * required:g} % and no file left out"
    )
    return good


def limit_counts(comparisons: list[Comparison]) -> dict[str, int]:
    """Count the tests set aside for each limit, the most frequent first."""
    return dict(Counter(limit for c in comparisons for limit in c.set_aside.values()).most_common())


def summary(
    comparisons: list[Comparison], errors: list[str], good: bool, required: float
) -> dict[str, Any]:
    """Convert the comparison to plain data, for `summary.json`."""
    return {
        "good": good,
        "required_rate": required,
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
    add("--islands", default=f"1x1x{DEVICES}", help="islands of the server, such as 2x1x4")
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
    one_pass = make_pass(options, f"fairway-{options.islands}", settings)
    finished = progress_line(one_pass, console)
    if options.target is not None:
        one_pass = dataclasses.replace(one_pass, target=options.target)
        return run_files(one_pass, options.files, options.jobs, finished)
    log = one_pass.directory / "server.log"
    with running_server(log, options.islands) as server:
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
    required = required_rate(options.islands)
    good = report(console, comparisons, errors, required)
    path = options.out / "summary.json"
    path.write_text(json.dumps(summary(comparisons, errors, good, required), indent=1) + "\n")
    console.print(f"details: {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
