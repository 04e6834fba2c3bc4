"""The URLs that the doctor is given, as places to try. A place's text never holds a password."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import pika

from sharding.management import Management
from sharding.stream.protocol import Broker
from sharding.stream.uris import StreamUri
from sharding.urls import amqp_parameters, management_api


class Protocol(StrEnum):
    AMQP = "AMQP"
    STREAMS = "streams"
    MANAGEMENT = "management"


@dataclass(frozen=True)
class Place:
    protocol: Protocol
    address: Broker
    user: str
    vhost: str = ""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    way_in: Any = field(default=None, repr=False)
    """What its protocol's client is opened with, credentials included."""

    def __str__(self) -> str:
        return f"{self.protocol} {self.address}"

    @property
    def amqp(self) -> pika.URLParameters:
        assert isinstance(self.way_in, pika.URLParameters)
        return self.way_in

    @property
    def stream(self) -> StreamUri:
        assert isinstance(self.way_in, StreamUri)
        return self.way_in

    @property
    def management(self) -> Management:
        assert isinstance(self.way_in, Management)
        return self.way_in


def places_from(
    amqp: Iterable[str], management: Iterable[str], streams: Iterable[str]
) -> tuple[Place, ...]:
    """Every URL, checked; `InvalidInput` for one that is none.

    Management URLs without a user get that of the first AMQP URL, as for a `Topology`.
    """
    parameters = [amqp_parameters(url) for url in amqp]
    apis = [(url, management_api(url, *parameters[:1])) for url in management]
    return (
        *map(_amqp_place, parameters),
        *(_management_place(url, api) for url, api in apis),
        *(_stream_place(StreamUri.parse(url)) for url in streams),
    )


def _amqp_place(given: pika.URLParameters) -> Place:
    credentials: Any = given.credentials
    return Place(
        Protocol.AMQP,
        Broker(given.host, given.port),
        credentials.username,
        given.virtual_host,
        given.ssl_options.context if given.ssl_options else None,
        given,
    )


def _management_place(url: str, api: Management) -> Place:
    parts = urlsplit(url)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    address = Broker(parts.hostname or "", parts.port or (443 if tls else 80))
    return Place(Protocol.MANAGEMENT, address, api.user, "", tls, api)


def _stream_place(uri: StreamUri) -> Place:
    tls = ssl.create_default_context() if uri.tls else None
    return Place(Protocol.STREAMS, uri.address, uri.user, uri.vhost, tls, uri)
