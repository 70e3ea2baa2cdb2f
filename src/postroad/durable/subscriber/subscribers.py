"""Durable subscribers in a broker: `hosting` joined to routing, interest and client connections.

A durable subscription is part of the broker's interest as long as it exists, connected or not. A new one
begins on each pubend where routing finds it in force (`durable_following`); one that comes with a token
begins at once, and what routing takes from then on must be filtered with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from postroad.durable.publisher.release import Report
from postroad.durable.subscriber.claims import MAX_CLAIMS
from postroad.durable.subscriber.consumers import DurableGroups
from postroad.durable.subscriber.desk import DurableDesk
from postroad.durable.subscriber.following import Following
from postroad.durable.subscriber.groups import TABLE as GROUPS
from postroad.durable.subscriber.hosting import MAX_UNFOLLOWED, Hosting
from postroad.durable.subscriber.moving import Moving
from postroad.durable.subscriber.outputs import (
    Confirmed,
    Deliver,
    DeliverGap,
    Output,
    Reported,
    Wants,
    delivery_frame,
)
from postroad.durable.subscriber.reading import Readers
from postroad.durable.subscriber.sessions import Session, Sessions
from postroad.durable.subscriber.subscriptions import Subscription, check_name
from postroad.errors import PeerError, PostroadError, UnavailableError, UsageError
from postroad.events.token import CheckpointToken
from postroad.history.bulletins import Receivers
from postroad.ids import is_history, is_volatile, pubend_text
from postroad.links.links import Links
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.interest import Interest
from postroad.overlay.topology import Topology
from postroad.seam.effects import Effect, Note, Send
from postroad.seam.storage import Saved, SaveFailed, StorageEffect, StorageInput, Stored
from postroad.selectors import Selector
from postroad.streams.knowledge import Segment
from postroad.streams.streams import DURABLE_KEY, Stream
from postroad.tracking.strategies import Tracking
from postroad.units import SECOND_US
from postroad.wire.frames import (
    Ack,
    Acked,
    Ended,
    InterestUpdate,
    Subscribe,
    Subscribed,
    encode,
)

if TYPE_CHECKING:
    from postroad.streams.routing import Routing

EXPIRE_US: Final = SECOND_US  # what moved away, and who holds up others, is looked at this often
MAX_ACKING: Final = 100_000  # acknowledgements that wait for the disk
AHEAD_US: Final = 60 * SECOND_US  # clocks differ, but not by more
Sent = Callable[[Receivers, Deliver | DeliverGap], None]


class DurableHosting:
    """The durable subscribers of one broker."""

    def __init__(
        self,
        *,
        me: int,
        boot: int,
        stored: Stored,
        links: Links,
        interest: Interest,
        routing: Routing,
        flood: Callable[[list[InterestUpdate]], None],
        inquiries: Inquiries,
        topology: Topology,
        retired: Callable[[int], bool],
        tracking: Tracking | None,
        report: Callable[[int, Report], None],
        sent: Sent,
        new_tag: Callable[[], int],
        now_us: int,
    ) -> None:
        self._me = me
        self._topology = topology
        self._tracking = tracking
        self._links = links
        self._interest = interest
        self._routing = routing
        self._flood = flood
        self._report = report
        self._sent = sent
        self._sessions = Sessions()
        # New subscriptions of which nobody was told yet: who is missing; None while routing asks them.
        self._untold: dict[int, tuple[str, ...] | None] = {}
        self._acking: dict[int, tuple[int, int]] = {}  # own ticket -> (session, its ticket)
        self._version = 0  # of the own interest, that all durable subscriptions rely on
        self.now_us = now_us  # of the turn under way
        self._expire_at = now_us + EXPIRE_US
        self._out: list[Effect] = []
        self.readers = Readers(me=me, links=links, interest=interest, routing=routing, flood=flood)
        self.hosting = Hosting(
            broker=me,
            boot=boot,
            new_tag=new_tag,
            room=self._room,
            spend=self._spend,
            need=self._need,
            now_us=now_us,
        )
        self.hosting.recover(stored.tables)
        self._groups = DurableGroups(
            hosting=self.hosting,
            links=links,
            rows=stored.tables.get(GROUPS, {}),
            new_tag=new_tag,
            send=lambda connection, frame: self._out.append(Send(connection, frame)),
            record=self._record,
        )
        self.moving = Moving(
            me=me,
            subscriptions=self.hosting.subscriptions,
            interest=interest,
            inquiries=inquiries,
            topology=topology,
            retired=retired,
            flood=flood,
            host=self,
        )
        self.desk = DurableDesk(
            hosting=self.hosting,
            groups=self._groups,
            name_of=topology.name,
            host=self,
            send=lambda connection, frame: self._out.append(Send(connection, frame)),
        )
        for one in self.hosting.subscriptions:
            self._interest.subscribe(DURABLE_KEY + one.id, one.selector)
        self._following = Following(
            hosting=self.hosting,
            routing=routing,
            streams=stored.streams,
            need=self._need,
            perform=lambda outputs: self._perform(outputs, self.now_us),
            answered=self._answered,
            take=self.take,
            tell=lambda text: self._out.append(Note("error", text)),
            now=lambda: self.now_us,
        )
        self._following.active = bool(len(self.hosting.subscriptions))
        if not self._following.active:
            self._perform(self.hosting.leave(), now_us)
        self._version = self._interest.own_version if self._following.active else 0
        routing.host = self._following
        for one in self.hosting.subscriptions:
            routing.host_subscription(DURABLE_KEY + one.id, self._version)
        for pubend, tick in sorted(self.hosting.followed_before().items()):
            if pubend >> 32 != me and self._following.active:  # own ones are met when they open
                routing.follow_from(pubend, tick)

    # ---- what Hosting asks

    def _room(self, subscriber: int) -> bool:
        session = self._sessions.of(subscriber)
        if session is None:
            return self._groups.room(subscriber)
        return self._links.available(session.connection) > 0

    def _spend(self, subscriber: int, size: int) -> None:
        session = self._sessions.of(subscriber)
        if session is not None:
            self._links.spend(session.connection, size)
        else:
            self._groups.spend(subscriber, size)

    def _need(self) -> Mapping[int, int]:
        return {self._me: self._version}

    def _perform(self, outputs: list[Output], now_us: int) -> None:
        """In order; curiosity last, since its answers make outputs that come after these."""
        wants: deque[Wants] = deque()
        while True:
            for output in outputs:
                if isinstance(output, Wants):
                    wants.append(output)
                else:
                    self._carry_out(output)
            if not wants:
                return
            one = wants.popleft()
            found = self._routing.find_for_host(one.pubend, one.spans, one.need, now_us)
            outputs = self.hosting.answer(one.pubend, found, now_us, one.subscriber) if found else []

    def _carry_out(self, output: Deliver | DeliverGap | Confirmed | Reported | StorageEffect) -> None:
        match output:
            case Deliver() | DeliverGap():
                self._deliver(output)
            case Confirmed():
                self._confirmed(output)
            case Reported():
                self._report(output.pubend, output.report)
            case _:
                self._out.append(output)

    def _deliver(self, message: Deliver | DeliverGap) -> None:
        frames: dict[int, bytes] = {}
        receivers: list[tuple[str, int]] = []
        for subscriber in message.subscribers:
            session = self._sessions.of(subscriber)
            if session is None:
                self._groups.deliver(subscriber, message)
                continue
            number = session.number
            if number not in frames:
                frames[number] = delivery_frame(message, number)
            self._out.append(Send(session.connection, frames[number]))
            receivers.append((session.name, session.id))
        if receivers:
            self._record(receivers, message)

    def _record(self, receivers: Receivers, message: Deliver | DeliverGap) -> None:
        """These were handed this."""
        if is_history(message.pubend):
            return
        if isinstance(message, Deliver) and message.batch is not None and self._tracking is not None:
            names = [name for name, _ in receivers]
            ids = message.batch.ids(message.rows)
            self._tracking.delivered(message.pubend >> 32, names, ids, self.now_us)
        self._sent(receivers, message)

    def _confirmed(self, output: Confirmed) -> None:
        """What was said of a subscription is on disk: its subscriber may be told so."""
        if output.ticket in self._acking:
            self._acked(output.ticket, output.error)
            return
        if self.desk.confirmed(output.ticket, output.error):
            return
        session = self._sessions.get(output.ticket)
        if session is None or session.began:
            return
        if output.error is not None:
            one = self.hosting.subscriptions.by_id(session.subscriber)
            everybody = one.session if session.created else None  # of a shared one
            self._end(output.ticket if everybody is None else everybody, output.error)
            if session.created:  # who was told that it could not be should not find it there
                deleted = self.delete(session.name, self.now_us)
                self._out += deleted
            return
        self._subscribed(session)

    def _resume(self, session: Session) -> None:
        """Of a subscription that is there already, or about to be."""
        if session.subscriber not in self._untold:
            self._subscribed(session)
            return
        missing = self._untold[session.subscriber]
        if missing is not None:
            session.missing = missing
            self.hosting.confirm(session.subscriber, session.id)

    def _subscribed(self, session: Session) -> None:
        """It goes on after the token it came with, though it may have acknowledged more."""
        session.began = True
        self._untold.pop(session.subscriber, None)
        one = self.hosting.subscriptions.by_id(session.subscriber)
        token = one.token()
        if session.token is not None:
            token = CheckpointToken({**token, **session.token})
        message = Subscribed(
            number=session.number,
            missing=session.missing,
            token=token.to_json(),
            created=session.created and session.token is None,
            born=one.born if one.kept_here else 0,
        )
        self._out.append(Send(session.connection, encode(message)))
        self.moving.claim(one)

    # ---- what clients ask

    def subscribe(self, connection: int, message: Subscribe, selector: Selector, now_us: int) -> list[Effect]:
        """UsageError if it cannot be."""
        check_name(message.durable, message.ack)
        subscriptions = self.hosting.subscriptions
        heard = message.durable in subscriptions or subscriptions.owner(message.durable) is not None
        if heard or message.token or not self.moving.look(connection, message, selector, now_us):
            return self.begin(connection, message, selector, now_us)
        return []

    def begin(self, connection: int, message: Subscribe, selector: Selector, now_us: int) -> list[Effect]:
        """All that others know of the name is known here."""
        subscriptions = self.hosting.subscriptions
        known = subscriptions.get(message.durable)
        if message.shared and known is not None and known.session is not None:
            known.check_same(selector, message.shared, message.key)
            self._groups.admit(known)
            session = self._sessions.open(connection, message.number, known)
            self._groups.join(known.id, session.id, connection, message.number)
            self._resume(session)
            return self.take()
        elsewhere = subscriptions.owner(message.durable)
        if message.shared and elsewhere is not None:
            raise UnavailableError(
                f"the shared subscription {message.durable!r} is at broker "
                f"{self._topology.name(elsewhere)!r}: its consumers connect there"
            )
        if known is None and elsewhere is None and not message.token and subscriptions.claims.lost:
            raise UnavailableError(
                f"{message.durable!r} is not created here: more than {MAX_CLAIMS} durable subscriptions are "
                "at other brokers, and it may be one of them"
            )
        token = self._start(message, selector, now_us)
        if elsewhere is not None and not message.token:
            return self.moving.wait(connection, message, selector, now_us)
        return self.attach(connection, message, selector, token, now_us)

    def attach(
        self,
        connection: int,
        message: Subscribe,
        selector: Selector,
        token: CheckpointToken | None,
        now_us: int,
        born: int = 0,
    ) -> list[Effect]:
        """Nobody else has it, or its token is known."""
        known = self.hosting.subscriptions.get(message.durable)
        named = {*(token or ()), *(() if known is None else known.cursors)}
        if len(named - self._following.pubends()) > MAX_UNFOLLOWED:
            raise UnavailableError(
                f"the token names more than {MAX_UNFOLLOWED} streams that are not followed here, or not yet"
            )
        if known is not None and known.session is not None:
            # Before anything is sent to the newer one, which would be taken off the older one's credit.
            known.check_same(selector, message.shared, message.key)
            self._end(known.session, UsageError(f"{message.durable!r} was taken by another connection"))
        attached, outputs = self.hosting.attach(
            name=message.durable,
            selector=selector,
            ack=message.ack,
            session=self.new_number(),
            token=token,
            now_us=now_us,
            shared=message.shared,
            key=message.key,
            late=0 if message.token else min(message.since_us, now_us),
            born=born,
        )
        one = attached.subscription
        session = self._sessions.open(connection, message.number, one)
        session.token, session.created = token, attached.created or one.id in self._untold
        if one.shared and one.session is not None:
            self._groups.begin(one, one.session)
            self._groups.join(one.id, session.id, connection, message.number)
        if self._tracking is not None:
            self._tracking.attached(one.name, now_us)
        if attached.created:
            outputs += self._created(one, session, token, now_us)
        elif token is not None and one.kept_here:
            self.hosting.acknowledged(one, token)  # handed over by another broker
            self.hosting.confirm(one.id, session.id)
        else:
            self._resume(session)
        self._perform(outputs, now_us)
        # Whoever is behind has room only now that its connection is known.
        self._perform(self.hosting.credit(one.id, now_us), now_us)
        return self.take()

    def _created(
        self, one: Subscription, session: Session, token: CheckpointToken | None, now_us: int
    ) -> list[Output]:
        """Others are to know of a new subscription, and it begins."""
        try:
            updates = self._interest.subscribe(DURABLE_KEY + one.id, one.selector)
        except UsageError:
            self._forget(session)
            self._groups.delete(one.id)
            self.hosting.delete(one.name)
            raise
        self._version = self._interest.own_version
        self._flood(updates)
        self._following.active = True
        self._untold[one.id] = None if token is None else ()
        if token is None:
            self._out += self._routing.subscribe(DURABLE_KEY + one.id, self._version, now_us)
            self._routing.follow_all()
            return []
        self._routing.follow_all()
        self._routing.host_subscription(DURABLE_KEY + one.id, self._version)
        outputs: list[Output] = []
        for pubend in self._routing.durable_streams():
            if self.hosting.position(pubend) is not None:
                outputs += self.hosting.begin(one.id, pubend, 0, now_us)
        self.hosting.confirm(one.id, session.id)
        return outputs

    def _start(self, message: Subscribe, selector: Selector, now_us: int) -> CheckpointToken | None:
        """The token that a subscription begins after, if it says so."""
        if message.shared and (message.token or not message.ack):
            raise UsageError("the token of a shared subscription is kept by the broker: choose an `ack`")
        if message.key and not message.shared:
            raise UsageError("only a shared subscription is ordered by a key")
        if message.since_us < 0:
            raise UsageError(f"a subscription cannot begin before 1970: `since_us` is {message.since_us}")
        if message.since_us > now_us + AHEAD_US:
            raise UsageError(
                "a subscription cannot begin in the future: `since` is "
                f"{(message.since_us - now_us) // SECOND_US} s ahead of this broker's clock"
            )
        one = self.hosting.subscriptions.get(message.durable)
        if not message.token:
            if one is not None or not message.since_us:
                return None
            since_us = min(message.since_us, now_us)
            known = self._following.pubends().intersection(self._routing.durable_streams())
            return CheckpointToken(dict.fromkeys(filter(selector.concerns, known), since_us))
        token = self._token(message.token, now_us)
        for pubend, tick in token.items():
            if tick > now_us + AHEAD_US and self._routing.heard(pubend) is None:
                raise UnavailableError(
                    f"the token names a tick of {pubend_text(pubend)} ahead of this broker's clock, and how "
                    "far that stream is has not been heard here yet"
                )
        # To begin with the first tick of everything would be to repeat everything.
        known_here = {
            *self._routing.durable_streams(),
            *self.hosting.followed_before(),
            *(() if one is None else one.cursors),
        }
        if token and not token.keys() & known_here:
            raise UnavailableError("the token names only streams that are not known here, or not yet")
        return token

    def _token(self, text: str, now_us: int) -> CheckpointToken:
        """A tick may be ahead of what is known here, and of this clock where the pubend's may be."""
        token = CheckpointToken.from_json(text)
        for pubend, tick in token.items():
            if is_volatile(pubend):
                raise UsageError(f"the token names {pubend_text(pubend)}, which keeps nothing on disk")
            heard = self._routing.heard(pubend)
            if heard is not None and tick > max(now_us, heard) + AHEAD_US:
                raise UsageError(
                    f"the token names a tick of {pubend_text(pubend)} in the future, "
                    f"{(tick - now_us) // SECOND_US} s ahead of this broker's clock: {tick}"
                )
        return token

    def new_number(self) -> int:
        """Names a session, or something else that is confirmed."""
        return self._sessions.new_number()

    def confirmed(self, key: int, missing: tuple[str, ...]) -> list[Effect]:
        """Routing has begun a new subscription everywhere it could."""
        subscriber = key - DURABLE_KEY
        if subscriber in self._untold:
            self._untold[subscriber] = missing
        one = self.hosting.subscriptions.find(subscriber)
        if one is not None:
            self._begin_unreached(one)
        if one is not None and one.session is not None:
            for number in self._groups.consumers(one.session) if one.shared else [one.session]:
                session = self._sessions.get(number)
                if session is not None:
                    session.missing = missing
                    self.hosting.confirm(subscriber, number)
        return []

    def _begin_unreached(self, one: Subscription) -> None:
        """Pubends that are known here and cannot be reached: it begins after what hosting has of them.

        Not noted down, it would begin at their first tick should this broker restart before they are back.
        """
        self._routing.host_subscription(DURABLE_KEY + one.id, self._version)
        for pubend in self._routing.durable_streams():
            position = self.hosting.position(pubend)
            if position is not None and pubend not in one.cursors:
                self._perform(self.hosting.begin(one.id, pubend, position, self.now_us), self.now_us)

    def ack(self, connection: int, message: Ack, now_us: int) -> list[Effect]:
        session = self._sessions.find(connection, message.number)
        if session is None:
            return []  # it ended meanwhile
        if session.shared:
            ticket = self._ticket(session, message) if message.ticket else None
            self._groups.ack(session.subscriber, session.id, message.events, ticket)
            self._perform(self.hosting.credit(session.subscriber, now_us), now_us)
            return self.take()
        try:
            token = self._token(message.token, now_us)
        except UsageError as error:
            if not message.ticket:
                raise PeerError(f"an acknowledgement that cannot be taken: {error}") from None
            self._acked(self._ticket(session, message), error)
            return self.take()
        self.hosting.ack(session.id, token, self._ticket(session, message) if message.ticket else None)
        return []

    def _ticket(self, session: Session, message: Ack) -> int:
        """What names the acknowledgement until it is on disk, where its sender wants to know."""
        if len(self._acking) >= MAX_ACKING:
            raise PeerError(f"more than {MAX_ACKING} acknowledgements wait for the disk")
        ticket = self.new_number()
        self._acking[ticket] = (session.id, message.ticket)
        return ticket

    def _acked(self, ticket: int, error: PostroadError | None) -> None:
        session, its_ticket = self._acking.pop(ticket)
        held = self._sessions.get(session)
        if held is not None:
            code, reason = ("", "") if error is None else (error.code, str(error))
            acked = Acked(number=held.number, ticket=its_ticket, code=code, reason=reason)
            self._out.append(Send(held.connection, encode(acked)))

    def count(self, connection: int) -> int:
        """Durable subscriptions and readers of a connection."""
        held = self._sessions.count(connection) + self.moving.count(connection)
        return held + self.readers.count(connection)

    def has(self, connection: int, number: int) -> bool:
        found = self._sessions.find(connection, number) is not None or self.moving.has(connection, number)
        return found or self.readers.has(connection, number)

    def unsubscribe(self, connection: int, number: int) -> bool:
        """The subscriber goes, its subscription stays."""
        found = self._sessions.find(connection, number)
        if found is not None:
            self._forget(found)
        waited = self.moving.forget(connection, number)
        return found is not None or waited or self.readers.end(connection, number)

    def closed(self, connection: int) -> None:
        self.desk.closed(connection)
        self.readers.closed(connection)
        self.moving.closed(connection)
        for session in self._sessions.on(connection):
            self._forget(session)

    def _forget(self, session: Session) -> None:
        self._sessions.close(session)
        gone: int | None = session.id
        if session.shared:
            gone = self._groups.leave(session.subscriber, session.id)
        if gone is not None:
            self.hosting.detach(gone)
            if self._tracking is not None:
                self._tracking.detached(session.name, self.now_us)

    def _end(self, number: int, error: Exception) -> None:
        for consumer in self._groups.consumers(number):
            self._end(consumer, error)
        session = self._sessions.get(number)
        if session is None:
            return
        code = getattr(error, "code", "bug")
        ended = Ended(number=session.number, code=code, reason=str(error))
        self._out.append(Send(session.connection, encode(ended)))
        self._forget(session)

    def end(self, one: Subscription, error: PostroadError) -> list[Effect]:
        """Its subscriber, if there is one, is told that it has it no more; the subscription stays."""
        if one.session is not None:
            self._end(one.session, error)
        return self.take()

    def delete(self, name: str, now_us: int) -> list[Effect]:
        """For good: its subscriber is told, nothing is kept."""
        one = self.hosting.subscriptions.get(name)
        if one is not None and one.session is not None:
            self._end(one.session, UsageError(f"the durable subscription {name!r} was deleted"))
        number, outputs = self.hosting.delete(name)
        self.moving.unclaim(name)
        self._untold.pop(number, None)
        saves, tickets = self._groups.delete(number)
        self._out += saves
        for ticket in tickets:
            self._acking.pop(ticket, None)
        self._routing.unsubscribe(DURABLE_KEY + number)
        self._flood(self._interest.unsubscribe(DURABLE_KEY + number))
        self._perform(outputs, now_us)
        return self.take()

    def credit(self, connection: int, now_us: int) -> list[Effect]:
        self._out += self.readers.credit(connection, now_us)
        for session in self._sessions.on(connection):
            if session.shared:
                self._groups.credit(session.subscriber)
            self._perform(self.hosting.credit(session.subscriber, now_us), now_us)
        return self.take()

    # ---- storage and time

    def _answered(self, stream: Stream, segments: list[Segment]) -> None:
        self._out += self.readers.answer(stream, segments, self.now_us)

    def stored(self, item: StorageInput, now_us: int) -> list[Effect]:
        self._perform(self.hosting.stored(item, now_us), now_us)
        if isinstance(item, Saved | SaveFailed):
            for ticket, error in self._groups.stored(item):
                self._acked(ticket, error)
        return self.take()

    def tick(self, now_us: int) -> list[Effect]:
        self._following.pull()
        if self._following.active:
            self._perform(self.hosting.tick(now_us), now_us)
            saves, confirmed = self._groups.flush(now_us)
            self._out += saves
            for ticket in confirmed:
                self._acked(ticket, None)
        else:
            self._out += self.hosting.subscriptions.flush(now_us)
        if now_us >= self._expire_at:
            self._expire_at = now_us + EXPIRE_US
            self._out += self._groups.complaints(now_us)
            for name in self.hosting.subscriptions.expired(now_us, self.moving.reachable):
                deleted = self.delete(name, now_us)  # which takes what `_out` holds
                self._out += deleted
            self._out += self.moving.tell_deleted()
        return self.take() + self.moving.tick(now_us) + self.readers.tick(now_us)

    def close(self, now_us: int) -> list[Effect]:
        """The process ends: what waits for its time to be saved is saved now."""
        self.hosting.close()
        return self.tick(now_us) + list(self._groups.close())

    def next_deadline(self) -> int | None:
        hosting = self.hosting if self._following.active else self.hosting.subscriptions
        due = [room.next_deadline() for room in (hosting, self._groups, self.readers, self.moving)]
        return min((one for one in due if one is not None), default=None)

    def take(self) -> list[Effect]:
        out, self._out = self._out, []
        return out

    # ---- inspection

    def acknowledged(self) -> list[tuple[str, dict[int, int]]]:
        """What each subscription has acknowledged, by pubend."""
        return [
            (one.name, {pubend: cursor.released for pubend, cursor in one.cursors.items()})
            for one in self.hosting.subscriptions
        ]

    def check(self) -> None:
        self.hosting.check()
        self._groups.check()
        self.readers.check()
        self._sessions.check()
