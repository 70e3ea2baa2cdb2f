"""T3: filter files that survive kill -9, are checked, and go when they are old or replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from postroad.errors import StorageError
from postroad.ids import MessageId
from postroad.seam.tracking import (
    DropFilters,
    ReplaceAttachments,
    StoreAttachments,
    StoreFilter,
    TrackingEffect,
)
from postroad.storage.tracking_store import TrackingStore
from postroad.tracking.attachment_log import Change, decode_changes, encode_changes
from postroad.tracking.keys import PUBLISH, HistoryKey
from postroad.tracking.query.messages import TraceItem, TraceQuestion
from postroad.tracking.record import FilterMeta, decode_record, encode_record
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import SECOND_US

KEY = HistoryKey(PUBLISH)


def effect(
    sequence: int, *, replaces: int | None = None, final: bool = True, size: int = 1000
) -> StoreFilter:
    meta = FilterMeta(
        key=KEY,
        sequence=sequence,
        m=size * 8,
        n=10,
        k=3,
        count=1,
        lo_ms=sequence,
        hi_ms=sequence,
        replaces=replaces,
        final=final,
    )
    record = encode_record(meta, bytes([sequence % 256]) * size)
    return StoreFilter(sequence=sequence, record=record, replaces=replaces, final=final)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "tracking").iterdir() if path.name != "spare")


def opened(folder: Path) -> TrackingStore:
    store = TrackingStore(folder)
    assert store.load().problems == []
    return store


def test_what_is_stored_is_found_again(tmp_path: Path) -> None:
    """T3."""
    store = opened(tmp_path)
    made = [effect(1), effect(2, final=False), effect(3)]
    store.apply(made)
    store.apply([StoreAttachments(record=encode_changes([Change(what="start", at_us=5)]))])
    assert store.read([1, 2, 3, 4]) == {one.sequence: one.record for one in made} | {4: b""}
    again = TrackingStore(tmp_path)
    loaded = again.load()
    assert [meta.sequence for meta in loaded.filters] == [1, 2, 3]
    assert loaded.changes == [Change(what="start", at_us=5)]
    assert again.read([1, 2, 3]) == {one.sequence: one.record for one in made}
    again.apply([effect(4)])
    assert [meta.sequence for meta in TrackingStore(tmp_path).load().filters] == [1, 2, 3, 4]


def test_replaced_and_dropped_filters_go(tmp_path: Path) -> None:
    """T8: a retained filter is overwritten: one state of it is on the disk."""
    store = opened(tmp_path)
    store.apply([effect(1, final=False), effect(2, final=False)])
    store.apply([effect(3, final=False, replaces=1), effect(4, final=False, replaces=2)])
    assert files(tmp_path) == ["part-00000002-0-0.flt"]
    store.apply([effect(5, replaces=3)])
    store.apply([effect(6, replaces=4)])
    assert files(tmp_path) == ["full-00000003-0.flt"]
    store.apply([DropFilters(sequences=(5, 6), record=b"")])
    assert store.read([5, 6]) == {5: b"", 6: b""}
    store.apply([effect(7)])
    assert store.read([7])[7] == effect(7).record


def test_mostly_dead_files_are_rewritten(tmp_path: Path) -> None:
    """One slow history among many must not keep their old states."""
    store = opened(tmp_path)
    store.apply([effect(number, final=False) for number in range(1, 21)])
    for number in range(2, 21):
        store.apply([effect(100 + number, replaces=number)])
    assert store.size < 22 * 1200
    assert sorted(meta.sequence for meta in TrackingStore(tmp_path).load().filters) == [1, *range(102, 121)]
    assert decode_record(store.read([1])[1])[0].sequence == 1


def test_a_quiet_broker_leaves_few_files(tmp_path: Path) -> None:
    """T8: a filter that was idle for long is not replaced any more. It was a file for every message."""
    store = opened(tmp_path)
    start_us = 1_700_000_000 * SECOND_US
    tracking = make_tracking(TrackingConfig(), me=7, stored=(), changes=(), now_us=start_us)
    tracking.attached("ann", start_us)
    sent: list[bytes] = []
    for number in range(1, 51):
        at_us = start_us + number * 130 * SECOND_US
        sent.append(bytes(MessageId(5, 7, at_us // 1000, number)))
        tracking.published(sent[-1], at_us)
        tracking.delivered(7, ("ann",), sent[-1], at_us)
        for later_s in (2, 12, 15, 110, 125):
            store.apply(tracking.tick(at_us + later_s * SECOND_US))
    assert len(files(tmp_path)) < 5
    loaded = TrackingStore(tmp_path).load()
    again = make_tracking(
        TrackingConfig(),
        me=7,
        stored=loaded.filters,
        changes=loaded.changes,
        now_us=start_us + 7000 * SECOND_US,
    )
    for one in sent:
        question = TraceQuestion(items=(TraceItem(id=one, origin=7),))
        records: dict[int, bytes] = {}
        while wanted := again.answer(question, records)[1]:
            records |= store.read(wanted)
        (found,) = again.answer(question, records)[0].findings
        assert found.published is not None
        assert [receiver.subscriber for receiver in found.delivered] == ["ann"]


def test_interrupted_replacement(tmp_path: Path) -> None:
    """Killed between writing the new state and removing the old: the new one counts."""
    store = opened(tmp_path)
    store.apply([effect(1, final=False)])
    old = (tmp_path / "tracking" / "part-00000001-0-0.flt").read_bytes()
    store.apply([effect(2, final=False, replaces=1)])
    (tmp_path / "tracking" / "part-00000001-0-0.flt").write_bytes(old)
    (tmp_path / "tracking" / "part-00000009.tmp").write_bytes(b"half")
    again = opened(tmp_path)
    assert [meta.sequence for meta in TrackingStore(tmp_path).load().filters] == [2]
    assert files(tmp_path) == ["part-00000002-0-0.flt"]
    again.apply([effect(3)])


def test_files_of_others_are_left_alone_and_named(tmp_path: Path) -> None:
    """T3."""
    store = opened(tmp_path)
    store.apply([effect(1), effect(2, final=False)])
    folder = tmp_path / "tracking"
    (full,) = folder.glob("full-*.flt")
    strangers = ["backup.flt", "full-.flt", "full-00000001-0 (copy).flt", "my.tmp", "part-x-0.flt", "x\n.flt"]
    for name in strangers:
        (folder / name).write_bytes(full.read_bytes())
    (folder / "part-00000007-0-0.flt").mkdir()
    again = TrackingStore(tmp_path)
    loaded = again.load()
    assert [meta.sequence for meta in loaded.filters] == [1, 2]
    (problem,) = loaded.problems
    assert problem == f"{folder}: not Postroad's, and left alone: " + ", ".join(
        map(repr, sorted([*strangers, "part-00000007-0-0.flt"]))
    )
    again.apply([effect(3), DropFilters(sequences=(1, 2), record=b"")])
    assert {*strangers, "part-00000007-0-0.flt"} < set(files(tmp_path))
    for number in range(20):
        (folder / f"more-{number}").touch()
    (problem,) = TrackingStore(tmp_path).load().problems
    assert problem.endswith(" and 19 more"), problem


@pytest.mark.parametrize("damage", ["torn", "magic", "meta", "garbage"])
def test_damage_is_skipped_and_said(tmp_path: Path, damage: str) -> None:
    store = opened(tmp_path)
    made = [effect(1), effect(2), effect(3)]
    store.apply(made)
    (path,) = (tmp_path / "tracking").glob("*.flt")
    data = bytearray(path.read_bytes())
    second = len(made[0].record)
    if damage == "torn":
        del data[-10:]
    elif damage == "magic":
        data[second] ^= 1
    elif damage == "meta":
        data[second + 30] ^= 1
    else:
        data[second + 8 : second + 16] = b"\xff" * 8
    path.write_bytes(bytes(data))
    again = TrackingStore(tmp_path)
    loaded = again.load()
    assert [meta.sequence for meta in loaded.filters] == ([1, 2] if damage == "torn" else [1, 3])
    (problem,) = loaded.problems
    assert str(path) in problem
    assert "skipped" in problem
    again.apply([effect(4)])
    assert len(TrackingStore(tmp_path).load().filters) == 3


def test_a_damaged_body_is_seen_when_it_is_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.apply([effect(1)])
    (path,) = (tmp_path / "tracking").glob("*.flt")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(StorageError):
        decode_record(store.read([1])[1])


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("away_s", [-3600, 3600])
@pytest.mark.parametrize("timely", [0, 2])
def test_a_late_message_whose_record_died_is_not_missing_silently(
    strategy: str, away_s: int, timely: int
) -> None:
    """It was made an hour before the crash, or by a clock an hour ahead: that time is lost, too.

    Wherever it stands among others.
    """
    config = TrackingConfig(strategy=strategy)
    now = 1_700_000_000 * SECOND_US
    made = now + away_s * SECOND_US
    changes: list[Change] = []

    def process(at_us: int) -> Tracking:
        return make_tracking(config, me=1, stored=[], changes=changes, now_us=at_us)

    def keep(effects: list[TrackingEffect]) -> None:
        for one in effects:
            assert isinstance(one, StoreAttachments)
            changes.extend(decode_changes(one.record)[0])

    def lost(tracking: Tracking, at_us: int) -> str:
        item = TraceItem(id=bytes(MessageId(9, 1, at_us // 1000, 0)), origin=7)
        (finding,) = tracking.answer(TraceQuestion(items=(item,)), {})[0].findings
        return finding.lost

    before = process(now - 7200 * SECOND_US)
    keep(before.tick(now - 7200 * SECOND_US))
    keep(before.close(now - 10 * SECOND_US))
    other = process(now - 5 * SECOND_US)
    keep(other.tick(now - 5 * SECOND_US))
    others = [bytes(MessageId(8, 7, now // 1000, counter)) for counter in range(timely)]
    ids = [*others[:1], bytes(MessageId(9, 7, made // 1000, 0)), *others[1:]]
    other.routed(7, 2, b"".join(ids), now)
    keep(other.tick(now + SECOND_US // 10))  # its filter is not stored yet, that it was handled is
    after = process(now + 20 * SECOND_US)
    assert "died" in lost(after, made)
    assert "died" in lost(after, now + 10 * SECOND_US)
    assert lost(after, now - 1800 * SECOND_US) == ""
    assert lost(after, now + 1800 * SECOND_US) == ""
    keep(after.tick(now + 21 * SECOND_US))
    again = process(now + 3 * 3600 * SECOND_US)
    assert "died" in lost(again, made), "that it is lost is not forgotten"


def test_a_torn_attachment_log_is_cut(tmp_path: Path) -> None:
    """T4."""
    store = opened(tmp_path)
    first, second = (
        Change(what="start", at_us=1),
        Change(what="attach", at_us=2, kind="subscriber", who="ann"),
    )
    store.apply([StoreAttachments(record=encode_changes([first, second]))])
    path = tmp_path / "tracking" / "attachments.log"
    path.write_bytes(path.read_bytes()[:-3])
    torn = Change(what="damaged", at_us=1)
    loaded = TrackingStore(tmp_path).load()
    assert loaded.changes == [first, torn]
    assert "torn" in loaded.problems[0]
    again = opened(tmp_path)
    again.apply([StoreAttachments(record=encode_changes([second]))])
    assert TrackingStore(tmp_path).load().changes == [first, torn, second]
    again.apply([ReplaceAttachments(parts=[encode_changes([first])])])
    assert TrackingStore(tmp_path).load().changes == [first]


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_a_restart_counts_what_is_kept_as_the_process_before_did(tmp_path: Path, strategy: str) -> None:
    """T3: compressed filters count by what they take, or retention drops them after every restart."""
    config = TrackingConfig(
        strategy=strategy,
        adaptive=False,
        compress=True,
        retain=False,
        persist_us=SECOND_US,
        keep_bytes=1 << 20,
    )

    def begun(now_us: int) -> tuple[TrackingStore, Tracking]:
        store = TrackingStore(tmp_path, sync=False)
        found = store.load()
        return store, make_tracking(
            config, me=7, stored=found.filters, sizes=found.sizes, changes=found.changes, now_us=now_us
        )

    now_us = 1_700_000_000 * SECOND_US
    store, tracking = begun(now_us)
    for number in range(20):
        now_us += SECOND_US
        tracking.published(bytes(MessageId(5, 7, now_us // 1000, number)), now_us)
        store.apply(tracking.tick(now_us + SECOND_US // 2))
    store.apply(tracking.close(now_us + SECOND_US))
    kept = {name: tracking.metrics()[name] for name in ("tracking_kept_bytes", "tracking_kept_filters")}
    assert kept["tracking_kept_bytes"] == store.size
    store, tracking = begun(now_us + 2 * SECOND_US)
    assert kept.items() <= tracking.metrics().items()
    assert not any(isinstance(one, DropFilters) for one in tracking.tick(now_us + 60 * SECOND_US))
    assert kept.items() <= tracking.metrics().items()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "tracking").write_text("a file")
    with pytest.raises(StorageError):
        TrackingStore(tmp_path).load()


WRITER = """
    import sys
    from pathlib import Path
    from postroad.ids import MessageId
    from postroad.tracking.settings import TrackingConfig
    from postroad.storage.tracking_store import TrackingStore
    from postroad.tracking.strategies import make_tracking

    store = TrackingStore(Path(sys.argv[1]))
    loaded = store.load()
    now_us = 1_700_000_000_000_000
    config = TrackingConfig(persist_us=1_000_000, bits=16_000, capacity=1000, hashes=11)
    tracking = make_tracking(config, me=7, stored=loaded.filters, changes=loaded.changes, now_us=now_us)
    for number in range(100_000):
        now_us += 10_000
        tracking.published(bytes(MessageId(1, 7, now_us // 1000, 0)), now_us)
        store.apply(tracking.tick(now_us))
        print(now_us, flush=True)
"""


def test_kill_9_loses_at_most_one_interval(tmp_path: Path) -> None:
    """T3: a real process, killed at a moment it did not choose."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(730)]
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate(timeout=30)
    done_us = [int(line) for line in [*lines, *rest.splitlines()] if len(line.strip()) == 16]
    store = TrackingStore(tmp_path)
    loaded = store.load()
    now_us = done_us[-1] + SECOND_US
    config = TrackingConfig(persist_us=SECOND_US, bits=16_000, capacity=1000, hashes=11)
    tracking = make_tracking(config, me=7, stored=loaded.filters, changes=loaded.changes, now_us=now_us)
    for at_us in done_us:
        item = TraceItem(id=bytes(MessageId(1, 7, at_us // 1000, 0)), origin=7)
        question = TraceQuestion(items=(item,))
        records: dict[int, bytes] = {}
        while wanted := tracking.answer(question, records)[1]:
            records |= store.read(wanted)
        finding = tracking.answer(question, records)[0].findings[0]
        if at_us <= done_us[-1] - SECOND_US:
            assert finding.published is not None
        else:
            assert finding.published is not None or finding.lost


def test_a_new_file_is_found_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T3: Its name is synced with it, and before what it replaces goes; later records of it need not be."""
    store = opened(tmp_path)
    store.apply([effect(1, final=False)])
    synced: list[list[str]] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        assert os.path.samefile(descriptor, tmp_path / "tracking")
        fsync(descriptor)
        synced.append(files(tmp_path))

    monkeypatch.setattr(os, "fsync", seen)
    store.apply([effect(2, replaces=1)])
    assert len(synced) == 1
    part, full = sorted(synced[0], key=lambda name: name.startswith("full"))
    assert files(tmp_path) == [full]
    assert part.startswith("part")
    store.apply([effect(3)])
    assert len(synced) == 1
    store.apply([StoreAttachments(record=encode_changes([Change(what="start", at_us=5)]))])
    assert len(synced) == 2
    assert "attachments.log" in synced[1]
