"""How a connection is opened: who we are, who the broker is, and what both agree on. Pure.

The rules, in the order of the steps:

1. PeerProperties: both sides say what they are. The broker's version decides whether it can be
   asked for the versions of its commands at the end.
2. SaslHandshake: the broker lists its mechanisms. If ours is not among them, that is the end:
   nothing secret has been sent.
3. SaslAuthenticate: the one frame with a secret in it. The three mechanisms here take one step, so
   a challenge is a refusal.
4. Tune: the broker proposes a frame size and a heartbeat; of each, the lower of both sides holds,
   and 0 means that a side does not care. It may come before or after we ask for it, but only here.
5. Open: the virtual host. The answer says which node we have reached.
6. ExchangeCommandVersions, where the broker knows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sharding.errors import InvalidInput
from sharding.stream.errors import ProtocolError, refusal
from sharding.stream.protocol import wire
from sharding.stream.protocol.answers import (
    Answer,
    CommandVersionsAnswer,
    MechanismsAnswer,
    PropertiesAnswer,
    SaslAnswer,
    VersionRange,
)
from sharding.stream.protocol.commands import Request
from sharding.stream.protocol.constants import Broker, Code, Key
from sharding.stream.protocol.events import Opened
from sharding.stream.protocol.versions import FIRST_THAT_TELLS, OURS, CommandVersions, parse_version
from sharding.stream.protocol.wire import U16

MECHANISMS = ("PLAIN", "EXTERNAL", "ANONYMOUS")


@dataclass(frozen=True)
class Login:
    """Who connects, and to which virtual host."""

    user: str = "guest"
    password: str = field(default="guest", repr=False)
    mechanism: str = "PLAIN"
    """PLAIN; EXTERNAL, where the TLS certificate says who we are; or ANONYMOUS."""
    vhost: str = "/"

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            rule = f"must be one of {', '.join(MECHANISMS)}"
            raise InvalidInput("mechanism", rule, self.mechanism)
        for name, value in (("user", self.user), ("password", self.password)):
            if "\0" in value:  # PLAIN separates the two with it
                raise InvalidInput(name, "must not hold a NUL character", "one")

    def secret(self) -> bytes:
        """What is sent to prove it."""
        if self.mechanism == "PLAIN":
            return f"\0{self.user}\0{self.password}".encode()
        return b""


@dataclass(frozen=True)
class PeerProperties(Request[PropertiesAnswer], answer=PropertiesAnswer):
    key = Key.PEER_PROPERTIES
    properties: Mapping[str, str]

    def body(self) -> bytes:
        return wire.string_map("properties", self.properties)


@dataclass(frozen=True)
class SaslHandshake(Request[MechanismsAnswer], answer=MechanismsAnswer):
    key = Key.SASL_HANDSHAKE

    def body(self) -> bytes:
        return b""


@dataclass(frozen=True)
class SaslAuthenticate(Request[SaslAnswer], answer=SaslAnswer):
    key = Key.SASL_AUTHENTICATE
    mechanism: str
    secret: bytes = field(repr=False)
    user: str

    @property
    def subject(self) -> str:
        return self.user if self.mechanism == "PLAIN" else self.mechanism

    def body(self) -> bytes:
        return wire.string("mechanism", self.mechanism) + wire.byte_array(self.secret)


@dataclass(frozen=True)
class Open(Request[PropertiesAnswer], answer=PropertiesAnswer, about="vhost"):
    key = Key.OPEN
    vhost: str

    def body(self) -> bytes:
        return wire.string("virtual host", self.vhost)


@dataclass(frozen=True)
class ExchangeCommandVersions(Request[CommandVersionsAnswer], answer=CommandVersionsAnswer):
    key = Key.EXCHANGE_COMMAND_VERSIONS
    versions: tuple[VersionRange, ...]

    def body(self) -> bytes:
        items = (b"".join(map(U16.pack, one)) for one in self.versions)
        return wire.U32.pack(len(self.versions)) + b"".join(items)


@dataclass(frozen=True)
class Close(Request[Answer]):
    """Ends a connection in order."""

    key = Key.CLOSE
    code: int = Code.OK
    reason: str = "OK"

    def body(self) -> bytes:
        return U16.pack(self.code) + wire.string("reason", self.reason)


class Handshake:
    """Gives the next request for each answer, until `result` is there."""

    def __init__(
        self, login: Login, properties: Mapping[str, str], frame_max: int, heartbeat: float
    ) -> None:
        self._login = login
        self._properties = properties
        self.frame_max = frame_max
        self.heartbeat = math.ceil(heartbeat)
        self._awaits_tune = False
        self._server_version: tuple[int, ...] = ()
        self._node: Broker | None = None
        self.result: Opened | None = None

    def first(self) -> Request[Any]:
        return PeerProperties(self._properties)

    def answered(self, request: Request[Any], answer: Answer) -> Request[Any] | None:
        """What to send next; None if it is the broker's turn, or all is done."""
        if answer.code not in request.accepted_codes:
            raise refusal(request.name, answer.code, request.subject)
        match answer:
            case PropertiesAnswer() if isinstance(request, PeerProperties):
                self._server_version = parse_version(answer.properties.get("version", ""))
                return SaslHandshake()
            case MechanismsAnswer():
                return self._authenticate(answer.mechanisms)
            case SaslAnswer():
                self._awaits_tune = True
                return None
            case PropertiesAnswer():
                self._node = _node(answer.properties)
                if self._server_version >= FIRST_THAT_TELLS:
                    return ExchangeCommandVersions(OURS)
                self._finish(CommandVersions())
            case CommandVersionsAnswer():
                self._finish(CommandVersions(answer.versions))
        return None

    def _authenticate(self, offered: tuple[str, ...]) -> Request[Any]:
        mechanism = self._login.mechanism
        if mechanism not in offered:
            subject = f"{mechanism}, where {', '.join(offered) or 'nothing'} is offered"
            raise refusal("SaslHandshake", Code.SASL_MECHANISM_UNSUPPORTED, subject)
        return SaslAuthenticate(mechanism, self._login.secret(), self._login.user)

    def tuned(self, frame_max: int, heartbeat: int) -> Request[Any]:
        """The broker proposes; `frame_max` and `heartbeat` are then what holds, and to be sent."""
        if not self._awaits_tune:
            raise ProtocolError("Tune came where it has no place")
        self._awaits_tune = False
        self.frame_max = _lower(self.frame_max, frame_max)
        self.heartbeat = _lower(self.heartbeat, heartbeat)
        return Open(self._login.vhost)

    def _finish(self, commands: CommandVersions) -> None:
        self.result = Opened(
            self._node, self._server_version, commands, self.frame_max, self.heartbeat
        )


def _lower(ours: int, theirs: int) -> int:
    return min(ours, theirs) if ours and theirs else max(ours, theirs)


def _node(properties: Mapping[str, str]) -> Broker | None:
    host, port = properties.get("advertised_host"), properties.get("advertised_port")
    if not host or not port:
        return None
    if not (port.isascii() and port.isdecimal() and len(port) <= 5):
        raise ProtocolError("the advertised port of the node is not a number")
    return Broker(host, int(port))
