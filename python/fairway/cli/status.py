"""``fairway status``: the state of running clusters, within the 80 columns of a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fairway.cli.consoles import duration, results

__all__ = ["planned", "show_run"]

SCRIPT_MAX = 28
"""Most characters shown of a script's name."""


def show_run(seen: dict[str, Any]) -> None:
    """Prints the overview of one run."""
    console = results()
    cluster = seen.get("cluster")
    name = "islands of a `fairway run`" if cluster is None else f"cluster {cluster}"
    console.print(f"{name}  {seen['target']}  controller pid {seen['process']}")
    console.print(_hosts(seen))
    if seen["clients"]:
        console.print(_clients(seen))
        console.print(_held(seen))
    for line in planned(seen):
        console.print(line)


def _table(title: str, *columns: str) -> Table:
    """Returns an empty table without borders: numbers are right-aligned, the columns LEFT left."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in LEFT else "right")
    return table


LEFT = ("devices", "memory", "state", "script")


def _hosts(seen: dict[str, Any]) -> Table:
    names = ("island", "host", "pid", "devices", "memory", "queued", "running", "state")
    table = _table("hosts", *names)
    for island in seen["islands"]:
        for host in island["hosts"]:
            # A removed island is meant to be gone; of a lost one the reason matters.
            reason = host["lost"] if island["state"] == "lost" else None
            table.add_row(
                str(island["id"]),
                str(host["id"]),
                str(host["process"] or "-"),
                f"{host['devices']} {host['device_kind']}",
                _memory(host),
                str(host["queued"]),
                str(host["in_flight"]),
                Text(reason, "red") if reason else island["state"],
            )
    return table


def _clients(seen: dict[str, Any]) -> Table:
    names = ("client", "pid", "script", "age", "weight", "priority", "device time")
    table = _table("clients", *names)
    for client in seen["clients"]:
        process, age_s = client.get("process"), client.get("connected_s")
        table.add_row(
            str(client["id"]),
            "-" if process is None else str(process),
            _script(client),
            "-" if age_s is None else duration(age_s),
            str(client["weight"]),
            str(client["priority"]),
            f"{client['device_s']:.2f} s",
        )
    return table


def _script(client: dict[str, Any]) -> str:
    """Returns a client's script, or the machine that it is on."""
    if client.get("machine"):
        return f"on {client['machine']}"
    process = client.get("process")
    return "-" if process is None else script_of(process)


def _held(seen: dict[str, Any]) -> Table:
    names = ("client", "arrays", "size", "transferred", "programs", "queued", "uploads waiting")
    table = _table("held by clients", *names)
    for client in seen["clients"]:
        table.add_row(
            str(client["id"]),
            str(client["buffers"]),
            _mebibytes(client["bytes"]),
            _mebibytes(client["moved_bytes"]),
            str(client["executables"]),
            str(client["queued"]),
            str(client["backlog"]),
        )
    return table


def script_of(process: int) -> str:
    """Returns the script or module of a Python process, or its program; ``-`` if it ended.

    Args:
        process: its process ID.
    """
    try:
        given = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return "-"
    words = [word.decode(errors="replace") for word in given]
    name = _script_in(words) if words else "-"
    return name if len(name) <= SCRIPT_MAX else f"…{name[1 - SCRIPT_MAX :]}"


def _script_in(words: list[str]) -> str:
    program = Path(words[0]).name
    if not program.startswith("python"):
        return program
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            return f"-m {next(rest, '')}"
        if word == "-c":
            return "python -c"
        if word in ("-W", "-X"):
            next(rest, None)
        elif not word.startswith("-"):
            return shlex.quote(Path(word).name)
    return program


def planned(seen: dict[str, Any]) -> Iterator[str]:
    """Yields one line for each plan that orders collectives."""
    for plan in seen["plans"]:
        text = f"{plan['program']}: {plan['collectives']} collectives"
        if plan["predicted_s"] is None:
            yield f"{text} in issue order."
            continue
        before, after = (1e3 * seconds for seconds in plan["predicted_s"])
        yield (
            f"{text} jointly scheduled; a run took {before:.1f} ms, and {after:.1f} ms are "
            "predicted."
        )


def _memory(host: dict[str, Any]) -> str:
    text = _mebibytes(host["memory_bytes"])
    if host["capacity_bytes"] is not None:
        text += f" of {_mebibytes(host['capacity_bytes'])}"
    if host["spilled_bytes"]:
        text += f", {_mebibytes(host['spilled_bytes'])} spilled"
    return text


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
