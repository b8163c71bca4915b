"""The command line in real processes: what it forwards, and its errors for invalid input."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from conftest import Up, client, connect_unix, is_alive, until
from typer.testing import CliRunner

from fairway.cli import app, consoles, main
from fairway.cli.consoles import working
from fairway.cli.status import script_of, show_run
from fairway.errors import ConfigError
from fairway.registry import new_directory
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
    """Checks for an error of one line that contains these texts, and that nothing was started."""
    assert result.returncode == 1, result
    assert result.stdout == ""
    assert "error:" in result.stderr
    for unwanted in ("Traceback", "panicked", "PanicException"):
        assert unwanted not in result.stderr, result.stderr
    for part in parts:
        assert part in result.stderr, result.stderr


@pytest.fixture
def nothing(own_runtime: Path) -> Iterator[Path]:
    """A runtime directory without islands; none may be left after the test."""
    yield own_runtime
    assert not list(own_runtime.glob("fairway-*/run-*"))


@pytest.fixture(scope="module")
def running(runtime: Path) -> Iterator[tuple[Path, Up]]:
    """A running island, and the runtime directory where commands find it."""
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
    """A script that prints its arguments and ends with status 7."""
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
    """All arguments after the script belong to the script, whatever they look like."""
    directory, up = running
    result = fairway("run", show, *arguments, runtime=directory)
    assert result.returncode == 7, result
    lines = result.stdout.splitlines()
    assert json.loads(lines[0]) == arguments
    assert json.loads(lines[1]) == up.environment


def test_options_behind_the_script_are_pointed_out(running: tuple[Path, Up], show: Path) -> None:
    result = fairway("run", show, "--islands", "9x9x9", "--x", runtime=running[0])
    assert "--islands follows the script, so it goes to the script" in result.stderr
    quiet = fairway("run", show, "--x", "--", "--islands", runtime=running[0])
    assert "follows the script" not in quiet.stderr


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


def test_run_of_text_that_is_no_python(nothing: Path, tmp_path: Path) -> None:
    text = tmp_path / "README.md"
    text.write_text("# Title\n\nSome words.\n")
    check_refused(fairway("run", text, runtime=nothing), "README.md is no Python, line 3")
    folder = fairway("run", tmp_path, runtime=nothing)
    check_refused(folder, "it is a folder; expected a Python file")


@pytest.mark.parametrize("name", ["", "a/b", "-x", "a b"])
def test_a_name_that_no_cluster_can_have(nothing: Path, name: str) -> None:
    result = refused_up(f"--name={name}", runtime=nothing)
    check_refused(result, f"cannot name a cluster {name!r}", "try --name main")


def test_a_runtime_folder_too_long_for_sockets(nothing: Path) -> None:
    long = nothing / ("x" * 80)
    result = refused_up("--islands", "1x1x1", runtime=long)
    check_refused(result, str(long), "expected at most", "set XDG_RUNTIME_DIR")


# Ctrl-C and other signals

HEARD_WITHIN_S = 60.0


class Begun:
    """``fairway run`` of a script in the background of the test, in a session of its own.

    Args:
        code: of the script.
        terminal: in a terminal, as its foreground process group.
    """

    def __init__(
        self, code: str, *options: str, runtime: Path, place: Path, terminal: bool = False
    ) -> None:
        script = place / "script.py"
        script.write_text(code)
        command = [sys.executable, "-m", "fairway", "run", *options, str(script)]
        ours, theirs = pty.openpty() if terminal else os.pipe()
        if terminal:
            # The first terminal that the leader of a session opens is the session's.
            command = ["sh", "-c", 'exec "$@" <"$0"', os.ttyname(theirs), *command]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # The process that started the tests in the background had them ignore it.
        )
        os.close(theirs)
        self._ours = ours
        self._unread = b""
        self.text = ""

    def hear(self, end: str) -> None:
        """Reads until a line has this ending; a terminal echoes typed text in front of it.

        Raises:
            AssertionError: there is none.
        """
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                self.text += line.decode() + "\n"
                if line.decode().rstrip("\r").endswith(end):
                    return
                continue
            ready, _, _ = select.select([self._ours], [], [], HEARD_WITHIN_S)
            assert ready, f"it was silent before it said {end!r}; it said:\n{self.text}"
            try:
                more = os.read(self._ours, 1 << 16)
            except OSError:  # the end of a terminal's output
                more = b""
            assert more, f"it ended before it said {end!r}; it said:\n{self.text}"
            self._unread += more

    def type(self, keys: bytes) -> None:
        """Types on the terminal."""
        os.write(self._ours, keys)

    def hang_up(self) -> None:
        """Closes the terminal (hang-up)."""
        os.close(self._ours)
        self._ours = os.open(os.devnull, os.O_RDONLY)

    def request(self, how: str, number: signal.Signals) -> None:
        """Interrupts it: by the terminal's Ctrl-C, by a signal to its group or to it alone."""
        if how == "terminal":
            self.type(b"\x03")
        elif how == "group":
            os.killpg(self.process.pid, number)
        else:
            os.kill(self.process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


SAVES = """
import os, sys, time
try:
    if sys.stdin.isatty():
        print("read", input(), flush=True)
    print("ready", flush=True)
    while True:
        time.sleep(0.02)  # Python may sleep to the end when a signal comes as it falls asleep
except KeyboardInterrupt:
    time.sleep(0.3)  # another would end this
    print("saved", flush=True)
    os._exit(5)
"""

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"no\\n"))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, "ready", flush=True)
while True:
    time.sleep(0.02)
"""

REQUESTS = [
    ("terminal", signal.SIGINT),
    ("group", signal.SIGINT),
    ("alone", signal.SIGINT),
    ("group", signal.SIGTERM),
    ("alone", signal.SIGTERM),
    ("alone", signal.SIGHUP),
]


@pytest.mark.parametrize(("how", "number"), REQUESTS)
def test_run_lets_the_script_finish_after_one_interrupt(
    running: tuple[Path, Up], tmp_path: Path, how: str, number: signal.Signals
) -> None:
    """A script that saves its state on Ctrl-C gets to save it, and its status is forwarded."""
    terminal = how == "terminal"
    with Begun(SAVES, runtime=running[0], place=tmp_path, terminal=terminal) as begun:
        if terminal:
            begun.type(b"typed\n")
            begun.hear("read typed")
        begun.hear("ready")
        begun.request(how, number)
        begun.hear("saved")
        assert begun.process.wait(30) == 5


def test_run_in_a_terminal_passes_on_what_others_send(
    running: tuple[Path, Up], tmp_path: Path
) -> None:
    """A terminal signals the script too; a signal to ``fairway run`` alone does not reach it."""
    with Begun(SAVES, runtime=running[0], place=tmp_path, terminal=True) as begun:
        begun.type(b"\n")
        begun.hear("ready")
        begun.request("alone", signal.SIGINT)
        begun.hear("saved")
        assert begun.process.wait(30) == 5


@pytest.mark.parametrize("how", ["terminal", "group", "alone"])
def test_a_second_interrupt_ends_the_script_at_once(
    running: tuple[Path, Up], tmp_path: Path, how: str
) -> None:
    """The second one is forcible, whatever the script's handler does."""
    terminal = how == "terminal"
    with Begun(STUBBORN, runtime=running[0], place=tmp_path, terminal=terminal) as begun:
        begun.hear("ready")
        child = int(begun.text.splitlines()[-1].split()[0])
        begun.request(how, signal.SIGINT)
        begun.hear("no")
        time.sleep(0.2)  # a sooner one counts as the same
        assert begun.process.poll() is None
        begun.request(how, signal.SIGINT)
        assert begun.process.wait(30) == 128 + signal.SIGKILL
    until(lambda: not is_alive(child), 10, "what the script had started has ended")


def test_the_end_of_the_terminal_ends_the_run(running: tuple[Path, Up], tmp_path: Path) -> None:
    """The kernel signals only the leader of the session."""
    with Begun(SAVES, runtime=running[0], place=tmp_path, terminal=True) as begun:
        begun.type(b"\n")
        begun.hear("ready")
        (script,) = children(begun.process.pid)
        begun.hang_up()
        begun.process.wait(30)
        assert not is_alive(script)


def test_run_passes_on_sigterm_to_a_script_that_handles_it(
    running: tuple[Path, Up], tmp_path: Path
) -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(6))\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    time.sleep(0.02)\n"
    )
    with Begun(code, runtime=running[0], place=tmp_path) as begun:
        begun.hear("ready")
        begun.request("alone", signal.SIGTERM)
        assert begun.process.wait(30) == 6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_script_that_does_not_catch_a_signal_ends_with_its_code(
    running: tuple[Path, Up], tmp_path: Path, number: signal.Signals
) -> None:
    """The script gets SIGINT instead, which the exit code does not show."""
    code = "import time\nprint('ready', flush=True)\nwhile True:\n    time.sleep(0.02)\n"
    with Begun(code, runtime=running[0], place=tmp_path) as begun:
        begun.hear("ready")
        begun.request("alone", number)
        assert begun.process.wait(30) == 128 + number


def test_an_interrupt_ends_figures_at_once(nothing: Path, tmp_path: Path) -> None:
    """Ends without waiting for computations in threads of a pool."""
    with subprocess.Popen(
        [sys.executable, "-m", "fairway", "reproduce", "sipml", "5a", "--out", str(tmp_path)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(nothing)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        assert "on a quiet machine" in process.stderr.readline()
        time.sleep(1.5)  # the pool is busy
        os.killpg(process.pid, signal.SIGINT)
        try:
            assert process.wait(5) == 130
        finally:
            process.kill()
        assert process.stderr.read() == ""


def test_run_takes_its_islands_down_after_an_interrupt(nothing: Path, tmp_path: Path) -> None:
    """Ctrl-C twice, the second while islands shut down: the script's status, and no leftovers."""
    with Begun(SAVES, "--islands", "1x1x1", runtime=nothing, place=tmp_path) as begun:
        begun.hear("ready")
        started = children(begun.process.pid)
        assert len(started) == 2, "the host and the script"
        for one in started:
            assert "SigBlk:\t0000000000000000\n" in Path(f"/proc/{one}/status").read_text()
        begun.request("group", signal.SIGINT)
        begun.hear("saved")
        until(lambda: not is_alive(started[-1]), 30, "the script has ended")
        begun.request("group", signal.SIGINT)
        assert begun.process.wait(30) == 5, begun.text
    assert not any(map(is_alive, started))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["directory", "host"])
def test_an_interrupt_while_starting_leaves_nothing(
    nothing: Path, moment: str, number: signal.Signals
) -> None:
    """Covers the earliest point at which there is something to leave."""
    with Up("--islands", "1x1x1", runtime=nothing, wait=False) as starting:
        until(lambda: starting.directories, 30, "it has a directory")
        hosts: list[int] = []
        if moment == "host":
            hosts = [stop_the_host(starting.pid)]
        os.killpg(starting.pid, number)
        # Without a stopped host the islands may be up already, if this process was slow.
        expected = {128 + number} | ({0} if moment == "directory" else set())
        assert starting.process.wait(30) in expected
        assert not any(map(is_alive, hosts))
        assert not starting.directories
        assert "Traceback" not in starting.errors.read_text()


def test_an_interrupt_during_imports_shows_no_traceback(tmp_path: Path) -> None:
    """The first module that the command line imports reports the import, and blocks."""
    (tmp_path / "typer.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "fairway", "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=15)
    assert process.returncode == -signal.SIGINT
    assert errors == ""


def test_an_interrupt_while_starting_runs_no_script(nothing: Path, tmp_path: Path) -> None:
    with Begun(SAVES, "--islands", "1x1x1", runtime=nothing, place=tmp_path) as begun:
        host = stop_the_host(begun.process.pid)
        begun.request("alone", signal.SIGINT)
        assert begun.process.wait(30) == 130
        with pytest.raises(AssertionError, match="it ended"):
            begun.hear("ready")
    assert not is_alive(host)


def stop_the_host(process: int) -> int:
    """Stops the host that this process starts, so that it does not come up; returns its id."""

    def is_host(child: int) -> bool:
        # Until its exec, its parent waits for it, as long as it is stopped.
        return b"fairway.host" in Path(f"/proc/{child}/cmdline").read_bytes()

    until(lambda: any(map(is_host, children(process))), 30, "it has a host")
    (host,) = children(process)
    os.kill(host, signal.SIGSTOP)
    return host


def children(process: int) -> list[int]:
    """Child processes of this one, oldest first."""
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return sorted(int(number) for one in lists for number in one.read_text().split())


# Errors and help


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frobnicate"], "No such command 'frobnicate'; try `fairway --help`"),
        (["place"], "Missing argument 'what'; try `fairway place --help`"),
        (["simulate", "--fabric"], "'--fabric' requires an argument; try `fairway simulate"),
        (["run", "--weight", "1.5", "a.py"], "--weight is '1.5'; expected a valid integer; try"),
        (["islands", "remove", "x"], "number is 'x'; expected a valid integer; try"),
        (["run", "--island", "2x1x4", "a.py"], "--island; did you mean --islands?; try `fairway r"),
        (["capture", "--ot", "a.fw", "a.py"], "no such option --ot; did you mean --out?"),
        (["run", "-m", "module"], "-m is not supported; expected the path of a Python file"),
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
        (["fabric", "sip-ring:8"], "sip-ring:8 is an interconnect, which `fairway place`"),
        (["place", "resnet50", "--fabric", "torus:8x8"], "'torus:8x8': it is a packet network"),
        (["place", "resnet50", "--fabric", "sip-ring"], "give a size, as in sip-ring:64"),
        (["place", "resnet51"], "did you mean resnet50? There are resnet50, transformer"),
        (["place", "resnet51"], "gpt:layers=..."),
        (["place", "missing.json"], "missing.json: no such file"),
        (
            ["simulate", "--fabric", "torus:4x4", "--workload", "nope"],
            "there are all-reduce:64MiB, all-gather:64MiB, reduce-scatter:64MiB, ",
        ),
        (
            ["simulate", "--fabric", "torus:4x4", "--workload", "resnet50:8"],
            "no workload 'resnet50:8' of torus:4x4, a packet network: it is a step of training",
        ),
        (
            ["simulate", "--fabric", "sip-ring:8", "--workload", "all-reduce:1MiB"],
            "of sip-ring:8, an interconnect: it is a workload of packet networks",
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


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Returns the exit status of the command."""
    monkeypatch.setattr(sys, "argv", ["fairway", *arguments])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with pytest.raises(SystemExit) as raised:
            main()
    finally:  # commands that start processes block signals until those end
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert isinstance(raised.value.code, int)
    return raised.value.code


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


def test_more_hosts_than_the_machine_has_memory_for(nothing: Path) -> None:
    hosts = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (200 << 20) + 1
    result = refused_up("--islands", f"1x{min(hosts, 1024)}x1", runtime=nothing)
    check_refused(result, "hosts would take about", "try fewer hosts")


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
    assert (result.returncode, json.loads(result.stdout)) == (1, [])
    assert "no islands are up" in result.stderr
    assert not list(nothing.iterdir()), "to look makes no folder"


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
    check_refused(fairway("islands", "remove", "1", runtime=directory), "there is no island 1")
    check_refused(fairway("islands", "add", "0x1", runtime=directory), "cannot read islands")


def test_islands_of_nothing(nothing: Path) -> None:
    check_refused(fairway("islands", "add", "1x1", runtime=nothing), "no cluster is up")


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
        for door in directory.glob("fairway-*/run-*/status.sock"):
            connect_unix(door).close()  # a run that reports being up answers from then on
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
