"""The command line in real processes: what it forwards, its help, and its output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import check_refused, ended, fairway
from conftest import Up
from typer.testing import CliRunner

from fairway.cli import app, consoles
from fairway.cli.consoles import working


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
    running: tuple[Path, Up], show_script: Path, arguments: list[str]
) -> None:
    """All arguments after the script belong to the script, whatever they look like."""
    directory, up = running
    result = fairway("run", show_script, *arguments, runtime=directory)
    assert result.returncode == 7, result
    lines = result.stdout.splitlines()
    assert json.loads(lines[0]) == arguments
    assert json.loads(lines[1]) == up.environment


def test_options_behind_the_script_are_pointed_out(
    running: tuple[Path, Up], show_script: Path
) -> None:
    result = fairway("run", show_script, "--islands", "9x9x9", "--x", runtime=running[0])
    assert "--islands follows the script, so it goes to the script" in result.stderr
    quiet = fairway("run", show_script, "--x", "--", "--islands", runtime=running[0])
    assert "follows the script" not in quiet.stderr


def test_run_brings_islands_up_and_down(no_runs: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, jax\n"
        "print(len(jax.devices()), float((jax.numpy.arange(4) + 1).sum()), sys.argv[1:])\n"
        "raise SystemExit(3)\n"
    )
    result = fairway("run", "--islands", "2x1x1", script, "--alpha", "2", runtime=no_runs)
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


def test_run_of_no_script(no_runs: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.py"
    check_refused(fairway("run", missing, runtime=no_runs), "there is no script", str(missing))
    check_refused(fairway("run", tmp_path, runtime=no_runs), "there is no script")
    odd = "[/odd] [red].py"
    check_refused(fairway("run", odd, runtime=no_runs), "there is no script", odd)


def test_run_of_text_that_is_no_python(no_runs: Path, tmp_path: Path) -> None:
    text = tmp_path / "README.md"
    text.write_text("# Title\n\nSome words.\n")
    check_refused(fairway("run", text, runtime=no_runs), "README.md is no Python, line 3")
    folder = fairway("run", tmp_path, runtime=no_runs)
    check_refused(folder, "it is a folder; expected a Python file")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frobnicate"], "No such command 'frobnicate'; try `fairway --help`"),
        (["place"], "Missing argument 'what'; try `fairway place --help`"),
        (["token", "create", "--role", "x"], "'x'; expected 'client', 'host', 'admin'; try `fai"),
        (["simulate", "--fabric"], "'--fabric' requires an argument; try `fairway simulate"),
        (["run", "--weight", "1.5", "a.py"], "--weight is '1.5'; expected a valid integer; try"),
        (["islands", "remove", "x"], "number is 'x'; expected a valid integer; try"),
        (["run", "--island", "2x1x4", "a.py"], "--island; did you mean --islands?; try `fairway r"),
        (["capture", "--ot", "a.fw", "a.py"], "no such option --ot; did you mean --out?"),
        (["run", "-m"], "-m has no module; expected `-m MODULE`"),
        (["capture", "-m", "module"], "-m is for `fairway run` only"),
    ],
)
def test_a_command_line_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    """It ends with status 2, and its error has the style of all others."""
    assert ended(monkeypatch, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fairway: error: ")
    assert says in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fabric", "a:b:c"], '"a:b:c"'),
        (["fabric", "[red]x[/]"], "[red]x[/]"),
        (["fabric", "wat"], 'error: cannot read a fabric from "wat"; expected dragonfly:CHIPS'),
        (["fabric", "no.toml"], "from no.toml: no such file; expected a file .json, .xml, .yml"),
        (["fabric", "/tmp"], "cannot read a fabric from /tmp: it is a folder; expected a file"),
        (["fabric", "sip-ring:8,colour=red"], 'sip-ring has no "colour"; there are wavelengths'),
        (["route", "sip-ring:8", "0:1:1MiB"], "not by links; expected a packet network"),
        (["place", "resnet50", "--fabric", "sip-ring"], "give a size, as in sip-ring:64"),
        (["place", "resnet51"], "did you mean resnet50? There are resnet50, transformer"),
        (["place", "resnet51"], "gpt:layers=..."),
        (["place", "missing.json"], "missing.json: no such file"),
        (
            ["simulate", "--fabric", "torus:4x4", "--workload", "nope"],
            "there are all-reduce:64MiB, all-gather:64MiB, reduce-scatter:64MiB, ",
        ),
        (
            ["simulate", "--fabric", "torus:4x4", "--workload", "resnet50"],
            "there is no step 'resnet50'; there are graph.fbuf",
        ),
        (
            ["simulate", "--fabric", "sip-ring:8", "--workload", "all-reduce:1MiB"],
            "sip-ring:8 is modelled by shares of bandwidth or optical circuits, not by links; "
            "expected a packet",
        ),
        (["plan", "missing.json"], "missing.json: no such file"),
        (["place", "resnet50", "--curve", "missing.txt"], "missing.txt: no such file"),
        (["plan", "dlrm:balanced", "--plot", "/a/b/c.png"], "no folder /a; create it first"),
    ],
)
def test_errors_are_one_line_in_one_style(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    """Names stay as they were typed, and no Python exception is visible."""
    assert ended(monkeypatch, *arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fairway: error: ")
    assert says in line
    assert "Errno" not in line


@pytest.mark.parametrize("command", ["run", "plan", "place", "jobs", "simulate", "reproduce"])
def test_help_keeps_brackets(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Rich would take them for markup."""
    app([command, "--help"], standalone_mode=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "[default: " in shown
    if command == "simulate":
        assert "matmul:MxKxN" in shown or "matmul:" in shown


@pytest.mark.parametrize(
    ("model", "explained"),
    [("resnet50", "all steps: the whole training"), ("gpt:layers=8,hidden=8192", "bubble: time")],
)
def test_tables_of_placements_fit_a_terminal(
    monkeypatch: pytest.MonkeyPatch, model: str, explained: str
) -> None:
    """At 80 columns no number is cut, each has its unit, and a legend explains the columns."""
    monkeypatch.setenv("COLUMNS", "80")
    found = CliRunner().invoke(app, ["place", model, "--fabric", "elect-cluster:256"])
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert "…" not in found.stdout
    assert max(map(len, lines)) <= 80
    assert explained in " ".join(found.stdout.split())
    rows = [line for line in lines if line.split()[0].replace(",", "").isdigit()]
    assert len(rows) == 10
    for row in rows:
        assert any(unit in row.split() for unit in ("ms", "s")), row


def test_the_help_of_reproduce_lists_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure of each paper, or the range that it is in."""
    from fairway.studies.reproduce import pathways, sipml, syndicate, tsp

    app(["reproduce", "--help"], standalone_mode=False)
    shown = " ".join(capsys.readouterr().out.split())
    papers = {"pathways": pathways, "syndicate": syndicate, "tsp": tsp, "sipml": sipml}
    for paper, module in papers.items():
        listed = shown.partition(f"of {paper} ")[2].partition(";")[0].partition(". [")[0]
        numbers = {name for name in module.FIGURES if name.isdigit()}
        for name in set(module.FIGURES) - numbers:
            assert name in listed.replace(",", "").split(), (paper, name)
        for one, other in re.findall(r"(\d+) to (\d+)", listed):
            span = {str(number) for number in range(int(one), int(other) + 1)}
            assert span <= numbers
            numbers -= span
        assert numbers <= set(re.findall(r"\d+", listed)), paper


@pytest.mark.parametrize("command", ["capture", "plan", "calibrate"])
def test_the_main_result_has_a_short_option(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    app([command, "--help"], standalone_mode=False)
    assert "-o, --out" in capsys.readouterr().out


def test_numbers_of_things_agree() -> None:
    assert consoles.counted(1, "island") == "1 island"
    assert consoles.counted(2000, "host") == "2,000 hosts"


def test_old_spellings_are_understood(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    found = CliRunner().invoke(
        app, ["plan", "dlrm:balanced", "--evaluations", "10", "--picture", str(picture)]
    )
    assert found.exit_code == 0, found.output
    assert picture.exists()
    assert "--picture is now called --plot" in found.stderr


def test_progress_is_a_line_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows progress and an estimate; long work is announced beforehand."""
    monkeypatch.setattr(consoles, "LINE_EVERY_S", 0.01)
    with working("digging", expected_s=120.0) as work:
        work.update(1, 4)
        shown = ""
        while shown.count("digging: 25% (1 of 4), 0 s so far, about 0 s left") < 2:
            shown += capsys.readouterr().err
    assert shown.startswith("fairway: digging: about 2 min 0 s on a quiet machine\n")


def test_what_is_left_shrinks_between_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No estimate is shown once the known part is done, or once the expected time is over."""
    now = [0.0]
    monkeypatch.setattr(consoles.time, "monotonic", lambda: now[0])
    work = consoles.Work("digging", expected_s=50.0)
    now[0] = 10.0
    assert work.line() == "digging, 10 s so far, about 40 s left"
    work.update(1, 4)
    assert work.line() == "digging: 25% (1 of 4), 10 s so far, about 30 s left"
    now[0] = 35.0
    assert work.line() == "digging: 25% (1 of 4), 35 s so far, about 5 s left"
    now[0] = 60.0
    assert work.line() == "digging: 25% (1 of 4), 1 min 0 s so far"
    work.update(4, text="checking")
    assert work.line() == "checking, 1 min 0 s so far"


@pytest.mark.local("a script runs on islands of its own")
def test_run_takes_a_module(own_runtime: Path, tmp_path: Path) -> None:
    """As `python -m` does: pytest finds its tests in the working directory."""
    (tmp_path / "test_sum.py").write_text(
        "import jax, jax.numpy as jnp\n\n"
        "def test_sum():\n    assert len(jax.devices()) == 2\n    assert jnp.ones(3).sum() == 3\n"
    )
    command = [sys.executable, "-m", "fairway", "run", "--islands", "2x1x1", "-m", "pytest", "-q"]
    ended = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "XDG_RUNTIME_DIR": str(own_runtime)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout
    ended = subprocess.run(
        [*command[:4], "-m", "no_such.module"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert "there is no module no_such.module" in ended.stderr
