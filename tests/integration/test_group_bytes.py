"""Whatever a broker can deliver and a handler can do: each message is acknowledged once, or a dead
letter with its own bytes; none is lost, none stuck, and no connection ends."""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from sharding import Policy, ShardMap, Topology
from sharding.groups import Delivery, Retry
from sharding.maps.naming import SHARDS_KEY
from tests.cluster import Cluster, wait_until
from tests.support import patient
from tests.support.groups import KINDS, Group, Handler, running_group
from tests.support.odd_messages import (
    ASYNCHRONOUS,
    MAX_HEADER,
    SYNCHRONOUS,
    Expected,
    Handlers,
    Hangs,
    Messages,
)
from tests.support.raw_amqp import Raw, RawConnection, short, sized
from tests.support.sharded import fresh_queue, raw_channel, topology_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.twin(
        "integration/test_group_bytes.py::test_any_message_meets_any_handler", on="3.10"
    ),
]

PAIRS = int(os.environ.get("WARREN_ODD_PAIRS", "300"))
"""Of a message and a handler, for each kind of group; a part of the handlers hangs."""
HANGING = 1 / 50
SEED = int(os.environ.get("WARREN_ODD_SEED", "13"))
ATTEMPTS = 2
RETRY = Retry(attempts=ATTEMPTS, first_delay=0.01, max_delay=0.02)
SIZES = [*[0] * 9, 9, 500, 5_000, 50_000, 131_064, 131_065, 400_000]


@dataclass(frozen=True)
class Place:
    """A logical queue, and a queue that gets a copy of all that is published here."""

    shard_map: ShardMap
    url: str

    @property
    def logical(self) -> str:
        return self.shard_map.logical

    @property
    def witness(self) -> str:
        return f"{self.logical}.witness"

    @property
    def dead(self) -> str:
        return f"{self.logical}.dead"


@pytest.fixture(scope="module")
def topology(nodes: Cluster) -> Iterator[Topology]:
    with topology_of(nodes) as running:
        yield running


@contextmanager
def a_place(cluster: Cluster, topology: Topology) -> Iterator[Place]:
    logical = fresh_queue()
    topology.set_policy(Policy.exactly(logical, 1, name=logical))
    place = Place(topology.ensure(logical).shard_map, cluster.nodes[0].endpoint.amqp_url)
    with raw_channel(cluster.nodes[0]) as channel:
        channel.queue_declare(place.witness, durable=True)
        channel.queue_bind(place.witness, place.shard_map.exchange, place.witness)
        channel.queue_declare(place.dead, durable=True)
    yield place
    topology.forget(logical)
    topology.clear_policy(logical)
    with raw_channel(cluster.nodes[0]) as channel:
        for queue in [place.witness, place.dead, *(s.name for s in place.shard_map.shards)]:
            channel.queue_delete(queue)


@pytest.fixture
def place(nodes: Cluster, topology: Topology) -> Iterator[Place]:
    with a_place(nodes, topology) as made:
        yield made


# A message's properties, taken apart by other code than Warren's.

SHORT_STRINGS = {15, 14, 10, 9, 8, 7, 5, 4, 3, 2}
EXPIRATION, USER_ID, HEADERS = 8, 4, 13
SIZES_OF_TYPES = dict(
    zip("tbBsuIifDlLdTV", [1, 1, 1, 2, 2, 4, 4, 4, 5, 8, 8, 8, 8, 0], strict=True)
)


def taken_apart(properties: bytes) -> tuple[int, dict[int, bytes]]:
    flags = struct.unpack_from(">H", properties)[0]
    pieces, offset = {}, 2
    for bit in range(15, 1, -1):
        if flags >> bit & 1:
            if bit == HEADERS:
                size = 4 + struct.unpack_from(">I", properties, offset)[0]
            elif bit in SHORT_STRINGS:
                size = 1 + properties[offset]
            else:
                size = 8 if bit == 6 else 1
            pieces[bit] = properties[offset : offset + size]
            offset += size
    assert offset == len(properties)
    return flags & 3, pieces


def fields_of(table: bytes) -> list[tuple[bytes, bytes]]:
    found, offset = [], 4
    while offset < len(table):
        start = offset + 1 + table[offset]
        name, letter = table[offset + 1 : start], chr(table[start])
        size = SIZES_OF_TYPES.get(letter)
        if size is None:
            size = 4 + struct.unpack_from(">I", table, start + 1)[0]
        offset = start + 1 + size
        found.append((name, table[start:offset]))
    return found


OURS = {b"x-warren-" + n for n in (b"reason", b"attempts", b"time", b"shard", b"key", b"error")}


def check_letter(letter: Raw, original: Raw) -> str:
    """The reason in the letter, after all else was found to be the message's own."""
    odd_flags, pieces = taken_apart(letter.properties)
    fields = fields_of(pieces.pop(HEADERS))
    said = {name: value[5:] for name, value in fields if name.startswith(b"x-warren-")}
    if b"x-warren-enclosed" in said:
        assert letter.body == original.properties + original.body
        return said[b"x-warren-reason"].decode()
    assert letter.body == original.body
    own_flags, own_pieces = taken_apart(original.properties)
    own_fields = fields_of(own_pieces.pop(HEADERS, b""))
    moved = []
    if (expiration := own_pieces.pop(EXPIRATION, None)) is not None:
        moved.append((b"x-warren-expiration", b"S" + sized(expiration[1:])))
    moved += [(b"x-warren-cc", value) for name, value in own_fields if name == b"CC"]
    kept = [field for field in own_fields if field[0] not in OURS | {b"CC"}]
    assert (odd_flags, pieces) == (own_flags, own_pieces)
    # As often as they were there; in which order is the broker's affair, and 4.0 sorts them.
    assert Counter(field for field in fields if field[0] not in OURS) == Counter(kept + moved)
    ours = [name for name, _ in fields if name in OURS]
    assert len(set(ours)) == len(ours)
    if b"x-warren-key" in said:
        assert said[b"x-warren-key"] == original.key
    return said[b"x-warren-reason"].decode()


@contextmanager
def a_group(
    kind: str, topology: Topology, logical: str, handler: Handler, **options: Any
) -> Iterator[Group]:
    chosen = patient.group(retry=RETRY, parallelism=4, max_lost_threads=10_000, **options)
    with running_group(kind, topology, logical, handler, chosen) as group:
        yield group


class Trial:
    """Messages and the handler that each of them meets; what came of all that."""

    def __init__(self, place: Place, kind: str, handlers: Handlers, count: int, seed: int) -> None:
        self.place = place
        self.kind = kind
        self._handlers = handlers
        random_ = random.Random(seed)
        messages = Messages(random_)
        shards = [shard.name for shard in place.shard_map.shards]
        names = [*handlers]
        self._chosen = [names[n % len(names)] for n in range(count)]
        random_.shuffle(self._chosen)
        self._messages = [
            Raw(
                messages.key(),
                messages.properties(SHARDS_KEY, random_.choice(shards), place.witness),
                b"%d|" % number + random_.randbytes(random_.choice(SIZES)),
            )
            for number in range(count)
        ]
        self.begun: Counter[int] = Counter()

    def publish(self) -> None:
        with RawConnection(self.place.url) as connection:
            for message in self._messages:
                connection.publish(self.place.shard_map.exchange, message)
            connection.wait_for_confirms()

    def __call__(self, delivery: Delivery) -> Any:
        number = _number(delivery.body)
        self.begun[number] += 1
        return self._handlers[self._chosen[number]][1](delivery)

    def numbers(self, expected: Expected) -> set[int]:
        return {n for n, name in enumerate(self._chosen) if self._handlers[name][0] is expected}

    def wait(self, group: Group) -> None:
        """Until all are settled; as long as one more is settled from time to time."""

        def settled() -> float:
            return group.counters["handled"] + group.counters["dead_lettered"]

        def explain() -> str:
            unbegun = {n: self._chosen[n] for n in range(len(self._chosen)) if not self.begun[n]}
            return f"{group.counters}, not begun {unbegun}, failure {group.failure!r}"

        before = settled()
        while before < len(self._chosen):
            wait_until(lambda: settled() > before, explain=explain)  # noqa: B023
            before = settled()

    def check(self, topology: Topology, group: Group) -> Counter[str]:
        """Each message ended as it should; which reasons the dead letters have."""
        with RawConnection(self.place.url) as connection:
            originals = {_number(raw.body): raw for raw in connection.take_all(self.place.witness)}
            letters = connection.take_all(self.place.dead)
        assert len(originals) == len(self._chosen)
        reasons: Counter[str] = Counter()
        dead = []
        for letter in letters:
            number = _number(own_body(letter))
            dead.append(number)
            reasons[check_letter(letter, originals[number])] += 1
        assert sorted(dead) == sorted(self.numbers(Expected.DEAD))
        for number in self.numbers(Expected.DONE):
            assert self.begun[number] == (2 if "once" in self._chosen[number] else 1)
        left = topology.look_at([shard.name for shard in self.place.shard_map.shards])
        assert {queue.messages for queue in left.values() if queue} == {0}
        unwanted = ("lost", "redelivered", "dead_letter_failures", "requeued", "in_hand")
        assert {name: group.counters[name] for name in unwanted} == dict.fromkeys(unwanted, 0)
        return reasons


def own_body(letter: Raw) -> bytes:
    """The message's own, also where its properties stand before it."""
    _, pieces = taken_apart(letter.properties)
    enclosed = dict(fields_of(pieces[HEADERS])).get(b"x-warren-enclosed")
    return letter.body if enclosed is None else letter.body[int.from_bytes(enclosed[1:], "big") :]


def _number(body: bytes) -> int:
    return int(body[: body.index(b"|")])


@KINDS
@pytest.mark.timeout(1200)
def test_any_message_meets_any_handler(topology: Topology, place: Place, kind: str) -> None:
    handlers = SYNCHRONOUS if kind == "threads" else ASYNCHRONOUS
    trial = Trial(place, kind, handlers, PAIRS, SEED)
    trial.publish()
    with a_group(kind, topology, place.logical, trial) as group:
        trial.wait(group)
    reasons = trial.check(topology, group)
    assert reasons == {"failed": len(trial.numbers(Expected.DEAD))}
    assert all(trial.begun[number] == ATTEMPTS for number in trial.numbers(Expected.DEAD))


@KINDS
@pytest.mark.timeout(1200)
def test_any_message_meets_handlers_that_hang(topology: Topology, place: Place, kind: str) -> None:
    hangs = Hangs()
    handlers = hangs.for_threads() if kind == "threads" else hangs.for_tasks()
    trial = Trial(place, kind, handlers, max(8, round(PAIRS * HANGING)), SEED + 1)
    trial.publish()
    with a_group(kind, topology, place.logical, trial, handler_timeout=0.2) as group:
        try:
            trial.wait(group)
        finally:
            hangs.end()
        wait_until(lambda: not group.counters["lost_threads"])
    reasons = trial.check(topology, group)
    assert reasons == {"timeout": len(trial.numbers(Expected.DEAD))}
    assert set(trial.begun.values()) == {1}


# Some of them by name.


def headers_of(place: Place, *fields: bytes, shard: int = 0) -> bytes:
    """Encoded properties with these fields, for one shard and the witness."""
    name = place.shard_map.shards[shard].name
    copies = b"".join(b"S" + sized(each.encode()) for each in (SHARDS_KEY, name, place.witness))
    return b"\x20\x00" + sized(short(b"BCC") + b"A" + sized(copies) + b"".join(fields))


def publish(place: Place, *messages: Raw) -> None:
    with RawConnection(place.url) as connection:
        for message in messages:
            connection.publish(place.shard_map.exchange, message)
        connection.wait_for_confirms()


def refuse(_: Delivery) -> None:
    raise ValueError("no")


@KINDS
def test_what_python_has_no_value_for_is_shown_as_something_else_and_ends_no_connection(
    topology: Topology, place: Place, kind: str
) -> None:
    milliseconds = struct.pack(">Q", 1_700_000_000_000)
    fields = [
        short(b"time") + b"T" + milliseconds,
        short(b"text") + b"S" + sized(b"\xff\xfe"),
        short(b"\xff\xfe") + b"d" + struct.pack(">d", 19.99),
    ]
    publish(place, Raw(b"k", headers_of(place, *fields), b"x"))
    seen: list[Delivery] = []
    with a_group(kind, topology, place.logical, seen.append) as group:
        wait_until(lambda: group.counters["handled"])
    assert group.counters["lost"] == 0
    assert seen[0].headers == {
        "time": 1_700_000_000_000,
        "text": b"\xff\xfe",
        "\udcff\udcfe": 19.99,
    }
    assert seen[0].properties.headers == seen[0].headers


@KINDS
def test_keys_that_are_not_utf_8_are_apart_and_go_into_dead_letters_as_they_are(
    topology: Topology, place: Place, kind: str
) -> None:
    keys = [b"\xff", b"\xfe", b"\xff\xff"]
    publish(place, *(Raw(key, headers_of(place), key) for key in keys))
    seen: list[str] = []

    def handle(delivery: Delivery) -> None:
        seen.append(delivery.key)
        raise ValueError("no")

    with a_group(kind, topology, place.logical, handle) as group:
        wait_until(lambda: group.counters["dead_lettered"] == len(keys))
    assert {key.encode("utf-8", "surrogateescape") for key in seen} == {*keys}
    with RawConnection(place.url) as connection:
        letters = connection.take_all(place.dead)
    said = [dict(fields_of(taken_apart(each.properties)[1][HEADERS])) for each in letters]
    assert [each[b"x-warren-key"][5:] for each in said] == [each.body for each in letters]


@KINDS
@pytest.mark.parametrize(
    ("room", "ours"), [(0, 0), (26, 0), (27, 1), (50, 2), (300, 6)], ids=lambda value: str(value)
)
def test_properties_that_fill_a_frame_are_in_the_dead_letter_all_the_same(
    topology: Topology, place: Place, kind: str, room: int, ours: int
) -> None:
    """With room for all of our headers, for some, and not even for the reason."""
    shard = place.shard_map.shards[0].name
    start = b"\x20\x00" + sized(short(b"baggage") + b"S" + sized(b""))
    text = b"x" * (MAX_HEADER - len(start) - room)
    properties = b"\x20\x00" + sized(short(b"baggage") + b"S" + sized(text))
    fat = Raw(shard.encode(), properties, b"fat")
    with RawConnection(place.url) as connection:
        connection.publish("", fat)
        connection.wait_for_confirms()
    with a_group(kind, topology, place.logical, refuse) as group:
        wait_until(lambda: group.counters["dead_lettered"] == 1)
    assert group.counters["dead_letter_failures"] == 0
    with RawConnection(place.url) as connection:
        (letter,) = connection.take_all(place.dead)
    assert check_letter(letter, fat) == "failed"
    names = {name for name, _ in fields_of(taken_apart(letter.properties)[1][HEADERS])}
    assert (b"x-warren-enclosed" in names) == (not ours)
    assert ours in (0, len(names & OURS))
