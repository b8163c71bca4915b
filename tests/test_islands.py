"""Islands that are added, removed and lost while clients run."""

from __future__ import annotations

import os
import signal

import pytest
from conftest import (
    Begin,
    Start,
    client,
    hosts_of,
    is_alive,
    rss_bytes,
    said,
    until,
)

from fairway.errors import IslandError
from fairway.settings import IslandSettings

LOOP = """
mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
x = jax.device_put(np.zeros((8, 128), np.float32), NamedSharding(mesh, P("x")))
step = jax.jit(lambda x: x + 1.0, donate_argnums=0)
x = step(x)
say("ready")
turns = 1
import threading
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
while not stop.is_set():
    x = step(x)
    turns += 1
    if turns % 50 == 0:
        x.block_until_ready()
x = np.asarray(x)
say("result", turns=turns, least=float(x.min()), most=float(x.max()))
"""

ON_NEWEST = """
devices = jax.devices()
mesh = Mesh(np.array(devices[-2:]), ("x",))
x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))
home = jax.device_put(x * 2, NamedSharding(Mesh(np.array(devices[:2]), ("x",)), P("x")))
say("result", count=len(devices), island=devices[-1].island, total=float(home.sum()))
"""


def test_islands_come_and_go_under_load(start: Start, background: Begin) -> None:
    run = start("1x1x2")
    loop = background(run, LOOP)
    loop.hear("ready")
    processes: list[int] = []
    for turn in range(3):
        # One host or two, so that old and new places alternate.
        shape = IslandSettings(hosts=1 + turn % 2, devices=2 - turn % 2)
        number = run.add_island(shape)
        assert number == 1 + turn % 2
        hosts = run.overview()["islands"][number]["hosts"]
        processes += [host["process"] for host in hosts]
        found = said(client(run, ON_NEWEST).stdout, "result")
        assert found == {"count": 4, "island": number, "total": 56.0}
        run.remove_island(number)
        assert run.overview()["islands"][number]["state"] == "removed"
    loop.tell("stop")
    result = loop.hear("result")
    assert result["least"] == result["most"] == result["turns"], "nothing of the other is lost"
    until(lambda: not any(map(is_alive, processes)), 10, "hosts of removed islands end")
    loop.close()
    until(lambda: not run.overview()["clients"], 10, "clients are gone")
    [host] = run.overview()["islands"][0]["hosts"]
    assert (host["memory_bytes"], host["queued"]) == (0, 0)


def test_an_island_in_use_stays_unless_forced(start: Start, background: Begin) -> None:
    run = start("2x1x1")
    user = background(
        run,
        """
        x = jax.device_put(np.ones(8, np.float32), jax.devices()[1])
        x.block_until_ready()
        say("ready")
        sys.stdin.readline()
        kind, text = fails(lambda: jax.block_until_ready(x + 1))
        say("result", text=text)
        y = jax.device_put(np.ones(8, np.float32), jax.devices()[0])
        say("other", total=float((y + 1).sum()))
        """,
    )
    user.hear("ready")
    with pytest.raises(IslandError, match=r"island 1 is used by client \d+"):
        run.remove_island(1)
    run.remove_island(1, force=True)
    with pytest.raises(IslandError, match="there is no island 1"):
        run.remove_island(1)
    with pytest.raises(IslandError, match="island 0 is the only one that is up"):
        run.remove_island(0, force=True)
    user.tell("go")
    assert "DATA_LOSS: island 1 was removed" in user.hear("result")["text"]
    assert user.hear("other")["total"] == 16.0


MOVED = """
import fairway, threading
slice = fairway.slice((2,), island=1)
mesh = Mesh(slice.devices, ("x",))
cut, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
first = jax.device_put(np.zeros((8, 128), np.float32), cut)
kept = jax.device_put(np.arange(16.0, dtype=np.float32), whole)
shards = [shard.data for shard in kept.addressable_shards]
step = jax.jit(lambda x, y: x + y[1], donate_argnums=0)
sum_all = jax.jit(lambda x: x.sum(), out_shardings=whole)

@fairway.program
def twice(x, y):
    return step(step(x, y), y)

x = twice(step(first, kept), kept)
turns = 3
say("ready")
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
while not stop.is_set():
    x = twice(step(x, kept), kept)
    turns += 3
    if turns % 60 == 0:
        total = float(sum_all(x))
        assert total == turns * 8 * 128, (total, turns)
fresh = jax.jit(lambda x: x * 2)(kept)
x = np.asarray(x)
say("result", turns=turns, least=float(x.min()), most=float(x.max()),
    kept=np.asarray(kept).tolist() == list(range(16)),
    shards=[float(shard.sum()) for shard in shards], fresh=float(fresh.sum()))
"""


def test_slices_move_when_their_island_goes(start: Start, background: Begin) -> None:
    """Arrays, programs and whole programs migrate under load; the script notices nothing."""
    run = start("2x1x2")
    loop = background(run, MOVED)
    loop.hear("ready")
    for turn in range(5):
        gone = 1 - turn % 2
        run.remove_island(gone)
        assert run.overview()["islands"][gone]["state"] == "removed"
        assert run.add_island(IslandSettings(1, 2)) == gone
    loop.tell("stop")
    result = loop.hear("result")
    assert result.pop("turns") * 1.0 == result.pop("least") == result.pop("most")
    assert result == {"kept": True, "shards": [120.0, 120.0], "fresh": 240.0}
    loop.close()
    until(lambda: not run.overview()["clients"], 10, "the client is gone")
    memory = [host["memory_bytes"] for i in run.overview()["islands"] for host in i["hosts"]]
    assert memory == [0, 0]


def test_slices_stay_where_nothing_else_has_room(start: Start, background: Begin) -> None:
    run = start("1x1x1")
    assert run.add_island(IslandSettings(1, 2)) == 1
    user = background(
        run,
        """
        import fairway
        slice = fairway.slice((2,))
        mesh = Mesh(slice.devices, ("x",))
        x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))
        x.block_until_ready()
        say("ready")
        sys.stdin.readline()
        say("result", total=float((x + 1).sum()))
        """,
    )
    user.hear("ready")
    with pytest.raises(IslandError, match="slices of 2 devices on island 1, for which no other"):
        run.remove_island(1)
    user.tell("go")
    assert user.hear("result")["total"] == 36.0


def test_an_island_that_died_comes_back(start: Start) -> None:
    run = start("2x1x2")
    lost = hosts_of(run)[1]["process"]
    os.kill(lost, signal.SIGKILL)
    until(lambda: run.overview()["islands"][1]["state"] == "lost", 10, "the loss is seen")
    assert said(client(run, "say('result', n=len(jax.devices()))").stdout, "result")["n"] == 2
    assert run.add_island(IslandSettings(1, 2)) == 1
    found = said(client(run, ON_NEWEST).stdout, "result")
    assert found == {"count": 4, "island": 1, "total": 56.0}


@pytest.mark.parametrize("plane", ["unix", "tcp"])
def test_functions_of_a_lost_island_run_again_once_it_is_back(
    start: Start, background: Begin, plane: str
) -> None:
    """JAX's caches stay: earlier programs are recompiled where they are next run."""
    run = start("2x1x2", data_plane=plane)
    user = background(
        run,
        """
        import fairway
        islands = [[d for d in jax.devices() if d.island == i] for i in (0, 1)]
        meshes = [Mesh(np.array(devices), ("x",)) for devices in islands]
        lost, kept = (NamedSharding(meshes[i], P("x")) for i in (1, 0))
        both = NamedSharding(Mesh(np.array(islands), ("i", "x")), P(("i", "x")))

        double = jax.jit(lambda x: x * 2)
        total = jax.jit(lambda x: x.sum())
        donating = jax.jit(lambda x: x + 1, donate_argnums=0)
        across = jax.jit(jax.shard_map(
            lambda x: jax.lax.psum(x, "i"), mesh=both.mesh, in_specs=both.spec, out_specs=P("x"),
        ))

        @fairway.program
        def program(x):
            return double(jax.device_put(double(x), kept))

        def use():
            x = jax.device_put(np.arange(4.0, dtype=np.float32), lost)
            y = donating(double(x))
            over = across(jax.device_put(np.arange(4.0, dtype=np.float32), both))
            late = jax.jit(lambda x: x - 1)(y)
            sums = [total(y), total(program(x)), np.asarray(over).sum()]
            return [*map(float, sums), float(late[0])]

        say("before", values=use())
        old = jax.device_put(np.ones(4, np.float32), lost)
        sys.stdin.readline()
        say("lost", run=fails(lambda: float(total(double(old)))),
            old=fails(lambda: np.asarray(old)),
            new=fails(lambda: jax.block_until_ready(jax.device_put(1.0, islands[1][0]))))
        sys.stdin.readline()
        say("after", values=use(), old=fails(lambda: float(total(double(old)))))
        """,
    )
    expected = [16.0, 24.0, 6.0, 0.0]
    assert user.hear("before")["values"] == expected
    os.kill(hosts_of(run)[1]["process"], signal.SIGKILL)
    until(lambda: run.overview()["islands"][1]["state"] == "lost", 10, "the loss is seen")
    user.tell("")
    for use, (kind, text) in user.hear("lost").items():
        assert kind == "JaxRuntimeError", (use, text)
        assert text.startswith("DATA_LOSS"), (use, text)
    assert run.add_island(IslandSettings(1, 2)) == 1
    user.tell("")
    after = user.hear("after")
    assert after["values"] == expected
    assert "DATA_LOSS" in after["old"][1], after
    user.close()
    until(lambda: not run.overview()["clients"], 10, "the client is gone")


def test_a_client_uses_an_island_that_came_after_it(start: Start, background: Begin) -> None:
    """Through a slice, since `jax.devices()` lists the islands at the time of its connection."""
    run = start("1x1x1")
    user = background(
        run,
        """
        import fairway
        kind, text = fails(lambda: fairway.slice((2,)))
        say("before", kind=kind, text=text)
        sys.stdin.readline()
        with fairway.slice((2,)) as wide:
            mesh = Mesh(wide.devices, ("x",))
            x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))
            say("after", island=wide.island, total=float((x + 1).sum()))
            del x
        sys.stdin.readline()
        """,
    )
    assert user.hear("before")["kind"] == "SliceError"
    number = run.add_island(IslandSettings(1, 2))
    user.tell("go")
    assert user.hear("after") == {"island": number, "total": 36.0}
    user.close()
    until(lambda: not run.overview()["clients"], 10, "the client is gone")
    run.remove_island(number)


@pytest.mark.local("it counts the sockets by which hosts share memory")
def test_lives_of_islands_leave_nothing_behind(start: Start) -> None:
    run = start("1x1x1")
    sizes = []
    for _ in range(6):
        number = run.add_island(IslandSettings(1, 1))
        run.remove_island(number)
        sizes.append(rss_bytes(os.getpid()))
    assert sizes[-1] - sizes[2] < 4 << 20
    until(lambda: len(list(run.directory.glob("data-*.sock"))) == 1, 5, "sockets are gone")
