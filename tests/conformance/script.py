"""The script: what an application does to a sharded queue, and what it sees.

A scenario is a function from a stage to a transcript: labels and plain values. It opens callers of
its own and closes them; the stage makes itself whole before the next. Node names are written as the
application sees them: `<connected>` is its own node.

Nothing here says what is right. `test_plugin_transcript` says what the plugin does, and
`test_conformance` that our wrappers do the same.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.conformance.callers import Caller, Publication
from tests.conformance.stage import KIND_OF_EXCHANGE, LOGICAL, Scenario, Stage
from tests.conformance.values import GENERATED, Transcript, Value, listed, only

KEYS = ["", *(f"user-{number}" for number in range(12))]


def placement(stage: Stage) -> Transcript:
    """Consumers go to the shard of the connected node that has the fewest."""
    seen: Transcript = {}
    for node in (0, 2):
        with stage.caller(node) as caller:
            for number in range(3):
                caller.consume(LOGICAL, tag=f"c-{number}")
                seen[f"node {node}, consumers after {number + 1}"] = stage.seen_from(
                    node, stage.consumers(node)
                )
            others = [other for other in range(len(stage.nodes)) if other != node]
            seen[f"node {node}, consumers elsewhere"] = [
                count for other in others for count in _counts(stage.consumers(other))
            ]
    return seen


def placement_by_two_connections(stage: Stage) -> Transcript:
    """The counts are the queue's, not the connection's: another application's consumers count."""
    with stage.caller() as first, stage.caller() as second:
        first.consume(LOGICAL, tag="c")
        second.consume(LOGICAL, tag="c")
        both = stage.seen_from(0, stage.consumers(0))
        first.cancel("c")
        first.consume(LOGICAL, tag="d")
        again = stage.seen_from(0, stage.consumers(0))
    return {"one each": both, "after one moved": again}


def fetching(stage: Stage) -> Transcript:
    """`basic_get` fetches from the shard of the connected node that has the fewest consumers."""
    first, second = stage.shards(0)
    with stage.caller() as caller, stage.caller() as consumer:
        empty = caller.get(LOGICAL)
        stage.put(first, "in the first", "also in the first")
        stage.put(second, "in the second")
        fetched = caller.get(LOGICAL)
        consumer.prefetch(1)
        consumer.consume(LOGICAL, tag="c")  # at the first shard, so the second has the fewest
        consumer.received(1)
        beside_a_consumer = caller.get(LOGICAL)
        then_empty = caller.get(LOGICAL)
    elsewhere = stage.shards(1)
    with stage.caller() as caller:
        stage.make_whole()
        stage.put(elsewhere[0], "on another node")
        other_node = caller.get(LOGICAL)
    return {
        "empty": empty,
        "two in the first shard": stage.seen_from(0, fetched),
        "first shard has a consumer": stage.seen_from(0, beside_a_consumer),
        "second shard is empty": then_empty,
        "message on another node only": other_node,
    }


def fetch_prefers_fewest_consumers_to_messages(stage: Stage) -> Transcript:
    """The fewest consumers decide, though that shard is empty and the other is not."""
    _, second = stage.shards(0)
    with stage.caller() as caller:
        stage.put(second, "in the second")
        return {"first shard empty, second not": caller.get(LOGICAL)}


def declaring(stage: Stage) -> Transcript:
    """`queue_declare` of the logical name."""
    seen: Transcript = {}
    for label, durable, passive in (("durable", True, False), ("passive", False, True)):
        with stage.caller() as caller, stage.caller() as consumer:
            stage.put(stage.shards(0)[0], "one", "two")
            consumer.consume(stage.shards(0)[1], tag="c")
            seen[label] = stage.seen_from(
                0,
                caller.declare(
                    LOGICAL, durable=durable, passive=passive, patience=stage.declare_patience
                ),
            )
        stage.make_whole()
    with stage.caller() as caller:
        seen["not durable"] = stage.seen_from(0, caller.declare(LOGICAL))
        seen["not durable, after"] = stage.seen_from(0, caller.aftermath())
    return seen


def consuming_from_the_declared(stage: Stage) -> Transcript:
    """A client with queue objects consumes from what `declare_queue` gave it."""
    with stage.caller() as caller:
        names = [caller.consume_declared(LOGICAL, tag=f"c-{number}") for number in range(2)]
        return {
            "queue objects": stage.seen_from(0, listed(names)),
            "consumers": stage.seen_from(0, stage.consumers(0)),
        }


def declared_consumer_after_a_refusal(stage: Stage) -> Transcript:
    """A robust channel opens again and restores the consumers of the queues it declared."""
    with stage.caller() as caller:
        caller.consume_declared(LOGICAL, tag="c")
        refused = caller.purge(LOGICAL)
        after = caller.aftermath()
        stage.put(stage.shards(0)[0], "after the refusal")
        received = caller.received(1 if caller.reopens else 0)
        consumers = stage.consumers(0)
    return {
        "refused": stage.seen_from(0, refused),
        "after": stage.seen_from(0, after),
        "received": _brief(received),
        "consumers": stage.seen_from(0, consumers),
    }


def refusals(stage: Stage) -> Transcript:
    """What can't be done to a sharded queue: refused, and what is left after it."""
    return {label: _refusal(stage, call, in_transaction=False) for label, call in FORBIDDEN.items()}


def refusals_in_a_transaction(stage: Stage) -> Transcript:
    return {label: _refusal(stage, call, in_transaction=True) for label, call in FORBIDDEN.items()}


FORBIDDEN: dict[str, Callable[[Caller], Value]] = {
    "bind": lambda caller: caller.bind(LOGICAL, "amq.direct", "k"),
    "unbind": lambda caller: caller.unbind(LOGICAL, "amq.direct", "k"),
    "purge": lambda caller: caller.purge(LOGICAL),
    "delete": lambda caller: caller.delete(LOGICAL),
}


def refusal_with_a_consumer(stage: Stage) -> Transcript:
    """The refusal closes the channel, so its consumer is gone and what it held comes back."""
    first = stage.shards(0)[0]
    with stage.caller() as caller:
        stage.put(first, "held")
        caller.consume(LOGICAL, tag="c")
        held = caller.received(1)
        refused = caller.purge(LOGICAL)
        after = caller.aftermath()
        consumers = stage.consumers(0)
        back = stage.take(first)
    return {
        "held": _bodies(held),
        "refused": stage.seen_from(0, refused),
        "after": stage.seen_from(0, after),
        "consumers": stage.seen_from(0, consumers),
        "back in the shard": [only(each, "body", "redelivered") for each in back],
    }


def publishing(stage: Stage) -> Transcript:
    """Messages published to the exchange, as any consumer finds them in the shards."""
    seen: Transcript = {}
    for confirms in (False, True):
        for mandatory in (False, True):
            label = f"{'confirms' if confirms else 'no confirms'}, mandatory {mandatory}"
            with stage.caller(confirms=confirms) as caller:
                results = [
                    caller.publish(
                        Publication(LOGICAL, key, f"{key} {turn}", {"h": "v"}, mandatory)
                    )
                    for turn in range(2)
                    for key in KEYS
                ]
                all_arrived = stage.wait_for_messages(len(results))
                returned = list(caller.noticed.returned)
            found = stage.take_all()
            flat = sorted((each for lot in found.values() for each in lot), key=_body)
            seen[label] = {
                "results": listed(sorted(set(map(str, results)))),
                "all arrived": all_arrived,
                "returned": listed(returned),
                "each message once": sorted(map(_body, flat))
                == sorted(f"{key} {turn}" for turn in range(2) for key in KEYS),
                "last": only(
                    flat[-1],
                    *("exchange", "routing_key", "redelivered", "headers"),
                    *("content_type", "correlation_id", "delivery_mode", "body"),
                ),
                "exchange and key kept": all(
                    each["exchange"] == LOGICAL
                    and _body(each).startswith(f"{each['routing_key']} ")
                    for each in flat
                ),
                "each key in one shard": _each_key_in_one_shard(found),
                "more than one shard used": sum(map(bool, found.values())) > 1,
            }
    return seen


def carbon_copies(stage: Stage) -> Transcript:
    """CC and BCC are the broker's own headers: more routing keys. CC is delivered, BCC is not.

    x-modulus-hash hashes the list of all keys, so there is one copy in one shard whatever they say.
    """
    seen: Transcript = {}
    for headers in ({}, {"CC": ["a"]}, {"BCC": ["b"]}, {"CC": ["a"], "BCC": ["b"], "h": "v"}):
        with stage.caller() as caller:
            published = caller.publish(Publication(LOGICAL, "user-1", "copied", headers))
            if published == "sent":
                stage.wait_for_messages(1)
        found = [each for lot in stage.take_all().values() for each in lot]
        seen[f"sent with {headers}"] = {
            "publish": published,
            "found": [only(each, "exchange", "routing_key", "headers") for each in found],
        }
    return seen


def end_to_end(stage: Stage) -> Transcript:
    """Consumers of the logical queue on every node get each message once, as it was sent."""
    with stage.caller(0) as first, stage.caller(1) as second, stage.caller(2) as third:
        for caller in (first, second, third):
            caller.consume(LOGICAL, tag="c-0", no_ack=True)
            caller.consume(LOGICAL, tag="c-1", no_ack=True)
        for key in KEYS:
            first.publish(Publication(LOGICAL, key, f"for {key}", {"h": "v"}))
        callers = (first, second, third)

        def all_came() -> bool:
            for each in callers:
                each.pump(0.01)
            return sum(len(each.noticed.messages) for each in callers) >= len(KEYS)

        first.wait_for(all_came)
        received = [each for caller in callers for each in caller.received(0)]
    wanted = ("exchange", "routing_key", "redelivered", "headers", "body")
    return {"received": sorted((only(each, *wanted) for each in received), key=str)}


def unroutable(stage: Stage) -> Transcript:
    """A mandatory message that no queue takes, through an exchange that is not sharded."""
    seen: Transcript = {}
    for confirms in (False, True):
        with stage.caller(confirms=confirms) as caller:
            result = caller.publish(
                Publication("amq.direct", "nowhere", "lost", {"h": "v"}, mandatory=True)
            )
            # A return comes before the answer, if it comes: what is returned on a channel without
            # confirms aiormq drops, and logs an error.
            caller.round_trip()
            label = "confirms" if confirms else "no confirms"
            seen[label] = {
                "result": result,
                "returned": listed(caller.noticed.returned),
                "channel is open": caller.is_open(),
            }
            seen[f"{label}, not mandatory"] = caller.publish(
                Publication("amq.direct", "nowhere", "lost")
            )
    return seen


def unroutable_through_the_sharded_exchange(stage: Stage) -> Transcript:
    """All shards are deleted: nothing is bound to the exchange, so a mandatory message returns."""
    for name in stage.shards():
        stage.delete(name)
    with stage.caller(confirms=True) as caller:
        result = caller.publish(Publication(LOGICAL, "user-1", "lost", {"h": "v"}, mandatory=True))
        caller.round_trip()
        return {"result": result, "returned": listed(caller.noticed.returned)}


def publishing_in_a_callback(stage: Stage) -> Transcript:
    """A delivery callback publishes to the sharded exchange through the channel it was given."""
    with stage.caller() as caller:
        caller.consume(
            LOGICAL, tag="c", no_ack=True, reply=Publication(LOGICAL, "answer", "the answer")
        )
        stage.put(stage.shards(0)[0], "the question")
        caller.wait_for(lambda: caller.noticed.messages_answered)
        lying: list[dict[str, Value]] = []

        def answer_came() -> bool:
            lying.extend(each for lot in stage.take_all().values() for each in lot)
            return bool(lying) or len(caller.noticed.messages) > 1

        # The key's shard may be the one that is consumed from, without acknowledgements: what is on
        # its way when the consumer is cancelled reaches nobody, with plain pika too.
        caller.wait_for(answer_came)
        unseen = caller.cancel("c")
        received = list(caller.noticed.messages)
        lying += _published_before(stage, caller)
    # What had come when pika's blocking channel cancelled is what cancelling gives.
    answers = received[1:] + (unseen if isinstance(unseen, list) else []) + lying
    wanted = ("exchange", "routing_key", "headers", "body")
    return {
        "question": stage.seen_from(0, listed(received[:1])),
        "publish in the callback": listed(caller.noticed.answered),
        "answers": sorted((only(each, *wanted) for each in answers), key=str),
    }


def consumer_tags(stage: Stage) -> Transcript:
    """Tags are the application's; one that is in use is refused by the client itself."""
    first, second = stage.shards(0)
    with stage.caller() as caller:
        given = caller.consume(LOGICAL, tag="mine", no_ack=True)
        generated = caller.consume(LOGICAL, no_ack=True)
        stage.put(first, "for mine")
        stage.put(second, "for the generated")
        messages = caller.received(2)
        tags = {_body(each): each["consumer_tag"] for each in messages}
        by_tag: Value = {
            body: GENERATED if tag == generated else tag for body, tag in sorted(tags.items())
        }
        duplicate = caller.consume(LOGICAL, tag="mine")
        after = [caller.is_open(), caller.connection_is_open()]
        consumers = stage.seen_from(0, stage.consumers(0))
        cancelled = caller.cancel("mine")
        left = stage.seen_from(0, stage.consumers(0))
        reused = caller.consume(LOGICAL, tag="mine")
        open_after_all = caller.is_open()
        unknown = caller.cancel("nobody's")
    return {
        "given": given,
        "generated is not empty": bool(generated),
        "deliveries": by_tag,
        "duplicate": duplicate,
        "channel and connection open after the duplicate": after,
        "consumers after the duplicate": consumers,
        "cancel": cancelled,
        "consumers after the cancel": left,
        "tag used again": reused,
        "channel is open at the end": open_after_all,
        "cancel of an unknown tag": unknown,
    }


def cancelled_by_the_broker(stage: Stage) -> Transcript:
    """The shard of a consumer is deleted by somebody else."""
    first, second = stage.shards(0)
    with stage.caller() as caller:
        caller.consume(LOGICAL, tag="c-0")
        caller.consume(LOGICAL, tag="c-1")
        stage.delete(first)
        caller.wait_for(lambda: caller.noticed.cancelled)
        stage.put(second, "for the other consumer")
        messages = caller.received(1)
        return {
            "cancelled": list(caller.noticed.cancelled),
            "channel is open": caller.is_open(),
            "other consumer got": _bodies(messages),
            "consume again": caller.consume(LOGICAL, tag="c-0"),
            "consumers of the shard left": stage.depth_and_consumers(second),
        }


def exclusive_consumers(stage: Stage) -> Transcript:
    """An exclusive consumer has its shard to itself; the next one gets another shard."""
    with stage.caller() as first, stage.caller() as second, stage.caller() as third:
        seen: Transcript = {
            "first": first.consume(LOGICAL, tag="c-0", exclusive=True),
            "second": second.consume(LOGICAL, tag="c-1", exclusive=True),
            "consumers": stage.seen_from(0, stage.consumers(0)),
            "third": stage.seen_from(0, third.consume(LOGICAL, tag="c-2")),
            "third, after": stage.seen_from(0, third.aftermath()),
        }
        return seen


def iterating(stage: Stage) -> Transcript:
    """The client's generator or iterator over the logical queue."""
    first, second = stage.shards(0)
    stage.put(first, "one", "two", "three")
    stage.put(second, "never seen: the iterator has one shard")
    with stage.caller() as caller:
        caller.prefetch(1)
        taken = caller.iterate(LOGICAL, 2)
        consumers = stage.consumers(0)
    stage.wait_for_messages(2)
    return {
        "taken": stage.seen_from(0, taken),
        "consumers afterwards": stage.seen_from(0, consumers),
        "left": [_bodies(stage.take(first)), _bodies(stage.take(second))],
    }


def acknowledging(stage: Stage) -> Transcript:
    """Prefetch, acknowledgement, refusal, recovery."""
    first = stage.shards(0)[0]
    stage.put(first, *(f"m-{number}" for number in range(5)))
    with stage.caller() as caller:
        prefetch = caller.prefetch(2)
        caller.consume(LOGICAL, tag="c")
        held = caller.received(2)
        acked = caller.acknowledge(1)
        after_ack = caller.received(3)
        refused = caller.refuse(2, requeue=True)
        after_refusal = caller.received(4)
        recovered = caller.recover()
        after_recovery = caller.received(6)
    return {
        "prefetch": prefetch,
        "held": _brief(held),
        "ack": acked,
        "after ack": _brief(after_ack[len(held) :]),
        "refuse": refused,
        "after refusal": _brief(after_refusal[len(after_ack) :]),
        "recover": recovered,
        "after recovery": _brief(after_recovery[len(after_refusal) :]),
        "left": listed(sorted(map(_body, stage.take(first)))),
    }


def not_acknowledging(stage: Stage) -> Transcript:
    """With no_ack everything comes at once and nothing is left."""
    first = stage.shards(0)[0]
    stage.put(first, "one", "two", "three")
    with stage.caller() as caller:
        caller.prefetch(1)
        caller.consume(LOGICAL, tag="c", no_ack=True)
        messages = caller.received(3)
    return {
        "received": _brief(messages),
        "whole message": stage.seen_from(0, listed(messages[:1])),
        "left": stage.depth(first),
    }


def unknown_delivery_tag(stage: Stage) -> Transcript:
    """A genuine refusal by the broker is not to be mistaken for one of ours."""
    with stage.caller() as caller:
        caller.acknowledge(77)
        caller.wait_for(lambda: caller.is_open() is False or caller.noticed.closed)
        return {"after": caller.aftermath()}


def no_shard_on_the_node(stage: Stage) -> Transcript:
    """The connected node has no shard, though others have."""
    for name in stage.shards(0):
        stage.delete(name)
    seen: Transcript = {}
    calls: dict[str, Callable[[Caller], Value]] = {
        "consume": lambda caller: caller.consume(LOGICAL, tag="c"),
        "get": lambda caller: caller.get(LOGICAL),
        "declare": lambda caller: caller.declare(
            LOGICAL, durable=True, patience=stage.declare_patience
        ),
        "declare passive": lambda caller: caller.declare(LOGICAL, passive=True),
        "purge": lambda caller: caller.purge(LOGICAL),
    }
    for label, call in calls.items():
        with stage.caller() as caller:
            seen[label] = stage.seen_from(0, call(caller))
            if isinstance(given := seen[label], dict) and "raises" in given:
                seen[f"{label}, after"] = stage.seen_from(0, caller.aftermath())
        # With the plugin, declaring makes the node's first shard again, but binds it to nothing.
        seen[f"{label}, shards on the node now"] = {
            str(stage.seen_from(0, name)): {"bindings": stage.bindings(name)}
            for name in stage.shards(0)
            if stage.exists(name)
        }
        for name in stage.shards(0):
            if stage.exists(name):
                stage.delete(name)
    return seen


def half_of_the_shards_on_the_node(stage: Stage) -> Transcript:
    """The first shard of the node is gone: everybody is at the second."""
    first, second = stage.shards(0)
    stage.delete(first)
    with stage.caller() as caller:
        caller.consume(LOGICAL, tag="c-0")
        caller.consume(LOGICAL, tag="c-1")
        consumers = stage.depth_and_consumers(second)
    return {"second shard": consumers, "first exists": stage.exists(first)}


def other_names(stage: Stage) -> Transcript:
    """An ordinary queue, with everything that is refused on a sharded one."""
    ordinary = "ordinary"
    with stage.caller() as caller:
        seen: Transcript = {
            "declare": caller.declare(ordinary, durable=True),
            "declare passive": caller.declare(ordinary, durable=True, passive=True),
            "bind": caller.bind(ordinary, "amq.direct", "k"),
            "publish": caller.publish(Publication("amq.direct", "k", "by the exchange")),
            "publish by default exchange": caller.publish(Publication("", ordinary, "directly")),
        }
        caller.wait_for(lambda: stage.depth(ordinary) == 2)
        seen["get"] = caller.get(ordinary)
        seen["consume"] = caller.consume(ordinary, tag="c", no_ack=True)
        seen["received"] = _brief(caller.received(1))
        seen["cancel"] = caller.cancel("c")
        seen["unbind"] = caller.unbind(ordinary, "amq.direct", "k")
        seen["purge"] = caller.purge(ordinary)
        seen["delete"] = caller.delete(ordinary)
        seen["channel is open"] = caller.is_open()
    with stage.caller() as caller:
        seen["consume from a missing queue"] = caller.consume("missing", tag="c")
        seen["consume from a missing queue, after"] = caller.aftermath()
    return seen


def shards_by_their_own_names(stage: Stage) -> Transcript:
    """A shard is an ordinary queue to whoever names it, on any node, and nothing is refused."""
    shard = stage.shards(1)[1]
    stage.put(shard, "one", "two")
    with stage.caller() as caller:
        seen: Transcript = {
            "declare passive": caller.declare(shard, passive=True),
            "get": caller.get(shard),
            "purge": caller.purge(shard),
            "bind": caller.bind(shard, "amq.direct", "by-name"),
            "unbind": caller.unbind(shard, "amq.direct", "by-name"),
            "publish to the logical name by the default exchange": caller.publish(
                Publication("", LOGICAL, "to a queue called images")
            ),
            "channel is open": caller.is_open(),
        }
    seen["found in shards"] = sum(map(len, stage.take_all().values()))
    return {label: stage.seen_from(0, value) for label, value in seen.items()}


def exchange_declaring(stage: Stage) -> Transcript:
    """The exchange declared again: passively, with equal and with unequal settings."""
    arguments = stage.declare_arguments
    with stage.caller() as caller:
        seen: Transcript = {
            "passive": caller.declare_exchange(LOGICAL, KIND_OF_EXCHANGE, passive=True),
            "equal": caller.declare_exchange(
                LOGICAL, KIND_OF_EXCHANGE, durable=True, arguments=arguments
            ),
        }
    for label, kind, durable in (
        ("not durable", KIND_OF_EXCHANGE, False),
        ("another type", "fanout", True),
    ):
        with stage.caller() as caller:
            seen[label] = caller.declare_exchange(
                LOGICAL, kind, durable=durable, arguments=arguments
            )
            seen[f"{label}, after"] = caller.aftermath()
    return seen


def exchange_deleting(stage: Stage) -> Transcript:
    """The exchange is deleted: its shards stay, with what is in them, and it can come back."""
    first = stage.shards(0)[0]
    stage.put(first, "kept")
    with stage.caller() as caller:
        seen: Transcript = {"delete": caller.delete_exchange(LOGICAL)}
        seen["shards left"] = sum(map(stage.exists, stage.shards()))
        seen["messages left"] = stage.depth(first)
        seen["delete again"] = caller.delete_exchange(LOGICAL)
    with stage.caller() as caller:
        seen["consume"] = caller.consume(LOGICAL, tag="c")
    with stage.caller(confirms=True) as caller:
        seen["publish"] = caller.publish(Publication(LOGICAL, "user-1", "lost", mandatory=True))
    with stage.caller() as caller:
        seen["declare"] = caller.declare_exchange(
            LOGICAL, KIND_OF_EXCHANGE, durable=True, arguments=stage.declare_arguments
        )
        caller.wait_for(lambda: _counts(stage.consumers()))
        seen["consume when it is back"] = caller.consume(LOGICAL, tag="c", no_ack=True)
        seen["received"] = _bodies(caller.received(1))
    return seen


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        placement,
        placement_by_two_connections,
        fetching,
        fetch_prefers_fewest_consumers_to_messages,
        declaring,
        consuming_from_the_declared,
        declared_consumer_after_a_refusal,
        refusals,
        refusals_in_a_transaction,
        refusal_with_a_consumer,
        publishing,
        carbon_copies,
        end_to_end,
        unroutable,
        unroutable_through_the_sharded_exchange,
        publishing_in_a_callback,
        consumer_tags,
        cancelled_by_the_broker,
        exclusive_consumers,
        iterating,
        acknowledging,
        not_acknowledging,
        unknown_delivery_tag,
        no_shard_on_the_node,
        half_of_the_shards_on_the_node,
        other_names,
        shards_by_their_own_names,
        exchange_declaring,
        exchange_deleting,
    )
}


def _refusal(stage: Stage, call: Callable[[Caller], Value], *, in_transaction: bool) -> Value:
    with stage.caller() as caller:
        seen: Transcript = {}
        if in_transaction:
            seen["transaction"] = caller.begin_transaction()
        seen["refused"] = call(caller)
        seen["after"] = caller.aftermath()
        return stage.seen_from(0, seen)


def _published_before(stage: Stage, caller: Caller) -> list[dict[str, Value]]:
    """All that lies in the shards when what the caller has published until now has come there.

    How many that are is not known here. But a queue takes what comes on a channel in order, so the
    caller sends each shard a last message.
    """
    last = "the last"
    for name in stage.shards():
        caller.publish(Publication("", name, last))
    found: list[dict[str, Value]] = []

    def all_came() -> bool:
        found.extend(each for lot in stage.take_all().values() for each in lot)
        return [each["body"] for each in found].count(last) == len(stage.shards())

    caller.wait_for(all_came)
    return [each for each in found if each["body"] != last]


def _each_key_in_one_shard(found: dict[str, list[dict[str, Value]]]) -> bool:
    keys = [key for lot in found.values() for key in {str(each["routing_key"]) for each in lot}]
    return len(keys) == len(set(keys))


def _body(seen: dict[str, Value]) -> str:
    return str(seen["body"])


def _bodies(messages: list[dict[str, Value]]) -> Value:
    return [each["body"] for each in messages]


def _brief(messages: list[dict[str, Value]]) -> Value:
    return [only(each, "delivery_tag", "redelivered", "body") for each in messages]


def _counts(counts: Value) -> list[Value]:
    return list(counts.values()) if isinstance(counts, dict) else []
