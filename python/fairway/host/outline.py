"""This host's part of a run of a program, as a step that can be planned."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence

from fairway.communication.steps import After, Step, Task
from fairway.communication.team import Collective
from fairway.host import messages
from fairway.host.groups import OverGroups
from fairway.host.teams import Carry

__all__ = ["Outline", "Shift", "can_be_planned", "collectives_of", "launch"]

COLLECTIVES_MAX = 256
"""Most collectives of a planned program: each occupies a thread while in progress."""

Collectives = dict[int, tuple[OverGroups, list[int]]]
"""Collectives of a program by number, each with the collectives that it waits for."""
Shift = tuple[list[int], int]
"""Buffers of a run's first slots, and the offset from any other slot to its buffer."""


def collectives_of(steps: Iterable[messages.Command]) -> Collectives:
    """Returns all collectives of a program."""
    return {
        step.number: (OverGroups.read(step), step.after)
        for step in steps
        if isinstance(step, messages.Collective)
    }


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

    def __init__(self, steps: Iterable[messages.Command], found: Collectives, host: int) -> None:
        self.is_first = min(owner for one, _ in found.values() for owner in one.owners) == host
        self.carries = [found[number][0].part(host).carries[0] for number in sorted(found)]
        self.operations = {number: place for place, number in enumerate(sorted(found))}
        self._names = set(map(_operation, found))
        self._tasks: list[tuple[Task, set[int]]] = []
        self._made: dict[int, set[str]] = {}
        self._read: dict[int, set[str]] = collections.defaultdict(set)
        self._waited: set[str] = set()
        self._launches = 0
        for step in steps:
            self._walk(step)

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

    def _walk(self, step: messages.Command) -> None:
        match step:
            case messages.Launch():
                name = launch(self._launches)
                self._launches += 1
                waited = self._before(step.args)
                waited |= {one for slot in step.args for one in self._read[slot]}
                self._waited |= waited & self._names
                self._add(Task(name, _after(waited), 0.0), step.args)
                made = range(step.first_result, step.first_result + step.results)
                self._note_made(made, {name})
            case messages.Collective():
                slots = [slot for group in step.given for slot in group.buffers]
                name, waited = _operation(step.number), self._before(slots)
                waited |= {_operation(one) for one in step.after}
                self._add(self._task(step.number, waited), slots)
                self._note_made(messages.made_by(step), {name})
                for slot in slots:
                    self._read[slot].add(name)
            case messages.RowExchange():
                slots = [slot for group in step.given for slot in group.buffers]
                self._note_made(messages.made_by(step), self._before(slots))
            case messages.Copy():
                self._note_made([step.buffer], self._before([step.source]))
            case messages.AssembleShards():
                sources = [shard.source for shard in step.shards]
                self._note_made([step.buffer], self._before(sources))

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
