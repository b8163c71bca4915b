"""``fairway jobs``: several jobs that share one fabric, and their queueing times."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fairway.cli.consoles import PICTURES, check_output, note, results, working
from fairway.cli.options import Json, Seed, grouped
from fairway.interrupts import run_aside
from fairway.quantities import parse_duration

if TYPE_CHECKING:
    from fairway.placement.jobs import Sharing

__all__ = ["share_fabric"]


@dataclasses.dataclass(frozen=True)
class RandomJobs:
    """Jobs that are drawn at random, where no file lists them."""

    count: Annotated[int, typer.Option(help="Number of random jobs.", min=1, max=100_000)] = 1000
    load: Annotated[
        float,
        typer.Option(
            help="Offered load of random jobs, as a fraction of all devices.", min=0.01, max=10.0
        ),
    ] = 0.9
    seed: Seed = 0


@grouped
def share_fabric(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Jobs, a line each: arrival in seconds, devices, model, batch, steps. Default: "
            "random jobs.",
            show_default=False,
        ),
    ] = None,
    fabric: Annotated[
        str,
        typer.Option(help="As for `fairway place`; on sip-ring a job needs neighbouring devices."),
    ] = "sip-ring:256",
    *,
    drawn: RandomJobs,
    delay: Annotated[
        str, typer.Option(help="Time in which a switch gives devices other places on a ring.")
    ] = "30ms",
    plot: Annotated[
        Path | None, typer.Option(help="Plot which job had which devices: .png, .svg, .pdf.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate a queue of jobs that share a fabric: waiting times, utilisation, makespan."""
    from fairway.analysis.topologies import read_topology
    from fairway.placement.jobs import draw, random_jobs, read_jobs, share, step_times

    check_output(plot, PICTURES)
    devices = read_topology(fabric).interconnect.devices
    delay_ns = parse_duration("the delay", delay)
    read = None if file is None else read_jobs(file)

    def simulate() -> list[Sharing]:
        step_s = step_times(fabric, lambda kind: work.update(text=kind))
        jobs = (
            random_jobs(drawn.count, devices, drawn.load, drawn.seed, step_s)
            if read is None
            else read
        )
        work.update(text=f"sharing {fabric} among {len(jobs):,} jobs")
        return list(share(fabric, jobs, step_s, delay_ns))

    with working(f"jobs on {fabric}") as work:
        found = run_aside(simulate)
    title = f"{len(found[0].times_s):,} jobs on {fabric}, simulated"
    if plot is not None:
        draw(plot, f"{title}{'' if read else f', offered load {drawn.load:g}'}", devices, found)
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found]))
        return
    results().print(_table(title, found))
    if plot is not None:
        note(f"wrote {plot}")


def _table(title: str, found: list[Sharing]) -> Table:
    columns = ("devices", "makespan", "used", "waits", "longest", "apart", "moves")
    table = Table(*columns, title=title)
    for one in found:
        table.add_row(
            one.policy,
            f"{one.end_s:,.1f} s",
            f"{100 * one.used:.1f} %",
            f"{statistics.fmean(one.waits_s):,.2f} s",
            f"{max(one.waits_s):,.1f} s",
            f"{one.apart_s:,.1f} s",
            f"{one.moves:,}",
        )
    table.caption = "apart: the first in line waited although as many devices were free"
    return table
