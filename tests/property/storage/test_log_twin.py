"""D1, D6, D12: the log against a naive twin, through crashes at any operation, torn writes, flipped bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroad.seam.storage import (
    Append,
    Appended,
    Chop,
    LogStream,
    Read,
    Save,
    Saved,
    StorageInput,
    StreamKind,
)
from postroad.storage import log, segment
from postroad.storage.commit import GroupCommit
from postroad.storage.log import LogVolume
from postroad.storage.metadata import Rows
from postroad.storage.segment import OVERHEAD

ALL = 1 << 40
# Two of one kind, two of one id.
STREAMS = (
    LogStream(StreamKind.EVENTS, 5),
    LogStream(StreamKind.FILTERING, 5),
    LogStream(StreamKind.EVENTS, 1 << 63),
)


class Crashed(BaseException):
    """The process died in the middle of a disk operation."""


class MemoryFiles:
    """Files whose unsynced tails a crash may tear. `fuse`: how many more changes the process survives."""

    def __init__(self) -> None:
        self.content: dict[str, bytearray] = {}
        self.synced: dict[str, int] = {}
        self.fuse: int | None = None
        self.notes = [b""]

    def _burn(self) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Crashed

    def list(self) -> list[tuple[str, int]]:
        return sorted((name, len(content)) for name, content in self.content.items())

    def create(self, name: str) -> None:
        assert name not in self.content
        self._burn()
        self.content[name], self.synced[name] = bytearray(), 0

    def write(self, name: str, at: int, parts: Sequence[bytes]) -> None:
        content = self.content[name]
        assert at == len(content)
        data = b"".join(parts)
        try:
            self._burn()
        except Crashed:
            content += data[: len(data) // 2]
            raise
        content += data

    def sync(self, name: str) -> None:
        self._burn()
        self.synced[name] = len(self.content[name])

    def cut(self, name: str, size: int) -> None:
        self._burn()
        del self.content[name][size:]
        self.synced[name] = size

    def read(self, name: str, offset: int, size: int) -> bytes:
        if name not in self.content:
            raise FileNotFoundError(name)
        return bytes(self.content[name][offset : offset + size])

    def install(self, name: str, parts: Sequence[bytes]) -> None:
        assert name not in self.content
        self._burn()
        self.content[name] = bytearray(b"".join(parts))
        self.synced[name] = len(self.content[name])

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._burn()
            del self.content[name], self.synced[name]

    def hold(self, size: int, spare: int) -> None:
        pass

    def let_go(self) -> None:
        pass

    def note(self, data: bytes) -> None:
        self._burn()
        self.notes.append(data)

    def noted(self) -> bytes:
        return self.notes[-1]

    def after_crash(self, chance: Random) -> MemoryFiles:
        survivor = MemoryFiles()
        survivor.notes = [self.notes[-1] if chance.random() < 0.5 else chance.choice(self.notes)]
        for name, content in self.content.items():
            kept = bytes(content[: self.synced[name]])
            tail = bytearray(content[len(kept) :])
            style = chance.randrange(4)
            if style == 0:
                tail = tail[: chance.randint(0, len(tail))]
            elif style == 1 and tail:
                tail = tail[: chance.randint(0, len(tail))] + chance.randbytes(chance.randint(1, 90))
            elif style == 2 and tail:
                hole = chance.randrange(len(tail))
                size = min(len(tail) - hole, chance.randint(1, 200))
                tail[hole : hole + size] = bytes(size)
            survivor.content[name] = bytearray(kept) + tail
            survivor.synced[name] = len(kept)
        return survivor


class MemoryFacts:
    def __init__(self) -> None:
        self.tables: dict[str, dict[bytes, bytes]] = {}

    def load(self, table: str, _reader: object = None) -> dict[bytes, bytes]:
        return dict(self.tables.get(table, {}))

    def damaged(self, _table: str) -> tuple[bytes, ...]:
        return ()

    def commit(self, changes: Iterable[tuple[str, Rows]]) -> None:
        for table, rows in changes:
            for key, value in rows:
                if value is None:
                    self.tables.get(table, {}).pop(key, None)
                else:
                    self.tables.setdefault(table, {})[key] = value


@dataclass
class TwinStream:
    records: list[tuple[int, int, bytes]] = field(default_factory=list)
    chopped: int = -1
    saved_chop: int = -1
    last: int = 0
    noted: int = -1

    def read(self, start: int, end: int) -> tuple[list[tuple[int, int, bytes]], list[tuple[int, int]]]:
        floor = max(start, self.chopped)
        found = [one for one in self.records if one[1] > floor and max(one[0], floor) < end]
        known = min(end, max([self.chopped, self.noted, *(last for _, last, _ in self.records)]))
        covered = {t for first, last, _ in found for t in range(max(first, self.chopped) + 1, last + 1)}
        return found, list(_spans(t for t in range(start + 1, known + 1) if t not in covered))


def _spans(ticks: Iterable[int]) -> Iterator[tuple[int, int]]:
    begin = previous = None
    for tick in ticks:
        if previous is None or tick != previous + 1:
            if begin is not None and previous is not None:
                yield begin - 1, previous
            begin = tick
        previous = tick
    if begin is not None and previous is not None:
        yield begin - 1, previous


class Machine:
    """A log in memory, the twin beside it, and the steps a test takes."""

    def __init__(self) -> None:
        self.files, self.facts = MemoryFiles(), MemoryFacts()
        self.twin = {number: TwinStream() for number in STREAMS}
        self.markers = Random(1)
        self.tag = 0
        self.asked: dict[int, Append | Save] = {}
        self.waiting_chops: dict[LogStream, int] = {}
        self.saved = 0  # the value of the one row that is saved
        self.open()

    def open(self) -> None:
        self.volume = LogVolume(
            self.files, self.facts, draw_marker=lambda: self.markers.getrandbits(32), segment_bytes=2048
        )
        self.group = GroupCommit(self.volume, commit_bytes=1024)

    def append(self, number: LogStream, ticks: int, size: int, gap: int) -> None:
        stream = self.twin[number]
        self.tag += 1
        first = stream.last + gap
        data = bytes([self.tag & 0xFF]) * size
        effect = Append(stream=number, first=first, last=first + ticks, data=data, tag=self.tag)
        stream.last = effect.last
        self.asked[self.tag] = effect
        self.group.submit([effect])

    def save(self) -> None:
        self.tag += 1
        effect = Save(table="t", rows=((b"k", self.tag.to_bytes(8, "big")),), tag=self.tag)
        self.asked[self.tag] = effect
        self.group.submit([effect])

    def chop(self, number: LogStream, share: int) -> None:
        stream = self.twin[number]
        tick = stream.last * share // 10
        if tick > stream.chopped:
            stream.chopped = self.waiting_chops[number] = tick
            self.group.submit([Chop(stream=number, tick=tick)])

    def commit(self) -> None:
        while (commit := self.group.begin()) is not None:
            if commit.block is not None:
                self.files.sync(commit.block.segment.name)
            self.group.logged(commit, None)
            if commit.changes:
                self.files._burn()
                self.facts.commit(commit.changes)
            for number, tick in commit.chops.items():
                assert tick is not None
                self.twin[number].saved_chop = tick
            self.group.finish(commit, None)
            self.heard(self.group.take())

    def heard(self, outcomes: list[StorageInput]) -> None:
        for outcome in outcomes:
            assert isinstance(outcome, Appended | Saved)
            effect = self.asked.pop(outcome.tag)
            if isinstance(effect, Append):
                self.twin[effect.stream].records.append((effect.first, effect.last, effect.data))
            else:
                self.saved = effect.tag

    def check_reads(self, limit: int) -> None:
        for number, stream in self.twin.items():
            for start, end in (
                (-1, ALL),
                (stream.last // 3, stream.last // 2 + 1),
                (stream.chopped, stream.last),
            ):
                assert self.read(number, start, end, limit) == stream.read(start, end)

    def read(
        self, number: LogStream, start: int, end: int, limit: int
    ) -> tuple[list[tuple[int, int, bytes]], list[tuple[int, int]]]:
        records: list[tuple[int, int, bytes]] = []
        missing: list[tuple[int, int]] = []
        while True:
            done = self.volume.read(Read(stream=number, start=start, end=end, limit_bytes=limit, tag=0))
            records += done.records
            missing += done.missing
            if not done.more:
                return records, missing
            start = done.records[-1][1]

    def crash(self, seed: int) -> None:
        """Everything acknowledged must be there; what was under way may be, in order."""
        self.files = self.files.after_crash(Random(seed))
        self.open()
        assert all(damage.torn for damage in self.volume.recovered.damage)
        for number, stream in self.twin.items():
            state = self.volume.recovered.streams.get(number)
            chop = -1 if state is None or state.chopped is None else state.chopped
            assert stream.saved_chop <= chop <= max(stream.chopped, -1)
            stream.chopped = stream.saved_chop = chop
            pending = [
                (one.first, one.last, one.data)
                for one in self.asked.values()
                if isinstance(one, Append) and one.stream == number
            ]
            known = stream.records + pending
            found, _ = self.read(number, -1, ALL, 1 << 30)
            live = [one for one in stream.records if one[1] > chop]
            assert found[: len(live)] == live
            extra = found[len(live) :]
            assert extra == [one for one in pending if one[1] > chop][: len(extra)]
            stream.records += extra
            stream.last = max([0, chop, *(one[1] for one in stream.records)])
            assert state is None or state.last == max(
                [chop, *(one[1] for one in stream.records if one in known)]
            )
        row = self.facts.load("t").get(b"k", bytes(8))
        assert int.from_bytes(row, "big") in {self.saved, *self.asked}
        self.saved = int.from_bytes(row, "big")
        self.asked.clear()
        self.waiting_chops.clear()


STEPS = st.one_of(
    st.tuples(
        st.just("append"),
        st.sampled_from(STREAMS),
        st.integers(1, 9),
        st.sampled_from([0, 1, 40, 300, 1500, 3000]),
        st.sampled_from([0, 0, 0, 0, 2]),
    ),
    st.tuples(st.just("commit")),
    st.tuples(st.just("save")),
    st.tuples(st.just("chop"), st.sampled_from(STREAMS), st.integers(0, 10)),
    st.tuples(st.just("tidy")),
    st.tuples(st.just("check"), st.sampled_from([1, 500, 1 << 20])),
    st.tuples(st.just("reopen")),
    st.tuples(st.just("crash"), st.integers(0, 1 << 32)),
    st.tuples(st.just("fuse"), st.integers(0, 9), st.integers(0, 1 << 32)),
)


@pytest.fixture(autouse=True, scope="module")
def _small_extents() -> Iterator[None]:
    with mock.patch.object(segment, "EXTENT_SHIFT", 8), mock.patch.object(log, "EXTENT_SHIFT", 8):
        yield


def run(machine: Machine, steps: list[tuple[object, ...]]) -> None:
    seed = 0
    for name, *values in steps:
        try:
            match name:
                case "append":
                    machine.append(*values)  # type: ignore[arg-type]
                case "commit":
                    machine.commit()
                case "save":
                    machine.save()
                case "chop":
                    machine.chop(*values)  # type: ignore[arg-type]
                case "tidy":
                    while machine.volume.tidy():
                        pass
                case "check":
                    machine.commit()
                    machine.check_reads(*values)  # type: ignore[arg-type]
                case "reopen":
                    machine.commit()
                    machine.facts.commit(machine.volume.marks())
                    machine.open()
                    assert not machine.volume.recovered.damage
                case "crash":
                    machine.crash(*values)  # type: ignore[arg-type]
                case "fuse":
                    machine.files.fuse, seed = values  # type: ignore[assignment]
        except Crashed:
            machine.crash(seed)
    machine.files.fuse = None
    machine.commit()
    while machine.volume.tidy():
        pass
    machine.check_reads(700)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, min_size=5, max_size=60))
def test_log_is_its_twin_through_crashes(steps: list[tuple[object, ...]]) -> None:
    """D1, D12: what was acknowledged is there after any crash; nothing else but what was under way."""
    run(Machine(), steps)


def long_life(chance: Random) -> Iterator[tuple[object, ...]]:
    """Steps weighted so that files fill, die, are rewritten and merged, with a crash now and then."""
    for _ in range(chance.randint(50, 200)):
        kind = chance.choices(
            ["append", "commit", "chop", "tidy", "check", "crash", "fuse"], [8, 4, 4, 3, 1, 0.5, 1]
        )[0]
        match kind:
            case "append":
                size = chance.choice([0, 1, 40, 300, 1500, 3000])
                yield (
                    kind,
                    chance.choices(STREAMS, [8, 8, 1])[0],
                    chance.randint(1, 9),
                    size,
                    chance.choice([0, 2]),
                )
            case "chop":
                yield kind, chance.choice(STREAMS[: chance.choices([2, 3], [9, 1])[0]]), chance.randint(0, 10)
            case "check":
                yield kind, chance.choice([1, 500, 1 << 20])
            case "crash":
                yield kind, chance.getrandbits(32)
            case "fuse":
                yield kind, chance.randint(0, 9), chance.getrandbits(32)
            case _:
                yield (kind,)


@pytest.mark.parametrize("seed", range(60))
def test_long_lives_with_rewrites_and_merges(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MERGE_FILES", 2)
    monkeypatch.setattr(log, "DEAD_SHARE", 0.5)
    run(Machine(), list(long_life(Random(seed))))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(STREAMS), st.integers(0, 400)), min_size=1, max_size=40),
    st.integers(0, 1 << 32),
    st.integers(1, 4),
    st.booleans(),
)
def test_flipped_bits_cost_only_the_records_they_hit(
    sizes: list[tuple[LogStream, int]], seed: int, flips: int, clean: bool
) -> None:
    """A damaged record is reported with its place, is missing in reads, and what lies after it is served."""
    machine, chance = Machine(), Random(seed)
    for number, size in sizes:
        machine.append(number, 3, size, 0)
        if chance.random() < 0.7:
            machine.commit()
    machine.commit()
    if clean:  # metadata notes how far the log is synced; a killed process leaves the note beside the log
        machine.facts.commit(machine.volume.marks())
    for row in machine.facts.load(log.LASTS).items():
        number, machine.twin[number].noted = log._row(*row)
    records = list(_records(machine.files))
    places = [(name, at) for name, content in machine.files.content.items() for at in range(len(content))]
    hit = chance.sample(places, min(flips, len(places)))
    for name, at in hit:
        machine.files.content[name][at] ^= 1 << chance.randrange(8)
    lost = {
        (stream, last)
        for name, begin, end, stream, last in records
        if any(file == name and begin <= at < end for file, at in hit)
    }
    machine.open()
    reported = [(one.file, one.offset, one.offset + one.length) for one in machine.volume.recovered.damage]
    for name, at in hit:
        assert any(file == name and a <= at < b for file, a, b in reported)
    for number, stream in machine.twin.items():
        stream.records = [one for one in stream.records if (number, one[1]) not in lost]
        assert machine.read(number, -1, ALL, 600) == stream.read(-1, ALL)
        state = machine.volume.recovered.streams.get(number)
        if state is not None and any(where == number and tick > state.last for where, tick in lost):
            assert state.suspect
        assert not (clean and state is not None and state.suspect), "the noted ticks bound what is lost"
    machine.append(STREAMS[0], 1, 10, 1)
    machine.commit()
    machine.check_reads(600)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, min_size=5, max_size=60), st.integers(0, 1 << 32))
def test_what_is_gone_from_the_disk_is_missing_and_not_silence(
    steps: list[tuple[object, ...]], seed: int
) -> None:
    """D12: a file removed, or one cut at any byte: what was acknowledged is read or told missing, or its
    stream is suspect, however the process ended."""
    machine, chance = Machine(), Random(seed)
    run(machine, steps)
    end = chance.randrange(3)
    if end == 0:
        machine.save()
        machine.commit()
    elif end == 1:
        machine.facts.commit(machine.volume.marks())
        machine.volume.marks_saved()
    if not machine.files.content:
        return
    newest = max(machine.files.content)
    name = chance.choice([newest, newest, *machine.files.content])
    if name != newest or chance.random() < 0.3:
        del machine.files.content[name], machine.files.synced[name]
    else:
        size = chance.randint(0, len(machine.files.content[name]))
        if chance.random() < 0.5:  # where nothing looks torn
            ends = [at for file, at, *_ in _records(machine.files) if file == name and at <= size]
            size = max(ends, default=0)
        del machine.files.content[name][size:]
        machine.files.synced[name] = size
    for _ in range(2):
        machine.open()
        for number, stream in machine.twin.items():
            found, missing = machine.read(number, stream.chopped, ALL, 600)
            gone = [one for one in stream.records if one[1] > stream.chopped and one not in found]
            state = machine.volume.recovered.streams.get(number)
            for first, last, _ in gone:
                assert state is not None
                assert any(start <= max(first, stream.chopped) and last <= end for start, end in missing) or (
                    state.suspect and last > state.last
                )
            assert machine.volume.recovered.damage or not gone
        machine.facts.commit(machine.volume.marks())


def _records(files: MemoryFiles) -> Iterator[tuple[str, int, int, LogStream | None, int]]:
    for name, content in files.content.items():
        at = 0
        while at < len(content):
            stream, length, _, last = segment.parse_header(bytes(content[at : at + segment.HEADER.size]))
            yield name, at, at + length + OVERHEAD, stream, last
            at += length + OVERHEAD
