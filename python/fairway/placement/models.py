"""Models from their published descriptions, as operator graphs: FLOPs, memory and activations.

A layer takes its arithmetic time or its memory time, whichever is longer (roofline), plus a kernel
launch. The backward pass takes twice as long, on the devices of the parameters. Numbers have 16
bits; an optimizer keeps 12 bytes of each parameter besides. Matrices are sharded as in Megatron:
one by columns, the next by rows, whose partial sums stay reduce-scattered until all of them are
needed.

Source: He et al. 2016 (ResNet-50), Dehghani et al. 2019 and tensor2tensor's ``big`` (Universal
Transformer), Shoeybi et al. 2019 and Narayanan et al. 2021 (Megatron).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from fairway.placement.graphs import Edge, Op, OpGraph, Split
from fairway.placement.transformers import Transformer

__all__ = ["DEVICES", "MODELS", "SAMPLES", "V100", "Device", "Model", "transformer"]

NUMBER = 2
BACKWARD: dict[Split, Split] = {
    "blocks": "blocks",
    "samples": "samples",
    "outputs": "inputs",
    "inputs": "outputs",
}
"""Sharding dimension in the backward pass, by that of the forward pass: outputs and inputs swap."""
STATE = 14
"""Bytes per parameter besides itself: its gradient and the optimizer state."""


@dataclasses.dataclass(frozen=True)
class Device:
    """Roofline model of a device.

    Attributes:
        flops: attained FLOP/s.
        memory_bytes_per_s: attained memory bandwidth.
        memory_bytes: capacity.
        launch_s: launch overhead of each operation.
    """

    flops: float
    memory_bytes_per_s: float
    memory_bytes: int
    launch_s: float

    def seconds(self, flops: float, moved: float) -> float:
        """Returns the roofline time of ``flops`` operations that read and write ``moved`` bytes."""
        return max(flops / self.flops, moved / self.memory_bytes_per_s) + self.launch_s


V100 = Device(0.45 * 125e12, 0.75 * 900e9, 32 << 30, 5e-6)
"""NVIDIA's V100 with 32 GB. Assumed: the attained fractions of its data sheet, and launch
overhead."""

DEVICES = {
    "v100": V100,
    "a100": Device(0.45 * 312e12, 0.75 * 2039e9, 80 << 30, 5e-6),
    "h100": Device(0.45 * 989e12, 0.75 * 3350e9, 80 << 30, 5e-6),
}
"""NVIDIA's devices by name, at the same fractions of their data sheets (dense bfloat16, SXM)."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A forward operation and its backward counterpart, for one sample.

    Attributes:
        flops: of the forward pass.
        output: size of its activations, in numbers.
        parameters: count.
        before: numbers of layers whose outputs it reads.
        moved: numbers read and written, besides parameters.
        split: sharding dimension.
    """

    name: str
    flops: float
    output: float
    parameters: float
    before: tuple[int, ...]
    moved: float
    split: Split


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its convergence.

    Attributes:
        layers: in topological order.
        curve: batch sizes in samples, and steps to reach the target quality with each.
    """

    layers: Sequence[Layer]
    curve: Sequence[tuple[int, int]]

    def parameters(self) -> float:
        """Returns the number of parameters."""
        return sum(layer.parameters for layer in self.layers)

    def graph(self, device: Device, batches: Sequence[int]) -> OpGraph:
        """Returns the operator graph, forward and backward, with times on this device."""
        count = len(self.layers)
        next_: list[list[int]] = [[] for _ in self.layers]
        for number, layer in enumerate(self.layers):
            for before in layer.before:
                next_[before].append(number)
        ops = []
        for layer in self.layers:
            moved = layer.parameters, layer.moved
            ops.append(
                Op(
                    layer.name,
                    [_ns(device, b * layer.flops, moved, b) for b in batches],
                    [_edge(self.layers[before], before, batches) for before in layer.before],
                    [int(NUMBER * b * layer.output) for b in batches],
                    int((NUMBER + STATE) * layer.parameters),
                    split=layer.split,
                    launch_ns=round(1e9 * device.launch_s),
                )
            )
        for number in reversed(range(count)):
            layer = self.layers[number]
            after = [_edge(layer, number, batches)]
            # The gradient of its output comes from every consumer.
            places = {other: 2 * count - 1 - other for other in next_[number]}
            after += [_edge(layer, place, batches) for place in places.values()]
            moved = 2 * layer.parameters, 2 * layer.moved
            ops.append(
                Op(
                    f"{layer.name} backward",
                    [_ns(device, 2 * b * layer.flops, moved, b) for b in batches],
                    after,
                    gradients=int(NUMBER * layer.parameters),
                    beside=number,
                    split=BACKWARD[layer.split],
                    launch_ns=round(1e9 * device.launch_s),
                )
            )
        return OpGraph(batches, ops)


def _ns(device: Device, flops: float, moved: tuple[float, float], batch: int) -> int:
    parameters, numbers = moved
    return round(1e9 * device.seconds(flops, NUMBER * (parameters + batch * numbers)))


def _edge(layer: Layer, number: int, batches: Sequence[int]) -> Edge:
    return Edge(number, [int(NUMBER * batch * layer.output) for batch in batches])


class _Maker:
    """Appends layers to a model."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def add(
        self,
        name: str,
        flops: float,
        output: float,
        parameters: float = 0,
        *,
        after: object = None,
        split: Split = "blocks",
    ) -> int:
        """Appends a layer, by default after the last one; returns its number."""
        last = len(self.layers) - 1
        given = (last,) if after is None else after
        before = tuple(given) if isinstance(given, tuple) else (given,)
        before = tuple(number for number in before if isinstance(number, int) and number >= 0)
        moved = output + sum(self.layers[number].output for number in before)
        self.layers.append(Layer(name, flops, output, parameters, before, moved, split))
        return len(self.layers) - 1


def transformer(
    layers: int, hidden: int, heads: int, sequence: int, vocabulary: int
) -> list[Layer]:
    """Returns the layers of a decoder transformer.

    Raises:
        PlacementError: a size is below 1, or the heads do not divide ``hidden``.
    """
    Transformer(layers, hidden, heads, sequence, vocabulary)  # rejects invalid sizes
    make = _Maker()
    tokens = sequence * hidden
    last = make.add("embedding", tokens, tokens, vocabulary * hidden)
    for number in range(layers):
        name = f"layer {number} "
        queries = 6 * tokens * hidden, 3 * tokens, 3 * hidden**2
        make.add(f"{name}queries", *queries, split="outputs")
        make.add(f"{name}weights", 2 * tokens * sequence, heads * sequence**2)
        make.add(f"{name}attention", 2 * tokens * sequence, tokens)
        own = make.add(f"{name}projection", 2 * tokens * hidden, tokens, hidden**2, split="inputs")
        last = make.add(f"{name}attention sum", tokens, tokens, after=(own, last))
        make.add(f"{name}up", 8 * tokens * hidden, 4 * tokens, 4 * hidden**2, split="outputs")
        own = make.add(f"{name}down", 8 * tokens * hidden, tokens, 4 * hidden**2, split="inputs")
        last = make.add(f"{name}sum", tokens, tokens, after=(own, last))
    make.add("tokens", 2 * tokens * vocabulary, sequence * vocabulary, split="outputs")
    return make.layers


def _resnet50() -> list[Layer]:
    make = _Maker()

    def convolve(
        size: int,
        inputs: int,
        outputs: int,
        width: int,
        after: object = None,
        split: Split = "outputs",
    ) -> int:
        parameters = inputs * outputs * width**2
        numbers = outputs * size**2
        name = f"convolution {len(make.layers)}"
        flops = 2 * parameters * size**2
        make.add(name, flops, numbers, parameters, after=after, split=split)
        return make.add(f"{name} normalized", numbers, numbers)

    convolve(112, 3, 64, 7)
    last = make.add("pool", 9 * 64 * 56**2, 64 * 56**2)
    channels = 64
    for size, width, count in ((56, 64, 3), (28, 128, 4), (14, 256, 6), (7, 512, 3)):
        for number in range(count):
            beside = last
            # Wide activations are reduced or passed on in blocks, narrow ones are broadcast.
            if number == 0:
                beside = convolve(size, channels, 4 * width, 1, last, "inputs")
            convolve(size, channels, width, 1, last, "inputs")
            convolve(size, width, width, 3)
            convolve(size, width, 4 * width, 1)
            channels = 4 * width
            last = make.add(
                "sum", channels * size**2, channels * size**2, after=(len(make.layers) - 1, beside)
            )
    make.add("mean", channels * 49, channels)
    make.add("classes", 2 * channels * 1000, 1000, channels * 1000, split="outputs")
    return make.layers


def _curve(fewest: int, critical: int, batches: Sequence[int]) -> list[tuple[int, int]]:
    """Returns batches and steps: steps fall in proportion with samples up to the critical batch."""
    return [(batch, round(fewest * (1 + critical / batch))) for batch in batches]


SAMPLES = tuple(2**power for power in range(16))
"""Samples of a copy for which operations are described."""
RESNET_BATCHES = (1024, 2048, 4096, 8192, 16384, 32768)
TRANSFORMER_BATCHES = (512, 1024, 2048, 4096, 8192)

MODELS: dict[str, Callable[[], Model]] = {
    "resnet50": lambda: Model(_resnet50(), _curve(2000, 24_000, RESNET_BATCHES)),
    "transformer": lambda: Model(
        transformer(6, 2048, 16, 64, 32_768), _curve(12_000, 1_500, TRANSFORMER_BATCHES)
    ),
    "megatron": lambda: Model(transformer(40, 6144, 48, 1024, 51_200), [(1024, 240_000)]),
}
"""By name. Assumed: convergence curves of the first two, in the form of McCandlish et al. 2018,
such that the best batches take about the 8,192 and 16,384 steps of SiP-ML's public scripts;
Megatron's is SiP-ML's own (§4.1)."""
