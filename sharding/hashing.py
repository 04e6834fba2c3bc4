"""The hash behind every route: murmur3, 32 bits, the seed all RabbitMQ stream clients use.

The Java, .NET, Go and Rust stream clients hash a key with murmur3 x86 32-bit, seed 104729, over the
key's UTF-8 bytes, and read the result as an unsigned number. So does Warren: for streams because
they must agree, for queue shards because one hash is enough. Changing it would move every key.
"""

from __future__ import annotations

from typing import TypeAlias

import mmh3

from sharding.errors import InvalidInput

Key: TypeAlias = str | bytes | bytearray | memoryview
"""A routing key: text is hashed as UTF-8, bytes as they are."""

SEED = 104729


def murmur3(key: Key) -> int:
    """The unsigned 32-bit hash of `key`.

    >>> murmur3("hello") == murmur3(b"hello") == 1321743225
    True
    """
    # mmh3 would hash text by itself, but by the interpreter's own cached UTF-8 form; an explicit
    # encoding gives one place where a lone surrogate is refused. It takes no writable buffers.
    return mmh3.hash(key if isinstance(key, bytes) else _to_bytes(key), SEED, signed=False)


def _to_bytes(key: str | bytearray | memoryview) -> bytes:
    if isinstance(key, bytearray | memoryview):
        return bytes(key)
    if not isinstance(key, str):
        raise InvalidInput("key", "must be str, bytes, bytearray or memoryview", key)
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise InvalidInput("key", "must be text that UTF-8 can express", key) from None
