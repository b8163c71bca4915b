"""One client that places a model and trains it with every strategy: worker of ``placed.py``.

The model is that of ``examples``; its blocks take a set time for each row (``paced.py``), as
devices of a fixed speed would.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import time
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import paced
from common import ROOT, serve_methods
from pipelines_client import first

import fairway
from fairway.parallel.placing import TrainingStrategy

sys.path.insert(0, str(ROOT / "examples"))
lm: Any = importlib.import_module("lm")
corpus: Any = importlib.import_module("corpus")

HEADS = 4


class Paced(nn.Module):
    """A block of a set time per row of a device: once forward, and twice that backward."""

    inner: nn.Module
    row_s: float
    devices: int

    def init(self, *given: Any, **options: Any) -> Any:
        """Returns the variables of the inner block."""
        return self.inner.init(*given, **options)

    def apply(self, variables: Any, *given: Any, **_: Any) -> Any:
        """Applies the inner block, and waits until its time is over."""
        (value,) = given

        def compute(parameters: Any, value: Any) -> Any:
            return self.inner.apply({"params": parameters}, value)

        seconds = self.row_s * value.shape[0] / self.devices
        made = paced.paced(compute, seconds, 2 * seconds, None, in_row=True)
        return made(variables["params"], value)


class Runner:
    """A model, and the strategies to train it."""

    def place(
        self, blocks: int, width: int, sequence: int, rows: int, row_s: float, seed: int
    ) -> list[dict[str, Any]]:
        """Predicts the step time of each strategy."""
        text = corpus.read_corpus(None, sequence)
        islands: dict[int, list[Any]] = {}
        for device in jax.devices():
            islands.setdefault(device.island, []).append(device)
        for devices in islands.values():
            paced.on_hosts(devices)
        vocabulary = len(text.vocabulary)
        plain = [lm.Embedding(vocabulary, width), *[lm.Block(HEADS) for _ in range(blocks)]]
        plain.append(lm.Head(vocabulary))
        shapes = jax.eval_shape(lambda: lm.initialize(plain, seed, sequence))
        random = np.random.default_rng(seed)
        parameters = jax.tree_util.tree_map_with_path(functools.partial(first, random), shapes)
        count = len(islands[0])
        model = [plain[0], *[Paced(block, row_s, count) for block in plain[1:-1]], plain[-1]]
        self._batches = text.batches(seed, rows, sequence)
        tokens = next(self._batches)
        self._placed = fairway.place(
            model,
            list(islands.values()),
            fairway.StrategyOptions(variables=[{"params": own} for own in parameters]),
            training=fairway.Training(
                tokens[:, :-1], tokens[:, 1:], lm.mean_loss, lm.build_optimizer()
            ),
        )
        return [
            {**dataclasses.asdict(strategy), "name": str(strategy)}
            for strategy in self._placed.strategies
        ]

    def start(self, strategy: int) -> float:
        """Starts a strategy, and trains two steps; returns the loss of the first."""
        chosen: TrainingStrategy = self._placed.strategies[strategy]
        made: Any
        made, parameters = self._placed.trainer(chosen)
        self._trainer = made
        self._state = self._trainer.init(parameters)
        tokens = next(self._batches)
        self._given = tokens[:, :-1], tokens[:, 1:]
        losses = []
        for _ in range(2):
            self._state, loss = self._trainer.step(self._state, *self._given)
            losses.append(float(loss))
        return losses[0]

    def run(self, steps: int) -> float:
        """Returns the mean time of a step in seconds."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._state, loss = self._trainer.step(self._state, *self._given)
        float(loss)
        return (time.perf_counter() - begin) / steps


if __name__ == "__main__":
    serve_methods(Runner())
