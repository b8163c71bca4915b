"""The protocol in Python agrees with its definition in Rust, by the golden bytes of both."""

from __future__ import annotations

import itertools
import socket
import struct
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.host import messages
from fairway.host.frames import RECEIVE_BYTES, CommandReceiver
from fairway.host.reporter import Reporter

pytestmark = pytest.mark.fast
GOLDEN = Path(__file__).parent.parent / "crates/protocol/tests/golden"


def golden(name: str) -> list[tuple[str, bytes]]:
    """Returns the name and the bytes of each sample in a file."""
    lines = (line.split(" ") for line in (GOLDEN / name).read_text().splitlines())
    return [(message, bytes.fromhex(data)) for message, data in lines]


@pytest.mark.parametrize(
    ("name", "union"),
    [
        ("commands.hex", messages.Command),
        ("reports.hex", messages.Report),
        ("replies.hex", messages.HostReply),
        ("hello.hex", messages.Hello),
    ],
)
def test_messages_are_read_and_written_as_in_rust(name: str, union: Any) -> None:
    decoder = msgspec.msgpack.Decoder(union)
    seen = set()
    for message, data in golden(name):
        value = decoder.decode(data)
        assert type(value).__name__ == message
        assert msgspec.msgpack.encode(value) == data, message
        seen.add(type(value))
    assert seen == set(get_args(union) or [union])


# Round trips


def values(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Returns a strategy for the values of a type."""
    match kind:
        case msgspec.inspect.IntType():
            return st.integers(0, (1 << 64) - 1)
        case msgspec.inspect.UnionType(types):
            return st.one_of([values(one) for one in types])
        case msgspec.inspect.ListType(item):
            if isinstance(item, msgspec.inspect.UnionType):  # the steps of a program are commands
                return st.just([messages.Free([1]), messages.ReportEnd()])
            return st.lists(values(item), max_size=3)
        case msgspec.inspect.TupleType(items):
            return st.tuples(*map(values, items))
        case msgspec.inspect.EnumType(cls):
            return st.sampled_from(cls)
        case msgspec.inspect.StructType(cls, fields):
            return st.builds(cls, *(values(field.type) for field in fields))
    simple: dict[type, st.SearchStrategy[Any]] = {
        msgspec.inspect.BoolType: st.booleans(),
        msgspec.inspect.FloatType: st.floats(allow_nan=False),
        msgspec.inspect.StrType: st.text(),
        msgspec.inspect.BytesType: st.binary(),
        msgspec.inspect.NoneType: st.none(),
    }
    return simple[type(kind)]


@pytest.mark.parametrize("union", [messages.Command, messages.Report, messages.Hello])
def test_every_message_survives_a_round_trip(union: Any) -> None:
    decoder = msgspec.msgpack.Decoder(union)

    @settings(deadline=None)
    @given(values(msgspec.inspect.type_info(union)))
    def check(message: Any) -> None:
        assert decoder.decode(msgspec.msgpack.encode(message)) == message

    check()


# Frames


def frame(*commands: messages.Command) -> bytes:
    packed = msgspec.msgpack.encode(commands)
    return struct.pack("<I", len(packed)) + packed


def sizes(longest: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, longest), min_size=1, max_size=4)


@settings(deadline=None, max_examples=50)
@given(
    st.one_of(
        st.tuples(sizes(300), st.integers(1, 99)),
        st.tuples(sizes(3 * RECEIVE_BYTES), st.integers(9_999, RECEIVE_BYTES)),
    )
)
def test_frames_of_any_size_arrive_in_parts_of_any_size(case: tuple[list[int], int]) -> None:
    sizes, part = case
    commands = [messages.ReadProgram(at, bytes(size)) for at, size in enumerate(sizes)]
    stream = b"".join([frame(messages.ReportEnd(), command) for command in commands])
    receiver, received = CommandReceiver(Parts(stream, part)), []  # type: ignore[arg-type]
    while (frames := receiver.receive()) is not None:
        received += itertools.chain.from_iterable(frames)
    assert received[::2] == [messages.ReportEnd()] * len(sizes)
    assert received[1::2] == commands


class Parts:
    """A connection from which bytes arrive in parts of one size."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = memoryview(data)
        self._size = size

    def recv_into(self, buffer: memoryview) -> int:
        assert len(buffer), "a buffer without room ends the connection"
        part = self._data[: min(self._size, len(buffer))]
        buffer[: len(part)] = part
        self._data = self._data[len(part) :]
        return len(part)


def test_frames_over_the_limit_and_cut_ones_are_refused() -> None:
    receiver = CommandReceiver(Parts(b"\xff\xff\xff\xff", 4))  # type: ignore[arg-type]
    frames = receiver.receive()
    assert frames is not None
    with pytest.raises(ConnectionError, match="a frame of 4294967295 bytes; at most"):
        list(frames)
    receiver = CommandReceiver(Parts(frame(messages.ReportEnd())[:-1], 100))  # type: ignore[arg-type]
    frames = receiver.receive()
    assert frames is not None
    assert list(frames) == []
    with pytest.raises(ConnectionError, match="inside a frame, after 6 bytes"):
        receiver.receive()


def test_reports_follow_their_length() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reporter = Reporter(ours)
        reporter.send(messages.OrderBroken("a message that is longer than the next one"))
        reporter.send(messages.Finished(5))
        data = theirs.recv(1000)
    (length,) = struct.unpack_from("<I", data)
    assert data[4 + length :] == b"\x03\0\0\0\x92\x01\x05"


# What fails with a command


def test_a_command_fails_the_answer_or_the_buffers_that_its_definition_names() -> None:
    spec = messages.HostArray("float32", None, [])
    assert messages.ticket_of(messages.Read(7, 1, 0, None)) == 7
    assert messages.made_by(messages.Read(7, 1, 0, None)) == []
    assert messages.ticket_of(messages.Copy(1, 2, spec)) is None
    assert messages.made_by(messages.Copy(1, 2, spec)) == [2]
    assert messages.made_by(messages.RunExchange(1, [], 5, [spec] * 3, 0, 1)) == [5, 6, 7]
