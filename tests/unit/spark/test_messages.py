"""Rows as messages: what the columns hold is published, and null is refused with its place."""

from __future__ import annotations

import time
from collections import namedtuple
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from sharding.errors import InvalidInput
from sharding.stream.messages.message import decode_message
from spark.options.write import MessageColumns
from spark.write.messages import Messages, RowCount, of_batch, of_rows

COLUMNS = MessageColumns(value="value", key="key")


def batch_of(**columns: pa.Array) -> pa.RecordBatch:
    return pa.record_batch(list(columns.values()), names=list(columns))


class FakeRow(tuple[object, ...]):
    """As PySpark's Row: a tuple that knows the names of its fields."""

    __fields__ = ("key", "value")


def test_text_and_binary_bodies_become_bytes() -> None:
    for kind in (pa.string(), pa.large_string()):
        batch = batch_of(value=pa.array(["ä", ""], kind))
        messages = of_batch(batch, MessageColumns("value"), RowCount(), key_needed=False)
        assert messages.bodies == ["ä".encode(), b""]
        assert messages.keys is None
    batch = batch_of(value=pa.array([b"\xff"], pa.binary()))
    assert of_batch(batch, MessageColumns("value"), RowCount(), key_needed=False).bodies == [
        b"\xff"
    ]


def test_columns_that_are_not_named_are_not_published() -> None:
    batch = batch_of(value=pa.array([b"a"]), properties=pa.array(["other"]))
    messages = of_batch(batch, MessageColumns("value"), RowCount(), key_needed=False)
    assert messages == Messages([b"a"])


def test_null_body_is_refused_and_its_row_is_named() -> None:
    count = RowCount()
    of_batch(
        batch_of(value=pa.array([b"a", b"b"])), MessageColumns("value"), count, key_needed=False
    )
    with pytest.raises(InvalidInput, match="row 3 of the task: 'value' must be"):
        of_batch(
            batch_of(value=pa.array([b"c", None])), MessageColumns("value"), count, key_needed=False
        )


def test_null_key_is_refused_only_where_the_key_decides_the_shard() -> None:
    batch = batch_of(value=pa.array([b"a", b"b"]), key=pa.array(["k", None]))
    with pytest.raises(InvalidInput, match="row 1 of the task: 'key' decides the shard"):
        of_batch(batch, COLUMNS, RowCount(), key_needed=True)
    messages = of_batch(batch, COLUMNS, RowCount(), key_needed=False)
    assert [decode_message(each).key for each in messages.encoded()] == ["k", None]


def test_encoded_messages_hold_key_properties_and_headers() -> None:
    moment = datetime(2026, 11, 16, 12, tzinfo=UTC)
    kind = pa.struct([("message_id", pa.string()), ("creation_time", pa.timestamp("us", "UTC"))])
    batch = batch_of(
        value=pa.array([b"a", b"b"]),
        key=pa.array(["k", "l"]),
        properties=pa.array([{"message_id": "m", "creation_time": moment}, None], kind),
        headers=pa.array([[("region", "eu")], None], pa.map_(pa.string(), pa.string())),
    )
    columns = MessageColumns("value", "key", "properties", "headers")
    first, second = map(
        decode_message, of_batch(batch, columns, RowCount(), key_needed=True).encoded()
    )
    assert (first.body, first.key) == (b"a", "k")
    assert first.properties is not None
    assert first.properties.message_id == "m"
    assert first.properties.creation_time == int(moment.timestamp() * 1000)
    assert first.application_properties == {"region": "eu"}
    assert (second.body, second.key, second.properties) == (b"b", "l", None)


def test_time_without_a_zone_is_taken_as_utc() -> None:
    kind = pa.struct([("creation_time", pa.timestamp("us"))])
    naive = datetime(1970, 1, 1, 0, 0, 1)
    batch = batch_of(value=pa.array([b"a"]), properties=pa.array([{"creation_time": naive}], kind))
    columns = MessageColumns("value", properties="properties")
    (message,) = of_batch(batch, columns, RowCount(), key_needed=False).encoded()
    properties = decode_message(message).properties
    assert properties is not None
    assert properties.creation_time == 1000


def test_time_of_a_row_without_a_zone_is_local_as_spark_s_own_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What Spark gives a task as a `Row` has times of the worker's zone; as Arrow, of UTC."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        noon = datetime(2026, 11, 16, 12, tzinfo=UTC)
        row = {
            "value": b"a",
            "properties": {"creation_time": noon.astimezone().replace(tzinfo=None)},
        }
        columns = MessageColumns("value", properties="properties")
        (messages,) = of_rows([row], columns, key_needed=False)
        (message,) = messages.encoded()
        properties = decode_message(message).properties
        assert properties is not None
        assert properties.creation_time == int(noon.timestamp() * 1000)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "row",
    [
        ("k", b"v"),
        ("k", "v"),
        {"key": "k", "value": b"v"},
        {"key": "k", "value": "v", "other": 1},
        FakeRow(("k", b"v")),
        FakeRow(("k", bytearray(b"v"))),
    ],
)
def test_rows_of_every_kind_give_the_same_message(row: object) -> None:
    (messages,) = of_rows([row], COLUMNS, key_needed=True)
    assert (list(messages.keys or ()), messages.bodies) == (["k"], [b"v"])


def test_bare_bodies_go_to_a_stream_and_not_where_a_key_is_needed() -> None:
    (messages,) = of_rows([b"v", "w"], MessageColumns("value"), key_needed=False)
    assert messages == Messages([b"v", b"w"])
    with pytest.raises(InvalidInput, match="row 0 of the task"):
        list(of_rows([b"v"], COLUMNS, key_needed=True))


def test_rows_are_taken_some_at_a_time() -> None:
    taken = 0

    def endless() -> object:
        nonlocal taken
        while True:
            taken += 1
            yield ("k", b"v")

    parts = of_rows(endless(), COLUMNS, key_needed=True, at_once=10)  # type: ignore[arg-type]
    assert len(next(parts)) == 10
    assert taken == 10


def test_row_that_is_none_of_them_is_refused_by_its_number() -> None:
    pair = namedtuple("pair", "a b c")
    for row in (pair(1, 2, 3), 7):
        with pytest.raises(InvalidInput, match="row 1: must be a Row or mapping"):
            list(of_rows([("k", b"v"), row], COLUMNS, key_needed=True))
    with pytest.raises(InvalidInput, match="row 0: must have 'value'"):
        list(of_rows([{"key": "k"}], COLUMNS, key_needed=True))


def test_column_that_was_asked_for_must_be_in_every_row() -> None:
    """A slip in keyColumn would else store rows of a stream without their keys."""
    with pytest.raises(InvalidInput, match="row 0: must have 'key'"):
        list(of_rows([{"kee": "k", "value": "v"}], COLUMNS, key_needed=False, needed=["key"]))


def test_property_that_amqp_does_not_have_is_refused() -> None:
    messages = Messages([b"a"], properties=[{"colour": "red"}])
    with pytest.raises(InvalidInput, match="properties: must be named as AMQP's are"):
        messages.encoded()
