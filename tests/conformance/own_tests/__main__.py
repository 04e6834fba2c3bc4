"""Run pika's and aio-pika's own tests through our wrappers, channels and connections.

python -m tests.conformance.own_tests blocking callback --pika CHECKOUT
python -m tests.conformance.own_tests aio

pika's package has no tests: put a checkout of its repository beside, at the tag of the version that
is installed (1.4.4), and name its folder. aio-pika's come with its source package, from pip.

Many of these tests wait for seconds at most, and a busy machine needs more. So what failed is run
again alone, wrapped and bare, and called ours only if it fails wrapped and passes bare. With
`--bare` nothing is wrapped at all.

What is known to differ:

* blocking: `isinstance(channel, BlockingChannel)` is false (one test);
* aio: two tests replace a private method of aio-pika's queue class, and compare the queue that it
  is called on with the one that they hold, which is ours
  (`test_cancel_during_recovery_wakes_next_pass`, `test_queue_disappears_after_probe`).

Three of aio-pika's recovery tests stop the broker through Docker, which is not had here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.cluster import Cluster

HERE = Path(__file__).parent
AMQP_PORT = 5672  # pika's tests know no other
TRIES = 3
MAX_MESSAGE = 512 * 1024 * 1024  # aio-pika's broker takes what 4.0 refuses unless told
SUITES = {
    "blocking": ["tests/acceptance/blocking_adapter_test.py"],
    "callback": ["tests/acceptance/async_adapter_tests.py"],
    # Over TLS there is nothing of ours, and the certificates are in an image.
    "aio": ["tests", "--ignore=tests/test_amqps.py"],
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.own_tests")
    parser.add_argument("suites", nargs="+", choices=SUITES)
    parser.add_argument("--pika", type=Path, help="a checkout of pika, at the installed version")
    parser.add_argument("--bare", action="store_true", help="wrap nothing")
    options = parser.parse_args()
    if options.pika is None and {"blocking", "callback"} & set(options.suites):
        parser.error(f"--pika: a checkout of pika at the tag {version('pika')} is needed")
    settings = f"listeners.tcp.2 = 127.0.0.1:{AMQP_PORT}\nmax_message_size = {MAX_MESSAGE}"
    with tempfile.TemporaryDirectory() as folder, Cluster.start(nodes=1, config=settings) as broker:
        url = broker.nodes[0].endpoint.amqp_url
        for suite in options.suites:
            if suite == "aio":
                source = aio_pika_source(Path(folder))
            else:
                source = pika_source(Path(folder), options.pika)
            for what in ("nothing",) if options.bare else ("channels", "connections"):
                run(suite, what, source, url)
    return 0


def pika_source(folder: Path, checkout: Path) -> Path:
    """A copy of its tests, as a package that is found before ours of the same name."""
    shutil.copytree(checkout / "tests", folder / "pika" / "tests", dirs_exist_ok=True)
    (folder / "pika" / "tests" / "__init__.py").touch()
    pip("install", "--target", str(folder / "needed"), "gevent", "tornado", "twisted")
    return folder / "pika"


def aio_pika_source(folder: Path) -> Path:
    """Its source package, with what its tests need besides."""
    needed = str(folder / "needed")
    # pika's have left a folder for commands there, which pip does not touch unless told.
    again = ("--upgrade", "--target", needed)
    pip("install", *again, "aiomisc", "aiomisc-pytest", "shortuuid", "uv_build")
    source = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", "--dest", str(folder)]
    built_with = {
        "PYTHONPATH": needed,
        "PATH": os.pathsep.join([f"{needed}/bin", os.environ["PATH"]]),
    }
    pip("download", *source, f"aio-pika=={version('aio-pika')}", **built_with)
    [archive] = folder.glob("aio_pika-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def pip(*arguments: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    ended = subprocess.run(
        command, env=os.environ | environment, check=False, stderr=subprocess.PIPE, text=True
    )
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stderr}")


def run(suite: str, what: str, source: Path, url: str) -> None:
    print(f"== {suite}: {what} wrapped", flush=True)
    wrapped = environment(suite, what, source, url)
    output = ended(source, wrapped, SUITES[suite])
    (Path(tempfile.gettempdir()) / f"{suite}-{what}.log").write_text(output)
    print(summary(output), flush=True)
    failed = failed_in(output)
    again = still_failed(source, wrapped, failed)
    bare = still_failed(source, environment(suite, "nothing", source, url), again)
    for name in failed:
        if name not in again:
            print(f"   passed when alone: {name}")
        elif name in bare:
            print(f"   not without ours either: {name}")
        else:
            print(f"   not through ours: {name}")


def environment(suite: str, what: str, source: Path, url: str) -> dict[str, str]:
    found_first = [source, HERE, HERE.parents[2], source.parent / "needed"]
    return os.environ | {
        "WARREN_WRAP": f"{suite} {what}",
        "WARREN_URL": url,
        "WARREN_PORT": str(AMQP_PORT),
        "PYTHONPATH": os.pathsep.join(map(str, found_first)),
    }


def still_failed(source: Path, environment: dict[str, str], names: list[str]) -> list[str]:
    """Those that fail each time they are run again."""
    for _ in range(TRIES):
        if names:
            names = failed_in(ended(source, environment, names))
    return names


def ended(source: Path, environment: dict[str, str], tests: list[str]) -> str:
    plain = ["--quiet", "-rfE", "--override-ini=addopts=", "-p", "no:cacheprovider"]
    # pytest's own tracebacks parse the source: where the collector runs just then, Python 3.11
    # raises a SystemError, which ends the whole run.
    plain += ["--tb", "native"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, "-p", "wrapping", *tests],
        cwd=source,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def failed_in(output: str) -> list[str]:
    """In the order of the run, each once: a test may fail, and so may its end."""
    found = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", output, re.MULTILINE)
    return list(dict.fromkeys(found))


def summary(output: str) -> str:
    """How many were wrapped, passed and failed."""
    found = re.findall(r"^\d+ \w+ were wrapped$|^=* ?\d+ .*\bin [\d.]+s.*$", output, re.MULTILINE)
    return "\n".join(line.strip("= ") for line in found)


if __name__ == "__main__":
    sys.exit(main())
