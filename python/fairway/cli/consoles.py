"""Where commands write what is not their result."""

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TextColumn, TimeElapsedColumn

terminal = Console(stderr=True)


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
