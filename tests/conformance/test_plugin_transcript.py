"""What the real sharding plugin does on RabbitMQ 4.0, through every kind of channel.

These are the facts that our wrappers emulate. A promise here is the plugin's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.pool import Pool
from tests.cluster.sources import choose
from tests.conformance import recorded
from tests.conformance.callers import CALLERS
from tests.conformance.script import FORBIDDEN, SCENARIOS
from tests.conformance.stage import Stage, plugin_stage
from tests.conformance.values import HANGS, Transcript

pytestmark = pytest.mark.cluster

FIRST = "sharding: images - <connected> - 0"
SECOND = "sharding: images - <connected> - 1"
AIO_ERRORS = {
    403: "ChannelAccessRefused",
    404: "ChannelNotFoundEntity",
    406: "ChannelPreconditionFailed",
}


@pytest.fixture(scope="module")
def plugin(pool: Pool) -> Iterator[Cluster]:
    """With the plugin, of the version that was recorded."""
    if choose(recorded.VERSION) == "environment":
        pytest.skip("the brokers named in the environment are not known to have the plugin")
    with pool.shared("plugin", recorded.VERSION, "transcript") as running:
        yield running


class Play:
    """The scenarios of one kind of channel, each played once."""

    def __init__(self, stage: Stage) -> None:
        self.kind = stage.kind
        self._stage = stage
        self._played: dict[str, Transcript] = {}

    def __call__(self, scenario: str) -> Any:
        if scenario not in self._played:
            self._played[scenario] = self._stage.play(SCENARIOS[scenario])
        return self._played[scenario]

    @property
    def is_pika(self) -> bool:
        return self.kind in recorded.PIKA

    def refusal(self, code: int, text: str) -> dict[str, Any]:
        """A channel error as this client raises it. aiormq tells the code by the type only."""
        if self.is_pika:
            return {"raises": "ChannelClosedByBroker", "with": [code, text]}
        return {"raises": AIO_ERRORS[code], "with": [text]}

    def aftermath(self, refusal: dict[str, Any]) -> dict[str, Any]:
        """The channel is closed, or open again if robust; the connection lives."""
        closed = [{"reason": refusal, "callback got the caller's channel": True}]
        return {
            "channel is open": self.kind == "robust",
            "connection is open": True,
            "close callback got": "none" if self.kind == "blocking" else closed,
            "a new channel": "works",
        }


@pytest.fixture(scope="module", params=CALLERS)
def play(plugin: Cluster, request: pytest.FixtureRequest) -> Play:
    stage = plugin_stage(plugin, request.param)
    stage.play(lambda _: {})  # a stage that can't be set up fails here, once
    return Play(stage)


def test_consumer_goes_to_the_connected_node_s_shard_with_the_fewest_the_first_on_a_tie(
    play: Play,
) -> None:
    seen = play("placement")
    for node in (0, 2):
        assert seen[f"node {node}, consumers after 1"] == {FIRST: 1, SECOND: 0}
        assert seen[f"node {node}, consumers after 2"] == {FIRST: 1, SECOND: 1}
        assert seen[f"node {node}, consumers after 3"] == {FIRST: 2, SECOND: 1}
        assert seen[f"node {node}, consumers elsewhere"] == [0, 0, 0, 0]


def test_consumers_of_other_connections_count(play: Play) -> None:
    seen = play("placement_by_two_connections")
    assert seen["one each"] == seen["after one moved"] == {FIRST: 1, SECOND: 1}
    assert play("half_of_the_shards_on_the_node")["second shard"]["consumers"] == 2


def test_get_fetches_from_the_local_shard_with_the_fewest_consumers_even_if_it_is_empty(
    play: Play,
) -> None:
    seen = play("fetching")
    fetched = seen["two in the first shard"]
    assert (fetched["body"], fetched["message_count"]) == ("in the first", 1)
    assert (fetched["exchange"], fetched["routing_key"]) == ("", FIRST)
    assert seen["first shard has a consumer"]["body"] == "in the second"
    assert seen["empty"] is None
    assert seen["message on another node only"] is None
    other = play("fetch_prefers_fewest_consumers_to_messages")
    assert other["first shard empty, second not"] is None


def test_declare_is_answered_with_the_first_shard_s_name_which_pika_waits_past_for_ever(
    play: Play,
) -> None:
    seen = play("declaring")
    answer = {"queue": FIRST, "messages": 2, "consumers": 0}
    shown = HANGS if play.is_pika else {"name of the queue object": FIRST, "DeclareOk": answer}
    assert seen["durable"] == seen["passive"] == shown
    text = (
        f"PRECONDITION_FAILED - inequivalent arg 'durable' for queue '{FIRST}' in vhost '/': "
        "received 'false' but current is 'true'"
    )
    assert seen["not durable"] == play.refusal(406, text)
    assert seen["not durable, after"] == play.aftermath(play.refusal(406, text))


def test_declared_queue_object_is_the_first_shard_so_all_its_consumers_are_there(
    play: Play,
) -> None:
    seen = play("consuming_from_the_declared")
    if play.is_pika:
        assert seen["queue objects"] == [None, None]
    else:
        assert seen["queue objects"] == [FIRST, FIRST]
        assert seen["consumers"] == {FIRST: 2, SECOND: 0}


def test_robust_channel_restores_a_declared_consumer_after_a_refusal_no_other_does(
    play: Play,
) -> None:
    seen = play("declared_consumer_after_a_refusal")
    assert seen["consumers"] == {FIRST: int(play.kind == "robust"), SECOND: 0}
    assert len(seen["received"]) == int(play.kind == "robust")


@pytest.mark.parametrize("call", FORBIDDEN)
def test_forbidden_call_closes_the_channel_and_nothing_else(play: Play, call: str) -> None:
    refusal = play.refusal(406, f'PRECONDITION_FAILED - Can\'t {call} sharded queue: <<"images">>')
    expected = {"refused": refusal, "after": play.aftermath(refusal)}
    assert play("refusals")[call] == expected
    in_transaction = {"transaction": "Tx.SelectOk", **expected}
    assert play("refusals_in_a_transaction")[call] == in_transaction


def test_refusal_ends_the_channel_s_consumers_and_gives_back_what_they_held(play: Play) -> None:
    seen = play("refusal_with_a_consumer")
    assert seen["consumers"] == {FIRST: 0, SECOND: 0}
    assert seen["back in the shard"] == [{"body": "held", "redelivered": True}]


def test_message_keeps_exchange_key_headers_and_properties_and_its_key_keeps_one_shard(
    play: Play,
) -> None:
    confirmed = {"blocking": "sent", "async": "Basic.Ack"}.get(play.kind, "Ack")
    for label, seen in play("publishing").items():
        assert seen["results"] == ["sent" if label.startswith("no confirms") else confirmed]
        assert seen["all arrived"]
        assert seen["each message once"]
        assert seen["each key in one shard"]
        assert seen["more than one shard used"]
        assert seen["exchange and key kept"]
        assert seen["returned"] == []
        assert seen["last"] == {
            "exchange": "images",
            "routing_key": "user-9",
            "redelivered": False,
            "headers": {"h": "v"},
            "content_type": "text/plain",
            "correlation_id": "c-1",
            "delivery_mode": 2,
            "body": "user-9 1",
        }


def test_consumers_on_all_nodes_get_each_message_once_as_it_was_sent(play: Play) -> None:
    received = play("end_to_end")["received"]
    assert len(received) == len({each["body"] for each in received}) == 13
    for each in received:
        assert each["exchange"] == "images"
        assert each["body"] == f"for {each['routing_key']}"
        assert each["headers"] == {"h": "v"}
        assert not each["redelivered"]


def test_carbon_copies_do_not_multiply_a_message_and_bcc_is_not_shown(play: Play) -> None:
    shown = [seen["found"] for seen in play("carbon_copies").values()]
    assert [len(found) for found in shown] == [1, 1, 1, 1]
    headers = [found[0]["headers"] for found in shown]
    assert headers == [{}, {"CC": ["a"]}, {}, {"CC": ["a"], "h": "v"}]


def test_unroutable_mandatory_message_comes_back_with_its_exchange_and_key(play: Play) -> None:
    ordinary, sharded = play("unroutable"), play("unroutable_through_the_sharded_exchange")
    [returned] = ordinary["confirms"]["returned"]
    assert (returned["exchange"], returned["routing_key"]) == ("amq.direct", "nowhere")
    [returned] = sharded["returned"]
    assert (returned["exchange"], returned["routing_key"]) == ("images", "user-1")
    assert returned["headers"] == {"h": "v"}
    unroutable = {"raises": "UnroutableError", "with": ["1 unroutable message(s) returned"]}
    results = {"blocking": unroutable, "async": "Basic.Ack"}
    expected = results.get(play.kind, "DeliveredMessage")
    assert ordinary["confirms"]["result"] == sharded["result"] == expected
    # Without confirms aiormq can't tell whose the returned message is, and drops it.
    assert len(ordinary["no confirms"]["returned"]) == int(play.is_pika)


def test_delivery_callback_publishes_through_the_channel_it_was_given(play: Play) -> None:
    seen = play("publishing_in_a_callback")
    bodies = [each["body"] for each in seen["answers"]]
    more = [] if play.is_pika else ["the answer, by message.channel"]
    assert bodies == ["the answer", *more]
    assert {(each["exchange"], each["routing_key"]) for each in seen["answers"]} == {
        ("images", "answer")
    }
    if play.is_pika:
        assert seen["question"][0]["callback got the caller's channel"]


def test_consumer_tags_are_the_application_s_and_a_duplicate_harms_nothing(play: Play) -> None:
    seen = play("consumer_tags")
    assert seen["given"] == seen["tag used again"] == "mine"
    assert seen["deliveries"] == {"for mine": "mine", "for the generated": "<generated>"}
    assert seen["duplicate"]["raises"] == "DuplicateConsumerTag"
    assert seen["channel and connection open after the duplicate"] == [True, True]
    assert seen["consumers after the duplicate"] == {FIRST: 1, SECOND: 1}
    assert seen["consumers after the cancel"] == {FIRST: 0, SECOND: 1}
    # pika's asynchronous channel never calls back for a tag that it does not know.
    unknown = {"blocking": [], "async": HANGS}.get(play.kind, "Basic.CancelOk")
    assert seen["cancel of an unknown tag"] == unknown


def test_deleted_shard_cancels_its_consumer_only(play: Play) -> None:
    seen = play("cancelled_by_the_broker")
    assert seen["cancelled"] == ["c-0"]
    assert seen["channel is open"]
    assert seen["other consumer got"] == ["for the other consumer"]
    assert seen["consumers of the shard left"]["consumers"] == 2


def test_exclusive_consumer_has_a_shard_to_itself_until_there_is_none_left(play: Play) -> None:
    seen = play("exclusive_consumers")
    assert (seen["first"], seen["second"]) == ("c-0", "c-1")
    text = f"ACCESS_REFUSED - queue '{FIRST}' in vhost '/' in exclusive use"
    assert seen["third"] == play.refusal(403, text)
    assert seen["third, after"] == play.aftermath(play.refusal(403, text))


def test_iterator_reads_one_shard_and_leaves_no_consumer(play: Play) -> None:
    seen = play("iterating")
    if play.kind == "async":
        assert seen["taken"] is None
    else:
        assert [each["body"] for each in seen["taken"][:2]] == ["one", "two"]
        assert seen["left"] == [["three"], ["never seen: the iterator has one shard"]]
    assert seen["consumers afterwards"] == {FIRST: 0, SECOND: 0}


def test_prefetch_ack_nack_and_recover_work_as_on_any_queue(play: Play) -> None:
    seen = play("acknowledging")

    def brief(tag: int, body: str, *, again: bool) -> dict[str, Any]:
        return {"delivery_tag": tag, "redelivered": again, "body": body}

    assert seen["held"] == [brief(1, "m-0", again=False), brief(2, "m-1", again=False)]
    assert seen["after ack"] == [brief(3, "m-2", again=False)]
    assert seen["after refusal"] == [brief(4, "m-1", again=True)]
    assert seen["after recovery"] == [brief(5, "m-1", again=True), brief(6, "m-2", again=True)]
    assert seen["left"] == ["m-1", "m-2", "m-3", "m-4"]
    assert [each["body"] for each in play("not_acknowledging")["received"]] == [
        "one",
        "two",
        "three",
    ]
    assert play("not_acknowledging")["left"] == 0


def test_genuine_refusal_of_the_broker_is_shown_as_it_is(play: Play) -> None:
    refusal = play.refusal(406, "PRECONDITION_FAILED - unknown delivery tag 77")
    assert play("unknown_delivery_tag")["after"] == play.aftermath(refusal)


def test_node_without_shards_refuses_consume_and_get_though_others_have_some(play: Play) -> None:
    seen = play("no_shard_on_the_node")
    text = 'PRECONDITION_FAILED - Error finding sharded queue for: <<"images">>'
    for call in ("consume", "get"):
        assert seen[call] == play.refusal(406, text)
        assert seen[f"{call}, after"] == play.aftermath(play.refusal(406, text))
    missing = f"NOT_FOUND - no queue '{FIRST}' in vhost '/'"
    assert seen["declare passive"] == play.refusal(404, missing)
    # Declaring makes the shard again, but nothing binds it: no message will ever reach it.
    assert seen["declare, shards on the node now"] == {FIRST: {"bindings": 0}}


def test_other_names_and_the_shards_own_names_pass_untouched(play: Play) -> None:
    ordinary, shards = play("other_names"), play("shards_by_their_own_names")
    assert ordinary["bind"] == shards["bind"] == "Queue.BindOk"
    assert ordinary["unbind"] == shards["unbind"] == "Queue.UnbindOk"
    assert (ordinary["purge"], shards["purge"]) == ({"Queue.PurgeOk": 0}, {"Queue.PurgeOk": 1})
    assert ordinary["delete"] == {"Queue.DeleteOk": 0}
    assert ordinary["get"]["body"] == "by the exchange"
    assert ordinary["channel is open"]
    assert shards["channel is open"]
    assert shards["found in shards"] == 0  # the default exchange knows no queue `images`
    missing = play.refusal(404, "NOT_FOUND - no queue 'missing' in vhost '/'")
    assert ordinary["consume from a missing queue"] == missing


def test_exchange_may_be_declared_again_with_equal_settings_only(play: Play) -> None:
    seen = play("exchange_declaring")
    answer = "Exchange.DeclareOk" if play.is_pika else "the exchange images"
    assert seen["passive"] == seen["equal"] == answer
    inequivalent = (
        "PRECONDITION_FAILED - inequivalent arg '{}' for exchange 'images' in vhost '/': "
    )
    assert seen["not durable"] == play.refusal(
        406, inequivalent.format("durable") + "received 'false' but current is 'true'"
    )
    assert seen["another type"] == play.refusal(
        406, inequivalent.format("type") + "received 'fanout' but current is ''x-modulus-hash''"
    )


def test_deleted_exchange_leaves_its_shards_and_their_messages_for_when_it_is_back(
    play: Play,
) -> None:
    seen = play("exchange_deleting")
    assert seen["delete"] == seen["delete again"] == "Exchange.DeleteOk"
    assert (seen["shards left"], seen["messages left"]) == (6, 1)
    assert seen["consume"] == play.refusal(404, "NOT_FOUND - no queue 'images' in vhost '/'")
    assert seen["publish"] == play.refusal(404, "NOT_FOUND - no exchange 'images' in vhost '/'")
    assert seen["received"] == ["kept"]


def test_recording_is_what_the_plugin_does(play: Play) -> None:
    """Last: every scenario has been played by now. Record anew: python -m tests.conformance."""
    assert {name: play(name) for name in SCENARIOS} == recorded.load()[play.kind]
