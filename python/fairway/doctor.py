"""Checks of this machine and installation: what Fairway needs, what was found, and what to do.

The command line shows the findings (:mod:`fairway.cli.doctor`). This module imports neither the
compiled library nor JAX, so that it works where one of them is what is wrong; whatever may crash,
hang or hold a GPU runs in a process of its own with a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib.metadata
import itertools
import mmap
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fairway import __version__
from fairway.cluster.registry import new_directory
from fairway.errors import FairwayError

__all__ = ["Finding", "Level", "examine", "report"]

PROCESS_S_MAX = 60.0
"""Deadline of a process that loads a library or asks for GPUs."""
HOST_BYTES = 200 << 20
"""Memory of a host process before it computes anything. Assumed: as measured on Linux."""
SHARED_BYTES = 1 << 30
"""Shared memory below which a warning is given. Assumed: a few arrays of 100 MB in transit."""
DESCRIPTORS = (256, 4096)
"""Limits of open files below which a start fails, and below which a warning is given. Assumed: two
for each pair of hosts, and some for each client."""
RESOLUTION_S = 1e-5
"""Coarsest clock with which times of computations can be measured."""
YEAR_2025_S = 1_735_689_600
RELEASE = re.compile(r"\d+(?:\.\d+)*")
RULE = re.compile(r"(>=|<=|==|!=|<|>)\s*(\d+(?:\.\d+)*)")


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: what was checked.
        level: whether Fairway works with it.
        found: what was found.
        advice: what to do; empty if nothing needs to be done.
    """

    name: str
    level: Level
    found: str
    advice: str = ""


def examine(progress: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """Runs all checks, in a fixed order.

    Args:
        progress: is called with the name of each check before it runs.
    """
    found = []
    for name, check in CHECKS.items():
        progress(name)
        try:
            found.append(check(name))
        except OSError as error:
            found.append(Finding(name, Level.PROBLEM, f"cannot be checked: {error}", ""))
    return found


def report(findings: list[Finding]) -> Iterator[str]:
    """Formats findings as lines of text, with a summary as the last one."""
    width = max(len(one.name) for one in findings)
    for one in findings:
        yield f"{one.level.value:<8} {one.name:<{width}}  {one.found}"
        if one.advice:
            yield f"{'':<8} {'':<{width}}  -> {one.advice}"
    counts = {level: sum(one.level == level for one in findings) for level in Level}
    problems, warnings = counts[Level.PROBLEM], counts[Level.WARNING]
    plural = {True: "", False: "s"}
    yield (
        f"{problems} problem{plural[problems == 1]}, {warnings} warning{plural[warnings == 1]}, "
        f"{counts[Level.OK]} ok"
    )


def allows(rules: str, version: str) -> bool:
    """Checks a version against rules such as ``>=0.10.2,!=0.11.1,<0.13``.

    >>> allows(">=0.10.2,!=0.11.1,<0.13", "0.12.0.1"), allows(">=3.11", "3.9.1")
    (True, False)
    """
    own = _release(version)
    compare: dict[str, Callable[[tuple[int, ...]], bool]] = {
        ">=": lambda other: own >= other,
        "<=": lambda other: own <= other,
        "==": lambda other: own == other,
        "!=": lambda other: own != other,
        "<": lambda other: own < other,
        ">": lambda other: own > other,
    }
    return all(compare[sign](_release(other)) for sign, other in RULE.findall(rules))


def _release(version: str) -> tuple[int, ...]:
    found = RELEASE.match(version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _rules_of(distribution: str) -> str:
    """Returns the versions of a distribution that Fairway's metadata allows; empty for any."""
    try:
        needed = importlib.metadata.requires("fairway") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    for line in needed:
        if re.split(r"[^A-Za-z0-9_-]", line, maxsplit=1)[0] == distribution:
            return ",".join("".join(rule) for rule in RULE.findall(line.partition(";")[0]))
    return ""


def _in_process(code: str, changes: dict[str, str] | None = None) -> tuple[bool, str]:
    """Runs Python code in a process; returns whether it succeeded, and the last line it wrote."""
    hidden = ("JAX_PLATFORMS", "JAX_BACKEND_TARGET")  # no client of islands
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return _run([sys.executable, "-c", code], environment | (changes or {}))


def _run(command: list[str], environment: dict[str, str] | None = None) -> tuple[bool, str]:
    try:
        ended = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROCESS_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {PROCESS_S_MAX:.0f} s"
    said = ended.stdout.strip() if ended.returncode == 0 else ended.stderr.strip() or ended.stdout
    last = said.strip().splitlines()[-1] if said.strip() else ""
    if ended.returncode < 0:
        last = f"the process ended by signal {-ended.returncode} {last}".strip()
    return ended.returncode == 0, said if ended.returncode == 0 else last


def _python(name: str) -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    found = f"{version} at {sys.executable}"
    rules = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        rules = importlib.metadata.metadata("fairway")["Requires-Python"] or ""
    if allows(rules, version):
        return Finding(name, Level.OK, found)
    return Finding(
        name, Level.PROBLEM, f"{found}; expected {rules}", "install Fairway for a newer Python"
    )


def _library(name: str) -> Finding:
    reinstall = "install fairway again; in a checkout, `make build`"
    loaded, said = _in_process("import fairway._native; print(fairway._native.__file__)")
    if not loaded:
        return Finding(name, Level.PROBLEM, f"fairway._native does not load: {said}", reinstall)
    installed = _version_of("fairway")
    if installed != __version__:
        return Finding(
            name,
            Level.PROBLEM,
            f"it was built for version {installed}, the Python files are of {__version__}",
            reinstall,
        )
    return Finding(name, Level.OK, f"{installed} at {said}")


def _jax(name: str) -> Finding:
    versions = {one: _version_of(one) for one in ("jax", "jaxlib")}
    missing = [one for one, version in versions.items() if version is None]
    if missing:
        return Finding(
            name,
            Level.WARNING,
            f"{' and '.join(missing)} not installed; only planning, simulation and PyTorch work",
            "pip install 'fairway[jax]'",
        )
    found = ", ".join(f"{one} {version}" for one, version in versions.items())
    for one, version in versions.items():
        rules = _rules_of(one)
        if not allows(rules, version or ""):
            advice = f"pip install '{one}{rules}'"
            return Finding(name, Level.PROBLEM, f"{found}; expected {one} {rules}", advice)
    loaded, said = _in_process("import jax; print(jax.__version__)", {"JAX_PLATFORMS": "cpu"})
    if not loaded:
        advice = "pip install --force-reinstall 'fairway[jax]'"
        return Finding(name, Level.PROBLEM, f"{found}; it does not import: {said}", advice)
    return Finding(name, Level.OK, found)


def _tcp(name: str) -> Finding:
    advice = "bring the loopback interface up (`ip link set lo up`), and permit it in the firewall"
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(2.0)
            _exchange(listener, socket.create_connection(listener.getsockname(), timeout=2.0))
    except OSError as error:
        return Finding(name, Level.PROBLEM, f"127.0.0.1 cannot be reached: {error}", advice)
    return Finding(name, Level.OK, "127.0.0.1 accepts connections")


def _exchange(listener: socket.socket, connection: socket.socket) -> None:
    """Sends a byte from a connection to its listener.

    Raises:
        OSError: it does not arrive within the timeouts.
    """
    with connection, listener.accept()[0] as accepted:
        accepted.settimeout(2.0)
        connection.sendall(b"x")
        if accepted.recv(1) != b"x":
            raise OSError("the connection was closed before its data arrived")


def _runtime_folder(name: str) -> Finding:
    given = os.environ.get("XDG_RUNTIME_DIR")
    advice = "set XDG_RUNTIME_DIR to a folder of your own with a short path, such as /run/user/UID"
    try:
        directory = new_directory()
    except FairwayError as error:
        return Finding(name, Level.PROBLEM, str(error), "")
    except OSError as error:
        reason = error.strerror or str(error)
        where = error.filename or given
        return Finding(name, Level.PROBLEM, f"cannot create {where}: {reason}", advice)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / "doctor.sock"))
            listener.listen()
            listener.settimeout(2.0)
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(2.0)
            connection.connect(str(directory / "doctor.sock"))
            _exchange(listener, connection)
    except OSError as error:
        found = f"{directory.parent} holds no Unix sockets: {error}"
        return Finding(name, Level.PROBLEM, found, advice)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    parent = directory.parent
    status = parent.stat()
    mode = status.st_mode & 0o777
    return Finding(name, Level.OK, f"{parent}, mode {mode:o}, owner {status.st_uid}")


def _shared_memory(name: str) -> Finding:
    folder = Path("/dev/shm")
    advice = "mount a larger tmpfs there; for Docker, --shm-size=8g or --ipc=host"
    if not folder.is_dir():
        return Finding(name, Level.PROBLEM, f"there is no {folder}", advice)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as page:
                page[0] = 1
    except OSError as error:
        found = f"{folder} cannot be written: {error.strerror}"
        return Finding(name, Level.PROBLEM, found, advice)
    status = os.statvfs(folder)
    size, free = (blocks * status.f_frsize for blocks in (status.f_blocks, status.f_bavail))
    found = f"{_size(free)} of {_size(size)} free"
    if free < SHARED_BYTES:
        found += f"; large arrays between hosts need more than {_size(SHARED_BYTES)}"
        return Finding(name, Level.WARNING, found, advice)
    return Finding(name, Level.OK, found)


def _descriptors(name: str) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    shown = ["unlimited" if limit == infinite else f"{limit:,}" for limit in (soft, hard)]
    found = f"{shown[0]}, which the controller raises to {shown[1]}"
    advice = "`ulimit -Hn 65536` as root, or LimitNOFILE= of the service"
    if hard != infinite and hard < DESCRIPTORS[0]:
        found += f"; islands need {DESCRIPTORS[0]} at least"
        return Finding(name, Level.PROBLEM, found, advice)
    if hard != infinite and hard < DESCRIPTORS[1]:
        return Finding(name, Level.WARNING, f"{found}; enough for few hosts and clients", advice)
    return Finding(name, Level.OK, found)


def _memory(name: str) -> Finding:
    lines = Path("/proc/meminfo").read_text().splitlines()
    known = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines}
    total, free = known["MemTotal"], known["MemAvailable"]
    with contextlib.suppress(OSError, ValueError):  # "max" without a limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, free = min(total, limit), min(free, limit - used)
    hosts = free // HOST_BYTES
    found = f"{_size(free)} of {_size(total)} available, room for {hosts:,} hosts before any data"
    if hosts < 1:
        return Finding(name, Level.PROBLEM, found, "end other programs, or raise the limit")
    if hosts < 4:
        return Finding(name, Level.WARNING, found, "start few hosts: --islands 1x1x4")
    return Finding(name, Level.OK, found)


def _cores(name: str) -> Finding:
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} of {os.cpu_count()} usable"
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        found += f", limited to the time of {quota / period:.1f}"
    if cores < 2:
        advice = "client, controller and hosts share one core; times that are measured mean little"
        return Finding(name, Level.WARNING, found, advice)
    return Finding(name, Level.OK, found)


def _clock(name: str) -> Finding:
    readings = [time.monotonic_ns() for _ in range(10_000)]
    steps = [after - before for before, after in itertools.pairwise(readings)]
    if min(steps) < 0:
        found = f"the monotonic clock went back by {-min(steps):,} ns"
        return Finding(name, Level.PROBLEM, found, "repair the machine's clock source")
    finest_ns = min((step for step in steps if step), default=0)
    found = f"monotonic, steps of {finest_ns:,} ns"
    if not finest_ns or finest_ns > RESOLUTION_S * 1e9:
        found = f"the monotonic clock has steps of {finest_ns:,} ns"
        return Finding(name, Level.WARNING, found, "times of computations will be inexact")
    if time.time() < YEAR_2025_S:
        found += f"; the date is {time.strftime('%Y-%m-%d')}"
        return Finding(name, Level.WARNING, found, "set the date")
    return Finding(name, Level.OK, found)


def _gpus(name: str) -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding(name, Level.OK, "none that nvidia-smi shows; islands are of CPU devices")
    ask = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    works, said = _run(ask)
    if not works:
        advice = "repair the driver, or leave platform = 'cpu'"
        return Finding(name, Level.WARNING, f"nvidia-smi fails: {said}", advice)
    shown = "; ".join(said.splitlines())
    # Without a first allocation that would take most of the device from other processes.
    quiet = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    works, said = _in_process("import jax; print(len(jax.devices()))", quiet)
    if not works:
        found = f"{shown}, which JAX cannot use: {said}"
        advice = "install JAX's plugin for it: pip install 'jax[cuda13]', of jax's own version"
        return Finding(name, Level.WARNING, found, advice)
    return Finding(name, Level.OK, f"{shown}; JAX sees {said.splitlines()[-1]}")


def _plots(name: str) -> Finding:
    version = _version_of("matplotlib")
    if version is None:
        found = "not installed; --plot and `fairway reproduce` need it"
        return Finding(name, Level.OK, found, "if you want plots: pip install 'fairway[plots]'")
    return Finding(name, Level.OK, version)


def _torch(name: str) -> Finding:
    version, rules = _version_of("torch"), _rules_of("torch")
    if version is None:
        found = "not installed; the backend of torch.distributed needs it"
        return Finding(name, Level.OK, found, "if you use PyTorch: pip install 'fairway[torch]'")
    if not allows(rules, version):
        found = f"{version}; expected {rules}"
        return Finding(name, Level.WARNING, found, f"pip install 'torch{rules}'")
    return Finding(name, Level.OK, version)


def _size(count: int) -> str:
    value, units = float(max(0, count)), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:,.0f} {units[0]}" if value >= 10 else f"{value:,.1f} {units[0]}"


CHECKS: dict[str, Callable[[str], Finding]] = {
    "Python": _python,
    "compiled library": _library,
    "JAX": _jax,
    "loopback TCP": _tcp,
    "runtime folder": _runtime_folder,
    "shared memory": _shared_memory,
    "open files": _descriptors,
    "memory": _memory,
    "cores": _cores,
    "clock": _clock,
    "GPUs": _gpus,
    "matplotlib": _plots,
    "PyTorch": _torch,
}
"""Checks by name, in the order in which they are run and shown."""
