"""A module that cannot be imported."""

raise RuntimeError("no data on this machine")
