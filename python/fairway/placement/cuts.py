"""All strategies of data, tensor, pipeline and expert parallelism of a transformer.

Closed forms rank all of them; those at the front are lowered to step graphs and simulated.

Source: Narayanan et al. 2021 (arXiv:2104.04473) for the four kinds of parallelism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from fairway import _native
from fairway.errors import PlacementError
from fairway.placement.ranking import rank
from fairway.placement.search import simulate_graph
from fairway.placement.transformers import (
    Machine,
    Parallelism,
    Transformer,
    TransformerStep,
    step_graph,
    step_time,
)

__all__ = ["SIMULATED", "Cut", "best_cuts", "least_s", "simulate_cuts"]

SIMULATED = 16
"""Number of strategies that are simulated: the fastest by closed forms."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """One strategy.

    Attributes:
        parallelism: degrees of parallelism.
        step: time of a step and its parts by closed forms, in seconds.
        simulated_s: simulated time of a step; None if it was not simulated.
    """

    parallelism: Parallelism
    step: TransformerStep
    simulated_s: float | None = None

    @property
    def step_s(self) -> float:
        """Predicted time of a step: as simulated, or else by closed forms."""
        return self.step.total_s if self.simulated_s is None else self.simulated_s

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


def simulate_cuts(
    model: Transformer,
    machine: Machine,
    interconnect: _native.Interconnect,
    cuts: Sequence[Cut],
    *,
    progress: Callable[[int, int], object] | None = None,
) -> list[Cut]:
    """Simulates the first :data:`SIMULATED` strategies that can be; returns all, those first.

    A strategy whose step is too large keeps its place behind those that were simulated.

    Args:
        model: the transformer.
        machine: the machine, whose links are those of the interconnect.
        interconnect: network between the devices.
        cuts: strategies, the fastest by closed forms first.
        progress: called with the number of strategies simulated, and the number of all to simulate.
    """
    simulated: list[Cut] = []
    others: list[Cut] = []
    count = min(SIMULATED, len(cuts))
    for cut in cuts:
        if len(simulated) == count:
            others.append(cut)
            continue
        try:
            graph = step_graph(model, machine, cut.parallelism)
        except PlacementError:  # it is too large to be simulated
            others.append(cut)
            continue
        seconds = simulate_graph(graph, interconnect).seconds
        simulated.append(dataclasses.replace(cut, simulated_s=seconds))
        if progress is not None:
            progress(len(simulated), count)
    return [*sorted(simulated, key=lambda cut: cut.step_s), *others]


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
