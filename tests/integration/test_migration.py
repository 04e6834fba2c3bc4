"""The migration guide, walked step by step on a cluster with the real plugin.

Its Python examples and commands are taken from the page, run in the order in which they stand
there, and must print what the page says. Around them runs what the guide supposes: consumers that
know nothing of Warren, on every node.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
import threading
from typing import Any

import pika
import pytest

from tests.cluster import Cluster, Node, wait_until
from tests.machine import PROJECT
from tests.support.sharded import connection_to, shards_in_broker

pytestmark = pytest.mark.cluster

PAGE = (PROJECT / "docs" / "migration.md").read_text()
BLOCKS = re.findall(r"```(python|console)\n(.*?)```", PAGE, re.DOTALL)
LOGICAL, SHARDS_PER_NODE = "images", 2
SET_POLICY = next(
    line.removeprefix("$ rabbitmqctl ")
    for line in PAGE.splitlines()
    if line.startswith("$ rabbitmqctl set_policy")
)
WAITING = "waiting for "
# `doctor` has tests of its own; the others are for the reader's shell.
NOT_RUN = ("pip ", "export ", "warren doctor")


def test_guide_does_what_it_says(with_plugin: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARREN_URL", with_plugin.nodes[0].endpoint.amqp_url)
    monkeypatch.setenv("WARREN_MANAGEMENT_URL", with_plugin.nodes[0].management.url)
    walk = Walk(with_plugin)
    try:
        for language, text in BLOCKS:
            if language == "python":
                walk.run_python(text)
            else:
                walk.run_commands(text)
        walk.check_the_plugin_is_back()
    finally:
        walk.close()
    handled = walk.plain.bodies
    assert sorted(handled[:601]) == sorted(b"picture %d" % number for number in range(601))
    assert sorted(handled[601:]) == [b"by Warren", b"by the plugin"]


class Walk:
    """The reader at the keyboard, and the old application around."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._names: dict[str, Any] = {"__name__": "guide"}
        self.plain = PlainConsumers(cluster)

    def close(self) -> None:
        self.plain.stop()
        for name in ("topology", "connection"):
            if name in self._names:
                self._names[name].close()

    def run_python(self, text: str) -> None:
        if "basic_consume_all(" in text:
            # Step 4 shows what a wrapped consumer gets: here the plain ones are gone.
            wait_until(lambda: len(self.plain.bodies) == 603)
            self.plain.stop()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, "docs/migration.md", "exec"), self._names)
        promised = re.findall(r"^print\(.*\)\n# (.*)$", text, re.MULTILINE)
        assert printed.getvalue().splitlines() == promised
        if '"x-modulus-hash", durable=True)' in text:
            self._wait_for_the_plugin()

    def run_commands(self, text: str) -> None:
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, promised = part.partition("\n")
            if command.startswith(NOT_RUN):
                continue
            if command.startswith("rabbitmqctl "):
                self._ctl(command.removeprefix("rabbitmqctl "))
                continue
            said = self._output(command).replace(f"vhost '{self._cluster.vhost}'", "vhost '/'")
            assert _comparable(said) == _comparable(promised), command

    def check_the_plugin_is_back(self) -> None:
        """All wrapped clients pass through to it again, and every queue of its own is bound."""
        self._wait_for_the_plugin()
        self._names["wrapped"].basic_publish(LOGICAL, "user-42", b"back", mandatory=True)
        assert len(self._bindings()) == len(self._cluster.nodes) * SHARDS_PER_NODE

    def _wait_for_the_plugin(self) -> None:
        """On a cluster that has just started it does not make all shards (4 of 6 seen), and no
        more later; a policy that is set anew helps."""
        if "images-shards" not in self._ctl("list_policies"):
            return  # the next step of the guide sets it
        wanted = len(self._cluster.nodes) * SHARDS_PER_NODE

        def complete() -> bool:
            with contextlib.suppress(TimeoutError):
                wait_until(lambda: len(self._bindings()) == wanted, 5)
                return len(shards_in_broker(self._cluster, LOGICAL)) == wanted
            self._ctl("clear_policy images-shards")
            self._ctl(SET_POLICY)
            return False

        wait_until(complete)

    def _bindings(self) -> list[Any]:
        api = self._cluster.nodes[0].management
        return list(api.get("exchanges", self._cluster.vhost, LOGICAL, "bindings", "source"))

    def _output(self, command: str) -> str:
        """What a command prints; consumers begin to work when it says that it waits for them."""
        name, *arguments = shlex.split(command)
        assert name == "warren"
        lines = []
        with subprocess.Popen(
            [sys.executable, "-m", "sharding.cli", *arguments],
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as running:
            assert running.stdout is not None
            for line in running.stdout:
                lines.append(line)
                if line.startswith(WAITING):
                    self.plain.start()
        return "".join(lines)

    def _ctl(self, arguments: str) -> str:
        vhost = ("--vhost", self._cluster.vhost)
        return self._cluster.nodes[0].driver.ctl(*vhost, *shlex.split(arguments))


def _comparable(output: str) -> list[str]:
    """Lines, without those of which there are as many as it takes."""
    lines = [line.rstrip() for line in output.splitlines()]
    return [line for line in lines if line and not line.startswith(WAITING)]


class PlainConsumers:
    """Two consumers of the logical queue on each node, through the plugin, until stopped."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.bodies: list[bytes] = []

    def start(self) -> None:
        if self._threads:
            return
        self._threads = [
            threading.Thread(target=self._consume, args=(node,)) for node in self._cluster
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _consume(self, node: Node) -> None:
        with connection_to(node) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=20)
            for _ in range(SHARDS_PER_NODE):
                channel.basic_consume(LOGICAL, self._on_message)
            while not self._stopped.is_set():
                connection.process_data_events(time_limit=0.2)

    def _on_message(self, channel: Any, method: Any, _: pika.BasicProperties, body: bytes) -> None:
        self.bodies.append(body)
        channel.basic_ack(method.delivery_tag)
