"""``fairway dev``: checks of Fairway itself."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import typer

from fairway import _native
from fairway.cli.consoles import duration, results, working
from fairway.interrupts import run_aside

__all__ = ["dev_app"]

CHUNK = 500
"""Seeds between two updates of the progress."""
SHOWN = 20
"""Violations that are printed."""

dev_app = typer.Typer(no_args_is_help=True)


@dev_app.callback()
def _group() -> None:  # without it, typer would make the only command the group
    """Checks of Fairway itself, for its developers."""


@dev_app.command("sim-faults")
def simulate_faults(
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0,
    replay: Annotated[
        int | None, typer.Option(min=0, help="Run this seed alone, and print what happens.")
    ] = None,
) -> None:
    """Run the production controller over simulated hosts that fail, by seed.

    Hosts are killed, stopped and cut off, clients leave, islands are removed and come back. Each
    run checks that the hosts of an island launch in one order, that every request is answered, in a
    second if nothing is wrong with the client's islands, that what is read is right or has an error
    that a loss explains, and that nothing is freed twice or left behind. Ends with 1 if not.
    """
    out = results()
    if replay is not None:
        run = run_aside(lambda: _native.replay_faults(replay))
        for line in run.log:
            out.print(line, soft_wrap=True)
        if run.violations:
            raise SystemExit(1)
        return
    begun_s = time.monotonic()
    counts: dict[str, int] = {}
    violations: list[str] = []
    longest_s = 0.0
    with working("simulating faults") as work:
        for begin in range(first, first + seeds, CHUNK):
            count = min(CHUNK, first + seeds - begin)
            run = run_aside(partial(_native.simulate_faults, begin, count))
            for name, value in run.counts:
                counts[name] = counts.get(name, 0) + value
            violations += [text for _, text in run.violations]
            longest_s = max(longest_s, run.longest_wait_s)
            work.update(begin + count - first, seeds)
    width = max(len(name) for name in counts)
    for name, value in counts.items():
        out.print(f"{name:<{width}} {value:>13,}")
    out.print(f"longest wait of a client on whose islands nothing was wrong: {longest_s:.3f} s")
    for text in violations[:SHOWN]:
        out.print(text, soft_wrap=True)
    took = duration(time.monotonic() - begun_s)
    out.print(f"{seeds:,} seeds, {len(violations)} violations, {took}")
    if violations:
        out.print("Show one with: fairway dev sim-faults --replay SEED")
        raise SystemExit(1)
