"""Requests: what clients ask is answered by the room that knows it, or with the reason why it is not."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
from tests.worlds.brokers import Client, Net
from tests.worlds.durable_brokers import DurableClient, DurableNet
from tests.worlds.durable_subscribers import retire

from postroad.ids import pubend_text
from postroad.links.access import AuthConfig, Rule
from postroad.wire.frames import Reply, Request, encode

FAR = pubend_text(2 << 32)  # the durable pubend of the second broker


def ask(client: Client, what: str, **arguments: str) -> Reply:
    client.send(encode(Request(number=7, what=what, arguments=arguments)))
    reply = client.messages[-1]
    assert isinstance(reply, Reply)
    assert reply.number == 7
    return reply


@pytest.mark.parametrize("what", ["weather", "subs.delete", "", "x" * 1_000])
def test_what_no_room_answers_is_said_to_be_so(what: str) -> None:
    """A broker without a disk has no room for durable subscriptions."""
    reply = ask(Client(Net(1), 0), what)
    assert reply.code == "usage"
    assert reply.body.startswith(f"this broker cannot answer '{what[:10]}")
    assert len(reply.body) < 100


def test_a_room_that_cannot_answer_gives_the_reason() -> None:
    with_disk, without = DurableClient(DurableNet(1), 0), Client(Net(1), 0)
    prefix = "00000001" * 2
    assert ask(with_disk, "publisher.last", prefix="zz").code == "usage"
    assert json.loads(ask(with_disk, "publisher.last", prefix=prefix).body) == {"last": ""}
    assert ask(without, "publisher.last", prefix=prefix).code == "unavailable"


@pytest.mark.parametrize("what", ["subs.delete", "subs.retire"])
def test_what_changes_something_needs_the_right_to(what: str) -> None:
    net = DurableNet(1)
    tokens = {hashlib.sha256(name.encode()).hexdigest(): name for name in ("alice", "ops")}
    rule = Rule(principal="ops", allow=True, action="admin")
    net.config = replace(net.config, auth=AuthConfig(tokens=tokens, rules=(rule,)))
    net.kill(0)
    net.start(0)
    denied = ask(DurableClient(net, 0, "alice"), what, name="s", broker="b9")
    assert denied.code == "denied"
    assert denied.body.startswith(f"{what} needs the right `admin` at this broker")
    assert ask(DurableClient(net, 0, "ops"), what, name="s", broker="b9").code == "usage", "there is no such"


@pytest.mark.parametrize("what", ["clients.kick", "queues.found", "queues.rescue"])
def test_what_changes_the_network_is_denied_to_who_has_no_right(what: str) -> None:
    net = DurableNet(1)
    net.config = replace(net.config, auth=AuthConfig(tokens={hashlib.sha256(b"alice").hexdigest(): "alice"}))
    net.kill(0)
    net.start(0)
    denied = ask(DurableClient(net, 0, "alice"), what)
    assert denied.code == "denied"
    assert denied.body.startswith(f"{what} needs the right `admin` at this broker")


def test_heads_name_who_is_away_and_leave_out_who_is_retired() -> None:
    net = DurableNet(2, [(0, 1)])
    client, publisher = DurableClient(net, 0), DurableClient(net, 1)
    publisher.send(publisher.durable("t", "a"))
    net.wait(2)
    body = json.loads(ask(client, "heads").body)
    assert FAR in body["heads"]
    assert body["away"] == []
    net.kill(1)
    net.wait(1)
    body = json.loads(ask(client, "heads").body)
    assert FAR in body["heads"]
    assert body["away"] == [FAR]
    assert retire(net, 0, "b1")[0] == ""
    body = json.loads(ask(client, "heads").body)
    assert FAR not in body["heads"]
    assert body["away"] == []
