"""Rows as encoded messages, dealt out to the partitions of a super stream by their keys. Pure.

A key's partition and the head of its messages are found once and kept: most keys come again and
again, and to hash and encode a key costs several times as much as all the rest of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from sharding.stream.messages.message import encode_data
from sharding.stream.producer.partitioning import by_hash
from spark.messages import Key, Messages, head_of

_KEYS_KEPT = 16_384
"""A few megabytes."""


@dataclass(slots=True)
class Share:
    """What one partition gets; of filter values as many as of messages, or none."""

    messages: list[bytes] = field(default_factory=list)
    filters: list[str | None] = field(default_factory=list)


class Dealer:
    """Deals by the hash that all stream clients agree on."""

    def __init__(self, partitions: int, keys_kept: int = _KEYS_KEPT) -> None:
        self._partitions = partitions
        self._routes = _Routes(partitions, keys_kept)

    def deal(self, messages: Messages) -> list[Share]:
        """A share for each partition, in order. Every row has a key: `of_batch` sees to that."""
        keys = cast("Sequence[Key]", messages.keys)
        routes = self._routes
        shares = [Share() for _ in range(self._partitions)]
        add = [share.messages.append for share in shares]
        if messages.plain:
            for key, body in zip(keys, messages.bodies, strict=True):
                number, head = routes[key]
                add[number](head + encode_data(body))
        else:
            for key, message in zip(keys, messages.encoded(), strict=True):
                add[routes[key][0]](message)
        if messages.filters is not None:
            for key, value in zip(keys, messages.filters, strict=True):
                shares[routes[key][0]].filters.append(value)
        return shares


class _Routes(dict[Key, tuple[int, bytes]]):
    """By key, the number of its partition and what stands before the body in its messages."""

    def __init__(self, partitions: int, most: int) -> None:
        super().__init__()
        self._partitions = partitions
        self._most = most

    def __missing__(self, key: Key) -> tuple[int, bytes]:
        if len(self) >= self._most:
            self.clear()  # cheaper than to know which are the oldest
        route = self[key] = by_hash(key, self._partitions), head_of(key)
        return route
