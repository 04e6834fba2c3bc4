"""Errors say whether to try again, and can travel to another process."""

from __future__ import annotations

import pickle

import pytest

from sharding import (
    InvalidInput,
    LocalError,
    OutcomeUnknown,
    RemoteError,
    ShardUnavailable,
    UnsupportedFormat,
    WarrenError,
    is_retryable,
)
from sharding.errors import reason
from sharding.groups.handling.delivery import first_line
from tests.support.odd_messages import ExitInWords, NamelessError, OddWords


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ShardUnavailable("images - 0"), True),
        (WarrenError("some"), False),
        (LocalError("refused"), False),
        (InvalidInput("key", "must be text", 1), False),
        (UnsupportedFormat("newer"), False),
        (RemoteError("refused"), False),
        (OutcomeUnknown("sent"), False),
        (ConnectionError("not ours"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_an_absent_shard_may_be_tried_again(error: BaseException, expected: bool) -> None:
    assert is_retryable(error) is expected


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (InvalidInput, LocalError),
        (InvalidInput, ValueError),
        (UnsupportedFormat, LocalError),
        (ShardUnavailable, RemoteError),
        (LocalError, WarrenError),
        (RemoteError, WarrenError),
        (OutcomeUnknown, WarrenError),
    ],
)
def test_the_class_of_an_error_says_where_it_happened(kind: type, base: type) -> None:
    assert issubclass(kind, base)


def test_an_unknown_outcome_is_neither_here_nor_there() -> None:
    assert not issubclass(OutcomeUnknown, LocalError | RemoteError)


def test_a_message_says_field_rule_and_what_was_found() -> None:
    assert str(InvalidInput("policy.name", "must be text", 5)) == (
        "policy.name: must be text; found 5"
    )


@pytest.mark.parametrize("found", ["x" * 1_000_000, list(range(10_000)), b"\0" * 100_000])
def test_a_long_value_is_cut_in_the_message(found: object) -> None:
    message = str(InvalidInput("key", "must be short", found))
    assert message.startswith(f"key: must be short; found {repr(found)[:20]}")
    assert message.endswith("…")
    assert len(message) < 120


def test_a_number_too_long_for_python_to_print_is_still_refused_by_us() -> None:
    assert "must fit" in str(InvalidInput("x-max-length", "must fit in 64 bits", 10**5_000))


def test_a_message_is_one_line() -> None:
    assert "\n" not in str(InvalidInput("name", "must not be so", "two\nlines"))


@pytest.mark.parametrize("found", ["text", None, {"a": 1}, "x" * 500, memoryview(b"x"), object()])
def test_an_invalid_input_can_be_pickled_whatever_was_found(found: object) -> None:
    error = InvalidInput("policy.name", "must be text", found)
    for _ in range(2):  # it may cross several processes
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is InvalidInput
        assert (copy.field, copy.rule, str(copy)) == (error.field, error.rule, str(error))
        error = copy


@pytest.mark.parametrize("kind", [WarrenError, UnsupportedFormat, ShardUnavailable, OutcomeUnknown])
def test_other_errors_can_be_pickled(kind: type[WarrenError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(copy) is kind
    assert str(copy) == "what happened"


class Mute(Exception):
    """An application's error that fails to say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (ValueError(), "ValueError"),
        (TimeoutError(), "no answer in time"),
        (Mute(), "Mute"),
    ],
)
def test_reason_is_one_line_whatever_the_error_says(error: BaseException, said: str) -> None:
    assert reason(error) == said


def test_an_error_that_lies_about_itself_fails_nobody() -> None:
    assert reason(ExitInWords()) == "ExitInWords"
    assert reason(OddWords()) == "odd"
    assert first_line(NamelessError("x")) == "NamelessError: x"


def test_what_an_error_says_can_be_written_anywhere() -> None:
    assert reason(ValueError("Ann \ud83d")) == "Ann \\ud83d"


class Unprintable:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __repr__(self) -> str:
        raise self._error


@pytest.mark.parametrize("error", [RuntimeError("detached"), RecursionError(), GeneratorExit()])
def test_a_value_that_can_not_be_printed_is_refused_all_the_same(error: BaseException) -> None:
    refused = InvalidInput("tenant", "must be text", Unprintable(error))
    assert str(refused) == "tenant: must be text; found a Unprintable that can't be printed"
