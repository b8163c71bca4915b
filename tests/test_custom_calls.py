"""Custom calls of the owner's modules: allowed by name, registered on hosts, made by clients."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import paced
import pytest
from conftest import Start, client, said
from test_screening import artifact

from fairway.host.checking import CheckKind, written_anew
from fairway.host.screening import RefusedError
from fairway.settings import Settings

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

CLIENT = """
import time

import jax
import jax.numpy as jnp
import paced

if LOADS:
    paced.on_hosts(jax.devices())
double = jax.jit(paced.paced(lambda two, x: two * x, 0.05, 0.05, jax.devices()))
value = jnp.arange(4.0)
try:
    double(2.0, value).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    say("error", text=str(error))
else:
    begin = time.monotonic()
    result = double(2.0, value).tolist()
    say("result", values=result, took_s=time.monotonic() - begin)
say("lives", values=jax.jit(lambda x: x + 1)(value).tolist())
"""


# Its library is built from a file in C, and only Python files are sent to other machines: there,
# such a module is installed, and not in `input_path`.
INSTALLED = {name: value for name, value in paced.ALLOWED.items() if name != "input_path"}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets hosts of this machine find the module without ``input_path``."""
    path = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


def run(start: Start, given: dict[str, Any], *, loads: bool = True) -> str:
    islands = start("1x1x1", **given)
    code = CLIENT.replace("LOADS", str(loads))
    result = client(islands, code)
    assert result.returncode == 0, result.stdout
    assert said(result.stdout, "lives")["values"] == [1, 2, 3, 4]
    return result.stdout


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_calls_that_the_owner_allows_are_made(start: Start) -> None:
    found = said(run(start, INSTALLED), "result")
    assert found["values"] == [0, 2, 4, 6]
    assert found["took_s"] >= 0.05, "the call was made"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_calls_that_were_not_allowed_or_registered_leave_the_host_alone(start: Start) -> None:
    closed = {name: value for name, value in INSTALLED.items() if name != "custom_calls"}
    text = said(run(start, closed), "error")["text"]
    assert "NOT_FOUND: the program calls paced_begin" in text
    assert "the setting custom_calls allows" in text
    text = said(run(start, INSTALLED, loads=False), "error")["text"]
    assert "paced_begin" in text


def test_only_named_calls_are_allowed() -> None:
    text = """func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
        %0 = stablehlo.custom_call @TARGET(%a) : (tensor<4xf32>) -> tensor<4xf32>
        return %0 : tensor<4xf32>
    }"""

    def check(target: str) -> bytes:
        program = artifact(text.replace("TARGET", target))
        return written_anew(CheckKind.ARTIFACT, program, ("mine",))

    assert b"mine" in check("mine")
    for target in ("mine_too", "MINE", "xla_python_cpu_callback"):
        with pytest.raises(RefusedError, match=f"the program calls {target}"):
            check(target)


def test_settings_carry_the_names(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('custom_calls = ["my_kernel"]')
    assert Settings.read(path).custom_calls == ("my_kernel",)
    assert Settings.parse("1x1x1").custom_calls == ()
