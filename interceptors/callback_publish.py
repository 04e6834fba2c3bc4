"""The publishing half of the asynchronous wrapper: to the key's shard, and nothing lost silently.

Warren sets `mandatory` on every sharded message, so the broker returns what no shard took. A return
that the application did not ask for is dealt with here. A confirm's delivery tag is the
application's own count, so nothing is published again on a channel that confirms: there the
message is reported as a nack.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pika
import pika.frame
from pika import validators
from pika.channel import Channel
from pika.spec import Basic

from interceptors import method_rules
from interceptors.call_order import Done, Wake
from interceptors.callback_base import DeferringChannel, OnFrame
from interceptors.calls import send_again
from interceptors.method_rules import Placement, Returned, Stray
from sharding.cluster.topology import Topology
from sharding.errors import InvalidInput, OutcomeUnknown, WarrenError
from sharding.maps.shard_map import Shard, ShardMap
from sharding.metrics.names import Subject
from sharding.outcomes import PUBLISHING_COUNTED
from sharding.publishing.addressing import addressed, appearance, headers_to

logger = logging.getLogger("warren.channel")

Content = tuple[str, str, int]


def content_of(exchange: str, routing_key: str, body: bytes) -> Content:
    """What a returned message is recognised by first; of equals, by its properties."""
    return exchange, routing_key, hash(body)


@dataclass(frozen=True, slots=True)
class Publication:
    """A message that is not confirmed yet, and may come back."""

    content: Content
    shard: str | None
    """None if it is not sharded."""
    asked: bool
    """Whether the application itself asked to have it returned."""
    properties: pika.BasicProperties = field(default_factory=pika.BasicProperties)
    """As they were sent."""


class Unconfirmed:
    """The published messages of a channel in confirm mode, by the application's delivery tags.

    The broker acknowledges a message that it returned. Where the application did not ask for the
    return, its acknowledgement would be the only thing the application sees, and the message would
    be lost in silence: it becomes a nack.

    A return does not say of which message it is. A channel routes one after the other: returns come
    in the order of publishing, and each before its acknowledgement and those of all later ones. So
    it is one that was published behind all that came back or were confirmed before; of several with
    the same key and body, the first with the same properties.
    """

    def __init__(self) -> None:
        self._last = 0
        self._routed = 0
        """Up to this tag nothing can come back any more."""
        # Tags only grow, so both stay sorted.
        self._sent: dict[int, Publication | None] = {}
        self._returned: dict[int, Publication] = {}
        self.counts = {"confirmed": 0, "nacked": 0, "returned": 0}

    @property
    def last(self) -> int:
        """The tag of the message that was published last."""
        return self._last

    def has_any_through(self, tag: int) -> bool:
        """Whether a message up to this one is not confirmed; tags only grow."""
        return any(next(iter(each), tag + 1) <= tag for each in (self._sent, self._returned))

    def sent(self, publication: Publication | None) -> None:
        """One more was published; None if it can't come back."""
        self._last += 1
        self._sent[self._last] = publication

    def returned(
        self, content: Content, properties: pika.BasicProperties | None = None
    ) -> Publication | None:
        looks = appearance(properties or pika.BasicProperties())
        alike: tuple[int, Publication] | None = None
        for tag, publication in self._sent.items():
            if publication is None or publication.content != content or tag <= self._routed:
                continue
            same = appearance(publication.properties) == looks
            if alike is None or same:  # a broker may have changed the properties of all of them
                alike = tag, publication
            if same:
                break
        if alike is None:
            return None
        self._routed, publication = alike
        del self._sent[self._routed]
        self._returned[self._routed] = publication
        return publication

    def confirmed(self, verdict: Basic.Ack | Basic.Nack) -> tuple[list[Any], set[str]]:
        """What to tell the application instead, and the shards that refused a message."""
        tag, multiple = int(verdict.delivery_tag), bool(verdict.multiple)
        self._routed = max(self._routed, tag)
        sent = _take(self._sent, tag, multiple)
        returned = _take(self._returned, tag, multiple)
        self.counts["returned"] += len(returned)
        if isinstance(verdict, Basic.Nack):
            self.counts["nacked"] += len(sent)
            return [verdict], {each.shard for each in sent.values() if each and each.shard}
        self.counts["confirmed"] += len(sent)
        unstored = {tag for tag, publication in returned.items() if not publication.asked}
        if not unstored:
            return [verdict], set()
        verdicts: list[Any] = []
        stored = 0
        for each in [*sorted([*sent, *returned]), None]:
            if each is not None and each not in unstored:
                stored = each
                continue
            if stored:
                verdicts.append(Basic.Ack(stored, multiple))
            stored = 0
            if each is not None:
                verdicts.append(Basic.Nack(each, False))
        return verdicts, set()


def _take(publications: dict[int, Any], tag: int, multiple: bool) -> dict[int, Any]:
    covered = [tag] if tag in publications else []
    if multiple:
        covered = []
        for each in publications:
            if each > tag:
                break
            covered.append(each)
    return {each: publications.pop(each) for each in covered}


class PublishingChannel(DeferringChannel):
    """A channel that publishes to shards."""

    counted_as = Subject("channel")

    def __init__(
        self,
        channel: Channel,
        topology: Topology,
        placement: Placement | str,
        confirm_timeout: float,
        node: str | None,
    ) -> None:
        if channel.callbacks.pending(channel.channel_number, Basic.Ack):
            raise InvalidInput("channel", "must be wrapped before confirm_delivery()", channel)
        super().__init__(channel, topology, placement, confirm_timeout, node)
        self._return_callbacks: list[Callable[..., Any]] = []
        self._confirm_callbacks: list[OnFrame] = []
        self._unconfirmed: Unconfirmed | None = None
        self._published = 0
        self._uninformed: set[str] = set()
        """Exchanges that were published to here while no map of theirs was known."""
        self._uncommitted: set[str] = set()
        """Those of them that were in the transaction that goes on."""
        self._confirmed = Wake()
        self._transacting = False
        self._returns = method_rules.Returns()
        self._strays: list[Stray] = []
        self._at_close += [self._log_strays, self._leave_behind]
        channel.add_on_return_callback(self._on_return)

    @property
    def counters(self) -> Mapping[str, float]:
        """Messages published here, and in confirm mode what became of them."""
        settled = {} if self._unconfirmed is None else self._unconfirmed.counts
        return dict.fromkeys(PUBLISHING_COUNTED, 0) | {"published": self._published} | settled

    def tx_select(self, callback: OnFrame | None = None) -> None:
        self._transacting = True
        self._in_order(self._channel.tx_select, callback)

    def tx_commit(self, callback: OnFrame | None = None) -> None:
        self._in_order(self._end_transaction, self._channel.tx_commit, callback)

    def tx_rollback(self, callback: OnFrame | None = None) -> None:
        self._in_order(self._end_transaction, self._channel.tx_rollback, callback)

    def _end_transaction(self, end: Callable[[Any], None], callback: OnFrame | None) -> None:
        end(callback)
        self._uncommitted.clear()  # what comes next is in the next one, and waits for this one

    def confirm_delivery(self, ack_nack_callback: OnFrame, callback: OnFrame | None = None) -> None:
        validators.require_callback(ack_nack_callback)
        validators.rpc_completion_callback(callback)
        self._check_open()

        # Publishes wait for select-ok, or pika might send them before Confirm.Select.
        def step(done: Done) -> None:
            def selected(frame: Any) -> None:
                done()
                if callback is not None:
                    callback(frame)

            self._channel.confirm_delivery(self._on_confirm, selected)
            self._unconfirmed = self._unconfirmed or Unconfirmed()
            if ack_nack_callback not in self._confirm_callbacks:
                self._confirm_callbacks.append(ack_nack_callback)

        self._order.run(step)

    def basic_publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes | str,
        properties: pika.BasicProperties | None = None,
        mandatory: bool = False,
    ) -> None:
        exchange, routing_key = method_rules.as_read(exchange), method_rules.as_read(routing_key)
        if self._order.idle and not self._has_to_bring(exchange):
            self._publish(exchange, routing_key, body, properties, mandatory, True)
            return
        # What can be said is said now: later there is nobody to raise to.
        self._check_open()
        shard_map = self._map(exchange)
        if shard_map is not None:
            shard = shard_map.shard_of(routing_key)
            self._check_available(shard_map, shard)
            method_rules.check_key(shard_map, routing_key)
            headers_to(properties.headers if properties else None, shard.name)
        if properties is not None:  # the application may use its own again at once
            properties = copy.copy(properties)
            properties.headers = dict(properties.headers or {}) or None
        message = (exchange, routing_key, body, properties, mandatory)

        async def bring_and_publish() -> None:
            await self._calls.bring(exchange, own=exchange in self._uninformed)
            self._uninformed.discard(exchange)
            self._publish(*message, only_if_available=False)

        def step(done: Done) -> None:
            if self._has_to_bring(exchange):
                self._steps.run(bring_and_publish(), self._fail, lambda _: done())
            else:
                self._publish(*message, only_if_available=False)
                done()

        self._order.run(step)

    def _publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes | str,
        properties: pika.BasicProperties | None,
        mandatory: bool,
        only_if_available: bool,
    ) -> None:
        publication: Publication | None = None
        shard_map = self._map(exchange)
        if shard_map is None or exchange in self._uncommitted:
            if exchange:
                self._uninformed.add(exchange)
                if self._transacting:  # kept when it is committed, and all that is behind it too
                    self._uncommitted.add(exchange)
            returns = mandatory or self._topology.may_drop(exchange, routing_key)
            self._channel.basic_publish(exchange, routing_key, body, properties, returns)
            if self._unconfirmed is not None and returns:
                content = content_of(exchange, routing_key, method_rules.as_bytes(body))
                # The application may use its own properties again at once.
                own = copy.copy(properties) if properties else pika.BasicProperties()
                publication = Publication(content, None, asked=mandatory, properties=own)
        else:
            method_rules.check_key(shard_map, routing_key)
            shard = shard_map.shard_of(routing_key)
            if only_if_available:
                self._check_available(shard_map, shard)
            body = method_rules.as_bytes(body)
            sent = self._addressed(properties, shard.name)
            self._channel.basic_publish(shard_map.exchange, routing_key, body, sent, True)
            if self._unconfirmed is not None:
                content = content_of(shard_map.exchange, routing_key, body)
                publication = Publication(content, shard.name, mandatory, sent)
            elif mandatory:
                self._returns.ask(shard_map.exchange, routing_key, body)
            self._returns.used(shard_map)
        self._published += 1
        if self._unconfirmed is not None:
            self._unconfirmed.sent(publication)

    def _addressed(
        self, properties: pika.BasicProperties | None, shard: str
    ) -> pika.BasicProperties:
        return addressed(properties, shard, self._inner.connection.params.frame_max)

    def _has_to_bring(self, exchange: str) -> bool:
        """Whether something was published without the map that is known now, and is kept."""
        kept = exchange in self._uninformed or self._topology.kept.mark(exchange) is not None
        return kept and exchange not in self._uncommitted and self._map(exchange) is not None

    def _leave_behind(self) -> None:
        self._topology.kept.leave(self._uninformed)

    async def _routed(self, exchange: str) -> None:
        if self._unconfirmed is None:
            await super()._routed(exchange)
            return
        last = self._unconfirmed.last
        expired: list[bool] = []

        def expire() -> None:
            expired.append(True)
            self._confirmed()

        timer = self._inner.connection._adapter_call_later(self._confirm_timeout, expire)
        try:
            while self._unconfirmed.has_any_through(last) and not expired:
                await self._confirmed.wait()
        finally:
            self._inner.connection._adapter_remove_timeout(timer)
        if expired:
            raise OutcomeUnknown(
                f"the broker did not confirm all messages within {self._confirm_timeout:g} s "
                "(confirm_timeout)"
            )

    def _check_available(self, shard_map: ShardMap, shard: Shard) -> None:
        method_rules.check_available(shard_map, shard, self._topology.unavailable(shard.name))

    def _on_confirm(self, frame: Any) -> None:
        if self._unconfirmed is None:
            return
        verdicts, suspects = self._unconfirmed.confirmed(frame.method)
        for shard in suspects:
            self._suspect(shard)
        self._confirmed()
        for verdict in verdicts:
            told = frame
            if verdict is not frame.method:
                told = pika.frame.Method(self._channel.channel_number, verdict)
            for callback in list(self._confirm_callbacks):
                callback(told)

    def _on_return(
        self, _: Any, method: Any, properties: pika.BasicProperties, body: bytes
    ) -> None:
        if self._asked_for(method, properties, body):
            for callback in list(self._return_callbacks):
                callback(self, method, properties, body)

    def _asked_for(self, method: Any, properties: pika.BasicProperties, body: bytes) -> bool:
        """Whether the application asked for this return; if not, it is dealt with here."""
        what = (method.exchange, method.routing_key, body)
        used = self._returns.map_of(method.exchange)
        publication = None
        if self._unconfirmed is not None:
            publication = self._unconfirmed.returned(content_of(*what), properties)
        if used is None or (publication is not None and publication.asked):
            return True
        verdict = Returned.UNSTORED if publication else self._returns.came_back(*what)
        if verdict is Returned.ASKED:
            return True
        full = self._transacting or len(self._strays) >= method_rules.MOST_STRAYS
        if verdict is Returned.UNSTORED or full:
            logger.error("%s", method_rules.unstored(used.logical, method.routing_key))
            self._suspect(used.shard_of(method.routing_key).name)
            return False
        self._strays.append(Stray(used.logical, method.routing_key, properties, body))
        if len(self._strays) == 1:
            again = send_again(
                self._steps, self._topology, self._returns, self._strays, self._publish_stray
            )
            self._steps.run(again, self._fail)
        return False

    def _log_strays(self) -> None:
        for stray in self._strays:
            logger.error("%s", method_rules.unstored(stray.logical, stray.routing_key))

    def _publish_stray(self, shard_map: ShardMap, shard: str, stray: Stray) -> None:
        def publish() -> None:
            # Confirms or a transaction may have begun before it: it would be nobody's confirm, and
            # one more than the application counts, or wait for a commit that may never come.
            if self._unconfirmed is not None or self._transacting:
                logger.error("%s", method_rules.unstored(stray.logical, stray.routing_key))
                return
            sent = self._addressed(stray.properties, shard)
            exchange, key = shard_map.exchange, stray.routing_key
            self._channel.basic_publish(exchange, key, stray.body, sent, True)

        self._in_order(publish)

    def _suspect(self, shard: str) -> None:
        with suppress(WarrenError):  # the maps may be stale, and nobody here could act on that
            self._topology.suspect(shard)

    def add_on_return_callback(self, callback: Callable[..., Any]) -> None:
        """Called for the messages that the application asked to have returned, and no others."""
        if callback not in self._return_callbacks:
            self._return_callbacks.append(callback)
