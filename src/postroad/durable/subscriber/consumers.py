"""Shared durable subscriptions in a broker: `groups` joined to hosting and to client connections.

A group is one subscriber of `hosting`, connected while it has a consumer; each consumer is a client's
subscription. What is acknowledged above the group's token is saved at once, and the token is moved on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from postroad.durable.subscriber.cursor import Cursor
from postroad.durable.subscriber.dead_letters import DeadLetters, Grave, Publishing
from postroad.durable.subscriber.groups import Assigned, AssignGap, SharedSubscription
from postroad.durable.subscriber.hosting import Hosting
from postroad.durable.subscriber.outputs import Deliver, DeliverGap, Receivers
from postroad.durable.subscriber.subscriptions import SAVE_US, Subscription
from postroad.errors import BugError, PostroadError, UsageError
from postroad.events.batch import empty_frame
from postroad.links.links import Links
from postroad.seam.turn import Turn
from postroad.units import SECOND_US
from postroad.wire.frames import Ack, Attempts, Kind, Limits, encode

MAX_DELAY_US: Final = 86_400 * SECOND_US  # of an event that is rejected
PATIENCE_US: Final = 30 * SECOND_US  # who holds up the others of its group for longer is named in the log


class _HeldUp(NamedTuple):
    """A group whose other consumers wait for one."""

    consumer: int
    since_us: int
    name_at: int  # when it is named in the log


@dataclass(slots=True)
class _Group(Grave):
    consumers: dict[int, tuple[int, int]]  # -> (connection, its number there)
    session: int | None = None  # in hosting; None: it has no consumer
    coming: int = 0  # bytes that it is sent in this turn and has not been offered yet
    tickets: list[int] = field(default_factory=list)  # acknowledgements to be confirmed by the next save
    confirming: list[int] = field(default_factory=list)  # by the save on its way
    held_up: _HeldUp | None = None


class DurableGroups:
    """The groups of one broker, by their subscriber numbers.

    `record`: these were handed this. `acked`: what was acknowledged with this ticket is on disk, or failed.
    """

    def __init__(
        self,
        *,
        hosting: Hosting,
        links: Links,
        rows: Mapping[bytes, bytes],
        me: int,
        limits: Limits,
        publishing: Publishing,
        record: Callable[[Receivers, Deliver | DeliverGap, int], None],
        acked: Callable[[Turn, int, PostroadError | None], None],
    ) -> None:
        self._hosting = hosting
        self._links = links
        self._record = record
        self._acked = acked
        self._groups: dict[int, _Group] = {}  # every shared subscription that is, or was, in use
        self._active: dict[int, None] = {}  # those with something to save
        self._by_session: dict[int, _Group] = {}  # those with consumers
        self._failed = False  # a save has, since the last flush
        self._flush_at = 0  # a disk that refuses is not asked with every turn
        self._gone_rejected = self._gone_buried = 0  # of groups that were deleted
        self._uneasy: dict[int, None] = {}  # those of whose events some rest, or are set aside
        self._burying: dict[int, Callable[[Turn, bool], None]] = {}  # tickets of dead letters, below 0
        self._last_burying = 0
        self._dead_letters = DeadLetters(
            me=me,
            limits=limits,
            publishing=publishing,
            graves=self._groups,
            save=self._save_dead,
            buried=self._buried,
        )
        for subscription in hosting.subscriptions:
            if subscription.shared:
                self._group(subscription).shared.recover(rows, subscription.token())

    def _group(self, subscription: Subscription) -> _Group:
        group = self._groups.get(subscription.id)
        if group is not None:
            return group
        cursors = subscription.cursors
        consumers: dict[int, tuple[int, int]] = {}
        shared = SharedSubscription(
            subscription.id,
            key=subscription.key,
            available=lambda consumer: self._links.available(consumers[consumer][0]),
            saved=lambda pubend: cursors[pubend].saved if pubend in cursors else 0,
            matched=lambda pubend: _matched(cursors.get(pubend)),
        )
        made = self._groups[subscription.id] = _Group(subscription.name, "", shared, consumers)
        self.set_policy(subscription)
        return made

    def set_policy(self, subscription: Subscription) -> None:
        """How often events are tried, and where they go then."""
        group = self._groups.get(subscription.id)
        if group is not None:
            group.topic, group.shared.max_attempts = subscription.dead_letters, subscription.max_attempts

    # ---- consumers

    def begin(self, subscription: Subscription, session: int) -> None:
        """The group is connected to hosting."""
        group = self._group(subscription)
        group.session = session
        self._by_session[session] = group

    def admit(self, subscription: Subscription) -> None:
        """UsageError if it cannot have another consumer."""
        shared = self._groups[subscription.id].shared
        if shared.full:
            count = len(shared.consumers)
            raise UsageError(
                f"the shared subscription {subscription.name!r} has {count} consumers: there cannot be more"
            )

    def join(self, turn: Turn, subscriber: int, consumer: int, connection: int, number: int) -> None:
        group = self._groups[subscriber]
        group.consumers[consumer] = (connection, number)
        self._hand_out(turn, group, group.shared.join(consumer))

    def leave(self, turn: Turn, subscriber: int, consumer: int, *, lost: bool) -> int | None:
        """What it held goes to others. After the last one: the session of the group, to be detached."""
        group = self._groups[subscriber]
        del group.consumers[consumer]
        self._hand_out(turn, group, group.shared.leave(consumer, lost=lost))
        if lost:
            self._active[subscriber] = self._uneasy[subscriber] = None
        if group.consumers or group.session is None:
            return None
        session, group.session = group.session, None
        # Silence below what is open may not have been acknowledged; hosting goes on at the token it knows.
        self._hosting.ack(session, group.shared.token())
        group.shared.reset()
        del self._by_session[session]
        return session

    def done(self, subscription: Subscription) -> int:
        """Events that consumers are done with above the token of their group."""
        group = self._groups.get(subscription.id)
        return 0 if group is None else sum(map(group.shared.finished, subscription.cursors))

    def consumers(self, session: int) -> list[int]:
        """Those of the group with this session in hosting."""
        group = self._by_session.get(session)
        return [] if group is None else list(group.consumers)

    def delete(self, turn: Turn, subscriber: int) -> list[int]:
        """For good; the tickets that nothing will decide any more."""
        group = self._groups.pop(subscriber, None)
        self._active.pop(subscriber, None)
        if group is None:
            return []
        group.shared.delete(turn)
        self._gone_rejected += group.shared.rejected
        self._gone_buried += group.shared.buried
        tickets = group.confirming + group.tickets
        for ticket in tickets:
            if ticket in self._burying:
                self._confirm(turn, ticket, None)
        return [ticket for ticket in tickets if ticket > 0]

    # ---- events

    def room(self, subscriber: int) -> bool:
        group = self._groups.get(subscriber)
        return group is not None and group.shared.has_room(group.coming)

    def spend(self, subscriber: int, size: int) -> None:
        """It is sent so much: `deliver` follows in this turn."""
        group = self._groups.get(subscriber)
        if group is not None:
            group.coming += size

    def deliver(self, turn: Turn, subscriber: int, message: Deliver | DeliverGap) -> None:
        group = self._groups.get(subscriber)
        if group is None:
            return
        group.coming -= message.size
        if group.session is None:
            return
        self._hand_out(turn, group, group.shared.offer(message))
        if group.shared.uneasy:
            self._uneasy[subscriber] = None
        if group.shared.rests(message.pubend):  # a gap, or all of it was done before
            self._hosting.ack(group.session, group.shared.token())

    def credit(self, turn: Turn, subscriber: int) -> None:
        """One of its consumers has room again."""
        group = self._groups[subscriber]
        self._hand_out(turn, group, group.shared.assign())

    def _hand_out(self, turn: Turn, group: _Group, assigned: Assigned) -> None:
        for assignment in assigned:
            connection, number = group.consumers[assignment.consumer]
            message: Deliver | DeliverGap
            if isinstance(assignment, AssignGap):
                message = DeliverGap(
                    subscribers=(), pubend=assignment.pubend, start=assignment.start, end=assignment.end
                )
                frame = empty_frame(
                    kind=Kind.DELIVERY,
                    pubend=assignment.pubend,
                    start=assignment.start,
                    end=assignment.end,
                    channel=number,
                    lost=True,
                )
            else:
                ticks = assignment.batch.headers["tick"]
                start, end = int(ticks[assignment.rows[0]]) - 1, int(ticks[assignment.rows[-1]])
                message = Deliver(
                    subscribers=(),
                    pubend=assignment.pubend,
                    start=start,
                    end=end,
                    batch=assignment.batch,
                    rows=assignment.rows,
                )
                frame = assignment.batch.select(
                    assignment.rows,
                    kind=Kind.DELIVERY,
                    pubend=assignment.pubend,
                    start=start,
                    end=end,
                    channel=number,
                )
                attempts = group.shared.attempts(assignment.pubend, ticks[assignment.rows])
                if attempts:
                    tried = Attempts(number=number, pubend=assignment.pubend, attempts=attempts)
                    turn.send(connection, encode(tried))
            self._record([(group.name, assignment.consumer)], message, turn.now_us)
            self._links.spend(connection, len(frame))
            turn.send(connection, frame)

    # ---- acknowledgements

    def ack(
        self,
        turn: Turn,
        subscriber: int,
        consumer: int,
        message: Ack,
        ticket: int | None,
    ) -> None:
        """With a ticket: `acked` names it once this is on disk."""
        group = self._groups[subscriber]
        for pubend, ticks in message.events.items():
            group.shared.ack(consumer, pubend, ticks)
        until_us = turn.now_us + min(max(0, message.delay_us), MAX_DELAY_US)
        for pubend, ticks in message.rejected.items():
            group.shared.reject(consumer, pubend, ticks, until_us=until_us, now_us=turn.now_us)
            self._uneasy[subscriber] = None
        if group.held_up is not None and group.held_up.consumer == consumer:
            group.held_up = None
        if group.session is not None:
            self._hosting.ack(group.session, group.shared.token())
        if ticket is not None:
            group.tickets.append(ticket)
        self._active[subscriber] = None
        self._hand_out(turn, group, group.shared.assign())

    def _save_dead(self, subscriber: int, then: Callable[[Turn, bool], None]) -> None:
        """`then` hears whether what the group says of its dead letters is on disk."""
        self._last_burying -= 1
        self._burying[self._last_burying] = then
        self._groups[subscriber].tickets.append(self._last_burying)
        self._active[subscriber] = None

    def _buried(self, turn: Turn, subscriber: int) -> None:
        """Dead letters are on disk: their events are done."""
        group = self._groups.get(subscriber)
        if group is None:
            return
        if group.session is not None:
            self._hosting.ack(group.session, group.shared.token())
        self._active[subscriber] = None
        self._hand_out(turn, group, group.shared.assign())

    def _confirm(self, turn: Turn, ticket: int, error: PostroadError | None) -> None:
        then = self._burying.pop(ticket, None)
        if then is None:
            self._acked(turn, ticket, error)
        else:
            then(turn, error is None)

    def tick(self, turn: Turn) -> None:
        """Give out what has rested, bury what was tried too often, save what changed."""
        if self._uneasy:
            for subscriber in list(self._uneasy):
                group = self._groups.get(subscriber)
                if group is not None:
                    self._hand_out(turn, group, group.shared.wake(turn.now_us))
                if group is None or not group.shared.uneasy:
                    del self._uneasy[subscriber]
            self._dead_letters.tick(turn, list(self._uneasy))
        self.flush(turn)

    def flush(self, turn: Turn) -> None:
        """Save what was acknowledged; tickets for which nothing has to be saved are confirmed."""
        if self._failed:
            self._failed, self._flush_at = False, turn.now_us + SAVE_US
        if turn.now_us < self._flush_at:
            return
        self._flush_at = 0
        confirmed: list[int] = []
        for subscriber in list(self._active):
            group = self._groups[subscriber]
            if group.shared.flush(turn, partial(self._saved, subscriber, group)):
                group.confirming, group.tickets = group.tickets, []
            elif not group.shared.dirty:
                del self._active[subscriber]
                confirmed += group.tickets
                group.tickets.clear()
        for ticket in confirmed:
            self._confirm(turn, ticket, None)

    def close(self, turn: Turn) -> None:
        """The process ends: save what no save on its way has."""
        for subscriber in self._active:
            group = self._groups[subscriber]
            group.shared.close(turn, partial(self._saved, subscriber, group))

    def _saved(self, subscriber: int, group: _Group, turn: Turn, error: PostroadError | None) -> None:
        """The disk decides the tickets that wait for it."""
        if self._groups.get(subscriber) is not group:
            return  # deleted meanwhile
        self._failed = error is not None
        confirming, group.confirming = group.confirming, []
        for ticket in confirming:
            self._confirm(turn, ticket, error)

    def next_deadline(self) -> int | None:
        """When to try again what could not be saved, or has rested."""
        uneasy = [self._groups[number].shared for number in self._uneasy if number in self._groups]
        due = [shared.next_wake() for shared in uneasy]
        if self._flush_at and self._active:
            due.append(self._flush_at)
        if not self._dead_letters.busy and any(shared.aside for shared in uneasy):
            due.append(self._dead_letters.retry_at)
        return min((at for at in due if at is not None), default=None)

    # ---- inspection

    def complain(self, turn: Turn) -> None:
        """Of who holds up the others of its group, at growing intervals; to be called every second."""
        now_us = turn.now_us
        for group in self._by_session.values():
            consumer, held_up = group.shared.held_up_by(), group.held_up
            if consumer is None:
                group.held_up = None
            elif held_up is None or held_up.consumer != consumer:
                group.held_up = _HeldUp(consumer, now_us, now_us + PATIENCE_US)
            elif now_us >= held_up.name_at:
                waited_us = now_us - held_up.since_us
                group.held_up = held_up._replace(name_at=now_us + waited_us)
                turn.note("warning", self._complaint(group, consumer, waited_us))

    def _complaint(self, group: _Group, consumer: int, waited_us: int) -> str:
        connection, _ = group.consumers[consumer]
        peer = self._links.peer(connection)
        client = "a client" if peer is None else f"client {peer.name!r}"
        return (
            f"the shared subscription {group.name!r} waits: {group.shared.open_count} events are not "
            f"acknowledged, the oldest of them with {client} (connection {connection}), "
            f"which has acknowledged nothing for {waited_us // SECOND_US} s"
        )

    def status(self, subscriber: int) -> dict[str, object] | None:
        """Of a group that is, or was, in use."""
        group = self._groups.get(subscriber)
        return None if group is None else {"name": group.name, **group.shared.status()}

    def metrics(self) -> dict[str, int]:
        """Of all groups since the start."""
        counts = [(group.shared.rejected, group.shared.buried) for group in self._groups.values()]
        return {
            "durable_rejected_total": self._gone_rejected + sum(rejected for rejected, _ in counts),
            "durable_dead_letters_total": self._gone_buried + sum(buried for _, buried in counts),
        }

    def check(self) -> None:
        for group in self._groups.values():
            group.shared.check()
            if group.coming:
                raise BugError("groups: something that was sent was never offered")
            if sorted(group.consumers) != sorted(group.shared.consumers):
                raise BugError("groups: the consumers are not those of the core")
            if bool(group.consumers) != (group.session is not None):
                raise BugError("groups: a group without a consumer is connected, or the other way round")


def _matched(cursor: Cursor | None) -> int | None:
    """Events that the PFS counted up to the token; None while some before that were not matched here."""
    return None if cursor is None or cursor.released < cursor.since else cursor.consumed
