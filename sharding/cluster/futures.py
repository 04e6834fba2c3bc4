"""`TopologyFutures`: what a topology is asked and told, for those who may not block.

Every call gives a future at once, whatever thread it is made on, and every future ends: with the
answer, or with the error that the blocking method of `Topology` raises. What is waiting when the
topology is closed is told so.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from sharding.amqp.connected_node import node_at
from sharding.amqp.session import Declared, Session
from sharding.cluster.control_plane import ControlPlane
from sharding.cluster.provisioner import Ensured, Manager, exists
from sharding.errors import (
    InvalidInput,
    LocalError,
    OutcomeUnknown,
    Unreachable,
    WarrenError,
    reason,
)
from sharding.maps.map_log import State
from sharding.maps.naming import check_logical_name
from sharding.maps.policy import Policy, check_portable
from sharding.maps.shard_map import Node, Shard, ShardMap

logger = logging.getLogger("warren.topology")
T = TypeVar("T")

Step = Callable[[State], State | None]
Work = Callable[[Session, ShardMap], Awaitable[T]]

CLOSED = "the topology is closed"
_LOOK_FOR_FAILURE = 0.1


class TopologyFutures:
    """The questions and changes of one topology; `has_log` is false where its maps are fixed."""

    def __init__(
        self, plane: ControlPlane, loop: asyncio.AbstractEventLoop, vhost: str, has_log: bool
    ) -> None:
        self._plane = plane
        self._loop = loop
        self._vhost = vhost
        self._has_log = has_log
        self._pid = os.getpid()
        self._closed = False
        self._asked: set[Future[Any]] = set()

    def close(self) -> None:
        """End what is asked and not answered; whatever is asked from now on fails."""
        self._closed = True
        for answer in list(self._asked):
            _fail(answer, Unreachable("the topology was closed"))

    # Questions

    def ready(self, timeout: float) -> Future[None]:
        """Done when the log has been read once."""
        return self._start(self._until_ready(timeout), timeout + 1)

    def refresh(self, timeout: float = 5.0) -> Future[None]:
        """Done when the log has been read to its end."""
        return self._start(self._refresh(), timeout)

    def proved(self) -> Future[None]:
        """Done when it is known which management APIs are this cluster's."""
        options = self._plane.options
        return self._start(self._proved(), options.start_timeout + options.management_timeout)

    async def _proved(self) -> None:
        await self._plane.prove(await self._plane.connected(unless_denied=True))

    def consumer_counts(self, shards: Iterable[str]) -> Future[dict[str, int | None]]:
        return self._start(self._plane.consumer_counts(list(shards)), self._answer_timeout)

    def look_at(self, queues: Iterable[str]) -> Future[dict[str, Declared | None]]:
        return self._start(self._plane.look_at(list(queues)), self._answer_timeout)

    def node_at(self, peer: tuple[str, int] | None, nodes: Iterable[Node]) -> Future[str | None]:
        """The node that listens at an address. The nodes' hosts may be names, to be looked up."""
        return self._start(asyncio.to_thread(node_at, peer, list(nodes)), self._answer_timeout)

    def has_exchange(self, exchange: str) -> Future[bool]:
        return self._start(self._has_exchange(exchange), self._answer_timeout)

    async def _has_exchange(self, exchange: str) -> bool:
        return await exists(await self._plane.connected(), exchange=exchange)

    @property
    def _answer_timeout(self) -> float:
        return self._plane.options.answer_timeout + 1

    async def _until_ready(self, timeout: float) -> None:
        if not self._has_log:
            return
        plane = self._plane
        deadline = self._loop.time() + timeout
        while plane.validated_at is None:
            if plane.denied:
                raise Unreachable(f"every broker refuses this user: {plane.problem}")
            if self._loop.time() > deadline:
                raise Unreachable(
                    f"the map log could not be read within {timeout:g} s: {plane.problem}"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_FOR_FAILURE):
                    await plane.connected()

    async def _refresh(self) -> None:
        if self._has_log:
            await self._plane.connected()
            await self._plane.refresh()

    def on_connection(self, logical: str, work: Work[T]) -> Future[T]:
        """What `work` makes of a connection of its own and the newest map of a name.

        The connection is to one of the map's nodes; work that publishes must not be done on that
        of the control plane, which brokers short of memory would stop reading from.
        """
        return self._start(
            self._on_connection(logical, work), self._plane.options.change_timeout + 1
        )

    async def _on_connection(self, logical: str, work: Work[T]) -> T:
        await self._refresh()
        shard_map = self._plane.log.state.maps.get(logical)
        if shard_map is None:
            raise Unreachable(f"{logical!r} is not sharded (yet)")
        problem: Unreachable | None = None
        for node in shard_map.nodes:
            try:
                session = await self._plane.open_at(node)
            except Unreachable as error:
                problem = error
                continue
            try:
                return await work(session, shard_map)
            finally:
                await session.close()
        raise problem or Unreachable(f"no node of {logical!r} is known")

    # Changes

    def change(self, step: Step) -> Future[State]:
        """Append what `step` makes of the newest state; asked again if somebody was faster."""

        async def asynchronously(state: State) -> State | None:
            try:
                return step(state)
            except Exception:
                raise
            except BaseException as error:  # an exit would end the thread of the topology
                raise LocalError(f"the change was given up by {type(error).__name__}") from error

        return self._change(lambda: self._plane.change(asynchronously))

    def set_policy(self, policy: Policy) -> Future[State]:
        check_portable(policy.pattern)
        return self.change(
            lambda state: (
                None if state.policies.get(policy.name) == policy else state.with_policy(policy)
            )
        )

    def ensure(
        self, logical: str, found: Sequence[Shard] = (), *, only_sharded: bool = False
    ) -> Future[Ensured]:
        """Make the shards be what the policy says; `found` are taken in as they are."""
        check_logical_name(logical)
        manager = Manager(self._plane, self._vhost)
        return self._change(lambda: manager.ensure(logical, found, only_sharded=only_sharded))

    def forget(self, logical: str) -> Future[State]:
        return self.change(
            lambda state: state.without_map(logical) if logical in state.maps else None
        )

    def _change(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        if not self._has_log:
            raise InvalidInput("maps", "must not be given where maps are to be changed", "maps=…")
        return self._start(work(), self._plane.options.change_timeout + 1)

    # Asking

    def _start(self, work: Coroutine[Any, Any, T], timeout: float) -> Future[T]:
        problem = self._why_unusable()
        if problem is None:
            bounded = self._in_time(work, timeout)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                asked = asyncio.run_coroutine_threadsafe(bounded, self._loop)
                return self._answer_of(asked)
            bounded.close()
        work.close()
        failed: Future[T] = Future()
        failed.set_exception(Unreachable(problem or CLOSED))
        return failed

    def _why_unusable(self) -> str | None:
        if self._closed:
            return CLOSED
        if os.getpid() != self._pid:
            return "this topology was made before a fork; make one in each process"
        return None

    def _answer_of(self, asked: Future[T]) -> Future[T]:
        """The future to hand out. `asked` itself never ends if the loop is stopped before it."""
        answer = same_answer(asked)
        self._asked.add(answer)
        answer.add_done_callback(self._asked.discard)
        answer.add_done_callback(lambda given: asked.cancel() if given.cancelled() else None)
        if self._closed:  # by another thread, a moment ago
            self.close()
        return answer

    async def _in_time(self, work: Awaitable[T], timeout: float) -> T:
        try:
            async with asyncio.timeout(timeout):
                return await work
        except TimeoutError:
            raise self.late(timeout) from None
        except OSError as error:
            if isinstance(error, WarrenError):
                raise
            raise Unreachable(reason(error)) from None

    def late(self, timeout: float) -> WarrenError:
        """What is known when no answer came in time."""
        if self._has_log and self._plane.validated_at is None:  # it is read before all else
            return Unreachable(
                f"no broker was reached within {timeout:g} s, and nothing was sent: "
                f"{self._plane.problem}"
            )
        why = self._plane.problem
        if self._plane.session is not None:
            why = "the broker is connected and silent, as to a change while it has an alarm on"
        return OutcomeUnknown(f"no answer within {timeout:g} s ({why}); it may take effect yet")


def same_answer(asked: Future[T]) -> Future[T]:
    """A future that ends as another one does, and whose waiter may give up by himself."""
    answer: Future[T] = Future()

    def done(ended: Future[T]) -> None:
        if ended.cancelled():
            _fail(answer, Unreachable("the topology was closed"))
        elif (error := ended.exception()) is not None:
            _fail(answer, error)
        else:
            _answer(answer, lambda: answer.set_result(ended.result()))

    asked.add_done_callback(done)
    return answer


def _fail(future: Future[Any], error: BaseException) -> None:
    _answer(future, lambda: future.set_exception(error))


def _answer(future: Future[Any], settle: Callable[[], None]) -> None:
    """Settle a future; what is called back because of it may exit, and must not end this thread."""
    try:
        with suppress(concurrent.futures.InvalidStateError):
            settle()
    except BaseException:
        logger.exception("what waits for %r failed", future)
