"""Durable pubends: nothing is told before it is synced (spec D1 and the traps)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tests.worlds.turns import Turns

from postroad.durable.publisher.pubend import (
    MAX_STAGED_BYTES,
    PUBLISHERS,
    READ_BYTES,
    RESERVE_US,
    TABLE,
    DurablePubend,
    Frame,
    PubendPort,
)
from postroad.durable.publisher.pubend_rows import read_facts, read_publisher
from postroad.errors import StorageError
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.ids import IdSource
from postroad.seam.effects import Effect, Note
from postroad.seam.storage import Append, Chop, LogStream, Read, ReadDone, Save, StreamKind
from postroad.seam.turn import Turn
from postroad.streams.knowledge import Segment
from postroad.units import SECOND_US
from postroad.wire.frames import DEFAULT_LIMITS

P = 7 << 32
NOW = 1_000_000_000
FULL = StorageError("the disk is full")


@dataclass
class Staged:
    """What was asked of the disk, and the frames of which all was durable before."""

    frames: list[Frame]
    effects: list[Effect]
    durable: list[Frame]

    @property
    def append(self) -> Append:
        (append,) = (effect for effect in self.effects if isinstance(effect, Append))
        return append


class Rig:
    """A pubend, a disk that does what it is told, and what the pubend said of that."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.turns.board.table(TABLE, read_facts)
        self.turns.board.table(PUBLISHERS, read_publisher)
        self.ids = IdSource(1, 9)
        self.tables: dict[str, dict[bytes, bytes]] = {}
        self.records: list[tuple[int, int, bytes]] = []
        self.spread: list[Segment] = []
        self.answered: list[Frame] = []  # their records are on disk
        self.failed: list[Frame] = []
        self.segments: list[Segment] = []  # read from the log
        self.recovered = 0  # events that recovery handed out
        self.pubend = self.fresh()

    def fresh(self, now_us: int = NOW) -> DurablePubend:
        port = PubendPort(
            logged=self._logged,
            failed=lambda _turn, frames, _error: self.failed.extend(frames),
            reserved=lambda _turn, _pubend, _error: None,
            read=lambda _turn, _pubend, segments: self.segments.extend(segments),
            recovered=self._recovered,
        )
        return DurablePubend(P, limits=DEFAULT_LIMITS, cache_bytes=1 << 20, port=port, now_us=now_us)

    def _logged(self, _turn: Turn, _pubend: DurablePubend, segment: Segment, frames: list[Frame]) -> None:
        self.spread.append(segment)
        self.answered += frames

    def _recovered(self, _turn: Turn, _pubend: DurablePubend, again: list[EventBatch]) -> None:
        self.recovered += sum(batch.count for batch in again)

    def batch(self, size: int = 1) -> EventBatch:
        builder = BatchBuilder()
        for _ in range(size):
            builder.add(self.ids.next(1), "t", {}, b"x" * 100, DEFAULT_LIMITS)
        return EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)

    def stage(self, *batches: EventBatch, now_us: int) -> Staged:
        frames = [Frame(batch, len(batch.data), None) for batch in batches]
        turn = self.turns.turn(now_us)
        durable = self.pubend.stage(turn, frames)
        return Staged(frames, turn.effects, durable)

    def silence(self, now_us: int, *, owing: bool = False) -> tuple[Segment | None, list[Effect]]:
        turn = self.turns.turn(now_us)
        return self.pubend.assert_silence(turn, owing=owing), turn.effects

    def effects(self, act: Callable[..., object], *arguments: object, now_us: int = NOW) -> list[Effect]:
        return self.turns.effects(act, *arguments, now_us=now_us)

    def write(self, effects: list[Effect]) -> None:
        """All of it becomes durable."""
        for effect in effects:
            if isinstance(effect, Append):
                self.records.append((effect.first, effect.last, effect.data))
                said = len(self.spread)
                assert self.turns.written(effect).effects == []
                assert len(self.spread) == said + 1
            elif isinstance(effect, Save):
                table = self.tables.setdefault(effect.table, {})
                table.update({key: value for key, value in effect.rows if value is not None})
                assert self.turns.written(effect).effects == []

    def publish(self, *batches: EventBatch, now_us: int) -> None:
        """They are on disk."""
        self.write(self.stage(*batches, now_us=now_us).effects)

    def fail(self, *appends: Append) -> list[Frame]:
        """These fail in turn; the frames whose publishers must be told."""
        before = len(self.failed)
        for append in appends:
            (note,) = self.turns.written(append, error=FULL).effects
            assert isinstance(note, Note)
        return self.failed[before:]

    def restart(
        self, now_us: int, *, suspect: bool = False, again: int | None = None, recovered: int = 0
    ) -> DurablePubend:
        """`recovered`: how many events are handed out, those above `again`."""
        self.pubend = self.fresh(now_us)
        self.recovered = 0
        self.pubend.recover(
            self.tables.get(TABLE, {}),
            self.tables.get(PUBLISHERS, {}),
            last=self.records[-1][1] if self.records else 0,
            chopped=0,
            suspect=suspect,
            now_us=now_us,
            replay_above=again,
        )
        for effect in self.effects(self.pubend.read_tail, now_us=now_us):
            assert isinstance(effect, Read)
            assert not self.pubend.recovered
            records = tuple(record for record in self.records if record[1] > effect.start)
            done = ReadDone(tag=effect.tag, records=records, missing=(), more=False)
            assert self.turns.read(done, now_us).effects == []
        assert self.recovered == recovered
        assert self.pubend.recovered
        self.pubend.check()
        return self.pubend


def test_a_tick_is_told_only_when_it_is_synced() -> None:
    rig = Rig()
    staged = rig.stage(rig.batch(3), now_us=NOW + 5)
    assert rig.pubend.last == NOW
    assert rig.pubend.answer(NOW, NOW + 100, 10) == ([], [])
    assert rig.silence(NOW + 50)[0] is None, "not even silence up to a staged tick"
    assert (rig.spread, rig.answered) == ([], [])
    rig.write([staged.append])
    (segment,) = rig.spread
    assert (segment.start, segment.end) == (NOW, NOW + 7)
    assert rig.answered == staged.frames
    assert rig.pubend.answer(NOW, NOW + 100, 10)[0] == [segment]
    rig.pubend.check()


def test_a_failed_append_uses_no_tick_and_the_publisher_may_try_again() -> None:
    rig = Rig()
    batch = rig.batch(2)
    first = rig.stage(batch, now_us=NOW + 5)
    second = rig.stage(rig.batch(), now_us=NOW + 6)
    assert rig.fail(first.append) == first.frames + second.frames
    assert rig.fail(second.append) == [], "nobody is told twice"
    again = rig.stage(batch, now_us=NOW + 7)
    assert again.durable == [], "it is not a repeat: nothing of it was logged"
    assert again.append.first == 0
    rig.write(again.effects)
    assert rig.answered == again.frames
    rig.pubend.check()


def test_retries_are_recognised_also_while_staged_and_after_a_restart() -> None:
    """Idempotent publishing."""
    rig = Rig()
    batch, later = rig.batch(2), rig.batch(2)
    staged = rig.stage(batch, now_us=NOW + 5)
    repeat = rig.stage(batch, now_us=NOW + 6)
    assert (repeat.effects, repeat.durable) == ([], [])
    rig.write(staged.effects)
    assert rig.answered == staged.frames + repeat.frames, "acknowledged when the first one is synced"
    third = rig.stage(batch, now_us=NOW + 7)
    assert third.durable == third.frames
    rig.restart(NOW + 10)
    both = rig.stage(batch, later, now_us=NOW + 20_000_000)
    assert both.durable == both.frames[:1]
    rig.write(both.effects)
    assert rig.answered[-1:] == both.frames[1:]
    assert rig.effects(rig.pubend.release, rig.pubend.last) != []
    rig.restart(NOW + 30)
    last = rig.stage(later, now_us=NOW)
    assert last.durable == last.frames


def test_a_repetition_waits_for_the_record_of_its_original_and_for_no_other() -> None:
    """A record that fails later would have had what is in the log refused."""
    rig = Rig()
    other = Rig()
    other.ids = IdSource(2, 9)
    first, second, third = rig.batch(2), rig.batch(1), rig.batch(1)
    one, two, three = (rig.stage(batch, now_us=NOW) for batch in (first, second, other.batch()))
    repeat = rig.stage(first, second, now_us=NOW)
    newest = rig.stage(third, first, third, now_us=NOW)
    assert (repeat.durable, newest.durable) == ([], [])
    rig.write([one.append])
    assert rig.answered == [*one.frames, repeat.frames[0], newest.frames[1]]
    later = rig.stage(first, second, now_us=NOW)
    assert later.durable == later.frames[:1]
    of_two = [*two.frames, repeat.frames[1], later.frames[1]]
    assert rig.fail(two.append) == [*of_two, *three.frames, newest.frames[0], newest.frames[2]]
    again = rig.stage(first, now_us=NOW)
    assert again.durable == again.frames
    assert rig.stage(second, now_us=NOW).durable == [], "it is not in the log"
    rig.pubend.check()


def test_a_pubend_that_owes_events_is_silent_by_one_tick() -> None:
    """P5."""
    rig = Rig()
    rig.write(rig.effects(rig.pubend.reserve))
    late = NOW + 100 * RESERVE_US
    staged = rig.stage(rig.batch(), now_us=late)
    assert staged.effects == [staged.append]
    assert rig.fail(staged.append) == staged.frames
    for at in range(1, 4):
        segment, effects = rig.silence(late, owing=True)
        assert segment is not None
        assert segment.end == NOW + at
        rig.write(effects)
    rig.pubend.check()
    assert rig.restart(late).last < NOW + 2 * RESERVE_US, "nor does a restart skip the time of what is owed"


def test_silence_is_bounded_by_what_was_saved_and_never_assigned_after_a_crash() -> None:
    """A clock that steps back and a crash: ticks only increase (traps)."""
    rig = Rig()
    segment, effects = rig.silence(NOW + 10)
    assert segment is None, "no reservation is on disk yet"
    rig.write(effects)
    segment, effects = rig.silence(NOW + 10)
    assert segment is not None
    assert segment.end == NOW + 10
    assert effects == []
    segment, _ = rig.silence(NOW + 100 * RESERVE_US)
    assert segment is not None
    assert segment.end == NOW + 10 - 10 + RESERVE_US + 10, "as far as the reservation reaches"
    pubend = rig.restart(NOW)
    assert pubend.last >= segment.end
    rig.publish(rig.batch(), now_us=NOW)
    told, _ = pubend.answer(segment.end, pubend.last, 10)
    assert told[-1].batch is not None
    assert told[-1].batch.headers["tick"][0] > segment.end


def test_a_reservation_that_failed_allows_no_silence_and_is_asked_for_again() -> None:
    rig = Rig()
    (save,) = rig.effects(rig.pubend.reserve)
    assert isinstance(save, Save)
    rig.turns.written(save, error=FULL)
    segment, effects = rig.silence(NOW + RESERVE_US)
    assert segment is None
    rig.write(effects)
    assert rig.silence(NOW + RESERVE_US)[0] is not None


def test_released_ticks_are_lost_and_the_rest_is_read_from_the_log() -> None:
    rig = Rig()
    for at in range(3):
        rig.publish(rig.batch(), now_us=NOW + 10 * (at + 1))
    (save,) = rig.effects(rig.pubend.release, NOW + 10)
    assert isinstance(save, Save)
    assert rig.pubend.floor == NOW, "not before the publishers' ids are saved"
    rig.write([save])
    (chop,) = rig.effects(rig.pubend.release, NOW + 10)
    assert chop == Chop(stream=LogStream(StreamKind.EVENTS, P), tick=NOW + 10)
    pubend = rig.restart(NOW + 40)
    segments, spans = pubend.answer(NOW + 10, NOW + 30, 10)
    assert segments == []
    assert spans == [(NOW + 10, NOW + 30)]
    (read,) = rig.effects(pubend.read, spans)
    assert rig.effects(pubend.read, spans) == [], "it is being read already"
    assert isinstance(read, Read)
    rig.turns.read(ReadDone(tag=read.tag, records=tuple(rig.records[1:]), missing=(), more=False))
    (joined,) = rig.segments
    assert (joined.start, joined.end, joined.lost) == (NOW + 10, NOW + 30, False)
    assert joined.batch is not None
    assert joined.batch.headers["tick"].tolist() == [NOW + 20, NOW + 30]
    assert EventBatch.parse(joined.batch.data, DEFAULT_LIMITS).count == 2
    assert len(rig.effects(pubend.read, spans)) == 1, "whoever needs it again may ask"


def test_ids_that_a_failed_checkpoint_named_are_saved_with_the_next_one() -> None:
    """Else a restart would take a retry for something new, once the log is chopped."""
    rig = Rig()
    batch = rig.batch()
    rig.publish(batch, now_us=NOW + 10)
    (failed,) = rig.effects(rig.pubend.release, NOW + 10)
    assert isinstance(failed, Save)
    assert rig.effects(rig.pubend.release, NOW + 10) == [], "one at a time"
    rig.turns.written(failed, error=FULL)
    assert rig.pubend.floor == NOW
    (save,) = rig.effects(rig.pubend.release, NOW + 10)
    assert isinstance(save, Save)
    assert save.rows == failed.rows
    assert batch.id(0)[:8] in {key[8:] for key, _ in save.rows}


def test_what_a_damaged_log_may_have_held_is_lost_not_silent() -> None:
    rig = Rig()
    rig.publish(rig.batch(), now_us=NOW + 10)
    pubend = rig.restart(NOW + 50_000_000, suspect=True)
    segments, spans = pubend.answer(NOW + 10, NOW + 100, 10)
    assert [(one.start, one.end, one.lost) for one in segments] == [(NOW + 10, NOW + 100, True)]
    assert spans == []
    staged = rig.stage(rig.batch(), now_us=NOW)
    assert staged.append.first == NOW + 50_000_000, "the hole stays a hole in the log"


def test_a_refused_append_does_not_cover_a_hole() -> None:
    """D12."""
    rig = Rig()
    rig.publish(rig.batch(), now_us=NOW + 10)
    rig.restart(NOW + 50_000_000, suspect=True)
    refused = rig.stage(rig.batch(), now_us=NOW + 50_000_010)
    assert rig.fail(refused.append) == refused.frames
    staged = rig.stage(rig.batch(), now_us=NOW + 50_000_020)
    assert staged.append.first == NOW + 50_000_000


def test_a_hole_is_the_same_for_every_later_start() -> None:
    """Nothing is lost while nothing is published, and what was told to be lost stays so."""
    rig = Rig()
    rig.publish(rig.batch(), now_us=NOW + 10)
    end = NOW + 50_000_000
    for at, suspect in ((0, True), (60_000_000, True), (120_000_000, False)):
        pubend = rig.restart(end + at, suspect=suspect)
        rig.write(rig.effects(pubend.reserve, now_us=end + at))
        rig.write(rig.silence(end + at + 1_000_000)[1])
        segments, spans = pubend.answer(NOW + 10, pubend.last, 10)
        assert spans == []
        assert [(one.start, one.end) for one in segments if one.lost] == [(NOW + 10, end)]
    staged = rig.stage(rig.batch(), now_us=end + 130_000_000)
    assert [type(effect) for effect in staged.effects] == [Append, Save], "what follows a hole is noted"
    rig.write(staged.effects)
    assert rig.records[-1][0] == end
    staged = rig.stage(rig.batch(), now_us=end + 131_000_000)
    assert [type(effect) for effect in staged.effects] == [Append]
    rig.write(staged.effects)
    pubend = rig.restart(end + 180_000_000, suspect=True)
    segments, _ = pubend.answer(rig.records[-1][1], pubend.last, 10)
    assert [(one.start, one.end) for one in segments] == [(rig.records[-1][1], pubend.last)]
    assert segments[0].lost, "another hole"


def test_quick_restarts_do_not_run_ahead_of_the_clock() -> None:
    rig = Rig()
    now = NOW
    for _ in range(50):
        rig.write(rig.effects(rig.pubend.reserve, now_us=now))
        rig.write(rig.silence(now)[1])
        rig.publish(rig.batch(), now_us=now)
        told = rig.pubend.last
        now += 200_000
        assert rig.restart(now).last >= told
        assert rig.pubend.last <= now + RESERVE_US
    for _ in range(100):  # and silence is told again as time goes by
        now += 100_000
        segment, effects = rig.silence(now)
        rig.write(effects)
    assert segment is not None
    assert segment.end == now


def test_a_reservation_on_disk_never_goes_back() -> None:
    rig = Rig()
    rig.publish(rig.batch(), now_us=NOW + 10)
    pubend = rig.restart(NOW + 20, suspect=True)
    effects = rig.effects(pubend.reserve, now_us=NOW + 50_000_000)
    staged = rig.stage(rig.batch(), now_us=NOW + 30)  # the clock stepped back
    rig.write([*effects, *staged.effects])
    segment, _ = rig.silence(NOW + 100 * RESERVE_US)
    assert segment is not None
    assert rig.restart(NOW + 40).last >= segment.end


@pytest.mark.parametrize("released", [False, True])
def test_events_of_a_process_that_died_are_handed_out_by_recovery(released: bool) -> None:
    """T4: also what a checkpoint, made before the log is chopped, says need not be read."""
    rig = Rig()
    for at in (1, 2, 3):
        rig.publish(rig.batch(at), now_us=NOW + 1000 * at)
    if released:
        rig.write(rig.effects(rig.pubend.release, NOW + 1000))
    size = rig.pubend.kept_bytes
    pubend = rig.restart(NOW + 5000, again=NOW + 1500, recovered=2 + 3)
    assert pubend.kept_bytes == size, "nothing is counted twice"
    rig.restart(NOW + 5000)


def test_ticks_that_lie_close_together_in_the_log_are_one_read() -> None:
    """Catching up from the own log: single ticks, each in a record of its own."""
    rig = Rig()
    ticks = range(NOW + 1000, NOW + 1000 * 4000, 1000)
    for tick in ticks:
        rig.publish(rig.batch(10), now_us=tick)
    per_record = rig.pubend.kept_bytes // len(ticks)
    spans = [(tick - 1, tick) for tick in ticks]
    reads = [effect for effect in rig.effects(rig.pubend.read, spans) if isinstance(effect, Read)]
    assert 1 < len(reads) < 10
    for tick in ticks:
        assert sum(one.start < tick <= one.end for one in reads) == 1, "each once"
    for one in reads:
        assert (one.end - one.start) / 1000 * per_record < READ_BYTES, "and all of it in one answer"
    ends = [(ticks[0] - 1, ticks[0]), (ticks[-1] - 1, ticks[-1])]
    few = rig.effects(rig.restart(NOW + 10_000_000).read, ends)
    assert len(few) == 2, "not with all that lies between them"


def test_ids_belong_to_whoever_came_with_them_first() -> None:
    """Idempotent publishing: nobody uses up the ids of others, also after a restart."""
    rig = Rig()
    batch = rig.batch()
    prefix = batch.id(0)[:8]
    assert rig.pubend.claim(prefix, ""), "of nobody, before there were principals"
    assert rig.pubend.claim(prefix, "alice")
    assert not rig.pubend.claim(prefix, "")
    assert not rig.pubend.claim(prefix, "mallory")
    rig.publish(batch, now_us=NOW + 1)
    rig.write(rig.effects(rig.pubend.release, NOW + 1))  # with a checkpoint
    rig.restart(NOW + 10)
    assert not rig.pubend.claim(prefix, "mallory")
    assert rig.pubend.claim(prefix, "alice")
    assert rig.pubend.claim(prefix, "bob", given=True), "numbers are given out again after 1,024 starts"
    repeat = rig.stage(batch, now_us=NOW + 11)
    assert repeat.durable == repeat.frames, "and its last id is known"


def test_publishers_are_refused_when_the_disk_is_behind() -> None:
    rig = Rig()

    def large() -> EventBatch:
        builder = BatchBuilder()
        builder.add(rig.ids.next(1), "t", {}, b"x" * 1_000_000, DEFAULT_LIMITS)
        return EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)

    for _ in range(MAX_STAGED_BYTES // len(large().data)):
        rig.stage(large(), now_us=NOW)
    with pytest.raises(StorageError):
        rig.stage(large(), now_us=NOW)
    rig.pubend.check()


def test_the_silence_before_the_first_record_is_not_released() -> None:
    """D8: a replay from before there was anything was told a gap."""
    rig = Rig()
    rig.publish(rig.batch(1), now_us=NOW + 1000)
    for tick, floor in ((NOW + 900, NOW), (NOW + 1000, NOW + 1000)):
        for _ in range(2):
            rig.write(rig.effects(rig.pubend.release, tick))
        assert rig.pubend.floor == floor


def test_where_all_is_released_nothing_is_kept() -> None:
    rig = Rig()
    rig.publish(rig.batch(3), now_us=NOW + 1000)
    assert rig.pubend.kept_bytes > 0
    for _ in range(2):  # the first one asks for the checkpoint
        rig.write(rig.effects(rig.pubend.release, NOW + 1003))
    assert rig.pubend.kept_bytes == 0


def test_sizes_find_the_floor() -> None:
    """D8 by size."""
    rig = Rig()
    for at in range(200):
        rig.publish(rig.batch(300), now_us=NOW + 1000 * (at + 1))
    size = rig.pubend.kept_bytes
    floor = rig.pubend.floor_for_size(size // 2)
    assert NOW < floor < rig.pubend.last
    assert rig.pubend.floor_for_size(size + 1) == 0


def test_what_is_under_way_after_days_of_silence_is_not_days_old() -> None:
    """T4: what a stop says is not recorded is read again, of every pubend of the broker."""
    rig, day_us = Rig(), 86_400 * SECOND_US
    rig.publish(rig.batch(), now_us=NOW)
    rig.write(rig.effects(rig.pubend.reserve, now_us=NOW + 3 * day_us))
    assert rig.pubend.untold is None
    rig.stage(rig.batch(), now_us=NOW + 3 * day_us)
    assert rig.pubend.untold is not None
    assert rig.pubend.untold >= NOW + 3 * day_us - SECOND_US
