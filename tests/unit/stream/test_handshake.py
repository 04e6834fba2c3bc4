"""The handshake agrees with brokers of every version, and sends no secret to the wrong one."""

from __future__ import annotations

import struct

import pytest

from sharding import InvalidInput
from sharding.stream.errors import AccessRefused, AuthenticationFailed, ProtocolError
from sharding.stream.protocol.commands import tune_frame
from sharding.stream.protocol.constants import Broker, Code, Key, Limits
from sharding.stream.protocol.events import Opened
from sharding.stream.protocol.handshake import Login
from sharding.stream.protocol.session import Connection
from tests.support.stream_frames import (
    LOGIN,
    PASSWORD,
    answer,
    feed,
    frame,
    handshake,
    new_connection,
    properties,
    sent,
    strings,
    tune,
)


def key_of(written: bytes) -> int:
    key: int = struct.unpack_from(">IH", written)[1]
    return key


def brought_to_sasl(login: Login = LOGIN) -> Connection:
    connection = new_connection(login=login)
    feed(connection, handshake()[0])
    return connection


def refuse(key: int, correlation_id: int, code: Code) -> bytes:
    return answer(key, correlation_id, struct.pack(">H", code))


def test_each_step_follows_the_answer_before_it() -> None:
    connection = new_connection()
    steps = [[key_of(one) for one in sent(feed(connection, data))] for data in handshake()]
    assert steps == [
        [Key.SASL_HANDSHAKE],
        [Key.SASL_AUTHENTICATE],
        [Key.TUNE, Key.OPEN],
        [Key.EXCHANGE_COMMAND_VERSIONS],
        [],
    ]


def test_an_open_connection_says_which_node_and_what_was_agreed() -> None:
    connection = new_connection()
    opened = feed(connection, b"".join(handshake()))[-1]
    assert isinstance(opened, Opened)
    assert opened == connection.opened
    assert opened.node == Broker("rmq1", 5552)
    assert opened.server_version == (4, 0, 5)
    assert (opened.frame_max, opened.heartbeat) == (1_048_576, 60)
    assert opened.commands.supports(Key.PUBLISH, 2)
    assert opened.commands.supports(Key.STREAM_STATS)
    assert opened.commands.supports(Key.CONSUMER_UPDATE)
    assert not opened.commands.supports(Key.RESOLVE_OFFSET_SPEC)


def test_a_broker_too_old_to_be_asked_for_versions_is_not_asked() -> None:
    connection = new_connection()
    events = feed(connection, b"".join(handshake("3.10.8")))
    assert Key.EXCHANGE_COMMAND_VERSIONS not in map(key_of, sent(events))
    assert connection.opened is not None
    assert connection.opened.commands.supports(Key.PARTITIONS)
    assert not connection.opened.commands.supports(Key.PUBLISH, 2)
    assert not connection.opened.commands.supports(Key.STREAM_STATS)


def test_a_broker_without_a_version_is_treated_as_the_oldest() -> None:
    frames = handshake("3.10.8")
    frames[0] = answer(Key.PEER_PROPERTIES, 1, properties({}))
    connection = new_connection()
    feed(connection, b"".join(frames))
    assert connection.opened is not None
    assert connection.opened.server_version == ()


@pytest.mark.parametrize(
    ("login", "expected"),
    [
        (Login("someone", "pass"), b"\0\5PLAIN\0\0\0\x0d\0someone\0pass"),
        (Login(mechanism="EXTERNAL"), b"\0\10EXTERNAL\0\0\0\0"),
        (Login(mechanism="ANONYMOUS"), b"\0\11ANONYMOUS\0\0\0\0"),
    ],
    ids=lambda value: value.mechanism if isinstance(value, Login) else "",
)
def test_each_mechanism_sends_what_it_needs_and_no_more(login: Login, expected: bytes) -> None:
    connection = brought_to_sasl(login)
    offered = answer(Key.SASL_HANDSHAKE, 2, strings("PLAIN", "EXTERNAL", "ANONYMOUS"))
    (written,) = sent(feed(connection, offered))
    assert written[12:] == expected


@pytest.mark.parametrize("offered", [(), ("AMQPLAIN",), ("EXTERNAL", "plain")])
def test_a_mechanism_that_is_not_offered_is_refused_before_the_password_is_sent(
    offered: tuple[str, ...],
) -> None:
    connection = brought_to_sasl()
    with pytest.raises(AuthenticationFailed, match=r"PLAIN, where .* is offered") as caught:
        feed(connection, answer(Key.SASL_HANDSHAKE, 2, strings(*offered)))
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    "code",
    [Code.AUTHENTICATION_FAILURE, Code.SASL_ERROR, Code.SASL_CHALLENGE, Code.LOOPBACK_ONLY],
)
def test_a_refused_login_names_the_user_and_never_the_password(code: Code) -> None:
    connection = brought_to_sasl()
    feed(connection, handshake()[1])
    with pytest.raises(AuthenticationFailed, match="'someone'") as caught:
        feed(connection, refuse(Key.SASL_AUTHENTICATE, 3, code))
    assert PASSWORD not in str(caught.value)


def test_a_refused_virtual_host_is_named() -> None:
    connection = new_connection(login=Login(vhost="theirs"))
    feed(connection, b"".join(handshake()[:3]))
    with pytest.raises(AccessRefused, match="'theirs'"):
        feed(connection, refuse(Key.OPEN, 4, Code.VHOST_ACCESS_REFUSED))


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [
        ((1000, 60), (500, 10), (500, 10)),
        ((500, 10), (1000, 60), (500, 10)),
        ((1000, 60), (0, 0), (1000, 60)),
        ((1000, 0), (500, 30), (500, 30)),
        ((1000, 0.2), (500, 30), (500, 1)),
    ],
)
def test_the_lower_of_both_sides_is_agreed_and_zero_has_no_say(
    ours: tuple[int, float], theirs: tuple[int, int], agreed: tuple[int, int]
) -> None:
    connection = Connection(LOGIN, Limits(frame_max=ours[0]), ours[1], {})
    connection.begin()
    frames = handshake()
    frames[2] = answer(Key.SASL_AUTHENTICATE, 3) + tune(*theirs)
    assert tune_frame(*agreed) in sent(feed(connection, b"".join(frames)))
    assert connection.opened is not None
    assert (connection.opened.frame_max, connection.opened.heartbeat) == agreed


@pytest.mark.parametrize(
    "rubbish",
    [
        tune(),  # before we are authenticated
        answer(Key.SASL_HANDSHAKE, 1, strings("PLAIN")),  # not what was asked
        answer(Key.PEER_PROPERTIES, 2, properties({})),  # another correlation id
        answer(Key.PEER_PROPERTIES, 1, properties({}) + b"\0"),
        answer(Key.PEER_PROPERTIES, 1, properties({}))[:-1] + b"\1",
        frame(Key.DELIVER, b"\0chunk"),
        frame(Key.PUBLISH_CONFIRM, bytes(5)),
        frame(Key.METADATA_UPDATE, b"\0\6\0\1s"),
        frame(999, b""),
        frame(Key.HEARTBEAT, b"x"),
        frame(Key.HEARTBEAT, b"", version=2),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"AMQP\0\0\x09\x01",
    ],
)
def test_what_has_no_place_in_the_handshake_is_a_protocol_error(rubbish: bytes) -> None:
    with pytest.raises(ProtocolError):
        feed(new_connection(), rubbish)


def answer_to_open(port: str) -> bytes:
    return answer(Key.OPEN, 4, properties({"advertised_host": "rmq1", "advertised_port": port}))


def test_a_node_that_does_not_say_its_port_is_not_known() -> None:
    connection = new_connection()
    feed(connection, b"".join(handshake("3.10.8")[:3]))
    feed(connection, answer_to_open(""))
    assert connection.opened is not None
    assert connection.opened.node is None


@pytest.mark.parametrize("port", ["x", "５５５２", "-1", "123456"])
def test_a_port_that_is_no_number_is_a_protocol_error(port: str) -> None:
    connection = new_connection()
    feed(connection, b"".join(handshake()[:3]))
    with pytest.raises(ProtocolError, match="port"):
        feed(connection, answer_to_open(port))


def test_heartbeats_are_allowed_at_any_time() -> None:
    data = b"".join(frame(Key.HEARTBEAT, b"") + one for one in handshake())
    connection = new_connection()
    feed(connection, data)
    assert connection.opened is not None


def test_a_login_shows_no_password() -> None:
    assert PASSWORD not in repr(LOGIN)


@pytest.mark.parametrize(
    "wrong",
    [{"mechanism": "SCRAM"}, {"user": "a\0b"}, {"password": "top\0secret"}],
)
def test_a_login_that_can_not_work_is_refused_without_the_password(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        Login(**wrong)
    assert "secret" not in str(caught.value)
