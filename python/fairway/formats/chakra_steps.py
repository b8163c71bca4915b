"""Placed steps as Chakra execution traces, a file for each rank: reading and writing.

Each rank is a device. Collective nodes of several ranks are one collective if they have the same
process group (``pg_name``) and the same position among its collectives. Sends and receives are
matched by ``comm_src``, ``comm_dst`` and ``comm_tag``. Memory copies and host operations take no
time, and pass on their dependencies.

Source: github.com/mlcommons/chakra, schema/protobuf/et_def.proto.
"""

from __future__ import annotations

import collections
import contextlib
import graphlib
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairway._native import StepGraph, StepNode
from fairway.errors import GraphError, StepError
from fairway.formats.chakra import (
    COLLECTIVE,
    COMPUTES,
    RECEIVES,
    SENDS,
    TraceNode,
    ordered,
    read_nodes,
    write_nodes,
)

__all__ = ["find_traces", "read_step", "rescaled", "write_step"]

PASSES = {0: "all_reduce", 1: "reduce_scatter", 2: "all_gather", 5: "all_gather",
          7: "reduce_scatter", 8: "reduce_scatter", 9: "all_reduce"}  # fmt: skip
"""Equivalent of each collective type on links. A rooted collective transfers as much as a gather or
scatter; a barrier is an all-reduce of no bytes."""
ALL_TO_ALL = 6
TYPES = {"all_reduce": 0, "all_gather": 2, "all_to_all": ALL_TO_ALL, "reduce_scatter": 7}
RANKS_MAX = 1 << 16


def read_step(paths: Sequence[str | os.PathLike[str]]) -> StepGraph:
    """Reads a step with one device per file.

    Args:
        paths: traces of all ranks, in order of rank.

    Raises:
        GraphError: a file is no trace, or ranks do not match; says which node.
        OSError: a file cannot be read.
    """
    if not 0 < len(paths) <= RANKS_MAX:
        raise GraphError(f"there are {len(paths)} traces; expected 1 to {RANKS_MAX}")
    step = _Step(len(paths))
    for rank, path in enumerate(paths):
        for node in _nodes(path):
            step.add(rank, node, path)
    return step.graph()


def _nodes(path: str | os.PathLike[str]) -> list[TraceNode]:
    """Reads nodes in topological order."""
    try:
        nodes = read_nodes(path)
    except StepError as error:
        raise GraphError(str(error)) from None
    try:
        return ordered(nodes)
    except StepError as error:
        raise GraphError(f"{path} is no step: {error}") from None


class _Step:
    """Tasks of all ranks; collectives and transfers are shared by their ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        # Of each task: its work, or for a collective what its members' traces state.
        self._jobs: list[Any] = []
        self._after: list[set[int]] = []
        # By rank and node, the tasks whose end is the end of that node.
        self._made: dict[tuple[int, int], set[int]] = {}
        self._met: dict[tuple[Any, ...], int] = {}
        self._counts: collections.Counter[tuple[Any, ...]] = collections.Counter()

    def add(self, rank: int, node: TraceNode, path: object) -> None:
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
        """Returns the task of this key, shared by all ranks that name it."""
        if key not in self._met:
            self._met[key] = self._new(job)
        return self._met[key]

    def _transfer(self, rank: int, node: TraceNode, where: str) -> int | None:
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

    def _collective(self, rank: int, node: TraceNode, where: str) -> int:
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

    def graph(self) -> StepGraph:
        """Returns the step graph, its tasks in the order in which they were read.

        Raises:
            GraphError: a count overflows, or ranks wait for each other (deadlock).
        """
        graph = StepGraph(self._ranks)
        # In the order of files, so a task may depend on a later one.
        for job, after in zip(self._jobs, self._after, strict=True):
            try:
                _add(graph, job, sorted(after))
            except ValueError as error:
                raise GraphError(str(error)) from None
        return graph


def _add(graph: StepGraph, job: Any, after: Sequence[int]) -> None:
    if isinstance(job, dict):
        kind = "all_to_all" if job["kind"] == ALL_TO_ALL else PASSES[job["kind"]]
        graph.collective(kind, sorted(job["members"]), job["size"], after)
    elif len(job) == 2:
        device, time_ns = job
        graph.compute(device, time_ns, after)
    else:
        source, target, size = job
        graph.transfer(source, target, size, after)


def _size(where: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise GraphError(f"{where} has {name} {value!r}; expected a whole number from 0 on")
    return value


def write_step(directory: str | os.PathLike[str], graph: StepGraph) -> list[Path]:
    """Writes a step of all devices, as ``rank.0.et`` and so on; returns the paths.

    A dependency between devices without a transfer becomes a message of no bytes. If it fails or is
    interrupted, no file is left.

    Raises:
        GraphError: the tasks have a dependency cycle, or the folder has traces of other ranks.
        OSError: the files cannot be written.
    """
    nodes = graph.nodes
    writer = _Writer(graph.devices)
    order = graphlib.TopologicalSorter({n: node.after for n, node in enumerate(nodes)})
    try:
        for number in order.static_order():
            writer.add(number, nodes[number])
    except graphlib.CycleError as error:
        raise GraphError(f"task {error.args[1][0]} waits for itself, by others") from None
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"rank.{rank}.et" for rank in range(graph.devices)]
    others = sorted(set(folder.glob("*.et")) - set(paths))
    if others:
        raise GraphError(f"{folder} has traces of other ranks, such as {others[0].name}")
    try:
        for path, written in zip(paths, writer.nodes, strict=True):
            write_nodes(path, written)
    except BaseException:
        for path in paths:  # a part of a step is no step
            with contextlib.suppress(OSError):
                path.unlink()
        raise
    return paths


class _Writer:
    """Builds the trace nodes of all ranks."""

    def __init__(self, devices: int) -> None:
        self.nodes: list[list[TraceNode]] = [[] for _ in range(devices)]
        # Of each task, the number of its node on each participating rank.
        self._made: dict[int, dict[int, int]] = {}
        self._groups: dict[tuple[int, ...], str] = {}
        self._count = 0

    def add(self, number: int, node: StepNode) -> None:
        """Adds a task, all dependencies of which were added before."""
        ranks = node.devices
        waits: dict[int, list[int]] = {rank: [] for rank in ranks}
        for other in node.after:
            known = self._made[other]
            for rank in [rank for rank in ranks if rank in known]:
                waits[rank].append(known[rank])
            if not set(ranks) & set(known):
                source, target = min(known), ranks[0]
                sent = self._transfer(f"{other} to {number}", (source, target), 0)
                self._node(source, *sent, [known[source]])
                waits[target].append(self._node(target, *sent, []))
        made = self._message(str(number), node)
        self._made[number] = {rank: self._node(rank, *made, waits[rank]) for rank in ranks}

    def _message(self, number: str, node: StepNode) -> tuple[str, int, dict[str, Any]]:
        """Returns name, type and attributes; transfers have the sender's type."""
        if node.kind == "compute":
            return f"compute {number}", COMPUTES, {"duration_ns": node.time_ns}
        if node.kind == "transfer":
            source, target = node.devices
            return self._transfer(number, (source, target), node.size)
        group = self._groups.setdefault(tuple(node.devices), str(len(self._groups)))
        size = node.size // len(node.devices) if node.kind == "all_to_all" else node.size
        given = {"comm_type": TYPES[node.kind], "comm_size": size, "pg_name": group}
        return f"{node.kind} {number}", COLLECTIVE, given

    def _transfer(
        self, number: str, ends: tuple[int, int], size: int
    ) -> tuple[str, int, dict[str, Any]]:
        self._count += 1
        given = {"comm_src": ends[0], "comm_dst": ends[1], "comm_size": size}
        return f"move {number}", SENDS, {**given, "comm_tag": self._count}

    def _node(
        self, rank: int, name: str, kind: int, given: dict[str, Any], after: Sequence[int]
    ) -> int:
        if kind == SENDS and given["comm_dst"] == rank:
            kind = RECEIVES
        number = len(self.nodes[rank])
        took_us = given.get("duration_ns", 0) // 1000
        given = {"is_cpu_op": False, **given}
        waits = tuple(sorted(set(after)))
        self.nodes[rank].append(TraceNode(number, name, kind, waits, 0, took_us, given))
        return number


def find_traces(directory: str | os.PathLike[str]) -> list[Path]:
    """Finds the traces of all ranks in a folder, ordered by the last number in their names.

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


def rescaled(graph: StepGraph, count: int) -> StepGraph:
    """Rescales a step to more or fewer devices, with the same compute per device.

    More devices are copies (data parallelism): collectives of all computing devices span all
    copies, and the rest stays within a copy. With fewer, each device executes the tasks of several.

    Args:
        graph: a step of all devices.
        count: number of devices: a multiple or a divisor of the present number.

    Raises:
        GraphError: the count is neither.
    """
    devices = graph.devices
    if count >= devices and count % devices == 0:
        return _more(graph, count // devices)
    if count > 0 and devices % count == 0:
        return _fewer(graph, devices // count)
    raise GraphError(f"{devices} devices cannot be {count}; expected a multiple or a part")


def _more(graph: StepGraph, copies: int) -> StepGraph:
    nodes, devices = graph.nodes, graph.devices
    computing = {device for node in nodes if node.kind == "compute" for device in node.devices}
    are_one = [
        node.kind not in ("compute", "transfer", "all_to_all") and computing <= set(node.devices)
        for node in nodes
    ]
    firsts = list(itertools.accumulate((1 if one else copies for one in are_one), initial=0))

    def of_copy(node: int, copy: int) -> int:
        return firsts[node] + (0 if are_one[node] else copy)

    more = StepGraph(devices * copies, graph.name)
    for node, is_one in zip(nodes, are_one, strict=True):
        waits = [[of_copy(other, copy) for other in node.after] for copy in range(copies)]
        moved = [[device + copy * devices for device in node.devices] for copy in range(copies)]
        if is_one:
            moved, waits = [list(itertools.chain(*moved))], [sorted(set(itertools.chain(*waits)))]
        for named, after in zip(moved, waits, strict=True):
            _add_like(more, node, named, after)
    return more


def _add_like(graph: StepGraph, node: StepNode, devices: list[int], after: list[int]) -> None:
    """Adds the same task on other devices."""
    if node.kind == "compute":
        graph.compute(devices, node.time_ns, after, name=node.name)
    elif node.kind == "transfer":
        source, target = devices
        # A transfer within a device takes no time.
        if source == target:
            graph.compute(source, 0, after, name=node.name)
        else:
            graph.transfer(source, target, node.size, after, name=node.name)
    else:
        # The size of an all-to-all node is that of all ranks' blocks; each rank has an equal share.
        size = node.size // len(devices) if node.kind == "all_to_all" else node.size
        graph.collective(node.kind, devices, size, after, name=node.name)


def _fewer(graph: StepGraph, each: int) -> StepGraph:
    fewer = StepGraph(graph.devices // each, graph.name)
    for node in graph.nodes:
        devices = [device // each for device in node.devices]
        if node.kind != "transfer":
            devices = sorted(set(devices))
        _add_like(fewer, node, devices, node.after)
    return fewer
