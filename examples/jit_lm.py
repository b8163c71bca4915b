"""Trains a character-level transformer as one jit over all devices, in plain JAX.

The mesh spans all islands, batches are sharded over all devices and parameters are replicated: the
step is what one writes on one island. Under `fairway run` gradients are summed in islands by XLA
and between them by Fairway; under plain `python` eight CPU devices are one machine. With `--shard`
parameters and optimizer state are sharded over all devices too (FSDP).
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lm
from corpus import Corpus, read_corpus
from reporting import save_report

COMPUTATIONS = 4  # of one step on a device: before, between and after what crosses islands

State = tuple[lm.Params, Any]  # parameters and optimizer state


def build_step(layers: list[Any], shardings: Any) -> Any:
    """Compiles (state, tokens [rows, sequence + 1]) to (next state, loss)."""
    optimizer = lm.build_optimizer()

    def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        params, optimizer_state = state

        def loss_of(params: lm.Params) -> jax.Array:
            return lm.mean_loss(lm.forward(layers, params, tokens[:, :-1]), tokens[:, 1:])

        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (jax.tree.map(operator.add, params, updates), optimizer_state), loss

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def shard_state(mesh: Mesh, state: State, over_devices: bool) -> Any:
    """Returns the sharding of each array of the state: the first dimension that can be divided."""
    devices = mesh.devices.size

    def sharding(array: jax.Array) -> NamedSharding:
        axes: list[str | None] = [None] * array.ndim
        for dimension, extent in enumerate(array.shape if over_devices else ()):
            if extent % devices == 0:
                axes[dimension] = "data"
                break
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(sharding, state)


def make_batches(mesh: Mesh, corpus: Corpus, settings: argparse.Namespace) -> Iterator[jax.Array]:
    """Makes batches in this process and copies their rows to the devices."""
    for tokens in corpus.batches(settings.seed, settings.batch, settings.sequence):
        yield jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))


def main(settings: argparse.Namespace) -> None:
    """Trains, then reports."""
    islands = lm.find_islands()
    mesh = Mesh(np.array([device for island in islands for device in island.devices]), ("data",))
    lm.check_divides(mesh.devices.size, settings.batch, "--batch over all devices")
    corpus = read_corpus(settings.text, settings.sequence)
    layers = lm.build_layers(settings, len(corpus.vocabulary))
    params = lm.initialize(layers, settings.seed, settings.sequence)
    state: State = (params, jax.jit(lm.build_optimizer().init)(params))
    shardings = shard_state(mesh, state, settings.shard)
    state = jax.device_put(state, shardings)
    train_step = build_step(layers, shardings)

    def step(tokens: jax.Array) -> list[jax.Array]:
        nonlocal state
        state, loss = train_step(state, tokens)
        return [loss]

    facts = lm.describe(islands, corpus) | {"shard": settings.shard}
    run = lm.train(step, make_batches(mesh, corpus, settings), settings, COMPUTATIONS)
    save_report("jit_lm", run, settings, facts)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = lm.build_parser("Trains a character-level transformer as one jit over all islands.")
    parser.add_argument(
        "--shard", action="store_true", help="shard parameters and optimizer state (FSDP)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    lm.run_main(main, parse_arguments())
