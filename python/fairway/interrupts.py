"""Requests to end (Ctrl-C and the like), received synchronously.

A signal handler that raises may do so between any two lines, also between the line that creates a
resource and the line that registers its cleanup. So these signals are blocked, and code that can
handle one waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import threading
from collections.abc import Callable
from typing import TypeVar, cast

__all__ = ["Interrupt", "Interrupts", "run_aside"]

Result = TypeVar("Result")

LOOK_S = 0.2
"""Polling interval of a wait, for a signal that arrived just before it began and did not end it."""
SI_KERNEL = 0x80
"""``si_code`` of a signal that the kernel sent by itself."""


def run_aside(work: Callable[[], Result], check: Callable[[], None] = lambda: None) -> Result:
    """Runs ``work`` in another thread and waits, so that Ctrl-C interrupts it in native code, too.

    For work that needs no cleanup: on Ctrl-C the thread is abandoned, and ends with the process.

    Args:
        work: what to run.
        check: called several times a second; an exception that it raises ends the wait. It is for
            threads in which signals are blocked.

    Raises:
        KeyboardInterrupt: there was a Ctrl-C.
    """
    done: queue.SimpleQueue[tuple[Result | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    while True:
        with contextlib.suppress(queue.Empty):
            result, error = done.get(timeout=LOOK_S)
            break
        check()
    if error is not None:
        raise error
    return cast(Result, result)


@dataclasses.dataclass(frozen=True)
class Interrupt:
    """One request to end.

    Attributes:
        number: the signal.
        from_terminal: it is a terminal's Ctrl-C, which all processes of our group got; any other
            may have been sent to this process alone, as a terminal's hangup to a session leader.
    """

    number: signal.Signals
    from_terminal: bool


class Interrupts:
    """Requests to end this process: SIGINT, SIGTERM, and SIGHUP except under ``nohup``.

    From construction until the process ends, they and SIGCHLD are blocked in the calling
    thread and in all threads and processes that it starts afterwards; construct it before them. A
    child program must call ``let_through`` or unblock them itself.
    """

    def __init__(self) -> None:
        ending = {signal.SIGINT, signal.SIGTERM}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            ending.add(signal.SIGHUP)
        self._awaited = ending | {signal.SIGCHLD}
        self._mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, self._awaited)

    def next(self, timeout_s: float | None = None) -> Interrupt | None:
        """Waits for a request to end.

        Args:
            timeout_s: how long; None waits without limit.

        Returns:
            The request; None if a child ended or stopped first, or time is up.
        """
        if timeout_s is None:
            seen = signal.sigwaitinfo(self._awaited)
        elif (timed := signal.sigtimedwait(self._awaited, timeout_s)) is not None:
            seen = timed
        else:
            return None
        if seen.si_signo == signal.SIGCHLD:
            return None
        from_terminal = seen.si_signo == signal.SIGINT and seen.si_code == SI_KERNEL
        return Interrupt(signal.Signals(seen.si_signo), from_terminal)

    def check(self) -> None:
        """Returns at once, unless there was a request to end.

        Raises:
            SystemExit: there was one; the code is what a shell reports for the signal.
        """
        # Pending signals are taken lowest number first, and SIGCHLD is the highest of these.
        if (interrupt := self.next(0.0)) is not None:
            raise SystemExit(128 + interrupt.number)

    def let_through(self) -> None:
        """Unblocks the signals in a child between ``fork`` and ``exec``."""
        # First the default action, or a pending signal would run a handler that ``exec`` drops.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
