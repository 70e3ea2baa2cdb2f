"""T6, T11, T12: traces through whole networks of brokers, against what really happened."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.tracking_networks import START_US, Network

from postroad.ids import OWN_IDS, MessageId
from postroad.tracking.query.messages import Finding, TraceAnswer
from postroad.tracking.query.trace import NOT_REACHABLE, Trace
from postroad.tracking.query.verdict import TraceResult
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import make_tracking
from postroad.units import MILLISECOND_US, SECOND_US


def config_of(strategy: str, routing: str = "all", deliveries: str = "origin") -> TrackingConfig:
    return TrackingConfig(
        strategy=strategy,
        routing=routing,
        deliveries=deliveries,
        bits=16_000,
        capacity=1000,
        hashes=11,
        adaptive=False,
    )


def route_of(result: TraceResult) -> set[tuple[str, str | None]]:
    return {(step.broker, step.source) for step in result.route}


def truth_of(origin: int, edges: set[tuple[int, int]]) -> set[tuple[str, str | None]]:
    return {(f"b{origin}", None)} | {(f"b{broker}", f"b{source}") for broker, source in edges}


@given(
    seed=st.integers(0, 10**6),
    strategy=st.sampled_from(("bloom", "exact")),
    routing=st.sampled_from(("all", "neighbours", "set")),
    deliveries=st.sampled_from(("origin", "subscriber")),
    brokers=st.integers(1, 9),
    extra=st.integers(0, 4),
)
@settings(max_examples=60, deadline=None)
def test_traces_are_true(
    seed: int, strategy: str, routing: str, deliveries: str, brokers: int, extra: int
) -> None:
    """T6, T11: nothing is ever missing; the exact strategy adds nothing, Bloom at the rates it says."""
    network = Network(seed, config_of(strategy, routing, deliveries), brokers, extra)
    happened = []
    for _ in range(20):
        origin = network.random.choice(network.brokers)
        wanting = network.random.sample(network.brokers, network.random.randint(0, brokers))
        happened.append((origin, wanting, *network.publish(origin, wanting)))
    results = network.trace(*(identity for _, _, identity, _ in happened))
    for (origin, wanting, identity, edges), result in zip(happened, results, strict=True):
        assert result.id == str(MessageId.from_bytes(identity))
        assert (result.verdict, result.origin, result.publisher) == ("complete", f"b{origin}", 5)
        expected = {(name, f"b{broker}") for broker in wanting for name in network.subscribers(broker)}
        received = {(one.subscriber, one.broker) for one in result.receivers}
        assert truth_of(origin, edges) <= route_of(result)
        assert expected <= received
        if strategy == "exact":
            assert truth_of(origin, edges) == route_of(result)
            assert expected == received
        else:
            assert all(
                step.doubt < 0.01
                for step in result.route
                if (step.broker, step.source) in truth_of(origin, edges)
            )


def test_optimisations_ask_fewer_brokers() -> None:
    """Section 3.3: both tell where the message went. The others are asked whether they published it."""
    asked = {}
    for routing in ("all", "neighbours", "set"):
        network = Network(3, config_of("bloom", routing), 1, 0)
        network.brokers = list(range(1, 8))
        network.links = {broker: set() for broker in network.brokers}
        network.tracking = {
            broker: make_tracking(
                config_of("bloom", routing), me=broker, stored=(), changes=(), now_us=START_US
            )
            for broker in network.brokers
        }
        for leaf in range(2, 8):
            network.link(1, leaf)
        network.tracking[4].attached("s4.0", START_US)
        network.tracking[4].attached("s4.1", START_US)
        network.tracking[4].attached("s4.2", START_US)
        identity, edges = network.publish(1, [4])
        (result,) = network.trace(identity)
        assert route_of(result) == truth_of(1, edges)
        asked[routing] = network.questions
    assert asked == {"all": [6, 1], "neighbours": [1, 6], "set": [1, 6]}


def test_one_round_of_batched_questions_per_hop() -> None:
    """T6: Traps: a chain of five brokers and 50 messages: five questions."""
    network = Network(1, config_of("bloom"), 1, 0)
    network.brokers = [1, 2, 3, 4, 5]
    network.links = {broker: set() for broker in network.brokers}
    network.tracking = {
        broker: make_tracking(config_of("bloom"), me=broker, stored=(), changes=(), now_us=START_US)
        for broker in network.brokers
    }
    for broker in (1, 2, 3, 4):
        network.link(broker, broker + 1)
    for broker in network.brokers:
        for name in network.subscribers(broker):
            network.tracking[broker].attached(name, START_US)
    ids = [network.publish(1, [5])[0] for _ in range(50)]
    results = network.trace(*ids)
    assert sum(network.questions) == 5
    assert all(len(result.route) == 5 and len(result.receivers) == 3 for result in results)


def test_rerouting() -> None:
    """A message went over a link that is gone; and traces go on being found after the change."""
    network = Network(1, config_of("exact"), 4, 0)
    for one in network.brokers:
        for two in sorted(network.links[one]):
            network.unlink(one, two)
    network.link(1, 2)
    network.link(2, 3)
    network.link(1, 4)
    network.now_us += 5 * SECOND_US
    before, edges = network.publish(1, [3])
    network.now_us += 5 * SECOND_US
    network.unlink(2, 3)
    network.link(3, 4)
    network.now_us += 5 * SECOND_US
    after, later = network.publish(1, [3])
    old, new = network.trace(before, after)
    assert route_of(old) == truth_of(1, edges) == {("b1", None), ("b2", "b1"), ("b3", "b2")}
    assert route_of(new) == truth_of(1, later) == {("b1", None), ("b4", "b1"), ("b3", "b4")}


def test_published_at_another_broker_than_the_id_says() -> None:
    """Traps: a publisher that lost its broker goes on at another with the ids it had assigned."""
    for down in (False, True):
        network = Network(5, config_of("exact"), 5, 0)
        identity, edges = network.publish(3, [1, 5], broker_in_id=2)
        reachable = [broker for broker in network.brokers if not (down and broker == 2)]
        (result,) = network.trace(identity, reachable=reachable)
        assert result.origin == "b3"
        assert route_of(result) >= truth_of(3, {edge for edge in edges if not down or 2 not in edge})


def chain(strategy: str, count: int, routing: str = "all", config: TrackingConfig | None = None) -> Network:
    network = Network(1, config or config_of(strategy, routing), count, 0)
    for one in network.brokers:
        for two in sorted(network.links[one]):
            network.unlink(one, two)
    network.now_us += 60 * SECOND_US
    for broker in network.brokers[:-1]:
        network.link(broker, broker + 1)
    network.now_us += 60 * SECOND_US
    return network


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("routing", ["all", "neighbours", "set"])
@pytest.mark.parametrize("first", [[], [1, 2]])
def test_published_at_two_brokers(strategy: str, routing: str, first: list[int]) -> None:
    """An ack was lost: the publisher sent the message again at a broker on the way, or far from it."""
    for second in (2, 4):
        network = chain(strategy, 5, routing)
        identity, edges = network.publish(1, first)
        wanting = [second, second + 1]
        _, more = network.publish(second, wanting, again=identity)
        (result,) = network.trace(identity)
        assert (result.verdict, result.origin) == ("complete", "b1")
        assert route_of(result) == truth_of(1, edges) | truth_of(second, more)
        assert [step.broker for step in result.route if step.source is None] == ["b1", f"b{second}"]
        assert {one.broker for one in result.receivers} == {f"b{broker}" for broker in [*first, *wanting]}
        assert all(step.doubt < 0.01 for step in result.route)


@pytest.mark.parametrize("routing", ["all", "neighbours", "set"])
def test_who_has_it_from_a_broker_that_is_away_is_heard(routing: str) -> None:
    """In a ring, so that those behind it can be reached."""
    network = chain("exact", 5, routing)
    identity, edges = network.publish(1, [2, 4])
    (result,) = network.trace(identity, reachable=[1, 2, 4, 5])
    assert result.verdict == "partial"
    assert [broker for broker, _ in result.missing] == ["b3"]
    assert route_of(result) == truth_of(1, {edge for edge in edges if edge[0] != 3})
    assert {one.broker for one in result.receivers} == {"b2", "b4"}


def test_a_broker_that_is_away_may_know_a_message_that_nobody_knows() -> None:
    """Published at 2 with 1 in its id; so whoever was away at first, or went, must have been asked."""
    network = chain("exact", 3)
    identity, _ = network.publish(2, [2], broker_in_id=1)
    (result,) = network.trace(identity, reachable=[1, 3])
    assert result.verdict == "partial"
    assert result.explanation == (
        "the origin is not confirmed: broker b1 has no record of it; b2: cannot be reached"
    )
    other, _ = network.publish(3, [3])
    (result,) = network.trace(other, reachable=[2, 3])
    assert (result.verdict, result.missing) == ("complete", ())


def test_unknown_id() -> None:
    network = Network(5, config_of("bloom"), 5, 2)
    network.now_us += 60 * SECOND_US
    identity = bytes(MessageId(5, 2, network.now_us // MILLISECOND_US, 77))
    (result,) = network.trace(identity)
    assert (result.verdict, result.origin_doubt, result.route, result.receivers) == ("unknown", None, (), ())
    assert "no record" in result.explanation


@pytest.mark.parametrize("routing", ["all", "neighbours", "set"])
def test_ids_that_a_program_made_name_no_broker(routing: str) -> None:
    """T6: no broker is missing that never was; one that is away is, while it may have the message."""
    network = chain("bloom", 4, routing)
    network.now_us += 60 * SECOND_US
    identity, edges = network.publish(2, [2, 4], broker_in_id=OWN_IDS | 77)
    never = bytes(MessageId(5, OWN_IDS | 77, network.now_us // MILLISECOND_US, 77))
    found, unknown = network.trace(identity)[0], network.trace(never)[0]
    assert (found.verdict, found.explanation, found.origin) == ("complete", "", "b2")
    assert route_of(found) == truth_of(2, edges)
    assert {one.broker for one in found.receivers} == {"b2", "b4"}
    assert (unknown.verdict, unknown.explanation) == ("unknown", "no broker has a record of such a message")
    (found,), (unknown,) = (network.trace(one, reachable=[1, 2, 3]) for one in (identity, never))
    assert (found.verdict, found.missing) == ("partial", (("b4", NOT_REACHABLE),))
    assert (unknown.verdict, unknown.missing) == ("partial", (("b4", NOT_REACHABLE),))


def test_a_broker_with_such_a_number_is_one() -> None:
    """T6: Those of before the numbers were divided."""
    number = OWN_IDS | 77
    trace = Trace([bytes(MessageId(5, number, 1, 1))], reachable=[1], known=[1, number], now_us=0)
    (ask,) = trace.start(0)
    assert ask.broker == 1
    nothing = Finding(begins_ms=0)
    assert trace.answered(1, TraceAnswer(findings=(nothing,)), 0) == []
    (result,) = trace.results({})
    assert result.verdict == "unreachable"


def test_before_the_history_begins() -> None:
    network = Network(5, config_of("bloom"), 3, 0)
    (result,) = network.trace(bytes(MessageId(5, 2, START_US // MILLISECOND_US - 10_000_000, 0)))
    assert result.verdict == "before-history"
    assert "does not reach back" in result.explanation


@pytest.mark.parametrize("silent", [False, True])
def test_a_broker_that_cannot_be_reached(silent: bool) -> None:
    """The origin away: what others know is told. Another away: the rest is told, and what is missing."""
    network = Network(5, config_of("exact"), 1, 0)
    network = Network(7, config_of("exact"), 4, 0)
    for one in network.brokers:
        for two in sorted(network.links[one]):
            network.unlink(one, two)
    for broker in (1, 2, 3):
        network.link(broker, broker + 1)
    identity, _ = network.publish(1, [2, 4])
    gone = 3
    network.down = {gone} if silent else set()
    reachable = [1, 2, 3, 4] if silent else [1, 2, 4]
    (result,) = network.trace(identity, reachable=reachable)
    assert result.verdict == "partial"
    assert [broker for broker, _ in result.missing] == ["b3"]
    assert {one.subscriber for one in result.receivers} >= set(network.subscribers(2))
    network.down = set()
    (result,) = network.trace(identity, reachable=[2, 3, 4])
    assert result.verdict == "partial"
    assert result.origin_doubt is None
    assert {one.broker for one in result.receivers} == {"b2", "b4"}
    (result,) = network.trace(bytes(MessageId(1, 1, START_US // MILLISECOND_US, 4)), reachable=[2, 3, 4])
    assert result.verdict == "unreachable"


def test_doubt_is_what_it_says() -> None:
    """T12: with coarse filters, as many claims are false as their doubts add up to."""
    coarse = TrackingConfig(bits=200, capacity=1000, hashes=2, adaptive=False)
    wrong = {"route": 0, "receivers": 0}
    doubts = {"route": 0.0, "receivers": 0.0}
    for seed in range(8):
        network = Network(seed, coarse, 8, 0)
        happened = []
        for _ in range(250):
            origin = network.random.choice(network.brokers)
            wanting = network.random.sample(network.brokers, 2)
            happened.append((origin, wanting, *network.publish(origin, wanting)))
        for origin, wanting, identity, edges in network.random.sample(happened, 60):
            (result,) = network.trace(identity)
            truth = truth_of(origin, edges)
            received = {name for broker in wanting for name in network.subscribers(broker)}
            wrong["route"] += sum((step.broker, step.source) not in truth for step in result.route)
            doubts["route"] += sum(step.doubt for step in result.route)
            wrong["receivers"] += sum(one.subscriber not in received for one in result.receivers)
            doubts["receivers"] += sum(one.doubt for one in result.receivers)
    assert wrong["route"] > 20
    assert wrong["receivers"] > 100
    for what in wrong:
        assert wrong[what] / 3 < doubts[what] < wrong[what] * 3


@pytest.mark.parametrize("deliveries", ["origin", "subscriber"])
def test_histories_of_the_same_ids_are_wrong_about_the_same_ones(deliveries: str) -> None:
    """T12: half of the messages stay at 1, half go to 4. What 2 claims falsely, 3 and 4 do too, and what the
    publisher history claims falsely of ids that nobody made, all of them may."""
    coarse = TrackingConfig(bits=5_000, capacity=1000, hashes=6, adaptive=False, deliveries=deliveries)
    network = chain("bloom", 4, config=coarse)
    local: list[bytes] = []
    for _ in range(700):
        local.append(network.publish(1, [1])[0])
        network.publish(1, [4])
    wrong = {"b2": 0, "b3": 0, "b4": 0}
    doubts = {"b2": 0.0, "b3": 0.0, "b4": 0.0}
    for result in [result for at in range(0, 700, 100) for result in network.trace(*local[at : at + 100])]:
        assert result.origin_doubt is not None
        for step in result.route[1:]:
            wrong[step.broker] += 1
            doubts[step.broker] += step.doubt
    assert wrong["b2"] == wrong["b3"] == wrong["b4"] > 10
    for broker, count in wrong.items():
        assert count / 3 < doubts[broker] <= count
    ghosts = [MessageId.from_bytes(identity) for identity in local]
    made_up = [bytes(MessageId(9, 1, one.time_ms, one.counter)) for one in ghosts]
    claimed = [
        result.origin_doubt
        for at in range(0, 700, 100)
        for result in network.trace(*made_up[at : at + 100])
        if result.origin_doubt is not None and not result.receivers
    ]
    expected = len(made_up) * sum(claimed) / len(claimed)
    assert len(claimed) > 10
    assert expected / 3 < len(claimed) < expected * 3


def test_a_lone_claim_is_doubtful() -> None:
    """T12: A broker claims the message from a neighbour that has no record of it."""
    network = Network(1, config_of("bloom"), 3, 0)
    network.now_us += SECOND_US  # whatever the skew, the record of the message's time is whole
    identity, _ = network.publish(1, [1])
    liar = next(iter(sorted(network.links[1])))
    other = next(broker for broker in (2, 3) if broker != liar)
    network.tracking[liar].routed(1, other, identity, network.now_us)
    (result,) = network.trace(identity)
    doubts = {step.broker: step.doubt for step in result.route}
    assert doubts[f"b{liar}"] == 1.0
    assert doubts["b1"] < 1e-3


def test_limits() -> None:
    """Fan-out, rounds, brokers and time are bounded, and what was left out is said."""
    from postroad.errors import PeerError, UsageError
    from postroad.tracking.query.trace import TraceLimits

    identity = bytes(MessageId(5, 1, START_US // MILLISECOND_US, 1))
    with pytest.raises(UsageError):
        Trace([], reachable=[1], now_us=0)
    with pytest.raises(UsageError):
        Trace([identity[:15]], reachable=[1], now_us=0)
    trace = Trace(
        [identity], reachable=range(1, 100), limits=TraceLimits(fan_out=4, brokers=10), now_us=START_US
    )
    network = Network(1, config_of("exact"), 1, 0)
    (ask,) = trace.start(START_US)
    assert ask.broker == 1
    empty = network.tracking[1].answer(ask.question, {})[0]
    with pytest.raises(PeerError):
        trace.answered(1, TraceAnswer(findings=()), START_US)
    asks = trace.answered(1, empty, START_US)
    assert len(asks) == 4
    assert trace.answered(2, empty, START_US)[0].broker == 5
    assert trace.answered(2, empty, START_US) == []  # said twice
    assert trace.next_deadline() == START_US + 2 * SECOND_US
    assert trace.failed(3, "went away", START_US)[0].broker == 6
    now_us = START_US
    while not trace.done:
        now_us = trace.next_deadline() or 0
        trace.tick(now_us)
    (result,) = trace.results({})
    assert result.verdict == "partial"
    assert "more than 10 brokers" in result.explanation
    assert ("00000003", "went away") in result.missing
    assert len(trace._asked) == 10
