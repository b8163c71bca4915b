"""One side of `gpu.py`: trains a transformer on JAX's first device, on a fixed batch."""

from __future__ import annotations

import argparse
import operator
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import ROOT, serve_methods

sys.path.insert(0, str(ROOT / "examples"))
import lm  # type: ignore[import-not-found]  # of the examples

VOCABULARY = 4096


class Runner:
    """Executes the benchmark's requests."""

    def prepare(self, layers: int, width: int, sequence: int, rows: int) -> str:
        """Compiles a training step; returns the kind of the device."""
        built = lm.build_layers(argparse.Namespace(layers=layers, width=width, heads=8), VOCABULARY)
        optimizer = lm.build_optimizer()

        def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
            def loss_of(params: lm.Params) -> jax.Array:
                # Parameters stay float32, products are in bfloat16.
                held = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
                logits = lm.forward(built, held, tokens[:, :-1]).astype(jnp.float32)
                loss: jax.Array = lm.mean_loss(logits, tokens[:, 1:])
                return loss

            params, kept = state
            loss, gradient = jax.value_and_grad(loss_of)(params)
            updates, kept = optimizer.update(gradient, kept, params)
            return (jax.tree.map(operator.add, params, updates), kept), loss

        draw = np.random.default_rng(1)
        self._tokens = jnp.asarray(draw.integers(0, VOCABULARY, (rows, sequence + 1), np.int32))
        params = lm.initialize(built, 1, sequence)
        self._state = params, jax.jit(optimizer.init)(params)
        self._step = jax.jit(step, donate_argnums=0)
        self.train(3)
        return str(jax.devices()[0].device_kind)

    def train(self, steps: int) -> tuple[float, list[float]]:
        """Trains; returns steps per second, and the losses."""
        losses = []
        began = time.monotonic()
        for _ in range(steps):
            self._state, loss = self._step(self._state, self._tokens)
            losses.append(loss)
        losses[-1].block_until_ready()
        rate = steps / (time.monotonic() - began)
        return rate, [float(loss) for loss in losses]


if __name__ == "__main__":
    serve_methods(Runner())
