"""This host's part of a run of a program, as a step that can be planned."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from fairway.communication.steps import After, Step, Task
from fairway.communication.team import Collective
from fairway.host import wire
from fairway.host.groups import KINDS, OverGroups
from fairway.host.teams import Carry

__all__ = ["Command", "Outline", "Shift", "can_be_planned", "collectives_of", "launch"]

COLLECTIVES_MAX = 256
"""Most collectives of a planned program: each occupies a thread while in progress."""

Command = list[Any]
Collectives = dict[int, tuple[OverGroups, list[int]]]
"""Collectives of a program by number, each with the collectives that it waits for."""
Shift = tuple[list[int], int]
"""Buffers of a run's first slots, and the offset from any other slot to its buffer."""


def collectives_of(steps: Iterable[Command]) -> Collectives:
    """Returns all collectives of a program."""
    found = {}
    for kind, *fields in steps:
        if wire.COMMANDS[kind] == "sparse":
            what, ends, _, made, _, sources, number, after = fields
            one = OverGroups.read(what, ends, made, sources)
            if one is not None:
                found[number] = one, after
    return found


def can_be_planned(found: Sequence[OverGroups]) -> bool:
    """Returns whether each host has one team for all; all hosts evaluate this on the same data."""
    if not 2 <= len(found) <= COLLECTIVES_MAX:
        return False
    for host in set(found[0].owners):
        carries = [one.part(host).carries for one in found]
        if any(len(own) != 1 or not own[0].size for own in carries):
            return False
        if len({own[0].hosts for own in carries}) > 1:
            return False
    return True


class Outline:
    """This host's part of a run, as a step that can be planned.

    Args:
        steps: commands, in terms of slots.
        found: the collectives among them.
        host: this host.
    """

    def __init__(self, steps: Iterable[Command], found: Collectives, host: int) -> None:
        self.is_first = min(owner for one, _ in found.values() for owner in one.owners) == host
        self.carries = [found[number][0].part(host).carries[0] for number in sorted(found)]
        self.operations = {number: place for place, number in enumerate(sorted(found))}
        self._names = set(map(_operation, found))
        self._tasks: list[tuple[Task, set[int]]] = []
        self._made: dict[int, set[str]] = {}
        self._read: dict[int, set[str]] = collections.defaultdict(set)
        self._waited: set[str] = set()
        self._launches = 0
        for kind, *fields in steps:
            self._walk(wire.COMMANDS[kind], fields)

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """The collectives in the order of the program."""
        return [_collective(carry) for carry in self.carries]

    def whole(self, before: Shift, now: Shift) -> Step:
        """Returns the step of successive runs, with dependencies between one run and the next.

        Args:
            before: buffers of the slots of a run.
            now: buffers of the slots of the next run.
        """
        numbers, shift = before
        made = {slot + shift: tasks for slot, tasks in self._made.items() if slot >= len(numbers)}
        tasks = []
        for task, slots in self._tasks:
            given = {
                one for slot in slots if slot < len(now[0]) for one in made.get(now[0][slot], ())
            }
            if task.collective is not None and not task.after:
                # A run does not begin before all launches of the previous run have their inputs.
                given |= self._waited
            after = (*task.after, *(After(name, 1) for name in sorted(given)))
            tasks.append(dataclasses.replace(task, after=after))
        return Step(tuple(tasks))

    def _walk(self, kind: str, fields: list[Any]) -> None:
        if kind == "launch":
            _, _, _, _, arguments, first, results, *_ = fields
            name = launch(self._launches)
            self._launches += 1
            waited = self._before(arguments)
            waited |= {one for slot in arguments for one in self._read[slot]}
            self._waited |= waited & self._names
            self._add(Task(name, _after(waited), 0.0), arguments)
            self._note_made(range(first, first + results), {name})
        elif kind == "sparse":
            what, _, given, made, _, _, number, after = fields
            slots = [slot for slots, _ in given for slot in slots]
            results = [slot for group, _ in made for slot, _ in group]
            waited = self._before(slots)
            if tuple(what) not in KINDS:
                self._note_made(results, waited)
                return
            name = _operation(number)
            self._add(self._task(number, waited | {_operation(one) for one in after}), slots)
            self._note_made(results, {name})
            for slot in slots:
                self._read[slot].add(name)
        elif kind == "copy":
            source, number, _ = fields
            self._note_made([number], self._before([source]))
        elif kind == "gather":
            number, _, shards = fields
            self._note_made([number], self._before([source for _, source, _ in shards]))

    def _task(self, number: int, waited: Iterable[str]) -> Task:
        place = self.operations[number]
        dtype = self.carries[place].dtype.name
        return Task(_operation(number), _after(waited), None, self.collectives[place], dtype)

    def _before(self, slots: Iterable[int]) -> set[str]:
        return {name for slot in slots for name in self._made.get(slot, ())}

    def _note_made(self, slots: Iterable[int], tasks: set[str]) -> None:
        self._made.update((slot, set(tasks)) for slot in slots)

    def _add(self, task: Task, slots: Iterable[int]) -> None:
        self._tasks.append((task, set(slots)))


def _after(names: Iterable[str]) -> tuple[After, ...]:
    return tuple(map(After, sorted(names)))


def launch(place: int) -> str:
    """Returns the name of a launch, given its index among those of a run."""
    return f"launch {place}"


def _operation(number: int) -> str:
    return f"collective {number}"


def _collective(carry: Carry) -> Collective:
    name, *given = carry.kind
    made: Collective = getattr(Collective, name)(len(carry.hosts), *given)
    return made
