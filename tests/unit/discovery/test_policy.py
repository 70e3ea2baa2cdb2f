"""Who is answered, how cookies and credentials are checked, which broker is drawn (spec V6, V7)."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from postroad.broker.core import Broker
from postroad.clocks import ClockOffset
from postroad.config import BrokerConfig
from postroad.discovery.cookies import COOKIE_LIFE_US, Cookies
from postroad.discovery.memory import Memory
from postroad.discovery.node import DiscoveryNode, NodeSettings
from postroad.discovery.policy import Policy, credential
from postroad.discovery.rates import ASKING_A_SECOND, PINGS_A_SECOND, SEALED_A_SECOND, Rate, Rates
from postroad.discovery.selection import Candidate, choose, shortlist, weigh
from postroad.discovery.settings import DiscoveryConfig, SearchSettings, Weights
from postroad.errors import UsageError
from postroad.ids import Identity
from postroad.links.access import AuthConfig, hash_token
from postroad.seam.datagrams import Datagram, SendTo
from postroad.units import GIB, SECOND_US
from postroad.wire.datagrams import DATAGRAM_MARK
from postroad.wire.discovery import (
    MIN_REQUEST_BYTES,
    Announce,
    Cookie,
    Kind,
    Message,
    Ping,
    Request,
    Response,
    Usage,
    decode,
    encode,
    padded,
)

NOW_US = 1_700_000_000_000_000
UUID = bytes(range(16))
TOKENS = {hash_token("s3cret"): "shared"}


def test_realms_and_credentials_decide_who_is_answered() -> None:
    """V6."""
    policy = Policy(TOKENS, certificates=False, anonymous=False, realms=("10.0.0.0/8",))

    def admits(host: str, token: str, cookie: bytes = b"", made_with: bytes = b"") -> bool:
        shown = credential(token, UUID, made_with)
        return policy.admits(host, uuid=UUID, cookie=cookie, credential=shown, certificate="")

    assert admits("10.1.2.3", "s3cret")
    assert admits("10.1.2.3", "s3cret", b"c", b"c")
    assert not admits("10.1.2.3", "s3cret", b"c", b"d")  # a copy with another address's cookie
    assert not admits("10.1.2.3", "guess")
    assert not admits("10.1.2.3", "")
    assert not admits("192.0.2.1", "s3cret")
    assert not admits("nonsense", "s3cret")


def test_without_tokens_all_are_answered_and_anonymous_ones_on_loopback_beside_others() -> None:
    def admits(policy: Policy, host: str, certificate: str = "") -> bool:
        return policy.admits(host, uuid=UUID, cookie=b"", credential=b"", certificate=certificate)

    assert admits(Policy({}, certificates=False, anonymous=False, realms=()), "192.0.2.1")
    beside = Policy(TOKENS, certificates=False, anonymous=True, realms=())
    assert admits(beside, "127.0.0.1")
    assert not admits(beside, "192.0.2.1")
    sealed = Policy({}, certificates=True, anonymous=False, realms=())
    assert admits(sealed, "192.0.2.1", "alice")
    assert not admits(sealed, "192.0.2.1")


def test_who_has_no_token_gets_no_datagram_at_all() -> None:
    """Spec V6: neither of a discovery node nor of a broker, whatever is asked; who has it gets a cookie."""
    draw = Random(1).randrange
    identity = Identity(number=1, node=bytes(15) + b"1", name="b", boot=1, starts=1)
    config = BrokerConfig(
        auth=AuthConfig(tokens=TOKENS), discovery=DiscoveryConfig(private_nodes=True, group="239.0.0.1:1")
    )
    cores = (
        DiscoveryNode(NodeSettings(name="n", tokens=TOKENS), draw=draw),
        Broker(config, identity, draw=draw, now_us=NOW_US),
    )
    source = ("192.0.2.1", 4000)

    def answers(message: Message) -> list[list[Message]]:
        data = encode(padded(message, MIN_REQUEST_BYTES))
        group = ("239.0.0.1", 1)
        asked = [[Datagram(source, data), Datagram(source, data, group)] for _ in cores]
        effects = [core.handle(inputs, NOW_US) for core, inputs in zip(cores, asked, strict=True)]
        return [[decode(one.data) for one in sent if isinstance(one, SendTo)] for sent in effects]

    for shown in (b"", credential("guess", UUID, b""), credential("s3cret", bytes(16), b"")):
        request = Request(uuid=UUID, attempt=1, sent_us=0, credential=shown)
        announce = Announce(uuid=UUID, name="n", sent_us=0, credential=shown)
        for message in (request, announce, Ping(key=bytes(24), sent_us=0)):
            assert answers(message) == [[], []]
    request = Request(uuid=UUID, attempt=1, sent_us=0, credential=credential("s3cret", UUID, b""))
    assert [{type(one) for one in sent} for sent in answers(request)] == [{Cookie}, {Cookie}]


def test_a_cookie_serves_one_purpose_at_one_address_for_a_while() -> None:
    cookies = Cookies(Random(1).randrange)
    cookie = cookies.bake(b"request", ("192.0.2.1", 5), NOW_US)
    assert cookies.good(cookie, b"request", ("192.0.2.1", 5), NOW_US + COOKIE_LIFE_US)
    assert not cookies.good(cookie, b"request", ("192.0.2.1", 5), NOW_US + COOKIE_LIFE_US + 1)
    assert not cookies.good(cookie, b"ping", ("192.0.2.1", 5), NOW_US)
    assert not cookies.good(cookie, b"request", ("192.0.2.1", 6), NOW_US)
    assert not cookies.good(cookie[:-1] + b"x", b"request", ("192.0.2.1", 5), NOW_US)
    assert not Cookies(Random(2).randrange).good(cookie, b"request", ("192.0.2.1", 5), NOW_US)


def test_the_last_thousand_requests_are_remembered() -> None:
    """V5."""
    memory = Memory(1000)
    assert all(memory.attempts(number.to_bytes(16, "big"), 1) == 1 for number in range(1001))
    assert len(memory) == 1000
    assert memory.attempts((1000).to_bytes(16, "big"), 1) == 0
    assert memory.attempts((1000).to_bytes(16, "big"), 5) == 2  # those between never came
    assert memory.attempts((1000).to_bytes(16, "big"), 4) == 0
    assert memory.attempts(bytes(16), 1) == 1  # the oldest was forgotten


def test_a_second_has_room_for_so_many() -> None:
    rate = Rate(3)
    assert [rate.admits(NOW_US) for _ in range(4)] == [True, True, True, False]
    assert rate.admits(NOW_US + SECOND_US)


def test_a_flood_of_pings_or_of_sealed_datagrams_takes_no_place_of_those_who_ask() -> None:
    rates = Rates()
    asking, ping = encode(Request(uuid=UUID, attempt=1, sent_us=0)), encode(Ping(key=bytes(24), sent_us=0))
    sealed = DATAGRAM_MARK + bytes((Kind.SEALED,))
    for data, most in ((ping, PINGS_A_SECOND), (sealed, SEALED_A_SECOND), (asking, ASKING_A_SECOND)):
        assert sum(rates.admits(data, NOW_US) for _ in range(most + 100)) == most


def candidate(number: int, round_trips_us: list[int], usage: Usage = Usage(), delay_us: int = 0) -> Candidate:  # noqa: B008
    response = Response(
        uuid=UUID,
        attempt=1,
        sent_us=0,
        broker=number,
        name=f"b{number}",
        address="",
        transports=(),
        ping_key=bytes(24),
        usage=usage,
        network=1,
        members=1,
    )
    weight = weigh(usage, delay_us, Weights())
    return Candidate(response, ("h", 1), f"h:{number}", delay_us, weight, round_trips_us)


def test_the_weight_counts_usage_and_delay_and_the_target_set_has_the_heaviest() -> None:
    """V7: Paper 9: free memory and much of it are good; links, connections, CPU and delay are not."""
    idle = Usage(memory_total_bytes=8 * GIB, memory_free_bytes=8 * GIB)
    busy = Usage(cpu_share=0.9, connections=200, links=3, memory_total_bytes=8 * GIB, memory_free_bytes=GIB)
    assert weigh(idle, 0, Weights()) == pytest.approx(1.04)
    assert weigh(busy, 0, Weights()) < weigh(idle, 50_000, Weights()) < weigh(idle, 0, Weights())
    ranked = shortlist([candidate(1, [], busy), candidate(2, [], idle, 50_000), candidate(3, [], idle)], 2)
    assert [one.response.broker for one in ranked] == [3, 2]


def test_the_nearest_by_ping_is_chosen_and_chance_decides_among_the_equally_near() -> None:
    """V7."""
    draw = Random(1).randrange
    far = candidate(1, [50_000])
    near = [candidate(2, [10_300, 20_000]), candidate(3, [10_900])]
    unheard = candidate(4, [])
    counts = Counter(choose([far, *near, unheard], Weights(), draw)[0].response.broker for _ in range(400))
    assert set(counts) == {2, 3}
    assert 150 <= counts[2] <= 250
    assert [one.response.broker for one in choose([unheard, far], Weights(), draw)] == [1, 4]
    busy = candidate(5, [10_000], Usage(connections=300))
    counts = Counter(choose([busy, *near], Weights(), draw)[0].response.broker for _ in range(400))
    assert counts[5] < 40  # the less busy ones take what comes


def test_of_the_last_measurements_of_a_clock_the_quickest_counts() -> None:
    clock = ClockOffset()
    assert not clock
    clock.heard(NOW_US + 5_000, NOW_US)
    assert clock.offset_us == 5_000
    clock.measured(NOW_US, NOW_US + 100_000 + 15_000, NOW_US + 80_000)  # 80 ms, of which 30 on one way
    assert clock.offset_us == 75_000
    clock.measured(NOW_US, NOW_US + 101_000, NOW_US + 2_000)
    assert (clock.offset_us, clock.round_trip_us) == (100_000, 2_000)
    for _ in range(8):
        clock.measured(NOW_US, NOW_US + 205_000, NOW_US + 10_000)  # it was stepped: the old ones are gone
    assert clock.offset_us == 200_000


@pytest.mark.parametrize(
    "settings",
    [
        {"nodes": ("h:1",) * 9},
        {"links": 0},
        {"lifetime_s": 5},
        {"geography": "x" * 129},
        {"realms": ("10.0.0.1/8",)},
        {"realms": ("10.0.0.0/8",) * 101},
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        DiscoveryConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        SearchSettings(targets=0)
