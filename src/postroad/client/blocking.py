"""The client for programs without an event loop: the async one on a loop in a thread of its own.

Every call crosses to that thread and back, which costs some tens of microseconds; `publish_many` and
iterating over a subscription cross once for many events.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self

from postroad.client import aio, subscription
from postroad.client.aio import Attributes, Payload
from postroad.client.arguments import check_many, check_mode, check_patience, check_spent, increasing
from postroad.client.blocking_application import Application
from postroad.client.loop_thread import ClosedError, LoopThread
from postroad.client.receipt import Receipt
from postroad.errors import UsageError
from postroad.events import Event, EventBatch, Gap, GapError
from postroad.ids import MessageId
from postroad.tracking.query.verdict import TraceResult

PUBLISH_CHUNK: Final = 1024


def connect(
    address: str = "localhost:7420",
    *,
    name: str = "",
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    timeout: float = 30.0,
    window: int | str = "4 MiB",
) -> Client:
    """As `postroad.connect`, connected when it returns: `with postroad.sync.connect(...) as client`."""
    return _open(aio.connect(address, name=name, token=token, tls=tls, timeout=timeout, window=window))


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
    """As `postroad.discover`, connected when it returns."""
    return _open(
        aio.discover(
            bdn=bdn,
            name=name,
            token=token,
            tls=tls,
            certificates=certificates,
            interface=interface,
            timeout=timeout,
            search=search,
            review=review,
            window=window,
        )
    )


def _open(client: aio.Client) -> Client:
    thread = LoopThread()
    try:
        thread.call(client._open)
    except BaseException:
        thread.stop()
        raise
    return Client(client, thread)


class Client:
    """A connection to the network, for any thread. Made by `connect` or `discover`."""

    def __init__(self, client: aio.Client, thread: LoopThread) -> None:
        self._client = client
        self._thread = thread

    @property
    def broker(self) -> str:
        """The name of the broker this client is connected to, or was last."""
        return self._client.broker

    @property
    def connected(self) -> bool:
        return self._client.connected

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._end(self._client._shut)

    def close(self) -> None:
        """Wait until what was published is accepted, then go. Raises what flush would."""
        self._end(self._client.close)

    def _end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            with contextlib.suppress(ClosedError):
                self._thread.call(work)
        finally:
            self._thread.stop()

    def publish(
        self,
        topic: str,
        payload: Payload = b"",
        attributes: Attributes | None = None,
        *,
        mode: str = "plain",
        durable: bool = False,
        ttl: float | None = None,
    ) -> Receipt:
        return self._thread.call(
            self._client.publish, topic, payload, attributes, mode=mode, durable=durable, ttl=ttl
        )

    def publish_many(
        self,
        events: Iterable[tuple[str, Payload] | tuple[str, Payload, Attributes | None]],
        *,
        mode: str = "plain",
        durable: bool = False,
        ids: Iterable[bytes] | None = None,
    ) -> int:
        """Publish (topic, payload) or (topic, payload, attributes) in turn; how many they were."""
        mode = check_mode(mode, durable)
        check_many(events, mode, ids)
        source = iter(events)
        own = None if ids is None else iter(ids)
        given = None if own is None else increasing(own)
        count = 0
        while chunk := list(itertools.islice(source, PUBLISH_CHUNK)):
            some = None if given is None else list(itertools.islice(given, len(chunk)))
            count += self._thread.call(self._client.publish_many, chunk, mode=mode, ids=some)
        if own is not None:
            check_spent(own)
        return count

    def flush(self) -> None:
        """Wait until everything published so far is accepted; raises if something was not taken."""
        self._thread.call(self._client.flush)

    def repair_by(self, way: str = "summaries", *, scope: str = "") -> None:
        """How this client takes part in the repair of best-effort events; before it does."""
        self._client.repair_by(way, scope=scope)

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
        timeout: float | None = None,
    ) -> Subscription:
        """As the async client's, begun when it returns. A `for` loop over it ends after `timeout` seconds
        without an event; None: never."""
        check_patience(timeout)
        inner = self._client.subscribe(
            topic,
            where,
            durable=durable,
            token=token,
            ack=ack,
            since=since,
            shared=shared,
            key=key,
            max_attempts=max_attempts,
            dead_letters=dead_letters,
            overflow=overflow,
            buffer=buffer,
            repair=repair,
            order=order,
        )
        inner._call_soon = self._thread.call_soon
        inner._answer = self._answer
        self._thread.call(inner._open)
        return Subscription(inner, self._thread, timeout)

    def read(self, until: str, *, after: str = "", topic: str = "", where: str = "") -> Subscription:
        """The durable events between two checkpoint tokens, filtered; then it ends."""
        inner = self._client.read(until, after=after, topic=topic, where=where)
        self._thread.call(inner._open)
        return Subscription(inner, self._thread, None)

    def application(self, name: str) -> Application:
        """The application of this name, which sends to others and receives from its own inbox."""
        return Application(self._client, name, self._thread)

    def ask(
        self,
        topic: str,
        payload: Payload = b"",
        attributes: Attributes | None = None,
        *,
        durable: bool = False,
        timeout: float = 5.0,
    ) -> Event:
        """Publish a request and wait for the first answer: somebody's `event.reply(...)`."""
        return self._thread.call(
            self._client.ask, topic, payload, attributes, durable=durable, timeout=timeout
        )

    def _answer(self, event: Event, payload: Payload, attributes: Attributes | None) -> Receipt:
        return self._thread.call(self._client._answer, event, payload, attributes)

    def request(self, what: str, /, **arguments: str) -> dict[str, Any]:
        """Ask the broker something, such as "status"."""
        return self._thread.call(self._client.request, what, **arguments)

    def trace(self, message: MessageId | str) -> TraceResult:
        """The path of a message: origin, route and receivers, each with its probability of being wrong."""
        return self._thread.call(self._client.trace, message)


class Subscription:
    """The events of one subscription: iterate over it, or `get` them one by one."""

    def __init__(self, inner: subscription.Subscription, thread: LoopThread, timeout: float | None) -> None:
        self._inner = inner
        self._thread = thread
        self._timeout = timeout

    @property
    def token(self) -> str:
        """The checkpoint token, JSON: everything handed out so far is consumed."""
        return self._inner.token

    def ack(self, event: Event | None = None, *, upto: str = "") -> None:
        """As the async client's: returns when the acknowledgement is on the broker's disk."""
        self._thread.call(self._inner.ack, event, upto=upto)

    def reject(self, event: Event, *, delay: float = 0.0) -> None:
        """As the async client's: returns when the attempt is on the broker's disk."""
        self._thread.call(self._inner.reject, event, delay=delay)

    @property
    def missing(self) -> tuple[str, ...]:
        """Brokers that had not confirmed it when it began."""
        return self._inner.missing

    @property
    def expired(self) -> int:
        """Events that nobody was handed, since their time was over."""
        return self._inner.expired

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ClosedError):
            self._thread.call(self._inner.__aexit__, kind, error, trace)

    def close(self) -> None:
        """Unsubscribe. What was not read is dropped; what was is acknowledged, unless `ack` is "manual"."""
        with contextlib.suppress(ClosedError):
            self._thread.call(self._inner.close)

    def __iter__(self) -> Iterator[Event | Gap]:
        while True:
            try:
                item = self._take(self._timeout)
            except TimeoutError:
                return
            if item is None:
                return
            yield item

    def batches(self, timeout: float | None = None) -> Iterator[list[EventBatch | Gap]]:
        """All that has come, a list at a time, as the encoded batches it came in.

        TimeoutError if nothing comes in `timeout` seconds; it can be called again then.
        """
        check_patience(timeout)
        source = self._inner.batches()
        with contextlib.suppress(ClosedError):
            while (items := self._thread.call(self._more, source, timeout)) is not None:
                yield items

    async def _more(
        self, source: AsyncIterator[list[EventBatch | Gap]], patience_s: float | None
    ) -> list[EventBatch | Gap] | None:
        async with asyncio.timeout(patience_s):
            return await anext(source, None)

    def only_events(self) -> Iterator[Event]:
        """The events alone: where some are missing, GapError is raised."""
        for item in self:
            if isinstance(item, Gap):
                raise GapError(item)
            yield item

    def get(self, timeout: float | None = None) -> Event | Gap:
        """The next one; TimeoutError if none comes in `timeout` seconds."""
        check_patience(timeout)
        item = self._take(timeout)
        if item is None:
            raise UsageError("this subscription is closed")
        return item

    def _take(self, timeout: float | None) -> Event | Gap | None:
        while (event := self._inner._take()) is None:
            try:
                item = self._thread.call(self._some, timeout)
            except ClosedError:
                return None
            if not isinstance(item, EventBatch):
                return item
        return event

    async def _some(self, patience_s: float | None) -> EventBatch | Gap | None:
        """The next batch, whose events can then be taken, or Gap; None at the end."""
        async with asyncio.timeout(patience_s):
            item = await self._inner._next()
        if isinstance(item, EventBatch):
            self._inner._ready.extend(item.events())
        return item
