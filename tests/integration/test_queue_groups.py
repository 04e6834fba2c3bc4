"""Queue groups on a real broker: shares, failures, dead letters, stopping, wrong input."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pika
import pytest

from interceptors import ShardedPublisher
from sharding import InvalidInput, Policy, Topology
from sharding.groups import (
    AioConsumerGroup,
    BatchFailed,
    ConsumerGroup,
    Delivery,
    GroupFailed,
    Retry,
)
from sharding.groups.handling.threads import HandlerThreads
from sharding.groups.queues.shard_reader import NotLockable
from sharding.groups.queues.worker import QueueWorker, exchange_of
from sharding.maps.naming import SHARDS_KEY
from sharding.maps.shard_map import Address
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.groups import KINDS, running_group
from tests.support.sharded import fresh_queue, raw_channel

pytestmark = pytest.mark.cluster

QUICK = Retry(attempts=3, first_delay=0.01, max_delay=0.05)


@pytest.fixture
def images(cluster: Cluster, topology: Topology) -> Iterator[str]:
    """A logical queue with two shards on each of three nodes; gone afterwards."""
    logical = fresh_queue()
    topology.set_policy(Policy.exactly(logical, 2, name=logical))
    topology.ensure(logical)
    yield logical
    queues = [*shards_of(topology, logical), f"{logical}.dead"]
    topology.forget(logical)
    topology.clear_policy(logical)
    with raw_channel(cluster.nodes[0]) as channel:
        for queue in queues:
            channel.queue_delete(queue)


def shards_of(topology: Topology, logical: str) -> list[str]:
    shard_map = topology.shard_map(logical)
    return [shard.name for shard in shard_map.shards] if shard_map else []


def publish(topology: Topology, logical: str, count: int, keys: int = 20) -> None:
    with ShardedPublisher(topology, logical, confirm_timeout=PATIENCE) as publisher:
        for number in range(count):
            publisher.publish(f"key-{number % keys}", b"%d" % number)
        assert publisher.flush(PATIENCE).all_stored


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

    def check_order(self) -> None:
        by_key: dict[str, list[int]] = {}
        for delivery in self.handled:
            by_key.setdefault(delivery.key, []).append(int(delivery.body))
        assert all(numbers == sorted(numbers) for numbers in by_key.values()), by_key


def dead_letters(cluster: Cluster, logical: str) -> list[tuple[bytes, Any]]:
    found: list[tuple[bytes, Any]] = []
    with raw_channel(cluster.nodes[0]) as channel:
        while True:
            method, properties, body = channel.basic_get(f"{logical}.dead", auto_ack=True)
            if method is None:
                return found
            found.append((body or b"", properties))


def messages_left(topology: Topology, logical: str) -> int:
    seen = topology.look_at(shards_of(topology, logical))
    return sum(found.messages for found in seen.values() if found is not None)


def test_a_worker_alone_reads_every_shard_and_keys_stay_in_order(
    topology: Topology, images: str
) -> None:
    publish(topology, images, 600)
    log = Log()
    with ConsumerGroup(topology, images, log, options=patient.group(parallelism=4)) as group:
        wait_until(lambda: len(log.handled) == 600, explain=lambda: str(group.counters))
        wait_until(lambda: len(group.shards) == 6)  # one may have none of the keys
    assert sorted(log.numbers()) == list(range(600))
    log.check_order()
    first = log.handled[0]
    assert (first.attempt, first.redelivered, first.offset) == (1, False, None)
    assert first.key.startswith("key-")
    assert messages_left(topology, images) == 0


def test_shares_are_fair_whoever_comes_and_goes(topology: Topology, images: str) -> None:
    log = Log()
    workers: list[ConsumerGroup] = []

    def settle() -> None:
        def fair() -> bool:
            held = [worker.shards for worker in workers]
            loads = [len(each) for each in held]
            every = [shard for each in held for shard in each]
            return len(set(every)) == len(every) == 6 and max(loads) - min(loads) <= 1

        wait_until(fair, explain=lambda: str([sorted(worker.shards) for worker in workers]))

    publisher = ShardedPublisher(topology, images, confirm_timeout=PATIENCE)
    sent = 0
    try:
        for count in (1, 4, 7, 2, 3):
            while len(workers) < count:
                worker = ConsumerGroup(topology, images, log, options=patient.group())
                worker.start()
                workers.append(worker)
            while len(workers) > count:
                assert workers.pop(0).stop()
            for _ in range(300):
                publisher.publish(f"key-{sent % 20}", b"%d" % sent)
                sent += 1
            settle()
        wait_until(
            lambda: len(log.handled) >= sent, explain=lambda: f"{len(log.handled)} of {sent}"
        )
    finally:
        publisher.close()
        for worker in workers:
            worker.stop()
    assert Counter(log.numbers()) == Counter(range(sent))
    log.check_order()


def test_a_handler_that_fails_now_and_then_is_tried_again_in_order(
    topology: Topology, images: str
) -> None:
    def fail(delivery: Delivery) -> None:
        if int(delivery.body) % 7 == 0 and delivery.attempt < 3:
            raise ValueError("now and then")

    publish(topology, images, 210)
    log = Log(fail)
    with ConsumerGroup(
        topology, images, log, options=patient.group(retry=QUICK, parallelism=3)
    ) as group:
        wait_until(lambda: len(log.handled) == 210, explain=lambda: str(group.counters))
    assert group.counters["retried"] == group.counters["failed"] == 60
    assert group.counters["dead_lettered"] == 0
    log.check_order()


def test_what_always_fails_becomes_a_dead_letter_with_the_reason(
    cluster: Cluster, topology: Topology, images: str
) -> None:
    shard_map = topology.shard_map(images)
    assert shard_map is not None
    way: list[Any] = [SHARDS_KEY, shard_map.shard_of("key-1").name]
    # Another client's, with a copy of its own; on our channels that is refused.
    properties = pika.BasicProperties(
        delivery_mode=2,
        content_type="text/plain",
        message_id="m-1",
        expiration="600000",
        headers={"trace": "abc", "CC": ["elsewhere"], "BCC": way, "n": 7},
    )

    def fail(delivery: Delivery) -> None:
        if delivery.body == b"99":
            raise ValueError("can't\nsecond line")

    log = Log(fail)
    began = datetime.now(UTC)
    with ShardedPublisher(topology, images, confirm_timeout=PATIENCE) as publisher:
        with raw_channel(cluster.nodes[0]) as channel:
            channel.confirm_delivery()
            channel.basic_publish(images, "key-1", b"99", properties, mandatory=True)
        publisher.publish("key-1", b"100")
    with ConsumerGroup(topology, images, log, options=patient.group(retry=QUICK)) as group:
        wait_until(lambda: log.numbers() == [100], explain=lambda: str(group.counters))
        assert group.counters["dead_lettered"] == 1
        [shard] = {delivery.shard for delivery in log.handled}
    [(body, found)] = dead_letters(cluster, images)
    assert body == b"99"
    assert (found.content_type, found.message_id, found.delivery_mode) == ("text/plain", "m-1", 2)
    assert found.expiration is None
    moment = datetime.fromisoformat(found.headers.pop("x-warren-time"))
    assert began - timedelta(milliseconds=1) < moment <= datetime.now(UTC)
    assert found.headers == {
        "trace": "abc",
        "n": 7,
        "x-warren-cc": ["elsewhere"],
        "x-warren-expiration": "600000",
        "x-warren-reason": "failed",
        "x-warren-error": "ValueError: can't",
        "x-warren-attempts": 3,
        "x-warren-shard": shard,
        "x-warren-key": "key-1",
    }
    assert messages_left(topology, images) == 0


def test_a_dead_letter_that_can_not_be_stored_is_kept(
    cluster: Cluster, topology: Topology, images: str
) -> None:
    """The queue for them is full and refuses more: a nack."""

    def fail(_: Delivery) -> None:
        raise ValueError("always")

    with raw_channel(cluster.nodes[0]) as channel:
        arguments = {"x-max-length": 0, "x-overflow": "reject-publish"}
        channel.queue_declare(f"{images}.dead", durable=True, arguments=arguments)
        publish(topology, images, 3)
        options = patient.group(retry=QUICK)
        with ConsumerGroup(topology, images, fail, options=options) as group:
            wait_until(lambda: group.counters.get("dead_letter_failures", 0) >= 5)
            assert group.counters["dead_lettered"] == 0
        wait_until(lambda: messages_left(topology, images) == 3)
        channel.queue_delete(f"{images}.dead")
    with ConsumerGroup(topology, images, fail, options=patient.group(retry=QUICK)) as group:
        wait_until(lambda: group.counters["dead_lettered"] == 3)
    assert sorted(body for body, _ in dead_letters(cluster, images)) == [b"0", b"1", b"2"]


def test_a_handler_that_hangs_loses_its_thread_and_no_other_message(
    cluster: Cluster, topology: Topology, images: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = patient.StandingClock(monkeypatch, "queues.group")
    hangs, let_go = threading.Event(), threading.Event()

    def fail(delivery: Delivery) -> None:
        if delivery.body == b"5":
            hangs.set()
            let_go.wait()

    publish(topology, images, 40)
    log = Log(fail)
    options = patient.group(handler_timeout=0.5, retry=QUICK)
    with ConsumerGroup(topology, images, log, options=options) as group:
        try:
            assert hangs.wait(PATIENCE)
            clock.advance(1)
            wait_until(lambda: len(log.handled) == 39, explain=lambda: str(group.counters))
            wait_until(lambda: group.counters["dead_lettered"] == 1)
            assert group.counters["lost_threads"] == 1
        finally:
            let_go.set()
        wait_until(lambda: group.counters["lost_threads"] == 0)
    [(body, found)] = dead_letters(cluster, images)
    assert body == b"5"
    assert found.headers["x-warren-reason"] == "timeout"
    assert found.headers["x-warren-attempts"] == 1
    assert "0.5 s" in found.headers["x-warren-error"]


def test_too_many_hanging_handlers_end_the_worker_with_an_error(
    topology: Topology, images: str
) -> None:
    let_go = threading.Event()
    publish(topology, images, 40)
    options = patient.group(handler_timeout=0.2, max_lost_threads=2)
    group = ConsumerGroup(topology, images, lambda _: let_go.wait(), options=options)
    try:
        with pytest.raises(GroupFailed, match="3 handlers hang, 2 are tolerated"):
            group.run()
    finally:
        let_go.set()
        group.stop()
    wait_until(lambda: messages_left(topology, images) >= 37)


def test_a_batch_that_fails_halfway_loses_nothing_and_gives_up_only_the_poison(
    cluster: Cluster, topology: Topology, images: str
) -> None:
    handled: list[int] = []
    sizes: list[int] = []
    all_here = threading.Event()

    def handle(batch: list[Delivery]) -> None:
        all_here.wait(PATIENCE)
        sizes.append(len(batch))
        for done, delivery in enumerate(batch):
            if delivery.body == b"13":
                raise BatchFailed(done, "thirteen")
            handled.append(int(delivery.body))

    publish(topology, images, 100)
    options = patient.group(batch_size=20, batch_wait=0.2, retry=QUICK)
    with ConsumerGroup(topology, images, handle, options=options) as group:
        wait_until(lambda: group.counters["in_hand"] == 100)  # so that batches can be full
        all_here.set()
        wait_until(lambda: len(handled) == 99, explain=lambda: str(group.counters))
        wait_until(lambda: group.counters["dead_lettered"] == 1)
    assert sorted(handled) == [number for number in range(100) if number != 13]
    assert max(sizes) == 20
    [(body, found)] = dead_letters(cluster, images)
    assert body == b"13"
    assert found.headers["x-warren-error"] == "BatchFailed: thirteen"


def test_stopping_finishes_what_is_running_and_gives_back_the_rest(
    topology: Topology, images: str
) -> None:
    begun, let_go = threading.Event(), threading.Event()
    log = Log()

    def handle(delivery: Delivery) -> None:
        begun.set()
        let_go.wait()
        log(delivery)

    publish(topology, images, 50)
    group = ConsumerGroup(topology, images, handle, options=patient.group())
    group.start()
    try:
        assert begun.wait(PATIENCE)
        wait_until(lambda: group.counters["in_hand"] == 50)
        ending = threading.Thread(target=group.stop)
        ending.start()
        wait_until(lambda: group.counters["requeued"] > 0)  # stopping has begun
    finally:
        let_go.set()
    ending.join(PATIENCE)
    assert not ending.is_alive()
    assert len(log.handled) == 1
    wait_until(lambda: messages_left(topology, images) == 49)
    rest = Log()
    with ConsumerGroup(topology, images, rest, options=patient.group()) as group:
        wait_until(lambda: len(rest.handled) == 49)
    assert sorted(log.numbers() + rest.numbers()) == list(range(50))


@KINDS
def test_others_read_what_a_worker_that_stops_is_not_at_work_on(
    topology: Topology, images: str, kind: str
) -> None:
    begun, let_go = threading.Event(), threading.Event()

    def work(_: Delivery) -> None:
        begun.set()
        let_go.wait(PATIENCE)

    async def work_beside_the_loop(delivery: Delivery) -> None:
        await asyncio.to_thread(work, delivery)

    handler = work_beside_the_loop if kind == "tasks" else work
    # Nobody may count as gone, or take what others should: it has to be told.
    options = patient.group(member_timeout=4 * PATIENCE)
    with ExitStack() as leaving, ExitStack() as staying:
        staying.callback(let_go.set)
        first = leaving.enter_context(running_group(kind, topology, images, handler, options))
        wait_until(lambda: len(first.shards) == 6)
        publish(topology, images, 1)
        assert begun.wait(PATIENCE)
        heir = ConsumerGroup(topology, images, lambda _: None, options=options)
        stopping = threading.Thread(target=leaving.close)
        stopping.start()
        staying.callback(stopping.join)
        staying.callback(let_go.set)
        staying.enter_context(heir)
        wait_until(lambda: len(heir.shards) == 5, explain=lambda: f"{first.shards} {heir.shards}")
        assert len(first.shards) == 1
        let_go.set()
        wait_until(lambda: len(heir.shards) == 6)
        stopping.join(PATIENCE)
        counters = first.counters
    assert (counters["released"], counters["lost"]) == (6, 0)


def test_a_stop_begins_nothing_before_dead_letters_that_are_not_stored_are_left(
    topology: Topology, images: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead letter that is left lets its key go on, so nothing may be begun by then."""
    left: list[bool] = []
    wind_down = QueueWorker.wind_down

    def noted(worker: QueueWorker) -> None:
        assert group._runner is not None
        left.append(group._runner._stopping)
        wind_down(worker)

    begin_nothing_more = HandlerThreads.wind_down

    def late(runner: HandlerThreads) -> None:
        """What the worker's loop was told before this has happened."""
        assert group._loop is not None
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), group._loop).result(PATIENCE)
        begin_nothing_more(runner)

    monkeypatch.setattr(QueueWorker, "wind_down", noted)
    monkeypatch.setattr(HandlerThreads, "wind_down", late)
    with ConsumerGroup(topology, images, Log(), options=patient.group()) as group:
        wait_until(lambda: len(group.shards) == 6)
    assert left == [True]


def test_the_stop_is_told_of_when_nothing_more_is_begun(
    topology: Topology, images: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, let_go = threading.Event(), threading.Event()

    def wait(_: Delivery) -> None:
        begun.set()
        let_go.wait()

    log = Log(wait)
    publish(topology, images, 50)
    group = ConsumerGroup(topology, images, log, options=patient.group())

    def told(line: str, *_: object) -> None:
        if "stopping" in line:
            let_go.set()
            wait_until(lambda: group.counters["in_hand"] == 0)

    with group:
        assert begun.wait(PATIENCE)
        wait_until(lambda: group.counters["in_hand"] == 50)
        monkeypatch.setattr("sharding.groups.queues.group.logger.info", told)
    assert len(log.handled) == 1


def test_stopping_is_bounded_and_an_unfinished_message_comes_again(
    topology: Topology, images: str
) -> None:
    begun, let_go, ended = threading.Event(), threading.Event(), threading.Event()

    def hang(_: Delivery) -> None:
        begun.set()
        let_go.wait(PATIENCE)
        ended.set()

    publish(topology, images, 1)
    group = ConsumerGroup(topology, images, hang, options=patient.group())
    group.start()
    try:
        assert begun.wait(PATIENCE)
        assert not group.stop(timeout=1)
        assert not ended.is_set()
        again = Log()
        with ConsumerGroup(topology, images, again, options=patient.group()):
            wait_until(lambda: again.numbers() == [0])
    finally:
        let_go.set()
    assert again.handled[0].redelivered


def test_a_shard_is_not_given_to_another_while_its_message_runs(
    topology: Topology, images: str
) -> None:
    let_go = threading.Event()
    log = Log(lambda _: None if let_go.wait() else pytest.fail("never let go"))
    shard_map = topology.shard_map(images)
    assert shard_map is not None
    keys = {shard_map.shard_of(key).name: key for key in map(str, range(200))}
    assert len(keys) == 6
    with ShardedPublisher(topology, images, confirm_timeout=PATIENCE) as publisher:
        for number in range(2):  # the second one waits behind the first, which runs
            for key in keys.values():
                publisher.publish(key, b"%d" % number)
    # Who is not heard of for a while must not count as gone: the shares would be others.
    options = patient.group(parallelism=6, member_timeout=PATIENCE)
    with ExitStack() as workers:
        first = workers.enter_context(ConsumerGroup(topology, images, log, options=options))
        workers.callback(let_go.set)  # before the first one waits for its handlers
        wait_until(lambda: first.counters["running"] == 6)
        second = workers.enter_context(ConsumerGroup(topology, images, log, options=options))
        wait_until(lambda: first.counters["requeued"] == 3)  # about to give up three
        assert (len(first.shards), len(second.shards)) == (6, 0)
        let_go.set()
        wait_until(lambda: len(first.shards) == len(second.shards) == 3)
        wait_until(lambda: len(log.handled) == 12)
    assert Counter(delivery.key for delivery in log.handled) == dict.fromkeys(keys.values(), 2)
    log.check_order()


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_a_shard_is_taken_anew_before_the_broker_gives_its_consumer_up(
    topology: Topology, images: str, kind: str
) -> None:
    let_go = threading.Event()
    log = Log(lambda _: None if let_go.wait(PATIENCE) else pytest.fail("never let go"))

    async def handle(delivery: Delivery) -> None:
        await asyncio.to_thread(log, delivery)

    publish(topology, images, 30, keys=1)
    options = patient.group(consumer_timeout=2)

    def check(group: ConsumerGroup | AioConsumerGroup) -> None:
        # The first one runs, and all that waits behind it goes back before two seconds are over.
        wait_until(lambda: group.counters["requeued"])
        assert len(group.shards) == 6
        let_go.set()
        wait_until(lambda: len(log.handled) == 30 and is_whole(group.counters))
        assert (group.counters["lost"], group.counters["failed"]) == (0, 0)

    def is_whole(counters: Mapping[str, float]) -> bool:
        return 1 <= counters["renewed"] == counters["released"] == counters["taken"] - 6

    async def run_on_a_loop() -> None:
        async with AioConsumerGroup(topology, images, handle, options=options) as group:
            await asyncio.to_thread(check, group)

    if kind == "asyncio":
        asyncio.run(run_on_a_loop())
    else:
        with ConsumerGroup(topology, images, log, options=options) as group:
            check(group)
    assert log.numbers() == list(range(30))
    assert log.handled[1].redelivered
    assert messages_left(topology, images) == 0


def test_new_shards_are_read_without_a_restart(topology: Topology, images: str) -> None:
    log = Log()
    with ConsumerGroup(topology, images, log, options=patient.group()) as group:
        wait_until(lambda: len(group.shards) == 6)
        topology.set_policy(Policy.exactly(images, 3, name=images))
        topology.ensure(images)
        wait_until(lambda: len(group.shards) == 9)
        publish(topology, images, 300, keys=300)
        wait_until(lambda: len(log.handled) == 300)
        assert len({delivery.shard for delivery in log.handled}) == 9


def test_a_shard_that_somebody_else_reads_is_left_alone(
    cluster: Cluster, topology: Topology, images: str
) -> None:
    with raw_channel(cluster.nodes[0]) as channel:
        channel.basic_consume(shards_of(topology, images)[0], lambda *_: None)
        with ConsumerGroup(topology, images, lambda _: None, options=patient.group()) as group:
            wait_until(lambda: group.counters["refused"] >= 2)
            wait_until(lambda: len(group.shards) == 5)
            channel.cancel()
            channel.close()
            wait_until(lambda: len(group.shards) == 6)


def test_announcements_that_are_none_are_ignored(
    cluster: Cluster, topology: Topology, images: str
) -> None:
    with ConsumerGroup(topology, images, lambda _: None, options=patient.group()) as group:
        wait_until(lambda: len(group.shards) == 6)
        with raw_channel(cluster.nodes[0]) as channel:
            for body in (b"", b"\xff", b"[]", b'{"format": 99}', b"x" * 2_000_000):
                channel.basic_publish(exchange_of(images), "", body)
            ghost = {"format": 1, "worker": "ghost", "kind": "here", "shards": []}
            for _ in range(20):  # a worker that takes nothing: shards it could have are not lost
                channel.basic_publish(exchange_of(images), "", json.dumps(ghost).encode())
                time.sleep(0.1)
        wait_until(lambda: len(group.shards) == 6)


def test_workers_hear_each_other_again_when_their_exchange_was_made_again(
    cluster: Cluster, topology: Topology, images: str
) -> None:
    """Publishing goes on without an error, to nobody: their queues are bound no more."""
    with ExitStack() as workers:
        groups = [ConsumerGroup(topology, images, Log(), options=patient.group()) for _ in range(3)]
        for group in groups[:2]:
            workers.enter_context(group)
        wait_until(lambda: [len(group.shards) for group in groups[:2]] == [3, 3])
        with raw_channel(cluster.nodes[0]) as channel:
            channel.exchange_delete(exchange_of(images))
            channel.exchange_declare(exchange_of(images), "fanout", durable=True, auto_delete=True)
        workers.enter_context(groups[2])
        wait_until(lambda: [len(group.shards) for group in groups] == [2, 2, 2])


def test_an_asynchronous_group_starts_once_and_a_cancelled_stop_is_carried_out(
    topology: Topology, images: str
) -> None:
    async def play() -> None:
        let_go = asyncio.Event()
        group = AioConsumerGroup(topology, images, lambda _: let_go.wait(), options=patient.group())
        begun = await asyncio.gather(group.start(), group.start(), return_exceptions=True)
        assert [type(each) for each in begun] == [type(None), InvalidInput]
        async with asyncio.timeout(PATIENCE):
            while len(group.shards) < 6:
                await asyncio.sleep(0.05)
            with ShardedPublisher(topology, images) as publisher:
                publisher.publish("key", b"")
                publisher.flush(PATIENCE)
            while not group.counters["running"]:
                await asyncio.sleep(0.05)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(group.stop(), 0.01)
            let_go.set()
            assert await group.stop()
        assert group.shards == frozenset()
        counts = await asyncio.to_thread(topology.consumer_counts, shards_of(topology, images))
        assert set(counts.values()) == {0}

    asyncio.run(play())


def test_what_can_not_work_is_said_at_once(topology: Topology) -> None:
    with pytest.raises(InvalidInput, match="must be one that is sharded"):
        ConsumerGroup(topology, "no-such-queue", print).start()
    with pytest.raises(InvalidInput, match="handler: must be callable"):
        ConsumerGroup(topology, "images", None)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(InvalidInput, match="handler: must not be asynchronous"):
        ConsumerGroup(topology, "images", asyncio.sleep)


def test_shards_of_another_type_than_a_group_can_lock_are_refused_when_it_starts(
    cluster: Cluster, topology: Topology
) -> None:
    logical = fresh_queue()
    arguments = {"x-queue-type": "quorum"}
    topology.set_policy(Policy(logical, f"^{logical}$", 1, queue_arguments=arguments))
    try:
        topology.ensure(logical)
        with pytest.raises(InvalidInput, match="must be classic"):
            ConsumerGroup(topology, logical, print, options=patient.group()).start()
    finally:
        queues = shards_of(topology, logical)
        topology.forget(logical)
        topology.clear_policy(logical)
        with raw_channel(cluster.nodes[0]) as channel:
            for queue in queues:
                channel.queue_delete(queue)


def test_dead_letters_that_would_be_handled_again_are_refused_when_it_starts(
    topology: Topology, images: str
) -> None:
    options = patient.group(dead_letter=shards_of(topology, images)[0])
    with pytest.raises(InvalidInput, match="dead_letter: must not be a shard"):
        ConsumerGroup(topology, images, print, options=options).start()


def test_a_queue_that_accepts_two_exclusive_consumers_is_refused(
    cluster: Cluster, topology: Topology, images: str
) -> None:
    """The map does not say what kind a queue is where it was made by another."""
    shard = shards_of(topology, images)[0]
    with raw_channel(cluster.nodes[0]) as channel:
        channel.queue_delete(shard)
        channel.queue_declare(shard, durable=True, arguments={"x-queue-type": "quorum"})
    group = ConsumerGroup(topology, images, lambda _: None, options=patient.group())
    with pytest.raises(Exception, match="quorum queues do not know exclusive consumers"):
        group.run()


def test_a_worker_that_has_just_ended_by_itself_can_be_stopped(
    cluster: Cluster, topology: Topology, images: str
) -> None:
    """Its loop is closed, its thread not gone yet: what it failed of is told, nothing else."""
    stopping = threading.Event()

    class Lingering(ConsumerGroup):
        def _run(self, started: threading.Event) -> None:
            super()._run(started)
            stopping.wait(PATIENCE)

    shard = shards_of(topology, images)[0]
    with raw_channel(cluster.nodes[0]) as channel:
        channel.queue_delete(shard)
        channel.queue_declare(shard, durable=True, arguments={"x-queue-type": "quorum"})
    group = Lingering(topology, images, lambda _: None, options=patient.group())
    group.start()
    group._unsubscribe = stopping.set  # called when stop() has found the thread alive
    with pytest.raises(NotLockable, match="quorum queues do not know exclusive consumers"):
        group.run()


def test_a_missing_right_ends_the_worker_and_is_named(cluster: Cluster, images: str) -> None:
    node, user = cluster.nodes[0], f"user-{images}"
    may_read = rf"^(sharding: {images} - .*|warren\.shard-maps)$"
    groups = rf"^(warren\.group\.{images}|amq\.gen-.*)$"
    password = {"password": "secret-word", "tags": ""}
    node.management.call("PUT", "users", user, body=password, timeout=PATIENCE)
    url = node.endpoint.amqp_url.replace("guest:guest", f"{user}:secret-word")
    try:
        for rights, named in [
            ({"configure": "^$", "write": "^$", "read": may_read}, f"warren.group.{images}"),
            (
                {
                    "configure": groups,
                    "write": groups,
                    "read": groups[:-2] + r"|warren\.shard-maps)$",
                },
                f"sharding: {images}",
            ),
            (
                {
                    "configure": groups,
                    "write": r"^amq\.gen-.*$",
                    "read": groups[:-2] + rf"|sharding: {images} - .*|warren\.shard-maps)$",
                },
                f"exchange 'warren.group.{images}'",
            ),
        ]:
            path = ("permissions", node.endpoint.vhost, user)
            node.management.call("PUT", *path, body=rights, timeout=PATIENCE)
            with Topology(url, options=patient.TOPOLOGY) as limited:
                group = ConsumerGroup(limited, images, lambda _: None, options=patient.group())
                with pytest.raises(GroupFailed, match="refuses a right") as caught:
                    group.run()
            assert named in str(caught.value)
            assert "secret-word" not in str(caught.value)
    finally:
        node.management.call("DELETE", "users", user, timeout=PATIENCE)


def test_a_foreign_exchange_where_workers_meet_ends_the_worker_and_is_named(
    cluster: Cluster, topology: Topology, images: str
) -> None:
    with raw_channel(cluster.nodes[0]) as channel:
        channel.exchange_declare(exchange_of(images), "topic")
        group = ConsumerGroup(topology, images, lambda _: None, options=patient.group())
        with pytest.raises(GroupFailed, match=f"'{exchange_of(images)}', and there is another"):
            group.run()
        channel.exchange_delete(exchange_of(images))


def test_what_is_not_read_is_warned_of(
    cluster: Cluster, topology: Topology, images: str, caplog: pytest.LogCaptureFixture
) -> None:
    def is_warned_of(text: str) -> bool:
        return any(text in each.getMessage() for each in caplog.records if each.levelname != "INFO")

    gone = shards_of(topology, images)[0]
    with raw_channel(cluster.nodes[0]) as channel:
        channel.queue_delete(gone)
    with ConsumerGroup(topology, images, lambda _: None, options=patient.group()) as group:
        wait_until(lambda: is_warned_of(f"{gone!r} can't be taken now, and is not read"))
        wait_until(lambda: len(group.shards) == 5)
        topology.forget(images)
        wait_until(lambda: is_warned_of(f"{images!r} is not sharded any more"))
        wait_until(lambda: not group.shards)
        topology.ensure(images)
        wait_until(lambda: len(group.shards) == 6)


def test_a_node_that_can_not_be_reached_is_warned_of(
    topology: Topology, images: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A map names the addresses that brokers know of themselves; clients may know others only."""
    known = topology.shard_map(images)
    assert known is not None
    nowhere = tuple(replace(node, addresses=(Address("127.0.0.1", 1),)) for node in known.nodes)
    url = topology._urls[0]
    with (
        Topology(url, maps=[replace(known, nodes=nowhere)]) as elsewhere,
        ConsumerGroup(elsewhere, images, lambda _: None, options=patient.group()),
    ):
        wait_until(
            lambda: any(
                "its shards are not read" in each.getMessage() and each.levelname == "WARNING"
                for each in caplog.records
            )
        )


def test_a_cancelled_run_ends_its_group(topology: Topology, images: str) -> None:
    async def play() -> None:
        async def handle(_: Delivery) -> None: ...

        group = AioConsumerGroup(topology, images, handle, options=patient.group())
        running = asyncio.create_task(group.run())
        while not group.shards:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not group.healthy
        assert not group.shards

    asyncio.run(play())


def test_whoever_cancels_all_tasks_ends_the_group_and_it_says_so(
    topology: Topology, images: str
) -> None:
    async def play() -> None:
        mine = asyncio.current_task()

        async def handle(_: Delivery) -> None: ...

        group = AioConsumerGroup(topology, images, handle, options=patient.group())
        await group.start()
        while not group.shards:
            await asyncio.sleep(0.01)
        for task in asyncio.all_tasks() - {mine}:
            task.cancel()
        with pytest.raises(GroupFailed, match="somebody has cancelled the group's tasks"):
            await group.run()

    asyncio.run(play())


def test_asynchronous_workers_share_with_others(
    cluster: Cluster, topology: Topology, images: str
) -> None:
    log = Log()

    async def handle(delivery: Delivery) -> None:
        await asyncio.sleep(0)
        if delivery.body == b"51":
            raise ValueError("never")
        log(delivery)

    options = patient.group(parallelism=5, retry=QUICK)

    async def main() -> None:
        async with AioConsumerGroup(topology, images, handle, options=options) as group:
            await asyncio.to_thread(wait_until, lambda: len(group.shards) == 6)
            with ConsumerGroup(topology, images, log, options=patient.group()) as other:

                def even() -> bool:
                    return len(group.shards) == len(other.shards) == 3

                await asyncio.to_thread(wait_until, even)
                await asyncio.to_thread(publish, topology, images, 50)
                await asyncio.to_thread(wait_until, lambda: len(log.handled) == 50)
            await asyncio.to_thread(wait_until, lambda: len(group.shards) == 6)
            await asyncio.to_thread(_publish_bodies, topology, images, [b"51", b"52"])
            await asyncio.to_thread(wait_until, lambda: group.counters["dead_lettered"] == 1)
            await asyncio.to_thread(wait_until, lambda: len(log.handled) == 51)

    asyncio.run(main())
    log.check_order()
    [(body, found)] = dead_letters(cluster, images)
    assert (body, found.headers["x-warren-error"]) == (b"51", "ValueError: never")
    assert messages_left(topology, images) == 0


def test_an_asynchronous_handler_that_hangs_is_cancelled_and_others_go_on(
    cluster: Cluster, topology: Topology, images: str
) -> None:
    begun: list[bytes] = []
    ends: list[str] = []

    async def handle(delivery: Delivery) -> None:
        begun.append(delivery.body)
        if delivery.body == b"50":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

    # So short that the other message may be late too, on a slow machine: it is only to begin.
    options = patient.group(retry=QUICK, handler_timeout=0.2)

    async def main() -> None:
        async with AioConsumerGroup(topology, images, handle, options=options) as group:
            await asyncio.to_thread(_publish_bodies, topology, images, [b"50"])
            await asyncio.to_thread(wait_until, lambda: group.counters["dead_lettered"] == 1)
            assert group.counters["hung"] == 1
            await asyncio.to_thread(_publish_bodies, topology, images, [b"52"])
            await asyncio.to_thread(wait_until, lambda: b"52" in begun)

    asyncio.run(main())
    assert ends == ["cancelled"]
    found = {body: properties.headers for body, properties in dead_letters(cluster, images)}
    assert found[b"50"]["x-warren-reason"] == "timeout"


def _publish_bodies(topology: Topology, logical: str, bodies: list[bytes]) -> None:
    with ShardedPublisher(topology, logical, confirm_timeout=PATIENCE) as publisher:
        for body in bodies:
            publisher.publish(body.decode(), body)
