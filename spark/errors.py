"""Errors on their way to Spark: without secrets, and short.

Spark writes the text of an error, its causes and its traceback into logs, the event log and the
driver's exception. So what leaves Warren's code in a Python worker passes through here.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from sharding.errors import RemoteError, WarrenError
from spark.credentials import Credentials, NoCredentials

_HIDDEN = "***"
_SHORTEST_SECRET = 4
"""Anything shorter is found in innocent words, and hiding those would make errors unreadable."""


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
