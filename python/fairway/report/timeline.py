"""Exports a run as a Chrome/Perfetto trace, and summarizes it as tables.

Open the file at https://ui.perfetto.dev or chrome://tracing. Each host is a process: its devices,
its compilations, and each channel to another host are tracks, flow arrows connect sends with
receives, and launches queued for their inputs or their device are shown beside. Each client is a
process, with a track for each host that computes for it. The controller is a process with counters:
memory of hosts and clients, launches queued and in flight.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

__all__ = ["Samples", "Timeline", "write_events"]

CONTROLLER = 2**32 - 1
CLIENT = 1 << 20
"""Process ids of clients start here, those of hosts at 0."""
COMPILE_TRACK = 900
CHANNEL_TRACK = 1000
"""Track ids of channels start here, those of devices at 0."""


def write_events(path: Path, events: list[dict[str, Any]], unit: Literal["ms", "ns"]) -> None:
    """Writes trace events, with times in microseconds, to be displayed in ``unit``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": unit}))


SAMPLE_EVERY_S = 0.05
SAMPLES_MAX = 1 << 12
"""Samples after which every other one is dropped, and the sampling interval doubles."""


class Samples:
    """Samples the controller's metrics periodically, until it is closed.

    Args:
        overview: returns the metrics.
    """

    def __init__(self, overview: Callable[[], dict[str, Any]]) -> None:
        self.found: list[tuple[int, dict[str, Any]]] = []
        self._overview = overview
        self._every_s = SAMPLE_EVERY_S
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._take, name="fairway-samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops sampling."""
        self._closing.set()
        self._thread.join(1.0)

    def _take(self) -> None:
        while not self._closing.wait(self._every_s):
            self.found.append((time.monotonic_ns(), self._overview()))
            if len(self.found) >= SAMPLES_MAX:
                del self.found[1::2]
                self._every_s *= 2


@dataclasses.dataclass
class DeviceUse:
    """Utilisation of one device.

    Attributes:
        busy_ns: time in computations.
        runs: number of computations.
        dispatch_ns: host time to dispatch them.
    """

    busy_ns: int = 0
    runs: int = 0
    dispatch_ns: int = 0


@dataclasses.dataclass
class ChannelUse:
    """Traffic of one channel.

    Attributes:
        size: bytes sent.
        moves: messages sent.
        busy_ns: total time of messages in flight; concurrent ones count each.
    """

    size: int = 0
    moves: int = 0
    busy_ns: int = 0


class Timeline:
    """The records of all hosts of a run.

    Args:
        records: for each host its island, its rank there and its file of records.
        samples: time and controller metrics of each sample.
    """

    def __init__(
        self,
        records: dict[int, tuple[int, int, Path]],
        samples: Sequence[tuple[int, dict[str, Any]]] = (),
    ) -> None:
        self._samples = samples
        self._ids = 0
        self._hosts = {host: (island, rank) for host, (island, rank, _) in records.items()}
        self.records = {host: _read(path) for host, (_, _, path) in records.items()}
        times = [record[1] for found in self.records.values() for record in found]
        ends = [record[2] for found in self.records.values() for record in found]
        self._begin_ns = min(times, default=0)
        self.span_ns = max(ends, default=0) - self._begin_ns
        """Time from the first start to the last end."""

    def write(self, path: Path) -> None:
        """Writes the timeline as trace-event JSON."""
        events: list[dict[str, Any]] = []
        for host, (island, rank) in self._hosts.items():
            events += self._names(host, f"island {island} host {rank}")
            events += [
                event for record in self.records[host] for event in self._event(host, record)
            ]
        write_events(path, [*events, *self._clients(), *self._flows(), *self._counters()], "ms")

    def summary(self) -> list[Table]:
        """Returns tables of device utilisation and channel traffic."""
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
        for host, records in self.records.items():
            for kind, start, end, *rest in records:
                if kind == "run":
                    dispatch, used, *_ = rest
                    for device in used:
                        use = devices[host, device]
                        use.busy_ns += end - start
                        use.runs += 1
                        use.dispatch_ns += dispatch
                elif kind == "move" and rest[2] == "out":
                    channel = channels[host, rest[0], rest[3]]
                    channel.size += rest[1]
                    channel.moves += 1
                    channel.busy_ns += end - start
        return devices, channels

    def _name(self, host: int) -> str:
        if host == CONTROLLER:
            return "controller"
        if host not in self._hosts:  # what hosts of other machines say of peers is not checked
            return f"host {host}"
        island, rank = self._hosts[host]
        return f"island {island} host {rank}"

    def _names(self, host: int, name: str) -> list[dict[str, Any]]:
        events = [{"ph": "M", "name": "process_name", "pid": host, "args": {"name": name}}]
        devices = {d for r in self.records[host] if r[0] == "run" for d in r[4]}
        channels = {
            (record[3], record[6], record[5])
            for record in self.records[host]
            if record[0] == "move"
        }
        tracks = {device: f"device {device}" for device in devices}
        if any(record[0] == "compile" for record in self.records[host]):
            tracks[COMPILE_TRACK] = "compilations"
        tracks |= {
            _track(peer, number, direction): f"{direction}: {self._name(peer)}{_by(number)}"
            for peer, number, direction in channels
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
            "ts": self._us(start),
            "dur": (end - start) / 1e3,
        }
        if kind == "run":
            dispatch, devices, name, client, arrived, *_ = rest
            known = {"client": client, "dispatch_us": dispatch / 1e3}
            known["queued_us"] = (start - arrived) / 1e3
            runs = [{**common, "name": name, "tid": device, "args": known} for device in devices]
            # Async events: waits of several launches overlap, as slices of one track cannot.
            queue = {"cat": "queue", "pid": host, "id": self._next_id(), "name": f"queued: {name}"}
            waits = [
                {**queue, "ph": "b", "ts": self._us(arrived), "args": {"client": client}},
                {**queue, "ph": "e", "ts": common["ts"]},
            ]
            return [*runs, *(waits if start > arrived else [])]
        if kind == "compile":
            name, how = rest
            span = {"cat": "compile", "pid": host, "tid": COMPILE_TRACK, "id": self._next_id()}
            return [
                {**span, "name": f"{how} {name}", "ph": "b", "ts": common["ts"]},
                {**span, "name": f"{how} {name}", "ph": "e", "ts": self._us(end)},
            ]
        peer, size, direction, number, *_ = rest
        name = f"{'to' if direction == 'out' else 'from'} {self._name(peer)}{_by(number)}"
        return [
            {
                **common,
                "name": name,
                "tid": _track(peer, number, direction),
                "args": {"bytes": size},
            }
        ]

    def _us(self, moment_ns: int) -> float:
        return (moment_ns - self._begin_ns) / 1e3

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _clients(self) -> Iterator[dict[str, Any]]:
        """Yields the computations of each client, by host."""
        seen: set[tuple[int, int]] = set()
        for host, records in self.records.items():
            for kind, start, end, *rest in records:
                if kind != "run":
                    continue
                _, _, name, client, *_ = rest
                pid = CLIENT + client
                if (pid, host) not in seen:
                    seen.add((pid, host))
                    yield _label("process_name", pid, 0, f"client {client}")
                    yield _label("thread_name", pid, host, f"runs on {self._name(host)}")
                yield {
                    "ph": "X",
                    "name": name,
                    "pid": pid,
                    "tid": host,
                    "ts": self._us(start),
                    "dur": (end - start) / 1e3,
                }

    def _flows(self) -> Iterator[dict[str, Any]]:
        """Yields flow arrows from sends to receives."""
        sent: dict[tuple[int, int, int], tuple[int, int]] = {}
        for host, records in self.records.items():
            for kind, start, _, *rest in records:
                if kind == "move" and rest[2] == "out" and rest[4]:
                    sent[host, rest[0], rest[4]] = (start, _track(rest[0], rest[3], "out"))
        for host, records in self.records.items():
            for kind, begun, end, *rest in records:
                if kind != "move" or rest[2] != "in":
                    continue
                found = sent.pop((rest[0], host, rest[4]), None)
                if found is None or found[0] > end:
                    continue
                start, sender_track = found
                flow = {"name": "transfer", "cat": "transfer", "id": self._next_id()}
                source = {"pid": rest[0], "tid": sender_track, "ts": self._us(start)}
                # Within the slice of the receive, not after it.
                track = _track(rest[0], rest[3], "in")
                target = {"pid": host, "tid": track, "ts": self._us(max(begun, end - 1))}
                yield {**flow, "ph": "s", **source}
                yield {**flow, "ph": "f", "bp": "e", **target}

    def _counters(self) -> Iterator[dict[str, Any]]:
        """Yields the controller's counters, and spans for which clients were connected."""
        if not self._samples:
            return
        yield _label("process_name", CONTROLLER, 0, "controller")
        present: dict[int, tuple[int, int]] = {}
        last: dict[str, dict[str, float]] = {}

        def counted(moment: int, name: str, values: dict[str, float]) -> Iterator[dict[str, Any]]:
            if last.get(name) != values:
                last[name] = values
                common = {"ph": "C", "pid": CONTROLLER, "ts": self._us(moment)}
                yield {**common, "name": name, "args": values}

        for moment, seen in self._samples:
            for island in seen["islands"]:
                for host in island["hosts"]:
                    name = f"host {host['id']}"
                    memory = {"MiB": host["memory_bytes"] / 2**20}
                    if host["spilled_bytes"]:
                        memory["spilled MiB"] = host["spilled_bytes"] / 2**20
                    yield from counted(moment, f"memory of {name}", memory)
                    queue = {"queued": host["queued"], "under way": host["in_flight"]}
                    yield from counted(moment, f"launches of {name}", queue)
            for client in seen["clients"]:
                first, _ = present.get(client["id"], (moment, moment))
                present[client["id"]] = first, moment
                held = {"MiB": client["bytes"] / 2**20}
                yield from counted(moment, f"memory of client {client['id']}", held)
        for client, (first, end) in present.items():
            yield _label("thread_name", CONTROLLER, client + 1, f"client {client}")
            yield {
                "ph": "X",
                "name": f"client {client} is connected",
                "pid": CONTROLLER,
                "tid": client + 1,
                "ts": self._us(first),
                "dur": (end - first) / 1e3,
            }


def _label(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _by(channel: int) -> str:
    """Returns the suffix that names a channel; 0 is no particular channel."""
    return f" by channel {channel}" if channel else ""


def _track(peer: int, channel: int, direction: str) -> int:
    """Returns a track id; receives have separate tracks, since they overlap concurrent sends."""
    first = 1 if direction == "out" else 6
    return CHANNEL_TRACK * (first + 10 * channel) + (999 if peer == CONTROLLER else peer)


def _read(path: Path) -> list[list[Any]]:
    """Returns the complete records of a file; a host that was killed may leave a partial line."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]
