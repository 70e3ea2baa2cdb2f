"""TLS, mutual TLS and tokens, between clients and brokers and between brokers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.process_clients import everywhere

import postroad


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(200):
            await test

    asyncio.run(bounded())


async def round_trip(publisher: postroad.Client, subscriber: postroad.Client) -> None:
    async with everywhere(subscriber, "a/+") as events:
        await publisher.publish("a/b", b"hello")
        event = await anext(aiter(events))
        assert isinstance(event, postroad.Event)
        assert event.payload == b"hello"


async def linked(client: postroad.Client, count: int) -> None:
    while len((await client.request("status"))["brokers"]) != count:  # noqa: ASYNC110 -- another process
        await asyncio.sleep(0.05)


async def refused(address: str, error: type[Exception], **how: Any) -> None:
    with pytest.raises(error):
        async with postroad.connect(address, timeout=30.0, **how):
            pass


def test_tokens(brokers: Any, tmp_path: Path) -> None:
    async def test() -> None:
        token = tmp_path / "token"
        token.write_text("s3cret\n")
        between = ("--link-token", "brokers only")
        b1 = brokers.start("b1", extra=("--token-file", str(token), *between))
        b2 = brokers.start("b2", b1.address, extra=("--token", "s3cret", *between))
        async with (
            postroad.connect(b1.address, token="s3cret") as one,
            postroad.connect(b2.address, token="s3cret") as two,
        ):
            await linked(one, 2)
            await round_trip(one, two)
            await refused(b1.address, postroad.DeniedError, token="wrong")
            await refused(b1.address, postroad.DeniedError)
            # A broker without the brokers' token cannot link, and hurts nobody by trying.
            brokers.start("b3", b1.address)
            brokers.start("b4", b1.address, extra=("--token", "wrong"))
            brokers.start("b5", b1.address, extra=("--token", "s3cret"))
            await asyncio.sleep(1)
            await linked(one, 2)
            await round_trip(two, one)

    run(test())


def test_changing_a_broker_needs_the_right_to(brokers: Any, tmp_path: Path) -> None:
    """Deleting others' subscriptions and retiring a broker are for those who hold the brokers' token. The
    easiest way to ask for a token makes nobody a broker or an administrator."""

    async def test() -> None:
        config = tmp_path / "b.toml"
        digest = hashlib.sha256(b"eve's").hexdigest()
        config.write_text(f'[auth.tokens]\neve = "{digest}"\n')
        extra = ("--config", str(config), "--token", "s3cret", "--link-token", "brokers only")
        b1 = brokers.start("b1", extra=extra)
        async with (
            postroad.connect(b1.address, token="s3cret") as owner,
            postroad.connect(b1.address, token="eve's") as eve,
            postroad.connect(b1.address, token="brokers only") as admin,
        ):
            async with await owner.subscribe("orders/#", durable="billing"):
                pass
            for what, arguments in (("subs.delete", {"name": "billing"}), ("subs.retire", {"broker": "b9"})):
                with pytest.raises(postroad.DeniedError, match="admin"):
                    await eve.request(what, **arguments)
            with pytest.raises(postroad.DeniedError, match="admin"):
                await owner.request("subs.retire", broker="b9")
            assert [one["name"] for one in (await eve.request("subs"))["subscriptions"]] == ["billing"]
            await owner.request("subs.delete", name="billing")
            assert not (await eve.request("subs"))["subscriptions"]
            async with await owner.subscribe("orders/#", durable="billing"):
                pass
            await admin.request("subs.delete", name="billing")
            assert not (await eve.request("subs"))["subscriptions"]

    run(test())


def test_tls(brokers: Any, certificates: Any) -> None:
    async def test() -> None:
        certificate, key = certificates.issue("b1")
        ca = str(certificates.ca)
        extra = (
            "--tls-cert",
            certificate,
            "--tls-key",
            key,
            "--tls-ca",
            ca,
            "--token",
            "t",
            "--link-token",
            "l",
        )
        b1 = brokers.start("b1", extra=extra)
        b2 = brokers.start("b2", b1.address, extra=extra)
        trusting = postroad.tls(ca=ca)
        async with (
            postroad.connect(b1.address, token="t", tls=trusting) as one,
            postroad.connect(b2.address, token="t", tls=trusting) as two,
        ):
            await linked(one, 2)
            await round_trip(one, two)
            async with everywhere(two, "big") as events:
                await one.publish("big", bytes(1_000_000))
                event = await anext(aiter(events))
                assert isinstance(event, postroad.Event)
                assert event.payload == bytes(1_000_000)
            await refused(b1.address, postroad.UnavailableError, token="t", tls=postroad.tls())
            await refused(b1.address, postroad.UnavailableError, token="t")
            await round_trip(two, one)

    run(test())


def test_mutual_tls(brokers: Any, certificates: Any, tmp_path: Path) -> None:
    async def test() -> None:
        ca = str(certificates.ca)
        files = {name: certificates.issue(name) for name in ("b1", "b2", "b3", "alice", "bob")}
        settings = tmp_path / "settings.toml"
        settings.write_text(
            'auth.link_principals = ["b1", "b2"]\n'
            '[[auth.rules]]\nprincipal = "alice"\nallow = true\naction = "publish"\ntopic = "a/#"\n'
        )

        def start(name: str, *links: str) -> Any:
            certificate, key = files[name]
            flags = ("--tls-cert", certificate, "--tls-key", key, "--tls-ca", ca, "--mutual")
            return brokers.start(name, *links, extra=(*flags, "--config", str(settings)))

        b1 = start("b1")
        b2 = start("b2", b1.address)

        def identity(name: str) -> Any:
            return postroad.tls(ca=ca, certificate=files[name][0], key=files[name][1])

        async with (
            postroad.connect(b1.address, tls=identity("alice")) as alice,
            postroad.connect(b2.address, tls=identity("bob")) as bob,
        ):
            await linked(alice, 2)
            await round_trip(alice, bob)
            await bob.publish("a/b", b"not allowed")
            with pytest.raises(postroad.DeniedError, match="bob may not publish to a/b"):
                await bob.flush()
            await refused(b1.address, postroad.UnavailableError, tls=postroad.tls(ca=ca))
            start("b3", b1.address)  # a certificate of the authority, but not a broker's
            await asyncio.sleep(1)
            await linked(alice, 2)
            await round_trip(alice, bob)

    run(test())


def test_a_certificate_of_another_authority_is_refused(
    brokers: Any, certificates: Any, tmp_path: Path
) -> None:
    async def test() -> None:
        certificate, key = certificates.issue("b1")
        folder = tmp_path / "strangers"
        folder.mkdir()
        stranger = type(certificates)(folder)
        flags = ("--tls-cert", certificate, "--tls-key", key, "--tls-ca", str(certificates.ca), "--mutual")
        b1 = brokers.start("b1", extra=flags)
        own, own_key = stranger.issue("mallory")
        ca = str(certificates.ca)
        await refused(
            b1.address, postroad.UnavailableError, tls=postroad.tls(ca=ca, certificate=own, key=own_key)
        )
        good, good_key = certificates.issue("alice")
        async with postroad.connect(
            b1.address, tls=postroad.tls(ca=ca, certificate=good, key=good_key)
        ) as alice:
            await round_trip(alice, alice)

    run(test())


def test_why_a_certificate_is_not_taken_is_said(brokers: Any, certificates: Any, until: Any) -> None:
    ca = str(certificates.ca)

    def flags(name: str, **how: Any) -> tuple[str, ...]:
        certificate, key = certificates.issue(name, **how)
        return ("--tls-cert", certificate, "--tls-key", key, "--tls-ca", ca)

    old = brokers.start("old", extra=flags("old", days=-1))
    elsewhere = brokers.start("elsewhere", extra=flags("elsewhere", host="example.org"))
    mutual = brokers.start("mutual", old.address, elsewhere.address, extra=(*flags("mutual"), "--mutual"))
    without = brokers.start("without", mutual.address, extra=("--tls-ca", ca))

    async def test() -> None:
        trusting = postroad.tls(ca=ca)
        with pytest.raises(postroad.UnavailableError, match="not trusted: certificate has expired"):
            await postroad.connect(old.address, tls=trusting)
        with pytest.raises(postroad.UnavailableError, match=r"not valid for '127\.0\.0\.1'"):
            await postroad.connect(elsewhere.address, tls=trusting)
        with pytest.raises(postroad.UnavailableError, match="certificate"):
            await postroad.connect(mutual.address, tls=trusting)
        certificate, key = certificates.issue("alice", days=-1)
        with pytest.raises(postroad.UnavailableError, match="certificate"):
            await postroad.connect(mutual.address, tls=postroad.tls(ca=ca, certificate=certificate, key=key))

    run(test())

    def said(broker: Any, text: str) -> None:
        until(lambda: text in broker.log.read_text(), f"{broker.name} says {text!r}")

    said(mutual, f"no connection to {old.address}: its certificate is not trusted: certificate has expired")
    said(mutual, f"no connection to {elsewhere.address}: its certificate is not trusted: IP address mismatch")
    said(without, f"no connection to {mutual.address}: ")
    assert "certificate" in without.log.read_text().split(f"no connection to {mutual.address}: ")[1]
    handshake = "refused a connection in its TLS handshake: "
    said(mutual, f"{handshake}TLS: PEER_DID_NOT_RETURN_A_CERTIFICATE")
    said(mutual, f"{handshake}its certificate is not trusted: certificate has expired")


def test_tls_on_one_side_only_is_said(brokers: Any, certificates: Any, until: Any) -> None:
    certificate, key = certificates.issue("b1")
    ca = str(certificates.ca)
    extra = ("--tls-cert", certificate, "--tls-key", key, "--tls-ca", ca)
    secure = brokers.start("secure", extra=extra)
    plain = brokers.start("plain", secure.address)
    other = brokers.start("other", plain.address, extra=extra)

    async def test() -> None:
        with pytest.raises(postroad.UnavailableError, match=r"serves TLS|speaks TLS"):
            await postroad.connect(secure.address)
        with pytest.raises(postroad.UnavailableError, match="it does not speak TLS"):
            await postroad.connect(plain.address, tls=postroad.tls(ca=ca))
        with pytest.raises(postroad.UnavailableError, match="its certificate is not trusted"):
            await postroad.connect(secure.address, tls=postroad.tls())

    run(test())

    def said(broker: Any, text: str) -> None:
        until(lambda: text in broker.log.read_text(), f"{broker.name} says {text!r}")

    said(plain, f"no connection to {secure.address}: it closed the connection without a word")
    said(plain, "the other side speaks TLS and this one does not")
    said(other, f"no connection to {plain.address}: it does not speak TLS")
    said(secure, "refused a connection in its TLS handshake: it does not speak TLS")
