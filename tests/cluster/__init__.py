"""Real RabbitMQ clusters on this machine, for tests, benchmarks, examples and the demo."""

from tests.cluster.cluster import Cluster, Node
from tests.cluster.haproxy import Balancer
from tests.cluster.nodes import Endpoint, NotOurs
from tests.cluster.sources import DEFAULT_VERSION
from tests.cluster.waiting import wait_until

__all__ = ["DEFAULT_VERSION", "Balancer", "Cluster", "Endpoint", "Node", "NotOurs", "wait_until"]
