"""Floods of connections and of calls: honest clients are served, and the flood is bounded.

Silent connections to the listener for clients and to the data plane are in ``test_hostile.py``.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Measured, Up, client, hosts_of, rss_bytes, said, until
from fuzzing import check_computes
from grpc_client import (
    PREFACE,
    SERVICE,
    begin_session,
    http2_frame,
    prefixed,
)
from test_hostile import count_descriptors
from test_remote_clients import SUM, Gated, on

from fairway.cluster import admin
from fairway.cluster.remotes import RemoteCluster
from fairway.errors import NotRunningError

FLOODING = Path(__file__).with_name("flooding.py")
GROWTH_MAX = 512 << 20
"""Most growth of the controller's memory in a flood, in bytes."""
OPEN_MAX = 2048 + 200
"""Most open descriptors: connections without a proof (``UNPROVED_MAX`` in ``crates/transport``),
and the controller's own."""
OWN_MAX = 200
"""Most descriptors of a controller's own."""
AGAIN_S = 5.0
"""How long a flood without end lasts."""
GOODBYE = re.compile(rb"\0\0.\x07\0\0\0\0\0.{4}\0\0\0\x0b", re.DOTALL)
"""A GOAWAY frame with the reason ENHANCE_YOUR_CALM; see RFC 9113."""
HELLO_OF_TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32)
EVICTED = "evicted by many others before it had proved a token"


@pytest.fixture
def gated(own_runtime: Path) -> Iterator[Gated]:
    """A cluster with a gateway, of one test alone."""
    with Gated(own_runtime) as up:
        yield up


class Crowd:
    """Connections of another process, as long as the context lasts.

    Args:
        address: of the listener: ``HOST:PORT``, or the path of a Unix socket.
        count: number of connections.
        options: others of ``flooding.py``.

    Attributes:
        counts: connections that were ``begun``, found the backlog ``full``, and were ``closed`` by
            the listener; known once the context has ended.
    """

    def __init__(self, address: str | Path, count: int, *options: str) -> None:
        self._command = [sys.executable, str(FLOODING), str(address), str(count), *options]
        self.counts: dict[str, int] = {}

    def __enter__(self) -> Crowd:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "begun\n"
        return self

    def __exit__(self, *exception: object) -> None:
        output, _ = self._process.communicate(timeout=20)
        self.counts = json.loads(output)


class Peak:
    """Most that the controller's memory has grown while the context lasts, in bytes."""

    def __init__(self, up: Up) -> None:
        self._up = up
        self._over = threading.Event()
        self._before = rss_bytes(up.pid)
        self.growth = 0

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.growth = max(self.growth, rss_bytes(self._up.pid) - self._before)

    def __enter__(self) -> Peak:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()


def crowd_size() -> int:
    """10,000, or what the limit of descriptors leaves."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return min(10_000, hard - 1_000)


def admitted(gateway: str, token: str, timeout_s: float) -> tuple[RemoteCluster, float, int]:
    """A connection by the gateway, the seconds until it was admitted, and the tries that failed.

    Raises:
        NotRunningError: it is not admitted in time.
    """
    began_s, failed = time.monotonic(), 0
    while True:
        try:
            remote = RemoteCluster(gateway, token)
        except NotRunningError:
            failed += 1
            if time.monotonic() - began_s > timeout_s:
                raise
        else:
            return remote, time.monotonic() - began_s, failed


@pytest.mark.alone
@pytest.mark.parametrize("again", [(), ("--again",)], ids=["once", "again"])
def test_silent_connections_to_the_gateway(
    gated: Gated, measured: Measured, again: tuple[str, ...]
) -> None:
    """Ten thousand; and fewer, but without end. A peer with a token is admitted meanwhile."""
    count, token = 4_000 if again else crowd_size(), gated.token("client")
    with Peak(gated) as peak, Crowd(gated.gateway, count, *again) as crowd:
        remote, took_s, failed = admitted(gated.gateway, token, 15)
        with remote:
            found = client(None, SUM, 60, environment=on(remote))
        assert said(found.stdout, "sum") == {"of": 2016.0}
        assert count_descriptors(gated.pid) < 2 * OPEN_MAX, "evicted ones are closed"
        if again:
            time.sleep(AGAIN_S)
        else:
            until(lambda: count_descriptors(gated.pid) < OWN_MAX, 25, "silent ones are closed")
    measured("a peer is admitted among silent connections (s)", took_s)
    measured("its tries that failed", failed)
    measured("growth of the controller's memory (MiB)", peak.growth / (1 << 20))
    measured("connections that were closed", crowd.counts["closed"])
    assert took_s < 10
    # Of those that are begun at once, many are still in the kernel: they were never accepted.
    assert crowd.counts["closed"] >= (3 * count if again else OPEN_MAX)
    assert peak.growth < GROWTH_MAX
    assert EVICTED in gated.errors.read_text()
    remote, took_s, _ = admitted(gated.gateway, token, 10)
    remote.close()
    measured("a peer is admitted afterwards (s)", took_s)
    assert took_s < 5
    assert gated.panics() == []


@pytest.mark.alone
def test_a_crowd_at_the_admin_socket(own_runtime: Path, measured: Measured) -> None:
    """Of the same user, whom nothing keeps from it: it waits its turn, and the owner too."""
    with Up("--islands", "1x1x1", runtime=own_runtime) as up:
        where, count = up.directory / "admin.sock", crowd_size()
        with Peak(up) as peak, Crowd(where, count) as crowd:
            began_s = time.monotonic()
            answered = until(lambda: _answers(up), 25, "the owner is answered")
            check_computes(up)
            left_s = 12 - (time.monotonic() - began_s)
            time.sleep(max(0.0, left_s))
        measured("the owner's answer in a crowd (s)", answered)
        measured("growth of the controller's memory (MiB)", peak.growth / (1 << 20))
        assert crowd.counts["begun"] + crowd.counts["full"] == count
        assert crowd.counts["full"] > count / 2, "the backlog is short"
        assert crowd.counts["closed"] == crowd.counts["begun"], "silence ends after a second"
        assert peak.growth < GROWTH_MAX
        assert up.overview()["process"] == up.pid


def _answers(up: Up) -> bool:
    with contextlib.suppress(NotRunningError):
        return bool(up.overview()["process"] == up.pid)
    return False


@pytest.mark.alone
@pytest.mark.parametrize("again", [(), ("--again",)], ids=["once", "again"])
def test_a_crowd_at_the_control_socket(
    own_runtime: Path, measured: Measured, again: tuple[str, ...]
) -> None:
    """Hosts that are up stay up, and another one joins meanwhile."""
    with Up("--islands", "1x1x1", runtime=own_runtime) as up:
        where, count = up.directory / "control.sock", 4_000 if again else crowd_size()
        with Peak(up) as peak, Crowd(where, count, *again):
            measured("a client computes (s)", check_computes(up))
            descriptors = count_descriptors(up.pid)
            began_s = time.monotonic()
            admin.add_island(up.directory, admin.AddIsland(1, 1))
            took_s = time.monotonic() - began_s
        measured("a host joins in a crowd (s)", took_s)
        measured("growth of the controller's memory (MiB)", peak.growth / (1 << 20))
        assert descriptors < 2 * OPEN_MAX, "those without a hello are bounded"
        assert peak.growth < GROWTH_MAX
        assert took_s < 20
        assert len(hosts_of(up)) == 2
        check_computes(up)


@pytest.mark.parametrize("where", ["gateway", "listener"])
def test_connections_that_send_a_byte_a_second(
    gated: Gated, measured: Measured, where: str
) -> None:
    """More than may be without a proof or a session: the deadline is for all that they send."""
    count = 600
    address = {"gateway": gated.gateway, "listener": f"127.0.0.1:{gated.port}"}[where]
    text = {"gateway": HELLO_OF_TLS, "listener": PREFACE}[where]
    token = gated.token("client")
    with Peak(gated) as peak, Crowd(address, count, "--drip", text.hex()) as crowd:
        began_s = time.monotonic()
        if where == "gateway":
            remote, took_s, _ = admitted(gated.gateway, token, 15)
            remote.close()
        else:
            caller, _, _ = begin_session(gated)
            caller.close()
            took_s = time.monotonic() - began_s
        # Beyond the limit they wait for others to be closed, and then have 10 s, too.
        time.sleep(max(0.0, 22 - (time.monotonic() - began_s)))
    measured("a peer is served among slow ones (s)", took_s)
    measured("growth of the controller's memory (MiB)", peak.growth / (1 << 20))
    assert took_s < 15
    assert crowd.counts["closed"] == count
    assert peak.growth < GROWTH_MAX


# Calls that are reset at once


STREAMS = 100_000
AT_A_TIME = 1_000


def headers_block() -> bytes:
    """The headers of a call, as HPACK without a table."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": SERVICE + "GetVersion",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    texts = [text.encode() for pair in fields.items() for text in pair]
    coded = [prefixed(len(text), 7) + text for text in texts]
    return b"".join(b"\0" + coded[at] + coded[at + 1] for at in range(0, len(coded), 2))


class Resets:
    """Calls that are begun and reset at once (CVE-2023-44487), in a thread, on new connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._block = headers_block()
        self.streams = self.connections = self.goodbyes = 0

    def run(self) -> None:
        """Begins and resets as many calls as are to be."""
        while self.streams < STREAMS:
            self.connections += 1
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self._port), 10) as connection,
            ):
                connection.sendall(PREFACE + http2_frame(4, 0, 0, b""))
                self._reset_until_closed(connection)

    def _reset_until_closed(self, connection: socket.socket) -> None:
        number = 1
        received = b""
        while self.streams < STREAMS:
            calls = range(number, number + 2 * AT_A_TIME, 2)
            number += 2 * AT_A_TIME
            self.streams += AT_A_TIME
            frames = (
                http2_frame(1, 5, call, self._block) + http2_frame(3, 0, call, struct.pack(">I", 8))
                for call in calls
            )
            try:
                connection.sendall(b"".join(frames))
                connection.settimeout(0.0)
                with contextlib.suppress(BlockingIOError):
                    while part := connection.recv(1 << 16):
                        received += part
                    return
            finally:
                self.goodbyes += len(GOODBYE.findall(received))
                received = b""
                connection.settimeout(10.0)


@pytest.mark.alone
@pytest.mark.parametrize("where", ["listener", "gateway"])
def test_calls_that_are_reset_at_once(gated: Gated, measured: Measured, where: str) -> None:
    with gated.remote("client") as remote:
        port = {"listener": gated.port, "gateway": int(remote.target.rpartition(":")[2])}[where]
        resets = Resets(port)
        flood = threading.Thread(target=resets.run)
        with Peak(gated) as peak:
            began_s = time.monotonic()
            flood.start()
            took_s = check_computes(gated)
            flood.join(25)
            measured("flood (s)", time.monotonic() - began_s)
        measured("connections on which they were made", resets.connections)
        measured("connections that the server has ended with a reason", resets.goodbyes)
        measured("a client computes meanwhile (s)", took_s)
        measured("growth of the controller's memory (MiB)", peak.growth / (1 << 20))
        assert not flood.is_alive()
        assert resets.streams == STREAMS
        assert STREAMS / resets.connections < 10 * AT_A_TIME, "connections that reset are closed"
        assert resets.goodbyes > 0
        assert peak.growth < GROWTH_MAX
        check_computes(gated)
        found = client(None, SUM, 60, environment=on(remote))
        assert said(found.stdout, "sum") == {"of": 2016.0}
