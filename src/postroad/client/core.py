"""One client's session with the network, over any number of connections; no I/O and no clock.

The driver reports what happened (`handle`), the application's calls come in as methods, and both return
effects, for the driver and for the application (`effects`). One connection at a time: the addresses are
tried in turn (`places`), with a backoff after each round, and a lost connection is dialled again at the same
broker first, since only that one recognises retries of what it accepted without telling us. After a
reconnect, unaccepted publishes are sent again (`outbox`) and subscriptions begin again (`inbox`). Without a
broker for `outage_us`, calls fail, and durable publishes are withdrawn.

A broker that stops says where others are, and the client goes there.

A core that `seeks` has its driver look for brokers (discovery) when it knows of none that answers, and from
time to time while it is up, in case another has become much better.

Clock skew (spec T5, V9): ids carry our clock plus an adjustment, the offset of the broker's clock, which is
measured at connect and by every pong like that between brokers (`clocks`). A broker that finds our ids too
far from its clock says so, and what was measured before counts no more. Ahead is certain and takes effect at
once. Behind may mean that they waited here, and ids never come back from a jump ahead: we measure, with a
ping.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Final

from postroad.client.effects import (
    Answered,
    Closed,
    Delivered,
    DialFailed,
    Down,
    Effect,
    Failed,
    Found,
    Heard,
    Input,
    Lost,
    Missed,
    Opened,
    Outage,
    Progress,
    Received,
    Seek,
    Stored,
    Tried,
    Up,
)
from postroad.client.inbox import Inbox
from postroad.client.outbox import Outbox
from postroad.client.places import MAX_PLACES, Places, Reviews
from postroad.client.receiver import Receiver
from postroad.client.repair.session import Item, Session
from postroad.client.repair.settings import RepairSettings
from postroad.client.sender import Sender
from postroad.client.settings import CLIENT_LIMITS, ClientSettings, check_texts
from postroad.clocks import ClockOffset
from postroad.errors import (
    BugError,
    DamagedError,
    PeerError,
    PostroadError,
    UnavailableError,
    UsageError,
    from_wire,
)
from postroad.events import EventBatch, Gap, Value
from postroad.ids import MessageId
from postroad.links.greetings import DatagramPath
from postroad.links.handshake import check_welcome, printable, smaller
from postroad.seam.datagrams import Datagram, SendTo
from postroad.seam.effects import Close, Dial, Send
from postroad.wire import frames as wire
from postroad.wire.datagrams import BEST_EFFORT, GREETING, datagram_kind
from postroad.wire.frames import PROTOCOL_VERSION, Kind

MAX_REQUESTS: Final = 1024
MAX_BUFFER: Final = (1 << 63) - 1


class State(Enum):
    IDLE = "idle"  # nothing under way: before start, or waiting to dial again
    SEEKING = "seeking"  # the driver looks for brokers
    DIALLING = "dialling"
    OPENING = "opening"  # HELLO sent, WELCOME awaited
    UP = "up"
    OVER = "over"  # closed by the application, or failed for good


class ClientCore:
    """See the module's docstring. `draw(n)` gives a random number in 0..n-1."""

    def __init__(self, settings: ClientSettings, *, draw: Callable[[int], int]) -> None:
        self.settings = settings
        self.outbox = Outbox(max_bytes=settings.publish_bytes, max_events=settings.publish_events)
        self.inbox = Inbox(settings.window, settings.outage_us)
        self.sender = Sender(settings.outage_us)
        self.receiver = Receiver(settings.outage_us)
        self.state = State.IDLE
        self._clock = ClockOffset()  # of the broker; while there is none, of the last one
        self.limits = CLIENT_LIMITS
        self._host = ""  # OPENING and UP: the broker's
        self._datagrams: DatagramPath | None = None  # UP: to the broker
        self.effort = Session(draw=draw, subscribe=self._subscribe_own, unsubscribe=self._unsubscribe_own)
        self._clock_ms = 0  # of the call under way, for ids of best-effort events
        self._draw = draw
        self._connection: int | None = None  # set in OPENING and UP
        self._welcomed = False  # some broker accepted us once: from then on we dial for ever
        self.principal = ""  # whom the last broker takes us for
        self._publisher = (0, b"")  # the last number that a broker gave us, and the key to it
        self._publishers: dict[str, tuple[int, bytes]] = {}  # likewise, by address, at most MAX_PLACES
        self._places = Places(settings.addresses)
        self._reviews = Reviews()
        self._review_us: int | None = None  # UP, and it seeks: when to look for a better broker
        self._reviewing = False  # UP: the driver looks for one
        self._backoff_us = 0
        self._sought = (
            False  # what is tried was found since the last pause: to seek again would find it again
        )
        self._dial_us: int | None = None  # IDLE: when to dial
        self._hello_us = 0
        self._up_us = 0  # UP: since when
        self._refused = False  # the last connection that was up ended as a breach of the protocol of ours
        self._heard_us = 0  # OPENING, UP: something was last received
        self._pinged_us: int | None = None  # UP: an unanswered ping was sent
        self._down_us: int | None = None  # no broker since; None while UP
        self._outage = False  # an Outage was reported for this time down
        self._requests: set[int] = set()
        self._last_request = 0
        self._out: list[Effect] = []

    # --- the driver's side

    def look_further(self) -> None:
        """Before the start: seek, where none of the addresses answers."""
        self._need(State.IDLE)
        self.settings = replace(self.settings, seeks=True, review_us=0)

    def start(self, now_us: int) -> list[Effect]:
        self._need(State.IDLE)
        self._down_us = now_us
        self._set_out()
        return self._take()

    def handle(self, inputs: Sequence[Input], now_us: int) -> list[Effect]:
        """Everything that came in since the last call; also, with nothing, when next_deadline is due.

        What the table does not list is late, not wrong: it concerns a connection given up a moment ago.
        """
        self._clock_ms = (now_us + self.skew_us) // 1000
        for item in inputs:
            handler = _TRANSITIONS.get((self.state, type(item)))
            if handler is not None:
                handler(self, item, now_us)
        self._tick(now_us)
        self._send_publishes(now_us)
        self._send_queued(now_us)
        return self._take()

    def next_deadline(self) -> int | None:
        settings = self.settings
        due: list[int] = []
        if self.state is State.IDLE and self._dial_us is not None:
            due.append(self._dial_us)
        elif self.state is State.OPENING:
            due.append(self._hello_us + settings.handshake_us)
        elif self.state is State.UP:
            silent = self._heard_us + settings.ping_us
            due.append(silent if self._pinged_us is None else self._dead_at(self._pinged_us))
            retry_us = self.inbox.next_deadline()
            if retry_us is not None:
                due.append(retry_us)
            if self._review_us is not None:
                due.append(self._review_us)
            due += self._effort_deadlines()
        if self._down_us is not None and not self._outage and self.state is not State.OVER:
            due.append(self._down_us + settings.outage_us)
        if self.state is not State.OVER:
            queued = (self.sender.next_deadline(), self.receiver.next_deadline())
            due += [at_us for at_us in queued if at_us is not None]
        return min(due, default=None)

    @property
    def skew_us(self) -> int:
        """The broker's clock minus ours."""
        return self._clock.offset_us

    def _dead_at(self, pinged_us: int) -> int:
        return pinged_us + self.settings.dead_us - self.settings.ping_us

    def _tick(self, now_us: int) -> None:
        settings = self.settings
        if self.state is State.IDLE and self._dial_us is not None and now_us >= self._dial_us:
            self._set_out()
        elif self.state is State.OPENING and now_us >= self._hello_us + settings.handshake_us:
            self._drop(UnavailableError("the broker did not answer the handshake"), now_us)
        elif self.state is State.UP:
            self._send_all(self.inbox.tick(now_us))
            self._tick_effort(now_us)
            if self._pinged_us is not None:
                if now_us >= self._dead_at(self._pinged_us):
                    self._drop(UnavailableError("the broker fell silent"), now_us)
            elif now_us >= self._heard_us + settings.ping_us:
                self._ping(now_us)
            if self._review_us is not None and now_us >= self._review_us:
                self._review_us = None
                self._reviewing = True
                self._out.append(Seek())
        if self.state is not State.OVER:
            self._out += self.sender.tick(now_us)
            requests, effects = self.receiver.tick(now_us)
            self._send_all(requests)
            self._out += effects
        if (
            self._down_us is not None
            and not self._outage
            and self.state is not State.OVER
            and now_us >= self._down_us + settings.outage_us
        ):
            self._outage = True
            error = self._unreachable()
            self._expire(error)
            self._out.append(Outage(error=error))

    def _expire(self, error: UnavailableError) -> None:
        """Whoever waits for a durable event is told that it failed, so it must not be sent after that."""
        unsent, sent = self.outbox.expire()
        if unsent:
            why = UnavailableError(f"not sent, and withdrawn: {error}")
            self._out.append(Stored(ordinals=unsent, error=why))
        if sent:
            why = UnavailableError(f"sent, perhaps published, and not sent again: {error}")
            self._out.append(Stored(ordinals=sent, error=why, perhaps=True))
        self._out += self.sender.expire(error)

    # --- connecting

    def _set_out(self) -> None:
        if self._places.addresses:
            self._dial()
        else:
            self._seek()

    def _dial(self) -> None:
        self.state = State.DIALLING
        self._dial_us = None
        self._out.append(Dial(self._places.current))

    def _seek(self) -> None:
        self.state = State.SEEKING
        self._dial_us = None
        if not self._reviewing:  # else what it finds serves for this
            self._out.append(Seek())
        self._reviewing = False

    def _on_found(self, item: Found, now_us: int) -> None:
        if item.choices:
            self._places.replace([choice.address for choice in item.choices])
            self._sought = True
            self._dial()
        elif not self._welcomed:
            where = f"{self._unreachable()}; " if self._places.addresses else ""
            self._fail(UnavailableError(f"{where}{item.reason}"))
        else:
            self._pause(now_us)

    def _on_reviewed(self, item: Found, now_us: int) -> None:
        """There may be a better broker. The client stays while something is under way here, and while it has
        a shared subscription, which is at this broker only."""
        if not self._reviewing:
            return
        self._reviewing = False
        self._review_us = now_us + self.settings.review_us
        better = self._reviews(item.choices, self._places.current, self._draw(2))
        stays = self.outbox.unsettled or self._requests or self.inbox.has_shared
        if better is not None and not stays:
            self._places.move([better.address, *(choice.address for choice in item.choices)])
            reason = UnavailableError("moving to a broker that is much better")
            self._drop(reason, now_us, go_elsewhere=True)

    def _on_late_found(self, _item: Found, _now_us: int) -> None:
        self._reviewing = False

    def _on_opened(self, item: Opened, now_us: int) -> None:
        self.state = State.OPENING
        self._connection = item.connection
        self._host = item.host
        self._hello_us = self._heard_us = now_us
        settings = self.settings
        # What was sent there and not answered is known by the number we had there, wherever we were since.
        publisher, resume_key = self._publishers.get(self._places.current, self._publisher)
        self.inbox.opened()
        self._send(
            wire.Hello(
                version=PROTOCOL_VERSION,
                role="client",
                name=settings.name,
                token=settings.token,
                limits=CLIENT_LIMITS,
                window=settings.window,
                time_us=now_us,
                publisher=publisher,
                resume_key=resume_key,
            )
        )

    def _on_dial_failed(self, item: DialFailed, now_us: int) -> None:
        self._places.failed(item.reason)
        self._try_next(now_us)

    def _on_late_opened(self, item: Opened, _now_us: int) -> None:
        self._out.append(Close(item.connection))

    def _on_closed(self, item: Closed, now_us: int) -> None:
        if item.connection != self._connection:
            return
        error = item.error or UnavailableError("the broker closed the connection")
        self._lost_connection(error, now_us)

    def _drop(
        self, error: PostroadError, now_us: int, *, pause: bool = False, go_elsewhere: bool = False
    ) -> None:
        """Give the connection up on our own account."""
        if self._connection is None:
            raise BugError("no connection to drop")
        self._out.append(Close(self._connection, error))
        self._lost_connection(error, now_us, pause=pause, go_elsewhere=go_elsewhere)

    def _lost_connection(
        self, error: PostroadError, now_us: int, *, pause: bool = False, go_elsewhere: bool = False
    ) -> None:
        """Dial again; if it was up, the same broker, with `pause` not at once. To `go_elsewhere` the place is
        another one already."""
        was_up = self.state is State.UP
        self._connection = None
        self._pinged_us = None
        self._review_us = None
        if not go_elsewhere:
            self._places.failed(str(error))
        if not was_up:
            self.inbox.stop_waiting()
            self._try_next(now_us)
            return
        self._close_queues()
        self.outbox.closed()
        self._down_us = now_us
        self._outage = False
        self._out += self.inbox.closed(self._heard_us + self.skew_us)
        gone = UnavailableError("the broker went away before it answered")
        for number in sorted(self._requests):
            self._out.append(Answered(number=number, error=gone, body=""))
        self._requests.clear()
        self._out.append(Down(error=error))
        lasted = self._lasted(now_us)
        if lasted:
            self._backoff_us = 0
            self._sought = False
            self._refused = False
        if pause:
            self._pause(now_us)
        elif lasted or go_elsewhere:
            self._dial()  # the same broker first, at once: it recognises what it accepted already
        else:
            self._try_next(now_us)  # a broker that takes us and drops us is as good as none

    def _lasted(self, now_us: int) -> bool:
        """Whether this connection was up for long enough to call it a success."""
        return now_us - self._up_us >= self.settings.ping_us

    def _try_next(self, now_us: int) -> None:
        if self._places.go_on():
            self._dial()
            return
        if self.settings.seeks and not self._sought:
            self._seek()
            return
        if not self._welcomed:
            self._fail(self._unreachable())
            return
        self._pause(now_us)

    def _pause(self, now_us: int) -> None:
        """Dial after a while."""
        self._sought = False
        self._backoff_us = min(
            max(self._backoff_us * 2, self.settings.backoff_us), self.settings.max_backoff_us
        )
        self.state = State.IDLE
        # Between half and all of it, so that the clients of a broker that died do not come back as one.
        self._dial_us = now_us + self._backoff_us // 2 + self._draw(self._backoff_us // 2 + 1)

    def _unreachable(self) -> UnavailableError:
        reasons = "; ".join(dict.fromkeys(self._places.failures.values()))
        where = " or ".join(self._places.addresses) or "any address"
        return UnavailableError(
            f"no broker at {where}{f' ({reasons})' if reasons else ''}: "
            "start one with `postroad up`, or name another HOST:PORT"
        )

    def _fail(self, error: PostroadError) -> None:
        self.state = State.OVER
        self._connection = None
        self.inbox.stop_waiting()
        self.outbox.closed()
        self._close_queues()
        self._out.append(Failed(error=error))

    # --- frames

    def _on_received(self, item: Received, now_us: int) -> None:
        if item.connection != self._connection:
            return
        self._heard_us = now_us
        self._pinged_us = None
        try:
            kind = wire.frame_kind(item.frame)
            if kind == Kind.DELIVERY and self.state is State.UP:
                self._on_delivery(item.frame, now_us)
                return
            if kind == Kind.BEST_EFFORT and self.state is State.UP:
                self._on_best_effort(item.frame, now_us)
                self.inbox.received(len(item.frame))
                self._give_credit()
                return
            message = wire.decode(item.frame)
            handler = _MESSAGES.get((self.state, type(message)))
            if handler is None:
                raise PeerError(f"the broker sent {type(message).__name__} while {self.state.value}")
            handler(self, message, now_us)
        except PeerError as error:
            self._send(wire.Refuse(code=error.code, reason=printable(str(error))))
            self._drop(error, now_us)

    def _on_welcome(self, message: wire.Welcome, now_us: int) -> None:
        check_welcome(message)
        self._clock = ClockOffset()
        self._clock.measured(self._hello_us, message.time_us, now_us)
        self.principal = message.principal
        self._publisher = (message.publisher, message.resume_key)
        self._publishers.pop(self._places.current, None)
        self._publishers[self._places.current] = self._publisher
        if len(self._publishers) > MAX_PLACES:
            del self._publishers[next(iter(self._publishers))]
        self.limits = smaller(CLIENT_LIMITS, message.limits)
        error = self.outbox.opened(
            publisher=message.publisher, broker=message.broker, limits=self.limits, credit=message.window
        )
        self.state = State.UP
        endpoint = (self._host, message.datagrams) if message.datagrams else None
        self._datagrams = DatagramPath(message.datagram_key, endpoint, dialled=True, now_us=now_us)
        prefix = bytes(MessageId(message.publisher, message.broker, 0, 0))[:8]
        self.effort.opened(prefix, self.limits, lambda: self.outbox.next_id(self._clock_ms))
        self._welcomed = True
        self._up_us = now_us
        self._places.arrived()
        if self.settings.seeks and self.settings.review_us:
            self._review_us = now_us + self.settings.review_us
        self._down_us = None
        self._outage = False
        self._send_all(self.inbox.welcomed())
        self.sender.opened()
        self._send_all(self.receiver.opened(now_us))
        self._out.append(Up(broker=message.name))
        if error is not None:
            self._out.append(Stored(ordinals=self.outbox.take_dropped(), error=error))
            self._out.append(Lost(error=error))

    def _on_refuse(self, message: wire.Refuse, now_us: int) -> None:
        """Being refused for what we are or do is final; anything else may pass.

        One bad frame on a connection that was up does not end an application for ever: it gets another
        try. What breaks the protocol again at once is no accident. Nobody is refused for bytes that changed
        on their way.
        """
        error = from_wire(message.code, printable(message.reason))
        if isinstance(error, DamagedError):
            final = not self._welcomed
        elif isinstance(error, PeerError) and self.state is State.UP:
            final = self._refused and not self._lasted(now_us)
        else:
            final = isinstance(error, UsageError | PeerError) or not (self._welcomed or message.go_to)
        if final:
            if self._connection is not None:
                self._out.append(Close(self._connection, error))
            self._fail(error)
        else:
            moves = self._sent_on(message.go_to)
            self._drop(error, now_us, pause=isinstance(error, PeerError), go_elsewhere=moves)
            self._refused = isinstance(error, PeerError) and not isinstance(error, DamagedError)

    def _sent_on(self, go_to: tuple[str, ...]) -> bool:
        """A broker that stops names others. True: this client goes to another place at once. One that was
        given several addresses tries the others of those first. A shared subscription is at its broker
        only."""
        if not go_to or self.inbox.has_shared:
            return False
        if self.state is not State.UP:
            self._places.add(go_to)
            return False
        given = () if self.settings.seeks else self.settings.addresses
        self._places.move([*given, *go_to][:MAX_PLACES])
        return True

    def _on_ping(self, message: wire.Ping, now_us: int) -> None:
        self._send(wire.Pong(time_us=message.time_us, at_us=now_us))

    def _on_pong(self, message: wire.Pong, now_us: int) -> None:
        self._clock.measured(message.time_us, message.at_us, now_us)
        self._out.append(Heard(pinged_us=message.time_us))

    def _on_skew(self, message: wire.Skew, now_us: int) -> None:
        self._clock.corrected(min(0, message.correction_us))
        if self._pinged_us is None:
            self._ping(now_us)

    def _ping(self, now_us: int) -> None:
        self._pinged_us = now_us
        self._send(wire.Ping(time_us=now_us))

    def _on_credit(self, message: wire.Credit, _now_us: int) -> None:
        self.outbox.credit(message.size)

    def _on_accepted(self, message: wire.Accepted, _now_us: int) -> None:
        self.outbox.accepted(message.sequence)
        stored = self.outbox.take_stored()
        if stored:
            self._out.append(Stored(ordinals=stored))
        self._out.append(Progress())

    def _on_rejected(self, message: wire.Rejected, _now_us: int) -> None:
        ids, sequence = message.ids, message.sequence
        count = self.effort.refused(ids) if ids else self.outbox.rejected(sequence)
        subject = "an event was" if count == 1 else f"{count} events published together were"
        error = from_wire(message.code, f"{subject} not taken: {message.reason}")
        dropped = self.outbox.take_dropped()  # whoever waits for a durable event is told there
        self._out.append(Stored(ordinals=dropped, error=error) if dropped else Lost(error=error))
        self._out.append(Progress())

    def _on_subscribed(self, message: wire.Subscribed, now_us: int) -> None:
        effects, say_again = self.inbox.subscribed(message, now_us + self.skew_us)
        self._out += effects
        self._send_all(say_again)

    def _on_ended(self, message: wire.Ended, now_us: int) -> None:
        self.effort.end(message.number, refused=bool(message.code))
        self._out += self.inbox.ended(message, now_us)

    def _on_acked(self, message: wire.Acked, _now_us: int) -> None:
        self._out += self.inbox.acked(message)

    def _on_attempts(self, message: wire.Attempts, _now_us: int) -> None:
        self._out.append(Tried(number=message.number, pubend=message.pubend, attempts=message.attempts))

    def _on_reply(self, message: wire.Reply, _now_us: int) -> None:
        if message.number not in self._requests:
            raise PeerError(f"reply {message.number} to no request")
        self._requests.discard(message.number)
        error = from_wire(message.code, message.body) if message.code else None
        self._out.append(Answered(number=message.number, error=error, body=message.body))

    def _on_sent(self, message: wire.Sent, now_us: int) -> None:
        self._out += self.sender.sent(message, now_us)

    def _on_receiving(self, message: wire.Receiving, now_us: int) -> None:
        self._out += self.receiver.receiving(message, now_us)

    def _on_messages(self, message: wire.Messages, now_us: int) -> None:
        self._out += self.receiver.messages(message, now_us)

    def _on_settled(self, message: wire.Settled, now_us: int) -> None:
        self._out += self.receiver.settled(message, now_us)

    def _on_delivery(self, frame: bytes, now_us: int) -> None:
        self._out += self.inbox.delivered(frame, self.limits, now_us + self.skew_us)
        self._give_credit()

    # --- best effort

    def _on_best_effort(self, frame: bytes, now_us: int) -> None:
        batch = EventBatch.parse(frame, self.limits, expect=Kind.BEST_EFFORT)
        if self.effort.is_own(batch.channel) or batch.channel in self.inbox:
            self._hand_out(self.effort.received(batch, self.limits, now_us, self.skew_us))

    def _hand_out(self, items: list[Item]) -> None:
        for item in items:
            if isinstance(item.content, Gap):
                self._out.append(Missed(number=item.number, gap=item.content))
            else:
                self._out.append(Delivered(number=item.number, batch=item.content, size=0))

    def _on_datagram(self, item: Datagram, now_us: int) -> None:
        """What is not sealed with this connection's key, or cannot be read, is dropped: UDP has no sender."""
        body = None if self._datagrams is None else self._datagrams.unseal(item, now_us)
        if self._datagrams is None or body is None:
            return
        if datagram_kind(item.data) == BEST_EFFORT:
            with contextlib.suppress(PeerError):
                self._on_best_effort(body, now_us)
        elif datagram_kind(item.data) == GREETING and self._datagrams.greeted(body):
            self._greet(now_us)

    def _greet_at(self) -> int | None:
        """When the broker is greeted next; None: never, since datagrams are of no use, or not taken."""
        return self._datagrams.next_deadline() if self._datagrams is not None and self.effort.active else None

    def _greet(self, now_us: int) -> None:
        if self._datagrams is not None and self._datagrams.endpoint is not None:
            self._out.append(SendTo(self._datagrams.endpoint, self._datagrams.greeting(now_us)))

    def _effort_deadlines(self) -> list[int]:
        dues = (self.effort.next_deadline(), self.effort.reporting.next_deadline(), self._greet_at())
        return [due_us for due_us in dues if due_us is not None]

    def _tick_effort(self, now_us: int) -> None:
        self._hand_out(self.effort.tick(now_us, self.skew_us))
        self._send_all(self.effort.reports(now_us))
        greet_us = self._greet_at()
        if greet_us is not None and now_us >= greet_us:
            self._greet(now_us)

    def _send_best_effort(self, now_us: int) -> None:
        """By datagram where they pass, else over the connection; without credit there it is dropped."""
        path = self._datagrams
        for frame in self.effort.take():
            if path is not None and path.endpoint is not None and path.passes(now_us):
                self._out.append(SendTo(path.endpoint, path.seal(BEST_EFFORT, frame)))
            elif self._connection is not None and self.outbox.spend(len(frame)):
                self._out.append(Send(self._connection, frame))

    def _subscribe_own(self, topic: str, where: str) -> int:
        number, effects = self.subscribe(wire.Subscribe(number=0, topic=topic, where=where))
        self._out += effects
        return number

    def _unsubscribe_own(self, number: int) -> None:
        self._out += self.unsubscribe(number)

    # --- the application's side

    def publish_best_effort(
        self, topic: str, payload: bytes, attributes: Mapping[str, Value] | None, now_us: int
    ) -> bytes:
        """Queue one event that nobody keeps and nobody acknowledges; its id."""
        self._clock_ms = (now_us + self.skew_us) // 1000
        return self.effort.publish(topic, payload, attributes or {}, now_us)

    def publish(
        self,
        topic: str,
        payload: bytes,
        attributes: Mapping[str, Value] | None,
        now_us: int,
        *,
        durable: bool = False,
        identity: bytes = b"",
    ) -> bytes:
        """Queue one event, while there is `outbox.room`; its id. It leaves with the next `flush`."""
        now_ms = (now_us + self.skew_us) // 1000
        return self.outbox.add(topic, attributes, payload, now_ms, durable=durable, identity=identity)

    def flush(self, now_us: int = 0) -> list[Effect]:
        """Send what was published since the last time; also the credit that is due."""
        self._send_publishes(now_us)
        return self._take()

    def _send_publishes(self, now_us: int) -> None:
        if self.state is not State.UP or self._connection is None:
            return
        self._send_best_effort(now_us)
        for frame in self.outbox.take():
            self._out.append(Send(self._connection, frame))

    def subscribe(
        self, wanted: wire.Subscribe, *, repair: RepairSettings | None = None, now_us: int = 0
    ) -> tuple[int, list[Effect]]:
        """The new subscription's number, whatever `wanted` has there; Began or Ended follows. With `repair`,
        begun at `now_us`, what is lost of best-effort events is found out and asked for."""
        if len(self.inbox) >= self.limits.subscriptions:
            raise UsageError(f"more than {self.limits.subscriptions} subscriptions on one client")
        texts = (wanted.topic, wanted.where, wanted.overflow, wanted.durable, wanted.token, wanted.ack)
        check_texts("subscription", *texts, wanted.key, wanted.until)
        if not 0 <= wanted.buffer <= MAX_BUFFER:
            raise UsageError(f"a buffer of {wanted.buffer} bytes; it has between 0 and {MAX_BUFFER}")
        request = self.inbox.add(wanted)
        if self.state is State.UP:
            self._send(request)
        effects = self._take()
        if repair is not None:
            self.effort.repair(request.number, wanted.topic, wanted.where, repair, now_us)
        return request.number, effects + self._take()

    def unsubscribe(self, number: int) -> list[Effect]:
        self.effort.end(number)
        tell, effects = self.inbox.remove(number)
        self._out += effects
        if tell and self.state is State.UP:
            self._send(wire.Unsubscribe(number=number))
        return self._take()

    def acknowledge(
        self,
        number: int,
        *,
        token: Mapping[int, int] | None = None,
        events: Mapping[int, tuple[int, ...]] | None = None,
        rejected: Mapping[int, tuple[int, ...]] | None = None,
        delay_us: int = 0,
        confirm: bool = False,
    ) -> tuple[int, list[Effect]]:
        """Everything of a durable subscription up to these ticks was consumed; of a shared one, these events,
        and those that were rejected are to be tried again after `delay_us`.

        With `confirm` Acknowledged follows, under the ticket returned. Without, and without a connection, it
        is not said: the next acknowledgement says it too.
        """
        if number not in self.inbox:
            return 0, self._take()
        ack = self.inbox.acknowledge(
            number, token or {}, events or {}, rejected=rejected or {}, delay_us=delay_us, confirm=confirm
        )
        if self.state is State.UP:
            self._send(ack)
        return ack.ticket, self._take()

    def request(self, what: str, arguments: Mapping[str, str]) -> tuple[int, list[Effect]]:
        """A question's number; Answered follows."""
        self._need(State.UP)
        if len(self._requests) >= MAX_REQUESTS:
            raise UsageError(f"more than {MAX_REQUESTS} requests at once")
        check_texts("request", what, *arguments.keys(), *arguments.values())
        self._last_request += 1
        self._requests.add(self._last_request)
        self._send(wire.Request(number=self._last_request, what=what, arguments=dict(arguments)))
        return self._last_request, self._take()

    def send_queued(self, now_us: int) -> list[Effect]:
        """What applications have sent and settled since the last time goes out."""
        self._send_queued(now_us)
        return self._take()

    def _send_queued(self, now_us: int) -> None:
        if self.state is not State.UP:
            return  # both go on with it when there is a broker again
        sends, effects = self.sender.take(now_us)
        self._send_all(sends)
        self._out += effects
        self._send_all(self.receiver.take(now_us))

    def end_session(self, session: bytes) -> list[Effect]:
        """An application sends nothing more."""
        ended = self.sender.end_session(session)
        if ended is not None:
            self._send(ended)
        return self._take()

    def receive(self, inbox: str, consumer: bytes, window: int, now_us: int) -> tuple[int, list[Effect]]:
        """A new consumer's number; Joined or InboxEnded follows."""
        number, asked = self.receiver.add(inbox, consumer, window, now_us)
        self._send_all(asked)
        return number, self._take()

    def stop_receiving(self, number: int, now_us: int) -> list[Effect]:
        """What was settled before is said first."""
        self._send_queued(now_us)
        self._send_all(self.receiver.remove(number))
        return self._take()

    def _close_queues(self) -> None:
        self.sender.closed()
        self.receiver.closed()

    def ping(self, now_us: int) -> list[Effect]:
        """Heard follows, unless the connection breaks."""
        self._need(State.UP)
        self._ping(now_us)
        return self._take()

    def consumed(self, size: int) -> None:
        """The application took this many bytes of deliveries."""
        self.inbox.consumed(size)
        self._give_credit()

    def _give_credit(self) -> None:
        if self.state is not State.UP:
            return
        self._send_all(self.inbox.due())
        credit = self.inbox.take_credit()
        if credit:
            self._send(wire.Credit(size=credit))

    def close(self) -> list[Effect]:
        if self._connection is not None:
            self._out.append(Close(self._connection))
        self._connection = None
        self.state = State.OVER
        self.inbox.stop_waiting()
        self.outbox.closed()
        self._close_queues()
        return self._take()

    def check(self) -> None:
        """The invariants."""
        if (self._connection is not None) != (self.state in (State.OPENING, State.UP)):
            raise BugError(f"connection {self._connection} while {self.state.value}")
        if {self.outbox.open, self.sender.open, self.receiver.open} != {self.state is State.UP}:
            raise BugError("the outbox and the session disagree on whether a broker is there")
        if self.state is State.IDLE and self._dial_us is None and self._down_us is not None:
            raise BugError("down, and nothing will ever dial")
        if len(self._requests) > MAX_REQUESTS:
            raise BugError("requests are out of bounds")
        if self.inbox.waits and self.state is not State.UP:
            raise BugError("subscriptions wait to begin again without a connection")
        self.outbox.check()
        self.inbox.check()
        self.sender.check()
        self.receiver.check()
        self.effort.check()

    # --- helpers

    def _need(self, state: State) -> None:
        if self.state is not state:
            raise BugError(f"called while {self.state.value}, possible only while {state.value}")

    def _send(self, message: wire.Message) -> None:
        if self._connection is None:
            raise BugError("nothing to send to")
        self._out.append(Send(self._connection, wire.encode(message)))

    def _send_all(self, messages: Iterable[wire.Message]) -> None:
        for message in messages:
            self._send(message)

    def _take(self) -> list[Effect]:
        out, self._out = self._out, []
        return out


# What may happen in which state, and what it does.
_TRANSITIONS: Final[dict[tuple[State, type], Callable[[ClientCore, Any, int], None]]] = {
    (State.SEEKING, Found): ClientCore._on_found,
    (State.IDLE, Found): ClientCore._on_late_found,
    (State.DIALLING, Found): ClientCore._on_late_found,
    (State.OPENING, Found): ClientCore._on_late_found,
    (State.UP, Found): ClientCore._on_reviewed,
    (State.DIALLING, Opened): ClientCore._on_opened,
    (State.DIALLING, DialFailed): ClientCore._on_dial_failed,
    (State.OPENING, Received): ClientCore._on_received,
    (State.OPENING, Closed): ClientCore._on_closed,
    (State.UP, Received): ClientCore._on_received,
    (State.UP, Closed): ClientCore._on_closed,
    (State.UP, Datagram): ClientCore._on_datagram,
    (State.OVER, Opened): ClientCore._on_late_opened,
}
# Which control message a broker may send when; anything else breaks the protocol.
_MESSAGES: Final[dict[tuple[State, type], Callable[[ClientCore, Any, int], None]]] = {
    (State.OPENING, wire.Welcome): ClientCore._on_welcome,
    (State.OPENING, wire.Refuse): ClientCore._on_refuse,
    (State.UP, wire.Refuse): ClientCore._on_refuse,
    (State.UP, wire.Ping): ClientCore._on_ping,
    (State.UP, wire.Pong): ClientCore._on_pong,
    (State.UP, wire.Credit): ClientCore._on_credit,
    (State.UP, wire.Accepted): ClientCore._on_accepted,
    (State.UP, wire.Rejected): ClientCore._on_rejected,
    (State.UP, wire.Skew): ClientCore._on_skew,
    (State.UP, wire.Subscribed): ClientCore._on_subscribed,
    (State.UP, wire.Ended): ClientCore._on_ended,
    (State.UP, wire.Acked): ClientCore._on_acked,
    (State.UP, wire.Attempts): ClientCore._on_attempts,
    (State.UP, wire.Reply): ClientCore._on_reply,
    (State.UP, wire.Sent): ClientCore._on_sent,
    (State.UP, wire.Receiving): ClientCore._on_receiving,
    (State.UP, wire.Messages): ClientCore._on_messages,
    (State.UP, wire.Settled): ClientCore._on_settled,
}
