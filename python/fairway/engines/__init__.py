"""Engines that start host processes."""
