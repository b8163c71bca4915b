"""Places a model that is described, captured or traced on a modelled fabric."""

from __future__ import annotations

import abc
import dataclasses
import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fairway import _native, capture
from fairway.analysis.topologies import read_topology
from fairway.errors import ConfigError, PlacementError
from fairway.formats.chakra_steps import write_step
from fairway.formats.flexflow import read_flexflow
from fairway.formats.kineto import check_trace, of_pytorch
from fairway.placement.cuts import Cut, best_cuts, least_s, simulate_cuts
from fairway.placement.graphs import OpGraph, of_flexflow
from fairway.placement.models import DEVICES, MODELS, V100, Device, Model, transformer
from fairway.placement.programs import of_program
from fairway.placement.search import (
    QUANTUM_NS,
    PlacementStrategy,
    SearchBounds,
    evaluate_strategy,
    search_strategies,
)
from fairway.placement.transformers import A100, A100_REACHES, Machine, Transformer, step_graph

__all__ = [
    "CutPlacement",
    "ModelPlacement",
    "PlacementRequest",
    "SearchedPlacement",
    "is_closed_form",
    "place_model",
]

Curve = list[tuple[int, int]]
"""Batches in samples, each with the number of steps to train."""
BATCHES = tuple(2**n for n in range(11))
"""Samples per copy of the model for which models are described."""
SIZES = {"layers": 24, "hidden": 1024, "heads": 16, "sequence": 1024, "vocabulary": 51_200}
"""Default sizes of a transformer."""
BATCH_MAX = (1 << 31) - 1
"""Maximum samples of a step."""
CUT_BATCH = 512
"""Default samples of a step of a transformer that is cut by closed forms."""
_WHY = "the fastest by closed forms whose steps are not too large"


@dataclasses.dataclass(frozen=True)
class PlacementRequest:
    """How a model is trained, what it was measured on, and bounds of the search.

    Attributes:
        curve: batches in samples, each with the number of steps to train; None for the model's.
        batch: samples of a step, instead of a curve.
        profile: what PyTorch's profiler exported of the run of an execution trace.
        samples: samples of the run of the execution trace.
        device: ``v100``, ``a100`` or ``h100``; None is a V100 for described models, and the times
            that were measured for captured programs.
        memory_bytes: memory of a device; None is that of the device.
        quantum_ns: target time of a shard.
        evaluations: placements to evaluate for each strategy, besides those of heuristics.
        seed: the same seed finds the same placement.
        spread_max: maximum devices of a copy; None stops where larger copies gain nothing.
    """

    curve: Sequence[tuple[int, int]] | None = None
    batch: int | None = None
    profile: Path | None = None
    samples: int = 1
    device: str | None = None
    memory_bytes: int | None = None
    quantum_ns: int = QUANTUM_NS
    evaluations: int = 200
    seed: int = 0
    spread_max: int | None = None


DEFAULTS = PlacementRequest()


@dataclasses.dataclass(frozen=True)
class ModelPlacement(abc.ABC):
    """A model on a fabric, with all strategies that fit in memory.

    Attributes:
        what: the model, as it was named.
        fabric: the fabric, likewise.
        strategies: with predicted times, the fastest first.
        interconnect: network between the devices.
        note: why not all strategies were evaluated or simulated; empty if all were.
    """

    what: str
    fabric: str
    strategies: Sequence[PlacementStrategy] | Sequence[Cut]
    interconnect: _native.Interconnect
    note: str = ""

    def __str__(self) -> str:
        return (
            f"{self.what} on {self.fabric}: {len(self.strategies)} strategies, "
            f"{1e3 * self.strategies[0].step_s:.3f} ms a step at best"
        )

    @abc.abstractmethod
    def step(self) -> _native.StepGraph:
        """Returns the step of the fastest strategy, on all devices.

        Raises:
            PlacementError: the step has too many nodes.
        """

    def write_step(self, folder: Path) -> None:
        """Writes the step of the fastest strategy as Chakra traces, one for each rank.

        Raises:
            OSError: the folder cannot be written.
            PlacementError: the step has too many nodes.
        """
        write_step(folder, self.step())


@dataclasses.dataclass(frozen=True)
class SearchedPlacement(ModelPlacement):
    """A model whose shards were placed and simulated.

    Attributes:
        graph: operations of the model.
        bounds: bounds of the search.
    """

    strategies: Sequence[PlacementStrategy]
    _: dataclasses.KW_ONLY
    graph: OpGraph
    bounds: SearchBounds

    def step(self) -> _native.StepGraph:
        """Returns the step of the fastest strategy, on all devices."""
        strategy = self.strategies[0].replication
        step = evaluate_strategy(
            self.graph, self.interconnect, strategy, self.bounds, whole=True
        ).graph
        assert step is not None
        return step


@dataclasses.dataclass(frozen=True)
class CutPlacement(ModelPlacement):
    """A transformer that was cut by data, layers, stages and experts.

    Attributes:
        model: the transformer.
        machine: what closed forms know of devices and network.
        batch: samples of a step.
        least_s: lower bound of a step: all products at the attained peak rate.
    """

    strategies: Sequence[Cut]
    _: dataclasses.KW_ONLY
    model: Transformer
    machine: Machine
    batch: int
    least_s: float

    def step(self) -> _native.StepGraph:
        """Returns the step of the fastest strategy, on all devices.

        Raises:
            PlacementError: the step has too many nodes.
        """
        return step_graph(self.model, self.machine, self.strategies[0].parallelism)


def is_closed_form(what: str) -> bool:
    """Is a model, by its name, one that is cut by closed forms?"""
    return what.partition(":")[0] == "gpt"


def place_model(
    what: str,
    fabric: str,
    request: PlacementRequest = DEFAULTS,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> SearchedPlacement | CutPlacement:
    """Predicts the step time of strategies to train a model on a modelled fabric.

    Args:
        what: a built-in model, ``transformer:layers=...``, ``gpt:layers=...``, a FlexFlow task
            graph (.fbuf), a captured program (.fw), or an execution trace of PyTorch (.json).
        fabric: such as ``elect-cluster:64``; see :func:`fairway.analysis.topologies.read_topology`.
        request: how it is trained and searched.
        progress: called with the number of strategies evaluated, and the number known so far.

    Raises:
        ConfigError: options contradict each other, or do not apply to the model.
        PlacementError: the model is unknown or invalid.
        CapacityError: no strategy fits in memory.
        TopologyError: the fabric cannot be read.
    """
    if request.batch is not None and not (
        isinstance(request.batch, int) and 1 <= request.batch <= BATCH_MAX
    ):
        raise ConfigError(f"a batch is {request.batch!r}; expected 1 to {BATCH_MAX} samples")
    if is_closed_form(what):
        return _cut(what, fabric, request, progress)
    interconnect = read_topology(fabric).interconnect
    device = _device(request.device)
    graph, known = _read(what, request, device)
    memory_bytes = request.memory_bytes
    bounds = SearchBounds(
        (device or V100).memory_bytes if memory_bytes is None else memory_bytes,
        request.quantum_ns,
        request.evaluations,
        request.seed,
        request.spread_max,
    )
    notes: list[str] = []
    strategies = search_strategies(
        graph,
        interconnect,
        _batches(request, known),
        bounds,
        progress=progress,
        stopped=notes.append,
    )
    return SearchedPlacement(
        what,
        fabric,
        strategies,
        interconnect,
        "".join(notes),
        graph=graph,
        bounds=bounds,
    )


def _cut(
    what: str,
    fabric: str,
    request: PlacementRequest,
    progress: Callable[[int, int], object] | None,
) -> CutPlacement:
    for name in ("curve", "profile", "device", "memory_bytes"):
        if getattr(request, name) is not None:
            option = name.removesuffix("_bytes")
            raise ConfigError(f"{option} (--{option}) does not apply to {what}; leave it out")
    interconnect = read_topology(fabric).interconnect
    model = Transformer(**_sizes(what.partition(":")[2], {**SIZES, "experts": 1, "active": 1}))
    machine = Machine(_native.Links(interconnect, {}), A100, A100_REACHES)
    batch = CUT_BATCH if request.batch is None else request.batch
    least = least_s(model, machine, interconnect.devices, batch)
    cuts = best_cuts(model, machine, interconnect.devices, batch)
    cuts = simulate_cuts(model, machine, interconnect, cuts, progress=progress)
    count = sum(cut.simulated_s is not None for cut in cuts)
    note = "" if count == len(cuts) else f"simulated {count} of {len(cuts)} strategies: {_WHY}"
    return CutPlacement(
        what,
        fabric,
        cuts,
        interconnect,
        note,
        model=model,
        machine=machine,
        batch=batch,
        least_s=least,
    )


def _batches(request: PlacementRequest, known: Curve) -> Curve:
    """Returns batches and steps: those given, or else those ``known`` of the model."""
    if request.curve is not None and request.batch is not None:
        raise ConfigError(
            "both a curve and a batch (--curve, --batch) were given; expected one of them"
        )
    if request.curve is not None:
        return list(request.curve)
    return known if request.batch is None else [(request.batch, 1)]


def _device(name: str | None) -> Device | None:
    if name is not None and name not in DEVICES:
        raise ConfigError(f"there is no device {name!r}; there are {', '.join(DEVICES)}")
    return None if name is None else DEVICES[name]


def _read(what: str, request: PlacementRequest, device: Device | None) -> tuple[OpGraph, Curve]:
    """Reads a model; returns its operations, and the batches that are known of it."""
    if Path(what).suffix == ".fw":
        return of_program(capture.read(Path(what)), device), [(1, 1)]
    if Path(what).suffix == ".fbuf":
        return of_flexflow(read_flexflow(what)), [(1, 1)]
    if Path(what).suffix in (".json", ".gz"):
        if request.profile is None:
            check_trace(what)
            raise ConfigError(
                f"durations of the operators of {what} are missing; expected a profile (--profile)"
            )
        return of_pytorch(what, request.profile, request.samples), [(request.samples, 1)]
    if Path(what).suffix == ".step":
        raise PlacementError(
            f"{what} is a step graph, whose work is on devices already; fairway explain maps these "
            "to the devices of a fabric"
        )
    name, colon, given = what.partition(":")
    if name == "transformer" and colon:
        model = Model(transformer(**_sizes(given, SIZES)), [(256, 1)])
    elif what in MODELS:
        model = MODELS[what]()
    else:
        close = difflib.get_close_matches(what, MODELS, n=1)
        hint = f"did you mean {close[0]}? There" if close else "there"
        raise PlacementError(
            f"there is no model {what!r}; {hint} are {', '.join(MODELS)}, transformer:layers=..., "
            "gpt:layers=..., files of FlexFlow (.fbuf), captured programs (.fw) and execution "
            "traces of PyTorch (.json)"
        )
    return model.graph(device or V100, BATCHES), list(model.curve)


def _sizes(given: str, usual: dict[str, int]) -> dict[str, int]:
    """Reads the sizes of a transformer; missing ones take the values of ``usual``."""
    sizes, left = dict(usual), set(usual)
    for one in filter(None, given.split(",")):
        key, _, value = one.partition("=")
        if key not in left or not re.fullmatch(r"[0-9]{1,9}", value):
            raise PlacementError(
                f"cannot read {one!r} as a size of a transformer; expected NAME=NUMBER with one of "
                f"{', '.join(sizes)}, each at most once"
            )
        left.remove(key)
        sizes[key] = int(value)
    return sizes
