"""Applications of the client without an event loop: the async ones, on its thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, final

from postroad.client import application
from postroad.client.application import WINDOW, Attributes, Payload
from postroad.client.arguments import check_patience
from postroad.client.loop_thread import ClosedError, LoopThread
from postroad.errors import UsageError
from postroad.events.attributes import Value

if TYPE_CHECKING:
    from postroad.client.aio import Client

SEND_CHUNK: Final = 1024


@final
class SendReceipt:
    """Messages that are kept. `ids` has one for each, `id` the first."""

    __slots__ = ("_inner", "_thread")

    def __init__(self, inner: application.SendReceipt, thread: LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def ids(self) -> tuple[str, ...]:
        return self._inner.ids

    def wait_delivered(self, timeout: float | None = None) -> None:
        """Until every message is accepted by a consumer, if it was sent with `confirm`; TimeoutError."""
        check_patience(timeout)
        delivered = self._inner.delivered

        async def wait() -> None:
            async with asyncio.timeout(timeout):
                await delivered

        self._thread.call(wait)


@final
class Message:
    """A message that an application received."""

    __slots__ = ("_inner", "_thread")

    def __init__(self, inner: application.Message, thread: LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def source(self) -> str:
        """The application that sent it, as its sender says."""
        return self._inner.source

    @property
    def principal(self) -> str:
        """Who sent it, as brokers know it: "" for anonymous clients."""
        return self._inner.principal

    @property
    def payload(self) -> bytes:
        return self._inner.payload

    @property
    def attributes(self) -> Mapping[str, Value]:
        return self._inner.attributes

    @property
    def kind(self) -> str:
        return self._inner.kind

    @property
    def attempt(self) -> int:
        """From 1: how often it was given to a consumer, as far as brokers know."""
        return self._inner.attempt

    @property
    def priority(self) -> int:
        return self._inner.priority

    @property
    def sent_at(self) -> datetime:
        """When a broker first took it."""
        return self._inner.sent_at

    def accept(self) -> None:
        """It is done with. Work counts once this returns; TakenError: it counts for somebody else."""
        self._thread.call(self._inner.accept)

    def reject(self, *, again: bool = True, delay: float = 0.0, reason: str = "") -> None:
        """Give it to a consumer once more, or put it with the dead letters."""
        self._thread.call(self._inner.reject, again=again, delay=delay, reason=reason)


class Application:
    """An application by its name. Made by `client.application(NAME)`."""

    def __init__(self, client: Client, name: str, thread: LoopThread) -> None:
        async def make() -> application.Application:
            return client.application(name)

        self._inner = thread.call(make)
        self._thread = thread

    @property
    def name(self) -> str:
        return self._inner.name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Its inboxes are closed, and it sends nothing more."""
        with contextlib.suppress(ClosedError):
            self._thread.call(self._inner.close)

    def send(
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
        """As the async client's: returns when the message is kept."""
        receipt = self._thread.call(
            self._inner.send,
            to,
            payload,
            kind=kind,
            reliable=reliable,
            attributes=attributes,
            priority=priority,
            delay=delay,
            expires=expires,
            confirm=confirm,
        )
        return SendReceipt(receipt, self._thread)

    def send_many(
        self,
        messages: Iterable[tuple[str, Payload] | tuple[str, Payload, Attributes | None]],
        *,
        kind: str = "transactional",
        reliable: bool = True,
        priority: int = 4,
        delay: float = 0.0,
        expires: float | None = None,
    ) -> list[str]:
        """Send (to, payload) or (to, payload, attributes) in turn; their ids, when all are kept."""
        source = iter(messages)
        ids: list[str] = []
        while chunk := list(itertools.islice(source, SEND_CHUNK)):
            ids += self._thread.call(
                self._inner.send_many,
                chunk,
                kind=kind,
                reliable=reliable,
                priority=priority,
                delay=delay,
                expires=expires,
            )
        return ids

    @contextlib.contextmanager
    def transaction(self) -> Iterator[application.Transaction]:
        """Several messages of which all are kept or none: `with shop.transaction() as t: t.send(...)`."""
        made = self._inner.transaction()
        yield made
        self._thread.call(made.__aexit__, None, None, None)

    def inbox(self, *, window: int = WINDOW, timeout: float | None = None) -> ApplicationInbox:
        """As the async client's, begun when it returns. A `for` loop over it ends after `timeout` seconds
        without a message; None: never."""
        check_patience(timeout)
        inner = self._inner.inbox(window=window)
        self._thread.call(inner._consumer.open)
        return ApplicationInbox(inner, self._thread, timeout)


class ApplicationInbox:
    """One consumer of an application's inbox: iterate over it, or `get` messages one by one."""

    def __init__(
        self, inner: application.ApplicationInbox, thread: LoopThread, timeout: float | None
    ) -> None:
        self._inner = inner
        self._thread = thread
        self._timeout = timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """What was not settled goes to another consumer."""
        with contextlib.suppress(ClosedError):
            self._thread.call(self._inner.close)

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                message = self._take(self._timeout)
            except TimeoutError:
                return
            if message is None:
                return
            yield message

    def get(self, timeout: float | None = None) -> Message:
        """The next one; TimeoutError if none comes in `timeout` seconds."""
        check_patience(timeout)
        message = self._take(timeout)
        if message is None:
            raise UsageError("this inbox is closed")
        return message

    def _take(self, timeout: float | None) -> Message | None:
        async def take() -> application.Message | None:
            async with asyncio.timeout(timeout):
                return await anext(self._inner, None)

        try:
            message = self._thread.call(take)
        except ClosedError:
            return None
        return None if message is None else Message(message, self._thread)
