"""Settings: parsing, and refusal of invalid ones."""

import re
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
        "custom_calls = 'a'",
        "custom_calls = ['']",
    ],
)
def test_bad_settings_are_refused(tmp_path, line):
    path = tmp_path / "settings.toml"
    path.write_text(line)
    with pytest.raises(ConfigError, match=str(path)):
        Settings.read(path)


def test_examples_of_the_settings_page_are_read(tmp_path):
    page = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
    examples = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(examples) == 3
    for number, example in enumerate(examples):
        path = tmp_path / f"{number}.toml"
        path.write_text(example)
        assert Settings.read(path).islands, example


@pytest.mark.parametrize("text", ["2", "1x1000000", "1x2x3", "x", "0x1"])
def test_an_island_that_cannot_be_read_is_shown_as_typed(text):
    with pytest.raises(ConfigError, match=rf"'{text}'; expected HOSTSxDEVICES .* of 1 to 1024"):
        IslandSettings.parse(text)
    assert IslandSettings.parse("1x4") == IslandSettings(1, 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"islands = []", r"islands is \[\]; expected at least one"),
        (b"[islands]\nhosts = 1", r"write \[\[islands\]\] with two brackets"),
        (b"plan = true", "plan is true; expected a value like 'off'"),
        (b"device_memory = 16", "device_memory is 16; expected a value like '16GiB'"),
        (b"slice_index = 1", "slice_index is 1; expected a value like true"),
        (b"\xff", "byte 0 is 0xff; expected text in UTF-8"),
    ],
)
def test_refusals_speak_of_toml_and_not_of_python(tmp_path, text, says):
    path = tmp_path / "settings.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=says):
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


def test_options_count_with_what_a_file_says(tmp_path: Path) -> None:
    """Neither alone may be valid."""
    path = tmp_path / "settings.toml"
    path.write_text('islands = "1x1x2"\nchannels = "auto"\nencryption = "on"\n')
    with pytest.raises(ConfigError, match=r"settings\.toml: "):
        Settings.read(path)
    read = Settings.read(path, on="agents", islands="2x1x1")
    assert (read.data_plane, read.channels, len(read.islands)) == ("tcp", "auto", 2)
    with pytest.raises(ConfigError, match=r"settings\.toml and options: "):
        Settings.read(path, on="agents", nodes=3)
