"""Trace of a host: records computations on each device and transfers on each channel.

Times are of the machine's monotonic clock, which all hosts of one machine share. A record is one
JSON array per line:

- ``["run", start_ns, end_ns, dispatch_ns, devices, name, client, arrived_ns]``
- ``["move", start_ns, end_ns, peer, bytes, "out" | "in", channel, tag]``; the tag is 0 if unknown
- ``["compile", start_ns, end_ns, name, how]``
"""

from __future__ import annotations

import contextlib
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
        self._flushed = time.monotonic()
        threading.Thread(target=self._follow, name="fairway-trace", daemon=True).start()

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
        self._runs.put((token, times_ns, time.monotonic_ns(), devices, name, client))

    def move(
        self, begun_ns: int, peer: int, size: int, direction: str, channel: int = 0, tag: int = 0
    ) -> None:
        """Records a transfer that has just ended."""
        self._note(["move", begun_ns, time.monotonic_ns(), peer, size, direction, channel, tag])

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
            token, (arrived, begun), handed, devices, name, client = self._runs.get()
            with contextlib.suppress(Exception):  # the error is raised where the result is used
                token.block_until_ready()
            start = max(begun, ended)
            ended = time.monotonic_ns()
            self._note(["run", start, ended, handed - begun, devices, name, client, arrived])

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
