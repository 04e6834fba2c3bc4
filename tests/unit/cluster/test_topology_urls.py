"""URLs are checked before anything is started, and no error shows what may be a password."""

from __future__ import annotations

import pytest

from sharding import InvalidInput, Topology


@pytest.mark.parametrize(
    "url",
    [
        "http://user:c4nary@host/",
        "amqp://user:c4n/ary@host/",
        "amqp://user:c4n#ary@host/",
        "user:c4nary@host",
        "amqp://",
    ],
)
def test_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Topology(url)
    assert caught.value.field == "urls"
    assert "c4n" not in str(caught.value)


def test_no_url_is_refused() -> None:
    with pytest.raises(InvalidInput, match="urls: must name one broker"):
        Topology()
