"""The fronts of all groups: what they check, what they show, and how they run and stop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, cast

import pytest

from sharding.errors import InvalidInput, WarrenError
from sharding.groups import AioConsumerGroup, ConsumerGroup, GroupOptions, StreamConsumerGroup
from sharding.groups.handling.delivery import Delivery
from sharding.groups.handling.threads import Handler, HandlerThreads
from sharding.groups.running import BlockingFront, GroupFront
from sharding.groups.streams.options import StreamGroupOptions
from sharding.groups.streams.worker import Partitions, StreamWorker
from tests.cluster.waiting import PATIENCE, wait_until
from tests.support.fake_streams import FakeCluster

NOWHERE = cast(Any, None)
Front = Callable[..., GroupFront]


def queue_group(handler: Any = print, name: str = "images", **options: Any) -> GroupFront:
    return ConsumerGroup(NOWHERE, name, handler, options=GroupOptions(**options))


def aio_group(handler: Any = asyncio.sleep, name: str = "images", **options: Any) -> GroupFront:
    return AioConsumerGroup(NOWHERE, name, handler, options=GroupOptions(**options))


def stream_group(handler: Any = print, name: str = "images", **options: Any) -> GroupFront:
    chosen = GroupOptions(**options)
    return StreamConsumerGroup(NOWHERE, name, handler, group="billing", options=chosen)


all_fronts = pytest.mark.parametrize("front", [queue_group, aio_group, stream_group])


@all_fronts
def test_what_can_not_work_is_refused_before_anything_starts(front: Front) -> None:
    with pytest.raises(InvalidInput, match="handler: must be callable"):
        front("no function")
    with pytest.raises(InvalidInput, match="dead_letter"):
        front(name="x" * 254)
    with pytest.raises(InvalidInput, match="the group's"):
        front(name="x" * 250, dead_letter="dead")


@all_fronts
def test_every_worker_has_an_id_of_its_own(front: Front) -> None:
    assert front().worker != front().worker


@all_fronts
def test_a_group_that_has_not_started_holds_and_counts_nothing(front: Front) -> None:
    group = front()
    assert (group.shards, group.counters) == (frozenset(), {})


def test_a_group_shows_what_it_is() -> None:
    group = queue_group()
    assert repr(group) == f"<ConsumerGroup 'images', worker {group.worker}, 0 shards>"
    group = aio_group()
    assert repr(group) == f"<AioConsumerGroup 'images', worker {group.worker}, 0 shards>"
    group = stream_group()
    about = f"'billing' of 'images', worker {group.worker}"
    assert repr(group) == f"<StreamConsumerGroup {about}, 0 shards>"


def test_a_group_is_counted_under_its_name_and_what_it_reads() -> None:
    assert queue_group().counted_as.labels == {"logical": "images", "group": "images"}
    assert aio_group().counted_as.labels == {"logical": "images", "group": "images"}
    assert stream_group().counted_as.labels == {"logical": "images", "group": "billing"}


class Held:
    """A worker that holds one shard."""

    counters: Mapping[str, float] = {"taken": 1}

    def held(self) -> frozenset[str]:
        return frozenset({"s"})


class Group(BlockingFront):
    """One over no broker: messages are submitted by the test."""

    def __init__(self, handler: Handler) -> None:
        self.told: list[BaseException] = []
        options = GroupOptions(stop_timeout=PATIENCE)
        super().__init__("images", None, handler, options, self.told.append)
        self.ended: list[float] = []

    def _begin(self) -> None:
        self._runner = HandlerThreads(self._handler, self.options)
        self._worker = Held()

    def submit(self) -> None:
        assert self._runner is not None
        self._runner.submit("key", Delivery(b"", "key", "s"), lambda _: None)

    def fail(self, error: Exception) -> None:
        self._fail(error)

    def _end(self, patience: float) -> bool:
        self.ended.append(patience)
        return self._runner is None or self._runner.stop(patience)


def fail(*_: object) -> NoReturn:
    raise KeyError("not now")


def test_a_started_group_shows_what_its_worker_and_its_handlers_do() -> None:
    with Group(lambda _: None) as group:
        assert group.shards == {"s"}
        assert group.counters["taken"] == 1
        assert group.counters["in_hand"] == 0
        assert repr(group) == f"<Group 'images', worker {group.worker}, 1 shards>"
    assert group.ended == [PATIENCE]


def test_a_group_starts_once() -> None:
    with Group(lambda _: None) as group, pytest.raises(InvalidInput, match="start: may be called"):
        group.start()
    with pytest.raises(InvalidInput, match="start: may be called once"):
        group.start()


def test_run_starts_what_has_not_started_waits_for_the_stop_and_raises_nothing() -> None:
    handled = threading.Event()
    group = Group(lambda _: handled.set())
    running = threading.Thread(target=group.run)
    running.start()
    group.stop(timeout=7)
    running.join(PATIENCE)
    assert not running.is_alive()
    assert group.ended in ([7], [PATIENCE])  # by whoever comes first when it has begun


def test_a_stop_while_it_starts_ends_it_when_it_has_begun() -> None:
    group = Group(lambda _: None)
    starting, go_on = threading.Event(), threading.Event()

    def begin_slowly() -> None:
        starting.set()
        assert go_on.wait(PATIENCE)
        Group._begin(group)

    group._begin = begin_slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(3) as threads:
        started = threads.submit(group.start)
        assert starting.wait(PATIENCE)
        with pytest.raises(InvalidInput, match="may be called once"):
            group.start()
        stopped = threads.submit(group.stop, 7)
        wait_until(lambda: group._stop_request.is_asked)
        assert not stopped.done()
        go_on.set()
        assert stopped.result(PATIENCE)
        started.result(PATIENCE)
    assert len(group.ended) == 1
    assert group.stop()


def test_a_start_that_failed_may_be_made_again() -> None:
    group = Group(lambda _: None)
    group._begin = fail  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        group.start()
    del group._begin
    group.start()
    assert group.healthy
    assert group.stop()


def test_a_stop_by_a_signal_while_it_stops_only_asks() -> None:
    group = Group(lambda _: None)
    group.start()
    answers: list[bool] = []
    end = group._end

    def interrupted(patience: float) -> bool:
        answers.append(group.stop())  # as a handler of a signal would, on the same thread
        return end(patience)

    group._end = interrupted  # type: ignore[method-assign]
    assert group.stop()
    assert answers == [False]


def test_a_stop_that_was_interrupted_is_finished_by_the_next() -> None:
    group = Group(lambda _: None)
    group.start()
    group._end = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyError):
        group.stop()
    del group._end
    assert group.stop()
    assert group.ended


def test_run_raises_what_made_it_useless_to_go_on() -> None:
    group = Group(lambda _: None)
    group.start()
    group.fail(WarrenError("no lock"))
    with pytest.raises(WarrenError, match="no lock"):
        group.run()
    assert group.ended


def test_a_group_that_failed_says_so_stops_and_raises_on_leaving(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = Group(lambda _: None)

    def work() -> None:
        with group:
            assert group.healthy
            group.fail(WarrenError("no lock"))
            group.fail(WarrenError("a second one"))
            assert not group.healthy
            wait_until(lambda: group.ended)  # nobody is in run(), and no shard may be held idle

    with pytest.raises(WarrenError, match="no lock"):
        work()
    assert str(group.failure) == "no lock"
    assert group.told == [group.failure]
    assert "the worker of 'images' stops: no lock" in caplog.text


def test_a_group_that_fails_where_no_thread_can_be_started_says_so_and_ends_in_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    group = Group(lambda _: None)
    group.start()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        group.fail(WarrenError("no lock"))
    assert group.told == [group.failure]
    with pytest.raises(WarrenError, match="no lock"):
        group.run()
    assert group.ended


def test_what_run_has_raised_is_not_raised_again_on_leaving() -> None:
    with Group(lambda _: None) as group:
        group.fail(WarrenError("no lock"))
        with pytest.raises(WarrenError, match="no lock"):
            group.run()


def test_an_error_of_the_application_is_not_hidden_by_the_groups_own() -> None:
    def work() -> None:
        with Group(lambda _: None) as group:
            group.fail(WarrenError("no lock"))
            raise KeyError("mine")

    with pytest.raises(KeyError):
        work()


def test_what_on_failure_raises_stops_nothing() -> None:
    group = Group(lambda _: None)
    group._on_failure = lambda error: sys.exit(str(error))
    group.start()
    group.fail(WarrenError("no lock"))
    with pytest.raises(WarrenError, match="no lock"):
        group.run()


def test_an_on_failure_that_blocks_holds_up_neither_the_stop_nor_for_ever_the_error() -> None:
    let_go = threading.Event()
    group = Group(lambda _: None)
    group.options = GroupOptions(stop_timeout=0.05)
    group._on_failure = lambda _: let_go.wait(10 * PATIENCE)
    group.start()
    failing = threading.Thread(target=group.fail, args=(WarrenError("no lock"),))
    failing.start()
    wait_until(lambda: group.ended, PATIENCE)
    with pytest.raises(WarrenError, match="no lock"):
        group.run()
    let_go.set()
    failing.join(PATIENCE)


def test_on_failure_has_been_heard_when_the_error_is_raised() -> None:
    """The process may end with it."""
    let_go, told = threading.Event(), list[BaseException]()
    group = Group(lambda _: None)

    def tell(error: BaseException) -> None:
        assert let_go.wait(PATIENCE)
        assert group.stop()  # it may ask for that, too
        told.append(error)

    group._on_failure = tell
    group.start()
    group.fail(WarrenError("no lock"))
    threading.Timer(0.05, let_go.set).start()
    with pytest.raises(WarrenError, match="no lock"):
        group.run()
    assert told == [group.failure]


async def alert(_: object) -> None: ...


@pytest.mark.parametrize("group", [ConsumerGroup, AioConsumerGroup])
def test_an_on_failure_that_nobody_would_await_is_refused(group: Any) -> None:
    with pytest.raises(InvalidInput, match="on_failure: must not be asynchronous"):
        group(NOWHERE, "images", print, on_failure=alert)
    with pytest.raises(InvalidInput, match="on_failure: must be callable"):
        group(NOWHERE, "images", print, on_failure="alert")


def test_stop_says_again_what_it_said_before() -> None:
    let_go = threading.Event()
    group = Group(lambda _: let_go.wait(PATIENCE))
    group.start()
    group.submit()
    wait_until(lambda: group.counters["running"] == 1)
    assert [group.stop(0.01), group.stop(0.01)] == [False, False]
    let_go.set()


def test_whatever_ends_run_ends_the_group() -> None:
    group = Group(lambda _: None)

    def interrupted() -> NoReturn:
        raise TimeoutError("a signal of the application's")

    group._stop_request.wait = interrupted  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        group.run()
    assert group.ended


def test_a_group_that_was_stopped_is_not_healthy_and_has_not_failed() -> None:
    group = Group(lambda _: None)
    assert not group.healthy
    with group:
        assert group.healthy
    assert not group.healthy
    assert group.failure is None


def test_a_handler_that_stops_its_group_does_not_wait_for_itself() -> None:
    answers: list[bool] = []
    group = Group(lambda _: answers.append(group.stop()))
    group.start()
    group.submit()
    group.run()  # which carries it out
    assert answers == [False]
    assert group.ended == [PATIENCE]


def test_a_stream_worker_that_has_not_started_can_be_ended() -> None:
    """A group may be closed, with its environment, while it starts."""
    access, options = FakeCluster().access, StreamGroupOptions()
    worker = StreamWorker(
        "me",
        NOWHERE,
        access,
        Partitions(access, "s", 1),
        "billing",
        options,
        HandlerThreads(print, options),
        on_failure=lambda _: None,
    )
    worker.wind_down()
    assert worker.leave(0)
