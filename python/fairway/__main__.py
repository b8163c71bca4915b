"""``python -m fairway`` is ``fairway``."""

from fairway.entry import main

main()
