"""Who shares a producer is told of his own messages, and nobody's wait or end harms another's."""

from __future__ import annotations

import gc
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from sharding.outcomes import NotStored, Outcome, Report
from sharding.stream.connections.attachments import PublisherHandler
from sharding.stream.errors import ConnectionLost
from sharding.stream.producer.partitioning import BrokerRoutes
from sharding.stream.producer.producer import Batch, Producer
from sharding.stream.protocol.constants import Code
from tests.cluster.waiting import PATIENCE
from tests.support.hand_time import HandRecovery
from tests.unit.stream.test_producer import (
    FakeLocator,
    Make,
    World,
    eventually,
    later,
    make,
    numbers,
    world,
)

__all__ = ["later", "make", "world"]  # fixtures

pytestmark = pytest.mark.timeout(PATIENCE)


def handler_of(world: World, publisher: int = 0) -> PublisherHandler:
    return world.clients[-1].handlers[publisher][0]


def test_each_batch_reports_its_own_messages(make: Make, world: World) -> None:
    world.confirms = False
    producer = make(linger=60)
    first, second = producer.batch(), producer.batch()
    sent = [
        first.send(b"a"),
        second.send(b"b"),
        producer.send(b"c"),
        *first.send_many([b"d", b"e"]),
        *second.send_encoded([b"f"]),
        producer.send(b"g"),
    ]
    assert sent == list(range(7))
    producer.flush(0)
    eventually(lambda: bool(world.frames))
    handler_of(world).on_refusals([(each, Code.INTERNAL_ERROR) for each in (2, 3, 5)])
    handler_of(world).on_confirms((1, 4, 6, 7))
    assert "3 unsettled" not in repr(first)
    report = second.flush(PATIENCE)
    assert (report.stored, numbers(report, Outcome.REFUSED)) == (1, [1])
    report = producer.flush(PATIENCE)
    assert (report.stored, numbers(report, Outcome.REFUSED)) == (1, [2])
    report = first.flush(PATIENCE)
    assert (report.stored, numbers(report, Outcome.REFUSED)) == (2, [4])
    assert first.flush() == second.flush() == producer.flush(1) == producer.close() == Report()
    counters = producer.counters
    assert (counters["accepted"], counters["stored"], counters["refused"]) == (7, 4, 3)


def test_batches_that_flush_at_once_get_each_their_own(make: Make, world: World) -> None:
    world.confirms = False
    producer = make(linger=60)
    batches = [producer.batch() for _ in range(4)]
    for _ in range(3):
        for batch in batches:
            batch.send(b"x")
    with ThreadPoolExecutor(4) as others:
        reports = [others.submit(batch.flush, PATIENCE) for batch in batches]
        eventually(lambda: len(producer._shared.changed._waiters) == 4)  # type: ignore[attr-defined]
        eventually(lambda: bool(world.frames))
        world.always = ConnectionLost("down")
        handler_of(world).on_confirms((1, 2, 3, 4))
        world.lose()
        found = [report.result(PATIENCE) for report in reports]
    assert [report.stored for report in found] == [1, 1, 1, 1]
    assert [numbers(report, Outcome.UNKNOWN) for report in found] == [
        [4, 8], [5, 9], [6, 10], [7, 11],
    ]  # fmt: skip


def test_batch_does_not_wait_for_what_others_sent(
    make: Make, world: World, later: HandRecovery
) -> None:
    """To other partitions, that is, or after it: a partition settles its messages in order."""
    world.confirms = False
    producer = make("s-0", "s-1", routing=lambda key, _: int(key), linger=0, later=later)
    mine, other = producer.batch(), producer.batch()
    other.send(b"stuck", key="1")
    producer.send(b"stuck too", key="1")
    mine.send(b"mine", key="0")
    with ThreadPoolExecutor(1) as thread:
        flushed = thread.submit(mine.flush, PATIENCE)
        eventually(lambda: bool(producer._shared.changed._waiters))  # type: ignore[attr-defined]
        other.send(b"later", key="0")
        handler_of(world, 0).on_confirms((1,))
        assert flushed.result(PATIENCE) == Report(stored=1)
    assert other.flush(0) == Report(pending=2)
    assert producer.flush(0) == Report(pending=1)
    handler_of(world, 1).on_confirms((2,))
    assert producer.flush(PATIENCE) == Report(stored=1)
    handler_of(world, 1).on_confirms((1,))
    handler_of(world, 0).on_confirms((2,))
    assert other.flush(PATIENCE) == Report(stored=2)


def test_what_could_not_be_handed_over_is_its_caller_s(make: Make, world: World) -> None:
    world.confirms = False
    locator = FakeLocator({"eu": ("s-0",), "all": ("s-0", "s-1")})
    producer = make(
        "s-0", "s-1", routing=BrokerRoutes("s", locator, 5), max_unconfirmed=2, linger=0
    )
    batch, other = producer.batch(), producer.batch()
    batch.send_many([b"1", b"2"], ["mars", "all"])
    batch.send_many([b"3", b"4", b"5"], ["eu", "eu", "eu"], timeout=0)
    world.lose()
    report = batch.flush(PATIENCE)
    assert (report.stored, report.unroutable, report.refused, report.pending) == (0, 1, 2, 0)
    assert (numbers(report, Outcome.UNROUTABLE), numbers(report, Outcome.REFUSED)) == ([0], [3, 4])
    assert sorted(numbers(report, Outcome.UNKNOWN)) == [1, 1, 2]  # a copy in each partition
    assert other.flush(PATIENCE) == producer.flush(PATIENCE) == Report()


def test_block_of_a_batch_raises_for_its_own_messages(make: Make, world: World) -> None:
    world.confirms = False
    producer = make(linger=0)
    with producer.batch() as fine:
        producer.send(b"x")
        handler_of(world).on_refusals([(1, Code.INTERNAL_ERROR)])
        assert producer.flush(PATIENCE).refused == 1

    def send_badly() -> None:
        with producer.batch() as batch:
            batch.send(b"x")
            handler_of(world).on_refusals([(2, Code.INTERNAL_ERROR)])

    with pytest.raises(NotStored) as caught:
        send_badly()
    assert numbers(caught.value.report, Outcome.REFUSED) == [1]
    assert "0 unsettled" in repr(fine)


def test_what_a_lost_batch_had_to_tell_the_producer_tells(make: Make, world: World) -> None:
    world.confirms = False
    producer = make(linger=0)
    producer.batch().send(b"x")
    gc.collect()
    handler_of(world).on_refusals([(1, Code.INTERNAL_ERROR)])
    assert numbers(producer.flush(PATIENCE), Outcome.REFUSED) == [0]
    producer.batch().send(b"x")
    gc.collect()
    handler_of(world).on_refusals([(2, Code.INTERNAL_ERROR)])
    assert numbers(producer.close(PATIENCE), Outcome.REFUSED) == [1]
    assert producer.close() == Report()


def test_close_tells_what_a_batch_was_not_asked_for_and_the_batch_tells_it_too(
    make: Make, world: World
) -> None:
    world.confirms = False
    producer = make(linger=0)
    batch = producer.batch()
    batch.send(b"x")
    producer.send(b"x")
    assert sorted(numbers(producer.close(0), Outcome.UNKNOWN)) == [0, 1]
    assert producer.close() == Report()
    assert numbers(batch.flush(), Outcome.UNKNOWN) == [0]
    assert batch.flush() == Report()


@pytest.mark.parametrize("options", [{}, {"name": "n"}, {"sub_entry_messages": 3}], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_sums_are_right_whatever_happens(
    make: Make, world: World, options: dict[str, object], seed: int
) -> None:
    """Callers in turns of any length, ways and partitions, while connections are lost."""
    rng = random.Random(seed)
    producer = make(
        "s-0", "s-1", routing=lambda key, _: int(key), batch_messages=7, linger=0.001, **options
    )
    callers: list[Producer | Batch] = [producer, producer.batch(), producer.batch()]
    sent: list[set[int]] = [set(), set(), set()]
    failed: list[list[int]] = [[], [], []]
    stored = [0, 0, 0]

    def flush(number: int) -> None:
        report = callers[number].flush(PATIENCE)
        assert not report.pending
        stored[number] += report.stored
        failed[number] += [each.number for each in report.not_stored]

    for _ in range(120):
        number = rng.randrange(3)
        caller, key = callers[number], str(rng.randrange(2))
        if rng.random() < 0.4:
            sent[number].add(caller.send(b"x", key=key))
        else:
            bodies = [b"y"] * rng.randrange(1, 20)
            sent[number].update(caller.send_many(bodies, [key] * len(bodies)))
        if rng.random() < 0.1:
            world.confirms = rng.random() < 0.7
        if rng.random() < 0.1:
            world.lose()
        if rng.random() < 0.05 and world.confirms:
            world.lose()  # what was not confirmed before gets its outcome by this
            flush(rng.randrange(3))
    world.confirms = True
    world.lose()
    for number in range(3):
        flush(number)
        assert len(failed[number]) == len(set(failed[number]))
        assert set(failed[number]) <= sent[number]
        assert stored[number] + len(failed[number]) == len(sent[number])
    counters = producer.counters
    assert counters["accepted"] == sum(map(len, sent)) == sum(stored) + sum(map(len, failed))
    assert (counters["stored"], counters["unknown"]) == (sum(stored), sum(map(len, failed)))
