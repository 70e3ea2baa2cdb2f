"""Brokers of one arc around the core's own code: a network that is a set, disks that forget, one machine.

`Station` is one broker: its core and its disk. `explore` walks every state that small worlds of stations can
reach: any message may come at any time, twice or never, since the network only grows; timers may fire at any
time. A core is deterministic, so each (station, input) is run once and remembered; a state of the world is
then a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from postroad.errors import BugError, PeerError
from postroad.queues.arc_state import ArcState, Machine, Settings
from postroad.queues.messages import (
    CLOSED,
    STARTED,
    Accept,
    Accepted,
    Ack,
    Append,
    Base,
    Busy,
    Chain,
    Fetch,
    Gather,
    Installed,
    Kept,
    Know,
    Load,
    Message,
    More,
    Node,
    Offer,
    Output,
    Piece,
    Prepare,
    Promise,
    Record,
    Refused,
    Row,
    Save,
    Seal,
    Sealed,
    Send,
    Tell,
    Told,
    View,
    decode,
    encode,
)
from postroad.queues.views import Arc

A, B, C, D = b"A", b"B", b"C", b"D"
PATIENT = Settings(
    replicas=2,
    electors=3,
    answer_us=0,
    retry_us=0,
    longest_us=0,
    resend_us=0,
    silent_us=1 << 60,
    tail_bytes=0,
    linger_us=0,
)
TIMED = Settings(replicas=2, electors=3)


class Ledger:
    """The replicated machine of these worlds: what was applied, in order; puts `p1` and accepts `a1`.

    Behind the `@` is the epoch that wrote it, which makes every write another one.
    """

    __slots__ = ("trail",)

    def __init__(self, trail: tuple[bytes, ...] = ()) -> None:
        self.trail = trail

    def apply(self, payload: bytes) -> object:
        self.trail = (*self.trail, payload)
        return payload

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self.trail)

    def size(self) -> int:
        return 1 << 20  # records are always shorter

    def install(self, snapshot: bytes) -> None:
        self.trail = msgspec.msgpack.decode(snapshot, type=tuple[bytes, ...]) if snapshot else ()

    def absorb(self, _chain: Chain, snapshot: bytes) -> None:
        self.trail = (*self.trail, *msgspec.msgpack.decode(snapshot, type=tuple[bytes, ...]))

    def last(self) -> int:
        """The last message ever put: ids of a source increase, so nothing up to it is taken again."""
        return max((number_of(write) for write in self.trail if write.startswith(b"p")), default=0)

    def queue(self) -> list[int]:
        waiting: list[int] = []
        last = 0
        for write in self.trail:
            number = number_of(write)
            if write.startswith(b"p") and number > last:
                last = number
                waiting.append(number)
            elif write.startswith(b"a") and number in waiting:
                waiting.remove(number)
        return waiting


def number_of(write: bytes) -> int:
    return int(write[1:].split(b"@")[0])


class Station:
    """A broker and its disk. `slow`: nothing is durable before `sync`; else whatever something waits for."""

    __slots__ = (
        "arc",
        "boot",
        "gathers",
        "kind",
        "log",
        "machine",
        "me",
        "now_us",
        "pending",
        "row",
        "sent",
        "settings",
        "slow",
        "told",
    )

    def __init__(self, me: Node, settings: Settings, machine: Callable[[], Machine] = Ledger) -> None:
        self.me, self.settings, self.machine, self.slow = me, settings, machine, False
        self.kind: type[Arc] = Arc
        self.boot = 1
        self.now_us = 0
        self.row: Row | None = None
        self.log: tuple[Record, ...] = ()
        self.pending: tuple[Save | Append, ...] = ()  # asked for and not durable
        self.gathers: list[Gather] | None = None  # copies whose bodies are on their way; None: they are here
        self.sent: list[tuple[Node, Message]] = []
        self.told: list[Told] = []
        self.arc: Arc | None = Arc(me, self.boot, settings, machine())

    @property
    def core(self) -> Arc:
        assert self.arc is not None
        return self.arc

    @property
    def ledger(self) -> Ledger:
        machine = self.core.machine
        assert isinstance(machine, Ledger)
        return machine

    def copy(self) -> Station:
        twin = Station.__new__(Station)
        for name in Station.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.sent, twin.told = [], []
        if self.arc is not None:
            twin.arc = self.arc.copy(Ledger(self.ledger.trail))
        return twin

    def key(self) -> tuple[object, ...]:
        core = None if self.arc is None else (self.arc.state(), self.ledger.trail)
        return (self.boot, self.row, self.log, self.pending, core)

    # What happens to it

    def do(self, act: Callable[[Arc], object]) -> None:
        """What the core then asks for is done; messages to itself come back at once."""
        act(self.core)
        self._perform(self.core.take())
        self.core.check()
        self.core.attempts = 0  # it only lengthens waits, which are nothing here

    def deliver(self, sender: Node, message: Message, now_us: int = 0) -> None:
        self.now_us = now_us
        self.do(lambda arc: arc.receive(sender, message, now_us))

    def sync(self) -> None:
        """The disk catches up."""
        while self.pending:
            self._flush()

    def crash(self, lost: str = "all") -> None:
        """`lost`: of what is not durable, `all`, only the `rows` or `nothing`."""
        for task in self.pending:
            if lost == "nothing" or (lost == "rows" and isinstance(task, Append)):
                self._store(task)
        self.pending, self.arc = (), None

    def restart(self) -> None:
        self.boot += 1
        self.arc = self.kind(self.me, self.boot, self.settings, self.machine(), self.row, self.log)
        self._perform(self.core.take())

    def _perform(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if isinstance(output, Send):
                if output.to == self.me:
                    self.core.receive(self.me, output.message, self.now_us)
                    self._perform(self.core.take())
                else:
                    self.sent.append((output.to, output.message))
            elif isinstance(output, Gather):
                if self.gathers is None:
                    self.core.gathered(output, output.state, self.now_us)
                    self._perform(self.core.take())
                else:
                    self.gathers.append(output)
            elif isinstance(output, Tell):
                self.told.append(output.told)
            else:
                again = isinstance(output, Save) or not output.records
                if again and output in self.pending:
                    continue  # the same once more, for a message that came twice
                self.pending = (*self.pending, output)
                behind = isinstance(output, Append) and not output.then and not output.replaces
                if not self.slow and not behind:
                    self.sync()

    def _flush(self) -> None:
        tasks, self.pending = self.pending, ()
        for task in tasks:
            self._store(task)
        for task in tasks:
            self._perform(task.then)

    def _store(self, task: Save | Append) -> None:
        if isinstance(task, Save):
            self.row = task.row
        else:
            self.log = task.records if task.replaces else (*self.log, *task.records)


def keep_all(_to: Node, _message: Message) -> bool:
    return False


class Network:
    """Stations that hear each other in order, on one clock, for the cases."""

    def __init__(
        self, names: Sequence[Node], settings: Settings = TIMED, machine: Callable[[], Machine] = Ledger
    ) -> None:
        self.stations = {name: Station(name, settings, machine) for name in names}
        self.now_us = 0
        self.mail: list[tuple[Node, Node, Message]] = []
        self.seen: list[tuple[Node, Node, Message]] = []  # all that was delivered
        self.told: dict[Node, list[Told]] = {name: [] for name in names}
        self.away: set[Node] = set()
        self.cut: set[tuple[Node, Node]] = set()  # (sender, receiver): nothing comes through
        self.drop: Callable[[Node, Message], bool] = keep_all  # what is lost on its way to a broker

    def __getitem__(self, name: Node) -> Station:
        return self.stations[name]

    def do(self, name: Node, act: Callable[[Arc], object]) -> None:
        self.stations[name].now_us = self.now_us
        self.stations[name].do(act)
        self._collect(name)

    def _collect(self, name: Node) -> None:
        station = self.stations[name]
        self.mail += [(name, to, message) for to, message in station.sent]
        self.told[name] += station.told
        station.sent, station.told = [], []

    def _hears(self, name: Node) -> bool:
        return name in self.stations and self.stations[name].arc is not None and name not in self.away

    def deliver(self, sender: Node, to: Node, message: Message) -> None:
        if self._hears(to) and (sender, to) not in self.cut:
            self.seen.append((sender, to, message))
            self.stations[to].deliver(sender, decode(encode(message)), self.now_us)
            self._collect(to)

    def settle(self, limit: int = 10_000) -> None:
        """Until no message is on its way."""
        while self.mail:
            limit -= 1
            assert limit > 0, "the brokers never stop talking"
            sender, to, message = self.mail.pop(0)
            if sender not in self.away and not self.drop(to, message):
                self.deliver(sender, to, message)

    def tick(self, name: Node) -> None:
        """The next timer of this broker fires, and what follows from it comes to everybody."""
        self.settle()
        deadline = self.stations[name].core.next_deadline()
        assert deadline is not None, f"{name!r} has nothing to do"
        self._fire(name, deadline)

    def _fire(self, name: Node, deadline_us: int) -> None:
        self.now_us = max(self.now_us, deadline_us)
        draw = name[0] * 0x9E37_79B1 % (1 << 32)  # brokers draw different numbers
        self.do(name, lambda arc: arc.tick(self.now_us, draw))
        self.settle()

    def run(self, seconds: int = 20) -> None:
        """Time passes until nobody waits for anything, or for so long."""
        self.settle()
        end_us = self.now_us + seconds * 1_000_000
        while True:
            waiting = [
                (max(deadline, self.now_us), name)
                for name in sorted(self.stations)
                if self._hears(name) and (deadline := self.stations[name].core.next_deadline()) is not None
            ]
            if not waiting or min(waiting)[0] > end_us:
                return
            deadline, name = min(waiting)
            self._fire(name, deadline)

    def candidates(self, order: Sequence[Node], *names: Node) -> None:
        for name in names or sorted(self.stations):
            if self.stations[name].arc is not None:
                self.do(name, lambda arc: arc.set_candidates(order, self.now_us))

    def crash(self, name: Node, lost: str = "all") -> None:
        self.stations[name].crash(lost)

    def restart(self, name: Node) -> None:
        self.stations[name].restart()
        self._collect(name)

    def serving(self) -> list[Node]:
        return [name for name in self.stations if self._hears(name) and self.stations[name].core.serving]

    def write(self, name: Node, payload: bytes, *, durable: bool = True) -> int:
        numbers: list[int] = []
        self.do(name, lambda arc: numbers.append(arc.submit(payload, self.now_us, durable=durable)))
        self.settle()
        return numbers[0]

    def kept(self, name: Node) -> list[object]:
        return [told.answer for told in self.told[name] if isinstance(told, Kept)]

    def view(self, name: Node) -> View:
        view = self.stations[name].core.view
        assert view is not None
        return view


def pair(
    settings: Settings = TIMED,
    names: Sequence[Node] = (A, B, C, D),
    machine: Callable[[], Machine] = Ledger,
) -> Network:
    """v0 = {A, B}, A responsible, electors A, B, C; the others know the view."""
    network = Network(names, settings, machine)
    network.do(A, lambda arc: arc.found(0))
    network.candidates((A, B, C), A)
    network.run()
    assert network.view(A).replicas == (A, B)
    assert network.view(A).stage == STARTED
    assert set(network.view(A).electors) == {A, B, C}
    for name in names:
        if network[name].core.view is None:
            network.deliver(A, name, Know(network.view(A)))
    network.told = {name: [] for name in names}
    network.seen.clear()
    network.mail.clear()
    return network


# Exploration


# Either plane can be explored in all orders while the other one's messages come at once.
AGREEMENT = (Prepare, Promise, Accept, Accepted, Busy, Know)
ANSWERS = (Promise, Accepted, Busy, Sealed, Piece, More, Installed, Ack)
TAKE_OVER = (Seal, Sealed, Fetch, Piece, Offer, More, Load, Installed, Refused)


@dataclass(frozen=True, kw_only=True)
class World:
    """The bounds of one exploration."""

    orders: dict[Node, tuple[Node, ...]]  # what each broker's ring takes for the closest, alive
    epochs: int  # the last epoch that is explored
    rounds: int = 1  # proposals of each broker since the beginning
    messages: int = 1
    accepts: bool = False
    durable: bool = True
    crashes: int = 0
    restarts: int = 0
    slow: bool = False
    tail_bytes: int = 0  # of records by which brokers catch up
    eager: tuple[type, ...] = ()  # kinds of messages that come at once; for one broker, perhaps never
    deaf: bool = True
    fragile: tuple[Node, ...] = (A, B, C, D)  # who may crash
    ticks: tuple[Node, ...] = (A, B, C, D)  # whose timers fire


@dataclass
class Result:
    states: int
    steps: int
    complete: bool
    violation: str = ""
    trail: list[str] = field(default_factory=list)
    served: int = 0  # epochs that were seen to serve, the highest


Outcome = tuple[int, int, tuple[Told, ...]]
Ghost = tuple[
    int, int, int, int, int
]  # acknowledged up to, accepts asked for and confirmed (bits), crashes, restarts
State = tuple[tuple[int, ...], int, Ghost]


@dataclass(frozen=True)
class Facts:
    """What the checks ask about one station, worked out once."""

    up: bool
    view: View | None
    serves: int  # the epoch, 0 if none
    takes: int  # the epoch of which it takes writes, 0 if none
    held: int  # the epoch whose state it has, on disk if it is down
    trail: tuple[bytes, ...]
    queue: tuple[int, ...]
    last: int
    epoch: int
    round: int
    broken: str


class Explorer:
    def __init__(self, world: World, kind: type[Arc]) -> None:
        self.world = world
        network = pair(names=sorted({A, B, C}.union(*world.orders.values())))
        self.names = sorted(network.stations)
        self.index = {name: at for at, name in enumerate(self.names)}
        self.ids: list[dict[tuple[object, ...], int]] = [{} for _ in self.names]
        self.stations: list[list[Station]] = [[] for _ in self.names]
        self.facts: list[list[Facts]] = [[] for _ in self.names]
        self.mail: dict[tuple[Node, Node, Message], int] = {}
        self.letters: list[tuple[Node, Node, Message]] = []
        self.to: list[int] = [0 for _ in self.names]  # bits of the messages to each
        self.eager = 0  # bits of those that come at once
        self.memory: dict[tuple[int, int, Any], Outcome] = {}
        self.cascades: dict[
            tuple[tuple[int, ...], int, int | None], tuple[tuple[int, ...], tuple[Told, ...], int]
        ] = {}
        self.verdicts: dict[tuple[tuple[int, ...], int, int, int], str] = {}
        self.answers: list[list[int]] = [[] for _ in self.names]  # letters to each that answer something
        self.dead: list[list[tuple[int, int]]] = [[] for _ in self.names]  # bits, of so many answers
        first: list[int] = []
        for at, name in enumerate(self.names):
            station = network[name].copy()
            settings = replace(PATIENT, tail_bytes=world.tail_bytes)
            station.slow, station.kind, station.settings = world.slow, kind, settings
            twin = kind.__new__(kind)
            for slot in ArcState.__slots__:
                setattr(twin, slot, getattr(station.core, slot))
            twin.settings, twin.round, twin.now_us, twin.resend_at = settings, 0, 0, None
            station.arc = twin
            station.do(lambda arc, name=name: arc.set_candidates(world.orders.get(name, ()), 0))  # type: ignore[misc]
            assert not station.sent
            first.append(self._intern(at, station))
        self.first: State = (tuple(first), 0, (0, 0, 0, 0, 0))

    def _intern(self, at: int, station: Station) -> int:
        key = station.key()
        number = self.ids[at].get(key)
        if number is None:
            number = self.ids[at][key] = len(self.stations[at])
            self.stations[at].append(station)
            self.facts[at].append(_facts(station))
            self.dead[at].append((0, 0))
        return number

    def _dead(self, at: int, number: int) -> int:
        """Messages to a station that can change nothing any more: answers about what is over."""
        bits, known = self.dead[at][number]
        answers = self.answers[at]
        if known < len(answers):
            arc = self.stations[at][number].arc
            for letter in answers[known:]:
                if arc is not None and _is_over(arc, self.letters[letter][2]):
                    bits |= 1 << letter
            self.dead[at][number] = (bits, len(answers))
        return bits

    def _post(self, sender: Node, to: Node, message: Message) -> int:
        if to not in self.index:
            return 0
        letter = (sender, to, message)
        number = self.mail.get(letter)
        if number is None:
            number = self.mail[letter] = len(self.letters)
            self.letters.append(letter)
            self.to[self.index[to]] |= 1 << number
            if isinstance(message, self.world.eager):
                self.eager |= 1 << number
            elif isinstance(message, ANSWERS):
                self.answers[self.index[to]].append(number)
        return 1 << number

    def act(self, at: int, number: int, name: Any, act: Callable[[Station], None]) -> Outcome:
        """The station after the act, the messages that it sent, what it told; run once."""
        key = (at, number, name)
        outcome = self.memory.get(key)
        if outcome is None:
            station = self.stations[at][number].copy()
            act(station)
            bits = 0
            for to, message in station.sent:
                bits |= self._post(self.names[at], to, message)
            told = tuple(told for told in station.told if isinstance(told, Kept))
            station.sent, station.told = [], []
            outcome = self.memory[key] = (self._intern(at, station), bits, told)
        return outcome

    # Steps

    def successors(self, state: State) -> list[tuple[Any, State]]:
        numbers, net, ghost = state
        steps: list[tuple[Any, State]] = []
        for at, number in enumerate(numbers):
            facts = self.facts[at][number]
            if not facts.up:
                if ghost[4] < self.world.restarts:
                    self._step(steps, state, at, "restart", Station.restart, (0, 0, 0, 0, 1))
                continue
            waiting = net & self.to[at]
            while waiting:
                bit = waiting & -waiting
                waiting ^= bit
                letter = bit.bit_length() - 1
                outcome = self._deliver(at, number, letter)
                if outcome[0] != number or outcome[1] & ~net or outcome[2]:
                    steps.append((letter, self._after(state, at, outcome)))
            if self.names[at] in self.world.ticks:
                self._tick(steps, state, at)
            if self.stations[at][number].pending:
                self._step(steps, state, at, "sync", Station.sync)
            if ghost[3] < self.world.crashes and self.names[at] in self.world.fragile:
                self._crash(steps, state, at)
            if facts.serves:
                self._clients(steps, state, at, facts)
        return steps

    def _deliver(self, at: int, number: int, letter: int) -> Outcome:
        outcome = self.memory.get((at, number, letter))
        if outcome is None:
            sender, _, message = self.letters[letter]
            outcome = self.act(at, number, letter, lambda station: station.deliver(sender, message))
        return outcome

    def _tick(self, steps: list[tuple[Any, State]], state: State, at: int) -> None:
        outcome = self.act(at, state[0][at], "tick", _tick)
        after = self._after(state, at, outcome)
        if after != state:
            steps.append(((self.names[at], "tick"), after))
        if outcome[1] & self.eager and self.world.deaf:
            for other in range(len(self.names)):
                if other != at and self.facts[other][state[0][other]].up:
                    label = f"tick, unheard by {self.names[other].decode()}"
                    steps.append(((self.names[at], label), self._after(state, at, outcome, deaf=other)))

    def _step(
        self,
        steps: list[tuple[Any, State]],
        state: State,
        at: int,
        name: Any,
        act: Callable[[Station], None],
        ghost: Ghost = (0, 0, 0, 0, 0),
    ) -> None:
        after = self._after(state, at, self.act(at, state[0][at], name, act), ghost)
        if after != state:
            steps.append(((self.names[at], name), after))

    def _after(
        self, state: State, at: int, outcome: Outcome, add: Ghost = (0, 0, 0, 0, 0), deaf: int | None = None
    ) -> State:
        numbers, net, (acked, asked, confirmed, crashes, restarts) = state
        number, bits, told = outcome
        stations = (*numbers[:at], number, *numbers[at + 1 :])
        if bits & self.eager:
            key = (stations, bits, deaf)
            found = self.cascades.get(key)
            if found is None:
                found = self.cascades[key] = self._cascade(*key)
            stations, more, bits = found
            told += more
        for kept in told:
            assert isinstance(kept, Kept)
            write = kept.answer
            assert isinstance(write, bytes)
            if write.startswith(b"p"):
                acked = max(acked, number_of(write))
            else:
                confirmed |= 1 << number_of(write)
        ghost = (acked, asked | add[1], confirmed, crashes + add[3], restarts + add[4])
        net |= bits
        for other, number in enumerate(stations):
            if self.facts[other][number].up:
                net &= ~self._dead(other, number)
            elif ghost[4] >= self.world.restarts:
                net &= ~self.to[other]
        return stations, net, ghost

    def _cascade(
        self, before: tuple[int, ...], bits: int, deaf: int | None
    ) -> tuple[tuple[int, ...], tuple[Told, ...], int]:
        """Deliver what comes at once, and what that leads to. Nobody hears or is heard by the deaf one."""
        stations = list(before)
        told: tuple[Told, ...] = ()
        rest = bits & ~self.eager
        waiting = [bits & self.eager]
        while waiting:
            bits = waiting.pop(0)
            while bits:
                bit = bits & -bits
                bits ^= bit
                letter = bit.bit_length() - 1
                sender, to, _ = self.letters[letter]
                at = self.index[to]
                if deaf in (at, self.index[sender]) or not self.facts[at][stations[at]].up:
                    continue
                stations[at], more, heard = self._deliver(at, stations[at], letter)
                told += heard
                rest |= more & ~self.eager
                if more & self.eager:
                    waiting.append(more & self.eager)
        return tuple(stations), told, rest

    def _crash(self, steps: list[tuple[Any, State]], state: State, at: int) -> None:
        self._step(steps, state, at, "crash", Station.crash, (0, 0, 0, 1, 0))
        if self.stations[at][state[0][at]].pending:
            for lost in ("rows", "nothing"):
                self._step(
                    steps,
                    state,
                    at,
                    f"crash, lost {lost}",
                    lambda st, lost=lost: st.crash(lost),
                    (0, 0, 0, 1, 0),
                )  # type: ignore[misc]

    def _clients(self, steps: list[tuple[Any, State]], state: State, at: int, facts: Facts) -> None:
        """A source sends one message at a time until it is kept; a consumer accepts what is kept."""
        acked = state[2][0]
        arc = self.stations[at][state[0][at]].core
        waiting = {pending.write.payload for pending in arc.pending.values()}
        number = acked + 1
        if number <= self.world.messages:
            put = b"p%d@%d" % (number, facts.serves)
            if number <= facts.last:
                if not any(write.startswith(b"p%d@" % number) for write in waiting):
                    numbers, net, ghost = state
                    steps.append(((self.names[at], "known"), (numbers, net, (number, *ghost[1:]))))
            elif put not in facts.trail:
                self._step(steps, state, at, put, self._submit(put))
        if self.world.accepts and facts.queue:
            first = facts.queue[0]
            accept = b"a%d@%d" % (first, facts.serves)
            if accept not in facts.trail and not any(write.startswith(b"p%d@" % first) for write in waiting):
                self._step(steps, state, at, accept, self._submit(accept), (0, 1 << first, 0, 0, 0))

    def _submit(self, payload: bytes) -> Callable[[Station], None]:
        durable = self.world.durable
        return lambda station: station.do(lambda arc: arc.submit(payload, 0, durable=durable))

    # Checks

    def within(self, state: State) -> bool:
        for at, number in enumerate(state[0]):
            facts = self.facts[at][number]
            if facts.epoch > self.world.epochs or facts.round > self.world.rounds:
                return False
        return True

    def violation(self, state: State) -> str:
        key = (state[0], *state[2][:3])
        verdict = self.verdicts.get(key)
        if verdict is None:
            verdict = self.verdicts[key] = self._violation(state)
        return verdict

    def _violation(self, state: State) -> str:
        facts = [self.facts[at][number] for at, number in enumerate(state[0])]
        acked, asked, confirmed, _, _ = state[2]
        views: dict[tuple[int, int], View] = {}
        for one in facts:
            if one.broken:
                return one.broken
            if one.view is not None:
                other = views.setdefault(one.view.place, one.view)
                if other != one.view:
                    return f"FORK: two views are decided at {one.view.place}"
        able: list[int] = []
        for one in facts:
            if not one.serves or one.view is None:
                continue
            members = [facts[self.index[name]] for name in one.view.replicas]
            if all(member.up and member.takes == one.serves for member in members):
                able.append(one.serves)
                for number in range(1, acked + 1):
                    if not asked >> number & 1 and number not in one.queue:
                        return f"LOST: epoch {one.serves} serves without message {number}"
                for number in range(1, self.world.messages + 1):
                    if confirmed >> number & 1 and number in one.queue:
                        return f"AGAIN: epoch {one.serves} has message {number}, whose accept is confirmed"
        if len(set(able)) > 1:
            return f"TWO: epochs {able} can both acknowledge"
        latest = max((view.last_started() for view in views.values()), key=lambda base: base.epoch)
        return self._base_violation(facts, latest, acked)

    def _base_violation(self, facts: list[Facts], latest: Base, acked: int) -> str:
        for name in latest.replicas:
            member = facts[self.index[name]]
            if member.held < latest.epoch:
                return f"BASE: {name!r} of the last started epoch {latest.epoch} holds that of {member.held}"
            if self.world.durable and member.last < acked:
                return f"BASE: {name!r} lacks message {acked}, which is kept"
        return ""


def _is_over(arc: Arc, message: Message) -> bool:
    if isinstance(message, Promise | Accepted | Busy):
        return arc.proposal is None or arc.proposal.ballot != message.ballot
    if isinstance(message, Sealed | Piece | More | Installed | Ack):
        return arc.view is not None and message.epoch < arc.view.epoch
    return False


def _tick(station: Station) -> None:
    station.do(lambda arc: arc.tick(0, 0))


def _facts(station: Station) -> Facts:
    arc = station.arc
    if arc is None:
        twin = station.copy()
        twin.restart()
        restored = twin.core
        ledger = twin.ledger
        return Facts(
            False, restored.view, 0, 0, restored.epoch, ledger.trail, (), ledger.last(), 0, 0, _order(ledger)
        )
    view, ledger = arc.view, station.ledger
    takes = 0
    if view is not None and view.stage != CLOSED and not arc._is_lapsed(view):
        takes = view.epoch if (arc.chain, arc.epoch) == (view.chain, view.epoch) else 0
    return Facts(
        up=True,
        view=view,
        serves=view.epoch if view is not None and arc.serving else 0,
        takes=takes,
        held=arc.epoch,
        trail=ledger.trail,
        queue=tuple(ledger.queue()),
        last=ledger.last(),
        epoch=view.epoch if view is not None else 0,
        round=arc.round,
        broken=_order(ledger),
    )


def _order(ledger: Ledger) -> str:
    if len(set(ledger.trail)) < len(ledger.trail):
        return f"TWICE: a write was applied twice: {ledger.trail}"
    first: list[int] = []
    for write in ledger.trail:
        if write.startswith(b"p") and number_of(write) not in first:
            first.append(number_of(write))
    return "" if first == sorted(first) else f"ORDER: writes were applied out of order: {ledger.trail}"


def explore(world: World, kind: type[Arc] = Arc, *, limit: int) -> Result:
    """Depth first through every state within the bounds, each once; ends at the first violation."""
    explorer = Explorer(world, kind)
    parents: dict[State, tuple[State, Any] | None] = {explorer.first: None}
    stack = [explorer.first]
    steps, served = 0, 0
    while stack:
        state = stack.pop()
        try:
            following = explorer.successors(state)
        except (BugError, PeerError) as error:
            return Result(
                len(parents),
                steps,
                False,
                f"{type(error).__name__}: {error}",
                _trail(explorer, parents, state),
            )
        for label, after in following:
            steps += 1
            if after in parents or not explorer.within(after):
                continue
            parents[after] = (state, label)
            if violation := explorer.violation(after):
                return Result(len(parents), steps, False, violation, _trail(explorer, parents, after))
            for at, number in enumerate(after[0]):
                served = max(served, explorer.facts[at][number].serves)
            stack.append(after)
        if len(parents) >= limit:
            return Result(len(parents), steps, False, served=served)
    return Result(len(parents), steps, True, served=served)


def _trail(explorer: Explorer, parents: dict[State, tuple[State, Any] | None], state: State) -> list[str]:
    trail: list[str] = []
    step = parents[state]
    while step is not None:
        state, label = step
        if isinstance(label, int):
            sender, to, message = explorer.letters[label]
            trail.append(f"{sender.decode()}->{to.decode()} {message}")
        else:
            trail.append(f"{label[0].decode()} {label[1]}")
        step = parents[state]
    return trail[::-1]
