"""Explains the duration of a step: what computations wait for, and what delays that.

Examines one step of several under a plan, as scheduled, from the start of its first computation to
that of the next step's.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from fairway import _native
from fairway.communication.steps import Step

__all__ = ["Bar", "Explanation", "Link", "Wait", "explain"]

STEPS = 10
MIDDLE = 5
"""The step that is examined, in steady state between others."""

Span = tuple[int, int, int | None, int | None, int, int]


@dataclasses.dataclass(frozen=True)
class Wait:
    """Idle time of devices before a computation.

    Attributes:
        task: the computation.
        blocker: its dependency that ends last.
        idle_ns: how long devices compute nothing before it.
        moves_ns: part of that in which the blocker is in transfer.
        behind_ns: part of that in which others occupy the blocker's channels, by name (queueing).
        late_ns: part of that in which the blocker itself is not ready.
    """

    task: str
    blocker: str
    idle_ns: int
    moves_ns: int
    behind_ns: Mapping[str, int]
    late_ns: int


@dataclasses.dataclass(frozen=True)
class Bar:
    """A bar of a timeline.

    Attributes:
        row: ``devices``, or ``channel`` and its number.
        task: the task that is executed.
        start_ns, end_ns: relative to the start of the step.
    """

    row: str
    task: str
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True)
class Link:
    """A part of the critical path of a step.

    Attributes:
        task: the task that is executed.
        row: where, as :attr:`Bar.row`.
        time_ns: how long it adds to the path.
    """

    task: str
    row: str
    time_ns: int


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One step under one plan.

    Attributes:
        period_ns: duration of the step.
        idle: fraction of it in which devices compute nothing.
        waits: causes of the idle time, in the order of the step.
        bars: the timeline.
        path: critical path: the chain without slack from the start of a step to that of the next.
    """

    period_ns: int
    idle: float
    waits: list[Wait]
    bars: list[Bar]
    path: list[Link]

    def sentences(self) -> list[str]:
        """Returns the waits as sentences, the longest first."""
        found = []
        for wait in sorted(self.waits, key=lambda wait: -wait.idle_ns):
            parts = [f"{_ms(wait.moves_ns)} in transfer"] if wait.moves_ns else []
            parts += [
                f"{_ms(time)} queued behind {name}"
                for name, time in sorted(wait.behind_ns.items(), key=lambda one: -one[1])
            ]
            parts += [f"{_ms(wait.late_ns)} not ready"] if wait.late_ns else []
            reasons = ", ".join(parts)
            found.append(f"{wait.task} waits {_ms(wait.idle_ns)} for {wait.blocker}: {reasons}")
        return found


def explain(step: Step, plan: _native.StepPlan) -> Explanation:
    """Explains the duration of a step under a plan."""
    return _Reader(step, plan.spans(STEPS)).explanation()


class _Reader:
    def __init__(self, step: Step, spans: Sequence[Span]) -> None:
        self._step = step
        self._names = [task.name for task in step.tasks]
        self._spans = sorted(spans, key=lambda span: (span[4], span[5]))
        self._of: dict[tuple[int, int], list[Span]] = collections.defaultdict(list)
        for span in self._spans:
            self._of[span[0], span[1]].append(span)
        self._computes = [span for span in self._spans if span[3] is None]
        self._lines: dict[int | None, list[Span]] = collections.defaultdict(list)
        for span in self._spans:
            self._lines[span[3]].append(span)
        begins = [
            min(span[4] for span in (self._computes or self._spans) if span[0] == number)
            for number in (MIDDLE, MIDDLE + 1)
        ]
        self._from, self._until = begins

    def explanation(self) -> Explanation:
        period = self._until - self._from
        waits = list(self._waits())
        idle = sum(wait.idle_ns for wait in waits)
        bars = [
            Bar(_row(span[3]), self._names[span[1]], span[4] - self._from, span[5] - self._from)
            for span in self._spans
            if span[5] > self._from and span[4] < self._until
        ]
        return Explanation(period, idle / max(1, period), waits, bars, self._path())

    def _waits(self) -> list[Wait]:
        found = []
        for before, span in itertools.pairwise(self._computes):
            if not self._from < span[4] <= self._until or span[4] <= before[5]:
                continue
            blockers = [own for own in self._before(span) if own]
            last = max(blockers, key=lambda own: max(one[5] for one in own), default=None)
            if last is None:
                continue
            gap = (max(before[5], self._from), span[4])
            found.append(self._wait(self._names[span[1]], last, gap))
        return found

    def _before(self, span: Span) -> list[list[Span]]:
        """Returns the spans of each dependency of a task."""
        of = [(span[0] - one.before, one.task) for one in self._step.tasks[span[1]].after]
        return [self._of[number, self._names.index(name)] for number, name in of if number >= 0]

    def _wait(self, task: str, blocker: list[Span], gap: tuple[int, int]) -> Wait:
        began, ended = gap
        # When all dependencies of the blocker are done.
        ready = max((one[5] for own in self._before(blocker[0]) for one in own), default=0)
        cuts = {began, ended, *(time for span in blocker for time in span[4:6]), ready}
        lines = {span[3] for span in blocker}
        others = [
            span
            for line in lines
            for span in self._lines[line]
            if span[5] > began and span[4] < ended and span[:2] != blocker[0][:2]
        ]
        cuts.update(time for span in others for time in span[4:6])
        marks = sorted(cut for cut in cuts if began <= cut <= ended)
        moves, late = 0, 0
        behind: collections.Counter[str] = collections.Counter()
        for start, end in itertools.pairwise(marks):
            if any(span[4] <= start and end <= span[5] for span in blocker):
                moves += end - start
            elif start < ready:
                late += end - start
            else:
                there = [span for span in others if span[4] <= start and end <= span[5]]
                name = self._names[there[0][1]] if there else "transfers scheduled before it"
                behind[name] += end - start
        name = self._names[blocker[0][1]]
        return Wait(task, name, ended - began, moves, dict(behind), late)

    def _path(self) -> list[Link]:
        """Walks the critical path backwards from the next step's start, to the latest cause."""
        links: list[Link] = []
        span = next(one for one in self._spans if one[4] == self._until)
        while span[4] > self._from:
            causes = [one for own in self._before(span) for one in own]
            line = self._lines[span[3]]
            at = line.index(span)
            causes += line[at - 1 : at] if at else []
            causes += [one for one in self._of[span[0], span[1]] if one[5] <= span[4]]
            causes = [one for one in causes if one[5] <= span[4] and one is not span]
            if not causes:
                break
            span = max(causes, key=lambda one: one[5])
            link = Link(self._names[span[1]], _row(span[3]), span[5] - max(span[4], self._from))
            if links and links[-1].task == link.task and links[-1].row == link.row:
                link = dataclasses.replace(link, time_ns=link.time_ns + links.pop().time_ns)
            links.append(link)
        return links[::-1]


def _row(channel: int | None) -> str:
    return "devices" if channel is None else f"channel {channel}"


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.1f} ms"
