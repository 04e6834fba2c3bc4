"""The stream environment of this process: made once for equal options, kept across tasks."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from sharding.errors import Unreachable
from sharding.stream.errors import AccessRefused, AuthenticationFailed
from spark.errors import without_secrets
from spark.kept import Kept
from spark.options import ConnectOptions

if TYPE_CHECKING:
    from sharding.stream.environment import StreamEnvironment


class environment:  # noqa: N801  # used as a statement: with environment(options) as streams:
    """The environment for `options`, for the time of a block.

    An error that leaves the block holds no secret. One of Warren's own leaves it without the
    traceback of Warren's insides: Spark shows users the whole of it, on top of the message.
    """

    def __init__(self, options: ConnectOptions) -> None:
        self._credentials = options.credentials
        self._lent = _kept.lend(options)

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


_kept: Kept[ConnectOptions, StreamEnvironment] = Kept(_connect, _close, _is_dead)
