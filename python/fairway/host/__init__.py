"""The host process: the executor over jaxlib."""
