"""Reinforcement learning (GRPO) of a small transformer: trainer on one island, sampler on another.

The task is the sum of two digits: the answer to the prompt `3+9=` is `12`, and this process checks
answers. After a short supervised warm-up, the sampler draws a group of completions of each prompt,
and the trainer makes those likelier whose reward is above the mean of their group. After each step
the trainer's parameters, sharded over its devices (FSDP), are transferred to the sampler, where
heads and hidden units are sharded (tensor parallelism).

The sampler draws the next step's completions while the trainer takes this step, so its weights are
one step old; the importance ratio corrects for that. With `--sync` it waits for the new ones.
Nothing here needs Fairway: under plain `python` the halves of the CPU devices act as the islands.

Source: DeepSeekMath §4.1. Differs from the paper: there is no reference model, and so no KL term.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lm
from reporting import draw

ALPHABET = "0123456789+="
PROMPT, ANSWER = 4, 2  # tokens: `3+9=` and `12`
LENGTH = PROMPT + ANSWER
WIDTH, HEADS, LAYERS = 64, 4, 2
CLIP = 0.2  # importance ratios are clipped to 1 +- CLIP
LEARNING_RATE = 1e-3

Params = dict[str, Any]
State = tuple[Params, Any]  # parameters and optimizer state
Tokens = np.ndarray[Any, np.dtype[np.int32]]


class Rollout(NamedTuple):
    """Completions: tokens int32 [rows, LENGTH], log_probs of the answers float32 [rows, ANSWER]."""

    tokens: jax.Array
    log_probs: jax.Array


class Weights(NamedTuple):
    """All parameters after `version` steps of the trainer, on the sampler."""

    version: int
    params: Params


# --- model --------------------------------------------------------------------------------------


def initialize(key: jax.Array) -> Params:
    """Returns parameters, float32: matrices are normal, scaled by the number of their rows."""
    keys = iter(jax.random.split(key, 1 + 4 * LAYERS))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    blocks = [
        {
            "attention_in": matrix(3, WIDTH, WIDTH),
            "attention_out": matrix(WIDTH, WIDTH),
            "hidden_in": matrix(WIDTH, 4 * WIDTH),
            "hidden_out": matrix(4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    positions = jnp.zeros((LENGTH, WIDTH))
    return {"tokens": matrix(len(ALPHABET), WIDTH), "positions": positions, "blocks": blocks}


def forward(params: Params, tokens: jax.Array) -> jax.Array:
    """Maps tokens, int32 [rows, sequence], to the next ones' logits, [rows, sequence, alphabet]."""

    def normalize(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
    for block in params["blocks"]:
        mixed = jnp.einsum("rsi,kio->krso", normalize(x), block["attention_in"])
        query, key, value = mixed.reshape(*mixed.shape[:-1], HEADS, WIDTH // HEADS)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x += attended.reshape(x.shape) @ block["attention_out"]
        x += jax.nn.gelu(normalize(x) @ block["hidden_in"]) @ block["hidden_out"]
    return normalize(x) @ params["tokens"].T


def answer_log_probs(params: Params, tokens: jax.Array) -> jax.Array:
    """Returns log-probabilities [rows, ANSWER] of the answers in tokens, int32 [rows, LENGTH]."""
    logits = forward(params, tokens[:, :-1])[:, PROMPT - 1 :]
    answers = tokens[:, PROMPT:, None]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), answers, axis=-1)[..., 0]


# --- task ---------------------------------------------------------------------------------------


def draw_prompts(count: int, *seed: int) -> Tokens:
    """Draws prompts `a+b=`, [count, PROMPT]."""
    digits = np.random.default_rng(seed).integers(0, 10, (count, 2))
    prompts = np.full((count, PROMPT), [0, ALPHABET.index("+"), 0, ALPHABET.index("=")], np.int32)
    prompts[:, ::2] = digits
    return prompts


def solve(prompts: Tokens) -> Tokens:
    """Returns the right answers [rows, ANSWER] to prompts [rows, PROMPT]."""
    return np.stack(np.divmod(prompts[:, 0] + prompts[:, 2], 10), axis=1)


def check(tokens: Tokens) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns rewards [rows] of completions [rows, LENGTH]: 1 if the answer is right, else 0."""
    return (tokens[:, PROMPT:] == solve(tokens[:, :PROMPT])).all(axis=1).astype(np.float32)


# --- sampler ------------------------------------------------------------------------------------


def build_sampler(group: int, seed: int, sharding: NamedSharding) -> Any:
    """Compiles (params, prompts int32 [prompts, PROMPT], step) to a Rollout of a group of each.

    A rollout has prompts * group rows, those of one prompt next to each other. A scan draws the
    next token of all rows in each iteration. Sequences are so short that it computes them anew
    instead of caching keys and values.
    """

    def generate(params: Params, prompts: jax.Array, step: int) -> Rollout:
        key = jax.random.fold_in(jax.random.key(seed), step)
        tokens = jnp.pad(jnp.repeat(prompts, group, axis=0), ((0, 0), (0, ANSWER)))

        def draw_token(tokens: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = forward(params, tokens)[:, position - 1]
            drawn = jax.random.categorical(jax.random.fold_in(key, position), logits)
            log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[:, None], axis=-1)
            return tokens.at[:, position].set(drawn), log_probs[:, 0]

        tokens, log_probs = jax.lax.scan(draw_token, tokens, jnp.arange(PROMPT, LENGTH))
        return Rollout(tokens, log_probs.T)

    return jax.jit(generate, out_shardings=sharding)


def shard_tensors(mesh: Mesh, params: Params) -> Any:
    """Returns the sampler's shardings: heads and hidden units are sharded over `model`."""
    specs = {
        "attention_in": PartitionSpec(None, None, "model"),
        "attention_out": PartitionSpec("model"),
        "hidden_in": PartitionSpec(None, "model"),
        "hidden_out": PartitionSpec("model"),
    }
    blocks = [{name: NamedSharding(mesh, specs[name]) for name in b} for b in params["blocks"]]
    replicated = NamedSharding(mesh, PartitionSpec())
    return {"tokens": replicated, "positions": replicated, "blocks": blocks}


# --- trainer ------------------------------------------------------------------------------------


def supervised_loss(params: Params, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the answers in tokens, int32 [rows, LENGTH]."""
    return -answer_log_probs(params, tokens).mean()


def grpo_loss(params: Params, rollout: Rollout, rewards: jax.Array) -> jax.Array:
    """Returns the negated clipped objective; rewards [prompts, group], rows in the same order."""
    deviation = rewards - rewards.mean(axis=1, keepdims=True)
    advantages = (deviation / (rewards.std(axis=1, keepdims=True) + 1e-4)).reshape(-1, 1)
    ratio = jnp.exp(answer_log_probs(params, rollout.tokens) - rollout.log_probs)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    return -jnp.minimum(ratio * advantages, clipped * advantages).mean()


def build_step(loss: Any, optimizer: optax.GradientTransformation, shardings: Any) -> Any:
    """Compiles (state, *batch) to (next state, loss), where loss is a function (params, *batch)."""

    def step(state: State, *batch: Any) -> tuple[State, jax.Array]:
        params, optimizer_state = state
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    return jax.jit(step, out_shardings=(shardings, None))


def shard_fully(mesh: Mesh, state: State) -> Any:
    """Returns the trainer's shardings (FSDP): the first axis of an array that can be divided."""

    def sharding(array: jax.Array) -> NamedSharding:
        axes = [extent % mesh.size == 0 for extent in array.shape]
        spec = [None] * axes.index(True) + ["data"] if any(axes) else []
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(sharding, state)


# --- training -----------------------------------------------------------------------------------


def main(settings: argparse.Namespace) -> None:
    """Trains with right answers, then by their rewards; prints and saves the rewards."""
    trainer, sampler = lm.find_islands()[:2]
    lm.check_divides(len(trainer.devices), settings.prompts, "--prompts over the trainer's devices")
    lm.check_divides(len(sampler.devices), HEADS, "attention heads over the sampler's devices")
    optimizer = optax.adam(LEARNING_RATE, b2=0.95)
    params = jax.jit(initialize)(jax.random.key(settings.seed))
    state: State = (params, jax.jit(optimizer.init)(params))
    shardings = shard_fully(trainer.mesh, state)
    placed = shard_tensors(Mesh(np.array(sampler.devices), ("model",)), params)
    state = jax.device_put(state, shardings)

    supervise = build_step(supervised_loss, optimizer, shardings)
    for number in range(settings.warmup):
        prompts = draw_prompts(settings.prompts, settings.seed, 0, number)
        tokens = np.concatenate([prompts, solve(prompts)], axis=1)
        state, loss = supervise(state, jax.device_put(tokens, trainer.sharded))
    if settings.warmup > 0:
        print(f"warm-up: {settings.warmup} supervised steps, loss {float(loss):.4f}")

    generate = build_sampler(settings.group, settings.seed, sampler.sharded)
    reinforce = build_step(grpo_loss, optimizer, shardings)
    weights = Weights(0, jax.device_put(state[0], placed))
    rollouts: deque[tuple[int, Rollout]] = deque()  # with the version that drew them
    rewards, times_s, drawn = [], [], 0
    for number in range(settings.steps):
        begin_s = time.perf_counter()
        while drawn < min(settings.steps, number + (1 if settings.sync else 2)):
            prompts = draw_prompts(settings.prompts, settings.seed, 1, drawn)
            rollouts.append((weights.version, generate(weights.params, prompts, drawn)))
            drawn += 1
        version, rollout = rollouts.popleft()
        reward = check(np.asarray(rollout.tokens)).reshape(settings.prompts, settings.group)
        batch = jax.device_put((rollout, reward), trainer.sharded)
        state, _ = reinforce(state, *batch)
        weights = Weights(number + 1, jax.device_put(state[0], placed))
        rewards.append(float(reward.mean()))
        times_s.append(time.perf_counter() - begin_s)
        shown = f"sampler's version {version}, mean reward {rewards[-1]:.4f}"
        print(f"step {number}: {shown}, {1e3 * times_s[-1]:.0f} ms", flush=True)
    print(draw(rewards))
    print(f"median step {1e3 * np.median(times_s):.0f} ms")
    table = {"rewards": rewards, "times_s": times_s, "sync": settings.sync}
    (settings.out / "grpo.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Trains a transformer to add by reinforcement, sampler and trainer apart.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    whole = lm.positive_integer
    parser.add_argument("--steps", type=whole, default=150, help="steps of reinforcement")
    parser.add_argument("--warmup", type=int, default=20, help="supervised steps before them")
    parser.add_argument("--prompts", type=whole, default=64, help="prompts a step")
    parser.add_argument("--group", type=whole, default=16, help="completions of a prompt")
    parser.add_argument("--sync", action="store_true", help="always draw with the newest weights")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, prompts and samples")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the rewards")
    return parser.parse_args()


if __name__ == "__main__":
    lm.run_main(main, parse_arguments())
