"""What the attachment map and the log take is bounded; bounds cost width, never a silent gap (T4, T10)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from types import FrameType

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.tracking import HOUR_US, NOW_US, Disk, identity

from postroad.errors import BugError, PeerError, UsageError
from postroad.ids import MAX_NAME, MessageId, check_name
from postroad.seam.tracking import (
    NotKept,
    ReplaceAttachments,
    StoreAttachments,
    StoreFilter,
)
from postroad.storage.tracking_store import SPARE_BYTES
from postroad.tracking import record
from postroad.tracking.attachment import (
    LATE_ROUND_US,
    MAX_AHEAD,
    MAX_BYTES,
    MAX_HANDLED,
    MAX_LOST,
    NEIGHBOUR,
    SUBSCRIBER,
    AttachmentMap,
)
from postroad.tracking.attachment_log import Change, decode_changes
from postroad.tracking.groups import MAX_NAMES_BYTES, MAX_SEEN_MEMBERS, NAMED_BYTES, Groups, group_name, worth
from postroad.tracking.keys import LOG, HistoryKey
from postroad.tracking.moments import Times
from postroad.tracking.notes import HANDLED_US, MAX_LATE
from postroad.tracking.query.lookup import Reading
from postroad.tracking.query.messages import TraceItem, TraceQuestion
from postroad.tracking.record import MAX_BODY_BYTES, FilterMeta, decode_record
from postroad.tracking.recorder import EXPIRE_US
from postroad.tracking.settings import GATHER_US, MAX_PART_BYTES, TrackingConfig
from postroad.tracking.strategies import Tracking
from postroad.units import MILLISECOND_US, SECOND_US

# ---- publishers that bring any times

DAY_MS = 86_400_000


def wild_ids(now_us: int, publisher: int) -> bytes:
    """Ids of hundreds of times, the least gap between two being two months round now."""
    now_ms = now_us // MILLISECOND_US
    past = [now_ms - 30 * DAY_MS - at * 70 * DAY_MS for at in range(130)]
    coming = [now_ms + 30 * DAY_MS + at * 70 * DAY_MS for at in range(400)]
    times = [time_ms for time_ms in past + coming if time_ms > 0]
    return b"".join(bytes(MessageId(publisher, 1, time_ms, 0)) for time_ms in times)


def spread(disk: Disk, tracking: Tracking, seconds: int, every: int) -> tuple[list[bytes], list[bytes]]:
    """Two honest messages a second, and every so many seconds wild ones; returns some of both."""
    honest: list[bytes] = []
    wild: list[bytes] = []
    for second in range(seconds):
        now_us = NOW_US + second * SECOND_US
        for number in range(2):
            honest.append(identity(now_us, number))
            tracking.published(honest[-1], now_us)
            tracking.delivered(1, ("s",), honest[-1], now_us)
        if second % every == 0:
            ids = wild_ids(now_us, 1000 + second)
            tracking.published(ids, now_us)
            tracking.delivered(1, ("s",), ids, now_us)
            wild += [ids[:16], ids[-16:]]
        disk.keep(tracking.tick(now_us + SECOND_US // 2))
    return honest[:: len(honest) // 50], wild[:: len(wild) // 50 or 1]


@pytest.mark.parametrize("retain", [True, False])
def test_wild_times_do_not_come_between_honest_ones(retain: bool) -> None:
    """Theorem 1, T9: whatever times a publisher gives, filters of now match no more times than they did."""
    disk, config = Disk(), TrackingConfig(retain=retain)
    tracking = disk.start(NOW_US, config)
    tracking.attached("s", NOW_US)
    honest, wild = spread(disk, tracking, 600, 10)
    tracking.check()
    ranged = [meta for meta in disk.metas if meta.ranged]
    assert all(not meta.singles for meta in ranged)
    assert all(meta.hi_ms - meta.lo_ms < DAY_MS for meta in ranged)
    for one in honest:
        found = disk.find(tracking, one)
        assert found.published is not None
        assert found.published < 0.001
        assert [(got.subscriber, got.fpp < 0.001) for got in found.delivered] == [("s", True)]
    for one in wild:
        found = disk.find(tracking, one)
        assert found.published is not None
        assert [got.subscriber for got in found.delivered] == ["s"]
    strangers = [identity(NOW_US + at * SECOND_US, 7) for at in range(0, 600, 2)]
    assert sum(disk.find(tracking, one).published is not None for one in strangers) <= 3


@pytest.mark.parametrize("every", [3, 40, 150])
def test_filters_of_wild_times_are_few(every: int) -> None:
    """T9: However often they come, also with pauses in which a history is idle, they make one in `renew`."""
    disk, config = Disk(), TrackingConfig(renew_us=500 * SECOND_US)
    tracking = disk.start(NOW_US, config)
    tracking.attached("s", NOW_US)
    spread(disk, tracking, 900, every)
    late = [meta for meta in disk.metas if not meta.ranged]
    assert sorted(meta.key.kind for meta in late) == ["delivery", "delivery", "publish", "publish"]
    assert sum(meta.final for meta in late) == 2
    disk.keep(tracking.close(NOW_US + 900 * SECOND_US))
    assert tracking.metrics()["tracking_memory_bytes"] == 0


@pytest.mark.parametrize("late_us", [2 * SECOND_US, 30 * 86_400 * SECOND_US])
def test_who_lags_costs_no_more_than_others(late_us: int) -> None:
    """T9: Messages out of their time, but near each other: their filters end when full, and are no larger."""
    disk, config = Disk(), TrackingConfig()
    tracking = disk.start(NOW_US, config)
    written = 0
    for tenth in range(6000):
        now_us = NOW_US + tenth * SECOND_US // 10
        ids = b"".join(identity(now_us - late_us, 20 * (tenth % 100) + number) for number in range(20))
        tracking.routed(2, 3, ids, now_us)
        kept = tracking.tick(now_us + SECOND_US // 20)
        written += sum(len(one.record) for one in kept if isinstance(one, StoreFilter))
        disk.keep(kept)
    assert not any(meta.ranged for meta in disk.metas)
    assert written < 6000 * 20 * 8
    assert tracking.metrics()["tracking_memory_bytes"] < 100_000


def test_many_wild_times_take_no_more_memory_than_the_greatest_filter() -> None:
    """T9: A late filter that is full begins anew, with half the keys and all the bits of the greatest."""
    disk, config = Disk(), TrackingConfig(bits=160_000, capacity=10_000, least_capacity=16)
    tracking = disk.start(NOW_US, config)
    for second in range(100):
        now_us = NOW_US + second * SECOND_US
        tracking.published(wild_ids(now_us, 1000 + second), now_us)
        disk.keep(tracking.tick(now_us + SECOND_US // 2))
        assert tracking.metrics()["tracking_memory_bytes"] <= 2 * 160_000 // 8
    done = [meta for meta in disk.metas if meta.final]
    keys = 100 * len(wild_ids(NOW_US, 1)) // 16
    assert len(done) == keys // 5000
    assert all((meta.m, meta.count) == (160_000, 5000) for meta in done)


# ---- clocks that are ahead


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("ends", ["link", "stop", "crash"])
@pytest.mark.parametrize("ahead_us", [5 * SECOND_US, 2 * HOUR_US, 9000 * HOUR_US])
def test_a_link_is_asked_however_far_ahead_a_message_was(strategy: str, ends: str, ahead_us: int) -> None:
    """T10: by its publisher's clock, the message came hours after the link was down."""
    disk, config = Disk(), TrackingConfig(strategy=strategy)
    tracking = disk.start(NOW_US, config)
    tracking.linked(3, NOW_US)
    tracking.unlinked(3, NOW_US + SECOND_US)
    tracking.linked(2, NOW_US)
    ahead, now = identity(NOW_US + 30 * SECOND_US + ahead_us), identity(NOW_US + 60 * SECOND_US)
    tracking.published(ahead, NOW_US + 30 * SECOND_US)
    disk.keep(tracking.tick(NOW_US + 31 * SECOND_US))
    disk.keep(tracking.tick(NOW_US + 50 * SECOND_US))
    if ends == "link":
        tracking.unlinked(2, NOW_US + 50 * SECOND_US)
    else:
        disk.keep(tracking.close(NOW_US + 50 * SECOND_US) if ends == "stop" else [])
        tracking = disk.start(NOW_US + 51 * SECOND_US, config)
    tracking.linked(4, NOW_US + 55 * SECOND_US)
    tracking.check()
    assert disk.find(tracking, ahead).neighbours == (2, 4)
    assert disk.find(tracking, now).neighbours == (4,)
    after_us = NOW_US + ahead_us + 3 * HOUR_US
    held = AttachmentMap.of(decode_changes(b"".join(tracking.attachment_parts(after_us)))[0])
    assert held.since(NEIGHBOUR, (NOW_US + 30 * SECOND_US + ahead_us) // 1000, skew_us=0) == ["2", "4"]


def test_how_far_ahead_is_bounded_and_only_gets_wider() -> None:
    held, _ = AttachmentMap.restored((), last_stored_us=0, now_us=NOW_US)
    held.attached(NEIGHBOUR, "2", NOW_US)
    times_ms = [(NOW_US + hours * HOUR_US) // 1000 for hours in range(1, 2 * MAX_AHEAD)]
    for time_ms in times_ms:
        held.handled(time_ms, time_ms, NOW_US, SECOND_US)
    held.detached(NEIGHBOUR, "2", NOW_US + SECOND_US)
    assert len(list(held.leads())) == MAX_AHEAD
    assert all(held.since(NEIGHBOUR, time_ms, skew_us=0) == ["2"] for time_ms in times_ms)
    assert held.since(NEIGHBOUR, times_ms[-1] + 3_600_000, skew_us=0) == []


def test_a_setting_of_routing_counts_from_when_a_message_was_here() -> None:
    """It was passed on while nothing of that was recorded."""
    changes = [Change(what="start", at_us=NOW_US, kind="all")]
    held, _ = AttachmentMap.restored(changes, last_stored_us=0, now_us=NOW_US, routing="all")
    time_ms = (NOW_US + 2 * HOUR_US) // 1000
    held.handled(time_ms, time_ms, NOW_US + SECOND_US, SECOND_US)
    held, _ = AttachmentMap.restored(
        held.snapshot(NOW_US + SECOND_US), last_stored_us=0, now_us=NOW_US + HOUR_US, routing="set"
    )
    assert held.routings_since(time_ms, skew_us=0) == {"all", "set"}


# ---- crashes


def test_lost_times_are_joined_and_never_forgotten() -> None:
    changes: list[Change] = []
    lost: list[int] = []
    at_us = NOW_US
    random = Random(1)
    for _ in range(MAX_LOST + 100):
        held, news = AttachmentMap.restored(changes, last_stored_us=at_us - 5 * SECOND_US, now_us=at_us)
        news += held.recorded(at_us)
        changes = list(held.snapshot(at_us)) if random.random() < 0.1 else changes + news
        lost += [at_us // 1000 - 2000] if len(lost) or held.lost else []
        at_us += random.randrange(20, 60) * SECOND_US
    assert len(held.lost) <= MAX_LOST
    assert len(lost) > MAX_LOST
    assert all(held.lost_at(time_ms, skew_us=0) for time_ms in lost)
    assert held.unrecorded_us is not None
    assert held.unrecorded_us > at_us - 120 * SECOND_US


def test_what_a_disk_lost_is_joined_and_never_forgotten() -> None:
    held, _ = AttachmentMap.restored((), last_stored_us=0, now_us=NOW_US)
    times_us = [NOW_US + at * 200 * SECOND_US for at in range(MAX_LOST + 100)]
    for at_us in times_us:
        held.lose(at_us, at_us + SECOND_US, at_us)
    assert len(held.lost) == MAX_LOST
    assert all(held.lost_at(at_us // 1000 + 500, skew_us=0) for at_us in times_us)


def test_a_clock_set_back_after_a_crash_hides_no_loss() -> None:
    """Stored at 1050, died at 1060, and the next process begins at 1012."""
    held, log = AttachmentMap.restored((), last_stored_us=0, now_us=1000 * SECOND_US)
    log += held.attached(SUBSCRIBER, "ann", 1001 * SECOND_US)
    times = {"last_stored_us": 1040 * SECOND_US, "again_us": 10 * SECOND_US}
    held, news = AttachmentMap.restored(log, now_us=1012 * SECOND_US, **times)
    log += news
    assert [held.lost_at(at_s * 1000, skew_us=0) for at_s in (1005, 1039, 1045, 1060)] == [0, 0, 1, 1]
    assert held.at(SUBSCRIBER, 1030_000, skew_us=0) == ["ann"]
    assert held.unrecorded_us == 1012 * SECOND_US
    # It dies as well, before it stored anything: what is stored is of the process before it.
    held, _ = AttachmentMap.restored(log, now_us=1030 * SECOND_US, **{**times, "last_stored_us": 0})
    assert [held.lost_at(at_s * 1000, skew_us=0) for at_s in (1005, 1015, 1025, 1060)] == [0, 1, 1, 1]
    # Or after it stored something at a time that the one before it cannot have reached.
    held, _ = AttachmentMap.restored(
        log, last_stored_us=5000 * SECOND_US, again_us=times["again_us"], now_us=5010 * SECOND_US
    )
    assert [held.lost_at(at_s * 1000, skew_us=0) for at_s in (1015, 4990, 5005)] == [0, 0, 1]


@pytest.mark.parametrize("late_ms", [300, 900])
def test_a_crash_costs_the_last_minutes_however_long_messages_were_late(late_ms: int) -> None:
    """T4: also where every message comes later than the jitter allows, for half an hour."""
    disk = Disk()
    tracking = disk.start(NOW_US)
    now_us = NOW_US
    for number in range(30 * 60 * 5):
        now_us += SECOND_US // 5
        tracking.routed(2, 3, bytes(MessageId(7, 2, now_us // 1000 - late_ms, number & 0xFFFF)), now_us)
        disk.keep(tracking.tick(now_us + GATHER_US))
    held = disk.start(now_us + SECOND_US)
    assert not disk.find(held, identity(now_us - 200 * SECOND_US)).lost
    assert disk.find(held, identity(now_us - 2 * SECOND_US)).lost


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 400), st.integers(0, 3)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_what_was_handled_in_the_last_interval_is_lost(steps: list[tuple[int, int, int]]) -> None:
    """Whatever is joined and left out: said again after the interval, and in the log from then on."""
    again_us = 10 * SECOND_US
    held, log = AttachmentMap.restored((), last_stored_us=0, now_us=NOW_US)
    now_us = NOW_US
    met: list[tuple[int, int, int]] = []
    for later_s, minute, length in steps:
        now_us += later_s * SECOND_US
        lo_ms = (NOW_US // LATE_ROUND_US + minute - 200) * 60_000
        hi_ms = lo_ms + length * 60_000 + 59_999
        log += held.handled(lo_ms, hi_ms, now_us, again_us)
        met.append((lo_ms, hi_ms, now_us))
    stored_us = now_us - 30 * SECOND_US
    for changes in (log, held.snapshot(NOW_US)):
        died, _ = AttachmentMap.restored(
            changes, last_stored_us=stored_us, now_us=now_us + SECOND_US, again_us=again_us
        )
        for lo_ms, hi_ms, at_us in met:
            if at_us >= stored_us:
                assert all(died.lost_at(ms, skew_us=MILLISECOND_US) for ms in range(lo_ms, hi_ms, 60_000))
        old = [lo_ms for lo_ms, _, at_us in met if at_us < stored_us - again_us]
        new = [(lo, hi) for lo, hi, at_us in met if at_us >= stored_us - again_us]
        for lo_ms in old:
            if not any(lo - 120_000 <= lo_ms <= hi + 120_000 for lo, hi in new):
                assert (
                    not died.lost_at(lo_ms + 30_000, skew_us=MILLISECOND_US)
                    or lo_ms * 1000 > stored_us - LATE_ROUND_US
                )


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("rewritten", [True, False])
def test_a_clock_that_was_set_back_between_two_starts_hides_no_link(strategy: str, rewritten: bool) -> None:
    """T10: it was set at boot, after a clean stop. The last link then ended before the one that was used."""
    disk, config = Disk(), TrackingConfig(strategy=strategy)
    tracking = disk.start(NOW_US, config)
    tracking.linked(2, NOW_US)
    sent = identity(NOW_US + 80 * SECOND_US)
    tracking.published(sent, NOW_US + 80 * SECOND_US)
    disk.keep(tracking.close(NOW_US + 100 * SECOND_US))
    back_us = NOW_US + 40 * SECOND_US
    tracking = disk.start(back_us, config)
    tracking.linked(2, back_us)
    tracking.unlinked(2, back_us + SECOND_US)
    if rewritten:
        tracking.not_kept(NotKept(effects=(StoreAttachments(record=b""),)), back_us + 2 * SECOND_US)
    disk.keep(tracking.tick(back_us + 2 * SECOND_US))
    assert disk.find(tracking, sent).neighbours == (2,)
    again = disk.start(NOW_US + 500 * SECOND_US, config)
    assert disk.find(again, sent).neighbours == (2,)
    late = identity(NOW_US + 110 * SECOND_US)
    assert disk.find(again, late).neighbours == ()


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("rewritten", [True, False])
def test_a_clock_that_was_set_back_between_two_starts_hides_no_setting(rewritten: bool, killed: bool) -> None:
    """T6: where the message went was not recorded then, but is by the start that seems to be the earlier."""
    disk = Disk()
    tracking = disk.start(NOW_US, TrackingConfig(routing="all"))
    tracking.linked(2, NOW_US)
    sent = identity(NOW_US + 80 * SECOND_US)
    tracking.published(sent, NOW_US + 80 * SECOND_US)
    disk.keep(tracking.tick(NOW_US + 100 * SECOND_US) if killed else tracking.close(NOW_US + 100 * SECOND_US))
    back_us = NOW_US + 40 * SECOND_US
    config = TrackingConfig(routing="neighbours")
    tracking = disk.start(back_us, config)
    tracking.linked(2, back_us)
    if rewritten:
        tracking.not_kept(NotKept(effects=(StoreAttachments(record=b""),)), back_us + 2 * SECOND_US)
    disk.keep(tracking.tick(back_us + 2 * SECOND_US))
    later = identity(NOW_US + 200 * SECOND_US)
    tracking.published(later, NOW_US + 200 * SECOND_US)
    for made in (tracking, disk.start(NOW_US + 500 * SECOND_US, config)):
        found = disk.find(made, sent)
        assert (found.forwarded, found.neighbours) == (None, (2,))
    assert disk.find(tracking, later).forwarded == ()


def test_a_log_written_anew_knows_how_far_the_clock_had_come() -> None:
    """T6: the setting is changed at a third start, and the second, by a clock set back, wrote the log."""
    disk = Disk()
    tracking = disk.start(NOW_US, TrackingConfig(routing="all"))
    tracking.linked(2, NOW_US)
    sent = identity(NOW_US + 80 * SECOND_US)
    tracking.published(sent, NOW_US + 80 * SECOND_US)
    disk.keep(tracking.close(NOW_US + 100 * SECOND_US))
    back_us = NOW_US + 40 * SECOND_US
    for again_us in (back_us, back_us + 2 * SECOND_US):  # the one that is written anew is as good
        tracking = disk.start(again_us, TrackingConfig(routing="all"))
        tracking.not_kept(NotKept(effects=(StoreAttachments(record=b""),)), again_us)
        disk.keep(tracking.tick(again_us))
        disk.keep(tracking.close(again_us + SECOND_US))
    tracking = disk.start(back_us + 10 * SECOND_US, TrackingConfig(routing="neighbours"))
    tracking.linked(2, back_us + 10 * SECOND_US)
    found = disk.find(tracking, sent)
    assert (found.forwarded, found.neighbours) == (None, (2,))


def test_a_log_written_anew_does_not_say_that_all_is_stored() -> None:
    disk = Disk()
    tracking = disk.start(NOW_US)
    tracking.published(identity(NOW_US + 15 * SECOND_US), NOW_US + 15 * SECOND_US)
    not_kept = NotKept(effects=(StoreAttachments(record=b""),))
    tracking.not_kept(not_kept, NOW_US + 20 * SECOND_US)
    effects = tracking.tick(NOW_US + 20 * SECOND_US)
    assert [type(effect) for effect in effects if not isinstance(effect, StoreFilter)] == [ReplaceAttachments]
    disk.keep(effects)
    again = disk.start(NOW_US + 21 * SECOND_US)
    found = disk.find(again, identity(NOW_US + 15 * SECOND_US))
    assert found.published is None
    assert found.lost


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("spread", ["a day", "all there is", "ahead"])
def test_what_is_said_on_a_full_disk_is_bounded(strategy: str, spread: str) -> None:
    """T3.

    Whatever times messages have: a crash is then said to have cost more than it did, and nothing less.
    """
    random = Random(3)
    disk, config = Disk(), TrackingConfig(strategy=strategy)
    tracking = disk.start(NOW_US, config)
    before = len(disk.log)
    sent: list[bytes] = []
    now_us = NOW_US + 24 * HOUR_US
    for _ in range(1500):
        now_us += SECOND_US
        time_ms = {
            "a day": random.randrange(NOW_US, NOW_US + 24 * HOUR_US) // 1000,
            "all there is": random.randrange(NOW_US // 1000, 1 << 48),
            "ahead": now_us // 1000 + 3_600_000,
        }[spread]
        sent.append(bytes(MessageId(9, 1, time_ms, 0)))
        tracking.published(sent[-1], now_us)
        for later_us in (now_us, now_us + SECOND_US // 2):
            effects = tracking.tick(later_us)
            pressing = [one for one in effects if isinstance(one, StoreAttachments) and one.pressing]
            disk.keep(pressing)
            refused = tuple(one for one in effects if one not in pressing)
            if refused:
                tracking.not_kept(NotKept(effects=refused), later_us)
    assert len(disk.log) - before < SPARE_BYTES // 2
    tracking.check()
    died = disk.start(now_us + SECOND_US, config)
    assert all(disk.find(died, one).lost for one in sent)


def test_notes_of_what_is_handled_are_bounded() -> None:
    held, _ = AttachmentMap.restored((), last_stored_us=0, now_us=NOW_US)
    times_ms = [NOW_US // 1000 - at * 200_000 for at in range(1, MAX_HANDLED + 100)]
    for time_ms in times_ms:
        held.handled(time_ms, time_ms, NOW_US, SECOND_US)
    assert sum(one.what == "handled" for one in held.snapshot(NOW_US)) <= MAX_HANDLED
    died, _ = AttachmentMap.restored(held.snapshot(NOW_US), last_stored_us=0, now_us=NOW_US + SECOND_US)
    assert all(died.lost_at(time_ms, skew_us=MILLISECOND_US) for time_ms in times_ms)


# ---- notes of late deliveries


def test_absurd_times_of_some_do_not_push_out_the_history_of_others() -> None:
    """100 subscriptions get messages of 300 different times in the future."""
    disk = Disk()
    tracking = disk.start(NOW_US)
    names = [f"client-12345#0040{number:04x}.1" for number in range(100)]
    for name in ("ann", *names):
        tracking.attached(name, NOW_US)
    good = identity(NOW_US)
    tracking.published(good, NOW_US)
    tracking.delivered(1, ("ann",), good, NOW_US)
    now_us = NOW_US
    absurd: list[bytes] = []
    for number in range(300):
        now_us += SECOND_US // 5
        absurd.append(identity(NOW_US + 2 * HOUR_US + number * 180 * SECOND_US))
        tracking.published(absurd[-1], now_us)
        for name in names:
            tracking.delivered(1, (name,), absurd[-1], now_us)
        disk.keep(tracking.tick(now_us + GATHER_US))
    for _ in range(10):
        now_us += EXPIRE_US
        disk.keep(tracking.tick(now_us))
    tracking.check()
    assert tracking.metrics()["tracking_attachments"] <= 101 + MAX_LATE * 100
    found = disk.find(tracking, good)
    assert (found.forgotten, [one.subscriber for one in found.delivered]) == (False, ["ann"])
    assert len(disk.find(tracking, absurd[7]).delivered) == len(names)
    assert len(disk.log) < 8 << 20


def test_late_notes_of_many_are_joined_within_their_bound() -> None:
    held, _ = AttachmentMap.restored((), last_stored_us=0, now_us=NOW_US)
    names = [f"{number:0200}" for number in range(2000)]
    times_ms = [NOW_US // 1000 + at * 180_000 for at in range(40)]
    for name in names:
        held.attached(SUBSCRIBER, name, NOW_US)
        for time_ms in times_ms:
            held.late(SUBSCRIBER, name, time_ms, time_ms, NOW_US)
    assert len(held) == 41 * len(names)
    held.forget(0, NOW_US)
    assert len(held) <= 21 * len(names)
    assert not held.crowded
    assert all(held.at(SUBSCRIBER, time_ms, skew_us=0) == names for time_ms in times_ms)


def test_notes_of_the_future_are_forgotten_by_when_they_were_made() -> None:
    held, _ = AttachmentMap.restored((), last_stored_us=0, now_us=NOW_US)
    held.attached(SUBSCRIBER, "ann", NOW_US)
    year_ms = NOW_US // 1000 + 365 * 86_400_000
    assert held.late(SUBSCRIBER, "ann", year_ms, year_ms, NOW_US)
    assert not held.late(SUBSCRIBER, "ann", year_ms, year_ms, NOW_US + HANDLED_US // 2)
    assert held.late(SUBSCRIBER, "ann", year_ms, year_ms, NOW_US + 2 * HANDLED_US)
    held.detached(SUBSCRIBER, "ann", NOW_US + 3 * HANDLED_US)
    held = AttachmentMap.of(held.snapshot(NOW_US + 3 * HANDLED_US))
    held.forget(NOW_US + 2 * HANDLED_US, NOW_US + 3 * HANDLED_US)
    assert held.at(SUBSCRIBER, year_ms, skew_us=0) == ["ann"]
    held.forget(NOW_US + 4 * HANDLED_US, NOW_US + 5 * HANDLED_US)
    assert held.at(SUBSCRIBER, year_ms, skew_us=0) == []
    assert len(held) == 0


def test_a_crowded_map_forgets_the_older_half_and_then_rests() -> None:
    disk = Disk()
    tracking = disk.start(NOW_US)
    long = "x" * 250
    count = MAX_BYTES // 300
    for number in range(count):
        name = f"{long}{number}"
        at_us = NOW_US + number * 10 * MILLISECOND_US
        tracking.attached(name, at_us)
        tracking.detached(name, at_us)
    now_us = NOW_US + count * 10 * MILLISECOND_US
    for _ in range(5):
        now_us += EXPIRE_US
        disk.keep(tracking.tick(now_us))
    assert tracking.metrics()["tracking_attachments"] > count // 4
    assert disk.find(tracking, identity(NOW_US + 60 * SECOND_US)).forgotten
    assert not disk.find(tracking, identity(now_us - 60 * SECOND_US)).forgotten


def test_a_message_from_before_the_broker_costs_nobody_elses_history() -> None:
    """T10.

    A durable subscriber catches up with an event of an hour ago, at a broker that has just begun: who got
    it is known, and nothing else of that time is taken for forgotten."""
    disk = Disk()
    tracking = disk.start(NOW_US)
    now_us = NOW_US + 5 * SECOND_US
    old, other = identity(now_us - HOUR_US), identity(now_us - HOUR_US + SECOND_US)
    tracking.attached("dd", now_us)
    tracking.routed(2, 2, old, now_us)
    tracking.delivered(2, ("dd",), old, now_us)
    for _ in range(10):
        now_us += EXPIRE_US
        disk.keep(tracking.tick(now_us))
        assert [one.subscriber for one in disk.find(tracking, old, 2).delivered] == ["dd"]
        assert not disk.find(tracking, old, 2).forgotten
        assert not disk.find(tracking, other, 2).forgotten


def test_a_crowded_map_is_within_its_bound_however_old_the_broker_is() -> None:
    """T10: All of them came within the last hour of a month."""
    disk = Disk()
    tracking = disk.start(NOW_US)
    now_us = NOW_US + 29 * 24 * HOUR_US
    count = MAX_BYTES // 200
    for number in range(count):
        now_us += 40 * MILLISECOND_US
        name = f"{'x' * 250}{number}"
        tracking.attached(name, now_us)
        tracking.detached(name, now_us)
    now_us += EXPIRE_US
    disk.keep(tracking.tick(now_us))
    assert count // 4 < tracking.metrics()["tracking_attachments"] < MAX_BYTES // 250
    assert not disk.find(tracking, identity(now_us - 60 * SECOND_US)).forgotten


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("keep_us", [60 * SECOND_US, 30 * 24 * HOUR_US])
def test_who_got_a_message_is_known_as_long_as_a_filter_has_it(strategy: str, keep_us: int) -> None:
    """T10.

    A filter is kept by when it was stored for the last time: it has messages older than that by `renew`.
    Ann goes; Bob stays, and so does the filter. Once the map has forgotten her, that is said."""
    disk = Disk()
    tracking = disk.start(NOW_US, TrackingConfig(strategy=strategy, keep_us=keep_us))
    now_us = NOW_US + 5 * SECOND_US
    for who in ("ann", "bob"):
        tracking.attached(who, now_us)
    first = identity(now_us)
    tracking.published(first, now_us)
    tracking.delivered(1, ("ann", "bob"), first, now_us)
    now_us += 2 * SECOND_US
    disk.keep(tracking.tick(now_us))
    tracking.detached("ann", now_us)
    for later_us in range(30 * 60 * SECOND_US, 4 * HOUR_US, 30 * 60 * SECOND_US):
        for at_us in (now_us + keep_us + later_us - EXPIRE_US, now_us + keep_us + later_us):
            tracking.published(identity(at_us), at_us)
            tracking.delivered(1, ("bob",), identity(at_us), at_us)
            disk.keep(tracking.tick(at_us))
        found = disk.find(tracking, first)
        assert found.forgotten or {one.subscriber for one in found.delivered} == {"ann", "bob"}
    assert found.forgotten


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_a_question_and_retention_do_not_go_through_all_who_were_ever_here(strategy: str) -> None:
    def steps(count: int) -> list[int]:
        disk = Disk()
        tracking = disk.start(NOW_US, TrackingConfig(strategy=strategy))
        tracking.linked(2, NOW_US)
        now_us = NOW_US
        for number in range(count):
            now_us += MILLISECOND_US
            tracking.attached(f"client#{number}", now_us)
            tracking.delivered(1, (f"client#{number}",), identity(now_us - HOUR_US), now_us)
            tracking.detached(f"client#{number}", now_us)
            tracking.linked(3, now_us)
            tracking.unlinked(3, now_us)
        now_us += 60 * SECOND_US
        disk.keep(tracking.tick(now_us))
        tracking.published(identity(now_us), now_us)
        disk.keep(tracking.tick(now_us + GATHER_US))
        tracking.check()
        return [
            bytecodes(lambda: disk.find(tracking, identity(now_us))),
            bytecodes(lambda: tracking.tick(now_us + EXPIRE_US)),
            bytecodes(lambda: tracking.attached("ann", now_us + EXPIRE_US)),
            bytecodes(lambda: tracking.detached("ann", now_us + EXPIRE_US)),
            bytecodes(tracking.metrics),
        ]

    few, many = steps(40), steps(2000)
    assert all(two < 2 * one for one, two in zip(few, many, strict=True)), (few, many)


def bytecodes(work: Callable[[], object]) -> int:
    """How many of them that takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[[FrameType, str, object], object]:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


# ---- names of sets of receivers


def test_names_of_sets_that_change_all_the_time_take_little() -> None:
    """500 subscribers to a hot topic, of which one comes and one goes every two seconds."""
    disk = Disk()
    tracking = disk.start(NOW_US)
    names = [f"client-12345#0040{number:04x}.1" for number in range(500)]
    for name in names:
        tracking.attached(name, NOW_US)
    now_us = NOW_US
    changes = 600
    for number in range(changes):
        now_us += SECOND_US
        tracking.detached(names.pop(0), now_us)
        names.append(f"client-12345#0041{number:04x}.1")
        tracking.attached(names[-1], now_us)
        for counter in range(3):
            now_us += SECOND_US // 3
            message = identity(now_us, counter)
            tracking.published(message, now_us)
            tracking.delivered(1, tuple(names), message, now_us)
            disk.keep(tracking.tick(now_us))
    tracking.check()
    held = AttachmentMap.of(disk.changes)
    assert held.group_bytes <= 2 * NAMED_BYTES
    assert disk.written < 8 * NAMED_BYTES
    assert {one.subscriber for one in disk.find(tracking, message).delivered} >= set(names)


def test_a_set_that_lasts_is_named_however_many_names_there_are() -> None:
    assert [worth(count * NAMED_BYTES) for count in (0, 1, 2, 16)] == [2, 4, 8, 131_072]
    groups = Groups()
    members = tuple(map(str, range(10)))
    assert [groups.meet(members, 8)[0] for _ in range(8)] == [False] * 7 + [True]


def test_names_in_use_and_sets_seen_are_bounded() -> None:
    groups = Groups()
    sets = [tuple(f"{first}.{number:0200}" for number in range(4000)) for first in range(8)]
    ended = [one for members in sets for one in groups.meet(members, 1)[1]]
    assert ended == sets[: len(ended)]
    assert sum(len(group_name(members)) for members in groups.members()) <= MAX_NAMES_BYTES
    for first in range(2 * MAX_SEEN_MEMBERS // 1000):
        groups.meet((str(first),) * 1000)
    assert groups._members <= MAX_SEEN_MEMBERS
    assert groups._members == sum(map(len, groups._seen))


# ---- long names


def test_names_have_so_many_bytes() -> None:
    check_name("\N{GRINNING FACE}" * (MAX_NAME // 4))
    with pytest.raises(PeerError, match=f"1 to {MAX_NAME} bytes"):
        check_name("\N{GRINNING FACE}" * (MAX_NAME // 4 + 1))


@pytest.mark.parametrize("origins", [1, 3])
def test_more_receivers_than_histories_do_not_end_each_others_filters(origins: int) -> None:
    """T4.

    Each would have a message or two: the disk would be full of them, and a trace have too many to read.
    """
    disk = Disk()
    config = TrackingConfig(deliveries="subscriber", max_histories=40)
    tracking = disk.start(NOW_US, config)
    names = tuple(f"s{number}" for number in range(60 // origins))
    now_us = NOW_US
    for name in names:
        tracking.attached(name, now_us)
    ids: dict[bytes, int] = {}
    for number in range(300):
        now_us += SECOND_US // 5
        origin = 1 + number % origins
        ids[identity(now_us, number)] = origin
        tracking.routed(origin, 9, identity(now_us, number), now_us)
        tracking.delivered(origin, names, identity(now_us, number), now_us)
        disk.keep(tracking.tick(now_us))
    assert tracking.metrics()["tracking_stored_filters_total"] < 60 * 300 / 20
    for one, origin in ids.items():
        found = disk.find(tracking, one, origin)
        assert {one.subscriber for one in found.delivered} == set(names)
        assert not found.lost


def test_wild_times_cost_an_exact_log_no_notes_of_receivers() -> None:
    """T11: it names them itself."""
    disk = Disk()
    tracking = disk.start(NOW_US, TrackingConfig(strategy="exact"))
    names = tuple(f"s{number}" for number in range(500))
    for name in names:
        tracking.attached(name, NOW_US)
    disk.keep(tracking.tick(NOW_US))
    told = len(disk.changes)
    wild = identity(NOW_US - 9000 * HOUR_US)
    tracking.published(wild, NOW_US + SECOND_US)
    tracking.delivered(1, names, wild, NOW_US + SECOND_US)
    for name in names:
        tracking.detached(name, NOW_US + 2 * SECOND_US)
    disk.keep(tracking.tick(NOW_US + 60 * SECOND_US))
    assert len(disk.changes) < told + len(names) + 10
    assert {one.subscriber for one in disk.find(tracking, wild).delivered} == set(names)


def test_the_log_is_split_by_the_bytes_of_names() -> None:
    """T11: the longest names there are, and longer ones."""
    disk = Disk()
    tracking = disk.start(NOW_US, TrackingConfig(strategy="exact"))
    names = [
        f"{number:05}" + "\N{GRINNING FACE}" * length for length in (250, 5000) for number in range(1000)
    ]
    for name in names:
        tracking.attached(name, NOW_US)
    message = identity(NOW_US)
    tracking.published(message, NOW_US)
    tracking.delivered(1, names, message, NOW_US)
    disk.keep(tracking.tick(NOW_US + 60 * SECOND_US))
    tracking.check()
    told = {
        meta.names[int.from_bytes(body[at + 16 : at + 20], "little")].split(" ", 2)[2]
        for meta, body in map(decode_record, disk.records.values())
        for at in range(0, len(body), 20)
    }
    assert told == {"", *names}


@pytest.mark.parametrize(("subscribers", "messages"), [(2000, 40), (3, 3000)])
def test_the_log_is_split_however_much_comes_at_once(subscribers: int, messages: int) -> None:
    """T11. Found: a batch to thousands was one part, a thousand times `log_bytes`, and from 512 MiB on none
    that can be read."""
    config = TrackingConfig(strategy="exact", log_bytes=10_000)
    disk = Disk()
    tracking = disk.start(NOW_US, config)
    names = [f"reader-{number}" for number in range(subscribers)]
    for name in names:
        tracking.attached(name, NOW_US)
    ids = [identity(NOW_US, number) for number in range(messages)]
    tracking.published(b"".join(ids), NOW_US)
    tracking.delivered(1, names, b"".join(ids), NOW_US)
    disk.keep(tracking.tick(NOW_US + 60 * SECOND_US))
    tracking.check()
    told = [
        (body[at : at + 16], meta.names[int.from_bytes(body[at + 16 : at + 20], "little")])
        for meta, body in map(decode_record, disk.records.values())
        for at in range(0, len(body), 20)
    ]
    happened = ["published 1 ", *(f"delivered 1 {name}" for name in names)]
    assert sorted(told) == sorted((one, what) for one in ids for what in happened)
    assert max(meta.count for meta in disk.metas) * 20 < 2 * config.log_bytes


def test_times_of_a_late_batch_are_gone_through_once_however_many_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T11. Found: every part of the log did so again, 5 s for 16,384 messages to 200."""
    tracking = Disk().start(NOW_US, TrackingConfig(strategy="exact", log_bytes=1000))
    names = [f"reader-{number}" for number in range(200)]
    for name in names:
        tracking.attached(name, NOW_US)
    gone_through = 0
    all_ms = Times.all_ms

    def counted(times: Times) -> npt.NDArray[np.int64]:
        nonlocal gone_through
        gone_through += 1
        return all_ms(times)

    monkeypatch.setattr(Times, "all_ms", counted)
    late = b"".join(identity(NOW_US - HOUR_US - 7 * number * SECOND_US, number) for number in range(100))
    tracking.delivered(1, names, late, NOW_US)
    assert tracking.metrics()["tracking_stored_filters_total"] > 100
    assert gone_through < 5


def test_what_a_part_of_the_log_takes_to_look_into_it_counts_with_its_names() -> None:
    """T11."""
    disk = Disk()
    tracking = disk.start(NOW_US, TrackingConfig(strategy="exact", cache_bytes=0))
    names = [f"{number:0200}" for number in range(100)]
    for name in names:
        tracking.attached(name, NOW_US)
    tracking.published(identity(NOW_US), NOW_US)
    tracking.delivered(1, names, identity(NOW_US), NOW_US)
    disk.keep(tracking.tick(NOW_US + 60 * SECOND_US))
    reading = Reading()
    question = TraceQuestion(items=(TraceItem(id=identity(NOW_US), origin=1),))
    assert tracking.answer(question, {}, reading)[1]
    assert reading.sizes == {sequence: len(record) for sequence, record in disk.records.items()}
    assert len(disk.find(tracking, identity(NOW_US)).delivered) == 100


def test_a_part_of_the_log_can_always_be_read() -> None:
    with pytest.raises(UsageError, match=r"log_bytes is at most 16777216 \(16 MiB\), not 16777217"):
        TrackingConfig(log_bytes=MAX_PART_BYTES + 1)
    assert 2 * MAX_PART_BYTES < MAX_BODY_BYTES


def test_a_record_that_nobody_could_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_BODY_BYTES", 100)
    meta = FilterMeta(key=HistoryKey(LOG), sequence=1, m=0, n=0, k=0, count=6, lo_ms=1, hi_ms=0)
    with pytest.raises(BugError, match="120 bytes in one stored filter"):
        record.encode_record(meta, bytes(120))
