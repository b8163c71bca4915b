"""Captures a script's last step as a program in a file.

A ``.fw`` file is text, as ``ir::Program`` prints it: one line for each function with its measured
time, each input, and each computation or transfer, regardless of its number of shards.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.table import Table

from fairway import _native
from fairway.daemon import Run
from fairway.errors import CaptureError

__all__ = ["read", "summary", "write"]

CLIENT_GONE_S = 10.0
"""Time within which a client has disconnected after its process has ended."""


def write(run: Run, path: Path) -> str:
    """Writes the last step of a run's script.

    Args:
        run: still up; the script has ended.
        path: the file to write.

    Returns:
        The program's text.

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
    _, text, error = captured[-1]
    if text is None:
        raise CaptureError(f"what the script did last is no program: {error}")
    path.write_text(text)
    return text


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
    """Returns tables of the computations, transfers and sparse exchanges of a program."""
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
    exchanges = Table("exchange", "from devices", "to devices", "times", title="sparse exchanges")
    for name, source, target, count in program["exchanges"]:
        exchanges.add_row(name, _numbers(source), _numbers(target), str(count))
    return [table for table in (functions, moves, exchanges) if table.row_count]


def _milliseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.3f} ms"


def _numbers(numbers: list[int]) -> str:
    """Formats device numbers, as ``0-3`` where they are consecutive."""
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) > 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
