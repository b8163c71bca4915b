"""Simulates the multi-TSP system's figures and numbers: JSON, plots, and one page of all.

Source: the multi-TSP system, Figures 2, 10, 13 to 20, Table 2.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fairway import _native
from fairway.execution import ExecutionOptions
from fairway.report.plots import drawing, save
from fairway.studies.reproduce import check_figures
from fairway.studies.reproduce.tsp_rows import SIZES, TICKS_PER_S, Row, gain, rows
from fairway.studies.workloads.bert import BERT_LARGE, Encoder, place_over_chips, place_pipeline
from fairway.studies.workloads.chip import CLOCK_HZ, PEAK_FLOPS, matmul_utilisation
from fairway.studies.workloads.cholesky import COLUMN_CYCLES, place_cholesky
from fairway.studies.workloads.collectives import bus_bandwidth
from fairway.studies.workloads.matmul import place_product
from fairway.studies.workloads.program import ChipProgram

__all__ = ["FIGURES", "TspFigure", "reproduce", "write_page"]

Progress = Callable[[str], None]
GPU_ALL_REDUCE = Path("vtrain") / "a100_allreduce_8gpu.csv"
A100_PINS_GB_S = 300.0
TSP_PINS_GB_S = 87.5


@dataclasses.dataclass(frozen=True)
class TspFigure:
    """One figure.

    Attributes:
        name: its number in the paper, or a word.
        title: what it shows.
        lines: horizontal and vertical values of each line.
        axes: labels of the horizontal and vertical axis.
        summary: the result, compared with the paper's.
        logarithmic: axes that are logarithmic.
        right: for lines with a second vertical axis on the right, its label.
        categories: names of groups, if values are drawn as grouped bars.
    """

    name: str
    title: str
    lines: dict[str, tuple[list[float], list[float]]]
    axes: tuple[str, str]
    summary: str
    logarithmic: str = ""
    right: dict[str, str] = dataclasses.field(default_factory=dict)
    categories: tuple[str, ...] = ()


def figure_2(_: Progress) -> TspFigure:
    """Bandwidth of a chip by the number of chips (uniform traffic)."""
    sizes = [8, 16, 24, 40, 72, 136, 200, *(n for n in SIZES if n > 200), 2880, 5760]
    found = {}
    for size in sorted(set(sizes)):
        fabric = _native.Topology.parse(f"dragonfly:{size}").fabric
        found[size] = (fabric.uniform_bits_per_s() or math.nan) / 8e9
    line = (list(map(float, found)), list(found.values()))
    summary = (
        f"{found[8]:.0f} GB/s at 8 chips, {found[264]:.1f} at 264 (paper: about 50), "
        f"{found[10_440]:.1f} at 10,440 (paper: about 14)"
    )
    return TspFigure(
        "2", "bandwidth of a chip, all to all", {"simulated": line}, ("chips", "GB/s"), summary, "x"
    )


def figure_10(progress: Progress) -> TspFigure:
    """Gain of striping a transfer over non-minimal routes."""
    sizes = [2**power for power in range(10, 23)]
    lines = {}
    for between in range(1, 7):
        progress(f"Figure 10: {between} paths")
        values = [gain(size, between) for size in sizes]
        lines[f"{between} longer paths"] = (list(map(float, sizes)), values)
    first = min(
        size for size, value in zip(sizes, lines["6 longer paths"][1], strict=True) if value > 1
    )
    summary = f"nothing is gained up to {first // 2048} KiB (paper: 8 kB); six paths gain most"
    return TspFigure("10", "gain of longer paths", lines, ("bytes", "times as fast"), summary, "x")


def figure_13(_: Progress) -> TspFigure:
    """Utilisation of one chip."""
    widths = list(range(1376, 3501))
    values = [matmul_utilisation(2304, 4096, width) for width in widths]
    least = min(values)
    summary = (
        f"at least {least:.1%} for any N (paper: at least 80 %); by tiles that are not full alone"
    )
    line = {"a chip": (list(map(float, widths)), values)}
    return TspFigure(
        "13", "[2304 x 4096] x [4096 x N] on a chip", line, ("N", "utilisation"), summary
    )


def figure_14(progress: Progress) -> TspFigure:
    """A matrix product over 8 to 104 chips."""
    fabric = _native.Topology.parse("dragonfly:104").fabric
    chips, times, parts = [], [], []
    for splits in range(1, 14):
        progress(f"Figure 14: {8 * splits} chips")
        program = ChipProgram(fabric, "float16")
        place_product(program, (800, 32_576), (32_576, 8192), 8, splits)
        seconds = program.plan().end_ticks / TICKS_PER_S
        chips.append(8.0 * splits)
        times.append(seconds * 1e6)
        parts.append(2 * 800 * 32_576 * 8192 / seconds / PEAK_FLOPS / (8 * splits))
    summary = (
        f"{times[0]:.0f} us on 8 chips, {times[7]:.0f} on 64, {times[12]:.0f} on 104; utilisation "
        f"{parts[0]:.1%}, {parts[7]:.1%}, {parts[12]:.1%}. From 9 chips a group on, nodes must add "
        "for each other, which costs what they save"
    )
    percent = [100 * part for part in parts]
    lines = {"time": (chips, times), "utilisation": (chips, percent)}
    return TspFigure(
        "14",
        "[800 x 32576] x [32576 x 8192]",
        lines,
        ("chips", "us"),
        summary,
        right={"utilisation": "utilisation, %"},
    )


def figure_15(_: Progress) -> TspFigure:
    """Throughput of large matrix products, split by columns."""
    sizes = [float(size) for size in range(20_000, 660_000, 20_000)]
    lines = {}
    for chips in (100, 200, 300):
        values = [
            chips
            * PEAK_FLOPS
            * matmul_utilisation(int(size), int(size), math.ceil(size / chips))
            / 1e15
            for size in sizes
        ]
        lines[f"{chips} chips"] = (sizes, values)
    most = max(lines["300 chips"][1])
    summary = (
        f"300 chips reach {most:.1f} PFLOP/s, {most / 2.8:.0f} times the 2.8 of 432 V100 in 64 "
        'bits, where the paper says "over 100 times"'
    )
    return TspFigure("15", "[N x N] x [N x N] by columns", lines, ("N", "PFLOP/s"), summary)


def figure_16(progress: Progress, data: Path | None = None) -> TspFigure:
    """All-reduce over 8 chips."""
    fabric = _native.Topology.parse("dragonfly:8").fabric
    sizes = [2**power for power in range(10, 28)]
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for kind, name in (
        ("all-reduce", "8 chips"),
        ("all-reduce-direct", "8 chips, always in two hops"),
    ):
        values = []
        for size in sizes:
            progress(f"Figure 16: {size} bytes")
            seconds = fabric.collective(kind, size).end_ticks / TICKS_PER_S
            values.append(bus_bandwidth(size, 8, seconds) / 1e9)
        lines[name] = (list(map(float, sizes)), values)
    most = lines["8 chips"][1][-1]
    summary = f"{most:.0f} GB/s of 87.5 at 128 MiB"
    if data is not None and (data / GPU_ALL_REDUCE).is_file():
        with (data / GPU_ALL_REDUCE).open() as file:
            known = [
                (float(row["size(B)"]), float(row["busbw(GB/s)"])) for row in csv.DictReader(file)
            ]
        lines["8 A100, measured (vTrain)"] = ([one[0] for one in known], [one[1] for one in known])
        scaled = [one[1] * TSP_PINS_GB_S / A100_PINS_GB_S for one in known]
        lines["the same by pins"] = ([one[0] for one in known], scaled)
        ours = lines["8 chips"][1][10]
        summary += (
            f"; at 1 MiB {ours:.0f} where 8 A100 reach {known[0][1]:.0f}, at 1 GiB and by pins "
            f"they reach {scaled[-1]:.0f} (paper: ahead at small sizes, even by pins at large ones)"
        )
    axes = ("bytes", "GB/s of bus bandwidth")
    return TspFigure("16", "all-reduce over 8 chips", lines, axes, summary, "x")


def figure_17(progress: Progress) -> TspFigure:
    """Latency distribution of repeated BERT-Large runs."""
    fabric = _native.Topology.parse("dragonfly:8").fabric
    program = ChipProgram(fabric)
    place_pipeline(program, 1, 24, BERT_LARGE, 4)
    plan = program.plan()
    progress("Figure 17: runs")
    ends = {
        plan.simulate([], ExecutionOptions(noise=(seed, 1e-3, 1)))["end_ticks"]
        for seed in range(20)
    }
    chips_us = plan.end_ticks / TICKS_PER_S * 1e6
    # Assumed: host overhead, log-normal around 20 us; the paper's spread is of PCIe alone.
    host = np.random.default_rng(17).lognormal(math.log(20), 0.4, 24_240)
    counts, edges = np.histogram(chips_us + host, bins=np.arange(chips_us, chips_us + 100, 5))
    lines = {"runs, with what the host adds (assumed)": (edges[:-1].tolist(), counts.tolist())}
    summary = (
        f"{len(ends)} duration in 20 runs with errors on links: the chips' {chips_us:.0f} us never "
        "vary; all spread is the host's, which is assumed here (paper: 99 % within 1,225 us)"
    )
    return TspFigure("17", "BERT-Large on 4 chips, 24,240 runs", lines, ("us", "runs"), summary)


def figure_18(progress: Progress) -> TspFigure:
    """Weak scaling of encoders in a pipeline."""
    chips, rates = [], []
    for count, encoders in ((1, 6), (4, 24), (8, 48), (16, 96)):
        progress(f"Figure 18: {encoders} encoders")
        fabric = _native.Topology.parse(f"dragonfly:{max(8, count)}").fabric
        ends = []
        for inputs in (16, 32):
            program = ChipProgram(fabric)
            place_pipeline(program, inputs, encoders, BERT_LARGE, count)
            ends.append(program.plan().end_ticks / TICKS_PER_S)
        chips.append(float(count))
        rates.append(16 * encoders * BERT_LARGE.flops() / (ends[1] - ends[0]))
    values = [rate / rates[0] for rate in rates]
    summary = (
        f"{', '.join(f'{value:.2f}' for value in values)} times one chip's (paper: 1, 4, 8, 16)"
    )
    lines = {"simulated": (chips, values), "linear": (chips, chips)}
    return TspFigure(
        "18", "6 encoders a chip", lines, ("chips", "times one chip's TFLOP/s"), summary
    )


def figure_19(progress: Progress) -> TspFigure:
    """Strong scaling of Cholesky's factorisation."""
    fabric = _native.Topology.parse("dragonfly:8").fabric
    chips, times = [1, 2, 4, 8], []
    for count in chips:
        progress(f"Figure 19: {count} chips")
        program = ChipProgram(fabric, "float16")
        place_cholesky(program, 10_240, count, dtype=np.float16)
        times.append(program.plan().end_ticks / TICKS_PER_S)
    values = [times[0] / one for one in times]
    places = [float(count) for count in chips]
    lines = {"simulated": (places, values), "paper": (places, [1, 1.2, 1.4, 1.5])}
    summary = (
        f"{values[1]:.2f}, {values[2]:.2f}, {values[3]:.2f} times one chip on 2, 4, 8 (paper: 1.2, "
        f"1.4, 1.5); assumed: {COLUMN_CYCLES} cycles from column to column, 10,240 rows"
    )
    return TspFigure("19", "Cholesky of 10,240 rows", lines, ("chips", "times one chip"), summary)


def figure_20(progress: Progress) -> TspFigure:
    """Time breakdown of BERT-Large on 4 chips, in two placements."""
    fabric = _native.Topology.parse("dragonfly:8").fabric
    shape, inputs = BERT_LARGE, 16
    progress("Figure 20")
    spread = ChipProgram(fabric)
    nothing = np.zeros((shape.words, shape.width), np.float32)
    light = Encoder(*(np.zeros(e, np.float32) for e in _extents()))
    place_over_chips(spread, nothing, [light] * 2, shape, 4)
    spread_plan = spread.plan()
    per_encoder = spread_plan.end_ticks / TICKS_PER_S / 2
    attention, inside, norm = shape.cycles(4)
    computing = (attention + inside + 2 * norm) / CLOCK_HZ
    pipeline = ChipProgram(fabric)
    place_pipeline(pipeline, inputs, 24, shape, 4)
    piped = (pipeline.plan().end_ticks / TICKS_PER_S) / inputs / 24
    whole = sum(shape.cycles()[:2]) + 2 * shape.cycles()[2]
    lines = {
        "computing": ([0.0, 1.0], [computing * 1e6, whole / CLOCK_HZ / 4 * 1e6]),
        "all": ([0.0, 1.0], [per_encoder * 1e6, piped * 1e6]),
    }
    better = per_encoder / piped - 1
    summary = (
        f"an encoder over 4 chips computes {computing / per_encoder:.0%} of its time and waits for "
        f"links in the rest; whole encoders in a pipeline do {better:.0%} more a second (paper, by "
        "its own compiler's placement: 26 %)"
    )
    axes = ("placement", "us an encoder")
    names = ("every encoder over all chips", "whole encoders in a pipeline")
    return TspFigure("20", "where time goes", lines, axes, summary, categories=names)


def _extents() -> tuple[tuple[int, ...], ...]:
    width, inside = BERT_LARGE.width, BERT_LARGE.inside
    return ((3, width, width), (width, width), (width, inside), (inside, width))


def figure_clocks(progress: Progress, seconds: float = 1.0) -> TspFigure:
    """Clock skew between chips under drift."""
    fabric = _native.Topology.parse("dragonfly:264").fabric

    def show(part: float) -> None:
        progress(f"clocks of 264 chips, {part * seconds:.1f} of {seconds:g} s simulated")

    found = fabric.clocks(seconds, 100.0, 1, 50, show)
    times = [one[0] for one in found]
    lines = {
        "from the root": (times, [one[1] for one in found]),
        "from their parents": (times, [one[2] for one in found]),
        "half the jitter of a link": (times, [8.5] * len(times)),
    }
    plan = fabric.collective("all-gather", 1 << 18)
    try:
        plan.keep_slots(0.05, 100.0, 1)
        without = "nothing goes wrong"
    except RuntimeError as error:
        without = str(error)
    apart, deskews = plan.keep_slots(0.05, 100.0, 1, 1 << 14)
    summary = (
        f"at most {max(lines['from the root'][1]):.1f} cycles in {seconds:g} s at +-100 ppm; with "
        f"{deskews:,} resynchronisations in 50 ms every vector is in its slot (ends of a link at "
        f"most {apart:.1f} cycles apart); without: {without}"
    )
    return TspFigure("clocks", "cycles that counters are apart", lines, ("s", "cycles"), summary)


def figure_variance(progress: Progress) -> TspFigure:
    """Latency with and without a static schedule, on the same traffic."""
    fabric = _native.Topology.parse("dragonfly:72").fabric
    runs, count, vectors = 40, 4, 27
    lines: dict[str, tuple[list[float], list[float]]] = {}
    spreads = {}
    for routing in ("minimal", "adaptive"):
        progress(f"variance: {routing}")
        each = [
            fabric.uniform_messages(count, vectors, 200_000, routing, seed)[1]
            for seed in range(runs)
        ]
        values = np.sort(np.array(each).ravel()) / TICKS_PER_S * 1e6
        spreads[routing] = float(values[-1] - values[0])
        places = np.linspace(0, 100, 201)
        lines[f"queues, {routing} routes"] = (
            np.quantile(values, places / 100).tolist(),
            places.tolist(),
        )
    progress("variance: schedule")
    random = np.random.default_rng(0)
    pairs = [(source, int(random.integers(1, 72))) for source in range(72) for _ in range(count)]
    size = vectors * 320
    plan = fabric.route(
        [(source, (source + apart) % 72, size, [], 0, 0, False) for source, apart in pairs]
    )
    ends = {
        plan.simulate([], ExecutionOptions(noise=(seed, 1e-3, 1), threads=1 + seed % 2))[
            "end_ticks"
        ]
        for seed in range(runs)
    }
    values = np.sort(np.array(plan.ends_ticks)) / TICKS_PER_S * 1e6
    places = np.linspace(0, 100, len(values))
    lines["schedule, every run"] = (values.tolist(), places.tolist())
    summary = (
        f"by the schedule each transfer takes what it always takes ({len(ends)} duration in "
        f"{runs} runs with errors on links and one or two threads); in queues the same kind of "
        f"traffic takes {spreads['minimal']:.1f} us more at worst than at best, or "
        f"{spreads['adaptive']:.1f}"
    )
    axes = ("us", "part of transfers that have come, %")
    return TspFigure("variance", "latency with and without a schedule", lines, axes, summary)


FIGURES: dict[str, Callable[..., TspFigure]] = {
    "2": figure_2,
    "10": figure_10,
    "13": figure_13,
    "14": figure_14,
    "15": figure_15,
    "16": figure_16,
    "17": figure_17,
    "18": figure_18,
    "19": figure_19,
    "20": figure_20,
    "clocks": figure_clocks,
    "variance": figure_variance,
}


def reproduce(
    directory: Path,
    names: list[str],
    progress: Progress,
    *,
    data: Path | None = None,
    clock_seconds: float = 1.0,
) -> Iterator[TspFigure]:
    """Reproduces figures and writes each as ``tsp-<n>.json`` and ``.png``.

    Args:
        directory: output folder.
        names: numbers of the figures.
        progress: called with a description of each stage.
        data: folder with published all-reduce measurements, if any.
        clock_seconds: simulated time for clock skew; 10 s take a minute or two.

    Raises:
        ConfigError: a figure is unknown.
    """
    check_figures(names, FIGURES)
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        progress(f"Figure {name}")
        options: dict[str, Any] = {}
        if name == "16":
            options["data"] = data
        if name == "clocks":
            options["seconds"] = clock_seconds
        figure = FIGURES[name](progress, **options)
        path = directory / f"tsp-{name}"
        record = {"simulated": True, **dataclasses.asdict(figure)}
        path.with_suffix(".json").write_text(json.dumps(record, indent=1))
        _draw(figure, path.with_suffix(".png"))
        yield figure


def write_page(directory: Path, figures: list[TspFigure], progress: Progress) -> list[Row]:
    """Writes ``tsp.md``: every row with the paper's value, ours and their ratio, and the figures.

    Returns:
        The rows.
    """
    found = list(rows(progress))
    lines = [
        "# The multi-TSP system, reproduced",
        "",
        "Everything here is simulated or computed; nothing was measured on the paper's hardware. "
        "Class A must hold, B holds in shape, C needs the authors' machine, X contradicts itself "
        "in the paper.",
        "",
        "| # | quantity | class | paper | ours | ratio | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(found, key=lambda row: row.number):
        paper = "" if row.paper is None else f"{row.paper:.6g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        cells = (row.number, row.quantity, row.kind, paper, f"{row.ours:.6g}", ratio, row.note)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for figure in figures:
        title = f"Figure {figure.name}" if figure.name.isdigit() else figure.name.capitalize()
        lines += ["", f"## {title}: {figure.title}", "", f"{figure.summary}.", ""]
        lines.append(f"![{title}](tsp-{figure.name}.png)")
    (directory / "tsp.md").write_text("\n".join(lines) + "\n")
    return found


def _draw(figure: TspFigure, path: Path) -> None:
    pyplot = drawing()
    canvas, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    draw_figure(axes, figure)
    axes.set_title(f"Multi-TSP {figure.name}, simulated: {figure.title}", fontsize=9)
    save(canvas, path)


def draw_figure(axes: Any, figure: TspFigure) -> None:
    """Draws lines, those of another unit on a second axis, or grouped bars of categories."""
    axes.set(xlabel=figure.axes[0], ylabel=figure.axes[1])
    if figure.categories:
        _draw_groups(axes, figure)
        return
    others: dict[str, Any] = {}
    handles = []
    for number, (name, (places, values)) in enumerate(figure.lines.items()):
        on = axes
        if name in figure.right:
            unit = figure.right[name]
            if unit not in others:
                others[unit] = axes.twinx()
            on = others[unit]
            on.set_ylabel(unit)
            on.set_ylim(0, 1.1 * max(values))
        style = "--" if name in ("linear", "paper", "half the jitter of a link") else "-"
        few = {"marker": "o", "ms": 3} if len(places) <= 50 else {"lw": 1.2}
        label = f"{name} (right)" if on is not axes else name
        handles += on.plot(places, values, style, label=label, color=f"C{number}", **few)
    if "x" in figure.logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(handles=handles, fontsize=8)


def _draw_groups(axes: Any, figure: TspFigure) -> None:
    width = 0.8 / len(figure.lines)
    for number, (name, (places, values)) in enumerate(figure.lines.items()):
        shifted = [place + (number - (len(figure.lines) - 1) / 2) * width for place in places]
        bars = axes.bar(shifted, values, width, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(figure.categories)), figure.categories)
    axes.margins(y=0.15)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8)
