"""Common parts of `train_lm.py` and `pipeline_lm.py`: islands, model, training loop, options.

Plain JAX, flax and optax. The model is a list of layers, so a pipeline stage is a slice of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from corpus import BadInputError, Corpus
from reporting import Run, Show, show_progress

CPU_DEVICES = 8
CPU_DEVICES_FLAG = "--xla_force_host_platform_device_count"
NEEDS_FAIRWAY = "expected islands of Fairway; try `fairway run`"
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
COMPUTATIONS_AHEAD = 24  # below XLA's limit of 32 computations in flight on a CPU device

Params = list[Any]  # one flax parameter tree per layer


# --- islands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Island:
    """Devices joined by a fast interconnect, as a mesh with the one axis `data`."""

    mesh: Mesh

    @property
    def devices(self) -> list[jax.Device]:
        """The island's devices, in mesh order."""
        return list(self.mesh.devices.flat)

    @property
    def replicated(self) -> NamedSharding:
        """The whole array on every device of the island."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def sharded(self) -> NamedSharding:
        """The first dimension split over the devices of the island."""
        return NamedSharding(self.mesh, PartitionSpec("data"))


def find_islands(unless_of_fairway: str | None = None) -> list[Island]:
    """Groups `jax.devices()` by their `island`; devices without one are split into two halves.

    Raises BadInputError where there would be fewer than two islands; with the given text where the
    devices are not Fairway's.
    """
    _provide_cpu_devices()
    devices = jax.devices()
    if unless_of_fairway is not None and not hasattr(devices[0], "island"):
        raise BadInputError(unless_of_fairway)
    groups: dict[int, list[jax.Device]] = {}
    for position, device in enumerate(devices):
        number = getattr(device, "island", 2 * position // len(devices))
        groups.setdefault(number, []).append(device)
    if len(groups) < 2:
        raise BadInputError(
            f"cannot form islands: expected at least two, got {len(devices)} device(s) in one; "
            f"try {_more_islands(devices)}"
        )
    return [Island(Mesh(np.array(groups[number]), ("data",))) for number in sorted(groups)]


def _more_islands(devices: Sequence[jax.Device]) -> str:
    """Returns what to try where there is only one island."""
    if hasattr(devices[0], "island"):
        return f"`fairway run --islands 2x1x{len(devices)}`"
    return f"JAX_PLATFORMS=cpu XLA_FLAGS={CPU_DEVICES_FLAG}={CPU_DEVICES}"


def _provide_cpu_devices() -> None:
    """Makes a plain `python` run see several CPU devices, unless the user chose a number.

    It must be called before the first use of a device; XLA reads its flags there.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    proxied = "proxy" in os.environ.get("JAX_PLATFORMS", "")
    chosen = CPU_DEVICES_FLAG in flags or "JAX_NUM_CPU_DEVICES" in os.environ
    if not proxied and not chosen:
        os.environ["XLA_FLAGS"] = f"{flags} {CPU_DEVICES_FLAG}={CPU_DEVICES}".strip()


def describe(islands: Sequence[Island], corpus: Corpus) -> dict[str, Any]:
    """Describes what a run ran on, for its report; also prints it."""
    devices = sum(len(island.devices) for island in islands)
    platform = islands[0].devices[0].platform
    print(f"{len(islands)} islands, {devices} {platform} devices")
    print(f"{len(corpus.tokens):,} characters, a vocabulary of {len(corpus.vocabulary)}")
    return {
        "platform": platform,
        "islands": len(islands),
        "devices": devices,
        "characters": len(corpus.tokens),
        "vocabulary": len(corpus.vocabulary),
    }


# --- model --------------------------------------------------------------------------------------


class Embedding(nn.Module):
    """Tokens int32 [batch, sequence] to float32 [batch, sequence, width], with positions added."""

    vocabulary: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Looks the tokens up."""
        shape = (tokens.shape[1], self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), shape)
        return nn.Embed(self.vocabulary, self.width)(tokens) + positions


def attend(x: jax.Array, heads: int) -> jax.Array:
    """Adds causal self-attention to `x`, [batch, sequence, width]; layers are the caller's."""
    batch, sequence, width = x.shape
    split = (batch, sequence, 3, heads, width // heads)
    mixed = nn.Dense(3 * width, use_bias=False)(nn.LayerNorm()(x)).reshape(split)
    query, key, value = mixed[:, :, 0], mixed[:, :, 1], mixed[:, :, 2]
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    result: jax.Array = x + nn.Dense(width)(attended.reshape(x.shape))
    return result


class Block(nn.Module):
    """Causal self-attention and a multilayer perceptron, [batch, sequence, width] to the same."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Adds the attention's, then the perceptron's result to `x`."""
        x, width = attend(x, self.heads), x.shape[-1]
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))


class Head(nn.Module):
    """Activations [batch, sequence, width] to logits [batch, sequence, vocabulary]."""

    vocabulary: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Scores every token of the vocabulary."""
        return nn.Dense(self.vocabulary, use_bias=False)(nn.LayerNorm()(x))


def build_layers(settings: argparse.Namespace, vocabulary: int) -> list[nn.Module]:
    """The transformer as a list: embedding, `--layers` blocks, head."""
    check_divides(settings.heads, settings.width, "--width over --heads")
    blocks = [Block(settings.heads) for _ in range(settings.layers)]
    return [Embedding(vocabulary, settings.width), *blocks, Head(vocabulary)]


def initialize(layers: Sequence[nn.Module], seed: int, sequence: int) -> Params:
    """Returns the layers' initial parameters, float32, on the default device."""

    def create(key: jax.Array) -> Params:
        x = jnp.zeros((1, sequence), jnp.int32)
        params: Params = []
        for layer_key, layer in zip(jax.random.split(key, len(layers)), layers, strict=True):
            params.append(layer.init(layer_key, x)["params"])
            x = forward([layer], params[-1:], x)
        return params

    params: Params = jax.jit(create)(jax.random.key(seed))
    return params


def forward(layers: Sequence[nn.Module], params: Params, x: jax.Array) -> jax.Array:
    """Applies consecutive layers: tokens or activations in, activations or logits out."""
    for layer, layer_params in zip(layers, params, strict=True):
        x = cast("jax.Array", layer.apply({"params": layer_params}, x))
    return x


def mean_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross-entropy in nats, a scalar: the mean over [batch, sequence]."""
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()


def build_optimizer() -> optax.GradientTransformation:
    """AdamW with a linear warmup; no decay, so a short run is a prefix of a longer one."""

    def learning_rate(count: jax.Array) -> jax.Array:
        return LEARNING_RATE * jnp.minimum(1.0, (count + 1) / WARMUP_STEPS)

    return optax.adamw(learning_rate, b2=0.95, eps=1e-6, weight_decay=0.01)


# --- training loop ------------------------------------------------------------------------------


def train(
    step: Callable[[Any], list[jax.Array]],
    batches: Iterator[Any],
    settings: argparse.Namespace,
    computations: int,
    unit: str = "tokens",
) -> Run:
    """Calls `step` on `--steps` batches.

    `step` only dispatches work, at most `computations` per device, and returns arrays of losses,
    all of equal weight. They are read some steps late, so that the devices never wait for this
    process. The delay is bounded: past its limit of computations in flight XLA's CPU client blocks
    the threads that collectives need. The first step compiles, so it is waited for and left out of
    the rate.
    """
    ahead = max(1, COMPUTATIONS_AHEAD // computations)
    run = Run(unit=unit)
    pending: deque[list[jax.Array]] = deque()

    def read(steps: int, show: Show) -> None:
        for arrays in jax.device_get([pending.popleft() for _ in range(steps)]):
            run.losses.append(float(np.mean([np.mean(array, dtype=float) for array in arrays])))
        show(len(run.losses), run.losses[-1])

    start_s = time.perf_counter()
    with show_progress(settings.steps) as show:
        for number in range(settings.steps):
            pending.append(step(next(batches)))
            if number == 0:
                read(1, show)
                run.first_step_s = time.perf_counter() - start_s
            elif len(pending) == ahead:
                read((ahead + 1) // 2, show)
        if pending:
            read(len(pending), show)
    elapsed_s = time.perf_counter() - start_s
    if settings.steps > 1:
        each = settings.sequence if unit == "tokens" else 1
        counted = (settings.steps - 1) * settings.batch * each
        run.rate = counted / (elapsed_s - run.first_step_s)
    return run


# --- command line -------------------------------------------------------------------------------


def build_parser(description: str) -> argparse.ArgumentParser:
    """Builds a parser with the options common to the examples."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=positive_integer, default=200, help="training steps")
    parser.add_argument(
        "--batch", type=positive_integer, default=64, help="sequences a step, all islands"
    )
    parser.add_argument(
        "--sequence", type=positive_integer, default=64, help="characters a sequence"
    )
    parser.add_argument("--layers", type=positive_integer, default=2, help="transformer blocks")
    parser.add_argument("--width", type=positive_integer, default=128, help="size of an activation")
    parser.add_argument("--heads", type=positive_integer, default=4, help="attention heads a block")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument("--text", type=Path, help="a text file; else Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for plot and losses")
    return parser


def positive_integer(text: str) -> int:
    """Parses a whole number of at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def check_divides(parts: int, total: int, what: str) -> None:
    """Raises BadInputError where `parts` does not divide `total`."""
    if total % parts:
        raise BadInputError(f"{what}: expected a multiple of {parts}, got {total}")


def run_main(main: Callable[[argparse.Namespace], None], settings: argparse.Namespace) -> None:
    """Calls `main`; turns a BadInputError into one line on stderr and exit status 1."""
    try:
        if settings.seed < 0:
            raise BadInputError(f"--seed: expected at least 0, got {settings.seed}")
        _create_folder(settings.out)
        main(settings)
    except BadInputError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _create_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"--out: cannot create {path}: {error.strerror}") from error
