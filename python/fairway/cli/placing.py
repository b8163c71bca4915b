"""``fairway place``: assigns shards of a model to devices, and predicts the training time."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fairway.cli.consoles import check_folder, note, results, working
from fairway.cli.options import Json, Seed, grouped
from fairway.errors import ConfigError, PlacementError
from fairway.interrupts import run_aside
from fairway.placement import PATIENCE
from fairway.settings import parse_duration, parse_size

if TYPE_CHECKING:
    from fairway._native import Interconnect
    from fairway.placement.graphs import OpGraph
    from fairway.placement.search import PlacementStrategy, SearchBounds

__all__ = ["place_model"]

BATCHES = tuple(2**n for n in range(11))
"""Samples per copy of the model for which models are described."""
SIZES = {"layers": 24, "hidden": 1024, "heads": 16, "sequence": 1024, "vocabulary": 51_200}
"""Default sizes of a transformer."""


@dataclass(frozen=True)
class ModelOptions:
    """How a model is trained, and what it was measured on."""

    curve: Annotated[
        Path | None,
        typer.Option(help="File with a line for each batch: samples of a step, and steps."),
    ] = None
    batch: Annotated[
        int | None, typer.Option(help="Samples of a step, instead of a curve.", min=1)
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(help="What PyTorch's profiler exported of the run of the execution trace."),
    ] = None
    samples: Annotated[
        int, typer.Option(help="Samples of the run of the execution trace.", min=1)
    ] = 1
    device: Annotated[
        str | None,
        typer.Option(
            help="v100, a100 or h100: the device of a model (default v100), or of a captured "
            "program (default: the times that were measured).",
            show_default=False,
        ),
    ] = None

    def batches(self, known: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns batches and steps: those given, or else those ``known`` of the model.

        Raises:
            ConfigError: both a curve and a batch are given.
            PlacementError: the curve cannot be read.
        """
        if self.curve is not None and self.batch is not None:
            raise ConfigError("both --curve and --batch were given; expected one of them")
        if self.curve is not None:
            return _read_curve(self.curve)
        return known if self.batch is None else [(self.batch, 1)]


@dataclass(frozen=True)
class PlacementOptions:
    """Memory of the devices, and bounds of the search."""

    memory: Annotated[
        str | None, typer.Option(help="Memory of a device; default that of --device, or 32GiB.")
    ] = None
    quantum: Annotated[str, typer.Option(help="Target compute time per shard.")] = "10us"
    spread_max: Annotated[
        int | None,
        typer.Option(
            help="Most devices of a copy. Default: larger copies are tried until "
            f"{PATIENCE} doublings in a row gain nothing.",
            min=1,
            max=1 << 16,
            show_default=False,
        ),
    ] = None
    evaluations: Annotated[
        int, typer.Option(help="Evaluation budget per configuration.", min=0, max=10**9)
    ] = 200
    seed: Seed = 0


@dataclass(frozen=True)
class TableOptions:
    """How configurations are printed."""

    rows: Annotated[int, typer.Option(help="Rows to show.", min=1)] = 10
    as_json: Json = False


@grouped
def place_model(
    what: Annotated[
        str,
        typer.Argument(
            help="resnet50, transformer, megatron, "
            "transformer:layers=24,hidden=1024,heads=16,sequence=1024,vocabulary=51200, a FlexFlow "
            "task graph (.fbuf), a captured program (.fw), or an execution trace of PyTorch "
            "(.json, with --profile). Or gpt:layers=48,hidden=8192,..., with experts=1,active=1: "
            "cut by data, layers, stages and experts, on A100s.",
            show_default=False,
        ),
    ],
    fabric: Annotated[
        str,
        typer.Option(
            help="elect-flat:1024, elect-cluster:1024, sip-ring:1024, sip-rings:32x32, "
            "sip-ocs:1024; options follow behind commas, such as ,wavelengths=320."
        ),
    ] = "elect-cluster:64",
    *,
    model: ModelOptions,
    chakra: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the best configuration's step as Chakra traces, one for each rank."
        ),
    ] = None,
    options: PlacementOptions,
    table: TableOptions,
) -> None:
    """Place a model on a fabric, and predict how long training takes, by simulation."""
    if what.partition(":")[0] == "gpt":
        given = {"curve": model.curve, "profile": model.profile, "device": model.device}
        for name, value in {**given, "chakra": chakra, "memory": options.memory}.items():
            if value is not None:
                raise ConfigError(f"--{name} does not apply to {what}; leave it out")
        _place_cuts(what, fabric, model.batch or 512, table)
        return
    search = _search(what, fabric, model, options)
    check_folder(chakra)
    stopped: list[str] = []
    with working(f"placing {what} on {fabric}") as work:
        ways = run_aside(lambda: search.strategies(work.update, stopped.append))
    if chakra is not None:
        run_aside(lambda: search.write_step(ways[0], chakra))
    _show(ways, table, lambda shown: _table(f"{what} on {fabric}, simulated", shown))
    for reason in stopped:
        note(reason)
    if chakra is not None:
        note(f"wrote traces of {search.interconnect.devices} ranks to {chakra}")


@dataclass(frozen=True)
class _Search:
    """A model, the devices that it is placed on, and the bounds of the search."""

    graph: OpGraph
    interconnect: Interconnect
    curve: list[tuple[int, int]]
    bounds: SearchBounds

    def strategies(
        self, progress: Callable[[int, int], object], stopped: Callable[[str], object]
    ) -> list[PlacementStrategy]:
        """Returns all configurations that fit in memory, the fastest first."""
        from fairway.placement.search import search_strategies

        return search_strategies(
            self.graph,
            self.interconnect,
            self.curve,
            self.bounds,
            progress=progress,
            stopped=stopped,
        )

    def write_step(self, best: PlacementStrategy, folder: Path) -> None:
        """Writes the step of a configuration as Chakra traces."""
        from fairway.placement.chakra import write_step
        from fairway.placement.search import Replication, evaluate_strategy

        strategy = Replication(best.batch, best.copies, best.width)
        step = evaluate_strategy(self.graph, self.interconnect, strategy, self.bounds, whole=True)
        assert step.graph is not None
        write_step(folder, step.graph)


def _search(what: str, fabric: str, model: ModelOptions, options: PlacementOptions) -> _Search:
    from fairway.analysis.topologies import read_topology
    from fairway.placement.models import V100
    from fairway.placement.search import SearchBounds

    interconnect = read_topology(fabric).interconnect
    device = _device(model.device)
    graph, known = _read(what, model.profile, model.samples, device)
    curve = model.batches(known)
    memory_bytes = (device or V100).memory_bytes
    if options.memory is not None:
        memory_bytes = parse_size("the memory", options.memory)
    quantum_ns = parse_duration("the quantum", options.quantum)
    bounds = SearchBounds(
        memory_bytes, quantum_ns, options.evaluations, options.seed, options.spread_max
    )
    return _Search(graph, interconnect, curve, bounds)


def _device(name: str | None) -> Any:
    from fairway.placement.models import DEVICES

    if name is not None and name not in DEVICES:
        raise ConfigError(f"there is no device {name!r}; there are {', '.join(DEVICES)}")
    return None if name is None else DEVICES[name]


def _read(
    what: str, profile: Path | None, samples: int, device: Any
) -> tuple[Any, list[tuple[int, int]]]:
    from fairway import capture
    from fairway.formats.flexflow import read_flexflow
    from fairway.placement.graphs import of_flexflow
    from fairway.placement.models import MODELS, V100, Model, transformer
    from fairway.placement.programs import of_program
    from fairway.placement.pytorch import check_trace, of_pytorch

    if Path(what).suffix == ".fw":
        return of_program(capture.read(Path(what)), device), [(1, 1)]
    if Path(what).suffix == ".fbuf":
        return of_flexflow(read_flexflow(what)), [(1, 1)]
    if Path(what).suffix in (".json", ".gz"):
        if profile is None:
            check_trace(what)
            raise ConfigError(
                f"durations of the operators of {what} are missing; expected --profile"
            )
        return of_pytorch(what, profile, samples), [(samples, 1)]
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
    sizes = dict(usual)
    for one in filter(None, given.split(",")):
        key, _, value = one.partition("=")
        if key not in sizes or not re.fullmatch(r"\d{1,9}", value):
            raise PlacementError(
                f"cannot read {one!r} as a size of a transformer; expected NAME=NUMBER with one of "
                f"{', '.join(sizes)}"
            )
        sizes[key] = int(value)
    return sizes


def _place_cuts(what: str, fabric: str, batch: int, table: TableOptions) -> None:
    from fairway._native import Links
    from fairway.analysis.topologies import read_topology
    from fairway.placement.cuts import best_cuts, least_s
    from fairway.placement.transformers import A100, A100_REACHES, Machine, Transformer

    joined = read_topology(fabric).interconnect
    usual = {**SIZES, "experts": 1, "active": 1}
    model = Transformer(**_sizes(what.partition(":")[2], usual))
    machine = Machine(Links(joined, {}), A100, A100_REACHES)
    with working(f"cutting {what} for {fabric}"):
        ways = run_aside(lambda: best_cuts(model, machine, joined.devices, batch))
    least = least_s(model, machine, joined.devices, batch)
    title = f"{what} on {fabric}, {batch} samples a step; lower bound {_duration(least)}"
    _show(ways, table, lambda shown: _table_of_cuts(title, shown))


def _show(ways: list[Any], options: TableOptions, table: Callable[[list[Any]], Table]) -> None:
    """Prints all configurations as JSON, or the first of them as a table."""
    if options.as_json:
        print(json.dumps([asdict(way) for way in ways]))
        return
    results().print(table(ways[: options.rows]))
    if len(ways) > options.rows:
        note(f"{len(ways)} configurations fit in memory; the first {options.rows} are shown")


CUT_COLUMNS = (
    "data", "tensor", "stages", "experts", "micro\nbatch", "recom-\npute", "step", "bubble",
    "gradient\nsums", "memory\nGiB",
)  # fmt: skip
CUT_MEANINGS = (
    "data: copies of the model. tensor: devices that share each layer. stages: of the pipeline. "
    "experts: copies that share the experts. micro batch: samples of a copy at a time. recompute: "
    "activations are computed again for the gradients, not kept. bubble: time of a step in which "
    "stages wait. gradient sums: time of a step in which copies add up gradients."
)


def _table_of_cuts(title: str, ways: list[Any]) -> Table:
    table = _narrow_table(title, CUT_COLUMNS, CUT_MEANINGS)
    for way in ways:
        cut, step = way.parallelism, way.step
        counts = (cut.data, cut.tensor, cut.pipeline, cut.expert, cut.micro_batch)
        times = (step.total_s, step.bubble_s, step.gradients_s)
        table.add_row(
            *map(str, counts),
            "yes" if cut.recomputes else "no",
            *map(_duration, times),
            f"{step.memory_bytes / 2**30:.1f}",
        )
    return table


def _narrow_table(title: str, columns: Sequence[str], meanings: str) -> Table:
    """Returns a table of numbers that fits in 80 columns without truncating any."""
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True, overflow="fold")
    table.caption = meanings
    table.caption_justify = "left"
    return table


def _read_curve(path: Path) -> list[tuple[int, int]]:
    points = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not all(re.fullmatch(r"\d{1,18}", word) for word in words):
            raise PlacementError(
                f"line {number} of {path} is {line[:80]!r}; expected samples of a step, and steps"
            )
        points.append((int(words[0]), int(words[1])))
    if not points or min(batch for batch, _ in points) < 1:
        raise PlacementError(f"{path} has no batches from 1 on")
    return points


COLUMNS = (
    "batch", "copies", "devices\nof each", "shards", "step", "lower\nbound", "steps", "all steps",
    "memory\nGiB",
)  # fmt: skip
MEANINGS = (
    "batch: samples of a step. copies: of the model. shards: most parts into which an operation is "
    "cut. lower bound: no placement can make the step shorter. all steps: the whole training. "
    "memory: of the fullest device."
)


def _table(title: str, ways: list[Any]) -> Table:
    table = _narrow_table(title, COLUMNS, MEANINGS)
    for way in ways:
        table.add_row(
            f"{way.batch:,}",
            f"{way.copies:,}",
            f"{way.devices:,}",
            f"{way.width:,}",
            _duration(way.step_s),
            _duration(way.bound_s),
            f"{way.steps:,}",
            _duration(way.total_s),
            f"{way.memory_bytes / 2**30:.1f}",
        )
    return table


def _duration(seconds: float) -> str:
    """Formats a duration in the largest unit that it reaches, to four digits or more."""
    for unit, size in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{_four_digits(seconds / size)} {unit}"
    return f"{_four_digits(1e3 * seconds)} ms"


def _four_digits(value: float) -> str:
    return f"{value:,.{3 if value < 10 else 2 if value < 100 else 1}f}"
