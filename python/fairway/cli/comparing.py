"""``fairway compare``: a captured step beside its simulation on the machine that it ran on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fairway.cli.consoles import PICTURES, check_output, note, results, working
from fairway.cli.options import Json, grouped
from fairway.errors import ConfigError
from fairway.interrupts import run_aside
from fairway.report.steps import REPORT

if TYPE_CHECKING:
    from fairway.analysis.comparing import Compared, Comparison

__all__ = ["compare_step"]

SHOWN = 12
"""Nodes that are listed: those whose times differ most."""

NEAR = 0.1
"""Relative error up to which a node counts as predicted well."""


@dataclass(frozen=True)
class ComparisonFiles:
    """Files that show a comparison."""

    plot: Annotated[
        Path | None,
        typer.Option(
            help="Plot measured and predicted steps on one timeline, and the errors: .png, .svg, "
            ".pdf."
        ),
    ] = None
    timeline: Annotated[
        Path | None, typer.Option(help="Write both as a Perfetto timeline (.json).")
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the simulated report (.report)."),
    ] = None

    def check(self) -> None:
        """Checks that they can be written.

        Raises:
            ConfigError: one cannot.
        """
        check_output(self.plot, PICTURES)
        check_output(self.timeline, (".json",))
        check_output(self.out, (REPORT,))

    def write(self, found: Comparison, title: str) -> list[Path]:
        """Writes those that are asked for; returns their paths."""
        if self.plot is not None:
            found.draw(self.plot, title)
        if self.timeline is not None:
            found.write_timeline(self.timeline)
        if self.out is not None:
            self.out.write_text(str(found.predicted))
        return [path for path in (self.plot, self.timeline, self.out) if path is not None]


@grouped
def compare_step(
    what: Annotated[
        Path,
        typer.Argument(
            help="A captured program (.fw); or a step graph (.step) with --predicted.",
            show_default=False,
        ),
    ],
    report: Annotated[
        Path | None,
        typer.Option(
            help="Its measured report. [default: the file beside it that `fairway capture` wrote]",
            show_default=False,
        ),
    ] = None,
    predicted: Annotated[
        Path | None,
        typer.Option(help="A simulated report to compare with, instead of simulating the machine."),
    ] = None,
    *,
    files: ComparisonFiles,
    as_json: Json = False,
) -> None:
    """Compare a captured step as it ran with its simulation on the same machine.

    Every other measured step fits the times of computations and transfers; the simulation is
    compared with the steps in between.
    """
    # Not above: numpy starts threads, which would take the signals that `up` and `run` wait for.
    from fairway.analysis.comparing import compare, compare_reports
    from fairway.capture import read
    from fairway.placement.reading import read_graph
    from fairway.report.steps import StepReport

    files.check()
    forecast = None if predicted is None else StepReport.read(predicted)
    path = _measured_report(what, report, predicted)

    def act() -> Comparison:
        measured = StepReport.read(path)
        if forecast is None:
            return compare(read(what), measured)
        return compare_reports(read_graph(what), measured, forecast)

    with working(f"simulating {what}" if predicted is None else f"comparing {what}"):
        found = run_aside(act)
    for written in files.write(found, what.name):
        note(f"wrote {written}")
    if as_json:
        print(json.dumps(_figures(found)))
        return
    console = results()
    for table in _tables(found):
        console.print(table)
    console.print(_distribution(found), soft_wrap=True)


def _tables(found: Comparison) -> list[Table]:
    step = Table("", "measured", "predicted", "error", title="one step, mean")
    _add(step, [found.step])
    channels = Table("channel", "measured", "predicted", "error", title="channels, in a step")
    _add(channels, found.channels)
    nodes = Table("node", "measured", "predicted", "error", title="nodes that differ most")
    differing = sorted(found.nodes, key=lambda node: -abs(node.predicted_ns - node.measured_ns))
    _add(nodes, differing[:SHOWN])
    return [table for table in (step, channels, nodes) if table.row_count]


def _add(table: Table, rows: Sequence[Compared]) -> None:
    for row in rows:
        table.add_row(
            row.name,
            f"{row.measured_ns / 1e6:.3f} ms",
            f"{row.predicted_ns / 1e6:.3f} ms",
            f"{row.error:+.1%}",
        )


def _distribution(found: Comparison) -> str:
    """Returns lines that tell how far single steps and nodes are from what was predicted."""
    steps, nodes = found.steps, found.nodes
    errors = sorted(abs(step.error) for step in steps)
    lines = [
        f"{len(steps)} steps: half are within {statistics.median(errors):.1%} of the prediction, "
        f"nine in ten within {errors[(9 * len(errors) - 1) // 10]:.1%}, all within {errors[-1]:.1%}"
    ]
    whole = sum(node.measured_ns for node in nodes)
    if whole:
        apart = sum(abs(node.predicted_ns - node.measured_ns) for node in nodes)
        near = sum(node.measured_ns for node in nodes if abs(node.error) <= NEAR) / whole
        lines.append(
            f"{len(nodes)} nodes: weighted by their time, they are {apart / whole:.1%} apart; "
            f"{near:.0%} of the time is in nodes within {NEAR:.0%}"
        )
    return "\n".join(lines)


def _measured_report(what: Path, report: Path | None, predicted: Path | None) -> Path:
    """Returns the file of the measured report.

    Raises:
        ConfigError: the program or its report is not there, or cannot be compared.
    """
    from fairway.report.measured import STEPS_MIN

    if what.suffix != ".fw" and (what.suffix != ".step" or predicted is None):
        raise ConfigError(
            f"{what} is no captured program; expected a file that ends in .fw, or a step graph "
            "(.step) with a report that was --predicted"
        )
    if not what.exists():
        raise ConfigError(f"there is no file {what}")
    path = report or what.with_suffix(REPORT)
    if report is None and not path.exists():
        raise ConfigError(
            f"{what} has no measured report, {path}; capture a script that repeats its last step "
            f"at least {STEPS_MIN} times"
        )
    return path


def _figures(found: Comparison) -> dict[str, object]:
    def figures(row: Compared) -> dict[str, object]:
        return {
            "name": row.name,
            "measured_s": row.measured_ns / 1e9,
            "predicted_s": row.predicted_ns / 1e9,
        }

    launch_ns = {} if found.machine is None else found.machine.launch_ns
    return {
        "step": figures(found.step),
        "steps": [figures(row) for row in found.steps],
        "nodes": [figures(row) for row in found.nodes],
        "channels": [figures(row) for row in found.channels],
        "launch_s": {str(gang): time / 1e9 for gang, time in launch_ns.items()},
    }
