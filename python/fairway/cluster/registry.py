"""Finds this user's live runs, and removes the directories of dead ones."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from fairway.cluster.admin import overview, socket_path
from fairway.errors import ConfigError, FairwayError, NotRunningError

__all__ = [
    "carried_directory",
    "carry",
    "choose_cluster",
    "free_name",
    "live_runs",
    "new_directory",
]

TARGET = "JAX_BACKEND_TARGET"
"""Environment variable that names a run by its address."""
PREFIX = "run-"
"""Prefix of a run's directory; the process ID of its controller follows."""
CARRIED = "carried.json"
"""File in the directory of a connection to another machine's controller: what is another here."""


SOCKET_BYTES_MAX = 107
"""Longest path of a Unix socket, in bytes; see unix(7)."""
SOCKET_NAME_MAX = len("island-9999.sock")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Name of a cluster."""


def _runs_path() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"fairway-{os.getuid()}"


def runs_directory() -> Path:
    """Returns the directory of this user's runs, created if it is missing.

    Raises:
        FairwayError: it belongs to another user, or is a link or no directory.
    """
    directory = _runs_path()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    remedy = "remove it or set XDG_RUNTIME_DIR to a folder of your own"
    try:  # no links: the target of a name may change between the check and its use
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise FairwayError(
            f"cannot use {directory} for sockets: it is no folder, but a link or a file; {remedy}"
        ) from error
    try:
        found = os.fstat(opened)
        if found.st_uid != os.getuid():
            raise FairwayError(
                f"cannot use {directory} for sockets: it belongs to user {found.st_uid}; {remedy}"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(opened, 0o700)
    finally:
        os.close(opened)
    return directory


def new_directory() -> Path:
    """Creates a directory for a new run or agent, and removes those of dead processes.

    Raises:
        FairwayError: the parent is not this user's, or its path is too long for sockets.
    """
    parent = runs_directory()
    room = SOCKET_BYTES_MAX - len(f"/{PREFIX}{os.getpid()}-12345678/") - SOCKET_NAME_MAX
    if (length := len(os.fsencode(parent))) > room:
        raise FairwayError(
            f"cannot use {parent} for sockets: its path has {length} bytes; expected at most "
            f"{room}, since the kernel takes {SOCKET_BYTES_MAX} for a socket; set XDG_RUNTIME_DIR "
            "to a folder with a shorter path"
        )
    for directory in parent.glob(f"{PREFIX}*"):
        if not _is_alive(directory):
            shutil.rmtree(directory, ignore_errors=True)
    # The name contains the owner's process ID, so the directory never exists without an owner.
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))


def live_runs() -> list[dict[str, Any]]:
    """Returns the overview of each run that answers, in the order in which they came up."""
    if not os.path.lexists(_runs_path()):
        return []  # listing does not create the directory
    runs = runs_directory().glob(f"{PREFIX}*")
    up = [directory for directory in runs if socket_path(directory).exists()]
    asked = map(_overview, sorted(up, key=lambda directory: _made_at_ns(socket_path(directory))))
    return [answer for answer in asked if answer is not None]


def carry(directory: Path, target: str, address: str) -> None:
    """Makes a directory that of a connection to a controller on another machine.

    Args:
        directory: of this process, where the admin socket is carried.
        target: address by which clients of this machine reach the controller.
        address: of its gateway.
    """
    path = directory / CARRIED
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"target": target, "address": address}))
    partial.rename(path)


def carried_directory(target: str) -> Path | None:
    """Returns the directory of the connection that carries a target; None for a local one."""
    for path in _runs_path().glob(f"{PREFIX}*/{CARRIED}"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text())["target"] == target.lower():
                return path.parent
    return None


def choose_cluster(
    runs: list[dict[str, Any]], name: str | None = None, target: str | None = None
) -> dict[str, Any] | None:
    """Returns the cluster of ``fairway up`` that a command applies to.

    The islands of a ``fairway run`` are its own; only ``target`` can select them.

    Args:
        runs: live runs, as :func:`live_runs` returns them.
        name: name of the cluster, or address of the gateway by which it is reached; None selects
            by ``target``, or the only cluster.
        target: address that ``JAX_BACKEND_TARGET`` names, if it is set.

    Returns:
        Its overview; None if there is no cluster and neither ``name`` nor ``target`` is given.

    Raises:
        NotRunningError: the cluster of ``name`` or ``target`` is not up.
        ConfigError: there are several clusters, and neither is given.
    """
    clusters = [run for run in runs if run["cluster"] is not None]
    names = ", ".join(str(run["cluster"]) for run in clusters) or "none"
    if name is not None:
        found = next((run for run in clusters if _is_named(run["cluster"], name)), None)
        if found is None:
            raise NotRunningError(
                f"no cluster {name!r} is up; up are: {names}; `fairway up --name {name}` starts one"
            )
        return found
    if target:
        found = next((run for run in runs if run["target"] == target.lower()), None)
        if found is None:
            raise NotRunningError(
                f"JAX_BACKEND_TARGET is {target}, where nothing is up; clusters up are: {names}; "
                "unset it, or choose with --cluster NAME or --new"
            )
        return found
    if len(clusters) > 1:
        raise ConfigError(f"several clusters are up: {names}; choose one with --cluster NAME")
    return clusters[0] if clusters else None


def _is_named(cluster: str, name: str) -> bool:
    """Returns whether a cluster has this name, or is reached at this address."""
    return cluster == name or cluster.endswith(f"@{name}")


def free_name(runs: list[dict[str, Any]], wanted: str | None = None) -> str:
    """Returns a name for a new cluster: ``wanted``, or else the first free of main, main-2, ...

    Raises:
        ConfigError: ``wanted`` is malformed, or another cluster has it.
    """
    if wanted is not None and not NAME.fullmatch(wanted):
        raise ConfigError(
            f"cannot name a cluster {wanted!r}; expected 1 to 63 letters, digits, '.', '_' and '-' "
            "that begin with a letter or digit; try --name main"
        )
    taken = {run["cluster"] for run in runs}
    if wanted is not None:
        if wanted in taken:
            raise ConfigError(f"a cluster named {wanted!r} is up already; choose another --name")
        return wanted
    names = itertools.chain(["main"], (f"main-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _made_at_ns(path: Path) -> int:
    """Returns the modification time of a path; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _is_alive(directory: Path) -> bool:
    try:
        os.kill(int(directory.name.removeprefix(PREFIX).partition("-")[0]), 0)
    except (OSError, ValueError):
        return False
    return True


def _overview(directory: Path) -> dict[str, Any] | None:
    try:
        seen = overview(directory)
    except NotRunningError:
        return None
    with contextlib.suppress(OSError, ValueError):
        carried = json.loads((directory / CARRIED).read_text())
        seen["target"] = carried["target"]
        seen["cluster"] = f"{seen['cluster'] or 'main'}@{carried['address']}"
    return seen | {"directory": str(directory)}
