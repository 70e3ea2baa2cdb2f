"""Sessions: durable subscriptions on the connections of clients.

A subscription that is not shared has one session, whose number `subscriptions` knows. A shared one
has a session for each of its consumers; the number that stands for the group is that of none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from postroad.durable.subscriber.subscriptions import Subscription
from postroad.errors import BugError
from postroad.events.token import CheckpointToken


@dataclass(slots=True)
class Session:
    """A subscription on a client's connection."""

    id: int
    connection: int
    number: int
    subscriber: int
    name: str
    shared: bool
    token: CheckpointToken | None = None  # that it came with
    missing: tuple[str, ...] = ()
    created: bool = False  # the subscription was not there before
    began: bool = False  # SUBSCRIBED was sent


class Sessions:
    def __init__(self) -> None:
        self._by_id: dict[int, Session] = {}
        self._by_subscriber: dict[int, Session] = {}  # those that are not shared, by subscription
        self._by_connection: dict[int, dict[int, Session]] = {}  # connection -> number there
        self._last = 0

    def new_number(self) -> int:
        """Names a session, or something else that is confirmed."""
        self._last += 1
        return self._last

    def open(self, connection: int, number: int, subscription: Subscription) -> Session:
        """On this connection, under the number that its client gave it."""
        id = (
            self.new_number() if subscription.shared or subscription.session is None else subscription.session
        )
        session = self._by_id[id] = Session(
            id, connection, number, subscription.id, subscription.name, subscription.shared
        )
        self._by_connection.setdefault(connection, {})[number] = session
        if not subscription.shared:
            self._by_subscriber[subscription.id] = session
        return session

    def close(self, session: Session) -> None:
        del self._by_id[session.id]
        sessions = self._by_connection[session.connection]
        del sessions[session.number]
        if not sessions:
            del self._by_connection[session.connection]
        if self._by_subscriber.get(session.subscriber) is session:
            del self._by_subscriber[session.subscriber]

    def get(self, id: int) -> Session | None:
        return self._by_id.get(id)

    def of(self, subscriber: int) -> Session | None:
        """That of a subscription which is not shared."""
        return self._by_subscriber.get(subscriber)

    def find(self, connection: int, number: int) -> Session | None:
        return self._by_connection.get(connection, {}).get(number)

    def count(self, connection: int) -> int:
        return len(self._by_connection.get(connection, ()))

    def on(self, connection: int) -> list[Session]:
        return list(self._by_connection.get(connection, {}).values())

    def check(self) -> None:
        for id, session in self._by_id.items():
            known = session.shared or self._by_subscriber.get(session.subscriber) is session
            if not known or session.id != id:
                raise BugError("hosting: a session is not that of its subscription")
            if self.find(session.connection, session.number) is not session:
                raise BugError("hosting: a connection does not know its session")
        if sum(map(len, self._by_connection.values())) != len(self._by_id):
            raise BugError("hosting: connections do not hold exactly the sessions")
