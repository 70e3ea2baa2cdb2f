"""The pipeline on Spark: what is done to events, their paths and the network's own records in bulk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postroad.spark.session import check_installed
from postroad.spark.where import where

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Let this session read and write `format("postroad")`, with filters of batch reads pushed to brokers.

    Spark finds the format by itself where Postroad is installed, but without pushing filters down.
    """
    check_installed()
    from postroad.spark.source import PushingSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(PushingSource)


__all__ = ["register", "where"]
