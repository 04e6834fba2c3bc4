"""What `AioShardedChannel` hands out: queue and exchange objects for logical names.

Each wraps aio-pika's own object, plain or robust, and behaves as that one wherever it does not
intercept. Whether a name is sharded is asked at each call, as the broker's plugin does, and not
when the object is made.
"""

from __future__ import annotations

import asyncio
import copy
import struct
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import aiormq.abc
from aio_pika.abc import AbstractChannel, TimeoutType
from aio_pika.exceptions import DeliveryError, PublishError
from aio_pika.tools import STUB_AWAITABLE, CallbackCollection
from aio_pika.transaction import Transaction

from interceptors import method_rules
from sharding.errors import OutcomeUnknown
from sharding.maps.shard_map import ShardMap
from sharding.publishing.addressing import LARGEST_FRAME, check_room, headers_to

if TYPE_CHECKING:
    from interceptors.aio import AioShardedChannel

OnMessage = Callable[[Any], Awaitable[Any]]


class Proxy:
    """Behaves as the wrapped object, to `isinstance` too, where a subclass does not intercept.

    aio-pika dispatches on the class of what it is given (`queue.bind(exchange)`), so that a plain
    stand-in would be refused.

    `__slots__` name what an object of ours keeps for itself. Anything else that is set on it, as
    `reconnect_interval` of a robust connection, is set on the wrapped one, where it has an effect.
    """

    __slots__ = ("__dict__", "__weakref__", "_wrapped")

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        if hasattr(type(self), name):
            super().__delattr__(name)
        else:
            delattr(self._wrapped, name)

    @property  # type: ignore[misc]  # __class__ is no property to mypy, but isinstance asks it
    def __class__(self) -> Any:
        return type(self._wrapped)

    def __str__(self) -> str:
        return str(self._wrapped)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._wrapped!r}>"


class AskedReturns(CallbackCollection[Any, [Any]]):
    """Return callbacks that do not hear of messages which the application did not ask back.

    Warren publishes every message as mandatory; `unasked` holds the ids of those that the
    application did not, while they are on their way.
    """

    __slots__ = ("unasked",)

    def __init__(self, sender: Any) -> None:
        super().__init__(sender)
        self.unasked: set[str] = set()

    def __call__(self, message: Any) -> Awaitable[Any]:
        return STUB_AWAITABLE if message.message_id in self.unasked else super().__call__(message)


class Closing(CallbackCollection[Any, Any]):
    """Close callbacks of which the first is our own; aio-pika knows the collection weakly."""

    __slots__ = ("_first",)

    def __init__(self, sender: Any, first: Callable[[], None] = lambda: None) -> None:
        super().__init__(sender)
        self._first = first

    def __call__(self, *arguments: Any, **options: Any) -> Awaitable[Any]:
        self._first()
        return super().__call__(*arguments, **options)


class ShardedTransaction(Transaction):
    """A transaction that tells when it begins and when it is over."""

    def __init__(
        self, channel: AbstractChannel, begun: Callable[[], None], over: Callable[[], None]
    ) -> None:
        super().__init__(channel)
        self._begun = begun
        self._over = over

    async def select(self, timeout: TimeoutType = None) -> Any:
        self._begun()
        return await super().select(timeout)

    async def commit(self, timeout: TimeoutType = None) -> Any:
        answer = await super().commit(timeout)
        self._over()
        return answer

    async def rollback(self, timeout: TimeoutType = None) -> Any:
        answer = await super().rollback(timeout)
        self._over()
        return answer


class OneAtATime:
    """Lets nobody in with a name that somebody inside has. They come one after the other.

    aiormq tells returned messages apart by their ids: of two with one id on their way, a return of
    the one would be taken for the other's.
    """

    def __init__(self) -> None:
        self._inside: dict[str, asyncio.Event] = {}

    async def enter(self, name: str) -> None:
        while name in self._inside:
            await self._inside[name].wait()
        self._inside[name] = asyncio.Event()

    def leave(self, name: str) -> None:
        self._inside.pop(name).set()


class ShardedQueue(Proxy):
    """A queue by its logical name. The wrapped queue is the one that a declaration stands for."""

    __slots__ = ("_kept", "_logical", "_owner")

    def __init__(
        self, owner: AioShardedChannel, logical: str, wrapped: Any, *, kept: bool = False
    ) -> None:
        super().__init__(wrapped)
        self._owner = owner
        self._logical = logical
        self._kept = kept

    @property
    def channel(self) -> AioShardedChannel:
        return self._owner

    async def consume(
        self,
        callback: OnMessage,
        no_ack: bool = False,
        exclusive: bool = False,
        arguments: Any = None,
        consumer_tag: str | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> str:
        shard_map = await self._owner._shard_map(self._logical)
        if shard_map is None:
            tag: str = await self._wrapped.consume(
                callback, no_ack, exclusive, arguments, consumer_tag, timeout, **options
            )
            return tag
        wish = {
            "callback": callback,
            "no_ack": no_ack,
            "exclusive": exclusive,
            "arguments": arguments,
        }
        kept = self._kept and options.get("robust", True)
        return await self._owner._consume_least_used(
            shard_map, wish, consumer_tag, timeout, kept=kept
        )

    async def cancel(
        self, consumer_tag: str, timeout: float | None = None, nowait: bool = False
    ) -> Any:
        queue = await self._owner._release(consumer_tag) or self._wrapped
        return await queue.cancel(consumer_tag, timeout, nowait)

    async def get(
        self, *, no_ack: bool = False, fail: bool = True, timeout: float | None = 5
    ) -> Any:
        shard_map = await self._owner._shard_map(self._logical)
        if shard_map is None:
            return await self._wrapped.get(no_ack=no_ack, fail=fail, timeout=timeout)
        async with self._owner._deadline(timeout):
            queue = await self._owner._queue_to_read(self._logical)
            return await queue.get(no_ack=no_ack, fail=fail, timeout=None)

    def iterator(self, **options: Any) -> Any:
        # The wrapped queue's own kind of iterator, but it consumes and cancels through this object.
        return type(self._wrapped).iterator(self, **options)

    def __aiter__(self) -> Any:
        return self.iterator()

    async def bind(self, *arguments: Any, **options: Any) -> Any:
        await self._owner._refuse_if_sharded("bind", self._logical)
        return await self._wrapped.bind(*arguments, **options)

    async def unbind(self, *arguments: Any, **options: Any) -> Any:
        await self._owner._refuse_if_sharded("unbind", self._logical)
        return await self._wrapped.unbind(*arguments, **options)

    async def purge(self, no_wait: bool = False, timeout: float | None = None) -> Any:
        if await self._owner._refuse_if_sharded("purge", self._logical, wait=not no_wait):
            return None
        return await self._wrapped.purge(no_wait, timeout)

    async def delete(self, **options: Any) -> Any:
        await self._owner._refuse_if_sharded("delete", self._logical)
        return await self._wrapped.delete(**options)


class ShardedExchange(Proxy):
    """An exchange by its logical name: what is published goes to the key's shard."""

    __slots__ = ("_logical", "_owner")

    def __init__(self, owner: AioShardedChannel, logical: str, wrapped: Any) -> None:
        super().__init__(wrapped)
        self._owner = owner
        self._logical = logical

    @property
    def channel(self) -> AioShardedChannel:
        return self._owner

    async def publish(
        self,
        message: Any,
        routing_key: str,
        *,
        mandatory: bool = True,
        immediate: bool = False,
        timeout: float | None = None,
    ) -> Any:
        named = message.message_id
        shard_map = await self._owner._map_in_turn(self._logical, named, timeout)
        if shard_map is None:
            mandatory = mandatory or self._owner._topology.may_drop(self._logical, routing_key)
            sent = _Sent(message.body, message.properties)
            publishing = self._wrapped.publish(
                sent, routing_key, mandatory=mandatory, immediate=immediate, timeout=timeout
            )
            owner = self._owner
            async with owner._without_map(self._logical), owner._deadline(timeout):
                return await counted(self._owner.counters, publishing, sent)
        sending = _Sending(self, message, routing_key, mandatory, immediate)
        try:
            async with self._owner._deadline(timeout):
                result = await sending.to_shard_in(shard_map)
                if mandatory or not _came_back(result):
                    return result
                return await self._publish_again(sending, shard_map)
        except OutcomeUnknown:
            # So that the next ones to this shard are told at once, if it is away.
            sending.suspect()
            raise
        finally:
            if named:
                self._owner._message_ids.leave(named)

    async def _publish_again(self, sending: _Sending, shard_map: ShardMap) -> Any:
        """A return that the application did not ask for: the map may be old, so look again."""
        await self._owner._port.wait(self._owner._topology.futures.refresh())
        # Not in turn: whose turn it is may wait for this very message.
        fresh = await self._owner._map_to_publish_by(self._logical)
        if fresh is not None and fresh != shard_map:
            result = await sending.to_shard_in(fresh)
            if not _came_back(result):
                return result
        raise method_rules.unbound(str(sending.shard), self._logical)

    async def delete(self, if_unused: bool = False, timeout: float | None = None) -> Any:
        async def delete(_: str) -> Any:
            async with self._owner._deadline(timeout):
                return await self._wrapped.delete(if_unused, timeout)

        return await self._owner._calls.delete_exchange(self._logical, if_unused, delete)

    async def exchange_of(self, shard_map: ShardMap) -> Any:
        """aio-pika's object for the exchange that the shards are bound to."""
        if self._wrapped.name == shard_map.exchange:
            return self._wrapped
        return await self._owner._wrapped_exchange(shard_map.exchange)


class _Sent:
    """A message as aio-pika gets it, which tells whether its bytes were asked for to be sent."""

    def __init__(self, body: bytes, properties: Any) -> None:
        self._body = body
        self.properties = properties
        self.is_taken = False

    @property
    def body(self) -> bytes:
        self.is_taken = True
        return self._body


async def counted(counters: dict[str, float], publishing: Awaitable[Any], sent: _Sent) -> Any:
    """Wait for a publish, and count what became of it, unless it was refused before it was sent:
    by a channel that is closed or not ready, or because it can't be encoded."""
    outcome: str | None = "unknown"  # as long as nothing else is known, also when it is cancelled
    try:
        result = await publishing
        outcome = "returned" if _came_back(result) else "confirmed"
        if result is None:  # a channel without confirms
            outcome = None
        return result
    except PublishError:
        outcome = "returned"
        raise
    except DeliveryError:
        outcome = "nacked"
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, struct.error):
        sent.is_taken = False
        raise
    finally:
        if sent.is_taken:
            counters["published"] += 1
            if outcome is not None:
                counters[outcome] += 1


class _Sending:
    """One message on its way to a shard."""

    def __init__(
        self,
        exchange: ShardedExchange,
        message: Any,
        routing_key: str,
        mandatory: bool,
        immediate: bool,
    ) -> None:
        self._exchange = exchange
        self._owner = exchange.channel
        self._message = message
        self._routing_key = routing_key
        self._mandatory = mandatory
        self._immediate = immediate
        self.shard: str | None = None

    async def to_shard_in(self, shard_map: ShardMap) -> Any:
        """Publish with confirms as aio-pika does them.

        What came back is the result; it is raised only to an application that asked for both.
        """
        method_rules.check_key(shard_map, self._routing_key)
        shard = shard_map.shard_of(self._routing_key)
        away = self._owner._topology.unavailable(shard.name)
        method_rules.check_available(shard_map, shard, away)
        self.shard = shard.name
        sent = _Addressed(self._message, shard.name)
        exchange = await self._exchange.exchange_of(shard_map)
        return await self._publish(exchange, sent)

    async def _publish(self, exchange: Any, sent: _Addressed) -> Any:
        unasked = self._owner.return_callbacks.unasked
        if not self._mandatory:
            unasked.add(sent.properties.message_id)
        publishing = exchange.publish(
            sent, self._routing_key, mandatory=True, immediate=self._immediate
        )
        try:
            result = await counted(self._owner.counters, publishing, sent)
        except PublishError as error:
            self.suspect()
            if self._mandatory:
                raise
            return error.message
        except DeliveryError:
            self.suspect()
            raise
        finally:
            unasked.discard(sent.properties.message_id)
        if _came_back(result):
            self.suspect()
        return result

    def suspect(self) -> None:
        """Have the shard looked at; until it answers it counts as away."""
        if self.shard is not None:
            self._owner._topology.suspect(self.shard)


class _Addressed(_Sent):
    """A message with the shard's name added as a blind copy; the application's is left alone."""

    def __init__(self, message: Any, shard: str) -> None:
        super().__init__(message.body, copy.copy(message.properties))
        self.properties.headers = headers_to(self.properties.headers, shard)
        # aiormq would add one, by which it recognises what is returned; so do we.
        self.properties.message_id = self.properties.message_id or uuid.uuid4().hex
        if len(self.properties.headers) > 1:  # without headers of its own it always fits
            check_room(len(self.properties.marshal()), LARGEST_FRAME)


def _came_back(result: Any) -> bool:
    return isinstance(result, aiormq.abc.DeliveredMessage)
