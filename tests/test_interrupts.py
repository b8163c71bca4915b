"""Signals to the command line: what reaches scripts, and what is left behind."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest
from conftest import Up, children, is_alive, until

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


def test_an_interrupt_ends_figures_at_once(no_runs: Path, tmp_path: Path) -> None:
    """Ends without waiting for computations in threads of a pool."""
    with subprocess.Popen(
        [sys.executable, "-m", "fairway", "reproduce", "sipml", "5a", "--out", str(tmp_path)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(no_runs)},
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


def test_run_takes_its_islands_down_after_an_interrupt(no_runs: Path, tmp_path: Path) -> None:
    """Ctrl-C twice, the second while islands shut down: the script's status, and no leftovers."""
    with Begun(SAVES, "--islands", "1x1x1", runtime=no_runs, place=tmp_path) as begun:
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
    no_runs: Path, moment: str, number: signal.Signals
) -> None:
    """Covers the earliest point at which there is something to leave."""
    with Up("--islands", "1x1x1", runtime=no_runs, wait=False) as starting:
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


def test_an_interrupt_while_starting_runs_no_script(no_runs: Path, tmp_path: Path) -> None:
    with Begun(SAVES, "--islands", "1x1x1", runtime=no_runs, place=tmp_path) as begun:
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
