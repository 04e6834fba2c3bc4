"""`warren doctor` finds what is wrong with a real cluster, says how to fix it, and no secret."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from sharding.doctor import Finding, Verdict, examine, places_from
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.cluster import PLUGINS
from tests.cluster.pool import Pool
from tests.machine import PROJECT
from tests.support.certificates import Authority, server_context
from tests.support.fake_amqp import FakeAmqp
from tests.support.fake_broker import FakeBroker, Peer

SECRET = "c4nary"
SCRATCH = f"doctor-{secrets.token_hex(4)}"
PATIENCE = 60.0
"""Seconds for each question: only what hangs takes so long, also on a machine that is starved."""


def findings(
    amqp: Sequence[str] = (), management: Sequence[str] = (), streams: Sequence[str] = ()
) -> list[Finding]:
    found = examine(places_from(amqp, management, streams), timeout=PATIENCE, scratch=SCRATCH)
    assert SECRET not in json.dumps([finding.to_json() for finding in found])
    return found


def problems(found: Sequence[Finding]) -> dict[str, Finding]:
    """By check, each with the sentence that says how to fix it."""
    wrong = [finding for finding in found if finding.verdict is Verdict.PROBLEM]
    assert all(finding.fix.endswith((".", ".'", "now.")) for finding in wrong)
    return {finding.check: finding for finding in wrong}


def all_of(node: Node) -> list[Finding]:
    endpoint = node.endpoint
    return findings([endpoint.amqp_url], [endpoint.management.url], [endpoint.stream_url])


def names_left(node: Node) -> list[str]:
    kinds = ("queues", "exchanges")
    things = [
        thing["name"] for kind in kinds for thing in node.management.get(kind, node.endpoint.vhost)
    ]
    return [name for name in things if name.startswith(SCRATCH)]


@pytest.fixture
def limited(cluster: Cluster) -> Iterator[tuple[str, Node]]:
    """A user without any right, and the node to log in at."""
    node, user = cluster.nodes[0], f"limited-{secrets.token_hex(3)}"
    node.management.call("PUT", "users", user, body={"password": SECRET, "tags": ""})
    yield user, node
    node.management.call("DELETE", "users", user)


def as_user(url: str, user: str) -> str:
    return url.replace("guest:guest", f"{user}:{SECRET}")


@pytest.mark.cluster
def test_whole_cluster_has_no_problem_and_nothing_is_left_in_it(cluster: Cluster) -> None:
    found = all_of(cluster.nodes[0])
    assert problems(found) == {}
    assert {"address", "version", "nodes", "streams", "reach", "balancer", "permissions"} < {
        finding.check for finding in found
    }
    reached = [finding for finding in found if finding.check == "reach"]
    assert len(reached) == 2 * len(cluster.nodes)
    assert names_left(cluster.nodes[0]) == []


@pytest.mark.cluster
def test_command_says_it_in_words_and_by_its_exit_code(cluster: Cluster) -> None:
    endpoint = cluster.nodes[0].endpoint
    words = [sys.executable, "-m", "sharding.cli", "doctor", "--timeout", str(PATIENCE)]
    environment = os.environ | {
        "WARREN_URL": endpoint.amqp_url,
        "WARREN_MANAGEMENT_URL": endpoint.management.url,
        "WARREN_STREAM_URL": endpoint.stream_url,
    }
    done = subprocess.run(words, cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert (done.returncode, "0 problems" in done.stdout) == (0, True), done.stdout + done.stderr
    environment["WARREN_URL"] = endpoint.amqp_url.replace("guest:guest", f"guest:{SECRET}")
    done = subprocess.run(
        [*words, "--json"], cwd=PROJECT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert "login" in {finding["check"] for finding in json.loads(done.stdout)}


@pytest.mark.cluster
def test_wrong_port_is_found(cluster: Cluster) -> None:
    endpoint = cluster.nodes[0].endpoint
    closed, http = f"{endpoint.address}:9", f"{endpoint.address}:{endpoint.ports['management']}"
    found = findings(
        [f"amqp://guest:{SECRET}@{closed}/", f"amqp://guest:{SECRET}@{http}/"],
        [f"http://guest:{SECRET}@{closed}"],
        [
            f"rabbitmq-stream://guest:{SECRET}@{closed}",
            f"rabbitmq-stream://guest:{SECRET}@{http}",
            endpoint.stream_url.replace(str(endpoint.ports["stream"]), str(endpoint.ports["amqp"])),
        ],
    )
    assert [finding.check for finding in found[:6]] == [
        "port", "protocol", "port", "port", "protocol", "protocol",
    ]  # fmt: skip
    # What it says when it is asked; left alone it hangs up after 5 s, as long as a question takes.
    assert "HTTP/1.1" in found[1].found
    assert "HTTP/1.1" in found[4].found
    assert "5672" in found[0].fix
    assert "rabbitmq_stream" in found[3].fix


@pytest.mark.cluster
def test_wrong_password_is_found_by_every_protocol(cluster: Cluster) -> None:
    endpoint = cluster.nodes[0].endpoint
    management = endpoint.management.url.replace("://", f"://guest:{SECRET}@")
    found = findings(
        [as_user(endpoint.amqp_url, "guest")],
        [management],
        [as_user(endpoint.stream_url, "guest")],
    )
    assert [finding.check for finding in found] == ["login"] * 3
    assert all("password" in finding.fix for finding in found)


@pytest.mark.cluster
def test_virtual_host_that_is_not_there_is_found(cluster: Cluster) -> None:
    endpoint = cluster.nodes[0].endpoint
    nowhere = replace(endpoint, vhost="nowhere")
    found = findings([nowhere.amqp_url], [], [nowhere.stream_url])
    assert list(problems(found)) == ["virtual host"]
    assert sum(finding.verdict is Verdict.PROBLEM for finding in found) == 2


def test_name_that_does_not_resolve_is_found() -> None:
    found = findings(
        [f"amqp://guest:{SECRET}@nowhere.invalid/"],
        ["http://nowhere.invalid:15672"],
        ["rabbitmq-stream://nowhere.invalid"],
    )
    assert [finding.check for finding in found if finding.verdict is Verdict.PROBLEM] == [
        "name"
    ] * 3


@pytest.mark.cluster
def test_balancer_that_leads_to_one_node_only_is_found(cluster: Cluster) -> None:
    narrow, wide = cluster.balancer(cluster.nodes[:1]), cluster.balancer()
    even = cluster.balancer(cluster.nodes[:2])
    management = [cluster.nodes[0].management.url]
    try:
        found = findings([narrow.endpoint.amqp_url], management, [narrow.endpoint.stream_url])
        wrong = [finding for finding in found if finding.check == "balancer"]
        assert [finding.verdict for finding in wrong] == [Verdict.PROBLEM] * 2
        assert all("led to 1 of 3 nodes" in finding.found for finding in wrong)
        assert "backends" in wrong[0].fix

        # Who opened two connections for each look would always see the same one of two.
        found = findings([even.endpoint.amqp_url], management, [even.endpoint.stream_url])
        over_amqp, over_streams = (finding for finding in found if finding.check == "balancer")
        assert "led to 2 of 3 nodes" in over_amqp.found
        assert "led to 2 of 3 nodes" in over_streams.found

        found = findings([wide.endpoint.amqp_url], management, [wide.endpoint.stream_url])
        right = [finding for finding in found if finding.check == "balancer"]
        assert [finding.verdict for finding in right] == [Verdict.OK] * 2
        assert all("led to 3 nodes" in finding.found for finding in right)
    finally:
        for balancer in (narrow, even, wide):
            balancer.stop()


@pytest.mark.cluster
@pytest.mark.parametrize("missing", ["configure", "write", "read"])
def test_missing_permission_is_found(limited: tuple[str, Node], missing: str) -> None:
    user, node = limited
    rights = {right: "" if right == missing else ".*" for right in ("configure", "write", "read")}
    node.management.call("PUT", "permissions", node.endpoint.vhost, user, body=rights)
    endpoint = node.endpoint
    found = findings([as_user(endpoint.amqp_url, user)], [], [as_user(endpoint.stream_url, user)])
    wrong = [finding for finding in found if finding.verdict is Verdict.PROBLEM]
    assert {finding.check for finding in wrong} == {"permissions"}
    assert [finding.wanted.partition(",")[0] for finding in wrong] == [missing] * 2
    assert user in wrong[0].fix
    assert names_left(node) == []


@pytest.mark.cluster
def test_who_may_not_change_maps_is_told(limited: tuple[str, Node]) -> None:
    user, node = limited
    rights = {"configure": ".*", "write": r"^(?!warren\.shard-maps$).*", "read": ".*"}
    node.management.call("PUT", "permissions", node.endpoint.vhost, user, body=rights)
    found = findings([as_user(node.endpoint.amqp_url, user)], [])
    told = [each for each in found if each.check == "map log"]
    assert [each.verdict for each in told] == [Verdict.OK, Verdict.WARNING]
    assert "write access to exchange 'warren.shard-maps'" in told[1].found
    assert names_left(node) == []


@pytest.mark.cluster
def test_missing_tag_is_found(limited: tuple[str, Node]) -> None:
    user, node = limited
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    node.management.call("PUT", "permissions", node.endpoint.vhost, user, body=everything)
    url = as_user(node.endpoint.amqp_url, user)
    found = findings([url], [node.management.url])
    assert "set_user_tags" in problems(found)["login"].fix
    node.management.call("PUT", "users", user, body={"password": SECRET, "tags": "management"})
    found = findings([url], [node.management.url])
    assert "monitoring" in problems(found)["permissions"].fix


def test_broker_that_is_too_old_is_found() -> None:
    with FakeAmqp("3.9.29") as old:
        found = findings([old.url])
    assert "3.10" in problems(found)["version"].wanted
    assert problems(found)["version"].found == "3.9.29"


def silent_until_left(peer: Peer) -> None:
    """Hangs up at last on who is still there: it is found to be no broker then, and not silent."""
    peer.socket.settimeout(PATIENCE)
    with suppress(TimeoutError):
        peer.drain()
    peer.socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("scheme", ["amqp", "rabbitmq-stream"])
def test_silent_peer_is_given_up_in_time(scheme: str) -> None:
    with FakeBroker() as silent:
        silent.on_connect = silent_until_left
        host, port = silent.address
        url = f"{scheme}://guest:{SECRET}@{host}:{port}"
        amqp, streams = ([url], []) if scheme == "amqp" else ([], [url])
        found = examine(places_from(amqp, [], streams), timeout=0.5)
    assert found[0].check == "answer"
    assert "within 0.5 s" in found[0].found


def test_certificate_that_is_not_trusted_is_found(tmp_path: Path) -> None:
    context = server_context(Authority(tmp_path).sign("server", "IP:127.0.0.1"))
    with FakeBroker(context) as broker:
        host, port = broker.address
        found = findings([], [], [f"rabbitmq-stream+tls://guest:{SECRET}@{host}:{port}"])
    assert "SSL_CERT_FILE" in problems(found)["TLS"].fix


@pytest.fixture(scope="module")
def lonely(pool: Pool, broker_version: str) -> Iterator[Node]:
    """A node that advertises a name which nobody knows."""
    with pool.undivided("lonely", broker_version) as cluster:
        yield cluster.nodes[0]


@pytest.mark.cluster
def test_advertised_name_that_does_not_resolve_is_found(lonely: Node) -> None:
    found = problems(all_of(lonely))
    assert "nowhere.invalid" in found["reach"].subject
    assert "not resolved" in found["reach"].found
    assert "stream.advertised_host" in found["reach"].fix


def enable_only(node: Node, *plugins: str) -> None:
    """As `rabbitmq-plugins` does it: the file, and then the node is told."""
    node.driver.ctl(
        "eval",
        "File = rabbit_plugins:enabled_plugins_file(),"
        f' ok = file:write_file(File, <<"[{",".join(plugins)}].">>), rabbit_plugins:ensure(File).',
    )


@pytest.mark.cluster
def test_streams_that_are_not_enabled_are_found(lonely: Node) -> None:
    enable_only(lonely, "rabbitmq_management")
    try:
        wait_until(
            lambda: all(
                listener["protocol"] != "stream"
                for listener in lonely.management.get("overview")["listeners"]
            )
        )
        found = problems(all_of(lonely))
    finally:
        enable_only(lonely, *PLUGINS)
    assert "rabbitmq-plugins enable rabbitmq_stream" in found["streams"].fix
    assert "rabbitmq-plugins enable rabbitmq_stream" in found["port"].fix
