"""``fairway predict``: the time of a step on a topology that need not exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from fairway.cli.consoles import results, working
from fairway.interrupts import run_aside

if TYPE_CHECKING:
    from fairway.analysis.rungs import Options, Rungs

__all__ = ["show_prediction"]


def show_prediction(step: Path, options: Options, *, as_json: bool) -> None:
    """Predicts a captured step, and prints the figures.

    Raises:
        FairwayError: as :func:`fairway.analysis.rungs.climb`.
    """
    # Not above: numpy starts threads, which would take the signals that `up` and `run` wait for.
    from fairway.analysis.rungs import climb

    with working(f"predicting on {options.fabric}"):
        found = run_aside(lambda: climb(step, options))
    figures = _figures(found)
    if as_json:
        print(json.dumps(figures))
        return
    table = Table(title=f"one step on {options.fabric}, predicted", show_header=False)
    for name, value in figures.items():
        table.add_row(name, f"{1e3 * value:.3f} ms" if name.endswith("_s") else f"{value:,}")
    results().print(table)


def _figures(found: Rungs) -> dict[str, float | int]:
    busiest = max(found.report.busy_s, default=0.0)
    figures: dict[str, float | int] = {
        "predicted_s": found.seconds,
        "compute_s": busiest,
        "exposed_communication_s": max(0.0, found.seconds - busiest),
        "devices": found.graph.devices * found.graph.parts,
        "nodes": len(found.graph),
        "bytes_transferred": found.report.moved_bytes,
    }
    if found.schedule is not None:
        figures["as_flows_s"] = found.report.seconds
        figures["scheduled_tasks"] = found.schedule.tasks
    return figures
