"""The checkers themselves: a broker that is broken in one way must be caught by the rule for it."""
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.worlds.broken_brokers import Broken, is_delivery

from postroad.errors import BugError
from postroad.events import EventBatch
from postroad.seam.inputs import Input, Received
from postroad.sim.machine.frames import BatchView
from postroad.sim.machine.process import Core
from postroad.sim.machine.world import EPOCH_US
from postroad.sim.scenario import CALM_SETTLE_US, LEAST_HARM_US, Outcome, Scenario
from postroad.units import GIB, SECOND_US
from postroad.wire.frames import DEFAULT_LIMITS, Accepted, Kind, Rejected, Subscribe, decode, encode

REST_BEGINS_US = EPOCH_US + LEAST_HARM_US + CALM_SETTLE_US + 2 * SECOND_US
SEED = 22


class DropsOne(Broken):
    dropped = False

    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        if is_delivery(frame) and not self.dropped and self.now_us > REST_BEGINS_US:
            self.dropped = True
            return []
        return [frame]


class DropsAll(Broken):
    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        return [] if is_delivery(frame) and self.now_us > REST_BEGINS_US else [frame]


class Repeats(Broken):
    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        return [frame, frame] if is_delivery(frame) else [frame]


class Reorders(Broken):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.held: dict[int, bytes] = {}

    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        if not is_delivery(frame) or self.now_us < REST_BEGINS_US:
            return [frame]
        before = self.held.pop(connection, None)
        if before is None:
            self.held[connection] = frame
            return []
        return [frame, before]


class InventsGap(Broken):
    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        if not is_delivery(frame):
            return [frame]
        header = bytearray(frame[:48])
        header[0:4] = (48).to_bytes(4, "little")
        header[6] = 1
        header[8:16] = bytes(8)
        return [bytes(header)]


class Changes(Broken):
    """Flips a bit in the last event's payload."""

    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        if is_delivery(frame) and EventBatch.parse(frame, DEFAULT_LIMITS).payload(BatchView(frame).count - 1):
            return [frame[:-1] + bytes([frame[-1] ^ 0x80])]
        return [frame]


class Overgenerous(Broken):
    def on_input(self, item: Input) -> Input:
        if isinstance(item, Received) and item.frame[4] == Kind.SUBSCRIBE:
            message = decode(item.frame)
            assert isinstance(message, Subscribe)
            wider = Subscribe(number=message.number, topic="#", where="")
            return Received(item.connection, encode(wider))
        return item


class MovesTicks(Broken):
    """Tells its own subscribers later ticks than everybody else's."""

    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        if not is_delivery(frame):
            return [frame]
        view, moved = BatchView(frame), bytearray(frame)
        shift = connection % 1_000 + 1
        for at, tick in [
            (24, view.start),
            (32, view.end),
            *((64 + 48 * r, t) for r, t in enumerate(view.ticks())),
        ]:
            moved[at : at + 8] = (tick + shift).to_bytes(8, "little", signed=True)
        return [bytes(moved)]


class NeverAccepts(Broken):
    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        return [] if frame[4] == Kind.ACCEPTED and self.now_us > REST_BEGINS_US else [frame]


class NeverConfirms(Broken):
    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        return [] if frame[4] == Kind.SUBSCRIBED else [frame]


class RepeatsKnowledge(Broken):
    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        again = frame[4] == Kind.KNOWLEDGE and self.now_us > REST_BEGINS_US
        return [frame, frame] if again else [frame]


class KeepsTopologyToItself(Broken):
    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        return [] if frame[4] == Kind.TOPOLOGY else [frame]


class Hoards(Broken):
    def metrics(self) -> dict[str, int | float]:
        return {**super().metrics(), "cache_bytes": GIB}


class Raises(Broken):
    def check(self) -> None:
        raise RuntimeError("an invariant")


class NeverRests(Broken):
    def next_deadline(self) -> int | None:
        return self.now_us


class Rejects(Broken):
    def on_frame(self, connection: int, frame: bytes) -> list[bytes]:
        if frame[4] != Kind.ACCEPTED:
            return [frame]
        message = decode(frame)
        assert isinstance(message, Accepted)
        return [encode(Rejected(sequence=message.sequence, code="usage", reason="no"))]


BROKEN: list[tuple[type[Broken], str]] = [
    (DropsOne, "hole"),
    (DropsAll, "loss"),
    (Repeats, "once"),
    (Reorders, "order"),
    (InventsGap, "gap"),
    (Changes, "known"),
    (Overgenerous, "match"),
    (MovesTicks, "tick"),
    (NeverAccepts, "accept"),
    (NeverConfirms, "confirm"),
    (RepeatsKnowledge, "path"),
    (KeepsTopologyToItself, "converge"),
    (Hoards, "memory"),
    (Raises, "sound"),
    (NeverRests, "rest"),
    (Rejects, "protocol"),
]


def judge(wrap: Callable[[Core, str], Core] | None, *, faults: bool = False, seed: int = SEED) -> Outcome:
    return Scenario(seed=seed, minutes=0.1, brokers=3, faults=faults, wrap=wrap, durable=False).run()


@pytest.mark.parametrize(("broken", "rule"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_broker_is_caught(broken: type[Broken], rule: str) -> None:
    outcome = judge(lambda core, _: broken(core))
    assert outcome.rule == rule, outcome.text
    assert outcome.story, "a violation tells its story"


def test_whatever_a_world_raises_is_an_outcome_with_its_seed() -> None:
    scenario = Scenario(seed=SEED, minutes=0.1, brokers=3, faults=False, durable=False)

    def breaks() -> None:
        raise BugError("the world is wrong")

    scenario.world.after(SECOND_US, breaks)
    outcome = scenario.run()
    assert (outcome.seed, outcome.rule) == (SEED, "sound")
    assert "in breaks" in outcome.text
    assert outcome.text.endswith("BugError: the world is wrong")
    assert outcome.story


def test_an_honest_broker_is_not_accused() -> None:
    outcome = judge(lambda core, _: Broken(core))
    assert outcome.rule == "", outcome.text
    assert outcome.owed > 0


def test_every_rule_has_a_broker_that_breaks_it() -> None:
    """The rules named in the theory of the checkers are those that are tested here."""
    from postroad.sim.judge import checkers, ledger

    text = (ledger.__doc__ or "") + (checkers.__doc__ or "")
    named = {line.split("`")[1] for line in text.splitlines() if line.startswith("- `")}
    assert named <= {rule for _, rule in BROKEN}
