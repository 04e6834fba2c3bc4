"""Stream groups on a real broker: shares, offsets, failures, dead letters, wrong input."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pika
import pytest

from sharding.errors import InvalidInput
from sharding.groups import (
    BatchFailed,
    Delivery,
    GroupFailed,
    GroupOptions,
    Retry,
    StreamConsumerGroup,
    StreamGroupOptions,
)
from sharding.groups.streams.worker import members_stream
from sharding.stream import Message, StreamEnvironment, StreamNotFound
from sharding.stream.errors import NotSupported
from tests.cluster import Cluster, wait_until
from tests.cluster.pool import Pool
from tests.cluster.waiting import PATIENCE
from tests.conftest import OLDEST_VERSION
from tests.support import patient
from tests.support.streams import environment_of, fresh_stream, stream_in, super_stream_in

pytestmark = pytest.mark.cluster

QUICK = Retry(attempts=3, first_delay=0.01, max_delay=0.05)
PARTITIONS = 4


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(cluster, **patient.STREAMS) as opened:
        if opened.server_version < (3, 11):
            pytest.skip("consumer groups over streams need RabbitMQ 3.11")
        yield opened


@pytest.fixture
def invoices(environment: StreamEnvironment) -> Iterator[str]:
    """A super stream, and nothing left of its groups afterwards."""
    with super_stream_in(environment, PARTITIONS) as name:
        yield name
        forget(environment, name)


@pytest.fixture
def events(environment: StreamEnvironment) -> Iterator[str]:
    with stream_in(environment) as name:
        yield name
        forget(environment, name)


def forget(environment: StreamEnvironment, name: str) -> None:
    for made in (f"{name}.dead", members_stream(name)):
        environment.delete_stream(made, missing_ok=True)


def publish(
    environment: StreamEnvironment, name: str, count: int, keys: int = 20, first: int = 0
) -> None:
    with environment.producer(name) as producer:
        for number in range(first, first + count):
            producer.send(b"%d" % number, key=f"key-{number % keys}")
        producer.flush(timeout=PATIENCE).raise_for_failures()


class Log:
    """Handled messages, in order, from any thread."""

    def __init__(self, fail: Callable[[Delivery], None] = lambda _: None) -> None:
        self.handled: list[Delivery] = []
        self._fail = fail

    def __call__(self, delivery: Delivery) -> None:
        self._fail(delivery)
        self.handled.append(delivery)

    def numbers(self) -> list[int]:
        return [int(delivery.body) for delivery in self.handled]

    def wait_for(self, count: int) -> None:
        wait_until(
            lambda: len(self.handled) >= count, explain=lambda: f"{len(self.handled)} handled"
        )

    def in_order(self) -> bool:
        by_key: dict[str, list[int]] = defaultdict(list)
        for delivery in self.handled:
            by_key[delivery.key].append(int(delivery.body))
        return all(numbers == sorted(set(numbers)) for numbers in by_key.values())


def group_of(
    environment: StreamEnvironment,
    name: str,
    handler: Callable[[Any], object],
    group: str = "billing",
    **options: Any,
) -> StreamConsumerGroup:
    options.setdefault("retry", QUICK)
    chosen = patient.stream_group(**options)
    return StreamConsumerGroup(environment, name, handler, group=group, options=chosen)


def loads(groups: list[StreamConsumerGroup]) -> list[int]:
    return sorted(len(group.shards) for group in groups)


def settle(groups: list[StreamConsumerGroup], expected: list[int]) -> None:
    wait_until(lambda: loads(groups) == expected, explain=lambda: f"{loads(groups)}")


def dead_letters(environment: StreamEnvironment, name: str, count: int) -> list[Message]:
    wait_until(lambda: environment.exists(f"{name}.dead"))
    with environment.consumer(f"{name}.dead", offset="first", **patient.READER) as consumer:
        found = []
        for message in consumer.messages(timeout=PATIENCE):
            found.append(message)
            if len(found) == count:
                break
    return found


def test_workers_that_start_together_share_evenly_and_hand_over_without_repeating(
    environment: StreamEnvironment, invoices: str
) -> None:
    log = Log()
    groups = [group_of(environment, invoices, log, parallelism=2) for _ in range(3)]
    with ExitStack() as open_ones:
        starting = [threading.Thread(target=group.start) for group in groups]
        for thread in starting:
            thread.start()
        for group, thread in zip(groups, starting, strict=True):
            thread.join()
            open_ones.callback(group.stop)
        publish(environment, invoices, 500)
        settle(groups, [1, 1, 2])
        held = [group.shards for group in groups]
        assert frozenset().union(*held) == set(environment.partitions(invoices))
        publish(environment, invoices, 500, first=500)
        assert groups[0].stop()
        publish(environment, invoices, 500, first=1000)
        settle(groups[1:], [2, 2])
        log.wait_for(1500)
    assert sorted(log.numbers()) == list(range(1500)), "each once: nobody was killed"
    assert log.in_order()
    assert sum(group.counters["handled"] for group in groups) == 1500


def test_every_group_sees_every_message_and_goes_on_where_it_was(
    environment: StreamEnvironment, invoices: str
) -> None:
    publish(environment, invoices, 100)
    billing, audit, later = Log(), Log(), Log()
    with (
        group_of(environment, invoices, billing),
        group_of(environment, invoices, audit, group="audit"),
    ):
        billing.wait_for(100)
        audit.wait_for(100)
    publish(environment, invoices, 50, first=100)
    with group_of(environment, invoices, later):
        later.wait_for(50)
    assert sorted(billing.numbers()) == sorted(audit.numbers()) == list(range(100))
    assert sorted(later.numbers()) == list(range(100, 150))


def test_a_plain_stream_is_read_by_one_worker_and_the_others_take_over(
    environment: StreamEnvironment, events: str
) -> None:
    log = Log()
    publish(environment, events, 100)
    with ExitStack() as open_ones:
        groups = [open_ones.enter_context(group_of(environment, events, log)) for _ in range(3)]
        settle(groups, [0, 0, 1])
        log.wait_for(100)
        reader = next(group for group in groups if group.shards)
        reader.stop()
        settle(groups, [0, 0, 1])
        publish(environment, events, 100, first=100)
        log.wait_for(200)
    assert log.numbers() == list(range(200))


def test_delivery_has_what_was_published(environment: StreamEnvironment, events: str) -> None:
    log = Log()
    with environment.producer(events) as producer:
        producer.send(b"paid", key="customer-7", application_properties={"currency": "EUR"})
        producer.send(b"no key")
        producer.send_encoded([b"not AMQP at all"])
        producer.flush(timeout=PATIENCE).raise_for_failures()
    with group_of(environment, events, log):
        log.wait_for(3)
    first, second, third = log.handled
    assert (first.body, first.key, first.shard, first.offset) == (b"paid", "customer-7", events, 0)
    assert first.headers == {"currency": "EUR"}
    assert isinstance(first.properties, Message)
    assert first.properties.timestamp is not None
    assert (second.body, second.key) == (b"no key", "")
    assert third.body == b"not AMQP at all", "it must not stop the stream"


def test_handler_that_fails_now_and_then_keeps_the_order_of_keys(
    environment: StreamEnvironment, invoices: str
) -> None:
    def fail(delivery: Delivery) -> None:
        if delivery.attempt == 1 and int(delivery.body) % 7 == 0:
            raise ValueError("now and then")

    log = Log(fail)
    publish(environment, invoices, 300)
    with group_of(environment, invoices, log, parallelism=3) as group:
        log.wait_for(300)
        assert group.counters["retried"] == len(range(0, 300, 7))
    assert sorted(log.numbers()) == list(range(300))
    assert log.in_order()


def test_message_that_always_fails_is_a_dead_letter_before_its_offset_is_passed(
    environment: StreamEnvironment, events: str
) -> None:
    def fail(delivery: Delivery) -> None:
        if delivery.body == b"poison":
            raise ValueError("can't be read\nsecond line")

    log = Log(fail)
    with environment.producer(events) as producer:
        producer.send(b"0", key="a")
        producer.send(b"poison", key="a", application_properties={"from": "shop"})
        producer.send(b"1", key="a")
        producer.flush(timeout=PATIENCE).raise_for_failures()
    with group_of(environment, events, log) as group:
        log.wait_for(2)
        assert group.counters["dead_lettered"] == 1
    (letter,) = dead_letters(environment, events, 1)
    told = dict(letter.application_properties)
    assert (letter.body, letter.key, told.pop("from")) == (b"poison", "a", "shop")
    assert str(told.pop("x-warren-time")).startswith("20")
    assert told == {
        "x-warren-reason": "failed",
        "x-warren-error": "ValueError: can't be read",
        "x-warren-attempts": 3,
        "x-warren-shard": events,
        "x-warren-key": "a",
        "x-warren-offset": 1,
        "x-warren-group": "billing",
    }
    assert environment.stored_offset("billing", events) == 2


def test_without_dead_letters_a_message_is_tried_without_end_and_other_keys_go_on(
    environment: StreamEnvironment, events: str
) -> None:
    tries: Counter[bytes] = Counter()
    mended = threading.Event()

    def fail(delivery: Delivery) -> None:
        tries[delivery.body] += 1
        if delivery.key == "key-0" and not mended.is_set():
            raise ValueError("not yet")

    log = Log(fail)
    publish(environment, events, 20, keys=2)
    with group_of(environment, events, log, dead_letter=None, parallelism=2):
        log.wait_for(10)
        wait_until(lambda: tries[b"0"] > 2 * QUICK.attempts)
        mended.set()
        log.wait_for(20)
    assert log.in_order()
    assert not environment.exists(f"{events}.dead")


def test_handler_that_hangs_is_left_and_its_message_a_dead_letter(
    environment: StreamEnvironment, events: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = patient.StandingClock(monkeypatch, "streams.group")
    hangs, let_go = threading.Event(), threading.Event()

    def fail(delivery: Delivery) -> None:
        if delivery.body == b"3":
            hangs.set()
            let_go.wait()

    log = Log(fail)
    publish(environment, events, 10, keys=1)
    with group_of(environment, events, log, handler_timeout=0.3) as group:
        try:
            assert hangs.wait(PATIENCE)
            clock.advance(1)  # more than the limit: a sum of floats may fall short of it
            log.wait_for(9)
            assert group.counters["hung"] == 1
        finally:
            let_go.set()
    (letter,) = dead_letters(environment, events, 1)
    assert letter.body == b"3"
    assert letter.application_properties["x-warren-reason"] == "timeout"


def test_too_many_handlers_that_hang_end_the_worker_with_an_error(
    environment: StreamEnvironment, events: str
) -> None:
    let_go = threading.Event()
    publish(environment, events, 10)
    group = group_of(
        environment, events, lambda _: let_go.wait(), handler_timeout=0.1, max_lost_threads=1
    )
    try:
        with pytest.raises(GroupFailed, match="2 handlers hang"):
            group.run()
    finally:
        let_go.set()


def test_worker_stopped_in_the_middle_of_a_message_finishes_it_first(
    environment: StreamEnvironment, events: str
) -> None:
    begun, let_go = threading.Event(), threading.Event()

    def slow(delivery: Delivery) -> None:
        if delivery.body == b"5":
            begun.set()
            let_go.wait()

    log, heir = Log(slow), Log(slow)
    publish(environment, events, 50, keys=1)
    first, second = group_of(environment, events, log), group_of(environment, events, heir)
    with first, second:
        settle([first, second], [0, 1])
        if not first.shards:
            first, second, log, heir = second, first, heir, log
        try:
            assert begun.wait(PATIENCE)
            wait_until(lambda: first.counters["in_hand"] == 45)
            stopping = threading.Thread(target=first.stop)
            stopping.start()
            wait_until(lambda: first.counters["in_hand"] == 1)
            time.sleep(0.5)  # time in which nothing may happen: the message is still at work
            assert not heir.handled
        finally:
            let_go.set()
        stopping.join()
        settle([second], [1])
        wait_until(lambda: len(log.handled) + len(heir.handled) == 50)
    assert log.numbers() + heir.numbers() == list(range(50))
    assert log.numbers()[-1] == 5, "what was not begun went to the other one"


def test_others_read_what_a_worker_that_stops_is_not_at_work_on(
    environment: StreamEnvironment, invoices: str
) -> None:
    begun, let_go = threading.Event(), threading.Event()

    def work(_: Delivery) -> None:
        begun.set()
        let_go.wait(PATIENCE)

    # Nobody may count as gone, or take what others should: it has to be told.
    options: dict[str, Any] = {"member_timeout": 4 * PATIENCE, "stop_timeout": PATIENCE}
    with ExitStack() as staying:
        first = group_of(environment, invoices, work, **options)
        staying.enter_context(first)
        staying.callback(let_go.set)
        settle([first], [PARTITIONS])
        publish(environment, invoices, 1)
        assert begun.wait(PATIENCE)
        stopping = threading.Thread(target=first.stop)
        stopping.start()
        staying.callback(stopping.join)
        staying.callback(let_go.set)
        heir = staying.enter_context(group_of(environment, invoices, lambda _: None, **options))
        settle([first, heir], [1, PARTITIONS - 1])
        let_go.set()
        settle([first, heir], [0, PARTITIONS])


def test_handler_that_outlasts_the_handover_is_not_waited_for(
    environment: StreamEnvironment, events: str
) -> None:
    begun, let_go, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(_: Delivery) -> None:
        begun.set()
        let_go.wait(PATIENCE)
        ended.set()

    heir = Log()
    publish(environment, events, 5, keys=1)
    first = group_of(environment, events, Log(slow))
    try:
        with first:
            assert begun.wait(PATIENCE)
            assert not first.stop(timeout=0.3)
            assert not ended.is_set()
            with group_of(environment, events, heir):
                heir.wait_for(5)
    finally:
        let_go.set()
    assert heir.numbers() == list(range(5)), "the one at work is repeated, none is lost"
    assert first.counters["late_handovers"] == 1


def test_batch_handler_that_fails_halfway_repeats_only_the_rest(
    environment: StreamEnvironment, events: str
) -> None:
    handled: list[int] = []

    def handle(batch: list[Delivery]) -> None:
        for done, delivery in enumerate(batch):
            number = int(delivery.body)
            if number == 13 and delivery.attempt == 1:
                raise BatchFailed(done, "halfway")
            if number == 21:
                raise ValueError("poison")
            handled.append(number)

    publish(environment, events, 40, keys=1)
    # Four full batches, whatever pauses the machine makes: 13 and 21 are not in one.
    with group_of(environment, events, handle, batch_size=10, batch_wait=PATIENCE) as group:
        wait_until(lambda: set(handled) == set(range(40)) - {21}, explain=lambda: str(handled))
        wait_until(lambda: group.counters["dead_lettered"] == 1)
    assert handled.count(13) == 1
    (letter,) = dead_letters(environment, events, 1)
    assert letter.body == b"21"


def test_no_more_than_prefetch_messages_of_a_partition_are_in_hand(
    environment: StreamEnvironment, invoices: str
) -> None:
    let_go = threading.Event()
    publish(environment, invoices, 2000)
    with group_of(environment, invoices, lambda _: let_go.wait(), prefetch=7) as group:
        try:
            wait_until(lambda: group.counters["in_hand"] == 7 * PARTITIONS)
            time.sleep(0.5)  # time for more to come, if there were no bound
            assert group.counters["in_hand"] == 7 * PARTITIONS
        finally:
            let_go.set()
        wait_until(lambda: group.counters["handled"] == 2000)


def test_offsets_are_stored_by_count_and_by_time(
    environment: StreamEnvironment, events: str
) -> None:
    log = Log()
    publish(environment, events, 25)

    def stored() -> int | None:
        return environment.stored_offset("billing", events)

    with group_of(environment, events, log, store_every_messages=10, store_every_seconds=3600):
        log.wait_for(25)
        # Less than ten are left; where the tens begin depends on how many the first store covered.
        wait_until(lambda: 24 - (stored() or 0) < 10, explain=lambda: str(stored()))
    assert stored() == 24
    publish(environment, events, 3)
    with group_of(environment, events, log, store_every_messages=1000, store_every_seconds=0.2):
        log.wait_for(28)
        # The stored offset took an offset of its own.
        wait_until(lambda: (stored() or 0) >= 27, explain=lambda: str(stored()))


def test_a_group_that_begins_with_next_sees_only_what_comes(
    environment: StreamEnvironment, invoices: str
) -> None:
    publish(environment, invoices, 100)
    log = Log()
    with group_of(environment, invoices, log, offset="next") as group:
        settle([group], [PARTITIONS])
    publish(environment, invoices, 100, first=100)
    with group_of(environment, invoices, log, offset="next"):
        log.wait_for(100)
    assert sorted(log.numbers()) == list(range(100, 200)), "also what came while nobody read"


def test_partitions_that_are_added_and_deleted_are_followed(
    cluster: Cluster, environment: StreamEnvironment, invoices: str
) -> None:
    log = Log()
    added = f"{invoices}-{PARTITIONS}"
    with group_of(environment, invoices, log, follow_interval=0.5) as group:
        settle([group], [PARTITIONS])
        add_partition(cluster, invoices, added, PARTITIONS)
        try:
            settle([group], [PARTITIONS + 1])
            publish(environment, added, 10)
            log.wait_for(10)
        finally:
            environment.delete_stream(added)
        settle([group], [PARTITIONS])
        publish(environment, invoices, 10)
        log.wait_for(20)


def test_who_is_made_after_a_partition_was_added_knows_it(
    cluster: Cluster, environment: StreamEnvironment, invoices: str
) -> None:
    """The environment remembers partitions; a consumer keeps what it was told for its life."""
    added = f"{invoices}-{PARTITIONS}"
    environment.consumer(invoices, **patient.READER).close()
    add_partition(cluster, invoices, added, PARTITIONS)
    try:
        with environment.consumer(invoices, **patient.READER) as consumer:
            assert added in consumer.streams
    finally:
        environment.delete_stream(added)


def add_partition(cluster: Cluster, super_stream: str, stream: str, order: int) -> None:
    """What an operator does: a stream, and a binding that says its place."""
    url = cluster.nodes[0].endpoint.amqp_url
    connection = pika.BlockingConnection(patient.parameters(url))
    channel = connection.channel()
    channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
    ordered = {"x-stream-partition-order": order}
    channel.queue_bind(stream, super_stream, str(order), arguments=ordered)
    connection.close()


def test_workers_find_each_other_again_when_their_stream_was_deleted(
    environment: StreamEnvironment, invoices: str
) -> None:
    log = Log()
    with group_of(environment, invoices, log) as first:
        settle([first], [PARTITIONS])
        environment.delete_stream(members_stream(invoices))
        with group_of(environment, invoices, log) as second:
            settle([first, second], [PARTITIONS // 2, PARTITIONS // 2])
            publish(environment, invoices, 100)
            log.wait_for(100)
    assert sorted(log.numbers()) == list(range(100))


def test_stop_in_a_handler_ends_run(environment: StreamEnvironment, events: str) -> None:
    publish(environment, events, 100, keys=1)
    handled = []

    def handle(delivery: Delivery) -> None:
        handled.append(delivery)
        if len(handled) == 10:
            group.stop()

    group = group_of(environment, events, handle)
    group.run()
    assert len(handled) >= 10
    stored = environment.stored_offset("billing", events)
    assert stored == handled[-1].offset


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"handover_timeout": 60}, "handover_timeout"),
        ({"follow_interval": 0}, "follow_interval"),
        ({"credits": 1}, "credits"),
        ({"offset": "middle"}, "offset"),
        ({"store_every_messages": 0}, "store_every_messages"),
        ({"on_data_loss": "ignore"}, "on_data_loss"),
        ({"prefetch": 0}, "prefetch"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        StreamGroupOptions(**options)


def test_wrong_names_are_refused_at_once(environment: StreamEnvironment, events: str) -> None:
    for group in ("", "g" * 256):
        with pytest.raises(InvalidInput, match="name"):
            group_of(environment, events, print, group=group)
    with pytest.raises(InvalidInput, match="handler"):
        StreamConsumerGroup(environment, events, 5, group="g", options=GroupOptions())  # type: ignore[arg-type]
    with pytest.raises(StreamNotFound):
        group_of(environment, fresh_stream("missing"), print).start()


def test_old_brokers_are_refused_in_one_sentence(pool: Pool) -> None:
    with (
        pool.shared("healthy", OLDEST_VERSION, "too-old") as old,
        environment_of(old, **patient.STREAMS) as environment,
    ):
        environment.create_stream("events")
        with pytest.raises(NotSupported, match=r"need RabbitMQ 3\.11 or later, not 3\.10\.8"):
            group_of(environment, "events", print).start()
