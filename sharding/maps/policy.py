"""A policy says which logical queues are sharded, and how: the plugin's, with more to say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from sharding.errors import InvalidInput, UnsupportedFormat
from sharding.maps.json_fields import (
    INT64,
    FrozenMapping,
    JsonObject,
    Scalar,
    check_arguments,
    is_text,
    is_whole,
)
from sharding.maps.naming import MAX_NAME_BYTES, check_name
from sharding.maps.slots import MAX_SHARDS


class OnUnavailable(StrEnum):
    """What happens to the keys of a shard whose node is away."""

    FAIL = "fail"
    """They fail with a retryable error until it is back. Order per key is kept."""
    MOVE = "move"
    """A new map gives them to other shards, for every client, until it is back."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How the logical queues whose name matches `pattern` are sharded.

    >>> policy = Policy("pictures", pattern="^images", shards_per_node=2)
    >>> policy.matches("images.large"), policy.matches("old-images")
    (True, False)
    """

    name: str
    pattern: str
    """A regular expression, found anywhere in the name unless anchored, as in RabbitMQ."""
    shards_per_node: int
    priority: int = 0
    routing_key: str | None = None
    """The plugin's `routing-key`: taken, so that its policies can be copied, and bound nowhere."""
    durable: bool = True
    queue_arguments: Mapping[str, Scalar] = field(default_factory=lambda: FrozenMapping({}))
    on_unavailable: OnUnavailable = OnUnavailable.FAIL

    def __post_init__(self) -> None:
        check_name("policy.name", self.name)
        _check_pattern(self.pattern)
        _check_whole("policy.shards_per_node", self.shards_per_node)
        if not 1 <= self.shards_per_node <= MAX_SHARDS:
            raise InvalidInput(
                "policy.shards_per_node", f"must be 1 to {MAX_SHARDS}", self.shards_per_node
            )
        # How many digits Python reads is a setting of the process, so readers of the map log would
        # judge a longer number differently.
        _check_whole("policy.priority", self.priority)
        if self.priority not in INT64:
            raise InvalidInput("policy.priority", "must fit in 64 bits", self.priority)
        if self.routing_key is not None:
            _check_routing_key(self.routing_key)
        if not isinstance(self.durable, bool):
            raise InvalidInput("policy.durable", "must be true or false", self.durable)
        arguments = check_arguments("policy.queue_arguments", self.queue_arguments)
        object.__setattr__(self, "queue_arguments", arguments)
        object.__setattr__(self, "on_unavailable", _on_unavailable(self.on_unavailable))

    @classmethod
    def exactly(
        cls, logical: str, shards_per_node: int, *, name: str, durable: bool = True
    ) -> Policy:
        """A policy for one logical queue and no other."""
        return cls(name, rf"^{re.escape(logical)}\Z", shards_per_node, durable=durable)

    def matches(self, logical: str) -> bool:
        return compiled_pattern(self.pattern).search(logical) is not None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "pattern": self.pattern,
            "shards_per_node": self.shards_per_node,
            "priority": self.priority,
            "routing_key": self.routing_key,
            "durable": self.durable,
            "queue_arguments": dict(self.queue_arguments),
            "on_unavailable": str(self.on_unavailable),
        }

    @classmethod
    def from_json(cls, value: object, where: str = "policy") -> Policy:
        fields = JsonObject(value, where)
        pattern = fields.text("pattern")
        _refuse_to_judge_patterns(pattern, where)
        policy = cls(
            name=fields.text("name"),
            pattern=pattern,
            shards_per_node=fields.integer("shards_per_node"),
            priority=fields.integer("priority"),
            routing_key=fields.text_or_null("routing_key"),
            durable=fields.flag("durable"),
            queue_arguments=fields.mapping("queue_arguments"),
            on_unavailable=_on_unavailable(fields.text("on_unavailable")),
        )
        fields.close()
        return policy


def policy_for(logical: str, policies: Iterable[Policy]) -> Policy | None:
    """The policy in force: of those that match, the highest priority, then the smallest name."""
    matching = [policy for policy in policies if policy.matches(logical)]
    return min(matching, key=lambda policy: (-policy.priority, policy.name), default=None)


@lru_cache(maxsize=256)
def compiled_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled pattern, or an error that says where it goes wrong."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        rule = f"must be a regular expression that compiles ({error})"
        raise InvalidInput("policy.pattern", rule, pattern) from None


# Characters, `.`, sets, groups without a name, `|`, `*`, `+`, `?`, `{m,n}`, `^`, `$`, and `\\Z` at
# the end, which `exactly` writes. That it compiles is checked elsewhere.
_ESCAPED = r"\\[^0-9A-Za-z]"
_IN_A_SET = rf"(?:{_ESCAPED}|(?!&&|\|\||--|~~)[^\\\[\]])"
_PORTABLE = re.compile(
    rf"(?:(?:{_ESCAPED}|\[\^?{_IN_A_SET}+\]|\((?!\?)|\(\?:|\}}(?!\+)|[^\\\[(*+?}}])(?:[*+?]\??)?)*"
    r"(?:\\Z)?"
)


def check_portable(pattern: str) -> str:
    """Return a pattern that programs in other languages understand as Python does, else raise.

    Only who sets a policy asks this: what lies in the log is what Python makes of it.
    """
    if not _PORTABLE.fullmatch(pattern):
        rule = (
            "must mean the same in all languages: characters (with a backslash before what is no "
            "letter or digit), '.', sets, groups, '|', '*', '+', '?', '{m,n}', '^' and '$', but no "
            "\\d, \\b, flags or looking ahead"
        )
        raise InvalidInput("policy.pattern", rule, pattern)
    return pattern


def _check_pattern(pattern: str) -> None:
    if not is_text(pattern) or not pattern:
        raise InvalidInput("policy.pattern", "must be a regular expression, not empty", pattern)
    compiled_pattern(pattern)


def _refuse_to_judge_patterns(pattern: str, where: str) -> None:
    """Stop at a written pattern that this Python can't compile: another version may be able to.

    A reader of the map log that called the record void would part from readers that do not.
    """
    if is_text(pattern) and pattern:
        try:
            compiled_pattern(pattern)
        except InvalidInput as error:
            raise UnsupportedFormat(
                f"{where}.pattern: {error.rule} in this Python; upgrade it to the writer's version"
            ) from None


def _check_whole(field_name: str, value: object) -> None:
    if not is_whole(value):
        raise InvalidInput(field_name, "must be a whole number", value)


def _check_routing_key(routing_key: str) -> None:
    # Unlike a name, a routing key may be empty.
    if routing_key:
        check_name("policy.routing_key", routing_key)
    elif not isinstance(routing_key, str):
        raise InvalidInput(
            "policy.routing_key", f"must be text of at most {MAX_NAME_BYTES} bytes", routing_key
        )


def _on_unavailable(value: str) -> OnUnavailable:
    try:
        return OnUnavailable(value)
    except ValueError:
        rule = "must be " + " or ".join(repr(str(choice)) for choice in OnUnavailable)
        raise InvalidInput("policy.on_unavailable", rule, value) from None
