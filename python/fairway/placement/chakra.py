"""Placed steps as Chakra's traces, a file for each rank: read from them, written to them.

A device is what the rank of a file computes on. A collective is one thing for all ranks whose files
have it: the same process group (``pg_name``), and as many collectives of it before. What is sent
and what is received are one as well, by ``comm_src``, ``comm_dst`` and ``comm_tag``. What moves in
memory or runs on hosts takes no time, and passes on what it waits for.

Source: github.com/mlcommons/chakra, schema/protobuf/et_def.proto.
"""

from __future__ import annotations

import collections
import graphlib
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairway.communication.chakra import (
    COLLECTIVE,
    COMPUTES,
    RECEIVES,
    SENDS,
    Node,
    ordered,
    read_nodes,
    write_nodes,
)
from fairway.errors import GraphError, StepError
from fairway.placement.graphs import Tasks

__all__ = ["find_traces", "read_step", "rescaled", "write_step"]

PASSES = {0: "all_reduce", 1: "reduce_scatter", 2: "all_gather", 5: "all_gather",
          7: "reduce_scatter", 8: "reduce_scatter", 9: "all_reduce"}  # fmt: skip
"""What collectives come to on links, by their types. One that has a root moves as much as one that
gathers or scatters; a barrier is an all-reduce of nothing."""
ALL_TO_ALL = 6
TYPES = {"all_reduce": 0, "all_gather": 2, "reduce_scatter": 7}
RANKS_MAX = 1 << 16


def read_step(paths: Sequence[str | os.PathLike[str]]) -> tuple[Tasks, int]:
    """A step of as many devices as there are files, and how many these are.

    Args:
        paths: of the files of all ranks, in the order of ranks.

    Raises:
        GraphError: a file is no trace, or ranks do not go together; says which node.
        OSError: a file cannot be read.
    """
    if not 0 < len(paths) <= RANKS_MAX:
        raise GraphError(f"there are {len(paths)} traces; expected 1 to {RANKS_MAX}")
    step = _Step(len(paths))
    for rank, path in enumerate(paths):
        for node in _nodes(path):
            step.add(rank, node, path)
    return step.tasks(), len(paths)


def _nodes(path: str | os.PathLike[str]) -> list[Node]:
    """Each behind what it waits for."""
    try:
        nodes = read_nodes(path)
    except StepError as error:
        raise GraphError(str(error)) from None
    try:
        return ordered(nodes)
    except StepError as error:
        raise GraphError(f"{path} is no step: {error}") from None


class _Step:
    """Tasks of all ranks, joined where ranks meet."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        # What each task does, or what those who meet say that it is.
        self._jobs: list[Any] = []
        self._after: list[set[int]] = []
        # By rank and node, the tasks that stand for it.
        self._made: dict[tuple[int, int], set[int]] = {}
        self._met: dict[tuple[Any, ...], int] = {}
        self._counts: collections.Counter[tuple[Any, ...]] = collections.Counter()

    def add(self, rank: int, node: Node, path: object) -> None:
        after = set().union(*(self._made[rank, number] for number in node.after))
        where = f"node {node.number} ({node.name[:80]}) of {path}"
        made = None
        if node.computes:
            nanoseconds = node.attributes.get("duration_ns", 1000 * node.duration_us)
            made = self._new((rank, _size(where, "duration_ns", nanoseconds)))
        elif node.kind in (SENDS, RECEIVES):
            made = self._transfer(rank, node, where)
        elif node.kind == COLLECTIVE:
            made = self._collective(rank, node, where)
        if made is None:
            self._made[rank, node.number] = after
            return
        self._after[made] |= after
        self._made[rank, node.number] = {made}

    def _new(self, job: Any) -> int:
        self._jobs.append(job)
        self._after.append(set())
        return len(self._jobs) - 1

    def _meet(self, key: tuple[Any, ...], job: Any) -> int:
        """The same task for all who have come to it as often."""
        if key not in self._met:
            self._met[key] = self._new(job)
        return self._met[key]

    def _transfer(self, rank: int, node: Node, where: str) -> int | None:
        is_sent = node.kind == SENDS
        source = node.attributes.get("comm_src", rank if is_sent else None)
        target = node.attributes.get("comm_dst", None if is_sent else rank)
        for name, value in (("comm_src", source), ("comm_dst", target)):
            if not isinstance(value, int) or not 0 <= value < self._ranks:
                raise GraphError(f"{where} has {name} {value!r}; expected a rank of {self._ranks}")
        if source == target:
            return None
        size = _size(where, "comm_size", node.attributes.get("comm_size"))
        key = (source, target, node.attributes.get("comm_tag", 0))
        count = self._counts[is_sent, *key]
        self._counts[is_sent, *key] += 1
        return self._meet((*key, count), (source, target, size))

    def _collective(self, rank: int, node: Node, where: str) -> int:
        kind = node.attributes.get("comm_type")
        if kind != ALL_TO_ALL and kind not in PASSES:
            raise GraphError(f"{where} is a collective of type {kind!r}")
        size = _size(where, "comm_size", node.attributes.get("comm_size", 0))
        group = str(node.attributes.get("pg_name", ""))
        count = self._counts[rank, group]
        self._counts[rank, group] += 1
        made = self._meet((group, count), {"kind": kind, "size": size, "members": []})
        known = self._jobs[made]
        if known["kind"] != kind:
            raise GraphError(f"{where} is of type {kind}, where another rank has {known['kind']}")
        known["size"] = max(known["size"], size)
        known["members"].append(rank)
        return made

    def tasks(self) -> Tasks:
        """All of them; what all exchange with all is so many transfers."""
        tasks: Tasks = []
        # Of each task, those that it has become.
        became: list[list[int]] = []
        for job in self._jobs:
            first = len(tasks)
            for made in _jobs(job):
                tasks.append((made, []))
            became.append(list(range(first, len(tasks))))
        for number, after in enumerate(self._after):
            waits = sorted(one for other in after for one in became[other])
            for task in became[number]:
                tasks[task][1].extend(waits)
        return tasks


def _jobs(job: Any) -> list[tuple[Any, ...]]:
    if not isinstance(job, dict):
        return [job]
    members, size = sorted(job["members"]), job["size"]
    if job["kind"] != ALL_TO_ALL or len(members) == 1:
        return [(members, size, PASSES.get(job["kind"], "all_gather"))]
    each = size // len(members)
    return [(one, other, each) for one in members for other in members if one != other]


def _size(where: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise GraphError(f"{where} has {name} {value!r}; expected a whole number from 0 on")
    return value


def write_step(directory: str | os.PathLike[str], tasks: Tasks, devices: int) -> list[Path]:
    """Writes a step, as ``rank.0.et`` and so on; where.

    What waits for another device although nothing goes between them gets a message of no bytes.

    Raises:
        GraphError: tasks wait for each other, or the folder has traces of other ranks.
        OSError: it cannot be written.
    """
    writer = _Writer(devices)
    order = graphlib.TopologicalSorter({number: after for number, (_, after) in enumerate(tasks)})
    try:
        for number in order.static_order():
            writer.add(number, *tasks[number])
    except graphlib.CycleError as error:
        raise GraphError(f"task {error.args[1][0]} waits for itself, by others") from None
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"rank.{rank}.et" for rank in range(devices)]
    others = sorted(set(folder.glob("*.et")) - set(paths))
    if others:
        raise GraphError(f"{folder} has traces of other ranks, such as {others[0].name}")
    for path, nodes in zip(paths, writer.nodes, strict=True):
        write_nodes(path, nodes)
    return paths


class _Writer:
    """Nodes of all ranks."""

    def __init__(self, devices: int) -> None:
        self.nodes: list[list[Node]] = [[] for _ in range(devices)]
        # Of each task, the number of its node on each rank that has it.
        self._made: dict[int, dict[int, int]] = {}
        self._groups: dict[tuple[int, ...], str] = {}
        self._count = 0

    def add(self, number: int, job: tuple[Any, ...], after: Sequence[int]) -> None:
        """A task, behind all that it waits for."""
        ranks = _ranks_of(job)
        waits: dict[int, list[int]] = {rank: [] for rank in ranks}
        for other in after:
            known = self._made[other]
            for rank in [rank for rank in ranks if rank in known]:
                waits[rank].append(known[rank])
            if not set(ranks) & set(known):
                source, target = min(known), ranks[0]
                sent = self._message(f"{other} to {number}", (source, target, 0))
                self._node(source, *sent, [known[source]])
                waits[target].append(self._node(target, *sent, []))
        made = self._message(str(number), job)
        self._made[number] = {rank: self._node(rank, *made, waits[rank]) for rank in ranks}

    def _message(self, number: str, job: tuple[Any, ...]) -> tuple[str, int, dict[str, Any]]:
        """Name, type and attributes; what is sent has the type for its sender."""
        self._count += 1
        if len(job) == 2 and isinstance(job[0], int):
            return f"compute {number}", COMPUTES, {"duration_ns": int(job[1])}
        if isinstance(job[0], int):
            source, target, size = job
            ends = {"comm_src": source, "comm_dst": target}
            return f"move {number}", SENDS, {**ends, "comm_size": size, "comm_tag": self._count}
        name = job[2] if len(job) > 2 else "all_reduce"
        group = self._groups.setdefault(tuple(_ranks_of(job)), str(len(self._groups)))
        given = {"comm_type": TYPES[name], "comm_size": job[1], "pg_name": group}
        return f"{name} {number}", COLLECTIVE, given

    def _node(
        self, rank: int, name: str, kind: int, given: dict[str, Any], after: Sequence[int]
    ) -> int:
        if kind == SENDS and given["comm_dst"] == rank:
            kind = RECEIVES
        number = len(self.nodes[rank])
        took_us = given.get("duration_ns", 0) // 1000
        given = {"is_cpu_op": False, **given}
        waits = tuple(sorted(set(after)))
        self.nodes[rank].append(Node(number, name, kind, waits, 0, took_us, given))
        return number


def _ranks_of(job: tuple[Any, ...]) -> list[int]:
    if isinstance(job[0], int):
        return [job[0]] if len(job) == 2 else [job[0], job[1]]
    return list(job[0])


def find_traces(directory: str | os.PathLike[str]) -> list[Path]:
    """Files of all ranks in a folder, in the order of the last number in their names.

    Raises:
        GraphError: there are none, or two of one rank.
    """
    found: dict[int, Path] = {}
    for path in sorted(Path(directory).glob("*.et")):
        numbers = re.findall(r"\d+", path.stem)
        if not numbers or int(numbers[-1]) in found:
            raise GraphError(f"{path} says no rank of its own; expected names such as rank.0.et")
        found[int(numbers[-1])] = path
    if not found:
        raise GraphError(f"{directory} has no traces of Chakra (.et)")
    return [found[rank] for rank in sorted(found)]


def rescaled(tasks: Tasks, devices: int, count: int) -> Tasks:
    """A step of so many devices as one of more or fewer, which compute as much each.

    More are copies: collectives of all devices become collectives of all copies, and the rest stays
    within a copy. Fewer do what several did.

    Args:
        tasks: of ``devices``.
        devices: how many there are.
        count: how many there shall be: a multiple, or a part.

    Raises:
        GraphError: it is neither.
    """
    if count >= devices and count % devices == 0:
        return _more(tasks, devices, count // devices)
    if count > 0 and devices % count == 0:
        return _fewer(tasks, devices // count)
    raise GraphError(f"{devices} devices cannot be {count}; expected a multiple or a part")


def _more(tasks: Tasks, devices: int, copies: int) -> Tasks:
    computing = {job[0] for job, _ in tasks if len(job) == 2 and isinstance(job[0], int)}
    are_one = [isinstance(job[0], list) and computing <= set(job[0]) for job, _ in tasks]
    firsts = list(itertools.accumulate((1 if one else copies for one in are_one), initial=0))

    def of_copy(task: int, copy: int) -> int:
        return firsts[task] + (0 if are_one[task] else copy)

    more: Tasks = []
    for (job, after), is_one in zip(tasks, are_one, strict=True):
        moved = [_moved(job, copy * devices) for copy in range(copies)]
        waits = [[of_copy(other, copy) for other in after] for copy in range(copies)]
        if is_one:
            members = [member for one in moved for member in one[0]]
            moved, waits = [(members, *job[1:])], [sorted(set().union(*waits))]
        more += zip(moved, waits, strict=True)
    return more


def _moved(job: tuple[Any, ...], by: int) -> tuple[Any, ...]:
    if isinstance(job[0], list):
        return ([member + by for member in job[0]], *job[1:])
    if len(job) == 2:
        return (job[0] + by, job[1])
    return (job[0] + by, job[1] + by, job[2])


def _fewer(tasks: Tasks, each: int) -> Tasks:
    fewer: Tasks = []
    for job, after in tasks:
        if isinstance(job[0], list):
            members = sorted({member // each for member in job[0]})
            made: tuple[Any, ...] = (members, *job[1:])
        elif len(job) == 2:
            made = (job[0] // each, job[1])
        else:
            source, target, size = job[0] // each, job[1] // each, job[2]
            # What stays on a device takes no time there.
            made = (source, target, size) if source != target else (source, 0)
        fewer.append((made, after))
    return fewer
