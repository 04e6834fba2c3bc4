"""A shard map is checked when it is made or read, and routes the same after any journey."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from sharding import (
    Address,
    InvalidInput,
    Node,
    Route,
    Shard,
    ShardKind,
    ShardMap,
    UnsupportedFormat,
)
from tests.support.maps import owner_names, queue_map, stream_map

KEYS = [f"key-{number}" for number in range(200)]
SHARDS = queue_map().shards


def untyped(value: Any) -> Any:
    """A value of the wrong type, as a caller without a type checker might pass it."""
    return value


def test_a_route_says_why() -> None:
    images = queue_map(epoch=7)
    slot = images.table.slot_of("user-42")
    owner = images.shards[images.table.owners[slot]]
    assert images.route("user-42") == Route("images", 7, slot, owner.name, owner.node)
    assert images.shard_of("user-42") == owner


def test_partitions_are_chosen_by_their_order() -> None:
    # Published vectors of the other clients, see tests/vectors/murmur3.json.
    assert stream_map(3).shard_of("hello1").name == "invoices-1"
    assert stream_map(3).shard_of("hello2").name == "invoices-0"


def test_shards_are_found_by_their_node() -> None:
    names = [shard.name for shard in queue_map("ab", per_node=2).shards_on("rabbit@b")]
    assert names == ["sharding: images - rabbit@b - 0", "sharding: images - rabbit@b - 1"]
    assert queue_map("ab").shards_on("rabbit@z") == ()


@pytest.mark.parametrize("original", [queue_map(per_node=2), stream_map()])
def test_a_map_routes_the_same_after_a_journey(original: ShardMap) -> None:
    expected = [original.route(key) for key in KEYS]  # also builds the table, which must not harm
    for copy in (
        pickle.loads(pickle.dumps(original)),
        ShardMap.loads(original.dumps()),
        ShardMap.loads(original.dumps().encode()),
        ShardMap.from_json(original.to_json()),
    ):
        assert copy == original
        assert hash(copy) == hash(original)
        assert [copy.route(key) for key in KEYS] == expected


def test_maps_that_are_equal_route_equally_however_the_kind_is_written() -> None:
    streams = stream_map()
    same = replace(streams, kind=untyped("stream"))
    assert same == streams
    assert owner_names(same) == owner_names(streams)


def test_a_map_can_not_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        queue_map().epoch = 2  # type: ignore[misc]


@pytest.mark.parametrize("form", [str, str.encode])
def test_a_file_cut_off_anywhere_is_refused(form: Callable[[str], str | bytes]) -> None:
    shard_map = queue_map("aü")
    whole = form(shard_map.dumps())
    assert ShardMap.loads(whole) == shard_map
    for length in range(len(whole)):
        with pytest.raises(InvalidInput, match="must be whole JSON") as caught:
            ShardMap.loads(whole[:length])
        assert caught.value.field == "shard_map"


@pytest.mark.parametrize("text", ["[]", "null", "1", '"map"', "{}}", "NaN", "[" * 100_000, b"\xff"])
def test_a_file_that_holds_something_else_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        ShardMap.loads(text)
    assert caught.value.field == "shard_map"


@pytest.mark.parametrize("found", [2, 99])
def test_a_format_of_another_version_is_not_guessed_at(found: int) -> None:
    # A newer format may look quite different, so nothing else is checked first.
    with pytest.raises(UnsupportedFormat, match=f"reads format 1, found {found}; upgrade"):
        ShardMap.from_json({"format": found, "zones": []})


def changed(path: str, value: object) -> dict[str, Any]:
    """The JSON of a good map with one field set; `...` removes it."""
    fields = json.loads(queue_map().dumps())
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target = fields
    for part in parents:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return dict(fields)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("format", "shard_map.format"),
        ("logical", "shard_map.logical"),
        ("epoch", "shard_map.epoch"),
        ("kind", "shard_map.kind"),
        ("shards", "shard_map.shards"),
        ("nodes", "shard_map.nodes"),
        ("policy", "shard_map.policy"),
        ("shards.0.name", "shard_map.shards.name"),
        ("shards.0.node", "shard_map.shards.node"),
        ("shards.2.available", "shard_map.shards.available"),
        ("nodes.0.name", "shard_map.nodes.name"),
        ("nodes.0.addresses", "shard_map.nodes.addresses"),
        ("policy.pattern", "shard_map.policy.pattern"),
    ],
)
def test_a_field_missing_or_of_the_wrong_type_is_named(path: str, field: str) -> None:
    for value, rule in [(..., "must be there"), (1.5, "must be"), (None, "must be")]:
        with pytest.raises(InvalidInput, match=rule) as caught:
            ShardMap.from_json(changed(path, value))
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("zone", 1, "shard_map.zone: is not a field of this format"),
        ("shards.1.zone", 1, "shard_map.shards.zone: is not a field of this format"),
        ("nodes.1.zone", 1, "shard_map.nodes.zone: is not a field of this format"),
        ("policy.zone", 1, "shard_map.policy.zone: is not a field of this format"),
        ("format", True, "shard_map.format: must be a whole number"),
        ("format", "1", "shard_map.format: must be a whole number"),
        ("format", 0, "shard_map.format: must be a whole number from 1"),
        ("epoch", True, "shard_map.epoch: must be a whole number"),
        ("epoch", 0, "shard_map.epoch: must be a whole number from 1"),
        ("kind", "exchange", "shard_map.kind: must be 'queue' or 'stream'"),
        ("logical", "", "logical queue: must not be empty"),
        ("shards", [], "shard_map.shards: must be 1 to 4096 in number"),
        ("shards.0", "a", "shard_map.shards: must be a JSON object"),
        ("shards.0.name", SHARDS[1].name, "shard_map.shards: must have different names"),
        ("shards.0.node", "rabbit@z", "shard_map.nodes: must have the node of 'sharding: images"),
        ("shards.0.node", "rabbit", "node: must look like 'rabbit@host'"),
        ("nodes.0.name", "rabbit@b", "shard_map.nodes: must have different names"),
        ("nodes.0.addresses.0", ["a"], "shard_map.nodes.addresses: must be [host, port]"),
        ("nodes.0.addresses.0", "a:5672", "shard_map.nodes.addresses: must be [host, port]"),
        ("nodes.0.addresses.0", ["a", 0], "address.port: must be 1 to 65535"),
        ("nodes.0.addresses.0", ["a", 65_536], "address.port: must be 1 to 65535"),
        ("nodes.0.addresses.0", ["a", True], "address.port: must be 1 to 65535"),
        ("nodes.0.addresses.0", ["a", "5672"], "address.port: must be 1 to 65535"),
        ("nodes.0.addresses.0", ["", 5672], "address.host: must not be empty"),
        ("nodes.0.addresses.0", [7, 5672], "address.host: must be text"),
        ("nodes.0.addresses.0", ["\ud800", 5672], "address.host: must be text that UTF-8"),
        ("nodes.0.addresses.0", ["a b", 5672], "address.host: must be a host name"),
        ("nodes.0.reply_token", "", "node.reply_token: must not be empty"),
        ("nodes.0.reply_token", "\ud800", "node.reply_token: must be text that UTF-8"),
        ("policy.shards_per_node", 0, "policy.shards_per_node: must be 1 to 4096"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_by_it(path: str, value: object, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        ShardMap.from_json(changed(path, value))
    assert str(caught.value).startswith(message)


def test_a_map_without_an_available_shard_is_refused() -> None:
    away = tuple(replace(shard, available=False) for shard in SHARDS)
    with pytest.raises(InvalidInput, match="must have one that is available"):
        replace(queue_map(), shards=away)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Shard("a", "rabbit@a", untyped(1)), "shard.available"),
        (lambda: Shard("", "rabbit@a"), "shard"),
        (lambda: Node("rabbit@a", reply_token=untyped(5)), "node.reply_token"),
        (lambda: Address("a", untyped(True)), "address.port"),
        (lambda: replace(queue_map(), epoch=untyped(True)), "shard_map.epoch"),
        (lambda: replace(queue_map(), kind=untyped("exchange")), "shard_map.kind"),
        (lambda: replace(queue_map(), logical="amq.x"), "logical queue"),
    ],
)
def test_values_made_in_code_are_checked_like_those_in_files(
    make: Callable[[], object], field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        make()
    assert caught.value.field == field


def test_an_address_is_written_as_in_a_url() -> None:
    assert str(Address("rmq0", 5672)) == "rmq0:5672"
    assert str(Address("::1", 5672)) == "[::1]:5672"


def test_the_kind_of_a_map_read_is_the_kind_written() -> None:
    assert ShardMap.loads(stream_map().dumps()).kind is ShardKind.STREAM


def test_a_partition_of_a_stream_can_not_be_away() -> None:
    stream = replace(queue_map(), kind=ShardKind.STREAM)
    away = tuple(replace(shard, available=shard != stream.shards[0]) for shard in stream.shards)
    with pytest.raises(InvalidInput, match=r"shard_map.shards: must all be available in a stream"):
        replace(stream, shards=away)
