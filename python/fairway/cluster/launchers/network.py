"""A network namespace for the hosts of one island.

XLA's collectives between CPU processes (gloo) listen on TCP and accept any connection: another user
of the machine could read and forge what hosts exchange. In a namespace of their own, only processes
that the owner put there can connect. All other communication of a host uses Unix sockets in the
file system, which a network namespace does not separate.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

from fairway.errors import FairwayError

__all__ = ["NoNamespaceError", "PrivateNetwork"]

READY_S_MAX = 10.0

HOLDER = """
import ctypes, fcntl, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(1, 9)
user, group, kinds = os.geteuid(), os.getegid(), "net"
if libc.unshare(0x40000000):
    if libc.unshare(0x50000000):
        raise SystemExit(os.strerror(ctypes.get_errno()))
    for name, text in (
        ("uid_map", f"{user} {user} 1"), ("setgroups", "deny"), ("gid_map", f"{group} {group} 1")
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    kinds = "user,net"
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH22x", b"lo", 1))
print(kinds, flush=True)
sys.stdin.read()
"""
"""Creates the namespaces (unshare: CLONE_NEWNET, or with CLONE_NEWUSER), brings the loopback
interface up (SIOCSIFFLAGS), and keeps them until its standard input is closed or its parent
ends."""


class NoNamespaceError(FairwayError):
    """The kernel does not allow this user a network namespace."""


class PrivateNetwork:
    """A namespace that lasts until it is closed and no process is in it.

    Raises:
        NoNamespaceError: the kernel refuses, as on some distributions for all users but root.
    """

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        kinds = self._holder.stdout.readline().strip()
        if not kinds:
            _, reason = self._holder.communicate(timeout=READY_S_MAX)
            raise NoNamespaceError(
                reason.strip().splitlines()[-1] if reason.strip() else "it ended"
            )
        self.paths = tuple(f"/proc/{self._holder.pid}/ns/{kind}" for kind in kinds.split(","))
        """Files of the namespaces to enter, in this order."""

    def close(self) -> None:
        """Releases the namespace, which ends with the last process in it."""
        with contextlib.suppress(BrokenPipeError):
            self._holder.communicate(timeout=READY_S_MAX)
