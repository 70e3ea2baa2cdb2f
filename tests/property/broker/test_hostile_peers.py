"""Peers that say anything at all: the broker refuses or ignores it, never breaks, and serves the others.

Each peer has shaken hands properly, so every handler is reached. Then it sends well-formed frames of every
kind with values from the edges, batch frames with any header, and frames with a few bytes changed; brokers
ask, and answer what they are asked, with bodies of every kind, many of them with bytes changed. An
exception out of `Broker.handle` would end a real process, so there must be none; `check()` must hold; and an
honest client must still get what it publishes, also on a durable subscription where there is a disk.
"""

from __future__ import annotations

import random
import types
import typing
from typing import Any

import msgspec
import pytest
from tests.worlds.durable_brokers import MemoryDisk
from tests.worlds.hostile_bodies import BODIES as BOUNDED
from tests.worlds.hostile_bodies import bent, made_up

from postroad.broker.core import Broker
from postroad.config import BrokerConfig
from postroad.errors import BugError
from postroad.events.batch import BatchBuilder, EventBatch, empty_frame
from postroad.ids import Identity, MessageId
from postroad.queues.inbox import Answer
from postroad.queues.messages import Chain
from postroad.queues.talk import Done, MessageKey
from postroad.seam.effects import Close, Effect, Send
from postroad.seam.inputs import Closed, Opened, Received
from postroad.seam.storage import StorageEffect
from postroad.seam.tracking import FiltersRead, ReadFilters
from postroad.seam.turn import LATER_PER_TURN
from postroad.tracking.query.messages import TraceAnswer, TraceQuestion
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import make_tracking
from postroad.units import MIB, MILLISECOND_US
from postroad.wire import frames
from postroad.wire.frames import BATCH_KINDS, CONTROL, DEFAULT_LIMITS, Kind

KINDS = {
    "client": [
        Kind.PUBLISH,
        Kind.SUBSCRIBE,
        Kind.UNSUBSCRIBE,
        Kind.ACK,
        Kind.REQUEST,
        Kind.SEND,
        Kind.END_SESSION,
        Kind.RECEIVE,
        Kind.UNRECEIVE,
        Kind.SETTLE,
        Kind.REPAIRED,
        Kind.BEST_EFFORT,
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
        Kind.RELEASE,
        Kind.TOPOLOGY,
        Kind.DIGEST,
        Kind.INTEREST,
        Kind.INTEREST_PULL,
        Kind.QUERY,
        Kind.ANSWER,
        Kind.PING,
    ],
}
# What brokers ask each other -> the bodies of the question and of its answer, as they are on the wire.
BODIES: dict[str, tuple[Any, Any]] = {
    "handover": (tuple[str, str, str, bool, str], tuple[str, int, str, str]),
    "claims": (list[str], list[tuple[str, int, int, int]]),
    "deleted": (list[tuple[str, int]], list[str]),
    "trace": (TraceQuestion, TraceAnswer),
    "retire": (bytes, bytes),
    "restate": (bytes, bytes),
}
START_US = 1_800_000_000_000_000
HONEST = 1
ME = Identity(number=7, node=b"n" * 16, name="b7", boot=1, starts=1)
# The broker itself, the honest client's neighbourhood, the peers' own numbers, and the edges of every width.
NUMBERS = (0, 1, 2, 3, 7, 8, 9, 255, 65_535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32)
LIKELY = (0, 1, 2, 3, 7, 8, 9, 7 << 32, 7 << 32 | 1 << 31 | 1, 8 << 32 | 1 << 31 | 1, 1 << 32 | 1, START_US)
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
    "auto",
    "manual",
    '{"00000007-00000000": 1800000000000000}',
    "é" * 300,
    "\0" * 300_000,  # repr() of it is longer than a frame
)

# Texts that a careless reader takes for a number.
DIGITS = ("", "0", "-1", "1e3", " 1", "1_0", "\uff19", "²", "1.5", "9" * 19, "0" * 9 + "9" * 30, "9" * 5_000)
ARGUMENTS = ("after", "broker", "confirm", "connection", "count", "drop", "id", "inbox", "name", "prefix")
SESSIONS = (bytes(8), b"n" * 8, b"abcd\xff\xffgh")


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
            broker=0 if role == "client" else number,
            node=b"" if role == "client" else bytes([number]) * 16,
            boot=1,
        )
    )


def honest_beginning(number: int, sequence: int) -> list[bytes]:
    """What makes a broker's streams believable: its link state, and the filters they are made with; and a
    durable name that it has."""
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
    claim = frames.InterestClaim(entry=1, name="d3", epoch=START_US + sequence)
    return [
        frames.encode(frames.TopologyUpdate(advertisements=(advertisement,))),
        frames.encode(frames.Stamp(number=1, versions=versions)),
        frames.encode(
            frames.InterestUpdate(
                owner=number, base=0, version=1 << 32 | sequence, added=(), removed=(), claims=(claim,)
            )
        ),
    ]


def anything(kind: Any, draw: random.Random) -> Any:
    """A value that the decoder takes for this annotation."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[-1:] == (Ellipsis,):
        return tuple(anything(arguments[0], draw) for _ in range(draw.randrange(4)))
    if origin is tuple:
        return tuple(anything(one, draw) for one in arguments)
    if origin is list:
        return [anything(arguments[0], draw) for _ in range(draw.randrange(4))]
    if origin in (types.UnionType, typing.Union):
        return anything(draw.choice(arguments), draw)
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
    if kind is float:
        return draw.choice((0.0, 0.5, 1.0, 1e-300, -1.0, 1e300, float("inf"), float("nan")))
    if kind is types.NoneType:
        return None
    if kind is bytes:
        return draw.choice([b"", bytes(4), bytes(16), b"n" * 16, bytes([8]) * 16, draw.randbytes(16)])
    assert kind is str
    return draw.choice(TEXTS)


def control_frame(draw: random.Random, kind: Kind) -> bytes:
    while True:
        try:
            return frames.encode(anything(CONTROL[kind], draw))
        except BugError:  # several long texts do not fit together
            continue


def changed(data: bytes, draw: random.Random, first: int = 0) -> bytes:
    """With a few bytes of it changed, from `first` on."""
    held = bytearray(data)
    for _ in range(draw.randrange(1, 4) if len(held) > first else 0):
        held[draw.randrange(first, len(held))] = draw.randrange(256)
    return bytes(held)


def hostile_body(draw: random.Random, kind: Any) -> bytes:
    made = anything(kind, draw)
    while len(body := made if kind is bytes else msgspec.msgpack.encode(made)) > frames.MAX_BODY_BYTES:
        made = anything(kind, draw)
    match draw.randrange(8):
        case 0:
            return body + b"\x91" * 5_000
        case 1:
            return body[: draw.randrange(len(body) + 1)]
        case 2 | 3 | 4:
            return changed(body, draw)
    return body


def question(draw: random.Random, source: int) -> bytes:
    what = draw.choice([*BODIES, "else"])
    body = hostile_body(draw, BODIES.get(what, (bytes,))[0])
    if draw.random() < 0.1:
        source = draw.choice(NUMBERS)
    target = ME.number if draw.random() < 0.9 else draw.choice(NUMBERS)
    return frames.encode(
        frames.Query(
            source=source, target=target, number=1, hops=draw.choice((0, 5, -1)), what=what, body=body
        )
    )


def answer(draw: random.Random, asked: frames.Query) -> bytes:
    _, kind = BODIES.get(asked.what) or BODIES[draw.choice([*BODIES])]
    return frames.encode(
        frames.Answer(
            source=asked.target,
            target=asked.source,
            number=asked.number,
            hops=5,
            body=hostile_body(draw, kind),
        )
    )


def queue_frame(draw: random.Random) -> bytes:
    """Of a client that says of queues mostly what can be."""
    number, inbox = draw.choice((1, 2)), draw.choice(("a", "b"))
    match draw.randrange(4):
        case 0:
            return frames.encode(
                frames.Receive(number=number, inbox=inbox, consumer=draw.choice(SESSIONS), window=3)
            )
        case 1:
            keys = (hostile_body(draw, MessageKey), bytes(9))
            verdict = draw.choice(("accept", "again", "dead"))
            return frames.encode(frames.Settle(number=number, ticket=1, keys=keys, verdict=verdict))
        case 2:
            return frames.encode(frames.EndSession(source="a", session=draw.choice(SESSIONS)))
    form = draw.choice(("transactional", "recoverable", "express"))
    posting = frames.Posting(
        inbox=inbox,
        id=draw.choice((1, 2, (1 << 62) - 1)),
        payload=b"p",
        attributes=draw.choice((b"", b"\x01", bytes(300))),
        after=draw.choice((0, 1)),
        chain=hostile_body(draw, Chain) if draw.random() < 0.2 else b"",
        delay_us=draw.choice((0, 1, 30 * 86_400_000_000)),
        expires_us=draw.choice((0, 1, (1 << 62) - 1)),
    )
    send = frames.Send(
        number=number,
        source="a",
        session=draw.choice(SESSIONS),
        form=form,
        messages=(posting,),
        reliable=form != "express",
        confirm=draw.random() < 0.3,
    )
    return frames.encode(send)


def durable_frame(draw: random.Random) -> bytes:
    """Of a client that says mostly what can be: it has durable subscriptions, and others are asked for it."""
    number = draw.choice((1, 2, 3))
    if draw.random() < 0.2:
        identity = MessageId(1, draw.choice((7, 8, 9)), START_US // 1000, 1)
        return frames.encode(frames.Request(number=number, what="trace", arguments={"id": str(identity)}))
    if draw.random() < 0.6:
        tick = draw.choice((0, 1, START_US, START_US + 5, (1 << 63) - 1))
        token = msgspec.json.encode({draw.choice(("00000007-00000000", "00000008-00000000")): tick}).decode()
        ticks = anything(dict[int, tuple[int, ...]], draw)
        ticket = draw.choice((0, 1, 1 << 63))
        return frames.encode(frames.Ack(number=number, token=token, events=ticks, ticket=ticket))
    return frames.encode(
        frames.Subscribe(
            number=number,
            topic=draw.choice(("a", "kept", "#")),
            where="",
            durable=draw.choice(("d1", "d2", "d3")),
            ack=draw.choice(("auto", "manual", "")),
            shared=draw.random() < 0.4,
            since_us=draw.choice((0, 1, START_US)),
        )
    )


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
    return changed(data, draw, 4) if draw.random() < 0.1 else data


class World:
    def __init__(self, seed: int, *, durable: bool) -> None:
        self.draw = random.Random(seed)
        self.now_us = START_US
        self.disk = MemoryDisk()
        config = TrackingConfig()
        self.broker = Broker(
            BrokerConfig(tracking=config),
            ME,
            draw=self.draw.randrange,
            now_us=self.now_us,
            tracking=make_tracking(config, me=ME.number, stored=(), changes=(), now_us=self.now_us)
            if durable
            else None,
            stored=self.disk.stored() if durable else None,
        )
        self.durable = durable
        self.open: dict[int, str] = {}
        self.numbers: dict[int, int] = {}  # by connection: of a broker
        self.asked: dict[int, list[frames.Query]] = {}  # by connection: what it has not answered
        self.last = HONEST
        self.publisher = 0
        self.delivered: list[bytes] = []
        self.turn(Opened(HONEST), Received(HONEST, honest_hello("client", 0, self.now_us)))
        self.turn(Received(HONEST, frames.encode(frames.Subscribe(number=1, topic="honest", where=""))))
        kept = frames.Subscribe(number=2, topic="kept", where="", durable="mine", ack="auto")
        self.turn(Received(HONEST, frames.encode(kept)))

    def turn(self, *inputs: Any) -> None:
        self.now_us += self.draw.choice((1, 50, MILLISECOND_US, 300 * MILLISECOND_US))
        self.perform(self.broker.handle(inputs, self.now_us))
        self.broker.check()
        if self.disk.waiting:
            self.turn(*self.disk.sync())

    def perform(self, effects: list[Effect]) -> None:
        """What follows is told in later turns: a driver performs all effects of a turn first."""
        following: list[Any] = []
        for effect in effects:
            if isinstance(effect, Close):
                assert effect.connection != HONEST, effect.error
                if self.open.pop(effect.connection, None) is not None:
                    following.append(Closed(effect.connection))
            elif isinstance(effect, StorageEffect):
                self.disk.waiting.append(effect)
            elif isinstance(effect, ReadFilters):
                records = dict.fromkeys(effect.sequences, b"")
                following.append(FiltersRead(tag=effect.tag, records=records))
            elif isinstance(effect, Send) and effect.connection == HONEST:
                following += self.hear(effect.data)
            elif isinstance(effect, Send) and frames.frame_kind(effect.data) == Kind.QUERY:
                query = frames.decode(effect.data)
                assert isinstance(query, frames.Query)
                self.asked.setdefault(effect.connection, []).append(query)
        for item in following:
            self.turn(item)

    def hear(self, frame: bytes) -> list[Received]:
        """What the honest client is told, and says to it."""
        match frames.frame_kind(frame):
            case Kind.DELIVERY:
                self.delivered.append(frame)
            case Kind.WELCOME:
                welcome = frames.decode(frame)
                assert isinstance(welcome, frames.Welcome)
                self.publisher = welcome.publisher
            case Kind.PING:
                return [Received(HONEST, frames.encode(frames.Pong(time_us=1, at_us=1)))]
        return []

    def attack(self) -> None:
        if len(self.open) < 3:
            self.last += 1
            role = self.draw.choice(["client", "broker"])
            number = 8 + self.last % 3 if role == "broker" else 0
            self.open[self.last] = role
            self.numbers[self.last] = number
            self.turn(Opened(self.last), Received(self.last, honest_hello(role, number, self.now_us)))
            if role == "broker" and self.last in self.open:
                self.turn(*(Received(self.last, frame) for frame in honest_beginning(number, self.last)))
            return
        connection = self.draw.choice(list(self.open))
        if self.draw.random() < 0.02:
            del self.open[connection]
            self.turn(Closed(connection))
            return
        said = [self.hostile_frame(connection) for _ in range(self.draw.randrange(1, 4))]
        self.turn(*(Received(connection, frame) for frame in said))

    def hostile_frame(self, connection: int) -> bytes:
        role, asked = self.open[connection], self.asked.get(connection)
        if role == "broker" and asked and self.draw.random() < 0.5:
            return answer(self.draw, asked.pop())
        if role == "broker" and self.draw.random() < 0.2:
            return question(self.draw, self.numbers[connection])
        if role == "client" and self.draw.random() < 0.6:
            return self.draw.choice((durable_frame, queue_frame))(self.draw)
        return hostile_frame(self.draw, role)

    def honest_round_trip(self, topic: str, *, durable: bool) -> None:
        builder = BatchBuilder()
        identity = MessageId(self.publisher, ME.number, self.now_us // 1000, 0)
        builder.add(bytes(identity), topic, {}, b"here", DEFAULT_LIMITS)
        self.delivered.clear()
        self.turn(Received(HONEST, builder.finish(channel=1 + durable, durable=durable)))
        events = [
            event
            for data in self.delivered
            for event in EventBatch.parse(data, DEFAULT_LIMITS).events()
            if event.id == identity
        ]
        assert [event.payload for event in events] == [b"here"]


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_nothing_a_peer_says_breaks_the_broker(seed: int, durable: bool) -> None:
    world = World(seed, durable=durable)
    for _ in range(250):
        world.attack()
    world.honest_round_trip("honest", durable=False)
    if durable:
        world.honest_round_trip("kept", durable=True)


@pytest.mark.parametrize("seed", range(1, 7))  # each has a task that is done
def test_nothing_that_is_said_of_queues_or_the_ring_breaks_the_broker(seed: int) -> None:
    """Bodies of DIRECT, most of them within their bounds: who breaks one is closed, and comes back."""
    world, taken, connections = World(seed, durable=seed % 2 == 1), 0, 0
    world.open[2] = "broker"
    world.turn(Opened(2), Received(2, honest_hello("broker", 8, world.now_us)))
    world.turn(*(Received(2, frame) for frame in honest_beginning(8, 1)))
    world.turn(Received(HONEST, frames.encode(frames.Request(number=9, what="queues.found", arguments={}))))
    for _ in range(10):  # in which it becomes responsible
        world.turn()
    world.last = 2
    for _ in range(150):
        if world.last == 2 or world.last not in world.open:
            world.last += 1
            connections += 1
            world.open[world.last] = "direct"
            hello = honest_hello("direct", 8, world.now_us)
            world.turn(Opened(world.last), Received(world.last, hello))
        room = world.draw.choice(("queues", "queues", "ring"))
        body = msgspec.msgpack.encode(made_up(BOUNDED[room][0], world.draw))
        body = bent(body, world.draw) if world.draw.random() < 0.1 else body
        if len(body) <= frames.MAX_BODY_BYTES:
            world.turn(Received(world.last, frames.encode(frames.Direct(room=room, body=body))))
            taken += world.last in world.open
    assert taken > 50
    assert connections > 5
    assert world.broker.metrics()["queue_writes_total"] > 0  # some of it was done
    world.honest_round_trip("honest", durable=False)


@pytest.mark.parametrize("outcome", ["none", "too many", "another number of each", "no such outcome"])
def test_an_answer_about_queues_that_answers_nothing_ends_its_connection(outcome: str) -> None:
    """It is of the size and shape that the codec takes, and comes while the task is under way."""
    world = World(0, durable=True)
    world.turn(Received(HONEST, frames.encode(frames.Request(number=1, what="queues.found", arguments={}))))
    world.turn(Opened(2), Received(2, honest_hello("broker", 8, world.now_us)))
    world.turn(*(Received(2, frame) for frame in honest_beginning(8, 1)))
    answers = {
        "none": (),
        "too many": (Answer("kept"),) * 3,
        "another number of each": (Answer("each", each=(Answer("kept"),) * 2),),
        "no such outcome": (Answer("x"),),
    }[outcome]
    posting = frames.Posting(inbox="a", id=1, after=0, payload=b"p")
    for number in range(1, 30):
        asked = (
            frames.Send(
                number=number, source="a", session=SESSIONS[0], form="recoverable", messages=(posting,)
            ),
            frames.Receive(number=number, inbox="a", consumer=bytes(8), window=1),
            frames.Request(number=number, what="queues.dead", arguments={"inbox": "a"}),
            frames.Request(number=number, what="queues.revive", arguments={"inbox": "a"}),
        )[number % 4]
        world.open[100 + number] = "direct"
        hello = honest_hello("direct", 8, world.now_us)
        done = frames.Direct(room="queues", body=msgspec.msgpack.encode((Done(number, answers),)))
        world.turn(Opened(100 + number), Received(100 + number, hello))
        world.turn(Received(HONEST, frames.encode(asked)), Received(100 + number, frames.encode(done)))
    world.honest_round_trip("honest", durable=False)


def test_no_argument_of_a_request_breaks_the_broker() -> None:
    """Every request that there is, with texts that a careless reader takes for a number, also with the queues
    at hand."""
    world = World(0, durable=True)
    requests = sorted(world.broker._board.requests)
    assert {"clients.kick", "queues.revive", "subs", "trace"} <= set(requests)
    found = frames.Request(number=1, what="queues.found", arguments={})
    world.turn(Received(HONEST, frames.encode(found)))
    asked = [(what, {"inbox": "a"} if what.startswith("queues") else {}) for what in requests]
    asked += [("network", {"what": what}) for what in sorted(world.broker._board.reports)]
    for what, given in asked:
        for name in ARGUMENTS:
            for text in DIGITS:
                request = frames.Request(number=1, what=what, arguments=given | {name: text})
                world.turn(Received(HONEST, frames.encode(request)))
    world.honest_round_trip("kept", durable=True)


def test_a_name_that_no_broker_would_take_is_refused_where_the_client_is() -> None:
    """Passed on, it would be out of bounds, and this broker's fault."""
    world = World(0, durable=False)
    request = frames.Request(number=1, what="queues.dead", arguments={"inbox": "i" * 256})
    effects = world.broker.handle([Received(HONEST, frames.encode(request))], world.now_us)
    sent = [frames.decode(effect.data) for effect in effects if isinstance(effect, Send)]
    (reply,) = [message for message in sent if isinstance(message, frames.Reply)]
    assert (reply.code, "1 to 255 bytes" in reply.body) == ("usage", True)


def test_who_has_many_consumers_leaves_a_few_of_them_in_a_turn() -> None:
    """Found: 10,000 of them took one turn of 0.4 s."""
    world = World(0, durable=True)
    world.turn(Received(HONEST, frames.encode(frames.Request(number=1, what="queues.found", arguments={}))))
    world.open[5] = "client"
    world.turn(Opened(5), Received(5, honest_hello("client", 0, world.now_us)))
    for number in range(200):
        receive = frames.Receive(number=number, inbox=f"i{number}", consumer=bytes(8), window=1)
        world.turn(Received(5, frames.encode(receive)))
    assert world.broker.metrics()["queue_consumers"] == 200
    del world.open[5]
    errands, most = world.broker.metrics()["queue_errands_total"], 0
    for item in (Closed(5), *[None] * 20):
        world.turn(*([] if item is None else [item]))
        before, errands = errands, world.broker.metrics()["queue_errands_total"]
        most = max(most, errands - before)
    assert most <= 4 * LATER_PER_TURN  # a turn here is followed by others, of the disk
    for _ in range(200):
        world.turn()
    assert world.broker.metrics()["queue_consumers"] == 0
