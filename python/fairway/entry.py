"""Entry point of ``fairway``, before imports that take time.

A Ctrl-C during imports would print a traceback of them. Until the command line is loaded SIGINT has
its default action and ends this process as it ends any other program.
"""

from __future__ import annotations

import signal

__all__ = ["main"]


def main() -> None:
    """Runs the command line."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if it is ignored, as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fairway.cli import main as command_line

    signal.signal(signal.SIGINT, before)
    command_line()
