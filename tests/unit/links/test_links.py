"""Connections: handshake, refusals, keepalive, credit, redialling, publisher numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest
from tests.worlds.links import LinksAlone

from postroad.errors import BugError, DeniedError, PeerError, RedundantError, UnavailableError, UsageError
from postroad.ids import Identity
from postroad.links import resuming as module
from postroad.links.access import AuthConfig, Rule, hash_token
from postroad.links.connection import TAKES, Phase
from postroad.links.links import MAX_DUE, LinkSettings
from postroad.seam.effects import Close, Dial, Effect, Send
from postroad.seam.peers import Peer
from postroad.units import KIB, MIB, SECOND_US
from postroad.wire.frames import (
    BATCH_KINDS,
    CONTROL,
    DEFAULT_LIMITS,
    Credit,
    Hello,
    Kind,
    Message,
    Nack,
    Ping,
    Pong,
    Refuse,
    Request,
    Subscribe,
    Welcome,
    decode,
)

NOW = 1_000 * SECOND_US


def identity(number: int) -> Identity:
    return Identity(number=number, node=number.to_bytes(16, "big"), name=f"b{number}", boot=1, starts=1)


def make(
    number: int = 1,
    *,
    settings: LinkSettings | None = None,
    auth: AuthConfig | None = None,
    conflict: Callable[[int, bytes], bool] = lambda _number, _node: False,
) -> LinksAlone:
    publishers = iter(range(1, 1_000_000))
    keys = iter(range(1, 1_000_000))
    return LinksAlone(
        identity(number),
        settings=settings,
        auth=auth,
        new_publisher=lambda: next(publishers),
        draw=lambda n: next(keys) if n == 1 << 128 else n - 1,  # always the longest wait
        conflict=conflict,
    )


def hello(role: str = "client", **fields: object) -> Hello:
    made = Hello(
        version=1, role=role, name="somebody", token="", limits=DEFAULT_LIMITS, window=MIB, time_us=NOW
    )
    if role == "broker":
        made = msgspec.structs.replace(made, broker=9, node=(9).to_bytes(16, "big"), boot=1)
    return msgspec.structs.replace(made, **fields)


def sent(effects: list[Effect], connection: int | None = None) -> list[Message]:
    return [
        decode(effect.data)
        for effect in effects
        if isinstance(effect, Send) and connection in (None, effect.connection)
    ]


def close_of(effects: list[Effect]) -> Close | None:
    return next((effect for effect in effects if isinstance(effect, Close)), None)


def refusal(effects: list[Effect]) -> tuple[str, str]:
    """Code and reason of the only message, which is followed by a close for the same reason."""
    (message,) = sent(effects)
    assert isinstance(message, Refuse)
    close = close_of(effects)
    assert close is not None
    assert close.error is not None
    assert close.error.code == message.code
    return message.code, message.reason


def accept(
    links: LinksAlone,
    connection: int,
    message: Hello,
    *,
    now_us: int = NOW,
    loopback: bool = True,
    certificate: str | None = None,
) -> tuple[list[Effect], Peer | None]:
    assert (
        links.opened(connection, dialled=None, certificate=certificate, loopback=loopback, now_us=now_us)
        == []
    )
    effects, peer, own = links.received(connection, message, now_us)
    assert own
    links.check()
    return effects, peer


def dial(links: LinksAlone, connection: int, address: str = "there:1", *, now_us: int = NOW) -> Hello:
    (message,) = sent(
        links.opened(connection, dialled=address, certificate=None, loopback=True, now_us=now_us)
    )
    assert isinstance(message, Hello)
    return message


def connect(
    a: LinksAlone, b: LinksAlone, connection: int, address: str = "there:1", *, now_us: int = NOW
) -> Peer:
    """`a` dials `b`; both know the connection by the same number. The peer that `a` sees."""
    effects, seen = accept(b, connection, dial(a, connection, address, now_us=now_us), now_us=now_us)
    assert seen is not None
    (welcome,) = (message for message in sent(effects, connection) if isinstance(message, Welcome))
    _, peer, own = a.received(connection, welcome, now_us)
    assert own
    assert peer is not None
    a.check()
    return peer


# -- handshake -------------------------------------------------------------------------------------


def test_a_client_comes_up() -> None:
    links = make()
    small = msgspec.structs.replace(DEFAULT_LIMITS, event_bytes=KIB, batch_events=1 << 20)
    effects, peer = accept(links, 5, hello(limits=small))
    (welcome,) = sent(effects)
    assert isinstance(welcome, Welcome)
    assert (welcome.broker, welcome.name, welcome.window, welcome.publisher) == (1, "b1", 4 * MIB, 1)
    assert welcome.time_us == NOW
    assert peer == links.peer(5)
    assert peer is not None
    assert (peer.role, peer.publisher, peer.principal, peer.resumed) == ("client", 1, "anonymous", False)
    assert peer.limits.event_bytes == KIB, "the smaller of both"
    assert peer.limits.batch_events == DEFAULT_LIMITS.batch_events
    assert links.closed(5, NOW) == peer
    assert links.closed(5, NOW) is None
    assert links.peer(5) is None


def test_brokers_come_up_with_the_larger_cost_and_the_smaller_limits() -> None:
    a, b = make(1, settings=LinkSettings(cost=2)), make(2, settings=LinkSettings(cost=7))
    peer = connect(a, b, 5, "b:7420")
    assert (peer.role, peer.broker, peer.cost, peer.dialled) == ("broker", 2, 7, "b:7420")
    other = b.peer(5)
    assert other is not None
    assert (other.role, other.broker, other.cost, other.dialled) == ("broker", 1, 7, None)


def test_brokers_with_other_limits_are_not_linked() -> None:
    """An event that one broker takes must pass every link."""
    small = msgspec.structs.replace(DEFAULT_LIMITS, event_bytes=KIB)
    effects, peer = accept(make(), 5, hello("broker", limits=small))
    assert peer is None
    assert any(isinstance(effect, Close) and "different limits" in str(effect.error) for effect in effects)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": 2}, "protocol version 2"),
        ({"role": "king"}, "the role is"),
        ({"name": "x" * 256}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"token": "x" * 5_000}, "token"),
        ({"window": 1}, "window"),
        ({"window": 1 << 40}, "window"),
        ({"time_us": -1}, "clock"),
        ({"publisher": 1 << 32}, "4294967295"),
        ({"resume_key": b"x" * 65}, "a key has at most"),
        ({"limits": msgspec.structs.replace(DEFAULT_LIMITS, topic_depth=0)}, "topic_depth"),
        ({"limits": msgspec.structs.replace(DEFAULT_LIMITS, event_bytes=1)}, "event_bytes"),
        ({"role": "broker", "name": "", "node": bytes(16)}, "name"),
        ({"role": "broker", "node": b"short"}, "node id"),
        ({"role": "broker", "node": bytes(16), "broker": 1 << 32}, "4294967295"),
        ({"role": "broker", "node": bytes(16), "boot": -1}, "4294967295"),
        ({"role": "broker", "node": bytes(16), "cost": 0}, "cost"),
    ],
)
def test_a_hello_out_of_bounds_is_refused(fields: dict[str, object], reason: str) -> None:
    links = make()
    effects, peer = accept(links, 5, hello(**fields))
    assert peer is None
    code, text = refusal(effects)
    assert code == "protocol"
    assert reason in text
    assert not links.is_open(5)
    assert links.received(5, hello(), NOW) == ([], None, True), "what was on its way is dropped"
    assert links.closed(5, NOW) is None


@pytest.mark.parametrize(
    "fields", [{"version": 3}, {"window": 1}, {"node": b""}, {"name": ""}, {"cost": 1 << 20}, {"time_us": -5}]
)
def test_a_welcome_out_of_bounds_is_refused(fields: dict[str, object]) -> None:
    a, b = make(1), make(2)
    effects, _ = accept(b, 5, dial(a, 5))
    welcome, _ping = sent(effects)
    effects, peer, _ = a.received(5, msgspec.structs.replace(welcome, **fields), NOW)
    assert peer is None
    assert refusal(effects)[0] == "protocol"


def test_a_link_to_oneself_is_refused_and_left_to_rest() -> None:
    links = make(1)
    links.dial("me:1", NOW)
    assert links.tick(NOW) == [Dial("me:1")]
    effects, peer = accept(links, 6, dial(links, 5, "me:1"))
    assert peer is None
    assert refusal(effects)[0] == "same_broker"
    (message,) = sent(effects)
    effects, _, _ = links.received(5, message, NOW)
    assert close_of(effects) is not None
    links.closed(6, NOW)
    links.closed(5, NOW)
    assert links.next_deadline() is not None
    assert [e for e in links.tick(NOW + 59 * SECOND_US) if isinstance(e, Dial)] == []
    assert links.tick(NOW + 60 * SECOND_US) == [Dial("me:1")]


def test_a_number_that_belongs_to_another_node_is_refused() -> None:
    links = make(1, conflict=lambda number, node: number == 9 and node != bytes(16))
    effects, _ = accept(links, 5, hello("broker"))
    assert "belongs to another broker" in refusal(effects)[1]
    effects, _ = accept(links, 6, hello("broker", broker=1))
    assert "belongs to another broker" in refusal(effects)[1]
    _, peer = accept(links, 7, hello("broker", node=bytes(16)))
    assert peer is not None


def test_a_broker_that_was_never_started_is_refused() -> None:
    """Boots count from 1; 0 is what a client's HELLO has in that place."""
    effects, peer = accept(make(1), 5, hello("broker", boot=0))
    assert peer is None
    assert "boot" in refusal(effects)[1]


def test_a_handshake_that_takes_too_long_is_ended() -> None:
    links = make()
    links.opened(5, dialled=None, certificate=None, loopback=True, now_us=NOW)
    assert links.next_deadline() == NOW + 10 * SECOND_US
    assert links.tick(NOW + 10 * SECOND_US - 1) == []
    effects = links.tick(NOW + 10 * SECOND_US)
    assert refusal(effects)[0] == "unavailable"
    assert links.tick(NOW + 60 * SECOND_US) == []


def test_a_broker_that_says_no_is_asked_again_later() -> None:
    links = make()
    links.dial("there:1", NOW)
    links.tick(NOW)
    dial(links, 5)
    effects, _, own = links.received(5, Refuse(code="denied", reason="go\naway"), NOW)
    assert own
    assert effects[0] == Close(5, effects[0].error)  # type: ignore[union-attr]
    close = close_of(effects)
    assert close is not None
    assert isinstance(close.error, DeniedError)
    assert str(close.error) == "go?away", "what a peer wrote cannot forge lines of the log"
    assert links.closed(5, NOW) is None
    assert links.next_deadline() == NOW + 200_000


# -- who may send what -----------------------------------------------------------------------------

CLIENTS_SEND = {
    *(Kind.PUBLISH, Kind.BEST_EFFORT, Kind.SUBSCRIBE, Kind.UNSUBSCRIBE, Kind.ACK, Kind.REQUEST),
    *(Kind.SEND, Kind.END_SESSION, Kind.RECEIVE, Kind.SETTLE, Kind.UNRECEIVE, Kind.REPAIRED),
}
BROKERS_SEND = {
    Kind.BEST_EFFORT,
    *(Kind.KNOWLEDGE, Kind.SILENCE, Kind.ATTACH, Kind.DETACH, Kind.NACK, Kind.STAMP, Kind.RELEASE),
    *(Kind.TOPOLOGY, Kind.DIGEST, Kind.INTEREST, Kind.INTEREST_PULL),
    *(Kind.QUERY, Kind.ANSWER, Kind.DISCOVER),
}
UPKEEP = {Kind.REFUSE, Kind.PING, Kind.PONG, Kind.CREDIT}


def test_every_role_may_send_its_own_frames_only() -> None:
    a, b = make(1), make(2)
    b.opened(3, dialled=None, certificate=None, loopback=True, now_us=NOW)
    assert {kind for kind in Kind if b.allowed(3, kind)} == {Kind.HELLO}
    dial(a, 4)
    assert {kind for kind in Kind if a.allowed(4, kind)} == {Kind.WELCOME, Kind.REFUSE}
    connect(a, b, 5)
    accept(b, 6, hello())
    assert {kind for kind in Kind if b.allowed(5, kind)} == BROKERS_SEND | UPKEEP
    assert {kind for kind in Kind if b.allowed(6, kind)} == CLIENTS_SEND | UPKEEP
    assert not b.allowed(6, 250)
    assert not b.allowed(99, Kind.PING)
    assert set(TAKES) == set(Phase)


@pytest.mark.parametrize("kind", sorted(set(Kind) - CLIENTS_SEND - UPKEEP))
def test_what_a_client_may_not_send_is_its_error(kind: Kind) -> None:
    links = make()
    accept(links, 5, hello())
    with pytest.raises(PeerError, match=kind.name):
        links.admit(5, kind, 100, NOW)
    assert kind in BATCH_KINDS or kind in CONTROL


def test_a_forbidden_message_closes_its_connection_and_no_other() -> None:
    links = make()
    accept(links, 5, hello())
    accept(links, 6, hello())
    effects, _, own = links.received(5, Nack(pubend=1, spans=(), need={}), NOW)
    assert own
    assert refusal(effects)[0] == "protocol"
    assert not links.admit(5, Kind.PING, 20, NOW)
    assert links.is_open(6)
    assert links.received(6, Request(number=1, what="status"), NOW) == ([], None, False)
    assert links.received(6, Subscribe(number=1, topic="a", where=""), NOW) == ([], None, False)
    peer = links.closed(5, NOW)
    assert peer is not None, "who was up is still told when it is closed"


# -- keepalive -------------------------------------------------------------------------------------


def test_silence_is_asked_about_and_then_believed() -> None:
    links = make()
    accept(links, 5, hello())
    assert links.tick(NOW + 4 * SECOND_US) == []
    assert sent(links.tick(NOW + 5 * SECOND_US)) == [Ping(time_us=NOW + 5 * SECOND_US)]
    assert sent(links.tick(NOW + 10 * SECOND_US)) == [Ping(time_us=NOW + 10 * SECOND_US)]
    assert links.tick(NOW + 15 * SECOND_US - 1) == []
    effects = links.tick(NOW + 15 * SECOND_US)
    close = close_of(effects)
    assert close is not None
    assert isinstance(close.error, UnavailableError)
    assert "15.0 s" in str(close.error)


def test_many_that_are_quiet_at_once_are_asked_turn_by_turn() -> None:
    """Hundreds of clients that came together must not hold up the events of one turn."""
    links = make()
    for connection in range(3 * MAX_DUE - 1):
        accept(links, connection, hello())
    due = NOW + 5 * SECOND_US
    asked = [len(sent(links.tick(due + turn))) for turn in range(4)]
    assert asked == [MAX_DUE, MAX_DUE, MAX_DUE - 1, 0]
    assert links.next_deadline() > due


def test_anything_heard_keeps_a_connection() -> None:
    links = make()
    accept(links, 5, hello())
    links.tick(NOW + 5 * SECOND_US)
    assert links.admit(5, Kind.PUBLISH, 100, NOW + 14 * SECOND_US)
    links.consumed(5, 100)
    assert close_of(links.tick(NOW + 15 * SECOND_US)) is None
    assert sent(links.tick(NOW + 19 * SECOND_US)) == [Ping(time_us=NOW + 19 * SECOND_US)]


def test_a_process_that_was_stopped_asks_before_it_gives_up() -> None:
    links = make()
    accept(links, 5, hello())
    later = NOW + 3_600 * SECOND_US
    assert sent(links.tick(later)) == [Ping(time_us=later)]
    links.received(5, Pong(time_us=later, at_us=later), later + 5)
    assert close_of(links.tick(later + 4 * SECOND_US)) is None


def test_pings_are_answered_and_the_round_trip_is_kept() -> None:
    a, b = make(1), make(2)
    connect(a, b, 5)
    (ping,) = sent(a.tick(NOW + 5 * SECOND_US))
    effects, _, own = b.received(5, ping, NOW + 5 * SECOND_US + 300)
    assert own
    (pong,) = sent(effects)
    a.received(5, pong, NOW + 5 * SECOND_US + 800)
    a.received(5, Pong(time_us=17, at_us=0), NOW + 9 * SECOND_US)
    (link,) = a.status(NOW + 10 * SECOND_US)["links"]  # type: ignore[misc]
    assert link["rtt_ms"] == 0.8
    assert (sum(a.round_trips.counts), a.round_trips.total_us) == (1, 800)
    assert link["up_s"] == 10


def test_the_clocks_of_clients_are_measured_and_shown() -> None:
    """Spec V9: a pong of a client tells how far its clock is from ours, half the round trip taken off."""
    links = make()
    for connection, ahead_us in ((5, 2 * SECOND_US), (6, -SECOND_US)):
        accept(links, connection, hello())
        assert links.status(NOW)["client_clocks"]["measured"] == connection - 5  # type: ignore[call-overload]
        (ping,) = sent(links.tick(NOW + 5 * SECOND_US), connection)
        assert isinstance(ping, Ping)
        there_us = NOW + 5 * SECOND_US + 400 + ahead_us
        links.received(connection, Pong(time_us=ping.time_us, at_us=there_us), NOW + 5 * SECOND_US + 800)
    clocks = links.status(NOW)["client_clocks"]
    assert clocks == {"measured": 2, "least_ms": -1_000.0, "most_ms": 2_000.0}


def test_a_busy_link_is_measured_too() -> None:
    links = make()
    accept(links, 5, hello("broker"))
    pings: list[Message] = []
    for second in range(1, 65):
        links.admit(5, Kind.SILENCE, 50, NOW + second * SECOND_US)
        pings += sent(links.tick(NOW + second * SECOND_US))
    assert pings == [Ping(time_us=NOW + 30 * SECOND_US), Ping(time_us=NOW + 60 * SECOND_US)]


def test_timers_do_not_pile_up() -> None:
    links = make()
    for connection in range(50):
        accept(links, connection, hello())
    for second in range(1, 300):
        for connection in range(50):
            links.admit(connection, Kind.PING, 20, NOW + second * SECOND_US)
        links.tick(NOW + second * SECOND_US)
    assert len(links._timers) <= 50


# -- credit ----------------------------------------------------------------------------------------


def test_credit_goes_out_below_zero_by_one_frame_and_comes_back() -> None:
    links = make()
    accept(links, 5, hello(window=100 * KIB))
    assert links.available(5) == 100 * KIB
    assert links.spend(5, 99 * KIB)
    assert links.spend(5, 99 * KIB), "one frame below zero"
    assert links.available(5) == -98 * KIB
    assert not links.spend(5, 1)
    assert links.received(5, Credit(size=99 * KIB), NOW) == ([], None, True)
    assert links.available(5) == KIB
    assert links.spend(5, 10)
    assert links.available(77) == 0
    assert not links.spend(77, 1)


@pytest.mark.parametrize("size", [0, -1, 101])
def test_credit_for_what_was_not_sent_is_the_peers_error(size: int) -> None:
    links = make()
    accept(links, 5, hello(window=100 * KIB))
    links.spend(5, 100)
    effects, _, _ = links.received(5, Credit(size=size), NOW)
    assert refusal(effects)[0] == "protocol"


def test_consumed_bytes_are_given_back_by_the_quarter() -> None:
    links = make(settings=LinkSettings(client_window=64 * KIB))
    accept(links, 5, hello())
    assert links.admit(5, Kind.PUBLISH, 40 * KIB, NOW)
    assert links.consumed(5, 15 * KIB) == []
    assert sent(links.consumed(5, KIB)) == [Credit(size=16 * KIB)]
    links.check()
    with pytest.raises(BugError):
        links.consumed(5, 25 * KIB)
    assert links.consumed(99, 5) == []


def test_a_peer_that_sends_beyond_its_window_is_in_error() -> None:
    links = make(settings=LinkSettings(client_window=64 * KIB))
    accept(links, 5, hello())
    assert links.admit(5, Kind.PUBLISH, 63 * KIB, NOW)
    assert links.admit(5, Kind.PUBLISH, MIB, NOW), "one frame of slack"
    assert links.admit(5, Kind.SUBSCRIBE, 100, NOW), "control frames are free"
    with pytest.raises(PeerError, match="window"):
        links.admit(5, Kind.PUBLISH, 100, NOW)
    links.consumed(5, MIB)
    assert links.admit(5, Kind.PUBLISH, 100, NOW)
    links.check()


# -- one link per pair -----------------------------------------------------------------------------


def test_of_links_dialled_by_both_the_one_of_the_lower_node_stays() -> None:
    a, b = make(1), make(2)
    connect(a, b, 5)
    effects, peer = accept(a, 6, dial(b, 6))
    assert peer is None
    assert refusal(effects)[0] == "redundant"
    (message,) = sent(effects)
    b.received(6, message, NOW)
    b.closed(6, NOW)
    a.closed(6, NOW)
    assert a.is_open(5)
    assert b.is_open(5)


def test_the_lower_nodes_link_replaces_the_other() -> None:
    a, b = make(1), make(2)
    connect(b, a, 5)
    effects, seen = accept(b, 6, dial(a, 6))
    assert seen is not None
    assert seen.replaces == 5
    assert isinstance(close_of(effects), Close)
    welcome, refuse = sent(effects, 6)[0], sent(effects, 5)[0]
    assert isinstance(refuse, Refuse)
    assert refuse.code == "redundant"
    effects, peer, _ = a.received(6, welcome, NOW)
    assert peer is not None
    assert peer.replaces == 5
    assert a.closed(5, NOW) is None, "its place was taken already"
    assert b.closed(5, NOW) is None
    assert a.closed(6, NOW) == peer
    a.check()
    b.check()


def test_the_same_diallers_newer_link_replaces_its_older_one_whatever_arrives_first() -> None:
    a, b = make(1), make(2)
    first, second = dial(a, 5, "x:1"), dial(a, 6, "y:1")
    assert second.time_us > first.time_us
    welcomes = {}
    for connection, message in ((5, first), (6, second)):
        effects, _ = accept(b, connection, message)
        (welcomes[connection],) = (m for m in sent(effects) if isinstance(m, Welcome))
    _, peer, _ = a.received(6, welcomes[6], NOW)
    assert peer is not None
    effects, peer, _ = a.received(5, welcomes[5], NOW)
    assert peer is None
    assert refusal(effects)[0] == "redundant"
    assert a.is_open(6)
    assert b.is_open(6)
    assert not b.is_open(5)


def test_a_peer_that_restarted_replaces_its_dead_link() -> None:
    a = make(1)
    b = make(2)
    connect(a, b, 5)
    message = msgspec.structs.replace(dial(make(2), 6), boot=2, time_us=5)
    effects, peer = accept(a, 6, message)
    assert peer is not None
    assert peer.replaces == 5
    assert sent(effects, 5)


def test_a_link_that_is_being_closed_is_no_rival() -> None:
    a, b = make(1), make(2)
    connect(a, b, 5)
    a.refuse(5, PeerError("whatever"))
    effects, peer = accept(a, 6, dial(b, 6))
    assert peer is not None
    assert peer.replaces == 5
    assert close_of(effects) is None
    assert a.closed(5, NOW) is None
    a.check()
    assert a.closed(6, NOW) == peer


# -- dialling --------------------------------------------------------------------------------------


def dials(links: LinksAlone, until_us: int) -> list[int]:
    """When an address that never answers is dialled."""
    times: list[int] = []
    while True:
        at = links.next_deadline()
        if at is None or at > until_us:
            return times
        for effect in links.tick(at):
            assert effect == Dial("there:1")
            times.append(at)
            links.dial_failed("there:1", at)


def test_redialling_backs_off_and_never_ends() -> None:
    links = make()
    links.dial("there:1", NOW)
    times = dials(links, NOW + 60 * SECOND_US)
    waits = [(b - a) / SECOND_US for a, b in itertools.pairwise(times)]
    assert times[0] == NOW
    assert waits[:5] == [0.2, 0.4, 0.8, 1.6, 2]
    assert set(waits[5:]) == {2}


def test_a_link_that_held_is_redialled_soon_and_one_that_fell_at_once_is_not() -> None:
    a, b = make(1), make(2)
    a.dial("there:1", NOW)
    now, waits = NOW, []
    for connection, held_us in enumerate((0, 0, 0, 10 * SECOND_US, 0)):
        assert Dial("there:1") in a.tick(now)
        connect(a, b, connection, now_us=now)
        now += held_us
        b.closed(connection, now)
        assert a.closed(connection, now) is not None
        at = a._dialler.next_deadline()
        assert at is not None
        waits.append(at - now)
        now = at
    assert waits == [200_000, 400_000, 800_000, 200_000, 400_000]


def test_an_address_of_a_linked_broker_rests_until_that_link_is_gone() -> None:
    a, b = make(1), make(2)
    a.dial("x:1", NOW)
    a.dial("y:1", NOW)
    assert a.tick(NOW) == [Dial("x:1"), Dial("y:1")]
    connect(a, b, 5, "x:1")
    connect(a, b, 6, "y:1")
    assert not a.is_open(5)
    assert a.closed(5, NOW) is None
    b.closed(5, NOW)
    now = NOW
    for _ in range(10):
        now += 60 * SECOND_US
        a.admit(6, Kind.SILENCE, 10, now)
        assert [effect for effect in a.tick(now) if isinstance(effect, Dial)] == []
    assert a.closed(6, now) is not None
    assert {effect for effect in a.tick(now + SECOND_US) if isinstance(effect, Dial)} == {
        Dial("x:1"),
        Dial("y:1"),
    }


def test_an_address_no_longer_wanted_is_forgotten_unless_it_is_connected() -> None:
    a, b = make(1), make(2)
    a.dial("there:1", NOW)
    a.tick(NOW)
    connect(a, b, 5)
    assert not a.undial("there:1")
    a.closed(5, NOW)
    assert a.undial("there:1")
    assert a.next_deadline() is None or a.tick(NOW + 100 * SECOND_US) == []
    assert a.undial("there:1")


def test_dialling_has_limits_and_settings_are_checked() -> None:
    links = make()
    for n in range(1_000):
        links.dial(f"h:{n}", NOW)
    with pytest.raises(UsageError):
        links.dial("one:more", NOW)
    for fields in ({"cost": 0}, {"broker_window": 1}, {"ping_us": 20 * SECOND_US}, {"redial_first_us": 0}):
        with pytest.raises(UsageError):
            LinkSettings(**fields)


# -- publishers ------------------------------------------------------------------------------------


def test_a_client_goes_on_with_its_number_and_replaces_its_old_connection() -> None:
    links = make()
    effects, _ = accept(links, 5, hello())
    (welcome,) = sent(effects)
    assert isinstance(welcome, Welcome)
    back = hello(publisher=welcome.publisher, resume_key=welcome.resume_key)
    effects, peer = accept(links, 6, back)
    assert peer is not None
    assert (peer.publisher, peer.resumed, peer.replaces) == (welcome.publisher, True, 5)
    close = close_of(effects)
    assert close is not None
    assert close.connection == 5
    assert isinstance(close.error, RedundantError)
    assert links.closed(5, NOW) is None
    assert links.closed(6, NOW) == peer
    _, peer = accept(links, 7, back)
    assert peer is not None
    assert (peer.resumed, peer.replaces) == (True, None)


def test_a_hello_that_was_under_way_for_long_does_not_end_the_newer_connection_of_its_client() -> None:
    """A client gives up on a connection and dials again; what it said first may arrive last."""
    links = make()
    effects, _ = accept(links, 5, hello())
    (welcome,) = sent(effects)
    assert isinstance(welcome, Welcome)
    links.closed(5, NOW)
    back = hello(publisher=welcome.publisher, resume_key=welcome.resume_key)
    links.opened(6, dialled=None, certificate=None, loopback=True, now_us=NOW)
    _, newer = accept(links, 7, back)
    assert newer is not None
    effects, peer, _ = links.received(6, back, NOW)
    assert peer is None
    assert refusal(effects)[0] == "redundant"
    assert links.is_open(7)
    assert links.closed(6, NOW) is None
    assert links.closed(7, NOW) == newer


def test_a_wrong_key_or_another_principal_gets_a_new_number() -> None:
    auth = AuthConfig(tokens={hash_token("a"): "alice", hash_token("b"): "bob"})
    links = make(auth=auth)
    effects, _ = accept(links, 5, hello(token="a"))
    (welcome,) = sent(effects)
    assert isinstance(welcome, Welcome)
    tries = (("a", b"wrong"), ("a", b""), ("b", welcome.resume_key))
    for connection, (token, key) in enumerate(tries, start=6):
        message = hello(token=token, publisher=welcome.publisher, resume_key=key)
        _, peer = accept(links, connection, message)
        assert peer is not None
        assert not peer.resumed
        assert peer.publisher != welcome.publisher
    assert links.is_open(5)


def test_numbers_of_clients_long_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PUBLISHERS", 3)
    links = make()
    keys = {}
    for connection in range(1, 5):
        effects, _ = accept(links, connection, hello())
        (welcome,) = sent(effects)
        assert isinstance(welcome, Welcome)
        keys[connection] = (welcome.publisher, welcome.resume_key)
        links.closed(connection, NOW)
    for connection, resumed in ((1, False), (4, True)):
        number, key = keys[connection]
        _, peer = accept(links, connection + 10, hello(publisher=number, resume_key=key))
        assert peer is not None
        assert peer.resumed is resumed


# -- access ----------------------------------------------------------------------------------------


def test_the_number_of_a_client_that_stays_is_kept_however_many_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a new number what it has in flight would look like the events of another publisher."""
    monkeypatch.setattr(module, "MAX_PUBLISHERS", 3)
    links = make(1)
    (welcome,) = [one for one in sent(accept(links, 1, hello())[0]) if isinstance(one, Welcome)]
    for connection in range(2, 20):
        accept(links, connection, hello())
        links.closed(connection, NOW)
        links.check()
    links.closed(1, NOW)
    accept(links, 20, hello())
    links.closed(20, NOW)  # just now it was still there: others go first
    _, peer = accept(links, 21, hello(publisher=welcome.publisher, resume_key=welcome.resume_key))
    assert peer is not None
    assert peer.resumed


def test_numbers_that_come_round_again_pass_over_those_in_use() -> None:
    """There are four million in one start of a broker; those who came first may still be there."""
    numbers = itertools.cycle(range(1, 202))
    resuming = module.Resuming(new_number=lambda: next(numbers), new_key=lambda: b"key", pubends=1)
    for connection in range(1, 201):
        number, resumed = resuming.number(hello(), "anonymous")
        resuming.opened(number, connection)
        assert (number, resumed) == (connection, False)
    next(numbers)
    assert resuming.number(hello(), "anonymous") == (201, False)


def test_more_clients_than_are_remembered_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PUBLISHERS", 3)
    links = make(1)
    for connection in range(1, 10):
        assert accept(links, connection, hello())[1] is not None
        links.check()


def test_anonymous_peers_are_served_on_loopback_only() -> None:
    links = make()
    for connection, role in enumerate(("client", "broker")):
        effects, peer = accept(links, connection, hello(role), loopback=False)
        assert peer is None
        code, reason = refusal(effects)
        assert code == "denied"
        assert "loopback" in reason


def test_tokens_certificates_and_rules_decide() -> None:
    auth = AuthConfig(
        tokens={hash_token("secret"): "alice", hash_token("link"): "b9"},
        certificates=True,
        link_principals=("b9",),
        rules=(
            Rule(principal="alice", allow=True, action="publish", topic="orders/#"),
            Rule(principal="*", allow=True, action="subscribe", topic="public/#"),
        ),
    )
    links = make(auth=auth)
    for connection, token in ((1, ""), (2, "guess")):
        effects, _ = accept(links, connection, hello(token=token), loopback=False)
        assert refusal(effects)[0] == "denied"
    _, alice = accept(links, 3, hello(token="secret"), loopback=False)
    assert alice is not None
    assert alice.principal == "alice"
    assert links.may_publish(3, "orders/eu")
    assert not links.may_publish(3, "other")
    assert links.may_subscribe(3, "public/+")
    assert not links.may_subscribe(3, "#")
    assert not links.may_admin(3)
    _, carol = accept(links, 4, hello(), loopback=False, certificate="carol")
    assert carol is not None
    assert carol.principal == "carol"
    assert not links.may_publish(4, "orders/eu")
    effects, _ = accept(links, 5, hello("broker", token="secret"), loopback=False)
    assert "may not link" in refusal(effects)[1]
    _, broker = accept(links, 6, hello("broker", token="link"), loopback=False)
    assert broker is not None
    assert not links.may_publish(99, "orders/eu")


def test_opening_twice_is_our_own_bug() -> None:
    links = make()
    links.opened(5, dialled=None, certificate=None, loopback=True, now_us=NOW)
    with pytest.raises(BugError):
        links.opened(5, dialled=None, certificate=None, loopback=True, now_us=NOW)
