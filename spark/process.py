"""What a Python process of Spark keeps between tasks, and what errors may leave it.

Things that are dear to make are made once for each process and lent to one task after another;
errors go to Spark short, and without secrets.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from sharding.errors import RemoteError, Unreachable, WarrenError
from sharding.stream.errors import AccessRefused, AuthenticationFailed
from spark.options.connect import ConnectOptions, Credentials, NoCredentials

if TYPE_CHECKING:
    from sharding.stream.environment import StreamEnvironment

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass
class _Entry(Generic[V]):
    value: V
    users: int = 0
    last_used: float = 0.0
    dropped: bool = False


class ProcessCache(Generic[K, V]):
    """Makes a value at the first use of its key, and keeps it.

    * A value that failed its user with an error for which `is_dead` holds is not lent again. It is
      closed when its last user is done.
    * Beyond `most` values, or after `idle` seconds without a user, the longest unused are closed.
    * A forked child makes its own: it must neither use nor close its parent's connections.
    """

    def __init__(
        self,
        make: Callable[[K], V],
        close: Callable[[V], None],
        is_dead: Callable[[BaseException], bool],
        *,
        most: int = 8,
        idle: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        pid: Callable[[], int] = os.getpid,
    ) -> None:
        self._make = make
        self._close = close
        self._is_dead = is_dead
        self._most = most
        self._idle = idle
        self._clock = clock
        self._pid = pid
        self._begin()
        atexit.register(self.close_all)

    def __len__(self) -> int:
        return len(self._entries) if self._owner == self._pid() else 0

    @contextmanager
    def lend(self, key: K) -> Iterator[V]:
        entry = self._take(key)
        try:
            yield entry.value
        except BaseException as error:
            self._give_back(key, entry, dead=self._is_dead(error))
            raise
        else:
            self._give_back(key, entry, dead=False)

    def close_all(self) -> None:
        """Close what is kept, in use or not."""
        if self._owner != self._pid():
            return
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            entry.dropped = True
            self._close(entry.value)

    def _begin(self) -> None:
        self._owner = self._pid()
        self._lock = threading.Lock()
        self._entries: dict[K, _Entry[V]] = {}

    def _take(self, key: K) -> _Entry[V]:
        if self._owner != self._pid():
            self._begin()
        # Under the lock also while it is made: two users of a key must not make two.
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(self._make(key))
            entry.users += 1
            surplus = self._surplus()
        for unused in surplus:
            self._close(unused.value)
        return entry

    def _give_back(self, key: K, entry: _Entry[V], *, dead: bool) -> None:
        with self._lock:
            entry.users -= 1
            entry.last_used = self._clock()
            if dead and self._entries.get(key) is entry:
                del self._entries[key]
                entry.dropped = True
            to_close = entry.dropped and entry.users == 0
        if to_close:
            self._close(entry.value)

    def _surplus(self) -> list[_Entry[V]]:
        """Take out what is unused for too long, or too much."""
        unused = [(key, entry) for key, entry in self._entries.items() if entry.users == 0]
        unused.sort(key=lambda pair: pair[1].last_used)
        too_many = max(0, len(self._entries) - self._most)
        too_old = self._clock() - self._idle
        out = [
            (key, entry)
            for number, (key, entry) in enumerate(unused)
            if number < too_many or entry.last_used < too_old
        ]
        for key, _ in out:
            del self._entries[key]
        return [entry for _, entry in out]


class environment:  # noqa: N801  # used as a statement: with environment(options) as streams:
    """The environment for `options`, for the time of a block.

    An error that leaves the block holds no secret. One of Warren's own leaves it without the
    traceback of Warren's insides: Spark shows users the whole of it, on top of the message.
    """

    def __init__(self, options: ConnectOptions) -> None:
        self._credentials = options.credentials
        self._lent = _environments.lend(options)

    def __enter__(self) -> StreamEnvironment:
        with without_secrets(self._credentials):
            return self._lent.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lent.__exit__(kind, error, traceback)
        with without_secrets(self._credentials):
            if error is not None:
                raise error


def _connect(options: ConnectOptions) -> StreamEnvironment:
    from sharding.stream.environment import StreamEnvironment

    login = options.credentials.login()
    uris = [login.into(uri) for uri in options.uris]
    return StreamEnvironment(*uris, options=options.environment_options())


def _close(found: StreamEnvironment) -> None:
    found.close(timeout=2)


def _is_dead(error: BaseException) -> bool:
    # An environment finds its way back by itself. But where no node can be reached the task gives
    # up, and the next one should begin afresh: addresses and passwords may have changed.
    return isinstance(error, Unreachable | AuthenticationFailed | AccessRefused)


_environments: ProcessCache[ConnectOptions, StreamEnvironment] = ProcessCache(
    _connect, _close, _is_dead
)


_HIDDEN = "***"
_SHORTEST_SECRET = 4
"""Anything shorter is found in innocent words, and hiding those would make errors unreadable."""


# Errors on their way to Spark: without secrets, and short.
#
# Spark writes the text of an error, its causes and its traceback into logs, the event log and the
# driver's exception. So what leaves Warren's code in a Python worker passes through here.


class Failed(RemoteError):
    """An error whose text held a secret, told again without it."""


class without_secrets:  # noqa: N801  # used as a statement: with without_secrets(…):
    """Let errors pass that say nothing secret, and tell the others again."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception):
            return
        secrets = _secrets(self._credentials)
        if any(_holds(link, secrets) for link in _chain(error)):
            raise Failed(f"{type(error).__name__}: {_hide(str(error), secrets)}") from None
        if isinstance(error, WarrenError):
            # Its message says what to do; what led to it inside of Warren is of no use to a user.
            raise error.with_traceback(None) from None


def _secrets(credentials: Credentials) -> list[str]:
    try:
        login = credentials.login()
    except NoCredentials:
        return []
    spellings = {login.password, repr(login.password)[1:-1], login.into("//h").split("@")[0][2:]}
    spellings.add(login.into("//h").rpartition("@")[0].rpartition(":")[2])
    return [text for text in spellings if len(text) >= _SHORTEST_SECRET and text != "guest"]


def _holds(error: BaseException, secrets: list[str]) -> bool:
    text = " ".join([str(error), repr(error), *getattr(error, "__notes__", ())])
    return any(secret in text for secret in secrets)


def _hide(text: str, secrets: list[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
