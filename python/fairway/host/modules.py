"""Decides from which modules a client may have this host import functions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

__all__ = ["AllowedModules"]


class AllowedModules:
    """The modules that the owner of this host has allowed.

    Args:
        prefixes: names of modules, each including its submodules; None allows every module whose
            file lies under one of ``folders``.
        folders: folders in which modules are searched, before others.
        prepare: called before a module is imported.
    """

    def __init__(
        self,
        prefixes: Sequence[str] | None,
        folders: Sequence[str],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._prefixes = prefixes
        self._prepare = prepare
        self._folders = [Path(folder).resolve() for folder in folders]

    def load(self, module: str) -> ModuleType:
        """Imports a module, if it is allowed.

        Raises:
            PermissionError: it is not; names the setting that allows it.
            ModuleNotFoundError: there is no such module.
            BaseException: any exception of the module itself.
        """
        if self._prefixes is None:
            file = self._file_of(module)
            self._prepare()
            loaded = importlib.import_module(module)
            found = getattr(loaded, "__file__", None)
            if found is None or Path(found).resolve() != file:
                raise PermissionError(
                    f"module {module} is {found} on this host and not {file}; rename the file"
                )
            return loaded
        self.check(module)
        self._prepare()
        return importlib.import_module(module)

    def check(self, module: str) -> None:
        """Checks that a module is allowed.

        Raises:
            PermissionError: names the setting that allows it.
        """
        if self._prefixes is None:
            self._file_of(module)
            return
        if not any(module == one or module.startswith(f"{one}.") for one in self._prefixes):
            raise PermissionError(
                f"module {module} is not allowed; the setting input_modules allows "
                f"{list(self._prefixes) or 'none'}; add it there"
            )

    def _file_of(self, module: str) -> Path:
        """Returns the file under one of the folders whose path corresponds to this name.

        Raises:
            PermissionError: there is none, or it is a link that leads elsewhere.
        """
        parts = module.split(".")
        if all(part.isidentifier() for part in parts):
            for folder in self._folders:
                place = folder.joinpath(*parts)
                for candidate in (place.with_suffix(".py"), place / "__init__.py"):
                    file = candidate.resolve()
                    if file.is_file() and file.is_relative_to(folder):
                        return file
        if not self._folders:
            raise PermissionError(
                f"module {module!r} is not allowed: these islands were brought up without "
                "input_path and input_modules, so that their hosts import nothing; use "
                "`fairway run --new`, or bring them up with one of these settings"
            )
        raise PermissionError(
            f"module {module!r} has no file under {[str(folder) for folder in self._folders]}; "
            "move it beside the script of `fairway run` (where not every user can write), name its "
            "folder in the setting input_path, or name the module in the setting input_modules"
        )
