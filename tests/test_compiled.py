"""Programs that are equal but for names and locations are compiled once on a host."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from conftest import Start, client, said
from jax._src import compiler
from jaxlib import _jax

from fairway.host import compiled, messages
from fairway.host.compiled import CompiledPrograms, fingerprint


def key_of(function: Callable[..., Any], *arguments: Any, **given: Any) -> str:
    """The fingerprint of a function that JAX lowers, on devices 0 of a grid of one."""
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    for name, value in given.pop("debug", {}).items():
        setattr(options.executable_build_options.debug_options, name, value)
    devices, grid = given.pop("devices", [0]), given.pop("grid", (1, 1))
    lowered = jax.jit(function, **given).lower(*arguments)
    role = messages.CompileRole(True, [])
    command = messages.Compile(1, 1, b"", options.SerializeAsString(), devices, grid, role)
    return fingerprint(lowered.compiler_ir("stablehlo"), command)[0]


def test_names_and_locations_do_not_count() -> None:
    ones = jnp.ones((4, 3))

    def one(x: Any) -> Any:
        return jnp.tanh(x) * 2

    def other(y: Any) -> Any:
        doubled = jnp.tanh(y)

        return doubled * 2

    assert key_of(one, ones) == key_of(other, ones)


@pytest.mark.parametrize(
    "changed",
    [
        {"function": lambda x: jnp.tanh(x) * 3},
        {"shape": (3, 4)},
        {"dtype": jnp.int32},
        {"donate_argnums": 0},
        {"devices": [1]},
        {"debug": {"xla_backend_optimization_level": 1}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_all_else_counts(changed: dict[str, Any]) -> None:
    def found(**given: Any) -> str:
        function = given.pop("function", lambda x: jnp.tanh(x) * 2)
        shape, dtype = given.pop("shape", (4, 3)), given.pop("dtype", jnp.float32)
        return key_of(function, jnp.ones(shape, dtype), **given)

    assert found() != found(**changed)
    assert found(**changed) == found(**changed)


def test_maps_among_options_are_written_in_one_order() -> None:
    """Protocol buffers write them in any order; what is parsed is written alike each time."""
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    written = options.SerializeAsString()
    again = {_jax.CompileOptions.ParseFromString(written).SerializeAsString() for _ in range(20)}
    assert len(again) == 1


class Executable:
    """Stands for an executable in what concerns its size."""

    def __init__(self, size: int) -> None:
        self.generated_code_size_in_bytes = size

    def get_compiled_memory_stats(self) -> Executable:
        return self


def test_threads_wait_for_the_one_that_compiles() -> None:
    known, begun, may_end = CompiledPrograms(), threading.Event(), threading.Event()
    made: list[Any] = []
    found: list[tuple[Any, bool]] = []

    def compile_program() -> Executable:
        begun.set()
        assert may_end.wait(10)
        made.append(Executable(1))
        return made[-1]

    def ask() -> None:
        found.append(known.get("a", 1, compile_program))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    threads[0].start()
    assert begun.wait(10)
    for thread in threads[1:]:
        thread.start()
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert len(made) == 1
    assert [one for one, _ in found] == made * 8
    assert sorted(was_known for _, was_known in found) == [False] + [True] * 7


def test_what_fails_is_compiled_again() -> None:
    known = CompiledPrograms()

    def fail() -> Any:
        raise ValueError("no such operation")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such operation"):
            known.get("a", 1, fail)
    one = Executable(1)
    assert known.get("a", 1, lambda: one) == (one, False)
    assert known.get("a", 1, fail) == (one, True)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COUNT_MAX", 3)
    monkeypatch.setattr(compiled, "BYTES_MAX", 100)
    known = CompiledPrograms()

    def have(key: str, code: int, size: int = 1) -> bool:
        return known.get(key, size, lambda: Executable(code))[1]

    assert not any(have(key, 10) for key in "abc")
    assert have("a", 10)
    assert not have("d", 10)  # drops b, which was used least recently
    assert have("a", 10)
    assert not have("b", 10)
    assert not have("large", 90)
    assert not have("a", 10)
    # A program with large constants counts by them, and is not kept if it is too large.
    assert not have("constants", 0, size=101)
    assert not have("constants", 0, size=101)


def test_a_script_that_runs_again_compiles_nothing(start: Start, tmp_path: Path) -> None:
    """Its functions have other names, and the first client is gone when the second comes."""
    path = tmp_path / "timeline.json"
    run = start("1x1x2", timeline=path)
    code = """
@jax.jit
def NAME(x):
    return jnp.sum(jnp.tanh(x) * 1.5, axis=0)
mesh = Mesh(np.array(jax.devices()), ("x",))
x = jax.device_put(np.arange(8.0).reshape(4, 2), NamedSharding(mesh, P("x")))
say("sum", of=NAME(x).tolist())
"""
    sums = [said(client(run, code.replace("NAME", name)).stdout, "sum") for name in ("one", "two")]
    assert sums[0] == sums[1]
    run.close()
    events = json.loads(path.read_text())["traceEvents"]
    done = {event["name"] for event in events if event.get("cat") == "compile"}
    assert "compiles jit_one" in done
    assert "reuses jit_two" in done
    assert not [name for name in done if name == "compiles jit_two"]


def test_programs_of_one_shape_are_told_apart(start: Start) -> None:
    """A hundred programs that differ in one constant give a hundred results."""
    run = start("1x1x1")
    code = """
found = [float(jax.jit(lambda x, n=n: x * n + n)(jnp.float32(2))) for n in range(100)]
say("found", found=found)
"""
    found = said(client(run, code).stdout, "found")["found"]
    assert found == [3.0 * n for n in range(100)]
