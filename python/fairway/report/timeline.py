"""A run as a Chrome/Perfetto timeline, and its summary as a table.

Open the file at https://ui.perfetto.dev or chrome://tracing. Each host is a process; each of its
devices and each channel to another host is a track.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

__all__ = ["Timeline", "write_events"]

CONTROLLER = 2**32 - 1
CHANNEL_TRACK = 1000
"""Tracks of channels are numbered from here, tracks of devices from 0."""


def write_events(path: Path, events: list[dict[str, Any]], unit: Literal["ms", "ns"]) -> None:
    """Writes trace events, whose times are in microseconds and shown in this unit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": unit}))


@dataclasses.dataclass
class DeviceUse:
    """How one device was used.

    Attributes:
        busy_ns: time in computations.
        runs: computations.
        dispatch_ns: time that the host spent handing them over.
    """

    busy_ns: int = 0
    runs: int = 0
    dispatch_ns: int = 0


@dataclasses.dataclass
class ChannelUse:
    """What moved on one channel.

    Attributes:
        size: bytes.
        moves: messages.
        busy_ns: time in which a message was under way, overlaps counted each.
    """

    size: int = 0
    moves: int = 0
    busy_ns: int = 0


class Timeline:
    """The records of all hosts of a run.

    Args:
        records: for each host its island, its rank there and its file of records.
    """

    def __init__(self, records: dict[int, tuple[int, int, Path]]) -> None:
        self._hosts = {host: (island, rank) for host, (island, rank, _) in records.items()}
        self._records = {host: _read(path) for host, (_, _, path) in records.items()}
        times = [record[1] for found in self._records.values() for record in found]
        ends = [record[2] for found in self._records.values() for record in found]
        self._begin_ns = min(times, default=0)
        self.span_ns = max(ends, default=0) - self._begin_ns
        """From the first start to the last end."""

    def write(self, path: Path) -> None:
        """Writes the timeline as trace-event JSON."""
        events: list[dict[str, Any]] = []
        for host, (island, rank) in self._hosts.items():
            events += self._names(host, f"island {island} host {rank}")
            events += [
                event for record in self._records[host] for event in self._event(host, record)
            ]
        write_events(path, events, "ms")

    def summary(self) -> list[Table]:
        """Tables of device use and of channels."""
        devices, channels = self._uses()
        span_s = max(self.span_ns, 1) / 1e9
        use = Table("device", "busy", "computations", "dispatch", title="Devices")
        for (host, device), used in sorted(devices.items()):
            island, rank = self._hosts[host]
            use.add_row(
                f"island {island} host {rank} device {device}",
                f"{used.busy_ns / 1e7 / span_s:.1f} %",
                f"{used.runs:,}",
                f"{used.dispatch_ns / 1e3 / max(used.runs, 1):.1f} us each",
            )
        moved = Table("from", "to", "moved", "messages", "rate", title="Channels")
        for (source, target, number), channel in sorted(channels.items()):
            moved.add_row(
                self._name(source),
                f"{self._name(target)}{_by(number)}",
                f"{channel.size / 2**20:.1f} MiB",
                f"{channel.moves:,}",
                f"{channel.size / 1e3 / max(channel.busy_ns / 1e3, 1):.2f} GB/s",
            )
        return [use, moved]

    def _uses(
        self,
    ) -> tuple[dict[tuple[int, int], DeviceUse], dict[tuple[int, int, int], ChannelUse]]:
        devices: dict[tuple[int, int], DeviceUse] = defaultdict(DeviceUse)
        channels: dict[tuple[int, int, int], ChannelUse] = defaultdict(ChannelUse)
        for host, records in self._records.items():
            for kind, start, end, *rest in records:
                if kind == "run":
                    dispatch, used, _, _ = rest
                    for device in used:
                        use = devices[host, device]
                        use.busy_ns += end - start
                        use.runs += 1
                        use.dispatch_ns += dispatch
                elif rest[2] == "out":
                    channel = channels[host, rest[0], rest[3]]
                    channel.size += rest[1]
                    channel.moves += 1
                    channel.busy_ns += end - start
        return devices, channels

    def _name(self, host: int) -> str:
        if host == CONTROLLER:
            return "controller"
        island, rank = self._hosts[host]
        return f"island {island} host {rank}"

    def _names(self, host: int, name: str) -> list[dict[str, Any]]:
        events = [{"ph": "M", "name": "process_name", "pid": host, "args": {"name": name}}]
        devices = {d for r in self._records[host] if r[0] == "run" for d in r[4]}
        ways = {(record[3], record[6]) for record in self._records[host] if record[0] == "move"}
        tracks = {device: f"device {device}" for device in devices}
        tracks |= {
            _track(peer, number): f"channel with {self._name(peer)}{_by(number)}"
            for peer, number in ways
        }
        events += [
            {"ph": "M", "name": "thread_name", "pid": host, "tid": track, "args": {"name": name}}
            for track, name in sorted(tracks.items())
        ]
        return events

    def _event(self, host: int, record: list[Any]) -> list[dict[str, Any]]:
        kind, start, end, *rest = record
        common = {
            "ph": "X",
            "pid": host,
            "ts": (start - self._begin_ns) / 1e3,
            "dur": (end - start) / 1e3,
        }
        if kind == "run":
            _, devices, name, client = rest
            return [
                {**common, "name": name, "tid": device, "args": {"client": client}}
                for device in devices
            ]
        peer, size, direction, number = rest
        name = f"{'to' if direction == 'out' else 'from'} {self._name(peer)}{_by(number)}"
        return [{**common, "name": name, "tid": _track(peer, number), "args": {"bytes": size}}]


def _by(channel: int) -> str:
    """How a channel of a host's own is named; 0 is none in particular."""
    return f" by channel {channel}" if channel else ""


def _track(peer: int, channel: int) -> int:
    return CHANNEL_TRACK * (1 + 10 * channel) + (999 if peer == CONTROLLER else peer)


def _read(path: Path) -> list[list[Any]]:
    """The whole records of a file; a host that was killed may have left half a line."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]
