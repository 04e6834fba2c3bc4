"""Metrics have one table of names, add up what is alike, and survive a source that fails."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sharding import InvalidInput, LocalError, metrics
from sharding.metrics.names import METRICS, Sample, Subject, added_up, samples_of
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT


class Source:
    def __init__(self, subject: Subject, **counters: float) -> None:
        self.counted_as = subject
        self.counters: Mapping[str, float] = counters


class Group:
    """As little as a consumer group has to have."""

    logical = "images"
    shards = ("a", "b")
    counters: Mapping[str, float] = {"handled": 3}


def scraped(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }


def test_two_producers_to_one_stream_are_one_series() -> None:
    invoices = Subject("producer", {"stream": "invoices"})
    first = Source(invoices, stored=2, longest_recovery=0.5)
    second = Source(invoices, stored=3, longest_recovery=0.25)
    with metrics.serve(0, first, second, first) as server:
        seen = scraped(server.port)
    assert seen == {
        ("warren_producer_stored_total", (("stream", "invoices"),)): 5,
        ("warren_producer_longest_recovery", (("stream", "invoices"),)): 0.5,
    }


def test_group_is_known_by_its_shards() -> None:
    with metrics.serve(0) as server:
        server.add(Group())
        seen = scraped(server.port)
    labels = (("group", ""), ("logical", "images"))
    assert seen[("warren_group_handled_total", labels)] == 3
    assert seen[("warren_group_shards", labels)] == 2


def test_source_that_fails_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        counted_as = Subject("topology")

        @property
        def counters(self) -> Mapping[str, float]:
            raise ZeroDivisionError

    with metrics.serve(0, Broken(), Source(Subject("topology"), epoch=7)) as server:
        assert scraped(server.port) == {("warren_topology_epoch", ()): 7}
    assert "no metrics of a Broken" in caplog.text


def test_counter_that_is_in_no_table_is_served_without_a_type() -> None:
    with metrics.serve(0, Source(Subject("group"), **{"odd-name": 1})) as server:
        assert scraped(server.port) == {("warren_group_odd_name", ()): 1}


def test_what_counts_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput, match="source: must have counters"):
        metrics.serve(0, object())  # type: ignore[arg-type]


def test_port_that_is_taken_is_said_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LocalError, match=r"can't be served at 127\.0\.0\.1:"):
            metrics.serve(taken.getsockname()[1])


def test_label_values_are_added_up_apart() -> None:
    samples = [Sample("warren_shard_lag", (("shard", each),), 1) for each in "aab"]
    ((metric, values),) = added_up(samples).items()
    assert (metric.kind, list(values.values())) == ("gauge", [2, 1])


def test_part_of_an_environment_is_in_the_name() -> None:
    source = Source(Subject("streams"), **{"routes.hits": 4})
    assert list(samples_of(source)) == [Sample("warren_routes_hits", (), 4)]


def test_document_lists_every_metric_and_no_other() -> None:
    text = (PROJECT / "docs/sight.md").read_text()
    listed = set(re.findall(r"^\| `(warren_\w+)`", text, re.MULTILINE))
    wanted = {f"{each.name}_total" if each.kind == "counter" else each.name for each in METRICS}
    assert listed == wanted
