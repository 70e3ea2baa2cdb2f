"""The lake: tables of events, filters, attachments, topology and deliveries (spec P4, P6)."""

from postroad.spark.lake.tables import SCHEMAS, Lake

__all__ = ["SCHEMAS", "Lake"]
