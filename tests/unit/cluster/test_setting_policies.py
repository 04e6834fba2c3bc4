"""A policy that some readers of the map log could not judge is refused before anything is sent."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from sharding import InvalidInput, Policy
from sharding.cluster.futures import TopologyFutures


def test_a_pattern_that_is_pythons_own_is_not_set() -> None:
    loop = asyncio.new_event_loop()
    try:
        futures = TopologyFutures(cast(Any, None), loop, "/", has_log=True)
        with pytest.raises(InvalidInput, match="in all languages"):
            futures.set_policy(Policy("numbers", r"^images-\d+$", 1))
    finally:
        loop.close()
