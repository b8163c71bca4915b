"""Compares a captured step with its simulation on the machine that it ran on.

The machine is fitted on every other measured step: the time of each node, the time from one
computation of a gang to its next one, and from the arrival of a message to the computation that it
is for. The steps are then simulated from these figures and the program's dependencies, and compared
with the steps in between, which no figure was fitted on. Steps in which the script or the machine
paused are left out of both.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fairway import _native
from fairway.analysis.machine import FittedMachine, StepUnits, Unit, fit, simulate
from fairway.errors import ReportError
from fairway.report.measured import STEPS_MIN
from fairway.report.plots import drawing, save
from fairway.report.steps import StepReport, digest
from fairway.report.timeline import write_events

__all__ = ["Compared", "Comparison", "compare", "compare_reports"]

WARM_UP = 0.25
"""Part of a report that is left out at first: hosts still compile, and wait for one another."""
PAUSE = 3.0
"""A step that takes over this many times the median is left out."""
DRAWN = 2
"""Consecutive steps of a picture."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """Measured and predicted mean time of one thing."""

    name: str
    measured_ns: float
    predicted_ns: float

    @property
    def error(self) -> float:
        """The prediction's relative error: 0.05 for 5 % too long."""
        if self.measured_ns == 0:
            return 0.0 if self.predicted_ns == 0 else float("inf")
        return self.predicted_ns / self.measured_ns - 1


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A measured and a simulated report of the same steps.

    Attributes:
        graph: the step graph.
        machine: what was fitted; None if the simulated report was given.
        measured: the report of the machine.
        predicted: the simulated report, as many steps.
        compared: the steps that are compared, which the machine was not fitted on.
    """

    graph: _native.StepGraph
    machine: FittedMachine | None
    measured: StepReport
    predicted: StepReport
    compared: Sequence[int]

    @property
    def step(self) -> Compared:
        """Mean time of a step."""
        return Compared("step", *(statistics.fmean(periods) for periods in self._periods()))

    @property
    def steps(self) -> list[Compared]:
        """Time of each step that is compared."""
        pairs = zip(*self._periods(), strict=True)
        return [
            Compared(f"step {number}", *pair)
            for number, pair in zip(self.compared, pairs, strict=True)
        ]

    @property
    def nodes(self) -> list[Compared]:
        """Mean time of each node that was observed."""
        return [
            Compared(f"#{number} {unit} {self.graph.nodes[number].name}", *times)
            for number, unit, times in self._times()
        ]

    @property
    def channels(self) -> list[Compared]:
        """Time of each channel in a step: of all its messages together."""
        found: dict[Unit, list[tuple[float, float]]] = defaultdict(list)
        for _, unit, times in self._times():
            if unit.kind != "gang":
                found[unit].append(times)
        return [
            Compared(str(unit), *(sum(times) for times in zip(*all_times, strict=True)))
            for unit, all_times in sorted(found.items())
        ]

    def write_timeline(self, path: Path) -> None:
        """Writes both reports as traces for https://ui.perfetto.dev, with a process for each."""
        events: list[dict[str, Any]] = []
        units = StepUnits(self.graph).units
        tracks = {unit: track for track, unit in enumerate(sorted(set(units)))}
        for process, report in enumerate((self.measured, self.predicted)):
            events.append(_label("process_name", process, 0, report.source))
            events += [
                _label("thread_name", process, track, str(unit)) for unit, track in tracks.items()
            ]
            for number, step in enumerate(report.steps):
                for node, span in sorted(step.items()):
                    events.append(
                        {
                            "ph": "X",
                            "name": self.graph.nodes[node].name,
                            "pid": process,
                            "tid": tracks[units[node]],
                            "ts": span.begin_ns / 1e3,
                            "dur": span.length_ns / 1e3,
                            "args": {"step": number, "node": node},
                        }
                    )
        write_events(path, events, "ms")

    def draw(self, path: Path, title: str) -> None:
        """Draws both reports on one timeline, and the errors of steps and nodes.

        Raises:
            ConfigError: matplotlib is missing.
        """
        pyplot: Any = drawing()
        canvas, axes = pyplot.subplot_mosaic(
            [["time", "time"], ["steps", "nodes"]],
            figsize=(11, 7),
            height_ratios=(3, 2),
            layout="constrained",
        )
        self._draw_time(axes["time"])
        self._draw_steps(axes["steps"])
        self._draw_nodes(axes["nodes"])
        step = self.step
        canvas.suptitle(
            f"{title}: a step takes {step.measured_ns / 1e6:.3g} ms, predicted "
            f"{step.predicted_ns / 1e6:.3g} ms ({step.error:+.1%})",
            fontsize=11,
        )
        save(canvas, path)

    def _draw_time(self, axes: Any) -> None:
        """Draws consecutive steps, measured above predicted, from the end of the one before."""
        units = StepUnits(self.graph).units
        rows = {unit: row for row, unit in enumerate(sorted(set(units)))}
        first = self._typical()
        for report, shift, colour in ((self.measured, -0.2, "C0"), (self.predicted, 0.2, "C1")):
            begin = report.ends_ns[first - 1]
            bars: dict[int, list[tuple[float, float]]] = defaultdict(list)
            for step in report.steps[first : first + DRAWN]:
                for node, span in step.items():
                    bar = ((span.begin_ns - begin) / 1e6, span.length_ns / 1e6)
                    bars[rows[units[node]]].append(bar)
            for row, spans in sorted(bars.items()):
                area = (row + shift - 0.18, 0.36)
                label = report.source if row == min(bars) else None
                axes.broken_barh(
                    spans, area, facecolor=colour, edgecolor="white", linewidth=0.3, label=label
                )
            for end in report.ends_ns[first : first + DRAWN]:
                axes.axvline((end - begin) / 1e6, color=colour, linestyle="--", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [str(unit) for unit in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set(
            xlabel="ms after the end of the step before; dashed: ends of steps",
            title=f"steps {first} to {first + DRAWN - 1}",
        )
        axes.legend(loc="upper right", fontsize=8)

    def _typical(self) -> int:
        """Returns the compared step whose measured time is nearest to the mean."""
        mean, steps = self.step.measured_ns, self.steps
        last = len(self.measured.steps) - DRAWN
        known = [
            (abs(step.measured_ns - mean), number)
            for number, step in zip(self.compared, steps, strict=True)
            if number <= last
        ]
        return min(known)[1] if known else self.compared[0]

    def _draw_steps(self, axes: Any) -> None:
        measured, predicted = (report.periods_ns for report in (self.measured, self.predicted))
        first = self.compared[0]
        numbers = range(first, len(self.measured.steps))
        axes.plot(numbers, [measured[n - 1] / 1e6 for n in numbers], "C0.-", label="measured")
        axes.plot(numbers, [predicted[n - 1] / 1e6 for n in numbers], "C1-", label="predicted")
        most = max(measured[first - 1 :] + predicted[first - 1 :]) / 1e6
        axes.set(xlabel="step", ylabel="ms", title="time of each step", ylim=(0, 1.15 * most))
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)

    def _draw_nodes(self, axes: Any) -> None:
        nodes = self.nodes
        measured = [max(node.measured_ns, 1.0) / 1e6 for node in nodes]
        predicted = [max(node.predicted_ns, 1.0) / 1e6 for node in nodes]
        axes.loglog(measured, predicted, "C2o", markersize=3, alpha=0.6)
        ends = [min(measured + predicted), max(measured + predicted)]
        axes.loglog(ends, ends, "k-", linewidth=0.8)
        axes.set(xlabel="measured, ms", ylabel="predicted, ms", title="mean time of each node")
        axes.grid(alpha=0.3)

    def _times(self) -> Iterator[tuple[int, Unit, tuple[float, float]]]:
        """Yields the mean measured and predicted time of each node that was observed."""
        work = StepUnits(self.graph)
        reports = [self.measured.steps, self.predicted.steps]
        ready = [work.readiness(steps) for steps in reports]
        for number, unit in enumerate(work.units):
            times: list[list[int]] = [[], []]
            for step in self.compared:
                for steps, there, found in zip(reports, ready, times, strict=True):
                    if span := steps[step].get(number):
                        found.append(work.took(number, span, there[step][number]))
            if all(times) and work.lead[number] == number:
                measured, predicted = map(statistics.fmean, times)
                yield number, unit, (measured, predicted)

    def _periods(self) -> list[list[int]]:
        periods = [report.periods_ns for report in (self.measured, self.predicted)]
        return [[found[step - 1] for step in self.compared] for found in periods]


def _label(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def compare(program: str, measured: StepReport) -> Comparison:
    """Simulates a captured program on the machine that it ran on.

    Args:
        program: its text.
        measured: its measured report.

    Raises:
        ReportError: the report is of another program, or has too few steps.
    """
    graph = _native.StepGraph.of_program(program)
    _check(graph, measured)
    count = len(measured.steps)
    kept, longest_ns = _typical_steps(measured)
    machine = fit(graph, measured, kept[::2], longest_ns)
    predicted = simulate(graph, machine, count)
    report = StepReport(graph.name, "simulated", measured.graph, predicted)
    return Comparison(graph, machine, measured, report, kept[1::2])


def compare_reports(
    graph: _native.StepGraph, measured: StepReport, predicted: StepReport
) -> Comparison:
    """Compares a measured report with a simulated one of the same step graph.

    Raises:
        ReportError: a report is of another step graph, or has too few steps.
    """
    _check(graph, measured)
    _check(graph, predicted)
    count = min(len(measured.steps), len(predicted.steps))
    first, second = (
        dataclasses.replace(report, steps=report.steps[:count]) for report in (measured, predicted)
    )
    kept, _ = _typical_steps(first)
    return Comparison(graph, None, first, second, kept[1:])


def _typical_steps(measured: StepReport) -> tuple[list[int], float]:
    """Returns the steps behind the warm-up that did not pause, and the longest time that counts."""
    count = len(measured.steps)
    warm = range(max(1, round(WARM_UP * count)), count)
    longest_ns = PAUSE * statistics.median(measured.periods_ns[step - 1] for step in warm)
    return [step for step in warm if measured.periods_ns[step - 1] <= longest_ns], longest_ns


def _check(graph: _native.StepGraph, measured: StepReport) -> None:
    if measured.graph != digest(graph):
        raise ReportError(
            f"the report is of step graph {measured.graph}, and this is {digest(graph)}; capture "
            "the script again"
        )
    count = len(measured.steps)
    if count < STEPS_MIN:
        raise ReportError(f"the report has {count} steps; expected at least {STEPS_MIN}")
    for number, step in enumerate(measured.steps):
        for index in step:
            if index >= len(graph):
                raise ReportError(
                    f"step {number} has a node #{index}; the program has {len(graph)} nodes"
                )
