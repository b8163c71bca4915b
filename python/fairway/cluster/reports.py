"""What a controller says of what happens: kept in its logs, and printed without holding it up."""

from __future__ import annotations

import queue
import sys
import threading
import time

from fairway import _native
from fairway.cluster.logs import Logs

__all__ = ["Refusals", "Reports"]

WAITING = 256
"""Most lines that wait to be printed, as where a terminal is stopped; others are only kept."""
LINES = 20
"""Most refused connections that have a line of their own within a period."""
PERIOD_S = 60.0


class Reports:
    """Prints sentences to standard error, in a thread of its own; warnings of the core are some.

    A reader of standard error may stop reading: the gateway and the agents must not wait for it.

    Args:
        logs: keeps them.
    """

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._lines: queue.Queue[str | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._print, daemon=True, name="fairway-reports")
        self._thread.start()
        self._warnings = _native.Warnings(self.add)

    def add(self, text: str) -> None:
        """Keeps a sentence, and prints it soon."""
        self._logs.add(text)
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            return

    def close(self) -> None:
        """Prints what is left, for at most a second."""
        self._warnings.close()
        try:
            self._lines.put(None, timeout=1.0)
        except queue.Full:
            return
        self._thread.join(1.0)

    def _print(self) -> None:
        while (text := self._lines.get()) is not None:
            print(f"fairway: {text}", file=sys.stderr, flush=True)


class Refusals:
    """Reports refused connections: a line each, and of many at a time how many there were.

    Args:
        reports: takes the lines.
    """

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._lock = threading.Lock()
        self._begun_s = float("-inf")
        self._count = 0
        self._timer: threading.Timer | None = None

    def add(self, text: str) -> None:
        """Reports a refusal, at once or with others at the end of the period."""
        with self._lock:
            now_s = time.monotonic()
            if self._timer is None and now_s - self._begun_s >= PERIOD_S:
                self._begun_s, self._count = now_s, 0
            self._count += 1
            if self._count > LINES and self._timer is None:
                self._timer = threading.Timer(self._begun_s + PERIOD_S - now_s, self._sum_up)
                self._timer.daemon = True
                self._timer.start()
            is_shown = self._count <= LINES
        if is_shown:
            self._reports.add(text)

    def _sum_up(self) -> None:
        with self._lock:
            more, self._timer, self._begun_s = self._count - LINES, None, float("-inf")
        self._reports.add(f"refused {more:,} more connections within {PERIOD_S:g} s")

    def close(self) -> None:
        """Reports what is left."""
        with self._lock:
            timer = self._timer
        if timer is not None:
            timer.cancel()
            self._sum_up()
