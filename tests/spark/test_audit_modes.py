"""P7, P8: the audit of queues and best effort finds every fault that was planted, and nothing else."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from postroad.client.repair.settings import RepairSettings
from postroad.errors import PeerError
from postroad.history.bulletins import (
    BestEffort,
    LinkCount,
    RepairCount,
    decode_best_effort,
    decode_queue_events,
)
from postroad.ids import first_number, queue_message_id, session_from
from postroad.seam.reports import QueueEvents
from postroad.spark.audit import as_rows, audit, landed_subscriptions
from postroad.spark.lake import rows
from postroad.spark.lake.tables import Lake
from postroad.spark.plan_repair import Losses, observe_losses, propose_repair, repair_toml
from postroad.spark.report import audited_modes, collect, render

START_MS = 1_800_000_000_000
START_US = START_MS * 1_000
SESSION = session_from(b"abcdef")
SECOND = 1_000_000


def identity(number: int) -> bytes:
    return queue_message_id(SESSION, first_number(START_MS) + number)


def text(number: int) -> str:
    return str(rows.MessageId.from_bytes(identity(number)))


def kept(inbox: str, *numbers: int, form: str = "transactional", expires_us: int = 0) -> QueueEvents:
    ids = b"".join(map(identity, numbers))
    return QueueEvents("kept", inbox, "shop", form, START_US + 1_000, ids, expires_us)


def settled(what: str, inbox: str, who: str, after_us: int, number: int) -> QueueEvents:
    return QueueEvents(what, inbox, who, "", START_US + after_us, identity(number))


def queue_lake(lake: Lake) -> None:
    sent = [
        kept("stock", 0, 1, 2, 3, 4, 5, 6),
        kept("stock", 7, expires_us=START_US + 2 * SECOND),  # expires, and nobody took it
        kept("mail", 8, 9, form="recoverable"),
    ]
    got = [
        settled("accepted", "stock", "c1", 50_000, 0),
        settled("accepted", "stock", "c1", 60_000, 2),
        settled("accepted", "stock", "c1", 70_000, 1),  # after a later one
        settled("again", "stock", "c1", 80_000, 4),
        settled("accepted", "stock", "c1", 20 * SECOND, 4),  # late, and 3 is missing
        settled("accepted", "stock", "c1", 20 * SECOND, 4),  # the same one hears it again: no fault
        settled("accepted", "stock", "c2", 21 * SECOND, 2),  # taken twice
        settled("dead", "stock", "c1", 22 * SECOND, 5),
        settled("accepted", "mail", "m1", 40_000, 9),  # without an order, 8 may come yet
    ]
    lake.append(
        "queue_events", pa.concat_tables([rows.queue_events(1, 1, sent), rows.queue_events(2, 1, got)])
    )


def best_effort_lake(lake: Lake) -> None:
    def told(boot: int, at_us: int, *links: tuple[str, int, int]) -> BestEffort:
        counts = tuple(LinkCount(neighbour=to, sent=sent, received=came) for to, sent, came in links)
        return BestEffort(boot=boot, at_us=at_us, links=counts)

    one, two = "00000001", "00000002"
    links = [
        rows.best_effort_links(1, 1, told(1, START_US, (one, 500, 0), (two, 400, 0))),
        rows.best_effort_links(1, 2, told(1, START_US + SECOND, (one, 1_000, 0), (two, 800, 3))),
        rows.best_effort_links(1, 3, told(2, START_US + 2 * SECOND, (one, 100, 0), (two, 200, 0))),  # anew
        rows.best_effort_links(2, 1, told(1, START_US + 2 * SECOND, (one, 4, 990))),
    ]
    lake.append("best_effort_links", pa.concat_tables(links))

    def said(received: int, detected: int, recovered: int, at_us: int) -> BestEffort:
        count = RepairCount(
            subscriber="reader#00000001.1",
            received=received,
            detected=detected,
            requests=recovered,
            recovered=recovered,
            given_up=detected - recovered,
            duplicates=2,
            slowest_us=2 * SECOND,
        )
        return BestEffort(boot=1, at_us=at_us, receivers=(count,))

    states = [said(50, 0, 0, START_US), said(198, 22, 11, START_US + 10 * SECOND)]
    tables = [rows.repairs(2, at, state) for at, state in enumerate(states, 1)]
    lake.append("repairs", pa.concat_tables(tables))


def test_every_planted_fault_of_queues_and_links_is_found(spark: SparkSession, tmp_path: Path) -> None:
    """P7."""
    lake = Lake(spark, tmp_path / "lake")
    queue_lake(lake)
    best_effort_lake(lake)
    assert landed_subscriptions(lake) == []  # and yet there is something to audit
    found = audit(lake, [], late_us=10 * SECOND)
    faults = {(row["kind"], row["inbox"], row["id"]) for row in as_rows(found.queues.faults)}
    assert faults == {
        ("missing", "stock", text(3)),
        ("reordered", "stock", text(1)),
        ("late", "stock", text(4)),
        ("duplicated", "stock", text(2)),
    }
    mail, stock = as_rows(found.queues.inboxes)
    assert (mail["inbox"], mail["kept"], mail["accepted"], mail["pending"]) == ("mail", 2, 1, 1)
    counts = ("kept", "accepted", "rejected", "dead", "pending", "expired")
    assert [stock[name] for name in counts] == [8, 4, 1, 1, 1, 1]
    assert [stock[kind] for kind in ("missing", "duplicated", "reordered", "late")] == [1, 1, 1, 1]
    assert stock["latency_max_us"] == 20 * SECOND

    back, there = as_rows(found.best_effort.links)
    assert (there["sent"], there["received"], there["lost"], there["loss"]) == (1_000, 990, 10, 0.01)
    assert (back["source"], back["sent"], back["received"], back["lost"]) == ("00000002", 4, 3, 1)
    (receiver,) = as_rows(found.best_effort.receivers)
    assert (receiver["detected"], receiver["recovered"], receiver["repaired"]) == (22, 11, 0.5)

    findings = collect(lake, found, late_us=10 * SECOND)
    page = render(findings)
    told = (text(3), "2 inboxes, 4 faults", "50 % of 22 losses", "10 of 1,000")
    assert [words for words in told if words not in page] == []
    said = audited_modes(findings.inboxes, findings.best_effort, findings.repairs)
    assert "5 accepted of 10 kept, 4 faults" in said
    assert "11 of 22 losses repaired" in said

    losses = observe_losses(lake)
    assert losses is not None
    assert (losses.published, losses.loss, losses.match) == (1_100, 0.1, 0.2)
    assert losses.needs == (198 * 2 / 10,)


def test_a_lake_without_best_effort_has_no_plan_for_it(spark: SparkSession, tmp_path: Path) -> None:
    assert observe_losses(Lake(spark, tmp_path / "lake")) is None


def plan_of(loss: float, match: float, *needs: float) -> tuple[Losses, RepairSettings, str]:
    losses = Losses(
        published=1_000,
        link_loss=loss,
        receivers=len(needs),
        loss=loss,
        match=match,
        detected=10,
        recovered=9,
        needs=needs,
    )
    proposal = propose_repair(losses)
    settings = tomllib.loads(repair_toml(proposal))["repair"]
    return losses, RepairSettings(**settings), repair_toml(proposal)


def test_record_and_cache_are_proposed_from_what_was_lost() -> None:
    """P8, B8, B11: what is proposed are settings, each with its reason."""
    _, settings, why = plan_of(0.01, 0.2, 39.6, 120.0)
    # Equation 1: the least R with 1 - (1 - 0.2 + 0.2 * 0.01)^R >= 0.99.
    assert (settings.record, settings.cache_min, settings.cache_max) == (21, 40, 180)
    assert 1 - (1 - 0.2 + 0.002) ** 21 >= 0.99 > 1 - (1 - 0.2 + 0.002) ** 20
    assert "39.6 messages" in why
    assert "99" in why

    _, settings, why = plan_of(0.01, 0.001, 0.2)
    assert (settings.record, settings.cache_min, settings.cache_max) == (64, 1, 5)  # no record is enough
    assert "finds 6." in why

    _, settings, why = plan_of(0.0, 0.5)
    assert (settings.record, settings.cache_min) == (0, 1)
    assert "Nothing was lost" in why


def test_what_cannot_be_read_is_no_report() -> None:
    """P4."""
    for payload in (b"", b"\xc1", b"\x91\x97\xa4kept\xa1i\xa1s\xa0\x01\xc4\x01a\x00"):
        with pytest.raises(PeerError, match="report of queues"):
            decode_queue_events(payload)
    with pytest.raises(PeerError, match="report of best effort"):
        decode_best_effort(b"{}")
