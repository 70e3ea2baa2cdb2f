"""D1, D11, D12: group commit on its threads, a full disk, a failed sync; the same code on a virtual disk."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from random import Random

import pytest

from postroad.errors import BugError, StorageError
from postroad.seam.storage import (
    Append,
    Appended,
    AppendFailed,
    Chop,
    LogStream,
    Read,
    ReadDone,
    Save,
    Saved,
    SaveFailed,
    StorageEffect,
    StorageInput,
    StreamKind,
)
from postroad.sim.machine.disk import CrashStyle, Disk
from postroad.sim.machine.storage import VirtualStorage
from postroad.sim.machine.world import World
from postroad.storage.commit import LOG_FOLDER, GroupCommit, Storage, commit_once
from postroad.storage.files import NOTE, OsFiles
from postroad.storage.identity import DATABASE, DataFolder
from postroad.storage.log import FILES, LogVolume
from postroad.storage.metadata import Metadata
from postroad.storage.recovery import decode_mark
from postroad.storage.segment import OVERHEAD
from postroad.units import MIB


def events(id: int) -> LogStream:
    return LogStream(StreamKind.EVENTS, id)


class Driver:
    """What net/ does: performs effects, hears outcomes."""

    def __init__(self, folder: Path, **options: int) -> None:
        self.folder = folder
        self.options = options
        self.signal = threading.Event()
        self.storage = Storage(folder, wake=self.signal.set, **options)  # type: ignore[arg-type]
        self.heard: list[StorageInput] = []

    def do(self, *effects: StorageEffect) -> list[StorageInput]:
        """Perform and wait until every effect is answered."""
        self.storage.perform(effects)
        return self.wait(sum(not isinstance(one, Chop) for one in effects))

    def wait(self, count: int) -> list[StorageInput]:
        outcomes: list[StorageInput] = []
        while len(outcomes) < count:
            assert self.signal.wait(20)
            self.signal.clear()
            outcomes += self.storage.take()
        return outcomes

    def read(self, stream: int, start: int = 0) -> ReadDone:
        (done,) = self.do(Read(stream=events(stream), start=start, end=1 << 40, limit_bytes=1 << 30, tag=77))
        assert isinstance(done, ReadDone)
        return done

    def reopened(self) -> Driver:
        self.storage.close()
        return Driver(self.folder, **self.options)


class Stepped:
    """Group commit on real files without threads, one commit at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = Metadata(folder / DATABASE)
        self.files = OsFiles(folder / LOG_FOLDER)
        self.volume = LogVolume(self.files, self.metadata, draw_marker=lambda: 0x1234ABCD)
        self.group = GroupCommit(self.volume, commit_bytes=1000)

    def commit(self) -> bool:
        return commit_once(self.group, self.files, self.metadata) is not None

    def close(self) -> None:
        self.files.close()
        self.metadata.close()


@pytest.fixture
def stepped(tmp_path: Path) -> Stepped:
    return Stepped(tmp_path)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def record(tick: int, *, stream: int = 1, size: int = 100) -> Append:
    return Append(stream=events(stream), first=tick - 1, last=tick, data=bytes([tick & 255]) * size, tag=tick)


def save(tag: int, value: bytes = b"v") -> Save:
    return Save(table="t", rows=((b"k", value),), tag=tag)


def until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.01)


# -- on threads


def test_outcomes_come_in_order_and_are_durable(driver: Driver) -> None:
    outcomes = driver.do(*(record(tick) for tick in range(1, 501)), save(501), record(502))
    assert outcomes == [*(Appended(tag=tick) for tick in range(1, 501)), Saved(tag=501), Appended(tag=502)]
    driver = driver.reopened()
    assert driver.storage.recovered.streams[events(1)].last == 502
    assert driver.storage.recovered.damage == ()
    assert driver.storage.load("t") == {b"k": b"v"}
    assert len(driver.read(1).records) == 501
    driver.storage.close()


def test_what_came_while_a_sync_ran_is_the_next_commit(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go = threading.Event(), threading.Event()

    def slow(_name: str) -> None:
        entered.set()
        assert go.wait(20)

    monkeypatch.setattr(driver.storage._files, "sync", slow)
    driver.storage.perform([record(1)])
    assert entered.wait(20)
    for tick in range(2, 100):
        driver.storage.perform([record(tick)])
    assert driver.storage.take() == []
    go.set()
    assert driver.wait(99) == [Appended(tag=tick) for tick in range(1, 100)]
    assert driver.storage.stats()["log_commits_total"] == 2
    driver.storage.close()


def test_commits_are_capped(stepped: Stepped) -> None:
    stepped.group.submit([record(tick, size=500) for tick in range(1, 21)])
    while stepped.commit():
        pass
    assert len(stepped.group.take()) == 20
    assert stepped.group.commits == 10
    stepped.close()


def test_close_finishes_what_was_asked_for(driver: Driver) -> None:
    driver.storage.perform([record(tick) for tick in range(1, 1001)])
    driver.storage.perform([Chop(stream=events(1), tick=10), save(2000)])
    driver.storage.close()
    assert len(driver.storage.take()) == 1001
    driver = Driver(driver.folder)
    assert driver.read(1).missing == ((0, 10),)
    assert driver.read(1).records[-1][1] == 1000
    driver.storage.close()


def test_chops_reclaim_space_by_themselves(tmp_path: Path) -> None:
    driver = Driver(tmp_path, segment_bytes=10_000, commit_bytes=2000)
    driver.do(*(record(tick) for tick in range(1, 1001)))
    assert driver.storage.stats()["log_segments"] > 10
    driver.storage.perform([Chop(stream=events(1), tick=1000)])
    until(lambda: len(list((tmp_path / "log").glob("*.log"))) == 1)
    driver = driver.reopened()
    assert driver.storage.recovered.streams[events(1)].last == 1000
    driver.storage.close()


def test_an_unusable_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("not a folder")
    with pytest.raises(StorageError, match="cannot use"):
        Storage(tmp_path, wake=lambda: None)


# -- failures


def test_a_bug_on_a_thread_reaches_the_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_wanted: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(driver.storage.volume, "read", fail)
    with pytest.raises(BugError, match="a thread of the storage died"):
        driver.read(1)
    driver.storage.close()


def test_a_bad_append_fails_its_commit_and_nothing_else(driver: Driver) -> None:
    driver.do(record(5))
    (outcome,) = driver.do(record(3))
    assert isinstance(outcome, AppendFailed)
    assert isinstance(outcome.error, BugError)
    assert driver.do(record(6)) == [Appended(tag=6)]
    driver.storage.close()


def test_a_failed_sync_is_final(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may drop what it could not write and report success the next time."""
    driver.do(record(1))

    def fail(_name: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(driver.storage._files, "sync", fail)
    outcomes = driver.do(record(2), save(3))
    assert [type(one) for one in outcomes] == [AppendFailed, SaveFailed]
    assert isinstance(outcomes[0], AppendFailed)
    assert "takes no more until a restart" in str(outcomes[0].error)
    monkeypatch.undo()
    assert [type(one) for one in driver.do(record(2), save(3))] == [AppendFailed, SaveFailed]
    assert driver.storage._group.broken is not None
    assert driver.read(1).records == ((0, 1, b"\x01" * 100),)  # what was acknowledged stays readable
    driver = driver.reopened()
    assert driver.storage.recovered.streams[events(1)].last == 1  # what failed does not come back
    assert driver.do(record(2)) == [Appended(tag=2)]
    driver.storage.close()


def test_what_was_asked_for_before_a_failure_was_heard_fails_too(
    stepped: Stepped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may build on the append that failed; afterwards everything goes on."""
    group, real = stepped.group, stepped.files.write

    def fill(name: str, at: int, parts: Sequence[bytes]) -> None:
        real(name, at, parts[:2])
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(stepped.files, "write", fill)
    group.submit([record(1), save(2)])
    stepped.commit()
    monkeypatch.undo()
    group.submit([record(3), save(4), Chop(stream=events(1), tick=0)])
    stepped.commit()
    outcomes = group.take()
    assert [(type(one), one.tag) for one in outcomes] == [
        (AppendFailed, 1),
        (SaveFailed, 2),
        (AppendFailed, 3),
        (SaveFailed, 4),
    ]
    assert isinstance(outcomes[0], AppendFailed)
    assert "File too large" in str(outcomes[0].error)
    group.submit([record(1), save(5)])
    stepped.commit()
    assert group.take() == [Appended(tag=1), Saved(tag=5)]
    stepped.close()
    driver = Driver(stepped.folder)
    assert driver.storage.recovered.damage == ()
    assert [last for _, last, _ in driver.read(1).records] == [1]
    driver.storage.close()


def test_on_a_full_disk_appends_fail_and_saves_do_not(
    stepped: Stepped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What releases events must not fail for those who go on publishing."""
    group = stepped.group

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stepped.files, "write", fill)
    group.submit([record(1), save(2)])
    stepped.commit()
    monkeypatch.undo()
    group.submit([record(3), save(4)])  # there is room again, but nobody heard of the failure
    stepped.commit()
    outcomes = group.take()
    assert sorted((one.tag, type(one).__name__) for one in outcomes) == [
        (1, "AppendFailed"),
        (2, "Saved"),
        (3, "AppendFailed"),
        (4, "Saved"),
    ]
    group.submit([record(1)])
    stepped.commit()
    assert group.take() == [Appended(tag=1)]
    stepped.close()


def test_a_log_that_cannot_be_put_back_takes_no_more(
    stepped: Stepped, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(stepped.files, "write", fail)
    monkeypatch.setattr(stepped.files, "cut", fail)
    stepped.group.submit([record(1)])
    stepped.commit()
    monkeypatch.undo()
    assert stepped.group.broken is not None
    stepped.group.take()
    stepped.group.submit([record(1)])
    stepped.commit()
    assert [type(one) for one in stepped.group.take()] == [AppendFailed]
    stepped.close()


def test_metadata_that_cannot_be_committed_fails_the_saves_and_keeps_the_chops(
    stepped: Stepped, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_changes: object) -> None:
        raise StorageError("database or disk is full")

    monkeypatch.setattr(stepped.metadata, "commit", fail)
    stepped.group.submit([record(1), record(2), save(3), Chop(stream=events(1), tick=1)])
    stepped.commit()
    assert [type(one) for one in stepped.group.take()] == [Appended, Appended, SaveFailed]
    monkeypatch.undo()
    stepped.group.submit([save(4)])
    stepped.commit()
    assert stepped.group.take() == [Saved(tag=4)]
    stepped.close()
    driver = Driver(stepped.folder)
    assert driver.storage.recovered.streams[events(1)].chopped == 1
    driver.storage.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("cannot mount a small file system here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def fill_up(driver: Driver) -> list[int]:
    """Append until the disk is full; the ticks that were acknowledged."""
    for tick in range(1, 10_000):
        (outcome,) = driver.do(record(tick, size=50_000))
        if isinstance(outcome, AppendFailed):
            assert isinstance(outcome.error, StorageError)
            assert "No space left on device" in str(outcome.error)
            return list(range(1, tick))
    raise AssertionError


def stuff(folder: Path) -> None:
    """Somebody else writes to the disk what it holds."""
    with (folder / "stuff").open("ab", buffering=0) as file:
        for size in (100_000, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


def test_a_full_disk_refuses_and_recovers_by_itself(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """D12: Appends are refused; what releases is saved, and the file that was written to is reclaimed too."""
    driver = Driver(small_disk)
    acknowledged = fill_up(driver)
    assert len(acknowledged) > 200
    assert [last for _, last, _ in driver.read(1).records] == acknowledged
    again, saved = driver.do(record(900), save(901))
    assert isinstance(again, AppendFailed)
    assert "the disk is full: nothing is appended to the log before 16 MiB are free" in str(again.error)
    assert saved == Saved(tag=901)
    driver.storage.perform([Chop(stream=events(1), tick=acknowledged[-1])])
    until(lambda: driver.do(record(900)) == [Appended(tag=900)])
    assert driver.do(record(901)) == [Appended(tag=901)]
    said = [one.message for one in caplog.records]
    assert [text.split(":")[0] for text in said] == ["the disk is full", "the disk has room again"]
    driver = driver.reopened()
    assert driver.storage.recovered.damage == ()
    assert driver.storage.recovered.streams[events(1)].last == 901
    driver.storage.close()


def test_a_limit_on_the_size_of_files_is_no_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * MIB, hard))
    try:
        driver = Driver(tmp_path)
        (failed,) = driver.do(record(1))
        driver.storage.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(failed, AppendFailed)
    why = "the ballast of 8 MiB cannot be made: File too large"
    assert str(failed.error) == f"{why}: nothing is appended to the log"
    assert [one.message for one in caplog.records] == [
        f"{why}: durable events are refused, acknowledgements and reads go on"
    ]


def test_a_broker_starts_on_a_disk_that_others_filled(small_disk: Path) -> None:
    """D12: The ballast is given up for the count of starts, then for what releases events."""
    folder = DataFolder(small_disk)
    folder.start("b1")
    folder.close()
    driver = Driver(small_disk)
    driver.do(*(record(tick, size=1000) for tick in range(1, 11)))
    driver.storage.close()
    stuff(small_disk)
    folder = DataFolder(small_disk)
    assert folder.start(None).starts == 2
    driver = Driver(small_disk)
    assert driver.storage.shortage()
    assert [type(one) for one in driver.do(record(11), save(12))] == [AppendFailed, Saved]
    assert len(driver.read(1).records) == 10
    (small_disk / "stuff").unlink()
    assert driver.do(record(11)) == [Appended(tag=11)]
    assert not driver.storage.shortage()
    stuff(small_disk)
    assert all(driver.do(save(tag, bytes(3000))) == [Saved(tag=tag)] for tag in range(20, 120))
    driver.storage.close()
    folder.close()


# -- what is gone from the disk, however the process ended


def killed(driver: Driver) -> Path:
    """The data folder as a kill -9 leaves it at this moment."""
    copy = driver.folder.with_name("killed")
    shutil.copytree(driver.folder, copy)
    driver.storage.close()
    return copy


def files(folder: Path) -> list[Path]:
    return sorted((folder / LOG_FOLDER).glob("*.log"))


@pytest.fixture
def small_files(tmp_path: Path) -> Driver:
    """Three full files and the one that is written to, all of one stream, and nothing saved by anybody."""
    (tmp_path / "data").mkdir()
    driver = Driver(tmp_path / "data", segment_bytes=4096)
    for tick in range(1, 101):
        driver.do(record(tick))
    return driver


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("harm", ["removed", "cut"])
def test_any_file_that_is_gone_or_cut_is_reported(small_files: Driver, at: int, harm: str) -> None:
    """Also from the middle, where its stream goes on behind it, and also when it ends with a whole record."""
    folder = killed(small_files)
    assert len(files(folder)) == 4
    path, whole = files(folder)[at], files(folder)[at].stat().st_size
    left = 0 if harm == "removed" else 5 * (100 + OVERHEAD)
    if harm == "removed":
        path.unlink()
    else:
        os.truncate(path, left)
    for _ in range(2):  # the next start says so again
        driver = Driver(folder, segment_bytes=4096)
        (damage,) = driver.storage.recovered.damage
        assert str(damage) == (
            f"{path.name}: records that were synced are gone: {whole - left} bytes at offset {left}"
        )
        state = driver.storage.recovered.streams[events(1)]
        ticks = {last for _, last, _ in driver.read(1).records}
        assert len(ticks) == 100 - (whole - left) // (100 + OVERHEAD)
        missing = {tick for first, last in driver.read(1).missing for tick in range(first + 1, last + 1)}
        assert state.suspect == (at == 3)
        assert ticks | missing >= set(range(1, 101 if at < 3 else state.last + 1))
        driver.storage.close()


def test_a_file_that_is_missed_is_missed_no_more_once_all_of_it_is_released(small_files: Driver) -> None:
    folder = killed(small_files)
    files(folder)[1].unlink()
    driver = Driver(folder, segment_bytes=4096)
    assert len(driver.storage.recovered.damage) == 1
    driver.do(Chop(stream=events(1), tick=90), record(101))
    driver.storage.close()
    driver = Driver(folder, segment_bytes=4096)
    assert driver.storage.recovered.damage == ()
    driver.storage.close()
    with closing(Metadata(folder / DATABASE)) as metadata:
        assert metadata.load(FILES).keys() <= {path.name.encode() for path in files(folder)}


@pytest.mark.parametrize("harm", [b"", b"nonsense", None])
def test_a_note_that_cannot_be_read_proves_nothing(
    small_files: Driver, harm: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not synced: a machine that stops may leave it empty. What it should have said is said."""
    folder = killed(small_files)
    note = folder / LOG_FOLDER / NOTE
    content = bytearray(note.read_bytes())
    content[20] ^= 1
    note.write_bytes(content if harm is None else harm)
    driver = Driver(folder, segment_bytes=4096)
    assert driver.storage.recovered.damage == ()
    assert len(driver.read(1).records) == 100
    driver.storage.close()
    assert ("the note beside the log is damaged" in caplog.text) == (harm != b"")
    assert decode_mark(note.read_bytes()) == (files(folder)[-1].name, files(folder)[-1].stat().st_size)


def test_a_flipped_bit_in_the_last_commit_before_a_kill_is_no_torn_end(tmp_path: Path) -> None:
    """It was acknowledged: cut off as a torn end, it would be lost in silence."""
    (tmp_path / "data").mkdir()
    driver = Driver(tmp_path / "data")
    driver.do(record(1))
    driver.do(record(2))
    folder = killed(driver)
    (path,) = files(folder)
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    again = Driver(folder)
    (damage,) = again.storage.recovered.damage
    assert (damage.torn, damage.stream) == (False, events(1))
    assert again.storage.recovered.streams[events(1)].suspect
    again.storage.close()


def test_what_lies_in_a_data_folder_is_its_owners(tmp_path: Path) -> None:
    """Whatever the umask says, and also what an earlier version left readable by all."""
    before = os.umask(0)
    try:
        folder = DataFolder(tmp_path / "data")
        folder.start("b1")
        driver = Driver(tmp_path / "data")
        driver.do(record(1), save(2))
        modes = {
            path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")
        }
        driver.storage.close()
        folder.close()
    finally:
        os.umask(before)
    names = {f"data/{name}" for name in (DATABASE, f"{DATABASE}-wal", "lock", "log/stamp", f"log/{NOTE}")}
    assert names <= modes.keys()
    assert {name: mode for name, mode in modes.items() if mode != 0o600} == {"data": 0o700, "data/log": 0o700}
    (tmp_path / "data" / DATABASE).chmod(0o644)
    DataFolder(tmp_path / "data").close()
    assert (tmp_path / "data" / DATABASE).stat().st_mode & 0o777 == 0o600


# -- the same code on the simulator's disk


def virtual(disk: Disk) -> VirtualStorage:
    """How a simulated process drives the same group commit, with virtual time passing during each sync."""
    return VirtualStorage(disk, wake=lambda: None, crash=lambda: None, segment_bytes=4000, commit_bytes=1500)


@pytest.mark.parametrize("seed", range(30))
def test_the_log_on_the_virtual_disk_keeps_what_it_acknowledged(seed: int) -> None:
    """D12: crashes tear and scatter what was not synced."""
    world = World(seed)
    disk, chance = Disk(world, "d"), Random(seed)
    acknowledged, asked, chopped = 0, 0, 0
    for _ in range(6):
        storage = virtual(disk)
        assert all(damage.torn for damage in storage.volume.recovered.damage)
        state = storage.volume.recovered.streams.get(events(1))
        last = state.last if state else 0
        assert acknowledged <= last <= asked
        asked = last
        for _ in range(chance.randint(1, 40)):
            count = chance.randint(1, 5)
            storage.perform([record(asked + n, size=chance.randint(0, 600)) for n in range(1, count + 1)])
            asked += count
            world.run(world.now_us + chance.randint(0, 800))
            for outcome in storage.group.take():
                assert isinstance(outcome, Appended)
                acknowledged = outcome.tag
            if acknowledged and chance.random() < 0.2:
                chopped = max(chopped, acknowledged - chance.randint(0, 30))
                storage.perform([Chop(stream=events(1), tick=chopped)])
        read = Read(stream=events(1), start=chopped, end=acknowledged, limit_bytes=MIB, tag=0)
        done = storage.volume.read(read)
        assert [one[1] for one in done.records] == list(range(chopped + 1, acknowledged + 1))
        storage.die()
        disk.crash(CrashStyle(scattered=chance.random() < 0.5, flip_chance=0.2))


@pytest.mark.parametrize("seed", range(40))
def test_damage_to_a_virtual_disk_is_never_silent(seed: int) -> None:
    """D12: a process is killed, a bit of the log changes, or some of it is gone. Whatever was acknowledged
    is read, or missing, or may have followed the last of a suspect stream; and the damage is said."""
    world = World(seed)
    disk, chance = Disk(world, "d"), Random(seed)
    storage = virtual(disk)
    acknowledged = {1: 0, 2: 0}
    for tick in range(1, chance.randint(2, 60)):
        stream = chance.choice([1, 2])
        storage.perform([record(tick, stream=stream, size=chance.randint(0, 600))])
        if chance.random() < 0.1:
            storage.perform([save(1000 + tick)])
        world.run(world.now_us + MIB)
        acknowledged[stream] = max(one.tag for one in storage.group.take() if isinstance(one, Appended))
    storage.die()
    disk.settle()
    file = chance.choice([one for one in disk.files() if one.endswith(".log")])
    at = chance.randrange(disk.size(file) or 1)
    if seed % 2:
        disk.rot(file, at)
    else:
        disk.shorten(file, at)
    volume = virtual(disk).volume
    assert {one.file for one in volume.recovered.damage if not one.torn} == {file}
    for stream, last in acknowledged.items():
        if last:
            state = volume.recovered.streams[events(stream)]
            assert state.last >= last or state.suspect
            done = volume.read(Read(stream=events(stream), start=0, end=last, limit_bytes=MIB, tag=0))
            covered = {*done.missing, *((first, until) for first, until, _ in done.records)}
            ticks = {tick for first, until in covered for tick in range(first + 1, until + 1)}
            assert ticks >= set(range(1, min(last, state.last) + 1))


def test_a_row_that_rots_on_a_virtual_disk_is_named() -> None:
    world = World(1)
    disk = Disk(world, "d")
    storage = virtual(disk)
    storage.perform([save(1, b"value of k")])
    world.run(world.now_us + MIB)
    storage.close()
    content = disk.read("facts")
    assert content is not None
    disk.rot("facts", content.index(b"value of k"))
    storage = virtual(disk)
    assert (storage.load("t", _row), storage.damaged("t")) == ({}, (b"k",))


def test_a_full_virtual_disk_fails_as_a_real_one() -> None:
    world = World(1)
    disk = Disk(world, "d")
    storage = virtual(disk)
    storage.perform([record(1)])
    world.run(world.now_us + 100_000)
    disk.fill()
    storage.perform([record(2)])
    world.run(world.now_us + 100_000)
    assert [type(one) for one in storage.group.take()] == [Appended, AppendFailed]
    disk.capacity *= 10
    storage.perform([record(2)])
    world.run(world.now_us + 100_000)
    assert storage.group.take() == [Appended(tag=2)]
    assert storage.group.broken is None


def test_room_is_found_by_whoever_only_asks(small_disk: Path) -> None:
    """Nothing durable is published: what else is written waits for no append that would look."""
    driver = Driver(small_disk)
    stuff(small_disk)
    assert [type(one) for one in driver.do(record(1, size=8 << 20))] == [AppendFailed]
    assert driver.storage.shortage()
    (small_disk / "stuff").unlink()
    give_up_s = time.monotonic() + 20
    while driver.storage.shortage():
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    driver.storage.close()


def test_a_start_on_a_full_virtual_disk_reads_and_saves() -> None:
    world = World(1)
    disk = Disk(world, "d")
    storage = virtual(disk)
    storage.perform([*(record(tick) for tick in range(1, 20)), save(50)])
    world.run(world.now_us + 100_000)
    disk.fill()
    storage.die()
    disk.crash(CrashStyle())
    storage = virtual(disk)
    storage.perform([save(51, bytes(1000)), record(20), Chop(stream=events(1), tick=10)])
    world.run(world.now_us + 100_000)
    assert [type(one) for one in storage.group.take()] == [Saved, AppendFailed]
    assert storage.volume.short
    storage.die()
    disk.crash(CrashStyle())
    storage = virtual(disk)
    assert storage.load("t", _row) == {b"k": bytes(1000)}
    assert storage.volume.recovered.streams[events(1)].chopped == 10
    disk.capacity *= 10
    storage.perform([record(20)])
    world.run(world.now_us + 100_000)
    assert storage.group.take() == [Appended(tag=20)]
    assert not storage.volume.short


def test_fsync_never_is_for_benchmarks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "fdatasync", calls.append)
    for policy, expected in (("never", False), ("always", True)):
        files = OsFiles(tmp_path / policy, sync=policy == "always")
        files.create("a")
        files.write("a", 0, [b"x"])
        files.sync("a")
        files.close()
        assert bool(calls) is expected


def test_damage_that_a_read_finds_is_said_once_with_its_place(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """D12.

    Subscribers hear of it as a gap: whoever runs the broker hears of it too, before the next start.
    """
    driver.do(*(record(tick) for tick in range(1, 11)))
    (path,) = (driver.folder / LOG_FOLDER).glob("*.log")
    with path.open("r+b") as file:
        for tick in (3, 7):
            file.seek(tick * (100 + OVERHEAD) + 50)
            file.write(b"?")
    for _ in range(2):
        assert driver.read(1).missing == ((3, 4), (7, 8))
    assert driver.read(1, 5).missing == ((7, 8),)
    size = 100 + OVERHEAD
    expected = [
        f"log: {path.name}: damaged records are lost: {size} bytes at offset {tick * size}" for tick in (3, 7)
    ]
    assert [one.getMessage() for one in caplog.records] == expected
    again = driver.reopened()
    assert [f"log: {one}" for one in again.storage.recovered.damage] == [
        f"{line}, stream events 0000000000000001" for line in expected
    ]
    assert again.read(1).missing == ((3, 4), (7, 8))
    assert len(caplog.records) == 2, "the start has said it"
    again.storage.close()


def _row(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Reads a row of any table."""
    return key, value
