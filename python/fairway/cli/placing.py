"""``fairway place``: assigns shards of a model to devices, and predicts the training time."""

from __future__ import annotations

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
from fairway.errors import PlacementError
from fairway.interrupts import run_aside
from fairway.placement import PATIENCE
from fairway.quantities import parse_duration, parse_size

if TYPE_CHECKING:
    from fairway.placement.placing import ModelPlacement, PlacementRequest

__all__ = ["place_on_fabric"]


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


@dataclass(frozen=True)
class SearchOptions:
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
def place_on_fabric(
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
            "sip-ocs:1024, or another of docs/reference/fabrics.md; options follow behind "
            "commas, such as ,wavelengths=320."
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
    options: SearchOptions,
    table: TableOptions,
) -> None:
    """Place a model on a fabric, and predict how long training takes, by simulation."""
    from fairway.placement.placing import CutPlacement, place_model

    request = _request(model, options)
    check_folder(chakra)
    with working(f"placing {what} on {fabric}") as work:
        placed = run_aside(lambda: place_model(what, fabric, request, progress=work.update))
    if chakra is not None:
        placed.write_step(chakra)
    if isinstance(placed, CutPlacement):
        bound = f"{placed.batch} samples a step; lower bound {_duration(placed.least_s)}"
        _show(placed, table, lambda shown: _table_of_cuts(f"{what} on {fabric}, {bound}", shown))
    else:
        _show(placed, table, lambda shown: _table(f"{what} on {fabric}, simulated", shown))
    if placed.note:
        note(placed.note)
    if chakra is not None:
        note(f"wrote traces of {placed.interconnect.devices} ranks to {chakra}")


def _request(model: ModelOptions, options: SearchOptions) -> PlacementRequest:
    from fairway.placement.placing import PlacementRequest

    return PlacementRequest(
        None if model.curve is None else _read_curve(model.curve),
        model.batch,
        model.profile,
        model.samples,
        model.device,
        None if options.memory is None else parse_size("the memory", options.memory),
        parse_duration("the quantum", options.quantum),
        options.evaluations,
        options.seed,
        options.spread_max,
    )


def _show(
    placed: ModelPlacement, options: TableOptions, table: Callable[[Sequence[Any]], Table]
) -> None:
    """Prints all configurations as JSON, or the first of them as a table."""
    strategies = placed.strategies
    if options.as_json:
        print(json.dumps([asdict(strategy) for strategy in strategies]))
        return
    results().print(table(strategies[: options.rows]))
    if len(strategies) > options.rows:
        note(f"{len(strategies)} configurations fit in memory; the first {options.rows} are shown")


CUT_COLUMNS = (
    "data", "tensor", "stages", "ex-\nperts", "micro\nbatch", "recom-\npute", "simu-\nlated",
    "closed\nform", "bubble", "gradient\nsums", "memory\nGiB",
)  # fmt: skip
CUT_MEANINGS = (
    "data: copies of the model. tensor: devices that share each layer. stages: of the pipeline. "
    "experts: copies that share the experts. micro batch: samples of a copy at a time. recompute: "
    "activations are computed again for the gradients, not kept. simulated, closed form: time of a "
    "step. bubble: time in which stages wait. gradient sums: time in which copies sum gradients."
)


def _table_of_cuts(title: str, strategies: Sequence[Any]) -> Table:
    table = _narrow_table(title, CUT_COLUMNS, CUT_MEANINGS)
    for strategy in strategies:
        cut, step = strategy.parallelism, strategy.step
        counts = (cut.data, cut.tensor, cut.pipeline, cut.expert, cut.micro_batch)
        times = (step.total_s, step.bubble_s, step.gradients_s)
        table.add_row(
            *map(str, counts),
            "yes" if cut.recomputes else "no",
            "" if strategy.simulated_s is None else _duration(strategy.simulated_s),
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


def _table(title: str, strategies: Sequence[Any]) -> Table:
    table = _narrow_table(title, COLUMNS, MEANINGS)
    for strategy in strategies:
        table.add_row(
            f"{strategy.batch:,}",
            f"{strategy.copies:,}",
            f"{strategy.devices:,}",
            f"{strategy.width:,}",
            _duration(strategy.step_s),
            _duration(strategy.bound_s),
            f"{strategy.steps:,}",
            _duration(strategy.total_s),
            f"{strategy.memory_bytes / 2**30:.1f}",
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
