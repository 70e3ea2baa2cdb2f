"""Durable subscribers in a broker: `hosting` joined to routing, interest and client connections.

A durable subscription is part of the broker's interest as long as it exists, connected or not. A new one
begins on each pubend where routing finds it in force (`following`); one that comes with a token begins at
once, and what routing takes from then on must be filtered with it.

Readers of the past, subscriptions that move between brokers, and the desk where clients ask about them are
parts of this room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from postroad.clients.quotas import Quotas
from postroad.durable.publisher.release import Report
from postroad.durable.subscriber.claims import MAX_CLAIMS, Row
from postroad.durable.subscriber.consumers import DurableGroups
from postroad.durable.subscriber.dead_letters import Publishing
from postroad.durable.subscriber.desk import DurableDesk
from postroad.durable.subscriber.following import Following
from postroad.durable.subscriber.groups import TABLE as GROUPS
from postroad.durable.subscriber.hosting import MAX_UNFOLLOWED, TABLES, Hosting
from postroad.durable.subscriber.moving import Moving, not_its_own
from postroad.durable.subscriber.outputs import (
    Confirmed,
    Deliver,
    DeliverGap,
    Output,
    Receivers,
    Reported,
    Wants,
    delivery_frame,
)
from postroad.durable.subscriber.reading import Readers
from postroad.durable.subscriber.sessions import Session, Sessions
from postroad.durable.subscriber.subscriptions import (
    LATE_US,
    Attachment,
    Subscription,
    check_key,
    check_name,
    durable_key,
)
from postroad.errors import (
    BugError,
    DeletedError,
    DeniedError,
    PeerError,
    PostroadError,
    UnavailableError,
    UsageError,
    shorten,
)
from postroad.events.token import CheckpointToken
from postroad.events.topics import check_topic, pattern_matches
from postroad.ids import SubscriptionKey, SubscriptionKind, is_history, is_volatile, pubend_text
from postroad.links.access import ANONYMOUS
from postroad.links.links import Links
from postroad.overlay.inquiries import Inquiries
from postroad.overlay.interest import Interest
from postroad.overlay.topology import Topology
from postroad.seam.peers import Peer
from postroad.seam.storage import LogStream, StreamEnd
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.selectors import Selector
from postroad.streams.routing import Routing
from postroad.tracking.strategies import Tracking
from postroad.units import SECOND_US
from postroad.wire.frames import (
    Ack,
    Acked,
    Ended,
    InterestUpdate,
    Limits,
    Subscribe,
    Subscribed,
    encode,
)

EXPIRE_US: Final = SECOND_US  # what moved away, and who holds up others, is looked at this often
MAX_ATTEMPTS: Final = 1_000_000  # that a subscription may allow
MAX_ACKING: Final = 100_000  # acknowledgements that wait for the disk
AHEAD_US: Final = 60 * SECOND_US  # clocks differ, but not by more
Sent = Callable[[Receivers, Deliver | DeliverGap, int], None]


class DurableSubscribers:
    """The durable subscribers of one broker.

    `streams`: what a start found of the log. `flood`: the own interest changed. `retired`: an administrator
    says that this broker never comes back. `report` goes up the tree of a pubend. `sent`: these were handed
    this, at this time.
    """

    def __init__(
        self,
        board: Switchboard,
        *,
        me: int,
        boot: int,
        streams: Mapping[LogStream, StreamEnd],
        links: Links,
        interest: Interest,
        routing: Routing,
        flood: Callable[[Turn, Sequence[InterestUpdate]], None],
        inquiries: Inquiries,
        topology: Topology,
        retired: Callable[[int], bool],
        tracking: Tracking | None,
        quotas: Quotas,
        limits: Limits,
        publishing: Publishing,
        report: Callable[[int, Report], None],
        sent: Sent,
        now_us: int,
    ) -> None:
        self._me, self._topology, self._tracking = me, topology, tracking
        self._links, self._interest, self._routing = links, interest, routing
        self._flood, self._report, self._sent = flood, report, sent
        self._quotas, self._limits = quotas, limits
        self._give_back: dict[int, Callable[[], None]] = {}  # by subscription: its part of a quota
        self._sessions = Sessions()
        # New subscriptions that were confirmed to nobody yet: who is missing; None while routing asks them.
        self._unconfirmed: dict[int, tuple[str, ...] | None] = {}
        self._acking: dict[int, tuple[int, int]] = {}  # own ticket -> (session, its ticket)
        self._version = 0  # of the own interest, that all durable subscriptions rely on
        self._expire_at = now_us + EXPIRE_US
        self._outputs: deque[Output] = deque()  # of hosting, not carried out yet
        self._wants: deque[Wants] = deque()  # curiosity among those, which comes last
        self._performing = False  # somebody is carrying them out
        self.readers = Readers(
            me=me, links=links, interest=interest, routing=routing, flood=flood, quotas=quotas
        )
        self.hosting = Hosting(
            broker=me,
            boot=boot,
            perform=self._perform,
            room=self._room,
            spend=self._spend,
            need=self._need,
            now_us=now_us,
        )
        tables = {name: board.table(name, reader) for name, reader in TABLES.items()}
        self.hosting.recover(tables)
        self._groups = self._make_groups(tables[GROUPS], publishing)
        self.moving = Moving(
            board,
            me=me,
            subscriptions=self.hosting.subscriptions,
            interest=interest,
            inquiries=inquiries,
            topology=topology,
            retired=retired,
            flood=flood,
            host=self,
        )
        self._desk = DurableDesk(
            board, hosting=self.hosting, groups=self._groups, links=links, name_of=topology.name, host=self
        )
        need, answered = self._need, self.readers.answer
        self._following = Following(
            hosting=self.hosting, routing=routing, streams=streams, need=need, answered=answered
        )
        self._join(board)

    def _make_groups(self, rows: Mapping[bytes, bytes], publishing: Publishing) -> DurableGroups:
        return DurableGroups(
            hosting=self.hosting,
            links=self._links,
            rows=rows,
            me=self._me,
            limits=self._limits,
            publishing=publishing,
            record=self._record,
            acked=self._acked,
        )

    def _join(self, board: Switchboard) -> None:
        """Others hear of this room; what was here before a restart has begun wherever it begins."""
        self._delivered = 0  # events, once for each that was handed one
        board.from_client(Ack, self._ack)
        board.peers("client", down=self._closed)
        board.start(self._start)
        board.metrics(self.hosting.metrics)
        board.metrics(self._groups.metrics)
        board.metrics(lambda: {"durable_deliveries_total": self._delivered})
        for subscription in self.hosting.subscriptions:
            self._interest.subscribe(durable_key(subscription.id), subscription.selector)
            self._give_back[subscription.id] = self._quotas.restore(
                subscription.principal or ANONYMOUS, SubscriptionKind.DURABLE, subscription.selector
            )
        self._following.active = bool(len(self.hosting.subscriptions))
        self._version = self._interest.own_version if self._following.active else 0
        self._routing.add_host(self._following)
        for subscription in self.hosting.subscriptions:
            self._routing.host_subscription(durable_key(subscription.id), self._version)

    def _start(self, turn: Turn) -> None:
        if not self._following.active:
            self.hosting.leave(turn)
            return
        for pubend, tick in sorted(self.hosting.followed_before().items()):
            if pubend >> 32 != self._me:  # own ones are met when they open
                self._routing.follow_from(turn, pubend, tick)

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

    def _perform(self, turn: Turn, outputs: list[Output]) -> None:
        """In order; curiosity last, since its answers make outputs that come after these. Whoever calls this
        while outputs are carried out has its own carried out behind them."""
        self._outputs.extend(outputs)
        if self._performing:
            return
        self._performing = True
        try:
            while self._outputs or self._wants:
                if self._outputs:
                    self._carry_out(turn, self._outputs.popleft())
                else:
                    self._satisfy(turn, self._wants.popleft())
        finally:
            self._performing = False

    def _carry_out(self, turn: Turn, output: Output) -> None:
        match output:
            case Deliver() | DeliverGap():
                self._deliver(turn, output)
            case Confirmed():
                self._confirmed(turn, output)
            case Reported():
                self._report(output.pubend, output.report)
            case Wants():
                self._wants.append(output)

    def _satisfy(self, turn: Turn, wants: Wants) -> None:
        """What is found here is the answer; the rest is asked for, and comes to `answer` of `following`."""
        segments = self._routing.find_for_host(turn, wants.pubend, wants.spans, wants.need)
        if segments:
            self.hosting.answer(turn, wants.pubend, segments, wants.subscriber)

    def _deliver(self, turn: Turn, message: Deliver | DeliverGap) -> None:
        frames: dict[int, bytes] = {}
        receivers: list[tuple[str, int]] = []
        for subscriber in message.subscribers:
            session = self._sessions.of(subscriber)
            if session is None:
                self._groups.deliver(turn, subscriber, message)
                continue
            number = session.number
            if number not in frames:
                frames[number] = delivery_frame(message, number)
            turn.send(session.connection, frames[number])
            receivers.append((session.name, session.id))
        if receivers:
            self._record(receivers, message, turn.now_us)

    def _record(self, receivers: Receivers, message: Deliver | DeliverGap, now_us: int) -> None:
        """These were handed this."""
        if isinstance(message, Deliver) and message.batch is not None:
            rows = message.batch.count if message.rows is None else len(message.rows)
            self._delivered += rows * len(receivers)
        if is_history(message.pubend):
            return
        if isinstance(message, Deliver) and message.batch is not None and self._tracking is not None:
            names = [name for name, _ in receivers]
            ids = message.batch.ids(message.rows)
            self._tracking.delivered(message.pubend >> 32, names, ids, now_us)
        self._sent(receivers, message, now_us)

    def _confirmed(self, turn: Turn, output: Confirmed) -> None:
        """The disk has what a subscriber asked for, or refused it: answer the subscriber."""
        if output.ticket in self._acking:
            self._acked(turn, output.ticket, output.error)
            return
        if self._desk.confirmed(turn, output.ticket, output.error):
            return
        session = self._sessions.get(output.ticket)
        if session is None or session.began:
            return
        if output.error is not None:
            subscription = self.hosting.subscriptions.by_id(session.subscriber)
            everybody = subscription.session if session.created else None  # of a shared one
            self._end(turn, output.ticket if everybody is None else everybody, output.error)
            if session.created:  # the client gets an error: it must not find the subscription later
                self.delete(turn, session.name)
            return
        self._subscribed(turn, session)

    def _resume(self, turn: Turn, session: Session) -> None:
        """Of a subscription that is there already, or about to be."""
        if session.subscriber not in self._unconfirmed:
            self._subscribed(turn, session)
            return
        missing = self._unconfirmed[session.subscriber]
        if missing is not None:
            session.missing = missing
            self.hosting.confirm(session.subscriber, session.id)

    def _subscribed(self, turn: Turn, session: Session) -> None:
        """It goes on after the token it came with, though it may have acknowledged more."""
        session.began = True
        self._unconfirmed.pop(session.subscriber, None)
        subscription = self.hosting.subscriptions.by_id(session.subscriber)
        token = subscription.token()
        if session.token is not None:
            token = CheckpointToken({**token, **session.token})
        message = Subscribed(
            number=session.number,
            missing=session.missing,
            token=token.to_json(),
            created=session.created and session.token is None,
            born=subscription.born if subscription.kept_here else 0,
            epoch=subscription.epoch if subscription.kept_here and not subscription.shared else 0,
        )
        turn.send(session.connection, encode(message))
        self.moving.claim(subscription)

    # ---- what clients ask

    def subscribe(self, turn: Turn, connection: int, message: Subscribe, selector: Selector) -> None:
        """UsageError or UnavailableError if it cannot be."""
        check_name(message.durable, message.ack)
        check_key(message.key)
        self._check_policy(connection, message)
        if message.epoch and (message.shared or not (message.ack and message.token)):
            raise UsageError(
                f"a client remembers the token that its broker keeps, not that of a shared subscription:"
                f" epoch {message.epoch} with token {shorten(message.token, 40)!r} and ack {message.ack!r}"
            )
        subscriptions = self.hosting.subscriptions
        heard = message.durable in subscriptions or subscriptions.owner(message.durable) is not None
        if heard or not self.moving.look(connection, message, selector, turn.now_us):
            self.begin(turn, connection, message, selector)

    def _check_policy(self, connection: int, message: Subscribe) -> None:
        """UsageError unless dead letters can go where they are to."""
        if not message.dead_letters and not message.max_attempts:
            return
        if not message.shared or not message.dead_letters or not 1 <= message.max_attempts <= MAX_ATTEMPTS:
            raise UsageError(
                f"a shared subscription has dead letters: a topic, and after how many attempts, 1 to"
                f" {MAX_ATTEMPTS:,}; not {message.dead_letters!r} and {message.max_attempts}"
            )
        check_topic(message.dead_letters, self._limits)
        if pattern_matches(message.topic or "#", message.dead_letters):
            raise UsageError(
                f"dead letters on {message.dead_letters!r} would come to the subscription to"
                f" {message.topic!r} itself: choose a topic that it does not match"
            )
        if not self._links.may_publish(connection, message.dead_letters):
            raise DeniedError(f"an access rule forbids publishing to {message.dead_letters!r}")

    def _set_policy(self, subscription: Subscription, message: Subscribe) -> None:
        """Whoever says how often events are tried says it for all consumers."""
        if message.max_attempts:
            subscriptions = self.hosting.subscriptions
            subscriptions.set_policy(subscription, message.max_attempts, message.dead_letters)
            self._groups.set_policy(subscription)

    def begin(self, turn: Turn, connection: int, message: Subscribe, selector: Selector) -> None:
        """Subscribe, once this broker has heard all that others know of the name."""
        subscriptions = self.hosting.subscriptions
        asked, message = message, without_memory(message)
        self._check_title(turn, connection, message.durable)
        known = subscriptions.get(message.durable)
        if message.shared and known is not None and known.session is not None:
            known.check_same(selector, message.shared, message.key)
            self._groups.admit(known)
            self._set_policy(known, message)
            session = self._sessions.open(connection, message.number, known)
            self._groups.join(turn, known.id, session.id, connection, message.number)
            self._resume(turn, session)
            return
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
        token = self._first_token(message, selector, turn.now_us)
        if elsewhere is not None:
            subscriptions.check_elsewhere(message.durable, selector, message.shared, message.key)
        if elsewhere is not None and not message.token:
            self.moving.wait(
                turn,
                connection,
                asked,
                selector,
                principal=self._links.owner(connection),
                admin=self._links.may_admin(connection),
            )
        else:
            self.attach(turn, connection, message, selector, token)

    def _check_title(self, turn: Turn, connection: int, name: str) -> None:
        """DeniedError if the name belongs to another principal, and this one may not administer."""
        title, known = self.hosting.subscriptions.title(name), self.hosting.subscriptions.get(name)
        if title is None:
            return
        if not self._links.may_use(connection, title.principal):
            raise not_its_own(name)
        if known is not None and known.principal not in ("", title.principal):
            self.delete(turn, name)  # of somebody who made it here while its principal was out of reach

    def go_on_alone(
        self, turn: Turn, connection: int, message: Subscribe, selector: Selector, claim: Row
    ) -> None:
        """Its broker cannot be asked: it goes on after what the client remembers. Streams that this does not
        name, its broker had not heard of: there it begins when it was made."""
        remembered = self._first_token(message, selector, turn.now_us)
        if remembered is None:
            raise BugError("a client that remembers nothing goes on alone")
        made_us = message.since_us or max(0, claim.born - LATE_US)
        known = self.hosting.subscriptions.get(message.durable)
        own_token = CheckpointToken() if known is None else known.token()
        token = self._beginning(selector, made_us).maximum(remembered).maximum(own_token)
        message = msgspec.structs.replace(without_memory(message), since_us=made_us)
        self.attach(turn, connection, message, selector, token, claim.born, claim.principal)

    def _beginning(self, selector: Selector, tick: int) -> CheckpointToken:
        """A token with this tick for every durable pubend that this broker knows."""
        known = self._following.pubends().intersection(self._routing.durable_streams())
        return CheckpointToken(dict.fromkeys(filter(selector.concerns, known), tick))

    def attach(
        self,
        turn: Turn,
        connection: int,
        message: Subscribe,
        selector: Selector,
        token: CheckpointToken | None,
        born: int = 0,
        principal: str = "",
    ) -> None:
        """Nobody else has it, or its token is known. `born`, `principal`: as its former broker says."""
        title = self.hosting.subscriptions.title(message.durable)
        if title is not None:
            born, principal = born or title.born, title.principal
        known = self.hosting.subscriptions.get(message.durable)
        named = {*(token or ()), *(() if known is None else known.cursors)}
        unfollowed = named - self._following.pubends()
        if len(unfollowed) > MAX_UNFOLLOWED:
            raise UnavailableError(
                f"the token names {len(unfollowed)} streams that are not followed here, or not yet; at most"
                f" {MAX_UNFOLLOWED} are allowed"
            )
        if known is not None and known.session is not None:
            # Before anything is sent to the newer one, which would be taken off the older one's credit.
            known.check_same(selector, message.shared, message.key)
            error = UsageError(f"{message.durable!r} was taken by another connection")
            self._end(turn, known.session, error)
        wanted = Attachment(
            name=message.durable,
            selector=selector,
            ack=message.ack,
            session=self.new_number(),
            token=token,
            shared=message.shared,
            key=message.key,
            late=0 if message.token else min(message.since_us, turn.now_us),
            born=born,
            principal=principal or self._links.owner(connection),
        )
        returned = known is not None and known.moved_at is not None
        attached = self.hosting.attach(turn, wanted)
        subscription = attached.subscription
        self._set_policy(subscription, message)
        session = self._sessions.open(connection, message.number, subscription)
        session.token, session.created = token, attached.created or subscription.id in self._unconfirmed
        if subscription.shared and subscription.session is not None:
            self._groups.begin(subscription, subscription.session)
            self._groups.join(turn, subscription.id, session.id, connection, message.number)
        if self._tracking is not None:
            self._tracking.attached(subscription.name, turn.now_us)
        if attached.created:
            self._created(turn, subscription, session, token)
        elif returned or (token is not None and subscription.kept_here):
            if token is not None and subscription.kept_here:
                self.hosting.acknowledged(subscription, token)  # handed over by another broker
            # Others let go of it when they hear the claim, so that is on disk first.
            self.hosting.confirm(subscription.id, session.id)
        else:
            self._resume(turn, session)
        # Whoever is behind has room only now that its connection is known.
        self.hosting.credit(turn, subscription.id)

    def _created(
        self, turn: Turn, subscription: Subscription, session: Session, token: CheckpointToken | None
    ) -> None:
        """Others are to know of a new subscription, and it begins."""
        try:
            self._give_back[subscription.id] = self._quotas.take(
                subscription.principal or ANONYMOUS, SubscriptionKind.DURABLE, subscription.selector
            )
            updates = self._interest.subscribe(durable_key(subscription.id), subscription.selector)
        except UsageError:
            self._give_back.pop(subscription.id, _nothing)()
            self._forget(turn, session)
            self._groups.delete(turn, subscription.id)
            self.hosting.delete(turn, subscription.name)
            raise
        self._version = self._interest.own_version
        self._flood(turn, updates)
        self._following.active = True
        self._unconfirmed[subscription.id] = None if token is None else ()
        if token is None:
            self._routing.subscribe(turn, durable_key(subscription.id), self._version)
            self._routing.follow_all(turn)
            return
        self._routing.follow_all(turn)
        self._routing.host_subscription(durable_key(subscription.id), self._version)
        for pubend in self._routing.durable_streams():
            if self.hosting.position(pubend) is not None:
                self.hosting.begin(turn, subscription.id, pubend, 0)
        self.hosting.confirm(subscription.id, session.id)

    def _first_token(self, message: Subscribe, selector: Selector, now_us: int) -> CheckpointToken | None:
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
        subscription = self.hosting.subscriptions.get(message.durable)
        if not message.token:
            if subscription is not None or not message.since_us:
                return None
            return self._beginning(selector, min(message.since_us, now_us))
        token = self._token(message.token, now_us)
        for pubend, tick in token.items():
            if tick > now_us + AHEAD_US and self._routing.known_top(pubend) is None:
                raise UnavailableError(
                    f"the token names tick {tick} of {pubend_text(pubend)}, which is "
                    f"{(tick - now_us) // SECOND_US} s ahead of this broker's clock, and how far that stream"
                    " is has not been heard here yet"
                )
        # To begin with the first tick of everything would be to repeat everything.
        known_here = {
            *self._routing.durable_streams(),
            *self.hosting.followed_before(),
            *(() if subscription is None else subscription.cursors),
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
            top = self._routing.known_top(pubend)
            if top is not None and tick > max(now_us, top) + AHEAD_US:
                raise UsageError(
                    f"the token names a tick of {pubend_text(pubend)} in the future, "
                    f"{(tick - now_us) // SECOND_US} s ahead of this broker's clock: {tick}"
                )
        return token

    def new_number(self) -> int:
        """Names a session, or something else that is confirmed."""
        return self._sessions.new_number()

    def confirmed(self, turn: Turn, key: SubscriptionKey, missing: tuple[str, ...]) -> None:
        """Routing has begun a new subscription everywhere it could."""
        subscriber = key.id
        if subscriber in self._unconfirmed:
            self._unconfirmed[subscriber] = missing
        subscription = self.hosting.subscriptions.find(subscriber)
        if subscription is not None:
            self._begin_unreached(turn, subscription)
        if subscription is not None and subscription.session is not None:
            for number in (
                self._groups.consumers(subscription.session)
                if subscription.shared
                else [subscription.session]
            ):
                session = self._sessions.get(number)
                if session is not None:
                    session.missing = missing
                    self.hosting.confirm(subscriber, number)

    def _begin_unreached(self, turn: Turn, subscription: Subscription) -> None:
        """Pubends that are known here and cannot be reached: it begins after what hosting has of them.

        Not noted down, it would begin at their first tick should this broker restart before they are back.
        """
        self._routing.host_subscription(durable_key(subscription.id), self._version)
        for pubend in self._routing.durable_streams():
            position = self.hosting.position(pubend)
            if position is not None and pubend not in subscription.cursors:
                self.hosting.begin(turn, subscription.id, pubend, position)

    def _ack(self, turn: Turn, peer: Peer, message: Ack) -> None:
        session = self._sessions.find(peer.connection, message.number)
        if session is None:
            return  # it ended meanwhile
        if session.shared:
            ticket = self._ticket(session, message) if message.ticket else None
            self._groups.ack(turn, session.subscriber, session.id, message, ticket)
            self.hosting.credit(turn, session.subscriber)
            return
        try:
            token = self._token(message.token, turn.now_us)
        except UsageError as error:
            if not message.ticket:
                raise PeerError(f"an acknowledgement that cannot be taken: {error}") from None
            self._acked(turn, self._ticket(session, message), error)
            return
        self.hosting.ack(session.id, token, self._ticket(session, message) if message.ticket else None)

    def _ticket(self, session: Session, message: Ack) -> int:
        """What names the acknowledgement until it is on disk, where its sender wants to know."""
        if len(self._acking) >= MAX_ACKING:
            raise PeerError(f"more than {MAX_ACKING} acknowledgements wait for the disk")
        ticket = self.new_number()
        self._acking[ticket] = (session.id, message.ticket)
        return ticket

    def _acked(self, turn: Turn, ticket: int, error: PostroadError | None) -> None:
        number, its_ticket = self._acking.pop(ticket)
        session = self._sessions.get(number)
        if session is not None:
            code, reason = ("", "") if error is None else (error.code, str(error))
            acked = Acked(number=session.number, ticket=its_ticket, code=code, reason=reason)
            turn.send(session.connection, encode(acked))

    def count(self, connection: int) -> int:
        """Durable subscriptions and readers of a connection."""
        subscriptions = self._sessions.count(connection) + self.moving.count(connection)
        return subscriptions + self.readers.count(connection)

    def has(self, connection: int, number: int) -> bool:
        attached = self._sessions.find(connection, number) is not None
        return attached or self.moving.has(connection, number) or self.readers.has(connection, number)

    def unsubscribe(self, turn: Turn, connection: int, number: int) -> bool:
        """The subscriber goes, its subscription stays."""
        session = self._sessions.find(connection, number)
        if session is not None:
            self._forget(turn, session)
        waited = self.moving.forget(connection, number)
        return session is not None or waited or self.readers.end(turn, connection, number)

    def _closed(self, turn: Turn, peer: Peer) -> None:
        self._desk.closed(peer.connection)
        self.readers.closed(turn, peer.connection)
        self.moving.closed(peer.connection)
        for session in self._sessions.on(peer.connection):
            turn.later(partial(self._forget_later, session))

    def _forget_later(self, session: Session, turn: Turn) -> None:
        """Nothing is sent to it meanwhile: its connection has no credit."""
        if self._sessions.get(session.id) is session:
            self._forget(turn, session, lost=True)

    def _forget(self, turn: Turn, session: Session, *, lost: bool = False) -> None:
        self._sessions.close(session)
        gone: int | None = session.id
        if session.shared:
            gone = self._groups.leave(turn, session.subscriber, session.id, lost=lost)
        if gone is not None:
            self.hosting.detach(gone)
            if self._tracking is not None:
                self._tracking.detached(session.name, turn.now_us)

    def _end(self, turn: Turn, number: int, error: Exception) -> None:
        for consumer in self._groups.consumers(number):
            self._end(turn, consumer, error)
        session = self._sessions.get(number)
        if session is None:
            return
        code = getattr(error, "code", "bug")
        ended = Ended(number=session.number, code=code, reason=str(error))
        turn.send(session.connection, encode(ended))
        self._forget(turn, session)

    def end(self, turn: Turn, subscription: Subscription, error: PostroadError) -> None:
        """The broker ends the session, if there is one, with this error; the subscription stays."""
        if subscription.session is not None:
            self._end(turn, subscription.session, error)

    def delete(self, turn: Turn, name: str) -> None:
        """Delete a subscription for good: the broker ends its session and keeps nothing of it."""
        subscription = self.hosting.subscriptions.get(name)
        if subscription is not None and subscription.session is not None:
            self._end(
                turn, subscription.session, DeletedError(f"the durable subscription {name!r} was deleted")
            )
        number = self.hosting.delete(turn, name)
        self._give_back.pop(number)()
        self.moving.unclaim(name)
        self._unconfirmed.pop(number, None)
        for ticket in self._groups.delete(turn, number):
            self._acking.pop(ticket, None)
        key = durable_key(number)
        self._routing.unsubscribe(key)
        self._flood(turn, self._interest.unsubscribe(key))

    def credit(self, turn: Turn, connection: int) -> None:
        self.readers.credit(turn, connection)
        for session in self._sessions.on(connection):
            if session.shared:
                self._groups.credit(turn, session.subscriber)
            self.hosting.credit(turn, session.subscriber)

    # ---- time

    def tick(self, turn: Turn) -> None:
        now_us = turn.now_us
        self.moving.heard(turn, self._interest.take_heard())
        self._following.pull(turn)
        if self._following.active:
            self.hosting.tick(turn)
            self._groups.tick(turn)
        else:
            self.hosting.subscriptions.flush(turn)
        if now_us >= self._expire_at:
            self._expire_at = now_us + EXPIRE_US
            self._groups.complain(turn)
            for name in self.hosting.subscriptions.expired(now_us, self.moving.reachable):
                self.delete(turn, name)
            self.moving.tell_deleted(turn)
        self.moving.tick(turn)
        self.readers.tick(turn)

    def close(self, turn: Turn) -> None:
        """The process ends: what waits for its time to be saved is saved now."""
        self.hosting.close()
        self.tick(turn)
        self._groups.close(turn)

    def next_deadline(self) -> int | None:
        hosting = self.hosting if self._following.active else self.hosting.subscriptions
        due = [room.next_deadline() for room in (hosting, self._groups, self.readers, self.moving)]
        return min((deadline for deadline in due if deadline is not None), default=None)

    # ---- a broker that drains

    def attached(self) -> frozenset[int]:
        """Those with a client that may go on at another broker."""
        return frozenset(
            subscription.id
            for subscription in self.hosting.subscriptions
            if subscription.session is not None and not subscription.shared
        )

    def reads(self, connection: int) -> bool:
        """Whether this client has one of them."""
        return bool(self._sessions.on(connection))

    def behind(self, connection: int) -> int:
        """Events published here that this client has not acknowledged."""
        return sum(
            self.hosting.lag_here(self.hosting.subscriptions.by_id(session.subscriber), self._me)
            for session in self._sessions.on(connection)
            if not session.shared
        )

    def give_back(self, turn: Turn, connection: int) -> None:
        """This client is not lost: what it has of shared subscriptions was not tried."""
        for session in self._sessions.on(connection):
            if session.shared:
                self._forget(turn, session)

    def still_here(self, subscribers: frozenset[int]) -> bool:
        """Whether one of these has neither moved nor is deleted."""
        known = (self.hosting.subscriptions.find(number) for number in subscribers)
        return any(subscription is not None and subscription.moved_at is None for subscription in known)

    # ---- inspection

    def acknowledged(self) -> list[tuple[str, dict[int, int]]]:
        """What each subscription has acknowledged, by pubend."""
        return [
            (subscription.name, {pubend: cursor.released for pubend, cursor in subscription.cursors.items()})
            for subscription in self.hosting.subscriptions
        ]

    def check(self) -> None:
        self.hosting.check()
        self._groups.check()
        self.readers.check()
        self.moving.check()
        self._sessions.check()
        if self._outputs or self._wants:
            raise BugError("hosting: something that it asked for was never carried out")


def without_memory(message: Subscribe) -> Subscribe:
    """What the client asks for, whatever it remembers."""
    return msgspec.structs.replace(message, token="", epoch=0) if message.epoch else message


def _nothing() -> None:
    pass
