"""A host that stalls, dies or is cut off slows nobody who does not use its island."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from conftest import Background, Measured, hosts_of

from fairway.daemon import Run
from fairway.settings import Settings

GAP_S = 0.15
STALL_S = 3.0
ROUNDS = int(os.environ.get("FAIRWAY_ROUNDS", "2"))

PREPARE = """
    half = len(jax.devices()) // 2
    near, far = jax.devices()[half:], jax.devices()[:half]
    sharding = lambda devices: NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
    step = jax.jit(lambda x: x * 0.5 + x.sum(), donate_argnums=0)
    x = jax.block_until_ready(step(jax.device_put(np.ones(1 << 14, np.float32), sharding(near))))
"""

ALONE = (
    PREPARE
    + """
    import threading
    asked = threading.Event()
    def listen():
        for _ in sys.stdin:
            asked.set()
    threading.Thread(target=listen, daemon=True).start()
    say("ready")
    longest, last = 0.0, time.monotonic()
    while True:
        x = jax.block_until_ready(step(x * 0))
        assert float(np.asarray(x)[0]) == 0.0
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if asked.is_set():
            asked.clear()
            say("gap", longest=longest)
            longest = 0.0
"""
)
"""A client that uses the second island only; says its longest gap since it was last asked."""

SPANNING = (
    PREPARE
    + """
    say("ready")
    try:
        while True:
            y = jax.device_put(x + 1, sharding(far))  # what is sent is donated next
            x = step(x)
            y = step(y)
            x = jax.device_put(y, sharding(near))
            float(np.asarray(step(x * 0))[0])
            x = jax.device_put(np.ones(1 << 14, np.float32), sharding(near))
    except Exception as error:
        say("failed", text=str(error))
"""
)
"""A client whose every step goes over both islands."""

AHEAD = (
    PREPARE
    + """
    say("ready")
    try:
        while True:
            for _ in range(20):  # many in flight, none waited for
                y = jax.device_put(x, sharding(far))
                x = jax.device_put(step(y), sharding(near))
                x = step(x * 0)
            jax.block_until_ready(x)
    except Exception as error:
        say("failed", text=str(error))
"""
)
"""The same without waiting for each."""


@pytest.fixture(scope="module")
def islands() -> Iterator[Run]:
    with Run(Settings.parse("2x1x2", timeout_s=20.0)) as up:
        yield up


def longest_gap(alone: Background) -> float:
    """Seconds since it was last asked."""
    alone.tell("gap")
    return float(alone.hear("gap")["longest"])


def test_a_stopped_host_slows_no_client_of_another_island(islands: Run, measured: Measured) -> None:
    stalled = hosts_of(islands)[0]["process"]
    with contextlib.ExitStack() as stack:
        spanning = [stack.enter_context(Background(islands, code)) for code in (SPANNING, AHEAD)]
        alone = stack.enter_context(Background(islands, ALONE))
        for one in (*spanning, alone):
            one.hear("ready")
        time.sleep(1.0)
        longest_gap(alone)
        gaps, usual = [], []
        for _ in range(ROUNDS):
            time.sleep(STALL_S)
            usual.append(longest_gap(alone))
            os.kill(stalled, signal.SIGSTOP)
            try:
                time.sleep(STALL_S)
                gaps.append(longest_gap(alone))
            finally:
                os.kill(stalled, signal.SIGCONT)
        assert all(one.process.poll() is None for one in spanning), [one.text() for one in spanning]
    measured("longest gap (s)", max(gaps))
    measured("the same while nothing stalls (s)", max(usual))
    # What the machine itself makes of three busy clients on its cores is not the stall's doing.
    assert max(gaps) <= GAP_S + max(usual)
    assert max(gaps) < STALL_S / 2
