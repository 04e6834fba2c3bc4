"""Run pika's and aio-pika's own tests through our wrappers, channels and connections.

python -m tests.conformance.own_tests blocking callback --pika CHECKOUT
python -m tests.conformance.own_tests aio

pika's package has no tests: put a checkout of its repository beside, at the tag of the version that
is installed (1.4.4), and name its folder. aio-pika's come with its source package, from pip. With
`--bare` nothing is wrapped, to tell our differences from what fails anyhow.
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
    pip("install", "--target", needed, "aiomisc", "aiomisc-pytest", "shortuuid", "uv_build")
    source = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", "--dest", str(folder)]
    pip("download", *source, f"aio-pika=={version('aio-pika')}", PYTHONPATH=needed)
    [archive] = folder.glob("aio_pika-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def pip(*arguments: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, env=os.environ | environment, check=True, stderr=subprocess.DEVNULL)


def run(suite: str, what: str, source: Path, url: str) -> None:
    environment = os.environ | {
        "WARREN_WRAP": f"{suite} {what}",
        "WARREN_URL": url,
        "WARREN_PORT": str(AMQP_PORT),
        "PYTHONPATH": os.pathsep.join(
            map(str, [source, HERE, HERE.parents[2], source.parent / "needed"])
        ),
    }
    print(f"== {suite}: {what} wrapped", flush=True)
    wrapped = ended(source, environment, ["-p", "wrapping", *SUITES[suite]])
    print(summary(wrapped))
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", wrapped, re.MULTILINE)
    for name in failed:
        print(f"   not through ours: {name}")


def ended(source: Path, environment: dict[str, str], arguments: list[str]) -> str:
    pytest = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "-rfE"]
    done = subprocess.run(
        [*pytest, "--override-ini=addopts=", *arguments],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    log = Path(tempfile.gettempdir()) / f"{environment['WARREN_WRAP'].replace(' ', '-')}.log"
    log.write_text(done.stdout + done.stderr)
    return done.stdout


def summary(output: str) -> str:
    """The last lines: how many were wrapped, passed and failed."""
    return "\n".join(output.strip().splitlines()[-1:])


if __name__ == "__main__":
    sys.exit(main())
