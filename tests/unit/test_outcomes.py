"""Outcomes of messages: counted once, told in one sentence, and never called stored too early."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

import interceptors
import sharding.stream
from sharding.errors import OutcomeUnknown, RemoteError, is_retryable
from sharding.outcomes import NotStored, Outcome, PerhapsNotStored, Report, Result, Tally
from sharding.stream.errors import Overloaded, StreamUnavailable
from sharding.stream.protocol.constants import Code

UNAVAILABLE = StreamUnavailable("Publish", Code.STREAM_NOT_AVAILABLE, "invoices-1")
REFUSED = Result(
    3, Outcome.REFUSED, "the window is full", stream="invoices-0", cause=Overloaded("full")
)
UNROUTABLE = Result(4, Outcome.UNROUTABLE, "312 NO_ROUTE", key="user-7")
UNKNOWN = Result(
    9, Outcome.UNKNOWN, "not confirmed", stream="invoices-1", publishing_id=10, cause=UNAVAILABLE
)


def report_of(*results: Result, stored: int = 0, pending: int = 0) -> Report:
    tally = Tally(max_results=10)
    tally.stored = stored
    tally.add(results)
    return tally.take_report(pending)


def test_both_packages_export_the_same_objects() -> None:
    for name in ("NotStored", "Outcome", "PerhapsNotStored", "Report", "Result"):
        assert getattr(interceptors, name) is getattr(sharding.stream, name)
        assert name in interceptors.__all__
        assert name in sharding.stream.__all__


@pytest.mark.parametrize("report", [Report(), Report(stored=3)])
def test_report_in_which_all_is_stored_raises_nothing(report: Report) -> None:
    assert report.all_stored
    report.raise_for_failures()


@pytest.mark.parametrize(
    ("report", "error"),
    [
        (report_of(REFUSED, stored=7), NotStored),
        (report_of(UNROUTABLE), NotStored),
        (report_of(REFUSED, UNROUTABLE), NotStored),
        (report_of(UNKNOWN, stored=7), PerhapsNotStored),
        (report_of(REFUSED, UNKNOWN), PerhapsNotStored),
        (report_of(stored=7, pending=1), PerhapsNotStored),
        (report_of(REFUSED, pending=1), PerhapsNotStored),
        # Counted, and too many to be remembered: they fail as well.
        (Report(refused=1), NotStored),
        (Report(unknown=1), PerhapsNotStored),
    ],
    ids=str,
)
def test_what_is_not_stored_raises_and_says_whether_it_may_be_sent_again(
    report: Report, error: type[NotStored | PerhapsNotStored]
) -> None:
    assert not report.all_stored
    with pytest.raises(error) as caught:
        report.raise_for_failures()
    raised: Any = caught.value
    assert raised.report is report
    assert str(report) in str(raised)
    assert not is_retryable(raised)  # the messages may be sent again, the call is no use
    assert ("may be sent again" in str(raised)) is (error is NotStored)
    assert ("may store it twice" in str(raised)) is bool(report.unknown)
    assert ("another flush()" in str(raised)) is bool(report.pending)


def test_error_says_where_it_stands_in_the_tree() -> None:
    assert issubclass(NotStored, RemoteError)
    assert issubclass(PerhapsNotStored, OutcomeUnknown)


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (Report(), "0 stored"),
        (Report(stored=7, pending=2), "7 stored, 2 pending"),
        (Report(stored=7, refused=2), "7 stored, 2 refused"),
        (
            report_of(UNROUTABLE),
            "0 stored, 1 unroutable; the first unroutable is message 4: 312 NO_ROUTE",
        ),
        (
            report_of(REFUSED, UNROUTABLE, stored=5),
            "5 stored, 1 refused, 1 unroutable; the first refused is message 3 to 'invoices-0': "
            "the window is full",
        ),
        (
            report_of(REFUSED, UNKNOWN, replace(UNKNOWN, number=10)),
            "0 stored, 1 refused, 2 unknown; the first unknown is message 9 to 'invoices-1': "
            "not confirmed",
        ),
    ],
)
def test_report_is_one_sentence_with_what_went_wrong_first(report: Report, text: str) -> None:
    assert str(report) == text


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        (report_of(REFUSED, UNKNOWN), UNAVAILABLE),
        (report_of(REFUSED, UNROUTABLE), REFUSED.cause),
        (report_of(UNROUTABLE, REFUSED), None),
        (report_of(pending=1), None),
    ],
)
def test_error_has_the_cause_that_its_sentence_speaks_of_also_in_another_process(
    report: Report, cause: Exception | None
) -> None:
    with pytest.raises((NotStored, PerhapsNotStored)) as caught:
        report.raise_for_failures()
    error: Any = caught.value
    assert error.__cause__ is cause
    for _ in range(2):  # it may cross several processes
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert (str(copy), copy.report) == (str(error), report)
        assert (type(copy.__cause__), str(copy.__cause__)) == (type(cause), str(cause))
        assert [type(each.cause) for each in copy.report.not_stored] == [
            type(each.cause) for each in report.not_stored
        ]
        error = copy


def test_tally_remembers_within_its_bound_and_counts_all() -> None:
    tally = Tally(max_results=2)
    tally.stored += 5
    tally.add([REFUSED, UNROUTABLE, UNKNOWN])
    tally.add([UNKNOWN])
    report = tally.take_report(pending=1)
    assert report == Report(5, 1, 1, 2, 1, (REFUSED, UNROUTABLE))
    assert report.omitted == 2
    with pytest.raises(PerhapsNotStored):
        report.raise_for_failures()
    assert tally.take_report() == Report()


def test_absorbed_tally_starts_from_nothing() -> None:
    inner, outer = Tally(10), Tally(2)
    for _ in range(2):
        inner.stored += 4
        inner.add([REFUSED, UNKNOWN])
        outer.absorb(inner)
    assert inner.take_report() == Report()
    report = outer.take_report()
    assert (report.stored, report.refused, report.unknown, report.omitted) == (8, 2, 2, 2)
    assert report.not_stored == (REFUSED, UNKNOWN)
