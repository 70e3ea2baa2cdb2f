"""SRM timers, caches that answer, Algorithm 1 and the formulas (spec B5 to B8, B11; paper 2.2, 3.4, 3.5)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroad.client.repair.cache import CACHE_BYTES, MAX_RINGS, Cache, adjusted, least_size
from postroad.client.repair.messages import Ask, Repair
from postroad.client.repair.neighbours import MAX_ASKS, Neighbours, Tuned
from postroad.client.repair.planning import detection, plan, record_for, shared_detection
from postroad.client.repair.settings import MAX_RECORD_ENTRIES, RepairSettings
from postroad.errors import UsageError
from postroad.units import MILLISECOND_US, SECOND_US

Z, ME, OTHER = b"publishr", b"receiver", b"another "
D = 100 * MILLISECOND_US


def node(**settings: Any) -> Neighbours:
    found = Neighbours(ME, RepairSettings(policy="content", **settings), draw=lambda n: n // 2)
    found.received(Z, D)
    return found


def ask(sequence: int = 1, sent_us: int = 0) -> Ask:
    return Ask(receiver=OTHER, publisher=Z, sequence=sequence, bits=7, sent_us=sent_us, wait_us=3 * D)


def test_a_request_waits_and_is_said_again_after_twice_the_time() -> None:
    """B6: [C1 d, (C1 + C2) d] with C1 = C2 = 2: in the middle, 3 d."""
    core = node()
    core.want(Z, 1, 7, 0)
    assert core.next_deadline() == 3 * D
    (first,) = core.tick(3 * D, 3 * D)
    assert isinstance(first.message, Ask)
    assert (first.bits, first.message.wait_us) == (7, 3 * D)
    assert core.next_deadline() == 3 * D + 6 * D
    now, sent = 3 * D, 1
    for _ in range(3_000):
        now += D
        sent += len(core.tick(now, now))
    assert sent == MAX_ASKS, "and not for ever"
    core.check()


def test_hearing_the_same_request_doubles_the_wait_and_the_repair_ends_it() -> None:
    """B6."""
    core = node()
    core.want(Z, 1, 7, 0)
    core.heard_ask(ask(), D)
    assert core.tick(3 * D, 3 * D) == []
    assert core.next_deadline() == D + 6 * D
    core.heard_repair(Z, 1, 4 * D)
    assert core.tick(60 * SECOND_US, 0) == []
    assert core.asks == 0


def test_an_ask_of_the_same_round_is_a_duplicate_and_doubles_nothing() -> None:
    """B6.

    SRM: until half of the wait has passed. One of a later round is none: the round before it failed.
    """
    core = node()
    core.want(Z, 1, 7, 0)
    core.heard_ask(ask(), D)
    assert core._wanted[Z, 1].due_us == D + 6 * D
    core.heard_ask(ask(), 2 * D)
    core.heard_ask(ask(), 3 * D)
    assert core._wanted[Z, 1].due_us == D + 6 * D
    core.heard_ask(ask(), 5 * D)
    assert core._wanted[Z, 1].due_us == 5 * D + 12 * D
    core.heard_repair(Z, 1, 6 * D)
    assert core.asking.duplicates == 0.25 * 2
    assert core.asking.delay == 1.0, "it took one d until somebody asked, however long the repair took"


def test_repairs_after_the_first_are_duplicates_and_an_ask_behind_its_repair_is_not_answered() -> None:
    core = node(cache_min=5)
    for sequence in (1, 2):
        core.cache.put(Z, sequence, b"row", 7)
    core.heard_repair(Z, 1, 0)
    core.heard_ask(ask(), D)
    assert core.next_deadline() is None
    core.heard_ask(ask(2), D)
    core.heard_repair(Z, 2, 2 * D)
    core.heard_repair(Z, 2, 2 * D + 1)
    core.heard_repair(Z, 2, 2 * D + 2)
    assert core.repairing.duplicates == 0
    core.cache.put(Z, 3, b"row", 7)
    core.heard_ask(ask(3), 3 * D)
    assert core.repairing.duplicates == 0.25 * 2, "when the next one is about to be repaired"


def test_a_cache_answers_after_its_own_wait_unless_another_was_faster() -> None:
    """B6: [D1 d, (D1 + D2) d] with D1 = D2 = 2 and d from the asker: in the middle, 3 d."""
    core = node(cache_min=5)
    core.cache.put(Z, 1, b"row", 7)
    core.heard_ask(ask(sent_us=0), D)
    assert core.next_deadline() == D + 3 * D
    (sent,) = core.tick(4 * D, 4 * D)
    assert sent.message == Repair(publisher=Z, sequence=1, row=b"row")
    core.heard_ask(ask(), 5 * D)
    assert core.tick(SECOND_US, SECOND_US) == [], "the same message is not repaired again at once"
    core.cache.put(Z, 2, b"row", 7)
    core.heard_ask(ask(2, sent_us=SECOND_US), SECOND_US + D)
    core.heard_repair(Z, 2, SECOND_US + D + 1)
    assert core.tick(9 * SECOND_US, 9 * SECOND_US) == [], "cancelled"
    core.check()


def test_a_repair_goes_to_all_or_to_the_asker_by_policy() -> None:
    """B7."""
    for policy, receivers in (("content", ()), ("unicast", (OTHER,))):
        core = Neighbours(ME, RepairSettings(policy=policy), draw=lambda n: n // 2)  # type: ignore[arg-type]
        core.cache.put(Z, 1, b"row", 7)
        core.heard_ask(ask(), D)
        (sent,) = core.tick(SECOND_US, SECOND_US)
        assert sent.receivers == receivers


def test_timers_follow_duplicates_and_delays() -> None:
    """B6."""
    many, few = Tuned(2.0, 2.0), Tuned(2.0, 2.0)
    for _ in range(50):
        many.finished(3, 1.0)
        few.finished(0, 3.0)
    assert (many.first, many.spread) == (2.0, 8.0)
    assert (few.first, few.spread) == (0.5, 1.0)


def test_algorithm_1() -> None:
    """B8."""
    assert adjusted(100, closest=False, hit_ratio=1, wanted=1, least=500) == pytest.approx(90)
    assert adjusted(100, closest=True, hit_ratio=0.5, wanted=1, least=20) == pytest.approx(110)
    assert adjusted(100, closest=True, hit_ratio=0.5, wanted=1, least=200) == pytest.approx(201)
    assert adjusted(100, closest=True, hit_ratio=1, wanted=1, least=20) == pytest.approx(21)


def test_the_cache_is_a_ring_that_grows_while_requests_miss() -> None:
    """B8."""
    cache = Cache(least=5, most=300, hit_ratio=1.0)
    for now in range(0, 30 * SECOND_US, SECOND_US // 10):
        cache.put(Z, now, b"x", 0)
        cache.asked(Z, hit=False, wait_s=0.3, source_s=0.1, asker_s=0.1)
        cache.adjust(now)
        cache.check()
    assert cache.size > 50
    assert cache.get(Z, 0) is None or len(cache) == 300
    for now in range(30 * SECOND_US, 90 * SECOND_US, SECOND_US // 10):
        cache.provided(Z, here=False)
        cache.adjust(now)
    assert cache.size == 5
    cache.check()


def test_rings_of_publishers_are_adjusted_apart_and_bounded_together() -> None:
    """B8: 3.4: rate, delays and who is closest are those of one publisher."""
    cache = Cache(least=5, most=300, hit_ratio=1.0)
    for now in range(0, 20 * SECOND_US, SECOND_US // 10):
        for publisher in (Z, OTHER):
            cache.put(publisher, now, b"x", 0)
        cache.asked(Z, hit=False, wait_s=0.3, source_s=0.1, asker_s=0.1)
        cache.provided(OTHER, here=False)
        cache.adjust(now)
    assert len(cache) > 50 + 5
    assert sum(cache.get(OTHER, now) is not None for now in range(0, 20 * SECOND_US, SECOND_US // 10)) == 5
    large = Cache(least=2_000, most=2_000, hit_ratio=1.0)
    for at in range(1_000):
        large.put(Z, at, bytes(CACHE_BYTES // 500), 0)
    assert len(large) == 500
    for number in range(MAX_RINGS + 10):
        large.put(number.to_bytes(8, "big"), 1, b"", 0)
    assert large.get(Z, 999) is None
    assert large.get(bytes(6) + b"\x04\x00", 1) is not None
    large.check()


@given(match=st.floats(0, 1), loss=st.floats(0, 1), record=st.integers(0, 50), sharing=st.integers(1, 9))
def test_detection_is_a_probability_that_grows_with_the_record_and_with_who_shares_a_loss(
    match: float, loss: float, record: int, sharing: int
) -> None:
    """B11: Equation 1 and 3.5."""
    alone = detection(match, loss, record)
    shared = shared_detection(match, loss, record, sharing, 0.5)
    assert -1e-9 <= alone <= shared + 1e-9 <= 1 + 2e-9
    assert detection(match, loss, record + 1) >= alone - 1e-9
    missed = 1.0
    for _ in range(record):  # none of the next messages both matches and arrives
        missed *= 1 - match * (1 - loss)
    assert alone == pytest.approx(1 - missed, abs=1e-9)


@given(rate=st.floats(0, 1e4), wait=st.floats(0, 9), source=st.floats(0, 9), asker=st.floats(0, 9))
def test_the_least_cache_holds_what_arrives_until_the_request(
    rate: float, wait: float, source: float, asker: float
) -> None:
    """B8: 3.4: after one message more and the way of the request."""
    least = least_size(rate, wait, source, asker)
    if rate > 0:
        held_s = (least + 1) / rate
        assert held_s >= (source + 1 / rate + wait + asker) * (1 - 1e-9)


def test_the_planner_gives_the_papers_example_and_refuses_nonsense() -> None:
    """B11."""
    found = plan(match=0.05, loss=0.01, record=10, sharing=1, overlap=0.5, aim=0.99)
    assert found["detection"] == pytest.approx(0.4, abs=0.01)
    proposed = record_for(0.99, 0.05, 0.01, 1, 0.5)
    assert proposed is not None
    assert detection(0.05, 0.01, proposed) >= 0.99 > detection(0.05, 0.01, proposed - 1)
    assert record_for(0.99, 0.0001, 0.01, 1, 0.5) is None
    for match in (0.05, 0.0001):  # 91 entries would do, and none; there are at most 64
        planned = plan(match=match, loss=0.01, record=10, sharing=1, overlap=0.5, aim=0.99)
        assert planned["proposed_record"] == MAX_RECORD_ENTRIES
        assert planned["proposed_detection"] == detection(match, 0.01, MAX_RECORD_ENTRIES)
        assert planned["reaching_record"] == record_for(0.99, match, 0.01, 1, 0.5)
    with pytest.raises(UsageError, match="--match is between 0 and 1, not 2"):
        plan(match=2, loss=0, record=1, sharing=1, overlap=0, aim=0.5)
