"""A broker played by the test: the neighbour of a real one."""

from __future__ import annotations

from typing import Any

from tests.worlds.brokers import Client, Net

from postroad.events.batch import EventBatch
from postroad.ids import volatile_pubend
from postroad.seam.inputs import Received
from postroad.wire.frames import (
    DEFAULT_LIMITS,
    Advertisement,
    Credit,
    Hello,
    InterestEntry,
    InterestUpdate,
    Kind,
    Message,
    Refuse,
    TopologyUpdate,
    decode,
    encode,
    frame_kind,
)


class Fake(Client):
    """A broker that the test plays. Its number is its own, its pubend that of its first start."""

    def __init__(
        self, net: Net, at: int, number: int, *, window: int = 1 << 22, node: bytes = b"", gives: bool = True
    ) -> None:
        self.net, self.at, self.number = net, at, number
        self.node = node or bytes([number & 0xFF]) * 16
        self.pubend = volatile_pubend(number, 1)
        self.gives = gives  # gives credit back
        self.messages: list[Message] = []
        self.batches: list[EventBatch] = []
        self.sizes: list[int] = []
        self.sequence = 0
        self.connection = net.open(at, self)
        self.say(
            Hello(
                version=1,
                role="broker",
                name=f"fake{number}",
                token="",
                limits=DEFAULT_LIMITS,
                window=window,
                time_us=net.now_us,
                broker=number,
                node=self.node,
                boot=1,
            )
        )

    def say(self, *messages: Message) -> None:
        self.send(*(encode(message) for message in messages))

    def take(self, frame: bytes) -> None:
        self.sizes.append(len(frame))
        if frame_kind(frame) == Kind.KNOWLEDGE:
            self.batches.append(EventBatch.parse(frame, DEFAULT_LIMITS))
            if self.gives:
                self.net.give(self.at, [Received(self.connection, encode(Credit(size=len(frame))))])
        else:
            self.messages.append(decode(frame))

    def advertise(
        self, *others: int, broker: int = 0, pubends: tuple[int, ...] = (), sequence: int = 0, boot: int = 1
    ) -> None:
        """Links to the broker that it is linked with and to `others`; or those of another broker."""
        self.sequence += 1
        number = broker or self.number
        links = {*others, self.at + 1} if not broker else set(others)
        advertisement = Advertisement(
            broker=number,
            node=self.node if not broker else bytes([broker & 0xFF]) * 16,
            name=f"fake{number}",
            boot=boot,
            sequence=sequence or self.sequence,
            neighbours=tuple(sorted((link, 1) for link in links)),
            pubends=pubends or (volatile_pubend(number, 1),),
        )
        self.say(TopologyUpdate(advertisements=(advertisement,)))

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    def refused(self) -> str:
        return "".join(message.reason for message in self.of(Refuse))


def wants(owner: int, topic: str = "t", version: int = 1 << 32) -> InterestUpdate:
    entry = InterestEntry(entry=1, topic=topic, where="")
    return InterestUpdate(owner=owner, base=0, version=version, added=(entry,), removed=())
