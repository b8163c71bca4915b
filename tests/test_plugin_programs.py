"""Requests in JSON (``PluginProgram``), as pathwaysutils and Orbax's handler for Pathways send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Notebook, client, said

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("tensorstore")

SETUP = """
import base64
from jax.extend.ifrt_programs import ifrt_programs
from jax.interpreters import pxla

devices = jax.devices()
everywhere = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
square = Mesh(np.array(devices[:4]).reshape(2, 2), ("a", "b"))
others = Mesh(np.array(devices[4:]), ("x",))

def compiled(request):
    text = request if isinstance(request, str) else json.dumps(request)
    program = ifrt_programs.make_plugin_program(text)
    return devices[0].client.compile_ifrt_program(
        program, ifrt_programs.make_plugin_compile_options()
    )

def call(executable, arrays, avals=(), shardings=()):
    done = executable.execute_sharded(arrays, with_tokens=True)
    results = done.consume_with_handlers(
        pxla.global_avals_to_results_handler(avals, shardings, True).handlers
    )
    done.consume_token().block_until_ready()
    return results

def described(sharding, rank):
    proto = sharding._to_xla_hlo_sharding(rank).to_proto().SerializeToString()
    ids = [device.id for device in sharding._device_assignment]
    return {
        "devices": {"device_ids": ids}, "xla_hlo_sharding": base64.b64encode(proto).decode()
    }

def resharding(before, after, donate=False):
    return compiled({"reshardRequest": {
        "donateInput": donate,
        "inSharding": [described(one, 2) for one in before],
        "outSharding": [described(one, 2) for one in after],
    }})
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with Run(Settings.parse("2x2x2")) as up:
        yield up


@pytest.fixture(scope="module")
def do(run: Run) -> Iterator[Callable[[str], None]]:
    with Notebook(run, SETUP) as notebook:
        yield notebook.run


def test_arrays_are_resharded_again_and_again(do: Callable[[str], None]) -> None:
    do("""
        before = [NamedSharding(square, P("a", "b")), NamedSharding(square, P(None, "b"))]
        after = [NamedSharding(others, P(None, "x")), everywhere]
        plan = resharding(before, after)
        for turn in range(3):
            values = [np.arange(64.0, dtype="f").reshape(8, 8) + turn, np.full((16, 4), turn, "i")]
            arrays = [jax.device_put(*pair) for pair in zip(values, before)]
            found = call(plan, arrays, [array.aval for array in arrays], after)
            for array, value, sharding in zip(found, values, after):
                assert array.sharding == sharding
                np.testing.assert_array_equal(array, value)
            assert not arrays[0].is_deleted()
    """)


def test_arguments_are_donated_where_it_is_asked_for(do: Callable[[str], None]) -> None:
    do("""
        here, there = NamedSharding(square, P("a", "b")), NamedSharding(others, P("x"))
        plan = resharding([here], [there], donate=True)
        array = jax.device_put(np.ones((4, 4), "f"), here)
        [found] = call(plan, [array], [array.aval], [there])
        assert float(found.sum()) == 16
        assert "deleted" in fails(lambda: np.asarray(array + 0))[1]
        text = fails(lambda: np.asarray(call(plan, [], [array.aval], [there])[0]))[1]
        assert "1 arrays is given 0" in text, text
    """)


def test_what_is_no_request_is_refused(do: Callable[[str], None]) -> None:
    do("""
        for text, reason in {
            "hello": "no JSON",
            "{}": "known are reshardRequest",
            '{"profileRequest": {"traceLocation": "/tmp"}}': "profileRequest",
            '{"reshardRequest": {"outSharding": 5}}': "no list",
            '{"persistenceWriteRequest": {}}': "devices is missing",
        }.items():
            assert reason in fails(lambda: compiled(text))[1], (text, fails(lambda: compiled(text)))
    """)


ORBAX = """
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.serialization import cloud_pathways_array_handler as pathways

devices = jax.devices()
everywhere = Mesh(np.array(devices), ("x",))
square = Mesh(np.array(devices[:4]).reshape(2, 2), ("a", "b"))
WANTED = {
    "w": np.arange(64, dtype="f").reshape(8, 8),
    "deep": {"c": np.arange(8, dtype="i"), "k": np.ones((4, 4), jnp.bfloat16)},
}

def handler():
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))

def check(found, shardings):
    for (path, array), sharding in zip(jax.tree_util.tree_leaves_with_path(found), shardings):
        wanted = WANTED
        for key in path:
            wanted = wanted[key.key]
        assert array.sharding == sharding and array.dtype == wanted.dtype, path
        np.testing.assert_array_equal(np.asarray(array), wanted)
"""


def test_orbax_saves_by_hosts_and_anything_restores_it(run: Run, tmp_path: Path) -> None:
    """Over two islands of two hosts; the client touches no array."""
    folder = str(tmp_path / "checkpoint")
    code = (
        ORBAX
        + f"""
type_handlers.register_type_handler(jax.Array, pathways.CloudPathwaysArrayHandler(), override=True)
whole, cut = NamedSharding(everywhere, P()), NamedSharding(everywhere, P("x"))
tree = {{
    "w": jax.device_put(WANTED["w"], cut),
    "deep": {{
        "c": jax.device_put(WANTED["deep"]["c"], whole),
        "k": jax.device_put(WANTED["deep"]["k"], NamedSharding(square, P("a", "b"))),
    }},
}}
handler().save({folder!r}, tree)
w, c, k = NamedSharding(square, P("b")), NamedSharding(square, P()), cut
k = NamedSharding(everywhere, P())
restore = lambda sharding, value: ocp.ArrayRestoreArgs(
    sharding=sharding, global_shape=value.shape, dtype=value.dtype
)
args = {{
    "w": restore(w, WANTED["w"]),
    "deep": {{"c": restore(c, WANTED["deep"]["c"]), "k": restore(k, WANTED["deep"]["k"])}},
}}
found = handler().restore({folder!r}, restore_args=args)
check(found, [c, k, w])
lost = fails(lambda: handler().restore({folder!r} + "x", restore_args=args))
say("restored", error=lost[1])
"""
    )
    result = client(run, code)
    assert "restored" in result.stdout, result.stdout
    code = (
        ORBAX
        + f"""
one = jax.sharding.SingleDeviceSharding(devices[0])
args = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=one), WANTED)
check(handler().restore({folder!r}, restore_args=args), [one] * 3)
say("restored")
"""
    )
    code = code.replace("reshape(2, 2)", "reshape(1, -1)")
    result = client(None, code, environment={"JAX_PLATFORMS": "cpu"})
    assert said(result.stdout, "restored") == {}, result.stdout
