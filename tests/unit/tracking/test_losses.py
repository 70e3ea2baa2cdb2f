"""What is lost stays said for as long as it would have been kept, whatever its times and the clock (T4)."""

from __future__ import annotations

import struct
from random import Random

import google_crc32c
import msgspec
import pytest
from tests.worlds.tracking import HOUR_US, NOW_US, Disk, identity

from postroad.ids import MessageId
from postroad.seam.tracking import NotKept, StoreAttachments, StoreFilter, TrackingEffect
from postroad.tracking.attachment import LATE_ROUND_US, LOST_US, MAX_LOST, AttachmentMap
from postroad.tracking.attachment_log import DISK, Change, decode_changes
from postroad.tracking.recorder import EXPIRE_US
from postroad.tracking.settings import PUT_OFF_US, TrackingConfig
from postroad.tracking.strategies import Tracking
from postroad.units import MILLISECOND_US, SECOND_US

DAY_US = 24 * HOUR_US


def lasts(disk: Disk, tracking: Tracking, now_us: int, for_us: int, step_us: int = SECOND_US) -> int:
    """The broker has nothing to do but to look after what it has; returns the time then."""
    for at_us in range(now_us + step_us, now_us + for_us + 1, step_us):
        disk.keep(tracking.tick(at_us))
    return now_us + for_us


# ---- times of before the first start


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("how", ["killed", "refused"])
def test_a_loss_of_times_before_the_first_start_is_not_forgotten(strategy: str, how: str) -> None:
    """T4.

    A broker joins, a durable subscriber catches up there with an event of an hour ago, and that is lost:
    by kill -9, or as the disk did not take it."""
    disk, config = Disk(), TrackingConfig(strategy=strategy)
    tracking = disk.start(NOW_US, config)
    now_us = NOW_US + 60 * SECOND_US
    old, other = identity(now_us - HOUR_US), identity(now_us - HOUR_US // 2)
    tracking.attached("dd", now_us)
    tracking.routed(2, 2, old, now_us)
    tracking.delivered(2, ("dd",), old, now_us)
    if how == "killed":
        disk.keep(tracking.tick(now_us + SECOND_US))
        tracking = disk.start(now_us + 2 * SECOND_US, config)
    else:
        tracking.not_kept(NotKept(effects=refused(disk, tracking, now_us, 30 * SECOND_US)), now_us)
        tracking.attached("ee", now_us + 31 * SECOND_US)
    for _ in range(3):
        now_us = lasts(disk, tracking, now_us, 4 * EXPIRE_US)
        assert disk.find(tracking, old, 2).lost
        assert not disk.find(tracking, other, 2).lost
        assert not disk.find(tracking, old, 2).forgotten
    tracking._rewrite_map()
    disk.keep(tracking.tick(now_us))
    tracking = disk.start(now_us + SECOND_US, config)
    assert disk.find(tracking, old, 2).lost, "nor by a log that is written anew"


def refused(disk: Disk, tracking: Tracking, now_us: int, for_us: int) -> tuple[TrackingEffect, ...]:
    """What a disk does not take that has room for what is pressing."""
    found: list[TrackingEffect] = []
    for at_us in range(now_us, now_us + for_us, SECOND_US):
        for effect in tracking.tick(at_us):
            if isinstance(effect, StoreAttachments) and effect.pressing:
                disk.keep([effect])
            else:
                found.append(effect)
    return tuple(found)


def test_a_loss_is_forgotten_by_when_it_was_noted() -> None:
    held, _ = AttachmentMap.restored((), last_stored_us=0, now_us=NOW_US)
    old_us = NOW_US - 40 * DAY_US
    held.lose(old_us, old_us + SECOND_US, NOW_US)
    assert not held.lose(old_us, old_us + SECOND_US, NOW_US + LOST_US), "one that is said is not said again"
    assert held.lose(old_us, old_us + SECOND_US, NOW_US + 2 * LOST_US), "unless it would be forgotten before"
    held = AttachmentMap.of(held.snapshot(NOW_US))
    held.forget(NOW_US + 3 * LOST_US, NOW_US + 4 * LOST_US)
    assert held.lost == [(old_us, old_us + SECOND_US)]
    held.forget(NOW_US + 3 * LOST_US + 1, NOW_US + 4 * LOST_US)
    assert held.lost == []


def test_a_loss_in_a_log_that_does_not_say_when() -> None:
    """It was noted after what is before it in the log."""
    changes = [
        Change(what="start", at_us=NOW_US),
        Change(what="lost", kind=DISK, at_us=SECOND_US, until_us=2 * SECOND_US),
    ]
    held = AttachmentMap.of(changes)
    held.forget(NOW_US, NOW_US + LOST_US)
    assert held.lost == [(SECOND_US, 2 * SECOND_US)]


def test_losses_of_many_days_stay_apart_within_their_bound() -> None:
    """Those of one day that touch are one, whatever was noted of the same times before."""
    held, _ = AttachmentMap.restored((), last_stored_us=0, now_us=NOW_US)
    for day in range(10):
        now_us = NOW_US + 2 * day * DAY_US
        for at_us in range(now_us, now_us + HOUR_US, 10 * SECOND_US):
            held.lose(at_us - 10 * SECOND_US, at_us, at_us)
        held.lose(0, HOUR_US, now_us)
    assert len(held.lost) == 11
    for number in range(2 * MAX_LOST):
        at_us = number * HOUR_US
        held.lose(at_us, at_us + SECOND_US, NOW_US + number * SECOND_US)
        assert len(held.lost) <= MAX_LOST
    assert all(held.lost_at(number * 3_600_000, skew_us=SECOND_US) for number in range(2 * MAX_LOST))


# ---- clocks that were ahead


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("ending", ["stopped", "killed"])
def test_a_first_start_with_a_clock_ahead_hides_nobody(strategy: str, ending: str) -> None:
    """T10.

    It is put right with a restart: from then on nothing is forgotten, and nothing is before history.
    """
    disk, config = Disk(), TrackingConfig(strategy=strategy)
    tracking = disk.start(NOW_US + HOUR_US, config)
    lasts(disk, tracking, NOW_US + HOUR_US, 60 * SECOND_US)
    if ending == "stopped":
        disk.keep(tracking.close(NOW_US + HOUR_US + 60 * SECOND_US))
    tracking = disk.start(NOW_US, config)
    now_us = NOW_US + 20 * SECOND_US
    tracking.attached("ann", now_us)
    tracking.linked(2, now_us)
    sent = identity(now_us)
    tracking.published(sent, now_us)
    tracking.delivered(1, ("ann",), sent, now_us)
    now_us += 5 * SECOND_US
    tracking.detached("ann", now_us)
    tracking.unlinked(2, now_us)
    now_us = lasts(disk, tracking, now_us, 60 * SECOND_US)
    for _ in range(2):
        found = disk.find(tracking, sent)
        assert [one.subscriber for one in found.delivered] == ["ann"]
        assert found.neighbours == (2,)
        assert not found.lost
        assert not found.forgotten
        assert found.begins_ms == NOW_US // 1000
        tracking._rewrite_map()
        disk.keep(tracking.close(now_us))
        tracking = disk.start(now_us + SECOND_US, config)


def test_what_retention_drops_of_a_clock_that_was_ahead_is_no_horizon_for_now() -> None:
    """Filters of an hour later go: their times are lost, and those until then are not forgotten."""
    disk, config = Disk(), TrackingConfig()
    tracking = disk.start(NOW_US + HOUR_US, config)
    later = identity(NOW_US + HOUR_US + 5 * SECOND_US)
    tracking.published(later, NOW_US + HOUR_US + 5 * SECOND_US)
    disk.keep(tracking.close(NOW_US + HOUR_US + 30 * SECOND_US))
    tracking = disk.start(NOW_US, TrackingConfig(keep_bytes=1))
    lasts(disk, tracking, NOW_US, 2 * EXPIRE_US)
    assert disk.find(tracking, later).published is None
    assert disk.find(tracking, later).lost
    for at_us in (NOW_US + SECOND_US, NOW_US + HOUR_US // 2):
        assert not disk.find(tracking, identity(at_us)).lost
        assert not disk.find(tracking, identity(at_us)).forgotten


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("back_us", [20 * SECOND_US, HOUR_US])
@pytest.mark.parametrize("ending", ["stopped", "killed", "rewritten"])
def test_what_a_process_before_stored_does_not_hide_what_this_one_lost(
    strategy: str, back_us: int, ending: str
) -> None:
    """T4: The clock is set back between them, and what was stored before is of a later time."""
    disk, config = Disk(), TrackingConfig(strategy=strategy)
    tracking = disk.start(NOW_US, config)
    now_us = NOW_US
    for second in range(2 * 3600):
        now_us += SECOND_US
        if second % 5 == 0 and second < 7100:  # then it settles
            tracking.published(identity(now_us), now_us)
        disk.keep(tracking.tick(now_us))
    ended_us = now_us
    if ending != "killed":
        disk.keep(tracking.close(now_us))
    now_us -= back_us
    tracking = disk.start(now_us, config)
    if ending == "rewritten":
        tracking._rewrite_map()
    sent: list[bytes] = []
    for _ in range(60):
        now_us += SECOND_US
        sent.append(identity(now_us, 7))
        tracking.published(sent[-1], now_us)
        disk.keep(tracking.tick(now_us))
    tracking = disk.start(now_us + SECOND_US, config)
    found = [disk.find(tracking, one) for one in sent]
    assert all(one.published is not None or one.lost for one in found)
    assert not found[-1].published
    if ending == "stopped" and back_us == HOUR_US:
        assert not any(one.lost for one in found[:30]), "and no more than in any crash"
        after = [now_us + 10 * SECOND_US, ended_us - 60 * SECOND_US, ended_us + 60 * SECOND_US]
        assert not any(disk.find(tracking, identity(at_us)).lost for at_us in after)


def test_what_was_handled_late_and_stored_is_not_lost_with_a_later_process() -> None:
    """Also where the clock was set back after a stop in good order."""
    disk = Disk()
    tracking = disk.start(NOW_US)
    old = identity(NOW_US - DAY_US)
    tracking.published(old, NOW_US + SECOND_US)
    lasts(disk, tracking, NOW_US + SECOND_US, 5 * SECOND_US)
    disk.keep(tracking.close(NOW_US + 10 * SECOND_US))
    disk.start(NOW_US - HOUR_US)
    tracking = disk.start(NOW_US - HOUR_US + SECOND_US)
    assert disk.find(tracking, old).published is not None
    assert not disk.find(tracking, old).lost


def test_a_log_that_does_not_say_what_was_stored_before_a_start_is_read() -> None:
    """Then all that is stored counts, as it did."""
    body = msgspec.msgpack.encode(["start", NOW_US, "all", "", 0, 0, None])
    held = decode_changes(struct.pack("<II", len(body), google_crc32c.value(body)) + body)[0]
    assert held == [Change(what="start", at_us=NOW_US, kind="all")]


# ---- a catch-up with little of a long time


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_a_crash_while_somebody_catches_up_costs_no_more_than_those_minutes(strategy: str) -> None:
    """Twenty events of twenty days: what was stored of the times between them stays whole."""
    disk, config = Disk(), TrackingConfig(strategy=strategy)
    tracking = disk.start(NOW_US, config)
    sent: list[bytes] = []
    now_us = NOW_US
    for _ in range(20 * 24):
        now_us += HOUR_US
        sent.append(identity(now_us))
        tracking.published(sent[-1], now_us)
        lasts(disk, tracking, now_us, 30 * SECOND_US, 10 * SECOND_US)
    now_us += HOUR_US
    tracking.attached("dd", now_us)
    late = [identity(NOW_US + day * DAY_US + HOUR_US // 2) for day in range(20)]
    tracking.routed(2, 2, b"".join(late), now_us)
    tracking.delivered(2, ("dd",), b"".join(late), now_us)
    disk.keep(tracking.tick(now_us + SECOND_US // 5))
    tracking = disk.start(now_us + SECOND_US, config)
    assert all(disk.find(tracking, one, 2).lost for one in late)
    assert [disk.find(tracking, one).lost for one in sent] == [""] * len(sent)


# ---- a full disk and times that make no sense


@pytest.mark.parametrize("wild", [True, False])
def test_a_full_disk_does_not_cost_times_to_come_for_ever(wild: bool) -> None:
    """Notes become so coarse that they reach into the future: where all was past not far, and else not for
    longer than anything is kept."""
    random = Random(1)
    disk, config = Disk(), TrackingConfig()
    tracking = disk.start(NOW_US, config)
    now_us = NOW_US
    sent: list[bytes] = []
    for number in range(1800):
        now_us += SECOND_US // 2
        time_ms = random.randrange(1 << 48) if wild else now_us // 1000 - random.randrange(7 * 86_400_000)
        sent.append(bytes(MessageId(9, 1, time_ms, number)))
        tracking.published(sent[-1], now_us)
        effects = tracking.tick(now_us)
        pressing = [one for one in effects if isinstance(one, StoreAttachments) and one.pressing]
        disk.keep(pressing)
        tracking.not_kept(NotKept(effects=tuple(one for one in effects if one not in pressing)), now_us)
    now_us = lasts(disk, tracking, now_us, 60 * SECOND_US)
    assert all(disk.find(tracking, one).lost or disk.find(tracking, one).published for one in sent)
    for later_us in (config.keep_us + 3 * DAY_US,) if wild else (HOUR_US // 3, DAY_US):
        now_us = lasts(disk, tracking, now_us, later_us, later_us // 100)
        again = identity(now_us)
        tracking.published(again, now_us)
        now_us = lasts(disk, tracking, now_us, 30 * SECOND_US)
        assert disk.find(tracking, again).published is not None
        assert not disk.find(tracking, again).lost
        tracking.check()


def test_a_loss_by_a_clock_that_was_behind_is_not_forgotten_with_it() -> None:
    """A broker begins in 1970, loses something of now, and its clock is put right."""
    held, _ = AttachmentMap.restored((), last_stored_us=0, now_us=HOUR_US)
    held.lose(NOW_US, NOW_US + SECOND_US, HOUR_US)
    held.forget(NOW_US - 30 * DAY_US, NOW_US + 60 * SECOND_US)
    assert held.lost == [(NOW_US, NOW_US + SECOND_US)]


def test_a_coarse_note_is_not_for_what_comes_in_its_time() -> None:
    held, _ = AttachmentMap.restored((), last_stored_us=0, now_us=NOW_US)
    grain_us = LATE_ROUND_US << 12
    now_us = NOW_US // grain_us * grain_us + grain_us // 2
    held.lose_handled((now_us - HOUR_US) // 1000, (now_us - HOUR_US) // 1000, now_us, grain_us)
    assert held.lost == [(now_us - grain_us // 2, now_us + grain_us // 16)]
    held, _ = AttachmentMap.restored((), last_stored_us=0, now_us=NOW_US)
    held.lose_handled((now_us + HOUR_US) // 1000, (now_us + HOUR_US) // 1000, now_us, grain_us)
    assert held.lost == [(now_us, now_us + grain_us // 2)]


def test_a_filter_that_was_put_off_and_is_lost_is_said_to_be() -> None:
    """T4.

    One that was due waits for a turn without messages; another is full by then, and alone on disk when the
    power goes. Skew and jitter are less than that wait."""
    disk = Disk()
    config = TrackingConfig(
        skew_us=5 * MILLISECOND_US, jitter_us=0, bits=1024, capacity=64, hashes=4, adaptive=False
    )
    tracking = disk.start(NOW_US, config)
    disk.keep(tracking.tick(NOW_US))
    early = identity(NOW_US + SECOND_US)
    tracking.published(early, NOW_US + SECOND_US)
    disk.keep(tracking.tick(NOW_US + 10 * SECOND_US))
    due_us = tracking.next_deadline()
    assert due_us is not None
    tick_us = due_us + PUT_OFF_US
    tracking.routed(2, 2, b"".join(identity(tick_us, number) for number in range(64)), tick_us)
    full, *others = (effect for effect in tracking.tick(tick_us) if isinstance(effect, StoreFilter))
    assert full.final
    assert len(others) == 1
    disk.keep([full])
    tracking = disk.start(tick_us + 60 * SECOND_US, config)
    assert disk.find(tracking, early).lost
