"""Valid programs that would crash a host are refused; everything that JAX lowers is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from conftest import Up, client, hosts_of, said
from jax.experimental import sparse
from jaxlib.mlir.dialects import stablehlo

from fairway.host.backend import Backend, UnreadableError, check_overrides
from fairway.host.checking import CheckKind, time_limit_s, written_anew
from fairway.host.programs import Signature
from fairway.host.screening import RefusedError, screen

pytestmark = pytest.mark.fast

LINALG: list[Callable[[Any], Any]] = [
    jnp.linalg.cholesky,
    jnp.linalg.inv,
    jnp.linalg.eig,
    jnp.linalg.eigh,
    jnp.linalg.eigvals,
    lambda x: jsl.schur(x) if x.ndim == 2 else jnp.linalg.det(x),
    jax.lax.linalg.hessenberg,
    jax.lax.linalg.tridiagonal,
    lambda x: jsl.solve_triangular(x, x),
    lambda x: jax.lax.linalg.triangular_solve(x, x[..., :2, :], left_side=False),
]
RECTANGULAR: list[Callable[[Any], Any]] = [
    jnp.linalg.svd,
    lambda x: jnp.linalg.svd(x, full_matrices=False),
    lambda x: jnp.linalg.svd(x, compute_uv=False),
    lambda x: jax.lax.linalg.svd(x, algorithm=jax.lax.linalg.SvdAlgorithm.QR),
    lambda x: jnp.linalg.qr(x, mode="complete"),
    jnp.linalg.qr,
    lambda x: jax.lax.linalg.qr(x, pivoting=True),
    jax.lax.linalg.lu,
]


def module_of(program: bytes) -> Any:
    return Backend.parse(program)


def lowered(function: Callable[..., Any], *arguments: Any) -> bytes:
    """Returns the program that a client sends for a function."""
    module = jax.jit(function).lower(*arguments).compiler_ir("stablehlo")
    return stablehlo.serialize_portable_artifact(
        module, stablehlo.get_current_version(), allow_other_dialects=True
    )


def screened(program: bytes) -> Any:
    module = module_of(program)
    with module.context:
        screen(module)
    assert module.operation.verify()
    return module


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_linear_algebra_is_let_through(batch: tuple[int, ...], dtype: Any) -> None:
    with jax.enable_x64(True):
        for function in LINALG:
            screened(lowered(function, jnp.ones((*batch, 5, 5), dtype)))
        for shape in ((5, 5), (7, 4), (4, 7), (1, 3), (3, 1)):
            for function in RECTANGULAR:
                screened(lowered(function, jnp.ones((*batch, *shape), dtype)))


def test_other_custom_calls_of_jax_are_let_through() -> None:
    x, d = jnp.ones((4, 8)), jnp.ones((2, 5))
    matrix = sparse.BCSR.fromdense(np.eye(5, 7, dtype=np.float32))
    for function, arguments in (
        (lambda x: jax.lax.top_k(x, 3), (x,)),
        (lambda a, b, c: jax.lax.linalg.ormqr(a, b, c), (x.T, jnp.ones(4), jnp.ones((8, 3)))),
        (lambda x: jax.lax.approx_max_k(x, 3), (x,)),
        (lambda d, b: jax.lax.linalg.tridiagonal_solve(d, d, d, b), (d, jnp.ones((2, 5, 3)))),
        (lambda m, x: m @ x, (matrix, jnp.ones((7, 3)))),
        (lambda m, x: m @ x, (matrix, jnp.ones(7))),
        (lambda x: jnp.tan(jax.lax.erf(jnp.arcsin(x))) + jax.lax.erf_inv(x), (x,)),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, y: jnp.linalg.inv(y), x), (jnp.eye(3),)),
    ):
        screened(lowered(function, *arguments))


def test_the_limit_on_reading_a_program_grows_with_its_size() -> None:
    """Each further byte allows a reader at least twice the processor time that it needs."""
    took, sizes = [], []
    for count in (2_000, 22_000):
        lines = "".join(f"%{n + 1} = stablehlo.sine %{n} : {F4}\n" for n in range(count))
        text = f"func.func @main(%0: {F4}) -> {F4} {{ {lines} return %{count} : {F4} }}"
        program = artifact(text)
        began = time.process_time()
        written_anew(CheckKind.ARTIFACT, program)
        took.append(time.process_time() - began)
        sizes.append(len(program))
    allowed = time_limit_s(sizes[1]) - time_limit_s(sizes[0])
    assert 2 * (took[1] - took[0]) < allowed, f"{took} s for {sizes} bytes"


def call(target: str, operands: list[str], results: list[str], config: str = "{}") -> str:
    """Returns a module that calls a target."""
    names = [f"%a{number}" for number in range(len(operands))]
    parameters = ", ".join(f"{name}: {kind}" for name, kind in zip(names, operands, strict=True))
    made, kinds = f"%r:{len(results)}", ", ".join(results)
    returned = ", ".join(f"%r#{number}" for number in range(len(results)))
    if len(results) == 1:
        made, returned = "%r", "%r"
    return f"""func.func public @main({parameters}) -> ({kinds}) {{
        {made} = stablehlo.custom_call @{target}({", ".join(names)})
            {{api_version = 4 : i32, backend_config = {config}}}
            : ({", ".join(operands)}) -> ({kinds})
        return {returned} : {kinds}
    }}"""


F4 = "tensor<4xf32>"
LARGE = "tensor<600x600xf32>"
IDENTITY = f"func.func public @main(%a: {F4}) -> {F4} {{ return %a : {F4} }}"
HOSTILE = {
    "a callback": call("xla_buffer_python_cpu_callback", [F4], [F4], "{index = 4702 : ui64}"),
    "an unknown target": call("no_such_target", [F4], [F4]),
    "an internal target": call("__onednn$matmul", [F4], [F4]),
    "memory that nothing wrote": call("dce_sink", [F4], [F4]),
    "top k": call("TopK", [F4], [F4], "{k = 99 : i64, largest = true}"),
    "a sharding": call("xla.sdy.FuncResultSharding", [F4], ["tensor<8xf32>"]),
    "potrf": call("lapack_spotrf_ffi", [LARGE], ["tensor<1x1xf32>", "tensor<i32>"]),
    "getrf": call("lapack_sgetrf_ffi", [LARGE], [LARGE, "tensor<1xi32>", "tensor<i32>"]),
    "geqrf": call("lapack_sgeqrf_ffi", [LARGE], [LARGE, "tensor<1xf32>"]),
    "syevd": call("lapack_ssyevd_ffi", [LARGE], [LARGE, "tensor<1xf32>", "tensor<i32>"]),
    "gesdd": call(
        "lapack_sgesdd_ffi",
        [LARGE],
        [LARGE, "tensor<600xf32>", "tensor<1x1xf32>", "tensor<1x1xf32>", "tensor<i32>"],
        "{mode = 65 : ui8}",
    ),
    "trsm": call("lapack_strsm_ffi", ["tensor<1x1xf32>", LARGE], [LARGE], "{side = 76 : ui8}"),
    "orgqr": call("lapack_sorgqr_ffi", ["tensor<4x4xf32>", "tensor<9xf32>"], ["tensor<4x4xf32>"]),
    "sparse": call(
        "cpu_csr_sparse_dense_ffi",
        ["tensor<4xf32>", "tensor<5xi32>", "tensor<4xi32>", "tensor<4x4xf32>"],
        ["tensor<9x4xf32>"],
    ),
    "recursion": f"""
        func.func public @main(%a: {F4}) -> {F4} {{
            %0 = call @f(%a) : ({F4}) -> {F4}
            return %0 : {F4}
        }}
        func.func private @f(%a: {F4}) -> {F4} {{
            %0 = call @g(%a) : ({F4}) -> {F4}
            return %0 : {F4}
        }}
        func.func private @g(%a: {F4}) -> {F4} {{
            %0 = call @f(%a) : ({F4}) -> {F4}
            return %0 : {F4}
        }}""",
    "no body": f"""
        func.func public @main(%a: {F4}) -> {F4} {{
            %0 = call @f(%a) : ({F4}) -> {F4}
            return %0 : {F4}
        }}
        func.func private @f({F4}) -> {F4}""",
    "no body, not called": f"{IDENTITY} func.func private @f({F4}) -> {F4}",
    "no main": f"func.func public @f(%a: {F4}) -> {F4} {{ return %a : {F4} }}",
    "2^64 elements": f"""func.func public @main(%a: {F4}) -> {F4} {{
        %0 = stablehlo.broadcast_in_dim %a, dims = [1]
            : ({F4}) -> tensor<4611686018427387904x4xf32>
        return %a : {F4}
    }}""",
    "a mesh": f"""module attributes {{mhlo.frontend_attributes = {{xla.sdy.meshes = "5 : i32"}}}} {{
        {IDENTITY} }}""",
    "shardings": f"""module attributes {{
        mhlo.frontend_attributes = {{xla.sdy.tuple_results_shardings = "garbage"}}}} {{
        {IDENTITY} }}""",
}


def artifact(text: str) -> bytes:
    with Backend.context():
        return stablehlo.serialize_portable_artifact_str(text, stablehlo.get_current_version())


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_refused(name: str) -> None:
    with pytest.raises(RefusedError):
        screened(artifact(HOSTILE[name]))


def test_a_sound_program_is_let_through() -> None:
    assert Signature(screened(artifact(IDENTITY))).name == "main"
    assert Signature(screened(artifact(f"module @named {{ {IDENTITY} }}"))).name == "named"
    meshes = "{mesh = #sdy.mesh<[\\22x\\22=2]>}"
    screened(
        artifact(
            f'module attributes {{mhlo.frontend_attributes = {{xla.sdy.meshes = "{meshes}"}}}} '
            f"{{ {IDENTITY} }}"
        )
    )


def test_regions_in_regions_are_bounded() -> None:
    body = f"stablehlo.return %a : {F4}"
    for _ in range(400):
        case = f'%r = "stablehlo.case"(%i) ({{ {body} }}) : (tensor<i32>) -> {F4}'
        body = f"{case} stablehlo.return %r : {F4}"
    body = body.removesuffix(f"stablehlo.return %r : {F4}") + f"return %r : {F4}"
    program = artifact(f"func.func public @main(%a: {F4}, %i: tensor<i32>) -> {F4} {{ {body} }}")
    with pytest.raises(RefusedError, match="regions"):
        screened(program)


def test_options_that_name_files_are_refused() -> None:
    check_overrides([("xla_cpu_enable_fast_math", "true"), ("xla_backend_optimization_level", 2)])
    check_overrides([("xla_dump_max_hlo_modules", 200)])
    for name in ("xla_dump_to", "xla_gpu_kernel_cache_file", "xla_backend_extra_options"):
        with pytest.raises(UnreadableError, match=name):
            check_overrides([(name, "x")])


def test_hosts_outlive_what_a_client_sends(up: Up, tmp_path: Path) -> None:
    """A wrong shape, indices out of bounds, a file that a host would write."""
    processes = [host["process"] for host in hosts_of(up)]
    result = client(
        up,
        f"""
        from jax.experimental import sparse
        x = jax.device_put(np.eye(600, dtype=np.float32), jax.devices()[0])
        small = jax.ShapeDtypeStruct((1, 1), np.float32), jax.ShapeDtypeStruct((), np.int32)
        factor = jax.ffi.ffi_call("lapack_spotrf_ffi", small)
        say("factor", text=fails(lambda: jax.jit(lambda x: factor(x, uplo=np.uint8(76)))(x))[1])
        columns = np.array([500_000_000, 2, 1_000_000_000, -7], np.int32)
        parts = np.ones(4, np.float32), columns, np.array([0, 1, 2, 3, 9], np.int32)
        matrix = sparse.BCSR(parts, shape=(4, 4))
        product = jax.jit(lambda m, x: m @ x)(matrix, np.ones((4, 3), np.float32))
        say("product", finite=bool(np.isfinite(np.asarray(product)).all()))
        lowered = jax.jit(lambda x: x * 3).lower(x)
        dump = {{"xla_dump_to": {str(tmp_path / "dumped")!r}}}
        say("dump", text=fails(lambda: lowered.compile(compiler_options=dump))[1])
        """,
    )
    assert "lapack_spotrf_ffi" in said(result.stdout, "factor")["text"], result.stderr
    assert said(result.stdout, "product") == {"finite": True}
    assert "xla_dump_to" in said(result.stdout, "dump")["text"]
    assert not (tmp_path / "dumped").exists()
    assert [host["process"] for host in hosts_of(up)] == processes
