"""A shard's name travels as a blind copy beside the application's own headers."""

from __future__ import annotations

from typing import Any

import pika
import pytest

from sharding.errors import InvalidInput
from sharding.publishing.addressing import Encoded, addressed, headers_to

SHARD = "sharding: images - rabbit@rmq0 - 0"


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (None, {"BCC": [SHARD]}),
        ({}, {"BCC": [SHARD]}),
        ({"a": 1}, {"a": 1, "BCC": [SHARD]}),
        ({"BCC": ["audit"]}, {"BCC": ["audit", SHARD]}),
    ],
)
def test_the_shard_is_one_more_blind_copy(given: Any, sent: dict[str, Any]) -> None:
    before = None if given is None else dict(given)
    assert headers_to(given, SHARD) == sent
    assert given == before


@pytest.mark.parametrize("copies", ["audit", b"audit", ("audit",), {"audit": 1}, None])
@pytest.mark.parametrize("address", [addressed, Encoded])
def test_copies_that_are_no_list_are_refused(copies: Any, address: Any) -> None:
    with pytest.raises(InvalidInput, match="must be a list of routing keys"):
        address(pika.BasicProperties(headers={"BCC": copies}), SHARD)


def test_properties_of_the_application_are_left_alone() -> None:
    given = pika.BasicProperties(headers={"a": 1}, priority=3)
    sent = addressed(given, SHARD)
    assert (sent.priority, sent.headers) == (3, {"a": 1, "BCC": [SHARD]})
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
