"""From a key to the position of its shard, in constant time.

A key has a slot, `murmur3(key) mod S`; a table says which shard owns the slot.

* The hash is murmur3 x86 32-bit, seed 104729, over the key's UTF-8 bytes, read as an unsigned
  number, as in the Java, .NET, Go and Rust stream clients: for streams because they must agree, for
  queue shards because one hash is enough.
* A super stream has as many slots as partitions and each partition owns its own: bit for bit what
  the other stream clients do.
* A queue has `QUEUE_SLOTS` slots, dealt out by rendezvous hashing: for each slot every shard draws
  a weight from its own name, and the greatest weight owns the slot. A shard that joins wins about
  1/(n+1) of the slots, from every other shard alike, and nothing else moves. A shard that leaves
  gives away only its own. The order in which the shards are listed plays no part.

The weights of a shard are SHAKE-128 of its name (UTF-8), cut into `QUEUE_SLOTS` weights of four
bytes that are compared as big-endian numbers; of equal weights the smallest name (by its UTF-8
bytes) wins. SHAKE because it is standardised, gives any length in one call, and runs in C: the
table for 1,000 shards needs 16 million weights. Committed vectors pin the algorithm: to change it
is to move the keys of every running system.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import shake_128
from typing import TypeAlias

import mmh3

from sharding.errors import InvalidInput
from sharding.maps.json_fields import is_whole
from sharding.maps.naming import check_name

Key: TypeAlias = str | bytes | bytearray | memoryview
"""A routing key: text, which counts as its UTF-8 form, or bytes."""

SEED = 104729
"""That of all RabbitMQ stream clients."""


def murmur3(key: Key) -> int:
    """The unsigned 32-bit hash of `key`.

    >>> murmur3("hello") == murmur3(b"hello") == 1321743225
    True
    """
    # mmh3 would hash text by itself, but by the interpreter's own cached UTF-8 form; an explicit
    # encoding gives one place where a lone surrogate is refused. It takes no writable buffers.
    return mmh3.hash(key if isinstance(key, bytes) else key_bytes(key), SEED, signed=False)


def key_bytes(key: Key) -> bytes:
    """A key as it is hashed and sent. What a key may be is decided here, for queues, streams and
    Spark: a number would be that many zero bytes to Python, and another key to every other client.
    """
    if isinstance(key, bytes | bytearray | memoryview):
        return bytes(key)
    if not isinstance(key, str):
        raise InvalidInput("key", "must be text or bytes", key)
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise InvalidInput("key", "must be text that UTF-8 can express", key) from None


def key_text(key: Key) -> str:
    """A key as the annotation `x-routing-key` of a stream's message holds it, which is text."""
    try:
        return key_bytes(key).decode()
    except UnicodeDecodeError:
        raise InvalidInput("key", "must be UTF-8, to be written with the message", key) from None


QUEUE_SLOTS = 16_384
MAX_SHARDS = 4_096
"""Building a table takes 64 KiB of weights for each shard; nobody means to ask for gigabytes."""
_WEIGHT = 4


@dataclass(frozen=True, slots=True)
class SlotTable:
    """`owners[slot]` is the position of the owning shard in the shard list."""

    owners: Sequence[int]

    @classmethod
    def identity(cls, shards: int) -> SlotTable:
        """Each shard owns the slot of its own number, as the partitions of a super stream do."""
        _check_count(shards)
        return cls(range(shards))

    @classmethod
    def rendezvous(cls, names: Sequence[str]) -> SlotTable:
        """Deal the slots of a queue out to the shards of these names."""
        _check_count(len(names))
        for name in names:
            check_name("shard", name)
        if len(set(names)) != len(names):
            raise InvalidInput("shards", "must have different names", sorted(names))
        position = {name: index for index, name in enumerate(names)}
        ranked = sorted(names, key=str.encode)
        return cls(array("H", [position[ranked[rank]] for rank in _winners(ranked)]))

    def slot_of(self, key: Key) -> int:
        return murmur3(key) % len(self.owners)

    def shard_of(self, key: Key) -> int:
        return self.owners[murmur3(key) % len(self.owners)]


def _winners(names: Sequence[str]) -> array[int]:
    """For each slot the position in `names` of the greatest weight, the first one if several.

    Comparing every weight as a number would cost seconds for 1,000 shards. Almost always the first
    byte of a weight decides, so the first bytes of all shards for one slot are laid side by side
    and searched with `in` and `find`, which are memchr underneath; whole weights are compared only
    among the few that share the greatest first byte.
    """
    weights = [shake_128(name.encode()).digest(_WEIGHT * QUEUE_SLOTS) for name in names]
    first_bytes = b"".join([row[::_WEIGHT] for row in weights])
    winners = array("H")
    for slot in range(QUEUE_SLOTS):
        column = first_bytes[slot::QUEUE_SLOTS]
        greatest = _greatest(column)
        cell = slice(slot * _WEIGHT, (slot + 1) * _WEIGHT)
        winner = contender = column.find(greatest)
        while (contender := column.find(greatest, contender + 1)) >= 0:
            if weights[contender][cell] > weights[winner][cell]:
                winner = contender
        winners.append(winner)
    return winners


def _greatest(column: bytes) -> int:
    # Among many, 255 or a little less is there and soon found. Among few the search is long (137 ms
    # for the table of one shard, measured), and `max` takes a fifth of that.
    if len(column) < 16:
        return max(column)
    greatest = 0xFF
    while greatest not in column:
        greatest -= 1
    return greatest


def _check_count(shards: int) -> None:
    if not is_whole(shards) or not 1 <= shards <= MAX_SHARDS:
        raise InvalidInput("shards", f"must be 1 to {MAX_SHARDS} in number", shards)
