"""The end of the controller, killed or by a signal: what clients see, and that nothing is left."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Begin, Measured, Up, children, client, hosts_of, is_alive, said, until


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


def attempts_after_the_controllers_death(
    own_runtime: Path, background: Begin, code: str, timeout_s: float
) -> dict[str, str]:
    """Kills the controller of a client that is ready, and returns what its attempts end in then.

    Args:
        code: of the client, which says ``ready``, waits for a line, and says ``over``.
        timeout_s: within which all attempts have ended.
    """
    with Up("--islands", "1x1x2", runtime=own_runtime) as running:
        left_behind = background(running, code)
        left_behind.hear("ready")
        os.kill(running.pid, signal.SIGKILL)
    left_behind.tell("go on")
    found: dict[str, str] = left_behind.hear("over", timeout_s)["found"]
    return found


def test_what_is_compiled_after_the_controllers_death_raises(
    own_runtime: Path, background: Begin
) -> None:
    """The stock client would abort the process (SIGABRT) when it compiles without a connection."""
    found = attempts_after_the_controllers_death(
        own_runtime,
        background,
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
        30,
    )
    assert all(text.startswith("UNAVAILABLE") for text in found.values()), found


def test_what_is_sent_after_the_controllers_death_raises(
    own_runtime: Path, background: Begin
) -> None:
    """The stock client accepts launches and puts without a server, and keeps them."""
    found = attempts_after_the_controllers_death(
        own_runtime,
        background,
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
        70,
    )
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
