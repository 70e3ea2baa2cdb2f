"""A token goes only to brokers that have shown that they know it (docs/reference/security.md)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from postroad.broker.core import Broker
from postroad.config import BrokerConfig
from postroad.discovery.envelopes import Envelopes
from postroad.discovery.search import Search, Stage
from postroad.discovery.settings import SearchSettings
from postroad.ids import Identity
from postroad.links.access import AuthConfig, hash_token
from postroad.links.connection import LinkSettings
from postroad.seam.datagrams import Datagram, SendTo
from postroad.wire.discovery import Response, decode, encode

NOW_US = 1_700_000_000_000_000
REQUESTER, BROKER = ("192.0.2.1", 4_000), ("192.0.2.2", 7420)
Change = Callable[[Response], Response]


def changed(**values: object) -> Change:
    return lambda response: msgspec.structs.replace(response, **values)


def _same(response: Response) -> Response:
    return response


def search(
    *, token: str, proof_token: str = "", known: dict[str, str], change: Change = _same, link: str = ""
) -> Search:
    """One that a broker with these tokens (token -> principal) answers, each response changed on the way."""
    auth = AuthConfig(tokens={hash_token(secret): principal for secret, principal in known.items()})
    config = BrokerConfig(auth=auth, links=LinkSettings(token=link, address="192.0.2.2:7420"))
    identity = Identity(number=7, node=bytes(15) + b"7", name="b", boot=1, starts=1)
    broker = Broker(config, identity, draw=Random(1).randrange, now_us=NOW_US)
    seeker = Search(
        SearchSettings(),
        nodes=[],
        group=None,
        known=[BROKER],
        draw=Random(2).randrange,
        envelopes=Envelopes(None),
        token=token,
        proof_token=proof_token,
    )
    now_us, sent = NOW_US, seeker.start(NOW_US)
    while seeker.stage is not Stage.OVER:
        effects = broker.handle([Datagram(REQUESTER, item.data) for item in sent], now_us)
        now_us = max(now_us + 1_000, seeker.next_deadline() or 0)
        sent = []
        for item in effects:
            if isinstance(item, SendTo):
                message = decode(item.data)
                data = encode(change(message)) if isinstance(message, Response) else item.data
                sent += seeker.datagram(Datagram(BROKER, data), now_us)
        sent += seeker.tick(now_us)
    return seeker


def test_a_broker_that_knows_the_token_is_taken() -> None:
    result = search(token="s3cret", known={"s3cret": "shared"}).result
    assert result is not None
    assert result.chosen.address == "192.0.2.2:7420"


def test_without_a_token_whoever_answers_is_taken() -> None:
    assert search(token="", known={}).result is not None
    assert search(token="", known={}, change=changed(address="192.0.2.66:1")).result is not None


@pytest.mark.parametrize(
    "change",
    [
        changed(proof=b"", link_proof=b""),
        changed(proof=bytes(16), link_proof=bytes(16)),
        changed(address="192.0.2.66:7420"),
        changed(address=""),
        changed(broker=8),
        changed(name="other"),
        changed(ping_key=bytes(24)),
    ],
)
def test_who_shows_nothing_or_repeats_it_as_another_is_not_taken(change: Change) -> None:
    """V6."""
    failed = search(token="s3cret", known={"s3cret": "shared"}, change=change)
    assert "that knows this token" in str(failed.error)


def test_a_broker_that_asks_for_no_token_proves_nothing() -> None:
    assert search(token="s3cret", known={}).result is None


def test_clients_do_not_learn_the_token_of_brokers() -> None:
    """Requests show that of the clients, which discovery nodes know; brokers are shown another one."""
    tokens = {"s3cret": "shared", "l1nk": "brokers"}
    assert search(token="s3cret", proof_token="l1nk", known=tokens, link="l1nk").result is not None
    # Who has the clients' token only, or another one of brokers.
    assert search(token="s3cret", proof_token="l1nk", known={"s3cret": "shared"}).result is None
    assert search(token="s3cret", proof_token="l1nk", known=tokens, link="other").result is None
    # Where each broker has a token of its own, the others know its digest.
    assert search(token="l1nk", proof_token="l1nk", known=tokens, link="another").result is not None
