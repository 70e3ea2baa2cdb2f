"""Every state that small worlds around the view core's own code can reach (spec/queues, "How responsibility
is agreed"). The network is a set: messages are lost, repeated and reordered by construction; timers fire at
any time.

What must hold in every state: the decided views are one chain; no two epochs can both acknowledge; nothing
kept is missing and nothing whose accept is confirmed is there again in an epoch that serves; every replica of
the last started view holds at least its state and every durable message kept; no write is applied twice or
out of order.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
from msgspec.structs import replace
from tests.worlds.arcs import AGREEMENT, TAKE_OVER, A, B, C, D, Result, World, explore, pair

from postroad.queues.arc_state import Incoming
from postroad.queues.messages import (
    STARTED,
    Base,
    Held,
    Message,
    Node,
    Row,
    View,
    Write,
)
from postroad.queues.views import Arc

FIRST = 2  # the epoch of the first view of two replicas


WORLDS: dict[str, World] = {
    "two changes": World(
        orders={A: (A, C, B), B: (B, A, C)}, ticks=(A, B), eager=AGREEMENT, epochs=FIRST + 2, rounds=4
    ),
    "a message and its accept, one crash": World(
        orders={A: (A, C, B), B: (B, A, C)}, ticks=(A, B), eager=AGREEMENT, epochs=FIRST + 1, rounds=3,
        accepts=True, crashes=1,
    ),
    "two messages, crash and restart": World(
        orders={A: (A, C, B), B: (B, C, A)}, ticks=(B,), eager=AGREEMENT, epochs=FIRST + 1, rounds=2,
        messages=2, crashes=1, restarts=1,
    ),
    "in memory, crash and restart": World(
        orders={A: (A, C, B), B: (B, A, C)}, ticks=(A, B), eager=AGREEMENT, epochs=FIRST + 1, rounds=2,
        durable=False, crashes=1, restarts=1, deaf=False,
    ),
    "a disk that lags, crash and restart": World(
        orders={B: (B, A, C)}, ticks=(B,), eager=AGREEMENT, epochs=FIRST + 1, rounds=2,
        crashes=1, restarts=1, slow=True,
    ),
    "one joins, two changes, one dies": World(
        orders={A: (A, B, C), B: (B, D, C), C: (C, D, B)}, ticks=(B, C), eager=AGREEMENT, epochs=FIRST + 2,
        rounds=3, crashes=1,
    ),
    "another pair takes over, one restarts": World(
        orders={C: (C, D, B)}, ticks=(C,), eager=AGREEMENT, epochs=FIRST + 1, rounds=2, crashes=1, restarts=1
    ),
    "two proposers": World(
        orders={A: (A, C, B), B: (B, C, A)}, ticks=(A, B), eager=TAKE_OVER, epochs=FIRST + 1, rounds=2,
        messages=0,
    ),
    "two proposers, an elector restarts": World(
        orders={A: (A, C, B), B: (B, C, A)}, ticks=(A, B), eager=TAKE_OVER, epochs=FIRST + 1, rounds=1,
        messages=0, crashes=1, restarts=1, fragile=(C,),
    ),
    "one is away, comes back and catches up": World(
        orders={A: (A, C, B), B: (B, A, C)}, ticks=(A, B), eager=AGREEMENT, epochs=FIRST + 2, rounds=3,
        messages=2, crashes=1, restarts=1, tail_bytes=1_000,
    ),
    "everything in any order": World(orders={B: (B, C, A)}, ticks=(B,), epochs=FIRST + 1, rounds=2),
}  # fmt: skip
BOUNDED = 20_000  # states of each world in `make test`
WHOLE = 3_000_000  # in a soak; what is larger is cut there

# Larger worlds, for a soak only: two crashes, accepts and changes together, agreement and data in any order.
LARGE: dict[str, World] = {
    "two messages with accepts, two changes, one crash": World(
        orders={A: (A, C, B), B: (B, A, C)}, ticks=(A, B), eager=AGREEMENT, epochs=FIRST + 2, rounds=4,
        messages=2, accepts=True, crashes=1,
    ),
    "two crashes and restarts": World(
        orders={A: (A, C, B), B: (B, A, C)}, ticks=(A, B), eager=AGREEMENT, epochs=FIRST + 1, rounds=3,
        crashes=2, restarts=2,
    ),
    "four brokers, a disk is lost, one joins": World(
        orders={A: (A, B, C, D), B: (B, D, C), C: (D, C, B)}, ticks=(A, B, C), eager=AGREEMENT,
        epochs=FIRST + 2, rounds=3, crashes=1,
    ),
    "all in any order, one crash": World(
        orders={B: (B, C, A)}, ticks=(B,), epochs=FIRST + 1, rounds=2, crashes=1
    ),
    "all in any order, two proposers": World(
        orders={A: (A, C, B), B: (B, C, A)}, ticks=(A, B), epochs=FIRST + 1, rounds=2
    ),
}  # fmt: skip


def report(name: str, result: Result) -> str:
    whole = "all" if result.complete else "the first"
    return f"{name}: {whole} {result.states:,} states, {result.steps:,} steps, epoch {result.served} served"


@pytest.mark.parametrize("name", WORLDS)
def test_every_state_is_sound(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Q5."""
    result = explore(WORLDS[name], limit=BOUNDED)
    with capsys.disabled():
        sys.stdout.write(f"\n{report(name, result)}")
    assert result.violation == "", "\n".join(result.trail)
    assert result.states > 1_000


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", [*WORLDS, *LARGE])
def test_every_state_of_larger_worlds_is_sound(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = explore((WORLDS | LARGE)[name], limit=WHOLE)
    with capsys.disabled():
        sys.stdout.write(f"\n{report(name, result)}")
    assert result.violation == "", "\n".join(result.trail)
    assert result.served > FIRST or name == "two proposers, an elector restarts"


# The wordings that were unsound


class ReadsTheViewBefore(Arc):
    """(a) Reads a replica of the view before, started or not, filled or not."""

    def _wanted(self, view: View, answered: Any) -> View | None:
        wanted = super()._wanted(view, answered)
        return wanted and replace(wanted, base=Base(view.epoch, view.replicas))

    def _held_for(self, view: View) -> Held | None:
        return Held(view.chain, view.base.epoch, self.applied, True, self.boot)


class ForgetsItsSeal(Arc):
    """(c) Saves only views that have started, and goes on in one after a restart."""

    def _restore(self, row: Row | None, records: Any) -> None:
        if row is not None and row.view is not None and row.view.stage != STARTED:
            row = Row(pair().view(A), (0, b"", 0), None, None, ())
        super()._restore(row, records)
        self.lapsed, self.broken, self.outputs = None, False, []


class InstallsTwice(Arc):
    """(d) Applies an install that comes again, after later writes."""

    def _may_install(self, sender: Node, view: View) -> bool:
        return self._follow(sender, view)

    def _install(self, view: View, leader: Node | None, state: bytes | None, *, whole: bool) -> None:
        super()._install(view, leader, state, whole=whole)
        self.incoming = Incoming(view.chain, view.epoch, None, b"")


class GoesOnAfterARestart(Arc):
    """A restarted responsible broker goes on in its epoch."""

    def _restore(self, row: Row | None, records: Any) -> None:
        super()._restore(row, records)
        self.lapsed, self.broken = None, False
        if self.view is not None and self.view.responsible == self.me and self.view.stage == STARTED:
            self._serve(self.view)
            self.kept = self.applied
            self.acks = dict.fromkeys(self.view.replicas, self.applied)


class DropsEarly(Arc):
    """(o) Drops its state when it leaves the set, before the next view is filled."""

    def _adopt(self, view: View) -> None:
        super()._adopt(view)
        if self.me not in view.replicas:
            self._drop()


class ForgetsItsPromise(Arc):
    """Answers before its promise or vote is saved, and never saves it."""

    def _send_safely(self, to: Node, message: Message) -> None:
        self._send(to, message)


class ServesUndecided(Arc):
    """Serves when its replicas are filled, without a decided start."""

    def _propose(self) -> None:
        if self.view is not None and self._is_filled(self.view):
            self._adopt(replace(self.view, stage=STARTED))
        else:
            super()._propose()


class AcknowledgesEarly(Arc):
    """Acknowledges a durable write before the log has it."""

    def _apply(self, write: Write) -> object:
        answer = super()._apply(write)
        self.synced = self.last_durable
        return answer


LAGS = WORLDS["a disk that lags, crash and restart"]
BROKEN: list[tuple[type[Arc], World]] = [
    (ReadsTheViewBefore, WORLDS["two changes"]),
    (ForgetsItsSeal, WORLDS["another pair takes over, one restarts"]),
    (InstallsTwice, WORLDS["two changes"]),
    (GoesOnAfterARestart, dataclasses.replace(LAGS, fragile=(A,))),
    (DropsEarly, WORLDS["one joins, two changes, one dies"]),
    (ForgetsItsPromise, WORLDS["two proposers, an elector restarts"]),
    (ServesUndecided, WORLDS["two changes"]),
    (AcknowledgesEarly, dataclasses.replace(LAGS, fragile=(B,), ticks=())),
]


@pytest.mark.parametrize(("kind", "world"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_exploration_finds_what_is_broken(kind: type[Arc], world: World) -> None:
    result = explore(world, kind, limit=150_000)
    assert result.violation, f"{result.states:,} states, and nothing found"
