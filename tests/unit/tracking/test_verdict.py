"""T12: what is made of the brokers' answers, also of many, of strange and of hostile ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import comb

import msgspec
import numpy as np
import pytest
from msgspec import structs

from postroad.errors import PeerError
from postroad.ids import COUNT_BITS, LAST_COUNT, MessageId
from postroad.tracking.query import lookup, verdict
from postroad.tracking.query.messages import (
    MAX_CANDIDATES,
    MAX_NEIGHBOURS,
    MAX_RECEIVERS,
    MAX_SIGHTINGS,
    Finding,
    Forwarding,
    Receiver,
    Sighting,
    TraceAnswer,
    TraceItem,
    TraceQuestion,
)
from postroad.tracking.query.render import dot, tree
from postroad.tracking.query.trace import Ask, Trace, TraceLimits
from postroad.tracking.query.verdict import (
    TRUE_BRANCHES,
    TRUE_DEAD_ENDS,
    RouteStep,
    TraceResult,
    common,
    judge,
    share,
    within,
)
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import make_tracking

TIME_MS = 1_700_000_000_000
IDENTITY = MessageId(5, 1, TIME_MS, 0)
RARE = TRUE_DEAD_ENDS / TRUE_BRANCHES


def judged(findings: Mapping[int, Finding]) -> TraceResult:
    return judge(IDENTITY, findings, failed=[], stopped="", names={})


def received(count: int, fpp: float) -> tuple[Receiver, ...]:
    return tuple(Receiver(subscriber=f"s{number}", fpp=fpp) for number in range(count))


def sighting(neighbour: int, fpp: float = 1e-3) -> Sighting:
    return Sighting(origin=1, neighbour=neighbour, fpp=fpp)


def traced(
    findings: Mapping[int, Finding], limits: TraceLimits | None = None
) -> tuple[TraceResult, list[int]]:
    """What a trace of brokers that answer so finds, and whom it asked."""
    trace = Trace([bytes(IDENTITY)], reachable=findings, limits=limits, now_us=0)
    asks: list[Ask] = trace.start(0)
    asked: list[int] = []
    while asks:
        ask = asks.pop(0)
        asked.append(ask.broker)
        asks += trace.answered(ask.broker, TraceAnswer(findings=(findings[ask.broker],)), 0)
    (result,) = trace.results({})
    return result, asked


@pytest.mark.parametrize("fpp", [0.0, 1e-3, 0.9])
def test_hundreds_of_receivers_among_more_candidates(fpp: float) -> None:
    """T12: 600 of 1,200: the number of ways to choose them is larger than any float."""
    finding = Finding(published=1e-3, delivered=received(600, fpp), candidates=1200)
    result = judged({1: finding})
    assert (result.verdict, len(result.receivers)) == ("complete", 600)
    assert result.origin_doubt is not None
    assert 0 <= result.origin_doubt <= 1e-3


def test_doubt_of_an_origin_is_the_product_of_what_speaks_for_it() -> None:
    """The lower rate of two histories of the same ids, and that anybody of ten, and of three, is claimed."""
    findings = {
        1: Finding(published=1e-2, delivered=received(2, 1e-3), candidates=10),
        2: Finding(routed=(sighting(1, 2e-3),), delivered=received(1, 4e-3), candidates=3),
    }
    expected = 2e-3 * 10 * 1e-3 * 3 * 4e-3
    assert judged(findings).origin_doubt == pytest.approx(expected, rel=1e-9, abs=0)


def test_what_a_broker_says_counts_once_by_whatever_way_it_is_reached() -> None:
    """After a reroute broker 4 has the message from 2 and from 3, which are both below 1."""
    findings = {
        1: Finding(published=1e-2),
        2: Finding(routed=(sighting(1),)),
        3: Finding(routed=(sighting(1),)),
        4: Finding(routed=(sighting(2), sighting(3)), delivered=received(1, 1e-3), candidates=1),
    }
    assert judged(findings).origin_doubt == pytest.approx(1e-3 * 1e-3, rel=1e-9, abs=0)


def test_brokers_that_all_name_each_other_are_judged_in_time() -> None:
    """There are 29! ways through these claims."""
    brokers = range(1, 31)
    findings = {
        broker: Finding(routed=tuple(sighting(other) for other in brokers if other != broker))
        for broker in brokers
    }
    result = judged(findings)
    assert len(result.route) == 30 * 29
    assert result.verdict == "partial"


@pytest.mark.parametrize(
    ("source", "contradicted"),
    [
        (Finding(), True),
        (Finding(lost="died"), False),
        (Finding(forgotten=True), False),
        (Finding(begins_ms=TIME_MS + 1), False),
        (Finding(begins_ms=TIME_MS), True),
    ],
)
def test_only_a_whole_record_contradicts(source: Finding, contradicted: bool) -> None:
    """T12.

    Broker 3 has the message from 2, which knows nothing of it: because it has not, or does not know.
    """
    findings = {1: Finding(published=0.0), 2: source, 3: Finding(routed=(sighting(2, 1e-6),))}
    doubts = {step.broker: step.doubt for step in judged(findings).route}
    assert (doubts["00000003"] == 1.0) is contradicted


def line(*middle: Finding) -> dict[int, Finding]:
    """1 published it; then these brokers; the last but one delivered it, and the last is behind that one."""
    count = len(middle) + 3
    found = dict(enumerate([Finding(published=0.0), *middle], 1))
    found[count - 1] = Finding(routed=(sighting(count - 2, 1e-6),), delivered=received(1, 0.0), candidates=1)
    found[count] = Finding(routed=(sighting(count - 1, 1e-6),), delivered=received(1, 0.0), candidates=1)
    return {
        broker: structs.replace(one, neighbours=tuple(n for n in (broker - 1, broker + 1) if n in found))
        for broker, one in found.items()
    }


@pytest.mark.parametrize("silent", [Finding(lost="died"), Finding(forgotten=True, begins_ms=TIME_MS + 1)])
def test_a_trace_goes_on_behind_a_broker_that_does_not_know_any_more(silent: Finding) -> None:
    """T6: it may have routed the message. Found: what was delivered behind it was missing."""
    for missing in (1, 2):
        result, asked = traced(line(*[silent] * missing))
        assert asked == list(range(1, missing + 4)), "each once, in order"
        last = missing + 1
        steps = [(int(step.broker, 16), step.source and int(step.source, 16)) for step in result.route]
        assert steps == [(1, None), (last + 1, last), (last + 2, last + 1)]
        assert [int(one.broker, 16) for one in result.receivers] == [last + 1, last + 2]
        assert all(step.doubt < 1e-3 for step in result.route)
        assert result.verdict == "partial"
        assert all(f"{broker:08x}: " in result.explanation for broker in range(2, last + 1))


def test_it_is_drawn_below_the_broker_that_does_not_know_any_more() -> None:
    result, _ = traced(line(Finding(lost="died")))
    assert tree(result).splitlines()[1:] == [
        "published by 00000005 at 00000001 (certain)",
        "00000003, from 00000002 (certain)",
        "├─ → s0 (certain)",
        "└─ 00000004 (certain)",
        "   └─ → s0 (certain)",
        "partial: 00000002: died",
    ]
    assert '"00000002" [shape=box, style=dashed];' in dot(result)
    assert '"00000002" -> "00000003"' in dot(result)
    assert [(one["broker"], one["from"]) for one in result.to_json()["route"]][1] == ("00000003", "00000002")


@pytest.mark.parametrize("silent", [Finding(), Finding(begins_ms=TIME_MS + 1)])
def test_a_trace_ends_at_a_broker_that_would_know(silent: Finding) -> None:
    """T6.

    It routed nothing, or began later: nobody behind it is asked, but whether it published the message.
    """
    result, asked = traced(line(silent))
    assert asked == [1, 2, 3, 4]
    assert [int(step.broker, 16) for step in result.route] == [1]
    assert result.verdict == "complete"


def test_the_limits_hold_where_nobody_knows_any_more() -> None:
    """T6: Thirty brokers that all died: the trace floods no further than it may."""
    findings = line(*[Finding(lost="died")] * 30)
    result, asked = traced(findings, TraceLimits(brokers=10))
    assert (asked, result.verdict) == (list(range(1, 11)), "partial")
    assert "more than 10 brokers" in result.explanation
    result, asked = traced(findings, TraceLimits(rounds=5))
    assert (asked, result.verdict) == (list(range(1, 6)), "partial")
    assert "more than 5 rounds" in result.explanation


def test_an_origin_that_does_not_know_any_more_is_not_followed_hop_by_hop() -> None:
    """Everybody is asked then, at once."""
    findings = line(Finding(lost="died"), Finding(lost="died")) | {1: Finding(lost="died", neighbours=(2,))}
    result, asked = traced(findings, TraceLimits(rounds=2))
    assert asked == [1, *findings]
    assert [int(one.broker, 16) for one in result.receivers] == [4, 5]


def test_who_sent_it_to_a_broker_that_does_not_know_any_more_is_no_dead_end() -> None:
    """T12: 1 -> 2 -> 3, which died, -> 4: somebody had to send it to 3, and 5, beside it, may lie."""
    findings = {
        1: Finding(published=1e-3, neighbours=(2, 5)),
        2: Finding(routed=(sighting(1),), neighbours=(1, 3)),
        3: Finding(lost="died", neighbours=(2, 4)),
        4: Finding(routed=(sighting(3),), delivered=received(1, 1e-3), candidates=1, neighbours=(3,)),
        5: Finding(routed=(sighting(1),), neighbours=(1,)),
    }
    doubts = {int(step.broker, 16): step.doubt for step in traced(findings)[0].route}
    assert doubts[2] == pytest.approx(5e-3 / (5e-3 + 0.5))
    assert doubts[5] == pytest.approx(5e-3 / (5e-3 + 0.01))
    alone = findings | {4: Finding(routed=(sighting(3),), neighbours=(3,))}
    doubts = {int(step.broker, 16): step.doubt for step in traced(alone)[0].route}
    assert doubts[4] == pytest.approx(5e-3 / (5e-3 + 0.01)), "its own claim is no second one"
    whole = {6: Finding(neighbours=(2,)), 2: Finding(routed=(sighting(6),), neighbours=(1, 3, 6))}
    doubts = {int(step.broker, 16): step.doubt for step in traced(findings | whole)[0].route}
    assert doubts[2] == 1.0, "who it names says no"


def test_the_broker_in_the_id_may_have_it_from_one_that_does_not_know_any_more() -> None:
    """Published at 2 while 1, in the id, was away; 3 died and may have sent it on to 1."""
    gone = {2: Finding(published=0.0, neighbours=(3,)), 3: Finding(lost="died", neighbours=(1, 2))}
    result, _ = traced(gone)
    assert [int(broker, 16) for broker, _ in result.missing] == [1, 3]


def test_the_broker_in_the_id_may_have_published_it_before() -> None:
    """Published at 2. Whether 1 had taken it, only 1 can say."""
    findings = {
        2: Finding(published=0.0, forwarded=(Forwarding(neighbour=3, fpp=0.0),), neighbours=(1, 3)),
        3: Finding(neighbours=(1, 2)),
    }
    result, _ = traced(findings)
    assert (result.verdict, [int(broker, 16) for broker, _ in result.missing]) == ("partial", [1])
    result, _ = traced(findings | {1: Finding(neighbours=(2, 3))})
    assert (result.verdict, result.origin, result.missing) == ("complete", "00000002", ())


def test_unknown_is_what_nobody_can_have_forgotten() -> None:
    findings = {1: Finding(), 2: Finding(begins_ms=TIME_MS + 1, forgotten=True)}
    result, _ = traced(findings)
    assert (result.verdict, [int(broker, 16) for broker, _ in result.missing]) == ("partial", [2])
    assert "00000002: its history does not reach back to that time" in result.explanation
    result, _ = traced({1: Finding(neighbours=(2,)), 3: Finding()})
    assert (result.verdict, [int(broker, 16) for broker, _ in result.missing]) == ("partial", [2])
    result, _ = traced(findings | {1: Finding(published=0.0)})
    assert (result.verdict, result.missing) == ("complete", ()), "it did not go there"


def test_lists_that_are_cut_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours only if the message may have gone to them."""
    now_us = TIME_MS * 1000
    tracking = make_tracking(TrackingConfig(), me=1, stored=(), changes=(), now_us=now_us - 10**7)
    for neighbour in (2, 3, 4):
        tracking.linked(neighbour, now_us - 10**6)
        tracking.routed(2, neighbour, bytes(IDENTITY), now_us)
    other = bytes(structs.replace(IDENTITY, counter=1))

    def asked(identity: bytes) -> Finding:
        return tracking.answer(TraceQuestion(items=(TraceItem(id=identity, origin=2),)), {})[0].findings[0]

    assert asked(bytes(IDENTITY)).lost == ""
    monkeypatch.setattr(lookup, "MAX_NEIGHBOURS", 2)
    assert asked(bytes(IDENTITY)).lost == "1 more neighbours that may have it"
    assert (asked(other).lost, asked(other).neighbours) == ("", (2, 3))
    monkeypatch.setattr(lookup, "MAX_SIGHTINGS", 1)
    assert asked(bytes(IDENTITY)).lost == "2 more routing histories that claim the message"


@pytest.mark.parametrize("liar", [2, 4])
@pytest.mark.parametrize("away", [(), (5,)])
def test_a_false_claim_of_a_second_publication(liar: int, away: tuple[int, ...]) -> None:
    """A filter that is wrong, on the way or off it: it is doubtful, and no harm to the answer."""
    findings = line(Finding(routed=(sighting(1),), delivered=received(2, 1e-3), candidates=9))
    findings[3] = Finding(routed=(sighting(2),), delivered=received(1, 1e-3), candidates=9, neighbours=(2, 4))
    findings[4] = Finding(neighbours=(3, 5))
    findings[5] = Finding(neighbours=(4,))
    true, _ = traced(findings)
    findings[liar] = structs.replace(findings[liar], published=5e-4)
    result, _ = traced({broker: held for broker, held in findings.items() if broker not in away})
    assert (result.verdict, result.origin) == ("complete", true.origin)
    assert result.receivers == true.receivers
    (again,) = [step for step in result.route if step.source is None][1:]
    assert int(again.broker, 16) == liar
    assert again.doubt > 0.5
    assert [(step.broker, step.source) for step in result.route if step is not again] == [
        (step.broker, step.source) for step in true.route
    ]


def test_a_second_publication_is_drawn_below_the_first() -> None:
    again = Finding(
        published=0.0, routed=(sighting(1, 0.0),), delivered=received(1, 0.0), candidates=1, neighbours=(1, 3)
    )
    last = Finding(routed=(Sighting(origin=2, neighbour=2, fpp=0.0),), neighbours=(2,))
    for findings, drawn in (
        ({2: again}, ["└─ 00000002 (certain)", "   ├─ → s0 (certain)", "   └─ 00000003 (certain)"]),
        (
            {2: structs.replace(again, routed=())},
            ["and again at 00000002 (certain)", "├─ → s0 (certain)", "└─ 00000003 (certain)"],
        ),
    ):
        result, _ = traced({1: Finding(published=0.0, neighbours=(2,)), 3: last} | findings)
        lines = ["published by 00000005 at 00000001 (certain)", *drawn]
        if findings[2].routed:
            lines.append("and again at 00000002 (certain)")
        assert tree(result).splitlines()[1:] == lines
        assert '"publisher 00000005" -> "00000002"' in dot(result)
        assert [one["broker"] for one in result.to_json()["route"] if one["from"] is None] == [
            "00000001",
            "00000002",
        ]


@pytest.mark.parametrize(
    "finding",
    [
        Finding(published=float("nan")),
        Finding(published=-0.1),
        Finding(routed=(sighting(2, 1.5),)),
        Finding(routed=tuple(sighting(number) for number in range(MAX_SIGHTINGS + 1))),
        Finding(neighbours=tuple(range(1, MAX_NEIGHBOURS + 2))),
        Finding(forwarded=tuple(Forwarding(neighbour=1, fpp=0.5) for _ in range(MAX_NEIGHBOURS + 1))),
        Finding(delivered=received(1, 0.5) * (MAX_RECEIVERS + 1)),
        Finding(delivered=received(1, 0.5), more=-1),
        Finding(delivered=received(1, 0.5), candidates=-1),
        Finding(delivered=received(2, 0.5), candidates=0),
        Finding(delivered=received(2, 0.5), more=1 << 40, candidates=1 << 42),
        Finding(lost="x" * 1025),
        Finding(delivered=received(1, 0.5), candidates=1, wanted=-0.1),
        Finding(delivered=received(1, 0.5), candidates=1, wanted=float("nan")),
        Finding(delivered=received(1, 0.5), candidates=1, wanted=float("inf")),
        Finding(delivered=received(1, 0.5), candidates=1, hits=2, tried=1),
        Finding(delivered=received(1, 0.5), candidates=1, hits=-1),
        Finding(delivered=received(1, 0.5), candidates=1, hits=1 << 40, tried=1 << 42),
        Finding(delivered=(Receiver(subscriber="s", fpp=0.5, keys=0),), candidates=1, hits=1, tried=1),
        Finding(delivered=(Receiver(subscriber="s", fpp=0.5, keys=2),), candidates=1, hits=1, tried=3),
        Finding(delivered=(Receiver(subscriber="s", fpp=0.5, keys=2),), candidates=2),
    ],
)
def test_what_a_peer_says_is_checked(finding: Finding) -> None:
    trace = Trace([bytes(IDENTITY)], reachable=[1], now_us=TIME_MS * 1000)
    trace.start(TIME_MS * 1000)
    with pytest.raises(PeerError):
        trace.answered(1, TraceAnswer(findings=(finding,)), TIME_MS * 1000)


def test_whatever_is_not_refused_can_be_judged() -> None:
    """Numbers of a hostile broker must not end the one that asks."""
    chance = np.random.default_rng(3)
    taken = 0
    for _ in range(20_000):
        count, more, candidates, hits, tried = (
            int(one) for one in chance.choice([0, 1, 2, 3, 5, 300, 4000], 5)
        )
        rate = float(chance.choice([0.0, 1e-300, 1e-3, 4 / 9, 0.5, 0.999, 1.0]))
        keys = int(chance.choice([1, 1, 2, 3, 300]))
        receivers = tuple(Receiver(subscriber=f"s{at}", fpp=rate, keys=keys) for at in range(min(count, 5)))
        finding = Finding(
            published=0.001,
            delivered=receivers,
            more=more,
            candidates=candidates,
            hits=hits,
            tried=tried,
            wanted=float(chance.choice([0.0, 5e-324, 0.5, 1.0, 1.0000000000000002, 3.0, 1e7])),
        )
        try:
            result, _ = traced({1: finding})
        except PeerError:
            continue
        taken += 1
        assert all(0.0 <= one.doubt <= 1.0 for one in result.receivers), finding
    assert taken > 1000


@pytest.mark.parametrize("error", [ZeroDivisionError, OverflowError, ValueError])
def test_numbers_that_cannot_be_judged_end_nobody(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Should one of them get past the checks, the trace says whose it may have been."""

    def fails(*_: object, **__: object) -> float:
        raise error

    monkeypatch.setattr(verdict, "share", fails)
    result, _ = traced({1: Finding(published=0.001, delivered=received(1, 0.5), candidates=1)})
    assert (result.verdict, result.route) == ("unreachable", ())
    assert result.missing == (("00000001", "answered with numbers that cannot be judged"),)


def test_a_way_of_thousands_of_hops_is_printed() -> None:
    """Found: RecursionError from about a thousand hops on."""
    route = tuple(
        RouteStep(broker=f"b{hop}", source=f"b{hop - 1}" if hop else None, doubt=0.0) for hop in range(3000)
    )
    result = structs.replace(judged({}), origin="b0", origin_doubt=0.0, route=route, explanation="")
    lines = tree(result).split("\n")
    assert len(lines) == 2 + 2999
    assert lines[2:5] == ["└─ b1 (certain)", "   └─ b2 (certain)", "      └─ b3 (certain)"]
    assert lines[-1].endswith("   └─ b2999 (certain)")


def test_a_filter_is_never_certain() -> None:
    """Nearly empty, it is wrong less often than 1 differs from 1 - 1e-17, and yet not never."""
    now_us = TIME_MS * 1000
    tracking = make_tracking(TrackingConfig(), me=1, stored=(), changes=(), now_us=now_us - 10**7)
    tracking.attached("ann", now_us)
    tracking.published(bytes(IDENTITY), now_us)
    tracking.delivered(1, ("ann",), bytes(IDENTITY), now_us)
    question = TraceQuestion(items=(TraceItem(id=bytes(IDENTITY), origin=1),))
    (finding,) = tracking.answer(question, {})[0].findings
    result = judged({1: finding})
    assert result.origin_doubt is not None
    assert 0 < result.origin_doubt < 1e-17
    assert [0 < one.doubt < 1e-17 for one in result.receivers] == [True]
    assert "certain" not in tree(result)


def test_an_answer_that_is_cut_says_so() -> None:
    """Found: half of the receivers, and complete."""
    findings = {
        1: Finding(published=0.0, delivered=received(300, 0.0), candidates=300, neighbours=(2,)),
        2: Finding(routed=(sighting(1, 0.0),), delivered=received(300, 0.0), candidates=300),
    }
    result, _ = traced(findings)
    assert within(result, 1 << 20) is result
    cut = within(result, 20_000)
    assert len(msgspec.json.encode(cut)) <= 20_000
    left = [sum(one.broker == broker for one in cut.receivers) for broker in ("00000001", "00000002")]
    assert sum(left) < 600
    said = tuple(
        (f"0000000{at}", f"{300 - count} more receivers") for at, count in enumerate(left, 1) if count < 300
    )
    assert (cut.verdict, cut.missing) == ("partial", said)
    for shown in (cut.explanation, tree(cut), dot(cut), cut.to_json()["missing"]["text"]):
        assert all(f"{broker}: {why}" in shown for broker, why in said)
    away = structs.replace(
        result, missing=tuple((f"b{at}", "x" * 100) for at in range(1000)), verdict="partial"
    )
    cut = within(away, 20_000)
    assert len(msgspec.json.encode(cut)) <= 20_000
    assert "more brokers whose part is missing" in cut.explanation


def test_what_brokers_say_of_themselves_is_not_tracked() -> None:
    """Programs may bring ids with such numbers: it is said where nothing else is the reason."""
    for publisher in (3 << COUNT_BITS, LAST_COUNT):
        own = MessageId(publisher, 1, TIME_MS, 0)
        result = judge(own, {1: Finding()}, failed=[], stopped="", names={})
        assert result.verdict == "unknown"
        assert "under $postroad is not tracked" in result.explanation
        for findings, said in (
            ({}, "unreachable"),
            ({1: Finding(begins_ms=TIME_MS + 1)}, "before-history"),
            ({1: Finding(lost="a process died")}, "partial"),
        ):
            result = judge(own, findings, failed=[], stopped="", names={})
            assert (result.verdict, "$postroad" in result.explanation) == (said, False)


@pytest.mark.parametrize(("wanted", "last"), [(0.5, True), (0.5, False), (4.0, True)])
def test_the_share_of_false_claims_is_what_its_theory_says(wanted: float, last: bool) -> None:
    """T12: drawn from the very chances that it assumes. `test_tracking_doubts` has messages instead."""
    rate, tried = 0.03, 60
    chance = np.random.default_rng(5)
    few = np.arange(0, tried + 1)
    chances = np.array([common(true, wanted, last=last) for true in few.tolist()])
    claims = {1: np.zeros(10), 2: np.zeros(10)}
    false = {1: np.zeros(10), 2: np.zeros(10)}
    doubts = {1: np.zeros(10), 2: np.zeros(10)}
    for true in chance.choice(few, 20_000, p=chances / chances.sum()).tolist():
        wrong = int(chance.binomial(tried - true, rate))
        hits = true + wrong
        for keys in range(1, min(hits, 2) + 1):  # somebody whom any of them claims, or any two
            doubt = share(rate, hits, tried, wanted=wanted, last=last, keys=keys)
            claims[keys][int(doubt * 10)] += comb(hits, keys)
            false[keys][int(doubt * 10)] += comb(wrong, keys)
            doubts[keys][int(doubt * 10)] += doubt * comb(hits, keys)
    for keys in (1, 2):
        seen = claims[keys] > 500
        assert seen.sum() >= 4 - keys
        assert np.abs(false[keys] - doubts[keys])[seen].max() < 0.05 * claims[keys][seen].max()
        assert (np.abs(false[keys] - doubts[keys])[seen] / claims[keys][seen]).max() < 0.06


def test_the_share_of_false_claims() -> None:
    near = partial(share, wanted=0.5, last=False)
    assert near(0.0, 3, 9) == 0
    assert share(1.0, 3, 9, wanted=0.5, last=True) == 1
    assert near(1e-3, 1, 1) == pytest.approx(1e-3 / (1 + 1e-3))
    assert share(5e-4, 1, 3000, wanted=0.5, last=True) < 0.05, "somebody must have got it, where the way ends"
    for wanted in (0.0, 0.5, 1.0, 300.0, MAX_CANDIDATES):
        for last in (False, True):
            many = partial(share, wanted=wanted, last=last)
            assert 0 < many(0.5, 250, 4096) < 1, "more ways than a float holds"
            assert many(1e-3, 256, 100_000) == pytest.approx(many(1e-3, 257, 100_000), rel=0.1)
            for keys in (2, 100, 250):
                assert 0 < many(0.4, 250, 4096, keys=keys) < many(0.4, 250, 4096, keys=keys - 1)
    assert 0 < near(1e-9, 5, 50, keys=5) < 1e-30, "never certain"


def test_how_common_it_is_that_nobody_got_it() -> None:
    assert common(0, 0.5, last=False) == 1.0, "what is taken for brokers that do not say"
    assert common(0, 1.0, last=False) == common(0, 5.0, last=False) == common(0, 0.3, last=True) == RARE
    assert common(0, 0.0, last=False) == 1 / RARE
    assert common(0, 0.1, last=False) == pytest.approx(9.0)


def test_how_common_so_many_true_keys_are() -> None:
    for wanted in (0.0, 0.3, 1.0):
        assert [common(true, wanted, last=False) for true in (1, 2, 10)] == [1, 1 / 4, 1 / 100]
    threes = [common(true, 3.0, last=False) for true in range(1, 9)]
    assert threes[2] == max(threes[1:]), "about as many as each message has"
    assert threes[1] > 1 / 4


def test_answers_of_brokers_that_do_not_count_keys_are_understood() -> None:
    """T12.

    docs/reference/protocol.md: fields at the end have defaults. Each receiver is then a key of its own,
    each candidate one that was tried; and those who do not know the new fields skip them."""
    old = [0.001, [], None, [["s0", 0.01], ["s1", 0.01]], 30, 0, [], 0, False, ""]
    finding = msgspec.msgpack.decode(msgspec.msgpack.encode([[old]]), type=TraceAnswer).findings[0]
    assert finding == Finding(published=0.001, delivered=received(2, 0.01), candidates=30)
    result, _ = traced({1: finding})
    assert {one.doubt for one in result.receivers} == {share(0.01, 2, 30, wanted=0.5, last=False)}
    told = msgspec.msgpack.decode(
        msgspec.msgpack.encode(structs.replace(finding, hits=1, tried=31, wanted=1.0))
    )
    assert told[: len(old) - 7] == old[:3]
    assert told[3] == [["s0", 0.01, 1], ["s1", 0.01, 1]]
    assert told[4 : len(old)] == old[4:]


def test_one_key_of_a_set_is_one_witness() -> None:
    """T12: Twenty who are claimed with one key speak for a step no better than one of them."""
    findings = {
        1: Finding(published=0.0),
        2: Finding(routed=(sighting(1, 1e-2),), delivered=received(20, 1e-2), candidates=20),
    }
    step = judged(findings).route[1]
    assert step.doubt == pytest.approx(2 * 1e-2 * 0.2 / (2 * 1e-2 * 0.2 + 0.5))


def test_brokers_of_one_name_are_told_apart() -> None:
    """T12.

    a - b - a: published at one a, received at the other. A name of which there is one stays as it is.
    """
    findings = {
        1: Finding(published=0.0, neighbours=(2,)),
        2: Finding(routed=(sighting(1, 0.0),), neighbours=(1, 3)),
        3: Finding(routed=(sighting(2, 0.0),), delivered=received(1, 0.0), candidates=1, neighbours=(2,)),
    }
    trace = Trace([bytes(IDENTITY)], reachable=findings, now_us=0)
    asks = trace.start(0)
    while asks:
        ask = asks.pop()
        asks += trace.answered(ask.broker, TraceAnswer(findings=(findings[ask.broker],)), 0)
    (result,) = trace.results({1: "a", 2: "b", 3: "a", 4: "c"})
    one, other = "a (00000001)", "a (00000003)"
    told = result.to_json()
    assert told["origin"]["broker"] == one
    assert [(step["broker"], step["from"]) for step in told["route"]] == [
        (one, None),
        ("b", one),
        (other, "b"),
    ]
    assert [receiver["broker"] for receiver in told["receivers"]] == [other]
    assert tree(result).splitlines()[1:] == [
        f"published by 00000005 at {one} (certain)",
        "└─ b (certain)",
        f"   └─ {other} (certain)",
        "      └─ → s0 (certain)",
    ]
    assert f'"{one}" -> "b"' in dot(result)
    assert f'"{other}" -> "subscriber s0"' in dot(result)
