"""A policy is checked when it is made, says what is wrong with it, and stays as it is."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from sharding import InvalidInput, OnUnavailable, Policy, policy_for
from sharding.maps.policy import check_portable

POLICY = Policy(
    "pictures",
    "^images",
    2,
    priority=3,
    routing_key="all",
    durable=False,
    queue_arguments={"x-queue-type": "quorum", "x-max-length": 10, "x-ratio": 0.5, "x-on": True},
    on_unavailable=OnUnavailable.MOVE,
)

BAD = [
    ("name", "", "must not be empty"),
    ("name", "x" * 256, "must be at most 255 bytes, not 256"),
    ("name", None, "must be text"),
    ("pattern", "", "must be a regular expression, not empty"),
    ("pattern", None, "must be a regular expression, not empty"),
    ("pattern", ["a"], "must be a regular expression, not empty"),
    ("pattern", b"a", "must be a regular expression, not empty"),
    ("pattern", "\ud800", "must be a regular expression"),
    ("pattern", "(images", "must be a regular expression that compiles (missing )"),
    ("pattern", "*", "must be a regular expression that compiles (nothing to repeat"),
    ("pattern", "a{99999999999999999999}", "must be a regular expression that compiles"),
    ("shards_per_node", 0, "must be 1 to 4096"),
    ("shards_per_node", -1, "must be 1 to 4096"),
    ("shards_per_node", 4_097, "must be 1 to 4096"),
    ("shards_per_node", True, "must be a whole number"),
    ("shards_per_node", 2.0, "must be a whole number"),
    ("shards_per_node", "2", "must be a whole number"),
    ("shards_per_node", None, "must be a whole number"),
    ("priority", "high", "must be a whole number"),
    ("priority", False, "must be a whole number"),
    ("priority", 2**63, "must fit in 64 bits"),
    pytest.param("priority", 10**5_000, "must fit in 64 bits", id="too long to print"),
    ("routing_key", 0, "must be text"),
    ("routing_key", 7, "must be text"),
    ("routing_key", "x" * 256, "must be at most 255 bytes, not 256"),
    ("durable", 1, "must be true or false"),
    ("durable", "yes", "must be true or false"),
    ("on_unavailable", "explode", "must be 'fail' or 'move'"),
    ("on_unavailable", "", "must be 'fail' or 'move'"),
    ("on_unavailable", None, "must be 'fail' or 'move'"),
    ("on_unavailable", [], "must be 'fail' or 'move'"),
    ("queue_arguments", [], "must map names to values"),
    ("queue_arguments", None, "must map names to values"),
    ("queue_arguments", {"": 1}, "must have names of 1 to 255 bytes"),
    ("queue_arguments", {"x" * 256: 1}, "must have names of 1 to 255 bytes"),
    ("queue_arguments", {"\ud800": 1}, "must have names of 1 to 255 bytes of UTF-8"),
    ("queue_arguments", {1: 1}, "must have names of 1 to 255 bytes"),
]

BAD_ARGUMENTS = [
    (None, "must be text, a number or true/false"),
    (b"bytes", "must be text, a number or true/false"),
    ({"nested": 1}, "must be text, a number or true/false"),
    ([1], "must be text, a number or true/false"),
    (float("nan"), "must be a finite number"),
    (float("inf"), "must be a finite number"),
    (-float("inf"), "must be a finite number"),
    (2**63, "must fit in 64 bits"),
    (-(2**63) - 1, "must fit in 64 bits"),
    pytest.param(10**5_000, "must fit in 64 bits", id="too long to print"),
    ("lone \udc80", "must be text that UTF-8 can express"),
]


@pytest.mark.parametrize(("field", "value", "rule"), BAD)
def test_a_bad_value_is_refused_by_field_and_rule(field: str, value: Any, rule: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        replace(POLICY, **{field: value})
    assert caught.value.field == f"policy.{field}"
    assert f"policy.{field}: {rule}" in str(caught.value)


@pytest.mark.parametrize(("value", "rule"), BAD_ARGUMENTS)
def test_a_bad_queue_argument_is_refused_by_name_and_rule(value: Any, rule: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        replace(POLICY, queue_arguments={"x-good": 1, "x-bad": value})
    assert caught.value.field == "policy.queue_arguments.x-bad"
    assert rule in str(caught.value)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 0, 1.5, True, False, "", "grüße"])
def test_a_queue_argument_that_amqp_can_carry_is_kept(value: Any) -> None:
    kept = replace(POLICY, queue_arguments={"x": value}).queue_arguments["x"]
    assert (type(kept), kept) == (type(value), value)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("images", "images", True),
        ("images", "old-images.large", True),
        ("^images", "images.large", True),
        ("^images", "old-images", False),
        ("images$", "old-images", True),
        ("images$", "images.large", False),
        ("^$", "x", False),
        ("IMAGES", "images", False),
        ("gr.ße", "viele grüße", True),
    ],
)
def test_a_pattern_is_found_anywhere_unless_anchored(
    pattern: str, name: str, expected: bool
) -> None:
    assert Policy("p", pattern, 1).matches(name) is expected


def test_the_highest_priority_decides_and_then_the_smallest_name() -> None:
    low, high_b, high_a = (
        Policy("a", ".", 1, priority=-1),
        Policy("c", ".", 1, priority=5),
        Policy("b", ".", 1, priority=5),
    )
    other = Policy("0", "^other$", 1, priority=9)
    for policies in ([low, high_b, high_a, other], [other, high_a, high_b, low]):
        assert policy_for("images", policies) is high_a
        assert policy_for("other", policies) is other
    assert policy_for("images", [other, low]) is low


def test_a_name_that_nothing_matches_has_no_policy() -> None:
    assert policy_for("videos", [POLICY]) is None
    assert policy_for("videos", []) is None


def test_equal_policies_are_equal_wherever_they_come_from() -> None:
    arguments = dict(sorted(POLICY.queue_arguments.items(), reverse=True))
    read = Policy.from_json(json.loads(json.dumps(POLICY.to_json())))
    copies = [replace(POLICY, queue_arguments=arguments), read, pickle.loads(pickle.dumps(POLICY))]
    assert all(copy == POLICY for copy in copies)
    assert {hash(copy) for copy in copies} == {hash(POLICY)}
    assert [type(copy.on_unavailable) for copy in copies] == [OnUnavailable] * 3


@pytest.mark.parametrize(
    "change",
    [
        {"name": "p"},
        {"pattern": "p"},
        {"shards_per_node": 1},
        {"priority": 4},
        {"routing_key": None},
        {"durable": True},
        {"queue_arguments": {}},
        {"on_unavailable": "fail"},
    ],
)
def test_policies_that_differ_in_one_field_are_not_equal(change: dict[str, Any]) -> None:
    changed = replace(POLICY, **change)
    assert changed != POLICY
    assert Policy.from_json(changed.to_json()) == changed


def test_a_policy_can_not_be_changed() -> None:
    arguments = {"x-max-length": 1}
    policy = replace(POLICY, queue_arguments=arguments)
    arguments["x-max-length"] = 2
    assert policy.queue_arguments["x-max-length"] == 1
    with pytest.raises(FrozenInstanceError):
        policy.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        policy.queue_arguments["x-max-length"] = 3  # type: ignore[index]


@pytest.mark.parametrize("field", sorted(POLICY.to_json().keys() - {"routing_key"}))
def test_a_field_that_is_missing_is_named(field: str) -> None:
    fields = POLICY.to_json()
    del fields[field]
    with pytest.raises(InvalidInput, match="must be there") as caught:
        Policy.from_json(fields)
    assert caught.value.field == f"policy.{field}"


@pytest.mark.parametrize("field", POLICY.to_json().keys())
def test_a_field_of_the_wrong_type_is_named(field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Policy.from_json({**POLICY.to_json(), field: [1]}, "map.policy")
    assert caught.value.field == f"map.policy.{field}"


def test_a_field_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"policy\.color: is not a field"):
        Policy.from_json({**POLICY.to_json(), "color": "red"})


@pytest.mark.parametrize(
    "pattern",
    [
        "^images$",
        "images|films",
        r"^shop\.(?:eu|us)\..*",
        r"^[a-z_]+[^/\]-]?\/x{2,3}$",
        r"gr[üß]+.*?",
        r"a\++b\}+\(+",
        Policy.exactly("a b.c(d)[e]^$\\é+", 1, name="a").pattern,
    ],
)
def test_a_pattern_that_all_languages_read_alike_may_be_set(pattern: str) -> None:
    assert check_portable(pattern) == pattern


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d+",
        r"\bimages",
        r"(?i)images",
        r"(?=a)a",
        r"(?P<n>a)",
        r"(a)\1",
        "a++",
        "a{1,2}+",
        r"[\w]",
        "[[a]",
        "[a&&b]",
        r"\Zimages",
        r"a\u0041",
    ],
)
def test_a_pattern_that_languages_read_differently_is_not_set(pattern: str) -> None:
    with pytest.raises(InvalidInput, match="in all languages"):
        check_portable(pattern)
