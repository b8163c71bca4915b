"""Starts one host process: ``python -m fairway.host`` with its settings on standard input.

The settings hold a token, so they are passed through a pipe and not through arguments, which every
user of the machine can read.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairway._native import DataPlane
    from fairway.host.backend import Backend
    from fairway.host.messages import HostInfo

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """The settings that a host needs to start.

    Attributes:
        host: its number over all islands.
        rank: its rank in its island.
        hosts: number of hosts of its island.
        devices: number of its devices.
        first_device: number of its first GPU among those of the machine.
        platform: ``cpu`` or ``cuda``.
        coordinator: address of the island's coordination service; None for a lone host.
        address: where XLA's collectives listen for the island's other hosts.
        control: path of the controller's socket for hosts.
        data: address of its end of the data plane.
        channels: its channels onto the network between islands: a numeric address of this machine,
            and bits per second in each direction.
        team_channels: channels between hosts of several islands: the number of each, 0 if there are
            none, and its rate in bits per second, None if unknown.
        encrypt: whether streams to other hosts are encrypted.
        is_near: whether hosts communicate by shared memory of one machine.
        token: proof that it belongs to this run.
        timeout_s: watchdog deadline of the run; the host itself does not use it.
        xla_flags: flags for XLA.
        device_memory: bytes of each device that may be used; None leaves it to the platform.
        compile_cache: bytes of compiled programs that are kept on disk.
        trace: file for records of computations and transfers; None records none.
        input_modules: prefixes of the modules that input functions may come from; None allows all
            that lie under ``input_path``.
        input_path: folders in which they are searched, before others.
        custom_calls: targets of custom calls that programs may make besides JAX's own.
        namespaces: files of the namespaces to enter, in this order.
        island: number of its island, by which its output is found.
    """

    host: int
    rank: int
    hosts: int
    devices: int
    first_device: int
    platform: str
    coordinator: str | None
    address: str
    control: str
    data: str
    token: str
    timeout_s: float
    xla_flags: str
    channels: tuple[tuple[str, float], ...] = ()
    team_channels: tuple[tuple[int, float | None], ...] = ((0, None),)
    encrypt: bool = False
    is_near: bool = False
    device_memory: int | None = None
    compile_cache: int = 0
    trace: str | None = None
    input_modules: tuple[str, ...] | None = None
    input_path: tuple[str, ...] = ()
    custom_calls: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    island: int = 0


def tcp_address(numeric: str) -> str:
    """Returns the data-plane address of any free port of a numeric address."""
    return f"tcp:[{numeric}]:0" if ":" in numeric else f"tcp:{numeric}:0"


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_namespaces(paths: Sequence[str]) -> None:
    """Moves this process into namespaces (setns(2)); it must be single-threaded.

    Raises:
        OSError: they do not exist any more, or belong to another user.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(descriptor, 0):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), path)
        finally:
            os.close(descriptor)
    # Entering a user namespace resets both for the process.
    libc.prctl(PR_SET_DUMPABLE, 1)
    die_with_parent()


def described(settings: HostSettings, backend: Backend, plane: DataPlane) -> HostInfo:
    """Returns what this host says of itself when it joins."""
    from fairway.host import messages
    from fairway.host.backend import JAXLIB_VERSION

    return messages.HostInfo(
        process=os.getpid(),
        data_address=plane.address,
        channels=[
            messages.HostChannel(address, rate)
            for address, (_, rate) in zip(plane.channels, settings.channels, strict=True)
        ],
        jaxlib=JAXLIB_VERSION,
        platform=backend.platform,
        platform_version=backend.version,
        device_kind=backend.device_kind,
        memories=backend.memory_kinds(),
        devices=len(backend.local_devices),
        device_memory=settings.device_memory or backend.device_memory() or None,
    )


def main() -> None:
    """Reads the settings and serves until the controller disconnects."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent may have blocked signals
    settings = HostSettings(**json.loads(sys.stdin.readline()))
    if settings.namespaces:
        enter_namespaces(settings.namespaces)
    os.environ["XLA_FLAGS"] = settings.xla_flags
    os.environ["JAX_PLATFORMS"] = settings.platform
    if settings.device_memory is not None:  # the controller enforces the limit
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    from fairway import _native
    from fairway.host import backend as backends
    from fairway.host import executor, messages
    from fairway.host.checking import Checker
    from fairway.host.local import LocalHost
    from fairway.host.modules import AllowedModules
    from fairway.host.reporter import Reporter
    from fairway.host.stored import StoredPrograms, default_folder
    from fairway.host.teams import Teams
    from fairway.host.trace import Trace

    checker = Checker(settings.custom_calls)  # forks, so before there are threads and devices
    backend = backends.Backend(
        settings.platform,
        settings.devices,
        backends.IslandMembership(
            settings.rank, settings.hosts, settings.coordinator, settings.address
        ),
        settings.first_device,
    )
    backend.warm_up()
    listen = [tcp_address(address) for address, _ in settings.channels]
    plane = _native.DataPlane(
        settings.host, settings.data, listen, settings.token, settings.encrypt
    )
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(settings.control)
    hello = messages.Hello(settings.token, settings.host, described(settings, backend, plane))
    trace = Trace(Path(settings.trace)) if settings.trace else None
    sys.path[:0] = settings.input_path
    allowed = AllowedModules(settings.input_modules, settings.input_path, backend.import_jax)
    teams = Teams(plane, settings.host, settings.team_channels, settings.is_near)
    reporter = Reporter(connection)
    reporter.send(hello)
    stored = StoredPrograms(default_folder(), settings.compile_cache, backend.kind())
    host = LocalHost(settings.host, backend, plane, reporter, stored, trace)
    executor.serve(executor.Executor(host, teams, connection, allowed, checker), host)


if __name__ == "__main__":
    main()
