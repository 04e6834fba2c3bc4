"""URLs and options are checked when a topology is made; no error shows what may be a password."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sharding import InvalidInput, Topology
from sharding.cluster.topology import TopologyOptions
from tests.cluster.waiting import PATIENCE


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


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ("amqp://user:c4nary@other/test", "virtual host"),
        ("amqp://guest:c4nary@other/%2F", "user"),
        ("amqps://user:c4nary@other/%2F", "scheme"),
    ],
)
def test_urls_that_lead_to_different_maps_are_refused(other: str, differs: str) -> None:
    with pytest.raises(InvalidInput, match=f"urls: must all have the same {differs}") as caught:
        Topology("amqp://user:c4nary@host/%2F", other)
    assert "c4n" not in str(caught.value)


def test_no_url_is_refused() -> None:
    with pytest.raises(InvalidInput, match="urls: must name one broker"):
        Topology()


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"trusted_hosts": [""]}, InvalidInput),
        ({"trusted_hosts": 5}, InvalidInput),
        ({"probe_interval": "often"}, TypeError),
    ],
)
def test_what_fails_when_the_control_plane_starts_reaches_who_made_the_topology(
    options: dict[str, Any], problem: type[Exception]
) -> None:
    before = threading.active_count()
    with pytest.raises(problem):
        Topology("amqp://127.0.0.1:1/", options=TopologyOptions(**options))
    assert threading.active_count() == before
