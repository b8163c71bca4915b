"""Slices: devices requested by the shape of their mesh."""

import pytest
from conftest import Start, Up, client, said

SLICES = """
import fairway
from fairway.errors import SliceError

def refusal(**wanted):
    try:
        fairway.slice(**wanted)
    except SliceError as error:
        return str(error)
    return "nothing"
"""


@pytest.mark.fast
def test_work_on_slices_is_that_on_devices(up: Up):
    ended = client(
        up,
        SLICES
        + """
before = len(jax.devices())
one, other = fairway.slice((2, 2)), fairway.slice((4,))
mesh = Mesh(one.devices, ("x", "y"))
x = jax.device_put(np.arange(16.0, dtype="f").reshape(4, 4), NamedSharding(mesh, P("x", "y")))
double = jax.jit(lambda x: x @ x)
moved = jax.device_put(double(x), NamedSharding(Mesh(other.devices, "z"), P("z")))
plain = jax.device_put(moved, jax.devices()[0])
assert np.array_equal(plain, np.arange(16.0).reshape(4, 4) @ np.arange(16.0).reshape(4, 4))
step = fairway.program(lambda x: jax.device_put(double(x), NamedSharding(mesh, P("y"))))
assert np.array_equal(step(x), plain)
say("slices", islands=[one.island, other.island], shape=one.devices.shape, before=before,
    after=len(jax.devices()))
""",
    )
    told = said(ended.stdout, "slices")
    assert sorted(told["islands"]) == [0, 1], "the second goes where the first is not"
    assert (told["shape"], told["before"], told["after"]) == ([2, 2], 8, 8)


def test_load_is_spread_and_given_back(up: Up):
    ended = client(
        up,
        SLICES
        + """
slices = [fairway.slice((2,)) for _ in range(4)]
say("first", islands=[one.island for one in slices])
numbers = {d.id for one in slices for d in one.devices.flat}
kept = jax.device_put(np.ones(2), slices[0].devices[0])
for one in slices:
    one.free()
assert np.array_equal(kept + 1, [2, 2]), "what lies there stays"
for _ in range(300):
    with fairway.slice((2, 2), island=1) as one:
        assert one.island == 1
        again = {d.id for d in one.devices.flat}
say("again", new=len(again - numbers))
""",
    )
    islands = said(ended.stdout, "first")["islands"]
    assert sorted(islands) == [0, 0, 1, 1]
    assert said(ended.stdout, "again")["new"] == 0, "numbers are given out again"


def test_what_cannot_be_is_explained(up: Up):
    ended = client(
        up,
        SLICES
        + """
say("large", why=refusal(shape=(3, 3)))
say("empty", why=refusal(shape=(0,)))
say("less", why=refusal(shape=(2, -1)))
say("below", why=refusal(shape=(1,), island=-1))
say("owed", why=refusal(shape=(1,), memory=-5))
say("nowhere", why=refusal(shape=(2,), island=7))
many = [fairway.slice((4,)) for _ in range(16)]
say("many", why=refusal(shape=(4,)))
one, other = many[0], next(s for s in many[1:] if s.island == many[0].island)
twice = np.array([one.devices[0], other.devices[0]])
at_twice = NamedSharding(Mesh(twice, "x"), P("x"))
say("twice", why=fails(lambda: jax.device_put(np.ones(2), at_twice).block_until_ready())[1])
""",
    )
    why = {word: said(ended.stdout, word)["why"] for word in
           ("large", "empty", "less", "below", "owed", "nowhere", "many", "twice")}  # fmt: skip
    assert (
        "needs 9 neighbouring devices on one island; island 0 has 4, island 1 has 4" in why["large"]
    )
    assert "has no devices" in why["empty"]
    assert "a slice of shape [2, -1] has no devices" in why["less"]
    assert why["below"] == "there is no island -1"
    assert "cannot reserve -5 bytes" in why["owed"]
    assert "on island 7" in why["nowhere"]
    assert "64 virtual devices, and 64 are in use" in why["many"]
    assert "are one physical device" in why["twice"]


def test_slices_go_where_there_is_memory(start: Start):
    ended = client(
        start("2x1x2", device_memory="64MiB"),
        SLICES
        + """
large = [fairway.slice((2,), memory="48MiB") for _ in range(2)]
say("large", islands=[one.island for one in large])
say("full", why=refusal(shape=(1,), memory=17 << 20))
small = fairway.slice((2,), island=0, memory=16 << 20)
say("taken", why=refusal(shape=(1,), island=0, memory=1))
assert fairway.slice((2,), island=0).island == 0, "none is asked for"
large[0].free()
say("again", island=fairway.slice((2,), memory="48MiB").island)
say("size", why=fails(lambda: fairway.slice((1,), memory="much")))
""",
    )
    assert sorted(said(ended.stdout, "large")["islands"]) == [0, 1]
    full = said(ended.stdout, "full")["why"]
    assert "1 neighbouring devices with 17.0 MiB each" in full, full
    assert "island 0 has 2, with at most 16.0 MiB free of claims" in full, full
    assert "at most 0 B" in said(ended.stdout, "taken")["why"]
    large = said(ended.stdout, "large")["islands"]
    assert said(ended.stdout, "again")["island"] == large[0]
    assert said(ended.stdout, "size")["why"][0] == "ConfigError"


def test_memory_may_be_asked_for_where_the_capacity_is_unknown(up: Up):
    """As on CPUs: scripts that request it run there too."""
    ended = client(up, SLICES + "say('got', island=fairway.slice((2,), memory='4GiB').island)")
    assert said(ended.stdout, "got")["island"] in (0, 1), ended.stdout


def test_slices_go_with_their_client(up: Up):
    for _ in range(3):
        ended = client(up, SLICES + "say('held', n=len([fairway.slice((4,)) for _ in range(16)]))")
        assert said(ended.stdout, "held")["n"] == 16


def test_without_fairway_there_are_no_slices():
    ended = client(None, SLICES + "say('why', why=refusal(shape=(1,)))", environment={
        "JAX_PLATFORMS": "cpu"})  # fmt: skip
    assert "fairway run" in said(ended.stdout, "why")["why"]
