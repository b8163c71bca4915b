"""Machines for tests: network namespaces with an ssh server each, or with daemons of an engine."""

from __future__ import annotations

import dataclasses
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import wires
from conftest import Background, ip, until

SSHD = "/usr/sbin/sshd"


def have_ssh() -> bool:
    """Whether there is an ssh server here, and ``ssh``."""
    return Path(SSHD).exists() and shutil.which("ssh") is not None


class OnLinks:
    """Machines that are network namespaces, each with one link."""

    def cut(self, name: str, *, down: bool = True) -> None:
        """Takes a machine's link down, or up again."""
        ip("link", "set", f"{name}e0", "down" if down else "up")

    def mute(self, name: str, *, down: bool = True) -> None:
        """Drops all that a machine sends, or no more; it still receives."""
        rate = ["tbf", "rate", "8bit", "burst", "10", "limit", "10"] if down else ["pfifo_fast"]
        words = ["tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *rate]
        subprocess.run(words, check=True)


@dataclasses.dataclass
class Machines(OnLinks):
    """Machines with an ssh server: namespaces with a name, a network and temporary folders of their
    own.

    Attributes:
        names: as ``ssh`` takes them.
        addresses: of each.
        controller: address of this machine on their network.
        ssh: the command that reaches them.
    """

    names: list[str]
    addresses: list[str]
    controller: str
    ssh: str

    def processes(self, name: str) -> list[int]:
        """Processes of Fairway on a machine."""
        listed = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
        )
        found = []
        for process in map(int, listed.stdout.split()):
            try:
                command = Path(f"/proc/{process}/cmdline").read_bytes()
            except OSError:
                continue
            if b"fairway" in command and b"sshd" not in command and b"sh\0-c" not in command:
                found.append(process)
        return found


@contextmanager
def with_ssh(
    folder: Path, count: int, environment: Mapping[str, str] | None = None
) -> Iterator[Machines]:
    """Makes machines; skips the test where that is not possible.

    Args:
        folder: for keys, settings and what the machines keep.
        count: of machines.
        environment: of what ``ssh`` runs there; no value has a space in it.
    """
    if not wires.can_join() or not have_ssh():
        pytest.skip("needs root, ip, tc, ssh and sshd")
    for name in ("host", "user"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(keygen, check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    with ExitStack() as stack:
        try:
            places = stack.enter_context(wires.joined(count, (None,)))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no namespaces can be made here: {error}")
        names = [place.name.format(rank=0) for place in places]
        addresses = [place.addresses[0].format(rank=0) for place in places]
        for name, address in zip(names, addresses, strict=True):
            stack.enter_context(_serving(folder, name, address, environment or {}))
        config = folder / "config"
        config.write_text(
            "".join(
                f"Host {name}\n  HostName {address}\n"
                for name, address in zip(names, addresses, strict=True)
            )
            + f"Host *\n  User root\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
            "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        ssh = shlex.join(["ssh", "-F", str(config)])
        subnet = addresses[0].rpartition(".")[0]
        made = Machines(names, addresses, f"{subnet}.254", ssh)
        until(lambda: _answers(made), 20, "the ssh servers answer")
        yield made


def _answers(machines: Machines) -> bool:
    words = shlex.split(machines.ssh)
    return all(
        subprocess.run([*words, name, "true"], capture_output=True).returncode == 0
        for name in machines.names
    )


@contextmanager
def _serving(
    folder: Path, name: str, address: str, environment: Mapping[str, str]
) -> Iterator[None]:
    own = folder / name
    own.mkdir()
    config = own / "sshd_config"
    variables = {**environment, "TMPDIR": str(own)}
    config.write_text(
        f"ListenAddress {address}:22\nHostKey {folder}/host\n"
        f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
        "MaxStartups 100\nPermitRootLogin yes\n"
        f"SetEnv {' '.join(f'{key}={value}' for key, value in variables.items())}\n"
    )
    script = 'hostname "$0"; exec "$@"'
    command = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "sh", "-c", script]
    server = subprocess.Popen(
        [*command, name, SSHD, "-D", "-e", "-f", str(config)], stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        server.kill()
        server.wait()


class Program(Background):
    """A command that runs in the background of the test; its outputs are merged."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.began = time.monotonic()
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **(environment or {})}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(words, env=environment, text=True, bufsize=1, **pipes)
        self.seen = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def read(self, mark: str, timeout_s: float) -> str:
        """Returns the next line with a mark in it."""
        deadline = time.monotonic() + timeout_s
        with suppress(queue.Empty):
            while line := self._lines.get(timeout=max(0.0, deadline - time.monotonic())):
                self.seen.append(line)
                if mark in line:
                    return line
        raise AssertionError(f"no line with {mark!r} in {timeout_s} s:\n{self.text()}")

    def interrupt(self) -> float:
        """Ends it by Ctrl-C, and returns the time that this takes."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        assert self.end(20) == 130, self.text()
        return time.monotonic() - began

    def end(self, timeout_s: float) -> int:
        """Waits for its end, and returns its status."""
        self._reader.join(timeout_s)
        with suppress(queue.Empty):
            while True:
                self.seen.append(self._lines.get_nowait() or "")
        assert not self._reader.is_alive(), f"not ended after {timeout_s} s:\n{self.text()}"
        return self.process.wait(5)

    def close(self) -> None:
        """Ends it as a user does; by force if it does not end then."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        super().close()


@dataclasses.dataclass
class Nodes(OnLinks):
    """Machines that an engine's daemons run on.

    Attributes:
        addresses: of each, by name.
        controller: address of this machine on their network.
        folder: of the engine; its path is short enough for sockets in it.
        environment: variables of programs that use the engine.
    """

    addresses: dict[str, str]
    controller: str
    folder: Path
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = list(self.addresses)
        self._daemons: list[subprocess.Popen[bytes]] = []

    def on(self, name: str, *words: str) -> list[str]:
        """Returns the command that runs another one on a machine."""
        # Not by `ip netns exec`: it remounts /sys, where slurmd then finds no control groups.
        enter = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount"]
        script = 'hostname "$0"; mount -t tmpfs none /sys/fs/cgroup; exec "$@"'
        return [*enter, "sh", "-c", script, name, *words]

    def serve(self, name: str, words: Sequence[str]) -> Path:
        """Starts a daemon, which stays in the foreground; returns the file with what it prints."""
        log = self.folder / f"{name}.out"
        with log.open("wb") as output:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            environment = {**os.environ, **self.environment}
            started = subprocess.Popen(words, env=environment, start_new_session=True, **pipes)
        self._daemons.append(started)
        return log

    def close(self) -> None:
        """Ends daemons, and all that runs on machines."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        time.sleep(1)
        for name in self.names:
            self.kill(name)
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait(10)
        until(lambda: not any(map(self.all_processes, self.names)), 10, "nothing runs there")

    def all_processes(self, name: str) -> list[int]:
        """Processes on a machine."""
        return list(map(int, ip("netns", "pids", name).split()))

    def processes(self, name: str) -> list[int]:
        """Processes of Fairway on a machine."""
        found = []
        for process in self.all_processes(name):
            with suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                if any(word == b"fairway" or word.startswith(b"fairway.") for word in words):
                    found.append(process)
        return found

    def place(self, process: int) -> str:
        """Returns the machine on which a process runs."""
        return next(name for name in self.names if process in self.all_processes(name))

    def kill(self, name: str) -> None:
        """Kills all that runs on a machine."""
        for process in self.all_processes(name):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@contextmanager
def networked(kind: type[Any], count: int) -> Iterator[Any]:
    """Makes machines; skips the test where that is not possible."""
    if not wires.can_join():
        pytest.skip("machines need root, ip and tc")
    with ExitStack() as stack:
        try:
            places = stack.enter_context(wires.joined(count, (None,)))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no namespaces can be made here: {error}")
        folder = tempfile.TemporaryDirectory(prefix="e-", ignore_cleanup_errors=True)
        path = Path(stack.enter_context(folder))
        path.chmod(0o755)
        addresses = {one.name.format(rank=0): one.addresses[0].format(rank=0) for one in places}
        nodes = kind(addresses, places[0].addresses[0].rpartition(".")[0] + ".254", path)
        stack.callback(nodes.close)
        yield nodes


RAY = Path(sys.executable).with_name("ray")
LOOK = """
import json, sys, ray
from ray._private.state import actors

ray.init(sys.argv[1], log_to_driver=False, logging_level="error")
for line in sys.stdin:
    found = [actor["State"] for actor in actors().values()]
    groups = [group["state"] for group in ray.util.placement_group_table().values()]
    live = [len(found) - found.count("DEAD"), len(groups) - groups.count("REMOVED")]
    free, alive = ray.available_resources().get("CPU", 0), sum(one["Alive"] for one in ray.nodes())
    said = {"actors": live[0], "groups": live[1], "free": int(free), "nodes": alive}
    print("found", json.dumps(said), flush=True)
"""
"""Tells what there is in a Ray cluster, for each line that it reads."""


class Ray(Nodes):
    """A Ray cluster of machines with one CPU each; programs that use it run on the first."""

    looker: Program
    slots = (1, 1)
    """CPUs of the first machine, and of each other one."""
    start_s = 90.0
    """Time within which a machine has started."""

    @property
    def address(self) -> str:
        """Address of the cluster."""
        return f"{self.addresses[self.names[0]]}:6379"

    @property
    def inside(self) -> list[str]:
        """Prefix of a program that uses it."""
        return self.on(self.names[0])

    def join(self, name: str) -> None:
        """Starts Ray on a machine."""
        own, is_first = [f"--address={self.address}"], name == self.names[0]
        if is_first:
            own = ["--head", "--port=6379", "--include-dashboard=false"]
        rest = [f"--node-ip-address={self.addresses[name]}", "--block"]
        rest += [f"--num-cpus={self.slots[0 if is_first else 1]}"]
        rest += [f"--temp-dir={self.folder}/{name}", "--object-store-memory=80000000"]
        words = self.on(name, str(RAY), "start", *own, *rest, "--disable-usage-stats")
        log = self.serve(name, words)
        until(
            lambda: "runtime started" in log.read_text(), self.start_s, f"Ray has started on {name}"
        )

    def look(self) -> dict[str, int]:
        """Returns how many actors, groups, free CPUs and nodes there are."""
        self.looker.tell("")
        return self.looker.hear("found", 30)

    def has_nodes(self, count: int) -> None:
        """Waits until Ray has this number of nodes."""
        until(lambda: time.sleep(0.5) or self.look()["nodes"] == count, 90, f"{count} nodes")

    def is_clear(self) -> bool:
        """Whether nothing is left, and all CPUs are free."""
        time.sleep(0.2)
        count = len(self.names)
        clear = {"actors": 0, "groups": 0, "free": count, "nodes": count}
        return not any(map(self.processes, self.names)) and self.look() == clear
