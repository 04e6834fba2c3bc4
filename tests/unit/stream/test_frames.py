"""Bytes become frames however they are cut, and no declared size takes memory by itself."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

from sharding.stream.errors import ProtocolError
from sharding.stream.protocol.constants import MIB, Key, Limits
from sharding.stream.protocol.frames import FIRST_STEP, READ_BUFFER, Frame, FrameReader
from tests.support.stream_frames import frame


def reader(limits: Limits | None = None) -> FrameReader:
    made = FrameReader(limits or Limits())
    made.authenticated()
    return made


def feed(frames: FrameReader, data: bytes, step: int = 1 << 30) -> list[Frame]:
    """Give it at most `step` bytes at a time."""
    found: list[Frame] = []
    rest = memoryview(data)
    while rest:
        buffer = frames.buffer()
        count = min(step, len(buffer), len(rest))
        buffer[:count] = rest[:count]
        found += frames.received(count)
        rest = rest[count:]
    return found


SIZES = [0, 1, 7, READ_BUFFER - 9, READ_BUFFER - 8, READ_BUFFER - 7, 3 * READ_BUFFER]
MIXED = [
    (key, bytes([number]) * size)
    for number, size in enumerate(SIZES)
    for key in (Key.METADATA, Key.DELIVER)
]


@pytest.mark.parametrize("step", [1 << 30, READ_BUFFER, 4093, 99])
def test_frames_are_the_same_however_the_bytes_arrive(step: int) -> None:
    data = b"".join(frame(key, body) for key, body in MIXED)
    found = feed(reader(), data, step)
    assert [(one.key, bytes(one.body)) for one in found] == MIXED


def test_frames_are_the_same_byte_by_byte() -> None:
    small = [(key, body) for key, body in MIXED if len(body) < 10]
    found = feed(reader(), b"".join(frame(key, body) for key, body in small), 1)
    assert [(one.key, bytes(one.body)) for one in found] == small


def test_a_chunk_keeps_its_bytes_when_more_arrives() -> None:
    frames = reader()
    (first,) = feed(frames, frame(Key.DELIVER, b"first" * 1000))
    (small,) = feed(frames, frame(Key.METADATA, b"small"))
    feed(frames, frame(Key.DELIVER, b"other" * 1000) + frame(Key.METADATA, b"other"))
    assert bytes(first.body) == b"first" * 1000
    assert bytes(small.body) == b"small"


def test_most_of_a_large_chunk_is_received_in_place() -> None:
    frames = reader()
    feed(frames, frame(Key.DELIVER, bytes(900_000))[:100])
    assert len(frames.buffer()) == 900_000 - (100 - 8)


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_a_frame_too_small_for_its_key_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="4 are the least"):
        feed(reader(), struct.pack(">I", size))


@pytest.mark.parametrize(
    ("key", "size", "names"),
    [
        (Key.METADATA, MIB + 1, "frame_max = 1048576"),
        (Key.DELIVER, 256 * MIB + 1, "Limits.chunk_max = 268435456"),
        (Key.METADATA, 2**32 - 1, "frame_max = 1048576"),
    ],
)
def test_a_frame_over_its_limit_is_refused_by_the_name_of_the_limit(
    key: Key, size: int, names: str
) -> None:
    with pytest.raises(ProtocolError, match=names):
        feed(reader(), struct.pack(">IH", size, key) + b"\0\1")


def test_a_size_that_no_frame_may_have_is_refused_before_its_key() -> None:
    with pytest.raises(ProtocolError):
        feed(reader(), struct.pack(">I", 256 * MIB + 1))


def test_the_largest_allowed_frames_are_taken() -> None:
    limits = Limits(chunk_max=3 * MIB)
    feed(reader(limits), frame(Key.METADATA, bytes(MIB - 4)))
    (chunk,) = feed(reader(limits), frame(Key.DELIVER, bytes(3 * MIB - 4)))
    assert len(chunk.body) == 3 * MIB - 4


def test_before_the_peer_is_authenticated_no_frame_is_large() -> None:
    for key in (Key.PEER_PROPERTIES, Key.DELIVER):
        with pytest.raises(ProtocolError, match="handshake_frame_max = 8192"):
            feed(FrameReader(Limits()), struct.pack(">IHH", 8193, key, 1))
    assert len(feed(FrameReader(Limits()), frame(Key.PEER_PROPERTIES, bytes(8188)))) == 1


def test_good_frames_come_before_the_error_of_a_bad_one() -> None:
    frames = reader()
    data = frame(Key.METADATA, b"good") + struct.pack(">I", 0)
    frames.buffer()[: len(data)] = data
    found = frames.received(len(data))
    assert bytes(next(found).body) == b"good"
    with pytest.raises(ProtocolError):
        next(found)


def test_memory_follows_what_arrives_and_not_what_is_declared() -> None:
    frames = reader()
    tracemalloc.start()
    try:
        feed(frames, struct.pack(">IHH", 200 * MIB, Key.DELIVER, 1))
        assert tracemalloc.get_traced_memory()[1] < 2 * FIRST_STEP
        for _ in range(5):
            feed(frames, bytes(MIB))
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


def test_a_chunk_larger_than_the_first_step_is_whole() -> None:
    body = bytes(range(256)) * (5 * MIB // 256)
    (chunk,) = feed(reader(), frame(Key.DELIVER, body), 100_000)
    assert bytes(chunk.body) == body
