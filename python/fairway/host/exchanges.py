"""Runs of programs over several islands, which are nothing but collectives."""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fairway import _native
from fairway.host.backend import Backend
from fairway.host.collectives import Exchange
from fairway.host.moves import MESSAGE_TIMEOUT_S, Places, Spec
from fairway.host.objects import Failed, Lazy, Objects, error_text, resolve

Array = Any


class Exchanger:
    """Carries out exchanges beside the launches, one after another in one order on all hosts.

    Args:
        backend: this host's devices.
        objects: its buffers.
        plane: its end of the data plane.
        exchanges: its programs over several islands.
    """

    def __init__(
        self,
        backend: Backend,
        objects: Objects,
        plane: _native.DataPlane,
        exchanges: dict[int, Exchange],
    ) -> None:
        self._backend = backend
        self._objects = objects
        self._plane = plane
        self._exchanges = exchanges
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fairway-exchange")

    def exchange(
        self,
        executable: int,
        arguments: list[int],
        first_result: int,
        results: list[Spec],
        first_tag: int,
        client: int,
    ) -> None:
        """Runs an exchange."""
        values = [self._objects.get(number) for number in arguments]
        exchange = self._exchanges[executable]
        run = self._thread.submit(self._exchange_now, exchange, values, first_tag)
        for number in arguments:
            self._objects.note_use(number, run)
        for index, spec in enumerate(results):
            self._objects.values[first_result + index] = Lazy(
                functools.partial(self._exchanged, run, index, Places(spec))
            )

    def _exchange_now(self, exchange: Exchange, values: list[Any], first_tag: int) -> Any:
        try:
            local = exchange.local
            arguments = [
                {
                    position: self._backend.view(self._backend.shard(resolve(value), index))
                    for index, position in enumerate(local)
                }
                for value in values
            ]
            return exchange.run(self._plane, arguments, first_tag, MESSAGE_TIMEOUT_S)
        except Exception as error:
            failed = Failed(error_text(error))
            with contextlib.suppress(_native.StatusError):
                exchange.abandon(self._plane, first_tag, failed.text)
            return failed

    def _exchanged(self, run: Future[Any], index: int, places: Places) -> Array:
        outcome = run.result()
        if isinstance(outcome, Failed):
            raise outcome
        return places.make(self._backend, [outcome[index][position] for position in places.index])
