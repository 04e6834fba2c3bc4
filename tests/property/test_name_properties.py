"""A shard's name says what it was made from, both ways."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from sharding import ShardName
from tests.property.strategies import logical_names, node_names, shard_names, texts


@given(logical_names, node_names, st.integers(0, 10**6))
@example("a - b", "rabbit@rmq0", 0)
@example("sharding: a - rabbit@x - 1", "rabbit@rmq0", 10)
@example("two\tparts ", "rabbit@rmq0", 1)
@example(" - ", "rabbit@rmq0", 1)
@example("grüße - 鍵", "häse@😀", 1)
@example("a - b@c", "-@-", 1)
def test_what_a_name_was_made_from_is_read_back(logical: str, node: str, index: int) -> None:
    name = ShardName.parse(f"sharding: {logical} - {node} - {index}")
    assert name == ShardName(logical, node, index)
    assert (name.logical, name.node, name.index) == (logical, node, index)


@given(shard_names.map(str) | texts | texts.map("sharding: {}".format))
def test_a_name_that_is_read_is_written_back_letter_for_letter(text: str) -> None:
    name = ShardName.parse(text)
    assert name is None or str(name) == text


@given(shard_names)
def test_a_leading_zero_makes_it_no_shard_s_name(name: ShardName) -> None:
    assert ShardName.parse(f"sharding: {name.logical} - {name.node} - 0{name.index}") is None
