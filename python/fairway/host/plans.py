"""Programs whose collectives go by a plan: which ways each takes, and in what order.

The first runs of a program go as they come. The first host of all sees how long their computations
take, plans, and tells the controller, which says of every run by which plan it goes. Such a run is
a step of a team of its hosts: collectives are submitted as their inputs get there, each by a thread
of its own, and carried out in the order of the plan. Each plan has a team of its own, so that a run
of the one before ends as it began. What turns out slower than it was is taken back.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fairway.communication.replanning import Proposal, Replanner
from fairway.communication.steps import After, Seen, Span, Step, Task, waited_ns
from fairway.communication.team import Collective, Script, Team, Vector
from fairway.errors import TeamError
from fairway.host import wire
from fairway.host.collectives import OverGroups
from fairway.host.objects import Failed
from fairway.host.teams import Carry, Elements, Teams, Turn, failed

__all__ = ["PlannedRun", "Plans"]

_LOG = logging.getLogger(__name__)

COLLECTIVES_MAX = 256
"""Most collectives of a program that is planned: each has a thread while it is under way."""
UNSEEN_RUNS = 2
"""Runs of a program before its hosts look: the first ones compile and fill memory."""
SEEN_RUNS = 8
"""Runs that are looked at together."""

Command = list[Any]
Propose = Callable[[int, Script | None, Sequence[float]], None]
Shift = tuple[list[int], int]
"""The buffers of a run's first slots, and what is added to the number of any other slot."""


class Plans:
    """The plans of this host's programs.

    Args:
        teams: how hosts meet.
        host: its number over all islands.
        report: tells the controller.
    """

    def __init__(self, teams: Teams, host: int, report: wire.Reporter) -> None:
        self._teams = teams
        self._host = host
        self._report = report
        self._loaded: dict[int, list[Command]] = {}
        self._programs: dict[int, _Program | None] = {}

    def load(self, executable: int, steps: list[Command]) -> None:
        """Keeps what this host does in each run of a program."""
        self._loaded[executable] = steps

    def unload(self, executable: int) -> None:
        """Forgets a program; runs that have begun go on."""
        self._loaded.pop(executable, None)
        program = self._programs.pop(executable, None)
        if program is not None:
            program.close()

    def adopt(self, executable: int, number: int, script: str) -> None:
        """Goes by another plan from the first run on that says so."""
        program = self._program(executable)
        if program is not None:
            program.adopt(number, Script.parse(script) if script else None)

    def begin(self, executable: int, number: int, name: int, shift: Shift) -> PlannedRun | None:
        """Begins a run.

        Args:
            executable: the program.
            number: of its plan.
            name: what tells this run from all others, on all hosts alike.
            shift: what its slots stand for.

        Returns:
            None if its collectives are such that no plan is made for them; all hosts find the same.
        """
        program = self._program(executable)
        return None if program is None else program.begin(number, name, shift)

    def _program(self, executable: int) -> _Program | None:
        if executable not in self._programs:
            found = _collectives(self._loaded[executable])
            made = None
            if _can_be_planned([one for one, _ in found.values()]):

                def propose(number: int, script: Script | None, told_s: Sequence[float]) -> None:
                    told = [round(one * 1e9) for one in told_s] or None
                    text = script.text if script is not None else ""
                    self._report.send(wire.PLANNED, executable, number, text, told)

                outline = _Outline(self._loaded[executable], self._host)
                made = _Program(self._teams, outline, propose)
            self._programs[executable] = made
        return self._programs[executable]


def _collectives(steps: Iterable[Command]) -> dict[int, tuple[OverGroups, list[int]]]:
    """All collectives of a program by their numbers, with those that each waits for."""
    found = {}
    for kind, *fields in steps:
        if wire.COMMANDS[kind] == "sparse":
            what, ends, _, made, _, sources, number, after = fields
            one = OverGroups.read(what, ends, made, sources)
            if one is not None:
                found[number] = one, after
    return found


def _can_be_planned(found: Sequence[OverGroups]) -> bool:
    """Has each host one team for all of them? Other hosts ask the same of the same."""
    if not 2 <= len(found) <= COLLECTIVES_MAX:
        return False
    for host in set(found[0].owners):
        carries = [one.part(host).carries for one in found]
        if any(len(own) != 1 or not own[0].size for own in carries):
            return False
        if len({own[0].hosts for own in carries}) > 1:
            return False
    return True


class _Outline:
    """What this host does in a run, as a step that can be planned.

    Args:
        steps: commands, on slots.
        host: this one.
    """

    def __init__(self, steps: Iterable[Command], host: int) -> None:
        steps = list(steps)
        self._found = found = _collectives(steps)
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
        """In the order of the program."""
        return [_collective(carry) for carry in self.carries]

    def whole(self, before: Shift, now: Shift) -> Step:
        """What this host does in runs that follow one another.

        Args:
            before: what the slots of a run stand for.
            now: the same of the next run.
        """
        numbers, shift = before
        made = {slot + shift: tasks for slot, tasks in self._made.items() if slot >= len(numbers)}
        tasks = []
        for task, slots in self._tasks:
            given = {
                one for slot in slots if slot < len(now[0]) for one in made.get(now[0][slot], ())
            }
            if task.collective is not None and not task.after:
                # Nothing of a run begins before all launches of the one before have their inputs.
                given |= self._waited
            after = (*task.after, *(After(name, 1) for name in sorted(given)))
            tasks.append(dataclasses.replace(task, after=after))
        return Step(tuple(tasks))

    def _walk(self, kind: str, fields: list[Any]) -> None:
        if kind == "launch":
            _, _, _, _, arguments, first, results, *_ = fields
            name = _launch(self._launches)
            self._launches += 1
            waited = self._before(arguments)
            waited |= {one for slot in arguments for one in self._read[slot]}
            self._waited |= waited & self._names
            self._add(Task(name, _after(waited), 0.0), arguments)
            self._note_made(range(first, first + results), {name})
        elif kind == "sparse":
            what, ends, given, made, _, sources, number, after = fields
            slots = [slot for slots, _ in given for slot in slots]
            results = [slot for group, _ in made for slot, _ in group]
            waited = self._before(slots)
            if OverGroups.read(what, ends, made, sources) is None:
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


def _launch(place: int) -> str:
    return f"launch {place}"


def _operation(number: int) -> str:
    return f"collective {number}"


def _collective(carry: Carry) -> Collective:
    name, *given = carry.kind
    made: Collective = getattr(Collective, name)(len(carry.hosts), *given)
    return made


class _Program:
    """One program: its plans, of which runs go by the one that they say.

    Args:
        teams: how hosts meet.
        outline: what this host does.
        propose: tells the controller of a script to go by instead of the plan of this number, and
            what a run was seen to take and is told to take by it.
    """

    def __init__(self, teams: Teams, outline: _Outline, propose: Propose) -> None:
        self.outline = outline
        self.teams = teams
        self.propose = propose
        self.threads = ThreadPoolExecutor(len(outline.carries), "fairway-planned")
        self._scripts: dict[int, Script | None] = {1: None}
        self._kept: _Kept | None = None
        self._watch = _Watch(self) if outline.is_first else None

    def adopt(self, number: int, script: Script | None) -> None:
        """Runs may go by this script, or as they come."""
        self._scripts[number] = script

    def begin(self, number: int, name: int, shift: Shift) -> PlannedRun:
        """Begins a run that goes by a plan."""
        if self._kept is None or self._kept.number != number:
            if self._kept is not None:
                self._kept.retire()
            script = self._scripts[number]
            self._scripts = {n: one for n, one in self._scripts.items() if n >= number}
            self._kept = _Kept(self, number, script, name)
        return PlannedRun(self, self._kept, self._watch, shift)

    def close(self) -> None:
        """No more runs begin."""
        if self._kept is not None:
            self._kept.retire()
        if self._watch is not None:
            self._watch.close()
        self.threads.shutdown(wait=False)


class _Kept:
    """A plan that runs go by, and the team that keeps to it.

    Args:
        program: whose.
        number: of the plan.
        script: what it says; none is that collectives go as they come, and needs no team.
        name: of the team.
    """

    def __init__(self, program: _Program, number: int, script: Script | None, name: int) -> None:
        self.number = number
        self.script = script
        self._program = program
        self._name = name
        self._starts = ThreadPoolExecutor(1, "fairway-begin")
        self._lock = threading.Lock()
        self._team: Team | None = None
        self._part: Any = None
        self._runs = 0
        self._is_retired = False
        self._is_broken = False

    def begin(self) -> Future[tuple[Team, int]]:
        """Begins a step, behind those before; what it comes to is the team and the step."""
        with self._lock:
            self._runs += 1
        return self._starts.submit(self._begin_now)

    def _begin_now(self) -> tuple[Team, int]:
        assert self.script is not None
        if self._team is None:
            self._team = self._program.teams.meet(
                self._program.outline.carries[0].hosts, self._name
            )
            self._part = self._team.prepare(self.script)
        return self._team, self._team.begin(self._part)

    def broken(self) -> None:
        """Its team does not go on: leaves it, and asks for another."""
        with self._lock:
            if self._is_broken:
                return
            self._is_broken = True
        if self._team is not None:
            self._team.close()
        self._program.propose(self.number, self.script, ())

    def end_run(self) -> None:
        """A run is over."""
        with self._lock:
            self._runs -= 1
        self._close_if_over()

    def retire(self) -> None:
        """No more runs begin."""
        with self._lock:
            self._is_retired = True
        self._close_if_over()

    def take_spans(self) -> list[Span]:
        """What was carried since the last call."""
        return self._team.take_spans() if self._team is not None and not self._is_broken else []

    def _close_if_over(self) -> None:
        with self._lock:
            if not self._is_retired or self._runs:
                return
        self._starts.shutdown(wait=False)
        if self._team is not None and not self._is_broken:
            self._team.close()


class PlannedRun:
    """One run of a program whose collectives go by a plan.

    Attributes:
        threads: which carry its collectives out.
        teams: of this host.
    """

    def __init__(self, program: _Program, kept: _Kept, watch: _Watch | None, shift: Shift) -> None:
        self.threads = program.threads
        self.teams = program.teams
        self._program = program
        self._kept = kept
        self._watch = watch
        self._shift = shift
        self._started = kept.begin() if self.is_kept else None
        self._lock = threading.Lock()
        self._left = len(program.outline.carries)
        self._launches = 0

    @property
    def is_kept(self) -> bool:
        """Is there a plan to keep to?"""
        return self._kept.script is not None

    def turn(self, number: int, carries: Sequence[Carry]) -> Turn:
        """One of its collectives.

        Args:
            number: in the program.
            carries: what this host does for it.
        """
        return _PlannedTurn(self, self._program.outline.operations[number], carries)

    def launched(self, token: Any) -> None:
        """The next of its launches was handed to the devices."""
        if self._watch is not None:
            self._watch.launched(self._launches, token)
        self._launches += 1

    def end(self) -> None:
        """Nothing of it is still to be launched."""
        if self._watch is not None:
            self._watch.end(self._kept, self._shift)

    def carry(
        self,
        operation: int,
        carry: Carry,
        held: Mapping[Any, Elements],
        poison: str | None = None,
    ) -> Vector:
        """Carries a collective out; returns its result.

        Args:
            operation: which.
            carry: what this host does for it.
            held: what it has.
            poison: why that is nothing, if it is.

        Raises:
            Failed: a host had nothing to give, is lost or stuck.
        """
        assert self._started is not None
        try:
            team, step = self._started.result()
            collective = self._program.outline.collectives[operation]
            vector = team.vector(collective, carry.dtype)
            if poison is None:
                carry.pack(vector, held)
            at = (step, operation)
            result = team.wait(team.submit(at, collective, vector, carry.reduction, poison))
        except TeamError as error:
            if error.kind != "Poisoned":
                self._kept.broken()
            self._count_down()
            raise failed(carry, error) from None
        self._count_down()
        return result

    def _count_down(self) -> None:
        with self._lock:
            self._left -= 1
            is_over = self._left == 0
        if is_over:
            self._kept.end_run()


class _PlannedTurn(Turn):
    """One collective of a planned run."""

    def __init__(self, run: PlannedRun, operation: int, carries: Sequence[Carry]) -> None:
        super().__init__(run.teams, carries, 0)
        self._run = run
        self._operation = operation

    def _carry(self, carry: Carry, number: int, held: Mapping[Any, Elements]) -> Vector:
        return self._run.carry(self._operation, carry, held)

    def _poison(self, carry: Carry, number: int, reason: str) -> None:
        with contextlib.suppress(Failed):  # the others know, or are gone
            self._run.carry(self._operation, carry, {}, reason)


@dataclasses.dataclass(frozen=True)
class _Ended:
    """All launches of a run have been handed over."""

    kept: _Kept
    shift: Shift


@dataclasses.dataclass
class _Lot:
    """Runs that follow one another and go by one plan.

    Attributes:
        kept: the plan.
        ends_ns: when the run before them ended, and each of them.
        shifts: what the slots of those stand for.
        busy_s: what each computation took in each of them.
    """

    kept: _Kept
    ends_ns: list[int]
    shifts: list[Shift]
    busy_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def seen(self) -> Seen:
        """What was seen of them."""
        spans = self.kept.take_spans()
        took = max(self.ends_ns[-1] - self.ends_ns[0], 1)
        waited = max(waited_ns(spans).values(), default=0) / took
        busy = {name: statistics.median(each) for name, each in self.busy_s.items()}
        each = statistics.median(end - begin for begin, end in itertools.pairwise(self.ends_ns))
        return Seen(each, waited, busy, spans)


class _Watch:
    """Sees how long a program's computations and motifs take, and has plans made by that.

    Args:
        program: whose; this host is the first of all that it is on.
    """

    def __init__(self, program: _Program) -> None:
        self._program = program
        self._queue: queue.SimpleQueue[tuple[int, Any, int] | _Ended | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._kept: _Kept | None = None
        self._replanner: Replanner | None = None
        self._best: tuple[float, Script | None] = math.inf, None
        self._is_settled = False

    def launched(self, place: int, token: Any) -> None:
        """A launch of a run was handed to the devices."""
        self._queue.put((place, token, time.monotonic_ns()))

    def end(self, kept: _Kept, shift: Shift) -> None:
        """That was all of a run."""
        self._queue.put(_Ended(kept, shift))
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="fairway-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """There are no more runs."""
        self._queue.put(None)

    def _look(self) -> None:
        try:
            for lot in self._lots():
                self._judge(lot)
        except Exception:  # runs go on by the plan that they have
            _LOG.exception("the runs of a program are not looked at any more")

    def _lots(self) -> Iterator[_Lot]:
        lot: _Lot | None = None
        ended_ns, unseen = 0, UNSEEN_RUNS
        busy: dict[str, float] = {}
        while (item := self._queue.get()) is not None:
            if not isinstance(item, _Ended):
                place, token, begun_ns = item
                _wait(token)
                now = time.monotonic_ns()
                busy[_launch(place)] = (now - max(begun_ns, ended_ns)) / 1e9
                ended_ns = now
                continue
            if lot is None or lot.kept is not item.kept or unseen > 0:
                unseen -= 1
                item.kept.take_spans()
                lot = _Lot(item.kept, [ended_ns], [item.shift])
            else:
                lot.shifts.append(item.shift)
                lot.ends_ns.append(ended_ns)
                for name, took in busy.items():
                    lot.busy_s.setdefault(name, []).append(took)
                if len(lot.shifts) > SEEN_RUNS:
                    yield lot
                    lot = _Lot(item.kept, [ended_ns], [item.shift])
            busy = {}

    def _judge(self, lot: _Lot) -> None:
        if self._is_settled:
            return
        kept, seen = lot.kept, lot.seen()
        if kept is self._kept:
            assert self._replanner is not None
            self._replanner.look(0, seen)
            return
        self._kept = kept
        least_ns, script = self._best
        if seen.step_ns > least_ns:
            _LOG.warning("runs take longer by the new plan; they go as before from now on")
            self._is_settled = True
            self._program.propose(kept.number, script, ())
            return
        self._best = seen.step_ns, kept.script

        def propose(made: Proposal) -> int:
            self._program.propose(kept.number, made.script, (made.seen_s, made.told_s))
            return sys.maxsize  # what is looked at next goes by another plan

        step = self._program.outline.whole(*lot.shifts[-2:])
        before = self._replanner
        costs = self._program.teams.costs if before is None else before.costs
        self._replanner = Replanner(propose, step, costs, kept.script)
        if before is None:
            self._replanner.plan(seen)


def _wait(token: Any) -> None:
    """Waits for the end of a launch; its error shows where its results are used."""
    if token is not None:
        with contextlib.suppress(Exception):
            token.block_until_ready()
