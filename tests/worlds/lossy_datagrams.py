"""A UDP proxy that loses datagrams, like a NAT in front of one node."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

Address = tuple[str, int]


class LossyProxy:
    """Datagrams to its port go to the target, each sender's from a port of its own, and answers go back. Of
    both, a share of `loss` is dropped."""

    def __init__(self, target: Address, loss: float, seed: int) -> None:
        self._target = target
        self.loss = loss
        self._chance = random.Random(seed)
        self._sides: dict[Address, asyncio.DatagramTransport] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: asyncio.DatagramTransport | None = None
        self.port = 0
        self.dropped = 0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: _Side(self._from_outside), local_addr=("127.0.0.1", 0)
        )
        self.port = self._transport.get_extra_info("sockname")[1]

    def close(self) -> None:
        for transport in (self._transport, *self._sides.values()):
            if transport is not None:
                transport.close()

    def _loses(self) -> bool:
        lost = self._chance.random() < self.loss
        self.dropped += lost
        return lost

    def _from_outside(self, data: bytes, source: Address) -> None:
        if self._loses():
            return
        side = self._sides.get(source)
        if side is not None:
            side.sendto(data, self._target)
        else:
            task = asyncio.get_running_loop().create_task(self._open(source, data))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open(self, source: Address, data: bytes) -> None:
        def back(answer: bytes, _: Address) -> None:
            if not self._loses() and self._transport is not None:
                self._transport.sendto(answer, source)

        loop = asyncio.get_running_loop()
        side, _ = await loop.create_datagram_endpoint(lambda: _Side(back), local_addr=("127.0.0.1", 0))
        known = self._sides.setdefault(source, side)
        if known is not side:
            side.close()
        known.sendto(data, self._target)


class _Side(asyncio.DatagramProtocol):
    def __init__(self, take: Callable[[bytes, Address], None]) -> None:
        self._take = take

    def datagram_received(self, data: bytes, addr: Address) -> None:
        self._take(data, addr)
