"""Handlers on threads, and asynchronous ones on tasks: the same promises."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from typing import Any

import pytest

from sharding.groups import Delivery, GroupOptions, Retry
from sharding.groups.handling.delivery import Dead, Done, GivenBack, Outcome
from sharding.groups.handling.tasks import HandlerTasks
from sharding.groups.handling.threads import Handler, HandlerThreads
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE
from tests.support.hand_time import run_without_waiting

QUICK = Retry(attempts=2, first_delay=0.001, jitter=0)


class Ends:
    """What became of each message, as it becomes known."""

    def __init__(self) -> None:
        self.told: queue.Queue[tuple[str, Outcome]] = queue.Queue()

    def submit(self, runner: HandlerThreads | HandlerTasks, *names: str, shard: str = "s") -> None:
        for name in names:
            delivery = Delivery(name.encode(), name[0], shard)
            runner.submit(name[0], delivery, lambda end, name=name: self.told.put((name, end)))  # type: ignore[misc]  # mypy can't type a default

    def take(self, count: int) -> dict[str, Outcome]:
        return dict(self.told.get(timeout=PATIENCE) for _ in range(count))


def runner(handler: Handler, **options: Any) -> HandlerThreads:
    return HandlerThreads(handler, GroupOptions(**{"retry": QUICK, **options}))


def test_handlers_run_side_by_side_up_to_the_parallelism() -> None:
    together = threading.Barrier(3, timeout=PATIENCE)
    ends = Ends()
    shop = runner(lambda _: together.wait(), parallelism=3)
    ends.submit(shop, "a1", "b1", "c1")
    assert ends.take(3) == dict.fromkeys(("a1", "b1", "c1"), Done())
    assert shop.stop(PATIENCE)


def test_a_key_is_never_at_work_twice() -> None:
    busy: dict[str, bool] = {}
    clashes: list[str] = []

    def handle(delivery: Delivery) -> None:
        if busy.get(delivery.key):
            clashes.append(delivery.key)
        busy[delivery.key] = True
        time.sleep(0.001)
        busy[delivery.key] = False

    ends = Ends()
    shop = runner(handle, parallelism=8)
    ends.submit(shop, *(f"{key}{number}" for number in range(50) for key in "abc"))
    ends.take(150)
    assert clashes == []
    assert shop.stop(PATIENCE)


def test_even_an_exit_in_a_handler_is_only_a_failure() -> None:
    def handle(_: Delivery) -> None:
        raise SystemExit(3)

    ends = Ends()
    shop = runner(handle)
    ends.submit(shop, "a1")
    dead = ends.take(1)["a1"]
    assert isinstance(dead, Dead)
    assert dead.error == "SystemExit: 3"
    dead.stored()
    assert shop.stop(PATIENCE)


def test_after_the_end_everything_is_given_back() -> None:
    ends = Ends()
    shop = runner(lambda _: None)
    assert shop.stop(PATIENCE)
    ends.submit(shop, "a1")
    assert ends.take(1) == {"a1": GivenBack()}


def test_a_released_shard_is_told_when_its_last_handler_returns() -> None:
    let_go, released = threading.Event(), threading.Event()
    ends = Ends()
    shop = runner(lambda _: let_go.wait(PATIENCE))
    ends.submit(shop, "a1", "a2")
    wait_until(lambda: shop.counters["running"] == 1, PATIENCE)
    shop.release("s", released.set)
    assert ends.take(1) == {"a2": GivenBack()}
    assert not released.is_set()
    let_go.set()
    assert released.wait(PATIENCE)
    assert ends.take(1) == {"a1": Done()}
    ends.submit(shop, "a3")
    assert ends.take(1) == {"a3": GivenBack()}
    shop.accept("s")
    ends.submit(shop, "a4")
    assert ends.take(1) == {"a4": Done()}
    assert shop.stop(PATIENCE)


def test_an_owner_that_fails_ends_no_thread() -> None:
    def fail(_: Outcome) -> None:
        raise RuntimeError("owner")

    ends = Ends()
    shop = runner(lambda _: None)
    shop.submit("a", Delivery(b"", "a", "s"), fail)
    ends.submit(shop, "b1")
    assert ends.take(1) == {"b1": Done()}
    assert shop.stop(PATIENCE)


def test_stopping_does_not_wait_longer_than_it_may() -> None:
    let_go = threading.Event()
    ends = Ends()
    shop = runner(lambda _: let_go.wait(PATIENCE))
    ends.submit(shop, "a1")
    wait_until(lambda: shop.counters["running"] == 1, PATIENCE)
    assert not shop.stop(0.05)
    let_go.set()
    assert shop.stop(PATIENCE)


def test_a_lease_that_ran_out_holds_messages_until_it_is_renewed() -> None:
    ends = Ends()
    shop = runner(lambda _: None)
    shop.set_lease("s", time.monotonic() - 1)
    ends.submit(shop, "a1")
    ends.submit(shop, "b1", shard="t")
    assert ends.take(1) == {"b1": Done()}
    assert shop.counters["in_hand"] == 1
    shop.set_lease("s", time.monotonic() + 10 * PATIENCE)
    assert ends.take(1) == {"a1": Done()}
    assert shop.stop(PATIENCE)


def test_hanging_handlers_are_replaced_and_bounded() -> None:
    let_go, failures = threading.Event(), queue.Queue[Exception]()
    ends = Ends()
    options = GroupOptions(retry=QUICK, handler_timeout=0.05, max_lost_threads=1)
    shop = HandlerThreads(lambda _: let_go.wait(PATIENCE), options, on_failure=failures.put)
    ends.submit(shop, "a1", "b1", "c1")
    for _ in range(2):
        [(_, dead)] = ends.take(1).items()
        assert isinstance(dead, Dead)
        dead.stored()
    assert "2 handlers hang, 1 are tolerated" in str(failures.get(timeout=PATIENCE))
    let_go.set()
    shop.stop(PATIENCE)


def test_a_thread_that_can_not_be_replaced_is_a_failure_and_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, let_go, failures = threading.Event(), threading.Event(), queue.Queue[Exception]()

    def hang(_: Delivery) -> None:
        begun.set()
        let_go.wait(PATIENCE)

    options = GroupOptions(retry=QUICK, handler_timeout=0.5)
    shop = HandlerThreads(hang, options, on_failure=failures.put)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread_is_left)
        Ends().submit(shop, "a1")
        assert begun.wait(PATIENCE)
        assert "can't start new thread" in str(failures.get(timeout=PATIENCE))
    let_go.set()
    shop.stop(0)


def no_thread_is_left(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("stubborn", [False, True])
def test_asynchronous_handlers_keep_the_same_promises(stubborn: bool) -> None:
    async def handle(delivery: Delivery) -> None:
        if delivery.body == b"b1":
            raise ValueError("always")
        if delivery.body == b"c1":
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                if stubborn:
                    await asyncio.sleep(3)
                raise
        await asyncio.sleep(0.001)

    async def main() -> None:
        ends = Ends()
        options = GroupOptions(retry=QUICK, handler_timeout=0.1, parallelism=3)
        shop = HandlerTasks(handle, options, clock=asyncio.get_running_loop().time)
        ends.submit(shop, "a1", "a2", "b1", "b2", "c1")
        told: dict[str, Outcome] = {}
        async with asyncio.timeout(10):
            while len(told) < 5:
                await asyncio.sleep(0.01)
                while not ends.told.empty():
                    name, end = ends.told.get_nowait()
                    told[name] = end
                    if isinstance(end, Dead):
                        end.stored()
        reasons = {n: (e.why, e.attempts) for n, e in told.items() if isinstance(e, Dead)}
        assert reasons == {"b1": ("failed", 2), "c1": ("timeout", 1)}
        assert {n for n, e in told.items() if e == Done()} == {"a1", "a2", "b2"}
        assert shop.counters["lost_threads"] == (1 if stubborn else 0)
        assert await shop.stop(PATIENCE)

    run_without_waiting(main())


def test_asynchronous_handlers_are_cancelled_when_stopping_takes_too_long() -> None:
    async def main() -> None:
        begun, ends = asyncio.Event(), Ends()
        cancelled = False

        async def handle(_: Delivery) -> None:
            nonlocal cancelled
            begun.set()
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                cancelled = True
                raise

        shop = HandlerTasks(handle, GroupOptions(), clock=asyncio.get_running_loop().time)
        ends.submit(shop, "a1", "a2")
        await begun.wait()
        assert not await shop.stop(0.05)
        await asyncio.sleep(0)
        assert cancelled
        assert ends.take(1) == {"a2": GivenBack()}

    run_without_waiting(main())


def test_nothing_is_begun_whose_lease_ran_out_while_the_loop_was_blocked() -> None:
    """A task that was made in time began when the loop came to it, and what it handled others had
    handled by then."""
    now = 0.0
    begun: list[bytes] = []

    async def handle(delivery: Delivery) -> None:
        nonlocal now
        begun.append(delivery.body)
        now += 10  # blocks the loop

    async def main() -> None:
        ends = Ends()
        shop = HandlerTasks(handle, GroupOptions(parallelism=2), clock=lambda: now)
        shop.set_lease("s", 5)
        ends.submit(shop, "a1", "b1")
        await asyncio.sleep(1)
        assert ends.take(1) == {"a1": Done()}
        assert begun == [b"a1"]
        shop.set_lease("s", 15)
        await asyncio.sleep(1)
        assert ends.take(1) == {"b1": Done()}
        assert await shop.stop(PATIENCE)

    run_without_waiting(main())
