"""Detection, requests, order and gaps of a receiver (spec B4, B9; its traps), with a publisher beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from postroad.client.repair import receiver as receivers
from postroad.client.repair.messages import Gone, Repair, Request, Summary
from postroad.client.repair.publisher import CALM, MAX_NAMES, PublisherSide
from postroad.client.repair.receiver import Lost, Receiver
from postroad.client.repair.settings import RepairSettings, settings_for
from postroad.errors import UsageError
from postroad.selectors import Selector
from postroad.selectors.tags import event_bits, selector_masks
from postroad.units import MILLISECOND_US, SECOND_US

Z, ME, OTHER = b"publishr", b"receiver", b"another "
MASKS = selector_masks(Selector.parse("a/#", "kind = 'x'"))
X, Y = (event_bits("a/b", {"kind": kind}) for kind in "xy")


def summary(first: int, *entries: int, ages_ms: tuple[int, ...] = ()) -> Summary:
    return Summary(first=first, entries=entries, ages_ms=ages_ms or (0,) * max(1, len(entries)))


def receiver(**settings: Any) -> Receiver:
    return Receiver(ME, MASKS, RepairSettings(**settings), 0)


def asked(core: Receiver, now_us: int) -> list[Request]:
    requests, _ = core.tick(now_us)
    core.check()
    return [request for _, request in requests]


def test_what_a_summary_names_and_did_not_come_is_asked_for_if_it_matches() -> None:
    """B4."""
    core = receiver()
    assert core.message(Z, 1, "one", 0) == ["one"]
    core.summary(Z, summary(1, X, Y, X, X), 0)
    assert asked(core, 99 * MILLISECOND_US) == [], "messages overtake each other"
    assert [one.wanted for one in asked(core, 100 * MILLISECOND_US)] == [(3, 4)]
    assert asked(core, 200 * MILLISECOND_US) == [], "one request at a time"
    assert core.message(Z, 3, "three", 300 * MILLISECOND_US, repair=True) == ["three"]
    assert core.message(Z, 3, "three", 301 * MILLISECOND_US, repair=True) == [], "delivered once"
    assert [one.wanted for one in asked(core, 510 * MILLISECOND_US)] == [(4,)], "lost again on the way"
    assert (core.detected, core.recovered, core.duplicates) == (2, 1, 1)


def test_nothing_counts_as_looked_at_that_no_summary_covered() -> None:
    """B4: Spec: that bug cost half of the recovery."""
    core = receiver()
    core.summary(Z, summary(1, Y), 0)
    core.summary(Z, summary(6, Y, X), 0)
    (request,) = asked(core, SECOND_US)
    assert (request.wanted, request.ranges) == ((7,), ((2, 5),))
    core.summary(Z, summary(2, Y, X, Y, Y), SECOND_US)
    assert [one.wanted for one in asked(core, 9 * SECOND_US)] == [(3, 7)]


def test_what_was_published_before_the_subscription_is_not_missed() -> None:
    core = Receiver(ME, MASKS, RepairSettings(), 5 * SECOND_US)
    core.summary(Z, summary(1_000_000, X, X, ages_ms=(1_002, 1_001)), 6 * SECOND_US)
    assert asked(core, 7 * SECOND_US) == []
    core.summary(Z, summary(1_000_002, X, ages_ms=(900,)), 7 * SECOND_US)
    assert [one.wanted for one in asked(core, 8 * SECOND_US)] == [(1_000_002,)]


def test_of_a_summary_that_begins_before_the_subscription_what_is_younger_is_missed() -> None:
    """B4.

    Found: 40 of 58 events that were lost after `subscribed` were lost in silence, since no event had come
    before them."""
    core = Receiver(ME, MASKS, RepairSettings(), 5 * SECOND_US)
    core.summary(Z, summary(10, X, X, X, X, ages_ms=(2_000, 1_001, 1_000, 10)), 6 * SECOND_US)
    assert [one.wanted for one in asked(core, 7 * SECOND_US)] == [(12, 13)]
    core.summary(Z, summary(12, X, X, X, ages_ms=(2_000, 1_010, 900)), 7 * SECOND_US)
    core.message(Z, 12, 12, 7 * SECOND_US, repair=True)
    core.message(Z, 13, 13, 7 * SECOND_US, repair=True)
    assert [one.wanted for one in asked(core, 8 * SECOND_US)] == [(14,)]


def test_what_is_before_the_first_summary_is_asked_for_back_to_where_the_subscription_began() -> None:
    """B4.

    A publisher of many events, of which the first summaries were lost: nothing is asked for in vain, and
    no bound on how many ends the search."""
    core = Receiver(ME, MASKS, RepairSettings(), 5 * SECOND_US)
    core.summary(Z, summary(1_000_000, X), 9 * SECOND_US)
    now, last = 9 * SECOND_US, 999_999
    for _ in range(40):
        now += SECOND_US
        for request in asked(core, now):
            for first, end in request.ranges:
                assert (first, end) == (last - 255, last)
                ages = tuple(
                    (1_000_000 - at) + (now - 9 * SECOND_US) // 1_000 for at in range(first, end + 1)
                )
                core.summary(Z, summary(first, *(X,) * 256, ages_ms=ages), now, answer=True)
                last = first - 1
    assert last < 1_000_000 - 4_000 <= last + 256, "four seconds, a millisecond each"
    assert core.detected == 4_001


def test_a_range_is_asked_for_as_long_as_the_publisher_answers() -> None:
    """After a cut of some seconds it is longer than the summaries of as many requests as there are tries."""
    core = receiver()
    core.summary(Z, summary(1, Y), 0)
    core.summary(Z, summary(20_001, Y), SECOND_US)
    now, first, items = SECOND_US, 2, []
    while first <= 20_000:
        now += SECOND_US // 10
        requests, more = core.tick(now)
        items += more
        for _, request in requests:
            assert request.ranges == ((first, 20_000),)
            last = min(first + 255, 20_000)
            core.summary(Z, summary(first, *(Y for _ in range(first, last + 1))), now)
            first = last + 1
    assert core.requests > 70
    assert items == []
    assert asked(core, now + 60 * SECOND_US) == []


def test_a_publisher_that_says_only_how_far_it_is_says_nothing_of_a_range() -> None:
    core = receiver()
    core.summary(Z, summary(1, Y), 0)
    core.summary(Z, summary(8, Y), 0)
    core.summary(Z, summary(9), 0)
    (request,) = asked(core, SECOND_US)
    assert request.ranges == ((2, 7),)


def test_a_quiet_publisher_is_asked_only_for_what_may_have_been_missed() -> None:
    """Found: who first heard of a publisher when that was quiet took all before for looked at."""
    core = Receiver(ME, MASKS, RepairSettings(), 5 * SECOND_US)
    core.summary(Z, summary(9, ages_ms=(1_001,)), 6 * SECOND_US)
    assert asked(core, 7 * SECOND_US) == []
    core.summary(OTHER, summary(9, ages_ms=(2_000,)), 7 * SECOND_US)
    assert [one.ranges for one in asked(core, 8 * SECOND_US)] == [((1, 8),)]


def test_a_range_that_is_given_up_is_a_gap_without_what_came() -> None:
    core = receiver()
    core.summary(Z, summary(1, Y), 0)
    core.summary(Z, summary(8, Y), 0)
    core.message(Z, 4, "came", 0)
    now, items = 0, []
    for _ in range(400):
        now += SECOND_US // 4
        items += core.tick(now)[1]
    assert items == [Lost(Z, 1, 3), Lost(Z, 4, 7)]
    assert core.message(Z, 5, "late", now, repair=True) == [], "its gap was told"
    core.check()


def test_a_publisher_that_starts_anew_is_another_one() -> None:
    """Trap: receivers must not take that for a million losses."""
    core = receiver()
    core.message(Z, 1_000_000, "old", 0)
    core.summary(Z, summary(1_000_000, X), 0)
    assert core.message(OTHER, 1, "new", 0) == ["new"]
    core.summary(OTHER, summary(1, X), 0)
    assert core.missing == 0
    (request,) = asked(core, SECOND_US)
    assert request.wanted == ()
    assert request.ranges == ((999_999 - 255, 999_999),), "bounded, and only asked about"


def test_what_cannot_be_repaired_is_a_gap_once_and_not_delivered_later() -> None:
    """B7."""
    core = receiver()
    core.summary(Z, summary(1, X, X, Y, X), 0)
    now, told = 0, []
    for _ in range(400):
        now += SECOND_US // 4
        told += core.tick(now)[1]
    assert told == [Lost(Z, 0, 2), Lost(Z, 3, 4)]
    assert core.requests == 8
    assert core.message(Z, 2, "late", now, repair=True) == []
    core.check()


def test_order_is_restored_within_the_window_and_no_longer() -> None:
    core = receiver(order_us=2 * SECOND_US)
    assert core.message(Z, 3, 3, 0) == []
    assert core.message(Z, 2, 2, 0) == []
    core.summary(Z, summary(1, X, X, X), MILLISECOND_US)
    assert core.message(Z, 1, 1, SECOND_US, repair=True) == [1, 2, 3]
    assert core.message(Z, 5, 5, SECOND_US) == []
    assert core.tick(3 * SECOND_US)[1] == [5], "the window is over"
    late = core.message(Z, 4, 4, 4 * SECOND_US)
    assert late == [Lost(Z, 3, 4)], "too late for its place, and not in silence"
    assert core.message(Z, 4, 4, 4 * SECOND_US) == []


def test_in_order_a_gap_comes_before_what_waited_for_it() -> None:
    """B7."""
    core = receiver(order_us=2 * SECOND_US)
    core.message(Z, 1, 1, 0)
    core.message(Z, 4, 4, 0)
    assert core.summary(Z, summary(1, X, X, Y, X), 0) == [1]
    assert core.tick(2 * SECOND_US - 1)[1] == []
    assert core.tick(2 * SECOND_US)[1] == [Lost(Z, 1, 2), 4]
    assert core.message(Z, 2, 2, 2 * SECOND_US, repair=True) == []
    core.summary(Z, summary(5, X, X), 3 * SECOND_US)
    core.message(Z, 6, 6, 3 * SECOND_US)
    assert core.tick(5 * SECOND_US)[1] == [Lost(Z, 4, 5), 6]
    core.message(Z, 9, 9, 5 * SECOND_US)
    assert core.tick(7 * SECOND_US)[1] == [9], "no summary has named what is before it"
    core.summary(Z, summary(7, X, Y, X), 8 * SECOND_US)
    assert core.tick(8 * SECOND_US)[1] == [Lost(Z, 6, 7)]
    core.check()
    assert core.missing == 0


def test_what_has_waited_for_long_enough_waits_for_nothing_that_came_later() -> None:
    """Found: the deadline of what came first was in the past, and the client busy until that of the other."""
    core = receiver(order_us=2 * SECOND_US)
    core.message(Z, 5, 5, 0)
    core.message(Z, 4, 4, SECOND_US)
    assert core.tick(2 * SECOND_US - 1)[1] == []
    assert core.tick(2 * SECOND_US)[1] == [4, 5]
    assert core.next_deadline() is None


def test_a_repair_that_was_not_wanted_lets_go_what_waited_for_it() -> None:
    core = receiver(order_us=2 * SECOND_US)
    core.message(Z, 2, 2, 0)
    core.summary(Z, summary(1, X, X), 0)
    assert core.false_repair(Z, 1, SECOND_US) == [None, 2]


def test_others_are_asked_when_the_publisher_is_silent_or_has_forgotten() -> None:
    """Spec B5, B10: dedicated caches are for publishers that died."""
    core = receiver()
    core.summary(Z, summary(1, X), 0)
    now = 0
    for _ in range(100):
        now += SECOND_US // 10
        core.tick(now)
        if found := core.take_content():
            break
    assert found == [(Z, 1, X)]
    assert core.requests == 4, "three to the publisher, without a word of it"
    core.summary(Z, summary(2, X), now)
    core.tick(now + SECOND_US)
    core.gone(Gone(publisher=Z, sequences=(2,)), now + SECOND_US)
    core.tick(now + SECOND_US)
    assert (Z, 2, X) in core.take_content()


def test_memory_is_bounded_whatever_comes() -> None:
    core = receiver()
    for sequence in range(1, receivers.MAX_SEEN + 2):
        core.message(Z, sequence, sequence, 0)
    core.check()
    assert core.message(Z, 1, "old", 0) == [], "older than the window: it may have been delivered"
    for number in range(receivers.MAX_SOURCES + 10):
        core.summary(number.to_bytes(8, "big"), summary(1, X), 0)
    core.check()
    assert Lost((0).to_bytes(8, "big"), 0, 1) in core.tick(0)[1], "who is forgotten is not in silence"
    core.summary(Z, summary(1 << 60, X), 0)
    core.check()


def test_a_range_that_leaves_the_window_is_a_gap_without_what_came() -> None:
    """B4: Found: it was given up in silence."""
    core = receiver()
    core.summary(Z, summary(1, Y), 0)
    core.summary(Z, summary(10, Y), 0)
    for sequence in (4, *range(11, receivers.MAX_SEEN + 11)):
        core.message(Z, sequence, sequence, 0)
    assert core.tick(0)[1] == [Lost(Z, 1, 3), Lost(Z, 4, 9)]
    core.check()
    assert all(not one.ranges for one in asked(core, SECOND_US))


def test_what_is_not_known_of_a_publisher_that_is_forgotten_is_a_gap() -> None:
    """B4."""
    core = receiver()
    core.summary(Z, summary(1, Y), 0)
    core.summary(Z, summary(1 << 60, Y), 0)
    core.message(Z, 4, 4, 0)
    for number in range(receivers.MAX_SOURCES):
        core.summary(number.to_bytes(8, "big"), summary(1, Y), 0)
    assert core.tick(0)[1] == [Lost(Z, 1, 3), Lost(Z, 4, (1 << 60) - 1)]


def test_losses_of_one_publisher_are_bounded_and_the_oldest_are_gaps() -> None:
    core = receiver()
    for first in range(1, receivers.MAX_LOST + 513, 256):
        core.summary(Z, summary(first, *(X,) * 256), 0)
        core.check()
    assert core.missing == receivers.MAX_LOST
    gaps = [item for item in core.tick(0)[1] if isinstance(item, Lost)]
    assert sum(gap.end - gap.start for gap in gaps) == 512
    assert gaps[0] == Lost(Z, 0, 1)


def test_a_subscription_whose_bits_say_too_little_stops_looking_for_losses() -> None:
    """Spec: weak bits hurt."""
    masks = selector_masks(Selector.parse("a/#", "kind > 'm'"))
    core = Receiver(ME, masks, RepairSettings(), 0)
    for sequence in range(1, receivers.MAX_FALSE + 3):
        core.summary(Z, summary(sequence, X), 0)
        core.false_repair(Z, sequence, 0)
    assert core.masks == ()


def test_a_request_for_what_is_not_published_yet_ends_no_search_for_losses() -> None:
    """Found: its answer told the one in whose name it was sent that all up to there was looked at."""
    core, victim = publisher(), receiver()
    core.publish(X, Z * 2, 0)
    victim.message(Z, 1, 1, 0)
    core.request(Request(receiver=ME, wanted=(), ranges=((1 << 40, 1 << 40),)), 0)
    assert core.tick(SECOND_US // 2) == []
    victim.summary(Z, summary(1, X), 0)
    for forged in (summary(1 << 40), summary(2, Y, Y, Y)):
        victim.summary(Z, forged, 0, answer=True)
    assert victim.unsolicited == 2
    victim.summary(Z, summary(2, X), 0)
    assert [one.wanted for one in asked(victim, SECOND_US)] == [(2,)]


@pytest.mark.parametrize("order_us", [0, SECOND_US])
@pytest.mark.parametrize("way", ["summaries", "records"])
def test_a_repair_of_what_is_not_missing_is_dropped(way: str, order_us: int) -> None:
    """B7.

    Found: one with a number far ahead made true events Gaps, and 16,385 of them made these duplicates.
    """
    core = Receiver(ME, MASKS, replace(settings_for(way, ""), order_us=order_us), 0)
    core.message(Z, 1, "1", 0)
    core.summary(Z, summary(1, X), 0)
    core.record(Z, 1, (), 0)
    # Others may find out sooner that they share a loss, but none by more than so much (3.5).
    ahead = 2 if way == "summaries" else 1 + receivers.MAX_AHEAD
    forged = [1 << 61, ahead, *range(1 << 60, (1 << 60) + receivers.MAX_SEEN + 1)]
    assert all(not core.message(Z, sequence, "forged", 0, repair=True) for sequence in forged)
    assert core.message(OTHER, 1, "of whom nothing was heard", 0, repair=True) == []
    assert core.unsolicited == len(forged) + 1
    got = [item for at in (2, 3) for item in core.message(Z, at, str(at), 0)]
    assert [*got, *core.tick(2 * SECOND_US)[1]] == ["2", "3"]
    core.check()


# --- the publisher


def publisher(**settings: Any) -> PublisherSide:
    return PublisherSide(Z, RepairSettings(**settings))


def test_each_message_is_in_two_summaries_and_a_quiet_publisher_says_how_far_it_is() -> None:
    """B9."""
    core = publisher()
    core.publish(X, b"1", 0)
    assert core.tick(SECOND_US - 1) == []
    (first,) = core.tick(SECOND_US)
    core.publish(Y, b"2", SECOND_US + 1)
    (second,) = core.tick(2 * SECOND_US + 1)
    (third,) = core.tick(3 * SECOND_US + 1)
    (fourth,) = core.tick(5 * SECOND_US + 1)
    found = [one.message for one in (first, second, third, fourth)]
    assert [(one.first, one.entries) for one in found if isinstance(one, Summary)] == [
        (1, (X,)),
        (1, (X, Y)),
        (2, (Y,)),
        (3, ()),
    ]
    core.check()


def test_many_messages_are_summarised_at_once() -> None:
    core = publisher()
    for _ in range(70):
        core.publish(X, b"", 0)
    found = [one.message for one in core.tick(0)]
    spans = [(one.first, one.last) for one in found if isinstance(one, Summary)]
    assert spans == [(1, 32), (1, 64)]
    (rest,) = core.tick(SECOND_US)
    assert isinstance(rest.message, Summary)
    assert (rest.message.first, rest.message.last) == (33, 70)


def test_one_repair_names_all_who_asked() -> None:
    """B7."""
    core = publisher()
    core.publish(X, b"row", 0)
    for at in range(MAX_NAMES + 1):
        core.request(Request(receiver=at.to_bytes(8, "big"), wanted=(1, 2)), 0)
    assert core.tick(299 * MILLISECOND_US) == []
    repairs = [one for one in core.tick(300 * MILLISECOND_US) if isinstance(one.message, Repair)]
    assert [len(one.receivers) for one in repairs] == [MAX_NAMES, 1]
    assert repairs[0].message == Repair(publisher=Z, sequence=1, row=b"row")
    core.check()


def test_a_storm_of_requests_is_bounded_and_what_is_gone_is_said() -> None:
    core = publisher(repairs_per_s=10)
    for _ in range(64):
        core.publish(X, b"row", 0)
    for at in range(1_000):
        wanted = tuple(range(1, 65))
        core.request(Request(receiver=at.to_bytes(8, "big"), wanted=wanted), 0)
    sent = core.tick(300 * MILLISECOND_US)
    assert sum(isinstance(one.message, Repair) for one in sent) == 10
    assert core.refused > 0
    later = 40 * SECOND_US
    core.tick(later)
    core.request(Request(receiver=ME, wanted=(1,)), later)
    answers = core.tick(later + 300 * MILLISECOND_US)
    assert Gone(publisher=Z, sequences=(1,)) in [one.message for one in answers]


def test_summaries_of_ranges_are_of_the_same_budget() -> None:
    """Found: 561 bytes of requests made 319 KB of summaries, and nothing bounded that."""
    core = publisher(repairs_per_s=100)
    for _ in range(1_000):
        core.publish(X, b"row", 0)
    for at in range(16):
        ranges = tuple((1 + 8 * at + more, 900) for more in range(8))
        core.request(Request(receiver=at.to_bytes(8, "big"), wanted=(), ranges=ranges), 0)
    sent = core._answer(SECOND_US)
    assert sum(len(one.message.entries) for one in sent if isinstance(one.message, Summary)) == 3 * 256
    assert core.refused == 125
    core.request(Request(receiver=ME, wanted=(), ranges=((1, 900),)), 2 * SECOND_US)
    assert len(core._answer(2 * SECOND_US)) == 1, "what is asked for again is answered later"


def test_records_hold_the_bits_of_the_messages_before() -> None:
    """Spec B3, B4: the paper's own way."""
    core = publisher(record=2, summaries=False)
    assert [core.publish(bits, b"", 0) for bits in (X, Y, X, Y)] == [(), (X,), (Y, X), (X, Y)]
    assert core.next_deadline() is None
    found = receiver(publisher_first=False)
    found.message(Z, 1, 1, 0)
    found.record(Z, 1, (), 0)
    found.message(Z, 4, 4, 0)
    found.record(Z, 4, (X, Y), 0)
    found.tick(SECOND_US)
    assert found.take_content() == [(Z, 3, X)], "2 does not match, 3 does"


def test_who_shares_a_loss_takes_the_repair_before_a_record_tells_it_of_that() -> None:
    """3.5: it is enough that one of them finds out. Found: the others dropped it; at 46 brokers and 0.1% loss
    that left 3 in 100 losses more."""
    found = receiver(publisher_first=False)
    found.record(Z, 1, (), 0)
    found.message(Z, 1, 1, 0)
    assert found.message(Z, 5, 5, 0, repair=True) == [5]
    assert found.message(Z, 5, 5, 0, repair=True) == []
    found.record(Z, 9, (X, X, X, X, X, X, X), 0)
    assert found.missing == 6, "and the others are looked for as before"
    found.check()


def test_a_record_of_an_overtaken_message_still_tells_what_is_before_it() -> None:
    """A record never counts as looked at what it does not cover, nor does what overtook it."""
    found = receiver(publisher_first=False)
    for sequence, record in ((1, ()), (9, (Y, Y)), (6, (X, Y))):
        found.record(Z, sequence, record, 0)
        found.message(Z, sequence, sequence, 0)
    found.tick(SECOND_US)
    assert found.take_content() == [(Z, 5, X)]
    assert found.detected == 1


def test_a_record_grows_with_what_is_asked_for_and_shrinks_when_nothing_is() -> None:
    """B3."""
    core = publisher(record=2, max_record=4, summaries=False)
    for _ in range(10):
        core.publish(X, b"", 0)
    for _ in range(9):
        core.missed(3)
    assert core.record == 3, "one message, however many ask for it"
    core.missed(99)
    assert core.record == 3, "which was never published"
    for sequence in (4, 5, 6):
        core.missed(sequence)
    assert core.record == 4
    assert len(core.publish(X, b"", 0)) == 4
    for _ in range(CALM - 2):
        core.publish(X, b"", 0)
    assert core.record == 4
    for _ in range(3 * CALM):
        core.publish(X, b"", 0)
    assert core.record == 2
    core.check()


def test_who_sends_records_says_its_last_messages_once_it_is_quiet() -> None:
    """Spec B9: no record will name them."""
    core = publisher(record=2, summaries=False, quiet_us=SECOND_US)
    for at in range(50):
        core.publish(X, b"", at * SECOND_US // 2)
        assert core.tick(at * SECOND_US // 2) == []
    last_us = 49 * SECOND_US // 2
    (first,) = core.tick(last_us + SECOND_US)
    assert first.message == summary(49, X, X, ages_ms=(1_500, 1_000))
    due = core.next_deadline()
    assert due is not None
    (again,) = core.tick(due)
    assert isinstance(again.message, Summary)
    assert (again.message.first, again.message.last) == (49, 50)
    found = receiver(publisher_first=False)
    found.record(Z, 40, (), 0)
    found.message(Z, 40, 40, 0)
    found.summary(Z, again.message, last_us)
    requests, lost = found.tick(last_us + SECOND_US)
    assert (requests, lost) == ([], [])
    assert found.take_content() == [(Z, 49, X), (Z, 50, X)]
    for later in range(60):
        assert found.tick(last_us + later * SECOND_US)[1] in (
            [],
            [Lost(Z, 48, 50)],
        ), "what is between is no Gap: nobody knows of it"


def test_what_a_program_chooses_is_checked() -> None:
    assert settings_for("records", "eu").scope == "eu"
    assert settings_for("summaries", "") == RepairSettings()
    for way, scope in (("reports", ""), ("records", "a/b"), ("records", "x" * 33), ("records", 3)):
        with pytest.raises(UsageError):
            settings_for(way, scope)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        RepairSettings(max_record=65)


def test_what_a_broker_refused_is_neither_summarised_nor_served_nor_missed() -> None:
    """Found: a writer without the right to a topic published to it by repair."""
    core, ids = publisher(), [Z + bytes((0,) * 7 + (at,)) for at in range(1, 5)]
    for identity in ids:
        core.publish(X, identity + b"row", 0)
    everything = Receiver(ME, selector_masks(Selector.parse("#", "")), RepairSettings(), 0)
    everything.summary(Z, summary(1, X, X), 0)  # it left before the broker's answer came
    core.refused_by_broker(ids[1])
    core.refused_by_broker(b"unknown.unknown.")
    core.request(Request(receiver=ME, wanted=(1, 2)), 0)
    answers = core.tick(2 * SECOND_US)
    assert [one.message.sequence for one in answers if isinstance(one.message, Repair)] == [1]
    for answer in answers:
        if isinstance(answer.message, Summary):
            everything.summary(Z, answer.message, 2 * SECOND_US)
    assert [one.wanted for one in asked(everything, 3 * SECOND_US)] == [(1, 3, 4)], "2 is nobody's loss"
    core.check()
