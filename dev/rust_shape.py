"""Uses between modules and functions of Rust files, read from their text.

This is no parser: it knows comments, strings, braces, ``use`` and paths, which is enough for code
in the format of rustfmt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shape import Edge, Function

_NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(?P<hashes>\#*)".*?"(?P=hashes)|b?"(?:\\.|[^"\\])*"|b?'(?:\\.[^']*|[^'\\])'""",
    re.DOTALL,
)
_TEST_MODULE = re.compile(r"#\[cfg\(test\)\]\s*mod (\w+)\s*(;|\{)")
_USE = re.compile(r"^[ ]*(pub(?:\([^)]*\))? )?use ([^;]+);", re.MULTILINE)
_PATH = re.compile(r"\b(?:crate|super|self)(?:::\w+)+")
_FUNCTION = re.compile(
    r"^[ ]*(?P<visibility>pub(?:\([^)]*\))? )?(?:const |async |unsafe |extern \S+ )*"
    r"fn (?P<name>\w+)",
    re.MULTILINE,
)
_IMPL = re.compile(r"^(?:unsafe )?(?:impl|trait|pub trait)\b(?P<head>[^{;]*)\{", re.MULTILINE)


def code(text: str) -> str:
    """Returns ``text`` with comments, strings and characters blanked; lines stay where they are."""
    return _NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def closing(text: str, start: int, pair: str = "{}") -> int:
    """Returns where the bracket that ``text[start]`` opens is closed."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        if depth == 0:
            return at
    return len(text) - 1


@dataclass
class _Module:
    """A module of a crate: a file without its tests.

    Attributes:
        path: Names of the modules from the crate's root.
        text: Its code.
        reexports: Path of each name that it exports again.
        uses: Paths of what it uses.
    """

    path: tuple[str, ...]
    text: str
    reexports: dict[str, tuple[str, ...]] = field(default_factory=dict)
    uses: set[tuple[str, ...]] = field(default_factory=set)


def uses(files: Mapping[str, str]) -> set[Edge]:
    """Returns the uses between modules of the same crate, by path of their files.

    A path counts for the module that defines its name, also when a module between exports the
    name again; such an export is not a use. Tests are left out.

    Args:
        files: Text by path; files outside ``crates/*/src`` are ignored.
    """
    crates: dict[str, dict[str, str]] = {}
    for path, text in files.items():
        parts = path.split("/")
        if parts[0] == "crates" and parts[2] == "src":
            crates.setdefault(parts[1], {})[path] = text
    return {edge for texts in crates.values() for edge in _crate_uses(texts)}


def _crate_uses(files: Mapping[str, str]) -> Iterator[Edge]:
    """Yields the uses between modules of one crate."""
    modules: dict[tuple[str, ...], _Module] = {}
    names: dict[tuple[str, ...], str] = {}
    tests: set[tuple[str, ...]] = set()
    for file, text in files.items():
        path = _module_path(file)
        text = code(text)
        text, declared = _without_tests(text)
        tests |= {(*path, name) for name in declared}
        modules[path] = _Module(path, text)
        names[path] = file
    for path in [path for path in modules if any(path[: len(test)] == test for test in tests)]:
        del modules[path]
    for module in modules.values():
        _read_paths(module, modules)
    for module in modules.values():
        for used in module.uses:
            target = _defining(used, modules)
            if target is not None and target != module.path:
                yield Edge(names[module.path], names[target])


def _module_path(file: str) -> tuple[str, ...]:
    """Returns the path of the module in a file below ``crates/*/src``."""
    parts = tuple(file.removesuffix(".rs").split("/")[3:])
    return parts[:-1] if parts[-1] in ("lib", "main", "mod") else parts


def _without_tests(text: str) -> tuple[str, set[str]]:
    """Returns code without its inline tests, and the names of modules of tests in other files."""
    declared: set[str] = set()
    while match := _TEST_MODULE.search(text):
        end = match.end()
        if match.group(2) == ";":
            declared.add(match.group(1))
        else:
            end = closing(text, match.end() - 1) + 1
        text = text[: match.start()] + text[end:]
    return text, declared


def _read_paths(module: _Module, modules: Mapping[tuple[str, ...], _Module]) -> None:
    """Fills in what a module uses and what it exports again."""
    for match in _USE.finditer(module.text):
        for path, name in _flatten(match.group(2)):
            full = _absolute(path, module.path, modules)
            if full is None:
                continue
            if match.group(1):
                module.reexports[name] = full
            else:
                module.uses.add(full)
    rest = _USE.sub("", module.text)
    for match in _PATH.finditer(rest):
        full = _absolute(tuple(match.group().split("::")), module.path, modules)
        if full is not None:
            module.uses.add(full)


def _flatten(tree: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the paths in a tree of ``use`` with the name that each has in the module.

    >>> sorted(_flatten("crate::a::{self, b::C as D}"))
    [(('crate', 'a'), 'a'), (('crate', 'a', 'b', 'C'), 'D')]
    """
    tree = tree.strip()
    head, brace, rest = tree.partition("{")
    if not brace:
        path, _, alias = head.partition(" as ")
        parts = tuple(part.strip() for part in path.split("::"))
        if parts[-1] == "self" and len(parts) > 1:
            parts = parts[:-1]
        yield parts, alias.strip() or parts[-1]
        return
    prefix = tuple(part for part in head.strip().split("::") if part)
    inner = rest[: rest.rindex("}")]
    start = depth = 0
    for at, letter in enumerate(inner + ","):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            if inner[start:at].strip():
                for parts, name in _flatten(inner[start:at]):
                    parts = () if parts == ("self",) else parts
                    yield (*prefix, *parts), prefix[-1] if not parts else name
            start = at + 1


def _absolute(
    path: tuple[str, ...], module: tuple[str, ...], modules: Mapping[tuple[str, ...], _Module]
) -> tuple[str, ...] | None:
    """Returns a path from the crate's root, or none if it leads out of the crate.

    Args:
        path: As written.
        module: Where it is written.
        modules: The crate's modules.
    """
    if path[0] == "crate":
        return path[1:]
    if path[0] in ("self", "super"):
        base = module
        for at, part in enumerate(path):
            if part == "super":
                base = base[:-1]
            elif part != "self":
                return (*base, *path[at:])
        return base
    return (*module, *path) if (*module, path[0]) in modules else None


def _defining(
    path: tuple[str, ...], modules: Mapping[tuple[str, ...], _Module]
) -> tuple[str, ...] | None:
    """Returns the module that defines what ``path`` names, through what others export again."""
    for _ in range(len(modules) + 1):
        module = path
        while module not in modules:
            if not module:
                return None
            module = module[:-1]
        name = path[len(module) : len(module) + 1]
        if not name:
            return module
        onward = modules[module].reexports.get(name[0])
        if onward is None or onward == path:
            return module
        path = (*onward, *path[len(module) + 1 :])
    return module


def functions(path: str, text: str) -> Iterator[Function]:
    """Yields the functions of a file that have a body.

    A function is public if it is ``pub``, or in the crate of Python bindings.
    """
    text = code(text)
    bindings = path.startswith("crates/py/")
    for match in _FUNCTION.finditer(text):
        start = text.index("(", _after_generics(text, match.end()))
        end = closing(text, start, "()")
        body = re.compile(r"[{;]").search(text, end)
        if body is None or body.group() == ";":
            continue
        parameters = _parameters(text[start + 1 : end])
        owner = _owner(text, match.start())
        yield Function(
            name=f"{path}::{owner}{match.group('name')}",
            lines=text.count("\n", body.start(), closing(text, body.start())) - 1,
            parameters=len([one for one in parameters if not re.search(r"\bself$", one)]),
            is_public=bindings or match.group("visibility") == "pub ",
        )


def _after_generics(text: str, at: int) -> int:
    """Returns where the generic parameters that may begin at ``at`` end."""
    if text[at] != "<":
        return at
    return closing(text[:at] + text[at:].replace("->", "  ").replace("=>", "  "), at, "<>")


def _owner(text: str, at: int) -> str:
    """Returns the type whose ``impl`` or the trait that encloses a place, followed by a dot."""
    for match in _IMPL.finditer(text):
        if match.end() <= at < closing(text, match.end() - 1):
            head = match.group("head").split(" where ")[0]
            subject = re.sub(r"<.*?>|\s", "", head.split(" for ")[-1].replace("\n", " "))
            return f"{re.split(r'[:>]', subject)[-1] or subject}."
    return ""


def _parameters(text: str) -> list[str]:
    """Returns the names of parameters, given what is between the parentheses."""
    text = text.replace("->", "  ")
    found = []
    start = depth = 0
    for at, letter in enumerate(text + ","):
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            if text[start:at].strip():
                found.append(re.split(r":(?!:)", text[start:at])[0].strip())
            start = at + 1
    return [re.sub(r"#\[[^\]]*\]\s*", "", name) for name in found]
