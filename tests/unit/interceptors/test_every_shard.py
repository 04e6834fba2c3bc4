"""A wish to consume from every shard: what is missing, and when it is over."""

from __future__ import annotations

import itertools

from interceptors.method_rules import EveryShard


def new_wish() -> EveryShard:
    numbers = itertools.count()
    return EveryShard(lambda: f"tag-{next(numbers)}")


def test_what_has_no_consumer_is_missing_until_it_is_placed() -> None:
    wish = new_wish()
    assert wish.missing(["a", "b"]) == ["a", "b"]
    wish.placed("a")
    assert wish.missing(["a", "b", "c"]) == ["b", "c"]
    assert wish.consumed == [wish.tags["a"]]


def test_a_consumer_that_was_lost_comes_again_under_its_tag() -> None:
    wish = new_wish()
    wish.missing(["a", "b"])
    wish.placed("a")
    tag = wish.tags["a"]
    assert wish.lost(tag)
    assert not wish.lost("nobody's")
    assert wish.missing(["a", "b"]) == ["a", "b"]
    assert wish.tags["a"] == tag


def test_what_the_application_cancelled_is_not_replaced() -> None:
    wish = new_wish()
    for shard in wish.missing(["a", "b"]):
        wish.placed(shard)
    wish.cancelled(wish.tags["a"])
    assert wish.missing(["a", "b", "c"]) == ["c"]
    assert wish.consumed == [wish.tags["b"]]
    assert not wish.is_over


def test_one_may_be_cancelled_before_it_was_placed() -> None:
    wish = new_wish()
    wish.see(["a", "b"])
    wish.cancelled(wish.tags["a"])
    assert wish.missing(["a", "b"]) == ["b"]


def test_the_wish_is_over_when_all_are_cancelled() -> None:
    wish = new_wish()
    for shard in wish.missing(["a", "b"]):
        wish.placed(shard)
    wish.cancelled(wish.tags["a"])
    wish.see(["a", "b"])
    assert not wish.is_over
    wish.cancelled(wish.tags["b"])
    assert wish.missing(["a", "b", "new"]) == []
    assert wish.is_over


def test_a_shard_that_left_does_not_keep_the_wish_alive() -> None:
    wish = new_wish()
    for shard in wish.missing(["a", "b"]):
        wish.placed(shard)
    wish.lost(wish.tags["b"])
    wish.cancelled(wish.tags["a"])
    assert wish.missing(["a", "new"]) == []
    assert wish.is_over
