"""Every connection's state machine: handshake, authentication, keepalive, credit, access.

A connection begins DIALLED (we said HELLO, WELCOME is due) or ACCEPTED (HELLO is due), becomes CLIENT or
BROKER when the handshake succeeds, and CLOSING once we asked the driver to close it. `connection.TAKES`
says which frames each phase takes; what is not listed is the peer's error.

Two brokers keep one link. When a second comes up, both ends must drop the same one without a word: a
peer that restarted has only its newest; else the link dialled by the lower node id stays; of two by the
same dialler the one whose HELLO is later, by the dialler's own clock, which both ends know.

Credit: each side announces a window of batch bytes. A sender may begin a frame while its credit is
positive, so it goes below zero by at most one frame; the receiver gives back what it consumed once that
is a quarter of the window. Control frames are free, so that they pass a link that is full.

A link is dead when a ping stays unanswered, not merely when time went by: a process that was stopped for
a minute asks first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from postroad.clocks import ClockOffset
from postroad.delays import Delays
from postroad.errors import (
    BugError,
    DeniedError,
    PeerError,
    PostroadError,
    RedundantError,
    SameBrokerError,
    UnavailableError,
    from_wire,
)
from postroad.ids import Identity
from postroad.links.access import Access, AuthConfig, hash_token, owning
from postroad.links.connection import OWN_KINDS, TAKES, Connection, DirectDial, LinkSettings, Phase, level_of
from postroad.links.dialler import Dialler
from postroad.links.handshake import (
    check_hello,
    check_welcome,
    printable,
    same_routing_limits,
    smaller,
)
from postroad.links.resuming import Resuming
from postroad.seam.peers import Peer, Role
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.datagrams import DATAGRAM_KEY_BYTES
from postroad.wire.frames import (
    CONTROL,
    CREDITED_KINDS,
    PROTOCOL_VERSION,
    Credit,
    Hello,
    Kind,
    Limits,
    Message,
    Ping,
    Pong,
    Refuse,
    Welcome,
    encode,
)

__all__ = ["LinkSettings", "Links"]

MAX_DUE: Final = 32  # timers looked at in a turn: clients that came together are quiet together, events not
_CREDIT_SHARE: Final = 4  # credit goes back once this part of the window is due
_NAMES: Final = {int(kind): kind.name for kind in Kind}
_KIND_OF: Final = {message: kind for kind, message in CONTROL.items()}


class Links:
    """All connections of one broker."""

    __slots__ = (
        "_access",
        "_brokers",
        "_conflict",
        "_connections",
        "_dialler",
        "_direct_dials",
        "_draw",
        "_last_hello_us",
        "_limits",
        "_me",
        "_resuming",
        "_send_on",
        "_settings",
        "_timers",
        "round_trips",
    )

    def __init__(
        self,
        board: Switchboard,
        *,
        me: Identity,
        limits: Limits,
        settings: LinkSettings,
        auth: AuthConfig,
        new_publisher: Callable[[], int],
        pubends: int = 1,
        draw: Callable[[int], int],
        conflict: Callable[[int, bytes], bool],
    ) -> None:
        self._me = me
        self._limits = limits
        self._settings = settings
        self._access = Access(auth)
        self._conflict = conflict
        self._draw = draw
        self._resuming = Resuming(new_number=new_publisher, new_key=self._new_key, pubends=pubends)
        self._dialler = Dialler(
            first_us=settings.redial_first_us,
            last_us=settings.redial_last_us,
            rest_us=settings.redial_rest_us,
            draw=draw,
        )
        self._connections: dict[int, Connection] = {}  # opened and not yet reported closed
        self._brokers: dict[bytes, int] = {}  # node id -> the one connection that is, or was last, its link
        self._timers: list[tuple[int, int]] = []  # heap of (due, connection); void if due is not its timer_us
        # Address -> dials to it that are under way beside the links, the oldest first.
        self._direct_dials: dict[str, list[DirectDial]] = {}
        self._last_hello_us = 0
        self._send_on: Callable[[Turn, int], None] | None = None  # set: new clients are not served here
        self.round_trips = Delays(
            "link_round_trip_seconds",
            "Round trip of a ping to a linked broker. Alarm: far above what is usual.",
        )
        board.status("links", self._links_status)
        board.status("client_clocks", self._client_clocks)
        board.status("addresses", lambda _now_us: self._dialler.status())
        board.status("clients", lambda _now_us: len(self._up("client")))

    def _new_key(self) -> bytes:
        return self._draw(1 << 128).to_bytes(16, "big")

    def _new_datagram_key(self) -> bytes:
        """For one connection; none where this broker takes no datagrams."""
        if not self._settings.datagrams:
            return b""
        return self._draw(1 << 8 * DATAGRAM_KEY_BYTES).to_bytes(DATAGRAM_KEY_BYTES, "big")

    # -- addresses to keep linked ------------------------------------------------------------------

    def dial(self, address: str, now_us: int) -> bool:
        """Keep a link to this address from now on; `tick` dials. False if it was kept already."""
        return self._dialler.add(address, now_us)

    def undial(self, address: str) -> bool:
        """No longer keep an address to which there is no connection; False if there is one."""
        if self._dialler.is_connected(address):
            return False
        self._dialler.remove(address)
        return True

    def dial_directly(
        self, turn: Turn, broker: int, address: str, failed: Callable[[Turn, int], None]
    ) -> None:
        """Reach a broker once, beside the links: `failed` is called if it is not reached."""
        self._direct_dials.setdefault(address, []).append(DirectDial(broker, failed))
        turn.dial(address)

    def _take_direct(self, address: str) -> DirectDial | None:
        """The oldest direct dial to this address.

        A dial for a link may be under way to the same address: either connection will do for either purpose.
        """
        dials = self._direct_dials.get(address)
        if not dials:
            return None
        oldest = dials.pop(0)
        if not dials:
            del self._direct_dials[address]
        return oldest

    def dial_failed(self, turn: Turn, address: str) -> None:
        direct = self._take_direct(address)
        if direct is None:
            self._dialler.failed(address, turn.now_us)
        else:
            direct.failed(turn, direct.broker)

    # -- connections come and go -------------------------------------------------------------------

    def opened(
        self,
        turn: Turn,
        connection: int,
        *,
        dialled: str | None,
        certificate: str | None,
        loopback: bool,
        host: str = "",
    ) -> None:
        if connection in self._connections:
            raise BugError(f"connection {connection} opened twice")
        state = Connection(
            number=connection,
            dialled=dialled,
            certificate=certificate,
            loopback=loopback,
            host=host,
            phase=Phase.ACCEPTED if dialled is None else Phase.DIALLED,
            opened_us=turn.now_us,
            heard_us=turn.now_us,
        )
        self._connections[connection] = state
        self._set_timer(state)
        if dialled is None:
            return
        state.direct = self._take_direct(dialled)
        if state.direct is None:
            self._dialler.opened(dialled, connection)
        # Unique and increasing, because it decides between two links that we dialled to one broker.
        self._last_hello_us = state.hello_us = max(turn.now_us, self._last_hello_us + 1)
        hello = Hello(
            version=PROTOCOL_VERSION,
            role="broker" if state.direct is None else "direct",
            name=self._me.name,
            token=self._settings.token,
            limits=self._limits,
            window=self._settings.broker_window,
            time_us=state.hello_us,
            broker=self._me.number,
            node=self._me.node,
            boot=self._me.boot,
            life=self._me.life,
            cost=self._settings.cost,
            datagrams=self._settings.datagrams,
            address=self._settings.address,
        )
        turn.send(connection, encode(hello))

    def closed(self, turn: Turn, connection: int) -> Peer | None:
        """The driver closed it or found it closed. The peer that was up, unless another took its place."""
        state = self._connections.pop(connection, None)
        if state is None:
            return None
        peer, now_us = state.peer, turn.now_us
        if peer is not None and peer.role == "broker" and self._brokers.get(peer.node) == connection:
            del self._brokers[peer.node]
            self._dialler.wake(now_us)
        if peer is not None and peer.role == "client":
            self._resuming.closed(peer.publisher, connection)
        if state.direct is not None:
            if peer is None:
                state.direct.failed(turn, state.direct.broker)
        elif state.dialled is not None:
            held_us = 0 if peer is None else now_us - state.up_us
            self._dialler.closed(
                state.dialled, connection, now_us, redundant=state.redundant, held_us=held_us
            )
        return None if state.superseded else peer

    def send_clients_on(self, send_on: Callable[[Turn, int], None]) -> None:
        """From now on clients that come, and may come, are not served: `send_on` refuses them."""
        self._send_on = send_on

    def refuse(self, turn: Turn, connection: int, error: PostroadError, go_to: tuple[str, ...] = ()) -> None:
        """Tell the peer why, and close. `closed` follows when the driver has done it."""
        state = self._connections.get(connection)
        if state is None or state.phase is Phase.CLOSING:
            return
        state.phase = Phase.CLOSING
        if isinstance(error, RedundantError):
            state.redundant = True
        turn.send(connection, encode(Refuse(code=error.code, reason=printable(str(error)), go_to=go_to)))
        turn.close(connection, error)
        turn.note(level_of(error), f"closed {self._describe(state)}: {error}")

    def _describe(self, state: Connection) -> str:
        if state.peer is not None:
            return f"{state.peer.role} {state.peer.name!r} (connection {state.number})"
        return f"connection {state.number}" + ("" if state.dialled is None else f" to {state.dialled}")

    # -- frames ------------------------------------------------------------------------------------

    def is_open(self, connection: int) -> bool:
        """Whether frames of it still count: it is not closed, nor being closed."""
        state = self._connections.get(connection)
        return state is not None and state.phase is not Phase.CLOSING

    def allowed(self, connection: int, kind: int) -> bool:
        """Whether the peer may send such a frame now."""
        state = self._connections.get(connection)
        return state is not None and kind in TAKES[state.phase]

    def admit(self, connection: int, kind: int, size: int, now_us: int) -> bool:
        """To be called for every frame before anything else: False if it is to be dropped unread.

        PeerError if the peer may not send it: wrong kind for its role or phase, or no credit for it.
        """
        state = self._connections.get(connection)
        if state is None or state.phase is Phase.CLOSING:
            return False  # it was on its way when we closed
        _check_kind(state, kind)
        state.heard_us, state.asked_us = now_us, None
        state.bytes_in += size
        if kind in CREDITED_KINDS:
            if state.credit_in <= 0:
                raise PeerError(
                    f"a {_NAMES[kind]} frame of {size} bytes beyond the window of {state.window_in} bytes"
                )
            state.credit_in -= size
            state.unconsumed += size
        return True

    def received(self, turn: Turn, connection: int, message: Message) -> tuple[Peer | None, bool]:
        """The peer if it just came up; whether the message was for us (handshake, upkeep).

        A message that `admit` would refuse, and a handshake that fails, close the connection here.
        """
        state = self._connections.get(connection)
        if state is None or state.phase is Phase.CLOSING:
            return None, True
        try:
            kind = _KIND_OF[type(message)]
            _check_kind(state, kind)
            if kind not in OWN_KINDS:
                return None, False
            return self._act(turn, state, message), True
        except (PeerError, DeniedError, RedundantError) as error:
            self.refuse(turn, connection, error)
            return None, True

    def _act(self, turn: Turn, state: Connection, message: Message) -> Peer | None:
        """The peer if it just came up."""
        match message:
            case Hello():
                return self._hello(turn, state, message)
            case Welcome():
                return self._welcome(turn, state, message)
            case Ping():
                turn.send(state.number, encode(Pong(time_us=message.time_us, at_us=turn.now_us)))
            case Pong():
                if message.time_us == state.pinged_us:  # else it answers an older one, or nothing
                    state.rtt_us = max(0, turn.now_us - state.pinged_us)
                    state.clock.measured(message.time_us, message.at_us, turn.now_us)
                    if state.phase is Phase.BROKER:
                        self.round_trips.observe(state.rtt_us)
            case Credit():
                spent = state.window_out - state.credit_out
                if not 1 <= message.size <= spent:
                    raise PeerError(f"credit for {message.size} bytes of {spent} that were sent")
                state.credit_out += message.size
            case Refuse():
                self._refused(turn, state, message)
            case _:
                raise BugError(f"{type(message).__name__} is listed as ours and has no handler")
        return None

    def _refused(self, turn: Turn, state: Connection, refuse: Refuse) -> None:
        error = from_wire(refuse.code, printable(refuse.reason))
        state.phase = Phase.CLOSING
        state.redundant = isinstance(error, RedundantError)
        turn.close(state.number, error)
        turn.note(level_of(error), f"refused by {self._describe(state)}: {error}")

    # -- handshake ---------------------------------------------------------------------------------

    def _hello(self, turn: Turn, state: Connection, hello: Hello) -> Peer | None:
        role = check_hello(hello)
        state.token_digest = hash_token(hello.token) if hello.token else ""
        principal = self._authenticate(state)
        if role != "client":
            return self._hello_broker(turn, state, hello, principal, role)
        if self._send_on is not None:
            self._send_on(turn, state.number)
            return None
        number, resumed = self._resuming.number(hello, principal)
        rival = self._resuming.connection(number)
        # Two connections keep no order: the HELLO of one that its client gave up may come last.
        if rival is not None and rival > state.number and self.is_open(rival):
            raise RedundantError("a newer connection has this one's place")
        peer = Peer(
            connection=state.number,
            role="client",
            name=hello.name,
            broker=0,
            node=b"",
            boot=0,
            cost=0,
            publisher=number,
            principal=principal,
            limits=smaller(self._limits, hello.limits),
            dialled=None,
            resumed=resumed,
            replaces=self._resuming.opened(number, state.number),
            host=state.host,
            datagram_key=self._new_datagram_key(),
        )
        self._welcomes(turn, state, peer, self._settings.client_window)
        self._come_up(turn, state, peer, self._settings.client_window, hello.window)
        return peer

    def _authenticate(self, state: Connection) -> str:
        """The principal of a peer that connected to us."""
        return self._access.authenticate(
            digest=state.token_digest, certificate=state.certificate, loopback=state.loopback
        )

    def _hello_broker(self, turn: Turn, state: Connection, hello: Hello, principal: str, role: Role) -> Peer:
        if not self._access.may_link(principal):
            raise DeniedError(
                f"{principal!r} may not link as a broker: start both with the same --link-token-file, or name"
                " it in auth.link_principals"
            )
        self._check_limits(hello.name, hello.limits)
        rank = (hello.boot, hello.node < self._me.node, hello.boot, hello.time_us)
        peer = Peer(
            connection=state.number,
            role=role,
            name=hello.name,
            broker=hello.broker,
            node=hello.node,
            boot=hello.boot,
            life=hello.life,
            cost=max(hello.cost, self._settings.cost),
            publisher=0,
            principal=principal,
            limits=smaller(self._limits, hello.limits),
            dialled=None,
            replaces=self._rival(hello, rank, role),
            host=state.host,
            datagrams=hello.datagrams,
            datagram_key=self._new_datagram_key(),
        )
        state.rank = rank
        state.clock.heard(hello.time_us, turn.now_us)
        self._welcomes(turn, state, peer, self._settings.broker_window)
        self._come_up(turn, state, peer, self._settings.broker_window, hello.window)
        return peer

    def _welcome(self, turn: Turn, state: Connection, welcome: Welcome) -> Peer:
        check_welcome(welcome)
        self._check_limits(welcome.name, welcome.limits)
        role: Role = "direct"
        if state.direct is None:
            role = "broker"
            if state.dialled is not None:
                self._dialler.led_to(state.dialled, welcome.node)
        elif welcome.broker != state.direct.broker:
            raise PeerError(
                f"{state.dialled} leads to broker {welcome.broker:08x}, not to {state.direct.broker:08x}"
            )
        rank = (welcome.boot, self._me.node < welcome.node, self._me.boot, state.hello_us)
        peer = Peer(
            connection=state.number,
            role=role,
            name=welcome.name,
            broker=welcome.broker,
            node=welcome.node,
            boot=welcome.boot,
            life=welcome.life,
            cost=max(welcome.cost, self._settings.cost),
            publisher=0,
            principal="",
            limits=smaller(self._limits, welcome.limits),
            dialled=state.dialled,
            replaces=self._rival(welcome, rank, role),
            host=state.host,
            datagrams=welcome.datagrams,
            datagram_key=welcome.datagram_key,
        )
        state.rank = rank
        state.clock.measured(state.hello_us, welcome.time_us, turn.now_us)
        self._come_up(turn, state, peer, self._settings.broker_window, welcome.window)
        return peer

    def _rival(self, greeting: Hello | Welcome, rank: tuple[int, bool, int, int], role: Role) -> int | None:
        """The connection that a new link to this broker replaces; RedundantError if that one stays. Direct
        connections replace nothing: two brokers may have one from each side."""
        number, node = greeting.broker, greeting.node
        if node == self._me.node:
            if (greeting.boot, greeting.name) == (self._me.boot, self._me.name):
                raise SameBrokerError("this address leads to the broker itself: do not link it")
            raise SameBrokerError(
                "the data folder of one of these brokers is a copy of the other's: give each its own --data"
            )
        if number == self._me.number or self._conflict(number, node):
            raise PeerError(f"the broker number {number:08x} belongs to another broker of this network")
        rival = self._brokers.get(node)
        if rival is None or role == "direct":
            return None
        old = self._connections[rival]
        if old.phase is not Phase.CLOSING and old.rank >= rank:
            raise RedundantError("there is a link between these two brokers already")
        return rival

    def _welcomes(self, turn: Turn, state: Connection, peer: Peer, window: int) -> None:
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            name=self._me.name,
            broker=self._me.number,
            node=self._me.node,
            boot=self._me.boot,
            life=self._me.life,
            cost=self._settings.cost,
            limits=self._limits,
            window=window,
            time_us=turn.now_us,
            publisher=peer.publisher,
            resume_key=self._resuming.key(peer.publisher) if peer.role == "client" else b"",
            datagrams=self._settings.datagrams,
            address=self._settings.address,
            datagram_key=peer.datagram_key,
            principal=peer.principal if peer.role == "client" else "",
        )
        turn.send(state.number, encode(welcome))

    def _come_up(self, turn: Turn, state: Connection, peer: Peer, window_in: int, window_out: int) -> None:
        state.phase = Phase(peer.role)
        state.peer = peer
        state.up_us = state.pinged_us = turn.now_us
        state.window_in = state.credit_in = window_in
        state.window_out = state.credit_out = window_out
        self._set_timer(state)
        if peer.role == "broker":
            self._brokers[peer.node] = state.number
            turn.note("info", f"linked with broker {peer.name!r} (connection {state.number})")
            if peer.dialled is None:  # who dialled knows our clock by the handshake
                turn.send(state.number, encode(Ping(time_us=state.pinged_us)))
        if peer.replaces is not None:
            old = self._connections[peer.replaces]
            old.superseded = old.redundant = True
            self.refuse(turn, old.number, RedundantError("a newer connection took this one's place"))

    def _check_limits(self, name: str, theirs: Limits) -> None:
        """An event that one broker takes must pass every link, or the network would lose it on the way."""
        if not same_routing_limits(self._limits, theirs):
            raise PeerError(
                f"brokers {self._me.name!r} and {name!r} have different limits, {self._limits} and "
                f"{theirs}: give them the same"
            )

    # -- time --------------------------------------------------------------------------------------

    def next_deadline(self) -> int | None:
        """Not later than something is due; it may turn out that nothing is."""
        dial_us = self._dialler.next_deadline()
        if not self._timers:
            return dial_us
        return self._timers[0][0] if dial_us is None else min(dial_us, self._timers[0][0])

    def tick(self, turn: Turn) -> None:
        """Pings, dead peers, handshakes that take too long, and addresses to dial."""
        now_us = turn.now_us
        for _ in range(MAX_DUE):
            if not self._timers or self._timers[0][0] > now_us:
                break
            due_us, number = heapq.heappop(self._timers)
            state = self._connections.get(number)
            if state is None or state.phase is Phase.CLOSING or state.timer_us != due_us:
                continue
            if self._due_us(state) <= now_us:
                self._expired(turn, state)
            if self.is_open(number):
                self._set_timer(state)
        for address in self._dialler.due(now_us, self._brokers.__contains__):
            turn.dial(address)

    def _due_us(self, state: Connection) -> int:
        settings = self._settings
        if state.peer is None:
            return state.opened_us + settings.handshake_us
        if state.asked_us is None:
            return min(state.heard_us + settings.ping_us, state.pinged_us + settings.measure_us)
        return min(state.pinged_us + settings.ping_us, state.asked_us + settings.dead_us - settings.ping_us)

    def _set_timer(self, state: Connection) -> None:
        state.timer_us = self._due_us(state)
        heapq.heappush(self._timers, (state.timer_us, state.number))

    def _expired(self, turn: Turn, state: Connection) -> None:
        settings, now_us = self._settings, turn.now_us
        if state.peer is None:
            wait_s = settings.handshake_us / SECOND_US
            self.refuse(turn, state.number, UnavailableError(f"no handshake within {wait_s:g} s"))
            return
        if state.asked_us is not None and now_us >= state.asked_us + settings.dead_us - settings.ping_us:
            error = UnavailableError(f"nothing heard for {(now_us - state.heard_us) / SECOND_US:.1f} s")
            self.refuse(turn, state.number, error)
            return
        state.pinged_us = now_us
        if state.asked_us is None:
            state.asked_us = now_us
        turn.send(state.number, encode(Ping(time_us=now_us)))

    # -- credit ------------------------------------------------------------------------------------

    def available(self, connection: int) -> int:
        """Batch bytes the peer is ready to take; not positive: none."""
        state = self._connections.get(connection)
        return 0 if state is None or state.phase is Phase.CLOSING else state.credit_out

    def spend(self, connection: int, size: int) -> bool:
        """Whether a batch frame may be sent now; if so its size is taken off."""
        state = self._connections.get(connection)
        if state is None or state.phase is Phase.CLOSING or state.credit_out <= 0:
            return False
        state.credit_out -= size
        return True

    def consumed(self, turn: Turn, connection: int, size: int) -> None:
        """Batch bytes of this peer that were admitted are done with."""
        state = self._connections.get(connection)
        if state is None or state.phase is Phase.CLOSING:
            return
        if size > state.unconsumed:
            raise BugError(f"{size} bytes consumed of connection {connection}, which sent {state.unconsumed}")
        state.unconsumed -= size
        state.due += size
        if state.due * _CREDIT_SHARE < state.window_in:
            return
        credit, state.due = state.due, 0
        state.credit_in += credit
        turn.send(connection, encode(Credit(size=credit)))

    @property
    def all_led_somewhere(self) -> bool:
        """Whether every address that is to be dialled is linked."""
        return self._dialler.all_led_somewhere

    # -- access ------------------------------------------------------------------------------------

    def reload(self, turn: Turn, auth: AuthConfig, token: str) -> None:
        """Other rules and tokens hold from now on, and `token` is said when dialling.

        Whoever would not be let in any more is closed. So is whoever has other rights now: it connects again
        by itself, and everything that it asks for is checked anew.
        """
        before, self._access = self._access, Access(auth)
        self._settings = replace(self._settings, token=token)
        for state in list(self._connections.values()):
            if state.peer is None or state.dialled is not None or state.phase is Phase.CLOSING:
                continue
            principal = state.peer.principal
            try:
                if self._authenticate(state) != principal:
                    raise DeniedError(f"{principal!r} is not known here any more")
                if state.peer.role != "client" and not self._access.may_link(principal):
                    raise DeniedError(f"{principal!r} may not link as a broker any more")
            except DeniedError as error:
                self.refuse(turn, state.number, error)
                continue
            if self._access.rights(principal) != before.rights(principal):
                self.refuse(turn, state.number, UnavailableError(f"the rights of {principal!r} changed"))

    def peer(self, connection: int) -> Peer | None:
        """The peer of a connection that is up."""
        state = self._connections.get(connection)
        return None if state is None or state.phase is Phase.CLOSING else state.peer

    def clock(self, connection: int) -> ClockOffset:
        """Of a linked broker (spec V9)."""
        state = self._connections.get(connection)
        return ClockOffset() if state is None else state.clock

    @property
    def access(self) -> Access:
        """What principals may do, connected or not."""
        return self._access

    def may_publish(self, connection: int, topic: str) -> bool:
        peer = self.peer(connection)
        return peer is not None and self._access.may_publish(peer.principal, topic)

    def may_subscribe(self, connection: int, pattern: str) -> bool:
        peer = self.peer(connection)
        return peer is not None and self._access.may_subscribe(peer.principal, pattern)

    def may_read_some(self, connection: int, pattern: str) -> bool:
        peer = self.peer(connection)
        return peer is not None and self._access.may_read_some(peer.principal, pattern)

    def may_send(self, connection: int, application: str) -> bool:
        peer = self.peer(connection)
        return peer is not None and self._access.may_send(peer.principal, application)

    def may_receive(self, connection: int, application: str) -> bool:
        peer = self.peer(connection)
        return peer is not None and self._access.may_receive(peer.principal, application)

    def may_admin(self, connection: int) -> bool:
        peer = self.peer(connection)
        return peer is not None and self._access.may_admin(peer.principal)

    def owner(self, connection: int) -> str:
        """Who owns what this client makes: its principal, "" for nobody in particular."""
        peer = self.peer(connection)
        return "" if peer is None else owning(peer.principal)

    def may_use(self, connection: int, owner: str) -> bool:
        """Whether this client may use a name that belongs to `owner`: it is its own, nobody's, or the client
        may administer."""
        peer = self.peer(connection)
        return peer is not None and self._access.may_use(peer.principal, owner)

    # -- facts -------------------------------------------------------------------------------------

    def _up(self, role: Role) -> list[tuple[Connection, Peer]]:
        """The connections of this role that are up."""
        return [
            (state, state.peer)
            for state in self._connections.values()
            if state.peer is not None and state.peer.role == role and state.phase is not Phase.CLOSING
        ]

    def client_peers(self) -> list[Peer]:
        return [peer for _, peer in self._up("client")]

    def on_this_machine(self, connection: int) -> bool:
        """Whether the peer came by the loopback interface."""
        state = self._connections.get(connection)
        return state is not None and state.loopback

    def role(self, connection: int) -> Role | None:
        """Of a connection that is up."""
        peer = self.peer(connection)
        return None if peer is None else peer.role

    def clients(self, now_us: int, after: int) -> Iterator[dict[str, object]]:
        """Those that are up, behind this number, as people are shown them."""
        for state, peer in self._up("client"):
            if state.number <= after:
                continue
            yield {
                "connection": state.number,
                "name": peer.name,
                "principal": peer.principal,
                "host": peer.host,
                "up_s": (now_us - state.up_us) // SECOND_US,
                "publisher": f"{peer.publisher:08x}",
                "bytes_in": state.bytes_in,
                "unconsumed": state.unconsumed,
                "credit": state.credit_out,
            }

    def _links_status(self, now_us: int) -> list[dict[str, object]]:
        return [
            {
                "broker": peer.name,
                "number": f"{peer.broker:08x}",
                "cost": peer.cost,
                "dialled": peer.dialled,
                "up_s": (now_us - state.up_us) // SECOND_US,
                "rtt_ms": None if state.rtt_us is None else state.rtt_us / MILLISECOND_US,
                "clock_offset_ms": state.clock.offset_us / MILLISECOND_US if state.clock else None,
                "bytes_in": state.bytes_in,
                "credit": state.credit_out,
                "unconsumed": state.unconsumed,
            }
            for state, peer in self._up("broker")
        ]

    def _client_clocks(self, _now_us: int) -> dict[str, object]:
        """How far those of clients are ahead, of which a pong was heard (spec V9)."""
        offsets_us = [state.clock.offset_us for state, _ in self._up("client") if state.clock]
        return {
            "measured": len(offsets_us),
            "least_ms": min(offsets_us) / MILLISECOND_US if offsets_us else None,
            "most_ms": max(offsets_us) / MILLISECOND_US if offsets_us else None,
        }

    def check(self) -> None:
        """BugError unless the collections are as their comments say."""
        self._dialler.check()
        for node, connection in self._brokers.items():
            state = self._connections.get(connection)
            if state is None or state.peer is None or state.peer.node != node or state.superseded:
                raise BugError(f"connection {connection} is not the link it is listed as")
        self._resuming.check(lambda number: getattr(self._connections.get(number), "peer", None))
        for state in self._connections.values():
            if state.credit_in + state.unconsumed + state.due != state.window_in or state.unconsumed < 0:
                raise BugError(f"credit of connection {state.number} does not add up")
            if state.credit_out > state.window_out:
                raise BugError(f"connection {state.number} has more credit than its window")


def _check_kind(state: Connection, kind: int) -> None:
    if kind not in TAKES[state.phase]:
        raise PeerError(
            f"a frame of kind {_NAMES.get(kind, kind)} is not allowed in phase {state.phase.value!r}"
        )
