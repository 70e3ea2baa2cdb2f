"""Tracking in the simulated world: what brokers store of it, who asks for traces, whether answers are true.

The truth is what the network carried: DELIVERY frames say which broker gave which event to whom and when,
KNOWLEDGE frames which broker passed it on. An answer is judged by what had happened when it was asked for.

- `trace-false`  whatever is missing from an answer that calls itself complete, or the message unknown
- `trace-lost`   what is missing from any answer, unless a broker on the event's way cannot be asked, or the
                 one that did it died so soon after that the record was not stored: within one persistence
                 interval. What others know of the event, before and behind that one, is not missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from postroad.ids import MessageId
from postroad.seam.tracking import DropFilters, ReplaceAttachments, StoreFilter, TrackingEffect
from postroad.sim.judge.ledger import Ledger
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.frames import BatchView
from postroad.sim.machine.network import Connection, Network
from postroad.sim.machine.world import World
from postroad.sim.people.clients import Client
from postroad.tracking.attachment_log import Change, decode_changes
from postroad.tracking.record import FilterMeta, decode_meta
from postroad.tracking.settings import GATHER_US, TrackingConfig
from postroad.units import MILLISECOND_US, SECOND_US
from postroad.wire.frames import Kind, Message, Reply, Request, Welcome

STORE_US: Final = (MILLISECOND_US, 40 * MILLISECOND_US)  # until what is to be kept is on the disk, from .. to
READ_US: Final = (100, 20 * MILLISECOND_US)
MAX_OPEN: Final = 8  # questions of one client
TURN_US: Final = MILLISECOND_US  # more than a turn takes


class Histories:
    """A broker's folder of tracking records. What was not synced when the process died is gone."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._chance = world.random(f"histories/{name}")
        self._records: dict[int, bytes] = {}
        self._changes = b""
        self._pending: list[tuple[TrackingEffect, ...]] = []  # asked to be kept, not synced yet
        self._free_us = 0  # when the thread that writes has done everything so far
        self._epoch = 0  # of the process

    def keep(self, effects: tuple[TrackingEffect, ...]) -> None:
        """In order, in a thread of its own."""
        self._pending.append(effects)
        epoch = self._epoch
        self._free_us = max(self._free_us, self._world.now_us) + self._chance.randint(*STORE_US)
        self._world.at(self._free_us, lambda: self._synced(epoch))

    def _synced(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._apply(self._pending.pop(0))

    def _apply(self, effects: Sequence[TrackingEffect]) -> None:
        for effect in effects:
            if isinstance(effect, StoreFilter):
                self._records[effect.sequence] = effect.record
                if effect.replaces is not None:
                    self._records.pop(effect.replaces, None)
            elif isinstance(effect, DropFilters):
                self._changes += effect.record
                for sequence in effect.sequences:
                    self._records.pop(sequence, None)
            else:
                whole = isinstance(effect, ReplaceAttachments)
                self._changes = effect.record if whole else self._changes + effect.record

    def read(self, sequences: tuple[int, ...], deliver: Callable[[Mapping[int, bytes]], None]) -> None:
        """After everything that was to be kept before."""
        self._free_us = max(self._free_us, self._world.now_us) + self._chance.randint(*READ_US)
        epoch = self._epoch

        def work() -> None:
            if epoch == self._epoch:
                deliver({sequence: self._records.get(sequence, b"") for sequence in sequences})

        self._world.at(self._free_us, work)

    def ended(self, *, crashed: bool) -> None:
        """The process is gone; one that stops in good order waits for its thread."""
        if not crashed:
            for effects in self._pending:
                self._apply(effects)
        self._pending = []
        self._free_us = 0
        self._epoch += 1

    def load(self) -> tuple[list[FilterMeta], list[Change]]:
        metas = [decode_meta(record) for _, record in sorted(self._records.items())]
        return metas, decode_changes(self._changes)[0]


class Inquirer(Client):
    """Asks for traces and hands the answers on. What a broker went away without answering is let go."""

    def __init__(
        self,
        world: World,
        network: Network,
        ledger: Ledger,
        *,
        name: str,
        addresses: tuple[str, ...],
        answered: Callable[[bytes, str, int, dict[str, Any]], None],
    ) -> None:
        """`answered(id, the broker asked, when it was asked, what came)`"""
        super().__init__(world, network, ledger, name=name, addresses=addresses, window=1 << 20)
        self._answered = answered
        self._open: dict[int, tuple[bytes, int]] = {}  # request -> id, when
        self._last = 0

    @property
    def free(self) -> bool:
        return self.welcome is not None and len(self._open) < MAX_OPEN

    def ask(self, identity: bytes) -> None:
        self._last += 1
        self._open[self._last] = (identity, self.world.now_us)
        arguments = {"id": str(MessageId.from_bytes(identity))}
        self._send(Request(number=self._last, what="trace", arguments=arguments))

    def _up(self, welcome: Welcome) -> None:
        del welcome

    def _down(self) -> None:
        self._open.clear()

    def _message(self, message: Message) -> None:
        if not isinstance(message, Reply):
            super()._message(message)
            return
        if message.code:
            raise Violation("trace-false", f"{self.name} was told {message.code}: {message.body}", self.tags)
        identity, asked_us = self._open.pop(message.number)
        broker = "" if self.welcome is None else self.welcome.name
        self._answered(identity, broker, asked_us, msgspec.json.decode(message.body))


@dataclass(frozen=True, slots=True)
class _Fact:
    """A broker gave an event to a subscription, or passed it on to a neighbour."""

    broker: str
    at_us: int
    receiver: str  # client and number of its subscription; "" if passed on


class Trails:
    """What really happened to every event, and the judge of what traces say of it."""

    def __init__(
        self,
        world: World,
        ledger: Ledger,
        config: TrackingConfig,
        *,
        deaths: Callable[[str], list[int]],
        joined: Callable[[str, str], bool],
    ) -> None:
        """`deaths(broker)`: when its processes crashed; `joined(one, other)`: surely reach each other."""
        self._world = world
        self._ledger = ledger
        self._config = config
        self._deaths = deaths
        self._joined = joined
        self._facts: dict[bytes, list[_Fact]] = {}
        self.verdicts: Counter[str] = Counter()
        self.receivers = 0  # true ones that answers named
        self.missed = 0  # true ones that are gone, with a reason

    def observe(self, connection: Connection, side: int, frame: bytes) -> None:
        if frame[4] not in (Kind.KNOWLEDGE, Kind.DELIVERY):
            return
        receiver = ""
        if frame[4] == Kind.DELIVERY:
            receiver = f"{connection.ends[1 - side].name}.{int.from_bytes(frame[40:44], 'little')}"
        fact = _Fact(connection.ends[side].name, self._world.now_us, receiver)
        for identity in BatchView(frame).ids():
            self._facts.setdefault(identity, []).append(fact)

    def judge(self, identity: bytes, asked: str, asked_us: int, answer: Mapping[str, Any]) -> None:
        verdict = answer["verdict"]
        self.verdicts[verdict] += 1
        facts = [fact for fact in self._facts.get(identity, ()) if fact.at_us < asked_us]
        named = {(receiver["broker"], _short(receiver["subscriber"])) for receiver in answer["receivers"]}
        steps = {step["broker"] for step in answer["route"]}
        missing = [
            fact
            for fact in facts
            if fact.broker not in steps or (fact.receiver and (fact.broker, fact.receiver) not in named)
        ]
        self.receivers += sum(bool(fact.receiver) for fact in facts if fact not in missing)
        if not missing:
            return
        text = f"{MessageId.from_bytes(identity)}: {missing[0]} is missing from {answer!r}"
        tags = (str(MessageId.from_bytes(identity)), missing[0].broker)
        if not any(map(self._died_at_once, facts)):
            if verdict in ("complete", "unknown"):
                raise Violation("trace-false", text, tags)
            joined = all(self._joined(asked, fact.broker) for fact in facts)
            if joined and not all(map(self._died_with_it, missing)):
                raise Violation("trace-lost", text, tags)
        self.missed += len(missing)

    def _died_with_it(self, fact: _Fact) -> bool:
        """The process ended before it had to be stored."""
        return self._died_within(fact, self._config.persist_us)

    def _died_at_once(self, fact: _Fact) -> bool:
        """Before it could even be noted that messages of that time were handled: nobody can know of it."""
        return self._died_within(fact, 0)

    def _died_within(self, fact: _Fact, after_us: int) -> bool:
        safe_us = fact.at_us + after_us + GATHER_US + STORE_US[1] + TURN_US
        return any(fact.at_us - TURN_US <= death_us <= safe_us for death_us in self._deaths(fact.broker))


def _short(subscriber: str) -> str:
    """`client#publisher.number` as client and number; a durable client has one subscription."""
    name, _, rest = subscriber.partition("#")
    return f"{name}.{rest.rpartition('.')[2]}" if rest else f"{name.removesuffix('-durable')}.1"


class AskingHabit:
    """Somebody who asks for the path of an event now and then, a recent one or any."""

    def __init__(self, world: World, inquirer: Inquirer, ledger: Ledger, *, pause_us: int) -> None:
        self._world = world
        self._inquirer = inquirer
        self._ledger = ledger
        self._pause_us = pause_us
        self._chance = world.random(f"asking/{inquirer.name}")
        self._events: list[bytes] = []  # those published, in order, as far as known here
        self._schedule()

    def _schedule(self) -> None:
        self._world.after(self._chance.randint(self._pause_us // 4, self._pause_us), self._ask)

    def _ask(self) -> None:
        events = self._ledger.events
        if len(events) > len(self._events):
            self._events = list(events)
        if self._events and self._inquirer.free:
            recent = self._chance.random() < 0.5
            first = max(0, len(self._events) - 50) if recent else 0
            self._inquirer.ask(self._events[self._chance.randrange(first, len(self._events))])
        self._schedule()


QUICK: Final = TrackingConfig(persist_us=2 * SECOND_US, renew_us=8 * SECOND_US, least_capacity=16)
