"""``fairway status`` and ``islands``: the runs of this user, and which one is meant."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import check_refused, fairway
from conftest import Up, connect_unix, is_alive, until
from machines import Program

from fairway.cli.status import script_of, show_run
from fairway.cluster.registry import new_directory


def test_status_of_nothing(no_runs: Path) -> None:
    check_refused(fairway("status", runtime=no_runs), "no islands are up", "fairway up")
    result = fairway("status", "--json", runtime=no_runs)
    assert (result.returncode, json.loads(result.stdout)) == (1, [])
    assert "no islands are up" in result.stderr
    assert not list(no_runs.iterdir()), "to look makes no folder"


def test_status_shows_what_is_up(running: tuple[Path, Up]) -> None:
    directory, up = running
    (seen,) = json.loads(fairway("status", "--json", runtime=directory).stdout)
    assert seen["target"] == up.environment["JAX_BACKEND_TARGET"]
    assert seen["process"] == up.pid
    assert [[host["devices"] for host in i["hosts"]] for i in seen["islands"]] == [[2]]
    text = fairway("status", runtime=directory).stdout
    assert f"cluster main  {seen['target']}" in text
    named = fairway("status", "--cluster", "main", runtime=directory)
    assert named.stdout == text
    refused = fairway("status", "--cluster", "other", runtime=directory)
    check_refused(refused, "no cluster 'other' is up; up are: main")
    assert "held by clients" not in text, "there are none"
    assert str(seen["islands"][0]["hosts"][0]["process"]) in text


def test_status_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns nothing is cut; clients have process, script and age where those are known."""
    monkeypatch.setenv("COLUMNS", "80")
    host = {
        "id": 12, "process": 1234567, "devices": 8, "device_kind": "NVIDIA H100",
        "memory_bytes": 1 << 36, "capacity_bytes": 80 << 30, "spilled_bytes": 0, "queued": 12,
        "in_flight": 34, "lost": None,
    }  # fmt: skip
    client = {
        "id": 3, "weight": 1, "priority": 0, "device_s": 1234.5, "moved_bytes": 0, "queued": 5,
        "buffers": 12345, "bytes": 1 << 34, "executables": 17, "backlog": 2,
    }  # fmt: skip
    known = {**client, "id": 4, "process": os.getpid(), "connected_s": 3725.0}
    seen = {
        "target": "grpc://127.0.0.1:40000", "process": 77, "plans": [],
        "islands": [{"id": 0, "state": "up", "hosts": [host]}], "clients": [client, known],
    }  # fmt: skip
    show_run(seen)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown.replace(script_of(os.getpid()), "")
    words = [line.split() for line in shown.splitlines()]
    assert ["3", "-", "-", "-", "1", "0", "1234.50", "s"] in words
    (line,) = (line for line in shown.splitlines() if str(os.getpid()) in line)
    assert "1 h 2 min" in line
    assert script_of(os.getpid()) in line


def test_islands_are_added_and_removed(running: tuple[Path, Up]) -> None:
    directory, up = running
    added = fairway("islands", "add", "1x1", runtime=directory)
    assert added.returncode == 0, added.stderr
    assert "Island 1 is up" in added.stderr
    assert [island["state"] for island in up.overview()["islands"]] == ["up", "up"]
    removed = fairway("islands", "remove", "1", runtime=directory)
    assert removed.returncode == 0, removed.stderr
    assert [island["state"] for island in up.overview()["islands"]] == ["up", "removed"]
    shown = fairway("status", runtime=directory).stdout
    assert "removed" in shown
    assert "checkpoint" not in shown, "nothing is lost"
    check_refused(fairway("islands", "remove", "1", runtime=directory), "there is no island 1")
    check_refused(fairway("islands", "add", "0x1", runtime=directory), "cannot read islands")


def test_a_cluster_finishes_what_an_interrupted_command_asked_for(own_runtime: Path) -> None:
    with Up("--islands", "1x1x1", runtime=own_runtime) as up:
        with Program(
            [sys.executable, "-m", "fairway", "islands", "add", "1x1"],
            {"XDG_RUNTIME_DIR": str(own_runtime)},
        ) as adding:
            until(lambda: len(up.overview()["islands"]) == 2, 20, "it is asked for")
            adding.interrupt()
            assert (
                "The cluster goes on with it; `fairway status` shows its islands" in adding.text()
            )
        until(lambda: up.overview()["islands"][-1]["state"] == "up", 30, "it is there")


def test_islands_of_nothing(no_runs: Path) -> None:
    check_refused(fairway("islands", "add", "1x1", runtime=no_runs), "no cluster is up")


def test_status_of_a_run_that_does_not_answer(own_runtime: Path) -> None:
    """It is skipped; the command does not hang, nor clean up a live run."""
    with Up("--islands", "1x1x1", runtime=own_runtime) as up:
        os.kill(up.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            check_refused(fairway("status", runtime=own_runtime), "no islands are up")
            assert time.monotonic() - began < 10
        finally:
            os.kill(up.pid, signal.SIGCONT)
        assert up.overview()["process"] == up.pid


def test_two_runs_do_not_disturb_each_other(own_runtime: Path, running: tuple[Path, Up]) -> None:
    """A second `up` and its end leave the first alone."""
    directory, up = running
    with Up("--islands", "1x1x1", runtime=directory) as second:
        assert "main is up already, so this one is named main-2" in second.errors.read_text()
        assert len(second.directories) == 2
        for path in directory.glob("fairway-*/run-*/admin.sock"):
            connect_unix(path).close()  # a run that reports being up answers from then on
        targets = {seen["target"] for seen in status(directory)}
        assert targets == {u.environment["JAX_BACKEND_TARGET"] for u in (up, second)}
        process = status(directory)[1]["islands"][0]["hosts"][0]["process"]
    until(lambda: not is_alive(process), 1, "the second run's host has ended")
    assert [seen["process"] for seen in status(directory)] == [up.pid]


def test_a_new_run_clears_what_dead_ones_left(
    own_runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It clears only those; a directory that was just created belongs to a live run."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_runtime))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    ours = new_directory()
    dead = ours.with_name(f"run-{ended.pid}-x")
    dead.mkdir()
    other = ours.with_name(f"run-{os.getppid()}-x")
    other.mkdir()
    new = new_directory()
    assert set(ours.parent.iterdir()) == {ours, other, new}


def status(directory: Path) -> list[dict[str, Any]]:
    """Returns the output of ``fairway status --json``."""
    return list(json.loads(fairway("status", "--json", runtime=directory).stdout))


def test_the_environment_names_the_run_that_is_meant(
    own_runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` and `islands` use that one; where none is named, `islands` does not guess."""
    monkeypatch.delenv("JAX_BACKEND_TARGET", raising=False)
    script = tmp_path / "target.py"
    script.write_text("import os; print(os.environ['JAX_BACKEND_TARGET'])")
    with (
        Up("--islands", "1x1x1", runtime=own_runtime) as older,
        Up("--islands", "1x1x1", runtime=own_runtime) as newer,
    ):
        targets = [up.environment["JAX_BACKEND_TARGET"] for up in (older, newer)]
        until(lambda: len(status(own_runtime)) == 2, 10, "both are up")
        refused = fairway("islands", "add", "1x1", runtime=own_runtime)
        check_refused(refused, "several clusters are up: main, main-2", "--cluster NAME")
        named = fairway("run", "--cluster", "main", script, runtime=own_runtime)
        assert named.stdout == targets[0] + "\n"
        assert "Joining cluster main" in named.stderr
        monkeypatch.setenv("JAX_BACKEND_TARGET", targets[1])
        assert fairway("run", script, runtime=own_runtime).stdout == targets[1] + "\n"
        assert fairway("islands", "add", "1x1", runtime=own_runtime).returncode == 0
        counts = {seen["target"]: len(seen["islands"]) for seen in status(own_runtime)}
        assert counts == dict(zip(targets, (1, 2), strict=True))
        monkeypatch.setenv("JAX_BACKEND_TARGET", "grpc://127.0.0.1:1")
        for command in (["run", script], ["islands", "remove", "0"]):
            refused = fairway(*command, runtime=own_runtime)
            check_refused(
                refused, "JAX_BACKEND_TARGET is grpc://127.0.0.1:1", "main, main-2", "unset"
            )
