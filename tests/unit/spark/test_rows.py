"""Batches for Spark have exactly the schema that Spark itself makes of ours."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from sharding.stream.arrow.batches import PROPERTIES
from spark.read.columns import COLUMNS, DEFAULT_COLUMNS, client_columns, spark_schema
from spark.read.rows import Origin, RowMaker

ORIGIN = Origin("invoices-2", 2, "rmq1:5552")


def client_batch(bodies: list[bytes], kind: pa.DataType | None = None) -> pa.RecordBatch:
    count = len(bodies)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(range(7, 7 + count), pa.int64()),
            pa.array([1_000] * count, pa.timestamp("ms", "UTC")),
            pa.array(bodies, kind or pa.binary()),
            pa.array(["k"] * count, pa.string()),
            pa.array([{"subject": "s", "creation_time": 5}] * count, PROPERTIES),
            pa.array([[("h", "1")]] * count, pa.map_(pa.string(), pa.string())),
        ],
        names=["offset", "timestamp", "body", "key", "properties", "application_properties"],
    )


@pytest.mark.parametrize("columns", [COLUMNS, DEFAULT_COLUMNS, ("value",), ("node", "offset")])
def test_the_schema_is_spark_s_own(columns: tuple[str, ...]) -> None:
    expected = to_arrow_schema(spark_schema(columns), timezone="UTC")
    (batch,) = RowMaker(columns).batches(client_batch([b"x", b"y"]), ORIGIN)
    assert batch.schema.equals(expected)


def test_rows_keep_their_values() -> None:
    (batch,) = RowMaker(COLUMNS).batches(client_batch([b"x", b"y"]), ORIGIN)
    row = batch.slice(1).to_pylist()[0]
    assert row["timestamp"].timestamp() == 1
    assert row["properties"]["creation_time"].microsecond == 5_000
    assert {name: row[name] for name in ("key", "value", "stream", "partition", "offset")} == {
        "key": "k", "value": b"y", "stream": "invoices-2", "partition": 2, "offset": 8,
    }  # fmt: skip
    assert (row["headers"], row["node"]) == ([("h", "1")], "rmq1:5552")


def test_what_all_rows_share_is_right_in_each_batch() -> None:
    rows = RowMaker(("stream", "partition", "node"))
    for count, node in ((2, "a"), (5, "a"), (1, "a"), (3, "b"), (5, "b")):
        (batch,) = rows.batches(client_batch([b"x"] * count), Origin("s-1", 1, node))
        assert batch.to_pylist() == [{"stream": "s-1", "partition": 1, "node": node}] * count


def test_a_raw_message_has_no_key() -> None:
    batch = client_batch([b"x"]).select(["offset", "timestamp", "body"])
    (rows,) = RowMaker(("key", "value")).batches(batch, ORIGIN)
    assert rows.to_pylist() == [{"key": None, "value": b"x"}]


def test_a_batch_larger_than_spark_can_take_is_divided_between_rows() -> None:
    bodies = [b"x" * size for size in (10, 40, 90, 5, 5, 60)]
    parts = list(
        RowMaker(("offset", "value"), small_max=100).batches(
            client_batch(bodies, pa.large_binary()), ORIGIN
        )
    )
    assert len(parts) > 1
    assert all(part.schema.field("value").type == pa.binary() for part in parts)
    assert all(len(b"".join(part["value"].to_pylist())) <= 100 for part in parts)
    rows = [row for part in parts for row in part.to_pylist()]
    assert rows == [{"offset": 7 + n, "value": body} for n, body in enumerate(bodies)]


def test_the_client_is_asked_for_no_more_than_the_columns() -> None:
    assert not client_columns(("value", "offset"), raw=False).key
    wanted = client_columns(COLUMNS, raw=False)
    assert (wanted.key, wanted.properties, wanted.application_properties) == (True, True, True)
    assert client_columns(DEFAULT_COLUMNS, raw=True).raw
