"""File formats of other tools: readers and writers. Nothing here starts or joins a run."""
