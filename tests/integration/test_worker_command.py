"""`warren worker` as an operator runs it: a process, signals, exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from interceptors import ShardedPublisher
from sharding import Policy, Topology
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.support.sharded import fresh_queue, raw_channel

pytestmark = pytest.mark.cluster

HANDLERS = """
import asyncio, os, time
from pathlib import Path

begun, let_go, log = (Path(__file__).parent / name for name in ("begun", "let-go", "log"))

def note(delivery):
    with log.open("a") as file:
        file.write(delivery.body.decode() + "\\n")

def slow(delivery):
    begun.touch()
    while not let_go.exists():
        time.sleep(0.02)
    note(delivery)

async def later(delivery):
    await asyncio.sleep(0)
    note(delivery)

not_callable = 5
"""


@pytest.fixture
def images(cluster: Cluster, topology: Topology) -> Iterator[str]:
    logical = fresh_queue()
    topology.set_policy(Policy.exactly(logical, 1, name=logical))
    shard_map = topology.ensure(logical).shard_map
    with ShardedPublisher(topology, logical, confirm_timeout=PATIENCE) as publisher:
        for number in range(30):
            publisher.publish(f"key-{number}", b"%d" % number)
        assert publisher.flush(PATIENCE).all_stored
    yield logical
    topology.forget(logical)
    topology.clear_policy(logical)
    with raw_channel(cluster.nodes[0]) as channel:
        for shard in shard_map.shards:
            channel.queue_delete(shard.name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(HANDLERS)
    return tmp_path


def start(cluster: Cluster, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROJECT),
        "WARREN_URL": " ".join(node.endpoint.amqp_url for node in cluster),
    }
    command = [
        sys.executable,
        "-c",
        "from sharding.cli.main import main; main()",
        "worker",
        *arguments,
    ]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, stderr=subprocess.PIPE)


def handled(folder: Path) -> list[int]:
    log = folder / "log"
    return [int(line) for line in log.read_text().splitlines()] if log.exists() else []


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, errors


def test_sigterm_finishes_the_message_in_hand_and_gives_the_rest_back(
    cluster: Cluster, folder: Path, images: str
) -> None:
    process = start(cluster, folder, "--queue", images, "--verbose", "jobs:slow")
    wait_until((folder / "begun").exists)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    while "stopping; handlers have 30 s" not in process.stderr.readline():
        assert process.poll() is None
    (folder / "let-go").touch()
    assert ended(process)[0] == 0
    assert len(handled(folder)) == 1
    again = start(cluster, folder, "--queue", images, "jobs:later")
    wait_until(lambda: len(handled(folder)) >= 30)
    again.send_signal(signal.SIGINT)
    assert ended(again) == (0, "")
    assert sorted(handled(folder)) == list(range(30))


def test_the_metrics_say_what_was_handled(cluster: Cluster, folder: Path, images: str) -> None:
    port = _free_port()
    process = start(cluster, folder, "--queue", images, "--metrics-port", str(port), "jobs:later")

    def counted() -> list[str]:
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            lines = [line for line in answer.read().decode().splitlines() if images in line]
        found = [line for line in lines if line.startswith("warren_group_handled")]
        return [line.rpartition(" ")[2] for line in found]

    try:
        wait_until(lambda: len(handled(folder)) == 30)
        # A message is counted when its handler has returned.
        wait_until(lambda: counted() == ["30.0"], explain=lambda: str(counted()))
    finally:
        process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["jobs:slow"], "--queue: must be given, or --stream, and not both"),
        (["--queue", "q", "--stream", "s", "jobs:slow"], "not both"),
        (["--queue", "q", "--group", "g", "jobs:slow"], "a queue has one group"),
        (["--stream", "s", "jobs:slow"], "--group: must be given with --stream"),
        (["--queue", "q", "jobs"], "handler: must look like pkg.module:function"),
        (["--queue", "q", "nowhere:slow"], "must be in a module; nowhere is none"),
        (["--queue", "q", "jobs:nothing"], "handler: must exist in jobs"),
        (["--queue", "q", "jobs:not_callable"], "handler: must be callable"),
        (["--queue", "q", "--prefetch", "0", "jobs:slow"], "prefetch: must be a whole number"),
        (["--queue", "no-such-queue", "jobs:slow"], "must be one that is sharded"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    cluster: Cluster, folder: Path, arguments: list[str], said: str
) -> None:
    code, errors = ended(start(cluster, folder, *arguments))
    assert code == 1
    assert said in errors
    assert len(errors.strip().splitlines()) == 1
