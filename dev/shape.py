"""What the checks of the code's shape have in common: imports, functions and circles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Edge:
    """An import.

    Attributes:
        source: The module that imports.
        target: The module that is imported.
    """

    source: str
    target: str


@dataclass(frozen=True)
class Function:
    """A function's size.

    Attributes:
        name: Path of the file and qualified name, ``path::Class.method``.
        lines: Lines without docstring or attributes.
        parameters: Number of parameters besides the receiver.
        is_public: Whether other modules may call it.
    """

    name: str
    lines: int
    parameters: int
    is_public: bool


def circles(edges: Iterable[Edge]) -> list[list[str]]:
    """Returns the strongly connected components of more than one module, each sorted.

    Cost: O(modules · imports), small enough for a few hundred modules.
    """
    targets: dict[str, set[str]] = {}
    for edge in edges:
        targets.setdefault(edge.source, set()).add(edge.target)
    reached = {module: _reachable(module, targets) for module in targets}
    found = {
        tuple(sorted(other for other in reached[module] if module in reached.get(other, ())))
        for module in targets
        if module in reached[module]
    }
    return [list(circle) for circle in sorted(found) if len(circle) > 1]


def _reachable(start: str, targets: dict[str, set[str]]) -> set[str]:
    """Returns the modules that ``start`` imports directly or through others."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for target in targets.get(waiting.pop(), ()):
            if target not in reached:
                reached.add(target)
                waiting.append(target)
    return reached
