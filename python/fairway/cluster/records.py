"""Records of hosts on other machines: read where they are written, by the controller's clock."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec

from fairway.host.trace import Record

__all__ = ["Clock", "RecordReader"]

PART_BYTES = 1 << 16
"""Most bytes of records that are read at a time."""
SAMPLES = 32
"""Answers of the controller that its clock is estimated from: those of the last seconds, since
clocks drift."""


class Clock:
    """The controller's monotonic clock, estimated from the answers to heartbeats.

    An answer says what that clock was between the heartbeat and the answer. The one that took least
    says it best: the error is at most half the time that it took.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES)

    def add(self, sent_ns: int, there_ns: int, received_ns: int) -> None:
        """Notes an answer.

        Args:
            sent_ns: time of the heartbeat by this machine's clock.
            there_ns: time by the controller's clock.
            received_ns: time of the answer by this machine's clock.
        """
        took = received_ns - sent_ns
        self._samples.append((took, there_ns - sent_ns - took // 2))

    @property
    def ahead_ns(self) -> int | None:
        """By how much the controller's clock is ahead; None if no answer has come yet."""
        return min(self._samples)[1] if self._samples else None


class RecordReader:
    """Reads the records of a host while it writes them.

    Args:
        path: file of the records.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._decoder = msgspec.json.Decoder(Record)

    def next(self, ahead_ns: int) -> tuple[Record, ...]:
        """Returns the next records, by a clock that is ahead of the host's by ``ahead_ns``."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read(PART_BYTES)
        except FileNotFoundError:
            return ()  # the host has not started yet
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return tuple(self._decoder.decode(line).moved(ahead_ns) for line in whole.splitlines())
