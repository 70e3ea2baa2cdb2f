"""A second kind of core, as small as one can be: it sends back what it gets. For both drivers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from postroad.delays import Delays
from postroad.seam.datagrams import Datagram, Endpoint, JoinGroup, SendTo
from postroad.seam.effects import Effect, Send
from postroad.seam.inputs import Input, Received
from postroad.seam.levels import Level
from postroad.wire.datagrams import DATAGRAM_PREFIX_BYTES, datagram_kind, pack

ASK, ANSWER = 1, 2  # kinds of datagrams


class EchoNode:
    """Answers a frame with itself and a datagram that asks with its body, and writes down every turn."""

    def __init__(self, groups: Sequence[Endpoint] = ()) -> None:
        self.turns: list[list[Input]] = []
        self.wanted: list[Effect] = [JoinGroup(group) for group in groups]  # of the next turn

    def handle(self, inputs: Iterable[Input], now_us: int) -> list[Effect]:  # noqa: ARG002
        self.turns.append(list(inputs))
        effects, self.wanted = self.wanted, []
        for one in self.turns[-1]:
            if isinstance(one, Received):
                effects.append(Send(one.connection, one.frame))
            elif isinstance(one, Datagram) and datagram_kind(one.data) == ASK:
                effects.append(SendTo(one.source, pack(ANSWER, one.data[DATAGRAM_PREFIX_BYTES:])))
        return effects

    def next_deadline(self) -> int | None:
        return 0 if self.wanted else None

    def check(self) -> None:
        assert all(one is not None for one in self.inputs)

    def metrics(self) -> dict[str, int | float]:
        return {"turns_total": len(self.turns)}

    def levels(self, _now_us: int) -> list[Level]:
        return []

    def delays(self) -> list[Delays]:
        return []

    def status(self, now_us: int) -> dict[str, object]:
        return {"now": now_us}

    def shutdown(self, now_us: int) -> list[Effect]:  # noqa: ARG002
        return []

    @property
    def inputs(self) -> list[Input]:
        return [one for turn in self.turns for one in turn]

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.inputs if type(one) is kind]

    async def saw(self, kind: type, count: int = 1) -> list[Any]:
        """The inputs of this kind, once there are so many."""
        for _ in range(3000):
            if len(self.of(kind)) >= count:
                return self.of(kind)
            await asyncio.sleep(0.01)
        raise AssertionError(f"{count} {kind.__name__} were to come, these came: {self.inputs[-20:]}")
