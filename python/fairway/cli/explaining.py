"""``fairway explain``: a captured step, rung by rung."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fairway.cli.consoles import check_folder, note, results, working
from fairway.cli.options import Json, Seed, grouped
from fairway.errors import ConfigError
from fairway.interrupts import run_aside

__all__ = ["explain_step"]


@dataclass(frozen=True)
class DeviceChannels:
    """The channels that a step's transfers are planned for."""

    rates: Annotated[
        str | None,
        typer.Option(
            "--channels",
            help="Rates of the channels of each device, separated by commas, to plan for instead "
            "of the topology.",
            show_default=False,
        ),
    ] = None
    latency: Annotated[str, typer.Option(help="Latency per round of these channels.")] = "5us"


@grouped
def explain_step(
    what: Annotated[
        Path,
        typer.Argument(
            help="A captured program (.fw), a step graph (.step), a FlexFlow task graph (.fbuf), "
            "or a folder of Chakra traces.",
            show_default=False,
        ),
    ],
    fabric: Annotated[
        str | None,
        typer.Option(
            help="Topology to place, schedule and simulate on, such as torus:4x4, "
            "elect-cluster:64 or sip-ring:64. [default: a non-blocking switch]",
            show_default=False,
        ),
    ] = None,
    *,
    channels: DeviceChannels,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write each rung to, as a file of its own."),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Print every rung of a step: program, step graph, placement, plan, schedule, report."""
    # Not above: numpy starts threads, which would take the signals that `up` and `run` wait for.
    from fairway.analysis.rungs import Options, climb
    from fairway.analysis.topologies import read_topology
    from fairway.communication import files
    from fairway.placement.reading import GRAPHS, is_graph

    if not is_graph(what):
        raise ConfigError(
            f"{what} cannot be explained; expected a file that ends in {', '.join(GRAPHS)}, or a "
            "folder of Chakra traces"
        )
    check_folder(out)
    costs = None if channels.rates is None else files.channels(channels.rates, channels.latency)
    options = Options(None if fabric is None else read_topology(fabric), costs, seed=seed)
    with working(f"explaining {what}"):
        found = run_aside(lambda: climb(what, options))
    if found.planned.unscheduled:
        note(f"not scheduled: {found.planned.unscheduled}")
    if out is not None:
        for path in found.write(out):
            note(f"wrote {path}")
    if as_json:
        print(json.dumps({rung.name: rung.text for rung in found.rungs}))
        return
    console = results()
    for rung in found.rungs:
        console.print(f"[{rung.name}]", style="bold", soft_wrap=True)
        console.print(rung.text, soft_wrap=True)
