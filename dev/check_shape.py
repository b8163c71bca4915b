"""Checks the shape of the code: circles between modules, and lengths of files and functions.

Imports of Python modules, those inside functions and under ``TYPE_CHECKING`` included, form no
circle, and nor do the modules of one crate. Files have at most 600 lines, functions at most 60, and
public functions at most six parameters. ``shape_exceptions.toml`` lists what breaks a rule today;
an exception may not grow, and one that is no longer needed is an error too.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import python_shape
import rust_shape
from shape import Edge, Function, circles

ROOT = Path(__file__).resolve().parent.parent
EXCEPTIONS = Path(__file__).with_name("shape_exceptions.toml")
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


def circle_errors(
    kind: str, edges: Iterable[Edge], exceptions: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Returns circles of imports without an exception, and exceptions that match no circle.

    Args:
        kind: What the modules are, for messages.
        edges: All imports.
        exceptions: Groups of ``modules`` that may import each other, each with a ``reason``.
    """
    groups = [frozenset(exception["modules"]) for exception in exceptions]
    found = circles(edges)
    errors = [
        f"{kind} import each other: {', '.join(circle)}"
        for circle in found
        if not any(group.issuperset(circle) for group in groups)
    ]
    return errors + [
        f"{', '.join(sorted(group))} do not all import each other; remove them from the exception"
        for group in groups
        if not group.issubset({module for circle in found for module in circle})
    ]


def limit_errors(
    what: str, found: Mapping[str, int], limit: int, allowed: Mapping[str, int]
) -> list[str]:
    """Returns what exceeds a limit and has no exception, and exceptions that are not needed.

    Args:
        what: What is counted, for messages.
        found: Count by name.
        limit: Largest count without an exception.
        allowed: Larger counts that are accepted, by name.
    """
    errors = [
        f"{name} has {count} {what}; expected at most {allowed.get(name, limit)}"
        for name, count in found.items()
        if count > allowed.get(name, limit)
    ]
    return errors + [
        f"the exception of {name} for {what} is not needed; remove it"
        for name in allowed
        if found.get(name, 0) <= limit
    ]


def function_errors(functions: Iterable[Function], exceptions: Mapping[str, Any]) -> list[str]:
    """Returns functions that are too long or, if public, have too many parameters."""
    lines: dict[str, int] = {}
    parameters: dict[str, int] = {}
    for function in functions:
        lines[function.name] = max(function.lines, lines.get(function.name, 0))
        if function.is_public:
            parameters[function.name] = max(function.parameters, parameters.get(function.name, 0))
    return limit_errors(
        "lines in a function", lines, LINES_OF_FUNCTION_MAX, exceptions.get("functions", {})
    ) + limit_errors("parameters", parameters, PARAMETERS_MAX, exceptions.get("parameters", {}))


def main() -> int:
    """Prints violations of the shape; returns the exit status."""
    exceptions = tomllib.loads(EXCEPTIONS.read_text())
    files = sources()
    python = {file.path: file.text for file in files if not file.path.endswith(".rs")}
    rust = {file.path: file.text for file in files if file.path.endswith(".rs")}
    errors = limit_errors(
        "lines",
        {file.path: len(file.text.splitlines()) for file in files if file.path not in GENERATED},
        LINES_OF_FILE_MAX,
        exceptions.get("files", {}),
    )
    errors += circle_errors(
        "Python modules", python_shape.imports(python, "python"), exceptions.get("imports", [])
    )
    errors += circle_errors("Rust modules", rust_shape.uses(rust), exceptions.get("uses", []))
    functions = [
        function
        for path, text in python.items()
        if not path.endswith(".pyi")  # says again what the Rust functions say
        for function in python_shape.functions(path, text)
    ]
    functions += [one for path, text in rust.items() for one in rust_shape.functions(path, text)]
    errors += function_errors(functions, exceptions)
    for error in errors:
        print(f"shape: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
