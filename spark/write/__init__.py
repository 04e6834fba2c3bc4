"""Writing to streams and queue shards: rows as messages, where they go, and every confirm."""
