"""Settings, islands, addresses and targets that the command line refuses."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from command_line import check_refused, fairway, refused_up
from conftest import client

from fairway.errors import ConfigError
from fairway.settings import Settings


@pytest.mark.parametrize("name", ["", "a/b", "-x", "a b"])
def test_a_name_that_no_cluster_can_have(no_runs: Path, name: str) -> None:
    result = refused_up(f"--name={name}", runtime=no_runs)
    check_refused(result, f"cannot name a cluster {name!r}", "try --name main")


def test_a_runtime_folder_too_long_for_sockets(no_runs: Path) -> None:
    long = no_runs / ("x" * 80)
    result = refused_up("--islands", "1x1x1", runtime=long)
    check_refused(result, str(long), "expected at most", "set XDG_RUNTIME_DIR")


def test_malformed_toml(no_runs: Path, tmp_path: Path, show_script: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text('islands = "2x1x4\n')
    parts = (str(config), "not valid TOML", "line 1")
    check_refused(refused_up("--config", config, runtime=no_runs), *parts)
    check_refused(fairway("run", "--config", config, show_script, runtime=no_runs), *parts)
    config.write_bytes(b"\xff\xfe\x00")
    check_refused(refused_up("--config", config, runtime=no_runs), "not valid TOML")
    missing = tmp_path / "missing.toml"
    check_refused(refused_up("--config", missing, runtime=no_runs), "cannot read settings")


def test_unknown_setting(no_runs: Path, tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("timeout = 3\n")
    result = refused_up("--config", config, runtime=no_runs)
    check_refused(result, "there is no setting 'timeout'", "timeout_s")
    config.write_text("[[islands]]\nhosts = 1\ndevices = 2\nracks = 3\n")
    result = refused_up("--config", config, runtime=no_runs)
    check_refused(result, "racks", "[[islands]]")


def test_a_setting_that_cannot_be(no_runs: Path, tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("timeout_s = -1.0\n")
    check_refused(refused_up("--config", config, runtime=no_runs), str(config), "timeout_s")


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
        ("islands = [{hosts = 'two', devices = 1}]", "hosts is 'two'; expected a whole number"),
        ("islands = [{hosts = 1, devices = 1, prefix = 3}]", "prefix is 3; expected a list"),
        ("islands = [{hosts = 1, devices = 1, address = 'a b'}]", "address is 'a b'; expected"),
        ("islands = [{hosts = 1}]", "it has no devices"),
        ("islands = [{hosts = 1, devices = 1, channels = 7}]", "channels is 7; expected a list"),
        ("islands = 3", "islands is 3; expected '2x1x4' or \\[\\[islands\\]\\] tables"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, line: str, part: str) -> None:
    """A value of the right type that is out of range is refused before anything starts."""
    config = tmp_path / "settings.toml"
    config.write_text(line + "\n")
    with pytest.raises(ConfigError, match=part) as raised:
        Settings.read(config)
    assert str(config) in str(raised.value)
    for raw in ("IslandSettings(", "not iterable", "__init__", "argument"):
        assert raw not in str(raised.value)


@pytest.mark.parametrize("islands", ["1000x1000x1000", "1024x2x1", "1x1024x1024"])
def test_islands_beyond_what_a_controller_holds(islands: str) -> None:
    """Each number is within its bounds; the product is not."""
    with pytest.raises(ConfigError, match="in all, of which a controller"):
        Settings.parse(islands)


def test_more_hosts_than_the_machine_has_memory_for(no_runs: Path) -> None:
    hosts = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (200 << 20) + 1
    result = refused_up("--islands", f"1x{min(hosts, 1024)}x1", runtime=no_runs)
    check_refused(result, "hosts would take about", "try fewer hosts")


@pytest.mark.parametrize("islands", ["2x2", "0x1x1", "axbxc", "", "1x1x1x1", "-1x1x1", "²x1x1"])
def test_bad_islands(islands: str) -> None:
    with pytest.raises(ConfigError, match="ISLANDSxHOSTSxDEVICES"):
        Settings.parse(islands)


@pytest.mark.parametrize("islands", ["2x2", ""])
def test_bad_islands_on_the_command_line(no_runs: Path, islands: str) -> None:
    result = refused_up("--islands", islands, runtime=no_runs)
    check_refused(result, "cannot read islands", "ISLANDSxHOSTSxDEVICES", "2x1x4")


# Where clients connect


def test_port_in_use(no_runs: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = refused_up("--islands", "1x1x1", "--listen", address, runtime=no_runs)
    check_refused(result, f"cannot listen at {address}", "in use", "try")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:8000"])
def test_an_address_that_others_reach_is_refused(no_runs: Path, address: str) -> None:
    result = refused_up("--islands", "1x1x1", "--listen", address, runtime=no_runs)
    check_refused(result, address, "loopback")


@pytest.mark.parametrize("address", ["127.0.0.1", "somewhere", "unix:/no/such/place.sock"])
def test_an_address_that_is_none(no_runs: Path, address: str) -> None:
    result = refused_up("--islands", "1x1x1", "--listen", address, runtime=no_runs)
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
