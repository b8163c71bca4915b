"""What a run was like: timeline and summary."""
