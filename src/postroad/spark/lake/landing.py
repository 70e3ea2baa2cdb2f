"""Landing: from a running network into the lake, exactly once (spec P4).

Two feeds, since what brokers publish about themselves takes a subscription of its own: all events, and
`$postroad/#`. Each holds storage under a durable name. A batch is a range of ticks of each pubend: executors
read it straight from brokers and write files (`intake.py`), the driver decides the batch (`ledger.py`) and
commits its files. Then the brokers are told that it is done.

Nothing of a batch counts before it is decided. So one that fails, because a broker or an executor is away, is
planned anew with whoever is there.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, Final, cast

import msgspec
import pyarrow as pa

from postroad.client.addresses import parse_addresses
from postroad.client.blocking import Client
from postroad.errors import PostroadError, UnavailableError
from postroad.ids import HISTORY as HISTORY_PUBEND
from postroad.ids import pubend_text
from postroad.spark.audit import LANDING, Subscribed
from postroad.spark.columns import EVENTS as EVENT_COLUMNS
from postroad.spark.lake.files import Added
from postroad.spark.lake.history import Part, complaints
from postroad.spark.lake.intake import EVENTS, HISTORY, Landed, task
from postroad.spark.lake.ledger import Ledger, Progress, begin, settle
from postroad.spark.lake.rows import SCHEMAS
from postroad.spark.lake.tables import File, Lake, Tables
from postroad.spark.options import Access, read_options
from postroad.spark.progress import plain_errors
from postroad.spark.source import Offset, Range, StreamReader
from postroad.tracking.attachment_log import SNAPSHOT

INTERVAL_S: Final = 10.0  # from the beginning of a batch to that of the next
LOOK_AROUND_S: Final = 30.0  # between looks at what is subscribed, and who is away
KNOCK_S: Final = 10  # for a broker to answer, before somebody is told
FIRST_PAUSE_S: Final = 1.0  # before another try, then twice as long each time
MAX_PAUSE_S: Final = 60.0
MAX_REST_S: Final = 3600.0  # between two requests for maps
QUIET_S: Final = 60.0  # of batches without rows, before one is noted
_TOPICS: Final = {EVENTS: "#", HISTORY: "$postroad/#"}

Told = Callable[[str], None]


def land(
    lake: Lake,
    brokers: str,
    *,
    access: Access | None = None,
    once: bool = False,
    interval_s: float = INTERVAL_S,
    tell: Told | None = None,
    trouble: Told | None = None,
    stop: Event | None = None,
) -> dict[str, int]:
    """Bring the lake up to date, and keep it so unless `once`, until `stop` is set.

    Returns rows added, by table. `tell` hears of batches. Without `once` a network that is away is tried
    again after growing pauses, and `trouble` hears of it.
    """
    access = replace(access or Access(), timeout_s=KNOCK_S)
    with plain_errors():
        if once:  # nothing is left where nobody answers
            access.connect(brokers).close()
        landing = _Landing(lake, brokers, access, tell or _nobody, trouble or _nobody)
        if once:
            landing.everything()
        else:
            landing.keep(interval_s, stop or Event())
    return dict(landing.added)


def _nobody(_line: str) -> None:
    """Hears it."""


class _Landing:
    """One process that lands in a lake."""

    def __init__(self, lake: Lake, brokers: str, access: Access, report: Told, trouble: Told) -> None:
        self._lake = lake
        self._report = report
        self._trouble = trouble
        self._ledger = Ledger(lake)
        begin(self._ledger, f"{LANDING}-{uuid.uuid4().hex[:8]}")
        # Brokers publish about themselves once somebody wants it: that feed comes first.
        self._feeds = [
            _Feed(brokers, access, kind, self._ledger.rows[kind].subscription) for kind in (HISTORY, EVENTS)
        ]
        self._maps = _Maps(lake, self._feeds[0])
        self.added: defaultdict[str, int] = defaultdict(int)  # rows, by table
        for progress in self._ledger.rows.values():
            self._settle(progress)

    def everything(self) -> None:
        """All there is now, of each feed: one that fails leaves the other to it, and is told after it."""
        failed: list[PostroadError] = []
        for feed in self._feeds:
            try:
                self._batch(feed, note=True)
            except PostroadError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        if self._maps.ask():
            self._batch(self._feeds[0], note=True)
        away = look_around(self._lake, self._feeds[0])
        if away:
            self._trouble(away)

    def keep(self, interval_s: float, stop: Event) -> None:
        """Until it is stopped."""
        pause_s = FIRST_PAUSE_S
        looked, away = 0.0, ""
        while not stop.is_set():
            begun = time.monotonic()
            try:
                for feed in self._feeds:
                    if not stop.is_set():
                        self._batch(feed)
                pause_s = FIRST_PAUSE_S
                if begun >= looked + LOOK_AROUND_S:
                    self._maps.ask()
                    before, away = away, look_around(self._lake, self._feeds[0])
                    looked = begun
                    if away not in ("", before):
                        self._trouble(away)
            except UnavailableError as error:
                self._trouble(f"{error}; trying again in {pause_s:g} s")
                stop.wait(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                continue
            stop.wait(max(0.0, begun + interval_s - time.monotonic()))

    def _batch(self, feed: _Feed, *, note: bool = False) -> None:
        """What there is now of a feed. If that is nothing, it is noted only now and then, or with `note`."""
        before = self._ledger.rows[feed.kind]
        with closing(feed.reader()) as reader:
            start, end, ranges = reader.plan(before.until)
            done = self._run(feed, before, ranges)
            now_us = time.time_ns() // 1000
            if not (done.rows or note or now_us - before.at_us >= QUIET_S * 1e6):
                return
            progress = Progress(
                feed=feed.kind,
                subscription=feed.subscription,
                batch=before.batch + 1,
                start=json.dumps(start),
                until=json.dumps(end),
                files=msgspec.json.encode(done.files).decode(),
                waiting=msgspec.msgpack.encode(done.waiting) if done.waiting else b"",
                at_us=now_us,
            )
            self._ledger.write(progress)
            self._settle(progress)
            reader.commit(end)
        for line in complaints(done.unread):
            self._trouble(line)
        if done.rows:
            self._report(f"{feed.kind}: batch {progress.batch}, {done.rows:,} rows")

    def _settle(self, progress: Progress) -> None:
        for table, rows in settle(self._lake, progress).items():
            self.added[table] += rows

    def _run(self, feed: _Feed, before: Progress, ranges: Sequence[Range]) -> Landed:
        """Have the ranges read and written by executors."""
        waiting: defaultdict[str, list[Part]] = defaultdict(list)  # by broker
        for part in before.parts():
            waiting[part.broker].append(part)
        work = [(part, waiting.pop(pubend_text(part.pubend)[:8], [])) for part in ranges]
        files: defaultdict[str, list[Added]] = defaultdict(list)
        all_of = Landed(files, 0, [part for some in waiting.values() for part in some], [])
        if not work:
            return all_of
        numbers = self._lake.spark.range(0, len(work), 1, len(work))
        run = task(self._lake.store, feed.kind, feed.subscription, work)
        answers = numbers.mapInArrow(run, "landed binary").collect()
        rows = 0
        for done in (msgspec.msgpack.decode(row.landed, type=Landed) for row in answers):
            rows += done.rows
            for table, some in done.files.items():
                files[table] += some
            all_of.waiting.extend(done.waiting)
            all_of.unread.extend(done.unread)
        return msgspec.structs.replace(all_of, rows=rows)


@dataclass(frozen=True, slots=True)
class _Feed:
    """What one of the two takes."""

    brokers: str
    access: Access
    kind: str
    subscription: str

    def reader(self) -> _Reader:
        options = {"brokers": self.brokers, "topic": _TOPICS[self.kind], "onLoss": "gap"}
        options |= {"durable": self.subscription, **self.access.options()}
        return _Reader(read_options(options, stream=True), dict.fromkeys(EVENT_COLUMNS.names, ""))


class _Reader(StreamReader):
    """Plans a batch, and says that it is done."""

    def plan(self, until: str) -> tuple[Offset, Offset, list[Range]]:
        """From where the last batch ended to where brokers are now."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        start: Offset = json.loads(until) if until else self.initialOffset()
        self.prepareForTriggerAvailableNow()
        end = self.latestOffset(start, ReadAllAvailable())
        return start, end, cast(list[Range], list(self.partitions(start, end)))

    def close(self) -> None:
        self.stop()


class _Maps:
    """Brokers tell their whole map when a first subscriber comes: have it told again where the lake has none,
    or none since a gap, once for each broker and end of its last gap."""

    def __init__(self, lake: Lake, feed: _Feed) -> None:
        self._lake = lake
        self._feed = feed
        self._read: frozenset[str] = frozenset()  # files of `deliveries` whose gaps are known
        self._gaps: dict[str, int] = {}  # by broker, the end of the last
        self._asked: set[tuple[str, int]] = set()  # broker, and that end; -1 if there is no gap
        self._pause_s = 0.0  # after the last request
        self._rests_until = 0.0

    def ask(self) -> bool:
        """Whether that was to be. All brokers tell all they know then: where gaps go on, ever less often."""
        if time.monotonic() < self._rests_until:
            return False
        self._look()
        with self._feed.access.connect(self._feed.brokers) as client:
            answer = client.request("heads")
            # Those that are away are asked for when they are back.
            heads = {pubend[:8] for pubend in {*answer["heads"]} - {*answer["away"]}}
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

    def _look(self) -> None:
        """For gaps that were not here before: in files of their own, or in one that took their place."""
        may_have = with_gaps(self._lake)
        new = [file for file in may_have if file.path not in self._read]
        for broker, gaps in (unlanded_history(self._lake, new) if new else {}).items():
            self._gaps[broker] = max(self._gaps.get(broker, -1), *(end for _, end in gaps))
        self._read = frozenset(file.path for file in may_have)


def _mapped(lake: Lake) -> dict[str, int]:
    """Of brokers of whose last whole map, and what followed it, no bulletin is missing: when they told it, by
    their own clocks."""
    from pyspark.sql.functions import expr

    head = "max(CASE WHEN whole THEN number END) OVER (PARTITION BY broker) AS head"
    map_time = f"max(CASE WHEN what = 'start' AND who = '{SNAPSHOT}' THEN at_us ELSE 0 END) AS told_us"
    changes = lake.read("attachments").selectExpr("*", head).filter("number >= head")
    maps = changes.groupBy("broker", "head").agg(
        expr("count(DISTINCT number) > max(number) - head AS sound"), expr(map_time)
    )
    return {row.broker: row.told_us for row in maps.filter("sound").collect()}


def _listed(client: Client) -> Iterator[dict[str, Any]]:
    """The durable subscriptions of a broker, which it tells page by page."""
    answer = client.request("subs")
    yield from answer["subscriptions"]
    while answer["more"]:
        answer = client.request("subs", after=answer["subscriptions"][-1]["name"])
        yield from answer["subscriptions"]


def look_around(tables: Tables, feed: _Feed) -> str:
    """Note the subscriptions of the brokers that are named, for the audit; and say who is away, if any is.

    A subscription that is gone stays, with what it was given.
    """
    silent: list[str] = []
    away: set[str] = set()
    there: set[str] = set()
    noted = [msgspec.convert(row, Subscribed) for row in tables.fetch("subscriptions").to_pylist()]
    known = {subscription.name: subscription for subscription in noted}
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
                subscription = msgspec.convert(row, Subscribed)
                before = known.get(subscription.name)
                known[subscription.name] = (
                    subscription
                    if before is None
                    else msgspec.structs.replace(subscription, since_us=before.since_us)
                )
    listing = [known[name] for name in sorted(known)]
    if listing != noted:
        rows = [msgspec.structs.asdict(subscription) for subscription in listing]
        tables.overwrite("subscriptions", pa.Table.from_pylist(rows, SCHEMAS["subscriptions"]))
    gone = silent or sorted(away - there)
    return f"away: {', '.join(gone)}; what only they have is landed when they are back" if gone else ""


def with_gaps(tables: Tables) -> list[File]:
    """Files of `deliveries` that may have gaps: "gap" is the last of the words in `what`."""
    return [file for file in tables.files("deliveries") if file.last.get("what", "gap") >= "gap"]


def unlanded_history(lake: Lake, files: Sequence[File] | None = None) -> dict[str, list[tuple[int, int]]]:
    """By broker, (from, to] of its own clock: what it published about itself then was released before it was
    landed. Of these files of `deliveries`, or of all that can have some."""
    own = f"startswith(subscriber, '{LANDING}') AND endswith(pubend, '-{HISTORY_PUBEND:08x}')"
    rows = lake.read("deliveries", with_gaps(lake) if files is None else files)
    ranges: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in rows.filter(f"what = 'gap' AND {own}").select("origin", "start_tick", "tick").collect():
        ranges[row.origin].append((row.start_tick, row.tick))
    return ranges
