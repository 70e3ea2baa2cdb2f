"""What a broker is told about queues. All brokers of a network are told the same."""

from __future__ import annotations

from dataclasses import dataclass

from postroad.errors import UsageError
from postroad.queues.arc_state import Settings as ViewSettings
from postroad.queues.inbox import MAX_ATTEMPTS, Limits
from postroad.units import GIB, KIB, MIB, MILLISECOND_US, SECOND_US

MAX_ARCS = 4_096
# A replica that keeps no write for so long is replaced though the ring takes it for alive. Disks of replicas
# that are only busy, with a log that begins anew, take a second or two; the ring finds those that are silent.
STUCK_US = 5 * SECOND_US


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    arcs: int = 32  # parts of the ring that have a responsible broker each; never changes in a network
    replicas: int = 3  # brokers that keep each message: the paper's K
    electors: int = 7  # brokers that agree on who is responsible
    memory_only: bool = False  # the paper's own setting: nothing is on disk
    inbox_messages: int = 100_000
    inbox_bytes: int = GIB
    arc_bytes: int = 4 * GIB
    memory_bytes: int = 64 * MIB  # of messages of all inboxes at a broker; the bodies of others are on disk
    dead_letters: int = 10_000  # of an inbox
    attempts: int = 5  # then a rejected message is a dead letter
    outstanding_bytes: int = 64 * MIB  # sent through this broker and not answered by the responsible one
    answer_us: int = 10 * SECOND_US  # after which a sender hears that nobody knows
    rejoin_us: int = 3 * SECOND_US  # for which a consumer that was lost may come back
    heartbeat_us: int = 500 * MILLISECOND_US  # of the ring
    silent_us: int = 1_500 * MILLISECOND_US  # without an answer, a broker is taken for dead
    express_bytes: int = 16 * MIB  # of an inbox

    def __post_init__(self) -> None:
        if not 1 <= self.arcs <= MAX_ARCS:
            raise UsageError(f"the ring has 1 to {MAX_ARCS} arcs, not {self.arcs}")
        if not 0 < self.heartbeat_us < self.silent_us:
            raise UsageError("a broker is silent for longer than a heartbeat before it is taken for dead")
        if not 1 <= self.attempts <= MAX_ATTEMPTS:
            raise UsageError(f"a message has 1 to {MAX_ATTEMPTS} attempts, not {self.attempts}")
        if self.rejoin_us < 0 or self.answer_us <= 0 or self.memory_bytes <= 0:
            raise UsageError("queues: times and memory are positive")
        self.views()

    def views(self) -> ViewSettings:
        return ViewSettings(
            replicas=self.replicas,
            electors=self.electors,
            silent_us=STUCK_US,
            piece_bytes=512 * KIB,
            # A start has the log since its last mark in memory, and a broker the last writes of every arc.
            log_bytes=min(64 * MIB, self.memory_bytes),
            tail_bytes=min(4 * MIB, self.memory_bytes // 16),
        )

    def limits(self) -> Limits:
        """Of bytes on disk; of memory where nothing is on disk."""
        most = self.memory_bytes if self.memory_only else self.arc_bytes
        return Limits(
            inbox_messages=self.inbox_messages,
            inbox_bytes=min(self.inbox_bytes, most),
            arc_bytes=most,
            dead_letters=self.dead_letters,
            attempts=self.attempts,
        )
