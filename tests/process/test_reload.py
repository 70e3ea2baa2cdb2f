"""SIGHUP: a broker takes in other rules, tokens, certificates and another level of its log, and goes on."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.process_clients import run
from tests.worlds.processes import wait_until

import postroad
from postroad.net.certificates import Files, make_authority, make_certificate


def configuration(tokens: dict[str, str], rules: str = "", top: str = "") -> str:
    lines = [f'{name} = "{hashlib.sha256(token.encode()).hexdigest()}"' for name, token in tokens.items()]
    return "\n".join([top, "[auth.tokens]", *lines, rules])


async def publish_for_ever(address: str, token: str, begun: asyncio.Event) -> None:
    async with postroad.connect(address, token=token) as client:
        while True:
            await client.publish("open/bob", b"")
            begun.set()
            await asyncio.sleep(0.02)


def hang_up(broker: Any) -> None:
    """SIGHUP, until the broker has said what it made of it."""
    before = broker.log.read_text().count("SIGHUP")
    broker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: broker.log.read_text().count("SIGHUP") > before, "the broker reads its settings again")


def test_a_hangup_while_a_broker_starts_waits(brokers: Any) -> None:
    b1 = brokers.start("b1")
    b1.stop()
    over = threading.Event()

    def hang_up_early() -> None:
        """As soon as it has begun."""
        while not over.wait(0.002):
            if b1.process is not None and blocks_hangups(b1.process.pid):
                b1.process.send_signal(signal.SIGHUP)
                return

    thread = threading.Thread(target=hang_up_early)
    thread.start()
    try:
        b1.start()
    finally:
        over.set()
        thread.join()
    wait_until(lambda: "SIGHUP: changed: no setting" in b1.log.read_text(), "it reads its settings again")
    assert b1.running


def blocks_hangups(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("SigBlk:") and int(line.split()[1], 16) & 1 for line in lines)


DENY = '[[auth.rules]]\nprincipal = "alice"\nallow = false\naction = "publish"\ntopic = "secret/#"\n'
ALLOW = '[[auth.rules]]\nprincipal = "*"\nallow = true\naction = "publish"\n'


def test_rules_and_tokens_are_reloaded(brokers: Any, tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "b.toml"
        file.write_text(configuration({"alice": "a1", "bob": "b1", "carol": "c1"}))
        b1 = brokers.start("b1", extra=("--config", str(file)))
        async with (
            postroad.connect(b1.address, token="a1") as alice,
            postroad.connect(b1.address, token="c1") as carol,
            carol.subscribe("open/#", durable="carol") as events,
        ):
            await alice.publish("secret/x", b"1", mode="durable")
            bob = asyncio.create_task(publish_for_ever(b1.address, "b1", begun := asyncio.Event()))
            await begun.wait()
            # Bob's token is changed, alice gets a rule, carol keeps what she had.
            file.write_text(configuration({"alice": "a1", "bob": "b2", "carol": "c1"}, DENY + ALLOW))
            hang_up(b1)
            with pytest.raises(postroad.DeniedError, match="token is not known"):
                await bob
            with pytest.raises(postroad.DeniedError):
                await alice.publish("secret/x", b"2", mode="durable")
            await alice.publish("open/x", b"3", mode="durable")
            event = await anext(aiter(events))
            assert isinstance(event, postroad.Event)
            assert event.payload == b"3"
        with pytest.raises(postroad.DeniedError):
            async with postroad.connect(b1.address, token="b1"):
                pass
        async with postroad.connect(b1.address, token="b2") as again:
            await again.publish("open/bob", b"")

    run(test())


def test_a_file_that_is_half_written_opens_no_door(brokers: Any, tmp_path: Path) -> None:
    """Wherever it ends, nobody may do what was denied before; the whole file counts once it is there."""

    async def test() -> None:
        file = tmp_path / "b.toml"
        rules = (
            ALLOW
            + '[[auth.rules]]\nprincipal = "alice"\nallow = true\naction = "subscribe"\ntopic = "open/#"\n'
            + '[[auth.rules]]\nprincipal = "bob"\nallow = true\naction = "subscribe"\ntopic = "bob/#"\n'
        )
        whole = configuration({"alice": "a1", "bob": "b1"}, rules)
        file.write_text(whole)
        b1 = brokers.start("b1", extra=("--config", str(file)))
        lines = whole.splitlines(keepends=True)
        for count in range(len(lines)):
            for text in (whole, "".join(lines[:count])):
                file.write_text(text)
                hang_up(b1)
            for token in ("a1", "b1"):
                with pytest.raises(postroad.DeniedError):
                    async with postroad.connect(b1.address, token=token) as client:
                        await client.subscribe("secret/#")
        log = b1.log.read_text()
        assert "no token is left" in log
        assert "no rule about 'subscribe' is left" in log
        assert "the last rule about 'subscribe' lost its topic" in log
        file.write_text(whole.replace("bob/#", "secret/#"))
        hang_up(b1)
        async with postroad.connect(b1.address, token="b1") as bob, bob.subscribe("secret/#"):
            pass

    run(test())


def test_what_cannot_be_reloaded_is_said_and_nothing_ends_the_broker(brokers: Any, tmp_path: Path) -> None:
    file = tmp_path / "b.toml"
    file.write_text(configuration({"alice": "a1"}))
    b1 = brokers.start("b1", extra=("--config", str(file)))
    file.write_text(configuration({"alice": "a1"}, "[limits]\nevent_bytes = '64 KiB'\n", "log = 'debug'\n"))
    hang_up(b1)
    log = b1.log.read_text()
    assert "a restart is needed for limits.event_bytes" in log
    assert "changed: log" in log
    file.write_text("[auth")
    hang_up(b1)
    assert "everything stays as it is" in b1.log.read_text()
    file.write_text("")
    hang_up(b1)
    assert "everybody would be let in" in b1.log.read_text()
    file.unlink()
    hang_up(b1)

    async def test() -> None:
        with pytest.raises(postroad.DeniedError):
            async with postroad.connect(b1.address, token="wrong"):
                pass
        async with postroad.connect(b1.address, token="a1") as alice:
            assert (await alice.request("status"))["name"] == "b1"

    run(test())


def test_certificates_are_reloaded(brokers: Any, tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    ca = make_authority(folder).certificate
    made = make_certificate(folder, "b1", hosts=["127.0.0.1"], days=1)
    b1 = brokers.start("b1", extra=mutual(ca, made))
    before = served(b1.address, ca)
    make_certificate(folder, "b1", hosts=["127.0.0.1"], days=2, renew=True)
    hang_up(b1)
    after = served(b1.address, ca)
    assert after != before
    made.certificate.write_text("no certificate")
    hang_up(b1)
    assert "everything stays as it is" in b1.log.read_text()
    assert served(b1.address, ca) == after


def mutual(ca: Path, files: Files) -> tuple[str, ...]:
    return (
        "--tls-ca",
        str(ca),
        "--tls-cert",
        str(files.certificate),
        "--tls-key",
        str(files.key),
        "--mutual",
    )


def served(address: str, ca: Path) -> str:
    """The certificate that a broker shows."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), ca_certs=str(ca))
