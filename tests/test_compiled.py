"""Programs that are equal but for names and locations are compiled once on a host."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import Start, client, said

from fairway.host import compiled
from fairway.host.compiled import CompiledProgram, CompiledPrograms

FINGERPRINTS = """
from jax._src import compiler
from jaxlib import _jax
from fairway.host import messages
from fairway.host.compiled import fingerprint

def compile_options(**debug):
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    for name, value in debug.items():
        setattr(options.executable_build_options.debug_options, name, value)
    return options.SerializeAsString()

def doubled(x):
    return jnp.tanh(x) * 2

def key(function=doubled, shape=(4, 3), dtype=np.float32, devices=(0,), debug={}, **given):
    lowered = jax.jit(function, **given).lower(np.ones(shape, dtype))
    command = messages.Compile(1, 1, b"", compile_options(**debug), list(devices), (1, 1),
                               None, messages.CompileRole(True, []))
    return fingerprint(lowered.compiler_ir("stablehlo"), command)[0]
"""
"""Fingerprints of functions that JAX lowers, for device 0 in a grid of one."""


def test_fingerprints_are_of_what_is_computed() -> None:
    code = """
def other(y):
    above = jnp.tanh(y)

    return above * 2

say("same", keys=[key(), key(), key(other), key(lambda z: 2 * jnp.tanh(z) if False else other(z))])
changed = dict(
    function=dict(function=lambda x: jnp.tanh(x) * 3),
    shape=dict(shape=(3, 4)),
    dtype=dict(dtype=np.float16),
    donated=dict(donate_argnums=0),
    devices=dict(devices=(1,)),
    options=dict(debug=dict(xla_cpu_enable_fast_math=True)),
)
say("changed", keys={name: [key(**given), key(**given)] for name, given in changed.items()})
# Protocol buffers write maps in any order; what was parsed is written alike each time.
written = {_jax.CompileOptions.ParseFromString(compile_options()).SerializeAsString()
           for _ in range(20)}
say("options", written=len(written))
"""
    ended = client(None, FINGERPRINTS + code, environment={"JAX_PLATFORMS": "cpu"})
    [same] = set(said(ended.stdout, "same")["keys"])
    changed = said(ended.stdout, "changed")["keys"]
    assert all(first == second for first, second in changed.values())
    assert len({same, *(first for first, _ in changed.values())}) == 1 + len(changed)
    assert said(ended.stdout, "options")["written"] == 1


class Executable:
    """Stands for an executable in what concerns its size."""

    def __init__(self, size: int) -> None:
        self.generated_code_size_in_bytes = size

    def get_compiled_memory_stats(self) -> Executable:
        return self


def test_threads_wait_for_the_one_that_compiles() -> None:
    known, begun, may_end = CompiledPrograms(), threading.Event(), threading.Event()
    made: list[Any] = []
    found: list[Any] = []

    def compile_program() -> CompiledProgram:
        begun.set()
        assert may_end.wait(10)
        made.append(CompiledProgram(Executable(1)))
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
    assert found == made * 8


def test_what_fails_is_compiled_again() -> None:
    known = CompiledPrograms()

    def fail() -> Any:
        raise ValueError("no such operation")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such operation"):
            known.get("a", 1, fail)
    one = CompiledProgram(Executable(1))
    assert known.get("a", 1, lambda: one) is one
    assert known.get("a", 1, fail) is one


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COUNT_MAX", 3)
    monkeypatch.setattr(compiled, "BYTES_MAX", 100)
    known = CompiledPrograms()

    def have(key: str, code: int, size: int = 1) -> bool:
        made = CompiledProgram(Executable(code))
        return known.get(key, size, lambda: made) is not made

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


@pytest.mark.local("a timeline is of hosts of this machine")
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


def test_generators_of_random_numbers_are_not_shared(start: Start) -> None:
    """Each executable of ``rng_uniform`` has a generator of its own, as in plain JAX."""
    run = start("1x1x1")
    code = """
def draw():
    function = jax.jit(lambda low: jax.lax.rng_uniform(low, 1.0, shape=(3,)))
    return [function(jnp.float32(0)).tolist() for _ in range(2)]
say("drawn", first=draw(), second=draw())
"""
    plain = client(None, code, environment={"JAX_PLATFORMS": "cpu"})
    assert said(client(run, code).stdout, "drawn") == said(plain.stdout, "drawn")


def test_programs_of_one_shape_are_told_apart(start: Start) -> None:
    """A hundred programs that differ in one constant give a hundred results."""
    run = start("1x1x1")
    code = """
found = [float(jax.jit(lambda x, n=n: x * n + n)(jnp.float32(2))) for n in range(100)]
say("found", found=found)
"""
    found = said(client(run, code).stdout, "found")["found"]
    assert found == [3.0 * n for n in range(100)]
