"""Two processes that transfer bytes by the simplest means: worker of ``transfer.py``."""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from common import serve

LARGEST_BYTES = 512 << 20
STREAMS = 2
DONE = b"\1"


class SharedMemory:
    """One copy, by the sender, into a segment that stays mapped; the receiver uses it there."""

    def __init__(self) -> None:
        file = os.memfd_create("raw")
        os.ftruncate(file, LARGEST_BYTES)
        self._segment = np.frombuffer(mmap.mmap(file, LARGEST_BYTES), np.uint8)
        self._signal, other = socket.socketpair()
        if os.fork() == 0:
            self._signal.close()
            self._receive(other)
        other.close()

    def prepare(self, size: int) -> None:
        """Makes the bytes to transfer."""
        self._bytes = np.arange(size // 4, dtype=np.float32).view(np.uint8)
        self.across(1)

    def across(self, count: int) -> float:
        """Transfers the bytes ``count`` times; returns the seconds."""
        size = len(self._bytes)
        began = time.perf_counter()
        for _ in range(count):
            np.copyto(self._segment[:size], self._bytes)
            self._signal.sendall(DONE)
            self._signal.recv(1)
        return time.perf_counter() - began

    def _receive(self, signal: socket.socket) -> None:
        while signal.recv(1):
            signal.sendall(DONE)
        os._exit(0)


class Streams:
    """Two TCP streams, each with half of the bytes and a thread at either end."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            self._ours = [socket.create_connection(address) for _ in range(STREAMS)]
            theirs = [listener.accept()[0] for _ in range(STREAMS)]
        if os.fork() == 0:
            for ours in self._ours:
                ours.close()
            _receive_all(theirs)
        for stream in self._ours + theirs:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for their in theirs:
            their.close()
        self._threads = ThreadPoolExecutor(STREAMS)

    def prepare(self, size: int) -> None:
        """Makes the bytes to transfer."""
        array = np.arange(size // 4, dtype=np.float32).view(np.uint8)
        self._parts = [part.data for part in np.split(array, STREAMS)]
        self.across(1)

    def across(self, count: int) -> float:
        """Transfers the bytes ``count`` times; returns the seconds."""
        began = time.perf_counter()
        for _ in range(count):
            list(self._threads.map(_send, self._ours, self._parts))
        return time.perf_counter() - began


def _send(stream: socket.socket, part: memoryview) -> None:
    stream.sendall(len(part).to_bytes(8))
    stream.sendall(part)
    stream.recv(1)


def _receive_all(streams: list[socket.socket]) -> None:
    threads = [threading.Thread(target=_receive, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


def _receive(stream: socket.socket) -> None:
    whole = memoryview(bytearray(LARGEST_BYTES // STREAMS))
    while header := stream.recv(8, socket.MSG_WAITALL):
        rest = whole[: int.from_bytes(header)]
        while rest:
            rest = rest[stream.recv_into(rest) :]
        stream.sendall(DONE)


def main() -> None:
    """Starts the other process and serves requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("means", choices=("memory", "streams"))
    runner = SharedMemory() if parser.parse_args().means == "memory" else Streams()
    serve(lambda do, **values: getattr(runner, do)(**values))


if __name__ == "__main__":
    main()
