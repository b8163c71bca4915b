"""Fault injection: hosts, clients and the controller are killed or stopped while others work."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import (
    Background,
    Islands,
    Measured,
    Up,
    client,
    hosts_of,
    is_alive,
    rss_bytes,
    said,
    until,
)

from fairway.daemon import Run
from fairway.engines.local import LocalHosts
from fairway.errors import StartError
from fairway.host import messages
from fairway.host.__main__ import HostSettings
from fairway.host.frames import CommandReceiver

Start = Callable[..., Run]
Begin = Callable[[Islands, str], Background]

WORK_ON_ISLAND = """
    island = {island}
    half = len(jax.devices()) // 2
    here = jax.devices()[island * half:][:half]
    there = jax.devices()[(1 - island) * half:][:half]
    sharding = NamedSharding(Mesh(here, ("x",)), P("x"))
    step = jax.jit(lambda x: x * 0.5 + x.sum())
    kept = jax.device_put(np.arange(float(half), dtype=np.float32), sharding)
    jax.block_until_ready(step(kept))
"""

UNTIL_IT_FAILS = (
    WORK_ON_ISLAND
    + """
    say("ready")
    x = kept
    while True:
        try:
            x = jax.block_until_ready(step(x * 0))
        except Exception as error:
            say("failed", at=time.monotonic(), kind=type(error).__name__, text=str(error))
            break
    def moved():
        return np.asarray(jax.device_put(kept, there[0]))
    say("kept", read=fails(lambda: np.asarray(kept)), used=fails(lambda: float((kept + 1).sum())),
        moved=fails(moved), new=fails(lambda: jax.block_until_ready(jax.device_put(1.0, here[0]))),
        compiled=fails(lambda: jax.block_until_ready(jax.jit(lambda x: x - 3)(kept))))
    on = jax.device_put(np.arange(8.0), NamedSharding(Mesh(there, ("x",)), P("x")))
    say("elsewhere", value=float(on.sum()))
"""
)

NEVER_NOTICES = (
    WORK_ON_ISLAND
    + """
    expected = np.arange(half, dtype=np.float32)
    x = kept
    gap = ticks = 0
    last = time.monotonic()
    say("ready")
    while True:
        x = step(x)
        expected = expected * np.float32(0.5) + expected.sum(dtype=np.float32)
        if ticks % 16 == 15:
            np.testing.assert_allclose(np.asarray(x), expected, rtol=1e-4)
            x, expected = kept, np.arange(half, dtype=np.float32)
        ticks += 1
        gap, last = max(gap, time.monotonic() - last), time.monotonic()
        if ticks % 256 == 0:
            say("tick", ticks=ticks, at=last, gap=gap)
            gap = 0
"""
)


def check_loss(worker: Background, names: list[str]) -> float:
    """The worker's error, and every use of arrays there, names the lost host; returns the time."""
    failed = worker.hear("failed", 30)
    assert failed["kind"] == "JaxRuntimeError", failed
    kept = worker.hear("kept", 30)
    texts = {"loop": failed["text"], **{use: text for use, (_, text) in kept.items()}}
    for use, text in texts.items():
        assert text.startswith("DATA_LOSS"), (use, texts)
        for name in names:
            assert name in text, (use, texts)
    assert worker.hear("elsewhere", 30) == {"value": 28.0}
    return float(failed["at"])


@pytest.mark.alone
def test_kill_of_a_host(start: Start, background: Begin, measured: Measured) -> None:
    run = start("2x2x2")
    victims = hosts_of(run)[:2]
    worker = background(run, UNTIL_IT_FAILS.format(island=0))
    bystander = background(run, NEVER_NOTICES.format(island=1))
    worker.hear("ready")
    bystander.hear("ready")
    bystander.hear("tick")

    killed = time.monotonic()
    os.kill(victims[1]["process"], signal.SIGKILL)
    failed = check_loss(worker, ["host 1 of island 0", "lost"])
    measured("host killed -> error in client (s)", failed - killed)

    bystander.hear("tick")
    before = bystander.hear("tick")
    after = bystander.hear("tick")
    assert after["ticks"] == before["ticks"] + 256
    gap = max(before["gap"], after["gap"])
    measured("longest pause of the client on the other island (s)", gap)

    island, other = run.overview()["islands"]
    assert all(host["lost"] for host in island["hosts"])
    assert not any(host["lost"] for host in other["hosts"])
    until(lambda: not any(is_alive(v["process"]) for v in victims), 1, "the island's hosts ended")
    assert failed - killed < 1.0
    assert gap < 1.0


def test_the_end_of_a_host_is_explained(own_runtime: Path) -> None:
    """Where islands were started: the signal that killed it, and XLA's last output."""
    with Up("--islands", "2x1x1", runtime=own_runtime) as running:
        log = running.directory / "host-0.log"
        with log.open("a") as file:
            file.write("F1124 21:54:01.047283 2698 ir_array.cc:598] Check failed: it holds\n")
        os.kill(hosts_of(running)[0]["process"], signal.SIGABRT)
        until(lambda: "host 0 has ended" in running.errors.read_text(), 10, "it is explained")
        said = running.errors.read_text()
        assert "host 0 has ended by SIGABRT" in said
        assert "Check failed: it holds" in said


def test_kill_of_a_host_while_a_client_waits(
    start: Start, background: Begin, measured: Measured
) -> None:
    """One long computation, a transfer that depends on it, and a read that depends on that."""
    run = start("2x1x2")
    waiting = background(
        run,
        """
        slow = jax.jit(lambda x: jax.lax.fori_loop(0, 1 << 30, lambda i, x: jnp.sin(x) + i, x))
        a = slow(jax.device_put(np.ones(64), jax.devices()[0]))
        b = jax.device_put(a, jax.devices()[2]) + 1
        say("ready")
        kind, text = fails(lambda: np.asarray(b))
        say("failed", at=time.monotonic(), kind=kind, text=text)
        say("on", value=float(jax.device_put(np.ones(3), jax.devices()[3]).sum()))
        """,
    )
    waiting.hear("ready")
    time.sleep(0.5)
    killed = time.monotonic()
    os.kill(hosts_of(run)[0]["process"], signal.SIGKILL)
    failed = waiting.hear("failed", 30)
    measured("host killed -> error in a client that waits (s)", failed["at"] - killed)
    assert failed["kind"] == "JaxRuntimeError"
    assert "host 0 of island 0" in failed["text"], failed
    assert failed["at"] - killed < 1.0
    assert waiting.hear("on", 30) == {"value": 3.0}


@pytest.mark.alone
def test_a_stopped_host_is_lost_after_the_timeout(
    start: Start, background: Begin, measured: Measured
) -> None:
    timeout_s = 2.0
    run = start("2x1x4", timeout_s=timeout_s)
    victim = hosts_of(run)[1]["process"]
    worker = background(run, UNTIL_IT_FAILS.format(island=1))
    bystander = background(run, NEVER_NOTICES.format(island=0))
    worker.hear("ready")
    bystander.hear("ready")
    bystander.hear("tick")

    stopped = time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    failed = check_loss(worker, ["host 0 of island 1", "lost", "no answer"])
    measured("host stopped -> error in client (s)", failed - stopped)

    bystander.hear("tick")
    before, after = bystander.hear("tick"), bystander.hear("tick")
    assert after["ticks"] == before["ticks"] + 256
    gap = max(before["gap"], after["gap"])
    measured("longest pause of the client on the other island (s)", gap)
    until(lambda: not is_alive(victim), 1, "the stopped host has been ended")
    assert [bool(host["lost"]) for host in hosts_of(run)] == [False, True]
    # Half a second for the notification to reach the client on a busy machine.
    assert timeout_s / 2 < failed - stopped < timeout_s + 0.5
    assert gap < 1.0


def test_a_host_that_works_hard_is_not_lost(start: Start) -> None:
    """Compilations and computations longer than the heartbeat timeout are no failure."""
    # Beside busy processes of other sessions, Linux (autogroup) lets the thread that answers wait
    # for most of a second.
    timeout_s = 3.0
    run = start("1x1x2", timeout_s=timeout_s)
    result = client(
        run,
        """
        def many(x):
            for i in range(800):
                x = jnp.sin(x) * jnp.cos(x * (i + 1)) if i % 2 else jnp.cumsum(x) / (i + 2)
            return x
        def loop(x):
            return jax.lax.fori_loop(0, 1 << 26, lambda i, x: jnp.sin(x) + i, x)
        began = time.monotonic()
        y = jax.jit(many)(np.ones(300))
        y.block_until_ready()
        compiled = time.monotonic()
        z = jax.jit(loop)(jnp.ones(16))
        z.block_until_ready()
        computed = time.monotonic()
        finite = bool(jnp.isfinite(y).all() & jnp.isfinite(z).all())
        say("done", compiling=compiled - began, computing=computed - compiled, finite=finite)
        """,
        120,
    )
    done = said(result.stdout, "done")
    assert done["finite"], result.stdout
    assert min(done["compiling"], done["computing"]) > timeout_s, f"too light: {done}"
    assert not hosts_of(run)[0]["lost"]


# Clients


@pytest.fixture(scope="module")
def shared(runtime: Path) -> Iterator[Up]:
    """Islands whose clients are killed."""
    directory = Path(tempfile.mkdtemp(prefix="shared-", dir=runtime))
    with Up("--islands", "2x1x2", runtime=directory) as running:
        yield running


def test_kill_of_a_client(shared: Up, background: Begin, measured: Measured) -> None:
    processes = [host["process"] for host in hosts_of(shared)]
    before = [rss_bytes(process) for process in processes]
    victim = background(
        shared,
        """
        a = [jax.device_put(np.ones(1 << 25, np.float32), device) for device in jax.devices()[::2]]
        b = [jax.jit(lambda x: x + 1)(x) for x in a]
        jax.block_until_ready(b)
        say("ready")
        time.sleep(600)
        """,
    )
    victim.hear("ready")
    held = [rss_bytes(process) for process in processes]
    assert all(now - then > 200 << 20 for now, then in zip(held, before, strict=True))
    seen = shared.overview()["clients"]
    assert len(seen) == 1
    assert seen[0]["buffers"] >= 4

    os.kill(victim.pid, signal.SIGKILL)

    def is_gone() -> bool:
        now = [rss_bytes(process) for process in processes]
        freed = all(a - b > 200 << 20 for a, b in zip(held, now, strict=True))
        return freed and not shared.overview()["clients"]

    measured("client killed -> buffers gone (s)", until(is_gone, 1, "buffers are gone"))


@pytest.mark.alone
def test_kill_of_a_client_whose_launches_wait(
    shared: Up, background: Begin, measured: Measured
) -> None:
    """It requested much more than the island can do; its abandoned launches must not block it."""
    other = background(
        shared,
        """
        double = jax.jit(lambda x: x * 2)
        x = jax.device_put(np.ones(4, np.float32), jax.devices()[0])
        say("ready", value=float(double(x)[0]))
        for line in sys.stdin:
            say("answer", value=float(double(x)[0]))
        """,
    )
    other.hear("ready")
    victim = background(
        shared,
        """
        x = jax.device_put(np.ones((300, 300), np.float32), jax.devices()[0])
        heavy = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda i, x: jnp.tanh(x @ x), x))
        began = time.monotonic()
        jax.block_until_ready(heavy(heavy(x)))
        say("ready")
        for i in range(3000):
            x = heavy(x)
            if i == 1000:
                say("flooding", s=time.monotonic() - began)
        time.sleep(600)
        """,
    )
    victim.hear("flooding")
    os.kill(victim.pid, signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: len(shared.overview()["clients"]) == 1, 1, "the client is gone")
    other.tell("now")
    assert other.hear("answer", 120) == {"value": 2.0}
    waited = time.monotonic() - killed
    measured("flooding client killed -> island answers another (s)", waited)
    host = hosts_of(shared)[0]
    assert host["queued"] == 0, host
    assert waited < 1.0


def test_the_overview_tells_device_memory(shared: Up, background: Begin) -> None:
    """Memory in use is reported, and reported as free once the client is dead."""
    holder = background(
        shared,
        """
        x = jax.device_put(np.ones(1 << 24, np.float32), jax.devices()[0])
        x.block_until_ready()
        say("ready")
        time.sleep(600)
        """,
    )
    holder.hear("ready")
    until(lambda: hosts_of(shared)[0]["memory_bytes"] >= 1 << 26, 3, "64 MiB show as in use")
    os.kill(holder.pid, signal.SIGKILL)
    until(lambda: hosts_of(shared)[0]["memory_bytes"] < 1 << 26, 3, "they show as free again")


# The controller


def test_kill_of_the_controller(own_runtime: Path, background: Begin, measured: Measured) -> None:
    with Up("--islands", "2x1x2", runtime=own_runtime) as running:
        hosts = [host["process"] for host in hosts_of(running)]
        assert all(map(is_alive, hosts))
        left_behind = background(
            running,
            """
            x = jnp.ones(4)
            say("ready")
            while True:
                try:
                    x = jax.block_until_ready(x + 1)
                except Exception as error:
                    say("failed", text=str(error), at=time.monotonic())
                    break
            """,
        )
        left_behind.hear("ready")
        killed = time.monotonic()
        os.kill(running.pid, signal.SIGKILL)
        gone = until(lambda: not any(map(is_alive, hosts)), 1, "all hosts have ended")
        measured("controller killed -> no process of the run (s)", gone)
        failed = left_behind.hear("failed", 30)
        measured("controller killed -> error in client (s)", failed["at"] - killed)
    with Up("--islands", "1x1x1", runtime=own_runtime) as next_one:
        assert len(next_one.directories) == 1, "what the dead run left is cleared by the next"


def test_what_is_compiled_after_the_controllers_death_raises(
    own_runtime: Path, background: Begin
) -> None:
    """The stock client would abort the process (SIGABRT) when it compiles without a connection."""
    with Up("--islands", "1x1x2", runtime=own_runtime) as running:
        left_behind = background(
            running,
            """
            x = jax.device_put(np.ones(16), jax.devices()[0])
            jitted = jax.jit(lambda x: x * 2)
            jax.block_until_ready(jitted(x))
            say("ready")
            sys.stdin.readline()
            def attempt(act):
                try:
                    act()
                except jax.errors.JaxRuntimeError as error:
                    return str(error)
                return "it worked"
            attempts = {
                "an operator": lambda: x + 1,
                "a jitted function anew": lambda: jax.jit(lambda x: x * 3)(x),
                "lower and compile": lambda: jitted.lower(
                    jax.ShapeDtypeStruct((32,), np.float32)
                ).compile(),
                "a program compiled before": lambda: jax.block_until_ready(jitted(x)),
                "put": lambda: jax.block_until_ready(jax.device_put(np.ones(4))),
                "read": lambda: np.asarray(x),
            }
            say("over", found={name: attempt(act) for name, act in attempts.items()})
            """,
        )
        left_behind.hear("ready")
        os.kill(running.pid, signal.SIGKILL)
    left_behind.tell("go on")
    found = left_behind.hear("over", 30)["found"]
    assert all(text.startswith("UNAVAILABLE") for text in found.values()), found


def test_what_is_sent_after_the_controllers_death_raises(
    own_runtime: Path, background: Begin
) -> None:
    """The stock client accepts launches and puts without a server, and keeps them."""
    with Up("--islands", "1x1x2", runtime=own_runtime) as running:
        left_behind = background(
            running,
            """
            sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
            ones = np.ones(16, np.float32)
            step = jax.jit(lambda x: x + 1, donate_argnums=0)
            x = y = z = jax.device_put(ones, sharding)
            x, y = step(y + 0), jax.block_until_ready(z + 1)
            say("ready")
            sys.stdin.readline()
            def step_on():
                global x
                x = step(x)
            def attempt(act):
                until = time.monotonic() + 10
                while time.monotonic() < until:
                    try:
                        act()
                    except jax.errors.JaxRuntimeError as error:
                        return str(error)
                return "it went on for ever"
            attempts = {
                "steps that donate": step_on,
                "operators": lambda: y + 1,
                "put": lambda: jax.device_put(ones, sharding),
                "callback": lambda: jax.make_array_from_callback((16,), sharding, ones.__getitem__),
                "copy": lambda: jax.device_put(y, jax.devices()[1]),
                "start reading": lambda: (y + 0).copy_to_host_async(),
            }
            found = {name: attempt(act) for name, act in attempts.items()}
            y.delete()
            say("over", found=found)
            """,
        )
        left_behind.hear("ready")
        os.kill(running.pid, signal.SIGKILL)
    left_behind.tell("go on")
    found = left_behind.hear("over", 70)["found"]
    assert all(text.startswith("UNAVAILABLE") for text in found.values()), found


def test_kill_of_fairway_run(own_runtime: Path, tmp_path: Path) -> None:
    """The script and the hosts end with it."""
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    with subprocess.Popen(
        [sys.executable, "-m", "fairway", "run", "--islands", "1x1x1", str(script)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(own_runtime)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        hosts = children(process.pid)
        assert child in hosts
        assert len(hosts) == 2
        process.kill()
        until(lambda: not any(map(is_alive, hosts)), 1, "script and host have ended")


def children(process: int) -> list[int]:
    """Child processes of this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process:
            found.append(int(entry.name))
    return found


@pytest.mark.alone
@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2)]
)
def test_an_end_by_signal_leaves_nothing(
    own_runtime: Path, measured: Measured, number: signal.Signals, times: int
) -> None:
    """Ctrl-C (to the group, as a terminal does it), once or repeatedly, and SIGTERM."""
    shared_memory = set(os.listdir("/dev/shm"))
    with Up("--islands", "2x1x1", runtime=own_runtime) as running:
        port, directory = running.port, running.directory
        hosts = [host["process"] for host in hosts_of(running)]
        result = client(
            running,
            """
            x = jax.device_put(np.ones(1 << 22, np.float32), jax.devices()[0])
            say("moved", value=float(jax.device_put(x, jax.devices()[1]).sum()))
            """,
        )
        assert said(result.stdout, "moved")["value"] == 1 << 22
        asked = time.monotonic()
        for _ in range(times):
            if number == signal.SIGINT:
                os.killpg(running.pid, number)
            else:
                os.kill(running.pid, number)
            time.sleep(0.005)
        code = running.process.wait(10)
        measured(f"{number.name} x {times} -> ended (s)", time.monotonic() - asked)
        assert "Traceback" not in running.errors.read_text()
        assert code == 0 if times == 1 else code in (0, 130)
    assert not any(map(is_alive, hosts))
    assert not directory.exists()
    assert not running.directories
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert set(os.listdir("/dev/shm")) <= shared_memory


@pytest.mark.parametrize("seed", [1, 2])
def test_ctrl_c_while_starting_leaves_nothing(own_runtime: Path, seed: int) -> None:
    delay_s = random.Random(seed).uniform(0.2, 1.5)
    with Up("--islands", "1x2x1", runtime=own_runtime, wait=False) as starting:
        until(lambda: starting.directories, 10, "it has begun")
        time.sleep(delay_s)
        started = children(starting.pid)
        os.killpg(starting.pid, signal.SIGINT)
        assert starting.process.wait(10) in (0, 130), delay_s
        assert not any(map(is_alive, started)), delay_s
        assert not starting.directories, delay_s
        assert "Traceback" not in starting.errors.read_text()


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


# The order of launches


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
        hosts = LocalHosts(directory)
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
                target.sendall(command_frame(command))
                if is_launch and held is not None:
                    self.swapped.set()
                    target.sendall(command_frame(held))
                    held = None


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
