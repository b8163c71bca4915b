"""The command line: ``fairway up``, ``run``, ``capture``, ``plan``, ``simulate`` and more."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table

from fairway import __version__
from fairway.analysis.topologies import describe
from fairway.capture import summary
from fairway.cli.clusters import ClusterOptions
from fairway.cli.comparing import compare_step
from fairway.cli.connecting import connect_cluster, show_environment
from fairway.cli.consoles import (
    check_output,
    fail,
    note,
    renamed,
    results,
    terminal,
    working,
)
from fairway.cli.dev import dev_app
from fairway.cli.doctor import check_machine
from fairway.cli.explaining import explain_step
from fairway.cli.islands import (
    IslandOptions,
    described,
)
from fairway.cli.jobs import share_fabric
from fairway.cli.joining import join_as_host
from fairway.cli.kubernetes import brought_up, hold, print_manifests
from fairway.cli.options import Json, grouped
from fairway.cli.placing import place_on_fabric
from fairway.cli.planning import calibrate, plan_step
from fairway.cli.predicting import predict_step, record_step
from fairway.cli.records import show_logs
from fairway.cli.reproducing import reproduce
from fairway.cli.scripts import check_script, misplaced, take_options, words_of
from fairway.cli.simulating import simulate_workload
from fairway.cli.status import planned, show_run
from fairway.cli.tokens import token_app
from fairway.cluster import admin
from fairway.cluster.registry import choose_cluster, free_name, live_runs
from fairway.cluster.supervisor import client_environment
from fairway.errors import ConfigError, FairwayError, NotRunningError
from fairway.interrupts import Interrupts, run_aside
from fairway.routes import Transfer, route
from fairway.script import run_script
from fairway.settings import IslandSettings

__all__ = ["app", "main"]

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
EXIT_CODES = (
    "Exit codes: 0 done; 1 failed or refused, for the reason given as `fairway: error: ...`; "
    "2 the command line cannot be read; 128 + N ended by signal N. `run` and `capture` end with "
    "the code of their script."
)

# Without markup: help speaks of [defaults] and of shapes such as [m x k].
app = typer.Typer(
    help="Run JAX from one Python process over many islands of accelerators.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
islands_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Add islands to a running cluster, or remove some.",
)
app.add_typer(islands_app, name="islands")
app.add_typer(token_app, name="token")
app.add_typer(dev_app, name="dev")
app.command("place")(place_on_fabric)
app.command("jobs")(share_fabric)
app.command("plan")(plan_step)
app.command("explain")(explain_step)
app.command("compare")(compare_step)
app.command("predict", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    predict_step
)
app.command("calibrate")(calibrate)
app.command("reproduce")(reproduce)
app.command("doctor")(check_machine)
app.command("host")(join_as_host)
app.command("connect")(connect_cluster)
app.command("manifests")(print_manifests)
app.command("logs")(show_logs)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"fairway {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Run JAX from one Python process over many islands of accelerators."""


INTERRUPTED = 128 + signal.SIGINT
OUT_OPTIONS = ("-o", "--out", "--output")
CAPTURE_OPTIONS = {
    **dict.fromkeys(OUT_OPTIONS, "out"),
    "--islands": "islands",
    "--config": "config",
    "--on": "on",
    "--channels": "channels",
}


@dataclass(frozen=True)
class ShareOptions:
    """A client's share of the devices."""

    weight: Annotated[
        int, typer.Option(min=1, help="Relative share of device time within its priority.")
    ] = 1
    priority: Annotated[
        int, typer.Option(min=-100, max=100, help="Scheduling priority; higher first.")
    ] = 0

    def environment(self) -> dict[str, str]:
        """Returns the variables that state it to the client."""
        return {"FAIRWAY_WEIGHT": str(self.weight), "FAIRWAY_PRIORITY": str(self.priority)}


RUN_OPTIONS = [
    f"--{field.name}" for group in (IslandOptions, ShareOptions) for field in fields(group)
]


@app.command()
@grouped
def up(
    islands: IslandOptions,
    listen: Annotated[
        str | None,
        typer.Option(help="Where clients connect: 127.0.0.1:PORT. [default: free port]"),
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(
            help="ADDRESS:PORT where clients and hosts of other machines connect, by TLS and with "
            "a token. [default: none; any free port unless hosts are local]",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the cluster, for --cluster. [default: main, or main-2 and so on while "
            "that is up]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start islands and keep them up until Ctrl-C."""
    interrupts = Interrupts()
    settings = islands.settings(listen, gateway)
    runs = live_runs()
    wanted, name = name, free_name(runs, name)
    if wanted is None and name != free_name([]):
        note(f"a cluster named {free_name([])} is up already, so this one is named {name}")
    with brought_up(settings, interrupts, name) as run:
        note(f"up: cluster {name}: {described(settings)}; clients need:")
        show_environment(run.environment)
        note("Ctrl-C ends it; `fairway status` shows it")
        hold(run, interrupts)
        note("taking the islands down")


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,  # arguments after the script belong to the script
    }
)
@grouped
def run(
    context: typer.Context,
    script: Annotated[
        Path,
        typer.Argument(
            help="Python script, or -m and a module such as pytest; what follows are its arguments."
        ),
    ],
    islands: IslandOptions,
    share: ShareOptions,
    where: ClusterOptions,
    new: Annotated[
        bool, typer.Option("--new", help="Bring up islands of its own, whatever is up.")
    ] = False,
) -> None:
    """Run a JAX script on islands of its own, or on those of a cluster that is up.

    --islands, --config, --timeline and --plan bring up islands of its own, as --new does. Options
    of Fairway go before the script; all arguments after it are the script's.
    """
    interrupts = Interrupts()
    words = words_of(script, context)
    _point_out(context.args, RUN_OPTIONS)
    given = islands.given()
    if where.cluster is not None and (new or given):
        raise ConfigError(
            f"--cluster joins what is up, and {given[0] if given else '--new'} starts islands; "
            "use one of the two"
        )
    target = os.environ.get("JAX_BACKEND_TARGET")
    if not new and not given:
        with where.runs() as runs:
            joined = choose_cluster(runs, where.cluster, target)
            if joined is not None:
                name = joined["cluster"] or joined["target"]
                note(f"Joining cluster {name}; --new starts islands of its own")
                environment = client_environment(joined["target"]) | share.environment()
                interrupts.check()
                raise SystemExit(run_script(words, environment, interrupts))
    settings = islands.settings()
    if not settings.is_in_kubernetes:
        settings = settings.serving(script)
    with brought_up(settings, interrupts) as islands_run:
        interrupts.check()
        environment = islands_run.environment | share.environment()
        code = run_script(words, environment, interrupts)
        for line in planned(islands_run.overview()):
            terminal.print(line)
    raise SystemExit(code)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
@grouped
def capture(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Python script; what follows are its arguments.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File for the program. [default: step.fw]")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", hidden=True)] = None,
    *,
    islands: IslandOptions,
) -> None:
    """Run a JAX script and write its last step as a program with measured times.

    Beside it a report (.report) says when each computation and transfer of the last steps ran; see
    `fairway compare`.

    -o may also follow the script. If the script has such an option of its own, write
    `fairway capture SCRIPT [OPTIONS] -- ARGUMENTS`: arguments after `--` are the script's.
    """
    interrupts = Interrupts()
    check_script(script, context)
    taken, arguments = take_options(context.args, CAPTURE_OPTIONS, OUT_OPTIONS)
    if "--" not in context.args:
        _point_out(arguments, CAPTURE_OPTIONS)
    out = renamed(out, output, "--out", "--output")
    before = [*(["--out"] if out is not None else []), *islands.given()]
    for name in taken:
        if f"--{name}" in before:
            raise ConfigError(f"--{name} is given before the script and behind it; leave one out")
    if "--" not in context.args and "out" in taken:
        note(f"the step will be written to {taken['out']}; the script's own -o goes behind `--`")
    path = Path(taken.get("out") or out or "step.fw")
    check_output(path, (".fw",))
    behind: dict[str, Any] = {name: taken[name] for name in taken if name != "out"}
    if "config" in behind:
        behind["config"] = Path(behind["config"])
    settings = replace(islands, **behind).settings()
    if settings.is_in_kubernetes:
        raise ConfigError(
            f"a step in Kubernetes ({settings.on}) cannot be captured; expected another engine"
        )
    settings = settings.serving(script)
    text = record_step(settings, script, arguments, path, interrupts, f"{path} is not written")
    console = results()
    for table in summary(text):
        console.print(table)
    note(f"the step is in {path}")


@app.command()
@grouped
def status(
    where: ClusterOptions,
    as_json: Json = False,
) -> None:
    """Show islands, hosts, clients, memory and queues of running clusters; fail if none is up.

    Without --cluster all are shown, and the islands of each `fairway run`.
    """
    with where.runs() as runs:
        if where.cluster is not None:
            named = choose_cluster(runs, where.cluster)
            runs = [] if named is None else [named]
    if as_json:
        print(json.dumps(runs, indent=2))
        if runs:
            return
    if not runs:
        raise NotRunningError("no islands are up; `fairway up` starts some")
    for seen in runs:
        show_run(seen)


@contextlib.contextmanager
def _goes_on() -> Iterator[None]:
    """Says at a Ctrl-C that the cluster goes on with what it was asked for."""
    try:
        yield
    except KeyboardInterrupt:
        note("The cluster goes on with it; `fairway status` shows its islands")
        raise


@islands_app.command("add")
@grouped
def add_island(
    shape: Annotated[str, typer.Argument(help="Hosts x devices per host, such as 1x4.")],
    where: ClusterOptions,
) -> None:
    """Add an island; a lost or removed island of this shape comes back under its old number."""
    island = IslandSettings.parse(shape)
    with where.directory() as directory, _goes_on(), working("starting hosts"):
        request = admin.AddIsland(island.hosts, island.devices)
        number = admin.add_island(directory, request)
    note(f"Island {number} is up")


@islands_app.command("remove")
@grouped
def remove_island(
    number: Annotated[int, typer.Argument(help="Its number in `fairway status`.")],
    where: ClusterOptions,
    force: Annotated[
        bool, typer.Option("--force", help="Even if clients use it; to them it is lost.")
    ] = False,
) -> None:
    """Remove an island while the others continue; slices on it migrate to other islands."""
    with where.directory() as directory, _goes_on():
        admin.remove_island(directory, admin.RemoveIsland(number, force))
    note(f"Island {number} is gone")


@app.command("route")
def show_route(
    fabric: Annotated[
        str,
        typer.Argument(help="Such as dragonfly:264, torus:8x8, fattree:8, cluster:4x8, or a file."),
    ],
    transfers: Annotated[
        list[str],
        typer.Argument(
            help="SOURCE:TARGET:SIZE, such as 0:5:64MiB; after transfers 0 and 1: 5:0:1MiB:0,1."
        ),
    ],
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the links and cycles of all vectors.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Schedule transfers on the links of a fabric: a start cycle for each vector on each link."""
    asked = [Transfer.parse(text) for text in transfers]
    found = run_aside(lambda: route(fabric, asked))
    if as_json:
        print(json.dumps(found.schedule))
        return
    console = results()
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
    as_json: Json = False,
) -> None:
    """Describe a fabric: chips, links, hops, bandwidth."""
    found = run_aside(lambda: describe(fabric))
    if as_json:
        print(json.dumps(found))
        return
    table = Table(title=fabric, show_header=False)
    for name, value in found.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:,.2f}")
    results().print(table)


app.command("simulate")(simulate_workload)


def _point_out(arguments: Sequence[str], ours: Collection[str]) -> None:
    for name in dict.fromkeys(misplaced(arguments, ours)):
        note(
            f"note: {name} follows the script, so it goes to the script; options of Fairway stand "
            "in front of it"
        )


def main() -> None:
    """Runs the command line; prints an error as one line; exits as in ``EXIT_CODES``."""
    try:
        code = app(prog_name="fairway", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        _end(INTERRUPTED)
    except FairwayError as error:
        fail(str(error))
        raise SystemExit(1) from None
    except OSError as error:
        fail(_of_system(error))
        raise SystemExit(1) from None
    except ValueError as error:
        fail(str(error))
        raise SystemExit(1) from None
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        _refuse_usage(error)
    if code == INTERRUPTED:  # what typer returns for a Ctrl-C
        _end(INTERRUPTED)
    raise SystemExit(code if isinstance(code, int) else 0)


def _refuse_usage(error: Any) -> NoReturn:
    """Reports a command line that cannot be read, and exits; typer vendors its own click errors."""
    context = getattr(error, "ctx", None)
    # An error about a missing value has no context.
    given = [word for word in sys.argv[1:2] if not word.startswith("-")]
    path = context.command_path if context else " ".join(["fairway", *given])
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
    else:
        fail(f"{_usage(error)}; try `{path} --help`".replace(".;", ";"))
    raise SystemExit(2) from None


def _usage(error: Any) -> str:
    """Returns what is wrong with an option, with the value that was given."""
    cause = error.__cause__
    if not hasattr(cause, "errors"):
        return str(error.format_message())
    (found,) = cause.errors()[:1]
    _, choices, expected = found["msg"].rstrip(".").partition(" is not one of ")
    if not choices:
        expected = found["msg"].removeprefix("Input should be ").partition(",")[0]
    name = error.param.opts[0]
    return f"{name} is {found['input']!r}; expected {expected}"


def _of_system(error: OSError) -> str:
    reason = error.strerror or str(error)
    reason = reason[:1].lower() + reason[1:]
    return f"{error.filename}: {reason}" if error.filename else reason


def _end(code: int) -> NoReturn:
    # Without cleanup: the interpreter would first join the threads of pools that `run_aside` left.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
