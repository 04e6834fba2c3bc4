"""Pauses grow to their bound and never beyond, whatever the factor is."""

from __future__ import annotations

import pytest

from sharding.backoff import Backoff


@pytest.mark.parametrize("factor", [1.001, 1.05, 2.0, 1e5, 1e300])
def test_pauses_grow_to_the_longest_one(factor: float) -> None:
    backoff = Backoff(first=0.1, longest=30, factor=factor, spread=0)
    pauses = [backoff.pause(failures, chance=0) for failures in range(1, 10_000)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.1
    assert pauses[-1] == 30


def test_no_first_pause_means_none_later() -> None:
    backoff = Backoff(first=0, longest=30, factor=1e5)
    assert backoff.pause(1_000, chance=1) == 0
