"""P7: the audit finds every fault that was planted in a simulated network, and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from postroad.errors import StorageError, UsageError
from postroad.history.bulletins import DeliveryReport, Link, Links, decode_deliveries
from postroad.ids import MessageId, pubend_id, pubend_text
from postroad.selectors import Selector
from postroad.spark.audit import LANDING, LOSSES, Subscribed, as_rows, audit, read_subscriptions
from postroad.spark.lake import rows
from postroad.spark.lake.tables import Lake
from postroad.spark.report import Findings, collect, render, unseen_text, write_report
from postroad.spark.trace.topology import Place, link_loads

START_MS = 1_763_164_800_000
SUBSCRIBED = [
    Subscribed(name="all", topic="orders/#"),
    Subscribed(name="dear", topic="orders/+", where="price > 50"),
    Subscribed(name="also-dear", topic="orders/+", where="price > 50"),
    Subscribed(name="eu", topic="orders/eu", where="price BETWEEN 10 AND 60 AND NOT urgent"),
    Subscribed(name="never", topic="bills"),
]


@dataclass
class Delivery:
    identity: MessageId
    pubend: int
    tick: int
    at_us: int
    session: int = 1


@dataclass
class Traffic:
    """Three publishing brokers, five subscriptions, and the faults that were planted."""

    seed: int
    events: list[tuple[MessageId, str, dict[str, str | int | float | bool], bytes, int, int]] = field(
        default_factory=list
    )
    given: dict[str, list[Delivery]] = field(default_factory=dict)
    gaps: list[tuple[str, int, int, int]] = field(default_factory=list)
    planted: set[tuple[str, str, str]] = field(default_factory=set)  # kind, subscriber, id

    def __post_init__(self) -> None:
        random = Random(self.seed)
        for number in range(300):
            time_ms = START_MS + number * 40
            broker = random.randint(1, 3)
            identity = MessageId(random.randint(1, 5), broker, time_ms, number)
            attributes: dict[str, str | int | float | bool] = {
                "price": random.choice((5, 30, 55.5, 80, "dear")),
                "urgent": random.random() < 0.3,
            }
            topic = random.choice(("orders/eu", "orders/us", "orders"))
            self.events.append((identity, topic, attributes, b"x" * 9, pubend_id(broker, 0), time_ms * 1000))
        for one in SUBSCRIBED:
            selector = Selector.parse(one.topic, one.where)
            self.given[one.name] = [
                Delivery(identity, pubend, tick, tick + random.randrange(500, 20_000))
                for identity, topic, attributes, _, pubend, tick in self.events
                if selector.matches(topic, attributes)
            ]

    def plant(self) -> None:
        random = Random(self.seed)
        del self.given["dear"][-3:]  # they never came: pending
        for name, deliveries in self.given.items():
            if len(deliveries) < 30:
                continue
            chosen = random.sample(range(5, len(deliveries) - 10), 8)
            for kind, at in zip(("missing", "duplicated", "late", "reordered") * 2, chosen, strict=True):
                self._harm(kind, name, deliveries[at])
        # A told gap covers one event of `all`: it is not missing.
        hidden = self.given["all"].pop(3)
        self.gaps.append(("all", hidden.pubend, hidden.tick - 1, hidden.tick))
        again = self.given["also-dear"][2]
        self.given["also-dear"].append(
            Delivery(again.identity, again.pubend, again.tick, START_MS * 1000 + 10**8, session=2)
        )
        stray = next(event for event in self.events if event[1] == "orders/us")
        self.given["eu"].append(Delivery(stray[0], stray[4], stray[5], stray[5] + 900, session=7))
        self.planted.add(("unwanted", "eu", str(stray[0])))

    def _harm(self, kind: str, name: str, one: Delivery) -> None:
        mine = self.given[name]
        same = [other for other in mine if other.pubend == one.pubend]
        if kind == "missing":
            mine.remove(one)
        elif kind == "duplicated":
            mine.append(Delivery(one.identity, one.pubend, one.tick, one.at_us + 100))
        elif kind == "late":
            # Everything after it waits behind it, so that order is kept and it alone is over the bound.
            one.at_us = one.tick + 11_000_000
            for other in same:
                if other.tick > one.tick:
                    other.at_us = max(other.at_us, one.at_us + 1)
            self._refresh_late(name)
            return
        else:
            later = [other for other in same if other.tick > one.tick]
            one.at_us = max(other.at_us for other in later[:2]) + 1 if later else one.at_us
        self.planted.add((kind, name, str(one.identity)))

    def _refresh_late(self, name: str) -> None:
        for one in self.given[name]:
            if one.session == 1 and one.at_us - one.identity.time_ms * 1000 > 10_000_000:
                self.planted.add(("late", name, str(one.identity)))

    def expected_reordered(self) -> None:
        """Order is judged as it came out: a late one moves others."""
        self.planted = {one for one in self.planted if one[0] not in ("reordered", "late")}
        for name, deliveries in self.given.items():
            self._refresh_late(name)
            highest: dict[tuple[int, int], int] = {}
            seen: set[tuple[int, MessageId]] = set()
            for one in sorted(deliveries, key=lambda each: each.at_us):
                place = (one.session, one.pubend)
                first = (one.session, one.identity) not in seen
                seen.add((one.session, one.identity))
                if first and one.tick < highest.get(place, 0):
                    self.planted.add(("reordered", name, str(one.identity)))
                highest[place] = max(one.tick, highest.get(place, 0))

    def delivery_rows(self) -> pa.Table:
        report = DeliveryReport(1 << 24)
        sent = [(one.at_us, name, one) for name, some in self.given.items() for one in some]
        for at_us, name, one in sorted(sent, key=lambda each: (each[0], each[1])):
            report.events([(name, one.session)], one.pubend, bytes(one.identity), np.array([one.tick]), at_us)
        for name, pubend, start, end in self.gaps:
            report.gap([(name, 1)], pubend, start, end, START_MS * 1000)
        (payload,) = report.take()
        return rows.deliveries(4, 1, decode_deliveries(payload))


def lake_of(spark: SparkSession, path: Path, traffic: Traffic) -> Lake:
    lake = Lake(spark, path)
    lake.append("events", spark.createDataFrame(rows.events(traffic.events)), "land-1")
    lake.append("deliveries", spark.createDataFrame(traffic.delivery_rows()), "land-1")
    links = {1: (4,), 2: (4,), 3: (2,), 4: (1, 2)}
    tables = [
        rows.topology(
            broker,
            Links(
                broker=f"{broker:08x}",
                name=f"b{broker}",
                boot=1,
                at_us=START_MS * 1000,
                links=tuple(Link(broker=f"{other:08x}", cost=1) for other in others),
            ),
        )
        for broker, others in links.items()
    ]
    lake.append("topology", spark.createDataFrame(pa.concat_tables(tables)), "land-1")
    return lake


def test_every_planted_fault_is_found_and_nothing_else(spark: SparkSession, tmp_path: Path) -> None:
    """P7, issue 5: lost, duplicated, reordered and late deliveries."""
    traffic = Traffic(3)
    traffic.plant()
    traffic.expected_reordered()
    assert {kind for kind, _, _ in traffic.planted} == {
        *("missing", "duplicated", "reordered", "late", "unwanted")
    }
    lake = lake_of(spark, tmp_path / "lake", traffic)
    found = audit(lake, SUBSCRIBED)
    assert {(row["kind"], row["subscriber"], row["id"]) for row in as_rows(found.faults)} == traffic.planted
    summary = {row["subscriber"]: row for row in as_rows(found.summary)}
    assert summary["never"]["due"] == summary["never"]["delivered"] == 0
    assert summary["dear"]["pending"] > 0
    assert summary["also-dear"]["redelivered"] == 1
    for kind in ("missing", "duplicated", "reordered", "late", "unwanted"):
        for name, row in summary.items():
            assert row[kind] == sum(one[:2] == (kind, name) for one in traffic.planted)
    everything = summary["all"]
    assert everything["due"] == everything["delivered"] + everything["missing"] + 1  # the gap
    assert 0 < everything["latency_us"][0] <= everything["latency_us"][2] <= everything["latency_max_us"]
    steps = as_rows(found.timeline)
    assert sum(step["deliveries"] for step in steps) == sum(row["delivered"] for row in summary.values())
    losses = as_rows(found.losses)
    for kind in LOSSES:
        assert sum(step[kind] for step in losses) == sum(row[kind] for row in summary.values())
    assert {(step["at"] - steps[0]["at"]) % steps[0]["step_us"] for step in losses} == {0}
    assert as_rows(found.unseen) == []
    flows = {(row["origin"], row["broker"]): row["count"] for row in as_rows(found.flows)}
    assert set(flows) == {(f"{origin:08x}", "00000004") for origin in (1, 2, 3)}

    write_report(tmp_path / "report.html", collect(lake, found, late_us=10_000_000))
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 6
    assert all(identity in page for _, _, identity in traffic.planted)
    assert all(name in page for name in (*summary, "b1", "b4", "99 %"))
    outside = re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)[^\"']+", page)
    assert outside == [], "the page needs nothing from elsewhere"


def test_without_faults_nothing_is_found(spark: SparkSession, tmp_path: Path) -> None:
    traffic = Traffic(9)
    traffic.expected_reordered()
    lake = lake_of(spark, tmp_path, traffic)
    found = audit(lake, SUBSCRIBED)
    natural = {(row["kind"], row["subscriber"], row["id"]) for row in as_rows(found.faults)}
    assert natural == traffic.planted == set()

    # Reports 2 and 3 of broker 4 could not be written, and landing was too late for 5 s of broker 2.
    report = DeliveryReport(1 << 16)
    report.acknowledged([("all", 1)], pubend_id(1, 0), 7, START_MS * 1000)
    (payload,) = report.take()
    lake.append(
        "deliveries", spark.createDataFrame(rows.deliveries(4, 4, decode_deliveries(payload))), "land-2"
    )
    report.gap([(f"{LANDING}-x", 0)], pubend_id(2, 0), START_MS, START_MS + 5_000_000, START_MS * 1000)
    (payload,) = report.take()
    lake.append(
        "deliveries", spark.createDataFrame(rows.deliveries(2, 0, decode_deliveries(payload))), "land-3"
    )
    unseen = as_rows(audit(lake, SUBSCRIBED).unseen)
    assert unseen == [
        {"broker": "00000002", "reports": 0, "spans": 1, "seconds": 5.0},
        {"broker": "00000004", "reports": 2, "spans": 0, "seconds": 0.0},
    ]
    text = unseen_text(unseen)
    assert "2 delivery reports and 1 spans of time of brokers 00000002, 00000004" in text


def test_subscriptions_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "subs"
    path.write_text('{"name": "a", "topic": "x/#", "where": "n > 1", "lag_s": 0.5}\n\n{"name": "b"}\n')
    assert [one.name for one in read_subscriptions(path)] == ["a", "b"]
    path.write_text('{"name": "a"}\n{"name": "b", "where": "n >"}\n')
    with pytest.raises(UsageError, match=r"line 2 of .* is no subscription"):
        read_subscriptions(path)
    path.write_text("")
    with pytest.raises(UsageError, match="0 subscriptions"):
        read_subscriptions(path)
    with pytest.raises(UsageError, match="subs --json"):
        read_subscriptions(tmp_path / "none")


def test_a_page_with_little_to_show(tmp_path: Path) -> None:
    """P7: nothing delivered yet, no links told; what is nearly whole is not called whole."""
    row = dict.fromkeys(("due", "delivered", "pending", *LOSSES), 0)
    nothing: dict[str, Any] = {"latency_us": None, "latency_max_us": None}
    summary = [{"subscriber": "<b>", "topic": "#", "where": "n < 3", **row, **nothing}]
    found = Findings(
        summary=summary,
        timeline=[],
        losses=[],
        faults=[],
        unseen=[],
        places={},
        flows={},
        storage=[("events", 0, 0, 0, 0)],
        late_us=1,
    )
    page = render(found)
    for text in (
        "No deliveries were reported",
        "No broker has told",
        "Nothing was lost",
        "None found",
        "100 %",
    ):
        assert text in page
    assert "&lt;b&gt;" in page
    summary[0] |= {"due": 10**8, "missing": 1, "delivered": 10**8 - 1, "latency_us": [1, 2, 3]}
    page = render(found)
    assert "99.9999 %" in page
    assert ">100 %<" not in page
    target = tmp_path / "page.html"
    target.mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        write_report(target, found)
    assert list(tmp_path.iterdir()) == [target]


def test_pubends_are_named_as_in_the_events() -> None:
    (row,) = rows.events([Traffic(1).events[0]]).to_pylist()
    assert row["pubend"] == pubend_text(Traffic(1).events[0][4])


def test_loads_follow_the_cheapest_paths() -> None:
    topology = {
        "1": Place("one", {"2": 1, "3": 5}),
        "2": Place("two", {"1": 1, "3": 1}),
        "3": Place("three", {"1": 5, "2": 1}),
    }
    flows = {("1", "3"): 10, ("2", "2"): 7, ("9", "3"): 1}
    assert link_loads(topology, flows) == {("1", "2"): 10, ("2", "3"): 10}
