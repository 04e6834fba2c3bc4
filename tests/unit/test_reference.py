"""docs/reference.md has every public option, variable, command and error, as the code has them."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import typer

import interceptors
import sharding
import spark
from interceptors import AioShardedChannel, AsyncShardedChannel, ShardedChannel, ShardedPublisher
from sharding import Policy, Topology, TopologyOptions
from sharding.cli import main as command
from sharding.errors import InvalidInput, WarrenError, is_retryable
from sharding.groups import GroupOptions, Retry
from sharding.groups.streams.options import StreamGroupOptions
from sharding.stream import (
    ConsumerOptions,
    EnvironmentOptions,
    Limits,
    ProducerOptions,
    RouteOptions,
    StreamArguments,
)
from spark.options.read import ReadOptions
from spark.write.exactly_once import exactly_once
from spark.write.targets import parse as parse_write_options
from tests.machine import PROJECT

PAGE = (PROJECT / "docs" / "reference.md").read_text()
REQUIRED = "required"
OF_EVERY_CLUSTER = {"--url", "--management", "--stream-url"}
# Defaults that no literal can show.
IN_WORDS = {("EnvironmentOptions", "own_hosts"): "this host's name"}
# What options of Spark go with, …
NEEDS = {
    "matchUnfiltered": {"filterValues": "x"},
    "maxTriggerDelay": {"minOffsetsPerTrigger": "1"},
    "routing": {"superStream": "s"},
    "through": {"queue": "q"},
    "amqpUri": {"queue": "q"},
}
TARGETS = {"superStream", "queue"}
# … those whose default is known only when the rows or the streams are, …
FOUND_OUT_LATER = {"endingOffsets", "valueColumn"}
# … and Spark's own, which it hands on, and what only `exactly_once` sets.
NOT_FOR_USERS = {"checkpointLocation", "path", "queryName", "ownShards"}


def section(heading: str) -> str:
    """What stands below a heading, without the headings of its own level or above."""
    found = re.search(rf"^(#+) {re.escape(heading)}$", PAGE, re.MULTILINE)
    assert found, f"the page has no heading {heading!r}"
    below = PAGE[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", below, re.MULTILINE)
    return below[: end.start()] if end else below


def rows(text: str) -> Iterator[list[str]]:
    """The rows of all tables in a text, without their heads."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def defaults_shown(heading: str) -> dict[str, str]:
    return {cells[0].strip("` "): cells[1] for cells in rows(section(heading))}


def shown(value: object) -> str:
    """A default as the page writes it."""
    match value:
        case bool() | None:
            text = str(value)
        case enum.StrEnum():
            text = f'"{value}"'
        case enum.Enum():
            text = f"{type(value).__name__}.{value.name}"
        case int() if value and value % 2**20 == 0:
            text = f"{value // 2**20} MiB"
        case int() if value and value % 2**10 == 0:
            text = f"{value // 2**10} KiB"
        case int() | float():
            text = f"{value:,g}" if isinstance(value, float) else f"{value:,}"
        case str():
            text = f'"{value}"'
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            assert value == type(value)()
            text = f"{type(value).__name__}()"
        case _:
            assert not value
            text = "{}" if isinstance(value, Mapping) else "()"
    return f"`{text}`"


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return shown(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return shown(field.default_factory())
    return REQUIRED


@pytest.mark.parametrize(
    "options",
    [
        TopologyOptions,
        Policy,
        EnvironmentOptions,
        ProducerOptions,
        ConsumerOptions,
        StreamArguments,
        RouteOptions,
        Limits,
        GroupOptions,
        Retry,
        StreamGroupOptions,
    ],
)
def test_options_are_listed_with_their_defaults(options: type) -> None:
    fields = {field.name: field for field in dataclasses.fields(options)}
    for inherited in options.__mro__[1:]:
        if dataclasses.is_dataclass(inherited):
            fields = {
                name: field
                for name, field in fields.items()
                if name not in {each.name for each in dataclasses.fields(inherited)}
            }
    known = {
        name: IN_WORDS.get((options.__name__, name)) or default_of(field)
        for name, field in fields.items()
    }
    assert defaults_shown(f"`{options.__name__}`") == known


@pytest.mark.parametrize(
    ("heading", "takes"),
    [
        ("`Topology`", Topology),
        ("`ShardedChannel`", ShardedChannel),
        ("`ShardedChannel`", AsyncShardedChannel),
        ("`ShardedChannel`", AioShardedChannel),
        ("`ShardedPublisher`", ShardedPublisher),
        ("`exactly_once`", exactly_once),
    ],
)
def test_arguments_are_listed_with_their_defaults(heading: str, takes: Any) -> None:
    known = {
        name: shown(parameter.default)
        for name, parameter in inspect.signature(takes).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert defaults_shown(heading) == known


def read_options(given: Mapping[str, str]) -> object:
    return dataclasses.replace(ReadOptions.parse(given), only_streaming=())


SPARK = pytest.mark.parametrize(
    ("role", "parse"), [("Reading", read_options), ("Writing", parse_write_options)]
)


@SPARK
def test_options_of_spark_are_listed(role: str, parse: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse({"stream": "s", "qqqqqq": "a name without a neighbour makes the error list them all"})
    known = set(refused.value.rule.removeprefix("must be among ").split(", "))
    page = defaults_shown("Reading and writing") | defaults_shown(role)
    assert set(page) == known - NOT_FOR_USERS


@SPARK
def test_option_of_spark_changes_nothing_at_its_default(role: str, parse: Any) -> None:
    page = defaults_shown("Reading and writing") | defaults_shown(role)
    literals = {
        name: value[1]
        for name, default in page.items()
        if (value := re.fullmatch(r"`([^`]+)`(?: \(queues .*\))?", default))
    }
    assert len(literals) > 8
    for name, literal in literals.items():
        if name not in FOUND_OUT_LATER:
            without = {"stream": "s"} if not NEEDS.get(name, {}).keys() & TARGETS else {}
            without |= NEEDS.get(name, {})
            assert parse({**without, name: literal}) == parse(without), name


def test_environment_variables_are_listed() -> None:
    """Those of what is shipped, of the examples and of clusters; a single test's are its own."""
    sources = [PROJECT / "Makefile", PROJECT / "tests" / "conftest.py"]
    for folder in ("sharding", "interceptors", "spark", "examples", "tests/cluster"):
        sources += (PROJECT / folder).rglob("*.py")
    read = {
        name
        for source in sources
        for name in re.findall(r"\bWARREN_[A-Z_]*[A-Z]\b", source.read_text())
    }
    assert {cells[0].strip("`") for cells in rows(section("Environment variables"))} == read


def commands() -> dict[str, Any]:
    """Every command that can be run, by its words."""
    command.commands()
    from sharding.cli.options import app

    found = {}

    def walk(command: Any, words: str) -> None:
        for name, each in getattr(command, "commands", {}).items():
            walk(each, f"{words} {name}")
        if not hasattr(command, "commands"):
            found[words] = command

    walk(typer.main.get_command(app), "warren")
    return found


COMMANDS = commands()


def test_commands_are_listed() -> None:
    listed = re.findall(r"^### `(.*)`$", section("Commands"), re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_options_of_a_command_are_listed_with_their_defaults(name: str) -> None:
    options = {
        option.opts[0]: option
        for option in COMMANDS[name].params
        if option.param_type_name == "option"
    }
    text = section(f"`{name}`")
    page = {cells[0].split(",")[0].strip("`"): cells[1] for cells in rows(text)}
    assert page == {
        flag: _default_of_option(option)
        for flag, option in options.items()
        if flag not in OF_EVERY_CLUSTER
    }
    places = re.search(r"^Cluster: (.*)\.$", text, re.MULTILINE)
    listed = set(re.findall(r"`(.*?)`", places[1])) if places else set()
    assert listed == OF_EVERY_CLUSTER & set(options)


def _default_of_option(option: Any) -> str:
    if option.required:
        return REQUIRED
    if option.default in (None, [], ()):
        return "none"
    if isinstance(option.default, bool):
        return f"`{str(option.default).lower()}`"
    return f"`{option.default:g}`" if isinstance(option.default, float) else f"`{option.default}`"


def errors() -> dict[str, type[WarrenError]]:
    """Every error of ours, in whatever module; those with an underscore are nobody's business."""
    for package in (sharding, interceptors, spark):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    found: dict[str, type[WarrenError]] = {}
    waiting: list[type[WarrenError]] = [WarrenError]
    while waiting:
        error = waiting.pop()
        waiting += error.__subclasses__()
        # Tests and other modules make subclasses too.
        if error.__module__.partition(".")[0] in ("sharding", "interceptors", "spark"):
            found[error.__name__] = error
    return {name: error for name, error in found.items() if not name.startswith("_")}


def test_errors_are_listed_and_whether_they_may_be_retried() -> None:
    listed = {cells[0].strip("`"): cells[1] for cells in rows(section("Errors"))}
    assert listed == {
        # Whether it may be retried hangs on the class alone, so no instance needs to be made.
        name: "yes" if is_retryable(error.__new__(error)) else "no"
        for name, error in errors().items()
    }
