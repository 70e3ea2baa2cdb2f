"""A client core driven step by step, and frames that a broker would send to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from postroad.client import effects as fx
from postroad.client.core import ClientCore, State
from postroad.client.settings import ClientSettings
from postroad.events import BatchBuilder, EventBatch
from postroad.ids import MessageId
from postroad.seam.effects import Send
from postroad.units import MIB, SECOND_US
from postroad.wire import frames as wire
from postroad.wire.frames import DEFAULT_LIMITS, Kind

START = 1_700_000_000 * SECOND_US
T = TypeVar("T")


class Script:
    """Drives a core and plays the broker."""

    def __init__(self, *addresses: str, **settings: Any) -> None:
        self.core = ClientCore(
            ClientSettings(addresses=addresses or ("a:1",), name="test", **settings), draw=lambda n: n - 1
        )
        self.now = START
        self.connection = 0
        self.seen: list[fx.Effect] = []
        self.do(self.core.start(self.now))

    def do(self, effects: Sequence[fx.Effect]) -> None:
        self.core.check()
        self.seen.extend(effects)

    def handle(self, *inputs: fx.Input) -> None:
        self.do(self.core.handle(inputs, self.now))

    def take(self, kind: type[T]) -> list[T]:
        """The effects of a kind since it was last asked for."""
        found = [effect for effect in self.seen if isinstance(effect, kind)]
        self.seen = [effect for effect in self.seen if not isinstance(effect, kind)]
        return found

    def sent(self) -> list[wire.Message | EventBatch]:
        return [
            EventBatch.parse(effect.data, DEFAULT_LIMITS)
            if effect.data[4] == Kind.PUBLISH
            else wire.decode(effect.data)
            for effect in self.take(Send)
        ]

    def open(self) -> wire.Hello:
        self.connection += 1
        self.take(Send)
        self.handle(fx.Opened(connection=self.connection))
        (hello,) = self.sent()
        assert isinstance(hello, wire.Hello)
        return hello

    def say(self, *messages: wire.Message | bytes) -> None:
        self.handle(
            *(
                fx.Received(
                    connection=self.connection,
                    frame=message if isinstance(message, bytes) else wire.encode(message),
                )
                for message in messages
            )
        )

    def welcome(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "version": 1,
            "name": "b1",
            "broker": 7,
            "node": b"n" * 16,
            "boot": 1,
            "cost": 1,
            "limits": DEFAULT_LIMITS,
            "window": MIB,
            "time_us": self.now,
            "publisher": 42,
            "resume_key": b"key",
        }
        self.say(wire.Welcome(**(fields | changes)))

    def up(self, **changes: Any) -> None:
        self.open()
        self.welcome(**changes)
        assert self.core.state is State.UP

    def lose(self) -> None:
        self.handle(fx.Closed(connection=self.connection))

    def publish(self, topic: str = "a/b", payload: bytes = b"x", *, durable: bool = False) -> MessageId:
        return MessageId.from_bytes(self.core.publish(topic, payload, None, self.now, durable=durable))

    def flush(self) -> list[EventBatch]:
        self.do(self.core.flush())
        return [message for message in self.sent() if isinstance(message, EventBatch)]

    def subscribe(self, topic: str = "a/#", where: str = "") -> int:
        number, effects = self.core.subscribe(wire.Subscribe(number=0, topic=topic, where=where))
        self.do(effects)
        return number


def delivery(number: int, pubend: int, start: int, ticks: Sequence[int], end: int | None = None) -> bytes:
    builder = BatchBuilder()
    for at, tick in enumerate(ticks):
        builder.add(bytes(MessageId(1, 2, tick, at)), "a/b", {}, b"payload", DEFAULT_LIMITS)
    data = bytearray(
        EventBatch.parse(builder.finish(channel=1), DEFAULT_LIMITS).select(
            None,
            kind=Kind.DELIVERY,
            pubend=pubend,
            start=start,
            end=ticks[-1] if end is None else end,
            channel=number,
        )
    )
    for at, tick in enumerate(ticks):
        data[48 + 48 * at + 16 : 48 + 48 * at + 24] = tick.to_bytes(8, "little")
    data[12:16] = bytes(4)  # no checksum
    return bytes(data)


def ticks(batch: EventBatch) -> list[int]:
    return [int(tick) for tick in batch.headers["tick"]]
