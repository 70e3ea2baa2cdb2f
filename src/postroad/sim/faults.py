"""What goes wrong, and when: a schedule drawn from the seed.

Each fault is one small function that does its harm now and arranges for its end. Faults overlap freely.
After `stop` nothing new begins, everything is healed and every broker that has not left for good runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from postroad.sim.machine.disk import CrashStyle
from postroad.sim.machine.network import Network, Raw
from postroad.sim.machine.process import SWITCHOVER, Process
from postroad.sim.machine.storage import STEPS
from postroad.sim.machine.world import World
from postroad.sim.people.applications import Application, Clerk, DurablePublisher, DurableSubscriber
from postroad.sim.people.clients import Client
from postroad.units import GIB, MILLISECOND_US, SECOND_US

LONGEST_STEP_US: Final = 3 * SECOND_US
DISK_BYTES: Final = GIB  # of a disk that is not full
SHARE: Final = 0.25  # of worlds that have a fault of those with a chance of their own
UNHEARD_PAUSE_US: Final = 6 * SECOND_US  # between two refusals that are not heard, where there are any
HANG_PAUSE_US: Final = 12 * SECOND_US  # the same of disks that hang
DELETE_PAUSE_US: Final = 8 * SECOND_US  # and of names that are deleted


class Faults:
    """Harms a world of brokers and clients until told to stop."""

    def __init__(
        self,
        world: World,
        network: Network,
        *,
        processes: Sequence[Process],
        clients: Sequence[Client],
        links: Sequence[tuple[str, str]],
        pause_us: int,
        raw: bool,
        steps: bool,
        applications: Sequence[Application] = (),
    ) -> None:
        """With `applications` things are durable: nobody leaves for good, and disks are harmed as well."""
        self._world = world
        self._network = network
        self._processes = list(processes)
        self._clients = list(clients)
        self._links = list(links)
        self._applications = list(applications)
        self._pause_us = pause_us
        self._chance = world.random("faults")
        self._going_on = True
        self._left: set[str] = set()  # brokers that stopped for good
        self._failing: set[str] = set()  # those whose log takes no more until they are started anew
        self._clerks = 0  # who came to delete a name
        self.counts: Counter[str] = Counter()
        self._kinds: list[tuple[str, int, Callable[[], bool]]] = [
            ("cut", 4, self._cut),
            ("half-open", 2, self._half_open),
            ("stall", 2, self._stall),
            ("partition", 2, self._partition),
            ("refuse", 1, self._refuse),
            ("crash", 3, self._crash),
            ("stop", 1, self._stop_broker),
            ("client-cut", 3, self._cut_client),
            ("client-stall", 1, self._stall_client),
        ]
        if applications:
            self._kinds += [
                ("application", 4, self._application),
                ("commit", 4, self._commit),
                ("switchover", 3, self._switchover),
                ("disk-full", 1, self._fill_disk),
                ("disk-slow", 1, self._slow_disk),
            ]
        else:
            self._kinds.append(("leave", 1, self._leave))
        if raw:
            self._kinds.append(("raw", 3, self._raw))
        if steps:
            self._kinds.append(("step", 2, self._step))
        self._next()
        if applications:
            self._sometimes("unheard", UNHEARD_PAUSE_US, self._refuse_unheard)
            self._sometimes("hung", HANG_PAUSE_US, self._hang_disk)
            self._sometimes("deletion", DELETE_PAUSE_US, self._delete)

    def stop(self) -> None:
        """The end of all harm."""
        self._going_on = False
        self._network.heal()
        for process in self._processes:
            process.spare()
            process.disk.go_on()
            process.disk.capacity = max(process.disk.capacity, DISK_BYTES)
            if process.running and process.name in self._failing:
                process.crash(silently=False, style=CrashStyle())
            if not process.running and process.name not in self._left:
                process.start()

    # -- the schedule

    def _next(self) -> None:
        self._world.after(int(self._chance.expovariate(1 / self._pause_us)), self._strike)

    def _strike(self) -> None:
        if not self._going_on:
            return
        weights = [weight for _, weight, _ in self._kinds]
        name, _, harm = self._chance.choices(self._kinds, weights)[0]
        if harm():
            self.counts[name] += 1
        self._next()

    def _sometimes(self, name: str, pause_us: int, harm: Callable[[Random], bool]) -> None:
        """A fault with a chance of its own, and in few worlds: the others are as they were without it."""
        chance = self._world.random(f"faults/{name}")
        if chance.random() >= SHARE:
            return

        def strike() -> None:
            if self._going_on:
                if harm(chance):
                    self.counts[name] += 1
                wait()

        def wait() -> None:
            self._world.after(int(chance.expovariate(1 / pause_us)), strike)

        wait()

    def _later(self, low_us: int, high_us: int) -> int:
        """A random moment from now on, mostly sooner."""
        share = self._chance.random() ** 2
        return self._world.now_us + low_us + int(share * (high_us - low_us))

    # -- links

    def _link(self) -> tuple[str, str] | None:
        return self._chance.choice(self._links) if self._links else None

    def _cut(self) -> bool:
        """A link breaks; both sides learn soon. Half of the time it stays unusable for a while."""
        link = self._link()
        if link is None:
            return False
        self._world.note("fault", f"cut {link}")
        learn = (self._chance.randrange(50_000), self._chance.randrange(50_000))
        if self._chance.random() < 0.5:
            self._network.block(*link, self._later(SECOND_US // 2, 25 * SECOND_US))
        return self._network.cut(*link, learn) > 0

    def _half_open(self) -> bool:
        link = self._link()
        if link is None:
            return False
        self._world.note("fault", f"half-open {link}")
        learn = [self._chance.randrange(20_000), self._chance.randrange(SECOND_US, 40 * SECOND_US)]
        self._chance.shuffle(learn)
        return self._network.cut(*link, (learn[0], learn[1])) > 0

    def _stall(self) -> bool:
        link = self._link()
        if link is None:
            return False
        self._world.note("fault", f"stall {link}")
        self._network.stall(*link, self._later(100 * MILLISECOND_US, 25 * SECOND_US))
        return True

    def _raw(self) -> bool:
        link = self._link()
        if link is None:
            return False
        harm = Raw(
            lose=self._chance.choice((0.0, 0.02, 0.2, 0.5)),
            repeat=self._chance.choice((0.0, 0.05, 0.3)),
            overtake=self._chance.choice((0.0, 0.05, 0.3)),
            late_us=self._chance.choice((5, 50, 800)) * MILLISECOND_US,
        )
        self._world.note("fault", f"raw {link} {harm.lose} {harm.repeat} {harm.overtake} {harm.late_us}")
        self._network.make_raw(*link, harm)
        end = self._later(SECOND_US, 30 * SECOND_US)
        self._world.at(end, lambda: self._network.make_raw(*link, None))
        return True

    def _partition(self) -> bool:
        """The brokers fall into two groups that cannot reach each other."""
        if len(self._processes) < 2:
            return False
        names = [process.name for process in self._processes]
        self._chance.shuffle(names)
        middle = self._chance.randrange(1, len(names))
        until = self._later(SECOND_US, 30 * SECOND_US)
        self._world.note("fault", f"partition {sorted(names[:middle])} from {sorted(names[middle:])}")
        for a in names[:middle]:
            for b in names[middle:]:
                self._network.block(a, b, until)
                slowest = 40 * SECOND_US if self._chance.random() < 0.3 else 100 * MILLISECOND_US
                self._network.cut(a, b, (self._chance.randrange(slowest), self._chance.randrange(slowest)))
        return True

    def _refuse(self) -> bool:
        process = self._chance.choice(self._processes)
        self._world.note("fault", f"{process.name} refuses to be dialled")
        self._network.refuse(process.address, self._later(SECOND_US, 20 * SECOND_US))
        return True

    # -- brokers

    def _crash(self) -> bool:
        process = self._chance.choice(self._processes)
        if not process.running:
            return False
        style = CrashStyle(scattered=self._chance.random() < 0.3, flip_chance=self._chance.choice((0.0, 0.1)))
        within = self._chance.choice((None, 0, 1, 2, 5))
        process.crash(silently=self._chance.random() < 0.3, style=style, within_turn=within)
        self._restart_later(process)
        return True

    def _commit(self) -> bool:
        """A broker dies at the worst step of a commit, or its sync fails and it is started anew."""
        process, step = self._chance.choice(self._processes), self._chance.choice(STEPS)
        style = CrashStyle(scattered=self._chance.random() < 0.3, flip_chance=self._chance.choice((0.0, 0.1)))
        self._world.note("fault", f"commit of {process.name}: {step}")
        if not process.crash_at(step, silently=self._chance.random() < 0.3, style=style):
            return False
        if step == "failing":
            until = self._later(SECOND_US, 20 * SECOND_US)
            self._failing.add(process.name)
            self._world.at(until, lambda: self._replace(process))
        else:
            self._restart_later(process)
        return True

    def _switchover(self) -> bool:
        """A broker dies when somebody has caught up; to that end an application comes anew."""
        process, silently = self._chance.choice(self._processes), self._chance.random() < 0.3
        if not process.crash_at(SWITCHOVER, silently=silently, style=CrashStyle()):
            return False
        self._world.note("fault", f"switchover of {process.name}")
        self._application()
        self._restart_later(process, 5 * SECOND_US)
        return True

    def _replace(self, process: Process) -> None:
        if self._going_on and process.running:
            self._failing.discard(process.name)
            process.stop()
            self._restart_later(process)

    def _fill_disk(self) -> bool:
        process = self._chance.choice(self._processes)
        self._world.note("fault", f"the disk of {process.name} is full")
        process.disk.fill()

        def empty() -> None:
            process.disk.capacity = DISK_BYTES

        def start_again() -> None:
            if self._going_on and process.running:
                process.crash(silently=False, style=CrashStyle())
                self._restart_later(process, latest_us=SECOND_US)

        self._world.at(self._later(3 * SECOND_US, 15 * SECOND_US), empty)
        if self._chance.random() < 0.5:  # while its disk is full
            self._world.after(self._chance.randrange(SECOND_US), start_again)
        return True

    def _refuse_unheard(self, chance: Random) -> bool:
        """A disk is full for a moment, and who publishes there does not hear of it before its line breaks:
        what was refused it sends again, and what it sent after that."""
        processes = {process.name: process for process in self._processes}
        publishers = [
            application for application in self._applications if isinstance(application, DurablePublisher)
        ]
        publisher = chance.choice(publishers)
        full_us, after_us = (chance.randrange(50_000, 2 * SECOND_US) for _ in range(2))
        process = processes.get(publisher.broker)
        if process is None:
            return False
        pair = (process.name, publisher.name)
        self._world.note("fault", f"{pair[1]} does not hear what the full disk of {pair[0]} refuses")
        process.disk.fill()
        self._network.muffle(*pair, self._world.now_us + full_us + after_us + SECOND_US)

        def empty() -> None:
            process.disk.capacity = DISK_BYTES

        def cut() -> None:
            if self._going_on:
                self._network.cut(*pair, (0, 0))
                self._network.muffle(*pair, 0)

        self._world.after(full_us, empty)
        self._world.after(full_us + after_us, cut)
        return True

    def _hang_disk(self, chance: Random) -> bool:
        """Nothing comes back from a disk for a while. In half of the cases its broker is killed meanwhile,
        and started again when the disk goes on."""
        process = chance.choice(self._processes)
        hang_us = SECOND_US + int(chance.random() ** 2 * 20 * SECOND_US)
        kill_us = chance.randrange(hang_us) if chance.random() < 0.5 else 0
        style = CrashStyle(scattered=chance.random() < 0.3)
        if not process.running:
            return False
        self._world.note("fault", f"the disk of {process.name} hangs for {hang_us} us")
        process.disk.hang(self._world.now_us + hang_us)

        def kill() -> None:
            if self._going_on and process.running:
                process.crash(silently=False, style=style)
                self._restart_later(process)

        if kill_us:
            self._world.after(kill_us, kill)
        return True

    def _delete(self, chance: Random) -> bool:
        """Somebody deletes the name of a subscriber, which may be away: mostly at the broker where it is. One
        that asks for a past would get it again."""
        subscribers = [
            application
            for application in self._applications
            if isinstance(application, DurableSubscriber) and not application.reader.since_us
        ]
        if not subscribers:
            return False
        subscriber, process = chance.choice(subscribers), chance.choice(self._processes)
        there, away = chance.random() < 0.8, chance.random() < 0.5
        host = {process.name: process for process in self._processes}.get(subscriber.reader.claim[0])
        if there and host is not None:
            process = host
        if not process.running:
            return False
        self._clerks += 1
        self._world.note("fault", f"{subscriber.reader.name} is to be deleted at {process.name}")
        if away:
            subscriber.crash()
        Clerk(
            self._world,
            self._network,
            name=f"clerk{self._clerks}",
            addresses=(process.address,),
            durable=subscriber.reader.name,
        ).start()
        return True

    def _slow_disk(self) -> bool:
        process = self._chance.choice(self._processes)
        self._world.note("fault", f"the disk of {process.name} is slow")
        process.disk.slow(self._later(SECOND_US, 15 * SECOND_US), self._chance.choice((10, 200)))
        return True

    def _application(self) -> bool:
        application = self._chance.choice(self._applications)
        if application.life is None:
            return False
        application.crash()
        return True

    def _stop_broker(self) -> bool:
        process = self._chance.choice(self._processes)
        if not process.running:
            return False
        process.stop()
        self._restart_later(process)
        return True

    def _leave(self) -> bool:
        """A broker leaves for good; at most one in four does."""
        process = self._chance.choice(self._processes)
        if not process.running or 4 * (len(self._left) + 1) > len(self._processes):
            return False
        self._left.add(process.name)
        process.stop()
        return True

    def _restart_later(
        self, process: Process, soonest_us: int = 50 * MILLISECOND_US, latest_us: int = 25 * SECOND_US
    ) -> None:
        def restart() -> None:
            if not self._going_on:
                return
            process.spare()
            if not process.running and process.name not in self._left:
                process.start()

        self._world.at(self._later(soonest_us, latest_us), lambda: process.disk.once_it_works(restart))

    def _step(self) -> bool:
        process = self._chance.choice(self._processes)
        process.step_clock(self._chance.randint(-LONGEST_STEP_US, LONGEST_STEP_US))
        return True

    # -- clients

    def _client_pair(self) -> tuple[str, str] | None:
        names = self._client_names()
        connected = [c for c in self._network.connections() if c.ends[0].name in names]
        return self._chance.choice(connected).pair if connected else None

    def _client_names(self) -> set[str]:
        return {client.name for client in self._clients} | {
            application.name for application in self._applications
        }

    def _cut_client(self) -> bool:
        pair = self._client_pair()
        if pair is None:
            return False
        self._world.note("fault", f"cut {pair}")
        slow = 20 * SECOND_US if self._chance.random() < 0.2 else 20 * MILLISECOND_US
        return self._network.cut(*pair, (self._chance.randrange(slow), self._chance.randrange(slow))) > 0

    def _stall_client(self) -> bool:
        pair = self._client_pair()
        if pair is None:
            return False
        self._world.note("fault", f"stall {pair}")
        self._network.stall(*pair, self._later(100 * MILLISECOND_US, 10 * SECOND_US))
        return True
