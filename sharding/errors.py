"""Every error Warren raises, and the one answer to "may I try again?".

The tree says *where* an operation failed, because that decides what the caller may do:

* `LocalError`: refused here, before anything was sent. Nothing has happened.
* `RemoteError`: the broker, or the way to it, said no. Nothing was stored.
* `OutcomeUnknown`: it was sent, and whether it took effect is not known. Doing it again may do it
  twice.

A message says what was wanted, what was found and what to do. It never holds a secret.
"""

from __future__ import annotations


class WarrenError(Exception):
    """The base of every error that Warren raises on purpose."""


class LocalError(WarrenError):
    """Refused before anything was sent."""


class RemoteError(WarrenError):
    """The broker, or the way to it, refused; nothing was stored."""


class OutcomeUnknown(WarrenError):
    """Sent, but whether it took effect is not known; repeating it may do it twice."""


class InvalidInput(LocalError, ValueError):
    """A value breaks a rule. `field` names the value, `rule` what it has to obey."""

    def __init__(self, field: str, rule: str, found: object) -> None:
        self.field = field
        self.rule = rule
        self.found = found
        super().__init__(f"{field}: {rule}; found {shown(found)}")

    def __reduce__(self) -> tuple[type[InvalidInput], tuple[str, str, object]]:
        # `found` may be anything, also what can't be pickled. Its text can, and says the same.
        return type(self), (self.field, self.rule, _Shown(shown(self.found)))


class UnsupportedFormat(LocalError):
    """Data written by a newer Warren, which this one must not guess at."""


class Unreachable(RemoteError):
    """No broker could be connected to, or the connection was lost before anything was sent."""


class MissingRight(RemoteError):
    """The user lacks a permission of the broker, which the message names; nothing was stored."""


class TryLater(LocalError):
    """Refused for now: nothing was sent, and the same call may be made again."""


class StaleMap(TryLater):
    """The shard map could not be checked for longer than the bound, so it is not used."""


class ShardUnavailable(RemoteError):
    """The shard that a key belongs to is away; the key is not sent anywhere else."""


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may be made again without the risk of doing it twice.

    Bad input stays bad and an unknown outcome may have been a success, so only what is away now
    and may be back later qualifies. This is the one place that decides it.
    """
    return isinstance(error, ShardUnavailable | TryLater | Unreachable)


def reason(error: BaseException) -> str:
    """What an error says, on one line; what it is, where it says nothing."""
    said = " ".join(words_of(error).split())
    return said or ("no answer in time" if isinstance(error, TimeoutError) else kind_of(error))


def words_of(error: BaseException) -> str:
    """An error's own text, as text that can be written anywhere.

    One that fails to say it, whatever it raises, says nothing, and nobody fails with it.
    """
    try:
        said = str.__str__(str(error))  # it may be of a class of its own
    except BaseException:
        return ""
    return said.encode("utf-8", "backslashreplace").decode()


def kind_of(value: object) -> str:
    """The name of a value's class, also where that has another idea of its name."""
    return str(type.__dict__["__name__"].__get__(type(value)))


def shown(value: object, limit: int = 80) -> str:
    """`value` as an error message shows it: on one line, not at any length, and always."""
    try:
        text = str.__str__(repr(value))  # it may be of a class of its own
    except ValueError:  # Python refuses to print whole numbers of more than 4,300 digits
        text = f"a {kind_of(value)} too long to print"
    except BaseException:  # it is the application's code; nobody fails with it
        text = f"a {kind_of(value)} that can't be printed"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


class _Shown(str):
    """A value that was already turned into text, and stands in a message as it is."""

    __slots__ = ()
    __repr__ = str.__str__
