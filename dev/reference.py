"""Writes the parts of the reference that follow from the code: commands and settings.

``python dev/reference.py`` rewrites ``docs/reference/cli.md``, and the tables of
``docs/reference/settings.md`` between two comments; ``--check`` writes nothing and ends with 1 if
one of them differs from the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import typer

from fairway.cli import EXIT_CODES, app
from fairway.settings import ChannelSettings, IslandSettings, Settings

ROOT = Path(__file__).resolve().parent.parent
CLI = ROOT / "docs" / "reference" / "cli.md"
SETTINGS = ROOT / "docs" / "reference" / "settings.md"
BEGIN = "<!-- begin: made by dev/reference.py -->"
END = "<!-- end -->"
HEAD = """# Options of every command

Made from the command line's own help by `make reference`; [commands](commands.md) says what each
command is for.
"""


def command_pages() -> str:
    """Returns the page of all commands, with their arguments and options."""
    root: Any = typer.main.get_command(app)
    parts = [HEAD, EXIT_CODES + "\n", *_pages(root, ["fairway"])]
    return "\n".join(parts)


def _pages(command: Any, path: list[str]) -> list[str]:
    nested = getattr(command, "commands", None)
    parts = [] if nested is not None and len(path) > 1 else [_page(command, path)]
    for name, inner in (nested or {}).items():
        parts += _pages(inner, [*path, name])
    return parts


def _page(command: Any, path: list[str]) -> str:
    """Returns the section of one command."""
    context = command.make_context(" ".join(path), [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"## {' '.join(path)}", ""]
    lines += [_plain(paragraph) + "\n" for paragraph in (command.help or "").split("\n\n")]
    lines += ["```text", f"{' '.join(path)} {usage}".rstrip(), "```", ""]
    rows = [_row(one, context) for one in command.params if not getattr(one, "hidden", False)]
    if rows:
        lines += ["| argument or option | meaning | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(parameter: Any, context: Any) -> str:
    """Returns the row of one argument or option, from the record that its help shows."""
    names, text = parameter.get_help_record(context) or (parameter.name, "")
    text = _plain(text)
    default = ""
    if found := re.search(r"\[default: ([^\]]+)\]$|\[(required)\]$", text):
        default, text = found[1] or found[2], text.replace(found[0], "").strip()
    if found := re.search(r"\[default: ([^\]]+)\]$", text):  # one that the help itself states
        default, text = found[1], text.replace(found[0], "").strip()
    default, _, limits = default.partition("; ")
    if found := re.search(r"\[([^\[\]]*<=?x|x>=?)([^\[\]]*)\]$", text):
        limits, text = found[1] + found[2], text.replace(found[0], "").strip()
    if limits:
        text += f" ({limits})"
    return f"| {_cell(names, code=True)} | {_cell(text)} | {_cell(default)} |"


def _plain(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str, *, code: bool = False) -> str:
    text = text.replace("|", "\\|")
    if code:
        return f"`{text}`"
    return text.replace("<", "&lt;") if "`" not in text else text


def settings_tables() -> str:
    """Returns tables of all settings, from the fields and docstrings of their classes."""
    parts = []
    for kind, title in (
        (Settings, "Settings of a run"),
        (IslandSettings, "Each `[[islands]]` table"),
        (ChannelSettings, "Each of its `channels`"),
    ):
        texts = _attributes(kind.__doc__ or "")
        rows = [
            f"| `{field.name}` | {_default(field)} | {_cell(texts[field.name])} |"
            for field in dataclasses.fields(kind)
        ]
        head = [f"### {title}", "", "| name | default | meaning |", "|---|---|---|"]
        parts.append("\n".join([*head, *rows, ""]))
    return "\n".join(parts)


def _attributes(document: str) -> dict[str, str]:
    """Returns the text of each attribute in a docstring of Google's style."""
    texts: dict[str, str] = {}
    name = ""
    for line in document.partition("Attributes:\n")[2].splitlines():
        if found := re.fullmatch(r" {8}(\w+): (.*)", line):
            name, texts[found[1]] = found[1], found[2]
        elif name and line.strip():
            texts[name] += " " + line.strip()
    return {name: text.replace("``", "`") for name, text in texts.items()}


def _default(field: dataclasses.Field[Any]) -> str:
    if field.name == "islands":
        return '`"2x1x4"`'
    value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def pages() -> dict[Path, str]:
    """Returns the whole text of each page that has such parts."""
    text = SETTINGS.read_text()
    before, mark, rest = text.partition(BEGIN)
    if not mark or END not in rest:
        raise SystemExit(f"{SETTINGS} has no place for tables; expected {BEGIN} and {END}")
    after = rest.partition(END)[2]
    return {
        CLI: command_pages(),
        SETTINGS: f"{before}{BEGIN}\n{settings_tables()}{END}{after}",
    }


def main() -> int:
    """Writes the pages, or compares them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    stale = [
        path for path, text in pages().items() if not path.exists() or path.read_text() != text
    ]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} differs from the code; try `make reference`")
        else:
            path.write_text(pages()[path])
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
