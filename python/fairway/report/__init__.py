"""Reports of a run: timeline and summary."""
