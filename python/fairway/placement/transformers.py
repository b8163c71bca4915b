"""Transformers by their description: how long a step takes, cut over a machine of many devices.

Source: Narayanan et al. 2021 (arXiv:2104.04473) for how models are cut; the constants of
:data:`A100` are fitted to 20 of vTrain's measured iterations, see ``benchmarks/fidelity.py``.
"""

from __future__ import annotations

import csv
import dataclasses
import os
from pathlib import Path

from fairway import _native
from fairway.errors import PlacementError

__all__ = [
    "A100",
    "A100_REACHES",
    "Accelerator",
    "Machine",
    "Parallelism",
    "Step",
    "Transformer",
    "read_all_reduces",
    "step_time",
]


@dataclasses.dataclass(frozen=True)
class Transformer:
    """What a transformer is.

    Attributes:
        layers: how many.
        hidden: numbers of each token.
        heads: of attention.
        sequence: tokens of a sample.
        vocabulary: different tokens.
        experts: of every layer; 1 where there is no choice.
        active: experts that a token visits.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 51_200
    experts: int = 1
    active: int = 1

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            PlacementError: there is nothing of something, or heads are of different sizes.
        """
        if min(dataclasses.astuple(self)) < 1 or self.hidden % self.heads:
            experts = f" and {self.experts} experts" if self.experts != 1 else ""
            raise PlacementError(
                f"a transformer of {self.layers} layers, {self.hidden} numbers in {self.heads} "
                f"heads, {self.sequence} tokens of {self.vocabulary}{experts} cannot be; expected "
                "at least one of each, and whole heads"
            )


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """How a model is cut.

    Attributes:
        data: copies that take different samples.
        tensor: devices that share every layer.
        pipeline: stages.
        micro_batch: samples of a copy that go through the stages at a time.
        batch: samples of a step, of all copies.
        expert: copies among which experts are spread.
        recomputes: whether what is needed backward is computed again instead of kept.
    """

    data: int
    tensor: int
    pipeline: int
    micro_batch: int
    batch: int
    expert: int = 1
    recomputes: bool = False


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """What computes. Rates and memory are a data sheet's; the rest is fitted.

    Attributes:
        flops: operations a second, of products of 16-bit numbers.
        memory_bytes_per_s: what its memory moves.
        memory_bytes: how much it has.
        efficiency: the part of ``flops`` that endless products reach.
        narrow: hidden numbers at which products reach half of that.
        passes: how often what tokens are is read or written between products, of what must be.
        weights_passes: how often attention's weights are.
        launch_s: what a host takes to launch a layer forward and backward.
        straggle: part more of that each time that twice as many devices wait for each other.
        unfused_s: what it takes besides where softmax is not fused.
        reduces: what all-reduces take, of what they take alone.
        head: what the choice of tokens takes, of what its products should.
        update: what updates take, of what memory should.
        overhead_s: what a microbatch takes besides.
        sharpness: how sharply the more of computing and launching hides the less.
    """

    flops: float
    memory_bytes_per_s: float
    memory_bytes: int
    efficiency: float = 0.8
    narrow: float = 1000.0
    passes: float = 2.5
    weights_passes: float = 13.0
    launch_s: float = 3.0e-3
    straggle: float = 0.1
    unfused_s: float = 1.2e-3
    reduces: float = 1.0
    head: float = 1.0
    update: float = 3.5
    overhead_s: float = 2e-3
    sharpness: float = 6.0


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices, and what joins them.

    Attributes:
        links: what joins them, and what all-reduces inside a server were measured to take.
        accelerator: what each of them is.
        reaches: the part of its rate that is reached between servers.
    """

    links: _native.Links
    accelerator: Accelerator
    reaches: float = 1.0


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step takes.

    Attributes:
        total_s: all of it.
        layer_s: a microbatch through a layer, forward and backward.
        told_s: the part of that in which devices tell each other.
        bubble_s: waiting for a pipeline to fill and to empty.
        gradients_s: gradients, all told after the last microbatch.
        updates_s: updates of parameters.
        memory_bytes: of each device.
    """

    total_s: float
    layer_s: float
    told_s: float
    bubble_s: float
    gradients_s: float
    updates_s: float
    memory_bytes: int


def step_time(model: Transformer, machine: Machine, cut: Parallelism) -> Step:
    """What a step of a model takes that is cut so.

    Raises:
        PlacementError: it cannot be cut so, or does not fit.
    """
    try:
        parts, memory = machine.links.transformer_step(
            model, machine.accelerator, cut, machine.reaches
        )
    except ValueError as error:
        raise PlacementError(str(error)) from None
    return Step(*parts, memory)


def read_all_reduces(path: str | os.PathLike[str]) -> list[tuple[float, float]]:
    """What nccl-tests measured all-reduces to take, as CSV: bytes and seconds.

    Raises:
        PlacementError: the file is no such table.
        OSError: it cannot be read.
    """
    with Path(path).open(newline="") as file:
        rows = list(csv.reader(file))
    try:
        size, time = rows[0].index("size(B)"), rows[0].index("time(ns)")
        found = [(float(row[size]), float(row[time]) / 1e9) for row in rows[1:] if row]
    except (IndexError, ValueError) as error:
        raise PlacementError(
            f"{path} is no table of all-reduces ({error}); expected columns size(B) and time(ns)"
        ) from None
    if not found or any(size <= 0 or time <= 0 for size, time in found):
        raise PlacementError(f"{path} has no sizes and times above 0")
    return sorted(found)


A100 = Accelerator(
    flops=312e12,
    memory_bytes_per_s=2.039e12,
    memory_bytes=80 << 30,
    efficiency=0.880,
    narrow=1772,
    passes=2.57,
    weights_passes=11.6,
    launch_s=3.12e-3,
    straggle=0.0563,
    unfused_s=1.20e-3,
    reduces=1.153,
    head=1.208,
    update=3.46,
    overhead_s=2.83e-3,
    sharpness=4.84,
)
"""NVIDIA's A100 with 80 GB (SXM4), by its data sheet; the rest fitted to 20 rows of vTrain's
measurements, the first draw of ``benchmarks/fidelity.py``."""
A100_REACHES = 0.864
"""Likewise, of four adapters of 200 Gbit/s in a node of eight."""
