"""``fairway logs``: what hosts and controller of a cluster have printed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from fairway.cli.clusters import ClusterOptions
from fairway.cli.consoles import note
from fairway.cli.options import Json, grouped
from fairway.cluster import admin
from fairway.cluster.logs import LogRecord
from fairway.errors import NotRunningError
from fairway.interrupts import Interrupts

__all__ = ["show_logs"]

FOLLOW_S = 0.3


@grouped
def show_logs(
    cluster: ClusterOptions,
    island: Annotated[
        int | None,
        typer.Option(min=0, help="Only of this island. [default: all]", show_default=False),
    ] = None,
    host: Annotated[
        int | None,
        typer.Option(min=0, help="Only of this host. [default: all]", show_default=False),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is printed, until Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what hosts and controller have printed, also hosts that have ended.

    The last 64 KiB of each are kept; with the setting `log_folder` all is in files, too.
    """
    interrupts = Interrupts() if follow else None
    with cluster.directory() as directory:
        last = 0
        while True:
            try:
                for record in _read(directory, admin.ReadLogs(last, island, host)):
                    last = record.number
                    print(msgspec.json.encode(record).decode() if as_json else _line(record))
            except NotRunningError:
                if not follow or last == 0:
                    raise
                note("the cluster has ended")
                return
            if interrupts is None:
                return
            interrupts.check()
            time.sleep(FOLLOW_S)


def _read(directory: Path, request: admin.ReadLogs) -> Iterator[LogRecord]:
    """Yields all records that there are."""
    while records := admin.read_logs(directory, request):
        yield from records
        request = msgspec.structs.replace(request, after=records[-1].number)


def _line(record: LogRecord) -> str:
    time_of_day = datetime.fromtimestamp(record.time_s).strftime("%H:%M:%S.%f")[:-3]
    if record.host is not None:
        source = f"island {record.island} host {record.host}"
    else:
        source = "controller" if record.island is None else f"island {record.island} agents"
    return f"{time_of_day} {source}: {record.text}"
