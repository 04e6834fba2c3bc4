"""Where reading a partition begins, and whether it still is the stream that was read before.

The rules:

1. *What is stored counts, and is asked for when the turn comes*: of single active consumers another
   one may have stored an offset a moment ago, and nobody moves it once the turn is ours. A consumer
   goes on after it, or after what it has handed out itself if that is further.
2. *"next" and "last" are fixed once.* They mean another place at every moment, so the first one to
   ask turns them into an offset. A plain consumer keeps it through lost connections. A single
   active one stores it, as if all before it were dealt with, so that whoever takes over before
   anything else is stored begins there too. Where the stream is empty there is nothing before; then
   the place, 0, is stored under a name of its own (`place_name`). The leader is asked for it, since
   a replica may not have yet what was confirmed long ago; while the leader is away, the replica's
   word has to do: it may name a place that is too early, never one that is too late.
3. *A stream deleted and made again is another one*, whatever its length, and the old offsets mean
   nothing in it. Nothing in the protocol says so. But chunks are stored once and never change, so
   one that was read is a witness: where another chunk has its offset, or the leader's log ends
   before it, the stream was replaced. One that retention deleted says nothing; that what came after
   it is gone too is noticed as a gap. A witness makes room only for one of the same stream, which
   is why the old one is asked for after the new one.
4. *Who has begun does not begin again.* The broker keeps offsets in the stream itself: they go with
   it when it is deleted, and when retention has deleted all that they name. Who finds none would
   take the end of the stream for its place, or an offset that was meant for another one, and skip
   what is before it, or not notice what is gone. So it is noted that an offset was stored; where
   one was, and none is there, all is read, and what is missing before that counts as lost. A
   consumer notes it in the stream itself, under a name and with an offset that retention leaves
   alone (`stored_name`); a group elsewhere (`begun_name`), as a note that outlives the stream.
5. *Who stores by itself stores where it begins*, if that is "next" or "last": else all that came
   before its first stored offset would be left out by the next one of its name.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sharding.errors import OutcomeUnknown, ShardUnavailable, Unreachable, WarrenError
from sharding.stream.connections.access import Access
from sharding.stream.consumer.offset_store import store_offset_surely, stored_offset
from sharding.stream.consumer.probe import (
    Ends,
    at_leader,
    chunk_at,
    first_and_last,
    leader_ends,
)
from sharding.stream.errors import StreamReplaced
from sharding.stream.messages.chunk import ChunkHeader
from sharding.stream.options import ConsumerOptions, offset_spec
from sharding.stream.protocol.commands import StreamStats
from sharding.stream.protocol.constants import MAX_REFERENCE_BYTES, Key, OffsetType

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient

logger = logging.getLogger("warren.stream.consumer")

_MOVING = (OffsetType.NEXT, OffsetType.LAST)
LEAVES_OUT = (*_MOVING, OffsetType.OFFSET)
"""Places that were meant for one stream: in another one they leave out what nobody has read."""
_LEADER_PATIENCE = 2.0
_STORE_PATIENCE = 2.0
"""3.10 does not say that a user may not store offsets; it leaves them away."""


def start_offset(
    client: StreamClient, stream: str, options: ConsumerOptions, access: Access, timeout: float
) -> int | None:
    """The offset to begin at; None if only the broker can tell (first, and a time)."""
    name = options.name
    if name is not None:
        stored = stored_offset(client, name, stream, timeout)
        if stored is not None:
            return stored + 1
        if was_stored(client, name, stream, timeout):
            return 0
    place = _place(client, stream, options, access, timeout)
    if name is not None and place is not None and options.stores_by_itself and is_moving(options):
        deadline = access.clock() + min(timeout, _STORE_PATIENCE)
        try:
            if place:
                store_offset_surely(client, name, stream, place - 1, deadline, access.clock)
            note_stored(client, name, stream, deadline, access.clock)
        except WarrenError as error:
            logger.warning("%s: where %r begins is not stored: %s", stream, name, error)
    return place


def was_stored(client: StreamClient, name: str, stream: str, timeout: float) -> bool:
    """Whether consumers of this name had an offset in the stream before."""
    return stored_offset(client, stored_name(name), stream, timeout) is not None


def note_stored(
    client: StreamClient, name: str, stream: str, deadline: float, clock: Callable[[], float]
) -> None:
    """Note that they have one, or begin with the first message of a stream that was empty."""
    if not was_stored(client, name, stream, max(0.0, deadline - clock())):
        store_offset_surely(client, stored_name(name), stream, BEGUN, deadline, clock)


def turn_offset(
    client: StreamClient,
    stream: str,
    options: ConsumerOptions,
    own: int | None,
    access: Access,
    timeout: float,
    has_begun: Callable[[], bool] = lambda: False,
) -> int | None:
    """The same for the one whose turn it is now; it has handed out all before `own` itself.

    `has_begun` is asked where nothing is stored: whether consumers of this name had a place before.
    """
    name = str(options.name)
    stored = stored_offset(client, name, stream, timeout)
    known = [place for place in (own, None if stored is None else stored + 1) if place is not None]
    if known:
        return max(known)
    if not is_moving(options):
        # The place may be meant for a stream that was replaced, and what is the first message now
        # need not be the next one.
        return 0 if has_begun() else _place(client, stream, options, access, timeout)
    fixed = stored_offset(client, place_name(name), stream, timeout)
    if fixed is not None:
        return fixed
    if has_begun():
        return 0
    place = _place(client, stream, options, access, timeout) or 0
    under, offset = (name, place - 1) if place else (place_name(name), place)
    deadline = access.clock() + timeout
    store_offset_surely(client, under, stream, offset, deadline, access.clock)
    return place


def place_name(name: str) -> str:
    """Under which it is stored that the consumers of this name begin at offset 0.

    >>> place_name("billing")
    'warren.begins billing'
    """
    return _reference("warren.begins", name)


def stored_name(name: str) -> str:
    """Under which it is noted in a stream that consumers of this name stored an offset there.

    >>> stored_name("billing")
    'warren.stored billing'
    """
    return _reference("warren.stored", name)


def begun_name(group: str, stream: str) -> str:
    """Under which it is noted, in the stream of a group's workers, that it has begun on another.

    >>> begun_name("billing", "invoices-0")
    'warren.begun invoices-0 billing'
    """
    return _reference("warren.begun", f"{stream} {group}")


BEGUN = 2**62
"""What is stored there: the broker drops offsets that are before the first one of the stream."""


def _reference(prefix: str, name: str) -> str:
    whole = f"{prefix} {name}"
    if len(whole.encode()) <= MAX_REFERENCE_BYTES:
        return whole
    return f"{prefix} {hashlib.sha256(name.encode()).hexdigest()}"


def is_moving(options: ConsumerOptions) -> bool:
    """Whether the place that is asked for is another one at every moment."""
    return offset_spec(options.offset).kind in _MOVING


def _place(
    client: StreamClient, stream: str, options: ConsumerOptions, access: Access, timeout: float
) -> int | None:
    spec = offset_spec(options.offset)
    if spec.kind is OffsetType.OFFSET:
        return spec.value
    if spec.kind not in _MOVING:
        return None
    known = [first_and_last(client, stream, timeout), _leader_ends(access, stream, timeout)]
    # A leader that was elected a moment ago may know less than the replica (3.10 does not say so).
    ends = max((each for each in known if each is not None), key=lambda e: e.last, default=None)
    if ends is None:
        return 0
    return ends.last + 1 if spec.kind is OffsetType.NEXT else ends.last_chunk


def _leader_ends(access: Access, stream: str, timeout: float) -> Ends | None:
    """None also while the leader is away."""
    try:
        return leader_ends(access, stream, min(timeout, _LEADER_PATIENCE))
    except (Unreachable, ShardUnavailable, OutcomeUnknown) as error:
        logger.info("%s: the leader does not say where it ends: %s", stream, error)
        access.routes.suspect(stream, str(error))
        return None


def witness_before(
    client: StreamClient,
    stream: str,
    position: int | None,
    known: ChunkHeader | None,
    access: Access,
    timeout: float,
) -> ChunkHeader | None:
    """The chunk with the last message before `position`, or what was `known` if there is none.

    Raises `StreamReplaced` if it belongs to another stream than the one that was known: taken for a
    witness, it would hide for good that the stream was made again.
    """
    if not position:
        return known
    found = chunk_at(client, stream, position - 1, timeout)
    if found is None:  # this replica may be behind
        with at_leader(access, stream, timeout) as leader:
            found = chunk_at(leader, stream, position - 1, timeout)
    if found is None or found.first_offset >= position:
        return known
    if known is not None and found != known:
        # Asked after the other: who is still there now was there then.
        check_same(client, stream, known, access, timeout)
    return found


def check_same(
    client: StreamClient, stream: str, witness: ChunkHeader, access: Access, timeout: float
) -> None:
    """Raises `StreamReplaced` if the stream is not the one that `witness` was read from."""
    found = chunk_at(client, stream, witness.first_offset, timeout)
    if found is None:  # this replica may be behind
        with at_leader(access, stream, timeout) as leader:
            found = chunk_at(leader, stream, witness.first_offset, timeout)
            if found is None and not _is_shorter(leader, stream, witness, timeout):
                # A new leader does not know yet what the others have, and delivers none of it.
                raise Unreachable(f"{stream!r} does not deliver offset {witness.first_offset} yet")
    if found is None or (found != witness and found.first_offset <= witness.first_offset):
        raise StreamReplaced(stream, witness.end_offset)


def _is_shorter(leader: StreamClient, stream: str, witness: ChunkHeader, timeout: float) -> bool:
    """Whether the leader's log, delivered or not, ends before the witness."""
    if not leader.supports(Key.STREAM_STATS):
        return False
    last = leader.call(StreamStats(stream), timeout=timeout).stats.get("last_chunk_id")
    return last is not None and last < witness.first_offset
