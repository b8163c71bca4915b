"""``fairway simulate``: a workload on a modelled fabric."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli.consoles import PICTURES, check_output, note, results, working
from fairway.cli.options import Json, Seed, grouped
from fairway.errors import ConfigError
from fairway.interrupts import run_aside
from fairway.placement import STEPS
from fairway.studies.workloads import WORKLOADS

if TYPE_CHECKING:
    from fairway.simulation import Simulated

__all__ = ["simulate_workload"]


@dataclass(frozen=True)
class SimulationOptions:
    """Conditions of a simulation, and its threads."""

    errors: Annotated[float, typer.Option(help="Bit-error probability per vector and link.")] = 0.0
    seed: Seed = 0
    threads: Annotated[
        int, typer.Option(help="Worker threads; 0: one per core.", min=0, max=256)
    ] = 0


@dataclass(frozen=True)
class SimulationFiles:
    """Files that show a simulation."""

    timeline: Annotated[
        Path | None, typer.Option(help="Write a Perfetto timeline of links or devices (.json).")
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot utilisation of links or devices: .png, .svg, .pdf."),
    ] = None

    def check(self) -> None:
        """Checks that they can be written.

        Raises:
            ConfigError: one cannot.
        """
        check_output(self.timeline, (".json",))
        check_output(self.plot, PICTURES)

    def write(self, found: Simulated) -> list[Path]:
        """Writes those that are asked for; returns their paths."""
        if self.timeline is not None:
            found.write_timeline(self.timeline)
        if self.plot is not None:
            found.draw(self.plot)
        return [path for path in (self.timeline, self.plot) if path is not None]


@grouped
def simulate_workload(
    fabric: Annotated[
        str,
        typer.Option(
            help="A name such as dragonfly:264 or torus:8x8, or a file; or elect-cluster:1024, "
            "sip-ring:1024 and the like for steps of training, as `fairway place` takes them."
        ),
    ],
    workload: Annotated[
        str,
        typer.Option(
            help=f"One of: {'; '.join(WORKLOADS.values())}; or a step of training: "
            f"{'; '.join(STEPS)}.",
            show_default=False,
        ),
    ],
    options: SimulationOptions,
    files: SimulationFiles,
    as_json: Json = False,
) -> None:
    """Simulate a workload on a modelled (hypothetical) fabric: plan, verify, run with data."""
    # Imported here: numpy starts threads, which would take the signals that `up` and `run` wait
    # for.
    from fairway.simulation import UNPLANNED, simulate

    if workload.partition(":")[0] in UNPLANNED and (files.timeline or files.plot):
        raise ConfigError(f"{workload} has no schedule to show")
    files.check()
    with working(f"{workload} on {fabric}") as work:

        def show(part: float) -> None:
            text = f"checking the results of {workload} on {fabric}" if part >= 1 else None
            work.update(part, 1.0, text)

        found = run_aside(lambda: simulate(fabric, workload, **asdict(options), progress=show))
    written = files.write(found)
    if as_json:
        print(json.dumps({"fabric": fabric, "workload": workload, **found.figures}))
        return
    results().print(found.table())
    for path in written:
        note(f"wrote {path}")
