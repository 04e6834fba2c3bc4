"""One connection of a publisher to one node: opened when needed, lost, opened again. Thin I/O.

    IDLE ──open()──► OPENING ──confirm mode, exchange is there──► OPEN
      ▲                 │ fails                                     │ lost, given up
      └────back-off─────┴───────────────────────────────────────────┘

Everything runs in the thread of the I/O loop. Addresses are tried in order, and after the last one
there is a pause that doubles up to a bound. A refusal that trying again won't change (wrong
credentials, no such virtual host, no such exchange) is told to the owner as permanent.

pika has no public way to drop a connection that does not answer: `close()` waits for the broker.
`_terminate_stream` is what its own heartbeat uses (read in 1.4.4).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Protocol, cast

import pika
from pika.adapters.select_connection import IOLoop
from pika.channel import Channel
from pika.exceptions import AMQPError
from pika.spec import Basic

from sharding.amqp.session import innermost
from sharding.backoff import Backoff
from sharding.errors import reason, shown

log = logging.getLogger("warren.publisher")

_random = random.Random()  # its own, so that nobody else's sequence of numbers changes
_BACKOFF = Backoff(first=0.1, longest=2.0)
PREPARE_TIMEOUT = 10.0
"""For the channel, after the connection is open. The handshake has pika's own `stack_timeout`."""
WRITE_SIZE = 64 * 1024
_PERMANENT_CODES = (403, 404, 530)
"""access-refused, not-found, not-allowed: what the broker says to credentials, names and rights."""


class State(Enum):
    IDLE = auto()
    OPENING = auto()
    OPEN = auto()
    PAUSING = auto()
    CLOSED = auto()


class Owner(Protocol):
    """Who is told what happens on a link."""

    def on_ready(self, link: NodeLink) -> None:
        """Messages may be sent: it is open, or no longer blocked."""

    def on_idle(self, link: NodeLink) -> None:
        """The pause is over; call `open()` if there is something to send."""

    def on_confirm(self, link: NodeLink, tag: int, multiple: bool, ack: bool) -> None: ...

    def on_return(
        self, link: NodeLink, method: Basic.Return, properties: pika.BasicProperties, body: bytes
    ) -> None: ...

    def on_lost(self, link: NodeLink, reason: str, permanent: bool) -> None:
        """Not open any more, or could not be opened."""


class CorkedConnection(pika.SelectConnection):
    """pika hands each frame to the kernel by itself, three for each message. Between `cork` and
    `uncork` this one gathers them (18,000 and 30,000 messages/s without and with it, in two runs
    of three rounds). The hook is private to pika; if a pika did not call it, frames would be sent
    one by one again.
    """

    _corked: list[bytes] | None = None
    _corked_size = 0

    def cork(self) -> None:
        self._corked = []
        self._corked_size = 0

    def uncork(self) -> None:
        gathered, self._corked = self._corked, None
        if gathered:
            self._emit(gathered)

    def _output_marshaled_frames(self, marshaled_frames: Sequence[bytes]) -> None:
        gathered = self._corked
        if gathered is None:
            self._emit(marshaled_frames)
            return
        gathered += marshaled_frames
        self._corked_size += sum(map(len, marshaled_frames))
        if self._corked_size >= WRITE_SIZE:
            self._emit(gathered)
            self.cork()

    def _emit(self, frames: Sequence[bytes]) -> None:
        pika_side = cast(Any, self)
        data = b"".join(frames)
        pika_side.bytes_sent += len(data)
        pika_side.frames_sent += len(frames)
        pika_side._adapter_emit_data(data)


class NodeLink:
    def __init__(
        self,
        node: str,
        loop: IOLoop,
        parameters: Callable[[str], Sequence[pika.ConnectionParameters]],
        exchange: str,
        owner: Owner,
    ) -> None:
        self.node = node
        self.state = State.IDLE
        self.blocked = False
        self.trouble = "not connected yet"
        self.channel: Channel | None = None
        self._loop = loop
        self._parameters = parameters
        self.exchange = exchange
        self._owner = owner
        self._failures = 0
        self._untried: list[pika.ConnectionParameters] = []
        self.connection: CorkedConnection | None = None
        self._timer: object | None = None

    @property
    def ready(self) -> bool:
        return self.state is State.OPEN and not self.blocked

    def open(self) -> None:
        """Begin to connect, unless that is under way or a pause is due."""
        if self.state is not State.IDLE:
            return
        self.state = State.OPENING
        try:
            self._untried = list(self._parameters(self.node))
        except BaseException as error:  # its text is not ours, and might hold a secret
            self._failed(f"no way to {self.node}: {type(error).__name__}", permanent=False)
            return
        if not self._untried:
            self._failed(f"no address of {self.node} is known", permanent=False)
            return
        self._try_next()

    def give_up(self, reason: str) -> None:
        """Drop the connection, whatever it is doing, and begin again after a pause."""
        self._failed(reason, permanent=False)

    def close(self, on_closed: Callable[[], None]) -> None:
        """Close in order; `abort` ends it where the node does not answer."""
        connection = self.connection
        ordered = connection is not None and self.state is State.OPEN and connection.is_open
        self._forget(State.CLOSED, keep=ordered)
        if ordered and connection is not None:
            self.connection = connection
            connection.add_on_close_callback(lambda *_: on_closed())
            connection.close()
        else:
            on_closed()

    def abort(self) -> None:
        self._forget(State.CLOSED)

    # Opening.

    def _try_next(self) -> None:
        # One address at a time: pika's own way through a list stops at a name that it can't
        # resolve, and breaks when it is aborted during a handshake.
        self.connection = CorkedConnection(
            self._untried.pop(0),
            on_open_callback=self._prepare,
            on_open_error_callback=self._not_connected,
            on_close_callback=self._on_end,
            custom_ioloop=self._loop,
        )

    def _not_connected(self, connection: CorkedConnection, error: BaseException) -> None:
        if connection is not self.connection:
            return
        self.connection = None
        reason, code = _describe(error)
        if self._untried and code not in _PERMANENT_CODES:
            self._try_next()
            return
        self._failed(f"can't connect to {self.node}: {reason}", code in _PERMANENT_CODES)

    def _prepare(self, connection: CorkedConnection) -> None:
        if connection is not self.connection:
            return
        self._timer = self._loop.call_later(
            PREPARE_TIMEOUT, lambda: self.give_up(f"{self.node} opened no channel in time")
        )
        connection.add_on_connection_blocked_callback(lambda *_: self._on_blocked(connection))
        connection.add_on_connection_unblocked_callback(lambda *_: self._on_unblocked(connection))
        connection.channel(on_open_callback=self._on_channel)

    def _on_channel(self, channel: Channel) -> None:
        if channel.connection is not self.connection:
            return
        self.channel = channel
        channel.add_on_close_callback(self._on_end)
        channel.add_on_return_callback(
            lambda _, method, properties, body: self._owner.on_return(
                self, method, properties, body
            )
        )
        channel.confirm_delivery(self._on_confirm, callback=lambda _: self._on_confirm_mode())

    def _on_confirm_mode(self) -> None:
        # Publishing to an exchange that is not there would end the channel and leave everything
        # in flight unknown. Asking first costs one round trip and lets it be refused instead.
        if self.exchange and self.channel is not None:
            self.channel.exchange_declare(
                self.exchange, passive=True, callback=lambda _: self._opened()
            )
        else:
            self._opened()

    def _opened(self) -> None:
        self._cancel_timer()
        self.state = State.OPEN
        self.trouble = ""
        log.info("connected to %s", self.node)
        self._owner.on_ready(self)

    # While it is open.

    def _on_confirm(self, frame: Any) -> None:
        self._failures = 0
        method = frame.method
        self._owner.on_confirm(
            self, method.delivery_tag, method.multiple, isinstance(method, Basic.Ack)
        )

    def _on_blocked(self, connection: CorkedConnection) -> None:
        if connection is self.connection:
            self.blocked = True
            self.trouble = f"{self.node} blocks publishers (its memory or disk alarm is on)"
            log.warning("%s", self.trouble)

    def _on_unblocked(self, connection: CorkedConnection) -> None:
        if connection is self.connection:
            self.blocked = False
            self.trouble = ""
            if self.ready:
                self._owner.on_ready(self)

    # Ending.

    def _on_end(self, ended: Any, error: BaseException) -> None:
        if self.state is State.CLOSED or ended not in (self.connection, self.channel):
            return
        reason, code = _describe(error)
        unprepared = self.state is State.OPENING
        self._failed(
            f"connection to {self.node} lost: {reason}", unprepared and code in _PERMANENT_CODES
        )

    def _failed(self, reason: str, permanent: bool) -> None:
        if self.state in (State.CLOSED, State.PAUSING):
            return
        self._forget(State.PAUSING)
        self.trouble = reason
        self._failures += 1
        pause = _BACKOFF.pause(self._failures, _random.random())
        self._timer = self._loop.call_later(pause, self._on_pause_over)
        log.warning("%s; next attempt in %.1f s", reason, pause)
        self._owner.on_lost(self, reason, permanent)

    def _on_pause_over(self) -> None:
        self.state = State.IDLE
        self._owner.on_idle(self)

    def _forget(self, state: State, keep: bool = False) -> None:
        self.state = state
        self.blocked = False
        self._cancel_timer()
        connection, self.connection = self.connection, None
        self.channel = None
        if connection is not None and not keep:
            _drop(connection)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._loop.remove_timeout(cast(Any, self._timer))
            self._timer = None


def _drop(connection: CorkedConnection) -> None:
    """End a connection without waiting for the other side."""
    if connection.is_closed:
        return
    try:
        cast(Any, connection)._terminate_stream(AMQPError("dropped"))
    except Exception:  # pika's inner states are many; none of them may end the publisher
        log.exception("a connection could not be dropped")


def _describe(error: BaseException) -> tuple[str, int]:
    """What to tell of an error of pika's, and the broker's reply code, 0 if it did not give one."""
    cause: Any = innermost(error)
    code = getattr(cause, "reply_code", 0)
    if code:
        return f"{code} {cause.reply_text}", code
    text = reason(cause)
    # pika guesses "probably authentication" from the moment of the loss, and packs what it knows
    # into the text; only what the broker itself said counts as its word.
    for known in _PERMANENT_CODES:
        if f"ConnectionClosedByBroker: ({known})" in text:
            return shown(text, 300), known
    return shown(text, 300), 0
