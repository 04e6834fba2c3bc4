"""`warren worker --stream` as an operator runs it: a process, signals, exit codes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sharding.groups.streams.worker import members_stream
from sharding.stream import StreamEnvironment
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.integration.test_worker_command import HANDLERS, ended, handled, start
from tests.support import patient
from tests.support.streams import environment_of, super_stream_in

pytestmark = pytest.mark.cluster

MESSAGES = 30


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(cluster, **patient.STREAMS) as opened:
        if opened.server_version < (3, 11):
            pytest.skip("consumer groups over streams need RabbitMQ 3.11")
        yield opened


@pytest.fixture
def invoices(environment: StreamEnvironment) -> Iterator[str]:
    with super_stream_in(environment) as name:
        with environment.producer(name) as producer:
            for number in range(MESSAGES):
                producer.send(b"%d" % number, key=f"key-{number}")
            producer.flush(timeout=PATIENCE).raise_for_failures()
        yield name
        environment.delete_stream(members_stream(name), missing_ok=True)


HANDLERS_OF_STREAMS = """
def quick(delivery):
    note(delivery)

def one_by_one(delivery):
    body, folder = delivery.body.decode(), Path(__file__).parent
    (folder / f"begun-{body}").touch()
    while not (folder / f"let-go-{body}").exists():
        time.sleep(0.02)
    note(delivery)
"""


@pytest.fixture
def folder(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "jobs.py").write_text(HANDLERS + HANDLERS_OF_STREAMS)
    # Several addresses in the variable are several options.
    monkeypatch.setitem(
        os.environ,
        "WARREN_STREAM_URL",
        " ".join(node.endpoint.stream_url for node in cluster),
    )
    return tmp_path


def test_sigterm_finishes_the_message_in_hand_and_the_next_worker_goes_on(
    cluster: Cluster, folder: Path, invoices: str
) -> None:
    of_billing = ("--stream", invoices, "--group", "billing")
    process = start(cluster, folder, *of_billing, "--verbose", "jobs:one_by_one")
    wait_until(lambda: list(folder.glob("begun-*")))
    [begun] = folder.glob("begun-*")
    body = begun.name.removeprefix("begun-")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    while "stopping; handlers have 30 s" not in process.stderr.readline():
        assert process.poll() is None
    # A partition is left a moment after that line; what was begun till then must not be finished.
    (folder / f"let-go-{body}").touch()
    assert ended(process)[0] == 0
    assert handled(folder) == [int(body)]
    again = start(cluster, folder, *of_billing, "jobs:quick")
    wait_until(lambda: len(handled(folder)) >= MESSAGES)
    again.send_signal(signal.SIGINT)
    assert ended(again) == (0, "")
    assert sorted(handled(folder)) == list(range(MESSAGES))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stream", "nothing-here", "--group", "g", "jobs:quick"], "no such stream"),
        (["--stream", "s", "--group", "g", "jobs:later"], "must not be asynchronous"),
        (["--stream", "s", "--group", "g", "--offset", "x", "jobs:quick"], 'offset: "first", "la'),
        (["--stream", "s", "--group", "", "jobs:quick"], "name: must have 1 to 255 bytes"),
    ],
)
@pytest.mark.usefixtures("environment")
def test_what_is_wrong_is_said_in_one_line(
    cluster: Cluster, folder: Path, arguments: list[str], said: str
) -> None:
    code, errors = ended(start(cluster, folder, *arguments))
    assert code == 1
    assert said in errors
    assert len(errors.strip().splitlines()) == 1
