"""A driver program: rows into a super stream and back, with a witness of where they are read.

    python -m tests.spark.round_trip '{"master": "local[2]", "rows": 1000000, …}'

The witness is the management API, which is asked again and again who consumes from which node.
Reading is quicker than the API learns of connections (it takes some seconds), so everything is
read until every partition was seen to be read, each time with every row checked.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from sharding.cluster.management import Management
from sharding.errors import WarrenError
from sharding.stream.consumer.probe import PROBE_NAME
from tests.spark.stored import PATIENT

KEYS = 5_000
_PASSES = 20
_PAUSE = 0.05


@dataclass(frozen=True)
class Trip:
    master: str
    rows: int
    super_stream: str
    partitions: list[str]
    uri: str
    management_url: str


@dataclass(frozen=True)
class Found:
    """What one pass over everything found."""

    rows: int
    different: int
    wrong: int
    """Rows whose key or padding is not what belongs to their number."""
    out_of_order: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What the program prints at its end."""

    passes: list[Found]
    write_seconds: float
    samples: int
    seen: list[tuple[str, str, int]]
    """Stream, node, and in how many samples a consumer was there."""
    not_placed: int
    """Sightings of consumers on connections of which the API did not know the node yet."""


class Witness:
    """Samples who reads the partitions, in a thread of its own."""

    def __init__(self, trip: Trip) -> None:
        self._management = Management(trip.management_url, "guest", "guest")
        self._streams = set(trip.partitions)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witness")
        self.samples = 0
        self.not_placed = 0
        self.seen: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def saw_all(self) -> bool:
        return {stream for stream, _ in self.seen} == self._streams

    def _run(self) -> None:
        while not self._done.wait(_PAUSE):
            try:
                listed = self._management.get("stream", "consumers", timeout=10)
            except WarrenError:
                continue
            self.samples += 1
            for each in listed:
                stream = each["queue"]["name"]
                if stream not in self._streams or each["properties"].get("name") == PROBE_NAME:
                    continue
                if each["connection_details"]:
                    self.seen[stream, each["connection_details"]["node"]] += 1
                else:
                    self.not_placed += 1


def expected(number: Column) -> tuple[Column, Column]:
    """Key and value of a row, by its number; few keys have many rows."""
    place = f.pmod(f.xxhash64(number), f.lit(KEYS))
    key = f.concat(f.lit("customer-"), f.floor(place * place / KEYS).cast("string"))
    padding = f.repeat(f.md5(number.cast("string")), 3)
    return key, f.concat(number.cast("string"), f.lit(" "), padding)


def write(session: SparkSession, trip: Trip) -> None:
    """All rows of a key from one task, in order: what one task sends stays in order."""
    key, value = expected(f.col("id"))
    made = session.range(trip.rows).select("id", key.alias("key"), value.alias("value"))
    rows = made.repartition(4, "key").sortWithinPartitions("id").select("key", "value")
    writer = rows.write.format("warren").options(uri=trip.uri, **PATIENT)
    writer.option("superStream", trip.super_stream).mode("append").save()


def read(session: SparkSession, trip: Trip) -> DataFrame:
    reader = session.read.format("warren").options(uri=trip.uri, **PATIENT)
    return reader.option("superStream", trip.super_stream).load()


def check(frame: DataFrame) -> Found:
    began = time.monotonic()
    text = f.col("value").cast("string")
    number = f.split_part(text, f.lit(" "), f.lit(1)).cast("long")
    key, value = expected(f.col("number"))
    rows = frame.select("key", "stream", "offset", text.alias("text"), number.alias("number"))
    rows = rows.select(
        *("key", "stream", "offset", "number"),
        ((f.col("key") == key) & (f.col("text") == value)).alias("right"),
    )
    before = f.lag("number").over(Window.partitionBy("key").orderBy("stream", "offset"))
    found = (
        rows.withColumn("before", before)
        .agg(
            f.count("*").alias("rows"),
            f.count_distinct("number").alias("different"),
            f.count_if(~f.coalesce("right", f.lit(False))).alias("wrong"),
            f.count_if(f.col("number") <= f.col("before")).alias("out_of_order"),
        )
        .first()
    )
    assert found is not None
    return Found(**found.asDict(), seconds=round(time.monotonic() - began, 1))


def session_of(trip: Trip) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    return (
        SparkSession.builder.master(trip.master)
        .appName("round-trip")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "4")
        .getOrCreate()
    )


def run(trip: Trip) -> Outcome:
    session = session_of(trip)
    try:
        began = time.monotonic()
        write(session, trip)
        took = round(time.monotonic() - began, 1)
        passes: list[Found] = []
        with Witness(trip) as witness:
            while not passes or (not witness.saw_all and len(passes) < _PASSES):
                passes.append(check(read(session, trip)))
        seen = [(stream, node, times) for (stream, node), times in sorted(witness.seen.items())]
        return Outcome(passes, took, witness.samples, seen, witness.not_placed)
    finally:
        session.stop()


if __name__ == "__main__":
    print(json.dumps(asdict(run(Trip(**json.loads(sys.argv[1]))))))
