"""Command and environment of Fairway's own Python child processes.

They import nothing from the current folder, which may be another user's: ``-P`` leaves it out of
the path, and an empty entry of ``PYTHONPATH``, which stands for it, is left out as well.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["command", "environment"]

CLIENT_VARIABLES = ("JAX_PLATFORMS", "JAX_BACKEND_TARGET", "XLA_FLAGS", "PYTHONWARNINGS")


def command(module: str) -> list[str]:
    """Returns the command that runs a module of Fairway."""
    return [sys.executable, "-P", "-m", module]


def environment() -> dict[str, str]:
    """Returns this process's environment without the variables that make a process a client."""
    kept = {name: value for name, value in os.environ.items() if name not in CLIENT_VARIABLES}
    if "PYTHONPATH" in kept:
        entries = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(
            str(Path(entry).absolute()) for entry in entries if entry
        )
    return kept
