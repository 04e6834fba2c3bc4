"""Every method of a channel that names a queue or an exchange is intercepted, or has its reason.

A new version of pika or aio-pika that adds one turns this red.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import aio_pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.channel import Channel

from interceptors import AioShardedChannel, AsyncShardedChannel, ShardedChannel
from interceptors.method_rules import INTERCEPTED, PASSED_THROUGH
from tests.machine import PROJECT

NAMING = {"queue", "exchange", "queue_name", "exchange_name", "name", "source", "destination"}
KINDS = [
    (BlockingChannel, ShardedChannel),
    (Channel, AsyncShardedChannel),
    (aio_pika.Channel, AioShardedChannel),
]
AIO_NAMES = {
    "declare_queue": "queue_declare",
    "get_queue": "queue_declare",
    "declare_exchange": "exchange_declare",
    "get_exchange": "basic_publish",
}


def naming_methods(channel: type) -> dict[str, str]:
    """The public methods that take a name, by the word that the table has for them."""
    return {
        name: AIO_NAMES.get(name, name)
        for name, method in inspect.getmembers(channel, inspect.isfunction)
        if not name.startswith("_") and NAMING & set(inspect.signature(method).parameters)
    }


@pytest.mark.parametrize(("theirs", "ours"), KINDS)
def test_every_method_that_takes_a_name_is_in_the_table(theirs: type, ours: type) -> None:
    found = naming_methods(theirs)
    assert len(found) >= 6
    for name, word in found.items():
        assert (word in INTERCEPTED) != (word in PASSED_THROUGH), name
        is_ours = any(name in vars(each) for each in ours.__mro__)
        assert is_ours or word in PASSED_THROUGH, f"{ours.__name__} does not intercept {name}"


@pytest.mark.parametrize(("theirs", "ours"), KINDS[:2])
def test_what_is_intercepted_takes_the_arguments_of_the_method_it_stands_for(
    theirs: type, ours: type
) -> None:
    for name in set(naming_methods(theirs)) & set(INTERCEPTED):
        wanted = inspect.signature(getattr(theirs, name)).parameters
        given = inspect.signature(getattr(ours, name)).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in given.values())
        assert takes_all or list(given) == list(wanted), name


def test_the_guide_has_the_same_table() -> None:
    guide = Path(PROJECT / "docs" / "queues.md").read_text()
    told = guide[
        guide.index("## What each call does") : guide.index("## What the application sees")
    ]
    assert set(INTERCEPTED) <= set(re.findall(r"`(\w+)", told))
