"""How the clients of a broker that drains go on elsewhere, before the broker stops.

Nobody new is taken, and nothing new of those who are there. Whoever has heard the outcome of all that it
published and got what waits for it is told where to go on: the client sends again, at the next broker, what
was not answered here, and nothing of that was taken here. So nothing is published twice, and nothing that was
answered is lost. Who takes nothing of what waits for it for a while is not waited for.

Publishers go first. Durable subscribers follow when they have acknowledged what was published here: nobody
can read this broker's log while it is away. The broker then stays until their subscriptions have moved: their
next broker asks this one for the token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from postroad.clients.publishing import Receipts
from postroad.errors import UnavailableError
from postroad.links.connection import SHUTTING_DOWN
from postroad.links.links import Links
from postroad.seam.turn import Turn
from postroad.streams.delivery import Delivery
from postroad.streams.routing import Routing
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.frames import Kind

LOOK_US: Final = 20 * MILLISECOND_US  # between looks at who is still there
STALLED_US: Final = SECOND_US  # without taking anything of what waits for it: a client is not waited for
LINGER_US: Final = 2 * SECOND_US  # at most, for durable subscriptions whose clients have gone
# What would begin something here: a client says it again at the next broker.
NOT_TAKEN: Final = frozenset({Kind.PUBLISH, Kind.SUBSCRIBE, Kind.SEND, Kind.RECEIVE})


class DurableSubscribers(Protocol):
    def attached(self) -> frozenset[int]:
        """Those with a client that may go on at another broker."""

    def reads(self, connection: int) -> bool:
        """Whether this client has one of them."""

    def behind(self, connection: int) -> int:
        """Events published here that this client has not acknowledged."""

    def give_back(self, turn: Turn, connection: int) -> None:
        """This client is not lost: what it has of shared subscriptions was not tried."""

    def still_here(self, subscribers: frozenset[int]) -> bool:
        """Whether one of these has neither moved nor is deleted."""


class Departing:
    """`elsewhere` says which other brokers there are: how far, and where; the nearest first. `here_only` says
    whether an address means something to clients on this machine only."""

    def __init__(
        self,
        *,
        links: Links,
        receipts: Receipts,
        delivery: Delivery,
        routing: Routing,
        durable: DurableSubscribers | None,
        elsewhere: Callable[[], list[tuple[int, str]]],
        here_only: Callable[[str], bool],
    ) -> None:
        self._links = links
        self._receipts = receipts
        self._delivery = delivery
        self._routing = routing
        self._durable = durable
        self._elsewhere = elsewhere
        self._here_only = here_only
        self._look_at: int | None = None
        # Connection -> bytes and events that wait for it, and since when it is that many.
        self._waiting: dict[int, tuple[int, int]] = {}
        self._moving: frozenset[int] = frozenset()  # durable subscriptions that had a client
        self._empty_us: int | None = None  # since when there is no client

    def begin(self, turn: Turn) -> None:
        self._links.send_clients_on(self.send_on)
        self._look_at = turn.now_us
        if self._durable is not None and self._elsewhere():
            self._moving = self._durable.attached()
        turn.note("info", f"draining: {len(self._links.client_peers())} clients go on elsewhere")

    def takes(self, connection: int, kind: int) -> bool:
        """Whether a frame that came since still counts."""
        return kind not in NOT_TAKEN or self._links.role(connection) != "client"

    def send_on(self, turn: Turn, connection: int) -> None:
        """This client is told where others are, and closed."""
        known = self._elsewhere()
        if not self._links.on_this_machine(connection):
            known = [place for place in known if not self._here_only(place[1])]
        go_to = in_turn(known, connection)
        self._links.refuse(turn, connection, UnavailableError(SHUTTING_DOWN), go_to)

    def done(self, now_us: int) -> bool:
        """Whether there is nothing left to wait for."""
        if self._empty_us is None or self._routing.owes_own:
            return False
        moved = self._durable is None or not self._durable.still_here(self._moving)
        return moved or now_us - self._empty_us >= LINGER_US

    def tick(self, turn: Turn) -> None:
        if self._look_at is None or turn.now_us < self._look_at:
            return
        self._look_at = turn.now_us + LOOK_US
        connections = [peer.connection for peer in self._links.client_peers()]
        readers = {
            number for number in connections if self._durable is not None and self._durable.reads(number)
        }
        publishing = any(number not in readers or self._receipts.waits(number) for number in connections)
        for number in connections:
            waits = self._receipts.waits(number) or (number in readers and publishing)
            if not waits and not self._takes_more(number, turn.now_us):
                if self._durable is not None:
                    self._durable.give_back(turn, number)
                self.send_on(turn, number)
        if not connections and self._empty_us is None:
            self._empty_us = turn.now_us

    def _takes_more(self, connection: int, now_us: int) -> bool:
        """Whether something waits for this client, and it goes on taking it."""
        owed = self._delivery.waiting(connection)
        if self._durable is not None:
            owed += self._durable.behind(connection)
        before, since_us = self._waiting.get(connection, (0, now_us))
        if owed != before:
            since_us = now_us
        self._waiting[connection] = (owed, since_us)
        return owed > 0 and now_us - since_us < STALLED_US

    def next_deadline(self) -> int | None:
        return self._look_at

    def check(self) -> None:
        """Nothing here can contradict itself."""


def in_turn(places: list[tuple[int, str]], number: int) -> tuple[str, ...]:
    """The addresses, the nearest first; equally near ones take turns to be the first, so that not all clients
    go to one broker."""
    nearest = [address for distance, address in places if distance == places[0][0]]
    others = [address for distance, address in places if distance != places[0][0]]
    at = number % len(nearest) if nearest else 0
    return (*nearest[at:], *nearest[:at], *others)
