"""Brokers in the conventions people already use: mDNS and DNS-SD, by zeroconf (extra `discovery`).

The service is `_postroad._tcp.local.`; the text record has the broker's number. What is found is asked as a
broker of last time is: it still has to answer, and to be chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Callable
from typing import Final

from postroad.errors import UsageError
from postroad.seam.datagrams import Endpoint

SERVICE: Final = "_postroad._tcp.local."
ANSWER_MS: Final = 1_000  # for one broker's address
MAX_FOUND: Final = 32


def has_mdns() -> bool:
    """Whether the library is installed."""
    try:
        import zeroconf  # noqa: F401
    except ImportError:
        return False
    return True


@contextlib.asynccontextmanager
async def announced(name: str, number: int, endpoint: Endpoint) -> AsyncIterator[None]:
    """While this is open, the broker is announced where its address is: on loopback, or on the network."""
    if not has_mdns():
        raise UsageError("discovery.mdns needs the zeroconf library: pip install 'postroad[discovery]'")
    from zeroconf import ServiceInfo
    from zeroconf.asyncio import AsyncZeroconf

    host, port = endpoint
    hosts = _own_hosts() if ipaddress.ip_address(host).is_unspecified else [host]
    # Names may have dots and be long; a label of the DNS has neither.
    label = "".join(letter if letter.isalnum() else "-" for letter in name)[:40] or "broker"
    info = ServiceInfo(
        SERVICE,
        f"{label}-{number:08x}.{SERVICE}",
        port=port,
        parsed_addresses=hosts,
        properties={"broker": f"{number:08x}"},
        server=f"{label}-{number:08x}.local.",
    )
    responder = AsyncZeroconf(interfaces=hosts)
    try:
        await responder.async_register_service(info)
        yield
    finally:
        await responder.async_unregister_all_services()
        await responder.async_close()


async def browse(interface: str, tell: Callable[[Endpoint], None]) -> None:
    """Tells of brokers as they are found, until it is cancelled. `interface`: an address of ours; "": any."""
    from zeroconf import InterfaceChoice, ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

    names: asyncio.Queue[str] = asyncio.Queue(MAX_FOUND)

    # The library calls this with these very names.
    def changed(
        zeroconf: Zeroconf,  # noqa: ARG001
        service_type: str,  # noqa: ARG001
        name: str,
        state_change: ServiceStateChange,
    ) -> None:
        if state_change is ServiceStateChange.Added and not names.full():
            names.put_nowait(name)

    asker = AsyncZeroconf(interfaces=[interface] if interface else InterfaceChoice.All)
    browser = AsyncServiceBrowser(asker.zeroconf, SERVICE, handlers=[changed])
    try:
        while True:
            info = AsyncServiceInfo(SERVICE, await names.get())
            if await info.async_request(asker.zeroconf, ANSWER_MS) and info.port:
                for host in info.parsed_addresses()[:4]:
                    tell((host, info.port))
    finally:
        await browser.async_cancel()
        await asker.async_close()


def _own_hosts() -> list[str]:
    """The addresses of this machine on its networks, IPv4."""
    import ifaddr

    hosts = [
        str(address.ip) for adapter in ifaddr.get_adapters() for address in adapter.ips if address.is_IPv4
    ]
    return [host for host in hosts if not ipaddress.ip_address(host).is_loopback]
