"""T12: the doubts of receivers, of real messages through real filters: by bins, not by their sum.

What is claimed with doubt d must be false about that often. How often depends on who gets what, which nobody
knows beforehand, so that "about" is a fifth, and what chance adds; where doubts are upside down it is more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

import pytest

from postroad.ids import MessageId
from postroad.tracking.query.trace import Trace
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import SECOND_US

BEGIN_US: Final = 1_700_000_000_000_000
NEAR: Final = 0.2
ENOUGH: Final = 15  # messages in a bin
COARSE: Final = TrackingConfig(bits=6_000_000, capacity=1_000_000, hashes=4)  # 5.6%

Pick = Callable[[Random], Sequence[str]]


def names(count: int) -> list[str]:
    return [f"s{number}" for number in range(count)]


def sets(of: int, count: int, size: int) -> list[tuple[str, ...]]:
    random = Random(1)
    return [tuple(sorted(random.sample(names(of), size))) for _ in range(count)]


class Brokers:
    """Messages of 1, which go on to 2 where `far`; who gets which is chosen by `pick`."""

    def __init__(self, config: TrackingConfig, pick: Pick, *, of: int, messages: int, far: bool) -> None:
        self.now_us = BEGIN_US
        self.tracking: dict[int, Tracking] = {
            broker: make_tracking(config, me=broker, stored=(), changes=(), now_us=BEGIN_US)
            for broker in (1, 2)
        }
        self.tracking[1].linked(2, BEGIN_US)
        self.tracking[2].linked(1, BEGIN_US)
        there = self.tracking[2 if far else 1]
        for name in names(of):
            there.attached(name, BEGIN_US)
        self.random = Random(4)
        self.truth: dict[bytes, set[str]] = {}
        self.now_us += 2 * SECOND_US
        for number in range(messages):
            self.now_us += 2000
            identity = bytes(MessageId(5, 1, self.now_us // 1000, number % 65536))
            self.tracking[1].published(identity, self.now_us)
            got = pick(self.random)
            if far:
                self.tracking[2].routed(1, 1, identity, self.now_us)
            if got:
                there.delivered(1, got, identity, self.now_us)
            self.truth[identity] = set(got)
            for tracking in self.tracking.values():
                tracking.tick(self.now_us)

    def claims(self, count: int) -> list[list[tuple[float, bool]]]:
        """(doubt, whether it is false) of all who are said to have got so many of the messages."""
        found = []
        for identity in self.random.sample(sorted(self.truth), count):
            trace = Trace([identity], reachable=[1, 2], now_us=self.now_us)
            asks = trace.start(self.now_us)
            while asks:
                ask = asks.pop()
                answer, wanted = self.tracking[ask.broker].answer(ask.question, {})
                assert not wanted
                asks += trace.answered(ask.broker, answer, self.now_us)
            (result,) = trace.results({})
            got = self.truth[identity]
            assert got <= {one.subscriber for one in result.receivers}
            found.append([(one.doubt, one.subscriber not in got) for one in result.receivers])
        return found


def check_bins(claims: list[list[tuple[float, bool]]], *, false: int, bins: int = 2) -> None:
    """At least so many of the claims are to be false, and in so many bins."""
    assert sum(wrong for message in claims for _, wrong in message) >= false
    checked = 0
    for tenth in range(10):
        mine = [[one for one in message if int(one[0] * 10) == tenth] for message in claims]
        mine = [message for message in mine if message]
        number = sum(map(len, mine))
        if len(mine) < ENOUGH:
            continue
        wrong = sum(wrong for message in mine for _, wrong in message) / number
        doubt = sum(doubt for message in mine for doubt, _ in message) / number
        # Those of one message stand and fall together.
        slack = 2 * (0.25 / len(mine)) ** 0.5 if doubt > 0.1 else 0.0
        assert abs(wrong - doubt) < NEAR + slack, f"doubt {doubt:.2f}: {number} claims, {wrong:.2f} false"
        checked += 1
    assert checked >= bins


def check_order(claims: list[list[tuple[float, bool]]]) -> None:
    """Those that are false have no less doubt than others, where there is any to speak of."""
    doubts: dict[bool, list[float]] = {False: [], True: []}
    for doubt, wrong in (one for message in claims for one in message if one[0] > 0.1):
        doubts[wrong].append(doubt)
    false, true = (sum(doubts[wrong]) / len(doubts[wrong]) for wrong in (True, False))
    assert false > true - 0.02, f"doubt of false claims {false:.3f}, of true ones {true:.3f}"


def some_of(number: int, of: int) -> Pick:
    return lambda random: random.sample(names(of), number)


def one_of(choices: Sequence[Sequence[str]]) -> Pick:
    return lambda random: random.choice(choices)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("what", ["singles", "sets of 20", "sets of 6", "mixture", "few", "many or few"])
def test_doubts_of_receivers_are_right_at_every_height(what: str, far: bool) -> None:
    """Found: the doubts of sets were upside down, each member counting as a claim of its own."""
    some = sets(30, 20, 6)
    singles = [(name,) for name in names(30)]
    config, pick, of, messages = {
        "singles": (TrackingConfig(), one_of([(name,) for name in names(3000)]), 3000, 8000),
        "sets of 20": (TrackingConfig(), one_of(sets(200, 300, 20)), 200, 2500),
        "sets of 6": (COARSE, one_of(some), 30, 2500),
        "mixture": (COARSE, one_of([*some, *singles[:20]]), 30, 2500),
        "few": (COARSE, one_of(singles), 30, 2500),
        "many or few": (COARSE, one_of([names(30), *[names(4)] * 9]), 30, 2500),
    }[what]
    check_bins(Brokers(config, pick, of=of, messages=messages, far=far).claims(400), false=100)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("what", ["2 of 5000", "3 of 3000", "the same 3", "the same 3 of 30", "20 or 1"])
def test_doubts_are_right_where_every_message_has_a_few_receivers(what: str, far: bool) -> None:
    """Found: one receiver was taken for more likely than the two or three that each message has, and doubts
    were upside down: the more false ones there are among the claims, the less."""

    def twenty_or_one(random: Random) -> Sequence[str]:
        return random.sample(names(3000), 20 if random.random() < 0.1 else 1)

    config, pick, of, messages = {
        "2 of 5000": (TrackingConfig(), some_of(2, 5000), 5000, 4000),
        "3 of 3000": (TrackingConfig(), some_of(3, 3000), 3000, 4000),
        "the same 3": (TrackingConfig(), one_of([names(3)]), 3000, 4000),
        "the same 3 of 30": (COARSE, one_of([names(3)]), 30, 2500),
        "20 or 1": (TrackingConfig(), twenty_or_one, 3000, 3000),
    }[what]
    claims = Brokers(config, pick, of=of, messages=messages, far=far).claims(400)
    check_bins(claims, false=100, bins=1)
    check_order(claims)


def test_that_nobody_got_it_is_as_likely_as_it_was_then() -> None:
    """Most messages stay at the broker that took them, and nobody there wants them."""

    def pick(random: Random) -> Sequence[str]:
        return [random.choice(names(30))] if random.random() < 0.3 else []

    check_bins(Brokers(COARSE, pick, of=30, messages=2500, far=False).claims(800), false=200)


def test_a_set_is_one_key_and_its_members_share_its_doubt() -> None:
    """Who is claimed by a second key as well is less doubtful."""
    whole, part = tuple(names(8)), tuple(names(4))
    found = Brokers(TrackingConfig(), one_of([whole, part]), of=40, messages=40, far=True)
    identity = list(found.truth)[-1]
    found.tracking[2].delivered(
        1, part if found.truth[identity] == set(whole) else whole, identity, found.now_us
    )
    trace = Trace([identity], reachable=[1, 2], now_us=found.now_us)
    asks = trace.start(found.now_us)
    while asks:
        ask = asks.pop()
        answer, _ = found.tracking[ask.broker].answer(ask.question, {})
        finding = answer.findings[0]
        if ask.broker == 2:
            assert (finding.hits, finding.tried, finding.candidates) == (2, 42, 40)
            assert [one.keys for one in finding.delivered] == [2] * 4 + [1] * 4
            assert finding.wanted == 1.275  # a set is told by its members at first
        asks += trace.answered(ask.broker, answer, found.now_us)
    doubts = [one.doubt for one in trace.results({})[0].receivers]
    assert len(doubts) == 8
    assert len(set(doubts)) == 2
    assert 0 < doubts[0] < doubts[-1]
