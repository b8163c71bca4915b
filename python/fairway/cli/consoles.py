"""Where commands write what is not their result."""

from rich.console import Console

terminal = Console(stderr=True)
