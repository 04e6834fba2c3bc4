"""How a producer batches, waits and recovers."""

from __future__ import annotations

from dataclasses import dataclass

from sharding.errors import InvalidInput
from sharding.stream.formats import codecs
from sharding.stream.formats.codecs import Compression
from sharding.stream.producing.entries import MAX_ENTRY_BYTES, MAX_RECORDS
from sharding.stream.protocol import MAX_REFERENCE_BYTES

# What an entry costs the broker is what small messages cost: larger ones gain nothing by sharing.
_ENTRY_MESSAGES = 250
_ENTRY_BYTES = 32 * 1024


@dataclass(frozen=True)
class ProducerOptions:
    """The bounds hold for each partition of a super stream, so that one that is away does not hold
    up the others."""

    name: str | None = None
    """Makes the broker drop what it has already, by publishing id, so that messages can be sent
    again after a lost connection. Each partition has ids of its own. Two producers must not use
    one name on one stream at the same time, and a stream remembers 255 names."""
    batch_messages: int = 1_000
    """Written as soon as so many messages are waiting …"""
    batch_bytes: int = 256 * 1024
    """… or so many bytes …"""
    linger: float = 0.005
    """… or when the first of them has waited so many seconds. 0: each message at once."""
    max_unconfirmed: int = 50_000
    """Messages held until the broker has settled them; `send` waits while there are so many."""
    max_unconfirmed_bytes: int = 64 * 1024 * 1024
    """The same in bytes; the one message that crosses the bound is still taken."""
    send_timeout: float = 10
    """How long `send` waits for room, and a write for a broker that does not read."""
    confirm_timeout: float = 30
    """A message not settled so many seconds after it was written makes the producer connect anew:
    a named one sends again, an unnamed one reports it as unknown."""
    open_timeout: float = 30
    """For connecting to every partition's leader when the producer is made."""
    recovery_timeout: float = 120
    """A partition that can't be published to for so long fails for good."""
    compression: Compression = Compression.NONE
    """Of sub-entry batches; needs `sub_entry_messages`."""
    sub_entry_messages: int | None = None
    """Put so many messages into one entry, which the broker stores, confirms and deduplicates as
    one: under the publishing id of its last message. 0: an entry for each message. None: 250, of
    32 KiB at most together, where no message needs an entry of its own, so without a name and
    without filter values; twice the messages a second. Every consumer unpacks such entries, one
    over AMQP too."""
    filtering: bool = False
    """Messages may have filter values. Needs RabbitMQ 3.13."""

    def __post_init__(self) -> None:
        if self.name is not None:
            length = len(self.name.encode())
            if not 0 < length <= MAX_REFERENCE_BYTES:
                raise InvalidInput(
                    "name", f"must have 1 to {MAX_REFERENCE_BYTES} bytes in UTF-8", self.name
                )
        for field in ("batch_messages", "batch_bytes", "max_unconfirmed", "max_unconfirmed_bytes"):
            if getattr(self, field) < 1:
                raise InvalidInput(field, "must be at least 1", getattr(self, field))
        for field in ("send_timeout", "confirm_timeout", "open_timeout", "recovery_timeout"):
            if not getattr(self, field) > 0:
                raise InvalidInput(field, "must be more than 0 seconds", getattr(self, field))
        if not self.linger >= 0:
            raise InvalidInput("linger", "must be 0 seconds or more", self.linger)
        self._check_sub_entries()

    @property
    def entry_messages(self) -> int:
        """How many messages may share an entry; 0 if none may."""
        if self.sub_entry_messages is not None:
            return self.sub_entry_messages
        return 0 if self.name is not None or self.filtering else _ENTRY_MESSAGES

    @property
    def entry_bytes(self) -> int:
        """How many bytes of messages may share an entry, if a frame has room for them."""
        return _ENTRY_BYTES if self.sub_entry_messages is None else MAX_ENTRY_BYTES

    def _check_sub_entries(self) -> None:
        if not 0 <= self.entry_messages <= MAX_RECORDS:
            raise InvalidInput(
                "sub_entry_messages", f"must be 0 to {MAX_RECORDS}", self.sub_entry_messages
            )
        if self.compression is not Compression.NONE and not self.entry_messages:
            raise InvalidInput(
                "compression", "needs sub_entry_messages, since batches are compressed", 0
            )
        if self.filtering and self.sub_entry_messages:
            raise InvalidInput(
                "filtering",
                "can't be combined with sub_entry_messages: a batch has no filter value",
                self.sub_entry_messages,
            )
        codecs.require(self.compression)
