"""Brokers with queues in a simulated world, each told of the addresses that a test says."""

from __future__ import annotations

from collections.abc import Mapping

from postroad.broker.core import Broker
from postroad.ids import Identity
from postroad.queues.settings import QueueConfig
from postroad.sim.machine.disk import CrashStyle
from postroad.sim.machine.network import Network
from postroad.sim.machine.process import Core, Process
from postroad.sim.machine.world import Clock, World
from postroad.sim.queue_scenario import queue_broker
from postroad.units import MIB


def address_of(name: str) -> str:
    return f"{name}:7420"


class QueueNetwork:
    """`told_of`: names of the brokers that each is told of when it starts. Ids are in the order of names."""

    def __init__(
        self,
        told_of: Mapping[str, tuple[str, ...]],
        *,
        arcs: int,
        replicas: int = 2,
        memory_bytes: int = 64 * MIB,
    ) -> None:
        self.world = World(1)
        self.network = Network(self.world)
        self.config = QueueConfig(arcs=arcs, replicas=replicas, electors=3, memory_bytes=memory_bytes)
        self.told_of = dict(told_of)
        self._boots = dict.fromkeys(told_of, 0)
        self._processes = {name: self._process(name) for name in told_of}

    def _process(self, name: str) -> Process:
        number = 1 + sorted(self.told_of).index(name)

        def build(process: Process) -> tuple[Core, int]:
            self._boots[name] += 1
            boot = self._boots[name]
            node = bytes([number] * 16)
            identity = Identity(number=number, node=node, name=name, boot=boot, starts=boot)
            dial = tuple(map(address_of, self.told_of[name]))
            return queue_broker(process, self.world, self.config, identity=identity, dial=dial), boot

        return Process(
            self.world,
            self.network,
            name=name,
            address=address_of(name),
            build=build,
            clock=Clock(self.world),
            check_every=1,
        )

    def start(self, *names: str) -> None:
        for name in names:
            self._processes[name].start()

    def crash(self, name: str) -> None:
        self._processes[name].crash(silently=False, style=CrashStyle())

    def run(self, for_us: int) -> None:
        self.world.run(self.world.now_us + for_us)

    def broker(self, name: str) -> Broker:
        core = self._processes[name].core
        assert isinstance(core, Broker)
        return core

    def founders(self, name: str) -> set[bytes | None]:
        """Who founded the chains that this broker knows; None: it knows none of some arc."""
        arcs = self.broker(name)._rooms.queues.arcs
        views = [arcs.view(arc) for arc in range(self.config.arcs)]
        return {None if view is None else view.chain.founder for view in views}
