"""Makes AMQP 1.0 messages of what an application sends, cheaply where there is only a key."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from sharding.errors import InvalidInput
from sharding.maps.slots import Key
from sharding.stream.formats.amqp_types import AmqpValue
from sharding.stream.formats.message import encode_data, encode_message
from sharding.stream.formats.properties import Properties

Body = bytes | bytearray | memoryview

_KEYS_REMEMBERED = 4_096
_NO_BODY = encode_data(b"")


def encoded(
    body: Body,
    key: Key | None,
    properties: Properties | None,
    application_properties: Mapping[str, AmqpValue] | None,
) -> tuple[bytes, bool]:
    """The message; or the body as it is, and True, if there is nothing else to write."""
    if not isinstance(body, bytes | bytearray | memoryview):
        raise InvalidInput("body", "must be bytes", body)
    content = bytes(body)
    if properties is None and application_properties is None:
        return (content, True) if key is None else (with_key(key, content), False)
    message = encode_message(
        content,
        key=None if key is None else text_of(key),
        properties=properties,
        application_properties=application_properties,
    )
    return message, False


def text_of(key: Key) -> str:
    """A key as the annotation `x-routing-key` holds it, which is text."""
    if isinstance(key, str):
        return key
    try:
        return bytes(key).decode()
    except UnicodeDecodeError:
        raise InvalidInput("key", "must be UTF-8, to be written with the message", key) from None


def with_key(key: Key, body: bytes) -> bytes:
    """A message of a key and a body, byte for byte as `encode_message` writes it."""
    return _annotation(key if isinstance(key, str) else text_of(key)) + encode_data(body)


@lru_cache(_KEYS_REMEMBERED)
def _annotation(key: str) -> bytes:
    return encode_message(b"", key=key).removesuffix(_NO_BODY)
