"""Starting and ending offsets mean what they say, and name every stream or none."""

from __future__ import annotations

import pytest

from spark.options.read import Place, Positions, Time, resolve
from spark.options.values import BadOption


def parse(text: str) -> Positions:
    return Positions.parse("startingOffsets", text)


def test_one_position_holds_for_all_streams() -> None:
    assert parse("Earliest").for_streams(["a", "b"]) == {"a": Place.EARLIEST, "b": Place.EARLIEST}


def test_each_stream_may_have_its_own() -> None:
    found = parse('{"b": "latest", "a": 17, "c": "1970-01-01T01:00:01+01:00"}')
    assert found.for_streams(["a", "b", "c"]) == {"a": 17, "b": Place.LATEST, "c": Time(1000)}
    assert list(found.for_streams(["a", "b", "c"])) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "z": 2}', "must name only a, b; found 'z'"),
        ('{"a": 1}', "must name every stream; b missing"),
        ("{}", "must name every stream; a, b missing"),
    ],
)
def test_a_stream_too_many_or_too_few_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadOption, match=said):
        parse(text).for_streams(["a", "b"])


@pytest.mark.parametrize(
    "text",
    [
        '{"a": -1}', '{"a": 9223372036854775808}', '{"a": true}', '{"a": 1.5}', '{"a": null}',
        '{"a": 1, "a": 2}', '{"a": "tomorrow"}', "2026-01-31T12:00:00", "17", "{", "[1]",
    ],
)  # fmt: skip
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match="startingOffsets"):
        parse(text)


def test_positions_become_offsets() -> None:
    def offset_at(timestamp_ms: int) -> int | None:
        return 14 if timestamp_ms < 500 else None

    def at(position: Place | Time | int) -> int:
        return resolve(position, 10, 20, offset_at)

    assert [at(Place.EARLIEST), at(Place.LATEST), at(12)] == [10, 20, 12]
    assert at(Time(400)) == 14
    assert at(Time(600)) == 20  # nothing is that late yet: what comes next will be
