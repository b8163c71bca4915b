"""Entry point of ``fairway``, before imports that take time.

A Ctrl-C during imports would print a traceback of them. Until the command line is loaded SIGINT has
its default action and ends this process as it ends any other program.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Runs the command line."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if it is ignored, as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from fairway.cli import main as command_line
    except ImportError as error:
        _explain(error)
    signal.signal(signal.SIGINT, before)
    command_line()


def _explain(error: ImportError) -> NoReturn:
    """Reports why the command line cannot be loaded; ``doctor`` examines the rest all the same."""
    if sys.argv[1:2] == ["doctor"]:
        from fairway.doctor import examine, report

        print(*report(examine()), sep="\n")
    else:
        print(
            f"fairway: error: the command line does not load: {error}; "
            "expected a complete installation; try `fairway doctor`",
            file=sys.stderr,
        )
    raise SystemExit(1) from None
