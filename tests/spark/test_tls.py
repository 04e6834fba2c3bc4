"""Spark over TLS: certificates come from files, and who is not trusted is told no row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sharding.stream.environment import StreamEnvironment
from tests.cluster.secured import NAME, Secured
from tests.spark.stored import PATIENT, super_stream
from tests.support import patient
from tests.support.certificates import Authority

pytestmark = pytest.mark.cluster

ROWS = [(f"customer-{number % 7}", f"row {number}") for number in range(500)]


@pytest.fixture(scope="module")
def orders(secured: Secured) -> Iterator[str]:
    """A super stream."""
    url = f"rabbitmq-stream://guest:guest@{secured.plain.host}:{secured.plain.port}"
    with (
        StreamEnvironment(url, amqp_url=secured.amqp_url, **patient.STREAMS) as environment,
        super_stream(environment, replicas=0) as name,
    ):
        yield name


def options(secured: Secured, name: str, **more: str) -> dict[str, str]:
    return {
        "uri": f"rabbitmq-stream+tls://{secured.tls.host}:{secured.tls.port}",
        **PATIENT,
        "superStream": name,
        "tlsCaFile": str(secured.authority.certificate),
        **more,
    }


def test_rows_are_written_and_read_over_tls(
    session: SparkSession, secured: Secured, orders: str, chosen_version: str
) -> None:
    how = options(secured, orders, tlsServerName=NAME)
    if chosen_version != "3.10":  # where EXTERNAL over streams does not work
        own = secured.authority.sign("guest")
        how |= {
            "mechanism": "external",
            "tlsCertificateFile": str(own.certificate),
            "tlsKeyFile": str(own.key),
        }
    rows = session.createDataFrame(ROWS, "key string, value string")
    rows.write.format("warren").options(**how).mode("append").save()
    found = session.read.format("warren").options(**how).load().collect()
    assert sorted((row.key, bytes(row.value).decode()) for row in found) == sorted(ROWS)


def test_broker_of_another_authority_is_not_trusted(
    session: SparkSession, secured: Secured, orders: str, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    how = options(secured, orders, tlsCaFile=str(stranger.certificate), password="canary-1")
    rows = session.createDataFrame(ROWS, "key string, value string")
    for attempt in (
        lambda: session.read.format("warren").options(**how).load().collect(),
        lambda: rows.write.format("warren").options(**how).mode("append").save(),
    ):
        with pytest.raises(PySparkException, match="is not accepted") as caught:
            attempt()
        assert "Job aborted" not in str(caught.value)  # it failed before a task ran
        assert "canary-1" not in str(caught.value)


def test_files_that_are_not_there_are_named(
    session: SparkSession, secured: Secured, orders: str
) -> None:
    how = options(secured, orders, tlsCaFile="/nowhere/authority.pem")
    with pytest.raises(PySparkException, match=r"/nowhere/authority\.pem can't be used in this"):
        session.read.format("warren").options(**how).load().collect()
