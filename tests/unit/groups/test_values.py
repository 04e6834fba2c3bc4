"""Options, announcements and dead letters: what they accept, and what they make of it."""

from __future__ import annotations

import json
import logging
import pickle
import signal
import threading
from typing import Any, cast

import pytest

from sharding.errors import InvalidInput, WarrenError
from sharding.groups import BatchFailed, GroupOptions, Retry, StreamConsumerGroup
from sharding.groups.handling.delivery import first_line
from sharding.groups.running import SIGNALS, StopRequest, stopping_on_signals
from sharding.groups.sharing.roster import Announcement, Kind, Roster
from tests.cluster.waiting import PATIENCE


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prefetch": 0}, "prefetch"),
        ({"prefetch": 65536}, "prefetch"),
        ({"prefetch": True}, "prefetch"),
        ({"parallelism": 1.5}, "parallelism"),
        ({"batch_size": 101}, "batch_size"),
        ({"batch_wait": -1}, "batch_wait"),
        ({"batch_wait": float("nan")}, "batch_wait"),
        ({"handler_timeout": 0}, "handler_timeout"),
        ({"heartbeat": 0}, "heartbeat"),
        ({"announce_interval": 3, "member_timeout": 3}, "member_timeout"),
        ({"retry": 5}, "retry"),
        ({"dead_letter": ""}, "dead_letter"),
        ({"stop_timeout": "soon"}, "stop_timeout"),
    ],
)
def test_an_option_that_breaks_its_rule_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        GroupOptions(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 0},
        {"first_delay": -1},
        {"factor": 0.5},
        {"max_delay": float("inf")},
        {"jitter": 2},
    ],
)
def test_a_retry_that_breaks_its_rule_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"^retry.{next(iter(options))}"):
        Retry(**options)


def test_delays_grow_to_their_bound_and_vary_by_the_jitter() -> None:
    retry = Retry(first_delay=1, factor=3, max_delay=20, jitter=0.5)
    assert [retry.delay(tries, 0.5) for tries in (1, 2, 3, 4, 10_000)] == [1, 3, 9, 20, 20]
    assert (retry.delay(1, 0.0), retry.delay(1, 1.0)) == (0.5, 1.5)


def test_dead_letters_are_named_after_the_queue_unless_told_otherwise() -> None:
    assert GroupOptions().dead_letters_of("images") == "images.dead"
    assert GroupOptions(dead_letter="graves").dead_letters_of("images") == "graves"
    assert GroupOptions(dead_letter=None).dead_letters_of("images") is None
    with pytest.raises(InvalidInput, match="dead_letter: must be at most 255 bytes"):
        GroupOptions().dead_letters_of("x" * 252)


@pytest.mark.parametrize("done", [-1, 1.5, True, None])
def test_a_batch_can_not_be_done_by_less_than_nothing(done: Any) -> None:
    with pytest.raises(InvalidInput):
        BatchFailed(done)


def test_a_failed_batch_survives_a_pickle() -> None:
    again = pickle.loads(pickle.dumps(BatchFailed(3, "why")))
    assert (again.done, str(again)) == (3, "why")


def test_an_error_is_shown_by_its_first_line() -> None:
    assert first_line(ValueError("one\ntwo")) == "ValueError: one"
    assert first_line(KeyError()) == "KeyError"
    assert len(first_line(ValueError("x" * 1000))) == 300


def test_an_announcement_is_read_as_it_was_written() -> None:
    told = Announcement("w", Kind.HERE, frozenset({"a", "ü"}))
    assert Announcement.loads(told.dumps()) == told


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"kind": "shout"},
        {"shards": [1]},
        {"shards": "ab"},
        {"worker": None},
        {"more": 1},
    ],
)
def test_an_announcement_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    value = json.loads(Announcement("w", Kind.HERE).dumps())
    with pytest.raises(WarrenError):
        Announcement.loads(json.dumps({**value, **change}).encode())


@pytest.mark.parametrize("end", range(0, 60, 7))
def test_an_announcement_that_is_cut_off_is_refused(end: int) -> None:
    with pytest.raises(WarrenError):
        Announcement.loads(Announcement("w", Kind.HERE, frozenset({"a"})).dumps()[:end])


def here(worker: str, *shards: str, kind: Kind = Kind.HERE) -> bytes:
    return Announcement(worker, kind, frozenset(shards)).dumps()


def test_a_newcomer_counts_after_a_while_and_is_told_what_others_hold() -> None:
    roster = Roster("me", settle_time=1, member_timeout=3)
    assert roster.hear(here("new", kind=Kind.HELLO), 10)
    assert roster.held_by_others(10.5) == {}
    assert roster.held_by_others(11) == {"new": frozenset()}
    assert not roster.hear(here("new"), 11)


def test_one_that_holds_something_counts_at_once() -> None:
    roster = Roster("me", settle_time=1, member_timeout=3)
    roster.hear(here("old", "s1"), 10)
    assert roster.held_by_others(10) == {"old": frozenset({"s1"})}


def test_the_silent_and_those_that_said_goodbye_are_gone() -> None:
    roster = Roster("me", settle_time=0, member_timeout=3)
    roster.hear(here("a", "s1"), 10)
    roster.hear(here("b", "s2"), 12)
    assert set(roster.held_by_others(12.9)) == {"a", "b"}
    assert set(roster.held_by_others(13)) == {"b"}
    roster.hear(here("b", kind=Kind.BYE), 13)
    assert roster.held_by_others(13) == {}


def test_who_said_goodbye_has_no_share_and_keeps_what_it_has_not_given_up() -> None:
    roster = Roster("me", settle_time=0, member_timeout=3)
    roster.hear(here("a", "s1", "s2"), 10)
    roster.hear(here("a", "s2", kind=Kind.BYE), 10)
    assert roster.held_by_others(10) == {}
    assert roster.held_by_leaving(10) == {"s2"}
    assert roster.held_by_leaving(13) == frozenset()  # not heard of any more
    roster.hear(here("a", kind=Kind.BYE), 11)
    assert roster.held_by_leaving(11) == frozenset()


def test_a_worker_does_not_hear_itself() -> None:
    roster = Roster("me", settle_time=0, member_timeout=3)
    assert not roster.hear(here("me", "s1"), 1)
    assert roster.held_by_others(1) == {}


def test_a_stop_is_heard_by_everybody_who_waits() -> None:
    request = StopRequest()
    waiting = [threading.Thread(target=request.wait) for _ in range(3)]
    for each in waiting:
        each.start()
    request.ask()
    for each in waiting:
        each.join(PATIENCE)
    assert not any(each.is_alive() for each in waiting)


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    done = []

    def elsewhere() -> None:
        with stopping_on_signals(lambda: None):
            done.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == [True]


def test_stream_worker_takes_signals_over_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Started(Exception):
        pass

    seen: list[object] = []

    def start(_: StreamConsumerGroup) -> None:
        seen.extend(map(signal.getsignal, SIGNALS))
        raise Started

    monkeypatch.setattr(StreamConsumerGroup, "start", start)
    before = [signal.getsignal(number) for number in SIGNALS]
    group = StreamConsumerGroup(cast(Any, None), "events", print, group="billing")
    with pytest.raises(Started):
        group.run()
    assert not set(seen) & set(before)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_pika_is_heard_about_everything_but_locks_of_a_group() -> None:
    logger = logging.getLogger("pika.channel")
    record = logger.makeRecord(
        "pika.channel", logging.WARNING, "", 0, "closed %s on %s", ("in exclusive use", 5), None
    )
    assert all(each.filter(record) for each in logger.filters if isinstance(each, logging.Filter))
