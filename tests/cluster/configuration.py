"""The rabbitmq.conf of a node."""

from __future__ import annotations

import string

from tests.cluster.folders import Record
from tests.cluster.nodes import Endpoint


def configuration(record: Record, endpoint: Endpoint, bind: str, listen: dict[str, int]) -> str:
    """The node's rabbitmq.conf; `bind` and `listen` are what it sees from inside a container."""
    members = [node["name"] for node in record.nodes]
    extra = string.Template(record.config).substitute(address=endpoint.address, **listen)
    lines = [
        f"listeners.tcp.1 = {bind}:{listen['amqp']}",
        f"management.tcp.ip = {bind}",
        f"management.tcp.port = {listen['management']}",
        "loopback_users = none",
        "cluster_formation.peer_discovery_backend = classic_config",
        *(
            f"cluster_formation.classic_config.nodes.{number} = {name}"
            for number, name in enumerate(members, start=1)
        ),
        # A node that is cut off pauses and joins again by itself; without it, the two sides of a
        # healed cut would stay apart until somebody restarts one of them.
        "cluster_partition_handling = pause_minority",
        "collect_statistics_interval = 1000",
        "disk_free_limit.absolute = 50MB",
        "log.file.level = info",
    ]
    if "rabbitmq_stream" in record.plugins:
        lines += [
            f"stream.listeners.tcp.1 = {bind}:{listen['stream']}",
            f"stream.advertised_host = {endpoint.address}",
            f"stream.advertised_port = {endpoint.ports['stream']}",
        ]
    return "\n".join([*lines, extra, ""])
