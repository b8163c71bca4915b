"""Captures a script's last step as a program in a file.

A ``.fw`` file is text, as ``ir::Program`` prints it: one line for each function with its measured
time, each input, and each computation or transfer, regardless of its number of shards.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from rich.table import Table

from fairway import _native
from fairway.cluster.supervisor import Run
from fairway.errors import CaptureError
from fairway.report.measured import HostRecords, measure
from fairway.report.steps import StepReport

__all__ = ["Captured", "gaps", "read", "summary", "write", "write_report"]

CLIENT_GONE_S = 10.0
"""Time within which a client has disconnected after its process has ended."""


@dataclasses.dataclass(frozen=True)
class Captured:
    """The last step of a client.

    Attributes:
        client: number of the client.
        text: the program.
    """

    client: int
    text: str


def write(run: Run, path: Path) -> Captured:
    """Writes the last step of a run's script.

    Args:
        run: still up; the script has ended.
        path: the file to write.

    Raises:
        CaptureError: the script used no devices, or its step cannot be expressed as a program.
        OSError: the file cannot be written.
    """
    deadline = time.monotonic() + CLIENT_GONE_S
    while run.overview()["clients"] and time.monotonic() < deadline:
        time.sleep(0.05)
    captured = run.captured()
    if not captured:
        raise CaptureError("the script ran nothing on the islands, so there is nothing to capture")
    client, text, error = captured[-1]
    if text is None:
        raise CaptureError(f"what the script did last is no program: {error}")
    path.write_text(text)
    return Captured(client, text)


def write_report(run: Run, captured: Captured, path: Path) -> StepReport:
    """Writes when each node of the last steps of a run's script began and ended.

    Args:
        run: has ended, since hosts write their last records then.
        captured: the program.
        path: the file to write; a report that is there is removed in any case.

    Raises:
        CaptureError: the hosts' records do not have its steps, or too few of them.
        OSError: the file cannot be written.
    """
    path.unlink(missing_ok=True)
    assert run.timeline is not None, "a captured run has records"
    hosts = {
        host: HostRecords(devices, run.timeline.records[host])
        for host, devices in run.devices.items()
    }
    report = measure(captured.text, captured.client, hosts)
    path.write_text(str(report))
    return report


def read(path: Path) -> str:
    """Reads and checks the text of a program's file.

    Raises:
        CaptureError: the file cannot be read, or is no program.
    """
    try:
        text = path.read_text()
        _native.read_program(text)
    except OSError as error:
        raise CaptureError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CaptureError(f"{path} holds no program: {error}") from error
    return text


def summary(text: str) -> list[Table]:
    """Returns tables of what a program computes and communicates."""
    program = _native.read_program(text)
    functions = Table("function", "calls", "devices", "time of one", "in all", title="runs")
    for function in program["functions"]:
        each = function["time_ns"]
        functions.add_row(
            function["name"],
            str(function["calls"]),
            _numbers(function["devices"]),
            "-" if each is None else _milliseconds(each),
            "-" if each is None else _milliseconds(each * function["calls"]),
        )
    moves = Table("from devices", "to devices", "moves", "bytes", title="moves")
    totals: dict[tuple[str, str], list[int]] = {}
    for size, source, target in program["moves"]:
        total = totals.setdefault((_numbers(source), _numbers(target)), [0, 0])
        total[0] += 1
        total[1] += size
    for (source, target), (count, size) in totals.items():
        moves.add_row(source, target, str(count), f"{size / 2**20:.3f} MiB")
    collectives = Table("function", "collective", "devices", "bytes", "times", title="collectives")
    for name, kind, ranks, size, times in program["collectives"]:
        collectives.add_row(name, kind, _numbers(ranks), f"{size / 2**20:.3f} MiB", str(times))
    exchanges = Table("exchange", "from devices", "to devices", "times", title="sparse exchanges")
    for name, source, target, count in program["exchanges"]:
        exchanges.add_row(name, _numbers(source), _numbers(target), str(count))
    return [table for table in (functions, moves, collectives, exchanges) if table.row_count]


def gaps(text: str) -> list[str]:
    """Returns sentences on what predictions of a program leave out."""
    program = _native.read_program(text)
    found = [
        f"{function['name']} has no measured time; predictions take it for 0, and leave out what "
        "it communicates"
        for function in program["functions"]
        if function["calls"] and function["time_ns"] is None
    ]
    if uploaded := program["uploaded"]:
        found.append(
            f"the client sends {sum(uploaded) / 2**20:.3f} MiB in each step; predictions take them "
            "as there"
        )
    return found


def _milliseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.3f} ms"


def _numbers(numbers: list[int]) -> str:
    """Formats device numbers, as ``0-3`` where they are consecutive."""
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) > 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
