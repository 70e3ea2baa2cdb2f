"""The request `network`: all brokers answer one report, by its own rules, within bounds."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.worlds.durable_brokers import DurableNet
from tests.worlds.durable_subscribers import Reader

from postroad.clients import network
from postroad.links.access import AuthConfig, Rule
from postroad.overlay.inquiries import Inquiries
from postroad.wire.frames import Reply, Request, encode

LINE = [(0, 1), (1, 2)]


def ask(client: Reader, number: int = 7, **arguments: str) -> None:
    client.send(encode(Request(number=number, what="network", arguments=arguments)))


def replies(client: Reader) -> list[Reply]:
    return [message for message in client.messages if isinstance(message, Reply)]


def answer(client: Reader, **arguments: str) -> dict[str, Any]:
    ask(client, **arguments)
    reply = replies(client)[-1]
    assert reply.code == "", reply.body
    return dict(json.loads(reply.body))


def guarded() -> DurableNet:
    """Three brokers in a line with tokens; root administers, alice reads a/#."""
    net = DurableNet(3)
    tokens = {hashlib.sha256(name.encode()).hexdigest(): name for name in ("alice", "eve", "root")}
    rules = (
        Rule(principal="alice", allow=True, action="subscribe", topic="a/#"),
        Rule(principal="root", allow=True, action="subscribe"),
    )
    auth = AuthConfig(tokens=tokens, rules=rules, link_principals=("root", "anonymous"), anonymous=True)
    net.config = replace(net.config, auth=auth)
    for at in range(3):
        net.kill(at)
        net.start(at)
    for one, other in LINE:
        net.link(one, other)
    net.wait(3)
    return net


def test_every_broker_answers_as_it_would_have_answered_there() -> None:
    net = DurableNet(3, LINE)
    net.wait(3)
    there = Reader(net, 2)
    there.begin("billing", ack="manual")
    net.wait(1)
    client = Reader(net, 0)
    status = answer(client, what="status")
    assert list(status["answers"]) == ["b0", "b1", "b2"]
    assert {row["name"] for row in status["answers"].values()} == {"b0", "b1", "b2"}
    assert (status["silent"], status["refused"]) == ([], {})
    subs = answer(client, what="subs")["answers"]
    assert [[row["name"] for row in subs[b]["subscriptions"]] for b in ("b0", "b1", "b2")] == [
        [],
        [],
        ["billing"],
    ]
    assert answer(client, what="subs", name="other")["answers"]["b2"]["subscriptions"] == []
    assert len(answer(client, what="clients")["answers"]["b2"]["clients"]) == 1
    assert list(answer(client, what="status", broker="b1")["answers"]) == ["b1"]


def test_each_broker_applies_its_rules_to_who_asks() -> None:
    net = guarded()
    for name, topic in (("mine", "a/x"), ("secret", "b/x")):
        Reader(net, 2, "root").begin(name, topic=topic, ack="manual")
        net.wait(1)
    seen = {}
    for principal in ("root", "alice", "eve"):
        body = answer(Reader(net, 0, principal), what="subs")
        seen[principal] = [row["name"] for row in body["answers"]["b2"]["subscriptions"]]
    assert seen == {"root": ["mine", "secret"], "alice": ["mine"], "eve": []}
    clients = answer(Reader(net, 0, "eve"), what="clients")["answers"]["b2"]["clients"]
    assert clients == []


def test_a_broker_that_serves_nobody_anonymous_says_so() -> None:
    net = DurableNet(2)
    open_to_all = net.config
    net.config = replace(
        open_to_all,
        auth=AuthConfig(tokens={"0" * 64: "alice"}, link_principals=("anonymous",), anonymous=True),
    )
    net.kill(1)
    net.start(1)
    net.link(0, 1)
    net.wait(3)
    assert set(answer(Reader(net, 0), what="status")["answers"]) == {"b0", "b1"}
    broker = net.brokers[1]
    assert broker is not None
    broker._rooms.links._access._config = replace(net.config.auth, anonymous=False)
    body = answer(Reader(net, 0), what="status")
    assert list(body["answers"]) == ["b0"]
    assert body["refused"] == {"b1": "it serves nobody who is anonymous"}


def test_who_does_not_answer_in_time_is_named() -> None:
    net = DurableNet(3, LINE)
    net.wait(3)
    broker = net.brokers[2]
    assert broker is not None
    broker._board.queries.pop(network.QUESTION)
    client = Reader(net, 0)
    ask(client, what="status")
    net.wait(1)
    assert replies(client) == []
    net.wait(1.2)
    body = json.loads(replies(client)[0].body)
    assert (list(body["answers"]), body["silent"]) == (["b0", "b1"], ["b2"])


def test_only_so_many_are_asked_at_once() -> None:
    net = DurableNet(2, [(0, 1)])
    net.wait(3)
    broker = net.brokers[1]
    assert broker is not None
    broker._board.queries.pop(network.QUESTION)
    client = Reader(net, 0)
    for number in range(network.MAX_OF_PRINCIPAL + 1):
        ask(client, number, what="status")
    (refused,) = replies(client)
    assert (refused.number, refused.code) == (network.MAX_OF_PRINCIPAL, "unavailable")
    client.gone()
    other = Reader(net, 0)
    ask(other, what="status")
    assert replies(other) == [], "what nobody waits for does not count"
    net.wait(2.2)
    assert len(replies(other)) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "what? One of clients, status, subs, not ''"),
        ({"what": "subs.delete"}, "what? One of"),
        ({"what": "status", "broker": "b9"}, "no broker 'b9' is in reach"),
        ({"what": "subs", "name": "n" * 4_097}, "up to 8 arguments"),
        ({"what": "subs", **{str(n): "" for n in range(9)}}, "up to 8 arguments"),
    ],
)
def test_what_cannot_be_asked(arguments: dict[str, str], text: str) -> None:
    client = Reader(DurableNet(1), 0)
    ask(client, **arguments)
    (reply,) = replies(client)
    assert reply.code == "usage"
    assert text in reply.body


def test_answers_share_the_bytes_of_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "MAX_BODY_BYTES", network._ENVELOPE_BYTES + 6_000)
    net = DurableNet(2, [(0, 1)])
    net.wait(3)
    readers = [Reader(net, 1) for _ in range(12)]
    for at, reader in enumerate(readers):
        reader.begin(f"s{at:02}", ack="manual")
    net.wait(1)
    client = Reader(net, 0)
    page = answer(client, what="subs")["answers"]["b1"]
    assert page["more"]
    assert 0 < len(page["subscriptions"]) < 12
    names = [row["name"] for row in page["subscriptions"]]
    while page["more"]:
        page = answer(client, what="subs", broker="b1", after=names[-1])["answers"]["b1"]
        names += [row["name"] for row in page["subscriptions"]]
    assert names == [f"s{at:02}" for at in range(12)]
    others = [Reader(net, 1) for _ in range(12)]
    clients = answer(client, what="clients")["answers"]["b1"]
    assert clients["more"]
    assert 0 < len(clients["clients"]) < len(readers + others)


@pytest.mark.parametrize(
    "body", [b"", b"\xff", msgspec.msgpack.encode(["", "{"]), msgspec.msgpack.encode(["", "[" * 9_999])]
)
def test_an_answer_that_cannot_be_read_is_said_to_be_so(body: bytes) -> None:
    net = DurableNet(2, [(0, 1)])
    net.wait(3)
    broker = net.brokers[1]
    assert broker is not None
    inquiries: Inquiries = broker._rooms.inquiries
    broker._board.queries[network.QUESTION] = lambda turn, asker, number, _: inquiries.respond(
        turn, asker, number, body
    )
    answered = answer(Reader(net, 0), what="status")
    assert list(answered["answers"]) == ["b0"]
    assert "cannot be read" in answered["refused"]["b1"]
