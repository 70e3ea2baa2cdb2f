"""Spark looks for data sources in packages named `pyspark_...`: so it knows `format("postroad")`."""

from postroad.spark.source import PostroadSource as DefaultSource

__all__ = ["DefaultSource"]
