"""What a client sends to applications (Q3, Q4, Q6, Q7), against a scripted broker made of frames."""

from __future__ import annotations

from typing import Any

import pytest
from tests.worlds.client_scripts import Script

from postroad.client import effects as fx
from postroad.client.sender import MAX_CONFIRMING, MAX_TOGETHER, MAX_UNKEPT, PAUSE_US, Sender
from postroad.errors import DeniedError, FullError, UnavailableError, UndeliveredError, UsageError
from postroad.ids import first_number
from postroad.seam.effects import Close
from postroad.units import SECOND_US
from postroad.wire import frames as wire
from postroad.wire.frames import Posting

SESSION = b"session1"


def posting(inbox: str, payload: bytes = b"x") -> Posting:
    return Posting(inbox=inbox, id=0, after=0, payload=payload)


class Shop(Script):
    """A client with one application."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.core.sender.begin_session("shop", SESSION)
        self.up()

    def add(self, *inboxes: str, form: str = "transactional", **how: bool) -> list[tuple[int, int]]:
        given = {"reliable": True, "together": False, "confirm": False} | how
        return self.core.sender.add(SESSION, form, [posting(inbox) for inbox in inboxes], self.now, **given)

    def sends(self) -> list[wire.Send]:
        """What goes out, once the chains of all inboxes are known."""
        sends: list[wire.Send] = []
        while new := self.sends_as_they_are():
            for send in new:
                places = [place for place, each in enumerate(send.messages) if not each.chain]
                if send.form == "transactional" and places:
                    self.answer(send, *places, state="gap", chain=b"c0")
                else:
                    sends.append(send)
        return sends

    def sends_as_they_are(self) -> list[wire.Send]:
        self.do(self.core.send_queued(self.now))
        return [message for message in self.sent() if isinstance(message, wire.Send)]

    def answer(self, send: wire.Send, *places: int, state: str = "kept", **more: Any) -> None:
        self.say(wire.Sent(number=send.number, places=places, state=state, **more))

    def wait(self, us: int) -> None:
        self.now += us
        self.handle()

    def kept(self) -> list[int]:
        return [ordinal for effect in self.take(fx.Kept) for ordinal in effect.ordinals]


def test_messages_of_one_turn_share_a_frame_and_each_names_the_one_before_it() -> None:
    """Q7: ids come from the clock and increase; `after` chains them per inbox."""
    shop = Shop()
    added = shop.add("a", "b", "a")
    (send,) = shop.sends()
    assert (send.source, send.session, send.form) == ("shop", SESSION, "transactional")
    first, second, third = send.messages
    begin = shop.now // 1_000 << 16
    assert (first.id, second.id, third.id) == (begin, begin + 1, begin + 2)
    assert (first.after, second.after, third.after) == (0, 0, first.id)
    shop.answer(send, 0, 1)
    shop.answer(send, 2)
    assert shop.kept() == [ordinal for ordinal, _ in added]
    shop.add("a")
    assert shop.sends()[0].messages[0].after == 0, "what is kept cannot be passed"
    assert shop.core.sender.messages == 1


def test_after_a_lost_connection_all_that_is_not_kept_goes_again_under_its_id() -> None:
    """Q4, Q6."""
    shop = Shop()
    shop.add("a", "a")
    (first,) = shop.sends()
    shop.answer(first, 0)
    shop.now += 5 * SECOND_US
    shop.lose()
    shop.open()
    shop.take(fx.Kept)
    shop.welcome()
    (again,) = [message for message in shop.sent() if isinstance(message, wire.Send)]
    assert [each.id for each in again.messages] == [first.messages[1].id]
    assert again.messages[0].after == first.messages[0].id
    shop.answer(again)
    assert len(shop.kept()) == 1


@pytest.mark.parametrize("code", ["full", "unavailable"])
def test_what_is_not_kept_now_is_sent_again_after_a_pause_and_nothing_passes_it(code: str) -> None:
    """ "Accept only if the id is greater" would lose what is passed; another inbox is not held up."""
    shop = Shop()
    shop.add("a", "a", "b")
    (send,) = shop.sends()
    shop.answer(send, 0, state="", code=code, reason="wait")
    shop.answer(send, 1, state="gap", last=0)
    shop.answer(send, 2)
    assert len(shop.kept()) == 1
    shop.add("a")
    shop.add("b")
    (other,) = shop.sends()
    assert [each.inbox for each in other.messages] == ["b"]
    shop.wait(PAUSE_US)
    (again,) = [message for message in shop.sent() if isinstance(message, wire.Send)]
    assert [each.id for each in again.messages][:2] == [each.id for each in send.messages[:2]]
    assert [each.inbox for each in again.messages] == ["a", "a", "a"]


def test_who_is_given_up_is_not_what_others_come_after() -> None:
    """Protocol: the next `after` names the last one before it that was not given up and is not kept."""
    shop = Shop()
    shop.add("a")
    (first,) = shop.sends()
    shop.add("a", "a")
    (second,) = shop.sends()
    shop.answer(second, 0, state="", code="denied", reason="no")
    (refused,) = shop.take(fx.Refused)
    assert isinstance(refused.error, DeniedError)
    shop.answer(second, 1, state="gap")
    shop.wait(PAUSE_US)
    (third,) = [message for message in shop.sent() if isinstance(message, wire.Send)]
    assert third.messages[0].id == second.messages[1].id
    assert third.messages[0].after == first.messages[0].id


def test_a_message_that_nobody_keeps_is_given_up_with_what_is_known() -> None:
    """Case (j): an error of a minority is not taken for "not sent"."""
    shop = Shop(outage_us=SECOND_US)
    shop.add("full", "nobody")
    (send,) = shop.sends()
    shop.answer(send, 0, state="", code="full", reason="100 messages, the limit is 100")
    shop.answer(send, 1, state="", code="unavailable", reason="no majority")
    for _ in range(20):
        shop.wait(SECOND_US // 20)
        for again in (message for message in shop.sent() if isinstance(message, wire.Send)):
            for place, each in enumerate(again.messages):
                code = "full" if each.inbox == "full" else "unavailable"
                shop.answer(again, place, state="", code=code, reason="still")
    errors = [effect.error for effect in shop.take(fx.Refused)]
    assert [type(error) for error in errors] == [FullError, UnavailableError]
    assert "withdrawn" in str(errors[0])
    assert "outcome unknown" in str(errors[1])
    assert shop.core.sender.messages == shop.core.sender.bytes == 0


def test_without_a_broker_what_was_never_sent_is_withdrawn() -> None:
    shop = Shop(outage_us=SECOND_US)
    shop.add("a")
    shop.sends()
    shop.lose()
    shop.add("b")
    shop.now += SECOND_US
    shop.handle()
    errors = [str(effect.error) for effect in shop.take(fx.Refused)]
    assert ["outcome unknown" in error for error in errors] == [True, False]
    assert "not sent" in errors[1]


def test_a_transaction_is_one_frame_and_one_answer() -> None:
    shop = Shop()
    added = shop.add("a", "b", together=True)
    assert len({ordinal for ordinal, _ in added}) == 1
    shop.add("c")
    transaction, other = shop.sends()
    assert transaction.together
    assert [each.inbox for each in transaction.messages] == ["a", "b"]
    assert not other.together
    shop.answer(transaction)
    assert shop.kept() == [added[0][0]]


def test_delivery_is_told_when_every_message_is_accepted_also_after_a_reconnect() -> None:
    """Q6: two acknowledgements that the sender can tell apart."""
    shop = Shop()
    ((ordinal, _),) = shop.add("a", confirm=True)
    (send,) = shop.sends()
    assert send.confirm
    shop.answer(send)
    assert shop.kept() == [ordinal]
    assert shop.take(fx.Confirmed) == []
    shop.now += 5 * SECOND_US
    shop.lose()
    shop.open()
    shop.welcome()
    (again,) = [message for message in shop.sent() if isinstance(message, wire.Send)]
    assert again.messages[0].id == send.messages[0].id
    shop.answer(again)
    assert shop.kept() == []
    shop.answer(again, state="delivered")
    assert shop.take(fx.Confirmed) == [fx.Confirmed(ordinals=(ordinal,))]


def test_an_unreliable_message_is_done_with_when_it_is_sent() -> None:
    """Table 1. An error that a broker knows at once is told nevertheless."""
    shop = Shop()
    ((ordinal, _),) = shop.add("a", form="express", reliable=False)
    (send,) = shop.sends()
    assert shop.kept() == [ordinal]
    shop.answer(send, state="", code="denied", reason="no")
    (lost,) = shop.take(fx.Lost)
    assert isinstance(lost.error, DeniedError)


def test_a_transactional_message_goes_out_only_with_the_chain_that_it_is_first_sent_in() -> None:
    """Responsibility 9: ids are compared per chain of first sending, so nobody keeps one without it."""
    shop = Shop()
    shop.add("a", "a", "b")
    (asking,) = shop.sends_as_they_are()
    assert [(each.inbox, each.chain) for each in asking.messages] == [("a", b""), ("b", b"")]
    assert shop.sends_as_they_are() == [], "the second waits for the answer to the first"
    shop.answer(asking, 0, state="gap", chain=b"c1")
    (send,) = shop.sends_as_they_are()
    assert [(each.inbox, each.chain) for each in send.messages] == [("a", b"c1"), ("a", b"c1")]
    shop.answer(asking, 1, state="", code="unavailable", reason="nobody answered")
    assert shop.sends_as_they_are() == []
    shop.wait(PAUSE_US)
    (asking_again,) = [message for message in shop.sent() if isinstance(message, wire.Send)]
    assert [(each.inbox, each.chain) for each in asking_again.messages] == [("b", b"")]
    shop.answer(send, chain=b"c2")
    assert len(shop.kept()) == 2
    shop.add("a")
    (later,) = shop.sends_as_they_are()
    assert later.messages[0].chain == b"c1", "the first answer stays, wherever the client goes"


def test_a_message_that_only_asked_for_its_chain_was_not_sent() -> None:
    shop = Shop(outage_us=SECOND_US)
    shop.add("a", "b")
    (asking,) = shop.sends_as_they_are()
    shop.answer(asking, 0, state="gap", chain=b"c1")
    shop.sends_as_they_are()
    shop.wait(SECOND_US)
    errors = [str(effect.error) for effect in shop.take(fx.Refused)]
    assert ["outcome unknown" in error for error in errors] == [True, False]
    assert "not sent, and withdrawn" in errors[1]
    shop.add("b")
    assert len(shop.sends_as_they_are()) == 1, "the next one asks"


def test_a_transaction_waits_for_the_chains_of_all_its_inboxes() -> None:
    shop = Shop()
    shop.add("a", "b", together=True)
    shop.add("a")
    (asking,) = shop.sends_as_they_are()
    shop.answer(asking, 1, state="gap", chain=b"c2")
    assert shop.sends_as_they_are() == []
    shop.answer(asking, 0, state="gap", chain=b"c1")
    transaction, other = shop.sends_as_they_are()
    assert [each.chain for each in transaction.messages] == [b"c1", b"c2"]
    assert [each.after for each in other.messages] == [transaction.messages[0].id]


def test_a_frame_has_a_limit_and_so_has_what_is_not_kept() -> None:
    shop = Shop()
    shop.add(*["a"] * (MAX_TOGETHER + 1))
    assert [len(send.messages) for send in shop.sends()] == [MAX_TOGETHER, 1]
    shop.add(*["a"] * (MAX_UNKEPT - MAX_TOGETHER - 2))
    assert shop.core.sender.room
    shop.add("a")
    assert not shop.core.sender.room
    assert MAX_CONFIRMING > MAX_UNKEPT
    with pytest.raises(UsageError, match="closed"):
        shop.core.sender.add(
            b"another!", "express", [posting("a")], 1, reliable=True, together=False, confirm=False
        )


def test_a_session_ends_in_good_order_only_if_all_is_kept() -> None:
    shop = Shop()
    shop.add("a")
    (send,) = shop.sends()
    shop.answer(send)
    shop.do(shop.core.end_session(SESSION))
    assert [message for message in shop.sent() if isinstance(message, wire.EndSession)] == [
        wire.EndSession(source="shop", session=SESSION)
    ]
    sender = Sender(SECOND_US)
    sender.begin_session("shop", SESSION)
    sender.opened()
    sender.add(SESSION, "express", [posting("a")], 1, reliable=True, together=False, confirm=False)
    assert sender.end_session(SESSION) is None


@pytest.mark.parametrize(
    "answer",
    [
        wire.Sent(number=7, places=(), state="kept"),
        wire.Sent(number=1, places=(1,), state="kept"),
        wire.Sent(number=1, places=(), state="eaten"),
        wire.Sent(number=1, places=(), state="kept", chain=bytes(65)),
    ],
)
def test_an_answer_that_cannot_be_true_breaks_the_protocol(answer: wire.Sent) -> None:
    shop = Shop()
    shop.add("a")
    shop.sends_as_they_are()
    shop.say(answer)
    assert shop.take(Close)


def test_patience_is_measured_by_the_client_s_own_clock_and_ids_by_the_broker_s() -> None:
    """A client whose clock is ahead of the broker's by more than its patience would give up at once."""
    shop = Shop(outage_us=SECOND_US)
    hour_us = 3_600 * SECOND_US
    shop.now += hour_us
    (early,) = shop.add("stock")
    (late,) = shop.core.sender.add(
        SESSION,
        "transactional",
        [posting("stock")],
        shop.now,
        skew_us=hour_us,
        reliable=True,
        together=False,
        confirm=False,
    )
    assert late[1] - early[1] == first_number(hour_us // 1_000) - first_number(0)
    shop.core.sender.add(
        SESSION,
        "transactional",
        [posting("stock")],
        shop.now,
        skew_us=-hour_us,
        reliable=True,
        together=False,
        confirm=False,
    )
    assert shop.core.sender.tick(shop.now) == []
    shop.wait(SECOND_US)
    (refused,) = shop.take(fx.Refused)
    assert len(refused.ordinals) == 3


def test_who_waits_for_a_delivery_that_never_comes_is_told_so() -> None:
    shop = Shop()
    ((ordinal, _),) = shop.add("stock", form="recoverable", confirm=True)
    (send,) = shop.sends()
    shop.answer(send)
    shop.answer(send, 0, state="dead")
    (confirmed,) = shop.take(fx.Confirmed)
    assert confirmed.ordinals == (ordinal,)
    assert isinstance(confirmed.error, UndeliveredError)
