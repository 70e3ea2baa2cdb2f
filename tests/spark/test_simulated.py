"""Simulated networks whose brokers ship their own history, as a lake: its audit and its traces (P5, P6, P7).

A subscriber of the simulated world takes `$postroad/#`; what it gets is landed by landing's own decoders. The
simulator knows what really happened to every event.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.worlds.spark_traces import ids_file, landed_to, rows_of

from postroad.events import Event, EventBatch
from postroad.history.bulletins import FILTERS, broker_text
from postroad.ids import HISTORY, MessageId
from postroad.selectors import Selector
from postroad.sim.judge.durable import Reader, Records
from postroad.sim.judge.tracking import QUICK, Inquirer, _short
from postroad.sim.people.applications import DurableSubscriber
from postroad.sim.scenario import Scenario
from postroad.spark.audit import DEFAULT_LATE_US, Subscribed, as_rows, audit
from postroad.spark.lake import rows
from postroad.spark.lake.compact import compact
from postroad.spark.lake.history import TABLES, Part, decoded, part_of, whole_filters
from postroad.spark.lake.tables import Lake
from postroad.spark.trace.topology import latest, tracking_settings
from postroad.spark.trace.views import NOT_LANDED
from postroad.units import MIB, MILLISECOND_US, SECOND_US
from postroad.wire.frames import Request

Fault = tuple[str, str, str]  # kind, subscriber, id


@cache
def simulate(seed: int, strategy: str, brokers: int) -> Simulated:
    return Simulated(seed, strategy, brokers)


class Collector(Reader):
    """What brokers publish about themselves."""

    def __init__(self, records: Records) -> None:
        super().__init__(records, name="history", selector=Selector.parse("$postroad/#", ""), ack="auto")
        self.bulletins: dict[tuple[int, int], Event] = {}  # (pubend, tick)

    def events(self, batch: EventBatch) -> None:
        for event, tick in zip(batch.events(), batch.headers["tick"].tolist(), strict=True):
            self.bulletins[batch.pubend, tick] = event

    def gap(self, pubend: int, start: int, end: int) -> None:
        raise AssertionError(f"history was released early: {pubend} ({start}, {end}]")


class Simulated:
    """One run in good order, and what came of it."""

    def __init__(self, seed: int, strategy: str, brokers: int) -> None:
        tracking = replace(QUICK, strategy=strategy)
        self.scenario = Scenario(
            seed=seed, minutes=0.3, brokers=brokers, faults=False, tracking=tracking, durable=True
        )
        life = self.scenario.durable
        assert life is not None
        self.records = life.records
        self.history = Collector(life.records)
        world, network = self.scenario.world, self.scenario.network
        addresses = ("10.0.0.1:7420",)
        DurableSubscriber(
            world, network, name="h", addresses=addresses, reader=self.history, window=MIB, consume=0
        ).start()
        outcome = self.scenario.run()
        assert outcome.rule == "", "\n".join((outcome.text, *outcome.story))
        self.config = tracking
        self.answers: dict[str, dict[str, Any]] = {}
        self._inquirer = Inquirer(
            world, network, self.scenario.ledger, name="q", addresses=addresses, answered=self._answered
        )
        self._inquirer.start()
        world.run(world.now_us + 20 * SECOND_US)  # until everything is stored and told
        # How far each pubend is, as landing asks for it; what comes to there is here a moment later.
        self._heads: dict[str, int] = {}
        self._inquirer._open[0] = (b"", world.now_us)
        self._inquirer._send(Request(number=0, what="heads", arguments={}))
        world.run(world.now_us + 2 * SECOND_US)

    def _answered(self, identity: bytes, broker: str, asked_us: int, answer: dict[str, Any]) -> None:
        del broker, asked_us
        if identity:
            self.answers[str(MessageId.from_bytes(identity))] = answer
        else:
            self._heads = answer["heads"]

    def ask(self, ids: list[bytes]) -> dict[str, dict[str, Any]]:
        """The live network's answers."""
        world = self.scenario.world
        for identity in ids:
            self._inquirer.ask(identity)
            world.run(world.now_us + SECOND_US)
        return self.answers

    def facts(self, identity: bytes) -> tuple[set[str], set[tuple[str, str]]]:
        """The simulator's knowledge: brokers that passed it on or gave it, and (broker, receiver)."""
        assert self.scenario.trails is not None
        found = self.scenario.trails._facts.get(identity, [])
        return (
            {one.broker for one in found},
            {(one.broker, one.receiver) for one in found if one.receiver},
        )

    @property
    def ids(self) -> list[bytes]:
        return list(self.scenario.ledger.events)

    def subscriptions(self) -> list[Subscribed]:
        return [
            Subscribed(name=one.name, topic=one.selector.topic, where=one.selector.where)
            for one in self.records.readers
        ]

    def land(self, lake: Lake, deliveries: pa.Table | None = None) -> Lake:
        tables = {**self._tables(), "events": self._events()}
        if deliveries is not None:
            tables["deliveries"] = deliveries
        for table, found in tables.items():
            lake.append(table, found)
        told = {pubend: tick for pubend, tick in self._heads.items() if pubend.endswith(f"-{HISTORY:08x}")}
        landed_to(lake, told)
        return lake

    def _events(self) -> pa.Table:
        events = self.scenario.ledger.events
        return rows.events(
            (
                MessageId.from_bytes(identity),
                events[identity].topic,
                events[identity].attributes,
                events[identity].payload,
                pubend,
                tick,
            )
            for pubend, logged in self.records._logged.items()
            for identity, tick in logged.items()
        )

    def _tables(self) -> dict[str, pa.Table]:
        found: dict[str, list[pa.Table]] = {}
        parts: list[Part] = []
        kinds = {topic: table for table, topic in TABLES.items()}
        for (pubend, _), event in sorted(self.history.bulletins.items()):
            author = broker_text(pubend >> 32)
            if event.topic == FILTERS:
                parts.append(part_of(author, event.attributes, event.payload))
            else:
                table = kinds[event.topic]
                found.setdefault(table, []).append(decoded(table, author, event.attributes, event.payload))
        found["filters"], rest, unread = whole_filters(parts)
        assert (rest, unread) == ([], [])
        return {table: pa.concat_tables(some) for table, some in found.items()}

    @property
    def told_ms(self) -> int:
        """When the last broker had begun to tell its history."""
        told = [one["at_us"] for one in self._tables()["attachments"].to_pylist() if one["whole"]]
        return (max(told) + self.config.skew_us) // MILLISECOND_US + 1

    def deliveries(self) -> list[dict[str, Any]]:
        return list(self._tables()["deliveries"].to_pylist())


def late(given: list[dict[str, Any]]) -> set[Fault]:
    """What is late by nature: its subscriber was slow."""
    first: dict[tuple[str, str], int] = {}
    for row in given:
        if row["what"] == "event":
            place = (row["subscriber"], row["id"])
            first[place] = min(row["at_us"], first.get(place, row["at_us"]))
    return {
        ("late", name, identity)
        for (name, identity), at_us in first.items()
        if at_us - MessageId.parse(identity).time_ms * MILLISECOND_US > DEFAULT_LATE_US
    }


def plant(given: list[dict[str, Any]], chance: Random) -> tuple[list[dict[str, Any]], set[Fault]]:
    """Harm deliveries in every way; the rows, and what an audit must say of them."""
    streams: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in sorted(given, key=lambda one: (one["at_us"], one["number"], one["position"])):
        if row["what"] == "event":
            place = (row["subscriber"], row["broker"], row["session"], row["pubend"])
            streams.setdefault(place, []).append(row)
    planted: set[Fault] = set()
    made: list[dict[str, Any]] = []
    gone: list[dict[str, Any]] = []

    def note(kind: str, row: dict[str, Any]) -> None:
        planted.add((kind, row["subscriber"], row["id"]))

    long = [some for some in streams.values() if len(some) >= 8]
    assert long, "too little traffic to harm"
    for some in long:
        at = chance.randrange(1, len(some) - 6)
        lost, twice, slow, early = some[at], some[at + 1], some[at + 3], some[at + 2]
        note("missing", lost)
        gone.append(lost)
        note("duplicated", twice)
        made.append({**twice, "position": twice["position"] + 1_000_000})
        # It comes after the one that follows it.
        note("reordered", early)
        for name in ("at_us", "number", "position"):
            early[name], slow[name] = slow[name], early[name]
        # The last one of a stream can wait without holding up another.
        note("late", some[-1])
        some[-1]["at_us"] += 3_600 * SECOND_US
    return [row for row in given if not any(row is one for one in gone)] + made, planted


def found_by_audit(lake: Lake, simulated: Simulated) -> set[Fault]:
    faults = as_rows(audit(lake, simulated.subscriptions()).faults)
    return {(row["kind"], row["subscriber"], row["id"]) for row in faults}


@pytest.mark.parametrize(
    ("seed", "brokers"), [(2, 3), *(pytest.param(n, 4, marks=pytest.mark.soak) for n in (3, 8, 10, 16))]
)
def test_the_audit_finds_what_was_planted_in_a_simulated_network(
    spark: SparkSession, tmp_path: Path, seed: int, brokers: int
) -> None:
    """P7, issue 5: lost, duplicated, reordered, late; and nothing in what the network did by itself."""
    simulated = simulate(seed, "bloom", brokers)
    schema = rows.SCHEMAS["deliveries"]
    given = simulated.deliveries()
    natural = late(given)
    harmed, planted = plant(given, Random(seed))
    assert {kind for kind, _, _ in planted} == {"missing", "duplicated", "reordered", "late"}
    lost = {(name, identity) for kind, name, identity in planted if kind == "missing"}
    expected = planted | {one for one in natural if one[1:] not in lost}
    lake = simulated.land(Lake(spark, tmp_path / "harmed"), pa.Table.from_pylist(harmed, schema))
    assert found_by_audit(lake, simulated) == expected


@pytest.mark.parametrize(
    ("seed", "strategy", "brokers"),
    [
        (2, "bloom", 3),
        *(pytest.param(n, "bloom", 5, marks=pytest.mark.soak) for n in (2, 11, 16)),
        *(pytest.param(n, "exact", 4, marks=pytest.mark.soak) for n in (2, 4)),
    ],
)
def test_live_bulk_and_simulator_tell_the_same(
    spark: SparkSession, tmp_path: Path, seed: int, strategy: str, brokers: int
) -> None:
    """P5, P6, issue 5: random ids of a random network; after compaction still."""
    simulated = simulate(seed, strategy, brokers)
    ids = Random(seed).sample(simulated.ids, 40)
    live = simulated.ask(ids)
    assert len(live) == len(ids)
    lake = simulated.land(Lake(spark, tmp_path / "lake"))
    file = ids_file(tmp_path / "ids", ids)
    config = tracking_settings(latest(lake).values())
    for name in ("skew_us", "jitter_us", "routing"):
        assert getattr(config, name) == getattr(simulated.config, name), "the lake knows what a trace needs"
    bulk = rows_of(lake, file, config)
    compact(lake, "filters")
    after = rows_of(lake, file, config)
    true = extra = early = 0
    for identity in ids:
        text = str(MessageId.from_bytes(identity))
        brokers_true, receivers_true = simulated.facts(identity)
        steps = {(one["broker"], one["source"]) for one in live[text]["route"]}
        got = {(one["broker"], one["subscriber"]) for one in live[text]["receivers"]}
        named = {(broker, _short(name)) for broker, name in got}
        assert receivers_true <= named
        assert brokers_true <= {broker for broker, _ in steps}
        true, extra = true + len(receivers_true), extra + len(named - receivers_true)
        for row in (bulk[text], after[text]):
            if any(one["why"] == NOT_LANDED for one in row["missing"]):
                assert row["verdict"] == "partial", "brokers were not asked for their history yet"
                assert MessageId.from_bytes(identity).time_ms < simulated.told_ms
                early += 1
                continue
            assert (row["origin"], row["verdict"]) == (live[text]["origin"], live[text]["verdict"])
            assert {(one["broker"], one["from"]) for one in row["route"]} == steps
            assert {(one["broker"], one["subscriber"]) for one in row["receivers"]} == got
    assert early < len(ids) // 2
    assert true > 10
    assert extra <= (0 if strategy == "exact" else true // 10), "Bloom filters err, seldom"
