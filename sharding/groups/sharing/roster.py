"""What workers of a group tell each other, and what one has heard of the others. Pure.

An announcement is a hint: it may be lost, late or forged, and decides nothing that the broker's
locks do not decide again. One that can't be read is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sharding.errors import InvalidInput, WarrenError
from sharding.maps.json_fields import JsonObject, check_format, parse

FORMAT = 1
MAX_BYTES = 1024 * 1024
"""Names of 4,000 shards of the longest kind; more is no announcement of ours."""


class Kind(StrEnum):
    HELLO = "hello"
    """I am new: tell me what you hold."""
    HERE = "here"
    BYE = "bye"
    """I take nothing more, and give up what I still hold."""


@dataclass(frozen=True, slots=True)
class Announcement:
    worker: str
    kind: Kind
    shards: frozenset[str] = frozenset()

    def dumps(self) -> bytes:
        value = {
            "format": FORMAT,
            "worker": self.worker,
            "kind": str(self.kind),
            "shards": sorted(self.shards),
        }
        return json.dumps(value).encode()

    @classmethod
    def loads(cls, body: bytes) -> Announcement:
        """Raises a `WarrenError` if it is none."""
        if len(body) > MAX_BYTES:
            raise InvalidInput("announcement", f"must be at most {MAX_BYTES} bytes", len(body))
        fields = JsonObject(parse(body, "announcement"), "announcement")
        check_format(fields, FORMAT, "announcement")
        worker, kind, shards = fields.text("worker"), fields.text("kind"), fields.array("shards")
        fields.close()
        if kind not in set(Kind):
            raise InvalidInput("announcement.kind", "must be one of ours", kind)
        if not all(isinstance(shard, str) for shard in shards):
            raise InvalidInput("announcement.shards", "must be names", shards)
        return cls(worker, Kind(kind), frozenset(shards))


@dataclass(frozen=True, slots=True)
class _Member:
    shards: frozenset[str]
    first_heard: float
    last_heard: float
    leaves: bool = False


class Roster:
    """The other workers. A new one counts after `settle_time`, so that several which come together
    cause one move and not one each; a silent one counts until `member_timeout`. One that says
    goodbye has no share any more, and what it holds is its own until it is given up.
    """

    def __init__(self, me: str, settle_time: float, member_timeout: float) -> None:
        self._me = me
        self._settle_time = settle_time
        self._member_timeout = member_timeout
        self._members: dict[str, _Member] = {}
        self.heard_myself: float | None = None
        """When the last announcement of its own came back: proof that it hears at all."""

    def hear(self, body: bytes, now: float) -> bool:
        """Note an announcement; whether its sender wants to hear of us at once."""
        try:
            heard = Announcement.loads(body)
        except WarrenError:
            return False
        if heard.worker == self._me:
            self.heard_myself = now
            return False
        known = self._members.get(heard.worker)
        leaves = heard.kind is Kind.BYE
        if leaves and not heard.shards:
            self._members.pop(heard.worker, None)
            return False
        first = known.first_heard if known else now
        self._members[heard.worker] = _Member(heard.shards, first, now, leaves)
        return heard.kind is Kind.HELLO or known is None

    def held_by_others(self, now: float) -> dict[str, frozenset[str]]:
        """Who is there to stay, and holds what."""
        return {
            worker: member.shards
            for worker, member in self._heard_of(now).items()
            # One that holds something is no newcomer, even if it is new to us.
            if (member.shards or now - member.first_heard >= self._settle_time)
            and not member.leaves
        }

    def held_by_leaving(self, now: float) -> frozenset[str]:
        """What those who said goodbye have not given up yet."""
        members = self._heard_of(now).values()
        return frozenset[str]().union(*(member.shards for member in members if member.leaves))

    def _heard_of(self, now: float) -> Mapping[str, _Member]:
        self._members = {
            worker: member
            for worker, member in self._members.items()
            if now - member.last_heard < self._member_timeout
        }
        return self._members
