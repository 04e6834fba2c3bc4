"""Real RabbitMQ clusters on this machine, for tests, benchmarks, examples and the demo.

Its names are looked up when they are asked for: `prepare` runs before anything is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.cluster import Cluster, Node
    from tests.cluster.haproxy import Balancer
    from tests.cluster.nodes import Endpoint, NotOurs
    from tests.cluster.sources import DEFAULT_VERSION
    from tests.cluster.waiting import wait_until

__all__ = ["DEFAULT_VERSION", "Balancer", "Cluster", "Endpoint", "Node", "NotOurs", "wait_until"]

_HOMES = {
    "Balancer": "haproxy",
    "Cluster": "cluster",
    "DEFAULT_VERSION": "sources",
    "Endpoint": "nodes",
    "Node": "cluster",
    "NotOurs": "nodes",
    "wait_until": "waiting",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
