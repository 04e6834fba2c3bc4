"""What `make test` leaves to `make test-all` is a twin of something that stays in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.machine import PROJECT


def calls_of(module: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            yield node


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    module = ast.parse(path.read_text())
    return {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}


def test_every_twin_names_a_test_that_stays() -> None:
    twins = [
        (path.name, call.args)
        for path in sorted((PROJECT / "tests").rglob("test_*.py"))
        for call in calls_of(ast.parse(path.read_text()), "pytest.mark.twin")
    ]
    assert twins
    for where, arguments in twins:
        assert len(arguments) == 1, where
        named = ast.literal_eval(arguments[0])
        file, _, name = named.partition("::")
        there = functions(PROJECT / "tests" / file)
        assert name in there, f"{where} is said to be a twin of {named}, which is not there"
        moved = any(
            not call.keywords  # else it stays on the other version
            for mark in there[name].decorator_list
            if "parametrize" not in ast.unparse(mark)  # of its cases at least one stays
            for call in calls_of(mark, "pytest.mark.twin")
        )
        assert not moved, f"{named} does not stay itself"
