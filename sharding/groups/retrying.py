"""What to do next with messages whose handler failed. Pure.

The rules:

1. A message is tried `attempts` times, with growing pauses. Its key waits, other keys go on.
2. A batch is tried as a batch first, `attempts` times. Then its messages are tried one by one, each
   `attempts` times of its own, so that only the poisonous ones become dead letters. One by one,
   the pauses of different keys run side by side.
3. A batch that got further (`BatchFailed(done=n)` with n > 0) counts its attempts anew: another
   message is at its head now.
4. A handler that hangs is not tried again, since it may be at work on the message still. A batch
   that hangs is tried one by one, because only one of its messages may be at fault.
5. Where there is no place for dead letters, nothing is ever given up: the last pause is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharding.groups.options import Retry


@dataclass(frozen=True, slots=True)
class Again:
    """Try the same messages, as they are, after so many seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Try each message of the batch alone."""


@dataclass(frozen=True, slots=True)
class Bury:
    """The message is a dead letter."""


Verdict = Again | OneByOne | Bury


def after_failure(
    retry: Retry, *, tries: int, size: int, hung: bool, buries: bool, chance: float
) -> Verdict:
    """The verdict on `size` messages that failed together for the `tries`-th time.

    `buries` says whether there is a place for dead letters, `chance` is a random number.
    """
    if size > 1 and (hung or tries >= retry.attempts):
        return OneByOne()
    if (hung or tries >= retry.attempts) and buries:
        return Bury()
    return Again(retry.delay(tries, chance))
