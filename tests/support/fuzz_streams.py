"""Frames and chunks, mutated and cut: only the protocol error may come of them, at little memory.

    python -m tests.support.fuzz_streams --seconds 600 --seed 7

The suite runs a fixed number of them with a fixed seed. Here it goes on, and prints the seed and
the bytes of what fails.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sharding.stream.arrow.batches import BatchReader
from sharding.stream.errors import ProtocolError, StreamRefused
from sharding.stream.messages.chunk import messages
from sharding.stream.messages.codecs import Compression
from sharding.stream.messages.message import Properties, decode_message, encode_data, encode_message
from sharding.stream.options import Columns
from sharding.stream.protocol.constants import MIB, Limits
from sharding.stream.protocol.session import Connection
from tests.support.chunks import SubBatch, chunk
from tests.support.stream_frames import (
    CLOSE,
    PUSHED,
    asked,
    copy_of,
    feed,
    handshake,
    new_connection,
    open_connection,
)

GROWTH_MAX = 16 * MIB
ROUND = 1_000

_TELLING = (0x00, 0x01, 0x7F, 0x80, 0xFF)
_RICH = encode_message(
    b"body",
    key="key",
    properties=Properties(message_id=7, subject="subject"),
    application_properties={"number": 1, "text": "x"},
    annotations={"x-exchange": "e"},
)
_ENTRIES: list[list[bytes | SubBatch]] = [
    [encode_data(b"x" * 20)] * 8,
    [encode_data(b"x" * size) for size in (0, 1, 255, 256)],
    [_RICH] * 3,
]
_ENTRIES.extend([SubBatch([encode_data(b"abc"), _RICH], codec), _RICH] for codec in Compression)
_CHUNKS = [bytes(chunk(entries, 5)) for entries in _ENTRIES]
_OPEN = open_connection()
_GOOD = [*PUSHED, CLOSE, *asked(_OPEN)]


def _steps(version: str) -> Iterator[tuple[Connection, bytes]]:
    connection = new_connection()
    for step in handshake(version):
        yield copy_of(connection), step
        feed(connection, step)


_STEPS = [*_steps("4.0.5"), *_steps("3.10.8")]
_LIMITS = Limits(uncompressed_max=MIB, batch_max=200)
_READERS = [
    BatchReader("s", columns, _LIMITS, check_crc)
    for columns in (Columns(), Columns(raw=True), Columns(True, True, True))
    for check_crc in (True, False)
]


class Failed(AssertionError):
    """Something other than the protocol error was raised."""


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The bytes with a few changes: flipped, cut, repeated, put in, or with another length."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(6):
            case 0 if changed:
                changed[at % len(changed)] = rng.choice(_TELLING)
            case 1 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 2:
                del changed[at:]
            case 3:
                changed[at:at] = rng.randbytes(rng.randint(1, 12))
            case 4:
                del changed[at : at + rng.randint(1, 8)]
            case _:  # a number of 2 or 4 bytes, as lengths and counts are
                width = rng.choice((2, 4))
                changed[at : at + width] = rng.choice(
                    (bytes(width), b"\xff" * width, b"\x7f" + b"\xff" * (width - 1))
                )
    return bytes(changed)


def fuzz_open_connection(rng: random.Random) -> None:
    """A mutated frame on an open connection that waits for every answer there is."""
    _receive(_OPEN, mutated(rng.choice(_GOOD), rng), rng)


def fuzz_handshake(rng: random.Random) -> None:
    """A mutated step of a handshake."""
    connection, step = rng.choice(_STEPS)
    _receive(connection, mutated(step, rng), rng)


def fuzz_chunk(rng: random.Random) -> None:
    """A mutated chunk, read as messages and as a batch."""
    damaged = memoryview(mutated(rng.choice(_CHUNKS), rng))

    def one_by_one() -> None:
        for _, raw in messages(damaged, _LIMITS):
            decode_message(raw)

    _only_protocol_errors(one_by_one, damaged)
    reader = rng.choice(_READERS)
    _only_protocol_errors(lambda: list(reader.batches([damaged])), damaged)


FUZZERS: Sequence[Callable[[random.Random], None]] = (
    *(3 * [fuzz_open_connection]),
    fuzz_handshake,
    fuzz_chunk,
)


def _receive(connection: Connection, data: bytes, rng: random.Random) -> None:
    cut = rng.randrange(len(data) + 1)
    fresh = copy_of(connection)

    def receive() -> None:
        feed(fresh, data[:cut])
        feed(fresh, data[cut:])

    _only_protocol_errors(receive, data)


def _only_protocol_errors(action: Callable[[], object], data: bytes | memoryview) -> None:
    try:
        action()
    except (ProtocolError, StreamRefused):
        pass  # a mutated code is a refusal like any other, in the handshake
    except Exception as error:
        raise Failed(f"{error!r} came of {bytes(data).hex()}") from error


def fuzz(seed: int, enough: Callable[[int], bool]) -> tuple[int, int]:
    """How many were tried, and by how many bytes memory grew at most."""
    rng = random.Random(seed)
    _one_round(rng)  # loads the libraries of codecs and Arrow, which is not growth
    tried = 0
    memory = PeakMemory()
    while not enough(tried):
        _one_round(rng)
        tried += ROUND
    return tried, memory.growth()


def _one_round(rng: random.Random) -> None:
    for _ in range(ROUND):
        rng.choice(FUZZERS)(rng)


class PeakMemory:
    """By how much this process grew at its peak; the kernel counts, which slows nothing down."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # elsewhere an earlier peak may hide a later one
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is now
        self._before = self._peak()

    def growth(self) -> int:
        return self._peak() - self._before

    @staticmethod
    def _peak() -> int:
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    until = time.monotonic() + arguments.seconds
    tried, growth = fuzz(arguments.seed, lambda _: time.monotonic() >= until)
    print(f"{tried:,} frames and chunks: only protocol errors, {growth / MIB:.1f} MiB at most")
    if growth >= GROWTH_MAX:
        raise SystemExit(f"memory grew by more than {GROWTH_MAX // MIB} MiB")


if __name__ == "__main__":
    main()
