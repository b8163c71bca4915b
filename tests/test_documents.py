"""Documents work as typed: every snippet and command of README and docs runs.

Each page has a folder. Its blocks run in order: ``title="NAME"`` makes a block the file NAME, other
Python runs in one client that all pages share, over the islands of one cluster; ``$ fairway ...``
runs as typed. A block ``text title="output"`` behind a command is what it prints: these lines, in
their order; ``...`` stands for any text. Two comments in front of a block change that:
``<!-- slow -->`` leaves it to ``make test-all``; ``<!-- not run: REASON -->`` means that no test
runs it, and :data:`NOT_RUN` counts all of those.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import Notebook, Up
from typer.testing import CliRunner

from fairway.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "examples" / "README.md",
    *sorted(path for path in DOCS.rglob("*.md") if path.parent.name not in ("design", "api")),
]
PAGES = [path for path in DOCUMENTS if DOCS in path.parents]
BLOCK = re.compile(
    r"(?:<!-- (slow|not run: [^>]*?) -->\n)?^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
BESIDE = re.compile(r"# (\w+\.py), beside the script\n")
OUTPUT = "output"
ANSWER_S = 10.0
ISLANDS = "2x1x4"
NOT_RUN = {
    "install.md": 2,  # make build, in which the tests run; the reader's own shell
    "tutorials/communication.md": 1,  # --plan auto of a long training
    "tutorials/pytorch.md": 4,  # PyTorch is no dependency of the tests: make test-torch
    # several machines: tests/test_{launchers,remote_clients,joining,kubernetes}.py
    "how-to/machines.md": 4,
    "how-to/calibrate.md": 1,  # hosts with several networks
    "reference/commands.md": 1,  # forms of commands, of files that are the reader's
    "reference/steps.md": 2,  # likewise
}
"""Number of blocks of each page that no test runs."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    mark: str
    language: str
    title: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The arguments of each ``fairway`` command, without comments."""
        if self.language not in ("", "console", "sh"):
            return []
        lines = [line.removeprefix("$ ") for line in self.text.splitlines()]
        found = [shlex.split(line, comments=True) for line in lines if line.startswith("fairway ")]
        return [words[1:] for words in found]


def blocks(document: Path) -> list[Block]:
    """The blocks of a document, in order."""
    return [Block(*groups) for groups in BLOCK.findall(document.read_text())]


def commands(document: Path) -> list[list[str]]:
    """The arguments of each ``fairway`` command in a document."""
    return [words for block in blocks(document) for words in block.commands]


def parse(words: list[str]) -> None:
    """Reads a command line as the CLI would, and runs nothing."""
    if words[0].startswith("-"):
        return
    at: Any = typer.main.get_command(app)
    context = at.make_context("fairway", list(words), resilient_parsing=False)
    while hasattr(at, "resolve_command"):
        name, at, rest = at.resolve_command(context, [*context._protected_args, *context.args])
        context = at.make_context(name, rest, parent=context)


def label(path: Path) -> str:
    return str(path.relative_to(DOCS if DOCS in path.parents else ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=label)
def test_commands_are_understood(document: Path) -> None:
    for words in commands(document):
        parse(words)


def test_what_is_not_understood_is_found() -> None:
    for words in (["fabric"], ["plan", "dlrm:data", "--explian"], ["rout", "ring:8", "0:1:1KiB"]):
        with pytest.raises(Exception, match=r"(?i)missing|no such"):
            parse(words)


def test_readme_shows_commands_and_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(commands(ROOT / "README.md")) >= 5
    assert len(text.splitlines()) <= 150


@pytest.mark.parametrize("document", DOCUMENTS, ids=label)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_what_follows_from_the_code_is_up_to_date() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "dev" / "reference.py", "--check"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_blocks_that_are_not_run_are_known() -> None:
    marked = {label(page): sum("not run" in b.mark for b in blocks(page)) for page in PAGES}
    assert {page: count for page, count in marked.items() if count} == NOT_RUN
    for page in PAGES:
        fences = sum(line.startswith("```") for line in page.read_text().splitlines())
        assert fences == 2 * len(blocks(page)), f"{page} has a block that is not read"


class Reader:
    """A reader who types what a page says, with one cluster and one client for all pages."""

    def __init__(self, cluster: Up, notebook: Notebook, home: Path, runtime: Path) -> None:
        self._cluster = cluster
        self._notebook = notebook
        self._home = home
        self._runtime = runtime

    def read(self, page: Path, *, slow: bool) -> None:
        """Runs a page's blocks; those marked as slow only if asked, which then run alone."""
        folder = self._home / page.relative_to(DOCS).with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        every = [block for block in blocks(page) if "not run" not in block.mark]
        for block in every:
            if block.title and block.title != OUTPUT:
                (folder / block.title).write_text(block.text)
        python = [b.text for b in every if b.language == "python" and not b.title.count("windows")]
        if python and not slow:
            self._run_python(folder, python)
        for block, after in itertools.pairwise([*every, Block("", "", "", "")]):
            if (block.mark == "slow") == slow:
                printed = [self._run(folder, words) for words in block.commands]
                if after.title == OUTPUT:
                    check_output(after.text, printed[-1])

    def _run_python(self, folder: Path, parts: list[str]) -> None:
        """Runs all Python of a page as one script."""
        head = f"import os, sys\nos.chdir({str(folder)!r})\nsys.argv = ['page']\n"
        self._notebook.run(head + "\n".join(parts), timeout_s=270)

    def _run(self, folder: Path, words: list[str]) -> str:
        """Runs a command, and returns what it printed.

        `up` is the shared cluster, and files of a page ran with its Python.
        """
        match words:
            case ["up", "--islands", islands]:
                assert islands == ISLANDS
            case ["run", name] if (folder / name).exists() and folder.name != "quickstart":
                assert name.endswith(".py")
            case ["run" | "capture" | "calibrate" | "reproduce", *_]:
                return self._run_process(folder, words)
            case _:
                return self._run_here(folder, words)
        return ""

    def _run_process(self, folder: Path, words: list[str]) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "fairway", *words],
            cwd=folder,
            env={**os.environ, "XDG_RUNTIME_DIR": str(self._runtime), "COLUMNS": "80"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, (words, ended.stderr)
        return ended.stdout

    def _run_here(self, folder: Path, words: list[str]) -> str:
        before = Path.cwd()
        os.chdir(folder)
        try:
            environment = {
                "XDG_RUNTIME_DIR": str(self._runtime),
                "JAX_BACKEND_TARGET": "",
                "COLUMNS": "80",
            }
            ended = CliRunner().invoke(app, words, env=environment, catch_exceptions=True)
        finally:
            os.chdir(before)
        assert ended.exit_code == 0, (words, ended.output, ended.exception)
        return ended.stdout


def check_output(shown: str, printed: str) -> None:
    """Fails unless a command printed the lines that a page shows, in their order."""
    lines = iter(line.rstrip() for line in printed.splitlines())
    for wanted in shown.splitlines():
        pattern = ".*".join(map(re.escape, wanted.rstrip().split("...")))
        assert any(re.fullmatch(pattern, line) for line in lines), (
            f"no line {wanted!r} in:\n{printed}"
        )


def test_output_that_is_not_printed_is_found() -> None:
    check_output("a ... c\nlast\n", "first\na b c\n\nlast\n")
    for shown in ("a ... d\n", "last\na b c\n", "a b\n"):
        with pytest.raises(AssertionError, match="no line"):
            check_output(shown, "a b c\nlast\n")


@pytest.fixture(scope="module")
def reader(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """The reader of all pages."""
    home = tmp_path_factory.mktemp("pages")
    directory = Path(tempfile.mkdtemp(prefix="docs-", dir=runtime))
    with (
        Up("--islands", ISLANDS, runtime=directory) as cluster,
        Notebook(cluster) as notebook,
    ):
        yield Reader(cluster, notebook, home, directory)
    shutil.rmtree(directory, ignore_errors=True)


def of_kind(*, slow: bool) -> list[Path]:
    """The pages that have something to run."""
    return [
        page
        for page in PAGES
        if any(
            (block.mark == "slow") == slow
            and "not run" not in block.mark
            and (block.commands or (block.language == "python" and not slow))
            for block in blocks(page)
        )
    ]


@pytest.mark.parametrize("page", of_kind(slow=False), ids=label)
def test_a_page_works_as_typed(page: Path, reader: Reader) -> None:
    reader.read(page, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", of_kind(slow=True), ids=label)
def test_slow_parts_of_a_page_work_as_typed(page: Path, reader: Reader) -> None:
    reader.read(page, slow=True)


def test_the_json_of_steps_is_planned(tmp_path: Path) -> None:
    """Data shown in the reference is valid: a step, and costs of channels."""
    shown = [
        block.text for block in blocks(DOCS / "reference" / "steps.md") if block.language == "json"
    ]
    step, costs = tmp_path / "step.json", tmp_path / "costs.json"
    step.write_text(shown[0])
    costs.write_text(shown[1])
    assert json.loads(shown[1])["channels"]
    words = ["plan", str(step), "--costs", str(costs), "--evaluations", "10", "--json"]
    planned = CliRunner().invoke(app, words)
    assert planned.exit_code == 0, planned.output


def test_snippets_of_the_readme_run_as_one_script(tmp_path: Path, own_runtime: Path) -> None:
    """Runs all of them, in order, with the default ``fairway run``."""
    script: list[str] = []
    for block in blocks(ROOT / "README.md"):
        if block.language != "python":
            continue
        if beside := BESIDE.match(block.text):
            (tmp_path / beside[1]).write_text(block.text)
        else:
            script.append(block.text)
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
    for _ in range(4):
        linked = itertools.chain.from_iterable(
            (
                (path.parent / target).resolve()
                for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
            )
            for path in known
            if path.is_file()
        )
        known |= {path for path in linked if path.suffix == ".md"}
    assert {path for path in DOCUMENTS if path.parent.name != "examples"} <= known


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "zensical.toml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f'"{page.relative_to(DOCS)}"' in listed, page
