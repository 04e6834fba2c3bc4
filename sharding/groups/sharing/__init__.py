"""Who holds which shards of a group: what workers tell each other, and what follows. Pure."""
