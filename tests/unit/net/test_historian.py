"""T3: what tracking asks to be kept is kept in order by a thread; a disk that fails costs history only."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import pytest

from postroad.ids import MessageId
from postroad.net import historian, log
from postroad.net.historian import Historian
from postroad.net.log import Complaints
from postroad.seam.tracking import (
    DropFilters,
    NotKept,
    ReplaceAttachments,
    StoreAttachments,
    StoreFilter,
    TrackingEffect,
)
from postroad.storage.tracking_store import SPARE_BYTES, TrackingStore
from postroad.tracking.attachment import AttachmentMap
from postroad.tracking.attachment_log import SNAPSHOT, EncodedParts, encode_changes
from postroad.tracking.keys import PUBLISH, HistoryKey
from postroad.tracking.query.messages import Finding, TraceItem, TraceQuestion
from postroad.tracking.record import FilterMeta, encode_record
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import Tracking, make_tracking
from postroad.units import SECOND_US

KEY = HistoryKey(PUBLISH)
RECORD_BYTES = 1000


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_COMPLAINTS", Complaints())


def effect(sequence: int, replaces: int | None = None) -> StoreFilter:
    meta = FilterMeta(
        key=KEY,
        sequence=sequence,
        m=RECORD_BYTES * 8,
        n=10,
        k=3,
        count=1,
        lo_ms=sequence,
        hi_ms=sequence,
        replaces=replaces,
        final=True,
    )
    record = encode_record(meta, bytes([sequence % 256]) * RECORD_BYTES)
    return StoreFilter(sequence=sequence, record=record, replaces=replaces)


async def read(keeper: Historian, *sequences: int) -> Mapping[int, bytes]:
    answer: asyncio.Future[Mapping[int, bytes]] = asyncio.get_running_loop().create_future()

    def deliver(tag: int, records: Mapping[int, bytes]) -> None:
        assert tag == 7
        answer.set_result(records)

    keeper.read(7, sequences, deliver)
    return await asyncio.wait_for(answer, 20)


def opened(folder: Path) -> TrackingStore:
    store = TrackingStore(folder)
    store.load()
    return store


def test_effects_are_done_in_order_and_read_after_what_came_before(tmp_path: Path) -> None:
    refused: list[tuple[TrackingEffect, ...]] = []

    async def test() -> None:
        keeper = Historian(opened(tmp_path))
        for sequence in range(1, 50):
            keeper.keep((effect(sequence, replaces=sequence - 1 if sequence > 1 else None),), refused.append)
        found = await read(keeper, 49, 1)
        assert found == {49: effect(49, replaces=48).record, 1: b""}
        keeper.keep((effect(50), effect(51)), refused.append)
        keeper.close()  # all that was handed over is kept
        assert keeper.dropped == 0

    asyncio.run(test())
    assert refused == []
    assert [meta.sequence for meta in TrackingStore(tmp_path).load().filters] == [49, 50, 51]


def test_on_a_full_disk_history_is_only_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What room is left is for what releases durable events."""

    refused: list[tuple[TrackingEffect, ...]] = []

    async def test() -> None:
        full = False
        keeper = Historian(opened(tmp_path), shortage=lambda: "the disk is full" if full else "")
        keeper.keep((effect(1), effect(2)), refused.append)
        full = True
        keeper.keep((effect(3), DropFilters(sequences=(1,), record=b"")), refused.append)
        assert await read(keeper, 1, 2, 3) == {1: b"", 2: effect(2).record, 3: b""}
        full = False
        keeper.keep((effect(4),), refused.append)
        keeper.close()
        assert keeper.dropped == 1

    asyncio.run(test())
    assert refused == [(effect(3),)]
    assert "the disk is full: the history of messages is not stored" in caplog.text
    assert {2, 4} <= {meta.sequence for meta in TrackingStore(tmp_path).load().filters} <= {1, 2, 4}


def test_a_disk_that_fails_costs_history_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused: list[tuple[TrackingEffect, ...]] = []

    async def test() -> None:
        keeper = Historian(opened(tmp_path))
        keeper.keep((effect(1),), refused.append)
        assert await read(keeper, 1) == {1: effect(1).record}
        shutil.rmtree(tmp_path / "tracking")
        (tmp_path / "tracking").write_text("no folder any more")
        keeper.keep((effect(2), effect(3)), refused.append)
        assert await read(keeper, 1, 2) == {1: b"", 2: b""}
        assert keeper.dropped == 2
        keeper.close()

    asyncio.run(test())
    assert refused == [(effect(2), effect(3))]
    assert "the history of messages could not be stored" in caplog.text


def test_a_disk_that_stays_full_or_fails_is_complained_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And again at growing intervals, as of everything that goes on."""

    async def test() -> None:
        full = True
        keeper = Historian(opened(tmp_path), shortage=lambda: "the disk is full" if full else "")
        for sequence in range(1, 18):
            keeper.keep((effect(sequence),), lambda _: None)
        full = False
        shutil.rmtree(tmp_path / "tracking")
        (tmp_path / "tracking").write_text("no folder any more")
        for _ in range(5):
            keeper.keep((effect(18),), lambda _: None)
            await read(keeper, 1)
        keeper.close()
        assert keeper.dropped == 17 + 5

    asyncio.run(test())
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
    assert caplog.text.count("the disk is full") == 1
    assert caplog.text.count("could not be stored") == 1


def test_a_disk_that_stalls_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits for the disk is bounded; when it has caught up, history goes on."""
    monkeypatch.setattr(historian, "MAX_PENDING_BYTES", 3 * len(effect(1).record))

    refused: list[tuple[TrackingEffect, ...]] = []

    async def test() -> None:
        keeper = Historian(opened(tmp_path))
        for sequence in range(1, 6):  # the loop gets no turn in between to hear that some are written
            keeper.keep((effect(sequence),), refused.append)
        assert keeper.dropped == 2
        await read(keeper, 1)
        keeper.keep((effect(6),), refused.append)
        assert keeper.dropped == 2
        keeper.close()

    asyncio.run(test())
    assert refused == [(effect(4),), (effect(5),)]
    assert caplog.text.count("the disk is too slow") == 1
    assert [meta.sequence for meta in TrackingStore(tmp_path).load().filters] == [1, 2, 3, 6]


def test_one_failure_costs_what_was_handed_over_behind_it_and_no_more(tmp_path: Path) -> None:
    """T3: However many come: each that is refused would make the next one come too late to know of it."""

    class Once(TrackingStore):
        failed = False

        def apply(self, effects: Iterable[TrackingEffect]) -> None:
            effects = tuple(effects)
            if effects and not self.failed:
                self.failed = True
                raise OSError(errno.EIO, "Input/output error")
            super().apply(effects)

    refused: list[tuple[TrackingEffect, ...]] = []

    async def test() -> None:
        store = Once(tmp_path)
        store.load()
        keeper = Historian(store)
        for sequence in range(1, 40):
            keeper.keep((effect(sequence),), refused.append)
            await asyncio.sleep(0)
        await read(keeper, 1)
        for sequence in range(40, 60):
            keeper.keep((effect(sequence),), refused.append)
        keeper.close()
        assert len(refused) == 1
        kept = {meta.sequence for meta in TrackingStore(tmp_path).load().filters}
        lost = {one.sequence for one in refused[0] if isinstance(one, StoreFilter)}
        assert kept | lost == set(range(1, 60))
        assert not kept & lost
        assert set(range(40, 60)) <= kept
        assert keeper.dropped == len(lost)

    asyncio.run(test())


class NoFilters(TrackingStore):
    """On a slow disk that has room for a change of the map, but for no filter."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Event()

    def apply(self, effects: Iterable[TrackingEffect]) -> None:
        effects = tuple(effects)
        if any(isinstance(effect, StoreFilter) for effect in effects):
            self.gate.wait(20)
            raise OSError(errno.ENOSPC, "No space left on device")
        super().apply(effects)


@pytest.mark.parametrize("told", [False, True])
def test_what_comes_behind_a_failure_does_not_vouch_for_it(tmp_path: Path, told: bool) -> None:
    """T3: that a process stopped in order, with everything stored, says only who knows what is not."""
    start_us = 1_700_000_000 * SECOND_US
    identity = bytes(MessageId(5, 7, start_us // 1000, 0))

    def begun(store: TrackingStore, now_us: int) -> Tracking:
        found = store.load()
        return make_tracking(
            TrackingConfig(), me=7, stored=found.filters, changes=found.changes, now_us=now_us
        )

    async def test() -> None:
        store = NoFilters(tmp_path)
        tracking = begun(store, start_us - SECOND_US)
        keeper = Historian(store)
        refused: list[tuple[TrackingEffect, ...]] = []
        keeper.keep(tuple(tracking.tick(start_us - SECOND_US)), refused.append)
        tracking.published(identity, start_us)
        now_us = start_us + SECOND_US + TrackingConfig().persist_us
        keeper.keep(tuple(tracking.tick(now_us)), refused.append)
        if told:
            store.gate.set()
            await read(keeper)
            (effects,) = refused
            tracking.not_kept(NotKept(effects=effects), now_us)
        keeper.keep(tuple(tracking.close(now_us)), refused.append)
        store.gate.set()
        keeper.close()
        await asyncio.sleep(0)
        (effects,) = refused  # all of it at once
        assert len(effects) == (1 if told else 2)

    asyncio.run(test())
    store = TrackingStore(tmp_path)
    changes = store.load().changes
    assert any(change.what == "stop" for change in changes) == told
    assert finding(store, begun(store, start_us + 60 * SECOND_US), identity).lost


def test_a_map_that_is_written_anew_is_that_of_its_moment(tmp_path: Path) -> None:
    """T4: The thread makes it into bytes, later, while the map changes; what changes follows it."""
    now_us = 1_700_000_000 * SECOND_US
    held, news = AttachmentMap.restored((), last_stored_us=0, now_us=now_us)
    held.attached("subscriber", "bob", now_us)
    held.late("subscriber", "bob", 5, 6, now_us)
    for number in range(5000):
        held.attached("subscriber", f"s{number}", now_us)
        held.detached("subscriber", f"s{number}", now_us + number)
    then = sorted(held.spans(), key=str)
    refused: list[tuple[TrackingEffect, ...]] = []

    async def test() -> None:
        keeper = Historian(opened(tmp_path))
        keeper.keep((StoreAttachments(record=encode_changes(news)),), refused.append)
        keeper.keep((ReplaceAttachments(parts=EncodedParts(held.snapshot(now_us))),), refused.append)
        changes = held.attached("subscriber", "ann", now_us)
        changes += held.detached("subscriber", "bob", now_us + 9)
        changes += held.late("subscriber", "bob", 10**6, 10**6, now_us)
        held.forget(now_us + 1000, now_us)
        keeper.keep((StoreAttachments(record=encode_changes(changes)),), refused.append)
        keeper.close()

    asyncio.run(test())
    assert refused == []
    found = TrackingStore(tmp_path).load().changes
    ends = [at for at, change in enumerate(found) if change.who == SNAPSHOT]
    assert sorted(AttachmentMap.of(found[: ends[0] + 1]).spans(), key=str) == then
    assert [change.who for change in found[ends[0] + 1 :]] == ["ann", "bob", "bob"]


def finding(store: TrackingStore, tracking: Tracking, identity: bytes) -> Finding:
    question = TraceQuestion(items=(TraceItem(id=identity, origin=7),))
    records: dict[int, bytes] = {}
    while wanted := tracking.answer(question, records)[1]:
        records |= store.read(wanted)
    return tracking.answer(question, records)[0].findings[0]


class SmallDisk(TrackingStore):
    """With room for so many bytes."""

    room = 1 << 40

    @property
    def used(self) -> int:
        return sum(path.stat().st_size for path in self._folder.iterdir())

    def _finish(self, file: BinaryIO) -> None:
        file.flush()
        if self.used > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._finish(file)

    def _hold_spare(self) -> None:
        if not self._spared and self.used + SPARE_BYTES > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._hold_spare()


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("known", [True, False], ids=["short", "not known to be short"])
def test_what_a_full_disk_costs_of_other_times_is_said_after_kill_9(
    tmp_path: Path, strategy: str, known: bool
) -> None:
    """T3, T9: also if it has been full for hours, and such messages came all the time."""
    start_us = 1_700_000_000 * SECOND_US
    config = TrackingConfig(strategy=strategy, persist_us=SECOND_US, renew_us=SECOND_US)

    def begun(store: TrackingStore, now_us: int) -> Tracking:
        found = store.load()
        return make_tracking(config, me=7, stored=found.filters, changes=found.changes, now_us=now_us)

    def killed(identity: bytes, now_us: int) -> str:
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        store = TrackingStore(shutil.copytree(tmp_path / "data", tmp_path / "killed"))
        return finding(store, begun(store, now_us), identity).lost

    async def test() -> None:
        store = SmallDisk(tmp_path / "data")
        now_us = start_us
        tracking = begun(store, now_us)
        full = False
        keeper = Historian(store, shortage=lambda: "the disk is full" if full and known else "")
        refused: list[tuple[TrackingEffect, ...]] = []
        serial = 0

        async def publish(time_us: int) -> bytes:
            nonlocal serial
            serial = (serial + 1) % 65536
            identity = bytes(MessageId(5, 7, time_us // 1000, serial))
            tracking.published(identity, now_us)
            for later_us in (now_us, now_us + SECOND_US // 10):
                keeper.keep(tuple(tracking.tick(later_us)), refused.append)
                await read(keeper)
                for effects in refused:
                    tracking.not_kept(NotKept(effects=effects), later_us)
                refused.clear()
            return identity

        while now_us < start_us + 7200 * SECOND_US:
            now_us += 60 * SECOND_US
            await publish(now_us)
        store.room, full = store.used, True
        before = (tmp_path / "data" / "tracking" / "attachments.log").stat().st_size
        odd: list[bytes] = []
        for number in range(1000):
            now_us += 20 * SECOND_US
            await publish(now_us)
            if number % 5 == 0 and number < 100:
                odd.append(await publish(start_us + number * 60 * SECOND_US))  # some of its first 100 minutes
                assert killed(odd[-1], now_us + SECOND_US)
            await publish(now_us - 1800 * SECOND_US)  # and one who is late all the time
        late = await publish(now_us - 1800 * SECOND_US)
        for identity in (*odd, late):
            assert killed(identity, now_us + SECOND_US)
        said = (tmp_path / "data" / "tracking" / "attachments.log").stat().st_size - before
        assert said < SPARE_BYTES // 2, "some is left for what is dropped"

        store.room, full = 1 << 40, False
        for _ in range(60):
            now_us += SECOND_US
            await publish(now_us)
        now_us += 3600 * SECOND_US
        await publish(now_us)
        keeper.close()
        tracking.check()
        assert (tmp_path / "data" / "tracking" / "spare").stat().st_size == SPARE_BYTES

    asyncio.run(test())


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
@pytest.mark.parametrize("known", [True, False], ids=["short", "not known to be short"])
@pytest.mark.parametrize("spared", [True, False], ids=["room was spared", "nothing is left"])
def test_what_retention_drops_is_said_also_on_a_full_disk(
    tmp_path: Path, strategy: str, known: bool, spared: bool
) -> None:
    """T3: kill -9 then, and the next process does not take what is gone for what never was."""
    start_us = 1_700_000_000 * SECOND_US
    config = TrackingConfig(
        strategy=strategy, persist_us=SECOND_US, renew_us=SECOND_US, keep_us=60 * SECOND_US
    )
    identity = bytes(MessageId(5, 7, start_us // 1000 + 1000, 0))

    def begun(store: TrackingStore, now_us: int) -> Tracking:
        found = store.load()
        return make_tracking(config, me=7, stored=found.filters, changes=found.changes, now_us=now_us)

    def killed(at_s: int) -> Finding:
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        store = TrackingStore(shutil.copytree(tmp_path / "data", tmp_path / "killed"))
        return finding(store, begun(store, start_us + at_s * SECOND_US), identity)

    async def run(tracking: Tracking, keeper: Historian, from_s: int, to_s: int) -> None:
        refused: list[tuple[TrackingEffect, ...]] = []
        for at_s in range(from_s, to_s):
            now_us = start_us + at_s * SECOND_US
            tracking.published(bytes(MessageId(5, 7, now_us // 1000, 1)), now_us)
            tracking.attached(f"s{at_s}", now_us)
            keeper.keep(tuple(tracking.tick(now_us)), refused.append)
            await read(keeper)
            for effects in refused:
                tracking.not_kept(NotKept(effects=effects), now_us)
            refused.clear()

    async def test() -> None:
        store = SmallDisk(tmp_path / "data")
        tracking = begun(store, start_us)
        full = False
        keeper = Historian(store, shortage=lambda: "the disk is full" if full and known else "")
        tracking.published(identity, start_us + SECOND_US)
        await run(tracking, keeper, 1, 40)
        assert finding(store, tracking, identity).published is not None

        store.room, full = store.used - (0 if spared else SPARE_BYTES), True
        stored = list((tmp_path / "data" / "tracking").glob("*.flt"))
        await run(tracking, keeper, 40, 120)
        if not spared:
            assert killed(100).published is not None, "nothing went without a word"
            store.room += 100
            await run(tracking, keeper, 120, 131)
        assert not any(path.exists() for path in stored), "what is dropped makes room"
        assert (killed(150).published, killed(150).forgotten) == (None, True)

        store.room, full = 1 << 40, False
        await run(tracking, keeper, 140, 160)
        keeper.close()
        tracking.check()
        assert (tmp_path / "data" / "tracking" / "spare").stat().st_size == SPARE_BYTES

    asyncio.run(test())
