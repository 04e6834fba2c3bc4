"""What the doctor concludes from what was found, without a broker."""

from __future__ import annotations

from collections import Counter

import pytest

from sharding import InvalidInput
from sharding.cli.inspect import report
from sharding.doctor.checks import Probed, _careful, examine
from sharding.doctor.findings import Finding, Verdict, judge_versions, summary
from sharding.doctor.nodes import (
    FEW_TRIES,
    TRIES_PER_NODE,
    ClusterSeen,
    Dealt,
    NodeSeen,
    cluster_from,
    deal,
    judge_balancer,
    judge_running,
    judge_streams_enabled,
)
from sharding.doctor.permissions import Rights, judge_rights
from sharding.doctor.reach import Place, Protocol, Reached, Step, judge_place, places_from
from sharding.doctor.roles import Right
from sharding.stream.protocol.constants import Broker

URLS = (
    ["amqp://ann:c4nary@rmq0/orders"],
    ["https://rmq0"],
    ["rabbitmq-stream://ann:c4nary@rmq0"],
)
AMQP, MANAGEMENT, STREAMS = places_from(*URLS)


def verdicts(findings: list[Finding]) -> list[Verdict]:
    return [finding.verdict for finding in findings]


def test_place_shows_no_password() -> None:
    for place in (AMQP, MANAGEMENT, STREAMS):
        assert "c4nary" not in f"{place} {place!r}"
    assert MANAGEMENT.user == "ann"
    assert MANAGEMENT.address == Broker("rmq0", 443)


def test_url_that_is_none_is_refused_without_its_password() -> None:
    with pytest.raises(InvalidInput) as caught:
        places_from(["http://ann:c4nary@rmq0"], [], [])
    assert "c4nary" not in str(caught.value)


@pytest.mark.parametrize("step", Step)
@pytest.mark.parametrize("place", [AMQP, MANAGEMENT, STREAMS])
def test_every_broken_step_has_a_fix(step: Step, place: Place) -> None:
    found = judge_place(Reached(place, step, "no"))
    assert (found.check, found.verdict) == (step.value, Verdict.PROBLEM)
    assert found.fix
    assert "{" not in found.wanted + found.fix


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (["4.0.5"], [Verdict.OK]),
        (["3.13.0-rc.1"], [Verdict.OK]),
        (["3.12.4"], [Verdict.WARNING]),
        (["3.10.0"], [Verdict.WARNING]),
        (["3.9.29"], [Verdict.PROBLEM]),
        ([""], [Verdict.WARNING]),
        (["4.0.5", "4.1.0"], [Verdict.OK, Verdict.OK, Verdict.WARNING]),
        (["4.0.5", "4.0.6"], [Verdict.OK, Verdict.OK]),
    ],
)
def test_versions_are_judged(said: list[str], expected: list[Verdict]) -> None:
    assert verdicts(judge_versions({str(n): text for n, text in enumerate(said)})) == expected


def test_what_an_old_version_lacks_is_named() -> None:
    (found,) = judge_versions({"rmq0": "3.11.2"})
    assert "filters" in found.found
    assert "single active" not in found.found
    assert "3.13" in found.fix


@pytest.mark.parametrize(
    ("seen", "own", "count", "expected"),
    [
        ({"a": 1}, True, 3, [Verdict.OK]),
        ({"a": 9}, False, 3, [Verdict.PROBLEM]),
        ({"a": 9, "b": 8}, None, 3, [Verdict.PROBLEM]),
        ({"a": 9, "b": 8, "c": 1}, False, 3, [Verdict.OK]),
        ({"a": 9}, False, 1, [Verdict.OK]),
        ({"a": 3}, False, 0, [Verdict.WARNING]),
        ({"a": 2, "b": 1}, None, 0, [Verdict.OK]),
        ({"a": 3}, None, 0, [Verdict.OK]),
        ({}, None, 3, []),
    ],
)
def test_balancers_are_judged(
    seen: dict[str, int], own: bool | None, count: int, expected: list[Verdict]
) -> None:
    assert verdicts(judge_balancer(Dealt(STREAMS, Counter(seen), own), count)) == expected


def test_balancer_is_tried_until_every_node_was_seen() -> None:
    answers = iter("abab" + "c" + "never asked")
    assert deal(3, lambda: next(answers)) == Counter(a=2, b=2, c=1)


def test_balancer_that_never_leads_to_a_node_is_tried_often_enough() -> None:
    assert deal(3, lambda: "a").total() == 3 * TRIES_PER_NODE


def test_place_that_answers_no_more_is_not_tried_on_and_on() -> None:
    asked: list[int] = []

    def silent() -> str:
        asked.append(1)
        return ""

    assert not deal(100, silent)
    assert len(asked) == FEW_TRIES


def test_each_missing_right_is_a_problem_of_its_own() -> None:
    rights = Rights(AMQP, "x", {Right.WRITE: "no", Right.READ: "no"})
    found = judge_rights(rights)
    assert verdicts(found) == [Verdict.PROBLEM, Verdict.PROBLEM, Verdict.OK]
    assert found[0].wanted.startswith("write")


def test_missing_stream_queues_are_a_problem_of_the_map_log() -> None:
    found = judge_rights(Rights(AMQP, "x", no_stream_queue="feature flag is disabled"))
    assert verdicts(found) == [Verdict.OK, Verdict.PROBLEM]
    assert "enable_feature_flag stream_queue" in found[1].fix


def test_who_may_not_change_maps_is_warned_and_who_may_not_read_them_has_a_problem() -> None:
    *_, changes = judge_rights(Rights(AMQP, "x", map_log={Right.WRITE: "no"}))
    assert (changes.check, changes.verdict) == ("map log", Verdict.WARNING)
    assert "write on 'warren.shard-maps'" in changes.wanted
    *_, reads = judge_rights(Rights(AMQP, "x", map_log={Right.WRITE: "no", Right.READ: "no"}))
    assert (reads.check, reads.verdict) == ("map log", Verdict.PROBLEM)
    everywhere = Rights(AMQP, "x", {Right.READ: "no"}, map_log={Right.READ: "no"})
    assert verdicts(judge_rights(everywhere)) == [Verdict.PROBLEM, Verdict.OK]


def test_listener_everywhere_is_at_the_host_in_the_nodes_name() -> None:
    listeners = [
        {"protocol": "amqp", "node": "rabbit@rmq0", "ip_address": "::", "port": 5672},
        {"protocol": "stream", "node": "rabbit@rmq0", "ip_address": "10.0.0.1", "port": 5552},
        {"protocol": "clustering", "node": "rabbit@rmq0", "ip_address": "::", "port": 25672},
    ]
    seen = cluster_from([{"name": "rabbit@rmq0", "running": True}], listeners)
    assert seen.nodes[0].addresses(Protocol.AMQP) == (Broker("rmq0", 5672),)
    assert seen.nodes[0].addresses(Protocol.STREAMS) == (Broker("10.0.0.1", 5552),)


def test_missing_streams_are_a_problem_only_for_who_asked_for_them() -> None:
    cluster = ClusterSeen((NodeSeen("rabbit@rmq0", running=True),))
    assert verdicts(judge_streams_enabled(cluster, True)) == [Verdict.PROBLEM]
    assert verdicts(judge_streams_enabled(cluster, False)) == [Verdict.WARNING]


def test_node_that_is_down_is_a_problem() -> None:
    cluster = ClusterSeen((NodeSeen("rabbit@rmq0", running=False),))
    assert verdicts(judge_running(cluster)) == [Verdict.PROBLEM]


def test_check_that_fails_hides_no_other_and_shows_no_text() -> None:
    def check_nothing(_: Probed) -> list[Finding]:
        raise ValueError("c4nary")

    (found,) = _careful(check_nothing, Probed((), ClusterSeen(), "x", 1))
    assert (found.check, found.verdict) == ("nothing", Verdict.PROBLEM)
    assert "c4nary" not in str(found)


def test_report_tells_the_fix_and_counts() -> None:
    findings = [judge_place(Reached(AMQP, Step.PORT, "refused\x1b[31m"))]
    text = report([*findings, judge_place(Reached(AMQP, version="4.0.5"))])
    assert "problem  port, AMQP rmq0:5672: refused\\x1b[31m" in text
    assert findings[0].fix in text
    assert text.endswith(summary([*findings, judge_place(Reached(AMQP, version="4.0.5"))]))


@pytest.mark.parametrize("scratch", ["", "amq.doctor", "x" * 250])
def test_scratch_name_that_no_broker_takes_is_refused(scratch: str) -> None:
    with pytest.raises(InvalidInput):
        examine([], scratch=scratch)
