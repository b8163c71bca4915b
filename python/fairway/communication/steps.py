"""Training steps of tasks that compute and tasks that communicate: planned, and run by every rank.

A :class:`Step` says what is done and what waits for what; :func:`plan` lets several systems plan
its communication; :func:`run` does it again and again on one rank, as a script says.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fairway import _native
from fairway.communication.team import Collective, Script, Team, Ticket, Vector
from fairway.errors import StepError

__all__ = [
    "NETWORK",
    "After",
    "ChannelCost",
    "Program",
    "Report",
    "Seen",
    "Solo",
    "Span",
    "Step",
    "Task",
    "Watcher",
    "alone",
    "memory_cost",
    "plan",
    "run",
    "waited_ns",
]

AHEAD = 2
"""How many steps are promised, if so many follow: what scripts fetch ahead is at most so far
ahead."""


@dataclasses.dataclass(frozen=True)
class After:
    """What a task waits for.

    Attributes:
        task: its name.
        before: of how many steps before, 0 or 1.
    """

    task: str
    before: int = 0


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing that every rank does in a step.

    Attributes:
        name: what it is called.
        after: what must be done before it.
        compute_s: how long it computes, or
        collective: what it communicates,
        dtype: elements of which numpy type.
    """

    name: str
    after: tuple[After, ...] = ()
    compute_s: float | None = None
    collective: Collective | None = None
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class ChannelCost:
    """What a channel takes; see ``plan::ChannelCost``.

    Attributes:
        rate_bps: what each rank sends and receives on it, both at a time.
        latency_ns: what a round of a motif takes beyond its bytes.
        sums_bps: what a rank adds up.
        incast: how much longer receiving takes for each sender beyond the first, as a part.
        overlap: how much longer motifs take while the channel of that place carries one too, as a
            part; none is that channels share nothing.
    """

    rate_bps: float
    latency_ns: int = 0
    sums_bps: float = 1e11
    incast: float = 0.0
    overlap: tuple[float, ...] = ()

    @property
    def terms(self) -> tuple[float, int, float, float, list[float]]:
        """What planners take."""
        overlap = list(self.overlap)
        return self.rate_bps, self.latency_ns, self.sums_bps, self.incast, overlap


SYSTEMS = (
    "fifo", "lifo", "hand", "hand+prefetch", "exec-only", "sched-only", "joint", "joint+striping",
)  # fmt: skip
"""Systems that plan a step, by name; those by hand only where the step says how."""

NETWORK = ChannelCost(10e9, 50_000)
"""What a channel on a network takes, if nobody has measured it."""


def memory_cost(ranks: int) -> ChannelCost:
    """What a channel in memory takes so many ranks of one machine, if nobody has measured it.

    Ranks that have a core each see soon that others have come; others wait for a core as well.
    """
    return ChannelCost(40e9, 2_000 if ranks <= (os.cpu_count() or 1) else 10_000, 80e9)


@dataclasses.dataclass(frozen=True)
class Step:
    """What every rank does again and again, in the order of its tasks.

    Attributes:
        tasks: in the order of the program.
        hand: an order of the tasks that communicate that somebody thought out, by name.
        prefetch: names of tasks and the task of the step before that each is to follow, for those
            that are fetched ahead by hand.
    """

    tasks: tuple[Task, ...]
    hand: tuple[str, ...] = ()
    prefetch: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def operations(self) -> list[Task]:
        """The tasks that communicate, as scripts count them."""
        return [task for task in self.tasks if task.collective is not None]

    def graph(self) -> _native.StepGraph:
        """The same as a graph of devices that all do this, one for each rank.

        Raises:
            StepError: the step makes no sense.
        """
        numbers = {task.name: number for number, task in enumerate(self.tasks)}
        ranks = list(range(max((task.collective.ranks for task in self.operations
                                if task.collective is not None), default=1)))  # fmt: skip
        graph = _native.StepGraph(len(ranks))
        for task in self.tasks:
            unknown = [after.task for after in task.after if after.task not in numbers]
            if unknown:
                raise StepError(f"{task.name} waits for {unknown[0]}, which is no task of the step")
            after = [(numbers[one.task], one.before) for one in task.after]
            if task.collective is not None:
                size = np.dtype(task.dtype).itemsize
                graph.collective(task.collective, ranks, size, after, name=task.name)
            elif task.compute_s is not None:
                graph.compute(ranks, round(task.compute_s * 1e9), after, name=task.name)
            else:
                raise StepError(f"{task.name} neither computes nor communicates")
        return graph

    def profiled(self, busy_s: Mapping[str, float]) -> Step:
        """The same step, whose tasks compute for as long as was measured.

        Args:
            busy_s: by the task's name, as :attr:`Report.busy_s` has it.
        """
        tasks = tuple(
            dataclasses.replace(task, compute_s=busy_s.get(task.name, task.compute_s))
            for task in self.tasks
        )
        return dataclasses.replace(self, tasks=tasks)


def plan(
    step: Step,
    costs: Sequence[ChannelCost],
    *,
    segments: Sequence[int] | None = None,
    evaluations: int = 20_000,
    chains: int = 4,
    seed: int = 0,
) -> dict[str, _native.StepPlan]:
    """Lets all systems plan a step.

    Args:
        step: what is done.
        costs: what each channel takes.
        segments: into how many parts a collective may be cut, for every system alike; none is 1,
            2, 4, 8, and what can be shared among channels by their rates.
        evaluations: plans that one chain of a search looks at.
        chains: how many there are.
        seed: what decides all that is drawn; the same seed finds the same plan.

    Returns:
        By the system's name: ``fifo``, ``lifo``, ``hand`` and ``hand+prefetch`` (if the step says
        how), ``exec-only``, ``sched-only``, ``joint``, ``joint+striping``.

    Raises:
        StepError: the step makes no sense.
    """
    numbers = {task.name: number for number, task in enumerate(step.tasks)}
    if len(numbers) != len(step.tasks):
        raise StepError("two tasks of a step have one name; expected each name once")
    given = [cost.terms for cost in costs]
    limits = (evaluations, chains, seed)
    try:
        cuts = list(segments or _segments(costs))
        planned = _native.plan_step(step.graph(), given, cuts, _hand(step, numbers), limits)
    except (ValueError, OverflowError) as error:
        raise StepError(str(error)) from None
    return {one.system: one for one in planned}


def alone(collective: Collective, dtype: Any, costs: Sequence[ChannelCost]) -> Script:
    """The way to carry a collective out that takes least if nothing else is going on.

    Args:
        collective: what is asked for.
        dtype: elements of which numpy type.
        costs: what each channel takes.

    Raises:
        StepError: there are no channels, or some that cannot be.
    """
    given = [cost.terms for cost in costs]
    try:
        return Script.alone(collective, np.dtype(dtype).itemsize, given, _segments(costs))
    except ValueError as error:
        raise StepError(str(error)) from None


class Solo:
    """Finds how each collective of a team is carried out alone; keeps what was found.

    Args:
        team: whose collectives.
        costs: what each of its channels takes.
    """

    def __init__(self, team: Team, costs: Sequence[ChannelCost]) -> None:
        self._team = team
        self._costs = costs
        self.part = functools.lru_cache(1024)(self._find)

    def _find(
        self, kind: tuple[Any, ...], dtype: np.dtype[Any]
    ) -> tuple[Collective, _native.ScriptPart]:
        """A collective, and this rank's part of it.

        Args:
            kind: its name, and what it takes beside the number of ranks.
            dtype: elements of which type.
        """
        name, *given = kind
        collective: Collective = getattr(Collective, name)(self._team.ranks, *given)
        return collective, self._team.prepare(alone(collective, dtype, self._costs))


def _segments(costs: Sequence[ChannelCost]) -> list[int]:
    """Numbers of segments, among them the two by which channels of these rates end most alike."""
    if len(costs) < 2:
        return [1, 2, 4, 8]
    total = sum(cost.rate_bps for cost in costs)

    def excess(count: int) -> float:
        given = [0] * len(costs)
        for _ in range(count):
            ends = [(one + 1) / cost.rate_bps for one, cost in zip(given, costs, strict=True)]
            given[ends.index(min(ends))] += 1
        longest = max(one / cost.rate_bps for one, cost in zip(given, costs, strict=True))
        # What is measured is never quite a whole multiple.
        return round(longest * total / count, 2)

    fitting = sorted(range(2, 13), key=lambda count: (excess(count), count))[:2]
    return sorted({1, 2, 4, 8, *fitting})


def _hand(step: Step, numbers: Mapping[str, int]) -> tuple[list[int] | None, list[int] | None]:
    """The orders by hand as places of tasks; a place in the step before is less by their number."""
    if not step.hand:
        return None, None
    unknown = [name for name in (*step.hand, *step.prefetch) if name not in numbers]
    if unknown:
        raise StepError(f"an order by hand names {unknown[0]}, which is no task of the step")
    count = len(step.tasks)
    # Places are spread, so that what is fetched ahead fits between two others.
    plain = [count - 1] * count
    for place, name in enumerate(step.hand):
        plain[numbers[name]] = place
    if not step.prefetch:
        return plain, None
    ahead = list(plain)
    order = [name for name in step.hand if name not in step.prefetch]
    for name, follows in step.prefetch.items():
        order.insert(order.index(follows) + 1, name)
    for place, name in enumerate(order):
        ahead[numbers[name]] = place - count if name in step.prefetch else place
    return plain, ahead


Span = tuple[int, int, int, int, int, int, int]
"""Step, operation, motif, channel, and when it was ready, began and ended (ns)."""


def waited_ns(spans: Iterable[Span]) -> dict[int, int]:
    """How long each channel carried nothing though something was ready, by the channel's number."""
    by_channel = collections.defaultdict(list)
    for span in spans:
        by_channel[span[3]].append(span)
    found = {}
    for channel, carried in by_channel.items():
        carried.sort(key=lambda span: span[5])
        waited = 0
        # From the last to the first: what is still to come, and since when any of it was ready.
        ready = carried[-1][4] if carried else 0
        for before, span in zip(reversed(carried[:-1]), reversed(carried[1:]), strict=True):
            ready = min(ready, span[4])
            waited += max(0, span[5] - max(before[6], ready))
        found[channel] = waited
    return found


@dataclasses.dataclass(frozen=True)
class Seen:
    """What was seen of some steps.

    Attributes:
        step_ns: what a step took.
        waited: the longest that a channel kept waiting what was ready, as a part of the steps.
        busy_s: what each task computed, as :attr:`Report.busy_s` has it.
        spans: what was carried.
    """

    step_ns: float
    waited: float
    busy_s: Mapping[str, float]
    spans: Sequence[Span]


class Program(Protocol):
    """What one rank computes, gives to collectives and takes from them."""

    def compute(self, task: str, step: int) -> None:
        """Computes a task."""

    def give(self, task: str, step: int, vector: Vector) -> None:
        """Fills what a collective works on."""

    def take(self, task: str, step: int, result: Vector) -> None:
        """Takes what a collective has brought."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What was done when, on one rank.

    Attributes:
        ends_ns: when each step ended: when its last computation did.
        computed: step, name, from when, until when (ns) of each computation.
        carried: the same of each motif: step, name, motif, channel, ready, start, end (ns).
        waited_s: how long computations waited for collectives, over all steps.
        busy_s: what each computation took in the median, with what its rank does besides: takes
            what collectives have brought it, and gives to those that follow.
    """

    ends_ns: list[int]
    computed: list[tuple[int, str, int, int]]
    carried: list[tuple[int, str, int, int, int, int, int]]
    waited_s: float
    busy_s: dict[str, float]


class Watcher(Protocol):
    """Looks at steps as they are done; see :class:`fairway.communication.replanning.Replanner`."""

    every: int

    def look(self, first: int, seen: Seen) -> None:
        """Looks at so many steps, of which ``first`` is the first, counted by the team."""

    def close(self) -> None:
        """There are no more."""


def run(
    team: Team,
    step: Step,
    script: Script,
    program: Program,
    steps: int,
    watcher: Watcher | None = None,
) -> Report:
    """Does a step again and again on this rank.

    What waits for nothing is submitted a step ahead. A task that computes takes as long as it says
    at least, so that ranks compute at a set speed wherever they run. Rank 0 may have a watcher.

    Raises:
        TeamError: another rank is gone, stuck, or does something else.
    """
    return _Runner(team, step, script, program, watcher).run(steps)


class _Runner:
    def __init__(
        self, team: Team, step: Step, script: Script, program: Program, watcher: Watcher | None
    ) -> None:
        self._team = team
        self._step = step
        self._program = program
        self._watcher = watcher
        team.follow(team.prepare(script))
        self._operations = {task.name: n for n, task in enumerate(step.operations)}
        self._vectors: dict[tuple[str, int], Vector] = {}
        self._tickets: dict[tuple[int, str], Ticket] = {}
        self._computed: list[tuple[int, str, int, int]] = []
        self._spans: list[Span] = []
        self._waited_ns = 0
        self._first = 0
        computing = [task.name for task in step.tasks if task.collective is None]
        # What was submitted ahead belongs to what is computed first.
        self._computing = computing[0] if computing else ""
        self._busy_ns: collections.Counter[tuple[str, int]] = collections.Counter()

    def run(self, steps: int) -> Report:
        """Does so many steps."""
        self._team.take_spans()
        began = 0
        ends = []
        for number in range(steps):
            while began < min(number + 2, steps):
                at, _ = self._team.begin_planned(min(AHEAD, steps - 1 - began))
                self._first = at - began
                for task in self._step.operations:
                    if not task.after:
                        self._submit(began, task)
                began += 1
            for task in self._step.tasks:
                if task.collective is None:
                    self._compute(number, task)
                elif task.after:
                    self._collect(number, task)
                    self._submit(number, task)
            ends.append(self._team.now_ns())
            self._look(number, ends)
        for (number, name), ticket in list(self._tickets.items()):
            self._program.take(name, number, self._team.wait(ticket))
        self._tickets.clear()
        if self._watcher is not None:
            self._watcher.close()
        self._spans += self._team.take_spans()
        names = [task.name for task in self._step.operations]
        carried = [
            (step - self._first, names[operation], motif, channel, ready, start, end)
            for step, operation, motif, channel, ready, start, end in self._spans
        ]
        return Report(ends, self._computed, carried, self._waited_ns / 1e9, self._busy_s())

    def _look(self, number: int, ends: Sequence[int]) -> None:
        """Lets the watcher look at the last steps, now and then; not at the first one."""
        if self._watcher is None or number == 0 or number % self._watcher.every:
            return
        first = number - self._watcher.every + 1
        fresh = self._team.take_spans()
        self._spans += fresh
        took = ends[-1] - ends[first - 1]
        waited = max(waited_ns(fresh).values(), default=0) / took
        seen = Seen(took / self._watcher.every, waited, self._busy_s(first), fresh)
        self._watcher.look(self._first + first, seen)

    def _busy_s(self, first: int = 0) -> dict[str, float]:
        by_name = collections.defaultdict(list)
        for (name, number), busy in self._busy_ns.items():
            if number >= first:
                by_name[name].append(busy / 1e9)
        return {name: statistics.median(busy) for name, busy in by_name.items() if name}

    @contextlib.contextmanager
    def _busy(self, number: int) -> Iterator[None]:
        began = self._team.now_ns()
        yield
        self._busy_ns[self._computing, number] += self._team.now_ns() - began

    def _submit(self, number: int, task: Task) -> None:
        assert task.collective is not None
        key = (task.name, number % 3)
        if key not in self._vectors:
            self._vectors[key] = self._team.vector(task.collective, task.dtype)
        vector = self._vectors[key]
        with self._busy(number):
            self._program.give(task.name, number, vector)
            at = (self._first + number, self._operations[task.name])
            self._tickets[number, task.name] = self._team.submit(at, task.collective, vector)

    def _compute(self, number: int, task: Task) -> None:
        self._computing = task.name
        self._collect(number, task)
        assert task.compute_s is not None
        start = self._team.now_ns()
        with self._busy(number):
            self._program.compute(task.name, number)
            left = task.compute_s - (self._team.now_ns() - start) / 1e9
            if left > 0:
                time.sleep(left)
        self._computed.append((number, task.name, start, self._team.now_ns()))

    def _collect(self, number: int, task: Task) -> None:
        """Takes what collectives have brought that this task waits for."""
        for after in task.after:
            ticket = self._tickets.pop((number - after.before, after.task), None)
            if ticket is not None:
                begun = self._team.now_ns()
                result = self._team.wait(ticket)
                self._waited_ns += self._team.now_ns() - begun
                with self._busy(number):
                    self._program.take(after.task, number - after.before, result)
