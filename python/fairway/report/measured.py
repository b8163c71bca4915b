"""Finds the steps of a captured program in the records that hosts made while it ran.

A host's computations of a step are found by their names and devices, from the end backwards, as the
controller found the step itself. Messages between hosts belong to the first transfer between their
gangs that is left, whose host was to send them after it was to compute what they carry. That order
is exact; the ends of computations are noticed late on a machine that is busy.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from fairway import _native
from fairway.errors import CaptureError
from fairway.report.steps import Span, StepReport

__all__ = ["HostRecords", "communications", "measure"]

UNBOUNDED = 1 << 63
TRANSFER = "transfer"
"""Kind of a transfer, and name of one that is no part of an exchange."""
ROWS = ("dispatch", "collect")
"""Names of exchanges of rows, in which a host sends each other one a message of its own."""
STEPS_MAX = 64
"""Most steps of a report: the last ones."""
STEPS_MIN = 4
"""Fewest steps that are worth a report."""


@dataclasses.dataclass(frozen=True)
class HostRecords:
    """What a host recorded.

    Attributes:
        devices: numbers of its devices, over all islands.
        records: see :mod:`fairway.host.trace`.
    """

    devices: range
    records: Sequence[list[Any]]


@dataclasses.dataclass(frozen=True)
class _Message:
    host: int
    order: int
    begin_ns: int
    end_ns: int
    size: int


class _Step:
    """One step: the spans of its nodes, and the order of each host's commands to compute."""

    def __init__(self, floors: dict[int, int]) -> None:
        self.spans: dict[int, Span] = {}
        self.orders: dict[int, dict[int, int]] = {host: {} for host in floors}
        self._floors = floors

    def add(self, host: int, node: int, run: list[Any]) -> None:
        """Adds a computation of a host.

        A gang computes from when its last host has begun until its last host has ended.
        """
        span = Span(run[1], run[2])
        self.spans[node] = self.spans.get(node, span).joined(span)
        self.orders[host][node] = run[8]

    def floor(self, host: int, node: int) -> int:
        """Returns the order of the last computation of a host before a node, in program order."""
        orders = self.orders.get(host, {})
        before = [order for other, order in orders.items() if other < node]
        return max(before, default=self._floors.get(host, 0))


def measure(program: str, client: int, hosts: dict[int, HostRecords]) -> StepReport:
    """Returns the report of the last steps of a captured program.

    Args:
        program: its text.
        client: the client that ran it.
        hosts: the records of all hosts.

    Raises:
        CaptureError: its steps are not in the records, or too few of them.
    """
    graph = _native.StepGraph.of_program(program)
    gangs: list[list[int]] = _native.read_program(program)["gangs"]
    members = [
        [host for host, known in hosts.items() if set(known.devices) & set(gang)] for gang in gangs
    ]
    nodes = graph.nodes
    computations = [number for number, node in enumerate(nodes) if node.kind == "compute"]
    functions, _, _, called = _native.program_nodes(program)
    calls = [
        set(devices)
        for function, devices, *_ in called
        if function is not None and devices and not functions[function][3]
    ]
    found: dict[int, list[list[tuple[int, list[Any]]]]] = {}
    for host, known in hosts.items():
        expected = [
            (number, nodes[number].name.partition(":")[0])
            for number, devices in zip(computations, calls, strict=True)
            if devices.intersection(known.devices)
        ]
        if expected:
            found[host] = _find_steps(expected, known, client)
    if not found:
        raise CaptureError("the step computes nothing, so it is not found in what ran")
    count = min(len(steps) for steps in found.values())
    if count < STEPS_MIN:
        raise CaptureError(
            f"the script repeated its last step {count} times without others between; expected at "
            f"least {STEPS_MIN} to measure it"
        )
    count = min(count, STEPS_MAX)
    steps = _together(found, hosts, count)
    _add_communication(nodes, steps, hosts, members)
    return StepReport.observed(graph, "measured", [step.spans for step in steps])


def _together(
    found: dict[int, list[list[tuple[int, list[Any]]]]], hosts: dict[int, HostRecords], count: int
) -> list[_Step]:
    """Returns the last ``count`` steps of all hosts."""
    orders = {
        host: sorted(record[8] for record in hosts[host].records if record[0] == "run")
        for host in found
    }
    steps: list[_Step] = []
    for back in range(count, 0, -1):
        floors: dict[int, int] = {}
        for host, host_steps in found.items():
            before = bisect.bisect_left(orders[host], host_steps[-back][0][1][8])
            floors[host] = orders[host][before - 1] if before else 0
        step = _Step(floors)
        for host, host_steps in found.items():
            for node, run in host_steps[-back]:
                step.add(host, node, run)
        steps.append(step)
    return steps


def _find_steps(
    expected: list[tuple[int, str]], known: HostRecords, client: int
) -> list[list[tuple[int, list[Any]]]]:
    """Returns the nodes and runs of the last consecutive steps of a host, the last one last."""
    runs = [record for record in known.records if record[0] == "run" and record[6] == client]
    names = [run[5] for run in runs]
    wanted = [name for _, name in expected]
    length = len(wanted)
    steps: list[list[tuple[int, list[Any]]]] = []
    end = len(runs)
    while end >= length and len(steps) < STEPS_MAX:
        if names[end - length : end] == wanted:
            step = zip(expected, runs[end - length : end], strict=True)
            steps.append([(number, run) for (number, _), run in step])
            end -= length
        elif steps:
            break
        else:
            end -= 1
    return steps[::-1]


def _add_communication(
    nodes: Sequence[_native.StepNode],
    steps: list[_Step],
    hosts: dict[int, HostRecords],
    members: list[list[int]],
) -> None:
    """Adds the spans of transfers and exchanges whose messages are found."""
    transfers = _messages_between(hosts, members)
    exchanges = _messages_of_exchanges(hosts)
    reads: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for after in node.after:
            reads[after].append(index)
    groups = communications(nodes)
    for number, step in enumerate(steps):
        for group in groups:
            first = nodes[group[0]]
            before = [(step, after) for after in first.after]
            before += [(steps[number - back], at) for at, back in first.carried if back <= number]
            if not any(node in at.spans for at, node in before):
                continue
            readers = [reader for index in group for reader in reads[index]]
            taken: list[_Message] = []
            if first.kind == TRANSFER == first.name:
                pool = transfers[first.devices[0], first.devices[1]]
                windows = {
                    host: _window(host, group[0], before, (step, readers))
                    for host in members[first.devices[0]]
                }
                taken = _take(pool, windows, first.size)
            else:
                gangs = {device for index in group for device in nodes[index].devices}
                is_rows = first.kind == TRANSFER and first.name in ROWS
                for host in sorted({host for gang in gangs for host in members[gang]}):
                    window = _window(host, group[0], before, (step, readers))
                    taken += _take_exchange(exchanges[host], window, is_rows)
            if taken:
                step.spans.update(dict.fromkeys(group, _span(taken)))


def _window(
    host: int, node: int, before: list[tuple[_Step, int]], after: tuple[_Step, list[int]]
) -> tuple[int, int]:
    """Returns the orders between which a host was to send the messages of a node.

    Args:
        host: the host.
        node: the node.
        before: what the node depends on.
        after: its step, and the nodes of that step that depend on it.
    """
    step, readers = after
    computed = [at.orders[host][other] for at, other in before if other in at.orders.get(host, {})]
    reads = [step.orders[host][other] for other in readers if other in step.orders.get(host, {})]
    return max(computed, default=step.floor(host, node)), min(reads, default=UNBOUNDED)


def communications(nodes: Sequence[_native.StepNode]) -> list[list[int]]:
    """Returns the transfers and collectives of a step; all transfers of an exchange are one."""
    groups: list[list[int]] = []
    pairs: set[tuple[int, ...]] = set()
    for index, node in enumerate(nodes):
        if node.kind == "compute":
            continue
        before, pair = nodes[groups[-1][-1]] if groups else None, tuple(node.devices)
        is_next = (
            before is not None
            and groups[-1][-1] == index - 1
            and node.kind == before.kind == TRANSFER
            and node.name == before.name != TRANSFER
            and node.after == before.after
            and pair not in pairs
        )
        if is_next:
            groups[-1].append(index)
            pairs.add(pair)
        else:
            groups.append([index])
            pairs = {pair}
    return groups


def _messages_between(
    hosts: dict[int, HostRecords], members: list[list[int]]
) -> dict[tuple[int, int], list[_Message]]:
    """Returns the messages of transfers between each two gangs, by the time of sending."""
    found: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    gangs = _gangs(members)
    for host, known in hosts.items():
        for message, peer, tag in _sent(host, known):
            if tag and peer in hosts:
                for source in gangs[host]:
                    for target in gangs[peer]:
                        found[source, target].append(message)
    return _in_order(found)


def _messages_of_exchanges(hosts: dict[int, HostRecords]) -> dict[int, list[_Message]]:
    """Returns what each host sent in exchanges, which have no tag, by the time of sending."""
    found: dict[int, list[_Message]] = defaultdict(list)
    for host, known in hosts.items():
        found[host] = [
            message for message, peer, tag in _sent(host, known) if not tag and peer in hosts
        ]
    return _in_order(found)


def _gangs(members: list[list[int]]) -> dict[int, list[int]]:
    """Returns the gangs of each host."""
    gangs: dict[int, list[int]] = defaultdict(list)
    for gang, there in enumerate(members):
        for host in there:
            gangs[host].append(gang)
    return gangs


def _sent(host: int, known: HostRecords) -> Iterator[tuple[_Message, int, int]]:
    """Yields what a host sent, with its target and tag."""
    for record in known.records:
        if record[0] == "move" and record[5] == "out":
            _, begin, end, peer, size, _, _, tag, order = record
            yield _Message(host, order, begin, end, size), peer, tag


Key = TypeVar("Key")


def _in_order(found: dict[Key, list[_Message]]) -> dict[Key, list[_Message]]:
    for messages in found.values():
        messages.sort(key=lambda message: message.begin_ns)
    return found


def _take(pool: list[_Message], windows: dict[int, tuple[int, int]], size: int) -> list[_Message]:
    """Takes the messages of each host's window from those that are left, until they have a size.

    Those before the windows belong to no later transfer.
    """
    taken: list[_Message] = []
    kept: list[_Message] = []
    for message in pool:
        earliest, latest = windows[message.host]
        if message.order < earliest:
            continue
        if message.order < latest and size > 0:
            taken.append(message)
            size -= message.size
        else:
            kept.append(message)
    pool[:] = kept
    return taken


def _take_exchange(pool: list[_Message], window: tuple[int, int], is_rows: bool) -> list[_Message]:
    """Takes what a host sent in its next exchange; it performs one at a time.

    Args:
        pool: the messages that are left; those before the window belong to no later exchange.
        window: first and last order.
        is_rows: whether it is an exchange of rows, whose messages begin one after another.
    """
    earliest, latest = window
    pool[:] = [message for message in pool if message.order >= earliest]
    if not pool or pool[0].order >= latest:
        return []

    def exchange(message: _Message) -> tuple[int, int]:
        return message.order, 0 if is_rows else message.begin_ns

    next_one = exchange(pool[0])
    taken = [message for message in pool if exchange(message) == next_one]
    pool[:] = [message for message in pool if exchange(message) != next_one]
    return taken


def _span(messages: list[_Message]) -> Span:
    """Returns the span of messages: from when the last host has begun."""
    begins: dict[int, int] = {}
    for message in messages:
        begins[message.host] = min(message.begin_ns, begins.get(message.host, message.begin_ns))
    begin = max(begins.values())
    return Span(begin, max(begin, *(message.end_ns for message in messages)))
