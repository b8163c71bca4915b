"""Models by their public descriptions, as operations: what layers compute, hold and pass on.

A layer takes as long as its products or as what it reads and writes, whichever is more, and a
launch. Backward it takes twice as long, where its parameters are. Numbers have 16 bits; an
optimizer keeps 12 bytes of each parameter besides. Matrices are cut as Megatron cuts them: columns
of one, then rows of the next, whose sums are cut into blocks until all of them are needed.

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
"""Along what an operation is cut backward, by what it is forward: what it gives is needed then."""
STATE = 14
"""Bytes of each parameter besides itself: its gradient and what an optimizer keeps."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What a device does.

    Attributes:
        flops: operations a second.
        memory_bytes_per_s: what its memory moves.
        memory_bytes: how much it has.
        launch_s: of each operation.
    """

    flops: float
    memory_bytes_per_s: float
    memory_bytes: int
    launch_s: float

    def seconds(self, flops: float, moved: float) -> float:
        """What so many operations take that move so many bytes."""
        return max(flops / self.flops, moved / self.memory_bytes_per_s) + self.launch_s


V100 = Device(0.45 * 125e12, 0.75 * 900e9, 32 << 30, 5e-6)
"""NVIDIA's V100 with 32 GB. Assumed: the parts of its data sheet that are reached, and launches."""

DEVICES = {
    "v100": V100,
    "a100": Device(0.45 * 312e12, 0.75 * 2039e9, 80 << 30, 5e-6),
    "h100": Device(0.45 * 989e12, 0.75 * 3350e9, 80 << 30, 5e-6),
}
"""NVIDIA's by name, by the same parts of their data sheets (dense bfloat16, SXM)."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One operation forward, and what follows from it backward; of one sample.

    Attributes:
        flops: forward.
        output: numbers that it gives to others.
        parameters: numbers.
        before: numbers of layers that it needs.
        moved: numbers read and written, besides parameters.
        split: along what it is cut.
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
    """A model, and how long it trains.

    Attributes:
        layers: in an order in which each comes behind what it needs.
        curve: samples of a step, and steps until it is as good as wanted.
    """

    layers: Sequence[Layer]
    curve: Sequence[tuple[int, int]]

    def parameters(self) -> float:
        """How many there are."""
        return sum(layer.parameters for layer in self.layers)

    def graph(self, device: Device, batches: Sequence[int]) -> OpGraph:
        """Its operations, forward and backward, on such devices."""
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
            # Gradients of its output come from all that used it.
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
    """Puts layers one behind another."""

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
        """One more layer, behind the last one unless somebody says; its number."""
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
    """Layers of a transformer that predicts tokens.

    Raises:
        PlacementError: there is nothing of something, or heads are of different sizes.
    """
    Transformer(layers, hidden, heads, sequence, vocabulary)  # refuses sizes that cannot be
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
            # What is wide is added up or passed on as blocks, what is narrow is told to all.
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
    """Steps fall in proportion with samples until these are as many as critical, then stay."""
    return [(batch, round(fewest * (1 + critical / batch))) for batch in batches]


SAMPLES = tuple(2**power for power in range(16))
"""Of a copy, for which operations are described."""
RESNET_BATCHES = (1024, 2048, 4096, 8192, 16384, 32768)
TRANSFORMER_BATCHES = (512, 1024, 2048, 4096, 8192)

MODELS: dict[str, Callable[[], Model]] = {
    "resnet50": lambda: Model(_resnet50(), _curve(2000, 24_000, RESNET_BATCHES)),
    "transformer": lambda: Model(
        transformer(6, 2048, 16, 64, 32_768), _curve(12_000, 1_500, TRANSFORMER_BATCHES)
    ),
    "megatron": lambda: Model(transformer(40, 6144, 48, 1024, 51_200), [(1024, 240_000)]),
}
"""By name. Assumed: the curves of the first two, in the form of McCandlish et al. 2018, such that
the best batches take about the 8,192 and 16,384 steps of SiP-ML's public scripts; Megatron's is
SiP-ML's own (§4.1)."""
