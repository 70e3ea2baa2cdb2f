"""Best effort over real UDP on loopback, through proxies that lose datagrams (spec B1, B4, B7, B10)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator

import pytest
from tests.worlds.lossy_datagrams import LossyProxy
from tests.worlds.node_server import run, until

import postroad
from postroad.broker.core import Broker
from postroad.client.aio import Client
from postroad.client.subscription import Subscription
from postroad.config import BrokerConfig
from postroad.ids import Identity
from postroad.links.connection import LinkSettings
from postroad.links.links import Links
from postroad.net.clock import Clock
from postroad.net.listen import bind_both
from postroad.net.server import Server
from postroad.tracking.strategies import make_tracking
from postroad.units import MIB
from postroad.wire.frames import DEFAULT_LIMITS


class Node:
    """A broker behind real sockets. If it is given a loss, datagrams of those who dial it, and those back to
    them, pass a proxy."""

    def __init__(self, number: int, dial: tuple[str, ...], loss: float | None) -> None:
        self.listener, self.datagrams = bind_both("127.0.0.1:0")
        self.port: int = self.listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.proxy = None if loss is None else LossyProxy(("127.0.0.1", self.port), loss, number)
        self._number = number
        self._dial = dial

    async def start(self) -> None:
        port = self.port
        if self.proxy is not None:
            await self.proxy.start()
            port = self.proxy.port
        number, now_us = self._number, time.time_ns() // 1000
        config = BrokerConfig(links=LinkSettings(address=self.address, datagrams=port), dial=self._dial)
        self.broker = Broker(
            config,
            Identity(number=number, node=bytes((number,)) * 16, name=f"b{number}", boot=1, starts=1),
            draw=secrets.randbelow,
            now_us=now_us,
            tracking=make_tracking(config.tracking, me=number, stored=(), changes=(), now_us=now_us),
        )
        self.server = Server(
            self.broker,
            clock=Clock(),
            max_connections=100,
            max_batch_bytes=DEFAULT_LIMITS.batch_bytes,
            window_bytes=64 * MIB,
        )
        await self.server.start(self.listener, self.datagrams)

    def figure(self, name: str) -> int | float:
        return self.broker.metrics()[name]


@contextlib.asynccontextmanager
async def line(*losses: float | None) -> AsyncIterator[list[Node]]:
    nodes: list[Node] = []
    for number, loss in enumerate(losses, 1):
        nodes.append(Node(number, (nodes[-1].address,) if nodes else (), loss))
        await nodes[-1].start()
    try:
        await until(lambda: all(node.figure("brokers_reachable") == len(nodes) for node in nodes))
        yield nodes
    finally:
        for node in nodes:
            await node.server.stop()
            assert await node.server.wait() == 0
            if node.proxy is not None:
                node.proxy.close()


async def _collect(events: Subscription, count: int, given_up: int = 0) -> list[bytes]:
    """The payloads of so many events; of so many a Gap may come instead, where requests are lost as well."""
    got: list[bytes] = []
    missing = 0
    async for event in events:
        if isinstance(event, postroad.Gap):
            missing += event.end - event.start
            assert missing <= given_up, event
        else:
            got.append(event.payload)
        if len(got) + missing == count:
            break
    return got


async def _publish(client: Client, count: int, together: int = 20, *, first: int = 0) -> None:
    for number in range(first, first + count):
        kind = "x" if number % 2 else "y"
        await client.publish("orders/eu", str(number), {"kind": kind, "n": number}, mode="best-effort")
        if number % together == 0:
            await asyncio.sleep(0.01)


async def _publish_in_bad_weather(client: Client, count: int, nodes: list[Node]) -> None:
    """A quarter of it while half of the datagrams are lost, and a quarter while all of them are."""
    proxies = [node.proxy for node in nodes if node.proxy is not None]
    usual, quarter = proxies[0].loss, count // 4
    await _publish(client, 2 * quarter)
    for at, loss in ((2, 0.5), (3, 1.0)):
        for proxy in proxies:
            proxy.loss = loss
        await _publish(client, quarter, first=at * quarter)
        await asyncio.sleep(1.0 if loss < 1 else 2.0)
    for proxy in proxies:
        proxy.loss = usual


async def _repaired(loss: float, count: int, given_up: int, *, weather: bool) -> None:
    """With `weather` there is a burst of losses and a cut of two seconds, and the publisher starts anew. Each
    event comes once."""
    async with line(loss, loss) as nodes, contextlib.AsyncExitStack() as stack:
        publisher = await postroad.connect(nodes[0].address)
        reader = await stack.enter_async_context(postroad.connect(nodes[1].address))
        events = await stack.enter_async_context(reader.subscribe("orders/#", "kind = 'x'", repair=True))
        await until(lambda: nodes[0].figure("best_effort_paths") >= 1)
        await until(lambda: nodes[1].figure("best_effort_paths") >= 2)
        await _publish(publisher, 1)
        await until(lambda: nodes[0].figure("best_effort_paths") >= 2)
        load = _publish_in_bad_weather(publisher, count, nodes) if weather else _publish(publisher, count)
        publishing = asyncio.create_task(load)
        async with asyncio.timeout(60):
            got = await _collect(events, count // 2, given_up=given_up)
        await publishing
        await publisher.close()
        if weather:
            anew = await stack.enter_async_context(postroad.connect(nodes[0].address))
            publishing = asyncio.create_task(_publish(anew, 100, first=count))
            async with asyncio.timeout(60):
                got += await _collect(events, 50)
            await publishing
            count += 100
        assert len(set(got)) == len(got) >= count // 2 - given_up, "each once, and as good as none missing"
        assert set(map(int, got)) <= set(range(1, count, 2))
        assert sum(node.proxy.dropped for node in nodes if node.proxy is not None) > 0
        figures = events.repair
        assert figures["recovered"] > 0
        assert figures["missing"] == 0
        assert nodes[1].figure("best_effort_received_total") > 0
        status = await reader.request("status")
        assert status["best_effort"]["delivered"] > 0
        await until(lambda: nodes[1].figure("repair_recovered") == events.repair["recovered"])
        (row,) = (await reader.request("status"))["repair"]
        shown = ("losses_detected", "recovered", "duplicates_suppressed", "cache_messages")
        assert {name: row[name] for name in shown} == {name: events.repair[name] for name in shown}
        assert row["recovery_ms"] > 0
        assert nodes[1].figure("repair_requests") == row["requests"] > 0
        assert nodes[0].figure("repair_subscriptions") == 0, "each broker shows its own clients"


@pytest.mark.parametrize(
    ("loss", "count", "given_up", "weather"), [(0.01, 1_000, 0, True), (0.1, 400, 32, False)]
)
def test_what_is_lost_is_repaired(loss: float, count: int, given_up: int, weather: bool) -> None:
    """B1: At 10% on each of four ways all tries for one summary may be lost: a Gap tells of its events."""
    run(_repaired(loss, count, given_up, weather=weather))


async def _begun_inside_a_summary() -> None:
    """The first summary that is heard begins before the subscription; what is lost after `subscribed` and
    before any event comes is repaired all the same."""
    async with line(0.0) as nodes, contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(postroad.connect(nodes[0].address))
        reader = await stack.enter_async_context(postroad.connect(nodes[0].address))
        other = await stack.enter_async_context(reader.subscribe("others/#", repair=True))
        await _publish(publisher, 1)
        await until(lambda: nodes[0].figure("best_effort_paths") >= 2)
        await _publish(publisher, 20, together=1, first=1)
        events = await stack.enter_async_context(reader.subscribe("orders/#", repair=True))
        first, proxy = 21, nodes[0].proxy
        assert proxy is not None
        proxy.loss = 1.0
        await _publish(publisher, 10, together=1, first=first)
        proxy.loss = 0.0
        await _publish(publisher, 10, together=1, first=first + 10)
        async with asyncio.timeout(30):
            got = await _collect(events, 20)
        assert sorted(map(int, got)) == list(range(first, first + 20)), "and nothing from before"
        assert events.repair["recovered"] == 10
        assert other.repair["losses_detected"] == 0


def test_what_is_lost_right_after_a_subscription_began_is_repaired() -> None:
    """B4."""
    run(_begun_inside_a_summary())


async def _traced(count: int) -> None:
    async with line(0.2, None) as nodes, contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(postroad.connect(nodes[1].address))
        reader = await stack.enter_async_context(postroad.connect(nodes[0].address, name="reader"))
        events = await stack.enter_async_context(reader.subscribe("orders/#", repair=True))
        await until(lambda: nodes[1].figure("best_effort_paths") >= 1)
        await until(lambda: nodes[0].figure("best_effort_paths") >= 2)
        ids = []
        for number in range(count):
            receipt = await publisher.publish("orders/eu", str(number), {"n": number}, mode="best-effort")
            ids.append(receipt.id)
            await asyncio.sleep(0.001)
        async with asyncio.timeout(60):
            got = await _collect(events, count, given_up=5)
        assert len(set(got)) == len(got)
        await asyncio.sleep(2.5)  # what repair brought is told once a second
        on_the_link = at_the_end = repaired = 0
        for identity in ids:
            trail = await publisher.trace(identity)
            assert (trail.origin, trail.verdict) == ("b2", "complete")
            if not trail.receivers:
                assert events.repair["given_up"] > 0
                continue
            (receiver,) = trail.receivers
            assert (receiver.subscriber.split("#")[0], receiver.broker) == ("reader", "b1")
            came = [step.broker for step in trail.route] == ["b2", "b1"]
            lost = [(loss.source, loss.target.split("#")[0]) for loss in trail.lost]
            if not came:
                assert (lost, receiver.repair) == ([("b2", "b1")], True), "lost on the link, and repaired"
                on_the_link += 1
            elif receiver.repair:
                assert lost == [("b1", "reader")]
                at_the_end += 1
            else:
                assert lost == []
            assert all(loss.doubt < 0.01 for loss in trail.lost)
            repaired += receiver.repair
        assert on_the_link > 0
        assert at_the_end > 0
        assert repaired >= events.repair["recovered"] > 0


def test_a_trace_shows_where_an_event_was_lost_and_who_got_a_repair() -> None:
    """T6."""
    run(_traced(150))


async def _by_records(loss: float, count: int) -> None:
    """The paper's way: records on events, requests among receivers. A cache beside the publisher's broker has
    what the others miss; another one, in another scope, hears nothing of it."""
    async with line(loss, None) as nodes, contextlib.AsyncExitStack() as stack:

        async def client(node: Node, scope: str = "eu") -> Client:
            found = await stack.enter_async_context(postroad.connect(node.address))
            found.repair_by("records", scope=scope)
            return found

        near, far = await client(nodes[1]), await client(nodes[1], "us")
        kept = await stack.enter_async_context(near._caching("orders/#", "", 1_000))
        unasked = await stack.enter_async_context(far._caching("orders/#", "", 1_000))
        reader, publisher = await client(nodes[0]), await client(nodes[1])
        events = await stack.enter_async_context(reader.subscribe("orders/#", repair=True))
        await until(lambda: nodes[0].figure("best_effort_paths") >= 2)
        # The first one comes: what is before it is not missed.
        proxy = nodes[0].proxy
        assert proxy is not None
        proxy.loss = 0.0
        await _publish(publisher, 1)
        async with asyncio.timeout(60):
            got = await _collect(events, 1)
        proxy.loss = loss
        # Each in a datagram of its own: a record tells nothing of what is lost with all it would be told by.
        publishing = asyncio.create_task(_publish(publisher, count - 1, together=1, first=1))
        async with asyncio.timeout(60):
            got += await _collect(events, count - 1, given_up=round(count * loss / 4))
        await publishing
        assert len(set(got)) == len(got), "each once"
        figures = events.repair
        assert figures["recovered"] > 0
        assert figures["requests_sent"] == 0, "the publisher was not asked"
        assert figures["asks_sent"] > 0
        assert kept.repair["repairs_sent"] > 0
        assert unasked.repair["repairs_sent"] == 0
        assert unasked.repair["cache_messages"] == count, "it got all of the events, and none of the requests"
        side = publisher._core.effort._publisher()
        assert side.record > 10, "it grew with what was asked for"


@pytest.mark.parametrize(("loss", "count"), [(0.01, 600), (0.1, 200)])
def test_records_repair_among_receivers_of_one_scope(loss: float, count: int) -> None:
    """Spec B3 to B5, B10."""
    run(_by_records(loss, count))


async def _ordered() -> None:
    async with line(0.05) as nodes, contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(postroad.connect(nodes[0].address))
        reader = await stack.enter_async_context(postroad.connect(nodes[0].address))
        events = await stack.enter_async_context(reader.subscribe("orders/#", repair=True, order=20))
        await until(lambda: nodes[0].figure("best_effort_paths") >= 1)
        await _publish(publisher, 300)
        async with asyncio.timeout(30):
            got = await _collect(events, 300)
        assert list(map(int, got)) == list(range(300))


def test_order_is_restored_when_asked_for() -> None:
    run(_ordered())


async def _over_tcp() -> None:
    async with line(1.0, 1.0) as nodes, contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(postroad.connect(nodes[0].address))
        reader = await stack.enter_async_context(postroad.connect(nodes[1].address))
        events = await stack.enter_async_context(reader.subscribe("orders/+"))
        receipt = await publisher.publish("orders/eu", b"hello", {"n": 1}, mode="best-effort")
        async with asyncio.timeout(10):
            event = await anext(events)
        assert isinstance(event, postroad.Event)
        assert (event.id, event.payload, event.pubend) == (receipt.id, b"hello", None)
        assert nodes[0].figure("best_effort_paths") == 0
        some = [("orders/eu", b"a"), ("orders/eu", b"b")]
        assert await publisher.publish_many(some, mode="best-effort") == 2
        async with asyncio.timeout(10):
            assert await _collect(events, 2) == [b"a", b"b"]


def test_where_datagrams_do_not_pass_the_connection_carries_the_events() -> None:
    """B1: A subscription without repair gets best-effort events, too."""
    run(_over_tcp())


async def _dedicated_cache() -> None:
    async with line(1.0, 1.0) as nodes, contextlib.AsyncExitStack() as stack:
        keeper = await stack.enter_async_context(postroad.connect(nodes[0].address))
        kept = await stack.enter_async_context(keeper._caching("orders/#", "", 1_000))
        reader = await stack.enter_async_context(postroad.connect(nodes[1].address))
        events = await stack.enter_async_context(reader.subscribe("orders/#", "kind = 'x'", repair=True))
        publisher = await postroad.connect(nodes[0].address)
        link = nodes[0].broker._rooms.besteffort._neighbours[2]
        available = nodes[0].broker._rooms.links.available
        full = [link.peer.connection]
        # The link to the second broker has no room while these are published, and so they are dropped there.
        forwarding = nodes[0].broker._rooms.besteffort._links
        nodes[0].broker._rooms.besteffort._links = _Full(forwarding, full)  # type: ignore[assignment]
        await _publish(publisher, 40)
        await until(lambda: kept.repair["cache_messages"] >= 40)
        full.clear()
        assert available(link.peer.connection) > 0
        await until(lambda: events.repair["losses_detected"] >= 20)
        await publisher._go()  # without another word
        async with asyncio.timeout(40):
            got = await _collect(events, 20)
        assert sorted(map(int, got)) == list(range(1, 40, 2))
        assert kept.repair["repairs_sent"] >= 1


class _Full:
    """Links of which some have no credit."""

    def __init__(self, links: Links, full: list[int]) -> None:
        self._links = links
        self._full = full
        self.spend, self.may_publish = links.spend, links.may_publish

    def available(self, connection: int) -> int:
        return 0 if connection in self._full else self._links.available(connection)


def test_a_cache_repairs_what_a_dead_publisher_sent() -> None:
    """B5: Spec B10."""
    run(_dedicated_cache())
