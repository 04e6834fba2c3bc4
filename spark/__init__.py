"""PySpark over Warren: streams as a source, streams and queue shards as a sink.

`format("warren")` needs no import. For the rest, `from spark import …`: a plain `import spark`
would take the place of a session that is called `spark`.

What is promised of rows that are written, when tasks, drivers and brokers fail:

| | streams, super streams | queue shards |
|---|---|---|
| batch `df.write` | at least once | at least once |
| streaming `df.writeStream` | at least once | at least once |
| streaming `exactly_once(df, …)` | exactly once, in a chosen order | refused |
| `foreachBatch` and `df.write` inside | at least once | at least once |
| `publish_partition` | at least once | at least once |

At least once: a task succeeds only when the broker has confirmed each of its rows; one that is run
again stores its rows again.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark.write.exactly_once import exactly_once
    from spark.write.sink import PublishOptions, publish_partition

__all__ = ["PublishOptions", "exactly_once", "publish_partition"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: this package is imported in every Python worker of Spark.
    if name == "exactly_once":
        from spark.write.exactly_once import exactly_once

        return exactly_once
    if name in ("PublishOptions", "publish_partition"):
        from spark.write import sink

        return getattr(sink, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
