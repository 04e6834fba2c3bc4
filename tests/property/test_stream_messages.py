"""Any message comes back as it was written, and any bytes are a message or a protocol error."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.stream.errors import ProtocolError
from sharding.stream.messages.amqp_codec import AmqpReader, write_value
from sharding.stream.messages.amqp_values import AmqpValue, Described, Symbol, Timestamp, as_text
from sharding.stream.messages.message import Properties, decode_message, encode_message

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
longs = st.integers(-(2**63), 2**63 - 1)
uuids = st.binary(min_size=16, max_size=16).map(lambda octets: UUID(bytes=octets))
leaves: st.SearchStrategy[AmqpValue] = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts
    | texts.map(Symbol)
    | st.binary(max_size=20)
    | longs.map(Timestamp)
    | uuids
    | st.decimals(allow_nan=False, places=2)
)


def holding(inner: st.SearchStrategy[AmqpValue]) -> st.SearchStrategy[AmqpValue]:
    tuples: st.SearchStrategy[AmqpValue] = st.lists(inner, max_size=4).map(tuple)
    maps: st.SearchStrategy[AmqpValue] = st.dictionaries(texts, inner, max_size=4)
    names = texts.map(Symbol) | st.integers(0, 2**64 - 1)
    return tuples | maps | st.builds(Described, names, inner)


values = st.recursive(leaves, holding, max_leaves=12)
ids = st.none() | texts | st.integers(0, 2**64 - 1) | uuids | st.binary(max_size=9)
some_text = st.none() | texts
properties = st.builds(
    Properties,
    message_id=ids,
    user_id=st.none() | st.binary(max_size=9),
    to=some_text,
    subject=some_text,
    reply_to=some_text,
    correlation_id=ids,
    content_type=some_text,
    content_encoding=some_text,
    absolute_expiry_time=st.none() | longs.map(Timestamp),
    creation_time=st.none() | longs.map(Timestamp),
    group_id=some_text,
    group_sequence=st.none() | st.integers(0, 2**32 - 1),
    reply_to_group_id=some_text,
)
encoded = st.builds(
    lambda body, **parts: encode_message(body, **parts),
    st.binary(max_size=300),
    key=some_text,
    properties=st.none() | properties,
    application_properties=st.dictionaries(texts, values, max_size=3),
    annotations=st.dictionaries(texts, values, max_size=3),
)


@given(values)
def test_any_value_is_read_as_it_was_written_and_has_a_text(value: AmqpValue) -> None:
    reader = AmqpReader(write_value(value))
    found = reader.value()
    assert reader.at_end
    assert found == value
    assert type(found) is type(value)
    assert isinstance(as_text(found), str | None)


@given(
    st.binary(max_size=300),
    some_text,
    properties,
    st.dictionaries(texts, values, max_size=3),
    st.dictionaries(texts, values, max_size=3),
)
@settings(max_examples=50)
def test_any_message_is_read_as_it_was_written(
    body: bytes,
    key: str | None,
    standard: Properties,
    application: dict[str, AmqpValue],
    annotations: dict[str, AmqpValue],
) -> None:
    annotations.pop("x-routing-key", None)
    message = decode_message(
        encode_message(
            body,
            key=key,
            properties=standard,
            application_properties=application,
            annotations=annotations,
        )
    )
    named = annotations if key is None else annotations | {"x-routing-key": key}
    assert (message.body, message.key) == (body, key)
    assert message.properties == standard
    assert message.application_properties == application
    assert message.annotations == named


@given(encoded, st.data())
@settings(max_examples=80)
def test_damaged_messages_are_messages_or_protocol_errors(raw: bytes, data: st.DataObject) -> None:
    octets = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(octets) - 1))
        octets[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(octets)) | st.just(len(octets)))
    try:
        message = decode_message(octets[:cut])
    except ProtocolError:
        return
    for value in (*message.application_properties.values(), message.value):
        assert isinstance(as_text(value), str | None)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_a_protocol_error(octets: bytes) -> None:
    try:
        value = AmqpReader(octets).value()
    except ProtocolError:
        return
    assert isinstance(as_text(value), str | None)
