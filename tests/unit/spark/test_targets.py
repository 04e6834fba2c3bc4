"""What a sink is asked for: every mistake is found before a broker is asked, and is named."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql.types import (
    BinaryType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sharding.errors import InvalidInput
from spark.options.values import BadOption
from spark.options.write import STREAM_OWNERS, MessageColumns, WriteOptions
from spark.write.queue_targets import basic_properties
from spark.write.sink import PublishOptions, batch_writer, stream_writer
from spark.write.targets import parse

PLAIN = StructType([StructField("key", StringType()), StructField("value", BinaryType())])


def written(**options: str) -> WriteOptions:
    return parse(options)[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of superStream, stream or queue"),
        ({"stream": "a", "superStream": "b"}, "exactly one of"),
        ({"stream": "a", "keyColum": "k"}, "did you mean 'keyColumn'"),
        ({"queue": "a", "compression": "gzip"}, "'compression': is for streams"),
        ({"stream": "a", "through": "default"}, "'through': is for queue shards"),
        ({"stream": "a", "routing": "broker"}, "'routing': is for super streams"),
        ({"stream": "a", "compression": "rar"}, "must be none or gzip"),
        ({"stream": "a", "filterColumn": "f", "subEntryMessages": "5"}, "can't be combined"),
        ({"stream": "a", "compression": "gzip", "subEntryMessages": "0"}, "at least 1"),
        ({"stream": "a", "flushTimeout": "12"}, "a time with its unit"),
        ({"queue": "a", "amqpUri": "rabbitmq-stream://h"}, "must begin with amqp"),
    ],
)
def test_bad_option_is_refused_in_one_sentence(options: dict[str, str], words: str) -> None:
    with pytest.raises(BadOption, match=words) as caught:
        parse(options)
    assert "\n" not in str(caught.value)


def test_password_in_an_amqp_uri_is_refused_and_not_shown() -> None:
    with pytest.raises(BadOption) as caught:
        parse({"queue": "a", "amqpUri": "amqp://user:canary@host"})
    assert "canary" not in str(caught.value)


def test_names_of_options_are_compared_without_case() -> None:
    assert written(SUPERSTREAM="a", keycolumn="k").columns.key == "k"


def test_options_that_spark_adds_are_not_called_unknown() -> None:
    assert written(stream="a", checkpointLocation="/x", queryName="q").name == "a"


def test_default_columns_are_used_where_they_are() -> None:
    found = MessageColumns.find(written(superStream="a"), PLAIN)
    assert found == MessageColumns("value", "key")


def test_column_is_found_in_another_case_unless_two_differ_by_it() -> None:
    schema = StructType([StructField("Customer", StringType()), *PLAIN.fields])
    found = MessageColumns.find(written(superStream="a", keyColumn="customer"), schema)
    assert found.key == "Customer"
    twice = StructType([StructField("CUSTOMER", StringType()), *schema.fields])
    with pytest.raises(BadOption, match="differ by case"):
        MessageColumns.find(written(superStream="a", keyColumn="customer"), twice)


@pytest.mark.parametrize(
    ("options", "schema", "words"),
    [
        ({"stream": "a", "keyColumn": "customer"}, PLAIN, "'keyColumn': must be a column"),
        ({"superStream": "a"}, StructType(PLAIN.fields[1:]), "decides the partition"),
        ({"queue": "a"}, StructType(PLAIN.fields[1:]), "decides the shard"),
        ({"stream": "a"}, StructType(PLAIN.fields[:1]), "'value' is none of them"),
        (
            {"stream": "a", "keyColumn": "n"},
            StructType([StructField("n", LongType()), *PLAIN.fields]),
            "'n' must be string or binary; cast it; found 'bigint'",
        ),
        (
            {"stream": "a"},
            StructType([StructField("headers", StringType()), *PLAIN.fields]),
            "'headersColumn': must be a map",
        ),
        (
            {"stream": "a"},
            StructType([StructField("headers", MapType(LongType(), StringType())), *PLAIN.fields]),
            "'headersColumn': must be a map",
        ),
        (
            {"queue": "a"},  # pika writes no number with a fraction
            StructType(
                [StructField("headers", MapType(StringType(), DoubleType())), *PLAIN.fields]
            ),
            "'headersColumn': must be a map from string to string, whole number,",
        ),
        (
            {"stream": "a"},
            StructType(
                [
                    StructField("properties", StructType([StructField("mesage", StringType())])),
                    *PLAIN.fields,
                ]
            ),
            "has no property 'mesage'; there are message_id",
        ),
        (
            {"queue": "a"},
            StructType(
                [
                    StructField("properties", StructType([StructField("priority", StringType())])),
                    *PLAIN.fields,
                ]
            ),
            "'priority' must be byte or",
        ),
    ],
)
def test_columns_that_do_not_fit_are_named_when_planned(
    options: dict[str, str], schema: StructType, words: str
) -> None:
    with pytest.raises(BadOption, match=words):
        MessageColumns.find(parse(options)[1], schema)


def test_column_that_is_there_twice_is_not_guessed_at() -> None:
    with pytest.raises(BadOption, match="must not have 'value' twice"):
        MessageColumns.find(written(stream="a"), StructType([*PLAIN.fields, PLAIN.fields[1]]))


def test_columns_as_the_source_gives_them_can_be_written_back() -> None:
    properties = StructType(
        [
            StructField("message_id", StringType()),
            StructField("user_id", BinaryType()),
            StructField("creation_time", TimestampType()),
            StructField("group_sequence", LongType()),
        ]
    )
    schema = StructType(
        [
            *PLAIN.fields,
            StructField("properties", properties),
            StructField("headers", MapType(StringType(), StringType())),
        ]
    )
    found = MessageColumns.find(written(stream="a"), schema)
    assert found == MessageColumns("value", "key", "properties", "headers")


def test_nothing_can_be_overwritten() -> None:
    for writer in (batch_writer, stream_writer):
        with pytest.raises(BadOption, match="must be append"):
            writer({"stream": "a"}, PLAIN, True)


def test_batch_writer_refuses_the_scheme_of_exactly_once() -> None:
    """foreachBatch gives two writes of one batch the same ids: the second would be dropped."""
    with pytest.raises(BadOption, match="made by exactly_once"):
        batch_writer({"stream": "a", STREAM_OWNERS: "{}"}, PLAIN, False)


def test_own_shards_that_nobody_made_are_refused() -> None:
    with pytest.raises(BadOption, match="set by exactly_once"):
        stream_writer({"stream": "a", STREAM_OWNERS: "[]"}, PLAIN, False)
    with pytest.raises(BadOption, match="set by exactly_once"):
        PublishOptions.of(stream="a", ownShards="{}")


def test_publish_options_travel_and_show_no_password() -> None:
    options = PublishOptions.of(stream="a", user="u", password="canary")
    assert "canary" not in repr(options)
    assert pickle.loads(pickle.dumps(options)) == options
    assert b"guest" not in pickle.dumps(PublishOptions.of(stream="a", passwordEnv="SOME"))


def test_basic_properties_are_persistent_unless_a_row_says_otherwise() -> None:
    assert basic_properties(None, None).delivery_mode == 2
    assert basic_properties({"delivery_mode": 1}, None).delivery_mode == 1
    made = basic_properties(
        {
            "message_id": "m",
            "user_id": b"guest",
            "creation_time": datetime(1970, 1, 1, 0, 1, tzinfo=UTC),
            "app_id": None,
        },
        {"region": "eu"},
    )
    assert (made.message_id, made.user_id, made.timestamp, made.app_id) == ("m", "guest", 60, None)
    assert made.headers == {"region": "eu"}


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"user_id": b"\xff"}, "user_id: must be text in UTF-8"),
        ({"creation_time": 60}, "creation_time: must be a datetime"),
    ],
)
def test_property_that_amqp_can_not_hold_is_named(properties: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        basic_properties(properties, None)
