"""What runs on each host: the executor over jaxlib."""
