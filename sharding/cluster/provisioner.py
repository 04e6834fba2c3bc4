"""The manager: from a policy and the running nodes to shards that exist where they should.

The order of work keeps every map true: declare, look where the queue landed, bind, and only then
append the map. Any process may do it, several at once too: declaring twice does no harm, and the
log lets one of two equal maps win. No queue that holds messages is ever deleted.

Nothing that is published is confirmed and dropped, whoever publishes it and however far this got:

    images ──SHARDS_KEY──► images.shards ──the shard's name──► shards
       └──what has no such key──► images.unrouted, an exchange and a queue of that name
                                     └──while that is away──► warren.refused, which nacks

`images` (or `warren: images`, where that name is taken) is made last of all, and has the way to the
queue of unrouted messages (its alternate exchange) from its declaration on. `images.shards` has
none, so that what carries our key and finds no shard is returned. A broker of 3.10 forgets the way
to a queue whose node is down, and would confirm what finds none; newer ones nack it themselves. So
there is one more way behind, to a queue on every node that takes nothing.

Nothing of this is ever taken down again, also when the name is sharded no more: somebody may shard
it at the same moment, and who deletes what another has just made leaves an exchange that confirms
and drops.

What somebody forgets meanwhile is not brought back: before each step that makes something, a
manager that found a map reads that it is still there. Who forgets a name says so in the log before
he deletes anything.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sharding.amqp.session import Channel, Refused, Session
from sharding.cluster.control_plane import ControlPlane
from sharding.cluster.management import NoAnswer
from sharding.errors import (
    InvalidInput,
    LocalError,
    RemoteError,
    Unreachable,
    UnsupportedFormat,
    reason,
)
from sharding.maps.map_log import MAP, POLICY, Entry, State
from sharding.maps.membership import known_as, token_of
from sharding.maps.naming import (
    REFUSED,
    SHARDS_KEY,
    ShardName,
    refusing,
    shards_exchange,
    token_of_node,
    unrouted,
)
from sharding.maps.planning import Member, next_map, wanted_shards
from sharding.maps.policy import Policy, policy_for
from sharding.maps.shard_map import Node, Shard, ShardMap

logger = logging.getLogger("warren.manager")

PRECONDITION_FAILED, NOT_FOUND = 406, 404
CLASSIC = {"x-queue-type": "classic"}
TAKES_NOTHING = {**CLASSIC, "x-max-length": 0, "x-overflow": "reject-publish"}
# Above whatever moved the queues; RabbitMQ applies the one policy of the highest priority.
LOCATOR_PRIORITY = 1_000


@dataclass(frozen=True, slots=True)
class Ensured:
    """What `ensure` did: the map in force, and what the operator should know."""

    shard_map: ShardMap
    notes: tuple[str, ...] = ()
    made_again: bool = False
    """The exchange was gone and is there again. What was published to it between its declaration
    and its binding, by whoever knew the map too, is kept, and has to be brought to its shards."""
    kept: int = 0
    """How many messages are kept as unrouted: strangers', and what came while a manager that has
    ended was in the middle of making the exchange again."""


class Forgotten(LocalError):
    """Another process has stopped sharding the name meanwhile; it is left so."""

    def __init__(self, logical: str) -> None:
        super().__init__(
            f"another process has stopped sharding {logical!r} meanwhile, and it is left so; to "
            "shard it again, say so again"
        )


class Manager:
    """Works on the control plane's loop. One for each call of `ensure`."""

    def __init__(self, plane: ControlPlane, vhost: str) -> None:
        self._plane = plane
        self._vhost = vhost
        self._notes: list[str] = []
        self._sharded: str | None = None
        self._made_again = False
        self._kept = 0
        self._names: dict[str, str] = {}
        self._silent: set[str] = set()
        """Nodes of which a shard did not answer; to ask for each more takes as long again."""

    async def ensure(
        self, logical: str, found: Sequence[Shard] = (), *, only_sharded: bool = False
    ) -> Ensured:
        """Bring the shards in step with the policy; `found` are taken in as they are.

        `Forgotten` if the name had a map, or should have by `only_sharded`, and has none any more.
        """
        result: list[ShardMap] = []
        self._sharded = logical if only_sharded else None

        async def step(state: State) -> State | None:
            if logical in state.maps:
                self._sharded = logical
            elif self._sharded is not None:
                raise Forgotten(logical)
            try:
                proposed = await self._propose(logical, state, found)
            except Refused:  # for want of what somebody deleted, perhaps
                await self._check_not_forgotten()
                raise
            result[:] = [proposed or state.maps[logical]]
            return state.with_map(proposed) if proposed else None

        state = await self._plane.change(step)
        return Ensured(
            state.maps.get(logical, result[0]),
            tuple(dict.fromkeys(self._notes)),
            self._made_again,
            self._kept,
        )

    async def _propose(self, logical: str, state: State, found: Sequence[Shard]) -> ShardMap | None:
        self._check_understood(logical, state)
        current = state.maps.get(logical)
        policy = policy_for(logical, state.policies.values())
        if policy is None and current is not None:
            policy = current.policy
        if policy is None:
            raise InvalidInput(
                "logical queue", "must match a policy; set one with 'warren policy set'", logical
            )
        named = [name.node for shard in found if (name := ShardName.parse(shard.name))]
        nodes = [
            *(current.nodes if current else ()),
            *map(Node, dict.fromkeys(named)),  # whose map was lost, or is the plugin's
            *self._plane.known_nodes(),
        ]
        members = known_as(await self._plane.members(), nodes)
        self._names = {token_of(member.node): member.name for member in members}
        existing = [
            *(current.shards if current else ()),
            *(replace(shard, node=self._called(shard.node)) for shard in found),
        ]
        members += await self._said_to_have_left(members, existing, nodes)
        shards = wanted_shards(logical, policy, members, existing)
        known = {shard.name: shard for shard in existing}
        session = await self._plane.connected()
        await _declare_exchange(session, shards_exchange(logical), internal=True)
        await _declare_exchange(session, REFUSED, "fanout", internal=True)
        try:
            placed, tokens = await self._place(logical, shards, known, members, policy)
        except InvalidInput:  # nothing half-made is left
            if current is None:
                await _delete_unused(session, shards_exchange(logical))
            raise
        if not placed:
            raise Unreachable(f"no node can be reached to make shards of {logical!r} on")
        exchange = await self._open_exchange(session, logical, policy, current)
        members = [await self._as_seen(member, member.name in tokens) for member in members]
        return next_map(logical, policy, members, placed, tokens, current, exchange)

    async def _said_to_have_left(
        self, members: Sequence[Member], existing: Sequence[Shard], nodes: Sequence[Node]
    ) -> list[Member]:
        """Nodes that are no members by what is said, though there are shards of theirs: they stay.

        A shard is gone if the broker says so; one that does not answer may come back.
        """
        here = {member.name for member in members}
        lost = {shard.name: shard.node for shard in existing if shard.node not in here}
        if not lost:
            return []
        seen = await self._plane.look_at(lost)
        names = sorted({node for shard, node in lost.items() if shard in seen})
        for name in names:
            self._note(f"node {name!r} is said to have left, but its shards are there: they stay")
        known = {node.name: node for node in reversed(nodes)}
        return [Member(known.get(name, Node(name)), running=True, drained=None) for name in names]

    def _called(self, node: str) -> str:
        """The name by which a node is known here, of which the broker has told the true one."""
        if node in self._names.values():  # two names may have one hash
            return node
        return self._names.get(token_of_node(node), node)

    def _check_understood(self, logical: str, state: State) -> None:
        """Make nothing by half of the log: a policy that can't be read may be the one in force."""
        if why := state.why_frozen(Entry(MAP, logical)):
            raise UnsupportedFormat(why)
        for entry, why in state.frozen.items():
            if entry.kind == POLICY:
                raise UnsupportedFormat(why)

    async def _check_not_forgotten(self) -> None:
        if self._sharded is None:
            return
        with suppress(RemoteError, TimeoutError):  # then the log's verdict tells in the end
            await self._plane.connected()
            await self._plane.refresh()
        if self._sharded not in self._plane.log.state.maps:
            raise Forgotten(self._sharded)

    async def _is_in_a_map(self, shard: str) -> bool:
        """As the log says now: what was read when this round began may be old."""
        await self._plane.connected()
        await self._plane.refresh()
        maps = self._plane.log.state.maps.values()
        return any(each.name == shard for shard_map in maps for each in shard_map.shards)

    async def _as_seen(self, member: Member, was_reached: bool) -> Member:
        """Find out whether a node is in maintenance mode where the management API does not say."""
        if not member.running or member.drained is not None:
            return member
        if was_reached:
            return replace(member, drained=False)
        return replace(member, drained=True if await self._plane.refuses(member.node) else None)

    async def _open_exchange(
        self, session: Session, logical: str, policy: Policy, current: ShardMap | None
    ) -> str:
        """Make the exchange that is published to: the logical name's own unless that is taken.

        One that is in use already stays in use, whatever the policy says of durability now.
        """
        in_use = current is not None and current.exchange == logical
        is_there = in_use and await exists(session, exchange=logical)
        self._made_again = self._made_again or (in_use and not is_there)
        if not is_there:
            await self._check_not_forgotten()
        await self._make_net(session, unrouted(logical), is_there)
        for name in (logical, f"warren: {logical}"):
            try:
                await _declare_ours(session, name, logical, policy.durable, is_there)
            except Refused as error:
                if error.code != PRECONDITION_FAILED:
                    raise
                self._note(
                    f"the exchange {name!r} exists and is not ours ({error.text}); messages go "
                    f"through 'warren: {logical}' until it is removed"
                )
                continue
            channel = await session.channel()
            try:
                await channel.bind_exchange(shards_exchange(logical), name, SHARDS_KEY)
            finally:
                channel.close()
            return name
        raise InvalidInput("exchange", "must be one of ours or not exist", f"warren: {logical}")

    async def _make_net(self, session: Session, name: str, is_in_use: bool) -> None:
        """The way to a queue, and the queue. Durable whatever the shards are: for the unexpected.

        While its node is down, the broker refuses what would go there with a nack; but nothing is
        opened that would lead nowhere.
        """
        behind = {"alternate-exchange": REFUSED}
        await _declare_exchange(session, name, "fanout", internal=True, arguments=behind)
        channel = await session.channel()
        try:
            async with self._answered_in_time():
                declared = await channel.declare(name, durable=True, arguments=CLASSIC)
                await channel.bind(name, name, "")
                self._kept = declared.messages
        except (Refused, TimeoutError) as error:
            if isinstance(error, Refused) and error.code != NOT_FOUND:
                raise
            if not is_in_use:
                raise Unreachable(f"{name!r} can't be made: {reason(error)}") from None
            self._note(f"{name!r}, the queue of unrouted messages, is away: {reason(error)}")
        finally:
            channel.close()

    async def _place(
        self,
        logical: str,
        shards: Sequence[Shard],
        known: Mapping[str, Shard],
        members: Sequence[Member],
        policy: Policy,
    ) -> tuple[list[Shard], dict[str, str]]:
        """Declare and bind the shards of each running node, over a connection to that node.

        A shard that the map has stays in it also where its node can't be reached now; a new one
        that could not be made does not enter it.
        """
        tokens: dict[str, str] = {}
        placed = {shard.name: shard for shard in shards}
        names = {member.name for member in members}
        for member in members:
            own = [shard for shard in shards if _home(shard, names) == member.name]
            if not own or not member.serves:
                continue
            await self._check_not_forgotten()
            try:
                session = await self._plane.open_at(member.node)
            except Unreachable as error:
                # The API calls a node that joins running seconds before it lists its listeners.
                unmade = [shard.name for shard in own if shard.name not in known]
                for name in unmade:
                    del placed[name]
                lacks = f"{len(unmade)} shards are not made on it yet, the next ensure makes them"
                self._note(f"{error}; {lacks if unmade else 'its shards are left as they are'}")
                continue
            try:
                token = await session.reply_token()
                if member.node.reply_token not in (None, token):
                    self._note(
                        f"{session.where} leads to another node than {member.name}, whose shards "
                        "are left as they are: an address of the node's own is needed"
                    )
                    for shard in own:
                        if shard.name not in known:
                            del placed[shard.name]
                    continue
                tokens[member.name] = token
                is_in_use = any(shard.name in known for shard in own)
                await self._make_refusing(session, refusing(member.name), is_in_use)
                for shard in own:
                    placed[shard.name] = await self._place_one(
                        session,
                        replace(shard, node=member.name),
                        known.get(shard.name),
                        policy,
                        shards_exchange(logical),
                    )
            finally:
                await session.close()
        return [placed[shard.name] for shard in shards if shard.name in placed], tokens

    async def _make_refusing(self, session: Session, queue: str, is_in_use: bool) -> None:
        """One that was made before may be where a policy of the broker put it, and away."""
        channel = await session.channel()
        try:
            async with self._answered_in_time():
                await channel.declare(queue, durable=True, arguments=TAKES_NOTHING)
                await channel.bind(queue, REFUSED, "")
        except (Refused, TimeoutError) as error:
            if isinstance(error, Refused) and not _says_away(error):
                raise
            if not is_in_use:
                raise Unreachable(f"{queue!r} can't be made: {reason(error)}") from None
            self._note(f"{queue!r}, which refuses what is lost, is away: {reason(error)}")
        finally:
            channel.close()

    async def _place_one(
        self, session: Session, at_home: Shard, known: Shard | None, policy: Policy, exchange: str
    ) -> Shard:
        """Make one shard on the node that `session` is connected to, or say where it is.

        A policy of the broker may have put it on another node, and the broker holds a question for
        64 s where that is down. What the map says of a shard that does not answer stays.
        """
        if known is not None and known.node in self._silent:
            self._note(f"shard {at_home.name!r} is left as it is: {known.node} does not answer")
            return replace(at_home, node=known.node)
        try:
            return await self._make_one(session, at_home, known, policy, exchange)
        except (Refused, TimeoutError) as error:
            if isinstance(error, Refused) and not _says_away(error):
                raise
            if known is None:
                raise Unreachable(f"{at_home.name!r} can't be made: {reason(error)}") from None
            self._note(f"shard {at_home.name!r} is left as it is: {reason(error)}")
            if known.node != at_home.node:
                self._silent.add(known.node)
            return replace(at_home, node=known.node)

    async def _make_one(
        self, session: Session, at_home: Shard, known: Shard | None, policy: Policy, exchange: str
    ) -> Shard:
        """Where nobody can tell where it landed, what the map said of it stays."""
        await self._declare(session, at_home, policy)
        landed = await self._where(at_home, is_new=known is None)
        # Replicated queues have leaders that the broker moves; only classic ones have a home.
        stays = policy.queue_arguments.get("x-queue-type", "classic") == "classic"
        if stays and landed not in (None, at_home.node):
            if known is not None:
                self._note(
                    f"shard {at_home.name!r} is on {landed}, not on {at_home.node}: it was made "
                    "there and stays, as messages may be on their way to it"
                )
            elif await self._bring_home(session, at_home, policy, exchange):
                landed = await self._where(at_home)
        channel = await session.channel()
        try:
            async with self._answered_in_time():
                await channel.bind(at_home.name, exchange, at_home.name)
        finally:
            channel.close()
        return replace(at_home, node=landed or (known or at_home).node)

    def _answered_in_time(self) -> asyncio.Timeout:
        return asyncio.timeout(self._plane.options.answer_timeout)

    async def _declare(self, session: Session, shard: Shard, policy: Policy) -> None:
        channel = await session.channel()
        try:
            # Always of a stated type: a virtual host, or a whole broker, may have another default.
            arguments = {**CLASSIC, **policy.queue_arguments}
            async with self._answered_in_time():
                await channel.declare(shard.name, durable=policy.durable, arguments=arguments)
        except Refused as error:
            if error.code != PRECONDITION_FAILED:
                raise
            async with self._answered_in_time():
                is_there = await exists(session, queue=shard.name)
            if not is_there:
                rule = f"must be such that the broker takes them: {error.text}"
                raise InvalidInput("queue arguments", rule, dict(policy.queue_arguments)) from None
            self._note(
                f"{shard.name!r} exists with other properties and is used as it is: {error.text}"
            )
        finally:
            channel.close()

    async def _bring_home(
        self, session: Session, shard: Shard, policy: Policy, exchange: str
    ) -> bool:
        """Outrank the policy that moved a new shard, and make it again, if it is empty and unused.

        What is on its way to a queue when that is deleted the broker confirms and drops. So a queue
        that another manager has put into a map, or made at home, meanwhile is left alone, and the
        queue is unbound first: an earlier life of the name may have bound it.
        """
        try:
            await asyncio.to_thread(self._set_locator_policy, shard.name)
        except NoAnswer as error:
            self._note(
                f"shard {shard.name!r} is not on {shard.node}: a policy of the broker places "
                f"queues, and this user may not set another ({error}; it needs 'policymaker')"
            )
            return False
        if await self._is_in_a_map(shard.name) or await self._where(shard) == shard.node:
            return True
        channel: Channel = await session.channel()
        try:
            await channel.unbind(shard.name, exchange, shard.name)
            await channel.delete_empty(shard.name)
        except Refused as error:
            self._note(f"shard {shard.name!r} is not on {shard.node}, but in use: {error.text}")
            return False
        finally:
            channel.close()
        await self._declare(session, shard, policy)
        return True

    def _set_locator_policy(self, shard: str) -> None:
        """Keep what the policy in force says of the shards, and change only where they live."""
        view = self._plane.view
        queue: dict[str, Any] = view.ask("GET", "queues", self._vhost, shard)
        in_force = dict(queue.get("effective_policy_definition") or {})
        # Older brokers read the classic queues' locator under its older name only.
        key = "queue-leader-locator" if view.version() >= (3, 12) else "queue-master-locator"
        definition = {**in_force, key: "client-local"}
        # One policy for each logical queue: what is in force for this one is not for others.
        name = ShardName.parse(shard)
        assert name is not None  # only shards that are named after their node have a home
        escaped = re.escape(name.logical)
        view.ask(
            "PUT",
            "policies",
            self._vhost,
            locator_policy(name.logical),
            body={
                "pattern": f"^sharding: {escaped} - \\S+@\\S+ - [0-9]+$",
                "apply-to": "queues",
                "priority": LOCATOR_PRIORITY,
                "definition": definition,
            },
        )
        self._note(
            f"set the policy {locator_policy(name.logical)!r}: another one moved shards elsewhere"
        )

    async def _where(self, shard: Shard, *, is_new: bool = True) -> str | None:
        """The node that a shard lives on; None where nobody can tell.

        What an API said of the nodes it must say of a new shard as well: none is put into a map
        unseen, where it could be seen.
        """
        if not self._plane.view:
            return None
        try:
            node = await asyncio.to_thread(self._plane.view.queue_node, self._vhost, shard.name)
        except NoAnswer as error:
            may_not_ask = error.status is not None and error.status < 500
            if may_not_ask or not (is_new and self._plane.view.is_believed):
                return None
            raise
        return node if node is None else self._called(node)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
            logger.warning("%s", text)


def net(logical: str) -> dict[str, str]:
    """The arguments of an exchange of ours: where what reaches no shard goes."""
    return {"alternate-exchange": unrouted(logical)}


async def _declare_ours(
    session: Session, exchange: str, logical: str, durable: bool, is_in_use: bool
) -> None:
    """Declare the exchange that is published to; one in use may be durable or not.

    `Refused` (406) if it is not as ours are: somebody may have deleted it and made it again without
    the way to unrouted messages, and then it would confirm and drop them.
    """
    try:
        await _declare_exchange(session, exchange, durable=durable, arguments=net(logical))
    except Refused as error:
        if error.code != PRECONDITION_FAILED or not is_in_use:
            raise
        await _declare_exchange(session, exchange, durable=not durable, arguments=net(logical))


async def _declare_exchange(session: Session, exchange: str, *kind: str, **options: Any) -> None:
    channel = await session.channel()
    try:
        await channel.declare_exchange(exchange, *kind, **options)
    finally:
        channel.close()


async def _delete_unused(session: Session, exchange: str) -> None:
    channel = await session.channel()
    try:
        await channel.delete_exchange(exchange, if_unused=True)
    except Refused as error:
        logger.info("the exchange %r stays: %s", exchange, error.text)
    finally:
        channel.close()


def _says_away(error: Refused) -> bool:
    """Whether a queue is there whose node is down; what is not there is "no queue"."""
    return error.code == NOT_FOUND and not error.text.startswith("NOT_FOUND - no ")


async def exists(session: Session, *, queue: str = "", exchange: str = "") -> bool:
    channel = await session.channel()
    try:
        if queue:
            await channel.declare(queue, passive=True)
        else:
            await channel.declare_exchange(exchange, passive=True)
    except Refused as error:
        if error.code != NOT_FOUND:
            raise
        return False
    finally:
        channel.close()
    return True


def locator_policy(logical: str) -> str:
    """The name of the policy of ours that keeps the shards of a logical queue at home."""
    return f"warren keeps shards of {logical}"[:200]


def _home(shard: Shard, members: set[str]) -> str:
    """The node that a shard belongs on: the one in its name, as long as there is such a node."""
    name = ShardName.parse(shard.name)
    return name.node if name is not None and name.node in members else shard.node
