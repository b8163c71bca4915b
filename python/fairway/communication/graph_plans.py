"""The plan of a step graph's communication: segments, channels, and predicted makespans.

Its text parses to the same plan::

    plan of @train, 8 steps
    channel 0: 100000000000.0 bit/s, 5000 ns a round, sums 100000000000.0 bit/s, incast 0.0
    #1, #4: 2 segments on channel 0
    #2: 1 segments on all channels in turn
    strict: 9000 ns
    fifo: 8000 ns
    ordered: 7000 ns
    planned: 6500 ns
    400 plans evaluated: all plans
"""

from __future__ import annotations

import collections
import dataclasses
import re
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, Self

from fairway import _native
from fairway.communication.steps import ChannelCost
from fairway.errors import GraphError

__all__ = ["GraphPlan", "PlannedKind", "kinds_of"]

ORDERS = ("strict", "fifo", "ordered", "planned")
FLOAT = r"(\d[\d.e+-]{0,31})"
NUMBER = r"(\d{1,19})"
HEADER = re.compile(rf"plan of @(\S*), {NUMBER} steps")
CHANNEL = re.compile(
    rf"channel {NUMBER}: {FLOAT} bit/s, {NUMBER} ns a round, sums {FLOAT} bit/s, incast {FLOAT}"
    rf"(?:, overlap ({FLOAT}(?: {FLOAT})*))?"
)
KIND = re.compile(rf"(#\d+(?:, #\d+)*): {NUMBER} segments on (?:channel {NUMBER}|all channels.*)")
MAKESPAN = re.compile(rf"(strict|fifo|ordered|planned): {NUMBER} ns")
SEARCH = re.compile(rf"{NUMBER} plans evaluated: (\S.*)")


@dataclasses.dataclass(frozen=True)
class PlannedKind:
    """How equal communications of a step, such as the all-reduces of one size, are carried out.

    Attributes:
        nodes: of the step graph, in ascending order.
        segments: pieces that each is cut into.
        channel: that carries it; None rotates among all channels.
    """

    nodes: tuple[int, ...]
    segments: int
    channel: int | None

    def __str__(self) -> str:
        named = ", ".join(f"#{node}" for node in self.nodes)
        by = "all channels in turn" if self.channel is None else f"channel {self.channel}"
        return f"{named}: {self.segments} segments on {by}"


@dataclasses.dataclass(frozen=True)
class GraphPlan:
    """A plan, with the predicted makespans of several steps under it and under simpler policies.

    Attributes:
        step: name of the step graph.
        steps: repetitions of the step.
        channels: cost of each channel.
        kinds: strategy of each kind of communication.
        strict_ns: strict FIFO queues, with the best strategy of each communication alone; a
            queue's head that is not ready blocks those behind it (head-of-line blocking).
        fifo_ns: the same, but communications shortly behind the head may overtake it.
        ordered_ns: likewise, ordered by critical path.
        planned_ns: the plan found.
        evaluations: plans that were evaluated.
        reason: why the search stopped.
    """

    step: str
    steps: int
    channels: tuple[ChannelCost, ...]
    kinds: tuple[PlannedKind, ...]
    strict_ns: int
    fifo_ns: int
    ordered_ns: int
    planned_ns: int
    evaluations: int
    reason: str

    @property
    def strict_s(self) -> float:
        """``strict_ns`` in seconds."""
        return self.strict_ns / 1e9

    @property
    def fifo_s(self) -> float:
        """``fifo_ns`` in seconds."""
        return self.fifo_ns / 1e9

    @property
    def ordered_s(self) -> float:
        """``ordered_ns`` in seconds."""
        return self.ordered_ns / 1e9

    @property
    def planned_s(self) -> float:
        """``planned_ns`` in seconds."""
        return self.planned_ns / 1e9

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as ``fairway plan --json`` writes it."""
        seconds = {f"{order}_s": getattr(self, f"{order}_s") for order in ORDERS}
        strategies = [(kind.segments, kind.channel) for kind in self.kinds]
        return {**dataclasses.asdict(self), **seconds, "strategies": strategies}

    def __str__(self) -> str:
        lines = [f"plan of @{self.step}, {self.steps} steps"]
        for number, cost in enumerate(self.channels):
            overlap = f", overlap {' '.join(map(repr, cost.overlap))}" if cost.overlap else ""
            lines.append(
                f"channel {number}: {cost.rate_bps!r} bit/s, {cost.latency_ns} ns a round, "
                f"sums {cost.sums_bps!r} bit/s, incast {cost.incast!r}{overlap}"
            )
        lines += map(str, self.kinds)
        lines += [f"{order}: {getattr(self, f'{order}_ns')} ns" for order in ORDERS]
        lines.append(f"{self.evaluations} plans evaluated: {self.reason}")
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the text of ``str``.

        Raises:
            GraphError: the text is no plan; names the line.
        """
        lines = _Lines(text)
        step, steps = lines.one(HEADER, "`plan of @NAME, ... steps`").groups()
        channels = []
        for number, found in enumerate(lines.several(CHANNEL)):
            if int(found[1]) != number:
                raise lines.error(f"channel {number}")
            overlap = tuple(map(lines.number, (found[6] or "").split()))
            rate, sums, incast = map(lines.number, (found[2], found[4], found[5]))
            channels.append(ChannelCost(rate, int(found[3]), sums, incast, overlap))
        kinds = [_kind(found) for found in lines.several(KIND)]
        spans = {}
        for order in ORDERS:
            found = lines.one(MAKESPAN, f"`{order}: ... ns`")
            if found[1] != order:
                raise lines.error(f"`{order}: ... ns`")
            spans[f"{order}_ns"] = int(found[2])
        evaluations, reason = lines.one(SEARCH, "`... plans evaluated: REASON`").groups()
        lines.end()
        plan = cls(
            step=step,
            steps=int(steps),
            channels=tuple(channels),
            kinds=tuple(kinds),
            evaluations=int(evaluations),
            reason=reason,
            **spans,
        )
        if str(plan) != text:
            raise GraphError("the text is not as a plan is printed; numbers have one form each")
        return plan

    def verify(self, graph: _native.StepGraph) -> None:
        """Checks that it is a plan of a graph.

        Raises:
            GraphError: of another graph, or it carries out a communication twice, not at all, or
                on a channel that is not there.
        """
        if graph.name != self.step:
            raise GraphError(f"the plan is of @{self.step}; expected one of @{graph.name}")
        found = collections.Counter(kind.nodes for kind in self.kinds)
        expected = collections.Counter(kinds_of(graph))
        for what, wrong in (
            ("a kind that the graph lacks, or has once", found - expected),
            ("no strategy of", expected - found),
        ):
            for nodes in sorted(wrong)[:1]:
                named = ", ".join(f"#{node}" for node in nodes[:8])
                raise GraphError(f"the plan has {what}: {named}")
        for kind in self.kinds:
            if kind.segments < 1 or kind.channel not in (None, *range(len(self.channels))):
                raise GraphError(
                    f"`{kind}` cannot be carried out; there are {len(self.channels)} channels"
                )


def kinds_of(graph: _native.StepGraph) -> list[tuple[int, ...]]:
    """Returns the nodes of each kind of communication of a graph, by the number of the kind."""
    numbers = graph.communication_kinds()
    count = max((kind for kind in numbers if kind is not None), default=-1) + 1
    kinds: list[list[int]] = [[] for _ in range(count)]
    for node, kind in enumerate(numbers):
        if kind is not None:
            kinds[kind].append(node)
    return [tuple(nodes) for nodes in kinds]


def _kind(found: re.Match[str]) -> PlannedKind:
    nodes = tuple(int(node[1:]) for node in found[1].split(", "))
    return PlannedKind(nodes, int(found[2]), None if found[3] is None else int(found[3]))


class _Lines:
    """The lines of a text, read one after another."""

    def __init__(self, text: str) -> None:
        self._lines: Sequence[str] = text.split("\n")
        self._next = 0

    def error(self, expected: str) -> GraphError:
        """Returns the error of the line that was read last."""
        line = reprlib.repr(self._lines[self._next - 1])
        return GraphError(f"line {self._next} is {line}; expected {expected}")

    def number(self, word: str) -> float:
        """Returns a number of the line that was read last."""
        try:
            return float(word)
        except ValueError:
            raise self.error("numbers") from None

    def one(self, form: re.Pattern[str], expected: str) -> re.Match[str]:
        """Returns the next line, which must have a form."""
        line = self._lines[self._next] if self._next < len(self._lines) else ""
        self._next += 1
        found = form.fullmatch(line)
        if found is None:
            self._next = min(self._next, len(self._lines))
            raise self.error(expected)
        return found

    def several(self, form: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """Yields the next lines as long as they have a form."""
        while self._next < len(self._lines):
            found = form.fullmatch(self._lines[self._next])
            if found is None:
                return
            self._next += 1
            yield found

    def end(self) -> None:
        """Checks that only the last line's end is left."""
        self._next += 1
        if list(self._lines[self._next - 1 :]) != [""]:
            self._next = min(self._next, len(self._lines))
            raise self.error("the end")
