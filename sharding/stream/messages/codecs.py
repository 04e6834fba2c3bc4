"""Compression of sub-entry batches: gzip, snappy, lz4 and zstd, as the other stream clients write
them.

What the Java client writes, and reads, is the measure: gzip with its header, snappy in the framing
format, lz4 frames of independent blocks, zstd frames. gzip is in the standard library; the others
come with the extra `stream` (cramjam).

A batch says how long its content is. That length is checked against a limit before memory is
taken, and the content is written into a buffer of exactly that length: a batch that holds more is
refused where the buffer ends, however well it is compressed. (In parts it can't be unpacked: of
these libraries only gzip's goes on where it stopped.)
"""

from __future__ import annotations

import zlib
from enum import IntEnum
from types import ModuleType

from sharding.errors import LocalError
from sharding.stream.errors import ProtocolError
from sharding.stream.protocol.constants import Limits

_GZIP_WINDOW = zlib.MAX_WBITS | 16  # + 16: with gzip's header and checksum
_LZ4_LEVEL = 1


class Compression(IntEnum):
    """How a sub-entry batch is compressed; the numbers are the protocol's."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


def require(codec: Compression) -> None:
    """Raises at once, rather than at the first batch, if `codec` can't be used here."""
    if codec not in (Compression.NONE, Compression.GZIP):
        _cramjam(codec)


def compress(codec: Compression, data: bytes | bytearray | memoryview) -> bytes:
    """`data` as one compressed stream of `codec`."""
    match codec:
        case Compression.NONE:
            return bytes(data)
        case Compression.GZIP:
            return zlib.compress(data, wbits=_GZIP_WINDOW)
        case Compression.SNAPPY:
            return bytes(_cramjam(codec).snappy.compress(data))
        case Compression.LZ4:
            # cramjam's plain `compress` links the blocks, and the Java client refuses those.
            compressor = _cramjam(codec).lz4.Compressor(
                level=_LZ4_LEVEL, content_checksum=False, block_linked=False
            )
            compressor.compress(data)
            return bytes(compressor.finish())
        case Compression.ZSTD:
            return bytes(_cramjam(codec).zstd.compress(data))


def decompress(
    codec: Compression, data: bytes | memoryview, uncompressed_length: int, limits: Limits
) -> bytes | bytearray | memoryview:
    """The content of a batch, which is exactly `uncompressed_length` bytes long."""
    if codec is not Compression.NONE and uncompressed_length > limits.uncompressed_max:
        raise ProtocolError(
            f"a {codec.name.lower()} batch of {len(data)} bytes unpacks to {uncompressed_length}, "
            f"more than Limits.uncompressed_max = {limits.uncompressed_max} allows; raise that to "
            "read it (in Spark the option uncompressedMax)"
        )
    match codec:
        case Compression.NONE:
            content: bytes | bytearray | memoryview = data
        case Compression.GZIP:
            content = _gunzip(data, uncompressed_length)
        case _:
            content = _expand(codec, data, uncompressed_length)
    if len(content) != uncompressed_length:
        raise ProtocolError(
            f"a {codec.name.lower()} batch declares {uncompressed_length} bytes "
            f"and holds {len(content)}"
        )
    return content


def _gunzip(data: bytes | memoryview, length: int) -> bytes:
    reader = zlib.decompressobj(wbits=_GZIP_WINDOW)
    try:
        # One byte more than declared shows that there is more; 0 would mean "no bound" to zlib.
        content = reader.decompress(data, length + 1)
    except zlib.error as error:
        raise ProtocolError(f"a gzip batch is corrupt: {error}") from error
    if len(content) <= length and (not reader.eof or reader.unused_data):
        raise ProtocolError("a gzip batch does not end where its data ends")
    return content


def _expand(codec: Compression, data: bytes | memoryview, length: int) -> memoryview:
    module = _cramjam(codec)
    expand = {
        Compression.SNAPPY: module.snappy.decompress_into,
        Compression.LZ4: module.lz4.decompress_into,
        Compression.ZSTD: module.zstd.decompress_into,
    }[codec]
    buffer = bytearray(length)
    try:
        written = expand(data, buffer)
    except module.DecompressionError as error:
        raise ProtocolError(
            f"a {codec.name.lower()} batch of declared length {length} can't be decompressed: "
            f"{error}"
        ) from error
    return memoryview(buffer)[:written]


def _cramjam(codec: Compression) -> ModuleType:
    try:
        import cramjam
    except ImportError:
        raise LocalError(
            f"{codec.name.lower()} batches need cramjam: pip install 'rabbit-warren[stream]'"
        ) from None
    return cramjam
