"""The subscriber hosting broker: switchover, slow subscribers, gaps, reconnect anywhere (D4, D5, D9, D10)."""

from __future__ import annotations

from itertools import count, pairwise

import pytest

from postroad.config import DEFAULT_LIMITS
from postroad.durable.subscriber.catchup import CatchupStream
from postroad.durable.subscriber.hosting import KEPT_US, SILENCE_US, Hosting
from postroad.durable.subscriber.outputs import Confirmed, Deliver, DeliverGap, Output, Reported, Wants
from postroad.durable.subscriber.subscriptions import Subscriptions
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.events.token import CheckpointToken
from postroad.ids import HISTORY, IdSource
from postroad.seam.storage import Append, Appended, Read, ReadDone, Save, Saved
from postroad.selectors import Selector
from postroad.streams.knowledge import EVERYTHING, NOTHING, Segment
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.frames import Kind

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
        tags = count(1)
        self.sessions = count(1)
        self.room = True
        self.now = 0
        self.spent = 0
        self.records: list[tuple[int, int, bytes]] = []
        self.synced = True
        self.waiting: list[Append | Save] = []
        self.host = Hosting(
            broker=3,
            boot=1,
            new_tag=lambda: next(tags),
            room=lambda _: self.room,
            spend=self.spend,
            need=dict,
            now_us=0,
        )
        self.host.recover(saved or {})
        self.host.follow(P, start=100, now_us=0)

    def spend(self, _subscriber: int, size: int) -> None:
        self.spent += size

    def attach(
        self, name: str = "s", topic: str = "a", token: dict[int, int] | None = None, **rest: str
    ) -> int:
        given = None if token is None else CheckpointToken(token)
        attached, outputs = self.host.attach(
            name=name,
            selector=Selector.parse(topic, ""),
            ack=rest.get("ack", ""),
            session=next(self.sessions),
            token=given,
            now_us=self.now,
        )
        self.out = self.carry(outputs)
        assert attached.subscription is not None
        self.session = attached.subscription.session
        return attached.subscription.id

    def carry(self, outputs: list[Output]) -> list[Output]:
        """Storage answers at once, unless `synced` is false; the rest is returned, in order."""
        left: list[Output] = []
        queue = list(outputs)
        while queue:
            effect = queue.pop(0)
            if isinstance(effect, Append | Save) and not self.synced:
                self.waiting.append(effect)
            elif isinstance(effect, Append):
                self.records.append((effect.first, effect.last, effect.data))
                queue += self.host.stored(Appended(tag=effect.tag), self.now)
            elif isinstance(effect, Save):
                queue += self.host.stored(Saved(tag=effect.tag), self.now)
            elif isinstance(effect, Read):
                found = tuple(one for one in self.records if one[1] > effect.start and one[0] < effect.end)
                done = ReadDone(tag=effect.tag, records=found, missing=(), more=False)
                queue += self.host.stored(done, self.now)
            else:
                left.append(effect)
        self.host.check()
        return left

    def learn(self, *segments: Segment) -> list[Output]:
        return self.carry([output for one in segments for output in self.host.learn(P, one, self.now)])


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
    rig.host.begin(one, P, 100, 0)
    rig.synced = False
    assert messages(rig.learn(segment(100, "aba"))) == [(100, 103, [101, 103])]
    assert rig.spent > 0
    assert rig.host.status()["constreams"][0]["latest_delivered"] == 100  # type: ignore[index]
    (append,) = rig.waiting
    rig.host.stored(Appended(tag=append.tag), 0)
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
    rig.host.begin(one, P, 100, 0)
    assert rig.session is not None
    rig.host.detach(rig.session)
    parts = [segment(100, "ab"), segment(102, "bbbbbbbbbbbbbbbb"), segment(118, "ba")]
    rig.learn(*parts)
    out = reconnected(rig, 100)
    (wants,) = [output for output in out if isinstance(output, Wants)]
    assert wants.spans == ((100, 101), (119, 120))
    assert one in rig.host._pubends[P].catchups
    later = messages(rig.carry(rig.host.answer(P, [parts[2]], 0)))
    assert later == [], "not before what comes first"
    got = messages(rig.carry(rig.host.answer(P, [parts[0]], 0)))
    assert got == [(100, 119, [101]), (119, 120, [120])]
    assert one not in rig.host._pubends[P].catchups
    assert messages(rig.learn(segment(120, "a"))) == [(120, 121, [121])]


def test_a_subscriber_without_room_catches_up_from_memory() -> None:
    """D9: it becomes a catchup subscriber, nothing is buffered for it."""
    rig = Rig()
    one = rig.attach()
    rig.host.begin(one, P, 100, 0)
    rig.room = False
    assert messages(rig.learn(segment(100, "a"), segment(101, "a"), segment(102, "b"))) == []
    assert one in rig.host._pubends[P].catchups
    rig.room = True
    assert messages(rig.carry(rig.host.credit(one, 0))) == [(100, 101, [101]), (101, 102, [102])]
    assert one not in rig.host._pubends[P].catchups


def test_what_was_released_is_a_gap_with_exact_bounds() -> None:
    """D8: the gap names the ticks that matched, not all that is lost."""
    rig = Rig()
    one = rig.attach()
    rig.host.begin(one, P, 100, 0)
    assert rig.session is not None
    rig.host.detach(rig.session)
    rig.learn(segment(100, "bbbaab"), segment(106, "ba"))
    reconnected(rig, 100)
    lost = Segment(90, 106, NOTHING, lost=True)
    got = messages(rig.carry(rig.host.answer(P, [lost, segment(106, "ba")], 0)))
    assert got == [(103, 105, None), (107, 108, [108])]


def test_a_subscriber_from_elsewhere_is_refiltered() -> None:
    """D10: this broker has no PFS for it before it came."""
    rig = Rig()
    parts = [segment(100, "ab"), segment(102, "ba")]
    rig.learn(*parts)
    out = reconnected(rig, 100)
    (wants,) = [output for output in out if isinstance(output, Wants)]
    assert wants.spans == ((100, 104),)
    got = messages(rig.carry(rig.host.answer(P, parts, 0)))
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
    rig.host.begin(one, P, 100, 0)
    assert messages(rig.learn(Segment(100, 110, NOTHING, lost=True))) == [(100, 110, None)]
    assert rig.host._pubends[P].filtering.doubt == 110


@pytest.mark.parametrize("token", [None, {HISTORY_OF_7: 50, P: 50}])
def test_only_what_can_have_something_for_it_is_followed(token: dict[int, int] | None) -> None:
    """What a broker says about itself is on a pubend of its own: others hear of no gap there."""
    rig = Rig()
    rig.host.follow(HISTORY_OF_7, start=100, now_us=0)
    plain, about = rig.attach("plain", token=token), rig.attach("about", "$postroad/#", token=token)
    for one in (plain, about):
        for pubend in (P, HISTORY_OF_7):
            rig.carry(rig.host.begin(one, pubend, 100, 0))
    rig.host.acknowledged(rig.host.subscriptions.by_id(plain), CheckpointToken({HISTORY_OF_7: 60}))
    named = {one.name: sorted(one.token()) for one in rig.host.subscriptions}
    assert named == {"plain": [P], "about": [HISTORY_OF_7]}
    out = rig.carry(rig.host.learn(HISTORY_OF_7, Segment(100, 110, NOTHING, lost=True), rig.now))
    told = [one.subscribers for one in out if isinstance(one, DeliverGap)]
    assert told == ([(about,)] if token is None else []), "who catches up hears of it in its turn"


def test_tokens_advance_over_silence() -> None:
    """Section 4.1: a silence message to who keeps its token; a token kept here just advances."""
    rig = Rig()
    one = rig.attach("mine")
    rig.host.begin(one, P, 100, 0)
    other = rig.attach("yours", ack="auto")
    rig.host.begin(other, P, 100, 0)
    rig.learn(Segment(100, 200, EVERYTHING))
    rig.now = SILENCE_US
    out = rig.carry(rig.host.tick(rig.now))
    assert messages(out) == [(100, 200, [])]
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
    rig.carry(rig.host.answer(P, list(answers), rig.now))
    assert rig.session is not None
    rig.host.detach(rig.session)
    rig.learn(Segment(100, 200, EVERYTHING))
    rig.now += 2 * KEPT_US
    rig.carry(rig.host.tick(rig.now))
    return rig.host.subscriptions.by_id(one).token().tick(P)


def test_who_leaves_after_a_past_without_anything_for_it_holds_no_storage() -> None:
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


def test_who_comes_back_with_a_token_from_before_silence_misses_nothing() -> None:
    """D3, D7: silence that was acknowledged is released, and is then no gap to an older token."""
    rig = Rig()
    rig.host.begin(rig.attach(), P, 100, 0)
    assert rig.session is not None
    rig.learn(segment(100, "aba"), Segment(103, 200, EVERYTHING))
    rig.now = SILENCE_US
    assert messages(rig.carry(rig.host.tick(rig.now))) == [(103, 200, [])]
    rig.host.ack(rig.session, {P: 200})
    *_, save = rig.host.subscriptions.flush(rig.now + SECOND_US)
    assert isinstance(save, Save)
    assert goes_on(rig, 103) == 200, "it has the last event"
    assert goes_on(rig, 102) == 102, "it has not: what is gone is to be told"
    again = Subscriptions(broker=3, new_tag=count(1).__next__)
    again.attach(name="s", selector=Selector.parse("a", ""), ack="", session=1, token=None, now_us=0)
    rows, *_ = again.flush(0)
    assert isinstance(rows, Save)
    subscriptions, released = ({k: v for k, v in one.rows if v is not None} for one in (rows, save))
    restarted = Subscriptions(broker=3, new_tag=count(1).__next__)
    restarted.recover(subscriptions, released, {}, now_us=0)
    assert (restarted.by_id(1).cursors[P].quiet, restarted.by_id(1).cursors[P].released) == (103, 200)


def test_what_was_not_sent_on_this_connection_is_not_taken_for_silence() -> None:
    """An acknowledgement of what another connection, or process, was told."""
    rig = Rig()
    rig.host.begin(rig.attach(), P, 100, 0)
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
    rig.host.begin(one, P, 100, 0)
    rig.learn(segment(100, "a"))
    rig.now = 2_000_000
    assert rig.session is not None
    rig.host.ack(rig.session, {P: 101}, 77)
    out = rig.carry(rig.host.tick(rig.now))
    assert [output for output in out if isinstance(output, Confirmed)] == [
        Confirmed(subscriber=one, ticket=77)
    ]
    rig.now += 1_000_000
    (report,) = [o.report for o in rig.carry(rig.host.tick(rig.now)) if isinstance(o, Reported)]
    assert (report.released, report.latest_delivered, report.ended) == (101, 101, False)
    rig.host.delete("s")
    rig.now += 1_000_000
    (report,) = [o.report for o in rig.carry(rig.host.tick(rig.now)) if isinstance(o, Reported)]
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
        rig.carry(rig.host.tick(rig.now))
    assert rig.host.next_deadline() > rig.now
    rig.room = True
    assert any(isinstance(output, Wants) for output in rig.host.credit(one, rig.now))


def test_a_past_that_was_not_gone_through_is_held_after_a_crash_too() -> None:
    """latestDelivered is saved now and then: a crash takes it back to before the subscription came here, and
    what is learned again up to where it came is no proof that it had what was before."""
    rig = Rig()
    rig.learn(Segment(100, 150, EVERYTHING))
    saved: dict[str, dict[bytes, bytes]] = {}
    effects = rig.host.tick(rig.now)
    rig.learn(Segment(150, 200, EVERYTHING))
    one = rig.attach(token={P: 50}, ack="auto")
    for effect in (*effects, *rig.host.subscriptions.flush(rig.now)):
        if isinstance(effect, Save):
            saved.setdefault(effect.table, {}).update({key: value for key, value in effect.rows if value})
    again = Rig(saved)
    assert again.host.position(P) == 150
    again.learn(Segment(150, 200, EVERYTHING), segment(200, "a"))
    again.now += 2 * KEPT_US
    again.carry(again.host.tick(again.now))
    assert again.host.subscriptions.by_id(one).token().tick(P) == 50
    assert again.host.lag(again.host.subscriptions.by_id(one), again.now)[0] == 1


def test_nothing_is_told_of_a_pubend_before_it_is_on_disk_where_it_begins() -> None:
    """A pubend met later, of which nothing is known yet up to when the subscription was created, begins where
    it is met. After a restart that has more of it, it would begin later."""
    rig = Rig()
    rig.now = 10 * SECOND_US
    one = rig.attach()
    rig.synced = False
    rig.carry(rig.host.begin(one, P, 100, rig.now))
    rig.carry(rig.host.tick(rig.now))
    assert not messages(rig.learn(segment(100, "a")))
    rig.attach()
    assert not messages(rig.out), "nor on another connection"
    rig.synced = True
    told = messages(rig.carry(list(rig.waiting)))
    assert told == [(100, 101, [101])]
    assert messages(rig.learn(segment(101, "a"))) == [(101, 102, [102])]
