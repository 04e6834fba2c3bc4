"""Names are the sharding plugin's, and are checked before a broker sees them."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from sharding import InvalidInput, ShardName
from sharding.maps.naming import check_logical_name, check_name, check_node_name, partition_name


def test_a_shard_is_named_as_the_plugin_names_it() -> None:
    assert str(ShardName("images", "rabbit@rmq0", 12)) == "sharding: images - rabbit@rmq0 - 12"


def test_a_partition_is_named_as_rabbitmq_names_it() -> None:
    assert partition_name("invoices", 0) == "invoices-0"


def test_a_logical_name_that_looks_like_a_shard_name_is_read_whole() -> None:
    inner = "sharding: a - rabbit@x - 1"
    assert ShardName.parse(f"sharding: {inner} - rabbit@y - 2") == ShardName(inner, "rabbit@y", 2)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "images",
        "sharding:images - rabbit@rmq0 - 1",
        "Sharding: images - rabbit@rmq0 - 1",
        " sharding: images - rabbit@rmq0 - 1",
        "sharding: images - rabbit@rmq0 - 1 ",
        "sharding: images - rabbit@rmq0 - 1\n",
        "sharding: images - rabbit@rmq0 - ",
        "sharding: images - rabbit@rmq0 - 01",
        "sharding: images - rabbit@rmq0 - 00",
        "sharding: images - rabbit@rmq0 - -1",
        "sharding: images - rabbit@rmq0 - +1",
        "sharding: images - rabbit@rmq0 - 1.0",
        "sharding: images - rabbit@rmq0 - ١",
        "sharding: images - rabbit@rmq0",
        "sharding: images - rmq0 - 1",
        "sharding: images - @rmq0 - 1",
        "sharding: images - rabbit@ - 1",
        "sharding: images - rabbit@a@b - 1",
        "sharding: images - rab bit@rmq0 - 1",
        "sharding:  - rabbit@rmq0 - 1",
        "sharding: amq.images - rabbit@rmq0 - 1",
        "sharding: ima\0ges - rabbit@rmq0 - 1",
        "sharding: " + "x" * 300 + " - rabbit@rmq0 - 1",
        "sharding: images - rabbit@rmq0 - " + "1" * 5_000,
    ],
)
def test_a_name_that_is_no_shard_s_is_read_as_none(name: str) -> None:
    assert ShardName.parse(name) is None


@pytest.mark.parametrize("letter", ["x", "é", "鍵", "😀"])
def test_a_name_may_have_255_bytes_and_no_more(letter: str) -> None:
    size = len(letter.encode())
    longest = letter * (255 // size) + "x" * (255 % size)
    assert check_name("queue", longest) == check_logical_name(longest) == longest
    with pytest.raises(InvalidInput, match="at most 255 bytes, not 256"):
        check_name("queue", longest + "x")


def test_a_shard_name_may_have_255_bytes_and_no_more() -> None:
    rest = len("sharding:  - rabbit@rmq0 - 9")
    name = ShardName("x" * (255 - rest), "rabbit@rmq0", 9)
    assert ShardName.parse(str(name)) == name
    with pytest.raises(InvalidInput, match="at most 255 bytes, not 256") as caught:
        ShardName("x" * (255 - rest), "rabbit@rmq0", 10)
    assert caught.value.field == "shard name"
    with pytest.raises(InvalidInput, match="partition name: must be at most 255 bytes, not 256"):
        partition_name("x" * 254, 0)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "must not be empty"),
        ("a\0b", "must not contain NUL"),
        ("a\nb", "must not contain line breaks"),
        ("a\r", "must not contain line breaks"),
        ("amq.", "must not start with 'amq.'"),
        ("amq.images", "must not start with 'amq.'"),
        ("\udc80", "must be text that UTF-8 can express"),
        (b"images", "must be text"),
        (None, "must be text"),
    ],
)
def test_a_logical_name_that_breaks_a_rule_is_refused_by_it(name: Any, rule: str) -> None:
    for check in (check_logical_name, lambda name: ShardName(name, "rabbit@rmq0", 0)):
        with pytest.raises(InvalidInput) as caught:
            check(name)
        assert (caught.value.field, rule in str(caught.value)) == ("logical queue", True)


@pytest.mark.parametrize("name", ["amqp", "amq", "AMQ.images", "my.amq.images", " ", "a\tb"])
def test_an_unusual_logical_name_is_accepted(name: str) -> None:
    assert check_logical_name(name) == name


@pytest.mark.parametrize("name", ["rabbit", "rabbit@", "@host", "a@b@c", "a b@c", "a@b\n", "", 5])
def test_a_node_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_node_name(name)
    assert caught.value.field == "node"


@pytest.mark.parametrize("index", [-1, True, 1.0, "1", None])
def test_an_index_that_is_no_whole_number_from_0_is_refused(index: Any) -> None:
    with pytest.raises(InvalidInput, match="index: must be a whole number from 0"):
        ShardName("images", "rabbit@rmq0", index)
    with pytest.raises(InvalidInput, match="index: must be a whole number from 0"):
        partition_name("invoices", index)


def test_white_space_is_what_the_page_on_the_map_log_says() -> None:
    ranges = [(0x9, 0xD), (0x1C, 0x20), (0x2000, 0x200A), (0x2028, 0x2029)]
    alone = [0x85, 0xA0, 0x1680, 0x202F, 0x205F, 0x3000]
    listed = {code for first, last in ranges for code in range(first, last + 1)} | set(alone)
    assert {code for code in range(sys.maxunicode + 1) if chr(code).isspace()} == listed
    spaces = re.compile(r"\s")
    assert {code for code in range(sys.maxunicode + 1) if spaces.match(chr(code))} == listed
