"""Runs a user's script as a child of ``fairway run``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fairway.host.__main__ import PR_SET_PDEATHSIG
from fairway.interrupts import Interrupt, Interrupts

__all__ = ["run_script"]

ONE_REQUEST_S = 0.1
"""Signals within this time of the first count as the same request.

Assumed: a person is slower, and a program that signals a process and then its group, as timeout(1)
does, is faster.
"""


def run_script(words: Sequence[str], environment: dict[str, str], interrupts: Interrupts) -> int:
    """Runs a script until it ends; it may finish after one request to end, but not after a second.

    With a terminal the script is in our process group, so that it can read from the terminal, be
    stopped and be continued as if started directly. The terminal signals it as it signals us, and
    all other requests are forwarded. Without a terminal the script has a group of its own, since a
    signal to a whole group cannot be distinguished from one to us alone.

    Args:
        words: arguments of Python: the script, or ``-m`` and a module, and what follows them.
        environment: variables that it has besides ours.
        interrupts: requests to end.

    Returns:
        The script's exit code; 128 plus the signal if a signal ended it: the signal that we got,
        where SIGINT was forwarded in its place.
    """
    process = subprocess.Popen(
        [sys.executable, *words],
        env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **environment},
        preexec_fn=_preparation(interrupts),
        process_group=None if (in_our_group := _has_terminal()) else 0,
    )
    first_s: float | None = None
    passed: Interrupt | None = None
    # A request until now may have come before the script existed to receive it.
    if (interrupt := interrupts.next(0.0)) is not None:
        first_s, passed = time.monotonic(), interrupt
        _pass_on(interrupt, process)
    while (code := process.poll()) is None:
        if (interrupt := interrupts.next()) is None:
            continue
        if first_s is None:
            first_s = time.monotonic()
            if not (in_our_group and interrupt.from_terminal):
                passed = interrupt
                _pass_on(interrupt, process)
        elif time.monotonic() - first_s > ONE_REQUEST_S:
            _kill(process, with_group=not in_our_group)
    if code == -signal.SIGINT and passed is not None:
        return 128 + passed.number
    return code if code >= 0 else 128 - code


def _has_terminal() -> bool:
    """Returns whether this session has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _preparation(interrupts: Interrupts) -> Callable[[], None]:
    """Returns the function that the child runs between ``fork`` and ``exec``."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl  # resolved here, since no lock is safe to take after a fork

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)
        interrupts.let_through()

    return prepare


def _pass_on(interrupt: Interrupt, process: subprocess.Popen[bytes]) -> None:
    """Asks the script to end: with the same signal if it has a handler for it, else with SIGINT.

    Python handles SIGINT; SIGTERM would kill a script that installed no handler.
    """
    handled = _handles(process.pid, interrupt.number)
    process.send_signal(interrupt.number if handled else signal.SIGINT)


def _handles(process: int, number: signal.Signals) -> bool:
    """Returns whether a process has a handler for the signal."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _kill(process: subprocess.Popen[bytes], with_group: bool) -> None:
    if with_group:
        with contextlib.suppress(ProcessLookupError):  # it may have left its group
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
