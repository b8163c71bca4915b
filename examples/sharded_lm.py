"""Trains the model of `train_lm.py` with all parameters sharded over the islands.

Each layer is a part of the model. Its parameters are all-gathered while the layer before it
computes, and its gradients are reduce-scattered while the backward pass continues (FSDP in
PyTorch). With `--parallel replicas` every island holds all parameters, and only gradients are
exchanged. The batches and the initial parameters are those of `train_lm.py`, and so are the losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import lm
from corpus import read_corpus
from fairway.parallel import Replicas, Sharded
from reporting import save_report

COMPUTATIONS = 3  # of one layer on a device: forward, backward, update
WAYS = {"sharded": Sharded, "replicas": Replicas}


def build_function(layer: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns a function that computes the layer's output from its parameters and its input."""
    return lambda params, x: lm.forward([layer], [params], x)


def main(settings: argparse.Namespace) -> None:
    """Trains, then reports."""
    islands = lm.find_islands(lm.NEEDS_FAIRWAY)
    devices = sum(len(island.devices) for island in islands)
    lm.check_divides(devices, settings.batch, "--batch over all devices")
    corpus = read_corpus(settings.text, settings.sequence)
    layers = lm.build_layers(settings, len(corpus.vocabulary))
    trainer = WAYS[settings.parallel](
        [build_function(layer) for layer in layers],
        [island.devices for island in islands],
        lm.mean_loss,
        lm.build_optimizer(),
    )
    states = trainer.init(lm.initialize(layers, settings.seed, settings.sequence))

    def step(tokens: np.ndarray) -> list[jax.Array]:
        nonlocal states
        states, loss = trainer.step(states, tokens[:, :-1], tokens[:, 1:])
        return [loss]

    batches = corpus.batches(settings.seed, settings.batch, settings.sequence)
    run = lm.train(step, batches, settings, COMPUTATIONS * len(layers))
    save_report("sharded_lm", run, settings, lm.describe(islands, corpus))


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = lm.build_parser("Trains a character-level transformer sharded over islands.")
    parser.add_argument(
        "--parallel", choices=tuple(WAYS), default="sharded", help="what every island holds"
    )
    return parser.parse_args()


if __name__ == "__main__":
    lm.run_main(main, parse_arguments())
