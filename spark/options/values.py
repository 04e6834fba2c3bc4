"""Spark's options, which are all text, as typed values; every mistake says option, rule and found.

    values = OptionValues(options, "reading")
    stream = values.text("stream")
    limit = values.whole("maxOffsetsPerTrigger", least=1)
    values.refuse_unknown()

Names are compared without regard to case, as Spark does. A name that is asked for is a known one,
so ask for all of them, whether they are needed or not, before `refuse_unknown()`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar, overload

from sharding.errors import InvalidInput

_T = TypeVar("_T")
_TRUE_FALSE = {"true": True, "false": False}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)


class BadOption(InvalidInput):
    """An option of a Spark source or sink breaks a rule."""

    def __init__(self, field: str, rule: str, found: object) -> None:
        super().__init__(f"option {field!r}" if " " not in field else field, rule, found)


class Hidden:
    """Stands in an error for a value that must not be shown."""

    def __repr__(self) -> str:
        return "a value that is not shown"


class OptionValues:
    """The options of one reader or writer. Its own repr shows names only: values may be secrets."""

    def __init__(self, options: Mapping[str, str], role: str) -> None:
        self._role = role
        self._given = {name.lower(): (name, value) for name, value in options.items()}
        self._known: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"OptionValues({sorted(name for name, _ in self._given.values())}, {self._role!r})"

    def given(self, name: str) -> bool:
        return self._raw(name) is not None

    @overload
    def text(self, name: str) -> str | None: ...
    @overload
    def text(self, name: str, default: str) -> str: ...
    def text(self, name: str, default: str | None = None) -> str | None:
        """The text without the space around it; empty text is an error."""
        raw = self._raw(name)
        if raw is None:
            return default
        if not raw.strip():
            raise BadOption(name, "must not be empty", raw)
        return raw.strip()

    def secret(self, name: str) -> str | None:
        """The text as it is: a password may begin with a space. It is never shown in an error."""
        raw = self._raw(name)
        if raw == "":
            raise BadOption(name, "must not be empty", Hidden())
        return raw

    def choice(self, name: str, choices: Mapping[str, _T], default: _T) -> _T:
        """One of a few words, in any case."""
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in choices:
            raise BadOption(name, f"must be {' or '.join(choices)}", text)
        return choices[text.lower()]

    def boolean(self, name: str, default: bool) -> bool:
        return self.choice(name, _TRUE_FALSE, default)

    @overload
    def whole(
        self, name: str, default: None = None, *, least: int = ..., most: int | None = ...
    ) -> int | None: ...
    @overload
    def whole(
        self, name: str, default: int, *, least: int = ..., most: int | None = ...
    ) -> int: ...
    def whole(
        self, name: str, default: int | None = None, *, least: int = 0, most: int | None = None
    ) -> int | None:
        """A whole number between `least` and `most`, both included."""
        text = self.text(name)
        if text is None:
            return default
        rule = f"must be a whole number of at least {least}"
        rule += f" and at most {most}" if most is not None else ""
        number = int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None
        if number is None or number < least or (most is not None and number > most):
            raise BadOption(name, rule, text)
        return number

    @overload
    def seconds(self, name: str, default: None = None) -> float | None: ...
    @overload
    def seconds(self, name: str, default: float) -> float: ...
    def seconds(self, name: str, default: float | None = None) -> float | None:
        """A time such as `500ms`, `30s`, `15m`, `1h`, longer than nothing."""
        text = self.text(name)
        if text is None:
            return default
        match = _DURATION.fullmatch(text)
        unit = _SECONDS.get(match[2].lower()) if match else None
        if match is None or unit is None or float(match[1]) == 0:
            raise BadOption(name, "must be a time with its unit (500ms, 30s, 15m, 1h)", text)
        return float(match[1]) * unit

    def names(self, name: str, *, shown: bool = True) -> tuple[str, ...]:
        """A list with commas between; nothing given is the empty list. No name may come twice."""
        text = self.text(name)
        if text is None:
            return ()
        parts = tuple(part.strip() for part in text.split(","))
        if not all(parts) or len(set(parts)) < len(parts):
            found = text if shown else Hidden()
            raise BadOption(name, "must be different names with commas between", found)
        return parts

    def json_object(self, name: str) -> Mapping[str, object] | None:
        """A JSON object; the same key twice is an error."""
        text = self.text(name)
        return None if text is None else parse_json_object(name, text)

    def one_of(self, *names: str) -> str:
        """Which of these options is given; exactly one must be."""
        given = [name for name in names if self.given(name)]
        if len(given) != 1:
            found: object = given or "none of them"
            raise BadOption(f"options for {self._role}", f"must have {_either(names)}", found)
        return given[0]

    def at_most_one_of(self, *names: str) -> str | None:
        """Which of these options is given, if any; two of them are an error."""
        given = [name for name in names if self.given(name)]
        if len(given) > 1:
            rule = f"can't have more than one of {', '.join(names)}"
            raise BadOption(f"options for {self._role}", rule, given)
        return given[0] if given else None

    def refuse_unknown(self) -> None:
        """Raise for an option that nobody asked for: a slip of the pen must not be passed over."""
        for lower, (name, _) in sorted(self._given.items()):
            if lower not in self._known:
                raise BadOption(f"options for {self._role}", self._rule_for(lower), name)

    def _rule_for(self, unknown: str) -> str:
        near = difflib.get_close_matches(unknown, self._known, n=1)
        if near:
            return f"have no such name; did you mean {self._known[near[0]]!r}?"
        return f"must be among {', '.join(sorted(self._known.values(), key=str.lower))}"

    def _raw(self, name: str) -> str | None:
        self._known[name.lower()] = name
        given = self._given.get(name.lower())
        return None if given is None else given[1]


def parse_json_object(name: str, text: str) -> Mapping[str, object]:
    """The JSON object that the option `name` holds."""
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except ValueError as problem:
        raise BadOption(name, f"must be a JSON object ({problem})", text) from None
    if not isinstance(value, dict):
        raise BadOption(name, "must be a JSON object", text)
    return value


def _without_repeats(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} comes twice")
        found[key] = value
    return found


def _either(names: Iterable[str]) -> str:
    *most, last = names
    return f"exactly one of {', '.join(most)} or {last}" if most else last
