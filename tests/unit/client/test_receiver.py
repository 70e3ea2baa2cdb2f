"""What a client receives as an application (Q7, Q10, responsibility 7), against a scripted broker."""

from __future__ import annotations

from typing import Any

import pytest
from tests.worlds.client_scripts import Script

from postroad.client import effects as fx
from postroad.client.receiver import MAX_KEYS, PAUSE_US, SPARE
from postroad.errors import DeniedError, PeerError, UnavailableError, UsageError
from postroad.events.attributes import decode_attributes, encode_attributes
from postroad.seam.effects import Close
from postroad.units import SECOND_US
from postroad.wire import frames as wire
from postroad.wire.frames import DEFAULT_LIMITS, QueueMessage


def message(number: int, *, form: str = "transactional", **more: Any) -> QueueMessage:
    fields: dict[str, Any] = {
        "key": b"key%d" % number,
        "source": "shop",
        "session": b"s" * 8,
        "id": number,
        "form": form,
        "attempt": 1,
        "sent_us": 1,
        "payload": b"x",
    }
    return QueueMessage(**(fields | more))


class Store(Script):
    """A client with one inbox."""

    def __init__(self, window: int = 10, **settings: Any) -> None:
        super().__init__(**settings)
        self.up()
        self.number, effects = self.core.receive("store", b"consumer", window, self.now)
        self.do(effects)
        (self.receive,) = (asked for asked in self.sent() if isinstance(asked, wire.Receive))
        self.join()

    def join(self) -> None:
        self.say(wire.Receiving(number=self.number))

    def come(self, *messages: QueueMessage, place: bytes = b"1") -> list[int]:
        self.say(wire.Messages(number=self.number, place=place, messages=messages))
        return self.next()

    def next(self) -> list[int]:
        """All that the application is handed now."""
        found = []
        while (each := self.core.receiver.next(self.number)) is not None:
            found.append(each.id)
        return found

    def settle(self, number: int, verdict: str = "accept", **more: Any) -> int:
        return self.core.receiver.settle(self.number, message(number), verdict, self.now, **more)

    def said(self) -> list[wire.Settle]:
        self.do(self.core.send_queued(self.now))
        return [each for each in self.sent() if isinstance(each, wire.Settle)]

    def answer(self, settle: wire.Settle, *outcomes: str, **more: Any) -> list[fx.Verdict]:
        self.say(wire.Settled(number=self.number, ticket=settle.ticket, outcomes=outcomes, **more))
        return self.take(fx.Verdict)

    def wait(self, us: int) -> None:
        self.now += us
        self.handle()

    def reconnect(self) -> list[wire.Message]:
        self.now += 5 * SECOND_US
        self.lose()
        self.open()
        self.take(fx.Joined)
        self.welcome()
        return [each for each in self.sent() if isinstance(each, wire.Message)]


def test_accepts_of_one_turn_are_one_frame_and_count_when_they_are_answered() -> None:
    store = Store()
    assert (store.receive.inbox, store.receive.consumer, store.receive.window) == ("store", b"consumer", 10)
    assert store.come(message(1), message(2)) == [1, 2]
    tickets = [store.settle(1), store.settle(2)]
    (settle,) = store.said()
    assert (settle.keys, settle.verdict) == ((b"key1", b"key2"), "accept")
    verdicts = store.answer(settle, "accepted", "taken")
    assert [(each.ticket, each.outcome) for each in verdicts] == [
        (tickets[0], "accepted"),
        (tickets[1], "taken"),
    ]
    with pytest.raises(UsageError, match="settled"):
        store.settle(1)


def test_a_verdict_has_its_delay_and_reason_and_a_frame_its_limit() -> None:
    store = Store(window=300)
    store.come(*(message(number) for number in range(1, MAX_KEYS + 4)))
    for number in range(1, MAX_KEYS + 2):
        store.settle(number)
    store.settle(MAX_KEYS + 2, "again", delay_us=5, reason="later")
    store.settle(MAX_KEYS + 3, "dead", reason="never")
    said = store.said()
    assert [len(each.keys) for each in said] == [MAX_KEYS, 1, 1, 1]
    assert (said[2].verdict, said[2].delay_us, said[2].reason) == ("again", 5, "later")
    assert (said[3].verdict, said[3].reason) == ("dead", "never")


def test_a_replaced_broker_delivers_nothing_any_more() -> None:
    """Case (h), responsibility 7: a consumer refuses deliveries of a lower epoch than it has seen."""
    store = Store()
    assert store.come(message(1), place=b"2") == [1]
    assert store.come(message(2), place=b"1") == []
    assert store.come(message(2), place=b"2") == [2]


def test_after_a_lost_connection_the_consumer_comes_again_and_says_its_verdicts_again() -> None:
    """Q10: the application has each message once, whoever delivers it again."""
    store = Store()
    store.come(message(1), message(2))
    ticket = store.settle(1)
    (settle,) = store.said()
    (asked,) = store.reconnect()
    assert asked == store.receive
    assert store.said() == []
    store.join()
    assert store.take(fx.Joined) == [fx.Joined(number=store.number)]
    (again,) = [each for each in store.sent() if isinstance(each, wire.Settle)]
    assert (again.ticket, again.keys) == (settle.ticket, settle.keys)
    assert store.come(message(1), message(2), place=b"3") == []
    assert [each.ticket for each in store.answer(again, "accepted")] == [ticket]


def later(number: int, **more: Any) -> QueueMessage:
    """The same message as it comes to a consumer that was taken for gone: another attempt, another key."""
    return message(number, key=b"later%d" % number, attempt=2, **more)


def test_a_later_attempt_of_what_is_being_accepted_is_not_handed_out() -> None:
    """Q7: both attempts would be confirmed to this consumer, and the work would be done twice."""
    store = Store()
    store.come(message(1), message(2, form="recoverable"))
    store.settle(1)
    store.settle(2)
    (settle,) = store.said()
    store.reconnect()
    store.join()
    (repeated,) = [each for each in store.sent() if isinstance(each, wire.Settle)]
    assert repeated.keys == settle.keys
    assert store.come(later(1), later(2, form="recoverable"), place=b"2") == []
    assert [each.outcome for each in store.answer(repeated, "accepted", "accepted")] == ["accepted"] * 2
    assert store.next() == []
    assert store.come(later(1), later(2, form="recoverable"), place=b"3") == []


def test_a_later_attempt_of_what_is_being_rejected_is_handed_out_once_that_is_answered() -> None:
    """The broker takes it for handed out: nobody else would bring it. What is behind it waits."""
    store = Store()
    store.say(wire.Messages(number=store.number, place=b"1", messages=(message(1), message(2))))
    store.core.receiver.next(store.number)
    store.settle(1, "again")
    (settle,) = store.said()
    assert store.come(later(1), place=b"2") == []
    store.answer(settle, "again")
    assert store.next() == [1, 2]
    store.settle(1)
    (accept,) = store.said()
    assert accept.keys == (b"later1",)


def test_a_later_attempt_of_what_the_application_has_is_what_it_settles() -> None:
    """A rejection of the earlier attempt would count as said before, and the message would come to nobody."""
    store = Store()
    store.come(message(1))
    assert store.come(later(1), place=b"2") == []
    store.settle(1, "again")
    (settle,) = store.said()
    assert settle.keys == (b"later1",)


def test_what_was_accepted_and_comes_again_is_accepted_again_and_not_handed_out() -> None:
    """Q7: the last accepted id per source; of messages without order, the last ones. Case (f)."""
    store = Store()
    store.come(message(1), message(2), message(9, form="recoverable"))
    for number in (1, 2, 9):
        store.settle(number)
    (settle,) = store.said()
    store.answer(settle, "accepted", "accepted", "accepted")
    assert store.come(message(2), message(9, form="recoverable"), message(3)) == [3]
    (again,) = [each for each in store.sent() if isinstance(each, wire.Settle)]
    assert again.keys == (b"key2", b"key9")
    assert store.answer(again, "accepted", "accepted") == []


def test_what_was_rejected_comes_again() -> None:
    store = Store()
    store.come(message(1))
    store.settle(1, "again")
    (settle,) = store.said()
    store.answer(settle, "again")
    assert store.come(message(1, attempt=2)) == [1]


def test_what_came_behind_a_rejected_message_waits_until_that_one_is_here_again() -> None:
    """Q7: one that was rejected holds up those behind it; other senders go on."""
    store = Store()
    other = message(7, session=b"o" * 8)
    store.say(wire.Messages(number=store.number, place=b"1", messages=(message(1), message(2), other)))
    receiver = store.core.receiver
    first = receiver.next(store.number)
    assert first is not None
    store.settle(first.id, "again")
    assert store.next() == [7]
    (settle,) = store.said()
    store.answer(settle, "again")
    assert store.next() == []
    assert store.come(message(1, attempt=2), message(2)) == [1, 2]


def test_what_came_behind_a_rejected_message_comes_though_that_one_never_comes_again() -> None:
    """It expired, or went to another consumer: the broker brings what is behind it, and no word of it."""
    store = Store()
    store.say(wire.Messages(number=store.number, place=b"1", messages=(message(1), message(2))))
    store.core.receiver.next(store.number)
    store.settle(1, "again", delay_us=SECOND_US)
    (settle,) = store.said()
    store.answer(settle, "again")
    assert store.come(message(2), message(3)) == [2, 3]


def test_what_came_behind_a_rejected_message_goes_on_when_that_one_is_dead() -> None:
    store = Store()
    store.say(wire.Messages(number=store.number, place=b"1", messages=(message(1), message(2))))
    store.core.receiver.next(store.number)
    store.settle(1, "again")
    (settle,) = store.said()
    assert store.next() == []
    store.take(fx.Arrived)
    store.answer(settle, "dead")
    assert store.take(fx.Arrived) == [fx.Arrived(number=store.number)]
    assert store.next() == [2]


def test_a_message_that_comes_back_is_handed_out_before_what_is_behind_it() -> None:
    """The consumer was given up and came back: what it said in between is `taken`, and all comes again."""
    store = Store()
    store.say(wire.Messages(number=store.number, place=b"1", messages=(message(1), message(2), message(3))))
    store.core.receiver.next(store.number)
    store.settle(1)
    (settle,) = store.said()
    store.answer(settle, "taken")
    assert store.come(later(1), message(2), message(3), place=b"2") == [1, 2, 3]


def test_who_accepts_too_early_still_has_the_message() -> None:
    store = Store()
    store.come(message(1), message(2))
    store.settle(2)
    (settle,) = store.said()
    assert [each.outcome for each in store.answer(settle, "early")] == ["early"]
    store.settle(1)
    store.settle(2)
    (both,) = store.said()
    assert both.keys == (b"key1", b"key2")


def test_a_verdict_is_said_again_while_brokers_are_unavailable_and_then_its_outcome_is_unknown() -> None:
    store = Store(outage_us=SECOND_US)
    store.come(message(1))
    ticket = store.settle(1)
    (settle,) = store.said()
    assert store.answer(settle, code="unavailable", reason="no majority") == []
    store.wait(PAUSE_US)
    (again,) = [each for each in store.sent() if isinstance(each, wire.Settle)]
    assert again.ticket == settle.ticket
    store.lose()
    store.wait(SECOND_US)
    (verdict,) = store.take(fx.Verdict)
    assert (verdict.ticket, verdict.outcome) == (ticket, "")


def test_an_answer_to_a_verdict_that_was_given_up_is_late_and_not_wrong() -> None:
    store = Store(outage_us=SECOND_US)
    store.come(message(1))
    store.settle(1)
    (settle,) = store.said()
    store.wait(SECOND_US)
    (verdict,) = store.take(fx.Verdict)
    assert isinstance(verdict.error, UnavailableError)
    assert store.answer(settle, "accepted") == []
    assert store.take(Close) == []
    assert "outcome unknown" in str(verdict.error)


def test_an_inbox_that_is_not_there_now_is_asked_for_again_and_one_that_is_denied_ends() -> None:
    store = Store()
    store.say(wire.Receiving(number=store.number, code="unavailable", reason="no majority"))
    assert store.take(fx.InboxEnded) == []
    store.wait(PAUSE_US)
    (asked,) = [each for each in store.sent() if isinstance(each, wire.Receive)]
    assert asked == store.receive
    store.say(wire.Receiving(number=store.number, code="denied", reason="it belongs to another"))
    (ended,) = store.take(fx.InboxEnded)
    assert isinstance(ended.error, DeniedError)
    store.say(wire.Messages(number=store.number, place=b"9", messages=(message(1),)))
    assert store.take(fx.Arrived) == []


def test_an_inbox_that_stays_unavailable_ends_in_the_end() -> None:
    store = Store(outage_us=SECOND_US)
    for _ in range(30):
        store.say(wire.Receiving(number=store.number, code="unavailable", reason="no majority"))
        store.wait(SECOND_US // 10)
    (ended,) = store.take(fx.InboxEnded)
    assert isinstance(ended.error, UnavailableError)


def test_attributes_that_cannot_be_read_hurt_nobody() -> None:
    """A hostile sender's message goes to the dead letters; the next one is handed out."""
    store = Store()
    assert store.come(message(1, attributes=b"\xff"), message(2)) == [2]
    (settle,) = [each for each in store.sent() if isinstance(each, wire.Settle)]
    assert (settle.verdict, settle.keys) == ("dead", (b"key1",))


def test_attributes_are_read_as_they_were_written() -> None:
    attributes = {"text": "ä", "count": -3, "price": 1.5, "yes": True, "no": False}
    encoded = encode_attributes(attributes, DEFAULT_LIMITS)
    assert decode_attributes(encoded) == attributes
    for cut in range(1, len(encoded)):
        try:
            assert len(decode_attributes(encoded[:cut])) < len(attributes)
        except PeerError:
            continue
    for bad in (b"\x01a\x04", b"\x01a\x03\x02", b"\x00\x03\x01", b"\x01a\x03\x01\x01a\x03\x01"):
        with pytest.raises(PeerError):
            decode_attributes(bad)


def test_a_closed_inbox_says_what_was_settled_and_leaves() -> None:
    store = Store()
    store.come(message(1))
    store.settle(1)
    store.do(store.core.stop_receiving(store.number, store.now))
    said = store.sent()
    assert [type(each) for each in said] == [wire.Settle, wire.Unreceive]


@pytest.mark.parametrize(
    "frame",
    [
        wire.Settled(number=1, ticket=99, outcomes=("accepted",)),
        wire.Messages(number=1, place=b"1", messages=(message(1, key=bytes(1025)),)),
        wire.Messages(number=1, place=b"1", messages=tuple(message(each) for each in range(1, 42 + SPARE))),
    ],
)
def test_what_cannot_be_true_breaks_the_protocol(frame: wire.Message) -> None:
    store = Store()
    store.say(frame)
    assert store.take(Close)


def test_an_answer_has_an_outcome_for_every_key() -> None:
    store = Store()
    store.come(message(1))
    store.settle(1)
    (settle,) = store.said()
    store.answer(settle, "eaten")
    assert store.take(Close)
