"""Publish frames: what they hold, byte for byte, and that they fit."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

from sharding.errors import InvalidInput
from sharding.stream.messages.codecs import Compression, decompress
from sharding.stream.messages.message import encode_data, encode_message, with_key
from sharding.stream.producer import publish_entries
from sharding.stream.producer.outbox import Batch
from sharding.stream.protocol.constants import Limits

SIZES = [0, 1, 100, 254, 255, 256, 257, 70_000]


def simple(messages: Sequence[bytes], ids: Sequence[int]) -> bytes:
    """The entries as the protocol describes them, one after the other."""
    return b"".join(
        struct.pack(">QI", each, len(message)) + message
        for each, message in zip(ids, messages, strict=True)
    )


@pytest.mark.parametrize("size", SIZES)
def test_bodies_of_one_size_become_data_sections(size: int) -> None:
    bodies = [bytes([n % 251]) * size for n in range(300)]
    ids = range(65_400, 65_700)
    assert publish_entries.data_entries(bodies, ids) == simple(list(map(encode_data, bodies)), ids)


@pytest.mark.parametrize("sizes", [SIZES, SIZES[:5], SIZES[5:]])
def test_bodies_of_mixed_sizes_become_data_sections(sizes: list[int]) -> None:
    bodies = [bytes([size % 251]) * size for size in sizes]
    ids = range(7, 7 + len(sizes))
    assert publish_entries.data_entries(bodies, ids) == simple(list(map(encode_data, bodies)), ids)


@pytest.mark.parametrize(
    "ids",
    [
        [5],
        [254, 255, 256],
        [1, 2**16, 2**32 - 1, 2**32, 2**48, 2**63 - 1],
        [2**56 - 1, 2**56],
        [3, 70_003, 140_003],
    ],
)
def test_ids_may_be_any_that_rise(ids: list[int]) -> None:
    messages = [b"abc"] * len(ids)
    assert publish_entries.message_entries(messages, ids) == simple(messages, ids)
    uneven = [b"x" * n for n in range(len(ids))]
    assert publish_entries.message_entries(uneven, ids) == simple(uneven, ids)


def test_filter_values_stand_before_the_message_and_may_be_missing() -> None:
    written = publish_entries.filtered_entries([b"one", b"two"], [1, 2], [b"de", None])
    first = struct.pack(">QH2sI3s", 1, 2, b"de", 3, b"one")
    second = struct.pack(">QhI3s", 2, -1, 3, b"two")
    assert written == first + second


@pytest.mark.parametrize("codec", list(Compression))
def test_sub_entry_holds_all_its_messages(codec: Compression) -> None:
    messages = [b"a" * 200, b"", b"b" * 300]
    written = publish_entries.sub_entry(publish_entries.message_records(messages), 3, 77, codec)
    number, kind, records, length, size = struct.unpack_from(">QBHII", written)
    content = decompress(codec, written[19:], length, Limits())
    assert (number, kind, records, size) == (77, 0x80 | codec << 4, 3, len(written) - 19)
    assert bytes(content) == b"".join(struct.pack(">I", len(m)) + m for m in messages)


def test_what_does_not_shrink_is_not_compressed() -> None:
    written = publish_entries.sub_entry(
        publish_entries.message_records([b"x"]), 1, 1, Compression.GZIP
    )
    assert written == struct.pack(">QBHII", 1, 0x80, 1, 5, 5) + struct.pack(">I", 1) + b"x"


def test_frames_of_a_batch_fit_and_keep_the_order() -> None:
    messages = [bytes([n]) * (n * 7 % 90) for n in range(100)]
    batch = Batch(messages, range(10, 110), range(100), 0, sum(map(len, messages)))
    frames = [header + bytes(content) for header, content in batch.frames(3, 200)]
    assert all(len(frame) <= 200 for frame in frames)
    assert b"".join(frame[13:] for frame in frames) == simple(messages, range(10, 110))
    for frame in frames:
        size, key, version, publisher = struct.unpack_from(">IHHB", frame)
        assert (size, key, version, publisher) == (len(frame) - 4, 2, 1, 3)


def test_frames_of_plain_and_filtered_batches_fit() -> None:
    bodies = [b"x" * 40] * 50
    plain = Batch(bodies, range(50), range(50), 0, 2_000, plain=True)
    values = [b"v" * (n % 30) for n in range(50)]
    filtered = Batch(bodies, range(50), range(50), 0, 2_000, filters=values)
    for batch in (plain, filtered):
        sizes = [len(header) + len(content) for header, content in batch.frames(0, 300)]
        assert len(sizes) > 1
        assert max(sizes) <= 300


@pytest.mark.parametrize("sizes", [[40] * 9, [0, 255, 30], [1, 256, 70_000]])
def test_bodies_in_a_sub_entry_are_the_messages_that_they_are_alone(sizes: list[int]) -> None:
    bodies = [b"x" * size for size in sizes]
    encoded = publish_entries.message_records(list(map(encode_data, bodies)))
    assert publish_entries.data_records(bodies) == encoded


@pytest.mark.parametrize("plain", [True, False])
def test_frames_of_sub_entries_fit_even_if_nothing_shrinks(plain: bool) -> None:
    messages = [bytes([n]) * 30 for n in range(40)]
    groups = publish_entries.groups([30] * 40, 7, publish_entries.room_for_entries(256), plain)
    ids = [group.stop for group in groups]
    batch = Batch(messages, ids, range(40), 0, 1_200, plain, groups=groups)
    assert all(len(head) + len(content) <= 256 for head, content in batch.frames(0, 256))
    assert [position for group in groups for position in group] == list(range(40))


def test_a_filter_value_has_a_bound() -> None:
    assert publish_entries.filter_bytes("é") == "é".encode()
    with pytest.raises(InvalidInput, match="255 bytes"):
        publish_entries.filter_bytes("é" * 128)


@pytest.mark.parametrize("key", ["k", "ключ", "k" * 300, ""])
@pytest.mark.parametrize("size", [0, 100, 255, 256])
def test_quick_encoding_with_a_key_equals_the_usual_one(key: str, size: int) -> None:
    body = b"x" * size
    assert with_key(key, body) == encode_message(body, key=key)
    assert with_key(key.encode(), body) == encode_message(body, key=key)


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match="UTF-8"):
        with_key(b"\xff", b"")
