"""Finds the steps of a captured program in the records that hosts made while it ran.

A host's computations of a step are found by their names and devices, from the end backwards, as the
controller found the step itself. Messages between hosts belong to the first transfer between their
gangs whose source had been computed when they were sent.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from fairway import _native
from fairway.errors import CaptureError
from fairway.report.steps import Span, StepReport

__all__ = ["HostRecords", "communications", "measure"]

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
    begin_ns: int
    end_ns: int
    size: int


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
    found: dict[int, list[dict[int, Span]]] = {}
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
    steps: list[dict[int, Span]] = [{} for _ in range(count)]
    for host_steps in found.values():
        for step, ours in zip(steps, host_steps[-count:], strict=True):
            for number, span in ours.items():
                # A gang computes from when its last host has begun until its last host has ended.
                step[number] = step.get(number, span).joined(span)
    _add_communication(nodes, steps, hosts, members)
    return StepReport.observed(graph, "measured", steps)


def _find_steps(
    expected: list[tuple[int, str]], known: HostRecords, client: int
) -> list[dict[int, Span]]:
    """Returns the last consecutive steps of a host, the last one last."""
    runs = [record for record in known.records if record[0] == "run" and record[6] == client]
    names = [run[5] for run in runs]
    wanted = [name for _, name in expected]
    length = len(wanted)
    steps: list[dict[int, Span]] = []
    end = len(runs)
    while end >= length and len(steps) < STEPS_MAX:
        if names[end - length : end] == wanted:
            step = zip(expected, runs[end - length : end], strict=True)
            steps.append({number: Span(run[1], run[2]) for (number, _), run in step})
            end -= length
        elif steps:
            break
        else:
            end -= 1
    return steps[::-1]


def _add_communication(
    nodes: Sequence[_native.StepNode],
    steps: list[dict[int, Span]],
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
    for number, step in enumerate(steps):
        for group in communications(nodes):
            first = nodes[group[0]]
            before = [(number, after) for after in first.after]
            before += [(number - back, after) for after, back in first.carried if back <= number]
            # Hosts may record the end of a computation after that of the transfer of its result.
            made = [steps[at][after].begin_ns for at, after in before if after in steps[at]]
            later = [
                step[reader].begin_ns
                for index in group
                for reader in reads[index]
                if reader in step
            ]
            if not made:
                continue
            window = max(made), min(later, default=1 << 63)
            if first.kind == TRANSFER == first.name:
                pool = transfers[first.devices[0], first.devices[1]]
                taken = _take(pool, window, first.size)
            else:
                gangs = {device for index in group for device in nodes[index].devices}
                there = sorted({host for gang in gangs for host in members[gang]})
                has_rows = first.kind == TRANSFER and first.name in ROWS
                peers = len(there) - 1 if has_rows else None
                taken = [
                    message
                    for host in there
                    for message in _take_exchange(exchanges[host], window, peers)
                ]
            if taken:
                span = _span(taken)
                step.update(dict.fromkeys(group, span))


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
            _, begin, end, peer, size, _, _, tag = record
            yield _Message(host, begin, end, size), peer, tag


Key = TypeVar("Key")


def _in_order(found: dict[Key, list[_Message]]) -> dict[Key, list[_Message]]:
    for messages in found.values():
        messages.sort(key=lambda message: message.begin_ns)
    return found


def _take(pool: list[_Message], window: tuple[int, int], size: int) -> list[_Message]:
    """Takes the messages of a window from those that are left, until they have a size."""
    taken: list[_Message] = []
    kept: list[_Message] = []
    for message in _dropping(pool, window[0]):
        if message.begin_ns < window[1] and size > 0:
            taken.append(message)
            size -= message.size
        else:
            kept.append(message)
    pool[:] = kept
    return taken


def _take_exchange(
    pool: list[_Message], window: tuple[int, int], peers: int | None
) -> list[_Message]:
    """Takes what a host sent in its next exchange; it performs one at a time.

    Args:
        pool: the messages that are left; those before the window belong to no later exchange.
        window: first and last time of sending.
        peers: number of messages; None if they are recorded with one begin.
    """
    pool[:] = _dropping(pool, window[0])
    if not pool or pool[0].begin_ns >= window[1]:
        return []
    begin = pool[0].begin_ns
    count = sum(message.begin_ns == begin for message in pool) if peers is None else peers
    taken, pool[:] = pool[:count], pool[count:]
    return taken


def _dropping(pool: list[_Message], earliest_ns: int) -> list[_Message]:
    return [message for message in pool if message.begin_ns >= earliest_ns]


def _span(messages: list[_Message]) -> Span:
    """Returns the span of messages: from when the last host has begun."""
    begins: dict[int, int] = {}
    for message in messages:
        begins[message.host] = min(message.begin_ns, begins.get(message.host, message.begin_ns))
    begin = max(begins.values())
    return Span(begin, max(begin, *(message.end_ns for message in messages)))
