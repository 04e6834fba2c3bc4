"""Brokers that somebody else runs, named in the environment.

    WARREN_AMQP_URLS         amqp://user:password@host:5672/, one for each node, comma-separated
    WARREN_MANAGEMENT_URLS   http://host:15672, in the same order
    WARREN_STREAM_URLS       rabbitmq-stream://host:5552, in the same order

They can be used, not stopped: a test that needs to kill a node is skipped and says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from tests.cluster.nodes import Endpoint, NotOurs


def named() -> bool:
    return bool(os.environ.get("WARREN_AMQP_URLS"))


def endpoints() -> list[Endpoint]:
    amqp, management, stream = (
        [urlsplit(url) for url in os.environ.get(name, "").split(",") if url]
        for name in ("WARREN_AMQP_URLS", "WARREN_MANAGEMENT_URLS", "WARREN_STREAM_URLS")
    )
    if not len(amqp) == len(management) == len(stream):
        raise ValueError(
            "WARREN_AMQP_URLS, WARREN_MANAGEMENT_URLS and WARREN_STREAM_URLS must name as many "
            f"nodes each, found {len(amqp)}, {len(management)} and {len(stream)}"
        )
    return [
        _with_its_name(
            Endpoint(
                name="",
                address=queue_url.hostname or "localhost",
                ports={
                    "amqp": queue_url.port or 5672,
                    "management": http_url.port or 15672,
                    "stream": stream_url.port or 5552,
                },
                user=unquote(queue_url.username or "guest"),
                password=unquote(queue_url.password or "guest"),
            )
        )
        for queue_url, http_url, stream_url in zip(amqp, management, stream, strict=True)
    ]


def _with_its_name(endpoint: Endpoint) -> Endpoint:
    name = endpoint.management.get("overview")["node"]
    return Endpoint(name, endpoint.address, endpoint.ports, endpoint.user, endpoint.password)


@dataclass(frozen=True)
class ForeignNode:
    """Answers every attempt to control the node with `NotOurs`."""

    endpoint: Endpoint

    def start(self) -> None:
        self._refuse()

    def stop(self) -> None:
        self._refuse()

    def kill(self) -> None:
        self._refuse()

    def freeze(self) -> None:
        self._refuse()

    def thaw(self) -> None:
        self._refuse()

    def remove(self) -> None:
        self._refuse()

    def running(self) -> bool:
        return True

    def ctl(self, *arguments: str) -> str:
        raise NotOurs(f"rabbitmqctl {' '.join(arguments)} on {self.endpoint.name}: it is not ours")

    def ask_cluster(self, expression: str) -> str:
        raise NotOurs(f"{expression} on {self.endpoint.name}: it is not ours")

    def has_booted(self) -> bool:
        return True

    def last_words(self) -> str:
        return "its log is not ours to read"

    def _refuse(self) -> None:
        raise NotOurs(f"{self.endpoint.name} is named in the environment; Warren only uses it")
