"""What a caller sees, as plain values that can be compared and kept as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Value = None | bool | int | str | list["Value"] | dict[str, "Value"]
Transcript = dict[str, Value]

HANGS = "hangs"
GENERATED = "<generated>"
OWN_CHANNEL = "callback got the caller's channel"


def attempt(call: Callable[[], Value]) -> Value:
    """What a call gives, what it raises, or that it hangs."""
    try:
        return call()
    except TimeoutError:
        return HANGS
    except Exception as error:
        return failure(error)


def failure(error: BaseException) -> Value:
    """An exception as `{"raises": its type, "with": its plain arguments}`."""
    arguments: list[Value] = [_plain(argument) for argument in error.args]
    return {"raises": type(error).__name__, "with": arguments}


def answer(frame: Any) -> Value:
    """A broker's answer: its name, and the count it carries if any. For pika's and pamqp's frames.

    A pika frame of a method that was called with nowait, or a call without an answer, is None.
    """
    if frame is None:
        return None
    method = getattr(frame, "method", frame)
    name = getattr(method, "NAME", None) or str(method.name)
    count = getattr(method, "message_count", None)
    return name if count is None else {name: int(count)}


def declared(method: Any) -> Value:
    return {
        "queue": str(method.queue),
        "messages": int(method.message_count),
        "consumers": int(method.consumer_count),
    }


def message(method: Any, properties: Any, body: bytes) -> dict[str, Value]:
    """A message as pika hands it out: delivered, fetched or returned."""
    seen: dict[str, Value] = {"method": type(method).__name__}
    for name in (
        "consumer_tag",
        "delivery_tag",
        "redelivered",
        "message_count",
        "reply_code",
        "reply_text",
        "exchange",
        "routing_key",
    ):
        if hasattr(method, name):
            seen[name] = getattr(method, name)
    seen["headers"] = headers(properties.headers)
    seen["content_type"] = properties.content_type
    seen["correlation_id"] = properties.correlation_id
    seen["delivery_mode"] = properties.delivery_mode
    seen["body"] = body.decode()
    return seen


def sent(result: Value, given: Mapping[str, Any], afterwards: Mapping[str, Any] | None) -> Value:
    """What publishing gave; the application's own table of headers must be as it was."""
    if dict(afterwards or {}) == dict(given):
        return result
    return {"result": result, "the application's headers became": headers(afterwards)}


def only(seen: Value, *names: str) -> Value:
    """These fields of a message; anything that is not a message as it is."""
    return {name: seen[name] for name in names} if isinstance(seen, dict) and names else seen


def normalised(value: Value, replacements: Mapping[str, str]) -> Value:
    """The value with node names and such replaced wherever they stand in a string."""
    if isinstance(value, str):
        for found, replacement in replacements.items():
            value = value.replace(found, replacement)
        return value
    if isinstance(value, list):
        return [normalised(item, replacements) for item in value]
    if isinstance(value, dict):
        return {
            str(normalised(key, replacements)): normalised(item, replacements)
            for key, item in value.items()
        }
    return value


def listed(values: Iterable[Value]) -> Value:
    return list(values)


def headers(table: Mapping[str, Any] | None) -> Value:
    return {name: _plain(item) for name, item in sorted((table or {}).items())}


def _plain(item: object) -> Value:
    if item is None or isinstance(item, bool | int | str):
        return item
    if isinstance(item, bytes):
        return item.decode()
    if isinstance(item, list | tuple):
        return [_plain(part) for part in item]
    return type(item).__name__
