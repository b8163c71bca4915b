"""Fault injection: hosts and clients are killed or stopped while others work."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import (
    Background,
    Begin,
    Measured,
    Start,
    Up,
    client,
    hosts_of,
    is_alive,
    rss_bytes,
    said,
    until,
)

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


@pytest.mark.local("elsewhere the sentence names the machine; test_launchers.py has that")
def test_the_end_of_a_host_is_explained(own_runtime: Path) -> None:
    """Where islands were started: the signal that killed it, and XLA's last output."""
    with Up("--islands", "2x1x1", runtime=own_runtime) as running:
        process = hosts_of(running)[0]["process"]
        with Path(f"/proc/{process}/fd/2").open("a") as output:
            output.write("F1124 21:54:01.047283 2698 ir_array.cc:598] Check failed: it holds\n")
        os.kill(process, signal.SIGABRT)
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
        f"""
        def longest(prepare, count):
            '''Seconds of the first that lasts long enough, of ever larger ones, and its result.'''
            while True:
                work = prepare(count)
                began = time.monotonic()
                result = jax.block_until_ready(work())
                took = time.monotonic() - began
                if took > {1.2 * timeout_s}:
                    return took, result
                count *= 2
        def compilation(count):
            def many(x):
                for i in range(count):
                    x = jnp.sin(x) * jnp.cos(x * (i + 1)) if i % 2 else jnp.cumsum(x) / (i + 2)
                return x
            return jax.jit(many).lower(np.ones(300)).compile
        def computation(count):
            def loop(x):
                return jax.lax.fori_loop(0, count, lambda i, x: jnp.sin(x) + i, x)
            compiled = jax.jit(loop).lower(jnp.ones(16)).compile()
            return lambda: compiled(jnp.ones(16))
        compiling, compiled = longest(compilation, 200)
        computing, result = longest(computation, 1 << 22)
        finite = all(bool(jnp.isfinite(x).all()) for x in (compiled(np.ones(300)), result))
        say("done", compiling=compiling, computing=computing, finite=finite)
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


@pytest.mark.alone
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


def test_a_donated_argument_is_copied_while_its_transfer_waits(
    start: Start, background: Begin
) -> None:
    """A receiver that takes nothing delays neither the donor nor spoils what it will get."""
    run = start("2x1x1")
    receiver = hosts_of(run)[1]["process"]
    donor = background(
        run,
        """
        here, there = jax.devices()
        grow = jax.jit(lambda x: x + 1, donate_argnums=0)
        ones = np.ones(1 << 24, np.float32)
        jax.block_until_ready(grow(jax.device_put(ones, here)))
        x = jax.block_until_ready(jax.device_put(ones, here))
        say("ready")
        sys.stdin.readline()
        moved = jax.device_put(x, there)
        say("grown", first=float(grow(x)[0]))
        say("moved", total=float(np.asarray(moved).sum()))
        """,
    )
    donor.hear("ready")
    os.kill(receiver, signal.SIGSTOP)
    try:
        donor.tell("go")
        assert donor.hear("grown", 30)["first"] == 2.0
    finally:
        os.kill(receiver, signal.SIGCONT)
    assert donor.hear("moved", 60)["total"] == 1 << 24
