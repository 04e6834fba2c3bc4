"""One Spark for the whole folder, and all that it writes in one place to be looked at."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from sharding.stream.environment import StreamEnvironment
from tests.cluster import Cluster
from tests.spark.stored import environment_of
from tests.support.priority import first_in_line


@dataclass(frozen=True)
class SparkFolder:
    """Where Spark writes to."""

    path: Path

    @property
    def output(self) -> Path:
        """The driver's log, and what its Python workers print."""
        return self.path / "output.log"

    @property
    def events(self) -> Path:
        return self.path / "events"


@pytest.fixture(scope="session")
def spark_folder(tmp_path_factory: pytest.TempPathFactory) -> SparkFolder:
    folder = SparkFolder(tmp_path_factory.mktemp("spark"))
    folder.events.mkdir()
    return folder


@pytest.fixture(scope="package", autouse=True)
def before_others() -> Iterator[None]:
    with first_in_line():
        yield


@pytest.fixture(scope="package")
def session(spark_folder: SparkFolder) -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable  # or workers may run another interpreter
    builder = SparkSession.builder.master("local[2]").appName("warren-tests")
    for name, value in {
        "spark.driver.memory": "1g",
        "spark.driver.host": "localhost",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": spark_folder.events.as_uri(),
        "spark.sql.warehouse.dir": (spark_folder.path / "warehouse").as_uri(),
        "spark.sql.session.timeZone": "UTC",
    }.items():
        builder = builder.config(name, value)
    with output_to(spark_folder.output):
        started = builder.getOrCreate()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    """A client of the cluster beside Spark, to make streams and to look at them."""
    with environment_of(cluster) as made:
        yield made


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """What is started in this block writes its output to a file, for as long as it lives."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        kept = [(descriptor, os.dup(descriptor)) for descriptor in (1, 2)]
        try:
            for descriptor, _ in kept:
                os.dup2(file.fileno(), descriptor)
            yield
        finally:
            for descriptor, copy in kept:
                os.dup2(copy, descriptor)
                os.close(copy)
