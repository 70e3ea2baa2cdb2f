"""Issue 4, P4: stored filters are published once each, in order, whatever fails or restarts in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from tests.worlds.turns import Turns

from postroad.errors import StorageError
from postroad.history import filter_shipping
from postroad.history.bulletin_writer import BulletinWriter, Settled
from postroad.history.bulletins import Author, Bulletin, join_parts
from postroad.history.filter_shipping import RETRY_US, FilterShipping
from postroad.history.history import TABLE, read_row
from postroad.ids import MessageId
from postroad.seam.effects import Effect
from postroad.seam.storage import Save
from postroad.seam.tracking import ReadFilters, StoreFilter
from postroad.seam.turn import Turn
from postroad.storage.metadata import Metadata
from postroad.tracking.keys import ENTRY
from postroad.tracking.record import decode_meta, decode_record
from postroad.tracking.settings import TrackingConfig
from postroad.tracking.strategies import make_tracking
from postroad.units import SECOND_US

ME = 7
NOW_US = 1_700_000_000 * SECOND_US
PART_BYTES = 1000


class PaperWriter:
    """Writes everything into one frame, which is accepted when the test says so."""

    part_bytes = PART_BYTES

    def __init__(self) -> None:
        self.written: list[tuple[bytes, Bulletin]] = []
        self.waiting: list[Settled] = []
        self.lost: list[tuple[int, str]] = []

    def publish(self, _turn: Turn, bulletins: Iterable[tuple[bytes, Bulletin]], settled: Settled) -> int:
        made = list(bulletins)
        self.written += made
        if made:
            self.waiting.append(settled)
        return bool(made)

    def dropped(self, count: int, why: str) -> None:
        self.lost.append((count, why))


class Shipped:
    """A broker's tracking with small filters, its folder, and the shipping of what is stored there."""

    def __init__(self, strategy: str = "bloom") -> None:
        config = TrackingConfig(
            strategy=strategy,
            bits=8000,
            capacity=20,
            hashes=7,
            adaptive=False,
            retain=False,
            log_bytes=20 * ENTRY.itemsize,
        )
        self.tracking = make_tracking(config, me=ME, stored=(), changes=(), now_us=NOW_US)
        self.folder: dict[int, bytes] = {}
        self.rows: dict[bytes, bytes] = {}
        self.writer = PaperWriter()
        self.turns = Turns()
        self.turns.board.table(TABLE, read_row)
        self.now_us = NOW_US
        self.serial = 0
        self.shipping = self.start()

    def start(self) -> FilterShipping:
        return FilterShipping(
            table=TABLE,
            author=Author(broker=ME, name="b7"),
            boot=0,
            publisher=9,
            writer=cast(BulletinWriter, self.writer),
            tracking=self.tracking,
            rows=self.rows,
        )

    def fill(self, filters: int) -> None:
        """So many filters are stored."""
        for _ in range(filters):
            self.now_us += SECOND_US
            time_ms = self.now_us // 1000
            ids = [bytes(MessageId(1, ME, time_ms, self.serial + number)) for number in range(20)]
            self.serial += 20
            self.tracking.published(b"".join(ids), self.now_us)
            for effect in self.tracking.tick(self.now_us + SECOND_US):
                if isinstance(effect, StoreFilter):
                    self.folder[effect.sequence] = effect.record

    def step(self) -> list[Effect]:
        turn = self.turns.turn(self.now_us)
        self.shipping.tick(turn)
        return turn.effects

    def read(self, effects: list[Effect], folder: Mapping[int, bytes] | None = None) -> list[Effect]:
        (asked,) = effects
        assert isinstance(asked, ReadFilters)
        return self.turns.filters_read(asked, folder or self.folder, self.now_us).effects

    def save(self, effects: list[Effect]) -> None:
        (saved,) = effects
        assert isinstance(saved, Save)
        self.rows = dict(cast(Any, saved.rows))
        assert self.turns.written(saved, self.now_us).effects == []

    def settle(self, accepted: bool = True) -> None:
        for settled in self.writer.waiting:
            settled(self.turns.turn(self.now_us), accepted, 1)
        self.writer.waiting.clear()
        self.shipping.check()

    def ship(self) -> None:
        """Everything there is, with nothing failing."""
        while effects := self.step():
            self.save(self.read(effects))
            self.settle()

    def records(self) -> dict[int, bytes]:
        """What was written."""
        parts: dict[int, list[bytes]] = {}
        for _, one in self.writer.written:
            held = parts.setdefault(int(cast(int, one.attributes["sequence"])), [])
            assert one.attributes["part"] == len(held)
            held.append(one.payload)
        return {sequence: join_parts(payloads) for sequence, payloads in parts.items()}

    def sequences(self) -> list[int]:
        """Of the records that were written, which must be whole."""
        found = self.records()
        assert [decode_record(record)[0].sequence for record in found.values()] == list(found)
        return list(found)

    def is_described(self, sequence: int) -> bool:
        """Whether it is known what it was, and that it cannot be read."""
        record = self.records()[sequence]
        assert decode_meta(record) == decode_meta(self.folder[sequence])
        try:
            decode_record(record)
        except StorageError:
            return True
        return False


def test_what_is_stored_from_the_beginning_on_is_published_in_order() -> None:
    net = Shipped()
    net.fill(2)
    net.shipping.begin()
    assert net.step() == [], "what was stored before is not wanted"
    net.fill(3)
    net.ship()
    assert net.sequences() == [3, 4, 5]
    net.fill(1)
    net.ship()
    assert net.sequences() == [3, 4, 5, 6]
    assert net.writer.lost == []
    assert len({identity for identity, _ in net.writer.written}) == len(net.writer.written)


@pytest.mark.parametrize("restarts", [False, True])
def test_who_wants_them_again_gets_those_of_the_time_between(restarts: bool) -> None:
    """P4."""
    net = Shipped()
    net.fill(1)
    net.shipping.begin()
    net.fill(1)
    net.ship()
    net.rows = dict([net.shipping.row])
    net.fill(2)  # nobody wants these
    if restarts:
        net.shipping = net.start()
    net.shipping.begin()
    net.ship()
    assert net.sequences() == [2, 3, 4]


def test_however_many_are_owed_they_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: Found: all were gone through twice for each group, and at every question whether any is owed."""
    net = Shipped()
    net.fill(40)
    monkeypatch.setattr(filter_shipping, "READ_BYTES", 2 * len(net.folder[1]))
    found: list[int] = []
    after = net.tracking.stored_after

    def looked_for(sequence: int) -> list[int]:
        found.extend(after(sequence))
        return after(sequence)

    monkeypatch.setattr(net.tracking, "stored_after", looked_for)
    net.ship()
    assert net.sequences() == list(range(1, 41)) == found


def test_one_group_at_a_time_and_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Shipped()
    net.fill(5)
    size = len(net.folder[1])
    monkeypatch.setattr(filter_shipping, "READ_BYTES", 2 * size)
    effects = net.step()
    assert isinstance(effects[0], ReadFilters)
    assert effects[0].sequences == (1, 2)
    assert net.step() == [], "one is under way"
    net.save(net.read(effects))
    assert net.step() == [], "it waits for the disk"
    net.settle()
    net.ship()
    assert net.sequences() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("strategy", ["bloom", "exact"])
def test_of_a_record_that_is_too_large_it_is_told_what_it_was(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: Else a lake would take its times for whole."""
    net = Shipped(strategy)
    net.fill(2)
    monkeypatch.setattr(filter_shipping, "MAX_FILTER_BYTES", 10)
    monkeypatch.setattr(filter_shipping, "READ_BYTES", 10)
    while effects := net.step():
        net.save(effects)  # nothing was read
        net.settle()
    assert list(net.records()) == [1, 2]
    assert net.is_described(1)
    assert net.is_described(2)
    assert [count for count, why in net.writer.lost if "too large" in why] == [1, 1]


def test_a_group_that_may_have_been_published_is_so_again_under_the_same_ids() -> None:
    """A crash after the mark was saved: the next process cannot know, the pubend knows the ids."""
    net = Shipped()
    net.fill(3)
    net.save(net.read(net.step()))
    first = list(net.writer.written)
    assert first
    net.writer.written.clear()
    net.writer.waiting.clear()
    net.shipping = net.start()
    assert net.read(net.step()) == [], "its mark is saved already"
    assert net.writer.written == first
    net.settle()
    net.fill(1)
    net.ship()
    assert net.sequences() == [1, 2, 3, 4]


def test_a_restart_never_uses_a_sequence_again() -> None:
    """Even if the folder of filters is gone."""
    net = Shipped()
    net.fill(3)
    net.ship()
    net.tracking = make_tracking(TrackingConfig(), me=ME, stored=(), changes=(), now_us=net.now_us)
    net.shipping = net.start()
    assert net.tracking.last_sequence >= 3


@pytest.mark.parametrize("fails", ["mark", "events"])
def test_after_a_failure_it_is_tried_again_but_not_at_once(fails: str) -> None:
    net = Shipped()
    net.fill(2)
    effects = net.read(net.step())
    if fails == "mark":
        (saved,) = effects
        assert isinstance(saved, Save)
        net.turns.written(saved, net.now_us, StorageError("full"))
        assert net.writer.written == []
    else:
        net.save(effects)
        net.settle(accepted=False)
    ids = [identity for identity, _ in net.writer.written]
    assert net.step() == []
    assert net.shipping.next_deadline() == net.now_us + RETRY_US
    net.now_us += RETRY_US
    net.writer.written.clear()
    again = net.read(net.step())
    if fails == "mark":
        net.save(again)
    else:
        assert again == []
        assert [identity for identity, _ in net.writer.written] == ids
    net.settle()
    assert net.sequences() == [1, 2]
    assert net.step() == []


def test_of_what_cannot_be_read_it_is_told_what_it_was_and_of_what_was_dropped_nothing() -> None:
    """P5."""
    net = Shipped()
    net.fill(3)
    damaged = {1: net.folder[1], 2: b"x" + net.folder[2][1:], 3: net.folder[3]}
    net.save(net.read(net.step(), damaged))
    net.settle()
    assert [net.is_described(sequence) for sequence in (1, 2, 3)] == [False, True, False]
    assert net.writer.lost == [(1, "their stored filters cannot be read")]
    net.fill(1)
    asked = net.step()
    net.tracking.tick(net.now_us + 31 * 86_400 * SECOND_US)
    assert net.tracking.stored_after(0) == [], "retention dropped them"
    assert net.read(asked, {0: b""}) == []
    assert net.step() == [], "nothing is left of a group: it goes on with the next"
    assert list(net.records()) == [1, 2, 3]
    assert len(net.writer.lost) == 1


@pytest.mark.parametrize("readable_first", [True, False])
def test_what_can_be_read_only_once_has_its_parts_all_the_same(readable_first: bool) -> None:
    """P5: Some of them may be published, and are not once more."""
    net = Shipped()
    net.fill(1)
    folders = [net.folder, {1: b""}]
    net.save(net.read(net.step(), folders[not readable_first]))
    first = list(net.writer.written)
    net.settle(accepted=False)
    net.writer.written.clear()
    net.now_us += RETRY_US
    assert net.step() == []
    net.now_us += RETRY_US
    net.read(net.step(), folders[readable_first])
    assert [identity for identity, _ in net.writer.written] == [identity for identity, _ in first]
    assert net.is_described(1)
    mixed = join_parts([first[0][1].payload, *(one.payload for _, one in net.writer.written[1:])])
    assert decode_meta(mixed) == decode_meta(net.folder[1])
    net.settle()
    assert net.step() == []


@pytest.mark.parametrize("row", ["filters", "wanted"])
def test_a_row_that_cannot_be_read_is_damaged(tmp_path: Path, row: str) -> None:
    metadata = Metadata(tmp_path / "m.db")
    metadata.commit([(TABLE, [(row.encode(), b"nonsense")])])
    assert metadata.load(TABLE, read_row) == {}
    assert metadata.damaged(TABLE) == (row.encode(),)
    with pytest.raises(StorageError, match=f"row '{row}' of table history is damaged"):
        metadata.refuse_damaged(TABLE)
    metadata.close()
