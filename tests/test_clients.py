"""Concurrent clients, long loops, and errors after which a client continues."""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import (
    Background,
    Begin,
    Measured,
    Up,
    client,
    hosts_of,
    is_alive,
    rss_bytes,
    said,
    until,
)

SOAK_S = float(os.environ.get("FAIRWAY_SOAK_S", "15"))
"""Duration for which two clients run concurrently, in seconds."""
OPERATIONS = int(os.environ.get("FAIRWAY_OPERATIONS", "20000"))
"""Number of operations of the long loop."""
MILLION = 1_000_000


COLLECTIVES = """
    from jax import lax
    seed = {seed}
    random = np.random.default_rng(seed)
    half = len(jax.devices()) // 2
    meshes = [Mesh(jax.devices()[:half], ("x",)), Mesh(jax.devices()[half:], ("x",))]

    def both(x):
        return lax.psum(x, "x"), lax.ppermute(x, "x", [(i, (i + 1) % half) for i in range(half)])

    steps = [
        jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("x"), out_specs=(P(), P("x"))))
        for mesh in meshes
    ]
    scale = [jax.jit(lambda x: x * 3 + 1) for _ in meshes]
    say("ready")
    sys.stdin.readline()
    rounds = 0
    began = time.monotonic()
    while time.monotonic() - began < {soak_s}:
        where = rounds % 2
        given = random.integers(0, 1000, (half, 64)).astype(np.float32)
        x = jax.device_put(given, NamedSharding(meshes[where], P("x")))
        total, turned = steps[where](scale[where](x))
        expected = given * 3 + 1
        np.testing.assert_array_equal(np.asarray(total)[0], expected.sum(0))
        np.testing.assert_array_equal(np.asarray(turned), np.roll(expected, 1, axis=0))
        if rounds % 8 == 0:
            moved = jax.device_put(turned, NamedSharding(meshes[1 - where], P("x")))
            np.testing.assert_array_equal(np.asarray(moved), np.roll(expected, 1, axis=0))
        rounds += 1
    say("done", rounds=rounds)
"""


@pytest.mark.alone
def test_two_clients_side_by_side(up: Up, background: Begin, measured: Measured) -> None:
    """Each runs collectives on the same islands; all results are right, with bounded latency."""
    both = [background(up, COLLECTIVES.format(seed=seed, soak_s=SOAK_S)) for seed in (1, 2)]
    for one in both:
        one.hear("ready")
    for one in both:
        one.tell("go")
    rounds = [one.hear("done", SOAK_S + 60)["rounds"] for one in both]
    measured("rounds of the slower client", min(rounds))
    assert min(rounds) > SOAK_S, rounds
    assert max(rounds) < 3 * min(rounds), f"one client was favoured: {rounds}"
    for one in both:
        one.process.wait(30)
    until(lambda: not up.overview()["clients"], 1, "nothing of the clients is left")
    assert not any(host["lost"] for host in hosts_of(up))


@pytest.mark.fast
def test_nothing_is_left_of_a_client_that_just_ends(up: Up) -> None:
    result = client(
        up,
        """
        import os
        x = jax.device_put(np.ones((8, 8)), jax.devices()[0])
        y = [jax.jit(lambda x, i=i: x @ x + i)(x) for i in range(4)]
        z = jax.device_put(y[0], jax.devices()[-1])
        say("holds", value=float(z[0, 0]))
        os._exit(0)
        """,
    )
    assert said(result.stdout, "holds") == {"value": 8.0}
    until(lambda: not up.overview()["clients"], 1, "nothing of the client is left")


@pytest.mark.fast
@pytest.mark.local("it is about shared memory between the controller and hosts")
def test_uploads_that_nothing_uses_are_let_go(up: Up) -> None:
    """Their bytes wait in shared memory for the first use; else they are freed with the array."""
    hosts = [int(host["process"]) for host in hosts_of(up)]

    def segments() -> int:
        maps = [Path(f"/proc/{host}/maps").read_text() for host in hosts]
        return sum(each.count("memfd:fairway") for each in maps)

    before = segments()
    result = client(
        up,
        """
        device, values = jax.devices()[0], np.ones(1 << 18, np.uint8)
        answer = jax.jit(lambda x: x + 1)
        small = jax.device_put(np.float32(1), device)
        for turn in range(100):
            x = jax.device_put(values, device)
            if turn % 2:
                x.delete()
            del x
            np.asarray(answer(small))  # what was asked before has been done
        say("done")
        """,
    )
    said(result.stdout, "done")
    assert segments() - before < 20, "one for each of a hundred uploads"


def test_a_client_that_is_far_ahead_waits(up: Up) -> None:
    """Back-pressure: its requests stay unread while hosts are busy; the connection stays open."""
    result = client(
        up,
        """
        @jax.jit
        def slow(x):
            return jax.lax.fori_loop(0, 40_000_000, lambda i, y: jnp.sin(y), x) * 0

        add = jax.jit(lambda x: x + 1)
        add(jnp.float32(0)).block_until_ready()
        y = slow(jnp.float32(1))
        for _ in range(40_000):
            y = add(y)
        say("holds", value=float(y))
        """,
    )
    assert said(result.stdout, "holds") == {"value": 40_000.0}


def test_devices_are_found_by_platform(up: Up) -> None:
    """Programs that ask for CPUs get those of the islands; with `proxy,cpu`, their own."""
    code = """
        said = [device.id for device in jax.devices("cpu")]
        x = jax.device_put(np.ones(3), jax.devices("cpu")[5])
        say("found", ids=said, island=getattr(jax.devices("cpu")[5], "island", None))
    """
    found = said(client(up, code).stdout, "found")
    assert found == {"ids": list(range(8)), "island": 1}
    own = {"JAX_PLATFORMS": "proxy,cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=6"}
    assert said(client(up, code, environment=own).stdout, "found") == {
        "ids": list(range(6)),
        "island": None,
    }


# A long loop


@pytest.fixture(scope="module")
def fresh(runtime: Path) -> Iterator[Up]:
    """Islands whose memory no other test uses."""
    directory = Path(tempfile.mkdtemp(prefix="fresh-", dir=runtime))
    with Up("--islands", "2x1x2", runtime=directory) as running:
        yield running


LOOP = """
    a, b = jax.devices()[0], jax.devices()[2]
    step = jax.jit(lambda x: x + 1)
    pair = jax.jit(lambda x, y: (x * 0.5 + y * 0, y))
    both = NamedSharding(Mesh(jax.devices()[:2], ("x",)), P("x"))
    spread = jax.jit(lambda x: x + x.sum())
    big = np.ones(1 << 15, np.float32)

    def work(operations):
        x = jax.device_put(np.zeros(8, np.float32), a)
        y = jax.device_put(np.zeros(8, np.float32), both)
        for i in range(operations // 8):
            for _ in range(5):
                x = step(x)
            x, _ = pair(x, x)
            y = spread(y * 0)
            if i % 64 == 0:
                assert np.isfinite(np.asarray(x)).all()
                assert float(jax.device_put(x, b)[0]) == float(x[0])
                assert float(jax.device_put(jax.device_put(big, a), b).sum()) == big.size
        jax.block_until_ready((x, y))

    work({warm})
    say("warm")
    sys.stdin.readline()
    began = time.monotonic()
    work({operations})
    say("done", s=time.monotonic() - began)
    sys.stdin.readline()
"""


def test_a_long_loop_needs_no_more_memory(fresh: Up, background: Begin, measured: Measured) -> None:
    """Less than 50 MB grow in all over a million operations; less over fewer."""
    code = LOOP.format(warm=20_000, operations=OPERATIONS)
    worker = background(fresh, code)
    worker.hear("warm", 240)
    processes = {"client": worker.pid, "controller": fresh.pid}
    processes |= {f"host {host['id']}": host["process"] for host in hosts_of(fresh)}
    time.sleep(0.5)
    before = {name: rss_bytes(process) for name, process in processes.items()}
    worker.tell("go")
    done = worker.hear("done", 240 + OPERATIONS / 500)
    time.sleep(0.5)
    growth = {name: rss_bytes(process) - before[name] for name, process in processes.items()}
    for name, grown in growth.items():
        measured(f"growth of {name} (MB)", grown / 1e6)
    measured("operations per second", OPERATIONS / done["s"])
    until(lambda: fresh.overview()["clients"][0]["buffers"] == 0, 2, "the directory is empty")
    # Allocators' overhead does not grow with the operations: 10 MB are theirs at any length.
    limit_mb = 10 + 40 * OPERATIONS / MILLION
    assert sum(growth.values()) / 1e6 < limit_mb, growth


# Errors after which a client continues


@pytest.fixture(scope="module")
def survivor(up: Up) -> Iterator[Background]:
    """One client for all following tests; it runs the code that it receives."""
    code = """
    for line in sys.stdin:
        exec(json.loads(line), globals())
    """
    with Background(up, code) as running:
        yield running


def fail_and_go_on(up: Up, survivor: Background, code: str) -> tuple[str, str]:
    """Runs code that sets ``kind, text``; the client computes on both islands afterwards."""
    go_on = """
say("failed", kind=kind, text=text)
for device in (jax.devices()[0], jax.devices()[-1]):
    x = jax.device_put(np.arange(8.0), device)
    say("on", value=float((x * 2).sum()))
"""
    survivor.tell(json.dumps(textwrap.dedent(code) + go_on))
    failed = survivor.hear("failed", 60)
    for _ in range(2):
        assert survivor.hear("on", 30) == {"value": 56.0}
    assert not any(host["lost"] for host in hosts_of(up))
    assert all(is_alive(host["process"]) for host in hosts_of(up))
    return failed["kind"], failed["text"]


@pytest.mark.parametrize(
    "make",
    [
        "jnp.zeros(2**40, jnp.float32)",
        "jax.jit(lambda: jnp.zeros((8, 2**38)).at[0, 0].set(1.0))()",
        "jnp.ones(2**40, jnp.float32, device=jax.devices()[5])",
        "jax.jit(lambda: jnp.zeros((4, 2**38)), out_shardings=NamedSharding("
        "Mesh(jax.devices()[:4], ('x',)), P('x')))()",
    ],
)
def test_an_array_larger_than_the_machine(up: Up, survivor: Background, make: str) -> None:
    code = f"kind, text = fails(lambda: jax.block_until_ready({make}))\n"
    kind, text = fail_and_go_on(up, survivor, code)
    assert kind == "JaxRuntimeError", text
    assert text.startswith("RESOURCE_EXHAUSTED"), text


def test_a_result_that_failed_fails_what_is_made_of_it(up: Up, survivor: Background) -> None:
    """Launches do not wait for one another; the first error propagates, to other islands too."""
    kind, text = fail_and_go_on(
        up,
        survivor,
        """
        def chain():
            x = jnp.zeros(2**40, jnp.float32)
            y = x[:4] + 1
            return np.asarray(jax.device_put(y, jax.devices()[-1]) * 2)
        kind, text = fails(chain)
        """,
    )
    assert kind == "JaxRuntimeError", text
    assert text.startswith("RESOURCE_EXHAUSTED"), text


@pytest.mark.fast
def test_an_unknown_custom_call(up: Up, survivor: Background) -> None:
    kind, text = fail_and_go_on(
        up,
        survivor,
        """
        call = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((4,), jnp.float32))
        kind, text = fails(lambda: jax.block_until_ready(jax.jit(call)()))
        """,
    )
    assert kind == "JaxRuntimeError", text
    assert text.split(":")[0] in ("UNIMPLEMENTED", "NOT_FOUND"), text
    assert "no_such_target" in text


def test_a_program_that_holds_addresses_of_its_client(up: Up, survivor: Background) -> None:
    """Dereferencing them would crash the host."""
    kind, text = fail_and_go_on(
        up,
        survivor,
        """
        def look(x):
            jax.debug.inspect_array_sharding(x, callback=print)
            return x
        x = jax.device_put(np.ones(8), NamedSharding(Mesh(jax.devices()[:4], ("x",)), P("x")))
        kind, text = fails(lambda: jax.block_until_ready(jax.jit(look)(x)))
        """,
    )
    assert kind == "JaxRuntimeError", text
    assert text.startswith("UNIMPLEMENTED: the program calls InspectSharding"), text


def test_use_after_donation(up: Up, survivor: Background) -> None:
    kind, text = fail_and_go_on(
        up,
        survivor,
        """
        f = jax.jit(lambda x: x + 1, donate_argnums=0)
        x = jax.device_put(np.ones(4, np.float32), jax.devices()[0])
        y = f(x)
        assert float(y.sum()) == 8.0 and x.is_deleted()
        kind, text = fails(lambda: jax.block_until_ready(x + 1))
        """,
    )
    assert kind in ("RuntimeError", "ValueError"), text
    assert "deleted" in text or "donated" in text, text


def test_a_jit_over_unequal_parts_of_islands(up: Up, survivor: Background) -> None:
    kind, text = fail_and_go_on(
        up,
        survivor,
        """
        mesh = Mesh(jax.devices()[2:5], ("x",))
        x = jax.device_put(np.ones((3, 4), np.float32), NamedSharding(mesh, P("x")))
        kind, text = fails(lambda: jax.block_until_ready(jax.jit(lambda x: x @ x.T + 1)(x)))
        """,
    )
    assert kind == "JaxRuntimeError", text
    assert text.startswith("INVALID_ARGUMENT"), text
    assert "island 0" in text
    assert "island 1" in text


def test_inputs_from_two_islands(up: Up, survivor: Background) -> None:
    """JAX itself refuses a computation whose arguments are on two islands; no host sees it."""
    kind, text = fail_and_go_on(
        up,
        survivor,
        """
        x = [jax.device_put(np.ones(4), device) for device in jax.devices()[::4]]
        kind, text = fails(lambda: jax.block_until_ready(x[0] + x[1]))
        """,
    )
    assert kind == "ValueError", text
    assert "incompatible devices" in text


IDLE = """
    jax.jit(lambda x: x + 1)(jnp.ones(4)).block_until_ready()
    began = time.process_time()
    time.sleep(2)
    say("idle", cpu_s=time.process_time() - began)
"""


@pytest.mark.alone
def test_a_client_that_does_nothing_takes_no_processor(up: Up) -> None:
    """The stock client alone would use a fifth of a core."""
    assert said(client(up, IDLE).stdout, "idle")["cpu_s"] < 0.1
