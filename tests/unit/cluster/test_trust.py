"""Hosts that get a login: those that the user named, and those that the cluster confirmed."""

from __future__ import annotations

from typing import Any

import pytest

from sharding import Address
from sharding.cluster.trust import Trust
from sharding.errors import InvalidInput


def test_hosts_of_urls_are_trusted_as_they_are_written() -> None:
    trust = Trust(["RMQ0", "*"])
    assert trust.allows(Address("rmq0", 5672))
    assert trust.allows(Address("rmq0", 5673))
    assert not trust.allows(Address("rmq1", 5672))


def test_patterns_are_for_hosts() -> None:
    trust = Trust([], ["*.rmq.example.com", "10.0.0.?"])
    assert trust.allows(Address("a.rmq.example.com", 1))
    assert trust.allows(Address("10.0.0.7", 1))
    assert not trust.allows(Address("a.rmq.example.com.evil.org", 1))
    assert not trust.allows(Address("10.0.0.77", 1))


def test_what_the_cluster_confirms_is_the_address_with_its_port() -> None:
    trust = Trust([])
    trust.confirm([Address("rmq1", 5672)])
    assert trust.allows(Address("rmq1", 5672))
    assert not trust.allows(Address("rmq1", 5673))
    trust.confirm([Address("rmq2", 5672)])
    assert not trust.allows(Address("rmq1", 5672)), "it is not what the cluster says now"


@pytest.mark.parametrize("wrong", [[""], [1], [None], b"x"])
def test_patterns_are_checked(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="trusted_hosts"):
        Trust([], wrong)


def test_one_pattern_is_not_taken_for_its_letters() -> None:
    assert not Trust([], "a*").allows(Address("b", 1))
    assert Trust([], "a*").allows(Address("abc", 1))
