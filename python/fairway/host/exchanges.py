"""Exchanges: collectives over several islands, and sparse exchanges of rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from fairway import _native
from fairway.host.backend import Backend
from fairway.host.collectives import LoweredExchange
from fairway.host.groups import Given, Made, OverGroups, Peer
from fairway.host.moves import MESSAGE_TIMEOUT_S, Places, Spec
from fairway.host.objects import Failed, Lazy, Objects, error_text, resolve
from fairway.host.plans import PlannedRun
from fairway.host.sparse import Collect, Dispatch, Held, Kinds, Message, direction
from fairway.host.teams import Teams, Turn
from fairway.host.trace import Trace
from fairway.host.wire import MOVED, Reporter

Array = Any


class Exchanger:
    """Runs exchanges concurrently with launches, one after another in one order on all hosts.

    Args:
        backend: this host's devices.
        host: this host's number over all islands.
        objects: its buffers.
        plane: its end of the data plane.
        teams: its teams for collectives.
        exchanges: its programs over several islands.
        report: sends reports to the controller.
        trace: records transfers, if set.
    """

    def __init__(
        self,
        backend: Backend,
        host: int,
        objects: Objects,
        plane: _native.DataPlane,
        teams: Teams,
        exchanges: dict[int, LoweredExchange],
        report: Reporter,
        trace: Trace | None,
    ) -> None:
        self._backend = backend
        self._host = host
        self._objects = objects
        self._plane = plane
        self._teams = teams
        self._exchanges = exchanges
        self._report = report
        self._trace = trace
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fairway-exchange")

    # Programs that consist of collectives

    def exchange(
        self,
        executable: int,
        arguments: list[int],
        first_result: int,
        results: list[Spec],
        first_tag: int,
        client: int,
    ) -> None:
        """Runs a program over several islands."""
        values = [self._objects.get(number) for number in arguments]
        exchange = self._exchanges[executable]
        run = self._thread.submit(self._exchange_now, exchange, values, first_tag)
        for number in arguments:
            self._objects.note_use(number, run)
        for index, spec in enumerate(results):
            self._objects.values[first_result + index] = Lazy(
                functools.partial(self._exchanged, run, index, Places(spec))
            )

    def _exchange_now(self, exchange: LoweredExchange, values: list[Any], first_tag: int) -> Any:
        def act(turn: Turn) -> Any:
            local = exchange.local
            arguments = [
                {
                    position: self._backend.view(self._backend.shard(resolve(value), index))
                    for index, position in enumerate(local)
                }
                for value in values
            ]
            return exchange.run(turn, arguments)

        return _in_turn(Turn(self._teams, exchange.carries, first_tag), act)

    def _exchanged(self, run: Future[Any], index: int, places: Places) -> Array:
        outcome = _outcome(run)
        return places.make(self._backend, [outcome[index][position] for position in places.index])

    # Sparse exchanges

    def sparse(
        self,
        kind: list[int],
        ends: list[int],
        given: Given,
        made: Made,
        targets: list[Peer],
        sources: list[Peer],
        number: int = 0,
        after: Sequence[int] = (),
        client: int = 0,
        planned: PlannedRun | None = None,
    ) -> None:
        """Performs this host's part of an exchange between groups.

        Args:
            kind: see :func:`fairway.host.sparse.direction`.
            ends: likewise.
            given: arguments on this host.
            made: results on this host.
            targets: hosts that receive a message from this host, including itself.
            sources: hosts that send a message to this host.
            number: number of the collective in its program, if it is a collective.
            after: collectives that it waits for.
            client: the client that issued it.
            planned: the run that it belongs to, if the run follows a plan.
        """
        collective = OverGroups.read(kind, ends, made, sources)
        if collective is not None:
            exchange = collective.part(self._host)
            threads: Executor = self._thread
            if planned is not None and planned.is_kept:
                turn = planned.turn(number, exchange.carries)
                threads = planned.threads
            else:
                # The first tag of all, under which no message is sent.
                first_tag = sources[0][1] - [host for host, *_ in sources].index(self._host)
                turn = Turn(self._teams, exchange.carries, first_tag)
            self._collective(collective.kind, exchange, given, made, turn, client, threads)
            return
        part = _Part(
            direction(kind, ends),
            [([self._objects.get(n) for n in numbers], shards) for numbers, shards in given],
            [([(n, Places(spec)) for n, spec in group], shards) for group, shards in made],
            targets,
            sources,
            client,
        )
        for host, tag, _ in part.elsewhere(sources, self._host):
            self._plane.expect(tag, host)
        run = self._thread.submit(self._sparse_now, part)
        for numbers, _ in given:
            for number in numbers:
                self._objects.note_use(number, run)
        for group, shards in part.made:
            for index, (number, places) in enumerate(group):
                make = functools.partial(self._received, run, shards, index, places)
                self._objects.values[number] = Lazy(make)

    # Collectives over groups of devices

    def _collective(
        self,
        kind: str,
        exchange: LoweredExchange,
        given: Given,
        made: Made,
        turn: Turn,
        client: int,
        threads: Executor,
    ) -> None:
        """Performs this host's part of a collective."""
        arguments = [(self._objects.get(number), shards) for (number,), shards in given]
        run = threads.submit(self._collective_now, kind, exchange, arguments, turn, client)
        for (number,), _ in given:
            self._objects.note_use(number, run)
        for ((number, spec),), shards in made:
            make = functools.partial(self._brought, run, shards, Places(spec))
            self._objects.values[number] = Lazy(make)

    def _collective_now(
        self,
        kind: str,
        exchange: LoweredExchange,
        given: list[tuple[Any, list[int]]],
        turn: Turn,
        client: int,
    ) -> Any:
        def act(turn: Turn) -> Any:
            held = {
                shard: self._backend.view(one)
                for value, shards in given
                for shard, one in zip(shards, self._backend.shards(resolve(value)), strict=True)
            }
            if kind == "gather":
                held = {shard: one[np.newaxis] for shard, one in held.items()}
            begun = time.monotonic_ns()
            [brought] = exchange.run(turn, [held])
            for carry in exchange.carries:
                self._report.send(MOVED, client, carry.sent_bytes)
                if self._trace is not None:
                    self._trace.move(begun, carry.hosts[-1], carry.sent_bytes, "out")
            if kind == "scatter":
                return {shard: one[0] for shard, one in brought.items()}
            return brought

        return _in_turn(turn, act)

    def _brought(self, run: Future[Any], shards: list[int], places: Places) -> Array:
        brought = _outcome(run)
        return places.make(self._backend, [brought[shard] for shard in shards])

    def _sparse_now(self, part: _Part) -> Held | Failed:
        unsent, untaken = list(part.targets), list(part.sources)
        try:
            own = self._give(part, unsent)
            kinds = part.kinds()
            messages = []
            while untaken:
                host, tag, _ = untaken.pop()
                mine = host == self._host
                data = own if mine else self._plane.take(tag, MESSAGE_TIMEOUT_S)
                (shape, dtype), *_ = next(iter(kinds.values()))
                messages.append(Message.read(data, part.direction.keys, dtype, part.tail(shape)))
            return part.direction.unpack(messages, kinds) if kinds else {}
        except Exception as error:
            failed = Failed(error_text(error))
            for host, tag, _ in part.elsewhere(unsent, self._host):
                with contextlib.suppress(_native.StatusError):
                    self._plane.send_failure(host, tag, failed.text)
            for _, tag, _ in part.elsewhere(untaken, self._host):
                self._plane.discard(tag)
            return failed

    def _give(self, part: _Part, unsent: list[Peer]) -> Any:
        """Sends this host's rows to other hosts; returns the rows that stay here."""
        held: Held = {}
        for values, shards in part.given:
            arrays = [self._backend.shards(resolve(value)) for value in values]
            for shard, *ones in zip(shards, *arrays, strict=True):
                held[shard] = [self._backend.view(one) for one in ones]
        if not held:
            return None
        own, moved = None, 0
        packed = part.direction.pack(held, [shards for _, _, shards in part.targets])
        for (host, tag, _), data in zip(part.targets, packed, strict=True):
            begun = time.monotonic_ns()
            if host == self._host:
                own = data
            else:
                self._plane.send(host, tag, data.data)
                moved += data.nbytes
                if self._trace is not None:
                    self._trace.move(begun, host, data.nbytes, "out")
            unsent.pop(0)
        if moved:
            self._report.send(MOVED, part.client, moved)
        return own

    def _received(self, run: Future[Any], shards: list[int], index: int, places: Places) -> Array:
        held = _outcome(run)
        return places.make(self._backend, [held[shard][index] for shard in shards])


def _in_turn(turn: Turn, act: Callable[[Turn], Any]) -> Any:
    """Runs an exchange; on failure poisons it for the other hosts and returns the error."""
    try:
        return act(turn)
    except Exception as error:
        failed = Failed(error_text(error))
        turn.abandon(failed.text)
        return failed


def _outcome(run: Future[Any]) -> Any:
    """Returns the result of a run.

    Raises:
        Failed: the run has failed.
    """
    outcome = run.result()
    if isinstance(outcome, Failed):
        raise outcome
    return outcome


@dataclasses.dataclass(frozen=True)
class _Part:
    """One host's part of a sparse exchange.

    Attributes:
        direction: dispatch or collect.
        given: the values of each group of arguments, and the numbers of their shards here.
        made: the same of the results.
        targets: hosts that receive a message.
        sources: hosts that send a message.
        client: the client that issued it.
    """

    direction: Dispatch | Collect
    given: list[tuple[list[Any], list[int]]]
    made: list[tuple[list[tuple[int, Places]], list[int]]]
    targets: list[Peer]
    sources: list[Peer]
    client: int

    def kinds(self) -> Kinds:
        """Returns shape and type of the results of each shard."""
        return {
            shard: [(places.shapes[index], places.dtype) for _, places in group]
            for group, shards in self.made
            for index, shard in enumerate(shards)
        }

    def tail(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of one row, given the shape of a result."""
        return shape[1:] if isinstance(self.direction, Dispatch) else shape[2:]

    @staticmethod
    def elsewhere(peers: list[Peer], host: int) -> Iterator[Peer]:
        """Returns the peers other than this host."""
        return (peer for peer in peers if peer[0] != host)
