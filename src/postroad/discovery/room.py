"""A broker's part in discovery: it answers requests and spreads them, advertises itself, and finds where to
link (paper 2, 4, 5; spec V2, V3, V5, V6, V11).

A request comes from a requester (by multicast, or because it knew this broker), from a discovery node, or
from a neighbour. Each attempt of it is answered once, straight to the requester, and passed on to all
neighbours, so it reaches every broker of the network. What came from a neighbour or a discovery node was
checked there: its requester has shown that it receives at its address.

Whoever passes a request on adds how far the next clock is from its own. So every broker knows what the
requester's clock shows, and stamps its response with that: a one-way delay is a subtraction (spec V9).

The paper's well-known topic for advertisements is the network's link state: every broker floods its name and
address to all others, and so do discovery nodes learn of all of a network through any one of it.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec

from postroad.clocks import ClockOffset
from postroad.discovery.envelopes import Envelopes, Opened, Sealer
from postroad.discovery.gate import Gate, Verdict
from postroad.discovery.memory import Memory
from postroad.discovery.policy import Policy, credential, prove
from postroad.discovery.rates import Rates
from postroad.discovery.search import MAX_KNOWN, Search, Stage
from postroad.discovery.settings import MAX_NODES, DiscoveryConfig
from postroad.errors import BugError, PeerError
from postroad.ids import Identity
from postroad.links.access import AuthConfig
from postroad.links.links import Links
from postroad.overlay.flooding import Flooding
from postroad.overlay.topology import Topology
from postroad.seam.datagrams import Datagram, Endpoint, SendTo
from postroad.seam.inputs import Sample
from postroad.seam.peers import Peer
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.discovery import (
    KEY_BYTES,
    MAX_HOPS,
    MAX_TIME_US,
    SECRET_BYTES,
    TRANSPORTS,
    UUID_BYTES,
    Advertise,
    Advertised,
    Announce,
    Cookie,
    Inject,
    Kind,
    Message,
    Ping,
    Pong,
    Request,
    Response,
    Usage,
)
from postroad.wire.frames import Discover, encode

TABLE: Final = "discovery_targets"  # endpoint of a broker that was found last -> nothing
RETRY_US: Final = SECOND_US  # of an advertisement that is not confirmed
SILENT_ADVERTISEMENTS: Final = 10  # one after the other, before the log says so
SEARCH_FIRST_US: Final = 5 * SECOND_US  # before looking for brokers to link with again
SEARCH_LAST_US: Final = 60 * SECOND_US
PRIVATE_LIFE_US: Final = 120 * SECOND_US  # of a private discovery node that no longer announces itself
MAX_ELSEWHERE: Final = 8  # brokers that clients of one that stops are told of
COUNTERS: Final = (
    "requests",
    "refused",
    "responses",
    "spread",
    "cookies",
    "malformed",
    "dropped",
    "searches",
)
_KINDS: Final = (
    Kind.REQUEST,
    Kind.COOKIE,
    Kind.ACKNOWLEDGE,
    Kind.INJECT,
    Kind.RESPONSE,
    Kind.PING,
    Kind.PONG,
    Kind.ADVERTISED,
    Kind.ANNOUNCE,
    Kind.SEALED,
)


@dataclass(slots=True)
class _Node:
    """A discovery node that this broker advertises itself to."""

    due_us: int
    uuid: bytes = b""  # of the last advertisement
    confirmed_us: int = 0
    unanswered: int = 0  # advertisements since the last one that was confirmed
    until_us: int | None = None  # a private one: unless it announces itself again
    cookie: Cookie | None = None  # the last one
    clock: ClockOffset = field(default_factory=ClockOffset)


class Discovery:
    """`endpoint(text)` reads a numeric HOST:PORT; `draw(n)` gives a random number in 0..n-1."""

    def __init__(
        self,
        board: Switchboard,
        *,
        me: Identity,
        config: DiscoveryConfig,
        auth: AuthConfig,
        link_token: str,
        address: str,
        endpoint: Callable[[str], Endpoint],
        links: Links,
        flooding: Flooding,
        topology: Topology,
        draw: Callable[[int], int],
        sealer: Sealer | None,
        now_us: int,
    ) -> None:
        self._me = me
        self._config = config
        self._address = address
        self._links = links
        self._flooding = flooding
        self._topology = topology
        self._draw = draw
        self.reload(auth, config.token, link_token, sealer)
        self._memory = Memory(config.remember)
        self._rates = Rates()
        self._usage = Usage()
        self._process_share = 0.0  # of a core, that this process took
        self._secret = b""  # what discovery nodes pass requests on with; drawn when it is first needed
        self._group = endpoint(config.group) if config.group else None
        self._has_disk = board.has_disk
        self._known = tuple(read_target(key, row) for key, row in board.table(TABLE, read_target).items())
        self._nodes = {endpoint(node): _Node(now_us) for node in config.nodes}  # at most MAX_NODES
        self._advertised_network = (0, 0)  # our network and its members, as last advertised
        self._search: Search | None = None
        self._search_us: int | None = now_us if config.join else None  # when to look for links next
        self._search_pause_us = SEARCH_FIRST_US
        self._joined: list[str] = []  # addresses dialled because they were found
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._closed = False  # the process ends
        for kind in _KINDS if config.enabled else ():
            board.datagram(kind, self._on_datagram)
        board.from_broker(Discover, self._on_discover)
        board.sample(self._sampled)
        board.start(self._start)
        board.metrics(self._metrics)
        board.status("discovery", self._status)

    def reload(self, auth: AuthConfig, token: str, link_token: str, sealer: Sealer | None) -> None:
        """These tokens and certificates hold from now on; `token` is what requests and advertisements show,
        `link_token` what brokers are shown that we link with."""
        self._token = token
        self._link_token = link_token
        self._envelopes = Envelopes(sealer)
        policy = Policy(
            auth.tokens,
            certificates=auth.certificates or sealer is not None,
            anonymous=auth.anonymous,
            realms=self._config.realms,
        )
        self._gate = Gate(policy, self._envelopes, self._draw)

    def _start(self, turn: Turn) -> None:
        if self._group is not None:
            turn.join_group(self._group)

    def _sampled(self, _turn: Turn, sample: Sample) -> None:
        self._process_share = sample.process_cpu_share
        self._usage = Usage(
            connections=max(0, sample.connections),
            links=0,
            cpu_share=min(1.0, max(0.0, sample.cpu_share)),
            memory_total_bytes=sample.memory_total_bytes,
            memory_free_bytes=sample.memory_free_bytes,
        )

    # ---- datagrams

    def _on_datagram(self, turn: Turn, datagram: Datagram) -> None:
        if not self._rates.admits(datagram.data, turn.now_us):
            self._counters["dropped"] += 1
            return
        try:
            opened = self._envelopes.unpack(datagram.data, turn.now_us)
            self._handle(turn, opened, datagram)
        except PeerError:
            self._counters["malformed"] += 1

    def _handle(self, turn: Turn, opened: Opened, datagram: Datagram) -> None:
        message, source = opened.message, datagram.source
        match message:
            case Request():
                self._on_request(turn, message, opened, datagram)
            case Inject():
                self._on_inject(turn, message)
            case Ping():
                self._on_ping(turn, message, source)
            case Advertised():
                self._on_advertised(message, source, turn.now_us)
            case Announce():
                self._on_announce(turn, message, opened, datagram)
            case Cookie() if source in self._nodes and message.uuid == self._nodes[source].uuid:
                node = self._nodes[source]
                node.cookie = message
                node.clock.measured(message.sent_us, message.time_us, turn.now_us)
                self._advertise(turn, source, node, message)
            case _:
                if self._search is not None:
                    self._send_all(turn, self._search.datagram(datagram, turn.now_us))

    @staticmethod
    def _send_all(turn: Turn, datagrams: list[SendTo]) -> None:
        for datagram in datagrams:
            turn.send_to(datagram.endpoint, datagram.data)

    def _send(self, turn: Turn, endpoint: Endpoint, message: Message, to: bytes) -> None:
        turn.send_to(endpoint, self._envelopes.pack(message, to))

    # ---- requests

    def _on_request(self, turn: Turn, message: Request, opened: Opened, datagram: Datagram) -> None:
        source = datagram.source
        if self._admits(turn, message, opened, datagram):
            self._process(
                turn,
                Discover(
                    uuid=message.uuid,
                    attempt=message.attempt,
                    host=source[0],
                    port=source[1],
                    offset_us=message.offset_us,
                    cookie=message.cookie,
                    credential=message.credential,
                    key=message.key,
                    certificate=opened.certificate,
                    hops=MAX_HOPS,
                ),
                None,
            )

    def _admits(self, turn: Turn, asking: Request | Announce, opened: Opened, datagram: Datagram) -> bool:
        """Whether it is to be answered; who has not shown that it receives there is sent a cookie."""
        verdict, cookie = self._gate.check(asking, opened, datagram, turn.now_us)
        if cookie:
            self._counters["cookies"] += 1
            turn.send_to(datagram.source, cookie)
        if verdict is Verdict.REFUSED:
            self._counters["refused"] += 1
        return verdict is Verdict.ADMITTED

    def _on_inject(self, turn: Turn, message: Inject) -> None:
        if not self._secret or not hmac.compare_digest(message.secret, self._secret):
            raise PeerError("a request that no discovery node of ours passed on")
        self._process(
            turn,
            Discover(
                uuid=message.uuid,
                attempt=message.attempt,
                host=message.host,
                port=message.port,
                offset_us=message.offset_us,
                cookie=message.cookie,
                credential=message.credential,
                key=message.key,
                certificate=message.name,
                hops=MAX_HOPS,
            ),
            None,
        )

    def _on_discover(self, turn: Turn, peer: Peer, message: Discover) -> None:
        check_discover(message)
        self._process(turn, message, peer)

    def _process(self, turn: Turn, request: Discover, source: Peer | None) -> None:
        """Answer it and pass it on, once."""
        if not self._memory.attempts(request.uuid, request.attempt):
            return
        self._counters["requests"] += 1
        if self._gate.policy.admits(
            request.host,
            uuid=request.uuid,
            cookie=request.cookie,
            credential=request.credential,
            certificate=request.certificate,
        ):
            self._respond(turn, request)
        else:
            self._counters["refused"] += 1
        if request.hops < 1:
            return
        for broker, connection in self._flooding.neighbours.items():
            if source is None or broker != source.broker:
                offset_us = request.offset_us + self._links.clock(connection).offset_us
                if abs(offset_us) > MAX_TIME_US:
                    continue  # no clock is so far off: a requester that wants us to send what is refused
                onward = msgspec.structs.replace(request, offset_us=offset_us, hops=request.hops - 1)
                turn.send(connection, encode(onward))
                self._counters["spread"] += 1

    def _respond(self, turn: Turn, request: Discover) -> None:
        if self._closed:
            return
        endpoint = (request.host, request.port)
        reachable = self._topology.reachable()
        response = Response(
            uuid=request.uuid,
            attempt=request.attempt,
            sent_us=turn.now_us - request.offset_us,
            broker=self._me.number,
            name=self._me.name,
            address=self._address,
            transports=TRANSPORTS,
            ping_key=self._gate.ping_key(endpoint, turn.now_us),
            usage=msgspec.structs.replace(self._usage, links=len(self._flooding)),
            network=min(reachable),
            members=len(reachable),
        )
        key = self._gate.policy.key(uuid=request.uuid, cookie=request.cookie, credential=request.credential)
        try:
            self._send(turn, endpoint, prove(response, key, self._link_token), request.key)
            self._counters["responses"] += 1
        except PeerError:  # a key that nothing can be encrypted for: the requester's fault, not a neighbour's
            self._counters["malformed"] += 1

    def _on_ping(self, turn: Turn, message: Ping, source: Endpoint) -> None:
        known = bool(self._secret) and hmac.compare_digest(message.key, self._secret)
        if known or self._gate.may_ping(message.key, source, turn.now_us):
            pong = Pong(key=message.key, sent_us=message.sent_us, time_us=turn.now_us)
            self._send(turn, source, pong, b"")

    # ---- advertisements

    def _new_uuid(self) -> bytes:
        return self._draw(1 << 8 * UUID_BYTES).to_bytes(UUID_BYTES, "big")

    def _advertise(
        self,
        turn: Turn,
        endpoint: Endpoint,
        node: _Node,
        cookie: Cookie | None,
        lifetime_s: int | None = None,
    ) -> None:
        if not self._secret:
            self._secret = self._draw(1 << 8 * SECRET_BYTES).to_bytes(SECRET_BYTES, "big")
        if cookie is None:
            node.uuid = self._new_uuid()
            node.unanswered += 1
            if node.unanswered == SILENT_ADVERTISEMENTS:
                where = f"{endpoint[0]}:{endpoint[1]}"
                turn.note("warning", f"the discovery node {where} does not answer: trying again every second")
        reachable = self._topology.reachable()
        value = b"" if cookie is None else cookie.cookie
        advertise = Advertise(
            uuid=node.uuid,
            broker=self._me.number,
            name=self._me.name,
            address=self._address,
            transports=TRANSPORTS,
            geography=self._config.geography,
            institution=self._config.institution,
            secret=self._secret,
            network=min(reachable),
            members=len(reachable),
            lifetime_s=self._config.lifetime_s if lifetime_s is None else lifetime_s,
            sent_us=turn.now_us,
            cookie=value,
            credential=credential(self._token, node.uuid, value),
            key=self._envelopes.key,
        )
        if cookie is None:  # nobody has shown yet who answers there
            advertise = msgspec.structs.replace(advertise, secret=bytes(SECRET_BYTES))
        node.due_us = turn.now_us + RETRY_US
        self._send(turn, endpoint, advertise, b"" if cookie is None else cookie.key)

    def _on_advertised(self, message: Advertised, source: Endpoint, now_us: int) -> None:
        node = self._nodes.get(source)
        if node is not None and node.uuid == message.uuid:
            node.confirmed_us = now_us
            node.unanswered = 0
            node.due_us = now_us + self._config.advertise_us

    def _on_announce(self, turn: Turn, message: Announce, opened: Opened, datagram: Datagram) -> None:
        """A private discovery node: it must show a credential, where we ask anybody for one."""
        source = datagram.source
        if not self._config.private_nodes:
            self._counters["refused"] += 1
            return
        if not self._admits(turn, message, opened, datagram):
            return
        node = self._nodes.get(source)
        if node is None and len(self._nodes) < MAX_NODES:
            turn.note("info", f"advertising to the private discovery node {message.name!r}")
            node = self._nodes[source] = _Node(turn.now_us, until_us=0)
        if node is not None and node.until_us is not None:
            node.until_us = turn.now_us + PRIVATE_LIFE_US

    # ---- links that are found

    def _begin_search(self, turn: Turn) -> None:
        """Where there are fewer links than asked for, look for brokers of other networks, or any."""
        self._search_us = None
        self._counters["searches"] += 1
        self._search = Search(
            self._config.search,
            nodes=list(self._nodes),
            group=self._group,
            known=self._known,
            draw=self._draw,
            envelopes=self._envelopes,
            token=self._token,
            proof_token=self._link_token,
            me=self._me.number,
        )
        self._send_all(turn, self._search.start(turn.now_us))

    def _end_search(self, turn: Turn, search: Search) -> None:
        self._search = None
        wanted = self._config.links - len(self._flooding)
        if search.result is not None:
            for candidate in search.result.candidates:
                linked = candidate.response.broker in self._flooding
                if wanted > 0 and not linked and candidate.address != self._address:
                    wanted -= 1
                    if self._links.dial(candidate.address, turn.now_us):
                        self._joined.append(candidate.address)
                        name = candidate.response.name
                        turn.note("info", f"found broker {name!r} at {candidate.address}: linking")
            self._remember(turn, [candidate.endpoint for candidate in search.result.candidates])
            # Addresses that turned out dead are not kept for ever: the oldest go first.
            excess = len(self._joined) - 2 * self._config.links
            dropped = list(islice(filter(self._links.undial, self._joined), max(0, excess)))
            self._joined = [address for address in self._joined if address not in dropped]
        elif self._counters["searches"] == 1 and not len(self._flooding):
            turn.note("info", "no broker to link with yet: looking for one from time to time")
        self._search_us = turn.now_us + self._search_pause_us
        self._search_pause_us = min(2 * self._search_pause_us, SEARCH_LAST_US)

    def _remember(self, turn: Turn, targets: list[Endpoint]) -> None:
        """The target set, for a start at which nobody else is there to ask (paper 7)."""
        before, self._known = self._known, tuple(targets[:MAX_KNOWN])
        rows: list[tuple[bytes, bytes | None]] = [(_row(target), None) for target in before]
        rows = [row for row in rows if row[0] not in {_row(target) for target in self._known}]
        rows += [(_row(target), b"") for target in self._known if target not in before]
        if rows and self._has_disk:
            turn.save(TABLE, rows, then=None)

    # ---- time

    def tick(self, turn: Turn) -> None:
        now_us = turn.now_us
        if self._nodes:
            self._tick_nodes(turn)
        if self._search is not None:
            self._send_all(turn, self._search.tick(now_us))
            if self._search.stage is Stage.OVER:
                self._end_search(turn, self._search)
        if self._search_us is not None and now_us >= self._search_us:
            if len(self._flooding) < self._config.links:
                self._begin_search(turn)
            else:
                self._search_pause_us = SEARCH_FIRST_US
                self._search_us = now_us + SEARCH_FIRST_US

    def _tick_nodes(self, turn: Turn) -> None:
        reachable = self._topology.reachable()
        network = (min(reachable), len(reachable))
        if network != self._advertised_network:
            self._advertised_network = network
            for node in self._nodes.values():
                if node.confirmed_us:
                    node.due_us = min(node.due_us, turn.now_us)
        for endpoint, node in list(self._nodes.items()):
            if node.until_us is not None and turn.now_us >= node.until_us:
                del self._nodes[endpoint]
            elif turn.now_us >= node.due_us and not self._closed:
                self._advertise(turn, endpoint, node, None)

    def next_deadline(self) -> int | None:
        due = [] if self._closed else [node.due_us for node in self._nodes.values()]
        if self._search_us is not None:
            due.append(self._search_us)
        search_us = None if self._search is None else self._search.next_deadline()
        if search_us is not None:
            due.append(search_us)
        return min(due, default=None)

    def close(self, turn: Turn) -> None:
        """The process ends: discovery nodes need not wait until the advertisement expires, and nobody who
        looks for a broker is answered any more."""
        self._closed = True
        for endpoint, node in self._nodes.items():
            if node.cookie is not None:
                self._advertise(turn, endpoint, node, node.cookie, lifetime_s=0)

    def elsewhere(self) -> list[tuple[int, str]]:
        """Where clients may go when this broker stops: how far the nearest others are, and where."""
        topology = self._topology
        others = [
            broker
            for broker in topology.reachable()
            if broker != self._me.number and topology.address(broker)
        ]
        others.sort(key=lambda broker: (topology.distance(broker), broker))
        return [
            (topology.distance(broker) or 0, topology.address(broker)) for broker in others[:MAX_ELSEWHERE]
        ]

    # ---- inspection

    def _metrics(self) -> dict[str, int]:
        return {f"discovery_{name}_total": value for name, value in self._counters.items()}

    def _status(self, now_us: int) -> dict[str, object]:
        return {
            "nodes": [
                {
                    "node": f"{host}:{port}",
                    "advertised_s": (now_us - node.confirmed_us) // SECOND_US if node.confirmed_us else None,
                    "clock_offset_ms": node.clock.offset_us / MILLISECOND_US if node.clock else None,
                }
                for (host, port), node in self._nodes.items()
            ],
            "multicast": self._config.group or None,
            "found": list(self._joined),
            "usage": {
                **{name: getattr(self._usage, name) for name in Usage.__struct_fields__},
                "process_cpu_share": round(self._process_share, 4),
            },
        }

    def check(self) -> None:
        if len(self._nodes) > MAX_NODES:
            raise BugError(f"{len(self._nodes)} discovery nodes, the most is {MAX_NODES}")
        if self._search is not None:
            self._search.check()


def _row(target: Endpoint) -> bytes:
    return msgspec.msgpack.encode(target)


def read_target(key: bytes, _value: bytes) -> Endpoint:
    return msgspec.msgpack.decode(key, type=tuple[str, int])


def check_discover(message: Discover) -> None:
    """PeerError unless a neighbour may pass this on; `wire.bounds` says the rest."""
    if len(message.uuid) != UUID_BYTES or not message.host or len(message.key) not in (0, KEY_BYTES):
        raise PeerError(
            f"a request from {message.host!r} with a UUID of {len(message.uuid)} bytes, a key of"
            f" {len(message.key)}"
        )
