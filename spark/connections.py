"""The stream environment of this process: made once for equal options, kept across tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sharding.errors import Unreachable
from sharding.stream.errors import AccessRefused, AuthenticationFailed
from spark.errors import without_secrets
from spark.kept import Kept
from spark.options import ConnectOptions

if TYPE_CHECKING:
    from sharding.stream.environment import StreamEnvironment


@contextmanager
def environment(options: ConnectOptions) -> Iterator[StreamEnvironment]:
    """The environment for `options`; an error that leaves the block holds no secret."""
    with without_secrets(options.credentials), _kept.lend(options) as found:
        yield found


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
