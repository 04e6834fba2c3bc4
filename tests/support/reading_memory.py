"""Reads a stream to its end in one of the ways, and says how much memory that took.

    python -m tests.support.reading_memory WAY URL STREAM COUNT

Prints what it read as JSON: messages, bytes of their bodies, the largest record batch, and by how
much the process grew at most while it read. A process of its own, because the most that a process
ever held is all that the system tells.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from sharding.stream import StreamEnvironment
from tests.cluster.waiting import PATIENCE
from tests.support import patient


def most_held() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def batches(environment: StreamEnvironment, way: str, stream: str, count: int) -> Iterator[Any]:
    if way == "range":
        yield from environment.read_range(stream, 0, count, timeout=PATIENCE)
        return
    read = 0
    with environment.consumer(stream, offset="first", **patient.READER) as consumer:
        for batch in consumer.batches(PATIENCE):
            yield batch
            read += batch.num_rows
            if read >= count:
                return


def batches_of_spark(url: str, stream: str, count: int) -> Iterator[Any]:
    """What a task of Spark does, without Spark around it."""
    from spark.options.read import ReadOptions
    from spark.read.planning import StreamRange
    from spark.read.rows import read

    parts = urlsplit(url)
    uri = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    options = ReadOptions.parse({"uri": uri, "stream": stream, "requestTimeout": f"{PATIENCE:g}s"})
    yield from read(options, StreamRange(stream, 0, 0, count))


def main(way: str, url: str, stream: str, number: str) -> None:
    import pyarrow.compute as pc  # what is imported is not counted

    count, messages, octets, largest = int(number), 0, 0, 0
    with StreamEnvironment(url, **patient.STREAMS) as environment:
        environment.offsets(stream)
        before = most_held()
        if way == "messages":
            with environment.consumer(stream, offset="first", **patient.READER) as consumer:
                for message in islice(consumer.messages(PATIENCE), count):
                    messages += 1
                    octets += len(message.body)
        else:
            found = (
                batches_of_spark(url, stream, count)
                if way == "spark"
                else batches(environment, way, stream, count)
            )
            for batch in found:
                body = batch.column("value" if way == "spark" else "body")
                messages += batch.num_rows
                octets += pc.sum(pc.binary_length(body)).as_py()
                largest = max(largest, batch.nbytes)
        grew = most_held() - before
    print(json.dumps({"messages": messages, "bytes": octets, "largest": largest, "grew": grew}))


if __name__ == "__main__":
    main(*sys.argv[1:])
