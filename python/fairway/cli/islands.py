"""Islands that a command starts: their settings, a check of the machine, and their lifetime."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from fairway.cli.consoles import check_output, counted, note, ranges, terminal, working
from fairway.cluster.supervisor import Run
from fairway.doctor import HOST_BYTES
from fairway.errors import ConfigError
from fairway.interrupts import Interrupts
from fairway.settings import DEFAULT_ISLANDS, Settings

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
    typer.Option(
        help="Write a Chrome/Perfetto timeline of computations and transfers (.json), and print a "
        "summary."
    ),
]
Plan = Annotated[
    str | None,
    typer.Option(
        help="auto: schedule a program's cross-island collectives jointly (algorithm, channels and "
        "order), from measured runs. [default: off]",
        show_default=False,
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        help="Where hosts run: local, ssh:FILE or ssh:NAME,NAME, slurm or slurm:'SRUN OPTIONS', "
        "ray or ray:ADDRESS, k8s:IMAGE or k8s:FILE with manifests, or agents that people start "
        "with `fairway host`. [default: local]",
        show_default=False,
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        help="Nodes of Slurm to ask for, outside of an allocation. [default: one for each host]",
        show_default=False,
    ),
]
Channels = Annotated[
    str | None,
    typer.Option(
        help="Networks over which large transfers between hosts on other machines are striped: "
        "auto, for all that the machines have in common, or such as 10.1.0.0/16,10.2.0.0/16. "
        "[default: one address of each host]",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class IslandOptions:
    """Options of a command that starts islands."""

    islands: Islands = None
    config: Config = None
    on: On = None
    nodes: Nodes = None
    channels: Channels = None
    timeline: Timeline = None
    plan: Plan = None

    def given(self) -> list[str]:
        """Returns the names of the options that are given."""
        return [f"--{one.name}" for one in fields(self) if getattr(self, one.name) is not None]

    def settings(self, listen: str | None = None, gateway: str | None = None) -> Settings:
        """Returns the settings of a file, or the default ones, changed by options that are given.

        Args:
            listen: where clients connect.
            gateway: where other machines connect.
        """
        given = {
            "listen": listen,
            "gateway": gateway,
            "on": self.on,
            "nodes": self.nodes,
            "channels": self.channels,
            "timeline": self.timeline,
            "plan": self.plan,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value}
        if self.islands is not None:
            changes["islands"] = self.islands
        if changes.get("on", "local") != "local":
            changes["data_plane"] = "tcp"
        if self.config:
            return Settings.read(self.config, **changes)
        return Settings.parse(**changes)


def described(settings: Settings) -> str:
    """Returns how many islands, hosts and devices there are, in words."""
    hosts = sum(island.hosts for island in settings.islands)
    devices = sum(island.hosts * island.devices for island in settings.islands)
    islands = counted(len(settings.islands), "island")
    return f"{islands}, {counted(hosts, 'host')}, {counted(devices, f'{settings.platform} device')}"


@contextmanager
def started(
    settings: Settings, interrupts: Interrupts, cluster: str | None = None
) -> Iterator[Run]:
    """Brings islands up with a progress line and takes them down even if an error is raised.

    A request to end (SIGINT, SIGTERM, SIGHUP) during the start takes the islands down, then ends
    this process.
    """
    _check_machine(settings)
    check_output(settings.timeline, (".json",))
    with ExitStack() as starting:
        work = starting.enter_context(working("starting hosts"))

        def show(up: int, total: int, missing: list[int]) -> None:
            waiting = f"waiting for agents of hosts {ranges(missing)}"
            work.update(up, total, waiting if missing else "starting hosts")

        run = Run(settings, cluster, show, interrupts.check)
        if run.gateway is not None and settings.on == "agents":
            where, token = ",".join(run.gateway.addresses), run.gateway.token_file
            note(f"hosts join with `fairway host --join {where} --token-file FILE`;")
            note(f"the token for FILE is in {token}: copy it to their machines, and keep it secret")
        with run:
            starting.close()
            yield run
    if settings.timeline and run.timeline is not None:
        for table in run.timeline.summary():
            terminal.print(table)
        note(f"wrote {settings.timeline}; open it at https://ui.perfetto.dev")


def _check_machine(settings: Settings) -> None:
    """Checks that this machine has memory for the hosts.

    Raises:
        ConfigError: the hosts need more than the machine has.
    """
    if not settings.is_local:
        return
    hosts = sum(island.hosts for island in settings.islands if not island.prefix)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = max(1, memory // HOST_BYTES)
    if hosts > most:
        raise ConfigError(
            f"{hosts} hosts would take about {hosts * HOST_BYTES / 2**30:.0f} GiB, since each is a "
            f"process of about {HOST_BYTES >> 20} MiB; this machine has {memory / 2**30:.0f} GiB, "
            f"enough for {most}; try fewer hosts with more devices each"
        )
