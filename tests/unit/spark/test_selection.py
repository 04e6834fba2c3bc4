"""Which streams are read, and what is said of those that do not exist."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sharding.cluster.management import Management, NoAnswer
from sharding.errors import RemoteError, is_retryable
from sharding.stream.errors import StreamNotFound
from spark.options.connect import ConnectOptions
from spark.options.read import Selection, listed_streams
from spark.options.values import BadOption, OptionValues


class FakeCluster:
    def __init__(self, streams: Sequence[str] = (), remembered_missing: Sequence[str] = ()) -> None:
        self.streams = set(streams)
        self.remembered_missing = set(remembered_missing)
        self.asked: list[str] = []

    def partitions(self, super_stream: str) -> tuple[str, ...]:
        if super_stream != "invoices":
            raise StreamNotFound("Partitions", 2, super_stream)
        return ("invoices-emea", "invoices-amer")

    def route(self, stream: str) -> object:
        if stream in self.remembered_missing or stream not in self.streams:
            raise StreamNotFound("Metadata", 2, stream)
        return object()

    def exists(self, stream: str) -> bool:
        self.asked.append(stream)
        return stream in self.streams


def select(**options: str) -> Selection:
    return Selection.parse(OptionValues(options, "reading"))


def find(selection: Selection, cluster: FakeCluster, missing_ok: bool = False) -> dict[str, int]:
    return selection.find(cluster, lambda: ["b1", "a2", "a1", "xa1"], missing_ok=missing_ok)


def test_the_streams_of_a_super_stream_keep_their_order_and_numbers() -> None:
    found = find(select(superStream="invoices"), FakeCluster())
    assert list(found.items()) == [("invoices-emea", 0), ("invoices-amer", 1)]


def test_a_pattern_matches_whole_names() -> None:
    selection = select(streamPattern=r"a\d", managementUrl="http://h:15672/")
    assert find(selection, FakeCluster()) == {"a1": 0, "a2": 0}
    assert selection.management_url == "http://h:15672"


def test_several_streams_are_read_in_the_order_given() -> None:
    assert list(find(select(streams="b, a"), FakeCluster(["a", "b"]))) == ["b", "a"]


def test_what_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(BadOption, match=r"option 'superStream': .*; found 'nothing'"):
        find(select(superStream="nothing"), FakeCluster())
    with pytest.raises(BadOption, match="option 'streams': must exist; found 'b, c'"):
        find(select(streams="a,b,c"), FakeCluster(["a"]))


def test_a_stream_that_went_away_is_left_out_where_that_is_allowed() -> None:
    assert find(select(streams="a,b"), FakeCluster(["a"]), missing_ok=True) == {"a": 0}


def test_a_stream_that_was_missing_a_moment_ago_is_asked_for_again() -> None:
    cluster = FakeCluster(["a", "b"], remembered_missing=["b"])
    assert list(find(select(streams="a,b"), cluster)) == ["a", "b"]
    assert cluster.asked == ["b"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"streamPattern": "a.*"}, "needs managementUrl"),
        ({"streamPattern": "a(", "managementUrl": "http://h"}, "must be a regular expression"),
        ({"streamPattern": "a", "managementUrl": "h:1"}, "must begin with http://"),
        ({"streams": "a,,b"}, "different names"),
        ({"stream": " "}, "must not be empty"),
    ],
)
def test_a_selection_that_can_not_be_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        select(**options)


@pytest.mark.parametrize(
    ("status", "may_pass"), [(None, True), (500, True), (503, True), (401, False), (404, False)]
)
def test_a_management_api_that_is_away_for_a_moment_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, status: int | None, may_pass: bool
) -> None:
    """The restart of its node ended every running query over a pattern."""

    def fails(*_: object, **__: object) -> None:
        raise NoAnswer("GET …: no answer", status=status)

    monkeypatch.setattr(Management, "get", fails)
    options = ConnectOptions.parse(OptionValues({"uri": "rabbitmq-stream://h"}, "reading"))
    with pytest.raises(RemoteError) as caught:
        listed_streams(options, "http://h:15672")
    assert is_retryable(caught.value) == may_pass
