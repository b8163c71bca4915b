"""Several jobs on one fabric: which jobs wait, for how long, and why (gang scheduling).

A job needs devices of its own; on a ring they are adjacent, and its step takes as long as on an
open segment of fibre of that length. A step is simulated once for each model, batch and number of
devices.

Source: SiP-ML §3.3 (several jobs).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fairway import _native
from fairway.analysis.topologies import read_topology
from fairway.errors import CapacityError, PlacementError
from fairway.placement.models import MODELS, SAMPLES, V100
from fairway.placement.search import SearchBounds, search_strategies
from fairway.report.plots import drawing, save

__all__ = ["Job", "Sharing", "draw", "random_jobs", "read_jobs", "share", "step_times"]

BATCHES = {"resnet50": 256, "transformer": 64, "megatron": 32}
"""Samples per device and step, for random jobs."""
STEPS = 1000
"""Median steps of a random job (log-normal); 14 % take more than three times as many."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        arrives_s: arrival time.
        devices: number of devices that it needs.
        model: one of :data:`fairway.placement.models.MODELS`.
        batch: samples of a step.
        steps: length of the job.
    """

    arrives_s: float
    devices: int
    model: str
    batch: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Schedule of all jobs under one allocation policy.

    Attributes:
        policy: name of the policy.
        times_s: start and end of each job.
        waits_s: queueing time of each job.
        stays: job, first device, number of devices, start, end.
        moves: number of migrations.
        apart_s: how long the head of the queue waited although enough devices were free
            (fragmentation).
        used: device utilisation until the last job ends, as a fraction.
    """

    policy: str
    times_s: Sequence[tuple[float, float]]
    waits_s: Sequence[float]
    stays: Sequence[tuple[int, int, int, float, float]]
    moves: int
    apart_s: float
    used: float

    @property
    def end_s(self) -> float:
        """The makespan."""
        return max((end for _, end in self.times_s), default=0.0)


def read_jobs(path: Path) -> list[Job]:
    """Reads jobs from lines of arrival in seconds, devices, model, batch, steps.

    Raises:
        PlacementError: a line is malformed (says which), or there are no jobs.
    """
    jobs = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = [word.strip() for word in line.partition("#")[0].split(",")]
        if words == [""]:
            continue
        counts = [int(w) for w in (words[1:2] + words[3:]) if re.fullmatch(r"[1-9]\d{0,11}", w)]
        arrives = words[0] if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", words[0]) else ""
        if len(words) != 5 or len(counts) != 3 or not arrives or words[2] not in MODELS:
            raise PlacementError(
                f"line {number} of {path} is {line[:80]!r}; expected seconds, devices, one of "
                f"{', '.join(MODELS)}, batch and steps"
            )
        jobs.append(Job(float(arrives), counts[0], words[2], counts[1], counts[2]))
    if not jobs:
        raise PlacementError(f"{path} has no jobs")
    return sorted(jobs, key=lambda job: job.arrives_s)


def random_jobs(
    count: int, devices: int, load: float, seed: int, step_s: Callable[[Job], float]
) -> list[Job]:
    """Generates jobs that offer a given load to a number of devices; deterministic for a seed.

    Sizes are powers of two up to a quarter of all devices, each half as likely as the one before;
    steps are log-normal; arrivals are a Poisson process. A job's model is drawn among those that
    fit.
    """
    drawn = random.Random(seed)
    sizes = [2**power for power in range(max(1, int(math.log2(max(devices // 4, 1))) + 1))]
    jobs = []
    for _ in range(count):
        size = drawn.choices(sizes, [1 / one for one in sizes])[0]
        steps = max(1, round(STEPS * math.exp(drawn.gauss(0, 1))))
        # The smallest model fits on one device.
        for model in (*drawn.sample(list(MODELS), len(MODELS) - 1), "resnet50"):
            job = Job(0.0, size, model, BATCHES[model] * size, steps)
            with contextlib.suppress(CapacityError):
                step_s(job)
                break
        jobs.append(job)
    work = sum(job.devices * job.steps * step_s(job) for job in jobs)
    between_s = work / count / devices / load
    now, arriving = 0.0, []
    for job in jobs:
        arriving.append(dataclasses.replace(job, arrives_s=now))
        now += drawn.expovariate(1 / between_s)
    return arriving


def step_times(
    fabric: str, progress: Callable[[str], object] | None = None
) -> Callable[[Job], float]:
    """Returns a function that predicts a job's step time, simulated once for each kind of job.

    Args:
        fabric: as in :func:`fairway.analysis.topologies.read_topology`.
        progress: called with a description of each kind before it is simulated.
    """
    name, _, options = fabric.partition(",")
    kind, _, every = name.partition(":")
    known: dict[tuple[str, int, int], float | CapacityError] = {}

    def simulated(job: Job) -> float | CapacityError:
        text = f"{kind}:{job.devices}" + (f",{options}" if options else "")
        if kind == "sip-ring" and str(job.devices) != every:
            text += f",cut={job.devices - 1}"
        graph = MODELS[job.model]().graph(V100, SAMPLES)
        points = [(job.batch, 1)]
        try:
            interconnect, bounds = read_topology(text).interconnect, SearchBounds(V100.memory_bytes)
            return search_strategies(graph, interconnect, points, bounds)[0].step_s
        except CapacityError as error:
            return CapacityError(f"{job.model} does not fit on {job.devices} devices: {error}")

    def step_s(job: Job) -> float:
        key = job.model, job.batch, job.devices
        if key not in known:
            if progress is not None:
                progress(f"a step of {job.model} on {job.devices} devices of {fabric}")
            known[key] = simulated(job)  # also caches that it does not fit
        found = known[key]
        if isinstance(found, CapacityError):
            raise found
        return found

    return step_s


def share(
    fabric: str, jobs: Sequence[Job], step_s: Callable[[Job], float], delay_ns: int
) -> Iterator[Sharing]:
    """Schedules jobs with each allocation policy of a fabric: adjacent devices, or any.

    On a ring the devices of a job are adjacent; an optical switch that migrates a job to other
    places takes ``delay_ns`` to do so, for which the job stalls.

    Args:
        fabric: shared by all jobs.
        jobs: in the order of their arrival.
        step_s: predicts a job's step time.
        delay_ns: reconfiguration delay of the switch.

    Raises:
        PlacementError: a job needs more devices than there are.
    """
    devices = read_topology(fabric).interconnect.devices
    is_ring = fabric.startswith("sip-ring:")
    asked = [
        (round(1e9 * job.arrives_s), job.devices, round(1e9 * job.steps * step_s(job)))
        for job in jobs
    ]
    policies: dict[str, tuple[bool, int | None]] = {"any devices": (False, None)}
    if is_ring:
        policies = {"neighbours": (True, None), "neighbours, by a switch": (True, delay_ns)}
    for policy, given in policies.items():
        try:
            times, stays, moves, apart = _native.share_devices(devices, asked, *given)
        except ValueError as error:
            raise PlacementError(f"the jobs cannot share {fabric}: {error}") from None
        held = sum(count * (to - begin) for _, _, count, begin, to in stays)
        end = max((to for _, to in times), default=0)
        yield Sharing(
            policy,
            [(begin / 1e9, to / 1e9) for begin, to in times],
            [(begin - at) / 1e9 for (begin, _), (at, _, _) in zip(times, asked, strict=True)],
            [(job, first, count, a / 1e9, b / 1e9) for job, first, count, a, b in stays],
            moves,
            apart / 1e9,
            held / max(devices * end, 1),
        )


def draw(path: Path, title: str, devices: int, sharings: Sequence[Sharing]) -> None:
    """Draws which job each device had over time, as a picture with a title."""
    plot: Any = drawing()
    figure, panels = plot.subplots(
        len(sharings), 1, figsize=(11, 3.2 * len(sharings)), sharex=True, squeeze=False
    )
    colours = plot.get_cmap("tab20").colors
    for panel, sharing in zip(panels[:, 0], sharings, strict=True):
        for job, first, count, begin, end in sharing.stays:
            # An allocation that wraps around the ring is drawn in two parts.
            for low, high in ((first, min(first + count, devices)), (0, first + count - devices)):
                if high > low:
                    panel.broken_barh(
                        [(begin, end - begin)], (low, high - low), color=colours[job % 20]
                    )
        panel.set(
            title=f"{sharing.policy}: {100 * sharing.used:.0f} % used, {sharing.moves} moves",
            ylabel="device",
            ylim=(0, devices),
        )
    panels[-1, 0].set(xlabel="time, s")
    subtitle = "each colour is a job (20 colours, used again); white: idle devices"
    figure.suptitle(f"{title}\n{subtitle}", fontsize=10)
    figure.tight_layout()
    save(figure, path, dpi=100)
