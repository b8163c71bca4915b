"""Launchers that start host processes."""
