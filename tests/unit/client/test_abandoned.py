"""An inbox that a program no longer has: its consumer leaves, and others get what it had in advance."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

from tests.worlds.scripted_brokers import FakeBroker

import postroad
import postroad.sync
from postroad.wire import frames as wire


class Inventory(FakeBroker):
    """Has two messages for every consumer."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: list[int] = []
        self.left: list[int] = []
        self.settled: list[str] = []

    def _answer(self, writer: asyncio.StreamWriter, frame: bytes) -> None:
        super()._answer(writer, frame)
        if frame[4] == wire.Kind.PUBLISH:
            return
        message = wire.decode(frame)
        if isinstance(message, wire.Receive):
            self.joined.append(message.number)
            writer.write(wire.encode(wire.Receiving(number=message.number)))
            writer.write(wire.encode(wire.Messages(number=message.number, place=b"p", messages=some(1, 2))))
        elif isinstance(message, wire.Unreceive):
            self.left.append(message.number)
        elif isinstance(message, wire.Settle):
            self.settled.append(message.verdict)
            outcome = "accepted" if message.verdict == "accept" else "again"
            settled = wire.Settled(number=message.number, ticket=message.ticket, outcomes=(outcome,))
            writer.write(wire.encode(settled))


def some(*numbers: int) -> tuple[wire.QueueMessage, ...]:
    return tuple(
        wire.QueueMessage(
            key=b"%d" % number,
            source="shop",
            session=b"s" * 8,
            id=number,
            form="transactional",
            attempt=1,
            sent_us=1,
            payload=b"reserve",
        )
        for number in numbers
    )


async def until(true: Callable[[], bool]) -> None:
    for _ in range(1_000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


async def until_left(broker: Inventory, count: int) -> None:
    await until(lambda: len(broker.left) == count)


def try_with(test: Callable[[Inventory], Awaitable[None]]) -> None:
    async def work() -> None:
        async with asyncio.timeout(20), Inventory() as broker:
            await test(broker)

    asyncio.run(work())


def test_a_loop_that_ends_early_leaves_no_consumer_behind() -> None:
    async def test(broker: Inventory) -> None:
        async with postroad.connect(broker.address) as client:
            stock = client.application("stock")
            for count in (1, 2):
                async for message in stock.inbox():
                    await message.accept()
                    break
                await until_left(broker, count)
            assert broker.settled == ["accept"] * 2
        assert broker.joined == broker.left

    try_with(test)


def test_a_message_that_is_not_settled_keeps_its_consumer() -> None:
    async def test(broker: Inventory) -> None:
        async with postroad.connect(broker.address) as client:
            message = await anext(client.application("stock").inbox())
            gc.collect()
            await asyncio.sleep(0.05)
            assert broker.left == []
            await message.reject()
            await until_left(broker, 1)

    try_with(test)


def test_who_waits_for_a_message_is_not_forgotten_though_nobody_has_its_task() -> None:
    async def test(broker: Inventory) -> None:
        async with postroad.connect(broker.address) as client:
            came: list[bytes] = []

            async def work() -> None:
                async for message in client.application("stock").inbox():
                    await message.accept()
                    came.append(message.payload)

            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(work()) and None)
            await until(lambda: len(came) == 2)
            gc.collect()
            await asyncio.sleep(0.05)
            assert broker.left == []
            broker.say(wire.Messages(number=broker.joined[0], place=b"q", messages=some(3)))
            await until(lambda: len(came) == 3)

    try_with(test)


def test_without_a_loop_of_its_own_a_program_leaves_in_the_same_way() -> None:
    async def test(broker: Inventory) -> None:
        def work() -> None:
            with postroad.sync.connect(broker.address) as client:
                for message in client.application("stock").inbox():
                    message.accept()
                    break
                asyncio.run_coroutine_threadsafe(until_left(broker, 1), loop).result(10)

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(work)

    try_with(test)
