"""Durable pubends: nothing is told before it is synced (spec D1 and the traps)."""

from __future__ import annotations

from itertools import count

import pytest

from postroad.config import DEFAULT_LIMITS
from postroad.durable.publisher.pubend import (
    MAX_STAGED_BYTES,
    PUBLISHERS,
    READ_BYTES,
    RESERVE_US,
    TABLE,
    DurablePubend,
)
from postroad.errors import StorageError
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.ids import IdSource
from postroad.seam.storage import Append, Chop, LogStream, Read, ReadDone, Save, StorageEffect, StreamKind
from postroad.units import SECOND_US

P = 7 << 32
NOW = 1_000_000_000


class Rig:
    """A pubend and the effects it asked for."""

    def __init__(self) -> None:
        self.tags = count(1)
        self.ids = IdSource(1, 9)
        self.tables: dict[str, dict[bytes, bytes]] = {}
        self.records: list[tuple[int, int, bytes]] = []
        self.pubend = self.fresh()

    def fresh(self, now_us: int = NOW) -> DurablePubend:
        return DurablePubend(
            P, limits=DEFAULT_LIMITS, cache_bytes=1 << 20, new_tag=lambda: next(self.tags), now_us=now_us
        )

    def batch(self, size: int = 1) -> EventBatch:
        builder = BatchBuilder()
        for _ in range(size):
            builder.add(self.ids.next(1), "t", {}, b"x" * 100, DEFAULT_LIMITS)
        return EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)

    def write(self, effects: list[StorageEffect]) -> None:
        """All of it becomes durable."""
        for effect in effects:
            if isinstance(effect, Append):
                self.records.append((effect.first, effect.last, effect.data))
                assert self.pubend.appended(effect.tag) is not None
            elif isinstance(effect, Save):
                table = self.tables.setdefault(effect.table, {})
                table.update({key: value for key, value in effect.rows if value is not None})
                assert self.pubend.saved(effect.tag)

    def restart(
        self, now_us: int, *, suspect: bool = False, again: int | None = None, recovered: int = 0
    ) -> DurablePubend:
        """`recovered`: how many events are handed out, those above `again`."""
        self.pubend = self.fresh(now_us)
        effects = self.pubend.recover(
            self.tables.get(TABLE, {}),
            self.tables.get(PUBLISHERS, {}),
            last=self.records[-1][1] if self.records else 0,
            chopped=0,
            suspect=suspect,
            now_us=now_us,
            again=again,
        )
        for effect in effects:
            assert isinstance(effect, Read)
            records = tuple(one for one in self.records if one[1] > effect.start)
            done = ReadDone(tag=effect.tag, records=records, missing=(), more=False)
            more, found = self.pubend.tail_done(done)
            assert more == []
            assert sum(batch.count for batch in found) == recovered
        assert self.pubend.recovered
        self.pubend.check()
        return self.pubend


def test_a_tick_is_told_only_when_it_is_synced() -> None:
    rig = Rig()
    staged = rig.pubend.stage([rig.batch(3)], NOW + 5)
    append = next(effect for effect in staged.effects if isinstance(effect, Append))
    assert staged.tags == [append.tag]
    assert rig.pubend.last == NOW
    assert rig.pubend.answer(NOW, NOW + 100, 10) == ([], [])
    assert rig.pubend.assert_silence(NOW + 50)[0] is None, "not even silence up to a staged tick"
    segment = rig.pubend.appended(append.tag)
    assert segment is not None
    assert (segment.start, segment.end) == (NOW, NOW + 7)
    assert rig.pubend.answer(NOW, NOW + 100, 10)[0] == [segment]
    rig.pubend.check()


def test_a_failed_append_uses_no_tick_and_the_publisher_may_try_again() -> None:
    rig = Rig()
    batch = rig.batch(2)
    first = rig.pubend.stage([batch], NOW + 5)
    second = rig.pubend.stage([rig.batch()], NOW + 6)
    tag, other = first.tags[0], second.tags[0]
    assert tag is not None
    assert rig.pubend.append_failed(tag) == [tag, other]
    again = rig.pubend.stage([batch], NOW + 7)
    assert again.tags[0] is not None, "it is not a repeat: nothing of it was logged"
    append = next(effect for effect in again.effects if isinstance(effect, Append))
    assert append.first == 0
    rig.write(again.effects)
    rig.pubend.check()


def test_retries_are_recognised_also_while_staged_and_after_a_restart() -> None:
    """Idempotent publishing."""
    rig = Rig()
    batch, later = rig.batch(2), rig.batch(2)
    staged = rig.pubend.stage([batch], NOW + 5)
    repeat = rig.pubend.stage([batch], NOW + 6)
    assert repeat.effects == []
    assert repeat.tags == staged.tags, "acknowledged when the first one is synced"
    rig.write(staged.effects)
    assert rig.pubend.stage([batch], NOW + 7).tags == [None]
    pubend = rig.restart(NOW + 10)
    both = pubend.stage([batch, later], NOW + 20_000_000)
    assert both.tags[0] is None
    assert both.tags[1] is not None
    rig.write(both.effects)
    assert pubend.release(pubend.last) != []
    assert rig.restart(NOW + 30).stage([later], NOW).tags == [None]


def test_a_repetition_waits_for_the_record_of_its_original_and_for_no_other() -> None:
    """A record that fails later would have had what is in the log refused."""
    rig = Rig()
    other = Rig()
    other.ids = IdSource(2, 9)
    first, second, third = rig.batch(2), rig.batch(1), rig.batch(1)
    tags = [rig.pubend.stage([one], NOW).tags[0] or 0 for one in (first, second, other.batch())]
    assert rig.pubend.stage([first, second], NOW).tags == tags[:2]
    newest = tags[2] + 1
    assert rig.pubend.stage([third, first, third], NOW).tags == [newest, tags[0], newest]
    assert rig.pubend.appended(tags[0]) is not None
    assert rig.pubend.stage([first, second], NOW).tags == [None, tags[1]]
    assert rig.pubend.append_failed(tags[1]) == [*tags[1:], newest]
    assert rig.pubend.stage([first], NOW).tags == [None]
    assert rig.pubend.stage([second], NOW).tags != [None], "it is not in the log"
    rig.pubend.check()


def test_a_pubend_that_owes_events_is_silent_by_one_tick() -> None:
    rig = Rig()
    rig.write(rig.pubend.reserve(NOW))
    late = NOW + 100 * RESERVE_US
    (append,) = rig.pubend.stage([rig.batch()], late).effects
    assert isinstance(append, Append)
    assert rig.pubend.append_failed(append.tag) == [append.tag]
    for at in range(1, 4):
        segment, effects = rig.pubend.assert_silence(late, owing=True)
        assert segment is not None
        assert segment.end == NOW + at
        rig.write(effects)
    rig.pubend.check()
    assert rig.restart(late).last < NOW + 2 * RESERVE_US, "nor does a restart skip the time of what is owed"


def test_silence_is_bounded_by_what_was_saved_and_never_assigned_after_a_crash() -> None:
    """A clock that steps back and a crash: ticks only increase (traps)."""
    rig = Rig()
    segment, effects = rig.pubend.assert_silence(NOW + 10)
    assert segment is None, "no reservation is on disk yet"
    rig.write(effects)
    segment, effects = rig.pubend.assert_silence(NOW + 10)
    assert segment is not None
    assert segment.end == NOW + 10
    assert effects == []
    segment, _ = rig.pubend.assert_silence(NOW + 100 * RESERVE_US)
    assert segment is not None
    assert segment.end == NOW + 10 - 10 + RESERVE_US + 10, "as far as the reservation reaches"
    pubend = rig.restart(NOW)
    assert pubend.last >= segment.end
    staged = pubend.stage([rig.batch()], NOW)
    rig.write(staged.effects)
    told, _ = pubend.answer(segment.end, pubend.last, 10)
    assert told[-1].batch is not None
    assert told[-1].batch.headers["tick"][0] > segment.end


def test_released_ticks_are_lost_and_the_rest_is_read_from_the_log() -> None:
    rig = Rig()
    for at in range(3):
        rig.write(rig.pubend.stage([rig.batch()], NOW + 10 * (at + 1)).effects)
    (save,) = rig.pubend.release(NOW + 10)
    assert isinstance(save, Save)
    assert rig.pubend.floor == NOW, "not before the publishers' ids are saved"
    rig.write([save])
    (chop,) = rig.pubend.release(NOW + 10)
    assert chop == Chop(stream=LogStream(StreamKind.EVENTS, P), tick=NOW + 10)
    pubend = rig.restart(NOW + 40)
    segments, spans = pubend.answer(NOW + 10, NOW + 30, 10)
    assert segments == []
    assert spans == [(NOW + 10, NOW + 30)]
    (read,) = pubend.read(spans)
    assert pubend.read(spans) == [], "it is being read already"
    assert isinstance(read, Read)
    done = ReadDone(tag=read.tag, records=tuple(rig.records[1:]), missing=(), more=False)
    found, more = pubend.read_done(done)
    assert more == []
    (joined,) = found
    assert (joined.start, joined.end, joined.lost) == (NOW + 10, NOW + 30, False)
    assert joined.batch is not None
    assert joined.batch.headers["tick"].tolist() == [NOW + 20, NOW + 30]
    assert EventBatch.parse(joined.batch.data, DEFAULT_LIMITS).count == 2


def test_what_a_damaged_log_may_have_held_is_lost_not_silent() -> None:
    rig = Rig()
    rig.write(rig.pubend.stage([rig.batch()], NOW + 10).effects)
    pubend = rig.restart(NOW + 50_000_000, suspect=True)
    segments, spans = pubend.answer(NOW + 10, NOW + 100, 10)
    assert [(one.start, one.end, one.lost) for one in segments] == [(NOW + 10, NOW + 100, True)]
    assert spans == []
    staged = pubend.stage([rig.batch()], NOW)
    append = next(effect for effect in staged.effects if isinstance(effect, Append))
    assert append.first == NOW + 50_000_000, "the hole stays a hole in the log"


def test_a_refused_append_does_not_cover_a_hole() -> None:
    rig = Rig()
    rig.write(rig.pubend.stage([rig.batch()], NOW + 10).effects)
    pubend = rig.restart(NOW + 50_000_000, suspect=True)
    refused = pubend.stage([rig.batch()], NOW + 50_000_010)
    assert refused.tags[0] is not None
    assert pubend.append_failed(refused.tags[0]) == refused.tags
    staged = pubend.stage([rig.batch()], NOW + 50_000_020)
    append = next(effect for effect in staged.effects if isinstance(effect, Append))
    assert append.first == NOW + 50_000_000


def test_a_hole_is_the_same_for_every_later_start() -> None:
    """Nothing is lost while nothing is published, and what was told to be lost stays so."""
    rig = Rig()
    rig.write(rig.pubend.stage([rig.batch()], NOW + 10).effects)
    end = NOW + 50_000_000
    for at, suspect in ((0, True), (60_000_000, True), (120_000_000, False)):
        pubend = rig.restart(end + at, suspect=suspect)
        rig.write(pubend.reserve(end + at))
        rig.write(pubend.assert_silence(end + at + 1_000_000)[1])
        segments, spans = pubend.answer(NOW + 10, pubend.last, 10)
        assert spans == []
        assert [(one.start, one.end) for one in segments if one.lost] == [(NOW + 10, end)]
    staged = pubend.stage([rig.batch()], end + 130_000_000)
    assert [type(effect) for effect in staged.effects] == [Append, Save], "what follows a hole is noted"
    rig.write(staged.effects)
    assert rig.records[-1][0] == end
    staged = pubend.stage([rig.batch()], end + 131_000_000)
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
        rig.write(rig.pubend.reserve(now))
        rig.write(rig.pubend.assert_silence(now)[1])
        rig.write(rig.pubend.stage([rig.batch()], now).effects)
        told = rig.pubend.last
        now += 200_000
        assert rig.restart(now).last >= told
        assert rig.pubend.last <= now + RESERVE_US
    for _ in range(100):  # and silence is told again as time goes by
        now += 100_000
        segment, effects = rig.pubend.assert_silence(now)
        rig.write(effects)
    assert segment is not None
    assert segment.end == now


def test_a_reservation_on_disk_never_goes_back() -> None:
    rig = Rig()
    rig.write(rig.pubend.stage([rig.batch()], NOW + 10).effects)
    pubend = rig.restart(NOW + 20, suspect=True)
    effects = pubend.reserve(NOW + 50_000_000)
    staged = pubend.stage([rig.batch()], NOW + 30)  # the clock stepped back
    rig.write([*effects, *staged.effects])
    segment, _ = pubend.assert_silence(NOW + 100 * RESERVE_US)
    assert segment is not None
    assert rig.restart(NOW + 40).last >= segment.end


@pytest.mark.parametrize("released", [False, True])
def test_events_of_a_process_that_died_are_handed_out_by_recovery(released: bool) -> None:
    """T4: also what a checkpoint, made before the log is chopped, says need not be read."""
    rig = Rig()
    for at in (1, 2, 3):
        rig.write(rig.pubend.stage([rig.batch(at)], NOW + 1000 * at).effects)
    if released:
        rig.write(rig.pubend.release(NOW + 1000))
    size = rig.pubend.kept_bytes
    pubend = rig.restart(NOW + 5000, again=NOW + 1500, recovered=2 + 3)
    assert pubend.kept_bytes == size, "nothing is counted twice"
    rig.restart(NOW + 5000)


def test_ticks_that_lie_close_together_in_the_log_are_one_read() -> None:
    """Catching up from the own log: single ticks, each in a record of its own."""
    rig = Rig()
    ticks = range(NOW + 1000, NOW + 1000 * 4000, 1000)
    for tick in ticks:
        rig.write(rig.pubend.stage([rig.batch(10)], tick).effects)
    per_record = rig.pubend.kept_bytes // len(ticks)
    spans = [(tick - 1, tick) for tick in ticks]
    reads = [one for one in rig.pubend.read(spans) if isinstance(one, Read)]
    assert 1 < len(reads) < 10
    for tick in ticks:
        assert sum(one.start < tick <= one.end for one in reads) == 1, "each once"
    for one in reads:
        assert (one.end - one.start) / 1000 * per_record < READ_BYTES, "and all of it in one answer"
    few = rig.restart(NOW + 10_000_000).read([(ticks[0] - 1, ticks[0]), (ticks[-1] - 1, ticks[-1])])
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
    rig.write(rig.pubend.stage([batch], NOW + 1).effects)
    rig.write(rig.pubend.release(NOW + 1))  # with a checkpoint
    rig.restart(NOW + 10)
    assert not rig.pubend.claim(prefix, "mallory")
    assert rig.pubend.claim(prefix, "alice")
    assert rig.pubend.claim(prefix, "bob", given=True), "numbers are given out again after 1,024 starts"
    assert rig.pubend.stage([batch], NOW + 11).tags == [None], "and its last id is known"


def test_publishers_are_refused_when_the_disk_is_behind() -> None:
    rig = Rig()

    def large() -> EventBatch:
        builder = BatchBuilder()
        builder.add(rig.ids.next(1), "t", {}, b"x" * 1_000_000, DEFAULT_LIMITS)
        return EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)

    for _ in range(MAX_STAGED_BYTES // len(large().data)):
        rig.pubend.stage([large()], NOW)
    with pytest.raises(StorageError):
        rig.pubend.stage([large()], NOW)
    rig.pubend.check()


def test_the_silence_before_the_first_record_is_not_released() -> None:
    """D8: a replay from before there was anything was told a gap."""
    rig = Rig()
    rig.write(rig.pubend.stage([rig.batch(1)], NOW + 1000).effects)
    for tick, floor in ((NOW + 900, NOW), (NOW + 1000, NOW + 1000)):
        for _ in range(2):
            rig.write(rig.pubend.release(tick))
        assert rig.pubend.floor == floor


def test_where_all_is_released_nothing_is_kept() -> None:
    rig = Rig()
    rig.write(rig.pubend.stage([rig.batch(3)], NOW + 1000).effects)
    assert rig.pubend.kept_bytes > 0
    for _ in range(2):  # the first one asks for the checkpoint
        rig.write(rig.pubend.release(NOW + 1003))
    assert rig.pubend.kept_bytes == 0


def test_sizes_find_the_floor() -> None:
    """D8 by size."""
    rig = Rig()
    for at in range(200):
        rig.write(rig.pubend.stage([rig.batch(300)], NOW + 1000 * (at + 1)).effects)
    size = rig.pubend.kept_bytes
    floor = rig.pubend.floor_for_size(size // 2)
    assert NOW < floor < rig.pubend.last
    assert rig.pubend.floor_for_size(size + 1) == 0


def test_what_is_under_way_after_days_of_silence_is_not_days_old() -> None:
    """T4: what a stop says is not recorded is read again, of every pubend of the broker."""
    rig, day_us = Rig(), 86_400 * SECOND_US
    rig.write(rig.pubend.stage([rig.batch()], NOW).effects)
    rig.write(rig.pubend.reserve(NOW + 3 * day_us))
    assert rig.pubend.untold is None
    rig.pubend.stage([rig.batch()], NOW + 3 * day_us)
    assert rig.pubend.untold is not None
    assert rig.pubend.untold >= NOW + 3 * day_us - SECOND_US
