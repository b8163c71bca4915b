"""Console output: results go to standard output; notes, progress and errors to standard error."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from fairway.errors import ConfigError
from fairway.report.plots import drawing

__all__ = [
    "PICTURES",
    "Work",
    "check_folder",
    "check_output",
    "counted",
    "duration",
    "fail",
    "note",
    "ranges",
    "renamed",
    "results",
    "terminal",
    "working",
]

# No markup: names of fabrics, files and functions contain brackets and colons.
terminal = Console(stderr=True, markup=False, emoji=False, highlight=False)

PICTURES = (".png", ".svg", ".pdf")
LINE_EVERY_S = 10.0
"""Seconds between progress lines where standard error is no terminal."""


def results() -> Console:
    """Returns the console on which a command prints its result."""
    return Console(markup=False, emoji=False)


def note(text: str) -> None:
    """Writes one line to standard error that is not a result."""
    print(f"fairway: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> None:
    """Writes an error, in the form common to all commands."""
    terminal.print(Text.assemble(("fairway: error:", "bold red"), f" {text}"), soft_wrap=True)


def renamed(path: Path | None, old: Path | None, name: str, was: str) -> Path | None:
    """Returns the value of an option that may be given by its old name; notes the new name."""
    if old is None:
        return path
    note(f"note: {was} is now called {name}")
    return old


class Work:
    """Progress of a long operation: activity, part done and estimated time left.

    Args:
        text: the current activity.
        expected_s: duration on an otherwise idle machine in seconds, if known beforehand.
    """

    def __init__(self, text: str, expected_s: float | None = None) -> None:
        self._lock = threading.Lock()
        self._begun_s = time.monotonic()
        self._text = text
        self._done = 0.0
        self._total: float | None = None
        self._expected_s = expected_s
        self._end_s: float | None = None

    def update(
        self, done: float | None = None, total: float | None = None, text: str | None = None
    ) -> None:
        """Sets the part done, the total, or the current activity."""
        with self._lock:
            if text is not None:
                self._text = text
            if done is not None:
                self._done = done
            if total is not None:
                self._total = total
            if done is not None and self._total and 0 < done < self._total:
                now_s = time.monotonic()
                remaining = (self._total - done) / done
                self._end_s = now_s + (now_s - self._begun_s) * remaining

    def part(self) -> float | None:
        """Returns the part done, from 0 to 1; None if unknown."""
        with self._lock:
            return self._done / self._total if self._total else None

    def line(self) -> str:
        """Returns one line: activity, part done, elapsed time and estimated time left."""
        elapsed_s = time.monotonic() - self._begun_s
        part = self.part()
        with self._lock:
            text = self._text
            if part is not None and part < 1:
                text += f": {part:.0%}"
                if self._total is not None and self._total > 1:
                    text += f" ({self._done:,.0f} of {self._total:,.0f})"
            text += f", {duration(elapsed_s)} so far"
            end_s = self._end_s  # as of the last update: the time left decreases until the next
            if end_s is None and self._expected_s is not None:
                end_s = self._begun_s + self._expected_s
            if end_s is None or (part is not None and part >= 1):
                return text
            left_s = end_s - time.monotonic()
            return f"{text}, about {duration(left_s)} left" if left_s > -0.5 else text


@contextmanager
def working(text: str, expected_s: float | None = None) -> Iterator[Work]:
    """Shows progress on standard error: a bar on a terminal, else a line every ten seconds.

    Args:
        text: the current activity.
        expected_s: duration on an otherwise idle machine in seconds; printed first if above ten.
    """
    work = Work(text, expected_s)
    if expected_s is not None and expected_s > LINE_EVERY_S:
        note(f"{text}: about {duration(expected_s)} on a quiet machine")
    over = threading.Event()
    show = _show_bar if terminal.is_terminal else _show_lines
    thread = threading.Thread(target=show, args=(work, over), daemon=True)
    thread.start()
    try:
        yield work
    finally:
        over.set()
        thread.join(1.0)


def _show_lines(work: Work, over: threading.Event) -> None:
    while not over.wait(LINE_EVERY_S):
        note(work.line())


def _show_bar(work: Work, over: threading.Event) -> None:
    columns = (BarColumn(20), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task(work.line(), total=None)
        while not over.wait(0.2):
            part = work.part()
            shown = work.line()
            total = None if part is None else 1.0
            bar.update(task, description=shown, completed=part or 0.0, total=total)


def duration(seconds: float) -> str:
    """Formats a duration for people: ``8 s``, ``3 min 5 s``, ``2 h 10 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def counted(count: int, noun: str) -> str:
    """Formats a count with its noun: ``1 host``, ``2 hosts``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ranges(numbers: list[int]) -> str:
    """Formats ordered numbers: ``0-3, 7``."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1] = parts[-1][0], number
        else:
            parts.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def check_output(path: Path | None, kinds: tuple[str, ...]) -> None:
    """Checks that an output file can be written, before the long work instead of after it.

    Raises:
        ConfigError: the suffix is none of ``kinds``, or the file cannot be created.
    """
    if path is None:
        return
    if kinds == PICTURES:
        drawing()  # fails here if matplotlib is missing
    if kinds and path.suffix.lower() not in kinds:
        raise ConfigError(f"cannot write {path}; expected a name that ends in {', '.join(kinds)}")
    check_folder(path.parent)
    try:
        was_there = path.exists()
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def check_folder(path: Path | None) -> None:
    """Checks that a folder can be written; creates it, with a note, if its parent exists.

    Raises:
        ConfigError: it cannot be written or created, or its parent is missing as well.
    """
    if path is None:
        return
    if path.is_dir():
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"cannot write into {path}: permission denied")
        return
    try:
        path.mkdir()
    except FileNotFoundError:
        raise ConfigError(
            f"cannot write into {path}: there is no folder {path.parent}; create it first"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write into {path}: {error.strerror}") from error
    note(f"created the folder {path}")
