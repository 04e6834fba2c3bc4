"""Messages over all that AMQP 0-9-1 knows, and handlers over all that Python lets one do.

Everything follows from a seed. Messages are bytes, made by hand: no client library would send them
all. Handlers come as functions of a delivery; `Expected` says what must become of the message.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Never

from sharding.groups import BatchFailed, Delivery
from tests.support.raw_amqp import short, sized

MAX_HEADER = 131_072 - 8 - 12
"""Of a content header in RabbitMQ's own frames, without its first fields."""
FLAGS = {
    "content_type": 15,
    "content_encoding": 14,
    "headers": 13,
    "delivery_mode": 12,
    "priority": 11,
    "correlation_id": 10,
    "reply_to": 9,
    "expiration": 8,
    "message_id": 7,
    "timestamp": 6,
    "type": 5,
    "app_id": 3,
    "cluster_id": 2,
}
"""All but `user_id`, which the broker compares with the connection's."""


class Messages:
    """Properties and keys, one after the other."""

    def __init__(self, random_: random.Random) -> None:
        self._random = random_

    def properties(self, *blind_copies: str) -> bytes:
        """Encoded properties, with these in BCC."""
        chosen = {name for name in FLAGS if self._random.random() < 0.4} | {"headers"}
        pieces = {name: self._property(name) for name in chosen}
        copies = b"".join(b"S" + sized(copy.encode()) for copy in blind_copies)
        bcc = short(b"BCC") + b"A" + sized(copies)
        rest = sum(map(len, pieces.values())) + len(bcc) + 2
        pieces["headers"] = sized(bcc + self._table(MAX_HEADER - rest))
        flags = sum(1 << FLAGS[name] for name in chosen)
        flags |= self._random.choice([0, 0, 0, 1, 2, 3])  # the broker ignores the last two
        return struct.pack(">H", flags) + b"".join(pieces[n] for n in FLAGS if n in chosen)

    def key(self) -> bytes:
        return self._random.choice(
            [
                b"key-%d" % self._random.randrange(50),
                "schlüssel 🔑".encode(),
                self._random.randbytes(self._random.randrange(256)),
                b"\xff\xfe",
                b"\xff\xfd",
                b"",
                b"k" * 255,
            ]
        )

    def _property(self, name: str) -> bytes:
        if name == "headers":
            return b"\0\0\0\0"
        if name in ("delivery_mode", "priority"):
            return self._random.choice([b"\x01", b"\x02"])
        if name == "timestamp":
            return self._time()
        if name == "expiration":
            return short(b"%d" % self._random.randrange(10**9, 4 * 10**9))
        return short(self._text(255))

    def _table(self, room: int) -> bytes:
        if self._random.random() < 0.02:  # as much as fits
            filler = room - len(short(b"baggage")) - 5
            return short(b"baggage") + b"S" + sized(b"x" * (filler - self._random.randrange(90)))
        if self._random.random() < 0.03:
            return short(b"CC") + b"A" + sized(b"S" + sized(b"nobody")) + short(b"a") + b"V"
        if self._random.random() < 0.01:
            return short(b"deep") + self._nested(self._random.randrange(100, 20_000))
        return b"".join(
            short(self._name()) + self._value(depth=0) for _ in range(self._random.randrange(8))
        )

    def _name(self) -> bytes:
        known = [b"x-warren-key", b"x-warren-error", b"x-death", b"CC ", b"", b"\xff\xfe", b"a"]
        if self._random.random() < 0.3:
            return self._random.choice(known)
        return self._text(40)

    def _value(self, depth: int) -> bytes:
        letter = self._random.choice("tbBsuIilLfdDTSxVAF" if depth < 4 else "tbBsuIilLfdDTSxV")
        number: Callable[[int], bytes] = self._random.randbytes
        match letter:
            case "t":
                return b"t" + self._random.choice([b"\0", b"\1", b"\xff"])
            case "b" | "B":
                return letter.encode() + number(1)
            case "s" | "u":
                return letter.encode() + number(2)
            case "I" | "i":
                return letter.encode() + self._random.choice(
                    [number(4), b"\xff" * 4, b"\x80\0\0\0"]
                )
            case "l" | "L":
                return letter.encode() + self._random.choice([number(8), b"\xff" * 8])
            case "f":
                return b"f" + struct.pack(">f", self._random.choice([0.5, 19.99, -1e30, 1e-40]))
            case "d":
                return b"d" + struct.pack(">d", self._random.choice([19.99, -0.0, 1e308, 5e-324]))
            case "D":
                return b"D" + number(1) + number(4)
            case "T":
                return b"T" + self._time()
            case "S" | "x":
                return letter.encode() + sized(self._text(300))
            case "A":
                values = [self._value(depth + 1) for _ in range(self._random.randrange(4))]
                return b"A" + sized(b"".join(values))
            case "F":
                fields = [
                    short(self._name()) + self._value(depth + 1)
                    for _ in range(self._random.randrange(4))
                ]
                return b"F" + sized(b"".join(fields))
        return b"V"

    def _nested(self, depth: int) -> bytes:
        """Arrays in arrays. Made from outside to inside: a string grown `depth` times is slow."""
        sizes = (5 * (depth - level - 1) for level in range(depth))
        return b"".join(b"A" + struct.pack(">I", size) for size in sizes)

    def _time(self) -> bytes:
        seconds = [0, 1_700_000_000, 1_700_000_000_000, 253_402_300_800, 2**63, 2**64 - 1]
        return struct.pack(">Q", self._random.choice(seconds))

    def _text(self, limit: int) -> bytes:
        size = self._random.randrange(limit // 4)
        return self._random.choice(
            [b"", b"plain", "é🔑".encode(), b"\xff\xfe", b"\0", self._random.randbytes(size)]
        )


class Expected(Enum):
    DONE = auto()
    DEAD = auto()


class NoWords(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class ExitInWords(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class NotEvenText(Exception):
    def __str__(self) -> Any:
        return 7


class OddText(str):
    __slots__ = ()

    def strip(self, *_: object) -> Never:
        raise RuntimeError("not even stripped")

    splitlines = encode = __len__ = strip  # type: ignore[assignment]


class OddWords(Exception):
    def __str__(self) -> str:
        return OddText("odd")


class Nameless(type):
    @property
    def __name__(cls) -> Never:  # type: ignore[override]
        raise RuntimeError("no name")


class NamelessError(Exception, metaclass=Nameless):
    pass


class Unknowable:
    """Says nothing of itself, and not even whether it is true."""

    def __bool__(self) -> Never:
        raise RuntimeError("neither")

    __repr__ = __str__ = __eq__ = __hash__ = __len__ = __bool__  # type: ignore[assignment]


def _raise(error: BaseException) -> Never:
    raise error


def _endless(delivery: Delivery) -> None:
    _endless(delivery)


def _circle(_: Delivery) -> Never:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    raise one


def _write(delivery: Delivery) -> None:
    """Odd things into everything that it was given."""
    if isinstance(delivery.headers, dict):  # none are a mapping that can't be written
        delivery.headers["span"] = object()
        delivery.headers[7] = Unknowable()
    delivery.properties.headers = Unknowable()
    delivery.properties.raw = None
    delivery.properties.message_id = object()
    vars(delivery.properties).clear()
    for name in ("body", "key", "shard", "headers", "properties", "attempt", "offset"):
        object.__setattr__(delivery, name, Unknowable())


def _write_and_fail(delivery: Delivery) -> Never:
    _write(delivery)
    raise ValueError("after writing")


def _take_away_and_fail(delivery: Delivery) -> Never:
    for name in ("body", "key", "shard", "headers", "properties", "attempt"):
        object.__delattr__(delivery, name)
    raise ValueError("nothing is left")


def _lie_about_a_batch(_: Delivery) -> Never:
    error = BatchFailed(0)
    error.done = Unknowable()  # type: ignore[assignment]
    raise error


def _fail_once(delivery: Delivery) -> None:
    if delivery.attempt == 1:
        raise OSError("once")


def _exit_once(delivery: Delivery) -> None:
    if delivery.attempt == 1:
        sys.exit("once")


def _raising(error: Callable[[], BaseException]) -> Callable[[Delivery], object]:
    return lambda _: _raise(error())


def _returning(value: Callable[[], object]) -> Callable[[Delivery], object]:
    return lambda _: value()


DONE = Expected.DONE
DEAD = Expected.DEAD
Handlers = dict[str, tuple[Expected, Callable[[Delivery], Any]]]
ERRORS: list[Callable[[], BaseException]] = [
    lambda: ValueError("plain"),
    lambda: ValueError(),
    lambda: ValueError("half an emoji \ud83d"),
    lambda: ValueError("\udcff\0\r\nmore"),
    lambda: ValueError("x" * 200_000),
    lambda: ValueError("é🔑" * 5_000),
    lambda: ValueError(object(), b"\xff"),
    NoWords,
    ExitInWords,
    NotEvenText,
    OddWords,
    NamelessError,
    lambda: SystemExit(0),
    lambda: SystemExit("bye"),
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
    asyncio.CancelledError,
    BaseException,
    MemoryError,
    lambda: BaseExceptionGroup("many", [SystemExit(1), ValueError("x")]),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"),
    lambda: BatchFailed(0),
    TimeoutError,
]
PLAIN: Handlers = {
    **{f"raises {n}": (DEAD, _raising(error)) for n, error in enumerate(ERRORS)},
    "raises with a circle of causes": (DEAD, _circle),
    "lies about a batch": (DEAD, _lie_about_a_batch),
    "calls itself without end": (DEAD, _endless),
    "writes and fails": (DEAD, _write_and_fail),
    "takes all away and fails": (DEAD, _take_away_and_fail),
    "returns a generator": (DEAD, _returning(lambda: (each for each in [1]))),
    "fails once": (DONE, _fail_once),
    "exits once": (DONE, _exit_once),
    "writes": (DONE, _write),
    **{
        f"returns {number}": (DONE, _returning(value))
        for number, value in enumerate(
            [
                lambda: None,
                lambda: False,
                lambda: 7,
                lambda: ValueError("returned"),
                lambda: ValueError,
                Unknowable,
                Unknowable,
                lambda: lambda: None,
                lambda: [1, 2],
            ]
        )
    },
}


async def _nothing() -> None:
    pass


async def _some() -> Any:
    yield 1


class OnlyAwaitable:
    def __await__(self) -> Never:
        raise RuntimeError("nobody should await it")


SYNCHRONOUS: Handlers = {
    **PLAIN,
    "is interrupted": (DEAD, _raising(KeyboardInterrupt)),
    "returns a coroutine": (DEAD, _returning(_nothing)),
    "returns an asynchronous generator": (DEAD, _returning(_some)),
    "returns an awaitable": (DEAD, _returning(OnlyAwaitable)),
}


def _awaited(handler: Callable[[Delivery], Any]) -> Callable[[Delivery], Any]:
    async def handle(delivery: Delivery) -> Any:
        await asyncio.sleep(0)
        return handler(delivery)

    return handle


async def _cancels_itself(_: Delivery) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def _waits_for_the_cancelled(_: Delivery) -> None:
    other = asyncio.ensure_future(_nothing())
    other.cancel()
    await other


ASYNCHRONOUS: Handlers = {
    **{f"{name}, not awaited": handler for name, handler in PLAIN.items()},
    **{name: (expected, _awaited(handler)) for name, (expected, handler) in PLAIN.items()},
    "returns a coroutine": (DEAD, _awaited(_returning(_nothing))),
    "awaits what raises": (DEAD, _returning(OnlyAwaitable)),
    "cancels itself": (DEAD, _cancels_itself),
    "waits for the cancelled": (DEAD, _waits_for_the_cancelled),
}


class Hangs:
    """Handlers that hang until the test is over, each in its way."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def end(self) -> None:
        self._over.set()

    def for_threads(self) -> Handlers:
        def hang_and_fail(delivery: Delivery) -> Never:
            self._over.wait()
            _write_and_fail(delivery)

        return {
            "hangs": (DEAD, lambda _: self._over.wait()),
            "hangs and fails": (DEAD, hang_and_fail),
        }

    def for_tasks(self) -> Handlers:
        async def hang(_: Delivery) -> None:
            await asyncio.Event().wait()

        async def fail_when_cancelled(delivery: Delivery) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                _write_and_fail(delivery)

        async def exit_when_cancelled(_: Delivery) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                sys.exit(1)

        async def will_not_be_cancelled(_: Delivery) -> None:
            while not self._over.is_set():
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue

        return {
            "hangs": (DEAD, hang),
            "fails when cancelled": (DEAD, fail_when_cancelled),
            "exits when cancelled": (DEAD, exit_when_cancelled),
            "will not be cancelled": (DEAD, will_not_be_cancelled),
        }
