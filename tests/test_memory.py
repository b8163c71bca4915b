"""Device memory: a client's quota, and spilling when clients together exceed the capacity."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import (
    Begin,
    Measured,
    Up,
    client,
    hosts_of,
    rss_bytes,
    said,
    until,
)

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

DEVICE_MEMORY = "8MiB"
SOAK_S = float(os.environ.get("FAIRWAY_SPILL_SOAK_S", "3"))
"""Duration for which two clients use twice the memory of the devices, in seconds."""
LEAK_BYTES = 48 << 20
"""Growth of a process, over the second half of a long run, that counts as a leak."""

TRAINING = """
import functools
mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
# Four arrays of which each device holds 1.5 MiB: 6 of its 8 MiB, from now to the end.
shape = (4 * 384, 1024)
state = [jax.device_put(np.full(shape, SEED + i, np.float32), rows) for i in range(4)]
jax.block_until_ready(state)

@functools.partial(jax.jit, donate_argnums=0)
def step(array, other):
    return array * 0.5 + other.mean() + 1.0

def reference(values):
    for turn in range(TURNS):
        i, j = turn % 4, (turn + 1) % 4
        values[i] = np.float32(values[i] * np.float32(0.5) + values[j] + np.float32(1.0))
    return values

say("ready")
sys.stdin.readline()
for turn in range(TURNS):
    i, j = turn % 4, (turn + 1) % 4
    state[i] = step(state[i], state[j])
found = [np.asarray(array) for array in state]
expected = reference([np.float32(SEED + i) for i in range(4)])
worst = max(float(np.abs(f - e).max() / abs(e)) for f, e in zip(found, expected))
say("result", worst=worst)
"""


@pytest.fixture(scope="module")
def islands() -> Iterator[Run]:
    settings = Settings.parse("1x2x2", device_memory=DEVICE_MEMORY)
    with Run(settings) as run:
        yield run


def memory(run: Run) -> tuple[int, int]:
    """Bytes in use on devices and spilled to hosts, over all hosts."""
    hosts = [host for island in run.overview()["islands"] for host in island["hosts"]]
    assert all(host["memory_bytes"] <= host["capacity_bytes"] for host in hosts)
    return (
        sum(host["memory_bytes"] for host in hosts),
        sum(host["spilled_bytes"] for host in hosts),
    )


@pytest.mark.parametrize("clients", [2, 3])
def test_clients_that_want_more_than_there_is_all_finish(
    islands: Run, background: Begin, clients: int
) -> None:
    programs = [
        background(islands, f"SEED, TURNS = {number * 10 + 1}, 30\n{TRAINING}")
        for number in range(clients)
    ]
    for program in programs:
        program.hear("ready")
    _, spilled = memory(islands)
    assert spilled > 0, "together they hold more than the devices"
    for program in programs:
        program.tell("go")
    for program in programs:
        assert program.hear("result")["worst"] < 1e-5
        program.close()
    until(lambda: memory(islands) == (0, 0), 10, "nothing is left of clients that are gone")


def test_one_that_can_never_fit_is_told_at_once(islands: Run) -> None:
    result = client(
        islands,
        """
        device = jax.devices()[0]
        large = np.zeros(9 << 20, np.uint8)
        kind, text = fails(lambda: jax.block_until_ready(jax.device_put(large, device)))
        say("array", kind=kind, text=text)
        x = jax.device_put(np.zeros(960 << 10, np.float32), device)
        grow = jax.jit(lambda x: (x + 1, x + 2, x * 3))
        kind, text = fails(lambda: jax.block_until_ready(grow(x)))
        say("run", kind=kind, text=text)
        say("after", total=float(jnp.sum(x + 1)) / x.size)
        """,
    )
    for word in ("array", "run"):
        found = said(result.stdout, word)
        assert "RESOURCE_EXHAUSTED" in found["text"], found
        assert "8.0 MiB" in found["text"]
    assert said(result.stdout, "after")["total"] == 1.0


def test_a_client_holds_what_a_device_has_and_may_use_what_it_deletes(islands: Run) -> None:
    result = client(
        islands,
        """
        device = jax.devices()[0]
        held = [jax.device_put(np.full(1 << 20, i, np.uint8), device) for i in range(8)]
        more = np.zeros(1 << 20, np.uint8)
        kind, text = fails(lambda: jax.block_until_ready(jax.device_put(more, device)))
        say("full", text=text)
        held[0].delete()
        del held[1]
        again = [jax.device_put(np.full(1 << 20, 40 + i, np.uint8), device) for i in range(2)]
        say("sums", values=[int(np.asarray(array).sum()) >> 20 for array in held[1:] + again])
        """,
    )
    assert "RESOURCE_EXHAUSTED" in said(result.stdout, "full")["text"]
    assert said(result.stdout, "sums")["values"] == [2, 3, 4, 5, 6, 7, 40, 41]


def test_a_copy_that_is_kept_of_several_counts_alone(islands: Run) -> None:
    """A put to one of its devices shares that device's copy; the other copy is freed."""
    result = client(
        islands,
        """
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        copies = jax.device_put(np.full(4 << 20, 7, np.uint8), NamedSharding(mesh, P()))
        one = jax.device_put(copies, jax.devices()[0])
        del copies
        whole = jax.device_put(np.full(8 << 20, 1, np.uint8), jax.devices()[1])
        say("sums", values=[int(np.asarray(array).sum()) >> 20 for array in (one, whole)])
        more = np.zeros(5 << 20, np.uint8)
        kind, text = fails(lambda: jax.block_until_ready(jax.device_put(more, jax.devices()[0])))
        say("full", text=text)
        """,
    )
    assert said(result.stdout, "sums")["values"] == [28, 8]
    assert "this client has 4.0 MiB in use" in said(result.stdout, "full")["text"]


def test_what_shares_memory_is_moved_together(islands: Run, background: Begin) -> None:
    """An array and its shards are aliases of one memory, before and after it was spilled."""
    holder = background(
        islands,
        """
        mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
        values = np.arange(1536 * 1024, dtype=np.float32)
        array = jax.device_put(values, NamedSharding(mesh, P("x")))
        shards = [shard.data for shard in array.addressable_shards]
        jax.block_until_ready(shards)
        say("ready")
        sys.stdin.readline()
        parts = np.concatenate([np.asarray(shard) for shard in shards])
        whole = np.asarray(array)
        double = jax.jit(lambda x: x * 2, donate_argnums=0)(array)
        equal = (parts == values).all() and (whole == values).all()
        say("result", equal=bool(equal), double=float(double[-1]))
        """,
    )
    holder.hear("ready")
    filler = client(
        islands,
        """
        held = [jax.device_put(np.zeros(8 << 20, np.uint8), d) for d in jax.devices()[:4]]
        jax.block_until_ready(held)
        say("done")
        """,
    )
    said(filler.stdout, "done")
    holder.tell("go")
    assert holder.hear("result") == {"equal": True, "double": 2.0 * (1536 * 1024 - 1)}


PROGRAMS = """
import fairway
first = Mesh(np.array(jax.devices()[:2]), ("x",))
second = Mesh(np.array(jax.devices()[2:4]), ("x",))
a, b = NamedSharding(first, P("x")), NamedSharding(second, P("x"))

def slow(x):
    for _ in range(4):
        x = jnp.sin(x) + 1.0
    return x

f = jax.jit(slow, out_shardings=a)
g = jax.jit(slow, out_shardings=b)

@fairway.program
def step(x):
    for _ in range(3):
        x = jax.device_put(g(jax.device_put(f(x), b)), a)
    return x

x = jax.device_put(np.full((2 * 256, 1024), SEED, np.float32), a)
keep = jax.device_put(np.full((2 * 768, 1024), SEED, np.float32), b)
expected = np.float32(SEED)
say("ready")
sys.stdin.readline()
for _ in range(10):
    x = step(x)
    for _ in range(24):
        expected = np.sin(expected, dtype=np.float32) + np.float32(1)
worst = float(np.abs(np.asarray(x) - expected).max())
say("result", worst=worst, kept=float(np.asarray(keep).min()))
"""


def test_whole_programs_of_three_clients_take_turns(islands: Run, background: Begin) -> None:
    """Deep queues of runs of programs that need much of the memory each."""
    programs = {seed: background(islands, f"SEED = {seed}\n{PROGRAMS}") for seed in (1, 2, 3)}
    for program in programs.values():
        program.hear("ready")
    for program in programs.values():
        program.tell("go")
    for seed, program in programs.items():
        found = program.hear("result")
        assert found["worst"] < 1e-4
        assert found["kept"] == seed
        program.close()
    until(lambda: memory(islands) == (0, 0), 10, "nothing is left of clients that are gone")


def test_results_of_two_clients_at_twice_the_memory(
    own_runtime: Path, background: Begin, measured: Measured
) -> None:
    """Each fills all devices and makes arrays of every kind, and compares them with NumPy's."""
    kinds = 9 if SOAK_S > 10 else 3
    config = own_runtime / "settings.toml"
    config.write_text('device_memory = "16MiB"\n')
    path = str(Path(__file__).with_name("oversubscribed.py"))
    with Up("--islands", "2x1x2", "--config", str(config), runtime=own_runtime) as up:
        both = []
        for seed in (1, 2):
            given = {"seed": seed, "seconds": SOAK_S, "device_bytes": 16 << 20, "kinds": kinds}
            code = f"sys.argv[1:] = [{json.dumps(given)!r}]\nimport runpy\n"
            both.append(background(up, code + f"runpy.run_path({path!r}, run_name='__main__')"))
        held = sum(one.hear("ready", 120)["held"] for one in both)
        assert held >= 1.8 * 4 * (16 << 20)
        spilled = sum(host["spilled_bytes"] for host in hosts_of(up))
        assert spilled > 0, "together they hold more than the devices"
        processes = {"controller": up.pid}
        processes |= {f"host {number}": host["process"] for number, host in enumerate(hosts_of(up))}
        for one in both:
            one.tell("go")
        history = watched(processes, SOAK_S)
        turns = [one.hear("done", 120)["turns"] for one in both]
        for number, count in enumerate(turns):
            measured(f"turns of client {number}", count)
        for one in both:
            one.process.wait(30)
        until(lambda: not up.overview()["clients"], 10, "nothing is left of clients that are gone")
        used = [(host["memory_bytes"], host["spilled_bytes"]) for host in hosts_of(up)]
        assert used == [(0, 0)] * 2
        assert not up.panics()
    for name, sizes in history.items():
        print(name, "MiB resident:", *(size >> 20 for size in sizes))
        if SOAK_S >= 120:
            assert sizes[-1] - sizes[len(sizes) // 2] < LEAK_BYTES, (name, sizes)


def watched(processes: dict[str, int], seconds: float) -> dict[str, list[int]]:
    """Resident bytes (RSS) of processes, in twenty samples over the time."""
    sizes: dict[str, list[int]] = {name: [] for name in processes}
    end = time.monotonic() + seconds
    for left in range(20, -1, -1):
        time.sleep(max(0.0, end - seconds * left / 20 - time.monotonic()))
        for name, process in processes.items():
            sizes[name].append(rss_bytes(process))
    return sizes
