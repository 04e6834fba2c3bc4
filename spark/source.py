"""`format("warren")`: RabbitMQ streams and sharded queues as a source and sink of Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from spark.options.read import ReadOptions
from spark.options.values import BadOption
from spark.read.columns import spark_schema

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter
    from pyspark.sql.types import StructType

    from spark.read.readers import BatchReader, StreamReader


class WarrenDataSource(DataSource):
    """Reads streams, and writes to streams and to the shards of queues.

        spark.read.format("warren").option("superStream", "invoices").load()
        spark.readStream.format("warren").option("stream", "clicks").load()
        df.write.format("warren").option("superStream", "invoices").mode("append").save()

    Options: to connect, `spark.options.connect`; to read, `spark.options.read`; to write,
    `spark.options.write`. Columns of the source: `spark.read.columns`.

    Nothing is asked of the cluster before a query is planned; the options are checked earlier.
    """

    @classmethod
    def name(cls) -> str:
        return "warren"

    def schema(self) -> StructType:
        return spark_schema(self._read_options().columns)

    def reader(self, schema: StructType) -> BatchReader:
        from spark.read.readers import BatchReader

        options = self._read_options()
        _check_schema(schema, options)
        return BatchReader(options.for_batch())

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        from spark.read.readers import StreamReader

        options = self._read_options()
        _check_schema(schema, options)
        return StreamReader(options.for_streaming())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from spark.write.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        from spark.write.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)

    def _read_options(self) -> ReadOptions:
        return ReadOptions.parse(self.options)


def _check_schema(schema: StructType, options: ReadOptions) -> None:
    if schema != spark_schema(options.columns):
        rule = "is given by the option columns, and can't be another"
        raise BadOption("the schema of the source", rule, schema.simpleString())
