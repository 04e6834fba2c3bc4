"""Addresses as people write them."""

from __future__ import annotations

import pytest

from sharding import InvalidInput
from sharding.stream.protocol.constants import Broker
from sharding.stream.uris import StreamUri, parse_all


def test_what_is_left_out_is_the_brokers_default() -> None:
    assert StreamUri.parse("rabbitmq-stream://rmq0") == StreamUri(Broker("rmq0", 5552))
    assert StreamUri.parse("rabbitmq-stream+tls://rmq0").address.port == 5551


def test_every_part_is_read_and_unquoted() -> None:
    uri = StreamUri.parse("rabbitmq-stream+tls://ann%40home:p%2Fw%3A@[::1]:7000/my%2Fhost")
    assert uri == StreamUri(Broker("::1", 7000), True, "ann@home", "p/w:", "my/host")


def test_password_is_in_no_repr_and_no_error() -> None:
    assert "hunter2" not in repr(StreamUri.parse("rabbitmq-stream://ann:hunter2@rmq0"))
    for text in (
        "amqp://ann:hunter2@rmq0",
        "rabbitmq-stream://ann:hunter2@rmq0:port",
        "rabbitmq-stream://ann:hunter2@rmq0:70000",
        "rabbitmq-stream://ann:hunter2@/",
        "rabbitmq-stream://ann:hunter2@rmq0/?heartbeat=3",
        "rabbitmq-stream://ann:hunter2@[::1",
    ):
        with pytest.raises(InvalidInput) as refused:
            StreamUri.parse(text)
        assert "hunter2" not in str(refused.value)
        assert "hunter2" not in repr(refused.value.__cause__)


def test_addresses_of_one_environment_share_login_and_virtual_host() -> None:
    assert len(parse_all(["rabbitmq-stream://rmq0", "rabbitmq-stream://rmq1:7000"])) == 2
    for other in ("ann:x@rmq1", "guest:hunter2@rmq1", "rmq1/other"):
        with pytest.raises(InvalidInput, match="must agree") as refused:
            parse_all(["rabbitmq-stream://rmq0", f"rabbitmq-stream://{other}"])
        assert "hunter2" not in str(refused.value)
    with pytest.raises(InvalidInput, match="at least one"):
        parse_all([])
