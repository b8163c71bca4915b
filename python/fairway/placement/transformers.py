"""Step times of transformers from their description, parallelized over a machine of many devices.

Source: Narayanan et al. 2021 (arXiv:2104.04473) for the parallelism; the constants of :data:`A100`
are fitted to 20 of vTrain's measured iterations, see ``benchmarks/fidelity.py``.
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
    "Transformer",
    "TransformerStep",
    "read_all_reduces",
    "step_graph",
    "step_time",
]


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Architecture of a transformer.

    Attributes:
        layers: count.
        hidden: size of a token's hidden state.
        heads: attention heads.
        sequence: tokens of a sample.
        vocabulary: distinct tokens.
        experts: experts of every layer; 1 for a dense model.
        active: experts to which a token is routed (top-k).
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
            PlacementError: a size is below 1, the heads do not divide ``hidden``, or tokens are
                routed to more experts than there are.
        """
        if min(dataclasses.astuple(self)) < 1 or self.hidden % self.heads:
            experts = f" and {self.experts} experts" if self.experts != 1 else ""
            raise PlacementError(
                f"a transformer of {self.layers} layers, {self.hidden} numbers in {self.heads} "
                f"heads, {self.sequence} tokens of {self.vocabulary}{experts} cannot be; expected "
                "at least one of each, and whole heads"
            )
        if self.active > self.experts:
            raise PlacementError(
                f"a token is routed to {self.active} of {self.experts} experts (active, experts); "
                "expected no more than there are"
            )


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """Parallelism strategy.

    Attributes:
        data: degree of data parallelism.
        tensor: degree of tensor parallelism.
        pipeline: pipeline stages.
        micro_batch: samples of a copy in a microbatch.
        batch: global batch size in samples.
        expert: degree of expert parallelism, within data parallelism.
        recomputes: whether activations are recomputed in the backward pass instead of kept.
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
    """Cost model of an accelerator. Rates and memory are a data sheet's; the rest is fitted.

    Attributes:
        flops: peak FLOP/s of 16-bit matrix products.
        memory_bytes_per_s: peak memory bandwidth.
        memory_bytes: capacity.
        efficiency: fraction of ``flops`` that very large products attain.
        narrow: hidden size at which products attain half of that.
        passes: memory traffic of activations between products, as a multiple of the minimum.
        weights_passes: the same for attention weights.
        launch_s: host time to launch a layer forward and backward.
        straggle: slowdown per doubling of the devices that synchronize, as a fraction (stragglers).
        unfused_s: extra time where softmax is not fused.
        reduces: factor of all-reduce times over those measured in isolation.
        head: factor of the output layer's time over that of its products.
        update: factor of optimizer updates over their memory time.
        overhead_s: fixed overhead of a microbatch.
        sharpness: how sharply the longer of compute and launch time hides the shorter.
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
    """Devices and their network.

    Attributes:
        links: the network, with measured all-reduce times inside a server.
        accelerator: model of each device.
        reaches: fraction of the rate that is attained between servers.
    """

    links: _native.Links
    accelerator: Accelerator
    reaches: float = 1.0


@dataclasses.dataclass(frozen=True)
class TransformerStep:
    """Predicted time of a step, and its parts.

    Attributes:
        total_s: the whole step.
        layer_s: a microbatch through a layer, forward and backward.
        communication_s: communication within ``layer_s``.
        bubble_s: pipeline bubble: time to fill and drain the pipeline.
        gradients_s: gradient all-reduce, after the last microbatch.
        updates_s: optimizer updates.
        memory_bytes: of each device.
    """

    total_s: float
    layer_s: float
    communication_s: float
    bubble_s: float
    gradients_s: float
    updates_s: float
    memory_bytes: int


def step_time(model: Transformer, machine: Machine, cut: Parallelism) -> TransformerStep:
    """Predicts the time of a step under a parallelism strategy.

    Raises:
        PlacementError: the strategy does not divide the model, or does not fit in memory.
    """
    try:
        parts, memory = machine.links.transformer_step(
            model, machine.accelerator, cut, machine.reaches
        )
    except ValueError as error:
        raise PlacementError(str(error)) from None
    return TransformerStep(*parts, memory)


def step_graph(model: Transformer, machine: Machine, cut: Parallelism) -> _native.StepGraph:
    """Returns the step of a parallelism strategy, on all devices.

    Device ``(stage * data + copy) * tensor + part`` holds a part of the layers of a stage.

    Raises:
        PlacementError: the strategy does not divide the model, or its step has too many nodes.
    """
    try:
        return machine.links.transformer_graph(model, machine.accelerator, cut, machine.reaches)
    except ValueError as error:
        raise PlacementError(str(error)) from None


def read_all_reduces(path: str | os.PathLike[str]) -> list[tuple[float, float]]:
    """Reads all-reduce times measured by nccl-tests, as CSV; returns bytes and seconds.

    Raises:
        PlacementError: the file is no such table.
        OSError: the file cannot be read.
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
"""The same fit, for four adapters of 200 Gbit/s in a node of eight."""
