"""Whatever a message's properties are: what is taken apart is put together to the same bytes, can
be read, and is in its dead letter as it was."""

from __future__ import annotations

import contextlib
import struct
from datetime import datetime
from decimal import Decimal

from hypothesis import example, given
from hypothesis import strategies as st

from sharding.amqp.content_header import PROPERTIES, PropertyList
from sharding.amqp.field_table import (
    MAX_DEPTH,
    Malformed,
    fields,
    read_name,
    read_table,
    write_name,
)
from sharding.amqp.received import ReceivedProperties
from sharding.groups.handling.delivery import Dead, Why
from sharding.groups.queues.dead_letter import Letter, dead_letter

FIXED = {
    b"t": 1,
    b"b": 1,
    b"B": 1,
    b"s": 2,
    b"u": 2,
    b"I": 4,
    b"i": 4,
    b"f": 4,
    b"l": 8,
    b"L": 8,
    b"d": 8,
    b"T": 8,
    b"D": 5,
    b"V": 0,
}


def sized(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def short(content: bytes) -> bytes:
    return bytes([len(content)]) + content


names = st.one_of(st.sampled_from([b"CC", b"BCC", b"x-warren-key", b"a"]), st.binary(max_size=12))
simple = st.one_of(
    *(
        st.binary(min_size=size, max_size=size).map(letter.__add__)
        for letter, size in FIXED.items()
    ),
    st.binary(max_size=30).map(lambda text: b"S" + sized(text)),
    st.text(max_size=10).map(lambda text: b"S" + sized(text.encode())),
    st.binary(max_size=30).map(lambda text: b"x" + sized(text)),
)


def tables(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    one = st.tuples(names.map(short), values).map(b"".join)
    return st.lists(one, max_size=5).map(b"".join)


values = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda each: b"A" + sized(b"".join(each))),
        tables(inner).map(lambda table: b"F" + sized(table)),
    ),
    max_leaves=12,
)


@st.composite
def property_lists(draw: st.DrawFn) -> bytes:
    """Properties as a broker may deliver them: any bytes in any place, the two odd flags too."""
    flags = draw(st.integers(0, 2**16 - 1))
    content = b""
    for place, name in enumerate(PROPERTIES):
        if flags & 1 << (15 - place):
            if name == "headers":
                content += sized(draw(tables(values)))
            elif name in ("delivery_mode", "priority"):
                content += draw(st.binary(min_size=1, max_size=1))
            elif name == "timestamp":
                content += draw(st.binary(min_size=8, max_size=8))
            else:
                content += short(draw(st.binary(max_size=20)))
    return struct.pack(">H", flags) + content


@given(tables(values))
def test_a_table_of_any_types_is_read_and_put_together_to_the_same_bytes(table: bytes) -> None:
    assert b"".join(each.encoded for each in fields(table)) == table
    assert set(read_table(table)) == {read_name(each.name) for each in fields(table)}


@given(property_lists())
def test_any_properties_are_read_and_put_together_to_the_same_bytes(raw: bytes) -> None:
    assert PropertyList.parse(raw).encoded == raw
    received = ReceivedProperties(raw)
    assert received.raw == raw
    for place, name in enumerate(PROPERTIES):
        is_there = raw[:2] and int.from_bytes(raw[:2], "big") & 1 << (15 - place)
        assert (getattr(received, name) is not None) == bool(is_there)


NOT_A_NUMBER = b"\x20\x00" + sized(b"\x01af\x7f\xc0\x00\x00")


@given(property_lists())
@example(NOT_A_NUMBER)
def test_properties_that_nobody_changed_are_sent_as_they_came(raw: bytes) -> None:
    assert b"".join(ReceivedProperties(raw).encode()) == raw


def test_a_changed_header_is_sent_also_where_python_calls_it_equal() -> None:
    received = ReceivedProperties(b"\x20\x00" + sized(b"\x01aI\x00\x00\x00\x01"))
    received.headers = {"a": True}
    assert b"".join(received.encode()).endswith(b"t\x01")


@given(st.binary(max_size=60))
@example(b"\x20\x00" + sized(b"\x01aT"))
@example(b"\x20\x00" + sized(b"\x01aF" + sized(b"\x01bZ")))
@example(b"\x80\x00\x05abc")
@example(b"")
def test_bytes_that_are_no_properties_are_never_more_than_malformed(raw: bytes) -> None:
    with contextlib.suppress(Malformed):
        assert PropertyList.parse(raw).encoded == raw
    assert ReceivedProperties(raw).raw == raw  # and the connection lives on


@given(st.binary(max_size=40))
def test_a_name_keeps_its_bytes_and_no_two_are_alike(name: bytes) -> None:
    assert write_name(read_name(name)) == name


@given(st.text(st.characters()))
def test_any_text_can_be_written(text: str) -> None:
    write_name(text).decode("utf-8", "surrogateescape")


@given(
    property_lists(),
    st.binary(max_size=9),
    st.binary(max_size=9),
    st.text(st.characters()),
    st.integers(150, 700),
)
def test_a_dead_letter_has_the_message_to_the_byte_within_the_frame(
    raw: bytes, body: bytes, key: bytes, error: str, room: int
) -> None:
    dead = Dead(Why.FAILED, error, 5, lambda: None)
    letter = dead_letter(raw, body, read_name(key), "shard", dead, at=0, room=room)
    assert len(letter.properties) <= room
    made = PropertyList.parse(letter.properties)
    ours = {each.name: each.value for each in fields(made.table)}
    assert ours[b"x-warren-reason"] == b"S" + sized(b"failed")
    if letter.enclosed:
        assert letter.body == raw + body
        assert ours[b"x-warren-enclosed"] == b"I" + struct.pack(">i", len(raw))
        return
    assert letter.body == body
    own = PropertyList.parse(raw)
    assert made.unknown_flags == own.unknown_flags
    for name in ("expiration", "user_id"):
        assert name not in made.present
        if name in own.present:
            moved = ours[f"x-warren-{name.replace('_', '-')}".encode()]
            assert moved == b"S" + sized(own.present[name][1:])
    untouched = set(PROPERTIES) - {"expiration", "user_id", "headers"}
    assert {n: v for n, v in made.present.items() if n in untouched} == {
        n: v for n, v in own.present.items() if n in untouched
    }
    expected = [
        each
        for each in fields(own.table)
        if each.name not in (b"CC", b"BCC") and not each.name.startswith(b"x-warren-")
    ]
    assert fields(made.table)[: len(expected)] == expected
    copies = [each.value for each in fields(own.table) if each.name in (b"CC", b"BCC")]
    assert all(copy in made.table for copy in copies)
    if "x-warren-key" not in letter.left_out:
        assert ours[b"x-warren-key"] == b"S" + sized(key)


def enormous() -> tuple[bytes, Letter]:
    raw = b"\x20\x00" + sized(b"\x01aS" + sized(b"x" * 500))
    dead = Dead(Why.TIMEOUT, "é" * 300, 5, lambda: None)
    return raw, dead_letter(raw, b"body", "k", "s", dead, at=0, room=len(raw) + 210)


def test_the_error_is_cut_first_at_a_whole_letter() -> None:
    raw, letter = enormous()
    headers = read_table(PropertyList.parse(letter.properties).table)
    assert headers["x-warren-error"].strip("é") == "…"
    assert headers["x-warren-key"] == "k"
    assert letter.left_out == ("x-warren-error",)
    assert len(raw) + 208 <= len(letter.properties) <= len(raw) + 210


def test_nesting_that_python_could_not_follow_is_shown_as_its_bytes() -> None:
    value = b"V"
    for _ in range(25_000):
        value = b"A" + sized(value)
    shown = read_table(b"\x01a" + value)["a"]
    for _ in range(MAX_DEPTH):
        assert isinstance(shown, list)
        shown = shown[0]
    assert isinstance(shown, bytes)


def test_what_is_shown_of_each_type() -> None:
    def shown(value: bytes) -> object:
        return read_table(b"\x01a" + value)["a"]

    assert shown(b"t\x02") is True
    assert shown(b"b\xff") == -1
    assert shown(b"B\xff") == 255
    assert shown(b"s\xff\xff") == -1
    assert shown(b"u\xff\xff") == 65535
    assert shown(b"I" + b"\xff" * 4) == -1
    assert shown(b"i" + b"\xff" * 4) == 2**32 - 1
    assert shown(b"l" + b"\xff" * 8) == shown(b"L" + b"\xff" * 8) == -1
    assert shown(b"f" + struct.pack(">f", 0.5)) == 0.5
    assert shown(b"d" + struct.pack(">d", 19.99)) == 19.99
    assert shown(b"D\x02" + struct.pack(">i", -1999)) == Decimal("-19.99")
    assert shown(b"D\xff" + struct.pack(">i", 2**31 - 1)) == Decimal("2147483647E-255")
    assert shown(b"S" + sized("é".encode())) == "é"
    assert shown(b"S" + sized(b"\xff")) == b"\xff"
    assert shown(b"x" + sized(b"a")) == b"a"
    assert shown(b"V") is None
    assert shown(b"A" + sized(b"t\x01V")) == [True, None]
    assert shown(b"F" + sized(b"\x01\xff" + b"V")) == {"\udcff": None}
    time = shown(b"T" + struct.pack(">Q", 1_700_000_000))
    assert isinstance(time, datetime)
    assert time.isoformat() == "2023-11-14T22:13:20+00:00"
    assert shown(b"T" + struct.pack(">Q", 1_700_000_000_000)) == 1_700_000_000_000
    assert shown(b"T" + b"\xff" * 8) == 2**64 - 1


def test_received_properties_are_sent_on_as_they_came_unless_they_were_changed() -> None:
    raw = b"\x20\x00" + sized(b"\x01aT" + b"\xff" * 8 + b"\x01bd" + struct.pack(">d", 0.5))
    received = ReceivedProperties(raw)
    assert b"".join(received.encode()) == raw
    received.headers = {"b": "new"}
    assert b"".join(received.encode()) == b"\x20\x00" + sized(b"\x01bS" + sized(b"new"))
