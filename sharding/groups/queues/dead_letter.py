"""A message as a dead letter, in bytes: its own properties as they came, and ours added. Pure.

1. **Nothing is decoded and encoded again.** Fields of ours are appended to the message's own
   table; all else stays to the byte, and nothing that a handler did to its delivery is in it.
2. **What would make the broker do more than store it is moved** into fields of ours, in its bytes:
   `expiration` (a dead letter that expires is lost; the broker's own dead-lettering does the same),
   `user_id` (the broker refuses one that is not the publisher's own), `CC` and `BCC` (it would
   route a copy by each), and a `reply_to` that asks for a direct reply (it refuses that here).
3. **Properties must fit into one frame**, or the broker ends the connection. The message's own come
   first, then ours in the order of `_OURS`; the text of the error is cut to what is left, and what
   finds no room is left out.
4. **Where not even the reason fits, the message is enclosed**: the letter has our fields only, and
   its body is the message's own properties, as AMQP encodes them, and then its own body.
   `x-warren-enclosed` says how many bytes the first part has. So nothing is lost, and no message is
   too odd for a dead letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from sharding.amqp.content_header import PropertyList
from sharding.amqp.field_table import (
    Field,
    Malformed,
    fields,
    long_string,
    whole_number,
    write_name,
)
from sharding.groups.handling.delivery import Dead

DIRECT_REPLY = b"amq.rabbitmq.reply-to"
_OURS = ("reason", "attempts", "time", "shard", "key", "error")
_NAMES = frozenset(f"x-warren-{name}".encode() for name in (*_OURS, "enclosed"))
_ERROR = b"x-warren-error"
_COPIES = (b"CC", b"BCC")
_ELLIPSIS = "…".encode()
_ENCLOSING = PropertyList({"delivery_mode": b"\x02"})


@dataclass(frozen=True, slots=True)
class Letter:
    properties: bytes
    body: bytes
    left_out: tuple[str, ...] = ()
    """Which headers of ours found no room, or not all of it."""
    enclosed: bool = False


def dead_letter(
    raw: bytes, body: bytes, key: str, shard: str, dead: Dead, *, at: float, room: int
) -> Letter:
    """The letter for a message with the properties `raw`, whose own may have `room` bytes."""
    time = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    values = {
        "reason": long_string(write_name(dead.why)),
        "attempts": whole_number(min(dead.attempts, 2**31 - 1)),
        "time": long_string(time.encode()),
        "shard": long_string(write_name(shard)),
        "key": long_string(write_name(key)),
        "error": long_string(dead.error.encode("utf-8", "backslashreplace")),
    }
    ours = [_ours(name, values[name]) for name in _OURS]
    try:
        own = PropertyList.parse(raw)
        table = b"".join(each.encoded for each in _own_fields(own))
    except Malformed:
        return _enclose(raw, body, ours, room)
    own = own.without("expiration", "user_id", *_refused_reply(own))
    taken = len(own.with_table(table).encoded)
    fitting = _fit(ours, room - taken)
    if ours[0] not in fitting:
        return _enclose(raw, body, ours, room)
    return Letter(_with(own, table, fitting), body, _missing(ours, fitting))


def _enclose(raw: bytes, body: bytes, ours: list[Field], room: int) -> Letter:
    enclosed = _ours("enclosed", whole_number(len(raw)))
    fitting = _fit([enclosed, *ours], room - len(_ENCLOSING.with_table(b"").encoded))
    return Letter(_with(_ENCLOSING, b"", fitting), raw + body, _missing(ours, fitting), True)


def _own_fields(own: PropertyList) -> Iterator[Field]:
    """What is the message's own, moved where it has to be; what an earlier letter said is not."""
    moved = [
        _ours(name.replace("_", "-"), long_string(text))
        for name in ("expiration", "user_id", *_refused_reply(own))
        if (text := own.short_string(name)) is not None
    ]
    given = [each for each in fields(own.table) if each.name not in _NAMES]
    moved += [
        _ours(each.name.decode().lower(), each.value) for each in given if each.name in _COPIES
    ]
    replaced = {each.name for each in moved}
    yield from (each for each in given if each.name not in replaced and each.name not in _COPIES)
    yield from moved


def _refused_reply(own: PropertyList) -> tuple[str, ...]:
    return ("reply_to",) if own.short_string("reply_to") == DIRECT_REPLY else ()


def _ours(name: str, value: bytes) -> Field:
    return Field(f"x-warren-{name}".encode(), value)


def _fit(wanted: Iterable[Field], room: int) -> list[Field]:
    """Those that fit, in their order; of the error as much as fits."""
    fitting = []
    for each in wanted:
        shortened = each if each.name != _ERROR else _cut(each, room)
        if shortened is not None and len(shortened.encoded) <= room:
            fitting.append(shortened)
            room -= len(shortened.encoded)
    return fitting


def _cut(error: Field, room: int) -> Field | None:
    """The error with as much of its text as fits, None if that is nothing."""
    text = error.value[5:]
    space = room - (len(error.encoded) - len(text))
    if len(text) <= space:
        return error
    begin = text[: max(0, space - len(_ELLIPSIS))].decode("utf-8", "ignore").encode()
    return Field(error.name, long_string(begin + _ELLIPSIS)) if begin else None


def _missing(wanted: list[Field], fitting: list[Field]) -> tuple[str, ...]:
    return tuple(each.name.decode() for each in wanted if each not in fitting)


def _with(own: PropertyList, table: bytes, ours: Iterable[Field]) -> bytes:
    return own.with_table(table + b"".join(each.encoded for each in ours)).encoded
