"""Trace of a host: records computations on each device and transfers on each channel.

Times are of the machine's monotonic clock, which all hosts of one machine share. A record is one
JSON array per line, whose first element selects :class:`RunRecord`, :class:`MoveRecord` or
:class:`CompileRecord`.

The order is that in which the host took its commands to run and to send; it and the tag are 0 if
unknown. Ends of runs are observed, so they can be late, and with them the start of the next run;
orders are exact.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

__all__ = ["CompileRecord", "MoveRecord", "Nanoseconds", "Record", "RunRecord", "Trace"]

FLUSH_EVERY_S = 0.5
LAST_S = 1.0
"""Time within which the last computations have ended when a trace is closed."""


# Hosts of other machines send them, so they are bounded.
Nanoseconds = Annotated[int, msgspec.Meta(ge=-(1 << 61), le=1 << 61)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
NAME_MAX = 1 << 12


class _Timed(msgspec.Struct, frozen=True, array_like=True):
    """What began and has ended."""

    start_ns: Nanoseconds
    end_ns: Nanoseconds

    def moved(self, by_ns: int) -> Self:
        """Returns the same record by a clock that is ahead by ``by_ns``."""
        start, end = self.start_ns + by_ns, self.end_ns + by_ns
        return msgspec.structs.replace(self, start_ns=start, end_ns=end)


class RunRecord(_Timed, frozen=True, array_like=True, tag="run"):
    """A computation of some devices of the host."""

    dispatch_ns: Nanoseconds
    devices: tuple[Number, ...]
    name: Annotated[str, msgspec.Meta(max_length=NAME_MAX)]
    client: Number
    arrived_ns: Nanoseconds
    order: Number

    def moved(self, by_ns: int) -> Self:
        """Returns the same record by a clock that is ahead by ``by_ns``."""
        return msgspec.structs.replace(super().moved(by_ns), arrived_ns=self.arrived_ns + by_ns)


class MoveRecord(_Timed, frozen=True, array_like=True, tag="move"):
    """A transfer to or from another host."""

    peer: Number
    size: Number
    direction: Literal["out", "in"]
    channel: Number
    tag: Number
    order: Number


class CompileRecord(_Timed, frozen=True, array_like=True, tag="compile"):
    """A compilation."""

    name: Annotated[str, msgspec.Meta(max_length=NAME_MAX)]
    how: Annotated[str, msgspec.Meta(max_length=NAME_MAX)]


Record = RunRecord | MoveRecord | CompileRecord


class Trace:
    """Records of one host.

    Args:
        path: file that the records are appended to.
    """

    def __init__(self, path: Path) -> None:
        self._failed = False
        # A previous process of this host may have written to it. Without a buffer: what did not fit
        # of one would be written at the end.
        self._file = path.open("ab", buffering=0)
        self._runs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lines: list[bytes] = []
        self._lock = threading.Lock()
        # From the clock, so that a host that is started again continues the order of its file.
        self._orders = itertools.count(time.monotonic_ns())
        self._flushed = time.monotonic()
        self._thread = threading.Thread(target=self._follow, name="fairway-trace", daemon=True)
        self._thread.start()

    def next_order(self) -> int:
        """Returns the order of a command that the host takes now."""
        return next(self._orders)

    def run(
        self,
        token: Any,
        times_ns: tuple[int, int],
        devices: tuple[int, ...],
        name: str,
        client: int,
    ) -> None:
        """Records a launch; ``token`` becomes ready when its computation ends.

        Args:
            token: token of the computation.
            times_ns: when its command arrived, and when its dispatch to the devices began.
            devices: the devices that compute.
            name: name of the function.
            client: the client that issued it.
        """
        handed = time.monotonic_ns()
        launched = (client, self.next_order())
        self._runs.put((token, (*times_ns, handed), devices, name[:NAME_MAX], launched))

    def move(
        self,
        begun: tuple[int, int],
        peer: int,
        size: int,
        direction: Literal["out", "in"],
        channel: int = 0,
        tag: int = 0,
    ) -> None:
        """Records a transfer that has just ended.

        Args:
            begun: when it began, and the order of its command.
            peer: the other host.
            size: its bytes.
            direction: ``"out"`` or ``"in"``.
            channel: the channel that it took.
            tag: its tag; 0 if it has none.
        """
        begun_ns, order = begun
        ended_ns = time.monotonic_ns()
        self._note(MoveRecord(begun_ns, ended_ns, peer, size, direction, channel, tag, order))

    def compiled(self, begun_ns: int, name: str, how: str) -> None:
        """Records a compilation that has just ended."""
        self._note(CompileRecord(begun_ns, time.monotonic_ns(), name[:NAME_MAX], how))

    def close(self) -> None:
        """Writes the remaining records; of computations that have not ended soon, none."""
        self._runs.put(None)
        self._thread.join(LAST_S)
        with self._lock:
            self._write()

    def _follow(self) -> None:
        """Waits for the end of each run, in the order of launches."""
        ended = 0
        while (launched := self._runs.get()) is not None:
            token, (arrived, begun, handed), devices, name, (client, order) = launched
            with contextlib.suppress(Exception):  # the error is raised where the result is used
                token.block_until_ready()
            start = max(begun, ended)
            ended = time.monotonic_ns()
            dispatch = handed - begun
            run = RunRecord(start, ended, dispatch, devices, name, client, arrived, order)
            self._note(run)

    def _note(self, record: Record) -> None:
        with self._lock:
            self._lines.append(msgspec.json.encode(record))
            if time.monotonic() - self._flushed > FLUSH_EVERY_S:
                self._write()

    def _write(self) -> None:
        if not self._failed:
            try:
                self._file.write(b"".join(line + b"\n" for line in self._lines))
            except OSError as error:  # a full disk ends no computation
                self._failed = True
                print(f"records are lost from here on: {error.strerror}", flush=True)
        self._lines.clear()
        self._flushed = time.monotonic()
