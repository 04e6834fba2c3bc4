"""Bytes become events, in order, once; requests wait for their own answer and no other."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from sharding import InvalidInput
from sharding.stream.errors import NotSupported, ProtocolError, TooManyRequests
from sharding.stream.protocol import session as module
from sharding.stream.protocol.answers import Answer
from sharding.stream.protocol.commands import (
    Create,
    Partitions,
    ResolveOffsetSpec,
    Route,
    StreamStats,
    close_answer_frame,
)
from sharding.stream.protocol.constants import FIRST, Key, Limits
from sharding.stream.protocol.events import (
    ActivityAsked,
    Answered,
    ChunkArrived,
    ClosedByPeer,
    Confirmed,
    CreditRefused,
    Event,
    PublishRefused,
    StreamChanged,
    ToSend,
)
from sharding.stream.protocol.session import Connection
from sharding.stream.protocol.wire import Reader
from tests.support.stream_frames import (
    ANSWERED,
    CHUNK,
    CLOSE,
    OK,
    PUSHED,
    answer,
    asked,
    feed,
    frame,
    new_connection,
    open_connection,
    strings,
)

EXPECTED: list[Event] = [
    Confirmed(4, (1, 2, 2**64 - 1)),
    PublishRefused(4, ((1, 18), (2, 6))),
    ChunkArrived(3, memoryview(CHUNK)),
    CreditRefused(3, 4),
    StreamChanged("invoices-0", 6),
    ActivityAsked(99, 3, True),
]


def test_every_frame_a_broker_sends_unasked_is_an_event() -> None:
    assert feed(open_connection(), b"".join(PUSHED)) == EXPECTED


def test_events_are_the_same_byte_by_byte() -> None:
    connection = open_connection()
    events = [
        event for byte in b"".join(PUSHED) + CLOSE for event in feed(connection, bytes([byte]))
    ]
    last = [ToSend(close_answer_frame(5)), ClosedByPeer(13, "unknown frame")]
    assert events == [*EXPECTED, *last]


@pytest.mark.parametrize("good", [*PUSHED[:-1], CLOSE], ids=lambda one: one[:8].hex())
def test_a_frame_cut_short_or_with_more_than_its_content_is_a_protocol_error(good: bytes) -> None:
    key, body = struct.unpack_from(">H", good, 4)[0], good[8:]
    if key == Key.DELIVER:
        body = b""  # what a chunk holds is read elsewhere; only its subscription is here
    for end in range(len(body)):
        with pytest.raises(ProtocolError):
            feed(open_connection(), frame(key, body[:end]))
    if key != Key.DELIVER:
        with pytest.raises(ProtocolError):
            feed(open_connection(), frame(key, body + b"\0"))


def test_answers_find_their_requests_in_any_order() -> None:
    connection = open_connection()
    answers = asked(connection)
    events = feed(connection, b"".join(reversed(answers)))
    found = [event.request for event in events if isinstance(event, Answered)]
    assert found == [request for request, _ in reversed(ANSWERED)]


@pytest.mark.parametrize("responds", [True, False])
def test_route_and_partitions_may_be_answered_without_the_response_bit(responds: bool) -> None:
    connection = open_connection("3.10.8")
    for request in (Route("key", "invoices"), Partitions("invoices")):
        correlation_id, _ = connection.request(request)
        data = bytearray(answer(request.key, correlation_id, strings("invoices-0")))
        if not responds:
            data[4] &= 0x7F
        (event,) = feed(connection, bytes(data))
        assert isinstance(event, Answered)
        assert event.answer == request.answer(Reader(strings("invoices-0")))


def test_an_answer_finds_its_request_and_only_once() -> None:
    connection = open_connection()
    correlation_id, _ = connection.request(Create("s"))
    assert feed(connection, answer(Key.CREATE, correlation_id)) == [
        Answered(correlation_id, Create("s"), Answer(1))
    ]
    with pytest.raises(ProtocolError, match="nobody waits"):
        feed(connection, answer(Key.CREATE, correlation_id))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda correlation_id: answer(Key.CREATE, correlation_id + 1),
        lambda correlation_id: answer(Key.DELETE, correlation_id),
        lambda correlation_id: frame(Key.CREATE, struct.pack(">I", correlation_id) + OK),
    ],
    ids=["another id", "another key", "no response bit"],
)
def test_an_answer_nobody_waits_for_is_a_protocol_error(wrong: Callable[[int], bytes]) -> None:
    connection = open_connection()
    correlation_id, _ = connection.request(Create("s"))
    with pytest.raises(ProtocolError):
        feed(connection, wrong(correlation_id))


def test_events_come_before_the_error_and_the_error_stays() -> None:
    connection = open_connection()
    assert feed(connection, PUSHED[0] + frame(999, b"")) == EXPECTED[:1]
    for _ in range(2):
        with pytest.raises(ProtocolError, match="0x03e7"):
            connection.buffer()


def test_nothing_is_read_after_close() -> None:
    connection = open_connection()
    events = feed(connection, CLOSE + PUSHED[0] + frame(999, b""))
    assert [type(event) for event in events] == [ToSend, ClosedByPeer]


@pytest.mark.parametrize("request_", [ResolveOffsetSpec("s", FIRST), StreamStats("s")])
def test_what_the_broker_is_too_old_for_is_not_sent(
    request_: ResolveOffsetSpec | StreamStats,
) -> None:
    with pytest.raises(NotSupported, match=r"not known to the broker, RabbitMQ 3\.10\.8"):
        open_connection("3.10.8").request(request_)


def test_a_request_larger_than_agreed_is_not_sent() -> None:
    connection = open_connection(limits=Limits(frame_max=10_000))
    with pytest.raises(InvalidInput, match="frame_max of 10000 bytes"):
        connection.request(Create("s", {"a": "x" * 10_000}))


def test_a_frame_larger_than_our_limit_is_refused() -> None:
    connection = open_connection(limits=Limits(frame_max=10_000))
    with pytest.raises(ProtocolError, match="frame_max = 10000"):
        feed(connection, struct.pack(">IHH", 10_001, Key.PUBLISH_CONFIRM, 1))


def test_a_broker_need_not_keep_to_the_size_that_it_wants_of_us() -> None:
    connection = open_connection(frame_max=4_096)
    assert connection.opened is not None
    assert connection.opened.frame_max == 4_096
    ids = tuple(range(1_000))  # 8,009 bytes: brokers put into one frame what they confirm at once
    body = struct.pack(f">BI{len(ids)}Q", 4, len(ids), *ids)
    assert feed(connection, frame(Key.PUBLISH_CONFIRM, body)) == [Confirmed(4, ids)]


def test_no_request_goes_out_before_the_connection_is_open() -> None:
    with pytest.raises(ProtocolError, match="not open"):
        new_connection().request(Create("s"))


def test_how_many_requests_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    connection = open_connection()
    for _ in range(3):
        last, _ = connection.request(Create("s"))
    with pytest.raises(TooManyRequests):
        connection.request(Create("s"))
    feed(connection, answer(Key.CREATE, last))
    connection.request(Create("s"))


def test_correlation_ids_go_round_and_spare_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CORRELATION_IDS", 8)
    connection: Connection = open_connection()
    first = [connection.request(Create("s"))[0] for _ in range(4)]
    feed(connection, answer(Key.CREATE, first[1]))
    others = [connection.request(Create("s"))[0] for _ in range(4)]
    waiting = [one for one in first if one != first[1]] + others
    assert len(set(waiting)) == 7


def test_a_confirm_of_thousands_is_one_event() -> None:
    ids = tuple(range(10_000, 18_000))
    body = struct.pack(f">BI{len(ids)}Q", 4, len(ids), *ids)
    assert feed(open_connection(), frame(Key.PUBLISH_CONFIRM, body)) == [Confirmed(4, ids)]
