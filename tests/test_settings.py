"""Settings: what is read, and what is refused."""

from pathlib import Path

import pytest

from fairway.errors import ConfigError
from fairway.settings import IslandSettings, Settings


def test_islands_are_read():
    assert Settings.parse("2x1x4").islands == (IslandSettings(1, 4), IslandSettings(1, 4))


@pytest.mark.parametrize("text", ["", "2x1", "2x0x4", "axbxc", "2x1x4x1", "-1x1x1", "9999x1x1"])
def test_bad_islands_are_refused(text):
    with pytest.raises(ConfigError, match="islands"):
        Settings.parse(text)


@pytest.mark.parametrize(
    "line",
    [
        "timeout_s = 0",
        "launch_window = 0",
        "data_plane = 'x'",
        "racks = 2",
        "= =",
        "input_modules = 'a'",
        "input_path = [1]",
    ],
)
def test_bad_settings_are_refused(tmp_path, line):
    path = tmp_path / "settings.toml"
    path.write_text(line)
    with pytest.raises(ConfigError, match=str(path)):
        Settings.read(path)


def test_addresses_by_which_nothing_would_go_are_refused():
    far = (IslandSettings(1, 1, address="10.0.0.1"), IslandSettings(1, 1, address="10.0.0.2"))
    with pytest.raises(ConfigError, match=r"data_plane is 'unix'; expected 'tcp' or 'both'"):
        Settings(far)
    assert Settings(far, data_plane="both").islands == far


def test_who_may_be_imported_on_hosts(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('input_modules = ["a", "b.c"]\ninput_path = ["x"]')
    given = Settings.read(path)
    assert (given.input_modules, given.input_path) == (("a", "b.c"), (Path("x"),))
    served = given.serving(tmp_path / "script.py")
    assert served.input_modules == ("a", "b.c")
    assert served.input_path == (tmp_path.resolve(), Path("x"))
    assert Settings.parse("1x1x1").serving(path).input_modules is None
    tmp_path.chmod(0o777)  # every user could put a module there
    assert Settings.parse("1x1x1").serving(path).input_path == ()
    with pytest.raises(ConfigError, match="input_modules"):
        Settings.parse("1x1x1", input_modules=("*",))
