"""Which commands a broker understands, in which versions.

Brokers since 3.11 are asked (ExchangeCommandVersions). 3.10 does not know that question, and closes
the connection on a key it does not know: there, its version decides. Each side lists what it can
be sent, so what only brokers send is not in their list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sharding.stream.protocol.answers import VersionRange
from sharding.stream.protocol.constants import Key

FIRST_THAT_TELLS = (3, 11)

# Deliver is taken in version 1: version 2 only adds the id of the last committed chunk, which
# nothing here needs.
OURS = tuple(
    VersionRange(key, 1, 1)
    for key in (
        Key.PUBLISH_CONFIRM,
        Key.PUBLISH_ERROR,
        Key.DELIVER,
        Key.METADATA_UPDATE,
        Key.CLOSE,
        Key.HEARTBEAT,
        Key.CONSUMER_UPDATE,
    )
)
_KNOWN_TO_ALL = tuple(VersionRange(key, 1, 1) for key in Key if key <= Key.PARTITIONS)
_KNOWN_TO_THOSE_THAT_TELL = (
    *_KNOWN_TO_ALL,
    VersionRange(Key.CONSUMER_UPDATE, 1, 1),
    VersionRange(Key.EXCHANGE_COMMAND_VERSIONS, 1, 1),
)


class CommandVersions:
    """What a broker speaks."""

    def __init__(self, told: Iterable[VersionRange] | None = None) -> None:
        """`told` is what the broker answered, or None if it can't be asked."""
        known = _KNOWN_TO_ALL if told is None else (*_KNOWN_TO_THOSE_THAT_TELL, *told)
        self._known = {one.key: one for one in known}

    def supports(self, key: Key, version: int = 1) -> bool:
        known = self._known.get(key)
        return known is not None and known.lowest <= version <= known.highest


def parse_version(text: str) -> tuple[int, ...]:
    """The numbers at the front of a version; none if there are none.

    >>> parse_version("4.0.5"), parse_version("4.3.0-beta.1+12"), parse_version("unknown")
    ((4, 0, 5), (4, 3, 0), ())
    """
    found = re.match(r"\d{1,9}(\.\d{1,9}){0,3}", text, re.ASCII)
    return tuple(map(int, found[0].split("."))) if found else ()
