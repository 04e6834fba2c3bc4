"""No call that takes a URL shows any of its password, however wrongly the URL is written.

s05: of a password with / ? # that was not escaped, what stood before was shown as host and port.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from sharding import InvalidInput, Topology
from sharding.cli.main import commands
from sharding.cli.options import app
from sharding.cluster.management import management_api
from sharding.doctor import places_from
from sharding.maps import state_file
from sharding.maps.map_log import State
from sharding.stream import EnvironmentOptions, StreamEnvironment
from spark.options.read import ReadOptions
from spark.source import WarrenDataSource
from spark.write.sink import PublishOptions

CANARY, PART = "c4nary", "4711"
SPECIAL = "/?#@:%[]\\^|{}<>,;&=+ \"'`\u2100"
PASSWORDS = [
    *(f"{PART}{mark}{CANARY}" for mark in SPECIAL),
    *(f"{CANARY}{mark}{PART}" for mark in SPECIAL),
]


def written(scheme: str, password: str) -> Iterator[str]:
    """A URL with this password, as people write it who do not think of escapes."""
    yield f"{scheme}://ann:{password}@127.0.0.1:1/"
    yield f"{scheme}://ann:{password}@127.0.0.1:port/"
    yield f"{scheme}://ann:{password}@/"
    yield f"{scheme}://ann:{password}@[::1/"
    yield f"{scheme}://ann%3A{password}%40127.0.0.1:1/"
    if not set("/?#") & set(password):  # else it can't be told from host:port/vhost
        yield f"{scheme}://ann:{password}%40127.0.0.1:1/"
    yield f"{scheme}:ann:{password}@127.0.0.1"
    yield f"ann:{password}@127.0.0.1"
    yield f"ann:{password}@127.0.0.1://"
    yield f"other://ann:{password}@127.0.0.1:1/"


def topology(url: str) -> object:
    with Topology(url) as opened:
        return repr(opened)


def managed(url: str) -> object:
    with Topology("amqp://127.0.0.1:1", management_urls=[url]) as opened:
        return repr(opened)


def streams(url: str) -> object:
    with StreamEnvironment(url) as opened:
        return repr(opened), repr(opened.options), repr(opened.__dict__)


def streams_over_amqp(url: str) -> object:
    with StreamEnvironment("rabbitmq-stream://127.0.0.1:1", amqp_url=url) as opened:
        return repr(opened), repr(opened.options), repr(opened.__dict__)


def spark_source(url: str, **options: str) -> object:
    return repr(ReadOptions.parse({"stream": "s", "uri": url, **options}))


CALLS: dict[str, tuple[str, Callable[[str], object]]] = {
    "Topology(urls)": ("amqp", topology),
    "Topology(management_urls)": ("http", managed),
    "StreamEnvironment(urls)": ("rabbitmq-stream", streams),
    "StreamEnvironment(amqp_url)": ("amqp", streams_over_amqp),
    "EnvironmentOptions(amqp_url)": ("amqp", lambda url: repr(EnvironmentOptions(amqp_url=url))),
    "places_from(amqp)": ("amqp", lambda url: repr(places_from([url], [], []))),
    "places_from(management)": ("http", lambda url: repr(places_from([], [url], []))),
    "places_from(streams)": ("rabbitmq-stream", lambda url: repr(places_from([], [], [url]))),
    "management_api(url)": ("https", lambda url: repr(management_api(url))),
    "spark: uri": ("rabbitmq-stream", spark_source),
    "spark: two uris": ("rabbitmq-stream", lambda url: spark_source(f"{url},{url}")),
    "spark: uri with TLS": ("rabbitmq-stream", lambda url: spark_source(url, tlsCaFile="ca.pem")),
    "spark: managementUrl": (
        "http",
        lambda url: repr(ReadOptions.parse({"streamPattern": "s", "managementUrl": url})),
    ),
    "spark: amqpUri": ("amqp", lambda url: repr(PublishOptions.of(queue="q", amqpUri=url))),
    "spark: format": (
        "rabbitmq-stream",
        lambda url: WarrenDataSource({"stream": "s", "uri": url}).schema(),
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_part_of_a_password_is_shown(
    call: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    scheme, make = CALLS[call]
    refused = 0
    for password in PASSWORDS:
        for url in written(scheme, password):
            try:
                said = make(url)
            except Exception as error:
                refused += 1
                said = told(error)
            assert not shows(said), url
    assert not shows(caplog.text)
    assert not shows(capfd.readouterr())
    # `EnvironmentOptions` only keeps it.
    assert refused > len(PASSWORDS) or call == "EnvironmentOptions(amqp_url)"


def told(error: BaseException) -> str:
    """All that an error tells, on whatever way it is looked at."""
    chain = [error]
    while (link := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(link)
    said = [f"{link} {link!r} {link.args} {link.__dict__}" for link in chain]
    return " ".join([*said, *traceback.format_exception(error), repr(pickle.dumps(error))])


def shows(said: object) -> bool:
    # The part is a number, as only a number is taken for a port; addresses of objects and names of
    # threads have its digits by chance.
    text = re.sub(r"0x[0-9a-f]+|\d{6,}", "", str(said))
    return CANARY in text or PART in text


def test_a_part_is_told_from_the_digits_of_an_address() -> None:
    assert not shows("<random.Random object at 0x7f3247111000> <Thread(t, started 140471162)>")
    assert all(shows(f"{before}{PART}{after}") for before in ":@'A" for after in "/@'%c")


def test_password_with_everything_escaped_is_read_as_it_is() -> None:
    for password in PASSWORDS:
        rest = f"://ann:{quote(password, safe='')}@127.0.0.1:1/"
        places = places_from([f"amqp{rest}"], [f"http{rest}"], [f"rabbitmq-stream{rest}"])
        amqp, management, stream = places
        credentials: Any = amqp.amqp.credentials
        found = (credentials.password, management.management.password, stream.stream.password)
        assert found == (password,) * 3


PACKAGES = (
    *("interceptors", "spark", "sharding", "sharding.doctor", "sharding.groups"),
    *("sharding.inspection", "sharding.metrics", "sharding.stream"),
)


def test_every_public_call_that_takes_a_url_is_tried() -> None:
    tried = {call.replace(")", "(").split("(")[0] for call in CALLS}
    takes = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            try:
                names = inspect.signature(getattr(module, name)).parameters
            except (TypeError, ValueError):
                continue
            if any("url" in each or "uri" in each for each in names):
                takes.add(name)
    assert takes <= tried
    assert {"Topology", "StreamEnvironment", "EnvironmentOptions"} <= takes


ARGUMENTS: dict[str, list[str]] = {
    "policy set": ["p", "--pattern", "q", "--shards-per-node", "1"],
    "policy clear": ["p"],
    "adopt": ["q", "--management", "http://127.0.0.1:1"],
    "forget": ["q"],
    "topology": ["q"],
    "worker": ["json:loads"],
    "maps export": ["maps.json"],
    "maps import": ["maps.json"],
    "maps rebuild": ["--management", "http://127.0.0.1:1"],
}


def commands_with_urls() -> Iterator[tuple[str, str]]:
    commands()

    def walk(command: Any, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(command, click.Group) or hasattr(command, "commands"):
            for name, each in command.commands.items():
                yield from walk(each, f"{path} {name}".strip())
            return
        for parameter in command.params:
            for flag in parameter.opts:
                if flag in ("--url", "--management", "--stream-url"):
                    yield path, flag

    yield from walk(get_command(app), "")


SCHEMES = {"--url": "amqp", "--management": "http", "--stream-url": "rabbitmq-stream"}


@pytest.mark.parametrize(("command", "flag"), list(commands_with_urls()))
def test_no_command_shows_a_part_of_a_password(
    command: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("maps.json").write_text(state_file.dumps(State()))
    words = [*command.split(), *ARGUMENTS.get(command, [])]
    if command == "worker":
        words += ["--stream", "s", "--group", "g"] if flag == "--stream-url" else ["--queue", "q"]
    if command == "topology" and flag == "--stream-url":
        words += ["--kind", "stream"]
    for mark in "/?#":
        url = f"{SCHEMES[flag]}://ann:{PART}{mark}{CANARY}@127.0.0.1:1/"
        result = CliRunner().invoke(app, [*words, flag, url])
        assert isinstance(result.exception, InvalidInput), result.output
        assert "must begin with" in str(result.exception)
        assert not shows(f"{told(result.exception)} {result.output}")
