"""Tokens, names, epochs, release: decisions of docs/explanation/durable.md (spec D3, D7, D8, D10, D11)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from tests.worlds.turns import Turns

from postroad.durable.publisher.release import TABLE as OWNERS
from postroad.durable.publisher.release import ReleaseMerger, ReleaseRoot, Report, RetentionPolicy, read_owner
from postroad.durable.subscriber import cursor as cursor_module
from postroad.durable.subscriber.backlog import Backlog
from postroad.durable.subscriber.claims import TABLE as CLAIMS
from postroad.durable.subscriber.claims import read_claims
from postroad.durable.subscriber.cursor import Cursor, SentEvents
from postroad.durable.subscriber.subscriptions import (
    HOLD_US,
    RELEASED,
    SAVE_US,
    SUBSCRIPTIONS,
    Answered,
    Attached,
    Attachment,
    Subscription,
    Subscriptions,
    read_released,
    read_subscription,
)
from postroad.errors import BugError, PeerError, StorageError, UsageError
from postroad.events.token import CheckpointToken
from postroad.overlay.interest_entries import MAX_EPOCH, Claim
from postroad.seam.storage import Save
from postroad.selectors import Selector

P, Q = 7 << 32, 8 << 32
ANY = Selector.parse("#", "")


class Kept(Subscriptions):
    """Subscriptions of a broker, with turns and what the disk answered."""

    def __init__(self, broker: int) -> None:
        self.turns = Turns()
        self.answers: list[Answered] = []
        for table, reader in (
            (SUBSCRIPTIONS, read_subscription),
            (RELEASED, read_released),
            (CLAIMS, read_claims),
        ):
            self.turns.board.table(table, reader)
        super().__init__(
            broker=broker, backlog=Backlog(), answered=lambda _turn, answer: self.answers.append(answer)
        )

    def saves(self, now_us: int) -> list[Save]:
        """What a turn at this time saves."""
        turn = self.turns.turn(now_us)
        self.flush(turn)
        return [effect for effect in turn.effects if isinstance(effect, Save)]


def attach(
    held: Subscriptions, name: str = "billing", session: int = 1, now_us: int = 10, **rest: object
) -> Attached:
    options = {"selector": ANY, "ack": "", **rest}
    return held.attach(Attachment(name=name, session=session, **options), now_us)  # type: ignore[arg-type]


def hosted(held: Subscriptions, **rest: object) -> Subscription:
    found = attach(held, **rest).subscription  # type: ignore[arg-type]
    assert found is not None
    return found


# ---- tokens


def test_a_token_survives_json_and_names_pubends_as_text() -> None:
    token = CheckpointToken({Q: 5, P: 1_700_000_000_000_000})
    assert token.to_json() == '{"00000007-00000000": 1700000000000000, "00000008-00000000": 5}'
    assert CheckpointToken.from_json(token.to_json()) == token
    assert hash(CheckpointToken.from_json(token.to_json())) == hash(token)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"x": 1}', '{"00000007-00000000": "1"}', '{"00000007-00000000": -1}']
)
def test_what_is_no_token_is_the_callers_fault(text: str) -> None:
    with pytest.raises(UsageError):
        CheckpointToken.from_json(text)


def test_a_tick_that_cannot_be_names_the_pubend_as_text() -> None:
    with pytest.raises(UsageError, match="of pubend 00000007-00000000"):
        CheckpointToken({P: 1 << 63})


def test_tokens_are_vector_clocks() -> None:
    one, other = CheckpointToken({P: 5, Q: 1}), CheckpointToken({P: 3})
    assert one.covers(other)
    assert not other.covers(one)
    assert one.minimum(other) == CheckpointToken({P: 3})
    assert one.maximum(CheckpointToken({Q: 9})) == CheckpointToken({P: 5, Q: 9})
    assert other.advanced(P, 2) is other
    assert other.advanced(Q, 2).tick(Q) == 2
    assert CheckpointToken({P: 0}) == CheckpointToken()


# ---- names


def test_the_same_name_with_another_selector_is_refused() -> None:
    held = Kept(1)
    attach(held)
    with pytest.raises(UsageError, match="delete it first"):
        attach(held, session=2, selector=Selector.parse("orders/#", ""))
    held.check()


def test_a_second_connection_takes_the_name_over() -> None:
    held = Kept(1)
    first = attach(held)
    second = attach(held, session=2)
    assert second.subscription is first.subscription
    assert not second.created
    assert held.detach(1) is None
    assert held.by_session(2) is first.subscription
    held.check()


@pytest.mark.parametrize(("name", "ack"), [("", ""), ("x" * 256, ""), ("a\nb", ""), ("ok", "sometimes")])
def test_bad_names_and_modes_are_refused(name: str, ack: str) -> None:
    with pytest.raises(UsageError):
        attach(Kept(1), name=name, ack=ack)


def test_a_claim_from_far_in_the_future_moves_no_other_name() -> None:
    """An epoch is above all that were heard of, but one peer cannot use them up for all names."""
    subscriptions = Kept(1)
    now_us = 1_000_000
    subscriptions.claimed(Claim("near", now_us + 5), 2, 1, now_us)
    assert hosted(subscriptions, name="a", session=1, now_us=now_us).epoch == now_us + 6
    subscriptions.claimed(Claim("far", MAX_EPOCH), 2, 2, now_us)
    assert hosted(subscriptions, name="b", session=2, now_us=now_us).epoch == now_us + 7
    token = CheckpointToken({P: 1})
    assert hosted(subscriptions, name="far", session=3, now_us=now_us, token=token).epoch == MAX_EPOCH
    assert hosted(subscriptions, name="c", session=4, now_us=now_us).epoch == now_us + 8


def always(_broker: int) -> bool:
    return True


def test_at_two_brokers_the_higher_epoch_has_it_and_the_other_lets_go_later() -> None:
    """D10: the old broker holds what is not acknowledged until the new one has had time to report."""
    old, new = Kept(1), Kept(2)
    one = hosted(old)
    old.begin(one, P, 50, since=50, matched=0)
    moved = attach(new, token=one.token(), now_us=1000).subscription
    assert old.claimed(Claim("billing", moved.epoch), 2, 1, 1000) is one
    assert old.owner("billing") == 2
    assert old.released(P) == 50
    assert old.expired(1000 + HOLD_US - 1, always) == []
    assert old.expired(1000 + HOLD_US, always) == ["billing"]
    assert new.claimed(Claim("billing", one.epoch), 1, 1, 1001) is None, "an old claim changes nothing"
    assert new.owner("billing") is None
    old.delete("billing")
    assert old.released(P) is None
    assert old.owner("billing") == 2
    old.check()


def test_what_moved_away_is_over_when_it_is_deleted_there_and_back_when_that_broker_is_retired() -> None:
    held = Kept(1)
    one = hosted(held)
    assert held.claimed(Claim("billing", one.epoch + 5), 2, 1, 1000) is one
    assert held.retired(2) == [one]
    assert held.expired(1000 + HOLD_US, always) == []
    assert held.claimed(Claim("billing", one.epoch + 6), 2, 1, 1000) is one
    held.withdrawn("billing", 3, 2, 1001)
    assert held.expired(1001, always) == [], "another broker has nothing to say in this"
    held.withdrawn("billing", 2, 2, 1001)
    assert held.expired(1001, always) == ["billing"]


def test_heard_claims_survive_a_restart() -> None:
    """A subscription that moved while its disk had not heard of it has moved after a restart as well."""
    held = Kept(1)
    one = hosted(held)
    held.claimed(Claim("billing", one.epoch + 5), 2, 1, 1000)
    held.claimed(Claim("other", 7), 3, 1, 1000)
    tables: dict[str, dict[bytes, bytes]] = {}
    for save in held.saves(10**9):
        tables.setdefault(save.table, {}).update({k: v for k, v in save.rows if v is not None})
    back = Kept(1)
    back.recover(
        tables["durable.subscriptions"], tables["durable.released"], tables["durable.claims"], now_us=2000
    )
    assert (back.owner("billing"), back.owner("other")) == (2, 3)
    assert back.expired(2000 + HOLD_US, always) == ["billing"]
    with pytest.raises(BugError):
        attach(back, name="other")


def test_equal_epochs_go_to_the_higher_broker() -> None:
    low, high = Kept(1), Kept(2)
    epochs = attach(low).subscription.epoch, attach(high).subscription.epoch
    assert epochs[0] == epochs[1]
    assert high.claimed(Claim("billing", epochs[0]), 1, 1, 20) is None
    assert low.claimed(Claim("billing", epochs[1]), 2, 1, 20) is not None


# ---- acknowledgements


def test_acknowledgements_are_confirmed_by_one_save_and_reported_when_saved() -> None:
    """D11: auto-acknowledge of many events shares group commits."""
    held = Kept(1)
    one = hosted(held, ack="auto")
    held.begin(one, P, 10, since=10, matched=0)
    one.cursors[P].sent(30, SentEvents.at(np.array([15, 20, 30])))
    for ticket, tick in enumerate((15, 20, 25)):
        held.ack(one, {P: tick}, ticket)
    saves = held.saves(100)
    assert [save.table for save in saves] == ["durable.subscriptions", "durable.released"]
    assert held.saves(100) == []
    assert held.released(P) == 10
    held.turns.written(saves[1])
    assert held.answers == [Answered(tickets=[(one.id, 0), (one.id, 1), (one.id, 2)], firm=[], error=None)]
    assert held.released(P) == 25
    held.check()


def test_what_was_told_on_another_connection_is_acknowledged_and_counted_once() -> None:
    """A client says its acknowledgements again after a reconnect, before it is told the same again."""
    held = Kept(1)
    one = hosted(held)
    held.begin(one, P, 10, since=10, matched=0)
    held.ack(one, {P: 20, Q: 5})
    assert one.token() == {P: 20}
    held.begin(one, Q, 3, since=10, matched=0)
    assert one.token() == {P: 20, Q: 5}, "known before it began here"
    cursor = one.cursors[P]
    cursor.sent(15, SentEvents.at(np.array([11, 12, 15])))
    cursor.sent(20, SentEvents.at(np.array([16, 18])))
    assert (cursor.consumed, cursor.lag(5)) == (5, 0)
    cursor.sent(30, SentEvents.at(np.array([21, 22, 23, 25])))
    assert (cursor.consumed, cursor.lag(9)) == (5, 4)
    held.ack(one, {P: 22})
    assert (cursor.consumed, cursor.lag(9)) == (7, 2)
    cursor.sent(30, SentEvents.at(np.array([21, 22, 23, 25])))
    assert (cursor.consumed, cursor.lag(10)) == (7, 3), "told again: still two, and one to come"


def test_a_failed_save_is_told_and_made_again() -> None:
    held = Kept(1)
    one = hosted(held, ack="manual")
    held.begin(one, P, 10, since=10, matched=0)
    held.confirm(one.id, 5)
    names, rows = held.saves(0)
    error = StorageError("full")
    held.turns.written(names, error=error)
    assert held.answers == []
    held.turns.written(rows, error=error)
    assert held.answers == [Answered(tickets=[(one.id, 5)], firm=[], error=error)]
    assert [save.rows for save in held.saves(SAVE_US)] == [names.rows, rows.rows]


def test_a_restart_finds_subscriptions_and_never_reuses_ids() -> None:
    held = Kept(1)
    one = hosted(held, ack="batch", selector=Selector.parse("orders/#", "price > 100"))
    held.begin(one, P, 10, since=10, matched=4)
    hosted(held, name="gone", session=2)
    tables: dict[str, dict[bytes, bytes]] = {}
    for at in range(2):
        for save in held.saves(at * SAVE_US):
            for key, value in save.rows:
                table = tables.setdefault(save.table, {})
                table.pop(key, None)
                if value is not None:
                    table[key] = value
        if not at:
            held.delete("gone")
    back = Kept(1)
    back.recover(tables["durable.subscriptions"], tables["durable.released"], {}, now_us=0)
    found = back.get("billing")
    assert found is not None
    assert (found.id, found.selector, found.ack, found.token()) == (1, one.selector, "batch", one.token())
    assert back.get("gone") is None
    assert hosted(back, name="next").id == 3
    back.check()


def test_lag_counts_events_and_time() -> None:
    held = Kept(1)
    one = hosted(held)
    held.begin(one, P, 1_000_000, since=1_000_000, matched=0)
    assert held.lag(one, 4_000_000, lambda _s, _p: 5) == (5, 3_000_000)
    one.cursors[P].sent(2_000_000, SentEvents.at(np.array([1_500_000, 1_800_000, 2_000_000])))
    held.ack(one, {P: 2_000_000})
    assert held.lag(one, 4_000_000, lambda _s, _p: 5) == (2, 2_000_000)


def test_many_events_that_are_not_acknowledged_are_counted_in_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are taken together, and counted until the last of them is acknowledged."""
    monkeypatch.setattr(cursor_module, "MAX_UNACKED", 10)
    cursor = Cursor(released=0, saved=0, since=0, matched=0, sent_to=0, counted=0, quiet=0, begun=0)
    for end in range(5, 10_000, 5):
        cursor.sent(end, SentEvents.at(np.arange(end - 4, end + 1)))
        assert sum(len(part.ticks) for part in cursor._unacked) <= 10
    assert cursor.lag(9_995) == 9_995
    cursor.release(3)
    assert cursor.lag(9_995) == 9_992
    cursor.release(9_995)
    assert (cursor.lag(9_995), cursor.consumed) == (0, 9_995)


# ---- release


def report(owner: int, serial: int, released: int, delivered: int, **rest: bool) -> Report:
    return Report(owner=owner, serial=serial, released=released, latest_delivered=delivered, **rest)


def root(**policy: int) -> ReleaseRoot:
    return ReleaseRoot(P, RetentionPolicy(**{"keep_us": 0, **policy}), now_us=0)


def test_the_policy_of_section_3() -> None:
    """D8: t <= Tr or (t <= Td and T - t > maxRetain)."""
    held = root(max_retain_us=100)
    held.report(report(1, 1, 20, 300))
    held.report(report(2, 1, 50, 250))
    assert (held.released, held.latest_delivered) == (20, 250)
    assert held.floor(110, 110, lambda _: 0) == 20
    assert held.floor(300, 300, lambda _: 0) == 199
    assert held.floor(1000, 400, lambda _: 0) == 250, "never beyond latestDelivered of anybody"


def test_ticks_ahead_of_the_clock_grow_old_all_the_same() -> None:
    """The clock was an hour ahead, and was put right: ticks go on from where they were."""
    hour = 3_600_000_000
    held = root(keep_us=1000, max_retain_us=100_000)
    held.report(report(1, 1, hour + 70, hour + 80))
    floors = [held.floor(now_us, hour + now_us // 1000, lambda _: 0) for now_us in range(0, 200_001, 100)]
    assert floors[10] <= hour, "young"
    assert all(one <= two for one, two in pairwise(floors))
    # After 1 ms what is acknowledged, after 100 what is delivered; both by a 64th later.
    assert hour + 67 <= floors[700] <= hour + 69
    assert floors[750] == hour + 70
    assert hour + 75 <= floors[1780] <= hour + 78
    assert floors[1900] == hour + 80


def test_early_release_by_size_stops_at_latest_delivered() -> None:
    held = root(max_bytes=1000)
    held.report(report(1, 1, 20, 300))
    assert held.floor(1000, 400, lambda limit: 150 if limit == 1000 else 0) == 150
    assert held.floor(1000, 400, lambda _: 350) == 300


def test_nobody_and_the_young_and_a_fresh_process() -> None:
    held = root(keep_us=100)
    assert held.floor(99, 99, lambda _: 0) == 0, "owners have time to report after a restart"
    assert held.floor(500, 500, lambda _: 0) == 400
    assert held.floor(5000, 1000, lambda _: 0) == 1000, "nobody needs anything"


def test_an_unreachable_owner_holds_until_it_is_retired() -> None:
    held = root()
    held.report(report(1, 1, 20, 20))
    held.report(report(2, 1, 90, 95))
    turns = Turns()
    turns.board.table(OWNERS, read_owner)
    turn = turns.turn()
    held.flush(turn)
    (save,) = turn.effects
    assert isinstance(save, Save)
    again = root()
    again.recover({key: value for key, value in save.rows if value is not None})
    assert again.floor(1000, 100, lambda _: 0) == 20
    again.retire(1)
    assert again.floor(1000, 100, lambda _: 0) == 90
    assert not again.report(report(1, 1, 20, 20)), "an echo of its last report does not bring it back"
    assert again.report(report(1, 2, 30, 30)), "itself does"
    assert not again.retire(9)
    with pytest.raises(PeerError):
        again.report(report(3, 1, 5, 4))


def test_reports_are_merged_by_owner_and_told_again_to_a_new_parent() -> None:
    """D7."""
    held = ReleaseMerger()
    assert held.report(P, report(1, 1, 5, 6))
    assert held.report(P, report(1, 3, 9, 9))
    assert not held.report(P, report(1, 2, 7, 7)), "an older one, by another way"
    held.report(P, report(2, 1, 4, 4))
    taken = held.take(lambda pubend: pubend == P)
    assert [(one.owner, one.released) for one in taken[P]] == [(1, 9), (2, 4)]
    assert held.take(lambda _: True) == {}
    held.resend(lambda pubend: pubend == P)
    assert len(held.take(lambda _: True)[P]) == 2
    held.forget(lambda _, owner: owner == 2)
    held.resend(lambda _: True)
    assert [one.owner for one in held.take(lambda _: True)[P]] == [1]
    held.check()
