"""A launch that never ends, whose client is gone."""

from __future__ import annotations

import os
import signal

from conftest import Background, client, hosts_of, said, until

from fairway.daemon import Run
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


def test_an_island_is_taken_back_from_a_client_that_is_gone() -> None:
    with Run(Settings.parse("2x1x1", timeout_s=1.0)) as up, Background(up, NEIGHBOUR) as neighbour:
        neighbour.hear("ready")
        stuck, other = (host["process"] for host in hosts_of(up))
        with Background(up, ENDLESS) as endless:
            endless.hear("spinning")
            number = max(one["id"] for one in up.overview()["clients"])
            until(lambda: (hosts_of(up)[0]["running_s"] or 0) > 0.5, 20, "the launch is shown")
            assert hosts_of(up)[0]["running_client"] == number
            os.kill(endless.pid, signal.SIGKILL)

        def is_back() -> bool:
            host = hosts_of(up)[0]
            return host["process"] not in (None, stuck) and not host["lost"]

        took = until(is_back, 60, "the island is back")
        assert took > 1, "a launch may end within the grace"
        assert hosts_of(up)[1]["process"] == other
        neighbour.tell("go on")
        used = neighbour.hear("used")
        assert used["here"] == 3.0
        assert "DATA_LOSS" in used["there"][1]
        assert f"client {number}, which is gone" in used["there"][1]
        assert used["again"] == ["nothing", ""]
        fresh = client(up, "say('sum', value=float(jax.numpy.arange(4.0).sum()))")
        assert said(fresh.stdout, "sum") == {"value": 6.0}
