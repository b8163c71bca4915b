"""All strategies of data, tensor, pipeline and expert parallelism of a transformer, in closed form.

Source: Narayanan et al. 2021 (arXiv:2104.04473) for the four kinds of parallelism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from fairway.errors import PlacementError
from fairway.placement.ranking import rank
from fairway.placement.transformers import (
    Machine,
    Parallelism,
    Transformer,
    TransformerStep,
    step_time,
)

__all__ = ["Cut", "best_cuts", "least_s"]


@dataclasses.dataclass(frozen=True)
class Cut:
    """One strategy.

    Attributes:
        parallelism: degrees of parallelism.
        step: predicted time of a step.
    """

    parallelism: Parallelism
    step: TransformerStep

    @property
    def step_s(self) -> float:
        """Predicted time of a step."""
        return self.step.total_s

    @property
    def memory_bytes(self) -> int:
        """Bytes of each device."""
        return self.step.memory_bytes


def best_cuts(model: Transformer, machine: Machine, devices: int, batch: int) -> list[Cut]:
    """Returns all strategies that fit in memory, the fastest first.

    Args:
        model: the transformer.
        machine: the machine.
        devices: number of devices.
        batch: samples of a step.

    Raises:
        CapacityError: none fits; says why the last did not.
        PlacementError: no strategy divides devices and batch.
    """
    candidates = list(_cuts(model, devices, batch))
    if not candidates:
        raise PlacementError(
            f"{devices} devices and batches of {batch} have no common parts with {model.layers} "
            f"layers of {model.heads} heads"
        )
    return rank(candidates, lambda cut: Cut(cut, step_time(model, machine, cut)))


def _cuts(model: Transformer, devices: int, batch: int) -> Iterator[Parallelism]:
    for tensor in _parts(devices, model.heads):
        for pipeline in _parts(devices // tensor, model.layers):
            data = devices // tensor // pipeline
            if batch % data:
                continue
            for expert in _parts(data, model.experts):
                for micro_batch in _powers(batch // data):
                    for recomputes in (False, True):
                        yield Parallelism(
                            data, tensor, pipeline, micro_batch, batch, expert, recomputes
                        )


def _parts(count: int, other: int) -> list[int]:
    """Returns the common divisors."""
    return [part for part in range(1, min(count, other) + 1) if count % part == other % part == 0]


def _powers(most: int) -> list[int]:
    """Returns the powers of two that divide a number."""
    return [1 << power for power in range(most.bit_length()) if most % (1 << power) == 0]


def least_s(model: Transformer, machine: Machine, devices: int, batch: int) -> float:
    """Returns a lower bound: all products at the attained peak rate, balanced perfectly."""
    tokens = batch * model.sequence
    of_layer = model.hidden**2 * (8 + 16 * model.active) + 4 * model.sequence * model.hidden
    forward = model.layers * of_layer + 2 * model.hidden * model.vocabulary
    accelerator = machine.accelerator
    return 3.0 * tokens * forward / (devices * accelerator.flops * accelerator.efficiency)
