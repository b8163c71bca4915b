"""Modules that a client sends along with its functions.

The client's plugin puts them before the pickle of a function; without it there is the pickle
alone, and functions may import what this host has.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["ShippedModules"]

PREFIX = b"fairway modules 1\n"
"""What a function with modules begins with; then the length of a JSON object (32 bits,
little-endian), the object, and the pickle. Equal to that of :mod:`fairway.plugin.modules`."""


class ShippedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules from sources that a client has sent, before those of this machine."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[bool, str]] = {}
        sys.meta_path.insert(0, self)

    def take(self, program: bytes) -> tuple[bytes, bool | None]:
        """Adds the modules before a pickle; a changed one is imported anew.

        Returns:
            The pickle, and whether the client has enabled 64-bit types; None if it does not say.
        """
        if not program.startswith(PREFIX):
            return program, None
        begin = len(PREFIX) + 4
        end = begin + int.from_bytes(program[len(PREFIX) : begin], "little")
        given = json.loads(program[begin:end])
        for name, (is_package, source) in given["modules"].items():
            if self._sources.get(name, (is_package, source)) != (is_package, source):
                sys.modules.pop(name, None)
            self._sources[name] = bool(is_package), str(source)
        return program[end:], bool(given["x64"])

    # What importlib asks for

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns how a module is imported; None if the client has not sent it."""
        if name not in self._sources:
            return None
        return importlib.util.spec_from_loader(
            name, self, origin=f"<client's {name}>", is_package=self._sources[name][0]
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Leaves the module to be made as usual."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Runs the source of a module."""
        _, source = self._sources[module.__name__]
        file = f"<client's {module.__name__}>"
        module.__file__ = file
        # With its lines, so that tracebacks show them.
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        code: Any = compile(source, file, "exec")
        exec(code, module.__dict__)
