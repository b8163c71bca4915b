"""Hosts of an island agree, or the island is refused: software versions, the order of launches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import Begin, Start, hosts_of

from fairway.cluster.launchers.local import LocalHosts
from fairway.cluster.logs import Logs
from fairway.errors import StartError
from fairway.host import messages
from fairway.host.__main__ import HostSettings
from fairway.host.frames import CommandReceiver


@pytest.mark.local("it replaces what starts hosts in the controller's process")
def test_hosts_of_an_island_must_be_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: Start
) -> None:
    """The second host reports another version of jaxlib."""
    (tmp_path / "sitecustomize.py").write_text("import jaxlib\njaxlib.__version__ = '0.9.9'\n")
    begin, given = LocalHosts.start, dict(os.environ)

    def begin_one(hosts: LocalHosts, settings: HostSettings, prefix: tuple[str, ...]) -> None:
        path = str(tmp_path) if settings.host == 1 else given.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", path)
        begin(hosts, settings, prefix)

    monkeypatch.setattr(LocalHosts, "start", begin_one)
    with pytest.raises(StartError) as raised:
        start("1x2x1")
    for part in ("of island 0", "jaxlib is", "0.9.9", "must be alike"):
        assert part in str(raised.value)


class ScriptedController:
    """The controller's end of one real host process, scripted by the test."""

    def __init__(self, directory: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / "control.sock"))
        self._listener.listen(1)
        self._listener.settimeout(30)
        settings = HostSettings(
            host=0,
            rank=0,
            hosts=1,
            devices=1,
            first_device=0,
            platform="cpu",
            coordinator=None,
            address="127.0.0.1",
            control=str(directory / "control.sock"),
            data=f"unix:{directory}/data-0.sock",
            token="secret",
            timeout_s=10.0,
            xla_flags="",
        )
        hosts = LocalHosts(Logs())
        hosts.start(settings)
        self._hosts = hosts
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(30)

    def close(self) -> None:
        self._connection.close()
        self._listener.close()
        self._hosts.close()

    def report(self, kind: Any = messages.Report) -> Any:
        """Returns the host's next report."""
        (length,) = struct.unpack("<I", self._exactly(4))
        return msgspec.msgpack.decode(self._exactly(length), type=kind)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._connection.recv(count - len(data))
            if not part:
                raise ConnectionError("the host is gone")
            data += part
        return data

    def launch(self, sequence: int, previous: int, result: int) -> None:
        """Sends a launch of a program that the host does not have; its result is an error."""
        launch = messages.Launch(
            sequence=sequence,
            previous=previous,
            acknowledge=messages.Acknowledge.NO,
            executable=99,
            args=[],
            first_result=result,
            results=1,
            keep=[],
            completion=None,
            client=1,
        )
        self._connection.sendall(command_frame(launch))

    def check_ready(self, ticket: int, buffer: int) -> None:
        self._connection.sendall(command_frame(messages.CheckReady(ticket, [buffer])))


def command_frame(*commands: messages.Command) -> bytes:
    packed = msgspec.msgpack.encode(commands)
    return struct.pack("<I", len(packed)) + packed


def test_a_host_refuses_launches_out_of_order(own_runtime: Path) -> None:
    controller = ScriptedController(own_runtime)
    try:
        hello = controller.report(messages.Hello)
        assert (hello.token, hello.host) == ("secret", 0)
        controller.launch(1, 0, 100)
        controller.launch(5, 1, 101)  # gaps are numbers of other islands' launches
        controller.check_ready(7, 101)
        failed = controller.report()
        assert isinstance(failed, messages.CommandFailed), "in order, it is carried out"
        assert failed.ticket == 7
        controller.launch(9, 7, 102)
        with contextlib.suppress(BrokenPipeError):  # the host may have ended
            controller.check_ready(8, 102)
        broken = controller.report()
        assert isinstance(broken, messages.OrderBroken)
        assert all(part in broken.message for part in ("launch 9", "launch 7", "launch 5"))
        with pytest.raises(ConnectionError):
            controller.report()
    finally:
        controller.close()


class Swapper:
    """A proxy between one host and the controller; swaps two launches on request."""

    def __init__(self, directory: Path, listen: Path) -> None:
        self.swap = threading.Event()
        self.swapped = threading.Event()
        self._target = directory / "control.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(listen))
        self._listener.listen(1)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._listener:
            host, _ = self._listener.accept()
        controller = socket.socket(socket.AF_UNIX)
        controller.connect(str(self._target))
        with host, controller:
            reports = threading.Thread(target=self._copy, args=(host, controller), daemon=True)
            reports.start()
            with contextlib.suppress(OSError):
                self._commands(controller, host)
            with contextlib.suppress(OSError):
                host.shutdown(socket.SHUT_WR)
            # The host's last output precedes its end.
            reports.join(10)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def _commands(self, source: socket.socket, target: socket.socket) -> None:
        held: messages.Command | None = None
        receiver = CommandReceiver(source)
        while (frames := receiver.receive()) is not None:
            for command in itertools.chain.from_iterable(frames):
                is_launch = isinstance(command, messages.Launch) and self.swap.is_set()
                if is_launch and held is None and not self.swapped.is_set():
                    held = command
                    continue
                swaps = is_launch and held is not None
                if swaps:
                    self.swapped.set()
                target.sendall(command_frame(command))
                if swaps and held is not None:
                    target.sendall(command_frame(held))
                    held = None


@pytest.mark.local("it replaces what starts hosts in the controller's process")
def test_an_island_whose_launches_are_swapped_is_lost(
    monkeypatch: pytest.MonkeyPatch, own_runtime: Path, start: Start, background: Begin
) -> None:
    """Otherwise two hosts of one island would deadlock in each other's collectives."""
    swappers: list[Swapper] = []
    start_host = LocalHosts.start

    def start_behind_swapper(
        hosts: LocalHosts, settings: HostSettings, prefix: tuple[str, ...]
    ) -> None:
        if settings.host == 1:
            path = own_runtime / "swap.sock"
            swappers.append(Swapper(Path(settings.control).parent, path))
            settings = dataclasses.replace(settings, control=str(path))
        start_host(hosts, settings, prefix)

    monkeypatch.setattr(LocalHosts, "start", start_behind_swapper)
    run = start("2x2x1")
    worker = background(
        run,
        """
        sharding = NamedSharding(Mesh(jax.devices()[:2], ("x",)), P("x"))
        x = jax.device_put(np.arange(2, dtype=np.float32), sharding)
        up, down = jax.jit(lambda x: x + x.sum()), jax.jit(lambda x: x - x.max())
        say("ready", value=float(down(up(x)).sum()))
        sys.stdin.readline()
        kind, text = fails(lambda: [jax.block_until_ready(down(up(x))) for _ in range(100)])
        say("failed", kind=kind, text=text)
        other = jax.device_put(np.ones(2), jax.devices()[2])
        say("on", value=float(other.sum()))
        """,
    )
    assert worker.hear("ready") == {"value": -1.0}
    swappers[0].swap.set()
    worker.tell("go")
    failed = worker.hear("failed", 30)
    assert swappers[0].swapped.is_set()
    assert failed["kind"] == "JaxRuntimeError", failed
    for part in ("DATA_LOSS", "host 1 of island 0", "lost their order"):
        assert part in failed["text"], failed
    assert worker.hear("on") == {"value": 2.0}
    assert [bool(host["lost"]) for host in hosts_of(run)] == [True, True, False, False]
