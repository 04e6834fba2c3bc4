"""Which tests run in one process, one after the other, and which begin first.

Tests of a group share what is costly or can be had once: all that harm nodes of a version, as there
is one cluster for that; all of Spark, as a JVM serves them; otherwise those of a module. Groups are
dealt out to the processes of a run in the order here, the longest first, so that none is left over
while the other processes have nothing to do: what harms nodes and Spark, then what needs brokers,
by the number of its tests. It waits more than it works; what only works fills the rest.

Only the processes that run tests know them (and their fixtures), so they write down which test is
of which group for the one that deals them out.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from functools import cached_property
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.cluster.pool import Pool

_FIRST = ("harm", "spark")
_LAST = ("property", "unit")


def in_order(items: list[pytest.Item], pool: Pool) -> None:
    """Sort tests by their groups, and write these down."""

    tests = Counter(map(_group, items))

    def rank(item: pytest.Item) -> tuple[int, int, str]:
        group = _group(item)
        part = group.partition("/")[0]
        if part in _FIRST:
            return _FIRST.index(part), 0, group
        return len(_FIRST) + (part in _LAST), -tests[group], group

    items.sort(key=rank)
    written = pool.folder / f"groups-{secrets.token_hex(4)}"
    written.write_text(json.dumps({item.nodeid: _group(item) for item in items}))
    written.replace(_file(pool))


def _group(item: pytest.Item) -> str:
    if "harmed" in getattr(item, "fixturenames", ()):
        return f"harm/{item.callspec.params['chosen_version']}"  # type: ignore[attr-defined]
    _, folder, *rest = item.nodeid.partition("::")[0].split("/")
    return "spark" if folder == "spark" else "/".join([folder, *rest])


def groups(pool: Pool) -> dict[str, str]:
    """The group of each test."""
    written: dict[str, str] = json.loads(_file(pool).read_text())
    return written


def _file(pool: Pool) -> Path:
    return pool.folder / "groups"


class ByGroup(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Deals out whole groups, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Producer, pool: Pool) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # not the largest ones first
        self._pool = pool

    @cached_property
    def _groups(self) -> dict[str, str]:
        return groups(self._pool)

    def _split_scope(self, nodeid: str) -> str:
        return self._groups[nodeid]
