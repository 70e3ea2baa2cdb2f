"""The pipeline on Spark: what is done to events, their paths and the network's own records in bulk."""

from postroad.spark.where import where

__all__ = ["where"]
