"""The command line in real processes: what it passes on, and what it says when given nonsense."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Up, client, is_alive, until

from fairway.errors import ConfigError
from fairway.settings import Settings


def fairway(
    *arguments: str | Path, runtime: Path, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m fairway`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "fairway", *map(str, arguments)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def refused_up(*arguments: str | Path, runtime: Path) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m fairway up`` to its end; if it comes up instead, the test fails at once."""
    with subprocess.Popen(
        [sys.executable, "-m", "fairway", "up", *map(str, arguments)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        if first := process.stdout.readline():
            process.terminate()
            _, errors = process.communicate(timeout=15)
            pytest.fail(f"it came up: {first}{errors}")
        out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def check_refused(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    """It ended with an error of one line that says these things, and brought nothing up."""
    assert result.returncode == 1, result
    assert result.stdout == ""
    assert "error:" in result.stderr
    for unwanted in ("Traceback", "panicked", "PanicException"):
        assert unwanted not in result.stderr, result.stderr
    for part in parts:
        assert part in result.stderr, result.stderr


@pytest.fixture
def nothing(own_runtime: Path) -> Iterator[Path]:
    """A place where no islands are up; nor may any be left when the test is over."""
    yield own_runtime
    assert not list(own_runtime.glob("fairway-*/run-*"))


@pytest.fixture(scope="module")
def running(runtime: Path) -> Iterator[tuple[Path, Up]]:
    """One island that is up, and the place where commands find it."""
    directory = Path(tempfile.mkdtemp(prefix="cli-", dir=runtime))
    with Up("--islands", "1x1x2", runtime=directory) as up:
        yield directory, up


SHOW = """
import json, os, sys
print(json.dumps(sys.argv[1:]))
print(json.dumps({name: os.environ.get(name) for name in ("JAX_PLATFORMS", "JAX_BACKEND_TARGET")}))
sys.exit(7)
"""


@pytest.fixture
def show(tmp_path: Path) -> Path:
    """A script that shows what it was given and ends with status 7."""
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    return script


# fairway run


@pytest.mark.parametrize(
    "arguments",
    [
        ["one", "two words", ""],
        ["--steps", "3", "-lr", "0.1", "--flag"],
        ["--islands", "9x9x9", "--config", "mine.toml"],
        ["--help"],
        ["-h"],
        ["--", "x"],
        ["a", "--", "-b"],
    ],
)
def test_run_passes_arguments_and_status(
    running: tuple[Path, Up], show: Path, arguments: list[str]
) -> None:
    """What follows the script is the script's, whatever it looks like."""
    directory, up = running
    result = fairway("run", show, *arguments, runtime=directory)
    assert result.returncode == 7, result
    lines = result.stdout.splitlines()
    assert json.loads(lines[0]) == arguments
    assert json.loads(lines[1]) == up.environment


def test_run_brings_islands_up_and_down(nothing: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, jax\n"
        "print(len(jax.devices()), float((jax.numpy.arange(4) + 1).sum()), sys.argv[1:])\n"
        "raise SystemExit(3)\n"
    )
    result = fairway("run", "--islands", "2x1x1", script, "--alpha", "2", runtime=nothing)
    assert result.returncode == 3, result
    assert result.stdout.splitlines() == ["2 10.0 ['--alpha', '2']"]


def test_run_of_a_script_that_raises(running: tuple[Path, Up], tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text("raise RuntimeError('mine')\n")
    result = fairway("run", script, runtime=running[0])
    assert result.returncode == 1
    assert "RuntimeError: mine" in result.stderr


def test_run_of_a_script_that_is_killed(running: tuple[Path, Up], tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    assert fairway("run", script, runtime=running[0]).returncode == 128 + signal.SIGTERM


def test_run_of_no_script(nothing: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.py"
    check_refused(fairway("run", missing, runtime=nothing), "there is no script", str(missing))
    check_refused(fairway("run", tmp_path, runtime=nothing), "there is no script")
    odd = "[/odd] [red].py"
    check_refused(fairway("run", odd, runtime=nothing), "there is no script", odd)


# Settings


def test_malformed_toml(nothing: Path, tmp_path: Path, show: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text('islands = "2x1x4\n')
    parts = (str(config), "not valid TOML", "line 1")
    check_refused(refused_up("--config", config, runtime=nothing), *parts)
    check_refused(fairway("run", "--config", config, show, runtime=nothing), *parts)
    config.write_bytes(b"\xff\xfe\x00")
    check_refused(refused_up("--config", config, runtime=nothing), "not valid TOML")
    missing = tmp_path / "missing.toml"
    check_refused(refused_up("--config", missing, runtime=nothing), "cannot read settings")


def test_unknown_setting(nothing: Path, tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("timeout = 3\n")
    result = refused_up("--config", config, runtime=nothing)
    check_refused(result, "there is no setting 'timeout'", "timeout_s")
    config.write_text("[[islands]]\nhosts = 1\ndevices = 2\nracks = 3\n")
    result = refused_up("--config", config, runtime=nothing)
    check_refused(result, "racks", "[[islands]]")


def test_a_setting_that_cannot_be(nothing: Path, tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("timeout_s = -1.0\n")
    check_refused(refused_up("--config", config, runtime=nothing), str(config), "timeout_s")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("timeout_s = '3'", "timeout_s"),
        ("timeout_s = -1.0", "timeout_s"),
        ("timeout_s = 0", "timeout_s"),
        ("timeout_s = nan", "timeout_s"),
        ("timeout_s = inf", "timeout_s"),
        ("launch_window = 0", "launch_window"),
        ("launch_window = -1", "launch_window"),
        ("launch_window = 4294967296", "launch_window"),
        ("slice_index = 1", "slice_index"),
        ("data_plane = 'pigeon'", "data_plane"),
        ("platform = 'abacus'", "platform"),
        ("islands = 3", "islands"),
        ("islands = []", "islands"),
        ("islands = [3]", "islands"),
        ("islands = [{hosts = true, devices = 1}]", "hosts"),
        ("islands = [{hosts = 1, devices = 0}]", "devices"),
        ("islands = [{hosts = 1, devices = 1.5}]", "devices"),
        ("islands = [{hosts = 5000000000, devices = 1}]", "hosts"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, line: str, part: str) -> None:
    """A value of the right name that makes no sense is refused before anything starts."""
    config = tmp_path / "settings.toml"
    config.write_text(line + "\n")
    with pytest.raises(ConfigError, match=part) as raised:
        Settings.read(config)
    assert str(config) in str(raised.value)


@pytest.mark.parametrize("islands", ["2x2", "0x1x1", "axbxc", "", "1x1x1x1", "-1x1x1", "²x1x1"])
def test_bad_islands(islands: str) -> None:
    with pytest.raises(ConfigError, match="ISLANDSxHOSTSxDEVICES"):
        Settings.parse(islands)


@pytest.mark.parametrize("islands", ["2x2", ""])
def test_bad_islands_on_the_command_line(nothing: Path, islands: str) -> None:
    result = refused_up("--islands", islands, runtime=nothing)
    check_refused(result, "cannot read islands", "ISLANDSxHOSTSxDEVICES", "2x1x4")


# Where clients connect


def test_port_in_use(nothing: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = refused_up("--islands", "1x1x1", "--listen", address, runtime=nothing)
    check_refused(result, f"cannot listen at {address}", "in use", "try")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:8000"])
def test_an_address_that_others_reach_is_refused(nothing: Path, address: str) -> None:
    result = refused_up("--islands", "1x1x1", "--listen", address, runtime=nothing)
    check_refused(result, address, "loopback")


@pytest.mark.parametrize("address", ["127.0.0.1", "somewhere", "unix:/no/such/place.sock"])
def test_an_address_that_is_none(nothing: Path, address: str) -> None:
    result = refused_up("--islands", "1x1x1", "--listen", address, runtime=nothing)
    check_refused(result, address, "cannot listen")


def test_a_wrong_target_gives_a_clear_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        target = f"grpc://127.0.0.1:{closed.getsockname()[1]}"
        environment = {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": target}
        result = client(None, "jax.devices()", 60, environment)
    assert result.returncode == 1
    last = [line for line in result.stdout.splitlines() if "Error" in line][-1]
    assert target.removeprefix("grpc://") in last, result.stdout


@pytest.mark.parametrize("target", ["", "127.0.0.1:80", "http://127.0.0.1:80"])
def test_a_malformed_target_gives_a_clear_error(target: str) -> None:
    environment = {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": target}
    result = client(None, "jax.devices()", 60, environment)
    assert result.returncode == 1
    assert "grpc://HOST:PORT" in result.stdout
    assert "fairway up" in result.stdout


# fairway status


def test_status_of_nothing(nothing: Path) -> None:
    check_refused(fairway("status", runtime=nothing), "no islands are up", "fairway up")
    result = fairway("status", "--json", runtime=nothing)
    assert (result.returncode, json.loads(result.stdout)) == (0, [])


def test_status_shows_what_is_up(running: tuple[Path, Up]) -> None:
    directory, up = running
    (seen,) = json.loads(fairway("status", "--json", runtime=directory).stdout)
    assert seen["target"] == up.environment["JAX_BACKEND_TARGET"]
    assert seen["process"] == up.pid
    assert [[host["devices"] for host in i["hosts"]] for i in seen["islands"]] == [[2]]
    text = fairway("status", runtime=directory).stdout
    assert seen["target"] in text
    assert str(seen["islands"][0]["hosts"][0]["process"]) in text


def test_status_of_a_run_that_does_not_answer(own_runtime: Path) -> None:
    """It is passed over; the command does not hang, nor clear away what still lives."""
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
        assert len(second.directories) == 2
        targets = {seen["target"] for seen in status(directory)}
        assert targets == {u.environment["JAX_BACKEND_TARGET"] for u in (up, second)}
        process = status(directory)[1]["islands"][0]["hosts"][0]["process"]
    until(lambda: not is_alive(process), 1, "the second run's host has ended")
    assert [seen["process"] for seen in status(directory)] == [up.pid]


def status(directory: Path) -> list[dict[str, object]]:
    """What ``fairway status --json`` tells."""
    return list(json.loads(fairway("status", "--json", runtime=directory).stdout))
