"""Applications on the product's client core: durable publishers, and durable subscribers of both kinds.

An application is a process: it may crash, losing all that it holds in memory, and start again with what it
keeps. Its client core is driven as `client/aio.py` drives it, and what a subscription does with batches,
tokens and acknowledgements is what `client/subscription.py` does.

A subscriber with `ack=""` keeps its own token: events and token are committed in one transaction, and only
then acknowledged. One with "auto" acknowledges what it has when it asks for more, one with "batch" every now
and then; their brokers keep the token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from postroad.client import effects as fx
from postroad.client.core import ClientCore
from postroad.client.settings import ClientSettings
from postroad.errors import PeerError, UnavailableError
from postroad.events import EventBatch, Gap, Value
from postroad.events.token import CheckpointToken
from postroad.ids import parse_pubend
from postroad.seam.datagrams import Datagram, Endpoint, SendTo
from postroad.seam.effects import Close, Dial, Send
from postroad.sim.judge.durable import Reader
from postroad.sim.judge.ledger import Ledger, Published
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.frames import BatchView, split
from postroad.sim.machine.network import Network
from postroad.sim.machine.world import Timer, World
from postroad.units import MIB, MILLISECOND_US, SECOND_US
from postroad.wire.datagrams import is_ours
from postroad.wire.frames import Kind, Subscribe

RETRY_US: Final = (
    100 * MILLISECOND_US,
    2 * SECOND_US,
)  # an application that failed tries again after, from .. to
AWAY_US: Final = (50 * MILLISECOND_US, 20 * SECOND_US)  # one that crashed is back after
DATAGRAM_PORT: Final = 50_000
MAX_UNSETTLED: Final = 500  # events of a publisher; it pauses when it has that many

Item = TypeVar("Item")  # what a subscription hands out


class Life:
    """One process of an application: an endpoint of the network and the driver of a client core."""

    def __init__(
        self,
        world: World,
        network: Network,
        settings: ClientSettings,
        hear: Callable[[fx.Effect], None],
    ) -> None:
        self.name = settings.name
        self.alive = True
        self.core = ClientCore(settings, draw=world.random(f"application/{settings.name}").randrange)
        self._world = world
        self._network = network
        self._hear_effect = hear
        self._timer: Timer | None = None
        self.connection: int | None = None  # the last one that was opened
        self.opened_us = 0  # when that was
        self._endpoint: Endpoint = (settings.name, DATAGRAM_PORT)  # bound once there is something to send

    def start(self) -> None:
        self.perform(self.core.start(self._world.now_us))

    def end(self, *, silently: bool) -> None:
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()
        self._network.abandon(self, silently=silently)

    # -- the network's side

    def opened(self, connection: int, dialled: str | None) -> None:
        del dialled
        self.connection, self.opened_us = connection, self._world.now_us
        self._handle(fx.Opened(connection=connection, host=self._network.peer_host(connection)))

    def received(self, connection: int, frame: bytes) -> None:
        self._handle(fx.Received(connection=connection, frame=frame))

    def closed(self, connection: int) -> None:
        self._handle(fx.Closed(connection=connection))

    def dial_failed(self, address: str) -> None:
        self._handle(fx.DialFailed(address=address, reason="refused"))

    def datagram(self, source: Endpoint, data: bytes, group: Endpoint | None) -> None:
        if is_ours(data):
            self._handle(Datagram(source, data, group))

    def _handle(self, *items: fx.Input) -> None:
        if self.alive:
            self.perform(self.core.handle(items, self._world.now_us))

    def perform(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._network.send(self, effect.connection, effect.data)
            elif isinstance(effect, SendTo):
                self._network.bind(self._endpoint, self)
                self._network.send_datagram(self, self._endpoint, effect.endpoint, effect.data)
            elif isinstance(effect, Close):
                self._close(effect)
            elif isinstance(effect, Dial):
                self._network.dial(self, effect.address)
            if self.alive:
                self._hear_effect(effect)
        if self.alive:
            self._schedule()

    def _close(self, effect: Close) -> None:
        self._world.note(self.name, f"closes: {effect.error or 'done'}", connection=effect.connection)
        if isinstance(effect.error, PeerError):
            tags = (self.name, f"connection {effect.connection}")
            raise Violation("protocol", f"{self.name} closed {effect.connection}: {effect.error}", tags)
        self._network.close(effect.connection)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self.core.next_deadline()
        self._timer = None if deadline is None else self._world.at(deadline, self._handle)


class Application:
    """What stays while its processes come and go."""

    def __init__(
        self, world: World, network: Network, *, name: str, addresses: tuple[str, ...], window: int
    ) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.life: Life | None = None
        self.broker = ""  # the one it is connected to
        self.addresses = addresses
        self.comes_us = 0  # it does not start before
        self._window = window
        self._chance = world.random(f"habits/{name}")
        self._staying = False  # it crashes no more
        self._left = False  # it never comes back

    def start(self) -> None:
        if self.life is not None or self._left:
            return
        if self.world.now_us < self.comes_us:
            self.world.at(self.comes_us, self.start)
            return
        self.world.note(self.name, "starts")
        self.life = Life(self.world, self.network, self._settings(), self._hear_life)
        self._begin()
        self.life.start()

    def crash(self) -> None:
        """The process dies, and comes back after a while, perhaps at another broker first."""
        if self.life is None or self._staying:
            return
        self.world.note(self.name, "crashes")
        self._die(silently=self._chance.random() < 0.3)
        self._back_after(AWAY_US)

    def move(self) -> None:
        """Its next process dials another broker first."""
        self.addresses = (*self.addresses[1:], self.addresses[0])

    def stay(self) -> None:
        """It crashes no more."""
        self._staying = True
        self.start()

    def restart(self) -> None:
        self._die(silently=False)
        self.start()

    def leave(self) -> None:
        self._left = True
        self._die(silently=False)

    def _die(self, *, silently: bool) -> None:
        if self.life is not None:
            self.life.end(silently=silently)
            self.life, self.broker = None, ""
            self._forget()

    def _back_after(self, after_us: tuple[int, int]) -> None:
        if self._chance.random() < 0.5:
            self.move()
        low, high = after_us
        self.world.after(low + int(self._chance.random() ** 2 * (high - low)), self.start)

    def _hear_life(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Up(broker=broker):
                self.broker = broker
                self._up()
            case fx.Down():
                self.broker = ""
                self._down()
            case fx.Failed(error=error):
                if not isinstance(error, UnavailableError):
                    raise Violation("protocol", f"{self.name} was refused: {error}", (self.name,))
                self._die(silently=False)
                self._back_after(RETRY_US)
            case _:
                self._hear(effect)

    def _settings(self) -> ClientSettings:
        return ClientSettings(addresses=self.addresses, name=self.name, window=self._window)

    # -- what the kinds of applications do

    def _begin(self) -> None:
        """A process begins."""

    def _forget(self) -> None:
        """A process is gone."""

    def _up(self) -> None:
        """There is a broker."""

    def _down(self) -> None:
        """There is none any more."""

    def _hear(self, effect: fx.Effect) -> None:
        raise NotImplementedError


class DurablePublisher(Application):
    """Publishes durable events; an event is accepted when its receipt is there."""

    def __init__(
        self,
        world: World,
        network: Network,
        ledger: Ledger,
        *,
        name: str,
        addresses: tuple[str, ...],
        pubend_of: Callable[[str, bytes], int],
    ) -> None:
        """`pubend_of(broker, id)`: where an event sent to this broker belongs."""
        super().__init__(world, network, name=name, addresses=addresses, window=MIB)
        self._ledger = ledger
        self._pubend_of = pubend_of
        self._frames: dict[int, list[Published]] = {}  # by ordinal: what waits for its receipt
        self._welcome = False

    @property
    def ready(self) -> bool:
        return self.life is not None and self.life.core.outbox.room and self.waiting < MAX_UNSETTLED

    @property
    def waiting(self) -> int:
        return sum(map(len, self._frames.values()))

    def publish(self, events: list[tuple[str, dict[str, Value], bytes]]) -> None:
        if self.life is None:
            return
        core = self.life.core
        for topic, attributes, payload in events:
            id = core.publish(topic, payload, attributes, self.world.now_us, durable=True)
            event = Published(id=id, topic=topic, attributes=attributes, payload=payload, client=self.name)
            self._ledger.publish(event)
            self._frames.setdefault(core.outbox.ordinal, []).append(event)
        self.life.perform(core.flush())

    def _forget(self) -> None:
        self._frames.clear()  # their fate is unknown for ever

    def _hear(self, effect: fx.Effect) -> None:
        match effect:
            case Send(data=data):
                self._sent(data)
            case fx.Stored(ordinals=ordinals, error=error, perhaps=perhaps):
                for ordinal in ordinals:
                    for event in self._frames.pop(ordinal, []):
                        if error is None:
                            pubend = self._pubend_of(self.broker, event.id)
                            self._ledger.accept(event, pubend, self.world.now_us)
                        else:
                            self.world.note(self.name, f"rejected: {error}", tags=(event.text,))
                            event.rejected = not perhaps
            case fx.Lost(error=error):
                raise Violation("protocol", f"{self.name}: {error}", (self.name,))
            case _:
                pass

    def _sent(self, data: bytes) -> None:
        for frame in split(data):
            if frame[4] == Kind.PUBLISH:
                for id in BatchView(frame).ids():
                    pubend = self._pubend_of(self.broker, id)
                    self._ledger.events[id].sent.setdefault(pubend, self.world.now_us)


class Worker(Application, Generic[Item]):
    """One that takes what its subscription hands it at its own speed, and acknowledges it in its own way."""

    def __init__(
        self,
        world: World,
        network: Network,
        *,
        name: str,
        addresses: tuple[str, ...],
        window: int,
        consume: int,
    ) -> None:
        """`consume` is the rate in bytes a second at which a slow one works, 0 for at once."""
        super().__init__(world, network, name=name, addresses=addresses, window=window)
        self._consume = consume
        self._number = 0  # of the subscription in this process; 0: none
        self._queue: deque[tuple[Item, int]] = deque()  # with the bytes they took
        self._working = False
        self.looks = False  # until it leaves it acknowledges only what it must to get more
        self._finished = False  # it leaves nothing unacknowledged any more

    def leave_until(self, back_us: int) -> None:
        """Its process ends, whatever it has, and the next one begins then."""
        self._die(silently=False)
        self.looks, self.comes_us = False, back_us
        self.start()

    def hurry(self) -> None:
        self._consume = 0
        self._work()

    def finish(self) -> None:
        """The end of all work: what it has, and what it still gets, is acknowledged at once."""
        self._finished = True
        self._say()

    def _forget(self) -> None:
        self._number, self._working = 0, False
        self._queue.clear()

    def _receive(self, item: Item, size: int) -> None:
        self._queue.append((item, size))
        self._work()

    def _work(self) -> None:
        """Take what has come, at once or in its own time."""
        while self._queue and self.life is not None and not self._consume and not self._working:
            self._take(self.life)
        if self._queue and self.life is not None and not self._working:
            self._working = True
            self._work_later(self.life, max(1, self._queue[0][1]) * SECOND_US // self._consume)

    def _work_later(self, life: Life, delay_us: int) -> None:
        def work() -> None:
            if life is self.life:
                self._working = False
                if self._queue:
                    self._take(life)
                self._work()

        self.world.after(delay_us, work)

    def _take(self, life: Life) -> None:
        item, size = self._queue.popleft()
        self._consider(item)
        life.core.consumed(size)
        if self._finished:
            self._say()
        elif not self.looks:
            self._perhaps_say()
        if life is self.life:
            life.perform(life.core.flush())

    def _end(self, subject: str, error: Exception | None, *, expected: bool) -> None:
        """As an application would: what it has not read is gone with its subscription, it begins again."""
        self.world.note(self.name, f"{subject} was ended: {error}")
        if not expected:
            raise Violation("ended", f"{subject} was ended: {error}", (self.name,))
        self._die(silently=False)
        self._back_after(RETRY_US)

    # -- what the two kinds do

    def _consider(self, item: Item) -> None:
        """The work itself."""
        raise NotImplementedError

    def _perhaps_say(self) -> None:
        """Acknowledge, if it is its habit to do so now."""
        raise NotImplementedError

    def _say(self) -> None:
        """Acknowledge all that it has considered."""
        raise NotImplementedError


class DurableSubscriber(Worker[EventBatch | Gap]):
    """A durable subscription, and an application that reads it."""

    def __init__(
        self,
        world: World,
        network: Network,
        *,
        name: str,
        addresses: tuple[str, ...],
        reader: Reader,
        window: int,
        consume: int,
    ) -> None:
        super().__init__(world, network, name=name, addresses=addresses, window=window, consume=consume)
        self.reader = reader
        self._token: dict[int, int] = {}  # everything handed out is consumed
        self._settled: dict[int, int] = {}  # where the broker keeps the token: what this process acknowledged
        self._unsaid = 0  # items handed out since the last acknowledgement or transaction
        self._begun = 0  # the number, in this process, of the subscription that began last

    # -- one process

    def _begin(self) -> None:
        self.reader.begin(self.world.now_us)
        self._token = dict(self.reader.committed)

    def _forget(self) -> None:
        super()._forget()
        self.reader.end()
        self._settled = {}
        self._unsaid = 0
        self._begun = 0

    def _down(self) -> None:
        self.reader.away()

    def _up(self) -> None:
        self.reader.hosts[self.broker] = None
        if not self._number:
            self._subscribe()

    def _subscribe(self) -> None:
        life, reader = self.life, self.reader
        if life is None or self._number or not self.broker:
            return
        token = CheckpointToken(reader.committed).to_json() if reader.began and not reader.ack else ""
        self._number, effects = life.core.subscribe(
            Subscribe(
                number=0,
                topic=reader.selector.topic,
                where=reader.selector.where,
                durable=reader.name,
                token=token,
                ack=reader.ack,
                since_us=reader.since_us,
            )
        )
        life.perform(effects)

    def _hear(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Began(token=token, missing=missing):
                self.world.note(
                    self.name,
                    f"{self.reader.name} began at {self.broker} after {dict(token)}, missing {missing}",
                )
                resumed = self._begun == self._number
                self._begun = self._number
                opened_us = 0 if self.life is None else self.life.opened_us
                self.reader.subscribed(
                    self.broker, token, missing, self.world.now_us, resumed=resumed, opened_us=opened_us
                )
                for pubend, tick in token.items():
                    self._token.setdefault(pubend, tick)
                if self._settled:  # what was said on another connection may not have arrived
                    self._acknowledge(self._settled)
            case fx.Delivered(batch=batch, size=size):
                self._receive(batch, size)
            case fx.Missed(gap=gap, size=size):
                self._receive(gap, size)
            case fx.Ended(error=error):
                self._end(self.reader.name, error, expected=self.reader.may_end(error))
            case _:
                pass

    # -- reading

    def _consider(self, item: EventBatch | Gap) -> None:
        if self.reader.ack == "auto":
            self._say()  # who asks for more is done with what it had
        if isinstance(item, Gap) and not item.pubend:
            self.reader.gap_of_others()
            return
        if isinstance(item, Gap):
            pubend, end = int(parse_pubend(item.pubend)), item.end
            self.reader.gap(pubend, item.start, item.end)
        else:
            pubend, end = item.pubend, item.end
            self.reader.events(item)
        self._token[pubend] = max(end, self._token.get(pubend, 0))
        self._unsaid += 1

    def _perhaps_say(self) -> None:
        if self.reader.ack == "auto":
            said = not self._queue  # it asks for more, and waits
        else:
            said = self._unsaid >= 20 or self._chance.random() < 0.3
        if said:
            self._say()

    def _say(self) -> None:
        if not self._unsaid:
            return
        self._unsaid = 0
        self.reader.commit(self._token, self.world.now_us)
        if self.reader.ack:
            self._settled = dict(self._token)
        self._acknowledge(self._token)

    def _acknowledge(self, token: dict[int, int]) -> None:
        if self.life is not None and self._number:
            self.life.perform(self.life.core.acknowledge(self._number, token=token)[1])


class Clerk(Application):
    """Deletes a durable name as `postroad subs NAME --delete` does: it asks one broker, once."""

    def __init__(
        self, world: World, network: Network, *, name: str, addresses: tuple[str, ...], durable: str
    ) -> None:
        super().__init__(world, network, name=name, addresses=addresses, window=MIB)
        self._durable = durable

    def _up(self) -> None:
        if self.life is not None:
            self.life.perform(self.life.core.request("subs.delete", {"name": self._durable})[1])

    def _down(self) -> None:
        self._die(silently=False)

    def _hear(self, effect: fx.Effect) -> None:
        if isinstance(effect, fx.Answered):
            self.world.note(
                self.name, f"asked to delete {self._durable}, and heard: {effect.error or 'done'}"
            )
            self._die(silently=False)

    def _back_after(self, after_us: tuple[int, int]) -> None:
        """It does not come back."""
