"""What becomes of each message of a publisher: a ledger without I/O and without a clock.

A message waits in the line of its shard, is handed out to be sent, and is settled exactly once:

    waiting ──sent──► in flight ──ack──────────────► STORED
       │                  ├──Basic.Return──────────► UNROUTABLE
       │                  └──nack, loss, deadline──► UNKNOWN
       └──deadline, refusal, close─────────────────► REFUSED   (nothing has happened)

Rules:

* A line is first in, first out, and what is in flight is never sent again. So within a shard
  what is STORED was published in this order. What is UNKNOWN may be anywhere behind its place: the
  network may hold back what an old connection sent until a new one has sent more.
* What is settled after it was sent stays in the flight until the broker confirms it or the
  connection ends. A confirm that comes too late then changes nothing, and can't be taken for the
  confirm of another message.
* Which message a Basic.Return speaks of is not written in it: it has no delivery tag, and one ack
  with `multiple` may cover returned and stored messages alike (seen on 4.0.5 under load, so "the
  next ack belongs to it" is wrong). But a channel routes one message after the other, and writes
  the return while it routes. So returns come in the order of publishing, and before the ack of the
  same message (20,000 messages, half of them returned: no exception). The message is therefore the
  first one in flight, after the one that was returned before, that looks like it. Only messages
  with the same key, body and properties can be mistaken for one another, and those are one as good
  as the other.
* The map is the one in force, whatever its epoch: a log that was made again begins at a low one.
* A new map moves nothing that is in flight. What waits keeps its shard; if the shard has left the
  map, or is away by it and its keys have moved, it is routed again by its key, before anything that
  is published later, so that a key keeps its order. A shard that is reached through another node
  than before pauses until what is in flight through the old one is settled: two connections keep no
  order between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from sharding.maps.shard_map import ShardMap
from sharding.maps.slots import Key
from sharding.outcomes import Outcome, Result, Tally

P = TypeVar("P")


class Account:
    """The messages of one caller: how many are unsettled, and what became of the others."""

    __slots__ = ("freed", "last_number", "tally", "unsettled")

    def __init__(self, max_results: int) -> None:
        self.unsettled = 0
        self.last_number = -1
        self.tally = Tally(max_results)
        self.freed = 0
        """How many were settled since somebody asked."""


class Wait:
    """Somebody who waits until what an account had up to a number is settled."""

    __slots__ = ("account", "given_up", "is_over", "left", "number")

    def __init__(self, account: Account, number: int) -> None:
        self.account = account
        self.number = number
        self.left = 0
        self.is_over = False
        """Set by who tells the waiting thread, together with the outcomes."""
        self.given_up = False


class Message(Generic[P]):
    """A message on its way. `P` is the form in which the I/O keeps its properties."""

    __slots__ = (
        "account",
        "body",
        "deadline",
        "key",
        "line",
        "number",
        "properties",
        "settled",
        "shard",
    )
    line: Line[P]

    def __init__(
        self,
        number: int,
        key: Key,
        shard: str,
        body: bytes,
        properties: P,
        deadline: float,
        account: Account,
    ) -> None:
        self.account = account
        self.number = number
        self.key = key
        self.shard = shard
        self.body = body
        self.properties = properties
        self.deadline = deadline
        self.settled = False


class Line(Generic[P]):
    """The messages that wait for one shard, and the node they are sent through."""

    __slots__ = ("in_flight", "moves_to", "node", "shard", "waiting")

    def __init__(self, shard: str, node: str) -> None:
        self.shard = shard
        self.node = node
        self.moves_to: str | None = None
        self.waiting: deque[Message[P]] = deque()
        self.in_flight = 0


class Flight(Generic[P]):
    """What was sent on one channel in confirm mode, by delivery tag."""

    def __init__(self) -> None:
        self._sent: dict[int, Message[P]] = {}
        self._next_tag = 1
        self._oldest = 1
        self._after_return = 1
        self.overdue = 0
        """Messages whose deadline passed in flight, and that are still not confirmed."""
        self.live = 0
        """Messages in flight that are not settled."""

    def __iter__(self) -> Iterator[Message[P]]:
        return iter(self._sent.values())

    def add(self, message: Message[P]) -> None:
        self._sent[self._next_tag] = message
        self._next_tag += 1
        self.live += 1

    def confirm(self, tag: int, multiple: bool) -> Iterable[Message[P]]:
        """Take out what a confirm speaks of; nothing if it was confirmed before."""
        if not multiple:
            message = self._sent.pop(tag, None)
            return () if message is None else (message,)
        last = tag or self._next_tag - 1  # AMQP: tag 0 with `multiple` means all
        tags = range(self._oldest, min(last, self._next_tag - 1) + 1)
        self._oldest = max(self._oldest, tags.stop)
        pop = self._sent.pop
        return [message for number in tags if (message := pop(number, None)) is not None]

    def returned(self, looks_like: Callable[[Message[P]], bool]) -> Message[P] | None:
        for tag in range(max(self._after_return, self._oldest), self._next_tag):
            message = self._sent.get(tag)
            if message is not None and looks_like(message):
                self._after_return = tag + 1
                return message
        return None


class Ledger(Generic[P]):
    """Every unsettled message of a publisher. One thread uses it; `now` is always passed in."""

    def __init__(
        self,
        shard_map: ShardMap,
        *,
        on_result: Callable[[Result], None] | None = None,
    ) -> None:
        self.shard_map = shard_map
        self._nodes = _nodes_of(shard_map)
        self._lines: dict[str, Line[P]] = {}
        self._flights: dict[str, Flight[P]] = {}
        self._earliest = float("inf")
        self._on_result = on_result
        self._suspects: set[str] = set()
        self.unsettled = 0
        self._freed = 0
        self._freed_bytes = 0
        self._changed: list[Account] = []
        self._waits: list[Wait] = []

    # What is published and sent.

    def add(self, message: Message[P]) -> str:
        """Put a message in its line; returns the node that it will be sent through."""
        self.unsettled += 1
        account = message.account
        account.unsettled += 1
        account.last_number = message.number
        if message.deadline < self._earliest:
            self._earliest = message.deadline
        return self._enqueue(message)

    def _enqueue(self, message: Message[P]) -> str:
        if message.shard not in self._nodes:
            message.shard = self.shard_map.shard_of(message.key).name
        line = self._lines.get(message.shard)
        if line is None:
            line = Line(message.shard, self._nodes[message.shard])
            self._lines[message.shard] = line
        message.line = line
        line.waiting.append(message)
        return line.node

    def waiting_nodes(self) -> set[str]:
        """The nodes that a message waits for."""
        return {line.node for line in self._lines.values() if line.waiting and not line.moves_to}

    def waiting_for(self, node: str) -> Iterator[Message[P]]:
        """Take out what waits for a node. Each has to be `sent` or settled before the next."""
        for line in list(self._lines.values()):
            if line.node == node and line.moves_to is None:
                waiting = line.waiting
                while waiting:
                    yield waiting.popleft()

    def sent(self, node: str, message: Message[P]) -> None:
        message.line.in_flight += 1
        self.flight(node).add(message)

    def flight(self, node: str) -> Flight[P]:
        flight = self._flights.get(node)
        if flight is None:
            flight = self._flights[node] = Flight()
        return flight

    def follow(self, shard_map: ShardMap) -> None:
        """Go over to the map in force."""
        if shard_map is self.shard_map:
            return
        self.shard_map = shard_map
        self._nodes = _nodes_of(shard_map)
        gone = [line for shard, line in self._lines.items() if shard not in self._nodes]
        for line in gone:
            del self._lines[line.shard]
        for line in self._lines.values():
            node = self._nodes[line.shard]
            line.moves_to = node if node != line.node else None
            _move_if_idle(line)
        for line in gone:
            for message in line.waiting:
                self._enqueue(message)

    # What settles a message.

    def acked(self, node: str, tag: int, multiple: bool) -> None:
        for message in self._confirmed(node, tag, multiple):
            self._free(message)
            message.account.tally.stored += 1
            if self._on_result is not None:
                self._on_result(Result(message.number, Outcome.STORED, key=message.key))

    def nacked(self, node: str, tag: int, multiple: bool) -> None:
        for message in self._confirmed(node, tag, multiple):
            self._settle(message, Outcome.UNKNOWN, f"{node} nacked it")

    def _confirmed(self, node: str, tag: int, multiple: bool) -> Iterator[Message[P]]:
        flight = self.flight(node)
        for message in flight.confirm(tag, multiple):
            line = message.line
            line.in_flight -= 1
            if line.moves_to is not None:
                _move_if_idle(line)
            if not message.settled:
                flight.live -= 1
                yield message
            elif message.deadline < 0:
                flight.overdue -= 1

    def returned(self, node: str, looks_like: Callable[[Message[P]], bool], reason: str) -> bool:
        """The broker gave a message back. False if nothing in flight looks like it."""
        flight = self.flight(node)
        message = flight.returned(looks_like)
        if message is None:
            return False
        if not message.settled:
            flight.live -= 1
            self._settle(message, Outcome.UNROUTABLE, reason)
        return True

    def lost(self, node: str, reason: str) -> None:
        """The connection ended: what was in flight on it stays unknown."""
        for message in self._flights.pop(node, ()):
            message.line.in_flight -= 1
            _move_if_idle(message.line)
            if not message.settled:
                self._settle(message, Outcome.UNKNOWN, reason)

    def refuse_waiting(self, node: str, reason: str) -> None:
        for line in self._lines.values():
            if line.node == node and line.moves_to is None:
                self._refuse(line.waiting, reason)
                line.waiting.clear()

    def refuse(self, message: Message[P], reason: str) -> None:
        self._refuse([message], reason)

    def _refuse(self, messages: Iterable[Message[P]], reason: str) -> None:
        for message in messages:
            self._settle(message, Outcome.REFUSED, reason)

    def abandon(self, reason: str) -> None:
        """Settle everything now: nobody will wait for it any longer."""
        for line in self._lines.values():
            self._refuse(line.waiting, reason)
            line.waiting.clear()
        for node in list(self._flights):
            self.lost(node, reason)

    def expire(self, now: float, explain: Callable[[str], str] = lambda _: "") -> None:
        """Settle what is past its deadline. `explain` says why a node's messages still wait.

        Looks at every message, but only when the earliest deadline that was seen has come: in
        normal service, where messages are confirmed at once, that is once per `confirm_timeout`.
        """
        if now < self._earliest:
            return
        earliest = float("inf")
        for line in self._lines.values():
            late = [message for message in line.waiting if message.deadline <= now]
            if late:
                reason = f"not sent before its deadline: {explain(line.node)}"
                self._refuse(late, reason)
                line.waiting = deque(message for message in line.waiting if not message.settled)
            earliest = min([earliest, *(message.deadline for message in line.waiting)])
        for node, flight in self._flights.items():
            for message in flight:
                if message.settled:
                    continue
                if message.deadline > now:
                    earliest = min(earliest, message.deadline)
                    continue
                message.deadline = -1.0  # tells it from what was returned, see `_confirmed`
                flight.live -= 1
                flight.overdue += 1
                self._settle(message, Outcome.UNKNOWN, f"{node} did not confirm it in time")
        self._earliest = earliest

    def _settle(self, message: Message[P], outcome: Outcome, reason: str) -> None:
        """It is not stored, or not known to be."""
        self._free(message)
        if outcome is not Outcome.REFUSED:
            self._suspects.add(message.shard)
        result = Result(message.number, outcome, reason, message.key)
        message.account.tally.add((result,))
        if self._on_result is not None:
            self._on_result(result)

    def _free(self, message: Message[P]) -> None:
        message.settled = True
        self.unsettled -= 1
        self._freed += 1
        self._freed_bytes += len(message.body)
        account = message.account
        account.unsettled -= 1
        if not account.freed:
            self._changed.append(account)
        account.freed += 1
        for wait in self._waits:
            if wait.account is account and message.number <= wait.number:
                wait.left -= 1

    # What is told.

    def watch(self, wait: Wait) -> None:
        """Watch for the moment when all that somebody waits for is settled.

        Each wait is counted by itself: what is published later, or by others, or waited for by
        others, does not prolong it.
        """
        account = wait.account
        wait.left = account.unsettled
        if wait.number < account.last_number:
            mine = (each for each in self._all_unsettled() if each.account is account)
            wait.left = sum(1 for each in mine if each.number <= wait.number)
        self._waits.append(wait)

    def _all_unsettled(self) -> Iterator[Message[P]]:
        for line in self._lines.values():
            yield from line.waiting
        for flight in self._flights.values():
            yield from (message for message in flight if not message.settled)

    def take_ended_waits(self) -> list[Wait]:
        """The waits that have come to their end."""
        over = [wait for wait in self._waits if not wait.left]
        self._waits = [wait for wait in self._waits if wait.left and not wait.given_up]
        return over

    def take_changed(self) -> list[Account]:
        """The accounts with new outcomes; the caller takes these out of them."""
        changed, self._changed = self._changed, []
        return changed

    def take_freed(self) -> tuple[int, int]:
        """How many messages and bytes were settled since the last time."""
        freed = self._freed, self._freed_bytes
        self._freed = self._freed_bytes = 0
        return freed

    def take_suspects(self) -> set[str]:
        """The shards that gave trouble since the last time."""
        suspects, self._suspects = self._suspects, set()
        return suspects


def _nodes_of(shard_map: ShardMap) -> dict[str, str]:
    """The node of each shard that has keys."""
    return {shard.name: shard.node for shard in shard_map.shards if shard.available}


def _move_if_idle(line: Line[P]) -> None:
    if line.moves_to is not None and not line.in_flight:
        line.node, line.moves_to = line.moves_to, None
