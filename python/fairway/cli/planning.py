"""``fairway calibrate`` and ``plan``: measure channels; plan and explain steps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fairway.cli.consoles import (
    PICTURES,
    check_folder,
    check_output,
    note,
    renamed,
    results,
    working,
)
from fairway.cli.options import Json, Seed, grouped
from fairway.errors import ConfigError
from fairway.interrupts import run_aside
from fairway.settings import DEFAULT_ISLANDS

if TYPE_CHECKING:
    from fairway.analysis.planned import PlannedGraph

__all__ = ["calibrate", "plan_step"]

RANKS = 4
"""Number of ranks of a step that is for any number, unless it is given."""


@dataclasses.dataclass(frozen=True)
class RankChannels:
    """The channels of each rank: rates and latency, measured costs, or those of a topology."""

    rates: Annotated[
        str,
        typer.Option("--channels", help="Rates of the channels of each rank, separated by commas."),
    ] = "200Mbit/s,100Mbit/s"
    latency: Annotated[str, typer.Option(help="Latency per round, such as 50us.")] = "50us"
    costs: Annotated[
        Path | None,
        typer.Option(help="Measured channel costs (from `calibrate`), instead of the two above."),
    ] = None
    fabric: Annotated[
        str | None,
        typer.Option(
            help="Topology to plan a step of devices for, such as torus:4x4, instead of channels; "
            "device i is at endpoint i."
        ),
    ] = None

    def read(self) -> list[Any]:
        """Returns the cost of each channel.

        Raises:
            ConfigError: an option or the file cannot be read.
        """
        from fairway.communication import files

        if self.costs is None:
            return files.channels(self.rates, self.latency)
        return files.read_costs(self.costs)


@dataclasses.dataclass(frozen=True)
class PlanOutput:
    """The plan that is explained and written, and where to."""

    system: Annotated[str, typer.Option(help="System whose plan is explained and written.")] = (
        "joint+striping"
    )
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show timelines before and after, the critical path, and stalls."
        ),
    ] = False
    plot: Annotated[Path | None, typer.Option(help="Plot the timelines: .png, .svg, .pdf.")] = None
    picture: Annotated[Path | None, typer.Option(hidden=True)] = None
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the plan, for ranks to execute.")
    ] = None
    msccl: Annotated[
        Path | None, typer.Option(help="Folder for each collective of the plan as MSCCL's XML.")
    ] = None

    def checked(self) -> PlanOutput:
        """Returns these options with ``plot`` for its old name; checks that files can be written.

        Raises:
            ConfigError: a file cannot be written.
        """
        plot = renamed(self.plot, self.picture, "--plot", "--picture")
        check_output(plot, PICTURES)
        check_output(self.out, ())
        check_folder(self.msccl)
        return dataclasses.replace(self, plot=plot, picture=None)


@dataclasses.dataclass(frozen=True)
class PlanBudget:
    """Budget of the search for a plan."""

    evaluations: Annotated[
        int, typer.Option(help="Evaluation budget per search chain.", min=1, max=10**9)
    ] = 20_000
    seed: Seed = 0


@grouped
def plan_step(
    what: Annotated[
        str,
        typer.Argument(
            help="A step (.json, see docs/reference/steps.md), a rank's Chakra trace (.et) or "
            "dlrm:NAME, a built-in workload; or a step of devices: a captured program (.fw), a "
            "step graph (.step), a FlexFlow task graph (.fbuf), or a folder of Chakra traces.",
            show_default=False,
        ),
    ],
    channels: RankChannels,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks, for dlrm:NAME and traces (.et); other steps say theirs. "
            f"Default: {RANKS}.",
            min=1,
            max=1024,
            show_default=False,
        ),
    ] = None,
    *,
    output: PlanOutput,
    budget: PlanBudget,
    as_json: Json = False,
) -> None:
    """Plan the communication of a training step, and explain what the plan gains."""
    # Imported here: numpy starts threads, which would take the signals that `up` and `run` wait
    # for.
    from fairway.placement.reading import is_graph

    if channels.fabric is not None and channels != RankChannels(fabric=channels.fabric):
        raise ConfigError("--fabric was given beside channels or costs; expected one of them")
    path = Path(what)
    if ranks is not None and path.exists() and path.suffix != ".et":
        raise ConfigError(
            f"--ranks {ranks} is for dlrm:NAME and traces (.et); {what} says for how many it is"
        )
    costs = channels.read()
    output = output.checked()
    if not is_graph(path):
        if channels.fabric is not None:
            if not what.startswith("dlrm:") and not path.exists():
                raise ConfigError(f"there is no file {what}")
            raise ConfigError(
                f"{what} is a step of ranks that do the same, which is planned for --channels or "
                "--costs; --fabric is for steps of devices (.fw, .step, .fbuf)"
            )
        _plan_step(what, ranks or RANKS, costs, budget, output, as_json)
    elif output.explain or output.plot or output.out or output.msccl:
        raise ConfigError(
            "steps of devices are planned as a whole; `fairway explain` prints the plan of one"
        )
    elif channels.fabric is not None:
        _plan_placed(what, channels.fabric, budget.seed, as_json)
    else:
        _plan_graph(what, costs, budget.seed, as_json)


def _working(text: str, act: Callable[[], Any]) -> Any:
    """Runs a long operation in another thread, and shows progress."""
    with working(text):
        return run_aside(act)


def _plan_graph(path: str, costs: list[Any], seed: int, as_json: bool) -> None:
    from fairway.communication import graphs
    from fairway.placement.reading import read_graph
    from fairway.report.plans import graph_table

    graph = read_graph(Path(path))
    text = f"planning {len(graph):,} tasks on {graph.devices} devices"
    found = _working(text, lambda: graphs.plan(graph, costs, seed=seed))
    if as_json:
        print(json.dumps(found.as_json()))
        return
    console = results()
    console.print(graph_table(found))
    console.print(
        f"{len(graph):,} tasks on {graph.devices} devices; {found.evaluations} plans "
        f"evaluated ({found.reason})"
    )


def _plan_placed(path: str, fabric: str, seed: int, as_json: bool) -> None:
    from fairway.analysis.planned import plan_graph
    from fairway.analysis.topologies import read_topology
    from fairway.placement.reading import read_graph

    topology, graph = read_topology(fabric), read_graph(Path(path))
    text = f"planning {len(graph):,} tasks on {topology}"
    found = _working(text, lambda: plan_graph(graph, topology, seed=seed))
    if as_json:
        print(json.dumps(found.as_json()))
        return
    console = results()
    console.print(_placed_table(found))
    if found.is_unplanned:
        console.print("the step is left as it is: no plan that was found is faster")
    if found.unscheduled:
        note(f"not scheduled: {found.unscheduled}")
    console.print(str(found.plan), soft_wrap=True)


def _placed_table(found: PlannedGraph) -> Table:
    table = Table(title=f"one step on {found.plan.network}, simulated")
    for name in ("communication", "unplanned", "planned", "ratio"):
        table.add_column(name, justify="left" if name == "communication" else "right")
    rows = [("as flows", found.unplanned.seconds, found.simulated.seconds)]
    if found.schedule is not None and found.unplanned_schedule is not None:
        rows.append(
            ("every vector scheduled", found.unplanned_schedule.seconds, found.schedule.seconds)
        )
    for name, unplanned_s, planned_s in rows:
        ratio = planned_s / unplanned_s if unplanned_s else 1.0
        table.add_row(
            name, f"{1e6 * unplanned_s:,.3f} us", f"{1e6 * planned_s:,.3f} us", f"{ratio:.3f}"
        )
    return table


def _plan_step(
    what: str,
    ranks: int,
    costs: list[Any],
    budget: PlanBudget,
    output: PlanOutput,
    as_json: bool,
) -> None:
    from fairway.communication import steps
    from fairway.communication.explanation import explain as explain_step
    from fairway.report import plans as report

    system = output.system
    _check_system(system, steps.SYSTEMS)
    step = _read(what, ranks)
    if system.startswith("hand") and not step.hand:
        _check_system(system, [name for name in steps.SYSTEMS if not name.startswith("hand")])
    planned = _working(
        f"planning {len(step.operations)} collectives",
        lambda: steps.plan(step, costs, evaluations=budget.evaluations, seed=budget.seed),
    )
    _check_system(system, planned)
    _write_plan(planned[system].script, output)
    found = {name: explain_step(step, plan) for name, plan in planned.items()}
    both = {name: found[name] for name in ("fifo", system)}
    if output.plot is not None:
        report.draw(output.plot, both)
    if as_json:
        print(json.dumps(_as_json(planned, found)))
        return
    console = results()
    console.print(report.systems_table(planned, {n: one.idle for n, one in found.items()}))
    if output.explain:
        for name, one in both.items():
            console.print(report.explained(name, one, planned[name].choices, console.width))
    for path in (output.plot, output.out, output.msccl):
        if path is not None:
            note(f"wrote {path}")


def _write_plan(script: Any, output: PlanOutput) -> None:
    algorithms = {} if output.msccl is None else _of_msccl(output.msccl, script)
    for file, text in algorithms.items():
        file.write_text(text)
    if output.out is not None:
        output.out.write_text(script.text)


def _check_system(system: str, known: Collection[str]) -> None:
    if system not in known:
        raise ConfigError(f"there is no system {system!r}; there are {', '.join(known)}")


def _of_msccl(folder: Path, script: Any) -> dict[Path, str]:
    """Maps each file to its collective as XML; all before any is written, as MSCCL lacks some."""
    from fairway.formats.msccl import algorithm

    return {
        folder / f"{name.replace('/', '_')}.xml": algorithm(script, number)
        for number, (name, _, _) in enumerate(script.operations)
    }


def _read(what: str, ranks: int) -> Any:
    from fairway.communication import files
    from fairway.formats import chakra
    from fairway.studies.workloads.dlrm import WORKLOADS

    if Path(what).suffix == ".et":
        return chakra.read(what, ranks)
    family, colon, name = what.partition(":")
    if family != "dlrm" or not colon:
        return files.read_step(what)[0]
    if name not in WORKLOADS:
        raise ConfigError(f"there is no dlrm:{name}; there are {', '.join(WORKLOADS)}")
    try:
        return WORKLOADS[name].step(ranks)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _as_json(planned: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    return {
        "least_ns": next(iter(planned.values())).least_ns,
        "systems": {
            name: {
                "period_ns": plan.period_ns,
                "idle": found[name].idle,
                "choices": dict(plan.choices),
                "waits": found[name].sentences(),
            }
            for name, plan in planned.items()
        },
    }


def calibrate(
    islands: Annotated[
        str | None,
        typer.Option(
            help="Islands x hosts x devices; every pair of hosts is measured. "
            f"[default: {DEFAULT_ISLANDS}]",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with settings: hosts, their prefixes, addresses and channels."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File for `fairway plan --costs`.")
    ] = Path("costs.json"),
    as_json: Json = False,
) -> None:
    """Measure channel latency and bandwidth, and how well they predict collectives."""
    from fairway.communication import calibration, files
    from fairway.communication.ranks import Ranks
    from fairway.report.plans import calibration_table
    from fairway.settings import Settings

    if config is not None and islands is not None:
        raise ConfigError("both --islands and --config were given; expected one of them")
    check_output(out, ())
    settings = Settings.read(config) if config else Settings.parse(islands or DEFAULT_ISLANDS)

    def measure() -> Any:
        with Ranks(settings) as ranks:
            return calibration.fit(ranks.measure(), len(ranks))

    found = _working("measuring channels", measure)
    files.write_costs(out, found.costs)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    results().print(calibration_table(found))
    note(f"wrote {out}")
