"""Who gets a core first, where a run has more to do than there are cores.

* The tests that harm nodes: they take one cluster in turn, and no run is shorter than that chain,
  which works little and so holds up nobody.
* Spark: the next longest chain; and Spark itself gives a Python process of a streaming query ten
  seconds to connect back, which is no option of it. A process at the end of a long line took more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def first_in_line() -> Iterator[None]:
    """Let the thread, and what it starts meanwhile, have a core before others get it.

    It takes root; without, a run is some minutes longer.
    """
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, usual - 5)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, usual)
