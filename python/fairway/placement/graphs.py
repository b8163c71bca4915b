"""Models as operator graphs: the time, dependencies and memory of each operation."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from fairway import _native
from fairway.errors import PlacementError

__all__ = ["Edge", "Op", "OpGraph", "Split", "of_flexflow"]

Split = Literal["blocks", "samples", "outputs", "inputs"]
"""Sharding dimension of an operation: blocks of everything; samples, so that each shard has all
parameters; outputs, such as columns of a matrix; or inputs, such as rows."""


@dataclasses.dataclass(frozen=True)
class Edge:
    """A dependency between operations.

    Attributes:
        source: number of the producer.
        sizes: bytes, by batch.
    """

    source: int
    sizes: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation.

    Attributes:
        name: human-readable label.
        times_ns: time on one device, by batch.
        after: dependencies.
        kept: bytes of activations kept until the end of the step, by batch; none without any.
        resident: bytes that are always held: parameters, gradients, optimizer state.
        gradients: bytes that its copies all-reduce in a step.
        beside: number of the operation with which it is colocated: whose parameters it uses.
        device: its device in a previous placement, if any.
        shards_max: maximum number of shards.
        split: sharding dimension.
        launch_ns: fixed overhead of each shard within its time, such as its launch.
    """

    name: str
    times_ns: Sequence[int]
    after: Sequence[Edge] = ()
    kept: Sequence[int] = ()
    resident: int = 0
    gradients: int = 0
    beside: int | None = None
    device: int | None = None
    shards_max: int = 1 << 20
    split: Split = "blocks"
    launch_ns: int = 0


@dataclasses.dataclass(frozen=True)
class OpGraph:
    """One training step of a model.

    Attributes:
        batches: samples for which costs are known, fewest first.
        ops: operations, in any order.
        sums: numbers of operations whose devices all-reduce, and how many bytes.
    """

    batches: Sequence[int]
    ops: Sequence[Op]
    sums: Sequence[tuple[Sequence[int], int]] = ()

    def native(self) -> _native.OpGraph:
        """Returns the native graph, verified.

        Raises:
            PlacementError: the graph is invalid; says where.
        """
        none = [0] * len(self.batches)
        ops = [
            (
                op.name,
                list(zip(op.times_ns, op.kept or none, strict=True)),
                [(edge.source, list(edge.sizes)) for edge in op.after],
                op.resident,
                op.gradients,
                op.beside,
                op.device,
                op.shards_max,
                op.split,
                op.launch_ns,
            )
            for op in self.ops
        ]
        try:
            return _native.OpGraph(list(self.batches), ops, [(list(a), b) for a, b in self.sums])
        except (ValueError, OverflowError) as error:
            raise PlacementError(f"the model cannot be placed: {error}") from None


def of_flexflow(graph: _native.StepGraph) -> OpGraph:
    """Makes operations of FlexFlow's task graph that can be placed anew, with their old devices.

    Each compute task is an operation that cannot be sharded; its dependencies are the transfers.
    Where two tasks share a device, the size is unknown: the median of all transfers is assumed.
    """
    nodes = graph.nodes
    sent = [node.size for node in nodes if node.kind == "transfer"]
    usual = int(statistics.median(sent)) if sent else 0
    numbers: dict[int, int] = {}
    # Of each transfer or collective, the producers of its data.
    brought: dict[int, dict[int, int]] = {}
    ops: list[Op] = []
    sums: list[tuple[list[int], int]] = []
    for number, node in enumerate(nodes):
        given: dict[int, int] = {}
        for other in node.after:
            if other in numbers:
                given[numbers[other]] = max(given.get(numbers[other], 0), usual)
            for source, size in brought.get(other, {}).items():
                given[source] = max(given.get(source, 0), size)
        if node.kind == "transfer":
            brought[number] = dict.fromkeys(given, node.size)
        elif node.kind != "compute":
            sums.append((list(given), node.size))
            brought[number] = given
        else:
            numbers[number] = len(ops)
            edges = [Edge(source, [size]) for source, size in given.items()]
            (device,) = node.devices
            name = f"task {number}"
            ops.append(Op(name, [node.time_ns], edges, device=device, shards_max=1))
    return OpGraph([1], ops, sums)
