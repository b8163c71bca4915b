"""``fairway reproduce``: reproduces a paper's figures, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fairway.cli.consoles import Work, check_folder, counted, note, results, working
from fairway.errors import ConfigError
from fairway.interrupts import run_aside
from fairway.report.plots import drawing

__all__ = ["reproduce"]

SECONDS = {
    "pathways": {"5": 12, "6": 13, "7": 5, "8": 4},
    "syndicate": {"11": 12, "12": 2, "15": 2},
    "sipml": {"5a": 35, "5b": 35, "5c": 35, "scale": 60, "delays": 8},
    "tsp": {"clocks": 40, "variance": 1},
}
"""Approximate seconds per figure on two idle cores; figures not listed take about one second."""


def reproduce(
    paper: Annotated[str, typer.Argument(help="One of: pathways, syndicate, tsp, sipml.")],
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            help="Which figures: of pathways 5 to 9; of syndicate 11 to 18; of tsp 2, 10, "
            "13 to 20, clocks and variance; of sipml 5a, 5b, 5c, scale and delays. [default: all]"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plots and pages.")] = Path("out"),
    cost: Annotated[
        list[str] | None,
        typer.Option(help="pathways: replace a cost: NAME=NANOSECONDS, such as network=5000."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="tsp: folder with measured all-reduces of GPUs.")
    ] = None,
    clock_seconds: Annotated[
        float, typer.Option(help="tsp: simulated duration of clock tracking.", min=0.01)
    ] = 10.0,
) -> None:
    """Reproduce a paper's figures, by simulation at the paper's sizes."""
    from fairway.studies.reproduce import check_figures, pathways, sipml, syndicate, tsp

    papers: dict[str, Any] = {
        "pathways": pathways,
        "syndicate": syndicate,
        "tsp": tsp,
        "sipml": sipml,
    }
    if paper not in papers:
        raise ConfigError(f"there is no paper {paper!r}; there are {', '.join(papers)}")
    for given, name, of in ((cost, "--cost", "pathways"), (data, "--data", "tsp")):
        if given and paper != of:
            raise ConfigError(f"{name} is for {of}, not for {paper}; leave it out")
    module = papers[paper]
    chosen = list(figures or module.FIGURES)
    check_figures(chosen, module.FIGURES)
    known = pathways.costs(dict(_cost(one) for one in cost or ()))
    drawing()  # fails here if matplotlib is missing, not after the first figure
    check_folder(out)
    seconds = SECONDS[paper]
    expected = [float(seconds.get(name, 1.0)) for name in chosen]
    with working(f"{paper}: {counted(len(chosen), 'figure')}", sum(expected)) as work:

        def tell(text: str) -> None:
            work.update(text=f"{paper}: {text}")

        match paper:
            case "pathways":
                made: Iterator[Any] = iter(pathways.reproduce(out, chosen, known, tell))
            case "tsp":
                made = tsp.reproduce(out, chosen, tell, data=data, clock_seconds=clock_seconds)
            case _:
                made = module.reproduce(out, chosen, tell)
        drawn = list(_shown(made, work, expected))
        code = 0 if paper != "tsp" or figures else _write_page(out, drawn, tell)
    note(f"JSON and plots are in {out}")
    raise SystemExit(code)


def _shown(made: Iterator[Any], work: Work, expected: Sequence[float]) -> Iterator[Any]:
    """Yields figures as they are made, and prints the summary of each."""
    done = 0.0
    while (figure := run_aside(lambda: next(made, None))) is not None:
        name = figure.name if not figure.name[:1].isdigit() else f"Figure {figure.name}"
        results().print(f"{name}, simulated: {figure.summary}")
        yield figure
        done += 1
        work.update(sum(expected[: int(done)]) / max(sum(expected), 1e-9), 1.0)


def _write_page(out: Path, drawn: Sequence[Any], tell: Callable[[str], None]) -> int:
    """Writes the page of all numbers; returns 1 if a required row (kind A) fails, else 0."""
    from fairway.studies.reproduce import tsp

    rows = run_aside(lambda: tsp.write_page(out, list(drawn), tell))
    must = [row for row in rows if row.kind == "A"]
    holds = sum(row.holds for row in must)
    results().print(f"{holds} of {len(must)} rows that must hold do; all are in {out / 'tsp.md'}")
    return 1 if holds < len(must) else 0


def _cost(given: str) -> tuple[str, int]:
    name, _, value = given.partition("=")
    if not value.isdigit():
        raise ConfigError(f"cannot read the cost {given!r}; expected NAME=NANOSECONDS")
    return name, int(value)
