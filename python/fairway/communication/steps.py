"""Training steps of compute tasks and collectives: planned, and executed by every rank.

A :class:`Step` is a dependency graph of tasks; :func:`plan` schedules its communication with
several systems (planner and baselines); :func:`run` executes it repeatedly on one rank as a script
orders.
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
    "RankProgram",
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
"""Steps that :func:`run` promises to begin after the current one, where that many remain: the bound
on how far scripts prefetch."""


@dataclasses.dataclass(frozen=True)
class After:
    """A dependency of a task.

    Attributes:
        task: name of the task that must end first.
        before: how many steps earlier it runs, 0 or 1.
    """

    task: str
    before: int = 0


@dataclasses.dataclass(frozen=True)
class Task:
    """A task that every rank executes in a step: either compute or a collective.

    Attributes:
        name: unique in the step.
        after: the dependencies of the task.
        compute_s: how long it computes, or
        collective: what it communicates,
        dtype: numpy type of the collective's elements.
    """

    name: str
    after: tuple[After, ...] = ()
    compute_s: float | None = None
    collective: Collective | None = None
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class ChannelCost:
    """Cost model of a channel (latency and bandwidth); see ``plan::ChannelCost``.

    Attributes:
        rate_bps: bandwidth at which each rank sends and, at the same time, receives.
        latency_ns: time of a round of a motif beyond that of its bytes.
        sums_bps: rate at which a rank reduces.
        incast: slowdown of receiving per concurrent sender beyond the first, as a fraction.
        overlap: slowdown of motifs while the channel of that index is busy too, as a fraction;
            empty if channels share nothing.
    """

    rate_bps: float
    latency_ns: int = 0
    sums_bps: float = 1e11
    incast: float = 0.0
    overlap: tuple[float, ...] = ()

    @property
    def terms(self) -> tuple[float, int, float, float, list[float]]:
        """The arguments that native planners take."""
        overlap = list(self.overlap)
        return self.rate_bps, self.latency_ns, self.sums_bps, self.incast, overlap


SYSTEMS = (
    "fifo", "lifo", "hand", "hand+prefetch", "exec-only", "sched-only", "joint", "joint+striping",
)  # fmt: skip
"""Names of the systems that plan a step; the ``hand`` ones only where the step has a manual
order."""

NETWORK = ChannelCost(10e9, 50_000)
"""Assumed: cost of a network channel that has not been measured."""


def memory_cost(ranks: int) -> ChannelCost:
    """Assumed: cost of a shared-memory channel among ``ranks`` ranks of one machine, not measured.

    Ranks with a core each soon notice that their peers have arrived; oversubscribed ranks also wait
    for a core, so latency is higher.
    """
    return ChannelCost(40e9, 2_000 if ranks <= (os.cpu_count() or 1) else 10_000, 80e9)


@dataclasses.dataclass(frozen=True)
class Step:
    """The tasks that every rank repeats each step, in program order.

    Attributes:
        tasks: in program order.
        hand: a manual order of the collectives, by task name.
        prefetch: for collectives that the manual order prefetches, the task of the preceding step
            that each follows, by name.
    """

    tasks: tuple[Task, ...]
    hand: tuple[str, ...] = ()
    prefetch: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def operations(self) -> list[Task]:
        """The tasks that communicate, in the order by which scripts number them."""
        return [task for task in self.tasks if task.collective is not None]

    def graph(self) -> _native.StepGraph:
        """Returns the step as a graph of devices that all execute it, one for each rank.

        Raises:
            StepError: a dependency is unknown, or a task neither computes nor communicates.
        """
        numbers = {task.name: number for number, task in enumerate(self.tasks)}
        collectives = [task.collective for task in self.tasks if task.collective is not None]
        ranks = list(range(max((one.ranks for one in collectives), default=1)))
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
        """Returns the same step with measured compute times.

        Args:
            busy_s: seconds by task name, as in :attr:`Report.busy_s`.
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
    """Plans a step with every system.

    Args:
        step: the tasks to schedule.
        costs: cost model of each channel.
        segments: numbers of segments into which a collective may be cut, the same for every system;
            by default 1, 2, 4, 8, and counts that split well among channels in proportion to their
            rates.
        evaluations: plans that each search chain evaluates.
        chains: number of search chains.
        seed: seed of all randomness; the same seed finds the same plan.

    Returns:
        Plans by the system's name: ``fifo``, ``lifo``, ``hand`` and ``hand+prefetch`` (if the step
        has a manual order), ``exec-only``, ``sched-only``, ``joint``, ``joint+striping``.

    Raises:
        StepError: the step or the channels are invalid.
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
    """Returns the fastest algorithm for a collective that runs alone on the channels.

    Args:
        collective: what to communicate.
        dtype: numpy type of its elements.
        costs: cost model of each channel.

    Raises:
        StepError: there are no channels, or one has an invalid cost.
    """
    given = [cost.terms for cost in costs]
    try:
        return Script.alone(collective, np.dtype(dtype).itemsize, given, _segments(costs))
    except ValueError as error:
        raise StepError(str(error)) from None


class Solo:
    """Plans each collective of a team as if it ran alone; caches the result.

    Args:
        team: the ranks that communicate.
        costs: cost model of each of its channels.
    """

    def __init__(self, team: Team, costs: Sequence[ChannelCost]) -> None:
        self._team = team
        self._costs = costs
        self.part = functools.lru_cache(1024)(self._find)

    def _find(
        self, kind: tuple[Any, ...], dtype: np.dtype[Any]
    ) -> tuple[Collective, _native.ScriptPart]:
        """Returns a collective and this rank's part of its script.

        Args:
            kind: name of the collective, and its arguments after the number of ranks.
            dtype: numpy type of its elements.
        """
        name, *given = kind
        collective: Collective = getattr(Collective, name)(self._team.ranks, *given)
        return collective, self._team.prepare(alone(collective, dtype, self._costs))


def _segments(costs: Sequence[ChannelCost]) -> list[int]:
    """Returns segment counts, including the two that balance channels of these rates best."""
    if len(costs) < 2:
        return [1, 2, 4, 8]
    total = sum(cost.rate_bps for cost in costs)

    def excess(count: int) -> float:
        given = [0] * len(costs)
        for _ in range(count):
            ends = [(one + 1) / cost.rate_bps for one, cost in zip(given, costs, strict=True)]
            given[ends.index(min(ends))] += 1
        longest = max(one / cost.rate_bps for one, cost in zip(given, costs, strict=True))
        # Rounded, because measured rates are never in an exact integer ratio.
        return round(longest * total / count, 2)

    fitting = sorted(range(2, 13), key=lambda count: (excess(count), count))[:2]
    return sorted({1, 2, 4, 8, *fitting})


def _hand(step: Step, numbers: Mapping[str, int]) -> tuple[list[int] | None, list[int] | None]:
    """Returns manual orders as positions of tasks; positions in the preceding step are negative."""
    if not step.hand:
        return None, None
    unknown = [name for name in (*step.hand, *step.prefetch) if name not in numbers]
    if unknown:
        raise StepError(f"an order by hand names {unknown[0]}, which is no task of the step")
    count = len(step.tasks)
    # Positions have gaps, so that prefetched collectives fit between two others.
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
"""Step, operation, motif, channel, and the times at which it was ready, began and ended (ns)."""


def waited_ns(spans: Iterable[Span]) -> dict[int, int]:
    """Returns how long each channel was idle although a motif was ready, by channel number."""
    by_channel = collections.defaultdict(list)
    for span in spans:
        by_channel[span[3]].append(span)
    found = {}
    for channel, carried in by_channel.items():
        carried.sort(key=lambda span: span[5])
        waited = 0
        # From last to first: ``ready`` is the earliest time at which any later motif was ready.
        ready = carried[-1][4] if carried else 0
        for before, span in zip(reversed(carried[:-1]), reversed(carried[1:]), strict=True):
            ready = min(ready, span[4])
            waited += max(0, span[5] - max(before[6], ready))
        found[channel] = waited
    return found


@dataclasses.dataclass(frozen=True)
class Seen:
    """Measurements of some steps.

    Attributes:
        step_ns: mean time of a step.
        waited: time for which a channel idled with a ready motif, of the worst channel, as a
            fraction of the steps' time.
        busy_s: compute time of each task, as in :attr:`Report.busy_s`.
        spans: the motifs that were executed.
    """

    step_ns: float
    waited: float
    busy_s: Mapping[str, float]
    spans: Sequence[Span]


class RankProgram(Protocol):
    """What one rank computes, and the inputs and results of its collectives."""

    def compute(self, task: str, step: int) -> None:
        """Computes a task."""

    def give(self, task: str, step: int, vector: Vector) -> None:
        """Fills the input buffer of a collective."""

    def take(self, task: str, step: int, result: Vector) -> None:
        """Consumes the result of a collective."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Timeline of one rank's steps.

    Attributes:
        ends_ns: when each step ended: its last task had computed or been submitted.
        computed: step, name, start and end (ns) of each computation.
        carried: step, name, motif, channel, ready, start and end (ns) of each motif.
        waited_s: exposed communication: how long tasks waited for collectives, over all steps.
        busy_s: median time of each computation, including what its rank does besides: consuming
            results of collectives and filling inputs of those that follow.
    """

    ends_ns: list[int]
    computed: list[tuple[int, str, int, int]]
    carried: list[tuple[int, str, int, int, int, int, int]]
    waited_s: float
    busy_s: dict[str, float]


class Watcher(Protocol):
    """Observes steps as they end; see :class:`fairway.communication.replanning.Replanner`."""

    every: int

    def look(self, first: int, seen: Seen) -> None:
        """Observes the last :attr:`every` steps, from ``first`` (counted by the team) on."""

    def close(self) -> None:
        """Ends the observation."""


def run(
    team: Team,
    step: Step,
    script: Script,
    program: RankProgram,
    steps: int,
    watcher: Watcher | None = None,
) -> Report:
    """Executes a step ``steps`` times on this rank.

    Collectives without dependencies are submitted a step ahead. A compute task takes at least its
    ``compute_s``, so that ranks compute at a set speed on any machine. Rank 0 may have a watcher.

    Raises:
        TeamError: another rank is lost, stalled, or executes something else.
    """
    return _Runner(team, step, script, program, watcher).run(steps)


class _Runner:
    def __init__(
        self, team: Team, step: Step, script: Script, program: RankProgram, watcher: Watcher | None
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
        # The time to submit ahead counts towards the first computation.
        self._computing = computing[0] if computing else ""
        self._busy_ns: collections.Counter[tuple[str, int]] = collections.Counter()

    def run(self, steps: int) -> Report:
        """Executes ``steps`` steps."""
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
        """Shows the watcher the last steps, once per :attr:`Watcher.every` steps."""
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
        """Waits for the collectives on which a task depends, and consumes their results."""
        for after in task.after:
            ticket = self._tickets.pop((number - after.before, after.task), None)
            if ticket is not None:
                begun = self._team.now_ns()
                result = self._team.wait(ticket)
                self._waited_ns += self._team.now_ns() - begun
                with self._busy(number):
                    self._program.take(after.task, number - after.before, result)
