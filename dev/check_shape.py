"""Checks the shape of the code: circles between modules, and lengths of files and functions.

Imports of Python modules, those inside functions and under ``TYPE_CHECKING`` included, form no
circle, and nor do the modules of one crate. Files have at most 600 lines, functions at most 60, and
public functions at most six parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import python_shape
import rust_shape
from shape import Edge, Function, circles

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ("crates", "python", "dev", "tests", "benchmarks", "examples")
"""Folders whose files are checked."""

LINES_OF_FILE_MAX = 600
LINES_OF_FUNCTION_MAX = 60
PARAMETERS_MAX = 6
GENERATED = ("python/fairway/host/messages.py",)
"""Files that are written by a program, which may be of any length."""


@dataclass(frozen=True)
class Source:
    """A source file.

    Attributes:
        path: Relative to the root of the repository.
        text: The file's content.
    """

    path: str
    text: str


def sources() -> list[Source]:
    """Returns the files that are checked, stubs of compiled modules included, by path."""
    paths = (path for top in CHECKED for path in (ROOT / top).rglob("*"))
    return [
        Source(str(path.relative_to(ROOT)), path.read_text())
        for path in sorted(paths)
        if path.suffix in (".py", ".pyi", ".rs")
    ]


def circle_errors(kind: str, edges: Iterable[Edge]) -> list[str]:
    """Returns circles of imports.

    Args:
        kind: What the modules are, for messages.
        edges: All imports.
    """
    return [f"{kind} import each other: {', '.join(circle)}" for circle in circles(edges)]


def limit_errors(what: str, found: Mapping[str, int], limit: int) -> list[str]:
    """Returns what exceeds a limit.

    Args:
        what: What is counted, for messages.
        found: Count by name.
        limit: Largest count.
    """
    return [
        f"{name} has {count} {what}; expected at most {limit}"
        for name, count in found.items()
        if count > limit
    ]


def function_errors(functions: Iterable[Function]) -> list[str]:
    """Returns functions that are too long or, if public, have too many parameters."""
    lines: dict[str, int] = {}
    parameters: dict[str, int] = {}
    for function in functions:
        lines[function.name] = max(function.lines, lines.get(function.name, 0))
        if function.is_public:
            parameters[function.name] = max(function.parameters, parameters.get(function.name, 0))
    return [
        *limit_errors("lines in a function", lines, LINES_OF_FUNCTION_MAX),
        *limit_errors("parameters", parameters, PARAMETERS_MAX),
    ]


def main() -> int:
    """Prints violations of the shape; returns the exit status."""
    files = sources()
    python = {file.path: file.text for file in files if not file.path.endswith(".rs")}
    rust = {file.path: file.text for file in files if file.path.endswith(".rs")}
    errors = limit_errors(
        "lines",
        {file.path: len(file.text.splitlines()) for file in files if file.path not in GENERATED},
        LINES_OF_FILE_MAX,
    )
    errors += circle_errors("Python modules", python_shape.imports(python, "python"))
    errors += circle_errors("Rust modules", rust_shape.uses(rust))
    functions = [
        function
        for path, text in python.items()
        if not path.endswith(".pyi")  # says again what the Rust functions say
        for function in python_shape.functions(path, text)
    ]
    functions += [one for path, text in rust.items() for one in rust_shape.functions(path, text)]
    errors += function_errors(functions)
    for error in errors:
        print(f"shape: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
