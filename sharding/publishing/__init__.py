"""Publishing in volume: messages to the nodes of their shards, each confirmed or accounted for.

`ShardedPublisher` is the face. `ledger` and `addressing` are pure; `io_thread` and `node_link` do
the I/O. It may import `cluster`, `amqp`, `maps`, `outcomes`, `metrics.names`, `backoff` and
`errors`.
"""
