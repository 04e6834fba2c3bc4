"""A password is nowhere in what Spark writes, shows or keeps, whether a query works or fails."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from sharding.stream.environment import StreamEnvironment
from spark.source import WarrenDataSource
from tests.cluster import Cluster
from tests.spark.conftest import SparkFolder
from tests.spark.sources import bodies, follow, load, run_available, send
from tests.spark.stored import one_stream, reach

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def canary(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """A user whose password is found nowhere else."""
    user, password = f"canary-{secrets.token_hex(4)}", f"kanari{secrets.token_hex(8)}"
    management = cluster.nodes[0].management
    management.call("PUT", "users", user, body={"password": password, "tags": "administrator"})
    allowed = {"configure": ".*", "write": ".*", "read": ".*"}
    management.call("PUT", "permissions", cluster.vhost, user, body=allowed)
    yield user, password
    management.call("DELETE", "users", user)


def written(folder: Path, secret: str) -> list[Path]:
    """The files below `folder` that hold the secret."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return [file for file in files if secret.encode() in file.read_bytes()]


def plans(frame: DataFrame) -> str:
    execution = frame._jdf.queryExecution()
    return f"{execution.toString()} {execution.stringWithStats()}"


def use(
    session: SparkSession, cluster: Cluster, folder: Path, options: dict[str, str]
) -> tuple[int, int]:
    """A batch and a streaming query; what Spark shows of them is looked at meanwhile."""
    frame = load(session, cluster, **options)
    frame.createOrReplaceTempView("canary")
    shown = plans(frame) + str(session.sql("EXPLAIN EXTENDED SELECT * FROM canary").collect())
    (folder / "plans").write_text(shown)
    followed = follow(session, cluster, startingOffsets="earliest", **options)
    (folder / "streaming-plans").write_text(plans(followed))
    batches = run_available(followed, folder)
    written_rows = frame.select("value").write.format("warren")
    written_rows.options(**{**reach(cluster), **options}).mode("append").save()
    return len(frame.collect()), sum(map(len, batches))


def test_a_password_in_an_option_is_in_nothing_that_spark_writes(
    session: SparkSession,
    cluster: Cluster,
    environment: StreamEnvironment,
    spark_folder: SparkFolder,
    canary: tuple[str, str],
    tmp_path: Path,
) -> None:
    user, password = canary
    wrong = f"wrong{password}"
    session.sparkContext.setLogLevel("DEBUG")
    try:
        with one_stream(environment) as name:
            send(environment, name, bodies(100))
            options = {"stream": name, "user": user, "password": password}
            assert use(session, cluster, tmp_path, options) == (100, 100)
            soon = {**options, "requestTimeout": "1s"}
            for failing in (
                {**options, "password": wrong},
                {**options, "startingOffsets": "never"},
                {**soon, "uri": "rabbitmq-stream://127.0.0.1:1"},
                {**soon, "uri": f"rabbitmq-stream://{user}:{password}@127.0.0.1:1"},
            ):
                with pytest.raises(PySparkException) as caught:
                    load(session, cluster, **failing).collect()
                assert password not in f"{caught.value} {caught.value!r}"
    finally:
        session.sparkContext.setLogLevel("WARN")
    assert written(tmp_path, password) == []
    assert written(spark_folder.path, password) == []


def test_a_password_in_a_file_is_not_even_in_what_spark_ships(
    session: SparkSession,
    cluster: Cluster,
    environment: StreamEnvironment,
    canary: tuple[str, str],
    tmp_path: Path,
) -> None:
    user, password = canary
    file = tmp_path / "secret" / "password"
    file.parent.mkdir()
    file.write_text(f"{password}\n")
    with one_stream(environment) as name:
        send(environment, name, bodies(10))
        options = {"stream": name, "user": user, "passwordFile": str(file)}
        assert len(load(session, cluster, **options).collect()) == 10
        source = WarrenDataSource({**options, **reach(cluster)})
        reader = source.reader(source.schema())
        shipped = pickle.dumps([source, reader, reader.partitions()])
    assert password.encode() not in shipped
