"""Applications that use queues by way of the product's client core, as `client/application.py` drives it.

A sender sends transactional messages, some of which expire. A receiver handles one message at a time: it
works for a while, then accepts it, or rejects it so that it comes again at once or later.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from postroad.client import effects as fx
from postroad.client.settings import ClientSettings
from postroad.errors import UnavailableError
from postroad.ids import SESSION_BYTES, SESSION_DRAWN_BYTES, session_from
from postroad.sim.judge.queues import QueueLedger
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.network import Network
from postroad.sim.machine.world import World
from postroad.sim.people.applications import Application
from postroad.units import MIB, MILLISECOND_US, SECOND_US
from postroad.wire.frames import Posting, QueueMessage

OUTSTANDING: Final = 8
WINDOW: Final = 8
PATIENCE_US: Final = (
    3_600 * SECOND_US
)  # nothing is given up: what gets no answer at all is found by the judge
EXPIRING: Final = 0.1  # of the messages
EXPIRES_US: Final = (50 * MILLISECOND_US, 3 * SECOND_US)
WORK_US: Final = (0, 0, 0, 5 * MILLISECOND_US, 200 * MILLISECOND_US)  # with one message
DELAYS_US: Final = (0, 0, 300 * MILLISECOND_US, 2 * SECOND_US)  # of one that is to come again
MAX_REJECTED_ATTEMPT: Final = 2  # a later one is accepted: nothing becomes a dead letter by rejections


class _QueueUser(Application):
    def __init__(self, world: World, network: Network, name: str, addresses: list[str]) -> None:
        order = list(addresses)
        world.random(f"order/{name}").shuffle(order)
        super().__init__(world, network, name=name, addresses=tuple(order), window=MIB)
        self.stopped = False
        world.after(0, self.start)

    def _settings(self) -> ClientSettings:
        return replace(super()._settings(), outage_us=PATIENCE_US)


class QueueSender(_QueueUser):
    """Sends to inboxes, several messages at a time."""

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
        expiring: float = EXPIRING,
    ) -> None:
        super().__init__(world, network, name, addresses)
        self.session = session_from(self._chance.randbytes(SESSION_BYTES)[:SESSION_DRAWN_BYTES])
        self._inboxes, self._pause_us, self._ledger = inboxes, pause_us, ledger
        self._expiring = expiring
        self._unkept: dict[int, tuple[str, int]] = {}  # by ordinal: inbox and id
        world.after(pause_us, self._send_on)

    def _begin(self) -> None:
        assert self.life is not None
        self.life.core.sender.begin_session(self.name, self.session)

    def _send_on(self) -> None:
        if self.stopped:
            return
        if self.life is not None and self.life.core.sender.room and len(self._unkept) < OUTSTANDING:
            self.send()
        self.world.after(self._chance.randrange(1, 2 * self._pause_us), self._send_on)

    def send(self) -> None:
        assert self.life is not None
        core, now_us = self.life.core, self.world.now_us
        inbox = self._chance.choice(self._inboxes)
        expires_us = self._chance.randrange(*EXPIRES_US) if self._chance.random() < self._expiring else 0
        posting = Posting(
            inbox=inbox, id=0, after=0, payload=self._chance.randbytes(60), expires_us=expires_us
        )
        added = core.sender.add(
            self.session, "transactional", [posting], now_us, reliable=True, together=False, confirm=False
        )
        ((ordinal, number),) = added
        self._unkept[ordinal] = (inbox, number)
        self._ledger.sent(self.name, inbox, number, posting.payload, expires=expires_us > 0)
        self.life.perform(core.send_queued(now_us))

    def _hear(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Kept(ordinals=ordinals):
                for ordinal in ordinals:
                    inbox, number = self._unkept.pop(ordinal)
                    self._ledger.kept(self.name, inbox, number)
            case fx.Refused(error=error):
                raise Violation("answer", f"{self.name} was refused: {error}", (self.name,))
            case _:
                pass


class QueueReceiver(_QueueUser):
    """Handles the messages of an inbox one after the other."""

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
        rejecting: float = 0.15,
        work_us: tuple[int, ...] = WORK_US,
    ) -> None:
        """`absent_us`: for so long it does not receive, and messages wait for it."""
        super().__init__(world, network, name, addresses)
        self.comes_us = world.now_us + absent_us
        self._inbox, self._ledger = inbox, ledger
        self._rejecting, self._work_us = rejecting, work_us
        self._number = 0
        self._message: QueueMessage | None = None  # that it works on
        self._ticket = 0  # of its verdict on that

    def _begin(self) -> None:
        assert self.life is not None
        self._number, effects = self.life.core.receive(
            self._inbox, self._chance.randbytes(8), WINDOW, self.world.now_us
        )
        self.life.perform(effects)

    def _hear(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Arrived():
                self._take()
            case fx.Verdict(outcome=outcome, error=error):
                if error is not None:
                    raise Violation("answer", f"{self.name} was refused: {error}", (self.name,))
                self._settled(outcome)
            case fx.InboxEnded(error=error):
                if not isinstance(error, UnavailableError):
                    raise Violation("answer", f"{self.name} may not receive: {error}", (self.name,))
                assert self.life is not None
                self._begin()
            case _:
                pass

    def _take(self) -> None:
        if self._message is not None or self.life is None:
            return
        self._message = self.life.core.receiver.next(self._number)
        if self._message is not None:
            message = self._message
            self._ledger.handed(message.source, self._inbox, message.id, message.payload)
            self.world.after(self._chance.choice(self._work_us), self._settle)

    def _settle(self) -> None:
        message = self._message
        assert message is not None
        assert self.life is not None
        core, now_us = self.life.core, self.world.now_us
        rejects = message.attempt <= MAX_REJECTED_ATTEMPT and self._chance.random() < self._rejecting
        verdict, delay_us = ("again", self._chance.choice(DELAYS_US)) if rejects else ("accept", 0)
        self._ticket = core.receiver.settle(self._number, message, verdict, now_us, delay_us=delay_us)
        self.life.perform(core.send_queued(now_us))

    def _settled(self, outcome: str) -> None:
        message, self._message = self._message, None
        assert message is not None
        if outcome == "accepted":
            self._ledger.accepted(message.source, self._inbox, message.id, self.name)
        elif outcome not in ("again", "taken"):
            text = f"{self.name} was told {outcome!r} of message {message.id} of {message.source}"
            raise Violation("early", text, (message.source, self.name))
        self._take()
