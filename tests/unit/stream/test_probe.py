"""The first and last offset of a stream, whatever state it is in."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, cast

import pytest

from sharding.stream.consumer.data_loss import is_lost
from sharding.stream.consumer.probe import PROBE_NAME, Ends, first_and_last, leader_ends
from sharding.stream.errors import ConnectionLost, NoAnswerInTime
from sharding.stream.protocol.answers import StatsAnswer
from sharding.stream.protocol.commands import Metadata, StreamStats, Subscribe
from tests.cluster.waiting import PATIENCE
from tests.support.fake_streams import A, FakeClient, FakeCluster, FakeStream


def client_of(*sizes: int, version: tuple[int, ...] = (4, 0, 5)) -> FakeClient:
    stream = FakeStream()
    stream.append(*sizes)
    return FakeClient(A, stream, version)


def probed(client: FakeClient, timeout: float = PATIENCE) -> Ends | None:
    return first_and_last(cast(Any, client), "s", timeout)


def test_ends_are_those_of_the_first_and_the_last_chunk() -> None:
    client = client_of(5, 5, 3)
    assert probed(client) == Ends(first=0, last=12, last_chunk=10)
    assert client.unsubscribed


def test_empty_stream_is_known_without_waiting() -> None:
    client = client_of()
    assert probed(client, timeout=1e9) is None
    assert client.unsubscribed


def test_stream_that_begins_late_says_so() -> None:
    client = client_of(5, 5, 3)
    client.stream.truncate(1)
    assert probed(client) == Ends(first=5, last=12, last_chunk=10)


def test_short_looks_have_a_name_to_be_left_out_by() -> None:
    client = client_of(5, 5)
    probed(client)
    asked = client.asked(Subscribe)
    assert [subscribe.properties for subscribe in asked] == [{"name": PROBE_NAME}] * 2


class SlowToCommit(FakeClient):
    """Delivers the first chunk at once; the last one comes after the answer to Metadata."""

    def deliver(self) -> None:
        self.hold_back = len(self.subscribed) == 2
        super().deliver()

    def call(self, request: Any, timeout: float | None = None) -> Any:
        answer = super().call(request, timeout)
        if isinstance(request, Metadata):
            self.hold_back = False
            threading.Timer(0.05, lambda: FakeClient.deliver(self)).start()
        return answer


def test_last_chunk_that_is_not_committed_yet_is_waited_for() -> None:
    stream = FakeStream()
    stream.append(5, 3)
    assert probed(SlowToCommit(A, stream)) == Ends(first=0, last=7, last_chunk=5)


class NeverCommits(SlowToCommit):
    def call(self, request: Any, timeout: float | None = None) -> Any:
        return FakeClient.call(self, request, timeout)


def test_wait_for_the_last_chunk_ends() -> None:
    stream = FakeStream()
    stream.append(5, 3)
    client = NeverCommits(A, stream)
    with pytest.raises(NoAnswerInTime):
        probed(client, timeout=0.05)
    assert client.unsubscribed


class JustElected(FakeClient):
    """Learns what of its log is committed when it was asked so often, and delivers none before."""

    asked_until_it_knows = 2

    def call(self, request: Any, timeout: float | None = None) -> Any:
        self.hold_back = len(self.asked(StreamStats)) < self.asked_until_it_knows
        answer = super().call(request, timeout)
        if isinstance(answer, StatsAnswer) and self.hold_back:
            return replace(answer, stats={**answer.stats, "committed_chunk_id": -1})
        return answer


def test_leader_that_knows_not_yet_what_is_committed_is_not_taken_for_empty() -> None:
    stream = FakeStream()
    stream.append(5, 3)
    client = JustElected(A, stream)
    assert probed(client) == Ends(first=0, last=7, last_chunk=5)
    assert client.unsubscribed


def test_wait_for_such_a_leader_ends() -> None:
    stream = FakeStream()
    stream.append(5, 3)
    client = JustElected(A, stream)
    client.asked_until_it_knows = 1_000_000
    with pytest.raises(NoAnswerInTime, match="did not learn in time"):
        probed(client, timeout=0.1)
    assert client.unsubscribed


class LostWhileWaiting(NeverCommits):
    def call(self, request: Any, timeout: float | None = None) -> Any:
        answer = super().call(request, timeout)
        if isinstance(request, Metadata):
            threading.Timer(0.05, self.lose).start()
        return answer


def test_connection_that_is_lost_is_told() -> None:
    stream = FakeStream()
    stream.append(5, 3)
    with pytest.raises(ConnectionLost):
        probed(LostWhileWaiting(A, stream))


def test_leader_is_asked_and_its_connection_given_back() -> None:
    cluster = FakeCluster(5, 5)
    assert leader_ends(cluster.access, "s", PATIENCE) == Ends(first=0, last=9, last_chunk=5)
    assert cluster.client.node == A
    assert not cluster.client.handlers
    assert cluster.released == [cluster.client]


@pytest.mark.parametrize("version", [(4, 0, 5), (3, 10, 8)])
@pytest.mark.parametrize(
    ("gap", "lost"), [((2, 10), True), ((0, 10), True), ((10, 12), False), ((12, 15), False)]
)
def test_gap_is_a_loss_if_the_stream_begins_after_its_start(
    version: tuple[int, ...], gap: tuple[int, int], lost: bool
) -> None:
    client = client_of(5, 5, 5, 5, version=version)
    client.stream.truncate(2)
    assert is_lost(cast(Any, client), "s", gap, PATIENCE) is lost
