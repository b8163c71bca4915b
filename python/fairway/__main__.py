"""``python -m fairway`` is ``fairway``."""

from fairway.cli import main

main()
