"""The UDP sockets of one process: one that sends and is sent to, and one per multicast group it joined.

The event loop's own datagram transport keeps what a full socket does not take, and cannot be told to read
less. So these sockets are read and written here: a turn reads at most MAX_PER_TURN of each, the rest waits in
the kernel, which drops what it has no room for; what the socket does not take at once is dropped. All of it
is counted.

An IPv6 socket on a wildcard address serves IPv4, too. Endpoints are plain addresses, in both directions.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, Final

from postroad.errors import UsageError, shorten
from postroad.net.log import complain
from postroad.seam.datagrams import Datagram, Endpoint
from postroad.wire.datagrams import MAX_DATAGRAM_BYTES, is_ours

MAX_PER_TURN: Final = 256  # datagrams read of a socket: with MAX_DATAGRAM_BYTES, 308 KiB
RECEIVE_BUFFER_BYTES: Final = 4 << 20  # asked of the kernel for each socket; it gives what its limit allows
MAX_GROUPS: Final = 16
MAX_KNOWN: Final = 4_096  # endpoints whose address is not worked out anew for every datagram
MULTICAST_HOPS: Final = 1  # groups are for the local network
_MAPPED: Final = "::ffff:"  # an IPv4 address as an IPv6 socket shows it
# Of Linux: never fragment, and ignore what anybody's ICMP messages say of the size that would pass.
_MTU_DISCOVER: Final = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (socket.IPPROTO_IPV6, 23)}
_DO_NOT_FRAGMENT: Final = 3
_SO_MEMINFO: Final = 55
_MEMINFO: Final = struct.Struct("=9I")  # the last one: what was dropped because the buffer was full
_Address = tuple[Any, ...]  # of the socket module: of two parts for IPv4, of four for IPv6


class Datagrams:
    """`sock` is bound already; `take` is handed what came in of a turn."""

    def __init__(self, sock: socket.socket, take: Callable[[list[Datagram]], None]) -> None:
        self._sock = sock
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._groups: dict[Endpoint, socket.socket] = {}
        self._known: dict[Endpoint, _Address | None] = {}  # None: not to be reached
        self._in = 0
        self._out = 0
        self._foreign = 0  # came in and was no datagram of ours, or too long for one
        self._unsent = 0  # the socket's buffer was full
        self._failed = 0  # a bad address, no route to it, or the system's refusal for another reason
        self._overrun = 0  # dropped by the kernel, of groups that were left
        self.port: int = sock.getsockname()[1]
        _prepare(sock)
        self._loop.add_reader(sock, self._read, sock, None)

    # -- single datagrams

    def send(self, endpoint: Endpoint, data: bytes) -> None:
        try:
            address = self._known[endpoint]
        except KeyError:
            address = self._learn(endpoint)
        if address is None:
            self._failed += 1
            return
        try:
            self._sock.sendto(data, address)
            self._out += 1
        except BlockingIOError:
            self._unsent += 1
        except OSError as error:
            self._failed += 1
            complain("info", f"no datagrams to {shorten(endpoint[0], 80)}: {error.strerror or error}")

    def _learn(self, endpoint: Endpoint) -> _Address | None:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        try:
            address = to_address(endpoint, self._sock.family)
        except UsageError as error:
            complain("info", f"no datagrams there: {error}")
            address = None
        self._known[endpoint] = address
        return address

    def _read(self, sock: socket.socket, group: Endpoint | None) -> None:
        plain = sock.family == socket.AF_INET
        receive = sock.recvfrom
        arrived: list[Datagram] = []
        for _ in range(MAX_PER_TURN):
            try:
                data, address = receive(MAX_DATAGRAM_BYTES + 1)
            except BlockingIOError:
                break
            except OSError:  # an ICMP message about something we sent; what is behind it is still to be read
                self._failed += 1
                continue
            self._in += 1
            if is_ours(data):
                arrived.append(Datagram(address if plain else to_endpoint(address), data, group))
            else:
                self._foreign += 1
        if arrived:
            self._take(arrived)

    # -- groups

    def join(self, group: Endpoint) -> None:
        """On the interface that this socket is bound to, or that the group's address names; else on any."""
        if group in self._groups:
            return
        if len(self._groups) >= MAX_GROUPS:
            complain("warning", f"cannot join {shorten(group[0], 80)}: {MAX_GROUPS} groups is the limit")
            return
        try:
            sock = _group_socket(group, self._interface())
        except (OSError, ValueError, UsageError) as error:
            complain("warning", f"cannot join {shorten(group[0], 80)}: {error}")
            return
        self._groups[group] = sock
        self._loop.add_reader(sock, self._read, sock, group)

    def leave(self, group: Endpoint) -> None:
        sock = self._groups.pop(group, None)
        if sock is not None:
            self._overrun += _dropped(sock)
            self._loop.remove_reader(sock)
            sock.close()

    def _interface(self) -> str:
        """The IPv4 address of the interface for groups; the wildcard leaves it to the system."""
        return str(self._sock.getsockname()[0]) if self._sock.family == socket.AF_INET else "0.0.0.0"

    # -- life

    def metrics(self) -> dict[str, int]:
        dropped = sum(map(_dropped, (self._sock, *self._groups.values())))
        return {
            "datagrams_in_total": self._in,
            "datagrams_out_total": self._out,
            "datagrams_foreign_total": self._foreign,
            "datagrams_overrun_total": self._overrun + dropped,
            "datagrams_unsent_total": self._unsent,
            "datagrams_failed_total": self._failed,
            "datagram_groups": len(self._groups),
        }

    def close(self) -> None:
        for group in list(self._groups):
            self.leave(group)
        self._loop.remove_reader(self._sock)
        self._sock.close()


def bind_anywhere() -> socket.socket:
    """A socket on any free port of any address, for IPv4 and, where this machine has it, IPv6."""
    both = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        if both:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", 0))
    except BaseException:
        sock.close()
        raise
    return sock


def to_endpoint(address: _Address) -> Endpoint:
    """As cores write it."""
    host: str = address[0]
    if host.startswith(_MAPPED) and "." in host:
        return host[len(_MAPPED) :], address[1]
    if len(address) == 4 and address[3] and "%" not in host:
        return f"{host}%{address[3]}", address[1]
    return host, address[1]


def to_address(endpoint: Endpoint, family: int) -> _Address:
    """As a socket of this family takes it; UsageError if it is none, or none that such a socket reaches."""
    host, port = endpoint
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        raise UsageError(f"{shorten(host, 80)!r} is not a numeric address") from None
    if not 1 <= port <= 65_535:
        raise UsageError(f"{port} is not a port: it is between 1 and 65535")
    if family == socket.AF_INET:
        if parsed.version == 6:
            raise UsageError(f"{host} is an IPv6 address, and this node listens on an IPv4 one")
        return host, port
    if isinstance(parsed, ipaddress.IPv4Address):
        return _MAPPED + host, port, 0, 0
    return host.partition("%")[0], port, 0, _interface_number(parsed.scope_id)


def _interface_number(name: str | None) -> int:
    """0 if none is named."""
    if name is None:
        return 0
    try:
        return int(name) if name.isdigit() else socket.if_nametoindex(name)
    except OSError:
        raise UsageError(f"there is no interface {shorten(name, 40)!r}") from None


def _prepare(sock: socket.socket) -> None:
    """A socket that sends and is sent to."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    if sys.platform == "linux":
        sock.setsockopt(*_MTU_DISCOVER[socket.AddressFamily(sock.family)], _DO_NOT_FRAGMENT)
    host = sock.getsockname()[0]
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, MULTICAST_HOPS)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        if not ipaddress.ip_address(host).is_unspecified:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(host))
    else:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, MULTICAST_HOPS)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)


def _group_socket(group: Endpoint, interface: str) -> socket.socket:
    """A socket that hears a group, and nothing else, beside those of other brokers on this machine."""
    parsed = ipaddress.ip_address(group[0])
    if not parsed.is_multicast:
        raise UsageError("it is not a multicast address")
    family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
    address = to_address(group, family)
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        if family == socket.AF_INET:
            membership = parsed.packed + socket.inet_aton(interface)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        else:
            membership = parsed.packed + struct.pack("=I", address[3])
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, membership)
    except BaseException:
        sock.close()
        raise
    return sock


def _dropped(sock: socket.socket) -> int:
    """What the kernel dropped of what was sent to this socket, where it tells."""
    if sys.platform != "linux":
        return 0
    return int(_MEMINFO.unpack(sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size))[-1])
