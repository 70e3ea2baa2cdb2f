"""One subscription of the async client: a queue between the core and the application.

It holds batches as they came; they are decoded when the application asks for events. What it holds is
bounded by the client's window, because credit goes back only as it is emptied.

Acknowledgements are said once per turn of the loop, so who reads on without ever waiting lets the loop run
every TURN_S. The client for programs without a loop reads from a thread of its own, hence the lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from itertools import takewhile
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from msgspec.structs import force_setattr

from postroad.client.arguments import check_patience
from postroad.client.asking import REPLY_TO
from postroad.client.clock import now_us
from postroad.client.repair.settings import RepairSettings
from postroad.client.settings import check_texts
from postroad.errors import BugError, PostroadError, UnavailableError, UsageError
from postroad.events import TTL, Event, EventBatch, Gap, GapError
from postroad.events.token import CheckpointToken
from postroad.ids import parse_pubend
from postroad.units import SECOND_US
from postroad.wire.frames import Subscribe

if TYPE_CHECKING:
    from postroad.client.aio import Client

TURN_S: Final = 0.002
MAX_DELAY_S: Final = 86_400.0  # of an event that is rejected
MAX_TRIED: Final = 65_536  # events that come next and were tried before
_NOT_HERE: Final = (
    "this event is not with this consumer any more: it was acknowledged or rejected, or the connection broke "
    "and it goes to another"
)
MAX_UNREAD: Final = 16_384  # batches of best-effort events that wait for the application


class Subscription:
    """The events of one subscription, each an Event, or a Gap where some are missing.

    `async for event in events` gives them one by one; `batches()` gives all that came, as the encoded
    batches they came in. Credit goes back to the broker as they are taken, so a program that falls behind
    holds no more than the client's window; then the broker's policy acts.
    """

    def __init__(
        self,
        client: Client,
        wanted: Subscribe,
        repair: RepairSettings | None = None,
    ) -> None:
        self._wanted = wanted
        self.topic, self.where = wanted.topic, wanted.where
        self.durable, self.shared = wanted.durable, wanted.shared
        self._repair = repair
        self.expired = 0  # events that nobody was handed, since their time was over
        self.dropped = 0  # best-effort batches that this program was too slow for
        self._token: dict[int, int] = dict(CheckpointToken.from_json(wanted.token)) if wanted.token else {}
        self._reading = (0, 0)  # pubend and end of the batch being read
        self._lock = threading.Lock()  # for the next eight
        self._fresh: dict[int, int] = {}  # handed out, perhaps not consumed yet: pubend -> tick
        self._settled: dict[int, int] = {}  # all that was consumed
        self._due: dict[int, int] = {}  # of that, what is to be acknowledged
        # Shared: handed out, by pubend and tick -> whether it is a gap, by its first tick.
        self._handed_out: dict[tuple[int, int], bool] = {}
        self._due_events: dict[tuple[int, int], bool] = {}  # shared: consumed, to be acknowledged
        self._attempts: dict[
            tuple[int, int], int
        ] = {}  # shared: of events that come next and were tried before
        self._last: dict[int, int] = {}  # the newest event or gap handed out: pubend -> tick
        self._acked: dict[int, int] = {}  # the token is the application's: what it said it has stored
        self._saying = False  # an acknowledgement is scheduled
        self._call_soon: Callable[[Callable[[], None]], object] | None = None  # on the client's loop
        self.missing: tuple[str, ...] = ()  # brokers that had not confirmed it when it began
        self._client = client
        self._answer: Callable[..., object] = client._answer  # what `event.reply` of its events does
        self._number: int | None = None
        self._began: asyncio.Future[None] | None = None
        # Bounded by the client's window: what came and its size. Between two of these at most one token, up
        # to which there is nothing for this subscription.
        self._queue: deque[tuple[EventBatch | Gap | dict[int, int], int]] = deque()
        self._ready: deque[Event] = deque()  # of the batch being read
        self._waiter: asyncio.Future[None] | None = None
        self._turn_ends = 0.0  # 0: nothing was read in this turn of the loop
        self._over = False
        self._error: PostroadError | None = None

    # --- life

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            if issubclass(kind, Exception):
                self._reject_last()
            self._fresh.clear()  # who fails is not done with what it was given last
            self._handed_out.clear()
        await self.close()

    def __await__(self) -> Generator[Any, None, Subscription]:
        return self._open().__await__()

    async def _open(self) -> Subscription:
        """Begin, unless it has begun; returns once every broker that can be reached filters with it."""
        if self._over:
            raise self._error or UsageError("this subscription is closed")
        client = self._client
        if self._began is None:
            await client._until(lambda: client.connected)
            self._number, effects = client._core.subscribe(self._wanted, repair=self._repair, now_us=now_us())
            loop = asyncio.get_running_loop()
            self._began = loop.create_future()
            self._call_soon = self._call_soon or loop.call_soon
            client._subscriptions[self._number] = self
            client._perform(effects)
        began = self._began
        try:
            await client._until(began.done)
            began.result()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Unsubscribe. What was not read is dropped; what was is acknowledged, unless `ack` is "manual"."""
        client = self._client
        if self._number is not None:
            if not self._over:
                self._settle()
                self._say()
            if client._subscriptions.pop(self._number, None) is not None:
                client._perform(client._core.unsubscribe(self._number))
            self._drop_unread()
            client._flush()
        self._end(None)

    @property
    def repair(self) -> dict[str, float]:
        """What repair of best-effort events did so far; empty without `repair`."""
        if self._number is None or self._repair is None:
            return {}
        return self._client._core.effort.figures(self._number)

    # --- durable subscriptions

    @property
    def token(self) -> str:
        """The checkpoint token, JSON: everything handed out so far is consumed. Keep it with your own state,
        and go on after it with `subscribe(durable=..., token=...)`, at any broker."""
        return CheckpointToken(self._token).to_json()

    async def ack(self, event: Event | None = None, *, upto: str = "") -> None:
        """Everything up to this event of its pubend was consumed; without one, all that was handed out.

        Of a shared subscription: this event was, and the gaps handed out before it; or all that this consumer
        was handed. `upto`, a checkpoint token, is for who got the events by other ways, such as
        `client.read`: everything up to it was consumed. Returns when that is on the broker's disk;
        when it raises, the events may come again, or not.
        """
        if not self.durable:
            raise UsageError("only a durable subscription is acknowledged")
        if self._number is None or self._over:
            raise self._error or UsageError("this subscription is closed")
        if event is not None and (not isinstance(event, Event) or event.pubend is None or event.tick is None):
            raise UsageError("only a durable event is acknowledged")
        check_texts("token", upto)
        if upto and (self.shared or event is not None):
            raise UsageError("a token is acknowledged by itself, and not of a shared subscription")
        token: dict[int, int] = {}
        events: list[tuple[int, int]] = []
        with self._lock:
            if upto:
                token = dict(CheckpointToken.from_json(upto))
            elif event is not None and event.pubend is not None and event.tick is not None:
                pubend = parse_pubend(event.pubend)
                token = {pubend: event.tick}
                events = self._up_to((pubend, event.tick))
            else:
                token, events = dict(self._token), list(self._handed_out)
            if self.shared and not self._handed_out.keys() >= set(events):
                raise UnavailableError(_NOT_HERE)
            for place in events:
                self._handed_out.pop(place, None)
        if events if self.shared else token:
            await self._client._acknowledge(
                self._number, None if self.shared else token, _by_pubend(events) if self.shared else None
            )
            with self._lock:
                self._acked = dict(CheckpointToken(self._acked).maximum(CheckpointToken(token)))

    async def reject(self, event: Event, *, delay: float = 0.0) -> None:
        """This attempt at an event of a shared subscription failed: it comes again, to whichever consumer,
        after `delay` seconds, with `event.attempt` one higher; or it is a dead letter, if that was the last
        attempt. Returns when the attempt is on the broker's disk.

        A loop that ends with an exception has rejected the event that it was at.
        """
        if not self.shared:
            raise UsageError("only an event of a shared durable subscription is rejected")
        if self._number is None or self._over:
            raise self._error or UsageError("this subscription is closed")
        if not isinstance(event, Event) or event.pubend is None or event.tick is None:
            raise UsageError("only a durable event is rejected")
        if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay <= MAX_DELAY_S:
            raise UsageError(f"`delay` is between 0 and {MAX_DELAY_S} seconds, not {delay!r}")
        place = (parse_pubend(event.pubend), event.tick)
        with self._lock:
            if place not in self._handed_out:
                raise UnavailableError(_NOT_HERE)
            del self._handed_out[place]
        await self._client._acknowledge(
            self._number, None, None, rejected=_by_pubend([place]), delay_us=round(delay * SECOND_US)
        )

    def _reject_last(self) -> None:
        """The application failed at what it was handed last; nobody waits to hear that it is counted."""
        client = self._client
        with self._lock:
            place, is_gap = next(reversed(self._handed_out.items()), (None, True))
        if place is None or is_gap or self._number is None or self._over or not client.connected:
            return
        _, effects = client._core.acknowledge(self._number, rejected=_by_pubend([place]))
        client._perform(effects)

    def _tried(self, pubend: int, attempts: Iterable[tuple[int, int]]) -> None:
        """These come next, and not for the first time."""
        for tick, attempt in attempts:
            self._attempts[pubend, tick] = attempt
        while len(self._attempts) > MAX_TRIED:
            del self._attempts[next(iter(self._attempts))]

    def _up_to(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        """Shared: this event, and the gaps that were handed out before it."""
        before = takewhile(lambda earlier: earlier != place, self._handed_out)
        return [*(earlier for earlier in before if self._handed_out[earlier]), place]

    def _hand_out(self, pubend: int, tick: int, end: int) -> None:
        """The application gets the event at `tick`; it then has everything up to `end`."""
        if not self.durable:
            return
        with self._lock:
            if self.shared:
                self._handed_out[pubend, tick] = False
            else:
                self._last[pubend] = tick
                self._advance(pubend, end)

    def _advance(self, pubend: int, tick: int) -> None:
        if tick > self._token.get(pubend, 0):
            self._token[pubend] = self._fresh[pubend] = tick

    def _pass(self, pubend: int, tick: int) -> None:
        """Nothing comes up to this tick that is not in the queue."""
        if not self._queue or not isinstance(self._queue[-1][0], dict):
            self._queue.append(({}, 0))
        passed = self._queue[-1][0]
        if isinstance(passed, dict):
            passed[pubend] = tick
        self._notify()

    def _advance_over(self, passed: Mapping[int, int]) -> None:
        """There was nothing up to here. The brokers may forget that, where the application has acknowledged
        all that it was given; else a subscription that matches nothing would hold storage for ever."""
        with self._lock:
            for pubend, tick in passed.items():
                self._advance(pubend, tick)
                if self._acked.get(pubend, 0) >= self._last.get(pubend, 0):
                    self._acked[pubend] = self._due[pubend] = tick
        self._say()

    def _pass_over(self, event: Event) -> None:
        """Its time is over: nobody is handed it, and it need not come again."""
        self.expired += 1
        if event.tick is None or not self.durable:
            return
        pubend, end = self._reading
        tick = event.tick if self._ready else end
        with self._lock:
            if self.shared:
                self._due_events[pubend, event.tick] = False
                self._attempts.pop((pubend, event.tick), None)
            else:
                if tick > self._token.get(pubend, 0):
                    self._token[pubend] = tick
                kept_here = self._wanted.ack in ("auto", "batch")
                if kept_here and pubend not in self._fresh:
                    self._settled[pubend] = self._due[pubend] = tick
                elif kept_here:
                    self._fresh[pubend] = tick  # with what was handed out before it
                elif self._acked.get(pubend, 0) >= self._last.get(pubend, 0):
                    self._acked[pubend] = self._due[pubend] = tick
        self._say_soon()

    def _settle(self) -> None:
        """Who asks for more is done with what it had."""
        if self._wanted.ack not in ("auto", "batch") or not (self._fresh or self._handed_out):
            return
        with self._lock:
            self._settled.update(self._fresh)
            self._due.update(self._fresh)
            self._fresh.clear()
            self._due_events.update(self._handed_out)
            self._handed_out.clear()
        self._say_soon()

    def _say_soon(self) -> None:
        with self._lock:
            if self._saying or self._call_soon is None:
                return
            self._saying = True
        self._call_soon(self._say)

    def _say(self) -> None:
        """Acknowledge what is due; without a connection once there is one."""
        client = self._client
        with self._lock:
            self._saying = False
            if not client.connected or self._number is None or not (self._due or self._due_events):
                return
            due, self._due = self._due, {}
            events, self._due_events = self._due_events, {}
        client._said_on = client._connection
        _, effects = client._core.acknowledge(
            self._number, token=due or None, events=_by_pubend(events) if events else None
        )
        client._perform(effects)

    def _lost_connection(self) -> None:
        """What a consumer of a shared subscription has not acknowledged goes to others."""
        if self.shared:
            with self._lock:
                self._handed_out.clear()
                self._due_events.clear()
                self._attempts.clear()
            self._drop_unread()

    def _drop_unread(self) -> None:
        for _, taken in self._queue:  # also of one that the broker ended: others share the window
            self._client._core.consumed(taken)
        self._queue.clear()
        self._ready.clear()

    # --- reading

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event | Gap:
        if self._ready and monotonic() >= self._turn_ends and self._turn_over():
            if self._wanted.ack == "auto":
                self._settle()
            await self._end_turn()
        while (event := self._take()) is None:
            item = await self._next()
            if item is None:
                raise StopAsyncIteration
            if isinstance(item, Gap):
                return item
            self._ready.extend(item.events())
        return event

    async def only_events(self) -> AsyncIterator[Event]:
        """The events alone: where some are missing, GapError is raised."""
        async for item in self:
            if isinstance(item, Gap):
                raise GapError(item)
            yield item

    async def get(self, timeout: float | None = None) -> Event | Gap:  # noqa: ASYNC109 -- as of queues
        """The next one; TimeoutError if none comes in `timeout` seconds."""
        check_patience(timeout)
        async with asyncio.timeout(timeout):
            try:
                return await anext(self)
            except StopAsyncIteration:
                raise UsageError("this subscription is closed") from None

    def _take(self) -> Event | None:
        """The next event of the batch being read."""
        if not self._ready:
            return None
        if self._wanted.ack == "auto":
            self._settle()
        while True:
            try:
                event = self._ready.popleft()
            except IndexError:  # the connection broke, and it goes to another consumer; or all are too old
                return None
            if TTL not in event.attributes or self._wanted.until or not event.expired(self._client._now_ms()):
                break
            self._pass_over(event)
        if event.tick is not None:
            pubend, end = self._reading
            self._hand_out(pubend, event.tick, event.tick if self._ready else end)
            if self._attempts:
                force_setattr(event, "attempt", self._attempts.pop((pubend, event.tick), 1))
        if REPLY_TO in event.attributes:
            force_setattr(event, "_answer", self._answer)
        return event

    async def batches(self) -> AsyncIterator[list[EventBatch | Gap]]:
        """All that has come, a list at a time."""
        while (item := await self._next()) is not None:
            items = [item]
            while self._queue and not isinstance(self._queue[0][0], dict):
                items.append(self._pop())
            for delivered in items:
                if isinstance(delivered, EventBatch):
                    self._hand_out_batch(delivered)
            yield items

    def _hand_out_batch(self, batch: EventBatch) -> None:
        if self.shared:
            for tick in batch.headers["tick"].tolist():
                self._hand_out(batch.pubend, tick, tick)
                self._attempts.pop((batch.pubend, tick), None)
        else:
            self._hand_out(batch.pubend, batch.end, batch.end)

    async def _next(self) -> EventBatch | Gap | None:
        """Wait for something to come; None once it is over and everything was read."""
        if self._began is None or not self._began.done():
            await self._open()
        self._settle()
        if self._queue and monotonic() >= self._turn_ends and self._turn_over():
            await self._end_turn()
        while True:
            while self._queue:
                passed = self._queue[0][0]
                if not isinstance(passed, dict):
                    return self._pop()
                self._queue.popleft()
                self._advance_over(passed)
            if self._over:
                if self._error is not None:
                    raise self._error.with_traceback(None)
                return None
            if self._waiter is not None:
                raise UsageError("this subscription is being read by another task")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _turn_over(self) -> bool:
        """False if it has only begun."""
        if self._turn_ends:
            return True
        self._begin_turn()
        return False

    def _begin_turn(self) -> None:
        self._turn_ends = monotonic() + TURN_S
        asyncio.get_running_loop().call_soon(self._forget_turn)

    def _forget_turn(self) -> None:
        self._turn_ends = 0.0

    async def _end_turn(self) -> None:
        self._say()  # here: a loop may write only at the end of a turn, and the next one is ours again
        await asyncio.sleep(0)
        self._begin_turn()

    def _pop(self) -> EventBatch | Gap:
        item, taken = self._queue.popleft()
        if isinstance(item, dict):
            raise BugError("a token is not handed out")
        if isinstance(item, EventBatch):
            self._reading = (item.pubend, item.end)
        elif item.pubend and self.durable:
            with self._lock:
                pubend = parse_pubend(item.pubend)
                if self.shared:
                    self._handed_out[pubend, item.start + 1] = True
                else:
                    self._last[pubend] = item.end
                    self._advance(pubend, item.end)
        if taken:
            client = self._client
            client._core.consumed(taken)
            client._schedule_flush()
        return item

    # --- what the client tells it

    def _put(self, item: EventBatch | Gap, taken: int) -> None:
        if not taken and self._queue and isinstance(item, Gap) and not item.pubend:
            # Gaps of reconnects take nothing of the window. Two with nothing between them are told as one.
            last, size = self._queue[-1]
            if isinstance(last, Gap) and not last.pubend:
                self._queue[-1] = (Gap(pubend="", start=last.start, end=item.end), size)
                return
        if not taken and len(self._queue) >= MAX_UNREAD and isinstance(item, EventBatch):
            self.dropped += 1  # only best-effort events take nothing of the window
            return
        self._queue.append((item, taken))
        self._notify()

    def _begin(self, missing: tuple[str, ...], token: Mapping[int, int]) -> None:
        self.missing = missing
        with self._lock:
            for pubend, tick in token.items():
                self._token.setdefault(pubend, tick)
            self._due.update(self._settled)  # what was said on another connection may not have arrived
        self._say()
        if self._began is not None and not self._began.done():
            self._began.set_result(None)
        self._client._wake()

    def _end(self, error: PostroadError | None) -> None:
        if self._over:
            return
        self._over = True
        self._error = error
        if error is not None and self.durable:
            self._drop_unread()  # another may have it by now
        if self._began is not None and not self._began.done():
            self._began.set_exception(error or UsageError("this subscription is closed"))
            self._began.exception()  # looked at here: nobody may be waiting for it
        self._client._wake()
        self._notify()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _by_pubend(events: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    ticks_of: dict[int, list[int]] = {}
    for pubend, tick in events:
        ticks_of.setdefault(pubend, []).append(tick)
    return {pubend: tuple(ticks) for pubend, ticks in ticks_of.items()}
