"""All maps that a broker told a lake, as one: what it forgot since is still known (P5, T10)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from tests.worlds.attachment_maps import Plain

from postroad.history.bulletins import running_number
from postroad.spark.lake import rows
from postroad.spark.trace.bulk import _landed_from, _unlanded
from postroad.spark.trace.maps import told_maps
from postroad.spark.trace.views import FOREVER, NOT_LANDED, BrokerView, Spans
from postroad.tracking.attachment import GROUP, NEIGHBOUR, SUBSCRIBER, AttachmentMap
from postroad.tracking.attachment_log import DISK, FOREVER_US, SNAPSHOT, Change, Promise
from postroad.tracking.settings import TrackingConfig
from postroad.units import MILLISECOND_US, SECOND_US

BEGAN_US = 1_700_000_000 * SECOND_US
CONFIG = TrackingConfig()
SLACK_US = CONFIG.skew_us + CONFIG.jitter_us
PROMISE = Promise(
    persist_us=CONFIG.persist_us, lag_us=0, skew_us=CONFIG.skew_us, jitter_us=CONFIG.jitter_us, filter_us=1
)


def bulletin(number: int, changes: Sequence[Change], *, whole: bool = False, boot: int = 1) -> list[Row]:
    landed = rows.attachments(1, "b", running_number(boot, number), changes, whole=whole)
    return [Row(**row) for row in landed.to_pylist()]


def view(told: Iterable[Any]) -> BrokerView:
    maps, untold = told_maps(told)
    unlanded = _unlanded(maps, untold)
    return BrokerView.of(1, "b", maps, config=CONFIG, stored_us=FOREVER, unlanded=unlanded)


def named(spans: Spans, time_ms: int) -> list[str]:
    return [name for name, there in zip(spans.names, spans.at(np.array([time_ms]))[0], strict=True) if there]


def ms(second: int) -> int:
    return BEGAN_US // MILLISECOND_US + 1000 * second


def at(what: str, second: int, **more: Any) -> Change:
    return Change(what=what, at_us=BEGAN_US + second * SECOND_US, **more)


def ended(second: int) -> Change:
    """The end of a map that was told then."""
    return at("start", second, who=SNAPSHOT, kind="all", promise=PROMISE)


START = at("start", 0, kind="all", promise=PROMISE)
CAME = at("attach", 10, kind=SUBSCRIBER, who="s")
WENT = at("detach", 20, kind=SUBSCRIBER, who="s")


def test_what_was_lost_without_an_end_ends_with_the_next_map() -> None:
    """P5: a set of receivers that does not fit a bulletin is told as lost for as long as it is in use."""
    lost = at("lost", 30, kind=DISK, until_us=FOREVER_US, noted_us=BEGAN_US + 30 * SECOND_US)
    told = [*bulletin(1, [START, ended(1)], whole=True), *bulletin(2, [lost])]
    known = at("lost", 30, kind=DISK, until_us=BEGAN_US + 40 * SECOND_US, noted_us=BEGAN_US + 40 * SECOND_US)

    def partial(told: list[Row]) -> list[bool]:
        return [bool(named(view(told).lost, ms(second))) for second in (10, 35, 80, 200)]

    assert partial(told) == [False, True, True, True]
    forgotten = bulletin(3, [START, ended(100)], whole=True)
    assert partial([*told, *forgotten]) == [False, True, True, False]
    told += bulletin(3, [START, known, ended(100)], whole=True)
    assert partial(told) == [False, True, False, False]


def test_what_a_broker_forgot_after_it_was_told_is_known_here() -> None:
    """P5: by a change, and by a map told anew. The same holds for what is lost, and for links."""
    known = [CAME, WENT, at("attach", 11, kind=NEIGHBOUR, who="7"), at("detach", 12, kind=NEIGHBOUR, who="7")]
    known.append(at("lost", 30, until_us=BEGAN_US + 31 * SECOND_US))
    told = [*bulletin(1, [START, ended(1)], whole=True), *bulletin(2, [*known, at("begin", 500)])]
    for more in ([], bulletin(3, [at("start", 500), at("begin", 500), ended(600)], whole=True)):
        told += more
        found = view(told)
        assert (found.begins_ms, found.forgot_ms) == (ms(0), -FOREVER)
        assert (named(found.subscribers, ms(15)), named(found.subscribers, ms(25))) == (["s"], [])
        assert (named(found.neighbours, ms(5)), named(found.neighbours, ms(15))) == (["7"], [])
        assert [bool(named(found.lost, ms(second))) for second in (15, 31, 100, 550)] == [False, True] + [
            False
        ] * 2


def test_what_a_broker_had_forgotten_before_it_first_told_its_map_is_not() -> None:
    """P5."""
    told = bulletin(1, [at("start", 50), at("begin", 50), ended(60)], whole=True)
    found = view([*told, *bulletin(2, [at("begin", 70)])])
    assert (found.begins_ms, found.forgot_ms) == (ms(50), ms(50))


def test_what_went_on_in_a_map_ends_before_a_later_one_that_lacks_it() -> None:
    """P5: Its end was not told here, and was forgotten since: nobody stays for ever."""
    told = bulletin(1, [START, CAME, at("attach", 5, kind=NEIGHBOUR, who="7"), ended(15)], whole=True)
    assert named(view(told).subscribers, ms(10_000)) == ["s"]
    told += bulletin(1, [at("start", 90), at("begin", 90), ended(100)], whole=True, boot=2)
    found = view(told)
    assert (named(found.subscribers, ms(99)), named(found.subscribers, ms(102))) == (["s"], [])
    assert (named(found.neighbours, ms(99)), named(found.neighbours, ms(102))) == (["7"], [])


@pytest.mark.parametrize("missing", ["a bulletin", "the last before a start", "what nobody wanted"])
def test_what_was_forgotten_and_may_not_have_been_told_is_not_landed(missing: str) -> None:
    """P5."""
    late = at("handled", 30, until_us=BEGAN_US + 40 * SECOND_US, noted_us=BEGAN_US + 120 * SECOND_US)
    told = [*bulletin(1, [START, ended(1)], whole=True), *bulletin(2, [CAME, at("settled", 100)])]
    whole = [at("start", 140, promise=PROMISE), at("begin", 140), late, ended(200)]
    if missing == "a bulletin":
        told += [*bulletin(4, [at("settled", 130)]), *bulletin(5, whole, whole=True)]
    elif missing == "what nobody wanted":
        told += bulletin(3, whole, whole=True)
    else:
        told += bulletin(1, whole, whole=True, boot=2)
    found = view(told)
    seconds = [12, 35, 78, 90, 139, 142]
    assert [second for second in seconds if named(found.lost, ms(second)) == [NOT_LANDED]] == [35, 90, 139]
    assert found.forgot_ms == -FOREVER
    assert named(found.subscribers, ms(12)) == ["s"]


def test_a_first_map_whose_end_is_missing_does_not_say_when_it_was_told() -> None:
    """P5: the lake has what was stored since the next one. Found: it was taken to reach back to the first
    start that the next one names."""
    whole = bulletin(3, [START, CAME, WENT, ended(60)], whole=True)
    for told in (whole, [*bulletin(1, [START, CAME], whole=True), *whole]):
        assert _landed_from(told) == BEGAN_US + 60 * SECOND_US


class Life:
    """A broker whose map is told to a lake, now and then not."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now_us = BEGAN_US
        self.held, self.log = AttachmentMap.restored(
            (), last_stored_us=0, now_us=self.now_us, routing="all", promise=PROMISE
        )
        self.plain = Plain()
        self.late: list[tuple[str, str, int]] = []
        self.told: list[Row] = []
        self.boot, self.number = 1, 0
        self.silent = False  # nothing that it tells comes to the lake until its map is told
        self.missing = False  # there was such a time
        self.ahead = False  # a message was ahead of the clock: here all links since it was made are known
        self.tell_map()

    def tell_map(self) -> None:
        self.silent = False
        changes = list(self.held.snapshot(self.now_us))
        cut = self.random.randrange(1, len(changes))  # it takes two bulletins
        self._tell(changes[:cut], whole=True)
        self._tell(changes[cut:])

    def _tell(self, changes: Sequence[Change], *, whole: bool = False) -> None:
        self.number += 1
        if not self.silent:
            self.told += bulletin(self.number, changes, whole=whole, boot=self.boot)

    def step(self) -> None:
        random = self.random
        self.now_us += random.choice((1, 20, 400)) * SECOND_US
        kind, who = random.choice((SUBSCRIBER, GROUP, NEIGHBOUR)), random.choice("123")
        time_ms = (self.now_us - random.randrange(3_000) * SECOND_US) // MILLISECOND_US
        news: list[Change] = []
        match random.choice((*["attach"] * 4, *["detach"] * 4, "late", "lose", *OTHERS)):
            case "attach":
                news = self.held.attached(kind, who, self.now_us)
            case "detach":
                news = self.held.detached(kind, who, self.now_us)
            case "late" if kind != NEIGHBOUR:
                news = self.held.late(kind, who, time_ms, time_ms, self.now_us)
                self.late.append((kind, who, time_ms))
            case "lose":
                start_us = time_ms * MILLISECOND_US
                news = self.held.lose(start_us, start_us + SECOND_US, self.now_us)
            case "ahead":
                ahead_ms = (self.now_us + 500 * SECOND_US) // MILLISECOND_US
                news = self.held.handled(ahead_ms, ahead_ms, self.now_us, SECOND_US)
                self.ahead = True
            case "forget":
                horizon_us = self.now_us - random.choice((0, 100, 2_000)) * SECOND_US
                if self.held.forget(horizon_us - SLACK_US, self.now_us):
                    news = self.held.begin_at(horizon_us)
                self.log = list(self.held.snapshot(self.now_us))
            case "map":
                self.tell_map()
            case "silent":
                self.silent = self.missing = True
            case "start":
                self.start(random.choice((True, False)))
        self.plain.apply(news)
        self.log += news
        if news:
            self._tell(news)

    def start(self, stopped: bool) -> None:
        last = self.held.stopped(self.now_us) if stopped else []
        self.now_us += SECOND_US
        self.held, news = AttachmentMap.restored(
            [*self.log, *last], last_stored_us=0, now_us=self.now_us, routing="all", promise=PROMISE
        )
        self.log += [*last, *news]
        self.plain.apply([*last, *news])
        self.boot, self.number = self.boot + 1, 0
        self.tell_map()


OTHERS = ("ahead", "forget", "map", "silent", "start")


@given(seed=st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_whatever_a_broker_forgets_a_lake_omits_nobody(seed: int) -> None:
    """P5: of any time, unless it says that it does not have it; and of what the broker still knows it says
    the same, if it was told all of it."""
    random = Random(seed)
    life = Life(random)
    for _ in range(60):
        life.step()
    life.tell_map()
    found, held = view(life.told), life.held
    assert found.forgot_ms == -FOREVER
    assert life.missing or NOT_LANDED not in found.lost.names
    forgot_ms = -(-(held.forgot_us or 0) // MILLISECOND_US)
    window = {"skew_us": CONFIG.skew_us, "delay_us": CONFIG.jitter_us}
    times = [random.randrange(BEGAN_US, life.now_us) // MILLISECOND_US for _ in range(40)]
    for time_ms in [*times, *(time_ms for _, _, time_ms in life.late)]:
        first_us = time_ms * MILLISECOND_US - CONFIG.skew_us
        last_us = first_us + MILLISECOND_US - 1 + 2 * CONFIG.skew_us + CONFIG.jitter_us
        lost = named(found.lost, time_ms)
        assert lost or not held.lost_at(time_ms, **window)
        for kind, spans in ((SUBSCRIBER, found.subscribers), (GROUP, found.groups)):
            there = {
                who
                for of, who, start_us, end_us in life.plain.spans
                if of == kind and start_us <= last_us and (end_us is None or first_us <= end_us)
            }
            if not life.missing:
                there |= {who for of, who, late_ms in life.late if (of, late_ms) == (kind, time_ms)}
            assert there <= set(named(spans, time_ms)) or NOT_LANDED in lost
            if time_ms >= forgot_ms and not life.missing:
                assert named(spans, time_ms) == held.at(kind, time_ms, **window)
        linked = named(found.neighbours, time_ms)
        assert set(life.plain.since(NEIGHBOUR, first_us)) <= set(linked) or life.missing
        if time_ms >= forgot_ms and not (life.missing or life.ahead):
            assert linked == held.since(NEIGHBOUR, time_ms, skew_us=CONFIG.skew_us)


def unlanded_one_by_one(changes: Sequence[Change], gaps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """As `_unlanded`, each gap by itself."""
    found: list[tuple[int, int]] = []
    maps = sorted(one.at_us for one in changes if one.what == "start" and one.who == SNAPSHOT)
    for start_us, end_us in gaps:
        since_us = start_us - 2 * PROMISE.persist_us
        mapped_us = next((at_us for at_us in maps if at_us > end_us), FOREVER)
        found.append((since_us, end_us if mapped_us < FOREVER else FOREVER))
        found += [
            (one.at_us, one.until_us)
            for one in changes
            if one.what == "handled" and since_us - PROMISE.persist_us <= one.noted_us <= mapped_us
        ]
    return found


@given(seed=st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
def test_all_gaps_at_once_are_each_by_itself(seed: int) -> None:
    """P5."""
    random = Random(seed)
    maps: list[list[Change]] = [[START]]
    for _ in range(random.randrange(12)):
        second = random.randrange(1_000)
        if random.random() < 0.3:
            maps.append([ended(second)])
        else:
            until_us = BEGAN_US + (second + random.randrange(1, 60)) * SECOND_US
            noted_us = BEGAN_US + random.randrange(1_000) * SECOND_US
            maps[-1].append(at("handled", second, until_us=until_us, noted_us=noted_us))
    starts = [BEGAN_US + random.randrange(1_000) * SECOND_US for _ in range(random.randrange(5))]
    gaps = [(start_us, start_us + random.randrange(1, 90) * SECOND_US) for start_us in starts]
    found = _unlanded(maps, gaps)
    wanted = unlanded_one_by_one([one for of in maps for one in of], gaps)
    for second in range(-60, 1_100):
        time_us = BEGAN_US + second * SECOND_US + 1
        assert any(lo < time_us <= hi for lo, hi in found) == any(lo < time_us <= hi for lo, hi in wanted)
