"""The plan of a step graph's communication: algorithms, segments, channels, order and makespans.

Its text parses to the same plan::

    plan of @train, 8 steps
    channel 0: 100000000000.0 bit/s, 5000 ns a round, sums 100000000000.0 bit/s, incast 0.0
    #1, #4: ring, 2 segments on channel 0
    #2: 1 segments on all channels in turn
    order: #1.0 #2.0 #1.1 #4.0 #4.1
    strict: 9000 ns
    fifo: 8000 ns
    ordered: 7000 ns
    planned: 6500 ns
    400 plans evaluated: all plans

A plan for a topology has ``network: torus:4x4`` in place of its channels.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import reprlib
import sys
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
NETWORK = re.compile(r"network: (\S.*)")
KIND = re.compile(
    rf"(#\d{{1,10}}(?:, #\d{{1,10}})*): (?:([a-z]+(?:[- ][a-z0-9]+)?), )?{NUMBER} segments on "
    rf"(?:channel {NUMBER}|all channels in turn)"
)
PIECE = r"#(\d{1,10})\.(\d{1,10})"
ORDER = re.compile(rf"order: (as it becomes ready|{PIECE}(?: {PIECE})*)")
MAKESPAN = re.compile(rf"(strict|fifo|ordered|planned): {NUMBER} ns")
SEARCH = re.compile(rf"{NUMBER} plans evaluated: (\S.*)")


@dataclasses.dataclass(frozen=True)
class PlannedKind:
    """How equal communications of a step, such as the all-reduces of one size, are carried out.

    Attributes:
        nodes: of the step graph, in ascending order.
        segments: pieces that each is cut into.
        channel: that carries it; None rotates among all channels.
        algorithm: of a collective, such as ``ring``; None of a transfer.
    """

    nodes: tuple[int, ...]
    segments: int
    channel: int | None
    algorithm: str | None

    def __str__(self) -> str:
        named = ", ".join(f"#{node}" for node in self.nodes)
        by = "all channels in turn" if self.channel is None else f"channel {self.channel}"
        algorithm = "" if self.algorithm is None else f"{self.algorithm}, "
        return f"{named}: {algorithm}{self.segments} segments on {by}"


@dataclasses.dataclass(frozen=True)
class GraphPlan:
    """A plan, with the predicted makespans of several steps under it and under simpler policies.

    Attributes:
        step: name of the step graph.
        steps: repetitions of the step.
        network: the topology that it is for; None if channels were measured.
        channels: cost of each channel; none on a topology, where each device has one.
        kinds: strategy of each kind of communication.
        order: the pieces of all communication of one step, as nodes and segments, in the order in
            which channels carry them; empty is the order in which they become ready.
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
    network: str | None
    channels: tuple[ChannelCost, ...]
    kinds: tuple[PlannedKind, ...]
    order: tuple[tuple[int, int], ...]
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

    @property
    def pieces(self) -> int:
        """Number of all pieces of communication of one step."""
        return sum(len(kind.nodes) * kind.segments for kind in self.kinds)

    def unordered(self) -> Self:
        """Returns the plan whose pieces are carried as they become ready."""
        return dataclasses.replace(self, order=())

    def apply(self, graph: _native.StepGraph) -> _native.PlannedStep:
        """Returns a step, on any devices, with its communication in pieces and in the plan's order.

        Raises:
            GraphError: the plan is of another step, or its order contradicts the dependencies.
        """
        channels = max(len(self.channels), 1)
        strategies = [(kind.segments, kind.channel, kind.algorithm) for kind in self.kinds]
        try:
            return _native.PlannedStep.of_plan(graph, channels, strategies, self.order)
        except (ValueError, OverflowError) as error:
            raise GraphError(f"the plan of @{self.step} cannot be applied: {error}") from None

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as ``fairway plan --json`` writes it."""
        seconds = {f"{order}_s": getattr(self, f"{order}_s") for order in ORDERS}
        strategies = [(kind.segments, kind.channel) for kind in self.kinds]
        return {**dataclasses.asdict(self), **seconds, "strategies": strategies}

    def __str__(self) -> str:
        lines = [f"plan of @{self.step}, {self.steps} steps"]
        lines += [] if self.network is None else [f"network: {self.network}"]
        for number, cost in enumerate(self.channels):
            overlap = f", overlap {' '.join(map(repr, cost.overlap))}" if cost.overlap else ""
            lines.append(
                f"channel {number}: {cost.rate_bps!r} bit/s, {cost.latency_ns} ns a round, "
                f"sums {cost.sums_bps!r} bit/s, incast {cost.incast!r}{overlap}"
            )
        lines += map(str, self.kinds)
        order = " ".join(f"#{node}.{segment}" for node, segment in self.order)
        lines.append(f"order: {order or 'as it becomes ready'}")
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
        network = next((found[1] for found in lines.several(NETWORK, most=1)), None)
        channels = []
        for number, found in enumerate(lines.several(CHANNEL)):
            if int(found[1]) != number:
                raise lines.error(f"channel {number}")
            overlap = tuple(map(lines.number, (found[6] or "").split()))
            rate, sums, incast = map(lines.number, (found[2], found[4], found[5]))
            channels.append(ChannelCost(rate, int(found[3]), sums, incast, overlap))
        kinds = [_kind(found) for found in lines.several(KIND)]
        order = lines.one(ORDER, "`order: #NODE.SEGMENT ...`")[1]
        pieces = re.findall(PIECE, order)
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
            network=network,
            channels=tuple(channels),
            kinds=tuple(kinds),
            order=tuple((int(node), int(segment)) for node, segment in pieces),
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
            GraphError: of another graph, or it carries out a communication twice, not at all, by an
                algorithm or on a channel that is not there, or in an order that cannot be.
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
        count = max(len(self.channels), 1)
        for kind in self.kinds:
            if kind.segments < 1 or kind.channel not in (None, *range(count)):
                raise GraphError(f"`{kind}` cannot be carried out; there are {count} channels")
        self.apply(graph)


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
    channel = None if found[4] is None else int(found[4])
    return PlannedKind(nodes, int(found[3]), channel, found[2])


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

    def several(self, form: re.Pattern[str], most: int = sys.maxsize) -> Iterator[re.Match[str]]:
        """Yields the next lines as long as they have a form."""
        for _ in range(min(most, len(self._lines) - self._next)):
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
