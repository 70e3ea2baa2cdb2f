"""A client of queues that speaks frames over a socket: what it sends and what it gets is in plain sight."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

from msgspec.structs import replace

from postroad.wire import frames
from postroad.wire.frames import DEFAULT_LIMITS, Message, Posting, QueueMessage, Splitter

PATIENCE_S = 60.0  # far more than an idle machine needs


class QueueClient:
    """One connection. `sent` are the answers to sends, by number."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._splitter = Splitter(DEFAULT_LIMITS.batch_bytes)
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[type[Message], int], asyncio.Future[Any]] = {}
        self.delivered: asyncio.Queue[QueueMessage] = asyncio.Queue()
        self.confirmed: asyncio.Queue[frames.Sent] = asyncio.Queue()
        self.ended: asyncio.Queue[frames.Receiving] = asyncio.Queue()
        self.place = b""
        self._each: asyncio.Queue[frames.Sent] | None = None  # answers to parts of one SEND
        self.reading = asyncio.ensure_future(self._read())

    def _put(self, message: Message) -> None:
        self._writer.write(frames.encode(message))

    def _answer(self, kind: type[Message], number: int, message: Message) -> bool:
        future = self._waiting.pop((kind, number), None)
        if future is None or future.done():
            return False
        future.set_result(message)
        return True

    async def _read(self) -> None:
        while data := await self._data():
            for frame in self._splitter.feed(data):
                self._take(frames.decode(frame))

    async def _data(self) -> bytes:
        try:
            return await self._reader.read(1 << 16)
        except OSError:
            return b""

    def _take(self, message: Message) -> None:
        match message:
            case frames.Ping():
                self._put(frames.Pong(time_us=message.time_us, at_us=0))
            case frames.Messages():
                if message.place >= self.place:
                    self.place = message.place
                    for each in message.messages:
                        self.delivered.put_nowait(each)
            case frames.Sent():
                if self._each is not None:
                    self._each.put_nowait(message)
                elif message.state == "delivered":
                    self.confirmed.put_nowait(message)
                else:
                    self._answer(frames.Sent, message.number, message)
            case frames.Settled():
                self._answer(frames.Settled, message.ticket, message)
            case frames.Receiving():
                if not self._answer(frames.Receiving, message.number, message):
                    self.ended.put_nowait(message)
            case frames.Reply():
                self._answer(frames.Reply, message.number, message)
            case _:
                pass

    def _wait(self, kind: type[Message], number: int) -> asyncio.Future[Any]:
        future = self._waiting[kind, number] = asyncio.get_running_loop().create_future()
        return future

    async def send_frame(self, message: Any) -> frames.Sent:
        answer: frames.Sent
        future = self._wait(frames.Sent, message.number)
        self._put(message)
        async with asyncio.timeout(PATIENCE_S):
            answer = await future
        return answer

    async def send_all(self, source: Source, *postings: Posting, form: str) -> list[str]:
        """What each message of one SEND is answered."""
        self._each, states = asyncio.Queue(), [""] * len(postings)
        message = frames.Send(
            number=next(source._numbers),
            source=source.name,
            session=source.session,
            form=form,
            messages=postings,
        )
        self._put(message)
        async with asyncio.timeout(PATIENCE_S):
            while not all(states):
                sent = await self._each.get()
                for place in sent.places or range(len(postings)):
                    states[place] = sent.state or sent.code
        self._each = None
        return states

    async def receive(
        self, inbox: str, *, consumer: bytes | None = None, window: int = 64
    ) -> tuple[int, frames.Receiving]:
        number = next(self._numbers)
        future = self._wait(frames.Receiving, number)
        consumer = consumer or secrets.token_bytes(8)
        self._put(frames.Receive(number=number, inbox=inbox, consumer=consumer, window=window))
        async with asyncio.timeout(PATIENCE_S):
            return number, await future

    def unreceive(self, number: int) -> None:
        self._put(frames.Unreceive(number=number))

    async def settle(
        self, number: int, *keys: bytes, verdict: str = "accept", delay_us: int = 0, reason: str = ""
    ) -> frames.Settled:
        ticket = next(self._numbers)
        future = self._wait(frames.Settled, ticket)
        self._put(
            frames.Settle(
                number=number, ticket=ticket, keys=keys, verdict=verdict, delay_us=delay_us, reason=reason
            )
        )
        answer: frames.Settled
        async with asyncio.timeout(PATIENCE_S):
            answer = await future
        return answer

    async def take(self) -> QueueMessage:
        async with asyncio.timeout(PATIENCE_S):
            return await self.delivered.get()

    async def request(self, what: str, **arguments: str) -> Any:
        number = next(self._numbers)
        future = self._wait(frames.Reply, number)
        self._put(frames.Request(number=number, what=what, arguments=arguments))
        async with asyncio.timeout(PATIENCE_S):
            answer = await future
        return answer.code if answer.code else json.loads(answer.body)

    def source(self, name: str, session: bytes = b"") -> Source:
        return Source(self, name, session)

    async def close(self) -> None:
        self.reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.reading
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Source:
    """One session of an application: it remembers its ids, and can go on over another connection."""

    def __init__(self, client: QueueClient, name: str, session: bytes = b"") -> None:
        self.client, self.name = client, name
        self.session = session or secrets.token_bytes(8)
        self.last = 0
        self.chain: dict[str, bytes] = {}
        self._after: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def posting(self, inbox: str, payload: bytes, *, ordered: bool = True, **options: Any) -> Posting:
        self.last += 1
        after = self._after.get(inbox, 0) if ordered else 0
        if ordered:
            self._after[inbox] = self.last
        chain = self.chain.get(inbox, b"")
        return Posting(inbox=inbox, id=self.last, after=after, payload=payload, chain=chain, **options)

    async def post(
        self,
        *postings: Posting,
        form: str = "transactional",
        together: bool = False,
        confirm: bool = False,
    ) -> frames.Sent:
        """Transactional messages name the chain of their inbox, for which a broker is asked first."""
        if form == "transactional":
            for posting in postings:
                refused = await self._learn_chain(posting)
                if refused is not None:
                    return refused
            postings = tuple(
                replace(posting, chain=posting.chain or self.chain[posting.inbox]) for posting in postings
            )
        return await self.post_as_it_is(*postings, form=form, together=together, confirm=confirm)

    async def _learn_chain(self, posting: Posting) -> frames.Sent | None:
        """None, or why there is none to learn."""
        while posting.inbox not in self.chain and not posting.chain:
            sent = await self.post_as_it_is(posting)
            if sent.chain:
                self.chain[posting.inbox] = sent.chain
            elif sent.code != "unavailable":
                return sent
        return None

    async def post_as_it_is(
        self,
        *postings: Posting,
        form: str = "transactional",
        together: bool = False,
        confirm: bool = False,
    ) -> frames.Sent:
        message = frames.Send(
            number=next(self._numbers),
            source=self.name,
            session=self.session,
            form=form,
            messages=postings,
            together=together,
            confirm=confirm,
        )
        return await self.client.send_frame(message)

    async def send(self, inbox: str, payload: bytes, *, form: str = "transactional", **options: Any) -> str:
        """The state that the broker answers, or its code. One that is not known is sent again."""
        confirm = options.pop("confirm", False)
        posting = self.posting(inbox, payload, ordered=form == "transactional", **options)
        while True:
            sent = await self.post(posting, form=form, confirm=confirm)
            if sent.code != "unavailable":
                return sent.state or sent.code

    def end(self) -> None:
        self.client._put(frames.EndSession(source=self.name, session=self.session))


@contextlib.asynccontextmanager
async def queue_client(address: str, token: str = "") -> AsyncIterator[QueueClient]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    hello = frames.Hello(
        version=1, role="client", name="q", token=token, limits=DEFAULT_LIMITS, window=1 << 22, time_us=0
    )
    writer.write(frames.encode(hello))
    client = QueueClient(reader, writer)
    try:
        yield client
    finally:
        await client.close()
