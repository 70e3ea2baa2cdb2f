"""Who reads from brokers with disks in memory: readers, consumers of shared subscriptions, questions."""

from __future__ import annotations

import json

from tests.worlds.durable_brokers import DurableClient, DurableNet

from postroad.ids import pubend_text
from postroad.seam.inputs import Closed
from postroad.wire.frames import (
    Ack,
    Acked,
    Ended,
    Reply,
    Request,
    Subscribe,
    Subscribed,
    encode,
)


class Reader(DurableClient):
    """A durable subscriber: its token is what it has taken."""

    def begin(
        self,
        name: str,
        *,
        token: str = "",
        ack: str = "",
        topic: str = "t",
        since_us: int = 0,
        epoch: int = 0,
    ) -> None:
        self.send(
            encode(
                Subscribe(
                    number=1,
                    topic=topic,
                    where="",
                    durable=name,
                    token=token,
                    ack=ack,
                    since_us=since_us,
                    epoch=epoch,
                )
            )
        )

    @property
    def begun(self) -> list[Subscribed]:
        return [message for message in self.messages if isinstance(message, Subscribed)]

    @property
    def start(self) -> dict[str, int]:
        return dict(json.loads(self.begun[-1].token)) if self.begun else {}

    def token(self) -> str:
        found = self.start
        for batch in self.batches:
            name = pubend_text(batch.pubend)
            assert batch.end > found.get(name, 0) or not batch.count
            found[name] = max(found.get(name, 0), batch.end)
        return json.dumps(found)

    def ack(self) -> None:
        self.send(encode(Ack(number=1, token=self.token())))

    def gone(self) -> None:
        self.net.ends.pop((self.at, self.connection))
        self.net.give(self.at, [Closed(self.connection)])

    def ended(self) -> list[str]:
        return [message.code for message in self.messages if isinstance(message, Ended)]


class Consumer(DurableClient):
    """One of a group; acknowledges what it is told to."""

    def begin(
        self, name: str = "g", *, key: str = "", ack: str = "auto", shared: bool = True, since_us: int = 0
    ) -> Consumer:
        subscribe = Subscribe(
            number=1, topic="t", where="", durable=name, ack=ack, shared=shared, key=key, since_us=since_us
        )
        self.send(encode(subscribe))
        return self

    def ack(self, *payloads: str, ticket: int = 0) -> None:
        events: dict[int, tuple[int, ...]] = {}
        for batch in self.batches:
            if batch.lost and "GAP" in payloads:
                events[batch.pubend] = (*events.get(batch.pubend, ()), batch.start + 1)
            for row, event in enumerate(batch.events()):
                if event.payload.decode() in payloads:
                    tick = int(batch.headers["tick"][row])
                    events[batch.pubend] = (*events.get(batch.pubend, ()), tick)
        self.send(encode(Ack(number=1, token="", events=events, ticket=ticket)))

    def gone(self) -> None:
        self.net.ends.pop((self.at, self.connection))
        self.net.give(self.at, [Closed(self.connection)])

    def ended(self) -> list[str]:
        return [message.reason for message in self.messages if isinstance(message, Ended)]

    def acked(self) -> list[tuple[int, str]]:
        return [(one.ticket, one.code) for one in self.messages if isinstance(one, Acked)]


def names(net: DurableNet, at: int) -> dict[str, bool]:
    """Durable subscriptions at a broker -> whether another one has it by now."""
    client = DurableClient(net, at)
    client.send(encode(Request(number=1, what="subs")))
    reply = next(message for message in client.messages if isinstance(message, Reply))
    return {row["name"]: row["moved"] for row in json.loads(reply.body)["subscriptions"]}


def reasons(reader: Reader) -> list[str]:
    return [message.reason for message in reader.messages if isinstance(message, Ended)]


def retire(net: DurableNet, at: int, broker: str) -> tuple[str, str]:
    client = DurableClient(net, at)
    client.send(encode(Request(number=1, what="subs.retire", arguments={"broker": broker})))
    net.wait(6)
    reply = next(message for message in client.messages if isinstance(message, Reply))
    return reply.code, reply.body


def stop(net: DurableNet, at: int) -> None:
    """Everything that was asked for reaches the disk; nobody is told of it any more."""
    broker = net.brokers[at]
    assert broker is not None
    net.slow.add(at)
    net.perform(at, broker.shutdown(net.now_us))
    net.disks[at].sync()
    net.kill(at)
    net.slow.discard(at)
