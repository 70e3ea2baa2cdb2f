"""Applications of the async client: they send to each other by name, and receive from an inbox of their own.

The cores beside it (`sender`, `receiver`) decide; here are the futures of those who wait. No queue is
declared: an inbox is there once somebody sends to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, final

from postroad.client import effects as fx
from postroad.client.arguments import encode_payload
from postroad.client.clock import now_us
from postroad.client.receiver import MAX_REASON, MAX_WINDOW
from postroad.client.sender import MAX_TOGETHER, MAX_TRANSACTION_BYTES, POSTING_BYTES
from postroad.errors import PostroadError, TakenError, TooLargeError, UnavailableError, UsageError
from postroad.events.attributes import Value, decode_attributes, encode_attributes
from postroad.ids import (
    MAX_NAME,
    SESSION_BYTES,
    SESSION_DRAWN_BYTES,
    MessageId,
    name_fits,
    queue_message_id,
    session_from,
)
from postroad.units import KIB, SECOND_US
from postroad.wire.frames import Posting, QueueMessage

if TYPE_CHECKING:
    from postroad.client.aio import Client

MAX_PAYLOAD_BYTES: Final = 512 * KIB  # attributes included
MAX_DELAY_S: Final = 30 * 86_400
MAX_PRIORITY: Final = 9
WINDOW: Final = 64
KINDS: Final = ("transactional", "recoverable", "express")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Payload = bytes | str
Attributes = Mapping[str, Value]


def message_id(session: bytes, number: int) -> str:
    """As people and scripts name a message of a queue: who sends it, who receives it and who traces it."""
    return str(MessageId.from_bytes(queue_message_id(session, number)))


@final
class Delivered:
    """Awaited, it returns once consumers have accepted the messages."""

    __slots__ = ("_futures",)

    def __init__(self, futures: Sequence[asyncio.Future[None]]) -> None:
        self._futures = futures

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        for future in self._futures:
            await asyncio.shield(future)


@final
class SendReceipt:
    """Messages that are kept. `ids` has one for each, `id` the first."""

    __slots__ = ("_confirming", "ids")

    def __init__(self, ids: tuple[str, ...], confirming: Sequence[asyncio.Future[None]]) -> None:
        self.ids = ids
        self._confirming = confirming

    @property
    def id(self) -> str:
        return self.ids[0]

    @property
    def delivered(self) -> Delivered:
        """To be awaited, if it was sent with `confirm`: every message is accepted by a consumer.

        UndeliveredError: one of them never will be.
        """
        if not self._confirming:
            raise UsageError("send it with confirm=True to hear of its delivery")
        return Delivered(self._confirming)

    def __repr__(self) -> str:
        return f"SendReceipt(id={self.id})"


@final
class Message:
    """A message that an application received."""

    __slots__ = ("_inbox", "_message", "attributes")

    def __init__(self, inbox: Consumer, message: QueueMessage) -> None:
        self._inbox = inbox
        self._message = message
        self.attributes: Mapping[str, Value] = decode_attributes(message.attributes)

    @property
    def id(self) -> str:
        return message_id(self._message.session, self._message.id)

    @property
    def source(self) -> str:
        """The application that sent it, as its sender says."""
        return self._message.source

    @property
    def principal(self) -> str:
        """Who sent it, as brokers know it: "" for anonymous clients."""
        return self._message.principal

    @property
    def payload(self) -> bytes:
        return self._message.payload

    @property
    def kind(self) -> str:
        return self._message.form

    @property
    def attempt(self) -> int:
        """From 1: how often it was given to a consumer, as far as brokers know."""
        return self._message.attempt

    @property
    def priority(self) -> int:
        return self._message.priority

    @property
    def sent_at(self) -> datetime:
        """When a broker first took it."""
        return _EPOCH + timedelta(microseconds=self._message.sent_us)

    async def accept(self) -> None:
        """It is done with. Work counts once this returns; TakenError: it counts for somebody else."""
        await self._inbox.settle(self._message, "accept")

    async def reject(self, *, again: bool = True, delay: float = 0.0, reason: str = "") -> None:
        """Give it to a consumer once more, `delay` seconds from now or later; without `again`, put it with
        the dead letters. So is one that was rejected too often."""
        await self._inbox.settle(
            self._message,
            "again" if again else "dead",
            delay_us=check_seconds("a delay", delay),
            reason=_check_reason(reason),
        )

    def __repr__(self) -> str:
        return f"Message(id={self.id}, source={self.source!r}, {len(self.payload)} bytes)"


class Application:
    """An application by its name. Made by `client.application(NAME)`."""

    def __init__(self, client: Client, name: str) -> None:
        self.name = check_name("application", name)
        self._client = client
        self._session = session_from(secrets.token_bytes(SESSION_DRAWN_BYTES))
        self._inboxes: dict[Consumer, None] = {}
        client._core.sender.begin_session(name, self._session)
        client._queues.applications[self] = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Its inboxes are closed, and it sends nothing more. The client's own closing does this too."""
        for inbox in list(self._inboxes):
            inbox.close()
        self._end()
        self._client._queues.applications.pop(self, None)

    def _end(self) -> None:
        client = self._client
        client._said_on = client._connection
        client._perform(client._core.end_session(self._session))

    async def send(
        self,
        to: str | Sequence[str],
        payload: Payload = b"",
        *,
        kind: str = "transactional",
        reliable: bool = True,
        attributes: Attributes | None = None,
        priority: int = 4,
        delay: float = 0.0,
        expires: float | None = None,
        confirm: bool = False,
    ) -> SendReceipt:
        """Send a message to an application, or to several at once; returns when it is kept.

        "transactional": on the disks of all replicas, delivered exactly once and in the order of sending.
        "recoverable": in the memory of all replicas. "express": in that of one broker. Without `reliable`
        (not for "transactional") it returns once it is on its way. With `confirm`, `receipt.delivered` can be
        awaited. It is delivered `delay` seconds from now, and is a dead letter after `expires` seconds.

        It is sent again by itself, under the same id, across lost connections. After `timeout` seconds of the
        connection it raises: FullError, nothing is kept; UnavailableError, "outcome unknown" if it was sent.
        """
        names = _names(to)
        if not 1 <= len(names) <= MAX_TOGETHER:
            raise UsageError(f"a message goes to 1 to {MAX_TOGETHER} applications, not {len(names)}")
        check_kind(kind, reliable)
        postings = [
            self._posting(name, payload, attributes, priority=priority, delay=delay, expires=expires)
            for name in names
        ]
        return await self._keep(kind, postings, reliable=reliable, confirm=confirm)

    async def send_many(
        self,
        messages: Iterable[tuple[str, Payload] | tuple[str, Payload, Attributes | None]],
        *,
        kind: str = "transactional",
        reliable: bool = True,
        priority: int = 4,
        delay: float = 0.0,
        expires: float | None = None,
    ) -> list[str]:
        """Send (to, payload) or (to, payload, attributes) in turn, many on their way at once; their ids, when
        all are kept."""
        check_kind(kind, reliable)
        queues = self._client._queues
        ids: list[str] = []
        keeping: deque[asyncio.Future[None]] = deque()
        for message in messages:
            if not isinstance(message, tuple | list) or not 2 <= len(message) <= 3:
                raise UsageError("a message is (to, payload) or (to, payload, attributes)")
            attributes = message[2] if len(message) > 2 else None
            posting = self._posting(
                message[0], message[1], attributes, priority=priority, delay=delay, expires=expires
            )
            await queues.wait_for_room()
            ((ordinal, number),) = queues.add(self._session, kind, [posting], reliable=reliable)
            keeping.append(queues.keeping[ordinal])
            ids.append(message_id(self._session, number))
            while keeping and keeping[0].done():
                keeping.popleft().result()
        while keeping:
            await keeping.popleft()
        return ids

    def transaction(self) -> Transaction:
        """Several messages to several applications, of which all are kept or none:
        `async with shop.transaction() as t: t.send(...); t.send(...)`."""
        return Transaction(self)

    def inbox(self, *, window: int = WINDOW) -> ApplicationInbox:
        """The messages that other applications send to this one: `async for message in shop.inbox()`.

        At most `window` of them are with this consumer without being settled.
        """
        if not isinstance(window, int) or not 1 <= window <= MAX_WINDOW:
            raise UsageError(f"a window is between 1 and {MAX_WINDOW} messages, not {window!r}")
        return ApplicationInbox(self, window)

    def _posting(
        self,
        to: str,
        payload: Payload,
        attributes: Attributes | None = None,
        *,
        priority: int = 4,
        delay: float = 0.0,
        expires: float | None = None,
    ) -> Posting:
        data = payload if type(payload) is bytes else encode_payload(payload)
        encoded = encode_attributes(attributes, self._client._core.limits) if attributes else b""
        if len(data) + len(encoded) > MAX_PAYLOAD_BYTES:
            raise TooLargeError(
                f"a message of {len(data) + len(encoded)} bytes with its attributes, the limit is"
                f" {MAX_PAYLOAD_BYTES}"
            )
        if type(priority) is not int or not 0 <= priority <= MAX_PRIORITY:
            raise UsageError(f"a priority is from 0 to {MAX_PRIORITY}, not {priority!r}")
        return Posting(
            inbox=check_name("application", to),
            id=0,
            after=0,
            payload=data,
            attributes=encoded,
            priority=priority,
            delay_us=check_seconds("a delay", delay) if delay else 0,
            expires_us=0 if expires is None else max(1, check_seconds("an expiry", expires)),
        )

    async def _keep(
        self,
        kind: str,
        postings: list[Posting],
        *,
        reliable: bool = True,
        together: bool = False,
        confirm: bool = False,
    ) -> SendReceipt:
        queues = self._client._queues
        if confirm and not reliable:
            raise UsageError("a message that is not reliable is not confirmed")
        await queues.wait_for_room()
        added = queues.add(
            self._session, kind, postings, reliable=reliable, together=together, confirm=confirm
        )
        ordinals = list(dict.fromkeys(ordinal for ordinal, _ in added))
        keeping = [queues.keeping[ordinal] for ordinal in ordinals]
        confirming = [queues.confirming[ordinal] for ordinal in ordinals] if confirm else []
        for future in keeping:
            await future
        return SendReceipt(tuple(message_id(self._session, number) for _, number in added), confirming)


class Transaction:
    """Messages that are all kept or none of them. They are sent when its block ends without an error."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._postings: list[Posting] = []
        self._size = 0
        self._over = False
        self.receipt: SendReceipt | None = None  # once it is kept

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        if kind is None and self._postings:
            self.receipt = await self._application._keep("transactional", self._postings, together=True)

    def send(
        self,
        to: str | Sequence[str],
        payload: Payload = b"",
        *,
        attributes: Attributes | None = None,
        priority: int = 4,
        delay: float = 0.0,
        expires: float | None = None,
    ) -> None:
        """As the application's, at the end of the block."""
        if self._over:
            raise UsageError("this transaction is over")
        postings = [
            self._application._posting(
                name, payload, attributes, priority=priority, delay=delay, expires=expires
            )
            for name in _names(to)
        ]
        size = sum(len(each.payload) + len(each.attributes) + POSTING_BYTES for each in postings)
        if len(self._postings) + len(postings) > MAX_TOGETHER or self._size + size > MAX_TRANSACTION_BYTES:
            raise TooLargeError(
                f"a transaction has at most {MAX_TOGETHER} messages and {MAX_TRANSACTION_BYTES} bytes, this"
                f" one {len(self._postings) + len(postings)} and {self._size + size}"
            )
        self._postings += postings
        self._size += size


class ApplicationInbox:
    """One consumer of an application's inbox. Several share its messages; those of one sender stay with one.

    `async for message in inbox`, then `await message.accept()` or `.reject()`. Bounded by its window: the
    broker sends no more while so many are not settled. One that nobody holds any more, since a loop over it
    was left, closes once the messages that were handed out are settled.
    """

    def __init__(self, application: Application, window: int) -> None:
        self.name = application.name
        self._consumer = Consumer(application, window)
        weakref.finalize(self, self._consumer.abandon).atexit = False

    async def __aenter__(self) -> Self:
        await self._consumer.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """What was not settled goes to another consumer, or to this application when it comes again."""
        self._consumer.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        return await self._consumer.next()


class Consumer:
    """What an inbox is to the client and to its messages, which outlive it."""

    def __init__(self, application: Application, window: int) -> None:
        self.name = application.name
        self._application = application
        self._client = application._client
        self._window = window
        self.identity = secrets.token_bytes(SESSION_BYTES)
        self._number: int | None = None
        self._joined = False
        self._waiter: asyncio.Future[None] | None = None
        self._over = False
        self._error: PostroadError | None = None
        self._handed = 0  # messages that the program has and has not settled
        self._abandoned = False  # nobody can ask for more

    async def open(self) -> None:
        """Begin, unless it has begun; returns once it is one of the inbox's consumers."""
        client = self._client
        if self._number is None and not self._over:
            await client._until(lambda: client.connected)
            self._number, effects = client._core.receive(self.name, self.identity, self._window, now_us())
            client._queues.inboxes[self._number] = self
            self._application._inboxes[self] = None
            client._perform(effects)
        await client._until(lambda: self._joined or self._over)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def close(self) -> None:
        client = self._client
        if self._number is not None and client._queues.inboxes.pop(self._number, None) is not None:
            client._said_on = client._connection
            client._perform(client._core.stop_receiving(self._number, now_us()))
        self.end(None)

    def abandon(self) -> None:
        """The inbox is gone, in whatever thread that was found out."""
        loop = self._client._loop
        if loop is not None and not self._over and not loop.is_closed():
            loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        self._abandoned = True
        if not self._handed and not self._over:
            self.close()

    async def next(self) -> Message:
        if not self._joined:
            await self.open()
        receiver = self._client._core.receiver
        while self._number is None or (message := receiver.next(self._number)) is None:
            if self._over:
                if self._error is not None:
                    raise self._error.with_traceback(None)
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._handed += 1
        return Message(self, message)

    async def settle(
        self, message: QueueMessage, verdict: str, *, delay_us: int = 0, reason: str = ""
    ) -> None:
        client, queues = self._client, self._client._queues
        if self._number is None or self._over:
            raise self._error or UsageError("this inbox is closed: the message goes to another consumer")
        ticket = client._core.receiver.settle(
            self._number, message, verdict, now_us(), delay_us=delay_us, reason=reason
        )
        future = queues.verdicts[ticket] = asyncio.get_running_loop().create_future()
        client._schedule_flush()
        try:
            outcome = await future
        finally:
            queues.verdicts.pop(ticket, None)
        if outcome == "early":
            raise UsageError(
                "messages of one sender are accepted in their order: settle the earlier one first"
            )
        self._handed -= 1
        if self._abandoned:
            self._leave()
        if outcome == "taken":
            raise TakenError(
                "another consumer has accepted this message, or it is gone: this work does not count"
            )

    # --- what the core tells

    def join(self) -> None:
        self._joined = True
        self._client._wake()

    def end(self, error: PostroadError | None) -> None:
        if self._over:
            return
        self._over, self._error = True, error
        self._application._inboxes.pop(self, None)
        self.notify()
        self._client._wake()

    def notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Queues:
    """The async client's part for applications: who waits for what."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.applications: dict[Application, None] = {}
        self.inboxes: dict[int, Consumer] = {}  # joined or joining
        self.keeping: dict[int, asyncio.Future[None]] = {}  # parcels that are not kept yet, by ordinal
        self.confirming: dict[int, asyncio.Future[None]] = {}  # likewise, not delivered
        self.verdicts: dict[int, asyncio.Future[str]] = {}  # by ticket

    async def wait_for_room(self) -> None:
        client, sender = self._client, self._client._core.sender
        client._raise_lost()
        if not sender.room:
            client._flush()
            await client._until(lambda: sender.room)

    def add(
        self,
        session: bytes,
        kind: str,
        postings: list[Posting],
        *,
        reliable: bool,
        together: bool = False,
        confirm: bool = False,
    ) -> list[tuple[int, int]]:
        client = self._client
        core = client._core
        added = core.sender.add(
            session,
            kind,
            postings,
            now_us(),
            skew_us=core.skew_us,
            reliable=reliable,
            together=together,
            confirm=confirm,
        )
        loop = asyncio.get_running_loop()
        for ordinal, _ in added:
            self.keeping[ordinal] = loop.create_future()
            if confirm:
                self.confirming[ordinal] = loop.create_future()
        client._schedule_flush()
        return added

    def tell(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Kept(ordinals=ordinals):
                for ordinal in ordinals:
                    _settle(self.keeping.pop(ordinal, None))
            case fx.Refused(ordinals=ordinals, error=error):
                for ordinal in ordinals:
                    _settle(self.keeping.pop(ordinal, None), error)
                    _settle(self.confirming.pop(ordinal, None), error)
            case fx.Confirmed(ordinals=ordinals, error=error):
                for ordinal in ordinals:
                    _settle(self.confirming.pop(ordinal, None), error)
            case fx.Joined(number=number):
                if (inbox := self.inboxes.get(number)) is not None:
                    inbox.join()
            case fx.Arrived(number=number):
                if (inbox := self.inboxes.get(number)) is not None:
                    inbox.notify()
                return
            case fx.InboxEnded(number=number, error=error):
                if (inbox := self.inboxes.pop(number, None)) is not None:
                    inbox.end(error)
            case fx.Verdict(ticket=ticket, outcome=outcome, error=error):
                future = self.verdicts.get(ticket)
                if future is not None and not future.done():
                    future.set_exception(error) if error is not None else future.set_result(outcome)
        self._client._wake()

    async def close(self) -> None:
        """All that was sent is kept; then sessions and inboxes end in good order."""
        sender = self._client._core.sender
        if sender.unsettled:
            self._client._flush()
            await self._client._until(lambda: not sender.unsettled)
        for application in list(self.applications):
            await application.close()

    def end(self, error: PostroadError | None) -> None:
        """Nothing will come any more."""
        for inbox in list(self.inboxes.values()):
            inbox.end(error)
        self.inboxes.clear()
        closed = error or UnavailableError("the client was closed")
        for waiting in (self.keeping, self.confirming):
            for future in waiting.values():
                _settle(future, closed)
            waiting.clear()
        for verdict in self.verdicts.values():
            if not verdict.done():
                verdict.set_exception(closed)
                verdict.exception()
        self.verdicts.clear()


def _settle(future: asyncio.Future[None] | None, error: PostroadError | None = None) -> None:
    if future is None or future.done():
        return
    if error is None:
        future.set_result(None)
        return
    future.set_exception(error)
    with contextlib.suppress(asyncio.CancelledError):
        future.exception()  # one that nobody waits for any more is no concern of the loop


def _names(to: object) -> list[str]:
    """UsageError unless it is the name of an application, or several; each is looked at later."""
    if isinstance(to, str):
        return [to]
    if not isinstance(to, Sequence):
        raise UsageError(f"a message goes to the name of an application, or several, not {type(to).__name__}")
    return list(to)


def check_name(what: str, name: object) -> str:
    if not isinstance(name, str) or not name or not name_fits(name):
        raise UsageError(f"the name of an {what} has 1 to {MAX_NAME} bytes and is printable, not {name!r}")
    return name


def check_kind(kind: str, reliable: bool) -> None:
    if kind not in KINDS:
        raise UsageError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    if not isinstance(reliable, bool):
        raise UsageError(f"`reliable` is True or False, not {reliable!r}")
    if kind == "transactional" and not reliable:
        raise UsageError("a transactional message is always reliable")


def check_seconds(what: str, seconds: object) -> int:
    """Microseconds."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_DELAY_S:
        raise UsageError(f"{what} is 0 to {MAX_DELAY_S:,} seconds, not {seconds!r}")
    return round(seconds * SECOND_US)


def _check_reason(reason: object) -> str:
    if not isinstance(reason, str) or len(reason) > MAX_REASON:
        raise UsageError(f"a reason is a text of at most {MAX_REASON:,} characters")
    return reason
