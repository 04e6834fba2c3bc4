"""Groups that read the shards of a logical queue, each locked by an exclusive consumer."""
