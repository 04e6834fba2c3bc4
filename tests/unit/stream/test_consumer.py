"""What a consumer promises about positions, credits, stored offsets and taking turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count, islice
from typing import Any

import pytest

from sharding.errors import InvalidInput, Unreachable
from sharding.stream.consumer.consumer import Consumer
from sharding.stream.consumer.ranges import RangeReading, read_range
from sharding.stream.errors import (
    AuthenticationFailed,
    DataLost,
    NotActive,
    NotSupported,
    ProtocolError,
    StreamNotFound,
    StreamReplaced,
    refusal,
)
from sharding.stream.options import ConsumerOptions, offset_spec
from sharding.stream.protocol.commands import Subscribe
from sharding.stream.protocol.constants import Code, OffsetSpec
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
