"""BERT's encoders over chips: pipeline parallelism, or tensor parallelism of every layer.

Source: the multi-TSP system §5.4, Figure 18; BERT-Large has 24 encoders of hidden size 1,024, 16
heads and feed-forward size 4,096 (Devlin et al. 2019).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairway.studies.workloads.chip import matmul_cycles, vector_cycles
from fairway.studies.workloads.program import ChipProgram, Tensor

__all__ = ["BERT_LARGE", "Encoder", "Shape", "encode", "place_over_chips", "place_pipeline"]

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of an encoder.

    Attributes:
        words: tokens of an input.
        width: hidden size.
        heads: attention heads.
        inside: feed-forward size.
    """

    words: int
    width: int
    heads: int
    inside: int

    def flops(self) -> int:
        """Returns FLOPs of one encoder, counting multiplications and additions."""
        products = 4 * self.width * self.width + 2 * self.width * self.inside
        return 2 * self.words * (products + 2 * self.words * self.width)

    def cycles(self, parts: int = 1) -> tuple[int, int, int]:
        """Returns cycles of attention, feed-forward and norm, on each of ``parts`` chips.

        Matrix and vector unit overlap, on different heads or rows; a norm needs all.
        """
        head, heads = self.width // self.heads, self.heads // parts
        attention = (
            matmul_cycles(self.words, self.width, 3 * self.width // parts)
            + heads * matmul_cycles(self.words, head, self.words)
            + heads * matmul_cycles(self.words, self.words, head)
            + matmul_cycles(self.words, self.width // parts, self.width)
        )
        inside = matmul_cycles(self.words, self.width, self.inside // parts)
        inside += matmul_cycles(self.words, self.inside // parts, self.width)
        return (
            max(attention, vector_cycles(heads * self.words * self.words, 4)),
            max(inside, vector_cycles(self.words * self.inside // parts, 4)),
            vector_cycles(self.words * self.width, 4),
        )


BERT_LARGE = Shape(words=384, width=1024, heads=16, inside=4096)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Weights of one encoder.

    Attributes:
        mixed: [3 x width x width], for queries, keys and values.
        out: [width x width].
        up: [width x inside].
        down: [inside x width].
    """

    mixed: Array
    out: Array
    up: Array
    down: Array

    @classmethod
    def random(cls, shape: Shape, random: np.random.Generator) -> Encoder:
        """Draws weights in the scale of common initializations."""

        def drawn(*extents: int) -> Array:
            scaled: Array = random.normal(size=extents) / np.sqrt(extents[-2])
            return scaled.astype(np.float32)

        width, inside = shape.width, shape.inside
        return cls(
            drawn(3, width, width), drawn(width, width), drawn(width, inside), drawn(inside, width)
        )

    def part(self, place: int, parts: int) -> Encoder:
        """Returns one chip's shard: some heads, and part of the feed-forward size."""
        width, inside = self.up.shape
        heads = slice(place * width // parts, (place + 1) * width // parts)
        middle = slice(place * inside // parts, (place + 1) * inside // parts)
        return Encoder(
            np.ascontiguousarray(self.mixed[:, :, heads]),
            np.ascontiguousarray(self.out[heads]),
            np.ascontiguousarray(self.up[:, middle]),
            np.ascontiguousarray(self.down[middle]),
        )


def encode(x: Array, encoder: Encoder, heads: int) -> Array:
    """Applies one encoder; its input and output are [words x width]."""
    x = _norm(x + _attend(x, encoder.mixed, encoder.out, heads=heads))
    return _norm(x + _inside(x, encoder.up, encoder.down))


def place_pipeline(
    program: ChipProgram,
    inputs: list[Array] | int,
    encoders: list[Encoder] | int,
    shape: Shape,
    chips: int,
) -> list[Tensor]:
    """Adds encoders to a program as a pipeline, an equal number on each chip.

    Args:
        program: the program to extend.
        inputs: [words x width] each, float32; or their number, to plan without data.
        encoders: weights, or their number.
        shape: sizes of the encoders.
        chips: number of chips, from 0 on.

    Returns:
        Output of the last encoder for each input.
    """
    count = encoders if isinstance(encoders, int) else len(encoders)
    each = count // chips
    attention, inside, norm = shape.cycles()
    cycles = each * (attention + inside + 2 * norm)
    extents = (shape.words, shape.width)
    sources = (
        [program.empty(0, extents) for _ in range(inputs)]
        if isinstance(inputs, int)
        else [program.put(0, one) for one in inputs]
    )
    outputs = []
    for x in sources:
        for chip in range(chips):
            mine = [] if isinstance(encoders, int) else encoders[chip * each : (chip + 1) * each]

            def run(x: Array, mine: list[Encoder] = mine) -> Array:
                for encoder in mine:
                    x = encode(x, encoder, shape.heads)
                return x

            x = program.compute(chip, run, [program.send(x, chip)], extents, cycles)
        outputs.append(x)
    return outputs


def place_over_chips(
    program: ChipProgram, x: Array, encoders: list[Encoder], shape: Shape, chips: int
) -> Tensor:
    """Adds encoders to a program, with heads and feed-forward size sharded over several chips.

    Partial results are reduced on the first chip as they arrive, twice an encoder, and broadcast to
    all.

    Args:
        program: the program to extend.
        x: [words x width], float32.
        encoders: weights of all.
        shape: sizes of the encoders.
        chips: number of chips, from 0 on; it divides heads.
    """
    extents = (shape.words, shape.width)
    attention, inside, norm = shape.cycles(chips)
    current = program.put(0, x)
    for encoder in encoders:
        parts = [encoder.part(chip, chips) for chip in range(chips)]
        weights = [
            (program.put(c, one.mixed), program.put(c, one.out)) for c, one in enumerate(parts)
        ]
        heads = shape.heads // chips

        def attend(x: Array, mixed: Array, out: Array, heads: int = heads) -> Array:
            return _attend(x, mixed, out, heads=heads)

        current = _spread(program, current, attend, weights, attention, norm, extents)
        weights = [
            (program.put(c, one.up), program.put(c, one.down)) for c, one in enumerate(parts)
        ]
        current = _spread(program, current, _inside, weights, inside, norm, extents)
    return current


def _spread(
    program: ChipProgram,
    x: Tensor,
    function: Any,
    weights: list[tuple[Tensor, Tensor]],
    cycles: int,
    norm_cycles: int,
    extents: tuple[int, int],
) -> Tensor:
    """Adds to ``x`` the sum of a function's results on all chips, and normalizes it."""
    made = [
        program.compute(chip, function, [program.send(x, chip), *mine], extents, cycles)
        for chip, mine in enumerate(weights)
    ]
    total = program.add_all(made[1:], made[0])
    return program.compute(0, lambda x, total: _norm(x + total), [x, total], extents, norm_cycles)


def _attend(x: Array, mixed: Array, out: Array, *, heads: int) -> Array:
    words, width = x.shape[0], mixed.shape[2]
    queries, keys, values = (
        (x @ one).reshape(words, heads, width // heads).transpose(1, 0, 2) for one in mixed
    )
    scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(width // heads)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed_values = scores / scores.sum(-1, keepdims=True) @ values
    found: Array = mixed_values.transpose(1, 0, 2).reshape(words, width) @ out
    return found


def _inside(x: Array, up: Array, down: Array) -> Array:
    middle = x @ up
    gelu = 0.5 * middle * (1 + np.tanh(np.sqrt(2 / np.pi) * (middle + 0.044715 * middle**3)))
    found: Array = gelu @ down
    return found


def _norm(x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    found: Array = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    return found
