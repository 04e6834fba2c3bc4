"""The messages of chunks, one by one, as a group's handlers see them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from sharding.stream.consuming.inbox import Taken
from sharding.stream.errors import ProtocolError
from sharding.stream.formats.chunk import messages, parse_header
from sharding.stream.formats.message import Message, decode_message
from sharding.stream.protocol import Limits


def messages_of(taken: Taken, limits: Limits) -> Iterator[Message]:
    """What was taken, from its first wanted offset on.

    A message that is not AMQP 1.0 has its bytes for a body: it must not stop the whole partition.
    """
    stream = taken.lane.stream
    for chunk in taken.chunks:
        timestamp = parse_header(chunk).timestamp
        for offset, raw in messages(chunk, limits):
            if offset < taken.first:
                continue
            try:
                yield decode_message(raw, offset=offset, timestamp=timestamp, stream=stream)
            except ProtocolError:
                yield Message(bytes(raw), offset=offset, timestamp=timestamp, stream=stream)
