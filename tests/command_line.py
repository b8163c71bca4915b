"""The command line in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fairway.cli import main


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
