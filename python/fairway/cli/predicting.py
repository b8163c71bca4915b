"""``fairway predict``: the time of a step on a topology that need not exist."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fairway.capture import gaps, write, write_report
from fairway.cli.consoles import fail, note, results, working
from fairway.cli.islands import IslandOptions, started
from fairway.cli.options import Json
from fairway.cli.scripts import check_script
from fairway.errors import CaptureError
from fairway.interrupts import Interrupts, run_aside
from fairway.report.steps import REPORT
from fairway.script import run_script
from fairway.settings import DEFAULT_ISLANDS, Settings

if TYPE_CHECKING:
    from fairway.analysis.rungs import Options, Rungs

__all__ = ["predict_step", "record_step"]


def record_step(
    settings: Settings,
    script: Path,
    arguments: list[str],
    path: Path,
    interrupts: Interrupts,
    otherwise: str,
) -> str:
    """Runs a script and writes its last step, and beside it its times; returns the program's text.

    If the script fails, says what is ``otherwise`` so, and exits with its status.
    """
    with started(settings.replace(capture=True), interrupts) as run:
        interrupts.check()
        code = run_script([str(script), *arguments], run.environment, interrupts)
        captured = write(run, path) if code == 0 else None
    if captured is None:
        fail(f"the script ended with status {code}, so {otherwise}")
        raise SystemExit(code)
    for sentence in gaps(captured.text):
        note(sentence)
    try:
        write_report(run, captured, path.with_suffix(REPORT))
    except CaptureError as error:
        note(f"{path} has no measured report: {error}")
    return captured.text


def predict_step(
    context: typer.Context,
    what: Annotated[
        Path,
        typer.Argument(
            help="Python script; what follows are its arguments. Or a step that is known: .fw, "
            ".step, .fbuf, or a folder of Chakra traces."
        ),
    ],
    fabric: Annotated[
        str,
        typer.Option(help="Topology to predict on, such as dragonfly:264 or sip-ring:64."),
    ],
    scale: Annotated[
        float,
        typer.Option(
            help="Factor of measured compute times: 0.01 for devices that are 100 times as fast.",
            min=1e-6,
            max=1e6,
        ),
    ] = 1.0,
    islands: Annotated[
        str | None,
        typer.Option(
            help="Islands x hosts per island x devices per host to run the script on. "
            f"[default: {DEFAULT_ISLANDS}]",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a JAX script on local islands, and predict its last step on any topology.

    Options that the script shares with this command are the script's behind `--`.
    """
    # Not above: numpy starts threads, which would take the signals that `up` and `run` wait for.
    from fairway.analysis.rungs import Options
    from fairway.analysis.topologies import read_topology
    from fairway.placement.reading import is_graph

    options = Options(read_topology(fabric), scale=scale)
    if is_graph(what):
        _show(what, options, as_json=as_json)
        return
    interrupts = Interrupts()
    check_script(what, context)
    settings = IslandOptions(islands).settings().serving(what)
    with tempfile.TemporaryDirectory(prefix="fairway-predict-") as folder:
        step = Path(folder) / "step.fw"
        record_step(settings, what, context.args, step, interrupts, "nothing is predicted")
        _show(step, options, as_json=as_json)


def _show(step: Path, options: Options, *, as_json: bool) -> None:
    """Predicts a captured step, and prints the figures.

    Raises:
        FairwayError: as :func:`fairway.analysis.rungs.climb`.
    """
    from fairway.analysis.rungs import climb

    with working(f"predicting on {options.topology}"):
        found = run_aside(lambda: climb(step, options))
    figures = _figures(found)
    if as_json:
        print(json.dumps(figures))
        return
    table = Table(title=f"one step on {options.topology}, predicted", show_header=False)
    for name, value in figures.items():
        shown = f"{1e3 * value:.3f} ms" if name.endswith("_s") else f"{value:,}"
        table.add_row(name.removesuffix("_s").replace("_", " "), shown)
    results().print(table)


def _figures(found: Rungs) -> dict[str, float | int]:
    simulated = found.report.figures
    compute_s = simulated["compute_ns"] / 1e9
    figures: dict[str, float | int] = {
        "predicted_s": found.seconds,
        "compute_s": compute_s,
        "exposed_communication_s": max(0.0, found.seconds - compute_s),
        "devices": found.graph.devices * found.graph.parts,
        "nodes": len(found.graph),
        "bytes_transferred": simulated["transferred_bytes"],
    }
    if (schedule := found.planned.schedule) is not None:
        figures["as_flows_s"] = simulated["makespan_ns"] / 1e9
        figures["scheduled_tasks"] = schedule.tasks
    return figures
