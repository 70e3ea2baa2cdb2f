"""Durable subscriptions in the client's core: acknowledgements and reconnects (D3, D11; issue 3, part 7)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.worlds.client_scripts import Script, delivery, ticks

from postroad.client import effects as fx
from postroad.client.inbox import AGAIN_US
from postroad.errors import UnavailableError, UsageError
from postroad.events.batch import empty_frame
from postroad.events.token import CheckpointToken
from postroad.ids import pubend_text
from postroad.seam.effects import Send
from postroad.units import SECOND_US
from postroad.wire import frames as wire
from postroad.wire.frames import Kind

P = 5 << 32


def durable(script: Script, **changes: Any) -> int:
    wanted = wire.Subscribe(number=0, topic="a/#", where="", durable="s", ack="manual")
    number, effects = script.core.subscribe(msgspec.structs.replace(wanted, **changes))
    script.do(effects)
    script.say(wire.Subscribed(number=number, token=f'{{"{pubend_text(P)}": 10}}'))
    return number


def test_silence_moves_the_token_of_a_durable_subscription() -> None:
    """D3: a silence message is for the token, and takes nothing of the window."""
    script = Script()
    script.up()
    number = durable(script, ack="", token="")
    frame = empty_frame(kind=Kind.DELIVERY, pubend=P, start=10, end=90, channel=number)
    script.say(frame)
    assert script.take(fx.Passed) == [fx.Passed(number=number, pubend=P, tick=90)]
    assert script.core.inbox.outstanding == 0
    plain = script.subscribe("a/#", "")
    script.say(wire.Subscribed(number=plain))
    script.say(empty_frame(kind=Kind.DELIVERY, pubend=P, start=10, end=90, channel=plain))
    assert script.take(fx.Passed) == []


def lose(script: Script) -> None:
    """A connection breaks that was up for long enough to be dialled again at once."""
    script.now += script.core.settings.ping_us
    script.lose()


def again(script: Script) -> None:
    """The connection breaks and there is another."""
    lose(script)
    script.up()


def acks(script: Script) -> list[wire.Ack]:
    return [message for message in script.sent() if isinstance(message, wire.Ack)]


def acknowledge(script: Script, number: int, **what: Any) -> int:
    ticket, effects = script.core.acknowledge(number, **what)
    script.do(effects)
    return ticket


def test_an_acknowledgement_that_is_not_confirmed_is_said_again() -> None:
    script = Script()
    script.up()
    number = durable(script)
    ticket = acknowledge(script, number, token={P: 15}, confirm=True)
    assert [ack.token for ack in acks(script)] == [f'{{"{pubend_text(P)}": 15}}']
    again(script)
    assert acks(script) == [], "not before the broker knows the subscription"
    script.say(wire.Subscribed(number=number))
    assert [(ack.ticket, ack.token) for ack in acks(script)] == [(ticket, f'{{"{pubend_text(P)}": 15}}')]
    script.say(wire.Acked(number=number, ticket=ticket))
    assert script.take(fx.Acknowledged) == [fx.Acknowledged(ticket=ticket, error=None)]
    again(script)
    script.say(wire.Subscribed(number=number))
    assert acks(script) == []


def test_without_a_connection_only_what_is_to_be_confirmed_is_kept() -> None:
    script = Script()
    script.up()
    number = durable(script)
    lose(script)
    script.take(Send)
    assert acknowledge(script, number, token={P: 15}) == 0
    assert acknowledge(script, number, token={P: 16}, confirm=True) == 1
    script.up()
    script.say(wire.Subscribed(number=number))
    assert [ack.ticket for ack in acks(script)] == [1]


def test_a_disk_that_fails_is_an_error_for_who_waits() -> None:
    script = Script()
    script.up()
    number = durable(script)
    ticket = acknowledge(script, number, token={P: 15}, confirm=True)
    script.say(wire.Acked(number=number, ticket=ticket, code="storage", reason="no space left"))
    (told,) = script.take(fx.Acknowledged)
    assert str(told.error) == "no space left"


def test_an_acknowledgement_that_was_refused_is_no_place_to_go_on_from() -> None:
    """D3: one of the future was refused; the subscription must not begin there on the next connection."""
    script = Script()
    script.up()
    number = durable(script, ack="")
    acknowledge(script, number, token={P: 12})
    wrong = acknowledge(script, number, token={P: 1 << 60}, confirm=True)
    right = acknowledge(script, number, token={P: 15}, confirm=True)
    script.say(wire.Acked(number=number, ticket=wrong, code="usage", reason="of the future"))
    for confirmed, token in ((), 12), ((right,), 15):
        for ticket in confirmed:
            script.say(wire.Acked(number=number, ticket=ticket))
        again(script)
        begun = [message for message in script.sent() if isinstance(message, wire.Subscribe)]
        assert [one.token for one in begun] == [CheckpointToken({P: token}).to_json()]
        script.say(wire.Subscribed(number=number))


def test_what_was_acknowledged_is_remembered_in_case_the_broker_that_keeps_the_token_is_dead() -> None:
    """D11: with the epoch of its attachment, since it counts only if nobody was attached after it."""
    script = Script()
    script.up()
    number = durable(script)
    again(script)
    (unknown,) = [message for message in script.sent() if isinstance(message, wire.Subscribe)]
    assert (unknown.token, unknown.epoch) == ("", 0), "its broker did not say which attachment it was"
    script.say(wire.Subscribed(number=number, token=f'{{"{pubend_text(P)}": 11}}', epoch=7))
    acknowledge(script, number, token={P: 12})
    acknowledge(script, number, token={P: 15}, confirm=True)
    for epoch in (7, 9):
        again(script)
        sent = script.sent()
        (begun,) = [message for message in sent if isinstance(message, wire.Subscribe)]
        assert (begun.token, begun.epoch, begun.ack) == (CheckpointToken({P: 12}).to_json(), epoch, "manual")
        script.say(wire.Subscribed(number=number, epoch=9))
        (repeated,) = [message for message in script.sent() if isinstance(message, wire.Ack)]
        assert repeated.token == CheckpointToken({P: 15}).to_json(), "what nobody confirmed is said again"


@pytest.mark.parametrize("early", [False, True])
def test_what_was_deleted_meanwhile_begins_anew_with_gaps(early: bool) -> None:
    """D8: never silence. `early`: a delivery comes before SUBSCRIBED."""
    script = Script()
    script.up()
    number = durable(script)
    script.say(delivery(number, P, 10, [12]), delivery(number, P + 1, 3, [4]))
    again(script)
    script.take(fx.Delivered)
    anew = CheckpointToken({P: 90, P + 2: 50}).to_json()
    late = delivery(number, P, 90, [95])
    script.say(
        *[late] * early, wire.Subscribed(number=number, token=anew, created=True), *[late] * (not early)
    )
    script.say(delivery(number, P + 1, 8, [9]))
    told = [one.gap for one in script.take(fx.Missed)]
    assert [(gap.start, gap.end) for gap in told if gap.pubend == pubend_text(P)] == [(12, 90)]
    assert [(gap.start, gap.end) for gap in told if gap.pubend == pubend_text(P + 1)] == [(4, 8)]
    assert len([gap for gap in told if not gap.pubend]) == 1, "of those that it did not know"
    assert [ticks(one.batch) for one in script.take(fx.Delivered)] == [[95], [9]]
    again(script)
    script.say(wire.Subscribed(number=number, token=CheckpointToken({P: 95}).to_json()))
    assert script.take(fx.Missed) == [], "it was there"


def test_a_gap_that_a_delivery_told_is_not_told_again_by_what_began_anew() -> None:
    """The name was made at two brokers that did not know of each other, and the first one has it again."""
    script = Script()
    script.up()
    number = durable(script)
    script.say(delivery(number, P, 10, [12]))
    again(script)
    script.say(
        wire.Subscribed(number=number, token=CheckpointToken({P + 1: 5}).to_json(), created=True, born=8)
    )
    script.take(fx.Missed)
    again(script)
    token = CheckpointToken({P: 80, P + 1: 5}).to_json()
    script.say(delivery(number, P, 90, [95]), wire.Subscribed(number=number, token=token, born=7))
    told = [one.gap for one in script.take(fx.Missed)]
    assert [(gap.start, gap.end) for gap in told if gap.pubend == pubend_text(P)] == [(12, 90)]


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_deleted_begins_anew_with_gaps_although_the_first_word_of_it_was_lost(shared: bool) -> None:
    """D8: that it was created is said once, and the connection broke before that came."""
    script = Script()
    script.up()
    number = durable(script, shared=shared)
    token = CheckpointToken({P: 90}).to_json()
    for born, gaps in (7, []), (7, []), (8, ["" if shared else pubend_text(P)]), (8, []), (0, []), (8, []):
        again(script)
        script.say(wire.Subscribed(number=number, token=token if born != 7 else "", born=born))
        assert [one.gap.pubend for one in script.take(fx.Missed)] == gaps


def test_what_was_deleted_and_begins_again_since_a_time_has_missed_nothing() -> None:
    script = Script()
    script.up()
    number = durable(script, since_us=5)
    token = CheckpointToken({P: 5, P + 1: 5}).to_json()
    for born, created in (7, False), (8, False), (9, True):  # a broker may say so to who asks once more
        again(script)
        script.say(wire.Subscribed(number=number, token=token, born=born, created=created))
        assert script.take(fx.Missed) == []


def test_what_somebody_else_made_again_later_is_no_past_that_was_asked_for() -> None:
    """D8: it asked since tick 5, but the one of that name that is there now began at 90."""
    script = Script()
    script.up()
    number = durable(script, since_us=5)
    for born, tick, gaps in (7, 5, []), (8, 90, [pubend_text(P)]):
        again(script)
        script.say(wire.Subscribed(number=number, token=CheckpointToken({P: tick}).to_json(), born=born))
        assert [one.gap.pubend for one in script.take(fx.Missed)] == gaps


def test_a_shared_one_that_was_deleted_meanwhile_begins_anew_with_a_gap() -> None:
    script = Script()
    script.up()
    number = durable(script, shared=True)
    again(script)
    script.say(wire.Subscribed(number=number, token=CheckpointToken({P: 90}).to_json(), created=True))
    assert [one.gap.pubend for one in script.take(fx.Missed)] == [""]


def test_a_shared_one_takes_ticks_in_any_order_and_loses_what_it_had_with_its_connection() -> None:
    script = Script()
    script.up()
    number = durable(script, shared=True, key="k")
    script.say(delivery(number, P, 20, [21, 23]), delivery(number, P, 10, [11, 12]))
    assert [ticks(one.batch) for one in script.take(fx.Delivered)] == [[21, 23], [11, 12]]
    ticket = acknowledge(script, number, events={P: (21,)}, confirm=True)
    assert [(ack.token, ack.events) for ack in acks(script)] == [("", {P: (21,)})]
    lose(script)
    (told,) = script.take(fx.Acknowledged)
    assert told.ticket == ticket
    assert isinstance(told.error, UnavailableError)
    script.open()
    script.welcome()
    (request,) = (message for message in script.sent() if isinstance(message, wire.Subscribe))
    assert (request.shared, request.key, request.token) == (True, "k", "")


def test_a_durable_subscription_that_cannot_go_on_is_tried_again_for_a_while() -> None:
    """Whoever keeps its token may be unreachable: the application is told only if that lasts."""
    script = Script()
    script.up()
    number = durable(script)
    again(script)
    refused = wire.Ended(number=number, code="unavailable", reason="its broker is away")
    script.sent()
    script.say(refused)
    assert script.take(fx.Ended) == []
    script.now += AGAIN_US
    script.handle()
    assert [message.durable for message in script.sent() if isinstance(message, wire.Subscribe)] == ["s"]
    script.say(wire.Subscribed(number=number))
    again(script)
    script.say(refused)
    began_us = script.now
    while not script.take(fx.Ended):
        script.now += AGAIN_US
        script.handle()
        assert script.sent(), "it is tried again"
        script.say(wire.Pong(time_us=script.now, at_us=script.now), refused)
    assert 0 <= script.now - began_us - script.core.settings.outage_us <= SECOND_US
    assert number not in script.core.inbox


def test_one_that_never_began_or_was_deleted_ends_at_once() -> None:
    script = Script()
    script.up()
    number = durable(script)
    script.say(wire.Ended(number=number, code="usage", reason="deleted"))
    (ended,) = script.take(fx.Ended)
    assert isinstance(ended.error, UsageError)
    wanted = wire.Subscribe(number=0, topic="a", where="", durable="x", ack="auto")
    other, effects = script.core.subscribe(wanted)
    script.do(effects)
    script.say(wire.Ended(number=other, code="unavailable", reason="its broker is away"))
    assert [one.number for one in script.take(fx.Ended)] == [other]


def test_a_reader_that_its_broker_gave_up_is_over_and_one_that_could_not_go_on_is_tried_again() -> None:
    """A broker that has just started does not know every pubend; one that waited long enough says so."""
    script = Script()
    script.up()
    until = f'{{"{pubend_text(P)}": 90}}'
    number, effects = script.core.subscribe(wire.Subscribe(number=0, topic="a/#", where="", until=until))
    script.do(effects)
    script.say(wire.Subscribed(number=number))
    again(script)
    away = wire.Ended(number=number, code="unavailable", reason="its broker is away")
    script.sent()
    script.say(away)
    assert script.take(fx.Ended) == []
    script.now += AGAIN_US
    script.handle()
    assert [type(message) for message in script.sent()] == [wire.Subscribe]
    script.say(wire.Subscribed(number=number))
    script.say(away)
    (ended,) = script.take(fx.Ended)
    assert isinstance(ended.error, UnavailableError)
