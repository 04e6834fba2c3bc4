"""Whatever a chunk holds: one way to read it gives what every other way gives, or none does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from datetime import UTC, datetime

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.stream.arrow.batches import BatchReader
from sharding.stream.errors import ProtocolError
from sharding.stream.messages.amqp_values import Timestamp, as_text
from sharding.stream.messages.chunk import HEADER_SIZE, messages, parse_header
from sharding.stream.messages.codecs import Compression
from sharding.stream.messages.message import (
    Message,
    Properties,
    decode_message,
    encode_data,
    encode_message,
)
from sharding.stream.options import Columns
from sharding.stream.protocol.constants import Limits
from tests.support.chunks import HEADER, TIMESTAMP_MS, SubBatch, chunk, chunk_of

ALL = Columns(key=True, properties=True, application_properties=True)
REQUESTABLE = ("key", "properties", "application_properties")
LIMITS = Limits()
batch_sizes = st.sampled_from([1, 100, 300, 1000]) | st.just(LIMITS.batch_max)
TIMESTAMP = datetime.fromtimestamp(TIMESTAMP_MS / 1000, UTC)

bodies = (
    st.binary(max_size=40)
    | st.just(b"\x00\x53\x75\xa0\x03")  # looks like the start of a message
    | st.just(encode_data(b"abc"))
    | st.integers(240, 270).map(bytes)  # where lengths become wider
)
plain = bodies.map(encode_data)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.integers(230, 300).map(
    lambda size: "k" * size
)
keyed = st.builds(lambda body, key: encode_message(body, key=key), bodies, keys)
rich = st.builds(
    lambda body, key, subject, moment: encode_message(
        body,
        key=key,
        properties=Properties(message_id=7, subject=subject, creation_time=Timestamp(moment)),
        application_properties={"n": 1, "text": subject},
        annotations={"x-exchange": "e"},
    ),
    bodies,
    st.none() | keys,
    st.text(max_size=5),
    st.integers(-62_135_596_800_000, 253_402_300_799_999),
)
over_amqp_0_9_1 = st.builds(  # as RabbitMQ 4 stores what was published over AMQP 0-9-1
    lambda header, body, key, more: (
        header + encode_message(body, annotations={"x-exchange": "", "x-routing-key": key} | more)
    ),
    st.just(b"\x00\x53\x70\xc0\x06\x05\x42\x40\x40\x41\x43") | st.just(b"\x00\x53\x70\x45"),
    bodies,
    keys | st.integers().filter(lambda number: abs(number) < 2**63),
    st.dictionaries(
        st.text(max_size=5),
        st.text(max_size=5)
        | st.integers(0, 1000)
        | st.booleans()
        | st.floats(allow_nan=False)
        | st.none()
        | st.uuids()
        | st.lists(st.integers(0, 5), max_size=2),
        max_size=3,
    ),
)
amqp_value = st.just(b"\x00\x53\x77\xa1\x02hi") | st.just(b"\x00\x53\x77\x41")
two_sections = st.builds(bytes.__add__, plain, plain)
one_message = plain | two_sections | keyed | rich | amqp_value | over_amqp_0_9_1
rows_of_messages = (
    st.lists(plain, min_size=1, max_size=8)
    | st.lists(keyed, min_size=1, max_size=8)
    | st.lists(over_amqp_0_9_1, min_size=1, max_size=8)
    | st.builds(lambda body, count: [encode_data(body)] * count, bodies, st.integers(1, 8))
    | st.lists(one_message, min_size=1, max_size=8)
)
sub_batches = st.builds(SubBatch, rows_of_messages, st.sampled_from(Compression))
entry_lists = (
    rows_of_messages
    | st.lists(sub_batches, min_size=1, max_size=4)
    | st.lists(one_message | sub_batches, max_size=6)
)


@st.composite
def chunk_rows(draw: st.DrawFn) -> list[memoryview]:
    """Some chunks of a stream; between two there may be a gap."""
    offset, chunks = draw(st.integers(0, 2**40)), []
    for entries in draw(st.lists(entry_lists, min_size=1, max_size=4)):
        chunks.append(chunk(entries, offset))
        offset = parse_header(chunks[-1]).end_offset + draw(st.integers(0, 2))
    return chunks


def one_by_one(chunks: list[memoryview]) -> Iterator[Message]:
    for each in chunks:
        for offset, raw in messages(each, LIMITS):
            yield decode_message(raw, offset=offset)


def as_row(message: Message) -> dict[str, object]:
    texts = {name: as_text(value) for name, value in message.application_properties.items()}
    return {
        "offset": message.offset,
        "timestamp": TIMESTAMP,
        "body": message.body,
        "key": message.key,
        "properties": message.properties and _property_row(message.properties),
        "application_properties": list(texts.items()) or None,
    }


def _property_row(properties: Properties) -> dict[str, object]:
    row: dict[str, object] = {}
    for field in fields(properties):
        value = getattr(properties, field.name)
        if isinstance(value, Timestamp):
            row[field.name] = value.to_datetime()
        else:
            row[field.name] = as_text(value) if field.name == "message_id" else value
    return row


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for batch in batches:
        assert batch.num_rows
        batch.validate(full=True)
        rows += batch.to_pylist()
    return rows


@given(chunk_rows(), st.data())
@settings(max_examples=150)
def test_batches_hold_what_a_reader_of_single_messages_finds(
    chunks: list[memoryview], data: st.DataObject
) -> None:
    expected = [as_row(message) for message in one_by_one(chunks)]
    limits = Limits(batch_max=data.draw(batch_sizes, "batch_max"))
    assert rows_of(BatchReader("s", ALL, limits).batches(chunks)) == expected
    reach = parse_header(chunks[0]).first_offset, parse_header(chunks[-1]).end_offset
    first = data.draw(st.integers(max(reach[0] - 1, 0), reach[1] + 1), "first")
    end = data.draw(st.none() | st.integers(first, reach[1] + 1), "end")
    within = [
        row
        for row in expected
        if first <= int(str(row["offset"])) and (end is None or int(str(row["offset"])) < end)
    ]
    assert rows_of(BatchReader("s", ALL, limits).batches(chunks, first, end)) == within
    asked = data.draw(st.builds(Columns, st.booleans(), st.booleans(), st.booleans()), "columns")
    left_out = {name for name in REQUESTABLE if not getattr(asked, name)}
    assert rows_of(BatchReader("s", asked, limits).batches(chunks, first, end)) == [
        {name: row[name] for name in row if name not in left_out} for row in within
    ]


@given(chunk_rows())
@settings(max_examples=50)
def test_raw_batches_hold_messages_as_they_were_published(chunks: list[memoryview]) -> None:
    expected = [(offset, bytes(raw)) for each in chunks for offset, raw in messages(each, LIMITS)]
    rows = rows_of(BatchReader("s", Columns(raw=True)).batches(chunks))
    assert [(row["offset"], row["body"]) for row in rows] == expected


@st.composite
def damaged_chunks(draw: st.DrawFn) -> memoryview:
    """A chunk in which bytes were changed, cut off or added, at random or where it matters."""
    octets = bytearray(chunk(draw(entry_lists), draw(st.integers(0, 1000))))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(octets) - 1))
        octets[place] = draw(st.sampled_from([0x00, 0x01, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    if draw(st.booleans()):
        del octets[draw(st.integers(0, len(octets))) :]
    if draw(st.booleans()):
        octets += draw(st.binary(max_size=6))
    if len(octets) < HEADER_SIZE or draw(st.booleans()):
        return memoryview(octets)
    # The same damage behind a header that agrees with it, or nearly, gets further in.
    _, _, entries, records, *_ = HEADER.unpack_from(octets)
    return chunk_of(
        bytes(octets[HEADER_SIZE:]),
        min(max(0, entries + draw(st.integers(-1, 1))), 2**16 - 1),
        min(max(0, records + draw(st.integers(-1, 1))), 2**32 - 1),
    )


def says_it_is_empty(octets: memoryview) -> bool:
    """A chunk that says so holds nothing that could be wanted, and is not looked into."""
    return len(octets) >= HEADER_SIZE and HEADER.unpack_from(octets)[3] == 0


@given(chunk_rows(), batch_sizes, st.booleans())
@settings(max_examples=100)
def test_a_batch_is_made_of_no_more_than_its_bound_or_of_one_message(
    chunks: list[memoryview], most: int, raw: bool
) -> None:
    columns = Columns(raw=True) if raw else ALL
    sizes = {offset: len(raw) + 4 for each in chunks for offset, raw in messages(each, LIMITS)}
    for batch in BatchReader("s", columns, Limits(batch_max=most)).batches(chunks):
        made_of = sum(sizes[offset] for offset in batch.column("offset").to_pylist())
        assert batch.num_rows == 1 or made_of <= most


@given(chunk_rows(), st.data())
@settings(max_examples=100)
def test_messages_begin_where_they_are_asked_to(
    chunks: list[memoryview], data: st.DataObject
) -> None:
    each = chunks[0]
    header = parse_header(each)
    first = data.draw(st.integers(max(header.first_offset - 1, 0), header.end_offset + 1), "first")
    found = [(offset, bytes(raw)) for offset, raw in messages(each, LIMITS, first)]
    expected = [(offset, bytes(raw)) for offset, raw in messages(each, LIMITS)]
    assert found == [(offset, raw) for offset, raw in expected if offset >= first]


@given(damaged_chunks(), st.booleans(), st.booleans(), batch_sizes)
@settings(max_examples=300)
def test_damage_is_a_protocol_error_and_nothing_else(
    damaged: memoryview, check_crc: bool, raw: bool, most: int
) -> None:
    limits = Limits(uncompressed_max=100_000, batch_max=most)
    reader = BatchReader("s", Columns(raw=True) if raw else ALL, limits, check_crc)
    one_by_one_failed = batch_failed = False
    rows: list[dict[str, object]] = []
    expected: list[dict[str, object]] = []
    try:
        rows = rows_of(reader.batches([damaged]))
    except ProtocolError:
        batch_failed = True
    try:
        for offset, message in messages(damaged, limits):
            row = {"offset": offset, "body": bytes(message)}
            expected.append(row if raw else as_row(decode_message(message, offset=offset)))
    except ProtocolError:
        one_by_one_failed = True
    if raw and not check_crc and not says_it_is_empty(damaged):
        assert batch_failed == one_by_one_failed
    if batch_failed and not check_crc:  # batches do not look into sections nobody asked for
        assert one_by_one_failed
    if not batch_failed and not one_by_one_failed:
        for row, wanted in zip(rows, expected, strict=True):
            assert row["body"] == wanted["body"]
            assert row["offset"] == wanted["offset"]
