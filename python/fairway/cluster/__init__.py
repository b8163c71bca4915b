"""A run: its controller, the launchers of its hosts, and requests of this user's processes."""
