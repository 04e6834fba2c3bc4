"""Finding one's way in the map log: its end, its beginning, a start near the end, another log."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from sharding import MissingRight, Policy, UnsupportedFormat
from sharding.cluster import stream_log
from sharding.cluster.control_plane import ControlPlane
from sharding.cluster.management import ClusterView
from sharding.cluster.stream_log import LOOKS_AT_THE_END, LogFollower
from sharding.errors import Unreachable
from sharding.maps import snapshots
from sharding.maps.map_log import LOG, NOTES, NOTHING, State
from sharding.maps.snapshots import snapshot_records
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.fake_log import FakeBroker, FakeChannel
from tests.support.hand_time import run_without_waiting
from tests.support.log_records import founded, parts_of, proposal, read_all, replay

FIRST = State().with_policy(Policy("pictures", "^images$", 1))


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_log, "EMPTY_AFTER", 0.001)
    monkeypatch.setattr(stream_log, "LOOK_AGAIN", 0.001)
    monkeypatch.setattr(stream_log, "STEP_BACK", 2)


def run(main: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(PATIENCE):
            await main

    asyncio.run(in_time())


async def following(broker: FakeBroker, log: LogFollower | None = None) -> LogFollower:
    log = log or LogFollower(lambda *_: None)
    await log.attach(broker.session)
    await log.catch_up(PATIENCE)
    return log


def through(exchange: str, *bodies: bytes) -> list[tuple[str, bytes]]:
    return [(exchange, body) for body in bodies]


def policies(count: int) -> list[State]:
    states = [FIRST]
    for number in range(1, count):
        states.append(states[-1].with_policy(Policy("pictures", "^images$", number + 1)))
    return states


def test_a_slow_log_is_read_by_who_may_not_write() -> None:
    async def main() -> None:
        records = through(LOG, *founded(FIRST))
        broker = FakeBroker(records, may_write=(), silent=True)
        log = await following(broker)
        assert log.refused is None
        assert log.state.policies == FIRST.policies

    run(main())


def test_of_an_empty_log_it_is_known_that_the_user_may_not_write() -> None:
    async def main() -> None:
        log = LogFollower(lambda *_: None)
        await log.attach(FakeBroker(may_write=()).session)
        waiting = asyncio.create_task(log.catch_up(PATIENCE))
        while log.refused is None:
            await asyncio.sleep(0)
        assert NOTES in log.refused.text
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(main())


def test_who_may_only_note_finds_that_a_log_is_empty() -> None:
    async def main() -> None:
        broker = FakeBroker(may_write=(NOTES,))
        log = await following(broker)
        assert log.state == State()
        assert broker.records == through(NOTES, NOTHING)
        with pytest.raises(MissingRight, match=f"permission 'write' on '{LOG}'"):
            await log.append(State(), FIRST)

    run(main())


def test_a_record_that_came_another_way_says_nothing() -> None:
    async def main() -> None:
        (record,) = founded(FIRST)
        log = await following(FakeBroker([*through("", record), *through(NOTES, record)]))
        assert log.state == State()

    run(main())


def test_what_is_appended_is_pushed_to_all_who_read() -> None:
    async def main() -> None:
        broker = FakeBroker()
        one, other = await following(broker), await following(broker)
        assert await one.append(State(), FIRST)
        assert one.state.policies == FIRST.policies
        assert not await other.append(State(), FIRST.with_policy(Policy("late", ".", 1)))
        assert other.state == one.state

    run(main())


def test_a_log_that_nothing_leads_to_is_made_whole_and_the_change_said_again() -> None:
    async def main() -> None:
        broker = FakeBroker()
        log = await following(broker)
        broker.is_bound = False
        with pytest.raises(Unreachable, match="nothing led to the map log"):
            await log.append(State(), FIRST)
        assert broker.made == 2
        assert await log.append(State(), FIRST)

    run(main())


async def times_the_end_was_asked_for(late: int) -> int:
    broker = FakeBroker(through(LOG, *founded(*policies(3))))
    log = await following(broker)
    broker.asked.clear()
    broker.late = late
    await log.catch_up(PATIENCE)
    return broker.asked.count("last")


def test_a_replica_that_tells_of_its_last_record_late_is_asked_again() -> None:
    async def main() -> None:
        assert await times_the_end_was_asked_for(late=0) == 1
        assert await times_the_end_was_asked_for(late=2) == 3

    run(main())


def test_a_replica_that_stays_behind_what_was_read_is_left() -> None:
    async def main() -> None:
        with pytest.raises(Unreachable, match="is behind"):
            await times_the_end_was_asked_for(late=LOOKS_AT_THE_END)

    run(main())


# Starting near the end


def long_log(after: int = 0, notes: int = 0) -> list[bytes]:
    """Twenty records, a snapshot of them, and more behind it, which say where it begins; all of
    that behind so many notes."""
    before = [None] * notes
    records = founded(*policies(20))
    records += parts_of(read_all([*before, *records]))
    for _ in range(after):
        reader = read_all([*before, *records])
        assert reader.state is not None
        grown = reader.state.with_policy(Policy("grown", ".", reader.state.epoch))
        records.append(proposal(reader.state, grown, start=reader.start))
    return records


@pytest.mark.parametrize("ignored", [0, 1, 30])
def test_a_new_reader_starts_at_the_newest_snapshot(ignored: int) -> None:
    async def main() -> None:
        records = long_log(after=2)
        broker = FakeBroker([*through(LOG, *records), *through("", *[b"flood"] * ignored)])
        log = await following(broker)
        assert log.state == replay(records)
        assert broker.asked[-1] == 20

    run(main())


@pytest.mark.parametrize("notes", [1, 9, 10, 40])
def test_notes_of_those_who_found_the_log_empty_make_no_start_longer(notes: int) -> None:
    """Each of many clients that start at the same time appends one."""

    async def main() -> None:
        records = long_log(after=2, notes=notes)
        broker = FakeBroker([*through(NOTES, *[NOTHING] * notes), *through(LOG, *records)])
        log = await following(broker)
        assert log.state == replay(records)
        assert broker.asked[-1] == notes + 20
        await following(broker, log)
        assert broker.asked[-1] == len(broker.records)  # connected again, it goes on
        assert log.state == replay(records)

    run(main())


def test_a_snapshot_before_the_log_was_founded_is_none_for_who_starts_there() -> None:
    """It cites the log that comes, and the record that founds that says to start at it."""

    async def main() -> None:
        evil = State(log="later").with_policy(Policy("evil", ".", 1))
        (forged,) = snapshot_records(evil, 0, name="forged")
        founder = proposal(State(), FIRST, name="later", start=1)
        records = [b"garbage", forged, founder]
        log = await following(FakeBroker(through(LOG, *records)))
        assert log.state == replay(records)
        assert log.state.policies.keys() == {"pictures"}

    run(main())


def test_a_snapshot_behind_a_flood_is_where_the_next_reader_starts() -> None:
    """Not only the one after the next change, which would say so."""

    async def main() -> None:
        flood = [None] * 30
        records = long_log(after=1)
        reader = read_all([*records, *flood])
        parts = parts_of(reader)
        logged = [*through(LOG, *records), *through("", *[b"flood"] * 30), *through(LOG, *parts)]
        broker = FakeBroker(logged)
        log = await following(broker)
        assert log.state == reader.state
        assert broker.asked[-1] == len(records) + len(flood)

    run(main())


def test_what_is_ignored_is_read_to_its_end_however_long_it_takes_and_silence_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        records = long_log(after=1)
        flood = through("", *[b"flood"] * 60)
        broker = FakeBroker([*through(LOG, *records), *flood], pause=1.0)
        log = LogFollower(lambda *_: None)
        await log.attach(broker.session)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await log.catch_up(5.0)
        assert log.state == replay(records)
        assert loop.time() - began > 60
        monkeypatch.setattr(FakeChannel, "deliver", lambda _: None)
        broker.may_write = ()
        with pytest.raises(TimeoutError):
            await log.catch_up(5.0)

    run_without_waiting(main())


def test_a_flood_is_not_kept_while_a_start_is_searched_for() -> None:
    async def main() -> None:
        records = long_log(after=1)
        broker = FakeBroker([*through(LOG, *records), *through("", *[b"flood"] * 60)])
        log = LogFollower(lambda *_: None)
        await log.attach(broker.session)
        kept = await log._changes_in(broker.session, 0, len(broker.records) - 1)
        assert kept == records

    run(main())


def test_a_new_reader_that_finds_no_snapshot_where_it_should_be_reads_everything() -> None:
    async def main() -> None:
        records = long_log()[:20]
        state = replay(records)
        wrong = proposal(state, state.with_policy(Policy("wrong", ".", 1)), start=7)
        broker = FakeBroker(through(LOG, *records, wrong))
        log = await following(broker)
        assert broker.asked[-2:] == ["last", "first"]  # it has looked at the end once more
        assert [each for each in broker.asked if isinstance(each, int)] == [7, 0]
        assert log.state == replay([*records, wrong])

    run(main())


def test_a_writer_appends_a_snapshot_when_the_log_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "_WORTH_A_SNAPSHOT", 3_000)

    async def main() -> None:
        broker = FakeBroker()
        log, other = await following(broker), await following(broker)
        for number in range(1, 30):
            writer = (log, other)[number % 2]
            await writer.catch_up(PATIENCE)
            before = writer.state
            assert await writer.append(before, before.with_policy(Policy("p", ".", number)))
        parts = [body for _, body in broker.records if b'"snapshot"' in body]
        assert 2 <= len(parts) <= 5
        again = FakeBroker(broker.records)
        late = await following(again)
        assert late.state == log.state
        assert isinstance(again.asked[-1], int)
        assert again.asked[-1] > len(broker.records) / 2

    run(main())


@pytest.mark.parametrize("before", [1, 9, 10, 25])
def test_a_log_that_was_founded_late_is_known_again_by_who_connects_again(before: int) -> None:
    async def main() -> None:
        garbage = [*through("", *[b"garbage"] * before), *through(LOG, b"garbage")]
        broker = FakeBroker([*garbage, *through(LOG, *long_log(after=1))])
        log = await following(broker)
        assert log.state.epoch == 21
        broker.asked.clear()
        await following(broker, log)
        assert broker.asked[-1] == len(broker.records)
        broker.replace(*founded(FIRST))
        await following(broker, log)
        assert log.state.epoch == 1

    run(main())


def test_where_a_log_was_founded_is_not_searched_for_again_and_again() -> None:
    async def main() -> None:
        garbage = through("", *[b"garbage"] * 90)
        broker = FakeBroker([*garbage, *through(LOG, *founded(FIRST))])
        log = await following(broker)
        before, told = log.bytes_read, len(b"garbage")
        for _ in range(3):
            await log.catch_up(PATIENCE)
        assert log.bytes_read - before < 3 * 30 * told + 3 * len(broker.records[-1][1]) * 3
        assert log.state.epoch == 1

    run(main())


def test_a_search_for_a_start_that_is_interrupted_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_log, "LONGEST_STEP", 4)

    async def main() -> None:
        records = long_log(after=1)
        broker = FakeBroker([*through(LOG, *records), *through("", *[b"flood"] * 60)])
        log = LogFollower(lambda *_: None)
        await log.attach(broker.session)
        looks, look = 0, log._changes_in

        async def interrupted(*place: Any) -> Any:
            nonlocal looks
            looks += 1
            if looks % 4 == 0:
                raise Unreachable("the time is up")
            return await look(*place)

        monkeypatch.setattr(log, "_changes_in", interrupted)
        attempts = 1
        while True:
            try:
                await log.catch_up(PATIENCE)
                break
            except Unreachable:
                attempts += 1
                assert attempts < 20
        assert log.state == replay(records)
        assert attempts > 3

    run(main())


def test_a_last_chunk_of_more_records_than_a_reader_takes_at_once_is_seen_whole() -> None:
    async def main() -> None:
        broker = FakeBroker(through(LOG, *founded(FIRST)), chunk=5_000)
        log = await following(broker)
        for _ in range(1_500):
            broker.records.append(("", b"flood"))
        broker.push()
        await log.catch_up(PATIENCE)
        assert log._reader.next_offset == 1_501

    run(main())


# Another log


def test_a_log_made_again_with_as_many_records_is_another_one() -> None:
    async def main() -> None:
        broker = FakeBroker(through(LOG, *founded(*policies(3))))
        seen: list[State] = []
        log = LogFollower(lambda _, new: seen.append(new))
        await following(broker, log)
        others = founded(State().with_policy(Policy("new", ".", 1)), *policies(3)[1:])
        broker.replace(*others)
        await asyncio.wait_for(log.interrupted.wait(), PATIENCE)
        await log.catch_up(PATIENCE)
        assert log.state == replay(others)
        assert len(seen) == 2  # nothing between the two was ever shown

    run(main())


def test_who_asks_while_another_log_is_read_waits_for_that_reading() -> None:
    async def main() -> None:
        broker = FakeBroker(through(LOG, *founded(*policies(6))))
        log = await following(broker)
        others = founded(*policies(4))
        broker.replace(*others)
        broker.asked.clear()
        await asyncio.gather(*(log.catch_up(PATIENCE) for _ in range(8)))
        assert log.state == replay(others)
        assert log.failure is None
        assert broker.asked.count("last") <= 3  # one under way, one for all others

    run(main())


def test_a_record_of_a_reading_that_was_given_up_is_not_heard() -> None:
    async def main() -> None:
        broker = FakeBroker(through(LOG, *founded(FIRST)))
        log = await following(broker)
        old = broker.channels[-1]
        deliver = old._read
        assert deliver is not None
        others = founded(State().with_policy(Policy("new", ".", 1)))
        broker.replace(*others)
        await log.catch_up(PATIENCE)
        broker.records.append((LOG, b'{"format":3}'))
        old.closed = asyncio.get_running_loop().create_future()
        old._deliver_up_to(1)
        assert not log.state.stopped

    run(main())


def test_a_change_for_a_log_that_is_gone_is_void_and_asked_for_again() -> None:
    async def main() -> None:
        broker = FakeBroker(through(LOG, *founded(FIRST)))
        log = await following(broker)
        before = log.state
        broker.replace(*founded(State().with_policy(Policy("new", ".", 1))))
        waiting = asyncio.create_task(log.append(before, before.with_policy(Policy("x", ".", 1))))
        await asyncio.sleep(0)
        await log.catch_up(PATIENCE)
        assert await waiting is False
        assert log.state.policies.keys() == {"new"}

    run(main())


def test_a_change_whose_answer_got_lost_takes_effect_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made again, of what it had made already."""

    async def main() -> None:
        broker = FakeBroker(through(LOG, *founded(FIRST)))
        plane = ControlPlane(
            ["amqp://127.0.0.1:1"], ClusterView([], 1.0), patient.TOPOLOGY, lambda *_: None
        )
        await following(broker, plane.log)
        plane.session = broker.session
        publish, lost = FakeChannel.publish_mandatory, [True, False]

        async def stored_and_lost(channel: FakeChannel, *what: Any, **how: Any) -> bool:
            stored = await publish(channel, *what, **how)
            if lost.pop(0):
                raise Unreachable("the connection is closed")
            return stored

        monkeypatch.setattr(FakeChannel, "publish_mandatory", stored_and_lost)

        async def one_more(state: State) -> State:
            pictures = state.policies["pictures"]
            more = replace(pictures, shards_per_node=pictures.shards_per_node + 1)
            return state.with_policy(more)

        state = await plane.change(one_more)
        assert state.policies["pictures"].shards_per_node == 2
        assert state.epoch == 2

    run(main())


# What can't be understood


def test_one_record_stops_changes_and_nothing_else_until_the_log_is_replaced() -> None:
    async def main() -> None:
        broker = FakeBroker(through(LOG, *founded(FIRST), b'{"format":3}'))
        log = await following(broker)
        assert log.failure is None
        assert log.state.policies == FIRST.policies
        with pytest.raises(UnsupportedFormat, match="record 1 of the map log can't be understood"):
            await log.append(log.state, log.state.with_policy(Policy("more", ".", 1)))
        broker.replace(*founded(FIRST))
        await log.catch_up(PATIENCE)
        assert await log.append(log.state, log.state.with_policy(Policy("more", ".", 1)))

    run(main())


@pytest.mark.parametrize("record", [b'{"format":3}', b'{"base":0,"format":1,"state":{}}'])
def test_a_log_of_which_nothing_is_understood_is_refused_until_it_is_replaced(
    record: bytes,
) -> None:
    async def main() -> None:
        broker = FakeBroker(through(LOG, record))
        log = await following(broker)
        assert log.failure is not None
        with pytest.raises(UnsupportedFormat):
            await log.append(State(), FIRST)
        broker.replace(*founded(FIRST))
        await log.catch_up(PATIENCE)
        assert log.failure is None
        assert log.state.policies == FIRST.policies

    run(main())


STALE = proposal(State(log="another"), State(log="another").with_policy(Policy("stale", ".", 1)))


@pytest.mark.parametrize("oldest", [(LOG, STALE), (LOG, b"garbage"), ("", b"flood")])
def test_where_the_first_records_are_gone_the_oldest_left_replaces_no_log(
    oldest: tuple[str, bytes],
) -> None:
    async def main() -> None:
        records = long_log(after=2)
        state = replay(records)
        logged = through(LOG, *records)
        broker = FakeBroker([*logged[:20], *[oldest] * 12, *logged[20:]])
        snapshots_of = read_all([*records[:20], *[b""] * 12])
        broker.records[32:33] = through(LOG, *parts_of(snapshots_of))
        log = await following(broker)
        assert log.state == state
        broker.removed = 21
        await log.catch_up(PATIENCE)
        assert (log.state, log.failure) == (state, None)
        new = await following(broker)
        assert (new.state, new.failure) == (state, None)

    run(main())


def test_where_no_snapshot_is_left_either_a_new_reader_says_so_and_an_old_one_goes_on() -> None:
    async def main() -> None:
        records = founded(*policies(9))
        broker = FakeBroker(through(LOG, *records))
        log = await following(broker)
        broker.removed = 3
        await log.catch_up(PATIENCE)
        assert (log.state, log.failure) == (replay(records), None)
        new = await following(broker)
        assert "begins at record 3" in str(new.failure)
        reader = read_all(records)
        for part in parts_of(reader):
            broker.append(part)
        await new.catch_up(PATIENCE)
        assert (new.state, new.failure) == (replay(records), None)

    run(main())
