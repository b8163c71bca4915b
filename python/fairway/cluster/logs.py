"""What hosts, agents and the controller print: kept in memory, and in files if asked for."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

import msgspec

__all__ = ["LogRecord", "Logs", "Outputs", "printable"]

KEPT_CHARACTERS = 1 << 16
"""What is kept of each host, also after it has ended; and of the controller."""
LINE_MAX = 1 << 11
"""Most characters of a record; longer lines become several."""
FILE_BYTES, FILES = 1 << 24, 4
"""Size of a file at which the next one begins, and how many there are."""
FILE = "fairway.jsonl"
READ_BYTES = 1 << 16
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LogRecord(msgspec.Struct, frozen=True):
    """A line that was printed.

    Attributes:
        number: in the order of all lines, from 1.
        time_s: when it was read, in seconds since 1970.
        island: of the host; None for the controller's own lines.
        host: None for the controller's own lines, and for those of an island's agents.
        text: the line, without its end.
    """

    number: int
    time_s: float
    island: int | None
    host: int | None
    text: str


def printable(text: str) -> str:
    r"""Returns a text whose control characters are written out, but for ends of lines and tabs.

    What another machine or a host says must not change the terminal of who reads it.

    >>> printable("a" + chr(27) + "[2J")
    'a\\\\x1b[2J'
    """
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class _Kept:
    """The last lines of one source."""

    def __init__(self) -> None:
        self.records: deque[LogRecord] = deque()
        self.characters = 0

    def add(self, record: LogRecord) -> None:
        self.records.append(record)
        self.characters += len(record.text) + 1
        while self.characters > KEPT_CHARACTERS:
            self.characters -= len(self.records.popleft().text) + 1


class _Rotated(RotatingFileHandler):
    """Files of a limited size; what does not fit on their disk is left out, which is said once."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not self.failed:
            self.failed = True
            error = sys.exception()
            why = error.strerror if isinstance(error, OSError) else error
            print(f"{self.baseFilename} is not complete: {why}", file=sys.stderr)


class Logs:
    """The last lines of the controller, and of each host.

    Args:
        folder: where all lines are written as well, as rotated files of JSON; None for nowhere.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._kept: dict[tuple[int | None, int | None], _Kept] = {}
        self._file: _Rotated | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _Rotated(
                folder / FILE, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8"
            )

    def add(self, text: str, island: int | None = None, host: int | None = None) -> None:
        """Keeps what was printed; each of its lines becomes a record, without empty ones."""
        for line in printable(text).split("\n"):
            for start in range(0, len(line), LINE_MAX):
                self._add(line[start : start + LINE_MAX], island, host)

    def _add(self, line: str, island: int | None, host: int | None) -> None:
        with self._lock:
            self._last += 1
            record = LogRecord(self._last, time.time(), island, host, line)
            self._kept.setdefault((island, host), _Kept()).add(record)
            if self._file is not None:
                text = msgspec.json.encode(record).decode()
                entry = logging.LogRecord("fairway", logging.INFO, "", 0, text, None, None)
                self._file.handle(entry)

    def read(
        self, after: int = 0, island: int | None = None, host: int | None = None
    ) -> list[LogRecord]:
        """Returns what is kept, in order.

        Args:
            after: number of the last record that is not wanted.
            island: only of this island; None for all.
            host: only of this host; None for all.
        """
        with self._lock:
            found = [
                record
                for (of_island, of_host), kept in self._kept.items()
                if island in (None, of_island) and host in (None, of_host)
                for record in kept.records
                if record.number > after
            ]
        return sorted(found, key=lambda record: record.number)

    def of_host(self, host: int) -> str:
        """Returns what is kept of a host."""
        return "\n".join(record.text for record in self.read(host=host))

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the rest does not fit, which has been said
                self._file.close()


class Outputs:
    """Reads the output of processes from pipes, in a thread for all of them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._ended: dict[int, threading.Event] = {}
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True, name="fairway-outputs")
        self._thread.start()

    def follow(self, stream: IO[bytes], take: Callable[[str], None]) -> threading.Event:
        """Hands each line of a stream on, until its end; then sets the event that it returns."""
        ended = threading.Event()
        reading = _read_lines(stream, take, ended)
        next(reading)
        os.set_blocking(stream.fileno(), False)
        with self._lock:
            self._selector.register(stream, selectors.EVENT_READ, reading)
        os.write(self._wake_write, b".")
        return ended

    def close(self) -> None:
        """Reads no more."""
        self._closing = True
        os.write(self._wake_write, b".")
        self._thread.join(5)

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, READ_BYTES)
                elif next(key.data, None) is None:
                    with self._lock:
                        self._selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
        with self._lock:
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _read_lines(
    stream: IO[bytes], take: Callable[[str], None], ended: threading.Event
) -> Iterator[bool]:
    """Yields after each look at a stream that has something to read, until its end."""
    rest = b""
    yield True
    while True:
        try:
            part = os.read(stream.fileno(), READ_BYTES)
        except BlockingIOError:
            yield True
            continue
        except OSError:
            part = b""
        lines = (rest + part).split(b"\n")
        rest = lines.pop() if part else b""
        if len(rest) > READ_BYTES:  # a line without end
            lines, rest = [*lines, rest], b""
        for line in lines:
            if line:
                take(line.decode(errors="replace").rstrip("\r"))
        if not part:
            ended.set()
            return
        yield True
