"""Where a subscription begins, and whether the broker can do what is asked of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharding.stream.consuming.consumer_options import ConsumerOptions, offset_spec
from sharding.stream.consuming.offset_store import stored_offset
from sharding.stream.consuming.probe import first_and_last
from sharding.stream.errors import NotSupported
from sharding.stream.protocol import Key, OffsetType

if TYPE_CHECKING:
    from sharding.stream.network.client import StreamClient


def start_offset(
    client: StreamClient, stream: str, options: ConsumerOptions, timeout: float
) -> int | None:
    """The offset to begin at; None if only the broker can tell (first, and a time).

    "next" and "last" mean another place at every moment. Were they sent as they are, what is stored
    while a first connection is lost would be skipped; so they are turned into an offset once.
    """
    if options.name is not None:
        stored = stored_offset(client, options.name, stream, timeout)
        if stored is not None:
            return stored + 1
    spec = offset_spec(options.offset)
    if spec.kind is OffsetType.OFFSET:
        return spec.value
    if spec.kind not in (OffsetType.NEXT, OffsetType.LAST):
        return None
    ends = first_and_last(client, stream, timeout)
    if ends is None:
        return 0
    return ends.last + 1 if spec.kind is OffsetType.NEXT else ends.last_chunk


def check_abilities(client: StreamClient, options: ConsumerOptions) -> None:
    """Raises `NotSupported` for a broker that is too old."""
    version = ".".join(map(str, client.server_version))
    if options.single_active and not client.supports(Key.CONSUMER_UPDATE):
        raise NotSupported(f"single_active needs RabbitMQ 3.11 or later, not {version}")
    if options.filter_values and not client.supports(Key.PUBLISH, 2):
        raise NotSupported(f"filter_values need RabbitMQ 3.13 or later, not {version}")
