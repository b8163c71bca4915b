"""Reports of the examples' training runs: progress, the loss as text, a plot and a JSON file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Show = Callable[[int, float], None]  # (steps finished, latest loss)


@dataclass
class Run:
    """Measurements of a training run."""

    losses: list[float] = field(default_factory=list)
    first_step_s: float = 0.0
    rate: float | None = None  # per second, without the first step; None if there is no other
    unit: str = "tokens"


@contextmanager
def show_progress(steps: int) -> Iterator[Show]:
    """Shows a progress bar on a terminal, else a line for every tenth of the run."""
    if not sys.stdout.isatty():
        yield _print_tenths(steps)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("compiling", total=steps)
        yield lambda done, loss: bar.update(task, completed=done, description=f"loss {loss:.3f}")


def _print_tenths(steps: int) -> Show:
    printed = -1

    def show(done: int, loss: float) -> None:
        nonlocal printed
        if 10 * done // steps > printed:
            printed = 10 * done // steps
            print(f"step {done:>{len(str(steps))}}/{steps}  loss {loss:.4f}", flush=True)

    return show


def save_report(name: str, run: Run, settings: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Prints the run; saves `<name>.json` and the loss plot `<name>.png` in `--out`."""
    print(draw(run.losses))
    print(f"loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f} over {len(run.losses)} steps")
    print(f"{_rate(run)} after a first step of {run.first_step_s:.1f} s")
    table = {
        "example": name,
        **facts,
        "settings": {key: value for key, value in vars(settings).items() if key != "out"},
        "first_step_s": run.first_step_s,
        f"{run.unit}_per_second": run.rate,
        "losses": run.losses,
    }
    data = settings.out / f"{name}.json"
    data.write_text(json.dumps(table, indent=1, default=str) + "\n", encoding="utf-8")
    plot = settings.out / f"{name}.png"
    _save_plot(plot, name, run)
    print(f"saved {plot} and {data}")


def _rate(run: Run) -> str:
    return "no rate" if run.rate is None else f"{run.rate:,.0f} {run.unit}/s"


def draw(losses: Sequence[float], width: int = 60, height: int = 10) -> str:
    """Draws the loss curve as text, `height` lines; each column is the mean of its steps."""
    groups = np.array_split(np.asarray(losses), min(width, len(losses)))
    columns = np.array([group.mean() for group in groups])
    low, high = columns.min(), columns.max()
    rows = np.rint((high - columns) / max(high - low, 1e-12) * (height - 1))
    lines = []
    for row in range(height):
        level = high - (high - low) * row / (height - 1)
        lines.append(f"{level:7.3f} |" + "".join("*" if at == row else " " for at in rows))
    return "\n".join(line.rstrip() for line in lines)


def _save_plot(path: Path, name: str, run: Run) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(run.losses) + 1), run.losses)
    axes.set(xlabel="step", ylabel="loss (nats)")
    axes.set_title(f"{name}: {_rate(run)}")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
