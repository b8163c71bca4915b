"""Trace of a host: records computations on each device and transfers on each channel.

Times are of the machine's monotonic clock, which all hosts of one machine share. A record is one
JSON array per line:

- ``["run", start_ns, end_ns, dispatch_ns, devices, name, client, arrived_ns, order]``
- ``["move", start_ns, end_ns, peer, bytes, "out" | "in", channel, tag, order]``
- ``["compile", start_ns, end_ns, name, how]``

The order is that in which the host took its commands to run and to send; it and the tag are 0 if
unknown. Ends of runs are observed, so they can be late, and with them the start of the next run;
orders are exact.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["Trace"]

FLUSH_EVERY_S = 0.5


class Trace:
    """Records of one host.

    Args:
        path: file that the records are appended to.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")  # a previous process of this host may have written to it
        self._runs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lines: list[str] = []
        self._lock = threading.Lock()
        # From the clock, so that a host that is started again continues the order of its file.
        self._orders = itertools.count(time.monotonic_ns())
        self._flushed = time.monotonic()
        threading.Thread(target=self._follow, name="fairway-trace", daemon=True).start()

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
        self._runs.put((token, (*times_ns, handed), devices, name, (client, self.next_order())))

    def move(
        self,
        begun: tuple[int, int],
        peer: int,
        size: int,
        direction: str,
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
        self._note(["move", begun_ns, ended_ns, peer, size, direction, channel, tag, order])

    def compiled(self, begun_ns: int, name: str, how: str) -> None:
        """Records a compilation that has just ended."""
        self._note(["compile", begun_ns, time.monotonic_ns(), name, how])

    def close(self) -> None:
        """Writes the remaining records."""
        with self._lock:
            self._write()

    def _follow(self) -> None:
        """Waits for the end of each run, in the order of launches."""
        ended = 0
        while True:
            token, (arrived, begun, handed), devices, name, (client, order) = self._runs.get()
            with contextlib.suppress(Exception):  # the error is raised where the result is used
                token.block_until_ready()
            start = max(begun, ended)
            ended = time.monotonic_ns()
            dispatch = handed - begun
            self._note(["run", start, ended, dispatch, devices, name, client, arrived, order])

    def _note(self, record: list[Any]) -> None:
        with self._lock:
            self._lines.append(json.dumps(record))
            if time.monotonic() - self._flushed > FLUSH_EVERY_S:
                self._write()

    def _write(self) -> None:
        self._file.write("".join(f"{line}\n" for line in self._lines))
        self._file.flush()
        self._lines.clear()
        self._flushed = time.monotonic()
