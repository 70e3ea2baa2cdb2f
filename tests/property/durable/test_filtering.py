"""Persistent filtering against a dict of lists (spec D6; durable paper, section 4.2)."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.durable_pair import PUBEND, Disk
from tests.worlds.turns import Turns

from postroad.durable.subscriber import filtering as module
from postroad.durable.subscriber.backlog import Backlog
from postroad.durable.subscriber.compact import get_set, get_varint, put_set, put_varint
from postroad.durable.subscriber.filtering import TABLE, PersistentFiltering, ReadBuffer, read_filtering
from postroad.seam.storage import Read, StorageInput
from postroad.seam.turn import Turn
from postroad.selectors import Group
from postroad.streams.spans import subtract, union

SUBSCRIBERS = [1, 2, 3, 40, 41, 900]


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 3000), max_size=300), st.integers(0, 1 << 40))
def test_sets_survive_packing(values: set[int], base: int) -> None:
    for numbers in (sorted(values), [base + value for value in sorted(values)]):
        out = bytearray(b"x")
        put_set(out, np.array(numbers, np.int64))
        found, at = get_set(bytes(out) + b"rest", 1)
        assert found.tolist() == numbers
        assert at == len(out)


@given(st.integers(0, (1 << 62) - 1))
def test_numbers_survive_packing(value: int) -> None:
    out = bytearray()
    put_varint(out, value)
    assert get_varint(bytes(out), 0) == (value, len(out))


class Harness:
    """A PFS on a disk that crashes and fails, beside what it should know."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.disk = Disk()
        self.start()
        self.history: list[tuple[int, int, dict[int, list[int]]]] = []  # spans handed in: subscriber -> ticks
        self.holes: list[tuple[int, int]] = []
        self.durable = 0  # everything up to here is on disk, or needs no record
        self.unsaved = False  # there is a hole that no checkpoint knows

    def start(self) -> None:
        """A process begins."""
        self.turns = Turns()
        self.turns.board.table(TABLE, read_filtering)
        self.buffers: list[ReadBuffer] = []  # of batch reads that were answered
        self.opened = 0  # how often recovery said that it is through
        self.pfs = PersistentFiltering(
            PUBEND,
            backlog=Backlog(),
            opened=self._open,
            ready=lambda _turn, buffers: self.buffers.extend(buffers),
        )

    def _open(self, _turn: Turn) -> None:
        assert self.pfs.recovered
        self.opened += 1

    def ask(self, turn: Turn) -> None:
        for effect in turn.effects:
            assert self.disk.ask(effect)

    def checkpoint(self) -> None:
        turn = self.turns.turn()
        self.pfs.checkpoint(turn)
        self.ask(turn)

    def chop(self, tick: int) -> None:
        turn = self.turns.turn()
        self.pfs.chop(turn, tick)
        self.ask(turn)

    def write(self) -> None:
        start = self.pfs.heard
        count = self.random.randint(0, 12)
        step = self.random.choice([1, 1, 3, 1000])
        ticks = start + np.cumsum([self.random.randint(1, step) for _ in range(count)], dtype=np.int64)
        end = (int(ticks[-1]) if count else start) + self.random.randint(1, 50)
        matched: dict[int, list[int]] = {}
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for subscriber in SUBSCRIBERS:
            if count and self.random.random() < 0.4:
                rows = tuple(row for row in range(count) if self.random.random() < 0.5)
                if rows:
                    matched[subscriber] = [int(ticks[row]) for row in rows]
                    rows_of.setdefault(rows, []).append(subscriber)
        groups = [Group(np.array(rows, np.uint32), who) for rows, who in rows_of.items()]
        # Sometimes a part of it came before: another upstream, another cut.
        early = max(0, start - self.random.choice([0, 0, 5]))
        first, full = self.pfs._first, self.pfs._pending_bytes >= module.MAX_PENDING_BYTES
        turn = self.turns.turn()
        appended = self.pfs.write(turn, early, end, ticks, groups, then=lambda _turn, _error: None)
        assert appended == (bool(groups) and not full) == bool(turn.effects)
        if full and groups:
            self.holes.append((first, end))
            self.unsaved = True
        again = self.pfs.write(turn, early, end, ticks, groups, then=lambda _turn, _error: None)
        assert not again, "the same batch again is nothing new"
        self.ask(turn)
        self.history.append((start, end, matched))

    def settle(self, items: list[StorageInput]) -> None:
        turn = self.turns.turn()
        for item in items:
            self.turns.unanswered.answer(turn, item)
        if self.unsaved:  # it is saved before others are told how far this is
            self.unsaved = False
            self.checkpoint()
            self.settle(self.disk.sync())
        self.durable = self.pfs.heard

    def restart(self) -> None:
        self.checkpoint()
        self.disk.crash(self.random)
        stream = self.pfs.stream
        self.start()
        turn = self.turns.turn()
        self.pfs.recover(
            turn,
            self.disk.tables.get(TABLE, {}),
            suspect=False,
            delivered=self.durable,
            consumed={},
            **self.disk.state(stream),
        )
        through = int(bool(turn.effects))  # else there is nothing to read
        while turn.effects:
            (read,) = turn.effects
            assert isinstance(read, Read)
            assert not self.pfs.recovered
            turn = self.turns.read(self.disk.answer(read))
        assert self.pfs.recovered
        assert self.opened == through
        # What came after the end of the log comes again, or is forgotten: nobody was told that it is durable.
        heard = self.pfs.heard
        if self.pfs.doubt > self.pfs.last_timestamp:
            self.holes.append((self.pfs.last_timestamp, heard))  # with the silence that followed the hole
        self.history = [(a, min(b, heard), m) for a, b, m in self.history if a < heard]
        self.durable = heard

    def read(self, positions: dict[int, int], end: int) -> dict[int, ReadBuffer]:
        """The buffers of several subscribers, who read at the same time and may share reads."""
        done: dict[int, ReadBuffer] = {}
        turn = self.turns.turn()
        for subscriber, start in positions.items():
            buffer = self.pfs.batch_read(turn, subscriber, start, end)
            if buffer is not None:
                done[subscriber] = buffer
        waiting = [effect for effect in turn.effects if isinstance(effect, Read)]
        for _ in range(10_000):
            if not waiting:
                assert set(done) == set(positions)
                return done
            read = waiting.pop(self.random.randrange(len(waiting)))
            turn = self.turns.read(self.disk.answer(read))
            waiting += [effect for effect in turn.effects if isinstance(effect, Read)]
            done |= {buffer.subscriber: buffer for buffer in self.buffers}
            self.buffers.clear()
        raise AssertionError("a batch read does not end")

    def compare(self) -> None:
        end = self.durable
        starts = {subscriber: self.random.randint(0, end) for subscriber in SUBSCRIBERS}
        found_by: dict[int, list[int]] = {subscriber: [] for subscriber in SUBSCRIBERS}
        unknown_to: dict[int, list[tuple[int, int]]] = {subscriber: [] for subscriber in SUBSCRIBERS}
        positions = dict(starts)
        while positions := {one: position for one, position in positions.items() if position < end}:
            for subscriber, buffer in self.read(positions, end).items():
                position = positions[subscriber]
                assert position == buffer.start < buffer.end <= end
                ticks = buffer.ticks.tolist()
                assert all(position < tick <= buffer.end for tick in ticks)
                found_by[subscriber] += ticks
                unknown_to[subscriber] += buffer.unknown
                positions[subscriber] = buffer.end
        for subscriber, start in starts.items():
            found, unknown = found_by[subscriber], unknown_to[subscriber]
            expected = [
                t for _, _, matched in self.history for t in matched.get(subscriber, []) if start < t <= end
            ]
            assert found == sorted(set(found))
            hidden = [tick for tick in expected if any(a < tick <= b for a, b in unknown)]
            assert set(expected) - set(found) <= set(hidden), "S where Q"
            assert set(found) <= set(expected), "precise but for holes"
            allowed = union([*self.holes, (0, self.pfs.chopped)])
            assert not subtract(union(unknown), allowed), "a hole that nobody made"


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 4, 5_000]),
    st.sampled_from([1, 200, 1 << 18]),
    st.sampled_from([1, 100, 1 << 20]),
    st.sampled_from([1_500, 1 << 20]),
)
def test_the_pfs_knows_what_it_was_told(
    seed: int, buffer_ticks: int, read_bytes: int, align: int, pending: int
) -> None:
    """D6."""
    values = {"BUFFER_TICKS": buffer_ticks, "READ_BYTES": read_bytes, "CHECKPOINT_BYTES": 300}
    values |= {"ALIGN_TICKS": align, "HOP_BYTES": read_bytes // 16, "MAX_PENDING_BYTES": pending}
    with patch.multiple(module, **values):
        random = Random(seed)
        harness = Harness(random)
        for _ in range(60):
            roll = random.randrange(20)
            if roll < 12:
                harness.write()
            elif roll < 15:
                harness.settle(harness.disk.sync())
            elif roll < 16:
                harness.checkpoint()
            elif roll < 17:
                harness.chop(random.randint(0, harness.durable))
            elif roll < 18 and not any(not hasattr(one, "data") for one in harness.disk.queue):
                before = harness.disk.last.get(harness.pfs.stream, 0)
                if harness.disk.queue:
                    harness.holes.append((before, harness.pfs.heard))
                    harness.settle(harness.disk.fail())
                    harness.checkpoint()
                    harness.settle(harness.disk.sync())
            elif roll < 19:
                harness.restart()
            else:
                harness.settle(harness.disk.sync())
                harness.compare()
            harness.pfs.check()
        harness.settle(harness.disk.sync())
        harness.compare()
