"""A gRPC client of the IFRT proxy that can break the protocol, and the encoding of its messages."""

from __future__ import annotations

import base64
import collections
import dataclasses
import select
import socket
import struct
from collections.abc import Iterator

from conftest import Up, connect_unix

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SERVICE = "/xla.ifrt.proxy.GrpcIfrtService/"


def connect(up: Up, where: str) -> socket.socket:
    """Connects to the gRPC listener or to one of the sockets in the run's directory."""
    if where == "listener":
        return socket.create_connection(("127.0.0.1", up.port), 10)
    return connect_unix(up.directory / where)


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
