"""What roles need, as patterns and as lines to copy."""

from __future__ import annotations

import re
import shlex

import pytest

from sharding.doctor.roles import Need, Right, Role, command, exactly, needs, patterns
from sharding.errors import InvalidInput
from tests.machine import PROJECT

ODD = "a.b (1)|c's"


@pytest.mark.parametrize("role", Role)
def test_every_need_is_granted_by_the_line_and_strangers_are_not(role: Role) -> None:
    wanted = needs(role, ["images", ODD], ["invoices", ODD])
    granted = patterns(wanted)
    for need in wanted:
        assert re.search(granted[need.right], need.name), need
        assert re.fullmatch(need.pattern, need.name), need
    for right in Right:
        for stranger in ("images2", "my images", "warren.shard-mapsX", "invoices2", "axb (1)|c's"):
            assert not re.search(granted[right], stranger)


def test_the_line_can_be_copied_into_a_shell() -> None:
    wanted = needs(Role.PRODUCER, [ODD])
    words = shlex.split(command("us er", "v'h", wanted))
    assert words[:5] == ["rabbitmqctl", "set_permissions", "-p", "v'h", "us er"]
    assert words[5:] == list(patterns(wanted).values())


def test_what_nobody_needs_is_granted_to_nobody() -> None:
    granted = patterns(needs(Role.MONITOR, ["images"]))
    assert not any(re.search(granted[Right.WRITE], name) for name in ("images", "amq.default"))


def test_a_role_without_names_is_refused() -> None:
    with pytest.raises(InvalidInput, match="name of a queue or a stream"):
        needs(Role.PRODUCER)
    with pytest.raises(InvalidInput, match="must not start with 'amq"):
        needs(Role.PRODUCER, ["amq.topic"])


def test_names_stand_for_themselves() -> None:
    assert re.fullmatch(exactly(ODD), ODD)
    assert Need(Right.READ, exactly("images"), "images", "").pattern == "images"


@pytest.mark.parametrize("role", Role)
def test_the_guide_has_the_line_of_each_role(role: Role) -> None:
    guide = (PROJECT / "docs" / "operations.md").read_text()
    line = command(f"{role}-1", "/", needs(role, ["images"], ["invoices"]))
    assert f"\n{line}\n" in guide
