"""Who could reach whom, and since when: the world's own view of the overlay.

Brokers are together while a chain of working connections joins them, and none of those it joins believes in
a connection that does not work: routes may lead over that one until its keepalive finds out. What a
subscription is owed depends on it: from the moment at which its broker and the publishing one had been
together for `SETTLE_US`, every event counts, whatever happens to the links afterwards.

Except where a raw link lost every attach until the spell was over: only the parent knew then where the stream
stood when routes made it one, and it forgets that with the link. TCP loses no frame of a link that stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from postroad.errors import BugError
from postroad.sim.judge.ledger import NEVER
from postroad.sim.machine.network import Connection, Network
from postroad.sim.machine.process import Process
from postroad.sim.machine.world import Timer, World
from postroad.units import SECOND_US
from postroad.wire.frames import Attach, decode

SETTLE_US: Final = 5 * SECOND_US  # by then a route between two brokers that can reach each other works


class Connectivity:
    def __init__(self, world: World, network: Network, processes: Mapping[str, Process]) -> None:
        self._world = world
        self._network = network
        self._processes = processes
        self._since: dict[tuple[str, str], int] = {}  # pairs together now -> since when
        self._spells: dict[tuple[str, str], list[tuple[int, int]]] = {}  # spells that ended, (from, to)
        # (broker, origin) -> when attaches were lost: (the first, the next one that arrived or NEVER)
        self._deaf: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._pending: Timer | None = None
        network.changed = self.disturb
        network.attach_lost = self._attach_lost
        network.attach_arrived = self._attach_arrived

    def disturb(self) -> None:
        """Something about connections changed; look again at the end of this instant."""
        if self._pending is None:
            self._pending = self._world.after(0, self._look)

    def spells(self, a: str, b: str) -> list[tuple[int, int]]:
        """When the two were together, (from, to); the last may still go on."""
        pair = (a, b) if a < b else (b, a)
        ended = self._spells.get(pair, [])
        since = self._since.get(pair)
        return ended if since is None else [*ended, (since, self._world.now_us)]

    def attached_until(self, broker: str, origin: int, end_us: int) -> int:
        """How long a spell up to `end_us` counts: if it is over and its last attaches to this origin were all
        lost, to the first of those."""
        for lost_us, arrived_us in self._deaf.get((broker, origin), []):
            if lost_us <= end_us < min(arrived_us, self._world.now_us):
                return lost_us
        return end_us

    def attached_since(self, broker: str, origin: int, since_us: int) -> int:
        """From when on a spell counts in which attaches to this origin were lost at first."""
        for lost_us, arrived_us in self._deaf.get((broker, origin), []):
            if lost_us - SETTLE_US < since_us < arrived_us:
                return arrived_us
        return since_us

    def components(self) -> list[list[str]]:
        """Running brokers grouped by who reaches whom, everything sorted."""
        names = sorted(name for name, process in self._processes.items() if process.running)
        edges = {connection.pair for connection in self._network.connections() if self._works(connection)}
        groups: list[list[str]] = []
        left = set(names)
        for name in names:
            if name not in left:
                continue
            group, border = [], [name]
            left.discard(name)
            while border:
                at = border.pop()
                group.append(at)
                near = [other for other in names if other in left and tuple(sorted((at, other))) in edges]
                left.difference_update(near)
                border += near
            groups.append(sorted(group))
        return groups

    def _attach_lost(self, broker: str, frame: bytes) -> None:
        times = self._deaf.setdefault((broker, _origin(frame)), [])
        if not times or times[-1][1] != NEVER:
            times.append((self._world.now_us, NEVER))

    def _attach_arrived(self, broker: str, frame: bytes) -> None:
        times = self._deaf.get((broker, _origin(frame)))
        if times and times[-1][1] == NEVER:
            times[-1] = (times[-1][0], self._world.now_us)

    def _works(self, connection: Connection) -> bool:
        stalled = self._network.is_stalled(*connection.pair)
        return all(connection.open) and not connection.dead and not stalled

    def _mistaken(self) -> set[str]:
        """Brokers that believe in a connection to another one that does not work."""
        return {
            end.name
            for connection in self._network.connections()
            if not self._works(connection) and all(name in self._processes for name in connection.pair)
            for end, believes in zip(connection.ends, connection.open, strict=True)
            if believes
        }

    def _look(self) -> None:
        self._pending = None
        now = self._world.now_us
        mistaken = self._mistaken()
        together = {
            (a, b)
            for group in self.components()
            if mistaken.isdisjoint(group)
            for at, a in enumerate(group)
            for b in group[at + 1 :]
        }
        for pair in [pair for pair in self._since if pair not in together]:
            self._spells.setdefault(pair, []).append((self._since.pop(pair), now))
        for pair in sorted(together):
            self._since.setdefault(pair, now)


def _origin(frame: bytes) -> int:
    message = decode(frame)
    if not isinstance(message, Attach):
        raise BugError("an ATTACH frame that is none")
    return message.origin
