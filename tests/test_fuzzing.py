"""Well-formed nonsense, and clients that read no answers or open no session."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Measured, Up, rss_bytes
from fuzzing import check_computes, talk_nonsense, up_for_nonsense
from grpc_client import (
    PREFACE,
    SERVICE,
    Caller,
    begin_session,
    closes,
    connect,
    field,
    grpc_message,
    http2_frame,
    request,
    varint,
    versions,
)


@pytest.fixture(scope="module")
def own(runtime: Path) -> Iterator[Up]:
    with up_for_nonsense(runtime) as running:
        yield running


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
        opened.append(connect(own, "listener"))
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
