"""What is counted, under which names others see it, and how sources are added up: pure.

A source is whatever has `counters`. What it is, and whose, its `counted_as` says; a consumer group
is known by its `shards`. A counter `hits` of a `routes` becomes `warren_routes_hits_total`.

Sources of one kind with the same labels are added up, since two producers to one stream in one
process are one series; of an age, an epoch or the longest of something, the greatest is
taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from sharding.errors import InvalidInput
from sharding.metric_names import BY_NAME, Metric

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
