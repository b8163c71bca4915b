"""A step simulated on an interconnect, as a timeline and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fairway import _native
from fairway.report.plots import drawing, save
from fairway.report.timeline import write_events

__all__ = ["CarriedStep"]

DEVICES_MAX = 64
"""Most rows of devices in a picture."""
EVENTS_MAX = 200_000
"""Most tasks of a timeline file: the first ones are kept."""
COMPUTES, SENDS = 0, 1
COLLECTIVES = -1


@dataclasses.dataclass(frozen=True)
class CarriedStep:
    """Timeline of each device.

    Attributes:
        figures: metrics by name, in display order; times in seconds.
        graph: the step, of the part that stands for all devices.
        times_s: start and end of each node.
    """

    figures: dict[str, float | int | str]
    graph: _native.StepGraph
    times_s: Sequence[tuple[float, float]]

    def write_timeline(self, path: Path) -> None:
        """Writes compute and communication of devices as a trace for https://ui.perfetto.dev."""
        events = [
            {"ph": "M", "name": "process_name", "pid": COLLECTIVES, "args": {"name": "collectives"}}
        ]
        seen: set[tuple[int, int]] = set()
        for number, (node, begin, end) in enumerate(self._spans()):
            if number == EVENTS_MAX:
                break
            for place, track, name in _named(node):
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
        """Draws when devices compute, and the bytes in transfer over time.

        Raises:
            ConfigError: matplotlib is missing.
        """
        pyplot: Any = drawing()
        busy: dict[int, list[tuple[float, float]]] = {}
        changes: list[tuple[float, float]] = []
        for node, begin, end in self._spans():
            if node.kind == "compute":
                for device in node.devices:
                    busy.setdefault(device, []).append((1e3 * begin, 1e3 * (end - begin)))
            else:
                changes += [(1e3 * begin, float(node.size)), (1e3 * end, -float(node.size))]
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

    def _spans(self) -> Iterator[tuple[_native.StepNode, float, float]]:
        for node, (begin, end) in zip(self.graph.nodes, self.times_s, strict=True):
            yield node, begin, end


def _ranges(numbers: Sequence[int]) -> str:
    """Formats ascending numbers as ranges, such as ``0-3, 8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(shown if len(shown) <= 4 else [*shown[:3], f"... {shown[-1]}"])


def _named(node: _native.StepNode) -> Iterator[tuple[int, int, str]]:
    """Yields the process, track and label under which a node is shown."""
    name = node.name and f"{node.name}: "
    devices = node.devices
    if node.kind == "compute":
        for device in devices:
            yield device, COMPUTES, node.name or "computes"
    elif node.kind == "transfer":
        yield devices[0], SENDS, f"{name}{node.size / 2**20:.3g} MiB to {devices[1]}"
    elif devices:
        text = f"{name}{node.kind}, {node.size / 2**20:.3g} MiB, of {len(devices)}"
        yield COLLECTIVES, devices[0], text


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
