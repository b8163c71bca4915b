"""Tests versions of JAX as client and as host, in all combinations, and tabulates what works.

    python dev/versions.py

For every version a virtual environment is made under `.cache/versions`, with that jax and jaxlib
and the other dependencies of hosts. Hosts of each version are started, and clients of each version
run `versions_program.py` on them, from an environment that has jax and nothing of Fairway but the
folder that `fairway up` prints. The table is written into `docs/reference/versions.md`. Exit status
0 means that all versions work together, and that the refused version reports so.
"""

import argparse
import dataclasses
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(__file__).with_name("versions_program.py")
ENVIRONMENTS = ROOT / ".cache" / "versions"
DOCUMENT = ROOT / "docs" / "reference" / "versions.md"
UV = ROOT / ".cache" / "uv" / "bin" / "uv"
BARE = ROOT / "python" / "fairway" / "bare"

VERSIONS = ("0.10.2", "0.11.2", "0.12.0.1")
REFUSED = "0.11.1"
UP_S_MAX = 120.0
CLIENT_S_MAX = 300.0
MARKS = ("<!-- begin: made by dev/versions.py -->", "<!-- end -->")


class VersionsError(Exception):
    """The matrix cannot be made; the message says why."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """Results of one client version with one host version: each check and its error."""

    host: str
    client: str
    checks: dict[str, str]

    def failed(self) -> dict[str, str]:
        """Returns the checks that failed."""
        return {check: error for check, error in self.checks.items() if error}

    def text(self) -> str:
        """Returns the cell of the table."""
        if not self.checks:
            return "does not run"
        passed = sum(not error for error in self.checks.values())
        failed = ", ".join(self.failed())
        return f"{passed} of {len(self.checks)}" + (f": not {failed}" if failed else "")


def run(*command: object) -> None:
    """Runs a command; shows its output only if it fails."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise VersionsError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")


def environment(version: str, python: str, group: str | None = None) -> Path:
    """Returns the interpreter of an environment with this version, created if necessary.

    Args:
        version: of jax and jaxlib.
        python: the interpreter that creates it, or its version.
        group: a dependency group of the project to install as well.
    """
    folder = ENVIRONMENTS / (f"{version}-{group}" if group else version)
    interpreter = folder / "bin" / "python"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    others = [
        needed
        for needed in project["project"]["dependencies"]
        if re.match(r"[\w.-]+", needed)[0] not in ("jax", "jaxlib")  # type: ignore[index]
    ]
    if group is not None:
        others += ["pytest>=8.3", *project["dependency-groups"][group]]
    wanted = [f"jax=={version}", f"jaxlib=={version}", *others]
    made = folder / "made.json"
    if made.exists() and json.loads(made.read_text()) == wanted:
        return interpreter
    run(UV, "venv", "--quiet", "--clear", "--python", python, folder)
    run(UV, "pip", "install", "--quiet", "--python", interpreter, *wanted)
    made.write_text(json.dumps(wanted))
    return interpreter


def clean_environment(**given: str) -> dict[str, str]:
    """Returns the environment without settings of JAX and XLA, and with those given."""
    names = ("JAX_", "XLA_", "TF_CPP", "PYTHONPATH", "FAIRWAY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    return {**kept, **given}


@contextmanager
def islands(interpreter: Path) -> Iterator[dict[str, str]]:
    """Starts two islands with hosts of this environment; yields the variables for clients.

    Raises:
        VersionsError: they do not start; the message is their output.
    """
    with tempfile.TemporaryDirectory(prefix="fw-") as runtime, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [str(interpreter), "-m", "fairway", "up", "--islands", "2x1x4"],
            env=clean_environment(PYTHONPATH=str(ROOT / "python"), XDG_RUNTIME_DIR=runtime),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        assert process.stdout is not None
        try:
            exported = {}
            while "JAX_BACKEND_TARGET" not in exported:
                line = process.stdout.readline()
                if not line:
                    process.wait(UP_S_MAX)
                    said.seek(0)
                    raise VersionsError(said.read())
                name, _, value = line.strip().removeprefix("export ").partition("=")
                exported[name] = value
            yield exported
        finally:
            process.terminate()
            process.wait(UP_S_MAX)
            process.stdout.close()


def try_client(interpreter: Path, exported: dict[str, str]) -> tuple[dict[str, str], str]:
    """Runs the checks in a client of this environment; returns their errors, and all output."""
    given = {**exported, "PYTHONPATH": f"{BARE}{os.pathsep}{ROOT / 'python'}"}
    done = subprocess.run(
        [str(interpreter), str(PROGRAM)],
        env=clean_environment(**given),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=CLIENT_S_MAX,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("checks ")]
    checks = json.loads(lines[-1].removeprefix("checks ")) if lines else {}
    return checks, done.stdout


def check_refused(python: str) -> list[str]:
    """Tries hosts and clients of the refused version; returns what is wrong."""
    interpreter = environment(REFUSED, python)
    sentence = f"jaxlib {REFUSED} cannot be used with Fairway"
    wrong = []
    try:
        with islands(interpreter):
            wrong.append(f"hosts of {REFUSED} come up")
    except VersionsError as error:
        if sentence not in " ".join(str(error).split()):
            wrong.append(f"hosts of {REFUSED} are refused without a reason:\n{error}")
    _, said = try_client(
        interpreter, {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": "grpc://127.0.0.1:1"}
    )
    if sentence not in said:
        wrong.append(f"clients of {REFUSED} are not refused:\n{said}")
    return wrong


def python_version(interpreter: Path) -> str:
    """Returns the version of an interpreter."""
    command = [str(interpreter), "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(cells: list[Cell], versions: list[str], python: str) -> str:
    """Formats the cells as Markdown, hosts by row and clients by column."""
    known = {(cell.host, cell.client): cell.text() for cell in cells}
    lines = [
        f"| hosts \\ client | {' | '.join(versions)} |",
        f"|---|{'---|' * len(versions)}",
    ]
    for host in versions:
        row = " | ".join(known[host, client] for client in versions)
        lines.append(f"| **{host}** | {row} |")
    names = ", ".join(f"`{name}`" for name in cells[-1].checks)
    made = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines += [
        "",
        f"Checks: {names}. Made on {made} with Python {python}, CPU devices.",
        f"jaxlib {REFUSED} is refused, as client and as host.",
    ]
    return "\n".join(lines)


def write(text: str) -> None:
    """Writes the table between its marks."""
    document = DOCUMENT.read_text()
    before, _, rest = document.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    DOCUMENT.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


def main() -> int:
    """Makes the table and returns the exit status."""
    parser = argparse.ArgumentParser(description="Try versions of JAX with each other.")
    parser.add_argument("--versions", default=",".join(VERSIONS), help="comma-separated")
    parser.add_argument("--python", default="3.12", help="for the environments; from 3.12 on")
    parser.add_argument("--dry", action="store_true", help="leave the document as it is")
    parser.add_argument(
        "--for-tests",
        metavar="VERSION",
        help="only make an environment in which jax_tests.py runs, and print its interpreter",
    )
    options = parser.parse_args()
    if options.for_tests:
        print(environment(options.for_tests, options.python, "jax-tests"))
        return 0
    versions = options.versions.split(",")
    try:
        interpreters = {version: environment(version, options.python) for version in versions}
        wrong = check_refused(options.python)
        cells = []
        for host in versions:
            with islands(interpreters[host]) as exported:
                for client in versions:
                    checks, said = try_client(interpreters[client], exported)
                    cell = Cell(host, client, checks)
                    cells.append(cell)
                    print(f"hosts {host}, client {client}: {cell.text()}", flush=True)
                    failed = cell.failed() if checks else {"the program": said}
                    wrong += [
                        f"hosts {host}, client {client}, {check}: {error}"
                        for check, error in failed.items()
                    ]
    except VersionsError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.dry:
        write(table(cells, versions, python_version(interpreters[versions[0]])))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
