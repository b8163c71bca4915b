"""Presents steps under plans as tables, timelines and sentences."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fairway import _native
from fairway.communication.calibration import Calibration
from fairway.communication.explanation import Explanation
from fairway.communication.graph_plans import GraphPlan
from fairway.report.plots import drawing, save

__all__ = ["calibration_table", "draw", "explained", "graph_table", "systems_table"]

COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_cyan", "bright_yellow")
BLANK = "·"


def systems_table(plans: Mapping[str, _native.StepPlan], idle: Mapping[str, float]) -> Table:
    """Returns a table of a step's period under each system."""
    first = next(iter(plans.values()))
    table = Table(title="a step under each system")
    for name in ("system", "step", "vs fifo", "devices idle", "plans evaluated"):
        table.add_column(name, justify="left" if name == "system" else "right")
    for name, plan in plans.items():
        table.add_row(
            name,
            f"{plan.period_ns / 1e6:.2f} ms",
            f"{plan.period_ns / plans['fifo'].period_ns:.3f}",
            f"{idle[name]:.0%}",
            f"{plan.evaluations:,} ({plan.reason})",
        )
    table.add_section()
    least = first.least_ns
    table.add_row(
        "no plan takes less", f"{least / 1e6:.2f} ms", f"{least / plans['fifo'].period_ns:.3f}"
    )
    return table


def calibration_table(found: Calibration) -> Table:
    """Returns a table of measured channel costs, with the prediction error of motifs."""
    table = Table(
        title=f"model error: median {found.error_median:.1%}, {found.error_worst:.1%} at worst"
    )
    for name in ("channel", "rate", "latency", "sums", "incast", "beside others"):
        table.add_column(name, justify="right")
    for number, cost in enumerate(found.costs):
        table.add_row(
            str(number),
            f"{cost.rate_bps / 1e6:,.1f} Mbit/s",
            f"{cost.latency_ns / 1e3:,.0f} us",
            f"{cost.sums_bps / 1e9:,.0f} Gbit/s",
            f"{cost.incast:.1%}",
            ", ".join(f"{part:.1%}" for at, part in enumerate(cost.overlap) if at != number) or "-",
        )
    return table


def graph_table(found: GraphPlan) -> Table:
    """Returns a table of the makespan of a graph's steps under each schedule."""
    steps = "1 step" if found.steps == 1 else f"{found.steps} steps, one after the other"
    table = Table(title=f"time of {steps}, by schedule")
    for name in ("order", "time", "vs fifo"):
        table.add_column(name, justify="left" if name == "order" else "right")
    for name, time_s in (
        ("fifo, in strict order", found.strict_s),
        ("fifo, work-conserving", found.fifo_s),
        ("critical path", found.ordered_s),
        ("planned", found.planned_s),
    ):
        table.add_row(name, f"{time_s:.4f} s", f"{time_s / max(found.strict_s, 1e-12):.3f}")
    return table


def explained(
    name: str, found: Explanation, choices: list[tuple[str, str]], width: int
) -> RenderableType:
    """Renders one plan: timeline, critical path, causes of idle time, and collective strategies."""
    head = Text(f"{name}: {found.period_ns / 1e6:.2f} ms a step", style="bold")
    chain = " > ".join(f"{link.task} {link.time_ns / 1e6:.1f} ms" for link in found.path)
    lines: list[RenderableType] = [
        head,
        _timeline(found, min(width, 160) - 11),
        Text(f"critical path: {chain}"),
    ]
    lines += [Text(f"- {sentence}") for sentence in found.sentences()]
    lines += [Text(f"  {task}: {choice}", style="dim") for task, choice in choices]
    return Group(*lines, Text(""))


def _timeline(found: Explanation, width: int) -> Text:
    tasks = list(dict.fromkeys(bar.task for bar in sorted(found.bars, key=lambda b: b.start_ns)))
    color = {task: COLORS[number % len(COLORS)] for number, task in enumerate(tasks)}
    text = Text()
    for row in sorted({bar.row for bar in found.bars}, key=lambda row: (row != "devices", row)):
        text.append(f"{row:<10}")
        bars = [bar for bar in found.bars if bar.row == row]
        cells: list[str | None] = []
        for column in range(width):
            at = (column + 0.5) * found.period_ns / width
            there = [bar.task for bar in bars if bar.start_ns <= at < bar.end_ns]
            cells.append(there[0] if there else None)
        written = 0
        for column, task in enumerate(cells):
            if column == 0 or cells[column - 1] != task:
                written = 0
            # Task names are written into their bars, as far as there is room.
            letter = BLANK if task is None else (task[written : written + 1] or "━")
            text.append(letter, style=None if task is None else f"black on {color[task]}")
            written += 1
        text.append("\n")
    return text


def draw(path: str | os.PathLike[str], plans: Mapping[str, Explanation]) -> None:
    """Draws the timelines of plans above each other, on one scale."""
    pyplot = drawing()
    longest = max(found.period_ns for found in plans.values()) / 1e6
    tasks = list(dict.fromkeys(bar.task for found in plans.values() for bar in found.bars))
    colors = pyplot.get_cmap("tab10" if len(tasks) <= 10 else "tab20")
    heights = [len({bar.row for bar in found.bars}) for found in plans.values()]
    figure, axes = pyplot.subplots(
        len(plans),
        1,
        figsize=(11, 1 + 0.55 * sum(heights) + 0.5 * len(plans)),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for axis, (name, found) in zip(axes[:, 0], plans.items(), strict=True):
        rows = sorted({bar.row for bar in found.bars}, key=lambda row: (row != "devices", row))
        for bar in found.bars:
            start = max(0, bar.start_ns) / 1e6
            end = min(found.period_ns, bar.end_ns) / 1e6
            axis.barh(
                rows.index(bar.row),
                end - start,
                left=start,
                color=colors(tasks.index(bar.task) % colors.N),
                edgecolor="white",
                linewidth=0.3,
            )
        axis.set_yticks(range(len(rows)), rows)
        axis.invert_yaxis()
        axis.set_xlim(0, longest)
        axis.set_title(f"{name}: {found.period_ns / 1e6:.1f} ms, devices idle {found.idle:.0%}")
    axes[-1, 0].set_xlabel("ms of one step")
    handles = [
        pyplot.Rectangle((0, 0), 1, 1, color=colors(number % colors.N))
        for number in range(len(tasks))
    ]
    figure.legend(handles, tasks, loc="outside lower center", ncols=min(6, len(tasks)))
    save(figure, path, dpi=120)
