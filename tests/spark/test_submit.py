"""spark-submit with the zip of `make zip`, where Warren is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sharding.stream.environment import StreamEnvironment
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.spark.stored import reach, super_stream
from tests.spark.submitted import ROWS
from tests.support.spark_home import spark_home

pytestmark = pytest.mark.cluster


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """A Python with all that Warren needs, and without Warren."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "warren" not in entry.name:  # neither the package, nor the path to it, nor its hook
            (packages / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    assert subprocess.run([python, "-I", "-c", "import spark"], capture_output=True).returncode
    return python


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """What `make zip` builds."""
    build = [
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
        "--no-build-isolation",
    ]
    subprocess.run([*build, "--wheel-dir", tmp_path, PROJECT], check=True)
    (wheel,) = tmp_path.glob("rabbit_warren-*.whl")
    return wheel.rename(tmp_path / "rabbit-warren.zip")


@pytest.mark.timeout(11 * PATIENCE)
def test_a_zip_is_enough_where_warren_is_not_installed(
    cluster: Cluster, environment: StreamEnvironment, interpreter: Path, archive: Path
) -> None:
    home = spark_home()
    assert home is not None
    variables = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": str(interpreter),
        # For the driver's planning, which Spark does not give what is in --py-files. Relative, so
        # that it leads nowhere in the executors' folders, but to the copy that Spark made there.
        "PYTHONPATH": archive.name,
    }
    with super_stream(environment) as name:
        options = {**reach(cluster), "superStream": name}
        done = subprocess.run(
            [
                *(home / "bin" / "spark-submit", "--master", "local-cluster[2,1,1024]"),
                *("--conf", "spark.ui.enabled=false", "--py-files", archive.name),
                *(PROJECT / "tests" / "spark" / "submitted.py", json.dumps(options)),
            ],
            cwd=archive.parent,
            env=variables,
            capture_output=True,
            text=True,
            timeout=10 * PATIENCE,
        )
    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["batch"] == told["stream"] == list(range(ROWS))
    assert all(archive.name in place for place in told["places"]), told["places"]
    assert str(archive) not in "".join(told["places"]), "the executors have copies of their own"
