"""Peers that say anything at all: the broker refuses or ignores it, never breaks, and serves the others.

Each peer has shaken hands properly, so every handler is reached. Then it sends well-formed frames of every
kind with values from the edges, batch frames with any header, and frames with a few bytes changed. An
exception out of `Broker.handle` would end a real process, so there must be none; `check()` must hold; and an
honest client must still get what it publishes.
"""

from __future__ import annotations

import random
import typing
from typing import Any

import msgspec
import pytest

from postroad.broker import Broker, Closed, Opened, Received
from postroad.config import DEFAULT_LIMITS, BrokerConfig, Identity
from postroad.errors import BugError
from postroad.events.batch import BatchBuilder, EventBatch, empty_frame
from postroad.ids import MessageId
from postroad.overlay.effects import Close, Effect, Send
from postroad.units import MIB, MILLISECOND_US
from postroad.wire import frames
from postroad.wire.frames import BATCH_KINDS, CONTROL, Kind

KINDS = {
    "client": [
        Kind.PUBLISH,
        Kind.SUBSCRIBE,
        Kind.UNSUBSCRIBE,
        Kind.REQUEST,
        Kind.CREDIT,
        Kind.PING,
        Kind.PONG,
    ],
    "broker": [
        Kind.KNOWLEDGE,
        Kind.SILENCE,
        Kind.ATTACH,
        Kind.DETACH,
        Kind.NACK,
        Kind.STAMP,
        Kind.TOPOLOGY,
        Kind.DIGEST,
        Kind.INTEREST,
        Kind.INTEREST_PULL,
        Kind.PING,
    ],
}
START_US = 1_800_000_000_000_000
HONEST = 1
ME = Identity(number=7, node=b"n" * 16, name="b7", boot=1, starts=1)
# The broker itself, the honest client's neighbourhood, the peers' own numbers, and the edges of every width.
NUMBERS = (0, 1, 2, 3, 7, 8, 9, 255, 65_535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32)
LIKELY = (0, 1, 2, 3, 7, 8, 9, 7 << 32 | 1 << 31 | 1, 8 << 32 | 1 << 31 | 1, 1 << 32 | 1, START_US)
WIDE = (
    7 << 32 | 1 << 31 | 1,
    8 << 32 | 1 << 31 | 1,
    START_US,
    START_US + 5,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
TEXTS = (
    "",
    "a",
    "a/b",
    "#",
    "+/x",
    "a/#/b",
    "$postroad/x",
    "x = 1",
    "x >",
    "drop",
    "disconnect",
    "status",
    "é" * 300,
    "\0" * 300_000,  # repr() of it is longer than a frame
)


def honest_hello(role: str, number: int, time_us: int) -> bytes:
    return frames.encode(
        frames.Hello(
            version=1,
            role=role,
            name=f"{role}{number}",
            token="",
            limits=DEFAULT_LIMITS,
            window=4 * MIB,
            time_us=time_us,
            broker=number if role == "broker" else 0,
            node=bytes([number]) * 16 if role == "broker" else b"",
            boot=1,
        )
    )


def honest_beginning(number: int, sequence: int) -> list[bytes]:
    """What makes a broker's streams believable: its link state, and the filters they are made with."""
    advertisement = frames.Advertisement(
        broker=number,
        node=bytes([number]) * 16,
        name=f"b{number}",
        boot=1,
        sequence=sequence,
        neighbours=((ME.number, 1),),
        pubends=(number << 32 | 1 << 31 | 1,),
    )
    versions = dict.fromkeys((7, 8, 9, 10), 9 << 32)
    return [
        frames.encode(frames.TopologyUpdate(advertisements=(advertisement,))),
        frames.encode(frames.Stamp(number=1, versions=versions)),
    ]


def anything(kind: Any, draw: random.Random) -> Any:
    """A value that the decoder takes for this annotation."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[-1:] == (Ellipsis,):
        return tuple(anything(arguments[0], draw) for _ in range(draw.randrange(4)))
    if origin is tuple:
        return tuple(anything(one, draw) for one in arguments)
    if origin is dict:
        return {anything(arguments[0], draw): anything(arguments[1], draw) for _ in range(draw.randrange(4))}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(**{name: anything(hints[name], draw) for name in kind.__struct_fields__})
    if kind is bool:
        return draw.random() < 0.5
    if kind is int:
        if draw.random() < 0.7:
            return draw.choice(LIKELY)
        return draw.choice((*NUMBERS, *WIDE, -1, -(1 << 63)))
    if kind is bytes:
        return draw.choice([b"", bytes(16), b"n" * 16, bytes([8]) * 16, draw.randbytes(16)])
    assert kind is str
    return draw.choice(TEXTS)


def control_frame(draw: random.Random, kind: Kind) -> bytes:
    while True:
        try:
            return frames.encode(anything(CONTROL[kind], draw))
        except BugError:  # several long texts do not fit together
            continue


def batch_frame(draw: random.Random, kind: Kind) -> bytes:
    if draw.random() < 0.3:
        ticks = [draw.choice((*WIDE[2:5], 0, -1, START_US - 9)) for _ in range(2)]
        return empty_frame(
            kind=kind,
            pubend=draw.choice(WIDE),
            start=ticks[0],
            end=ticks[1],
            channel=draw.choice(NUMBERS[:-1]),
            lost=draw.random() < 0.5,
        )
    builder = BatchBuilder()
    publisher, broker = draw.choice(NUMBERS[:8]), draw.choice((7, 8, 0))
    for counter in range(draw.randrange(1, 4)):
        identity = MessageId(publisher, broker, 1_800_000_000_000 + draw.randrange(9), counter)
        builder.add(bytes(identity), draw.choice(["a", "a/b", "$postroad/x"]), {"x": 1}, b"p", DEFAULT_LIMITS)
    data = builder.finish(channel=draw.choice(NUMBERS[:-1]))
    if kind is Kind.PUBLISH:
        return data
    first = START_US + draw.randrange(100) if draw.random() < 0.8 else draw.choice((1, START_US - 1, 1 << 61))
    stamped = EventBatch.parse(data, DEFAULT_LIMITS).with_ticks(
        first, kind=kind, pubend=draw.choice(WIDE[:2]), start=first - draw.choice((1, 5, 1 << 40)), channel=1
    )
    return stamped.data


def hostile_frame(draw: random.Random, role: str) -> bytes:
    """Mostly of kinds that the role may send, since anything else is refused at the door."""
    kind = draw.choice(KINDS[role] if draw.random() < 0.97 else list(Kind))
    data = batch_frame(draw, kind) if kind in BATCH_KINDS else control_frame(draw, kind)
    if draw.random() < 0.1:
        changed = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(4, len(changed))] = draw.randrange(256)
        data = bytes(changed)
    return data


class World:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now_us = START_US
        self.broker = Broker(BrokerConfig(), ME, draw=self.draw.randrange, now_us=self.now_us)
        self.open: dict[int, str] = {}
        self.last = HONEST
        self.publisher = 0
        self.delivered: list[bytes] = []
        self.turn(Opened(HONEST), Received(HONEST, honest_hello("client", 0, self.now_us)))
        self.turn(Received(HONEST, frames.encode(frames.Subscribe(number=1, topic="honest", where=""))))

    def turn(self, *inputs: Any) -> None:
        self.now_us += self.draw.choice((1, 50, MILLISECOND_US, 300 * MILLISECOND_US))
        self.perform(self.broker.handle(inputs, self.now_us))
        self.broker.check()

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Close):
                assert effect.connection != HONEST, effect.error
                if self.open.pop(effect.connection, None) is not None:
                    self.turn(Closed(effect.connection))
            elif isinstance(effect, Send) and effect.connection == HONEST:
                if frames.frame_kind(effect.data) == Kind.DELIVERY:
                    self.delivered.append(effect.data)
                elif frames.frame_kind(effect.data) == Kind.WELCOME:
                    welcome = frames.decode(effect.data)
                    assert isinstance(welcome, frames.Welcome)
                    self.publisher = welcome.publisher
                elif frames.frame_kind(effect.data) == Kind.PING:
                    self.now_us += 1
                    self.perform(
                        self.broker.handle(
                            [Received(HONEST, frames.encode(frames.Pong(time_us=1, at_us=1)))], self.now_us
                        )
                    )

    def attack(self) -> None:
        if len(self.open) < 3:
            self.last += 1
            role = self.draw.choice(["client", "broker"])
            number = 8 + self.last % 3 if role == "broker" else 0
            self.open[self.last] = role
            self.turn(Opened(self.last), Received(self.last, honest_hello(role, number, self.now_us)))
            if role == "broker" and self.last in self.open:
                self.turn(*(Received(self.last, frame) for frame in honest_beginning(number, self.last)))
            return
        connection = self.draw.choice(list(self.open))
        if self.draw.random() < 0.02:
            del self.open[connection]
            self.turn(Closed(connection))
            return
        self.turn(
            *(
                Received(connection, hostile_frame(self.draw, self.open[connection]))
                for _ in range(self.draw.randrange(1, 4))
            )
        )

    def honest_round_trip(self) -> None:
        builder = BatchBuilder()
        identity = MessageId(self.publisher, ME.number, self.now_us // 1000, 0)
        builder.add(bytes(identity), "honest", {}, b"here", DEFAULT_LIMITS)
        self.delivered.clear()
        self.turn(Received(HONEST, builder.finish(channel=1)))
        events = [
            event
            for data in self.delivered
            for event in EventBatch.parse(data, DEFAULT_LIMITS).events()
            if event.id == identity
        ]
        assert [event.payload for event in events] == [b"here"]


@pytest.mark.parametrize("seed", range(12))
def test_nothing_a_peer_says_breaks_the_broker(seed: int) -> None:
    world = World(seed)
    for _ in range(250):
        world.attack()
    world.honest_round_trip()
