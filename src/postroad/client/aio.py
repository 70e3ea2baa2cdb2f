"""The client for programs with an event loop: a connection and futures around `core`.

Publishing only encodes and queues. The first publish of a turn schedules one flush at its end, which sends
everything queued as one frame; a batch that is large enough goes out at once, so a program that publishes
in a loop and never waits still keeps the broker busy. There is no linger timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import ssl
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import repeat
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from postroad.client import effects as fx
from postroad.client.addresses import parse_addresses
from postroad.client.application import Application, Queues
from postroad.client.arguments import (
    check_dead_letters,
    check_event,
    check_many,
    check_mode,
    check_repair,
    check_spent,
    check_subscription,
    check_timeout,
    encode_payload,
    increasing,
    since_us,
    with_ttl,
)
from postroad.client.asking import Asking, answer_to
from postroad.client.clock import now_us
from postroad.client.connection import Connection
from postroad.client.core import ClientCore, State
from postroad.client.hints import warn_of_habits
from postroad.client.places import Choice
from postroad.client.receipt import Receipt
from postroad.client.repair.settings import settings_for
from postroad.client.settings import ClientSettings, check_texts
from postroad.client.subscription import Subscription
from postroad.config import TlsConfig
from postroad.discovery.sealing import CertificateSealer
from postroad.discovery.selection import merit
from postroad.discovery.settings import SearchSettings
from postroad.errors import BugError, PeerError, PostroadError, UnavailableError, UsageError
from postroad.events import Event, EventBatch, Gap, Value
from postroad.ids import MessageId
from postroad.net.datagrams import Datagrams, bind_anywhere
from postroad.net.finding import OFF, Where, find, from_environment
from postroad.net.log import complain
from postroad.net.sealing import load_sealer
from postroad.seam.datagrams import SendTo
from postroad.seam.effects import Close, Dial, Send
from postroad.tracking.query.verdict import TraceResult
from postroad.units import SECOND_US, size
from postroad.wire.frames import Subscribe

CLOSE_S: Final = 2.0  # of a broker that does not answer
LINGER_S: Final = 1.0  # who published best-effort events answers for them for this long before it goes

Payload = bytes | str
Attributes = Mapping[str, Value]


def connect(
    address: str = "localhost:7420",
    *,
    name: str = "",
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    timeout: float = 30.0,
    window: int | str = "4 MiB",
) -> Client:
    """A client of the broker at `address`, or of the first that answers of several separated by commas.

    Use it as `async with connect(...) as client`, or `client = await connect(...)`. `tls` is made by
    `postroad.tls(...)`. A call that needs a broker fails once there has been none for `timeout` seconds.
    `window` bounds what arrives and is not yet consumed, over all subscriptions of this client.
    """
    check_timeout(timeout)
    if not isinstance(tls, ssl.SSLContext | None):
        raise UsageError(f"`tls` is what postroad.tls(...) makes, not {type(tls).__name__}")
    settings = ClientSettings(
        addresses=parse_addresses(address),
        name=name or f"client-{os.getpid()}",
        token=token or "",
        outage_us=round(timeout * SECOND_US),
        window=size(window),
    )
    return Client(settings, tls=tls)


def discover(
    *,
    bdn: str | Sequence[str] = (),
    name: str = "",
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    certificates: tuple[str, str, str] | None = None,
    interface: str = "",
    timeout: float = 30.0,
    search: float = 5.0,
    review: float = 60.0,
    window: int | str = "4 MiB",
) -> Client:
    """A client of the nearest, least busy broker there is. It is used as that of `connect`.

    It asks the discovery nodes in `bdn` (HOST:PORT; else those in the variable POSTROAD_BDN), or multicast
    and the brokers of last time, for `search` seconds at most. When its broker dies or stops it goes to
    another by itself, and every `review` seconds it looks whether another has become much better.
    `certificates` are the files of a certificate, its key and the authority, where requests are to be signed
    and encrypted; `interface` is the address of this machine by which multicast leaves, or "off".
    """
    check_timeout(timeout)
    check_timeout(search)
    check_timeout(review)
    if not isinstance(tls, ssl.SSLContext | None):
        raise UsageError(f"`tls` is what postroad.tls(...) makes, not {type(tls).__name__}")
    settings = ClientSettings(
        addresses=(),
        name=name or f"client-{os.getpid()}",
        token=token or "",
        outage_us=round(timeout * SECOND_US),
        window=size(window),
        seeks=True,
        review_us=round(review * SECOND_US),
    )
    where = Where(
        nodes=parse_addresses(bdn) if isinstance(bdn, str) and bdn else tuple(bdn),
        interface=interface,
        token=token or "",
        sealer=_sealer(certificates),
        search=SearchSettings(timeout_us=round(search * SECOND_US)),
    )
    return Client(settings, tls=tls, where=from_environment(where))


def _sealer(certificates: tuple[str, str, str] | None) -> CertificateSealer | None:
    if certificates is None:
        return None
    certificate, key, ca = certificates
    return load_sealer(TlsConfig(certificate=certificate, key=key, ca=ca))


class Client:
    """A connection to the network. Made by `connect` or `discover`."""

    def __init__(
        self, settings: ClientSettings, *, tls: ssl.SSLContext | None = None, where: Where | None = None
    ) -> None:
        self._where = where  # how it looks for brokers, if it does
        self._seeking: asyncio.Task[None] | None = None
        self._core = ClientCore(settings, draw=secrets.randbelow)  # a program may have seeded `random`
        self._outbox = self._core.outbox
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Connection | None = None
        self._said_on: Connection | None = None  # where acknowledgements that nobody waits for were last said
        self._heard_us = 0  # the ping that the broker answered last
        self._dialled = 0  # so often
        self._dialling: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0
        self._flush_scheduled = False
        self._broker = ""
        self._subscriptions: dict[int, Subscription] = {}  # begun or beginning
        self._requests: dict[int, asyncio.Future[str]] = {}
        self._acking: dict[int, asyncio.Future[None]] = {}  # acknowledgements to be confirmed, by ticket
        self._storing: dict[int, asyncio.Future[None]] = {}  # durable frames, by their ordinals
        self._queues = Queues(self)
        self._asking = Asking(self)
        self._waiters: dict[asyncio.Future[None], None] = {}  # woken by every change of the session
        self._outage: PostroadError | None = None  # there has been no broker for too long
        self._effort_sent = False  # best-effort events since the last flush
        self._lost: PostroadError | None = None  # published events were not taken; told once
        self._failed: PostroadError | None = None  # for good
        self._datagrams: Datagrams | None = None  # once there was one to send
        self._notice: Callable[[str], None] | None = None  # tells people when the broker goes and comes

    # --- life

    def look_further(self, certificates: tuple[str, str, str] | None = None) -> None:
        """Before it is opened: look for a broker where none answers at its addresses."""
        settings = self._core.settings
        where = from_environment(Where(token=settings.token, sealer=_sealer(certificates)))
        if where.interface != OFF or where.nodes:
            self._where = where
            self._core.look_further()

    @property
    def broker(self) -> str:
        """The name of the broker this client is connected to, or was last."""
        return self._broker

    @property
    def connected(self) -> bool:
        return self._core.state is State.UP

    @property
    def clock_offset_ms(self) -> float:
        """How far the broker's clock is ahead of this one's, as measured when it connected and since."""
        return self._core.skew_us / 1000

    def __await__(self) -> Generator[Any, None, Client]:
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            await self._shut()

    async def _open(self) -> Client:
        if self._loop is not None:
            raise UsageError("this client was opened before: connect again for another one")
        self._loop = asyncio.get_running_loop()
        self._perform(self._core.start(now_us()))
        self._arm()
        try:
            await self._until(lambda: self.connected)
        except BaseException:
            await self._shut()
            raise
        return self

    async def close(self) -> None:
        """Wait until what was published is accepted, then go. Raises what flush would.

        Of durable subscriptions what was read is acknowledged, unless `ack` is "manual".
        """
        try:
            if self._outbox.unsettled or self._lost is not None or self._effort_sent:
                await self.flush()
            if self.connected and self._core.effort.finish(now_us()):
                self._handle([])
                await asyncio.sleep(LINGER_S)
            for subscription in self._subscriptions.values():
                subscription._settle()
            await self._queues.close()
        finally:
            await self._shut()

    async def _shut(self) -> None:
        await self._asking.close()
        for subscription in self._subscriptions.values():
            subscription._say()
        try:
            await self._until_heard()
        finally:
            await self._go()

    async def _until_heard(self) -> None:
        """The broker has read what was acknowledged. Of a socket that is closed while the broker sends to it
        the rest may never be read."""
        if self._connection is self._said_on:
            await self._until_answered()

    async def _until_answered(self) -> None:
        connection = self._connection
        if connection is None or not self.connected:
            return
        pinged_us = now_us()
        self._perform(self._core.ping(pinged_us))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._until(lambda: self._heard_us == pinged_us or self._connection is not connection)

    async def _go(self) -> None:
        connection = self._connection
        self._perform(self._core.close())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._datagrams is not None:
            self._datagrams.close()
            self._datagrams = None
        self._end(self._failed)
        for task in (self._dialling, self._seeking):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if connection is not None:
            await asyncio.wait([connection.over], timeout=CLOSE_S)
            if not connection.over.done():
                connection.abort()

    def _end(self, error: PostroadError | None) -> None:
        """Nothing will come any more."""
        for subscription in list(self._subscriptions.values()):
            subscription._end(error)
        self._subscriptions.clear()
        for future in self._requests.values():
            if not future.done():
                future.set_exception(error or UnavailableError("the client was closed"))
        self._requests.clear()
        for waiting in (self._storing, self._acking):
            for confirmation in waiting.values():
                if not confirmation.done():
                    confirmation.set_exception(error or UnavailableError("the client was closed"))
                    confirmation.exception()  # whoever waits gets it; nobody need wait
            waiting.clear()
        self._queues.end(error)
        self._wake()

    # --- publishing

    async def publish(
        self,
        topic: str,
        payload: Payload = b"",
        attributes: Attributes | None = None,
        *,
        mode: str = "plain",
        durable: bool = False,
        ttl: float | None = None,
    ) -> Receipt:
        """Publish one event; its receipt has the id. `durable=True` says the same as mode "durable".

        Returns once the event is queued; waits only while the window of unaccepted events is full or there
        is no broker. An event that a broker does not take raises at the next publish, flush or close.

        With mode "durable" it returns when the event is synced to the log of the broker. Without a broker for
        `timeout` seconds it raises UnavailableError, and the event is not sent any more; one that was sent
        before may be published. Many can be under way at a time, as tasks: they share frames, and syncs.

        With mode "best-effort" it goes out as a datagram that nobody keeps or acknowledges. Subscribers with
        `repair` find out what they missed, and this client sends it again, for 30 s.

        With `ttl`, seconds, nobody is handed the event once that time is over.
        """
        if ttl is not None:
            attributes = with_ttl(attributes, ttl)
        if mode != "plain" or durable:
            mode = check_mode(mode, durable)
            durable = mode == "durable"
        if type(payload) is not bytes:
            payload = encode_payload(payload)
        if mode == "best-effort":
            return await self._publish_best_effort(topic, payload, attributes)
        if self._lost is not None or not self._outbox.room:
            await self._wait_for_room()
        identity = self._core.publish(topic, payload, attributes, now_us(), durable=durable)
        stored = self._storing_last() if durable else None
        if self._outbox.ready:
            self._flush()
            await asyncio.sleep(0)  # once per batch, let the loop hear what the broker says
        elif not self._flush_scheduled:
            self._schedule_flush()
        if stored is not None:
            await self._until_stored([stored])
        return Receipt(identity)

    async def _publish_best_effort(
        self, topic: str, payload: bytes, attributes: Attributes | None
    ) -> Receipt:
        if not self.connected:
            await self._until(lambda: self.connected)
        self._raise_lost()
        core = self._core
        self._effort_sent = True
        identity = core.publish_best_effort(topic, payload, attributes, now_us())
        if core.effort.full:
            self._handle([])
            await asyncio.sleep(0)
        elif not self._flush_scheduled:
            self._schedule_flush()
            self._arm()
        return Receipt(identity)

    def _now_ms(self) -> int:
        """The time by the clock of the broker, like that of ids."""
        return (now_us() + self._core.skew_us) // 1_000

    def _storing_last(self) -> asyncio.Future[None]:
        """What tells whether the frame of the event published last is in the log."""
        ordinal = self._outbox.ordinal
        future = self._storing.get(ordinal)
        if future is None:
            future = self._storing[ordinal] = asyncio.get_running_loop().create_future()
        return future

    async def _until_stored(self, frames: Iterable[asyncio.Future[None]]) -> None:
        """Fails as every other call does when there is no broker for too long."""
        for frame in frames:
            if not frame.done():
                await self._until(frame.done)
            frame.result()

    async def publish_many(
        self,
        events: Iterable[tuple[str, Payload] | tuple[str, Payload, Attributes | None]],
        *,
        mode: str = "plain",
        durable: bool = False,
        ids: Iterable[bytes] | None = None,
    ) -> int:
        """Publish (topic, payload) or (topic, payload, attributes) in turn; how many they were.

        With mode "durable" (or `durable=True`) all of them are in the broker's log when it returns. With
        `ids` they bear these, 16 bytes each: of one publisher, which no client has, and increasing. A durable
        pubend takes what is
        above the last id of that publisher, so a program that makes the same ids again repeats nothing. They
        are sent frame by frame, each when the one before it is in the log: what is refused could not be
        published under the same ids once something later was.
        """
        mode = check_mode(mode, durable)
        check_many(events, mode, ids)
        if mode == "best-effort":
            sent = 0
            for event in events:
                check_event(event)
                await self.publish(event[0], event[1], event[2] if len(event) > 2 else None, mode=mode)
                sent += 1
            return sent
        own = None if ids is None else iter(ids)
        given = repeat(b"") if own is None else increasing(own)
        count = 0
        durable = mode == "durable"
        frames: dict[asyncio.Future[None], None] = {}
        outbox = self._outbox
        publish = self._core.publish
        for event in events:
            if type(event) is not tuple or not 2 <= len(event) <= 3:
                check_event(event)
            payload = event[1]
            if type(payload) is not bytes:
                payload = encode_payload(payload)
            if own is not None and frames and (outbox.whole or not outbox.room):
                self._flush()
                await self._until_stored(frames)
                frames.clear()
            if self._lost is not None or not outbox.room:
                await self._wait_for_room()
            attributes = event[2] if len(event) > 2 else None
            publish(event[0], payload, attributes, now_us(), durable=durable, identity=next(given))
            count += 1
            if durable:
                frames[self._storing_last()] = None
            if own is None and outbox.ready:
                self._flush()
                await asyncio.sleep(0)
        self._schedule_flush()
        await self._until_stored(frames)
        if own is not None:
            check_spent(own)
        return count

    async def flush(self) -> None:
        """Wait until everything published so far is accepted; raises if something was not taken. Nobody
        accepts best-effort events, but a broker says which of them it refuses."""
        mark = self._outbox.mark()
        self._flush()
        await self._until(lambda: self._outbox.settled(mark))
        if self._effort_sent:
            self._effort_sent = False
            await self._until_answered()  # by then it has said what it does not take
        self._raise_lost()

    async def _wait_for_room(self) -> None:
        self._raise_lost()
        self._flush()
        await self._until(lambda: self._outbox.room)
        self._raise_lost()

    def _raise_lost(self) -> None:
        if self._lost is not None:
            error, self._lost = self._lost, None
            raise error

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled and self._loop is not None:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._perform(self._core.flush(now_us()))
        self._perform(self._core.send_queued(now_us()))
        self._arm()

    # --- subscribing and asking

    def subscribe(
        self,
        topic: str | None = "",
        where: str | None = "",
        *,
        durable: str | None = None,
        token: str | None = None,
        ack: str = "auto",
        since: datetime | None = None,
        shared: bool = False,
        key: str | None = "",
        max_attempts: int | None = None,
        dead_letters: str | None = None,
        overflow: str = "drop",
        buffer: int | str = 0,
        repair: bool = False,
        order: float = 0.0,
    ) -> Subscription:
        """Events by topic pattern (`+`, `#`; "" for any), by a condition over attributes, or both.

        Use it as `async with client.subscribe(...) as events`. When this program falls behind, the broker
        keeps `buffer` bytes for it (0: the broker's own default), and then drops with a Gap in their place,
        or ends the subscription with SlowConsumerError if `overflow` is "disconnect".

        With `durable`, a name, it is a durable subscription: it gets every matching durable event exactly
        once and in order per pubend, also those published while nobody reads it. Either you keep its
        checkpoint token (`token`: "" at first, then `events.token`), or the broker does: with `ack` "auto"
        an event is acknowledged when you ask for the next, with "batch" when you have read all that came
        with it, with "manual" by `await events.ack(event)`. A new one begins now, or `since` a time.

        With `shared` all who subscribe under the name, at one broker, divide the events: each goes to one of
        them, and to another if that one goes without acknowledging it. Events with the same value of the
        attribute `key` are consumed in order. `await events.reject(event)` says that this attempt failed;
        after `max_attempts` of them the event is published on the topic `dead_letters`, and done.

        With `repair`, best-effort events that were lost on the way are found out and asked for, of their
        publisher first and then of other receivers; what cannot be had is a Gap, whose pubend is the
        publisher. With `order`, seconds, those of one publisher come in order, where that takes no longer.
        """
        topic, where, key = topic or "", where or "", key or ""
        warn_of_habits(topic, where, stacklevel=2)
        check_repair(repair, order, durable)
        check_subscription(
            durable=durable,
            token=token,
            ack=ack,
            since=since,
            shared=shared,
            key=key,
            overflow=overflow,
        )
        check_dead_letters(shared, max_attempts, dead_letters)
        wanted = Subscribe(
            number=0,  # the core gives it one
            topic=topic,
            where=where,
            overflow=overflow,
            buffer=size(buffer),
            durable=durable or "",
            token=token or "",
            ack=ack if durable is not None and token is None else "",
            since_us=since_us(since),
            shared=shared,
            key=key,
            max_attempts=max_attempts or 0,
            dead_letters=dead_letters or "",
        )
        chosen = self._core.effort.settings
        settings = replace(chosen, order_us=round(order * SECOND_US)) if repair else None
        return Subscription(self, wanted, settings)

    def repair_by(self, way: str = "summaries", *, scope: str = "") -> None:
        """How this client takes part in the repair of best-effort events; before it does.

        With "records" its events carry the bits of those before them, and what it misses it asks of other
        receivers alone. What it asks for in a `scope` is heard and repaired by those in that scope alone.
        """
        self._core.effort.choose(settings_for(way, scope))

    def _caching(self, topic: str, where: str, messages: int) -> Subscription:
        """A repaired subscription that keeps so many messages, for nodes that only cache."""
        settings = replace(self._core.effort.settings, cache_min=messages, cache_max=messages)
        return Subscription(self, Subscribe(number=0, topic=topic, where=where), settings)

    def read(self, until: str, *, after: str = "", topic: str = "", where: str = "") -> Subscription:
        """The durable events between two checkpoint tokens, filtered; then it ends. Nothing is held for it,
        and what was released meanwhile is a Gap. `request("heads")` tells how far every pubend is.
        Traces name who subscribed, not who read."""
        if not until or not isinstance(until, str):
            raise UsageError("a range ends somewhere: `until` is a checkpoint token")
        check_texts("range", after)
        return Subscription(self, Subscribe(number=0, topic=topic, where=where, token=after, until=until))

    def application(self, name: str) -> Application:
        """The application of this name, which sends to others and receives from its own inbox."""
        return Application(self, name)

    async def _acknowledge(
        self,
        number: int,
        token: Mapping[int, int] | None,
        events: Mapping[int, tuple[int, ...]] | None,
        rejected: Mapping[int, tuple[int, ...]] | None = None,
        delay_us: int = 0,
    ) -> None:
        """Returns when it is on the broker's disk; across a reconnect if need be."""
        ticket, effects = self._core.acknowledge(
            number, token=token, events=events, rejected=rejected, delay_us=delay_us, confirm=True
        )
        future = self._acking[ticket] = asyncio.get_running_loop().create_future()
        self._perform(effects)
        try:
            await self._until(future.done)
            future.result()
        finally:
            self._acking.pop(ticket, None)

    async def ask(
        self,
        topic: str,
        payload: Payload = b"",
        attributes: Attributes | None = None,
        *,
        durable: bool = False,
        timeout: float = 5.0,  # noqa: ASYNC109 -- that of the answer
    ) -> Event:
        """Publish a request and wait for the first answer: somebody's `await event.reply(...)`.

        TimeoutError if nobody answers within `timeout` seconds; somebody may have done the work even so. Many
        who subscribe share requests out under a `shared` durable name, if those are `durable`.
        """
        check_timeout(timeout)
        return await self._asking.ask(topic, payload, attributes, "durable" if durable else "plain", timeout)

    async def _answer(self, event: Event, payload: Payload, attributes: Attributes | None) -> Receipt:
        topic, bearing = answer_to(event)
        return await self.publish(topic, payload, {**(attributes or {}), **bearing})

    async def request(self, what: str, /, **arguments: str) -> dict[str, Any]:
        """Ask the broker something, such as "status"."""
        await self._until(lambda: self.connected)
        number, effects = self._core.request(what, arguments)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._requests[number] = future
        self._perform(effects)
        try:
            body = await future
        finally:
            self._requests.pop(number, None)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            raise PeerError(f"the broker's answer to {what!r} is not JSON") from None
        if not isinstance(answer, dict):
            raise PeerError(f"the broker's answer to {what!r} is not an object")
        return answer

    async def trace(self, message: MessageId | str) -> TraceResult:
        """The path of a message: origin, route and receivers, each with its probability of being wrong."""
        if not isinstance(message, MessageId | str):
            raise UsageError(f"a message is known by its id, not {type(message).__name__}")
        identity = MessageId.parse(message) if isinstance(message, str) else message
        answer = await self.request("trace", id=str(identity))
        try:
            return msgspec.convert(answer, TraceResult)
        except msgspec.ValidationError as error:
            raise PeerError(f"the broker's answer to 'trace' cannot be read: {error}") from None

    # --- waiting

    async def _until(self, done: Callable[[], bool]) -> None:
        """Wait for a change of the session; fails with it, or when there is no broker for too long."""
        while not done():
            if self._failed is not None:
                raise self._failed.with_traceback(None)  # raised any number of times
            if self._core.state is State.OVER or self._loop is None:
                raise UsageError("this client is not open")
            if self._outage is not None:
                raise self._outage.with_traceback(None)
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiters[future] = None
            try:
                await future
            finally:
                self._waiters.pop(future, None)  # who woke it has forgotten it

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for future in waiters:
            if not future.done():
                future.set_result(None)

    # --- driving the core

    def _handle(self, inputs: Sequence[fx.Input]) -> None:
        self._perform(self._core.handle(inputs, now_us()))
        self._arm()

    def _arm(self) -> None:
        deadline = self._core.next_deadline()
        if deadline is None or self._loop is None:
            return
        if self._timer is not None:
            if deadline >= self._timer_us:  # it fires early, finds nothing due and is armed again
                return
            self._timer.cancel()
        self._timer_us = deadline
        self._timer = self._loop.call_later(max(0, deadline - now_us()) / SECOND_US, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._handle([])

    def _perform(self, effects: list[fx.Effect]) -> None:
        if not effects:
            return
        frames: list[bytes] = []
        for effect in effects:
            if type(effect) is Send:
                frames.append(effect.data)
            elif type(effect) is fx.Delivered:
                self._put(effect.number, effect.batch, effect.size)
            elif type(effect) is SendTo:
                self._send_datagram(effect)
            elif type(effect) is Close:
                self._write(frames)
                frames = []
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
            else:
                self._tell(effect)
        self._write(frames)

    def _write(self, frames: list[bytes]) -> None:
        if frames and self._connection is not None:
            self._connection.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def _send_datagram(self, effect: SendTo) -> None:
        if self._datagrams is None:
            try:
                self._datagrams = Datagrams(bind_anywhere(), self._handle)
            except OSError as error:
                complain("warning", f"no datagrams can be sent: {error}")
                return
        self._datagrams.send(effect.endpoint, effect.data)

    def _tell(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Progress():
                self._wake()
            case fx.Stored(ordinals=ordinals, error=error):
                for ordinal in ordinals:
                    self._stored(ordinal, error)
            case fx.Missed(number=number, gap=gap, size=taken):
                self._put(number, gap, taken)
            case fx.Passed(number=number, pubend=pubend, tick=tick):
                if (subscription := self._subscriptions.get(number)) is not None:
                    subscription._pass(pubend, tick)
            case fx.Began(number=number, missing=missing, token=token):
                if (subscription := self._subscriptions.get(number)) is not None:
                    subscription._begin(missing, token)
            case fx.Ended(number=number, error=error):
                if (subscription := self._subscriptions.pop(number, None)) is not None:
                    subscription._end(error)
            case fx.Tried(number=number, pubend=pubend, attempts=attempts):
                if number in self._subscriptions:
                    self._subscriptions[number]._tried(pubend, attempts)
            case fx.Acknowledged(ticket=ticket, error=error):
                acking = self._acking.get(ticket)
                if acking is not None and not acking.done():
                    acking.set_exception(error) if error is not None else acking.set_result(None)
                    self._wake()
            case fx.Down(error=error):
                for subscription in self._subscriptions.values():
                    subscription._lost_connection()
                self._wake()
                if self._notice is not None:
                    self._notice(f"the connection to {self._broker} is lost, dialling again: {error}")
            case fx.Heard(pinged_us=pinged_us):
                self._heard_us = pinged_us
                self._wake()
            case fx.Answered(number=number, error=error, body=body):
                future = self._requests.get(number)
                if future is not None and not future.done():
                    future.set_exception(error) if error is not None else future.set_result(body)
            case fx.Seek():
                if self._notice is not None and not self._broker:
                    self._notice("no broker at the default address: looking for one (postroad discover)")
                self._seeking = asyncio.get_running_loop().create_task(self._seek())
            case Dial(address=address):
                self._dialling = asyncio.get_running_loop().create_task(self._dial(address))
            case fx.Up(broker=broker):
                if self._notice is not None and self._broker:
                    self._notice(f"connected again, to {broker}")
                elif self._notice is not None and self._seeking is not None:
                    self._notice(f"found {broker}")
                self._broker = broker
                self._outage = None
                self._wake()
            case fx.Outage(error=error):
                self._outage = error
                self._wake()
            case fx.Lost(error=error):
                self._lost = self._lost or error
                self._wake()
            case fx.Failed(error=error):
                self._failed = error
                self._end(error)
            case _:
                self._queues.tell(effect)

    def _put(self, number: int, item: EventBatch | Gap, taken: int) -> None:
        subscription = self._subscriptions.get(number)
        if subscription is not None:
            subscription._put(item, taken)
        elif taken:
            self._core.consumed(taken)
            self._schedule_flush()

    def _stored(self, ordinal: int, error: PostroadError | None) -> None:
        future = self._storing.pop(ordinal, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # one that nobody waits for any more is no concern of the loop
        self._wake()

    async def _seek(self) -> None:
        if self._where is None:
            raise BugError("a client that cannot look for brokers was to")
        try:
            result = await find(self._where)
        except PostroadError as error:
            self._handle([fx.Found(reason=str(error))])
        else:
            weights = self._where.search.weights
            choices = tuple(
                Choice(address=candidate.address, weight=merit(candidate, weights))
                for candidate in result.candidates
            )
            self._handle([fx.Found(choices=choices)])

    async def _dial(self, address: str) -> None:
        self._dialled += 1
        connection = Connection(
            self._dialled,
            tls=self._tls,
            known=self._broker != "",
            received=self._received,
            lost=self._connection_lost,
        )
        reason = await connection.open(address)
        if reason:
            self._handle([fx.DialFailed(address=address, reason=reason)])
        else:
            self._connection = connection
            self._handle([fx.Opened(connection=connection.number, host=connection.host)])

    def _received(self, connection: Connection, frames: list[bytes]) -> None:
        number = connection.number
        self._handle([fx.Received(connection=number, frame=frame) for frame in frames])

    def _connection_lost(self, connection: Connection, error: PostroadError | None) -> None:
        if connection is self._connection:
            self._connection = None
            connection.close()
            self._handle([fx.Closed(connection=connection.number, error=error)])
