"""The command line: ``fairway up``, ``run``, ``capture``, ``plan``, ``simulate`` and more."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fairway import __version__
from fairway.capture import summary, write
from fairway.cli.consoles import PICTURES, check_output, progress, terminal
from fairway.cli.jobs import share_fabric
from fairway.cli.placing import place_model
from fairway.cli.planning import calibrate, plan_step
from fairway.daemon import START_TIMEOUT_S, Run, client_environment
from fairway.errors import ConfigError, FairwayError, IslandError, NotRunningError
from fairway.fabrics import describe
from fairway.interrupts import Interrupts, run_aside
from fairway.placement import STEPS
from fairway.plugin import BARE
from fairway.registry import ask, choose_cluster, free_name, live_runs
from fairway.reproduce import pathways
from fairway.routes import Transfer, route
from fairway.script import run_script
from fairway.settings import DEFAULT_ISLANDS, Settings
from fairway.workloads import WORKLOADS

__all__ = ["app", "main"]

app = typer.Typer(
    help="Run JAX from one Python process over many islands of accelerators.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
islands_app = typer.Typer(
    no_args_is_help=True, help="Add islands to what is up, or take some away."
)
app.add_typer(islands_app, name="islands")
app.command("place")(place_model)
app.command("jobs")(share_fabric)
app.command("plan")(plan_step)
app.command("calibrate")(calibrate)

Islands = Annotated[
    str | None,
    typer.Option(
        help="Islands x hosts per island x devices per host, such as 2x2x2. "
        f"[default: {DEFAULT_ISLANDS}]",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None, typer.Option(help="TOML file with settings; see docs/reference/settings.md.")
]
Timeline = Annotated[
    Path | None,
    typer.Option(help="Write what ran and moved as Chrome/Perfetto JSON, and print a summary."),
]
Plan = Annotated[
    str | None,
    typer.Option(
        help="auto: collectives of a program over several islands get ways and one order that are "
        "planned together, by what its runs take. [default: off]",
        show_default=False,
    ),
]

Cluster = Annotated[
    str | None,
    typer.Option(
        help="Name of a cluster that `fairway up` started. [default: the only one that is up]",
        show_default=False,
    ),
]


@app.command()
def up(
    islands: Islands = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Where clients connect: 127.0.0.1:PORT. [default: free port]"),
    ] = None,
    config: Config = None,
    timeline: Timeline = None,
    plan: Plan = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the cluster, for --cluster. [default: main]", show_default=False
        ),
    ] = None,
) -> None:
    """Start islands and stay until Ctrl-C."""
    interrupts = Interrupts()
    settings = _settings(islands, config, listen, timeline, plan)
    name = free_name(live_runs(), name)
    with _started(settings, interrupts, name) as run:
        terminal.print(
            f"[bold green]Up.[/] Cluster {escape(name)}: {_describe(settings)}. Clients need:"
        )
        for name, value in run.environment.items():
            print(f"export {name}={value}", flush=True)
        terminal.print(f"A Python with jax but without Fairway needs PYTHONPATH={BARE} as well.")
        terminal.print("Ctrl-C ends it; `fairway status` shows it.")
        while interrupts.next() is None:
            continue  # a host ended, which others see to
        terminal.print("Taking the islands down.")


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,  # what follows the script is the script's
    }
)
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Python script; what follows are its arguments.")],
    islands: Islands = None,
    config: Config = None,
    timeline: Timeline = None,
    plan: Plan = None,
    weight: Annotated[
        int, typer.Option(min=1, help="Part of the device time beside others of its priority.")
    ] = 1,
    priority: Annotated[
        int, typer.Option(min=-100, max=100, help="Who goes first where clients share islands.")
    ] = 0,
    cluster: Cluster = None,
    new: Annotated[
        bool, typer.Option("--new", help="Bring up islands of its own, whatever is up.")
    ] = False,
) -> None:
    """Run a JAX script over islands of its own, or over those of a cluster that is up."""
    interrupts = Interrupts()
    share = {"FAIRWAY_WEIGHT": str(weight), "FAIRWAY_PRIORITY": str(priority)}
    if not script.is_file():
        raise FairwayError(f"there is no script {script}")
    shaping = {"--islands": islands, "--config": config, "--timeline": timeline, "--plan": plan}
    given = [option for option, value in shaping.items() if value is not None]
    if cluster is not None and (new or given):
        raise ConfigError(
            f"--cluster joins what is up, and {given[0] if given else '--new'} starts islands; "
            "use one of the two"
        )
    target = os.environ.get("JAX_BACKEND_TARGET")
    joined = None if new or given else choose_cluster(live_runs(), cluster, target)
    if joined is not None:
        terminal.print(
            f"Joining cluster {escape(str(joined['cluster'] or joined['target']))}; --new starts "
            "islands of its own."
        )
        environment = client_environment(joined["target"]) | share
        interrupts.check()
        raise SystemExit(run_script(script, context.args, environment, interrupts))
    settings = _settings(islands, config, None, timeline, plan).serving(script)
    with _started(settings, interrupts) as started:
        interrupts.check()
        code = run_script(script, context.args, started.environment | share, interrupts)
        for line in _plans(started.overview()):
            terminal.print(line)
    raise SystemExit(code)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def capture(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Python script; what follows are its arguments.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the program.")] = Path(
        "step.fw"
    ),
    islands: Islands = None,
    config: Config = None,
) -> None:
    """Run a JAX script and write what it does in one step, as a program with measured times."""
    interrupts = Interrupts()
    if not script.is_file():
        raise FairwayError(f"there is no script {script}")
    settings = _settings(islands, config, None, None).serving(script).replace(capture=True)
    with _started(settings, interrupts) as started:
        interrupts.check()
        code = run_script(script, context.args, started.environment, interrupts)
        text = write(started, output)
    console = Console()
    for table in summary(text):
        console.print(table)
    terminal.print(f"The step is in {output}.")
    raise SystemExit(code)


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show islands, hosts, devices, clients, memory and queues of what is up."""
    runs = live_runs()
    if as_json:
        print(json.dumps(runs, indent=2))
        return
    if not runs:
        raise NotRunningError("no islands are up; `fairway up` starts some")
    console = Console()
    for seen in runs:
        console.print(f"[bold]{seen['target']}[/]  controller process {seen['process']}")
        console.print(_hosts_table(seen))
        console.print(_clients_table(seen))
        for line in _plans(seen):
            console.print(line)


@islands_app.command("add")
def add_island(
    shape: Annotated[str, typer.Argument(help="Hosts x devices per host, such as 1x4.")],
    cluster: Cluster = None,
) -> None:
    """Bring another island up; one of this shape that was lost or removed comes back."""
    [island] = Settings.parse(f"1x{shape}").islands
    with terminal.status("starting hosts"):
        answer = _ask_about_islands(cluster, {"add": [island.hosts, island.devices]})
    terminal.print(f"[bold green]Island {answer['island']} is up.[/]")


@islands_app.command("remove")
def remove_island(
    number: Annotated[int, typer.Argument(help="Its number in `fairway status`.")],
    force: Annotated[
        bool, typer.Option("--force", help="Even if clients use it; they see that it is lost.")
    ] = False,
    cluster: Cluster = None,
) -> None:
    """Take an island down while others go on."""
    _ask_about_islands(cluster, {"remove": number, "force": force})
    terminal.print(f"Island {number} is gone.")


def _ask_about_islands(cluster: str | None, question: dict[str, Any]) -> dict[str, Any]:
    runs = live_runs()
    found = choose_cluster(runs, cluster, os.environ.get("JAX_BACKEND_TARGET"))
    if found is None:
        hint = "; islands of a `fairway run` are its own" if runs else ""
        raise NotRunningError(f"no cluster is up; `fairway up` starts one{hint}")
    door = Path(found["directory"]) / "islands.sock"
    answer = ask(door, question, timeout_s=START_TIMEOUT_S + 10)
    if "error" in answer:
        raise IslandError(answer["error"])
    return answer


@app.command("route")
def show_route(
    fabric: Annotated[
        str,
        typer.Argument(help="Such as dragonfly:264, torus:8x8, fattree:8, cluster:4x8, or a file."),
    ],
    transfers: Annotated[
        list[str],
        typer.Argument(help="SOURCE:TARGET:SIZE, such as 0:5:64MiB; after others: 5:0:1MiB:0,1."),
    ],
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the links and cycles of all vectors.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Schedule transfers on every link of a fabric, before anything runs."""
    asked = [Transfer.parse(text) for text in transfers]
    found = run_aside(lambda: route(fabric, asked))
    if as_json:
        print(json.dumps(found.schedule))
        return
    console = Console()
    console.print(found.summary())
    if explain:
        console.print(found.explanation())
    console.print(found.limits())


@app.command("fabric")
def show_fabric(
    fabric: Annotated[
        str,
        typer.Argument(help="Such as dragonfly:264, torus:8x8, fattree:8, cluster:4x8, or a file."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a fabric has: chips, links, hops, bandwidth."""
    found = run_aside(lambda: describe(fabric))
    if as_json:
        print(json.dumps(found))
        return
    table = Table(title=fabric, show_header=False)
    for name, value in found.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:,.2f}")
    Console().print(table)


@app.command("simulate")
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
    errors: Annotated[
        float, typer.Option(help="How probable it is that a vector has a wrong bit on a link.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of numbers, errors and random traffic.", min=0, max=2**63 - 1)
    ] = 0,
    threads: Annotated[
        int, typer.Option(help="0: as many as there are cores.", min=0, max=256)
    ] = 0,
    timeline: Annotated[
        Path | None, typer.Option(help="Write what links carry, or devices do, when; for Perfetto.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw how busy links or devices are.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a workload on a fabric that need not exist: planned, verified, carried out with data."""
    # Not above: numpy starts threads, which would take the signals that `up` and `run` wait for.
    from fairway.simulation import UNPLANNED, simulate

    if workload.partition(":")[0] in UNPLANNED and (timeline or plot):
        raise ConfigError(f"{workload} has no schedule to show")
    check_output(timeline, (".json",))
    check_output(plot, PICTURES)
    with progress(BarColumn(), TextColumn("{task.percentage:>3.0f} %")) as bar:
        task = bar.add_task(f"{workload} on {fabric}", total=1.0)
        found = run_aside(
            lambda: simulate(
                fabric,
                workload,
                errors=errors,
                seed=seed,
                threads=threads,
                progress=lambda part: bar.update(task, completed=part),
            )
        )
    if timeline is not None:
        found.write_timeline(timeline)
    if plot is not None:
        found.draw(plot)
    if as_json:
        print(json.dumps({"fabric": fabric, "workload": workload, **found.figures}))
        return
    Console().print(found.table())
    for path in (timeline, plot):
        if path is not None:
            terminal.print(f"{path} is written.")


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(help="Which: pathways, syndicate, tsp or sipml.")],
    figures: Annotated[
        list[str] | None, typer.Argument(help="Which figures. [default: all]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plots and pages.")] = Path("out"),
    cost: Annotated[
        list[str] | None,
        typer.Option(help="pathways: replace a cost: NAME=NANOSECONDS, such as network=5000."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="tsp: folder with measured all-reduces of GPUs.")
    ] = None,
    clock_seconds: Annotated[
        float, typer.Option(help="tsp: how long clocks are looked at, simulated.", min=0.01)
    ] = 10.0,
) -> None:
    """Make a paper's figures anew, by simulation at the paper's sizes."""
    with terminal.status("simulating") as shown:
        match paper:
            case "pathways":
                known = pathways.costs(dict(_cost(given) for given in cost or ()))
                chosen = figures or list(pathways.FIGURES)
                made = pathways.reproduce(out, chosen, known, shown.update)
                for figure in made:
                    Console().print(f"[bold]Figure {figure.name}[/], simulated: {figure.summary}")
            case "syndicate" | "sipml":
                _reproduce_steps(paper, out, figures, shown.update)
            case "tsp":
                _reproduce_tsp(out, figures, data, clock_seconds, shown.update)
            case _:
                raise ConfigError(
                    f"there is no paper {paper!r}; there are pathways, syndicate, tsp and sipml"
                )
    terminal.print(f"JSON and plots are in {out}")


def _reproduce_steps(
    paper: str, out: Path, figures: list[str] | None, progress: Callable[[str], None]
) -> None:
    from fairway.reproduce import sipml, syndicate

    of = {"syndicate": syndicate, "sipml": sipml}[paper]
    made = of.reproduce(out, figures or list(of.FIGURES), progress)
    while (figure := run_aside(lambda: next(made, None))) is not None:
        Console().print(f"[bold]Figure {figure.name}[/], simulated: {escape(figure.summary)}")


def _reproduce_tsp(
    out: Path,
    figures: list[str] | None,
    data: Path | None,
    clock_seconds: float,
    progress: Callable[[str], None],
) -> None:
    from fairway.reproduce import tsp

    made = tsp.reproduce(
        out, figures or list(tsp.FIGURES), progress, data=data, clock_seconds=clock_seconds
    )
    drawn = []
    while (figure := run_aside(lambda: next(made, None))) is not None:
        Console().print(f"[bold]{figure.name}[/], simulated: {escape(figure.summary)}")
        drawn.append(figure)
    if figures:
        return
    rows = run_aside(lambda: tsp.write_page(out, drawn, progress))
    must = [row for row in rows if row.kind == "A"]
    holds = sum(row.holds for row in must)
    Console().print(f"{holds} of {len(must)} rows that must hold do; all are in {out / 'tsp.md'}")
    if holds < len(must):
        raise SystemExit(1)


def _cost(given: str) -> tuple[str, int]:
    name, _, value = given.partition("=")
    if not value.isdigit():
        raise ConfigError(f"cannot read the cost {given!r}; expected NAME=NANOSECONDS")
    return name, int(value)


@app.command()
def version() -> None:
    """Print the version."""
    print(f"fairway {__version__}")


def _settings(
    islands: str | None,
    config: Path | None,
    listen: str | None,
    timeline: Path | None,
    plan: str | None = None,
) -> Settings:
    settings = (
        Settings.read(config)
        if config
        else Settings.parse(DEFAULT_ISLANDS if islands is None else islands)
    )
    changes: dict[str, Any] = {}
    if config and islands is not None:
        changes["islands"] = Settings.parse(islands).islands
    if listen:
        changes["listen"] = listen
    if timeline:
        changes["timeline"] = timeline
    if plan:
        changes["plan"] = plan
    return settings.replace(**changes)


def _describe(settings: Settings) -> str:
    hosts = sum(island.hosts for island in settings.islands)
    devices = sum(island.hosts * island.devices for island in settings.islands)
    return f"{len(settings.islands)} islands, {hosts} hosts, {devices} {settings.platform} devices"


@contextmanager
def _started(
    settings: Settings, interrupts: Interrupts, cluster: str | None = None
) -> Iterator[Run]:
    """Brings islands up with a progress line and takes them down whatever happens.

    A request to end that comes before they are up ends this process when they are down again.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=terminal,
        transient=True,
    )
    with progress:
        task = progress.add_task("hosts up", total=None)

        def show(up: int, total: int) -> None:
            progress.update(task, completed=up, total=total)

        with Run(settings, cluster, show, interrupts.check) as run:
            progress.stop()
            yield run
    if run.timeline is not None:
        for table in run.timeline.summary():
            terminal.print(table)
        terminal.print(f"timeline: {settings.timeline} (open it at https://ui.perfetto.dev)")


def _hosts_table(seen: dict[str, Any]) -> Table:
    table = Table("island", "host", "process", "devices", "memory", "queued", "running", "state")
    for island in seen["islands"]:
        for host in island["hosts"]:
            table.add_row(
                str(island["id"]),
                str(host["id"]),
                str(host["process"] or "-"),
                f"{host['devices']} {host['device_kind']}",
                _host_memory(host),
                str(host["queued"]),
                str(host["in_flight"]),
                f"[red]{host['lost']}[/]" if host["lost"] else island["state"],
            )
    return table


def _clients_table(seen: dict[str, Any]) -> Table:
    table = Table(
        *("client", "weight", "priority", "device time", "moved", "queued"),
        *("arrays", "memory", "programs", "waiting for uploads"),
    )
    for client in seen["clients"]:
        table.add_row(
            str(client["id"]),
            str(client["weight"]),
            str(client["priority"]),
            f"{client['device_s']:.2f} s",
            _mebibytes(client["moved_bytes"]),
            str(client["queued"]),
            str(client["buffers"]),
            _mebibytes(client["bytes"]),
            str(client["executables"]),
            str(client["backlog"]),
        )
    return table


def _plans(seen: dict[str, Any]) -> Iterator[str]:
    """What there is to say of the plans by which collectives go."""
    for plan in seen["plans"]:
        text = f"{escape(plan['program'])}: {plan['collectives']} collectives go"
        if plan["told_s"] is None:
            yield f"{text} as they come."
            continue
        before, after = (1e3 * told for told in plan["told_s"])
        yield f"{text} by one plan; a run took {before:.1f} ms, and is to take {after:.1f} ms."


def _host_memory(host: dict[str, Any]) -> str:
    text = _mebibytes(host["memory_bytes"])
    if host["capacity_bytes"] is not None:
        text += f" of {_mebibytes(host['capacity_bytes'])}"
    if host["spilled_bytes"]:
        text += f", {_mebibytes(host['spilled_bytes'])} moved to the host"
    return text


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def main() -> None:
    """Entry point; shows errors of ours as one line."""
    try:
        app()
    except (FairwayError, OSError, ValueError) as error:
        text = escape(str(error))
        terminal.print(f"[bold red]error:[/] {text}", soft_wrap=True, highlight=False)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        # At once: work that was left aside in another thread is not waited for.
        sys.stdout.flush()
        os._exit(130)
