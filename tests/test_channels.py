"""Hosts with channels: large transfers are striped over them and over neighbouring hosts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Background, client, said
from test_dataflow import run

from fairway.cluster.supervisor import Run
from fairway.errors import ConfigError
from fairway.settings import ChannelSettings, IslandSettings, Settings

RATE = "200Mbit/s"


def island(number: int, channels: int = 2) -> IslandSettings:
    """Two hosts of two devices, each with addresses of its own on this machine."""
    addresses = (f"127.{number}{channel}.{{rank}}.1" for channel in range(channels))
    return IslandSettings(2, 2, channels=tuple(ChannelSettings(one, RATE) for one in addresses))


@pytest.fixture(scope="module")
def joined() -> Iterator[Run]:
    """Two islands with two channels a host."""
    with Run(Settings((island(1), island(2)))) as up:
        yield up


MOVE = """
!here = !ifrt.array<tensor<1024x768xf32>, #ifrt.sharding_param<{0}>, {1}>
!there = !ifrt.array<tensor<1024x768xf32>, #ifrt.sharding_param<{2}>, {3}>
module @move {{
  func.func public @main(%x: !here) -> !there attributes {{ifrt.function}} {{
    %y, %c = ifrt.Reshard(%x) : (!here) -> !there
    return %y : !there
  }}
}}
"""
WHOLE, ROWS, COLUMNS = "1x1 to [0] on {}", "{0}x1 to [0] on {0}", "1x{0} to [0] on {0}"
SPECS = {WHOLE: (), ROWS: ("x",), COLUMNS: (None, "x")}


@pytest.mark.parametrize(
    ("cut", "here", "other", "there"),
    [
        (WHOLE, [0], WHOLE, [7]),
        (WHOLE, [5], ROWS, [0, 1, 2, 3]),
        (ROWS, [0, 1, 2, 3], WHOLE, [4]),
        (ROWS, [0, 2], COLUMNS, [4, 6]),
        (COLUMNS, [0, 1], ROWS, [4, 5, 6, 7]),
        (WHOLE, [0, 1, 2, 3], WHOLE, [4, 5, 6, 7]),
        (ROWS, [4, 5, 6, 7], ROWS, [2, 0, 3, 1]),
    ],
)
def test_programs_move_arrays_whole(
    joined: Run, cut: str, here: list[int], other: str, there: list[int]
) -> None:
    text = MOVE.format(cut.format(len(here)), here, other.format(len(there)), there)
    heard = run(
        joined,
        text,
        f"""
        def at(numbers, spec):
            return placed([devices[number] for number in numbers], {{"x": len(numbers)}}, *spec)
        source, target = at({here}, {SPECS[cut]}), at({there}, {SPECS[other]})
        execute = compiled(text, ((1024, 768), np.float32, target))
        x = np.random.RandomState(0).rand(1024, 768).astype(np.float32)
        same = []
        for turn in range(3):
            (y,) = execute([jax.device_put(x + turn, source)])
            same.append(bool((np.asarray(y) == x + turn).all()))
        say("it", same=same, right=y.sharding == target)
        """,
    )
    assert heard == {"same": [True] * 3, "right": True}


SEVERAL = """
!a = !ifrt.array<tensor<{0}x1024xf32>, #ifrt.sharding_param<1x1 to [0] on 1>, [0]>
!b = !ifrt.array<tensor<{0}x1024xf32>, #ifrt.sharding_param<1x1 to [0] on 1>, [4]>
!c = !ifrt.array<tensor<{1}x1024xf32>, #ifrt.sharding_param<1x1 to [0] on 1>, [0]>
!d = !ifrt.array<tensor<{1}x1024xf32>, #ifrt.sharding_param<1x1 to [0] on 1>, [7]>
!e = !ifrt.array<tensor<{2}x1024xf32>, #ifrt.sharding_param<1x1 to [0] on 1>, [1]>
!f = !ifrt.array<tensor<{2}x1024xf32>, #ifrt.sharding_param<1x1 to [0] on 1>, [5]>
module @several {{
  func.func public @main(%x: !a, %y: !c, %z: !e) -> (!b, !d, !f) attributes {{ifrt.function}} {{
    %b, %1 = ifrt.Reshard(%x) : (!a) -> !b
    %d, %2 = ifrt.Reshard(%y) : (!c) -> !d
    %f, %3 = ifrt.Reshard(%z) : (!e) -> !f
    return %b, %d, %f : !b, !d, !f
  }}
}}
"""


def test_collectives_of_large_arrays_go_by_all_channels(joined: Run) -> None:
    ended = client(
        joined,
        """
        both = ("island", "x")
        mesh = Mesh(np.array(jax.devices()).reshape(2, -1), both)
        given = np.random.default_rng(1).integers(0, 9, (8, 1 << 17)).astype(np.float32)
        placed = jax.device_put(given, NamedSharding(mesh, P(both)))
        for axes, expected in (
            (both, given.sum(0, keepdims=True)), ("island", given[:4] + given[4:]),
        ):
            over = jax.shard_map(
                lambda v: jax.lax.psum(v, axes), mesh=mesh, in_specs=P(both),
                out_specs=P() if axes == both else P("x"),
            )
            np.testing.assert_array_equal(np.asarray(jax.jit(over)(placed)), expected)
        say("done")
        """,
    )
    assert said(ended.stdout, "done") == {}


def test_a_program_sends_in_one_order_on_every_channel(tmp_path: Path) -> None:
    rows, turns = (300, 410, 520), 6
    written = tmp_path / "timeline.json"
    with Run(Settings((island(3), island(4)), timeline=written)) as up:
        run(
            up,
            SEVERAL.format(*rows),
            f"""
            one = lambda number: jax.sharding.SingleDeviceSharding(devices[number])
            ends = [(0, 4), (0, 7), (1, 5)]
            xs = [jax.device_put(np.ones((rows, 1024), np.float32), one(end[0]))
                  for rows, end in zip({rows}, ends)]
            kinds = [((rows, 1024), np.float32, one(end[1])) for rows, end in zip({rows}, ends)]
            execute = compiled(text, *kinds)
            made = [execute(xs) for _ in range({turns})]
            jax.block_until_ready(made)
            say("it", same=all(bool((np.asarray(y) == 1).all()) for ys in made for y in ys))
            """,
        )
    sent: dict[str, list[tuple[float, int]]] = {}
    for event in json.loads(written.read_text())["traceEvents"]:
        if event["ph"] == "X" and "by channel" in event["name"]:
            line = sent.setdefault(f"{event['pid']} {event['name']}", [])
            line.append((event["ts"], event["args"]["bytes"]))
    # The assignment of messages to channels and targets is identified by their sizes.
    total = sum(size for line in sent.values() for _, size in line)
    assert total >= turns * sum(rows) * 4096 // 4, "much of it is sent by channels"
    for name, line in sent.items():
        sizes = [size for _, size in sorted(line)]
        turn = len(sizes) // turns
        assert sizes == sizes[:turn] * turns, name


def test_of_a_host_that_passes_on_is_said_that_it_is_lost() -> None:
    """The relay has no shard of the array, but part of the transfer passes through it."""
    with (
        Run(Settings((island(5), island(6)), timeout_s=3.0)) as up,
        Background(
            up,
            """
            x = jax.device_put(np.arange(1 << 22, dtype=np.float32), jax.devices()[0])
            y = jax.block_until_ready(jax.device_put(x, jax.devices()[4]))
            say("moved", same=bool((np.asarray(y) == np.asarray(x)).all()))
            sys.stdin.readline()
            kind, text = fails(lambda: jax.block_until_ready(jax.device_put(x, jax.devices()[4])))
            say("failed", kind=kind, text=text)
            say("on", same=bool((np.asarray(x) == np.arange(1 << 22)).all()))
            """,
        ) as moving,
    ):
        assert moving.hear("moved")["same"]
        beside = up.overview()["islands"][1]["hosts"][1]
        os.kill(beside["process"], signal.SIGSTOP)
        moving.tell("")
        failed = moving.hear("failed", 30)
        assert failed["text"].startswith("DATA_LOSS"), failed
        assert "host 1 of island 1" in failed["text"], failed
        assert moving.hear("on", 30)["same"]


def test_an_island_without_channels_is_reached_all_the_same() -> None:
    with Run(Settings((island(7), IslandSettings(1, 1)))) as up:
        ended = client(
            up,
            """
            x = np.arange(1 << 20, dtype=np.float32)
            there = jax.device_put(jax.device_put(x, jax.devices()[0]), jax.devices()[4])
            back = jax.device_put(there, jax.devices()[3])
            say("moved", same=bool((np.asarray(back) == x).all()))
            """,
        )
    assert said(ended.stdout, "moved")["same"]


def refused(**channel: Any) -> str:
    """Returns the error for an island of two hosts with this channel."""
    given = {"address": "127.1.{rank}.1", "rate": RATE} | channel
    with pytest.raises(ConfigError) as found:
        Settings((IslandSettings(2, 1, channels=(ChannelSettings(**given),)),))
    return str(found.value)


def test_channels_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    assert "address of its own for each channel of each host" in refused(address="127.0.0.1")
    assert "numeric" in refused(address="host{rank}")
    for rate in ("fast", "1", "0bit/s", "-1Gbit/s", "1Gbit", "1e400Gbit/s", "9999Tbit/s", 5):
        assert "rate of a channel" in refused(rate=rate)
    path = tmp_path / "settings.toml"
    table = '[[islands]]\nhosts = 2\ndevices = 1\nprefix = ["nice"]\nchannels = '
    path.write_text(table + '[{address = "10.0.0.1{rank}", rate = "2.5Gbit/s"}]')
    read = Settings.read(path).islands[0]
    assert read.channels_of(1) == (("10.0.0.11", 2.5e9),)
    assert read.channels[0].rate_bps == 2.5e9
    for bad in ('[{address = "10.0.0.1{rank}"}]', "[1]", '[{adress = "1"}]', "7"):
        path.write_text(table + bad)
        with pytest.raises(ConfigError, match=r"a channel has address and rate|channels is 7"):
            Settings.read(path)
