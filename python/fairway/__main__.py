"""``python -m fairway`` runs the command line, like ``fairway``."""

from fairway.entry import main

main()
