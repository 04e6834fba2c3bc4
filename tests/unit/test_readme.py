"""The README's Python examples run, and print what the README says they print."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.machine import PROJECT

# Those that need a broker have their like in tests/integration/test_examples.py.
NEEDS_A_BROKER = ("BlockingConnection", "ConsumerGroup", "StreamEnvironment", "spark")
EXAMPLES = [
    example
    for example in re.findall(
        r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL
    )
    if not any(name in example for name in NEEDS_A_BROKER)
]
PROMISED = re.compile(r"^print\(.*\)\n# (?P<output>.*)$", re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES)
def test_readme_example_prints_what_it_says(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    promised = [match["output"] for match in PROMISED.finditer(example)]
    assert printed.getvalue().splitlines() == promised
