"""Where commands write what is not their result, and whether they can write the rest."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from fairway.errors import ConfigError

terminal = Console(stderr=True)

PICTURES = (".png", ".svg", ".pdf")


def progress(*columns: ProgressColumn) -> Progress:
    """What is being done, these columns, and for how long; gone when it is over."""
    return Progress(
        TextColumn("{task.description}"),
        *columns,
        TimeElapsedColumn(),
        console=terminal,
        transient=True,
        disable=not terminal.is_terminal,
    )


def check_output(path: Path | None, kinds: tuple[str, ...]) -> None:
    """Before long work, not behind it."""
    if path is None:
        return
    if path.suffix.lower() not in kinds:
        raise ConfigError(f"cannot write {path}; expected a name that ends in {', '.join(kinds)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
