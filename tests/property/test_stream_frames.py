"""However frames are cut, changed or made up, a connection gives events or the protocol error."""

from __future__ import annotations

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.stream.errors import ProtocolError
from sharding.stream.protocol import wire
from sharding.stream.protocol.constants import Key, Limits
from sharding.stream.protocol.events import Event
from sharding.stream.protocol.frames import FrameReader
from sharding.stream.protocol.wire import Reader
from tests.support.fuzz_streams import GROWTH_MAX, fuzz
from tests.support.stream_frames import (
    PUSHED,
    asked,
    feed,
    frame,
    handshake,
    new_connection,
    open_connection,
)

frames = st.lists(
    st.tuples(
        st.sampled_from([Key.DELIVER, Key.METADATA, Key.HEARTBEAT]),
        st.binary(max_size=50) | st.integers(0, 200_000).map(bytes),
    ),
    max_size=6,
)
cuts = st.lists(st.integers(1, 100_000), min_size=1, max_size=30)


def in_pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    """The data in pieces of these sizes, the last one of the rest."""
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [piece for piece in (*pieces, data) if piece]


@given(frames, cuts)
def test_frames_are_the_same_however_they_are_cut(
    sent: list[tuple[Key, bytes]], sizes: list[int]
) -> None:
    reader = FrameReader(Limits())
    reader.authenticated()
    found = []
    for piece in in_pieces(b"".join(frame(key, body) for key, body in sent), sizes):
        rest = memoryview(piece)
        while rest:
            buffer = reader.buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            found += [(one.key, bytes(one.body)) for one in reader.received(count)]
            rest = rest[count:]
    assert found == sent


@given(st.permutations(range(len(PUSHED) + 13)), cuts)
def test_events_are_the_same_however_their_bytes_are_cut(
    order: list[int], sizes: list[int]
) -> None:
    def events(pieces: list[int]) -> list[Event]:
        connection = open_connection()
        known = [*PUSHED, *asked(connection)]
        data = b"".join(known[number] for number in order)
        return [event for piece in in_pieces(data, pieces) for event in feed(connection, piece)]

    assert events(sizes) == events([])


@given(st.binary(max_size=400), st.booleans())
def test_rubbish_gives_nothing_but_the_protocol_error(rubbish: bytes, is_open: bool) -> None:
    connection = open_connection() if is_open else new_connection()
    with contextlib.suppress(ProtocolError):
        feed(connection, rubbish)
    assert (connection.opened is not None) is is_open


@given(st.integers(0, 65_535), st.integers(0, 3), st.binary(max_size=60), st.integers(0, 5))
@settings(max_examples=300)
def test_any_content_under_any_key_gives_nothing_but_the_protocol_error(
    key: int, version: int, body: bytes, step: int
) -> None:
    connection = new_connection()
    for one in handshake()[:step]:
        feed(connection, one)
    with contextlib.suppress(ProtocolError):
        feed(connection, frame(key, body, version))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(st.none() | texts, st.dictionaries(texts, texts, max_size=4), st.lists(texts, max_size=4))
def test_what_is_written_is_read_back(
    text: str | None, pairs: dict[str, str], names: list[str]
) -> None:
    data = (
        wire.string("text", text)
        + wire.string_map("pairs", pairs)
        + wire.string_list("names", names)
    )
    reader = Reader(data)
    assert reader.string() == text
    assert reader.string_map() == pairs
    assert reader.list_of(reader.text, 2) == names
    reader.finish()


def test_100_000_mutated_frames_and_chunks_give_only_the_protocol_error_at_little_memory() -> None:
    tried, growth = fuzz(seed=104_729, enough=lambda tried: tried >= 100_000)
    assert tried >= 100_000
    assert growth < GROWTH_MAX
