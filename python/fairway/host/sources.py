"""Sources of inputs: batches that a user's function makes here, ahead of the launches."""

from __future__ import annotations

import collections
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from fairway.host import messages
from fairway.host.local import LocalHost
from fairway.host.objects import Failed
from fairway.host.parts import BatchPart, shard_of
from fairway.shards import Description

__all__ = ["Source", "status_text"]

Array = Any
SWITCH_INTERVAL_S = 1e-4
"""How long a function in plain Python may hold the interpreter lock while commands wait.

With Python's 5 ms, a tiny computation of another client takes 24 ms beside such a function, with
this 1.8 ms (1.1 ms without any; two shared cores).
"""
TRACEBACK_CHARACTERS = 4000
"""Most characters of a traceback that are reported; its end is kept."""


def status_text(who: str, error: BaseException) -> str:
    """Formats an error in the user's own code for the client, as ``CODE_NAME: message``."""
    trace = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]
    return f"UNKNOWN: {who} raised {type(error).__name__}: {error}\n{trace}"


class Source:
    """An input on this host.

    Args:
        host: this host.
        description: description of the input.
        function: returns an iterable of batches.
        parts: this host's part of each leaf.
        local: the local devices of its shards.
    """

    def __init__(
        self,
        host: LocalHost,
        description: Description,
        function: Callable[..., Any],
        parts: list[BatchPart],
        local: tuple[int, ...],
    ) -> None:
        self.description = description
        self.parts = parts
        self.local = local
        self.programs = 0
        """Number of programs that take its batches."""
        self._backend = host.backend
        self._host = host.number
        self._report = host.report
        self._function = function
        self._changed = threading.Condition()
        self._made: collections.deque[list[Array]] = collections.deque()
        self._room = description.prefetch
        self._taken = 0
        self._count = 0
        self._end: tuple[int, str] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts making batches; called once the controller knows the input."""
        with self._changed:
            if self._thread is None:
                sys.setswitchinterval(SWITCH_INTERVAL_S)
                name = f"fairway-input {self.description.function}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def hold(self, batches: int) -> None:
        """Makes at least ``batches`` batches ahead, as one run takes them all."""
        with self._changed:
            self._room = max(self._room, batches)
            self._changed.notify_all()

    def take(self) -> list[Array]:
        """Returns the next batch: this host's array of each leaf.

        Raises:
            Failed: the input has ended or failed, here or on another host.
        """
        with self._changed:
            number = self._taken
            self._taken += 1
            self._changed.wait_for(lambda: self._made or self._has_ended(number))
            if self._has_ended(number):
                assert self._end is not None
                raise Failed(self._end[1], is_common=True)
            batch = self._made.popleft()
            self._changed.notify_all()
            return batch

    def end(self, batches: int, error: str) -> None:
        """Returns ``error`` for every batch after the first ``batches``, and makes no more."""
        with self._changed:
            if self._end is None or batches < self._end[0]:
                self._end = batches, error
            while self._made and self._taken + len(self._made) > batches:
                self._made.pop()
            self._changed.notify_all()

    def _has_ended(self, number: int) -> bool:
        return self._end is not None and number >= self._end[0]

    def _run(self) -> None:
        """Makes batches until the function has no more, or the input was ended."""
        try:
            self._make_all()
            end = f"OUT_OF_RANGE: {self._name} has ended after {self._count} batches"
        except _UnwantedError:
            return
        except Failed as failed:
            end = failed.text
        except BaseException as error:  # any error must reach the client
            end = status_text(self._name, error)
        self.end(self._count, end)
        self._report.send(messages.BatchMade(self.description.number, end))

    def _make_all(self) -> None:
        self._wait_for_room()
        for batch in self._function(shard_of(self.parts), **self.description.config):
            arrays = self._place(batch)
            with self._changed:
                self._made.append(arrays)
                self._count += 1
                self._changed.notify_all()
            self._report.send(messages.BatchMade(self.description.number, None))
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._made) < self._room or self._has_ended(self._count)
            )
            if self._has_ended(self._count):
                raise _UnwantedError

    @property
    def _name(self) -> str:
        return f"the input {self.description.function} on host {self._host}"

    def _place(self, batch: Any) -> list[Array]:
        """Puts this host's part of a batch on its devices."""
        from jax.tree_util import keystr, tree_flatten_with_path  # imported on first use

        leaves = tree_flatten_with_path(batch)[0]
        paths = [keystr(path, simple=True, separator="/") for path, _ in leaves]
        if paths != self.description.paths:
            self._refuse(f"leaves {paths}", f"leaves {self.description.paths}")
        return [self._put(part, leaf) for part, (_, leaf) in zip(self.parts, leaves, strict=True)]

    def _put(self, part: BatchPart, leaf: Any) -> Array:
        elements = np.asarray(leaf)
        if (elements.dtype, elements.shape) != (part.dtype, part.shape):
            self._refuse(
                f"{elements.dtype}{list(elements.shape)} for leaf {part.path!r}",
                f"{part.dtype}{list(part.shape)}, its part {part.box} of each batch",
            )
        regions = (elements[region] for region in part.regions)
        shards = [np.ascontiguousarray(region).reshape(part.shard) for region in regions]
        return self._backend.put(
            part.dtype, part.shard, self.local, part.memory, shards, keeps=False
        )

    def _refuse(self, given: str, wanted: str) -> NoReturn:
        raise Failed(
            f"INVALID_ARGUMENT: {self._name} gave {given} as batch {self._count}; expected {wanted}"
        )


class _UnwantedError(Exception):
    """The input was ended, so no more batches are needed."""
