"""SIGTERM: the clients of a broker go on at others, under load; nothing that was answered is lost or doubled.

Every client here has one address and no discovery.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from dataclasses import dataclass, field

from tests.worlds.process_clients import linked, run
from tests.worlds.processes import BrokerProcess, Brokers

import postroad
from postroad.wire import frames
from postroad.wire.frames import DEFAULT_LIMITS, PROTOCOL_VERSION, Kind, Splitter

PUBLISHERS = 4
IN_FLIGHT = 10  # events that each has published and no answer to
LONGEST_PAUSE_MS = 5_000  # on a busy machine; a connection that is silent is given up after 15 s
AFTER_S = 1.5  # that the load goes on after the broker has stopped


@dataclass
class Load:
    """What the clients did. Times are those of `time.monotonic`."""

    acknowledged: list[str] = field(default_factory=list)
    delivered: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    inbox: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    gaps: int = 0
    times: dict[str, list[float]] = field(default_factory=dict)
    stopped: bool = False

    def happened(self, what: str) -> None:
        self.times.setdefault(what, []).append(time.monotonic())

    def pause_ms(self, what: str) -> float:
        """The longest."""
        times = self.times[what]
        return max(after - before for before, after in itertools.pairwise(times)) * 1000

    async def publish(self, address: str, number: int) -> None:
        async with postroad.connect(address, name=f"publisher {number}", timeout=60) as client:
            count = 0
            while not self.stopped:
                payloads = [f"{number}.{count + more}" for more in range(IN_FLIGHT)]
                await asyncio.gather(
                    *(client.publish("t/x", payload, mode="durable") for payload in payloads)
                )
                self.acknowledged += payloads
                self.happened("publish")
                count += IN_FLIGHT
                await asyncio.sleep(0.02)  # a reader that acknowledges each event alone must keep up

    async def publish_plain(self, address: str) -> None:
        async with postroad.connect(address, name="plain publisher", timeout=60) as client:
            count = 0
            while not self.stopped:
                await client.publish("p/x", str(count))
                count += 1
                await asyncio.sleep(0.002)

    async def read(self, address: str) -> None:
        async with (
            postroad.connect(address, name="reader", timeout=60) as client,
            client.subscribe("t/#", durable="reader", ack="auto") as events,
        ):
            async for event in events:
                assert isinstance(event, postroad.Event), event
                self.delivered.append(event.payload.decode())
                self.happened("deliver")

    async def read_plain(self, address: str) -> None:
        async with (
            postroad.connect(address, name="plain reader", timeout=60) as client,
            client.subscribe("p/#") as events,
        ):
            async for event in events:
                if isinstance(event, postroad.Gap):
                    self.gaps += 1
                else:
                    self.plain.append(event.payload.decode())

    async def send(self, address: str) -> None:
        async with postroad.connect(address, name="sender", timeout=60) as client:
            shop = client.application("shop")
            while not self.stopped:
                payload = str(len(self.sent))
                await shop.send("store", payload, kind="transactional")
                self.sent.append(payload)
                self.happened("send")
                await asyncio.sleep(0.002)

    async def receive(self, address: str) -> None:
        async with postroad.connect(address, name="receiver", timeout=60) as client:
            async for message in client.application("store").inbox():
                self.inbox.append(message.payload.decode())
                self.happened("receive")
                await message.accept()

    async def settle(self) -> None:
        """Until all that was answered has come."""
        async with asyncio.timeout(30):
            while set(self.acknowledged) - set(self.delivered) or set(self.sent) - set(self.inbox):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def loaded(leaving: BrokerProcess, other: BrokerProcess, how: signal.Signals) -> tuple[Load, int]:
    """Load at a broker that is stopped; what it did, and the broker's exit code."""
    load = Load()
    readers = [
        asyncio.create_task(client(leaving.address)) for client in (load.read, load.read_plain, load.receive)
    ]
    await asyncio.sleep(0.3)
    senders = [asyncio.create_task(load.publish(leaving.address, number)) for number in range(PUBLISHERS)]
    senders += [asyncio.create_task(load.send(leaving.address))]
    senders += [asyncio.create_task(load.publish_plain(other.address))]
    await asyncio.sleep(1.5)
    assert leaving.process is not None
    leaving.process.send_signal(how)
    code = await asyncio.to_thread(leaving.reap)
    await asyncio.sleep(AFTER_S)
    load.stopped = True
    await asyncio.gather(*senders)
    await load.settle()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return load, code


def test_under_load_clients_with_one_address_go_on_elsewhere_and_nothing_is_lost_or_doubled(
    brokers: Brokers,
) -> None:
    found = brokers.ring(3)

    async def scenario() -> None:
        await linked(*found)
        load, code = await loaded(found[0], found[1], signal.SIGTERM)
        assert code == 0, found[0].log.read_text()
        assert len(load.delivered) == len(set(load.delivered))
        assert len(load.acknowledged) == len(set(load.acknowledged))
        assert set(load.delivered) == set(load.acknowledged)
        assert load.inbox == load.sent
        # In the order of each publisher, across the move.
        for number in range(PUBLISHERS):
            own = [int(payload.partition(".")[2]) for payload in load.delivered if payload[0] == str(number)]
            assert own == sorted(own)
        numbers = [int(payload) for payload in load.plain]
        assert numbers == sorted(set(numbers))
        missing = numbers[-1] - numbers[0] + 1 - len(numbers)
        assert load.gaps or not missing  # what a plain subscription missed while it moved is said
        pauses = {what: load.pause_ms(what) for what in load.times}
        assert max(pauses.values()) < LONGEST_PAUSE_MS, pauses

    run(scenario())
    log = found[0].log.read_text()
    assert "SIGTERM: stopping" in log
    assert "draining: 8 clients go on elsewhere" in log


def test_the_log_and_readiness_say_so_and_who_comes_meanwhile_is_sent_on(brokers: Brokers) -> None:
    """A client that says nothing after it was told holds the broker for a moment, within `--drain`."""
    first = brokers.start("b1", extra=("--metrics", "127.0.0.1:0"))
    second = brokers.start("b2", first.address)

    async def scenario() -> None:
        await linked(first, second)
        metrics = first.log.read_text().partition("metrics=")[2].split()[0]
        assert await http_status(metrics, "/ready") == 200
        silent = await Silent.subscribed(first.address, "silent")
        assert first.process is not None
        first.process.send_signal(signal.SIGTERM)
        assert (await silent.refused()).go_to == (second.address,)
        assert await http_status(metrics, "/ready") == 503
        assert await http_status(metrics, "/health") == 200
        async with postroad.connect(first.address, name="late") as client:
            assert (await client.request("status"))["name"] == "b2"
        assert await asyncio.to_thread(first.reap) == 0

    run(scenario())


def test_a_second_signal_ends_it_at_once_and_drain_is_bounded(brokers: Brokers) -> None:
    second = brokers.start("b2")
    bounded = brokers.start("b1", second.address, extra=("--drain", "200 ms"))

    async def scenario() -> None:
        await linked(bounded, second)
        silent = await Silent.subscribed(bounded.address, "silent")
        began = time.monotonic()
        assert bounded.process is not None
        bounded.process.send_signal(signal.SIGTERM)
        await silent.refused()
        assert await asyncio.to_thread(bounded.reap) == 0
        assert time.monotonic() - began < 1.9  # less than it would have waited for the subscription
        impatient = brokers.start("b3", second.address)
        await linked(impatient, second)
        silent = await Silent.subscribed(impatient.address, "also silent")
        assert impatient.process is not None
        impatient.process.send_signal(signal.SIGTERM)
        await silent.refused()
        impatient.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(impatient.reap) == 130

    run(scenario())
    assert "SIGTERM again: ending at once" in (brokers.folder / "b3.log").read_text()


class Silent:
    """A durable subscriber that speaks frames, and does nothing when it is told to go."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._splitter = Splitter(DEFAULT_LIMITS.batch_bytes)
        self._came: list[frames.Message] = []

    @classmethod
    async def subscribed(cls, address: str, name: str) -> Silent:
        host, port = address.split(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        hello = frames.Hello(
            version=PROTOCOL_VERSION,
            role="client",
            name="silent",
            token="",
            limits=DEFAULT_LIMITS,
            window=1 << 20,
            time_us=0,
        )
        client._writer.write(frames.encode(hello))
        await client.comes(frames.Welcome)
        wanted = frames.Subscribe(number=1, topic="#", where="", durable=name, ack="manual")
        client._writer.write(frames.encode(wanted))
        await client.comes(frames.Subscribed)
        return client

    async def comes(self, kind: type[frames.Message]) -> frames.Message:
        async with asyncio.timeout(30):
            while True:
                while self._came:
                    message = self._came.pop(0)
                    if isinstance(message, kind):
                        return message
                data = await self._reader.read(1 << 16)
                assert data, "the broker closed the connection"
                came = self._splitter.feed(data)
                self._came += [
                    frames.decode(frame) for frame in came if frames.frame_kind(frame) != Kind.DELIVERY
                ]

    async def refused(self) -> frames.Refuse:
        """Its connection is closed then, and it is silent."""
        refuse = await self.comes(frames.Refuse)
        self._writer.close()
        assert isinstance(refuse, frames.Refuse)
        return refuse


async def http_status(address: str, path: str) -> int:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])
