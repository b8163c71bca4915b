"""Limits of one client's use of the controller: memory, sessions, and other clients' time."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Measured, Up, rss_bytes
from fuzzing import check_computes, up_for_nonsense
from grpc_client import (
    SERVICE,
    SESSION_HEADERS,
    Caller,
    announce,
    array_request,
    begin_session,
    field,
    fixed64,
    grpc_message,
    open_session,
    request,
)

pytestmark = pytest.mark.alone

MIB = 1 << 20
MAKE_ERRORS, LAYOUT, COPY, PUT = 26, 27, 10, 4
"""Numbers of requests in the protocol."""
SESSIONS = 8
"""Maximum number of sessions of one connection."""


@pytest.fixture(scope="module")
def own(runtime: Path) -> Iterator[Up]:
    with up_for_nonsense(runtime) as up:
        yield up


def send_slowly(caller: Caller, stream: int, data: bytes) -> None:
    """Sends within the window of flow control; ends early if the stream does."""
    sent = 0
    while sent < len(data) and not caller.answers[stream].ended:
        if sent - caller.credit[stream] > 4 * MIB - (32 << 10):
            assert caller.listen(10), "the server takes no more"
            continue
        caller.send(stream, data[sent : sent + (16 << 10)])
        sent += 16 << 10
        while caller.listen(0):
            pass


def peak_mib(up: Up) -> int:
    """Peak memory of the controller since :func:`forget_peak`, in MiB."""
    status = Path(f"/proc/{up.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) >> 10


def forget_peak(up: Up) -> int:
    Path(f"/proc/{up.pid}/clear_refs").write_text("5")
    return peak_mib(up)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param(LAYOUT, field(2, b"\x04" * 16_000_000), id="axes of a layout"),
        pytest.param(LAYOUT, field(2, b"\x04" * 4_000_000), id="fewer axes"),
        pytest.param(MAKE_ERRORS, b"\x12\x00" * 2_000_000, id="specs of arrays"),
    ],
)
def test_a_small_request_takes_little_memory(
    own: Up, kind: int, body: bytes, measured: Measured
) -> None:
    """Two bytes of a request may decode to two hundred."""
    caller, stream, _ = begin_session(own)
    with caller:
        before = forget_peak(own)
        send_slowly(caller, stream, grpc_message(request(2, kind, body)))
        time.sleep(0.5)
        measured("growth of the controller in MiB", peak_mib(own) - before)
        assert peak_mib(own) - before < 128
    check_computes(own)


def test_arrays_that_one_request_makes_are_bounded(own: Up) -> None:
    """One request for hundreds of thousands would block every other client."""
    caller, stream, _ = begin_session(own)
    with caller:
        names = lambda start: struct.pack("<300000Q", *range(start, start + 300_000))  # noqa: E731
        body = field(1, names(1)) + field(2, names(1 << 32)) + field(3, b"\0")
        began = time.monotonic()
        send_slowly(caller, stream, grpc_message(request(2, COPY, body)))
        with Caller(own.port) as other:
            open_session(other)
        assert time.monotonic() - began < 5
    check_computes(own)


def test_an_upload_is_taken_once_whatever_waits_for_it(own: Up) -> None:
    """Uploads that an array waits for are exempt from back-pressure, so they must be few."""
    caller, stream, key = begin_session(own)
    with caller:
        caller.send(stream, grpc_message(request(2, PUT, array_request(11, [50_000_000], 0, 7, 8))))
        full = announce(caller, key, 555, 3 << 30)  # takes all room, and sends nothing
        first = announce(caller, key, 7, 200_000_000)
        time.sleep(0.2)
        again = [announce(caller, key, 7, 200_000_000) for _ in range(4)]
        deadline = time.monotonic() + 10
        while not all(caller.answers[one].ended for one in again):
            assert time.monotonic() < deadline, "a second upload of the same name is taken"
            caller.listen(1)
        assert not caller.answers[full].ended
        assert not caller.answers[first].ended
    check_computes(own)


def test_bytes_that_are_fetched_and_not_taken_are_few(own: Up, measured: Measured) -> None:
    """A client that fetches its results again and again, and reads nothing."""
    size = 64 * MIB
    with Caller(own.port, 1 << 20) as caller, Caller(own.port, 1 << 20) as greedy:
        stream, key = open_session(caller)
        put = array_request(11, [size // 4], 0, 777, 778)
        caller.send(stream, grpc_message(request(2, PUT, put)))
        upload = announce(caller, key, 777, size)
        for _ in range(size // MIB):
            send_slowly(caller, upload, grpc_message(field(1, bytes(MIB))))
        caller.send(upload, b"", end=True)
        caller.send(stream, grpc_message(request(3, 6, fixed64(1, 5000) + fixed64(2, 778))))
        time.sleep(2)
        before = rss_bytes(own.pid)
        for _ in range(400):
            one = greedy.begin(SERVICE + "HostBufferLookup")
            greedy.send(one, grpc_message(fixed64(1, key) + fixed64(2, 5000)), end=True)
        time.sleep(2)
        grown = rss_bytes(own.pid) - before
        measured("growth of the controller in MiB", grown / MIB)
        assert grown < 128 * MIB
    check_computes(own)


def test_a_flood_of_sessions_keeps_nobody_out(own: Up, measured: Measured) -> None:
    """Each session looks up the process of its client."""
    with Caller(own.port) as flood:
        for _ in range(2000):
            stream = flood.begin(SERVICE + "IfrtSession", SESSION_HEADERS)
            flood.send(stream, grpc_message(request(1, 2, b"")))
        began = time.monotonic()
        with Caller(own.port) as other:
            open_session(other)
        took = time.monotonic() - began
        measured("seconds until another has a session", took)
        assert took < 2
        while flood.listen(1):
            pass
        open_ones = [one for one in flood.answers.values() if not one.ended]
        assert len(open_ones) == SESSIONS
    check_computes(own)
