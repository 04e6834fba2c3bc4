"""Options of the Spark source: every mistake is found, and says option, rule and what was found."""

from __future__ import annotations

import pickle

import pytest

from sharding.stream.protocol.constants import Limits
from spark.options.connect import ConnectOptions, own_hosts
from spark.options.read import Place, ReadOptions
from spark.options.values import BadOption, OptionValues

CANARY = "kanari-1-Vogel"


def read(**options: str) -> ReadOptions:
    return ReadOptions.parse({"stream": "s", **options})


def test_names_are_compared_without_regard_to_case() -> None:
    assert read(MAXoffsetsPerTrigger="7").max_offsets == 7


def test_defaults_read_every_column_and_fail_on_loss() -> None:
    options = read()
    assert options.columns == ("key", "value", "stream", "partition", "offset", "timestamp")
    assert options.fail_on_data_loss
    assert options.connect.uris == ("rabbitmq-stream://localhost:5552",)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"maxOffsetPerTrigger": "3"}, "did you mean 'maxOffsetsPerTrigger'?"),
        ({"quixotic": "3"}, "must be among batchMax, chunkMax, columns"),
        ({"superStream": "t"}, r"exactly one of .*; found \['stream', 'superStream'\]"),
        ({"maxOffsetsPerTrigger": "0"}, "'maxOffsetsPerTrigger': .* at least 1; found '0'"),
        ({"maxOffsetsPerTrigger": "1e3"}, "whole number"),
        ({"minPartitions": "٣"}, "whole number"),
        ({"failOnDataLoss": "no"}, "must be true or false; found 'no'"),
        ({"maxTriggerDelay": "15m"}, "needs minOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "15"}, "time with its unit"),
        ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "at most .*, 4; found 5"),
        ({"columns": "value,body"}, "must be among .*; found 'body'"),
        ({"columns": "value,value"}, "different names"),
        ({"rawMessages": "true", "includeHeaders": "true"}, "can't have the columns"),
        ({"matchUnfiltered": "true"}, "needs filterValues"),
        ({"storeOffsets": "ü" * 128}, "at most 255 bytes"),
        ({"managementUrl": "http://h:15672"}, "is for streamPattern only"),
        ({"startingOffsets": "soon"}, "must be earliest, latest"),
        ({"heartbeat": "0s"}, "time with its unit"),
        ({"uri": "amqp://h"}, "must begin with rabbitmq-stream://"),
        ({"uri": "rabbitmq-stream://a,rabbitmq-stream+tls://b"}, "must all begin with"),
        ({"uri": "rabbitmq-stream://a:99999"}, "then host:port"),
        ({"tlsCaFile": "ca.pem"}, r"must begin with rabbitmq-stream\+tls://"),
        ({"uri": "rabbitmq-stream+tls://a", "tlsKeyFile": "k"}, "needs tlsCertificateFile"),
        ({"zones": "[]"}, "must be a JSON object"),
        ({"zones": '{"h": 1}'}, "from hosts to zones"),
        ({"zones": '{"h": "a", "h": "b"}'}, "'h' comes twice"),
        ({"user": ""}, "must not be empty"),
        ({"user": "a", "userFile": "b"}, "can't have more than one of user, userFile"),
        ({"mechanism": "digest"}, "must be plain or external or anonymous"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_its_rule(options: dict[str, str], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        read(**options)


def test_nothing_to_read_is_refused() -> None:
    with pytest.raises(BadOption, match=r"exactly one of .*; found 'none of them'"):
        ReadOptions.parse({})


@pytest.mark.parametrize("option", ["maxOffsetsPerTrigger", "storeOffsets"])
def test_a_batch_refuses_what_only_streaming_knows(option: str) -> None:
    with pytest.raises(BadOption, match=f"{option}.*streaming only"):
        read(**{option: "9"}).for_batch()


def test_a_batch_that_would_be_empty_by_its_options_is_refused() -> None:
    with pytest.raises(BadOption, match="startingOffsets"):
        read(startingOffsets="latest").for_batch()
    with pytest.raises(BadOption, match="endingOffsets"):
        read(endingOffsets="earliest").for_batch()


def test_a_streaming_query_has_no_end() -> None:
    with pytest.raises(BadOption, match=r"endingOffsets.*batches only"):
        read(endingOffsets="latest").for_streaming()
    starting = read(startingOffsets="earliest").for_streaming().starting
    assert starting is not None
    assert starting.everywhere is Place.EARLIEST


def test_columns_on_request_are_added_once_and_last() -> None:
    options = read(columns="value,node", includeNode="true", includeHeaders="TRUE")
    assert options.columns == ("value", "node", "headers")


def test_several_addresses_and_the_virtual_host() -> None:
    connect = read(uri="rabbitmq-stream://a/orders, rabbitmq-stream://b:1/orders").connect
    assert connect.uris == ("rabbitmq-stream://a/orders", "rabbitmq-stream://b:1/orders")
    assert connect.vhost == "orders"


@pytest.mark.parametrize(
    "uri",
    [
        f"rabbitmq-stream://ann:{CANARY}@host:5552",
        f"rabbitmq-stream://{CANARY}@host",
        f"rabbitmq-stream://ann:{CANARY}@[::1",
        f"ann:{CANARY}@host",
    ],
)
@pytest.mark.parametrize("option", ["uri", "managementUrl"])
def test_a_password_in_an_address_is_refused_and_not_shown(option: str, uri: str) -> None:
    with pytest.raises(BadOption, match=f"'{option}'.*passwordFile") as caught:
        read(**{option: uri})
    assert CANARY not in repr(caught.value) + str(caught.value) + str(caught.value.__context__)


def test_a_password_is_in_no_repr() -> None:
    options = read(user="ann", password=CANARY)
    assert options.connect.credentials.login({}).password == CANARY
    assert CANARY not in repr(options)
    assert CANARY not in repr(OptionValues({"password": CANARY}, "reading"))


def test_an_unknown_option_is_named_but_its_value_is_not_shown() -> None:
    with pytest.raises(BadOption) as caught:
        read(pasword=CANARY)
    assert "'pasword'" in str(caught.value)
    assert CANARY not in str(caught.value)


def test_options_travel_to_executors_and_stay_equal() -> None:
    options = read(zones='{"b": "2", "a": "1"}', startingOffsets='{"s": 3}')
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(options.connect) == hash(pickle.loads(pickle.dumps(options.connect)))


def test_a_bad_option_survives_the_way_to_the_driver() -> None:
    with pytest.raises(BadOption) as caught:
        read(minPartitions="none")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_equal_options_share_connections_and_others_do_not() -> None:
    def connect(**options: str) -> ConnectOptions:
        return read(**options).connect

    assert connect(zones='{"a": "1", "b": "2"}') == connect(zones='{"b": "2", "a": "1"}')
    assert connect(password="one") != connect(password="two")


def test_the_client_gets_what_was_asked_for() -> None:
    connect = read(
        loadBalancer="true", zones='{"h": "z"}', connectTimeout="500ms", heartbeat="1m",
        mechanism="Anonymous", batchMax="10", uncompressedMax="20", chunkMax="30",
    ).connect  # fmt: skip
    options = connect.environment_options({"WARREN_OWN_HOSTS": "node-7, "})
    assert options.load_balancer
    assert options.zones == {"h": "z"}
    assert (options.connect_timeout, options.heartbeat) == (0.5, 60)
    assert options.mechanism == "ANONYMOUS"
    assert options.limits == Limits(batch_max=10, uncompressed_max=20, chunk_max=30)
    assert "node-7" in options.own_hosts
    assert own_hosts({}) == options.own_hosts - {"node-7"}
