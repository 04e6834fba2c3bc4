"""Who has just the rights of a role can do what the role does, and the doctor sees what is missing.

A user is made for each test; what he does is done as applications do it.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pika
import pytest

from interceptors import ShardedChannel
from sharding import Policy, Topology
from sharding.doctor import Role, Verdict, examine, places_from
from sharding.doctor.roles import TAGGED, Need, Right, needs, patterns
from sharding.groups import ConsumerGroup, Retry, StreamConsumerGroup
from sharding.maps.naming import unrouted
from sharding.publishing.unrouted import bring_unrouted
from sharding.stream import StreamEnvironment
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.support import patient
from tests.support.sharded import fresh_queue, make_sharded, publish_all, raw_channel, topology_of
from tests.support.streams import super_stream_in

pytestmark = pytest.mark.cluster

MESSAGES = [(f"key-{number}", b"%d" % number) for number in range(30)]


@dataclass
class User:
    """Somebody with a role, and the names that it is for."""

    cluster: Cluster
    role: Role
    queue: str
    stream: str
    name: str
    password: str

    @property
    def needs(self) -> tuple[Need, ...]:
        return needs(self.role, [self.queue], [self.stream])

    def grant(self, wanted: tuple[Need, ...]) -> None:
        node = self.cluster.nodes[0]
        rights = {str(right): pattern for right, pattern in patterns(wanted).items()}
        path = ("permissions", self.cluster.vhost, self.name)
        node.management.call("PUT", *path, body=rights, timeout=PATIENCE)

    def own(self, url: str) -> str:
        return url.replace("guest:guest", f"{self.name}:{self.password}")

    @property
    def amqp_url(self) -> str:
        return self.own(self.cluster.nodes[0].endpoint.amqp_url)

    @property
    def stream_url(self) -> str:
        return self.own(self.cluster.nodes[0].endpoint.stream_url)

    @property
    def management_url(self) -> str:
        url = self.cluster.nodes[0].management.url
        return self.own(url if "@" in url else url.replace("//", "//guest:guest@"))

    @contextmanager
    def topology(self, *, management: bool = False) -> Iterator[Topology]:
        apis = [self.management_url] if management else []
        urls = [self.own(node.endpoint.amqp_url) for node in self.cluster.nodes]
        with Topology(*urls, management_urls=apis, options=patient.TOPOLOGY) as topology:
            yield topology

    @contextmanager
    def environment(self) -> Iterator[StreamEnvironment]:
        with StreamEnvironment(
            self.stream_url, amqp_url=self.amqp_url, **patient.STREAMS
        ) as environment:
            yield environment


def produces(user: User, theirs: Topology) -> None:
    with user.topology() as topology:
        publish_all(topology, user.queue, MESSAGES)
        with pika_channel(user) as plain:
            channel = ShardedChannel(plain, topology)
            channel.confirm_delivery()
            for key, body in MESSAGES:
                channel.basic_publish(user.queue, key, body)
        with raw_channel(user.cluster.nodes[0]) as stranger:
            stranger.basic_publish(user.queue, "key-1", b"before the map was known")
        wait_until(lambda: count_of(theirs, unrouted(user.queue)) == 1)
        assert bring_unrouted(topology, user.queue).result(PATIENCE) == 1
    with user.environment() as environment:
        for name in (None, "named"):
            with environment.producer(user.stream, name=name) as producer:
                producer.send_many([body for _, body in MESSAGES], [key for key, _ in MESSAGES])
                assert producer.flush(PATIENCE).stored == len(MESSAGES)


def consumes(user: User, theirs: Topology) -> None:
    publish_all(theirs, user.queue, MESSAGES)
    fill(user)
    got: list[bytes] = []
    with user.topology() as topology, pika_channel(user) as plain:
        channel = ShardedChannel(plain, topology)
        channel.basic_consume_all(user.queue, lambda _c, _m, _p, body: got.append(body))
        while len(got) < len(MESSAGES):
            plain.connection.process_data_events(time_limit=0.1)
    with (
        user.environment() as environment,
        environment.consumer(user.stream, name="n", offset="first", **patient.READER) as consumer,
    ):
        for number, _ in enumerate(consumer.messages(), 1):
            if number == len(MESSAGES):
                break
        if environment.server_version >= (4,):
            consumer.store_offset()


def works(user: User, theirs: Topology) -> None:
    publish_all(theirs, user.queue, MESSAGES)
    fill(user)
    options = patient.group(retry=Retry(attempts=1), settle_time=0.1)
    handled: list[object] = []

    def handle(delivery: object) -> None:
        handled.append(delivery)
        if len(handled) == 1:
            raise ValueError("put this one aside")

    with (
        user.topology() as topology,
        ConsumerGroup(topology, user.queue, handle, options=options) as group,
    ):
        wait_until(lambda: group.counters["dead_lettered"] == 1)
        wait_until(lambda: len(handled) == len(MESSAGES))
    handled.clear()
    with user.environment() as environment:
        if environment.server_version < (3, 11):
            return
        stream_options = patient.stream_group(retry=Retry(attempts=1), settle_time=0.1)
        with StreamConsumerGroup(
            environment, user.stream, handle, group="g", options=stream_options
        ) as streams:
            wait_until(lambda: streams.counters["dead_lettered"] == 1)
            wait_until(lambda: len(handled) == len(MESSAGES))


def operates(user: User, theirs: Topology) -> None:
    with user.topology(management=True) as topology:
        topology.set_policy(Policy.exactly(user.queue, 2, name=user.queue))
        ensured = topology.ensure(user.queue)
        assert (len(ensured.shard_map.shards), ensured.notes) == (6, ())
        with raw_channel(user.cluster.nodes[0]) as stranger:
            stranger.basic_publish(user.queue, "key-1", b"a stranger's")
        wait_until(lambda: count_of(theirs, unrouted(user.queue)) == 1)
        assert bring_unrouted(topology, user.queue).result(PATIENCE) == 1
    with user.environment() as environment:
        environment.delete_super_stream(user.stream)
        environment.create_super_stream(user.stream, partitions=2)


def looks(user: User, theirs: Topology) -> None:
    assert theirs.shard_map(user.queue) is not None
    fill(user)
    told = {
        "WARREN_URL": user.amqp_url,
        "WARREN_MANAGEMENT_URL": user.management_url,
        "WARREN_STREAM_URL": user.stream_url,
    }
    for name in (user.queue, user.stream):
        command = [sys.executable, "-m", "sharding.cli", "topology", name]
        done = subprocess.run(
            command, cwd=PROJECT, env=os.environ | told, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "refused" not in done.stdout + done.stderr


DOES: dict[Role, Callable[[User, Topology], None]] = {
    Role.PRODUCER: produces,
    Role.CONSUMER: consumes,
    Role.WORKER: works,
    Role.OPERATOR: operates,
    Role.SPARK: produces,
    Role.MONITOR: looks,
}


@contextmanager
def pika_channel(user: User) -> Iterator[pika.adapters.blocking_connection.BlockingChannel]:
    connection = pika.BlockingConnection(patient.parameters(user.amqp_url))
    try:
        yield connection.channel()
    finally:
        connection.close()


def count_of(topology: Topology, queue: str) -> int:
    seen = topology.look_at([queue]).get(queue)
    return seen.messages if seen else 0


def fill(user: User) -> None:
    url = user.cluster.nodes[0].endpoint.stream_url
    with (
        StreamEnvironment(url, **patient.STREAMS) as environment,
        environment.producer(user.stream) as producer,
    ):
        producer.send_many([body for _, body in MESSAGES], [key for key, _ in MESSAGES])
        assert producer.flush(PATIENCE).stored == len(MESSAGES)


@pytest.fixture
def theirs(cluster: Cluster) -> Iterator[Topology]:
    """Of somebody with every right."""
    with topology_of(cluster) as topology:
        yield topology


@pytest.fixture
def user(cluster: Cluster, theirs: Topology, request: pytest.FixtureRequest) -> Iterator[User]:
    role: Role = request.param
    node, name = cluster.nodes[0], f"{role}-{secrets.token_hex(3)}"
    endpoint = node.endpoint
    body = {"password": "secret-word", "tags": "monitoring" if role in TAGGED else ""}
    node.management.call("PUT", "users", name, body=body, timeout=PATIENCE)
    try:
        with (
            StreamEnvironment(
                endpoint.stream_url, amqp_url=endpoint.amqp_url, **patient.STREAMS
            ) as environment,
            super_stream_in(environment, 2) as stream,
        ):
            queue = make_sharded(theirs, 1).logical
            yield User(cluster, role, queue, stream, name, "secret-word")
            for left in (f"warren.group.{stream}", f"{stream}.dead"):
                environment.delete_stream(left, missing_ok=True)
    finally:
        node.management.call("DELETE", "users", name, timeout=PATIENCE)


@pytest.mark.parametrize("user", Role, indirect=True)
def test_who_has_the_rights_of_a_role_can_do_what_it_does(
    user: User, theirs: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    user.grant(user.needs)
    with caplog.at_level(logging.WARNING, logger="warren"):
        DOES[user.role](user, theirs)
    assert [each.getMessage() for each in caplog.records if "refused" in each.getMessage()] == []
    apis = [user.management_url] if user.role in TAGGED else []
    found = examine(
        places_from([user.amqp_url], apis, []),
        timeout=PATIENCE,
        role=user.role,
        queues=[user.queue],
        streams=[user.stream],
    )
    assert [each for each in found if each.verdict is Verdict.PROBLEM] == []
    assert any(f"as {user.role}" in each.subject for each in found)


@pytest.mark.parametrize(
    "user",
    [
        Role.WORKER,
        pytest.param(
            Role.OPERATOR,
            marks=pytest.mark.twin(
                "integration/test_roles.py::"
                "test_each_right_that_is_missing_is_named_and_nothing_is_changed"
            ),
        ),
    ],
    indirect=True,
)
def test_each_right_that_is_missing_is_named_and_nothing_is_changed(
    user: User, theirs: Topology
) -> None:
    def doctor() -> dict[tuple[str, str], str]:
        found = examine(
            places_from([user.amqp_url], [], []),
            timeout=PATIENCE,
            role=user.role,
            queues=[user.queue],
            streams=[user.stream],
        )
        wrong = [each for each in found if each.check == "permissions" and each.fix]
        assert all("rabbitmqctl set_permissions" in each.fix for each in wrong)
        assert "secret-word" not in str(found)
        words = (each.wanted.split(",")[0].split(" on ") for each in wrong)
        return {(right, name.strip("'\"")): "" for right, name in words}

    publish_all(theirs, user.queue, MESSAGES)
    before = names_and_counts(user)
    kinds = dict.fromkeys((need.right, need.pattern) for need in user.needs)
    for right, pattern in kinds:
        missing = {need for need in user.needs if (need.right, need.pattern) == (right, pattern)}
        user.grant(tuple(need for need in user.needs if need not in missing))
        assert doctor().keys() == {(str(need.right), need.name) for need in missing}
    assert names_and_counts(user) == before
    user.grant(())
    assert doctor().keys() == {(str(need.right), need.name) for need in user.needs}


def names_and_counts(user: User) -> tuple[list[str], list[str], list[str]]:
    api, vhost = user.cluster.nodes[0].management, user.cluster.vhost
    kinds = ("queues", "exchanges")
    queues, exchanges = ([each["name"] for each in api.get(kind, vhost)] for kind in kinds)
    bindings = [f"{each['source']}>{each['destination']}" for each in api.get("bindings", vhost)]
    return sorted(queues), sorted(exchanges), sorted(bindings)


def test_a_role_is_asked_for_by_the_command(cluster: Cluster) -> None:
    url = cluster.nodes[0].endpoint.amqp_url
    command = [sys.executable, "-m", "sharding.cli", "doctor", "--role", "producer"]
    command += ["--queue", fresh_queue(), "--url", url, "--timeout", str(PATIENCE)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as producer" in done.stdout
    assert Right.CONFIGURE not in done.stdout
