"""Whole programs: IFRT IR that a client's compiler wrote, compiled once and run with one message.

The programs are written out here, so nothing is needed but jaxlib's own MPMD library.
"""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from conftest import Islands, client, said

COMPILE = """
from fairway import mpmd
from jax.interpreters import mlir

devices = jax.devices()
islands = [devices[:4], devices[4:]]

def placed(devices, axes, *spec):
    shape = tuple(axes.values())
    return NamedSharding(Mesh(np.array(devices).reshape(shape), tuple(axes)), P(*spec))

def compiled(text, *results):
    library = mpmd.library()
    avals = [jax.core.ShapedArray(shape, dtype) for shape, dtype, _ in results]
    shardings = [sharding for _, _, sharding in results]
    with mpmd.context() as context:
        module = mlir.ir.Module.parse(text, context)
        options = library.get_compile_options(module, {})
        return library.compile_mpmd(
            devices[0].client, module, devices, avals, shardings, options
        ).execute
"""


def run(islands: Islands, program: str, code: str) -> dict[str, Any]:
    """Returns the value printed under "it" by ``code``, which has the program as ``text``."""
    setup = f"text = '''{textwrap.dedent(program)}'''\n"
    done = client(islands, COMPILE + setup + textwrap.dedent(code))
    assert done.returncode == 0, done.stdout
    return said(done.stdout, "it")


CHAIN = """
#rows = #ifrt.sharding_param<4x1 to [0] on 4>
#whole = #ifrt.sharding_param<1x1 to [0] on 4>
!there = !ifrt.array<tensor<8x8xf32>, #rows, [0, 1, 2, 3]>
!here = !ifrt.array<tensor<8x8xf32>, #rows, [4, 5, 6, 7]>
!all = !ifrt.array<tensor<8x8xf32>, #whole, [4, 5, 6, 7]>
module @chain {
  func.func public @main(%x: !there {ifrt.donated}) -> (!there, !all, !all)
      attributes {ifrt.function} {
    %a, %c0 = ifrt.Call @square::@main(%x) on devices [0, 1, 2, 3]
        {ifrt.mesh_name = "m0", donated_input_indices = array<i32: 0>} : (!there) -> !there
    %b, %c1 = ifrt.CopyArrays(%a) : (!there) -> !here
    %d, %c2 = ifrt.Call @square::@main(%b) after %c0 on devices [4, 5, 6, 7]
        {ifrt.mesh_name = "m1"} : (!here) -> !here
    %e, %c3 = ifrt.Reshard(%d) : (!here) -> !all
    return %a, %e, %e : !there, !all, !all
  }
  module @square attributes {sym_visibility = "private"} {
    sdy.mesh @mesh = <["x"=4]>
    func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>})
        -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
      %y = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
        : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
      return %y : tensor<8x8xf32>
    }
  }
}
"""
"""A function that is called on both islands, with a copy between and a reshard at the end."""


def test_calls_copies_and_reshards_make_what_numpy_makes(up: Islands) -> None:
    heard = run(
        up,
        CHAIN,
        """
        rows, whole = placed(islands[0], {"x": 4}, "x"), placed(islands[1], {"x": 4})
        kind = (8, 8), np.float32
        execute = compiled(text, (*kind, rows), (*kind, whole), (*kind, whole))
        worst = 0.0
        for seed in range(3):
            x = np.random.RandomState(seed).rand(8, 8).astype(np.float32)
            given = jax.device_put(x, rows)
            a, e, again = execute([given])
            for got, want in ((a, x @ x), (e, x @ x @ x @ x), (again, x @ x @ x @ x)):
                worst = max(worst, float(np.max(np.abs(got - want) / want)))
        say("it", worst=worst, gone=given.is_deleted(), kept=not a.is_deleted(),
            shard=list(a.addressable_shards[3].data.shape))
        """,
    )
    assert heard["worst"] < 1e-5
    assert heard["gone"]
    assert heard["kept"]
    assert heard["shard"] == [2, 8]


MOVE = """
module @move {{
  func.func public @main(%x: !ifrt.array<tensor<8x8xi32>, #ifrt.sharding_param<{0}>, [0, 1, 2, 3]>)
      -> !ifrt.array<tensor<8x8xi32>, #ifrt.sharding_param<{1}>, {2}>
      attributes {{ifrt.function}} {{
    %y, %c = ifrt.Reshard(%x)
      : (!ifrt.array<tensor<8x8xi32>, #ifrt.sharding_param<{0}>, [0, 1, 2, 3]>)
      -> !ifrt.array<tensor<8x8xi32>, #ifrt.sharding_param<{1}>, {2}>
    return %y : !ifrt.array<tensor<8x8xi32>, #ifrt.sharding_param<{1}>, {2}>
  }}
}}
"""

CUTS: dict[str, tuple[Any, Any]] = {
    "2x2 to [0,1] on 2x2": ("a", "b"),
    "2x2 to [1,0] on 2x2": ("b", "a"),
    "4x1 to [0,1] on 2x2": (("a", "b"), None),
    "1x4 to [1,0] on 2x2": (None, ("b", "a")),
    "2x1 to [0,1] on 2x2": ("a", None),
    "1x2 to [1,0] on 2x2": (None, "b"),
    "1x1 to [0,1] on 2x2": (None, None),
}
"""IFRT's sharding parameters and JAX's equivalent on a mesh whose axes are a and b."""


@pytest.mark.parametrize("devices", ["[4, 5, 6, 7]", "[2, 0, 3, 1]"])
def test_a_reshard_keeps_values_however_they_are_cut(up: Islands, devices: str) -> None:
    programs = [
        (source, target, MOVE.format(parameter, other, devices))
        for parameter, source in CUTS.items()
        for other, target in CUTS.items()
    ]
    heard = run(
        up,
        "",
        f"""
        axes = {{"a": 2, "b": 2}}
        x = np.arange(64, dtype=np.int32).reshape(8, 8)
        wrong = []
        for source, target, text in {programs!r}:
            at = placed([devices[number] for number in {devices}], axes, *target)
            given = jax.device_put(x, placed(islands[0], axes, *source))
            [y] = compiled(text, (x.shape, x.dtype, at))([given])
            if not (np.asarray(y) == x).all() or given.is_deleted():
                wrong.append((source, target))
        say("it", wrong=wrong)
        """,
    )
    assert heard["wrong"] == []


EDGES = """
#whole = #ifrt.sharding_param<1 to [0] on 4>
!here = !ifrt.array<tensor<3xf32>, #whole, [0, 1, 2, 3]>
!there = !ifrt.array<tensor<3xf32>, #whole, [4, 5, 6, 7]>
module @edges {
  func.func public @main(%x: !here) -> (!here, !here, !there) attributes {ifrt.function} {
    %y, %c = ifrt.Call @three::@main() on devices [4, 5, 6, 7]
        {ifrt.mesh_name = "m"} : () -> !there
    return %x, %x, %y : !here, !here, !there
  }
  module @three attributes {sym_visibility = "private"} {
    func.func @main() -> tensor<3xf32> {
      %y = stablehlo.constant dense<3.0> : tensor<3xf32>
      return %y : tensor<3xf32>
    }
  }
}
"""


def test_arguments_may_be_results_and_functions_may_have_none(up: Islands) -> None:
    heard = run(
        up,
        EDGES,
        """
        here, there = placed(islands[0], {"x": 4}), placed(islands[1], {"x": 4})
        execute = compiled(text, *(((3,), np.float32, at) for at in (here, here, there)))
        x = jax.device_put(np.arange(3, dtype=np.float32), here)
        one, other, three = execute([x])
        values = [np.asarray(array).tolist() for array in (one, other, three)]
        one.delete()  # and with it, what is the same array
        errors = [fails(lambda: jnp.add(array, 1))[1] for array in (x, other)]
        say("it", values=values, errors=errors, three=float((three + 1)[0]))
        """,
    )
    assert heard["values"] == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [3.0, 3.0, 3.0]]
    assert all("has been deleted" in error for error in heard["errors"])
    assert heard["three"] == 4.0


def test_a_donated_argument_that_is_a_result_lives_on_in_it(up: Islands) -> None:
    heard = run(
        up,
        EDGES.replace("(%x: !here)", "(%x: !here {ifrt.donated})"),
        """
        here, there = placed(islands[0], {"x": 4}), placed(islands[1], {"x": 4})
        execute = compiled(text, *(((3,), np.float32, at) for at in (here, here, there)))
        x = jax.device_put(np.arange(3, dtype=np.float32), here)
        for _ in range(3):
            given = x
            x, other, three = execute([given])
            assert given.is_deleted()
        twice = (np.asarray(x) + np.asarray(other)).tolist()
        other.delete()
        say("it", twice=twice, error=fails(lambda: jnp.add(x, 1))[1])
        """,
    )
    assert heard["twice"] == [0.0, 2.0, 4.0]
    assert "has been deleted" in heard["error"]


AFTER = """
#whole = #ifrt.sharding_param<1 to [0] on 4>
!here = !ifrt.array<tensor<3xf32>, #whole, [0, 1, 2, 3]>
!there = !ifrt.array<tensor<3xf32>, #whole, [4, 5, 6, 7]>
module @after {
  func.func public @main(%x: !here, %y: !there) -> (!here, !there) attributes {ifrt.function} {
    %a, %c0 = ifrt.Call @twice::@main(%x) on devices [0, 1, 2, 3]
        {ifrt.mesh_name = "m0"} : (!here) -> !here
    %b, %c1 = ifrt.Call @twice::@main(%a) after %c0 on devices [0, 1, 2, 3]
        {ifrt.mesh_name = "m0"} : (!here) -> !here
    %d, %c2 = ifrt.Call @twice::@main(%y) after %c1 on devices [4, 5, 6, 7]
        {ifrt.mesh_name = "m1"} : (!there) -> !there
    return %b, %d : !here, !there
  }
  module @twice attributes {sym_visibility = "private"} {
    func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
      %y = stablehlo.add %x, %x : tensor<3xf32>
      return %y : tensor<3xf32>
    }
  }
}
"""
"""Two calls that become one launch, and one that must follow though it depends on neither."""


def test_what_must_follow_a_call_may_follow_one_that_became_part_of_a_launch(up: Islands) -> None:
    heard = run(
        up,
        AFTER,
        """
        at = placed(islands[0], {"x": 4}), placed(islands[1], {"x": 4})
        execute = compiled(text, *(((3,), np.float32, sharding) for sharding in at))
        results = execute([jax.device_put(np.arange(3, dtype=np.float32), to) for to in at])
        say("it", values=[np.asarray(result).tolist() for result in results])
        """,
    )
    assert heard["values"] == [[0.0, 4.0, 8.0], [0.0, 2.0, 4.0]]


CONTRADICTION = CHAIN.replace(
    '-> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>',
    '-> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>',
)
UNKNOWN = """
#one = #ifrt.sharding_param<1x1 to [0] on 1>
#rows = #ifrt.sharding_param<2x1 to [0] on 2>
!x = !ifrt.array<tensor<2x2xf32>, #one, [0]>
!y = !ifrt.array<tensor<2x2xf32>, #one, [4]>
!z = !ifrt.array<tensor<4x2xf32>, #rows, [0, 4]>
module @unknown {
  func.func public @main(%x: !x, %y: !y) -> !z attributes {ifrt.function} {
    %z, %c = "ifrt.Assemble"(%x, %y) {operandSegmentSizes = array<i32: 2, 0>}
      : (!x, !y) -> (!z, !ifrt.control)
    return %z : !z
  }
}
"""


@pytest.mark.parametrize(
    ("program", "said_of_it"),
    [
        (CONTRADICTION, "square was compiled for"),
        (UNKNOWN, "the program has an operation ifrt.Assemble"),
    ],
)
def test_a_program_that_cannot_run_is_refused_and_the_client_goes_on(
    up: Islands, program: str, said_of_it: str
) -> None:
    heard = run(
        up,
        CHAIN,
        f"""
        rows, whole = placed(islands[0], {{"x": 4}}, "x"), placed(islands[1], {{"x": 4}})
        results = [((8, 8), np.float32, sharding) for sharding in (rows, whole, whole)]
        _, error = fails(lambda: compiled({program!r}, *results))
        x = np.eye(8, dtype=np.float32)
        good = compiled(text, *results)([jax.device_put(x, rows)])
        say("it", error=error, good=bool((np.asarray(good[1]) == x).all()))
        """,
    )
    assert said_of_it in heard["error"]
    assert heard["good"]
