"""Trains DLRM on two slow networks, under the plans of eight systems.

Ranks are processes in network namespaces, each with a link to a network of 200 Mbit/s and one to
another of 100. Channels are calibrated first; every system plans every workload with the measured
costs, and with the same choice of segments. Then all train in turn, for several rounds in random
order; the time of a step is compared, and the losses must equal those of one process. Computations
take a set time, as on devices; their results are real.

Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import wires
from common import (
    ROOT,
    SETTINGS_OF_JAX,
    Goal,
    Spread,
    Worker,
    environment_without,
    interleave,
    provenance,
    run_main,
    write_json,
)
from compared import apart, error
from rich.console import Console
from rich.table import Table

from fairway._native import StepPlan
from fairway.cli.consoles import working
from fairway.communication import calibration, files, steps
from fairway.communication.timelines import timelines
from fairway.studies.workloads import dlrm

RATES_BPS = (200_000_000, 100_000_000)
SYSTEMS = 8
"""Number of systems that are compared."""
STEPS = 10
SKIPPED = 3
"""Warm-up steps that do not count."""
LAST = 2
"""Last steps, which do not count either, since there is less concurrent communication."""
LOSS_TOLERANCE = 2e-5
"""Allowed relative deviation of losses from those of one process."""
ORDERS_MAX = 40
"""Summation orders of gradients that one process tries, to see whether these explain larger
deviations, as they do where an activation is within rounding error of zero."""
LIFO, PREFETCH, JOINT, STRIPED = "lifo", "hand+prefetch", "joint", "joint+striping"
GOALS = {
    (JOINT, LIFO): 1.2,
    (JOINT, PREFETCH): 1.1,
    (STRIPED, LIFO): 1.5,
    (STRIPED, PREFETCH): 1.35,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training under one plan.

    Attributes:
        step_s: time of a step.
        idle: fraction of it in which devices were idle.
        loss_error: largest relative deviation of a loss from that of one process.
        busy_s: time of each computation, median over ranks, including other work of the rank.
        reports: of each rank.
    """

    step_s: float
    idle: float
    loss_error: float
    busy_s: dict[str, float]
    reports: Sequence[steps.Report]


class Testbed:
    """Ranks in their namespaces, joined to a team.

    Args:
        stack: ends them.
        ranks: number of ranks.
    """

    def __init__(self, stack: contextlib.ExitStack, ranks: int) -> None:
        self.ranks = ranks
        places = stack.enter_context(wires.joined(ranks, RATES_BPS))
        one_thread = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        environment = {
            **environment_without(*SETTINGS_OF_JAX),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": one_thread,
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        self._workers = []
        for rank, place in enumerate(places):
            channels = [
                f"tcp:{address.replace('{rank}', '0')}:0@{rate}"
                for address, rate in zip(place.addresses, RATES_BPS, strict=True)
            ]
            inside = [word.replace("{rank}", "0") for word in place.prefix]
            command = [*inside, sys.executable, "testbed_worker.py", str(rank), *channels]
            self._workers.append(stack.enter_context(Worker(command, environment)))
        addresses = self._all(do="listen")
        self._all(do="join", addresses=addresses)

    def _all(self, **request: Any) -> list[Any]:
        for worker in self._workers:
            worker.tell(**request)
        return [worker.answer() for worker in self._workers]

    def calibrate(self) -> calibration.Calibration:
        """Calibrates the channels."""
        samples = [calibration.Sample(**sample) for sample in self._all(do="calibrate")[0]]
        return calibration.fit(samples, self.ranks)

    def train(self, workload: str, plan: StepPlan, expected: Sequence[float]) -> Run:
        """Trains a workload under a plan."""
        reports = self._all(do="train", workload=workload, script=plan.script.text, count=STEPS)
        counted = STEPS - SKIPPED - LAST
        took = [
            (report["ends_ns"][-1 - LAST] - report["ends_ns"][SKIPPED - 1]) / counted / 1e9
            for report in reports
        ]
        step_s = statistics.mean(took)
        computed = [
            (end - start) / 1e9
            for report in reports
            for step, _, start, end in report["computed"]
            if SKIPPED <= step < STEPS - LAST
        ]
        busy_s = sum(computed) / counted / self.ranks
        losses = np.sum([report["losses"] for report in reports], 0)
        error = float(np.max(np.abs(losses / np.array(expected) - 1)))
        names = reports[0]["busy_s"]
        profile = {
            name: statistics.median(report["busy_s"][name] for report in reports) for name in names
        }
        known = [field.name for field in dataclasses.fields(steps.Report)]
        timed = [steps.Report(**{name: report[name] for name in known}) for report in reports]
        return Run(step_s, 1 - busy_s / step_s, error, profile, timed)


@dataclasses.dataclass(frozen=True)
class Row:
    """One system on one workload."""

    workload: str
    system: str
    plan: StepPlan
    runs: Sequence[Run]
    allowed: float
    """Allowed relative deviation of losses from those of one process."""
    compared: Mapping[str, Any]
    """What ``fairway compare`` says of the run of the median time."""

    @property
    def step_s(self) -> Spread:
        """Time of a step in each round."""
        return Spread(tuple(run.step_s for run in self.runs))

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.plan.period_ns / 1e9 / self.step_s.median - 1

    def as_json(self) -> dict[str, Any]:
        """Returns all data as JSON."""
        return {
            "workload": self.workload,
            "system": self.system,
            "step_s": self.step_s.as_json(),
            "predicted_s": self.plan.period_ns / 1e9,
            "least_s": self.plan.least_ns / 1e9,
            "idle": statistics.median(run.idle for run in self.runs),
            "loss_error": max(run.loss_error for run in self.runs),
            "loss_error_allowed": self.allowed,
            "compared": self.compared,
            "choices": self.plan.choices,
        }


def measure(
    testbed: Testbed, given: argparse.Namespace
) -> tuple[calibration.Calibration, list[Row]]:
    """Plans and trains all selected workloads."""
    rows = []
    order = random.Random(given.seed)
    total = len(given.workloads) * SYSTEMS * given.rounds
    with working(f"{testbed.ranks} ranks, calibrating") as work:
        done = 0
        found = testbed.calibrate()
        for name in given.workloads:
            config = dlrm.WORKLOADS[name]
            step = config.step(testbed.ranks)
            expected = dlrm.reference_losses(config, testbed.ranks, STEPS)
            first = steps.plan(step, found.costs, evaluations=1)
            work.update(text=f"{testbed.ranks} ranks, {name} compiles")
            testbed.train(name, first["fifo"], expected)
            step = step.profiled(testbed.train(name, first["fifo"], expected).busy_s)
            plans = steps.plan(step, found.costs, seed=given.seed)
            runs: dict[str, list[Run]] = {system: [] for system in plans}

            def turn(
                system: str, runs: dict[str, list[Run]], train: Callable[..., Run], name: str = name
            ) -> float:
                nonlocal done
                runs[system].append(train())
                done += 1
                work.update(done, total, f"{testbed.ranks} ranks, {name} under {system}")
                return runs[system][-1].step_s

            turns = {
                system: functools.partial(
                    turn, system, runs, functools.partial(testbed.train, name, plan, expected)
                )
                for system, plan in plans.items()
            }
            interleave(turns, given.rounds, order)
            worst = max(run.loss_error for each in runs.values() for run in each)
            allowed = by_order(config, testbed.ranks, expected, worst)
            for system, plan in plans.items():
                label = f"testbed-{testbed.ranks}-{name}-{system}"
                compared = compare(label, step, plan, typical(runs[system]))
                rows.append(Row(name, system, plan, runs[system], allowed, compared))
    return found, rows


def typical(runs: Sequence[Run]) -> Run:
    """Returns the run of the median time."""
    return sorted(runs, key=lambda run: run.step_s)[len(runs) // 2]


def compare(label: str, step: steps.Step, plan: StepPlan, run: Run) -> dict[str, Any]:
    """Writes both timelines of a plan, and a picture of them; returns what ``compare`` finds."""
    found = timelines(label, step, plan, run.reports)
    (ROOT / "out").mkdir(exist_ok=True)
    path = ROOT / "out" / f"{label}.step"
    path.write_text(str(found.graph))
    path.with_suffix(".report").write_text(str(found.measured))
    predicted = path.with_suffix(".predicted.report")
    predicted.write_text(str(found.predicted))
    words = ["compare", str(path), "--predicted", str(predicted)]
    command = [sys.executable, "-m", "fairway", *words, "--json"]
    plot = ["--plot", str(path.with_suffix(".png"))]
    shown = subprocess.run([*command, *plot], stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(shown.stdout)
    return figures


def by_order(config: dlrm.Config, ranks: int, expected: Sequence[float], error: float) -> float:
    """Returns the allowed deviation of losses: that of other summation orders in one process."""
    allowed = LOSS_TOLERANCE
    for seed in range(ORDERS_MAX):
        if error <= allowed:
            break
        other = dlrm.reference_losses(config, ranks, len(expected), seed)
        allowed = max(allowed, float(np.max(np.abs(np.array(other) / np.array(expected) - 1))))
    return allowed


def gains(rows: Sequence[Row]) -> dict[tuple[str, str], Spread]:
    """Returns speed-ups: the geometric mean over workloads of each round."""
    by = {(row.workload, row.system): row.step_s.values for row in rows}
    workloads = dict.fromkeys(row.workload for row in rows)
    found = {}
    for system, other in GOALS:
        rounds = [
            statistics.geometric_mean(
                theirs / ours
                for name in workloads
                for ours, theirs in [(by[name, system][number], by[name, other][number])]
            )
            for number in range(len(by[next(iter(workloads)), system]))
        ]
        found[system, other] = Spread(tuple(rounds))
    return found


def show(ranks: int, found: calibration.Calibration, rows: Sequence[Row]) -> None:
    """Prints the tables."""
    console = Console(width=150 if not sys.stdout.isatty() else None)
    costs = ", ".join(
        f"{cost.rate_bps / 1e6:.1f} Mbit/s, {cost.latency_ns // 1000} us, incast {cost.incast:.1%}"
        for cost in found.costs
    )
    console.print(
        f"{ranks} ranks; channels: {costs}; motifs alone are predicted with an error of "
        f"{found.error_median:.1%} in the median, {found.error_worst:.1%} at worst"
    )
    table = Table(title=f"{ranks} ranks: seconds of a step, median \\[lowest..highest] of rounds")
    for name in (
        "workload",
        "system",
        "measured",
        "predicted",
        "error",
        "steps",
        "nodes",
        "idle",
        "losses",
    ):
        table.add_column(name)
    last = ""
    for row in rows:
        if last not in ("", row.workload):
            table.add_section()
        losses = max(run.loss_error for run in row.runs)
        table.add_row(
            row.workload if row.workload != last else "",
            row.system,
            row.step_s.show(".3f"),
            f"{row.plan.period_ns / 1e9:.3f}",
            f"{row.error:+.1%}",
            f"{error(row.compared['step']):+.1%}",
            f"{apart(row.compared):.1%}",
            f"{statistics.median(run.idle for run in row.runs):.0%}",
            f"{'[green]same[/]' if losses <= row.allowed else '[red]differ[/]'} {losses:.0e}",
        )
        last = row.workload
    console.print(table)
    least = {row.workload: f"{row.plan.least_ns / 1e9:.3f} s" for row in rows}
    console.print("no plan takes less, as channels were measured: ", least)
    for (system, other), gain in gains(rows).items():
        goal = Goal(GOALS[system, other], f"{system} over {other}, geometric mean")
        console.print(f"{system} over {other}: {gain.show()} {goal.verdict(gain.median)}")
    show_errors(console, rows)


def show_errors(console: Console, rows: Sequence[Row]) -> None:
    """Prints how far predictions are from what was measured."""
    errors = [abs(row.error) for row in rows]
    console.print(
        f"predicted against measured: mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}"
    )
    compared = [abs(error(row.compared["step"])) for row in rows]
    nodes = statistics.median(apart(row.compared) for row in rows)
    console.print(
        f"by fairway compare, steps of one run of each: mean {statistics.mean(compared):.1%}, "
        f"worst {max(compared):.1%}; nodes differ by {nodes:.1%} of their time in the median; "
        "pictures are in out/"
    )
    for row in rows:
        if row.system == JOINT:
            others = [o for o in rows if o.workload == row.workload and o.system != STRIPED]
            best = min(other.step_s.median for other in others)
            console.print(
                f"{row.workload}: joint takes {row.step_s.median / best:.3f} of the fastest"
            )


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="hosts of each team")
    parser.add_argument(
        "--workloads", nargs="+", choices=list(dlrm.WORKLOADS), default=list(dlrm.WORKLOADS)
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each system")
    parser.add_argument(
        "--seed", type=int, default=0, help="of searches, and of the order of turns"
    )
    return parser.parse_args()


def main() -> None:
    """Measures, prints and writes ``out/testbed.json``."""
    given = arguments()
    if not wires.can_join():
        raise SystemExit("the testbed needs root, and ip and tc of iproute2, to make namespaces")
    report: dict[str, Any] = provenance(given.seed, "jax", "jaxlib", "numpy")
    for ranks in given.ranks:
        with contextlib.ExitStack() as stack:
            found, rows = measure(Testbed(stack, ranks), given)
        show(ranks, found, rows)
        (ROOT / "out").mkdir(exist_ok=True)
        files.write_costs(ROOT / "out" / f"testbed-{ranks}-costs.json", found.costs)
        report[f"{ranks} ranks"] = {
            "calibration": dataclasses.asdict(found),
            "rows": [row.as_json() for row in rows],
            "gains": {f"{a} over {b}": gain.as_json() for (a, b), gain in gains(rows).items()},
        }
    write_json("testbed.json", report)


if __name__ == "__main__":
    run_main(main)
