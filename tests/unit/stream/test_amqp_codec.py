"""AMQP 1.0: every type is read and written, and nothing malformed gets further than an error."""

from __future__ import annotations

import pickle
import tracemalloc
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import pytest

from sharding.errors import InvalidInput
from sharding.stream.errors import ProtocolError
from sharding.stream.messages.amqp_codec import MAX_DEPTH, AmqpReader, write_value
from sharding.stream.messages.amqp_values import AmqpValue, Described, Symbol, Timestamp, as_text
from sharding.stream.messages.message import (
    Message,
    Properties,
    decode_message,
    encode_data,
    encode_message,
)

ID = UUID("12345678-1234-5678-1234-567812345678")


def read(octets: str | bytes) -> AmqpValue:
    data = octets if isinstance(octets, bytes) else bytes.fromhex(octets)
    reader = AmqpReader(data)
    value = reader.value()
    assert reader.at_end
    return value


@pytest.mark.parametrize(
    ("octets", "value"),
    [
        ("40", None),
        ("41", True),
        ("42", False),
        ("56 01", True),
        ("56 00", False),
        ("50 ff", 255),
        ("60 ffff", 65_535),
        ("70 ffffffff", 2**32 - 1),
        ("52 07", 7),
        ("43", 0),
        ("80 ffffffffffffffff", 2**64 - 1),
        ("53 07", 7),
        ("44", 0),
        ("51 ff", -1),
        ("61 fffe", -2),
        ("71 fffffffd", -3),
        ("54 fc", -4),
        ("81 8000000000000000", -(2**63)),
        ("55 fb", -5),
        ("72 3fc00000", 1.5),
        ("82 3ff8000000000000", 1.5),
        ("73 0001f600", "😀"),
        ("83 ffffffffffffffff", Timestamp(-1)),
        ("98 12345678123456781234567812345678", ID),
        ("a0 02 00ff", b"\x00\xff"),
        ("b0 00000001 61", b"a"),
        ("a1 02 c3bc", "ü"),
        ("b1 00000001 61", "a"),
        ("a3 01 61", Symbol("a")),
        ("b3 00000001 61", Symbol("a")),
        ("45", ()),
        ("c0 04 02 41 52 01", (True, 1)),
        ("d0 00000007 00000002 41 52 01", (True, 1)),
        ("c1 04 02 52 01 41", {1: True}),
        ("d1 00000007 00000002 52 01 41", {1: True}),
        ("e0 04 02 50 01 02", (1, 2)),
        ("f0 00000007 00000002 50 01 02", (1, 2)),
        ("e0 02 03 41", (True, True, True)),
        ("e0 06 02 a1 01 61 01 62", ("a", "b")),
        ("e0 06 01 e0 03 01 50 07", ((7,),)),
        ("00 53 07 41", Described(7, True)),
        ("e0 06 01 00 53 07 52 01", (Described(7, 1),)),
        ("c1 07 02 c1 03 02 41 42 40", {((True, False),): None}),
        ("74 32800001", Decimal(1)),
        ("74 b2800001", Decimal(-1)),
        ("74 31800019", Decimal("0.25")),
        ("74 6cb8967f", Decimal("9999999")),
        ("74 78000000", Decimal("Infinity")),
        ("84 31c0000000000001", Decimal(1)),
        ("94 30400000000000000000000000000001", Decimal(1)),
    ],
)
def test_every_type_is_read(octets: str, value: AmqpValue) -> None:
    found = read(octets)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, 1, -1, 127, 128, -129, 2**63 - 1, -(2**63), 2**63, 2**64 - 1),
        *(0.1, float("inf"), "", "ü" * 200, b"", bytes(300), Symbol("s"), ID),
        *(Timestamp(-1), Timestamp(2**62), Described(Symbol("x"), 1)),
        *((), (1, "two", (3,)), tuple(range(300)), {}, {"a": {"b": (None,)}}),
        *(Decimal("-12.50"), Decimal("1e-6176"), Decimal(10**34 - 1), Decimal("-Infinity")),
        Decimal("1e6144"),
    ],
)
def test_what_is_written_is_read_back(value: AmqpValue) -> None:
    found = read(write_value(value))
    assert found == value
    assert type(found) is type(value)


def test_a_datetime_is_written_as_the_same_moment() -> None:
    moment = datetime(2024, 5, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    found = read(write_value(moment))
    assert isinstance(found, Timestamp)
    assert found.to_datetime() == moment


@pytest.mark.parametrize(
    "value",
    [
        *(object(), 2**64, -(2**63) - 1, Timestamp(2**63), "\ud800", {"a": object()}),
        *(datetime(2024, 5, 1), Decimal("1e7000"), Decimal("1e6145"), Decimal(10**34)),
    ],
)
def test_what_amqp_has_no_type_for_is_refused(value: AmqpValue) -> None:
    with pytest.raises(InvalidInput):
        write_value(value)


@pytest.mark.parametrize(
    "octets",
    [
        *("", "00", "0040", "3f", "ff", "50", "60 00", "80 00", "56 02", "73 0000d800"),
        *("73 00110000", "a1 01 ff", "a3 01 ff", "a0 02 00", "b0 ffffffff 00", "a0", "b0 000000"),
        *("c0", "c0 00", "c0 01", "c0 01 01", "c0 02 01", "c0 03 01 41", "d0 ffffffff 00000000"),
        *("d0 00000004 ffffffff", "d0 00000004 00000001", "c0 02 00 41", "c1 02 01 41"),
        *("c1 03 02 41", "e0 01 00", "e0 02 01 50", "e0 03 02 50 01", "e0 05 01 50 01 02 03"),
        *("f0 00000005 ffffffff 40", "f0 00000005 00001000 45", "f0 00000009 ffffffff 80 00000000"),
        "e0 03 01 00 41",
    ],
)
def test_malformed_values_are_refused(octets: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            read(octets)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_values_nest_to_a_bound() -> None:
    def nested(depth: int) -> bytes:
        value = b"\x41"
        for _ in range(depth):
            value = b"\xd0" + (len(value) + 4).to_bytes(4) + (1).to_bytes(4) + value
        return value

    read(nested(MAX_DEPTH))
    for deeper in (nested(MAX_DEPTH + 1), nested(5_000), b"\x00" * 10_000, b"\xe0\x04\x01" * 5_000):
        with pytest.raises(ProtocolError):
            read(deeper)
    deep: AmqpValue = ()
    for _ in range(MAX_DEPTH + 1):
        deep = (deep, 1)
    with pytest.raises(InvalidInput, match="nested"):
        write_value(deep)


def test_arrays_of_nothing_take_no_memory_however_many_they_are() -> None:
    one = bytes.fromhex("f0 00000005 00000400 40")
    assert len(read(one)) == 1024  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="no bytes"):
        read(b"\xd0" + (4 + 2 * len(one)).to_bytes(4) + (2).to_bytes(4) + one * 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, None), ("a", "a"), (Symbol("s"), "s"), (True, "true"), (7, "7"), (1.5, "1.5")),
        *((b"\xff", "/w=="), (ID, str(ID)), (Decimal("1.50"), "1.50")),
        (Timestamp(0), "1970-01-01T00:00:00+00:00"),
        (Timestamp(2**62), str(2**62)),
        (datetime(1970, 1, 1, tzinfo=UTC), "1970-01-01T00:00:00+00:00"),
        ((1, ("ü", None)), '[1,["ü",null]]'),
        ({"a": b"\xff", 1: Timestamp(0)}, '{"a":"/w==","1":"1970-01-01T00:00:00+00:00"}'),
        (Described(1, {"a": Decimal(2)}), '{"a":"2"}'),
        ({1: "a", "1": "b"}, '[["1","a"],["1","b"]]'),
        ({None: "a", "null": "b"}, '[["null","a"],["null","b"]]'),
        *((float("nan"), "nan"), ((float("nan"), float("-inf")), '["nan","-inf"]')),
    ],
)
def test_every_value_has_one_text(value: AmqpValue, text: str | None) -> None:
    assert as_text(value) == text


PROPERTIES = Properties(
    message_id=ID,
    user_id=b"guest",
    to="queue",
    subject="s",
    reply_to="r",
    correlation_id=7,
    content_type="text/plain",
    content_encoding="gzip",
    absolute_expiry_time=Timestamp(5),
    creation_time=Timestamp(-5),
    group_id="g",
    group_sequence=2**32 - 1,
    reply_to_group_id="rg",
)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000])
def test_plain_bodies_have_the_shortest_form(size: int) -> None:
    body = b"x" * size
    assert encode_data(body) == encode_message(body)
    assert len(encode_data(body)) == size + (5 if size < 256 else 8)
    assert decode_message(encode_data(body)) == Message(body)


@pytest.mark.parametrize("key", ["", "k", "ü", "k" * 237, "k" * 238, "k" * 256])
def test_the_key_is_an_annotation(key: str) -> None:
    message = decode_message(encode_message(b"b", key=key))
    assert (message.body, message.key) == (b"b", key)
    assert message.annotations == {"x-routing-key": key}


def test_every_part_of_a_message_is_read_back() -> None:
    raw = encode_message(
        b"body",
        key="k",
        properties=PROPERTIES,
        application_properties={"n": 1, "nested": (1, {"a": None})},
        annotations={"x-exchange": "e"},
    )
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    message = decode_message(memoryview(raw), offset=3, timestamp=moment, stream="s")
    assert message == Message(
        b"body",
        "k",
        PROPERTIES,
        {"n": 1, "nested": (1, {"a": None})},
        {"x-exchange": "e", "x-routing-key": "k"},
        offset=3,
        timestamp=moment,
        stream="s",
    )
    assert pickle.loads(pickle.dumps(message)) == message


# As RabbitMQ 4.0.5 delivered what was published over AMQP 0-9-1 with every property and headers.
OVER_AMQP_0_9_1 = bytes.fromhex(
    "005370c00b05415003700000ea604143005372c15908a30c782d62617369632d74797065a10174a315782d73"
    "747265616d2d66696c7465722d76616c7565a10166a30a782d65786368616e6765a100a30d782d726f757469"
    "6e672d6b6579a10e622d633965363231316365363634005373c0380da1026d31a00567756573744040a10172"
    "a1026331a30a746578742f706c61696ea304677a697040830000018bcfe56800a1036170704040005374c14c"
    "10a103737472a10178a103696e745405a1036e656754f9a103626967810000010000000000a104626f6f6c56"
    "01a1056279746573a002fffea1046e6f6e6540a1027473830000018cc251f400005375a00568656c6c6f"
)


def test_a_message_that_rabbitmq_made_of_an_amqp_0_9_1_one_is_read() -> None:
    assert decode_message(OVER_AMQP_0_9_1) == Message(
        b"hello",
        "b-c9e6211ce664",
        Properties(
            message_id="m1",
            user_id=b"guest",
            reply_to="r",
            correlation_id="c1",
            content_type="text/plain",
            content_encoding="gzip",
            creation_time=Timestamp(1_700_000_000_000),
            group_id="app",
        ),
        {
            "str": "x",
            "int": 5,
            "neg": -7,
            "big": 2**40,
            "bool": True,
            "bytes": b"\xff\xfe",
            "none": None,
            "ts": Timestamp(1_704_067_200_000),
        },
        {
            "x-basic-type": "t",
            "x-stream-filter-value": "f",
            "x-exchange": "",
            "x-routing-key": "b-c9e6211ce664",
        },
    )


HEADER = "00 53 70 c0 02 01 41 "
DATA = "00 53 75 a0 01 61 "


@pytest.mark.parametrize(
    ("octets", "body", "value"),
    [
        (DATA, b"a", None),
        (DATA + DATA, b"aa", None),
        (HEADER + "00 53 71 c1 01 00" + DATA + "00 53 78 c1 01 00", b"a", None),
        ("00 80 0000000000000075 a0 01 61", b"a", None),
        ("00 a3 10 616d71703a646174613a62696e617279 a0 01 61", b"a", None),
        ("00 53 77 a1 01 61", b"a", "a"),
        ("00 53 77 a3 01 61", b"a", Symbol("a")),
        ("00 53 77 a0 01 ff", b"\xff", b"\xff"),
        ("00 53 77 40", bytes.fromhex("00 53 77 40"), None),
        ("00 53 77 52 07", bytes.fromhex("00 53 77 52 07"), 7),
        (
            HEADER + "00 53 76 45 00 53 76 c0 03 02 41 42",
            bytes.fromhex("005376450053 76c003024142"),
            (True, False),
        ),
        (HEADER, b"", None),
    ],
)
def test_bodies_of_every_kind_have_bytes(octets: str, body: bytes, value: AmqpValue) -> None:
    message = decode_message(bytes.fromhex(octets))
    assert (message.body, message.value) == (body, value)


@pytest.mark.parametrize("raw", [b"", b"hello", b'{"json": 1}', b"\x00", b"\x00\x53\x10\x45"])
def test_what_is_not_amqp_names_the_option_for_raw_messages(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="raw=True"):
        decode_message(raw)


@pytest.mark.parametrize(
    "octets",
    [
        *(DATA + HEADER, HEADER + HEADER, DATA + "00 53 77 41", "00 53 77 41 00 53 77 41"),
        *("00 53 75 41", "00 53 76 41", "00 53 70 41", "00 53 72 45", "00 53 73 41"),
        *("00 53 74 c1 03 02 41 42", "00 53 72 c1 05 02 a0 01 61 41", DATA + "00"),
        *("00 53 73 c0 03 01 52 01 41", "00 53 73 c0 04 02 40 52 01", "00 53 73 c0 02 01 41"),
        "00 53 73 c0 0f 0e 40404040404040404040404040 40",
        "00 53 73 c0 0e 0c 4040404040404040404040 55 ff",
    ],
)
def test_malformed_messages_are_refused(octets: str) -> None:
    with pytest.raises(ProtocolError):
        decode_message(bytes.fromhex(octets))


@pytest.mark.parametrize(
    "properties",
    [
        Properties(message_id=1.5),  # type: ignore[arg-type]
        Properties(user_id="guest"),  # type: ignore[arg-type]
        Properties(content_type=b"x"),  # type: ignore[arg-type]
        Properties(creation_time=5),  # type: ignore[arg-type]
        Properties(group_sequence=2**32),
        Properties(message_id=-1),
    ],
)
def test_properties_of_the_wrong_type_are_refused(properties: Properties) -> None:
    with pytest.raises(InvalidInput):
        encode_message(b"", properties=properties)


def test_names_that_are_no_text_are_refused() -> None:
    with pytest.raises(InvalidInput):
        encode_message(b"", application_properties={1: "a"})  # type: ignore[dict-item]
    with pytest.raises(InvalidInput):
        encode_message(b"", annotations={1: "a"})  # type: ignore[dict-item]
    with pytest.raises(InvalidInput):
        encode_message(b"", key=b"k")  # type: ignore[arg-type]
