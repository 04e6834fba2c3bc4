"""Which acknowledgements to send for messages that ended in any order. Pure.

One acknowledgement may stand for all messages up to it, so what ended without a gap from the first
one on is acknowledged by one; what ended out of turn, each by its own. The tag sent for several is
one that was not acknowledged before: the broker closes a channel at a tag that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable


class Acknowledgements:
    """The delivery tags of one channel: 1, 2, 3, …"""

    def __init__(self) -> None:
        self._through = 0
        self._ahead: set[int] = set()

    def settle(self, tags: Iterable[int]) -> list[tuple[int, bool]]:
        """What to send for these tags: each with whether it stands for all before it too."""
        new = set(tags)
        self._ahead |= new
        while self._through + 1 in self._ahead:
            self._through += 1
            self._ahead.discard(self._through)
        together = [tag for tag in new if tag <= self._through]
        alone = sorted(tag for tag in new if tag > self._through)
        return [*([(max(together), True)] if together else []), *((tag, False) for tag in alone)]
