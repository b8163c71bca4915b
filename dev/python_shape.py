"""Imports and functions of Python files."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from shape import Edge, Function

_Def = ast.FunctionDef | ast.AsyncFunctionDef


def module_name(path: str, top: str) -> str:
    """Returns the dotted name of the module in the file ``path`` below the folder ``top``."""
    parts = PurePosixPath(path).relative_to(top).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imports(files: Mapping[str, str], top: str) -> set[Edge]:
    """Returns the imports between modules, at any nesting level.

    ``from package import name`` imports the module ``package.name`` where there is one, and
    otherwise ``package``. That an import runs the packages above a module does not count.

    Args:
        files: Text by path.
        top: Folder of the packages; files outside are ignored.
    """
    modules = {
        module_name(path, top): text for path, text in files.items() if path.startswith(f"{top}/")
    }
    return {
        Edge(module, target)
        for module, text in modules.items()
        for target in _imported(ast.parse(text), modules)
        if target != module
    }


def _imported(tree: ast.AST, modules: Mapping[str, str]) -> Iterator[str]:
    """Yields those of ``modules`` that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in below]
        else:
            continue
        yield from (name for name in names if name in modules)


def functions(path: str, text: str) -> Iterator[Function]:
    """Yields the functions of a file, at any nesting level.

    A function is public if it, its class and its file have public names and it is in no other
    function; constructors are public.
    """
    hidden = any(
        part.startswith("_") and not part.startswith("__") for part in PurePosixPath(path).parts
    )
    for names, node, inner in _definitions(ast.parse(text), (), False):
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        receiver = bool(parameters) and parameters[0].arg in ("self", "cls")
        private = any(name.startswith("_") and name != "__init__" for name in names)
        yield Function(
            name=f"{path}::{'.'.join(names)}",
            lines=_lines(node),
            parameters=len(parameters) - receiver,
            is_public=not (hidden or private or inner),
        )


def _definitions(
    node: ast.AST, above: tuple[str, ...], inner: bool
) -> Iterator[tuple[tuple[str, ...], _Def, bool]]:
    """Yields qualified name and definition of functions below ``node``.

    Args:
        node: Where to look.
        above: Names of the classes and functions around it.
        inner: Whether one of those is a function.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Def):
            names = (*above, child.name)
            yield names, child, inner
            yield from _definitions(child, names, True)
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, (*above, child.name), inner)
        else:
            yield from _definitions(child, above, inner)


def _lines(node: _Def) -> int:
    """Returns the number of a function's lines without decorators and docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is None:
        return lines
    docstring = node.body[0]
    return lines - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)
