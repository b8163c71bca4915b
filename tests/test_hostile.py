"""Malformed, truncated and silent input on every listening socket; then a client still computes."""

from __future__ import annotations

import contextlib
import random
import re
import resource
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from conftest import Measured, Up, connect_unix, hosts_of, rss_bytes, until
from fuzzing import check_computes
from grpc_client import (
    PREFACE,
    SERVICE,
    SESSION,
    SESSION_HEADERS,
    STORE,
    Caller,
    announce,
    array_request,
    begin_session,
    binary,
    closes,
    connect,
    field,
    fixed64,
    grpc_message,
    http2_frame,
    request,
    versions,
)

DATA_PLANE_MAGIC = 0x46414952
SEED = 20260101


def frame(kind: int, length: int, payload: bytes = b"") -> bytes:
    """Encodes a frame of the data plane."""
    return (
        struct.pack("<IIIIQQQQ", DATA_PLANE_MAGIC + 1, kind, 0, 0, 7, length, 0, length) + payload
    )


def report(*fields: object) -> bytes:
    """Encodes a report as hosts do."""
    packed = msgspec.msgpack.encode(fields)
    return struct.pack("<I", len(packed)) + packed


def attacks() -> list[bytes]:
    """Payloads; the same on every socket, since an attacker does not know which is which."""
    noise = random.Random(SEED)
    info = (1, "unix:/nowhere", [], "0", "cpu", "1", "cpu", ["device"], 4, None)
    hello = ("guess", 0, info)
    giant = [
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack("<I", 64 << 10),
        frame(1, (1 << 64) - 1),
        frame(1, 64 << 10),
        frame(2, 1 << 35),
        PREFACE + b"\xff\xff\xff\x01\x04\0\0\0\1",
    ]
    halves = [
        b"",
        PREFACE[:10],
        PREFACE,
        PREFACE + http2_frame(4, 0, 0, b""),
        PREFACE + http2_frame(4, 0, 0, b"") + http2_frame(1, 4, 1, b"\x82")[:7],
        frame(1, 64)[:8],
        frame(1, 64)[:47],
        frame(1, 64),
        frame(1, 64, b"x" * 63),
        report(*hello)[:3],
        report(*hello)[:20],
    ]
    lies = [
        frame(1, 5, b"guess") + frame(6, 0) + frame(2, 9, b"nine byte"),
        frame(6, 0),
        frame(3, 1 << 20),
        frame(99, 0),
        report(*hello),
        report(1, 64),
        report(2, 5, [0]),
        report(5, "the hosts have lost their order"),
        struct.pack("<I", 40) + noise.randbytes(40),
        struct.pack("<I", 40) + b"\x9c" * 40,
        struct.pack("<I", 6) + b"\x9c\x00\xdb\xff\xff\xff",
        struct.pack("<I", 60000) + b"\x91" * 60000,
        PREFACE + http2_frame(4, 0, 0, noise.randbytes(5)),
        PREFACE
        + b"".join(http2_frame(kind, 0xFF, kind, noise.randbytes(64)) for kind in range(12)),
        PREFACE + http2_frame(4, 0, 0, b"") + http2_frame(1, 4, 1, b"\x3f" + b"\xff" * 60),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise.randbytes(500),
    ]
    sizes = (1, 4, 9, 48, 64, 1000, 4096, 70_000, 1_000_000)
    return [noise.randbytes(size) for size in sizes] + giant + halves + lies


def attack(up: Up, where: str, data: bytes, end: str) -> socket.socket:
    """Sends bytes; then closes, resets, shuts down its writing side, or stays."""
    connection = connect(up, where)
    with contextlib.suppress(OSError):
        connection.sendall(data)
    if end == "stay":
        return connection
    with contextlib.suppress(OSError):
        if end == "reset":
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        elif end == "half":
            connection.shutdown(socket.SHUT_WR)
            assert closes(connection), f"{where} stays open after {data[:40]!r} and no more"
    connection.close()
    return connection


@pytest.fixture(scope="module")
def warm(up: Up) -> Up:
    """Islands that have computed, so that growth of memory means something."""
    check_computes(up)
    return up


SOCKETS = {
    "admin.sock",
    "control.sock",
    "controller-data.sock",
    "data-0.sock",
    "data-1.sock",
}


@pytest.mark.parametrize("where", ["listener", *sorted(SOCKETS)])
def test_nonsense(warm: Up, where: str) -> None:
    up = warm
    names = {path.name for path in up.directory.glob("*.sock")} | {"listener"}
    assert where in names
    before = rss_of_run(up)
    staying = []
    for number, data in enumerate(attacks()):
        attack(up, where, data, ("leave", "reset", "half")[number % 3])
        staying.append(attack(up, where, data, "stay"))
    try:
        check_computes(up)
        grown = rss_of_run(up) - before
        assert grown < 64 << 20, f"{grown >> 20} MiB for lengths that were only announced"
    finally:
        for connection in staying:
            connection.close()
    with connect(up, where) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # closed by the server
            connection.sendall(noise_for(where))
        assert closes(connection), "there is no listener any more"


def noise_for(where: str) -> bytes:
    """Bytes that make this listener close the connection."""
    return (
        b"GET / HTTP/1.0\r\n\r\n" if where == "listener" else frame(1, 5, b"guess") + report(1, 2)
    )


def rss_of_run(up: Up) -> int:
    """Resident memory of controller and hosts."""
    return rss_bytes(up.pid) + sum(rss_bytes(host["process"]) for host in hosts_of(up))


def test_every_listening_socket_is_tried(up: Up) -> None:
    """A new listener belongs into the list above."""
    assert {path.name for path in up.directory.glob("*.sock")} == SOCKETS
    listening = listening_ports([up.pid, *(host["process"] for host in hosts_of(up))])
    assert listening == {up.port}


def listening_ports(processes: list[int]) -> set[int]:
    """TCP ports on which any of these processes listens."""
    inodes = set()
    for process in processes:
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                if found := re.match(r"socket:\[(\d+)\]", str(entry.readlink())):
                    inodes.add(found[1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


# Silence


def test_silent_connections_to_the_data_plane(own_runtime: Path) -> None:
    """More than may be open at once, at each end; messages are still delivered."""
    raise_file_limit()
    with (
        Up("--islands", "2x1x1", runtime=own_runtime) as running,
        contextlib.ExitStack() as stack,
    ):
        for where in ("controller-data.sock", "data-0.sock", "data-1.sock"):
            for _ in range(1100):
                stack.enter_context(connect_unix(running.directory / where))
        check_computes(running)


def raise_file_limit() -> int:
    """Raises the limit of descriptors to the maximum, and returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@pytest.mark.alone
def test_ten_thousand_silent_connections(own_runtime: Path, measured: Measured) -> None:
    """Clients that connect meanwhile are served soon, though silent ones keep being replaced."""
    count = min(10_000, raise_file_limit() - 1_000)
    assert count > 2_000, "the limit of descriptors is too low to show anything"
    measured("silent connections", count)
    with Up("--islands", "1x1x1", runtime=own_runtime) as running:
        crowd = subprocess.Popen(
            [sys.executable, "-c", CROWD, str(running.port), str(count)],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        with crowd:
            try:
                assert crowd.stdout is not None
                tried = int(crowd.stdout.readline())
                measured("silent connections that were begun", tried)
                assert tried == count
                took = check_computes(running, 100)
                measured("a client among silent connections connects and computes (s)", took)
                assert crowd.poll() is None
            finally:
                crowd.kill()
        measured("a client after they are gone (s)", check_computes(running))
    assert took < 20


CROWD = """
import resource, selectors, socket, sys
port, count = map(int, sys.argv[1:])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
selector = selectors.DefaultSelector()
def begin():
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(("127.0.0.1", port))
    selector.register(connection, selectors.EVENT_READ)
for _ in range(count):
    begin()
print(count, flush=True)
while True:
    for key, _ in selector.select():
        selector.unregister(key.fileobj)
        key.fileobj.close()
        begin()
"""
"""Keeps N silent connections open, and reopens those that are closed."""


def test_no_descriptors_are_left(own_runtime: Path) -> None:
    """Every listener recovers once the connections that exhausted all descriptors are closed."""
    # The first has a short backlog, where connections wait until others were closed: descriptors
    # are counted after the last, which accepts them at once.
    wheres = ["admin.sock", "controller-data.sock", "control.sock"]
    with (
        Up("--islands", "1x1x1", runtime=own_runtime, limits=("--nofile=200:200",)) as running,
        contextlib.ExitStack() as strangers,
    ):
        check_computes(running)

        def come(where: str, count: int) -> None:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    strangers.enter_context(connect(running, where))

        def take_all() -> bool:
            # The earliest connections time out after a while.
            for where in wheres:
                come(where, 40)
            return count_descriptors(running.pid) >= 199

        come("listener", 300)
        time.sleep(0.5)
        assert count_descriptors(running.pid) < 199, "clients' connections leave some for the rest"
        until(take_all, 30, "all descriptors are taken")
        for where in wheres * 3:
            come(where, 1)
        time.sleep(0.5)
        strangers.close()
        until(lambda: count_descriptors(running.pid) < 150, 20, "descriptors are free again")
        assert running.overview()["process"] == running.pid
        for where in ("controller-data.sock", "control.sock"):
            with connect(running, where) as connection:
                connection.sendall(frame(1, 5, b"guess") + report(1, 2))
                assert closes(connection), f"there is no listener at {where} any more"
        check_computes(running)


def count_descriptors(process: int) -> int:
    """Number of open descriptors of a process."""
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


def test_malformed_calls(up: Up) -> None:
    """Each ends in an error on its own stream; the connection stays usable."""
    noise = random.Random(SEED)
    unknown = fixed64(1, 12345) + fixed64(2, 1)
    good = grpc_message(versions(16, 25))
    calls: list[tuple[str, bytes, tuple[tuple[str, str], ...]]] = [
        ("GetVersion", b"", ()),
        ("GetVersion", good[:-1], ()),
        ("GetVersion", good[:3], ()),
        ("GetVersion", b"\0\xff\xff\xff\xff", ()),
        ("GetVersion", b"\1" + good[1:], ()),
        ("GetVersion", b"\7" + good[1:], ()),
        ("GetVersion", grpc_message(b"\x0a\xff\xff\xff\xff\x0f"), ()),
        ("GetVersion", grpc_message(b"\x0a" * 1000), ()),
        ("NoSuchMethod", good, ()),
        ("", good, ()),
        ("HostBufferStore", grpc_message(field(1, b"x")), ()),
        ("HostBufferStore", grpc_message(field(1, b"x")), ((STORE, "!!! not base64"),)),
        ("HostBufferStore", grpc_message(field(1, b"x")), binary(STORE, b"\xff" * 20)),
        ("HostBufferStore", grpc_message(field(1, b"x")), binary(STORE, unknown + field(3, 1))),
        ("HostBufferStore", b"", binary(STORE, unknown + field(3, -1))),
        ("HostBufferStore", b"", binary(STORE, unknown + field(3, 1 << 62))),
        ("HostBufferLookup", grpc_message(unknown), ()),
        ("HostBufferDelete", grpc_message(unknown), ()),
        ("IfrtSession", b"", ()),
        ("IfrtSession", b"", binary(SESSION, b"\xff" * 9)),
        ("IfrtSession", b"", binary(SESSION, field(1, field(1, 2) + field(2, 5)))),
        ("IfrtSession", b"\0\xff\xff\xff\xff", SESSION_HEADERS),
    ]
    for method in ("GetVersion", "IfrtSession", "HostBufferLookup", "HostBufferDelete"):
        calls += [(method, grpc_message(noise.randbytes(size)), ()) for size in (1, 10, 100, 5000)]
    with Caller(up.port) as caller:
        for method, data, headers in calls:
            answer = caller.call(SERVICE + method, data, headers)
            assert method == "IfrtSession" or not answer.messages, (method, data, headers)
            again = caller.call(SERVICE + "GetVersion", good)
            assert again.messages == [field(1, field(1, 25) + field(2, 5))], (method, data)
    until(lambda: not up.overview()["clients"], 1, "no session is left")
    check_computes(up)


def test_a_session_that_is_cut_off(up: Up) -> None:
    """In the middle of a message, of an upload, of a request that waits for an upload."""
    for cut in range(4):
        caller, stream, key = begin_session(up)
        put = request(2, 4, array_request(11, [4], 0, 50, 51))
        if cut == 0:
            caller.send(stream, grpc_message(put)[:-3])
        elif cut == 1:
            caller.send(stream, grpc_message(put))
        elif cut == 2:
            caller.send(stream, grpc_message(put))
            announce(caller, key, 50, 1 << 20)
        else:
            upload = announce(caller, key, 50, 1 << 30)
            caller.send(upload, grpc_message(field(1, b"x" * 1000)))
        assert len(up.overview()["clients"]) == 1
        caller.close()
        until(lambda: not up.overview()["clients"], 1, "the session is gone")
    check_computes(up)
