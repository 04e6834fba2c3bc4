"""What errors of streams say."""

from __future__ import annotations

import pickle

import pytest

from sharding.stream.errors import AccessRefused, StreamNotFound, refusal
from sharding.stream.protocol.commands import (
    Create,
    DeclarePublisher,
    Delete,
    QueryOffset,
    QueryPublisherSequence,
    Request,
    Subscribe,
)
from sharding.stream.protocol.constants import NEXT, Code


@pytest.mark.parametrize(
    ("request_", "right"),
    [
        (Create("s"), "configure"),
        (Delete("s"), "configure"),
        (DeclarePublisher(1, None, "s"), "write"),
        (QueryPublisherSequence("me", "s"), "read it too"),
        (QueryOffset("me", "s"), "read"),
        (Subscribe(1, "s", NEXT, 1), "read"),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_refused_access_names_the_right_that_is_missing(request_: Request, right: str) -> None:  # type: ignore[type-arg]
    error = refusal(request_.name, Code.ACCESS_REFUSED, request_.subject)
    assert isinstance(error, AccessRefused)
    assert f"'s' was refused: access refused (code 16); the user needs the right to {right}" in str(
        error
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_other_refusals_speak_of_no_right() -> None:
    error = refusal("Subscribe", Code.NO_SUCH_STREAM, "s")
    assert isinstance(error, StreamNotFound)
    assert str(error) == "Subscribe of 's' was refused: no such stream (code 2)"
