"""One JAX process that generates tokens and reads each: worker of ``decode.py``."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paced
from common import serve_methods

WIDTH, HEADS, BLOCKS, VOCABULARY, LONGEST = 64, 4, 2, 256, 512
"""Sizes of the model: its computation takes a fraction of a millisecond, the pace is set."""

Array = Any
State = Any


def model(seed: int) -> dict[str, Any]:
    """Returns the parameters of a small transformer."""
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> Array:
        return (random.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    return {
        "embedding": matrix(VOCABULARY, WIDTH),
        "blocks": [
            {"qkv": matrix(WIDTH, 3 * WIDTH), "out": matrix(WIDTH, WIDTH),
             "up": matrix(WIDTH, 4 * WIDTH), "down": matrix(4 * WIDTH, WIDTH)}
            for _ in range(BLOCKS)
        ],
    }  # fmt: skip


def next_token(parameters: Any, state: State, token: Array) -> tuple[State, Array]:
    """Adds a token to the state (cache and position); returns the most likely token after it."""
    cache, place = state
    x = parameters["embedding"][token]
    seen = jnp.arange(LONGEST) <= place
    added = []
    for block, (keys, values) in zip(parameters["blocks"], cache, strict=True):
        query, key, value = (x @ block["qkv"]).reshape(3, HEADS, -1)
        keys, values = keys.at[place].set(key), values.at[place].set(value)
        scores = jnp.einsum("hd,lhd->hl", query, keys) / np.sqrt(WIDTH / HEADS)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        x = x + jnp.einsum("hl,lhd->hd", weights, values).reshape(-1) @ block["out"]
        x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
        added.append((keys, values))
    return (added, place + 1), jnp.argmax(x @ parameters["embedding"].T)


class Decoder:
    """Generates tokens on one device, one launch and one read for each."""

    def __init__(self) -> None:
        self._device = jax.devices()[0]
        if os.environ["JAX_PLATFORMS"] == "proxy":
            paced.on_hosts([self._device])
        self._parameters = jax.device_put(model(0), self._device)
        self._steps: dict[float, Any] = {}

    def compile(self, step_ms: float) -> list[int]:
        """Prepares steps that take this long; returns the first tokens."""

        def step(parameters: Any, state: State, token: Array) -> tuple[State, Array]:
            if not step_ms:
                return next_token(parameters, state, token)
            token, began = paced.begin(token)
            state, token = next_token(parameters, state, token)
            return state, paced.end(token, began, step_ms / 1e3)

        self._steps[step_ms] = functools.partial(jax.jit(step, donate_argnums=1), self._parameters)
        return self._generate(step_ms, 16)

    def rate(self, step_ms: float, tokens: int) -> float:
        """Returns the tokens per second of a sequence of this length."""
        begun = time.perf_counter()
        self._generate(step_ms, tokens)
        return tokens / (time.perf_counter() - begun)

    def reads(self, count: int) -> list[float]:
        """Returns how long it takes to read each of ``count`` computed scalars, in ms."""
        add = jax.jit(lambda x: x + 1)
        arrays = [add(jax.device_put(np.float32(index), self._device)) for index in range(count)]
        wait: Any = jax.block_until_ready
        wait(arrays)
        found = []
        for array in arrays:
            begun = time.perf_counter()
            jax.device_get(array)
            found.append((time.perf_counter() - begun) * 1e3)
        return found

    def _generate(self, step_ms: float, tokens: int) -> list[int]:
        step = self._steps[step_ms]
        empty = np.zeros((LONGEST, HEADS, WIDTH // HEADS), np.float32)
        state = [(empty, empty) for _ in range(BLOCKS)], np.int32(0)
        state, token = jax.device_put((state, np.int32(1)), self._device)
        found = []
        for _ in range(tokens):
            state, token = step(state, token)
            found.append(int(token))
        return found


if __name__ == "__main__":
    serve_methods(Decoder())
