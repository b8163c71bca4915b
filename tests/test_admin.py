"""The admin socket: its messages, what it answers to malformed ones, and who waits for whom."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from conftest import Up, connect_unix

from fairway.cluster import admin
from fairway.cluster.admin import (
    AddIsland,
    AdminAnswer,
    AdminRequest,
    AllocateSlice,
    Caller,
    CreateToken,
    Done,
    GetOverview,
    IslandAdded,
    ListTokens,
    LogsRead,
    OverviewAnswer,
    ReadLogs,
    Refused,
    ReleaseSlice,
    RemoveIsland,
    RevokeToken,
    SliceAllocated,
    TokenCreated,
    TokenInfo,
    TokensListed,
)
from fairway.cluster.listener import CONNECTIONS_MAX, WAIT_S_MAX, AdminSocket
from fairway.cluster.logs import LogRecord, Logs
from fairway.cluster.reports import Refusals, Reports
from fairway.errors import IslandError, NotRunningError, SliceError

REQUESTS: dict[str, AdminRequest] = {
    '{"type":"overview"}': GetOverview(),
    '{"type":"allocate_slice","client":1,"shape":[2,2],"island":null,"memory_bytes":4096}': (
        AllocateSlice(1, [2, 2], None, 4096)
    ),
    '{"type":"release_slice","client":1,"devices":[4,5]}': ReleaseSlice(1, [4, 5]),
    '{"type":"add_island","hosts":1,"devices":4}': AddIsland(1, 4),
    '{"type":"remove_island","island":3,"force":true}': RemoveIsland(3, force=True),
    '{"type":"create_token","role":"client","lifetime_s":60.0,"weight":2,"priority":-1}': (
        CreateToken("client", 60.0, 2, -1)
    ),
    '{"type":"list_tokens"}': ListTokens(),
    '{"type":"revoke_token","token":"00ff"}': RevokeToken("00ff"),
    '{"type":"read_logs","after":7,"island":null,"host":3}': ReadLogs(7, None, 3),
}
ANSWERS: dict[str, AdminAnswer] = {
    '{"type":"overview","overview":{"cluster":null}}': OverviewAnswer({"cluster": None}),
    '{"type":"slice_allocated","devices":[0,1],"island":2}': SliceAllocated([0, 1], 2),
    '{"type":"island_added","island":3}': IslandAdded(3),
    '{"type":"token_created","token":"fairway-host-..."}': TokenCreated("fairway-host-..."),
    '{"type":"tokens_listed","tokens":[{"id":"00ff","role":"host","weight":1,"priority":0,'
    '"expires_s":null}]}': TokensListed([TokenInfo("00ff", "host", 1, 0, None)]),
    '{"type":"logs_read","records":[{"number":1,"time_s":2.5,"island":0,"host":3,"text":"a"}]}': (
        LogsRead([LogRecord(1, 2.5, 0, 3, "a")])
    ),
    '{"type":"done"}': Done(),
    '{"type":"refused","error":"there is none"}': Refused("there is none"),
}


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path is short enough for a socket."""
    return tmp_path_factory.mktemp("a")


@pytest.mark.parametrize("text", REQUESTS)
def test_requests_have_this_form(text: str) -> None:
    assert msgspec.json.encode(REQUESTS[text]).decode() == text
    assert admin.read_request(text.encode()) == REQUESTS[text]


@pytest.mark.parametrize("text", ANSWERS)
def test_answers_have_this_form(text: str) -> None:
    assert msgspec.json.encode(ANSWERS[text]).decode() == text
    assert msgspec.json.decode(text, type=AdminAnswer) == ANSWERS[text]


def exchange(path: Path, data: bytes) -> bytes:
    """Sends bytes, and returns what is answered; nothing if the connection is reset."""
    with connect_unix(path) as connection:
        try:
            connection.sendall(data)
            return connection.makefile("rb").read()
        except (BrokenPipeError, ConnectionResetError):  # it was not read to its end
            return b""


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"nonsense\n", "malformed"),
        (b"\xff\xfe\n", "malformed"),
        (b"{}\n", "missing required field `type`"),
        (b"[1]\n", "Expected `object`, got `array`"),
        (b'{"type": "stop"}\n', "Invalid value 'stop'"),
        (b'{"type": "allocate_slice", "client": 1}\n', "missing required field `shape`"),
        (b'{"type": "allocate_slice", "client": 1, "shape": [-1]}\n', "`int` >= 0"),
        (b'{"type": "allocate_slice", "client": 1, "shape": [99999999999]}\n', "`int` <= "),
        (b'{"type": "allocate_slice", "client": 999999, "shape": [2]}\n', "is not connected"),
        (b'{"type": "release_slice", "client": 1, "devices": ["x"]}\n', "Expected `int`"),
        (b'{"type": "add_island", "hosts": 1, "devices": 1000000}\n', "devices"),
        (b'{"type": "add_island", "hosts": true, "devices": 1}\n', "Expected `int`"),
        (b'{"type": "remove_island", "island": 77}\n', "77"),
        (b'{"type": "create_token", "role": "king"}\n', "Invalid enum value"),
        (b'{"type": "create_token", "role": "host", "lifetime_s": -1}\n', "> 0"),
        (b'{"type": "create_token", "role": "host"}\n', "has no gateway"),
        (b'{"type": "read_logs", "after": -1}\n', "`int` >= 0"),
        (b"[" * 60_000 + b"\n", "cannot be understood"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(up: Up, data: bytes, says: str) -> None:
    answer = json.loads(exchange(admin.socket_path(up.directory), data))
    assert answer["type"] == "refused"
    assert says in answer["error"], answer
    assert up.overview()["islands"]


def test_requests_that_are_too_long_or_late_are_dropped(up: Up) -> None:
    path = admin.socket_path(up.directory)
    assert exchange(path, b"[" * 70_000) == b""
    began = time.monotonic()
    with connect_unix(path) as connection:  # a byte now and then does not hold it
        while time.monotonic() - began < 10 * WAIT_S_MAX:
            try:
                connection.sendall(b" ")
            except OSError:
                break
            time.sleep(WAIT_S_MAX / 8)
    assert time.monotonic() - began < 4 * WAIT_S_MAX
    assert up.overview()["islands"]


class Slow:
    """Answers overviews at once, and islands when it is allowed to."""

    def __init__(self) -> None:
        self.allowed = threading.Event()

    def answer(self, request: AdminRequest, caller: Caller) -> AdminAnswer:
        """Answers a request."""
        assert caller == Caller(), "it comes from this machine"
        match request:
            case GetOverview():
                return OverviewAnswer({"hosts": 1})
            case AddIsland(hosts=hosts):
                assert self.allowed.wait(30)
                if hosts == 13:
                    raise IslandError("no island has 13 hosts")
                return IslandAdded(hosts)
            case AllocateSlice():
                return Done()
        raise SliceError("it holds none")


@pytest.fixture
def slow(directory: Path) -> Iterator[Slow]:
    """An admin socket of its own."""
    made = Slow()
    reports = Reports(Logs())
    listener = AdminSocket(admin.socket_path(directory), made.answer, Refusals(reports))
    yield made
    made.allowed.set()
    listener.close()
    reports.close()


def test_a_request_that_takes_long_holds_up_no_other(directory: Path, slow: Slow) -> None:
    added: list[int] = []
    adding = threading.Thread(
        target=lambda: added.append(admin.add_island(directory, AddIsland(5, 1)))
    )
    adding.start()
    for _ in range(3 * CONNECTIONS_MAX):
        assert admin.overview(directory) == {"hosts": 1}
    assert not added
    slow.allowed.set()
    adding.join(10)
    assert added == [5]


def test_more_connections_than_are_served_wait(directory: Path, slow: Slow) -> None:
    """Silent ones, of which each is dropped after a second; none of the others is refused."""
    silent: list[socket.socket] = []
    try:
        silent += [connect_unix(admin.socket_path(directory)) for _ in range(2 * CONNECTIONS_MAX)]
        with pytest.raises(NotRunningError):  # it ends in time, though it is not even accepted
            admin._ask(directory, GetOverview(), OverviewAnswer, SliceError, WAIT_S_MAX / 4)
        began = time.monotonic()
        added: list[int] = []
        slow.allowed.set()
        waiting = [
            threading.Thread(
                target=lambda one=one: added.append(admin.add_island(directory, AddIsland(one, 1)))
            )
            for one in range(1, 9)
        ]
        for one in waiting:
            one.start()
        for one in waiting:
            one.join(20)
        assert sorted(added) == list(range(1, 9))
        assert time.monotonic() - began < 8 * WAIT_S_MAX
    finally:
        for connection in silent:
            connection.close()


def test_refusals_are_the_errors_of_what_was_asked_for(directory: Path, slow: Slow) -> None:
    slow.allowed.set()
    with pytest.raises(IslandError, match="no island has 13 hosts"):
        admin.add_island(directory, AddIsland(13, 1))
    with pytest.raises(SliceError, match="it holds none"):
        admin.release_slice(directory, ReleaseSlice(1, [0]))
    with pytest.raises(NotRunningError, match="with Done"):
        admin.allocate_slice(directory, AllocateSlice(1, [1]))


def test_without_a_controller_there_is_no_answer(directory: Path) -> None:
    with pytest.raises(NotRunningError, match="the controller does not answer"):
        admin.overview(directory)
