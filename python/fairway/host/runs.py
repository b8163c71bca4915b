"""Runs whole programs: this host's commands are loaded once, and a run is one command."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from fairway.host import messages
from fairway.host.exchanges import Exchanger
from fairway.host.launches import Launcher
from fairway.host.moves import Mover
from fairway.host.objects import Objects
from fairway.host.plans import PlannedRun, Plans

Step = Callable[["ProgramRun"], None]


class ProgramRun:
    """One run: maps slots and tags of its program to buffers and messages.

    Attributes:
        numbers: the buffers of the first slots.
        shift: offset from any other slot to its buffer.
        first_tag: offset of tags.
        client: the client that issued it.
        planned: its planned collectives; None if it has no plan.
    """

    __slots__ = ("client", "first_tag", "numbers", "planned", "shift")

    def __init__(
        self,
        numbers: list[int],
        shift: int,
        first_tag: int,
        client: int,
        planned: PlannedRun | None,
    ) -> None:
        self.numbers = numbers
        self.shift = shift
        self.first_tag = first_tag
        self.client = client
        self.planned = planned

    def buffer(self, slot: int) -> int:
        """Returns the buffer of a slot."""
        numbers = self.numbers
        return numbers[slot] if slot < len(numbers) else slot + self.shift


class Runner:
    """Executes commands about whole programs.

    Args:
        objects: this host's buffers.
        launcher: enqueues calls on the devices.
        mover: transfers arrays.
        exchanger: runs exchanges and collectives.
        plans: plans of collectives.
    """

    def __init__(
        self,
        objects: Objects,
        launcher: Launcher,
        mover: Mover,
        exchanger: Exchanger,
        plans: Plans,
    ) -> None:
        self._objects = objects
        self._launcher = launcher
        self._mover = mover
        self._exchanger = exchanger
        self._plans = plans
        self._programs: dict[int, list[Step]] = {}
        self._open: dict[int, PlannedRun] = {}
        """Runs that are issued in segments, by their first buffers."""

    def load(self, command: messages.LoadProgram) -> None:
        """Loads this host's commands of a program, executed in each run."""
        self._plans.load(command)
        launches = [step for step in command.steps if isinstance(step, messages.Launch)]
        self._launcher.announce(launch.executable for launch in launches)
        self._programs[command.executable] = [self._bind(step) for step in command.steps]

    def unload(self, executable: int) -> None:
        """Forgets a program."""
        self._programs.pop(executable, None)
        self._plans.unload(executable)

    def run(self, command: messages.RunProgram) -> None:
        """Runs a program or a segment of it, if it is next in the island's order.

        Raises:
            LaunchOrderError: it is not; the hosts of the island have diverged in order.
        """
        self._launcher.begin(command.sequence, command.previous)
        arguments, first_buffer = command.args, command.first_buffer
        (begin, end), shift = command.steps, first_buffer - len(arguments)
        planned = self._open.pop(first_buffer, None)
        if command.plan and begin == 0:
            planned = self._plans.begin(command, (arguments, shift))
        run = ProgramRun(arguments, shift, command.first_tag, command.client, planned)
        program = self._programs[command.executable]
        with self._launcher.part_of(first_buffer):
            for step in program[begin:end]:
                step(run)
        if planned is not None:
            if end < len(program):
                self._open[first_buffer] = planned
            else:
                planned.end()
        if command.completion is not None:
            self._objects.values[command.completion] = self._launcher.unfinished(command.client)
        self._launcher.end(command.acknowledge)

    def _bind(self, command: messages.Command) -> Step:
        """Returns a function that executes a command with the buffers and tags of a run."""
        match command:
            case messages.Launch():
                return self._launch(command)
            case messages.Free(slots):
                return lambda run: self._objects.free([run.buffer(slot) for slot in slots])
            case messages.Copy(source, number, spec):
                return lambda run: self._mover.copy(
                    messages.Copy(run.buffer(source), number + run.shift, spec)
                )
            case messages.AssembleShards():
                return self._assemble_shards(command)
            case messages.Send():
                return self._send(command)
            case messages.Receive():
                return self._receive(command)
            case messages.Relay(relays):
                return lambda run: self._mover.relay(
                    messages.Relay(_relayed(relays, run.first_tag))
                )
            case messages.Collective():
                return lambda run: self._exchanger.collective(
                    _exchange_of(command, run), run.client, run.planned
                )
            case messages.RunExchange():
                return lambda run: self._exchanger.exchange(_exchange_all(command, run))
            case messages.RowExchange():
                return lambda run: self._exchanger.row_exchange(
                    _exchange_of(command, run), run.client
                )
        raise TypeError(f"a program cannot contain the command {type(command).__name__}")

    def _launch(self, command: messages.Launch) -> Step:
        launch = self._launcher.run
        slots, first_result = command.args, command.first_result

        def step(run: ProgramRun) -> None:
            arguments = [run.buffer(slot) for slot in slots]
            launch(command, arguments, first_result + run.shift, run.client)
            if run.planned is not None:
                run.planned.launched(self._launcher.last_token)

        return step

    def _send(self, command: messages.Send) -> Step:
        def step(run: ProgramRun) -> None:
            pieces = [
                messages.ShardSend(
                    piece.shard,
                    piece.region,
                    piece.tag + run.first_tag,
                    piece.target,
                    piece.channel,
                )
                for piece in command.pieces
            ]
            self._mover.send(messages.Send(run.buffer(command.source), pieces, run.client))

        return step

    def _receive(self, command: messages.Receive) -> Step:
        def step(run: ProgramRun) -> None:
            first = run.first_tag
            shards = [
                messages.ReceivedShard(
                    shard.positions,
                    [
                        messages.ShardPiece(piece.tag + first, piece.source, piece.region)
                        for piece in shard.pieces
                    ],
                )
                for shard in command.shards
            ]
            relays = _relayed(command.relays, first)
            number = command.buffer + run.shift
            self._mover.receive(messages.Receive(number, command.spec, shards, relays))

        return step

    def _assemble_shards(self, command: messages.AssembleShards) -> Step:
        def step(run: ProgramRun) -> None:
            shards = [
                messages.AssembledShard(shard.position, run.buffer(shard.source), shard.shard)
                for shard in command.shards
            ]
            number = command.buffer + run.shift
            self._mover.assemble_shards(messages.AssembleShards(number, command.spec, shards))

        return step


def _exchange_all(command: messages.RunExchange, run: ProgramRun) -> messages.RunExchange:
    """Returns an exchange with the buffers and tags of a run."""
    return messages.RunExchange(
        command.executable,
        [run.buffer(slot) for slot in command.args],
        command.first_result + run.shift,
        command.results,
        command.first_tag + run.first_tag,
        run.client,
    )


def _relayed(relays: list[messages.RelayHop], first_tag: int) -> list[messages.RelayHop]:
    """Returns messages to relay, with the tags of a run."""
    return [
        messages.RelayHop(
            hop.tag + first_tag, hop.source, hop.onward + first_tag, hop.target, hop.channel
        )
        for hop in relays
    ]


Exchange = TypeVar("Exchange", messages.Collective, messages.RowExchange)


def _exchange_of(command: Exchange, run: ProgramRun) -> Exchange:
    """Returns a collective or an exchange of rows with the buffers and tags of a run."""

    def tagged(peers: list[messages.PeerMessage]) -> list[messages.PeerMessage]:
        first = run.first_tag
        return [messages.PeerMessage(peer.host, peer.tag + first, peer.shards) for peer in peers]

    given = [
        messages.GivenGroup([run.buffer(slot) for slot in group.buffers], group.shards)
        for group in command.given
    ]
    made = [
        messages.MadeGroup(
            [messages.MadeValue(value.buffer + run.shift, value.spec) for value in group.values],
            group.shards,
        )
        for group in command.made
    ]
    return msgspec.structs.replace(
        command,
        given=given,
        made=made,
        targets=tagged(command.targets),
        sources=tagged(command.sources),
    )
