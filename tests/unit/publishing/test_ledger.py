"""The ledger of a publisher: each message is settled once, in time, and rightly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sharding import ShardMap
from sharding.outcomes import Outcome, Report, Result, Tally
from sharding.publishing.ledger import Account, Flight, Ledger, Message, Wait
from tests.support.maps import queue_map

MAP = queue_map("abc")
A, B, C = (shard.name for shard in MAP.shards)
NODE_A, NODE_B, NODE_C = (shard.node for shard in MAP.shards)


def key_of(shard: str, shard_map: ShardMap = MAP, after: int = 0) -> str:
    """The first key, or one after it, that belongs to a shard."""
    matching = (f"k{n}" for n in range(10_000) if shard_map.shard_of(f"k{n}").name == shard)
    for _ in range(after):
        next(matching)
    return next(matching)


class Desk:
    """A ledger, and a hand that publishes and sends."""

    def __init__(self, shard_map: ShardMap = MAP, max_results: int = 10) -> None:
        self.results: list[Result] = []
        self.ledger: Ledger[None] = Ledger(shard_map, on_result=self.results.append)
        self.account = Account(max_results)
        self._next = 0

    def publish(
        self,
        shard: str,
        *,
        body: bytes = b"",
        deadline: float = 10.0,
        key: str | None = None,
        account: Account | None = None,
    ) -> int:
        number, self._next = self._next, self._next + 1
        message: Message[None] = Message(
            number,
            key or key_of(shard),
            shard,
            body,
            None,
            deadline,
            account or self.account,
        )
        self.ledger.add(message)
        return number

    def send(self, node: str) -> list[int]:
        numbers = []
        for message in self.ledger.waiting_for(node):
            self.ledger.sent(node, message)
            numbers.append(message.number)
        return numbers

    def watch(self, number: int, account: Account | None = None) -> Wait:
        wait = Wait(account or self.account, number)
        self.ledger.watch(wait)
        return wait

    def outcomes(self) -> dict[int, Outcome]:
        numbers = [result.number for result in self.results]
        assert len(set(numbers)) == len(numbers), "settled twice"
        return {result.number: result.outcome for result in self.results}


@pytest.fixture
def desk() -> Desk:
    return Desk()


def publish_and_send(desk: Desk, count: int, shard: str = A) -> list[int]:
    numbers = [desk.publish(shard) for _ in range(count)]
    assert desk.send(MAP.shards[0].node) == numbers
    return numbers


def test_single_ack_stores_that_message_only(desk: Desk) -> None:
    publish_and_send(desk, 3)
    desk.ledger.acked(NODE_A, 2, multiple=False)
    assert desk.outcomes() == {1: Outcome.STORED}
    assert desk.ledger.unsettled == 2


def test_multiple_ack_stores_all_up_to_it_and_not_twice(desk: Desk) -> None:
    publish_and_send(desk, 5)
    desk.ledger.acked(NODE_A, 2, multiple=False)
    desk.ledger.acked(NODE_A, 3, multiple=True)
    desk.ledger.acked(NODE_A, 3, multiple=True)
    desk.ledger.acked(NODE_A, 3, multiple=False)
    assert sorted(desk.outcomes()) == [0, 1, 2]
    desk.ledger.acked(NODE_A, 0, multiple=True)  # AMQP: all that are outstanding
    assert desk.outcomes() == dict.fromkeys(range(5), Outcome.STORED)
    assert desk.account.tally.take_report() == Report(stored=5)


def test_ack_of_a_tag_that_was_never_sent_changes_nothing(desk: Desk) -> None:
    publish_and_send(desk, 1)
    desk.ledger.acked(NODE_A, 7, multiple=False)
    assert desk.outcomes() == {}
    desk.ledger.acked(NODE_A, 2**62, multiple=True)
    assert publish_and_send(desk, 1) == [1]
    desk.ledger.acked(NODE_A, 2, multiple=False)
    assert desk.outcomes() == dict.fromkeys(range(2), Outcome.STORED)


def test_nack_is_unknown_and_makes_the_shard_suspect(desk: Desk) -> None:
    publish_and_send(desk, 3)
    desk.ledger.nacked(NODE_A, 2, multiple=True)
    desk.ledger.acked(NODE_A, 3, multiple=False)
    assert desk.outcomes() == {0: Outcome.UNKNOWN, 1: Outcome.UNKNOWN, 2: Outcome.STORED}
    assert desk.ledger.take_suspects() == {A}
    assert desk.ledger.take_suspects() == set()


def test_return_is_matched_although_one_ack_covers_returned_and_stored(desk: Desk) -> None:
    for body in (b"0", b"1", b"2", b"3"):
        desk.publish(A, body=body)
    desk.send(NODE_A)
    assert desk.ledger.returned(NODE_A, lambda message: message.body == b"1", "no route")
    assert desk.ledger.returned(NODE_A, lambda message: message.body == b"3", "no route")
    desk.ledger.acked(NODE_A, 4, multiple=True)
    assert [outcome for _, outcome in sorted(desk.outcomes().items())] == [
        Outcome.STORED,
        Outcome.UNROUTABLE,
        Outcome.STORED,
        Outcome.UNROUTABLE,
    ]
    assert desk.ledger.take_suspects() == {A}


def test_returns_of_like_messages_take_one_after_the_other(desk: Desk) -> None:
    publish_and_send(desk, 3)
    desk.ledger.acked(NODE_A, 1, multiple=False)  # acked without a return: it can't be this one
    assert desk.ledger.returned(NODE_A, lambda _: True, "no route")
    assert desk.ledger.returned(NODE_A, lambda _: True, "no route")
    assert not desk.ledger.returned(NODE_A, lambda _: True, "no route")
    assert desk.outcomes() == {0: Outcome.STORED, 1: Outcome.UNROUTABLE, 2: Outcome.UNROUTABLE}


def test_returned_message_stays_unroutable_when_the_connection_dies_before_the_ack(
    desk: Desk,
) -> None:
    publish_and_send(desk, 1)
    desk.ledger.returned(NODE_A, lambda _: True, "no route")
    desk.ledger.lost(NODE_A, "gone")
    assert desk.outcomes() == {0: Outcome.UNROUTABLE}


def test_lost_connection_leaves_what_was_sent_unknown_and_what_waits_waiting(desk: Desk) -> None:
    publish_and_send(desk, 2)
    waiting = desk.publish(A)
    desk.ledger.lost(NODE_A, "gone")
    assert desk.outcomes() == dict.fromkeys(range(2), Outcome.UNKNOWN)
    assert desk.send(NODE_A) == [waiting]
    desk.ledger.acked(NODE_A, 1, multiple=False)  # tags begin anew with the channel
    assert desk.outcomes()[waiting] is Outcome.STORED


def test_deadline_refuses_what_waits_and_leaves_what_was_sent_unknown(desk: Desk) -> None:
    sent = desk.publish(A, deadline=10)
    desk.send(NODE_A)
    waiting = desk.publish(B, deadline=10)
    later = desk.publish(B, deadline=11)
    desk.ledger.expire(9.9)
    assert desk.outcomes() == {}
    desk.ledger.expire(10, lambda node: f"{node} is away")
    assert desk.outcomes() == {sent: Outcome.UNKNOWN, waiting: Outcome.REFUSED}
    assert f"{NODE_B} is away" in desk.results[0].reason
    desk.ledger.expire(11)
    assert desk.outcomes()[later] is Outcome.REFUSED
    assert desk.ledger.unsettled == 0


def test_deadline_of_what_waits_is_kept_through_every_loss_and_every_map(desk: Desk) -> None:
    waiting = desk.publish(A, deadline=10)
    for now in (3, 6, 9):
        desk.ledger.lost(NODE_A, "gone")
        desk.ledger.follow(replace(MAP, epoch=now, shards=MAP.shards[now % 2 :]))
        desk.ledger.expire(now)
    assert desk.outcomes() == {}
    desk.ledger.expire(10)
    assert desk.outcomes() == {waiting: Outcome.REFUSED}


def test_deadline_is_kept_behind_a_message_with_more_time(desk: Desk) -> None:
    desk.publish(A, deadline=20)
    short = desk.publish(A, deadline=5)
    desk.send(NODE_A)
    desk.ledger.expire(5)
    assert desk.outcomes() == {short: Outcome.UNKNOWN}
    desk.ledger.expire(20)
    assert desk.ledger.unsettled == 0


def test_confirm_that_comes_too_late_changes_nothing_and_ends_the_wait(desk: Desk) -> None:
    publish_and_send(desk, 2)
    desk.ledger.expire(10)
    flight = desk.ledger.flight(NODE_A)
    assert (flight.overdue, flight.live) == (2, 0)
    desk.ledger.acked(NODE_A, 2, multiple=True)
    assert desk.outcomes() == dict.fromkeys(range(2), Outcome.UNKNOWN)
    assert flight.overdue == 0


def test_late_return_is_not_taken_for_a_younger_message_that_looks_the_same(desk: Desk) -> None:
    publish_and_send(desk, 1)
    desk.ledger.expire(10)
    desk.publish(A, deadline=20)
    desk.send(NODE_A)
    assert desk.ledger.returned(NODE_A, lambda _: True, "no route")
    desk.ledger.acked(NODE_A, 2, multiple=True)
    assert desk.outcomes() == {0: Outcome.UNKNOWN, 1: Outcome.STORED}


def test_refusal_of_a_node_touches_no_other(desk: Desk) -> None:
    refused, other = desk.publish(A), desk.publish(B)
    desk.ledger.refuse_waiting(NODE_A, "wrong credentials")
    assert desk.outcomes() == {refused: Outcome.REFUSED}
    assert desk.send(NODE_B) == [other]


def test_abandoned_ledger_refuses_what_waits_and_leaves_the_rest_unknown(desk: Desk) -> None:
    publish_and_send(desk, 1)
    desk.publish(B)
    desk.ledger.abandon("closed")
    assert desk.outcomes() == {0: Outcome.UNKNOWN, 1: Outcome.REFUSED}
    assert desk.ledger.unsettled == 0
    assert desk.ledger.waiting_nodes() == set()


def test_what_waits_keeps_its_shard_when_the_map_changes(desk: Desk) -> None:
    number = desk.publish(A)
    desk.ledger.follow(queue_map("abcd", epoch=2))
    assert desk.send(NODE_A) == [number]


def test_what_waits_for_a_shard_that_left_follows_its_key_in_order(desk: Desk) -> None:
    without_a = queue_map("bc", epoch=2)
    keys = [key_of(A, after=n % 3) for n in range(9)]
    numbers = [desk.publish(A, key=key) for key in keys]
    desk.ledger.follow(without_a)
    later = [desk.publish(without_a.shard_of(key).name, key=key) for key in keys]
    keys_of = dict(zip([*numbers, *later], keys * 2, strict=True))
    sent = [*desk.send(NODE_B), *desk.send(NODE_C)]
    assert sorted(sent) == [*numbers, *later]
    for key in set(keys):
        mine = [number for number in sent if keys_of[number] == key]
        assert mine == sorted(mine)
    assert desk.send(NODE_A) == []


def test_message_of_a_thread_that_still_had_the_old_map_follows_its_key(desk: Desk) -> None:
    desk.ledger.follow(queue_map("bc", epoch=2))
    desk.publish(A)
    assert len([*desk.send(NODE_B), *desk.send(NODE_C)]) == 1


def test_map_in_force_is_followed_whatever_its_epoch(desk: Desk) -> None:
    """The log was made again: its epochs begin at 1, and its maps are others."""
    desk.ledger.follow(queue_map("abc", epoch=3))
    anew = queue_map("bcd", epoch=2)
    desk.ledger.follow(anew)
    new = anew.shards[2]
    number = desk.publish(new.name, key=key_of(new.name, anew))
    assert desk.send(new.node) == [number]


def test_what_waits_for_a_shard_whose_keys_have_moved_follows_its_key_in_order(desk: Desk) -> None:
    key = key_of(A)
    waiting = [desk.publish(A, key=key) for _ in range(3)]
    shards = tuple(replace(each, available=each.name != A) for each in MAP.shards)
    away = replace(MAP, epoch=2, shards=shards)
    desk.ledger.follow(away)
    elsewhere = away.shard_of(key)
    later = desk.publish(elsewhere.name, key=key)
    assert desk.send(elsewhere.node) == [*waiting, later]
    desk.ledger.follow(replace(MAP, epoch=3))
    home = desk.publish(A, key=key)
    assert desk.send(NODE_A) == [home]


def moved(shard_map: ShardMap, shard: str, node: str) -> ShardMap:
    shards = [replace(s, node=node) if s.name == shard else s for s in shard_map.shards]
    return replace(shard_map, epoch=shard_map.epoch + 1, shards=tuple(shards))


@pytest.mark.parametrize("end", ["acked", "lost"])
def test_shard_that_moves_to_another_node_waits_for_what_is_in_flight(desk: Desk, end: str) -> None:
    publish_and_send(desk, 1)
    second = desk.publish(A)
    desk.ledger.follow(moved(MAP, A, NODE_B))
    third = desk.publish(A)
    assert (desk.send(NODE_A), desk.send(NODE_B)) == ([], [])
    if end == "acked":
        desk.ledger.acked(NODE_A, 1, multiple=False)
    else:
        desk.ledger.lost(NODE_A, "gone")
    assert desk.ledger.waiting_nodes() == {NODE_B}
    assert (desk.send(NODE_A), desk.send(NODE_B)) == ([], [second, third])


def test_wait_ends_when_all_before_it_are_settled_whatever_comes_after(desk: Desk) -> None:
    publish_and_send(desk, 2)
    wait = desk.watch(1)
    publish_and_send(desk, 1)
    desk.ledger.acked(NODE_A, 3, multiple=False)
    desk.ledger.acked(NODE_A, 1, multiple=False)
    assert desk.ledger.take_ended_waits() == []
    desk.ledger.acked(NODE_A, 2, multiple=False)
    assert desk.ledger.take_ended_waits() == [wait]
    assert desk.ledger.take_ended_waits() == []


def test_wait_leaves_out_what_was_published_before_it_began(desk: Desk) -> None:
    publish_and_send(desk, 3)
    desk.publish(B)  # waits
    desk.ledger.acked(NODE_A, 1, multiple=False)
    short, long = desk.watch(1), desk.watch(3)
    assert desk.ledger.take_ended_waits() == []
    desk.ledger.acked(NODE_A, 2, multiple=False)
    assert desk.ledger.take_ended_waits() == [short]
    desk.ledger.acked(NODE_A, 3, multiple=False)
    assert desk.ledger.take_ended_waits() == []
    desk.ledger.refuse_waiting(NODE_B, "no")
    assert desk.ledger.take_ended_waits() == [long]


def test_wait_is_also_for_what_was_not_even_sent(desk: Desk) -> None:
    publish_and_send(desk, 1)
    desk.publish(B)
    desk.publish(C)
    wait = desk.watch(1)
    desk.ledger.acked(NODE_A, 1, multiple=False)
    assert desk.ledger.take_ended_waits() == []
    desk.ledger.refuse_waiting(NODE_B, "no")
    assert desk.ledger.take_ended_waits() == [wait]


def test_wait_for_what_is_settled_already_ends_at_once(desk: Desk) -> None:
    publish_and_send(desk, 2)
    desk.ledger.returned(NODE_A, lambda _: True, "no route")  # settled, and still in the flight
    wait = desk.watch(0)
    assert desk.ledger.take_ended_waits() == [wait]


def test_waits_that_begin_later_do_not_prolong_one(desk: Desk) -> None:
    publish_and_send(desk, 1)
    first = desk.watch(0)
    for number in range(1, 10):
        publish_and_send(desk, 1)
        desk.watch(number).given_up = number % 2 == 0
    desk.ledger.acked(NODE_A, 1, multiple=False)
    assert desk.ledger.take_ended_waits() == [first]
    desk.ledger.acked(NODE_A, 10, multiple=True)
    assert [wait.number for wait in desk.ledger.take_ended_waits()] == [1, 3, 5, 7, 9]


def test_each_account_has_its_own_outcomes_and_waits_for_its_own_messages(desk: Desk) -> None:
    other = Account(10)
    desk.publish(A)
    lost = desk.publish(A, body=b"lost", account=other)
    desk.publish(A)
    desk.send(NODE_A)
    mine, others = desk.watch(2), desk.watch(2, other)
    desk.ledger.returned(NODE_A, lambda message: message.body == b"lost", "no route")
    assert desk.ledger.take_ended_waits() == [others]
    assert desk.ledger.take_changed() == [other]
    desk.ledger.acked(NODE_A, 3, multiple=True)
    assert desk.ledger.take_ended_waits() == [mine]
    assert desk.ledger.take_changed() == [desk.account]
    assert (desk.account.freed, other.freed) == (2, 1)
    assert desk.account.tally.take_report() == Report(stored=2)
    assert [each.number for each in other.tally.take_report().not_stored] == [lost]


def test_settled_messages_give_their_room_back_once(desk: Desk) -> None:
    desk.publish(A, body=b"12345")
    desk.publish(A, body=b"678")
    desk.send(NODE_A)
    desk.ledger.acked(NODE_A, 1, multiple=False)
    assert desk.ledger.take_freed() == (1, 5)
    assert desk.ledger.take_freed() == (0, 0)


def test_results_are_remembered_within_their_bound_and_all_counted() -> None:
    desk = Desk(max_results=2)
    for _ in range(5):
        desk.publish(A)
    desk.ledger.refuse_waiting(NODE_A, "no")
    shared = Tally(max_results=3)
    shared.absorb(desk.account.tally)
    desk.publish(A)
    desk.publish(A)
    desk.ledger.refuse_waiting(NODE_A, "no")
    shared.absorb(desk.account.tally)
    report = shared.take_report(pending=4)
    assert report.refused == 7
    assert [result.number for result in report.not_stored] == [0, 1, 5]
    assert report.omitted == 4
    assert not report.all_stored
    assert str(report) == "0 stored, 7 refused, 4 pending; the first refused is message 0: no"


@pytest.mark.parametrize(
    ("confirms", "left"),
    [([(3, True)], [4]), ([(1, False), (2, True), (4, False)], [3]), ([(0, True)], [])],
)
def test_flight_keeps_what_is_not_confirmed(
    confirms: Sequence[tuple[int, bool]], left: list[int]
) -> None:
    flight: Flight[None] = Flight()
    for number in range(1, 5):
        flight.add(Message(number, "k", A, b"", None, 1.0, Account(1)))
    for tag, multiple in confirms:
        list(flight.confirm(tag, multiple))
    assert [message.number for message in flight] == left
