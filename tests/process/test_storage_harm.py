"""What happens to a data folder behind a broker's back: nothing acknowledged is lost in silence (D12)."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.processes import Brokers, configured

import postroad
import postroad.sync

STARTS_S = 4  # as many as there are starts before it
COUNT = 20


def publish(address: str, first: int, count: int) -> None:
    with postroad.sync.connect(address) as client:
        for number in range(first, first + count):
            client.publish("t", str(number), mode="durable")


def publish_much(client: postroad.sync.Client) -> None:
    for _ in range(1000):
        client.publish("t", "x" * 50_000, mode="durable")


def read_up_to(address: str, last: str) -> tuple[list[str], list[postroad.Gap]]:
    payloads, gaps = [], []
    with postroad.sync.connect(address) as client, client.subscribe("t", durable="s") as events:
        while last not in payloads:
            item = events.get(timeout=60)
            if isinstance(item, postroad.Gap):
                gaps.append(item)
            else:
                payloads.append(item.payload.decode())
    return payloads, gaps


@pytest.mark.parametrize("end", ["stop", "kill -9"])
@pytest.mark.parametrize("harm", ["cut", "removed"])
def test_the_end_of_the_log_is_gone(brokers: Any, harm: str, end: str) -> None:
    """D12."""
    broker = brokers.start("b1")
    with postroad.sync.connect(broker.address) as client:
        client.subscribe("t", durable="s").close()
    publish(broker.address, 0, COUNT)
    if end == "stop":
        assert broker.stop() == 0
    else:
        broker.kill()
    (file,) = (broker.data / "log").glob("*.log")
    if harm == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        file.unlink()
    broker.start()
    publish(broker.address, COUNT, 1)
    payloads, gaps = read_up_to(broker.address, str(COUNT))
    had = len(payloads) - 1
    assert payloads == [*map(str, range(had)), str(COUNT)]
    assert (had > 0) == (harm == "cut")
    assert had < COUNT
    assert gaps
    assert all(before.end == after.start for before, after in pairwise(gaps))
    assert f"{file.name}: records that were synced are gone" in broker.log.read_text()


def test_the_last_events_before_kill_9_are_not_lost_in_silence(brokers: Any) -> None:
    """The file ends where a record ends: nothing in it looks torn."""
    broker = brokers.start("b1")
    with postroad.sync.connect(broker.address) as client:
        client.subscribe("t", durable="s").close()
        client.publish("t", "0", mode="durable")
        time.sleep(3)  # metadata is saved, which notes how far the log is synced
        (file,) = (broker.data / "log").glob("*.log")
        size = file.stat().st_size
        for number in range(1, COUNT):
            client.publish("t", str(number), mode="durable")
    broker.kill()
    os.truncate(file, size)
    broker.start()
    publish(broker.address, COUNT, 1)
    payloads, gaps = read_up_to(broker.address, str(COUNT))
    assert payloads == ["0", str(COUNT)]
    assert gaps
    assert f"{file.name}: records that were synced are gone" in broker.log.read_text()


def test_a_lost_database_is_replaced_by_its_copy_or_is_one_line_that_says_what_to_do(brokers: Any) -> None:
    broker = brokers.start("b1")
    publish(broker.address, 0, 1)
    assert broker.stop() == 0
    database, copy = broker.data / "postroad.db", broker.data / "postroad-copy.db"
    database.unlink()
    broker.start()
    assert f"{database} is lost: its copy" in broker.log.read_text()
    assert broker.stop() == 0
    database.unlink()
    copy.unlink()
    done = up(broker.data)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"postroad: {database} is lost, and {broker.data / 'log'} holds")
    assert not database.exists()


def test_a_database_put_back_from_a_backup_alone_is_not_believed(brokers: Any) -> None:
    """Its copy takes its place, or it is refused; killed or not. With the log of its time it serves."""
    broker = brokers.start("b1")
    with postroad.sync.connect(broker.address) as client:
        client.subscribe("t", durable="s").close()
    publish(broker.address, 0, 1)
    assert broker.stop() == 0
    backup, latest = broker.data.with_name("backup"), broker.data.with_name("latest")
    shutil.copytree(broker.data, backup)
    broker.start()
    publish(broker.address, 1, 1)
    broker.kill()
    shutil.copytree(broker.data, latest)
    for name in ("postroad.db-wal", "postroad.db-shm", "postroad-copy.db"):
        (broker.data / name).unlink(missing_ok=True)
    shutil.copy(backup / "postroad.db", broker.data)
    done = up(broker.data)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"postroad: {broker.data / 'postroad.db'} is older than the log beside it: put back the one that"
    )
    mixed = latest.with_name("mixed")
    shutil.copytree(latest, mixed)
    for name in ("postroad.db-wal", "postroad.db-shm"):
        (mixed / name).unlink(missing_ok=True)
    shutil.copy(backup / "postroad.db", mixed)
    for folder, wanted in ((latest, ["0", "1"]), (mixed, ["0", "1"]), (backup, ["0"])):
        shutil.rmtree(broker.data)
        shutil.copytree(folder, broker.data)
        broker.start()
        assert read_up_to(broker.address, wanted[-1]) == (wanted, [])
        assert broker.stop() == 0
    assert "is not its latest: its copy" in broker.log.read_text()


def test_a_hosting_broker_restored_from_a_backup_is_heard(
    brokers: Any, tmp_path: Path, until: Callable[..., None]
) -> None:
    """D7, D12: it has been started more often since. What it says is newer than what others know of it: its
    subscriptions get what is published from then on, and storage is released."""
    extra = configured(tmp_path, '[durable]\nkeep = "2 s"\n')
    origin = brokers.start("p", extra=extra)
    middle = brokers.start("m", origin.address, extra=extra)
    host = brokers.start("s", middle.address, extra=extra)
    with postroad.sync.connect(host.address) as client:
        client.subscribe("t", durable="s", ack="manual").close()
    assert host.stop() == 0
    backup = host.data.with_name("backup")
    shutil.copytree(host.data, backup)
    for _ in range(3):
        host.start()
        with postroad.sync.connect(host.address) as client:
            until(lambda: len(client.request("status")["brokers"]) == 3, "it is linked")
            client.subscribe("t", durable="s", ack="manual").close()
        assert host.stop() == 0
    # A boot number is the second of the start, or the last one plus one: quick starts run ahead of the clock.
    restored = time.monotonic() + STARTS_S
    shutil.rmtree(host.data)
    backup.rename(host.data)
    until(lambda: time.monotonic() >= restored, "the clock is past all starts")
    host.start()
    with (
        postroad.sync.connect(host.address) as client,
        client.subscribe("t", durable="s", ack="manual") as events,
        client.subscribe("u", durable="new", ack="manual") as others,
        postroad.sync.connect(origin.address) as publisher,
    ):
        for topic, subscription in (("t", events), ("u", others)):
            receipt = publisher.publish(topic, topic, mode="durable")
            got = subscription.get(timeout=20)
            assert got.id == receipt.id
            subscription.ack()

        def floor() -> int:
            return max(int(one["floor"]) for one in publisher.request("status")["durable_pubends"])

        until(lambda: floor() >= got.tick, "what was acknowledged is released")


def test_damaged_rows_lose_nothing_and_where_the_copy_is_damaged_too_it_is_one_line(brokers: Any) -> None:
    """D12: One bit of `durable.delivered` ended a broker at every start, one of a released tick lost all."""
    broker = brokers.start("b1")
    with postroad.sync.connect(broker.address) as client:
        client.subscribe("t", durable="s", ack="manual").close()
        client.subscribe("t", durable="own", token="").close()
    publish(broker.address, 0, COUNT)
    broker.kill()
    damaged = damage_every_table(broker.data / "postroad.db")
    tables = {"durable.owners", "durable.pubends", "durable.subscriptions", "log.lasts", "log.state"}
    assert tables <= damaged.keys()
    broker.start()
    assert "postroad.db is damaged: its copy postroad-copy.db has taken its place" in broker.log.read_text()
    assert read_up_to(broker.address, str(COUNT - 1)) == ([*map(str, range(COUNT))], [])
    broker.kill()
    broker.log.write_text("")
    broker.start()
    assert "is damaged" not in broker.log.read_text()
    assert broker.stop() == 0
    for name in ("postroad.db", "postroad-copy.db"):
        damaged = damage_every_table(broker.data / name)
    done = up(broker.data)
    assert (done.returncode, done.stdout) == (1, "")
    (refused,) = [one for one in done.stderr.splitlines() if one.startswith("postroad: ")]
    assert refused.startswith(f"postroad: cannot read {broker.data / 'postroad.db'}: row ")


def damage_every_table(path: Path) -> dict[str, bytes]:
    """A row of each."""
    with closing(sqlite3.connect(path)) as database, database:
        rows = dict(database.execute("SELECT name, max(key) FROM facts GROUP BY name").fetchall())
        for table, key in rows.items():
            database.execute("UPDATE facts SET value = x'ff' WHERE name = ? AND key = ?", (table, key))
    return rows


def test_a_damaged_last_record_is_one_gap_however_often_the_broker_starts(brokers: Any) -> None:
    """D12."""
    broker = brokers.start("b1")
    with postroad.sync.connect(broker.address) as client:
        for name in ("s", "later"):
            client.subscribe("t", durable=name, ack="manual").close()
        for number in range(COUNT):
            client.publish("t", f"number {number}", mode="durable")
    assert broker.stop() == 0
    (file,) = (broker.data / "log").glob("*.log")
    content = bytearray(file.read_bytes())
    content[content.rindex(f"number {COUNT - 1}".encode())] ^= 1
    file.write_bytes(content)
    for _ in range(2):
        broker.start()
        assert broker.stop() == 0
    broker.start()
    with postroad.sync.connect(broker.address) as client:
        client.publish("t", "after", mode="durable")
    for name in ("s", "later"):
        with (
            postroad.sync.connect(broker.address) as client,
            client.subscribe("t", durable=name, ack="manual") as events,
        ):
            found = [events.get(timeout=60) for _ in range(COUNT + 1)]
        before, gap, after = found[-3:]
        assert isinstance(gap, postroad.Gap)
        assert (before.payload, after.payload) == (f"number {COUNT - 2}".encode(), b"after")
        assert gap.end - gap.start < 1_000_000, "up to the lost event, not to when the broker started"
        broker.kill()
        broker.start()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("cannot mount a small file system here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_is_no_dead_end(small_disk: Path, until: Callable[..., None]) -> None:
    """D12.

    Kill -9 and a start on it, then what was acknowledged is read, acknowledged and gives its room back.
    """
    brokers = Brokers(small_disk)
    try:
        broker = brokers.start("b1")
        with postroad.sync.connect(broker.address) as client:
            client.subscribe("t", durable="s").close()
            taken = 0
            with suppress(postroad.StorageError):
                while taken < 10_000:
                    client.publish("t", f"{taken:05d}" + "x" * 50_000, mode="durable")
                    taken += 1
        assert 100 < taken < 10_000
        broker.kill()
        broker.start()
        with postroad.sync.connect(broker.address) as client:
            with pytest.raises(postroad.StorageError, match="the disk is full"):
                client.publish("t", "more", mode="durable")
            with client.subscribe("t", durable="s", ack="manual") as events:
                got = [events.get(timeout=60) for _ in range(taken)]
                assert [int(one.payload[:5]) for one in got] == list(range(taken))
                events.ack()

            def taken_again() -> bool:
                with suppress(postroad.StorageError):
                    client.publish("t", "more", mode="durable")
                    return True
                return False

            until(taken_again, "an event is taken again")
        said = re.findall(r" b1 the disk (is full|has room again): durable events", broker.log.read_text())
        assert said == ["is full", "is full", "has room again"]
    finally:
        brokers.end()


def test_what_is_not_tracked_on_a_full_disk_is_said_after_kill_9(
    small_disk: Path, tmp_path: Path, until: Callable[..., None]
) -> None:
    """T3, T9: also who got an event long after its time, for which nothing but the spared room was left."""
    brokers = Brokers(small_disk)
    try:
        broker = brokers.start("b1", extra=configured(tmp_path, '[tracking]\npersist = "500 ms"\n'))
        log = broker.data / "tracking" / "attachments.log"
        with postroad.sync.connect(broker.address) as client:
            client.subscribe("t", durable="s").close()
            first = client.publish("t", "first", mode="durable").id
            time.sleep(4)  # the time that counts as lost with the crash begins after it
            with suppress(postroad.StorageError):
                publish_much(client)
            with suppress(OSError), (small_disk / "junk").open("wb", buffering=0) as junk:
                while True:
                    junk.write(bytes(4096))
            before = log.stat().st_size
            with client.subscribe("t", durable="s", ack="manual") as events:
                assert events.get(timeout=60).id == first
                until(lambda: log.stat().st_size > before, "that it was handled is on the disk")
        broker.kill()
        (small_disk / "junk").unlink()
        broker.start()
        with postroad.sync.connect(broker.address) as client:
            assert client.trace(str(first)).verdict == "partial"
    finally:
        brokers.end()


class Muffled:
    """A line to a broker: what that says is held back unless it `hears`, and lost if the line is cut."""

    def __init__(self, port: int) -> None:
        self.hears = asyncio.Event()
        self.hears.set()
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        for pump in (self._pump(reader, far_writer, up=True), self._pump(far_reader, writer, up=False)):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if not up:
                    await self.hears.wait()
                writer.write(data)
        writer.close()

    def cut(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        self.hears.set()

    def close(self) -> None:
        self.cut()
        self._server.close()


async def _refused_unheard(broker: Any, disk: Path) -> list[str]:
    """Receipts, "" where there was none, of events published before, while and after a disk was full."""
    line = Muffled(int(broker.address.rpartition(":")[2]))
    async with postroad.connect(await line.start()) as client:

        async def publish(payload: str) -> str:
            with suppress(postroad.StorageError):
                return str((await client.publish("t", payload, mode="durable")).id)
            return ""

        receipts = [await publish("0")]
        junk = disk / "junk"
        with suppress(OSError), junk.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        line.hears.clear()
        under_way = [asyncio.create_task(publish("1" * 8000))]
        await asyncio.sleep(0.5)
        junk.unlink()
        under_way.append(asyncio.create_task(publish("2")))
        await asyncio.sleep(0.5)
        line.cut()
        receipts += await asyncio.wait_for(asyncio.gather(*under_way), 30)
        receipts.append(await publish("3"))
    line.close()
    return receipts


def test_a_refusal_that_was_lost_with_its_connection_is_no_receipt(small_disk: Path) -> None:
    """D1: What is sent again is logged, or refused again; not taken for a repetition."""
    brokers = Brokers(small_disk)
    try:
        broker = brokers.start("b1")
        with (
            postroad.sync.connect(broker.address) as client,
            client.subscribe("t", durable="s", ack="manual") as events,
        ):
            receipts = asyncio.run(_refused_unheard(broker, small_disk))
            assert all(receipts), "there is room by then"
            assert [str(events.get(timeout=30).id) for _ in receipts] == receipts
    finally:
        brokers.end()


def test_history_that_a_full_disk_made_go_is_not_taken_for_none(
    small_disk: Path, tmp_path: Path, until: Callable[..., None]
) -> None:
    """T3: retention goes on while the disk is full, and kill -9 does not make anybody forget that it did."""
    brokers = Brokers(small_disk)
    settings = '[tracking]\nkeep = "5 s"\npersist = "1 s"\nrenew = "1 s"\n'
    try:
        broker = brokers.start("b1", extra=configured(tmp_path, settings))
        with postroad.sync.connect(broker.address) as client:
            receipt = client.publish("t", "x")
            client.flush()
            assert client.trace(str(receipt.id)).verdict == "complete"
            until(lambda: list((broker.data / "tracking").glob("*.flt")), "it is stored")
            junk = small_disk / "junk"
            with suppress(OSError), junk.open("wb", buffering=0) as file:
                while file.write(bytes(65536)) == 65536:
                    pass
            with pytest.raises(postroad.StorageError):
                publish_much(client)
            until(lambda: client.trace(str(receipt.id)).verdict == "before-history", "it is dropped")
            until(lambda: not list((broker.data / "tracking").glob("*.flt")), "and its file is gone")
            broker.kill()
        junk.unlink()
        broker.start()
        with postroad.sync.connect(broker.address) as client:
            assert client.trace(str(receipt.id)).verdict == "before-history"
    finally:
        brokers.end()


def test_a_limit_is_not_lowered_under_durable_events(brokers: Any, tmp_path: Path) -> None:
    """They are intact, but nobody could be sent them: the start is refused, and nothing is lost by it."""
    broker = brokers.start("b1", extra=configured(tmp_path, ""))
    with postroad.sync.connect(broker.address) as client:
        client.subscribe("t", durable="s").close()
    publish(broker.address, 0, COUNT)
    assert broker.stop() == 0
    configured(tmp_path, '[limits]\nevent_bytes = "64 KiB"\n')
    done = up(broker.data, "--config", str(tmp_path / "broker.toml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "limits.event_bytes = 65536 is below the 1048576 " in done.stderr
    configured(tmp_path, "")
    broker.start()
    assert read_up_to(broker.address, str(COUNT - 1)) == (list(map(str, range(COUNT))), [])


def up(data: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "postroad", "up", "--data", str(data), "--listen", "127.0.0.1:0", *more],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
