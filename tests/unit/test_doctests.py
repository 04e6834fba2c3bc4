"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import sharding

MODULES = [
    "sharding",
    *(module.name for module in pkgutil.walk_packages(sharding.__path__, "sharding.")),
]
WITH_EXAMPLES = {
    "sharding.backoff",
    *(f"sharding.maps.{name}" for name in ("naming", "policy", "shard_map", "slots")),
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    # An example that is not found is not tested either.
    assert results.attempted > 0 or name not in WITH_EXAMPLES


def test_modules_that_have_examples_exist() -> None:
    assert set(MODULES) >= WITH_EXAMPLES
