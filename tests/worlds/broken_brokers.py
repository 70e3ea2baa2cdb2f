"""Brokers in the simulator that are broken in one way."""

from __future__ import annotations

from collections.abc import Sequence

from postroad.kernel import sealed
from postroad.seam.effects import Effect, Send
from postroad.seam.inputs import Input
from postroad.sim.machine.frames import BatchView, split
from postroad.sim.machine.process import Core
from postroad.wire.frames import BATCH_KINDS, Kind

PUBEND = 7 << 32


class Broken:
    """The real broker, and a saboteur between it and the world."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.now_us = 0

    def handle(self, inputs: Sequence[Input], now_us: int) -> Sequence[Effect]:
        self.now_us = now_us
        effects = self.core.handle([self.on_input(item) for item in inputs], now_us)
        out: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Send):
                for frame in split(effect.data):
                    for new in self.on_frame(effect.connection, frame):
                        changed = new != frame and new[4] in BATCH_KINDS
                        out.append(Send(effect.connection, sealed(new) if changed else new))
            else:
                assert not hasattr(effect, "token")
                out.append(effect)  # type: ignore[arg-type]
        return out

    def on_input(self, item: Input) -> Input:
        return item

    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        del connection
        return [frame]

    def next_deadline(self) -> int | None:
        return self.core.next_deadline()

    def check(self) -> None:
        self.core.check()

    def shutdown(self, now_us: int) -> Sequence[Effect]:
        return self.core.shutdown(now_us)  # type: ignore[return-value]

    def status(self, now_us: int) -> dict[str, object]:
        return self.core.status(now_us)

    def metrics(self) -> dict[str, int | float]:
        return self.core.metrics()


def is_delivery(frame: bytes) -> bool:
    return frame[4] == Kind.DELIVERY and BatchView(frame).count > 0
