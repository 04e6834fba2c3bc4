"""Keys of messages: the bytes that stand before a body that has one, made cheaply."""

from __future__ import annotations

from functools import lru_cache

from sharding.errors import InvalidInput
from sharding.hashing import Key
from sharding.stream.message import encode_data, encode_message

_KEYS_REMEMBERED = 4_096
_NO_BODY = encode_data(b"")


def text_of(key: Key) -> str:
    """A key as the annotation holds it, which is text."""
    if isinstance(key, str):
        return key
    try:
        return bytes(key).decode()
    except UnicodeDecodeError:
        raise InvalidInput("key", "must be UTF-8, to be written with the message", key) from None


def with_key(key: Key, body: bytes) -> bytes:
    """A message of `body` with the annotation `x-routing-key`, as `encode_message` writes it."""
    return _annotation(key if isinstance(key, str) else text_of(key)) + encode_data(body)


@lru_cache(_KEYS_REMEMBERED)
def _annotation(key: str) -> bytes:
    return encode_message(b"", key=key).removesuffix(_NO_BODY)
