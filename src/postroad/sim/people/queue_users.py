"""Applications that use queues in the simulated world: sources that send, consumers that accept.

They speak the wire protocol, lose their connection, go on at another broker, and send again under the same
ids what was not answered, as docs/reference/protocol.md tells a client to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from postroad.ids import SESSION_BYTES, SESSION_DRAWN_BYTES, first_number, session_from
from postroad.sim.judge.queues import QueueLedger
from postroad.sim.machine.network import Network
from postroad.sim.machine.world import World
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire import frames
from postroad.wire.frames import DEFAULT_LIMITS, Hello, Posting, Welcome, decode, encode

REDIAL_US: Final = 100 * MILLISECOND_US
AGAIN_US: Final = 300 * MILLISECOND_US  # before something that was refused for now is said again
SILENT_US: Final = 15 * SECOND_US  # without an answer, a user goes elsewhere
OUTSTANDING: Final = 8
WINDOW: Final = 8


def body_of(number: int) -> bytes:
    """What a message says, so that its consumer can tell whether that is what was sent."""
    return b"%d " % number * (10 + number % 20)


class _User:
    """A client connection that is made again and again, at one broker after the other."""

    alive = True

    def __init__(self, world: World, network: Network, name: str, addresses: list[str]) -> None:
        self.world, self.network, self.name = world, network, name
        self._addresses = addresses
        self._chance = world.random(f"user/{name}")
        self.connection: int | None = None
        self.up = False
        self.stopped = False
        self._heard_us = world.now_us
        world.after(0, self._dial)
        world.after(SECOND_US, self._watch)

    def _dial(self) -> None:
        if self.connection is None:
            self.network.dial(self, self._chance.choice(self._addresses))

    def _watch(self) -> None:
        if self.connection is not None and self.world.now_us - self._heard_us > SILENT_US:
            self.leave()
        self.world.after(SECOND_US, self._watch)

    def leave(self) -> None:
        """Give this connection up, and go elsewhere."""
        if self.connection is not None:
            self.network.close(self.connection)

    def opened(self, connection: int, _dialled: str | None) -> None:
        if self.connection is not None:
            self.network.close(connection)
            return
        self.connection, self._heard_us = connection, self.world.now_us
        self.say(
            Hello(
                version=1, role="client", name="u", token="", limits=DEFAULT_LIMITS, window=1 << 20, time_us=0
            )
        )

    def closed(self, connection: int) -> None:
        if connection == self.connection:
            self.connection, self.up = None, False
            self.world.after(REDIAL_US, self._dial)

    def dial_failed(self, _address: str) -> None:
        self.world.after(REDIAL_US, self._dial)

    def say(self, message: frames.Message) -> None:
        if self.connection is not None:
            self.network.send(self, self.connection, encode(message))

    def received(self, connection: int, frame: bytes) -> None:
        if connection != self.connection:
            return
        self._heard_us = self.world.now_us
        message = decode(frame)
        if isinstance(message, frames.Ping):
            self.say(frames.Pong(time_us=message.time_us, at_us=0))
        elif isinstance(message, Welcome):
            self.up = True
            self.welcomed()
        else:
            self.heard(message)

    def welcomed(self) -> None:
        raise NotImplementedError

    def heard(self, message: frames.Message) -> None:
        raise NotImplementedError

    def later(self, action: Callable[[], None]) -> None:
        """Unless the connection is another one by then."""
        connection = self.connection
        self.world.after(AGAIN_US, lambda: action() if connection == self.connection and self.up else None)


class QueueSource(_User):
    """Sends numbered transactional messages to inboxes, several at a time."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        addresses: list[str],
        *,
        inboxes: list[str],
        pause_us: int,
        ledger: QueueLedger,
    ) -> None:
        super().__init__(world, network, name, addresses)
        self.session = session_from(self._chance.randbytes(SESSION_BYTES)[:SESSION_DRAWN_BYTES])
        self._inboxes, self._pause_us, self._ledger = inboxes, pause_us, ledger
        self._last = 0
        self._after: dict[str, int] = {}
        self._chains: dict[str, bytes] = {}  # of each inbox, as the first answer said
        self.waiting: dict[int, Posting] = {}  # by id, in order: not answered
        world.after(pause_us, self._send_on)

    def _send_on(self) -> None:
        if self.stopped:
            return
        if len(self.waiting) < OUTSTANDING:
            self.send()
        self.world.after(self._chance.randrange(1, 2 * self._pause_us), self._send_on)

    def send(self) -> None:
        """The next message, to any of the inboxes."""
        self._last = max(self._last + 1, first_number(self.world.now_us // MILLISECOND_US))
        inbox = self._chance.choice(self._inboxes)
        posting = Posting(
            inbox=inbox,
            id=self._last,
            after=self._after.get(inbox, 0),
            payload=body_of(self._last),
        )
        self._after[inbox] = self._last
        self.waiting[self._last] = posting
        self._ledger.sent(self.name, inbox, self._last)
        if self.up:
            self._post(posting)

    def go_to(self, addresses: list[str]) -> None:
        """Give up the connection and what is on its way over it, and go on with these brokers."""
        self._addresses = addresses
        self.leave()

    def _post(self, posting: Posting) -> None:
        posting = replace(posting, chain=self._chains.get(posting.inbox, b""))
        self.say(
            frames.Send(
                number=posting.id,
                source=self.name,
                session=self.session,
                form="transactional",
                messages=(posting,),
            )
        )

    def welcomed(self) -> None:
        for posting in list(self.waiting.values()):
            self._post(posting)

    def heard(self, message: frames.Message) -> None:
        if not isinstance(message, frames.Sent):
            return
        posting = self.waiting.get(message.number)
        if posting is None:
            return
        if message.state == "kept":
            del self.waiting[message.number]
            self._ledger.kept(self.name, posting.inbox, posting.id)
        elif message.state == "gap" and message.chain and posting.inbox not in self._chains:
            self._chains[posting.inbox] = message.chain
            self._post(posting)
        elif message.state == "gap" or message.code in ("unavailable", "full"):
            self.later(lambda: self._post(posting) if posting.id in self.waiting else None)
        else:
            self._ledger.wrong(f"{self.name} was answered {message}")


class QueueConsumer(_User):
    """Accepts what it gets, in order, and now and then forgets to for a while."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        addresses: list[str],
        *,
        inbox: str,
        ledger: QueueLedger,
        absent_us: int = 0,
    ) -> None:
        """`absent_us`: for so long it does not receive, and messages wait for it."""
        super().__init__(world, network, name, addresses)
        self._inbox, self._ledger = inbox, ledger
        self._from_us = world.now_us + absent_us
        self._consumer = self._chance.randbytes(8)
        self._number = 0
        self._place = b""
        self._open: dict[int, tuple[bytes, tuple[str, int]]] = {}  # ticket -> key, who sent what
        self._ticket = 0
        self._done: set[tuple[str, int]] = set()  # as clients do, it counts a message once

    def welcomed(self) -> None:
        self._number += 1
        self._join()

    def _join(self) -> None:
        if self.world.now_us < self._from_us:
            self.later(self._join)
            return
        self.say(
            frames.Receive(number=self._number, inbox=self._inbox, consumer=self._consumer, window=WINDOW)
        )

    def heard(self, message: frames.Message) -> None:
        if isinstance(message, frames.Receiving):
            if message.code == "unavailable":
                self.later(self._join)
            elif message.code:
                self._ledger.wrong(f"{self.name} may not receive: {message}")
            else:
                # What it said and heard no answer to, it says again: it may count already.
                unanswered, self._open = list(self._open.values()), {}
                for key, message_id in unanswered:
                    self._settle(key, message_id)
        elif isinstance(message, frames.Messages) and message.place >= self._place:
            self._place = message.place
            for each in message.messages:
                if each.payload != body_of(each.id):
                    self._ledger.wrong(f"{self.name} got {each.payload[:40]!r} as message {each.id}")
                self._settle(each.key, (each.source, each.id))
        elif isinstance(message, frames.Settled):
            self._settled(message)

    def _settle(self, key: bytes, message_id: tuple[str, int]) -> None:
        self._ticket += 1
        self._open[self._ticket] = (key, message_id)
        self.say(frames.Settle(number=self._number, ticket=self._ticket, keys=(key,), verdict="accept"))

    def _settled(self, message: frames.Settled) -> None:
        settled = self._open.pop(message.ticket, None)
        if settled is None:
            return
        key, (source, number) = settled
        if message.code:
            self.later(lambda: self._settle(key, (source, number)))
        elif message.outcomes == ("accepted",) and (source, number) not in self._done:
            self._done.add((source, number))
            self._ledger.accepted(source, self._inbox, number, self.name)
