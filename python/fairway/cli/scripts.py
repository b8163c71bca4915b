"""Arguments after the script on the command line: the script's own, and misplaced options.

Options of ``fairway run`` and ``fairway capture`` end at the script, so that a script may have
options of any name. An argument after it that is spelled like one of the command's is pointed out;
``capture`` also accepts its ``-o`` there, since that is where people put it. ``--`` marks where the
script's own arguments begin.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import typer

from fairway.errors import ConfigError, FairwayError

__all__ = ["check_script", "misplaced", "take_options", "words_of"]

SEPARATOR = "--"
MODULE = "-m"
PYTHON_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz", ".zip")
"""Suffixes of files that Python runs; any other file must be source text that compiles."""


class OptionError(typer.BadParameter):
    """An option before the script that the command does not have."""

    def format_message(self) -> str:
        """Returns the message without the library's preamble."""
        return self.message


def check_script(script: Path, context: typer.Context) -> None:
    """Checks that a path is a Python file.

    Args:
        script: the argument in the script's position.
        context: context of the command.

    Raises:
        OptionError: it is an option that the command does not have.
        FairwayError: there is no such file, or it is not Python.
    """
    if script.is_file():
        _check_python(script)
        return
    name = str(script)
    if name == MODULE:
        raise OptionError(
            "-m is for `fairway run` only; expected the path of a Python file, such as that of the "
            "module",
            ctx=context,
        )
    if name.startswith("-"):
        options = [opt for param in context.command.params for opt in param.opts if opt[:1] == "-"]
        close = difflib.get_close_matches(name.partition("=")[0], options, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise OptionError(f"no such option {name}{hint}", ctx=context)
    found = "it is a folder; " if script.is_dir() else ""
    raise FairwayError(f"there is no script {script}: {found}expected a Python file")


def words_of(script: Path, context: typer.Context) -> list[str]:
    """Returns the arguments for Python that run a script, or a module behind ``-m``.

    Args:
        script: the argument in the script's position, which may be ``-m``.
        context: context of the command, with the arguments that follow.

    Raises:
        OptionError: it is an option that the command does not have, or no module follows ``-m``.
        FairwayError: there is no such script or module, or it is not Python.
    """
    if str(script) != MODULE or script.is_file():
        check_script(script, context)
        return [str(script), *context.args]
    if not context.args:
        raise OptionError(
            "-m has no module; expected `-m MODULE`, such as `-m pytest`", ctx=context
        )
    name = context.args[0]
    # Only the top level: to look further would run code of its packages.
    if PathFinder.find_spec(name.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
        raise FairwayError(f"there is no module {name} here or in this Python; check its spelling")
    return [MODULE, *context.args]


def _check_python(script: Path) -> None:
    """Rejects other files, such as a README, by suffix and then by compiling the contents."""
    if script.suffix in PYTHON_SUFFIXES:
        return
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise FairwayError(
            f"{script} is no Python{line}: {getattr(error, 'msg', error)}; expected a Python file"
        ) from None


def misplaced(arguments: Sequence[str], ours: Collection[str]) -> list[str]:
    """Returns arguments of a script that are named like options of the command, up to a ``--``."""
    if SEPARATOR in arguments:
        arguments = arguments[: list(arguments).index(SEPARATOR)]
    names = (argument.partition("=")[0] for argument in arguments)
    return [name for name in names if name in ours]


def take_options(
    arguments: Sequence[str], ours: Mapping[str, str], everywhere: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Separates options of the command from the arguments of a script.

    Args:
        arguments: what follows the script. Before a ``--`` there are only options of the command;
            without a ``--``, all are the script's except those in ``everywhere``.
        ours: spellings of options that take a value, each with the option's name.
        everywhere: spellings that are the command's without a ``--``, too.

    Returns:
        The values of options by name, and the script's arguments.

    Raises:
        ConfigError: an option has no value, is given twice, or is unknown before ``--``.

    >>> take_options(["-o", "a.fw", "--", "-o", "b"], {"-o": "out"}, {"-o"})
    ({'out': 'a.fw'}, ['-o', 'b'])
    >>> take_options(["--steps", "3", "-o", "a.fw"], {"-o": "out"}, {"-o"})
    ({'out': 'a.fw'}, ['--steps', '3'])
    """
    given = list(arguments)
    own: list[str] = []
    is_split = SEPARATOR in given
    if is_split:
        border = given.index(SEPARATOR)
        given, own = given[:border], given[border + 1 :]
    taken: dict[str, str] = {}
    left: list[str] = []
    while given:
        argument = given.pop(0)
        name, equals, value = argument.partition("=")
        if name not in ours or not (is_split or name in everywhere):
            left.append(argument)
            continue
        if not equals:
            if not given:
                raise ConfigError(f"{name} has no value; expected `{name} VALUE`")
            value = given.pop(0)
        if ours[name] in taken:
            raise ConfigError(f"{name} is given twice; leave one out")
        taken[ours[name]] = value
    if is_split and left:
        raise ConfigError(
            f"{left[0]!r} between the script and `--` is no option of this command; there are "
            f"{', '.join(ours)}; put the script's own arguments behind `--`"
        )
    return taken, left + own
