"""Chunks become Arrow batches: these columns, these types, whatever way leads there."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from sharding.errors import InvalidInput
from sharding.stream.arrow import batches
from sharding.stream.arrow.batches import BatchReader
from sharding.stream.errors import ProtocolError
from sharding.stream.messages import chunk as chunks_of
from sharding.stream.messages.amqp_values import Symbol, Timestamp
from sharding.stream.messages.codecs import Compression
from sharding.stream.messages.message import Properties, encode_data, encode_message
from sharding.stream.options import Columns
from sharding.stream.protocol.constants import Limits
from tests.support.chunks import (
    TIMESTAMP_MS,
    SubBatch,
    chunk,
    chunk_of,
    sub_batch_entry,
    with_length,
)

ALL = Columns(key=True, properties=True, application_properties=True)
EQUAL = [encode_data(b"%03d" % number) for number in range(100)]
MIXED = [encode_data(b"x" * number) for number in range(300)]
KEYED = [encode_message(b"b" * number, key=f"k{number}") for number in range(300)]
RICH = [
    encode_message(
        b"rich",
        key="k",
        properties=Properties(
            message_id=7,
            user_id=b"u",
            creation_time=Timestamp(1_000),
            absolute_expiry_time=Timestamp(2**62),
            group_sequence=9,
            content_type="text/plain",
        ),
        application_properties={"n": 1, "none": None, "symbol": Symbol("s")},
    )
]


def read(
    chunks: list[memoryview], columns: Columns = ALL, first: int = 0, end: int | None = None
) -> pa.RecordBatch:
    (batch,) = BatchReader("invoices-1", columns).batches(chunks, first, end)
    batch.validate(full=True)
    return batch


@pytest.fixture
def no_single_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise AssertionError("a message was read one by one")

    monkeypatch.setattr(batches, "decode_message", refuse)


@pytest.mark.parametrize("messages", [EQUAL, MIXED, RICH])
def test_columns_have_the_promised_names_and_types(messages: list[bytes]) -> None:
    batch = read([chunk(messages)])
    times = pa.timestamp("ms", "UTC")
    text = pa.string()
    properties = dict.fromkeys(Properties.__dataclass_fields__, text) | {
        "user_id": pa.binary(),
        "absolute_expiry_time": times,
        "creation_time": times,
        "group_sequence": pa.int64(),
    }
    assert batch.schema == pa.schema(
        {
            "offset": pa.int64(),
            "timestamp": times,
            "body": pa.binary(),
            "key": text,
            "properties": pa.struct(properties.items()),
            "application_properties": pa.map_(text, text),
        }
    )
    assert batch.schema.metadata == {b"stream": b"invoices-1"}
    assert read([chunk(messages)], Columns()).schema.names == ["offset", "timestamp", "body"]


def test_chunks_are_joined_into_one_batch_with_their_own_times_and_offsets() -> None:
    later = chunk_of(with_length(encode_data(b"c")), 1, 1, 10, timestamp_ms=5_000)
    for messages in (EQUAL[:2], MIXED[:2]):
        batch = read([chunk(messages), later])
        assert batch["offset"].to_pylist() == [0, 1, 10]
        moments = batch["timestamp"].cast(pa.int64()).to_pylist()
        assert moments == [TIMESTAMP_MS, TIMESTAMP_MS, 5_000]


@pytest.mark.usefixtures("no_single_messages")
@pytest.mark.parametrize("codec", [None, *Compression])
def test_plain_and_keyed_messages_are_not_read_one_by_one(codec: Compression | None) -> None:
    for messages in (EQUAL, MIXED, KEYED[:230], [*MIXED, *KEYED[:230]]):
        whole = chunk(messages if codec is None else [SubBatch(messages, codec)])
        batch = read([whole], Columns(key=True))
        assert batch.num_rows == len(messages)
    assert batch["body"].to_pylist() == [
        *(b"x" * number for number in range(300)),
        *(b"b" * number for number in range(230)),
    ]
    assert batch["key"].to_pylist() == [None] * 300 + [f"k{number}" for number in range(230)]


# What RabbitMQ 4.0.5 and 3.10.8 delivered of messages that were published over AMQP 0-9-1.
FROM_4_0 = bytes.fromhex(
    "005370c006054240404143005372c12e04a30a782d65786368616e6765a100a30d782d726f7574696e672d6b"
    "6579a10e622d633965363231316365363634005375a00568656c6c6f"
)
FROM_3_10 = bytes.fromhex(
    "005372c12e04a30d782d726f7574696e672d6b6579a10e622d393937306332663137656136a30a782d657863"
    "68616e6765a100005375a00568656c6c6f"
)


@pytest.mark.usefixtures("no_single_messages")
def test_messages_published_over_amqp_0_9_1_are_not_read_one_by_one() -> None:
    batch = read([chunk([FROM_4_0, FROM_3_10])], ALL)
    assert batch["body"].to_pylist() == [b"hello"] * 2
    assert batch["key"].to_pylist() == ["b-c9e6211ce664", "b-9970c2f17ea6"]
    with_properties = [FROM_4_0[:11] + message for message in RICH]
    batch = read([chunk([*with_properties, FROM_3_10])], Columns(key=True))
    assert batch["body"].to_pylist() == [b"rich", b"hello"]
    assert batch["key"].to_pylist() == ["k", "b-9970c2f17ea6"]


def test_all_parts_of_rich_messages_are_there_among_others() -> None:
    batch = read([chunk([*EQUAL[:1], *RICH, *KEYED[1:2], SubBatch(RICH, Compression.ZSTD)], 5)])
    assert batch["offset"].to_pylist() == [5, 6, 7, 8]
    assert batch["body"].to_pylist() == [b"000", b"rich", b"b", b"rich"]
    assert batch["key"].to_pylist() == [None, "k", "k1", "k"]
    properties = batch["properties"].to_pylist()
    assert [row is None for row in properties] == [True, False, True, False]
    assert {name: value for name, value in properties[1].items() if value is not None} == {
        "message_id": "7",
        "user_id": b"u",
        "creation_time": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        "group_sequence": 9,
        "content_type": "text/plain",
    }
    assert batch["application_properties"].to_pylist() == [
        None,
        [("n", "1"), ("none", None), ("symbol", "s")],
        None,
        [("n", "1"), ("none", None), ("symbol", "s")],
    ]


@pytest.mark.parametrize("messages", [EQUAL, MIXED, KEYED, [SubBatch(EQUAL), *MIXED, *RICH]])
def test_offsets_outside_the_range_are_dropped(messages: list[bytes | SubBatch]) -> None:
    chunks = [chunk(messages, 1_000), chunk(messages, 2_000)]
    whole = read(chunks)
    for first, end in ((0, 1_001), (1_003, 1_090), (1_050, 2_010), (2_005, None), (1_001, 2_001)):
        rows = [
            row
            for row in whole.to_pylist()
            if row["offset"] >= first and (end is None or row["offset"] < end)
        ]
        assert read(chunks, ALL, first, end).to_pylist() == rows
    reader = BatchReader("s", ALL)
    for nothing in ((0, 1_000), (9_000, None), (1_500, 2_000), (1_005, 1_005), (1_005, 7)):
        assert not list(reader.batches(chunks, *nothing))
    assert not list(reader.batches([]))


def test_bodies_that_look_like_messages_are_bodies() -> None:
    bodies = [b"", b"\x00\x53\x75\xa0", encode_data(b"abc"), with_length(encode_data(b"abc")) * 5]
    batch = read([chunk([encode_data(body) for body in bodies])], Columns())
    assert batch["body"].to_pylist() == bodies


VALUE = b"\x00\x53\x77\xa1\x03abc"  # as long as a data section of three bytes


@pytest.mark.parametrize(
    ("messages", "bodies"),
    [
        ([encode_data(b"abc"), VALUE, encode_data(b"def")], [b"abc", b"abc", b"def"]),
        ([encode_data(b"abc"), encode_data(b"de"), encode_data(b"fghi")], [b"abc", b"de", b"fghi"]),
        ([encode_data(b"ab") * 2, encode_data(b"cde")], [b"abab", b"cde"]),
        ([encode_data(b""), encode_data(b"") * 2], [b"", b""]),
        ([encode_message(b"ab", key="k") + encode_data(b"c")] * 2, [b"abc", b"abc"]),
        ([b"\x00\x53\x70\x45" + encode_data(b"ab") * 2, VALUE], [b"abab", b"abc"]),
    ],
)
def test_what_looks_like_another_layout_is_not_taken_for_it(
    messages: list[bytes], bodies: list[bytes]
) -> None:
    for columns in (ALL, Columns()):
        assert read([chunk(messages)], columns)["body"].to_pylist() == bodies
        assert read([chunk([SubBatch(messages)])], columns)["body"].to_pylist() == bodies


KEYED_ONE = encode_message(b"body", key="key")
HEADER = b"\x00\x53\x70\x45"


@pytest.mark.parametrize(
    "message",
    [
        encode_data(b"abc")[:-1],
        encode_data(b"abc") + b"\x00",
        encode_data(bytes(300))[:-1],
        KEYED_ONE[:-1],
        KEYED_ONE.replace(b"\x02\xa3", b"\x04\xa3"),  # four values in the map of annotations
        KEYED_ONE.replace(b"\xc1", b"\xc0"),  # a list of annotations
        KEYED_ONE.replace(b"\x15\x02", b"\x16\x02"),  # a larger map
        KEYED_ONE.replace(b"\xa1\x03", b"\xa1\x04"),  # a longer key
        HEADER * 2 + KEYED_ONE,
        KEYED_ONE[:26] + HEADER + encode_data(b"body"),  # a header after annotations
        HEADER + KEYED_ONE.replace(b"\xa1\x03", b"\xa1\x04"),
        HEADER + KEYED_ONE.replace(b"\x02\xa3", b"\x04\xa3"),
        HEADER + KEYED_ONE.replace(b"\x02\xa3", b"\x01\xa3"),
        HEADER + KEYED_ONE.replace(b"\x15\x02", b"\xff\x02"),
        HEADER + KEYED_ONE.replace(b"\xa1\x03", b"\x3f\x03"),  # a value of an unknown type
        FROM_4_0.replace(b"\x2e\x04", b"\x2e\x02"),  # annotations after the last one
    ],
)
def test_malformed_messages_are_refused_in_every_layout(message: bytes) -> None:
    for beside in ([], [encode_data(b"plain")], [KEYED_ONE]):
        with pytest.raises(ProtocolError):
            read([chunk([*beside, message])], Columns(key=True))


def test_raw_messages_are_not_looked_into() -> None:
    raw = [b"", b"hello", b"\x00\x53", b"\xff" * 300]
    batch = read([chunk([*raw, SubBatch(raw, Compression.LZ4)])], Columns(raw=True))
    assert batch["body"].to_pylist() == raw * 2
    with pytest.raises(ProtocolError, match="raw=True"):
        read([chunk(raw)], Columns())
    with pytest.raises(InvalidInput):
        Columns(raw=True, key=True)


def test_a_key_that_is_not_utf_8_is_refused() -> None:
    broken = encode_message(b"body", key="kk").replace(b"kk", b"\xff\xfe")
    with pytest.raises(ProtocolError, match="UTF-8"):
        read([chunk([*KEYED[:5], broken])], Columns(key=True))
    exotic = encode_message(b"body", key="ключ")
    assert read([chunk([exotic])], Columns(key=True))["key"].to_pylist() == ["ключ"]


def test_the_crc_is_checked_unless_switched_off() -> None:
    broken = chunk_of(with_length(encode_data(b"abc")), 1, 1, crc=1)
    with pytest.raises(ProtocolError, match="CRC"):
        list(BatchReader("s").batches([broken]))
    (batch,) = BatchReader("s", check_crc=False).batches([broken])
    assert batch["body"].to_pylist() == [b"abc"]


@pytest.mark.parametrize("messages", [EQUAL, MIXED, KEYED])
def test_counts_that_do_not_match_are_refused(messages: list[bytes]) -> None:
    data = b"".join(map(with_length, messages))
    count = len(messages)
    for octets, entries, records in (
        (data, count + 1, count + 1),
        (data, count - 1, count - 1),
        (data, count, count + 1),
        (data, count, 2**32 - 1),
        (data[:-1], count, count),
        (data + b"\0", count, count),
        (data + b"\0" * 4, count, count),
        (b"\x7f" + data[1:], count, count),
        (b"\x80" + data[1:], count, count),
    ):
        with pytest.raises(ProtocolError):
            read([chunk_of(octets, entries, records)])


def test_one_chunk_does_not_make_up_for_another() -> None:
    """All entries follow each other across both chunks, but each holds another number of them."""
    first, second = EQUAL[:3], EQUAL[3:5]
    data = [b"".join(map(with_length, part)) for part in (first, second)]
    for counts in ((2, 3), (4, 1)):
        with pytest.raises(ProtocolError):
            read([chunk_of(data[0], counts[0], counts[0]), chunk_of(data[1], counts[1], counts[1])])
    cut = data[0][:-2], data[0][-2:] + data[1]
    with pytest.raises(ProtocolError):
        read([chunk_of(cut[0], 3, 3), chunk_of(cut[1], 2, 2)])


MEGABYTE = 1024 * 1024
CODECS = [codec for codec in Compression if codec]


class Held:
    """The most memory that Python and Arrow held at once, in bytes, beyond what there was."""

    def __init__(self) -> None:
        gc.collect()
        tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0]
        self._before_in_arrow = int(pa.total_allocated_bytes())
        self._most_in_arrow = 0

    def most(self) -> int:
        in_arrow = int(pa.total_allocated_bytes()) - self._before_in_arrow
        self._most_in_arrow = max(self._most_in_arrow, in_arrow)
        return tracemalloc.get_traced_memory()[1] - self._before + self._most_in_arrow


@pytest.fixture
def tracing() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("body", [bytes(1024), b"\x00\x53\x75\xb0" * 256], ids=["equal", "odd"])
def test_what_unpacks_to_far_more_than_the_bound_is_read_in_parts(
    codec: Compression, body: bytes
) -> None:
    """32 batches of a MiB; of odd ones the bodies are full of what messages begin with."""
    messages = [encode_data(body)] * 1000
    if body.strip(b"\0"):
        messages[7] = encode_message(body, key="k")
    packed = sub_batch_entry(SubBatch(messages, codec))
    chunks = [chunk_of(packed * 16, 16, 16_000, first) for first in (0, 16_000)]
    reader = BatchReader("s", limits=Limits(batch_max=2 * MEGABYTE), check_crc=False)
    held, offset = Held(), 0
    for batch in reader.batches(chunks):
        assert batch["offset"][0].as_py() == offset
        assert batch["body"][0].as_py() == batch["body"][-1].as_py() == body
        offset += batch.num_rows
        assert batch.nbytes < 2 * MEGABYTE
        assert held.most() < 10 * MEGABYTE
        del batch
    assert offset == 32_000


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("codec", CODECS)
def test_a_batch_beyond_its_limit_is_refused_by_name_and_what_follows_it_can_be_read(
    codec: Compression,
) -> None:
    honest = sub_batch_entry(SubBatch([encode_data(bytes(MEGABYTE))], codec))
    bomb = sub_batch_entry(SubBatch([encode_data(bytes(8 * MEGABYTE))] * 3, codec))
    lying = sub_batch_entry(SubBatch([encode_data(bytes(MEGABYTE))], codec), uncompressed_length=9)
    limits = Limits(uncompressed_max=2 * MEGABYTE, batch_max=MEGABYTE // 2)
    reader = BatchReader("invoices-1", limits=limits, check_crc=False)
    with_bomb = chunk_of(honest + bomb + honest, 3, 5, 100)
    found: list[pa.RecordBatch] = []
    held = Held()
    with pytest.raises(ProtocolError) as refused:
        found += reader.batches([with_bomb])
    said = str(refused.value)
    assert "'invoices-1', offsets 101 to 103: " in said
    assert f"of {len(bomb) - 11} bytes unpacks to {3 * (8 * MEGABYTE + 12)}" in said
    assert f"Limits.uncompressed_max = {2 * MEGABYTE}" in said
    assert "uncompressedMax" in said
    assert [batch["offset"].to_pylist() for batch in found] == [[100]]
    found.clear()
    (before,) = reader.batches([with_bomb], 0, 101)
    (after,) = reader.batches([with_bomb], 104)
    assert (before["offset"].to_pylist(), after["offset"].to_pylist()) == ([100], [104])
    del before, after
    assert [offset for offset, _ in chunks_of.messages(with_bomb, limits, 104)] == [104]
    with pytest.raises(ProtocolError, match=r"'s', offsets 101 to 103: .*Limits.uncompressed_max"):
        list(chunks_of.messages(with_bomb, limits, 101, "s"))
    with pytest.raises(ProtocolError):
        list(reader.batches([chunk_of(lying, 1, 1)]))
    assert held.most() < 6 * MEGABYTE


def test_a_batch_that_is_not_compressed_takes_no_memory_and_has_no_limit() -> None:
    packed = chunk([SubBatch([encode_data(bytes(1000))] * 100)])
    limits = Limits(uncompressed_max=5000, batch_max=10_000)
    assert sum(batch.num_rows for batch in BatchReader("s", limits=limits).batches([packed])) == 100
    assert len(list(chunks_of.messages(packed, limits))) == 100


def test_a_large_message_makes_a_batch_of_its_own() -> None:
    bodies = [b"a", b"b" * 5000, b"c", b"d"]
    reader = BatchReader("s", limits=Limits(batch_max=300))
    found = [
        batch["body"].to_pylist()
        for batch in reader.batches([chunk([encode_data(body) for body in bodies])])
    ]
    assert found == [[b"a"], [b"b" * 5000], [b"c", b"d"]]


def test_many_small_messages_count_for_their_rows() -> None:
    """A row takes more memory than an empty message."""
    packed = chunk([SubBatch([encode_data(b"")] * 1000, Compression.GZIP)] * 4)
    reader = BatchReader("s", limits=Limits(batch_max=64_000))
    assert [batch.num_rows for batch in reader.batches([packed])] == [500] * 8


def test_a_small_chunk_that_promises_many_messages_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        for entries, records in ((65_535, 65_535), (1, 2**32 - 1), (65_535, 2**32 - 1)):
            with pytest.raises(ProtocolError):
                list(BatchReader("s").batches([chunk_of(with_length(EQUAL[0]), entries, records)]))
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()
