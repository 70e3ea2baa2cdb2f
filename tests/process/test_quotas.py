"""What one principal may cost a broker process: conditions, connections, names, requests, long fields."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.process_clients import linked, run
from tests.worlds.processes import configured
from tests.worlds.stalled import RawClient

import postroad
from postroad.wire.frames import Refuse, Subscribe

PATIENCE_S = 10  # where one event blocked a broker for 31 s
TEXT = "x" * 60_000
PEOPLE = ("alice", "eve")


async def passes(publisher: postroad.Client, *readers: Any) -> None:
    """An event of the honest ones, within the time that people wait."""
    async with asyncio.timeout(PATIENCE_S):
        await publisher.publish("orders/eu", b"honest")
        for events in readers:
            event = await anext(aiter(events))
            assert isinstance(event, postroad.Event)


def test_long_patterns_over_long_texts_block_neither_a_broker_nor_its_neighbour(brokers: Any) -> None:
    """Four conditions of 4 KB with runs of `_`, and one event with a text of 60 KB."""

    async def test() -> None:
        b1 = brokers.start("b1")
        b2 = brokers.start("b2", b1.address)
        await linked(b1, b2)
        async with (
            postroad.connect(b1.address) as honest,
            postroad.connect(b2.address) as neighbour,
            postroad.connect(b2.address) as attacker,
            honest.subscribe("orders/#") as here,
            neighbour.subscribe("orders/#") as there,
        ):
            for number in range(4):
                where = " OR ".join(f"a LIKE '%{'_' * 245}{number}{term:x}%'" for term in range(15))
                await attacker.subscribe("attack/#", where)
            async with attacker.subscribe("attack/#", "a LIKE '%x'") as seen:
                for client in (attacker, honest):
                    await client.publish("attack/a", b"", {"a": TEXT})
                    await passes(honest, here, there)
                    await passes(neighbour, here, there)
                async with asyncio.timeout(PATIENCE_S):
                    assert [len((await anext(seen)).attributes["a"]) for _ in range(2)] == [len(TEXT)] * 2

    run(test())


def test_what_exceeds_a_quota_is_refused_with_the_figure_and_others_go_on(
    brokers: Any, tmp_path: Path
) -> None:
    """Connections, plain and durable subscriptions, conditions, requests; names also after a restart."""
    tokens = "".join(f'{name} = "{hashlib.sha256(name.encode()).hexdigest()}"\n' for name in PEOPLE)
    quotas = "connections = 2\nsubscriptions = 3\nnames = 2\ncondition_cost = 50000\nrequests = 10\n"
    extra = configured(tmp_path, f"[quotas]\n{quotas}[auth.tokens]\n{tokens}")

    async def test() -> None:
        b1 = brokers.start("b1", extra=extra)
        async with (
            postroad.connect(b1.address, token="alice") as alice,
            alice.subscribe("orders/#") as orders,
            postroad.connect(b1.address, token="eve") as eve,
            postroad.connect(b1.address, token="eve") as other,
        ):
            with pytest.raises(postroad.PostroadError, match="at most 2 are allowed"):
                async with postroad.connect(b1.address, token="eve", timeout=1):
                    pass
            await eve.subscribe("a/#", "a LIKE '%b_c%'")
            with pytest.raises(postroad.UsageError, match=r"costs \d+, .* the limit is 50000"):
                await other.subscribe("a/#", f"a LIKE '%{'_' * 240}b%'  OR a LIKE '%{'_' * 241}c%'")
            await other.subscribe("b/#")
            await eve.subscribe("c/#")
            with pytest.raises(postroad.UsageError, match="eve has 3 subscriptions, at most 3 are allowed"):
                await other.subscribe("d/#")
            for name in ("s", "t"):
                await eve.subscribe("a/#", durable=name)
            with pytest.raises(postroad.UsageError, match="eve has 2 durable subscriptions, at most 2"):
                await other.subscribe("a/#", durable="u")
            with pytest.raises(postroad.UnavailableError, match="eve makes more than 10 requests a second"):
                await asyncio.gather(*(eve.request("heads") for _ in range(30)))
            await passes(alice, orders)
            await alice.request("heads")
        b1.kill()
        b1.start()
        async with postroad.connect(b1.address, token="eve") as eve:
            with pytest.raises(postroad.UsageError, match="eve has 2 durable subscriptions, at most 2"):
                await eve.subscribe("a/#", durable="u")

    run(test())


def test_a_field_longer_than_it_may_be_costs_its_connection_and_hides_nothing(brokers: Any) -> None:
    """A key of a million characters was taken and stored; its row left no room for others in `subs`."""
    b1 = brokers.start("b1")
    with postroad.sync.connect(b1.address) as client:
        client.subscribe("orders/#", durable="billing").close()
    asked = Subscribe(number=1, topic="", where="", durable="!", ack="auto", shared=True, key="k" * 1_000_000)
    with RawClient(b1.address) as hostile:
        hostile.send(asked)
        assert "Subscribe.key: a text of 1000000" in hostile.wait_for(Refuse).reason
    done = subprocess.run(
        [sys.executable, "-m", "postroad", "subs", "--broker", b1.address, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == ["billing"]
