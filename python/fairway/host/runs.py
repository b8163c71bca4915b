"""Runs whole programs: this host's commands are loaded once, and a run is one command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairway.host import wire
from fairway.host.exchanges import Exchanger
from fairway.host.groups import Given, Made, Peer
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

    def load(self, executable: int, steps: list[list[Any]]) -> None:
        """Loads this host's commands of a program, executed in each run."""
        make: dict[str, Callable[..., Step]] = {
            "launch": self._launch,
            "send": self._send,
            "receive": self._receive,
            "copy": self._copy,
            "gather": self._gather,
            "free": self._free,
            "sparse": self._sparse,
            "relay": self._relay,
        }
        self._plans.load(executable, steps)
        launches = wire.COMMANDS.index("launch")
        self._launcher.announce(step[3] for kind, *step in steps if kind == launches)
        self._programs[executable] = [make[wire.COMMANDS[kind]](*step) for kind, *step in steps]

    def unload(self, executable: int) -> None:
        """Forgets a program."""
        self._programs.pop(executable, None)
        self._plans.unload(executable)

    def run(
        self,
        sequence: int,
        previous: int,
        acknowledge: int,
        executable: int,
        steps: tuple[int, int],
        arguments: list[int],
        first_buffer: int,
        first_tag: int,
        completion: int,
        plan: int,
        client: int,
    ) -> None:
        """Runs a program or a segment of it, if it is next in the island's order.

        Raises:
            LaunchOrderError: it is not; the hosts of the island have diverged in order.
        """
        self._launcher.begin(sequence, previous)
        shift = first_buffer - len(arguments)
        planned = self._open.pop(first_buffer, None)
        if plan and steps[0] == 0:
            planned = self._plans.begin(executable, plan, first_tag, (arguments, shift))
        run = ProgramRun(arguments, shift, first_tag, client, planned)
        program = self._programs[executable]
        for step in program[slice(*steps)]:
            step(run)
        if planned is not None:
            if steps[1] < len(program):
                self._open[first_buffer] = planned
            else:
                planned.end()
        if completion:
            self._objects.values[completion] = self._launcher.unfinished()
        self._launcher.end(acknowledge)

    # One factory of steps for each kind of command; the returned function executes it in a run.

    def _launch(
        self,
        _sequence: int,
        _previous: int,
        _acknowledge: int,
        executable: int,
        arguments: list[int],
        first_result: int,
        results: int,
        keep: list[int],
        _completion: int,
        _client: int,
    ) -> Step:
        launch = self._launcher.run

        def step(run: ProgramRun) -> None:
            numbers = [run.buffer(slot) for slot in arguments]
            first = first_result + run.shift
            launch(executable, numbers, first, results, keep, 0, run.client)
            if run.planned is not None:
                run.planned.launched(self._launcher.last_token)

        return step

    def _send(self, source: int, pieces: list[Any], _client: int) -> Step:
        def step(run: ProgramRun) -> None:
            tagged = [
                (index, start, size, tag + run.first_tag, to, channel)
                for index, start, size, tag, to, channel in pieces
            ]
            self._mover.send(run.buffer(source), tagged, run.client)

        return step

    def _relay(self, relays: list[Any]) -> Step:
        return lambda run: self._mover.relay(_passed(relays, run.first_tag))

    def _receive(self, number: int, spec: Any, shards: list[Any], relays: list[Any]) -> Step:
        def step(run: ProgramRun) -> None:
            first = run.first_tag
            tagged = [
                (positions, [(tag + first, *rest) for tag, *rest in pieces])
                for positions, pieces in shards
            ]
            passed = _passed(relays, first)
            self._mover.receive(number + run.shift, spec, tagged, passed)

        return step

    def _copy(self, source: int, number: int, spec: Any) -> Step:
        return lambda run: self._mover.copy(run.buffer(source), number + run.shift, spec)

    def _gather(self, number: int, spec: Any, shards: list[Any]) -> Step:
        def step(run: ProgramRun) -> None:
            bound = [(position, run.buffer(source), index) for position, source, index in shards]
            self._mover.gather(number + run.shift, spec, bound)

        return step

    def _sparse(
        self,
        kind: list[int],
        ends: list[int],
        given: Given,
        made: Made,
        targets: list[Peer],
        sources: list[Peer],
        number: int,
        _after: list[int],
    ) -> Step:
        def step(run: ProgramRun) -> None:
            def tagged(peers: list[Peer]) -> list[Peer]:
                return [(host, tag + run.first_tag, shards) for host, tag, shards in peers]

            bound = [([run.buffer(slot) for slot in slots], shards) for slots, shards in given]
            making = [
                ([(slot + run.shift, spec) for slot, spec in group], shards)
                for group, shards in made
            ]
            peers = tagged(targets), tagged(sources)
            self._exchanger.sparse(
                kind, ends, bound, making, *peers, number, client=run.client, planned=run.planned
            )

        return step

    def _free(self, slots: list[int]) -> Step:
        return lambda run: self._objects.free([run.buffer(slot) for slot in slots])


def _passed(relays: list[Any], first_tag: int) -> list[Any]:
    """Returns messages to relay, with the tags of a run."""
    return [
        (tag + first_tag, sender, onward + first_tag, to, channel)
        for tag, sender, onward, to, channel in relays
    ]
