"""T3, T4: history that is damaged, or could not be written, or was not kept, is never missing silently."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from postroad.errors import StorageError
from postroad.ids import MessageId
from postroad.seam.tracking import (
    DropFilters,
    NotKept,
    ReplaceAttachments,
    StoreAttachments,
    StoreFilter,
    TrackingEffect,
)
from postroad.storage.tracking_store import TrackingStore
from postroad.tracking.attachment import NEIGHBOUR, SUBSCRIBER, AttachmentMap
from postroad.tracking.attachment_log import (
    ASSUMED,
    Change,
    Promise,
    encode_changes,
    salvaged_changes,
    widest,
)
from postroad.tracking.keys import PUBLISH, HistoryKey
from postroad.tracking.query.messages import Finding, TraceItem, TraceQuestion
from postroad.tracking.record import FilterMeta, decode_meta, encode_record
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.shelf import Shelf
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import SECOND_US

LOG = "tracking/attachments.log"


def attach(who: str, at_s: int, what: str = "attach") -> Change:
    return Change(what=what, at_us=at_s * SECOND_US, kind=SUBSCRIBER, who=who)


def start(at_s: int, what: str = "start", filter_s: int = 0) -> Change:
    promise = Promise(filter_us=filter_s * SECOND_US) if what == "start" else None
    return Change(what=what, at_us=at_s * SECOND_US, promise=promise)


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
    """T4: Whoever is not named in the map was not attached, or the map says that nothing is known then."""
    data = bytearray(encode_changes(LOGGED))
    if cut:
        del data[at : at + flipped]
    else:
        data[at] ^= flipped
    changes, problems = salvaged_changes(bytes(data), last_stored_us=45 * SECOND_US)
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


def test_what_follows_damage_is_found_whatever_it_is() -> None:
    """T4."""
    data = bytearray(encode_changes([*LOGGED, Change(what="recorded", at_us=41 * SECOND_US)]))
    data[len(encode_changes(LOGGED[:-1])) + 12] ^= 1
    changes, problems = salvaged_changes(bytes(data), last_stored_us=0)
    assert len(problems) == 1
    assert [change.what for change in changes[-2:]] == ["damaged", "recorded"]


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
    """T11: strategy none before a process with bloom: what went through then is not unknown for sure."""
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
    _, last = process(400)

    def finding(at_s: int) -> Finding:
        item = TraceItem(id=bytes(MessageId(5, 7, now_us // 1000 + at_s * 1000, 0)), origin=7)
        return last.answer(TraceQuestion(items=(item,)), {})[0].findings[0]

    began_s = 200 if ending == "never" else 0
    assert finding(50).begins_ms == now_us // 1000 + began_s * 1000
    assert finding(250).lost
    assert finding(350).lost
    assert finding(450).lost == ""
    assert bool(finding(50).lost) is (ending == "died")


def test_who_puts_a_backup_back_can_say_so(tmp_path: Path) -> None:
    """T4.

    docs/how-to/operations.md: `echo >>` the log. What happened between the backup and now is not known.
    """
    hour_us, began_us = 3_600 * SECOND_US, 1_700_000_000 * SECOND_US

    def process(at_us: int) -> tuple[TrackingStore, Tracking]:
        store = TrackingStore(tmp_path, sync=False)
        loaded = store.load()
        made = make_tracking(
            TrackingConfig(), me=7, stored=loaded.filters, changes=loaded.changes, now_us=at_us
        )
        store.apply(made.tick(at_us))
        return store, made

    store, first = process(began_us)
    first.published(bytes(MessageId(5, 7, began_us // 1000, 0)), began_us)
    for at_us in range(began_us, began_us + 60 * SECOND_US, SECOND_US):
        store.apply(first.tick(at_us))
    store.apply(first.close(began_us + 10 * hour_us))
    with (tmp_path / LOG).open("a") as file:
        file.write("\n")
    _, last = process(began_us + 20 * hour_us)
    lost = []
    for hours in (1, 8, 11, 19, 21):
        item = TraceItem(id=bytes(MessageId(5, 7, (began_us + hours * hour_us) // 1000, 0)), origin=7)
        lost.append(last.answer(TraceQuestion(items=(item,)), {})[0].findings[0].lost != "")
    assert lost == [False, False, True, True, False]


def test_the_map_is_read_as_widely_as_it_was_written(tmp_path: Path) -> None:
    """T11: jitter is less than it was: who came three seconds after a message had it all the same."""
    now_us = 1_700_000_000 * SECOND_US
    store = TrackingStore(tmp_path)
    store.load()
    made = make_tracking(TrackingConfig(jitter_us=5 * SECOND_US), me=7, stored=(), changes=(), now_us=now_us)
    identity = bytes(MessageId(5, 7, now_us // 1000 + 10_000, 0))
    made.published(identity, now_us + 10 * SECOND_US)
    made.attached("ann", now_us + 13 * SECOND_US)
    made.delivered(7, ("ann",), identity, now_us + 13 * SECOND_US)
    store.apply(made.close(now_us + 20 * SECOND_US))
    loaded = TrackingStore(tmp_path).load()
    again = make_tracking(
        TrackingConfig(),
        me=7,
        stored=loaded.filters,
        changes=loaded.changes,
        now_us=now_us + 30 * SECOND_US,
    )
    question = TraceQuestion(items=(TraceItem(id=identity, origin=7),))
    records: dict[int, bytes] = {}
    while wanted := again.answer(question, records)[1]:
        records |= store.read(wanted)
    (finding,) = again.answer(question, records)[0].findings
    assert [one.subscriber for one in finding.delivered] == ["ann"]


# ---- stored filters


def stored_at(sequence: int, at_s: int, *, final: bool = True) -> StoreFilter:
    meta = FilterMeta(
        key=HistoryKey(PUBLISH),
        sequence=sequence,
        m=800,
        n=10,
        k=3,
        count=1,
        lo_ms=at_s * 1000,
        hi_ms=at_s * 1000,
        opened_us=(at_s - 5) * SECOND_US,
        stored_us=at_s * SECOND_US,
        final=final,
    )
    return StoreFilter(sequence=sequence, record=encode_record(meta, bytes(100)), final=final)


def replace_in(effect: StoreFilter, *, replaces: int) -> StoreFilter:
    meta = replace(decode_meta(effect.record), replaces=replaces)
    record = encode_record(meta, bytes(100))
    return StoreFilter(sequence=meta.sequence, record=record, replaces=replaces)


@pytest.mark.parametrize("final", [True, False])
def test_a_filter_that_is_damaged_is_missed(tmp_path: Path, final: bool) -> None:
    """T3: Nobody knows which times it had: those since it can have begun, until the next was stored."""
    store = TrackingStore(tmp_path)
    store.load()
    store.apply([StoreAttachments(record=encode_changes([start(1, filter_s=50)]))])
    for sequence in range(1, 10):
        store.apply([stored_at(sequence, sequence * 100, final=final)])
    (*_, path) = sorted((tmp_path / "tracking").glob("*.flt"))[:5]
    data = bytearray(path.read_bytes())
    size = len(stored_at(5, 500).record)
    data[(4 * size if final else 0) + 40] ^= 1
    path.write_bytes(bytes(data))
    for _ in range(2):
        loaded = TrackingStore(tmp_path).load()
        assert [meta.sequence for meta in loaded.filters] == [1, 2, 3, 4, 6, 7, 8, 9]
        lost = [(one.at_us, one.until_us) for one in loaded.changes if one.what == "lost"]
        assert len(lost) == 1, "and it is said once"
        if final:
            assert lost == [(350 * SECOND_US, 600 * SECOND_US)]
        else:
            assert lost == [(450 * SECOND_US, 500 * SECOND_US)], "its file is named by when it was stored"


@pytest.mark.parametrize("flipped", [True, False])
def test_the_last_filter_of_a_file_is_missed(tmp_path: Path, flipped: bool) -> None:
    """At a stop all are stored at once: what that one held goes back as far as a filter can."""
    store = TrackingStore(tmp_path)
    store.load()
    changes = [start(1, filter_s=150), start(200, "stop")]
    store.apply([stored_at(1, 200), stored_at(2, 200), StoreAttachments(record=encode_changes(changes))])
    (path,) = (tmp_path / "tracking").glob("*.flt")
    data = bytearray(path.read_bytes())
    if flipped:
        data[len(data) // 2 + 30] ^= 1
    else:
        del data[-3:]
    path.write_bytes(bytes(data))
    os.utime(path, (300, 300))
    loaded = TrackingStore(tmp_path).load()
    lost = [(one.at_us, one.until_us) for one in loaded.changes if one.what == "lost"]
    assert lost == [(50 * SECOND_US, 300 * SECOND_US)]


def test_damage_in_a_file_that_was_rewritten_is_of_the_time_of_its_filters(tmp_path: Path) -> None:
    """A filter of an idle history was moved when those around it were gone."""
    store = TrackingStore(tmp_path)
    store.load()
    store.apply([StoreAttachments(record=encode_changes([start(1, filter_s=50)]))])
    store.apply([stored_at(number, 1_000, final=False) for number in (1, 2, 3)])
    store.apply([DropFilters(sequences=(1, 2), record=b"")])
    store.apply([stored_at(4, 90_000, final=False)])
    path = next(iter(sorted((tmp_path / "tracking").glob("*.flt"), reverse=True)))
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(bytes(data))
    loaded = TrackingStore(tmp_path).load()
    assert [meta.sequence for meta in loaded.filters] == [4]
    lost = [(one.at_us, one.until_us) for one in loaded.changes if one.what == "lost"]
    assert lost == [(950 * SECOND_US, 1_000 * SECOND_US)]


def test_damage_takes_along_what_was_handled_out_of_its_time(tmp_path: Path) -> None:
    """The times of messages that caught up are in no filter's range, but they were said."""
    store = TrackingStore(tmp_path)
    store.load()
    handled = [
        Change(what="handled", at_us=60 * SECOND_US, until_us=120 * SECOND_US, noted_us=noted_s * SECOND_US)
        for noted_s in (500, 980)
    ]
    early = replace(handled[0], at_us=240 * SECOND_US, until_us=300 * SECOND_US)
    changes = [start(400, filter_s=50), early, *handled]
    store.apply([StoreAttachments(record=encode_changes(changes)), stored_at(1, 1_000)])
    (path,) = (tmp_path / "tracking").glob("*.flt")
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(bytes(data))
    for _ in range(2):
        loaded = TrackingStore(tmp_path).load()
        lost = [one.at_us for one in loaded.changes if one.what == "lost"]
        assert lost == [950 * SECOND_US, 60 * SECOND_US]


def test_a_log_of_an_earlier_version_is_not_believed_too_much() -> None:
    """It does not say what its process went by: a minute, and for one filter two hours, are assumed."""
    changes = [replace(start(1), promise=None), attach("ann", 2)]
    assert widest(changes) == ASSUMED
    assert widest([start(1, filter_s=3)]).filter_us == 3 * SECOND_US
    made = make_tracking(
        TrackingConfig(),
        me=7,
        stored=[decode_meta(stored_at(1, 1_000).record)],
        changes=changes,
        now_us=10**12,
    )
    assert made.unrecorded_us == 940 * SECOND_US


def test_a_filter_that_could_not_be_written_leaves_no_torn_one(tmp_path: Path) -> None:
    """T3."""
    store = _Torn(tmp_path)
    store.load()
    store.apply([stored_at(1, 100)])
    before = {path.name: path.stat().st_size for path in (tmp_path / "tracking").iterdir()}
    store.full = True
    for refused in (
        stored_at(2, 200),
        stored_at(2, 200, final=False),
        ReplaceAttachments(parts=[encode_changes([start(1)])]),
    ):
        with pytest.raises(StorageError, match="No space left"):
            store.apply([refused])
        after = {path.name: path.stat().st_size for path in (tmp_path / "tracking").iterdir()}
        assert after == before, "nor a file aside: it would take what room becomes free"
    store.full = False
    store.apply([stored_at(3, 300)])
    loaded = TrackingStore(tmp_path).load()
    assert ([meta.sequence for meta in loaded.filters], loaded.problems) == ([1, 3], [])


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_a_stop_is_not_said_before_the_last_filters_are_stored(tmp_path: Path, strategy: str) -> None:
    """T3: There is room for the few bytes of the map's log, and none for filters."""

    class NoFilters(TrackingStore):
        def _append_full(self, effects: Sequence[StoreFilter]) -> None:
            if effects:
                raise OSError(28, "No space left on device")

        def _write_part(self, *_: object) -> None:
            raise OSError(28, "No space left on device")

    store = NoFilters(tmp_path)
    store.load()
    now_us = 1_000 * SECOND_US
    tracking = make_tracking(TrackingConfig(strategy=strategy), me=1, stored=(), changes=(), now_us=now_us)
    store.apply(tracking.tick(now_us))
    tracking.published(bytes(MessageId(5, 1, 1_001_000, 1)), now_us + SECOND_US)
    with pytest.raises(StorageError, match="No space left"):
        store.apply(tracking.close(now_us + 2 * SECOND_US))
    changes = [change.what for change in TrackingStore(tmp_path).load().changes]
    assert (changes.count("start"), "stop" in changes) == (1, False)


def test_a_file_that_cannot_be_rewritten_costs_nothing(tmp_path: Path) -> None:
    """T3: There is no room for a copy of what is left in it; all that was to be stored is."""

    class NoCopies(TrackingStore):
        def _write_part(self, *_: object) -> None:
            raise OSError(28, "No space left on device")

    store = TrackingStore(tmp_path)
    store.load()
    store.apply([stored_at(number, 1_000, final=False) for number in range(1, 5)])
    full = NoCopies(tmp_path)
    full.load()
    full.apply([replace_in(stored_at(10 + number, 2_000), replaces=number) for number in range(1, 4)])
    loaded = TrackingStore(tmp_path).load()
    assert [meta.sequence for meta in loaded.filters] == [4, 11, 12, 13]


# ---- what could not be kept


@pytest.mark.parametrize("harm", ["torn", "damaged", "filter"])
def test_a_full_disk_is_no_reason_not_to_start(tmp_path: Path, harm: str) -> None:
    """T3.

    What is wrong is known, and stays known: to this process, to the next if it dies at once, and to one
    after it has written something."""
    store = TrackingStore(tmp_path)
    store.load()
    logged = [start(100, filter_s=50), attach("ann", 200), attach("bob", 300)]
    store.apply([StoreAttachments(record=encode_changes(logged)), stored_at(1, 320), stored_at(2, 340)])
    (filters,) = (tmp_path / "tracking").glob("*.flt")
    path = filters if harm == "filter" else tmp_path / LOG
    data = bytearray(path.read_bytes())
    if harm != "torn":
        data[len(encode_changes(logged[:1])) + 12 if harm == "damaged" else 30] ^= 1
    path.write_bytes(data[:-3] if harm == "torn" else data)
    (tmp_path / "tracking" / "spare").unlink()

    def lost(changes: Sequence[Change]) -> bool:
        held, _ = AttachmentMap.restored(changes, last_stored_us=0, now_us=400 * SECOND_US)
        return held.lost_at(310_000, skew_us=0)

    for _ in range(2):
        again = _Torn(tmp_path)
        again.full = True
        loaded = again.load()
        assert "No space left" in loaded.problems[-1]
        assert lost(loaded.changes)
    again.full = False
    again.apply([StoreAttachments(record=encode_changes([start(410), attach("cy", 420)]))])
    found = TrackingStore(tmp_path).load().changes
    assert lost(found)
    assert {one.who for one in found} >= {"ann", "cy"} - ({"ann"} if harm == "damaged" else set())


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_what_was_not_kept_is_said_also_by_the_next_process(tmp_path: Path, strategy: str) -> None:
    """T3: The disk is full for a while: a filter and who came meanwhile are not stored."""
    now_us = 1_700_000_000 * SECOND_US
    config = TrackingConfig(strategy=strategy, retain=False)
    store = TrackingStore(tmp_path)
    loaded = store.load()
    full = False
    kept = 0

    def keep(made: Tracking, effects: list[TrackingEffect], at_us: int) -> None:
        nonlocal kept
        if effects and full:
            made.not_kept(NotKept(effects=tuple(effects)), at_us)
        else:
            store.apply(effects)
            kept += sum(isinstance(effect, StoreFilter) for effect in effects)

    def run(made: Tracking, from_s: int, to_s: int) -> None:
        for at_s in range(from_s, to_s):
            keep(made, made.tick(now_us + at_s * SECOND_US), now_us + at_s * SECOND_US)

    def publish(made: Tracking, at_s: int, who: str) -> bytes:
        at_us = now_us + at_s * SECOND_US
        identity = bytes(MessageId(5, 7, at_us // 1000, 0))
        made.published(identity, at_us)
        made.attached(who, at_us)
        made.delivered(7, (who,), identity, at_us)
        return identity

    first = make_tracking(config, me=7, stored=loaded.filters, changes=loaded.changes, now_us=now_us)
    early = publish(first, 10, "ann")
    run(first, 10, 30)
    full = True
    missing = publish(first, 40, "bob")
    run(first, 40, 60)
    full = False
    late = publish(first, 70, "bob")
    run(first, 70, 90)
    keep(first, first.close(now_us + 90 * SECOND_US), now_us + 90 * SECOND_US)
    assert first.metrics()["tracking_stored_filters_total"] == kept
    store = TrackingStore(tmp_path)
    loaded = store.load()
    assert loaded.problems == []
    second = make_tracking(
        config, me=7, stored=loaded.filters, changes=loaded.changes, now_us=now_us + 100 * SECOND_US
    )
    second.check()

    def finding(identity: bytes) -> Finding:
        question = TraceQuestion(items=(TraceItem(id=identity, origin=7),))
        records: dict[int, bytes] = {}
        while wanted := second.answer(question, records)[1]:
            records |= store.read(wanted)
        return second.answer(question, records)[0].findings[0]

    assert [one.subscriber for one in finding(early).delivered] == ["ann"]
    assert finding(early).lost == ""
    assert finding(missing).published is None
    assert finding(missing).lost
    assert [one.subscriber for one in finding(late).delivered] == ["bob"], "who came while it was full"
    assert finding(late).lost == ""


# ---- retention


def test_what_was_only_of_other_times_is_forgotten_as_such() -> None:
    """T9: a filter with nothing but what a late subscriber was given; a clock ahead does not count."""
    shelf = Shelf()
    year_ms = 365 * 86_400_000
    singles = ((1_000, 2_000), (90_000, 90_000), (100_000 + year_ms, 100_000 + year_ms))
    meta = replace(decode_meta(stored_at(1, 100).record), lo_ms=1 << 60, hi_ms=-1, singles=singles)
    shelf.put(meta, b"", 100)
    ahead = (100_000 + year_ms, 100_000 + year_ms)
    assert shelf.expire(10**15, keep_us=1, keep_bytes=1 << 30, before=2) == ((1,), (ahead,))
    assert shelf.dropped_ms == 90_000


def test_a_message_of_the_future_that_retention_dropped_is_missed() -> None:
    """T9: its publisher's clock was five hours ahead. The history does not begin that late for others."""
    now_us = 1_700_000_000 * SECOND_US
    config = TrackingConfig(keep_us=60 * SECOND_US, persist_us=SECOND_US, renew_us=5 * SECOND_US)
    made = make_tracking(config, me=7, stored=(), changes=(), now_us=now_us)
    times_ms = [now_us // 1000 + ahead_s * 1000 for ahead_s in (5 * 3600, 100, 3 * 3600)]
    made.published(bytes(MessageId(5, 7, times_ms[0], 0)), now_us)
    for at_s in range(200):
        at_us = now_us + at_s * SECOND_US
        made.published(bytes(MessageId(6, 7, at_us // 1000, 0)), at_us)
        made.tick(at_us)
    items = tuple(TraceItem(id=bytes(MessageId(5, 7, time_ms, 0)), origin=7) for time_ms in times_ms)
    ahead, forgotten, other = made.answer(TraceQuestion(items=items), {})[0].findings
    assert ahead.published is None
    assert ahead.lost
    assert forgotten.forgotten
    assert not other.lost


# ---- a crash of a broker that had nothing to do


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_long_after_the_last_message_costs_nothing(tmp_path: Path, strategy: str, torn: bool) -> None:
    """T3: all was stored. That it was is said only after it is: `torn`, the crash is between the two."""
    now_us = 1_700_000_000 * SECOND_US
    config = TrackingConfig(strategy=strategy)
    store = TrackingStore(tmp_path)
    store.load()
    made = make_tracking(config, me=7, stored=(), changes=(), now_us=now_us)
    identity = bytes(MessageId(5, 7, now_us // 1000 + 20_000, 0))
    made.published(identity, now_us + 20 * SECOND_US)
    for at_s in range(20, 300):
        effects = made.tick(now_us + at_s * SECOND_US)
        if torn and any(isinstance(effect, StoreFilter) for effect in effects):
            store.apply([one for one in effects if not isinstance(one, StoreFilter)])
            break
        store.apply(effects)
    store = TrackingStore(tmp_path)
    loaded = store.load()
    after_us = now_us + 1000 * SECOND_US
    again = make_tracking(config, me=7, stored=loaded.filters, changes=loaded.changes, now_us=after_us)

    def finding(identity: bytes) -> Finding:
        question = TraceQuestion(items=(TraceItem(id=identity, origin=7),))
        records: dict[int, bytes] = {}
        while wanted := again.answer(question, records)[1]:
            records |= store.read(wanted)
        return again.answer(question, records)[0].findings[0]

    assert (finding(identity).published is None) is torn
    assert bool(finding(identity).lost) is torn
    assert finding(bytes(MessageId(5, 7, now_us // 1000 + 400_000, 0))).lost, "it may have had others then"
