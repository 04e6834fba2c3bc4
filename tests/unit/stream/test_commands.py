"""Requests are the bytes the protocol asks for; answers are read whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from sharding import InvalidInput
from sharding.stream.errors import ProtocolError
from sharding.stream.protocol import commands
from sharding.stream.protocol.answers import (
    Answer,
    MetadataAnswer,
    OffsetAnswer,
    ResolvedOffsetAnswer,
    SequenceAnswer,
    StatsAnswer,
    StreamMetadata,
    VersionRange,
)
from sharding.stream.protocol.commands import Request
from sharding.stream.protocol.constants import FIRST, NEXT, Broker, Code, OffsetSpec
from sharding.stream.protocol.handshake import (
    Close,
    ExchangeCommandVersions,
    Open,
    PeerProperties,
    SaslAuthenticate,
    SaslHandshake,
)
from sharding.stream.protocol.wire import Reader
from tests.support.stream_frames import ANSWERED, METADATA, OK, PASSWORD


def text(value: str) -> str:
    return f"{len(value):04x} {value.encode().hex()} "


@pytest.mark.parametrize(
    ("request_", "key", "body"),
    [
        (commands.DeclarePublisher(7, "me", "s"), 1, "07" + text("me") + text("s")),
        (commands.DeclarePublisher(7, None, "s"), 1, "07 0000" + text("s")),
        (commands.QueryPublisherSequence("me", "s"), 5, text("me") + text("s")),
        (commands.DeletePublisher(7), 6, "07"),
        (
            commands.Subscribe(7, "s", OffsetSpec.at(5), 10),
            7,
            "07" + text("s") + "0004 0000000000000005 000a 00000000",
        ),
        (
            commands.Subscribe(7, "s", FIRST, 10, {"a": "b"}),
            7,
            "07" + text("s") + "0001 000a 00000001" + text("a") + text("b"),
        ),
        (commands.QueryOffset("me", "s"), 11, text("me") + text("s")),
        (commands.Unsubscribe(7), 12, "07"),
        (
            commands.Create("s", {"a": "b"}),
            13,
            text("s") + "00000001" + text("a") + text("b"),
        ),
        (commands.Delete("s"), 14, text("s")),
        (commands.Metadata(("s", "t")), 15, "00000002" + text("s") + text("t")),
        (PeerProperties({"a": "b"}), 17, "00000001" + text("a") + text("b")),
        (SaslHandshake(), 18, ""),
        (SaslAuthenticate("PLAIN", b"x", "u"), 19, text("PLAIN") + "00000001 78"),
        (Open("/"), 21, text("/")),
        (Close(1, "OK"), 22, "0001" + text("OK")),
        (commands.Route("k", "s"), 24, text("k") + text("s")),
        (commands.Partitions("s"), 25, text("s")),
        (ExchangeCommandVersions((VersionRange(8, 1, 2),)), 27, "00000001 0008 0001 0002"),
        (commands.StreamStats("s"), 28, text("s")),
        (
            commands.CreateSuperStream("s", ("s-0",), ("0",), {"a": "b"}),
            29,
            text("s")
            + ("00000001" + text("s-0"))
            + ("00000001" + text("0"))
            + ("00000001" + text("a") + text("b")),
        ),
        (commands.DeleteSuperStream("s"), 30, text("s")),
        (commands.ResolveOffsetSpec("s", NEXT), 31, text("s") + "0003 00000000"),
        (
            commands.ResolveOffsetSpec("s", NEXT, {"a": "b"}),
            31,
            text("s") + "0003 00000001" + text("a") + text("b"),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Request) else "",
)
def test_a_request_is_written_as_the_protocol_says(
    request_: Request[Any], key: int, body: str
) -> None:
    content = bytes.fromhex(f"{key:04x} 0001 00000102" + body)
    assert request_.encode(0x102) == len(content).to_bytes(4) + content


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (commands.publish_header(7, 2, 100), "0000006d 0002 0001 07 00000002"),
        (commands.publish_header(7, 2, 100, 2), "0000006d 0002 0002 07 00000002"),
        (commands.credit_frame(7, 10), "00000007 0009 0001 07 000a"),
        (
            commands.store_offset_frame("me", "s", 5),
            "00000013 000a 0001" + text("me") + text("s") + "0000000000000005",
        ),
        (commands.heartbeat_frame(), "00000004 0017 0001"),
        (commands.tune_frame(1024, 60), "0000000c 0014 0001 00000400 0000003c"),
        (commands.close_answer_frame(9), "0000000a 8016 0001 00000009 0001"),
        (
            commands.activity_answer_frame(9, OffsetSpec.at(5)),
            "00000014 801a 0001 00000009 0001 0004 0000000000000005",
        ),
    ],
)
def test_frames_without_an_answer_are_written_as_the_protocol_says(
    written: bytes, expected: str
) -> None:
    assert written == bytes.fromhex(expected)


@pytest.mark.parametrize(
    "request_",
    [
        commands.DeclarePublisher(1, "x" * 256, "s"),
        commands.QueryPublisherSequence("x" * 256, "s"),
        commands.QueryOffset("x" * 256, "s"),
    ],
)
def test_a_reference_that_crashes_old_brokers_is_never_sent(request_: Request[Any]) -> None:
    with pytest.raises(InvalidInput, match="255 bytes"):
        request_.encode(1)
    with pytest.raises(InvalidInput, match="255 bytes"):
        commands.store_offset_frame("x" * 256, "s", 1)


def test_metadata_gives_leader_and_replicas_and_leaves_out_nodes_that_left() -> None:
    assert MetadataAnswer.read(Reader(METADATA)).streams == (
        StreamMetadata("invoices-0", 1, Broker("rmq1", 5552), (Broker("rmq2", 5553),)),
        StreamMetadata("missing", 2, None, ()),
    )


def test_answers_have_their_values() -> None:
    by_name = {request.name: request.answer(Reader(body)) for request, body in ANSWERED}
    assert by_name["QueryPublisherSequence"] == SequenceAnswer(1, 2**63)
    assert by_name["QueryOffset"] == OffsetAnswer(1, 77)
    assert by_name["StreamStats"] == StatsAnswer(1, {"first_chunk_id": -1})
    assert by_name["Partitions"].streams == ("invoices-0", "invoices-1")
    assert by_name["Route"].streams == ("invoices-0",)
    assert by_name["Create"] == Answer(1)


@pytest.mark.parametrize(("request_", "body"), ANSWERED, ids=lambda value: str(value)[:20])
def test_an_answer_that_is_cut_or_too_long_is_a_protocol_error(
    request_: Request[Any], body: bytes
) -> None:
    request_.answer(Reader(body))
    for end in range(len(body)):
        with pytest.raises(ProtocolError):
            request_.answer(Reader(body[:end]))
    with pytest.raises(ProtocolError):
        request_.answer(Reader(body + b"\0"))


@pytest.mark.parametrize(("request_", "_"), ANSWERED, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("rest", [b"", b"\0" * 8, b"whatever"])
def test_a_refusal_is_read_whatever_follows_its_code(
    request_: Request[Any], _: bytes, rest: bytes
) -> None:
    if request_.name == "Metadata":
        return  # it has a code for each stream, and none of its own
    assert request_.answer(Reader(b"\0\6" + rest)).code == Code.STREAM_NOT_AVAILABLE


def test_no_stored_offset_is_an_answer_and_not_an_error() -> None:
    assert Code.NO_OFFSET in commands.QueryOffset.accepted_codes
    assert OffsetAnswer.read(Reader(b"\0\x13" + bytes(8))).offset is None


def test_an_offset_resolved_to_something_else_is_a_protocol_error() -> None:
    assert ResolvedOffsetAnswer.read(Reader(OK + b"\0\4" + bytes(8))).offset == OffsetSpec.at(0)
    with pytest.raises(ProtocolError):
        ResolvedOffsetAnswer.read(Reader(OK + b"\0\5" + bytes(8)))


def test_no_secret_is_in_the_text_of_a_request() -> None:
    assert PASSWORD not in repr(SaslAuthenticate("PLAIN", PASSWORD.encode(), "someone"))
