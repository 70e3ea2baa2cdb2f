"""What an inbox does, one rule at a time (spec Q3, Q6, Q7 and what goes beyond the paper)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from postroad.errors import PeerError, UsageError
from postroad.links.access import ANONYMOUS
from postroad.queues import inbox as module
from postroad.queues.inbox import (
    ENDED_US,
    FORGET_US,
    Accept,
    Answer,
    Decide,
    Delete,
    End,
    Forget,
    Inboxes,
    Join,
    Leave,
    Limits,
    Message,
    Operation,
    Own,
    Put,
    Refuse,
    Reject,
    Resolve,
    Revive,
    Stage,
    Sweep,
    check_message,
    kind_of,
    name_of,
    principal_of,
    session_of,
    source_of,
)
from postroad.queues.messages import Chain

CHAIN = Chain(0, b"A", b"A")


def message(number: int, source: str = "shop", inbox: str = "stock", **fields: object) -> Message:
    made = Message(inbox, CHAIN, source, number, True, b"reserve")
    return replace(made, **fields)


def key(number: int, source: str = "shop") -> tuple[Chain, str, int]:
    return (CHAIN, source, number)


class Desk:
    """Inboxes, with an outcome for each operation."""

    def __init__(self, **limits: int) -> None:
        self.inboxes = Inboxes(Limits(**limits))

    def do(self, operation: Operation) -> str:
        (answer,) = self.inboxes.apply(module.encode(operation))
        self.inboxes.check()
        return answer.outcome

    def put(self, *messages: Message, now_us: int = 0) -> str:
        return self.do(Put(messages, now_us))

    def join(self, consumer: str, inbox: str = "stock", principal: str = "alice", admin: bool = False) -> str:
        return self.do(Join(inbox, consumer, principal, admin, 0))

    def accept(self, number: int, consumer: str, source: str = "shop") -> str:
        return self.do(Accept("stock", key(number, source), consumer, 0))

    def reject(self, number: int, consumer: str, *, dead: bool = False, not_before_us: int = 0) -> str:
        return self.do(Reject("stock", key(number), consumer, "broken", dead, not_before_us, 0))

    def ready(self, consumer: str, now_us: int = 0, inbox: str = "stock") -> list[tuple[str, int]]:
        return [(each.source, each.id) for each in self.inboxes.ready(inbox, consumer, now_us, 100)]


def test_the_kinds_of_table_1() -> None:
    """Q3."""
    assert kind_of("transactional", reliable=True).ordered
    assert not kind_of("express", reliable=True).replicated
    assert kind_of("recoverable", reliable=False).replicated
    assert not kind_of("recoverable", reliable=False).acknowledged
    with pytest.raises(UsageError, match="no unreliable kind of message 'transactional'"):
        kind_of("transactional", reliable=False)


def test_nothing_passes_an_earlier_message_of_its_source() -> None:
    """Q7, Q8."""
    desk = Desk()
    assert desk.put(message(2, after=1)) == "gap"
    assert desk.put(message(1)) == "kept"
    assert desk.put(message(2, after=1)) == "kept"
    assert desk.put(message(1)) == "known"
    desk.join("clerk")
    assert desk.ready("clerk") == [("shop", 1), ("shop", 2)]
    assert desk.accept(2, "clerk") == "early"


def test_an_accept_is_confirmed_to_one_consumer_repeatably() -> None:
    desk = Desk()
    desk.join("first")
    desk.put(message(1))
    desk.put(message(2, after=1))
    assert desk.accept(1, "second") == "absent"
    desk.join("second")
    assert desk.accept(1, "second") == "taken"
    assert desk.accept(1, "first") == "accepted"
    desk.do(Leave("stock", "first", (key(2),), 0))
    assert [each.attempts for each in desk.inboxes.ready("stock", "second", 0, 9)] == [1]
    assert desk.accept(2, "second") == "accepted"
    assert desk.accept(1, "first") == "accepted", "though the last accept of the source is another's"
    assert desk.accept(1, "second") == "taken"
    assert desk.accept(2, "first") == "taken"


def test_a_source_sticks_to_its_consumer_and_moves_when_that_one_leaves() -> None:
    desk = Desk()
    desk.join("x")
    desk.join("y")
    for source in ("a", "b", "c"):
        desk.put(message(1, source))
        desk.put(message(2, source, after=1))
    assert desk.ready("x") == [("a", 1), ("a", 2), ("c", 1), ("c", 2)]
    assert desk.ready("y") == [("b", 1), ("b", 2)]
    desk.join("z")
    assert desk.ready("z") == []
    desk.do(Leave("stock", "x", (), 0))
    assert desk.ready("z") == [("a", 1), ("a", 2)]
    assert desk.ready("y") == [("b", 1), ("b", 2), ("c", 1), ("c", 2)]


def test_a_rejected_message_comes_again_later_and_holds_up_its_source_and_dies_in_the_end() -> None:
    desk = Desk(attempts=2)
    desk.join("clerk")
    desk.put(message(1))
    desk.put(message(2, after=1))
    desk.put(message(1, "other"))
    assert desk.reject(1, "clerk", not_before_us=50) == "again"
    assert desk.ready("clerk", 49) == [("other", 1)]
    assert desk.ready("clerk", 50) == [("shop", 1), ("shop", 2), ("other", 1)]
    assert desk.reject(1, "clerk") == "dead"
    assert desk.put(message(1)) == "known"
    assert desk.ready("clerk", 50) == [("shop", 2), ("other", 1)]
    assert [(each.id, each.attempts, each.reason) for each in desk.inboxes.inboxes["stock"].dead] == [
        (1, 2, "broken")
    ]
    assert desk.do(Revive("stock", 10, False, 0)) == "revived"
    assert desk.ready("clerk") == [("shop", 2), ("other", 1), ("shop", 1)]
    assert desk.accept(1, "clerk") == "accepted"


def test_dead_letters_are_bounded_and_can_be_dropped() -> None:
    desk = Desk(dead_letters=1)
    desk.join("clerk")
    desk.put(message(1))
    desk.put(message(2, after=1))
    assert desk.reject(1, "clerk", dead=True) == "dead"
    assert desk.reject(2, "clerk", dead=True) == "full"
    assert desk.ready("clerk") == [("shop", 2)]
    assert desk.do(Revive("stock", 10, True, 0)) == "revived"
    assert desk.reject(2, "clerk", dead=True) == "dead"


def test_priority_counts_between_sources_and_never_within_one() -> None:
    desk = Desk()
    desk.join("clerk")
    desk.put(message(1, "a", priority=1))
    desk.put(message(2, "a", after=1, priority=9))
    desk.put(message(1, "b", priority=5))
    assert desk.ready("clerk") == [("b", 1), ("a", 1)], "the second of a comes when the first is settled"
    assert desk.accept(1, "clerk", "a") == "accepted"
    assert desk.ready("clerk") == [("a", 2), ("b", 1)]


def test_what_has_expired_is_not_delivered_and_becomes_a_dead_letter() -> None:
    desk = Desk()
    desk.join("clerk")
    desk.put(message(1, expires_us=100))
    desk.put(message(2, after=1))
    assert desk.ready("clerk", 99) == [("shop", 1), ("shop", 2)]
    assert desk.ready("clerk", 100) == []
    desk.do(Sweep(100))
    assert desk.ready("clerk", 100) == [("shop", 2)]
    assert [each.reason for each in desk.inboxes.inboxes["stock"].dead] == ["expired"]


def test_recoverable_messages_have_no_order() -> None:
    desk = Desk()
    desk.join("clerk")
    assert desk.put(message(5, ordered=False)) == "kept"
    assert desk.put(message(3, ordered=False)) == "kept"
    assert desk.put(message(3, ordered=False)) == "known"
    assert desk.accept(3, "clerk") == "accepted"
    assert desk.put(message(3, ordered=False)) == "kept", "it may come twice"


def test_several_messages_are_kept_together_or_not_at_all() -> None:
    desk = Desk(inbox_messages=1)
    both = (message(1), message(1, inbox="bills"))
    desk.put(message(1, "other", inbox="bills"))
    assert desk.put(*both) == "full"
    assert desk.inboxes.depth("stock") == 0
    desk.join("clerk", "bills")
    assert desk.do(Accept("bills", key(1, "other"), "clerk", 0)) == "accepted"
    assert desk.put(*both) == "kept"
    assert desk.put(*both) == "known"
    assert (desk.inboxes.depth("stock"), desk.inboxes.depth("bills")) == (1, 1)
    assert desk.put(message(2, after=1), message(3, after=2)) == "full"
    with pytest.raises(PeerError, match="Expected `array` of length >= 1"):
        desk.put()


def test_what_is_full_can_be_sent_again_under_its_id() -> None:
    desk = Desk(inbox_bytes=600)
    desk.join("clerk")
    assert desk.put(message(1)) == "kept"
    assert desk.put(message(2, after=1)) == "kept"
    assert desk.put(message(3, after=2)) == "full"
    assert desk.put(message(4, after=3)) == "gap"
    assert desk.accept(1, "clerk") == "accepted"
    assert desk.put(message(3, after=2)) == "kept"


def test_a_message_that_the_broker_refused_stays_refused() -> None:
    desk = Desk()
    assert desk.do(Refuse("stock", key(1), 0)) == "rejected"
    assert desk.put(message(1)) == "rejected"
    assert desk.do(Refuse("stock", key(1), 0)) == "rejected"
    assert desk.put(message(2, after=1)) == "kept"
    assert desk.do(Refuse("stock", key(2), 0)) == "known"


def test_a_name_belongs_to_the_principal_that_first_received_under_it() -> None:
    desk = Desk()
    assert desk.join("clerk") == "joined"
    assert desk.join("thief", principal="mallory") == "denied"
    assert desk.join("root", principal="mallory", admin=True) == "joined"


def test_sources_that_were_silent_for_long_are_forgotten_once_they_have_nothing_here() -> None:
    desk = Desk()
    desk.join("clerk")
    desk.put(message(1), now_us=1)
    desk.do(Sweep(FORGET_US + 1))
    assert desk.put(message(1)) == "known"
    desk.do(Accept("stock", key(1), "clerk", 5))
    desk.do(Sweep(FORGET_US + 4))
    assert desk.put(message(1)) == "known"
    desk.do(Sweep(FORGET_US + 5))
    assert desk.inboxes.inboxes["stock"].sources == {}


def test_a_session_that_ended_in_good_order_is_forgotten_soon_after_its_last_message_is_gone() -> None:
    desk = Desk()
    desk.join("clerk")
    desk.put(message(1), now_us=1)
    desk.do(End("stock", "shop", 2))
    desk.do(Sweep(ENDED_US + 2))
    assert desk.put(message(1)) == "known", "its message is here"
    desk.do(Accept("stock", key(1), "clerk", 5))
    desk.do(Sweep(ENDED_US + 4))
    assert desk.put(message(1)) == "known"
    desk.do(Sweep(ENDED_US + 5))
    assert desk.inboxes.inboxes["stock"].sources == {}


def test_messages_that_are_not_put_together_have_an_outcome_each() -> None:
    desk = Desk(inbox_messages=2)
    messages = (message(1), message(3, after=2), message(1), message(2, after=1), message(3, after=2))
    (answer,) = desk.inboxes.apply(module.encode(Put(messages, 0, together=False)))
    assert [each.outcome for each in answer.each] == ["kept", "gap", "known", "kept", "full"]
    assert answer.each[1].last == 1
    desk.inboxes.check()


def test_a_rejection_that_is_said_twice_counts_once() -> None:
    desk = Desk(attempts=2)
    desk.join("clerk")
    desk.put(message(1))
    said = Reject("stock", key(1), "clerk", "broken", False, 0, 0, 1)
    assert [desk.do(said), desk.do(said)] == ["again", "again"]
    assert desk.do(replace(said, attempt=2)) == "dead"


def test_a_consumer_is_not_given_again_what_it_has_and_nothing_that_is_not_kept() -> None:
    desk = Desk()
    desk.join("clerk")
    for number in (1, 2, 3):
        desk.put(message(number, after=number - 1))
    ready = desk.inboxes.ready("stock", "clerk", 0, 9, held={key(1)}, end=3)
    assert [each.id for each in ready] == [2]


def test_a_transaction_over_two_arcs_commits_in_both_or_in_none() -> None:
    for commit in (True, False):
        home, other = Desk(), Desk()
        for desk, name in ((home, "stock"), (other, "bills")):
            desk.join("clerk", name)
            assert desk.do(Stage(b"t", b"home", (message(1, inbox=name),), 7)) == "staged"
            assert desk.do(Stage(b"t", b"home", (message(1, inbox=name),), 7)) == "staged"
            assert desk.ready("clerk", inbox=name) == []
            assert desk.put(message(2, inbox=name)) == "gap", "nothing passes what is staged"
        assert [stage.home for stage in other.inboxes.undecided(8)] == [b"home"]
        assert other.inboxes.undecided(7) == []
        outcome = "committed" if commit else "aborted"
        assert home.do(Decide(b"t", commit, 8)) == outcome
        assert home.do(Decide(b"t", not commit, 9)) == outcome, "the first decision stands"
        for desk, name in ((home, "stock"), (other, "bills")):
            assert desk.do(Resolve(b"t", commit, 9)) == "done"
            assert desk.do(Resolve(b"t", commit, 9)) == "done"
            assert desk.ready("clerk", inbox=name) == ([("shop", 1)] if commit else [])
            assert desk.put(message(1, inbox=name)) == ("known" if commit else "kept")
            assert desk.put(message(2, after=1, inbox=name)) == "kept"
        home.do(Forget(b"t"))
        assert home.inboxes.decisions == {}


def test_what_waits_for_one_consumer_costs_another_one_nothing() -> None:
    class Counting(dict[int, Message]):
        reads = 0

        def __getitem__(self, number: int) -> Message:
            self.reads += 1
            return super().__getitem__(number)

    desk = Desk()
    desk.join("slow")
    for number in range(1, 501):
        desk.put(message(number, after=number - 1))
    desk.join("quick")
    desk.put(message(1, source="mill"))
    inbox = desk.inboxes.inboxes["stock"]
    inbox.messages = Counting(inbox.messages)
    assert desk.ready("quick") == [("mill", 1)]
    assert inbox.messages.reads < 5
    desk.do(Leave("stock", "slow", (), 0))
    assert desk.ready("quick")[:2] == [("shop", 1), ("shop", 2)]


def test_a_message_whose_consumers_are_lost_again_and_again_is_a_dead_letter() -> None:
    """It may be what ends them. What waits behind it was not tried."""
    desk = Desk(attempts=3)
    assert desk.put(message(1), message(2, after=1)) == "kept"
    for consumer in ("x", "y", "z"):
        assert desk.join(consumer) == "joined"
        assert desk.do(Leave("stock", consumer, (key(1),), 0)) == "left"
    (dead,) = desk.inboxes.inboxes["stock"].dead
    assert (dead.id, dead.attempts, dead.reason) == (1, 3, "its consumers were lost")
    desk.join("x")
    assert desk.ready("x") == [("shop", 2)]
    assert desk.inboxes.fate("stock", key(1)) == "gone"


def test_attempts_at_their_bound_stay_there_and_the_state_can_be_read() -> None:
    """Whoever puts a message says how often it was tried: what comes after it must fit a snapshot, too."""
    desk = Desk(attempts=module.MAX_ATTEMPTS)
    assert desk.put(message(1, attempts=module.MAX_ATTEMPTS), message(2, "mill", attempts=7)) == "kept"
    desk.join("x")
    assert desk.do(Leave("stock", "x", (key(1), key(2, "mill")), 0)) == "left"
    desk.join("x")
    desk.inboxes.install(desk.inboxes.snapshot())
    inbox = desk.inboxes.inboxes["stock"]
    assert [each.attempts for each in inbox.messages.values()] == [8]
    assert [each.attempts for each in inbox.dead] == [module.MAX_ATTEMPTS]
    assert desk.reject(1, "x") == "taken"
    desk.inboxes.install(desk.inboxes.snapshot())
    with pytest.raises(PeerError, match="is no list of operations"):
        desk.put(message(3, attempts=(1 << 32) - 1))


def test_what_is_out_of_bounds_is_the_callers_fault() -> None:
    named = source_of(b"12345678", "shop", "alice")
    assert (name_of(named), session_of(named), principal_of(named)) == ("shop", b"12345678", "alice")
    assert source_of(b"12345678", "shop", "") == b"12345678".hex() + "shop"  # as before there were principals
    check_message(message(1, named))
    for bad, text in (
        (message(1, named, inbox=""), "the name of an inbox"),
        (message(1, source_of(b"12345678", "s" * 256, "alice")), "the name of an source"),
        (message(1, named, payload=bytes(module.MAX_PAYLOAD_BYTES + 1)), "over the limit"),
        (message(1, named, priority=10), "a priority is from 0 to 9, not 10"),
        (message(1, named, after=1), "1 cannot come after 1"),
    ):
        with pytest.raises(UsageError, match=text):
            check_message(bad)
    with pytest.raises(PeerError, match="cannot be read"):
        Inboxes(Limits()).install(b"\xc1")
    with pytest.raises(PeerError, match="is no list of operations"):
        Inboxes(Limits()).apply(b"\xc1")


def test_tables_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_SOURCES", "MAX_CONSUMERS", "MAX_STAGED", "MAX_DECISIONS", "MAX_INBOXES"):
        monkeypatch.setattr(module, name, 1)
    desk = Desk()
    assert desk.put(message(1, "a")) == "kept"
    assert desk.put(message(1, "b")) == "full"
    assert desk.put(message(1, inbox="bills")) == "full"
    assert desk.join("x") == "joined"
    assert desk.join("y") == "full"
    assert desk.join("x", "bills") == "full"
    assert desk.do(Stage(b"1", b"", (message(2, "a", after=1),), 0)) == "staged"
    assert desk.accept(1, "x", "a") == "accepted"
    assert desk.do(Stage(b"2", b"", (message(9, "a", ordered=False),), 0)) == "full"
    assert desk.do(Decide(b"1", True, 0)) == "committed"
    assert desk.do(Decide(b"2", True, 0)) == "full"
    monkeypatch.setattr(module, "MAX_ACCEPTS", 1)
    assert desk.do(Resolve(b"1", True, 0)) == "done"
    assert desk.accept(2, "x", "a") == "accepted"
    # It left the table: the last consumer of its source counts.
    assert desk.accept(1, "x", "a") == "accepted"
    assert desk.inboxes.perform(Accept("nowhere", key(1), "x", 0)) == Answer("taken")


def test_an_inbox_that_nobody_owns_is_forgotten_once_nothing_is_left_of_it() -> None:
    """A name that was mistyped, or made for one reply, is not there for ever."""
    desk = Desk()
    desk.join("passer", "typo", principal=ANONYMOUS)
    desk.do(Leave("typo", "passer", (), 1))
    desk.put(message(1), now_us=1)
    desk.do(Sweep(2))
    assert list(desk.inboxes.inboxes) == ["stock"]
    desk.join("clerk", principal="")
    desk.accept(1, "clerk")
    desk.do(End("stock", "shop", 2))
    desk.do(Sweep(2 + ENDED_US))
    assert list(desk.inboxes.inboxes) == ["stock"], "somebody receives from it"
    desk.do(Leave("stock", "clerk", (), 2))
    desk.join("clerk", "owned", principal="alice")
    desk.do(Leave("owned", "clerk", (), 2))
    desk.do(Sweep(2 + ENDED_US))
    assert list(desk.inboxes.inboxes) == ["owned"], "the name is alice's"


def test_an_inbox_is_deleted_with_all_that_is_in_it_unless_it_is_in_use() -> None:
    desk = Desk()
    desk.join("clerk")
    desk.put(message(1, f"{'00' * 8}shop\0bob"), message(2, f"{'00' * 8}shop\0bob"), message(1, "mill"))
    desk.reject(1, "clerk", dead=True)
    assert desk.do(Delete("stock", 1)) == "busy"
    desk.do(Leave("stock", "clerk", (), 1))
    desk.do(Stage(b"t", b"home", (message(9),), 1))
    assert desk.do(Delete("stock", 1)) == "busy"
    desk.do(Resolve(b"t", False, 1))
    assert desk.inboxes.names == {"alice": 1}
    assert desk.inboxes.perform(Delete("stock", 1)) == Answer("deleted", 3)
    desk.inboxes.check()
    assert (desk.inboxes.inboxes, desk.inboxes.bytes, desk.inboxes.stored) == ({}, 0, {})
    assert desk.inboxes.names == {}
    assert desk.do(Delete("stock", 1)) == "none"
    assert desk.put(message(1, "mill")) == "kept", "it begins anew"


def test_a_name_is_given_to_another_principal() -> None:
    desk = Desk()
    assert desk.do(Own("stock", "bob", 1)) == "none"
    desk.join("clerk", principal="squatter")
    assert desk.do(Own("stock", "bob", 1)) == "owned"
    assert desk.join("one", principal="squatter") == "denied"
    assert desk.join("two", principal="bob") == "joined"
    assert desk.inboxes.names == {"bob": 1}
