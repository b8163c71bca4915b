"""Compares training on one GPU through Fairway with plain JAX, in turn; needs a GPU.

Both run the same XLA programs on the same device with the same batch. Steps of a small model end
before the next is dispatched (dispatch-bound), those of a large one do not.

XLA chooses matrix multiplication algorithms by autotuning, so losses differ as those of two runs of
plain JAX do. With autotuning disabled they are compared bit by bit.

Goal: 0.97 of plain JAX where devices are busy, and the same losses.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import random
import sys
from collections.abc import Iterator, Mapping

from common import (
    SETTINGS_OF_JAX,
    Goal,
    Spread,
    Worker,
    environment_without,
    interleave,
    provenance,
    ratios,
    run_main,
    write_json,
)
from rich.console import Console
from rich.table import Table

from fairway.cluster.supervisor import Run
from fairway.settings import IslandSettings, Settings

MODELS = {
    "small": {"layers": 2, "width": 256, "sequence": 128, "rows": 8},
    "large": {"layers": 12, "width": 1024, "sequence": 512, "rows": 16},
}
STEPS = {"small": 400, "large": 30}
REPEATABLE = "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true"


@dataclasses.dataclass(frozen=True)
class Row:
    """One model: steps per second of both."""

    model: str
    rates: Mapping[str, Spread]

    @property
    def ratio(self) -> Spread:
        """Fairway's rate over plain JAX's."""
        return ratios(self.rates["fairway"], self.rates["jax"])


@contextlib.contextmanager
def sides(flags: str = "") -> Iterator[dict[str, Worker]]:
    """Starts clients of Fairway and plain JAX, neither of which preallocates the device."""
    plain = {
        **environment_without(*SETTINGS_OF_JAX),
        "JAX_PLATFORMS": "cuda",
        "XLA_FLAGS": flags,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    up = Settings((IslandSettings(1, 1),), platform="cuda", device_memory="16GiB", xla_flags=flags)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(Run(up))
        environments = {"jax": plain, "fairway": {**plain, **run.environment}}
        yield {
            name: stack.enter_context(Worker([sys.executable, "gpu_client.py"], environment))
            for name, environment in environments.items()
        }


def measure(model: str, rounds: int, seed: int) -> Row:
    """Trains one model on both sides, in turn."""
    with sides() as workers:
        for worker in workers.values():
            worker.ask(do="prepare", **MODELS[model])

        def train(worker: Worker) -> float:
            rate, _ = worker.ask(do="train", steps=STEPS[model])
            return float(rate)

        each = {name: functools.partial(train, worker) for name, worker in workers.items()}
        return Row(model, interleave(each, rounds, random.Random(seed)))


def has_same_losses() -> bool:
    """Returns whether both losses are bitwise equal and decrease, with autotuning disabled."""
    losses = []
    with sides(REPEATABLE) as workers:
        for worker in workers.values():
            worker.ask(do="prepare", **MODELS["small"])
            losses.append(worker.ask(do="train", steps=100)[1])
    ours, theirs = losses
    return bool(ours == theirs and ours[-1] < ours[0])


def main() -> None:
    """Measures both models and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each side trains")
    parser.add_argument("--seed", type=int, default=1, help="of the order in each round")
    settings = parser.parse_args()
    rows = [measure(name, settings.rounds, settings.seed) for name in MODELS]
    same = has_same_losses()
    table = Table(title="Steps per second: median, lowest and highest of the rounds")
    for name in ("model", "plain JAX", "Fairway", "ratio", "goal"):
        table.add_column(name)
    goal = Goal(0.97, "of plain JAX")
    for row in rows:
        table.add_row(
            row.model,
            row.rates["jax"].show(".1f"),
            row.rates["fairway"].show(".1f"),
            row.ratio.show(".3f"),
            goal.verdict(row.ratio.median) if row.model == "large" else "",
        )
    Console().print(table)
    print(f"The same losses to the last bit: {'yes' if same else 'no'}.")
    found = {
        row.model: {
            **{name: rate.as_json() for name, rate in row.rates.items()},
            "ratio": row.ratio.as_json(),
        }
        for row in rows
    }
    write_json(
        "gpu.json",
        {"provenance": provenance(settings.seed, "jax", "jaxlib"), "same_losses": same, **found},
    )


if __name__ == "__main__":
    run_main(main)
