"""Durable traffic as the lake has it, and what an audit must say of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from postroad.history.bulletins import DeliveryReport, Link, Links, decode_deliveries
from postroad.ids import MessageId, pubend_id
from postroad.selectors import Selector
from postroad.spark.audit import Subscribed
from postroad.spark.lake import rows
from postroad.spark.lake.tables import Lake

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
    lake.append("events", rows.events(traffic.events))
    lake.append("deliveries", traffic.delivery_rows())
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
    lake.append("topology", pa.concat_tables(tables))
    return lake
