"""A host that stalls, dies or is partitioned delays only clients that use its island."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from conftest import Background, Measured, hosts_of, ip

from fairway.cluster.supervisor import Run
from fairway.settings import IslandSettings, Settings

pytestmark = pytest.mark.alone

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
"""A client that uses the second island only; reports its longest gap since the last query."""

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
"""A client whose every step spans both islands."""

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
"""The same without waiting for each step."""


def longest_gap(alone: Background) -> float:
    """Returns the longest gap since the last query, in seconds."""
    alone.tell("gap")
    return float(alone.hear("gap")["longest"])


class Watched:
    """A client of the second island alone, beside two that span both islands."""

    def __init__(self, islands: Run, clients: contextlib.ExitStack) -> None:
        self._islands = islands
        self._clients = clients
        self.alone = clients.enter_context(Background(islands, ALONE))
        self.alone.hear("ready")
        self.spanning: list[Background] = []
        self.gaps: list[float] = []
        self.usual: list[float] = []

    def span(self) -> None:
        """Starts the two clients that use both islands."""
        codes = (SPANNING, AHEAD)
        self.spanning = [self._clients.enter_context(Background(self._islands, c)) for c in codes]
        for one in self.spanning:
            one.hear("ready")
        time.sleep(1.0)
        longest_gap(self.alone)

    @contextlib.contextmanager
    def fault(self) -> Iterator[None]:
        """Measures the longest gap without a fault, and with the fault in the body of ``with``."""
        time.sleep(STALL_S)
        self.usual.append(longest_gap(self.alone))
        yield
        self.gaps.append(longest_gap(self.alone))

    def judge(self, measured: Measured) -> None:
        measured("longest gap (s)", max(self.gaps))
        measured("the same without a fault (s)", max(self.usual))
        # Stalls that three busy clients on the machine's cores cause are not the fault's.
        assert max(self.gaps) <= GAP_S + max(self.usual), (self.gaps, self.usual)
        assert max(self.gaps) < STALL_S / 2

    def check_goes_on(self) -> None:
        """Fails unless both spanning clients continue."""
        ended = [one for one in self.spanning if one.process.poll() is not None]
        assert not ended, [one.text() for one in ended]


def test_a_stopped_host_slows_no_client_of_another_island(measured: Measured) -> None:
    with Run(Settings.parse("2x1x2", timeout_s=20.0)) as islands, contextlib.ExitStack() as clients:
        stalled = hosts_of(islands)[0]["process"]
        watched = Watched(islands, clients)
        watched.span()
        for _ in range(ROUNDS):
            with watched.fault():
                os.kill(stalled, signal.SIGSTOP)
                try:
                    time.sleep(STALL_S)
                finally:
                    os.kill(stalled, signal.SIGCONT)
        watched.check_goes_on()
        watched.judge(measured)


def test_a_killed_host_slows_no_client_of_another_island(measured: Measured) -> None:
    """Its clients get errors; it comes back; the client of the other island is unaffected."""
    with Run(Settings.parse("2x1x2", timeout_s=20.0)) as islands, contextlib.ExitStack() as clients:
        watched = Watched(islands, clients)
        for _ in range(ROUNDS):
            watched.span()
            with watched.fault():
                os.kill(hosts_of(islands)[0]["process"], signal.SIGKILL)
                time.sleep(STALL_S)
            for one in watched.spanning:
                text = one.hear("failed")["text"]
                assert "host 0" in text, text
                assert text.startswith(("DATA_LOSS", "UNAVAILABLE")), text
            islands.add_island(islands.settings.islands[0])
            longest_gap(watched.alone)
        watched.judge(measured)


@pytest.mark.local("its islands have command prefixes")
def test_a_host_cut_off_slows_no_client_of_another_island(
    namespaces: dict[str, str], measured: Measured
) -> None:
    """Transfers between islands stall for a while, and resume afterwards."""
    shapes = tuple(
        IslandSettings(1, 2, ("ip", "netns", "exec", name), address)
        for name, address in namespaces.items()
    )
    settings = Settings(shapes, data_plane="tcp", timeout_s=20.0)
    cut = f"{next(iter(namespaces))}e0"
    with Run(settings) as islands, contextlib.ExitStack() as clients:
        watched = Watched(islands, clients)
        watched.span()
        for _ in range(ROUNDS):
            with watched.fault():
                ip("link", "set", cut, "down")
                try:
                    time.sleep(STALL_S)
                finally:
                    ip("link", "set", cut, "up")
        watched.check_goes_on()
        watched.judge(measured)
