"""What a process knows of the cluster, and the way to change it: the control plane.

`Topology` is its face; behind it the map log is followed, nodes are watched and shards are made. It
may import `amqp`, `maps`, `metrics.names`, `backoff` and `errors`.
"""
