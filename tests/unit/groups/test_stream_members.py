"""Workers of a stream group that can't reach each other: what may pass is waited for and said once,
what stays ends the worker. The broker is in memory, threads are real.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from sharding.groups import StreamGroupOptions
from sharding.groups.handling.delivery import GroupFailed
from sharding.groups.streams import worker
from sharding.groups.streams.worker import StreamMembers
from sharding.stream import StreamEnvironment
from sharding.stream.errors import NoLeader, refusal
from sharding.stream.protocol.constants import Code
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE

REFUSED = Code.ACCESS_REFUSED


class Link:
    """A consumer that hears nothing until it is closed, or a producer."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def messages(self) -> Iterator[Any]:
        self._closed.wait(PATIENCE)
        return iter(())

    def send(self, *_: Any, **__: Any) -> None: ...

    def flush(self, **_: Any) -> None: ...

    def close(self, _: float) -> None:
        self._closed.set()


class FakeEnvironment:
    def __init__(self, reading: list[Exception], writing: list[Exception]) -> None:
        self._errors = {"reading": reading, "writing": writing}
        self.tries = dict.fromkeys(self._errors, 0)

    def exists(self, _: str) -> bool:
        return True

    def consumer(self, *_: Any, **__: Any) -> Link:
        return self._try("reading")

    def producer(self, *_: Any, **__: Any) -> Link:
        return self._try("writing")

    def _try(self, what: str) -> Link:
        self.tries[what] += 1
        left = self._errors[what]
        if left:
            raise left.pop(0)
        return Link()


Make = Callable[..., tuple[StreamMembers, FakeEnvironment, list[GroupFailed]]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(worker, "_TRY_AGAIN", 0.001)
    made: list[StreamMembers] = []

    def new(
        reading: list[Exception] | None = None, writing: list[Exception] | None = None
    ) -> tuple[StreamMembers, FakeEnvironment, list[GroupFailed]]:
        environment = FakeEnvironment(reading or [], writing or [])
        failed: list[GroupFailed] = []
        members = StreamMembers(
            cast(StreamEnvironment, environment),
            "inv",
            "billing",
            "me",
            StreamGroupOptions(settle_time=0),
            time.monotonic,
            held=lambda: frozenset(),
            on_heard=lambda: None,
            on_failure=failed.append,
        )
        made.append(members)
        members.start()
        return members, environment, failed

    yield new
    for each in made:
        each.close(PATIENCE)


@pytest.mark.parametrize(
    ("what", "command", "right"),
    [("reading", "Subscribe", "read it"), ("writing", "DeclarePublisher", "write to it")],
)
def test_a_worker_without_the_right_to_meet_the_others_fails_and_says_which(
    make: Make, what: str, command: str, right: str
) -> None:
    error = refusal(command, REFUSED, "warren.group.inv")
    _, environment, failed = make(**{what: [error] * 100})
    wait_until(lambda: failed, PATIENCE)
    (failure,) = failed
    assert "'warren.group.inv'" in str(failure)
    assert f"needs the right to {right}" in str(failure)
    assert environment.tries[what] == 1


def test_a_stream_that_others_may_make_is_waited_for(make: Make) -> None:
    members, _, failed = make(reading=[refusal("Create", REFUSED, "warren.group.inv")])
    wait_until(lambda: members.settled, PATIENCE)
    assert failed == []


def test_a_worker_that_never_heard_the_others_says_so_once_and_that_it_takes_nothing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "warren.groups")
    away: list[Exception] = [NoLeader("no leader")] * 5
    members, _, failed = make(reading=[*away, RuntimeError("odd"), *away])
    wait_until(lambda: members.settled, PATIENCE)
    said = [record.getMessage() for record in caplog.records]
    waits = "the other workers can't be heard, and no partition is taken before"
    assert said == [f"{waits}: no leader", waits, f"{waits}: no leader"]
    assert failed == []


def test_a_worker_that_hears_the_others_takes_partitions_though_it_can_not_tell_them(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "warren.groups")
    members, environment, failed = make(writing=[NoLeader("no leader")] * 5)
    wait_until(lambda: members.settled and environment.tries["writing"] == 6, PATIENCE)
    assert [each.getMessage() for each in caplog.records] == [
        "the other workers can't be told anything: no leader"
    ]
    assert failed == []
