"""Direct peers in the simulated world: reached when needed, cut off by partitions, reached again."""

from __future__ import annotations

import json

from tests.worlds.echo_room import EchoBroker

from postroad.config import BrokerConfig
from postroad.ids import Identity
from postroad.links.connection import LinkSettings
from postroad.sim.machine.disk import CrashStyle
from postroad.sim.machine.network import Network
from postroad.sim.machine.process import Core, Process
from postroad.sim.machine.world import Clock, World
from postroad.units import SECOND_US
from postroad.wire.frames import DEFAULT_LIMITS, Hello, Ping, Pong, Reply, Request, Welcome, decode, encode

NAMES = ("b1", "b2", "b3")


class Asker:
    """A client that asks its broker to echo something."""

    name = "asker"
    alive = True

    def __init__(self, network: Network) -> None:
        self.network = network
        self.connection = 0
        self.welcome = False
        self.answers: list[dict[str, str]] = []
        self.asked = 0

    def opened(self, connection: int, _dialled: str | None) -> None:
        self.connection = connection
        hello = Hello(
            version=1, role="client", name="c", token="", limits=DEFAULT_LIMITS, window=1 << 20, time_us=0
        )
        self.network.send(self, connection, encode(hello))

    def received(self, _connection: int, frame: bytes) -> None:
        message = decode(frame)
        self.welcome |= isinstance(message, Welcome)
        if isinstance(message, Ping):
            self.network.send(self, self.connection, encode(Pong(time_us=message.time_us, at_us=0)))
        if isinstance(message, Reply):
            self.answers.append(json.loads(message.body))

    def closed(self, _connection: int) -> None:
        raise AssertionError("the broker closed the connection")

    def dial_failed(self, address: str) -> None:
        raise AssertionError(f"{address} does not answer")

    def ask(self, text: str) -> None:
        self.asked += 1
        arguments = {"text": text, "broker": "3", "direct": "1"}
        self.network.send(
            self, self.connection, encode(Request(number=self.asked, what="echo", arguments=arguments))
        )


class Stage:
    """Brokers b1 to b3 in a line, each with the room `echo`."""

    def __init__(self) -> None:
        self.world = World(1)
        self.network = Network(self.world)
        self.processes = {name: self._process(at, name) for at, name in enumerate(NAMES, 1)}
        for process in self.processes.values():
            process.start()
        self.asker = Asker(self.network)
        self.network.dial(self.asker, "b1:7420")
        self.run(5)
        assert self.asker.welcome

    def _process(self, number: int, name: str) -> Process:
        def build(process: Process) -> tuple[Core, int]:
            boot = len(process.boots) + 1
            identity = Identity(number=number, node=bytes((number,)) * 16, name=name, boot=boot, starts=boot)
            dial = () if number == 1 else (f"b{number - 1}:7420",)
            config = BrokerConfig(links=LinkSettings(address=process.address), dial=dial)
            draw = self.world.random(name).randrange
            return EchoBroker(config, identity, draw=draw, now_us=process.clock.now_us()), boot

        clock = Clock(self.world)
        return Process(self.world, self.network, name=name, address=f"{name}:7420", build=build, clock=clock)

    def run(self, seconds: int) -> None:
        self.world.run(self.world.now_us + seconds * SECOND_US)


def test_a_broker_is_reached_directly_cut_off_and_reached_again() -> None:
    stage = Stage()
    stage.asker.ask("one")
    stage.run(1)
    assert stage.asker.answers == [{"text": "one"}]
    stage.network.block("b1", "b3", stage.world.now_us + 10 * SECOND_US)
    stage.network.cut("b1", "b3", (0, 0))
    stage.run(1)
    stage.asker.ask("two")
    stage.run(6)
    assert stage.asker.answers[1:] == [{"error": "unreached"}]
    stage.run(15)
    stage.asker.ask("three")
    stage.run(1)
    assert stage.asker.answers[2:] == [{"text": "three"}]


def test_a_broker_that_died_while_it_was_a_direct_peer_is_told_of() -> None:
    stage = Stage()
    stage.asker.ask("one")
    stage.run(1)
    stage.processes["b3"].crash(silently=False, style=CrashStyle())
    stage.asker.ask("two")
    stage.run(5)
    assert stage.asker.answers == [{"text": "one"}, {"error": "unreached"}]
    assert stage.processes["b1"].core.metrics()["direct_peers"] == 1, "b2, whom the ring speaks with"
