"""Where to begin and to end reading, as the options `startingOffsets` and `endingOffsets` say it.

    earliest                                    the first message there is
    latest                                      after the last message there is
    2026-01-31T12:00:00Z                        the first message stored at that time or later
    {"invoices-0": 17, "invoices-1": "latest"}  each stream by itself: an offset or one of the above

An end is not read itself: 17 to 20 are three offsets. An object must name every stream that is
read, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TypeAlias

from spark.option_values import BadOption, parse_json_object

_MAX_OFFSET = 2**63 - 1


class Place(Enum):
    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True)
class Time:
    """A time, in milliseconds since 1970, as streams count it."""

    milliseconds: int


Position: TypeAlias = Place | Time | int


@dataclass(frozen=True)
class Positions:
    """One position for all streams, or one for each."""

    option: str
    everywhere: Position | None = None
    by_stream: tuple[tuple[str, Position], ...] = ()

    @classmethod
    def parse(cls, option: str, text: str) -> Positions:
        if not text.startswith("{"):
            return cls(option, everywhere=_position(option, text))
        pairs = parse_json_object(option, text).items()
        return cls(option, by_stream=tuple((name, _position(option, at)) for name, at in pairs))

    def for_streams(self, streams: Iterable[str]) -> dict[str, Position]:
        """The position in each of these streams."""
        if self.everywhere is not None:
            return dict.fromkeys(streams, self.everywhere)
        wanted, given = list(streams), dict(self.by_stream)
        missing = [name for name in wanted if name not in given]
        unknown = [name for name in given if name not in wanted]
        if unknown:
            raise BadOption(self.option, f"must name only {_few(wanted)}", _few(unknown))
        if missing:
            rule = f"must name every stream; {_few(missing)} missing"
            raise BadOption(self.option, rule, _few(list(given)))
        return {name: given[name] for name in wanted}


def resolve(
    position: Position, first: int, end: int, offset_at: Callable[[int], int | None]
) -> int:
    """The offset that `position` means in a stream that begins at `first` and ends before `end`.

    A time later than all that is stored means the end: what comes next is later still.
    """
    if position is Place.EARLIEST:
        return first
    if position is Place.LATEST:
        return end
    if isinstance(position, Time):
        found = offset_at(position.milliseconds)
        return end if found is None else found
    assert isinstance(position, int)
    return position


def _position(option: str, value: object) -> Position:
    rule = "must be earliest, latest, a time with its zone (2026-01-31T12:00:00Z), or a JSON object"
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_OFFSET:
        return value
    if not isinstance(value, str):
        raise BadOption(option, f"{rule} from streams to such or to offsets from 0", value)
    if value.lower() in ("earliest", "latest"):
        return Place(value.lower())
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        raise BadOption(option, rule, value) from None
    if time.tzinfo is None:
        raise BadOption(option, rule, value)
    return Time(max(0, round(time.timestamp() * 1000)))


def _few(names: list[str], most: int = 5) -> str:
    """
    >>> _few(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "nothing"
