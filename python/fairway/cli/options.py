"""Options of commands: groups of them that are dataclasses, and those that commands share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

__all__ = ["Json", "Seed", "grouped"]

R = TypeVar("R")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Seed = Annotated[int, typer.Option(help="Random seed (deterministic).", min=0, max=2**63 - 1)]


def grouped(command: Callable[..., R]) -> Callable[..., R]:
    """Lets a command take options as dataclasses.

    A parameter whose type is a dataclass stands for one option per field, annotated as parameters
    of commands are, at its place in the help. The command gets these options as one object.

    Raises:
        ValueError: two options have the same name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {
        name: hint
        for name, hint in hints.items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }

    @functools.wraps(command)
    def call(**given: Any) -> R:
        objects = {
            name: group(**{field: given.pop(field) for field in group.__dataclass_fields__})
            for name, group in groups.items()
        }
        return command(**given, **objects)

    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(command).parameters.values():
        if one.name in groups:
            parameters += _options(groups[one.name])
        else:
            parameters.append(one.replace(kind=one.KEYWORD_ONLY, annotation=hints[one.name]))
    vars(call)["__signature__"] = inspect.Signature(parameters)
    return call


def _options(group: type[Any]) -> Iterator[inspect.Parameter]:
    """Yields a parameter of a command for each field of a dataclass."""
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        default = field.default
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
            annotation=hints[field.name],
        )
