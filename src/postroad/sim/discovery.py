"""Discovery in the simulated world: brokers, discovery nodes and requesters with distances between them.

Brokers and discovery nodes are the product's own cores in simulated processes; a requester runs the product's
own search. What a search finds and how long it takes is in virtual time, so it is of the protocol and of the
distances, not of a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from postroad.broker.core import Broker
from postroad.client import effects as fx
from postroad.client.core import ClientCore
from postroad.client.places import Choice
from postroad.client.settings import ClientSettings
from postroad.config import BrokerConfig, parse_address
from postroad.discovery.envelopes import Envelopes
from postroad.discovery.node import DiscoveryNode, NodeSettings
from postroad.discovery.search import Search, Stage
from postroad.discovery.selection import merit
from postroad.discovery.settings import MULTICAST_GROUP, DiscoveryConfig, SearchSettings
from postroad.errors import PeerError
from postroad.ids import Identity
from postroad.links.connection import LinkSettings
from postroad.seam.datagrams import Datagram, Endpoint, SendTo
from postroad.seam.effects import Close, Dial, Send
from postroad.sim.machine.network import Network, Quality
from postroad.sim.machine.process import Core, Process
from postroad.sim.machine.world import Clock, Timer, World
from postroad.units import SECOND_US

BROKER_PORT: Final = 7420
NODE_PORT: Final = 7419
REQUESTER_PORT: Final = 40_000
SETTLE_US: Final = 5 * SECOND_US


class Requester:
    """One search at a site, with a clock of its own."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        search: Search,
        offset_us: int = 0,
        over: Callable[[Search], None] = lambda _search: None,
    ) -> None:
        self.name = name
        self._over = over  # is called once
        self.alive = True
        self.search = search
        self.endpoint: Endpoint = (name, REQUESTER_PORT)
        self.started_us = self.ended_us = 0
        self._clock = Clock(world, offset_us)
        self._world = world
        self._network = network
        self._timer: Timer | None = None
        network.bind(self.endpoint, self)

    def start(self) -> None:
        self.started_us = self._world.now_us
        self._perform(self.search.start(self._clock.now_us()))

    def datagram(self, source: Endpoint, data: bytes, group: Endpoint | None) -> None:
        try:
            datagram = Datagram(source, data, group)
            self._perform(self.search.datagram(datagram, self._clock.now_us()))
        except PeerError as error:
            self._world.note(self.name, f"drops a datagram: {error}")

    def _perform(self, datagrams: Sequence[SendTo]) -> None:
        for datagram in datagrams:
            self._network.send_datagram(self, self.endpoint, datagram.endpoint, datagram.data)
        self.search.check()
        if self._timer is not None:
            self._timer.cancel()
        if self.search.stage is Stage.OVER:
            if not self.ended_us:
                self.ended_us = self._world.now_us
                self._over(self.search)
            return
        deadline_us = self.search.next_deadline()
        if deadline_us is not None:
            self._timer = self._world.at(self._clock.true_us(deadline_us), self._tick)

    def _tick(self) -> None:
        self._perform(self.search.tick(self._clock.now_us()))

    def opened(self, connection: int, dialled: str | None) -> None: ...
    def received(self, connection: int, frame: bytes) -> None: ...
    def closed(self, connection: int) -> None: ...
    def dial_failed(self, address: str) -> None: ...


class SeekingClient:
    """The product's client core, which looks for brokers by itself. `arrived`: the brokers it was at."""

    def __init__(self, place: DiscoveryWorld, name: str, nodes: Sequence[str]) -> None:
        self.name = name
        self.alive = True
        self.arrived: list[str] = []
        self._place = place
        self._nodes = nodes
        self._timer: Timer | None = None
        settings = ClientSettings(addresses=(), name=name, seeks=True)
        self.core = ClientCore(settings, draw=place.world.random(f"client/{name}").randrange)
        self._perform(self.core.start(place.world.now_us))

    def _give(self, item: fx.Input | None = None) -> None:
        self._perform(self.core.handle([] if item is None else [item], self._place.world.now_us))

    def _perform(self, effects: Sequence[fx.Effect]) -> None:
        network, world = self._place.network, self._place.world
        for effect in effects:
            match effect:
                case Dial():
                    network.dial(self, effect.address)
                case Send():
                    network.send(self, effect.connection, effect.data)
                case Close():
                    network.close(effect.connection)
                case fx.Seek():
                    self._place.search(self.name, self._nodes, self._search_over)
                case fx.Up():
                    self.arrived.append(effect.broker)
                case fx.Failed():
                    raise effect.error
        self.core.check()
        if self._timer is not None:
            self._timer.cancel()
        deadline_us = self.core.next_deadline()
        self._timer = None if deadline_us is None else world.at(deadline_us, self._give)

    def _search_over(self, search: Search) -> None:
        if search.result is None:
            self._give(fx.Found(reason=str(search.error)))
            return
        weights = SearchSettings().weights
        candidates = search.result.candidates
        choices = (Choice(address=each.address, weight=merit(each, weights)) for each in candidates)
        self._give(fx.Found(choices=tuple(choices)))

    def opened(self, connection: int, dialled: str | None) -> None:
        self._give(fx.Opened(connection=connection, host=str(dialled)))

    def received(self, connection: int, frame: bytes) -> None:
        self._give(fx.Received(connection=connection, frame=frame))

    def closed(self, connection: int) -> None:
        self._give(fx.Closed(connection=connection))

    def dial_failed(self, address: str) -> None:
        self._give(fx.DialFailed(address=address, reason="refused"))


class DiscoveryWorld:
    """`distance(a, b)` is the one-way delay between two nodes in microseconds."""

    def __init__(
        self, seed: int, distance: Callable[[str, str], int], *, quality: Quality | None = None
    ) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.brokers: dict[str, Process] = {}
        self.nodes: dict[str, Process] = {}
        self.requesters: list[Requester] = []
        self._distance = distance
        self._quality = quality or Quality(jitter_us=100)
        self._servers: list[str] = []  # brokers and discovery nodes
        self._others: list[str] = []  # who asks them, and nobody else

    def place(self, name: str, *, serves: bool = False) -> None:
        """A new place, with its distances from those it will talk to. A crowd does not talk among itself."""
        for other in (*self._servers, *(self._others if serves else ())):
            latency_us = self._distance(name, other)
            self.network.shape(name, other, replace(self._quality, latency_us=latency_us))
        (self._servers if serves else self._others).append(name)

    def broker(
        self,
        name: str,
        *,
        links: Sequence[str] = (),
        nodes: Sequence[str] = (),
        offset_us: int = 0,
        config: DiscoveryConfig | None = None,
        broker: BrokerConfig | None = None,
    ) -> Process:
        """A broker that starts now, linked with others, known to discovery nodes."""
        self.place(name, serves=True)
        number = len(self.brokers) + 1
        discovery = replace(
            config or DiscoveryConfig(),
            nodes=tuple(f"{node}:{NODE_PORT}" for node in nodes),
            group=MULTICAST_GROUP,
        )
        address = f"{name}:{BROKER_PORT}"
        settings = replace(
            broker or BrokerConfig(),
            discovery=discovery,
            links=LinkSettings(address=address),
            dial=tuple(f"{link}:{BROKER_PORT}" for link in links),
        )

        def build(process: Process) -> tuple[Core, int]:
            boot = len(process.boots) + 1
            identity = Identity(
                number=number, node=number.to_bytes(16, "big"), name=name, boot=boot, starts=boot
            )
            draw = self.world.random(f"draws/{name}").randrange
            return Broker(settings, identity, draw=draw, now_us=process.clock.now_us()), boot

        clock = Clock(self.world, offset_us)
        process = Process(self.world, self.network, name=name, address=address, build=build, clock=clock)
        self.brokers[name] = process
        process.start()
        return process

    def node(self, name: str, *, settings: NodeSettings | None = None, offset_us: int = 0) -> Process:
        self.place(name, serves=True)

        def build(process: Process) -> tuple[Core, int]:
            draw = self.world.random(f"draws/{name}").randrange
            return DiscoveryNode(settings or NodeSettings(name=name), draw=draw), len(process.boots) + 1

        address = f"{name}:{NODE_PORT}"
        clock = Clock(self.world, offset_us)
        process = Process(self.world, self.network, name=name, address=address, build=build, clock=clock)
        self.nodes[name] = process
        process.start()
        return process

    def requester(
        self,
        name: str,
        *,
        nodes: Sequence[str] = (),
        multicast: bool = False,
        known: Sequence[str] = (),
        settings: SearchSettings | None = None,
        token: str = "",
        offset_us: int = 0,
    ) -> Requester:
        """A search that begins now."""
        self.place(name)
        search = Search(
            settings or SearchSettings(),
            nodes=[(node, NODE_PORT) for node in nodes],
            group=parse_address(MULTICAST_GROUP) if multicast else None,
            known=[(name, BROKER_PORT) for name in known],
            draw=self.world.random(f"draws/{name}").randrange,
            envelopes=Envelopes(None),
            token=token,
        )
        requester = Requester(self.world, self.network, name, search, offset_us)
        self.requesters.append(requester)
        requester.start()
        return requester

    def client(self, name: str, *, nodes: Sequence[str]) -> SeekingClient:
        """A client that begins to look for a broker now."""
        self.place(name)
        return SeekingClient(self, name, nodes)

    def search(self, name: str, nodes: Sequence[str], over: Callable[[Search], None]) -> None:
        """One more search of somebody who has a place already."""
        search = Search(
            SearchSettings(),
            nodes=[(node, NODE_PORT) for node in nodes],
            group=None,
            known=(),
            draw=self.world.random(f"draws/{name}").randrange,
            envelopes=Envelopes(None),
        )
        Requester(self.world, self.network, name, search, over=over).start()

    def run(self, us: int) -> None:
        self.world.run(self.world.now_us + us)

    def finish(self, requester: Requester) -> None:
        """Until its search is over."""
        while requester.search.stage is not Stage.OVER:
            self.run(SECOND_US // 10)

    def distances(self, requester: str) -> Mapping[str, int]:
        """How far each broker that runs is from a requester, one way."""
        return {
            name: self._distance(requester, name) for name, process in self.brokers.items() if process.running
        }
