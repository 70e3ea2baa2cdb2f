"""The subscriber hosting broker: switchover, slow subscribers, gaps, reconnect anywhere (D4, D5, D9, D10)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise

import pytest
from tests.worlds.turns import Turns

from postroad.durable.subscriber.backlog import Backlog
from postroad.durable.subscriber.catchup import CatchupStream
from postroad.durable.subscriber.hosting import KEPT_US, SILENCE_US, TABLES, Hosting
from postroad.durable.subscriber.outputs import Confirmed, Deliver, DeliverGap, Output, Reported, Wants
from postroad.durable.subscriber.subscriptions import Answered, Attachment, Subscriptions
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.events.token import CheckpointToken
from postroad.ids import HISTORY, IdSource
from postroad.seam.effects import Effect
from postroad.seam.storage import Append, Chop, Read, ReadDone, Save
from postroad.seam.turn import Turn
from postroad.selectors import Selector
from postroad.streams.knowledge import EVERYTHING, NOTHING, Segment
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.frames import DEFAULT_LIMITS, Kind

P = 7 << 32
HISTORY_OF_7 = P + HISTORY


def segment(start: int, topics: str, *, gap: int = 0) -> Segment:
    """One event per letter, at the ticks after start + gap."""
    builder, ids = BatchBuilder(), IdSource(1, 9)
    for topic in topics:
        builder.add(ids.next(1), topic, {}, b"", DEFAULT_LIMITS)
    batch = EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS)
    ticked = batch.with_ticks(start + gap + 1, kind=Kind.KNOWLEDGE, pubend=P, start=start, channel=0)
    return Segment(start, ticked.end, EVERYTHING, ticked)


class Rig:
    def __init__(self, saved: dict[str, dict[bytes, bytes]] | None = None) -> None:
        self.turns = Turns(saved)
        self.sessions = count(1)
        self.room = True
        self.now = 0
        self.spent = 0
        self.records: list[tuple[int, int, bytes]] = []
        self.synced = True
        self.waiting: list[Append | Save] = []
        self.outputs: list[Output] = []  # what was performed and not looked at yet
        self.host = Hosting(
            broker=3,
            boot=1,
            perform=lambda _turn, outputs: self.outputs.extend(outputs),
            room=lambda _: self.room,
            spend=self.spend,
            need=dict,
            now_us=0,
        )
        self.host.recover({name: self.turns.board.table(name, reader) for name, reader in TABLES.items()})
        self.follow(P)

    def follow(self, pubend: int) -> None:
        with self.turn() as turn:
            self.host.follow(turn, pubend, start=100)

    def spend(self, _subscriber: int, size: int) -> None:
        self.spent += size

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        turn = self.turns.turn(self.now)
        yield turn
        self.carry(turn.effects)

    def attach(
        self, name: str = "s", topic: str = "a", token: dict[int, int] | None = None, **rest: str
    ) -> int:
        wanted = Attachment(
            name=name,
            selector=Selector.parse(topic, ""),
            ack=rest.get("ack", ""),
            session=next(self.sessions),
            token=None if token is None else CheckpointToken(token),
        )
        with self.turn() as turn:
            attached = self.host.attach(turn, wanted)
        self.out = self.take()
        self.session = attached.subscription.session
        return attached.subscription.id

    def carry(self, effects: list[Effect]) -> None:
        """Storage answers at once, unless `synced` is false."""
        queue = list(effects)
        while queue:
            effect = queue.pop(0)
            if isinstance(effect, Append | Save) and not self.synced:
                self.waiting.append(effect)
            elif isinstance(effect, Append | Save):
                if isinstance(effect, Append):
                    self.records.append((effect.first, effect.last, effect.data))
                queue += self.turns.written(effect, self.now).effects
            elif isinstance(effect, Read):
                found = tuple(one for one in self.records if one[1] > effect.start and one[0] < effect.end)
                done = ReadDone(tag=effect.tag, records=found, missing=(), more=False)
                queue += self.turns.read(done, self.now).effects
            else:
                assert isinstance(effect, Chop)
        self.host.check()

    def take(self) -> list[Output]:
        outputs, self.outputs = self.outputs, []
        return outputs

    # ---- what is done in a turn of its own, and what comes of it

    def begin(self, subscriber: int, tick: int, pubend: int = P) -> list[Output]:
        with self.turn() as turn:
            self.host.begin(turn, subscriber, pubend, tick)
        return self.take()

    def learn(self, *segments: Segment, pubend: int = P) -> list[Output]:
        with self.turn() as turn:
            for one in segments:
                self.host.learn(turn, pubend, one)
        return self.take()

    def answer(self, *segments: Segment) -> list[Output]:
        with self.turn() as turn:
            self.host.answer(turn, P, list(segments))
        return self.take()

    def credit(self, subscriber: int) -> list[Output]:
        with self.turn() as turn:
            self.host.credit(turn, subscriber)
        return self.take()

    def tick(self) -> list[Output]:
        with self.turn() as turn:
            self.host.tick(turn)
        return self.take()


def messages(outputs: list[Output]) -> list[tuple[int, int, list[int] | None]]:
    """(start, end, ticks), ticks None for a gap."""
    found: list[tuple[int, int, list[int] | None]] = []
    for one in outputs:
        if isinstance(one, DeliverGap):
            found.append((one.start, one.end, None))
        elif isinstance(one, Deliver):
            ticks = [] if one.batch is None else one.batch.headers["tick"][one.rows].tolist()
            found.append((one.start, one.end, ticks))
    return found


def test_a_new_subscriber_is_served_live_before_the_record_is_synced() -> None:
    """Section 4.1: CT(s, p) = latestDelivered(p), so it is not in catchup mode."""
    rig = Rig()
    one = rig.attach()
    rig.begin(one, 100)
    rig.synced = False
    assert messages(rig.learn(segment(100, "aba"))) == [(100, 103, [101, 103])]
    assert rig.spent > 0
    assert rig.host.status()["constreams"][0]["latest_delivered"] == 100  # type: ignore[index]
    (append,) = rig.waiting
    rig.turns.written(append)
    assert rig.host.status()["constreams"][0]["latest_delivered"] == 103  # type: ignore[index]


def reconnected(rig: Rig, tick: int) -> list[Output]:
    """Connected anew, far enough behind that nothing is left in memory."""
    held = rig.host._pubends[P].constream
    held._recent.clear()
    held._recent_bytes = 0
    rig.now += 1
    rig.attach(token={P: tick})
    return rig.out


def test_catching_up_asks_for_exactly_what_matched_and_switches_over() -> None:
    """D5, D6: the PFS says which ticks; nothing else is fetched."""
    rig = Rig()
    one = rig.attach()
    rig.begin(one, 100)
    assert rig.session is not None
    rig.host.detach(rig.session)
    parts = [segment(100, "ab"), segment(102, "bbbbbbbbbbbbbbbb"), segment(118, "ba")]
    rig.learn(*parts)
    out = reconnected(rig, 100)
    (wants,) = [output for output in out if isinstance(output, Wants)]
    assert wants.spans == ((100, 101), (119, 120))
    assert one in rig.host._pubends[P].catchups
    later = messages(rig.answer(parts[2]))
    assert later == [], "not before what comes first"
    got = messages(rig.answer(parts[0]))
    assert got == [(100, 119, [101]), (119, 120, [120])]
    assert one not in rig.host._pubends[P].catchups
    assert messages(rig.learn(segment(120, "a"))) == [(120, 121, [121])]


def test_a_subscriber_without_room_catches_up_from_memory() -> None:
    """D9: it becomes a catchup subscriber, nothing is buffered for it."""
    rig = Rig()
    one = rig.attach()
    rig.begin(one, 100)
    rig.room = False
    assert messages(rig.learn(segment(100, "a"), segment(101, "a"), segment(102, "b"))) == []
    assert one in rig.host._pubends[P].catchups
    rig.room = True
    assert messages(rig.credit(one)) == [(100, 101, [101]), (101, 102, [102])]
    assert one not in rig.host._pubends[P].catchups


def test_what_was_released_is_a_gap_with_exact_bounds() -> None:
    """D8: the gap names the ticks that matched, not all that is lost."""
    rig = Rig()
    one = rig.attach()
    rig.begin(one, 100)
    assert rig.session is not None
    rig.host.detach(rig.session)
    rig.learn(segment(100, "bbbaab"), segment(106, "ba"))
    reconnected(rig, 100)
    lost = Segment(90, 106, NOTHING, lost=True)
    got = messages(rig.answer(lost, segment(106, "ba")))
    assert got == [(103, 105, None), (107, 108, [108])]


def test_a_subscriber_from_elsewhere_is_refiltered() -> None:
    """D10: this broker has no PFS for it before it came."""
    rig = Rig()
    parts = [segment(100, "ab"), segment(102, "ba")]
    rig.learn(*parts)
    out = reconnected(rig, 100)
    (wants,) = [output for output in out if isinstance(output, Wants)]
    assert wants.spans == ((100, 104),)
    got = messages(rig.answer(*parts))
    assert [ticks for _, _, ticks in got] == [[101], [104]]
    assert all(before[1] <= after[0] for before, after in pairwise(got))


def test_a_token_ahead_of_the_constream_repeats_nothing() -> None:
    """A crash may find a subscriber ahead of latestDelivered: the same events come again."""
    rig = Rig()
    rig.attach(token={P: 102})
    assert messages(rig.learn(segment(100, "aaa"))) == [(102, 103, [103])]


def test_lost_upstream_is_a_gap_to_members_and_a_hole_for_the_rest() -> None:
    rig = Rig()
    one = rig.attach()
    rig.begin(one, 100)
    assert messages(rig.learn(Segment(100, 110, NOTHING, lost=True))) == [(100, 110, None)]
    assert rig.host._pubends[P].filtering.doubt == 110


@pytest.mark.parametrize("token", [None, {HISTORY_OF_7: 50, P: 50}])
def test_only_what_can_have_something_for_it_is_followed(token: dict[int, int] | None) -> None:
    """D8: What a broker says about itself is on a pubend of its own: others hear of no gap there."""
    rig = Rig()
    rig.follow(HISTORY_OF_7)
    plain, about = rig.attach("plain", token=token), rig.attach("about", "$postroad/#", token=token)
    for one in (plain, about):
        for pubend in (P, HISTORY_OF_7):
            rig.begin(one, 100, pubend)
    rig.host.acknowledged(rig.host.subscriptions.by_id(plain), CheckpointToken({HISTORY_OF_7: 60}))
    named = {one.name: sorted(one.token()) for one in rig.host.subscriptions}
    assert named == {"plain": [P], "about": [HISTORY_OF_7]}
    out = rig.learn(Segment(100, 110, NOTHING, lost=True), pubend=HISTORY_OF_7)
    told = [one.subscribers for one in out if isinstance(one, DeliverGap)]
    assert told == ([(about,)] if token is None else []), "who catches up hears of it in its turn"


def test_tokens_advance_over_silence() -> None:
    """Section 4.1: a silence message to who keeps its token, and to who is there when a token kept here
    advances: it may have to go on elsewhere with what it remembers."""
    rig = Rig()
    one = rig.attach("mine")
    rig.begin(one, 100)
    other = rig.attach("yours", ack="auto")
    rig.begin(other, 100)
    rig.learn(Segment(100, 200, EVERYTHING))
    rig.now = SILENCE_US
    out = rig.tick()
    assert messages(out) == [(100, 200, [])] * 2
    kept = rig.host.subscriptions.by_id(other)
    assert kept.token() == CheckpointToken({P: 200})


def test_a_past_that_comes_in_small_pieces_is_asked_for_in_large_ones() -> None:
    """D9, over several hops: every answer let the window slide, and the sliver behind it was asked for."""
    stream = CatchupStream(subscriber=1, pubend=P, position=0, selector=Selector.parse("a", ""))
    stream.refilter(1000 * SECOND_US)
    asks, now_us = 0, 0
    while not stream.idle:
        now_us += 600 * MILLISECOND_US
        wanted = stream.wants(now_us)
        assert wanted, "nothing is under way"
        asks += len(wanted)
        for start, end in wanted:
            for at in range(start, end, max(1, (end - start) // 50)):
                now_us += MILLISECOND_US
                assert stream.learn(Segment(at, min(end, at + max(1, (end - start) // 50)), EVERYTHING), {})
                stream.advance(lambda: True, lambda _: None)
                stream.check()
                asks += len(stream.wants(now_us)) if not stream.idle else 0
    assert asks < 20


def replayed(rig: Rig, *answers: Segment) -> int:
    """A subscription whose broker keeps its token goes through (50, 100], as far as the answers go, and
    leaves at once. Where its token is ten seconds later."""
    one = rig.attach(token={P: 50}, ack="auto")
    rig.answer(*answers)
    assert rig.session is not None
    rig.host.detach(rig.session)
    rig.learn(Segment(100, 200, EVERYTHING))
    rig.now += 2 * KEPT_US
    rig.tick()
    return rig.host.subscriptions.by_id(one).token().tick(P)


def test_who_leaves_after_a_past_without_anything_for_it_holds_no_storage() -> None:
    """D7."""
    assert replayed(Rig(), Segment(50, 100, EVERYTHING)) == 200


def test_who_leaves_in_the_middle_of_its_past_holds_the_rest() -> None:
    assert replayed(Rig(), Segment(50, 70, EVERYTHING)) == 70


@pytest.mark.parametrize("first", [segment(50, "a"), Segment(50, 51, NOTHING, lost=True)])
def test_what_was_told_and_not_acknowledged_is_held(first: Segment) -> None:
    """An event, or a gap: it may have crashed before it took notice."""
    assert replayed(Rig(), first, Segment(51, 100, EVERYTHING)) == 50


def goes_on(rig: Rig, token: int) -> int:
    """Where the subscriber goes on if it comes back with this token."""
    rig.now += 1
    rig.attach(token={P: token})
    return rig.host.subscriptions.by_id(1).cursors[P].begun


def subscriptions_alone() -> Subscriptions:
    def answered(_turn: Turn, _answered: Answered) -> None:
        raise AssertionError("nobody waits for the disk")

    return Subscriptions(broker=3, backlog=Backlog(), answered=answered)


def test_who_comes_back_with_a_token_from_before_silence_misses_nothing() -> None:
    """D3, D7: silence that was acknowledged is released, and is then no gap to an older token."""
    rig = Rig()
    rig.begin(rig.attach(), 100)
    assert rig.session is not None
    rig.learn(segment(100, "aba"), Segment(103, 200, EVERYTHING))
    rig.now = SILENCE_US
    assert messages(rig.tick()) == [(103, 200, [])]
    rig.host.ack(rig.session, {P: 200})
    turn = rig.turns.turn(rig.now + SECOND_US)
    rig.host.subscriptions.flush(turn)
    save = turn.effects[-1]
    assert isinstance(save, Save)
    assert goes_on(rig, 103) == 200, "it has the last event"
    assert goes_on(rig, 102) == 102, "it has not: what is gone is to be told"
    again = subscriptions_alone()
    again.attach(Attachment(name="s", selector=Selector.parse("a", ""), ack="", session=1), 0)
    turn = rig.turns.turn()
    again.flush(turn)
    rows = turn.effects[0]
    assert isinstance(rows, Save)
    subscriptions, released = ({k: v for k, v in one.rows if v is not None} for one in (rows, save))
    restarted = subscriptions_alone()
    restarted.recover(subscriptions, released, {}, now_us=0)
    assert (restarted.by_id(1).cursors[P].quiet, restarted.by_id(1).cursors[P].released) == (103, 200)


def test_what_was_not_sent_on_this_connection_is_not_taken_for_silence() -> None:
    """An acknowledgement of what another connection, or process, was told."""
    rig = Rig()
    rig.begin(rig.attach(), 100)
    rig.learn(segment(100, "aa"), Segment(102, 200, EVERYTHING))
    assert rig.session is not None
    rig.host.ack(rig.session, {P: 101})
    assert goes_on(rig, 150) == 150
    assert rig.session is not None
    rig.host.ack(rig.session, {P: 200})
    assert goes_on(rig, 150) == 150


def test_reports_follow_what_is_saved() -> None:
    """Order of durability: record, then latestDelivered, then the report."""
    rig = Rig()
    one = rig.attach(ack="manual")
    rig.begin(one, 100)
    rig.learn(segment(100, "a"))
    rig.now = 2_000_000
    assert rig.session is not None
    rig.host.ack(rig.session, {P: 101}, 77)
    out = rig.tick()
    assert [output for output in out if isinstance(output, Confirmed)] == [
        Confirmed(subscriber=one, ticket=77)
    ]
    rig.now += 1_000_000
    (report,) = [o.report for o in rig.tick() if isinstance(o, Reported)]
    assert (report.released, report.latest_delivered, report.ended) == (101, 101, False)
    with rig.turn() as turn:
        rig.host.delete(turn, "s")
    rig.now += 1_000_000
    (report,) = [o.report for o in rig.tick() if isinstance(o, Reported)]
    assert report.ended


def test_who_has_no_room_is_not_asked_for_again_and_again() -> None:
    """D9: it goes on when it has room; until then its broker rests."""
    rig = Rig()
    rig.learn(segment(100, "ab"))
    one = rig.attach(token={P: 50})
    assert any(isinstance(output, Wants) for output in rig.out)
    rig.room = False
    rig.now += SECOND_US
    for _ in range(3):  # what is due otherwise is done
        rig.tick()
    assert rig.host.next_deadline() > rig.now
    rig.room = True
    assert any(isinstance(output, Wants) for output in rig.credit(one))


def test_a_past_that_was_not_gone_through_is_held_after_a_crash_too() -> None:
    """latestDelivered is saved now and then: a crash takes it back to before the subscription came here, and
    what is learned again up to where it came is no proof that it had what was before."""
    rig = Rig()
    rig.learn(Segment(100, 150, EVERYTHING))
    saved: dict[str, dict[bytes, bytes]] = {}
    turn = rig.turns.turn(rig.now)
    rig.host.tick(turn)
    rig.learn(Segment(150, 200, EVERYTHING))
    one = rig.attach(token={P: 50}, ack="auto")
    rig.host.subscriptions.flush(turn)
    for effect in turn.effects:
        if isinstance(effect, Save):
            saved.setdefault(effect.table, {}).update({key: value for key, value in effect.rows if value})
    again = Rig(saved)
    assert again.host.position(P) == 150
    again.learn(Segment(150, 200, EVERYTHING), segment(200, "a"))
    again.now += 2 * KEPT_US
    again.tick()
    assert again.host.subscriptions.by_id(one).token().tick(P) == 50
    assert again.host.lag(again.host.subscriptions.by_id(one), again.now)[0] == 1


def test_nothing_is_told_of_a_pubend_before_it_is_on_disk_where_it_begins() -> None:
    """A pubend met later, of which nothing is known yet up to when the subscription was created, begins where
    it is met. After a restart that has more of it, it would begin later."""
    rig = Rig()
    rig.now = 10 * SECOND_US
    one = rig.attach()
    rig.synced = False
    rig.begin(one, 100)
    rig.tick()
    assert not messages(rig.learn(segment(100, "a")))
    rig.attach()
    assert not messages(rig.out), "nor on another connection"
    rig.synced = True
    rig.carry(list(rig.waiting))
    assert messages(rig.take()) == [(100, 101, [101])]
    assert messages(rig.learn(segment(101, "a"))) == [(101, 102, [102])]
