"""What comes out of a chunk may be a thousand times what came in: it is bounded, and what is merely
large is read in parts (17)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from sharding.stream import Compression, Limits, ProtocolError, StreamEnvironment
from sharding.stream.messages.message import encode_data
from sharding.stream.producer import publish_entries
from sharding.stream.protocol.commands import DeclarePublisher, publish_header
from sharding.stream.protocol.constants import MIB
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.support import patient
from tests.support.streams import environment_of, stream_in

pytestmark = pytest.mark.cluster

BODY = bytes(64 * 1024)
IN_A_BATCH = 512
BATCHES = 12
UNPACKED = BATCHES * IN_A_BATCH * len(BODY)
"""384 MiB, from less than one; a sub-entry batch has 32."""
MOST = 256 * MIB
"""What a reader may grow by: two of these batches and a few record batches would be 150 MiB."""


class Confirmed:
    """The handler of a publisher that waits for each confirm."""

    def __init__(self) -> None:
        self.count = 0

    def on_confirms(self, ids: Sequence[int]) -> None:
        self.count += len(ids)

    def on_refusals(self, refusals: Sequence[tuple[int, int]]) -> None:
        raise AssertionError(refusals)

    def on_lost(self, reason: Exception) -> None:
        pass


def publish_packed(environment: StreamEnvironment, stream: str, frames: Sequence[int]) -> None:
    """So many sub-entry batches in each frame: larger ones than a producer of ours makes."""
    records = publish_entries.message_records([encode_data(BODY)] * IN_A_BATCH)
    packed = bytes(publish_entries.sub_entry(records, IN_A_BATCH, 1, Compression.GZIP))
    client, confirmed = environment._locator.connect(PATIENCE), Confirmed()
    number = client.attach_publisher(confirmed, stream)
    client.call(DeclarePublisher(number, None, stream), PATIENCE)
    sent = 0
    for count in frames:
        ids = range(sent + 1, sent + 1 + count)
        content = b"".join(each.to_bytes(8, "big") + packed[8:] for each in ids)
        client.send(publish_header(number, count, len(content)), content)
        sent += count
        wait_until(lambda: confirmed.count == sent)  # noqa: B023  # called in this turn
    client.detach_publisher(number)


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(cluster, **patient.STREAMS) as opened:
        yield opened


@pytest.fixture(scope="module")
def stream(environment: StreamEnvironment) -> Iterator[str]:
    with stream_in(environment) as made:
        publish_packed(environment, made, [10, 2])
        yield made


@pytest.mark.parametrize("way", ["batches", "messages", "range", "spark"])
def test_reader_holds_a_bounded_part_of_what_is_unpacked(
    cluster: Cluster, stream: str, way: str
) -> None:
    """17. A record batch was made of up to 64 chunks, all unpacked: a megabyte from anybody who may
    write to the stream took gigabytes in each consumer and task of Spark. And a chunk that
    unpacked to more than 256 MiB could not be read as Arrow at all; the first one here does."""
    count = BATCHES * IN_A_BATCH
    url = cluster.nodes[0].endpoint.stream_url
    program = [sys.executable, "-m", "tests.support.reading_memory", way, url, stream, str(count)]
    ended = subprocess.run(
        program, cwd=PROJECT, check=False, capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert (found["messages"], found["bytes"]) == (count, UNPACKED)
    assert found["largest"] <= Limits().batch_max + MIB
    assert found["grew"] < MOST


def test_offset_stored_between_two_parts_of_a_chunk_is_where_reading_goes_on(
    environment: StreamEnvironment, stream: str
) -> None:
    reader = {"offset": "first", "name": "parts", **patient.READER}
    with environment.consumer(stream, **reader, store_every_messages=1) as consumer:
        parts = consumer.batches(PATIENCE)
        dealt_with = next(parts).column("offset").to_pylist()
        in_hand = next(parts).column("offset").to_pylist()
    assert dealt_with[0] == 0
    assert in_hand[0] == dealt_with[-1] + 1 < IN_A_BATCH, "in the middle of the first batch"
    wait_until(lambda: environment.stored_offset("parts", stream) == dealt_with[-1])
    with environment.consumer(stream, **reader) as again:
        assert next(again.batches(PATIENCE)).column("offset")[0].as_py() == in_hand[0]
        assert next(again.messages(PATIENCE)).offset == in_hand[-1] + 1


def test_batch_beyond_the_limit_is_refused_by_name_and_is_passed_on_purpose_only(
    cluster: Cluster, environment: StreamEnvironment
) -> None:
    with (
        stream_in(environment) as stream,
        environment_of(cluster, **patient.STREAMS, limits=Limits(uncompressed_max=MIB)) as strict,
        environment.producer(stream) as producer,
    ):
        producer.send(b"before")
        producer.flush(PATIENCE).raise_for_failures()
        publish_packed(environment, stream, [1])
        producer.send(b"after")
        producer.flush(PATIENCE).raise_for_failures()
        said = rf"'{stream}', offsets 1 to {IN_A_BATCH}: .*Limits.uncompressed_max = {MIB} "
        with strict.consumer(
            stream, offset="first", name="strict", store_every_messages=1, **patient.READER
        ) as consumer:
            reading = consumer.messages(PATIENCE)
            assert next(reading).body == b"before"
            for again in (reading, consumer.messages(PATIENCE), consumer.batches(PATIENCE)):
                with pytest.raises(ProtocolError, match=said):
                    next(again)
        # An offset that is stored in passing is not waited for by who stores it.
        wait_until(lambda: environment.stored_offset("strict", stream) == 0)
        with pytest.raises(ProtocolError, match=said):
            list(strict.read_range(stream, 0, IN_A_BATCH + 2))
        environment.store_offset("strict", stream, IN_A_BATCH)
        with strict.consumer(stream, name="strict", **patient.READER) as consumer:
            assert next(consumer.messages(PATIENCE)).body == b"after"
