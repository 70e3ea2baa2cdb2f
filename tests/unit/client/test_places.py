"""Where a client goes next: given, found or told addresses; when it moves, and that it does not swing."""

from __future__ import annotations

import pytest
from tests.worlds.client_scripts import Script

from postroad.client import effects as fx
from postroad.client.core import State
from postroad.client.places import MUCH_BETTER, REVIEWS, Choice, Places, Reviews
from postroad.errors import BugError
from postroad.seam.effects import Dial
from postroad.units import SECOND_US
from postroad.wire import frames as wire


def found(*addresses: str, weights: tuple[float, ...] = ()) -> fx.Found:
    values = weights or (0.0,) * len(addresses)
    return fx.Found(
        choices=tuple(Choice(address=one, weight=value) for one, value in zip(addresses, values, strict=True))
    )


def seeker(**settings: object) -> Script:
    """One that was given no address, found some, and is up at the first."""
    script = Script("x:1", seeks=True, **settings)
    assert script.take(Dial) == [Dial("x:1")]
    script.handle(fx.DialFailed(address="x:1", reason="refused"))
    assert script.core.state is State.SEEKING
    assert script.take(fx.Seek) == [fx.Seek()]
    script.handle(found("a:1", "b:1", "c:1"))
    assert script.take(Dial) == [Dial("a:1")]
    script.open()
    script.welcome()
    assert script.core.state is State.UP
    return script


def test_places_are_tried_in_turn_and_new_ones_take_their_place() -> None:
    places = Places(["a:1", "b:1"])
    assert places.current == "a:1"
    assert places.go_on()
    assert places.current == "b:1"
    assert not places.go_on()  # all were tried
    places.replace(["c:1", "c:1", "d:1"])
    assert places.addresses == ("c:1", "d:1")
    places.move(["e:1", "c:1"])
    assert places.addresses == ("e:1", "d:1", "c:1")
    with pytest.raises(BugError):
        Places([]).current  # noqa: B018


def test_a_client_that_finds_nobody_at_the_start_fails_with_all_reasons() -> None:
    script = Script("x:1", seeks=True)
    script.handle(fx.DialFailed(address="x:1", reason="connection refused"))
    script.handle(fx.Found(reason="no broker answered within 5 s"))
    (failed,) = script.take(fx.Failed)
    assert "x:1 (connection refused)" in str(failed.error)
    assert "no broker answered within 5 s" in str(failed.error)


def test_a_client_whose_broker_dies_tries_what_it_knows_and_then_looks_again() -> None:
    script = seeker()
    script.now += 10 * SECOND_US
    script.handle(fx.Closed(connection=script.connection))
    dialled = []
    for _ in range(3):
        (dial,) = script.take(Dial)
        dialled.append(dial.address)
        script.handle(fx.DialFailed(address=dial.address, reason="refused"))
    assert dialled == ["a:1", "b:1", "c:1"]
    assert script.take(fx.Seek) == [fx.Seek()]
    script.handle(fx.Found(reason="nobody"))
    assert script.core.state is State.IDLE  # it was up once: it goes on for ever
    script.now += 10 * SECOND_US
    script.handle()
    assert len(script.take(Dial)) == 1


def test_a_client_that_finds_only_what_it_cannot_reach_seeks_less_and_less_often() -> None:
    """Datagrams pass and connections do not, or the broker takes it and drops it at once."""
    script = seeker()
    script.now += 10 * SECOND_US
    began = script.now
    script.handle(fx.Closed(connection=script.connection))
    searches = 0
    for _ in range(1_000):
        if script.now > began + 60 * SECOND_US:
            break
        script.now += 1_000
        for _ in script.take(fx.Seek):
            searches += 1
            script.handle(found("a:1", "b:1"))
        dials = script.take(Dial)
        for dial in dials:
            script.handle(fx.DialFailed(address=dial.address, reason="refused"))
        if script.core.state is State.IDLE:
            script.now = script.core.next_deadline() or script.now
            script.handle()
    assert script.now > began + 60 * SECOND_US
    assert 2 <= searches <= 30


def test_a_client_that_can_reach_nothing_of_what_it_finds_at_the_start_fails() -> None:
    script = Script("x:1", seeks=True)
    script.handle(fx.DialFailed(address="x:1", reason="connection refused"))
    script.handle(found("a:1"))
    script.handle(fx.DialFailed(address="a:1", reason="no route"))
    (failed,) = script.take(fx.Failed)
    assert "no route" in str(failed.error)
    assert script.take(fx.Seek) == [fx.Seek()]


def test_a_client_goes_at_once_where_a_broker_that_stops_says() -> None:
    script = seeker()
    script.say(wire.Refuse(code="unavailable", reason="the broker is shutting down", go_to=("z:1", "b:1")))
    assert script.take(Dial) == [Dial("z:1")]


def test_one_that_was_given_addresses_tries_those_and_then_what_it_is_told() -> None:
    def moved(addresses: tuple[str, ...], *go_to: str) -> list[Dial]:
        given = Script(*addresses)
        given.take(Dial)
        given.open()
        given.welcome()
        given.say(wire.Refuse(code="unavailable", reason="the broker is shutting down", go_to=go_to))
        dials = given.take(Dial)
        for _ in range(3):
            given.handle(fx.DialFailed(address=dials[-1].address, reason="nobody"))
            dials += given.take(Dial)
        return dials

    assert moved(("a:1",), "z:1") == [Dial("z:1"), Dial("a:1")]
    assert moved(("a:1",), "z:1", "a:1", "y:1") == [Dial("z:1"), Dial("y:1"), Dial("a:1")]
    assert moved(("a:1", "b:1"), "z:1") == [Dial("b:1"), Dial("z:1"), Dial("a:1")]


def test_a_client_that_comes_while_a_broker_drains_goes_on_and_two_that_drain_do_not_keep_it_busy() -> None:
    script = Script("a:1")
    refuse = wire.Refuse(code="unavailable", reason="the broker is shutting down", go_to=("b:1", "a:1"))
    assert script.take(Dial) == [Dial("a:1")]
    script.open()
    script.say(refuse)
    assert script.take(Dial) == [Dial("b:1")]
    script.open()
    script.say(refuse)
    assert script.take(Dial) == []
    (failed,) = script.take(fx.Failed)
    assert "the broker is shutting down" in str(failed.error)


def reviewed(script: Script, answer: fx.Found) -> list[Dial]:
    script.now += 60 * SECOND_US
    script.handle()
    script.say(wire.Pong(time_us=script.now, at_us=script.now))
    assert script.take(fx.Seek) == [fx.Seek()]
    script.handle(answer)
    return script.take(Dial)


def test_a_client_moves_when_another_is_much_better_for_long_and_does_not_swing() -> None:
    script = seeker(ping_us=100 * SECOND_US, dead_us=300 * SECOND_US)
    better = found("b:1", "a:1", weights=(5.0, 5.0 - MUCH_BETTER))
    little = found("b:1", "a:1", weights=(5.0, 5.1 - MUCH_BETTER))
    for answer in [better] * (REVIEWS - 1) + [little] + [better] * (REVIEWS - 1):
        assert reviewed(script, answer) == []
    assert reviewed(script, better) == [Dial("b:1")]
    script.open()
    script.welcome()
    # Where it is now is as good as where it was: it stays.
    for _ in range(2 * REVIEWS):
        assert reviewed(script, found("a:1", "b:1", weights=(5.0, 4.5))) == []


def test_the_nearest_broker_is_left_when_another_is_much_better() -> None:
    """A search chooses by the ping, so the first choice may be the busy broker where the client is."""
    script = seeker(ping_us=100 * SECOND_US, dead_us=300 * SECOND_US)
    busy = found("a:1", "c:1", "b:1", weights=(1.0, 2.5, 5.0))
    for _ in range(REVIEWS - 1):
        assert reviewed(script, busy) == []
    assert reviewed(script, busy) == [Dial("b:1")]


def test_a_review_that_does_not_see_the_present_broker_moves_nobody() -> None:
    reviews = Reviews()
    for _ in range(10):
        assert not reviews([Choice(address="b:1", weight=9.0)], "a:1", 1)
    assert not reviews([], "a:1", 1)


def test_who_publishes_stays_until_all_is_settled() -> None:
    script = seeker(ping_us=100 * SECOND_US, dead_us=300 * SECOND_US)
    script.core.publish("t", b"x", None, script.now)
    script.do(script.core.flush())
    better = found("b:1", "a:1", weights=(5.0, 0.0))
    for _ in range(REVIEWS + 2):
        assert reviewed(script, better) == []


def test_a_consumer_of_a_shared_subscription_stays_where_it_is_shared() -> None:
    """Its group is at one broker: elsewhere it would be refused."""
    script = seeker(ping_us=100 * SECOND_US, dead_us=300 * SECOND_US)
    better = found("b:1", "a:1", weights=(5.0, 0.0))
    shared = wire.Subscribe(number=0, topic="t/#", where="", durable="d", ack="manual", shared=True)
    number, effects = script.core.subscribe(shared)
    script.do(effects)
    for _ in range(REVIEWS + 2):
        assert reviewed(script, better) == []
    script.do(script.core.unsubscribe(number))
    assert any(reviewed(script, better) == [Dial("b:1")] for _ in range(REVIEWS))
