"""``fairway doctor`` in real processes, on machines with and without problems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fairway import __version__, doctor
from fairway.doctor import Finding, Level, allows, examine, report

NAMES = list(doctor.CHECKS)


def ask(
    *arguments: str, runtime: Path, limits: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs ``fairway doctor`` to its end."""
    command = [sys.executable, "-m", "fairway", "doctor", *arguments]
    return subprocess.run(
        ["prlimit", *limits, *command] if limits else command,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def checks(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    record = json.loads(result.stdout)
    assert record["version"] == __version__
    return {one["name"]: one for one in record["checks"]}


def test_a_machine_that_runs_the_tests_has_no_problem(own_runtime: Path) -> None:
    result = ask("--json", runtime=own_runtime)
    assert result.returncode == 0, result
    found = checks(result)
    assert list(found) == NAMES
    assert found["compiled library"]["level"] == found["JAX"]["level"] == "ok"
    assert found["runtime folder"][
        "found"
    ] == f"{own_runtime}/fairway-{os.getuid()}, mode 700, " + (f"owner {os.getuid()}")
    assert not list(own_runtime.glob("fairway-*/run-*"))


def test_problems_are_found_and_remedies_named(
    own_runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run with several: sockets cannot lie in a file, and 200 open files are too few."""
    (own_runtime / f"fairway-{os.getuid()}").write_text("a file")
    result = ask(runtime=own_runtime, limits=("--nofile=200:200",))
    assert result.returncode == 1, result
    lines = result.stdout.splitlines()
    problems = [line for line in lines if line.startswith("problem")]
    assert len(problems) == 2, result.stdout
    assert "it is no folder" in problems[0]
    assert "set XDG_RUNTIME_DIR" in problems[0]
    assert "200, which the controller raises to 200" in problems[1]
    assert "ulimit -Hn" in lines[lines.index(problems[1]) + 1]
    assert lines[-1].startswith("2 problems, ")


@pytest.mark.parametrize(
    ("folder", "says"), [("x" * 90, "its path has"), ("file/below", "cannot create")]
)
def test_a_bad_runtime_folder(
    folder: str, says: str, own_runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_runtime / "file").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_runtime / folder))
    found = doctor.CHECKS["runtime folder"]("runtime folder")
    assert found.level is Level.PROBLEM
    assert says in found.found
    assert "XDG_RUNTIME_DIR" in found.found + found.advice


def test_a_library_that_does_not_load_is_reported(own_runtime: Path, tmp_path: Path) -> None:
    """Doctor runs without the command line, which needs the library; other commands say so."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['fairway._native'] = None\n"
    )
    environment = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(own_runtime),
        "PYTHONPATH": str(tmp_path),
    }
    for words, stream in ((["doctor"], "stdout"), (["fabric", "ring:8"], "stderr")):
        result = subprocess.run(
            [sys.executable, "-m", "fairway", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 1, result
        assert "Traceback" not in result.stderr
        said = getattr(result, stream)
        assert ("problem  compiled library" if words == ["doctor"] else "fairway doctor") in said


def test_a_version_that_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"jax": "0.11.1", "jaxlib": "0.11.1"}
    monkeypatch.setattr(doctor, "_version_of", versions.get)
    found = doctor.CHECKS["JAX"]("JAX")
    assert found.level is Level.PROBLEM
    assert "expected jax >=0.10.2,!=0.11.1,<0.13" in found.found.replace(
        "<0.13,!=0.11.1,>=0.10.2", ""
    )
    monkeypatch.setattr(doctor, "_version_of", lambda name: None)
    assert doctor.CHECKS["JAX"]("JAX").level is Level.WARNING


@pytest.mark.parametrize(
    ("rules", "version", "allowed"),
    [
        (">=0.10.2,!=0.11.1,<0.13", "0.12.0.1", True),
        (">=0.10.2,!=0.11.1,<0.13", "0.11.1", False),
        (">=0.10.2,<0.13", "0.13.0", False),
        (">=3.11", "3.11.0", True),
        ("<0.13", "0.13", False),
        ("", "1.0+local", True),
    ],
)
def test_versions_are_compared(rules: str, version: str, allowed: bool) -> None:
    assert allows(rules, version) is allowed


def test_a_check_that_cannot_be_made_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Finding:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(doctor, "CHECKS", {"memory": broken})
    (found,) = examine()
    assert found.level is Level.PROBLEM
    assert list(report([found]))[-1] == "1 problem, 0 warnings, 0 ok"
