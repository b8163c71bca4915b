"""A launch that never ends, whose client has disconnected (watchdog)."""

from __future__ import annotations

import os
import signal
import time

from conftest import Background, client, hosts_of, said, until

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

ENDLESS = """
    spin = jax.jit(lambda x: jax.lax.while_loop(lambda y: y[0] >= 0, lambda y: y * 0.5, x))
    x = jax.device_put(np.ones(4, np.float32), jax.devices()[0])
    say("spinning")
    jax.block_until_ready(spin(x))
"""

NEIGHBOUR = """
    first, last = jax.devices()[0], jax.devices()[-1]
    step = jax.jit(lambda x: x + 1)
    there, here = step(jax.device_put(1.0, first)), step(jax.device_put(1.0, last))
    jax.block_until_ready((there, here))
    say("ready")
    for line in sys.stdin:
        say("used", here=float(step(here)), there=fails(lambda: float(there + 1)),
            again=fails(lambda: float(step(jax.device_put(2.0, first)))))
"""


GRACE_S = 3.0
"""Grace for a launch without its client, and for an unresponsive host on a busy machine."""


def until_back(up: Run, stuck: int) -> float:
    """Waits for another incarnation of the first island's host; returns the time that it took."""

    def is_back() -> bool:
        host = hosts_of(up)[0]
        return host["process"] not in (None, stuck) and not host["lost"]

    return until(is_back, 60, "the island is back")


def test_an_island_is_taken_back_from_a_client_that_is_gone() -> None:
    with (
        Run(Settings.parse("2x1x1", timeout_s=GRACE_S)) as up,
        Background(up, NEIGHBOUR) as neighbour,
    ):
        neighbour.hear("ready")
        stuck, other = (host["process"] for host in hosts_of(up))
        with Background(up, ENDLESS) as endless:
            endless.hear("spinning")
            number = max(one["id"] for one in up.overview()["clients"])
            until(lambda: (hosts_of(up)[0]["running_s"] or 0) > 0.5, 20, "the launch is shown")
            assert hosts_of(up)[0]["running_client"] == number
            os.kill(endless.pid, signal.SIGKILL)

        took = until_back(up, stuck)
        assert took > GRACE_S, "a launch may end within the grace"
        assert hosts_of(up)[1]["process"] == other
        neighbour.tell("go on")
        used = neighbour.hear("used")
        assert used["here"] == 3.0
        assert "DATA_LOSS" in used["there"][1]
        assert f"client {number}, which is gone" in used["there"][1]
        assert used["again"] == ["nothing", ""]
        fresh = client(up, "say('sum', value=float(jax.numpy.arange(4.0).sum()))")
        assert said(fresh.stdout, "sum") == {"value": 6.0}


SHORT = """
    import time
    loop = jax.jit(lambda x: jax.lax.while_loop(lambda y: y[0] >= 0, lambda y: y * 0.5, x))
    short, long = (jax.device_put(np.full(4, x, np.float32), jax.devices()[0]) for x in (-1, 1))
    for _ in range(200):  # that it is short is known from here on
        jax.block_until_ready(loop(short))
    time.sleep(0.2)
    jax.block_until_ready(loop(short))
"""


def test_an_island_is_kept_when_its_last_launches_were_short() -> None:
    """Their ends are not reported one by one; the watchdog must not take them for endless."""
    with Run(Settings.parse("2x1x1", timeout_s=GRACE_S)) as up:
        processes = [host["process"] for host in hosts_of(up)]
        client(up, SHORT)
        until(lambda: all(host["running_s"] is None for host in hosts_of(up)), 20, "hosts are idle")
        time.sleep(3 * GRACE_S)
        assert [host["process"] for host in hosts_of(up)] == processes
        client(up, "say('sum', value=float(jax.numpy.arange(4.0).sum()))")


def test_a_program_that_was_short_may_run_away() -> None:
    endless = (
        SHORT
        + """
    say("spinning")
    jax.block_until_ready(loop(long))
"""
    )
    with Run(Settings.parse("2x1x1", timeout_s=GRACE_S)) as up:
        stuck = hosts_of(up)[0]["process"]
        with Background(up, endless) as client_of_it:
            client_of_it.hear("spinning")
            until(lambda: (hosts_of(up)[0]["running_s"] or 0) > 0.5, 20, "the launch is shown")
            os.kill(client_of_it.pid, signal.SIGKILL)

        until_back(up, stuck)
