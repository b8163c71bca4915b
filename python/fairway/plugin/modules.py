"""Sends the client's own modules along with its functions of ``colocated_python``.

JAX pickles functions of modules by their names, which hosts look up. Installed packages are their
hosts' own affair; modules that lie anywhere else are the client's, and may exist nowhere else.
"""

import json
import pickletools
import site
import sys
import sysconfig
import tokenize
import types
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

PREFIX = b"fairway modules 1\n"
"""What a function with modules begins with; :mod:`fairway.host.colocated.shipped` reads it."""
BYTES_MAX = 64 << 20
"""Most bytes of modules that are sent with a function."""


def send_modules() -> None:
    """Puts the client's modules before the pickles of its functions."""
    import jax
    from jax.extend.ifrt_programs import ifrt_programs

    make = ifrt_programs.make_colocated_python_program
    if hasattr(make, "fairway_modules"):
        return

    def make_with_modules(name: str, pickled: bytes, *others: Any) -> Any:
        own = _own()
        modules = _sources(own) if _names_any(pickled, own) else {}
        config: Any = jax.config
        given = json.dumps({"modules": modules, "x64": bool(config.jax_enable_x64)}).encode()
        if len(given) > BYTES_MAX:
            raise ValueError(
                f"the modules of the function {name} have {len(given):,} bytes; at most "
                f"{BYTES_MAX:,} are sent to the hosts; install them there instead"
            )
        return make(name, PREFIX + len(given).to_bytes(4, "little") + given + pickled, *others)

    make_with_modules.fairway_modules = True  # type: ignore[attr-defined]
    programs: Any = ifrt_programs
    programs.make_colocated_python_program = make_with_modules


def _installed() -> tuple[str, ...]:
    """Returns the folders of Python itself and of installed packages."""
    named = sysconfig.get_paths()
    folders = {named[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update(site.getsitepackages(), [site.getusersitepackages()])
    return tuple(str(Path(folder).resolve()) + "/" for folder in folders)


def _is_own(module: types.ModuleType, installed: tuple[str, ...]) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or module.__name__ == "__main__":
        return False
    path = str(Path(file).resolve())
    return not path.startswith(installed) and not module.__name__.startswith("fairway")


def _own() -> dict[str, types.ModuleType]:
    """Returns the client's modules by name."""
    installed = _installed()
    known = list(sys.modules.items())
    return {
        name: module
        for name, module in known
        if isinstance(module, types.ModuleType)
        and name == getattr(module, "__name__", None)
        and _is_own(module, installed)
    }


def _sources(modules: Mapping[str, types.ModuleType]) -> dict[str, tuple[bool, str]]:
    """Returns the sources of modules, and whether each is a package."""
    found: dict[str, tuple[bool, str]] = {}
    for name, module in modules.items():
        try:
            with tokenize.open(str(module.__file__)) as file:
                found[name] = (hasattr(module, "__path__"), file.read())
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue  # hosts may have it
    # Of packages without an __init__.py only their modules have sources.
    for name in list(found):
        parent = name.rpartition(".")[0]
        while parent and parent not in found:
            found[parent] = (True, "")
            parent = parent.rpartition(".")[0]
    return found


def _names_any(pickled: bytes, names: Container[str]) -> bool:
    """Returns whether a pickle names one of these modules."""
    return any(
        isinstance(argument, str) and (argument in names or argument.partition(" ")[0] in names)
        for _, argument, _ in pickletools.genops(pickled)
    )
