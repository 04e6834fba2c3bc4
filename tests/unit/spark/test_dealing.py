"""Rows dealt out to partitions: where the stream clients look for a key, and in the rows' order."""

from __future__ import annotations

import pytest

from sharding.errors import InvalidInput
from sharding.stream.messages.message import decode_message, with_key
from sharding.stream.producer.partitioning import by_hash
from spark.write.messages import Dealer, Messages

KEYS = [f"user-{number % 37}" for number in range(500)]
BODIES = [b"%d" % number * (number % 120) for number in range(500)]


@pytest.mark.parametrize("keys_kept", [1, 10, 1_000])
def test_partition_gets_the_rows_of_its_keys_in_order(keys_kept: int) -> None:
    shares = Dealer(range(3), keys_kept).deal(Messages(BODIES, KEYS))
    for number, share in enumerate(shares):
        wanted = [
            with_key(key, body)
            for key, body in zip(KEYS, BODIES, strict=True)
            if by_hash(key, 3) == number
        ]
        assert wanted
        assert share.messages == wanted
        assert share.filters == []


def test_key_keeps_its_partition_from_batch_to_batch() -> None:
    dealer = Dealer(range(6))
    for _ in range(2):
        shares = dealer.deal(Messages([b"a"], ["hello1"]))
        assert [len(share.messages) for share in shares].index(1) == by_hash("hello1", 6)


def test_filter_value_and_properties_stay_with_their_message() -> None:
    messages = Messages(
        BODIES,
        KEYS,
        properties=[{"subject": f"of {number}"} for number in range(500)],
        filters=[None if number % 5 == 0 else f"filter {number}" for number in range(500)],
    )
    found = 0
    for share in Dealer(range(4)).deal(messages):
        for encoded, value in zip(share.messages, share.filters, strict=True):
            message = decode_message(encoded)
            assert message.properties is not None
            number = int(str(message.properties.subject).removeprefix("of "))
            assert (message.key, message.body) == (KEYS[number], BODIES[number])
            assert value == (None if number % 5 == 0 else f"filter {number}")
            found += 1
    assert found == 500


def test_key_of_bytes_goes_where_its_text_goes() -> None:
    as_text = Dealer(range(7)).deal(Messages([b"x"] * 500, KEYS))
    as_bytes = Dealer(range(7)).deal(Messages([b"x"] * 500, [key.encode() for key in KEYS]))
    assert as_text == as_bytes


def test_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match="must be UTF-8"):
        Dealer(range(2)).deal(Messages([b"x"], [b"\xff"]))
