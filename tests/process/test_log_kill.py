"""D12: a process killed with -9 under load; everything it acknowledged is readable afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

import postroad
from postroad.seam.storage import (
    Append,
    Appended,
    Chop,
    LogStream,
    Read,
    Save,
    Saved,
    StorageEffect,
    StreamKind,
)
from postroad.storage.commit import Storage
from postroad.units import MIB

SOURCE = Path(postroad.__path__[0]).parent
STREAMS = (1, 2, 3, 1 << 60)
ROUNDS = 5


def named(stream: int) -> LogStream:
    """Some of one kind, some of another."""
    return LogStream(StreamKind.EVENTS if stream < 3 else StreamKind.FILTERING, stream)


def payload(stream: int, tick: int) -> bytes:
    return f"{stream} {tick} ".encode() * (1 + tick * 7919 % 200)


def work(folder: Path) -> None:
    """Append, save and chop as fast as it goes; say what is chopped before, what is acknowledged after."""
    signal = threading.Event()
    storage = Storage(folder, wake=signal.set, segment_bytes=2 * MIB)
    states = storage.recovered.streams
    lasts = {stream: states[named(stream)].last if named(stream) in states else 0 for stream in STREAMS}
    asked: dict[int, str] = {}
    tag, row = 0, int.from_bytes(storage.load("test").get(b"row", b""), "big")
    while True:
        while len(asked) < 3000:
            effects: list[StorageEffect] = []
            for stream in STREAMS:
                tag, lasts[stream] = tag + 1, lasts[stream] + 1
                tick = lasts[stream]
                data = payload(stream, tick)
                effects.append(Append(stream=named(stream), first=tick - 1, last=tick, data=data, tag=tag))
                asked[tag] = f"append {stream} {tick}"
            if tag % 100 == 0:
                tag, row = tag + 1, row + 1
                effects.append(Save(table="test", rows=((b"row", row.to_bytes(8, "big")),), tag=tag))
                asked[tag] = f"save 0 {row}"
            if tag % 500 < 4:
                tick = max(0, lasts[1] - 5000)
                os.write(1, f"chop 1 {tick}\n".encode())
                effects.append(Chop(stream=named(1), tick=tick))
            storage.perform(effects)
        signal.wait()
        signal.clear()
        lines = []
        for outcome in storage.take():
            assert isinstance(outcome, Appended | Saved)
            lines.append(asked.pop(outcome.tag) + "\n")
        os.write(1, "".join(lines).encode())


def run_and_kill(folder: Path, seconds: float) -> list[list[str]]:
    """Whole lines the process said before it died."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "error"},
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    said += process.stdout.read()
    timer.join()
    assert process.wait(10) == -9
    process.stdout.close()
    return [line.split() for line in said.decode().split("\n")[:-1]]


def test_acknowledged_is_readable_after_kill_9(tmp_path: Path) -> None:
    chance = Random(5)
    acknowledged = dict.fromkeys(STREAMS, 0)
    chopped = saved = 0
    for round_ in range(ROUNDS):
        before = dict(acknowledged)
        for kind, stream, value in run_and_kill(tmp_path, chance.uniform(0.05, 0.6)):
            if kind == "append":
                acknowledged[int(stream)] = int(value)
            elif kind == "chop":
                chopped = max(chopped, int(value))
            else:
                saved = int(value)
        storage = Storage(tmp_path, wake=lambda: None)
        assert all(damage.torn for damage in storage.recovered.damage)
        assert int.from_bytes(storage.load("test").get(b"row", b""), "big") >= saved
        for stream, last in acknowledged.items():
            start = 0 if round_ == ROUNDS - 1 else max(0, before[stream] - 1000)
            start = max(start, chopped) if stream == 1 else start
            assert storage.recovered.streams[named(stream)].last >= last
            read = Read(stream=named(stream), start=start, end=last, limit_bytes=1 << 40, tag=0)
            done = storage.volume.read(read)
            assert done.missing == ()
            assert [one[1] for one in done.records] == list(range(start + 1, last + 1))
            assert all(data == payload(stream, tick) for _, tick, data in done.records)
        storage.close()
    assert min(acknowledged.values()) > 1000


if __name__ == "__main__":
    work(Path(sys.argv[1]))
