"""What can go wrong with streams, as branches of Warren's one tree of errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sharding.errors import (
    LocalError,
    OutcomeUnknown,
    RemoteError,
    ShardUnavailable,
    TryLater,
    Unreachable,
)
from sharding.stream.protocol.constants import Broker, Code


class ProtocolError(RemoteError):
    """The peer broke the protocol, or a limit of ours; its connection is closed."""


class PeerNotTrusted(ProtocolError):
    """The peer's certificate is not accepted, or it does not speak TLS. No password was sent."""


class NotSupported(LocalError):
    """The broker is too old for the command; it was not sent."""


class ConnectionLost(Unreachable):
    """The connection ended before the answer came."""


class NoAnswerInTime(OutcomeUnknown, TimeoutError):
    """A request was sent, and no answer came before the deadline."""


class StreamRefused(RemoteError):
    """The broker answered a command with a code other than OK."""

    def __init__(self, command: str, code: int, subject: str = "") -> None:
        self.command = command
        self.code = code
        self.subject = subject
        of = f" of {subject!r}" if subject else ""
        super().__init__(f"{command}{of} was refused: {code_name(code)}{self._advice()}")

    def __reduce__(self) -> tuple[type[StreamRefused], tuple[str, int, str]]:
        return type(self), (self.command, self.code, self.subject)

    def _advice(self) -> str:
        return ""


class StreamNotFound(StreamRefused):
    """There is no such stream."""


class StreamExists(StreamRefused):
    """There is such a stream already."""


class StreamUnavailable(StreamRefused, ShardUnavailable):
    """The stream exists, but can't be used now or through this node."""


class PublishersBlocked(StreamUnavailable):
    """The node takes no publishers now, whatever their name, as under a disk alarm."""

    def _advice(self) -> str:
        return "; the node takes no publishers at all now, as while a disk alarm is on: make room"


class AuthenticationFailed(StreamRefused):
    """User, password or mechanism are not accepted."""


class AccessRefused(StreamRefused):
    """The user lacks a permission."""

    def _advice(self) -> str:
        right = _RIGHTS.get(self.command)
        return f"; the user needs the right to {right}" if right else ""


_RIGHTS = {
    "Create": "configure it",
    "Delete": "configure it",
    "DeclarePublisher": "write to it",
    "Publish": "write to it",
    "QueryPublisherSequence": "read it too: a producer with a name asks for its last publishing id",
    "QueryOffset": "read it",
    "Subscribe": "read it",
}


class NoLeader(ShardUnavailable):
    """The stream has no leader now: an election is under way, or its nodes are down."""


class NodeNotReached(Unreachable):
    """Every try through the load balancer ended at a node that was not wanted."""

    def __init__(self, wanted: Iterable[Broker], seen: Iterable[Broker], balancer: str) -> None:
        self.wanted = tuple(wanted)
        self.seen = Counter(seen)
        names = " or ".join(map(str, self.wanted))
        found = ", ".join(f"{node} {times}×" for node, times in self.seen.items()) or "no node"
        super().__init__(
            f"wanted {names} through {balancer}, reached {found}; the balancer must reach every "
            "node, and the nodes' advertised_host and advertised_port must be what Metadata says"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Unpickled as plain text: the parts stand in it.
        return Unreachable, (str(self),)


class Overloaded(TryLater):
    """The buffer of unconfirmed messages stayed full until the deadline."""


class TooManyRequests(TryLater):
    """Too many requests on one connection wait for an answer."""


class ClientFull(TryLater):
    """A connection has no publisher or subscription id left."""


class DataLost(RemoteError):
    """Retention deleted messages before they were read."""

    def __init__(self, stream: str, asked: int, found: int) -> None:
        self.stream = stream
        self.asked = asked
        self.found = found
        super().__init__(
            f"{stream!r} no longer has what was to be read from offset {asked}: it goes on at "
            f"{found}; keep more (max-age, max-length-bytes), read faster, or allow the loss"
        )

    def __reduce__(self) -> tuple[type[DataLost], tuple[str, int, int]]:
        return type(self), (self.stream, self.asked, self.found)


class EndsTooEarly(Unreachable):
    """A stream is said to end before a message that it is known to have had at its end: its leader
    does not know yet what it stores, or the stream was deleted and made again."""

    def __init__(self, stream: str, known_end: int, found: int) -> None:
        self.stream = stream
        self.known_end = known_end
        self.found = found
        where = f"to end at offset {found}" if found else "to be empty"
        super().__init__(
            f"{stream!r} is said {where}, but had messages up to offset {known_end}: read again "
            "from where you are; if it stays so, it was deleted and made again"
        )

    def __reduce__(self) -> tuple[type[EndsTooEarly], tuple[str, int, int]]:
        return type(self), (self.stream, self.known_end, self.found)


class StreamReplaced(RemoteError):
    """The stream was deleted, and another one of its name made, while it was read."""

    def __init__(self, stream: str, read: int) -> None:
        self.stream = stream
        self.read = read
        super().__init__(
            f"{stream!r} is not the stream that was read up to offset {read}: that one was deleted "
            "and another made under its name; what it held is gone, and offsets begin again. Make "
            "a new consumer, which begins where it is told to in the new one"
        )

    def __reduce__(self) -> tuple[type[StreamReplaced], tuple[str, int]]:
        return type(self), (self.stream, self.read)


class ConsumerInterrupted(LocalError):
    """A call of the consumer did not come to its end; what it had taken may be missing."""

    def __init__(self, consumer: str) -> None:
        super().__init__(
            f"{consumer} was interrupted at its work, by what a signal handler raised or another "
            "thread that iterates too; close it, and begin another one at its positions or its "
            "stored offsets"
        )


class NotActive(LocalError):
    """It is another consumer's turn: what is dealt with there, that one stores."""


_BY_CODE: dict[int, type[StreamRefused]] = {
    Code.NO_SUCH_STREAM: StreamNotFound,
    Code.STREAM_EXISTS: StreamExists,
    Code.STREAM_NOT_AVAILABLE: StreamUnavailable,
    Code.SASL_MECHANISM_UNSUPPORTED: AuthenticationFailed,
    Code.AUTHENTICATION_FAILURE: AuthenticationFailed,
    Code.SASL_ERROR: AuthenticationFailed,
    Code.SASL_CHALLENGE: AuthenticationFailed,
    Code.LOOPBACK_ONLY: AuthenticationFailed,
    Code.VHOST_ACCESS_REFUSED: AccessRefused,
    Code.ACCESS_REFUSED: AccessRefused,
}


def refusal(command: str, code: int, subject: str = "") -> StreamRefused:
    """The error for a code that is not OK."""
    return _BY_CODE.get(code, StreamRefused)(command, code, subject)


def code_name(code: int) -> str:
    """
    >>> code_name(2)
    'no such stream (code 2)'
    """
    try:
        name = Code(code).name.lower().replace("_", " ")
    except ValueError:
        name = "an answer unknown to us"
    return f"{name} (code {code})"
