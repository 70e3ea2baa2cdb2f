"""Traces on Spark beside live ones: lakes, files of ids, rows to compare."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.worlds.spark_networks import World
from tests.worlds.tracking import NOW_US, Disk
from tests.worlds.tracking import identity as identity_of

from postroad.history.bulletins import running_number
from postroad.ids import HISTORY, MessageId, pubend_text
from postroad.seam.tracking import DropFilters, ReplaceAttachments, TrackingEffect
from postroad.spark.audit import LANDING
from postroad.spark.lake import rows
from postroad.spark.lake.intake import HISTORY as HISTORY_FEED
from postroad.spark.lake.ledger import Ledger, Progress
from postroad.spark.lake.tables import Lake
from postroad.spark.trace.bulk import read_ids, trace
from postroad.spark.trace.group import Group, Stored, keys_from
from postroad.spark.trace.paths import trace_group
from postroad.tracking.attachment_log import decode_changes
from postroad.tracking.keys import LOG, PUBLISH, REPAIR
from postroad.tracking.query.verdict import TraceResult
from postroad.tracking.record import decode_meta
from postroad.tracking.settings import TrackingConfig
from postroad.units import SECOND_US

COARSE = {"bits": 400, "capacity": 40, "hashes": 3, "adaptive": False}
FINE = {"bits": 16_000, "capacity": 1000, "hashes": 11, "adaptive": False}


def as_row(result: TraceResult) -> dict[str, Any]:
    return {
        "id": result.id,
        "publisher": f"{result.publisher:08x}",
        "origin": result.origin,
        "origin_doubt": result.origin_doubt,
        "verdict": result.verdict,
        "explanation": result.explanation,
        "route": [{"broker": one.broker, "from": one.source, "doubt": one.doubt} for one in result.route],
        "receivers": [
            {"subscriber": one.subscriber, "broker": one.broker, "doubt": one.doubt, "repair": one.repair}
            for one in result.receivers
        ],
        "lost": [{"from": loss.source, "to": loss.target, "doubt": loss.doubt} for loss in result.lost],
        "missing": [{"broker": broker, "why": why} for broker, why in result.missing],
    }


def same(live: dict[str, Any], bulk: dict[str, Any]) -> None:
    for name in ("id", "publisher", "origin", "verdict", "explanation", "missing"):
        assert bulk[name] == live[name], name
    assert (bulk["origin_doubt"] is None) == (live["origin_doubt"] is None)
    assert (bulk["origin_doubt"] or 0.0) == pytest.approx(live["origin_doubt"] or 0.0, rel=1e-6)
    for name in ("route", "receivers", "lost"):
        mine, theirs = bulk[name], live[name]
        assert [{**one, "doubt": 0} for one in mine] == [{**one, "doubt": 0} for one in theirs], name
        assert [one["doubt"] for one in mine] == pytest.approx([one["doubt"] for one in theirs], rel=1e-6)


def bulk(world: World, ids: list[bytes]) -> dict[str, dict[str, Any]]:
    """As the Spark job does it: by origin first, and with everything for what is left."""
    found: dict[str, dict[str, Any]] = {}
    left: list[bytes] = []
    network = world.view()
    for home in sorted({MessageId.from_bytes(one).broker for one in ids}):
        mine = [one for one in ids if MessageId.from_bytes(one).broker == home]
        records = [one for one in world.stored() if belongs(one, home)]
        table, rest = trace_group(Group(keys_from(mine), records, network), complete=False)
        found |= expanded(table)
        left += [one.tobytes() for one in rest]
    if left:
        table, rest = trace_group(Group(keys_from(left), world.stored(), network), complete=True)
        assert not len(rest)
        found |= expanded(table)
    return found


def expanded(table: pa.Table) -> dict[str, dict[str, Any]]:
    """By id, as Spark makes it of the answers."""
    return {
        identity: {"id": identity, "publisher": identity[:8], **row}
        for row in table.to_pylist()
        for identity in row["ids"]
    }


def belongs(one: Stored, origin: int) -> bool:
    return one.meta.key.kind in (PUBLISH, REPAIR, LOG) or one.meta.key.origin == origin


def unknown(world: World) -> list[bytes]:
    times = [MessageId.from_bytes(one).time_ms for one in world.truth]
    return [
        bytes(MessageId(9, world.random.choice([*world.brokers, 99]), world.random.choice(times), 60_000 + n))
        for n in range(20)
    ]


def lake_of(spark: SparkSession, path: Path | str, world: World) -> Lake:
    lake = Lake(spark, path)
    lake.append("filters", world.filter_rows())
    lake.append("attachments", world.attachment_rows())
    return lake


def landed_to(lake: Lake, until: dict[str, int]) -> None:
    """Landing of history is at these ticks."""
    Ledger(lake).write(Progress(feed=HISTORY_FEED, subscription="x", batch=1, until=json.dumps(until)))


def ids_file(path: Path, ids: list[bytes]) -> Path:
    path.write_text("".join(f"{MessageId.from_bytes(one)}\n" for one in ids))
    return path


def rows_of(lake: Lake, ids: Path, config: TrackingConfig) -> dict[str, dict[str, Any]]:
    found = trace(lake, read_ids(lake.spark, ids), config=config).collect()
    rows = {row.id: row.asDict(recursive=True) for row in found}
    assert len(rows) == len(found)
    return rows


class Dropping(Disk):
    """It drops what retention does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced = False  # the log was written anew

    def keep(self, effects: Iterable[TrackingEffect]) -> None:
        for effect in effects:
            super().keep([effect])
            self.replaced |= isinstance(effect, ReplaceAttachments)
            if isinstance(effect, DropFilters):
                self.log += effect.record
                for sequence in effect.sequences:
                    del self.records[sequence]


class Telling:
    """A broker that tracks, in a lake that has what it told but for what was left out."""

    def __init__(self, spark: SparkSession, path: Path, config: TrackingConfig) -> None:
        self.lake = Lake(spark, path)
        self.config, self.disk = config, Dropping()
        self.boot = 1
        self.now_us = NOW_US
        self.tracking = self.disk.start(NOW_US, config)
        self._told: set[int] = set()  # sequences
        self._said = 0  # bytes of the log
        self._bulletins = 0
        self.map()

    def map(self) -> None:
        """It is told whole."""
        self._attachments(b"".join(self.tracking.attachment_parts(self.now_us)), whole=True)

    def _attachments(self, record: bytes, *, whole: bool = False) -> None:
        self._bulletins += 1
        changes = decode_changes(record)[0]
        if changes:
            number = running_number(self.boot, self._bulletins)
            self.lake.append("attachments", rows.attachments(1, "a", number, changes, whole=whole))

    def minute(self, who: str, *, landed: bool = True, late_us: int = 0) -> str:
        """Somebody comes and is sent a message, which is stored; in the lake, or it is not `landed`."""
        began_us = self.now_us
        identity = identity_of(began_us + 2 * SECOND_US - late_us)
        self.tracking.attached(who, began_us + SECOND_US)
        self.tracking.published(identity, began_us + 2 * SECOND_US)
        self.tracking.delivered(1, (who,), identity, began_us + 2 * SECOND_US)
        self.now_us += 60 * SECOND_US
        self.disk.keep(self.tracking.tick(self.now_us))
        self._tell(landed=landed)
        return str(MessageId.from_bytes(identity))

    def stop(self) -> None:
        self.disk.keep(self.tracking.close(self.now_us))
        self._tell(landed=True)

    def start(self) -> None:
        self.boot += 1
        self.tracking = self.disk.start(self.now_us, self.config)
        self.tracking.resume_after(running_number(self.boot, 0))
        self._said = len(self.disk.log)
        self.map()

    def _tell(self, *, landed: bool) -> None:
        new = [one for sequence, one in self.disk.records.items() if sequence not in self._told]
        self._told |= set(self.disk.records)
        said, self._said = self.disk.log[self._said :], len(self.disk.log)
        if self.disk.replaced:
            self.disk.replaced = False
            self.map()
        elif landed:
            self._attachments(said)
        if landed and new:
            self.lake.append("filters", rows.filters(1, "a", [(decode_meta(one), one) for one in new]))

    def gap(self, start_us: int, end_us: int) -> None:
        row = {"what": "gap", "subscriber": f"{LANDING}-x-history", "pubend": pubend_text(1 << 32 | HISTORY)}
        row |= {"start_tick": start_us, "tick": end_us, "at_us": end_us, "session": 0, "number": 0}
        row |= {"position": 0, "broker": "00000001", "origin": "00000001"}
        row |= {"date": rows.day(end_us // 1000)}
        self.lake.append("deliveries", pa.Table.from_pylist([row], rows.SCHEMAS["deliveries"]))

    def traced(self, *texts: str) -> list[tuple[str, list[str], list[str]]]:
        """Of each: the verdict, who got it, and what is said of the broker."""
        ids = Path(self.lake.store.url).with_name(f"ids-{self._bulletins}")  # Spark remembers what a file had
        ids.write_text("".join(f"{one}\n" for one in texts))
        found = rows_of(self.lake, ids, self.config)
        return [
            (
                found[one]["verdict"],
                [receiver["subscriber"] for receiver in found[one]["receivers"]],
                [missing["why"] for missing in found[one]["missing"]],
            )
            for one in texts
        ]


def to_trace(spark: SparkSession, folder: Path, place: str = "") -> Callable[[], None]:
    """Make what the step `trace` of the mill needs; call the answer to judge what came of it."""
    world = World(4, TrackingConfig(**FINE), 3, extra=0)
    world.happen(30, faults=False)
    world.stop()
    lake_of(spark, place or folder / "traces", world)
    ids = list(world.truth)
    ids_file(folder / "ids", ids)

    def judge() -> None:
        rows = {row.id: row for row in spark.read.parquet(str(folder / "traced")).collect()}
        assert len(rows) == len(ids)
        for result in world.live(*ids):
            same(as_row(result), rows[result.id].asDict(recursive=True))

    return judge
