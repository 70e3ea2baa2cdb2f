"""What a client is owed: its subscriptions, what they know of their streams, and credit.

Credit belongs to one connection. Each begins with a whole window, and what the application holds of earlier
ones is a debt: consuming pays it before any credit goes out, so all that is held shrinks to one window
again. A plain subscription begins again only once that debt is within one window. Hence a client holds less
than two windows and a frame, however often its connections break.

After a reconnect a plain subscription begins anew, and what it missed meanwhile is unknown, and said so
(`streams`). A durable one, and a reader of a range, go on where they were. A consumer of a shared one begins
with nothing: what it held is with others now. A durable one that was deleted meanwhile, or given up with its
broker, begins anew, and what it missed is said, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from postroad.client.effects import Acknowledged, Began, Delivered, Effect, Ended, Missed, Passed
from postroad.client.streams import Streams
from postroad.errors import (
    BugError,
    PeerError,
    PostroadError,
    SelectorError,
    UnavailableError,
    UsageError,
    from_wire,
)
from postroad.events import EventBatch, Gap
from postroad.events.token import CheckpointToken
from postroad.ids import pubend_text
from postroad.units import MILLISECOND_US
from postroad.wire import frames as wire
from postroad.wire.frames import Kind, Limits

AGAIN_US: Final = 500 * MILLISECOND_US  # between tries to go on with a durable subscription
MAX_ACKING: Final = 10_000  # acknowledgements that wait for the broker's disk


@dataclass(slots=True)
class _Subscription:
    request: wire.Subscribe
    began: bool = False  # the application was told so; from then on nothing may be lost in silence
    running: bool = False  # the broker of this connection has taken it
    torn_us: int | None = None  # began, but not in force since then (the broker's clock)
    tear_told: bool = False  # torn, and the application knows it already
    # Durable, and without its broker: since when (the broker's clock), and what was known then.
    left: tuple[int, dict[int, int]] | None = None
    streams: Streams = field(default_factory=Streams)
    acked: CheckpointToken = field(default_factory=CheckpointToken)  # where it began, or acknowledged since
    acking: dict[int, wire.Ack] = field(default_factory=dict)  # not confirmed, by ticket
    born: int = 0  # which one of its name it is; 0: its broker does not say
    epoch: int = 0  # its last attachment, if a broker keeps its token; 0: that broker alone knows it
    refused_us: int | None = None  # it could not go on since then
    again_us: int | None = None  # when it is tried again

    def resume_request(self) -> wire.Subscribe:
        """What begins it on a new connection. It goes on after what was acknowledged, not after what was
        given out, since a broker takes a token for consumed and an application may crash and come back with
        an older one. What comes again is dropped by `streams`. Where a broker keeps the token this says what
        we remember of it, in case that broker is dead."""
        if self.request.until and self.began:
            known = {**self.acked, **self.streams.known}
            return msgspec.structs.replace(self.request, token=CheckpointToken(known).to_json())
        if not self.request.durable or not self.began or (self.request.ack and not self.epoch):
            return self.request
        return msgspec.structs.replace(self.request, token=self.acked.to_json(), epoch=self.epoch)


class Inbox:
    """All subscriptions of a client."""

    def __init__(self, window: int, patience_us: int) -> None:
        self._window = window
        self._patience_us = patience_us  # a durable subscription that cannot go on ends after this long
        self._subscriptions: dict[int, _Subscription] = {}
        self._last_number = 0
        self._last_ticket = 0
        self.outstanding = 0  # bytes handed to the application and not consumed
        # Bytes consumed and not yet given back as credit; negative: a debt, held of earlier connections.
        self._consumed = 0
        self._waiting: list[int] = []  # up: subscriptions to begin again once the debt is within a window

    def __len__(self) -> int:
        return len(self._subscriptions)

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._subscriptions

    # --- the connection

    @property
    def has_shared(self) -> bool:
        """Whether there is a consumer of a shared subscription."""
        return any(subscription.request.shared for subscription in self._subscriptions.values())

    def opened(self) -> None:
        self._consumed = -self.outstanding

    def welcomed(self) -> list[wire.Message]:
        """What begins subscriptions of earlier connections; some only later, see `due`."""
        begin: list[wire.Message] = []
        for number, subscription in self._subscriptions.items():
            if subscription.torn_us is None:
                begin.append(subscription.resume_request())
            else:
                self._waiting.append(number)
        return begin + self.due()

    def due(self) -> list[wire.Message]:
        """Subscriptions that waited and need not any more, because there is room for what they bring."""
        if not self._waiting or -self._consumed > self._window:
            return []
        begin: list[wire.Message] = [self._subscriptions[number].resume_request() for number in self._waiting]
        self._waiting.clear()
        return begin

    def stop_waiting(self) -> None:
        self._waiting.clear()

    def closed(self, torn_us: int) -> list[Effect]:
        """The connection was lost; by the broker's clock it was there until then."""
        out: list[Effect] = []
        self._waiting.clear()
        for subscription in self._subscriptions.values():
            subscription.again_us = None
            subscription.running = False
            if subscription.request.shared:
                out += _lost_acks(subscription)
            if subscription.request.durable or subscription.request.until:
                if subscription.left is None:
                    subscription.left = (torn_us, dict(subscription.streams.known))
                continue
            subscription.streams.tear()
            subscription.tear_told = False
            if subscription.began and subscription.torn_us is None:
                subscription.torn_us = torn_us
        return out

    # --- subscriptions

    def add(self, request: wire.Subscribe) -> wire.Subscribe:
        """With its number."""
        self._last_number += 1
        request = msgspec.structs.replace(request, number=self._last_number)
        self._subscriptions[request.number] = _Subscription(request)
        return request

    def remove(self, number: int) -> tuple[bool, list[Effect]]:
        """Whether the broker is to be told, and what the application is."""
        subscription = self._subscriptions.pop(number, None)
        if subscription is None:
            return False, []
        waited = number in self._waiting
        if waited:
            self._waiting.remove(number)
        return not waited, _lost_acks(subscription)

    def subscribed(self, message: wire.Subscribed, at_us: int) -> tuple[list[Effect], Iterable[wire.Message]]:
        """What the application is told, and what is to be said again."""
        subscription = self._subscriptions.get(message.number)
        if subscription is None:  # unsubscribed meanwhile
            return [], ()
        out = self._tell_torn(subscription, at_us)
        subscription.torn_us = subscription.refused_us = None
        subscription.tear_told = False
        token = _token(message.token)
        out.append(Began(number=message.number, missing=message.missing, token=token))
        if not subscription.began:
            subscription.streams.go_on(token)
        elif subscription.left is not None and _is_other(subscription, message):
            out += self._tell_anew(subscription, *subscription.left, token, at_us)
        if not subscription.began or subscription.request.ack:
            subscription.acked = subscription.acked.maximum(token)
        subscription.born = message.born or subscription.born
        subscription.epoch = message.epoch
        subscription.left = None
        subscription.began = subscription.running = True
        return out, tuple(subscription.acking.values())

    def _tell_torn(self, subscription: _Subscription, at_us: int) -> list[Effect]:
        """Begun again after a reconnect. Streams it knew report their ticks as they go on; this Gap is for
        those it did not know, and for those that never go on."""
        start = subscription.torn_us
        if start is None or at_us <= start:
            return []
        subscription.torn_us = at_us
        gap = Gap(pubend="", start=start, end=at_us)
        return [Missed(number=subscription.request.number, gap=gap)]

    def _tell_anew(
        self,
        subscription: _Subscription,
        left_us: int,
        left: dict[int, int],
        token: CheckpointToken,
        at_us: int,
    ) -> list[Effect]:
        """A Gap for each stream it knew, and one for all others. A shared one knows of none."""
        gaps: list[Gap] = []
        if subscription.request.shared or not token.keys() <= left.keys():
            gaps.append(Gap(pubend="", start=left_us, end=at_us))
        if not subscription.request.shared:
            gaps += subscription.streams.begin_anew(left, token)
        return [Missed(number=subscription.request.number, gap=gap) for gap in gaps]

    def ended(self, message: wire.Ended, now_us: int) -> list[Effect]:
        subscription = self._subscriptions.get(message.number)
        if subscription is None:
            return []
        error = _ended_error(message, subscription.request.where) if message.code else None
        # Of a reader that was taken the broker has waited long enough for who is away.
        ranged = subscription.request.until and not subscription.running
        resumes = subscription.began and (subscription.request.durable or ranged)
        if isinstance(error, UnavailableError) and resumes:
            # Whoever keeps its token may be away for a while: it goes on when that one is back.
            if subscription.refused_us is None:
                subscription.refused_us = now_us
            if now_us - subscription.refused_us < self._patience_us:
                subscription.again_us = now_us + AGAIN_US
                return []
        del self._subscriptions[message.number]
        return [*_lost_acks(subscription), Ended(number=message.number, error=error)]

    def next_deadline(self) -> int | None:
        tries = [
            subscription.again_us
            for subscription in self._subscriptions.values()
            if subscription.again_us is not None
        ]
        return min(tries, default=None)

    def tick(self, now_us: int) -> list[wire.Message]:
        """Durable subscriptions to be tried again."""
        begin: list[wire.Message] = []
        for subscription in self._subscriptions.values():
            if subscription.again_us is not None and subscription.again_us <= now_us:
                subscription.again_us = None
                begin.append(subscription.resume_request())
        return begin

    # --- deliveries

    def delivered(self, frame: bytes, limits: Limits, at_us: int) -> list[Effect]:
        batch = EventBatch.parse(frame, limits, expect=Kind.DELIVERY)
        number = batch.channel
        subscription = self._subscriptions.get(number)
        self.outstanding += len(frame)
        if subscription is None:  # unsubscribed meanwhile
            self.consumed(len(frame))
            return []
        out: list[Effect] = []
        if subscription.torn_us is not None and not subscription.tear_told:
            # The nearest streams begin before all have: the application must not take this as unbroken.
            out = self._tell_torn(subscription, at_us)
            subscription.tear_told = True
        shared = subscription.request.shared
        gap, rows = _taken(batch) if shared else subscription.streams.take(batch, limits)
        if gap is not None:
            if subscription.left is not None:  # what is told now, SUBSCRIBED need not tell again
                subscription.left[1][batch.pubend] = gap.end
            # A Gap alone takes its part of the window too: who never reads must not collect them for ever.
            out.append(Missed(number=number, gap=gap, size=len(frame) if rows is None else 0))
        if rows is not None:
            out.append(Delivered(number=number, batch=rows, size=len(frame)))
        elif gap is None:
            self.consumed(len(frame))
            if subscription.request.durable and not batch.count and not batch.lost:
                out.append(Passed(number=number, pubend=batch.pubend, tick=batch.end))
        return out

    def received(self, size: int) -> None:
        """A frame of best-effort events, which waits for nobody."""
        self.outstanding += size
        self.consumed(size)

    def consumed(self, size: int) -> None:
        """The application took this many bytes of deliveries."""
        self.outstanding -= size
        self._consumed += size

    def take_credit(self) -> int:
        """Goes back a quarter window at a time."""
        if self._consumed < self._window // 4:
            return 0
        credit, self._consumed = self._consumed, 0
        return credit

    # --- acknowledgements

    def acknowledge(
        self,
        number: int,
        token: Mapping[int, int],
        events: Mapping[int, tuple[int, ...]],
        *,
        rejected: Mapping[int, tuple[int, ...]],
        delay_us: int,
        confirm: bool,
    ) -> wire.Ack:
        """The message, with a ticket if it is to be confirmed; until it is, it may be refused."""
        subscription = self._subscriptions[number]
        if not confirm:
            subscription.acked = subscription.acked.maximum(CheckpointToken(token))
            return _ack(number, token, events, rejected, delay_us, 0)
        if len(subscription.acking) >= MAX_ACKING:
            raise UsageError(f"more than {MAX_ACKING} acknowledgements at once")
        self._last_ticket += 1
        ack = _ack(number, token, events, rejected, delay_us, self._last_ticket)
        subscription.acking[ack.ticket] = ack
        return ack

    def acked(self, message: wire.Acked) -> list[Effect]:
        subscription = self._subscriptions.get(message.number)
        ack = None if subscription is None else subscription.acking.pop(message.ticket, None)
        if subscription is None or ack is None:
            return []
        error = from_wire(message.code, message.reason) if message.code else None
        if error is None:
            subscription.acked = subscription.acked.maximum(_token(ack.token))
        return [Acknowledged(ticket=message.ticket, error=error)]

    def check(self) -> None:
        if self.outstanding < 0:
            raise BugError("more was consumed than was delivered")
        if not set(self._waiting) <= self._subscriptions.keys():
            raise BugError("subscriptions that are over wait to begin again")
        for subscription in self._subscriptions.values():
            subscription.streams.check()


def _taken(batch: EventBatch) -> tuple[Gap | None, EventBatch | None]:
    """Of a shared subscription ticks do not only increase: what another consumer left comes late."""
    if batch.lost:
        return Gap(pubend=pubend_text(batch.pubend), start=batch.start, end=batch.end), None
    return None, batch if batch.count else None


def _ack(
    number: int,
    token: Mapping[int, int],
    events: Mapping[int, tuple[int, ...]],
    rejected: Mapping[int, tuple[int, ...]],
    delay_us: int,
    ticket: int,
) -> wire.Ack:
    return wire.Ack(
        number=number,
        token=CheckpointToken(token).to_json() if token else "",
        events=dict(events),
        ticket=ticket,
        rejected=dict(rejected),
        delay_us=delay_us,
    )


def _is_other(subscription: _Subscription, message: wire.Subscribed) -> bool:
    """It is not the one that it was: one of the same name was created meanwhile, and began then. `created` is
    said once, and may be lost with its connection. Since a time it began there again, unless somebody else
    made it."""
    other = 0 not in (subscription.born, message.born) and subscription.born != message.born
    since_us = subscription.request.since_us
    began_there = bool(since_us) and all(tick <= since_us for tick in _token(message.token).values())
    return (message.created or other) and not began_there


def _lost_acks(subscription: _Subscription) -> list[Effect]:
    error = UnavailableError(
        "the subscription was over before the broker confirmed the acknowledgement: what it covers may come "
        "again, or not"
    )
    out: list[Effect] = [Acknowledged(ticket=ticket, error=error) for ticket in subscription.acking]
    subscription.acking.clear()
    return out


def _token(text: str) -> CheckpointToken:
    """The token of a SUBSCRIBED."""
    try:
        return CheckpointToken.from_json(text) if text else CheckpointToken()
    except UsageError as error:
        raise PeerError(f"the broker sent a token that cannot be read: {error}") from None


def _ended_error(message: wire.Ended, where: str) -> PostroadError:
    """The broker's error; for a condition, with the position it points at."""
    pointer = _POINTER.match(message.reason)
    if message.code == SelectorError.code and pointer is not None:
        return SelectorError(pointer[1], text=where, position=int(pointer[2]) - 1)
    return from_wire(message.code, message.reason)


# How SelectorError prints: the message, the place, and the text with a caret on lines of their own.
_POINTER: Final = re.compile(r"(.*) at character (\d+)(?:\n|$)", re.DOTALL)
