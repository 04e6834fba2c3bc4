"""The command `warren` answers in words or JSON, and fails in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from sharding import TopologyOptions, Unreachable, UnsupportedFormat, __version__
from sharding.cli import main as command
from sharding.cli.maps import UnusableFile
from sharding.cli.options import app
from sharding.cluster.provisioner import Ensured
from tests.support.maps import queue_map

OLD, NEW = queue_map("ab"), queue_map("abc", epoch=2)


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    path = tmp_path / "old.json"
    path.write_text(OLD.dumps())
    return path


@pytest.fixture
def new_file(tmp_path: Path) -> Path:
    path = tmp_path / "new.json"
    path.write_text(NEW.dumps())
    return path


def output(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def run(*arguments: object, code: str = "") -> subprocess.CompletedProcess[str]:
    """The real command, in its own process; `code` runs before it."""
    program = f"{code}\nfrom sharding.cli.main import main; main()"
    words = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


def test_the_version_is_told() -> None:
    assert output("--version") == f"warren {__version__}\n"


def test_the_time_for_an_answer_is_given_once_for_all_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[TopologyOptions] = []

    def topology(*_: str, options: TopologyOptions, **__: object) -> NoReturn:
        asked.append(options)
        raise Unreachable("enough is seen")

    monkeypatch.setattr("sharding.cli.options.Topology", topology)
    for words in (["--answer-timeout", "60"], []):
        CliRunner().invoke(app, [*words, "forget", "images"], env={"WARREN_ANSWER_TIMEOUT": ""})
    each = [(o.connect_timeout, o.answer_timeout, o.management_timeout) for o in asked]
    assert each == [(60.0,) * 3, (5.0,) * 3]
    assert [options.change_timeout for options in asked] == [120.0, 30.0]


class FakeTopology:
    """Three names, of which `a` fails: it can't be ensured, or what is kept can't be brought."""

    def __init__(self, failing: str) -> None:
        self._failing = failing
        self.brought: list[str] = []
        self.state = SimpleNamespace(maps=dict.fromkeys("abc"))
        self.futures = SimpleNamespace(ensure=self._ensure)

    def _ensure(self, name: str, *, only_sharded: bool) -> Any:
        if (name, self._failing) == ("a", "ensure"):
            raise Unreachable("no node of it answers")
        assert only_sharded
        return Ensured(replace(OLD, logical=name), kept=5)

    def bring(self, name: str) -> int:
        if (name, self._failing) == ("a", "bring"):
            raise Unreachable("no node of it answers")
        self.brought.append(name)
        return 5

    def result(self, answer: Any) -> Any:
        return answer


@pytest.fixture
def one_fails(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeTopology:
    topology = FakeTopology(request.param)
    monkeypatch.setattr("sharding.cli.maps.connected", lambda *_: nullcontext(topology))
    monkeypatch.setattr("sharding.cli.maps.bring_unrouted", lambda _, name: topology.bring(name))
    return topology


@pytest.mark.parametrize("one_fails", ["ensure", "bring"], indirect=True)
def test_watch_brings_what_is_kept_of_others_when_one_name_fails(
    one_fails: FakeTopology, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> NoReturn:
        raise KeyboardInterrupt

    # Not `time.sleep` itself: threads of others (py4j's) would be interrupted too.
    monkeypatch.setattr("sharding.cli.maps.time", SimpleNamespace(sleep=interrupt))
    result = CliRunner().invoke(app, ["shards", "watch"])
    assert one_fails.brought == ["b", "c"]
    assert result.stderr.startswith("warren: a: no node of it answers; trying again\n")


@pytest.mark.parametrize("one_fails", ["ensure", "bring"], indirect=True)
def test_ensure_of_all_handles_the_others_when_one_name_fails(one_fails: FakeTopology) -> None:
    result = CliRunner().invoke(app, ["shards", "ensure"])
    assert one_fails.brought == ["b", "c"]
    assert (result.exit_code, result.stderr) == (1, "warren: a: no node of it answers\n")


def test_explain_tells_slot_shard_node_and_epoch_of_every_key(old_file: Path) -> None:
    lines = output("explain", old_file, "user-42", "grüße").splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    routes = {key: OLD.route(key) for key in ("user-42", "grüße")}
    for key, route in routes.items():
        assert [key, str(route.slot), route.shard, route.node, "1"] in cells


def test_explain_prints_json_for_programs(old_file: Path) -> None:
    route = OLD.route("a")
    assert json.loads(output("explain", old_file, "a", "--json")) == [
        {
            "key": "a",
            "logical": "images",
            "epoch": 1,
            "slot": route.slot,
            "shard": route.shard,
            "node": route.node,
        }
    ]


def test_explain_prints_keys_as_they_are_but_no_control_characters(old_file: Path) -> None:
    text = output("explain", old_file, "[bold]x[/bold]", ":smile:", "\x1b[31m", "two\nlines")
    for printed in ("[bold]x[/bold]", ":smile:", r"\x1b[31m", r"two\nlines"):
        assert printed in text


def test_explain_cuts_nothing_off_in_a_pipe(old_file: Path) -> None:
    key = "k" * 500
    assert key in output("explain", old_file, key)


def test_diff_tells_what_changed_in_words(old_file: Path, new_file: Path) -> None:
    lines = output("diff", old_file, new_file).splitlines()
    assert lines[:3] == [
        "epoch 1 → 2",
        "node rabbit@c joined",
        "shard 'sharding: images - rabbit@c - 0' added on rabbit@c",
    ]
    assert output("diff", old_file, old_file) == "no difference\n"


def test_an_error_is_one_line_and_exit_code_1(old_file: Path) -> None:
    result = run("explain", old_file, b"\xff".decode("utf-8", "surrogateescape"))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("warren: key: must be text that UTF-8 can express")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"\xff\xfe", "shard_map: must be whole JSON"),
        (OLD.dumps().encode()[:-1], "shard_map: must be whole JSON"),
        (b"[]", "shard_map: must be a JSON object"),
        (b'{"format": 2}', "shard_map.format: this Warren reads format 1, found 2"),
    ],
)
def test_a_file_that_can_not_be_used_is_named(
    content: bytes | None, reason: str, old_file: Path, tmp_path: Path
) -> None:
    bad_file = tmp_path / "bad.json"
    if content is not None:
        bad_file.write_bytes(content)
    result = CliRunner().invoke(app, ["diff", str(old_file), str(bad_file)])
    assert isinstance(result.exception, UnusableFile)
    assert str(result.exception).startswith(f"{bad_file}: {reason}")


def test_an_unreadable_file_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    result = run("explain", tmp_path, "a")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"warren: {tmp_path}: Is a directory\n"


def test_a_message_of_several_lines_becomes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise UnsupportedFormat("first\n second")

    monkeypatch.setattr("sharding.cli.main.commands", lambda: fail)
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == "warren: first second"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_says_what_to_install(missing: str) -> None:
    result = run("--version", code=f"import sys; sys.modules[{missing!r}] = None")
    assert (result.returncode, result.stdout) == (1, "")
    assert "pip install 'rabbit-warren[cli]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
