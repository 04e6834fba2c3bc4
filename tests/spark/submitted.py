"""A program for spark-submit, which has Warren from a zip alone.

    PYTHONPATH=rabbit-warren.zip spark-submit --py-files rabbit-warren.zip \\
        tests/spark/submitted.py '{"uri": …}'

It prints a line of JSON: the rows that came back, as a batch and as a stream, and where the
executors have Warren from.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from pyspark.sql import Row, SparkSession

ROWS = 1_000


def run(options: dict[str, str]) -> dict[str, object]:
    session = SparkSession.builder.appName("submitted").getOrCreate()
    numbered = session.range(ROWS).selectExpr("'k' || id % 7 AS key", "string(id) AS value")
    numbered.write.format("warren").options(**options).mode("append").save()
    batch = session.read.format("warren").options(**options).load().collect()
    stream = session.readStream.format("warren").options(**options, startingOffsets="earliest")
    query = stream.load().writeStream.format("memory").queryName("seen")
    query.trigger(availableNow=True).start().awaitTermination()
    streamed = session.table("seen").collect()
    places = session.sparkContext.parallelize([0, 1], 2).map(where_warren_is).collect()
    session.stop()
    return {"batch": numbers(batch), "stream": numbers(streamed), "places": places}


def numbers(rows: list[Row]) -> list[int]:
    return sorted(int(bytes(row.value)) for row in rows)


def where_warren_is(_: int) -> str:
    return str(Path(import_module("spark").__file__ or "").resolve())


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
