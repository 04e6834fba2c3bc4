"""What a dead letter has of its message, and what is moved."""

from __future__ import annotations

from typing import Any

import pika
import pytest

from sharding.amqp.received import ReceivedProperties
from sharding.groups.handling.delivery import Dead, Why
from sharding.groups.queues.dead_letter import dead_letter

DEAD = Dead(Why.FAILED, "ValueError: no", 5, lambda: None)


def letter_of(properties: pika.BasicProperties, key: str = "key") -> pika.BasicProperties:
    raw = b"".join(properties.encode())
    letter = dead_letter(raw, b"", key, "shard", DEAD, at=0, room=131_052)
    return ReceivedProperties(letter.properties)


def ours(**more: Any) -> dict[str, Any]:
    own = {
        "reason": "failed",
        "error": "ValueError: no",
        "attempts": 5,
        "shard": "shard",
        "key": "key",
        "time": "1970-01-01T00:00:00.000+00:00",
    }
    return {f"x-warren-{name.replace('_', '-')}": value for name, value in (own | more).items()}


def test_a_dead_letter_keeps_what_it_had_and_moves_what_would_make_the_broker_act() -> None:
    made = letter_of(
        pika.BasicProperties(
            headers={"h": 1, "CC": ["x"], "BCC": ["y"]}, user_id="u", expiration="5", priority=3
        )
    )
    assert (made.priority, made.user_id, made.expiration) == (3, None, None)
    assert made.headers == {"h": 1, **ours(cc=["x"], bcc=["y"], user_id="u", expiration="5")}


def test_a_message_without_headers_gets_ours() -> None:
    made = letter_of(pika.BasicProperties(content_type="a/b", message_id="7"))
    assert (made.content_type, made.message_id, made.headers) == ("a/b", "7", ours())


def test_a_letter_that_failed_again_says_why_it_failed_now() -> None:
    first = pika.BasicProperties(headers=ours(reason="timeout", expiration="5", error="old"))
    assert letter_of(first).headers == ours(expiration="5")


@pytest.mark.parametrize("reply_to", ["amq.rabbitmq.reply-to.g1h2", "answers"])
def test_a_reply_to_stays(reply_to: str) -> None:
    assert letter_of(pika.BasicProperties(reply_to=reply_to)).reply_to == reply_to


def test_a_wish_for_a_direct_reply_is_moved_because_the_broker_refuses_it_on_our_channel() -> None:
    made = letter_of(pika.BasicProperties(reply_to="amq.rabbitmq.reply-to"))
    assert made.reply_to is None
    assert made.headers == ours(reply_to="amq.rabbitmq.reply-to")


def test_a_key_that_is_not_utf_8_is_in_its_own_bytes() -> None:
    assert letter_of(pika.BasicProperties(), key="\udcff\udcfe").headers == ours(key=b"\xff\xfe")


def test_an_error_with_half_an_emoji_is_written_out() -> None:
    dead = Dead(Why.FAILED, "unknown customer Ann \ud83d", 1, lambda: None)
    letter = dead_letter(b"\0\0", b"", "k", "s", dead, at=0, room=131_052)
    headers: Any = ReceivedProperties(letter.properties).headers
    assert headers["x-warren-error"] == "unknown customer Ann \\ud83d"
