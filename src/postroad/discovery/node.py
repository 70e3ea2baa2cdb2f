"""A broker discovery node: it knows brokers, and passes requests on to some of them (paper 2 to 4; spec V1
to V5).

A broker advertises itself here, again and again; what is not renewed expires. The node pings those it knows,
which measures their distance and their clocks. A request that is admitted goes to the closest and to the
farthest broker of every network that is known here, so that it travels through each from both ends; an
unconnected broker is a network of its own. Later attempts of the same request that come here enter at more
brokers, since the first ones may be dead. The brokers answer the requester themselves.

Nothing is sent to an address that has not shown that it receives there, but for a cookie that is no longer
than what it answers.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from postroad.clocks import ClockOffset
from postroad.delays import Delays
from postroad.discovery.envelopes import Envelopes, Opened, Sealer
from postroad.discovery.gate import Gate, Verdict
from postroad.discovery.memory import REMEMBERED, Memory
from postroad.discovery.policy import Policy, credential
from postroad.discovery.rates import Rates
from postroad.discovery.settings import check_realms
from postroad.errors import BugError, PeerError, UsageError
from postroad.seam.datagrams import Datagram, Endpoint, SendTo
from postroad.seam.effects import Close, Effect
from postroad.seam.inputs import Input
from postroad.seam.inputs import Opened as ConnectionOpened
from postroad.seam.levels import Level
from postroad.units import SECOND_US
from postroad.wire.discovery import (
    MAX_NAME_BYTES,
    SECRET_BYTES,
    UUID_BYTES,
    Acknowledge,
    Advertise,
    Advertised,
    Announce,
    Cookie,
    Inject,
    Message,
    Ping,
    Pong,
    Request,
)

MAX_BROKERS: Final = 10_000
MAX_INJECTIONS: Final = 64  # of one attempt
ORDER_US: Final = SECOND_US  # how long brokers may stay in the order of distances that have changed since
PING_US: Final = 10 * SECOND_US
SILENT_US: Final = 25 * SECOND_US  # without a pong: no request is passed on there if another broker is left
TAKE_OVER_PINGS: Final = 3  # unanswered, a second apart: the broker has gone from where it was
ANNOUNCE_US: Final = 20 * SECOND_US
COUNTERS: Final = (
    "requests_total",
    "requests_refused_total",
    "injections_total",
    "advertisements_total",
    "advertisements_refused_total",
    "cookies_total",
    "malformed_total",
    "dropped_total",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """`tokens`: SHA-256 in hexadecimal -> principal; if there are any, who has none is not answered."""

    name: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    certificates: bool = False
    realms: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()  # geographies, or beginnings of them, that are of interest; none: all
    announce: tuple[Endpoint, ...] = ()  # brokers that a private node makes itself known to (spec V3)
    token: str = ""  # shown to those
    remember: int = REMEMBERED

    def __post_init__(self) -> None:
        if len(self.name.encode()) > MAX_NAME_BYTES or not self.name.isprintable():
            raise UsageError(
                f"the name of a discovery node is printable and has at most {MAX_NAME_BYTES} bytes"
            )
        check_realms(self.realms)


@dataclass(slots=True)
class _Broker:
    """A broker that advertised itself and has shown that it receives at its endpoint."""

    advertised: Advertise
    endpoint: Endpoint
    expires_us: int
    clock: ClockOffset = field(default_factory=ClockOffset)
    pinged_us: int = 0
    heard_us: int = 0  # the last pong, or the first advertisement
    unanswered: int = 0  # pings since the last pong


class DiscoveryNode:
    """See the module's docstring. `draw(n)` gives a random number in 0..n-1."""

    def __init__(
        self, settings: NodeSettings, *, draw: Callable[[int], int], sealer: Sealer | None = None
    ) -> None:
        self._settings = settings
        self._draw = draw
        self._envelopes = Envelopes(sealer)
        policy = Policy(
            settings.tokens,
            certificates=settings.certificates,
            anonymous=False,
            realms=settings.realms,
        )
        self._gate = Gate(policy, self._envelopes, draw)
        self._brokers: dict[int, _Broker] = {}  # by number, at most MAX_BROKERS
        self._by_secret: dict[bytes, int] = {}  # secret of an advertisement -> the number of its broker
        # The brokers of each network by distance, the network with the nearest one first; how many should
        # answer; and until when that holds, 0 if somebody came, went or has another network.
        self._networks: list[list[_Broker]] = []
        self._expected = 0
        self._ordered_until_us = 0
        self._memory = Memory(settings.remember)
        self._rates = Rates()
        self._announced: dict[Endpoint, bytes] = dict.fromkeys(settings.announce, b"")  # -> UUID of it
        self._announce_us = 0
        self._ping_us = 0  # when the next ping is due
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._out: list[Effect] = []

    # ---- the driver's side

    def handle(self, inputs: Iterable[Input], now_us: int) -> list[Effect]:
        for item in inputs:
            if isinstance(item, Datagram):
                self._on_datagram(item, now_us)
            elif isinstance(item, ConnectionOpened):
                self._out.append(Close(item.connection))  # it has nothing to say there
        self._tick(now_us)
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> int | None:
        due = [self._ping_us] if self._brokers else []
        if self._announced:
            due.append(self._announce_us)
        return min(due, default=None)

    def shutdown(self, _now_us: int) -> list[Effect]:
        return []

    # ---- datagrams

    def _on_datagram(self, datagram: Datagram, now_us: int) -> None:
        if not self._rates.admits(datagram.data, now_us):
            self._counters["dropped_total"] += 1
            return
        try:
            self._handle(self._envelopes.unpack(datagram.data, now_us), datagram, now_us)
        except PeerError:
            self._counters["malformed_total"] += 1

    def _handle(self, opened: Opened, datagram: Datagram, now_us: int) -> None:
        """PeerError for a key that nothing can be encrypted for."""
        message = opened.message
        if isinstance(message, Request):
            self._on_request(message, opened, datagram, now_us)
        elif isinstance(message, Advertise):
            self._on_advertise(message, opened, datagram, now_us)
        elif isinstance(message, Pong):
            self._on_pong(message, datagram.source, now_us)
        elif isinstance(message, Cookie) and datagram.source in self._announced:
            self._announce(datagram.source, message, now_us)

    def _send(self, endpoint: Endpoint, message: Message, to: bytes = b"") -> None:
        self._out.append(SendTo(endpoint, self._envelopes.pack(message, to)))

    def _admits(self, asking: Request | Advertise, opened: Opened, datagram: Datagram, now_us: int) -> bool:
        """Whether it is to be answered; who has not shown that it receives there is sent a cookie."""
        verdict, cookie = self._gate.check(asking, opened, datagram, now_us)
        if cookie:
            self._counters["cookies_total"] += 1
            self._out.append(SendTo(datagram.source, cookie))
        if verdict is Verdict.REFUSED:
            refused = "requests" if isinstance(asking, Request) else "advertisements"
            self._counters[f"{refused}_refused_total"] += 1
        return verdict is Verdict.ADMITTED

    # ---- requests

    def _on_request(self, message: Request, opened: Opened, datagram: Datagram, now_us: int) -> None:
        source = datagram.source
        if not self._admits(message, opened, datagram, now_us):
            return
        attempts = self._memory.attempts(message.uuid, message.attempt)
        self._order_networks(now_us)
        if attempts:
            self._counters["requests_total"] += 1
            for broker in self._entries(attempts):
                self._inject(message, opened.certificate, source, broker)
        acknowledge = Acknowledge(uuid=message.uuid, attempt=message.attempt, brokers=self._expected)
        self._send(source, acknowledge, message.key)

    def _inject(self, request: Request, certificate: str, source: Endpoint, broker: _Broker) -> None:
        self._counters["injections_total"] += 1
        inject = Inject(
            secret=broker.advertised.secret,
            uuid=request.uuid,
            attempt=request.attempt,
            host=source[0],
            port=source[1],
            offset_us=request.offset_us + broker.clock.offset_us,
            cookie=request.cookie,
            credential=request.credential,
            key=request.key,
            name=certificate,
        )
        self._send(broker.endpoint, inject, broker.advertised.key)

    def _order_networks(self, now_us: int) -> None:
        """Sorted at most once in a while, not for every request. Silent brokers are left out where another
        of their network is left."""
        if now_us < self._ordered_until_us:
            return
        self._ordered_until_us = now_us + ORDER_US
        networks: dict[int, list[_Broker]] = {}
        for broker in self._brokers.values():
            if broker.expires_us > now_us:
                networks.setdefault(broker.advertised.network, []).append(broker)
        self._networks = []
        for members in networks.values():
            answering = [broker for broker in members if now_us - broker.heard_us < SILENT_US]
            self._networks.append(sorted(answering or members, key=_distance))
        self._networks.sort(key=lambda members: _distance(members[0]))
        self._expected = sum(
            max(len(members), *(broker.advertised.members for broker in members))
            for members in self._networks
        )

    def _entries(self, attempts: int) -> list[_Broker]:
        """Where a request is passed on: the closest and the farthest of each network, then more between."""
        entries: list[_Broker] = []
        for members in self._networks[:MAX_INJECTIONS]:
            count = min(len(members), 2 * attempts)
            if count == 1:
                entries.append(members[0])
            else:
                last = len(members) - 1
                entries += [members[last * place // (count - 1)] for place in range(count)]
        return entries[:MAX_INJECTIONS]

    # ---- brokers

    def _on_advertise(self, message: Advertise, opened: Opened, datagram: Datagram, now_us: int) -> None:
        known = self._brokers.get(message.broker)
        if not self._is_of_interest(message, datagram.source, known, now_us):
            self._counters["advertisements_refused_total"] += 1
            return
        if not self._admits(message, opened, datagram, now_us):
            return
        self._counters["advertisements_total"] += 1
        self._send(datagram.source, Advertised(uuid=message.uuid, time_us=now_us), message.key)
        if not message.lifetime_s:
            self._forget(message.broker)
            return
        expires_us = now_us + message.lifetime_s * SECOND_US
        if known is not None and not _is_same(known, message, datagram.source):
            self._forget(message.broker)
            known = None
        if known is not None:
            before = known.advertised
            if (before.network, before.members) != (message.network, message.members):
                self._ordered_until_us = 0
            self._forget_secret(before)
            known.advertised, known.endpoint, known.expires_us = message, datagram.source, expires_us
            self._by_secret[message.secret] = message.broker
            return
        broker = _Broker(message, datagram.source, expires_us, heard_us=now_us)
        self._brokers[message.broker] = broker
        self._by_secret[message.secret] = message.broker
        self._ordered_until_us = 0
        self._ping(broker, now_us)
        self._ping_us = min(self._ping_us, now_us + PING_US) if len(self._brokers) > 1 else now_us + PING_US

    def _forget(self, number: int) -> None:
        broker = self._brokers.pop(number, None)
        if broker is not None:
            self._forget_secret(broker.advertised)
            self._ordered_until_us = 0

    def _forget_secret(self, advertised: Advertise) -> None:
        """Unless another broker came with the same one since: its own fault, and nobody else's loss."""
        if self._by_secret.get(advertised.secret) == advertised.broker:
            del self._by_secret[advertised.secret]

    def _is_of_interest(
        self, message: Advertise, source: Endpoint, known: _Broker | None, now_us: int
    ) -> bool:
        regions = self._settings.regions
        if regions and not message.geography.startswith(regions):
            return False
        if known is None:
            return len(self._brokers) < MAX_BROKERS
        if _is_same(known, message, source) or known.unanswered >= TAKE_OVER_PINGS:
            return True
        # A broker that restarted elsewhere, or a stranger: whoever is at the old endpoint is asked.
        if now_us >= known.pinged_us + SECOND_US:
            self._ping(known, now_us)
        return False

    def _on_pong(self, message: Pong, source: Endpoint, now_us: int) -> None:
        broker = self._brokers.get(self._by_secret.get(message.key[:SECRET_BYTES], 0))
        if broker is not None and broker.endpoint == source:
            if not broker.clock:
                self._ordered_until_us = 0
            broker.clock.measured(message.sent_us, message.time_us, now_us)
            broker.heard_us = now_us
            broker.unanswered = 0

    def _ping(self, broker: _Broker, now_us: int) -> None:
        broker.pinged_us = now_us
        broker.unanswered += 1
        self._send(broker.endpoint, Ping(key=broker.advertised.secret, sent_us=now_us))

    # ---- time

    def _tick(self, now_us: int) -> None:
        if self._brokers and now_us >= self._ping_us:
            for number, broker in list(self._brokers.items()):
                if now_us >= broker.expires_us:
                    self._forget(number)
                elif now_us >= broker.pinged_us + PING_US:
                    self._ping(broker, now_us)
            self._ping_us = now_us + PING_US // 10
        if self._announced and now_us >= self._announce_us:
            self._announce_us = now_us + ANNOUNCE_US
            for endpoint in self._announced:
                self._announced[endpoint] = self._draw(1 << 8 * UUID_BYTES).to_bytes(UUID_BYTES, "big")
                self._announce(endpoint, None, now_us)

    def _announce(self, endpoint: Endpoint, cookie: Cookie | None, now_us: int) -> None:
        uuid = self._announced[endpoint]
        if cookie is not None and cookie.uuid != uuid:
            return
        value = b"" if cookie is None else cookie.cookie
        announce = Announce(
            uuid=uuid,
            name=self._settings.name,
            sent_us=now_us,
            cookie=value,
            credential=credential(self._settings.token, uuid, value),
            key=self._envelopes.key,
        )
        self._send(endpoint, announce, b"" if cookie is None else cookie.key)

    # ---- inspection

    def metrics(self) -> dict[str, int | float]:
        counted = {f"discovery_{key}": value for key, value in self._counters.items()}
        return {**counted, "discovery_brokers": len(self._brokers)}

    def levels(self, _now_us: int) -> list[Level]:
        return []

    def delays(self) -> list[Delays]:
        return []

    def status(self, now_us: int) -> dict[str, object]:
        return {
            "name": self._settings.name,
            "brokers": [
                {
                    "broker": broker.advertised.name,
                    "address": broker.advertised.address,
                    "round_trip_ms": broker.clock.round_trip_us / 1000 if broker.clock else None,
                    "clock_offset_ms": broker.clock.offset_us / 1000 if broker.clock else None,
                    "expires_s": (broker.expires_us - now_us) / SECOND_US,
                }
                for broker in self._brokers.values()
            ],
            "metrics": self.metrics(),
        }

    def check(self) -> None:
        if len(self._brokers) > MAX_BROKERS:
            raise BugError(f"{len(self._brokers)} brokers, the most is {MAX_BROKERS}")
        for number, broker in self._brokers.items():
            if broker.advertised.broker != number:
                raise BugError(f"broker {broker.advertised.broker:08x} is listed as {number:08x}")
        for secret, number in self._by_secret.items():
            if number not in self._brokers or self._brokers[number].advertised.secret != secret:
                raise BugError(f"broker {number:08x} is listed by a secret that is not its own")


def _is_same(known: _Broker, message: Advertise, source: Endpoint) -> bool:
    """Whether who advertises is at the same endpoint, or knows the secret: it is drawn at every start."""
    return known.endpoint == source or hmac.compare_digest(known.advertised.secret, message.secret)


def _distance(broker: _Broker) -> tuple[bool, int, int]:
    """Those that were not measured yet come last."""
    return not broker.clock, broker.clock.round_trip_us, broker.advertised.broker
