"""A stream is not empty because its leader is new.

A leader that was just elected does not know what of its log is committed, and delivers none of it:
`offsets` said that there was nothing (13 of 1,242 times in 20 elections on 4.0.5), a range that was
read then ended without a word, and "next" began with the oldest message.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sharding.errors import WarrenError
from sharding.stream import StreamEnvironment
from sharding.stream.consumer.probe import Ends
from tests.cluster import Cluster
from tests.support import patient
from tests.support.streams import environment_of, publish, stream_in

pytestmark = pytest.mark.cluster

ELECTIONS = 12


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(cluster, **patient.STREAMS) as opened:
        if opened.server_version < (3, 13):
            pytest.skip("older brokers do not restart streams, and 3.10 can't be asked")
        yield opened


def elect_again_and_again(cluster: Cluster, stream: str) -> None:
    """Restart the stream, as `rabbitmq-streams restart_stream` does, some time apart."""
    cluster.nodes[0].driver.ctl(
        "eval",
        f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"{cluster.vhost}">>, queue,'
        f' <<"{stream}">>)),'
        " [begin rabbit_stream_coordinator:restart_stream(Q), timer:sleep(700) end"
        f" || _ <- lists:seq(1, {ELECTIONS})].",
    )


def test_stream_is_never_called_empty_while_leaders_are_elected(
    environment: StreamEnvironment, cluster: Cluster
) -> None:
    with stream_in(environment) as stream:
        publish(environment, stream, [b"%d" % number for number in range(1000)])
        whole = environment.offsets(stream)
        assert whole is not None
        electing = threading.Thread(target=elect_again_and_again, args=(cluster, stream))
        electing.start()
        told: list[Ends | None] = []
        while electing.is_alive():
            try:
                told.append(environment.offsets(stream))
            except WarrenError:
                continue  # that is an answer too, and no wrong one
        assert told
        assert set(told) == {whole}
