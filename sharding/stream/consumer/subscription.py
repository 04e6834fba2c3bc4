"""One partition's subscription: made at a good node, made again when it is lost.

Every attempt is a `_Link` of its own, which is the handler that the connection knows. The inbox
listens to the newest link only, and says at which offset it has to begin; so a link that ends, at
whatever moment, takes nothing with it and leaves nothing behind.

    open ──► subscribed ──lost──► recovering ──► subscribed …
                                      └── no such stream, or recovery_timeout over ──► failed

A stream that is gone, or was made anew, fails at once; everything else is tried again with growing
pauses until `recovery_timeout` is over: also a password that is refused, since a cluster that
restarts may not know its users yet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from sharding.backoff import Backoff
from sharding.errors import LocalError, OutcomeUnknown, Unreachable, WarrenError, is_retryable
from sharding.stream.connections.access import Access
from sharding.stream.connections.attachments import ActivityAnswer
from sharding.stream.connections.connection import StreamClient
from sharding.stream.consumer.activity import Activity, StepDown, Turns
from sharding.stream.consumer.inbox import Inbox, Lane, Taken
from sharding.stream.consumer.probe import chunk_at
from sharding.stream.consumer.starting import check_same, start_offset, witness_before
from sharding.stream.errors import (
    AccessRefused,
    NoAnswerInTime,
    NodeNotReached,
    NotSupported,
    ProtocolError,
    StreamNotFound,
    StreamReplaced,
)
from sharding.stream.messages.chunk import HEADER_SIZE, ChunkHeader, check_crc, parse_header
from sharding.stream.options import ConsumerOptions, offset_spec
from sharding.stream.protocol.commands import Subscribe, Unsubscribe, credit_frame
from sharding.stream.protocol.constants import NEXT, Broker, Key, OffsetSpec
from sharding.stream.routes.near_replicas import consumer_candidates
from sharding.stream.routes.values import StreamRoute

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient

logger = logging.getLogger("warren.stream.consumer")

_BACKOFF = Backoff(first=0.1, longest=5.0)
_ATTEMPT_TIMEOUT = 15.0
_LEAVE_TIMEOUT = 1.0
_ROUTE_PATIENCE = 1.5


class _Link:
    """One attempt at a subscription, and the handler of what arrives for it."""

    def __init__(self, owner: Subscription) -> None:
        self._owner = owner
        self.client: StreamClient
        self.number: int
        self.asked = False  # whether the broker may know of it
        self.lost: Exception | None = None
        self._credit_lock = threading.Lock()
        self._left = False

    def give_credit(self, chunks: int) -> None:
        """Also before the owner knows that it is subscribed: chunks may be taken by then."""
        with self._credit_lock:
            if chunks and not self._left and self.lost is None:
                # A lost connection is dealt with by on_lost, which every link gets.
                with suppress(WarrenError):
                    self.client.send(credit_frame(self.number, chunks))

    def leave(self) -> None:
        """Let go of the id, which may then be another's."""
        with self._credit_lock:
            self._left = True
        if self.lost is None:
            self.client.detach_subscriber(self.number)

    def on_chunk(self, chunk: memoryview) -> None:
        self._owner._arrived(self, chunk)

    def on_activity(self, active: bool) -> ActivityAnswer:
        return self._owner._activity(self, active)

    def on_lost(self, reason: Exception) -> None:
        self._owner._lost(self, reason)


class Subscription:
    """Keeps the lane of one partition filled."""

    def __init__(
        self,
        lane: Lane,
        inbox: Inbox,
        access: Access,
        options: ConsumerOptions,
        super_stream: str | None = None,
        turns: Turns | None = None,
        on_step_down: StepDown | None = None,
    ) -> None:
        self.lane = lane
        self.stream = lane.stream
        self.recoveries = 0
        self.longest_outage = 0.0
        self._inbox = inbox
        self._access = access
        self._options = options
        self._properties = options.subscription_properties(super_stream)
        self._changed = threading.Condition()
        self._link: _Link | None = None
        self._newest: _Link | None = None
        """The last attempt, successful or not: only this one is ever told that it is active."""
        self._closed = False
        self._attempts = 0
        self._lost_at = 0.0
        self._left_node: Broker | None = None
        self._known_route: StreamRoute | None = None
        self._turns = turns
        if turns is None and options.single_active:
            self._turns = Activity(lane, inbox, access, options, on_step_down)

    def open(self, deadline: float) -> None:
        """Subscribe for the first time; raises what stands in the way."""
        clock = self._access.clock
        while True:
            try:
                self._subscribe(deadline)
                return
            except NodeNotReached:
                raise
            except WarrenError as error:
                passes = is_retryable(error) or isinstance(error, NoAnswerInTime)
                pause = self._next_pause()
                if not passes or clock() + pause > deadline:
                    raise
            self.pause(pause)

    @property
    def node(self) -> Broker | None:
        """Where it is subscribed now."""
        link = self._link
        return link.client.node if link is not None else None

    def connection(self, deadline: float) -> StreamClient:
        """The connection of the current link, waited for while there is none."""
        with self._changed:
            left = max(0.0, deadline - self._access.clock())
            self._changed.wait_for(lambda: self._link is not None or self._closed, left)
            if self._link is None:
                raise Unreachable(f"{self.stream!r} has no connection now")
            return self._link.client

    def pause(self, seconds: float) -> None:
        """Wait before another try, but not once the consumer is closed."""
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, seconds):
                raise LocalError("the consumer was closed")

    def first_chunk(
        self, client: StreamClient, place: int | None, timeout: float
    ) -> ChunkHeader | None:
        """What the node has to send first from `place` on, or from where this one begins."""
        spec = offset_spec(self._options.offset) if place is None else place
        return chunk_at(client, self.stream, spec, timeout, self._options.filter_properties)

    def give_back(self, taken: Taken) -> None:
        """Tell the broker that the application took chunks, so that it sends as many more."""
        self.lane.witness = parse_header(taken.chunks[-1])
        if isinstance(taken.source, _Link):
            taken.source.give_credit(len(taken.chunks))

    def has_delivered(self, taken: Taken, client: StreamClient) -> bool:
        """Whether what was taken came over this connection, and not over an earlier one."""
        return isinstance(taken.source, _Link) and taken.source.client is client

    def close(self, deadline: float) -> None:
        with self._changed:
            self._closed = True
            link, self._link = self._link, None
            self._changed.notify_all()
        if link is not None:
            self._leave(link, deadline)

    # An attempt: on the caller's thread at first, later on a thread of `access.later`.

    def _subscribe(self, deadline: float) -> None:
        access = self._access
        route = self._route(deadline)
        candidates = consumer_candidates(route, access.placement, access.rng)
        # A node that was just lost is tried after the others; the leader stays the last resort.
        candidates.sort(key=lambda node: (node == route.leader, node == self._left_node))
        link = _Link(self)
        link.client, link.number = access.pool.subscriber(candidates, self.stream, link, deadline)
        try:
            self._begin(link, deadline)
            with self._changed:
                if link.lost is not None:
                    raise link.lost
                if not self._closed:
                    self._link = link
                    self._attempts = 0
                    self._changed.notify_all()
                    return
        except BaseException:
            self._left_node = link.client.node
            self._leave(link, access.clock() + _LEAVE_TIMEOUT)
            raise
        self._leave(link, deadline)

    def _route(self, deadline: float) -> StreamRoute:
        """Where the stream lives now, or if nobody says so, where it lived last.

        While a node hangs, the others do not answer Metadata for about a minute (seen on 4.0.5),
        but they still serve the stream.
        """
        patience = self._left(deadline)
        if self._known_route is not None:
            patience = min(patience, _ROUTE_PATIENCE)
        try:
            self._known_route = self._access.routes.route(self.stream, patience)
        except (Unreachable, OutcomeUnknown):
            if self._known_route is None:
                raise
        return self._known_route

    def _begin(self, link: _Link, deadline: float) -> None:
        client, options, lane = link.client, self._options, self.lane
        check_abilities(client, options)
        witness = lane.witness
        if self._turns is None and lane.position is None:
            start = start_offset(client, self.stream, options, self._access, self._left(deadline))
            if start is not None:
                left = self._left(deadline)
                lane.witness = witness_before(
                    client, self.stream, start, witness, self._access, left
                )
                self._inbox.place(lane, start)
        with self._changed:
            if self._turns is not None and self._newest is not None:
                self._turns.ended()  # an attempt may have been told that it is active, and failed
            self._newest = link
        position = self._inbox.listen(self.lane, link)
        spec = offset_spec(options.offset) if position is None else OffsetSpec.at(position)
        link.asked = True
        # The link is told when the stream goes from here on, so it is checked now and not before:
        # else another one could take its place between the check and the subscription. Without
        # credit nothing is delivered until then.
        credit = options.credits if witness is None else 0
        subscribe = Subscribe(link.number, self.stream, spec, credit, self._properties)
        client.call(subscribe, timeout=self._left(deadline))
        if witness is not None:
            check_same(client, self.stream, witness, self._access, self._left(deadline))
            link.give_credit(options.credits)

    def _leave(self, link: _Link, deadline: float) -> None:
        """Give up a link's id and its share of the connection."""
        left = self._left(deadline)
        if link.asked and link.lost is None and left > 0:
            with suppress(WarrenError):
                link.client.call(Unsubscribe(link.number), timeout=left)
        link.leave()
        self._access.pool.release(link.client)

    def _recover(self) -> None:
        access = self._access
        if self._closed:
            return
        give_up = self._lost_at + self._options.recovery_timeout
        try:
            self._subscribe(min(give_up, access.clock() + _ATTEMPT_TIMEOUT))
        except (StreamNotFound, StreamReplaced, AccessRefused, LocalError) as error:
            if not is_retryable(error):
                self._fail(error)
                return
            self._try_again(error, give_up)
        except WarrenError as error:
            self._try_again(error, give_up)
        except Exception as error:  # a mistake of ours must end the consumer, not hang it
            self._fail(error)
        else:
            outage = access.clock() - self._lost_at
            self.recoveries += 1
            self.longest_outage = max(self.longest_outage, outage)
            logger.info("%s is read from %s after %.2f s", self.stream, self.node, outage)

    def _try_again(self, error: WarrenError, give_up: float) -> None:
        pause = self._next_pause()
        if self._access.clock() + pause > give_up:
            self._fail(error)
            return
        logger.info("%s: %s; trying again in %.1f s", self.stream, error, pause)
        self._access.routes.suspect(self.stream, str(error))
        self._do_later(pause, self._recover)

    def _do_later(self, delay: float, job: Callable[[], None]) -> None:
        if self._access.later.schedule(delay, job).cancelled:
            self._fail(Unreachable(f"the environment that read {self.stream!r} was closed"))

    def _next_pause(self) -> float:
        self._attempts += 1
        return _BACKOFF.pause(self._attempts, self._access.rng.random())

    def _fail(self, error: Exception) -> None:
        if not self._closed:
            self._inbox.fail(error)

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._access.clock())

    # What a link hears: on the connection's reading thread, so nothing here waits.

    def _arrived(self, link: _Link, chunk: memoryview) -> None:
        try:
            header = parse_header(chunk)
            if self._options.check_crc:
                # Here and not where batches are made: it holds no lock of the interpreter, so it
                # runs beside that.
                check_crc(header, chunk[HEADER_SIZE:])
        except ProtocolError as error:
            self._fail(error)
            return
        if not self._inbox.put(self.lane, link, header.first_offset, header.end_offset, chunk):
            self._fail(ProtocolError(f"{link.client.node} sent more chunks than it has credit for"))

    def _activity(self, link: _Link, active: bool) -> ActivityAnswer:
        with self._changed:
            if self._turns is None or link is not self._newest:
                return NEXT
            return self._turns.changed(active, link.client, link.give_credit)

    def _lost(self, link: _Link, reason: Exception) -> None:
        with self._changed:
            link.lost = reason
            if self._link is not link:
                return  # an attempt that is under way notices itself; an old link is nobody's
            self._link = None
            self._lost_at = self._access.clock()
            self._left_node = link.client.node
        if self._turns is not None:
            self._turns.ended()
        logger.info("%s lost %s: %s", self.stream, self._left_node, reason)

        def recover() -> None:
            self._access.pool.release(link.client)
            self._access.routes.suspect(self.stream, str(reason))
            self._recover()

        self._do_later(0, recover)


def check_abilities(client: StreamClient, options: ConsumerOptions) -> None:
    """Raises `NotSupported` for a broker that is too old."""
    version = ".".join(map(str, client.server_version))
    if options.single_active and not client.supports(Key.CONSUMER_UPDATE):
        raise NotSupported(f"single_active needs RabbitMQ 3.11 or later, not {version}")
    if options.filter_values and not client.supports(Key.PUBLISH, 2):
        raise NotSupported(f"filter_values need RabbitMQ 3.13 or later, not {version}")
