"""What a consumer promises about positions, credits, stored offsets and taking turns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count, islice
from types import FrameType
from typing import Any

import pytest

from sharding.errors import InvalidInput, Unreachable, is_retryable
from sharding.stream.consumer import ranges
from sharding.stream.consumer.consumer import Consumer
from sharding.stream.consumer.data_loss import without_gap
from sharding.stream.consumer.ranges import RangeReading, read_range
from sharding.stream.errors import (
    AuthenticationFailed,
    ConnectionLost,
    ConsumerInterrupted,
    DataLost,
    EndsTooEarly,
    NoAnswerInTime,
    NoLeader,
    NotActive,
    NotSupported,
    ProtocolError,
    StreamNotFound,
    StreamReplaced,
    refusal,
)
from sharding.stream.messages.codecs import Compression
from sharding.stream.messages.message import encode_data
from sharding.stream.options import ConsumerOptions, offset_spec
from sharding.stream.protocol.answers import Answer
from sharding.stream.protocol.commands import Subscribe
from sharding.stream.protocol.constants import Code, Limits, OffsetSpec
from tests.cluster.waiting import PATIENCE
from tests.support.chunks import SubBatch, chunk
from tests.support.fake_streams import A, FakeClient, FakeCluster, chunk_of


def consumer_of(cluster: FakeCluster, **options: Any) -> Consumer:
    return Consumer(["s"], cluster.access, ConsumerOptions(**({"offset": "first"} | options)))


def offsets(consumer: Consumer, count: int | None = None) -> list[int]:
    """Of messages, whose bodies must say the same."""
    found = []
    for message in islice(consumer.messages(timeout=0), count):
        assert message.offset is not None
        assert message.body == b"%d" % message.offset
        found.append(message.offset)
    return found


def offsets_of(handed_out: Iterator[Any]) -> Iterator[int]:
    """Of messages or batches."""
    for each in handed_out:
        yield from rows(iter([each])) if hasattr(each, "num_rows") else [each.offset]


def rows(batches: Iterator[Any]) -> list[int]:
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


def test_messages_and_batches_hold_everything_once_and_in_order() -> None:
    cluster = FakeCluster(3, 4, 5)
    assert offsets(consumer_of(cluster)) == list(range(12))
    assert rows(consumer_of(cluster).batches(timeout=0)) == list(range(12))


def test_iteration_that_was_left_goes_on_where_it_was() -> None:
    cluster = FakeCluster(10, 10)
    consumer = consumer_of(cluster)
    assert offsets(consumer, 3) == [0, 1, 2]
    assert offsets(consumer, 3) == [3, 4, 5]
    assert consumer.positions == {"s": 6}
    assert rows(consumer.batches(timeout=0)) == list(range(6, 20))


class Interrupted(Exception):
    """As an application's own time-out is one."""


class Interrupts:
    """Raises where Python lets a signal's exception in: as a call begins, or one of C has ended."""

    def __init__(self, moment: int) -> None:
        self._left = moment

    def __enter__(self) -> Interrupts:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def has_come(self) -> bool:
        return self._left < 0

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and "/sharding/" in frame.f_code.co_filename:
            self._left -= 1
            if self.has_come:
                sys.setprofile(None)
                raise Interrupted


@pytest.mark.parametrize("how", ["messages", "batches"])
def test_who_goes_on_after_an_interrupt_at_any_moment_misses_nothing_or_is_told(how: str) -> None:
    told = 0
    for moment in count():
        cluster = FakeCluster(2, 3)
        consumer, found = consumer_of(cluster, credits=2), list[int]()
        each: Any = None
        with Interrupts(moment) as interrupts:
            try:
                for each in getattr(consumer, how)(timeout=0):
                    found.extend(offsets_of(iter([each])))
            except Interrupted:
                pass
        if each is not None and (last := [*offsets_of(iter([each]))])[-1] not in found:
            found.extend(last)  # the loop has it, though what came between was the append
        try:
            found.extend(offsets_of(getattr(consumer, how)(timeout=0)))
        except ConsumerInterrupted:
            told += 1
            begin = consumer.positions.get("s", 0)
            assert begin == len(found)
            found.extend(offsets(consumer_of(cluster, offset=begin)))
        assert found == list(range(5)), moment
        if not interrupts.has_come:
            break
    assert moment > 100
    assert 0 < told < moment / 2


def test_chunk_that_begins_before_the_asked_offset_is_cut() -> None:
    consumer = consumer_of(FakeCluster(10, 10), offset=15)
    assert offsets(consumer) == [15, 16, 17, 18, 19]


@pytest.mark.parametrize("handed_out", [0, 1, 3, 4, 9])
def test_nothing_is_lost_or_repeated_when_the_connection_is(handed_out: int) -> None:
    cluster = FakeCluster(4, 4, 4)
    consumer = consumer_of(cluster, credits=2)
    found = offsets(consumer, handed_out)
    cluster.client.lose()
    cluster.run()
    cluster.stream.append(4)
    assert [*found, *offsets(consumer)] == list(range(16))
    assert consumer.recoveries[0] == 1


def test_chunks_that_an_old_connection_still_delivers_are_not_handed_out() -> None:
    cluster = FakeCluster(4)
    consumer = consumer_of(cluster)
    handler = cluster.client.handlers[0]
    cluster.client.lose()
    handler.on_chunk(chunk_of(4, [b"too late"]))
    cluster.run()
    assert offsets(consumer) == [0, 1, 2, 3]


def test_stream_that_left_the_node_is_read_from_another_one() -> None:
    cluster = FakeCluster(4)
    consumer = consumer_of(cluster)
    assert offsets(consumer) == [0, 1, 2, 3]
    for _ in range(8):
        lost = cluster.client
        lost.lose(refusal("Use", Code.STREAM_NOT_AVAILABLE, "s"))
        cluster.run()
        assert cluster.client.node not in (lost.node, A)
        assert cluster.suspected.pop() == "s"
        assert lost in cluster.released


def test_what_is_stored_while_the_first_connection_is_lost_is_not_skipped() -> None:
    cluster = FakeCluster(5)
    consumer = consumer_of(cluster, offset="next")
    cluster.client.lose()
    cluster.stream.append(3)
    cluster.run()
    assert offsets(consumer) == [5, 6, 7]


@pytest.mark.parametrize(
    ("offset", "expected"),
    [("first", 0), ("last", 5), ("next", 9), (7, 7), (OffsetSpec.at(3), 3)],
)
def test_consumer_begins_where_it_is_told(offset: Any, expected: int) -> None:
    cluster = FakeCluster(5, 4)
    consumer = consumer_of(cluster, offset=offset)
    cluster.stream.append(3)
    assert offsets(consumer, 1) == [expected]


def test_next_in_an_empty_stream_is_its_first_message() -> None:
    cluster = FakeCluster()
    consumer = consumer_of(cluster, offset="next")
    cluster.stream.append(2)
    assert offsets(consumer) == [0, 1]


def behind(client: FakeClient) -> None:
    """A replica that has the first chunk only."""
    client.visible = None if client.node == A else 1


@pytest.mark.parametrize(("offset", "expected"), [("last", [5, 6, 7, 8, 9]), ("next", [9])])
@pytest.mark.parametrize("single_active", [False, True])
def test_next_and_last_are_the_leaders_also_on_a_replica_that_is_behind(
    offset: str, expected: list[int], single_active: bool
) -> None:
    cluster = FakeCluster(5, 4)
    cluster.on_connect = behind
    options = {"name": "joe", "single_active": True} if single_active else {}
    consumer = consumer_of(cluster, offset=offset, **options)
    replica = cluster.client
    assert replica.node != A
    if single_active:
        replica.make_active(0, True)
        cluster.run()
    replica.visible = None
    cluster.stream.append(1)
    assert offsets(consumer) == expected


@pytest.mark.parametrize("problem", [Unreachable("down"), NoLeader("s"), NoAnswerInTime("frozen")])
def test_next_is_the_replicas_while_the_leader_is_away(problem: Exception) -> None:
    cluster = FakeCluster(5, 4)

    def connected(client: FakeClient) -> None:
        if client.node == A:
            raise problem

    cluster.on_connect = connected
    consumer = consumer_of(cluster, offset="next")
    assert cluster.suspected == ["s"]
    cluster.stream.append(1)
    assert offsets(consumer) == [9]


def test_next_is_the_replicas_while_a_new_leader_of_3_10_knows_less() -> None:
    cluster = FakeCluster(5, 4, version=(3, 10, 8))
    cluster.on_connect = lambda client: setattr(client, "hold_back", client.node == A)
    consumer = consumer_of(cluster, offset="next")
    cluster.stream.append(1)
    assert offsets(consumer) == [9]


def test_stream_made_again_is_noticed_by_who_began_on_a_replica_that_was_behind() -> None:
    cluster = FakeCluster(5, 4)
    cluster.on_connect = behind
    consumer = consumer_of(cluster, offset="next")
    cluster.stream.chunks.clear()
    cluster.stream.next_offset = 0
    cluster.stream.append(5)
    cluster.client.lose()
    cluster.run()
    with pytest.raises(StreamReplaced):
        offsets(consumer)


def test_time_to_begin_at_needs_a_time_zone() -> None:
    assert offset_spec(datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)) == OffsetSpec.since(2000)
    with pytest.raises(InvalidInput, match="time zone"):
        offset_spec(datetime(2026, 1, 1))


def test_slow_application_holds_no_more_chunks_than_credits() -> None:
    cluster = FakeCluster(*[1] * 20)
    consumer = consumer_of(cluster, credits=4)
    assert cluster.client.delivered == 4
    assert offsets(consumer, 1) == [0]
    assert cluster.client.delivered == 8, "four were taken, four more may wait"
    assert offsets(consumer) == list(range(1, 20))


def test_credit_of_chunks_taken_before_subscribe_was_answered_goes_back() -> None:
    cluster = FakeCluster(*[1] * 20)
    consumer = consumer_of(cluster, credits=4)
    found = offsets(consumer, 6)

    def take_early(client: FakeClient) -> None:
        client.before_answer = lambda: found.extend(offsets(consumer, 5))

    cluster.on_connect = take_early
    cluster.client.lose()
    cluster.run()
    assert [*found, *offsets(consumer)] == list(range(20))
    assert cluster.client.subscribed[0].credit == 4


def test_broker_that_sends_more_than_it_has_credit_for_ends_the_consumer() -> None:
    cluster = FakeCluster()
    consumer = consumer_of(cluster, credits=2)
    handler = cluster.client.handlers[0]
    for number in range(5):
        handler.on_chunk(chunk_of(number, [b"%d" % number]))
    with pytest.raises(ProtocolError, match="credit"):
        offsets(consumer)


def test_chunk_that_is_none_ends_the_consumer() -> None:
    cluster = FakeCluster()
    consumer = consumer_of(cluster)
    cluster.client.handlers[0].on_chunk(memoryview(b"no chunk"))
    with pytest.raises(ProtocolError):
        offsets(consumer)


def test_damaged_chunk_is_reported_and_never_skipped() -> None:
    cluster = FakeCluster()
    consumer = consumer_of(cluster)
    damaged = bytearray(chunk_of(0, [b"0"]))
    damaged[-1] ^= 1
    cluster.client.handlers[0].on_chunk(memoryview(bytes(damaged)))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="CRC"):
            offsets(consumer)
    with pytest.raises(ProtocolError, match="CRC"):
        next(consumer.batches(timeout=0))


def test_deleted_stream_ends_the_consumer_after_what_was_read() -> None:
    cluster = FakeCluster(4)
    consumer = consumer_of(cluster)
    assert offsets(consumer, 2) == [0, 1]
    cluster.client.lose(refusal("Use", Code.STREAM_NOT_AVAILABLE, "s"))
    cluster.no_stream = StreamNotFound("Metadata", Code.NO_SUCH_STREAM, "s")
    cluster.run()
    assert offsets(consumer, 2) == [2, 3]
    with pytest.raises(StreamNotFound):
        offsets(consumer)


@pytest.mark.parametrize("length", [0, 3, 20])
def test_stream_made_anew_is_told_from_the_one_that_was_read(length: int) -> None:
    cluster = FakeCluster(4, 4)
    consumer = consumer_of(cluster)
    assert offsets(consumer) == list(range(8))
    cluster.stream.chunks.clear()
    cluster.stream.next_offset = 0
    cluster.client.lose(refusal("Use", Code.STREAM_NOT_AVAILABLE, "s"))
    cluster.stream.append(*[1] * length)
    cluster.run(until=60)
    with pytest.raises(StreamReplaced, match="up to offset 8"):
        offsets(consumer)


@pytest.mark.parametrize("witness", ["deleted by retention", "not committed yet"])
def test_stream_is_not_called_another_one_without_proof(witness: str) -> None:
    cluster = FakeCluster(4, 4)
    consumer = consumer_of(cluster)
    assert offsets(consumer) == list(range(8))
    cluster.client.lose()
    cluster.stream.append(4)
    if witness == "deleted by retention":
        cluster.stream.truncate(2)
        cluster.run()
    else:
        cluster.on_connect = lambda client: setattr(client, "visible", 1)
        cluster.run(until=20)
        assert offsets(consumer) == []
        cluster.on_connect = lambda _: None
        cluster.run(until=40)
    assert offsets(consumer) == list(range(8, 12))


@pytest.mark.parametrize(
    "reason", [Unreachable("down"), AuthenticationFailed("Sasl", Code.AUTHENTICATION_FAILURE)]
)
def test_recovery_is_tried_until_its_time_is_over(reason: Exception) -> None:
    cluster = FakeCluster(4)
    consumer = consumer_of(cluster, recovery_timeout=60)
    cluster.client.lose()
    cluster.down = reason
    cluster.run(until=50)
    assert 8 < len(cluster.suspected) < 50, "pauses grow, and end at five seconds"
    cluster.down = None
    cluster.run(until=56)
    assert offsets(consumer) == [0, 1, 2, 3]
    cluster.client.lose()
    cluster.down = reason
    cluster.run(until=200)
    with pytest.raises(type(reason)):
        offsets(consumer)


def test_known_nodes_are_tried_while_nobody_says_where_the_stream_is() -> None:
    cluster = FakeCluster(4)
    consumer = consumer_of(cluster)
    lost = cluster.client
    cluster.no_stream = Unreachable("no node answers Metadata")
    lost.lose()
    cluster.run()
    assert cluster.client.node not in (lost.node, A)
    assert offsets(consumer) == [0, 1, 2, 3]


def test_consumer_that_can_not_begin_says_why_and_leaves_nothing_behind() -> None:
    cluster = FakeCluster(4)

    def refuse(client: FakeClient) -> None:
        client.refuses = refusal("Subscribe", Code.ACCESS_REFUSED, "s")

    cluster.on_connect = refuse
    with pytest.raises(Exception, match="access refused"):
        consumer_of(cluster)
    assert not cluster.client.handlers
    assert cluster.released == [cluster.client]


@pytest.mark.parametrize("at_once", [True, False])
def test_connection_lost_while_subscribing_is_noticed(at_once: bool) -> None:
    cluster = FakeCluster(4)

    def lose_first(client: FakeClient) -> None:
        if len(cluster.clients) == 1 and at_once:
            client.lose()
        client.loses_after_subscribe = len(cluster.clients) == 1

    cluster.on_connect = lose_first
    consumer = consumer_of(cluster)
    assert offsets(consumer) == [0, 1, 2, 3]
    assert len(cluster.clients) == 2


def test_close_unsubscribes_and_ends_the_iteration() -> None:
    cluster = FakeCluster(4)
    with consumer_of(cluster) as consumer:
        iteration = consumer.messages(timeout=0)
        next(iteration)
    assert cluster.client.unsubscribed
    assert cluster.released == [cluster.client]
    assert list(offsets_of(iteration)) == []
    assert offsets(consumer) == []


def test_closed_consumer_does_not_recover() -> None:
    cluster = FakeCluster(4)
    consumer = consumer_of(cluster)
    cluster.client.lose()
    consumer.close()
    cluster.run(until=100)
    assert len(cluster.clients) == 1


def test_consumer_whose_environment_was_closed_fails_instead_of_waiting() -> None:
    cluster = FakeCluster(4)
    consumer = consumer_of(cluster)
    cluster.closed = True
    cluster.client.lose()
    assert offsets(consumer, 4) == [0, 1, 2, 3]
    with pytest.raises(Unreachable, match="environment"):
        next(consumer.messages())


def test_messages_lost_to_retention_are_reported_and_then_skipped() -> None:
    cluster = FakeCluster(5, 5, 5)
    cluster.stream.truncate(2)
    consumer = consumer_of(cluster, offset=2)
    with pytest.raises(DataLost) as caught:
        offsets(consumer)
    assert (caught.value.asked, caught.value.found) == (2, 10)
    assert offsets(consumer) == list(range(10, 15))


def test_each_of_several_losses_is_reported_before_what_follows() -> None:
    cluster = FakeCluster(5)
    cluster.stream.skip(1)
    cluster.stream.append(5)
    cluster.stream.skip(9)
    cluster.stream.append(5)
    consumer = consumer_of(cluster)
    cluster.stream.truncate(2)  # when all of it is on its way
    losses = []
    for _ in range(2):
        with pytest.raises(DataLost) as caught:
            offsets(consumer)
        losses.append((caught.value.asked, caught.value.found))
    assert losses == [(5, 6), (11, 20)]
    assert offsets(consumer) == [*range(5), *range(6, 11), *range(20, 25)]


def test_what_one_node_had_deleted_is_reported_when_another_still_has_it() -> None:
    cluster = FakeCluster(5, 5, 5)
    has_it = cluster.stream.chunks.copy()
    consumer = consumer_of(cluster, offset=2, credits=2)
    cluster.client.lose()
    cluster.stream.truncate(2)
    cluster.run()  # the chunk at 10 waits
    cluster.client.lose()
    cluster.stream.chunks, cluster.stream.begins_at = has_it, 0
    taken = consumer._inbox.take(None)
    assert taken is not None
    assert taken.gaps == ((2, 10),)
    cluster.run()
    (subscription,) = consumer._subscriptions.values()
    _, loss = without_gap(taken, subscription, cluster.access, "raise")
    assert loss is not None
    assert (loss.asked, loss.found) == (2, 10)


def test_loss_may_be_allowed() -> None:
    cluster = FakeCluster(5, 5, 5)
    cluster.stream.truncate(2)
    consumer = consumer_of(cluster, offset=2, on_data_loss="skip")
    assert offsets(consumer) == list(range(10, 15))


def test_retention_that_overtakes_a_lost_connection_is_reported() -> None:
    cluster = FakeCluster(5, 5, 5)
    consumer = consumer_of(cluster, credits=2)
    assert offsets(consumer, 5) == [0, 1, 2, 3, 4]
    cluster.client.lose()
    cluster.stream.append(5)
    cluster.stream.truncate(3)
    cluster.run()
    assert offsets(consumer, 5) == [5, 6, 7, 8, 9]
    with pytest.raises(DataLost):
        offsets(consumer)


@pytest.mark.parametrize(("version", "gap"), [((4, 0, 5), 7), ((3, 10, 8), 1)])
def test_gaps_that_never_were_messages_are_no_loss(version: tuple[int, ...], gap: int) -> None:
    cluster = FakeCluster(version=version)
    cluster.stream.skip(gap)
    cluster.stream.append(2)
    cluster.stream.skip(gap)
    cluster.stream.append(2)
    found = offsets(consumer_of(cluster, offset=0))
    assert found == [gap, gap + 1, 2 * gap + 2, 2 * gap + 3]


def test_named_consumer_begins_after_its_stored_offset() -> None:
    cluster = FakeCluster(5, 5)
    with consumer_of(cluster, name="joe") as consumer:
        assert offsets(consumer, 7) == list(range(7))
        consumer.store_offset()
    assert cluster.stream.stored == {"joe": 6}
    assert offsets(consumer_of(cluster, name="joe")) == [7, 8, 9]


def test_offsets_are_stored_when_the_application_comes_back_for_more() -> None:
    cluster = FakeCluster(5, 5)
    consumer = consumer_of(cluster, name="joe", store_every_messages=3)
    iteration = consumer.messages(timeout=0)
    stored = []
    for _ in range(8):
        next(iteration)
        stored.append(cluster.stream.stored.get("joe"))
    assert stored == [None, None, None, 2, 2, 2, 5, 5]


def test_offsets_are_stored_after_some_time() -> None:
    cluster = FakeCluster(5, 5)
    consumer = consumer_of(cluster, name="joe", store_every_seconds=10)
    assert offsets(consumer, 2) == [0, 1]
    cluster.now = 9
    offsets(consumer, 1)
    assert not cluster.stream.stored
    cluster.now = 10
    offsets(consumer, 1)
    assert cluster.stream.stored == {"joe": 2}


def test_close_stores_what_was_dealt_with_and_not_what_is_in_hand() -> None:
    cluster = FakeCluster(5, 5)
    with consumer_of(cluster, name="joe", store_every_messages=100) as consumer:
        offsets(consumer, 4)
    assert cluster.stream.stored == {"joe": 2}


def test_what_is_in_hand_counts_for_who_says_so_and_is_not_taken_back_at_close() -> None:
    cluster = FakeCluster(5, 5)
    with consumer_of(cluster, name="joe", store_every_messages=100) as consumer:
        offsets(consumer, 4)
        consumer.store_offset()
        assert cluster.stream.stored == {"joe": 3}
    assert cluster.stream.stored == {"joe": 3}


@pytest.mark.parametrize("way", ["close", "store_offset"])
def test_offset_that_was_only_sent_is_made_sure_of(way: str) -> None:
    """It has no answer, and the broker drops it while the stream's leader is away."""
    cluster = FakeCluster(2)
    consumer = consumer_of(cluster, name="joe", store_every_messages=2)
    cluster.stream.loses_offsets = True
    assert offsets(consumer) == [0, 1]
    cluster.stream.loses_offsets = False
    assert cluster.stream.stored == {}
    getattr(consumer, way)()
    assert cluster.stream.stored == {"joe": 1}


def test_offset_that_is_known_to_be_stored_is_not_stored_again_at_close() -> None:
    cluster = FakeCluster(5)
    consumer = consumer_of(cluster, name="joe", store_every_messages=2)
    offsets(consumer, 3)
    consumer.store_offset()
    cluster.stream.stored.clear()
    consumer.close()
    assert cluster.stream.stored == {}


def test_turn_that_ends_at_the_last_message_of_a_chunk_is_not_gone_on_with() -> None:
    cluster = FakeCluster(2, 3)
    consumer = consumer_of(cluster, name="joe", single_active=True, store_every_messages=100)
    cluster.client.make_active(0, True)
    cluster.run()
    iteration = consumer.messages(timeout=0)
    assert list(offsets_of(islice(iteration, 2))) == [0, 1]
    cluster.client.make_active(0, False)
    cluster.run()
    assert list(offsets_of(iteration)) == []
    consumer.close()
    assert cluster.stream.stored["joe"] == 0, "the other one was in hand when the turn ended"


def test_message_that_the_application_failed_at_is_not_stored() -> None:
    cluster = FakeCluster(5, 5)

    def application() -> None:
        with consumer_of(cluster, name="joe", store_every_messages=100) as consumer:
            for message in consumer.messages(timeout=0):
                if message.offset == 4:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        application()
    assert cluster.stream.stored == {"joe": 3}


class TestSignals:
    """A handler runs on the thread that it interrupts, whose locks it can never wait for."""

    def cluster(self, ring: Callable[[object], object]) -> FakeCluster:
        """All consumers share a connection, whose lock is held while `ring` is called."""
        lock, holders = threading.Lock(), set[int]()

        def share(client: FakeClient) -> None:
            call = client.call

            def locked_call(request: Any, timeout: float | None = None) -> Answer:
                me = threading.get_ident()
                assert me not in holders, "the handler waits for what it interrupted"
                with lock:
                    holders.add(me)
                    try:
                        ring(request)
                        return call(request, timeout)
                    finally:
                        holders.remove(me)

            client.call = locked_call  # type: ignore[method-assign]

        cluster = FakeCluster(5)
        cluster.on_connect = share
        return cluster

    @pytest.mark.parametrize(
        ("interrupted", "closed"),
        [
            ("store_offset", "itself"),
            ("store_offset", "another one"),
            ("close", "itself"),
            ("close", "another one"),
            ("made", "another one"),
        ],
    )
    def test_handler_may_close_a_consumer_whatever_it_interrupts(
        self, interrupted: str, closed: str
    ) -> None:
        to_close: list[Consumer] = []

        def ring(_: object) -> None:
            if to_close:
                to_close.pop().close(PATIENCE)

        cluster = self.cluster(ring)
        one = consumer_of(cluster, name="joe", store_every_messages=100)
        other = consumer_of(cluster, name="jim", store_every_messages=100)
        for each in (one, other):
            assert offsets(each, 3) == [0, 1, 2]
        told = one if closed == "itself" else other
        to_close.append(told)
        if interrupted == "made":
            consumer_of(cluster, name="jack")
        else:
            getattr(one, interrupted)()
        assert told._ended.wait(PATIENCE)


class TestParts:
    """A chunk of ten messages that is handed out in batches of two."""

    def cluster(self, *sizes: int) -> FakeCluster:
        cluster = FakeCluster(*sizes)
        cluster.limits = Limits(batch_max=300)
        return cluster

    def test_large_chunk_comes_in_several_batches_and_costs_one_credit(self) -> None:
        cluster = self.cluster(10, 3)
        consumer = consumer_of(cluster, credits=2)
        iteration = consumer.batches(timeout=0)
        found = []
        for _ in range(5):
            found.append(next(iteration).column("offset").to_pylist())
            assert cluster.client.subscribed[0].credit == 2 - 1 + len(cluster.stream.chunks) - 1
        assert found == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        assert rows(iteration) == [10, 11, 12]

    def test_iteration_left_between_parts_goes_on_with_the_next(self) -> None:
        consumer = consumer_of(self.cluster(10, 3))
        assert rows(islice(consumer.batches(timeout=0), 2)) == [0, 1, 2, 3]
        assert consumer.positions == {"s": 4}
        assert offsets(consumer, 1) == [4]
        assert rows(islice(consumer.batches(timeout=0), 1)) == [5]
        assert rows(consumer.batches(timeout=0)) == list(range(6, 13))

    def test_parts_dealt_with_are_stored_and_a_restart_begins_in_the_middle_of_the_chunk(
        self,
    ) -> None:
        cluster = self.cluster(10, 3)
        with consumer_of(cluster, name="joe", store_every_messages=4) as consumer:
            stored = [
                cluster.stream.stored.get("joe") for _ in islice(consumer.batches(timeout=0), 4)
            ]
        assert stored == [None, None, 3, 3]
        assert cluster.stream.stored == {"joe": 5}  # what is in hand is not dealt with
        again = consumer_of(cluster, name="joe")
        assert rows(again.batches(timeout=0)) == list(range(6, 13))

    def test_connection_lost_between_parts_loses_and_repeats_nothing(self) -> None:
        cluster = self.cluster(10, 3)
        consumer = consumer_of(cluster)
        iteration = consumer.batches(timeout=0)
        assert rows(islice(iteration, 2)) == [0, 1, 2, 3]
        cluster.client.lose()
        cluster.run()
        assert rows(iteration) == list(range(4, 13))

    def test_turn_that_ends_between_parts_ends_the_chunk(self) -> None:
        cluster = self.cluster(10, 3)
        consumer = consumer_of(cluster, name="joe", single_active=True, store_every_messages=100)
        cluster.client.make_active(0, True)
        cluster.run()
        iteration = consumer.batches(timeout=0)
        assert rows(islice(iteration, 2)) == [0, 1, 2, 3]
        cluster.client.make_active(0, False)
        cluster.run()
        assert cluster.stream.stored["joe"] == 1
        assert rows(iteration) == []

    def test_close_between_parts_ends_the_iteration(self) -> None:
        consumer = consumer_of(self.cluster(10))
        iteration = consumer.batches(timeout=0)
        assert rows(islice(iteration, 1)) == [0, 1]
        consumer.close()
        assert rows(iteration) == []

    @pytest.mark.parametrize("of", ["batches", "messages"])
    def test_batch_that_is_too_large_is_refused_again_and_again_and_can_be_passed_on_purpose(
        self, of: str
    ) -> None:
        cluster = FakeCluster()
        cluster.limits = Limits(uncompressed_max=1000)
        small = encode_data(b"0")
        bomb = SubBatch([encode_data(bytes(2000))] * 3, Compression.GZIP)
        consumer = consumer_of(cluster, name="joe", store_every_messages=1)
        cluster.client.handlers[0].on_chunk(chunk([small, bomb, small]))
        refused = r"'s', offsets 1 to 3: .*Limits.uncompressed_max"
        for expected in ([0], [], []):
            found: list[int] = []
            with pytest.raises(ProtocolError, match=refused):
                found.extend(offsets_of(getattr(consumer, of)(timeout=0)))
            assert found == expected
        assert cluster.stream.stored == {"joe": 0}
        consumer.store_offset("s", 3)
        cluster.client.lose()
        going_on = consumer_of(cluster, name="joe")
        cluster.client.handlers[0].on_chunk(chunk([small, bomb, small]))
        assert list(offsets_of(getattr(going_on, of)(timeout=0))) == [4]


def lose_what_is_sent(cluster: FakeCluster, consumer: Consumer) -> None:
    """Deal with two messages, whose offset the consumer stores by itself while nobody keeps it."""
    cluster.stream.loses_offsets = True
    assert offsets(consumer, 3) == [0, 1, 2]
    cluster.stream.loses_offsets = False
    assert cluster.stream.stored == {}


class TestSingleActive:
    def consumer(self, cluster: FakeCluster, **options: Any) -> Consumer:
        return consumer_of(cluster, name="joe", single_active=True, **options)

    def test_consumer_that_is_not_active_gets_nothing(self) -> None:
        cluster = FakeCluster(5)
        consumer = self.consumer(cluster)
        assert offsets(consumer) == []
        assert consumer.active == ()

    def test_active_consumer_goes_on_after_what_another_one_stored_last(self) -> None:
        cluster = FakeCluster(5, 5)
        consumer = self.consumer(cluster)
        cluster.stream.stored["joe"] = 6
        cluster.client.make_active(0, True)
        assert offsets(consumer) == [], "what is stored is not known yet"
        cluster.run()
        assert consumer.active == ("s",)
        assert offsets(consumer) == [7, 8, 9]

    def test_broker_is_told_where_to_go_on_once_that_was_looked_up(self) -> None:
        cluster = FakeCluster(5, 5)
        self.consumer(cluster)
        cluster.stream.stored["joe"] = 6
        cluster.client.make_active(0, True)
        assert cluster.client.answered == []
        cluster.run()
        assert cluster.client.answered == [(True, OffsetSpec.at(7))]

    @pytest.mark.parametrize(("sizes", "place"), [((5, 5), 10), ((), 0)])
    @pytest.mark.parametrize("offset", ["next", "last"])
    def test_next_and_last_are_the_same_place_for_who_takes_over(
        self, sizes: tuple[int, ...], place: int, offset: str
    ) -> None:
        cluster = FakeCluster(*sizes)
        if sizes and offset == "last":
            place = 5
        first = self.consumer(cluster, offset=offset)
        one = cluster.client
        one.make_active(0, True)
        cluster.run()
        assert one.answered == [(True, OffsetSpec.at(place))]
        first.close()  # nothing is stored of what it may have handed out
        cluster.stream.append(5)
        self.consumer(cluster, offset=offset)
        cluster.client.make_active(0, True)
        cluster.run()
        assert cluster.client.answered == [(True, OffsetSpec.at(place))]

    def test_consumer_made_inactive_stores_first_and_nothing_more_after_it(self) -> None:
        cluster = FakeCluster(5, 5)
        consumer = self.consumer(cluster, store_every_messages=100)
        cluster.client.make_active(0, True)
        cluster.run()
        assert offsets(consumer, 3) == [0, 1, 2]
        cluster.client.make_active(0, False)
        assert offsets(consumer) == []
        assert len(cluster.client.answered) == 1, "nobody else is let in yet"
        cluster.run()
        assert len(cluster.client.answered) == 2
        assert cluster.stream.stored == {"joe": 2}, "it came back for more in the meantime"
        cluster.stream.stored["joe"] = 8  # by another one
        consumer.close()
        assert cluster.stream.stored == {"joe": 8}

    def test_who_lost_the_turn_can_not_store(self) -> None:
        cluster = FakeCluster(5, 5)
        consumer = self.consumer(cluster)
        cluster.client.make_active(0, True)
        cluster.run()
        assert offsets(consumer, 3) == [0, 1, 2]
        cluster.client.make_active(0, False)
        for given in ((), ("s", 2)):
            with pytest.raises(NotActive, match="another consumer"):
                consumer.store_offset(*given)
        consumer.store_offset()  # there is nothing of its own any more
        assert cluster.stream.stored == {}

    def test_offset_that_was_only_sent_is_made_sure_of_before_the_turn_ends(self) -> None:
        cluster = FakeCluster(5)
        consumer = self.consumer(cluster, store_every_messages=2)
        cluster.client.make_active(0, True)
        cluster.run()
        lose_what_is_sent(cluster, consumer)
        cluster.client.make_active(0, False)
        cluster.run()
        assert cluster.stream.stored == {"joe": 1}

    def test_offset_before_one_that_was_only_sent_makes_sure_of_that(self) -> None:
        cluster = FakeCluster(5)
        consumer = self.consumer(cluster, store_every_messages=2)
        cluster.client.make_active(0, True)
        cluster.run()
        lose_what_is_sent(cluster, consumer)
        consumer.store_offset("s", 0)
        assert cluster.stream.stored == {"joe": 1}

    def test_offset_of_a_turn_does_not_go_back(self) -> None:
        cluster = FakeCluster(5, 5)
        consumer = self.consumer(cluster)
        cluster.client.make_active(0, True)
        cluster.run()
        offsets(consumer, 8)
        consumer.store_offset("s", 6)
        consumer.store_offset("s", 4)
        assert cluster.stream.stored == {"joe": 6}

    def test_iteration_under_way_stops_when_the_turn_ends(self) -> None:
        cluster = FakeCluster(5, 5)
        consumer = self.consumer(cluster)
        cluster.client.make_active(0, True)
        cluster.run()
        iteration = consumer.messages(timeout=0)
        assert next(iteration).offset == 0
        cluster.client.make_active(0, False)
        assert [message.offset for message in iteration] == []

    def test_consumer_made_active_again_repeats_nothing_and_keeps_its_credit(self) -> None:
        cluster = FakeCluster(5, 5, 5)
        consumer = self.consumer(cluster, credits=2)
        cluster.client.make_active(0, True)
        cluster.run()
        assert offsets(consumer, 3) == [0, 1, 2]
        cluster.client.make_active(0, False)
        cluster.stream.stored["joe"] = 1
        cluster.client.make_active(0, True)
        cluster.run()
        assert offsets(consumer) == list(range(3, 15))
        assert cluster.client.subscribed[0].credit == 2

    def test_answer_that_comes_too_late_does_not_move_the_turn_that_follows(self) -> None:
        cluster = FakeCluster(5, 5)
        consumer = self.consumer(cluster, offset="first")
        cluster.client.make_active(0, True)
        cluster.client.make_active(0, False)  # before it was known where to go on
        cluster.client.make_active(0, True)
        (_, too_late), *cluster.jobs = cluster.jobs
        too_late()
        cluster.stream.append(5)
        cluster.run()
        assert offsets(consumer) == list(range(15))

    @pytest.mark.parametrize("arrives", ["before", "after"])
    def test_chunk_of_an_older_turn_is_neither_handed_out_nor_hides_what_comes_before_it(
        self, arrives: str
    ) -> None:
        cluster = FakeCluster(5, 5)
        consumer = self.consumer(cluster, offset="first")
        cluster.client.make_active(0, True)
        cluster.run()
        assert offsets(consumer, 3) == [0, 1, 2]
        cluster.client.make_active(0, True)  # once more
        if arrives == "before":
            cluster.stream.append(5)
        else:
            cluster.client.on_the_way = [chunk_of(10, [b"10", b"11", b"12", b"13", b"14"])]
        cluster.run()
        if arrives == "after":
            cluster.stream.append(5)
        assert offsets(consumer) == list(range(3, 15))
        assert cluster.client.subscribed[0].credit == ConsumerOptions().credits

    @pytest.mark.parametrize("offset", ["first", datetime(1970, 1, 1, tzinfo=UTC)])
    def test_chunk_of_an_older_turn_is_known_where_only_the_broker_knows_the_place(
        self, offset: Any
    ) -> None:
        cluster = FakeCluster(5, 5)
        consumer = self.consumer(cluster, offset=offset)
        cluster.client.on_the_way = [chunk_of(5, [b"5", b"6", b"7", b"8", b"9"])]
        cluster.client.make_active(0, True)
        cluster.run()
        assert offsets(consumer) == list(range(10))

    def test_turn_may_begin_in_a_gap_and_with_filters(self) -> None:
        cluster = FakeCluster(5)
        cluster.stream.skip(1)
        cluster.stream.append(5)
        consumer = self.consumer(cluster, filter_values=("emea",))
        cluster.stream.stored["joe"] = 4
        cluster.client.make_active(0, True)
        cluster.run()
        assert offsets(consumer) == [6, 7, 8, 9, 10]
        asked = cluster.client.asked(Subscribe)[-1]
        assert (asked.offset, asked.properties["filter.0"]) == (OffsetSpec.at(5), "emea"), (
            "whether there was a chunk that this consumer should have got"
        )

    @pytest.mark.parametrize(("stored", "handed_out"), [(4, []), (3, [4])])
    def test_gap_is_not_asked_about_when_the_turn_is_over(
        self, stored: int, handed_out: list[int]
    ) -> None:
        cluster = FakeCluster(5)
        cluster.stream.skip(1)
        cluster.stream.append(5)
        cluster.stream.stored["joe"] = stored
        consumer = self.consumer(cluster)
        cluster.client.make_active(0, True)
        cluster.run()
        client = cluster.client

        def lose(*_: object, **__: object) -> Any:
            client.lose()  # and no connection comes in its place
            cluster.now += 1_000_000.0  # as after a long sleep
            raise ConnectionLost("lost")

        client.call = lose  # type: ignore[method-assign]
        assert offsets(consumer) == handed_out
        assert client.closed, "it was asked"

    def test_attempt_that_failed_leaves_no_turn_behind(self) -> None:
        cluster = FakeCluster(5)

        def lose_the_first(client: FakeClient) -> None:
            def begin_a_turn() -> None:
                client.make_active(0, True)
                cluster.run()

            if client is cluster.clients[0]:
                client.before_answer = begin_a_turn
                client.loses_after_subscribe = True

        cluster.on_connect = lose_the_first
        consumer = self.consumer(cluster, offset="first")
        assert len(cluster.clients) == 2
        assert consumer.active == ()

    def test_what_was_in_hand_when_the_turn_was_lost_is_not_stored_in_the_next_one(self) -> None:
        cluster = FakeCluster(1)
        consumer = self.consumer(cluster)
        cluster.client.make_active(0, True)
        cluster.run()
        iteration = consumer.messages(timeout=0)
        assert next(iteration).offset == 0
        cluster.client.make_active(0, False)
        cluster.run()
        cluster.client.hold_back = True  # nothing comes in the next turn
        cluster.stream.append(9)
        cluster.stream.stored["joe"] = 9  # by another one
        cluster.client.make_active(0, True)
        cluster.run()
        assert list(iteration) == []
        with pytest.raises(NotActive):
            consumer.store_offset()
        assert cluster.stream.stored == {"joe": 9}

    def test_turn_does_not_end_while_an_offset_is_being_stored(self) -> None:
        cluster = FakeCluster(5)
        consumer = self.consumer(cluster, offset="first")
        client = cluster.client
        client.make_active(0, True)
        cluster.run()
        assert offsets(consumer, 3) == [0, 1, 2]
        send = client.send

        def step_down_first(frame: bytes, timeout: float | None = None) -> None:
            client.send = send  # type: ignore[method-assign]
            client.make_active(0, False)
            assert len(client.answered) == 1, "nobody else is let in yet"
            send(frame, timeout)

        client.send = step_down_first  # type: ignore[method-assign]
        consumer.store_offset()
        cluster.run()
        assert cluster.stream.stored == {"joe": 2}
        assert len(client.answered) == 2

    def test_lost_connection_ends_the_turn(self) -> None:
        cluster = FakeCluster(5, 5)
        consumer = self.consumer(cluster)
        cluster.client.make_active(0, True)
        cluster.run()
        assert offsets(consumer, 2) == [0, 1]
        cluster.client.lose()
        cluster.run()
        assert offsets(consumer) == []
        cluster.stream.stored["joe"] = 7
        cluster.client.make_active(0, True)
        cluster.run()
        assert offsets(consumer) == [8, 9]

    def test_old_brokers_are_refused_in_one_sentence(self) -> None:
        with pytest.raises(NotSupported, match=r"3\.11 or later, not 3\.10\.8"):
            self.consumer(FakeCluster(5, version=(3, 10, 8)))


@pytest.mark.parametrize(
    "options",
    [
        {"single_active": True},
        {"store_every_messages": 5},
        {"store_every_seconds": 0, "name": "joe"},
        {"credits": 1},
        {"name": "x" * 256},
        {"name": ""},
        {"offset": "begin"},
        {"offset": -1},
        {"offset": True},
        {"match_unfiltered": True},
        {"filter_values": "text"},
        {"on_data_loss": "ignore"},
        {"recovery_timeout": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        ConsumerOptions(**options)


def test_filters_and_names_are_told_to_the_broker() -> None:
    options = ConsumerOptions(
        name="joe", single_active=True, filter_values=("a", "b"), match_unfiltered=True
    )
    assert options.subscription_properties("invoices") == {
        "single-active-consumer": "true",
        "name": "joe",
        "super-stream": "invoices",
        "filter.0": "a",
        "filter.1": "b",
        "match-unfiltered": "true",
    }


class TestRange:
    def reading(self, cluster: FakeCluster, first: int, end: int, **options: Any) -> RangeReading:
        ticks = count()
        # Time passes with each look at the clock, so a silence is noticed.
        access = replace(cluster.access, clock=lambda: next(ticks) / 100)
        return read_range(access, "s", first, end, **options)

    def read(self, cluster: FakeCluster, first: int, end: int, **options: Any) -> list[int]:
        return rows(self.reading(cluster, first, end, **options))

    @pytest.mark.parametrize(("first", "end"), [(0, 15), (3, 12), (5, 10), (7, 8), (4, 4)])
    def test_range_holds_exactly_its_rows(self, first: int, end: int) -> None:
        assert self.read(FakeCluster(5, 5, 5), first, end) == list(range(first, end))

    def test_range_of_large_chunks_comes_in_parts(self) -> None:
        cluster = FakeCluster(10, 10)
        cluster.limits = Limits(batch_max=300)
        found = [rows(iter([batch])) for batch in self.reading(cluster, 3, 12)]
        assert found == [[3], [4, 5], [6, 7], [8, 9], [10, 11]]

    def test_range_that_goes_past_the_stream_ends_with_it(self) -> None:
        assert self.read(FakeCluster(5, 5), 3, 1000) == list(range(3, 10))
        assert self.read(FakeCluster(5, 5), 10, 1000) == []
        assert self.read(FakeCluster(), 0, 1000) == []

    def test_range_that_ends_in_a_gap_does_not_hang(self) -> None:
        cluster = FakeCluster(5)
        cluster.stream.skip(3)
        assert self.read(cluster, 0, 7) == list(range(5))
        cluster.stream.append(2)
        assert self.read(cluster, 0, 7) == list(range(5))
        assert self.read(cluster, 5, 8) == []

    def test_replica_that_is_behind_ends_no_range_early(self) -> None:
        cluster = FakeCluster(5, 5)

        def connected(client: FakeClient) -> None:
            replica = cluster.clients[0]
            replica.visible = 1
            if client.node == A:  # by the time the leader was asked, the replica has it all
                replica.visible = None
                replica.deliver()

        cluster.on_connect = connected
        assert self.read(cluster, 0, 10) == list(range(10))

    @staticmethod
    def elected(cluster: FakeCluster, looks: int) -> None:
        """The leader delivers nothing to so many connections: it was just elected, and does not
        know yet what is stored. Until then the replica has one chunk."""
        left = iter(range(looks))

        def connected(client: FakeClient) -> None:
            replica = cluster.clients[0]
            if client is replica:
                client.visible = 1
            elif next(left, None) is not None:
                client.visible = 0
            else:
                replica.visible = None
                replica.deliver()

        cluster.on_connect = connected

    def test_new_leader_that_calls_its_stream_empty_ends_no_range_that_is_known_to_be_there(
        self,
    ) -> None:
        cluster = FakeCluster(5, 5, version=(3, 10, 20))
        self.elected(cluster, looks=2)
        assert self.read(cluster, 0, 10, known_end=10) == list(range(10))

    @pytest.mark.parametrize(("timeout", "doubt"), [(2, 1_000), (1_000, 2)])
    def test_stream_that_stays_empty_though_it_had_messages_may_be_asked_again_later(
        self, monkeypatch: pytest.MonkeyPatch, timeout: float, doubt: float
    ) -> None:
        monkeypatch.setattr(ranges, "DOUBT", doubt)
        cluster = FakeCluster(5, 5, version=(3, 10, 20))
        self.elected(cluster, looks=1_000)
        with pytest.raises(EndsTooEarly, match="is said to be empty, but had messages up") as told:
            self.read(cluster, 0, 10, known_end=10, timeout=timeout)
        assert is_retryable(told.value)

    @pytest.mark.parametrize("sizes", [(), (5,)])
    def test_range_of_a_stream_that_is_shorter_than_is_known_ends_with_an_error(
        self, sizes: tuple[int, ...]
    ) -> None:
        """These say what they know, so they need not be asked again."""
        reading = self.reading(FakeCluster(*sizes), 0, 7, known_end=900)
        with pytest.raises(EndsTooEarly, match=r"had messages up to offset 7"):
            rows(reading)

    def test_known_end_is_no_matter_where_retention_has_passed_it(self) -> None:
        cluster = FakeCluster(5, 5, 5)
        cluster.stream.truncate(2)
        with pytest.raises(DataLost):
            self.read(cluster, 0, 10, known_end=10)
        assert self.read(cluster, 0, 10, known_end=10, on_data_loss="skip") == []
        cluster.stream.chunks.clear()
        with pytest.raises(DataLost):
            self.read(cluster, 0, 10, known_end=10)
        assert self.read(cluster, 0, 10, known_end=10, on_data_loss="skip") == []

    def test_rows_lost_to_retention_are_reported(self) -> None:
        cluster = FakeCluster(5, 5, 5)
        cluster.stream.truncate(2)
        with pytest.raises(DataLost) as caught:
            self.read(cluster, 2, 7)
        assert (caught.value.asked, caught.value.found) == (2, 10)
        assert self.read(cluster, 2, 12, on_data_loss="skip") == [10, 11]

    def test_reader_leaves_nothing_behind(self) -> None:
        cluster = FakeCluster(5, 5)
        reading = self.reading(cluster, 0, 10)
        next(reading)
        reading.close()
        assert not cluster.clients[0].handlers
        assert len(cluster.released) == len(cluster.clients)

    def test_rows_are_read_from_a_replica(self) -> None:
        cluster = FakeCluster(5, 5)
        self.read(cluster, 0, 10)
        assert [client.node for client in cluster.clients if client.asked(Subscribe)] != [A]
        assert cluster.clients[0].node != A

    def test_reader_says_which_node_it_read_from(self) -> None:
        cluster = FakeCluster(5, 5)
        reading = self.reading(cluster, 0, 1000)  # past the end: the leader is asked too
        assert reading.node is None
        assert rows(reading) == list(range(10))
        assert reading.node == cluster.clients[0].node != A
        assert A in [client.node for client in cluster.clients]

    def test_nobody_is_asked_for_the_end_while_rows_come(self) -> None:
        cluster = FakeCluster(5, 5, 5)
        assert self.read(cluster, 0, 12) == list(range(12))
        assert [len(client.asked(Subscribe)) for client in cluster.clients] == [1]

    def test_stream_deleted_in_a_silence_ends_the_reading(self) -> None:
        cluster = FakeCluster(5)
        reading = self.reading(cluster, 0, 10)
        next(reading)
        cluster.client.lose(refusal("Use", Code.STREAM_NOT_AVAILABLE, "s"))
        cluster.no_stream = StreamNotFound("Metadata", Code.NO_SUCH_STREAM, "s")
        found_out_later = threading.Timer(0.1, cluster.run)
        found_out_later.start()
        with pytest.raises(StreamNotFound):
            next(reading)
        found_out_later.join()
