"""A host is lost when only some hosts of another island have received their parts of an array."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Begin, Measured, Start, client, hosts_of, said

from fairway.cluster.supervisor import Run

PLACES = """
    import os, signal
    meshes = [Mesh(np.array(jax.devices()[at:at + 2]), ("x",)) for at in (0, 2, 4)]
    parts = [NamedSharding(mesh, P("x")) for mesh in meshes]
    whole = [NamedSharding(mesh, P()) for mesh in meshes]
    total = jax.jit(lambda x: x.sum(), out_shardings=whole[1])
    double = jax.jit(lambda x: 2 * x)
    big = jax.device_put(np.ones(1 << 20, np.float32), parts[0])
"""

HALF = (
    PLACES
    + """
    old = jax.device_put(np.arange(8.0, dtype=np.float32), parts[1])
    there = jax.device_put(np.arange(8.0, dtype=np.float32), parts[2])
    jax.block_until_ready([total(old), total(jax.device_put(big, parts[1])), double(there)])
    def over_both(x):
        return jax.device_put(total(jax.device_put(x, parts[1])), whole[2])
    {prepare}
    os.kill({victim}, signal.SIGSTOP)
    arrived = jax.device_put(big, parts[1])  # from one of two hosts
    derived = total(arrived)
    sent = jax.device_put(derived, whole[2])
    used = double(sent)
    {start}
    apart = double(there)
    before = total(old)
    time.sleep(0.5)
    os.kill({victim}, signal.SIGKILL)
    begun = time.monotonic()
    say("lost", **{{name: fails(lambda: np.asarray(array)) for name, array in
        dict(derived=derived, sent=sent, used=used, {more}).items()}})
    say("kept", old=np.asarray(old).tolist(), apart=np.asarray(apart).tolist())
    say("again", total=float(total(old)), seconds=time.monotonic() - begun)
"""
)

OTHER = """
    devices = jax.devices()[2:4]
    x = jax.device_put(np.ones(2, np.float32), NamedSharding(Mesh(devices, ("x",)), P("x")))
    step = jax.jit(lambda x: x * 0.5 + x.sum() / 4)
    jax.block_until_ready(step(x))
    say("ready")
    worst = count = 0
    end = time.monotonic() + 8
    while time.monotonic() < end:
        begun = time.monotonic()
        x = jax.block_until_ready(step(x))
        worst, count = max(worst, time.monotonic() - begun), count + 1
        time.sleep(0.002)
    say("over", worst=worst, count=count, value=float(np.asarray(x)[0]))
"""

PROGRAM = {
    "prepare": """
    import fairway
    program = fairway.program(over_both)
    jax.block_until_ready(program(big))
    """,
    "start": "ran = program(big)",
    "more": "ran=ran",
}


def half(run: Run, **more: str) -> str:
    """The script of a client of three islands of two hosts; a host of the first is killed."""
    victim = hosts_of(run)[1]["process"]
    parts = {"prepare": "", "start": "", "more": "", **more}
    return HALF.format(victim=victim, **parts)


def check(output: str) -> None:
    for name, error in said(output, "lost").items():
        assert error[0] == "JaxRuntimeError", (name, error, output)
        assert "host 1 of island 0 is lost" in error[1], (name, error)
    kept = said(output, "kept")
    assert kept["old"] == list(range(8))
    assert kept["apart"] == [2 * n for n in range(8)]
    again = said(output, "again")
    assert again["total"] == 28
    assert again["seconds"] < 10


@pytest.mark.parametrize("more", [{}, PROGRAM], ids=["op by op", "program"])
def test_an_array_of_which_half_arrives_fails_alone(start: Start, more: dict[str, str]) -> None:
    run = start("3x2x1")
    check(client(run, half(run, **more), 90).stdout)
    assert [bool(host["lost"]) for host in hosts_of(run)] == [True] * 2 + [False] * 4


def test_other_clients_of_the_island_go_on(
    start: Start,
    background: Begin,
    measured: Measured,
) -> None:
    run = start("3x2x1")
    other = background(run, OTHER)
    other.hear("ready")
    check(client(run, half(run), 90).stdout)
    over = other.hear("over")
    measured("longest step of another client (s)", over["worst"])
    assert over["value"] == 1, over
    assert over["worst"] < 1, over
    # The island serves clients that come later.
    code = PLACES.replace("parts[0])", "parts[1])") + '    say("late", total=float(total(big)))'
    assert said(client(run, code).stdout, "late")["total"] == 1 << 20


def test_the_end_of_an_input_takes_no_other_arrays_along(start: Start) -> None:
    """All hosts of an island have that error, so all leave out what needs the batch."""
    code = """
        import fairway
        mesh = Mesh(np.array(jax.devices()), ("x",))
        rows = NamedSharding(mesh, P("x"))
        batches = fairway.inputs(
            "feeds:rows", batch=4, stop=2,
            like=jax.ShapeDtypeStruct((4, 2), np.int32, sharding=rows))
        total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))
        x = jax.device_put(np.arange(4.0, dtype=np.float32), rows)
        jax.block_until_ready([total(x), total(batches())])
        batches()
        gone = total(batches())
        after = [total(x * n) for n in range(50)]
        say("over", gone=fails(lambda: int(gone)), after=[float(one) for one in after])
    """
    here = Path(__file__).parent
    run = start("1x2x1", input_modules=("feeds",), input_path=(here,))
    done = client(run, code, environment={"PYTHONPATH": str(here)})
    over = said(done.stdout, "over")
    assert "has ended after 2 batches" in over["gone"][1], over
    assert over["after"] == [6 * n for n in range(50)]
