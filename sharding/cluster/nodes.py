"""Which nodes there are: by management APIs that are proved to be this cluster's, else by asking at
every address that is known.

An API is proved by something that was just made over AMQP and has a name which nobody can guess: it
must know it. So one of another cluster is not believed, also where nodes have the same names, and
neither is that of a node which is cut off from the one that we are connected to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pika

from sharding.amqp.addresses import same_but_at
from sharding.amqp.session import ACCESS_REFUSED, Refused, Session
from sharding.cluster.management import ClusterView, Management, NoAnswer
from sharding.cluster.trust import Trust
from sharding.errors import RemoteError
from sharding.maps.membership import name_for, token_of
from sharding.maps.planning import Member
from sharding.maps.shard_map import Address, Node

logger = logging.getLogger("warren.topology")

# A node may hear of a queue a moment after who made it, and of a connection some seconds later.
_LOOKS_FOR_QUEUE = (0.0, 0.1, 0.2, 0.4, 0.8)
_EXPIRES_MS = 60_000
_LOOKS_FOR_CONNECTION = (0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


class ClusterNodes:
    """Works on the control plane's loop."""

    def __init__(
        self,
        view: ClusterView,
        given: Sequence[pika.ConnectionParameters],
        answer_timeout: float,
        known: Callable[[], list[Node]],
        trust: Trust,
    ) -> None:
        self._view = view
        self._given = given
        self._answer_timeout = answer_timeout
        self._known = known
        self._trust = trust
        self._strangers: set[str] = set()
        self.proved_on: Session | None = None
        """The connection on which it was last found out which APIs are believed."""
        view.believe(())

    async def members(self, session: Session) -> list[Member]:
        """The nodes of the cluster that this connection is on, as they are now."""
        if self._view:
            await self.prove(session)
            if self._view.is_believed:
                return await self.seen()
        return await self._by_token()

    async def seen(self) -> list[Member]:
        """What the believed APIs say; if none of them says anything, others may be proved."""
        tls = self._given[0].ssl_options is not None
        try:
            members = await asyncio.to_thread(self._view.members, tls, self._known())
        except NoAnswer:
            self.proved_on = None
            raise
        self._trust.confirm(each for member in members for each in member.node.addresses)
        return members

    async def prove(self, session: Session) -> None:
        """Find out which APIs are of the cluster that this connection is on.

        `NoAnswer` if none of them is, but some did not answer.
        """
        try:
            async with self._probe(session) as queue:
                asked = (self._knows(api, queue, session) for api in self._view.apis)
                answers = await asyncio.gather(*asked, return_exceptions=True)
            believed = self._judged(answers, session)
        except BaseException:
            self._view.believe(())
            self.proved_on = None
            raise
        self._view.believe(believed)
        self.proved_on = session

    def _judged(
        self, answers: Sequence[bool | BaseException], session: Session
    ) -> list[Management]:
        silent = None
        believed = []
        for api, answer in zip(self._view.apis, answers, strict=True):
            if isinstance(answer, NoAnswer):
                silent = answer
            elif isinstance(answer, BaseException):
                raise answer
            elif answer:
                believed.append(api)
                self._strangers.discard(api.url)
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
        async with asyncio.timeout(self._answer_timeout):
            channel = await session.channel()
        queue = None
        try:
            try:
                async with asyncio.timeout(self._answer_timeout):
                    expiring = {"x-expires": _EXPIRES_MS}  # should this be ended in between
                    queue = (await channel.declare("", exclusive=True, arguments=expiring)).name
            except Refused as error:
                if error.code != ACCESS_REFUSED:
                    raise
            yield queue
            if queue is not None:
                async with asyncio.timeout(self._answer_timeout):
                    await channel.delete_empty(queue)
        finally:
            channel.close()

    async def _knows(self, api: Management, queue: str | None, session: Session) -> bool:
        vhost = self._given[0].virtual_host
        if queue is not None:
            for pause in _LOOKS_FOR_QUEUE:
                await asyncio.sleep(pause)
                found = await asyncio.to_thread(self._view.knows_queue, api, vhost, queue)
                if found is None:
                    break
                if found:
                    return True
            else:
                return False
        for pause in _LOOKS_FOR_CONNECTION:
            await asyncio.sleep(pause)
            if await asyncio.to_thread(self._view.knows_connection, api, vhost, session.instance):
                return True
        return False

    async def _by_token(self) -> list[Member]:
        """The nodes that the maps know and those at the addresses given, told apart by token.

        Of a node that only maps know, and which is not asked therefore, nothing is known.
        """
        by_token: dict[str, Node] = {}
        for node in self._known():
            by_token.setdefault(token_of(node), node)
        members = {node.name: Member(node, running=False) for node in by_token.values()}
        known = []
        for node in by_token.values():
            trusted = [each for each in node.addresses if self._trust.allows(each)]
            known += [same_but_at(self._given[0], each.host, each.port) for each in trusted]
            if node.addresses and not trusted:
                members[node.name] = Member(node, running=True, drained=None)
        places = {(place.host, place.port): place for place in [*self._given, *known]}
        for (host, port), parameters in places.items():
            try:
                token, cluster_name = await self._token_at(parameters)
            except (RemoteError, TimeoutError) as error:
                if isinstance(error, Refused) and error.code == ACCESS_REFUSED:
                    raise  # it runs, and nobody may take it for one that is down
                continue
            if token not in by_token:
                name = name_for(token, str(host), cluster_name)
                by_token[token] = Node(name, (Address(str(host), int(port)),), token)
            here = by_token[token]
            members[here.name] = Member(here, running=True)
        return [members[name] for name in sorted(members)]

    async def _token_at(self, parameters: pika.ConnectionParameters) -> tuple[str, str]:
        session = await Session.open(parameters, self._answer_timeout)
        try:
            async with asyncio.timeout(self._answer_timeout):
                return await session.reply_token(), session.cluster_name
        finally:
            await session.close()
