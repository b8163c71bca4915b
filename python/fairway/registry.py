"""Finding the runs of this user that are up, and clearing what dead ones left."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from fairway.errors import FairwayError, NotRunningError

__all__ = ["TARGET", "ask", "live_runs", "new_directory", "only_run", "targeted_run"]

TARGET = "JAX_BACKEND_TARGET"
"""By this variable the environment names a run."""
PREFIX = "run-"
"""How the name of a run's directory begins; the process of its controller follows."""


def runs_directory() -> Path:
    """Where the sockets of this user's runs lie.

    Raises:
        FairwayError: the place belongs to somebody else.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    directory = Path(base) / f"fairway-{os.getuid()}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise FairwayError(f"{directory} belongs to another user; remove it or set XDG_RUNTIME_DIR")
    return directory


def new_directory() -> Path:
    """Makes a directory for a new run, and removes those whose controller is dead."""
    parent = runs_directory()
    for directory in parent.glob(f"{PREFIX}*"):
        if not _is_alive(directory):
            shutil.rmtree(directory, ignore_errors=True)
    # The name tells whose it is, so there is no moment when it is there and nobody's.
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))


def live_runs() -> list[dict[str, Any]]:
    """The overview of each run that answers, in the order in which they came up."""
    doors = sorted(runs_directory().glob(f"{PREFIX}*/status.sock"), key=_made_at_ns)
    asked = map(_overview, doors)
    return [answer for answer in asked if answer is not None]


def targeted_run(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of these runs the one that the environment names; none if it names none.

    Raises:
        NotRunningError: it names another.
    """
    target = os.environ.get(TARGET, "")
    if not target:
        return None
    for run in runs:
        if run["target"].lower() == target.lower():
            return run
    up = ", ".join(run["target"] for run in runs) or "none"
    raise NotRunningError(
        f"{TARGET} is {target}, where no islands of yours are up; expected one of those that are: "
        f"{up}; unset {TARGET}, or set it to one of them"
    )


def only_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run that is meant where none is named: that of the environment, or the only one.

    Raises:
        NotRunningError: none is up, several are, or the environment names another.
    """
    if (targeted := targeted_run(runs)) is not None:
        return targeted
    if not runs:
        raise NotRunningError("no islands are up; `fairway up` starts some")
    if len(runs) > 1:
        up = ", ".join(f"{run['target']} (process {run['process']})" for run in runs)
        raise NotRunningError(
            f"{len(runs)} runs are up, {up}; set {TARGET} to the one that is meant"
        )
    return runs[0]


def _made_at_ns(path: Path) -> int:
    """When this was made; 0 if it is gone."""
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


def _overview(path: Path) -> dict[str, Any] | None:
    try:
        return ask(path)
    except NotRunningError:
        return None


def ask(door: Path, question: Any = None, timeout_s: float = 2.0) -> dict[str, Any]:
    """What the controller says behind one of its doors.

    Args:
        door: a socket in a run's directory.
        question: what it is asked; none if it talks without being asked.
        timeout_s: longest silence.

    Raises:
        NotRunningError: nobody answers.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(door))
            if question is not None:
                connection.sendall(json.dumps(question).encode() + b"\n")
            with connection.makefile("rb") as answer:
                return dict(json.load(answer))
        except (OSError, ValueError) as error:
            raise NotRunningError(f"the controller does not answer: {error}") from error
