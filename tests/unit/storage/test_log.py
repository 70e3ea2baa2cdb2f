"""D1, D6, D7: the log on real files: what is readable when, damage, torn tails, chops, reclaimed space."""

from __future__ import annotations

import sqlite3
import struct
import threading
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from google_crc32c import extend

from postroad.errors import BugError, StorageError
from postroad.seam.storage import MAX_TICK, Append, LogStream, NoRoom, Read, ReadDone, StreamKind
from postroad.storage import log as log_module
from postroad.storage.files import ASIDE, MAX_OPEN_FILES, OsFiles
from postroad.storage.identity import DATABASE, DataFolder
from postroad.storage.log import CHOPS, LogVolume
from postroad.storage.metadata import Metadata
from postroad.storage.recovery import StreamState
from postroad.storage.segment import (
    OPENS_COMMIT,
    OVERHEAD,
    RESIDUE,
    Buffer,
    pack,
    parse_name,
    scan,
    segment_name,
)

MARKER = 0x5EED0A70


def events(id: int) -> LogStream:
    return LogStream(StreamKind.EVENTS, id)


class Opened:
    """A log in a folder, committed by hand."""

    def __init__(self, folder: Path, *, segment_bytes: int = 4096) -> None:
        self.folder = folder
        self.metadata = Metadata(folder / "postroad.db")
        self.files = OsFiles(folder / "log", sync=False)
        draw = Random(7).getrandbits
        self.volume = LogVolume(
            self.files, self.metadata, draw_marker=lambda: draw(32), segment_bytes=segment_bytes
        )

    def append(self, stream: int, spans: Iterable[tuple[int, int]], size: int = 100) -> None:
        appends = [
            Append(stream=events(stream), first=first, last=last, data=bytes([last & 255]) * size, tag=0)
            for first, last in spans
        ]
        self.volume.publish(self.volume.write(appends))

    def chop(self, stream: int, tick: int) -> None:
        self.volume.chop(events(stream), tick)
        self.save_chops()

    def save_chops(self) -> None:
        chops = self.volume.take_chops()
        self.metadata.commit(self.volume.chop_rows(chops))
        self.volume.chops_saved(chops)

    def tidy(self) -> None:
        while self.volume.tidy():
            pass

    def read(self, stream: int, start: int = -1, end: int = 1 << 40, limit: int = 1 << 30) -> ReadDone:
        return self.volume.read(Read(stream=events(stream), start=start, end=end, limit_bytes=limit, tag=9))

    def states(self) -> dict[int, StreamState]:
        """By id."""
        return {stream.id: state for stream, state in self.volume.recovered.streams.items()}

    def lasts(self, stream: int) -> list[int]:
        return [last for _, last, _ in self.read(stream).records]

    def segments(self) -> list[Path]:
        return sorted(one for one in (self.folder / "log").iterdir() if parse_name(one.name))

    def close(self, *, clean: bool = False) -> None:
        if clean:
            self.metadata.commit(self.volume.marks())
        self.files.close()
        self.metadata.close()

    def reopened(self, *, clean: bool = False) -> Opened:
        self.close(clean=clean)
        return Opened(self.folder, segment_bytes=self.volume.segment_bytes)


@pytest.fixture
def log(tmp_path: Path) -> Opened:
    return Opened(tmp_path)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


# -- records


def test_one_crc_proves_a_run_of_records_and_each_alone() -> None:
    records = [b"".join(pack(MARKER, events(1), n, n + 1, bytes(n))) for n in range(50)]
    for data in (*records, b"".join(records)):
        assert not scan(Buffer(data).read, len(data), MARKER).damage
    everything = bytearray(b"".join(records))
    at = sum(map(len, records[:20])) + 33
    everything[at] ^= 1
    found = scan(Buffer(bytes(everything)).read, len(everything), MARKER)
    begin = sum(map(len, records[:20]))
    assert found.damage == [(begin, begin + len(records[20]))]
    assert found.headers["last"].tolist() == [n + 1 for n in range(50) if n != 20]
    assert RESIDUE == 0x48674BC7


def test_a_payload_cannot_pass_for_a_record() -> None:
    """Behind damage the scan looks for the file's own marker, which no publisher knows."""
    forged = b"".join(pack(MARKER + 2, events(1), 5, 6, b"forged"))
    records = pack(MARKER, events(1), 0, 1, forged) + pack(MARKER, events(1), 1, 2, b"real")
    data = bytearray(b"".join(records))
    data[8] ^= 1
    found = scan(Buffer(bytes(data)).read, len(data), MARKER)
    assert found.headers["last"].tolist() == [2]


def test_names_carry_number_and_marker() -> None:
    assert parse_name(segment_name(12, MARKER)) == (12, MARKER)
    for other in ("postroad.db", "000000000012.log", f"{segment_name(1, 2)}{ASIDE}", "x" * 25, ""):
        assert parse_name(other) is None


def test_a_record_larger_than_a_scan_step(log: Opened) -> None:
    log.append(1, [(0, 1)], size=5_000_000)
    log.append(1, [(1, 2)])
    log = log.reopened()
    assert log.states()[1].records == 2
    assert [len(data) for _, _, data in log.read(1).records] == [5_000_000, 100]
    log.close()


def test_each_kind_has_ids_of_its_own(log: Opened) -> None:
    """Also the greatest ones, and whatever their bits."""
    names = [LogStream(kind, id) for kind in StreamKind for id in (0, 1 << 31, (1 << 64) - 1)]
    for tick, name in enumerate(names, 1):
        append = Append(stream=name, first=0, last=tick, data=str(name).encode(), tag=0)
        log.volume.publish(log.volume.write([append]))
    log.volume.chop(names[4], 5)
    log.save_chops()
    log = log.reopened(clean=True)
    assert log.volume.recovered.streams.keys() == set(names)
    for tick, name in enumerate(names, 1):
        done = log.volume.read(Read(stream=name, start=0, end=99, limit_bytes=99, tag=0))
        assert [data.decode() for _, _, data in done.records] == ([] if tick == 5 else [str(name)])
        assert log.volume.recovered.streams[name].last == tick
    log.close()


def unversioned_record(marker: int, stream: int, first: int, last: int, data: bytes) -> bytes:
    """As the version before wrote it: a stream was a number, with a bit set for filtering records."""
    header = struct.pack("<IIQqq", marker, len(data), stream, first, last)
    return header + data + extend(RESIDUE, header + data).to_bytes(4, "little")


def test_a_log_of_the_version_before_is_read_and_appended_to(tmp_path: Path) -> None:
    pubend = 7 << 32 | 3
    path = tmp_path / "log" / segment_name(1, MARKER)
    path.parent.mkdir()
    old = [
        unversioned_record(MARKER | OPENS_COMMIT, pubend, 0, 5, b"event"),
        unversioned_record(MARKER, pubend | 0x8000_0000, 0, 6, b"filtered"),
        unversioned_record(MARKER | OPENS_COMMIT, pubend, 5, 9, b"x" * 3000),
    ]
    path.write_bytes(b"".join(old))
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database, database:
        database.execute(
            "CREATE TABLE facts (name TEXT NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL,"
            " PRIMARY KEY (name, key)) STRICT, WITHOUT ROWID"
        )
        for table, stream, tick in (
            ("log.lasts", pubend, 9),
            ("log.lasts", pubend | 0x8000_0000, 6),
            ("log.chops", pubend, 5),
        ):
            row = (table, stream.to_bytes(8, "big"), tick.to_bytes(8, "big"))
            database.execute("INSERT INTO facts VALUES (?, ?, ?)", row)
        database.execute("PRAGMA user_version = 1")
    filtering = LogStream(StreamKind.FILTERING, pubend)
    log = Opened(tmp_path)
    for _ in range(2):
        assert not log.volume.recovered.damage
        assert not log.volume.recovered.lost
        assert {name: one.last for name, one in log.volume.recovered.streams.items()} == {
            events(pubend): 9,
            filtering: 6,
        }
        assert log.read(pubend, 0).records == ((5, 9, b"x" * 3000),)
        assert log.read(pubend, 0).missing == ((0, 5),)
        done = log.volume.read(Read(stream=filtering, start=0, end=9, limit_bytes=99, tag=0))
        assert done.records == ((0, 6, b"filtered"),)
        log = log.reopened(clean=True)
    log.append(pubend, [(9, 10)])
    assert len(log.segments()) == 1, "behind the old records"
    log = log.reopened(clean=True)
    assert log.lasts(pubend) == [9, 10]
    log.append(pubend, [(10, 11)], size=4000)
    log.chop(pubend, 10)
    log.tidy()  # what lives of the old file is copied as it is written today
    assert path not in log.segments()
    log = log.reopened()
    assert log.lasts(pubend) == [11]
    assert log.volume.recovered.streams[filtering].records == 1
    log.close()


# -- reading


def test_reads_are_by_tick_range_and_limit(log: Opened) -> None:
    log.append(1, [(n * 10, n * 10 + 10) for n in range(100)])
    log.append(2, [(0, 5)])
    found = log.read(1, 95, 131)
    assert [(first, last) for first, last, _ in found.records] == [
        (90, 100),
        (100, 110),
        (110, 120),
        (120, 130),
        (130, 140),
    ]
    assert (found.tag, found.missing, found.more) == (9, (), False)
    found = log.read(1, 0, 1000, limit=150)
    assert ([last for _, last, _ in found.records], found.more) == ([10, 20], True)
    assert len(log.read(1, 0, 1000, limit=0).records) == 1
    assert log.read(1, 1000, 2000).records == ()
    assert log.read(3).missing == ()  # a stream nobody heard of
    log.close()


def test_what_no_record_covers_is_missing_up_to_the_last_tick(log: Opened) -> None:
    log.append(1, [(0, 10), (10, 20), (25, 30)])
    assert log.read(1, 0, 1000).missing == ((20, 25),)
    assert log.read(1, 22, 24).missing == ((22, 24),)
    assert log.read(1, -5, 28).missing == ((-5, 0), (20, 25))
    log.close()


def test_written_is_not_readable_before_it_is_synced(log: Opened) -> None:
    block = log.volume.write([Append(stream=events(1), first=0, last=1, data=b"x", tag=0)])
    assert log.read(1).records == ()
    log.volume.publish(block)
    assert log.read(1).records == ((0, 1, b"x"),)
    log.close()


@pytest.mark.parametrize(("first", "last"), [(4, 6), (5, 5), (9, 8)])
def test_ticks_of_a_stream_only_increase(log: Opened, first: int, last: int) -> None:
    log.append(1, [(0, 5)])
    with pytest.raises(BugError, match="cannot follow 5 in stream"):
        log.append(1, [(first, last)])
    log.append(1, [(5, 6)])
    assert log.lasts(1) == [5, 6]
    log.close()


def test_many_segments_need_few_open_files(log: Opened) -> None:
    for n in range(MAX_OPEN_FILES + 40):
        log.append(1, [(n, n + 1)], size=4000)
    assert len(log.segments()) == MAX_OPEN_FILES + 40
    assert len(log.lasts(1)) == MAX_OPEN_FILES + 40
    assert len(log.files._handles) <= MAX_OPEN_FILES
    log.close()


# -- recovery


def test_a_restart_knows_every_stream(log: Opened) -> None:
    for n in range(50):
        log.append(1, [(n, n + 1)])
        log.append(1 << 63, [(-n - 50, -n - 49)] if n == 0 else [(n, n + 1)])
    log.chop(1, 7)
    log = log.reopened()
    states = log.states()
    assert (states[1].last, states[1].chopped, states[1].records) == (50, 7, 50)
    assert (states[1 << 63].last, states[1 << 63].chopped) == (50, None)
    assert not any(state.suspect for state in states.values())
    assert log.volume.recovered.damage == ()
    assert log.read(1, 0).missing == ((0, 7),)
    log.append(1, [(50, 51)])
    assert log.lasts(1)[-1] == 51
    log.close()


@pytest.mark.parametrize("kept", [0, 1, 31, 35, 36, 135])
def test_a_torn_tail_is_cut_off_and_reported(log: Opened, kept: int) -> None:
    log.append(1, [(0, 1)])
    size = log.segments()[0].stat().st_size
    log.append(1, [(1, 2)])
    log.close()
    path = log.segments()[0]
    path.write_bytes(path.read_bytes()[: size + kept] + b"\x00\xff" * (kept % 3))
    log = Opened(log.folder)
    if kept or kept % 3:
        (damage,) = log.volume.recovered.damage
        assert (damage.torn, damage.file, damage.offset) == (True, path.name, size)
        assert f"{path.name}: the torn end" in str(damage)
    assert path.stat().st_size == size
    assert not log.states()[1].suspect
    log.append(1, [(1, 2)])
    assert log.reopened().lasts(1) == [1, 2]


def test_a_flipped_bit_costs_one_record(log: Opened) -> None:
    for n in range(40):
        log.append(1 + n % 2, [(n, n + 2)])
    path = log.segments()[0]
    flip(path, 5 * (100 + OVERHEAD) + 60)
    log = log.reopened()
    (damage,) = log.volume.recovered.damage
    assert (damage.file, damage.offset, damage.length) == (path.name, 5 * (100 + OVERHEAD), 100 + OVERHEAD)
    assert (damage.torn, damage.stream) == (False, events(2))
    assert log.read(2).missing == ((-1, 1), (5, 7))
    assert len(log.lasts(2)) == 19
    assert len(log.lasts(1)) == 20
    assert not any(state.suspect for state in log.states().values())
    log.close()


def test_damage_behind_the_last_record_makes_its_stream_suspect(log: Opened) -> None:
    """Else the next append would cover acknowledged, lost ticks with silence."""
    log.append(1, [(0, 1), (1, 2)])
    log.append(2, [(0, 1)])
    log.append(3, [(0, 1)])
    path = log.segments()[0]
    flip(path, (100 + OVERHEAD) + 50)
    log = log.reopened()
    assert {n: s.suspect for n, s in log.states().items()} == {1: True, 2: False, 3: False}
    assert log.states()[1].last == 1
    log.append(1, [(5, 6)])
    assert log.read(1, 0).missing == ((1, 5),)
    log.close()


def test_after_a_clean_close_a_flip_in_the_last_record_is_no_torn_tail(log: Opened) -> None:
    log.append(1, [(0, 1)])
    log.append(1, [(1, 2)])
    log.close(clean=True)
    flip(log.segments()[0], 100 + OVERHEAD + 50)
    log = Opened(log.folder)
    (damage,) = log.volume.recovered.damage
    assert (damage.torn, damage.stream) == (False, events(1))
    assert not log.states()[1].suspect, "nothing followed the tick that was noted"
    assert (log.states()[1].last, log.read(1, 0).missing) == (2, ((1, 2),))
    log.append(1, [(3, 4)])
    assert len(log.segments()) == 2  # nothing is written behind damage
    log = log.reopened()
    assert (log.lasts(1), log.read(1, 0).missing) == ([1, 4], ((1, 3),))
    log.close()


def test_a_stream_is_suspect_by_damage_behind_the_mark_until_something_is_appended_to_it(log: Opened) -> None:
    log.append(1, [(0, 1)])
    log.append(2, [(0, 1)])
    log.metadata.commit(log.volume.marks())
    log.append(1, [(1, 2)])
    log.append(2, [(1, 2)])
    record = 100 + OVERHEAD
    flip(log.segments()[0], 2 * record + 50)
    for clean in (False, True, True):  # a mark behind the damage makes nobody forget it
        log = log.reopened(clean=clean)
        states = log.states()
        assert {n: (s.last, s.suspect) for n, s in states.items()} == {1: (1, True), 2: (2, False)}
    log.append(1, [(5, 6)])
    log = log.reopened(clean=True)
    assert not log.states()[1].suspect
    flip(log.segments()[-1], 50)
    log = log.reopened(clean=True)
    assert (log.states()[1].last, log.states()[1].suspect) == (6, False)
    assert log.read(1, 0).missing == ((1, 6),)
    assert log.metadata.load("log.suspects") == {}
    log.close()


@pytest.mark.parametrize("harm", ["cut", "emptied", "removed"])
def test_a_tail_that_is_gone_is_reported_and_missing(log: Opened, harm: str) -> None:
    """D12: nobody sees that the end is missing but by what metadata noted."""
    record = 100 + OVERHEAD
    log.append(1, [(0, 10)])
    log.append(2, [(0, 10)])
    log.append(1, [(10, 20)])
    log.close(clean=True)
    (path,) = log.segments()
    left = {"cut": 2 * record, "emptied": 0, "removed": 0}[harm]
    if harm == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:left])
    for _ in range(2):  # a start that appended nothing forgets nothing
        log = Opened(log.folder)
        (damage,) = log.volume.recovered.damage
        assert (damage.file, damage.offset, damage.length) == (path.name, left, 3 * record - left)
        assert f"records that were synced are gone: {damage.length} bytes at offset {left}" in str(damage)
        lost = {one.stream.id: (max(one.start, 0), one.end) for one in log.volume.recovered.lost}
        assert lost == ({1: (10, 20)} if harm == "cut" else {1: (0, 20), 2: (0, 10)})
        states = log.states()
        assert [(states[one].last, states[one].suspect) for one in (1, 2)] == [(20, True), (10, True)]
        assert log.read(1, 0).missing == (lost[1],)
        log.close(clean=True)
    log = Opened(log.folder)
    log.append(1, [(25, 30)])
    assert log.segments()[-1].name > path.name  # not under the number of what is gone
    log = log.reopened(clean=True)
    assert not log.volume.recovered.damage
    assert log.read(1, 0).missing == ((lost[1][0], 25),)
    assert log.read(2, 0).missing == (() if harm == "cut" else ((0, 10),))
    log.close()


def test_a_file_gone_from_the_middle_is_missed_by_streams_that_ended_in_it(log: Opened) -> None:
    for stream in (1, 2, 3):
        log.append(stream, [(0, 10)], size=4000)
    log.close(clean=True)
    log.segments()[1].unlink()
    log = Opened(log.folder)
    assert [str(one) for one in log.volume.recovered.lost] == [
        "stream events 0000000000000002: synced ticks to 10 are gone"
    ]
    assert [log.read(stream, 0).missing for stream in (1, 2, 3)] == [(), ((0, 10),), ()]
    log.close()


def test_what_was_reclaimed_after_the_mark_is_not_taken_for_gone(log: Opened) -> None:
    log.append(1, [(0, 10)])
    log.append(2, [(0, 10)])
    log.metadata.commit(log.volume.marks())
    log.append(2, [(10, 20)], size=4000)
    log.chop(1, 10)
    log.chop(2, 10)
    log.tidy()
    assert len(log.segments()) == 1
    log = log.reopened()
    assert not log.volume.recovered.damage
    assert not log.volume.recovered.lost
    log.append(1, [(10, 30)])
    log.chop(2, MAX_TICK)
    log = log.reopened(clean=True)
    assert not log.volume.recovered.lost
    log.close()


def test_a_file_without_a_single_good_record_is_kept(log: Opened) -> None:
    """It may have been renamed by mistake; nothing in it was released."""
    log.append(1, [(0, 1)], size=4000)
    log.append(2, [(-1, 0)], size=4000)
    path = log.segments()[0]
    wrong = path.with_name(segment_name(1, 0xABCD))
    path.rename(wrong)
    log.close()
    for _ in range(2):
        later = Opened(log.folder)
        later.append(2, [(n, n + 1) for n in later.lasts(2)[-1:]])
        later.tidy()
        assert wrong in later.segments()
        later.close()
    wrong.rename(path)
    again = Opened(log.folder)
    assert again.lasts(1) == [1]
    again.close()


def test_damage_found_by_a_read_is_missing_and_reported(log: Opened) -> None:
    log.append(1, [(n, n + 1) for n in range(10)])
    flip(log.segments()[0], 3 * (100 + OVERHEAD) + 50)
    assert log.read(1, 0).missing == ((3, 4),)
    assert log.volume.damage[0].offset == 3 * (100 + OVERHEAD)
    (path,) = log.segments()
    path.unlink()
    log.files._drop(path.name)
    assert log.read(1, 0).missing == ((0, 10),)
    log.close()


def test_other_files_in_the_folder_are_left_alone(log: Opened) -> None:
    log.append(1, [(0, 1)])
    (log.folder / "log" / "notes.txt").write_text("mine")
    (log.folder / "log" / f"junk{ASIDE}").write_text("half of a rewrite")
    log = log.reopened()
    assert log.lasts(1) == [1]
    assert (log.folder / "log" / "notes.txt").read_text() == "mine"
    assert not (log.folder / "log" / f"junk{ASIDE}").exists()
    log.close()


# -- chops and space (D7)


def test_a_chopped_file_is_removed_after_the_chop_is_saved(log: Opened) -> None:
    for n in range(100):
        log.append(1, [(n, n + 1)])
    before = len(log.segments())
    log.volume.chop(events(1), 99)
    log.tidy()
    assert (len(log.segments()), log.lasts(1)) == (before, [100])
    log.save_chops()
    log.tidy()
    assert len(log.segments()) == 1
    log = log.reopened()
    assert log.states()[1].last == 100
    assert log.read(1, 0).missing == ((0, 99),)
    log.close()


def test_the_last_tick_outlives_the_last_record(log: Opened) -> None:
    for n in range(100):
        log.append(1, [(n, n + 1)])
    for n in range(100):
        log.append(2, [(n, n + 1)])
    log.chop(1, 100)
    log.tidy()
    log = log.reopened()
    state = log.states()[1]
    assert (state.last, state.records < 100) == (100, True)
    log.close()


def test_a_stream_that_is_over_leaves_nothing_behind(log: Opened) -> None:
    for stream in (1, 2, 3):
        for n in range(100):
            log.append(stream, [(n, n + 1)])
    log.chop(1, MAX_TICK)
    with pytest.raises(BugError):
        log.append(1, [(200, 201)])
    log.tidy()
    log.save_chops()
    assert len(log.metadata.load(CHOPS)) == 1  # a file of stream 2 still holds some of it
    log.chop(2, 50)
    log.tidy()
    log.save_chops()
    assert list(log.metadata.load(CHOPS)) == [bytes([StreamKind.EVENTS]) + (2).to_bytes(8, "big")]
    log = log.reopened()
    assert sorted(log.states()) == [2, 3]
    log.append(1, [(0, 1)])
    assert log.lasts(1) == [1]
    log.close()


def test_a_stream_with_few_records_does_not_pin_old_files(log: Opened) -> None:
    """A nearly dead file is rewritten with what is alive, in order and under the same ticks."""
    ticks = iter(range(10_000))
    for round_ in range(40):
        log.append(9, [(round_, round_ + 1)], size=20)
        for n in (next(ticks) for _ in range(28)):
            log.append(1, [(n, n + 1)])
    log.append(1, [(20_000, 20_001)])
    before = sum(path.stat().st_size for path in log.segments())
    log.chop(1, 20_000)
    log.tidy()
    after = sum(path.stat().st_size for path in log.segments())
    assert after < before / 10
    assert len(log.segments()) < 2 + log_module.MERGE_FILES
    assert log.lasts(9) == list(range(1, 41))
    log = log.reopened()
    assert log.lasts(9) == list(range(1, 41))
    assert log.read(9, 0).missing == ()
    assert log.volume.recovered.damage == ()
    log.close()


def test_a_rewrite_that_a_crash_cut_short_is_seen_by_its_ticks(
    log: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file is there and the old ones still are: every record twice, served once."""
    for n in range(60):
        log.append(9, [(n, n + 1)], size=1)
        log.append(1, [(n, n + 1)], size=1000)
    log.chop(1, 59)
    monkeypatch.setattr(log.files, "remove", lambda _names: None)
    log.tidy()
    doubled = len(log.segments())
    log = log.reopened()
    assert log.lasts(9) == list(range(1, 61))
    assert log.lasts(1) == [60]
    log.tidy()
    assert len(log.segments()) < doubled
    log = log.reopened()
    assert log.lasts(9) == list(range(1, 61))
    log.close()


def test_a_rewrite_without_room_is_given_up(log: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(60):
        log.append(9, [(n, n + 1)], size=1)
        log.append(1, [(n, n + 1)], size=1000)
    log.chop(1, 59)

    def full(_name: str, _parts: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log.files, "install", full)
    log.tidy()
    assert log.lasts(9) == list(range(1, 61))
    monkeypatch.undo()
    log.tidy()
    assert log.lasts(9) == list(range(1, 61))
    log.close()


def test_a_stream_chopped_while_its_file_is_rewritten_is_dead_in_the_new_one(
    log: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(12):
        log.append(8, [(n, n + 1)], size=1)
        log.append(9, [(n, n + 1)], size=1)
        log.append(1, [(n, n + 1)], size=1000)
    log.chop(1, 12)
    real = log.files.install

    def install(name: str, parts: list[bytes]) -> None:
        log.chop(9, 12)
        real(name, parts)

    monkeypatch.setattr(log.files, "install", install)
    log.tidy()
    log.chop(8, 12)
    log.tidy()
    assert len(log.segments()) == 1
    assert log.volume.stats()["log_live_bytes"] == 0
    log.close()


def test_reads_that_race_with_chops_and_rewrites_miss_ticks_but_never_fail(log: Opened) -> None:
    total, stop, errors = 3000, threading.Event(), []

    def read_on() -> None:
        while not stop.is_set():
            for stream in (1, 9):
                try:
                    found = log.read(stream, 0, limit=100_000)
                except BaseException as error:
                    errors.append(error)
                    return
                spans = sorted([(first, last) for first, last, _ in found.records] + list(found.missing))
                edges = [0, *(last for _, last in spans)]
                if any(first > edge for (first, _), edge in zip(spans, edges, strict=False)):
                    errors.append(AssertionError(f"ticks neither read nor missing: {spans}"))

    threads = [threading.Thread(target=read_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(total):
        log.append(1, [(n, n + 1)])
        if n % 20 == 0:
            log.append(9, [(n, n + 20)], size=1)
        if n % 100 == 99:
            log.chop(1, n - 50)
            log.volume.tidy()
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert not log.volume.damage
    assert log.read(9, 0).missing == ()
    log.close()


# -- metadata


def test_metadata_is_kept_beside_the_identity(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    first = folder.start("one")
    metadata = Metadata(tmp_path / DATABASE)
    metadata.commit([("a", [(b"k", b"1"), (b"l", b"2")]), ("b", [(b"k", b"3")]), ("a", [(b"l", None)])])
    metadata.close()
    folder.close()
    folder = DataFolder(tmp_path)
    assert folder.start(None).starts == first.starts + 1
    metadata = Metadata(tmp_path / DATABASE)
    assert (metadata.load("a"), metadata.load("b"), metadata.load("c")) == ({b"k": b"1"}, {b"k": b"3"}, {})
    metadata.close()
    folder.close()


def test_a_commit_of_metadata_is_all_or_nothing(tmp_path: Path) -> None:
    metadata = Metadata(tmp_path / "m.db")
    metadata._database.execute("PRAGMA max_page_count = 16")
    with pytest.raises(NoRoom, match="cannot write"):
        metadata.commit([("a", [(b"k", b"1")]), ("a", [(b"large", bytes(100_000))])])
    assert metadata.load("a") == {}
    metadata.close()
    (tmp_path / "bad.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StorageError, match="cannot read"):
        Metadata(tmp_path / "bad.db")
