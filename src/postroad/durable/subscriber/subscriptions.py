"""Durable subscriptions hosted here: names, selectors, tokens, who is connected (spec D3, D10, D11).

A subscription is a name and a selector; it exists until it is deleted, connected or not. released(s, p) is
the tick of pubend p up to which it acknowledged everything. If the subscriber keeps its own token (ack=""),
that only says what may be forgotten, and is saved now and then. If the broker keeps it (ack "auto", "batch"
or "manual") it is the token, and an acknowledgement is confirmed when it is on disk; those of one turn
share a save. What is reported up the tree is always what is saved.

Decisions (docs/explanation/durable.md): a name that comes back with another selector is refused; a second
connection under one name takes it over, the first is ended; at two brokers the higher epoch has it, and the
other one lets go, but holds what the subscription has not acknowledged until the new one was reachable for
`HOLD_US` and has reported.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Final

import msgspec

from postroad.durable.subscriber.backlog import Backlog
from postroad.durable.subscriber.claims import NOBODY, Claims, Row, Title, ranked, title
from postroad.durable.subscriber.cursor import Cursor
from postroad.errors import BugError, PostroadError, UsageError, shorten
from postroad.events.token import CheckpointToken
from postroad.ids import SubscriptionKey, SubscriptionKind, is_generated_name, pubend_text
from postroad.overlay.interest_entries import FINGERPRINT_BYTES, MAX_EPOCH, Claim
from postroad.seam.turn import Turn
from postroad.selectors import Selector
from postroad.units import MILLISECOND_US, SECOND_US

SUBSCRIPTIONS: Final = "durable.subscriptions"
RELEASED: Final = "durable.released"
ACKS: Final = ("", "auto", "batch", "manual")  # "": the subscriber keeps its token
MAX_SUBSCRIPTIONS: Final = 100_000
MAX_AHEAD: Final = 1_000  # pubends of a subscription that it acknowledged before they began here
MAX_NAME_BYTES: Final = 255
MAX_KEY_BYTES: Final = 255  # as of any attribute's name
SAVE_US: Final = 250 * MILLISECOND_US  # released(s, p) of tokens that subscribers keep (paper, 5.1)
UNFOLLOWED: Final = (1 << 63) - 1  # `since`, while the pubend is not followed yet
HOLD_US: Final = 60 * SECOND_US  # after a subscription moved to another broker
AHEAD_US: Final = 24 * 3_600 * SECOND_US  # an epoch further ahead of this clock is no reason to follow it
LATE_US: Final = 5 * SECOND_US  # clocks differ: how far before its creation a subscription may begin

_NEXT: Final = b"\0next"  # no name begins with NUL
_EPOCH: Final = b"\0epoch"
_CURSOR: Final = struct.Struct("<qqqq")


_Next = Annotated[int, msgspec.Meta(ge=1)]


class _Row(msgspec.Struct, frozen=True):
    id: int
    topic: str
    where: str
    ack: str
    epoch: int
    created_us: int
    shared: bool
    key: str
    late: int = 0
    born: int = 0  # in rows of earlier versions: created_us
    principal: str = ""  # in rows of earlier versions: not known
    max_attempts: int = 0
    dead_letters: str = ""


@dataclass(slots=True)
class Subscription:
    id: int
    name: str
    selector: Selector
    ack: str
    epoch: int
    created_us: int
    shared: bool = False
    key: str = ""  # attribute that orders a shared subscription
    late: int = 0  # it begins after this tick on pubends that its broker hears of later
    born: int = 0  # when it was made, at whichever broker: another one, of the same name, began anew
    principal: str = ""  # that it belongs to; "": nobody in particular, and the next one that has a name
    max_attempts: int = 0  # of a shared one: after so many an event is a dead letter; 0: never
    dead_letters: str = ""  # their topic
    session: int | None = None  # the broker's handle of its connection; None: not connected
    moved_at: int | None = None  # another broker hosts it since then
    cursors: dict[int, Cursor] = field(default_factory=dict)  # by pubend
    ahead: dict[int, int] = field(default_factory=dict)  # acknowledged, of pubends that have not begun here

    @property
    def kept_here(self) -> bool:
        """This broker keeps the token."""
        return self.ack != ""

    def token(self) -> CheckpointToken:
        return CheckpointToken({pubend: cursor.released for pubend, cursor in self.cursors.items()})

    def check_same(self, selector: Selector, shared: bool, key: str) -> None:
        """UsageError unless whoever comes back asks for what this is."""
        if self.selector != selector:
            raise UsageError(
                f"the durable subscription {self.name!r} is for topic {self.selector.topic!r} where "
                f"{self.selector.where!r}: delete it first, or choose another name"
            )
        if (self.shared, self.key) != (shared, key):
            order = f" with key {self.key!r}" if self.key else " without a key"
            sharing = f"shared{order}" if self.shared else "not shared"
            raise UsageError(
                f"the durable subscription {self.name!r} is {sharing}: delete it first, or choose another"
                " name"
            )


def fingerprint(selector: Selector, shared: bool, key: str) -> bytes:
    """Tells brokers that do not host a subscription whether somebody asks for what it is."""
    texts = msgspec.msgpack.encode((selector.topic, selector.where, shared, key))
    return hashlib.sha256(texts).digest()[:FINGERPRINT_BYTES]


def durable_key(subscriber: int) -> SubscriptionKey:
    """What interest and routing call a durable subscription."""
    return SubscriptionKey(SubscriptionKind.DURABLE, subscriber)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What a connection asks for that takes a subscription.

    `token`: it goes on after that, not after what it acknowledged. `late`: if it is created, it begins after
    this tick on pubends that its broker hears of later. `born`: of one that comes from another broker.
    `principal`: to whom it belongs from now on, if it was nobody's.
    """

    name: str
    selector: Selector
    ack: str
    session: int
    token: CheckpointToken | None = None
    shared: bool = False
    key: str = ""
    late: int = 0
    born: int = 0
    principal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    subscription: Subscription
    created: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What the disk said of a flush."""

    tickets: Sequence[tuple[int, int]]  # (subscription, ticket): confirmed, or refused with the error
    firm: Sequence[tuple[int, int]]  # (subscription, pubend): where they begin is on disk since now
    error: PostroadError | None


class Subscriptions:
    """Everything this broker knows of durable subscriptions.

    `answered` hears what became of a flush: tickets that wait for it, and subscriptions that begin with it.
    """

    def __init__(self, *, broker: int, backlog: Backlog, answered: Callable[[Turn, Answered], None]) -> None:
        self._broker = broker
        self._backlog = backlog
        self._answered = answered
        self._next = 1  # ids are never used again: filtering records name them
        self._by_name: dict[str, Subscription] = {}
        self._by_id: dict[int, Subscription] = {}
        self._sessions: dict[int, Subscription] = {}  # those connected
        self.claims = Claims(backlog)  # of other brokers
        self._last_epoch = 0  # the highest given or heard of, whatever the name (`heard_epoch`)
        self._holders: dict[int, dict[int, Cursor]] = {}  # pubend -> subscription -> cursor
        self._minimum: dict[int, int] = {}  # pubend -> least saved; absent: to be found anew
        self._dirty_names: dict[str, None] = {}  # whose row is to be saved or removed
        self._dirty: dict[tuple[int, int], None] = {}  # (subscription, pubend): likewise
        self._tickets: list[tuple[int, int]] = []  # (subscription, ticket) to be confirmed by the next save
        self._save_at = 0

    # ---- the life of a subscription

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def ever(self) -> bool:
        """There are some, or were."""
        return self._next > 1

    def __iter__(self) -> Iterator[Subscription]:
        return iter(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Subscription | None:
        return self._by_name.get(name)

    def by_id(self, number: int) -> Subscription:
        return self._by_id[number]

    def find(self, number: int) -> Subscription | None:
        return self._by_id.get(number)

    def by_session(self, session: int) -> Subscription | None:
        return self._sessions.get(session)

    def attach(self, wanted: Attachment, now_us: int) -> Attached:
        """A connection takes the subscription, which is created if there is none of that name.

        Where another broker has it (`owner`) its token must be known.
        """
        name = wanted.name
        check_name(name, wanted.ack)
        if wanted.session in self._sessions:
            raise BugError(f"session {wanted.session} has a subscription already")
        subscription = self._by_name.get(name)
        if self.owner(name) is not None and wanted.token is None:
            raise BugError(f"{name!r} begins anew while another broker keeps its token")
        epoch = self._next_epoch(name, now_us)
        if subscription is not None:
            subscription.check_same(wanted.selector, wanted.shared, wanted.key)
            if subscription.session is not None:
                del self._sessions[subscription.session]
        else:
            if len(self._by_name) >= MAX_SUBSCRIPTIONS:
                raise UsageError(f"more than {MAX_SUBSCRIPTIONS} durable subscriptions")
            subscription = self._create(wanted, now_us)
        subscription.born = wanted.born or subscription.born
        subscription.principal = subscription.principal or wanted.principal
        created = subscription.epoch == 0
        subscription.session, subscription.ack, subscription.moved_at, subscription.epoch = (
            wanted.session,
            wanted.ack,
            None,
            epoch,
        )
        self._sessions[wanted.session] = subscription
        self.heard_epoch(epoch, now_us)
        self._dirty_names[name] = None
        self._save_at = 0
        return Attached(subscription=subscription, created=created)

    def _create(self, wanted: Attachment, now_us: int) -> Subscription:
        anew = not wanted.late and wanted.token is None
        made = Subscription(
            id=self._next,
            name=wanted.name,
            selector=wanted.selector,
            ack="",
            epoch=0,
            created_us=now_us,
            shared=wanted.shared,
            key=wanted.key,
            late=max(0, now_us - LATE_US) if anew else wanted.late,
            born=now_us,
        )
        self._next += 1
        self._by_name[made.name] = self._by_id[made.id] = made
        return made

    def set_policy(self, subscription: Subscription, max_attempts: int, dead_letters: str) -> None:
        """How often events of a shared subscription are tried, and where they go then, for all consumers."""
        if (subscription.max_attempts, subscription.dead_letters) != (max_attempts, dead_letters):
            subscription.max_attempts, subscription.dead_letters = max_attempts, dead_letters
            self._dirty_names[subscription.name] = None
            self._save_at = 0

    def detach(self, session: int) -> Subscription | None:
        """The connection is gone; the subscription stays."""
        subscription = self._sessions.pop(session, None)
        if subscription is not None:
            subscription.session = None
        return subscription

    def delete(self, name: str) -> Subscription:
        """Nothing is kept for it any more."""
        subscription = self._by_name.pop(name, None)
        if subscription is None:
            raise UsageError(f"there is no durable subscription {shorten(name, 40)!r} here")
        del self._by_id[subscription.id]
        if subscription.session is not None:
            del self._sessions[subscription.session]
        for pubend in subscription.cursors:
            del self._holders[pubend][subscription.id]
            self._minimum.pop(pubend, None)
            self._dirty[subscription.id, pubend] = None
        self._dirty_names[name] = None
        self._save_at = 0
        return subscription

    # ---- at two brokers

    def _next_epoch(self, name: str, now_us: int) -> int:
        known = (self.claims.highest(name), self._by_name.get(name))
        later = max((claim.epoch + 1 for claim in known if claim is not None), default=1)
        return min(max(now_us, self._last_epoch + 1, later), MAX_EPOCH)

    @property
    def last_epoch(self) -> int:
        return self._last_epoch

    def heard_epoch(self, epoch: int, now_us: int) -> None:
        """Attachments here have higher epochs from now on, of whatever name: that of one which was deleted,
        by a broker whose clock is ahead of this one, may be forgotten here and remembered elsewhere."""
        if epoch <= now_us + AHEAD_US:
            self._last_epoch = max(self._last_epoch, epoch)

    def owner(self, name: str) -> int | None:
        """The other broker that has `name`, by a claim that is higher than what is here.

        Equal epochs go to the higher broker number.
        """
        highest = self._highest(name)
        return None if highest is None or highest.broker in (NOBODY, self._broker) else highest.broker

    def _highest(self, name: str) -> Row | None:
        """Of all claims, that of this broker included."""
        subscription = self._by_name.get(name)
        if subscription is None:
            return self.claims.highest(name)
        return ranked([*self.claims.rows(name), self._own_row(subscription)])[0]

    def _own_row(self, subscription: Subscription) -> Row:
        return Row(subscription.epoch, self._broker, 0, subscription.principal, subscription.born)

    def title(self, name: str) -> Title | None:
        """To whom the name belongs in this network, as far as is known; None: to nobody in particular."""
        subscription = self._by_name.get(name)
        own = [] if subscription is None else [self._own_row(subscription)]
        return title([*self.claims.rows(name), *own])

    def check_elsewhere(self, name: str, selector: Selector, shared: bool, key: str) -> None:
        """UsageError unless what another broker has under this name is what somebody here asks for."""
        highest = self._highest(name)
        known = b"" if highest is None else highest.fingerprint
        if known and known != fingerprint(selector, shared, key):
            raise UsageError(
                f"the durable subscription {name!r} is for another topic, condition or key: delete it first, "
                "or choose another name"
            )

    def claimed(self, claim: Claim, broker: int, version: int, now_us: int) -> Subscription | None:
        """Another broker says that it hosts this name, with this version of its table. What moved there, if
        it was ours.

        A subscription that we host by a higher claim stays: the other broker hears that claim as well.
        """
        name = claim.name
        self.heard_epoch(claim.epoch, now_us)
        self.claims.hear(claim, broker, version)
        subscription = self._by_name.get(name)
        if subscription is None or subscription.moved_at is not None or self.owner(name) is None:
            return None
        subscription.moved_at = now_us
        self.claims.save(name)
        self._save_at = 0
        return subscription

    def withdrawn(self, name: str, broker: int, version: int, now_us: int) -> None:
        """With this version of its table that broker does not host `name` any more. If it had it, it was
        deleted there, so it is over here as well; else it has let go of what moved on."""
        if version <= self.claims.version(name, broker):
            return
        had, highest = self.owner(name) == broker, self.claims.highest(name)
        self.claims.remove(name, broker)
        if not had or highest is None:
            return
        self.claims.delete(name, highest.epoch)
        subscription = self._by_name.get(name)
        if subscription is not None:
            subscription.moved_at = now_us - HOLD_US

    def _over(self, subscription: Subscription) -> bool:
        """It was deleted where it moved to."""
        highest = self.claims.highest(subscription.name)
        return highest is not None and highest.broker == NOBODY and highest.epoch > subscription.epoch

    def retired(self, broker: int) -> list[Subscription]:
        """That broker will not come back. What moved from here to there is here again, above its claim."""
        back: list[Subscription] = []
        for name, epoch in self.claims.of(broker).items():
            had = self.owner(name) == broker
            self.claims.remove(name, broker)
            subscription = self._by_name.get(name)
            if had and subscription is not None and self.owner(name) is None and not self._over(subscription):
                subscription.moved_at, subscription.epoch = None, min(epoch + 1, MAX_EPOCH)
                self._dirty_names[name] = None
                back.append(subscription)
        self._save_at = 0
        return back

    def expired(self, now_us: int, reachable: Callable[[int], bool]) -> list[str]:
        """Names to be deleted here: they moved, and their brokers were reachable for long enough since."""
        names: list[str] = []
        for subscription in self._by_name.values():
            if subscription.moved_at is None:
                continue
            broker = self.owner(subscription.name)
            if broker is not None and not reachable(broker):
                subscription.moved_at = now_us
            elif now_us - subscription.moved_at >= HOLD_US:
                names.append(subscription.name)
        return names

    # ---- tokens

    def begin(
        self,
        subscription: Subscription,
        pubend: int,
        tick: int,
        *,
        since: int,
        matched: int,
        firm: bool = True,
    ) -> None:
        """The subscription begins on a pubend after `tick`; the PFS knows it from `since` on.

        If not `firm`, a restart that does not find it on disk would begin it later: `answered` hears when it
        is there.
        """
        if pubend in subscription.cursors:
            return
        cursor = Cursor(
            released=tick,
            saved=tick,
            since=since,
            matched=matched,
            sent_to=tick,
            counted=tick,
            quiet=tick,
            begun=tick,
            firm=firm,
        )
        subscription.cursors[pubend] = cursor
        self._holders.setdefault(pubend, {})[subscription.id] = cursor
        self._minimum.pop(pubend, None)
        self._dirty[subscription.id, pubend] = None
        self._save_at = 0
        self.release(subscription, pubend, subscription.ahead.pop(pubend, 0))

    def ack(self, subscription: Subscription, token: Mapping[int, int], ticket: int | None = None) -> None:
        """Everything up to these ticks was consumed. With a ticket it is confirmed when it is on disk.

        A token never takes an acknowledgement back. It may be ahead of what this broker sent on this session,
        even of what it has learned since a crash, or name a pubend that it has not heard from since: the
        subscriber got those events earlier.
        """
        for pubend, tick in token.items():
            cursor = subscription.cursors.get(pubend)
            if cursor is not None:
                sent = max(cursor.begun, cursor.last_event)
                self.release(
                    subscription, pubend, tick, quiet=sent if sent <= tick <= cursor.sent_to else tick
                )
            elif pubend in subscription.ahead or len(subscription.ahead) < MAX_AHEAD:
                subscription.ahead[pubend] = max(tick, subscription.ahead.get(pubend, 0))
        if ticket is not None:
            self.confirm(subscription.id, ticket)

    def confirm(self, number: int, ticket: int) -> None:
        """Confirm this ticket when everything up to now is on disk."""
        self._tickets.append((number, ticket))
        self._save_at = 0

    def release(
        self, subscription: Subscription, pubend: int, tick: int, *, quiet: int | None = None
    ) -> None:
        """It acknowledged all up to `tick`, nothing in (quiet, tick] being for it."""
        cursor = subscription.cursors[pubend]
        if tick <= cursor.released:
            return
        cursor.release(tick)
        cursor.quiet = tick if quiet is None else quiet
        self._dirty[subscription.id, pubend] = None

    def released(self, pubend: int) -> int | None:
        """The least released(s, p) on disk; None if no subscription is here."""
        holders = self._holders.get(pubend)
        if not holders:
            return None
        lowest = self._minimum.get(pubend)
        if lowest is None:
            lowest = self._minimum[pubend] = min(cursor.saved for cursor in holders.values())
        return lowest

    # ---- saving

    def flush(self, turn: Turn) -> None:
        """Save what was acknowledged, at once if somebody waits for it."""
        if turn.now_us < self._save_at or not self._unsaved:
            return
        self._save_at = turn.now_us + SAVE_US
        if self._dirty_names or self.claims.dirty:
            names = tuple(self._dirty_names)
            self._dirty_names.clear()
            rows = [(name.encode(), self._row(name)) for name in names]
            rows.append((_NEXT, msgspec.msgpack.encode(self._next)))
            if self._last_epoch:
                rows.append((_EPOCH, msgspec.msgpack.encode(self._last_epoch)))
            turn.save(SUBSCRIPTIONS, rows, then=self._backlog.counted(partial(self._names_saved, names)))
        self.claims.flush(turn)
        rows = []
        saving: list[tuple[int, int, int]] = []  # (subscription, pubend, tick)
        for number, pubend in self._dirty:
            cursor = self._holders.get(pubend, {}).get(number)
            if cursor is None:
                rows.append((_cursor_key(number, pubend), None))
                saving.append((number, pubend, 0))
                continue
            row = _CURSOR.pack(cursor.released, cursor.since, cursor.consumed, cursor.quiet)
            rows.append((_cursor_key(number, pubend), row))
            saving.append((number, pubend, cursor.released))
        self._dirty.clear()
        tickets, self._tickets = self._tickets, []
        turn.save(RELEASED, rows, then=self._backlog.counted(partial(self._saved, saving, tickets)))

    def _names_saved(self, names: Sequence[str], _turn: Turn, error: PostroadError | None) -> None:
        if error is not None:
            self._dirty_names.update(dict.fromkeys(names))

    def _saved(
        self,
        saving: Sequence[tuple[int, int, int]],
        tickets: Sequence[tuple[int, int]],
        turn: Turn,
        error: PostroadError | None,
    ) -> None:
        """Rows of (subscription, pubend, tick) are on disk; if not, they are to be saved again, and those who
        wait for them get the error, and may ask again."""
        firm: list[tuple[int, int]] = []
        if error is not None:
            self._dirty.update(dict.fromkeys((number, pubend) for number, pubend, _ in saving))
            saving = ()
        for number, pubend, tick in saving:
            subscription = self._by_id.get(number)
            cursor = subscription.cursors.get(pubend) if subscription is not None else None
            if cursor is not None and not cursor.firm:
                cursor.firm = True
                firm.append((number, pubend))
            if cursor is not None and tick > cursor.saved:
                if self._minimum.get(pubend) == cursor.saved:
                    del self._minimum[pubend]
                cursor.saved = tick
        self._answered(turn, Answered(tickets=tickets, firm=firm, error=error))

    def close(self) -> None:
        """The process ends: the next `flush` saves what is not, whether or not it is time."""
        self._save_at = 0

    def _row(self, name: str) -> bytes | None:
        subscription = self._by_name.get(name)
        if subscription is None:
            return None
        selector = subscription.selector
        return msgspec.msgpack.encode(
            _Row(
                subscription.id,
                selector.topic,
                selector.where,
                subscription.ack,
                subscription.epoch,
                subscription.created_us,
                subscription.shared,
                subscription.key,
                subscription.late,
                subscription.born,
                subscription.principal,
                subscription.max_attempts,
                subscription.dead_letters,
            )
        )

    def next_deadline(self) -> int | None:
        return self._save_at if self._unsaved else None

    @property
    def _unsaved(self) -> bool:
        return bool(self._dirty or self._dirty_names or self._tickets) or self.claims.dirty

    def recover(
        self,
        subscriptions: Mapping[bytes, bytes],
        released: Mapping[bytes, bytes],
        claims: Mapping[bytes, bytes],
        now_us: int,
    ) -> None:
        """After a restart: the tables. Nobody is connected."""
        self.claims.recover(claims)
        for name, value in sorted(subscriptions.items()):
            row = read_subscription(name, value)
            if isinstance(row, int):
                if name == _EPOCH:
                    self.heard_epoch(row, now_us)
                else:
                    self._next = max(self._next, row)
                continue
            subscription = Subscription(
                row.id,
                name.decode(),
                Selector.parse(row.topic, row.where),
                row.ack,
                row.epoch,
                row.created_us,
                row.shared,
                row.key,
                max(0, row.late),
                row.born or row.created_us,
                row.principal,
                row.max_attempts,
                row.dead_letters,
            )
            self._by_name[subscription.name] = self._by_id[subscription.id] = subscription
            self._next = max(self._next, subscription.id + 1)
            self.heard_epoch(subscription.epoch, now_us)
            if self._over(subscription):
                subscription.moved_at = now_us - HOLD_US
            elif self.owner(subscription.name) is not None:
                subscription.moved_at = now_us
        for key, value in sorted(released.items()):
            number, pubend = int.from_bytes(key[:4], "big"), int.from_bytes(key[4:], "big")
            owner = self._by_id.get(number)
            if owner is not None:
                tick, since, matched, quiet = read_released(key, value)
                self.begin(owner, pubend, tick, since=since, matched=matched)
                owner.cursors[pubend].quiet = quiet
        self._dirty.clear()
        self._save_at = 0

    def begun(self) -> dict[int, int]:
        """Pubend -> from where on filtering records are needed for the subscriptions here."""
        consumed = {pubend: self.consumed(pubend) for pubend in self._holders}
        return {pubend: min(ticks.values()) for pubend, ticks in consumed.items() if ticks}

    def consumed(self, pubend: int) -> dict[int, int]:
        """Subscription -> up to where it has consumed what the PFS knows of it."""
        holders = self._holders.get(pubend, {})
        return {
            number: max(cursor.released, cursor.since)
            for number, cursor in holders.items()
            if cursor.since != UNFOLLOWED
        }

    def recounted(self, number: int, pubend: int, matched: int) -> None:
        """After a restart: how many events the PFS counted up to where the subscription is."""
        cursor = self._holders[pubend][number]
        if cursor.matched != matched:
            cursor.matched = matched
            self._dirty[number, pubend] = None

    # ---- inspection

    def lag(
        self, subscription: Subscription, now_us: int, matched: Callable[[int, int], int]
    ) -> tuple[int, int]:
        """Events and microseconds behind. `matched(s, p)`: events matched so far."""
        events = behind = 0
        for pubend, cursor in subscription.cursors.items():
            lag = cursor.lag(matched(subscription.id, pubend))
            events += lag
            if lag or not cursor.whole:
                # One that begins with the first tick of a pubend: how old that is, is not known here.
                behind = max(behind, now_us - (cursor.oldest or subscription.created_us))
        return events, behind

    def status(
        self, subscription: Subscription, now_us: int, matched: Callable[[int, int], int], done: int = 0
    ) -> dict[str, object]:
        """What `postroad subs` shows. `done`: events acknowledged above the token, of a shared one. Of a
        subscription that moved, only its new broker knows how far it is behind."""
        moved = subscription.moved_at is not None
        events, behind = (0, 0) if moved else self.lag(subscription, now_us, matched)
        events = max(0, events - done)
        whole = moved or all(cursor.whole for cursor in subscription.cursors.values())
        return {
            "name": subscription.name,
            "principal": subscription.principal,
            "topic": subscription.selector.topic,
            "where": subscription.selector.where,
            "ack": subscription.ack or "token",
            "shared": subscription.shared,
            "key": shorten(subscription.key, MAX_KEY_BYTES),  # those of earlier versions have no bound
            "connected": subscription.session is not None,
            "moved": moved,
            "lag_events": events,
            "lag_at_least": not whole,
            "lag_s": 0.0 if whole and not events else behind / SECOND_US,
            "released": {pubend_text(p): c.released for p, c in sorted(subscription.cursors.items())},
        }

    def check(self) -> None:
        self.claims.check()
        if sorted(subscription.id for subscription in self._by_name.values()) != sorted(self._by_id):
            raise BugError("subscriptions: names and ids are not those of the same ones")
        for session, subscription in self._sessions.items():
            if subscription.session != session or self._by_id.get(subscription.id) is not subscription:
                raise BugError(f"subscriptions: session {session} is not that of its subscription")
        for pubend, holders in self._holders.items():
            if any(self._by_id[number].cursors.get(pubend) is not c for number, c in holders.items()):
                raise BugError("subscriptions: a holder is not the cursor of its subscription")
            lowest = self._minimum.get(pubend)
            if lowest is not None and lowest != min(cursor.saved for cursor in holders.values()):
                raise BugError("subscriptions: the least released tick is another one")
            if any(cursor.saved > cursor.released for cursor in holders.values()):
                raise BugError("subscriptions: more is saved than was acknowledged")


def read_subscription(name: bytes, value: bytes) -> _Row | int:
    """A subscription, or the number of the next one, or the last epoch."""
    if name in (_NEXT, _EPOCH):
        return msgspec.msgpack.decode(value, type=_Next)
    row = msgspec.msgpack.decode(value, type=_Row)
    _check_form(name.decode(), row.ack)
    Selector.parse(row.topic, row.where)
    return row


def read_released(_key: bytes, value: bytes) -> tuple[int, int, int, int]:
    return _CURSOR.unpack(value)


def _cursor_key(number: int, pubend: int) -> bytes:
    return number.to_bytes(4, "big") + pubend.to_bytes(8, "big")


def check_name(name: str, ack: str) -> None:
    """Of one that attaches. One that is stored may be of before names of plain subscriptions were refused."""
    _check_form(name, ack)
    if is_generated_name(name):
        raise UsageError(
            "a durable name does not end as those generated for plain subscriptions and consumers do, in '#',"
            f" eight hexadecimal digits, '.' and a number, or '#' and sixteen digits: {shorten(name, 40)!r}"
        )


def check_key(key: str) -> None:
    if len(key.encode()) > MAX_KEY_BYTES:
        raise UsageError(
            f"a key is the name of an attribute, which has up to {MAX_KEY_BYTES} bytes: this one has"
            f" {len(key.encode())}"
        )


def _check_form(name: str, ack: str) -> None:
    if not name or len(name.encode()) > MAX_NAME_BYTES or not name.isprintable():
        raise UsageError(
            f"a durable name has 1 to {MAX_NAME_BYTES} bytes and is printable, not {shorten(name, 40)!r}"
        )
    if ack not in ACKS:
        raise UsageError(
            f"ack {shorten(ack, 40)!r} is not one of {', '.join(repr(choice) for choice in ACKS)}"
        )
