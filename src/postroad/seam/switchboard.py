"""Who handles what: filled by the rooms when they are made, read by the core.

A room that handles a message, a request, a question or a datagram says so here, and so it does for the tables
that it stores. Two rooms that claim the same thing are our own mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from postroad.errors import BugError
from postroad.seam.datagrams import Datagram
from postroad.seam.inputs import Sample
from postroad.seam.levels import Level
from postroad.seam.peers import Peer, Role
from postroad.seam.replies import reply
from postroad.seam.storage import Reader, Stored
from postroad.seam.tracking import NotKept
from postroad.seam.turn import Turn
from postroad.wire.frames import MAX_BODY_BYTES, Message, Request

M = TypeVar("M", bound=Message)
Figures = Mapping[str, int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Who asks for a report, here or at another broker, and how many bytes of JSON there is room for."""

    principal: str
    arguments: Mapping[str, str]
    now_us: int
    most_bytes: int


Report = Callable[[Asking], Mapping[str, object]]
FromPeer = Callable[[Turn, Peer, Any], None]
Handle = Callable[[Turn, Peer, Request], None]  # answers with a Reply, at once or later
Asked = Callable[[Turn, int, int, bytes], None]  # the asking broker, its number of the question, the body
PeerChanged = Callable[[Turn, Peer], None]
FromDirect = Callable[[Turn, Peer, bytes], None]
GotDatagram = Callable[[Turn, Datagram], None]


class Room(Protocol):
    """What the core asks of every room."""

    def tick(self, turn: Turn) -> None:
        """The end of a turn."""

    def next_deadline(self) -> int | None:
        """When `tick` is due although nothing happens; None: never."""

    def check(self) -> None:
        """BugError unless the room's invariants hold."""


class Switchboard:
    """`stored`: what a start found on disk; None for a broker without a disk."""

    def __init__(self, stored: Stored | None) -> None:
        self._stored = stored
        self.clients: dict[type[Message], FromPeer] = {}
        self.brokers: dict[type[Message], FromPeer] = {}
        self.requests: dict[str, tuple[Handle, str]] = {}  # what -> its handler, and the right it needs or ""
        self.reports: dict[str, Report] = {}  # requests that this broker answers to other brokers, too
        self.queries: dict[str, Asked] = {}
        self.datagrams: dict[int, GotDatagram] = {}  # by kind
        self.sampled: list[Callable[[Turn, Sample], None]] = []
        self.direct: dict[type[Message], FromPeer] = {}
        self.rooms_direct: dict[str, FromDirect] = {}
        self.cut_off: list[Callable[[Turn, int], None]] = []
        self.interrupted: list[Callable[[Turn, int], None]] = []
        self.came_up: dict[Role, list[PeerChanged]] = {"client": [], "broker": [], "direct": []}
        self.went_down: dict[Role, list[PeerChanged]] = {"client": [], "broker": [], "direct": []}
        self.starting: list[Callable[[Turn], None]] = []
        self.figures: list[Callable[[], Figures]] = []
        self.levelled: list[Callable[[int], Iterable[Level]]] = []
        # Key of the status -> its value at a time, for a principal, or for whoever may see everything.
        self.facts: dict[str, Callable[[int, str | None], object]] = {}
        self.losing: list[Callable[[Turn, NotKept], None]] = []
        self.named_tables: set[str] = set()

    @property
    def has_disk(self) -> bool:
        return self._stored is not None

    def from_client(self, message: type[M], handler: Callable[[Turn, Peer, M], None]) -> None:
        _claim(self.clients, message, handler)

    def from_broker(self, message: type[M], handler: Callable[[Turn, Peer, M], None]) -> None:
        _claim(self.brokers, message, handler)

    def request(self, what: str, handler: Handle, needs: str = "") -> None:
        """What clients ask for. A handler raises UsageError or UnavailableError if it cannot be."""
        if needs not in ("", "admin"):
            raise BugError(f"the request {what!r} needs the right {needs!r}, which nobody checks")
        _claim(self.requests, what, (handler, needs))

    def report(self, what: str, source: Report) -> None:
        """A request that changes nothing, is answered at once and can be asked of the whole network. `source`
        keeps to the bytes that there is room for."""

        def handle(turn: Turn, peer: Peer, request: Request) -> None:
            asking = Asking(
                principal=peer.principal,
                arguments=request.arguments,
                now_us=turn.now_us,
                most_bytes=MAX_BODY_BYTES,
            )
            reply(turn, peer.connection, request.number, source(asking))

        self.request(what, handle)
        self.reports[what] = source

    def query(self, what: str, handler: Asked) -> None:
        """What other brokers ask. The handler answers with `Inquiries.respond`, at once or later."""
        _claim(self.queries, what, handler)

    def from_direct(
        self,
        room: str,
        handler: FromDirect,
        unreached: Callable[[Turn, int], None],
        interrupted: Callable[[Turn, int], None] | None = None,
    ) -> None:
        """What the same room of another broker says by `DirectPeers.send`. `unreached` is told of a broker to
        which something was to be sent, and that could not be reached or went away; `interrupted` of one that
        is still connected, but not over the connection that something was sent on."""
        _claim(self.rooms_direct, room, handler)
        self.cut_off.append(unreached)
        if interrupted is not None:
            self.interrupted.append(interrupted)

    def datagram(self, kind: int, handler: GotDatagram) -> None:
        """Datagrams of this kind; `wire.datagrams` says what they begin with."""
        _claim(self.datagrams, kind, handler)

    def sample(self, handler: Callable[[Turn, Sample], None]) -> None:
        """How busy this machine is."""
        self.sampled.append(handler)

    def peers(self, role: Role, up: PeerChanged | None = None, down: PeerChanged | None = None) -> None:
        """Peers of this role come and go; rooms hear of it in the order in which they were made."""
        if up is not None:
            self.came_up[role].append(up)
        if down is not None:
            self.went_down[role].append(down)

    def start(self, handler: Callable[[Turn], None]) -> None:
        """Called once, in the first turn, before anything else."""
        self.starting.append(handler)

    def table(self, name: str, reader: Reader) -> Mapping[bytes, bytes]:
        """The rows of a table as the last process left them; `reader` tells a row that is damaged."""
        if name in self.named_tables:
            raise BugError(f"the table {name!r} belongs to another room")
        self.named_tables.add(name)
        return {} if self._stored is None else self._stored.load(name, reader)

    def not_kept(self, handler: Callable[[Turn, NotKept], None]) -> None:
        """The tracking store could not do what it was asked for."""
        self.losing.append(handler)

    def metrics(self, source: Callable[[], Figures]) -> None:
        self.figures.append(source)

    def levels(self, source: Callable[[int], Iterable[Level]]) -> None:
        """Metrics with labels; `source` is given the time, and says how many there are at most."""
        self.levelled.append(source)

    def status(self, key: str, source: Callable[[int], object]) -> None:
        """A key of what `postroad status` shows; `source` is given the time."""
        _claim(self.facts, key, lambda now_us, _asker: source(now_us))

    def status_for(self, key: str, source: Callable[[int, str | None], object]) -> None:
        """The same where it names what is others': `source` is told the principal that asks, None if that may
        see all."""
        _claim(self.facts, key, source)


def _claim(handlers: dict[Any, Any], key: object, handler: object) -> None:
    if key in handlers:
        raise BugError(f"{key!r} has a handler already")
    handlers[key] = handler
