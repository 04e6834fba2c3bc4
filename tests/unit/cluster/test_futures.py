"""Futures of a topology end, whatever becomes of it."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from sharding import InvalidInput, ShardMap, Topology
from sharding.cluster.topology import KeptMessages, TopologyOptions
from sharding.errors import LocalError, Unreachable
from sharding.maps.map_log import State

OPTIONS = TopologyOptions(connect_timeout=0.2, answer_timeout=0.2, change_timeout=0.5)


@pytest.fixture
def url() -> Iterator[str]:
    """A place that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}/"


def failure(future: Future[Any]) -> str:
    error = future.exception(timeout=10)
    assert isinstance(error, Unreachable), error
    return str(error)


def test_a_question_that_nobody_answers_ends_with_why(url: str) -> None:
    with Topology(url, options=OPTIONS) as topology:
        assert not topology.is_ready
        assert "could not be read within 0.3 s" in failure(topology.futures.ready(0.3))
        assert "nothing was sent" in failure(topology.futures.forget("images"))
        with pytest.raises(Unreachable, match="nothing was sent"):
            topology.forget("images")


def test_what_waits_when_the_topology_is_closed_is_told(url: str) -> None:
    topology = Topology(url, options=replace(OPTIONS, change_timeout=60))
    waiting = topology.futures.forget("images")
    topology.close()
    assert failure(waiting) == "the topology was closed"
    assert failure(topology.futures.forget("images")) == "the topology is closed"
    with pytest.raises(Unreachable, match="the topology is closed"):
        topology.forget("images")


def test_who_gives_up_takes_the_question_back(url: str) -> None:
    with Topology(url, options=replace(OPTIONS, change_timeout=60)) as topology:
        waiting = topology.futures.refresh(60)
        assert waiting.cancel()
        topology.close()
        assert waiting.cancelled()


def test_a_child_process_is_told_to_make_its_own(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Topology(url, options=OPTIONS) as topology:
        parent = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)
        assert "before a fork" in failure(topology.futures.refresh())
        monkeypatch.undo()


def test_fixed_maps_are_ready_and_can_not_be_changed(url: str) -> None:
    no_maps: list[ShardMap] = []
    with Topology(url, maps=no_maps, options=OPTIONS) as topology:
        assert topology.is_ready
        assert topology.futures.ready(0).result(10) is None
        assert topology.futures.refresh().result(10) is None
        with pytest.raises(InvalidInput, match="must not be given where maps are to be changed"):
            topology.futures.forget("images")


def test_a_topology_may_be_closed_on_its_own_thread(url: str) -> None:
    """By a listener, or by whoever hears of an answer there."""
    topology = Topology(url, options=OPTIONS)
    closed = threading.Event()

    def close() -> None:
        topology.close()
        closed.set()

    topology._loop.call_soon_threadsafe(close)
    assert closed.wait(10)
    topology._thread.join(10)
    assert not topology._thread.is_alive()


def test_application_that_exits_in_the_topologys_thread_does_not_end_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> Any:
        sys.exit("not the topology's end")

    with Topology(url, options=replace(OPTIONS, change_timeout=60)) as topology:
        topology.subscribe(leave)
        topology._loop.call_soon_threadsafe(topology._on_change, State(), State())
        unanswered = topology.futures.ready(0.3)
        unanswered.add_done_callback(leave)
        assert "could not be read" in failure(unanswered)
        monkeypatch.setattr(topology._plane, "change", lambda step: step(State()))
        with pytest.raises(LocalError, match="SystemExit"):
            topology.change(leave)
        assert topology._thread.is_alive()
        assert "could not be read" in failure(topology.futures.ready(0.3))


def test_one_who_gives_up_does_not_end_what_others_wait_for() -> None:
    """Found by an attack: under an alarm the first whose time was up cancelled it for all, and
    they were told by an error that is none of Warren's."""
    kept, bringing = KeptMessages(), Future[int]()
    first, second = (kept.bring_once("images", lambda _: bringing) for _ in range(2))
    first.cancel()
    bringing.set_result(3)
    assert second.result(timeout=10) == 3
