"""``fairway simulate``: a workload on a modelled (hypothetical) fabric, planned and run.

Source: the multi-TSP system §4-5.
"""

from __future__ import annotations

import dataclasses
import math
import re
import reprlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fairway import _native
from fairway.analysis.topologies import read_routed
from fairway.errors import ConfigError, RouteError
from fairway.execution import ExecutionOptions
from fairway.placement import NAMES
from fairway.placement.simulating import is_step, simulate_step
from fairway.quantities import parse_size
from fairway.report.carried import CarriedStep
from fairway.report.plots import drawing, save
from fairway.report.timeline import write_events
from fairway.studies.workloads import COLLECTIVES, WORKLOADS
from fairway.studies.workloads.bert import BERT_LARGE, place_pipeline
from fairway.studies.workloads.chip import CLOCK_HZ, TICKS_PER_CYCLE
from fairway.studies.workloads.cholesky import place_cholesky
from fairway.studies.workloads.collectives import bus_bandwidth, memory_bytes, try_out
from fairway.studies.workloads.matmul import place_product
from fairway.studies.workloads.program import ChipProgram

__all__ = ["UNPLANNED", "Simulated", "simulate"]

TASKS_MAX = 4_000_000
"""Most tasks that are simulated individually; larger plans are only verified."""
MEMORY_MAX = 2 << 30
"""Most bytes of the chips' memories; beyond it vectors carry no data."""
EVENTS_MAX = 200_000
"""Most trains of a timeline file."""

UNPLANNED = ("failover", "uniform")
"""Workloads that have no plan to show."""

Progress = Callable[[float], object]


@dataclasses.dataclass(frozen=True)
class Simulated:
    """The result of simulating a workload.

    Attributes:
        fabric: name of the fabric.
        workload: name of the workload.
        figures: results by name, in display order; times in seconds.
        plan: the schedule; None for workloads without one.
        links: links of the fabric: source, target, bits per second, latency in ns.
        step: the timeline of devices, for a training step.
    """

    fabric: str
    workload: str
    figures: dict[str, Any]
    plan: _native.Plan | None
    links: list[tuple[int, int, float, int]]
    step: CarriedStep | None = None

    def table(self) -> Table:
        """Returns the figures as a table."""
        table = Table(title=f"{self._title()}, simulated", show_header=False)
        for name, value in self.figures.items():
            table.add_row(name, _shown(name, value))
        return table

    def write_timeline(self, path: Path) -> None:
        """Writes a timeline of each link, or of each device, for https://ui.perfetto.dev.

        Of a plan with rotational symmetry only one part's links are shown.

        Raises:
            ConfigError: the workload has no plan.
        """
        if self.step is not None:
            self.step.write_timeline(path)
            return
        plan = self._planned()
        events: list[dict[str, Any]] = []
        tracks: dict[tuple[int, int], int] = {}
        to_us = 1e6 / (TICKS_PER_CYCLE * plan.clock_hz)
        for task, first, count, vertices, starts, pace in plan.trains(EVENTS_MAX):
            for source, target, start in zip(vertices, vertices[1:], starts, strict=False):
                if (source, target) not in tracks:
                    tracks[source, target] = len(tracks)
                    name = {"name": f"{source} to {target}"}
                    place = {"pid": source, "tid": tracks[source, target]}
                    events.append({"ph": "M", "name": "thread_name", "args": name, **place})
                    chip = {"name": f"chip {source}"}
                    events.append({"ph": "M", "name": "process_name", "args": chip, "pid": source})
                events.append(
                    {
                        "ph": "X",
                        "name": f"task {task}",
                        "pid": source,
                        "tid": tracks[source, target],
                        "ts": start * to_us,
                        "dur": count * pace * to_us,
                        "args": {"first vector": first, "vectors": count},
                    }
                )
        write_events(path, events, "ns")

    def draw(self, path: Path) -> None:
        """Draws the utilisation of each link by chip, and of all over time; or that of each device.

        Raises:
            ConfigError: the workload has no plan, or matplotlib is missing.
        """
        if self.step is not None:
            self.step.draw(path, self._title())
            return
        plan = self._planned()
        if not self.links:
            raise ConfigError(f"{self.fabric} has no links to draw")
        pyplot = drawing()
        busy = np.array(plan.busy_ticks()) / max(1, plan.end_ticks)
        chips = max(source for source, *_ in self.links) + 1
        outs: list[list[float]] = [[] for _ in range(chips)]
        for (source, *_), part in zip(self.links, busy, strict=True):
            outs[source].append(float(part))
        width = max(map(len, outs))
        grid = np.array([out + [math.nan] * (width - len(out)) for out in outs])
        canvas, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
        image = left.imshow(grid, aspect="auto", vmin=0, vmax=1, interpolation="nearest")
        left.set(
            xlabel="link of the chip (number)",
            ylabel="chip (number)",
            title="part of the time that links are busy",
        )
        canvas.colorbar(image, label="busy, fraction of the makespan")
        right.plot(*_over_time(plan, self.links))
        right.set(
            xlabel="time, us",
            ylabel="links busy, fraction of all",
            ylim=(0, 1.05),
            title="all links over time",
        )
        canvas.suptitle(f"{self._title()}, simulated", fontsize=10)
        save(canvas, path)

    def _title(self) -> str:
        # Of a file, its name.
        return f"{self.workload.rpartition('/')[2]} on {self.fabric}"

    def _planned(self) -> _native.Plan:
        if self.plan is None:
            raise ConfigError(f"{self.workload} has no schedule to show")
        return self.plan


def simulate(
    fabric: str,
    workload: str,
    *,
    errors: float = 0.0,
    seed: int = 0,
    threads: int = 0,
    progress: Progress | None = None,
) -> Simulated:
    """Plans a workload on a fabric, verifies the plan, and simulates it.

    Args:
        fabric: a name such as ``dragonfly:264``, or a file; or such as ``sip-ring:1024``, on which
            training steps are simulated, see :mod:`fairway.analysis.topologies`.
        workload: such as ``all-reduce:64MiB``; see :data:`WORKLOADS`, and
            :data:`fairway.placement.STEPS`.
        errors: probability of a bit error per vector and link.
        seed: random seed of numbers, errors and traffic.
        threads: number of threads; 0 is one per core.
        progress: called with the part done, from 0 to 1.

    Raises:
        RouteError: the fabric is invalid, or the workload cannot be planned.
        ConfigError: there is no such workload.
    """
    kind, _, argument = workload.partition(":")
    # `allreduce` is accepted for `all-reduce`.
    kind = next(
        (name for name in WORKLOADS if name.replace("-", "") == kind.replace("-", "")), kind
    )
    if is_step(workload):
        step = simulate_step(fabric, workload)
        return Simulated(fabric, workload, step.figures, None, [], step)
    if kind not in WORKLOADS or not argument:
        raise ConfigError(_no_workload(workload))
    known = read_routed(fabric)
    if not 0 <= errors <= 1:
        raise ConfigError(f"the probability of errors is {errors}; expected 0 to 1")
    options = ExecutionOptions(threads=threads, progress=progress)
    if errors:
        options = dataclasses.replace(options, noise=(seed, errors, 1))
    try:
        if kind in COLLECTIVES:
            figures, plan = _collective(
                known, kind, parse_size("the size", argument), seed, options
            )
        elif kind in UNPLANNED and errors:
            raise ConfigError(f"{kind} has no errors to simulate; leave the errors out")
        elif kind == "failover":
            figures, plan = _failover(known, argument), None
        elif kind == "uniform":
            figures, plan = _uniform(known, _count(argument), seed), None
        else:
            figures, plan = _program(known, kind, argument, options)
    except ValueError as error:
        raise RouteError(f"cannot simulate {workload} on {fabric}: {error}") from error
    return Simulated(fabric, workload, figures, plan, known.links())


def _no_workload(workload: str) -> str:
    """Returns the error text for an unknown workload, with those that exist."""
    examples = ", ".join(text.partition(",")[0] for text in WORKLOADS.values())
    found = f"there is no workload {reprlib.repr(workload)}"
    return (
        f"{found}; there are {examples} on packet networks, and on any fabric steps of training: "
        f"{', '.join(f'{name}:1024' for name in NAMES)}, Chakra's traces, graph.fbuf or "
        "program.fw"
    )


def _collective(
    fabric: _native.Fabric, kind: str, size: int, seed: int, options: ExecutionOptions
) -> tuple[dict[str, Any], _native.Plan]:
    begin = time.perf_counter()
    plan = fabric.collective(kind, size)
    figures: dict[str, Any] = {"planned and verified in": time.perf_counter() - begin}
    figures |= _times(plan)
    seconds = figures["takes"]
    if kind == "all-reduce" and seconds:
        bandwidth = bus_bandwidth(size, fabric.endpoints, seconds)
        figures["bus bandwidth of a chip, GB/s"] = bandwidth / 1e9
    if plan.tasks * plan.turns > TASKS_MAX:
        figures["carried out"] = "no: planned and verified alone, it has too many tasks"
        return figures, plan
    begin = time.perf_counter()
    if memory_bytes(plan) * fabric.endpoints > MEMORY_MAX:
        outcome = plan.simulate([], options)
        figures["carried out"] = "with empty vectors: memories would not fit here"
    else:
        outcome = try_out(kind, plan, seed, options)
        right = "results verified"
        figures["carried out"] = right if outcome["right"] else "the result is wrong"
    return figures | _happened(outcome, time.perf_counter() - begin, options), plan


def _program(
    fabric: _native.Fabric, kind: str, argument: str, options: ExecutionOptions
) -> tuple[dict[str, Any], _native.Plan]:
    begin = time.perf_counter()
    chips = fabric.endpoints
    if kind == "matmul":
        extents = argument.split("x")
        if len(extents) != 3:
            raise ConfigError(
                f"cannot read a product from {argument!r}; expected such as 64x128x256"
            )
        rows, inner, columns = map(_count, extents)
        groups = math.gcd(chips, 8)
        program = ChipProgram(fabric, "float16")
        place_product(program, (rows, inner), (inner, columns), groups, chips // groups)
        flops = 2.0 * rows * inner * columns
    elif kind == "cholesky":
        size = _count(argument)
        if size % 320:
            raise ConfigError(f"{size} rows; expected a multiple of 320")
        program = ChipProgram(fabric, "float16")
        place_cholesky(program, size, chips, dtype=np.float16)
        flops = size**3 / 3
    else:
        count = _count(argument)
        if count % chips:
            raise ConfigError(f"{count} encoders on {chips} chips; expected as many on each")
        program = ChipProgram(fabric)
        place_pipeline(program, 2 * chips, count, BERT_LARGE, chips)
        flops = 2.0 * chips * count * BERT_LARGE.flops()
    plan = program.plan()
    figures: dict[str, Any] = {"planned and verified in": time.perf_counter() - begin}
    figures |= _times(plan)
    figures["TFLOP/s of all chips"] = flops / max(figures["takes"], 1e-12) / 1e12
    begin = time.perf_counter()
    outcome = plan.simulate([], options)
    return figures | _happened(outcome, time.perf_counter() - begin, options), plan


def _uniform(fabric: _native.Fabric, count: int, seed: int) -> dict[str, Any]:
    begin = time.perf_counter()
    end, latencies = fabric.uniform_messages(count, 1, 0, "minimal", seed)
    wall = time.perf_counter() - begin
    to_s = 1 / (TICKS_PER_CYCLE * CLOCK_HZ)
    times = np.array(latencies) * to_s
    return {
        "takes": end * to_s,
        "latency, mean": float(times.mean()),
        "latency, 99 of 100 within": float(np.quantile(times, 0.99)),
        "vectors": len(latencies),
        "simulated in": wall,
        "vectors a second of simulating": len(latencies) / wall,
    }


def _failover(fabric: _native.Fabric, argument: str) -> dict[str, Any]:
    dead = [_count(node, 0) for node in argument.split(",")]
    begin = time.perf_counter()
    try:
        attempts, replaced, overhead, right = fabric.survive(dead, False)
    except RuntimeError as error:
        raise RouteError(str(error)) from error
    return {
        "nodes that died": ", ".join(map(str, dead)),
        "nodes that were replaced": ", ".join(map(str, replaced)) or "none: they stood by",
        "runs of the all-reduce": attempts,
        "part of all nodes that stood by": f"{overhead:.2%}",
        "carried out": "results verified" if right else "the result is wrong",
        "simulated in": time.perf_counter() - begin,
    }


def _times(plan: _native.Plan) -> dict[str, Any]:
    to_s = 1 / (TICKS_PER_CYCLE * plan.clock_hz)
    figures: dict[str, Any] = {"takes": plan.end_ticks * to_s}
    figures["what chips and their links allow"] = plan.bound_ticks() * to_s
    figures["tasks"] = plan.tasks * plan.turns
    if plan.turns > 1:
        figures["symmetry factor"] = plan.turns
    busiest = plan.busiest()
    if busiest is not None:
        source, target, busy = busiest
        figures["busiest link"] = f"{source} to {target}, {busy / plan.end_ticks:.1%} of the time"
    return figures


def _happened(outcome: dict[str, Any], wall: float, options: ExecutionOptions) -> dict[str, Any]:
    injects = options.noise is not None
    figures = {"vectors over links": outcome["vectors"], "simulated in": wall}
    figures["vectors a second of simulating"] = outcome["vectors"] / max(wall, 1e-9)
    if outcome["corrected"] or injects:
        figures["vectors corrected"] = outcome["corrected"]
    if outcome["incidents"] or injects:
        figures["vectors lost or damaged"] = len(outcome["incidents"])
    return figures


def _over_time(
    plan: _native.Plan, links: list[tuple[int, int, float, int]], bins: int = 400
) -> tuple[Any, Any]:
    """Returns times in us, and the fraction of all links that is busy then."""
    end = max(1, plan.end_ticks)
    changes = np.zeros(bins + 1)
    for _, _, count, _, starts, pace in plan.trains():
        for start in starts:
            first, last = start * bins / end, (start + count * pace) * bins / end
            # A train fills bins, the first and the last partially.
            for edge, sign in ((first, 1.0), (last, -1.0)):
                place = min(int(edge), bins - 1)
                changes[place] += sign * (place + 1 - edge)
                changes[place + 1] += sign * (edge - place)
    busy = np.cumsum(changes)[:bins] * plan.turns / len(links)
    times = (np.arange(bins) + 0.5) * end / bins / TICKS_PER_CYCLE / plan.clock_hz * 1e6
    return times, busy


def _count(text: str, least: int = 1) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        shown = reprlib.repr(text)
        raise ConfigError(f"cannot read a count from {shown}; expected a number from {least} on")
    return int(text)


def _shown(name: str, value: object) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if "GB/s" in name or "TFLOP" in name or "a second" in name:
        return f"{value:,.1f}"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3f} {unit}"
    return f"{value / 1e-9:.1f} ns"
