"""Who shares a publisher or a stream producer, and what no report has told each of them yet.

The rules:

* Whoever shares one takes a `batch()` of it: its reports name the messages of that batch. What is
  sent and flushed on the publisher or producer itself is one more caller's, `own`, of all who do.
* A batch that nobody has any more can't be asked: what it had to tell, `own` tells.
* Who closes it is told all that no report has told, of batches too; each of these tells its own
  once more.

The publisher or producer holds its lock around every call.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from sharding.outcomes import Report, Result, Tally


class Caller:
    """One who sends, and what no report has told him yet."""

    def __init__(self, max_results: int) -> None:
        self.tally = Tally(max_results)
        self.pending = 0
        """How many of his messages have no outcome; of a producer's `own` nobody counts it."""
        self.batch: weakref.ref[SharedBatch[Any, Any]] | None = None
        self.told_at_close = False

    @property
    def key(self) -> Hashable:
        """By what `Callers` finds him."""
        return self

    def stored(self, count: int) -> None:
        self.tally.stored += count
        self.pending -= count

    def not_stored(self, result: Result) -> None:
        self.tally.add((result,))
        self.pending -= 1


Owner = TypeVar("Owner")
C = TypeVar("C", bound=Caller)


class Callers(Generic[C]):
    """Those with something to be told, of one publisher or producer."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._untold: dict[Hashable, C] = {}
        self.own = make()

    def __getitem__(self, key: Hashable) -> C:
        """One of whom something was sent."""
        return self._untold[key]

    def new(self) -> C:
        """For a batch."""
        self._take_abandoned()
        return self._make()

    def sends(self, caller: C) -> None:
        """There is something to be told of, or will be."""
        self._untold[caller.key] = caller

    def report(self, caller: C, pending: int, *, is_settled: bool) -> Report:
        """What he has not been told, with `pending` unless all that he asked for is settled."""
        if caller is self.own:
            self._take_abandoned()
        if not pending:
            self._untold.pop(caller.key, None)
        return caller.tally.take_report(pending=0 if is_settled else pending)

    def gather(self, last: Tally) -> None:
        """All that no report has told, for who closes it. A batch may still be asked."""
        last.absorb(self.own.tally)
        for caller in self._untold.values():
            if caller is not self.own and not caller.told_at_close:
                last.include(caller.tally)
                caller.told_at_close = not caller.pending

    def _take_abandoned(self) -> None:
        for caller in list(self._untold.values()):
            if caller.batch is not None and caller.batch() is None and not caller.pending:
                if not caller.told_at_close:
                    self.own.tally.absorb(caller.tally)
                del self._untold[caller.key]


class SharedBatch(ABC, Generic[Owner, C]):
    """What one caller sends through a publisher or producer that others use too.

    Leaving a `with` block flushes it, and raises if some message of it is not stored that no report
    has named. Connections and bounds are the publisher's or producer's, and so is its end: what a
    batch has to tell, it tells after that too.
    """

    def __init__(self, of: Owner, caller: C) -> None:
        self._of = of
        self._caller = caller
        caller.batch = weakref.ref(self)

    def __repr__(self) -> str:
        return f"<Batch of {self._of!r}: {self._caller.pending} unsettled>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        report = self.flush()
        if kind is None:
            report.raise_for_failures()

    @abstractmethod
    def flush(self, timeout: float = 30.0) -> Report:
        """Wait for every outcome of what went through this batch, and report since the last one."""
