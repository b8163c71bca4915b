"""Exchanges: collectives over several islands, and exchanges of rows."""

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
from fairway.host import messages
from fairway.host.collectives import Ended, LoweredExchange
from fairway.host.groups import OverGroups
from fairway.host.local import LocalHost
from fairway.host.messages import GroupCollective, PeerMessage
from fairway.host.moves import MESSAGE_TIMEOUT_S, Places
from fairway.host.objects import Failed, Lazy, Objects, error_text, resolve
from fairway.host.plans import PlannedRun
from fairway.host.sparse import Collect, Dispatch, Held, Kinds, Message, direction
from fairway.host.teams import Carry, Teams, Turn

Array = Any


class Exchanger:
    """Runs exchanges concurrently with launches, one after another in one order on all hosts.

    Args:
        host: this host.
        objects: its buffers.
        teams: its teams for collectives.
        exchanges: its programs over several islands.
    """

    def __init__(
        self,
        host: LocalHost,
        objects: Objects,
        teams: Teams,
        exchanges: dict[int, LoweredExchange],
    ) -> None:
        self._backend = host.backend
        self._host = host.number
        self._objects = objects
        self._plane = host.plane
        self._teams = teams
        self._exchanges = exchanges
        self._report = host.report
        self._trace = host.trace
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fairway-exchange")

    # Programs that consist of collectives

    def exchange(self, command: messages.RunExchange) -> None:
        """Runs a program over several islands."""
        values = [self._objects.get(number) for number in command.args]
        exchange = self._exchanges[command.executable]
        turn = Turn(self._teams, exchange.carries, command.first_tag)
        ended = functools.partial(self._ended, command.client, self._order())
        run = self._thread.submit(self._exchange_now, exchange, values, turn, ended)
        for number in command.args:
            self._objects.note_use(number, run)
        for index, spec in enumerate(command.results):
            self._objects.values[command.first_result + index] = Lazy(
                functools.partial(self._exchanged, run, index, Places(spec))
            )

    def _exchange_now(
        self, exchange: LoweredExchange, values: list[Any], turn: Turn, ended: Ended
    ) -> Any:
        def act(turn: Turn) -> Any:
            local = exchange.local
            arguments = [
                {
                    position: self._backend.view(self._backend.shard(resolve(value), index))
                    for index, position in enumerate(local)
                }
                for value in values
            ]
            return exchange.run(turn, arguments, ended)

        return _in_turn(turn, act)

    def _exchanged(self, run: Future[Any], index: int, places: Places) -> Array:
        outcome = _outcome(run)
        return places.make(self._backend, [outcome[index][position] for position in places.index])

    # Exchanges of rows

    def row_exchange(self, command: messages.RowExchange, client: int = 0) -> None:
        """Performs this host's part of an exchange of rows.

        Args:
            command: the exchange.
            client: the client that issued it.
        """
        part = _Part(
            direction(command),
            [
                ([self._objects.get(n) for n in group.buffers], group.shards)
                for group in command.given
            ],
            [
                ([(value.buffer, Places(value.spec)) for value in group.values], group.shards)
                for group in command.made
            ],
            command.targets,
            command.sources,
            client,
            self._order(),
        )
        for peer in part.elsewhere(command.sources, self._host):
            self._plane.expect(peer.tag, peer.host)
        run = self._thread.submit(self._exchange_rows_now, part)
        for group in command.given:
            for number in group.buffers:
                self._objects.note_use(number, run)
        for values, shards in part.made:
            for index, (number, places) in enumerate(values):
                make = functools.partial(self._received, run, shards, index, places)
                self._objects.values[number] = Lazy(make)

    # Collectives over groups of devices

    def collective(
        self, command: messages.Collective, client: int = 0, planned: PlannedRun | None = None
    ) -> None:
        """Performs this host's part of a collective.

        Args:
            command: the collective.
            client: the client that issued it.
            planned: the run that it belongs to, if the run follows a plan.
        """
        exchange = OverGroups.read(command).part(self._host)
        threads: Executor = self._thread
        if planned is not None and planned.is_kept:
            turn = planned.turn(command.number, exchange.carries)
            threads = planned.threads
        else:
            # The first tag of all, under which no message is sent.
            sources = command.sources
            first_tag = sources[0].tag - [peer.host for peer in sources].index(self._host)
            turn = Turn(self._teams, exchange.carries, first_tag)
        given = [(group.buffers[0], group.shards) for group in command.given]
        arguments = [(self._objects.get(number), shards) for number, shards in given]
        ended = functools.partial(self._ended, client, self._order())
        run = threads.submit(self._collective_now, command.kind, exchange, arguments, turn, ended)
        for number, _ in given:
            self._objects.note_use(number, run)
        for made in command.made:
            value = made.values[0]
            make = functools.partial(self._brought, run, made.shards, Places(value.spec))
            self._objects.values[value.buffer] = Lazy(make)

    def _collective_now(
        self,
        kind: GroupCollective,
        exchange: LoweredExchange,
        given: list[tuple[Any, list[int]]],
        turn: Turn,
        ended: Ended,
    ) -> Any:
        def act(turn: Turn) -> Any:
            held = {
                shard: self._backend.view(one)
                for value, shards in given
                for shard, one in zip(shards, self._backend.shards(resolve(value)), strict=True)
            }
            if kind is GroupCollective.GATHER:
                held = {shard: one[np.newaxis] for shard, one in held.items()}
            [brought] = exchange.run(turn, [held], ended)
            if kind is GroupCollective.SCATTER:
                return {shard: one[0] for shard, one in brought.items()}
            return brought

        return _in_turn(turn, act)

    def _order(self) -> int:
        return 0 if self._trace is None else self._trace.next_order()

    def _ended(self, client: int, order: int, begun_ns: int, carries: Sequence[Carry]) -> None:
        """Reports and records collectives."""
        for carry in carries:
            self._report.send(messages.Moved(client, carry.sent_bytes))
            if self._trace is not None:
                self._trace.move((begun_ns, order), carry.hosts[-1], carry.sent_bytes, "out")

    def _brought(self, run: Future[Any], shards: list[int], places: Places) -> Array:
        brought = _outcome(run)
        return places.make(self._backend, [brought[shard] for shard in shards])

    def _exchange_rows_now(self, part: _Part) -> Held | Failed:
        unsent, untaken = list(part.targets), list(part.sources)
        try:
            own = self._give(part, unsent)
            kinds = part.kinds()
            messages = []
            while untaken:
                peer = untaken.pop()
                mine = peer.host == self._host
                data = own if mine else self._plane.take(peer.tag, MESSAGE_TIMEOUT_S)
                (shape, dtype), *_ = next(iter(kinds.values()))
                messages.append(Message.read(data, part.direction.keys, dtype, part.tail(shape)))
            return part.direction.unpack(messages, kinds) if kinds else {}
        except Exception as error:
            failed = Failed(error_text(error))
            for peer in part.elsewhere(unsent, self._host):
                with contextlib.suppress(_native.StatusError):
                    self._plane.send_failure(peer.host, peer.tag, failed.text)
            for peer in part.elsewhere(untaken, self._host):
                self._plane.discard(peer.tag)
            return failed

    def _give(self, part: _Part, unsent: list[PeerMessage]) -> Any:
        """Sends this host's rows to other hosts; returns the rows that stay here."""
        held: Held = {}
        for values, shards in part.given:
            arrays = [self._backend.shards(resolve(value)) for value in values]
            for shard, *ones in zip(shards, *arrays, strict=True):
                held[shard] = [self._backend.view(one) for one in ones]
        if not held:
            return None
        own, moved = None, 0
        packed = part.direction.pack(held, [peer.shards for peer in part.targets])
        for peer, data in zip(part.targets, packed, strict=True):
            begun = time.monotonic_ns(), part.order
            if peer.host == self._host:
                own = data
            else:
                self._plane.send(peer.host, peer.tag, data.data)
                moved += data.nbytes
                if self._trace is not None:
                    self._trace.move(begun, peer.host, data.nbytes, "out")
            unsent.pop(0)
        if moved:
            self._report.send(messages.Moved(part.client, moved))
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
    """One host's part of an exchange of rows.

    Attributes:
        direction: dispatch or collect.
        given: the values of each group of arguments, and the numbers of their shards here.
        made: the same of the results.
        targets: hosts that receive a message.
        sources: hosts that send a message.
        client: the client that issued it.
        order: the order of its command, for the trace.
    """

    direction: Dispatch | Collect
    given: list[tuple[list[Any], list[int]]]
    made: list[tuple[list[tuple[int, Places]], list[int]]]
    targets: list[PeerMessage]
    sources: list[PeerMessage]
    client: int
    order: int

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
    def elsewhere(peers: list[PeerMessage], host: int) -> Iterator[PeerMessage]:
        """Returns the peers other than this host."""
        return (peer for peer in peers if peer.host != host)
