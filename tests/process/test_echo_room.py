"""A room of one's own, and direct peers, over real sockets: three brokers in a line."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import AsyncIterator

import pytest
from tests.worlds.brokers import QUIET
from tests.worlds.echo_room import ANSWER, ASK, EchoBroker
from tests.worlds.node_server import Caller, run, until

import postroad
from postroad.config import BrokerConfig
from postroad.ids import Identity
from postroad.links import direct
from postroad.links.connection import LinkSettings
from postroad.net.clock import Clock
from postroad.net.listen import bind_both
from postroad.net.server import Server
from postroad.units import MIB, MILLISECOND_US
from postroad.wire.datagrams import pack
from postroad.wire.frames import DEFAULT_LIMITS


class Node:
    """One broker with the room `echo`, behind real sockets."""

    def __init__(self, number: int, dial: tuple[str, ...] = (), advertise: str = "") -> None:
        self.listener, self.datagrams = bind_both("127.0.0.1:0")
        self.port: int = self.listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.broker = EchoBroker(
            BrokerConfig(links=LinkSettings(address=advertise or self.address), dial=dial, queues=QUIET),
            Identity(number=number, node=bytes((number,)) * 16, name=f"b{number}", boot=1, starts=1),
            draw=secrets.randbelow,
            now_us=time.time_ns() // 1000,
        )
        self.server = Server(
            self.broker,
            clock=Clock(),
            max_connections=100,
            max_batch_bytes=DEFAULT_LIMITS.batch_bytes,
            window_bytes=64 * MIB,
        )

    async def start(self) -> None:
        await self.server.start(self.listener, self.datagrams)

    def figure(self, name: str) -> int | float:
        return self.broker.metrics()[name]


@contextlib.asynccontextmanager
async def line(advertise: str = "") -> AsyncIterator[list[Node]]:
    """Brokers 1 to 3, each linked to the one before it, that all know each other; and what the third says of
    its address."""
    nodes: list[Node] = []
    for number in (1, 2, 3):
        dial = (nodes[-1].address,) if nodes else ()
        nodes.append(Node(number, dial=dial, advertise=advertise if number == 3 else ""))
        await nodes[-1].start()
    try:
        await until(lambda: all(node.figure("brokers_reachable") == 3 for node in nodes))
        yield nodes
    finally:
        for node in nodes:
            await node.server.stop()
            assert await node.server.wait() == 0


async def _echo_everywhere() -> None:
    async with line() as nodes, postroad.connect(nodes[0].address) as client:
        assert await client.request("echo", text="here") == {"text": "here"}
        assert await client.request("echo", text="far", broker="3") == {"text": "far"}
        assert await client.request("echo", text="straight", broker="3", direct="1") == {"text": "straight"}
        with Caller() as caller:
            caller.send(pack(ASK, b"hello"), "127.0.0.1", nodes[0].port)
            assert (await caller.receive())[0] == pack(ANSWER, b"hello")


def test_the_smallest_room_answers_a_request_a_query_a_datagram_and_a_direct_peer() -> None:
    run(_echo_everywhere())


async def _direct_is_no_link() -> None:
    async with line() as nodes, postroad.connect(nodes[0].address) as client:
        for text in ("one", "two"):
            assert await client.request("echo", text=text, broker="3", direct="1") == {"text": text}
        assert nodes[0].figure("direct_dials_total") == 1, "the second goes over the first one's connection"
        assert nodes[0].figure("direct_peers") == nodes[2].figure("direct_peers") == 1
        assert [node.figure("links") for node in nodes] == [1, 2, 1], "no broker has a neighbour more"
        (broker,) = [row for row in (await client.request("status"))["brokers"] if row["broker"] == "b3"]
        assert broker["distance"] == 2


def test_a_direct_peer_is_no_neighbour() -> None:
    run(_direct_is_no_link())


async def _direct_ends_when_idle() -> None:
    async with line() as nodes, postroad.connect(nodes[0].address) as client:
        assert await client.request("echo", text="x", broker="3", direct="1") == {"text": "x"}
        await until(lambda: nodes[0].figure("direct_peers") == nodes[2].figure("direct_peers") == 0)
        assert nodes[0].figure("direct_dials_total") == 1, "nobody dials again by himself"
        assert await client.request("echo", text="y", broker="3", direct="1") == {"text": "y"}


def test_an_idle_direct_connection_ends_and_is_dialled_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct, "IDLE_US", 300 * MILLISECOND_US)
    run(_direct_ends_when_idle())


async def _unreached(advertise: str) -> None:
    async with line(advertise) as nodes, postroad.connect(nodes[0].address) as client:
        assert await client.request("echo", text="x", broker="9", direct="1") == {"error": "no way"}
        assert await client.request("echo", text="x", broker="3", direct="1") == {"error": "unreached"}
        assert nodes[0].figure("direct_peers") == 0
        for _ in range(50):
            assert await client.request("echo", text="x", broker="3", direct="1") == {"error": "no way"}
        assert nodes[0].figure("direct_dials_total") == 1, "who cannot be reached is left alone for a while"


def test_a_room_hears_at_once_that_a_broker_cannot_be_reached() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        run(_unreached(f"127.0.0.1:{closed.getsockname()[1]}"))


async def _led_elsewhere() -> None:
    other = Node(7)
    await other.start()
    await _unreached(other.address)
    await other.server.stop()
    assert await other.server.wait() == 0


def test_what_is_for_one_broker_is_not_told_to_another_that_has_its_address() -> None:
    run(_led_elsewhere())
