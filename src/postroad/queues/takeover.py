"""One state on all replicas of a view: the responsible broker reads a replica of the base, installs that
state on every replica, and writes to all of them (`views`: "Take-over"; spec, responsibility 3 and 4).
"""

from __future__ import annotations

from msgspec.structs import replace

from postroad.errors import BugError, PeerError, UsageError
from postroad.queues.arc_state import Incoming, Installing, Pending, Reading, epoch_of, with_answer
from postroad.queues.messages import (
    CLOSED,
    MAX_STATE_BYTES,
    MAX_WRITE_BYTES,
    Ack,
    Append,
    Ended,
    Fetch,
    Gather,
    Held,
    Installed,
    Kept,
    Know,
    Load,
    More,
    Node,
    Offer,
    Part,
    Piece,
    Refused,
    Seal,
    Sealed,
    Send,
    Serving,
    State,
    Stopped,
    Synced,
    View,
    Write,
    decode_state,
    encode,
)
from postroad.queues.replica import Replica, join_chains


class TakeOver(Replica):
    __slots__ = ()

    # Reading one replica of the base

    def _begin_reading(self, view: View) -> None:
        until_us = self.now_us + self.settings.answer_us
        self.reading = Reading(view, (), None, None, b"", until_us)
        self.installing = None
        held = self._held_for(view)
        if self.me in view.base.replicas and not view.rescued and held is not None and held.whole:
            self._read(held, None)
            return
        for node in view.base.replicas:
            self._send(node, Seal(view))

    def _on_seal(self, sender: Node, message: Seal) -> None:
        view = message.view
        if not self._follow(sender, view):
            return
        if self._is_lapsed(view) and view.stage != CLOSED:
            self._send(sender, Refused(view))
            return
        self._send_safely(sender, Sealed(view.chain, view.epoch, self._held_for(view)))

    def _on_sealed(self, sender: Node, message: Sealed) -> None:
        reading = self.reading
        if reading is None or (message.chain, message.epoch) != epoch_of(reading.view):
            return
        if reading.source is not None:
            if reading.source[0] != sender or reading.source[1] == message.held:
                return
            # It was started anew meanwhile.
            reading = replace(reading, source=None, since=None, data=b"", gathering=False)
        if sender in reading.view.base.replicas:
            self.reading = replace(reading, answers=with_answer(reading.answers, sender, message.held))
            self._choose_source(patient=True)

    def _choose_source(self, *, patient: bool) -> None:
        reading = self.reading
        assert reading is not None
        if reading.source is not None:
            return
        view = reading.view
        holders = [(node, held) for node, held in reading.answers if held is not None]
        whole = [(node, held) for node, held in holders if held.whole]
        # An elector of this view was alive when it was made. Before it answers, no replica that lost its
        # memory is read, however long that takes. If it is silent for good, the next view does without it.
        answered = {node for node, _ in reading.answers}
        silent = [node for node in view.base.replicas if node not in answered]
        wait = bool(silent) if patient else any(node in view.electors for node in silent)
        if wait and (view.rescued or not whole):
            return
        if not holders:
            if view.rescued and reading.answers:
                self._read(None, encode(State((), None, b"")))
            return
        chosen = (whole if whole and not view.rescued else holders).copy()
        chosen.sort(
            key=lambda pair: (pair[1].chain.generation, pair[1].epoch, pair[1].applied, pair[0] == self.me)
        )
        node, held = chosen[-1]
        if node == self.me and held == self._held_for(view):
            self._read(held, None)
        else:
            self.reading = replace(reading, source=(node, held))
            self._send(node, Fetch(view, held, 0, self._place_in(held.chain, view)))

    def _on_fetch(self, sender: Node, message: Fetch) -> None:
        view = message.view
        if not self._follow(sender, view):
            return
        held = self._held_for(view)
        if held is None or held != message.held:
            self._send_safely(sender, Sealed(view.chain, view.epoch, held))
            return
        since = message.since
        state = self._records_since(since, held)
        if state is None:
            since, state = None, self._offer(held)
        data = state[message.offset : message.offset + self.settings.piece_bytes]
        if message.offset + len(data) >= len(state):
            self.offered = None
        self._send(sender, Piece(view.chain, view.epoch, held, message.offset, len(state), data, since))

    def _on_piece(self, sender: Node, message: Piece) -> None:
        reading = self.reading
        if (
            reading is None
            or reading.source != (sender, message.held)
            or (message.chain, message.epoch) != epoch_of(reading.view)
            or message.offset != len(reading.data)
            or message.since not in (None, self._place_in(message.held.chain, reading.view))
            or (reading.data and message.since != reading.since)
        ):
            return
        if not len(reading.data) + len(message.data) <= message.total <= MAX_STATE_BYTES or not message.data:
            raise PeerError(
                f"a piece at {message.offset} of a state of {message.total} bytes does not fit it"
            )
        data = reading.data + message.data
        if len(data) < message.total:
            self.reading = replace(reading, since=message.since, data=data)
            self._send(sender, Fetch(reading.view, message.held, len(data), message.since))
        elif message.since is None:
            self.reading = replace(reading, since=None, data=data, gathering=True)
            self.outputs.append(Gather(reading.view, sender, message.held.whole, data))
        else:
            self._catch_up(message.since, message.held, data)
            self._read(message.held, None)

    def _read(self, held: Held | None, state: bytes | None) -> None:
        """The state of the base is here: that of a view to fill, or of a chain to take in."""
        assert self.reading is not None
        view, self.reading = self.reading.view, None
        if view.stage == CLOSED:
            self._write_import(view, self._snapshot() if state is None else state)
            return
        if view.rescued and held is not None:
            read = decode_state(self._snapshot() if state is None else state)
            state = encode(replace(read, absorbed=join_chains(read.absorbed, (held.chain,), view.chain)))
        self.installing = Installing(view, held, state, ())
        for node in view.replicas:
            self._send(node, Offer(view, None if view.rescued else held))

    # Installing on all replicas

    def _on_offer(self, sender: Node, message: Offer) -> None:
        view, held = message.view, message.held
        if not self._may_install(sender, view):
            return
        if held is not None and self._place_in(held.chain, view) == (held.epoch, held.applied):
            self._install(view, sender, None, whole=held.whole)
        else:
            if self.incoming is None or (self.incoming.chain, self.incoming.epoch) != epoch_of(view):
                self.incoming = Incoming(view.chain, view.epoch, None, b"")
            self._ask_more(sender, view, self.incoming)

    def _on_load(self, sender: Node, message: Load) -> None:
        view, incoming = message.view, self.incoming
        if not self._may_install(sender, view):
            return
        if incoming is None or (incoming.chain, incoming.epoch) != epoch_of(view):
            return
        fits = (incoming.since,) if incoming.data else (None, self._place_in(view.chain, view))
        if message.offset != len(incoming.data) or message.since not in fits:
            self._ask_more(sender, view, incoming)
            return
        if not message.offset + len(message.data) <= message.total <= MAX_STATE_BYTES or not message.data:
            raise PeerError(
                f"a piece at {message.offset} of a state of {message.total} bytes does not fit it"
            )
        data = incoming.data + message.data
        if len(data) < message.total:
            self.incoming = replace(incoming, since=message.since, data=data)
            self._ask_more(sender, view, self.incoming)
        elif message.since is None:
            self.incoming = replace(incoming, since=None, data=data, gathering=True)
            self.outputs.append(Gather(view, sender, message.whole, data))
        else:
            self._catch_up(message.since, None, data)
            self._install(view, sender, None, whole=message.whole)

    def _ask_more(self, leader: Node, view: View, incoming: Incoming) -> None:
        if incoming.gathering:
            return  # all of it is here
        since = incoming.since if incoming.data else self._place_in(view.chain, view)
        self._send(leader, More(view.chain, view.epoch, len(incoming.data), since))

    def _may_install(self, sender: Node, view: View) -> bool:
        if not self._follow(sender, view):
            return False
        if sender != view.responsible or self.me not in view.replicas:
            raise PeerError(f"{sender.hex()} installs epoch {view.epoch}, which is not for it or not for us")
        if self._is_lapsed(view):
            self._send(sender, Refused(view))
            return False
        if (self.chain, self.epoch) == epoch_of(view):
            # Once per epoch. It may not be durable yet: the answer goes behind whatever the log has to do.
            done = Send(sender, Installed(view.chain, view.epoch))
            self.outputs.append(Append((), False, (done,)))
            return False
        return True

    def _on_more(self, sender: Node, message: More) -> None:
        installing = self.installing
        if installing is None or (message.chain, message.epoch) != epoch_of(installing.view):
            return
        held, since, data = installing.held, message.since, installing.state
        if data is not None:
            since = None
        else:
            assert held is not None
            data = self._records_since(since, held)
            if data is None:
                since, data = None, self._offer(held)
        if sender not in installing.view.replicas or not 0 <= message.offset < len(data):
            raise PeerError(
                f"{sender.hex()} asks for a state from {message.offset}, which is not for it or over"
            )
        piece = data[message.offset : message.offset + self.settings.piece_bytes]
        whole = held is None or held.whole
        self._send(sender, Load(installing.view, whole, message.offset, len(data), piece, since))

    def _on_installed(self, sender: Node, message: Installed) -> None:
        installing = self.installing
        if installing is None or (message.chain, message.epoch) != epoch_of(installing.view):
            return
        if sender in installing.view.replicas and sender not in installing.done:
            self.installing = replace(installing, done=tuple(sorted((*installing.done, sender))))

    # Bodies of a state that came

    def gathered(self, gather: Gather, state: bytes | None, now_us: int) -> None:
        """The bodies of a state that came are here, and this is the state; None: its source has them no more,
        so that what is wanted is asked for anew."""
        start = self._begin(now_us)
        if self.awaits(gather):
            reading = self.reading
            if reading is not None and reading.gathering:
                if state is None:
                    self._begin_reading(gather.view)
                else:
                    assert reading.source is not None
                    self._read(reading.source[1], state)
            elif state is None:
                self.incoming = None  # the next offer begins anew
            else:
                self._install(gather.view, gather.source, state, whole=gather.whole)
        self._end(start)

    def awaits(self, gather: Gather) -> bool:
        """Whether that is still wanted."""
        reading, incoming = self.reading, self.incoming
        if reading is not None and reading.gathering:
            return reading.view == gather.view and reading.source is not None
        return (
            incoming is not None
            and incoming.gathering
            and (incoming.chain, incoming.epoch) == epoch_of(gather.view)
        )

    def doubt(self, now_us: int) -> None:
        """Something of what is held here cannot be read: another replica is, if there is one."""
        start = self._begin(now_us)
        self.restarted, self.broken = True, self.serving
        self.attempts, self.attempt_at = 0, None
        self._end(start)

    # Serving: writing to all

    def refusal(self) -> str:
        """Why a write would be refused now; empty if it is not. Whoever is refused is told `view`."""
        if not self.serving:
            return "moved"
        if self.stalled:
            return "stalled"
        return "full" if self._is_full() else ""

    def submit(self, payload: bytes, now_us: int, *, durable: bool) -> int:
        """Write to all replicas. Kept with the returned number says that all have it."""
        if reason := self.refusal():
            raise BugError(f"a write was submitted though it is to be refused: {reason}")
        if len(payload) > MAX_WRITE_BYTES:
            raise UsageError(f"a write of {len(payload)} bytes is over the limit of {MAX_WRITE_BYTES}")
        start = self._begin(now_us)
        number = self._write(payload, durable, None)
        self._end(start)
        return number

    def _serve(self, view: View) -> None:
        self.serving, self.stalled, self.kept = True, False, 0
        self.acks = dict.fromkeys(view.replicas, 0)
        self._tell(Serving(view))

    def _stop(self, view: View) -> None:
        self.serving, self.stalled, self.importing = False, False, None
        self.acks, self.pending, self.pending_bytes, self.kept = {}, {}, 0, 0
        self._tell(Stopped(view))

    def _write(self, payload: bytes, durable: bool, part: Part | None) -> int:
        view = self.view
        assert view is not None
        write = Write(view.chain, view.epoch, self.applied + 1, payload, durable, part)
        answer = self._apply(write)
        self.pending[write.number] = Pending(write, self.now_us, answer)
        self.pending_bytes += len(payload)
        for node in view.replicas[1:]:
            self._send(node, write)
        self._count(self.me, self._safe_number())
        return write.number

    def _on_write(self, sender: Node, message: Write) -> None:
        view = self.view
        if view is None or (message.chain, message.epoch) != epoch_of(view) or view.stage == CLOSED:
            if view is not None:
                self._send(sender, Know(view))
            return
        if sender != view.responsible or self.me not in view.replicas:
            raise PeerError(f"{sender.hex()} writes in epoch {view.epoch}, for which it is not responsible")
        if (self.chain, self.epoch) != epoch_of(view) or self._is_lapsed(view):
            self._send(sender, Refused(view))
            return
        gap = message.number > self.applied + 1
        if message.number == self.applied + 1:
            self._apply(message)
        if gap or self.synced >= self.last_durable:
            self._send(sender, Ack(message.chain, message.epoch, self._safe_number(), gap))

    def _on_synced(self, sender: Node, message: Synced) -> None:
        if sender != self.me:
            raise PeerError(f"{sender.hex()} says what the log of this broker has")
        view = self.view
        if (self.chain, self.epoch) != (message.chain, message.epoch) or message.number <= self.synced:
            return
        self.synced = message.number
        if self.serving:
            self._count(self.me, self._safe_number())
        elif (
            view is not None
            and epoch_of(view) == (message.chain, message.epoch)
            and not self._is_lapsed(view)
        ):
            self._send(view.responsible, Ack(message.chain, message.epoch, self._safe_number(), gap=False))

    def _on_ack(self, sender: Node, message: Ack) -> None:
        view = self.view
        if not self.serving or view is None or (message.chain, message.epoch) != epoch_of(view):
            return
        if sender not in self.acks or not 0 <= message.number <= self.applied:
            raise PeerError(f"{sender.hex()} acknowledges write {message.number} of {self.applied}")
        self._count(sender, message.number)
        if message.gap:
            self._write_again(sender)

    def _count(self, node: Node, number: int) -> None:
        if number <= self.acks[node]:
            return
        self.acks[node] = number
        everywhere = min(self.acks.values())
        while self.kept < everywhere:
            self.kept += 1
            pending = self.pending.pop(self.kept)
            self.pending_bytes -= len(pending.write.payload)
            self.stalled = False
            self._tell(Kept(pending.write.epoch, self.kept, pending.answer))
        if self.importing is not None and self.kept >= self.importing.last:
            closed, self.importing = self.importing.view, None
            assert self.view is not None
            for other in sorted({*closed.electors, *closed.replicas, *closed.base.replicas} - {self.me}):
                self._send(other, Ended(closed.chain, self.view))

    def _write_again(self, node: Node) -> None:
        for number in range(self.acks[node] + 1, self.applied + 1):
            if number in self.pending:
                self._send(node, self.pending[number].write)
