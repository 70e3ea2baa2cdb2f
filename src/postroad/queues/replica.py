"""What a broker holds of an arc: the state of an epoch after so many of its writes, its log, and the records
by which others catch up (`views`: "Catching up", "Whole").
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from postroad.errors import PeerError
from postroad.queues.arc_state import ArcState, Machine, Settings
from postroad.queues.messages import (
    CLOSED,
    STARTED,
    Append,
    Chain,
    Entry,
    Held,
    Installed,
    Mark,
    Node,
    Output,
    Part,
    Place,
    Record,
    Refused,
    Row,
    Send,
    State,
    Synced,
    View,
    Write,
    decode_records,
    decode_state,
    encode,
)

RECORD_BYTES: Final = 64  # that a record takes beside its payload


class Replica(ArcState):
    __slots__ = ()

    def __init__(
        self,
        me: Node,
        boot: int,
        settings: Settings,
        machine: Machine,
        row: Row | None = None,
        records: Iterable[Record] = (),
        *,
        harmed: bool = False,
    ) -> None:
        """`harmed`: records that were behind these may be gone."""
        super().__init__(me, boot, settings, machine)
        self.harmed = harmed
        self._restore(row, records)

    # Starting

    def _restore(self, row: Row | None, records: Iterable[Record]) -> None:
        if row is not None:
            self.view, self.promised, self.vote, self.rival, self.ended = msgspec.structs.astuple(row)
            self.round = self.promised[0]
        for record in records:
            self._replay(record)
        self.synced = self.last_durable = self.applied
        self.restarted = self.chain is not None
        self._begin_tail()
        view = self.view
        if view is None:
            return
        if view.stage == STARTED and self.me not in view.replicas and self._is_older(view):
            self.drop_at = 0
        # The log may be ahead of the row.
        self.lapsed = (view.chain, max(view.epoch, self.epoch if self.chain == view.chain else 0))
        if view.responsible == self.me:
            self.broken = view.stage != CLOSED
        elif self.me in view.replicas and view.stage != CLOSED:
            self._send(view.responsible, Refused(view))

    def _replay(self, record: Record) -> None:
        if isinstance(record, Entry):
            self._change(record.number, record.payload, record.part)
            return
        if record.state is not None:
            self._replace_state(record.state)
        self.chain, self.epoch, self.applied, self.whole = (
            record.chain,
            record.epoch,
            record.applied,
            record.whole,
        )

    def rewrite(self) -> Append:
        """The log could not be written: all of the state anew, in the place of what it has."""
        if self.chain is None:
            return Append((), True, ())
        mark = Mark(self.chain, self.epoch, self.applied, self.whole, self._snapshot())
        self.log_bytes = 0
        synced = Send(self.me, Synced(self.chain, self.epoch, self.applied))
        return Append((mark,), True, (synced,))

    # The state

    def _held_for(self, view: View) -> Held | None:
        """What is held here, as far as it can stand for the base of that view."""
        if self.chain is None:
            return None
        lacking = self.chain != view.chain or self.epoch < view.base.epoch or self.harmed
        if lacking and not view.rescued:
            return None
        # An install of a later epoch that never started is as whole as what it was read from.
        whole = not self.restarted and (self.whole or self.epoch == view.base.epoch)
        return Held(self.chain, self.epoch, self.applied, whole, self.boot)

    def _install(self, view: View, leader: Node | None, state: bytes | None, *, whole: bool) -> None:
        """Replace the state in one step, or go on with it as it is (`state` None)."""
        if state is not None:
            self._replace_state(state)
        self.chain, self.epoch, self.whole, self.restarted = view.chain, view.epoch, whole, False
        self.harmed = False
        self.applied = self.synced = self.last_durable = 0
        self.incoming = self.offered = self.drop_at = None
        then = () if leader is None else (Send(leader, Installed(view.chain, view.epoch)),)
        mark = Mark(view.chain, view.epoch, 0, whole, state)
        self.outputs.append(Append((mark,), state is not None, then))
        if state is None:
            self._trace(mark)
        else:
            self.log_bytes = 0
            self._begin_tail()

    def _offer(self, held: Held) -> bytes:
        """A copy of the state, taken once for all who read it piece by piece."""
        if self.offered is None or self.offered[0] != held:
            self.offered = (held, self._snapshot())
        return self.offered[1]

    def _snapshot(self) -> bytes:
        return encode(State(self.absorbed, self.part, self.machine.snapshot()))

    def _replace_state(self, data: bytes) -> None:
        state = decode_state(data) if data else State((), None, b"")
        self.machine.install(state.machine)
        self.absorbed, self.part = state.absorbed, state.part

    def _drop(self) -> None:
        """A later start does without this replica."""
        if self.chain is None:
            return
        self._replace_state(b"")
        self.chain, self.epoch, self.applied, self.synced, self.last_durable = None, 0, 0, 0, 0
        self._begin_tail()
        self.whole = self.restarted = False
        self.offered = self.drop_at = None
        self.outputs.append(Append((), True, ()))

    def _change(self, number: int, payload: bytes, part: Part | None) -> object:
        answer = self.machine.apply(payload) if part is None else self._absorb(part, payload)
        self.applied = number
        return answer

    def _apply(self, write: Write) -> object:
        """The next write of the epoch, here; answers None while a chain's state is still coming in pieces."""
        answer = self._change(write.number, write.payload, write.part)
        then: tuple[Output, ...] = ()
        if write.durable:
            self.last_durable = write.number
            then = (Send(self.me, Synced(write.chain, write.epoch, write.number)),)
        entry = Entry(write.number, write.payload, write.part)
        self.outputs.append(Append((entry,), False, then))
        self._trace(entry)
        self.log_bytes += len(write.payload)
        if self.log_bytes > self.settings.log_bytes:
            assert self.chain is not None
            state = self._snapshot()
            mark = Mark(self.chain, self.epoch, self.applied, self.whole, state)
            self.outputs.append(Append((mark,), True, ()))
            # A large state is written anew only after as many bytes of writes.
            self.log_bytes = -len(state)
        return answer

    def _absorb(self, part: Part, data: bytes) -> object:
        if part.offset == 0:
            self.part = (part.chain, data)
        elif self.part is not None and self.part[0] == part.chain and len(self.part[1]) == part.offset:
            self.part = (part.chain, self.part[1] + data)
        if part.last and self.part is not None and self.part[0] == part.chain:
            assert self.chain is not None
            state = decode_state(self.part[1])
            self.part = None
            if part.chain not in self.absorbed:
                self.machine.absorb(part.chain, state.machine)
                self.absorbed = join_chains(self.absorbed, (part.chain, *state.absorbed), self.chain)
        return None

    def _safe_number(self) -> int:
        """Every write up to here is as safe as it has to be."""
        return self.applied if self.synced >= self.last_durable else self.synced

    # Catching up

    def _begin_tail(self) -> None:
        self.tail.clear()
        self.tail_start, self.tail_size = (self.epoch, self.applied), 0

    def _trace(self, record: Record) -> None:
        """Others may need it to come to the state that is held here."""
        self.tail.append(record)
        self.tail_size += _record_bytes(record)
        while self.tail_size > self.settings.tail_bytes:
            first = self.tail.popleft()
            self.tail_size -= _record_bytes(first)
            self.tail_start = _place_after(self.tail_start, first)

    def _place_in(self, chain: Chain, view: View) -> Place | None:
        """The place of what is held here, for whoever may have the records since. A harmed one has none: its
        log would still lack what it lacks, so it begins anew with a copy."""
        fits = self.chain == chain and not view.rescued and not self.harmed
        return (self.epoch, self.applied) if fits else None

    def _records_since(self, since: Place | None, held: Held) -> bytes | None:
        """From that place to what is held; None if the tail does not have it or a copy is shorter."""
        place, end = self.tail_start, (held.epoch, held.applied)
        records: list[Record] = []
        passed = place == since
        for record in self.tail:
            if passed and place == end:
                break
            place = _place_after(place, record)
            if passed:
                records.append(record)
            passed = passed or place == since
        if not records or place != end or sum(map(_record_bytes, records)) >= self.machine.size():
            return None
        return encode(tuple(records))

    def _catch_up(self, since: Place, held: Held | None, data: bytes) -> None:
        """Come from that place to what the sender holds. PeerError if the records do not lead there."""
        records = decode_records(data)
        place = since
        for record in records:
            expected = (place[0], place[1] + 1) if isinstance(record, Entry) else (record.epoch, 0)
            after = _place_after(place, record)
            if after != expected or after <= place or (isinstance(record, Mark) and record.state is not None):
                raise PeerError(f"a record that leads to {after} does not follow {place}")
            place = after
        if since != (self.epoch, self.applied) or (held is not None and place != (held.epoch, held.applied)):
            raise PeerError(
                f"records from {since} to {place}: this broker holds {self.epoch}, {self.applied}"
            )
        for record in records:
            self._replay(record)
            self._trace(record)
        self.synced = self.last_durable = self.applied
        if held is not None:
            self.whole, self.restarted = held.whole, False
        self.offered = None
        self.outputs.append(Append(records, False, ()))
        self.log_bytes += len(data)


def _place_after(place: Place, record: Record) -> Place:
    return (place[0], record.number) if isinstance(record, Entry) else (record.epoch, record.applied)


def _record_bytes(record: Record) -> int:
    return RECORD_BYTES + (len(record.payload) if isinstance(record, Entry) else 0)


def join_chains(chains: tuple[Chain, ...], more: Iterable[Chain], own: Chain) -> tuple[Chain, ...]:
    joined = {*chains, *more} - {own}
    return tuple(sorted(joined, key=lambda chain: (chain.generation, chain.founder, chain.origin)))
