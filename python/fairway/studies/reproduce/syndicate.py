"""SYNDICATE's Figures 11 to 18, simulated at its sizes: our plans of models like its own.

Steps are those of :mod:`fairway.studies.workloads.production`, channels those of its Table 1; both
state their assumptions. So the ranking and trends of gains can be compared with the paper, not
their size.

Source: SYNDICATE §6.5 and §6.6.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fairway import _native
from fairway.communication import steps
from fairway.communication.explanation import explain
from fairway.communication.team import Collective
from fairway.report import plans as report
from fairway.report.plots import draw_lines
from fairway.studies.reproduce import Figure, Progress, check_figures, write_figure
from fairway.studies.workloads import production

__all__ = ["FIGURES", "Figure", "reproduce"]

GPUS = 128
SEGMENTS = (1, 2, 4, 5)
"""Of five segments, four use the channel that is four times as fast."""
EVALUATIONS = 2000
SHOWN = ("lifo", "hand", "exec-only", "sched-only", "joint", "joint+striping")
NAMES = {
    "lifo": "BS+",
    "hand": "HO",
    "exec-only": "S-Exec",
    "sched-only": "S-Sched",
    "joint": "joint",
    "joint+striping": "joint, striped",
}
PAPER_GAINS = {"A1": 1.74, "A2": 1.44, "A3": 1.38, "A4": 1.77, "A5": 1.21, "A6": 0.97}
"""Over BS+ (§6.5)."""
PAPER_OVER_HAND = {"A1": 1.26, "A2": 1.21, "A3": 1.20}
PAPER_IDLE = {"lifo": 0.449, "hand": 0.414, "exec-only": 0.345, "sched-only": 0.362, "joint": 0.274}
"""Of A2 (Figure 14)."""
KILOBYTES = tuple(4 * 4**power for power in range(10))

Plans = dict[str, _native.StepPlan]


@functools.lru_cache
def _planned(name: str, gpus: int) -> Plans:
    step = production.step(name, gpus)
    return steps.plan(
        step, production.CHANNELS, segments=SEGMENTS, evaluations=EVALUATIONS, chains=2
    )


def _idle(name: str, plan: _native.StepPlan, gpus: int = GPUS) -> float:
    computed = sum(task.compute_s or 0.0 for task in production.step(name, gpus).tasks)
    return 1 - computed * 1e9 / plan.period_ns


def figure_11(progress: Progress) -> Figure:
    """Speed-up of a step over BS+."""
    rows: list[dict[str, Any]] = []
    for name in production.MODELS:
        progress(f"Figure 11: {name}")
        plans = _planned(name, GPUS)
        least = plans["lifo"].period_ns / plans["lifo"].least_ns
        gains = {NAMES[s]: plans["lifo"].period_ns / plans[s].period_ns for s in SHOWN}
        rows.append(
            {"model": name, **gains, "no plan gains more": least, "paper": PAPER_GAINS[name]}
        )
    ours = ", ".join(
        f"{row['model']} {row['joint']:.2f}, {row['joint, striped']:.2f}" for row in rows
    )
    over = ", ".join(
        f"{row['model']} {row['joint'] / row['HO']:.2f} ({PAPER_OVER_HAND[row['model']]})"
        for row in rows
        if row["model"] in PAPER_OVER_HAND
    )
    theirs = ", ".join(f"{name} {gain}" for name, gain in PAPER_GAINS.items())
    return Figure(
        "11",
        "throughput over BS+",
        rows,
        f"joint and striped over BS+: {ours} (paper: {theirs}); joint over HO: {over}",
    )


def figure_12(progress: Progress) -> Figure:
    """Scaling of A2's throughput with GPUs."""
    rows: list[dict[str, Any]] = []
    for gpus in (8, 16, 32, 64, 128):
        progress(f"Figure 12: {gpus} GPUs")
        plans = _planned("A2", gpus)
        rows.append({"GPUs": gpus, **{NAMES[s]: gpus * 1e9 / plans[s].period_ns for s in SHOWN}})
    first = float(rows[0]["BS+"])
    for row in rows:
        row.update({name: rate / first for name, rate in row.items() if name != "GPUs"})
        row["ideal"] = row["GPUs"] / 8
    last = rows[-1]
    return Figure(
        "12",
        "throughput of A2, as multiples of BS+ on one node",
        rows,
        f"at 128 GPUs BS+ reaches {last['BS+']:.1f} of {last['ideal']:.0f}, joint "
        f"{last['joint']:.1f}, striped {last['joint, striped']:.1f} (paper: closer to ideal)",
    )


def figure_13(_: Progress) -> Figure:
    """The DAG of a recommendation model's step."""
    step = production.step("A2", GPUS)
    rows = [
        {
            "task": task.name,
            "after": [f"{one.task}{'@1' * one.before}" for one in task.after],
            "collective": str(task.collective) if task.collective is not None else "",
            "ms": (task.compute_s or 0.0) * 1e3,
        }
        for task in step.tasks
    ]
    count = sum(bool(row["collective"]) for row in rows)
    return Figure("13", "tasks of A2", rows, f"{len(rows)} tasks, {count} of them collectives")


def figure_14(progress: Progress) -> Figure:
    """Device idle time of A2."""
    progress("Figure 14")
    plans = _planned("A2", GPUS)
    rows = [
        {"system": NAMES[s], "idle": _idle("A2", plans[s]), "paper": PAPER_IDLE.get(s)}
        for s in SHOWN
    ]
    summary = ", ".join(
        f"{row['system']} {row['idle']:.0%}" + (f" ({row['paper']:.0%})" if row["paper"] else "")
        for row in rows
    )
    return Figure("14", "devices idle, A2", rows, f"{summary} (paper's in brackets)")


def figure_15(progress: Progress) -> Figure:
    """One step of A2 under each system."""
    progress("Figure 15")
    step, plans = production.step("A2", GPUS), _planned("A2", GPUS)
    rows = []
    for system in SHOWN:
        found = explain(step, plans[system])
        rows.append(
            {
                "system": NAMES[system],
                "ms": found.period_ns / 1e6,
                "less than BS+": 1 - found.period_ns / plans["lifo"].period_ns,
                "waits": found.sentences(),
            }
        )
    summary = ", ".join(f"{row['system']} {row['less than BS+']:.1%}" for row in rows[1:])
    return Figure(
        "15",
        "a step of A2",
        rows,
        f"less than BS+: {summary} (paper: HO 15.7 %, S-Exec 17.1 %, S-Sched 21.9 %, joint 30.6 %)",
    )


def _strategies(collective: Collective, channel: int) -> dict[str, float]:
    """Returns milliseconds of each strategy on one channel, by its name."""
    given = [production.CHANNELS[channel].terms]
    found = _native.collective_options(collective, 4, given, [1])
    return {form: time / 1e6 for form, time in found}


def _by_size(
    collective: Callable[[int, int], Collective], progress: Progress
) -> list[dict[str, Any]]:
    rows = []
    for size in KILOBYTES:
        progress(f"{size} KB")
        rows.append({"KB": size, **_strategies(collective(GPUS, size * 1000 // 4), 0)})
    return rows


def _best(rows: Sequence[dict[str, Any]]) -> str:
    """Describes which strategy is best from which size on."""
    summary: list[str] = []
    for row in rows:
        times = {name: time for name, time in row.items() if name != "KB"}
        best = min(times, key=lambda name: times[name])
        if not summary or not summary[-1].startswith(f"{best} "):
            summary.append(f"{best} from {row['KB']} KB")
    return ", ".join(summary)


def figure_16(progress: Progress) -> Figure:
    """Strategies of an all-reduce by its size."""
    rows = _by_size(Collective.all_reduce, progress)
    summary = f"best: {_best(rows)} (paper: tree, then ring)"
    return Figure("16", "an all-reduce over 128 GPUs, ms", rows, summary)


def figure_17(progress: Progress) -> Figure:
    """Splines of an all-to-all by its size."""
    rows = _by_size(Collective.all_to_all, progress)
    summary = f"best: {_best(rows)} (paper: all 128 at a time, then 64, then 32)"
    return Figure("17", "an all-to-all over 128 GPUs, ms", rows, summary)


def figure_18(progress: Progress) -> Figure:
    """An all-reduce concurrent with an all-to-all, on one channel or two."""
    progress("Figure 18")
    reduce = Collective.all_reduce(GPUS, 60_000_000)
    rows, best = [], []
    for part in (0.1, 0.25, 0.5, 1.0):
        exchange = Collective.all_to_all(GPUS, round(240_000_000 * part))
        sums, moves = (
            [min(_strategies(one, channel).values()) for channel in (0, 1)]
            for one in (reduce, exchange)
        )
        times = {
            "both on RDMA": sums[0] + moves[0],
            "all-reduce on RDMA, all-to-all on TCP": max(sums[0], moves[1]),
            "all-to-all on RDMA, all-reduce on TCP": max(sums[1], moves[0]),
        }
        size = round(960 * part)
        rows.append({"all-to-all MB": size, **times})
        best.append(f"{size} MB: {min(times, key=times.__getitem__)}")
    summary = ", ".join(best)
    return Figure(
        "18",
        "an all-reduce of 240 MB beside an all-to-all, ms",
        rows,
        f"best beside an all-to-all of {summary} (paper: all-reduce on RDMA, all-to-all on TCP; at "
        "Table 1's rates that pays as long as the exchange is short)",
    )


FIGURES: dict[str, Callable[[Progress], Figure]] = {
    "11": figure_11,
    "12": figure_12,
    "13": figure_13,
    "14": figure_14,
    "15": figure_15,
    "16": figure_16,
    "17": figure_17,
    "18": figure_18,
}


def reproduce(directory: Path, names: Sequence[str], progress: Progress) -> Iterator[Figure]:
    """Reproduces figures and writes each as ``syndicate-<n>.json`` and ``.png``.

    Args:
        directory: output folder.
        names: numbers of the figures.
        progress: called with a description of each stage.

    Raises:
        ConfigError: a figure is unknown.
    """
    check_figures(names, FIGURES)
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        figure = FIGURES[name](progress)
        path = directory / f"syndicate-{name}"
        write_figure(path, figure, {"gpus": GPUS}, "SYNDICATE", _DRAWERS.get(name))
        if name == "15":
            _draw_steps(path.with_suffix(".png"))
        yield figure


def _draw_steps(path: Path) -> None:
    step, plans = production.step("A2", GPUS), _planned("A2", GPUS)
    report.draw(path, {NAMES[system]: explain(step, plans[system]) for system in SHOWN})


def _draw_bars(axes: Any, rows: list[dict[str, Any]], across: str, value: str) -> None:
    names = [name for name in rows[0] if name != across]
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [place + number * width for place in range(len(rows))]
        greys = {"paper": "dimgrey", "no plan gains more": "lightgrey"}
        style = {"color": greys[name]} if name in greys else {}
        axes.bar(places, [row[name] or 0.0 for row in rows], width, label=name, **style)
    middle = (len(names) - 1) / 2 * width
    axes.set_xticks([place + middle for place in range(len(rows))], [row[across] for row in rows])
    axes.set_xlabel(across)
    axes.set_ylabel(value)
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
    axes.legend(fontsize=7, ncols=1 if len(names) <= 3 else 3, loc="upper center")
    axes.grid(alpha=0.3, axis="y")


def _draw_lines(axes: Any, rows: list[dict[str, Any]], across: str, value: str) -> None:
    draw_lines(axes, rows, across, [name for name in rows[0] if name != across], value)


def _draw_dag(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws tasks in columns by depth; an edge across columns has a place in each (layered layout).

    So no edge crosses a box. Edges from the preceding step are dotted, and routed underneath.
    """
    depth: dict[str, int] = {}
    for row in rows:
        before = [depth[name] for name in row["after"] if name in depth]
        depth[row["task"]] = max(before, default=-1) + 1
    chains: list[list[str]] = []
    columns: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for row in rows:
        columns[depth[row["task"]]].append(row["task"])
        for name in row["after"]:
            if name not in depth:
                continue
            between = range(depth[name] + 1, depth[row["task"]])
            passes = [f"{name}>{row['task']}@{column}" for column in between]
            for column, place in zip(between, passes, strict=True):
                columns[column].append(place)
            chains.append([name, *passes, row["task"]])
    heights = _ordered(columns, chains)
    known = {one: (x, heights[one]) for x, column in enumerate(columns) for one in column}
    for row in rows:
        axes.annotate(
            row["task"], known[row["task"]], ha="center", va="center", fontsize=7, color="white",
            bbox={"boxstyle": "round", "ec": "none",
                  "fc": "tab:orange" if row["collective"] else "tab:blue"},
        )  # fmt: skip
    arrow = {"arrowstyle": "->", "color": "grey", "alpha": 0.8, "shrinkA": 0, "shrinkB": 0}
    for chain in chains:
        places = [known[name] for name in chain]
        line = [(x + side * HALF_BOX, y) for x, y in places for side in (-1, 1)][1:-1]
        axes.plot(*zip(*line, strict=True), color="grey", alpha=0.8, lw=1, zorder=0)
        axes.annotate("", line[-1], line[-2], arrowprops=arrow)
    floor = min(heights.values())
    returns = [
        (name.removesuffix("@1"), row["task"])
        for row in rows
        for name in row["after"]
        if name.endswith("@1")
    ]
    for number, (source, target) in enumerate(returns, 1):
        below = floor - 0.35 - 0.18 * number
        (x, y), (to_x, to_y) = known[source], known[target]
        out, back = x + HALF_BOX + 0.03 * number, to_x - HALF_BOX - 0.03 * number
        line = [(x, y), (out, y), (out, below), (back, below), (back, to_y)]
        axes.plot(*zip(*line, strict=True), color="grey", alpha=0.7, lw=1, ls=":", zorder=0)
        axes.annotate("", (to_x - HALF_BOX, to_y), line[-1], arrowprops=arrow)
    axes.set_xlim(-0.8, len(columns) - 0.2)
    axes.set_ylim(floor - 0.55 - 0.18 * len(returns), max(heights.values()) + 0.6)
    boxes = [axes.scatter([], [], marker="s", color=c) for c in ("tab:blue", "tab:orange")]
    (dotted,) = axes.plot([], [], color="grey", ls=":")
    names = ["computation", "collective", "needed by the next step"]
    axes.legend([*boxes, dotted], names, fontsize=8, loc="upper left")
    axes.set_axis_off()


HALF_BOX = 0.41
"""Half-width of a box as a fraction of a column, from its middle to where edges begin and end."""
SWEEPS = 8


def _ordered(columns: list[list[str]], chains: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns the height of each place, in columns ordered by the mean height of their neighbours.

    Source: Sugiyama, Tagawa, Toda 1981 (barycentres).
    """
    beside: dict[str, list[str]] = {}
    for chain in chains:
        for one, other in itertools.pairwise(chain):
            beside.setdefault(one, []).append(other)
            beside.setdefault(other, []).append(one)
    heights: dict[str, float] = {}

    def stack(column: list[str]) -> None:
        for row, one in enumerate(column):
            heights[one] = (len(column) - 1) / 2 - row

    for column in columns:
        stack(column)
    for sweep in range(SWEEPS):
        for column in columns if sweep % 2 == 0 else reversed(columns):

            def middle(one: str) -> float:
                near = [heights[other] for other in beside.get(one, ())]
                return -sum(near) / len(near) if near else -heights[one]

            column.sort(key=middle)
            stack(column)
    return heights


_DRAWERS: dict[str, Callable[[Any, list[dict[str, Any]]], None]] = {
    "11": lambda axes, rows: _draw_bars(axes, rows, "model", "throughput over BS+"),
    "12": lambda axes, rows: _draw_lines(
        axes, rows, "GPUs", "throughput, multiples of BS+ on one node"
    ),
    "13": _draw_dag,
    "14": lambda axes, rows: _draw_bars(axes, rows, "system", "idle fraction of a step"),
    "16": lambda axes, rows: _draw_lines(axes, rows, "KB", "ms"),
    "17": lambda axes, rows: _draw_lines(axes, rows, "KB", "ms"),
    "18": lambda axes, rows: _draw_bars(axes, rows, "all-to-all MB", "ms until both are done"),
}
