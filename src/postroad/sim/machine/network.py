"""The virtual network: connections as streams of whole frames, and what can go wrong with them.

A connection behaves as TCP does: frames arrive whole, in order, after latency, jitter and the time that
bandwidth takes; or the connection dies, and then each side learns of it in its own time and everything in
flight is gone. A stall holds frames back without killing anything, in one direction or both. A half-open
connection is a cut that one side learns of late.

TCP neither loses nor repeats nor reorders, but the stream protocol promises to survive all three (it
finds gaps and asks again, spec D2), so a *raw* link does these things to frames of chosen kinds. Credit
would drift apart on such a link, because both ends count bytes that only one of them saw; the raw link
settles the difference itself.

Each datagram takes its own time, so that jitter alone reorders them; `Quality` says how many are lost, come
twice or come late, and how long one may be. What a full link has no room for is lost. So is what a blocked or
stalled pair sends, in one direction or both. A group is heard by those who joined it within the sender's
segment, its sender among them.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from postroad.errors import BugError, UsageError
from postroad.seam.datagrams import Endpoint
from postroad.sim.machine.frames import split
from postroad.sim.machine.world import Timer, World
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.datagrams import MAX_DATAGRAM_BYTES
from postroad.wire.frames import CREDITED_KINDS, Credit, Kind, decode, encode

DIAL_REFUSED_US: Final = 2 * MILLISECOND_US
DIAL_TIMEOUT_US: Final = 5 * SECOND_US
MAX_IN_FLIGHT: Final = 200_000  # frames on one direction of one connection
MAX_QUEUED_US: Final = 100 * MILLISECOND_US  # of datagrams that wait for bandwidth; one more is lost
UDP_HEADER_BYTES: Final = 48  # with that of IPv6

RAW_KINDS: Final = frozenset({Kind.KNOWLEDGE, Kind.SILENCE, Kind.NACK, Kind.ATTACH})


class Node(Protocol):
    """A node as the network sees it."""

    name: str
    alive: bool

    def opened(self, connection: int, dialled: str | None) -> None: ...
    def received(self, connection: int, frame: bytes) -> None: ...
    def closed(self, connection: int) -> None: ...
    def dial_failed(self, address: str) -> None: ...


class DatagramNode(Node, Protocol):
    """A node that takes datagrams."""

    def datagram(self, source: Endpoint, data: bytes, group: Endpoint | None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How a pair of nodes is connected. `bandwidth` is in bytes a second, 0 for unlimited."""

    latency_us: int = MILLISECOND_US
    jitter_us: int = 200
    bandwidth: int = 0
    # Of datagrams: chances that one is lost, arrives twice, or is late by up to `late_us` more.
    lose: float = 0.0
    repeat: float = 0.0
    overtake: float = 0.0
    late_us: int = 50 * MILLISECOND_US
    mtu_bytes: int = MAX_DATAGRAM_BYTES + UDP_HEADER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """Chances, per frame of `kinds`, that it is lost, arrives twice, or is overtaken."""

    lose: float = 0.0
    repeat: float = 0.0
    overtake: float = 0.0
    late_us: int = 50 * MILLISECOND_US
    kinds: frozenset[Kind] = RAW_KINDS


class Pipe:
    """One direction of a connection."""

    __slots__ = ("blocked_until_us", "busy_until_us", "debt", "fin", "flight", "last_us", "timer")

    def __init__(self) -> None:
        self.flight: deque[tuple[int, bytes]] = deque()  # (arrival, frame), arrival never decreases
        self.last_us = 0
        self.busy_until_us = 0
        self.blocked_until_us = 0
        self.fin = False  # the sender has closed; what is in flight still arrives
        self.debt = 0  # credit that repeated frames on the other direction would give too much
        self.timer: Timer | None = None


class Connection:
    """Two ends, each with its own number, as each node's driver would number it."""

    __slots__ = ("dead", "ends", "numbers", "open", "pair", "pipes", "since_us")

    def __init__(self, ends: tuple[Node, Node], numbers: tuple[int, int], now_us: int) -> None:
        self.ends = ends
        self.numbers = numbers
        self.pair = pair_of(ends[0].name, ends[1].name)
        self.pipes = (Pipe(), Pipe())  # pipes[i] carries what ends[i] sends
        self.open = [True, True]  # whether each end still believes in it
        self.dead = False  # cut: nothing passes any more
        self.since_us = now_us


def _words(data: bytes) -> str:
    return f"a datagram ({len(data)} bytes, {zlib.crc32(data):08x})"


def pair_of(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a < b else (b, a)


class Network:
    """All connections of the world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.observers: list[
            Callable[[Connection, int, bytes], None]
        ] = []  # (connection, sending side, frame)
        self.changed: Callable[[], None] = lambda: (
            None
        )  # called when who is connected to whom may have changed
        # Told the sender's name and the frame when an ATTACH arrived, or a raw link lost it.
        self.attach_arrived: Callable[[str, bytes], None] = lambda _sender, _frame: None
        self.attach_lost: Callable[[str, bytes], None] = lambda _sender, _frame: None
        self.default = Quality()
        self._listening: dict[str, Node] = {}
        self._connections: dict[int, tuple[Connection, int]] = {}  # number of an end -> connection, side
        self._quality: dict[tuple[str, str], Quality] = {}
        self._raw: dict[tuple[str, str], Raw] = {}
        self._blocked: dict[tuple[str, str], int] = {}  # pair -> until when dials fail
        self._stalled: dict[tuple[str, str], int] = {}
        self._muffled: dict[tuple[str, str], int] = {}  # (sender, receiver) -> until when
        self._refusing: dict[str, int] = {}
        self._last_number = 0
        self._datagram_ports: dict[Endpoint, DatagramNode] = {}
        self._hosts: dict[str, str] = {}  # node -> host, of those who take datagrams or did
        self._groups: dict[Endpoint, dict[Endpoint, DatagramNode]] = {}  # group -> who joined it
        self._segments: dict[str, str] = {}  # node -> its segment of the network; "" if it is not listed
        self._busy_until_us: dict[
            tuple[str, str], int
        ] = {}  # (sender, receiver) -> until when datagrams take
        self.frames = 0
        self.lost = 0
        self.datagrams = 0
        self.datagrams_lost = 0

    # -- what nodes do

    def listen(self, address: str, endpoint: Node) -> None:
        self._listening[address] = endpoint

    def unlisten(self, address: str) -> None:
        self._listening.pop(address, None)

    def dial(self, caller: Node, address: str) -> None:
        """Opened at both ends after a round trip, or a failed dial."""
        target = self._listening.get(address)
        if target is None or self._refusing.get(address, 0) > self.world.now_us:
            self.world.after(DIAL_REFUSED_US, lambda: self._fail(caller, address))
            return
        pair = pair_of(caller.name, target.name)
        if self.is_blocked(*pair):
            self.world.after(DIAL_TIMEOUT_US, lambda: self._fail(caller, address))
            return
        delay = 2 * self._delay(pair)
        self.world.after(delay, lambda: self._connect(caller, target, address))

    def send(self, endpoint: Node, number: int, data: bytes) -> None:
        """Whole frames from one end. A connection that is gone swallows them, as a socket does."""
        end = self._connections.get(number)
        if end is None:
            return
        connection, side = end
        if connection.ends[side] is not endpoint:
            raise BugError(f"{endpoint.name} sent on connection {number} of {connection.ends[side].name}")
        for frame in split(data):
            self.frames += 1
            self.world.note(endpoint.name, "sends", connection=number, frame=frame)
            if connection.dead:
                continue
            for observe in self.observers:
                observe(connection, side, frame)
            self._transmit(connection, side, frame)

    def close(self, number: int) -> None:
        """One end closes in good order: what it sent still arrives, then the other end learns of it."""
        end = self._connections.pop(number, None)
        if end is None:
            return
        connection, side = end
        connection.open[side] = False
        connection.pipes[side].fin = True
        self.changed()
        self.world.after(0, lambda: self._tell_closed(connection, side))
        if not connection.dead:
            self._end(connection, side)

    def abandon(self, endpoint: Node, *, silently: bool) -> None:
        """The process behind `endpoint` is gone. `silently` (the machine died) sends no farewell."""
        self.changed()
        for number in [n for n, (c, side) in self._connections.items() if c.ends[side] is endpoint]:
            connection, side = self._connections.pop(number)
            connection.open[side] = False
            if silently:
                delay = self.world.random("farewell").randrange(SECOND_US, 40 * SECOND_US)
                self._kill(connection, {1 - side: delay})
            else:
                connection.pipes[side].fin = True
                if not connection.dead:
                    self._end(connection, side)

    # -- datagrams

    def bind(self, endpoint: Endpoint, node: DatagramNode) -> None:
        """Datagrams to this endpoint are for the node from now on."""
        self._datagram_ports[endpoint] = node
        self._hosts[node.name] = endpoint[0]

    def unbind(self, endpoint: Endpoint) -> None:
        self._datagram_ports.pop(endpoint, None)
        for members in self._groups.values():
            members.pop(endpoint, None)

    def join(self, group: Endpoint, endpoint: Endpoint) -> None:
        """What is sent to the group is for whoever is bound to the endpoint, too."""
        self._groups.setdefault(group, {})[endpoint] = self._datagram_ports[endpoint]

    def leave(self, group: Endpoint, endpoint: Endpoint) -> None:
        self._groups.get(group, {}).pop(endpoint, None)

    def place(self, name: str, segment: str) -> None:
        """A node hears of groups what others of its segment send. All are in one until they are placed."""
        self._segments[name] = segment

    def send_datagram(self, sender: Node, source: Endpoint, target: Endpoint, data: bytes) -> None:
        """To an endpoint, or to all who joined a group. What leads nowhere is lost."""
        self.datagrams += 1
        self.world.note(sender.name, f"sends {_words(data)} to {target[0]}:{target[1]}")
        members = self._groups.get(target)
        if members is None:
            node = self._datagram_ports.get(target)
            if node is not None:
                self._transmit_datagram(sender, node, source, data, None)
            return
        segment = self._segments.get(sender.name, "")
        for node in list(members.values()):
            if self._segments.get(node.name, "") == segment:
                self._transmit_datagram(sender, node, source, data, target)

    def _transmit_datagram(
        self, sender: Node, node: DatagramNode, source: Endpoint, data: bytes, group: Endpoint | None
    ) -> None:
        pair, now = pair_of(sender.name, node.name), self.world.now_us
        quality = self._quality.get(pair, self.default)
        chance = self.world.random(f"datagrams/{pair[0]}/{pair[1]}")
        lose, repeat = chance.random(), chance.random()
        begins_us = max(now, self._busy_until_us.get((sender.name, node.name), 0))
        size = len(data) + UDP_HEADER_BYTES
        if (
            lose < quality.lose
            or size > quality.mtu_bytes
            or begins_us - now > MAX_QUEUED_US
            or self._cut_off(sender.name, node.name)
        ):
            self._lose_datagram(node, data)
            return
        if quality.bandwidth:
            begins_us += size * SECOND_US // quality.bandwidth
            self._busy_until_us[sender.name, node.name] = begins_us
        for _ in range(2 if repeat < quality.repeat else 1):
            late = chance.randrange(quality.late_us + 1) if chance.random() < quality.overtake else 0
            delay = quality.latency_us + chance.randrange(quality.jitter_us + 1) + late
            self.world.at(
                begins_us + delay, lambda: self._hand_over_datagram(sender, node, source, data, group)
            )

    def _hand_over_datagram(
        self, sender: Node, node: DatagramNode, source: Endpoint, data: bytes, group: Endpoint | None
    ) -> None:
        if not node.alive or self._cut_off(sender.name, node.name):
            self._lose_datagram(node, data)
            return
        self.world.note(node.name, f"receives {_words(data)} of {source[0]}:{source[1]}")
        node.datagram(source, data, group)

    def _lose_datagram(self, node: Node, data: bytes) -> None:
        self.datagrams_lost += 1
        self.world.note("network", f"loses {_words(data)} for {node.name}")

    def _cut_off(self, sender: str, receiver: str) -> bool:
        muffled = self._muffled.get((sender, receiver), 0) > self.world.now_us
        return muffled or self.is_blocked(sender, receiver) or self.is_stalled(sender, receiver)

    # -- what faults do

    def shape(self, a: str, b: str, quality: Quality) -> None:
        self._quality[pair_of(a, b)] = quality

    def make_raw(self, a: str, b: str, raw: Raw | None) -> None:
        if raw is None:
            self._raw.pop(pair_of(a, b), None)
        else:
            self._raw[pair_of(a, b)] = raw

    def cut(self, a: str, b: str, learn_us: tuple[int, int]) -> int:
        """Kill the connections of a pair; the ends learn of it after these delays. How many there were."""
        pair, cut = pair_of(a, b), 0
        for connection in self.between(*pair):
            low = 0 if connection.ends[0].name == pair[0] else 1
            self._kill(connection, {low: learn_us[0], 1 - low: learn_us[1]})
            cut += 1
        return cut

    def block(self, a: str, b: str, until_us: int) -> None:
        """Dials between the pair fail until then. Together with `cut` it is one edge of a partition."""
        pair = pair_of(a, b)
        self._blocked[pair] = max(until_us, self._blocked.get(pair, 0))

    def stall(self, a: str, b: str, until_us: int) -> None:
        """Frames between the pair wait until then."""
        self._stalled[pair_of(a, b)] = until_us
        self.changed()
        self.world.at(until_us, self.changed)

    def muffle(self, sender: str, receiver: str, until_us: int) -> None:
        """Frames in this direction wait until then."""
        self._muffled[sender, receiver] = until_us

    def refuse(self, address: str, until_us: int) -> None:
        self._refusing[address] = until_us

    def heal(self) -> None:
        """No fault is left; what is cut stays cut, and may be dialled again."""
        self._blocked.clear()
        self._stalled.clear()
        self._muffled.clear()
        self._refusing.clear()
        self._raw.clear()
        self.changed()
        for connection in self.connections():
            for side in (0, 1):
                self._pump_at(connection, side, self.world.now_us)

    # -- what observers see

    def connections(self) -> list[Connection]:
        """Every connection with at least one end, each once, oldest first."""
        return [c for n, (c, _) in self._connections.items() if n == self._first_open(c)]

    def between(self, a: str, b: str) -> list[Connection]:
        pair = pair_of(a, b)
        return [c for c in self.connections() if c.pair == pair]

    def is_blocked(self, a: str, b: str) -> bool:
        return self._blocked.get(pair_of(a, b), 0) > self.world.now_us

    def is_stalled(self, a: str, b: str) -> bool:
        return self._stalled.get(pair_of(a, b), 0) > self.world.now_us

    def connected(self, a: str, b: str) -> bool:
        """Whether a working connection joins the two."""
        return any(all(c.open) and not c.dead for c in self.between(a, b)) and not self.is_stalled(a, b)

    def exists(self, number: int) -> bool:
        return number in self._connections

    def peer_host(self, number: int) -> str:
        """That of the other end of a connection, where its datagrams come from."""
        connection, side = self._connections[number]
        name = connection.ends[1 - side].name
        return self._hosts.get(name, name)

    def connection(self, number: int) -> Connection:
        """That with an end of this number, which believes in it."""
        return self._connections[number][0]

    # -- inside

    @staticmethod
    def _first_open(connection: Connection) -> int:
        return connection.numbers[0] if connection.open[0] else connection.numbers[1]

    def _fail(self, caller: Node, address: str) -> None:
        if not caller.alive:
            return
        self.world.note(caller.name, f"could not dial {address}")
        caller.dial_failed(address)

    def _connect(self, caller: Node, target: Node, address: str) -> None:
        if not caller.alive:
            return
        pair = pair_of(caller.name, target.name)
        if self._listening.get(address) is not target or self.is_blocked(*pair):
            self._fail(caller, address)
            return
        self._last_number += 2
        numbers = (self._last_number, self._last_number + 1)  # so that number ^ 1 is the other end
        connection = Connection((caller, target), numbers, self.world.now_us)
        self._connections[numbers[0]] = (connection, 0)
        self._connections[numbers[1]] = (connection, 1)
        self.changed()
        self.world.note(caller.name, f"opened to {address}", connection=numbers[0], tags=(target.name,))
        caller.opened(numbers[0], address)
        target.opened(numbers[1], None)

    def _delay(self, pair: tuple[str, str]) -> int:
        quality = self._quality.get(pair, self.default)
        jitter = self.world.random(f"jitter/{pair[0]}/{pair[1]}").randrange(quality.jitter_us + 1)
        return quality.latency_us + jitter

    def _arrival(self, connection: Connection, side: int, size: int) -> int:
        """When `size` bytes sent now arrive, after everything sent before them."""
        pipe, now = connection.pipes[side], self.world.now_us
        bandwidth = self._quality.get(connection.pair, self.default).bandwidth
        if bandwidth:
            pipe.busy_until_us = max(pipe.busy_until_us, now) + size * SECOND_US // bandwidth
            now = pipe.busy_until_us
        pipe.last_us = max(pipe.last_us, now + self._delay(connection.pair))
        return pipe.last_us

    def _transmit(self, connection: Connection, side: int, frame: bytes) -> None:
        raw = self._raw.get(connection.pair)
        if raw is not None and frame[4] in raw.kinds:
            self._transmit_raw(connection, side, frame, raw)
            return
        back = connection.pipes[1 - side]
        if back.debt and frame[4] == Kind.CREDIT:
            settled = self._settle(connection, side, frame)
            if settled is None:
                return
            frame = settled
        self._enqueue(connection, side, frame)

    def _enqueue(self, connection: Connection, side: int, frame: bytes) -> None:
        pipe = connection.pipes[side]
        if len(pipe.flight) >= MAX_IN_FLIGHT:
            raise UsageError(f"more than {MAX_IN_FLIGHT} frames wait on one connection: nobody stops sending")
        arrival = self._arrival(connection, side, len(frame))
        pipe.flight.append((arrival, frame))
        if len(pipe.flight) == 1:
            self._pump_at(connection, side, arrival)

    def _transmit_raw(self, connection: Connection, side: int, frame: bytes, raw: Raw) -> None:
        chance = self.world.random(f"raw/{connection.pair[0]}/{connection.pair[1]}")
        lose, repeat, overtake = chance.random(), chance.random(), chance.random()
        late = chance.randrange(1, raw.late_us + 2)
        number = connection.numbers[side]
        if lose < raw.lose:
            self.lost += 1
            self.world.note("network", "loses", connection=number, frame=frame)
            if frame[4] == Kind.ATTACH:
                self.attach_lost(connection.ends[side].name, frame)
            if frame[4] in CREDITED_KINDS:  # the other end will never give back the credit this frame took
                self._enqueue(connection, 1 - side, encode(Credit(size=len(frame))))
            return
        if repeat < raw.repeat:
            self.world.note("network", "repeats", connection=number, frame=frame)
            if frame[4] in CREDITED_KINDS:
                connection.pipes[side].debt += len(frame)
            self._arrive_late(connection, side, frame, late)
        if overtake < raw.overtake:
            self.world.note("network", "delays", connection=number, frame=frame)
            self._arrive_late(connection, side, frame, late)
        else:
            self._enqueue(connection, side, frame)

    def _arrive_late(self, connection: Connection, side: int, frame: bytes, late_us: int) -> None:
        """Outside the queue, so that later frames overtake it; it never overtakes an earlier one."""
        arrival = self._arrival(connection, side, len(frame)) + late_us

        def arrive() -> None:
            stalled = self._stalled.get(connection.pair, 0)
            if stalled > self.world.now_us:
                self.world.at(stalled + late_us, arrive)
            else:
                self._hand_over(connection, side, frame)

        self.world.at(arrival, arrive)

    @staticmethod
    def _settle(connection: Connection, side: int, frame: bytes) -> bytes | None:
        """Take what repeated frames owe out of a credit that passes the other way."""
        message, pipe = decode(frame), connection.pipes[1 - side]
        if not isinstance(message, Credit):
            raise BugError("a CREDIT frame that is none")
        taken = min(message.size, pipe.debt)
        pipe.debt -= taken
        return encode(Credit(size=message.size - taken)) if message.size > taken else None

    def _pump_at(self, connection: Connection, side: int, time_us: int) -> None:
        pipe = connection.pipes[side]
        if pipe.timer is not None:
            pipe.timer.cancel()
        pipe.timer = self.world.at(time_us, lambda: self._pump(connection, side))

    def _pump(self, connection: Connection, side: int) -> None:
        """Hand over what has arrived on one direction."""
        pipe, now = connection.pipes[side], self.world.now_us
        pipe.timer = None
        if connection.dead:
            return
        ends = (connection.ends[side].name, connection.ends[1 - side].name)
        stalled = max(self._stalled.get(connection.pair, 0), self._muffled.get(ends, 0))
        if stalled > now:
            self._pump_at(connection, side, stalled)
            return
        while pipe.flight and pipe.flight[0][0] <= now:
            self._hand_over(connection, side, pipe.flight.popleft()[1])
        if pipe.flight:
            self._pump_at(connection, side, pipe.flight[0][0])
        elif pipe.fin and pipe.last_us <= now:
            self._kill(connection, {1 - side: 0})
        elif pipe.fin:
            self._pump_at(connection, side, pipe.last_us)

    def _end(self, connection: Connection, side: int) -> None:
        """The end arrives behind everything sent before it, none of which waits for it."""
        arrival = self._arrival(connection, side, 0)
        if not connection.pipes[side].flight:
            self._pump_at(connection, side, arrival)

    def _hand_over(self, connection: Connection, side: int, frame: bytes) -> None:
        receiver = 1 - side
        if connection.open[receiver] and not connection.dead and connection.ends[receiver].alive:
            number = connection.numbers[receiver]
            self.world.note(connection.ends[receiver].name, "receives", connection=number, frame=frame)
            if frame[4] == Kind.ATTACH:
                self.attach_arrived(connection.ends[side].name, frame)
            connection.ends[receiver].received(number, frame)

    def _kill(self, connection: Connection, learn_us: dict[int, int]) -> None:
        """Nothing passes from now on; each end named learns of it after its delay."""
        connection.dead = True
        self.changed()
        for pipe in connection.pipes:
            pipe.flight.clear()
        for side in sorted(learn_us):
            if connection.open[side]:
                self.world.after(learn_us[side], lambda side=side: self._learn(connection, side))  # type: ignore[misc]

    def _learn(self, connection: Connection, side: int) -> None:
        if connection.open[side]:
            connection.open[side] = False
            del self._connections[connection.numbers[side]]
            self._tell_closed(connection, side)

    def _tell_closed(self, connection: Connection, side: int) -> None:
        if connection.ends[side].alive:
            number = connection.numbers[side]
            self.world.note(connection.ends[side].name, "closed", connection=number)
            connection.ends[side].closed(number)
