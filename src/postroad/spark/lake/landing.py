"""Landing: from a running network into the lake, exactly once (spec P4).

Two streaming queries, since what brokers publish about themselves takes a subscription of its own: one of all
events, one of `$postroad/#`. Each holds storage under a durable name, and has its checkpoint in the lake, so
that both stay together. A batch is appended under the name of its query and its number; done again after a
crash, it has the same rows and changes nothing.

A stored filter may be published in parts, which a batch may separate. Parts that wait for the rest are saved
beside the checkpoint as they are after each batch, so a batch that is done again begins with the same ones.

What a batch does runs where the driver is, which with Spark Connect is the server: it takes nothing along but
text and paths, and uses the session of its batch.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import pyarrow as pa

from postroad.client.addresses import parse_addresses
from postroad.client.blocking import Client
from postroad.errors import BugError, PostroadError, StorageError, UnavailableError
from postroad.history.bulletins import FILTERS
from postroad.ids import HISTORY
from postroad.spark import register
from postroad.spark.audit import LANDING, SUBSCRIPTIONS, Subscribed, noted_subscriptions
from postroad.spark.lake.history import (
    NONSENSE,
    TABLES,
    UNREAD,
    Part,
    Unread,
    complaints,
    decoder,
    part_of,
    values,
    whole_filters,
)
from postroad.spark.lake.rows import day
from postroad.spark.lake.tables import COMPACTED, SCHEMAS, Lake, alone, put
from postroad.spark.options import Access
from postroad.spark.progress import plain_errors
from postroad.spark.source import GAP_TOPIC, SINCE
from postroad.tracking.attachment_log import SNAPSHOT
from postroad.units import MILLISECOND_US

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

FOLDER: Final = "_landing"
INTERVAL: Final = "10 seconds"
LOOK_S: Final = 1  # between looks at what the queries do
FINISH_S: Final = 60.0  # for batches to end, when landing is stopped
FINISH_LOOK_S: Final = 0.1
LOOK_AROUND_S: Final = 30.0  # between looks at what is subscribed, and who is away
KNOCK_S: Final = 10  # for a broker to answer, before somebody is told
STARTS: Final = 5  # of a query, on a machine so busy that it takes several
FIRST_PAUSE_S: Final = 1.0  # before another try, then twice as long each time
MAX_PAUSE_S: Final = 60.0
MAX_REST_S: Final = 3600.0  # between two requests for maps
_GAPS: Final = "-gaps"  # segments of gaps end so
_UNREAD: Final = "unread-"  # files of what is to be said of a batch begin so
_BULLETIN: Final = ("topic", "attributes", "payload", "pubend", "tick", "origin")
_GAP_COLUMNS: Final = "pubend string, tick bigint, start_tick bigint, date date, origin string"

_Batch = Callable[["DataFrame", int], None]
Told = Callable[[str], None]
_Found = TypeVar("_Found")


def land(
    lake: Lake,
    brokers: str,
    *,
    access: Access | None = None,
    once: bool = False,
    interval: str = INTERVAL,
    told: Told | None = None,
    trouble: Told | None = None,
    stop: Event | None = None,
) -> None:
    """Bring the lake up to date, and keep it so unless `once`, until `stop` is set.

    `told` hears of batches. Without `once` a network that is away is tried again after growing pauses, and
    `trouble` hears of it.
    """
    register(lake.spark)
    place = lake.path / FOLDER
    access = replace(access or Access(), timeout_s=KNOCK_S)
    # Two at once would each have the other's batches to do.
    with alone(place / "lock", f"lands in {lake.path}"), plain_errors():
        name = _name(place)
        # Brokers publish about themselves once somebody wants it: that query comes first.
        history = _Feed(str(lake.path), brokers, access, "$postroad/#", f"{name}-history", "history")
        events = _Feed(str(lake.path), brokers, access, "#", name, "events")
        jobs = [_Job(history, _History(history), trouble), _Job(events, _Events(events), trouble)]
        for job in jobs:
            job.feed.folder.mkdir(parents=True, exist_ok=True)
        if not once:
            _keep(lake, jobs, interval, told, trouble, stop or Event())
            return
        _every_job(lake, jobs, told)
        if _Maps(lake, history).ask():
            _whole_job(lake, jobs[0], told)
        away = _look_around(events, lake.path / SUBSCRIPTIONS)
        if away and trouble is not None:
            trouble(away)


def _name(place: Path) -> str:
    """Of this lake's durable subscriptions: two lakes of one network do not release each other's events."""
    file = place / "name"
    if not file.exists():
        put(file, f"{LANDING}-{uuid.uuid4().hex[:8]}".encode())
    name = file.read_text(errors="replace")
    if not name.startswith(LANDING):
        raise StorageError(f"{file} does not have the name of this lake's subscriptions but {name[:40]!r}")
    return name


def _every_job(lake: Lake, jobs: list[_Job], told: Told | None) -> None:
    """All there is now, of each: one that fails leaves the others to it, and is told after them."""
    failed: list[PostroadError] = []
    for job in jobs:
        try:
            _whole_job(lake, job, told)
        except PostroadError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _whole_job(lake: Lake, job: _Job, told: Told | None) -> None:
    """All there is now."""
    for left in reversed(range(STARTS)):
        try:
            with plain_errors():
                job.start(lake.spark, {"availableNow": True})
                job.wait(None)
            break
        except PostroadError as error:
            if not left or not _slow_start(error):
                raise
    job.tell(told)
    job.feed.release(job.query)


class _Maps:
    """Brokers tell their whole map when a first subscriber comes: have it told again where the lake has none,
    or none since a gap, once for each broker and end of its last gap."""

    def __init__(self, lake: Lake, feed: _Feed) -> None:
        self._lake = lake
        self._feed = feed
        self._read: frozenset[str] = frozenset()  # segments of `deliveries` whose gaps are known
        self._gaps: dict[str, int] = {}  # by broker, the end of the last
        self._asked: set[tuple[str, int]] = set()  # broker, and that end; -1 if there is no gap
        self._pause_s = 0.0  # after the last request
        self._rests_until = 0.0

    def ask(self) -> bool:
        """Whether that was to be. All brokers tell all they know then: where gaps go on, ever less often."""
        if time.monotonic() < self._rests_until:
            return False
        _undisturbed(self._lake, "deliveries", self._look)
        with self._feed.access.connect(self._feed.brokers) as client:
            told = client.request("heads")
            heads = {pubend[:8] for pubend in {*told["heads"]} - {*told["away"]}}  # others when they are back
            new = {(broker, self._gaps.get(broker, -1)) for broker in heads} - self._asked
            if not new:
                self._pause_s = 0.0
                return False
            mapped = _mapped(self._lake)
            lacking = any(mapped.get(broker, -1) <= gap_us for broker, gap_us in new)
            if lacking:
                client.request("history.restate")
                self._pause_s = min(max(2 * self._pause_s, LOOK_AROUND_S), MAX_REST_S)
                self._rests_until = time.monotonic() + self._pause_s
        self._asked |= new
        return lacking

    def _look(self, segments: Sequence[str]) -> None:
        """For gaps that were not here before: in segments of their own, or in one that took their place."""
        may_have = frozenset(_with_gaps(segments))
        new = sorted(may_have - self._read)
        for broker, gaps in (unlanded_history(self._lake, new) if new else {}).items():
            self._gaps[broker] = max(self._gaps.get(broker, -1), *(end for _, end in gaps))
        self._read = may_have


def _undisturbed(lake: Lake, table: str, read: Callable[[Sequence[str]], _Found]) -> _Found:
    """What it reads of a table's segments: anew if a compaction replaced some meanwhile, which it deletes."""
    while True:
        segments = lake.segments(table)
        try:
            with plain_errors():
                found = read(segments)
        except StorageError:
            if {*segments} <= {*lake.segments(table)}:
                raise
            continue
        if {*segments} <= {*lake.segments(table)}:
            return found


def _mapped(lake: Lake) -> dict[str, int]:
    """Of brokers of whose last whole map, and what followed it, no bulletin is missing: when they told it, by
    their own clocks."""
    from pyspark.sql.functions import expr

    head = "max(CASE WHEN whole THEN number END) OVER (PARTITION BY broker) AS head"
    told = f"max(CASE WHEN what = 'start' AND who = '{SNAPSHOT}' THEN at_us ELSE 0 END) AS told_us"

    def read(segments: Sequence[str]) -> dict[str, int]:
        changes = lake.read("attachments", segments).selectExpr("*", head).filter("number >= head")
        maps = changes.groupBy("broker", "head").agg(
            expr("count(DISTINCT number) > max(number) - head AS sound"), expr(told)
        )
        return {row.broker: row.told_us for row in maps.filter("sound").collect()}

    return _undisturbed(lake, "attachments", read)


def _keep(
    lake: Lake, jobs: list[_Job], interval: str, told: Told | None, trouble: Told | None, stop: Event
) -> None:
    pause_s = FIRST_PAUSE_S
    while not stop.is_set():
        before = sum(job.batches for job in jobs)
        try:
            with plain_errors():
                _watch(lake, jobs, interval, told, trouble, stop)
                return
        except PostroadError as error:
            if not isinstance(error, UnavailableError) and not _slow_start(error):
                raise
            if sum(job.batches for job in jobs) > before:
                pause_s = FIRST_PAUSE_S
            if trouble is not None:
                why = "this machine is so busy that Python starts too slowly" if _slow_start(error) else error
                trouble(f"{why}; trying again in {pause_s:g} s")
        stop.wait(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _slow_start(error: PostroadError) -> bool:
    """Spark gives the Python of a source ten seconds to start; a busy machine may need more."""
    return "connect back" in str(error)


def _watch(
    lake: Lake, jobs: list[_Job], interval: str, told: Told | None, trouble: Told | None, stop: Event
) -> None:
    """Until it is stopped, or one of them fails."""
    try:
        for job in jobs:
            job.start(lake.spark, {"processingTime": interval})
        looked, away, maps = 0.0, "", _Maps(lake, jobs[0].feed)
        while not stop.is_set():
            for job in jobs:
                job.wait(LOOK_S)
                job.tell(told)
            if time.monotonic() >= looked + LOOK_AROUND_S:
                with suppress(UnavailableError):  # the next look asks who is back
                    maps.ask()
                before, away = away, _look_around(jobs[-1].feed, lake.path / SUBSCRIPTIONS)
                looked = time.monotonic()
                if away not in ("", before) and trouble is not None:
                    trouble(away)
        _finish(jobs, told)
    finally:
        for job in jobs:
            job.stop()


def _finish(jobs: list[_Job], told: Told | None) -> None:
    """Let each end what it does now; a batch that takes too long is begun anew by the next run."""
    give_up = time.monotonic() + FINISH_S
    begun = {job: job.ended for job in jobs}
    while begun and time.monotonic() < give_up:
        for job, ended in list(begun.items()):
            # A query that is behind begins its next batch at once.
            if not job.busy or job.ended != ended:
                job.tell(told)
                job.stop()
                del begun[job]
        time.sleep(FINISH_LOOK_S if begun else 0)


def _listed(client: Client) -> Iterator[dict[str, Any]]:
    """The durable subscriptions of a broker, which it tells page by page."""
    answer = client.request("subs")
    yield from answer["subscriptions"]
    while answer["more"]:
        answer = client.request("subs", after=answer["subscriptions"][-1]["name"])
        yield from answer["subscriptions"]


def _look_around(feed: _Feed, file: Path) -> str:
    """Note the subscriptions of the brokers that are named, for the audit; and say who is away, if any is.

    A subscription that is gone stays, with what it was given.
    """
    silent: list[str] = []
    away: set[str] = set()
    there: set[str] = set()
    known = {one.name: one for one in noted_subscriptions(file)} if file.exists() else {}
    for address in parse_addresses(feed.brokers):
        try:
            with feed.access.connect(address) as client:
                answer = client.request("heads")
                away |= {pubend[:8] for pubend in answer["away"]}
                there |= {pubend[:8] for pubend in {*answer["heads"]} - {*answer["away"]}}
                listed = list(_listed(client))
        except UnavailableError:
            silent.append(address)
            continue
        for row in listed:
            if not row["name"].startswith(LANDING):
                one = msgspec.convert(row, Subscribed)
                before = known.get(one.name)
                known[one.name] = (
                    one if before is None else msgspec.structs.replace(one, since_us=before.since_us)
                )
    put(file, b"".join(msgspec.json.encode(known[name]) + b"\n" for name in sorted(known)))
    gone = silent or sorted(away - there)
    if not gone:
        return ""
    return (
        f"away: {', '.join(gone)}; what only they have is landed when they are back, and so is all that comes"
        " after a batch that was begun with some of it"
    )


def landed_until(lake: Path) -> dict[str, int]:
    """By broker, until when all that it published about itself is in the lake, by its own clock."""
    place = lake / FOLDER / "history" / "checkpoint"
    done = [int(one.name) for one in (place / "commits").glob("[0-9]*")]
    if not done:
        return {}
    file = place / "offsets" / str(max(done))
    try:
        offset = json.loads(file.read_text().splitlines()[-1])  # a token, under a version and settings
        ticks = [(pubend[:8], int(tick)) for pubend, tick in offset.items() if pubend != SINCE]
    except (OSError, ValueError, IndexError, AttributeError) as error:
        raise StorageError(f"{file} does not tell how far landing is: {error!r}") from None
    return {broker: min(tick for other, tick in ticks if other == broker) for broker, _ in ticks}


def _with_gaps(segments: Sequence[str]) -> list[str]:
    """Those of `deliveries` that may have gaps."""
    return [one for one in segments if one.endswith(_GAPS) or one.startswith(COMPACTED)]


def unlanded_history(lake: Lake, segments: Sequence[str] | None = None) -> dict[str, list[tuple[int, int]]]:
    """By broker, (from, to] of its own clock: what it published about itself then was released before it was
    landed. Of these segments of `deliveries`, or of all that can have some."""
    if segments is None:
        segments = _with_gaps(lake.segments("deliveries"))
    own = f"startswith(subscriber, '{LANDING}') AND endswith(pubend, '-{HISTORY:08x}')"
    rows = lake.read("deliveries", segments).filter(f"what = 'gap' AND {own}")
    found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in rows.select("origin", "start_tick", "tick").collect():
        found[row.origin].append((row.start_tick, row.tick))
    return found


class _Job:
    """One of the two queries, and what was told of it."""

    def __init__(self, feed: _Feed, batch: _Batch, trouble: Told | None = None) -> None:
        self.feed = feed
        self.batches = 0  # done, in this process
        self._batch = batch
        self._trouble = trouble
        self._query: StreamingQuery | None = None
        self._told = -1  # number of the last batch

    @property
    def query(self) -> StreamingQuery:
        if self._query is None:
            raise BugError("a query that was not started")
        return self._query

    def start(self, spark: SparkSession, trigger: dict[str, Any]) -> None:
        feed = self.feed
        options = {"brokers": feed.brokers, "topic": feed.topic, "durable": feed.durable, "onLoss": "gap"}
        options |= feed.access.options()
        writer = spark.readStream.format("postroad").options(**options).load().writeStream
        writer = writer.foreachBatch(self._batch).option(
            "checkpointLocation", str(feed.folder / "checkpoint")
        )
        self._query = writer.trigger(**trigger).start()

    def wait(self, seconds: int | None) -> None:
        """For its end, at most so long; a query that failed raises why."""
        if self.query.awaitTermination(seconds) and seconds is not None:
            raise BugError(f"the query of {self.feed.kind} has ended by itself")

    def tell(self, told: Told | None) -> None:
        for progress in self.query.recentProgress:
            # With Spark Connect a query's own count of rows is missing; that of its source is there.
            number, count = int(progress["batchId"]), int(progress["sources"][0]["numInputRows"])
            if number > self._told and count:
                self._told = number
                self.batches += 1
                if told is not None:
                    told(f"{self.feed.kind}: batch {number}, {count:,} rows")
        for file in sorted(self.feed.folder.glob(f"{_UNREAD}*[0-9]")):
            if self._trouble is not None:
                for line in file.read_text().splitlines():
                    self._trouble(line)
            file.unlink()

    @property
    def busy(self) -> bool:
        return bool(self.query.status["isTriggerActive"])

    @property
    def ended(self) -> str:
        """When the last batch began that has ended."""
        progress: Any = self.query.lastProgress
        return "" if progress is None else str(progress["timestamp"])

    def stop(self) -> None:
        if self._query is not None:
            self._query.stop()
            self._query = None


@dataclass(frozen=True, slots=True)
class _Feed:
    """What one of the two queries takes, and where it puts it."""

    lake: str
    brokers: str
    access: Access
    topic: str
    durable: str
    kind: str

    @property
    def folder(self) -> Path:
        return Path(self.lake) / FOLDER / self.kind

    def release(self, query: StreamingQuery) -> None:
        """Spark tells a source that a batch is done when it plans the next: of the last one it never does."""
        progress: Any = query.lastProgress
        end = None if progress is None else progress["sources"][0]["endOffset"]
        done = json.loads(end) if isinstance(end, str) else dict(end or {})
        done.pop(SINCE, None)
        if done:
            with (
                self.access.connect(self.brokers) as client,
                client.subscribe(self.topic, durable=self.durable, token="") as held,
            ):
                held.ack(upto=json.dumps(done))

    def segment(self, batch: int) -> str:
        """Batches are numbered anew by a query that has lost its checkpoint: its id tells them apart."""
        place = self.folder / "checkpoint" / "metadata"
        try:
            return f"{json.loads(place.read_text())['id']}-{batch:09d}"
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(f"{place} does not tell the id of a query: {error!r}") from None

    @contextmanager
    def batch(self, batch: DataFrame, number: int) -> Iterator[tuple[str, list[Unread]]]:
        """The name of its segments, and a list for what is left out of it, while the rest is landed; then its
        gaps, as of one told of them."""
        segment = self.segment(number)
        unread: list[Unread] = []
        batch.persist()
        try:
            yield segment, unread
            if unread:
                # Whoever started this may be another process, and says it.
                put(self.folder / f"{_UNREAD}{number}", "\n".join(complaints(unread)).encode())
            # Not under the segment's own name: there the rows of delivery reports are.
            self.append("deliveries", self.gaps(batch, unread), f"{segment}{_GAPS}")
        finally:
            batch.unpersist()

    def append(self, table: str, rows: DataFrame, segment: str) -> None:
        if not rows.isEmpty():
            Lake(rows.sparkSession, self.lake).append(table, rows, segment)

    def gaps(self, batch: DataFrame, unread: Sequence[Unread]) -> DataFrame:
        """What was released before it could be landed, or cannot be read, as rows of `deliveries`."""
        found = batch.filter(f"topic = '{GAP_TOPIC}'").selectExpr(
            *("pubend", "tick", "attributes['start'].integer AS start_tick", "date", "origin")
        )
        if unread:
            made = [
                (one.pubend, one.tick, one.tick - 1, day(one.tick // MILLISECOND_US), one.origin)
                for one in unread
            ]
            found = found.unionByName(batch.sparkSession.createDataFrame(made, _GAP_COLUMNS))
        return found.selectExpr(
            *("'gap' AS what", "CAST(NULL AS STRING) AS id", f"'{self.durable}' AS subscriber"),
            *("CAST(0 AS BIGINT) AS session", "pubend", "tick", "start_tick", "origin AS broker"),
            *("tick AS at_us", "CAST(0 AS BIGINT) AS number", "0 AS position", "date", "origin"),
        )


class _Events:
    """A batch of events."""

    def __init__(self, feed: _Feed) -> None:
        self._feed = feed

    def __call__(self, batch: DataFrame, number: int) -> None:
        with self._feed.batch(batch, number) as (segment, _):
            self._feed.append("events", batch.filter("id IS NOT NULL"), segment)


class _History:
    """A batch of what brokers publish about themselves."""

    def __init__(self, feed: _Feed) -> None:
        self._feed = feed

    def __call__(self, batch: DataFrame, number: int) -> None:
        with self._feed.batch(batch, number) as (segment, unread):
            for table, topic in TABLES.items():
                some = batch.filter(f"topic = '{topic}'").select(*_BULLETIN)
                # Kept, so that Python is not cut short by the look whether there is any.
                found = some.mapInArrow(decoder(table), f"{SCHEMAS[table]}, {UNREAD}").persist()
                try:
                    self._feed.append(table, found.filter("unread IS NULL"), segment)
                    left_out = found.filter("unread IS NOT NULL").select("unread.*")
                    unread += [Unread(*row) for row in left_out.collect()]
                finally:
                    found.unpersist()
            unread += self._filters(batch, number, segment)

    def _filters(self, batch: DataFrame, number: int, segment: str) -> list[Unread]:
        """Few and small beside what they stand for, so they are joined here. Returns what is left out."""
        waiting, unread = self._waiting(number), list[Unread]()
        for row in batch.filter(f"topic = '{FILTERS}'").orderBy("pubend", "tick").collect():
            about = values(row.asDict(recursive=True)["attributes"])
            try:
                waiting.append(part_of(row.origin, about, bytes(row.payload), row.tick, row.time_ms))
            except NONSENSE as error:
                unread.append(Unread.of(row.pubend, row.tick, row.topic, error))
        tables, rest, lacking = whole_filters(waiting)
        self._save(number, rest)
        if tables:
            found = batch.sparkSession.createDataFrame(pa.concat_tables(tables), SCHEMAS["filters"])
            self._feed.append("filters", found, segment)
        return unread + lacking

    def _place(self, number: int) -> Path:
        return self._feed.folder / f"parts-{number}.msgpack"

    def _waiting(self, number: int) -> list[Part]:
        """Parts that batches before this one left."""
        place = self._place(number - 1)
        return msgspec.msgpack.decode(place.read_bytes(), type=list[Part]) if place.exists() else []

    def _save(self, number: int, rest: list[Part]) -> None:
        put(self._place(number), msgspec.msgpack.encode(rest))
        self._place(number - 2).unlink(missing_ok=True)  # batch number - 1 is done, or this one were not
