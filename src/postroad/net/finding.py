"""Searches for a broker with real sockets: one search, its datagrams, its timer.

Multicast leaves by the interface that is named. Where none is, it is tried on the loopback interface, where
brokers without authentication are, and on whichever the system takes for the local network.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from postroad.config import DEFAULT_NODE_PORT, DEFAULT_PORT, parse_address
from postroad.discovery.envelopes import Envelopes, Sealer
from postroad.discovery.search import MAX_KNOWN, Search, SearchResult, Stage
from postroad.discovery.settings import MULTICAST_GROUP, SearchSettings
from postroad.errors import PeerError, UnavailableError, UsageError
from postroad.net.clock import Clock
from postroad.net.datagrams import Datagrams
from postroad.net.mdns import browse, has_mdns
from postroad.seam.datagrams import Datagram, Endpoint, SendTo
from postroad.units import SECOND_US

INTERFACE_VARIABLE: Final = "POSTROAD_INTERFACE"  # the address of the interface for multicast, or "off"
NODES_VARIABLE: Final = "POSTROAD_BDN"  # discovery nodes, separated by commas
LOOPBACK: Final = "127.0.0.1"
ANY: Final = "0.0.0.0"
ANY_IPV6: Final = "::"
OFF: Final = "off"
DEFAULT_GROUP: Final = parse_address(MULTICAST_GROUP)
MAX_FILE_BYTES: Final = 64 << 10
MDNS_AFTER_S: Final = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Whom to ask, and as whom."""

    nodes: tuple[str, ...] = ()  # HOST:PORT of discovery nodes
    interface: str = ""  # a numeric address of this machine, or "off" for no multicast
    group: Endpoint = DEFAULT_GROUP
    remember: bool = True  # ask the brokers of last time, and remember those of this time
    token: str = ""
    sealer: Sealer | None = None
    search: SearchSettings = field(default_factory=SearchSettings)


def from_environment(where: Where) -> Where:
    """What is not said is taken from the environment."""
    nodes = tuple(node for node in os.environ.get(NODES_VARIABLE, "").split(",") if node)
    interface = where.interface or os.environ.get(INTERFACE_VARIABLE, "")
    return replace(where, nodes=where.nodes or nodes, interface=interface)


async def find(where: Where) -> SearchResult:
    """The brokers that answered, the chosen one first; UnavailableError if none did."""
    known = recall() if where.remember else ()
    nodes = await resolve(where.nodes, DEFAULT_NODE_PORT)
    search = Search(
        where.search,
        nodes=nodes,
        group=None if where.interface == OFF else where.group,
        known=await resolve(known, must=False),
        draw=secrets.randbelow,
        envelopes=Envelopes(where.sealer),
        token=where.token,
    )
    if where.interface and where.interface != OFF:
        hosts = [where.interface]
    else:
        hosts = [ANY] if where.interface == OFF else [ANY, LOOPBACK]
        hosts += [ANY_IPV6] if any(":" in host for host, _ in nodes) else []
    result = await _Run(search, hosts, None if where.interface == OFF else where.interface).result()
    if where.remember:
        remember(candidate.address for candidate in result.candidates)
    return result


class _Run:
    """One search under way."""

    def __init__(self, search: Search, hosts: Sequence[str], mdns: str | None) -> None:
        self._search = search
        self._mdns = mdns  # the interface to ask by, None: by none
        self._clock = Clock()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._heard_by: dict[Endpoint, Datagrams] = {}  # who was heard by which socket
        self._sockets: list[Datagrams] = []
        self._over_ipv6: list[Datagrams] = []  # of them
        for host in hosts:
            self._open(host)

    def _open(self, host: str) -> None:
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            raise UsageError(
                f"cannot search from {host!r}: the interface is an address of this machine, or {OFF!r}"
            ) from None
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
            try:
                sock.bind((host, 0))
            except OSError:
                sock.close()
                raise
        except OSError as error:
            raise UsageError(f"cannot search from {host}: {error.strerror or error}") from None
        box: list[Datagrams] = []
        box.append(Datagrams(sock, lambda arrived: self._take(box[0], arrived)))
        self._sockets += box
        self._over_ipv6 += box if ":" in host else []

    async def result(self) -> SearchResult:
        browsing = None if self._mdns is None else self._loop.create_task(self._browse(self._mdns))
        try:
            self._perform(self._search.start(self._clock.now_us()))
            await self._over
        finally:
            if browsing is not None:
                browsing.cancel()
                await asyncio.wait([browsing])
            if self._timer is not None:
                self._timer.cancel()
            for sock in self._sockets:
                sock.close()
        if self._search.result is None:
            raise self._search.error or UnavailableError("no broker was found")
        return self._search.result

    async def _browse(self, interface: str) -> None:
        """mDNS takes its time, and the library half a second to import: only where nobody answers at once."""
        await asyncio.sleep(MDNS_AFTER_S)
        if has_mdns():
            with contextlib.suppress(OSError):  # an interface without multicast
                await browse(interface, self._ask_also)

    def _ask_also(self, endpoint: Endpoint) -> None:
        self._perform(self._search.ask_also(endpoint, self._clock.now_us()))

    def _take(self, heard_by: Datagrams, arrived: Sequence[Datagram]) -> None:
        for datagram in arrived:
            self._heard_by.setdefault(datagram.source, heard_by)
            with contextlib.suppress(PeerError):  # anybody can send one, nobody here cares who did
                self._perform(self._search.datagram(datagram, self._clock.now_us()))

    def _tick(self) -> None:
        self._timer = None
        self._perform(self._search.tick(self._clock.now_us()))

    def _perform(self, datagrams: list[SendTo]) -> None:
        for datagram in datagrams:
            for sender in self._senders(datagram.endpoint):
                sender.send(datagram.endpoint, datagram.data)
        if self._search.stage is Stage.OVER:
            if not self._over.done():
                self._over.set_result(None)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_us = self._search.next_deadline()
        if deadline_us is not None:
            delay_us = max(0, deadline_us - self._clock.now_us())
            self._timer = self._loop.call_later(delay_us / SECOND_US, self._tick)

    def _senders(self, endpoint: Endpoint) -> list[Datagrams]:
        """Of the same family, if there is one."""
        ipv6 = ":" in endpoint[0]
        sockets = [sock for sock in self._sockets if (sock in self._over_ipv6) == ipv6] or self._sockets
        if ipaddress.ip_address(endpoint[0].partition("%")[0]).is_multicast:
            return sockets
        return [self._heard_by.get(endpoint, sockets[0])]


async def resolve(
    addresses: Sequence[str], default_port: int = DEFAULT_PORT, *, must: bool = True
) -> list[Endpoint]:
    """Numeric endpoints, one for each address; for one that has none, or is none, UsageError with `must`."""
    endpoints: list[Endpoint] = []
    loop = asyncio.get_running_loop()
    for address in addresses:
        try:
            host, port = parse_address(address, default_port)
            rows = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except UsageError:
            if must:
                raise
            continue
        except (OSError, UnicodeError):
            if must:
                raise UsageError(f"{address!r}: no such host") from None
            continue
        best = min(rows, key=lambda row: row[0] != socket.AF_INET)
        endpoints.append((str(best[4][0]), int(best[4][1])))
    return endpoints


# ---- the target set of last time (paper 7)


def state_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "postroad" / "brokers.json"


def recall() -> tuple[str, ...]:
    """The brokers of the last search; none if that is not known any more."""
    try:
        with state_file().open("rb") as stream:
            rows = json.loads(stream.read(MAX_FILE_BYTES))
        return tuple(address for address in rows["brokers"] if isinstance(address, str))[:MAX_KNOWN]
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def remember(addresses: Iterable[str]) -> None:
    """Where there is no place to remember them, nothing is lost but the memory."""
    file = state_file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}.new")
        fresh.write_text(json.dumps({"brokers": list(addresses)[:MAX_KNOWN]}))
        fresh.replace(file)
