"""A bare gRPC stream of 1 MiB messages, each way: worker of ``transfer.py``.

The protocol transfers arrays between a client and the server that way, so this is the upper bound
of any server on this machine.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import Worker, environment_without, serve

CHUNK_BYTES = 1 << 20
UP, DOWN = "/bench/Up", "/bench/Down"

grpc: Any = importlib.import_module("grpc")


def chunks(data: bytes) -> Iterator[bytes]:
    """Yields the bytes as messages."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def collect(messages: Iterator[bytes], size: int) -> bytearray:
    """Concatenates messages in one buffer."""
    whole = bytearray(size)
    at = 0
    for message in messages:
        whole[at : at + len(message)] = message
        at += len(message)
    return whole


class Server:
    """Receives and sends bytes."""

    def __init__(self) -> None:
        self._size = CHUNK_BYTES
        self._data = bytes(self._size)
        self._server = grpc.server(ThreadPoolExecutor(2))

    def start(self) -> int:
        """Listens; returns the port."""
        methods = {
            "Up": grpc.stream_unary_rpc_method_handler(self._up),
            "Down": grpc.unary_stream_rpc_method_handler(lambda *_: chunks(self._data)),
        }
        handler = grpc.method_handlers_generic_handler("bench", methods)
        self._server.add_generic_rpc_handlers((handler,))
        port = int(self._server.add_insecure_port("127.0.0.1:0"))
        self._server.start()
        return port

    def prepare(self, size: int) -> None:
        """Makes the bytes to download."""
        self._size = size
        self._data = bytes(size)

    def _up(self, messages: Iterator[bytes], _: Any) -> bytes:
        collect(messages, self._size)
        return b""


class Client:
    """Drives a server in another process."""

    def __init__(self, python: str) -> None:
        command = [python, "transfer_grpc.py", "--server"]
        self._server = Worker(command, environment_without())
        channel = grpc.insecure_channel(f"127.0.0.1:{self._server.ask(do='start')}")
        self._up = channel.stream_unary(UP)
        self._down = channel.unary_stream(DOWN)

    def prepare_host(self, size: int) -> None:
        """Makes the bytes to upload."""
        self._server.ask(do="prepare", size=size)
        self._data = bytes(size)

    def up(self, count: int) -> float:
        """Uploads ``count`` times; returns the seconds."""
        began = time.perf_counter()
        for _ in range(count):
            self._up(chunks(self._data))
        return time.perf_counter() - began

    def down(self, count: int) -> float:
        """Downloads ``count`` times; returns the seconds."""
        began = time.perf_counter()
        for _ in range(count):
            collect(self._down(b""), len(self._data))
        return time.perf_counter() - began


def main() -> None:
    """Serves requests as the client or the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--python", help="what to start the server with")
    given = parser.parse_args()
    runner = Server() if given.server else Client(given.python)
    serve(lambda do, **values: getattr(runner, do)(**values))


if __name__ == "__main__":
    main()
