"""An application as the script sees it: one connection, one channel, every wait with a deadline.

The methods are those of a channel, in blocking style, whatever the client behind them. None raises:
a call answers with what it returned, with the exception as a value, or with "hangs". A caller that
hung is of no further use, and answers "hangs" to everything.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.cluster.waiting import PATIENCE
from tests.conformance.values import HANGS, Value

QUIET = 0.2
"""How long nothing must arrive before we say that nothing more does."""

Wrap = Callable[[Any], Any]
"""From a client's own channel to the channel that the application uses."""


@dataclass(frozen=True)
class Publication:
    exchange: str
    key: str
    body: str
    headers: Mapping[str, Any] = field(default_factory=dict)
    mandatory: bool = False


@dataclass
class Noticed:
    """What came to the application unasked."""

    messages: list[dict[str, Value]] = field(default_factory=list)
    returned: list[dict[str, Value]] = field(default_factory=list)
    cancelled: list[Value] = field(default_factory=list)
    closed: list[Value] = field(default_factory=list)
    answered: list[Value] = field(default_factory=list)
    """What a publish inside a delivery callback gave."""
    messages_answered: int = 0
    """For how many messages the delivery callback has published all it had to."""


class Caller(ABC):
    """One application on one node."""

    has_close_callback = True
    reopens = False
    """A robust channel opens again by itself after the broker closed it."""

    def __init__(self, url: str, wrap: Wrap, *, confirms: bool = False) -> None:
        self.url = url
        self.wrap = wrap
        self.confirms = confirms
        self.noticed = Noticed()
        self.hung = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Calls.

    @abstractmethod
    def declare(
        self,
        queue: str,
        *,
        durable: bool = False,
        passive: bool = False,
        patience: float = PATIENCE,
    ) -> Value: ...

    @abstractmethod
    def bind(self, queue: str, exchange: str, key: str) -> Value: ...

    @abstractmethod
    def unbind(self, queue: str, exchange: str, key: str) -> Value: ...

    @abstractmethod
    def purge(self, queue: str) -> Value: ...

    @abstractmethod
    def delete(self, queue: str) -> Value: ...

    @abstractmethod
    def consume(
        self,
        queue: str,
        *,
        tag: str | None = None,
        no_ack: bool = False,
        exclusive: bool = False,
        reply: Publication | None = None,
    ) -> Value:
        """The consumer tag. A message that did not come through the reply's exchange is answered:
        the callback publishes `reply` through the channel that it was given."""

    @abstractmethod
    def consume_declared(self, queue: str, *, tag: str) -> Value:
        """Consume in the way the client's manual shows: from what declaring the queue returned."""

    @abstractmethod
    def iterate(self, queue: str, count: int) -> Value:
        """`count` messages by the client's generator or iterator, if it has one; each is acked."""

    @abstractmethod
    def cancel(self, tag: str) -> Value: ...

    @abstractmethod
    def get(self, queue: str) -> Value:
        """One message, acknowledged by being fetched; None if there is none."""

    @abstractmethod
    def publish(self, publication: Publication) -> Value:
        """ "sent", or with confirms what the broker confirmed."""

    @abstractmethod
    def acknowledge(self, delivery_tag: int) -> Value: ...

    @abstractmethod
    def refuse(self, delivery_tag: int, *, requeue: bool) -> Value: ...

    @abstractmethod
    def recover(self) -> Value: ...

    @abstractmethod
    def prefetch(self, count: int) -> Value: ...

    @abstractmethod
    def begin_transaction(self) -> Value: ...

    @abstractmethod
    def commit(self) -> Value: ...

    @abstractmethod
    def declare_exchange(
        self,
        exchange: str,
        kind: str = "direct",
        *,
        durable: bool = False,
        passive: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> Value: ...

    @abstractmethod
    def delete_exchange(self, exchange: str) -> Value: ...

    @abstractmethod
    def round_trip(self) -> Value:
        """Ask the broker something on the channel. What it sent on it before has then arrived, and
        the callbacks for it have been called."""

    # What wrapped channels have besides.

    @abstractmethod
    def consume_all(self, queue: str) -> Value:
        """The consumer tags. Messages are acknowledged by being delivered."""

    @abstractmethod
    def counters(self) -> Value: ...

    # States.

    @abstractmethod
    def is_open(self) -> Value: ...

    @abstractmethod
    def connection_is_open(self) -> Value: ...

    @abstractmethod
    def open_channel(self) -> Value:
        """Open another channel on the same connection, wrap it, use it, close it: "works"."""

    @abstractmethod
    def close(self) -> None: ...

    # Waiting.

    def pump(self, seconds: float) -> None:
        """Let what has arrived reach the callbacks."""
        time.sleep(seconds)

    def wait_for(self, condition: Callable[[], object]) -> bool:
        """Whether it came to be; only what hangs does not."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline or self.hung:
                return False
            self.pump(0.01)
        return True

    def received(self, count: int) -> list[dict[str, Value]]:
        """All messages so far, when `count` have come and then no more for a moment."""
        self.wait_for(lambda: len(self.noticed.messages) >= count)
        deadline = time.monotonic() + QUIET
        self.pump(0.02)
        while time.monotonic() < deadline:
            self.pump(0.02)
        return list(self.noticed.messages)

    def aftermath(self) -> Value:
        """What a broker's refusal leaves behind, when the client has noticed it."""
        if self.has_close_callback:
            self.wait_for(lambda: self.noticed.closed)
        if self.reopens:
            self.wait_for(lambda: self.is_open() is True)
        return {
            "channel is open": self.is_open(),
            "connection is open": self.connection_is_open(),
            "close callback got": list(self.noticed.closed) if self.has_close_callback else "none",
            "a new channel": self.open_channel(),
        }


class Outcome:
    """The result of one call that another thread makes; like a Future, but set at most once."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: Value = None
        self._error: BaseException | None = None

    def give(self, result: Value) -> None:
        if not self._done.is_set():
            self._result = result
            self._done.set()

    def fail(self, error: BaseException) -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def wait(self, patience: float) -> Value:
        if not self._done.wait(patience):
            raise TimeoutError(HANGS)
        if self._error is not None:
            raise self._error
        return self._result
