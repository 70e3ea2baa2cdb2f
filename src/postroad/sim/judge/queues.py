"""What queues are judged by (spec Q3, Q5, Q7, Q9): exactly once, in order, nothing lost, nothing stuck, one
responsible broker, as many replicas as there should be, and equal ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from postroad.broker.core import Broker
from postroad.queues.arc_state import Machine
from postroad.queues.inbox import Extent, Inboxes, Stored, decode_snapshot, relocate
from postroad.queues.views import Arc
from postroad.sim.judge.violation import Violation


class QueueLedger:
    """What sources sent and were told, and what consumers were told that they accepted."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, str], list[int]] = {}  # (source, inbox) -> ids in order
        self._kept: dict[tuple[str, str], set[int]] = {}
        self._accepted: dict[tuple[str, str], set[int]] = {}
        self._expiring: set[tuple[str, str, int]] = set()  # source, inbox, id: these need not be accepted
        self._payloads: dict[tuple[str, str, int], bytes] = {}
        self._last: dict[tuple[str, str, str], int] = {}  # of each consumer
        self.kept_count = self.accepted_count = 0

    def sent(
        self, source: str, inbox: str, number: int, payload: bytes = b"", *, expires: bool = False
    ) -> None:
        self._sent.setdefault((source, inbox), []).append(number)
        self._payloads[source, inbox, number] = payload
        if expires:
            self._expiring.add((source, inbox, number))

    def handed(self, source: str, inbox: str, number: int, payload: bytes) -> None:
        if self._payloads[source, inbox, number] != payload:
            self.wrong(f"message {number} of {source} to {inbox} came with another payload than it was sent")

    def sent_by(self, source: str) -> list[int]:
        return [number for (name, _), sent in self._sent.items() if name == source for number in sent]

    def kept(self, source: str, inbox: str, number: int) -> None:
        self._kept.setdefault((source, inbox), set()).add(number)
        self.kept_count += 1

    def accepted(self, source: str, inbox: str, number: int, consumer: str) -> None:
        """Raises at once when a message comes twice, or to one consumer before one that was sent earlier.

        Of two consumers the later one may hear first that it has accepted: its answer was not lost.
        """
        known = self._accepted.setdefault((source, inbox), set())
        if number in known:
            text = f"message {number} of {source} to {inbox} was accepted twice, now by {consumer}"
            raise Violation("once", text, (source, consumer))
        last = self._last.get((source, inbox, consumer), 0)
        if number < last:
            text = f"{consumer} accepted message {number} of {source} to {inbox} after {last}"
            raise Violation("order", text, (source, consumer))
        self._last[source, inbox, consumer] = number
        known.add(number)
        self.accepted_count += 1

    def wrong(self, text: str) -> None:
        raise Violation("answer", text)

    def check_all_arrived(self) -> None:
        """After everything was healed for long enough."""
        for (source, inbox), numbers in self._sent.items():
            missing = [number for number in numbers if number not in self._kept.get((source, inbox), ())]
            if missing:
                text = f"{source} was never told that {missing[:5]} to {inbox} are kept"
                raise Violation("kept", text, (source,))
            accepted = self._accepted.get((source, inbox), set())
            lost = [
                number
                for number in numbers
                if number not in accepted and (source, inbox, number) not in self._expiring
            ]
            if lost:
                text = f"messages {lost[:5]} of {source} to {inbox} were kept and never came"
                raise Violation("lost", text, (source,))


def _is_equal(left: Machine, right: Machine) -> bool:
    """Whether two replicas have the same state. Which bodies are on its disk is for each to decide."""
    (left_rows, left_bodies), (right_rows, right_bodies) = _split(left), _split(right)
    shared = left_bodies.keys() & right_bodies.keys()
    return left_rows == right_rows and all(left_bodies[key] == right_bodies[key] for key in shared)


def _split(machine: Machine) -> tuple[bytes, dict[tuple[str, object], bytes]]:
    """All but the bodies, and of each message the body that is in memory."""
    snapshot = decode_snapshot(machine.snapshot())
    bodies: dict[tuple[str, object], bytes] = {}

    def change(message: Stored) -> Stored:
        if message.extent is None:
            key = (message.inbox, (message.chain, message.source, message.id))
            bodies[key] = message.payload + message.attributes
        extent = Extent(1, 0, message.size, 0)
        return replace(message, payload=b"", attributes=b"", extent=extent)

    return relocate(snapshot, change), bodies


def cores_of(brokers: Mapping[str, Broker], arc: int) -> list[tuple[str, Arc]]:
    cores = [(name, broker._rooms.queues.arcs.get(arc)) for name, broker in sorted(brokers.items())]
    return [(name, core) for name, core in cores if core is not None]


def check_one_responsible(brokers: Mapping[str, Broker], arcs: Iterable[int]) -> None:
    """At any time: no two brokers serve an arc in the same epoch."""
    for arc in arcs:
        serving: dict[object, str] = {}
        for name, core in cores_of(brokers, arc):
            if core.serving and core.view is not None:
                key = (core.view.chain, core.view.epoch)
                if key in serving:
                    text = f"{name} and {serving[key]} both serve arc {arc} in epoch {core.view.epoch}"
                    raise Violation("responsible", text, (name, serving[key]))
                serving[key] = name


def check_empty(brokers: Mapping[str, Broker], arcs: Iterable[int]) -> None:
    """At rest: whatever was kept has been accepted or is dead; nothing waits for anybody."""
    for arc in arcs:
        for name, core in cores_of(brokers, arc):
            if core.serving and isinstance(core.machine, Inboxes):
                for inbox, state in core.machine.inboxes.items():
                    if state.messages:
                        waiting = [(each.source[-8:], each.id) for each in state.messages.values()][:5]
                        text = f"{len(state.messages)} messages wait in {inbox} at {name}, first {waiting}"
                        raise Violation("stuck", text, (name,))


def check_whole(brokers: Mapping[str, Broker], arcs: Iterable[int], replicas: int) -> None:
    """At rest: every arc is served by one broker, its replicas are as many as can be, and equal."""
    for arc in arcs:
        cores = cores_of(brokers, arc)
        serving = [(name, core) for name, core in cores if core.serving]
        if len(serving) != 1:
            views = {name: core.view for name, core in cores}
            raise Violation("served", f"arc {arc} is served by {[name for name, _ in serving]}: {views}")
        name, leader = serving[0]
        assert leader.view is not None
        wanted = min(replicas, len(brokers))
        if len(leader.view.replicas) != wanted:
            text = f"arc {arc} has {len(leader.view.replicas)} replicas, not {wanted}: {leader.view}"
            raise Violation("replicas", text, (name,))
        for other, core in cores:
            if core.me in leader.view.replicas and not _is_equal(core.machine, leader.machine):
                raise Violation("equal", f"arc {arc} differs at {name} and {other}", (name, other))
            lingers = core.drop_at is not None and core.drop_at > core.now_us
            if core.me not in leader.view.replicas and core.chain is not None and not lingers:
                raise Violation("deleted", f"{other} left the replicas of arc {arc} and still holds one")
