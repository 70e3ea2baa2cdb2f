"""A publisher hosting broker and a subscriber hosting broker joined by hand, with disks that crash.

What the routing core and the drivers do in earnest is done here in a few lines, so that the durable cores
are tested by themselves: the link loses segments, the cache at the subscriber's broker forgets, disks lose
what was not synced, or keep it without saying so, and fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from tests.worlds.turns import Turns

from postroad.durable.publisher import pubend as durable_pubend
from postroad.durable.publisher.pubend import PUBLISHERS, TABLE, DurablePubend, Frame, PubendPort
from postroad.durable.publisher.pubend_rows import read_facts, read_publisher
from postroad.durable.publisher.release import TABLE as OWNERS
from postroad.durable.publisher.release import ReleaseMerger, ReleaseRoot, RetentionPolicy, read_owner
from postroad.durable.subscriber import catchup, constream, cursor, filtering, hosting
from postroad.durable.subscriber.filtering import filtering_stream
from postroad.durable.subscriber.hosting import REPORT_US, TABLES, Hosting
from postroad.durable.subscriber.outputs import Confirmed, Deliver, DeliverGap, Output, Reported, Wants
from postroad.durable.subscriber.subscriptions import Attachment
from postroad.errors import PostroadError, StorageError
from postroad.events.batch import BatchBuilder, EventBatch
from postroad.events.token import CheckpointToken
from postroad.ids import IdSource
from postroad.seam.effects import Note
from postroad.seam.storage import (
    Append,
    Appended,
    AppendFailed,
    Chop,
    LogStream,
    Read,
    ReadDone,
    Save,
    Saved,
    SaveFailed,
    StorageInput,
    StreamKind,
)
from postroad.seam.turn import Turn
from postroad.selectors import Selector
from postroad.streams import knowledge
from postroad.streams.knowledge import KnowledgeStream, Segment
from postroad.streams.spans import Span, overlaps, subtract, union
from postroad.wire.frames import DEFAULT_LIMITS

PUBEND = 7 << 32
EVENTS = LogStream(StreamKind.EVENTS, PUBEND)
Record = tuple[int, int, bytes]
TOPICS = ["a", "b", "c/d", "c/e"]
SMALL = {
    catchup: {"WINDOW_TICKS": 3, "WINDOW_SPANS": 2, "HELD_BYTES": 600, "NEAR_TICKS": 1},
    constream: {"RECENT_BYTES": 300, "RECENT_SEGMENTS": 2, "PENDING_BYTES": 2_000},
    durable_pubend: {"READ_BYTES": 300, "CHECKPOINT_BYTES": 1_000, "MARK_BYTES": 200, "MAX_MARKS": 8},
    filtering: {
        "BUFFER_TICKS": 4,
        "READ_BYTES": 60,
        "CHECKPOINT_BYTES": 100,
        "DENSE_HOPS": 2,
        "HOP_BYTES": 20,
        "MAX_PENDING_BYTES": 1_200,
    },
    hosting: {"MAX_SAVES": 2},
    knowledge: {"JOIN_SEGMENTS": 3, "SMALL_BYTES": 800},
    cursor: {"MAX_UNACKED": 2},
}


def batch_of(ids: IdSource, topics: list[str], now_ms: int, channel: int = 1) -> EventBatch:
    builder = BatchBuilder()
    for topic in topics:
        builder.add(ids.next(now_ms), topic, {}, topic.encode(), DEFAULT_LIMITS)
    return EventBatch.parse(builder.finish(channel=channel), DEFAULT_LIMITS)


class Disk:
    """A log and tables: what is on disk, and what was asked for and is not."""

    def __init__(self) -> None:
        self.records: dict[LogStream, list[Record]] = {}
        self.chopped: dict[LogStream, int] = {}
        self.last: dict[LogStream, int] = {}
        self.tables: dict[str, dict[bytes, bytes]] = {}
        self.queue: list[Append | Save] = []
        self.reads: list[Read] = []
        self.bytes = 0

    def ask(self, effect: object) -> bool:
        if isinstance(effect, Append | Save):
            self.queue.append(effect)
        elif isinstance(effect, Read):
            self.reads.append(effect)
        elif isinstance(effect, Chop):
            self.chopped[effect.stream] = max(self.chopped.get(effect.stream, 0), effect.tick)
            held = self.records.get(effect.stream, [])
            self.records[effect.stream] = [one for one in held if one[1] > effect.tick]
        else:
            return False
        return True

    def _write(self, effect: Append | Save) -> None:
        if isinstance(effect, Append):
            last = self.last.get(effect.stream, 0)
            assert last <= effect.first < effect.last, "records overlap"
            self.last[effect.stream] = effect.last
            self.records.setdefault(effect.stream, []).append((effect.first, effect.last, effect.data))
            self.bytes += len(effect.data)
            return
        table = self.tables.setdefault(effect.table, {})
        for key, value in effect.rows:
            if value is None:
                table.pop(key, None)
            else:
                table[key] = value

    def sync(self) -> list[StorageInput]:
        """Everything asked for so far is on disk."""
        queue, self.queue = self.queue, []
        done: list[StorageInput] = []
        for effect in queue:
            self._write(effect)
            done.append(Appended(tag=effect.tag) if isinstance(effect, Append) else Saved(tag=effect.tag))
        return done + self.read()

    def fail(self) -> list[StorageInput]:
        error = StorageError("the disk is full")
        queue, self.queue = self.queue, []
        return [
            AppendFailed(tag=one.tag, error=error)
            if isinstance(one, Append)
            else SaveFailed(tag=one.tag, error=error)
            for one in queue
        ]

    def read(self) -> list[StorageInput]:
        reads, self.reads = self.reads, []
        return [self.answer(one) for one in reads]

    def answer(self, wanted: Read) -> ReadDone:
        records: list[Record] = []
        budget, more = wanted.limit_bytes, False
        for record in self.records.get(wanted.stream, []):
            if record[1] > wanted.start and record[0] < wanted.end:
                if budget <= 0:
                    more = True
                    break
                records.append(record)
                budget -= len(record[2])
        known = max(self.last.get(wanted.stream, 0), self.chopped.get(wanted.stream, 0))
        end = records[-1][1] if more else min(wanted.end, known)
        covered = union((first, last) for first, last, _ in records)
        chopped = min(self.chopped.get(wanted.stream, 0), wanted.end)
        missing = subtract([(wanted.start, end)] if wanted.start < end else [], covered)
        if chopped > wanted.start:
            missing = union([*missing, (wanted.start, chopped)])
        return ReadDone(tag=wanted.tag, records=tuple(records), missing=tuple(missing), more=more)

    def crash(self, random: Random) -> None:
        """Of what was asked for a prefix is on disk: of rows a shorter one than of records."""
        appended = random.randint(0, len(self.queue))
        saved = random.randint(0, appended)
        for at, effect in enumerate(self.queue[:appended]):
            if isinstance(effect, Append) or at < saved:
                self._write(effect)
        self.queue, self.reads = [], []

    def state(self, stream: LogStream) -> dict[str, int]:
        chopped = self.chopped.get(stream, 0)
        return {"last": max(self.last.get(stream, 0), chopped), "chopped": chopped}


@dataclass
class Client:
    """A subscriber that keeps its token and what it got in one transaction, or lets the broker keep it."""

    name: str
    topic: str
    ack: str
    window: int = 4_000
    session: int | None = None
    number: int = 0
    token: CheckpointToken = field(default_factory=CheckpointToken)
    started: int | None = None
    got: list[int] = field(default_factory=list)  # ticks of events, consumed
    gaps: list[Span] = field(default_factory=list)
    inbox: list[Deliver | DeliverGap] = field(default_factory=list)
    held: int = 0  # bytes in the inbox
    seen: int = 0  # the end of the newest message on this connection
    began: int = 0  # where this connection began
    confirmed: int = 0  # acknowledged and confirmed
    pending: dict[int, int] = field(default_factory=dict)  # ticket -> tick


class World:
    def __init__(self, random: Random, policy: RetentionPolicy, clients: list[Client]) -> None:
        self.random = random
        self.policy = policy
        self.clients = clients
        self.now = 1_000_000_000
        self.tickets = 0
        self.sessions = 0
        self.boot = 0
        self.ids = IdSource(1, 9)
        self.truth: dict[int, str] = {}  # every tick ever on the publishing broker's disk -> topic
        self.acknowledged: set[bytes] = set()
        self.unsure: list[EventBatch] = []  # what a publisher has no answer for
        self.link: list[Segment] = []
        self.p_disk, self.h_disk = Disk(), Disk()
        self.merger = ReleaseMerger()
        self.told = 0  # the newest tick the publishing broker ever spoke of
        self.start_publisher()
        self.start_host()

    # ---- the publishing broker

    def start_publisher(self) -> None:
        self.link.clear()
        self.asked: list[Span] = []
        self.p_turns = Turns(self.p_disk.tables)
        board = self.p_turns.board
        port = PubendPort(
            logged=self._logged,
            failed=lambda _turn, _frames, _error: None,
            reserved=self._reserved,
            read=self._was_read,
            recovered=lambda _turn, _pubend, _again: None,
        )
        self.pubend = DurablePubend(
            PUBEND, limits=DEFAULT_LIMITS, cache_bytes=2_000, port=port, now_us=self.now
        )
        self.root = ReleaseRoot(PUBEND, self.policy, now_us=self.now)
        self.root.recover(board.table(OWNERS, read_owner))
        state = self.p_disk.state(EVENTS)
        self.pubend.recover(
            board.table(TABLE, read_facts),
            board.table(PUBLISHERS, read_publisher),
            last=state["last"],
            chopped=state["chopped"],
            suspect=False,
            now_us=self.now,
        )
        turn = self.p_turns.turn(self.now)
        self.pubend.read_tail(turn)
        while turn.effects:
            (read,) = turn.effects
            assert isinstance(read, Read)
            turn = self.p_turns.read(self.p_disk.answer(read), self.now)
        assert self.pubend.recovered
        assert self.pubend.last >= self.told, "a restart may assign a tick that was told silent"
        self.pubend.check()
        self.merger.resend(lambda _: True)
        self.report()

    @contextmanager
    def p_turn(self) -> Iterator[Turn]:
        turn = self.p_turns.turn(self.now)
        yield turn
        for effect in turn.effects:
            assert self.p_disk.ask(effect) or isinstance(effect, Note)

    def report(self) -> None:
        """Reports reach the pubend's broker."""
        for report in self.merger.take(lambda _: True).get(PUBEND, []):
            self.root.report(report)
        with self.p_turn() as turn:
            self.root.flush(turn)

    def publish(self, topics: list[str]) -> None:
        batches = [batch_of(self.ids, topics, self.now // 1000)]
        if self.unsure and self.random.random() < 0.5:
            batches = [*self.unsure, *batches]
            self.unsure = []
        for batch in batches:
            with self.p_turn() as turn:
                durable = self.pubend.stage(turn, [Frame(batch, len(batch.data), None)])
            if durable:
                self._acknowledge(durable)
            else:
                self.unsure.append(batch)

    def _acknowledge(self, frames: list[Frame]) -> None:
        for batch in [frame.batch for frame in frames]:
            self.acknowledged.update(batch.id(row) for row in range(batch.count))

    def _logged(self, _turn: Turn, _pubend: DurablePubend, segment: Segment, frames: list[Frame]) -> None:
        self._spread(segment)
        self._acknowledge(frames)
        self.unsure = [one for one in self.unsure if one.id(0) not in self.acknowledged]

    def _reserved(self, _turn: Turn, _pubend: DurablePubend, _error: PostroadError | None) -> None:
        pass

    def _was_read(self, _turn: Turn, _pubend: DurablePubend, segments: list[Segment]) -> None:
        self.link += segments

    def _spread(self, segment: Segment) -> None:
        assert segment.end > self.told or segment.lost
        self.told = max(self.told, segment.end)
        self.link.append(segment)

    def silence(self) -> None:
        with self.p_turn() as turn:
            segment = self.pubend.assert_silence(turn)
        if segment is not None:
            self._spread(segment)

    def sync_publisher(self, how: Callable[[], list[StorageInput]]) -> None:
        with self.p_turn() as turn:
            for item in how():
                self.p_turns.unanswered.answer(turn, item)
        for first, last, data in self.p_disk.records.get(EVENTS, []):
            batch = EventBatch.parse(data, DEFAULT_LIMITS)
            for tick, row in zip(batch.headers["tick"].tolist(), range(batch.count), strict=True):
                assert first < tick <= last
                self.truth[tick] = batch.topic(row)

    def crash_publisher(self) -> None:
        self.p_disk.crash(self.random)
        self.start_publisher()
        self.sync_publisher(list)

    def release(self) -> None:
        floor = self.root.floor(self.now, self.pubend.last, self.pubend.floor_for_size)
        with self.p_turn() as turn:
            self.root.flush(turn)
            self.pubend.release(turn, floor)
            self.pubend.checkpoint(turn)

    def nack(self, spans: list[Span]) -> None:
        for start, end in spans:
            segments, missing = self.pubend.answer(start, end, 1_000)
            self.link += segments
            with self.p_turn() as turn:
                self.pubend.read(turn, missing)

    # ---- the subscribers' broker

    def start_host(self) -> None:
        self.boot += 1
        self.cache = KnowledgeStream(joins=True)
        self.h_turns = Turns(self.h_disk.tables)
        self.outputs: deque[Output] = deque()
        self.wants: deque[Wants] = deque()
        self.performing = False
        self.host = Hosting(
            broker=3,
            boot=self.boot,
            perform=self._perform,
            room=self._room,
            spend=self._spend,
            need=dict,
            now_us=self.now,
        )
        self.by_number: dict[int, Client] = {}
        for client in self.clients:
            self._cut(client)
        self.host.recover({name: self.h_turns.board.table(name, reader) for name, reader in TABLES.items()})
        turn = self.h_turns.turn(self.now)
        self.host.follow(
            turn,
            PUBEND,
            start=self.pubend.last if self.boot == 1 else 0,
            **self.h_disk.state(filtering_stream(PUBEND)),
        )
        while self.host.position(PUBEND) is None:
            (read,) = turn.effects
            assert isinstance(read, Read)
            turn = self.h_turns.read(self.h_disk.answer(read), self.now)
        for effect in turn.effects:
            assert self.h_disk.ask(effect) or isinstance(effect, Note)
        self.host.check()

    @contextmanager
    def h_turn(self) -> Iterator[Turn]:
        turn = self.h_turns.turn(self.now)
        yield turn
        for effect in turn.effects:
            assert self.h_disk.ask(effect) or isinstance(effect, Note)

    def _room(self, number: int) -> bool:
        client = self.by_number.get(number)
        return client is not None and client.held < client.window

    def _spend(self, number: int, size: int) -> None:
        self.by_number[number].held += size

    @staticmethod
    def _cut(client: Client) -> None:
        client.session, client.inbox, client.held, client.pending = None, [], 0, {}

    def _perform(self, turn: Turn, outputs: list[Output]) -> None:
        """In order; curiosity last, since its answers make outputs that come after these."""
        self.outputs.extend(outputs)
        if self.performing:
            return
        self.performing = True
        while self.outputs or self.wants:
            if self.outputs:
                self._carry_out(self.outputs.popleft())
            else:
                self._find(turn, self.wants.popleft())
        self.performing = False

    def _carry_out(self, output: Output) -> None:
        match output:
            case Deliver() | DeliverGap():
                for number in output.subscribers:
                    self.by_number[number].inbox.append(output)
            case Confirmed():
                client = self.by_number.get(output.subscriber)
                if client is not None and output.error is None:
                    client.confirmed = max(client.confirmed, client.pending.pop(output.ticket, 0))
            case Reported():
                self.merger.report(output.pubend, output.report)
                if self.random.randrange(4):
                    self.report()  # else later
            case Wants():
                self.wants.append(output)

    def _find(self, turn: Turn, wants: Wants) -> None:
        hull = (wants.spans[0][0], wants.spans[-1][1])
        whole, gaps = self.cache.find(*hull, wants.need, whole=True)
        found = [one for one in whole if overlaps(wants.spans, one.start, one.end)]
        self.nack(subtract(wants.spans, subtract([hull], gaps)))
        if found:
            self.host.answer(turn, PUBEND, found, wants.subscriber)

    def receive(self, count: int, *, lose: bool = False) -> None:
        """The first segments on the link arrive."""
        arrived, self.link = self.link[:count], self.link[count:]
        if lose:
            return
        for segment in arrived:
            news = self.cache.accumulate(segment)
            with self.h_turn() as turn:
                while (after := self.cache.after(self.position, {})) is not None:
                    self.host.learn(turn, PUBEND, after)
                self.host.answer(turn, PUBEND, [segment, *news])

    @property
    def position(self) -> int:
        position = self.host.position(PUBEND)
        assert position is not None
        return position

    def curious(self) -> None:
        """Ask for what is missing between the horizon and what the pubend knows."""
        _, missing = self.cache.find(self.position, max(self.position, self.pubend.last), {})
        self.nack(missing)

    def sync_host(self, how: Callable[[], list[StorageInput]]) -> None:
        for item in how():
            with self.h_turn() as turn:
                self.h_turns.unanswered.answer(turn, item)

    def tick_host(self) -> None:
        with self.h_turn() as turn:
            self.host.tick(turn)

    def crash_host(self) -> None:
        self.h_disk.crash(self.random)
        self.start_host()

    # ---- subscribers

    def connect(self, client: Client) -> None:
        self.sessions += 1
        client.session = self.sessions
        token = None if client.ack or client.started is None else client.token
        wanted = Attachment(
            name=client.name,
            selector=Selector.parse(client.topic, ""),
            ack=client.ack,
            session=client.session,
            token=token,
        )
        client.seen = client.began = client.confirmed if client.ack else client.token.tick(PUBEND)
        with self.h_turn() as turn:
            attached = self.host.attach(turn, wanted)
        client.number = attached.subscription.id
        self.by_number[client.number] = client
        if PUBEND not in attached.subscription.cursors:
            # It is as new as can be: at the horizon, where the brokers upstream filter with it.
            assert client.started is None or not client.got
            client.started = self.position
            client.token = CheckpointToken({PUBEND: self.position})
            client.seen = client.confirmed = self.position
            with self.h_turn() as turn:
                self.host.begin(turn, client.number, PUBEND, self.position)
            self.host.confirm(client.number, 0)
            for _ in range(2):  # where too many saves are on their way, its own comes behind them
                self.tick_host()
                self.sync_host(self.h_disk.sync)
            self.now += REPORT_US  # it is confirmed when the pubend's broker has heard of it
            self.tick_host()
            self.report()

    def disconnect(self, client: Client) -> None:
        if client.session is not None:
            self.host.detach(client.session)
            self._cut(client)

    def consume(self, client: Client, count: int) -> None:
        """Take messages from the connection, checking each, and acknowledge now and then."""
        if client.session is None:
            return
        taken, client.inbox = client.inbox[:count], client.inbox[count:]
        for message in taken:
            client.held -= message.size
            assert message.start >= client.seen, f"{client.name}: {message.start} after {client.seen}"
            assert message.end > message.start
            client.seen = message.end
            if isinstance(message, DeliverGap):
                client.gaps.append((message.start, message.end))
            elif message.batch is not None:
                rows = message.batch.headers["tick"]
                ticks = (rows if message.rows is None else rows[message.rows]).tolist()
                assert ticks == sorted(set(ticks))
                assert message.start < ticks[0] <= ticks[-1] <= message.end
                client.got += ticks
            client.token = client.token.advanced(PUBEND, message.end)
        if taken and (client.ack or self.random.random() < 0.7):
            self.tickets += 1
            client.pending[self.tickets] = client.seen
            self.host.ack(client.session, {PUBEND: client.seen}, self.tickets)
            with self.h_turn() as turn:
                self.host.credit(turn, client.number)
                self.host.tick(turn)
        elif taken:
            with self.h_turn() as turn:
                self.host.credit(turn, client.number)

    def settle(self) -> None:
        """Everything heals: all are connected, nothing is lost, time passes."""
        calm = 0
        for _ in range(200):
            before = (self.position, [len(client.got) for client in self.clients])
            self.now += 600_000
            self.silence()
            self.sync_publisher(self.p_disk.sync)
            self.curious()
            self.sync_publisher(self.p_disk.sync)
            self.receive(len(self.link))
            for client in self.clients:
                if client.session is None:
                    self.connect(client)
                self.consume(client, len(client.inbox))
            self.tick_host()
            self.sync_host(self.h_disk.sync)
            self.check()
            moved = [len(client.got) for client in self.clients] != before[1]
            behind = [
                one for one in self.clients if one.number in self.host._pubends[PUBEND].catchups or one.inbox
            ]
            calm = 0 if moved or behind or self.link else calm + 1
            if calm == 4:
                return

    def check(self) -> None:
        self.pubend.check()
        self.root.check()
        self.host.check()
        assert self.pubend.floor <= max(self.pubend.last, 0)


def wanted(client: Client, topic: str) -> bool:
    return client.topic == "#" or topic == client.topic or topic.startswith(client.topic.rstrip("#"))
