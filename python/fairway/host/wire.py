"""Commands and reports as MessagePack; the counterpart is ``crates/run/src/wire.rs``."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import msgpack

COMMANDS = (
    "launch",
    "put",
    "gather",
    "copy",
    "bitcast",
    "send",
    "receive",
    "read",
    "check_ready",
    "delete",
    "free",
    "poison",
    "compile",
    "free_executable",
    "run",
    "program_text",
    "peers",
    "compile_exchange",
    "exchange",
    "tidy",
    "read_program",
    "load_program",
    "spill",
    "restore",
    "end_input",
    "sparse",
    "relay",
    "plan",
    "report_arrival",
    "report_end",
)
"""Names of the commands, by their number."""

# Kinds of reports.
HELLO, FINISHED, DONE, FAILED, ORDER_BROKEN, DATA_SENT, BATCH, MOVED, PLANNED, ARRIVED = range(10)
# Kinds of answers in a DONE report.
NOTHING, DATA, COMPILED, PROGRAM, TEXT = range(5)

CODES = {
    "CANCELLED": 1,
    "UNKNOWN": 2,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "ABORTED": 10,
    "OUT_OF_RANGE": 11,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "DATA_LOSS": 15,
    "UNAUTHENTICATED": 16,
}
"""Numbers of the status codes that prefix XLA's messages."""


def split_status(text: str) -> tuple[int, str]:
    """Splits ``CODE_NAME: message``; without a known name the code is INTERNAL."""
    name, _, message = text.partition(": ")
    code = CODES.get(name)
    return (code, message) if code is not None else (CODES["INTERNAL"], text)


class Reporter:
    """Sends reports to the controller; thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._pack = msgpack.Packer(use_bin_type=True).pack

    def send(self, *report: Any) -> None:
        """Sends one report."""
        with self._lock:
            packed = self._pack(report)
            self._connection.sendall(struct.pack("<I", len(packed)) + packed)

    def batch(self, input_number: int, end: str | None = None) -> None:
        """Reports that the next batch of an input is made, or why there will be no more."""
        self.send(BATCH, input_number, None if end is None else split_status(end))

    def done(self, ticket: int, *answer: Any) -> None:
        """Answers a command."""
        self.send(DONE, ticket, answer or (NOTHING,))

    def failed(self, ticket: int, text: str) -> None:
        """Answers a command with an error, given as ``CODE_NAME: message``."""
        code, message = split_status(text)
        self.send(FAILED, ticket, code, message)
