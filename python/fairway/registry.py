"""Finding the runs of this user that are up, and clearing what dead ones left."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from fairway.errors import FairwayError

__all__ = ["OWNER", "live_runs", "new_directory"]

OWNER = "owner"
"""File in a run's directory that holds the process id of its controller."""


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
    for directory in parent.glob("run-*"):
        if not _is_alive(directory):
            shutil.rmtree(directory, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    (directory / OWNER).write_text(str(os.getpid()))
    return directory


def live_runs() -> list[dict[str, Any]]:
    """The overview of each run that answers, oldest first."""
    directories = sorted(runs_directory().glob("run-*"), key=lambda path: path.stat().st_mtime)
    asked = (_ask(directory / "status.sock") for directory in directories)
    return [answer for answer in asked if answer is not None]


def _is_alive(directory: Path) -> bool:
    try:
        owner = int((directory / OWNER).read_text())
        os.kill(owner, 0)
    except (OSError, ValueError):
        return False
    return True


def _ask(path: Path) -> dict[str, Any] | None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2)
        try:
            connection.connect(str(path))
            with connection.makefile("rb") as answer:
                return dict(json.load(answer))
        except (OSError, ValueError):
            return None
