"""Drives one broker core with real sockets: what came in during a turn goes in together.

Socket callbacks only cut frames and queue inputs; the first one of a turn schedules one flush, which hands
everything to `core.handle` in one call and performs the effects. That is where batches form: an idle
broker handles an event the moment it arrives, a busy one handles all that arrived meanwhile at once.

Rules the core can rely on: connection numbers rise and are never used again; every Opened is followed by
exactly one Closed, also when the core itself asked to close; nothing is received from a connection after
its Closed; every Dial is answered by an Opened that names the address, or by DialFailed.

An exception out of the core means that its state can no longer be trusted: it is logged with the
connections of that turn, nothing of that turn is sent, and the process ends with EXIT_BUG so that a
supervisor starts it afresh. Peers' mistakes never come that far: the core answers them with Refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, Protocol, cast

from postroad.config import parse_address
from postroad.delays import Delays
from postroad.errors import PeerError, PostroadError, UnavailableError
from postroad.net import tls
from postroad.net.buffers import TOTAL_BYTES, Buffers
from postroad.net.clock import Clock
from postroad.net.datagrams import Datagrams, to_endpoint
from postroad.net.historian import Historian
from postroad.net.listen import BACKLOG, Door
from postroad.net.log import LOGGER, complain, note
from postroad.net.otel import SpanExporter
from postroad.net.samples import Sampler
from postroad.net.shares import Shares
from postroad.seam.datagrams import JoinGroup, LeaveGroup, SendTo
from postroad.seam.effects import Close, Dial, Effect, Hop, Note, Send
from postroad.seam.inputs import Closed, DialFailed, Input, Opened, Received
from postroad.seam.levels import Level
from postroad.seam.storage import Append, Chop, Read, Save, StorageEffect
from postroad.seam.tracking import FiltersRead, Keep, NotKept, ReadFilters, TrackingEffect
from postroad.storage.commit import Storage
from postroad.units import MIB, MILLISECOND_US, SECOND_US
from postroad.wire.frames import Refuse, Splitter, encode

EXIT_BUG: Final = 70  # EX_SOFTWARE of sysexits.h
DIAL_S: Final = 5.0
MAX_DIALS: Final = 1_000  # under way at a time
TLS_HANDSHAKE_S: Final = 10.0
CLOSE_S: Final = 5.0  # a connection being closed has this long to take what was sent before
CONTROL_SLACK_BYTES: Final = 4 * MIB  # sent but not taken by the peer, beyond what credit allows
SAMPLE_US: Final = SECOND_US  # at least, between two samples of the machine
REST_US: Final = 4 * SECOND_US  # more, where nothing comes in
MAX_FRAME_BYTES: Final = (1 << 32) - 1  # that a length can say: our own frames are within their limits
DRAIN_LOOK_S: Final = 0.01  # between looks whether the core is drained
STALLED_S: Final = 0.02  # between looks at peers that do not read their replies
SPARE_SOCKETS: Final = 64  # over the limit, while they are told so


class Core(Protocol):
    """What the driver needs of `broker.core.Broker`."""

    def handle(self, inputs: Iterable[Input], now_us: int) -> list[Effect]: ...
    def next_deadline(self) -> int | None: ...
    def metrics(self) -> dict[str, int | float]: ...
    def delays(self) -> list[Delays]: ...
    def levels(self, now_us: int, /) -> list[Level]: ...
    def shutdown(self, now_us: int) -> list[Effect]: ...


class DrainingCore(Core, Protocol):
    """One whose clients can go on elsewhere."""

    def drain(self, now_us: int) -> list[Effect]: ...
    def drained(self, now_us: int) -> bool: ...


class Translator(Protocol):
    """Speaks another protocol with one peer, at the edge: the core sees and says frames."""

    def feed(self, data: bytes) -> list[bytes]:
        """The whole frames that stand for what the peer sent; PeerError if it breaks its protocol."""
        ...

    def encode(self, frame: bytes) -> bytes:
        """What the peer is sent for one whole frame of the core; b"" for nothing."""
        ...


class Connection(asyncio.Protocol):
    """One socket: cuts frames, queues inputs. Everything else is the server's."""

    __slots__ = ("dialled", "feed", "live", "number", "peer", "server", "splitter", "translator", "transport")

    transport: asyncio.Transport

    def __init__(self, server: Server, dialled: str | None, translator: Translator | None = None) -> None:
        self.server = server
        self.translator = translator  # None: the peer speaks frames
        self.dialled = dialled
        self.number = 0
        self.peer = "?"
        self.live = False  # between Opened and Closed; what arrives outside of it is dropped
        self.splitter = Splitter(server.max_batch_bytes, handshake=True)
        self.feed = self.splitter.feed if translator is None else translator.feed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.server.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if not self.live:
            return
        server = self.server
        server.bytes_in += len(data)
        try:
            frames = self.feed(data)
        except PeerError as error:
            server.refuse(self, error)
            return
        if self.splitter.pending > server.buffers.behind_bytes:
            server.buffers.add(self)
        if frames:
            server.received(self, frames)

    @property
    def held_bytes(self) -> int:
        """What waits here: not taken by the peer, not come whole, not served yet."""
        unsent = self.transport.get_write_buffer_size()
        return unsent + self.splitter.pending + self.server.waiting_bytes(self)

    def pause_writing(self) -> None:
        self.server.buffers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connection_lost(self, exc)


class Server:
    """`core` behind sockets. `stop()` ends `wait()`, which returns the process's exit code."""

    def __init__(
        self,
        core: Core,
        *,
        clock: Clock,
        max_connections: int,
        max_batch_bytes: int,
        window_bytes: int,
        total_bytes: int = TOTAL_BYTES,
        tls_server: ssl.SSLContext | None = None,
        tls_client: ssl.SSLContext | None = None,
        historian: Historian | None = None,
        spans: SpanExporter | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.core = core
        self._storage = storage
        self._historian = historian
        self._spans = spans
        self.max_batch_bytes = max_batch_bytes
        self.ready = False
        self.bytes_in = 0
        self._turns = Delays(
            "turn_seconds",
            "Time the broker core took for one turn of the loop."
            " Alarm: often above 0.1, since all latency of a busy broker is here.",
        )
        self._clock = clock
        self._max_connections = max_connections
        self.buffers = Buffers(
            # Credit may be overdrawn by one frame.
            each_bytes=window_bytes + max_batch_bytes + CONTROL_SLACK_BYTES,
            total_bytes=total_bytes,
            cut_off=self._cut_off,
        )
        self._tls_server = tls_server
        self._tls_client = tls_client
        self._loop = asyncio.get_running_loop()
        self._listeners: list[asyncio.Server] = []
        self._doors: list[Door] = []  # where TLS is spoken
        self._datagrams: Datagrams | None = None
        self._live: dict[int, Connection] = {}  # Opened and not Closed, by number
        self._sockets: set[Connection] = set()  # every open socket, those being refused or closed too
        self._silent: dict[Connection, None] = {}  # of these, those that have not said a frame, oldest first
        self._arriving: dict[Connection, socket.socket] = {}  # before their TLS handshake, likewise
        self._handshakes: set[asyncio.Task[None]] = set()  # of these, and of those that are sent away
        self._dials: set[asyncio.Task[None]] = set()
        self._answered: set[str] = set()  # addresses that answered when dialled, at most MAX_DIALS
        self._inputs: list[Input] = []  # of this turn
        self._flush_scheduled = False
        self._shares = Shares()
        self._looking = False  # a look at those whose replies are not read is scheduled
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0  # when the timer fires; meaningless without one
        self._sampler = Sampler()
        self._sample_us = clock.now_us() + SAMPLE_US  # no earlier sample is given
        self._last_number = 0
        self._stopping = False
        self._drained = asyncio.Event()  # stopping, and the last socket is closed
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._bytes_out = 0
        self._opened = 0
        self._refused = 0
        self._overflowed = 0
        self._dial_failures = 0
        self.inputs_handled = 0

    def levels(self) -> list[Level]:
        return self.core.levels(self._clock.now_us())

    def delays(self) -> list[Delays]:
        stored = [] if self._storage is None else self._storage.delays()
        return [self._turns, *self.core.delays(), *stored]

    # -- life

    async def start(self, listener: socket.socket, datagrams: socket.socket | None = None) -> None:
        """Accept connections and datagrams on bound sockets and give the core its first turn."""
        if datagrams is not None:
            self._datagrams = Datagrams(datagrams, self.queue)
        await self.listen(listener)
        self.ready = True
        self._flush(due=True)

    async def listen(
        self, listener: socket.socket, translate: Callable[[], Translator] | None = None
    ) -> None:
        """Accept connections on a bound socket. Each has its own translator, where peers speak otherwise."""

        def make() -> Connection:
            return Connection(self, None, None if translate is None else translate())

        if self._tls_server is not None:
            self._doors.append(Door(listener, partial(self._knocked, make)))
            return
        accepted = await self._loop.create_server(make, sock=listener, backlog=BACKLOG)
        self._listeners.append(accepted)

    async def wait(self) -> int:
        """The exit code, once `stop()` is done or the core has failed."""
        return await asyncio.shield(self._exit)

    async def drain(self, core: DrainingCore, limit_s: float) -> None:
        """Let clients go on elsewhere, for as long as that takes and no longer than `limit_s`; then stop."""
        self.ready = False
        self.change(core.drain)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not self._stopping and not core.drained(self._clock.now_us()):  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_LOOK_S)
        await self.stop()

    async def stop(self) -> None:
        """Stop accepting, let the core say goodbye, flush, close."""
        self._flush()  # what came in already counts
        if self._stopping:
            return
        self._close_doors()
        try:
            effects = self.core.shutdown(self._clock.now_us())
        except Exception:
            self._fail("shutdown", ())
            return
        self._perform(effects)
        for connection in list(self._live.values()):
            self._close(connection)
        if self._sockets:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._drained.wait()
        self._abort_all()
        if self._historian is not None:
            await self._loop.run_in_executor(None, self._historian.close)
        if self._spans is not None:
            await self._loop.run_in_executor(None, self._spans.close)
        if not self._exit.done():
            self._exit.set_result(0)

    def metrics(self) -> dict[str, int | float]:
        """The driver's own figures and the core's."""
        stored = {} if self._storage is None else self._storage.stats()
        if self._spans is not None:
            stored |= self._spans.metrics()
        if self._historian is not None:
            stored["tracking_dropped_total"] = self._historian.dropped
        if self._datagrams is not None:
            stored |= self._datagrams.metrics()
        return (
            self.core.metrics()
            | stored
            | {
                "socket_connections": len(self._sockets),
                "socket_connections_opened_total": self._opened,
                "socket_connections_refused_total": self._refused,
                "socket_connections_overflowed_total": self._overflowed,
                "socket_bytes_in_total": self.bytes_in,
                "socket_bytes_out_total": self._bytes_out,
                "socket_unsent_bytes": sum(sock.transport.get_write_buffer_size() for sock in self._sockets),
                "socket_held_bytes": sum(sock.held_bytes for sock in self._sockets),
                "dial_failures_total": self._dial_failures,
                "frames_waiting": self._shares.frames,
                "turn_inputs_total": self.inputs_handled,
            }
        )

    # -- turns

    def received(self, connection: Connection, frames: Sequence[bytes]) -> None:
        """Events are handled in the next turn, all that came; what asks for work waits for a share of one."""
        self._silent.pop(connection, None)
        if self._shares.add(connection, frames):
            self.queue(())
        else:
            number = connection.number
            self.queue([Received(connection=number, frame=frame) for frame in frames])

    def waiting_bytes(self, connection: Connection) -> int:
        """Of frames that wait for a share of a turn."""
        return self._shares.waiting_bytes(connection)

    def queue(self, inputs: Sequence[Input]) -> None:
        self._inputs += inputs
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self, due: bool = False) -> None:
        """What came goes into one turn, and what waits for a share of a turn into another: nobody's events
        wait for what others ask. `due` runs the core even when nothing came in."""
        self._flush_scheduled = False
        inputs, self._inputs = self._inputs, []
        size = self._shares.begin_turn()
        if inputs or due:
            _, handled_us = self._turn(inputs, inputs)
            if size:
                self._shares.handled(size, handled_us)
        if self._shares:
            self._shares.took(*self._turn(self._shares.take(), self._shares.taken))
            if self._shares:
                self._flush_again()

    def _turn(self, inputs: Iterable[Input], handed: Sequence[Input]) -> tuple[int, int]:
        """The microseconds it took, and the core of that. `handed`: what the core has been given of the
        inputs by then."""
        if self._stopping:
            return 0, 0
        now_us = self._clock.now_us()
        if now_us >= self._sample_us + (0 if inputs else REST_US):
            inputs = chain((self._sampler.sample(len(self._live)),), inputs)
            self._sample_us = now_us + SAMPLE_US
        began_ns = time.perf_counter_ns()
        try:
            effects = self.core.handle(inputs, now_us)
            deadline_us = self.core.next_deadline()
        except Exception:
            self._fail("handle", handed)
            return 0, 0
        handled_ns = time.perf_counter_ns()
        self.inputs_handled += len(handed)
        try:
            self._perform(effects)
        except Exception:
            self._fail("perform", handed)
            return 0, 0
        took_us = (time.perf_counter_ns() - began_ns) // 1000
        self._turns.observe(took_us)
        self._schedule(deadline_us, now_us)
        return took_us, (handled_ns - began_ns) // 1000

    def change(self, act: Callable[[int], list[Effect]]) -> None:
        """A turn of something that no input says: `act` is given the time, and its effects are performed."""
        self._flush()  # what came in already counts
        if self._stopping:
            return
        now_us = self._clock.now_us()
        try:
            self._perform(act(now_us))
            deadline_us = self.core.next_deadline()
        except Exception:
            self._fail("change", ())
            return
        self._schedule(deadline_us, now_us)

    def _flush_again(self) -> None:
        """Somebody waits for a share of the next turn; others may come in before it."""
        if not self._shares.stalled:
            self.queue(())
        elif not self._looking:
            self._looking = True
            self._loop.call_later(STALLED_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        self.queue(())

    def _schedule(self, deadline_us: int | None, now_us: int) -> None:
        """Have the core run by its deadline. A timer that fires too early costs less than moving it."""
        if deadline_us is None or (self._timer is not None and self._timer_us <= deadline_us):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_us = max(deadline_us, now_us)
        # uvloop counts whole milliseconds; rounding up keeps the timer from firing just before its time.
        delay_ms = -(-(self._timer_us - now_us) // MILLISECOND_US)
        self._timer = self._loop.call_later(delay_ms / 1000, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        if self._stopping or self._flush_scheduled:
            return  # the turn about to run schedules anew
        now_us = self._clock.now_us()
        try:
            deadline_us = self.core.next_deadline()
        except Exception:
            self._fail("next_deadline", ())
            return
        if deadline_us is not None and deadline_us <= now_us:
            self._flush(due=True)
        else:
            self._schedule(deadline_us, now_us)

    def _perform(self, effects: list[Effect]) -> None:
        """Sends are grouped: one write per connection and turn, in the order the core gave."""
        live = self._live
        stores: list[StorageEffect] = []
        writes: dict[int, bytes | list[bytes]] = {}  # most connections get one frame: no list for those
        for effect in effects:
            if type(effect) is Send:
                number = effect.connection
                before = writes.get(number)
                if before is None:
                    writes[number] = effect.data
                elif isinstance(before, list):
                    before.append(effect.data)
                else:
                    writes[number] = [before, effect.data]
            elif type(effect) is SendTo:
                if self._datagrams is not None:
                    self._datagrams.send(effect.endpoint, effect.data)
            elif isinstance(effect, Close):
                connection = live.get(effect.connection)
                if connection is not None:
                    self._write(connection, writes.pop(effect.connection, b""))
                    if effect.error is not None:  # the core has noted why, only we know who that was
                        complain("info", f"connection {connection.number} was {connection.peer}")
                    self._close(connection)
            elif isinstance(effect, Dial):
                self._dial(effect.address)
            elif isinstance(effect, Note):
                note(effect.level, effect.text)
            elif self._historian is not None and isinstance(effect, Keep):
                self._historian.keep(effect.effects, self._not_kept)
            elif self._historian is not None and isinstance(effect, ReadFilters):
                self._historian.read(effect.tag, effect.sequences, self._filters_read)
            elif isinstance(effect, Append | Chop | Read | Save):
                stores.append(effect)
            elif self._spans is not None and isinstance(effect, Hop):
                self._spans.add(effect, self._clock.now_us())
            elif self._datagrams is not None and isinstance(effect, JoinGroup):
                self._datagrams.join(effect.group)
            elif self._datagrams is not None and isinstance(effect, LeaveGroup):
                self._datagrams.leave(effect.group)
        if stores and self._storage is not None:
            self._storage.perform(stores)
        for number, data in writes.items():
            connection = live.get(number)
            if connection is not None:
                self._write(connection, data)

    def storage_woke(self) -> None:
        """The storage has done something that the core asked for."""
        if self._storage is None or self._stopping:
            return
        try:
            self.queue(list(self._storage.take()))
        except Exception:
            self._fail("storage", ())

    def _not_kept(self, effects: tuple[TrackingEffect, ...]) -> None:
        self.queue([NotKept(effects=effects)])

    def _filters_read(self, tag: int, records: Mapping[int, bytes]) -> None:
        self.queue([FiltersRead(tag=tag, records=records)])

    def _write(self, connection: Connection, data: bytes | list[bytes]) -> None:
        if connection.translator is not None:
            try:
                data = _translated(connection.translator, data)
            except Exception:  # of a translator, which concerns its own connection alone
                LOGGER.exception(
                    "connection %d %s could not be translated for", connection.number, connection.peer
                )
                connection.transport.abort()
                return
        if isinstance(data, bytes):
            self._bytes_out += len(data)
            connection.transport.write(data)
        else:
            self._bytes_out += sum(map(len, data))
            connection.transport.writelines(data)

    def _fail(self, where: str, inputs: Sequence[Input]) -> None:
        numbers = sorted({getattr(item, "connection", 0) for item in inputs} - {0})
        peers = ", ".join(
            f"{number} {self._live[number].peer}" for number in numbers[:20] if number in self._live
        )
        LOGGER.exception(
            "bug in the broker core (%s); this process ends. Connections of the turn: %s", where, peers
        )
        self._close_doors()
        self._abort_all()
        if not self._exit.done():
            self._exit.set_result(EXIT_BUG)

    def _close_doors(self) -> None:
        self._stopping = True
        self.ready = False
        for listener in self._listeners:
            listener.close()
        for door in self._doors:
            door.close()
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self._arriving):
            self._send_away(connection)
        for dial in list(self._dials):
            dial.cancel()

    def _abort_all(self) -> None:
        for connection in list(self._sockets):
            connection.transport.abort()
        if self._datagrams is not None:
            self._datagrams.close()
            self._datagrams = None

    # -- connections

    def connection_made(self, connection: Connection) -> None:
        transport = connection.transport
        connection.peer, host, loopback = _peer(transport)
        self._sockets.add(connection)
        arrived = self._arriving.pop(connection, None)
        if self._stopping:
            transport.abort()
            return
        if connection.dialled is None and arrived is None and not self._has_room():
            self._turn_away(connection)
            return
        self._silent[connection] = None
        self._last_number += 1
        self._opened += 1
        connection.number = self._last_number
        connection.live = True
        self._live[connection.number] = connection
        transport.set_write_buffer_limits(high=self.buffers.expect(len(self._sockets)))
        self.queue(
            [
                Opened(
                    connection=connection.number,
                    dialled=connection.dialled,
                    certificate=tls.principal(transport.get_extra_info("ssl_object")),
                    loopback=loopback,
                    host=host,
                )
            ]
        )

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        self._sockets.discard(connection)
        self.buffers.forget(connection)
        if self._stopping and not self._sockets:
            self._drained.set()
        if connection.live:
            LOGGER.debug(
                "connection %d %s lost: %s", connection.number, connection.peer, error or "end of stream"
            )
            if connection.dialled is not None:
                self._undialled(connection.dialled, answered=connection.splitter.begun)
            self._forget(connection)

    def _undialled(self, address: str, *, answered: bool) -> None:
        """A connection that we dialled is gone."""
        if answered:
            if len(self._answered) < MAX_DIALS:
                self._answered.add(address)
        else:
            why = tls.unheard(self._tls_client, known=address in self._answered)
            complain("info", f"no connection to {address}: {why}")

    def refuse(self, connection: Connection, error: PostroadError) -> None:
        """Tell the peer why, then close."""
        self._refused += 1
        complain("warning", f"connection {connection.number} {connection.peer} closed: {error.code}: {error}")
        self._write(connection, encode(Refuse(code=error.code, reason=str(error))))
        self._close(connection)

    def _cut_off(self, connection: Connection, why: str) -> None:
        """Too much waits in its socket."""
        if connection.live:
            self._overflowed += 1
            complain("warning", f"connection {connection.number} {connection.peer} {why}: closed")
            self._forget(connection)
        connection.transport.abort()

    # A socket counts from the moment it is accepted: before a TLS handshake it is nobody's connection, and a
    # file all the same.

    def _knocked(self, make: Callable[[], Connection], sock: socket.socket) -> None:
        if self._stopping or not self._has_room():
            sock.close()
            return
        connection = make()
        self._arriving[connection] = sock
        handshake = self._loop.create_task(self._let_in(connection, sock))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _let_in(self, connection: Connection, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, sock, ssl=self._tls_server, ssl_handshake_timeout=TLS_HANDSHAKE_S
            )
        except OSError as error:  # TLS errors and time-outs are OSErrors
            LOGGER.debug("a connection ended with its TLS handshake: %s", error)
        finally:
            self._arriving.pop(connection, None)

    def _send_away(self, connection: Connection) -> None:
        """Before its handshake: with the end of its stream that fails, at once."""
        with contextlib.suppress(OSError):
            self._arriving.pop(connection).shutdown(socket.SHUT_RDWR)

    def _has_room(self) -> bool:
        """Whether one more may be here. Who has been silent for longest makes room: a stranger that says
        nothing keeps nobody out."""
        here = len(self._sockets) + len(self._arriving)
        if here <= self._max_connections:
            return True
        complain("warning", f"{self._max_connections} connections is the limit: who says nothing is closed")
        if here > self._max_connections + SPARE_SOCKETS:
            return False
        if self._arriving:
            self._send_away(next(iter(self._arriving)))
            return True
        silent = next(iter(self._silent), None)
        if silent is not None:
            self._cut_off(silent, "said nothing, and others came")
        return silent is not None

    def _turn_away(self, connection: Connection) -> None:
        self._refused += 1
        if len(self._sockets) > self._max_connections + SPARE_SOCKETS:
            connection.transport.abort()
            return
        error = UnavailableError(f"this broker serves at most {self._max_connections} connections")
        self._write(connection, encode(Refuse(code=error.code, reason=str(error))))
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        """Flush and close; a peer that does not take the rest in time is cut off."""
        if connection.live:
            self._forget(connection)
        connection.transport.close()
        self._loop.call_later(CLOSE_S, connection.transport.abort)

    def _forget(self, connection: Connection) -> None:
        connection.live = False
        self._silent.pop(connection, None)
        del self._live[connection.number]
        is_waiting = self._shares.forget(connection)
        self.queue(() if is_waiting else [Closed(connection=connection.number)])

    # -- dialling

    def _dial(self, address: str) -> None:
        if self._stopping or len(self._dials) >= MAX_DIALS:
            self.queue([DialFailed(address=address)])
            return
        task = self._loop.create_task(self._dial_once(address))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial_once(self, address: str) -> None:
        connection = Connection(self, address)
        try:
            host, port = parse_address(address)
            async with asyncio.timeout(DIAL_S):
                await self._loop.create_connection(lambda: connection, host, port, ssl=self._tls_client)
        except (OSError, PostroadError, UnicodeError) as error:  # TLS errors and time-outs are OSErrors
            if connection.number:
                connection.transport.abort()  # it opened and failed at once; its Closed is the answer
                return
            self._dial_failures += 1
            why = tls.reason(error) if isinstance(error, ssl.SSLError) else error or type(error).__name__
            complain("info", f"no connection to {address}: {why}")
            self.queue([DialFailed(address=address)])


def _translated(translator: Translator, data: bytes | list[bytes]) -> bytes:
    """What a peer is sent for these whole frames."""
    frames = Splitter(MAX_FRAME_BYTES).feed(data if isinstance(data, bytes) else b"".join(data))
    return b"".join(map(translator.encode, frames))


def _peer(transport: asyncio.Transport) -> tuple[str, str, bool]:
    """The peer's address for people, its host for datagrams, and whether it is this machine's loopback."""
    name = transport.get_extra_info("peername")
    if not name:
        return "?", "", False  # gone already
    host, port = name[0], name[1]
    address = ipaddress.ip_address(host.split("%", 1)[0])
    mapped = getattr(address, "ipv4_mapped", None)
    shown = f"[{host}]:{port}" if address.version == 6 else f"{host}:{port}"
    return shown, to_endpoint(name)[0], (mapped or address).is_loopback
