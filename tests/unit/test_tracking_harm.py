"""T3, T4: history that is damaged, or could not be written, or was not kept, is never missing silently."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.errors import StorageError
from postroad.ids import MessageId
from postroad.tracking.attachment import (
    NEIGHBOUR,
    SUBSCRIBER,
    AttachmentMap,
    Change,
    encode_changes,
    salvaged_changes,
)
from postroad.tracking.effects import StoreAttachments
from postroad.tracking.messages import Finding, TraceItem, TraceQuestion
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.store import TrackingStore
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import SECOND_US

LOG = "tracking/attachments.log"


def attach(who: str, at_s: int, what: str = "attach") -> Change:
    return Change(what=what, at_us=at_s * SECOND_US, kind=SUBSCRIBER, who=who)


def start(at_s: int, what: str = "start") -> Change:
    return Change(what=what, at_us=at_s * SECOND_US)


# ---- the attachment map


def test_a_snapshot_keeps_spans_that_overlap() -> None:
    """A link lasts as long as the messages that went over it, by their clocks, and may be back before."""
    held, _ = AttachmentMap.restored((), last_stored_us=0, now_us=0)
    held.attached(NEIGHBOUR, "2", 10)
    held.detached(NEIGHBOUR, "2", 100)
    held.attached(NEIGHBOUR, "2", 50)
    held.attached(SUBSCRIBER, "ann", 60)
    again = AttachmentMap.of(held.snapshot(200))
    again.check()
    assert sorted(again.spans(), key=str) == sorted(held.spans(), key=str)


LOGGED = [
    start(1),
    attach("ann", 2),
    attach("bob", 3),
    attach("bob", 20, "detach"),
    start(30, "stop"),
    start(40),
]


@given(st.integers(0, len(encode_changes(LOGGED)) - 1), st.integers(1, 255), st.booleans())
@settings(max_examples=200, deadline=None)
def test_damage_to_the_log_costs_only_what_is_said(at: int, flipped: int, cut: bool) -> None:
    """Whoever is not named in the map was not attached, or the map says that nothing is known then."""
    data = bytearray(encode_changes(LOGGED))
    if cut:
        del data[at : at + flipped]
    else:
        data[at] ^= flipped
    changes, problems = salvaged_changes(bytes(data))
    if changes[-1:] != LOGGED[-1:]:
        return  # the end is gone, as it may be when a process dies
    assert problems or len(data) == len(encode_changes(changes))
    if not problems:
        return  # whole changes are gone: nobody can see that
    held, _ = AttachmentMap.restored(changes, last_stored_us=45 * SECOND_US, now_us=50 * SECOND_US)
    held.check()
    truth = {5: ["ann", "bob"], 25: ["ann"]}
    for at_s, names in truth.items():
        named = held.at(SUBSCRIBER, at_s * 1000, skew_us=0)
        begun = at_s * SECOND_US >= (held.begins_us or 0)
        assert set(names) <= set(named) or held.lost_at(at_s * 1000, skew_us=0) or not begun


def test_damage_in_the_middle_keeps_what_follows(tmp_path: Path) -> None:
    store = TrackingStore(tmp_path)
    store.load()
    store.apply([StoreAttachments(record=encode_changes(LOGGED))])
    data = bytearray((tmp_path / LOG).read_bytes())
    data[len(encode_changes(LOGGED[:1])) + 12] ^= 1
    (tmp_path / LOG).write_bytes(bytes(data))
    loaded = TrackingStore(tmp_path).load()
    assert loaded.changes == [LOGGED[0], Change(what="damaged", at_us=SECOND_US), *LOGGED[2:]]
    assert "attachments.log" in loaded.problems[0]
    again = TrackingStore(tmp_path)
    assert again.load().problems == [], "it is said once, and the log then has it"
    held, _ = AttachmentMap.restored(again.load().changes, last_stored_us=0, now_us=50 * SECOND_US)
    assert held.lost_at(25_000, skew_us=0), "ann was there, and nobody knows"
    assert not held.lost_at(45_000, skew_us=0) or held.unrecorded_us is not None


class _Torn(TrackingStore):
    """The disk is full in the middle of a record."""

    full = False

    def _finish(self, file: object) -> None:
        if self.full:
            file.truncate(file.tell() - 3)  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        super()._finish(file)  # type: ignore[arg-type]


def test_a_change_that_could_not_be_written_leaves_no_torn_one(tmp_path: Path) -> None:
    store = _Torn(tmp_path)
    store.load()
    store.apply([StoreAttachments(record=encode_changes([start(1)]))])
    store.full = True
    with pytest.raises(StorageError, match="No space left"):
        store.apply([StoreAttachments(record=encode_changes([attach("ann", 2)]))])
    store.full = False
    store.apply([StoreAttachments(record=encode_changes([attach("bob", 3)]))])
    loaded = TrackingStore(tmp_path).load()
    assert (loaded.changes, loaded.problems) == ([start(1), attach("bob", 3)], [])


# ---- settings that change


@pytest.mark.parametrize("ending", ["stopped", "died", "never"])
def test_a_time_without_tracking_is_not_taken_for_silence(tmp_path: Path, ending: str) -> None:
    """T11: strategy none between two processes with bloom: what went through then is not unknown for sure."""
    now_us = 1_700_000_000 * SECOND_US

    def process(after_s: int) -> tuple[TrackingStore, Tracking]:
        store = TrackingStore(tmp_path)
        loaded = store.load()
        assert loaded.problems == []
        made = make_tracking(
            TrackingConfig(),
            me=7,
            stored=loaded.filters,
            changes=loaded.changes,
            now_us=now_us + after_s * SECOND_US,
        )
        store.apply(made.tick(now_us + after_s * SECOND_US))
        return store, made

    if ending != "never":
        store, first = process(0)
        if ending == "stopped":
            store.apply(first.close(now_us + 100 * SECOND_US))
    for at_s in (200, 300):
        TrackingStore(tmp_path).untracked(now_us + at_s * SECOND_US)
    assert (tmp_path / "tracking").exists() is (ending != "never")
    _, last = process(400)

    def finding(at_s: int) -> Finding:
        item = TraceItem(id=bytes(MessageId(5, 7, now_us // 1000 + at_s * 1000, 0)), origin=7)
        return last.answer(TraceQuestion(items=(item,)), {}, now_us + 500 * SECOND_US).findings[0]

    if ending == "never":
        assert finding(350).begins_ms > now_us // 1000 + 350_000
        return
    assert finding(250).lost
    assert finding(350).lost
    assert finding(450).lost == ""
    assert bool(finding(50).lost) is (ending == "died")
