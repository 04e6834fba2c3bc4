"""Reading JSON that somebody else wrote: every value is checked, every error names its field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from sharding.errors import InvalidInput, UnsupportedFormat, shown

Scalar: TypeAlias = str | int | float | bool
T = TypeVar("T")

INT64 = range(-(2**63), 2**63)


class FrozenMapping(Mapping[str, Scalar]):
    """A mapping that can't be changed, and can be hashed, compared and pickled."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Scalar]) -> None:
        self._items = dict(sorted(items.items()))

    def __getitem__(self, key: str) -> Scalar:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


class JsonObject:
    """One JSON object, read field by field; `close()` refuses what nobody asked for."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise InvalidInput(where, "must be a JSON object", value)
        self._fields: dict[str, Any] = dict(value)
        self._where = where

    def text(self, name: str) -> str:
        return self._take(name, str, "text")

    def text_or_null(self, name: str) -> str | None:
        if self._fields.get(name, "") is not None:
            return self.text(name)
        return self._fields.pop(name)  # type: ignore[no-any-return]

    def integer(self, name: str) -> int:
        return self._take(name, int, "a whole number")

    def flag(self, name: str) -> bool:
        return self._take(name, bool, "true or false")

    def array(self, name: str) -> list[Any]:
        return self._take(name, list, "a JSON array")

    def mapping(self, name: str) -> dict[str, Any]:
        return self._take(name, dict, "a JSON object")

    def optional_array(self, name: str) -> list[Any] | None:
        return self.array(name) if name in self._fields else None

    def optional_mapping(self, name: str) -> dict[str, Any] | None:
        return self.mapping(name) if name in self._fields else None

    def left(self) -> dict[str, Any]:
        """What nobody asked for."""
        return dict(self._fields)

    def close(self) -> None:
        if self._fields:
            raise InvalidInput(
                named(self._where, min(self._fields)), "is not a field of this format", self._fields
            )

    def _take(self, name: str, kind: type[T], described: str) -> T:
        field = f"{self._where}.{name}"
        if name not in self._fields:
            raise InvalidInput(field, f"must be there, as {described}", sorted(self._fields))
        value = self._fields.pop(name)
        # bool is a subclass of int, but true is not a number of shards.
        if not isinstance(value, kind) or (kind is int and not is_whole(value)):
            raise InvalidInput(field, f"must be {described}", value)
        return value


def named(where: str, name: str) -> str:
    """A field with a name that others chose, for a message: it may be of any length, and of lines
    and colours that a terminal or a log would obey."""
    return f"{where}.{name if name.isprintable() and len(name) < 80 else shown(name)}"


def parse(text: str | bytes, where: str) -> object:
    """The value of a JSON text; what is cut off or is not JSON is named by `where`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", type(error).__name__)
        position = getattr(error, "pos", 0)
        rule = f"must be whole JSON ({reason} at character {position} of {len(text)})"
        tail = text[-20:] if isinstance(text, str) else bytes(text[-20:])
        raise InvalidInput(where, rule, tail) from None


MAX_DEPTH = 20


def parse_strictly(body: bytes, where: str) -> object:
    """The value of a JSON text that programs in other languages have to read just so.

    UTF-8 without a mark, no name twice in an object, no number that JSON does not know or that no
    double holds, no half of a surrogate pair (some parsers refuse it, some put two of them
    together), and no more than `MAX_DEPTH` levels: how many a parser bears is its own affair.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name stands twice in an object")
        return found

    def short(text: str) -> int:
        # How many digits Python reads is a setting, so a long number is not tried.
        if len(text) > len(str(INT64.start)) or int(text) not in INT64:
            raise ValueError(f"{text[:20]}… does not fit in 64 bits")
        return int(text)

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"{text} is no number")
        return number

    try:
        written = body.decode("utf-8")
        value = json.loads(
            written,
            object_pairs_hook=once,
            parse_constant=finite,
            parse_float=finite,
            parse_int=short,
        )
        if _depth(value, MAX_DEPTH + 1) > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels")
        if "\\u" in written and not _is_all_text(value):
            raise ValueError("half of a surrogate pair")
    except (ValueError, RecursionError) as error:
        said = str(error) or type(error).__name__
        raise InvalidInput(where, f"must be whole JSON ({said})", bytes(body[-20:])) from None
    return value


def _depth(value: object, most: int) -> int:
    """How many levels of objects and arrays there are, counted up to `most`."""
    if not isinstance(value, dict | list) or not most:
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(each, most - 1) for each in inner), default=0)


def _is_all_text(value: object) -> bool:
    """Whether UTF-8 can express all text in a value, the names of its fields too."""
    if isinstance(value, dict):
        return all(is_text(name) and _is_all_text(each) for name, each in value.items())
    if isinstance(value, list):
        return all(map(_is_all_text, value))
    return not isinstance(value, str) or is_text(value)


def check_format(fields: JsonObject, supported: int, where: str) -> None:
    """Take the field `format` and refuse any version but the one supported."""
    found = fields.integer("format")
    if found < 1:
        raise InvalidInput(f"{where}.format", "must be a whole number from 1", found)
    if found != supported:
        raise UnsupportedFormat(
            f"{where}.format: this Warren reads format {supported}, found {found}; "
            "upgrade rabbit-warren here, or write the data with this version"
        )


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    """Whether `value` is text that UTF-8 can express: no half of a surrogate pair."""
    return isinstance(value, str) and not any(
        "\ud800" <= character <= "\udfff" for character in value
    )


def check_arguments(field: str, arguments: Mapping[str, Any]) -> FrozenMapping:
    """Queue arguments as AMQP can carry them: short names, scalar values."""
    if not isinstance(arguments, Mapping):
        raise InvalidInput(field, "must map names to values", arguments)
    for name, value in arguments.items():
        if not is_text(name) or not 1 <= len(name.encode()) <= 255:
            raise InvalidInput(field, "must have names of 1 to 255 bytes of UTF-8", name)
        if isinstance(value, str):
            if not is_text(value):
                raise InvalidInput(named(field, name), "must be text that UTF-8 can express", value)
        elif not isinstance(value, int | float):
            raise InvalidInput(named(field, name), "must be text, a number or true/false", value)
        elif isinstance(value, int) and value not in INT64:
            raise InvalidInput(named(field, name), "must fit in 64 bits", value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise InvalidInput(named(field, name), "must be a finite number", value)
    return FrozenMapping(arguments)
