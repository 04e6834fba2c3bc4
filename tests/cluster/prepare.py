"""Have the brokers and the balancer on this machine before they are needed.

    python3 -m tests.cluster.prepare VERSION...

Runs under the machine's own Python, beside what makes the virtual environment, so it and what it
imports use the standard library only. A second run does nothing.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from tests import machine
from tests.cluster import sources


def main() -> None:
    versions = sys.argv[1:]
    try:
        machine.ensure_command("haproxy", "haproxy", "tests run behind a load balancer")
        # Most of it is waiting for packages.
        with ThreadPoolExecutor(max_workers=max(1, len(versions))) as threads:
            list(threads.map(_prepare, versions))
    except machine.Missing as missing:
        sys.exit(f"warren: {missing}")


def _prepare(version: str) -> None:
    source = sources.choose(version)
    if source in ("path", "root", "apt"):
        sources.installation(source, version)


if __name__ == "__main__":
    main()
