"""Sets of receivers that share a key, and which histories leave memory."""

from __future__ import annotations

from itertools import pairwise

import pytest

from postroad.history.bulletins import MIN_PART_BYTES
from postroad.ids import MessageId
from postroad.seam.tracking import StoreAttachments, StoreFilter
from postroad.tracking.attachment import GROUP
from postroad.tracking.attachment_log import change_extents, decode_changes
from postroad.tracking.bloom_strategy import BloomTracking
from postroad.tracking.groups import MAX_GROUPS, MAX_SEEN, Groups, group_members, group_name
from postroad.tracking.keys import group_tag, subscriber_tag
from postroad.tracking.query.messages import MAX_RECEIVERS, Finding, TraceItem, TraceQuestion
from postroad.tracking.record import decode_meta
from postroad.tracking.recorder import MAX_HOLD_US
from postroad.tracking.settings import GATHER_US, TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import SECOND_US

NOW_US = 1_700_000_000_000_000
NAMES = tuple(f"s{number}" for number in range(30))


def made(**settings: int) -> Tracking:
    tracking = make_tracking(TrackingConfig(**settings), me=7, stored=(), changes=(), now_us=NOW_US)  # type: ignore[arg-type]
    for name in NAMES:
        tracking.attached(name, NOW_US)
    return tracking


def identity(number: int, now_us: int = NOW_US) -> bytes:
    return bytes(MessageId(1, 7, now_us // 1000, number))


def found(tracking: Tracking, message: bytes) -> Finding:
    question = TraceQuestion(items=(TraceItem(id=message, origin=7),))
    answer, wanted = tracking.answer(question, {})
    assert wanted == ()
    return answer.findings[0]


def test_a_set_has_a_key_from_its_second_delivery() -> None:
    groups = Groups()
    assert groups.tag(NAMES) is None
    assert groups.meet(NAMES) == (False, [])
    assert groups.meet(NAMES) == (True, [])
    assert groups.tag(NAMES) == group_tag(group_name(NAMES))
    assert group_members(group_name(NAMES)) == NAMES


def test_sets_are_bounded() -> None:
    groups = Groups()
    for number in range(MAX_SEEN + 10):
        groups.meet((str(number),) * 4)
    assert groups.meet(("0",) * 4) == (False, [])  # seen so long ago that it is forgotten
    for number in range(20, 20 + MAX_GROUPS):
        assert groups.meet((str(number),) * 4) == (True, [])
    assert groups.meet(("2000",) * 4) == (True, [("20",) * 4])
    assert len(groups) == MAX_GROUPS


def test_group_tags_are_part_of_the_format() -> None:
    assert group_tag("x") != subscriber_tag("x")
    assert group_tag('["a","b"]').hex() == "bc7348390fca16dbc935d34d2cadec90"


def test_receivers_of_a_set_are_all_named_and_cost_one_key() -> None:
    tracking = made()
    for number in range(100):
        tracking.published(identity(number), NOW_US)
        tracking.delivered(7, NAMES, identity(number), NOW_US)
    for number in (0, 1, 2, 99):
        finding = found(tracking, identity(number))
        assert tuple(receiver.subscriber for receiver in finding.delivered) == tuple(sorted(NAMES))
    assert found(tracking, identity(100)).delivered == ()
    assert tracking.metrics()["tracking_keys_total"] == 100 + len(NAMES) + 99
    tracking.check()


def test_what_is_noted_waits_to_be_added_but_not_for_long() -> None:
    tracking = made()
    tracking.tick(NOW_US)
    tracking.published(identity(1), NOW_US)
    assert tracking.next_deadline() == NOW_US + MAX_HOLD_US
    later_us = NOW_US + 2 * GATHER_US
    tracking.published(identity(2, later_us), later_us)
    assert tracking.next_deadline() == NOW_US + MAX_HOLD_US
    assert tracking.tick(later_us) == []
    assert tracking.metrics()["tracking_keys_total"] == 0
    tracking.tick(NOW_US + MAX_HOLD_US)
    assert tracking.metrics()["tracking_keys_total"] == 2


@pytest.mark.parametrize("apart_us", [-2 * SECOND_US, SECOND_US])
def test_messages_of_another_time_are_known_soon(apart_us: int) -> None:
    """Should the process die, what it lost is told by these times, not by when it died."""
    tracking = made()
    tracking.tick(NOW_US)
    tracking.delivered(7, NAMES[:1], identity(1) + identity(2, NOW_US + apart_us), NOW_US)
    tracking.delivered(7, NAMES[:1], identity(2, NOW_US + apart_us), NOW_US)
    assert tracking.next_deadline() == NOW_US + GATHER_US
    effect, *_ = tracking.tick(NOW_US + GATHER_US)
    assert isinstance(effect, StoreAttachments)
    assert effect.pressing
    assert [change.what for change in decode_changes(effect.record)[0]] == ["handled"]


def test_messages_of_another_time_are_known_though_the_next_page_begins_at_once() -> None:
    tracking = made(routing="set")
    tracking.tick(NOW_US)
    tracking.forwarded(7, (1,), identity(1, NOW_US - 2 * SECOND_US), NOW_US)
    tracking.published(identity(3, NOW_US + GATHER_US), NOW_US + GATHER_US)
    effect, *_ = tracking.tick(NOW_US + GATHER_US)
    assert isinstance(effect, StoreAttachments)
    assert [change.what for change in decode_changes(effect.record)[0]] == ["handled"]


def test_an_interval_shorter_than_the_wait_is_kept() -> None:
    tracking = made(persist_us=SECOND_US // 5)
    tracking.tick(NOW_US)
    tracking.published(identity(1), NOW_US)
    tracking.tick(NOW_US + SECOND_US // 10)
    assert tracking.next_deadline() == NOW_US + SECOND_US // 5
    assert any(isinstance(effect, StoreFilter) for effect in tracking.tick(NOW_US + SECOND_US // 5))


def test_what_is_noted_is_bounded() -> None:
    tracking = made()
    for number in range(3):
        tracking.published(identity(number) * 40_000, NOW_US)
    assert tracking.metrics()["tracking_keys_total"] == 80_000
    tracking.published(identity(4, NOW_US + GATHER_US), NOW_US + GATHER_US)
    assert tracking.metrics()["tracking_keys_total"] == 120_000


def test_pages_are_added_as_if_at_their_end() -> None:
    """A message of ten minutes ago is no part of a range, however long its page waits; one of now is."""
    tracking = made()
    tracking.published(identity(1), NOW_US)
    tracking.published(identity(2, NOW_US - 600 * SECOND_US), NOW_US)
    stored = [one for one in tracking.close(NOW_US + 900 * SECOND_US) if isinstance(one, StoreFilter)]
    now, late = (decode_meta(one.record) for one in stored)
    assert (now.lo_ms, now.hi_ms, now.singles) == (NOW_US // 1000, NOW_US // 1000, ())
    assert not late.ranged
    assert late.singles == ((NOW_US // 1000 - 600_000, NOW_US // 1000 - 600_000),)


def test_histories_in_memory_are_bounded_and_idle_ones_leave() -> None:
    tracking = made(max_histories=2, persist_us=SECOND_US)
    for origin in (11, 12, 13):
        tracking.routed(origin, 9, identity(origin), NOW_US)
    effects = tracking.tick(NOW_US + GATHER_US)
    stored = [effect for effect in effects if isinstance(effect, StoreFilter)]
    assert [decode_meta(effect.record).key.origin for effect in stored] == [11]
    assert any(isinstance(effect, StoreAttachments) for effect in effects)
    assert tracking.metrics()["tracking_histories"] == 2
    later_us = NOW_US + 60 * SECOND_US
    final = [effect for effect in tracking.tick(later_us) if isinstance(effect, StoreFilter)]
    assert [decode_meta(effect.record).key.origin for effect in final] == [12, 13]
    assert tracking.metrics()["tracking_histories"] == 0
    tracking.check()
    for origin in (11, 12, 13):
        question = TraceQuestion(items=(TraceItem(id=identity(origin), origin=origin),))
        assert tracking.answer(question, {})[0].findings[0].routed[0].origin == origin


def test_histories_that_fill_quickly_wait_once_to_be_stored() -> None:
    """With an interval of an hour and filters for ten keys there are hundreds of filters before it ends."""
    config = TrackingConfig(
        persist_us=3600 * SECOND_US, bits=160, capacity=10, hashes=7, adaptive=False, retain=False
    )
    tracking = make_tracking(config, me=1, stored=(), changes=(), now_us=NOW_US)
    assert isinstance(tracking, BloomTracking)
    for number in range(200):
        at_us = NOW_US + number * SECOND_US
        ids = [bytes(MessageId(1, 1, at_us // 1000, counter)) for counter in range(15)]
        tracking.published(b"".join(ids), at_us)
        tracking.tick(at_us + MAX_HOLD_US)
        tracking.check()
        assert len(tracking._due) <= 1
    kept = [one for one in tracking.tick(NOW_US + 5000 * SECOND_US) if isinstance(one, StoreFilter)]
    assert len(kept) <= 1
    tracking.published(ids[0], NOW_US + 6000 * SECOND_US)
    tracking.tick(NOW_US + 6001 * SECOND_US)
    assert tracking.next_deadline() is not None
    kept = [one for one in tracking.tick(NOW_US + 9601 * SECOND_US) if isinstance(one, StoreFilter)]
    assert len(kept) == 1


def test_a_large_batch_for_many_is_one_key_a_message_at_once() -> None:
    """16,384 messages for 1,000 receivers are 16 million keys, or 16,384 with a name for the receivers."""
    tracking = make_tracking(TrackingConfig(), me=7, stored=(), changes=(), now_us=NOW_US)
    names = tuple(f"subscriber {number}" for number in range(1000))
    for name in names:
        tracking.attached(name, NOW_US)
    ids = [identity(number) for number in range(16_384)]
    tracking.delivered(7, names, b"".join(ids), NOW_US)
    tracking.published(b"".join(ids), NOW_US)
    tracking.tick(NOW_US + GATHER_US)
    tracking.check()
    assert tracking.metrics()["tracking_keys_total"] == 2 * 16_384
    assert {one.subscriber for one in found(tracking, ids[77]).delivered} == set(names)


def test_a_set_whose_names_do_not_fit_one_change_is_several() -> None:
    """P4: a change of the map is told in one bulletin; a single key for each would be 3 million here."""
    tracking = make_tracking(TrackingConfig(), me=7, stored=(), changes=(), now_us=NOW_US)
    tracking.change_bytes = MIN_PART_BYTES
    names = tuple('"' * (number % 100) + f"subscriber {number}" for number in range(200))
    for name in names:
        tracking.attached(name, NOW_US)
    late = identity(1, NOW_US - 600 * SECOND_US)
    ids = [late, *(identity(number) for number in range(2, 16_385))]
    tracking.published(b"".join(ids), NOW_US)
    tracking.delivered(7, names, b"".join(ids), NOW_US)
    effects = tracking.tick(NOW_US + GATHER_US)
    log = b"".join(one.record for one in effects if isinstance(one, StoreAttachments))
    changes = decode_changes(log)[0]
    sets = [change for change in changes if change.kind == GROUP and change.what == "attach"]
    assert sorted(name for one in sets for name in group_members(one.who)) == sorted(names)
    assert {change.who for change in changes if change.what == "late"} == {one.who for one in sets}
    sizes = [end - begin for begin, end in pairwise([0, *change_extents(log)])]
    assert MIN_PART_BYTES / 2 < max(sizes) <= MIN_PART_BYTES
    assert tracking.metrics()["tracking_keys_total"] == (1 + len(sets)) * len(ids)
    for one in (ids[0], ids[77]):
        assert {receiver.subscriber for receiver in found(tracking, one).delivered} == set(names)
    tracking.check()


@pytest.mark.parametrize(("count", "width", "change_bytes"), [(20_000, 220, 1 << 18), (50_000, 40, 4096)])
def test_sets_of_one_delivery_do_not_push_each_other_out(count: int, width: int, change_bytes: int) -> None:
    """P4: where that many would be needed there is one, as large as it is: else each would be named anew
    with every page, and the map forget everything else for their names."""
    tracking = make_tracking(TrackingConfig(), me=7, stored=(), changes=(), now_us=NOW_US)
    tracking.change_bytes = change_bytes
    names = tuple(f"{number:0{width}}" for number in range(count))
    for name in names:
        tracking.attached(name, NOW_US)
    tracking.tick(NOW_US)
    named = 0
    for page in range(3):
        now_us = NOW_US + page * GATHER_US
        ids = b"".join(identity(number + 10 * page, now_us) for number in range(70_000 // count + 1))
        tracking.delivered(7, names, ids, now_us)
        effects = tracking.tick(now_us + MAX_HOLD_US)
        log = b"".join(one.record for one in effects if isinstance(one, StoreAttachments))
        named += sum(change.kind == GROUP for change in decode_changes(log)[0])
    assert named == 1


def test_the_log_lists_any_number_of_long_names() -> None:
    """T11: a record's description is bounded; 20,000 receivers with the longest names are several records."""
    tracking = make_tracking(TrackingConfig(strategy="exact"), me=7, stored=(), changes=(), now_us=NOW_US)
    names = tuple(f"{number:0255}" for number in range(20_000))
    for name in names:
        tracking.attached(name, NOW_US)
    tracking.published(identity(1), NOW_US)
    tracking.delivered(7, names, identity(1), NOW_US)
    tracking.check()
    kept = [one for one in tracking.tick(NOW_US + 60 * SECOND_US) if isinstance(one, StoreFilter)]
    assert len(kept) > 4
    finding = found(tracking, identity(1))
    assert [one.subscriber for one in finding.delivered] == list(names[:MAX_RECEIVERS])
    assert finding.more == len(names) - MAX_RECEIVERS
