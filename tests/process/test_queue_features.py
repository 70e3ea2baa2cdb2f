"""What queues can do beyond a message from one to another, at one real broker and at three."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from tests.worlds.process_clients import linked, run
from tests.worlds.processes import Brokers, configured
from tests.worlds.queue_clients import QueueClient, queue_client

from postroad.links.access import hash_token
from postroad.wire import frames


async def accept_all(client: QueueClient, number: int, count: int) -> list[bytes]:
    """Payloads, as they are accepted one by one."""
    found: list[bytes] = []
    for _ in range(count):
        message = await client.take()
        settled = await client.settle(number, message.key)
        assert settled.outcomes == ("accepted",)
        found.append(message.payload)
    return found


async def replicas(client: QueueClient) -> int:
    """Of the one inbox there is; 0 while nobody is responsible for it."""
    listed = (await client.request("queues"))["queues"]
    return len(listed[0]["replicas"]) if listed else 0


def test_kinds_delays_priorities_expiry_and_confirmations(brokers: Brokers) -> None:
    """Spec Q3, Q6: every row of table 1, and what goes beyond the paper."""
    broker = brokers.start("b1")

    async def test() -> None:
        async with queue_client(broker.address) as client:
            shop = client.source("shop")
            for form in ("express", "recoverable", "transactional"):
                assert await shop.send(form, b"early", form=form, priority=1) == "kept"
                assert await shop.send(form, b"late", form=form, delay_us=700_000) == "kept"
                number, joined = await client.receive(form)
                assert joined.code == ""
                assert await accept_all(client, number, 2) == [b"early", b"late"]
            for n, priority in enumerate((1, 9, 5)):
                assert await shop.send("ranked", b"%d" % n, form="recoverable", priority=priority) == "kept"
            number, _ = await client.receive("ranked")
            assert await accept_all(client, number, 3) == [b"1", b"2", b"0"]
            assert await shop.send("brief", b"gone", expires_us=1) == "kept"
            async with asyncio.timeout(30):
                while not (await client.request("queues.dead", inbox="brief"))["dead"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            posting = shop.posting("slow", b"confirm me", attributes=b"\x01b\x03\x01")
            sent = await shop.post(posting, confirm=True)
            assert (sent.state, client.confirmed.empty()) == ("kept", True)
            number, _ = await client.receive("slow")
            message = await client.take()
            assert (message.attributes, message.source, message.attempt) == (b"\x01b\x03\x01", "shop", 1)
            await client.settle(number, message.key)
            async with asyncio.timeout(30):
                assert (await client.confirmed.get()).number == sent.number

    run(test())


def test_a_rejected_message_comes_again_and_becomes_a_dead_letter_that_can_be_revived(
    brokers: Brokers, tmp_path: Path
) -> None:
    broker = brokers.start("b1", extra=configured(tmp_path, "[queues]\nattempts = 2\n"))

    async def test() -> None:
        async with queue_client(broker.address) as client:
            shop = client.source("shop")
            for n in range(2):
                assert await shop.send("stock", b"%d" % n) == "kept"
            number, _ = await client.receive("stock")
            first, second = await client.take(), await client.take()
            assert (await client.settle(number, second.key)).outcomes == ("early",)
            settled = await client.settle(number, first.key, verdict="again", reason="not now")
            assert settled.outcomes == ("again",)
            again, behind = await client.take(), await client.take()
            assert [(again.payload, again.attempt), (behind.payload, behind.attempt)] == [
                (b"0", 2),
                (b"1", 1),
            ]
            settled = await client.settle(number, again.key, verdict="dead", reason="no such thing")
            assert settled.outcomes == ("dead",)
            assert (await client.settle(number, behind.key)).outcomes == ("accepted",)
            dead = (await client.request("queues.dead", inbox="stock"))["dead"]
            assert [(each["source"], each["reason"], each["attempts"]) for each in dead] == [
                ("shop", "no such thing", 2)
            ]
            assert await client.request("queues.revive", inbox="stock") == {"count": 1}
            assert await accept_all(client, number, 1) == [b"0"]
            assert (await client.request("queues"))["queues"][0]["dead"] == 0

    run(test())


def test_a_full_inbox_refuses_and_takes_again_when_there_is_room(brokers: Brokers, tmp_path: Path) -> None:
    broker = brokers.start("b1", extra=configured(tmp_path, "[queues]\ninbox_messages = 3\n"))

    async def test() -> None:
        async with queue_client(broker.address) as client:
            shop = client.source("shop")
            for n in range(3):
                assert await shop.send("stock", b"%d" % n) == "kept"
            posting = shop.posting("stock", b"3")
            assert (await shop.post(posting)).code == "full"
            number, _ = await client.receive("stock")
            await accept_all(client, number, 1)
            assert (await shop.post(posting)).state == "kept"
            assert await accept_all(client, number, 3) == [b"1", b"2", b"3"]
            for _ in range(50):
                short = client.source("short")
                assert await short.send("other", b"x") == "kept"
                short.end()
                number, _ = await client.receive("other")
                await accept_all(client, number, 1)
                client.unreceive(number)

    run(test())


def test_consumers_share_an_inbox_and_a_session_sticks_to_one_of_them(brokers: Brokers) -> None:
    broker = brokers.start("b1")

    async def test() -> None:
        async with queue_client(broker.address) as one, queue_client(broker.address) as other:
            sources = [one.source("shop") for _ in range(4)]
            number_one, _ = await one.receive("stock")
            number_other, _ = await other.receive("stock")
            for n in range(3):
                for source in sources:
                    assert await source.send("stock", b"%d" % n) == "kept"
            got: dict[bytes, list[bytes]] = {}
            by_client: list[set[bytes]] = []
            for client, number in ((one, number_one), (other, number_other)):
                messages = [await client.take() for _ in range(6)]
                by_client.append({message.session for message in messages})
                for message in messages:
                    got.setdefault(message.session, []).append(message.payload)
                    assert (await client.settle(number, message.key)).outcomes == ("accepted",)
            assert list(got.values()) == [[b"0", b"1", b"2"]] * 4
            assert [len(sessions) for sessions in by_client] == [2, 2]
            assert by_client[0].isdisjoint(by_client[1])

    run(test())


def test_a_consumer_whose_connection_is_lost_comes_again_and_its_accepts_count_once(brokers: Brokers) -> None:
    broker = brokers.start("b1")
    consumer = secrets.token_bytes(8)

    async def test() -> None:
        async with queue_client(broker.address) as sender:
            shop = sender.source("shop")
            assert await shop.send("stock", b"1") == "kept"
            async with queue_client(broker.address) as client:
                number, _ = await client.receive("stock", consumer=consumer)
                first = await client.take()
                assert (await client.settle(number, first.key)).outcomes == ("accepted",)
            async with queue_client(broker.address) as client:
                number, _ = await client.receive("stock", consumer=consumer)
                assert (await client.settle(number, first.key)).outcomes == ("accepted",), "as before"
            async with queue_client(broker.address) as client:
                number, _ = await client.receive("stock")
                assert (await client.settle(number, first.key)).outcomes == ("taken",)

    run(test())


def test_several_messages_to_several_inboxes_are_kept_together_or_not_at_all(
    brokers: Brokers, tmp_path: Path
) -> None:
    extra = configured(tmp_path, "[queues]\ninbox_messages = 2\n")
    network = [brokers.start("b1", extra=extra)]
    network += [brokers.start(name, network[0].address, extra=extra) for name in ("b2", "b3")]

    async def test() -> None:
        await linked(*network)
        async with queue_client(network[1].address) as client:
            shop = client.source("shop")
            names = [f"inbox-{n}" for n in range(6)]  # of several arcs
            for round_ in (b"a", b"b"):
                sent = await shop.post(*[shop.posting(name, round_) for name in names], together=True)
                assert sent.state == "kept", sent
            other = client.source("other")
            assert (await other.post(other.posting("elsewhere", b"c"))).state == "kept"
            refused = [other.posting("elsewhere", b"d"), other.posting(names[0], b"d")]
            assert (await other.post(*refused, together=True)).code == "full"
            rows = {row["inbox"]: row["depth"] for row in (await client.request("queues"))["queues"]}
            assert rows == {**dict.fromkeys(names, 2), "elsewhere": 1}
            number, _ = await client.receive(names[0])
            assert await accept_all(client, number, 1) == [b"a"]
            assert (await other.post(*refused, together=True)).state == "kept", (
                "the same ids, once there is room"
            )

    run(test())


def test_access_rules_and_the_owner_of_a_name(brokers: Brokers, tmp_path: Path) -> None:
    tokens = {name: secrets.token_hex(8) for name in ("alice", "mallory", "root")}
    lines = [f'{name} = "{hash_token(token)}"' for name, token in tokens.items()]
    rules = [
        '[[auth.rules]]\nprincipal = "mallory"\nallow = false\naction = "send"\ntopic = "vault"',
        '[[auth.rules]]\nprincipal = "*"\nallow = true\naction = "send"',
        '[[auth.rules]]\nprincipal = "root"\nallow = true\naction = "admin"',
    ]
    text = "[auth.tokens]\n" + "\n".join(lines) + "\n" + "\n".join(rules) + "\n"
    broker = brokers.start("b1", extra=configured(tmp_path, text))

    async def test() -> None:
        async with (
            queue_client(broker.address, tokens["alice"]) as alice,
            queue_client(broker.address, tokens["mallory"]) as mallory,
            queue_client(broker.address, tokens["root"]) as root,
        ):
            assert (await alice.receive("stock"))[1].code == ""
            assert (await mallory.receive("stock"))[1].code == "denied"
            assert (await root.receive("stock"))[1].code == ""
            assert await mallory.source("m").send("vault", b"x") == "denied"
            assert await mallory.source("m").send("stock", b"x") == "kept"
            mixed = mallory.source("m")
            inboxes = ("stock", "vault", "stock", "shelf")
            sent = await mallory.send_all(
                mixed, *[mixed.posting(inbox, b"x", ordered=False) for inbox in inboxes], form="recoverable"
            )
            assert sent == ["kept", "denied", "kept", "kept"], "each on its own"
            assert await mallory.request("queues.dead", inbox="stock") == "denied"
            assert await mallory.request("queues.found") == "denied"
            assert await root.request("queues.found") == {"arcs": 0}

    run(test())


def test_a_principal_has_so_many_bytes_and_names_of_inboxes_and_is_told_the_figure(
    brokers: Brokers, tmp_path: Path
) -> None:
    tokens = {name: secrets.token_hex(8) for name in ("alice", "bob")}
    lines = [f'{name} = "{hash_token(token)}"' for name, token in tokens.items()]
    text = "[auth.tokens]\n" + "\n".join(lines) + "\n[quotas]\nstored_bytes = 10_000\nnames = 3\n"
    broker = brokers.start("b1", extra=configured(tmp_path, text))

    async def test() -> None:
        async with (
            queue_client(broker.address, tokens["alice"]) as alice,
            queue_client(broker.address, tokens["bob"]) as bob,
        ):
            shop = alice.source("shop")
            sent = [await shop.send("stock", bytes(3_000)) for _ in range(3)]
            assert sent == ["kept", "kept", "kept"]
            refused = await shop.post(shop.posting("stock", bytes(3_000)))
            assert refused.code == "too-large"
            assert refused.reason == "alice has 9768 bytes in queues here, at most 10000 are allowed"
            assert await bob.source("till").send("stock", bytes(3_000)) == "kept", "nobody else is hurt"
            number, joined = await bob.receive("stock")
            assert joined.code == ""
            assert len(await accept_all(bob, number, 4)) == 4
            assert await alice.source("shop").send("stock", bytes(3_000)) == "kept", "once there is room"
            assert [(await alice.receive(f"mine{number}"))[1].code for number in range(3)] == ["", "", ""]
            _, fourth = await alice.receive("mine3")
            assert fourth.code == "too-large"
            assert "alice has 3 names of inboxes here, at most 3 are allowed" in fourth.reason
            assert await alice.source("shop").send("new", b"x") == "too-large"
            assert await bob.source("till").send("new", b"x") == "kept"

    run(test())


def test_without_a_disk_a_broker_that_restarts_is_another_one_and_takes_its_state_from_the_others(
    brokers: Brokers, tmp_path: Path
) -> None:
    """The paper's own setting (spec Q11, responsibility 5)."""
    extra = configured(tmp_path, "[queues]\nmemory_only = true\n")
    network = [brokers.start("b1", extra=extra)]
    for name in ("b2", "b3"):
        network.append(brokers.start(name, *[broker.address for broker in network], extra=extra))

    async def test() -> None:
        await linked(*network)
        async with queue_client(network[0].address) as client:
            shop = client.source("shop")
            assert await shop.send("stock", b"1") == "kept"
            async with asyncio.timeout(60):
                while await replicas(client) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            network[2].stop()
            assert await shop.send("stock", b"2") == "kept"
            network[2].start()
            async with asyncio.timeout(60):
                while await replicas(client) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        network[0].kill()
        async with queue_client(network[2].address) as client:
            number, joined = await client.receive("stock")
            assert joined.code == ""
            assert await accept_all(client, number, 2) == [b"1", b"2"]

    run(test())


def test_what_breaks_the_protocol_ends_its_own_connection_only(brokers: Brokers) -> None:
    broker = brokers.start("b1")
    good = frames.Posting(inbox="stock", id=2, after=1, payload=b"")

    def send(**changes: object) -> frames.Send:
        fields = {"number": 1, "source": "s", "session": bytes(8), "form": "express", "messages": (good,)}
        return frames.Send(**{**fields, **changes})  # type: ignore[arg-type]

    bad: list[frames.Message] = [
        send(session=b"short"),
        send(form="registered"),
        send(messages=()),
        send(messages=(good, good)),
        send(source="\n"),
        send(together=True),
        send(messages=(frames.Posting(inbox="stock", id=1, after=1, payload=b""),)),
        send(messages=(frames.Posting(inbox="stock", id=1, after=0, payload=b"", priority=10),)),
        send(messages=(frames.Posting(inbox="stock", id=1, after=0, payload=b"", chain=b"\xc1"),)),
        frames.Receive(number=1, inbox="stock", consumer=bytes(8), window=0),
        frames.Receive(number=1, inbox="", consumer=bytes(8), window=1),
        frames.Settle(number=1, ticket=1, keys=(b"\xc1",), verdict="accept"),
        frames.Settle(number=1, ticket=1, keys=(), verdict="accept"),
        frames.Settle(number=1, ticket=1, keys=(b"",), verdict="maybe"),
        frames.EndSession(source="s", session=b""),
    ]

    async def test() -> None:
        async with queue_client(broker.address) as witness:
            for message in bad:
                async with queue_client(broker.address) as client:
                    client._put(message)
                    async with asyncio.timeout(30):
                        await client.reading  # until the broker closes it
            large = witness.source("shop")
            sent = await large.post(large.posting("stock", bytes(524_289)))
            assert sent.code == "too-large"
            assert await witness.source("shop").send("stock", b"fine") == "kept"

    run(test())
