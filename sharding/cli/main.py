"""The command `warren`: where it starts, and how it ends when something is wrong.

The commands themselves need typer and rich, which come with the extra `cli`; so this module must
load without them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from sharding.errors import WarrenError, reason


def main() -> None:
    """Run the command; an error of ours is one line on stderr and exit code 1."""
    try:
        run = commands()
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in {"rich", "typer"}:
            raise
        sys.exit("warren: this command needs an extra: pip install 'rabbit-warren[cli]'")
    try:
        run(prog_name="warren")
    except WarrenError as error:
        sys.exit(f"warren: {reason(error)}")


def commands() -> Callable[..., object]:
    """All sub-commands: each module adds its own to the app."""
    import sharding.cli.inspect
    import sharding.cli.maps
    import sharding.cli.worker  # noqa: F401
    from sharding.cli.options import app

    return app
