"""Which nodes there are: by management APIs that are proved to be this cluster's, else by asking at
every address that is known.

An API is proved by something that was just made over AMQP and has a name which nobody can guess: it
must know it. So one of another cluster is not believed, also where nodes have the same names, and
neither is that of a node which is cut off from the one that we are connected to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import pika

from sharding.amqp.addresses import same_but_at
from sharding.amqp.session import ACCESS_REFUSED, Refused, Session
from sharding.cluster.management import ClusterView, Management, NoAnswer
from sharding.cluster.trust import Trust
from sharding.errors import RemoteError
from sharding.maps.membership import token_of
from sharding.maps.naming import name_for
from sharding.maps.planning import Member
from sharding.maps.shard_map import Address, Node

logger = logging.getLogger("warren.topology")

T = TypeVar("T")

# A node may hear of a queue a moment after who made it, and of a connection some seconds later.
_LOOKS_FOR_QUEUE = (0.0, 0.1, 0.2, 0.4, 0.8)
_LOOKS_FOR_CONNECTION = 7
_MOST_AT_ONCE = 8


class Timeouts(NamedTuple):
    """In seconds, for one question each."""

    answer: float
    management: float


class Proof(Enum):
    """How an API showed that it is this cluster's."""

    QUEUE = auto()
    """It sees what is made now: it is not cut off either."""
    CONNECTION = auto()
    """It knows our connection, as that of a node which is cut off does if we are on that node."""


class ClusterNodes:
    """Works on the control plane's loop."""

    def __init__(
        self,
        view: ClusterView,
        given: Sequence[pika.ConnectionParameters],
        timeouts: Timeouts,
        known: Callable[[], list[Node]],
        trust: Trust,
    ) -> None:
        self._view = view
        self._given = given
        self._timeouts = timeouts
        self._known = known
        self._trust = trust
        self._strangers: set[str] = set()
        self._proofs: dict[Management, Proof] = {}
        self._proving = asyncio.Lock()
        self._proved_on: Session | None = None
        self._threads: ThreadPoolExecutor | None = None
        self.last: list[Member] = []
        """The nodes as they were when that was last proved."""
        self._addresses: Mapping[str, Sequence[Address]] = {}
        """Where each listens that an API of this cluster still names."""
        view.believe(())

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def members(self, session: Session) -> list[Member]:
        """The nodes of the cluster that this connection is on, as they are now."""
        if self._view:
            await self.learn(session)
            if self._view.is_believed:
                return self.last
        return await self._by_token()

    async def watch(self, session: Session) -> list[Member]:
        """The same for who looks again and again: what is as it was is not proved again."""
        if session is self._proved_on and self._view.is_believed:
            try:
                if (seen := await self._seen()) == self.last:
                    return seen
            except NoAnswer:
                self._proved_on = None  # others may be believed
                raise
        await self.learn(session)
        if not self._view.is_believed:
            raise NoAnswer("no management API is known to be of this cluster")
        return self.last

    async def learn(self, session: Session) -> None:
        """Find out which nodes there are, and where they listen, by APIs that are proved.

        Only what is said together with a proof counts: an API may be another cluster's later.
        """
        async with self._proving:
            await self._prove(session)
            if self._view.is_believed:
                self.last = await self._seen()
                self._trust.confirm(self._listening())
            self._proved_on = session

    def _listening(self) -> Iterator[Address]:
        """Where the nodes listen; one that is down tells nobody, and comes back where it was."""
        before = self._addresses
        self._addresses = {
            token_of(node): node.addresses or before.get(token_of(node), ())
            for node in (member.node for member in self.last)
        }
        return chain.from_iterable(self._addresses.values())

    async def prove(self, session: Session) -> None:
        """Find out which APIs are of the cluster that this connection is on.

        `NoAnswer` if none of the APIs is, but some did not answer.
        """
        async with self._proving:
            await self._prove(session)

    async def _prove(self, session: Session) -> None:
        self._proved_on = None
        try:
            async with self._probe(session) as queue:
                asked = (self._knows(api, queue, session) for api in self._view.apis)
                answers = await asyncio.gather(*asked, return_exceptions=True)
            self._proofs = self._judged(answers, session)
        except BaseException:
            self._view.believe(())
            raise
        self._view.believe(self._proofs)

    async def _seen(self) -> list[Member]:
        """What the believed APIs say.

        Bad news of who may be cut off, and we with him, is none unless most APIs given say it.
        """
        tls = self._given[0].ssl_options is not None
        seen: list[Member] = await self._in_thread(self._view.members, tls, self._known())
        most = 2 * len(self._proofs) > len(self._view.apis) > 1
        if Proof.QUEUE in self._proofs.values() or most:
            return seen
        return [replace(member, running=True) for member in seen]

    async def _in_thread(self, ask: Callable[..., T], *given: Any) -> T:
        """On threads of its own: an API that hangs must not hold up who looks up a host."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                _MOST_AT_ONCE, thread_name_prefix="warren-management"
            )
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(ask, *given))

    def _judged(
        self, answers: Sequence[Proof | BaseException | None], session: Session
    ) -> dict[Management, Proof]:
        silent = None
        believed = {}
        for api, answer in zip(self._view.apis, answers, strict=True):
            if isinstance(answer, Proof):
                believed[api] = answer
                self._strangers.discard(api.url)
            elif isinstance(answer, NoAnswer):
                silent = answer
            elif isinstance(answer, Exception):
                logger.debug("%s gives odd answers", api.url, exc_info=answer)
                silent = NoAnswer(f"{api.url} answers as no management API does: {answer}")
            elif api.url not in self._strangers:
                self._strangers.add(api.url)
                logger.warning(
                    "the management API %s is not used: it does not know what was just made over "
                    "AMQP through %s; it is another cluster's, its node is cut off, or its user "
                    "may see neither the virtual host's queues nor this user's connections",
                    api.url,
                    session.where,
                )
        if not believed and silent is not None:
            raise silent
        return believed

    @asynccontextmanager
    async def _probe(self, session: Session) -> AsyncIterator[str | None]:
        """A queue that nobody else knows of; None where this user may make none."""
        async with asyncio.timeout(self._timeouts.answer):
            channel = await session.channel()
        queue = None
        try:
            try:
                async with asyncio.timeout(self._timeouts.answer):
                    queue = (await channel.declare("", exclusive=True)).name
            except Refused as error:
                if error.code != ACCESS_REFUSED:
                    raise
            yield queue
        finally:
            if queue is not None:
                channel.delete_soon(queue)  # it is the connection's, and would outlive the channel
            channel.close()

    async def _knows(self, api: Management, queue: str | None, session: Session) -> Proof | None:
        """Each API has its own deadline: a slow one must not spoil what others say."""
        try:
            async with asyncio.timeout(self._timeouts.management):
                return await self._proof_of(api, queue, session)
        except TimeoutError:
            raise NoAnswer(f"{api.url}: timed out", in_time=False) from None

    async def _proof_of(self, api: Management, queue: str | None, session: Session) -> Proof | None:
        vhost = self._given[0].virtual_host
        if queue is not None:
            for pause in _LOOKS_FOR_QUEUE:
                await asyncio.sleep(pause)
                found = await self._in_thread(self._view.knows_queue, api, vhost, queue)
                if found is None:
                    break
                if found:
                    return Proof.QUEUE
            else:
                return None
        for _ in range(_LOOKS_FOR_CONNECTION):
            if await self._in_thread(self._view.knows_connection, api, vhost, session.instance):
                return Proof.CONNECTION
            await asyncio.sleep(1)
        return None

    async def _by_token(self) -> list[Member]:
        """The nodes that the maps know and those at the addresses given, told apart by token.

        Of a node whose addresses are not known, or known from maps alone, nothing is known; nor of
        one at whose address another node answered: a balancer's leads to each of them in turn.
        """
        by_token: dict[str, Node] = {}
        for node in self._known():
            known = by_token.setdefault(token_of(node), node)
            addresses = tuple(dict.fromkeys([*known.addresses, *node.addresses]))
            by_token[token_of(node)] = replace(known, addresses=addresses)
        reached: dict[str, Member] = {}
        answered: set[Address] = set()
        places = [*self._given]
        for node in by_token.values():
            trusted = [each for each in node.addresses if self._trust.allows(each)]
            places += [same_but_at(self._given[0], each.host, each.port) for each in trusted]
        for (host, port), parameters in {(each.host, each.port): each for each in places}.items():
            try:
                token, cluster_name = await self._token_at(parameters)
            except (RemoteError, TimeoutError) as error:
                if isinstance(error, Refused) and error.code == ACCESS_REFUSED:
                    raise  # it runs, and nobody may take it for one that is down
                continue
            answered.add(Address(str(host), int(port)))
            if token not in by_token:
                name = name_for(token, str(host), cluster_name)
                by_token[token] = Node(name, (Address(str(host), int(port)),), token)
            reached[token] = Member(by_token[token], running=True)
        members = [
            reached.get(token) or self._not_reached(node, answered)
            for token, node in by_token.items()
        ]
        return sorted(members, key=lambda member: member.name)

    def _not_reached(self, node: Node, answered: AbstractSet[Address]) -> Member:
        tried = [each for each in node.addresses if self._trust.allows(each)]
        if tried and answered.isdisjoint(tried):
            return Member(node, running=False)
        return Member(node, running=True, drained=None)

    async def _token_at(self, parameters: pika.ConnectionParameters) -> tuple[str, str]:
        session = await Session.open(parameters, self._timeouts.answer)
        try:
            async with asyncio.timeout(self._timeouts.answer):
                return await session.reply_token(), session.cluster_name
        finally:
            await session.close()
