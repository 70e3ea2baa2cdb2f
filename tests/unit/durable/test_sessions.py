"""Sessions of durable subscriptions: found by id, by subscription, by connection; gone from all of them."""

from __future__ import annotations

import pytest

from postroad.durable.subscriber.sessions import Sessions
from postroad.durable.subscriber.subscriptions import Subscription
from postroad.errors import BugError
from postroad.selectors import Selector


def subscription(id: int, *, shared: bool = False) -> Subscription:
    return Subscription(id, f"s{id}", Selector.parse("t", ""), "auto", 1, 1, shared)


def test_a_subscription_has_one_session_which_its_connection_knows() -> None:
    sessions, one = Sessions(), subscription(7)
    one.session = sessions.new_number()
    session = sessions.open(3, 1, one)
    assert (session.id, session.subscriber, session.name) == (one.session, 7, "s7")
    assert sessions.of(7) is sessions.get(one.session) is sessions.find(3, 1) is session
    assert (sessions.on(3), sessions.count(3), sessions.count(4)) == ([session], 1, 0)
    sessions.check()
    sessions.close(session)
    assert (sessions.of(7), sessions.get(session.id), sessions.find(3, 1)) == (None, None, None)
    assert sessions.on(3) == []
    sessions.check()


def test_consumers_of_a_group_have_sessions_of_their_own() -> None:
    """Also two on one connection; the group's number is none of them."""
    sessions, group = Sessions(), subscription(7, shared=True)
    group.session = sessions.new_number()
    consumers = [sessions.open(3, 1, group), sessions.open(3, 2, group), sessions.open(4, 1, group)]
    assert len({group.session, *(one.id for one in consumers)}) == 4
    assert (sessions.of(7), sessions.get(group.session)) == (None, None)
    sessions.close(consumers[0])
    assert sessions.on(3) == consumers[1:2]
    assert sessions.find(4, 1) is consumers[2]
    sessions.check()


def test_a_session_that_a_newer_one_replaced_leaves_that_one_alone() -> None:
    sessions, one = Sessions(), subscription(7)
    one.session = sessions.new_number()
    first = sessions.open(3, 1, one)
    one.session = sessions.new_number()
    second = sessions.open(4, 1, one)
    with pytest.raises(BugError, match="not that of its subscription"):
        sessions.check()
    sessions.close(first)
    assert sessions.of(7) is second
    sessions.check()
