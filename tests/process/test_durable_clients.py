"""What clients can do with durable subscriptions, on real brokers (D3, D10, D11; issue 3, parts 6 and 7)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.process_clients import cli, publish, reachable, run, take
from tests.worlds.processes import SOURCE, configured

import postroad
from postroad.client.subscription import TURN_S
from postroad.durable.subscriber.desk import PAGE_ROWS


def numbers(events: list[postroad.Event | postroad.Gap]) -> list[int]:
    return [int(event.payload) for event in events if isinstance(event, postroad.Event)]


async def lag(address: str, name: str) -> int:
    async with postroad.connect(address) as client:
        rows = (await client.request("subs"))["subscriptions"]
    return int(next(row["lag_events"] for row in rows if row["name"] == name))


@pytest.mark.parametrize(("ack", "again"), [("auto", 29), ("batch", 0), ("manual", 20)])
def test_what_is_acknowledged_when(brokers: Any, ack: str, again: int) -> None:
    """D11: a subscriber that fails at its 30th event gets what its mode had not acknowledged again."""
    (one,) = brokers.line(1)

    async def work() -> None:
        async with postroad.connect(one.address) as client:
            async with client.subscribe("t", durable="s", ack=ack):
                pass
            await publish(one.address, 0, 100)
            with contextlib.suppress(ZeroDivisionError):
                async with client.subscribe("t", durable="s", ack=ack) as events:
                    for event in await take(events, 30):
                        if ack == "manual" and int(event.payload) == 19:
                            await events.ack(event)
                    raise ZeroDivisionError
            async with client.subscribe("t", durable="s", ack=ack) as events:
                assert int((await take(events, 1))[0].payload) == again

    run(work())


def test_a_token_of_ones_own_advances_over_silence(brokers: Any) -> None:
    """D3, D7: who matches nothing holds no storage, with and without an event loop; who waits with what it
    was given does. Whoever begins again with an older token, behind which was nothing, is told no gap."""
    (one,) = brokers.line(1)

    async def released(client: Any, name: str) -> int:
        rows = (await client.request("subs"))["subscriptions"]
        return int(max(next(row["released"] for row in rows if row["name"] == name).values()))

    async def work() -> None:
        async with postroad.connect(one.address) as client:
            idle = client.subscribe("nothing/#", durable="idle", token="")
            busy = client.subscribe("t", durable="busy", token="")
            async with idle, busy:
                first = idle.token
                waiting = asyncio.create_task(anext(aiter(idle)))
                await publish(one.address, 0, 3)
                await take(busy, 3)
                rest = asyncio.create_task(anext(aiter(busy)))
                with postroad.sync.connect(one.address) as blocking:
                    held = blocking.subscribe("nothing/#", durable="other", token="", timeout=60)
                    threading.Thread(target=lambda: list(held), daemon=True).start()
                    begun = {name: await released(client, name) for name in ("idle", "other", "busy")}
                    for name in ("idle", "other"):
                        while await released(client, name) <= begun[name]:  # noqa: ASYNC110 -- another process
                            await asyncio.sleep(0.2)
                    assert await released(client, "busy") == begun["busy"]
                    held.close()
                assert idle.token != first
                await busy.ack()
                while await released(client, "busy") <= begun["busy"]:  # noqa: ASYNC110 -- another process
                    await asyncio.sleep(0.2)
                waiting.cancel()
                rest.cancel()
            async with client.subscribe("nothing/#", durable="idle", token=first) as events:
                await client.publish("nothing/now", b"x", mode="durable")
                (event,) = await take(events, 1)
                assert event.payload == b"x"

    run(work())


def test_a_confirmed_acknowledgement_survives_kill_9_of_everyone(brokers: Any) -> None:
    """D11: `await events.ack(event)` returns when it is on disk."""
    (one,) = brokers.line(1)

    async def before() -> None:
        async with (
            postroad.connect(one.address) as client,
            client.subscribe("t", durable="s", ack="manual") as events,
        ):
            await publish(one.address, 0, 100)
            found = await take(events, 60)
            await events.ack(found[49])
            one.kill()
            one.start()
            await events.ack(found[54])  # across the reconnect
            one.kill()

    run(before())
    one.start()

    async def after() -> None:
        async with (
            postroad.connect(one.address) as client,
            client.subscribe("t", durable="s", ack="manual") as events,
        ):
            assert numbers(list(await take(events, 45))) == list(range(55, 100))

    run(after())


BUSY = """
import asyncio, os, sys, time
import postroad

async def main():
    handled = 0
    async with postroad.connect(sys.argv[1]) as client, client.subscribe("t", durable="s") as events:
        async for event in events:
            began = time.perf_counter()
            if not handled:
                print(event.payload.decode(), flush=True)
            handled += 1
            if handled == 3000:
                os._exit(9)
            while time.perf_counter() - began < 0.0001:
                pass

asyncio.run(main())
"""


def test_a_handler_that_never_waits_and_dies_gets_the_last_milliseconds_again(brokers: Any) -> None:
    """D11: acknowledgements leave while a program reads what has come without waiting for anything."""
    (one,) = brokers.line(1)
    cli(one.address, "sub", "t", "--durable", "s", "--timeout", "0.1")
    run(publish(one.address, 0, 10_000))
    began = [
        int(
            subprocess.run(
                [sys.executable, "-c", BUSY, one.address],
                capture_output=True,
                text=True,
                timeout=60,
                env=os.environ | {"PYTHONPATH": str(SOURCE)},
                check=False,
            ).stdout
        )
        for _ in range(3)
    ]
    assert began[0] == 0
    for before, after in itertools.pairwise(began):
        assert before + 2999 - TURN_S / 0.0001 <= after <= before + 2999


def test_kill_9_of_the_command_repeats_the_last_lines(brokers: Any, tmp_path: Path) -> None:
    """D11.

    What is acknowledged was written before; what was written is acknowledged some milliseconds later.
    """
    (one,) = brokers.line(1)
    command = ("sub", "t", "--durable", "s")
    cli(one.address, *command, "--timeout", "0.1")
    run(publish(one.address, 0, 30_000))
    out = tmp_path / "out"
    with out.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "postroad", *command, "--broker", one.address],
            stdout=written,
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
        )
    until(lambda: out.stat().st_size > 100_000)
    process.kill()
    process.wait()
    printed = [int(line.split()[1]) for line in out.read_text().splitlines(keepends=True) if line[-1] == "\n"]
    assert printed == list(range(len(printed)))
    again = int(cli(one.address, *command, "--count", "1").stdout.split()[1])
    assert len(printed) - 1000 < again <= len(printed)


def test_who_is_replaced_hands_out_nothing_more(brokers: Any) -> None:
    """D11: another connection under the name has everything from there on; the first gets its error."""
    (one,) = brokers.line(1)

    async def work() -> None:
        async with postroad.connect(one.address) as first, postroad.connect(one.address) as second:
            old = await first.subscribe("t", durable="s")
            await publish(one.address, 0, 10)
            assert numbers([*await take(old, 1)]) == [0]
            new = await second.subscribe("t", durable="s")
            assert numbers([*await take(new, 10)]) == list(range(10))
            with pytest.raises(postroad.UsageError, match="taken by another connection"):
                await anext(old)

    run(work())


def test_a_client_that_closes_says_what_is_due(brokers: Any) -> None:
    """D11: who closes in good order is done with all that it was given."""
    (one,) = brokers.line(1)

    async def work() -> None:
        async with postroad.connect(one.address) as client:
            events = await client.subscribe("t", durable="s")
            await publish(one.address, 0, 10)
            assert numbers([*await take(events, 6)]) == list(range(6))
        async with postroad.connect(one.address) as client:
            events = await client.subscribe("t", durable="s")
            assert numbers([*await take(events, 4)]) == list(range(6, 10))

    run(work())


def test_since_a_time_in_the_past(brokers: Any) -> None:
    one, two = brokers.line(2)

    async def work() -> None:
        await reachable(two.address, 2)
        await publish(one.address, 0, 10)
        await asyncio.sleep(0.2)
        middle = datetime.now(UTC)
        await asyncio.sleep(0.2)
        await publish(one.address, 10, 20)
        async with postroad.connect(two.address) as client:
            async with client.subscribe("t", durable="middle", since=middle) as events:
                assert numbers(list(await take(events, 10))) == list(range(10, 20))
            hour = timedelta(hours=1)
            async with client.subscribe("t", durable="all", since=middle - hour) as events:
                assert numbers(list(await take(events, 20))) == list(range(20))
            with pytest.raises(postroad.UsageError, match="cannot begin in the future"):
                await client.subscribe("t", durable="late", since=middle + 24 * hour)

    run(work())


def test_the_command_line_begins_in_the_past_and_looks_without_taking(brokers: Any) -> None:
    """`sub --since`, `sub --ack manual`: what was only looked at comes again."""
    (one,) = brokers.line(1)
    run(publish(one.address, 0, 3))
    arguments = ("sub", "t", "--durable", "s", "--since", "1h", "--count", "3", "--timeout", "50")
    for ack in ("manual", "manual", "auto"):
        shown = cli(one.address, *arguments, "--ack", ack)
        assert shown.returncode == 0
        assert [line.split()[1] for line in shown.stdout.splitlines()] == ["0", "1", "2"]
    nothing = cli(one.address, *arguments[:-4], "--timeout", "0.5")
    assert (nothing.returncode, nothing.stdout) == (0, ""), "what was printed is acknowledged"
    for wrong, said in (
        (("--since", "1h"), "only a durable subscription"),
        (("--ack", "auto"), "give it a name with --durable"),
        (("--durable", "x", "--ack", "never"), "is not one of auto, batch, manual"),
        (("--durable", "x", "--since", "soon"), "'soon' is not a time such as"),
    ):
        refused = cli(one.address, "sub", "t", *wrong)
        assert refused.returncode == 2
        assert said in refused.stderr


def test_wrong_tokens_names_and_selectors_are_clear_errors(brokers: Any) -> None:
    """D3."""
    (one,) = brokers.line(1)

    async def work() -> None:
        async with postroad.connect(one.address) as client, client.subscribe("t", durable="s"):

            async def refused(topic: str = "t", **arguments: Any) -> str:
                with pytest.raises(postroad.UsageError) as failed:
                    await client.subscribe(topic, **arguments)
                return str(failed.value)

            assert "JSON object" in await refused(durable="x", token="garbage")
            assert "pubend" in await refused(durable="x", token='{"nonsense": 5}')
            tomorrow = (time.time_ns() // 1000) + 86_400_000_000
            (known,) = (await client.request("heads"))["heads"]
            assert "in the future" in await refused(durable="x", token=json.dumps({known: tomorrow}))
            with pytest.raises(postroad.UnavailableError, match="has not been heard here"):
                await client.subscribe("t", durable="x", token=json.dumps({"00000001-00000000": tomorrow}))
            assert "keeps nothing on disk" in await refused(durable="x", token='{"00000001-80000001": 5}')
            for name in ("x", "s"):
                with pytest.raises(postroad.UnavailableError, match="not known here"):
                    await client.subscribe("t", durable=name, token='{"00000001-00000000": 5}')
            assert "delete it first" in await refused("other", durable="s")
            assert "not shared" in await refused(durable="s", shared=True)
            assert "a durable subscription has a name" in await refused(durable="")
            assert "printable" in await refused(durable="a\nb")
            for wrong in ({"token": ""}, {"shared": True}, {"durable": "x", "key": "k"}, {"ack": "never"}):
                await refused(**wrong)
            status = await client.request("subs")
            assert [row["name"] for row in status["subscriptions"]] == ["s"], "nothing was created"

    run(work())


def test_however_many_there_are_all_are_listed_and_each_is_found(brokers: Any) -> None:
    """More than one answer of a broker has: `subs` asks for the rest, and for one by its name."""
    (one,) = brokers.line(1)
    names = [f"n{number:04}" for number in range(PAGE_ROWS + 1)]

    async def work() -> None:
        async with postroad.connect(one.address) as client, AsyncExitStack() as held:
            await asyncio.gather(
                *(held.enter_async_context(client.subscribe("t", durable=name)) for name in names)
            )

    run(work())
    listed = cli(one.address, "subs", "--json").stdout.splitlines()
    assert [json.loads(line)["name"] for line in listed] == names
    assert cli(one.address, "subs", names[-1]).stdout.startswith(names[-1])


def test_a_deleted_subscription_ends_and_is_gone(brokers: Any) -> None:
    """Also while it is connected; a new one of that name begins anew."""
    (one,) = brokers.line(1)

    async def work() -> None:
        async with postroad.connect(one.address) as client:
            async with client.subscribe("t", durable="s", ack="manual") as events:
                await publish(one.address, 0, 5)
                await take(events, 5)
                shown = json.loads((await asyncio.to_thread(cli, one.address, "subs", "--json")).stdout)
                assert (shown["name"], shown["lag_events"], shown["connected"]) == ("s", 5, True)
                assert 0 < shown["lag_s"] < 60
                deleted = await asyncio.to_thread(cli, one.address, "subs", "s", "--delete")
                assert (deleted.returncode, deleted.stderr) == (0, "")
                with pytest.raises(postroad.UsageError, match="'s' was deleted"):
                    await anext(events)
                with pytest.raises(postroad.UsageError, match="'s' was deleted"):
                    await events.ack()
            assert (await asyncio.to_thread(cli, one.address, "subs")).stdout == ""
            again = await asyncio.to_thread(cli, one.address, "subs", "s", "--delete")
            assert again.returncode == 2
            assert again.stderr == "postroad: there is no durable subscription 's' here\n"
            async with client.subscribe("t", durable="s") as events:
                await publish(one.address, 5, 6)
                assert numbers(list(await take(events, 1))) == [5]

    run(work())


def test_without_an_event_loop(brokers: Any) -> None:
    """Token of its own, tokens kept by the broker, acknowledgements, since, shared, gaps: as with one."""
    one, two = brokers.line(2)
    run(reachable(two.address, 2))
    with postroad.sync.connect(one.address) as publisher, postroad.sync.connect(two.address) as client:
        with client.subscribe("t", durable="own", token="", timeout=10) as events:
            start = events.token
            for n in range(20):
                assert publisher.publish("t", str(n), mode="durable").id
            found = []
            for event in events:
                found.append(event)
                if len(found) == 10:
                    break
            token = events.token
            events.ack()
        assert numbers(found) == list(range(10))
        assert start != token
        with (
            postroad.sync.connect(one.address) as other,  # another broker
            other.subscribe("t", durable="own", token=token) as events,
        ):
            assert numbers([events.get(10) for _ in range(10)]) == list(range(10, 20))
        for ack in ("auto", "batch", "manual"):
            since = datetime.fromtimestamp(0, UTC)
            with client.subscribe("t", durable=ack, ack=ack, since=since) as events:
                first = [events.get(10) for _ in range(7)]
                assert numbers(first) == list(range(7))
                if ack == "manual":
                    assert isinstance(first[4], postroad.Event)
                    events.ack(first[4])
            with client.subscribe("t", durable=ack, ack=ack) as events:
                assert numbers([events.get(10)]) == [5 if ack == "manual" else 7]
        with client.subscribe("t", durable="fails") as events:
            publisher.publish_many([("t", "20"), ("t", "21")], mode="durable")
        with contextlib.suppress(ZeroDivisionError), client.subscribe("t", durable="fails") as events:
            assert numbers([events.get(10), events.get(10)]) == [20, 21]
            raise ZeroDivisionError
        with client.subscribe("t", durable="fails") as events:
            assert numbers([events.get(10)]) == [21], "who fails is not done with what it was given last"
        with pytest.raises(postroad.UsageError):
            client.subscribe("t", shared=True)


def test_threads_divide_a_shared_subscription(brokers: Any) -> None:
    one, two = brokers.line(2)
    run(reachable(two.address, 2))
    found: list[list[int]] = [[], [], []]
    began = threading.Barrier(4)

    def consume(into: list[int]) -> None:
        with (
            postroad.sync.connect(two.address) as client,
            client.subscribe("t", durable="work", shared=True, timeout=5) as events,
        ):
            began.wait(60)
            into.extend(int(event.payload) for event in events if isinstance(event, postroad.Event))

    threads = [threading.Thread(target=consume, args=(into,)) for into in found]
    for thread in threads:
        thread.start()
    began.wait(60)
    run(publish(one.address, 0, 3_000))
    for thread in threads:
        thread.join(60)
    assert sorted(n for into in found for n in into) == list(range(3_000))
    assert all(len(into) > 300 for into in found), "all of them had a part"
    assert run_lag(two.address, "work") == 0


def run_lag(address: str, name: str) -> int:
    """The lag once acknowledgements have been taken."""
    found = -1
    until = time.monotonic() + 10
    while found and time.monotonic() < until:
        found = asyncio.run(lag(address, name))
    return found


CONSUMER = """
import sys, time, postroad
address, key = sys.argv[1:]
with postroad.sync.connect(address) as client:
    with client.subscribe("t", durable="work", shared=True, key=key) as events:
        print("ready", flush=True)
        for event in events:
            print(event.payload.decode(), flush=True)
            time.sleep(0.001)
"""


def test_what_a_killed_consumer_had_is_given_to_others_in_order(brokers: Any, tmp_path: Path) -> None:
    """Kill -9 of one of three consumers and of their broker: nothing is lost, and keys stay in order."""
    (one,) = brokers.line(1)
    logs = [tmp_path / f"consumer{n}" for n in range(3)]
    processes = []
    try:
        for log in logs:
            with log.open("w") as out:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", CONSUMER, one.address, "k"],
                        stdout=out,
                        env=os.environ | {"PYTHONPATH": str(SOURCE)},
                    )
                )
        until(lambda: all("ready" in log.read_text() for log in logs))

        async def work(first: int, last: int) -> None:
            async with postroad.connect(one.address) as client:
                events = (("t", f"{n % 7}:{n}", {"k": n % 7}) for n in range(first, last))
                await client.publish_many(events, mode="durable")

        run(work(0, 700))
        until(lambda: len(logs[0].read_text().split()) > 50)
        processes[0].kill()
        processes[0].wait()
        until(lambda: sum(len(log.read_text().split()) for log in logs) > 400)
        one.kill()
        one.start()
        run(work(700, 1400))
        until(lambda: len(seen(logs)) == 1400, 60)
        until(lambda: asyncio.run(lag(one.address, "work")) == 0, 60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for log in logs:
        for k in range(7):
            mine = [int(word.split(":")[1]) for word in log.read_text().split()[1:] if word[0] == str(k)]
            # After the broker's crash what was not confirmed comes again: each run is in order by itself.
            assert sum(a >= b for a, b in itertools.pairwise(mine)) <= 1, (log.name, k, mine)


def seen(logs: list[Path]) -> set[str]:
    return {word for log in logs for word in log.read_text().split()} - {"ready"}


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up, "it took too long"
        time.sleep(0.05)


def test_shared_from_the_command_line(brokers: Any) -> None:
    (one,) = brokers.line(1)
    wrong = cli(one.address, "sub", "t", "--shared")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("postroad: `shared` needs a durable name")
    cli(one.address, "sub", "t", "--durable", "g", "--shared", "--key", "k", "--timeout", "0.2")
    run(publish(one.address, 0, 6, k=1))
    shared = ("sub", "t", "--durable", "g", "--shared", "--key", "k", "--count")
    assert cli(one.address, *shared, "2").stdout == "t  0  k=1\nt  1  k=1\n"
    assert cli(one.address, *shared, "4").stdout.split("\n")[0] == "t  2  k=1"
    shown = cli(one.address, "subs", "g").stdout
    assert "g  t  at b1  away" in shown
    assert (
        "shared by key k: 0 events wait, 0 with consumers, 4 given to another, 0 rejected, 0 dead letters"
        in shown
    )


def test_a_publisher_stays_in_order_across_restarts_with_several_pubends(
    brokers: Any, tmp_path: Path
) -> None:
    """docs/reference/client.md: also with `pubends = 4`: the broker gives it another number at each start."""

    async def test() -> None:
        b1 = brokers.start("b1", extra=configured(tmp_path, "[durable]\npubends = 4\n"))
        async with (
            postroad.connect(b1.address, timeout=60) as reader,
            reader.subscribe("t", durable="s", token="") as events,
            postroad.connect(b1.address, timeout=60) as first,
            postroad.connect(b1.address, timeout=60) as second,
        ):
            streams: dict[int, set[str | None]] = {0: set(), 1: set()}
            for start in range(4):
                if start:
                    b1.kill()
                    b1.start()
                for who, publisher in enumerate((first, second)):
                    await publisher.publish("t", str(who).encode(), mode="durable")
                for _ in range(2):
                    event = await anext(aiter(events))
                    assert isinstance(event, postroad.Event)
                    streams[int(event.payload)].add(event.pubend)
            assert [len(found) for found in streams.values()] == [1, 1], streams

    run(test())
