"""Trains a residual convolutional network, data-parallel over two or more islands.

Every island has a replica and its part of each batch of images. The all-reduce of the gradients of
each part of the network starts as soon as its backward pass has produced them, and overlaps that of
the parts before it. With `--parallel sharded` every island holds a shard of all parameters. Images
are synthetic: each class has a pattern, at a random place under noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import lm
from fairway.parallel import Replicas, Sharded
from reporting import save_report

CLASSES, SIZE = 10, 16
COMPUTATIONS = 3  # of one part on a device: forward, backward, update
WAYS = {"replicas": Replicas, "sharded": Sharded}


class Block(nn.Module):
    """Images [batch, height, width, channels] to the same with `channels`, halved by `stride`."""

    channels: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Adds the output of two convolutions of `x` to it."""
        strides = (self.stride, self.stride)
        made = nn.Conv(self.channels, (3, 3), strides)(nn.relu(nn.GroupNorm(4)(x)))
        made = nn.Conv(self.channels, (3, 3))(nn.relu(nn.GroupNorm(4)(made)))
        if x.shape != made.shape:
            x = nn.Conv(self.channels, (1, 1), strides)(x)
        return x + made


class Head(nn.Module):
    """Images to logits [batch, classes]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Scores every class by the mean of the image."""
        return nn.Dense(CLASSES)(nn.relu(x).mean((1, 2)))


def build_layers(width: int) -> list[nn.Module]:
    """Returns the parts of the network: stem, three stages, head."""
    stages = [Block(width), Block(2 * width, stride=2), Block(4 * width, stride=2)]
    return [nn.Conv(width, (3, 3)), *stages, Head()]


def initialize(layers: list[nn.Module], seed: int) -> list[Any]:
    """Returns the initial parameters of each part."""
    x: jax.Array = jnp.zeros((1, SIZE, SIZE, 3))
    params = []
    for key, layer in zip(jax.random.split(jax.random.key(seed), len(layers)), layers, strict=True):
        params.append(layer.init(key, x)["params"])
        x = layer.apply({"params": params[-1]}, x)
    return params


def build_function(layer: nn.Module) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns a function that computes a part's output from its parameters and its input."""
    return lambda params, x: layer.apply({"params": params}, x)


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy in nats, a scalar: the mean over [batch]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_batches(seed: int, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Images float32 [batch, size, size, 3] and their classes int32 [batch], endlessly."""
    draw = np.random.default_rng(seed)
    patterns = draw.standard_normal((CLASSES, SIZE, SIZE, 3)).astype(np.float32)
    while True:
        labels = draw.integers(0, CLASSES, batch, np.int32)
        shifts = draw.integers(0, SIZE, (batch, 2))
        images = [
            np.roll(patterns[label], shift, (0, 1))
            for label, shift in zip(labels, shifts, strict=True)
        ]
        noise = draw.standard_normal((batch, SIZE, SIZE, 3)).astype(np.float32)
        yield np.stack(images) + noise, labels


def main(settings: argparse.Namespace) -> None:
    """Trains, then reports."""
    islands = lm.find_islands(lm.NEEDS_FAIRWAY)
    devices = [island.devices for island in islands]
    count = sum(map(len, devices))
    lm.check_divides(count, settings.batch, "--batch over all devices")
    lm.check_divides(4, settings.width, "--width over the groups of a norm")
    print(f"{len(islands)} islands, {count} {devices[0][0].platform} devices")
    layers = build_layers(settings.width)
    functions = [build_function(layer) for layer in layers]
    optimizer = optax.adam(settings.rate)
    trainer = WAYS[settings.parallel](functions, devices, mean_loss, optimizer)
    states = trainer.init(initialize(layers, settings.seed))

    def step(batch: tuple[np.ndarray, np.ndarray]) -> list[jax.Array]:
        nonlocal states
        states, loss = trainer.step(states, *batch)
        return [loss]

    batches = make_batches(settings.seed, settings.batch)
    run = lm.train(step, batches, settings, COMPUTATIONS * len(layers), unit="images")
    save_report("train_cnn", run, settings, {"islands": len(islands), "devices": count})


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Trains a convolutional network over islands.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    number = lm.positive_integer
    parser.add_argument("--steps", type=number, default=100, help="training steps")
    parser.add_argument("--batch", type=number, default=64, help="images a step, all islands")
    parser.add_argument("--width", type=number, default=16, help="channels of the first stage")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and images")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for plot and losses")
    parser.add_argument(
        "--parallel", choices=tuple(WAYS), default="replicas", help="what every island holds"
    )
    return parser.parse_args()


if __name__ == "__main__":
    lm.run_main(main, parse_arguments())
