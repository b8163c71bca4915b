"""Documents work as typed: snippets run, commands are understood by the real CLI."""

from __future__ import annotations

import itertools
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from fairway.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
]
WITH_SNIPPETS = [ROOT / "README.md", ROOT / "docs" / "guide" / "training.md"]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
BESIDE = re.compile(r"# (\w+\.py), beside the script\n")
ANSWER_S = 10.0


def commands(document: Path) -> list[list[str]]:
    """The arguments of each ``fairway`` command in a document, without comments."""
    lines = [
        line.removeprefix("$ ")
        for language, block in BLOCK.findall(document.read_text())
        if language in ("", "console", "sh")
        for line in block.splitlines()
    ]
    found = [shlex.split(line, comments=True) for line in lines if line.startswith("fairway ")]
    return [words[1:] for words in found]


def parse(words: list[str]) -> None:
    """Reads a command line as the CLI would, and runs nothing."""
    at: Any = typer.main.get_command(app)
    context = at.make_context("fairway", list(words), resilient_parsing=False)
    while hasattr(at, "resolve_command"):
        name, at, rest = at.resolve_command(context, [*context._protected_args, *context.args])
        context = at.make_context(name, rest, parent=context)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_are_understood(document: Path) -> None:
    for words in commands(document):
        parse(words)


def test_what_is_not_understood_is_found() -> None:
    for words in (["fabric"], ["plan", "dlrm:data", "--explian"], ["rout", "ring:8", "0:1:1KiB"]):
        with pytest.raises(Exception, match=r"(?i)missing|no such"):
            parse(words)


def test_readme_shows_commands_and_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(commands(ROOT / "README.md")) >= 15
    assert len(text.splitlines()) < 200
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("document", WITH_SNIPPETS, ids=lambda path: path.name)
def test_snippets_run_as_one_script(document: Path, tmp_path: Path, own_runtime: Path) -> None:
    """Runs all snippets of a document, in order, with the default ``fairway run``."""
    script: list[str] = []
    for language, block in BLOCK.findall(document.read_text()):
        if language != "python":
            continue
        if beside := BESIDE.match(block):
            (tmp_path / beside[1]).write_text(block)
        else:
            script.append(block)
    (tmp_path / "main.py").write_text("\n".join([*script, 'print("done")\n']))
    ended = subprocess.run(
        [sys.executable, "-m", "fairway", "run", "main.py"],
        cwd=tmp_path,
        env={**os.environ, "XDG_RUNTIME_DIR": str(own_runtime)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "done"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_of_the_readme_run(tmp_path: Path, own_runtime: Path) -> None:
    """Runs them in order, in one folder; a slow one announces its duration, or starts islands."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    slow = []
    for words in commands(ROOT / "README.md"):
        if words[0] in ("up", "status"):  # these stay, or need one that does
            continue
        begun_s = cpu_s()
        ended = subprocess.run(
            [sys.executable, "-m", "fairway", *words],
            cwd=tmp_path,
            env={**os.environ, "XDG_RUNTIME_DIR": str(own_runtime)},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, (words, ended.stderr)
        took_s = cpu_s() - begun_s
        says = "on a quiet machine" in ended.stderr
        if took_s > ANSWER_S and words[0] not in ("run", "capture", "calibrate") and not says:
            slow.append((round(took_s, 1), words))
        print(f"{took_s:.1f} s: fairway {shlex.join(words)}")
    assert not slow


def cpu_s() -> float:
    """Processor time of all children that ended: at least their time on a quiet machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_each_document_is_reached_from_the_readme() -> None:
    """Directly, or through other documents."""
    known = {ROOT / "README.md"}
    for _ in range(3):
        linked = itertools.chain.from_iterable(
            (
                (path.parent / target).resolve()
                for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text())
            )
            for path in known
            if path.is_file()
        )
        known |= {path for path in linked if path.suffix == ".md"}
    assert {path for path in DOCUMENTS if path.parent.name != "examples"} <= known
