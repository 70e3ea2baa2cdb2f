"""`postroad backup` of a broker under load, `postroad restore`, and what becomes of data that went back."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.worlds.process_clients import Publisher, cli, linked, reachable, run
from tests.worlds.processes import KEEP, SOURCE, BrokerProcess, Brokers, configured, wait_until

import postroad
from postroad.queues.settings import QueueConfig


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "postroad", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        check=False,
    )


async def read_all(address: str, last: int) -> list[int | str]:
    """From the beginning up to that number; a Gap is "gap"."""
    got: list[int | str] = []
    async with (
        postroad.connect(address, timeout=60) as client,
        client.subscribe("t", durable="reader") as events,
    ):
        async for event in events:
            got.append("gap" if isinstance(event, postroad.Gap) else int(event.payload))
            if got[-1] == last:
                return got
    raise AssertionError(got)


def test_a_backup_under_load_has_all_that_was_answered_and_what_came_later_is_a_gap(brokers: Brokers) -> None:
    extra = configured(brokers.folder, KEEP)
    broker = brokers.start("b1", extra=extra)
    target = brokers.folder / "backup"

    async def load() -> tuple[int, int]:
        async with postroad.connect(broker.address) as client, client.subscribe("t", durable="reader"):
            pass
        publisher = Publisher(broker.address)
        task = asyncio.create_task(publisher.run())
        await asyncio.sleep(1)
        before = publisher.acknowledged[-1]
        made = await asyncio.to_thread(cli, broker.address, "backup", str(target), "--json")
        assert made.returncode == 0, made.stderr
        facts = json.loads(made.stdout)
        assert facts["broker"] == "b1"
        assert facts["files"] >= 4
        await asyncio.sleep(0.5)
        publisher.stopped = True
        await task
        return before, publisher.acknowledged[-1]

    async def check(before: int, last: int) -> None:
        async with postroad.connect(restored.address, timeout=60) as client:
            await client.publish("t", str(last + 1), mode="durable")
        got = await read_all(restored.address, last + 1)
        numbers = [number for number in got if number != "gap"]
        held = numbers[-2]
        assert isinstance(held, int)
        assert numbers == [*range(held + 1), last + 1]  # nothing is missing of what it has
        assert before <= held < last
        assert got[-2] == "gap"  # and what it lost is said

    before, last = 0, 0

    async def both() -> None:
        nonlocal before, last
        before, last = await load()

    run(both())
    broker.kill()
    shutil.rmtree(broker.data)
    put_back = command("restore", str(target), "--data", str(broker.data))
    assert put_back.returncode == 0, put_back.stderr
    assert f"postroad up --data {broker.data}" in put_back.stdout
    restored = broker.start()
    run(check(before, last))


def test_nonsense_is_refused_in_one_line_and_changes_nothing(brokers: Brokers, tmp_path: Path) -> None:
    broker = brokers.start("b1")
    target = tmp_path / "backup"
    assert command("backup", str(target), "--data", str(broker.data)).returncode == 0

    def refused(*arguments: str) -> str:
        before = sorted(path for path in tmp_path.rglob("*"))
        outcome = command(*arguments)
        assert outcome.returncode in (1, 2), outcome.stdout
        assert outcome.stderr.startswith("postroad: ")
        assert outcome.stderr.count("\n") == 1
        assert "Traceback" not in outcome.stderr
        assert sorted(path for path in tmp_path.rglob("*")) == before
        return outcome.stderr

    assert "is not empty" in refused("backup", str(target), "--data", str(broker.data))
    assert "in use by a broker" in refused("restore", str(target), "--data", str(broker.data))
    assert "is not the data folder of a broker" in refused(
        "backup", str(tmp_path / "x"), "--data", str(target / "log")
    )
    assert "no whole backup" in refused("restore", str(broker.data), "--data", str(tmp_path / "y"))
    database = target / "postroad.db"
    whole = database.read_bytes()
    database.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "is damaged" in refused("restore", str(target), "--data", str(tmp_path / "y"))
    database.write_bytes(whole)
    manifest = target / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"postroad.db"', '"../postroad.db"'))
    assert "not within a data folder" in refused("restore", str(target), "--data", str(tmp_path / "y"))
    manifest.write_text(text[:-10])
    assert "cannot be read" in refused("restore", str(target), "--data", str(tmp_path / "y"))


@pytest.mark.parametrize("running", [True, False])
def test_a_restored_broker_is_the_same_one(brokers: Brokers, tmp_path: Path, running: bool) -> None:
    broker = brokers.start("b1")
    number = json.loads(cli(broker.address, "status", "--json").stdout)["number"]
    if not running:
        assert broker.stop() == 0
    assert command("backup", str(tmp_path / "backup"), "--data", str(broker.data)).returncode == 0
    if running:
        assert broker.stop() == 0
    folder = tmp_path / "other"
    assert command("restore", str(tmp_path / "backup"), "--data", str(folder), "--json").returncode == 0
    for path in folder.rglob("*"):
        assert not path.stat().st_mode & 0o077, path
    other = brokers.start("b1", extra=("--data", str(folder)))
    status = json.loads(cli(other.address, "status", "--json").stdout)
    assert (status["number"], status["name"]) == (number, "b1")


async def send(address: str, numbers: range) -> None:
    async with postroad.connect(address, timeout=60) as client:
        for number in numbers:
            await client.application("shop").send("inventory", str(number).encode(), kind="transactional")


async def accept(address: str, count: int) -> list[int]:
    """The numbers of the next messages."""
    got: list[int] = []
    async with postroad.connect(address, timeout=60) as client:
        async for message in client.application("inventory").inbox():
            await message.accept()
            got.append(int(message.payload))
            if len(got) == count:
                return got
    raise AssertionError(got)


def accepted(address: str, count: int) -> list[int]:
    return asyncio.run(asyncio.wait_for(accept(address, count), 60))


def ring_node(address: str) -> str:
    return str(json.loads(cli(address, "status", "--json").stdout)["ring"]["node"])


def restored_folder(backup: Path, broker: BrokerProcess) -> None:
    shutil.rmtree(broker.data)
    outcome = command("restore", str(backup), "--data", str(broker.data))
    assert outcome.returncode == 0, outcome.stderr


def test_a_restored_broker_joins_the_queues_of_those_that_went_on_as_a_new_node(
    brokers: Brokers, tmp_path: Path
) -> None:
    """Responsibility 2: it has forgotten what it promised, and votes no more."""
    running = brokers.ring(3)
    first, *others = running
    run(send(first.address, range(20)))
    assert command("backup", str(tmp_path / "b"), "--data", str(first.data)).returncode == 0
    assert accepted(others[0].address, 10) == [*range(10)]
    run(send(others[1].address, range(20, 30)))
    before = ring_node(first.address)
    first.kill()
    restored_folder(tmp_path / "b", first)
    first.start()
    assert ring_node(first.address) != before
    assert accepted(first.address, 20) == [*range(10, 30)]
    # It keeps its new id from then on, and has a place in the ring again.
    joined = ring_node(first.address)
    assert first.stop() == 0
    first.start()
    assert ring_node(first.address) == joined
    wait_until(lambda: len(leaves(first.address)) == 2, "it knows both others")


def leaves(address: str) -> list[str]:
    found: list[str] = json.loads(cli(address, "status", "--json").stdout)["ring"]["leaves"]
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_queues_of_a_network_that_is_restored_whole_go_on_after_a_rescue(
    brokers: Brokers, tmp_path: Path, count: int
) -> None:
    """Responsibility 8: nobody is left who knows what was promised after the backups."""
    running = brokers.line(count)
    run(send(running[0].address, range(10)))
    for broker in running:
        backup = tmp_path / f"{broker.name}.backup"
        assert command("backup", str(backup), "--data", str(broker.data)).returncode == 0
    for broker in running:
        broker.kill()
    for broker in running:
        restored_folder(tmp_path / f"{broker.name}.backup", broker)
        broker.start()
    run(reachable(running[-1].address, count))
    asked = cli(running[-1].address, "queues", "rescue")
    assert "all but what backups brought back" in asked.stdout, asked
    assert cli(running[-1].address, "queues", "rescue", "--yes").returncode == 0
    assert accepted(running[-1].address, 10) == [*range(10)]
    run(send(running[0].address, range(10, 12)))
    assert accepted(running[0].address, 2) == [10, 11]


def test_a_restore_that_was_cut_short_leaves_nothing_that_starts(brokers: Brokers, tmp_path: Path) -> None:
    broker = brokers.start("b1")
    run(send(broker.address, range(1)))
    assert command("backup", str(tmp_path / "b"), "--data", str(broker.data)).returncode == 0
    assert broker.stop() == 0
    restored_folder(tmp_path / "b", broker)
    # As a kill before the last step leaves it.
    (broker.data / "postroad.db").rename(broker.data / "postroad.db.unfinished")
    outcome = command("up", "--listen", "127.0.0.1:0", "--data", str(broker.data))
    assert outcome.returncode == 1
    assert "postroad.db is lost" in outcome.stderr


# A broker that offers a rescue after half a second of what it offers one after ten.
SOON = (
    "-c",
    "from postroad.queues import reports; reports.UNFILLED_US = 500_000; "
    "from postroad.cli import main; raise SystemExit(main())",
)


@pytest.mark.parametrize("count", [1, 2])
def test_queues_go_on_after_a_rescue_where_no_log_has_its_end(brokers: Brokers, count: int) -> None:
    """Responsibility 8: the copies are read up to where they end, and only if an administrator says so."""
    running: list[BrokerProcess] = []
    for number in range(count):
        running.append(brokers.start(f"b{number}", *(one.address for one in running), program=SOON))
    first, last = running[0], running[-1]
    run(linked(*running))
    run(send(first.address, range(1)))
    wait_until(lambda: replicas(first.address) == {count}, "each message is on all of them")
    run(send(first.address, range(1, 10)))
    wait_until(lambda: at_rest(running), "what was written last is synced: it is not torn")
    for broker in running:
        broker.kill()
    for broker in running:
        newest = max((broker.data / "log").glob("*.log"))
        with newest.open("r+b") as log:
            log.truncate(newest.stat().st_size - 1)
        broker.start()
        wait_until(lambda: "arcs of queues lack records" in broker.log.read_text(), "it says so")  # noqa: B023
    run(linked(*running))
    wait_until(lambda: rescuable(last.address) == QueueConfig().arcs, "every arc can be rescued")
    assert cli(last.address, "queues", "rescue", "--yes").returncode == 0
    assert accepted(last.address, 9) == [*range(9)]


def test_queues_go_on_before_a_damaged_record_after_a_rescue(brokers: Brokers) -> None:
    """Responsibility 8: what is behind it says nothing without it, but what is before it is still here."""
    broker = brokers.start("b0", program=SOON)
    first = 70_000_000
    run(send(broker.address, range(first, first + 10)))
    assert broker.stop() == 0
    damage(broker, str(first + 5).encode())
    broker.start()
    wait_until(lambda: "1 arcs of queues lack records" in broker.log.read_text(), "it says so")
    wait_until(lambda: rescuable(broker.address) == 1, "the arc can be rescued")
    assert cli(broker.address, "queues", "rescue", "--yes").returncode == 0
    run(send(broker.address, range(first + 20, first + 30)))
    assert accepted(broker.address, 5) == [*range(first, first + 5)]
    broker.kill()
    broker.start()
    assert accepted(broker.address, 10) == [*range(first + 20, first + 30)], (
        "what came later is behind no hole"
    )


def test_a_replica_with_a_damaged_record_is_filled_so_that_its_log_is_whole_again(brokers: Brokers) -> None:
    """Else each later start would stop at that record, though the replica has confirmed what came since."""
    first = brokers.start("b0")
    last = brokers.start("b1", first.address)
    run(linked(first, last))
    run(send(first.address, range(70_000_000, 70_000_001)))
    wait_until(lambda: replicas(first.address) == {2}, "each message is on both of them")
    run(send(first.address, range(70_000_001, 70_000_020)))
    assert last.stop() == 0
    damage(last, b"70000015")
    last.start()
    run(linked(first, last))
    wait_until(lambda: replicas(first.address) == {2}, "both have all")
    assert last.log.read_text().count("arcs of queues lack records") == 1
    assert last.stop() == 0
    last.start()
    run(linked(first, last))
    wait_until(lambda: replicas(first.address) == {2}, "both have all")
    assert last.log.read_text().count("arcs of queues lack records") == 1
    assert accepted(last.address, 20) == [*range(70_000_000, 70_000_020)]


def damage(broker: BrokerProcess, within: bytes) -> None:
    """Change one bit of the record of its log that has this."""
    (log,) = [path for path in (broker.data / "log").glob("*.log") if within in path.read_bytes()]
    data = bytearray(log.read_bytes())
    data[data.index(within)] ^= 1
    log.write_bytes(data)


def at_rest(running: list[BrokerProcess]) -> bool:
    def sizes() -> list[int]:
        return [log.stat().st_size for broker in running for log in (broker.data / "log").glob("*.log")]

    before = sizes()
    time.sleep(0.5)
    return sizes() == before


def replicas(address: str) -> set[int]:
    return {len(row["replicas"]) for row in json.loads(cli(address, "queues", "--json").stdout)["queues"]}


def rescuable(address: str) -> int:
    return len(json.loads(cli(address, "queues", "rescue", "--json").stdout)["arcs"])


def test_arcs_whose_replicas_are_all_gone_begin_anew_after_a_rescue(brokers: Brokers, tmp_path: Path) -> None:
    """Responsibility 8: though a majority of their electors is left."""
    extra = configured(tmp_path, "[queues]\nreplicas = 1\n")
    running: list[BrokerProcess] = []
    for number in range(3):
        running.append(brokers.start(f"b{number}", *(one.address for one in running), extra=extra))
    first, *_, last = running
    run(linked(*running))
    wait_until(lambda: responsible_for(last.address) > 0, "the last one has its share")
    assert rescuable(first.address) == 0
    lost = responsible_for(last.address)
    last.kill()
    wait_until(lambda: rescuable(first.address) == lost, "what only that one had can be rescued")
    assert cli(first.address, "queues", "rescue", "--yes").returncode == 0
    served = QueueConfig().arcs
    wait_until(lambda: sum(map(responsible_for, (first.address, running[1].address))) == served, "all serve")


def responsible_for(address: str) -> int:
    return int(json.loads(cli(address, "status", "--json").stdout)["queues"]["responsible_for"])
