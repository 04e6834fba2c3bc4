"""Compressed batches: as the Java client writes them, and never more than they declare."""

from __future__ import annotations

import gzip
import sys
import tracemalloc

import cramjam
import pytest

from sharding.errors import LocalError
from sharding.stream.errors import ProtocolError
from sharding.stream.messages.codecs import Compression, compress, decompress, require
from sharding.stream.protocol.constants import Limits

CONTENT = b"".join(b"message %d, " % number for number in range(20_000))
LIMITS = Limits()
CODECS = [Compression.GZIP, Compression.SNAPPY, Compression.LZ4, Compression.ZSTD]
every_codec = pytest.mark.parametrize("codec", CODECS)


@pytest.mark.parametrize("codec", Compression)
@pytest.mark.parametrize("content", [b"", b"x", CONTENT])
def test_content_comes_back(codec: Compression, content: bytes) -> None:
    assert bytes(decompress(codec, compress(codec, content), len(content), LIMITS)) == content


@every_codec
def test_content_is_read_from_memory_that_is_shared(codec: Compression) -> None:
    around = b"before" + compress(codec, CONTENT) + b"after"
    inside = memoryview(around)[6:-5]
    assert bytes(decompress(codec, inside, len(CONTENT), LIMITS)) == CONTENT


def test_gzip_is_what_gzip_reads_and_writes() -> None:
    assert gzip.decompress(compress(Compression.GZIP, CONTENT)) == CONTENT
    written = gzip.compress(CONTENT)
    assert decompress(Compression.GZIP, written, len(CONTENT), LIMITS) == CONTENT


def test_snappy_is_framed() -> None:
    assert compress(Compression.SNAPPY, CONTENT).startswith(b"\xff\x06\x00\x00sNaPpY")


def test_lz4_is_a_frame_of_independent_blocks_and_linked_ones_are_read_too() -> None:
    frame = compress(Compression.LZ4, CONTENT)
    assert frame.startswith(b"\x04\x22\x4d\x18")
    assert frame[4] & 0b0010_0000
    linked = bytes(cramjam.lz4.compress(CONTENT))
    assert not linked[4] & 0b0010_0000
    assert bytes(decompress(Compression.LZ4, linked, len(CONTENT), LIMITS)) == CONTENT


def test_zstd_is_a_frame() -> None:
    assert compress(Compression.ZSTD, CONTENT).startswith(b"\x28\xb5\x2f\xfd")


@every_codec
def test_a_bomb_is_refused_before_memory_is_taken_for_it(codec: Compression) -> None:
    bomb = compress(codec, bytes(32 * 1024 * 1024))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decompress(codec, bomb, 1000, LIMITS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1024 * 1024


@pytest.mark.parametrize("codec", [codec for codec in Compression if codec])
def test_a_declared_length_above_the_limit_is_refused_and_the_option_named(
    codec: Compression,
) -> None:
    with pytest.raises(ProtocolError, match="uncompressed_max"):
        decompress(codec, compress(codec, b"x"), 2**32 - 1, LIMITS)
    content = bytes(1001)
    with pytest.raises(ProtocolError, match="uncompressed_max"):
        decompress(codec, compress(codec, content), 1001, Limits(uncompressed_max=1000))
    limits = Limits(uncompressed_max=1001)
    assert bytes(decompress(codec, compress(codec, content), 1001, limits)) == content


@pytest.mark.parametrize("codec", Compression)
@pytest.mark.parametrize("declared", [0, len(CONTENT) - 1, len(CONTENT) + 1])
def test_content_of_another_length_is_refused(codec: Compression, declared: int) -> None:
    with pytest.raises(ProtocolError):
        decompress(codec, compress(codec, CONTENT), declared, LIMITS)


@every_codec
def test_what_is_cut_off_damaged_or_followed_by_more_is_refused(codec: Compression) -> None:
    whole = compress(codec, CONTENT)
    for broken in (whole[:-1], whole[: len(whole) // 2], whole + b"more", b"\x01" * 20, whole * 2):
        with pytest.raises(ProtocolError):
            decompress(codec, broken, len(CONTENT), LIMITS)
    for place in range(0, len(whole), len(whole) // 50):
        damaged = whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]
        try:  # not every format has a checksum
            content = decompress(codec, damaged, len(CONTENT), LIMITS)
        except ProtocolError:
            continue
        assert len(content) == len(CONTENT)


def test_without_cramjam_gzip_works_and_the_others_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cramjam", None)
    require(Compression.NONE)
    require(Compression.GZIP)
    written = compress(Compression.GZIP, b"x")
    assert decompress(Compression.GZIP, written, 1, LIMITS) == b"x"
    for codec in (Compression.SNAPPY, Compression.LZ4, Compression.ZSTD):
        for use in (
            lambda codec=codec: require(codec),
            lambda codec=codec: compress(codec, b"x"),
            lambda codec=codec: decompress(codec, b"x", 1, LIMITS),
        ):
            with pytest.raises(LocalError, match=r"pip install 'rabbit-warren\[stream\]'"):
                use()
