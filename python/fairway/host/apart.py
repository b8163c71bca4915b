"""Runs of programs that XLA executes in the thread that enqueues them.

A program on one device that calls functions of the client is executed at once (jaxlib 0.10.2), and
its client may take any time. So a thread of the device enqueues it, and what needs its results;
the thread that takes commands goes on with those of other clients.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fairway.host.executable import Executable
from fairway.host.objects import Lazy, Objects, resolve

__all__ = ["Apart", "RunAhead"]

WAITING_MAX = 64
"""Most runs of a device that wait for its thread (flow control)."""

Array = Any
Enqueued = tuple[list[Array], Any]
"""Results and token of a run."""


class RunAhead:
    """The token of a run that a thread enqueues."""

    def __init__(self, enqueued: Future[Enqueued]) -> None:
        self._enqueued = enqueued

    def block_until_ready(self) -> None:
        """Waits until the run has ended; raises its error."""
        self._enqueued.result()[1].block_until_ready()


class _Ahead(Lazy):
    """A result of a run that a thread enqueues."""

    __slots__ = ()


class Apart:
    """Threads that enqueue runs, one for each device.

    Args:
        objects: this host's buffers.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._waiting: dict[int, collections.deque[Future[Enqueued]]] = {}
        self._last: dict[int, tuple[int, RunAhead]] = {}

    def last(self) -> list[tuple[int, RunAhead]]:
        """Returns the last run of each device, and its client."""
        return list(self._last.values())

    @staticmethod
    def takes(program: Executable, inputs: Sequence[Any]) -> bool:
        """Returns whether a program is run by a thread of its device."""
        return (
            program.devices == 1
            and not program.is_shared
            and (
                program.calls is not None
                or any(isinstance(value, _Ahead) and not value.done() for value in inputs)
            )
        )

    def run(
        self,
        program: Executable,
        arguments: Sequence[int],
        issued: tuple[int, int],
        enqueue: Callable[[list[Array]], Enqueued],
    ) -> tuple[list[Lazy], RunAhead]:
        """Lets a thread enqueue a run; returns its results and its token.

        Args:
            program: what runs.
            arguments: the buffers of its arguments.
            issued: the client, and the number of results.
            enqueue: enqueues the run with these inputs, in the thread.
        """
        [device], (client, results) = program.local, issued
        inputs = [self._objects.values[number] for number in arguments]
        waiting = self._waiting.setdefault(device, collections.deque())
        while waiting and (waiting[0].done() or len(waiting) >= WAITING_MAX):
            with contextlib.suppress(Exception):  # its error is that of its results
                waiting.popleft().result()
        if device not in self._threads:
            self._threads[device] = ThreadPoolExecutor(1, f"fairway-device-{device}")
        enqueued = self._threads[device].submit(lambda: enqueue([resolve(one) for one in inputs]))
        waiting.append(enqueued)
        for number in arguments:
            self._objects.note_use(number, enqueued)
        token = RunAhead(enqueued)
        self._last[device] = client, token
        return [_Ahead(_result(enqueued, index)) for index in range(results)], token


def _result(enqueued: Future[Enqueued], index: int) -> Callable[[], Array]:
    return lambda: enqueued.result()[0][index]
