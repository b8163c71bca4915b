"""Requests to end (Ctrl-C and its kin), fetched where that suits.

A signal handler that raises may do so between any two lines, also between the one that makes a
thing and the one that remembers to remove it. So these signals are held back by the kernel, and
whoever is ready for one asks for it.
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
"""How often a wait looks for a signal that came just before it began, and so did not end it."""
SI_KERNEL = 0x80
"""``si_code`` of a signal that the kernel sent by itself."""


def run_aside(work: Callable[[], Result]) -> Result:
    """Runs ``work`` in another thread and waits, so that Ctrl-C is heard whatever it is busy with.

    For work that has nothing to clean up: the thread is left behind, and ends with the process.

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
    if error is not None:
        raise error
    return cast(Result, result)


@dataclasses.dataclass(frozen=True)
class Interrupt:
    """One request to end.

    Attributes:
        number: the signal.
        from_terminal: it is a terminal's Ctrl-C, so all processes of our group got it; any other
            may have come to this process alone, as a terminal's end does to a session's leader.
    """

    number: signal.Signals
    from_terminal: bool


class Interrupts:
    """The requests to end that this process gets: SIGINT, SIGTERM, and SIGHUP but for ``nohup``.

    From when this exists until the process ends, they and SIGCHLD are blocked in the calling
    thread and in all threads and processes that it starts from then on; make it before them. A
    program that is started must call ``let_through`` or unblock them itself.
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
            timeout_s: how long; none waits without end.

        Returns:
            The request, or none if first a child ends or stops, or time is up.
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
            SystemExit: there was; its code is what a shell shows for the signal.
        """
        # Of the signals that are pending the lowest comes first, and SIGCHLD is the highest.
        if (interrupt := self.next(0.0)) is not None:
            raise SystemExit(128 + interrupt.number)

    def let_through(self) -> None:
        """For a child between ``fork`` and ``exec``: it takes signals as any program does."""
        # First the default, or a signal that waits would run a handler that ``exec`` forgets.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
