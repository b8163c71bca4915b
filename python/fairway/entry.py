"""Where ``fairway`` begins, before anything that takes time to import.

A Ctrl-C during imports would show where in them it came. Until the command line is there it ends
this process as it ends any other program.
"""

from __future__ import annotations

import signal

__all__ = ["main"]


def main() -> None:
    """Runs the command line."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not one that is ignored, as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fairway.cli import main as command_line

    signal.signal(signal.SIGINT, before)
    command_line()
