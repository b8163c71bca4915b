"""``fairway route``: transfers on a fabric, scheduled before anything runs."""

import json

import pytest
from typer.testing import CliRunner

from fairway.cli import app
from fairway.errors import ConfigError, RouteError, TopologyError
from fairway.routes import Transfer, route


def test_a_transfer_is_spread_over_all_ways_that_help():
    found = route("dragonfly:8", [Transfer(0, 1, 1 << 20)])
    paths = [train[3] for train in found.schedule["trains"]]
    assert sorted(paths) == [[0, 1], *([0, chip, 1] for chip in range(2, 8))]
    assert sum(train[2] for train in found.schedule["trains"]) == -(-(1 << 20) // 320)
    # A chip of a larger system has 11 links; here it has 7, and all are saturated to the end.
    assert 1 <= found.ratio < 1.06


def test_one_that_is_alone_takes_all_links_of_a_chip():
    found = route("dragonfly:264", [Transfer(0, 5, 64 << 20)])
    assert len(found.schedule["trains"]) == 11
    assert 1 <= found.ratio < 1.01


def test_what_comes_after_another_begins_when_that_has_come():
    found = route("torus:4x4", [Transfer(0, 1, 4096), Transfer(1, 2, 4096, after=(0,))])
    begins = [train[4][0] for train in found.schedule["trains"] if train[0] == 1]
    assert min(begins) >= found.schedule["ends_ticks"][0]


def test_the_command_shows_links_cycles_and_bound():
    runner = CliRunner()
    shown = runner.invoke(app, ["route", "dragonfly:264", "0:5:1MiB", "5:0:1KiB:0", "--explain"])
    assert shown.exit_code == 0, shown.output
    for part in ("0 → 5", "at 650", "lower bound", "busiest"):
        assert part in shown.output
    printed = runner.invoke(app, ["route", "ring:4", "0:2:4KiB", "--json"])
    assert json.loads(printed.output)["end_ticks"] > 0


def test_an_explanation_is_free_of_markup():
    shown = CliRunner().invoke(app, ["route", "dragonfly:8", "0:5:64KiB", "--explain"]).output
    assert "0 → 5 at 0" in shown
    assert "[" not in shown


@pytest.mark.parametrize(
    ("fabric", "transfer", "error", "words"),
    [
        ("dragonfly:9", "0:1:1MiB", TopologyError, "multiple of 8"),
        ("moebius:9", "0:1:1MiB", TopologyError, "expected dragonfly:CHIPS"),
        ("torus:70000x70000", "0:1:1MiB", TopologyError, "at most"),
        ("dragonfly:8", "0:8:1MiB", RouteError, "there are 8"),
        ("dragonfly:8", "3:3:1MiB", RouteError, "itself"),
        ("dragonfly:8", "0:1:1TB", RouteError, "a chip holds"),
        ("dragonfly:8", "0:1:1MiB:0", RouteError, "waits for itself"),
        ("dragonfly:8", "0:99999999999:1MiB", RouteError, "there are 8"),
        ("dragonfly:8", "0:1", RouteError, "SOURCE:TARGET:SIZE"),
        ("dragonfly:8", "0:-1:1MiB", RouteError, "SOURCE:TARGET:SIZE"),
        ("dragonfly:8", "0:1:much", ConfigError, "size of a transfer"),
    ],
)
def test_what_makes_no_sense_is_refused(fabric, transfer, error, words):
    with pytest.raises(error, match=words):
        route(fabric, [Transfer.parse(transfer)])
