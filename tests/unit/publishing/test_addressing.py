"""The way to a shard travels as two blind copies beside the application's own headers."""

from __future__ import annotations

from typing import Any

import pika
import pytest

from sharding.errors import InvalidInput
from sharding.maps.naming import SHARDS_KEY
from sharding.publishing.addressing import Encoded, addressed, forwarded, headers_to

SHARD = "sharding: images - rabbit@rmq0 - 0"
WAY = [SHARDS_KEY, SHARD]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (None, {"BCC": WAY}),
        ({}, {"BCC": WAY}),
        ({"a": 1}, {"a": 1, "BCC": WAY}),
    ],
)
def test_the_way_to_the_shard_is_added_as_blind_copies(given: Any, sent: dict[str, Any]) -> None:
    before = None if given is None else dict(given)
    assert headers_to(given, SHARD) == sent
    assert given == before


@pytest.mark.parametrize("name", ["CC", "BCC"])
@pytest.mark.parametrize("copies", [["audit"], [], "audit", b"audit", {"audit": 1}, None])
@pytest.mark.parametrize("address", [addressed, Encoded])
def test_copies_of_the_application_are_refused(name: str, copies: Any, address: Any) -> None:
    """A queue that takes one would hide that no shard took the message."""
    with pytest.raises(InvalidInput, match="could hide that no shard took it"):
        address(pika.BasicProperties(headers={name: copies}), SHARD)


def test_what_is_forwarded_keeps_the_copies_that_led_nowhere() -> None:
    given = pika.BasicProperties(headers={"a": 1, "CC": ["audit"]}, priority=3)
    for properties in (given, pika.BasicProperties()):
        sent = pika.BasicProperties()
        sent.decode(b"".join(forwarded(b"".join(properties.encode()), SHARD).encode()))
        assert sent.headers == {**(properties.headers or {}), "BCC": WAY}
        assert sent.priority == properties.priority


def test_what_is_forwarded_has_its_user_id_as_a_header() -> None:
    """The broker closes the channel at one that is not the publisher's own."""
    sent = pika.BasicProperties()
    given = pika.BasicProperties(user_id="alice", headers={"a": 1})
    sent.decode(b"".join(forwarded(b"".join(given.encode()), SHARD).encode()))
    assert sent.user_id is None
    assert sent.headers == {"a": 1, "x-warren-user-id": "alice", "BCC": WAY}


def test_properties_of_the_application_are_left_alone() -> None:
    given = pika.BasicProperties(headers={"a": 1}, priority=3)
    sent = addressed(given, SHARD)
    assert (sent.priority, sent.headers) == (3, {"a": 1, "BCC": WAY})
    assert given == pika.BasicProperties(headers={"a": 1}, priority=3)


def of_size(size: int) -> pika.BasicProperties:
    """Properties that are so many bytes once the shard is in them."""
    bare = Encoded(pika.BasicProperties(headers={"baggage": ""}), SHARD).size
    return pika.BasicProperties(headers={"baggage": "x" * (size - bare)})


def test_properties_may_fill_a_frame_and_no_more() -> None:
    """A frame of 131,072 bytes without its own 8 and the 12 that stand before properties."""
    assert Encoded(of_size(131_052), SHARD).size == 131_052
    assert len(b"".join(addressed(of_size(131_052), SHARD).encode())) == 131_052
    with pytest.raises(InvalidInput, match="at most 131052 bytes"):
        Encoded(of_size(131_053), SHARD)
    with pytest.raises(InvalidInput, match="at most 131052 bytes"):
        addressed(of_size(131_053), SHARD).encode()
