"""Who starts the hosts."""
