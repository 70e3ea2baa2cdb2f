"""The subscriber hosting broker, SHB: subscriptions, constreams, filtering and catchup (spec D4, D5, D9).

For every pubend that it follows the broker hands over knowledge twice: contiguous, once and in order to
`learn`, which feeds the constream; and whatever else arrives to `answer`, for catchup streams that asked.
What comes out are outputs: messages to subscribers, curiosity, reports, confirmations. They are gathered
while something happens here and handed to `perform` when all of it has, so that nothing changes meanwhile.

catchup(s, p) is true from the moment a subscriber connects behind the constream until its switchover, and
again when it has no room for something. A subscriber that is not connected has no stream here at all: the
persistent filtering subsystem remembers for it.

Order of durability: filtering record synced, then latestDelivered saved, then reported upstream.

Silence (D7; paper, 4.1): a subscription that matches nothing would hold storage for ever if its token stayed
where it was. Subscribers that keep their own token are told how far there was nothing. A token kept here is
moved on without a message: of a subscriber that is connected when all that it was sent is acknowledged; of
one that is away as long as the persistent filtering subsystem proves that there was nothing for it. What lies
before that subsystem knew the subscription, and was not gone through when it left, is held for it.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView, Mapping
from functools import partial
from typing import Final

from postroad.durable.publisher.release import Reporter
from postroad.durable.subscriber.backlog import Backlog
from postroad.durable.subscriber.claims import TABLE as CLAIMS
from postroad.durable.subscriber.claims import read_claims
from postroad.durable.subscriber.constream import DELIVERED, Constream, Ledger, read_delivered
from postroad.durable.subscriber.cursor import Cursor, SentEvents
from postroad.durable.subscriber.filtering import TABLE as FILTERING
from postroad.durable.subscriber.filtering import PersistentFiltering, ReadBuffer, read_filtering
from postroad.durable.subscriber.followed import Followed
from postroad.durable.subscriber.groups import TABLE as GROUPS
from postroad.durable.subscriber.groups import read_done
from postroad.durable.subscriber.outputs import (
    Confirmed,
    Deliver,
    DeliverGap,
    Message,
    Output,
    Reported,
    Wants,
)
from postroad.durable.subscriber.subscriptions import (
    RELEASED,
    SUBSCRIPTIONS,
    UNFOLLOWED,
    Answered,
    Attached,
    Attachment,
    Subscription,
    Subscriptions,
    read_released,
    read_subscription,
)
from postroad.errors import BugError, UsageError
from postroad.events.token import MAX_TOKEN_PUBENDS, CheckpointToken
from postroad.ids import is_history
from postroad.seam.storage import Reader
from postroad.seam.turn import Turn
from postroad.selectors import MatchIndex
from postroad.streams.knowledge import Segment
from postroad.units import MILLISECOND_US, SECOND_US

SAVE_US: Final = 250 * MILLISECOND_US  # latestDelivered is saved this often
REPORT_US: Final = SECOND_US
KEPT_US: Final = 5 * SECOND_US  # tokens kept here advance over silence this often
KEPT_ROW_US: Final = MILLISECOND_US  # but no more of them in a time: each is a row on disk
SILENCE_US: Final = 5 * SECOND_US  # subscribers that keep their token are told silence this often
MAX_FOLLOWED: Final = 16_384  # pubends
MAX_UNFOLLOWED: Final = MAX_TOKEN_PUBENDS - MAX_FOLLOWED  # pubends that only tokens of a subscription name
MAX_SAVES: Final = 64  # on their way to disk; then the next one gathers

TABLES: Final[Mapping[str, Reader]] = {  # what a start must load
    SUBSCRIPTIONS: read_subscription,
    RELEASED: read_released,
    DELIVERED: read_delivered,
    FILTERING: read_filtering,
    GROUPS: read_done,
    CLAIMS: read_claims,
}


class Hosting:
    """All durable subscribers of one broker.

    `perform` carries out what comes out, in order, the curiosity last; it may call back. `room(s)`: whether a
    subscriber can be sent something. `spend(s, n)`: it is sent a frame of n bytes, which whoever carries out
    the `Deliver` does not count again. `need()`: what knowledge must be filtered with for all subscriptions
    here.

    Outputs are gathered, not acted on at once, because two of them call back: a `Deliver` to a shared
    subscription may `ack` for it, and so move the cursor that `_pump` still counts with. `Wants` that this
    broker can answer itself calls `answer`, which pumps the same stream again, a level deeper per window.
    """

    def __init__(
        self,
        *,
        broker: int,
        boot: int,
        perform: Callable[[Turn, list[Output]], None],
        room: Callable[[int], bool],
        spend: Callable[[int, int], object],
        need: Callable[[], Mapping[int, int]],
        now_us: int,
    ) -> None:
        self._broker = broker
        self._reporter = Reporter(broker, boot)
        self._perform = perform
        self._room = room
        self._spend = spend
        self._need = need
        self._backlog = Backlog()
        self._closing = False  # the process ends: the backlog does not matter any more
        self.subscriptions = Subscriptions(broker=broker, backlog=self._backlog, answered=self._on_answer)
        self._index = MatchIndex()  # all subscriptions; key and target are their ids
        self._pubends: dict[int, Followed] = {}
        self.awaited: set[int] = set()  # followed before a restart and not yet again; they have a place
        self._ledger = Ledger(self._backlog)
        self._rows: dict[str, Mapping[bytes, bytes]] = {}  # tables as a restart found them
        self._save_at = now_us
        self._kept_at = now_us
        self._report_at = now_us + REPORT_US
        self._silence_at = now_us + SILENCE_US
        self._switchovers = 0

    # ---- restart and pubends

    def recover(self, tables: Mapping[str, Mapping[bytes, bytes]]) -> None:
        """After a restart: the tables of `TABLES`. Then `follow` every pubend of `followed_before`."""
        self._rows = dict(tables)
        self._ledger.recover(tables.get(DELIVERED, {}))
        subscriptions, released, claims = (
            tables.get(table, {}) for table in (SUBSCRIPTIONS, RELEASED, CLAIMS)
        )
        self.subscriptions.recover(subscriptions, released, claims, now_us=self._save_at)
        for subscription in self.subscriptions:
            self._index.add(subscription.id, subscription.selector, subscription.id)
        # Where a subscription is on disk and no latestDelivered yet, filtering goes on where it began.
        self._ledger.saved = {**self.subscriptions.begun(), **self._ledger.saved}
        self.awaited = set(sorted(self._ledger.saved)[:MAX_FOLLOWED])

    def leave(self, turn: Turn) -> None:
        """After a restart without subscriptions: the last report may not have been heard. Then nothing is
        remembered of pubends, and those that are followed later begin where they stand."""
        saved, self._ledger.saved = self._ledger.saved, {}
        self.awaited.clear()
        out: list[Output] = [
            Reported(pubend=pubend, report=report)
            for pubend, tick in sorted(saved.items())
            if (report := self._reporter.report(pubend, tick, tick, ended=True)) is not None
        ]
        self._perform(turn, out)

    def absent(self, turn: Turn, pubend: int) -> None:
        """This broker hears of a pubend that nobody here wants any more. The pubend may still keep events for
        it, by an old report, or one that its sibling took, so the broker reports that it has ended."""
        if not self.subscriptions.ever:
            return
        report = self._reporter.report(pubend, 0, 0, ended=True)
        if report is not None:
            self._perform(turn, [Reported(pubend=pubend, report=report)])

    def dropped(self, pubend: int) -> None:
        """The pubend's broker was out of reach for so long that the overlay dropped the reports on their way
        to it: the next report counts as news."""
        self._reporter.forget(pubend)

    def has_place(self, pubend: int) -> bool:
        """A pubend that is not followed can be."""
        return pubend in self.awaited or len(self._pubends) + len(self.awaited) < MAX_FOLLOWED

    @property
    def followed(self) -> KeysView[int]:
        """All pubends that are, also those with no `position` yet."""
        return self._pubends.keys()

    def followed_before(self) -> dict[int, int]:
        """Pubend -> latestDelivered as saved."""
        return dict(self._ledger.saved)

    def follow(
        self,
        turn: Turn,
        pubend: int,
        *,
        start: int,
        last: int = 0,
        chopped: int = 0,
        suspect: bool = False,
    ) -> None:
        """Follow a pubend. `start`: where a stream never followed before begins, 0 for a pubend that is new.

        `last`, `chopped`, `suspect`: what the log says of the pubend's filtering stream. When `position`
        answers, knowledge is to be handed to `learn` from that tick on.
        """
        if pubend in self._pubends or not self.has_place(pubend):
            raise BugError("this pubend is followed already, or too many are")
        delivered = self._ledger.saved.get(pubend, start)
        filtering = PersistentFiltering(
            pubend,
            backlog=self._backlog,
            opened=partial(self._on_open, pubend),
            ready=partial(self._on_read, pubend),
            start=delivered,
        )
        filtering.recover(
            turn,
            self._rows.get(FILTERING, {}),
            last=last,
            chopped=chopped,
            suspect=suspect,
            delivered=delivered,
            consumed=self.subscriptions.consumed(pubend),
        )
        constream = Constream(
            pubend,
            filtering=filtering,
            position=filtering.heard,
            stored=partial(self._on_record, pubend),
        )
        self._pubends[pubend] = Followed(constream, filtering)
        self.awaited.discard(pubend)
        self._ledger.begin(pubend, delivered)
        self._report_at = turn.now_us  # its pubend must not forget what is to be held from now on
        if filtering.recovered:
            self._on_open(pubend, turn)

    def _on_open(self, pubend: int, turn: Turn) -> None:
        """The pubend can be followed from now on: those who have been waiting for it begin."""
        followed = self._pubends[pubend]
        live, filtering = followed.constream.live, followed.filtering
        filtering.forget_others(turn, self.subscriptions.find)
        out: list[Output] = []
        for number, tick in self.subscriptions.consumed(pubend).items():
            if tick >= filtering.tail:
                matched = filtering.matched(number) - filtering.remaining(number)
                self.subscriptions.recounted(number, pubend, matched)
        for subscription in self.subscriptions:
            cursor = subscription.cursors.get(pubend)
            if cursor is None:
                continue
            # A crash may take latestDelivered back to before the subscription came here. What is learned
            # again is filtered with it; what is before was not gone through, and is held as it was.
            if cursor.since == UNFOLLOWED or cursor.since > max(live, cursor.released):
                cursor.since, cursor.matched = live, filtering.matched(subscription.id)
            if cursor.released > live:
                followed.ahead[subscription.id] = cursor.released
            if subscription.session is not None and cursor.firm:
                out += self._enter(turn, followed, subscription, cursor.sent_to)
        self._perform(turn, out)

    def position(self, pubend: int) -> int | None:
        """From here on `learn` expects knowledge; None while the pubend is not followed or not recovered."""
        followed = self._pubends.get(pubend)
        return None if followed is None or not followed.filtering.recovered else followed.constream.live

    # ---- subscribers

    def attach(self, turn: Turn, wanted: Attachment) -> Attached:
        """A connection takes a subscription: it goes on after its token, or after what it acknowledged.

        A created one gets nothing from a pubend before `begin` is called for it.
        """
        attached = self.subscriptions.attach(wanted, turn.now_us)
        subscription, token = attached.subscription, wanted.token
        out: list[Output] = []
        if attached.created:
            self._index.add(subscription.id, subscription.selector, subscription.id)
            self._report_at = turn.now_us  # before anybody hears of it, pubends do that it is to be held for
        self._disconnect(subscription.id)
        if token is not None:
            self._begin_from_token(subscription, token)
        for pubend, cursor in list(subscription.cursors.items()):
            at = cursor.released if token is None else token.tick(pubend) or cursor.released
            if cursor.quiet <= at < cursor.released:
                at = cursor.released
            cursor.sent_to = cursor.begun = at
            cursor.last_event = 0
            if self.position(pubend) is not None and cursor.firm:
                out += self._enter(turn, self._pubends[pubend], subscription, at)
        self._perform(turn, out)
        return attached

    def _begin_from_token(self, subscription: Subscription, token: CheckpointToken) -> None:
        """A subscription that comes from elsewhere: its PFS begins now, what is before is refiltered."""
        for pubend, tick in token.items():
            if not subscription.selector.concerns(pubend):
                continue
            followed, live = self._pubends.get(pubend), self.position(pubend)
            matched = 0 if followed is None else followed.filtering.matched(subscription.id)
            since = UNFOLLOWED if live is None else live
            self.subscriptions.begin(subscription, pubend, tick, since=since, matched=matched)

    def begin(self, turn: Turn, subscriber: int, pubend: int, tick: int) -> None:
        """From `tick`, at or before `position`, everything of this pubend is for the subscription.

        For a created one: the tick from which on the knowledge handed to `learn` is filtered with it. For
        one that came with a token, and a pubend that it does not name: 0. Where that is before `late`, at
        which a restart would begin it, nothing is told before it is on disk.
        """
        subscription, followed = self.subscriptions.by_id(subscriber), self._pubends[pubend]
        if pubend in subscription.cursors or not subscription.selector.concerns(pubend):
            return
        live, matched, firm = (
            followed.constream.live,
            followed.filtering.matched(subscription.id),
            tick >= subscription.late,
        )
        self.subscriptions.begin(subscription, pubend, tick, since=live, matched=matched, firm=firm)
        self._report_at = turn.now_us
        if subscription.session is not None and firm:
            self._perform(turn, self._enter(turn, followed, subscription, tick))

    def confirm(self, subscriber: int, ticket: int) -> None:
        """Answer this ticket with `Confirmed` when all that was said of the subscription is on disk."""
        self.subscriptions.confirm(subscriber, ticket)

    def _enter(self, turn: Turn, followed: Followed, subscription: Subscription, tick: int) -> list[Output]:
        """A connected subscriber that has everything up to `tick`."""
        return self._pump(turn, followed, subscription) if followed.enter(subscription, tick) else []

    def detach(self, session: int) -> None:
        """The connection is gone."""
        subscription = self.subscriptions.detach(session)
        if subscription is not None:
            self._disconnect(subscription.id)

    def _disconnect(self, subscriber: int) -> None:
        subscription = self.subscriptions.find(subscriber)
        for pubend, followed in self._pubends.items():
            followed.leave(subscriber, None if subscription is None else subscription.cursors.get(pubend))

    def delete(self, turn: Turn, name: str) -> int:
        """End a subscription for good; its id."""
        subscription = self.subscriptions.delete(name)
        self._index.remove(subscription.id)
        self._disconnect(subscription.id)
        for followed in self._pubends.values():
            followed.filtering.forget(turn, subscription.id)
        return subscription.id

    def ack(self, session: int, token: Mapping[int, int], ticket: int | None = None) -> None:
        """The subscriber consumed everything up to here."""
        subscription = self.subscriptions.by_session(session)
        if subscription is None:
            raise UsageError(f"session {session} has no durable subscription to acknowledge")
        self.subscriptions.ack(subscription, token, ticket)

    def acknowledged(self, subscription: Subscription, token: CheckpointToken) -> None:
        """What the subscription acknowledged at another broker, which kept its token until now."""
        for pubend, tick in token.items():
            if pubend in subscription.cursors:
                self.subscriptions.release(subscription, pubend, tick)

    def credit(self, turn: Turn, subscriber: int) -> None:
        """The subscriber has room again."""
        out: list[Output] = []
        subscription = self.subscriptions.find(subscriber)
        if subscription is not None and subscription.session is not None:
            for followed in self._pubends.values():
                if subscriber in followed.catchups:
                    out += self._pump(turn, followed, subscription)
        self._perform(turn, out)

    # ---- knowledge

    def learn(self, turn: Turn, pubend: int, segment: Segment) -> None:
        """The next contiguous knowledge of a pubend, filtered with at least `need`."""
        followed = self._pubends[pubend]
        constream = followed.constream
        if segment.end <= constream.live:
            return
        segment = segment.cut(constream.live, segment.end)
        groups = [] if segment.batch is None else self._index.match(segment.batch)
        messages, behind = constream.learn(turn, segment, groups, self._room)
        self._ledger.moved[pubend] = None
        if followed.ahead:
            followed.settle(lambda number: self.subscriptions.by_id(number).cursors[pubend])
        for message in messages:
            self._note(message)
        for subscriber in behind:
            subscription = self.subscriptions.by_id(subscriber)
            cursor = subscription.cursors[pubend]
            tick = max(segment.start, cursor.sent_to)
            if followed.ahead.pop(subscriber, None) is None:
                cursor.count_to(tick)
            followed.behind(subscription, tick)
        self._perform(turn, [*messages, *self._pump_idle(turn, followed)])

    def wanted(self, pubend: int) -> bool:
        """Somebody is catching up: `answer` wants to see what arrives."""
        followed = self._pubends.get(pubend)
        return followed is not None and bool(followed.catchups)

    def answer(self, turn: Turn, pubend: int, segments: list[Segment], subscriber: int | None = None) -> None:
        """Knowledge that came out of order, for all that catch up; or was found here for one's `Wants`."""
        followed = self._pubends.get(pubend)
        if followed is None:
            return
        need = self._need()
        out: list[Output] = []
        asked = followed.catchups if subscriber is None else {subscriber: followed.catchups.get(subscriber)}
        for subscriber, catchup in list(asked.items()):
            if catchup is None:
                continue
            wanted = [catchup.learn(segment, need) for segment in segments]
            if any(wanted):
                if pubend >> 32 == self._broker:
                    catchup.pause()  # a read of the log ends when it is enough: ask for the rest
                out += self._pump(turn, followed, self.subscriptions.by_id(subscriber))
        self._perform(turn, out)

    # ---- catching up

    def _pump_idle(self, turn: Turn, followed: Followed) -> list[Output]:
        """Streams at the end of a round may go on: latestDelivered, or what is kept, is ahead of them."""
        out: list[Output] = []
        for subscriber in [number for number, catchup in followed.catchups.items() if catchup.idle]:
            if self._room(subscriber):
                out += self._pump(turn, followed, self.subscriptions.by_id(subscriber))
        return out

    def _pump(self, turn: Turn, followed: Followed, subscription: Subscription) -> list[Output]:
        """Deliver, then switch over, begin the next round or ask, whichever is due."""
        catchup, constream = followed.catchups[subscription.id], followed.constream
        out: list[Output] = []

        def room() -> bool:
            return self._room(subscription.id)

        def send(message: Message) -> None:
            self._note(message)
            out.append(message)

        cursor = subscription.cursors[constream.pubend]
        while True:
            counted = cursor.counted >= catchup.position
            catchup.advance(room, send)
            if counted:
                cursor.count_to(catchup.sent_to)
            if not catchup.idle:
                break
            if followed.switch(subscription, room, send):
                self._switchovers += subscription.id not in followed.catchups
                return out
            if not followed.next_round(turn, subscription):
                return out
        if not self._room(subscription.id):
            catchup.pause()
        elif not catchup.reading:
            spans = catchup.wants(turn.now_us)
            if spans:
                out.append(
                    Wants(
                        subscriber=subscription.id,
                        pubend=constream.pubend,
                        spans=tuple(spans),
                        need=self._need(),
                    )
                )
        return out

    def _note(self, message: Message) -> None:
        """Remember what subscribers were sent."""
        pubend, end, size = message.pubend, message.end, message.size
        ticks = message.ticks() if isinstance(message, Deliver) else None
        events = None if ticks is None else SentEvents.at(ticks)
        last = end if events is None else events.last
        for number in message.subscribers:
            self._spend(number, size)
            cursor = self.subscriptions.by_id(number).cursors[pubend]
            cursor.last_event = last
            if isinstance(message, DeliverGap):
                cursor.last_gap = max(cursor.last_gap, end)
                cursor.skipped(end, message.events)
                cursor.mark_sent(end)
            elif events is not None:
                cursor.sent(end, events)

    # ---- storage

    def _on_record(self, pubend: int, turn: Turn) -> None:
        """The disk said what became of a filtering record."""
        self._ledger.moved[pubend] = None
        self._perform(turn, self._pump_idle(turn, self._pubends[pubend]))

    def _on_read(self, pubend: int, turn: Turn, buffers: list[ReadBuffer]) -> None:
        """What the PFS remembers for subscribers that catch up; reads of those who left are cancelled."""
        followed = self._pubends[pubend]
        out: list[Output] = []
        for buffer in buffers:
            subscription = self.subscriptions.by_id(buffer.subscriber)
            followed.plan(subscription, buffer)
            out += self._pump(turn, followed, subscription)
        self._perform(turn, out)

    def _on_answer(self, turn: Turn, answered: Answered) -> None:
        """The disk said what became of what was acknowledged, and of beginnings."""
        out: list[Output] = [
            Confirmed(subscriber=number, ticket=ticket, error=answered.error)
            for number, ticket in answered.tickets
        ]
        for number, pubend in answered.firm:
            subscription = self.subscriptions.by_id(number)
            if subscription.session is not None and self.position(pubend) is not None:
                out += self._enter(
                    turn, self._pubends[pubend], subscription, subscription.cursors[pubend].sent_to
                )
        self._perform(turn, out)

    # ---- time

    def tick(self, turn: Turn) -> None:
        """The end of a turn: what is to be saved, told, reported or asked again."""
        out: list[Output] = []
        now_us = turn.now_us
        if now_us >= self._silence_at:
            self._silence_at = now_us + SILENCE_US
            out += self._tell_silence()
        if self._may_save:
            self._save(turn)
        for followed in self._pubends.values():
            for subscriber, catchup in list(followed.catchups.items()):
                deadline = catchup.next_deadline()
                if deadline is not None and deadline <= now_us:
                    out += self._pump(turn, followed, self.subscriptions.by_id(subscriber))
        if now_us >= self._report_at:
            self._report_at = now_us + REPORT_US
            out += self._reports(turn)
        self._perform(turn, out)

    @property
    def _may_save(self) -> bool:
        """Else a disk that hangs has enough to do: what changes is saved when it has answered."""
        return self._backlog.saves < MAX_SAVES or self._closing

    def _save(self, turn: Turn) -> None:
        now_us = turn.now_us
        if now_us < self._save_at or not self._ledger.moved:
            self.subscriptions.flush(turn)
            return
        self._save_at = now_us + SAVE_US
        if now_us >= self._kept_at:
            self._kept_at = now_us + max(KEPT_US, self._advance_kept(turn) * KEPT_ROW_US)
        self.subscriptions.flush(turn)
        self._save_delivered(turn)

    def close(self) -> None:
        """The process ends: the next `tick` saves all that there is to save."""
        self._save_at = 0
        self._closing = True
        self.subscriptions.close()

    def next_deadline(self) -> int:
        deadlines = [self._report_at, self._silence_at]
        if self._may_save and self._ledger.moved:
            deadlines.append(self._save_at)
        deadline = self.subscriptions.next_deadline() if self._may_save else None
        if deadline is not None:
            deadlines.append(deadline)
        for followed in self._pubends.values():
            deadlines += [
                at for catchup in followed.catchups.values() if (at := catchup.next_deadline()) is not None
            ]
        return min(deadlines)

    def _save_delivered(self, turn: Turn) -> None:
        """latestDelivered, after the checkpoint that remembers holes below it."""
        latest: dict[int, int] = {}
        for pubend in self._ledger.moved:
            followed = self._pubends.get(pubend)
            if followed is not None:
                followed.filtering.checkpoint(turn)
                latest[pubend] = followed.constream.latest_delivered
        self._ledger.save(turn, latest)

    def released(self, pubend: int) -> int:
        """released(p) = min(latestDelivered(p), min released(s, p)), of what is on disk."""
        saved, least = self._ledger.saved[pubend], self.subscriptions.released(pubend)
        return saved if least is None else min(saved, least)

    def _reports(self, turn: Turn) -> list[Output]:
        """What is news of each pubend; what is released of its filtering records may go."""
        out: list[Output] = []
        # A subscription that has not begun on a pubend yet holds what is to come for it.
        ended = not len(self.subscriptions)
        for pubend, followed in self._pubends.items():
            released, delivered = self.released(pubend), self._ledger.saved[pubend]
            report = self._reporter.report(pubend, released, delivered, ended=ended)
            if report is not None:
                out.append(Reported(pubend=pubend, report=report))
                followed.filtering.chop(turn, released)
        return out

    # ---- silence

    def _tell_silence(self) -> list[Output]:
        """Silence messages to those who keep their token and have everything else."""
        out: list[Output] = []
        for pubend, followed in self._pubends.items():
            live = followed.constream.live
            for number in list(followed.constream.members):
                subscription = self.subscriptions.by_id(number)
                if not subscription.kept_here:
                    out += self._silence(subscription, pubend, live)
        return out

    def _silence(self, subscription: Subscription, pubend: int, end: int) -> list[Output]:
        """A silence message up to `end`, unless the subscriber has had one or has no room for it."""
        cursor = subscription.cursors[pubend]
        if cursor.sent_to >= end or not self._room(subscription.id):
            return []
        silence = Deliver(subscribers=(subscription.id,), pubend=pubend, start=cursor.sent_to, end=end)
        self._spend(subscription.id, silence.size)
        cursor.mark_sent(end)
        return [silence]

    def _advance_kept(self, turn: Turn) -> int:
        """Move tokens that are kept here over silence, as far as it is on disk. How many moved: each is a
        row.

        Whoever is connected is told first. Should this broker die, its client goes on elsewhere with what it
        remembers; silence that is released by then would be a gap to it.
        """
        advanced = 0
        for subscription in self.subscriptions:
            if not subscription.kept_here or subscription.moved_at is not None:
                continue
            tells = subscription.session is not None and not subscription.shared
            for pubend, cursor in subscription.cursors.items():
                followed = self._pubends.get(pubend)
                if followed is None or not followed.filtering.recovered:
                    continue
                end = _silent_to(followed, subscription.id, cursor)
                if end <= cursor.released:
                    continue
                if tells:
                    self._perform(turn, self._silence(subscription, pubend, end))
                    if cursor.sent_to < end:
                        continue  # it has no room now
                cursor.mark_sent(end)
                self.subscriptions.release(subscription, pubend, end)
                advanced += 1
        return advanced

    # ---- inspection

    def _matched(self, subscriber: int, pubend: int) -> int:
        followed = self._pubends.get(pubend)
        return 0 if followed is None else followed.filtering.matched(subscriber)

    def metrics(self) -> dict[str, int]:
        return {
            "durable_subscriptions": len(self.subscriptions),
            "durable_subscriptions_connected": sum(
                subscription.session is not None for subscription in self.subscriptions
            ),
            "durable_catchup_streams": sum(len(followed.catchups) for followed in self._pubends.values()),
            "durable_switchovers_total": self._switchovers,
        }

    def lag(self, subscription: Subscription, now_us: int) -> tuple[int, int]:
        """Events and microseconds that a subscription is behind."""
        return self.subscriptions.lag(subscription, now_us, self._matched)

    def lag_here(self, subscription: Subscription, broker: int) -> int:
        """Events of pubends of that broker that were matched and are not acknowledged."""
        return sum(
            cursor.lag(self._matched(subscription.id, pubend))
            for pubend, cursor in subscription.cursors.items()
            if pubend >> 32 == broker and not is_history(pubend)
        )

    def row(self, subscription: Subscription, now_us: int, done: int = 0) -> dict[str, object]:
        """One subscription; `done`: events acknowledged above the token, of a shared one."""
        row = self.subscriptions.status(subscription, now_us, self._matched, done)
        return {**row, "mode": self._mode(subscription)}

    def _mode(self, subscription: Subscription) -> str:
        """In which streams a subscription is: consolidated in all, or catching up in some; "" while away."""
        if subscription.session is None:
            return ""
        catches_up = any(subscription.id in followed.catchups for followed in self._pubends.values())
        return "catchup" if catches_up else "consolidated"

    def status(self) -> dict[str, object]:
        return {
            "constreams": [followed.constream.status() for followed in self._pubends.values()],
            "filtering": [followed.filtering.status() for followed in self._pubends.values()],
            "catching_up": sum(len(followed.catchups) for followed in self._pubends.values()),
        }

    def check(self) -> None:
        self.subscriptions.check()
        if len(self._index) != len(self.subscriptions):
            raise BugError("hosting: the index does not hold exactly the subscriptions")
        if self.awaited & self._pubends.keys():
            raise BugError("hosting: a pubend that is followed has a second place")
        for pubend, followed in self._pubends.items():
            followed.constream.check()
            followed.filtering.check()
            for number, catchup in followed.catchups.items():
                catchup.check()
                if number in followed.constream or self.subscriptions.by_id(number).session is None:
                    raise BugError(f"hosting: subscriber {number} is in two streams, or not connected")
            for subscription in self.subscriptions:
                entered = subscription.id in followed.constream or subscription.id in followed.catchups
                cursor = subscription.cursors.get(pubend)
                may = subscription.session is not None and followed.filtering.recovered
                if entered != (may and cursor is not None and cursor.firm):
                    raise BugError(
                        f"hosting: subscriber {subscription.id} is in no stream, or in one too many"
                    )


def _silent_to(followed: Followed, number: int, cursor: Cursor) -> int:
    """Up to here all that the subscription has not acknowledged is silence."""
    latest = followed.constream.latest_delivered
    if number in followed.constream:
        return latest if cursor.released >= cursor.last_event else cursor.released
    if number in followed.catchups:
        return cursor.released
    settled = cursor.settled
    silent = settled >= cursor.since and followed.filtering.silent(number, settled)
    return latest if silent else min(settled, latest)
