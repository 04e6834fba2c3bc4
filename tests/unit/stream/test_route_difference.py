"""Changes of routes are told in words, and a thousand of them in a few lines."""

from __future__ import annotations

import pytest

from sharding.stream.protocol.constants import Broker
from sharding.stream.routes.values import (
    MOST_TOLD,
    Finding,
    Missing,
    Partitions,
    StreamRoute,
    route_difference,
    told,
)

A, B, C = (Broker(host, 5552) for host in "abc")
LED = StreamRoute("s", A, (B, C))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (LED, StreamRoute("s", B, (C, A)), "'s' is led by b:5552 (before: a:5552)"),
        (LED, StreamRoute("s", None, (B, C)), "'s' has no leader now (before: a:5552)"),
        (
            LED,
            StreamRoute("s", B, ()),
            "'s' is led by b:5552 (before: a:5552), has no replica on c:5552 any more",
        ),
        (StreamRoute("s", A, (B,)), LED, "'s' has a replica on c:5552 as well"),
        (LED, StreamRoute("s", A, (C, B)), "'s' has its replicas in another order"),
        (LED, Missing("s", 2), "'s' is gone"),
        (Missing("s", 2), LED, "'s' exists now, and is led by a:5552"),
        (Missing("x", 2), Partitions("x", ("x-0",)), "'x' exists now, of 1 partitions"),
        (Partitions("x", ("x-0",)), Partitions("x", ("x-0", "x-1")), "'x' has 'x-1' as well"),
        (Partitions("x", ("x-0", "x-1")), Partitions("x", ("x-1",)), "'x' has lost 'x-0'"),
        (
            Partitions("x", ("x-0", "x-1")),
            Partitions("x", ("x-1", "x-0")),
            "'x' has its partitions in another order",
        ),
    ],
)
def test_change_is_a_sentence(before: Finding, after: Finding, words: str) -> None:
    assert route_difference(before, after) == words


def test_many_changes_at_once_are_counted() -> None:
    changes = [(StreamRoute(f"s{n}", A), StreamRoute(f"s{n}", B)) for n in range(1_000)]
    sentences = told(changes)
    assert len(sentences) == MOST_TOLD + 1
    assert sentences[-1] == f"{1_000 - MOST_TOLD} more routes changed at the same time"
    assert told(changes[:2]) == [route_difference(*change) for change in changes[:2]]
    assert told([]) == []


def test_changes_of_leaders_are_not_among_those_that_are_only_counted() -> None:
    kept = [(StreamRoute(f"s{n}", A, (B, C)), StreamRoute(f"s{n}", A, (B,))) for n in range(10)]
    lost = (StreamRoute("t", C, (A, B)), StreamRoute("t", None, (A, B)))
    assert told([*kept, lost])[0] == "'t' has no leader now (before: c:5552)"
