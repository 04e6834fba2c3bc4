"""Makes `format("warren")` known to Spark without `register()`.

Spark looks for top-level modules called `pyspark_…` with a class `DefaultSource`. The build puts
this file where it finds it, beside the packages (see pyproject.toml).
"""

from spark.source import WarrenDataSource as DefaultSource

__all__ = ["DefaultSource"]
