"""Training steps like those that SYNDICATE was measured on, A1 to A6, at any number of GPUs.

The models are not public; these have the sizes of the paper's Table 2, and the assumptions stated
with each for what it omits. Times are those of a V100 that attains a fraction of its peak.

Source: SYNDICATE Tables 1 and 2, Figure 13, §6.2, §6.5.
"""

from __future__ import annotations

import dataclasses
import itertools

from fairway.communication.steps import After, ChannelCost, Step, Task
from fairway.communication.team import Collective

__all__ = ["CHANNELS", "MODELS", "Dlrm", "Layers", "ProductionMachine", "step"]

CHANNELS = (
    ChannelCost(0.9 * 100e9, 15_000, sums_bps=2e12, incast=0.002),
    ChannelCost(0.9 * 25e9, 40_000, sums_bps=40e9, incast=0.005),
)
"""Assumed: a GPU's share of its node: one RoCE NIC of 100 Gbit/s beside NVLink, and an eighth of
two host NICs, behind PCIe and TCP. Rates are Table 1's less a tenth; the other terms are guesses of
such networks: GPUs reduce at the speed of their memory, hosts at that of theirs."""


@dataclasses.dataclass(frozen=True)
class ProductionMachine:
    """Roofline model of a GPU.

    Attributes:
        flops: attained FLOP/s in single precision.
        half_flops: the same in half precision.
        memory_bps: attained memory bandwidth in bytes per second.
    """

    flops: float = 0.5 * 15e12
    half_flops: float = 0.35 * 125e12
    memory_bps: float = 0.6 * 900e9


@dataclasses.dataclass(frozen=True)
class Dlrm:
    """A recommendation model, with sharded tables and replicated MLPs.

    Attributes:
        mflops: of a sample, forward.
        tables: embedding tables; the paper says about hundreds or thousands.
        dim: mean embedding size.
        pooling: mean number of rows that a sample sums.
        layers, width: of both MLPs together.
        batch: samples of a GPU.
        sharded: number of layer groups in which the bottom MLP's weights are sharded (FSDP); 0 for
            replicated weights.
    """

    mflops: float
    tables: int
    dim: int
    pooling: int
    layers: int
    width: int
    batch: int
    sharded: int = 0


@dataclasses.dataclass(frozen=True)
class Layers:
    """A model of identical layers.

    Attributes:
        parameters: of all layers.
        flops: of a GPU's batch, forward.
        groups: groups of layers, each of which communicates as one bucket.
        element: bytes of a parameter.
        sharded: whether parameters are sharded (FSDP) or replicated.
    """

    parameters: float
    flops: float
    groups: int
    element: int
    sharded: bool


TOP = 0.05
"""Fraction of the MLPs' parameters in the top one: its all-reduce is megabytes, the bottom one's
hundreds of them (§6.5.1)."""

MODELS: dict[str, Dlrm | Layers] = {
    "A1": Dlrm(89, 300, 68, 27, 26, 914, 512),
    "A2": Dlrm(638, 2000, 93, 15, 20, 3375, 1024),
    "A3": Dlrm(784, 2000, 231, 17, 26, 3210, 512),
    "A4": Dlrm(60, 2000, 72, 49, 43, 682, 4096, sharded=4),
    # XLM-R XL: 3.5e9 parameters (public), 4,096 tokens of a GPU.
    "A5": Layers(3.5e9, 2 * 3.5e9 * 4096, 12, 2, sharded=True),
    # RegNetZ-4GF: 28.1e6 parameters, 4.0e9 multiply-adds of an image (public); 64 images of a GPU.
    "A6": Layers(28.1e6, 2 * 4.0e9 * 64, 8, 4, sharded=False),
}
"""Models by the paper's names."""


def step(name: str, gpus: int = 128, machine: ProductionMachine | None = None) -> Step:
    """Returns the tasks of each of ``gpus`` GPUs in a step of a model.

    Raises:
        KeyError: the model is unknown.
    """
    model = MODELS[name]
    made = machine or ProductionMachine()
    return _dlrm(model, gpus, made) if isinstance(model, Dlrm) else _layers(model, gpus, made)


def _dlrm(model: Dlrm, gpus: int, machine: ProductionMachine) -> Step:
    """Returns the DAG of Figure 13: embeddings are exchanged, gradients of MLPs all-reduced."""
    weights = model.layers * model.width**2
    bottom, top = round((1 - TOP) * weights), round(TOP * weights)
    flops = model.batch * model.mflops * 1e6
    # FLOPs beyond the MLPs' are feature interaction, before the top one.
    in_bottom = min(0.9, (1 - TOP) * 2 * weights / (model.mflops * 1e6))
    bottom_s, top_s = (flops * part / machine.flops for part in (in_bottom, 1 - in_bottom))
    rows = model.batch * model.tables * model.dim
    lookup_s = model.pooling * rows * 4 / machine.memory_bps

    def exchange(name: str, per_gpu: int, *after: After, dtype: str = "float32") -> Task:
        return Task(name, after, collective=Collective.all_to_all(gpus, per_gpu), dtype=dtype)

    words = exchange("a2a data", model.batch * model.tables * model.pooling, dtype="int64")
    forward: list[Task] = [
        words,
        Task("fwd emb", (After("a2a data"), After("bwd emb", 1)), lookup_s),
        exchange("a2a emb fwd", rows, After("fwd emb")),
    ]
    backward = [
        exchange("a2a emb bwd", rows, After("bwd top")),
        Task("ar top", (After("bwd top"),), collective=Collective.all_reduce(gpus, top)),
    ]
    if model.sharded:
        below, above, last = _sharded("bott", gpus, bottom, 4, (model.sharded, bottom_s))
        backward += above
    else:
        below = [Task("fwd bott", (After("ar bott", 1),), bottom_s)]
        backward += [
            Task("bwd bott", (After("bwd top"),), 2 * bottom_s),
            Task("ar bott", (After("bwd bott"),), collective=Collective.all_reduce(gpus, bottom)),
        ]
        last = "fwd bott"
    tops = [
        Task("fwd top", (After("a2a emb fwd"), After(last), After("ar top", 1)), top_s),
        Task("bwd top", (After("fwd top"),), 2 * top_s),
    ]
    end = Task("bwd emb", (After("a2a emb bwd"),), lookup_s)
    tasks = (*forward, *below, *tops, *backward, end)
    names = [task.name for task in tasks if task.collective is not None]
    # Manual order: embedding gradients first, and the next step's indices before large reductions.
    hand = ["a2a data", "a2a emb fwd", *(n for n in names if n.startswith("ag fwd"))]
    hand += ["a2a emb bwd", *(name for name in names if name not in (*hand, "a2a emb bwd"))]
    return Step(tasks, tuple(hand), {"a2a data": "a2a emb bwd"})


def _sharded(
    name: str, gpus: int, weights: int, element: int, work: tuple[int, float]
) -> tuple[list[Task], list[Task], str]:
    """Returns FSDP layers: weights are all-gathered before each group, gradients reduce-scattered.

    Returns:
        Tasks forward, tasks backward, and the last one forward.
    """
    groups, forward_s = work
    dtype = {2: "float16", 4: "float32"}[element]
    size = weights // groups // gpus * gpus
    numbers = range(groups)
    forward: list[Task] = []
    backward: list[Task] = []
    for group in numbers:
        gather = Collective.all_gather(gpus, size)
        of = f"{name} {group}"
        forward += [
            Task(f"ag fwd {of}", (After(f"rs {of}", 1),), collective=gather, dtype=dtype),
            Task(f"fwd {of}", (After(f"ag fwd {of}"),), forward_s / groups),
        ]
    for group in reversed(numbers):
        of = f"{name} {group}"
        gather, spread = Collective.all_gather(gpus, size), Collective.reduce_scatter(gpus, size)
        # The weights of two groups are in memory at a time.
        ready = f"fwd {name} {groups - 1}" if group >= groups - 2 else f"bwd {name} {group + 2}"
        backward += [
            Task(f"ag bwd {of}", (After(ready),), collective=gather, dtype=dtype),
            Task(f"bwd {of}", (After(f"ag bwd {of}"),), 2 * forward_s / groups),
            Task(f"rs {of}", (After(f"bwd {of}"),), collective=spread, dtype=dtype),
        ]
    return forward, backward, f"fwd {name} {groups - 1}"


def _layers(model: Layers, gpus: int, machine: ProductionMachine) -> Step:
    flops = machine.half_flops if model.element == 2 else machine.flops
    forward_s = model.flops / flops
    if model.sharded:
        work = (model.groups, forward_s)
        forward, backward, _ = _sharded(
            "layers", gpus, round(model.parameters), model.element, work
        )
        tasks = (*forward, *backward)
        return Step(tasks, tuple(task.name for task in tasks if task.collective is not None))
    size = round(model.parameters / model.groups)
    numbers = range(model.groups)
    ahead = [
        Task(f"fwd {group}", (After(f"ar {group}", 1),), forward_s / model.groups)
        for group in numbers
    ]
    back = itertools.chain.from_iterable(
        (
            Task(f"bwd {group}", (), 2 * forward_s / model.groups),
            Task(
                f"ar {group}",
                (After(f"bwd {group}"),),
                collective=Collective.all_reduce(gpus, size),
            ),
        )
        for group in reversed(numbers)
    )
    tasks = (*ahead, *back)
    # The next step needs the first layers first.
    return Step(tasks, tuple(f"ar {group}" for group in numbers))
