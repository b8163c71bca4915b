"""Floods a listener with connections, as a process of its own: what `test_floods.py` starts.

    python flooding.py ADDRESS COUNT [--drip TEXT] [--again]

``ADDRESS`` is ``HOST:PORT`` or the path of a Unix socket. It begins ``COUNT`` connections, prints a
line once they are begun, and keeps them open until its standard input ends; then it prints what has
become of them, as JSON. It sends nothing, or with ``--drip`` one byte of a text (in hexadecimal)
each second. With ``--again`` it begins a new connection for each that was closed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import resource
import selectors
import socket
import sys
import time

DRIP_S = 1.0
BURST, PAUSE_S = 256, 0.02
"""Connections with ``--again`` that are begun at once, and the pause after them. Those that a full
backlog does not take are open for the peer that began them, and unknown to the listener.
"""


class Flood:
    """The connections, and what has become of them.

    Args:
        address: of the listener.
        drip: bytes of which each connection sends one a second.
        again: whether new connections take the place of closed ones.
    """

    def __init__(self, address: str, drip: bytes, again: bool) -> None:
        self._address = address
        self._drip = drip
        self._again = again
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._sent: dict[socket.socket, int] = {}
        self.counts = {"begun": 0, "full": 0, "closed": 0}
        """Connections that were begun, found the backlog full, and were closed by the listener."""

    def begin(self) -> None:
        """Begins a connection, without waiting for it."""
        is_unix = self._address.startswith("/")
        connection = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
        connection.setblocking(False)
        host, _, port = self._address.rpartition(":")
        error = connection.connect_ex(self._address if is_unix else (host, int(port)))
        if error not in (0, errno.EINPROGRESS):
            connection.close()
            self.counts["full"] += 1
            return
        self.counts["begun"] += 1
        self._sent[connection] = 0
        self._selector.register(connection, selectors.EVENT_READ)

    def run(self) -> None:
        """Keeps the connections until standard input ends."""
        next_s, is_over = time.monotonic() + DRIP_S, False
        while not is_over:
            for key, _ in self._selector.select(0.2):
                if isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)
                else:
                    is_over = True
            if self._drip and time.monotonic() > next_s:
                next_s += DRIP_S
                self._send_a_byte_each()

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if connection.recv(1 << 16):
                return
        self._selector.unregister(connection)
        del self._sent[connection]
        connection.close()
        self.counts["closed"] += 1
        if self._again:
            self.begin()

    def _send_a_byte_each(self) -> None:
        for connection, sent in list(self._sent.items()):
            with contextlib.suppress(OSError):
                connection.send(self._drip[sent : sent + 1])
                self._sent[connection] += 1


def main() -> None:
    """Floods a listener until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("count", type=int)
    parser.add_argument("--drip", type=bytes.fromhex, default=b"")
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flood = Flood(given.address, given.drip, given.again)
    for number in range(1, given.count + 1):
        flood.begin()
        if given.again and number % BURST == 0:
            time.sleep(PAUSE_S)
    print("begun", flush=True)
    flood.run()
    print(json.dumps(flood.counts), flush=True)


if __name__ == "__main__":
    main()
