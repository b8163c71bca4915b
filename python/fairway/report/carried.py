"""A step that was carried out on an interconnect, as a timeline and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fairway.placement.graphs import Tasks
from fairway.report.plots import drawing, save
from fairway.report.timeline import write_events

__all__ = ["CarriedStep"]

DEVICES_MAX = 64
"""Most devices of a picture."""
EVENTS_MAX = 200_000
"""Most tasks of a timeline file, the first ones."""
COMPUTES, SENDS = 0, 1
COLLECTIVES = -1


@dataclasses.dataclass(frozen=True)
class CarriedStep:
    """What each device did when.

    Attributes:
        figures: by name, in the order in which they are shown; times in seconds.
        tasks: of the part that stands for all devices.
        times_s: when each began, and when it was over.
    """

    figures: dict[str, float | int | str]
    tasks: Tasks
    times_s: Sequence[tuple[float, float]]

    def write_timeline(self, path: Path) -> None:
        """Writes what devices compute and send when, for https://ui.perfetto.dev."""
        events = [
            {"ph": "M", "name": "process_name", "pid": COLLECTIVES, "args": {"name": "collectives"}}
        ]
        seen: set[tuple[int, int]] = set()
        for number, (job, begin, end) in enumerate(self._spans()):
            if number == EVENTS_MAX:
                break
            place, track, name = _named(job)
            if (place, track) not in seen:
                seen.add((place, track))
                events += _labels(place, track)
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "pid": place,
                    "tid": track,
                    "ts": 1e6 * begin,
                    "dur": 1e6 * (end - begin),
                    "args": {"task": number},
                }
            )
        write_events(path, events, "ns")

    def draw(self, path: Path, title: str) -> None:
        """Draws when devices compute, and how much is in transfer meanwhile.

        Raises:
            ConfigError: matplotlib is missing.
        """
        pyplot: Any = drawing()
        busy: dict[int, list[tuple[float, float]]] = {}
        changes: list[tuple[float, float]] = []
        for job, begin, end in self._spans():
            if _is_computed(job):
                busy.setdefault(job[0], []).append((1e3 * begin, 1e3 * (end - begin)))
            else:
                size = float(job[1] if isinstance(job[0], list) else job[2])
                changes += [(1e3 * begin, size), (1e3 * end, -size)]
        canvas, (above, below) = pyplot.subplots(
            2, 1, figsize=(10, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
        )
        alike: dict[tuple[tuple[float, float], ...], list[int]] = {}
        for device in sorted(busy):
            alike.setdefault(tuple(busy[device]), []).append(device)
        rows = list(alike.items())[:DEVICES_MAX]
        for row, (spans, _) in enumerate(rows):
            above.broken_barh(spans, (row - 0.4, 0.8), linewidth=0)
        if len(rows) < DEVICES_MAX / 2:
            above.set_yticks(range(len(rows)), [_ranges(devices) for _, devices in rows])
        same = "devices that do the same share a row" if len(alike) < len(busy) else ""
        above.set(ylabel="device", title=f"{title}, simulated{same and f'; {same}'}")
        above.set_ylim(len(rows) - 0.4, -0.6)
        times, sizes, total = [0.0], [0.0], 0.0
        for moment, change in sorted(changes):
            total += change
            times.append(moment)
            sizes.append(total / 2**20)
        below.fill_between(times, sizes, step="post", alpha=0.6)
        below.set(xlabel="ms", ylabel="MiB in transfer")
        save(canvas, path)

    def _spans(self) -> Iterator[tuple[tuple[Any, ...], float, float]]:
        for (job, _), (begin, end) in zip(self.tasks, self.times_s, strict=True):
            yield job, begin, end


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in ascending order, as ``0-3, 8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(shown if len(shown) <= 4 else [*shown[:3], f"... {shown[-1]}"])


def _is_computed(job: tuple[Any, ...]) -> bool:
    return len(job) == 2 and not isinstance(job[0], list)


def _named(job: tuple[Any, ...]) -> tuple[int, int, str]:
    """Where a task is shown, and as what."""
    if _is_computed(job):
        return job[0], COMPUTES, "computes"
    if isinstance(job[0], list):
        kind = str(job[2]) if len(job) > 2 else "all_reduce"
        return COLLECTIVES, job[0][0], f"{kind}, {job[1] / 2**20:.3g} MiB, of {len(job[0])}"
    return job[0], SENDS, f"{job[2] / 2**20:.3g} MiB to {job[1]}"


def _labels(place: int, track: int) -> list[dict[str, Any]]:
    if place == COLLECTIVES:
        names = [("thread_name", f"from device {track} on")]
    else:
        does = "computes" if track == COMPUTES else "sends"
        names = [("process_name", f"device {place}"), ("thread_name", does)]
    return [
        {"ph": "M", "name": what, "pid": place, "tid": track, "args": {"name": name}}
        for what, name in names
    ]
