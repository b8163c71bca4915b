"""Parses clients' programs in isolated processes.

jaxlib's readers of bytecode trust their input: a flipped bit corrupts the heap of the process
that reads it, sometimes long before a failure shows. Each program is therefore parsed by
a process of its own, and the host itself then reads what that process wrote,
not what the client sent. The results are cached.
"""

from __future__ import annotations

import collections
import ctypes
import enum
import hashlib
import io
import os
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from jaxlib.mlir import ir

from fairway import mpmd
from fairway.host.backend import JAXLIB_VERSION, Backend, UnreadableError
from fairway.host.partition import NotSeparableError, partition
from fairway.host.screening import RefusedError, screen

__all__ = ["CheckKind", "Checker", "MalformedError"]

HEADER = struct.Struct("<BQ")
REMEMBERED_BYTES = 64 << 20
"""Size of the cache of checked programs, as rewritten bytecode."""
TIME_S = 3.0
"""Limit on the processor time for parsing a small program, which takes about 10 ms."""
BYTES_A_SECOND = 100e3
"""Bytes of a program per further second of that limit; an idle core parses 20 times as many."""
PARTITIONING = 10
"""Processor time of partitioning a program over islands, in that of parsing it."""
TIME_MAX_S = 300.0
"""Upper limit on the processor time for parsing any program."""
WAITS_S = 60.0
"""Minimum of the wall-clock timeout for parsing a program."""
BUSY = 6
"""Wall-clock time allowed per second of processor time, as processors may be busy."""
MEMORY_BYTES = 8 << 30
"""Address space that parsing may use, in addition to 20 times the program's size."""
PR_SET_PDEATHSIG = 1
REFUSED = "INVALID_ARGUMENT: the program cannot be read"
IFRT_REFUSED = (
    "FAILED_PRECONDITION: the program cannot be read as IFRT IR, which has no versions: client and "
    f"hosts need the same jaxlib, and this host has {JAXLIB_VERSION}"
)


class CheckKind(enum.IntEnum):
    """Format of a program."""

    ARTIFACT = 0
    """A portable artifact of StableHLO."""
    IFRT_IR = 1
    """Bytecode of IFRT IR."""
    SPANNING = 2
    """A portable artifact over several islands, after the number of devices and the island of each,
    as 32-bit integers."""


class MalformedError(Exception):
    """A program that cannot be parsed; the text is ``CODE_NAME: message``."""


class Checker:
    """Parses programs in other processes.

    It forks them from a process that was itself forked from this one, and so must be made while
    this process has no other threads that hold locks.

    Attributes:
        custom_calls: targets that programs may call besides those that are known.

    Args:
        custom_calls: the same.
    """

    def __init__(self, custom_calls: Collection[str] = ()) -> None:
        self.custom_calls = frozenset(custom_calls)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process = os.fork()
        if process == 0:
            ours.close()
            _serve(theirs, custom_calls)
        theirs.close()
        self._control = ours
        self._lock = threading.Lock()
        self._remembered: collections.OrderedDict[bytes, bytes] = collections.OrderedDict()
        self._bytes = 0

    def check(self, kind: CheckKind, program: bytes) -> bytes:
        """Parses and verifies a program; O(its size), or only a hash of it if it is cached.

        Returns:
            The same program as MLIR bytecode, written by the process that parsed it; one over
            several islands as :class:`fairway.host.partition.Partitioned`, in MessagePack.

        Raises:
            MalformedError: it cannot be parsed, is invalid, or crashes the process that parses it.
        """
        key = bytes([kind]) + hashlib.sha256(program).digest()
        with self._lock:
            if key in self._remembered:
                self._remembered.move_to_end(key)
                return self._remembered[key]
        read = self._read(kind, program)
        with self._lock:
            if key not in self._remembered and len(read) <= REMEMBERED_BYTES:
                self._remembered[key] = read
                self._bytes += len(read)
            while self._bytes > REMEMBERED_BYTES:
                _, forgotten = self._remembered.popitem(last=False)
                self._bytes -= len(forgotten)
        return read

    def _read(self, kind: CheckKind, program: bytes) -> bytes:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours:
            with theirs, self._lock:
                socket.send_fds(self._control, [bytes([kind])], [theirs.fileno()])
            limit_s = max(WAITS_S, BUSY * time_limit_s(len(program), kind))
            ours.settimeout(limit_s)
            try:
                ours.sendall(HEADER.pack(kind, len(program)))
                ours.sendall(program)
                ours.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: ours.recv(1 << 20), b""))
            except TimeoutError:
                raise MalformedError(f"{REFUSED} in {limit_s:.0f} s") from None
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
        if not answer:
            raise MalformedError(
                f"{REFUSED}: it ends the process that reads it for jaxlib {JAXLIB_VERSION}, as "
                "damaged bytecode does; nothing else is affected"
            )
        if answer[0]:
            raise MalformedError(answer[1:].decode(errors="replace"))
        return answer[1:]


def time_limit_s(length: int, kind: CheckKind = CheckKind.ARTIFACT) -> int:
    """Returns the limit on processor time, in seconds, for a program of ``length`` bytes."""
    work = PARTITIONING if kind is CheckKind.SPANNING else 1
    return int(min(work * (TIME_S + length / BYTES_A_SECOND), TIME_MAX_S))


def _serve(control: socket.socket, custom_calls: Collection[str]) -> NoReturn:
    """Forks a process for each program, until the host exits; parses none itself."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
        _close_others(control.fileno())
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        knows_ifrt = False
        while True:
            kind, files, _, _ = socket.recv_fds(control, 1, 1)
            if not kind:
                os._exit(0)
            if kind[0] == CheckKind.IFRT_IR and not knows_ifrt:
                mpmd.context()  # loading the library takes long, and is done once
                knows_ifrt = True
            if os.fork() == 0:
                control.close()
                _read_one(socket.socket(fileno=files[0]), custom_calls)
            os.close(files[0])
    finally:
        os._exit(1)


def _close_others(kept: int) -> None:
    """Closes inherited descriptors except the standard streams."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            try:
                os.close(int(name))
            except OSError:
                continue  # the descriptor of the listing itself


def _read_one(connection: socket.socket, custom_calls: Collection[str]) -> NoReturn:
    """Parses one program and writes it back as bytecode."""
    try:
        with connection.makefile("rb") as stream:
            kind, length = HEADER.unpack(stream.read(HEADER.size))
            program = stream.read(length)
        _limit(length, CheckKind(kind))
        try:
            answer = b"\0" + written_anew(CheckKind(kind), program, custom_calls)
        except (UnreadableError, RefusedError, NotSeparableError) as error:
            answer = b"\1" + str(error).encode()
        except (ValueError, ir.MLIRError) as error:
            reason = IFRT_REFUSED if kind == CheckKind.IFRT_IR else REFUSED
            last = (str(error).splitlines() or ["no reason is given"])[-1]
            answer = b"\1" + f"{reason} ({last[:2000]})".encode()
        connection.sendall(answer)
        os._exit(0)  # without cleanup, as parsing may have corrupted the heap
    finally:
        os._exit(1)


def _limit(length: int, kind: CheckKind) -> None:
    """Limits the processor time and address space of parsing."""
    _lower(resource.RLIMIT_CPU, time_limit_s(length, kind))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    space = pages * resource.getpagesize() + MEMORY_BYTES + 20 * length
    _lower(resource.RLIMIT_AS, space)


def _lower(kind: int, most: int) -> None:
    """Sets a resource limit, not above the hard limit of the host."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, hard))


def partitioned_anew(program: bytes, custom_calls: Collection[str]) -> bytes:
    """Parses, verifies, screens and partitions a program over several islands."""
    count = int.from_bytes(program[:4], "little")
    islands = struct.unpack_from(f"<{count}I", program, 4)
    module = Backend.parse(program[4 + 4 * count :])
    module.context.enable_multithreading(False)
    if not module.operation.verify():
        raise ValueError("it is not valid")
    with module.context:
        screen(module, custom_calls)
    written = io.BytesIO()  # with the lines of the source
    module.operation.write_bytecode(written)
    module = Backend.load(written.getvalue())  # with the dialects of its passes
    module.context.enable_multithreading(False)
    try:
        return msgspec.msgpack.encode(partition(module, islands))
    except (RefusedError, NotSeparableError):
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise RefusedError(
            "INTERNAL: the program cannot be divided over islands, which is a defect of Fairway "
            f"({type(error).__name__} {str(error)[:500]}, at {where.name}:{where.lineno}); run it "
            "on the devices of one island, and report it"
        ) from error


def written_anew(kind: CheckKind, program: bytes, custom_calls: Collection[str] = ()) -> bytes:
    """Parses, verifies and (StableHLO) screens a program, and writes it as bytecode."""
    if kind is CheckKind.SPANNING:
        return partitioned_anew(program, custom_calls)
    if kind is CheckKind.IFRT_IR:
        context: Any = mpmd.context()
        context.enable_multithreading(False)  # its threads would not survive the fork
        module = ir.Module.parse(program, context)
    else:
        module = Backend.parse(program)
    if not module.operation.verify():
        raise ValueError("it is not valid")
    if kind is CheckKind.ARTIFACT:
        with module.context:
            screen(module, custom_calls)
    written: Any = module.operation.get_asm(binary=True)
    return bytes(written)


assert sys.platform == "linux", "processes are forked, and limited as Linux does"
