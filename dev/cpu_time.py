"""A pytest plugin that reports the CPU time of each test, including all processes it started.

Wall time of a test says little on a shared machine; CPU time is nearly the same everywhere. Use:
`pytest -p cpu_time`, with this folder in `PYTHONPATH`.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
SLOWEST = int(os.environ.get("SLOWEST", "10"))


def tree_cpu_s() -> float:
    """Returns user and system time of this process, its live descendants, and those that ended."""
    times: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        times[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS_PER_SECOND
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    total, pending = 0.0, [os.getpid()]
    while pending:
        process = pending.pop()
        total += times.get(process, 0.0)
        pending += children.get(process, [])
    return total


class CpuTimes:
    """Adds the CPU time to each report, and prints the sums per test."""

    def __init__(self) -> None:
        self._last = tree_cpu_s()
        self._by_test: dict[str, list[float]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Records the time since the last report, which is that of this phase."""
        report = yield
        now = tree_cpu_s()
        # Negative if a process ended while others were read; the next report compensates.
        report.cpu_s = now - self._last  # type: ignore[attr-defined]
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collects the times of all workers."""
        known = self._by_test.setdefault(report.nodeid, [0.0, 0.0])
        known[0] += report.duration
        known[1] += getattr(report, "cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the slowest tests, and the sums over all."""
        rows = sorted(self._by_test.items(), key=lambda one: -max(one[1]))
        terminalreporter.write_line(f"{'wall s':>8} {'cpu s':>8}  with fixtures")
        for name, (wall_s, cpu_s) in rows[: int(os.environ.get("SLOWEST", SLOWEST))]:
            terminalreporter.write_line(f"{wall_s:8.1f} {cpu_s:8.1f}  {name}")
        walls, cpus = zip(*(times for _, times in rows), strict=True) if rows else ((), ())
        terminalreporter.write_line(f"{sum(walls):8.1f} {sum(cpus):8.1f}  all {len(rows)} tests")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin."""
    config.pluginmanager.register(CpuTimes(), "cpu-times")
