"""What is counted, under which names others see it, and how sources are added up: pure.

A source is whatever has `counters`. What it is, and whose, its `counted_as` says; a consumer group
is known by its `shards`. A counter `hits` of a `routes` becomes `warren_routes_hits_total`.

Sources of one kind with the same labels are added up, since two producers to one stream in one
process are one series; of an age, an epoch or the longest of something, the greatest is
taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from sharding.errors import InvalidInput

Kind = Literal["counter", "gauge", "unknown"]


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` is without the `_total` that a counter's has."""

    name: str
    kind: Kind
    help: str


def _metrics(kind: Kind, prefix: str, **helps: str) -> list[Metric]:
    return [Metric(f"warren_{prefix}_{name}", kind, text) for name, text in helps.items()]


METRICS: Sequence[Metric] = (
    *_metrics(
        "counter",
        "routes",
        hits="Routes answered from memory.",
        hits_missing="Names answered from memory as not existing.",
        misses="Routes that had to be asked for.",
        waits="Callers that waited for a question already on its way.",
        queries="Metadata queries, each for many streams.",
        partition_queries="Partitions queries, each for one super stream.",
        names_asked="Names in all queries together.",
        polls="Looks at everything in use, by the clock.",
        pushes="Changes that the broker told.",
        pushes_ignored="Of those, left to the poll because the machine was busy.",
        pushes_unused="Of those, about streams that nobody uses any more.",
        suspicions="Routes doubted by producers and consumers.",
        changes="Routes found changed.",
        failures="Queries without an answer.",
        disconnects="Times that nothing was armed any more.",
        rounds="Rounds of questions after changes.",
        repeats="Rounds that repeated a question.",
        arms="Streams armed to be told of their changes.",
        arms_refused="Of those, already changed.",
        arms_failed="Of those, without an answer.",
        forgotten="Routes forgotten because nobody used them.",
        evicted="Routes forgotten for want of room.",
    ),
    *_metrics(
        "counter",
        "pool",
        dials="Stream connections attempted.",
        failed_dials="Of those, failed.",
        reused="Publishers and subscribers that found a connection open.",
        shared="Callers that joined a search under way.",
        kept="Connections through a balancer to a node wanted by another.",
        unwanted="Connections through a balancer to a node that nobody wanted.",
        idle_closed="Connections closed because nobody used them.",
    ),
    *_metrics(
        "counter",
        "locator",
        connects="Connections made for questions about the cluster.",
        failed_dials="Attempts at one that failed.",
        disconnects="Such connections lost or given up.",
    ),
    *_metrics(
        "counter",
        "topology",
        connects="Connections of the control plane that read the map log.",
        failed_connects="Attempts at one that failed.",
        disconnects="Such connections lost.",
        refreshes="Times the end of the map log was read.",
        map_changes="Times that policies or maps changed, the first reading of the log included.",
    ),
    *_metrics(
        "gauge",
        "topology",
        epoch="Epoch of the state in force: how many changes took effect in this log.",
        logical_queues="Logical queues with a map.",
        shards_away="Shards that do not answer.",
        nodes_down="Nodes that the management API calls down.",
        map_age_seconds="Time since the map log was last read to its end.",
    ),
    *_metrics(
        "counter",
        "producer",
        accepted="Messages taken over, copies to several partitions counted each.",
        stored="Messages that the broker confirmed.",
        refused="Messages that are not in the stream and never will be.",
        unroutable="Messages whose key is bound to no partition.",
        unknown="Messages sent whose outcome is not known.",
        recoveries="Publishers lost and made again.",
    ),
    *_metrics("gauge", "producer", longest_recovery="Seconds that the longest of those took."),
    *_metrics(
        "counter",
        "consumer",
        messages="Messages handed to the application.",
        chunks="Chunks taken for them.",
        bytes="Bytes of those chunks.",
        recoveries="Subscriptions lost and made again.",
    ),
    *_metrics("gauge", "consumer", longest_recovery="Seconds that the longest of those took."),
    *_metrics(
        "counter",
        "publisher",
        accepted="Messages taken over.",
        stored="Messages that the broker confirmed.",
        refused="Messages not sent.",
        unroutable="Messages that came back: no queue has them.",
        unknown="Messages sent whose outcome is not known.",
    ),
    *_metrics("gauge", "publisher", unsettled="Messages without an outcome yet."),
    *_metrics(
        "counter",
        "channel",
        published="Messages handed to the broker.",
        confirmed="Messages that it confirmed.",
        nacked="Messages that it did not take; the outcome of each is unknown.",
        returned="Messages that came back: no queue has them.",
        unknown="Confirms that did not come in time.",
    ),
    *_metrics(
        "counter",
        "group",
        handled="Messages that the handler was done with.",
        failed="Calls of the handler that failed.",
        retried="Calls of the handler that were repetitions.",
        hung="Calls of the handler that did not end in time.",
        dead="Messages given up after the last try.",
        dead_lettered="Of those, stored as dead letters.",
        dead_letter_failures="Attempts to store one that failed, and are repeated.",
        requeued="Messages given back unhandled.",
        redelivered="Messages that a worker had been given before.",
        taken="Shards taken over.",
        released="Shards given up in order.",
        renewed="Of those, taken again at once because messages waited too long.",
        lost="Shards lost with their node or connection.",
        refused="Shards that another worker still held.",
        late_handovers="Partitions given up while a handler was at work.",
        held_back="Times a partition waited for one message, max_ahead behind it being begun.",
        losses="Gaps that retention made before they were read.",
        stores="Offsets stored.",
    ),
    *_metrics(
        "gauge",
        "group",
        shards="Shards that this worker holds.",
        in_hand="Messages taken and not settled.",
        running="Calls of the handler under way.",
        lost_threads="Threads whose handler never came back.",
    ),
    *_metrics(
        "gauge",
        "shard",
        up="1 if the shard answers.",
        messages="Messages in a queue shard.",
        consumers="Consumers of a queue shard.",
        first_offset="The first offset of a stream.",
        last_offset="The last offset of a stream.",
        lag="Messages that a group has not dealt with; of a queue, all in it.",
    ),
    *_metrics(
        "gauge",
        "unrouted",
        messages="Messages that reached an exchange of ours and no shard, and are kept.",
    ),
)
BY_NAME = {metric.name: metric for metric in METRICS}


Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Subject:
    """What a source counts, and whose. Labels are names of things, never a secret."""

    kind: str
    labels: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class Counted(Protocol):
    @property
    def counters(self) -> Mapping[str, float]:
        """By name. Cheap, and asks nobody."""


@runtime_checkable
class Sampled(Protocol):
    """A source whose figures differ by shard or group, such as `sight`'s."""

    def samples(self) -> Iterable[Sample]: ...


Source = Counted | Sampled


@dataclass(frozen=True, slots=True)
class Sample:
    metric: str
    labels: Labels
    value: float


_GREATEST = ("longest_", "epoch", "map_age")
_OTHER_CHARACTERS = re.compile(r"[^a-zA-Z0-9_]")


def samples_of(source: Source) -> Iterator[Sample]:
    """Everything that one source counts."""
    if isinstance(source, Sampled):
        yield from source.samples()
        return
    subject = subject_of(source)
    labels = tuple(sorted(subject.labels.items()))
    for name, value in source.counters.items():
        # Those of an environment say which of its parts they are of: "routes.hits".
        part, _, rest = name.rpartition(".")
        metric = f"warren_{part or subject.kind}_{rest}"
        yield Sample(_OTHER_CHARACTERS.sub("_", metric), labels, value)
    shards = getattr(source, "shards", None)
    if subject.kind == "group" and shards is not None:
        yield Sample("warren_group_shards", labels, len(shards))


def subject_of(source: Counted) -> Subject:
    given = getattr(source, "counted_as", None)
    if isinstance(given, Subject):
        return given
    if hasattr(source, "shards"):
        names = {"logical": ("logical", "stream"), "group": ("group", "name")}
        labels = {label: _first_text(source, fields) for label, fields in names.items()}
        return Subject("group", labels)
    rule = "must say what it counts: counted_as = Subject(kind, labels)"
    raise InvalidInput("source", rule, type(source).__name__)


def added_up(samples: Iterable[Sample]) -> dict[Metric, dict[Labels, float]]:
    """One value for each metric and set of labels."""
    found: dict[Metric, dict[Labels, float]] = {}
    for sample in samples:
        metric = BY_NAME.get(sample.metric) or Metric(sample.metric, "unknown", "Not described.")
        values = found.setdefault(metric, {})
        before = values.get(sample.labels)
        if before is None:
            values[sample.labels] = sample.value
        elif any(word in metric.name for word in _GREATEST):
            values[sample.labels] = max(before, sample.value)
        else:
            values[sample.labels] = before + sample.value
    return found


def _first_text(source: object, fields: Iterable[str]) -> str:
    found = (getattr(source, each, None) for each in fields)
    return next((text for text in found if isinstance(text, str)), "")
