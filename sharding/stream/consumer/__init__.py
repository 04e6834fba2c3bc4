"""From subscriptions to batches and messages, each once and in order."""
