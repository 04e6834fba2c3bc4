"""Confirm mode of a blocking channel, with deadlines.

It is kept here and not by pika, for two reasons: a confirm that never comes must not block for
ever, and one that comes after its deadline must not be taken for the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pika
import pika.spec
from pika.adapters.blocking_connection import ReturnedMessage
from pika.compat import as_bytes
from pika.exceptions import ChannelWrongStateError, NackError, UnroutableError

from sharding.errors import OutcomeUnknown
from sharding.outcomes import PUBLISHING_COUNTED

logger = logging.getLogger("warren.channel")


class BlockingConfirms:
    """Publishes on one channel; once selected, each publish waits for its own confirm."""

    def __init__(self, channel: Any, timeout: float) -> None:
        self._channel = channel
        self._timeout = timeout
        self.active = False
        self.selecting = False
        """Confirms begin with whatever is sent from now on, whoever sends it."""
        self._awaited = 0
        self._unconfirmed: dict[int, _Sent] = {}
        """By delivery tag, in order: the message that is waited for, and older ones whose deadline
        has passed and whose confirm may still come."""
        self._returned: list[ReturnedMessage] = []
        self._confirmed: bool | None = None
        self.counters = dict.fromkeys(PUBLISHING_COUNTED, 0)

    def select(self) -> None:
        if self.active:
            logger.error("confirm_delivery: this channel confirms already")
            return
        selected: list[Any] = []
        self.selecting = True
        try:
            self._channel._impl.confirm_delivery(self._on_confirm, selected.append)
            self.wait_until(lambda: bool(selected))
            self.active = True
        finally:
            self.selecting = False

    def publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes | str,
        properties: pika.BasicProperties | None,
        mandatory: bool,
        asked: bool | None = None,
    ) -> None:
        """Publish; in confirm mode raise what pika would, or `OutcomeUnknown` at the deadline.

        `asked` says whether the application wants to have the message returned, if not `mandatory`.
        """
        message = (exchange, routing_key, body, properties, mandatory)
        if not self.active:
            self._send(message)
            self.counters["published"] += 1
            self._channel._flush_output()
            return
        self._confirmed = None
        self._returned = []
        content = (exchange, routing_key, hash(as_bytes(body)))
        sent = _Sent(content, mandatory if asked is None else asked)
        self._send(message, sent)
        self.counters["published"] += 1
        try:
            self.wait_until(lambda: self._confirmed is not None)
        except BaseException:
            self.counters["unknown"] += 1
            raise
        returned, self._returned = self._returned, []
        outcome = "nacked" if not self._confirmed else "returned" if returned else "confirmed"
        self.counters[outcome] += 1
        if not self._confirmed:
            raise NackError(returned)
        if returned:
            raise UnroutableError(returned)

    def _send(self, message: tuple[Any, ...], sent: _Sent | None = None) -> None:
        """Hand the message to pika, and its frames to the socket as one.

        pika writes a message's method, header and body with a system call each, which costs more
        than all else that happens to it here.
        """
        connection = self._channel.connection._impl
        frames: list[bytes] = []
        connection._adapter_emit_data = frames.append
        try:
            self._channel._impl.basic_publish(*message)
        finally:
            del connection._adapter_emit_data
        if sent is not None:
            # Counted when pika has encoded it, as the broker never hears of one that can't be; and
            # before it goes out: whoever is interrupted from here on may have sent it, and a count
            # that is too small would take its confirm for the next one's.
            self._awaited += 1
            self._unconfirmed[self._awaited] = sent
        if frames:
            connection._adapter_emit_data(b"".join(frames))

    def on_return(self, method: Any, properties: pika.BasicProperties, body: bytes) -> bool:
        """Keep what comes back of the message that is waited for; whether it was asked for.

        Returns come in the order of publishing and before their confirms, so it is the oldest that
        looks like it: the message may be one that was sent again after its deadline.
        """
        content = (method.exchange, method.routing_key, hash(body))
        for tag, sent in self._unconfirmed.items():
            if sent.content == content and not sent.came_back:
                sent.came_back = True
                if tag == self._awaited:
                    self._returned.append(ReturnedMessage(method, properties, body))
                return sent.asked
        return True

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Pump pika's loop until something holds, the channel closes, or the deadline passes.

        pika's own waiting goes on while output is unsent, whatever else holds, and a broker that
        hangs or has an alarm reads nothing.
        """
        expired: list[bool] = []
        connection = self._channel.connection
        # The connection's own call_later fires only while the application pumps events.
        timer = connection._impl._adapter_call_later(self._timeout, lambda: expired.append(True))
        loop = connection._impl.ioloop
        try:
            self._channel._impl._raise_if_not_open()
            ended = connection._closed_result
            while not (condition() or expired or self._channel.is_closed or ended.ready):
                loop.poll()
                loop.process_timeouts()
        finally:
            connection._impl._adapter_remove_timeout(timer)
        if condition():
            return
        if expired:
            raise OutcomeUnknown(
                f"the broker did not answer within {self._timeout:g} s (confirm_timeout)"
            )
        # As pika's own waiting ends: with what closed the connection, or else the channel.
        if ended.ready:
            error = ended.value.error
            connection._cleanup()
            raise error
        raise self._channel._closing_reason or ChannelWrongStateError("Channel is closed.")

    def _on_confirm(self, frame: Any) -> None:
        tag, multiple = frame.method.delivery_tag, frame.method.multiple
        for each in list(self._unconfirmed):
            if each != tag and not (multiple and each < tag):
                continue
            del self._unconfirmed[each]
            # A confirm that comes after its deadline has a smaller tag.
            if each == self._awaited:
                self._confirmed = isinstance(frame.method, pika.spec.Basic.Ack)


@dataclass(slots=True)
class _Sent:
    """A message that the broker has not confirmed."""

    content: tuple[str, str, int]
    """Exchange, key and a hash of the body, by which a return is known."""
    asked: bool
    """Whether the application wants to have it returned."""
    came_back: bool = False
