"""Groups that read the partitions of a super stream, each locked by a single active consumer."""
