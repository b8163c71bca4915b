"""Models as their operations: what each takes, what it gives to which others, what it keeps."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from fairway import _native
from fairway.errors import PlacementError

__all__ = ["Edge", "Op", "OpGraph", "Split", "of_flexflow"]

Split = Literal["blocks", "samples", "outputs", "inputs"]
"""What an operation is cut along: everything, block by block; samples, so that each shard has all
parameters; what it gives, such as columns of a matrix; or what it needs, such as rows."""


@dataclasses.dataclass(frozen=True)
class Edge:
    """What an operation needs of another.

    Attributes:
        source: the other's number.
        sizes: bytes, by batch.
    """

    source: int
    sizes: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation.

    Attributes:
        name: what people call it.
        times_ns: how long one device computes, by batch.
        after: what it needs.
        kept: bytes that it keeps until the step is over, by batch; none without any.
        resident: bytes that it always has: parameters, gradients, what an optimizer keeps.
        gradients: bytes that copies of it tell each other in a step.
        beside: the number of the operation where it is: whose parameters it uses.
        device: where it was, where somebody has placed it before.
        shards_max: into how many shards it can be cut.
        split: along what.
        launch_ns: the part of its time that each shard takes, such as to be launched.
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
    """A model in training, one step of it.

    Attributes:
        batches: samples for which costs are known, fewest first.
        ops: operations, in any order.
        sums: numbers of operations whose devices add up what they have, and how many bytes.
    """

    batches: Sequence[int]
    ops: Sequence[Op]
    sums: Sequence[tuple[Sequence[int], int]] = ()

    def native(self) -> _native.OpGraph:
        """The same, checked.

        Raises:
            PlacementError: it makes no sense; says where.
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
    """Operations of a task graph of FlexFlow, free to be placed anew; as it is, to begin with.

    Each task that computes is an operation that cannot be cut; what it needs of others is what is
    transferred. Where two were on one device nothing says how much that would be: as much as the
    median of all transfers is assumed.
    """
    nodes = graph.nodes
    sent = [node.size for node in nodes if node.kind == "transfer"]
    usual = int(statistics.median(sent)) if sent else 0
    numbers: dict[int, int] = {}
    # Of each transfer, the operations that it brings something from.
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
