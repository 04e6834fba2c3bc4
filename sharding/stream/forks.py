"""What was made before a fork says so in the child, and leaves the parent's connections alone.

A child has a copy of every connection and of what waits to be sent, but none of the threads behind
them. What it wrote would reach the broker as the parent's own: under the publishing ids that the
parent goes on to use, so that the broker drops the parent's messages as duplicates and confirms
them. What it closed would be closed to the parent. And it may wait for ever, for a lock whose
holder is not there. So in the child every such object, the connections included, becomes one that
refuses all but to be closed, which does nothing; that costs nothing where no fork is.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn
from weakref import WeakSet

from sharding.errors import LocalError

_made: WeakSet[Any] = WeakSet()


def of_this_process(*made: object) -> None:
    """Children of this process must not use these."""
    _made.update(made)


class MadeBeforeAFork:
    """What they become there."""

    def close(self, *_: object, **__: object) -> None:
        """What there is to close is the parent's."""

    stop = close

    def __exit__(self, *_: object) -> None:
        pass

    def __enter__(self) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __next__(self) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise LocalError("this was made before a fork; make a StreamEnvironment in each process")


def _in_child() -> None:
    for each in tuple(_made):
        each.__class__ = MadeBeforeAFork
    _made.clear()


os.register_at_fork(after_in_child=_in_child)
