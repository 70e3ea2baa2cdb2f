"""A broker as a process: it runs the product's core, dies at any moment, and starts again from its disk.

This is the simulator's counterpart of `net/`: inputs that come in while the process is busy wait and are
handed over together in one turn, and the effects of a turn are performed in order. A crash loses the
inputs that waited and, when it strikes in the middle of a turn, the effects that were not performed yet.
Each start is a new incarnation; what the network still holds for an old one reaches nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from postroad.config import parse_address
from postroad.errors import BugError, PeerError
from postroad.seam.datagrams import Datagram, Endpoint, JoinGroup, LeaveGroup, SendTo
from postroad.seam.effects import Close, Dial, Effect, Note, Send
from postroad.seam.inputs import Closed, DialFailed, Input, Opened, Received, Sample
from postroad.seam.storage import Append, Chop, Read, Save
from postroad.seam.tracking import FiltersRead, Keep, ReadFilters
from postroad.sim.judge.tracking import Histories
from postroad.sim.judge.violation import Violation
from postroad.sim.machine.disk import CrashStyle, Disk
from postroad.sim.machine.network import Network
from postroad.sim.machine.storage import VirtualStorage
from postroad.sim.machine.world import Clock, Timer, World
from postroad.units import GIB, KIB, MILLISECOND_US, SECOND_US
from postroad.wire.datagrams import is_ours

TURN_US: Final = (5, 150)  # how long a turn keeps the process busy, from .. to
SPIN_TURNS: Final = 50  # turns without input within SPIN_US are a core that never comes to rest
SPIN_US: Final = 10 * MILLISECOND_US
SEGMENT_BYTES: Final = 32 * KIB  # small, so that a short life fills many
COMMIT_BYTES: Final = 8 * KIB
SAMPLE_US: Final = SECOND_US  # at least, between two samples of the machine
REST_US: Final = 4 * SECOND_US  # more, where nothing comes in
IDLE: Final = Sample(
    cpu_share=0.0, process_cpu_share=0.0, memory_total_bytes=GIB, memory_free_bytes=GIB, connections=0
)
SWITCHOVER: Final = "switchover"  # the turn in which a catchup stream ends and its subscriber is counted in


class Core(Protocol):
    """What a process runs: the product's Broker, or a small one in a test."""

    def handle(self, inputs: Sequence[Input], now_us: int) -> Sequence[Effect]: ...
    def next_deadline(self) -> int | None: ...
    def check(self) -> None: ...
    def shutdown(self, now_us: int) -> Sequence[Effect]: ...
    def status(self, now_us: int) -> dict[str, object]: ...
    def metrics(self) -> dict[str, int | float]: ...


class Incarnation:
    """One start of a process: the network's endpoint and the driver of its core."""

    def __init__(self, process: Process, core: Core, boot: int) -> None:
        self.name = process.name
        self.alive = True
        self.core = core
        self.boot = boot
        self.turns = 0
        self._connections: set[int] = set()
        self._sample_us = process.world.now_us + SAMPLE_US  # no earlier sample is given
        self._process = process
        self._inputs: list[Input] = []
        self._turn_timer: Timer | None = None
        self._wake_timer: Timer | None = None
        self._die_after: int | None = None  # effects of the next turn that are still performed
        self._die_at_switchover = False
        self._idle_since_us = 0
        self._idle_turns = 0

    # -- the network's side

    def opened(self, connection: int, dialled: str | None) -> None:
        self._connections.add(connection)
        host = self._process.network.peer_host(connection)
        self.put(Opened(connection=connection, dialled=dialled, certificate=None, loopback=True, host=host))

    def received(self, connection: int, frame: bytes) -> None:
        self.put(Received(connection=connection, frame=frame))

    def closed(self, connection: int) -> None:
        self._connections.discard(connection)
        self.put(Closed(connection=connection))

    def dial_failed(self, address: str) -> None:
        self.put(DialFailed(address=address))

    def datagram(self, source: Endpoint, data: bytes, group: Endpoint | None) -> None:
        if is_ours(data):  # as the real driver does
            self.put(Datagram(source, data, group))

    # -- turns

    def put(self, item: Input) -> None:
        if not self.alive:
            return
        self._inputs.append(item)
        self.schedule()

    def schedule(self) -> None:
        if self._turn_timer is None:
            world = self._process.world
            busy = world.random(f"turns/{self.name}").randint(*TURN_US)
            self._turn_timer = world.after(busy, self._turn)

    def die(self) -> None:
        self.alive = False
        for timer in (self._turn_timer, self._wake_timer):
            if timer is not None:
                timer.cancel()

    def die_within_turn(self, effects: int | None) -> None:
        """Crash in the next turn, after that many of its effects; None takes it back."""
        self._die_after = effects
        self._die_at_switchover = False

    def die_at_switchover(self) -> None:
        """Crash in the next turn with a switchover, after any number of its effects."""
        self._die_at_switchover = True

    def _turn(self) -> None:
        self._turn_timer = None
        process = self._process
        inputs, self._inputs = self._inputs, []
        self._watch_for_spinning(bool(inputs))
        if process.world.now_us >= self._sample_us + (0 if inputs else REST_US):
            self._sample_us = process.world.now_us + SAMPLE_US
            inputs.insert(0, replace(process.load, connections=len(self._connections)))
        before = self._switchovers()
        effects = self._guard(lambda: self.core.handle(inputs, process.clock.now_us()))
        if self._switchovers() > before:
            self._die_after = process.world.random("switchover").randint(0, len(effects))
        self.turns += 1
        process.perform(self, effects if self._die_after is None else effects[: self._die_after])
        if not self.alive:
            return  # it died in the midst of them
        if self._die_after is not None:
            process.crash_now()
            return
        if self.turns % process.check_every == 0:
            self._guard(lambda: self.core.check() or ())  # type: ignore[func-returns-value]
        self.wake()

    def _switchovers(self) -> float:
        """How many there were, if that matters."""
        return self.core.metrics()["durable_switchovers_total"] if self._die_at_switchover else 0

    def wake(self) -> None:
        """Arrange for a turn when the core's next deadline comes."""
        if self._wake_timer is not None:
            self._wake_timer.cancel()
            self._wake_timer = None
        deadline = self.core.next_deadline()
        if deadline is not None and self.alive:
            process = self._process
            self._wake_timer = process.world.at(process.clock.true_us(deadline), self._woken)

    def _woken(self) -> None:
        self._wake_timer = None
        self.schedule()

    def _watch_for_spinning(self, busy: bool) -> None:
        now = self._process.world.now_us
        if busy or now - self._idle_since_us > SPIN_US:
            self._idle_since_us, self._idle_turns = now, 0
            return
        self._idle_turns += 1
        if self._idle_turns > SPIN_TURNS:
            raise Violation("rest", f"{self.name} asks for turn after turn with nothing to do", (self.name,))

    def _guard(self, call: Callable[[], Sequence[Effect]]) -> Sequence[Effect]:
        try:
            return call()
        except Exception as error:
            text = f"{self.name} raised {type(error).__name__}: {error}"
            raise Violation("sound", text, (self.name,)) from error


class Process:
    """A broker's place in the world: name, address, disk and clock stay, incarnations come and go."""

    def __init__(
        self,
        world: World,
        network: Network,
        *,
        name: str,
        address: str,
        build: Callable[[Process], tuple[Core, int]],
        clock: Clock,
        check_every: int = 50,
    ) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.address = address
        self.endpoint: Endpoint = parse_address(address)  # of its datagrams
        self.disk = Disk(world, name)
        self.storage: VirtualStorage | None = None  # of the present incarnation, if it keeps anything
        self.histories = Histories(world, name)
        self.crashes: list[int] = []  # when, in true time
        self.clock = clock
        self.load = IDLE  # what its cores are told of the machine, but for the connections
        self.check_every = check_every
        self.current: Incarnation | None = None
        self.boots: list[tuple[int, int, int]] = []  # (boot, started, ended or 0), in true time
        self.last_crash_us = 0
        self._build = build
        self._crash_style = CrashStyle()
        self._crash_silently = False

    @property
    def running(self) -> bool:
        return self.current is not None

    @property
    def core(self) -> Core:
        if self.current is None:
            raise BugError(f"{self.name} does not run")
        return self.current.core

    def start(self) -> None:
        if self.current is not None:
            raise BugError(f"{self.name} runs already")
        self.clock.restart()
        core, boot = self._build(self)
        self.current = Incarnation(self, core, boot)
        self.boots.append((boot, self.world.now_us, 0))
        self.world.note(self.name, f"starts, boot {boot}")
        self.network.listen(self.address, self.current)
        self.network.bind(self.endpoint, self.current)
        self.current.schedule()

    def open_storage(self) -> VirtualStorage:
        """What an earlier process left on disk, recovered; for whoever builds a core."""
        self.storage = VirtualStorage(
            self.disk,
            wake=self._storage_woke,
            crash=self.crash_now,
            segment_bytes=SEGMENT_BYTES,
            commit_bytes=COMMIT_BYTES,
        )
        for damage in self.storage.volume.recovered.damage:
            self.world.note(self.name, f"log: {damage}")
        return self.storage

    def _storage_woke(self) -> None:
        if self.current is not None and self.storage is not None:
            for outcome in self.storage.take():
                self.current.put(outcome)

    def crash(self, *, silently: bool, style: CrashStyle, within_turn: int | None = None) -> None:
        """Die now, or in the middle of the next turn after `within_turn` of its effects."""
        if self.current is None:
            return
        self._crash_style, self._crash_silently = style, silently
        if within_turn is None:
            self.crash_now()
        else:
            self.current.die_within_turn(within_turn)

    def crash_at(self, step: str, *, silently: bool, style: CrashStyle) -> bool:
        """Die at this step of the next commit or in the next switchover; False if nothing is kept on disk."""
        if self.storage is None or self.current is None:
            return False
        self._crash_style, self._crash_silently = style, silently
        if step == SWITCHOVER:
            self.current.die_at_switchover()
        else:
            self.storage.strike = step
        return True

    def spare(self) -> None:
        """A crash that was to strike in the next turn or commit does not."""
        if self.current is not None:
            self.current.die_within_turn(None)
        if self.storage is not None:
            self.storage.strike = ""

    def crash_now(self) -> None:
        self._end("crashes", silently=self._crash_silently)
        self.last_crash_us = self.world.now_us
        self.crashes.append(self.world.now_us)
        self.histories.ended(crashed=True)
        self.disk.crash(self._crash_style)

    def stop(self) -> None:
        """Shut down in good order; or, where that would wait for a disk that hangs, be killed meanwhile."""
        incarnation = self.current
        if incarnation is None:
            return
        self.perform(incarnation, incarnation.core.shutdown(self.clock.now_us()))
        if not incarnation.alive:
            return  # it died at a step of its last commit
        if self.storage is not None:
            if self.disk.hangs:
                self.crash_now()
                return
            self.storage.close()
        self._end("stops", silently=False)
        self.histories.ended(crashed=False)

    def step_clock(self, by_us: int) -> None:
        self.world.note(self.name, f"clock steps by {by_us} us")
        self.clock.offset_us += by_us
        if self.current is not None:
            self.current.wake()

    def perform(self, incarnation: Incarnation, effects: Sequence[Effect]) -> None:
        if self.storage is not None:
            self.storage.perform(
                effect for effect in effects if isinstance(effect, Append | Chop | Read | Save)
            )
            if not incarnation.alive:
                return
        for effect in effects:
            match effect:
                case Send(connection=connection, data=data):
                    self.network.send(incarnation, connection, data)
                case SendTo(endpoint=endpoint, data=data):
                    self.network.send_datagram(incarnation, self.endpoint, endpoint, data)
                case Close(connection=connection, error=error):
                    self._judge(connection, error)
                    self.network.close(connection)
                case Dial(address=address):
                    self.network.dial(incarnation, address)
                case Note(level=level, text=text):
                    self.world.note(self.name, f"notes {level}: {text}")
                case Keep(effects=kept):
                    self.histories.keep(kept)
                case JoinGroup(group=group):
                    self.network.join(group, self.endpoint)
                case LeaveGroup(group=group):
                    self.network.leave(group, self.endpoint)
                case ReadFilters(tag=tag, sequences=sequences):
                    self._read(incarnation, tag, sequences)

    def _read(self, incarnation: Incarnation, tag: int, sequences: tuple[int, ...]) -> None:
        self.histories.read(sequences, lambda records: incarnation.put(FiltersRead(tag=tag, records=records)))

    def _judge(self, connection: int, error: Exception | None) -> None:
        """All nodes of this world keep to the protocol, so nobody has cause to complain of another."""
        self.world.note(self.name, f"closes: {error or 'done'}", connection=connection)
        if isinstance(error, PeerError | BugError):
            tags = (self.name, f"connection {connection}", f"connection {connection ^ 1}")
            raise Violation("protocol", f"{self.name} closed {connection}: {error}", tags)

    def _end(self, how: str, *, silently: bool) -> None:
        if self.current is None:
            raise BugError(f"{self.name} does not run")
        self.world.note(self.name, how)
        self.current.die()
        if self.storage is not None:
            self.storage.die()
            self.storage = None
        self.network.unlisten(self.address)
        self.network.unbind(self.endpoint)
        self.network.abandon(self.current, silently=silently)
        boot, started, _ = self.boots[-1]
        self.boots[-1] = (boot, started, self.world.now_us)
        self.current = None
