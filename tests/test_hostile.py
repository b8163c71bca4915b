"""Malformed, truncated and silent input on every listening socket; then a client still computes."""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import random
import re
import resource
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from conftest import Measured, Up, client, connect_unix, hosts_of, is_alive, rss_bytes, said, until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SERVICE = "/xla.ifrt.proxy.GrpcIfrtService/"
PROTO = Path(__file__).parents[1] / "crates/ifrt/proto/ifrt_proxy.proto"
DATA_PLANE_MAGIC = 0x46414952
SEED = 20260101

COMPUTE = """
    first, last = jax.devices()[0], jax.devices()[-1]
    x = jax.device_put(np.arange(1 << 18, dtype=np.float32) % 7, first)
    y = jax.jit(lambda x: x * 2 + 1)(jax.device_put(x, last))
    assert (np.asarray(y) == (np.arange(1 << 18) % 7) * 2 + 1).all()
    say("right", at=time.monotonic())
"""


def check_computes(up: Up, timeout_s: float = 60) -> float:
    """A new client connects, computes, moves a megabyte and reads it; returns the seconds taken."""
    began = time.monotonic()
    result = client(up, COMPUTE, timeout_s)
    took = float(said(result.stdout, "right")["at"]) - began
    assert not any(host["lost"] for host in hosts_of(up)), up.overview()
    assert all(is_alive(host["process"]) for host in hosts_of(up))
    assert up.panics() == []
    return took


# Bytes


def connect(up: Up, where: str) -> socket.socket:
    """Connects to the gRPC listener or to one of the sockets in the run's directory."""
    if where == "door":
        return socket.create_connection(("127.0.0.1", up.port), 10)
    return connect_unix(up.directory / where)


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
    *("control.sock", "controller-data.sock", "data-0.sock", "data-1.sock"),
    *("status.sock", "slices.sock", "islands.sock"),
}


ONE_BY_ONE = {"slices.sock", "islands.sock"}
"""They give each connection a second to send before the next is served; a few that stay suffice."""


@pytest.mark.parametrize("where", ["door", *sorted(SOCKETS)])
def test_nonsense(warm: Up, where: str) -> None:
    up = warm
    names = {path.name for path in up.directory.glob("*.sock")} | {"door"}
    assert where in names
    before = rss_of_run(up)
    staying = []
    for number, data in enumerate(attacks()):
        attack(up, where, data, ("leave", "reset", "half")[number % 3])
        if where not in ONE_BY_ONE or number % 4 == 0:
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
    return b"GET / HTTP/1.0\r\n\r\n" if where == "door" else frame(1, 5, b"guess") + report(1, 2)


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
    wheres = ["status.sock", "controller-data.sock", "control.sock"]
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

        come("door", 300)
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


def closes(connection: socket.socket) -> bool:
    """Checks whether the peer closes the connection within a few seconds."""
    connection.settimeout(5)
    try:
        while connection.recv(1 << 16):
            continue
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


# gRPC


def http2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Encodes one frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def prefixed(number: int, bits: int) -> bytes:
    """Encodes a number as HPACK does."""
    most = (1 << bits) - 1
    if number < most:
        return bytes([number])
    rest, written = number - most, [most]
    while rest >= 128:
        written.append(rest % 128 | 128)
        rest //= 128
    return bytes([*written, rest])


def grpc_message(body: bytes) -> bytes:
    """Encodes one message in a stream of gRPC."""
    return b"\0" + struct.pack(">I", len(body)) + body


@dataclasses.dataclass
class Answer:
    """The response on one stream."""

    data: bytes = b""
    ended: bool = False

    @property
    def messages(self) -> list[bytes]:
        """The complete messages in the data."""
        found, rest = [], self.data
        while len(rest) >= 5:
            length = int.from_bytes(rest[1:5], "big")
            if len(rest) < 5 + length:
                break
            found.append(rest[5 : 5 + length])
            rest = rest[5 + length :]
        return found


class Caller:
    """A minimal gRPC client that can break the protocol. It decodes no headers."""

    def __init__(self, port: int, window_bytes: int = (1 << 31) - 1) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 10)
        self._received = b""
        self._next = 1
        self._takes_all = window_bytes > 1 << 20
        self.credit: collections.Counter[int] = collections.Counter()
        """Flow-control credit of each stream, and of the connection (0), beyond the initial one."""
        self.answers: dict[int, Answer] = {}
        window = struct.pack(">HI", 4, window_bytes)
        self._socket.sendall(PREFACE + http2_frame(4, 0, 0, window))
        self._socket.sendall(http2_frame(8, 0, 0, struct.pack(">I", (1 << 30))))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def begin(self, path: str, headers: tuple[tuple[str, str], ...] = ()) -> int:
        """Opens a stream."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
            **dict(headers),
        }
        block = b""
        for name, value in fields.items():
            texts = (name.encode(), value.encode())
            block += b"\0" + b"".join(prefixed(len(text), 7) + text for text in texts)
        stream, self._next = self._next, self._next + 2
        self.answers[stream] = Answer()
        self._socket.sendall(http2_frame(1, 4, stream, block))
        return stream

    def send(self, stream: int, data: bytes, end: bool = False) -> None:
        """Sends data, and whether it is the last (END_STREAM)."""
        parts = [data[at : at + 16384] for at in range(0, len(data), 16384)] or [b""]
        for index, part in enumerate(parts):
            last = end and index == len(parts) - 1
            self._socket.sendall(http2_frame(0, int(last), stream, part))

    def call(self, path: str, data: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
        """Sends data on a new stream and waits for its end.

        Raises:
            ConnectionError: the server closes the connection first.
            AssertionError: no response comes for 10 s.
        """
        stream = self.begin(path, headers)
        self.send(stream, data, end=True)
        while not self.answers[stream].ended:
            assert self.listen(10), f"no answer to a call of {path}"
        return self.answers[stream]

    def listen(self, timeout_s: float) -> bool:
        """Receives a frame within that time; false if none arrives."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return False
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the server has ended the connection")
        self._received += data
        while len(self._received) >= 9:
            length = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + length:
                break
            kind, flags, stream = struct.unpack(">BBI", self._received[3:9])
            payload = self._received[9 : 9 + length]
            self._received = self._received[9 + length :]
            self._take(kind, flags, stream, payload)
        return True

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in (4, 6) and not flags & 1:  # acknowledges settings and pings
            self._socket.sendall(http2_frame(kind, 1, 0, payload if kind == 6 else b""))
        if kind == 8:
            self.credit[stream] += int.from_bytes(payload, "big")
        if kind == 7:
            raise ConnectionError(f"the server says goodbye: {payload[8:]!r}")
        if answer := self.answers.get(stream):
            if kind == 0:
                answer.data += payload
                if self._takes_all:
                    more = struct.pack(">I", max(1, len(payload)))
                    self._socket.sendall(http2_frame(8, 0, 0, more))
            answer.ended |= kind == 3 or (kind in (0, 1) and bool(flags & 1))


def varint(number: int) -> bytes:
    """Encodes a number as protobuf does."""
    number &= (1 << 64) - 1
    written = []
    while number >= 128:
        written.append(number % 128 | 128)
        number //= 128
    return bytes([*written, number])


def field(number: int, value: int | bytes) -> bytes:
    """Encodes a field of protobuf: a number, or bytes behind their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def fixed64(number: int, value: int) -> bytes:
    """Encodes a field of eight bytes."""
    return varint(number << 3 | 1) + struct.pack("<Q", value & ((1 << 64) - 1))


def versions(low: int, high: int, serdes: tuple[int, int] = (3, 5)) -> bytes:
    """Encodes a request for the version."""
    ends = zip((low, high), serdes, strict=True)
    return b"".join(
        field(n + 1, field(1, protocol) + field(2, objects))
        for n, (protocol, objects) in enumerate(ends)
    )


def binary(name: str, value: bytes) -> tuple[tuple[str, str], ...]:
    """Encodes a header of bytes."""
    return ((name, base64.b64encode(value).decode()),)


STORE = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
SESSION = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
SESSION_HEADERS = binary(SESSION, field(1, field(1, 25) + field(2, 5)))


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


def request(op: int, kind: int, body: bytes) -> bytes:
    """Encodes an IfrtRequest."""
    return field(1, fixed64(1, op)) + field(kind, body)


def array_request(dtype: int, dims: list[int], device: int, upload: int, array: int) -> bytes:
    """Encodes a MakeArrayFromHostBufferRequest."""
    shape = field(1, b"".join(map(varint, dims)))
    return (
        field(1, field(1, dtype))
        + field(2, shape)
        + field(3, single_device(device))
        + fixed64(4, upload)
        + fixed64(6, array)
    )


def single_device(device: int) -> bytes:
    """Encodes a ShardingProto for one device."""
    return field(1, field(1, b"xla::ifrt::SingleDeviceSharding") + field(2, field(1, device)))


def session_key(caller: Caller, stream: int) -> int:
    """Reads the response to the first request, and the session's key from it."""
    while not caller.answers[stream].messages:
        assert caller.listen(10), "no answer to the first request"
    init = dict(fields_of(caller.answers[stream].messages[0]))[2]
    assert isinstance(init, bytes)
    key = dict(fields_of(init))[8]
    assert isinstance(key, int)
    return key


def begin_session(up: Up, window_bytes: int = (1 << 31) - 1) -> tuple[Caller, int, int]:
    """Opens a connection and a session: its caller, stream and key."""
    caller = Caller(up.port, window_bytes)
    return caller, *open_session(caller)


def open_session(caller: Caller) -> tuple[int, int]:
    """Opens a session: its stream and its key."""
    stream = caller.begin(SERVICE + "IfrtSession", SESSION_HEADERS)
    caller.send(stream, grpc_message(request(1, 2, b"")))
    return stream, session_key(caller, stream)


def fields_of(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Decodes numbers and values of the fields of a message."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
            continue
        length = {1: 8, 5: 4}.get(key & 7) or number()
        yield key >> 3, message[at : at + length]
        at += length


def announce(caller: Caller, key: int, handle: int, size: int) -> int:
    """Begins an upload (handshake only)."""
    value = fixed64(1, key) + fixed64(2, handle) + field(3, size)
    return caller.begin(SERVICE + "HostBufferStore", binary(STORE, value))


# Requests that are well-formed and invalid


def up_for_nonsense(runtime: Path) -> Up:
    """Islands for fuzzing; a memory limit protects the machine from requests for all memory."""
    directory = Path(tempfile.mkdtemp(prefix="nonsense-", dir=runtime))
    return Up("--islands", "2x1x2", runtime=directory, limits=(f"--as={8 << 30}",))


@pytest.fixture(scope="module")
def own(runtime: Path) -> Iterator[Up]:
    with up_for_nonsense(runtime) as running:
        yield running


class Nonsense:
    """Fuzzer: random requests in the protocol's grammar, many of them almost valid.

    Args:
        seed: the same seed makes the same requests.
        devices: devices that exist; others are named as well.
    """

    SHARDINGS: ClassVar = {
        "SingleDeviceSharding": "SingleDeviceShardingProto",
        "HloSharding": "HloShardingProto",
        "ConcreteEvenSharding": "ConcreteEvenShardingProto",
        "ConcreteSharding": "ConcreteShardingProto",
    }
    HANDLES = 12
    # No number in the gigabytes: the machine would allocate them, and disturb other tests.
    NUMBERS = (0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 8, -1, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 63))

    def __init__(self, seed: int, devices: int) -> None:
        self.random = random.Random(seed)
        self._devices = devices
        self._messages = read_grammar(PROTO.read_text())
        self._uploads: list[int] = []
        self._last_upload = 100

    def request(self, op: int) -> tuple[str, list[int], bytes]:
        """Returns the name of a random request, the uploads that it names, and the request."""
        kinds = self._messages["IfrtRequest"]
        _, kind, _, number = self.random.choice(kinds[1:])
        self._uploads = []
        body = self._message(kind, 0)
        # A request that names no upload waits for number 0.
        uploads = [0, *self._uploads] if "FromHostBuffer" in kind else []
        return kind, uploads, request(op, number, body)

    def upload(self) -> int:
        """Returns an unused number for an upload."""
        self._last_upload += 1
        self._uploads.append(self._last_upload)
        return self._last_upload

    def _message(self, name: str, depth: int) -> bytes:
        if name == "Serialized":
            return self._serialized()
        if depth > 6:
            return b""
        written = b""
        for label, kind, field_name, number in self._messages[name]:
            if label == "repeated":
                count = self.random.choice((0, 1, 1, 2, 2, 3, 4))
            else:
                count = int(self.random.random() < 0.9)
            for _ in range(count):
                written += self._field(kind, field_name, number, depth)
        return written

    def _field(self, kind: str, name: str, number: int, depth: int) -> bytes:
        if kind in self._messages:
            return field(number, self._message(kind, depth + 1))
        if kind in ("string", "bytes"):
            texts = [b"", b"device", b"unpinned_host", "ä".encode()]
            if kind == "bytes":
                texts.append(self.random.randbytes(9))
            return field(number, self.random.choice(texts))
        value = self._number(name)
        if kind in ("fixed64", "sfixed64"):
            return fixed64(number, value)
        if kind in ("fixed32", "float"):
            return varint(number << 3 | 5) + struct.pack("<I", value & 0xFFFFFFFF)
        return field(number, value & 1 if kind == "bool" else value)

    def _number(self, name: str) -> int:
        chance = self.random.random()
        if name == "version_number":
            return 0
        if name == "host_buffer_handle":
            return self.upload()
        if "handle" in name and chance < 0.95:
            return self.random.randint(1, self.HANDLES)
        if "device" in name and chance < 0.9:
            return self.random.randrange(self._devices)
        if name == "dims" and chance < 0.8:
            return self.random.choice((1, 2, 4, 4, 8))
        if name == "kind":
            return 11 if chance < 0.6 else self.random.randint(-1, 40)
        return self.random.choice(self.NUMBERS)

    def _serialized(self) -> bytes:
        name, kind = self.random.choice(list(self.SHARDINGS.items()))
        if self.random.random() < 0.3:
            name, kind = "SingleDeviceSharding", self.SHARDINGS["SingleDeviceSharding"]
        data = self._message(kind, 2)
        if self.random.random() < 0.1:
            data = self.random.randbytes(12)
        name = self.random.choice((name,) * 9 + ("XlaProgram", "XlaCompileOptions"))
        return field(1, b"xla::ifrt::" + name.encode()) + field(2, data)


def read_grammar(text: str) -> dict[str, list[tuple[str, str, str, int]]]:
    """Label, type, name and number of the fields of each message; nested ones by their own name."""
    text = re.sub(r"//[^\n]*", "", text)
    messages: dict[str, list[tuple[str, str, str, int]]] = {}
    open_blocks: list[str | None] = []
    token = re.compile(
        r"message (?P<message>\w+) \{|(?:oneof|service) \w+ \{|(?P<end>\})|"
        r"(?P<label>optional |repeated |)(?P<kind>\w+)\s+(?P<name>\w+) = (?P<number>\d+);"
    )
    for found in token.finditer(text):
        if found["message"]:
            open_blocks.append(found["message"])
            messages[found["message"]] = []
        elif found["end"]:
            open_blocks.pop()
        elif found["kind"]:
            owner = next(name for name in reversed(open_blocks) if name)
            entry = (found["label"].strip(), found["kind"], found["name"], int(found["number"]))
            messages[owner].append(entry)
        else:
            open_blocks.append(None)
    return messages


def talk_nonsense(up: Up, seed: int, requests: int) -> None:
    """Runs one session: valid arrays, then invalid requests."""
    nonsense = Nonsense(seed, devices=4)
    caller, stream, key = begin_session(up)
    with caller:

        def upload(handle: int) -> None:
            told = announce(caller, key, handle, 16)
            caller.send(told, grpc_message(field(1, bytes(16))), end=True)

        asked = {1: "the first request"}
        for op in range(2, requests):
            if op <= nonsense.HANDLES or op % 4 == 0:
                number = nonsense.upload()
                array = nonsense.random.randint(1, nonsense.HANDLES)
                sound = request(op, 4, array_request(11, [4], op % 4, number, array))
                asked[op], uploads, message = "a sound array", [number], sound
            else:
                asked[op], uploads, message = nonsense.request(op)
            for number in uploads:
                upload(number)
            caller.send(stream, grpc_message(message))
            while caller.listen(0):
                continue
        answer = caller.answers[stream]
        deadline = time.monotonic() + 30
        while asked and time.monotonic() < deadline:
            caller.listen(0.1)
            assert not answer.ended, f"the session was ended; seed {seed}"
            for message in answer.messages:
                metadata = dict(fields_of(message))[1]
                assert isinstance(metadata, bytes)
                op = dict(fields_of(metadata))[1]
                assert isinstance(op, bytes)
                asked.pop(int.from_bytes(op, "little"), None)
            answer.messages.clear()
        left = list(asked.items())
        assert not left, f"{len(left)} requests are never answered, first {left[:8]}; seed {seed}"
    until(lambda: not up.overview()["clients"], 1, f"the session is gone; seed {seed}")
    assert up.panics() == [], f"seed {seed}"
    assert all(is_alive(host["process"]) for host in hosts_of(up)), f"seed {seed}"
    assert not any(host["lost"] for host in hosts_of(up)), f"seed {seed}: {hosts_of(up)}"


@pytest.mark.parametrize("seed", range(8))
def test_well_formed_nonsense(own: Up, seed: int) -> None:
    """Whatever a client sends, only that client gets errors."""
    talk_nonsense(own, seed, 300)


def test_after_all_that_a_client_computes(own: Up) -> None:
    check_computes(own)


# Clients that request and do not read


STREAM_WINDOW = 4 << 20
"""Flow-control window that the server grants a stream at first."""


def ask_until_it_blocks(caller: Caller, stream: int, data: bytes, limit: int) -> int:
    """Sends requests as fast as the server reads them, until it reads none for 3 s.

    Returns:
        Number of bytes that were sent.
    """
    sent = 0
    while sent < limit:
        room = min(STREAM_WINDOW + caller.credit[stream], 65535 + caller.credit[0])
        if sent + len(data) > room:
            if not caller.listen(3):
                return sent
            continue
        caller.send(stream, data)
        sent += len(data)
    return sent


def test_a_client_that_takes_no_answers_is_not_listened_to(
    own_runtime: Path, measured: Measured
) -> None:
    """Back-pressure: its requests queue in its own process, not in the controller."""
    ask = request(7, 27, field(2, b"".join(varint(4) for _ in range(8))))
    data = grpc_message(ask) * 256
    with (
        Up("--islands", "1x1x1", runtime=own_runtime) as running,
        contextlib.ExitStack() as stack,
    ):
        check_computes(running)
        before = rss_bytes(running.pid)
        callers = [begin_session(running, 1 << 18) for _ in range(4)]
        for caller, _, _ in callers:
            stack.enter_context(caller)
        sent = [
            ask_until_it_blocks(caller, stream, data, 256 << 20) for caller, stream, _ in callers
        ]
        grown = rss_bytes(running.pid) - before
        measured("most bytes that were taken of a client", max(sent))
        measured("bytes that the controller has grown by", grown)
        assert max(sent) < 64 << 20, "it is still listened to"
        assert grown < 128 << 20
        check_computes(running)


def test_connections_that_open_no_session_are_closed(own: Up) -> None:
    """They time out, whatever they send meanwhile."""
    settings = PREFACE + http2_frame(4, 0, 0, b"")
    opened = []
    for words in (b"", PREFACE[:10], settings, settings + http2_frame(6, 0, 0, bytes(8))):
        opened.append(connect(own, "door"))
        opened[-1].sendall(words)
    began = time.monotonic()
    with Caller(own.port) as caller:
        caller.call(SERVICE + "GetVersion", grpc_message(versions(16, 25)))
        with pytest.raises(ConnectionError):
            list(iter(lambda: caller.listen(20), False))
    for connection in opened:
        with connection:
            assert closes(connection)
    assert 5 < time.monotonic() - began < 25
