"""Reports of refused connections: a line each, and no flood of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Refusals"]

LINES = 20
"""Most refusals that have a line of their own within a period."""
PERIOD_S = 10.0


class Refusals:
    """Passes lines on about refused connections; of many at a time it says how many there were.

    Args:
        report: takes a line.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
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
            self._report(text)

    def _sum_up(self) -> None:
        with self._lock:
            more, self._timer, self._begun_s = self._count - LINES, None, float("-inf")
        self._report(f"refused {more:,} more connections within {PERIOD_S:.0f} s")

    def close(self) -> None:
        """Reports what is left."""
        with self._lock:
            timer = self._timer
        if timer is not None:
            timer.cancel()
            self._sum_up()
