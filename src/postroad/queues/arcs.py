"""The arcs of one broker: each arc's core (`views`), joined to the network and to the disk.

Keys are grouped into arcs of equal length; an arc stands where its middle is. A broker has a core for every
arc that anybody told it something of. What a core asks for is done strictly in its order: while a row is
being saved, whatever the core says later waits behind it. So a log never has two things in another order
than the core meant.

A log stream per arc holds the records of its replica. A state may be larger than a record of the log, so a
record is written in pieces; the first byte says whether more follow. If the log cannot be written, the whole
state is written anew once it can: what is in memory is ahead of the disk then, and nothing was promised.

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
from postroad.queues.inbox import Inboxes, Limits, Operation
from postroad.queues.messages import (
    Append,
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
    Stopped,
    Tell,
    View,
)
from postroad.queues.views import Arc
from postroad.seam.storage import LogStream, ReadDone, StreamEnd, StreamKind
from postroad.seam.switchboard import Switchboard
from postroad.seam.turn import Turn
from postroad.units import MIB, SECOND_US

TABLE: Final = "queues"
FOUNDER: Final = b"founder"  # the row that says that this broker founds
PIECE_BYTES: Final = 4 * MIB  # of a record of the log
READ_BYTES: Final = 16 * MIB
RETRY_US: Final = SECOND_US  # after which a disk that failed is tried again
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
class _Hosted:
    """An arc's core and what is under way for it."""

    arc: Arc
    tail: int  # the last tick of its log stream
    queue: deque[Output] = field(default_factory=deque)  # what waits behind a row that is being saved
    saving: bool = False
    unlogged: bool = False  # the log lacks something that is in memory
    retry_us: int | None = None
    retry: Save | None = None


@dataclass(slots=True)
class _Loading:
    """An arc whose log is being read."""

    end: StreamEnd
    position: int
    pieces: list[bytes] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    valid: bool = False  # the records begin with a mark, and none is missing since


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
        self._hosted: dict[int, _Hosted] = {}
        self._indices: dict[str, int] = {}  # what `index` answered
        self._loading: dict[int, _Loading] = {}
        self._candidates: Callable[[bytes], list[Node]] | None = None
        self._stirred: set[int] = set()  # arcs whose deadline is to be looked up
        self._due_us: dict[int, int] = {}  # the deadlines of the others, by arc
        self._counters = {"queue_views_total": 0, "queue_disk_failures_total": 0}
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
        found = self._indices.get(name)
        if found is None:
            if len(self._indices) >= MAX_REMEMBERED:
                self._indices.clear()
            found = self._indices[name] = int.from_bytes(key_of(name), "big") * self.count >> _KEY_BITS
        return found

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
        machine = self._hosted[index].arc.machine
        assert isinstance(machine, Inboxes)
        return machine

    def serves(self, index: int) -> bool:
        hosted = self._hosted.get(index)
        return hosted is not None and hosted.arc.serving

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
            self._host(turn, index, ())
        for index in list(self._loading):
            self._read_on(turn, index)

    def _read_on(self, turn: Turn, index: int) -> None:
        loading = self._loading[index]
        if loading.position >= loading.end.last:
            del self._loading[index]
            valid = loading.valid and not loading.end.suspect
            if not valid and loading.end.last > loading.end.chopped:
                turn.note("warning", f"the log of arc {index} cannot be read: its replica begins anew")
            self._host(turn, index, loading.records if valid else (), loading.end.last)
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
                loading.valid, loading.pieces = False, []
                loading.records.clear()
            loading.position = last
            loading.pieces.append(data[1:])
            if data[:1] == _MORE:
                continue
            whole, loading.pieces = b"".join(loading.pieces), []
            for record in _RECORDS.decode(whole):
                if isinstance(record, Mark) and record.state is not None:
                    loading.records.clear()
                    loading.valid = True
                if loading.valid:
                    loading.records.append(record)
        if not done.more:
            loading.position = loading.end.last
            if holes:
                loading.valid = False
                loading.records.clear()
        self._read_on(turn, index)

    def _host(self, turn: Turn, index: int, records: Iterable[Record] = (), tail: int = 0) -> _Hosted:
        row = self._rows.pop(index, None)
        arc = Arc(self.me, self._boot, self._settings, Inboxes(self._limits), row, records)
        hosted = self._hosted[index] = _Hosted(arc, tail)
        arc.now_us = turn.now_us
        if self._candidates is not None:
            arc.set_candidates(self._candidates(self.key(index)), turn.now_us)
        self._run(turn, index, hosted)
        return hosted

    def _open(self, turn: Turn, index: int) -> _Hosted | None:
        """The arc, made if nobody spoke of it before; None while its log is being read."""
        hosted = self._hosted.get(index)
        if hosted is None and index not in self._loading:
            hosted = self._host(turn, index)
        return hosted

    # ---- what happens to arcs

    def received(self, turn: Turn, sender: Node, index: int, message: Message) -> None:
        if not 0 <= index < self.count:
            raise PeerError(f"arc {index}: this network has {self.count}; all brokers are configured alike")
        hosted = self._open(turn, index)
        if hosted is not None:
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
            else:
                self._append(turn, index, hosted, output)

    def _tell(self, turn: Turn, index: int, output: Tell) -> None:
        told = output.told
        if isinstance(told, Kept):
            self._kept(turn, index, told)
        elif isinstance(told, Stopped):
            self._stopped(turn, index)
        elif isinstance(told, Moved):
            self._counters["queue_views_total"] += 1
            self._moved(turn, index, told.view)

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
        before = hosted.tail
        for start in range(0, max(1, len(data)), PIECE_BYTES):
            end = start + PIECE_BYTES
            last = end >= len(data)
            hosted.tail += 1
            then = partial(self._appended, index, output if last else None, before)
            piece = (_LAST if last else _MORE) + data[start:end]
            turn.append(stream, hosted.tail - 1, hosted.tail, piece, then=then)

    def _appended(
        self, index: int, output: Append | None, before: int, turn: Turn, error: PostroadError | None
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

    # ---- time

    def tick(self, turn: Turn) -> None:
        now_us = turn.now_us
        self._look_up()
        for index in sorted(index for index, due_us in self._due_us.items() if due_us <= now_us):
            hosted = self._hosted[index]
            if hosted.retry_us is not None and hosted.retry_us <= now_us:
                self._try_again(turn, index, hosted)
            for _ in range(MAX_STEPS):
                deadline = hosted.arc.next_deadline()
                if deadline is None or deadline > now_us:
                    break
                hosted.arc.tick(now_us, self._draw(_DRAWS))
                self._run(turn, index, hosted)
        self._look_up()

    def _look_up(self) -> None:
        for index in self._stirred:
            hosted = self._hosted[index]
            times = [time for time in (hosted.arc.next_deadline(), hosted.retry_us) if time is not None]
            if times:
                self._due_us[index] = min(times)
            else:
                self._due_us.pop(index, None)
        self._stirred.clear()

    def next_deadline(self) -> int | None:
        self._look_up()
        return min(self._due_us.values(), default=None)

    def check(self) -> None:
        for hosted in self._hosted.values():
            hosted.arc.check()
            assert isinstance(hosted.arc.machine, Inboxes)
            hosted.arc.machine.check()

    def metrics(self) -> dict[str, int]:
        arcs = [hosted.arc for hosted in self._hosted.values()]
        return {
            **self._counters,
            "queue_arcs": len(arcs),
            "queue_arcs_served": sum(arc.serving for arc in arcs),
            "queue_replicas": sum(arc.chain is not None for arc in arcs),
            "queue_replicas_behind": sum(
                sum(number < arc.applied for number in arc.acks.values()) for arc in arcs
            ),
        }


def _read_row(key: bytes, value: bytes) -> object:
    return value if key == FOUNDER else _ROWS.decode(value)
