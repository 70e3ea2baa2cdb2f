"""The arcs of one broker: each arc's core (`views`), joined to the network and to the disk.

Keys are grouped into arcs of equal length; an arc stands where its middle is. A broker has a core for every
arc that anybody told it something of. What a core asks for is done strictly in its order: while a row is
being saved, whatever the core says later waits behind it. So a log never has two things in another order
than the core meant.

A log stream per arc holds the records of its replica. A state may be larger than a record of the log, so a
record is written in pieces; the first byte says whether more follow. If the log cannot be written, the whole
state is written anew once it can: what is in memory is ahead of the disk then, and nothing was promised.

Another stream per arc holds bodies that memory has no room for (`bodies`). A state that came from another
broker refers to its stream: the records are asked for one by one, and appended here, before the core is told
that the state is whole. A start looks whether all records that its state refers to can be read.

**Founding** (responsibility 9). A broker that was told of nobody founds the chains of all arcs. One that was
told of others asks all that the overlay knows whether they know any chain; where none does, the one with the
lowest id founds. `founder` is saved first, so that a start that follows a crash goes on with it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from postroad.errors import PeerError, PostroadError
from postroad.queues.arc_state import Settings
from postroad.queues.bodies import Bodies
from postroad.queues.inbox import (
    Inboxes,
    Limits,
    Operation,
    Snapshot,
    Stored,
    decode_snapshot,
    extents_of,
    oldest_of,
    relocate,
    with_body,
)
from postroad.queues.messages import (
    CLOSED,
    NEW,
    STARTED,
    Append,
    Chain,
    Gather,
    Kept,
    Know,
    Mark,
    Message,
    Moved,
    Node,
    Output,
    Record,
    Row,
    Save,
    Send,
    Stalled,
    State,
    Stopped,
    Tell,
    View,
    Want,
    decode_state,
    encode,
)
from postroad.queues.messages import Bodies as BodiesMessage
from postroad.queues.views import Arc
from postroad.seam.storage import MAX_TICK, LogStream, ReadDone, StreamEnd, StreamKind
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.units import MIB, SECOND_US

TABLE: Final = "queues"
FOUNDER: Final = b"founder"  # the row that says that this broker founds
PIECE_BYTES: Final = 4 * MIB  # of a record of the log
READ_BYTES: Final = 16 * MIB
RETRY_US: Final = SECOND_US  # after which a disk that failed is tried again
RESEND_US: Final = SECOND_US // 2  # after which a record of bodies is asked for again
CHECK_BYTES: Final = 4 * MIB  # of bodies that a start reads at once
MAX_REMEMBERED: Final = 10_000  # names whose arc is known without a hash
MAX_STEPS: Final = 64  # of one arc in one turn, before others have theirs
_DRAWS: Final = 1 << 32
_KEY_BITS: Final = 128
_LAST, _MORE = b"\x00", b"\x01"

_ROWS: Final = msgspec.msgpack.Decoder(Row)
_RECORDS: Final = msgspec.msgpack.Decoder(tuple[Record, ...])
_ENCODER: Final = msgspec.msgpack.Encoder()


def key_of(name: str) -> bytes:
    """The key of an application (spec Q2)."""
    return hashlib.blake2b(name.encode(), digest_size=_KEY_BITS // 8, person=b"application").digest()


@dataclass(slots=True)
class _Gathering:
    """A state that came from another broker, and the records of bodies there that it refers to."""

    output: Gather
    state: State
    snapshot: Snapshot
    lengths: dict[int, int]  # record -> its least length, in order
    inline: bool  # the bodies go into the state
    records: dict[int, bytes] = field(default_factory=dict)  # of these
    awaited: int = 0  # the record that was asked for
    again_us: int | None = None  # when it is asked for again; None: it is being written


@dataclass(slots=True)
class _Hosted:
    """An arc's core and what is under way for it."""

    arc: Arc
    tail: int  # the last tick of its log stream
    queue: deque[Output] = field(default_factory=deque)  # what waits behind a row that is being saved
    saving: bool = False
    unlogged: bool = False  # the log lacks something that is in memory
    retry_us: int | None = None
    retry: Save | None = None
    gathering: _Gathering | None = None
    received: dict[tuple[Node, int], int] = field(default_factory=dict)  # records of others -> here, since
    # the last start: a later view need not ask for them again
    doubted: bool = False  # something of it could not be read


@dataclass(slots=True)
class _Loading:
    """An arc whose log is being read, and then the bodies that its state refers to."""

    end: StreamEnd
    position: int
    pieces: list[bytes] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    valid: bool = False  # the records begin with a mark, and none is missing since
    arc: Arc | None = None  # once the log was read
    unseen: dict[int, None] = field(default_factory=dict)  # records of bodies that are to be read, in order


class Arcs:
    """`say` sends a message about an arc; `kept`, `moved` and `stopped` are told what became of one, `woken`
    that the disk has answered.

    `streams`: the log streams that a start found; None: nothing is on disk.
    """

    def __init__(
        self,
        board: Switchboard,
        *,
        me: Node,
        boot: int,
        count: int,
        settings: Settings,
        limits: Limits,
        memory_bytes: int,
        streams: Mapping[LogStream, StreamEnd] | None,
        draw: Callable[[int], int],
        say: Callable[[Turn, Node, int, Message], None],
        kept: Callable[[Turn, int, Kept], None],
        moved: Callable[[Turn, int, View], None],
        stopped: Callable[[Turn, int], None],
        woken: Callable[[Turn], None],
    ) -> None:
        self.me, self.count = me, count
        self._boot, self._settings, self._limits, self._draw = boot, settings, limits, draw
        self._say, self._kept, self._moved, self._stopped = say, kept, moved, stopped
        self._woken = woken
        self._disk = streams is not None
        self.bodies = Bodies(
            limit=memory_bytes, pinned_bytes=settings.log_bytes, streams=streams or {}, woken=woken
        )
        self._hosted: dict[int, _Hosted] = {}
        self._indices: dict[str, int] = {}  # what `index` answered
        self._loading: dict[int, _Loading] = {}
        self._harmed = 0  # arcs whose logs lack records, or may
        self._unfilled: dict[int, tuple[Chain, int]] = {}  # arcs whose newest view did not start: since when
        self._candidates: Callable[[bytes], list[Node]] | None = None
        self._stirred: set[int] = set()  # arcs whose deadline is to be looked up
        self._due_us: dict[int, int] = {}  # the deadlines of the others, by arc
        self._counters = dict.fromkeys(
            ("queue_views_total", "queue_stalls_total", "queue_disk_failures_total"), 0
        )
        rows = dict(board.table(TABLE, _read_row)) if self._disk else {}
        self.founder = rows.pop(FOUNDER, None) is not None
        self._rows = {int.from_bytes(key, "big"): _ROWS.decode(row) for key, row in rows.items()}
        for stream, end in (streams or {}).items():
            if stream.kind == StreamKind.QUEUES and stream.id < count:
                self._loading[stream.id] = _Loading(end, end.chopped)
        board.start(self._start)

    # ---- where things are

    def index(self, name: str) -> int:
        """The arc of an application."""
        index = self._indices.get(name)
        if index is None:
            if len(self._indices) >= MAX_REMEMBERED:
                self._indices.clear()
            index = self._indices[name] = int.from_bytes(key_of(name), "big") * self.count >> _KEY_BITS
        return index

    def key(self, index: int) -> bytes:
        """The middle of an arc."""
        return (((2 * index + 1) << _KEY_BITS) // (2 * self.count)).to_bytes(_KEY_BITS // 8, "big")

    def get(self, index: int) -> Arc | None:
        hosted = self._hosted.get(index)
        return None if hosted is None else hosted.arc

    def view(self, index: int) -> View | None:
        hosted = self._hosted.get(index)
        return None if hosted is None else hosted.arc.view

    def machine(self, index: int) -> Inboxes:
        return _machine(self._hosted[index].arc)

    def serves(self, index: int) -> bool:
        hosted = self._hosted.get(index)
        return hosted is not None and hosted.arc.serving

    def unfilled_since(self, index: int) -> int | None:
        """Since when the views of its chain do not start, as far as is known here."""
        unfilled = self._unfilled.get(index)
        return None if unfilled is None else unfilled[1]

    @property
    def loaded(self) -> bool:
        return not self._loading

    @property
    def knows_chain(self) -> bool:
        """Whether any arc has a chain, as far as is known here."""
        return bool(self._rows) or any(hosted.arc.view is not None for hosted in self._hosted.values())

    def hosted(self) -> Iterable[tuple[int, Arc]]:
        return ((index, hosted.arc) for index, hosted in sorted(self._hosted.items()))

    # ---- starting

    def _start(self, turn: Turn) -> None:
        for index in [index for index in self._rows if index not in self._loading and index < self.count]:
            self._host(turn, index, self._make(index, ()))
        for index in list(self._loading):
            self._read_on(turn, index)

    def _read_on(self, turn: Turn, index: int) -> None:
        loading = self._loading[index]
        if loading.position >= loading.end.last:
            if not loading.records and loading.end.last > loading.end.chopped:
                turn.note("warning", f"the log of arc {index} cannot be read: its replica begins anew")
            harmed = bool(loading.records) and (not loading.valid or loading.end.suspect)
            self._harmed += harmed
            loading.arc = self._make(index, loading.records, harmed=harmed)
            loading.records = []
            loading.unseen = dict.fromkeys(sorted(_machine(loading.arc).live))
            self._check_bodies(turn, index)
            return
        stream = LogStream(StreamKind.QUEUES, index)
        then = partial(self._was_read, index)
        turn.read(stream, loading.position, loading.end.last, READ_BYTES, then=then)

    def _was_read(self, index: int, turn: Turn, done: ReadDone) -> None:
        loading = self._loading[index]
        holes = [start for start, end in done.missing if end > loading.end.chopped]
        for _, last, data in done.records:
            while holes and holes[0] < last:
                holes.pop(0)
                loading.valid, loading.pieces = False, []  # what is behind a hole says nothing without it
            loading.position = last
            loading.pieces.append(data[1:])
            if data[:1] == _MORE:
                continue
            whole, loading.pieces = b"".join(loading.pieces), []
            try:
                records = _RECORDS.decode(whole)
            except msgspec.DecodeError:
                if loading.valid:
                    raise
                continue  # the rest of a record that began in the hole
            for record in records:
                if isinstance(record, Mark) and record.state is not None:
                    loading.records.clear()
                    loading.valid = True
                if loading.valid:
                    loading.records.append(record)
        if not done.more:
            loading.position = loading.end.last
            if holes:
                loading.valid = False
        self._read_on(turn, index)

    def _check_bodies(self, turn: Turn, index: int) -> None:
        """Read what is left to be read of the bodies that the state refers to: they may be damaged."""
        loading = self._loading[index]
        if loading.unseen:
            first, last = next(iter(loading.unseen)), next(reversed(loading.unseen))
            stream, then = LogStream(StreamKind.BODIES, index), partial(self._bodies_checked, index)
            turn.read(stream, first - 1, last, CHECK_BYTES, then=then)
            return
        assert loading.arc is not None
        del self._loading[index]
        if not self._loading and self._harmed:
            turn.note(
                "warning",
                f"the logs of {self._harmed} arcs of queues lack records, or may: other brokers have them; if"
                " there is none, `postroad queues rescue` goes on with what is here",
            )
        self._host(turn, index, loading.arc, loading.end.last)

    def _bodies_checked(self, index: int, turn: Turn, done: ReadDone) -> None:
        loading = self._loading[index]
        for _, last, _data in done.records:
            loading.unseen.pop(last, None)
        reached = done.records[-1][1] if done.more else MAX_TICK
        if any(tick <= reached for tick in loading.unseen):
            turn.note("warning", f"bodies of arc {index} cannot be read: its replica begins anew")
            loading.arc, loading.unseen = self._make(index, ()), {}
        self._check_bodies(turn, index)

    def _make(self, index: int, records: Iterable[Record], *, harmed: bool = False) -> Arc:
        row = self._rows.get(index)
        machine = Inboxes(self._limits)
        return Arc(self.me, self._boot, self._settings, machine, row, records, harmed=harmed)

    def _host(self, turn: Turn, index: int, arc: Arc, tail: int = 0) -> _Hosted:
        self._rows.pop(index, None)
        hosted = self._hosted[index] = _Hosted(arc, tail)
        arc.now_us = turn.now_us
        if arc.view is not None:
            self._note_stage(turn, index, arc.view)
        if self._candidates is not None:
            arc.set_candidates(self._candidates(self.key(index)), turn.now_us)
        self._run(turn, index, hosted)
        return hosted

    def _open(self, turn: Turn, index: int) -> _Hosted | None:
        """The arc, made if nobody spoke of it before; None while its log is being read."""
        hosted = self._hosted.get(index)
        if hosted is None and index not in self._loading:
            hosted = self._host(turn, index, self._make(index, ()))
        return hosted

    # ---- what happens to arcs

    def received(self, turn: Turn, sender: Node, index: int, message: Message) -> None:
        if not 0 <= index < self.count:
            raise PeerError(f"arc {index}: this network has {self.count}; all brokers are configured alike")
        hosted = self._open(turn, index)
        if hosted is None:
            return
        if isinstance(message, Want):
            tick = message.tick
            self.bodies.load(turn, index, tick, partial(self._send_bodies, sender, index, tick))
        elif isinstance(message, BodiesMessage):
            self._take_bodies(turn, sender, index, hosted, message)
        else:
            hosted.arc.receive(sender, message, turn.now_us)
            self._run(turn, index, hosted)

    def learn(self, turn: Turn, sender: Node, index: int, view: View) -> None:
        self.received(turn, sender, index, Know(view))

    def set_candidates(self, turn: Turn, closest: Callable[[bytes], list[Node]]) -> None:
        """The ring has changed: `closest(key)` are the live brokers, closest first."""
        self._candidates = closest
        for index, hosted in list(self._hosted.items()):
            hosted.arc.set_candidates(closest(self.key(index)), turn.now_us)
            self._run(turn, index, hosted)

    def submit(
        self,
        turn: Turn,
        index: int,
        payload: bytes,
        operations: Sequence[Operation],
        *,
        durable: bool,
        applied: Callable[[Inboxes], None],
    ) -> None:
        """Write operations, which the payload says, to all replicas. `applied` is called once it is done
        here, and before it can be kept."""
        hosted, machine = self._hosted[index], self.machine(index)
        machine.expect(payload, operations)
        hosted.arc.submit(payload, turn.now_us, durable=durable)
        applied(machine)
        self._run(turn, index, hosted)

    def found(self, turn: Turn) -> int:
        """Found the chain of every arc of which none is known here; returns how many."""
        if not self.founder:
            self.founder = True
            if self._disk:
                turn.save(TABLE, [(FOUNDER, b"1")], then=None)
        founded = 0
        for index in range(self.count):
            hosted = self._open(turn, index)
            if hosted is not None and hosted.arc.view is None:
                hosted.arc.found(turn.now_us)
                self._run(turn, index, hosted)
                founded += 1
        return founded

    def rescue(self, turn: Turn, index: int, reached: list[Node]) -> None:
        hosted = self._hosted[index]
        hosted.arc.rescue(reached, turn.now_us)
        self._run(turn, index, hosted)

    # ---- what cores ask for

    def _run(self, turn: Turn, index: int, hosted: _Hosted) -> None:
        """Do what the core asks for, in its order, and what follows at once from that."""
        self._stirred.add(index)
        machine = _machine(hosted.arc)
        # Bodies that are not needed any more are in the log in vain: the next mark lets them go.
        hosted.arc.log_bytes += machine.freed
        machine.freed = 0
        hosted.queue.extend(hosted.arc.take())
        while hosted.queue and not hosted.saving:
            output = hosted.queue.popleft()
            if isinstance(output, Send):
                if output.to != self.me:
                    self._say(turn, output.to, index, output.message)
                    continue
                hosted.arc.receive(self.me, output.message, turn.now_us)
                hosted.queue.extendleft(reversed(hosted.arc.take()))
            elif isinstance(output, Tell):
                self._tell(turn, index, output)
            elif isinstance(output, Save):
                self._save(turn, index, hosted, output)
            elif isinstance(output, Gather):
                self._gather(turn, index, hosted, output)
            else:
                self._append(turn, index, hosted, output)

    def _tell(self, turn: Turn, index: int, output: Tell) -> None:
        outcome = output.told
        if isinstance(outcome, Kept):
            self._kept(turn, index, outcome)
        elif isinstance(outcome, Stopped):
            self._stopped(turn, index)
        elif isinstance(outcome, Stalled):
            self._counters["queue_stalls_total"] += 1
            waited_s = self._settings.silent_us / SECOND_US
            turn.note(
                "warning", f"a write to arc {index} is not kept after {waited_s:.0f} s: others take over"
            )
        elif isinstance(outcome, Moved):
            self._counters["queue_views_total"] += 1
            self._note_stage(turn, index, outcome.view)
            if outcome.view.stage == STARTED:
                self._hosted[index].received.clear()
            self._moved(turn, index, outcome.view)

    def _note_stage(self, turn: Turn, index: int, view: View) -> None:
        if view.stage != NEW:
            self._unfilled.pop(index, None)
        elif index not in self._unfilled or self._unfilled[index][0] != view.chain:
            self._unfilled[index] = (view.chain, turn.now_us)

    def _save(self, turn: Turn, index: int, hosted: _Hosted, output: Save) -> None:
        if not self._disk:
            hosted.queue.extendleft(reversed(output.then))
            return
        hosted.saving = True
        row = (index.to_bytes(4, "big"), _ENCODER.encode(output.row))
        turn.save(TABLE, [row], then=partial(self._saved, index, output))

    def _saved(self, index: int, output: Save, turn: Turn, error: PostroadError | None) -> None:
        self._woken(turn)
        hosted = self._hosted[index]
        if error is not None:
            self._counters["queue_disk_failures_total"] += 1
            hosted.retry, hosted.retry_us = output, turn.now_us + RETRY_US
            self._stirred.add(index)
            return
        hosted.saving = False
        hosted.queue.extendleft(reversed(output.then))
        self._run(turn, index, hosted)

    def _append(self, turn: Turn, index: int, hosted: _Hosted, output: Append) -> None:
        if not self._disk:
            hosted.queue.extendleft(reversed(output.then))
            return
        if hosted.unlogged:
            return  # all of the state is written soon, and says the same
        data = _ENCODER.encode(output.records)
        stream = LogStream(StreamKind.QUEUES, index)
        before, oldest = hosted.tail, _oldest(output)
        for start in range(0, max(1, len(data)), PIECE_BYTES):
            end = start + PIECE_BYTES
            last = end >= len(data)
            hosted.tail += 1
            then = partial(self._appended, index, output if last else None, before, oldest)
            piece = (_LAST if last else _MORE) + data[start:end]
            turn.append(stream, hosted.tail - 1, hosted.tail, piece, then=then)

    def _appended(
        self,
        index: int,
        output: Append | None,
        before: int,
        oldest: int,
        turn: Turn,
        error: PostroadError | None,
    ) -> None:
        self._woken(turn)
        hosted = self._hosted[index]
        if error is not None:
            if not hosted.unlogged:
                self._counters["queue_disk_failures_total"] += 1
                hosted.unlogged, hosted.retry_us = True, turn.now_us + RETRY_US
                self._stirred.add(index)
            return
        if output is None:
            return
        if output.replaces and before:
            turn.chop(LogStream(StreamKind.QUEUES, index), before)
        if output.replaces and not hosted.received:
            self.bodies.chop(turn, index, oldest)
        hosted.queue.extend(output.then)
        self._run(turn, index, hosted)

    def _try_again(self, turn: Turn, index: int, hosted: _Hosted) -> None:
        """The disk failed a while ago."""
        hosted.retry_us = None
        if hosted.retry is not None:
            output, hosted.retry = hosted.retry, None
            self._save(turn, index, hosted, output)
        if hosted.unlogged:
            hosted.unlogged = False
            hosted.queue.append(hosted.arc.rewrite())
            self._run(turn, index, hosted)

    # ---- bodies of a state that came from another broker

    def _gather(self, turn: Turn, index: int, hosted: _Hosted, output: Gather) -> None:
        try:
            state = decode_state(output.state)
            if output.source == self.me or not oldest_of(state.machine):
                self._gathered(turn, hosted, output, output.state)
            else:
                snapshot = decode_snapshot(state.machine)
                inline = output.view.stage == CLOSED or not self._disk
                hosted.gathering = _Gathering(output, state, snapshot, extents_of(snapshot), inline)
                self._ask_bodies(turn, index, hosted)
        except PeerError as error:
            turn.note("warning", f"arc {index}: {error}")
            self._gathered(turn, hosted, output, None)
        hosted.queue.extendleft(reversed(hosted.arc.take()))

    @staticmethod
    def _gathered(turn: Turn, hosted: _Hosted, output: Gather, state: bytes | None) -> None:
        hosted.gathering = None
        hosted.arc.gathered(output, state, turn.now_us)

    def _ask_bodies(self, turn: Turn, index: int, hosted: _Hosted) -> None:
        """Ask for the next record, or go on with the state if all are here."""
        gathering = hosted.gathering
        assert gathering is not None
        source, records = gathering.output.source, gathering.records
        self._stirred.add(index)
        for tick in gathering.lengths:
            if tick not in records if gathering.inline else (source, tick) not in hosted.received:
                gathering.awaited, gathering.again_us = tick, turn.now_us + RESEND_US
                self._say(turn, source, index, Want(tick))
                return

        def change(message: Stored) -> Stored:
            extent = message.extent
            if extent is None:
                return message
            if gathering.inline:
                return Stored(**msgspec.structs.asdict(with_body(message, records[extent.tick])))
            here = hosted.received[source, extent.tick]
            return msgspec.structs.replace(message, extent=msgspec.structs.replace(extent, tick=here))

        machine = relocate(gathering.snapshot, change)
        state = encode(msgspec.structs.replace(gathering.state, machine=machine))
        self._gathered(turn, hosted, gathering.output, state)

    def _take_bodies(
        self, turn: Turn, sender: Node, index: int, hosted: _Hosted, message: BodiesMessage
    ) -> None:
        gathering = hosted.gathering
        if gathering is None or gathering.again_us is None or gathering.awaited != message.tick:
            return
        if sender != gathering.output.source:
            return
        if not hosted.arc.awaits(gathering.output):
            hosted.gathering = None
        elif not message.data:
            self._gathered(turn, hosted, gathering.output, None)
        elif len(message.data) < gathering.lengths[message.tick]:
            raise PeerError(f"a record of bodies of {len(message.data)} bytes is too short for its messages")
        elif gathering.inline:
            gathering.records[message.tick] = message.data
            self._ask_bodies(turn, index, hosted)
        else:
            gathering.again_us = None
            then = partial(self._bodies_written, index, gathering)
            self.bodies.write(turn, index, message.data, then)
        self._run(turn, index, hosted)

    def _bodies_written(self, index: int, gathering: _Gathering, turn: Turn, tick: int | None) -> None:
        hosted = self._hosted[index]
        if tick is not None:
            hosted.received[gathering.output.source, gathering.awaited] = tick
        if hosted.gathering is not gathering:
            return
        if not hosted.arc.awaits(gathering.output):
            hosted.gathering = None
        elif tick is None:
            gathering.again_us = turn.now_us + RETRY_US
            self._stirred.add(index)
        else:
            self._ask_bodies(turn, index, hosted)
        self._run(turn, index, hosted)

    def _send_bodies(self, to: Node, index: int, tick: int, turn: Turn, record: bytes | None) -> None:
        self._say(turn, to, index, BodiesMessage(tick, record or b""))

    def doubt(self, turn: Turn, index: int) -> None:
        """A body cannot be read: another replica takes over, if there is one."""
        hosted = self._hosted[index]
        if not hosted.doubted:
            hosted.doubted = True
            turn.note("error", f"bodies of arc {index} cannot be read: its other replicas are asked")
            hosted.arc.doubt(turn.now_us)
            self._run(turn, index, hosted)

    # ---- time

    def tick(self, turn: Turn) -> None:
        now_us = turn.now_us
        self._look_up()
        for index in sorted(index for index, due_us in self._due_us.items() if due_us <= now_us):
            hosted = self._hosted[index]
            if hosted.retry_us is not None and hosted.retry_us <= now_us:
                self._try_again(turn, index, hosted)
            again_us = None if hosted.gathering is None else hosted.gathering.again_us
            if again_us is not None and again_us <= now_us:
                self._ask_bodies_again(turn, index, hosted)
            for _ in range(MAX_STEPS):
                deadline = hosted.arc.next_deadline()
                if deadline is None or deadline > now_us:
                    break
                hosted.arc.tick(now_us, self._draw(_DRAWS))
                self._run(turn, index, hosted)
        self._look_up()
        if self._disk:
            self.bodies.tick(turn)

    def _ask_bodies_again(self, turn: Turn, index: int, hosted: _Hosted) -> None:
        gathering = hosted.gathering
        assert gathering is not None
        if hosted.arc.awaits(gathering.output):
            self._ask_bodies(turn, index, hosted)
        else:
            hosted.gathering = None
        self._run(turn, index, hosted)

    def _look_up(self) -> None:
        for index in self._stirred:
            hosted = self._hosted[index]
            self.bodies.note(index, _machine(hosted.arc))
            again_us = None if hosted.gathering is None else hosted.gathering.again_us
            deadlines = (hosted.arc.next_deadline(), hosted.retry_us, again_us)
            times = [time for time in deadlines if time is not None]
            if times:
                self._due_us[index] = min(times)
            else:
                self._due_us.pop(index, None)
        self._stirred.clear()

    def next_deadline(self) -> int | None:
        self._look_up()
        retry_us = self.bodies.next_deadline()
        return min((*self._due_us.values(), *(() if retry_us is None else (retry_us,))), default=None)

    def check(self) -> None:
        for hosted in self._hosted.values():
            hosted.arc.check()
            _machine(hosted.arc).check()

    def metrics(self) -> dict[str, int]:
        arcs = [hosted.arc for hosted in self._hosted.values()]
        return {
            **self._counters,
            **self.bodies.metrics(),
            "queue_arcs": len(arcs),
            "queue_arcs_served": sum(arc.serving for arc in arcs),
            "queue_replicas": sum(arc.chain is not None for arc in arcs),
            "queue_replicas_behind": sum(
                sum(number < arc.applied for number in arc.acks.values()) for arc in arcs
            ),
        }


def _machine(arc: Arc) -> Inboxes:
    assert isinstance(arc.machine, Inboxes)
    return arc.machine


def _oldest(output: Append) -> int:
    """The oldest record of bodies that is needed once this is in the log; 0: none is."""
    states = [record.state for record in output.records if isinstance(record, Mark) and record.state]
    return oldest_of(decode_state(states[-1]).machine) if states else 0


def _read_row(key: bytes, value: bytes) -> object:
    return value if key == FOUNDER else _ROWS.decode(value)
