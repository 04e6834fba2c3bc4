"""From messages to confirmed entries, and what became of each."""
