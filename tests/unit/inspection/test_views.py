"""What was seen is drawn, served and repeated as it is; what is not known is not made up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

import pytest
from rich.console import Console, RenderableType

from sharding import Unreachable, WarrenError
from sharding.amqp.session import Declared
from sharding.cli.inspect import as_table, as_tree, heading, views
from sharding.inspection import GroupView, ShardState, ShardView, View, Watched
from sharding.inspection.asking import Listed, listed_from, shard_view, view_of
from sharding.inspection.views import ViewKind, lag, samples_of_view
from sharding.metrics.names import Sample
from sharding.stream.consumer.probe import PROBE_NAME, Ends
from tests.support.maps import queue_map

MAP = queue_map("ab")
FIRST, SECOND = (shard.name for shard in MAP.shards)
AUDIT = GroupView("audit", stored=40, lag=9, consumers=1)
STREAM = View(
    "invoices",
    ViewKind.SUPER_STREAM,
    (
        ShardView("invoices-0", ShardState.UP, "a:1", ("b:2",), first=0, last=49, groups=(AUDIT,)),
        ShardView("invoices-1", ShardState.AWAY, note="no leader for 3 s"),
    ),
)


def drawn(renderable: RenderableType) -> str:
    console = Console(width=300, record=True, file=None, markup=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_queue_is_seen_with_depth_consumers_and_slots() -> None:
    view = view_of(MAP, {FIRST: Declared(FIRST, 7, 2), SECOND: None}, {})
    first, second = view.shards
    assert (first.state, first.messages, first.consumers) == (ShardState.UP, 7, 2)
    assert (second.state, second.messages) == (ShardState.AWAY, None)
    assert sum(shard.slots or 0 for shard in view.shards) == 16_384
    assert heading(view) == "images: epoch 1, exchange images, 2 shards, 1 not up"


def test_shard_that_nobody_has_is_missing() -> None:
    view = view_of(MAP, {FIRST: Declared(FIRST, 0, 0)}, {})
    assert view.shards[1].state is ShardState.MISSING


def test_queue_with_replicas_is_under_its_leader_of_now() -> None:
    view = view_of(MAP, {}, {FIRST: ("rabbit@z", ("rabbit@a",))})
    assert view.shards[0].leader == "rabbit@z"
    assert list(view.by_leader) == ["rabbit@b", "rabbit@z"]
    assert "replicas" in drawn(as_table(view))


@pytest.mark.parametrize(
    ("first", "last", "stored", "behind"),
    [
        (0, 99, 49, 50),
        (0, 99, 99, 0),
        (0, 99, 120, 0),
        (0, 99, None, 100),
        (80, 99, 49, 20),
        (80, 99, None, 20),
        (None, None, 7, None),
    ],
)
def test_lag_is_what_can_still_be_read(
    first: int | None, last: int | None, stored: int | None, behind: int | None
) -> None:
    assert lag(first, last, stored) == behind


def test_stream_is_seen_with_the_lag_of_each_group() -> None:
    listed = [Listed("s", "audit"), Listed("s", ""), Listed("other", "audit")]
    seen = shard_view("s", "a:1", (), Ends(0, 49, 40), {"audit": 40, "new": None}, listed)
    assert seen.consumers == 2
    assert seen.groups == (GroupView("audit", 40, 9, 1), GroupView("new", None, 50, 0))


def test_empty_stream_has_no_offsets_and_no_lag() -> None:
    seen = shard_view("s", "a:1", (), None, {"audit": None}, None)
    assert (seen.first, seen.consumers, seen.groups) == (None, None, (GroupView("audit", lag=0),))


def test_consumers_are_listed_with_and_without_a_name() -> None:
    queue = {"name": "s", "vhost": "/"}
    answers = [{"queue": queue, "properties": {"name": "audit"}}, {"queue": queue}]
    assert listed_from(answers) == [Listed("s", "audit"), Listed("s", "")]


def test_a_look_at_a_stream_s_ends_is_no_consumer() -> None:
    """It was counted, and shown as a group that lags by the whole stream."""
    queue = {"name": "s", "vhost": "/"}
    assert listed_from([{"queue": queue, "properties": {"name": PROBE_NAME}}]) == []


def test_table_has_a_column_for_each_group_and_says_what_is_away() -> None:
    text = drawn(as_table(STREAM))
    assert "lag of audit" in text
    row = next(line for line in text.splitlines() if "invoices-0" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        *("invoices-0", "a:1", "b:2", "up", "0", "49", "9"),
    ]
    row = next(line for line in text.splitlines() if "│ invoices-1" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]][3:] == ["away", "–", "–", "–"]
    assert "invoices-1: no leader for 3 s" in text


def test_tree_is_by_node_with_the_groups_below() -> None:
    lines = [line.strip("│├└─ ") for line in drawn(as_tree(STREAM)).splitlines()]
    assert lines == [
        "invoices: super stream, 2 shards, 1 not up",
        "a:1",
        "invoices-0  up  offsets 0 to 49, replicas b:2",
        "group audit: lag 9, stored 40, 1 consumer",
        "no leader known",
        "invoices-1  away",
        "invoices-1: no leader for 3 s",
    ]


def test_names_are_drawn_as_they_are_but_no_control_characters() -> None:
    shard = ShardView("[bold]\x1b[31m", ShardState.UP, "a:1")
    view = View("x", ViewKind.STREAM, (shard,))
    for renderable in (as_table(view), as_tree(view)):
        assert r"[bold]\x1b[31m" in drawn(renderable)


def test_json_has_the_same_keys_for_every_shard() -> None:
    seen = json.loads(json.dumps(STREAM.to_json()))
    first, second = seen["shards"]
    assert first.keys() == second.keys()
    assert first["groups"] == [{"group": "audit", "stored": 40, "lag": 9, "consumers": 1}]
    assert (seen["kind"], second["state"]) == ("super stream", "away")


def test_samples_tell_lag_by_shard_and_group() -> None:
    samples = {(each.metric, dict(each.labels)["shard"]): each for each in samples_of_view(STREAM)}
    assert samples["warren_shard_lag", "invoices-0"] == Sample(
        "warren_shard_lag",
        (("group", "audit"), ("logical", "invoices"), ("shard", "invoices-0")),
        9,
    )
    assert samples["warren_shard_last_offset", "invoices-0"].value == 49
    assert samples["warren_shard_up", "invoices-1"].value == 0
    assert ("warren_shard_lag", "invoices-1") not in samples


def test_depth_of_a_queue_is_its_lag() -> None:
    view = view_of(MAP, {FIRST: Declared(FIRST, 7, 2)}, {})
    lags = [each.value for each in samples_of_view(view) if each.metric == "warren_shard_lag"]
    assert lags == [7]


def test_scrapes_look_again_only_when_what_was_seen_is_old() -> None:
    looks: list[int] = []
    now = [0.0]

    def look() -> View:
        looks.append(1)
        return STREAM

    source = Watched(look, max_age=10, clock=lambda: now[0])
    for at, expected in ((0, 1), (9, 1), (11, 2)):
        now[0] = at
        assert list(source.samples())
        assert len(looks) == expected


def test_name_that_is_gone_has_no_samples() -> None:
    assert list(Watched(lambda: None).samples()) == []


def test_watching_goes_on_when_nobody_answers() -> None:
    answers: Iterator[View | WarrenError] = iter([STREAM, Unreachable("no"), STREAM])
    pauses: list[float] = []

    def look() -> View:
        answer = next(answers)
        if isinstance(answer, WarrenError):
            raise answer
        return answer

    seen = list(islice(views(look, 2.0, pauses.append), 3))
    assert [type(each) for each in seen] == [View, Unreachable, View]
    assert pauses == [2.0, 2.0]


def test_watching_what_was_never_there_is_an_error() -> None:
    def look() -> View:
        raise Unreachable("no")

    with pytest.raises(Unreachable):
        next(views(look, 2.0))
