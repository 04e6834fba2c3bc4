"""Who is asked how things are: one API while all is well, all of them when one has bad news."""

from __future__ import annotations

from typing import Any

import pytest

from sharding import Node
from sharding.cluster.management import ClusterView, Management, NoAnswer

NAMES = ["rabbit@a", "rabbit@b", "rabbit@c"]


def listener(name: str) -> dict[str, object]:
    """Brokers list none for a node that is down."""
    return {"node": name, "protocol": "amqp", "ip_address": f"host-{name[-1]}", "port": 5672}


class Api(Management):
    def __init__(self, url: str, down: str = "", silent: bool = False) -> None:
        super().__init__(url)
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "down", down)
        object.__setattr__(self, "silent", silent)

    def get(self, *path: str, timeout: float = 10) -> Any:  # noqa: ARG002
        asked: list[str] = vars(self)["asked"]
        asked.append(path[0])
        if vars(self)["silent"]:
            raise NoAnswer("timed out", in_time=False)
        if path == ("overview",):
            up = [name for name in NAMES if name not in vars(self)["down"]]
            return {"listeners": [listener(name) for name in up]}
        return [{"name": name, "running": name not in vars(self)["down"]} for name in NAMES]


def asked(api: Api) -> bool:
    return bool(vars(api)["asked"])


def running(view: ClusterView, known: list[Node] | None = None) -> dict[str, bool]:
    return {member.name: member.running for member in view.members(known=known or [])}


def test_good_news_are_told_by_one() -> None:
    apis = [Api("http://1"), Api("http://2"), Api("http://3")]
    assert all(running(ClusterView(apis), [Node("rabbit@a")]).values())
    assert [asked(api) for api in apis] == [True, False, False]


def test_of_bad_news_counts_what_most_say() -> None:
    alone = Api("http://1", down="rabbit@b rabbit@c")
    rest = [Api("http://2", down="rabbit@a"), Api("http://3", down="rabbit@a")]
    assert running(ClusterView([alone, *rest])) == {
        "rabbit@a": False, "rabbit@b": True, "rabbit@c": True
    }  # fmt: skip


def test_a_node_that_maps_know_and_one_api_does_not_is_bad_news() -> None:
    apis = [Api("http://1"), Api("http://2")]
    running(ClusterView(apis), [Node("rabbit@d")])
    assert all(map(asked, apis))


def test_who_answered_is_asked_first_the_next_time() -> None:
    silent, answers = Api("http://1", silent=True), Api("http://2")
    view = ClusterView([silent, answers])
    running(view)
    vars(silent)["asked"].clear()
    running(view)
    assert not asked(silent)


def test_nobody_answers_or_is_believed() -> None:
    with pytest.raises(NoAnswer, match="timed out"):
        running(ClusterView([Api("http://1", silent=True)]))
    view = ClusterView([Api("http://1")])
    view.believe([])
    with pytest.raises(NoAnswer, match="known to be of this cluster"):
        running(view)
